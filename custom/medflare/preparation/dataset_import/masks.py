"""Which mask belongs to which image, and which files are its channels."""

import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import nibabel
import numpy as np

from medflare.core.errors import DataError
from medflare.core.text import read_json
from medflare.data.dicom import tags_of
from medflare.data.reading import JPEG, NIFTI, PICTURES, explained, read_stored, stem, suffix
from medflare.data.targets import plain_name
from medflare.preparation.dataset_import.chosen_structures import (
    Structure,
    can_be_written,
    empty_mask,
    path_of_mask,
    plain_names,
)
from medflare.preparation.dataset_import.folders import (
    HEADER,
    MAX_CLASSES,
    Dataset,
    ImageFolder,
    Item,
    common_folder,
)
from medflare.preparation.dataset_import.names import MASK_WORDS, WORDS, beginnings, numbered, words
from medflare.preparation.dataset_import.options import ImportOptions

_STRIDE = 16  # between the pixels that are looked at first
SAMPLE_SIZE = 3  # pictures of a folder that are read to tell masks from photographs
# Ends in a number (nnU-Net), or in NIfTI files in a word (`_flair`).
_CHANNEL = re.compile(r"^(.*[^_-])[_-]+(\d{4}|[a-z][a-z0-9]*)$")
_LABEL = re.compile(r"_label-([^_]+)")
_DESCRIPTION = re.compile(r"_desc-([^_]+)")
_DERIVED_WORDS = frozenset((*WORDS["derived"], *WORDS["preview"], *WORDS["version"]))
WITHOUT_IMAGE = "a mask without an image"


def _several_series(folder: ImageFolder) -> str:
    """The end of an error about images without masks, if a DICOM series shares its folder."""
    if not folder.slices:
        return ""
    files = next(iter(folder.slices.values()))
    return (
        f"; {folder.relative(files[0].parent)} holds several series or other files, "
        "give each series a folder of its own"
    )


def refuse_masks_of_slices(folder: ImageFolder) -> None:
    """Raise DataError for pictures of few values beside fewer volumes."""
    pictures = []
    volumes = 0
    for image in folder.images:
        if suffix(image) in PICTURES:
            pictures.append(image)
        elif suffix(image) in NIFTI or image in folder.slices or image.is_dir():
            volumes += 1
    if not 0 < volumes < len(pictures) or suffix(pictures[0]) in JPEG:
        return
    if 0 < count_values(pictures[0]) <= MAX_CLASSES:
        raise DataError(
            f"{folder.relative(pictures[0].parent)} has a mask for each slice of a volume; stack "
            "the masks of each volume in one NIfTI file on its grid, called like the volume or its "
            "folder and _mask"
        )


def pair_masks(folder: ImageFolder, options: ImportOptions) -> Dataset:
    """Every mask with its image; the channels of an image may be in separate files.

    An image has the mask of the same folders, name and split; otherwise the mask without a name of
    its folder (`segmentation.nii.gz`), otherwise the only unused mask of its name and split. A
    DICOM series has the segmentation that refers to it. DataError without pairs, for two masks of
    one image, and for two images of one mask.
    """
    names = folder.names
    files_of, without = _assign_masks(folder)
    channels = sorted(set[str]().union(*files_of.values()))
    missing = _take_competing(folder, files_of, without)
    items = []
    missing_images = []
    for mask, files in files_of.items():
        if files:
            first = next(iter(files.values()))
            split = names[first].split or names[mask].split
            items.append(Item(tuple(map(files.get, channels)), mask, split=split))
        else:
            missing_images.append(f"{folder.relative(mask)}: {WITHOUT_IMAGE}")
    if not items:
        problem = missing[0] if missing else _without_pairs(folder, [*files_of], without)
        raise DataError(f"{folder.root}: {problem}")
    if len(channels) > 1 and "" in channels:
        raise DataError(
            f"{folder.root}: some images have a file per channel ({channels[1]}), others do not; "
            "give the folder of one data set, or list them in a table"
        )
    _refuse_slices_beside_volumes(folder, items)
    _refuse_masks_as_channels(folder, items, channels if not options.kind else ())
    _refuse_other_descriptions(folder, items if not options.kind else ())
    has_test = any(item.split == "test" for item in items)
    unlabelled = 0
    for path in without:
        if not has_test and names[path].split == "test":
            unlabelled += 1
        elif options.empty_masks and channels == [""] and can_be_written(path):
            mask = path_of_mask(path, "no_mask")
            written = {mask: partial(empty_mask, path)}
            items.append(Item((path,), mask, split=names[path].split, rendered=written))
        else:
            missing.append(f"{name_of_image(folder, path)}: no mask")
    notes = [f"{unlabelled} test images without masks are not used"] if unlabelled else []
    notes += _lines_without_channel(folder, items, channels)
    layout = "images and masks by name"
    if len(channels) > 1:
        layout += f", a file per channel ({', '.join(channels)})"
    labels, channel_names, listed = _read_header(folder)
    notes += _lines_of_unlisted(folder, items, listed)
    if not channel_names:
        for number, name in enumerate(channels):
            if name and not name.isdecimal():
                channel_names[str(number)] = name
    labels = labels or _segment_labels(folder.segmented)
    return Dataset(
        "segmentation",
        tuple(items),
        labels,
        layout,
        channel_names,
        tuple(notes),
        (*missing, *missing_images),
        structure="" if labels else _structure_of(folder),
    )


