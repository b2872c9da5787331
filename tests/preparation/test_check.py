"""Data and tasks are checked before a site joins: every problem is listed with its remedy."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from helpers.downloaded_folders import classes, picture
from helpers.fixture_types import Edit, SiteOf, TaskOf
from helpers.small_tasks import small_task
from helpers.volume_sites import cube_task, make_volumes
from medflare.core.errors import ConfigError, DataError
from medflare.data import decoding
from medflare.data.loading import SiteData, Split, load_site_data
from medflare.data.local import LocalSettings
from medflare.data.transforms import Preprocessing
from medflare.preparation import check
from medflare.preparation.check import (
    SiteCheck,
    check_site,
    check_task,
    intensity_problem,
    site_shift,
)
from medflare.preparation.dataset_import.datalists import import_folder
from medflare.tasks.config import TaskConfig, load_task


def problems(folder: Path, task: TaskConfig) -> list[str]:
    report = check_site(folder, task)
    assert (
        report.ok == (not report.sites[folder.name].problems) == ("NOT OK" not in report.render())
    )
    return report.sites[folder.name].problems


def test_a_site_without_problems(make_site: SiteOf, make_task: TaskOf, tmp_path: Path) -> None:
    report = check_site(make_site(), make_task(), out=tmp_path / "out")
    assert report.ok and list(report.sites) == ["A"]
    site = report.sites["A"]
    assert site.splits == {"train": (5, 4), "validation": (2, 2), "test": (3, 2)}
    assert site.sizes == {"16 x 16": 10} and site.classes == {"not square": 1200, "square": 80}
    assert (
        site.intensity["minimum"] >= 20
        and site.intensity["maximum"] <= 210
        and site.intensity["deviation"] > 20
    )
    assert report.shift is None and "two sites" in report.shift_reason
    assert report.thumbnails == tmp_path / "out/thumbnails.png" and report.thumbnails.is_file()
    text = report.render()
    for words in (
        "\nA\n",
        "train            5 images of 4 patients",
        "16 x 16 (10)",
        "square 80",
        "not measured",
        "thumbnails.png",
    ):
        assert words in text


def test_few_patients_behind_a_result_are_named(make_site: SiteOf, make_task: TaskOf) -> None:
    notes = check_site(make_site(), make_task()).sites["A"].notes
    few = "fewer than 6 patients, so no interval and little meaning: "
    assert f"{few}validation 2, test 2" in notes
    patients = {
        "training": ["a", "b", "c"],  # of grades 0, 1, 2, and so on
        "validation": [f"d{number}" for number in range(18)],
        "test": [*"efghij", "e", "g"],  # of grade 0: e, h, e; of 1: f, i, g; of 2: g, j
    }
    folder = make_site(patients, "classification", "B")
    (line,) = [
        note
        for note in check_site(folder, make_task("classification")).sites["B"].notes
        if few in note
    ]
    first, second, third = make_task("classification").classes
    assert line == f"{few}{first!r} in test 2, {second!r} in test 3, {third!r} in test 2"


def test_every_problem_is_listed(make_site: SiteOf, make_task: TaskOf) -> None:
    folder = make_site()
    (folder / "images/0.png").unlink()
    (folder / "images/3.png").write_bytes(b"broken")
    Image.fromarray(np.full((16, 16), 7, np.uint8)).save(folder / "images/5_mask.png")
    missing, broken, value = problems(folder, make_task())
    assert "0.png" in missing and "3.png" in broken and "5_mask.png: label value 7" in value


@pytest.mark.timeout(60)
def test_a_pipe_among_the_images_is_not_opened(make_site: SiteOf, make_task: TaskOf) -> None:
    folder = make_site()
    for name in ("images/0.png", "images/5_mask.png"):
        (folder / name).unlink()
        os.mkfifo(folder / name)
    assert len(problems(folder, make_task())) == 2


@pytest.mark.timeout(60)
@pytest.mark.parametrize("spelling", ["{}", "images/../{}"])
def test_an_image_that_is_listed_many_times_is_found_before_reading(
    make_site: SiteOf, make_task: TaskOf, edit: Edit, spelling: str
) -> None:
    folder = make_site()

    def repeat(content: dict[str, Any]) -> None:
        entry = content["training"][0]
        content["training"] += [
            {**entry, "image": spelling.format(entry["image"])}
            for _ in range(30_000 if spelling == "{}" else 3)
        ]

    edit(folder, repeat)
    (problem,) = problems(folder, make_task())
    assert "list it once" in problem


def test_only_the_first_problems_are_printed(make_site: SiteOf, make_task: TaskOf) -> None:
    folder = make_site({"training": [f"p{n}" for n in range(20)]})
    for number in range(20):
        (folder / f"images/{number}.png").unlink()
    text = check_site(folder, make_task()).render()
    assert text.count("PROBLEM") == 1 and f"20 alike, the first: {folder}/images/0.png: " in text
    lines = SiteCheck(problems=[f"{number}.png: {number}" for number in range(20)])
    text = "\n".join(lines.lines(make_task()))
    assert text.count("PROBLEM") == 11 and "... and 10 more" in text


def test_problems_of_the_datalist(make_site: SiteOf, make_task: TaskOf) -> None:
    crossing = make_site({"training": ["a"], "validation": ["a"], "test": ["b"]})
    assert "patient a" in problems(crossing, make_task())[0]
    unreadable = make_site(name="B")
    (unreadable / "datalist.json").write_text("{")
    assert "JSON" in problems(unreadable, make_task())[0]


def test_a_folder_of_sites(make_site: SiteOf, make_task: TaskOf, tmp_path: Path) -> None:
    (tmp_path / "DATA").mkdir()
    for name in ("berlin", "paris"):  # the folders behind the links have the same name
        (tmp_path / "DATA" / name).symlink_to(make_site(name=f"store/{name}/images"))
    broken = make_site(name="DATA/rome")
    (broken / "images/0.png").unlink()
    report = check_site(tmp_path / "DATA", make_task())
    assert list(report.sites) == ["berlin", "paris", "rome"] and not report.ok
    assert report.shift is not None  # between the two that can be read
    assert "(chance 0.50), without rome" in report.render()
    (tmp_path / "DATA" / "paris" / "datalist.json").write_text("{")
    report = check_site(tmp_path / "DATA", make_task())
    assert report.shift is None
    reason = "shift between sites: not measured, as it takes two sites without problems; "
    assert f"{reason}see those of paris, rome" in report.render()
    assert list(check_site(tmp_path / "DATA" / "berlin", make_task()).sites) == ["berlin"]
    (tmp_path / "no site").mkdir()
    for name, token in (("no site", "medflare data init"), ("nowhere", "nowhere")):
        with pytest.raises(DataError, match=token):
            check_site(tmp_path / name, make_task())


def test_folders_without_a_datalist_are_named(
    make_site: SiteOf, make_task: TaskOf, tmp_path: Path
) -> None:
    root = tmp_path / "DATA"
    site = make_site(name="DATA/berlin")
    for name in ("rome", "paris", ".cache", "check", "runs/fedavg"):
        (root / name).mkdir(parents=True)
    (root / "runs/fedavg/results.json").touch()
    report = check_site(root, make_task(), out=root / "check")
    line = "note: folders without a datalist.json are no sites: paris, rome; write it with "
    assert f"{line}medflare data init {root}/paris" in report.render().split("\n")
    assert report.ok and list(report.sites) == ["berlin"]
    assert check_site(root, make_task()).notes == report.notes  # the thumbnails are there now
    assert "are no sites" not in check_site(site, make_task()).render()


OUTSIDE = {"training": [], "validation": [], "test": ["p0", "p0", "p1"]}
NOTE = "note: has test images only, so it can only be an outside site"


@pytest.mark.parametrize("kind", ["segmentation", "classification"])
@pytest.mark.parametrize("splits", [OUTSIDE, {"test": ["p0", "p0", "p1"]}])
def test_a_site_with_test_images_only_is_a_legal_outside_site(
    splits: dict[str, list[str]], kind: str, make_site: SiteOf, make_task: TaskOf
) -> None:
    task = make_task(kind)
    report = check_site(make_site(splits, kind), task)
    assert report.ok and NOTE in report.render() and "PROBLEM" not in report.render()
    site = report.sites["A"]
    assert (
        site.splits == {"train": (0, 0), "validation": (0, 0), "test": (3, 2)} and not site.classes
    )
    load_site_data("A", task, report.root, role="outside")


def test_one_of_several_sites_must_train(
    make_site: SiteOf, make_task: TaskOf, tmp_path: Path
) -> None:
    make_site(OUTSIDE, name="DATA/external")
    report = check_site(tmp_path / "DATA", make_task())
    assert (
        not report.ok
        and report.render().count("no site can train") == 1
        and not report.sites["external"].problems
    )
    inside = make_site(name="DATA/inside")
    report = check_site(tmp_path / "DATA", make_task())
    (note, _few) = report.sites["inside"].notes
    assert note.startswith("3 images equal one of another split, so tests may tell what was")
    for file in inside.glob("images/?.png"):
        Image.fromarray(np.array(Image.open(file)) // 2).save(file)
    report = check_site(tmp_path / "DATA", make_task(), out=tmp_path / "out")
    assert report.ok and NOTE in report.render()
    make_site({"training": ["p0"], "validation": ["p1"], "test": []}, name="DATA/untested")
    report = check_site(tmp_path / "DATA", make_task())
    assert not report.ok and "'test'" in report.sites["untested"].problems[-1]


def test_an_outside_sites_broken_image_is_a_problem(make_site: SiteOf, make_task: TaskOf) -> None:
    folder = make_site(OUTSIDE)
    (folder / "images/1.png").write_bytes(b"broken")
    assert "1.png" in problems(folder, make_task())[0]


def test_a_class_that_no_image_shows_is_noted(
    make_site: SiteOf, make_task: TaskOf, tmp_path: Path
) -> None:
    task = make_task("classification", labels=["dark", "medium", "bright", "brightest"])
    report = check_site(make_site(kind="classification"), task)
    assert report.ok and "note: class brightest" in report.render()
    import_folder(classes(tmp_path / "B", patients=12, names=("benign", "melanoma")))
    report = check_site(
        tmp_path / "B", make_task("classification", labels=["benign", "dysplastic", "melanoma"])
    )
    site = report.sites["B"]
    assert report.ok and site.classes["dysplastic"] == 0 and site.classes["melanoma"] > 0
    assert (
        "naevus"
        in problems(tmp_path / "B", make_task("classification", labels=["benign", "naevus"]))[0]
    )


def test_the_same_image_of_two_patients_is_noted(make_site: SiteOf, make_task: TaskOf) -> None:
    folder = make_site()  # 0 and 1 are of one patient, 2 is of another, 9 is in another split
    for other in ("1.png", "2.png", "9.png"):
        Image.open(folder / "images/0.png").save(folder / "images" / other, compress_level=0)
    site = check_site(folder, make_task()).sites["A"]
    (note, leak, _few) = site.notes
    assert "1 images equal one of another patient or site" in note and "2.png and " in note
    assert "1 images equal one of another split" in leak and "9.png and " in leak
    for number in (0, 1, 2, 9):  # constant images are equal, but no copies
        Image.new("L", (16, 16)).save(folder / f"images/{number}.png")
    assert check_site(folder, make_task()).ok


def test_the_same_image_at_two_sites_is_noted(
    make_site: SiteOf, make_task: TaskOf, tmp_path: Path
) -> None:
    """With its paths, and with its labels if they contradict each other."""
    for site in ("north", "south"):
        folder = tmp_path / "DATA" / site
        import_folder(classes(folder, patients=12, names=("benign", "melanoma")))
        for number, path in enumerate(sorted(folder.rglob("*.png"))):
            picture(path, number + (50 if site == "north" else 100))
    copied = tmp_path / "DATA/north/benign/p00_0.png"
    shutil.copy(copied, tmp_path / "DATA/south/melanoma/p01_0.png")
    task = make_task("classification", labels=["benign", "melanoma"])
    report = check_site(tmp_path / "DATA", task)
    south = report.sites["south"]
    note = next(line for line in (*south.notes, *south.problems) if "images equal" in line)
    assert "south/melanoma/p01_0.png and " in note and "north/benign/p00_0.png" in note
    assert "with other labels" in note
    assert not any("images equal" in note for note in report.sites["north"].notes)


def test_images_that_differ_in_one_number_are_no_copies(
    make_site: SiteOf, make_task: TaskOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of large images a part is compared first, here every fourth number along each axis."""
    monkeypatch.setattr(check, "_MOST_NUMBERS", 16)
    folder = make_site()
    pixels = np.array(Image.open(folder / "images/0.png"))
    pixels[1, 1] += 1
    Image.fromarray(pixels).save(folder / "images/9.png")
    (_few,) = check_site(folder, make_task()).sites["A"].notes
    pixels[1, 1] -= 1
    Image.fromarray(pixels).save(folder / "images/9.png")
    (note, _few) = check_site(folder, make_task()).sites["A"].notes
    assert "9.png" in note and "0.png" in note


