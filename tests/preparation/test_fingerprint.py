"""A fingerprint: the numbers of the training images, and nothing that tells whose they are."""

import json
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
import pytest
from PIL import Image

from helpers.fixture_types import SiteOf, TaskOf
from helpers.volume_sites import cube_task, dicom_series, make_volumes
from medflare.core.errors import DataError
from medflare.data.datalist import DatalistItem
from medflare.data.decoding import Source
from medflare.preparation.fingerprint import (
    DatasetFingerprint,
    fingerprint_of,
    fingerprints,
    read_fingerprints,
    to_json,
)

SPLITS = {"training": ["smith", "smith", "jones"], "validation": ["brown"], "test": ["davis"]}


def test_numbers_of_the_training_images(make_site: SiteOf, make_task: TaskOf) -> None:
    folder = make_site(SPLITS)
    (actual,) = fingerprints(folder, make_task())
    images = np.stack(
        [np.asarray(Image.open(folder / f"images/{number}.png"), np.float64) for number in range(3)]
    )
    inside = images > 150  # the squares, see make_site
    assert (actual.site, actual.images, actual.patients) == ("A", 3, 2)
    assert actual.sizes.minimum == actual.sizes.median == actual.sizes.maximum == (16.0, 16.0)
    assert actual.spacings is None and actual.extents is None and actual.zeros == 0
    (channel,) = actual.channels
    assert channel.foreground is not None
    for values, seen in ((images, channel.overall), (images[inside], channel.foreground)):
        assert (seen.mean, seen.deviation) == pytest.approx((values.mean(), values.std()))
        assert [seen.p0_5, seen.median, seen.p99_5] == pytest.approx(
            np.percentile(values, (0.5, 50, 99.5))
        )
    assert actual.classes["square"].images == 3 and actual.classes["square"].share == pytest.approx(
        16 / 256
    )
    for number in (3, 4):  # of validation and test: they are not read
        (folder / f"images/{number}.png").write_bytes(b"broken")
    assert fingerprints(folder, make_task()) == [actual]


def test_a_fingerprint_has_no_names_of_files_or_patients(
    make_site: SiteOf, make_task: TaskOf, tmp_path: Path
) -> None:
    text = json.dumps(to_json(fingerprints(make_site(SPLITS), make_task())))
    for word in ("smith", "jones", "brown", "davis", ".png", "images/", str(tmp_path)):
        assert word not in text
    assert text.count('"A"') == 1  # the site alone


