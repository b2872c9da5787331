"""The downloads of a paper become its sites: compared with its counts, without a patient in two splits, and readable by its task."""

import csv
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from helpers import paper_releases
from medflare.cli import main
from medflare.core.errors import ConfigError, DataError
from medflare.data.datalist import check_patients, read_datalist, site_folders
from medflare.preparation.dataset_import.folders import Item
from medflare.preparation.dataset_import.papers.catalogue import (
    PREPARATIONS,
    get_preparation,
    patch_corner,
)
from medflare.preparation.dataset_import.papers.preparing import prepare
from medflare.studies.suites import load_suite, suites
from medflare.tasks.config import load_task
from medflare.training.opening import open_site

SITES = {
    "prostate": {"RUNMC", "BMC", "I2CVB", "UCL", "BIDMC", "HK"},
    "prostate_prr": {"RUNMC", "BMC", "UCL", "BIDMC", "HK"},
    "fundus_fedsm": {
        "Drishti-GS",
        "RIM-ONE",
        "REFUGE",
        "RIGA-BinRushed",
        "RIGA-Magrabia",
        "RIGA-MESSIDOR",
    },
    "camelyon17": {f"center{number}" for number in range(5)},
}
TASKS = {suite.data: suite.task for suite in map(load_suite, suites())}
SMALL: dict[str, dict[str, Any]] = {
    "segmentation": {"size": [32, 32], "network": {"name": "unet", "channels": [4, 8]}},
    "classification": {"size": [32, 32], "network": {"name": "small_cnn", "channels": [4, 8]}},
}


def downloaded(name: str, root: Path) -> Path:
    """A small copy of the downloads."""
    parts = {
        "prostate_prr": ["prostate"],
        "fundus_fedsm": ["fundus", "riga"],
        "dermoscopy_prr": ["dermoscopy"],
    }
    for part in parts.get(name, [name]):
        getattr(paper_releases, part)(root)
    return root


def listed(folder: Path) -> dict[str, list[dict[str, Any]]]:
    content = json.loads((folder / "datalist.json").read_text())
    return {
        split: content[split] for split in ("training", "validation", "test") if split in content
    }


@pytest.mark.parametrize("name", PREPARATIONS)
def test_a_download_becomes_sites(name: str, tmp_path: Path) -> None:
    preparation = get_preparation(name)
    prepared = prepare(preparation, downloaded(name, tmp_path / "from"), tmp_path / "DATA")
    folders = site_folders(tmp_path / "DATA")
    assert {folder.name for folder in folders} == set(prepared.sites) and set(
        prepared.sites
    ) >= set(preparation.counts)
    assert set(prepared.sites) == SITES.get(name, set(prepared.sites))
    for folder in folders:
        entries = read_datalist(folder, preparation.kind)
        check_patients(entries)
        files = [
            file
            for entry in entries
            for file in (entry.image, *(entry.masks if preparation.kind == "segmentation" else []))
        ]
        assert files and all(file.is_file() for file in files)
        assert set(listed(folder)) == set(preparation.splits)
        if folder.name != "vienna_dias":
            assert all(listed(folder).values())
    assert all(download.page.startswith("https://") for download in preparation.downloads)
    assert (
        preparation.licence
        and preparation.papers
        and bool(preparation.source) == bool(preparation.counts or preparation.total)
    )
    task = load_task({**load_task(TASKS[name]).to_dict(), **SMALL[preparation.kind]})
    site = open_site(min(prepared.sites), task, seed=0, role="inside", data_root=tmp_path / "DATA")
    assert all(len(site.data.split(split)) for split in ("train", "validation", "test"))
    assert int((site.class_counts() > 0).sum()) > 1


@pytest.mark.parametrize("name", PREPARATIONS)
def test_every_missing_download_is_one_line_that_says_where_to_get_it(
    name: str, tmp_path: Path
) -> None:
    root = downloaded(name, tmp_path / "from")
    # I2CVB is none of PRR's.
    needed = {"prostate_prr": "*[!VB]", "fundus_fedsm": "RIGAPlus"}.get(name, "*")
    for place in sorted(root.glob(needed)):
        shutil.move(place, tmp_path / "away")
        with pytest.raises(DataError, match=r": not there; get .+ from https://") as error:
            prepare(get_preparation(name), root, tmp_path / "DATA")
        assert "\n" not in str(error.value) and not (tmp_path / "DATA").exists()
        shutil.move(tmp_path / "away", place)