@pytest.mark.slow
def test_shift_of_real_hospitals(shared_data: Callable[[str], Path]) -> None:
    report = check_site(shared_data("fundus_vessels"), load_task("fundus_vessels"))
    assert report.ok and report.shift is not None and report.shift > 0.9
    assert report.sites["LESAV"].splits["validation"] == (3, 3)


def test_tasks_that_cannot_work(make_task: TaskOf) -> None:
    with pytest.raises(ConfigError, match=r"\[20, 20\]"):
        check_task(make_task(size=[17, 17], network={"name": "unet", "channels": [4, 8, 16]}))
    with pytest.raises(ConfigError, match="nothing"):
        check_task(make_task(network={"name": "nothing"}))
    for kind in ("segmentation", "classification"):
        check_task(make_task(kind, target="multilabel", labels=["a", "b"], loss={"name": "ce"}))


PHOTOGRAPHS = {
    "name": "ScaleIntensityRange",
    "a_min": 0,
    "a_max": 255,
    "b_min": 0.0,
    "b_max": 1.0,
    "clip": True,
}


@pytest.mark.parametrize(
    ("most", "intensity", "problem"),
    [
        (255, PHOTOGRAPHS, ""),
        (9e5, PHOTOGRAPHS, "clipped"),
        (9e5, {"name": "NormalizeIntensity", "nonzero": True, "channel_wise": True}, ""),
        (9e5, {**PHOTOGRAPHS, "clip": False}, "too large"),
        (0.5, PHOTOGRAPHS, "constant"),
    ],
)
def test_unsuitable_intensity_transforms(
    make_task: TaskOf, most: float, intensity: dict[str, object], problem: str
) -> None:
    image = np.random.default_rng(0).uniform(0, most, (1, 12, 12)).astype(np.float32)
    transformed = Preprocessing(make_task(intensity=intensity)).intensities(image).numpy()
    assert intensity_problem(image, transformed).startswith(problem) and bool(
        intensity_problem(image, transformed)
    ) == bool(problem)


