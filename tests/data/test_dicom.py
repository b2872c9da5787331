import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
import pytest
from monai.data.image_reader import PydicomReader
from pydicom import Dataset
from pydicom.data import get_testdata_file
from pydicom.filewriter import correct_ambiguous_vr
from pydicom.uid import ExplicitVRLittleEndian, RLELossless

from helpers.small_tasks import SEGMENTATION, small_task
from helpers.volume_sites import (
    TASK,
    beside_a_series,
    change,
    cube_task,
    dicom_series,
    enhanced_series,
    tagged,
    write,
)
from medflare.core.errors import DataError, UnreadableError
from medflare.data.acquisition import acquisition_of
from medflare.data.decoding import Source
from medflare.data.dicom import segments
from medflare.data.reading import (
    is_dicom,
    is_segmentation,
    read_image,
    read_mask,
    read_stored,
    series_grid,
)
from medflare.inference.inputs import find_inputs
from medflare.inference.masks import sizes
from medflare.preparation.dataset_import.folders import scan_folder
from medflare.tasks.config import TaskConfig, load_task

PIXELS = np.arange(30, dtype=np.uint16).reshape(6, 5)
TABLE = np.arange(256)[::-1] * 256  # a table of 16 bits that turns numbers around


def pictured(path: Path, channels: int = 1) -> np.ndarray:
    return read_image([path], small_task(channels=channels)).array


def refused(named: str, path: Path, task: TaskConfig | None = None) -> None:
    """What is not read, with an error that names it."""
    with pytest.raises(DataError, match=named):
        read_image([path], task or small_task())


def masked(path: Path) -> np.ndarray:
    return read_mask(path, path, None, small_task())[0]


def voxels(path: Path) -> np.ndarray:
    """(column, row, slice)."""
    return read_stored(path).array[0]


def rewritten(path: Path, pixels: np.ndarray = PIXELS, **tags: Any) -> Path:
    """A slice with other pixels, (rows, columns) or (frames, rows, columns), and with further tags."""
    if not path.parent.exists():
        dicom_series(path.parent, slices=1)
    file = pydicom.dcmread(path.parent / "0.dcm")
    file.Rows, file.Columns = pixels.shape[-2:]
    if pixels.ndim > 2:
        file.NumberOfFrames = len(pixels)
    tagged(file, **tags).PixelData = pixels.astype(np.uint16).tobytes()
    correct_ambiguous_vr(file, is_little_endian=True)
    file.save_as(path)
    return path


def item(**tags: Any) -> Dataset:
    return tagged(Dataset(), **tags)


@pytest.mark.parametrize(("slope", "intercept"), [(1, 0), (2, -1000)])
def test_slope_intercept_and_inverted_images(tmp_path: Path, slope: int, intercept: int) -> None:
    """One picture stored both ways is one picture; twelve bits of sixteen are used, as detectors do."""
    tags = {
        "RescaleSlope": slope,
        "RescaleIntercept": intercept,
        "BitsStored": 12,
        "HighBit": 11,
        "WindowCenter": 40,
        "WindowWidth": 80,
    }
    usual = rewritten(tmp_path / "ct/usual.dcm", PIXELS, **tags)
    inverse = rewritten(
        tmp_path / "ct/inverse.dcm", 4095 - PIXELS, PhotometricInterpretation="MONOCHROME1", **tags
    )
    np.testing.assert_array_equal(pictured(usual)[0], PIXELS * float(slope) + intercept)
    np.testing.assert_array_equal(pictured(inverse), pictured(usual))
    drawn = rewritten(
        tmp_path / "ct/mask.dcm",
        PIXELS,
        PhotometricInterpretation="MONOCHROME1",
        BitsStored=12,
        HighBit=11,
    )
    np.testing.assert_array_equal(masked(drawn)[0], PIXELS)


def test_numbers_that_do_not_end_at_the_lowest_bit(tmp_path: Path) -> None:
    """As of old detectors, twelve bits in the upper ones of sixteen: the lowest were read."""
    file = rewritten(tmp_path / "ct/a.dcm", PIXELS * 16, BitsStored=12, HighBit=15)
    with pytest.raises(UnreadableError, match="HighBit"):
        pictured(file)
    file = rewritten(tmp_path / "ct/b.dcm", PIXELS, BitsStored=12, HighBit=15)
    np.testing.assert_array_equal(pictured(file)[0], PIXELS)  # a wrong header, right numbers


