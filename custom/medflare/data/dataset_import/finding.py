"""What lies in a folder of images as somebody downloaded it: pictures and volumes, a DICOM series as one, tables; and what names say."""

import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from medflare.core.errors import DataError
from medflare.core.packages import require
from medflare.data.datalist import FILE, patient_id
from medflare.data.dataset_import.cutting import Window
from medflare.data.reading import NIFTI, PICTURES, dicom_images, explained, stem, suffix

_TABLES: Final = (".csv", ".tsv")
_JUNK: Final = ("__MACOSX", "Thumbs.db")  # what archives carry along


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
        """A file as the folder's user knows it."""
        return named(path, self.root)


def named(path: Path, root: Path) -> str:
    """A file as the user of a folder knows it."""
    return path.relative_to(root).as_posix()


def holdings(root: Path) -> Holdings:
    """Everything below a folder, but for hidden files and for folders that have a datalist.json already.

    Raises:
        DataError: no folder, no image in it, a damaged DICOM file, or a folder with several DICOM series.
    """
    if not root.is_dir():
        raise DataError(f"{root}: not a folder; give the folder of the images, unpacked")
    images: list[Path] = []
    tables: list[Path] = []
    patients: dict[Path, str] = {}
    for folder, files in _folders(root):
        slices = list(dicom_images(files))
        pictures = [file for file in files if suffix(file) in (*PICTURES, *NIFTI)]
        listed = [file for file in files if suffix(file) in _TABLES]
        images += pictures
        tables += listed
        if slices:
            found = _dicom(folder, slices, alone=not pictures and not listed and folder != root)
            images += found
            patients |= {image: patient for image, patient in found.items() if patient}
    if not images:
        raise DataError(f"{root}: holds no image ({', '.join((*PICTURES, *NIFTI, '.dcm'))}); give the folder of the images")
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


# -- what names say --------------------------------------------------------------------------------------------------------

_MASK: Final = frozenset(
    (
        *("mask", "masks", "label", "labels", "seg", "segs", "segmentation", "segmentations", "gt", "groundtruth", "truth"),
        *("annotation", "annotations"),
    )
)
_IMAGE: Final = frozenset(("image", "images", "img", "imgs", "picture", "pictures", "photo", "photos", "scan", "scans", "input", "inputs"))
_SPLITS: Final = {
    **dict.fromkeys(("train", "training", "tr"), "training"),
    **dict.fromkeys(("val", "valid", "validation"), "validation"),
    **dict.fromkeys(("test", "testing", "ts"), "test"),
}
_SHORT: Final = frozenset(("tr", "ts"))
_FILLING: Final = frozenset(("set", "data", "folder", "split", *_IMAGE))
_WORD: Final = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")
_MASK_WORDS: Final = "|".join(sorted(_MASK, key=len, reverse=True))
_MASK_NAME: Final = re.compile(rf"^(?:{_MASK_WORDS})[ _.-]+(?P<after>.+)$|^(?P<before>.+?)[ _.-]+(?:{_MASK_WORDS})$", re.IGNORECASE)
_IMAGE_NAME: Final = re.compile(r"^(?:image|img)[ _.-]+(?P<after>.+)$|^(?P<before>.+?)[ _.-]+(?:image|img)$", re.IGNORECASE)
_CHANNEL: Final = re.compile(r"^(.+)_(\d{4}|[a-z][a-z0-9]*)$")


class FileName(NamedTuple):
    """What the place and name of a file say.

    Attributes:
        key: what an image and its mask have in common: the split, then folders and name without the words for either.
        mask: whether it is a mask.
        split: that a folder names, or "".
    """

    key: tuple[str, ...]
    mask: bool
    split: str

    @property
    def channel(self) -> tuple[tuple[str, ...], str] | None:
        """The key without the suffix of a channel (`_0001` as nnU-Net has it, or `_flair`), and the channel; None without such a suffix."""
        match = _CHANNEL.match(self.key[-1])
        return ((*self.key[:-1], match[1]), match[2]) if match else None


def words(name: str) -> list[str]:
    """The words of a name in lower case.

    Examples:
        >>> words("imagesTr"), words("ISIC2018_Task1_Training_GroundTruth")
        (['images', 'tr'], ['isic', '2018', 'task', '1', 'training', 'ground', 'truth'])
    """
    return [word.lower() for word in _WORD.findall(name)]


def split_named(text: str) -> str:
    """The split that a word means, or "".

    Examples:
        >>> split_named("Train"), split_named("val"), split_named("3")
        ('training', 'validation', '')
    """
    return _SPLITS.get(text.strip().lower(), "")


def split_folder(name: str) -> str:
    """The split that a folder is named after, or "" where its name says more than that.

    Examples:
        >>> split_folder("train"), split_folder("Test Set"), split_folder("test positive"), split_folder("TR")
        ('training', 'test', '', '')
    """
    said = words(name)
    found = {_SPLITS[word] for word in said if word in _SPLITS}
    known = all(word in _SPLITS or word in _FILLING for word in said) and not _SHORT & set(said)  # "TR" is rather a class
    return found.pop() if len(found) == 1 and known else ""


def read_name(path: Path) -> FileName:
    """What the place and name of an image say.

    Examples:
        >>> read_name(Path("imagesTr/a_0001.nii.gz")).channel, read_name(Path("labelsTr/a.nii.gz")).key
        ((('training', '', 'a'), '0001'), ('training', '', 'a'))
        >>> read_name(Path("IMG_01_mask.png")), read_name(Path("IMG_01.png")).key
        (FileName(key=('', '01'), mask=True, split=''), ('', '01'))
    """
    mask, split, key = False, "", []
    for folder in path.parent.parts:
        said = words(folder)
        mask = mask or bool(_MASK & set(said))
        split = next((_SPLITS[word] for place, word in enumerate(said) if word in _SPLITS and _speaks(said, place)), split)
        key.append(" ".join(word for word in said if word not in _MASK | _IMAGE | {"ground"} and word not in _SPLITS))
    name = stem(path)
    named_mask = _MASK_NAME.match(name)
    core = _without(named_mask, name)
    return FileName((split, *key, _without(_IMAGE_NAME.match(core), core).lower()), mask or named_mask is not None, split)


def _speaks(said: list[str], place: int) -> bool:
    """Whether a word may name a split: "Tr" and "Ts" behind "images" or "labels" alone, not those of BraTS."""
    return said[place] not in _SHORT or (place > 0 and said[place - 1] in _MASK | _IMAGE)


def _without(match: "re.Match[str] | None", name: str) -> str:
    return name if match is None else match["after"] or match["before"]
