"""Threads of OpenMP, with which torch computes. Light to import: before torch, which reads it."""

from collections.abc import MutableMapping


def limit_spinning(environment: MutableMapping[str, str]) -> None:
    """Let OpenMP's threads sleep soon while they wait, unless the user has chosen.

    If they spin, training on cores that others use takes up to five times as long. The number of
    threads, which decides the last bits, stays.
    """
    if not environment.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}:
        # GNU OpenMP's own value if there are more threads than cores.
        environment["GOMP_SPINCOUNT"] = "1000"
