"""Methods on volumes: what trains, whole and in patches."""

from pathlib import Path
from typing import Any

import pytest

from helpers.volume_sites import PATCHES, TASK, cube_task, make_sites, make_volumes
from medflare.core.errors import ConfigError
from medflare.federation.local.loop import run_local
from medflare.methods.catalogue import get_method
from medflare.tasks.config import load_task

RUNS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedsm": {},
    "prr": {},
    "iop_fl": {"outside": ["O"], "route_epochs": 1, "radius": 1},
    "grace": {"outside": ["O"], "client": "adv", "tta": "dsbn", "probe": True},
    "feddag": {"warmup": 0, "generator_width": 2},
    "moon": {},
    "scaffold": {},
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_sites(tmp_path_factory.mktemp("volumes"), ("A", "BB", "O"))


@pytest.mark.parametrize("image_mode", ["resize", "patch"])
@pytest.mark.parametrize("method", RUNS)
def test_a_method_trains_on_volumes(
    method: str, image_mode: str, root: Path, tmp_path: Path
) -> None:
    task = PATCHES if image_mode == "patch" else TASK
    results = run_local(
        method, task, ["A", "BB"], rounds=1, seed=0, data_root=root, out=tmp_path, **RUNS[method]
    )
    assert results["status"] == "COMPLETED", results["reason"]
    for name, site in results["sites"].items():
        assert (tmp_path / f"sites/{name}/report.html").stat().st_size > 500
        measured = site["metrics"]["deployed"]
        assert (
            measured.keys() == {"dice", "iou", "hd95_mm", "surface_dice", "structures"}
            and measured["dice"] is not None
        ), name


def test_patches_teach_what_whole_volumes_are_scored_on(root: Path) -> None:
    task = {
        **PATCHES,
        "network": {"name": "unet", "channels": [4, 8], "norm": "instance"},
        "local_epochs": 25,
        "loss": {"name": "dice_ce"},
    }
    results = [
        run_local("fedavg", task, ["A"], rounds=1, seed=0, data_root=root)["mean"] for _ in range(2)
    ]
    assert results[0]["inside"]["global"]["dice"] > 0.8
    assert results[0] == results[1], "equal seeds draw equal patches"


def test_fedsm_extra_labels_whole_volumes_and_no_patches() -> None:
    """The two accepted pairs differ from the refused one in one setting each."""
    method = get_method("fedsm_extra")
    patches = load_task(PATCHES)
    with pytest.raises(ConfigError, match="combine=extra"):
        method.check({"combine": "extra"}, patches)
    method.check({"combine": "extra"}, cube_task())
    method.check({"combine": "ensemble"}, patches)


def test_what_was_left_out_is_an_event(tmp_path: Path) -> None:
    folder = make_volumes(tmp_path / "A", patients={"training": 4, "validation": 2, "test": 2})
    (folder / "p1_flair.nii.gz").write_bytes(b"broken")
    task = {**PATCHES, "unreadable": "skip", "unreadable_limit": {"share": 0.2}}
    results = run_local(
        "fedavg", task, ["A"], rounds=1, seed=0, data_root=tmp_path, out=tmp_path / "out"
    )
    (event,) = (event for event in results["events"] if event["kind"] == "left_out")
    assert event["site"] == "A" and event["message"].startswith("1 ")
    assert (
        results["sites"]["A"]["n"]["train"] == 3
        and "p1_flair" not in (tmp_path / "out/results.json").read_text()
    )
    failed = run_local("fedavg", PATCHES, ["A"], rounds=1, seed=0, data_root=tmp_path)
    assert failed["status"] == "FAILED" and "p1_flair.nii.gz" in failed["reason"]
