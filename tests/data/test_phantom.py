from pathlib import Path

import numpy as np
import pandas as pd
import pydicom
import pytest
from PIL import Image

from medflare.data.phantom import SIDE, photographs, write_photographs


def test_a_site_is_a_function_of_its_name() -> None:
    first = photographs("site-1")
    again = photographs("site-1")
    for a, b in zip(first, again, strict=True):
        assert (a.image == b.image).all() and (a.mask == b.mask).all()
    assert not (first[0].image == photographs("site-2")[0].image).all()


@pytest.mark.parametrize("site", ["hospital of nowhere", "site-3"])
def test_what_photographs_are_and_two_eyes_of_a_patient_in_one_split(site: str) -> None:
    images = photographs(site)
    for item in images:
        assert item.image.shape == (SIDE, SIDE, 3) and item.image.dtype == np.uint8
        assert item.mask.shape == (SIDE, SIDE) and set(np.unique(item.mask)) == {0, 1, 2}
        cup = (item.mask == 2).sum()
        disc = (item.mask > 0).sum()
        assert 150 < disc < 1100 and 0 < cup < disc
        inside = item.image[item.mask > 0].mean()
        outside = item.image[item.mask == 0].mean()
        assert inside > outside  # the disc is the bright thing
    assert len({item.name for item in images}) == len(images)
    assert {item.grade for item in images} <= {0, 1, 2}
    patients = {item.patient for item in images}
    assert len({(item.patient, item.split) for item in images}) == len(patients) == len(images) / 2
    sizes = {}
    for split in ("training", "validation", "test"):
        sizes[split] = sum(item.split == split for item in images)
    assert sizes["training"] > 35 and sizes["validation"] >= 12 and sizes["test"] >= 18


def test_written_files_hold_the_same_pixels(tmp_path: Path) -> None:
    first = photographs("site-1")[0]
    assert write_photographs(tmp_path / "dicom", "segmentation", "dicom") == len(
        photographs("site-1")
    )
    file = pydicom.dcmread(tmp_path / "dicom" / "images" / f"{first.name}.dcm")
    assert (file.pixel_array == first.image).all() and file.PatientID == first.patient
    assert (
        np.asarray(Image.open(tmp_path / "dicom" / "masks" / f"{first.name}.png")) == first.mask
    ).all()
    count = write_photographs(tmp_path / "csv", "classification", "csv")
    table = pd.read_csv(tmp_path / "csv" / "images.csv")
    assert len(table) == count and {*table["hospital"]} == {"north", "south", "west"}
    for image in table["image"]:
        assert (tmp_path / "csv" / image).is_file()
    assert table.groupby("patient")["hospital"].nunique().max() == 1