def _refuse_masks_as_channels(
    folder: ImageFolder, items: Sequence[Item], channels: Sequence[str]
) -> None:
    """Raise DataError for a channel whose files have two values, as a mask of the brain; and for
    one that is called neither by a number nor a modality, if it has few values, or pictures, or is
    called like what is made of others, as overlays and predictions are.
    """
    if len(channels) < 2:
        return
    parts_of = {channel: {*re.split("[ _.-]+", channel)} for channel in channels}
    # A word of all channels, as of T1_corrected and T2_corrected, tells nothing.
    telling = _DERIVED_WORDS - set.intersection(*parts_of.values())
    unclear = []
    for number, channel in enumerate(channels):
        files = [item.files[number] for item in items]
        first = [file for file in files if file][:SAMPLE_SIZE]
        called_so = channel.isdecimal() or "".join(words(channel)) in WORDS["modality"]
        counts = [count_values(file) for file in first]
        is_picture = suffix(first[0]) in PICTURES
        most = 2 if called_so or is_picture else MAX_CLASSES
        if min(counts) > 0 and 1 < max(counts) <= most:
            values = "two values" if max(counts) == 2 else "few values"
            raise DataError(
                f"{folder.root}: {folder.relative(first[0])} would be a channel, {channel}, and "
                f"has {values}, as masks have; if it is one, leave such files out, as with "
                f"--leave-out {shlex.quote(f'*{channel}*')}; otherwise give --kind segmentation"
            )
        if (is_picture and not called_so) or not telling.isdisjoint(parts_of[channel]):
            unclear.append(folder.relative(first[0]))
    if unclear:
        raise DataError(
            f"{folder.root}: {' and '.join(unclear)} would be among the channels of an image; "
            "leave out overlays, predictions and versions with --leave-out NAME; if all are "
            "channels, give --kind segmentation"
        )


def _refuse_other_descriptions(folder: ImageFolder, items: Iterable[Item]) -> None:
    """Raise DataError for masks that BIDS describes in several ways, as of brains and lesions."""
    names_of_masks = [stem(item.masks[0]) for item in items]
    described = {match[1] for match in map(_DESCRIPTION.search, names_of_masks) if match}
    if len(described) > 1:
        names = sorted(described)
        raise DataError(
            f"{folder.root}: masks show {', '.join(names)}; leave all but one out, as with "
            f"--leave-out '*desc-{names[0]}*', or if all show the same, give --kind segmentation"
        )


def _refuse_slices_beside_volumes(folder: ImageFolder, items: Iterable[Item]) -> None:
    """Raise DataError if a folder of several images has volumes and single slices of them."""
    in_folder = defaultdict(list)
    for item in items:
        in_folder[item.first.parent].append(item.first)
    images = max(in_folder.values(), key=len)
    if not 1 < len(images) <= SAMPLE_SIZE:
        return
    depths = {}
    for image in images:
        if suffix(image) in NIFTI:
            with explained(image):
                depths[min(nibabel.load(image).shape[:3])] = image
    if len(depths) > 1 and min(depths) == 1:
        raise DataError(
            f"{folder.relative(depths[1])} is one slice, beside the volume "
            f"{folder.relative(depths[max(depths)])}; take the slices out, or the volumes"
        )


