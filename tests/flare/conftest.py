"""What tests of this room share."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from medflare.cli.startup_kit import template
from medflare.flare.jobs.building import build_job


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


@pytest.fixture
def party(tmp_path: Path) -> Path:
    """The kit of a site with a job's folder in it."""
    root = tmp_path / "site-1"
    (root / "startup").mkdir(parents=True)
    (root / "local").mkdir()
    (root / "local" / "resources.json").write_text(json.dumps(template("site", "resources.json")))
    build_job("fedavg", "phantom", byoc=False, out=tmp_path / "job")
    shutil.copytree(tmp_path / "job" / "app", root / "4711" / "app_site-1")
    return root