def test_one_image_in_memory_at_a_time(
    make_site: SiteOf, make_task: TaskOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: list[weakref.ref[np.ndarray]] = []
    read = Source.image

    def image(source: Source, entry: DatalistItem) -> Any:
        assert [kept for kept in alive if kept() is not None] == []
        actual = read(source, entry)
        array = actual.array.copy()
        alive.append(weakref.ref(array))
        return actual._replace(array=array)

    monkeypatch.setattr(Source, "image", image)
    fingerprints(make_site(SPLITS), make_task())
    assert len(alive) == 3


def test_volumes_as_stored_along_the_axes_of_the_task(tmp_path: Path) -> None:
    folder = make_volumes(tmp_path / "A")
    (actual,) = fingerprints(folder, cube_task(spacing=[1.0, 1.0, 1.0], orientation="SPR"))
    assert actual.spacings is not None and actual.extents is not None
    assert actual.spacings.median == pytest.approx((3.0, 1.0, 2.0))
    assert actual.sizes.minimum == (10.0, 14.0, 12.0) and actual.sizes.maximum == (11.0, 14.0, 12.0)
    assert actual.sizes.median == (10.0, 14.0, 12.0) and actual.extents.maximum == pytest.approx(
        (33.0, 14.0, 24.0)
    )
    assert len(actual.channels) == 2 and actual.learnt["channels"] == ["pre", "flair"]


def test_slices_of_a_volume_count_as_images(tmp_path: Path) -> None:
    folder = make_volumes(tmp_path / "A", patients={"training": 1, "validation": 1, "test": 1})
    (actual,) = fingerprints(
        folder, cube_task(spatial_dims=2, size=[16, 16], slices={"keep": "foreground"})
    )
    # A cube of five voxels.
    assert (actual.images, actual.patients, actual.classes["cube"].images) == (5, 1, 5)
    assert len(actual.sizes.median) == 2


def test_classes_of_images(make_site: SiteOf, make_task: TaskOf) -> None:
    task = make_task("classification", labels=["dark", "medium", "bright"], resplit=None)
    (actual,) = fingerprints(make_site(kind="classification"), task)
    seen = {name: (presence.images, presence.share) for name, presence in actual.classes.items()}
    assert seen == {"dark": (2, None), "medium": (2, None), "bright": (1, None)}
    assert [channel.foreground for channel in actual.channels] == [None]


def test_numbers_of_few_patients_are_suppressed(make_site: SiteOf, make_task: TaskOf) -> None:
    """Two patients, of whom one shows both structures and the other none."""
    values = {"square": [1], "nothing": [2]}
    task = make_task(target="multilabel", labels=list(values), label_values=values)
    folder = make_site(SPLITS)
    masks = [
        entry["label"] for entry in json.loads((folder / "datalist.json").read_text())["training"]
    ]
    for mask in masks[:2]:  # of the one with two images
        Image.fromarray(np.zeros((16, 16), np.uint8)).save(folder / mask)

    def with_minimum(minimum: int) -> DatasetFingerprint | None:
        return fingerprint_of("A", task, lambda task: Source(folder, task), minimum)

    whole = with_minimum(1)
    guarded = with_minimum(2)
    assert (
        whole == with_minimum(0)
        and whole is not None
        and guarded is not None
        and with_minimum(3) is None
    )
    assert whole.classes["square"].images == 1 and whole.channels[0].foreground is not None
    assert (guarded.classes["square"].images, guarded.classes["square"].share) == (None, None)
    assert guarded.classes["nothing"].images == 0 and guarded.channels[0].foreground is None
    assert guarded.channels[0].overall == whole.channels[0].overall
    ends = guarded.sizes
    assert (ends.minimum, ends.maximum) == (ends.p10, ends.p90)
    assert (
        DatasetFingerprint(
            **{**to_json([guarded])["sites"][0], "sizes": ends, "channels": (), "classes": {}}
        ).patients
        == 2
    )


def test_damaged_images(make_site: SiteOf, make_task: TaskOf) -> None:
    folder = make_site(SPLITS)
    (folder / "images/0.png").write_bytes(b"broken")
    with pytest.raises(DataError, match=r"0\.png"):
        fingerprints(folder, make_task())
    skips: dict[str, Any] = {"unreadable": "skip", "unreadable_limit": {"share": 1.0}}
    assert fingerprints(folder, make_task(**skips))[0].images == 2
    with pytest.raises(DataError, match="unreadable_limit"):
        fingerprints(folder, make_task(unreadable="skip"))
    for number in (1, 2):
        (folder / f"images/{number}.png").unlink()
    with pytest.raises(DataError, match="site A"):
        fingerprints(folder, make_task(**skips))


def test_fingerprints_are_read_back_and_other_files_refused(
    make_site: SiteOf, make_task: TaskOf, tmp_path: Path
) -> None:
    actual = fingerprints(make_site().parent, make_task())
    path = tmp_path / "sites.json"
    path.write_text(json.dumps(to_json(actual)))
    assert read_fingerprints([path]) == actual
    with pytest.raises(DataError, match="site A"):
        read_fingerprints([path, path])
    for content in (
        "{",
        "[]",
        '{"format": "medflare fingerprint 0", "sites": []}',
        '{"format": "medflare fingerprint 1", "sites": [{}]}',
    ):
        path.write_text(content)
        with pytest.raises(DataError, match=r"sites\.json"):
            read_fingerprints([path])


def test_the_draw_is_the_same_every_time(
    make_site: SiteOf, make_task: TaskOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("medflare.preparation.fingerprint._DRAWN", 50)  # of 256 pixels
    folder = make_site()
    first, second = (fingerprints(folder, make_task()) for _ in range(2))
    assert first == second and isinstance(first[0], DatasetFingerprint)
    monkeypatch.undo()
    assert (
        fingerprints(folder, make_task())[0].channels[0].overall.median
        != first[0].channels[0].overall.median
    )


def test_a_saved_fingerprint_is_made_again_when_a_slice_is_overwritten(tmp_path: Path) -> None:
    """Which changes neither its folder's time nor the datalist."""
    slices = dicom_series(tmp_path / "ct")
    listed = {"training": [{"image": "ct", "label": 0}], "validation": [], "test": []}
    (tmp_path / "datalist.json").write_text(json.dumps(listed))
    task = cube_task(
        channels=1,
        kind="classification",
        target="multiclass",
        labels=["healthy", "ill"],
        network={"name": "small_cnn", "channels": [2, 4]},
        loss={"name": "ce"},
        metric="accuracy",
    )
    before = fingerprints(tmp_path, task, sample=1)
    assert fingerprints(tmp_path, task, sample=1) == before
    file = pydicom.dcmread(slices / "2.dcm")
    file.PixelData = (file.pixel_array + 5000).tobytes()
    file.save_as(slices / "2.dcm")
    after = fingerprints(tmp_path, task, sample=1)
    difference = after[0].channels[0].overall.mean - before[0].channels[0].overall.mean
    assert difference == pytest.approx(5000 / 4)