def _lines_of_unlisted(
    folder: ImageFolder, items: Iterable[Item], listed: Collection[Path]
) -> list[str]:
    """A line about masks that a dataset.json does not list, beside those that it lists."""
    homes = {mask.parent for mask in listed if mask.exists()}
    masks = [item.masks[0] for item in items]
    unlisted = [mask for mask in masks if mask.parent in homes and mask not in listed]
    if not unlisted:
        return []
    line = f"{len(unlisted)} masks are not listed in {HEADER}, the first"
    remedy = "to leave them out, give --leave-out with their names"
    return [f"{line}: {folder.relative(unlisted[0])}; {remedy}"]


def _lines_without_channel(
    folder: ImageFolder, items: Sequence[Item], channels: Sequence[str]
) -> list[str]:
    """A line for each channel of which some images have no file."""
    lines = []
    for number, channel in enumerate(channels):
        lacking = [item.first for item in items if item.files[number] is None]
        if lacking:
            lines.append(
                f"{len(lacking)} images lack a file of channel {channel} (null in datalist), the "
                f"first: {folder.relative(min(lacking))}"
            )
    return lines


def _structure_of(folder: ImageFolder) -> str:
    """The structure in the names of all masks, as _label-lesion of BIDS; otherwise the words that
    all folders of masks have, and no folder of an image: "vessels" of images/1.png and
    masks/vessels/1.png. "" without any.
    """
    labels = {match[1] for match in map(_LABEL.search, map(stem, folder.masks)) if match}
    if len(labels) == 1:
        return labels.pop()
    of_images = set()
    of_masks = []
    for name in folder.names.values():
        listed = " ".join(name.folders).split()
        if name.mask:
            of_masks.append(listed)
        else:
            of_images.update(listed)
    shared = set.intersection(*map(set[str], of_masks)) - of_images
    return structure_name(word for word in dict.fromkeys(of_masks[0]) if word in shared)


def structure_name(listed: Iterable[str]) -> str:
    """The words that can name a structure: no numbers, initials and formats of files."""
    named = []
    for word in listed:
        if len(word) > 2 and word.isalpha() and word not in WORDS["no_structure"]:
            named.append(word)
    return " ".join(named)


def _without_pairs(folder: ImageFolder, masks: Sequence[Path], images: Sequence[Path]) -> str:
    """That no mask belongs to an image, with an example, and the remedy."""
    if not masks:
        return (
            f"none of {len(images)} images is called as masks are{_several_series(folder)}; name "
            "a mask like its image, with _mask (a_mask.png), or give --structure NAME, or a table "
            "with --mask-column"
        )
    several, count = Counter(mask.parent for mask in masks).most_common(1)[0]
    images_there = [image for image in images if image.is_relative_to(several.parent)]
    if count > 1 and len(images_there) == 1:
        return (
            f"{folder.relative(several)} holds {count} masks of one image; unite the masks of each "
            "image in one file"
        )
    problem = f"none of {len(masks)} masks belongs to an image by its name"
    remedy = "rename them"
    if not images:
        problem = f"all {len(masks)} pictures are called as masks are, as "
        problem += folder.relative(masks[0])
        remedy = "if they are images, rename their folder"
    else:
        problem += f", as {folder.relative(masks[0])} beside {folder.relative(images[0])}"
        remedy += f", as {stem(images[0])}_mask{suffix(masks[0])} for the mask of this image"
    of_case = [image for image in images if image.parent == several] or images_there
    if count > 1 and 0 < len(of_case) < len(images):
        remedy = f"if these are the masks of one image, leave out all but one; otherwise {remedy}"
    return (
        f"{problem}{_several_series(folder)}; {remedy}, or give a table with --mask-column; if the "
        "folders are classes, give --kind classification"
    )


