"""Structures that sites store in different ways, chosen by `data init --structure`."""

import json
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
from PIL import ExifTags, Image

from helpers.downloaded_folders import mask, picture, table
from helpers.small_tasks import small_task
from helpers.volume_sites import change, dicom_series, write
from medflare.core.errors import ConfigError, DataError
from medflare.data.decoding import target_of
from medflare.data.loading import open_source
from medflare.data.reading import read_stored
from medflare.preparation.dataset_import.chosen_structures import parse_structures
from medflare.preparation.dataset_import.datalists import ImportReport, import_folder
from medflare.preparation.dataset_import.options import ImportOptions
from medflare.tasks.config import TaskConfig

ROWS, COLUMNS = np.mgrid[:24, :32]
DISC = (ROWS - 11) ** 2 + (COLUMNS - 17) ** 2 < 64
CUP = (ROWS - 11) ** 2 + (COLUMNS - 15) ** 2 < 16
SITES = ("Drishti", "IDRiD", "REFUGE", "RIM")
NUMBERS = range(6)


def imported(root: Path, *structures: str, **options: Any) -> ImportReport:
    options |= {"structures": parse_structures(structures), "out": root / "out"}
    return import_folder(root / "raw", ImportOptions(**options))


def error_of(root: Path, *structures: str, **options: Any) -> str:
    with pytest.raises(DataError) as error:
        imported(root, *structures, **options)
    assert not [*root.rglob("datalist.json")]
    return str(error.value)


