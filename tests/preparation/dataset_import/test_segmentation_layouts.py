"""Masks of public data sets and of annotators: read as they are meant, or refused in one line."""

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from helpers.downloaded_folders import mask, picture, table
from helpers.volume_sites import write
from medflare.cli import main
from medflare.core.errors import DataError
from medflare.data.datalist import read_datalist
from medflare.data.reading import read_stored
from medflare.preparation.dataset_import.chosen_structures import parse_structures
from medflare.preparation.dataset_import.datalists import ImportReport, import_folder
from medflare.preparation.dataset_import.options import ImportOptions
from medflare.preparation.proposing import TaskHints, summarise

NUMBERS = range(10)


def imported(root: Path, **options: Any) -> ImportReport:
    return import_folder(root, ImportOptions(**options))


def error_of(root: Path, **options: Any) -> str:
    with pytest.raises(DataError) as error:
        imported(root, **options)
    assert "\n" not in str(error.value) and not [*root.rglob("datalist.json")]
    return str(error.value)


def files(root: Path, *names: str) -> Path:
    """A file of each name for each number {n}; masks are those whose name ends in "*"."""
    for number in NUMBERS:
        for name in names:
            path = root / name.rstrip("*").format(n=number, n4=f"{number:04}")
            path.parent.mkdir(parents=True, exist_ok=True)
            values = np.arange(24, dtype=np.int16).reshape(4, 3, 2) + number
            if path.suffix == ".gz":
                write(
                    path, (values < 9 + number).astype(np.uint8) if name.endswith("*") else values
                )
            else:
                (mask if name.endswith("*") else picture)(path)
    return root


def masks_of(root: Path) -> dict[str, list[str]]:
    """First file of an image -> its masks."""
    pairs = {}
    for entry in read_datalist(root, "segmentation"):
        relative = [path.relative_to(root).as_posix() for path in entry.masks]
        pairs[entry.image.relative_to(root).as_posix()] = relative
    return pairs


@pytest.mark.parametrize(
    ("image", "label"),
    [
        ("volume-{n}.nii.gz", "segmentation-{n}.nii.gz"),  # LiTS
        ("volume_pt1/volume-{n}.nii.gz", "segmentations/segmentation-{n}.nii.gz"),
        ("img/img{n4}.nii.gz", "label/label{n4}.nii.gz"),  # BTCV
        ("sub-v{n}/sub-v{n}_ct.nii.gz", "derivatives/sub-v{n}/sub-v{n}_seg-vert_msk.nii.gz"),
        ("sub-v{n}/sub-v{n}_T1w.nii.gz", "derivatives/sub-v{n}/sub-v{n}_label-lesion.nii.gz"),
        ("images/{n}.jpg", "masks/{n}.jpg.png"),
        ("images/{n}_training.png", "1st_manual/{n}_manual1.gif"),  # DRIVE
        ("images/{n}.png", "groundtruths/{n}.png"),
    ],
)
def test_names_of_images_and_masks(image: str, label: str, tmp_path: Path) -> None:
    imported(files(tmp_path, image, f"{label}*"))
    expected = {}
    for number in NUMBERS:
        names = {"n": number, "n4": f"{number:04}"}
        expected[image.format(**names)] = [label.format(**names)]
    assert masks_of(tmp_path) == expected


@pytest.mark.parametrize("ends", [("-t1c", "-t2w"), ("__CT", "__PT"), ("_t1", "_flair")])
def test_marks_before_the_name_of_a_channel(ends: tuple[str, str], tmp_path: Path) -> None:
    names = [f"B-{{n4}}-0/B-{{n4}}-0{end}.nii.gz" for end in ends]
    report = imported(files(tmp_path, *names, "B-{n4}-0/B-{n4}-0-seg.nii.gz*"))
    expected = sorted(end.strip("_-").lower() for end in ends)
    assert [*report.dataset.channels.values()] == expected
    assert all(len(item.files) == 2 for item in report.sites[""])


