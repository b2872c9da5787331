"""From a downloaded folder to the datalists of one site or several: recognised, checked, split by patient, written."""

import filecmp
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from medflare.core.errors import DataError
from medflare.core.store import write_json
from medflare.data.datalist import FILE, SPLITS
from medflare.data.files.readers import NIFTI, PICTURES, explained, suffix
from medflare.starting.dealing import deal, draw_splits, with_patients
from medflare.starting.finding import Holdings, Item, holdings
from medflare.starting.layouts import Found, recognise
from medflare.starting.tables import GUESSED, Columns

DEFAULT_SHARES: Final = {"training": 0.7, "validation": 0.1, "test": 0.2}  # as `datalist.assign_splits` draws them


@dataclass(frozen=True)
class Wishes:
    """What was said about a folder; every wish may be left out.

    Attributes:
        kind: "segmentation", "classification", or "" for what is there.
        table: the table that holds the labels.
        columns: of the table.
        patient: regular expression, see `dealing.with_patients`.
        sites: how many simulated sites the patients are dealt to; None: one site.
        shares: split -> its share of the patients.
        seed: of the draws.
        redraw: draw all splits, also where the folder names some.
        skip: leave out what is incomplete or damaged.
        out: folder of the datalists, with the files as hard links; None: the images' own folder.
        copy: files are copied there and not linked.
        force: datalists that exist are written anew.
    """

    kind: str = ""
    table: Path | None = None
    columns: Columns = GUESSED
    patient: str = ""
    sites: int | None = None
    shares: Mapping[str, float] | None = None
    seed: int = 0
    redraw: bool = False
    skip: bool = False
    out: Path | None = None
    copy: bool = False
    force: bool = False


@dataclass(frozen=True)
class Written:
    """The datalists that were written.

    Attributes:
        found: what the folder held.
        sites: site, or "" where there is one folder -> its images with their splits.
        home: where the datalists lie: a site's folder, or the folder of all of them.
        warnings: what may spoil results, one line each.
        left_out: what was skipped, one line each.
    """

    found: Found
    sites: Mapping[str, Sequence[Item]]
    home: Path
    warnings: tuple[str, ...]
    left_out: tuple[str, ...]

    def render(self) -> str:
        """What was recognised and a table of what was made."""
        total = sum(map(len, self.sites.values()))
        lines = [f"{total} images, {self.found.kind} ({self.found.by})", "", *self._table(), ""]
        lines += [f"note: {note}" for note in self.found.notes]
        lines += [f"left out: {line}" for line in self.left_out[:_SHOWN]]
        lines += [f"left out: ... and {len(self.left_out) - _SHOWN} more"] if len(self.left_out) > _SHOWN else []
        lines += [f"WARNING: {warning}" for warning in self.warnings]
        return "\n".join([*lines, *(f"written: {_folder(self.home, site) / FILE}" for site in self.sites)])

    def _table(self) -> list[str]:
        names = list(self.found.labels.values()) if self.found.kind == "classification" else []
        head = ["site"] * ("" not in self.sites) + ["split", "images", "patients", *names]
        rows = [head]
        for site, items in self.sites.items():
            for split in SPLITS:
                chosen = [item for item in items if item.split == split]
                patients = len({item.patient or item.files for item in chosen})
                classes = [_showing(chosen, number) for number in range(len(names))]
                rows.append([site] * bool(site) + [split, *map(str, (len(chosen), patients, *classes))])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        words = 2 if len(head) > len(names) + 3 else 1
        return ["  ".join(_cell(row[n], width, n < words) for n, width in enumerate(widths)).rstrip() for row in rows]


_SHOWN: Final = 5  # lines of what was left out


def _cell(text: str, width: int, word: bool) -> str:
    return text.ljust(width) if word else text.rjust(width)


def _showing(items: Sequence[Item], number: int) -> int:
    return sum(bool(item.label[number]) if isinstance(item.label, list) else item.label == number for item in items)


def init(root: Path, wishes: Wishes = Wishes()) -> Written:
    """Makes the datalists of a folder of images; nothing is written before everything fits.

    Args:
        root: the folder, see `layouts.recognise` for what it may look like.
        wishes: see there.

    Raises:
        ConfigError: a wish that means nothing.
        DataError: a folder that is not understood, incomplete or damaged images, patients in two splits, or datalists that exist.
    """
    apart = wishes.sites is not None or bool(wishes.columns.site)
    if apart and wishes.out is None:
        raise DataError(f"{root}: several sites need a folder of their own; name it with --out")
    if wishes.out is not None and wishes.out.resolve().is_relative_to(root.resolve()):
        raise DataError(f"{wishes.out} lies in {root}, where its files would be taken for images; take another --out")
    held = holdings(root)
    found = recognise(held, kind=wishes.kind, table=wishes.table, columns=wishes.columns)
    usable, bad = _usable(found, held)
    if bad and (not wishes.skip or not usable):
        raise DataError(f"{root}: {len(bad)} of {len(bad) + len(usable)} are not usable, the first: {bad[0]}; mend them, or say --skip")
    known, warning = with_patients(usable, held, wishes.patient)
    if wishes.redraw:
        known = [replace(item, split="") for item in known]
    shares = wishes.shares or DEFAULT_SHARES
    sites = {
        site: draw_splits(items, site, shares, wishes.seed) for site, items in _by_site(known, wishes.sites, wishes.columns, wishes.seed)
    }
    home = root if wishes.out is None else wishes.out
    _refuse_existing(home, sites, wishes)
    for site, items in sites.items():
        _write(_folder(home, site), items, found, held, wishes)
    return Written(found, sites, home, (warning,) if warning else (), tuple(bad))


