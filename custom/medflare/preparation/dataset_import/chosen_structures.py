"""The structures that a user chooses, by the names and values that sites have for them, and masks
that an import writes, since the folder has none of this form.
"""

import gzip
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path

import nibabel
import numpy as np

from medflare.core.errors import ConfigError, DataError
from medflare.core.pictures import png
from medflare.data.progress import with_progress
from medflare.data.reading import NIFTI, PICTURES, explained, read_stored, stem, suffix
from medflare.data.targets import check_structure, plain_name
from medflare.preparation.dataset_import.folders import Dataset, ImageFolder
from medflare.preparation.dataset_import.names import numbered, shortened
from medflare.preparation.mask_values import mask_values


@dataclass(frozen=True)
class Structure:
    """A structure to use."""

    name: str
    aliases: tuple[str, ...] = ()  # its names at sites, beside this one
    values: tuple[int, ...] = ()  # of its pixels in masks that show several structures

    @property
    def names(self) -> set[str]:
        """Its plain names."""
        return {*map(plain_name, (self.name, *self.aliases))}


def plain_names(structures: Iterable[Structure]) -> set[str]:
    """The plain names of all structures."""
    return set[str]().union(*(structure.names for structure in structures))


def parse_structures(texts: Iterable[str]) -> tuple[Structure, ...]:
    """The structures of the option --structure, given once for each; ConfigError for a wrong one.

    Examples:
        >>> parse_structures(["disc=od,optic disc,0,128"])
        (Structure(name='disc', aliases=('od', 'optic disc'), values=(0, 128)),)
    """
    structures = []
    name_of: dict[str, str] = {}
    for text in texts:
        name, _, others = text.partition("=")
        name = name.strip()
        aliases = []
        values = []
        for other in filter(None, map(str.strip, others.split(","))):
            if other.isdecimal():
                values.append(int(other))
            else:
                aliases.append(other)
        if not name:
            raise ConfigError(f"--structure {text}: give NAME, or NAME=OTHER,..., as disc=od,1,2")
        structure = Structure(name, tuple(aliases), tuple(values))
        for alias in structure.names:
            if alias in name_of:
                raise ConfigError(f"--structure {text}: {alias} is {name_of[alias]}, too; drop one")
            name_of[alias] = name
        structures.append(structure)
    return tuple(structures)


def names_here(
    present: Sequence[str], chosen: Sequence[Structure], folder: ImageFolder
) -> dict[str, str]:
    """Chosen structure -> its name in a folder, without structures that the folder lacks.

    DataError for two names of one structure, or if it lacks all.
    """
    name_here = {}
    for structure in chosen:
        fitting = [name for name in present if plain_name(name) in structure.names]
        if len(fitting) > 1:
            raise DataError(
                f"{folder.root}: both {fitting[0]} and {fitting[1]} are --structure "
                f"{structure.name}; drop one of the names"
            )
        if fitting:
            name_here[structure.name] = fitting[0]
    if not name_here:
        first = chosen[0].name
        raise DataError(
            f"{folder.root}: its structures are called {shortened(present)}, none of them is one "
            f"of --structure; say which is {first}: --structure '{first}=NAME'"
        )
    return name_here


def with_names(dataset: Dataset, present: Sequence[str], chosen: Sequence[Structure]) -> Dataset:
    """The images with the names of all chosen structures, those that the site has as annotated.

    Masks of several structures are a list, also where the site has one of them.
    """
    if len(chosen) == 1:
        items = [replace(item, label=item.masks[0]) for item in dataset.items]
        return dataset.with_items(items, labels={}, structure=chosen[0].name)
    items = [replace(item, label=item.masks) for item in dataset.items]
    return dataset.with_items(
        items,
        labels=numbered(structure.name for structure in chosen),
        structure="",
        annotated=tuple(present) if len(present) < len(chosen) else (),
    )


def with_chosen_structures(
    folder: ImageFolder, dataset: Dataset, chosen: Sequence[Structure]
) -> Dataset:
    """Images with one mask each, as images with a mask of every chosen structure.

    A mask that shows several structures is divided by its values.

    DataError for masks that cannot be written, or whose values no structure has.
    """
    if not chosen:
        return dataset
    masks = [item.masks[0] for item in dataset.items if not item.rendered]
    if dataset.labels or not all(map(can_be_written, masks)):
        raise DataError(
            f"{folder.root}: --structure divides masks that are pictures or NIfTI files, without "
            "names of their values; choose from these names in the task (label_values)"
        )
    background, values = mask_values(masks, named=True)
    if len(values) == 1:
        return _of_one_structure(folder, dataset, chosen)
    values_of = {}
    for structure in chosen:
        shown = [value for value in structure.values if value in values]
        if shown:
            values_of[structure.name] = shown
    listed = f"{shortened([*map(str, values)])} (the background is {background})"
    if len(values_of) < len(chosen):
        lacking = next(s.name for s in chosen if s.name not in values_of)
        raise DataError(
            f"{folder.root}: its masks show several structures, with the values {listed}; say "
            f"which of them are {lacking}: --structure '{lacking}=VALUE'"
        )
    items = []
    for item in dataset.items:
        mask = item.masks[0]
        parts = {}
        for name, shown in values_of.items():
            if mask in item.rendered:
                parts[path_of_mask(item.first, f"no_{name}")] = partial(empty_mask, item.first)
            else:
                parts[path_of_mask(mask, name)] = partial(_mask_of_values, mask, shown)
        items.append(replace(item, label=[*parts], rendered=parts))
    notes = [f"masks hold {listed}, written as a mask of each structure"]
    unlisted = sorted({*values} - {*chain(*values_of.values())})
    if unlisted:
        listed = shortened([*map(str, unlisted)])
        notes.append(f"no --structure has {listed}, which count as background")
    return with_names(dataset.with_items(items, *notes), [*values_of], chosen)


