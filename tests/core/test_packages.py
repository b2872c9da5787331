import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from foreign.install import METHOD, describe, install
from medflare.core import packages
from medflare.core.errors import ConfigError, DataError
from medflare.core.packages import (
    code_versions,
    extension_modules,
    installed,
    installed_versions,
    require,
)


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


def test_the_code_of_a_package_is_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(install(tmp_path)))
    monkeypatch.delitem(sys.modules, METHOD, raising=False)  # of an earlier test, in another folder
    packages._code_hash.cache_clear()
    first = code_versions(["damped_fedavg.inner", "medflare", "json"])
    assert first["damped-fedavg"] == "0.1" and "medflare code" in first
    assert extension_modules([METHOD]) == {"damped_fedavg"} and not extension_modules(["dice"])
    codes = {first["damped-fedavg code"]}
    describe(tmp_path, "broken", {"broken": "damped_fedavg METHOD"})
    packages._distribution.cache_clear()
    assert code_versions(["damped_fedavg"]).keys() == {"damped-fedavg", "damped-fedavg code"}
    assert extension_modules([METHOD, "broken"]) == {"damped_fedavg", "damped_fedavg METHOD"}
    file = tmp_path / "damped_fedavg" / "more.py"
    for change in (lambda: file.write_text("x = 1"), lambda: file.rename(file.with_name("n.py"))):
        change()
        packages._code_hash.cache_clear()
        codes.add(code_versions(["damped_fedavg"])["damped-fedavg code"])
    assert len(codes) == 3, "also another name of a file is other code"
    (tmp_path / "lab_nets.py").write_text("x = 1")
    assert list(code_versions(["lab_nets"])) == ["lab_nets code"], "a file without a distribution"
    assert code_versions(["no_such_package"]) == {}
