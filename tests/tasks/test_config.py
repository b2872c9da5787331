import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from medflare.core.errors import ConfigError
from medflare.data.checking.check import check_task
from medflare.tasks.config import TaskConfig, load_task, presets
from pictures import SEGMENTATION

# Of the presets as they are published: results name them, and sites refuse a server whose task has another one.
FINGERPRINTS = {
    "brain_lgg": "d060a41cd2e5c330",
    "brain_lgg_3d": "a0b69c1433766636",
    "fundus_vessels": "8dea7f386a0a8c7e",
    "ham10000": "ead5e5c20819357d",
    "ham10000_3class": "711a8329531ff3ad",
    "phantom": "c7ebf8fe921ba9af",
    "phantom_grades": "46af27ca6511de04",
}


def test_presets_are_those_of_the_repository_and_each_can_train() -> None:
    folder = Path(__file__).parents[2] / "app_configs"
    files = [*folder.glob("*.json"), *folder.glob("papers/*.json")]
    assert set(presets()) == {path.relative_to(folder).with_suffix("").as_posix() for path in files}
    assert {"phantom", "brain_lgg", "ham10000", "ham10000_3class", "fundus_vessels"} <= set(presets())


@pytest.mark.parametrize(
    "name", ["phantom", "phantom_grades", "brain_lgg", "brain_lgg_3d", "ham10000", "ham10000_3class", "fundus_vessels"]
)
def test_preset(name: str) -> None:
    task = load_task(name)
    check_task(task)
    assert task.name == name
    assert task.fingerprint() == FINGERPRINTS[name]
    assert task.source
    assert ("ynthetic" in task.source) == (task.embedded == "phantom")


@pytest.mark.parametrize("name", [name for name in presets() if name.startswith("papers/")])
def test_task_of_a_paper(name: str) -> None:
    task = load_task(name)
    check_task(task)
    assert task.name == name.removeprefix("papers/")
    assert task.source.startswith(("FedSM", "PRR", "GRACE", "IOP-FL", "FedDAG"))


def test_round_trip_and_fingerprint(tmp_path: Path) -> None:
    task = load_task("brain_lgg")
    path = tmp_path / "task.json"
    path.write_text(json.dumps(task.to_dict()))
    assert load_task(path) == load_task(str(path)) == load_task(task.to_dict()) == load_task(task) == task
    reordered = dict(reversed(task.to_dict().items()))
    assert load_task(reordered).fingerprint() == task.fingerprint()
    assert load_task({**task.to_dict(), "batch_size": 3}).fingerprint() != task.fingerprint()
    assert len(task.fingerprint()) == 16


