import json
from pathlib import Path
from typing import Any

import pytest
import torch

from medflare.core.errors import ConfigError
from medflare.data.check import check_task
from medflare.tasks.config import TaskConfig, load_task, presets

from .conftest import SEGMENTATION


def test_presets_are_those_of_the_repository_and_each_can_train() -> None:
    folder = Path(__file__).parents[2] / "app_configs"
    assert set(presets()) == {path.stem for path in folder.glob("*.json")}
    assert {"phantom", "brain_lgg", "ham10000", "ham10000_3class", "fundus_vessels"} <= set(presets())


@pytest.mark.parametrize("name", ["phantom", "phantom_grades", "brain_lgg", "ham10000", "ham10000_3class", "fundus_vessels"])
def test_preset(name: str) -> None:
    task = load_task(name)
    check_task(task)
    assert task.name == name
    assert task.source
    assert ("ynthetic" in task.source) == (task.embedded == "phantom")


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
    ("changes", "words"),
    [
        ({"chanels": 1}, ["chanels", "did you mean channels"]),
        ({"kind": "detection"}, ["kind", "'detection'", "'segmentation'"]),
        ({"channels": 2}, ["channels", "1 or 3", "2"]),
        ({"channels": True}, ["channels", "True"]),
        ({"size": [64]}, ["size", "[height, width]"]),
        ({"size": [0, 64]}, ["size", "at least 1"]),
        ({"labels": ["a", "a"]}, ["labels", "different"]),
        ({"labels": []}, ["labels"]),
        ({"labels": ["a", "b"]}, ["binary", "one label"]),
        ({"target": "multiclass"}, ["multiclass", "two labels"]),
        ({"metric": "auc_macro"}, ["metric", "auc_macro", "dice"]),
        ({"metric": "hd95"}, ["metric", "hd95"]),
        ({"network": "unet"}, ["network", '{"name"']),
        ({"optimizer": {"name": "adam", "lr": -1}}, ["optimizer.lr", "-1"]),
        ({"optimizer": {"name": "lion", "lr": 1}}, ["optimizer.name", "lion"]),
        ({"optimizer": {"name": "adam"}}, ["optimizer.lr", "None"]),
        ({"batch_size": 0}, ["batch_size", "0"]),
        ({"batch_size": 2.5}, ["batch_size", "2.5"]),
        ({"augment": [{"prob": 1}]}, ["augment[0]"]),
        ({"slices": {"axes": 2}}, ["slices", "axes", "did you mean axis"]),
        ({"slices": {"axis": 3}}, ["slices.axis", "3"]),
        ({"label_values": {"square": ["1"]}}, ["label_values.square", "whole numbers"]),
        ({"label_values": {"sqare": [1]}}, ["sqare", "did you mean square"]),
        ({"unlisted_labels": "ignore"}, ["unlisted_labels", "'ignore'"]),
        ({"resplit": "x"}, ["resplit", "'x'"]),
        ({"embedded": "other"}, ["embedded", "'other'"]),
        ({"source": 3}, ["source", "text"]),
        ({"name": " "}, ["name", "non-empty"]),
    ],
)
def test_bad_settings_are_named(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_task({**SEGMENTATION, **changes})
    assert all(word in str(caught.value) for word in ["squares" if "name" not in changes else "name", *words])
    assert "\n" not in str(caught.value)


def test_missing_setting() -> None:
    with pytest.raises(ConfigError, match="'loss' is missing"):
        load_task({key: value for key, value in SEGMENTATION.items() if key != "loss"})


def test_partial_label_values() -> None:
    with pytest.raises(ConfigError, match="nothing about cup"):
        load_task({**SEGMENTATION, "target": "multilabel", "labels": ["disc", "cup"], "label_values": {"disc": [1]}})


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
