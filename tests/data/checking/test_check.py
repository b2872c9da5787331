import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from downloads import classes
from medflare.core.errors import ConfigError, DataError
from medflare.data.checking.check import check_site, check_task
from medflare.data.starting.datalists import init
from medflare.tasks.config import TaskConfig, load_task

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
    monkeypatch.setattr("medflare.data.checking.check._check_folder", None)
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
    with pytest.raises(DataError, match=r"no site: neither a datalist.json nor folders that hold one.*medflare data init '.*no site'$"):
        check_site(tmp_path / "no site", make_task())
    with pytest.raises(DataError, match=r"nowhere: not a folder"):
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
    assert [note for note in notes if "same" in note] == [
        "1 image is the same as one of another patient, the first: 9.png and 0.png; give both one patient, or list it once"
    ]


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
    with pytest.raises(ConfigError, match=r"network unet does not work on images of size \[17, 17\], it does on \[20, 20\]; use that"):
        check_task(make_task(size=[17, 17], network={"name": "unet", "channels": [4, 8, 16]}))
    with pytest.raises(ConfigError, match="unknown network"):
        check_task(make_task(network={"name": "nothing"}))
    for kind in ("segmentation", "classification"):
        check_task(make_task(kind, target="multilabel", labels=["a", "b"], loss={"name": "ce"}))
