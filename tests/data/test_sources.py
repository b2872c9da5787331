"""A site's pictures and masks at their stored size, from files and from the embedded federation."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from medflare.core.errors import DataError
from medflare.data.datalist import SPLITS
from medflare.data.sources import FileSource, PhantomSource
from medflare.tasks.config import TaskConfig, load_task

TaskOf = Callable[..., TaskConfig]
SiteOf = Callable[..., Path]


def mask_of(source: FileSource, number: int = 0) -> np.ndarray:
    entry = source.entries()[number]
    return source.mask(entry, source.image(entry))


def test_files(make_site: SiteOf, make_task: TaskOf) -> None:
    folder = make_site({"training": ["a", "b"], "test": ["c"]})
    source = FileSource(folder, make_task())
    entries = source.entries()
    assert [entry.name for entry in entries] == ["0.png", "1.png", "2.png"] and source.listed() == ("training", "test")
    image = source.image(entries[0])
    mask = source.mask(entries[0], image)
    assert image.array.shape == mask.shape == (1, 16, 16) and image.array.dtype == np.float32 and mask.dtype == np.int64
    assert mask.sum() == 16


def test_the_state_of_files_changes_with_any_of_them(make_site: SiteOf, make_task: TaskOf) -> None:
    folder = make_site()
    for kind, changes in (("segmentation", {"0.png": True, "0_mask.png": True, "1.png": False}), ("classification", {"0_mask.png": False})):
        source = FileSource(folder, make_task(kind))
        entries = FileSource(folder, make_task()).entries()[:1]
        for name, changed in changes.items():
            before = source.state(entries)
            os.utime(folder / "images" / name, ns=(1, len(name)))
            assert (source.state(entries) != before) == changed, (kind, name)
    (folder / "images/0.png").unlink()
    assert source.state(entries)[1] == [[[str(folder / "images/0.png"), None, None]]]


def test_masks_of_different_sizes(make_site: SiteOf, make_task: TaskOf, edit: Callable[..., None]) -> None:
    folder, other = make_site(), make_site(name="B", side=20)
    edit(folder, lambda content: content["training"][0].update(label=["images/0_mask.png", f"../{other.name}/images/0_mask.png"]))
    source = FileSource(folder, make_task(target="multilabel", labels=["a", "b"]), [other])
    with pytest.raises(DataError, match=r"0_mask\.png"):
        mask_of(source)


def test_one_file_for_two_channels(make_site: SiteOf, make_task: TaskOf, edit: Callable[..., None]) -> None:
    """The same scan twice trains without a word, and half of what the network is meant to see is missing."""
    folder, task = make_site(), make_task(channels=["pre", "flair", "post"], missing_channels="zeros")
    (folder / "images/link.png").symlink_to(folder / "images/0.png")
    for again in ("images/0.png", "images/../images/0.png", "images/link.png"):
        edit(folder, lambda content, again=again: content["training"][0].update(image=["images/0.png", None, again]))
        source = FileSource(folder, task)
        with pytest.raises(DataError, match="pre and post"):
            source.image(source.entries()[0])
    edit(folder, lambda content: content["training"][0].update(image=["images/0.png", None, "images/1.png"]))
    source = FileSource(folder, task)
    assert source.image(source.entries()[0]).array.shape == (3, 16, 16)


def test_a_photograph_of_one_value_is_no_image(make_site: SiteOf, make_task: TaskOf, edit: Callable[..., None]) -> None:
    """A slice of a volume may be, where it is a file of its own: above the head there is nothing."""
    folder = make_site()
    Image.fromarray(np.full((16, 16), 7, np.uint8)).save(folder / "images/0.png")
    source = FileSource(folder, make_task())
    assert (source.image(source.entries()[0]).array == 7).all()
    source = FileSource(folder, make_task("classification"))
    with pytest.raises(DataError, match=r"0\.png"):
        source.image(source.entries()[0])
    Image.new("RGB", (16, 16), (9, 8, 7)).save(folder / "images/0.png")
    with pytest.raises(DataError, match=r"0\.png"):
        FileSource(folder, make_task("classification", channels=3)).image(source.entries()[0])
    task = make_task("classification", channels=["pre", "post"], missing_channels="zeros")
    for other, constant in ((None, True), ("images/1.png", False)):
        edit(folder, lambda content, other=other: content["training"][0].update(image=["images/0.png", other]))
        source = FileSource(folder, task)
        if constant:
            with pytest.raises(DataError, match=r"0\.png"):
                source.image(source.entries()[0])
        else:  # a channel of one number beside another that is none may stand in for one that was not taken
            assert source.image(source.entries()[0]).array.shape == (2, 16, 16)
    Image.fromarray(np.zeros((16, 16), np.uint8)).save(folder / "images/1_mask.png")
    slices = FileSource(folder, make_task())
    assert not mask_of(slices, 1).any(), "a patient without the structure is one"


def test_the_embedded_federation() -> None:
    source = PhantomSource("site-1", load_task("phantom"))
    entries = source.entries()
    assert source.listed() == SPLITS and {entry.split for entry in entries} == set(SPLITS)
    image = source.image(entries[0])
    mask = source.mask(entries[0], image)
    assert image.array.shape == (3, 64, 64) and mask.shape == (1, 64, 64) and set(np.unique(mask)) <= {0, 1, 2}
    grades = PhantomSource("site-1", load_task("phantom_grades")).entries()
    assert {entry.label for entry in grades} == {0, 1, 2}
    assert source.state(entries) != PhantomSource("site-2", load_task("phantom")).state(entries)


def test_a_patient_without_findings_has_as_many_masks_as_the_others(make_site: SiteOf, make_task: TaskOf) -> None:
    """One mask for three labels was refused, and with `unreadable` "skip" a site lost its negatives."""
    folder = make_site()
    source = FileSource(folder, make_task(target="multilabel", labels=["a", "b", "c"]))
    entry = source.entries()[0]
    for masks in (np.zeros((16, 16, 3), np.uint8), np.eye(16, dtype=np.uint8)[..., None] * np.ones(3, np.uint8)):
        Image.fromarray(masks).save(entry.masks[0])
        np.testing.assert_array_equal(mask_of(source), masks.transpose(2, 0, 1))
    assert mask_of(FileSource(folder, make_task())).shape == (1, 16, 16)
    named = make_task(target="multilabel", labels=["a", "b"], label_values={"a": [1, 2], "b": [2]})
    assert mask_of(FileSource(folder, named)).shape == (1, 16, 16)