def test_validation_images_of_amos(tmp_path: Path) -> None:
    files(tmp_path, "imagesTr/a{n}.nii.gz", "labelsTr/a{n}.nii.gz*")
    files(tmp_path, "imagesVa/b{n}.nii.gz", "labelsVa/b{n}.nii.gz*")
    for item in imported(tmp_path).sites[""]:
        assert (item.split == "validation") == (item.first.name[0] == "b")


def test_a_mask_of_each_structure_in_a_folder_of_each_image(tmp_path: Path) -> None:
    """As in TotalSegmentator."""
    names = [f"s{{n}}/segmentations/{name}.nii.gz*" for name in ("liver", "aorta")]
    files(tmp_path, "s{n}/ct.nii.gz", *names)
    assert imported(tmp_path).dataset.labels == {"0": "aorta", "1": "liver"}
    for image, masks in masks_of(tmp_path).items():
        folder = image.removesuffix("ct.nii.gz") + "segmentations"
        assert masks == [f"{folder}/aorta.nii.gz", f"{folder}/liver.nii.gz"]


@pytest.mark.parametrize("names", ["aorta", "aorta spleen"])
@pytest.mark.parametrize("path", ["segmentations/{}.nii.gz", "{}_seg.nii.gz"])
def test_a_structure_without_its_mask(names: str, path: str, tmp_path: Path) -> None:
    masks = [f"s{{n}}/{path.format(name)}*" for name in ("liver", *names.split())]
    files(tmp_path, "s{n}/ct.nii.gz", *masks)
    (tmp_path / "s3" / path.format("liver")).unlink()
    assert "s3/ct.nii.gz: no mask of liver" in error_of(tmp_path)
    assert len(imported(tmp_path, skip=True).sites[""]) == 9


def test_masks_of_objects_whose_number_differs(tmp_path: Path) -> None:
    files(tmp_path, "s{n}/ct.nii.gz", "s{n}/masks/1.nii.gz*", "s{n}/masks/2.nii.gz*")
    for number in NUMBERS:
        files(tmp_path, f"s{number}/masks/{3 + number % 2}.nii.gz*")
    text = error_of(tmp_path)
    assert "are 1, 2, 3, 4 structures?" in text and "several objects, unite them" in text


def test_soft_maps_of_structures(tmp_path: Path) -> None:
    """As in Drishti-GS1: several numbers stand for the agreement of readers."""
    files(tmp_path, "{n}/eye.png", "{n}/gt/cup_mask.png*", "{n}/gt/disc_mask.png*")
    for number in NUMBERS:
        mask(tmp_path / f"{number}/gt/cup_mask.png", (64, 128))
        mask(tmp_path / f"{number}/gt/disc_mask.png", (76,))
    assert "0/gt/cup_mask.png: a structure's own mask holds 64, 128; store" in error_of(tmp_path)
    for number in NUMBERS:
        mask(tmp_path / f"{number}/gt/cup_mask.png", (76,))
    assert imported(tmp_path).dataset.labels == {"0": "cup", "1": "disc"}


@pytest.mark.parametrize(
    ("image", "masks"),
    [
        ("s{n}/ct.nii.gz", "s{{n}}/masks/reader{}.nii.gz"),
        ("images/{n}.png", "masks_reader{}/{{n}}.png"),
    ],
)
def test_masks_of_several_readers_are_asked_about(image: str, masks: str, tmp_path: Path) -> None:
    names = [f"{masks.format(number)}*" for number in (1, 2)]
    text = error_of(files(tmp_path, image, *names))
    assert "reader1, " in text and "--kind segmentation" in text
    (pattern,) = shlex.split(text.partition("--leave-out ")[2].partition(";")[0])
    first = {item.masks[0] for item in imported(tmp_path, leave_out=(pattern,)).sites[""]}
    assert {path.relative_to(tmp_path).as_posix() for path in first} == {
        masks.format(1).format(n=number) for number in NUMBERS
    }
    _, reader = imported(tmp_path, kind="segmentation", force=True).dataset.labels.values()
    one = imported(tmp_path, structures=parse_structures([reader]), force=True)
    assert one.dataset.structure == reader


