import struct
import warnings
import zlib
from pathlib import Path

import nibabel
import numpy as np
import pydicom
import pytest
from PIL import Image
from pydicom.dataset import FileDataset, FileMetaDataset
from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, generate_uid

from medflare.core import packages
from medflare.core.errors import DataError
from medflare.data.files.readers import read_image, read_mask

GREY = np.arange(12, dtype=np.uint8).reshape(3, 4)  # 3 rows, 4 columns: an exchange of axes shows
COLOUR = np.stack([GREY, GREY + 50, GREY + 100], axis=-1)


@pytest.mark.parametrize("ending", [".png", ".bmp", ".tif", ".tiff"])
def test_pictures(tmp_path: Path, ending: str) -> None:
    Image.fromarray(GREY).save(tmp_path / f"g{ending}")
    Image.fromarray(COLOUR).save(tmp_path / f"c{ending}")
    np.testing.assert_array_equal(read_image(tmp_path / f"g{ending}", 1), GREY[None])
    np.testing.assert_array_equal(read_image(tmp_path / f"g{ending}", 3), np.stack([GREY] * 3))
    np.testing.assert_array_equal(read_image(tmp_path / f"c{ending}", 3), COLOUR.transpose(2, 0, 1))
    np.testing.assert_allclose(read_image(tmp_path / f"c{ending}", 1)[0], COLOUR @ [0.299, 0.587, 0.114], rtol=1e-5)
    np.testing.assert_array_equal(read_mask(tmp_path / f"g{ending}"), GREY[None])


def test_jpeg_and_capital_suffix(tmp_path: Path) -> None:
    Image.fromarray(np.full((8, 6), 77, np.uint8)).save(tmp_path / "a.JPG", quality=95)
    picture = read_image(tmp_path / "a.JPG", 1)
    assert picture.shape == (1, 8, 6) and abs(picture - 77).max() <= 2


def test_unusual_modes(tmp_path: Path) -> None:
    Image.fromarray(GREY.astype(np.uint16) * 1000).save(tmp_path / "deep.png")
    np.testing.assert_array_equal(read_image(tmp_path / "deep.png", 1)[0], GREY.astype(np.float32) * 1000)
    Image.fromarray(GREY > 5).save(tmp_path / "bits.png")
    np.testing.assert_array_equal(read_mask(tmp_path / "bits.png")[0], GREY > 5)
    transparent = np.dstack([COLOUR, np.full_like(GREY, 200)])
    Image.fromarray(transparent).save(tmp_path / "rgba.png")
    np.testing.assert_array_equal(read_image(tmp_path / "rgba.png", 3), COLOUR.transpose(2, 0, 1))
    palette = Image.fromarray(GREY % 3).convert("P")
    palette.putpalette([0, 0, 0, 255, 0, 0, 0, 0, 255])
    palette.putdata((GREY % 3).ravel().tolist())
    palette.save(tmp_path / "palette.png")
    np.testing.assert_array_equal(read_mask(tmp_path / "palette.png")[0], GREY % 3)
    assert read_image(tmp_path / "palette.png", 3)[0].max() == 255
    Image.fromarray(np.dstack([GREY] * 3)).save(tmp_path / "grey_as_rgb.png")
    np.testing.assert_array_equal(read_mask(tmp_path / "grey_as_rgb.png"), GREY[None])


def test_nifti_volumes_are_turned_to_one_orientation(tmp_path: Path) -> None:
    volume = np.arange(2 * 3 * 4, dtype=np.float32).reshape(2, 3, 4)  # (left, posterior, superior) in LPS
    nibabel.save(nibabel.Nifti1Image(volume, np.diag([-1, -1, 1, 1])), tmp_path / "lps.nii.gz")
    nibabel.save(nibabel.Nifti1Image(volume[::-1, ::-1].copy(), np.diag([1, 1, 1, 1])), tmp_path / "ras.nii")
    expected = volume.transpose(1, 0, 2)[None]  # rows run to posterior, columns to the left
    np.testing.assert_array_equal(read_image(tmp_path / "lps.nii.gz", 1), expected)
    np.testing.assert_array_equal(read_image(tmp_path / "ras.nii", 1), expected)
    np.testing.assert_array_equal(read_mask(tmp_path / "ras.nii"), expected)