def test_tables(tmp_path: Path) -> None:
    table = [
        item(
            LUTDescriptor=[256, 0, 16], ModalityLUTType="US", LUTData=TABLE.astype("<u2").tobytes()
        )
    ]
    np.testing.assert_array_equal(
        pictured(rewritten(tmp_path / "ct/t.dcm", ModalityLUTSequence=table))[0], TABLE[PIXELS]
    )
    red = np.linspace(255, 0, 256).astype(np.uint8)
    tables = {"Red": red, "Green": red // 2, "Blue": red * 0}
    palette: dict[str, Any] = {
        f"{colour}PaletteColorLookupTableDescriptor": [256, 0, 8] for colour in tables
    }
    palette |= {
        f"{colour}PaletteColorLookupTableData": one.tobytes() for colour, one in tables.items()
    }
    file = rewritten(tmp_path / "ct/p.dcm", PhotometricInterpretation="PALETTE COLOR", **palette)
    np.testing.assert_array_equal(pictured(file, 3), np.stack([red, red // 2, red * 0])[:, PIXELS])
    np.testing.assert_array_equal(masked(file), PIXELS[None])


def test_slope_and_intercept_of_the_frames_of_enhanced_objects(tmp_path: Path) -> None:
    frames = np.stack([PIXELS, PIXELS + 100, PIXELS + 200])

    def groups(*slopes: float) -> dict[str, Any]:
        each = [item(RescaleSlope=slope, RescaleIntercept=-1, RescaleType="HU") for slope in slopes]
        rescale = [item(PixelValueTransformationSequence=[one]) for one in each]
        return {
            "PerFrameFunctionalGroupsSequence": rescale,
            "SharedFunctionalGroupsSequence": [item()],
        }

    file = rewritten(tmp_path / "ct/t.dcm", frames, **groups(2, 2, 2))
    np.testing.assert_array_equal(pictured(file)[0], frames.transpose(1, 2, 0) * 2.0 - 1)
    refused(r"e\.dcm", rewritten(tmp_path / "ct/e.dcm", frames, **groups(1, 2, 4)))


@pytest.mark.parametrize(
    ("tags", "word"),
    [
        ({"PatientID": "q"}, "2 patients"),
        ({"SeriesInstanceUID": "1.2.9"}, "2 series"),
        ({"ImageOrientationPatient": [0, 1, 0, 0, 0, -1]}, "orientations"),
        ({"PixelSpacing": [5, 5]}, "spacings"),
        ({"Rows": 3, "Columns": 10}, "rows"),
        ({"ImagePositionPatient": [60, 20, 34]}, "50 mm beside"),
        ({"ImagePositionPatient": [10, 20, 35]}, "1 to 3 mm"),
    ],
)
def test_slices_of_different_series_or_geometry_are_refused(
    tmp_path: Path, tags: dict[str, Any], word: str
) -> None:
    folder = change(dicom_series(tmp_path / "ct"), (2,), **tags)
    for task in (small_task(), cube_task(channels=1)):
        refused(rf"ct.*{word}", folder, task)


def test_lost_and_broken_slices_are_errors(tmp_path: Path) -> None:
    folder = dicom_series(tmp_path / "ct", slices=5)
    (folder / "readme.txt").write_text("hello")
    assert pictured(folder).shape == (1, 6, 5, 5)
    whole = (folder / "2.dcm").read_bytes()
    for content in (b"broken", whole[:200]):
        (folder / "2.dcm").write_bytes(content)
        refused("ct", folder)
    (folder / "2.dcm").unlink()
    refused("2 to 4 mm", folder)


@pytest.mark.parametrize("place", [0, 2, 3])
@pytest.mark.parametrize(
    "tags",
    [
        {},  # all of the file is a copy
        {"SOPInstanceUID": "1.2.77"},
        {"SOPInstanceUID": "1.2.77", "InstanceNumber": 9},
    ],
)
def test_a_copied_slice_is_named(place: int, tags: dict[str, Any], tmp_path: Path) -> None:
    folder = dicom_series(tmp_path / "ct")
    copy = folder / "copy.dcm"
    tagged(pydicom.dcmread(folder / f"{place}.dcm"), **tags).save_as(copy)
    for read in (pictured, series_grid):
        with pytest.raises(DataError, match=r"ct: .*copied; take one of them out") as error:
            read(folder)
        assert {f"{place}.dcm", "copy.dcm"} <= set(str(error.value).replace(":", "").split())
    copy.unlink()
    assert series_grid(folder).shape == (5, 6, 4)


def test_a_deflated_file_is_read_up_to_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(get_testdata_file("image_dfl.dcm"))
    assert read_stored(path).array.shape == (1, 512, 512)
    monkeypatch.setattr("medflare.data.dicom._MOST_INFLATED", 2**17)
    with pytest.raises(DataError, match=r"image_dfl\.dcm: its deflated data set has more than"):
        read_stored(path)


def test_a_copied_slice_without_position_and_a_copied_picture(tmp_path: Path) -> None:
    folder = change(dicom_series(tmp_path / "ct"), without=("ImagePositionPatient",))
    (folder / "copy.dcm").write_bytes((folder / "1.dcm").read_bytes())
    alone = dicom_series(tmp_path / "alone", slices=1)
    (alone / "copy.dcm").write_bytes((alone / "0.dcm").read_bytes())
    refused(r"ct: 1\.dcm and copy\.dcm .*take one", folder)
    refused(r"alone: 0\.dcm and copy\.dcm .*take one", alone)


def test_files_at_one_position_with_different_pixels_are_no_copies(tmp_path: Path) -> None:
    """Two echoes; and anonymized slices of a single UID, which are a volume."""
    folder = dicom_series(tmp_path / "ct")
    expected = voxels(folder)
    change(folder, SOPInstanceUID="1.2.77")
    np.testing.assert_array_equal(voxels(folder), expected)
    for number in range(4):
        file = pydicom.dcmread(folder / f"{number}.dcm")
        file.InstanceNumber = number + 5
        file.PixelData = (file.pixel_array + np.uint16(7)).tobytes()
        file.save_as(folder / f"e{number}.dcm")
    for read in (pictured, series_grid):
        with pytest.raises(DataError, match=r"0\.dcm and e0\.dcm have one position.*; export"):
            read(folder)


def test_slices_with_and_without_a_rescale_are_refused(tmp_path: Path) -> None:
    """Before, half of a CT was 1000 HU higher than the other."""
    folder = change(dicom_series(tmp_path / "ct"), RescaleSlope=1, RescaleIntercept=-1000)
    assert voxels(folder).min() == -1000
    file = pydicom.dcmread(folder / "2.dcm")
    del file.RescaleSlope, file.RescaleIntercept
    file.save_as(folder / "2.dcm")
    refused(r"ct: some slices have a RescaleIntercept and others do not", folder)


def test_equal_frames_in_time_are_no_copies(tmp_path: Path) -> None:
    """A heart that does not move between two frames."""
    folder = change(dicom_series(tmp_path / "cine"), ImagePositionPatient=[10, 20, 30])
    file = pydicom.dcmread(folder / "1.dcm")
    file.PixelData = pydicom.dcmread(folder / "0.dcm").PixelData
    file.save_as(folder / "1.dcm")
    assert voxels(folder)[0, 0].tolist() == [0, 0, 200, 300]


@pytest.mark.parametrize("place", [0, 1, 3])
@pytest.mark.parametrize("start", [0, 132])
def test_a_slice_that_is_cut_off_in_its_header_is_no_other_object(
    place: int, start: int, tmp_path: Path
) -> None:
    """At the end of a volume no distance tells that a slice is lost."""
    folder = dicom_series(tmp_path / "ct")
    whole = (folder / f"{place}.dcm").read_bytes()
    for length in range(start + 20, len(whole) - 60, 20):
        (folder / f"{place}.dcm").write_bytes(whole[start:length])
        refused(rf"{place}\.dcm: (no DICOM file|the file is cut off).*; export it again", folder)


def unmarked(path: Path, kind: str) -> None:
    """Write a slice again without preamble and mark: with its meta header, or in this encoding."""
    whole = path.read_bytes()
    if kind == "meta":
        path.write_bytes(whole[132:])
        return
    file = pydicom.dcmread(path)
    if kind == "big":
        file.PixelData = file.pixel_array.astype(">u2").tobytes()
    pydicom.dcmwrite(
        path,
        Dataset(file),
        implicit_vr=kind == "implicit",
        little_endian=kind != "big",
        enforce_file_format=False,
    )


@pytest.mark.parametrize("kind", ["meta", "implicit", "explicit", "big"])
@pytest.mark.parametrize("ending", [".dcm", ".IMA", ""])
def test_files_without_preamble_and_mark(kind: str, ending: str, tmp_path: Path) -> None:
    """The values of the marked file, which tell column, row and slice."""
    folder = dicom_series(tmp_path / "ct")
    for number in range(4):
        unmarked(folder / f"{number}.dcm", kind)
        content = (folder / f"{number}.dcm").read_bytes()
        assert content[128:132] != b"DICM"
        (folder / f"{number}.dcm").rename(folder / f"I{number}{ending}")
    column, row, place = np.mgrid[:5, :6, :4]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_array_equal(voxels(folder), column + 10 * row + 100 * place)
        assert series_grid(folder).spacing == (0.25, 0.5, 2)
        assert find_inputs([folder], tmp_path / "out")[0][0].path == folder
        assert scan_folder(tmp_path).patients == {folder: "p"}


@pytest.mark.parametrize(
    "begin",
    [
        b"1.2.840.10008.1.2\n",
        b"\x89PNG\r\n\x1a\n",
        b"PK\x03\x04",
        b"\x5c\1\0\0",  # NIfTI-1, NIfTI-2 and both in big endian
        b"\x1c\2\0\0",
        b"\0\0\1\x5c",
        b"\0\0\2\x1c",
        b"\x1f\x8b\x08\0",
        b"",
    ],
)
def test_other_files_are_not_taken_for_dicom(begin: bytes, tmp_path: Path) -> None:
    """Without a suffix, though a UID of DICOM stands in them; and numbers that begin as a tag."""
    (tmp_path / "a").write_bytes(begin.ljust(400) + b"1.2.840.10008.5.1.4.1.1.2")
    (tmp_path / "b").write_bytes(np.arange(8, 4000, dtype="<u2").tobytes())
    assert not is_dicom(tmp_path / "a") and not is_dicom(tmp_path / "b")
    (tmp_path / "b").rename(tmp_path / "b.dcm")
    refused(r"b\.dcm: no DICOM file, .*; export it again", tmp_path / "b.dcm")


def test_a_header_without_the_transfer_syntax(tmp_path: Path) -> None:
    """The encoding shows how numbers are stored, but not how pixels are compressed."""
    path = dicom_series(tmp_path / "ct", slices=1) / "0.dcm"
    expected = read_stored(path).array
    file = pydicom.dcmread(path)
    del file.file_meta.TransferSyntaxUID
    file.save_as(path, implicit_vr=False, little_endian=True, enforce_file_format=False)
    np.testing.assert_array_equal(read_stored(path).array, expected)
    file = pydicom.dcmread(path, force=True)
    file.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    file.compress(RLELossless)
    del file.file_meta.TransferSyntaxUID
    file.save_as(path, implicit_vr=False, little_endian=True, enforce_file_format=False)
    refused(r"0\.dcm: its pixels are compressed.*TransferSyntaxUID.*; export it", path)


def test_other_dicom_objects_in_the_folder_are_no_slices(tmp_path: Path) -> None:
    """A slice without its pixels still is one, lest the volume pass for whole."""
    series = dicom_series(tmp_path / "alone")
    folder = dicom_series(tmp_path / "ct")
    beside_a_series(folder)
    np.testing.assert_array_equal(voxels(folder), voxels(series))
    assert series_grid(folder).shape == series_grid(series).shape == (5, 6, 4)
    change(folder, (2,), without=("PixelData",))
    refused("ct", folder)
    for file in folder.glob("[0-9].dcm"):
        file.unlink()
    refused("ct", folder)


@pytest.mark.parametrize(
    ("name", "word", "remedy"),
    [
        ("reportsi.dcm", "without pixels .Basic Text SR", "leave it out"),
        ("rtplan.dcm", "without pixels .RT Plan", "leave it out"),
        ("badVR.dcm", "RT Dose Storage is not read", "leave it out"),
        ("waveform_ecg.dcm", "without pixels .12-lead", "leave it out"),
        ("no_meta.dcm", "mark DICM", "export it again"),
        ("SC_rgb_jpeg_gdcm.dcm", "JPEG Lossless", "pip install pylibjpeg pylibjpeg-libjpeg"),
        ("JPEG-lossy.dcm", "JPEG Extended", "pip install pylibjpeg pylibjpeg-libjpeg"),
        ("MR_truncated.dcm", "cut off", "replace"),
        ("GDCMJ2K_TextGBR.dcm", "JPEG 2000", "replace"),
    ],
)
def test_pydicoms_own_files_that_are_no_readable_images(
    name: str, word: str, remedy: str, recwarn: pytest.WarningsRecorder
) -> None:
    path = Path(str(get_testdata_file(name)))
    refused(rf"{name}: .*{word}.*; .*{remedy}", path)
    assert not [warning for warning in recwarn if "pydicom" in str(warning.filename)]


def test_a_missing_attribute_is_named(tmp_path: Path) -> None:
    change(dicom_series(tmp_path / "ct", slices=1), (0,), without=("BitsAllocated",))
    refused("BitsAllocated|Bits Allocated", tmp_path / "ct" / "0.dcm")
    float_map = pydicom.dcmread(dicom_series(tmp_path / "map", slices=1) / "0.dcm")
    numbers = np.linspace(-1, 1, float_map.Rows * float_map.Columns, dtype=np.float32).reshape(
        float_map.Rows, float_map.Columns
    )
    float_map.FloatPixelData = numbers.tobytes()
    float_map.BitsAllocated = 32
    del float_map.PixelData, float_map.BitsStored, float_map.HighBit, float_map.PixelRepresentation
    float_map.save_as(tmp_path / "map" / "0.dcm")
    np.testing.assert_array_equal(read_stored(tmp_path / "map" / "0.dcm").array[0].T, numbers)


@pytest.mark.parametrize("numbers", [(1, 3, 2, 4), (1, 1, 1, 1), (4, 3, 2, 1), (1, 2, 3, 4)])
def test_slices_are_in_the_order_of_their_positions(
    tmp_path: Path, numbers: tuple[int, ...]
) -> None:
    folder = dicom_series(tmp_path / "ct")
    for place, number in enumerate(numbers):
        # A tilted gantry.
        change(
            folder,
            (place,),
            InstanceNumber=number,
            ImagePositionPatient=[10, 20 + 0.5 * place, 30 + 2 * place],
        )
    grid = series_grid(folder)
    heights = [(grid.affine @ [0, 0, k, 1])[2] for k in range(4)]
    np.testing.assert_allclose(
        voxels(folder)[0, 0], [100 * (height - 30) / 2 for height in heights], atol=1e-3
    )


def test_slices_without_positions_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    folder = change(dicom_series(tmp_path / "ct"), (1, 3), without=("ImagePositionPatient",))
    assert (
        voxels(folder)[0, 0].tolist() == [0, 100, 200, 300] and not series_grid(folder).has_affine
    )
    for tags in ({"InstanceNumber": 1}, {"without": ("InstanceNumber",)}):
        change(folder, (2,), **tags)  # a number twice, and none
        for read in (pictured, series_grid):
            with pytest.raises(DataError, match="ct"):
                read(folder)


@pytest.mark.parametrize(
    "tags", [{}, {"ImageOrientationPatient": [0.96, 0, 0.28, 0, 1, 0]}, {"PixelSpacing": None}]
)
def test_the_affine_equals_that_of_monai(
    tmp_path: Path, tags: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = dicom_series(tmp_path / "ct")
    for number in range(4):
        change(
            folder,
            (number,),
            InstanceNumber=4 - number,
            **{tag: value for tag, value in tags.items() if value},
        )
    change(folder, without=tuple(tag for tag, value in tags.items() if not value))
    reader = PydicomReader()
    array, meta = reader.get_data(reader.read(folder))
    stored = read_stored(folder)
    np.testing.assert_array_equal(stored.array[0], array)
    monkeypatch.setattr(
        pydicom.Dataset, "pixel_array", property(lambda dataset: pytest.fail("decoded"))
    )
    grid = series_grid(folder)
    assert (
        stored.grid is not None
        and grid.has_affine
        and grid.shape == stored.grid.shape == array.shape
    )
    for affine in (grid.affine, stored.grid.affine):
        np.testing.assert_array_equal(affine, meta["affine"])


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 0, 3, 1)])
def test_a_series_in_one_file_is_the_volume_of_its_slices(
    tmp_path: Path, order: tuple[int, ...]
) -> None:
    series = dicom_series(tmp_path / "ct")
    file = enhanced_series(tmp_path / "in/mr.dcm", order)
    for task in (small_task(), cube_task(channels=1)):
        expected = read_image([series], task)
        actual = read_image([file], task)
        np.testing.assert_array_equal(actual.array, expected.array)
        assert actual.grid is not None and expected.grid is not None
        np.testing.assert_array_equal(actual.grid.affine, expected.grid.affine)
    np.testing.assert_array_equal(series_grid(file).affine, series_grid(series).affine)
    assert series_grid(file).shape == (5, 6, 4)
    folder = scan_folder(tmp_path / "in")
    assert folder.images == (file,) and folder.patients == {file: "p"}


def test_frames_that_are_no_volume(tmp_path: Path) -> None:
    for name, heights in (("echoes.dcm", (30, 30, 32, 32)), ("lost.dcm", (30, 32, 34, 38))):
        refused(name, enhanced_series(tmp_path / name, heights=heights))
    cine = enhanced_series(tmp_path / "cine.dcm", heights=(30, 30, 30, 30))
    assert pictured(cine).shape == (1, 6, 5, 4)
    refused("cine", cine, cube_task(channels=1))
    short = pydicom.dcmread(cine)
    del short.PerFrameFunctionalGroupsSequence[0]
    short.save_as(cine)
    refused("cine", cine)


TWO: dict[str, Any] = {"target": "multiclass", "labels": ["background", "liver", "spleen"]}


def segmented(dims: int = 3, **changes: Any) -> TaskConfig:
    return load_task({**(TASK if dims == 3 else SEGMENTATION), "channels": 1, **changes})


def structures() -> dict[str, np.ndarray]:
    """Two that share no voxel; the first slice shows neither, so that the object leaves it out."""
    liver = np.zeros((5, 6, 4), bool)
    spleen = np.zeros((5, 6, 4), bool)
    liver[1:3, 2:5, 1:3] = True
    spleen[4, 0, 3] = True
    return {"liver": liver, "spleen": spleen}


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A series of five columns, six rows and four slices, with its segmentation."""
    pytest.importorskip("highdicom", reason="the extra dicomseg is not installed")
    from medflare.inference.dicom_seg import dicom_seg

    series = dicom_series(tmp_path / "ct")
    (tmp_path / "seg.dcm").write_bytes(dicom_seg(series, structures(), segmented()))
    (tmp_path / "datalist.json").write_text(
        json.dumps({"test": [{"image": "ct", "label": "seg.dcm"}]})
    )
    return tmp_path


def mask_of(site: Path, **changes: Any) -> np.ndarray:
    source = Source(site, segmented(**changes))
    (entry,) = source.listed_items()
    return source.mask(entry, source.image(entry))


@pytest.mark.parametrize("dims", [2, 3])
def test_every_frame_lies_on_its_slice(site: Path, dims: int) -> None:
    mask = mask_of(site, dims=dims, **TWO, **({"orientation": "LPS"} if dims == 3 else {}))
    expected = structures()["liver"] + 2 * structures()["spleen"]
    np.testing.assert_array_equal(mask[0] if dims == 3 else np.swapaxes(mask[0], 0, 1), expected)
    assert is_segmentation(site / "seg.dcm")
    assert (
        not is_segmentation(site / "ct/0.dcm")
        and not is_segmentation(site / "ct")
        and not is_segmentation(site / "datalist.json")
    )


def test_segments_are_named_or_numbered(site: Path) -> None:
    several = mask_of(site, target="multilabel", labels=["liver", "spleen"], orientation="LPS")
    np.testing.assert_array_equal(several, np.stack(list(structures().values())))
    valued = mask_of(
        site,
        target="multilabel",
        labels=["spleen", "liver"],
        label_values={"spleen": [7], "liver": [9]},
    )
    assert set(np.unique(valued)) == {0, 7, 9}
    assert set(np.unique(mask_of(site, target="multiclass", labels=["background", "a", "b"]))) == {
        0,
        1,
        2,
    }


def test_segmentations_that_do_not_fit_their_series(site: Path) -> None:
    from medflare.inference.dicom_seg import dicom_seg

    both = np.ones((5, 6, 4), bool)
    grid = series_grid(site / "ct")
    moved = pydicom.dcmread(site / "seg.dcm")
    moved.PerFrameFunctionalGroupsSequence[0].PlanePositionSequence[0].ImagePositionPatient = [
        10,
        20,
        31,
    ]
    with pytest.raises(DataError, match="beside"):
        segments(moved, site / "seg.dcm", "1.2.3", grid)
    (site / "seg.dcm").write_bytes(
        dicom_seg(site / "ct", {"liver": both, "spleen": both}, segmented())
    )
    with pytest.raises(DataError, match="overlap"):
        mask_of(site, **TWO)
    change(site / "ct", SeriesInstanceUID="1.2.99")
    with pytest.raises(DataError, match=r"1\.2\.99"):
        mask_of(site, **TWO)


@pytest.mark.parametrize(
    "tags",
    [{"without": ("PixelSpacing",)}, *({"PixelSpacing": value} for value in (None, [0, 0], [0.5]))],
)
def test_a_missing_or_wrong_pixel_spacing_is_unknown(tmp_path: Path, tags: dict[str, Any]) -> None:
    whole = dicom_series(tmp_path / "whole")
    folder = change(dicom_series(tmp_path / "ct"), **tags)
    task = cube_task(channels=1)
    image = read_image([folder], task)
    expected = read_image([whole], task)
    np.testing.assert_array_equal(image.array, expected.array)  # its orientation is known
    assert image.grid is not None and image.grid.spacing is None and image.grid.voxel_volume is None
    assert acquisition_of(image, task).spacing is None
    assert acquisition_of(expected, task).spacing == (0.25, 0.5, 2)
    assert sizes(np.ones((1, 5, 6, 4)), task, image.grid) == {"voxels_cube": 120}
    resampled = cube_task(channels=1, spacing=[1.0, 1.0, 1.0])
    refused("ct: its voxel spacing is unknown", folder, resampled)


@pytest.mark.parametrize("angle", [0, 10, 25])
def test_the_volume_of_a_series_with_a_tilted_gantry(angle: float, tmp_path: Path) -> None:
    """Slices shifted within their plane have the volume of straight ones: area times distance."""
    folder = dicom_series(tmp_path / "ct")
    shift = np.tan(np.radians(angle))
    for number in range(4):
        place = [10, 20 + 2 * number * shift, 30 + 2 * number]
        change(folder, (number,), ImagePositionPatient=place)
    task = cube_task(channels=1)
    grid = read_image([folder], task).grid
    step = 2 / np.cos(np.radians(angle))
    assert grid is not None and grid.spacing == pytest.approx((0.25, 0.5, step))
    found = sizes(np.ones((1, 5, 6, 4)), task, grid)
    assert found == {"voxels_cube": 120, "ml_cube": "0.03"}, "120 voxels of 0.25 mm3"


def test_palettes_of_16_bits_are_as_bright_as_other_colours() -> None:
    file = Path(str(get_testdata_file("examples_palette.dcm")))
    dataset = pydicom.dcmread(file)
    names = [f"{name}PaletteColorLookupTableData" for name in ("Red", "Green", "Blue")]
    tables = [getattr(dataset, name) for name in names]
    high = np.stack([np.frombuffer(table, "<u2") // 256 for table in tables])  # 0, 256, ... 65280
    np.testing.assert_array_equal(read_stored(file).array, high[:, dataset.pixel_array.T])
    assert high.max() == 255


def segment(site: Path, **masks: np.ndarray) -> None:
    """Replace the segmentation of a site; its segments are numbered in this order."""
    from medflare.inference.dicom_seg import dicom_seg

    (site / "seg.dcm").write_bytes(dicom_seg(site / "ct", masks, segmented()))


def test_a_segment_has_the_value_that_means_its_label_alone(site: Path) -> None:
    nested = {
        "target": "multilabel",
        "labels": ["liver", "tumour"],
        "label_values": {"liver": [1, 2], "tumour": [1]},
    }
    liver, spleen = structures().values()
    segment(site, liver=liver)
    np.testing.assert_array_equal(mask_of(site, **nested, orientation="LPS")[0], 2 * liver)
    segment(site, liver=liver, tumour=liver | spleen)
    with pytest.raises(DataError, match=r"segments overlap.*leave label_values out"):
        mask_of(site, **nested)


@pytest.mark.parametrize("labels", [["spleen", "liver"], ["Liver", "SPLEEN"], ["a", "b"]])
def test_masks_of_segments_follow_the_names_of_the_structures(
    labels: list[str], site: Path
) -> None:
    """Those of no known name keep their order."""
    masks = structures()
    order = {"a": "liver", "b": "spleen"}
    several = mask_of(site, target="multilabel", labels=labels, orientation="LPS")
    expected = [masks[order.get(label, label.lower())] for label in labels]
    np.testing.assert_array_equal(several, np.stack(expected))


def test_segments_of_one_name_are_one_structure(site: Path) -> None:
    liver, spleen = structures().values()
    left = liver.copy()
    left[:2] = False
    segment(site, liver=liver & ~left, Liver=left, spleen=spleen)
    several = mask_of(site, target="multilabel", labels=["spleen", "liver"], orientation="LPS")
    np.testing.assert_array_equal(several, np.stack([spleen, liver]))


@pytest.mark.parametrize("names", [("Spleen", "LIVER"), ("first", "second")])
def test_segments_have_the_values_of_labels_of_their_names_in_any_case(
    names: tuple[str, str], site: Path
) -> None:
    """Those of no known name keep their numbers."""
    liver, spleen = structures().values()
    segment(site, **{names[0]: spleen, names[1]: liver})
    named = "Spleen" in names
    expected = liver + 2 * spleen if named else spleen + 2 * liver
    np.testing.assert_array_equal(mask_of(site, **TWO, orientation="LPS")[0], expected)


@pytest.mark.parametrize(
    ("names", "changes"),
    [
        (("spleen", "other"), TWO),  # the other's number is the spleen's value
        (("liver", "other"), {"target": "multilabel", "labels": ["kidney", "liver"]}),
    ],
)
def test_segments_of_which_some_have_names_of_labels_are_refused(
    names: tuple[str, str], changes: dict[str, Any], site: Path
) -> None:
    segment(site, **dict(zip(names, structures().values(), strict=True)))
    with pytest.raises(DataError, match=rf"seg\.dcm.* {names[0]}, other.*give all of them"):
        mask_of(site, **changes)


def test_a_series_in_time_is_in_the_order_of_its_numbers(tmp_path: Path) -> None:
    folder = change(dicom_series(tmp_path / "cine"), ImagePositionPatient=[10, 20, 30])
    for file, number in enumerate((3, 1, 4, 2)):
        change(folder, (file,), InstanceNumber=number)
    assert voxels(folder)[0, 0].tolist() == [100, 300, 0, 200]
    grid = series_grid(folder)
    assert not grid.has_affine and grid.shape == (5, 6, 4)
    np.testing.assert_array_equal(grid.affine, np.eye(4))


def test_empty_tags_of_the_position_are_none(tmp_path: Path) -> None:
    folder = dicom_series(tmp_path / "ct")
    change(folder, ImagePositionPatient=None, ImageOrientationPatient=None)
    for file in range(4):
        change(folder, (file,), InstanceNumber=4 - file)
    assert voxels(folder)[0, 0].tolist() == [300, 200, 100, 0]
    assert not series_grid(folder).has_affine


def test_files_that_macos_writes_beside_slices_are_ignored(tmp_path: Path) -> None:
    folder = dicom_series(tmp_path / "ct")
    expected = voxels(folder)
    (folder / "._0.dcm").write_bytes(bytes.fromhex("0005160700020000") + b"Mac OS X".ljust(24))
    np.testing.assert_array_equal(voxels(folder), expected)
    assert series_grid(folder).shape == expected.shape


@pytest.mark.parametrize("flipped", [False, True])
def test_a_nifti_mask_of_a_series_from_the_head_lies_on_its_slices(
    flipped: bool, tmp_path: Path
) -> None:
    """The mask on the grid of the series, and with slices from the feet and axes as in RAS."""
    folder = dicom_series(tmp_path / "ct")
    for number in range(4):  # the first slice is the highest
        change(folder, (number,), ImagePositionPatient=[10, 20, 36 - 2 * number])
    mask = np.zeros((5, 6, 4), np.uint8)  # column, row, slice
    mask[1:3, 2:5, 0] = mask[4, 0, 3] = 1
    matrix = np.array([[-0.25, 0, 0, -10], [0, -0.5, 0, -20], [0, 0, -2, 36], [0, 0, 0, 1]])
    stored = mask
    if flipped:
        turn = np.diag([-1, -1, -1, 1])
        turn[:3, 3] = (4, 5, 3)
        stored = mask[::-1, ::-1, ::-1].copy()
        matrix = matrix @ turn
    file = write(tmp_path / "m.nii", stored, matrix)
    task = small_task()
    image = read_image([folder], task)
    masks, _ = read_mask(file, folder, image, task)
    np.testing.assert_array_equal(masks[0], mask.transpose(1, 0, 2))