@pytest.mark.parametrize("field_of_view", [(), ("test/mask/{n}_test_mask.png*",)])
def test_two_readers_and_a_field_of_view(field_of_view: tuple[str, ...], tmp_path: Path) -> None:
    """As DRIVE, whose test images have two readers."""
    readers = [f"test/{name}/{{n}}_{name[4:]}.png*" for name in ("1st_manual", "2nd_manual")]
    files(tmp_path, "test/images/{n}_test.png", *readers, *field_of_view)
    files(tmp_path, "training/images/{n}_training.png", "training/1st_manual/{n}_manual1.png*")
    text = error_of(tmp_path)
    assert "are 1st_manual, 2nd_manual structures" in text and "--leave-out 2nd_manual" in text


@pytest.mark.parametrize(
    "masks",
    [
        ("mask/{n}_training_mask.png", "1st_manual/{n}_manual1.png"),  # the first: field of view
        ("images/{n}_training_mask.png", "images/{n}_training_mask_1.png"),  # BUSI
    ],
)
def test_two_masks_of_one_image(masks: tuple[str, str], tmp_path: Path) -> None:
    files(tmp_path, "images/{n}_training.png", *(f"{name}*" for name in masks))
    for skip in (False, True):
        text = error_of(tmp_path, skip=skip)
        assert all(name.format(n=0) in text for name in masks)
    for number in NUMBERS:
        (tmp_path / masks[0].format(n=number)).unlink()
    imported(tmp_path)
    assert masks_of(tmp_path)["images/0_training.png"] == [masks[1].format(n=0)]


@pytest.mark.parametrize(
    ("image", "of_image"),
    [("ct/P{n}/a.png", "mask/P{n}/a.png"), ("Bilder/P{n}/a.png", "Masken/P{n}/a_Maske.png")],
)
def test_a_mask_lies_in_folders_of_the_names_of_its_image(
    image: str, of_image: str, tmp_path: Path
) -> None:
    files(tmp_path, image, f"{of_image}*")
    imported(tmp_path)
    pairs = masks_of(tmp_path)
    assert pairs == {image.format(n=n): [of_image.format(n=n)] for n in NUMBERS}


def test_masks_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files(tmp_path, "images/a{n}.png", "masks/a{n}.png*")
    monkeypatch.chdir(tmp_path)
    assert len(import_folder(Path()).dataset.items) == len(NUMBERS)


def test_masks_of_two_structures_differ_in_shape(tmp_path: Path) -> None:
    files(tmp_path, "images/a{n}.png", "masks/disc/a{n}.png*")
    for n in NUMBERS:
        mask(tmp_path / f"masks/cup/a{n}.png", side=30)
    imported(tmp_path)


@pytest.mark.parametrize("entry", ["P{n}", "data/P{n}/ct.nii.gz"])
@pytest.mark.parametrize("home", ["", "data"])
def test_lists_of_the_folders_of_cases_are_the_splits(
    entry: str, home: str, tmp_path: Path
) -> None:
    files(tmp_path, "data/P{n}/ct.nii.gz", "data/P{n}/ct_mask.nii.gz*")
    for split, numbers in (("train", range(6)), ("val", range(6, 8)), ("test", range(8, 10))):
        lines = [entry.format(n=number) for number in numbers]
        (tmp_path / home / f"{split}.txt").write_text("\n".join(lines))
    report = imported(tmp_path)
    of_test = {item.first.parent.name for item in report.sites[""] if item.split == "test"}
    assert of_test == {"P8", "P9"}
    (tmp_path / home / "test.txt").write_text(lines[0])
    (tmp_path / "datalist.json").unlink()
    assert "--redraw" in error_of(tmp_path)


def test_channels_in_folders_need_a_folder_called_masks(tmp_path: Path) -> None:
    files(tmp_path, "ADC/{n}.nii.gz", "T2/{n}.nii.gz", "lesion/{n}.nii.gz*")
    text = error_of(tmp_path)
    assert "call their folder masks if the others hold channels" in text
    (tmp_path / "lesion").rename(tmp_path / "masks")
    assert "a file per channel (ADC, T2)" in imported(tmp_path).dataset.layout


