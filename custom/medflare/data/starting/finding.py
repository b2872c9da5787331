"""What lies in a folder of images as somebody downloaded it: pictures and volumes, a DICOM series as one, and tables beside them."""

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from medflare.core.errors import DataError
from medflare.core.packages import require
from medflare.data.datalist import FILE, patient_id
from medflare.data.reading import NIFTI, PICTURES, dicom_images, explained, suffix
from medflare.data.starting.cutting import Window

_TABLES = (".csv", ".tsv")
_ARCHIVES = (".zip", ".gz", ".tgz", ".tar", ".7z", ".rar")
_JUNK = ("__MACOSX", "Thumbs.db")  # what archives carry along


@dataclass(frozen=True)
class Item:
    """One image with all that is known of it.

    Attributes:
        files: of the image, one a channel, None for a channel that it lacks; a single one holds all.
        label: an index or a list of zeros and ones (classification), a mask file or a list of them (segmentation).
        patient: whose it is; "" where nobody knows.
        split: "training", "validation", "test", or "" where the folder does not say.
        site: where it is from; "" where nobody says.
        window: of which picture its one file will be cut, where that is not there yet.
    """

    files: tuple[Path | None, ...]
    label: Any
    patient: str = ""
    split: str = ""
    site: str = ""
    window: Window | None = None

    @property
    def first(self) -> Path:
        """Its first file."""
        return next(file for file in self.files if file is not None)

    @property
    def masks(self) -> list[Path]:
        """Its mask files; none where it is classified."""
        listed = self.label if isinstance(self.label, list) else [self.label]
        return [mask for mask in listed if isinstance(mask, Path)]

    @property
    def stratum(self) -> str:
        """What splits should have alike: the class; of several findings the first that is positive. "" where it is segmented."""
        if self.masks:
            return ""
        return str(self.label.index(1) if 1 in self.label else -1) if isinstance(self.label, list) else str(self.label)


@dataclass(frozen=True)
class Holdings:
    """What a folder holds.

    Attributes:
        root: the folder.
        images: image files, and folders of one DICOM series, sorted.
        tables: CSV and TSV files, sorted.
        patients: DICOM image -> the PatientID of its header, where that has one.
    """

    root: Path
    images: tuple[Path, ...]
    tables: tuple[Path, ...]
    patients: dict[Path, str] = field(default_factory=dict)

    def named(self, path: Path) -> str:
        """A file as the folder's user knows it, see the function `named`.

        Args:
            path: below the folder.
        """
        return named(path, self.root)


def named(path: Path, root: Path) -> str:
    """A file as the user of a folder knows it.

    Args:
        path: below the folder.
        root: the folder.
    """
    return path.relative_to(root).as_posix()


def holdings(root: Path) -> Holdings:
    """Everything below a folder, but for hidden files and for folders that have a datalist.json already.

    Args:
        root: the folder.

    Raises:
        DataError: no folder, no image in it, a damaged DICOM file, or a folder with several DICOM series.
    """
    if not root.is_dir():
        remedy = "unpack it and name the folder" if root.suffix.lower() in _ARCHIVES else "give the folder of the images"
        raise DataError(f"{root}: not a folder; {remedy}")
    images: list[Path] = []
    tables: list[Path] = []
    patients: dict[Path, str] = {}
    for folder, files in _folders(root):
        slices = list(dicom_images(files))
        pictures = [file for file in files if suffix(file) in (*PICTURES, *NIFTI)]
        images += pictures
        tables += [file for file in files if suffix(file) in _TABLES]
        if slices:
            beside = [file for file in files if suffix(file) in (*PICTURES, *NIFTI, *_TABLES)]
            found = _dicom(folder, slices, alone=not beside and folder != root)
            images += found
            patients |= {image: patient for image, patient in found.items() if patient}
    if not images:
        formats = ", ".join((*PICTURES, *NIFTI, ".dcm"))
        raise DataError(f"{root}: holds no image ({formats}); give the folder of the images")
    return Holdings(root, tuple(sorted(images)), tuple(sorted(tables)), patients)


def _folders(root: Path) -> Iterator[tuple[Path, list[Path]]]:
    """Every folder with its files."""
    for place, inner, names in os.walk(root):
        folder = Path(place)
        inner[:] = sorted(name for name in inner if _shown(name) and not (folder / name / FILE).is_file())
        yield folder, [folder / name for name in sorted(names) if _shown(name)]


def _shown(name: str) -> bool:
    return not name.startswith(".") and name not in _JUNK


def _dicom(folder: Path, files: list[Path], alone: bool) -> dict[Path, str]:
    """The images that the DICOM files of a folder make, each with its patient: the folder where they are one series."""
    require("pydicom", f"{folder}: a DICOM image", DataError)
    import pydicom

    series: dict[Path, str] = {}
    patients: dict[Path, str] = {}
    for file in files:
        with explained(file):
            header = pydicom.dcmread(file, stop_before_pixels=True, specific_tags=["SeriesInstanceUID", "PatientID"])
        series[file], patients[file] = str(header.get("SeriesInstanceUID", file)), patient_id(str(header.get("PatientID", "") or ""))
    if len(set(series.values())) == len(files):
        return patients
    if len(set(series.values())) == 1 and alone:
        return {folder: patients[files[0]]}
    several, count = Counter(series.values()).most_common(1)[0]
    first = next(file for file in files if series[file] == several)
    raise DataError(f"{folder}: {first.name} is one of {count} slices of a series that lie with other files; give each series a folder")