def test_counts_are_laid_beside_the_papers(tmp_path: Path) -> None:
    root = paper_releases.prostate(tmp_path / "from")
    prepared = prepare(get_preparation("prostate"), root, tmp_path / "DATA")
    assert (
        "5 (30)" in prepared.table and "RUNMC has 5 images, published are 30" in prepared.warnings
    )
    with pytest.raises(DataError, match="BIDMC"):
        prepare(get_preparation("prostate"), root, tmp_path / "strict", strict=True)
    assert not (tmp_path / "strict").exists()
    fitting = replace(
        get_preparation("prostate"), counts={"HK": {"images": 5, "patients": 5}}, total=30
    )
    assert prepare(fitting, root, tmp_path / "fits", strict=True).warnings == ()


def test_lesions_that_flamby_divides_are_told_and_can_be_kept_together(tmp_path: Path) -> None:
    root = paper_releases.fed_isic2019(tmp_path / "from")
    prepared = prepare(get_preparation("fed_isic2019"), root, tmp_path / "DATA")
    assert prepared.warnings[0].startswith("lesions in two splits of a site: 12; test images that")
    assert "BCN 2 of 2, HAM_rosendahl 2 of 2" in prepared.warnings[0]
    actual = listed(tmp_path / "DATA" / "BCN")
    assert [entry["image"] for entry in actual["test"]] == [
        f"ISIC_2019_Training_Input/ISIC_00{n}.jpg" for n in ("01", "11")
    ]
    assert all("patient" not in entry for entry in actual["test"])
    trained = {entry.get("patient") for entry in actual["training"]} - {None}
    assert trained and not trained & {entry.get("patient") for entry in actual["validation"]}
    again = prepare(get_preparation("fed_isic2019"), root, tmp_path / "clean", redraw=True)
    assert not any("two splits" in warning for warning in again.warnings)
    sides = [
        {entry["patient"] for entry in entries}
        for entries in listed(tmp_path / "clean" / "BCN").values()
    ]
    assert sum(map(len, sides)) == len(set().union(*sides)) == 10


def test_an_odd_row_is_refused(tmp_path: Path) -> None:
    root = paper_releases.camelyon17(tmp_path / "from")
    file = root / "camelyon17_v1.0/metadata.csv"
    file.write_text(file.read_text().replace("0,000,1,0,64,0,0,0,0", "0,000,1,0,64,7,0,0,0"))
    with pytest.raises(DataError, match="tumor 7"):
        prepare(get_preparation("camelyon17"), root, tmp_path / "DATA")


def test_a_patient_at_two_sites_is_a_warning_without_test_lists_too(tmp_path: Path) -> None:
    root = paper_releases.camelyon17(tmp_path / "from")
    file = root / "camelyon17_v1.0/metadata.csv"
    file.write_text(file.read_text().replace("0,000,1,0,64,0,0,0,0", "0,000,1,0,64,0,0,3,0"))
    prepared = prepare(get_preparation("camelyon17"), root, tmp_path / "DATA")
    line = "patients at two sites: 1, for example 000 at center0 and center3; each site draws its"
    assert [warning for warning in prepared.warnings if warning.startswith(line)]
    assert len({split for _, split in places(prepared.sites)["000"]}) == 1


def shared_lesions(root: Path, number: int) -> list[str]:
    """Names the first lesions of vidir_modern as those of vidir_molemax, and returns them."""
    table = root / "HAM10000_metadata"
    text = table.read_text()
    names = []
    used = [lesion for lesion in range(12) if lesion % 4 < 3]  # the others are of a fourth class
    for lesion in used[:number]:
        names.append(f"HAM_vidir_modern_{lesion}")
        text = text.replace(f"HAM_vidir_molemax_{lesion},", f"{names[-1]},")
    table.write_text(text)
    return names


def places(sites: Mapping[str, Sequence[Item]]) -> dict[str, set[tuple[str, str]]]:
    """Lesion -> its sites and splits."""
    found: dict[str, set[tuple[str, str]]] = {}
    for site, items in sites.items():
        for item in items:
            found.setdefault(item.patient, set()).add((site, item.split))
    return found


