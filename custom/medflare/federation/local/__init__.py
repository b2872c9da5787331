"""The plain loop: a whole federation on one machine, without FLARE."""

from medflare.federation.local.loop import resume_local, run_local

__all__ = ["resume_local", "run_local"]
