"""What names of files, folders and classes say: of masks, splits, sites and numbers."""

import math
import re
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from medflare.core.errors import DataError
from medflare.core.text import read_json
from medflare.data.reading import stem
from medflare.data.targets import plain_name

# Words in the names of files and folders, of which `other` ones say nothing of an image; column ->
# names that it usually has, the most likely first. In dermoscopy the images of one lesion stay
# together where there is no patient.
WORDS: dict[str, Any] = read_json(Path(__file__).with_name("words.json"))
_MASK = frozenset(WORDS["mask"])
MASK_WORDS = _MASK | {"ground"}
IMAGE_WORDS = frozenset(WORDS["image"])
SPLIT_OF_WORD: dict[str, str] = WORDS["split"]
SPLIT_WORDS = frozenset((*SPLIT_OF_WORD, "split", "splits"))
_LISTED = 4  # names in a message
_IGNORED_WORDS = IMAGE_WORDS | MASK_WORDS.union(WORDS["other"])
_NO_NAMES = _IGNORED_WORDS | SPLIT_OF_WORD.keys()
_LOWER = r"[^\W\d_A-Z]"  # a letter, but A to Z
_WORD = re.compile(rf"[A-Z]?{_LOWER}+|[A-Z]+(?!{_LOWER})|\d+")
PATIENT = re.compile(r"\d\d|[^\W\d_]\d")  # in the name of a patient's folder
_ENTITY = re.compile(r"_(seg|label|desc|space|res)-[^_]+")  # of BIDS; two are of masks
# A folder called so, also behind images or labels, as of nnU-Net; Va of AMOS.
_SHORT_SPLITS = {"Tr": "train", "Ts": "test", "Va": "val"}


class FileName(NamedTuple):
    """The parts of an image's path."""

    # Its folders without the words for images, masks and splits; an image and its mask have them
    # in common.
    folders: tuple[str, ...]
    name: str  # its name in lower case without suffix and without the words for images and masks
    mask: bool  # whether it is a mask
    split: str  # the split that a folder names, or ""

    @property
    def names(self) -> tuple[str, str]:
        """The name, and without the word of a split: DRIVE has 21_training and 21_manual1."""
        return self.name, _without(self.name, SPLIT_OF_WORD)


def composed(text: str) -> str:
    """A name in the form of all systems: macOS stores "ä" as two letters (NFD), tables have one
    (NFC).

    Examples:
        >>> composed("La\u0308sion") == "L\u00e4sion"
        True
    """
    return unicodedata.normalize("NFC", text)


def words(name: str) -> list[str]:
    """The words of a name in lower case.

    Examples:
        >>> words("images train"), words("ISIC2018_Task1_Training_GroundTruth")
        (['images', 'train'], ['isic', '2018', 'task', '1', 'training', 'ground', 'truth'])
    """
    return [word.lower() for word in _WORD.findall(composed(name))]


def split_name(text: str) -> str:
    """The split that a word means, or "".

    Examples:
        >>> split_name("Train"), split_name("val"), split_name("3")
        ('training', 'validation', '')
    """
    return SPLIT_OF_WORD.get(text.strip().lower(), "")


def first_split(name: str) -> str:
    """The split that the first such word of a name means, or ""."""
    return next(filter(None, map(split_name, words(name))), "")


def split_folder(name: str) -> str:
    """The split that a folder is named after, or "" if its name has other words.

    Examples:
        >>> split_folder("train"), split_folder("b. Test Set"), split_folder("test positive")
        ('training', 'test', '')
    """
    splits = set()
    for word in words(_with_whole_split(name)):
        if len(word) > 1 and not word.isdecimal() and word not in _IGNORED_WORDS:
            splits.add(SPLIT_OF_WORD.get(word, ""))
    return splits.pop() if len(splits) == 1 else ""


def _with_whole_split(name: str) -> str:
    """The name of a folder with a short split spelt out.

    Examples:
        >>> _with_whole_split("imagesTs"), _with_whole_split("Tr"), _with_whole_split("Trauma")
        ('images test', ' train', 'Trauma')
    """
    for short, split in _SHORT_SPLITS.items():
        name = re.sub(f"^(images|labels|){short}$", rf"\1 {split}", name)
    return name


def parse_name(path: Path) -> FileName:
    """The parts of a path within the folder.

    Examples:
        >>> parse_name(Path("imagesTr/a_0001.nii.gz"))
        FileName(folders=(), name='a_0001', mask=False, split='training')
        >>> parse_name(Path("p1/IMG_01_mask.png"))
        FileName(folders=('p 1',), name='01', mask=True, split='')
        >>> parse_name(Path("case_7/segmentation.nii.gz"))
        FileName(folders=('case 7',), name='', mask=True, split='')
    """
    path = Path(composed(str(path)))
    mask = False
    split = ""
    folders = []
    for folder in path.parent.parts:
        folder_words = words(_with_whole_split(folder))
        mask = mask or not _MASK.isdisjoint(folder_words)
        splits = [SPLIT_OF_WORD[word] for word in folder_words if word in SPLIT_OF_WORD]
        if splits:
            split = splits[0]
        others = [word for word in folder_words if word not in _NO_NAMES]
        if others:
            folders.append(" ".join(others))
    name = stem(Path(stem(path)))  # a.jpg.png is of a.jpg
    mask = mask or not _MASK.isdisjoint(_ENTITY.findall(name))
    name = _ENTITY.sub("", name)
    if words(name) and {*words(name)} <= MASK_WORDS:  # the mask of the images of its folder
        return FileName(tuple(folders), "", True, split)
    without_mask = _without(name, _MASK, r"(?:[ _.-]?\d{1,2})?")  # masks may be numbered
    short = _without(without_mask, IMAGE_WORDS).lower()
    return FileName(tuple(folders), short, mask or without_mask != name, split)


