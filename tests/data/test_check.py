from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from medflare.core.errors import ConfigError, DataError
from medflare.data.check import check_site, check_task, site_shift
from medflare.data.splits import SiteData, Split, load_site_data
from medflare.tasks.config import TaskConfig, load_task

TaskOf = Callable[..., TaskConfig]
SiteOf = Callable[..., Path]


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


def test_a_folder_of_sites(make_site: SiteOf, make_task: TaskOf, tmp_path: Path) -> None:
    for name in ("A", "B"):
        make_site(name=name)
    (tmp_path / "no site").mkdir()
    broken = make_site(name="C")
    (broken / "images/0.png").unlink()
    report = check_site(tmp_path, make_task())
    assert list(report.sites) == ["A", "B", "C"] and not report.ok
    assert report.shift is not None  # between the two that can be read
    with pytest.raises(DataError, match=r"no site: neither a datalist.json nor folders that hold one"):
        check_site(tmp_path / "no site", make_task())


def test_notes_are_shown(make_site: SiteOf, make_task: TaskOf) -> None:
    task = make_task("classification", labels=["dark", "medium", "bright", "brightest"])
    report = check_site(make_site(kind="classification"), task)
    assert report.ok and "\n  note: class brightest is absent" in report.render()


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


@pytest.mark.slow
def test_shift_of_real_hospitals(shared_data: Callable[[str], Path]) -> None:
    report = check_site(shared_data("fundus_vessels"), load_task("fundus_vessels"))
    assert report.ok and report.shift is not None and report.shift > 0.9
    assert report.sites["LESAV"].splits["validation"] == (3, 3)


def test_tasks_that_cannot_work(make_task: TaskOf) -> None:
    with pytest.raises(ConfigError, match=r"a training step on .* images fails"):
        check_task(make_task(size=[17, 17], network={"name": "unet", "channels": [4, 8, 16]}))
    with pytest.raises(ConfigError, match="unknown network"):
        check_task(make_task(network={"name": "nothing"}))
    for kind in ("segmentation", "classification"):
        check_task(make_task(kind, target="multilabel", labels=["a", "b"], loss={"name": "ce"}))
