"""Images with a mask of every structure: in folders, in files, or told by the masks' names."""

import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any

from medflare.core.errors import DataError
from medflare.data.reading import stem
from medflare.data.targets import plain_name
from medflare.preparation.dataset_import.chosen_structures import (
    can_be_written,
    empty_mask,
    names_here,
    path_of_mask,
    plain_names,
    with_names,
)
from medflare.preparation.dataset_import.folders import (
    MAX_CLASSES,
    Dataset,
    ImageFolder,
    Item,
    common_folder,
    folders_below,
    split_above,
)
from medflare.preparation.dataset_import.masks import (
    WITHOUT_IMAGE,
    are_masks,
    name_of_image,
    structure_name,
)
from medflare.preparation.dataset_import.names import (
    IMAGE_WORDS,
    MASK_WORDS,
    FileName,
    beginnings,
    numbered,
    parse_name,
    words,
)
from medflare.preparation.dataset_import.options import ImportOptions

_NamedFiles = dict[tuple[str, ...], Path]  # split, folders and name of an image -> the file


def structure_folders(folder: ImageFolder, options: ImportOptions) -> Dataset | None:
    """Images beside a folder of masks for each structure.

    For example images/, disc/, cup/, or images/, masks/disc/, masks/cup/. A mask has two values,
    and the name of its image. None without such folders. DataError if only some names fit, or,
    without a kind, if the folder of the images is not called so.
    """
    kind = options.kind
    common = common_folder(folder.images)
    files: defaultdict[str, _NamedFiles] = defaultdict(dict)  # folder -> its files
    for image in folder.images:
        folders = folders_below(common, image) or [""]
        if len(folders) > 1 and {*words(folders[0])} <= MASK_WORDS:
            del folders[0]  # masks/disc is disc
        top, *inner = folders
        name = parse_name(image).names[1].removesuffix(f"_{top.lower()}")
        key = (split_above(folder, image), *inner, name)
        files[top][key] = image
    if len(files) > MAX_CLASSES:
        return None
    structures = sorted(top for top in files if are_masks(files[top].values()))
    homes = [top for top in files if top not in structures]
    pairs = product(homes, structures)
    if not any(_share_names(files[home], files[top]) for home, top in pairs):
        return None
    home = homes[0]
    photographs = files[home]
    listed = ", ".join(structures)
    if len(homes) > 1 or not any(photographs.keys() & files[top] for top in structures):
        remedy = "give all masks two values" if kind else "give --kind classification"
        raise DataError(
            f"{folder.root}: {listed} have pictures of two values only, as masks do, beside "
            f"{', '.join(homes)}; call their folder masks if the others hold channels of one "
            f"image, list them in a table with --mask-column, leave masks out, as with --leave-out "
            f"{shlex.quote(homes[-1])}, or {remedy}"
        )
    if not kind and home and not {*words(home)} <= IMAGE_WORDS:
        raise DataError(
            f"{folder.root}: {listed} have pictures of two values only, with the names of {home}; "
            "give --kind segmentation if they are masks, --kind classification if not"
        )
    masks_of: defaultdict[Path, dict[str, Path]] = defaultdict(dict)
    missing = []
    for structure in structures:
        for key, mask in sorted(files[structure].items()):
            if key in photographs:
                masks_of[photographs[key]][structure] = mask
            else:
                missing.append(f"{folder.relative(mask)}: {WITHOUT_IMAGE}")
    splits = {image: key[0] for key, image in photographs.items()}
    layout = f"images in {home or common.name}, masks in a folder for each structure"
    return _of_structures(folder, splits, masks_of, structures, layout, options, missing)


def _of_structures(
    folder: ImageFolder,
    splits: Mapping[Path, str],
    masks_of: Mapping[Path, Mapping[str, Path]],
    structures: Sequence[str],
    layout: str,
    options: ImportOptions,
    missing: Iterable[str] = (),
) -> Dataset:
    """Images with a mask of each structure, or of each that the user chooses; those that lack one
    are `missing`, beside those given.

    Args:
        splits: image -> its split.
        masks_of: image -> structure -> mask.
    """
    chosen = options.structures
    present: list[str] = []
    if chosen:
        name_here = names_here(structures, chosen, folder)
        present = [*name_here]
        structures = [*name_here.values()]
    items = []
    incomplete = []
    for image, split in splits.items():
        masks = dict(masks_of.get(image, {}))
        lacking = [structure for structure in structures if structure not in masks]
        written = {}
        if lacking and options.empty_masks and can_be_written(image):
            for structure in lacking:
                masks[structure] = path_of_mask(image, f"no_{structure}")
                written[masks[structure]] = partial(empty_mask, image)
        elif lacking:
            others = f", but of {', '.join(masks)}" if masks else ""
            name = name_of_image(folder, image)
            incomplete.append(f"{name}: no mask of {lacking[0]}{others}")
            continue
        of_image = [masks[structure] for structure in structures]
        label = of_image if len(of_image) > 1 else of_image[0]
        items.append(Item((image,), label, split=split, rendered=written))
    several = len(structures) > 1
    dataset = Dataset(
        "segmentation",
        tuple(items),
        numbered(structures) if several else {},  # the values of one decide
        f"{layout}: {', '.join(structures)}",
        missing=(*incomplete, *missing),
        structure="" if several else structures[0],
    )
    return with_names(dataset, present, chosen) if chosen else dataset