def test_nifti_channels_and_flat_images(tmp_path: Path) -> None:
    several = np.arange(2 * 3 * 4 * 3, dtype=np.float32).reshape(2, 3, 4, 3)
    nibabel.save(nibabel.Nifti1Image(several, np.diag([-1, -1, 1, 1])), tmp_path / "four.nii.gz")
    np.testing.assert_array_equal(read_image(tmp_path / "four.nii.gz", 3), several.transpose(3, 1, 0, 2))
    nibabel.save(nibabel.Nifti1Image(several[:, :, 0, 0], np.diag([-1, -1, 1, 1])), tmp_path / "flat.nii")
    np.testing.assert_array_equal(read_image(tmp_path / "flat.nii", 1), several[:, :, 0, 0].T[None])


def test_volumes_of_one_file_are_no_colours(tmp_path: Path) -> None:
    """Three contrasts are not averaged as red, green and blue are; which one is meant has to be said."""
    contrasts = np.arange(2 * 3 * 4 * 3, dtype=np.float32).reshape(2, 3, 4, 3)
    file = tmp_path / "contrasts.nii.gz"
    nibabel.save(nibabel.Nifti1Image(contrasts, np.diag([-1, -1, 1, 1])), file)
    with pytest.raises(DataError, match=r"has 3 channels, the task takes 1; .*say in the task which of them it means \(pick\)"):
        read_image(file, 1)
    np.testing.assert_array_equal(read_image(file, 1, (2,)), contrasts[..., 2].transpose(1, 0, 2)[None])
    with pytest.raises(DataError, match="the task picks number 3"):
        read_image(file, 1, (3,))


def test_an_oblique_volume_is_cut_along_its_own_slices(tmp_path: Path) -> None:
    """Turned by whole axes and never interpolated: tilted by twenty degrees and flipped, the slices stay those that were acquired."""
    volume = np.arange(2 * 3 * 4, dtype=np.float32).reshape(2, 3, 4)
    angle = np.radians(20)
    tilt = np.array([[1, 0, 0, 0], [0, np.cos(angle), -np.sin(angle), 0], [0, np.sin(angle), np.cos(angle), 0], [0, 0, 0, 1]])
    nibabel.save(nibabel.Nifti1Image(volume, tilt @ np.diag([-1, -1, 1, 1])), tmp_path / "tilted.nii.gz")
    nibabel.save(nibabel.Nifti1Image(volume[::-1, :, ::-1].copy(), tilt @ np.diag([1, -1, -1, 1])), tmp_path / "flipped.nii.gz")
    for name in ("tilted", "flipped"):
        np.testing.assert_array_equal(read_image(tmp_path / f"{name}.nii.gz", 1), volume.transpose(1, 0, 2)[None])


def _dicom(path: Path, pixels: np.ndarray, position: int = 0, slope: float = 1, intercept: float = 0) -> None:
    meta = FileMetaDataset()
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    meta.MediaStorageSOPClassUID = CTImageStorage
    meta.MediaStorageSOPInstanceUID = generate_uid()
    file = FileDataset(str(path), {}, file_meta=meta, preamble=b"\0" * 128)
    file.SOPClassUID, file.SOPInstanceUID = CTImageStorage, meta.MediaStorageSOPInstanceUID
    file.SeriesInstanceUID, file.Modality, file.InstanceNumber = "1.2.3", "CT", position + 1
    file.Rows, file.Columns = pixels.shape[:2]
    file.SamplesPerPixel = 3 if pixels.ndim == 3 else 1
    file.PhotometricInterpretation = "RGB" if pixels.ndim == 3 else "MONOCHROME2"
    if pixels.ndim == 3:
        file.PlanarConfiguration = 0
    bits = 8 * pixels.dtype.itemsize
    file.BitsAllocated, file.BitsStored, file.HighBit, file.PixelRepresentation = bits, bits, bits - 1, 0
    file.PixelSpacing, file.ImageOrientationPatient = [1, 1], [1, 0, 0, 0, 1, 0]
    file.ImagePositionPatient = [0, 0, position]
    file.RescaleSlope, file.RescaleIntercept = slope, intercept
    file.PixelData = pixels.tobytes()
    file.save_as(path, enforce_file_format=True)


def test_dicom(tmp_path: Path) -> None:
    _dicom(tmp_path / "g.dcm", GREY.astype(np.uint16) * 100, slope=2, intercept=-1000)
    np.testing.assert_array_equal(read_image(tmp_path / "g.dcm", 1)[0], GREY.astype(np.float32) * 200 - 1000)
    _dicom(tmp_path / "c.dcm", COLOUR)
    np.testing.assert_array_equal(read_image(tmp_path / "c.dcm", 3), COLOUR.transpose(2, 0, 1))
    assert pydicom.dcmread(tmp_path / "c.dcm").SamplesPerPixel == 3


