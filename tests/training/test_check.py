import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from helpers.downloaded_folders import classes
from helpers.volume_sites import cube_task, make_volumes
from medflare.core.errors import ConfigError, DataError
from medflare.data.dataset_import.datalists import init
from medflare.data.loading import SiteData, Split, load_site_data
from medflare.tasks.config import TaskConfig, load_task
from medflare.training.check import CheckReport, IntensityCheck, SiteReport, check_site, check_task, site_shift

TaskOf = Callable[..., TaskConfig]
SiteOf = Callable[..., Path]
Edit = Callable[..., None]


def test_a_sound_site(make_site: SiteOf, make_task: TaskOf, tmp_path: Path) -> None:
    report = check_site(make_site(), make_task(), out=tmp_path / "out")
    assert report.ok and list(report.sites) == ["A"]
    site = report.sites["A"]
    assert site.splits == {"train": (5, 4), "validation": (2, 2), "test": (3, 2)}
    assert site.sizes == {"16 x 16": 10} and site.classes == {"not square": 1200, "square": 80}
    assert site.intensity["minimum"] >= 20 and site.intensity["maximum"] <= 210 and site.intensity["deviation"] > 20
    assert report.shift is None and "two sites" in report.shift_reason
    assert report.thumbnails == tmp_path / "out/thumbnails.png"
    text = report.render()
    for word in ("\nA\n", "train            5 images of 4 patients", "16 x 16 (10)", "square 80", "not measured", "OK"):
        assert word in text
    assert "NOT OK" not in text


def test_every_problem_is_listed(make_site: SiteOf, make_task: TaskOf) -> None:
    folder = make_site()
    (folder / "images/0.png").unlink()
    (folder / "images/3.png").write_bytes(b"broken")
    Image.fromarray(np.full((16, 16), 7, np.uint8)).save(folder / "images/5_mask.png")
    report = check_site(folder, make_task())
    assert not report.ok and len(report.sites["A"].problems) == 3
    text = report.render()
    for word in ("0.png: file not found", "3.png: cannot be read", "5_mask.png: label value 7", "NOT OK"):
        assert word in text


@pytest.mark.timeout(60)
def test_a_pipe_among_the_images_is_a_problem_like_others(make_site: SiteOf, make_task: TaskOf) -> None:
    folder = make_site()
    for name in ("images/0.png", "images/5_mask.png"):
        (folder / name).unlink()
        os.mkfifo(folder / name)
    problems = check_site(folder, make_task()).sites["A"].problems
    assert len(problems) == 2 and all("neither a regular file nor a folder" in problem for problem in problems)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("spelling", ["{}", "images/../{}"])
def test_a_long_list_of_a_few_images_is_answered_without_reading_it(
    make_site: SiteOf, make_task: TaskOf, edit: Edit, spelling: str
) -> None:
    folder = make_site()

    def repeat(content: dict[str, Any]) -> None:
        entry = content["training"][0]
        content["training"] += [{**entry, "image": spelling.format(entry["image"])} for _ in range(30_000 if spelling == "{}" else 3)]

    edit(folder, repeat)
    (problem,) = check_site(folder, make_task()).sites["A"].problems
    assert "list it once" in problem


def test_many_problems_are_counted(make_site: SiteOf, make_task: TaskOf) -> None:
    folder = make_site({"training": [f"p{n}" for n in range(20)]})
    for number in range(20):
        (folder / f"images/{number}.png").unlink()
    problems = check_site(folder, make_task()).sites["A"].problems
    assert len(problems) == 11 and problems[-1] == "... and 10 more"


def test_problems_beyond_single_files(make_site: SiteOf, make_task: TaskOf) -> None:
    crossing = make_site({"training": ["a"], "validation": ["a"], "test": ["b"]})
    assert "patient a is also in" in check_site(crossing, make_task()).sites["A"].problems[0]
    unreadable = make_site(name="B")
    (unreadable / "datalist.json").write_text("{")
    assert "not valid JSON" in check_site(unreadable, make_task()).sites["B"].problems[0]


