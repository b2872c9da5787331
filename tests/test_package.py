"""What a session with the package alone shows, and the mistakes of the first minutes: one line each, before anything is trained."""

import subprocess
import sys
from typing import Any

import pytest

import medflare
from medflare.core.errors import ConfigError


def test_run_local_is_seen_before_it_is_used() -> None:
    code = "import sys, medflare; assert 'run_local' in dir(medflare); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}, check=True)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"rounds": 0}, "rounds is 0, which trains nothing, and task phantom starts from random weights; give 1 or more"),
        ({"rounds": -1}, "rounds"),
        ({"sites": "clinic1"}, r"sites = 'clinic1': give a list of site names, for example \['clinic1'\]"),
        ({"sites": 0}, "name at least one site"),
    ],
)
def test_mistakes_of_the_first_minutes(settings: dict[str, Any], reason: str) -> None:
    given: dict[str, Any] = {"sites": 2, "rounds": 1, **settings}
    with pytest.raises(ConfigError, match=reason):
        medflare.run_local("fedavg", "phantom", given.pop("sites"), seed=0, **given)
