"""Ports on which the simulator's processes find each other.

FLARE 2.9 asks the system for a free port, gives it back, and starts the site's process, which listens on it seconds later. The
system meanwhile hands the same port to any connection of any process, on a busy machine often enough: the site's process then ends
with "Address already in use", and the run goes on without the site. Ports below those that the system hands out are nobody's.

Nor may anything listen there before the site's process does. FLARE starts several of them at once, each by a fork that holds, until it
has become the new program, copies of all sockets that other threads have open: one that listened only to find out whether the
port was free still lets FLARE in, and then resets the connection, which FLARE takes for the end of the site.
"""

import random
import socket
import sys
from contextlib import suppress
from typing import Final

_RUNNER: Final = "nvflare.private.fed.app.simulator.simulator_runner"
_FIRST, _LAST = 10_000, 30_000  # above what services use, below what Linux (from 32768) and others (from 49152) hand out


def keep_ports_apart() -> None:
    """The simulator of this process, if it is one, takes its sites' ports from below those that the system hands out."""
    runner = sys.modules.get(_RUNNER)
    if runner is not None:
        runner.get_open_ports = quiet_ports  # type: ignore[attr-defined]


def quiet_ports(number: int) -> list[int]:
    """So many different ports on which nobody listens, and which no connection is given.

    Args:
        number: how many.
    """
    found: set[int] = set()
    draw = random.SystemRandom()  # no seed: two simulators of one machine must not draw the same
    while len(found) < number:
        port = draw.randrange(_FIRST, _LAST)
        with suppress(OSError), socket.socket() as bound:
            bound.bind(("localhost", port))
            found.add(port)
    return sorted(found)