def _assign_masks(folder: ImageFolder) -> tuple[dict[Path, dict[str, Path]], list[Path]]:
    """Mask -> channel -> image file; and the images without a mask."""
    names = folder.names
    files_of: dict[Path, dict[str, Path]] = {}
    by_name = defaultdict(list)
    for mask in folder.masks:
        files_of[mask] = {}
        by_name[names[mask].name].append(mask)
    images = folder.no_masks
    in_folder = Counter(image.parent for image in images)
    modalities = _modality_folders(images)

    def assign(image: Path, free: Collection[Path], same_folders: bool) -> bool:
        name = names[image].name
        # Names that the mask may have, with the channel of the image.
        own = modalities.get(image.parent, "")
        candidates = [(name, own)]
        channel = _CHANNEL.match(name)
        if channel and (channel[2].isdecimal() or suffix(image) in NIFTI):
            candidates.append((channel[1], channel[2]))
        candidates.append((names[image].names[1], own))
        if same_folders and names[image].folders:
            candidates.append(("", "" if in_folder[image.parent] == 1 else name))
        for name, part in candidates:
            masks = [mask for mask in by_name[name] if mask in free]
            masks = _masks_without_contradiction(folder, image, masks, same_folders)
            if len(masks) > 1 and same_folders:
                raise _two_masks(folder, masks)
            if len(masks) == 1:
                other = files_of[masks[0]].setdefault(part, image)
                if other is not image:
                    raise _two_images(folder, [other, image], masks[0])
                return True
        return False

    for same_folders in (True, False):
        free = {mask for mask, files in files_of.items() if same_folders or not files}
        images = [image for image in images if not assign(image, free, same_folders)]
    images = _assign_in_cases(folder, files_of, images)
    _refuse_second_masks(folder, files_of)
    return files_of, images


def _modality_folders(images: Iterable[Path]) -> dict[Path, str]:
    """Folder -> its name, if each is called like a modality and holds files of the same names."""
    names = defaultdict(set)
    for image in images:
        names[image.parent].add(image.name)
    are_modalities = all("".join(words(path.name)) in WORDS["modality"] for path in names)
    first = next(iter(names.values()), set())
    if len(names) < 2 or not are_modalities or any(names[path] != first for path in names):
        return {}
    return {path: path.name for path in names}


def _assign_in_cases(
    folder: ImageFolder, files_of: Mapping[Path, dict[str, Path]], images: Sequence[Path]
) -> list[Path]:
    """Add the volumes of a case to its only mask, as channels; the other images. A case is the
    folder of the mask, or the one above a folder called masks, as P01/T1.nii.gz,
    P01/masks/lesion.nii.gz and 0/wmh_seg.nii.gz, 0/pre/FLAIR.nii.gz; there are two at least.

    DataError if a mask has images in two folders.
    """
    masks_of = defaultdict(list)  # case -> masks
    for mask in files_of:
        is_inner = not MASK_WORDS.isdisjoint(words(mask.parent.name))
        masks_of[mask.parent.parent if is_inner else mask.parent].append(mask)
    mask_of = {}
    for case, (mask, *more) in masks_of.items():
        if not (more or files_of[mask]) and suffix(mask) in NIFTI:
            mask_of[case] = mask
    case_of = {}
    for image in images:
        for above in (image.parent.parent, image.parent):
            if above in mask_of and suffix(image) in NIFTI:
                case_of[image] = above
    volumes = Counter(case_of.values())  # case -> how many it has
    mask_names = {_name_in_case(folder, mask_of[case], case) for case in volumes}
    channel_of = {}
    for image, case in case_of.items():
        alone = max(volumes.values()) == 1
        channel_of[image] = "" if alone else _name_in_case(folder, image, case)
    repeated = len({*channel_of.values()}) < len(channel_of)
    if len(mask_names) != 1 or not repeated:
        return [*images]
    for image, case in case_of.items():
        files = files_of[mask_of[case]]
        first = next(iter(files.values()), image)
        if image.parent != first.parent:
            raise _two_images(folder, [first, image], mask_of[case])
        files[channel_of[image]] = image
    return [image for image in images if image not in case_of]


def _name_in_case(folder: ImageFolder, file: Path, case: Path) -> str:
    """The name of a file without that of its case before it, as of P1_nifti/P1_T1.nii.gz."""
    name = folder.names[file].name
    of_case = case.name.lower()
    if not name.startswith(of_case):
        of_case = re.sub(r"[ _.-]+[^\W\d]+$", "", of_case)
    return name.removeprefix(of_case).strip(" _.-")


