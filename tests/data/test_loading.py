from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from helpers.fixture_types import Edit, SiteOf, TaskOf
from medflare.core.errors import DataError
from medflare.data import decoding
from medflare.data.class_counts import class_counts
from medflare.data.loading import Split, joined, load_site_data, resolve_data_root
from medflare.data.local import DATA_ROOT_VARIABLE
from medflare.tasks.config import load_task


@pytest.fixture(autouse=True)
def _no_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DATA_ROOT_VARIABLE, raising=False)


def test_root_by_precedence(
    make_site: SiteOf, make_task: TaskOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_site()
    task = make_task()
    parent = folder.parent
    assert (
        resolve_data_root("A", task, data_root=parent)
        == resolve_data_root("any name", task, str(folder))
        == folder
    )
    monkeypatch.setenv(DATA_ROOT_VARIABLE, str(parent))
    assert resolve_data_root("A", task) == folder
    other = make_site(name="other")
    # Local settings come before the environment.
    assert resolve_data_root("A", task, str(other)) == other
    assert resolve_data_root("A", task, str(other), data_root=parent) == folder


def test_embedded_data_are_used_without_a_data_root(
    tmp_path: Path, make_task: TaskOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    phantom = load_task("phantom")
    assert resolve_data_root("A", phantom) is None
    with pytest.raises(DataError, match="squares"):
        resolve_data_root("A", make_task())
    monkeypatch.setenv(DATA_ROOT_VARIABLE, str(tmp_path))
    with pytest.raises(DataError, match=str(tmp_path)):
        resolve_data_root("A", phantom)


@pytest.mark.parametrize(
    ("site", "root", "named"),
    [("A", "nowhere", "nowhere"), ("CX", ".", "'CX'"), ("bare", ".", "bare")],
)
def test_roots_without_the_site(
    site: str, root: str, named: str, make_site: SiteOf, make_task: TaskOf, tmp_path: Path
) -> None:
    make_site(name="CS")
    (tmp_path / "bare").mkdir()
    with pytest.raises(DataError, match=named):
        resolve_data_root(site, make_task(), data_root=tmp_path / root)


def test_absent_classes_and_dropped_images_are_notes(make_site: SiteOf, make_task: TaskOf) -> None:
    task = make_task(
        "classification",
        labels=["dark", "bright"],
        label_values={"dark": [0], "bright": [2]},
        unlisted_labels="drop",
    )
    folder = make_site(
        {"training": ["a", "b", "c"], "validation": ["d"], "test": ["e", "f"]},
        kind="classification",
    )
    data = load_site_data("A", task, folder)
    assert data.notes == () and len(data.dropped) == 2, "the number is the site's own"
    assert data.dropped_line == "2 images left out: label_values lists no label for them"
    assert (len(data.train), len(data.validation), len(data.test)) == (2, 1, 1)
    four = make_task("classification", labels=["dark", "medium", "bright", "brightest"])
    assert load_site_data("A", four, folder).notes == (
        "class brightest is absent from the training images",
    )


def test_classes_get_the_tasks_numbers_by_their_names(
    make_site: SiteOf, make_task: TaskOf, edit: Edit
) -> None:
    """A hospital without one of the classes numbers the others from 0, as `medflare data init` does."""
    folder = make_site(kind="classification")
    plain = load_site_data("A", make_task("classification"), folder)
    edit(
        folder,
        lambda content: content.update(labels={"0": "Dark", "1": "bright", "2": "quite bright"}),
    )
    four = make_task("classification", labels=["dark", "medium", "bright", "quite_bright"])
    data = load_site_data("A", four, folder)
    assert data.notes == (
        (
            "classes of datalist.json that have another name in the task: "
            "1 bright as 2 bright, 2 quite bright as 3 quite_bright"
        ),
        "class medium is absent from the training images",
    )
    assert data.train.targets.tolist() == [
        {0: 0, 1: 2, 2: 3}[label] for label in plain.train.targets.tolist()
    ]


@pytest.mark.parametrize(
    ("listed", "inside", "outside"),
    [
        ({"training": ["a"], "validation": ["b"], "test": ["c"]}, "", ""),
        ({"training": ["a"], "validation": [], "test": ["b"]}, "'validation'", ""),
        ({"training": ["a"]}, "site A", ""),
        ({"training": [], "validation": [], "test": []}, "'training'", "'test'"),
    ],
)
def test_empty_and_missing_lists(
    listed: Any, inside: str, outside: str, make_site: SiteOf, make_task: TaskOf
) -> None:
    folder = make_site(listed)
    for role, error in (("inside", inside), ("outside", outside)):
        with pytest.raises(DataError, match=error) if error else nullcontext():
            data = load_site_data("A", make_task(), folder, role=role)
            assert len(data.test) == 1 and data.train.images.shape[1:] == (1, 16, 16), (
                "also of no images"
            )


def test_broken_data_name_the_file(make_site: SiteOf, make_task: TaskOf, edit: Edit) -> None:
    spoiled: list[tuple[str, Callable[[Path], object], str]] = [
        ("images/1.png", lambda path: path.write_bytes(b"no"), "1.png: cannot be read"),
        ("images/1_mask.png", lambda path: path.unlink(), "1_mask.png: file not found"),
        (
            "images/1_mask.png",
            lambda path: Image.fromarray(np.full((16, 16), 9, np.uint8)).save(path),
            "1_mask.png: label value 9",
        ),
    ]
    for number, (name, spoil, named) in enumerate(spoiled):
        folder = make_site(name=f"S{number}")
        spoil(folder / name)
        with pytest.raises(DataError, match=named):
            load_site_data("A", make_task(), folder)
    folder = make_site(kind="classification", name="C")
    edit(folder, lambda content: content["validation"][1].update(label=3))
    with pytest.raises(DataError, match=r"validation\[1\]"):
        load_site_data("C", make_task("classification"), folder)


def test_pixels_of_a_structure_are_counted_beyond_float32(make_task: TaskOf) -> None:
    task = make_task(target="multilabel")
    targets = torch.ones(1, 1, 4097, 4097)
    assert class_counts(targets, task).tolist() == [4097**2]


def test_splits_and_class_counts(make_site: SiteOf, make_task: TaskOf) -> None:
    folder = make_site()
    data = load_site_data("A", make_task(), folder)
    assert [len(data.train), len(data.validation), len(data.test)] == [5, 2, 3] and data.notes == ()
    assert data.train.patients == ("p0", "p0", "p1", "p2", "p3") and data.test.names == (
        "7.png",
        "8.png",
        "9.png",
    )
    assert data.split("train") is data.train
    assert {*load_site_data("A", make_task(resplit=3), folder).train.patients} != {
        *data.train.patients
    }
    assert class_counts(data.train.targets, make_task()).tolist() == [5 * 256 - 5 * 16, 5 * 16]
    shades = make_task("classification")
    data = load_site_data("B", shades, make_site(kind="classification", name="B"))
    assert class_counts(data.train.targets, shades).tolist() == [2, 2, 1]
    for kind, targets, counts in (
        ("segmentation", [[[[1.0, 0]], [[1, 1]]]], [1, 2]),
        ("classification", [[1.0, 0], [1, 1]], [2, 1]),
    ):
        assert (
            class_counts(
                torch.tensor(targets), make_task(kind, target="multilabel", labels=["a", "b"])
            ).tolist()
            == counts
        )


@pytest.mark.parametrize("labels", [["square"], ["background", "square"]])
def test_class_counts_of_an_empty_split_on_disk(
    labels: list[str], make_site: SiteOf, make_task: TaskOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An outside site with test images only; every class counts zero, as in memory."""
    monkeypatch.setattr(decoding, "_IN_MEMORY", 0)
    folder = make_site({"test": ["a", "b"]})
    task = make_task(target="binary" if len(labels) == 1 else "multiclass", labels=labels)
    on_disk = load_site_data("A", task, folder, role="outside", in_memory=False).train
    in_memory = load_site_data("A", task, folder, role="outside").train
    assert not on_disk.in_memory and in_memory.in_memory
    for split in (on_disk, in_memory):
        assert class_counts(split.targets, task).tolist() == [0, 0]


def test_joined_splits_keep_patients_apart_and_images_as_they_are() -> None:
    pictures = Split(
        torch.rand(2, 1, 4, 4), torch.zeros(2, 4, 4, dtype=torch.long), ("p", "q"), ("a", "b")
    )
    both = joined([pictures, pictures], ["0", "1"])
    assert (
        isinstance(both.images, torch.Tensor)
        and both.images.shape == (4, 1, 4, 4)
        and both.patients == ("0/p", "0/q", "1/p", "1/q")
    )
    volumes = Split(
        (torch.ones(1, 3, 4, 5), torch.ones(1, 2, 2, 2)),
        (torch.ones(3, 4, 5), torch.ones(2, 2, 2)),
        ("p", "q"),
        ("a", "b"),
    )
    several = joined([volumes, volumes], ["0", "1"])
    assert several.in_memory
    assert [tuple(several.images[row].shape[1:]) for row in range(4)] == [(3, 4, 5), (2, 2, 2)] * 2
    assert len(several.targets) == len(several) == 4 and several.targets[-1].shape == (2, 2, 2)
    images, targets = several.take(torch.tensor([1, 3]))
    assert images.shape == (2, 1, 2, 2, 2) and targets.shape == (2, 2, 2, 2)
    for split in (several, volumes):
        assert [part.shape for part in split.take(torch.zeros(0, dtype=torch.long))] == [
            (0, 1, 3, 4, 5),
            (0, 3, 4, 5),
        ]
