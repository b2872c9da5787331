"""Large states lie in files where a backing is used, and nobody can tell it from their numbers."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from medflare.core.backing import Backing, backed, empty
from medflare.core.errors import StateError
from medflare.core.states import StateDict, copy_state, weighted_mean
from medflare.methods.fedsm.formulas import soft_pull

LARGE = 40_002  # numbers, more bytes than stay in memory in any case


@pytest.fixture
def states() -> dict[str, StateDict]:
    generator = torch.Generator().manual_seed(0)
    return {site: {"w": torch.randn(3, LARGE, generator=generator), "n": torch.tensor(place)} for place, site in enumerate("ABC")}


def test_only_what_is_large_lies_in_files_and_only_inside(tmp_path: Path) -> None:
    assert not backed() and not empty((LARGE,), torch.float32).is_shared()
    with Backing(tmp_path / "new").used():
        assert backed() and empty((2, LARGE), torch.float32).is_shared()
        assert not empty((3,), torch.float32).is_shared() and not empty((0,), torch.float32).is_shared()
    assert not backed()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
def test_numbers_are_kept_in_every_type(tmp_path: Path, dtype: torch.dtype) -> None:
    numbers = torch.arange(LARGE).reshape(3, -1).to(dtype)
    with Backing(tmp_path).used():
        copied = copy_state({"w": numbers.T})["w"]
    assert copied.is_shared() and torch.equal(copied, numbers.T) and copied.is_contiguous() and type(copied) is torch.Tensor


def test_files_have_no_names_and_hold_no_descriptors(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with Backing(tmp_path).used():
        kept = [empty((LARGE,), torch.float32) for _ in range(5)]
    assert not list(tmp_path.iterdir()) and len(os.listdir("/proc/self/fd")) == before
    assert len(kept) == 5


def test_formulas_end_in_the_same_bits(tmp_path: Path, states: dict[str, StateDict]) -> None:
    def results() -> list[StateDict]:
        return [weighted_mean(states, {"A": 3.0, "B": 1.0, "C": 2.0}), *soft_pull(states, 0.3).values()]

    plain = results()
    with Backing(tmp_path).used():
        lying = results()
    assert all(found["w"].is_shared() for found in lying)
    assert all(torch.equal(a[name], b[name]) for a, b in zip(plain, lying, strict=True) for name in a)


def test_a_full_disk_is_an_error_and_no_broken_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with (
        Backing(tmp_path).used(),
        pytest.raises(StateError, match="no room for the models of all sites"),
    ):
        empty((LARGE,), torch.float32)
    assert not list(tmp_path.iterdir())