def test_one_of_two_data_sets_has_channels(tmp_path: Path) -> None:
    files(tmp_path, "raw/imagesTr/a{n}_0000.nii.gz", "raw/labelsTr/a{n}.nii.gz*")
    files(tmp_path, "other/images/b{n}.nii.gz", "other/masks/b{n}.nii.gz*")
    files(tmp_path, "raw/imagesTr/a{n}_0001.nii.gz")
    assert "give the folder of one data set, or list them in a table" in error_of(tmp_path)


def test_masks_without_pairs_are_named(tmp_path: Path) -> None:
    text = error_of(files(tmp_path, "images/image_{n}.png", "masks/mask_{n4}.png*"))
    assert "masks/mask_0000.png beside images/image_0.png" in text and "--mask-column" in text


def test_masks_among_photographs_are_no_class(tmp_path: Path) -> None:
    """As in PH2: a folder for each photograph, with its lesion."""
    for number in range(4):
        name = f"IMD{number}"
        for view in range(3):
            picture(tmp_path / name / f"{name}_{view}.png", 70 + 9 * number + view)
        mask(tmp_path / name / f"{name}_lesion.png")
    text = error_of(tmp_path)
    assert "IMD0/IMD0_lesion.png" in text and "--kind classification" in text
    assert imported(tmp_path, kind="classification").dataset.kind == "classification"


@pytest.mark.parametrize(
    ("name", "form"), [("p{n}.mhd", "NIfTI"), ("p{n}.jp2", "PNG"), ("p{n}.npy", "PNG or NIfTI")]
)
def test_files_that_are_not_read_are_named(name: str, form: str, tmp_path: Path) -> None:
    for number in NUMBERS:
        file = tmp_path / "masks" / name.format(n=number)
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(b"NDims = 3")
    assert f"save as {form}: 10, the first: masks/{file.name[:1]}0" in error_of(tmp_path)
    files(tmp_path, "images/p{n}.png")
    assert f"save as {form}: 10" in error_of(tmp_path)


@pytest.mark.parametrize(
    "name", ["annotations/instances.json", "a.xml", "labels/im1.txt", "qupath/1.geojson"]
)
def test_files_of_outlines_are_named(name: str, tmp_path: Path) -> None:
    files(tmp_path, "images/{n}.png")
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("{}")
    assert f"text files are not read ({name})" in error_of(tmp_path)


def header(root: Path, **names: int) -> None:
    root.mkdir(parents=True, exist_ok=True)
    (root / "dataset.json").write_text(json.dumps({"labels": {"background": 0, **names}}))


def test_the_header_of_nnunet_is_found_in_any_folder(tmp_path: Path) -> None:
    folder = files(tmp_path / "raw" / "Task5", "imagesTr/a{n}_0000.nii.gz", "labelsTr/a{n}.nii.gz*")
    header(folder, liver=1)
    assert imported(tmp_path).dataset.labels == {"background": 0, "liver": 1}
    files(tmp_path / "raw" / "Task6", "imagesTr/b{n}_0000.nii.gz", "labelsTr/b{n}.nii.gz*")
    header(tmp_path / "raw" / "Task6", heart=1)
    (tmp_path / "datalist.json").unlink()
    text = error_of(tmp_path)
    assert "Task5/dataset.json" in text and "Task6/dataset.json" in text


@pytest.mark.parametrize("end", ["", ".png"])
def test_lists_of_names_are_the_splits(end: str, tmp_path: Path) -> None:
    files(tmp_path, "images/{n}.png", "masks/{n}.png*")
    (tmp_path / "lists").mkdir()
    for split, numbers in {"train": "012345", "val": "67", "test": "89"}.items():
        lines = "\r\n".join(f"images\\{number}{end}" for number in numbers)
        (tmp_path / "lists" / f"{split}.txt").write_text(lines)
    report = imported(tmp_path)
    found = {item.first.stem: item.split for item in report.sites[""]}
    expected = dict.fromkeys("012345", "training") | dict.fromkeys("67", "validation")
    assert found == expected | dict.fromkeys("89", "test") and "train.txt" in report.dataset.layout
    assert imported(tmp_path, redraw=True, force=True).dataset.layout == "images and masks by name"
    (tmp_path / "datalist.json").unlink()
    (tmp_path / "lists" / "val.txt").write_text("6")
    assert "names 7 alone" in error_of(tmp_path) and "--redraw" in error_of(tmp_path)


