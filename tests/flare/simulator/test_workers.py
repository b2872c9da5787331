"""A site's process that dies in FLARE's simulator is noticed, whether or not its parent has noticed."""

import subprocess
import sys

from medflare.flare.simulator.workers import Workers
from waiting import eventually


def worker(site: str) -> "subprocess.Popen[bytes]":
    """A process with the command line of a site's."""
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "-o", "workspace", "--client", site, "--port", "1"])


def test_a_process_that_is_killed_is_dead_and_one_that_never_was_is_not() -> None:
    workers = Workers()
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "--client"])
    processes = {site: worker(site) for site in ("A", "B")}
    try:
        assert workers.dead() == set()
        processes["A"].kill()
        assert eventually(lambda: workers.dead() == {"A"}, seconds=10), "nobody has waited for it yet"
        processes["A"].wait()
        processes["C"] = worker("C")
        assert eventually(lambda: workers.dead() == {"A"}, seconds=10)
        processes["D"] = worker("A")
        assert eventually(lambda: workers.dead() == set(), seconds=10), "its next task has another process"
    finally:
        for process in (other, *processes.values()):
            process.kill()
            process.wait()
