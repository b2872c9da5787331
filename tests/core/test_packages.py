"""A package that is not there is named, with the way to get it."""

import subprocess
import sys

import pytest

from medflare.core import packages
from medflare.core.errors import ConfigError, DataError
from medflare.core.packages import installed, require


def test_what_is_there_passes() -> None:
    assert installed("torch")
    require("torch", "everything")


def test_what_is_missing_is_named_as_pip_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "find_spec", lambda module: None)
    assert not installed("PIL")
    with pytest.raises(DataError, match="pillow"):
        require("PIL", "scan.png: a picture", DataError)
    with pytest.raises(ConfigError, match="pip install pydicom"):
        require("pydicom", "DICOM")


def test_at_its_end_a_process_sets_aside_what_it_has_imported() -> None:
    code = "import atexit, gc; from medflare.core.packages import end_quickly; atexit.register(lambda: print(gc.get_freeze_count() > 0))"
    for call, said in (("", "False"), ("; end_quickly()", "True")):
        assert subprocess.run([sys.executable, "-c", code + call], capture_output=True, text=True, check=True).stdout.strip() == said
