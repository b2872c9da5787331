"""Networks of the task files are built without a trial; many blocks, layers or values need one."""

import json
from pathlib import Path
from typing import Any

import pytest

from e2e.simulation import ROOT
from medflare.data import trial
from medflare.data.trial import builds_quickly
from medflare.networks.catalogue import builds_on_meta
from medflare.tasks.config import load_task

TASKS = sorted(
    path
    for path in (ROOT / "app_configs").rglob("*.json")
    if "network" in json.loads(path.read_text())
)


@pytest.mark.parametrize("path", TASKS, ids=lambda path: path.stem)
def test_networks_of_the_task_files_need_no_trial(path: Path) -> None:
    assert builds_quickly(json.loads(path.read_text())["network"])


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"weights": {"file": "x", "bytes": 10**9}},
        {
            "channels": [16, 32, 64, 128, 256],
            "strides": [2, 2, 2, 2],
            "num_res_units": 2,
            "norm": "batch",
        },
        {"kernel_size": [[3, 3, 3]] * 6, "norm": ["group", {"num_groups": 8}], "dropout": 0.2},
        {"block_config": [6, 12, 48, 32]},
    ],
)
def test_small_arguments_need_no_trial(arguments: dict[str, Any]) -> None:
    assert builds_quickly({"name": "UNet", **arguments})


@pytest.mark.parametrize(
    "arguments",
    [
        {"block_config": [200, 1, 1, 1]},
        {"num_res_units": 65},
        {"num_layers": 1e9},
        {"channels": [8] * 33},
        {"channels": [4096]},
        {"blocks": {"down": [[[1, 65]]]}},
    ],
)
def test_large_arguments_need_a_trial(arguments: dict[str, Any]) -> None:
    assert not builds_quickly({"name": "UNet", **arguments})


def test_a_loss_of_large_arguments_needs_a_trial() -> None:
    assert builds_quickly({"name": "ce", "weights": [1.0, 10.0]})
    for arguments in ({"win_size": 10**6}, {"iter_": 10**9}, {"num_bins": 10**9}):
        assert not builds_quickly({"name": "SSIMLoss", **arguments})


def test_a_network_that_fails_while_it_is_built_needs_a_trial() -> None:
    """Until its last layer, which says why, it would be built in this process."""
    task = load_task("phantom").to_dict()
    unet = {
        "name": "UNet",
        "channels": [8, 8],
        "strides": [1],
        "norm": ["group", {"num_groups": 2}],
    }
    assert builds_on_meta(load_task({**task, "network": unet}))
    late = {**unet, "channels": [7, 8]}
    assert builds_quickly(late) and not builds_on_meta(load_task({**task, "network": late}))


def test_a_network_of_another_package_with_arguments_needs_a_trial() -> None:
    assert builds_quickly({"name": "lab_nets.small:Plain"})
    assert not builds_quickly({"name": "lab_nets.small:Plain", "width": 4})


@pytest.mark.slow
def test_a_trial_imports_nothing_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be the folder of a model that somebody else has made."""
    for name in ("medflare", "torch", "json", "subprocess"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(7)")
    monkeypatch.chdir(tmp_path)
    task = json.dumps(load_task("phantom").to_dict())
    assert trial._problem(task, "", 4.0, 60) == ("", "")
