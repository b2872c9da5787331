"""Personalized and generalizing federated learning for medical imaging, as NVIDIA FLARE applications.

`medflare.run_local` runs a federation in one process; the job folders, recipes and the `medflare` command run the same algorithms
under FLARE.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from medflare.federation.local.loop import run_local

__version__ = "0.3.0"
__all__ = ["__version__", "run_local"]


def __getattr__(name: str) -> Any:
    """`run_local` on first use: importing the package must stay cheap, FLARE does it in every process of every site."""
    if name == "run_local":
        from medflare.federation.local.loop import run_local

        return run_local
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """What there is, `run_local` too before its first use."""
    return sorted({*globals(), *__all__})