def test_stored_sizes_of_volumes_are_those_before_resampling(tmp_path: Path) -> None:
    folder = make_volumes(tmp_path / "A")
    check = check_site(folder, cube_task(spacing=[1, 1, 1])).sites["A"]
    assert check.sizes == {"12 x 14 x 10": 4, "12 x 14 x 11": 3}


def test_values_0_and_255_are_not_clipped() -> None:
    image = 255 * (np.arange(144).reshape(1, 12, 12) % 4 > 0).astype(np.float32)
    assert not intensity_problem(image, image / 255) and not intensity_problem(0 * image, image)


def test_an_unsuitable_intensity_transform_is_noted(tmp_path: Path) -> None:
    folder = make_volumes(tmp_path / "A")  # 0 to 130
    assert not any("intensity" in note for note in check_site(folder, cube_task()).sites["A"].notes)
    notes = check_site(folder, cube_task(intensity={**PHOTOGRAPHS, "a_max": 1})).sites["A"].notes
    assert any("ScaleIntensityRange" in note for note in notes)


@pytest.mark.parametrize("deep", [0, 1, 11, 20])
def test_pictures_of_8_and_of_16_bits_are_noted(deep: int, tmp_path: Path) -> None:
    """Scaled alike, those of 8 bits would be black, or those of 16 bits white."""
    for number, file in enumerate(sorted(classes(tmp_path, patients=20, each=1).rglob("*.png"))):
        if number < deep:
            pixels = np.asarray(Image.open(file)).astype(np.uint16)
            Image.fromarray(16 * pixels).save(file)
    import_folder(tmp_path)
    task = load_task(
        small_task("classification", target="binary", labels=["dog"]).to_dict()
        | {"intensity": {**PHOTOGRAPHS, "a_max": 65535}}
    )
    (site,) = check_site(tmp_path, task).sites.values()
    notes = [note for note in site.notes if "as of 8 bits" in note]
    assert len(notes) == (0 < deep < 20) and all(f"{20 - deep} of 20" in note for note in notes)