@pytest.mark.parametrize("name", ["splits_final.json", "meta.csv", "test.csv"])
def test_splits_that_cannot_be_read(name: str, tmp_path: Path) -> None:
    files(tmp_path, "images/{n}.png", "masks/{n}.png*")
    table(tmp_path / name, ("case", "split"), ("s1", "train"), ("s2", "test"))
    assert name in error_of(tmp_path) and "--redraw" in error_of(tmp_path)
    assert len(imported(tmp_path, redraw=True).sites[""]) == 10


def test_the_subjects_of_bids_are_the_patients(tmp_path: Path) -> None:
    names = [f"sub-{{n}}/ses-{visit}/sub-{{n}}_ses-{visit}_T1w" for visit in (1, 2)]
    report = imported(
        files(tmp_path, *(f"{n}.nii.gz" for n in names), *(f"{n}_mask.nii.gz*" for n in names))
    )
    assert not report.warnings
    for item in report.sites[""]:
        assert item.patient == item.first.name.partition("_")[0]


def test_counts_of_outlines_are_no_classes(tmp_path: Path) -> None:
    """As in the table of VGG Image Annotator."""
    rows = [(picture(tmp_path / f"{number}.png").name, 1, 0) for number in NUMBERS]
    table(tmp_path / "via.csv", ("filename", "region_count", "region_id"), *rows)
    assert "via.csv: no column is recognized as the label" in error_of(tmp_path)


# -- numbers of masks ------------------------------------------------------------------------------


def indexed(path: Path, numbers: tuple[int, ...], colours: tuple[int, ...]) -> None:
    """A mask of two stripes with a palette; `colours`: of 0, of 1 and of 2, reds alone."""
    pixels = np.zeros((16, 16), np.uint8)
    pixels[2:6, 3:9], pixels[9:12, 3:9] = numbers
    image = Image.fromarray(pixels)
    image.putpalette([part for red in colours for part in (red, 0, 0)] + [0] * (768 - 9))
    path.parent.mkdir(exist_ok=True)
    image.save(path)


@pytest.mark.parametrize("suffix", ["png", "gif"])
@pytest.mark.parametrize("alike", [True, False])
def test_palettes_that_number_colours_anew_are_refused(
    alike: bool, suffix: str, tmp_path: Path
) -> None:
    for number in NUMBERS:
        picture(tmp_path / "images" / f"{number}.png")
        swap = number % 2 and not alike
        colours = (0, 99, 200) if swap else (0, 200, 99)
        indexed(tmp_path / "masks" / f"{number}.{suffix}", (2, 1) if swap else (1, 2), colours)
    imported(tmp_path)
    if alike:
        assert summarise(tmp_path, TaskHints()).settings["target"] == "multiclass"
        return
    with pytest.raises(DataError, match="has another colour in its palette") as error:
        summarise(tmp_path, TaskHints())
    assert f"5.{suffix}: 1 has" in str(error.value) and f"in 0.{suffix};" in str(error.value)


@pytest.mark.parametrize(
    ("values", "refused"),
    [((1, 254, 255), True), ((1, 2, 255), True), ((128, 255), False), ((1, 2, 3), False)],
)
def test_noise_and_borders_are_no_structures(
    values: tuple[int, ...], refused: bool, tmp_path: Path
) -> None:
    """JPEG and smoothing change 0 and 255 a little; 255 is the border of objects in Pascal VOC."""
    for number in NUMBERS:
        picture(tmp_path / f"{number}.png")
        mask(tmp_path / f"{number}_mask.png", values if number == 4 else values[-2:])
    imported(tmp_path)
    if refused:
        with pytest.raises(DataError, match=r"4_mask.png: .*near 255 \(1, ") as error:
            summarise(tmp_path, TaskHints())
        assert "--labels" in str(error.value)
    names = tuple("abc"[: len(values)])
    assert summarise(tmp_path, TaskHints(labels=names)).settings["labels"][1:] == [*names]


