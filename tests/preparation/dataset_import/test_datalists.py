"""Patients are at one site and in one split, classes have equal shares, the same seed gives the same draw, and no file is overwritten."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.downloaded_folders import classes, pairs, picture, table
from helpers.volume_sites import dicom_series
from medflare.core.errors import ConfigError, DataError
from medflare.data.datalist import read_datalist
from medflare.preparation.dataset_import.datalists import import_folder
from medflare.preparation.dataset_import.folders import Item
from medflare.preparation.dataset_import.options import Columns, ImportOptions
from medflare.preparation.dataset_import.splits import draw_splits, parse_shares

BY_NAME = r"^(p\d+)"
SHARES = {"training": 0.7, "validation": 0.1, "test": 0.2}


def people(number: int, each: int = 1, classes: int = 2) -> list[Item]:
    return [
        Item((Path(f"{n}-{view}.png"),), n % classes, f"p{n}")
        for n in range(number)
        for view in range(each)
    ]


def patients_by_split(items: list[Item]) -> dict[str, int]:
    return Counter(split for split, _ in {(item.split, item.patient) for item in items})


def refused(named: str, folder: Path, **options: Any) -> None:
    """An import that is an error of this name."""
    with pytest.raises(DataError, match=named):
        import_folder(folder, ImportOptions(**options))


@pytest.mark.parametrize("text", ["70,10,20", "60,15,25", "8,1,1", "2,1,1"])
def test_shares_of_patients_are_met(text: str) -> None:
    shares = parse_shares(text)
    drawn = patients_by_split(draw_splits(people(200, each=2), "A", shares, 0))
    total = sum(shares.values())
    assert {split: drawn[split] / 200 for split in shares} == pytest.approx(
        {s: share / total for s, share in shares.items()}, abs=0.015
    )
    for wrong in ("70,10", "70,10,0", "a,b,c", "1,inf,1", "nan,1,1"):
        with pytest.raises(ConfigError, match="--shares"):
            parse_shares(wrong)


@pytest.mark.parametrize(
    "images",
    [
        [2 + n % 7 for n in range(24)],
        [200, 90, 60, 40, 30, 20, 15, 12, 10, 8, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 1],
    ],
    ids=["different", "very different"],
)
def test_shares_of_patients_are_met_if_some_have_many_images(images: list[int]) -> None:
    """Of 24 patients 70, 10 and 20 %, and not the one with the most images alone."""
    items = []
    for number, count in enumerate(images):
        for view in range(count):
            items.append(Item((Path(f"{number}-{view}.png"),), number % 2, f"p{number}"))
    for seed in range(4):
        patients = patients_by_split(draw_splits(items, "A", SHARES, seed))
        for split, share in SHARES.items():
            assert abs(patients[split] - 24 * share) < 2


def test_splits_are_stratified_and_depend_on_seed_and_site() -> None:
    items = people(100, classes=10)
    drawn = draw_splits(items, "A", SHARES, 0)
    assert Counter(item.label for item in drawn if item.split == "test") == dict.fromkeys(
        range(10), 2
    )
    assert Counter(item.label for item in drawn if item.split == "validation") == dict.fromkeys(
        range(10), 1
    )
    assert drawn == draw_splits(items, "A", SHARES, 0)
    assert drawn != draw_splits(items, "A", SHARES, 2) and drawn != draw_splits(
        items, "B", SHARES, 0
    )


def test_three_patients_are_enough_and_a_site_that_does_not_train_keeps_its_test_images() -> None:
    assert patients_by_split(draw_splits(people(3), "A", SHARES, 0)) == {
        "training": 1,
        "validation": 1,
        "test": 1,
    }
    with pytest.raises(DataError, match="unite the site"):
        draw_splits(people(2), "A", SHARES, 0)
    items = [replace(item, split="test") for item in people(5)]
    assert draw_splits(items, "A", SHARES, 0) == items


def test_patients_are_taken_from_file_names(tmp_path: Path) -> None:
    report = import_folder(classes(tmp_path), ImportOptions(patient=BY_NAME, force=True))
    entries = read_datalist(tmp_path, "classification")
    assert {entry.patient for entry in entries} == {f"p{n:02}" for n in range(20)}
    assert len({(entry.patient, entry.split) for entry in entries}) == 20 and not report.warnings
    for pattern, error in (("(", ConfigError), (r"^q\d", DataError)):
        with pytest.raises(error, match="--patient"):
            import_folder(tmp_path, ImportOptions(patient=pattern, force=True))
    assert "--patient" in import_folder(pairs(tmp_path / "unknown")).warnings[0]


def test_a_patient_in_two_given_splits_is_refused(tmp_path: Path) -> None:
    classes(tmp_path / "train", patients=6)
    classes(tmp_path / "test", patients=2)
    refused("p00", tmp_path, patient=BY_NAME)
    assert len(import_folder(tmp_path, ImportOptions(patient=BY_NAME, redraw=True)).sites[""]) == 16


@pytest.mark.parametrize("copy", [False, True])
def test_simulated_sites_have_their_own_patients_and_files(copy: bool, tmp_path: Path) -> None:
    home = classes(tmp_path / "pets", patients=30)
    out = tmp_path / "sites"
    options: dict[str, Any] = {"patient": BY_NAME, "out": out, "copy": copy}
    import_folder(home, ImportOptions(sites=3, **options))
    patients: set[str] = set()
    for site in ("site-1", "site-2", "site-3"):
        entries = read_datalist(out / site, "classification")
        own = {entry.patient for entry in entries}
        assert (
            len(own) == 10
            and not own & patients
            and {entry.split for entry in entries} == {"training", "validation", "test"}
        )
        assert all(
            entry.image.resolve().is_relative_to((out / site).resolve()) for entry in entries
        )
        assert all(
            entry.image.samefile(home / entry.image.relative_to(out / site)) != copy
            for entry in entries
        )
        patients |= own
    assert not (home / "datalist.json").exists()
    assert json.loads((out / "site-1" / "datalist.json").read_text())["labels"] == {
        "0": "cat",
        "1": "dog",
    }
    # A site of the first import would remain.
    refused("site-3", home, sites=2, force=True, **options)


def test_no_file_is_overwritten(tmp_path: Path) -> None:
    home = classes(tmp_path / "pets", patients=6)
    original = {path: path.read_bytes() for path in home.rglob("*.png")}
    for inside in (home, home / "sites"):
        refused("--out", home, out=inside)
    refused("--out", home, sites=2)
    other = picture(tmp_path / "out" / "cat" / "p00_0.png", 7)
    before = other.read_bytes()
    refused(r"p00_0\.png", home, out=tmp_path / "out")
    assert other.read_bytes() == before
    other.unlink()
    import_folder(home, ImportOptions(out=tmp_path / "out"))
    refused("--force", home, out=tmp_path / "out")
    import_folder(home, ImportOptions(out=tmp_path / "out", force=True))
    assert {path: path.read_bytes() for path in home.rglob("*.png")} == original


@pytest.mark.parametrize("copy", [False, True])
def test_only_slices_are_placed_and_no_other_account_can_read_them(
    copy: bool, tmp_path: Path
) -> None:
    """A download may have a link to a secret beside its slices."""
    secret = tmp_path / "id_rsa"
    secret.write_text("secret")
    for number in range(10):
        folder = tmp_path / "home" / ["cat", "dog"][number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        series = dicom_series(folder / f"p{number}")
        (series / "notes.txt").symlink_to(secret)
    out = tmp_path / "out"
    import_folder(tmp_path / "home", ImportOptions(patient="/(p[0-9])", out=out, copy=copy))
    slices = {path.name for path in series.glob("*.dcm")}
    assert {path.name for path in out.rglob("*") if path.is_file()} == {*slices, "datalist.json"}
    for folder in (out, *(path for path in out.rglob("*") if path.is_dir())):
        assert not folder.stat().st_mode & 0o077


def test_sites_of_a_column(tmp_path: Path) -> None:
    for n in range(12):
        picture(tmp_path / "scans" / f"{n}.png")

    def sites(first: str, second: str) -> list[str]:
        rows = [(f"{n}.png", n // 2 % 2, first if n < 6 else second) for n in range(12)]
        table(tmp_path / "scans" / "list.csv", ("image", "label", "hospital"), *rows)
        return sorted(
            import_folder(
                tmp_path / "scans",
                ImportOptions(columns=Columns(site="hospital"), out=tmp_path / "out"),
            ).sites
        )

    for names in (("St. Mary", "St Mary"), ("", "unknown")):
        with pytest.raises(DataError, match=r"--site-column|line 2: no site"):
            sites(*names)
    assert not (tmp_path / "out").exists()
    assert sites("St. Mary", "UKE") == ["St-Mary", "UKE"]
    assert {entry.name for entry in read_datalist(tmp_path / "out" / "UKE", "classification")} == {
        f"{n}.png" for n in range(6, 12)
    }


def test_each_folder_is_a_site(tmp_path: Path) -> None:
    for site in ("north", "south"):
        classes(tmp_path / "hospitals" / site, patients=12)
    refused("--site-folders", tmp_path / "hospitals")
    options = ImportOptions(patient=BY_NAME, site_folders=True, out=tmp_path / "DATA")
    report = import_folder(tmp_path / "hospitals", options)
    assert list(report.sites) == ["north", "south"]
    for site in report.sites:
        assert (
            len(
                {
                    entry.patient
                    for entry in read_datalist(tmp_path / "DATA" / site, "classification")
                }
            )
            == 12
        )
    with pytest.raises(DataError, match="--site-folders"):
        import_folder(tmp_path / "hospitals" / "north" / "cat", options)
    for site in ("north", "south"):  # folders that may be sites are named
        pairs(tmp_path / "all" / site)
    assert any(
        "--site-folders --out DATA," in warning
        for warning in import_folder(tmp_path / "all").warnings
    )


def test_a_patient_at_two_sites_is_in_one_split(tmp_path: Path) -> None:
    rows = []
    for n in range(80):
        picture(tmp_path / "scans" / f"{n}.png")
        hospital = "AB"[n % 2]
        patient = n // 2 if n < 24 else n  # of the first twelve an image at each
        rows.append((f"{n}.png", n % 3, f"p{patient}", hospital))
    table(tmp_path / "scans" / "list.csv", ("image", "label", "patient", "hospital"), *rows)
    options = ImportOptions(columns=Columns(site="hospital"), out=tmp_path / "out")
    report = import_folder(tmp_path / "scans", options)
    splits: dict[str, set[str]] = {}
    for site in "AB":
        for entry in read_datalist(tmp_path / "out" / site, "classification"):
            splits.setdefault(entry.patient, set()).add(entry.split)
    assert len(splits) == 68 and {len(names) for names in splits.values()} == {1}
    (warning,) = (line for line in report.warnings if "at two sites" in line)
    assert warning.startswith("patients at two sites: 12, ") and "one split" in warning


def test_what_is_left_out_may_be_at_one_site_or_a_site(tmp_path: Path) -> None:
    root = tmp_path / "hospitals"
    for site in ("A", "B"):
        classes(root / site)
    picture(root / "A" / "thumbs" / "t.png")
    (root / "Empty").mkdir()
    options: dict[str, Any] = {"site_folders": True, "out": tmp_path / "DATA"}
    refused("Empty: no image .* if a folder is no site, give --leave-out", root, **options)
    refused(
        "hospitals: no file fits --leave-out nothing",
        root,
        leave_out=("Empty", "nothing"),
        **options,
    )
    report = import_folder(root, ImportOptions(leave_out=("Empty", "thumbs"), **options))
    assert {site: len(items) for site, items in report.sites.items()} == {"A": 40, "B": 40}
    assert "note: A: left out by --leave-out thumbs: 1 files" in report.render()
    options["force"] = True
    report = import_folder(root, ImportOptions(leave_out=("Empty", "A/thumbs", "B"), **options))
    assert {site: len(items) for site, items in report.sites.items()} == {"A": 40}


def test_nothing_is_written_before_the_patients_of_all_sites_are_known(tmp_path: Path) -> None:
    root = tmp_path / "hospitals"
    classes(root / "A")
    for number in range(8):
        picture(root / "B" / ("cat", "dog")[number % 2] / f"Q-{number}-a.png")
    options: dict[str, Any] = {"site_folders": True, "out": tmp_path / "DATA"}
    refused("^B: --patient .* does not match 'cat/Q-0-a.png'", root, patient=BY_NAME, **options)
    assert not (tmp_path / "DATA").exists()
    import_folder(root, ImportOptions(patient=r"^(p\d+|Q-\d)", **options))


def test_a_table_of_each_site_is_chosen_by_its_name(tmp_path: Path) -> None:
    root = tmp_path / "hospitals"
    for site in ("A", "B"):
        names = [f"{site}{number:02}.png" for number in range(12)]
        for number, name in enumerate(names):
            picture(root / site / name, 80 + number)
        for column in ("label", "grade"):
            rows = (
                (name, number % 2 if column == "label" else 0) for number, name in enumerate(names)
            )
            table(root / site / f"{column}.csv", ("image", column), *rows)
    options: dict[str, Any] = {"site_folders": True, "out": tmp_path / "DATA"}
    refused("A: 2 tables .* choose one with --table NAME, as all sites call it", root, **options)
    report = import_folder(root, ImportOptions(table=Path("label.csv"), **options))
    for site, items in report.sites.items():
        labels = {item.first.name: report.dataset.labels[str(item.label)] for item in items}
        assert labels == {f"{site}{number:02}.png": str(number % 2) for number in range(12)}
    (root / "B" / "label.csv").unlink()
    refused("B/label.csv: no such file", root, table=Path("label.csv"), **options)
