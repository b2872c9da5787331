"""What the words in names of files and folders say: a mask, a split, a channel."""

import re
from pathlib import Path
from typing import Final, NamedTuple

from medflare.data.reading import stem

_MASK: Final = frozenset(
    (
        *("mask", "masks", "label", "labels", "seg", "segs", "segmentation", "segmentations", "gt", "groundtruth", "groundtruths", "truth"),
        *("annotation", "annotations", "manual"),
    )
)
_IMAGE: Final = frozenset(
    (
        *("image", "images", "img", "imgs", "picture", "pictures", "photo", "photos", "scan", "scans", "original", "originals"),
        *("input", "inputs"),
    )
)
_SPLITS: Final = {
    **dict.fromkeys(("train", "training", "tr"), "training"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "ts"), "test"),
}
_SHORT: Final = frozenset(("tr", "ts"))
_FILLING: Final = frozenset(("set", "sets", "data", "folder", "split", *_IMAGE))
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

    Args:
        name: of a file or a folder.

    Examples:
        >>> words("imagesTr"), words("ISIC2018_Task1_Training_GroundTruth")
        (['images', 'tr'], ['isic', '2018', 'task', '1', 'training', 'ground', 'truth'])
    """
    return [word.lower() for word in _WORD.findall(name)]


def split_named(text: str) -> str:
    """The split that a word means, or "".

    Args:
        text: for example a cell of a table.

    Examples:
        >>> split_named("Train"), split_named("val"), split_named("3")
        ('training', 'validation', '')
    """
    return _SPLITS.get(text.strip().lower(), "")


def split_folder(name: str) -> str:
    """The split that a folder is named after, or "" where its name says more than that.

    Args:
        name: of the folder.

    Examples:
        >>> split_folder("train"), split_folder("Test Set"), split_folder("test positive"), split_folder("TR")
        ('training', 'test', '', '')
    """
    said = words(name)
    found = {_SPLITS[word] for word in said if word in _SPLITS}
    known = all(word in _SPLITS or word in _FILLING for word in said) and not _SHORT & set(said)  # "TR" is rather a class
    return found.pop() if len(found) == 1 and known else ""


def says_images(name: str) -> bool:
    """Whether a folder's name says no more than that images lie in it.

    Args:
        name: of the folder.

    Examples:
        >>> says_images("images"), says_images("Scans_data"), says_images("hospital2"), says_images("1")
        (True, True, False, False)
    """
    said = words(name)
    return bool(said) and set(said) <= _FILLING


def read_name(path: Path) -> FileName:
    """What the place and name of an image say.

    Args:
        path: relative to the folder that was given.

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
