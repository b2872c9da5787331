"""Fixtures that every test folder shares."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

# Before numpy and torch start their threads; child processes inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest

from helpers.picture_sites import edit, make_site, make_task
from medflare.evaluation import figures

__all__ = ["edit", "make_site", "make_task"]
REFERENCE = Path(__file__).parent / "reference"
REAL_IMAGES = Path(__file__).resolve().parents[2] / "shared" / "data"


def pytest_configure() -> None:
    # No test can cut the power, and a killed process loses nothing without it.
    os.fsync = lambda fd: None
    sys.dont_write_bytecode = False  # that it is not written is common in containers, and here hundreds of processes import the package
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that start FLARE's processes come first, as they take longest; they and slow tests run without the measurement of coverage."""
    for item in items:
        if item.get_closest_marker("slow") or item.get_closest_marker("e2e"):
            item.add_marker(pytest.mark.no_cover)
    items.sort(key=lambda item: item.get_closest_marker("e2e") is None)


_DRAW = figures.Drawing.svg


def _undrawn(drawing: figures.Drawing, name: str) -> str | None:
    return "<svg></svg>"


@pytest.hookimpl(tryfirst=True)  # before the fixtures of a whole module
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Reports of runs without their figures, which take longer to draw than a tiny network to train; tests/evaluation draws all of them."""
    drawn = "evaluation" in item.path.parts or item.get_closest_marker("figures")
    figures.Drawing.svg = _DRAW if drawn else _undrawn  # type: ignore[method-assign, assignment]


@pytest.fixture(scope="session")
def golden() -> Callable[[str], dict[str, np.ndarray]]:
    """Loads a file of reference numbers by name, for example `golden("fedsm")`; reference/README.md says what they are."""

    def load(name: str) -> dict[str, np.ndarray]:
        with np.load(REFERENCE / f"{name}.npz", allow_pickle=False) as file:
            return {key: file[key] for key in file.files}

    return load


@pytest.fixture(scope="session")
def shared_data() -> Callable[[str], Path]:
    """The folder of a real federation by name, for example `shared_data("brain_lgg")`; patients' images stay out of the repository."""

    def folder(name: str) -> Path:
        path = REAL_IMAGES / name
        if not path.exists():
            pytest.skip(f"the real images of {name} are not beside the checkout")
        return path

    return folder
