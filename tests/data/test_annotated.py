"""`annotated` of a datalist: sites that annotated some structures only."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from helpers.fixture_types import TaskOf
from medflare.core.errors import ConfigError, DataError
from medflare.federation.local.loop import run_local
from medflare.preparation.check import check_site
from medflare.studies.references import pooled_images
from medflare.tasks.config import TaskConfig
from medflare.training.opening import open_site

LABELS = ["background", "square", "stripe"]


def scene(random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """A bright square and a dark stripe, 1 and 2 in the mask, on a grey ground."""
    picture = random.normal(110, 8, (24, 24))
    mask = np.zeros((24, 24), np.uint8)
    row, column = random.integers(1, 8, 2)
    mask[row : row + 7, column : column + 7] = 1
    stripe = random.integers(17, 21)
    mask[stripe : stripe + 3] = 2
    return np.clip(picture + 70 * (mask == 1) - 60 * (mask == 2), 0, 255).astype(np.uint8), mask


def write_site(
    folder: Path,
    seed: int,
    kept: tuple[int, ...] = (1, 2),
    annotated: list[str] | None = None,
    images: int = 12,
) -> Path:
    """A site whose training and validation masks show the structures `kept`; its test masks show all."""
    random = np.random.default_rng(seed)
    listed: dict[str, Any] = {} if annotated is None else {"annotated": annotated}
    for split, count in (("training", images), ("validation", 3), ("test", 4)):
        listed[split] = []
        for number in range(count):
            picture, mask = scene(random)
            if split != "test":
                mask[~np.isin(mask, kept)] = 0
            name = f"{split}{number}"
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(picture).save(folder / f"{name}.png")
            Image.fromarray(mask).save(folder / f"{name}_mask.png")
            listed[split].append(
                {"image": f"{name}.png", "label": f"{name}_mask.png", "patient": name}
            )
    (folder / "datalist.json").write_text(json.dumps(listed))
    return folder


@pytest.fixture
def two(make_task: TaskOf) -> TaskConfig:
    return make_task(
        target="multiclass", labels=LABELS, size=[24, 24], optimizer={"name": "adam", "lr": 0.02}
    )


def test_absent_structures_are_a_problem_that_annotated_solves(
    two: TaskConfig, tmp_path: Path, edit: Any
) -> None:
    folder = write_site(tmp_path / "A", 0, kept=(1,))
    report = check_site(folder, two)
    (problem,) = report.sites["A"].problems
    assert not report.ok and "stripe" in problem
    assert '"annotated": ["square"]' in problem and '"annotated": ["square", "stripe"]' in problem
    for note in report.sites["A"].notes:
        assert "stripe" not in note
    for annotated in (["square"], ["square", "stripe"], ["Square"]):
        edit(folder, lambda content, annotated=annotated: content.update(annotated=annotated))
        report = check_site(folder, two)
        assert report.ok and any("stripe" in note for note in report.sites["A"].notes)


@pytest.mark.parametrize("annotated", [None, "square", [1], ["sqare"], ["background"]])
def test_annotated_must_name_structures(
    annotated: Any, two: TaskConfig, tmp_path: Path, edit: Any
) -> None:
    folder = write_site(tmp_path / "A", 0)
    edit(folder, lambda content: content.update(annotated=annotated))
    with pytest.raises(DataError, match="annotated"):
        open_site("A", two, data_root=folder)
    assert "annotated" in check_site(folder, two).sites["A"].problems[0]


def test_masks_are_needed_of_annotated_structures_only(
    make_task: TaskOf, tmp_path: Path, edit: Any
) -> None:
    task = make_task(target="multilabel", labels=["stripe", "square"], size=[24, 24])
    folder = write_site(tmp_path / "A", 0, kept=(1,), annotated=["square"])
    for file in folder.glob("*_mask.png"):
        Image.fromarray((np.asarray(Image.open(file)) == 1).astype(np.uint8)).save(file)
    site = open_site("A", task, data_root=folder)
    batch = next(site.ordered("train"))
    assert not batch.targets[:, 0].any() and batch.targets[:, 1].flatten(1).any(dim=1).all()
    edit(folder, lambda content: content.pop("annotated"))
    assert "1 mask(s)" in check_site(folder, task).sites["A"].problems[0]


def test_several_masks_need_annotated_in_the_order_of_the_task(
    make_task: TaskOf, tmp_path: Path, edit: Any
) -> None:
    task = make_task(target="multilabel", labels=["stripe", "square", "dot"], size=[24, 24])
    folder = write_site(tmp_path / "A", 0, annotated=["square", "stripe"])

    def list_two_masks(content: Any) -> None:
        for split in ("training", "validation", "test"):
            for item in content[split]:
                item["label"] = [
                    item["label"].replace("mask", "square"),
                    item["label"].replace("mask", "stripe"),
                ]

    for file in folder.glob("*_mask.png"):
        for value, name in enumerate(("square", "stripe"), start=1):
            mask = (np.asarray(Image.open(file)) == value).astype(np.uint8)
            Image.fromarray(mask).save(folder / file.name.replace("mask", name))
    edit(folder, list_two_masks)
    with pytest.raises(DataError, match=r"masks of each image, in the order .*: stripe, square"):
        open_site("A", task, data_root=folder)


def test_structures_that_are_not_annotated_are_neither_learnt_nor_measured_nor_pooled(
    two: TaskConfig, tmp_path: Path
) -> None:
    whole = open_site("A", two, data_root=write_site(tmp_path / "A", 0))
    part = open_site("B", two, data_root=write_site(tmp_path / "B", 0, annotated=["square"]))
    batch = next(part.ordered("test"))
    right = 9.0 * torch.nn.functional.one_hot(batch.targets, 3).movedim(-1, 1)
    swapped = right[:, [2, 1, 0]]  # stripes for background, and the other way round
    torch.testing.assert_close(part.loss(swapped, batch.targets), part.loss(right, batch.targets))
    assert whole.loss(swapped, batch.targets) > 2 * whole.loss(right, batch.targets)
    assert part.score(
        lambda images: swapped[: len(images)].softmax(dim=1), "test", ["dice"]
    ).values == {"dice": 1.0}
    with pytest.raises(ConfigError, match="annotated"):
        pooled_images([whole.data, part.data])
    assert pooled_images([part.data, part.data]).annotated == ("square",)


def _federation(root: Path, annotated: list[str] | None) -> Path:
    """Site A has both structures in its masks, the larger site B squares alone; a third one, which never trains, measures."""
    write_site(root / "A", 0, images=8)
    write_site(root / "B", 1, kept=(1,), annotated=annotated, images=24)
    return write_site(root / "O", 2).parent


def test_a_federation_learns_a_structure_that_one_site_did_not_annotate(
    two: TaskConfig, tmp_path: Path
) -> None:
    reached = {}
    results = {}
    for name, annotated in (("without", None), ("with", ["square"])):
        root = _federation(tmp_path / name, annotated)
        task = {**two.to_dict(), "local_epochs": 4, "loss": {"name": "ce"}}
        results[name] = run_local(
            "fedavg",
            task,
            ["A", "B"],
            rounds=4,
            seed=0,
            outside=["O"],
            data_root=root,
            out=tmp_path / f"{name}-out",
        )
        assert results[name]["status"] == "COMPLETED", results[name]["reason"]
        reached[name] = results[name]["sites"]["O"]["metrics"]["global"]["dice"]
    assert reached["with"] > reached["without"] + 0.1
    notes = {}
    for name, result in results.items():
        notes[name] = [event["message"] for event in result["events"] if event["site"] == "B"]
    assert any("stripe" in line and "trained as background" in line for line in notes["without"])
    assert any("stripe" in line and "not annotated" in line for line in notes["with"])


@pytest.mark.parametrize(
    ("method", "options"),
    [("fedsm", {}), ("prr", {}), ("feddag", {"warmup": 0, "generator_width": 2}), ("moon", {})],
)
def test_methods_learn_from_such_a_site(
    method: str, options: dict[str, Any], two: TaskConfig, tmp_path: Path
) -> None:
    root = _federation(tmp_path / "data", ["square"])
    task = {**two.to_dict(), "network": {"name": "unet", "channels": [4, 8], "norm": "batch"}}
    results = run_local(method, task, ["A", "B"], rounds=2, seed=0, data_root=root, **options)
    assert results["status"] == "COMPLETED", results["reason"]
    for site in results["sites"].values():
        assert site["metrics"]["deployed"]["dice"] is not None


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("segmentation", {"target": "multiclass", "labels": LABELS}),
        ("segmentation", {"target": "multilabel", "labels": ["square", "stripe"]}),
        ("segmentation", {"label_values": {"square": [1, 2]}}),
        ("classification", {}),
        ("classification", {"target": "binary", "labels": ["bright"]}),
        ("classification", {"target": "multilabel", "labels": ["bright", "round"]}),
    ],
)
def test_a_site_without_labels_has_training_images_that_count_for_no_class(
    kind: str, settings: dict[str, Any], make_task: TaskOf, tmp_path: Path, edit: Any
) -> None:
    task = make_task(kind, size=[24, 24], **settings)
    folder = write_site(tmp_path / "A", 0)

    def without_labels(content: dict[str, Any]) -> None:
        content["annotated"] = []
        for item in (*content["training"], *content["test"]):
            del item["label"]

    edit(folder, without_labels)
    site = open_site("A", task, data_root=folder)
    assert site.n == {"train": 12, "validation": 0, "test": 0}
    assert site.class_counts().tolist() == [0] * len(task.classes)
    assert len(next(site.batches("train", 0)).images) == task.batch_size
    assert any("no labels" in note for note in site.notes)