def test_defaults_count_in_the_fingerprint() -> None:
    written_out = {**SEGMENTATION, "slices": {"axis": 2}, "augment": []}
    assert load_task(written_out).fingerprint() == load_task(SEGMENTATION).fingerprint()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chanels": 1}, "unknown setting 'chanels'; did you mean channels"),
        ({"kind": "detection"}, "kind must be one of segmentation, classification, got 'detection'"),
        ({"target": "single"}, "target must be one of binary, multiclass, multilabel, got 'single'"),
        ({"channels": 0}, "channels must be a number of image channels, at least 1, or a list of their names, all different, got 0"),
        ({"channels": True}, "channels must be a number of image channels, at least 1, or a list of their names, all different, got True"),
        (
            {"channels": ["t1", "t1"]},
            "channels must be a number of image channels, at least 1, or a list of their names, all different, got ['t1', 't1']",
        ),
        ({"orientation": "RAX"}, "orientation must be three letters, one each of L or R, A or P, S or I, got 'RAX'"),
        ({"orientation": "LPS"}, "orientation is for volumes (spatial_dims 3), slices are used as stored; leave it out"),
        ({"spatial_dims": 3, "size": [8, 8, 8], "spacing": [1, 0, 1]}, "spacing must be three millimetres above 0, or null as stored"),
        ({"spatial_dims": 3, "size": [8, 8, 8], "spacing": [1, -2, 1]}, "spacing must be three millimetres above 0, or null as stored"),
        ({"spatial_dims": 3}, "size [16, 16] has 2 sides, spatial_dims is 3; make them agree"),
        (
            {"spatial_dims": 3, "size": [8, 8, 8], "slices": {"axis": 0, "keep": "foreground"}},
            "slices is for volumes that are cut (spatial_dims 2), here they stay whole; leave it out",
        ),
        ({"surface_tolerance": 9.0}, "surface_tolerance is for segmentation of volumes (spatial_dims 3); leave it out"),
        ({"fit": "patches"}, "fit must be one of resize, patch, got 'patches'"),
        ({"patches_per_image": 2}, "patches_per_image is for fit 'patch', this task has 'resize'; leave it out"),
        ({"missing_channels": "zeros"}, "missing_channels 'zeros' needs the channels' names, channels is 1; list them"),
        ({"unreadable_limit": {"share": 2}}, "unreadable_limit.share must be at most 1, got 2"),
        ({"size": [64]}, "size [64] has 1 sides, spatial_dims is 2; make them agree"),
        ({"size": [0, 64]}, "size must be [height, width] in pixels, or [X, Y, Z] in voxels, each at least 1, got [0, 64]"),
        ({"size": 64}, "size must be [height, width] in pixels, or [X, Y, Z] in voxels, each at least 1, got 64"),
        ({"labels": ["a", "a"]}, "labels must be a list of different label names, got ['a', 'a']"),
        ({"labels": []}, "labels must be a list of different label names, got []"),
        ({"labels": "ab"}, "labels must be a list, got 'ab'"),
        ({"labels": [1]}, "labels[0] must be text, got 1"),
        ({"labels": ["a", "b"]}, "a binary task has one label, got ['a', 'b']; use target 'multiclass' or 'multilabel'"),
        ({"target": "multiclass"}, "a multiclass task needs at least two labels, got ['square']; use target 'binary'"),
        ({"metric": "auc_macro"}, "unknown metric 'auc_macro'; known: dice, iou"),
        ({"metric": "hd95"}, "unknown metric 'hd95'; known: dice, iou"),
        ({"metric": 3}, "metric must be text, got 3"),
        ({"network": "unet"}, "network must be an object like {\"name\": ..., arguments}, got 'unet'"),
        ({"loss": {"ce_weight": 1}}, "loss must be an object like {\"name\": ..., arguments}, got {'ce_weight': 1}"),
        ({"optimizer": {"name": "adam", "lr": -1}}, "optimizer.lr must be above 0, got -1"),
        ({"optimizer": {"name": "adam", "lr": "1e-3"}}, "optimizer.lr must be a number, got '1e-3'"),
        ({"optimizer": {"name": "adam", "lr": float("inf")}}, "optimizer.lr must be a finite number, got inf"),
        ({"optimizer": {"name": "lion", "lr": 1}}, "unknown optimizer 'lion'; known: ASGD, Ada"),
        ({"optimizer": {"name": "adam"}}, "setting 'optimizer.lr' is missing; see app_configs/ for working examples"),
        ({"optimizer": "adam"}, "optimizer must be an object like {\"name\": ..., arguments}, got 'adam'"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"batch_size": 2.5}, "batch_size must be a whole number, got 2.5"),
        ({"local_epochs": True}, "local_epochs must be a whole number, got True"),
        ({"augment": [{"prob": 1}]}, "augment[0] must be an object like {\"name\": ..., arguments}, got {'prob': 1}"),
        ({"augment": {"name": "RandFlip"}}, "augment must be a list, got {'name': 'RandFlip'}"),
        ({"slices": {"axes": 2}}, "slices: unknown setting 'axes'; did you mean axis? known: axis, keep"),
        ({"slices": {"axis": 3}}, "slices.axis must be one of 0, 1, 2, got 3"),
        ({"slices": {"keep": "some"}}, "slices.keep must be one of all, foreground, got 'some'"),
        ({"slices": 2}, "slices must be an object, got 2"),
        ({"label_values": {"square": ["1"]}}, "label_values.square[0] must be a whole number, got '1'"),
        ({"label_values": {"square": []}}, "label_values.square must be a list of at least 1, got []"),
        ({"label_values": {"sqare": [1]}}, "label_values: unknown label 'sqare'; did you mean square"),
        ({"unlisted_labels": "ignore"}, "unlisted_labels must be one of error, drop, got 'ignore'"),
        ({"resplit": "x"}, "resplit must be a whole number, got 'x'"),
        ({"embedded": "other"}, "embedded must be one of \"\", phantom, got 'other'"),
        ({"source": 3}, "source must be text, got 3"),
        ({"name": " "}, "name must be a name of at most 100 printable characters without / and \\, got ' '"),
        ({"name": "../brain"}, "name must be a name of at most 100 printable characters without / and \\, got '../brain'"),
    ],
)
def test_bad_settings_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_task({**SEGMENTATION, **changes})
    assert str(caught.value).startswith(f"task {changes.get('name', 'squares')!r}: {message}")
    assert "\n" not in str(caught.value)


