"""Which kind of image a file is, by its name and, where that says nothing, by its content; and errors that name the file."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Final
from unicodedata import normalize

from medflare.core.errors import DataError, one_line
from medflare.core.packages import installed

PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff")
NIFTI = (".nii", ".nii.gz")
DICOM = (".dcm", ".dicom", ".ima")
_DIRECTORY: Final = "DICOMDIR"  # of a medium; the standard fixes the name (PS3.10, Sec. 8.6)
_STANDARD: Final = "1.2.840.10008."  # what DICOM's own identifiers begin with
_OBJECTS: Final = f"{_STANDARD}5.1.4.1.1."  # its classes of stored objects (PS3.4, Sec. B.5)
_WITHOUT_PIXELS: Final = (  # what archives lay beside a series, and what no volume can be made of
    *(f"{_STANDARD}1.3.10", f"{_OBJECTS}67", f"{_OBJECTS}4.2"),  # directory (DICOMDIR), real-world values, spectroscopy
    *(f"{_OBJECTS}66", *(f"{_OBJECTS}66.{number}" for number in (1, 2, 3, 5, 6))),  # raw data, registrations, fiducials, surfaces, tracts
    *(f"{_OBJECTS}481.{number}" for number in range(3, 10)),  # structures, plans and records of radiotherapy
)
_NOR_THESE: Final = tuple(f"{_OBJECTS}{number}." for number in (9, 11, 88, 104))  # waveforms, presentation states, reports, documents


def suffix(path: PurePath) -> str:
    """A file's suffix in lower case, ".nii.gz" as a whole."""
    return ".nii.gz" if path.name.lower().endswith(".nii.gz") else path.suffix.lower()


def stem(path: PurePath) -> str:
    """A file's name without its suffix, ".nii.gz" as a whole; one that is no image's stays, as the end of a DICOM file's number does.

    Args:
        path: of the file.

    Examples:
        >>> stem(Path("a/scan.1.NII.gz")), stem(Path("1.2.840.10008")), stem(Path(".png"))
        ('scan.1', '1.2.840.10008', '.png')
    """
    return path.name[: len(path.name) - len(suffix(path))] if suffix(path) in (*PICTURES, *NIFTI, *DICOM) else path.name


def is_dicom(path: Path) -> bool:
    """Whether a file is DICOM: by its suffix, and where that says nothing, by its content."""
    return suffix(path) in DICOM or (suffix(path) not in (*PICTURES, *NIFTI) and path.is_file() and _holds_dicom(path))


def dicom_files(path: Path) -> list[Path]:
    """The DICOM images of a folder, by name; or the file itself."""
    return sorted(dicom_images(path.iterdir())) if path.is_dir() else [path]


def dicom_images(files: Iterable[Path]) -> Iterator[Path]:
    """Those that are DICOM, but for directories, reports, presentation states and whatever else holds no pixels by its class.

    Args:
        files: each is opened only when it is asked for.
    """
    return (file for file in files if file.name != _DIRECTORY and file.is_file() and is_dicom(file) and _has_pixels(file))


def _holds_dicom(path: Path) -> bool:
    """Whether the four letters of DICOM files (PS3.10, Sec. 7.1) follow the preamble."""
    with path.open("rb") as file:
        return file.read(132)[128:] == b"DICM"


def _has_pixels(path: Path) -> bool:
    """Not where the file says that it is something else: one that lost its pixels counts, lest a volume without it pass for a whole one."""
    if not installed("pydicom"):
        return True
    from pydicom import dcmread
    from pydicom.filereader import read_file_meta_info

    try:
        kind = str(read_file_meta_info(path).get("MediaStorageSOPClassUID", ""))
        if kind and not kind.startswith(_STANDARD):  # a vendor's own, of which only the header tells whether it is an image
            return "Rows" in dcmread(path, stop_before_pixels=True, specific_tags=["Rows"])
    except Exception:  # whatever is wrong with the file, its reader will say it
        return True
    return kind not in _WITHOUT_PIXELS and not kind.startswith(_NOR_THESE)


def kind_of(path: Path) -> str:
    """ "folder" with a DICOM series, ".dcm" for every DICOM file, or the suffix.

    Raises:
        DataError: there is no such file, it may not be read, or a folder holds no series.
    """
    with explained(path):
        if not path.exists():
            raise DataError(f"{path}: file not found; {_instead(path)}")
        if not path.is_dir():
            return ".dcm" if is_dicom(path) else suffix(path)
        if not any(dicom_images(path.iterdir())):
            raise DataError(f"{path}: a folder without DICOM images; name the image's own file, or the folder of one series")
        if any(file.is_dir() for file in path.iterdir()):
            raise DataError(f"{path}: another folder lies among the slices; give every series a folder of its own")
    return "folder"


def _instead(path: Path) -> str:
    """What to do about a file that is not there: names differ by upper case, and by how they write accents, and look alike."""

    def alike(name: str) -> str:
        return normalize("NFC", name).casefold()

    there = path.parent.iterdir() if path.parent.is_dir() else ()
    if any(alike(file.name) == alike(path.name) for file in there):  # unnamed: no code would stand for it where names leave as codes
        return "one is there whose name differs by upper case or by how an accent is written; write it in the datalist just so"
    return "correct the path or restore the file"


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Whatever goes wrong while a file is read, as one line that names it. A pipe or a device, which may never end, is not opened.

    Raises:
        DataError: something did, or it is neither a file nor a folder.
    """
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise DataError(f"{path}: is neither a regular file nor a folder (a pipe, a socket or a device); replace it or leave it out")
        yield
    except DataError:
        raise
    except PermissionError as error:
        raise DataError(f"{path}: may not be read; let the account that runs the site read it, and the folders above it") from error
    except Exception as error:  # the decoders of five libraries raise whatever they like on a damaged file
        raise DataError(f"{path}: cannot be read as an image ({one_line(error)}); replace the file or leave it out") from error


def unknown_format(path: Path, kind: str) -> DataError:
    """What to raise of a file that no reader is for.

    Args:
        path: of the file.
        kind: its suffix.
    """
    formats = ", ".join((*PICTURES, *NIFTI, *DICOM))
    remedy = "convert it to one of" if kind else "give it the suffix of its format, one of"
    return DataError(f"{path}: unknown image format {kind!r}; {remedy} {formats} or a folder with a DICOM series")
