"""Nobody is at two sites or in two splits, classes are shared alike, and the same seed draws the same."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.downloaded_folders import classes, pairs, picture, table
from medflare.core.errors import ConfigError, DataError
from medflare.data.datalist import read_datalist
from medflare.data.dataset_import.datalists import Wishes, init
from medflare.data.dataset_import.finding import Item
from medflare.data.dataset_import.partition import draw_splits, shares_in
from medflare.data.dataset_import.tables import Columns

BY_NAME = r"^(p\d+)"
SHARES = {"training": 0.7, "validation": 0.1, "test": 0.2}


def people(number: int, each: int = 1, classes: int = 2) -> list[Item]:
    return [Item((Path(f"{n}-{view}.png"),), n % classes, f"p{n}") for n in range(number) for view in range(each)]


def counted(items: list[Item]) -> dict[str, int]:
    """Patients by split."""
    return Counter(split for split, _ in {(item.split, item.patient) for item in items})


@pytest.mark.parametrize("shares", [SHARES, shares_in("60,15,25"), shares_in("8,1,1"), shares_in("2,1,1")])
def test_shares_of_patients_are_met(shares: dict[str, float]) -> None:
    drawn = counted(draw_splits(people(200, each=2), "A", shares, 0))
    assert {split: drawn[split] / 200 for split in shares} == pytest.approx(shares, abs=0.015)


def test_classes_are_shared_alike() -> None:
    drawn = draw_splits(people(100, classes=10), "A", SHARES, 0)
    assert Counter(item.label for item in drawn if item.split == "test") == dict.fromkeys(range(10), 2)
    assert Counter(item.label for item in drawn if item.split == "validation") == dict.fromkeys(range(10), 1)


def test_three_patients_are_enough_and_two_are_not() -> None:
    assert counted(draw_splits(people(3), "A", SHARES, 0)) == {"training": 1, "validation": 1, "test": 1}
    with pytest.raises(DataError, match="--sites"):
        draw_splits(people(2), "A", SHARES, 0)


def test_a_site_that_never_trains_keeps_its_test_images() -> None:
    items = [replace(item, split="test") for item in people(5)]
    assert draw_splits(items, "A", SHARES, 0) == items


def test_draws_follow_seed_and_site() -> None:
    items = people(40)
    assert draw_splits(items, "A", SHARES, 1) == draw_splits(items, "A", SHARES, 1)
    assert draw_splits(items, "A", SHARES, 1) != draw_splits(items, "A", SHARES, 2)
    assert draw_splits(items, "A", SHARES, 1) != draw_splits(items, "B", SHARES, 1)


@pytest.mark.parametrize("text", ["70,10", "70,10,0", "a,b,c", "1,inf,1", "nan,1,1"])
def test_wrong_shares_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--shares"):
        shares_in(text)


def test_patients_by_file_name(tmp_path: Path) -> None:
    init(classes(tmp_path), Wishes(patient=BY_NAME))
    entries = read_datalist(tmp_path, "classification")
    assert {entry.patient for entry in entries} == {f"p{n:02}" for n in range(20)}
    assert all(len({entry.split for entry in entries if entry.patient == patient}) == 1 for patient in {e.patient for e in entries})


def test_an_expression_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    classes(tmp_path)
    with pytest.raises(ConfigError, match="--patient"):
        init(tmp_path, Wishes(patient="("))
    with pytest.raises(DataError, match=r"p00_0\.png"):
        init(tmp_path, Wishes(patient=r"^q\d"))


def test_files_that_nobody_owns_are_warned_of(tmp_path: Path) -> None:
    assert "--patient" in init(pairs(tmp_path / "one")).warnings[0]


def test_a_patient_on_both_sides_of_a_given_split(tmp_path: Path) -> None:
    classes(tmp_path / "train", patients=6)
    classes(tmp_path / "test", patients=2)
    with pytest.raises(DataError, match="p00"):
        init(tmp_path, Wishes(patient=BY_NAME))
    assert len(init(tmp_path, Wishes(patient=BY_NAME, redraw=True)).sites[""]) == 16


def test_simulated_sites_share_files_and_no_patient(tmp_path: Path) -> None:
    home, out = classes(tmp_path / "pets", patients=30), tmp_path / "sites"
    init(home, Wishes(patient=BY_NAME, sites=3, out=out))
    owners: dict[str, set[str]] = {}
    for site in ("site-1", "site-2", "site-3"):
        entries = read_datalist(out / site, "classification")
        owners[site] = {entry.patient for entry in entries}
        assert len(owners[site]) == 10 and {entry.split for entry in entries} == {"training", "validation", "test"}
        assert all(entry.image.resolve().is_relative_to((out / site).resolve()) for entry in entries), "within the site's own folder"
        assert all(entry.image.samefile(home / entry.image.relative_to(out / site)) for entry in entries), "no copies"
    assert len(set.union(*owners.values())) == 30
    assert not (home / "datalist.json").exists()


def test_nothing_that_lies_at_out_is_replaced(tmp_path: Path) -> None:
    home = classes(tmp_path / "pets", patients=6)
    original = {path: path.read_bytes() for path in home.rglob("*.png")}
    for inside in (home, home / "sites"):
        with pytest.raises(DataError, match="--out"):
            init(home, Wishes(out=inside))
    stranger = picture(tmp_path / "out" / "cat" / "p00_0.png", 7)
    before = stranger.read_bytes()
    with pytest.raises(DataError, match=r"p00_0\.png"):
        init(home, Wishes(out=tmp_path / "out"))
    assert stranger.read_bytes() == before and {path: path.read_bytes() for path in home.rglob("*.png")} == original
    stranger.unlink()
    init(home, Wishes(out=tmp_path / "out", force=True))
    init(home, Wishes(out=tmp_path / "out", force=True))  # links of the first time are the files themselves


def test_copies_are_files_of_their_own(tmp_path: Path) -> None:
    init(classes(tmp_path / "pets"), Wishes(out=tmp_path / "copied", copy=True))
    entry = read_datalist(tmp_path / "copied", "classification")[0]
    assert entry.image.read_bytes() and not entry.image.samefile(tmp_path / "pets" / entry.image.relative_to(tmp_path / "copied"))


def test_sites_by_a_column(tmp_path: Path) -> None:
    for n in range(12):
        picture(tmp_path / "scans" / f"{n}.png")
    rows = [(f"{n}.png", n // 2 % 2, "St. Mary" if n < 6 else "UKE") for n in range(12)]
    table(tmp_path / "scans" / "list.csv", ("image", "label", "hospital"), *rows)
    written = init(tmp_path / "scans", Wishes(columns=Columns(site="hospital"), out=tmp_path / "out"))
    assert sorted(written.sites) == ["St-Mary", "UKE"]
    assert {entry.name for entry in read_datalist(tmp_path / "out" / "UKE", "classification")} == {f"{n}.png" for n in range(6, 12)}


def test_two_hospitals_never_become_one_site(tmp_path: Path) -> None:
    for n in range(12):
        picture(tmp_path / "scans" / f"{n}.png")
    for names, site in ((("St. Mary", "St Mary"), "St-Mary"), (("", "unknown"), "unknown")):
        table(tmp_path / "scans" / "list.csv", ("image", "label", "hospital"), *((f"{n}.png", n % 3, names[n % 2]) for n in range(12)))
        with pytest.raises(DataError, match=site):
            init(tmp_path / "scans", Wishes(columns=Columns(site="hospital"), out=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_nothing_is_overwritten_unasked(tmp_path: Path) -> None:
    classes(tmp_path)
    init(tmp_path)
    before = (tmp_path / "datalist.json").read_bytes()
    with pytest.raises(DataError, match="--force"):
        init(tmp_path, Wishes(seed=5))
    assert (tmp_path / "datalist.json").read_bytes() == before
    init(tmp_path, Wishes(seed=5, force=True))
    assert (tmp_path / "datalist.json").read_bytes() != before


def test_sites_of_an_earlier_deal_are_not_mixed_with_new_ones(tmp_path: Path) -> None:
    wishes: dict[str, Any] = {"patient": BY_NAME, "out": tmp_path / "out"}
    init(classes(tmp_path / "pets"), Wishes(sites=3, **wishes))
    with pytest.raises(DataError, match="site-3"):
        init(tmp_path / "pets", Wishes(sites=2, force=True, **wishes))
    assert json.loads((tmp_path / "out" / "site-1" / "datalist.json").read_text())["labels"] == {"0": "cat", "1": "dog"}


def test_sites_need_a_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="--out"):
        init(classes(tmp_path), Wishes(sites=2))
