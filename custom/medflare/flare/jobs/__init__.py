"""From a method, a task and settings to a FLARE job, and to the job that takes up an interrupted one."""

from typing import Any

from medflare.core.facade import public

_PUBLIC = dict.fromkeys(("FederationJob", "JobSettings", "build_job", "resumed_job"), "building")


def __getattr__(name: str) -> Any:
    return public(__name__, _PUBLIC, name)
