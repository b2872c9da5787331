"""What tests of this room share."""

import subprocess
import sys
from collections.abc import Iterator

import pytest


@pytest.fixture
def simulator() -> "Iterator[subprocess.Popen[bytes]]":
    """A process that a host takes for its simulator."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
    yield process
    process.kill()
    process.wait()
