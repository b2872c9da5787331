"""Codes for the names of a site's files and patients, in whatever text leaves it; a table that stays at the site maps them back.

Messages name files, so that somebody at the site can mend them. A file is often named after a patient, though, and the others need
not know: where the site's own settings say `redact`, "scans/Meier_Anna.png: cannot be read" leaves it as "image-0007: cannot be read".
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path, PurePosixPath
from typing import Any, Final

from medflare.core.text import printable
from medflare.data.datalist import FILE, SPLITS, content_of
from medflare.data.reading import stem

TABLE: Final = "codes.json"  # in the site's folder of a job
# An absolute path that no code stands for; programs stay, since a log of an error names them.
_ELSEWHERE: Final = re.compile(r"(?<![\w.:/)])/[^\s'\":;,()]+(?<!\.py)(?=$|[\s'\":;,()])")
_DATA: Final = "(data)"  # stands for the folder of the data
_PATH: Final = "(path)"
_CODE: Final = re.compile(r"(?:image|mask|patient|text)-(x*)\d{4,}", re.IGNORECASE)  # what a code looks like, see `_free_mark`
_SHORTEST: Final = 3  # characters of a name that is replaced wherever it stands
_SHORTEST_NUMBER: Final = 5  # of one that is a number; shorter ones are sizes and counts as a rule
# Words of messages: as names they name nobody, and no message could be read without them.
_WORDS: Final = frozenset(
    (
        *("image", "images", "mask", "masks", "label", "labels", "scan", "scans", "file", "files", "slice", "slices", "volume", "volumes"),
        *("patient", "patients", "training", "train", "validation", "test", "data", "site", "sites", "channel", "channels", "series"),
    )
)


class Redaction:
    """What stands for which name.

    Args:
        root: the folder with the datalist; None where the data are none of a patient's, or nobody knows where they are.

    Attributes:
        table: code -> the name in the datalist, for the site alone.
    """

    def __init__(self, root: Path | None = None):
        self.table: dict[str, str] = {}
        self._names: dict[str, str] = {}  # whatever a text may hold of a file or patient -> its code
        if root is not None:
            for place in dict.fromkeys((str(root), str(root.resolve()))):
                self._names[place] = _DATA
            self._add_all(root)
        self._names = {printable(name): code for name, code in self._names.items()} | self._names  # as messages have them
        self._longest_first = sorted(self._names, key=len, reverse=True)

    def text(self, text: str) -> str:
        """The text with codes in place of names, and no path of this machine left in it.

        Args:
            text: for example an error's.
        """
        # In one pass, so that no name is taken for part of a code that has just come in. The pattern is of the names that the text has: one
        # of all names takes 20 s to compile for 100,000 images.
        if names := "|".join(re.escape(name) for name in self._longest_first if name in text):
            text = re.sub(rf"(?<![A-Za-z0-9])(?:{names})(?![A-Za-z0-9])", lambda found: self._names[found[0]], text)
        return _ELSEWHERE.sub(_PATH, text.replace(f"{_DATA}/", ""))

    def facts(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        """A reply's facts with codes in its events' messages and in what models report; counts and metrics stay as they are.

        Args:
            facts: of a reply.
        """
        events = [{**event, "message": self.text(event["message"])} for event in facts.get("events", [])]
        reports = {"reports": self._values(facts["reports"])} if "reports" in facts else {}
        return {**facts, **({"events": events} if events else {}), **reports}

    def _values(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: self._values(inner) for name, inner in value.items()}
        return self.text(value) if isinstance(value, str) else value

    def _add_all(self, root: Path) -> None:
        parts: dict[str, set[str]] = defaultdict(set)  # of a file's path -> the codes of the patients whose files have it
        patients: dict[str, str] = {}
        entries = list(_entries(root / FILE))
        mark = _free_mark(entries)
        for number, entry in enumerate(entries, start=1):
            images, masks = (list(_texts(entry.get(key))) for key in ("image", "label"))
            named = str(entry.get("patient", images[0] if images else number))
            code = patients.setdefault(named, f"patient-{mark}{len(patients) + 1:04d}")
            for kind, files in (("image", images), ("mask", masks)):
                for file in files:
                    self._add_file(file, f"{kind}-{mark}{number:04d}", root)
                    path = PurePosixPath(file)
                    for part in {*path.parts, stem(path)}:
                        parts[part].add(code)
            self._add(named, code)  # behind its files, whose codes say more where a file's name stands for the patient
            self._names[f"patient {named}"] = code
            for more in (text for key, value in entry.items() if key not in ("image", "label", "patient") for text in _texts(value)):
                self._add(more, f"text-{mark}{number:04d}")
        for part, codes in parts.items():
            if len(codes) == 1:  # what several patients share names none of them
                self._add(part, *codes)

    def _add_file(self, file: str, code: str, root: Path) -> None:
        self.table.setdefault(code, file)
        names = [file, str(root / file)]
        with suppress(OSError, RuntimeError, ValueError):  # a name that is none
            names.append(str((root / file).resolve()))
        for name in names:
            self._names.setdefault(name, code)

    def _add(self, name: str, code: str) -> None:
        self.table.setdefault(code, name)
        if len(name) >= (_SHORTEST_NUMBER if name.isdigit() else _SHORTEST) and name.lower() not in _WORDS:
            self._names.setdefault(name, code)


def _entries(file: Path) -> Iterator[Mapping[str, Any]]:
    """The entries of a datalist as they are written; none where it cannot be read, which is somebody else's to say."""
    try:
        content = content_of(file)
    except (OSError, ValueError, RecursionError):
        return
    for split in SPLITS if isinstance(content, Mapping) else ():
        listed = content.get(split)
        yield from (entry for entry in (listed if isinstance(listed, list) else []) if isinstance(entry, Mapping))


def _free_mark(entries: Iterable[Mapping[str, Any]]) -> str:
    """What stands before the numbers of codes so that no code is a name of the data: as many "x" as that takes, usually none."""
    taken = {code[1].lower() for entry in entries for text in _texts(entry) for code in _CODE.finditer(text)}
    marks = ("x" * number for number in count())
    return next(mark for mark in marks if mark not in taken)


def _texts(value: Any) -> Iterable[str]:
    if isinstance(value, str) and value:
        yield value
    elif isinstance(value, Mapping | list):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(inner)
