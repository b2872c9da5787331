import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from helpers.picture_sites import SEGMENTATION
from medflare.core.errors import ConfigError
from medflare.preparation.check import check_task
from medflare.tasks import transforms
from medflare.tasks.config import load_task, presets

# Of the presets as they are published: results name them, and sites refuse a server whose task has another one.
FINGERPRINTS = {
    "brain_lgg": "890fe2c89c4a2b20",
    "brain_lgg_3d": "e9331d203d5aefc6",
    "fundus_vessels": "92875d0765330305",
    "ham10000": "6cc4cc7f801c8b21",
    "ham10000_3class": "79f4800311e38a11",
    "lesion_masks": "3e84b140ecea9ae2",
    "mitosis": "dcc39a148ba9f903",
    "phantom": "026c8d3468f1f75b",
    "phantom_grades": "b32efb12630e95ce",
}


def test_presets_are_the_files_of_app_configs() -> None:
    folder = Path(__file__).parents[2] / "app_configs"
    files = [
        *folder.glob("*.json"),
        *folder.glob("papers/*.json"),
        *folder.glob("mechanisms/*.json"),
    ]
    assert set(presets()) == {path.relative_to(folder).with_suffix("").as_posix() for path in files}
    assert {"phantom", "brain_lgg", "ham10000", "ham10000_3class", "fundus_vessels"} <= set(
        presets()
    )


@pytest.mark.parametrize("name", presets())
def test_every_preset_can_train(name: str) -> None:
    task = load_task(name)
    check_task(task)
    assert task.name == Path(name).name
    assert name not in FINGERPRINTS or task.fingerprint() == FINGERPRINTS[name]
    if name.startswith("papers/"):
        assert task.source.startswith(("FedSM", "PRR", "GRACE", "IOP-FL", "FedDAG"))
    else:
        assert ("ynthetic" in task.source) == bool(task.embedded)


def test_round_trip_and_fingerprint(tmp_path: Path) -> None:
    task = load_task("brain_lgg")
    path = tmp_path / "task.json"
    path.write_text(json.dumps(task.to_dict()))
    assert (
        load_task(path)
        == load_task(str(path))
        == load_task(task.to_dict())
        == load_task(task)
        == task
    )
    reordered = dict(reversed(task.to_dict().items()))
    assert load_task(reordered).fingerprint() == task.fingerprint()
    assert load_task({**task.to_dict(), "batch_size": 3}).fingerprint() != task.fingerprint()
    written_out = {
        **SEGMENTATION,
        "slices": {"axis": 2},
        "augment": [],
        "schedule": {"name": "constant", "warmup_rounds": 0},
    }
    assert load_task(written_out).fingerprint() == load_task(SEGMENTATION).fingerprint(), (
        "defaults count too"
    )


