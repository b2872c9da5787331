"""Small sites of NIfTI volumes on disk, and a task to read them with."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pydicom
from pydicom import Dataset, Sequence
from pydicom.dataset import FileDataset, FileMetaDataset
from pydicom.uid import (
    UID,
    BasicTextSRStorage,
    CTImageStorage,
    EnhancedMRImageStorage,
    ExplicitVRLittleEndian,
    GrayscaleSoftcopyPresentationStateStorage,
    MediaStorageDirectoryStorage,
    generate_uid,
)

from helpers import small_tasks
from medflare.tasks.config import TaskConfig, load_task

SHAPE = (12, 14, 10)
SPACING = (2.0, 1.0, 3.0)
NAMES = ("pre", "flair")
PATIENTS = {"training": 3, "validation": 2, "test": 2}
TASK: dict[str, Any] = {
    **small_tasks.SEGMENTATION,
    "name": "cubes",
    "labels": ["cube"],
    "spatial_dims": 3,
    "channels": list(NAMES),
    "size": [8, 8, 8],
    "network": {"name": "unet", "channels": [2, 4], "norm": "batch"},
    "batch_size": 2,
    "intensity": {"name": "ScaleIntensity"},
}
PATCHES: dict[str, Any] = {**TASK, "image_mode": "patch", "patches_per_image": 2}


def cube_task(**changes: Any) -> TaskConfig:
    """Whole volumes of two channels, resized, with some settings changed."""
    return load_task({**TASK, **changes})


def affine(codes: str = "RAS", spacing: tuple[float, ...] = SPACING) -> np.ndarray:
    """Of voxel axes that run along the patient's axes as the three letters say."""
    matrix = np.zeros((4, 4))
    for axis, letter in enumerate(codes):
        row = next(row for row, pair in enumerate(("RL", "AP", "SI")) if letter in pair)
        matrix[row, axis] = spacing[axis] * (1 if letter in "RAS" else -1)
    matrix[:, 3] = (-5, 7, 11, 1)
    return matrix


def write(path: Path, volume: np.ndarray, matrix: np.ndarray | None = None) -> Path:
    """A NIfTI file."""
    nibabel.save(nibabel.Nifti1Image(volume, affine() if matrix is None else matrix), path)
    return path


def make_sites(folder: Path, names: Iterable[str]) -> Path:
    """A folder of sites, each with volumes as `make_volumes` draws them."""
    for name in names:
        make_volumes(folder / name)
    return folder