def test_the_window_of_a_viewer_changes_no_intensity(tmp_path: Path) -> None:
    """Slope and intercept say what was measured, a window how one image is to be shown: images stay comparable without it."""
    pixels = GREY.astype(np.uint16) * 100
    _dicom(tmp_path / "w.dcm", pixels, slope=2, intercept=-1000)
    file = pydicom.dcmread(tmp_path / "w.dcm")
    file.WindowCenter, file.WindowWidth = 40, 80
    file.save_as(tmp_path / "w.dcm")
    np.testing.assert_array_equal(read_image(tmp_path / "w.dcm", 1)[0], pixels.astype(np.float32) * 2 - 1000)


@pytest.mark.parametrize(("slope", "intercept"), [(1, 0), (2, -1000)])
def test_monochrome1_is_turned_around(tmp_path: Path, slope: int, intercept: int) -> None:
    """One picture stored both ways is one picture; twelve bits of sixteen are used, as detectors do."""
    stored = GREY.astype(np.uint16) * 100
    for name, kind, pixels in (("usual", "MONOCHROME2", stored), ("inverse", "MONOCHROME1", 4095 - stored)):
        _dicom(tmp_path / f"{name}.dcm", pixels, slope=slope, intercept=intercept)
        file = pydicom.dcmread(tmp_path / f"{name}.dcm")
        file.PhotometricInterpretation, file.BitsStored, file.HighBit = kind, 12, 11
        file.save_as(tmp_path / f"{name}.dcm")
    np.testing.assert_array_equal(read_image(tmp_path / "inverse.dcm", 1), read_image(tmp_path / "usual.dcm", 1))


