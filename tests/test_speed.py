"""Engines beside a bare PyTorch loop, in processor time: bounds that only a regression of about 2 x breaks."""

import argparse
import ctypes
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from e2e.simulation import environment
from helpers.small_tasks import tiny_grades
from medflare.flare.jobs.building import build_job

SITES = 2
ROUNDS = 4

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def compare() -> ModuleType:
    """benchmarks/compare.py."""
    spec = importlib.util.spec_from_file_location(
        "compare", Path(__file__).resolve().parents[1] / "benchmarks" / "compare.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def floor(compare: ModuleType) -> float:
    """Processor seconds of the bare loop, after everything has been imported and the images are made."""
    hospitals = list(map(compare.hospital, range(SITES)))
    compare.floor(hospitals, 1)
    return float(compare.processor_seconds(lambda: compare.floor(hospitals, ROUNDS)))


def test_the_plain_loop_costs_little_beside_training(compare: ModuleType, floor: float) -> None:
    # 1.9 when this was written.
    assert compare.processor_seconds(lambda: compare.loop(SITES, ROUNDS, 1)) < 3.5 * floor


def test_the_simulators_sites_share_one_import_of_torch(
    compare: ModuleType, floor: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Beside the training there are FLARE's processes, and one import of torch at the server and one for all sites."""
    imports = tmp_path / "imports"
    for name, value in environment(TORCH_IMPORTS=str(imports)).items():
        monkeypatch.setenv(name, value)
    job = build_job("fedavg", tiny_grades(), rounds=ROUNDS, out=tmp_path / "job")
    # 7.7 when this was written, on busy cores.
    assert compare.processor_seconds(lambda: compare.simulator(job, SITES, SITES)) < 15 * floor
    assert len(imports.read_text().splitlines()) == 2


def test_nothing_is_adopted_afterwards(compare: ModuleType) -> None:
    """Processes that outlive their parents become this one's children while it measures; later ones would stay as zombies."""
    compare.processor_seconds(lambda: None)
    adopts = ctypes.c_int(-1)
    assert ctypes.CDLL(None).prctl(37, ctypes.byref(adopts), 0, 0, 0) == 0  # PR_GET_CHILD_SUBREAPER
    assert adopts.value == 0


def test_a_rival_that_fails_is_left_out_and_nothing_else_is(
    compare: ModuleType,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    def measured(name: str, *_: object) -> dict[str, float]:
        if name == broken:
            raise SystemExit(f"{name}: exit code 1")
        return {"seconds": 2.0, "call": 1.0, "processor": 2.0, "megabytes": 100.0}

    monkeypatch.setattr(compare, "measured", measured)
    monkeypatch.setattr(
        compare, "engines", lambda *_: dict.fromkeys(("floor", "loop", "pfl 0.6.0"))
    )
    options = argparse.Namespace(sites=2, rounds=1, repeats=2, only=None)
    broken = "pfl 0.6.0"
    compare.show(options, tmp_path / "job")
    captured = capsys.readouterr()
    assert captured.err.count("pfl 0.6.0: exit code 1; left out") == 1
    assert [line.split(" | ")[0] for line in captured.out.splitlines()[2:]] == ["| floor", "| loop"]
    broken = "loop"
    with pytest.raises(SystemExit, match="loop: exit code 1"):
        compare.show(options, tmp_path / "job")