@pytest.mark.parametrize("seed", range(5))
def test_a_lesion_at_two_sites_is_drawn_into_one_split(seed: int, tmp_path: Path) -> None:
    root = paper_releases.dermoscopy(tmp_path / "from")
    prr = get_preparation("dermoscopy_prr")
    before = prepare(prr, root, tmp_path / "before", redraw=True, seed=seed)
    assert not any("two sites" in warning for warning in before.warnings)
    lesions = shared_lesions(root, number=5)
    prepared = prepare(prr, root, tmp_path / "DATA", redraw=True, seed=seed)
    line = (
        "lesions at two sites: 5, for example HAM_vidir_modern_0 at vidir_modern and vidir_molemax"
    )
    assert f"{line}; each is in one split at all sites" in prepared.warnings
    placed = places(prepared.sites)
    for lesion in lesions:
        assert len(placed[lesion]) == 2, "at two sites"
        assert len({split for _, split in placed[lesion]}) == 1, "in one split"
    for site in ("msk", "rosendahl", "vienna_dias"):  # they share no lesion: as before
        assert prepared.sites[site] == before.sites[site]
    default = prepare(prr, root, tmp_path / "default", seed=seed)
    assert default.sites == prepared.sites, "the download names no splits"


def test_a_lesion_of_a_cohort_that_never_trains_is_a_test_lesion_everywhere(tmp_path: Path) -> None:
    root = paper_releases.dermoscopy(tmp_path / "from")
    table = root / "HAM10000_metadata"
    table.write_text(table.read_text().replace("HAM_vienna_dias_0,", "HAM_rosendahl_0,"))
    prepared = prepare(get_preparation("dermoscopy_prr"), root, tmp_path / "DATA", redraw=True)
    expected = {("rosendahl", "test"), ("vienna_dias", "test")}
    assert places(prepared.sites)["HAM_rosendahl_0"] == expected


ChangeRows = Callable[[list[dict[str, str]]], object]


def published(root: Path) -> list[dict[str, str]]:
    """Rows of a split by image: the second image of a lesion is for test, every fifth for validation."""
    rows = []
    for row in csv.DictReader((root / "HAM10000_metadata").open()):
        number = int(row["image_id"][5:])
        if row["dataset"] != "vienna_dias" and row["dx"] != "df":
            split = "test" if number % 2 == 0 else "val" if number % 5 == 0 else "train"
            rows.append({"image_id": row["image_id"], "site": row["dataset"], "split": split})
    for number in range(12):
        split = ("train", "val", "test")[number % 3]
        rows.append({"image_id": f"ISIC_9{number:06}", "site": "msk", "split": split})
    return rows


def write_published(root: Path, rows: Sequence[Mapping[str, str]]) -> None:
    pd.DataFrame(rows).to_csv(root / "split_of_the_paper.csv", index=False)


def test_the_split_of_the_paper_and_its_leak(tmp_path: Path) -> None:
    root = paper_releases.dermoscopy(tmp_path / "from")
    lesions = shared_lesions(root, number=2)
    rows = published(root)
    write_published(root, rows)
    prr = get_preparation("dermoscopy_prr")
    prepared = prepare(prr, root, tmp_path / "DATA", paper_split=True)
    words = {"train": "training", "val": "validation", "test": "test"}
    expected = {(row["image_id"], row["site"]): words[row["split"]] for row in rows}
    for site, items in prepared.sites.items():
        for item in items:
            assert item.split == expected.pop((item.first.stem, site), "test")
    assert not expected, "every row is used"
    # each of the nine lesions of a site has two images; one of them is a test image
    leak = (
        "rosendahl 9 of 9, vidir_modern 9 of 9, vidir_molemax 9 of 9; their numbers measure memory"
    )
    assert f"msk unknown, without lesion ids, {leak}" in prepared.warnings[0]
    assert prepared.warnings[0].startswith("lesions in two splits of a site: 27;")
    example = f"for example {lesions[0]} at vidir_modern and vidir_molemax; in different splits: 2;"
    assert example in prepared.warnings[1]
    assert "lesion on which another site trains: 4;" in prepared.warnings[1]
    for folder in site_folders(tmp_path / "DATA"):
        check_patients(read_datalist(folder, "classification"))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (
            lambda rows: rows.pop(0),
            "has no row for ISIC_0000001 of vidir_modern; correct the table",
        ),
        (
            lambda rows: rows[0].update(split="fold 1"),
            "split 'fold 1' of ISIC_0000001 is not known",
        ),
        (lambda rows: rows[0].update(image_id="ISIC_1"), "has no row for ISIC_0000001"),
        (
            lambda rows: rows.append(rows[0] | {"image_id": "ISIC_1"}),
            "not in the download: ISIC_1 of",
        ),
        (lambda rows: rows.append(rows[0] | {"split": "test"}), "of vidir_modern is in two splits"),
        (lambda rows: [row.pop("site") for row in rows], "site"),
    ],
)
def test_a_wrong_split_of_the_paper_is_one_line(
    change: ChangeRows, error: str, tmp_path: Path
) -> None:
    root = paper_releases.dermoscopy(tmp_path / "from")
    rows = published(root)
    change(rows)
    write_published(root, rows)
    with pytest.raises(DataError, match=error) as raised:
        prepare(get_preparation("dermoscopy_prr"), root, tmp_path / "DATA", paper_split=True)
    assert "\n" not in str(raised.value) and "split_of_the_paper.csv" in str(raised.value)
    assert not (tmp_path / "DATA").exists()