def _data(brightness: float, seed: int, patients: int = 30) -> SiteData:
    images = torch.tensor(
        np.random.default_rng(seed).normal(brightness, 1, (2 * patients, 1, 16, 16)),
        dtype=torch.float32,
    )
    names = tuple(f"p{number // 2}" for number in range(2 * patients))
    whole = Split(images, torch.zeros(2 * patients, 16, 16, dtype=torch.long), names, names)
    none = Split(images[:0], torch.zeros(0, 16, 16, dtype=torch.long), (), ())
    return SiteData(whole, none, none)


def test_the_shift_is_large_between_cameras_and_at_chance_without_difference() -> None:
    apart, _ = site_shift({"A": _data(0, 1), "B": _data(2, 2)})
    alike, _ = site_shift({"A": _data(0, 1), "B": _data(0, 2)})
    assert apart is not None and alike is not None
    assert apart > 0.95 and 0.3 < alike < 0.7
    assert site_shift({"A": _data(0, 1), "B": _data(0, 2, patients=2)})[0] is None
    task = load_task("phantom")
    shift, _ = site_shift(
        {name: load_site_data(name, task, None) for name in ("site-1", "site-2", "site-3")}
    )
    assert shift is not None and shift > 0.9


def test_a_task_that_trains_on_too_few_patients_is_a_problem_by_the_sites_settings(
    make_site: SiteOf, make_task: TaskOf
) -> None:
    folder = make_site({"training": ["a", "b", "c"], "validation": ["d"], "test": ["e"]})
    assert check_site(folder, make_task()).ok
    report = check_site(folder, make_task(), local=LocalSettings(minimum_patients=4))
    assert not report.ok and "minimum_patients (4)" in report.render()


