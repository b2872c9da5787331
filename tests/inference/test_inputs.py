from pathlib import Path

import numpy as np
import pydicom
import pytest
from PIL import Image
from pydicom.uid import SegmentationStorage

from helpers.volume_sites import beside_a_series, dicom_slice
from medflare.core.errors import ConfigError
from medflare.inference.inputs import find_inputs

GREY = np.arange(12, dtype=np.uint8).reshape(3, 4)


def picture(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(GREY).save(path)
    return path


def inputs_by_name(paths: list[Path], out: Path) -> dict[str, Path]:
    return {item.name: item.path for item in find_inputs(paths, out)[0]}


def test_files_and_folders_in_order(tmp_path: Path) -> None:
    for name in (
        "in/b.png",
        "in/a.jpg",
        "in/deep/c.TIF",
        "in/.hidden.png",
        "in/.git/d.png",
        "alone.png",
    ):
        picture(tmp_path / name)
    (tmp_path / "in/notes.txt").write_text("not an image")
    (tmp_path / "in/v.nii.gz").write_bytes(b"")
    names = inputs_by_name([tmp_path / "alone.png", tmp_path / "in"], tmp_path / "out")
    assert list(names) == ["alone", "a", "b", "v", "deep/c"]
    assert names["deep/c"] == tmp_path / "in/deep/c.TIF"


def test_names_stay_apart(tmp_path: Path) -> None:
    for name in ("x/1.png", "x/1.jpg", "y/1.png"):
        picture(tmp_path / name)
    assert list(inputs_by_name([tmp_path / "x", tmp_path / "y"], tmp_path / "out")) == [
        "x/1",
        "x/1-2",
        "y/1",
    ]
    # The first is named twice.
    files = [tmp_path / "x/1.png", tmp_path / "y/1.png", tmp_path / "x/1.png"]
    assert list(inputs_by_name(files, tmp_path / "out")) == ["1", "1-2"]


def test_earlier_results_are_no_inputs(tmp_path: Path) -> None:
    picture(tmp_path / "in/a.png")
    picture(tmp_path / "in/out/a_seg.png")
    assert list(inputs_by_name([tmp_path / "in"], tmp_path / "in/out")) == ["a"]
    with pytest.raises(ConfigError, match="out"):
        find_inputs([tmp_path / "in"], tmp_path / "in")


def test_folders_of_drives_and_systems_are_no_inputs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in (
        "a.png",
        "deep/b.png",
        "@eaDir/a.png/THUMB.jpg",
        "deep/@eaDir/b.png/THUMB.jpg",
        "#snapshot/a.png",
        "lost+found/c.png",
    ):
        picture(tmp_path / "in" / name)
    (tmp_path / "in" / "linked").symlink_to(tmp_path)
    assert list(inputs_by_name([tmp_path / "in"], tmp_path / "out")) == ["a", "deep/b"]
    systems, links = caplog.messages
    assert systems.endswith(
        "left out, as drives and systems make them: #snapshot, @eaDir (2 times), lost+found"
    )
    assert "links" in links and "linked" in links


def test_a_dicom_series_is_one_volume(tmp_path: Path) -> None:
    for number in range(3):
        dicom_slice(tmp_path / f"in/ct/IM{number}", GREY, number)
    dicom_slice(tmp_path / "in/ct/SEG", GREY, 9, series="1.2.99")
    segmentation = pydicom.dcmread(tmp_path / "in/ct/SEG")
    segmentation.SOPClassUID = SegmentationStorage
    segmentation.save_as(tmp_path / "in/ct/SEG")
    for folder in (tmp_path / "in", tmp_path / "in/ct"):
        beside_a_series(folder)
    assert inputs_by_name([tmp_path / "in"], tmp_path / "out") == {"ct": tmp_path / "in/ct"}
    assert inputs_by_name([tmp_path / "in/ct"], tmp_path / "out") == {"ct": tmp_path / "in/ct"}


def test_dicom_files_that_form_no_volume_are_images(tmp_path: Path) -> None:
    dicom_slice(tmp_path / "views/1.dcm", GREY)  # radiographs: one series, no position
    dicom_slice(tmp_path / "views/2.dcm", GREY)
    dicom_slice(tmp_path / "mixed/1.dcm", GREY, 0, series="1.2.3")
    dicom_slice(tmp_path / "mixed/2.dcm", GREY, 1, series="1.2.4")
    dicom_slice(tmp_path / "sizes/1.dcm", GREY, 0)
    dicom_slice(tmp_path / "sizes/2.dcm", GREY.T.copy(), 1)
    dicom_slice(tmp_path / "twice/1.dcm", GREY, 0)
    dicom_slice(tmp_path / "twice/2.dcm", GREY, 0)
    dicom_slice(tmp_path / "single/1.dcm", GREY, 0)
    dicom_slice(tmp_path / "broken/1.dcm", GREY, 0)
    (tmp_path / "broken/2.dcm").write_bytes(b"this is not DICOM")
    expected = {"views": 2, "mixed": 2, "sizes": 2, "twice": 2, "single": 1, "broken": 2}
    assert {
        folder: len(inputs_by_name([tmp_path / folder], tmp_path / "out")) for folder in expected
    } == expected


@pytest.mark.parametrize(
    ("files", "channels"),
    [(("p_t1.png", "p_t1.jpg", "p_t2.png"), ("t1", "t2")), (("p/t1.png", "p/t1.jpg"), ("t1",))],
)
def test_a_second_file_of_a_channel_is_a_problem(
    files: tuple[str, ...], channels: tuple[str, ...], tmp_path: Path
) -> None:
    for name in files:
        picture(tmp_path / "in" / name)
    inputs, problems = find_inputs([tmp_path / "in"], tmp_path / "out", channels)
    assert len(inputs) == len(problems) == 1
    for name in ("t1.png", "t1.jpg", "channel t1"):
        assert name in problems[0]
    twice = [tmp_path / "in" / files[0]] * 2
    assert find_inputs(twice, tmp_path / "out", channels)[1] == [], "the same file"


def test_numbered_files_are_the_channels_of_an_image(tmp_path: Path) -> None:
    picture(tmp_path / "in/p_1_0000.png")
    (found,), _ = find_inputs([tmp_path / "in"], tmp_path / "out", ("t1", "flair"))
    assert found.name == "p_1_0000", "an image of a row"
    picture(tmp_path / "in/p_1_0001.png")
    (found,), problems = find_inputs([tmp_path / "in"], tmp_path / "out", ("t1", "flair"))
    assert not problems and found.name == "p_1"
    assert [file and file.name for file in found.channels] == ["p_1_0000.png", "p_1_0001.png"]
    picture(tmp_path / "in/p_1_0002.png")  # three images of a row
    assert len(find_inputs([tmp_path / "in"], tmp_path / "out", ("t1", "flair"))[0]) == 3
    assert len(find_inputs([tmp_path / "in"], tmp_path / "out")[0]) == 3