def _of_one_structure(
    folder: ImageFolder, dataset: Dataset, chosen: Sequence[Structure]
) -> Dataset:
    """Images whose masks show one structure, the one that files and folders name."""
    if dataset.structure:
        return with_names(dataset, [*names_here([dataset.structure], chosen, folder)], chosen)
    if len(chosen) == 1:
        return with_names(dataset, [chosen[0].name], chosen)
    raise DataError(
        f"{folder.root}: its masks show one structure, and no name says which; call their folder "
        f"so, as {chosen[0].name}"
    )


def _mask_of_values(file: Path, values: Sequence[int]) -> bytes:
    return mask_of(file, lambda mask: np.isin(mask.round(), values))


def with_two_values(
    dataset: Dataset, chosen: Sequence[Structure], threshold: float | None
) -> Dataset:
    """Images with masks of two values in place of soft ones, in which `threshold` and more is the
    structure; and of 0 and 255 in place of another number, if one structure is chosen.

    DataError for a soft mask of the one chosen structure, without a threshold.
    """
    alone = len(chosen) == 1
    if threshold is None and not alone:
        return dataset
    masks = []
    for item in dataset.items:
        for mask in item.masks:
            if mask not in item.rendered and can_be_written(mask):
                masks.append(mask)
    most = 0  # values beside 0 in one mask
    shown: set[float] = set()
    for mask in with_progress(masks, len(masks), "masks read for their values"):
        values = np.unique(read_stored(mask, mask=True).array)
        if threshold is None:
            check_structure(values, mask)
        most = max(most, int(np.count_nonzero(values)))
        shown.update(values.tolist())
    if threshold is not None and most > 1:
        note = f"masks hold several values, written anew: {threshold:g} and more is the structure"
    elif alone and not shown <= {0, 1, 255}:
        threshold = 1
        note = "masks hold 0 and another number than 1 and 255, written anew"
    else:
        return dataset
    binary_of = {mask: path_of_mask(mask, "binary") for mask in masks}
    items = []
    for item in dataset.items:
        written = {}
        for mask in set(item.masks) & binary_of.keys():
            written[binary_of[mask]] = partial(_mask_from, mask, threshold)
        label = [binary_of.get(mask, mask) for mask in item.masks]
        items.append(
            replace(
                item,
                label=label if isinstance(item.label, list) else label[0],
                rendered={**item.rendered, **written},
            )
        )
    return dataset.with_items(items, note)


def _mask_from(file: Path, threshold: float) -> bytes:
    return mask_of(file, lambda mask: mask >= threshold)


def can_be_written(file: Path) -> bool:
    """Whether a mask can be written that fits the grid of an image or mask."""
    return suffix(file) in (*PICTURES, *NIFTI)


def path_of_mask(file: Path, ending: str) -> Path:
    """Where to write a mask, beside the image or mask that it is of; DataError for a file there."""
    kind = ".nii.gz" if suffix(file) in NIFTI else ".png"
    path = file.with_name(f"{stem(file)}_{ending}{kind}")
    if path.exists():
        raise DataError(f"{path} has the name of a mask that the import writes; take it out")
    return path


def mask_of(
    file: Path, is_structure: Callable[[np.ndarray], np.ndarray], *, of_image: bool = False
) -> bytes:
    """The mask of the pixels or voxels that `is_structure` tells, as PNG (0 and 255) or as NIfTI
    (0 and 1), on the grid of a mask, or with `of_image` of an image.
    """
    if suffix(file) in NIFTI:
        with explained(file):
            image = nibabel.load(file)
            voxels = is_structure(np.asarray(image.dataobj)).astype(np.uint8)
            mask = nibabel.Nifti1Image(voxels, image.affine, image.header, dtype=np.uint8)
        return gzip.compress(mask.to_bytes(), mtime=0)
    stored = read_stored(file, mask=not of_image)
    pixels = is_structure(stored.as_slices(stored.array)[0])
    return png(np.where(pixels, 255, 0).astype(np.uint8))


def empty_mask(image: Path) -> bytes:
    """A mask without any structure, on the grid of an image."""
    return mask_of(image, lambda pixels: np.zeros(pixels.shape[:3], bool), of_image=True)