@pytest.mark.parametrize("network", [{"name": "resnet18"}, {"name": "mlp", "batch_norm": True}])
def test_batches_of_one_image_are_refused(network: dict[str, Any], make_task: TaskOf) -> None:
    settings: dict[str, Any] = {"size": [32, 32], "network": network}
    check_task(make_task("classification", batch_size=2, **settings))
    with pytest.raises(ConfigError, match=rf"{network['name']} .* batch_size to 2"):
        check_task(make_task("classification", batch_size=1, **settings))


@pytest.mark.parametrize("target", ["binary", "multiclass", "multilabel"])
@pytest.mark.parametrize("filled", ["all", "most", "inside", "one"])
def test_a_structure_that_fills_every_mask_is_noted(
    target: str, filled: str, make_site: SiteOf, make_task: TaskOf
) -> None:
    """Inverted masks, all or one among others; not a large structure that leaves the corners free."""
    folder = make_site()
    for number, file in enumerate(sorted(folder.glob("images/*_mask.png"))):
        mask = (
            1 - np.asarray(Image.open(file))
            if filled != "one" or not number
            else np.asarray(Image.open(file))
        )
        if filled == "all":
            mask = np.ones_like(mask)
        if filled == "inside":
            mask = mask.copy()
            mask[0] = 0
        Image.fromarray(mask).save(file)
    labels = {"binary": ["square"], "multiclass": ["rest", "square"], "multilabel": ["square"]}
    report = check_site(folder, make_task(target=target, labels=labels[target]))
    assert ("WARNING: square fills all of 10 masks" in report.render()) == (
        filled in ("all", "most")
    )
    assert ("WARNING: square fills 1 of 10 masks, the first: " in report.render()) == (
        filled == "one"
    )


