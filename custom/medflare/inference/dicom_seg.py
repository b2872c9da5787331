"""Predicted masks of a DICOM series as a DICOM segmentation object (PS3.3, A.51), by highdicom."""

import io
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import medflare
from medflare.core.errors import DataError
from medflare.core.palette import COLOURS
from medflare.data.dicom import frames_of, grid_of, ordered_slices, read
from medflare.data.reading import dicom_files
from medflare.tasks.config import Structure, TaskConfig

# A label without a code is free text, so its code has a private scheme (PS3.3, 8.2).
_SCHEME = "99MEDFLARE"
# The standard allows these to be empty; anonymized files often lack them.
_MAY_BE_EMPTY = (
    "PatientID",
    "PatientName",
    "PatientBirthDate",
    "PatientSex",
    "StudyID",
    "StudyDate",
    "StudyTime",
    "AccessionNumber",
    "ReferringPhysicianName",
)
_NEEDED = (
    "FrameOfReferenceUID",
    "StudyInstanceUID",
    "ImagePositionPatient",
    "ImageOrientationPatient",
    "PixelSpacing",
)


def dicom_seg(series: Path, structures: Mapping[str, np.ndarray], task: TaskConfig) -> bytes:
    """The content of a file with a segment for every structure; equal masks of a series have equal
    identifiers.

    Args:
        series: folder of the series, or the file with all its frames.
        structures: label -> bool (columns, rows, slices), the slices in the order of the series.

    Raises:
        DataError: a file of the series cannot be read, lacks an attribute that the object needs, or
            is not a slice of one volume.
    """
    import highdicom
    from pydicom.sr.codedict import codes
    from pydicom.sr.coding import Code as Coded
    from pydicom.uid import generate_uid

    volume = np.stack(list(structures.values()), axis=-1)
    sources, order = _sources(series, volume.shape[2])
    algorithm = highdicom.AlgorithmIdentificationSequence(
        f"medflare {task.name}"[:64], codes.DCM.ArtificialIntelligence, version=medflare.__version__
    )
    described = []
    for number, label in enumerate(structures, start=1):
        value = label[:16]
        if sum(other[:16] == value for other in structures) > 1:
            value = f"{label[:12]}-{number}"
        code = task.codes.get(label) or Structure(value, label[:64], _SCHEME)
        category = code.category
        colour = code.color or COLOURS[(number - 1) % len(COLOURS)]
        segment = highdicom.seg.SegmentDescription(
            segment_number=number,
            segment_label=label[:64],
            segmented_property_category=Coded(category.value, category.scheme, category.meaning),
            segmented_property_type=Coded(code.value, code.scheme, code.meaning),
            algorithm_type=highdicom.seg.SegmentAlgorithmTypeValues.AUTOMATIC,
            algorithm_identification=algorithm,
            display_color=highdicom.color.CIELabColor.from_string(colour),
        )
        described.append(segment)
    frames = volume.transpose(2, 1, 0, 3)[order]  # frames, rows, columns, segments
    origin = [sources[0].SeriesInstanceUID, task.fingerprint(), volume.tobytes().hex()]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # empty masks, missing attributes
            segmentation = highdicom.seg.Segmentation(
                source_images=sources,
                pixel_array=frames.astype(np.uint8),
                segmentation_type=highdicom.seg.SegmentationTypeValues.BINARY,
                segment_descriptions=described,
                series_instance_uid=generate_uid(entropy_srcs=["series", *origin]),
                series_number=1,
                sop_instance_uid=generate_uid(entropy_srcs=["instance", *origin]),
                instance_number=1,
                series_description=f"medflare {task.name[:42]} segmentation",
                content_label="SEGMENTATION",
                content_description=f"Predicted: {', '.join(structures)}"[:64],
                manufacturer="medflare",
                manufacturer_model_name=task.name[:64],
                software_versions=medflare.__version__,
                device_serial_number="0",
                specific_character_set="ISO_IR 192",  # UTF-8, for labels of any script
            )
    except (ValueError, TypeError, AttributeError) as error:  # highdicom does not accept a header
        raise unwritable(series, str(error)) from error
    content = io.BytesIO()
    segmentation.save_as(content)
    return content.getvalue()


def unwritable(image: Path, why: str) -> DataError:
    """The error for an image that cannot have a segmentation object."""
    return DataError(
        f"{image}: cannot have a DICOM segmentation ({why.rstrip('.')}); "
        "predict it without --dicom-seg"
    )


def _sources(series: Path, count: int) -> tuple[list[Any], np.ndarray]:
    """The headers of the files, and for every slice (frame of a single file) its volume index."""
    headers = [read(file, stop_before_pixels=True) for file in dicom_files(series)]
    for header in headers:
        for part in frames_of(header) or [header]:
            for keyword in _NEEDED:
                if not (part.get(keyword) or header.get(keyword)):
                    raise unwritable(series, f"{Path(header.filename).name} has no {keyword}")
        for keyword in _MAY_BE_EMPTY:
            if keyword not in header:
                setattr(header, keyword, "")
    slices = ordered_slices(headers, series)
    if len(slices) != count or not grid_of(slices).has_affine:
        raise DataError(
            f"{series}: is no volume of {count} slices; "
            "use a folder with one series of evenly spaced slices"
        )
    if len(headers) > 1:
        return slices, np.arange(count)
    return headers, np.argsort([part.get("InstanceNumber", 0) for part in slices])