def test_a_value_below_0_is_asked_about(tmp_path: Path) -> None:
    for number in NUMBERS:
        values = np.zeros((8, 8, 4), np.int16)
        write(tmp_path / f"p{number}.nii.gz", values + 100)
        values[2:4, 2:6] = 1
        values[5, 5] = -number // 5
        write(tmp_path / f"p{number}_seg.nii.gz", values)
    imported(tmp_path)
    with pytest.raises(
        DataError, match=r"p[1-9]_seg.nii.gz: .* below 0 \(-2, -1, 1\); if it marks"
    ):
        summarise(tmp_path, TaskHints())
    labels = summarise(tmp_path, TaskHints(labels=("a", "b", "c"))).settings["labels"]
    assert labels == ["background", "a", "b", "c"]


def test_sites_of_volumes_and_of_pictures_are_named(tmp_path: Path) -> None:
    for number in NUMBERS:
        for site in "AB":
            (tmp_path / site).mkdir(exist_ok=True)
            values = np.full((8, 8, 4), number, np.int16)
            write(tmp_path / site / f"p{number}.nii.gz", values)
            write(tmp_path / site / f"p{number}_seg.nii.gz", values // 5)
    assert "volumes are" not in imported(tmp_path, site_folders=True).render()
    for number in NUMBERS:
        picture(tmp_path / "C" / f"{number}.png")
        mask(tmp_path / "C" / f"{number}_mask.png")
    text = imported(tmp_path, site_folders=True, force=True).render()
    assert "WARNING: volumes are at A, B, pictures at C; a task is for one of them" in text


def test_masks_stored_as_gif(tmp_path: Path) -> None:
    file = mask(tmp_path / "a.gif", (255,))
    assert np.unique(read_stored(file, mask=True).array).tolist() == [0, 255]


@pytest.mark.parametrize(
    ("image", "masks", "structures"),
    [
        ("p{n}.png", ("p{n}_disc_mask.png", "p{n}_cup_mask.png"), ("cup", "disc")),
        # RIM-ONE
        ("images/p{n}.png", ("gt/p{n}-1-Disc-T.png", "gt/p{n}-1-Cup-T.png"), ("cup", "disc")),
        # IDRiD
        (
            "1. Images/a. Training Set/I_{n}.jpg",
            (
                "2. Groundtruths/a. Training Set/1. Hard Exudates/I_{n}_EX.tif",
                "2. Groundtruths/a. Training Set/2. Optic Disc/I_{n}_OD.tif",
            ),
            ("hard exudates", "optic disc"),
        ),
    ],
)
def test_masks_called_like_their_image_and_a_structure(
    image: str, masks: tuple[str, ...], structures: tuple[str, ...], tmp_path: Path
) -> None:
    files(tmp_path, image, *(f"{name}*" for name in masks))
    report = imported(tmp_path)
    assert tuple(report.dataset.labels.values()) == structures
    ordered = sorted(masks, key=lambda name: "Disc" in name or "disc" in name)
    expected = {}
    for number in NUMBERS:
        expected[image.format(n=number)] = [name.format(n=number) for name in ordered]
    assert masks_of(tmp_path) == expected
    (tmp_path / masks[0].format(n=3)).unlink()
    assert f"no mask of {structures[-1 if 'isc' in masks[0] else 0]}" in error_of_again(tmp_path)


def test_masks_in_folders_of_their_case(tmp_path: Path) -> None:
    """As PH2; its outlines of colours are asked about, as not all images have one."""
    case = "set/IMD{n}/IMD{n}"
    files(tmp_path, f"{case}_Image/IMD{{n}}.bmp", f"{case}_lesion/IMD{{n}}_lesion.bmp*")
    imported(tmp_path)
    mask_of = masks_of(tmp_path)
    expected = "set/IMD3/IMD3_lesion/IMD3_lesion.bmp"
    assert mask_of["set/IMD3/IMD3_Image/IMD3.bmp"] == [expected] and len(mask_of) == 10
    mask(tmp_path / "set/IMD3/IMD3_roi/IMD3_R1_Label4.bmp")
    text = error_of_again(tmp_path)
    assert "no mask of roi, but of lesion" in text and "--structure NAME for each" in text
    assert imported(tmp_path, structures=parse_structures(["lesion"])).dataset.structure == "lesion"


def test_folders_that_are_read_as_splits_are_not_proposed_as_sites(tmp_path: Path) -> None:
    """As PraNet's; other folders are."""
    for first, second, sites in (("Train", "Test", False), ("North", "South", True)):
        root = tmp_path / first
        for top in (first, second):
            files(
                root, f"{top}Dataset/images/{top}{{n}}.png", f"{top}Dataset/masks/{top}{{n}}.png*"
            )
        assert ("--site-folders" in "".join(imported(root).warnings)) == sites


def test_words_that_all_masks_share_name_no_structure(tmp_path: Path) -> None:
    files(tmp_path, "images/p{n}.png", "gt/p{n}_disc.png*", "gt/p{n}_disc_new.png*")
    assert "rename them, as p0_mask.png for the mask of this image, or give" in error_of(tmp_path)


def test_images_of_one_name_in_several_folders(tmp_path: Path) -> None:
    for folder in ("left", "right"):
        names = [f"{folder}/gt/p{{n}}_{end}.png*" for end in ("od", "oc")]
        files(tmp_path, f"{folder}/images/p{{n}}.png", *names)
    imported(tmp_path)
    pairs = masks_of(tmp_path)
    assert len(pairs) == 2 * len(NUMBERS)
    assert pairs["right/images/p3.png"] == ["right/gt/p3_oc.png", "right/gt/p3_od.png"]


def error_of_again(root: Path) -> str:
    (root / "datalist.json").unlink()
    return error_of(root)


def test_a_word_after_the_name_of_the_image(tmp_path: Path) -> None:
    """As STARE; two readers are asked about."""
    files(tmp_path, "stare-images/im{n}.png", "labels-ah/im{n}.ah.png*")
    imported(tmp_path)
    assert masks_of(tmp_path)["stare-images/im3.png"] == ["labels-ah/im3.ah.png"]
    assert summarise(tmp_path, TaskHints()).settings["labels"] == ["foreground"]
    other = tmp_path / "other"
    files(other, "images/p{n}.png", "gt/p{n}_1stHO.png*", "gt/p{n}_2ndHO.png*")
    assert "two masks of one image" in error_of(other)
    initials = tmp_path / "initials"
    files(initials, "images/p{n}.png", "labels-ah/p{n}.ah.png*", "labels-vk/p{n}.vk.png*")
    assert "of several readers" in error_of(initials)


@pytest.mark.parametrize(
    ("folder", "structure"),
    [
        ("masks/vessel", "vessel"),
        ("vessel_masks", "vessel"),
        ("1st_manual", "foreground"),
        ("masks_png_256", "foreground"),
        ("SegmentationClass", "foreground"),
    ],
)
def test_the_structure_is_called_like_the_folder_of_its_masks(
    folder: str, structure: str, tmp_path: Path
) -> None:
    files(tmp_path, "images/p{n}.png", f"{folder}/p{{n}}.png*")
    imported(tmp_path)
    assert summarise(tmp_path, TaskHints()).settings["labels"] == [structure]


def test_masks_of_jpeg(tmp_path: Path) -> None:
    """As Kvasir-SEG: compression moves black and white, not what is meant."""
    rows, columns = np.mgrid[:64, :64]
    drawn = ((rows - 30) ** 2 + (columns - 34) ** 2 < 300) * np.uint8(255)
    colours = np.repeat(drawn[..., None], 3, axis=2)
    for number in NUMBERS:
        picture(tmp_path / f"{number}.png", side=64)
        Image.fromarray(colours).save(tmp_path / f"{number}_mask.jpg", quality=80)
    assert "JPEG changes the values of masks" in "".join(imported(tmp_path).dataset.notes)
    stored = read_stored(tmp_path / "4_mask.jpg", mask=True).array
    assert len(np.unique(np.asarray(Image.open(tmp_path / "4_mask.jpg")))) > 2
    assert (stored == drawn.T).all()
    assert summarise(tmp_path, TaskHints()).settings["target"] == "binary"
    for values in ((1, 2), (128, 255)):
        bands = np.repeat(np.array((0, *values), np.uint8), 12)
        Image.fromarray(np.tile(bands, (32, 1))).save(tmp_path / "x.jpg")
        with pytest.raises(DataError, match="other values than black and white"):
            read_stored(tmp_path / "x.jpg", mask=True)
    colours[..., 2] = 0
    Image.fromarray(colours).save(tmp_path / "yellow.jpg")
    with pytest.raises(DataError, match="other values than black and white"):
        read_stored(tmp_path / "yellow.jpg", mask=True)
    Image.new("L", (16, 16)).save(tmp_path / "empty.jpg")
    assert not read_stored(tmp_path / "empty.jpg", mask=True).array.any()


def test_numbers_of_objects_are_asked_about(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As GlaS, where each gland of an image has its number."""
    for number in NUMBERS:
        picture(tmp_path / f"train_{number}.bmp")
        mask(tmp_path / f"train_{number}_anno.bmp", tuple(range(1, 2 + number % 4)))
    imported(tmp_path)
    with pytest.raises(DataError, match=r"seem to number objects, .* values up to 4, others fewer"):
        summarise(tmp_path, TaskHints())
    assert main(["data", "check", str(tmp_path)]) == 1
    assert "; or name one with --task" in capsys.readouterr().err
    labels = ("a", "b", "c", "d")
    assert summarise(tmp_path, TaskHints(labels=labels)).settings["labels"][1:] == [*labels]


@pytest.mark.parametrize(
    ("images", "of_mask"),
    [
        (["Patient_{n4}/T1.nii.gz"], "Patient_{n4}/masks/lesion.nii.gz*"),
        (["P_{n4}/Raw/P_{n4}_{n}.nii.gz"], "P_{n4}/Masks/P_{n4}_consensus.nii.gz*"),
        (["P_{n4}/FLAIR.nii.gz", "P_{n4}/T1.nii.gz"], "P_{n4}/Masks/consensus.nii.gz*"),
        (["P_{n4}/us/a.png"], "P_{n4}/masks/a_mask.png*"),
    ],
)
def test_an_image_has_the_mask_of_its_case(images: list[str], of_mask: str, tmp_path: Path) -> None:
    files(tmp_path, *images, of_mask)
    expected = set()
    for number in NUMBERS:
        named = {"n": number, "n4": f"{number:04}"}
        channels = tuple(tmp_path / image.format(**named) for image in images)
        expected.add((channels, tmp_path / of_mask.rstrip("*").format(**named)))
    assert {(item.files, item.label) for item in imported(tmp_path).sites[""]} == expected


def test_images_of_other_names_than_their_case_are_asked_about(tmp_path: Path) -> None:
    masks = "Case_{n4}/masks/lesion.nii.gz*"
    files(tmp_path, "Case_{n4}/a{n}.nii.gz", "Case_{n4}/b{n}.nii.gz", masks)
    assert "as a0_mask.nii.gz for the mask of this image" in error_of(tmp_path)


@pytest.mark.parametrize("empty", [False, True])
def test_two_masks_of_an_image_are_told_before_missing_ones(empty: bool, tmp_path: Path) -> None:
    """As PALM's discs and atrophies, and two pipelines of BIDS."""
    files(tmp_path, "Photographs/p{n}.png", "Disc/Disc_Masks/p{n}.png*")
    for number in (0, 9):
        picture(tmp_path / "Photographs" / f"q{number}.png")
    for number in range(4):
        mask(tmp_path / "L" / "Lesion_Masks" / "Atrophy" / f"p{number}.png")
    out = tmp_path.parent / f"{tmp_path.name} out"
    options = {"empty_masks": empty, "out": out}
    text = error_of(tmp_path, **options)
    assert "the first: Photographs/p0.png: Disc/Disc_Masks/p0.png and L/Lesion_Masks/" in text
    assert "--leave-out L," in text and "without an image" not in text
    options |= {"leave_out": ("L",), "empty_masks": True}
    assert imported(tmp_path, **options).dataset.structure == "disc"
    labels = [entry.masks[0].name for entry in read_datalist(out, "segmentation")]
    expected = [f"p{number}.png" for number in NUMBERS]
    assert sorted(name for name in labels if name in expected) == sorted(expected)
    assert len(labels) == len(expected) + 2