@pytest.mark.parametrize("name", PREPARATIONS)
def test_without_the_split_of_the_paper_one_line_names_it(name: str, tmp_path: Path) -> None:
    root = downloaded(name, tmp_path / "from")
    if name in ("fed_isic2019", "gdrbench"):  # these downloads name the paper's split
        by_paper = prepare(get_preparation(name), root, tmp_path / "DATA", paper_split=True)
        assert by_paper.sites == prepare(get_preparation(name), root, tmp_path / "again").sites
        return
    match = r"split_of_the_paper\.csv: not there, .* leave --split out"
    with pytest.raises(DataError, match=match) as error:
        prepare(get_preparation(name), root, tmp_path / "DATA", paper_split=True)
    assert "\n" not in str(error.value) and not (tmp_path / "DATA").exists()


@pytest.fixture
def real_prr() -> Path:
    """The real download of PRR's dermoscopy."""
    path = Path(__file__).resolve().parents[4] / "shared" / "downloads" / "dermoscopy_prr"
    if not path.exists():
        pytest.skip("the download of PRR's dermoscopy is not beside the checkout")
    return path


def test_the_real_download_by_the_split_of_the_paper(real_prr: Path, tmp_path: Path) -> None:
    ham = pd.read_csv(real_prr / "HAM10000_metadata.csv")
    split = pd.read_csv(real_prr / "split_of_the_paper.csv")
    prr = get_preparation("dermoscopy_prr")
    data = tmp_path / "DATA"
    prepared = prepare(prr, real_prr, data, paper_split=True, strict=True)
    for site, of_site in split.merge(ham, on="image_id").groupby("site"):
        test = of_site[of_site.split == "test"]
        shown = test.lesion_id.isin(of_site[of_site.split != "test"].lesion_id)
        assert f"{site} {shown.sum()} of {len(test)}" in prepared.warnings[0]
    for line in ("vidir_modern 457 of 598", "rosendahl 181 of 328", "vidir_molemax 0 of 774"):
        assert line in prepared.warnings[0]
    assert "msk unknown" in prepared.warnings[0]
    assert prepared.warnings[1].startswith("lesions at two sites: 9, ")
    assert "in different splits: 6;" in prepared.warnings[1]  # by hand, as is the next
    assert "show a lesion on which another site trains: 5;" in prepared.warnings[1]
    published = {
        "vidir_modern": [2091, 298, 598],
        "vidir_molemax": [2708, 386, 774],
        "rosendahl": [1144, 163, 328],
        "msk": [1400, 199, 401],
        "vienna_dias": [0, 0, 427],
    }
    for site, numbers in published.items():
        assert list(map(len, listed(data / site).values())) == numbers


def test_the_real_download_by_lesion_across_sites(real_prr: Path, tmp_path: Path) -> None:
    ham = pd.read_csv(real_prr / "HAM10000_metadata.csv").set_index("image_id")
    prr = get_preparation("dermoscopy_prr")
    prepared = prepare(prr, real_prr, tmp_path / "DATA", redraw=True, strict=True)
    (warning,) = prepared.warnings
    assert warning.startswith("lesions at two sites: 9, for example HAM_")
    assert warning.endswith("at vidir_modern and vidir_molemax; each is in one split at all sites")
    rows = []
    for site in prepared.sites:
        for split, entries in listed(tmp_path / "DATA" / site).items():
            for entry in entries:
                rows.append((Path(entry["image"]).stem, site, split, entry["label"]))
    written = pd.DataFrame(rows, columns=["image_id", "site", "split", "label"])
    lesions = written.join(ham, on="image_id").groupby("lesion_id")  # msk has none
    assert (lesions.split.nunique() == 1).all() and (lesions.site.nunique() == 2).sum() == 9
    table_1 = {  # of PRR: nv, bkl, mel
        "vidir_modern": [1832, 475, 680],
        "vidir_molemax": [3720, 124, 24],
        "rosendahl": [803, 490, 342],
        "msk": [1372, 254, 374],
        "vienna_dias": [350, 10, 67],
    }
    for site, numbers in table_1.items():
        labels = written[written.site == site].label
        assert [(labels == label).sum() for label in range(3)] == numbers
    shares = {"training": 0.7, "validation": 0.1, "test": 0.2}
    for site, of_site in written[written.site != "vienna_dias"].groupby("site"):
        drawn = of_site.split.value_counts(normalize=True).to_dict()
        assert drawn == pytest.approx(shares, abs=0.03), site


