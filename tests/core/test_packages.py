"""A package that is not there is named, with the way to get it."""

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
    with pytest.raises(DataError, match=r"^scan.png: a picture needs the package pillow, .* pip install pillow$"):
        require("PIL", "scan.png: a picture", DataError)
    with pytest.raises(ConfigError, match="pip install pydicom"):
        require("pydicom", "DICOM")
