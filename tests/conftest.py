"""Fixtures that every test folder shares."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy and torch start their threads; child processes inherit it

import numpy as np
import pytest

from medflare.evaluation import figures

REFERENCE = Path(__file__).parent / "reference"
REAL_IMAGES = Path(__file__).resolve().parents[2] / "shared" / "data"

# What files take in `make test` on two cores, roughly and in minutes; those that start FLARE's processes mostly wait for them.
MINUTES = {
    "e2e/test_parity": 9,
    "e2e/test_faults_provisioned": 8,
    "e2e/test_provisioned": 8,
    "e2e/test_guide": 4,
    "e2e/test_faults": 3,
    "e2e/test_embedded": 3,
    "e2e/test_recipes": 2,
    "federation/test_resume": 2,
    "test_contributing": 2,
    "studies/test_published": 2,
    "methods/test_catalogue": 1.5,
    "test_speed": 1,
    "federation/test_gate": 1,
    "federation/test_incoming": 1,
    "federation/test_local": 1,
    "flare/test_formula": 0.5,
    "flare/test_executors": 0.5,
}
PER_FILE, PER_TEST = 1.0, 0.004  # minutes: of other files that start FLARE's processes, and of a test in one that starts none

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
    """No test can cut the power, which is what waiting for the disk is for; a killed process loses nothing without it.

    Python keeps what it compiles.
    """
    os.fsync = lambda fd: None
    sys.dont_write_bytecode = False  # that it is not written is common in containers, and here hundreds of processes import the package
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files are handed to the worker processes in this order: those that wait among those that compute, of both the longest first.

    So no core is idle, and all processes end at about the same time. What takes long runs without the measurement of coverage, which
    would make it a third longer; the others reach the same lines.
    """
    for item in items:
        if item.get_closest_marker("slow") or _starts_flare(item) or item.path.as_posix().removesuffix(".py").endswith(REPEATED):
            item.add_marker(pytest.mark.no_cover)

    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    kinds: tuple[dict[Path, float], dict[Path, float]] = {}, {}
    for path, tests in files.items():
        waits = _starts_flare(tests[0])
        name = Path(os.path.relpath(path, Path(__file__).parent)).with_suffix("").as_posix()
        kinds[waits][path] = MINUTES.get(name, PER_FILE if waits else PER_TEST * len(tests))
    begins = {path: share for kind in kinds for path, share in _shares(kind)}
    items[:] = [item for path in sorted(files, key=begins.__getitem__) for item in files[path]]


def _starts_flare(item: pytest.Item) -> bool:
    return item.get_closest_marker("e2e") is not None


def _shares(minutes: Mapping[Path, float]) -> Iterator[tuple[Path, float]]:
    """Each file, the longest first, and the share of all minutes that lies before it."""
    total, before = sum(minutes.values()), 0.0
    for path in sorted(minutes, key=lambda path: -minutes[path]):
        yield path, before / total
        before += minutes[path]


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