def test_a_camera_that_was_held_upright(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be shown a quarter turn clockwise
    Image.fromarray(GREY).save(tmp_path / "upright.png", exif=exif)
    np.testing.assert_array_equal(read_image(tmp_path / "upright.png", 1)[0], np.rot90(GREY, -1))


@pytest.mark.parametrize("frames", [3, 5])
def test_frames_of_one_dicom_file_are_slices(tmp_path: Path, frames: int) -> None:
    volume = np.random.default_rng(0).integers(0, 255, (frames, 3, 4)).astype(np.uint8)
    _dicom(tmp_path / "grey.dcm", GREY)
    _dicom(tmp_path / "colour.dcm", COLOUR)
    for name, pixels in {"grey": volume, "colour": np.stack([volume, volume // 2, volume // 3], axis=-1)}.items():
        cine = pydicom.dcmread(tmp_path / f"{name}.dcm")
        cine.NumberOfFrames, cine.PixelData = frames, pixels.tobytes()
        cine.save_as(tmp_path / f"{name}.dcm")
    np.testing.assert_array_equal(read_image(tmp_path / "grey.dcm", 1)[0], volume.transpose(1, 2, 0))
    np.testing.assert_array_equal(read_image(tmp_path / "colour.dcm", 3)[1], volume.transpose(1, 2, 0) // 2)


def test_dicom_segmentations(tmp_path: Path) -> None:
    frames = np.random.default_rng(0).integers(0, 2, (2, 3, 4)).astype(np.uint8)  # slices, rows, columns
    _dicom(tmp_path / "seg.dcm", frames[0])
    seg = pydicom.dcmread(tmp_path / "seg.dcm")
    seg.NumberOfFrames, seg.PixelData = 2, frames.tobytes()
    segment, frame, place = pydicom.Dataset(), pydicom.Dataset(), pydicom.Dataset()
    segment.SegmentNumber, place.ReferencedSegmentNumber = 1, 1
    frame.SegmentIdentificationSequence = [place]
    seg.SegmentSequence, seg.PerFrameFunctionalGroupsSequence = [segment], [frame, frame]
    seg.save_as(tmp_path / "seg.dcm")
    np.testing.assert_array_equal(read_mask(tmp_path / "seg.dcm")[0], frames.transpose(1, 2, 0))


def test_a_dicom_series_in_colour(tmp_path: Path) -> None:
    (tmp_path / "series").mkdir()
    for position in range(2):
        _dicom(tmp_path / f"series/{position}.dcm", COLOUR + np.uint8(position), position=position)
    volume = read_image(tmp_path / "series", 3)
    np.testing.assert_array_equal(volume[..., 1], COLOUR.transpose(2, 0, 1) + 1)


def test_dicom_without_suffix_or_position(tmp_path: Path) -> None:
    _dicom(tmp_path / "IM0001", GREY)
    np.testing.assert_array_equal(read_image(tmp_path / "IM0001", 1)[0], GREY)
    radiograph = pydicom.dcmread(tmp_path / "IM0001")
    del radiograph.ImageOrientationPatient, radiograph.ImagePositionPatient
    radiograph.save_as(tmp_path / "1.2.840.1")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # nothing that a user could act on
        np.testing.assert_array_equal(read_image(tmp_path / "1.2.840.1", 1)[0], GREY)


def test_dicom_series_is_sorted_by_position(tmp_path: Path) -> None:
    (tmp_path / "series").mkdir()
    for name, position in (("b", 0), ("a", 1), ("c", 2)):
        _dicom(tmp_path / f"series/{name}.dcm", GREY.astype(np.uint16) + 100 * position, position=position)
    volume = read_image(tmp_path / "series", 1)
    assert volume.shape == (1, 3, 4, 3)
    for position in range(3):
        np.testing.assert_array_equal(volume[0, :, :, position], GREY + 100.0 * position)


def test_nan_and_infinity(tmp_path: Path) -> None:
    for value in (np.nan, np.inf):
        volume = np.zeros((2, 2, 2), np.float32)
        volume[1, 1, 1] = value
        nibabel.save(nibabel.Nifti1Image(volume, np.eye(4)), tmp_path / "bad.nii.gz")
        with pytest.raises(DataError, match=r"bad.nii.gz: the image holds NaN or infinite values"):
            read_image(tmp_path / "bad.nii.gz", 1)
        with pytest.raises(DataError, match="not whole numbers"):
            read_mask(tmp_path / "bad.nii.gz")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone.png: file not found"):
        read_image(tmp_path / "gone.png", 1)
    for name in ("broken.png", "broken.nii.gz", "broken.dcm", "broken.tif"):
        (tmp_path / name).write_bytes(b"this is not an image")
        with pytest.raises(DataError, match=rf"{name}: cannot be read as an image"):
            read_image(tmp_path / name, 1)
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64), np.uint8)).save(tmp_path / "whole.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "whole.png").read_bytes()[:1500])
    with pytest.raises(DataError, match=r"cut.png: cannot be read"):
        read_image(tmp_path / "cut.png", 1)
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(DataError, match=r"unknown image format '.txt'"):
        read_image(tmp_path / "notes.txt", 1)
    (tmp_path / "empty").mkdir()
    (tmp_path / "above/series").mkdir(parents=True)
    _dicom(tmp_path / "above/0.dcm", GREY)
    (tmp_path / "notes").write_text("hello")
    with pytest.raises(DataError, match=r"unknown image format ''; give it the suffix of its format, one of .png"):
        read_image(tmp_path / "notes", 1)
    for name, words in (("empty", "a folder without DICOM images; name the image's own file"), ("above", "another folder lies among")):
        with pytest.raises(DataError, match=f"{name}: {words}"):
            read_image(tmp_path / name, 1)


def test_a_name_that_only_looks_alike_is_told(tmp_path: Path) -> None:
    """Upper case of a suffix, and an accent that is written as one letter or as two; not by the name, which may be a patient's."""
    for there, listed in (("a.PNG", "a.png"), ("M\u00fcller.png", "Mu\u0308ller.png")):
        Image.fromarray(GREY).save(tmp_path / there)
        with pytest.raises(DataError, match=r"file not found; one is there whose name differs by .* just so$") as told:
            read_image(tmp_path / listed, 1)
        assert there not in str(told.value)


def test_a_file_that_the_account_may_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.fromarray(GREY).save(tmp_path / "a.png")
    (tmp_path / "IM0001").touch()

    def forbidden(*arguments: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Image, "open", forbidden)
    monkeypatch.setattr(Path, "open", forbidden)
    for name in ("a.png", "IM0001"):
        with pytest.raises(DataError, match=f"{name}: may not be read; let the account that runs the site read it"):
            read_image(tmp_path / name, 1)


@pytest.mark.parametrize(("name", "package"), [("a.png", "pillow"), ("a.nii.gz", "nibabel"), ("a.dcm", "pydicom")])
def test_a_decoder_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, package: str) -> None:
    monkeypatch.setattr(packages, "find_spec", lambda module: None)
    (tmp_path / name).write_bytes(b"anything")
    with pytest.raises(DataError, match=rf"{name}: .* needs the package {package}, .* pip install {package}$"):
        read_image(tmp_path / name, 1)


def test_pages_are_refused(tmp_path: Path) -> None:
    page = Image.fromarray(GREY)
    page.save(tmp_path / "pages.tif", save_all=True, append_images=[page])
    with pytest.raises(DataError, match="2 pages"):
        read_image(tmp_path / "pages.tif", 1)


def test_fractional_mask(tmp_path: Path) -> None:
    nibabel.save(nibabel.Nifti1Image(np.full((2, 2, 2), 0.5, np.float32), np.eye(4)), tmp_path / "soft.nii")
    with pytest.raises(DataError, match=r"soft.nii: the mask holds values that are not whole numbers"):
        read_mask(tmp_path / "soft.nii")


def test_channels_that_are_alike_are_one_mask_where_one_is_meant(tmp_path: Path) -> None:
    """Where each channel is a structure's own mask, a patient without any finding has as many as the others."""
    Image.fromarray(np.zeros((3, 4, 3), np.uint8)).save(tmp_path / "none.png")
    nibabel.save(nibabel.Nifti1Image(np.zeros((4, 3, 2, 3), np.uint8), np.eye(4)), tmp_path / "none.nii")
    for name, shape in (("none.png", (3, 4)), ("none.nii", (3, 4, 2))):
        assert read_mask(tmp_path / name).shape == (1, *shape)
        assert read_mask(tmp_path / name, several=True).shape == (3, *shape)
    last = np.zeros((4, 3, 2, 4), np.uint8)
    last[1, 1, 1, 3] = 1
    nibabel.save(nibabel.Nifti1Image(last, np.eye(4)), tmp_path / "last.nii")
    assert read_mask(tmp_path / "last.nii")[3].sum() == 1  # volumes of a file have no transparency that could be dropped


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_a_mask_drawn_in_transparency_alone(tmp_path: Path, mode: str) -> None:
    """As an editor leaves it that paints on a transparent layer: its colours are black everywhere."""
    channels = np.zeros((3, 4, len(mode)), np.uint8)
    channels[..., -1] = GREY
    Image.fromarray(channels, mode).save(tmp_path / "mask.png")
    with pytest.raises(DataError, match=r"mask.png: the mask is drawn in its transparency alone; store label values in one grey mask"):
        read_mask(tmp_path / "mask.png")
    channels[..., :-1] = GREY[..., None]
    Image.fromarray(channels, mode).save(tmp_path / "both.png")
    np.testing.assert_array_equal(read_mask(tmp_path / "both.png"), GREY[None])


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


@pytest.mark.parametrize(("kind", "channels"), [(2, 3), (6, 4), (4, 2)])
def test_channels_of_16_bits_are_cut_to_8_in_photographs_alone(tmp_path: Path, kind: int, channels: int) -> None:
    """Pillow keeps the upper half of each number, and can write none of these."""
    header = struct.pack(">IIBBBBB", 4, 3, 16, kind, 0, 0, 0)
    rows = b"".join(b"\0" + np.repeat(row.astype(">u2") * 257, channels).astype(">u2").tobytes() for row in GREY)
    chunks = _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(rows)) + _chunk(b"IEND", b"")
    (tmp_path / "deep.png").write_bytes(b"\x89PNG\r\n\x1a\n" + chunks)
    refused = r"deep.png: channels of 16 bits, of which Pillow reads 8; store channels of 8 bits, or grey"
    with pytest.raises(DataError, match=refused):
        read_mask(tmp_path / "deep.png")
    if channels == 2:
        with pytest.raises(DataError, match=refused):
            read_image(tmp_path / "deep.png", 3)
    else:
        np.testing.assert_array_equal(read_image(tmp_path / "deep.png", 3)[0], GREY)


@pytest.mark.parametrize("kind", [np.uint8, np.uint16])
def test_a_tiff_picture_whose_lowest_number_is_white(tmp_path: Path, kind: type[np.unsignedinteger]) -> None:
    """As a radiograph that says MONOCHROME1. The numbers of a mask of 16 bits are those of labels and stay."""
    stored = GREY.astype(kind)
    Image.fromarray(stored).save(tmp_path / "white.tif")
    content = bytearray((tmp_path / "white.tif").read_bytes())
    place = content.index(struct.pack("<HHI", 262, 3, 1)) + 8  # the value of PhotometricInterpretation
    content[place : place + 2] = struct.pack("<H", 0)
    (tmp_path / "white.tif").write_bytes(content)
    np.testing.assert_array_equal(read_image(tmp_path / "white.tif", 1)[0], np.iinfo(kind).max - stored.astype(np.float32))
    if kind is np.uint16:
        np.testing.assert_array_equal(read_mask(tmp_path / "white.tif")[0], stored)


def test_a_cameras_preview_is_no_page(tmp_path: Path) -> None:
    picture = Image.fromarray(np.full((8, 6, 3), 77, np.uint8))
    picture.save(tmp_path / "camera.jpg", format="MPO", save_all=True, append_images=[picture.resize((3, 4))], quality=95)
    found = read_image(tmp_path / "camera.jpg", 3)
    assert found.shape == (3, 8, 6) and abs(found - 77).max() <= 2