def _two_images(folder: ImageFolder, images: Sequence[Path], mask: Path) -> DataError:
    return DataError(
        f"{folder.both(*images)} would both have the mask "
        f"{folder.relative(mask)}; if they are channels of one image, call them NAME_0000 and "
        "NAME_0001; otherwise take one out, use the same folder names for images and masks, or "
        "list them in a table"
    )


def _two_masks(folder: ImageFolder, masks: Sequence[Path]) -> DataError:
    return DataError(
        f"{folder.both(*masks[:2])}: two masks of one image; unite them, "
        "leave one out (--leave-out FOLDER, as of fields of view), or list them in a table, with "
        "--mask-column and a column for each"
    )


def _refuse_second_masks(folder: ImageFolder, files_of: Mapping[Path, Mapping[str, Path]]) -> None:
    """Raise DataError for a mask with the name of an image that has another one, if the mask is
    unused or that of an image in other folders.
    """
    names = folder.names
    unused = defaultdict(list)
    for mask, files in files_of.items():
        if all(names[image].folders != names[mask].folders for image in files.values()):
            unused[names[mask].split, names[mask].name].append(mask)
    for mask, files in files_of.items():
        for image in [names[file] for file in files.values()]:
            for name in image.names:
                for other in unused[image.split, name]:
                    if other != mask and {*image.folders} <= {*names[other].folders}:
                        raise _two_masks(folder, [mask, other])


def _masks_without_contradiction(
    folder: ImageFolder, image: Path, masks: Iterable[Path], same_folders: bool
) -> list[Path]:
    """The masks in the split of the image, otherwise those that may be in it; of several those
    that share the most folders with it.

    With `same_folders`, only masks in folders of the same names.
    """
    name = folder.names[image]
    same_split = []
    no_split = []
    for mask in masks:
        of_mask = folder.names[mask]
        if same_folders and of_mask.folders != name.folders:
            continue
        if of_mask.split == name.split:
            same_split.append(mask)
        elif not name.split or not of_mask.split:
            no_split.append(mask)
    return _in_case(folder, image, same_split or no_split)


def _in_case(folder: ImageFolder, image: Path, masks: Sequence[Path]) -> list[Path]:
    """The masks that share the most folders with an image, of these the most names of folders:
    gt/P1/1.png of ct/P1/1.png.
    """
    inside: Sequence[Path] = []
    for above in image.parents:
        inside = inside or [mask for mask in masks if mask.is_relative_to(above)]
    of_image = {*folder.names[image].folders}
    counts = {mask: len(of_image.intersection(folder.names[mask].folders)) for mask in inside}
    most = max(counts.values(), default=0)
    return [mask for mask, count in counts.items() if count == most]


def _take_competing(
    folder: ImageFolder, files_of: dict[Path, dict[str, Path]], images: list[Path]
) -> list[str]:
    """Take out the images that several masks without an image fit, and these masks; a line for each
    such image.
    """
    by_name = defaultdict(list)
    for mask, files in files_of.items():
        if not files:
            by_name[folder.names[mask].name].append(mask)
    lines = {}
    for image in images:
        name = folder.names[image]
        channel = _CHANNEL.match(name.name)
        possible = {*name.names, channel[1] if channel else name.name}
        masks = [mask for name in sorted(possible) for mask in by_name[name]]
        if len(masks) < 2:
            continue
        for mask in masks:
            files_of.pop(mask, None)
        other = masks[1].relative_to(common_folder(masks[:2])).parts[0]
        lines[image] = (
            f"{name_of_image(folder, image)}: {folder.both(*masks[:2])} can be its mask (leave one "
            f"out, as with --leave-out {shlex.quote(other)}, give --site-folders if they are of "
            "sites, or a table with --mask-column, and a column for each structure)"
        )
    images[:] = [image for image in images if image not in lines]
    return [*lines.values()]


def name_of_image(folder: ImageFolder, image: Path) -> str:
    """An image by a file or folder that exists."""
    file, *_ = folder.slices.get(image, (image,))
    return folder.relative(file)


def _segment_labels(masks: Iterable[Path]) -> dict[str, str]:
    """Number -> label of the segments of DICOM segmentations, numbered as they are met; of two
    spellings of one the first.
    """
    names: dict[str, str] = {}
    for mask in sorted(masks):
        with explained(mask):
            segments = tags_of(mask, "SegmentSequence").SegmentSequence
        for segment in segments:
            label = str(segment.SegmentLabel)
            names.setdefault(plain_name(label), label)
    return numbered(names.values(), start=1)