def test_missing_setting() -> None:
    with pytest.raises(ConfigError, match=r"^task 'squares': setting 'loss' is missing; see app_configs/ for working examples$"):
        load_task({key: value for key, value in SEGMENTATION.items() if key != "loss"})


def test_partial_label_values() -> None:
    with pytest.raises(ConfigError, match="nothing about cup"):
        load_task({**SEGMENTATION, "target": "multilabel", "labels": ["disc", "cup"], "label_values": {"disc": [1]}})


@pytest.mark.parametrize("kind", ["segmentation", "classification"])
def test_a_stored_value_means_one_label_where_there_is_one(kind: str) -> None:
    """Masks took the last label that lists a value, classes the first; a binary structure of 0 was predicted as background."""
    settings = {**SEGMENTATION, "kind": kind, "metric": "dice" if kind == "segmentation" else "accuracy"}
    several = {**settings, "target": "multiclass", "labels": ["bg", "a", "b"]}
    for values, words in (
        (
            {"bg": [0], "a": [1], "b": [1]},
            "1 means 'a' and 'b', a multiclass task takes one; take it out of 'b', or use target 'multilabel'",
        ),
        (
            {"b": [2], "bg": [0, 2], "a": [1]},
            "2 means 'b' and 'bg', a multiclass task takes one; take it out of 'bg', or use target 'multilabel'",
        ),
    ):
        with pytest.raises(ConfigError, match=f"^task 'squares': label_values: {words}$"):
            load_task({**several, "label_values": values})
    with pytest.raises(
        ConfigError,
        match=r"0 means 'not square' and 'square', a binary task takes one; take it out of 'square', or use target 'multiclass'$",
    ):
        load_task({**settings, "label_values": {"square": [3, 0]}})


@pytest.mark.parametrize(
    ("target", "values"),
    [
        ("multilabel", {"disc": [1, 2], "cup": [2]}),
        ("multiclass", {"disc": [9, 9], "cup": [0]}),  # any value may be the background's, and one that is said twice is clear
    ],
)
def test_other_values_stay_allowed(target: str, values: dict[str, list[int]]) -> None:
    assert load_task({**SEGMENTATION, "target": target, "labels": ["disc", "cup"], "label_values": values}).label_values == values


def test_foreground_slices_need_masks() -> None:
    with pytest.raises(ConfigError, match="foreground"):
        load_task({**SEGMENTATION, "kind": "classification", "metric": "f1_macro", "slices": {"keep": "foreground"}})


def test_unknown_preset_and_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean brain_lgg"):
        load_task("brain_lg")
    with pytest.raises(ConfigError, match=r"nowhere.json: no such task file"):
        load_task(tmp_path / "nowhere.json")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ConfigError, match=r"broken.json: not valid JSON"):
        load_task(tmp_path / "broken.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ConfigError, match="one JSON object"):
        load_task(str(tmp_path / "list.json"))


def test_probabilities_and_outputs() -> None:
    binary = load_task(SEGMENTATION)
    assert binary.outputs == 1 and binary.classes == ("not square", "square")
    assert binary.probabilities(torch.zeros(1, 1, 2, 2)).unique().tolist() == [0.5]
    several = load_task({**SEGMENTATION, "target": "multiclass", "labels": ["background", "a", "b"]})
    assert several.outputs == 3 and several.classes == several.labels
    torch.testing.assert_close(several.probabilities(torch.randn(2, 3, 4, 4)).sum(dim=1), torch.ones(2, 4, 4))


def test_a_task_is_immutable() -> None:
    with pytest.raises(AttributeError):
        load_task(SEGMENTATION).name = "other"  # type: ignore[misc]
    assert isinstance(load_task(SEGMENTATION), TaskConfig)


def test_a_task_made_directly_is_checked_too() -> None:
    task = load_task(SEGMENTATION)
    values = {item.name: getattr(task, item.name) for item in fields(TaskConfig)}
    assert TaskConfig(**values) == task == replace(task)
    assert replace(task, batch_size=7).batch_size == 7
    with pytest.raises(ValidationError):
        replace(task, batch_size=0)


def test_what_is_given_is_not_what_is_kept() -> None:
    given = {**SEGMENTATION, "network": {"name": "unet", "channels": [4, 8]}}
    task = load_task(given)
    given["network"]["name"] = "deeplab"
    assert task.network == {"name": "unet", "channels": [4, 8]}


def test_metrics_of_the_task() -> None:
    assert load_task(SEGMENTATION).metrics == ("dice", "iou", "hd95")
    assert load_task("ham10000").metrics == ("accuracy", "balanced_accuracy", "f1_macro", "auc_macro")