def test_a_place_for_thumbnails_that_cannot_be_is_said_before_anything_is_read(
    make_site: SiteOf, make_task: TaskOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("medflare.training.check._check_folder", None)
    (tmp_path / "taken").touch()
    with pytest.raises(OSError, match="taken"):
        check_site(make_site(), make_task(), out=tmp_path / "taken" / "check")


def test_a_folder_of_sites(make_site: SiteOf, make_task: TaskOf, tmp_path: Path) -> None:
    for name in ("A", "B"):
        make_site(name=name)
    (tmp_path / "no site").mkdir()
    broken = make_site(name="C")
    (broken / "images/0.png").unlink()
    report = check_site(tmp_path, make_task())
    assert list(report.sites) == ["A", "B", "C"] and not report.ok
    assert report.shift is not None  # between the two that can be read
    with pytest.raises(DataError, match="medflare data init"):
        check_site(tmp_path / "no site", make_task())
    with pytest.raises(DataError, match="nowhere"):
        check_site(tmp_path / "nowhere", make_task())


def test_sites_behind_links_keep_the_names_that_they_are_listed_under(make_site: SiteOf, make_task: TaskOf, tmp_path: Path) -> None:
    """Where the links lead, both folders have one name; one site would stand for both."""
    data = tmp_path / "DATA"
    data.mkdir()
    for name in ("berlin", "paris"):
        (data / name).symlink_to(make_site(name=f"store/{name}/images"))
    assert list(check_site(data, make_task()).sites) == ["berlin", "paris"]
    assert list(check_site(data / "berlin", make_task()).sites) == ["berlin"]


def test_notes_are_shown(make_site: SiteOf, make_task: TaskOf) -> None:
    task = make_task("classification", labels=["dark", "medium", "bright", "brightest"])
    report = check_site(make_site(kind="classification"), task)
    assert report.ok and "\n  note: class brightest is absent" in report.render()


def test_a_class_that_a_hospital_lacks_does_not_shift_the_others(make_task: TaskOf, tmp_path: Path) -> None:
    init(classes(tmp_path / "B", patients=12, names=("benign", "melanoma")))
    report = check_site(tmp_path / "B", make_task("classification", labels=["benign", "dysplastic", "melanoma"]))
    site = report.sites["B"]
    assert report.ok and site.classes["dysplastic"] == 0 and site.classes["melanoma"] > 0
    assert '"labels" of datalist.json count so: 1 melanoma as 2 melanoma' in site.notes
    other = check_site(tmp_path / "B", make_task("classification", labels=["benign", "naevus"]))
    assert not other.ok and "call 1 'melanoma', task shades has 0 benign, 1 naevus" in other.render()


def test_the_same_image_of_two_patients_is_noted(make_site: SiteOf, make_task: TaskOf) -> None:
    """A copy, or the same picture saved anew, that no check of names finds."""
    folder = make_site()  # 0 and 1 are of one patient, 9 is of another and in another split
    for other in ("1.png", "9.png"):
        Image.open(folder / "images/0.png").save(folder / "images" / other, compress_level=0)
    notes = check_site(folder, make_task()).sites["A"].notes
    assert len([note for note in notes if "9.png" in note and "0.png" in note]) == 1


def test_pictures_of_one_value_are_no_copies_of_each_other(make_site: SiteOf, make_task: TaskOf) -> None:
    folder = make_site()
    for number in (0, 9):
        Image.new("L", (16, 16)).save(folder / f"images/{number}.png")
    assert not check_site(folder, make_task()).sites["A"].notes


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


# -- report ---------------------------------------------------------------------------------------------------------------


SOUND = SiteReport(
    splits={"train": (5, 4), "validation": (2, 2), "test": (3, 2)},
    sizes={"16 x 16": 7, "32 x 16": 3},
    classes={"not square": 1200, "square": 80},
    intensity={"minimum": 20.0, "mean": 41.25, "deviation": 12.5, "maximum": 210.0},
    notes=["an odd thing"],
)


def test_a_sound_pair_of_sites(make_task: TaskOf) -> None:
    report = CheckReport(make_task(), Path("/data"), {"A": SOUND, "B": SiteReport()}, shift=0.875, thumbnails=Path("out/thumbnails.png"))
    assert report.ok
    lines = report.render().splitlines()
    for shown in (
        "5 images of 4 patients",
        "16 x 16 (7), 32 x 16 (3)",
        "not square 1200, square 80",
        "an odd thing",
        "0.88",
        "thumbnails.png",
    ):
        assert len([line for line in lines if shown in line]) == 1


def test_problems_are_the_verdict(make_task: TaskOf) -> None:
    report = CheckReport(
        make_task(), Path("/data"), {"A": SiteReport(problems=["0.png: file not found"])}, shift_reason="it takes two sites"
    )
    assert not report.ok and "0.png: file not found" in report.render()


def test_many_sizes_are_counted(make_task: TaskOf) -> None:
    sizes = {f"{side} x {side}": 1 for side in (8, 16, 32, 64, 128)}
    report = CheckReport(make_task("classification"), Path("/data"), {"A": SiteReport(sizes=sizes, classes={"dark": 2})})
    assert "stored sizes     8 x 8 (1), 16 x 16 (1), 32 x 32 (1) and 2 more" in report.render()
    assert "training images  dark 2" in report.render()


# -- intensities ----------------------------------------------------------------------------------------------------------


PHOTOGRAPHS = {"name": "ScaleIntensityRange", "a_min": 0, "a_max": 255, "b_min": 0.0, "b_max": 1.0, "clip": True}
NORMALIZED = {"name": "NormalizeIntensity", "nonzero": True, "channel_wise": True}


@pytest.mark.parametrize(
    ("most", "intensity", "words"),
    [
        (255, PHOTOGRAPHS, None),
        (9e5, PHOTOGRAPHS, "clipped"),
        (9e5, NORMALIZED, None),
        (9e5, {**PHOTOGRAPHS, "clip": False}, "too large"),
        (0.5, PHOTOGRAPHS, "all alike"),
    ],
)
def test_volumes_of_other_scanners(make_task: TaskOf, most: float, intensity: dict[str, object], words: str | None) -> None:
    check = IntensityCheck(make_task(intensity=intensity))
    for seed in range(3):
        check.add(np.random.default_rng(seed).uniform(0, most, (1, 12, 12)).astype(np.float32))
    note = check.note()
    assert (note is None) if words is None else (note is not None and words in note and "3 of 3 images" in note)
    assert note is None or '{"name": "NormalizeIntensity"' in note


def test_masks_of_zeros_and_255_are_no_clipping(make_task: TaskOf) -> None:
    check = IntensityCheck(make_task(intensity=PHOTOGRAPHS))
    check.add(255 * (np.arange(144).reshape(1, 12, 12) % 4 > 0).astype(np.float32))
    assert check.note() is None


def test_nothing_looked_at(make_task: TaskOf) -> None:
    check = IntensityCheck(make_task())
    assert check.note() is None
    check.add(np.zeros((1, 12, 12), np.float32))
    assert check.note() is None


def test_the_report_of_a_site_says_so(tmp_path: Path) -> None:
    folder = make_volumes(tmp_path / "A")  # 0 to 130
    assert not any("intensity" in note for note in check_site(folder, cube_task()).sites["A"].notes)
    notes = check_site(folder, cube_task(intensity={**PHOTOGRAPHS, "a_max": 1})).sites["A"].notes
    assert any("ScaleIntensityRange" in note for note in notes)


# -- shift ----------------------------------------------------------------------------------------------------------------


def _data(brightness: float, seed: int, patients: int = 30) -> SiteData:
    images = torch.tensor(np.random.default_rng(seed).normal(brightness, 1, (2 * patients, 1, 16, 16)), dtype=torch.float32)
    names = tuple(f"p{number // 2}" for number in range(2 * patients))
    whole = Split(images, torch.zeros(2 * patients, 16, 16, dtype=torch.long), names, names)
    none = Split(images[:0], torch.zeros(0, 16, 16, dtype=torch.long), (), ())
    return SiteData(whole, none, none)


def test_shift_tells_cameras_apart_and_nothing_else() -> None:
    apart, _ = site_shift({"A": _data(0, 1), "B": _data(2, 2)})
    alike, _ = site_shift({"A": _data(0, 1), "B": _data(0, 2)})
    assert apart is not None and alike is not None
    assert apart > 0.95 and 0.3 < alike < 0.7
    assert site_shift({"A": _data(0, 1), "B": _data(0, 2, patients=2)}) == (None, "site B has fewer than three patients")


def test_phantom_sites_differ_like_cameras() -> None:
    task = load_task("phantom")
    shift, _ = site_shift({name: load_site_data(name, task, None) for name in ("site-1", "site-2", "site-3")})
    assert shift is not None and shift > 0.9