def _read_header(folder: ImageFolder) -> tuple[dict[str, Any], dict[str, str], set[Path]]:
    """Labels and channel names of a dataset.json, and the masks that it lists; empty if there is
    none.
    """
    headers = []
    masks: set[Path] = set()
    paths = sorted(folder.root.rglob(HEADER))
    for path in paths:
        try:
            content = read_json(path)
            channels = content.get("channel_names", content.get("modality")) or {}
            names = {str(number): str(name) for number, name in channels.items()}
            headers.append((dict(content.get("labels") or {}), names))
            rows = content.get("training")
            for row in rows if isinstance(rows, list) else ():
                if isinstance(row, dict):
                    masks.add(path.parent / str(row.get("label")))
        except (AttributeError, ValueError) as error:
            raise DataError(
                f"{path}: not a header of Decathlon or nnU-Net ({error}); correct or delete it"
            ) from error
        if "ignore" in headers[-1][0]:
            raise DataError(
                f"{path}: voxels with the label ignore cannot be left out of training; annotate "
                "them, or give them a label of their own"
            )
        if headers[-1] != headers[0]:
            raise DataError(
                f"{path} and {paths[0]} name other labels or channels, as of two data sets; "
                "give the folder of one of them, or --site-folders if they are sites"
            )
    return (*headers[0], masks) if headers else ({}, {}, masks)


def are_masks(files: Iterable[Path]) -> bool:
    """Whether the first files are grey pictures or volumes of two values; some may be empty."""
    most = 1
    for file in sorted(files)[:SAMPLE_SIZE]:
        try:
            array = read_stored(file, mask=True).array
        except DataError:
            return False
        few = array[..., ::_STRIDE]  # of a large photograph, all would take seconds
        if not (_is_grey_of_two(few) and _is_grey_of_two(array)):
            return False
        most = max(most, len(np.unique(array)))
    return most == 2


def with_masks_of_cases(folder: ImageFolder, structures: Iterable[Structure]) -> ImageFolder:
    """The folder with those files as masks that are called like one of the structures, also behind
    the name of an image beside them: x_lung.png of x.png; and those pictures that have two values
    and are called like the image of their case and a word, in a folder of their own: PH2's
    IMD002/IMD002_lesion/IMD002_lesion.bmp.
    """
    by_case = {(image.parent.parent, stem(image)): image for image in folder.images}
    masks = defaultdict(list)  # word -> files
    for (case, name), mask in by_case.items():
        of_image, _, word = name.rpartition("_")
        image = by_case.get((case, of_image), mask)
        if image.parent != mask.parent:
            masks[word].append(mask)
    structure_names = plain_names(structures)
    beside = {(image.parent, stem(image)) for image in folder.images}
    with_mask = {(file.parent, name.name) for file, name in folder.names.items() if name.mask}
    of_cases = []
    for image in folder.images:
        name = stem(image)
        ends = [name]
        for beginning in beginnings(name)[1:]:
            if (image.parent, beginning) in beside:
                ends.append(name.removeprefix(beginning).strip(" _.-"))
        has_mask = (image.parent, name.lower()) in with_mask
        if not has_mask and not structure_names.isdisjoint(map(plain_name, ends)):
            of_cases.append(image)
    for listed in masks.values():
        cases = {mask.parent.parent for mask in listed}
        if len(cases) == len(listed) > 1 and are_masks(listed):
            of_cases += listed
    return replace(folder, masks_of_cases=frozenset(of_cases))


def count_values(file: Path) -> int:
    """How many values an image has, at least if they are more than MAX_CLASSES; 0 if it cannot be
    read.
    """
    for mask in (True, False):  # a photograph as JPEG is no mask
        with suppress(DataError):
            array = read_stored(file, mask=mask).array
            count = len(np.unique(array[..., ::_STRIDE]))  # of a volume, all would take seconds
            return count if count > MAX_CLASSES else len(np.unique(array))
    return 0


def _is_grey_of_two(array: np.ndarray) -> bool:
    return len(np.unique(array)) <= 2 and bool((array == array[:1]).all())
