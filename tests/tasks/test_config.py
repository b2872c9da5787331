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
from medflare.tasks import allowed_transforms
from medflare.tasks.config import load_task, presets

# Of the presets as they are published: results name them, and sites refuse a server whose task has another one.
FINGERPRINTS = {
    "brain_lgg": "35d0510461867d989a5a239a4c1e6d64fd90a107732617f0195203f6eb66eb90",
    "brain_lgg_3d": "6f3a16d9d491efad20d9e3bfdc9359ff6c4d306401178ab76446e74fbd761beb",
    "fundus_vessels": "d4f298926b5dfe84831c53fd58e4c42dbddcf5a403735497b31c23cdb4c03fce",
    "ham10000": "c5e2369b66ca0110ccfc4f9fd27b3e1015b9696273ba9b0126ced36374ced4d9",
    "ham10000_3class": "a9f733bbecb87f9d37b70fb0b829bdb009a2282992a3c3a7f8a34db0b2eceb6f",
    "lesion_masks": "e4d9cf8a6a56a81e934baa97cde5e5ab4defbf06aca45225cbf9af58253e0f07",
    "mitosis": "ed3c39458f5c298d5bd73e4d8381df92bc2c7ff98f40324216314fd5445bdef7",
    "phantom": "9da6bc628440b2b0d5384aabc8e80d6e40018ffcb1457d8e078ef51e5e5c8d7f",
    "phantom_grades": "c13bb8b8308ea838627decd20821d8f299ff36fe2b6b3b4bc0e8093ac23a0deb",
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
        ({"size": 48}, "size: expected the sides in pixels, [64, 64]"),
        ({"spacing": 1}, "spacing: expected millimetres along each axis"),
        ({"labels": "square"}, "labels: Input should be a list, got 'square'"),
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
    assert allowed_transforms._USUAL["intensity"] <= set(allowed_transforms.intensity_transforms())
    assert allowed_transforms._USUAL["augment"] <= {
        *allowed_transforms.spatial_augmentations(),
        *allowed_transforms.photometric_augmentations(),
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