def test_masks_of_both_fundus_releases_mean_the_same(tmp_path: Path) -> None:
    prepare(
        get_preparation("fundus_fedsm"),
        downloaded("fundus_fedsm", tmp_path / "from"),
        tmp_path / "DATA",
    )
    # `mask` draws stripes on black in the order of their values: RIGA+ has white (disc) and grey (cup), DoFE white, grey and black (cup).
    for site, values in (("Drishti-GS", [0, 1, 2]), ("RIGA-BinRushed", [1, 2, 0])):
        folder = tmp_path / "DATA" / site
        entry = listed(folder)["training"][0]
        drawn = np.asarray(Image.open(folder / entry["label"]))
        assert drawn[[2, 5, 9], 6].tolist() == values and entry["label"].endswith(".png")
    outlined = [
        entry["label"]
        for entries in listed(tmp_path / "DATA/RIGA-MESSIDOR").values()
        for entry in entries
    ]
    assert len(outlined) == 15 and all(label.endswith("-1.png") for label in outlined)


def test_one_class_is_left_out_and_one_cohort_never_trains(tmp_path: Path) -> None:
    prepared = prepare(
        get_preparation("dermoscopy_prr"),
        paper_releases.dermoscopy(tmp_path / "from"),
        tmp_path / "DATA",
    )
    cohorts = ("rosendahl", "vidir_modern", "vidir_molemax", "vienna_dias")
    assert {site: len(items) for site, items in prepared.sites.items()} == {
        "msk": 12,
        **dict.fromkeys(cohorts, 18),
    }
    actual = listed(tmp_path / "DATA" / "vienna_dias")
    assert len(actual["test"]) == 18 and not actual["training"] and not actual["validation"]
    redrawn = prepare(
        get_preparation("dermoscopy_prr"), tmp_path / "from", tmp_path / "again", redraw=True
    )
    assert {item.split for item in redrawn.sites["vienna_dias"]} == {
        "test"
    } and "18 (427)" in redrawn.table
    assert [
        item.label
        for item in prepared.sites["msk"]
        if item.first.name in ("ISIC_9000000.jpg", "ISIC_9000001.jpg")
    ] == [2, 1]


def test_grades_keep_their_lists_and_wrong_lines_are_named(tmp_path: Path) -> None:
    root = paper_releases.gdrbench(tmp_path / "from")
    prepared = prepare(get_preparation("gdrbench"), root, tmp_path / "DATA")
    assert len(listed(tmp_path / "DATA" / "IDRID")["validation"]) == 10
    assert {entry["image"] for entry in listed(tmp_path / "DATA" / "IDRID")["validation"]} >= {
        "images/IDRID/pdr/crossval 1.jpg"
    }
    assert {item.label for item in prepared.sites["IDRID"]} == set(range(5))
    (root / "splits/IDRID_train.txt").write_text("IDRID/pdr/a.jpg 5\n")
    with pytest.raises(DataError, match=r"IDRID_train.txt row 1"):
        prepare(get_preparation("gdrbench"), root, tmp_path / "again")