def _by_site(items: list[Item], sites: int | None, columns: Columns, seed: int) -> list[tuple[str, list[Item]]]:
    if columns.site:
        named: dict[str, list[Item]] = {}
        for item in items:
            named.setdefault(re.sub(r"[^\w-]+", "-", item.site).strip("-") or "unknown", []).append(item)
        return sorted(named.items())
    return [("", items)] if sites is None else list(deal(items, sites, seed).items())


def _folder(home: Path, site: str) -> Path:
    return home / site if site else home


# -- checked ---------------------------------------------------------------------------------------------------------------


def _usable(found: Found, held: Holdings) -> tuple[list[Item], list[str]]:
    """Images whose files open and whose masks have their size, and a line for each of the others. Only headers are read."""
    usable, bad = [], list(found.missing)
    listed: set[Path] = set()
    for item in found.items:
        try:
            if item.first in listed:
                raise DataError(f"{held.named(item.first)}: listed twice")
            listed.add(item.first)
            sizes = {file: _size(file) for file in (*filter(None, item.files), *item.masks)}
            for file, size in sizes.items():
                first = sizes[item.first]
                if size and first and size != first:
                    of = " x ".join(map(str, first))
                    raise DataError(f"{held.named(file)}: {' x '.join(map(str, size))}, {held.named(item.first)} is {of}")
        except DataError as error:
            bad.append(str(error))
        else:
            usable.append(item)
    return usable, bad


def _size(path: Path) -> tuple[int, ...]:
    """The sides of a picture, the smaller first since EXIF may turn it, or of a volume; () where the header does not say."""
    with explained(path):
        if suffix(path) in PICTURES:
            from PIL import Image

            with Image.open(path) as picture:
                return tuple(sorted(picture.size))
        if suffix(path) in NIFTI:
            import nibabel

            return tuple(map(int, nibabel.load(path).shape[:3]))
    return ()


def _refuse_existing(home: Path, sites: Mapping[str, Any], wishes: Wishes) -> None:
    for site in sites:
        path = _folder(home, site) / FILE
        if path.exists() and not wishes.force:
            raise DataError(f"{path} exists; keep it, or write it anew with --force")
    strangers = sorted(path for path in home.glob(f"*/{FILE}") if path.parent.name not in sites)
    if strangers and "" not in sites:  # an earlier deal: its patients would be at two sites
        raise DataError(f"{strangers[0].parent} is a site of an earlier deal; remove it, or take another --out")


# -- written ---------------------------------------------------------------------------------------------------------------


def _write(folder: Path, items: Sequence[Item], found: Found, held: Holdings, wishes: Wishes) -> None:
    """A site's folder: its files where they do not lie there, then its datalist."""
    if wishes.out is not None:
        for item in items:
            for file in (*filter(None, item.files), *item.masks):
                _bring(file, folder / file.relative_to(held.root), wishes.copy)
    content: dict[str, Any] = {"name": held.root.resolve().name}
    content |= {name: dict(values) for name, values in (("labels", found.labels), ("channel_names", found.channels)) if values}
    content |= {split: [_entry(item, held) for item in items if item.split == split] for split in SPLITS}
    write_json(folder / FILE, content)


def _bring(source: Path, target: Path, copy: bool) -> None:
    """A second name of the same file, or a copy; of a folder, of every file in it. Nothing that lies there is replaced."""
    if source.is_dir():
        for inner in sorted(source.iterdir()):
            _bring(inner, target / inner.name, copy)
        return
    if target.exists():
        if not (target.samefile(source) or filecmp.cmp(source, target, shallow=False)):
            raise DataError(f"{target} exists and is another file than {source}; take an empty --out")
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        if copy:
            shutil.copyfile(source, target)
        else:
            os.link(source, target)
    except OSError as error:
        raise DataError(f"{target}: {error.strerror}; take --out on the disk of the images, or copy them with --copy") from error


def _entry(item: Item, held: Holdings) -> dict[str, Any]:
    files = [None if file is None else held.named(file) for file in item.files]
    masks = [held.named(mask) for mask in item.masks]
    label = (masks if isinstance(item.label, list) else masks[0]) if masks else item.label
    entry = {"image": files[0] if len(files) == 1 else files, "label": label}
    return entry | ({"patient": item.patient} if item.patient else {})