def make_volumes(
    folder: Path, shape: tuple[int, int, int] = SHAPE, patients: dict[str, int] | None = None
) -> Path:
    """A site's folder: noise with a bright cube in both channels, one patient a volume; sizes differ by a slice."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(len(folder.name))
    listed: dict[str, list[dict[str, Any]]] = {}
    number = 0
    for split, count in (patients or PATIENTS).items():
        listed[split] = []
        for _ in range(count):
            size = (*shape[:2], shape[2] + number % 2)
            mask = np.zeros(size, np.uint8)
            corner = random.integers(1, 5, 3)
            mask[tuple(slice(start, start + 5) for start in corner)] = 1
            files = []
            for name in NAMES:
                volume = random.uniform(0, 30, size).astype(np.float32) + 100 * mask
                files.append(write(folder / f"p{number}_{name}.nii.gz", volume).name)
            write(folder / f"p{number}_mask.nii.gz", mask)
            listed[split].append(
                {"image": files, "label": f"p{number}_mask.nii.gz", "patient": f"p{number}"}
            )
            number += 1
    (folder / "datalist.json").write_text(json.dumps(listed))
    return folder


def _dicom(path: Path, kind: UID, series: str = "1.2.3") -> FileDataset:
    """A DICOM object of a series, to be filled and written."""
    meta = FileMetaDataset()
    meta.TransferSyntaxUID, meta.MediaStorageSOPClassUID = ExplicitVRLittleEndian, kind
    meta.MediaStorageSOPInstanceUID = generate_uid()
    file = FileDataset(str(path), {}, file_meta=meta, preamble=b"\0" * 128)
    file.SOPClassUID, file.SOPInstanceUID, file.SeriesInstanceUID = (
        kind,
        meta.MediaStorageSOPInstanceUID,
        series,
    )
    return file


def _dicom_image(
    path: Path, kind: UID, modality: str, pixels: np.ndarray, series: str = "1.2.3"
) -> FileDataset:
    """The same with unsigned pixels (..., rows, columns)."""
    file = _dicom(path, kind, series)
    bits = 8 * pixels.dtype.itemsize
    (
        file.StudyInstanceUID,
        file.Modality,
        file.PatientID,
        file.PatientName,
        file.FrameOfReferenceUID,
    ) = "1.2", modality, "p", "p", "1.2.4"
    file.SamplesPerPixel = 1
    file.PhotometricInterpretation = "MONOCHROME2"
    file.Rows, file.Columns = pixels.shape[-2:]
    file.BitsAllocated, file.BitsStored, file.HighBit, file.PixelRepresentation = (
        bits,
        bits,
        bits - 1,
        0,
    )
    file.PixelData = pixels.tobytes()
    return file


def _numbered(*slices: int) -> np.ndarray:
    """Slices of 6 rows and 5 columns whose values tell column, row and slice."""
    rows, columns = np.mgrid[:6, :5]
    return np.stack([columns + 10 * rows + 100 * place for place in slices]).astype(np.uint16)


def tagged(dataset: Dataset, **tags: Any) -> Dataset:
    for tag, value in tags.items():
        setattr(dataset, tag, value)
    return dataset


def change(
    folder: Path, numbers: Iterable[int] = range(4), without: tuple[str, ...] = (), **tags: Any
) -> Path:
    """Some slices of a series with other tags, or without some."""
    for number in numbers:
        dataset = pydicom.dcmread(folder / f"{number}.dcm")
        for tag in without:
            del dataset[tag]
        tagged(dataset, **tags).save_as(folder / f"{number}.dcm")
    return folder


def dicom_slice(
    path: Path, pixels: np.ndarray, number: int | None = None, series: str = "1.2.3"
) -> None:
    """One CT slice, with a place in its series if it has a number; spacings differ, so that an exchange of axes shows."""
    file = _dicom_image(path, CTImageStorage, "CT", pixels, series)
    if number is not None:
        file.InstanceNumber, file.PixelSpacing = number + 1, [2, 0.5]
        file.ImageOrientationPatient, file.ImagePositionPatient = (
            [1, 0, 0, 0, 1, 0],
            [10, 20, 30 + 4 * number],
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    pydicom.dcmwrite(path, file)


def dicom_series(folder: Path, slices: int = 4) -> Path:
    """Axial CT slices of 6 rows and 5 columns, 2 mm thick; pixel values tell column, row and slice."""
    folder.mkdir()
    for number in range(slices):
        file = _dicom_image(folder / f"{number}.dcm", CTImageStorage, "CT", _numbered(number))
        file.InstanceNumber, file.PixelSpacing, file.SliceThickness = number + 1, [0.5, 0.25], 2
        file.ImageOrientationPatient, file.ImagePositionPatient = (
            [1, 0, 0, 0, 1, 0],
            [10, 20, 30 + 2 * number],
        )
        pydicom.dcmwrite(folder / f"{number}.dcm", file)
    return folder


def enhanced_series(
    path: Path, order: tuple[int, ...] = (2, 0, 3, 1), heights: tuple[float, ...] = (30, 32, 34, 36)
) -> Path:
    """The volume of `dicom_series` as one Enhanced MR file (PS3.3, A.36); the slice of each frame, and the slices' heights in mm."""

    def group(**tags: Any) -> Sequence:
        return Sequence([tagged(Dataset(), **tags)])

    file = _dicom_image(path, EnhancedMRImageStorage, "MR", _numbered(*order))
    file.InstanceNumber, file.NumberOfFrames = 1, len(order)
    file.SharedFunctionalGroupsSequence = group(
        PixelMeasuresSequence=group(PixelSpacing=[0.5, 0.25], SliceThickness=2),
        PlaneOrientationSequence=group(ImageOrientationPatient=[1, 0, 0, 0, 1, 0]),
    )
    places = [
        group(PlanePositionSequence=group(ImagePositionPatient=[10, 20, heights[number]]))
        for number in order
    ]
    file.PerFrameFunctionalGroupsSequence = Sequence([place[0] for place in places])
    path.parent.mkdir(parents=True, exist_ok=True)
    pydicom.dcmwrite(path, file)
    return path


def beside_a_series(folder: Path) -> Path:
    """What an archive exports with a series: a directory, a presentation state, a report, a vendor's own, and a leaflet."""
    kinds = {
        "DICOMDIR": MediaStorageDirectoryStorage,
        "PR1.dcm": GrayscaleSoftcopyPresentationStateStorage,
        "SR": BasicTextSRStorage,
    }
    kinds["CSA"] = UID("1.3.12.2.1107.5.9.1")  # "Non-Image" of Siemens
    for number, (name, kind) in enumerate(kinds.items()):
        pydicom.dcmwrite(folder / name, _dicom(folder / name, kind, f"1.2.5.{number}"))
    (folder / "README.TXT").write_text("insert the disc")
    return folder