def test_cells_become_patches_of_their_tumour_and_image(tmp_path: Path) -> None:
    root = paper_releases.midog2022(tmp_path / "from")
    data = tmp_path / "DATA"
    prepared = prepare(get_preparation("midog2022"), root, data)
    assert "canine_lung_cancer has 5 patients, published are 44" in prepared.warnings
    actual = [
        entry for entries in listed(data / "human_breast_cancer").values() for entry in entries
    ]
    assert {(entry["image"], entry["label"], entry["patient"]) for entry in actual} == {
        (f"patches/{number:03}/{2 * number - 1 + label}.png", 1 - label, f"{number:03}")
        for number in range(1, 6)
        for label in (0, 1)
    }
    whole = np.asarray(Image.open(root / "images/003.tiff"))
    middle, border = (
        np.asarray(Image.open(data / f"human_breast_cancer/patches/003/{cell}.png"))
        for cell in (5, 6)
    )
    # Around (65, 55) there are 48 pixels to the left and above, and 45 to the right.
    assert (middle == whole[7:103, 14:110]).all()
    assert (border == whole[7:103, :96]).all()
    assert not (data / "human_breast_cancer/images").exists()
    sides = [
        {entry["patient"] for entry in entries}
        for entries in listed(data / "canine_lymphoma").values()
    ]
    assert [len(side) for side in sides] == [4, 1] and not sides[0] & sides[1]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda found: found.pop("images"), "images"),
        (lambda found: found["annotations"][0].update(bbox=None), "row 1"),
        (lambda found: found["annotations"][2].update(bbox=[110, 30, 160, 80]), "row 3"),
        (lambda found: found["images"][1].update(height=120), "002.tiff"),
        (lambda found: found["annotations"][1].update(id=1), "1.png"),
    ],
)
def test_wrong_annotations_of_cells_are_one_line(
    change: Callable[[dict[str, Any]], object], named: str, tmp_path: Path
) -> None:
    root = paper_releases.midog2022(tmp_path / "from")
    content = json.loads((root / "MIDOG2022_training.json").read_text())
    change(content)
    (root / "MIDOG2022_training.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=named) as error:
        prepare(get_preparation("midog2022"), root, tmp_path / "DATA")
    assert "\n" not in str(error.value) and not (tmp_path / "DATA").exists()


@pytest.mark.parametrize(
    ("box", "corner"),
    [
        ((10, 10, 21, 21), (11, 11)),  # a centre between pixels
        ((0, 0, 2, 2), (0, 0)),
        ((-3, 10, 1, 20), (0, 11)),
        ((39, 29, 49, 39), (32, 22)),
        ((10, 10, 5, 20), None),  # empty
        ((10, float("nan"), 20, 20), None),
        ((40, 10, 50, 20), None),  # outside of the image
    ],
)
def test_patches_are_within_the_image(
    box: tuple[float, ...], corner: tuple[int, int] | None
) -> None:
    with nullcontext() if corner else pytest.raises(ValueError):
        assert patch_corner(box, (40, 30), 8) == corner


def test_a_site_that_is_left_out_is_tested_on_all_it_has(tmp_path: Path) -> None:
    root = paper_releases.prostate(tmp_path / "from")
    prepare(get_preparation("prostate"), root, tmp_path / "DATA")
    task = load_task({**load_task("papers/prostate_iop").to_dict(), **SMALL["segmentation"]})
    for role, slices in (("inside", 3), ("outside", 15)):  # three slices a volume
        assert (
            len(open_site("HK", task, seed=0, role=role, data_root=tmp_path / "DATA").data.test)
            == slices
        )
    (root / "HK/Case02_segmentation.nii.gz").unlink()
    with pytest.raises(DataError, match=r"HK/Case02.nii.gz"):
        prepare(get_preparation("prostate"), root, tmp_path / "again")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "prepare", "--list"]) == 0
    output = capsys.readouterr().out
    assert (
        "BCN 12413" in output
        and "human_breast_cancer of 150 patients" in output
        and "20552 in all" in output
    )
    assert (
        "camelyon17: Camelyon17-WILDS" in output
        and "licence: CC BY-NC 4.0" in output
        and "from https://liuquande.github.io" in output
    )
    options = [
        "--from",
        str(paper_releases.prostate(tmp_path / "from")),
        "--out",
        str(tmp_path / "DATA"),
    ]
    assert main(["data", "prepare", "prostate", *options, "--copy"]) == 0
    output = capsys.readouterr().out
    assert (
        f"written: {tmp_path}/DATA/HK/datalist.json" in output
        and "published counts: IOP-FL" in output
    )
    assert (tmp_path / "DATA/HK/HK/Case00.nii.gz").stat().st_nlink == 1
    assert main(["data", "prepare", "prostate", *options]) == 1
    assert "--force" in capsys.readouterr().err
    assert main(["data", "prepare", "prostate"]) == 1
    assert "--from" in capsys.readouterr().err
    assert main(["data", "prepare", "prostate", *options, "--split", "paper"]) == 1
    assert "split_of_the_paper.csv: not there" in capsys.readouterr().err
    assert main(["data", "prepare", "prostate", *options, "--split", "paper", "--redraw"]) == 1
    assert "give one of them" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="prostat"):
        get_preparation("prostat")
