"""Predicted masks of a DICOM series as a DICOM segmentation object (PS3.3, A.51), by highdicom: what viewers and archives take."""

import io
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import medflare
from medflare.core.errors import DataError
from medflare.core.packages import require
from medflare.data.reading import dicom_files
from medflare.tasks.config import TaskConfig

_SCHEME = "99MEDFLARE"  # labels are the task's own words, so their codes stand in a scheme of their own (PS3.3, 8.2)
# Patient and study of the object are those of the series. What the standard allows to be empty, anonymised files leave out.
_MAY_BE_EMPTY = (
    *("PatientID", "PatientName", "PatientBirthDate", "PatientSex", "StudyID", "StudyDate", "StudyTime"),
    *("AccessionNumber", "ReferringPhysicianName"),
)
# Without these nobody can say where the masks lie and whose they are.
_NEEDED = ("FrameOfReferenceUID", "StudyInstanceUID", "ImagePositionPatient", "ImageOrientationPatient", "PixelSpacing")
_ALIGNED = 0.1  # slices between where a file says that it lies and where its slice of the volume does


def check_writable() -> None:
    """Refuse where highdicom is not installed.

    Raises:
        ConfigError: it is not.
    """
    require("highdicom", "DICOM-SEG (the extra medflare[dicomseg])")


def dicom_seg(series: Path, structures: Mapping[str, np.ndarray], affine: np.ndarray, task: TaskConfig) -> bytes:
    """One object with a segment for every structure, in the frame of reference, study and patient of the series.

    Args:
        series: folder with the files of the series.
        structures: label -> bool (columns, rows, slices).
        affine: (4, 4), voxel numbers of these arrays to millimetres in RAS.

    Returns:
        The content of the file; equal masks of a series give equal identifiers.

    Raises:
        DataError: a file of the series cannot be read, lacks what the object needs, or is none of the volume's slices.
    """
    import highdicom
    from pydicom.sr.codedict import codes
    from pydicom.sr.coding import Code

    volume = np.stack(list(structures.values()), axis=-1)
    slices = _slices(series, affine, volume.shape[2])
    algorithm = highdicom.AlgorithmIdentificationSequence(
        name=f"medflare {task.name}"[:64], version=medflare.__version__, family=codes.DCM.ArtificialIntelligence
    )
    described = [
        highdicom.seg.SegmentDescription(
            segment_number=number,
            segment_label=label[:64],
            segmented_property_category=codes.SCT.AnatomicalStructure,
            segmented_property_type=Code(label[:16], _SCHEME, label[:64]),
            algorithm_type=highdicom.seg.SegmentAlgorithmTypeValues.AUTOMATIC,
            algorithm_identification=algorithm,
        )
        for number, label in enumerate(structures, start=1)
    ]
    origin = [slices[0].SeriesInstanceUID, task.fingerprint(), volume.tobytes().hex()]
    try:
        found = _segmentation(slices, volume, described, origin, task)
    except (ValueError, TypeError, AttributeError) as error:  # a header that highdicom refuses, in its words
        raise unwritable(series, str(error)) from error
    content = io.BytesIO()
    found.save_as(content)
    return content.getvalue()


def _segmentation(slices: list[Any], volume: np.ndarray, described: list[Any], origin: list[str], task: TaskConfig) -> Any:
    """The object, of masks (columns, rows, slices, segments)."""
    import highdicom
    from pydicom.uid import generate_uid

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of masks without a voxel, and of what sources lack
        return highdicom.seg.Segmentation(
            source_images=slices,
            pixel_array=volume.transpose(2, 1, 0, 3).astype(np.uint8),  # frames, rows, columns, segments
            segmentation_type=highdicom.seg.SegmentationTypeValues.BINARY,
            segment_descriptions=described,
            series_instance_uid=generate_uid(entropy_srcs=["series", *origin]),
            series_number=1,
            sop_instance_uid=generate_uid(entropy_srcs=["instance", *origin]),
            instance_number=1,
            manufacturer="medflare",
            manufacturer_model_name=task.name[:64],
            software_versions=medflare.__version__,
            device_serial_number="0",
        )


def unwritable(image: Path, why: str) -> DataError:
    """Why masks of this image cannot become such an object, and what to do.

    Args:
        image: a folder with a series, or a file.
    """
    return DataError(f"{image}: cannot have a DICOM segmentation ({why.rstrip('.')}); predict it without --dicom-seg")


def _slices(series: Path, affine: np.ndarray, count: int) -> list[Any]:
    """The files in the order of the volume's slices, without their pixels."""
    from pydicom import dcmread

    placed: dict[int, Any] = {}
    to_index = np.linalg.inv(affine)
    for file in dicom_files(series):
        header = dcmread(file, stop_before_pixels=True)
        for keyword in _NEEDED:
            if not header.get(keyword):
                raise unwritable(series, f"{file.name} has no {keyword}")
        left, posterior, superior = map(float, header.ImagePositionPatient)
        place = float((to_index @ [-left, -posterior, superior, 1])[2])
        if abs(place - round(place)) > _ALIGNED or not 0 <= round(place) < count:
            raise DataError(f"{file}: is none of the volume's {count} slices; give a folder with one series of evenly spaced slices")
        for keyword in _MAY_BE_EMPTY:
            if keyword not in header:
                setattr(header, keyword, "")
        placed[round(place)] = header
    if len(placed) != count:
        raise DataError(f"{series}: {len(placed)} files for {count} slices; give a folder with one series of evenly spaced slices")
    return [placed[place] for place in range(count)]
