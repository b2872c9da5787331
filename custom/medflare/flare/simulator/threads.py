"""How threads wait where several sites compute on one machine, in the simulator and in a proof of concept.

Where nobody names a number of threads every site takes all cores. Threads of OpenMP wait awake for each other, and so keep those of the
other sites from working: four sites take more than twice as long on two cores. Threads that soon sleep do not; how many there are, which
decides on the last bits, stays.
"""

import os
from collections.abc import MutableMapping
from contextlib import suppress
from typing import Final

import psutil

_SPINS: Final = ("GOMP_SPINCOUNT", "1000")  # GNU OpenMP's own number where it knows that threads outnumber cores
_SAID: Final = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
_PARTY: Final = "nvflare.private.fed.app.client.client_train"  # FLARE's module that a site's process runs as long as the site is up


def sleep_soon(environment: MutableMapping[str, str]) -> None:
    """Let threads soon sleep while they wait, unless the user has said how they are to.

    Args:
        environment: of a process that has not loaded torch yet.
    """
    if not any(name in environment for name in _SAID):
        environment.update([_SPINS])


def share_cores() -> None:
    """`sleep_soon` for this process, where further sites of a federation are up on this machine, as in a proof of concept."""
    if _sites_here() > 1:
        sleep_soon(os.environ)


def _sites_here() -> int:
    found = 0
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it ended meanwhile, or is another user's
            found += _PARTY in process.cmdline()
    return found