def structure_files(folder: ImageFolder, options: ImportOptions) -> Dataset | None:
    """Folders of one image each and masks of several structures, or None.

    As TotalSegmentator's case/ct.nii.gz, case/segmentations/liver.nii.gz.
    """
    masks: defaultdict[tuple[Any, ...], dict[str, Path]] = defaultdict(dict)
    images = defaultdict(list)
    repeated = []
    for path, name in folder.names.items():
        if not name.mask:
            images[name.split, name.folders].append(path)
            continue
        other = masks[name.split, name.folders].setdefault(name.name, path)
        if other is not path:
            repeated.append((other, path))
    counts = Counter(chain.from_iterable(masks.values()))
    shared = {name for name, count in counts.items() if count >= min(2, len(masks))}
    several = any(len(shared & of_image.keys()) > 1 for of_image in masks.values())
    if not several or any(len(images[key]) != 1 for key in masks):
        return None
    if repeated:
        raise DataError(
            f"{folder.both(*repeated[0])} are masks of one structure, as of several readers; unite "
            "them, or take the others out"
        )
    structures = sorted(counts)
    splits = {}
    masks_of = {}
    for key, listed in images.items():
        for image in listed:
            splits[image] = key[0]
            masks_of[image] = masks[key]
    layout = "a folder for each image, with a mask for each structure"
    return _of_structures(folder, splits, masks_of, structures, layout, options)


def structure_suffixes(folder: ImageFolder, options: ImportOptions) -> Dataset | None:
    """Masks called like their image and a few words, the same for each structure; or None.

    As RIM-ONE's im1.png, im1-Cup.png and im1-Disc.png, or IDRiD's Microaneurysms/IDRiD_01_MA.tif.
    """
    by_name = defaultdict(list)
    for file in folder.no_masks:
        by_name[folder.names[file].name].append(file)
    masks_of: defaultdict[Path, dict[str, Path]] = defaultdict(dict)
    for mask in folder.masks:
        image, rest = _image_of_longer_name(folder, mask, by_name)
        if image is None or rest in masks_of[image]:
            return None
        masks_of[image][rest] = mask
    without = sum(map(len, by_name.values())) - len(masks_of)
    if without > len(masks_of):
        return None
    names = _structures_of_suffixes(masks_of.values())
    whole = {rest: plain_name(rest.strip(" _.-")) for rest in names}
    if not plain_names(options.structures).isdisjoint(
        whole.values()
    ):  # left_lung, right_lung beside left, right
        names = whole
    distinct = {*names.values()}
    some_unnamed = len(names) > 1 and "" in distinct
    if some_unnamed or len(distinct) < len(names) or len(names) > MAX_CLASSES:
        return None
    splits = {}
    of_structure: defaultdict[Path, dict[str, Path]] = defaultdict(dict)
    for image in chain.from_iterable(by_name.values()):
        splits[image] = folder.names[image].split
        for rest, mask in masks_of.get(image, {}).items():
            of_structure[image][names[rest]] = mask
    structures = list(names.values())
    layout = "masks called like their image, and for the structure"
    dataset = _of_structures(folder, splits, of_structure, structures, layout, options)
    if options.structures:
        return dataset
    return replace(dataset, structure=structure_name(dataset.structure.split()))


def _image_of_longer_name(
    folder: ImageFolder, mask: Path, by_name: Mapping[str, Sequence[Path]]
) -> tuple[Path | None, str]:
    """The image whose name begins a mask's, and the rest of the mask's name; None without one, for
    several, and if the rest is empty.
    """
    name = folder.names[mask]
    for beginning in beginnings(name.name):
        images = by_name.get(beginning, ())
        if not images:
            continue
        beside = [image for image in images if folder.names[image].folders == name.folders]
        images = beside or images
        allowed = [image for image in images if folder.names[image].split == name.split]
        allowed = allowed or [image for image in images if not name.split]
        rest = name.name.removeprefix(beginning)
        return (allowed[0] if len(allowed) == 1 and rest else None), rest
    return None, ""


def _structures_of_suffixes(masks: Iterable[Mapping[str, Path]]) -> dict[str, str]:
    """End of a mask's name -> its structure: the name of the masks' folder, if each has its own,
    otherwise the words that not all ends have.
    """
    folders = defaultdict(set)
    for of_image in masks:
        for rest, mask in of_image.items():
            image_words = {*words(stem(mask))} - {*words(rest)}
            listed = [word for word in words(mask.parent.name) if word not in image_words]
            folders[rest].add(" ".join(filter(str.isalpha, listed)))
    by_folder = {rest: min(names) for rest, names in folders.items() if len(names) == 1}
    if len({*by_folder.values()}) == len(folders) > 1:
        return dict(sorted(by_folder.items()))
    parts = {rest: re.findall("[^ _.-]+", rest) for rest in sorted(folders)}
    shared = set.intersection(*map(set[str], parts.values())) if len(parts) > 1 else set[str]()
    named = {}
    for rest, all_parts in parts.items():
        named[rest] = " ".join(part for part in all_parts if part not in shared)
    return named


def are_in_structures(names: Iterable[FileName]) -> bool:
    """Whether folders of masks hold a folder for each structure.

    One name occurs in several of them, and in no such folder of images.
    """
    inner = set()
    of_images: set[str] = set()
    folders_of = defaultdict(set)
    for name in names:
        if not name.mask:
            of_images.update(name.folders)
        elif name.folders:
            last = name.folders[-1]
            inner.add(last)
            short = name.name.removesuffix(f"_{last}")
            folders_of[name.split, short].add(last)
    several = any(len(folders) > 1 for folders in folders_of.values())
    return several and inner.isdisjoint(of_images)


def _share_names(images: _NamedFiles, masks: _NamedFiles) -> bool:
    """Whether a mask is called like an image, or like it with one more word."""
    for *folders, name in masks:
        if any((*folders, beginning) in images for beginning in beginnings(name)[:2]):
            return True
    return False