def grey(path: Path, values: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(values.astype(np.uint8)).save(path)


@pytest.fixture
def eyes(tmp_path: Path) -> Path:
    """Four sites as their data sets come: soft maps, one structure beside a lesion that not all
    images have, one mask of three values, and a mask of each structure.
    """
    for site in SITES:
        folder = tmp_path / "raw" / site
        for n in NUMBERS:
            name = f"{site}{n}"
            noise = np.random.default_rng(n).integers(0, 255, (24, 32, 3))
            grey(folder / "Images" / f"{name}.png", noise)
            if site == "Drishti":
                agreed = 64 * DISC + 64 * (DISC & (ROWS > 8)) + 127 * CUP
                grey(folder / "GT" / name / "SoftMap" / f"{name}_ODsegSoftmap.png", agreed)
                grey(folder / "GT" / name / "SoftMap" / f"{name}_cupsegSoftmap.png", 191 * CUP)
            elif site == "IDRiD":
                grey(folder / "Masks" / "5. Optic Disc" / f"{name}_OD.png", 76 * DISC)
                if n % 2:
                    grey(folder / "Masks" / "1. Lesions" / f"{name}_MA.png", 76 * CUP)
            elif site == "REFUGE":
                values = np.where(CUP, 0, np.where(DISC, 128, 255))
                grey(folder / "Masks" / f"{name}.bmp", values)
            else:
                grey(folder / "Masks" / f"{name}-1-Disc-T.png", 255 * DISC)
                grey(folder / "Masks" / f"{name}-1-Cup-T.png", 255 * CUP)
    return tmp_path


CHOSEN = ("disc=Optic disc,odsegsoftmap,0,128", "cup=cupsegsoftmap,0")


def test_four_ways_of_storing_become_one(eyes: Path) -> None:
    report = imported(eyes, *CHOSEN, site_folders=True, threshold=191)
    text = report.render()
    assert "Drishti: masks hold several values, written anew: 191 and more is the structure" in text
    assert "REFUGE: masks hold 0, 128 (the background is 255)" in text
    assert "its structures" not in text
    task = task_of("disc", "cup")
    expected = {
        "Drishti": np.stack([CUP, CUP]),
        "IDRiD": np.stack([DISC, np.zeros_like(CUP)]),
        "REFUGE": np.stack([DISC | CUP, CUP]),
        "RIM": np.stack([DISC, CUP]),
    }
    for site, masks in expected.items():
        targets = targets_of(eyes / "out" / site, task)
        assert len(targets) == len(NUMBERS)
        for target in targets:
            np.testing.assert_array_equal(target, masks, site)
    assert json.loads((eyes / "out/IDRiD/datalist.json").read_text())["annotated"] == ["disc"]
    assert np.array(Image.open(eyes / "raw/REFUGE/Masks/REFUGE0.bmp"))[0, 0] == 255


def task_of(*labels: str) -> TaskConfig:
    return small_task(
        kind="segmentation",
        target="multilabel" if len(labels) > 1 else "binary",
        labels=list(labels),
        channels=3,
    )


def targets_of(folder: Path, task: TaskConfig) -> list[np.ndarray]:
    source = open_source(folder.name, task, folder)
    targets = []
    for entry in source.listed_items():
        targets.append(target_of(task, source, entry, source.image(entry)))
    return targets


def test_one_structure_of_several(eyes: Path) -> None:
    imported(eyes, "disc=optic disc,odsegsoftmap,0,128", site_folders=True, threshold=191)
    for site in SITES:
        content = json.loads((eyes / "out" / site / "datalist.json").read_text())
        assert content["structure"] == "disc" and "labels" not in content
        disc = {"Drishti": CUP, "REFUGE": DISC | CUP}.get(site, DISC)
        for target in targets_of(eyes / "out" / site, task_of("disc")):
            np.testing.assert_array_equal(target[0], disc, site)


def test_a_soft_mask_of_one_structure_needs_a_threshold(eyes: Path) -> None:
    one = ImportOptions(structures=parse_structures(["od=odsegsoftmap"]), out=eyes / "out")
    with pytest.raises(DataError, match="data init --threshold 128"):
        import_folder(eyes / "raw" / "Drishti", one)


def test_every_site_says_at_once_what_it_lacks(eyes: Path) -> None:
    text = error_of(eyes, "disc", "cup", site_folders=True)
    assert "Drishti: its structures are called cupsegsoftmap, odsegsoftmap, none of them" in text
    assert "also" in text and "IDRiD: its structures are called lesions, optic disc" in text
    assert "with the values 0, 128 (the background is 255); say which of them are disc" in text
    text = error_of(eyes, *CHOSEN, site_folders=True)
    assert "ODsegSoftmap.png: a structure's own mask holds 64, 128, 191, 255" in text
    assert "data init --threshold 128" in text
    without = error_of(eyes, site_folders=True, threshold=191)
    assert (
        "no mask of lesions, but of " in without
        and "; complete them, --skip, or --empty-masks" in without
    )
    assert "--structure NAME for each" in without
    text = imported(eyes, site_folders=True, threshold=191, empty_masks=True).render()
    assert "give data init --structure NAME=OTHER,... for each that you use" in text


def test_empty_masks_of_structures_that_images_do_not_show(eyes: Path) -> None:
    root = eyes / "raw" / "IDRiD"
    import_folder(root, ImportOptions(empty_masks=True, out=eyes / "out"))
    shown = [
        target.any(axis=(1, 2)).tolist()
        for target in targets_of(eyes / "out", task_of("lesions", "disc"))
    ]
    assert sorted(shown) == [[False, True]] * 3 + [[True, True]] * 3


def test_images_without_a_mask_show_nothing(tmp_path: Path) -> None:
    for n in range(8):
        picture(tmp_path / "raw" / f"{n}.png", 60 + n)
        if n < 5:
            mask(tmp_path / "raw" / f"{n}_mask.png")
    assert "5.png: no mask; complete them, --skip, or --empty-masks" in error_of(tmp_path)
    imported(tmp_path, empty_masks=True)
    shown = [bool(target.any()) for target in targets_of(tmp_path / "out", task_of("foreground"))]
    assert sorted(shown) == [False] * 3 + [True] * 5
    assert not read_stored(tmp_path / "out" / "7_no_mask.png", mask=True).array.any()


def test_a_photograph_without_a_mask_gets_one_of_its_size(tmp_path: Path) -> None:
    """Also one that a camera turned, with values that no JPEG of a mask has."""
    for n in range(8):
        picture(tmp_path / "raw" / f"{n}.jpg", 60 + n, channels=3)
        if n < 5:
            mask(tmp_path / "raw" / f"{n}_mask.png")
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    Image.new("RGB", (20, 12), (200, 90, 60)).save(tmp_path / "raw" / "7.jpg", exif=exif)
    imported(tmp_path, empty_masks=True)
    written = read_stored(tmp_path / "out" / "7_no_mask.png", mask=True).array
    assert written.shape == (1, 12, 20) and not written.any()
    with Image.open(tmp_path / "out" / "6_no_mask.png") as empty:
        assert empty.size == (16, 16) and not np.any(empty)


def test_no_empty_mask_is_proposed_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    for n in range(6):
        series = dicom_series(tmp_path / "raw" / f"{n}")
        change(series, PatientID=f"P{n}", SeriesInstanceUID=f"1.2.3.{n}")
        if n < 4:
            write(tmp_path / "raw" / f"{n}_mask.nii.gz", np.ones((5, 6, 4), np.uint8))
    for empty_masks in (False, True):
        text = error_of(tmp_path, empty_masks=empty_masks)
        assert text.endswith("no mask; complete them, or --skip")


def test_written_masks_of_volumes_keep_the_grid(tmp_path: Path) -> None:
    affine = np.diag([2.0, -1.5, 3, 1])
    values = np.zeros((6, 5, 4), np.uint8)
    values[:2] = 1
    values[3:, 2:] = 2
    for n in range(6):
        for folder, array in (("images", values * 10.0 + n), ("masks", values)):
            path = tmp_path / "raw" / folder / f"{n}.nii.gz"
            path.parent.mkdir(parents=True, exist_ok=True)
            nibabel.save(nibabel.Nifti1Image(array, affine), path)
    (tmp_path / "raw/masks/5.nii.gz").unlink()
    imported(tmp_path, "liver=1,2", "lesion=2", empty_masks=True)
    masks = [tmp_path / "out" / "masks" / f"0_{name}.nii.gz" for name in ("liver", "lesion")]
    for path, expected in zip(masks, (values > 0, values == 2), strict=True):
        written = nibabel.load(path)
        np.testing.assert_array_equal(written.dataobj, expected)
        np.testing.assert_array_equal(written.affine, affine)
    empty = nibabel.load(tmp_path / "out" / "images" / "5_no_liver.nii.gz")
    assert empty.shape == values.shape and not np.any(empty.dataobj)


@pytest.mark.parametrize(
    ("structures", "text"),
    [
        (["=od"], "give NAME"),
        (["disc=od", "rim=OD"], "od is disc, too"),
        (["disc", "Disc"], "disc is disc, too"),
    ],
)
def test_wrong_structures(structures: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        parse_structures(structures)


def test_what_cannot_be_chosen_says_how(eyes: Path, tmp_path: Path) -> None:
    one = eyes / "raw" / "RIM"
    with pytest.raises(DataError, match="both cup and disc are --structure eye"):
        import_folder(one, ImportOptions(structures=parse_structures(["eye=cup,disc"])))
    options = ImportOptions(structures=parse_structures(["disc=0,128"]))
    with pytest.raises(DataError, match="give --out for them"):
        import_folder(eyes / "raw" / "REFUGE", options)
    names = [(f"Images/RIM{n}.png", f"Masks/RIM{n}-1-Cup-T.png") for n in NUMBERS]
    table(one / "t.csv", ("image", "mask"), *names)
    with pytest.raises(ConfigError, match="choose with --mask-column"):
        import_folder(one, ImportOptions(structures=parse_structures(["cup"])))


def test_a_mask_without_a_name_is_one_of_several_chosen(tmp_path: Path) -> None:
    for n in NUMBERS:
        picture(tmp_path / "raw" / "images" / f"{n}.png", 60 + n)
        mask(tmp_path / "raw" / "masks" / f"{n}.png")
    assert "no name says which; call their folder so, as disc" in error_of(tmp_path, "disc", "cup")
    (tmp_path / "raw/masks").rename(tmp_path / "raw/disc_masks")
    imported(tmp_path, "disc", "cup")
    content = json.loads((tmp_path / "out/datalist.json").read_text())
    assert content["annotated"] == ["disc"] and [*content["labels"].values()] == ["disc", "cup"]


def test_a_mask_in_the_way_is_not_replaced(eyes: Path) -> None:
    picture(eyes / "raw/REFUGE/Masks/REFUGE0_disc.png")
    refuge = ImportOptions(structures=parse_structures(["disc=0,128"]), out=eyes / "out", skip=True)
    with pytest.raises(DataError, match="has the name of a mask that the import writes"):
        import_folder(eyes / "raw" / "REFUGE", refuge)


@pytest.mark.parametrize("names", [("GTV",), ("kidney_left", "kidney_right")])
def test_files_of_a_patient_that_are_called_as_structures(
    names: tuple[str, ...], tmp_path: Path
) -> None:
    """As of radiomics data: CT.nii.gz and GTV.nii.gz."""
    volume = np.arange(24, dtype=np.int16).reshape(4, 3, 2)
    for n in NUMBERS:
        (tmp_path / "raw" / f"P{n}").mkdir(parents=True)
        write(tmp_path / "raw" / f"P{n}" / "CT.nii.gz", volume + n)
        for name in names:
            values = np.ones((4, 3, 2), np.uint8)
            values[0] = 0
            write(tmp_path / "raw" / f"P{n}" / f"{name}.nii.gz", values)
    assert "--structure NAME for each" in error_of(tmp_path)
    for item in imported(tmp_path, *names).sites[""]:
        assert item.masks == [item.first.with_name(f"{name}.nii.gz") for name in names]
