"""The trial of a task in a fork of the test's process, which need not import torch and MONAI again."""

import io
import sys
from multiprocessing import get_context
from pathlib import Path
from subprocess import CompletedProcess, TimeoutExpired
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import monai.networks.nets  # before the fork
import monai.transforms  # noqa: F401
import pytest

from medflare.data import trial


def fork_trials(patch: pytest.MonkeyPatch) -> None:
    """Until the patch is undone, `trial.try_task` forks where it would start Python."""
    patch.setattr(trial, "subprocess", SimpleNamespace(run=_forked, TimeoutExpired=TimeoutExpired))


def _forked(command: list[str], input: str, **options: Any) -> "CompletedProcess[str]":
    """As `subprocess.run` of `medflare.data.trial`."""
    *_, memory, seconds = command
    with TemporaryDirectory() as folder:
        process = get_context("fork").Process(
            target=_main, args=(input, Path(folder), float(memory), int(seconds))
        )
        process.start()
        process.join()
        assert process.exitcode is not None
        out = Path(folder, "stdout").read_text()
        errors = Path(folder, "stderr").read_text()
    return CompletedProcess(command, process.exitcode, out, errors)


def _main(task: str, folder: Path, memory: float, seconds: int) -> None:
    sys.stdin = io.StringIO(task)
    for name in ("stdout", "stderr"):
        setattr(sys, name, (folder / name).open("w", buffering=1))
    trial.main(memory, seconds)
