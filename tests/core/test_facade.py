"""What a package offers from its facade is there, and nothing else."""

import importlib

import pytest

FACADES = [f"medflare.methods{room}" for room in ("", ".fedavg", ".fedsm", ".prr", ".grace", ".iop_fl", ".feddag")]


@pytest.mark.parametrize("package", FACADES)
def test_every_public_name_is_there(package: str) -> None:
    facade = importlib.import_module(package)
    missing = [name for name in facade._PUBLIC if not hasattr(facade, name)]
    assert facade._PUBLIC and not missing


def test_another_name_is_not() -> None:
    facade = importlib.import_module("medflare.methods")
    with pytest.raises(AttributeError, match=r"module 'medflare\.methods' has no attribute 'Methods'"):
        _ = facade.Methods
