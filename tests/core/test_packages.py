import platform
import subprocess
import sys

import pytest
import torch

from medflare.core import packages
from medflare.core.errors import ConfigError, DataError
from medflare.core.packages import installed, installed_versions, require


def test_installed_packages_and_their_versions() -> None:
    assert installed("torch")
    require("torch", "everything")
    versions = installed_versions()
    assert (
        versions["python"] == platform.python_version() and versions["torch"] == torch.__version__
    )
    assert set(versions) <= {"python", "medflare", "nvflare", "torch", "monai", "numpy"}


def test_a_missing_package_is_named_as_pip_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "find_spec", lambda module: None)
    assert not installed("PIL")
    with pytest.raises(DataError, match="pillow"):
        require("PIL", "scan.png: a picture", DataError)
    with pytest.raises(ConfigError, match="pip install pydicom"):
        require("pydicom", "DICOM")


def test_a_process_ends_without_garbage_collection() -> None:
    code = "import atexit, gc; from medflare.core.packages import end_quickly; atexit.register(lambda: print(gc.get_freeze_count() > 0))"
    for call, frozen in (("", "False"), ("; end_quickly()", "True")):
        assert (
            subprocess.run(
                [sys.executable, "-c", code + call], capture_output=True, text=True, check=True
            ).stdout.strip()
            == frozen
        )
