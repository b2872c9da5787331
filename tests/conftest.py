"""Fixtures that every test folder shares."""

import os
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy and torch start their threads; child processes inherit it

import numpy as np
import pytest

from medflare.evaluation import figures

REFERENCE = Path(__file__).parent / "reference"
REAL_IMAGES = Path(__file__).resolve().parents[2] / "shared" / "data"

# Files that take minutes, and the longest of those that start no FLARE processes; each the longest first.
LONG = (
    "test_faults_provisioned",
    "test_parity",
    "test_provisioned",
    "test_guide",
    "test_faults",
    "test_recipes",
    "test_embedded",
    "test_memory",
    "test_ten_faults",
    "test_stock_workflow",
    "test_speed",
    "test_resume",
    "test_incoming",
    "test_gate",
    "test_contributing",
    "test_catalogue",
    "test_local",
    "test_formula",
    "test_executors",
)

# Whole runs once more, for every method, fault, order or interruption: what they show is no line that others do not reach.
REPEATED = (
    "federation/test_gate",
    "federation/test_incoming",
    "federation/test_odd_federations",
    "federation/test_patience",
    "federation/test_replies",
    "federation/test_resume",
    "federation/test_workers",
    "methods/test_catalogue",
    "methods/test_volumes",
    "privacy/test_settings",
)


def pytest_configure() -> None:
    """No test can cut the power, which is what waiting for the disk is for; a killed process loses nothing without it."""
    os.fsync = lambda fd: None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first and quick tests last: files are handed to the worker processes in this order, and all end at about the same time.

    What takes long runs without the measurement of coverage, which would make it a third longer; the others reach the same lines.
    """
    for item in items:
        if item.get_closest_marker("slow") or item.get_closest_marker("e2e") or item.path.as_posix().removesuffix(".py").endswith(REPEATED):
            item.add_marker(pytest.mark.no_cover)

    def place(item: pytest.Item) -> int:
        if item.path.stem in LONG:
            return LONG.index(item.path.stem)
        return len(LONG) + (item.get_closest_marker("e2e") is None)

    items.sort(key=place)


_DRAW = figures.as_svg


@pytest.hookimpl(tryfirst=True)  # before the fixtures of a whole module
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Reports of runs without their figures, which take longer to draw than a tiny network to train; tests/evaluation draws all of them."""
    drawn = "evaluation" in item.path.parts or item.get_closest_marker("figures")
    figures.as_svg = _DRAW if drawn else lambda draw, *size, **layout: "<svg></svg>"


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
