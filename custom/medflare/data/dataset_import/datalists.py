"""From a downloaded folder to the datalists of one site or several: recognised, checked, split by patient, written."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from medflare.core.errors import DataError
from medflare.data.datalist import FILE, SHARES, SPLITS
from medflare.data.dataset_import.finding import Item, holdings
from medflare.data.dataset_import.layouts import Found, recognise
from medflare.data.dataset_import.partition import deal, draw_splits, with_patients
from medflare.data.dataset_import.tables import GUESSED, Columns
from medflare.data.dataset_import.writing import bring_files, folder_of, refuse_existing, usable_items, write_datalist


@dataclass(frozen=True)
class Wishes:
    """What was said about a folder; every wish may be left out.

    Attributes:
        kind: "segmentation", "classification", or "" for what is there.
        table: the table that holds the labels.
        columns: of the table.
        patient: regular expression, see `dealing.with_patients`.
        sites: how many simulated sites the patients are dealt to; None: one site.
        shares: split -> its share of the patients, in any unit; None for `datalist.SHARES`.
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
        names = list(self.found.labels.values()) if self.found.kind == "classification" else []
        rows = [["site"] * ("" not in self.sites) + ["split", "images", "patients", *names]]
        for site, items in self.sites.items():
            for split in SPLITS:
                chosen = [item for item in items if item.split == split]
                patients = len({item.patient or item.files for item in chosen})
                shown = [item.label if isinstance(item.label, list) else [item.label == n for n in range(len(names))] for item in chosen]
                counts = [sum(map(bool, column)) for column in zip(*shown, strict=True)] if shown and names else [0] * len(names)
                rows.append([site] * bool(site) + [split, *map(str, (len(chosen), patients, *counts))])
        lines = [f"{total} images, {self.found.kind} ({self.found.by})", "", aligned(rows, words=1 if "" in self.sites else 2), ""]
        lines += [f"note: {note}" for note in self.found.notes]
        lines += [f"left out: {line}" for line in self.left_out]
        lines += [f"WARNING: {warning}" for warning in self.warnings]
        return "\n".join([*lines, *(f"written: {folder_of(self.home, site) / FILE}" for site in self.sites)])


def aligned(rows: Sequence[Sequence[str]], words: int = 1) -> str:
    """A table as text, the first row its header; so many columns are words, the others numbers on the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(text.ljust(width) if n < words else text.rjust(width) for n, (text, width) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    )
    return "\n".join(map(str.rstrip, lines))


def init(root: Path, wishes: Wishes = Wishes()) -> Written:
    """Makes the datalists of a folder of images; nothing is written before everything fits.

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
    usable, damaged = usable_items(found.items, held.root)
    bad = [*found.missing, *damaged]
    if bad and (not wishes.skip or not usable):
        raise DataError(f"{root}: {len(bad)} of {len(bad) + len(usable)} are not usable, the first: {bad[0]}; mend them, or say --skip")
    known, warning = with_patients(usable, held, wishes.patient)
    if wishes.redraw:
        known = [replace(item, split="") for item in known]
    shares = wishes.shares or SHARES
    sites = {
        site: draw_splits(items, site, shares, wishes.seed) for site, items in _by_site(known, wishes.sites, wishes.columns, wishes.seed)
    }
    home = root if wishes.out is None else wishes.out
    refuse_existing(home, sites, force=wishes.force)
    tables = {"labels": found.labels, "channel_names": found.channels}
    for site, items in sites.items():
        folder = folder_of(home, site)
        if wishes.out is not None:
            bring_files(folder, items, held.root, copy=wishes.copy)
        write_datalist(folder, items, held.root, tables=tables)
    return Written(found, sites, home, (warning,) if warning else (), tuple(bad))


def _by_site(items: list[Item], sites: int | None, columns: Columns, seed: int) -> list[tuple[str, list[Item]]]:
    if not columns.site:
        return [("", items)] if sites is None else list(deal(items, sites, seed).items())
    names: dict[str, str] = {}  # folder -> the first name that gives it
    found: dict[str, list[Item]] = {}
    for item in items:
        folder = re.sub(r"[^\w-]+", "-", item.site).strip("-") or "unknown"
        if (first := names.setdefault(folder, item.site)) != item.site:
            raise DataError(
                f"--site-column {columns.site}: {first!r} and {item.site!r} would both be the folder {folder}; write one name for one site"
            )
        found.setdefault(folder, []).append(item)
    return sorted(found.items())
