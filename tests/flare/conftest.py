"""What tests of this room share."""

import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest


@pytest.fixture
def simulator() -> "Iterator[subprocess.Popen[bytes]]":
    """A process that a host takes for its simulator. Its hosts, children of the process that tests, are gone when the test is over."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
    before = psutil.Process().children()
    yield process
    process.kill()
    process.wait()
    _, left = psutil.wait_procs(set(psutil.Process().children()) - set(before), timeout=30)
    assert not left