VOLUME: dict[str, Any] = {"spatial_dims": 3, "size": [8, 8, 8]}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"chanels": 1}, "chanels"),
        ({"channels": ["t1", "t1"]}, "channels"),
        ({"orientation": "RAX"}, "orientation"),
        ({"codes": {"circle": {"value": "1", "meaning": "x"}}}, "circle"),
        ({"codes": {"square": {"value": "1", "meaning": "x", "color": "red"}}}, "color"),
        ({"spatial_dims": 3}, "spatial_dims"),
        ({**VOLUME, "slices": {"axis": 0, "keep": "foreground"}}, "slices"),
        ({"surface_tolerance": 9.0}, "surface_tolerance"),
        ({"patches_per_image": 2}, "patches_per_image"),
        ({"missing_channels": "zeros"}, "missing_channels"),
        ({"size": [64]}, "size"),
        ({"labels": ["a", "a"]}, "labels"),
        ({"labels": ["a", "b"]}, "binary"),
        ({"target": "multiclass"}, "multiclass"),
        ({"metric": "auc_macro"}, "auc_macro"),
        ({"metric": "hd95"}, "hd95"),
        ({"network": "unet"}, "network"),
        ({"optimizer": {"name": "lion", "lr": 1}}, "lion"),
        ({"optimizer": {"name": "adam"}}, "optimizer.lr"),
        ({"freeze": {"parts": ["body"]}}, "freeze"),
        ({"sampling": {"name": "balanced", "weights": [1.0]}}, "sampling"),
        ({"schedule": {"name": "cosin"}}, "cosin"),
        ({"schedule": {"name": "cosine", "every": 2}}, "every"),
        ({"augment": [{"prob": 1}]}, "augment"),
        ({"label_values": {"square": ["1"]}}, "label_values.square"),
        ({"label_values": {"square": [3, 0]}}, "square"),
        ({"label_values": {"sqare": [1]}}, "sqare"),
        ({"target": "multilabel", "labels": ["disc", "cup"], "label_values": {"disc": [1]}}, "cup"),
        (
            {
                "target": "multiclass",
                "labels": ["bg", "a", "b"],
                "label_values": {"bg": [0], "a": [1], "b": [1]},
            },
            "'b'",
        ),
        (
            {"kind": "classification", "metric": "f1_macro", "slices": {"keep": "foreground"}},
            "foreground",
        ),
        ({"name": "../brain"}, "name"),
        ({"intensity": {"name": "NormaliseIntensity"}}, "NormaliseIntensity"),
        ({"intensity": {"name": "RandFlip"}}, "RandFlip"),
        ({"augment": [{"name": "RandFlpd"}]}, "RandFlpd"),
        ({"augment": [{"name": "RandFlip", "keys": ["image"]}]}, "RandFlip"),
    ],
)
def test_a_wrong_or_missing_setting_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(named)):
        load_task({**SEGMENTATION, **changes})
    with pytest.raises(ConfigError, match="loss"):
        load_task({key: value for key, value in SEGMENTATION.items() if key != "loss"})


def test_the_transforms_of_the_presets_are_monais() -> None:
    assert transforms._USUAL["intensity"] <= set(transforms.intensity_transforms())
    assert transforms._USUAL["augment"] <= {
        *transforms.spatial_augmentations(),
        *transforms.photometric_augmentations(),
    }


@pytest.mark.parametrize(
    ("target", "values"),
    [
        ("multilabel", {"disc": [1, 2], "cup": [2]}),
        # The background may have any value; repeated values are allowed.
        ("multiclass", {"disc": [9, 9], "cup": [0]}),
    ],
)
def test_values_that_several_labels_may_share_are_allowed(
    target: str, values: dict[str, list[int]]
) -> None:
    assert (
        load_task(
            {**SEGMENTATION, "target": target, "labels": ["disc", "cup"], "label_values": values}
        ).label_values
        == values
    )


def test_an_unknown_preset_or_unreadable_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ConfigError, match="brain_lgg"):
        load_task("brain_lg")
    for name in ("nowhere", "broken", "list"):
        with pytest.raises(ConfigError, match=name):
            load_task(tmp_path / f"{name}.json")
    with pytest.raises(ConfigError, match=r"brokn\.json.*broken\.json"):
        load_task(tmp_path / "brokn.json")


def test_probabilities_and_outputs() -> None:
    binary = load_task(SEGMENTATION)
    assert binary.outputs == 1 and binary.classes == ("not square", "square")
    assert binary.probabilities(torch.zeros(1, 1, 2, 2)).unique().tolist() == [0.5]
    several = load_task(
        {**SEGMENTATION, "target": "multiclass", "labels": ["background", "a", "b"]}
    )
    assert several.outputs == 3 and several.classes == several.labels
    torch.testing.assert_close(
        several.probabilities(torch.randn(2, 3, 4, 4)).sum(dim=1), torch.ones(2, 4, 4)
    )


def test_a_changed_task_is_validated_too() -> None:
    task = load_task(SEGMENTATION)
    assert replace(task) == task and replace(task, batch_size=7).batch_size == 7
    with pytest.raises(ValidationError):
        replace(task, batch_size=0)