def test_batches_of_one_image_that_work(make_task: TaskOf) -> None:
    for side, name in ((64, "resnet18"), (32, "mlp")):
        network = {"name": name}
        check_task(make_task("classification", batch_size=1, size=[side] * 2, network=network))


@pytest.mark.parametrize("memory", [0, 10_000])  # none, or some of the images
@pytest.mark.parametrize("kind", ["segmentation", "classification"])
def test_images_that_are_decoded_when_used_are_those_in_memory(
    kind: str, memory: int, make_site: SiteOf, make_task: TaskOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "_IN_MEMORY", memory)
    folder = make_site(kind=kind)
    task = make_task(kind)
    held = load_site_data("A", task, folder)
    read = load_site_data("A", task, folder, in_memory=False)
    for name in ("train", "validation", "test"):
        split = held.split(name)
        other = read.split(name)
        assert (
            split.in_memory
            and not other.in_memory
            and (split.names, split.patients) == (other.names, other.patients)
        )
        for row in reversed(range(len(split))):
            assert all(torch.equal(*pair) for pair in zip(split[row], other[row], strict=True))
    assert held.notes == read.notes and held.acquired == read.acquired


def test_an_image_that_breaks_after_it_was_checked_is_named(
    make_site: SiteOf, make_task: TaskOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "_IN_MEMORY", 0)
    folder = make_site()
    task = make_task("segmentation", unreadable="skip")
    train = load_site_data("A", task, folder, in_memory=False).train
    name = train.names[1]
    next(folder.rglob(name)).write_bytes(b"broken")
    with pytest.raises(DataError, match=name):
        _ = train.images[1]


def test_slices_that_are_decoded_when_used_are_those_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "_IN_MEMORY", 0)
    folder = make_volumes(tmp_path / "A")
    task = cube_task(spatial_dims=2, size=[8, 8], slices={"axis": 2, "keep": "foreground"})
    held = load_site_data("A", task, folder).train
    read = load_site_data("A", task, folder, in_memory=False).train
    assert held.names == read.names and len(held) > len(set(held.patients))
    for row in range(len(held)):
        assert torch.equal(held.images[row], read.images[row]) and torch.equal(
            held.targets[row], read.targets[row]
        )


def test_unknown_patients_are_noted(make_site: SiteOf, make_task: TaskOf, edit: Edit) -> None:
    folder = make_site()
    assert not any("unknown" in note for note in check_site(folder, make_task()).sites["A"].notes)

    def forget(content: dict[str, Any]) -> None:
        for split in ("training", "validation", "test"):
            for item in content[split]:
                del item["patient"]

    edit(folder, forget)
    notes = check_site(folder, make_task()).sites["A"].notes
    assert "patients are unknown (none in datalist.json): each image counts as one" in notes