def _without(name: str, affixes: Iterable[str], number: str = "") -> str:
    """The name without one of the words at its start or end, there with a `number`."""
    listed = "|".join(sorted(affixes, key=len, reverse=True))
    affix = rf"^(?:{listed})(?:[ _.-]+(?=.)|(?=\d))|(?<=.)[ _.-]+(?:{listed}){number}$"
    return re.sub(affix, "", name, count=1, flags=re.IGNORECASE)


def beginnings(name: str) -> list[str]:
    """A name, and its beginnings up to a mark between its words, the longest first.

    Examples:
        >>> beginnings("P07_left.2")
        ['P07_left.2', 'P07_left', 'P07']
    """
    ends = [match.start() for match in re.finditer("[ _.-]+", name)]
    return [name, *(name[:end] for end in reversed(ends))]


def patient_key(name: str) -> str:
    """What is the same in the ways to write a patient: Excel stores 007 as 7, people p1 as P1.

    Examples:
        >>> patient_key("007"), patient_key("P1")
        ('7', 'p1')
    """
    return (name.lstrip("0") or "0") if name.isdecimal() else name.casefold()


def refuse_variants(names: Iterable[str], location: str) -> None:
    """Raise DataError for two names of one class, as "1" and "1.00", or "Mild" and "mild"."""
    written: dict[object, str] = {}
    for name in sorted(names):
        number = number_of(name)
        key = plain_name(name) if number is None else number
        other = written.setdefault(key, name)
        if other != name:
            raise DataError(
                f"{location}: {other!r} and {name!r} are one name, written in two ways; "
                "write it in one"
            )


def ungraded(names: Sequence[str]) -> list[str]:
    """The names of classes that may stand for images without one: words such as to_check, and
    beside two others whole numbers below 0, or 9, 99 and 999 far above them.

    Examples:
        >>> ungraded(["nv", "2_To-check"]), ungraded(["-1", "0", "1"]), ungraded(["-1", "1"])
        (['2_To-check'], ['-1'], [])
        >>> ungraded(["0", "1", "9"]), ungraded(["7", "8", "9"])
        (['9'], [])
    """
    called_so = []
    codes = []
    numbers = sorted({number for number in map(number_of, names) if number is not None})
    for name in names:
        number = number_of(name)
        text = " ".join(word for word in words(name) if not word.isdecimal())
        if number is not None and number.is_integer():
            is_last = number == numbers[-1] and 2 * numbers[-2:][0] < number
            if number < 0 or (is_last and number in (9, 99, 999)):
                codes.append(name)
        elif any(f"{text} ".startswith(f"{word} ") for word in WORDS["ungraded"]):
            called_so.append(name)
    doubtful = [*codes, *called_so] if len(names) - len(codes) > 1 else called_so
    return doubtful if len(doubtful) < len(names) else []


def is_a_class(doubtful: Sequence[str], names: Sequence[str]) -> str:
    """The question whether the first of some names is a class, beside the other ones.

    Examples:
        >>> is_a_class(["-1"], ["-1", "0", "1"])
        'is -1 a class, beside 0, 1?'
    """
    others = ", ".join(name for name in names if name not in doubtful)
    return f"is {doubtful[0]} a class, beside {others}?"


def shortened(names: Sequence[str]) -> str:
    """The first names, and how many more there are.

    Examples:
        >>> shortened(["a", "b", "c", "d", "e", "f"])
        'a, b, c, d and 2 more'
    """
    shown = ", ".join(names[:_LISTED])
    return shown if len(names) <= _LISTED else f"{shown} and {len(names) - _LISTED} more"


def number_of(text: str) -> float | None:
    """The number that a text is, with a point or a comma, or None."""
    try:
        number = float(text.replace(",", "."))
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def sorted_labels(names: Iterable[str]) -> list[str]:
    """Class names in the order of their numbers: numerical if all are numbers, or alphabetical.

    Examples:
        >>> sorted_labels({"10", "9"}), sorted_labels({"nv", "mel"})
        (['9', '10'], ['mel', 'nv'])
    """
    ordered = sorted(names)
    rows = []
    for name in ordered:
        number = number_of(name)
        if number is None:
            return ordered
        rows.append((number, name))
    return [name for _, name in sorted(rows)]


def numbered(names: Iterable[str], start: int = 0) -> dict[str, str]:
    """Number as text -> name, in this order."""
    return {str(number): name for number, name in enumerate(names, start)}
