"""Images whose class is the name of their folder, and what else such folders may be."""

import os
import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, permutations
from pathlib import Path

from medflare.core.errors import DataError
from medflare.data.reading import NIFTI, stem, suffix
from medflare.preparation.dataset_import.folders import (
    MAX_CLASSES,
    NEARLY_ALL,
    Dataset,
    ImageFolder,
    Item,
    common_folder,
    folders_below,
    split_above,
)
from medflare.preparation.dataset_import.masks import SAMPLE_SIZE, are_masks, count_values
from medflare.preparation.dataset_import.names import (
    IMAGE_WORDS,
    PATIENT,
    SPLIT_OF_WORD,
    WORDS,
    composed,
    first_split,
    is_a_class,
    numbered,
    refuse_variants,
    sorted_labels,
    ungraded,
    words,
)

LAYOUTS = (
    "an image and its mask by name (a.png, a_mask.png), images/ and masks/, a folder per class, "
    "or a table (CSV, Excel)"
)
_IMAGES_OF_CLASS = 2.5  # folders with fewer, in the mean, are probably patients
_MOST_GRADES = 7  # folders called 0, 1, ...; more may be patients (BI-RADS has 0 to 6)
_PATIENT_WORDS = {*WORDS["column"]["patient"], *WORDS["column"]["case"]}
_VERSIONS = frozenset(WORDS["version"])
# Words before the numbers of classes.
_GRADES = {*WORDS["label_column_end"], *WORDS["numbered_class"]}


def class_folders(
    folder: ImageFolder,
    images: Sequence[Path],
    *,
    confirmed: bool,
    classes_of_sites: Collection[str] = (),
) -> Dataset:
    """Images whose class is the name of a folder below the folder that all share, or one of
    `classes_of_sites` that they share.

    Folders of splits do not count. DataError for other images of fewer than two classes; unless
    they are `confirmed` by --kind classification, also for what may be patients, sites or versions.
    """
    common = common_folder(images)
    inner = defaultdict(set)  # class -> folders in it
    deeper = defaultdict(set)  # class -> all folders below it
    below = _once({image: folders_below(common, image) for image in images})
    shared_by_all = os.path.commonpath(["/".join(folders) for folders in below.values()])
    for image, folders in below.items():
        classes = folders[len(Path(shared_by_all).parts) :]  # without images of train/images/cat
        below[image] = classes
        if classes:
            inner[classes[0]].update(classes[1:2])
            deeper[classes[0]].update(classes[1:])
    names = sorted_labels(inner)
    above = [*folders_below(folder.root, common / "image"), *Path(shared_by_all).parts]
    of_sites = [name for name in classes_of_sites if name in above]
    if of_sites and not {*names} & {*classes_of_sites}:
        return _of_one_class(folder, images, of_sites[0], confirmed=confirmed)
    if len(names) < 2:
        raise _without_classes(folder, below, names, above, confirmed=confirmed)
    dataset = _by_inner_folders(folder, below, inner, confirmed=confirmed)
    if dataset is not None:
        return dataset
    if not confirmed:
        _refuse_sites(folder, inner)
    for name in names:
        same = sorted(deeper[name] & {*names})
        if same == [name]:
            raise DataError(f"{folder.root}: {name} holds {name}; move what is in the inner one up")
        if same:
            raise DataError(
                f"{folder.root}: {name} repeats the class folders {' and '.join(same)}; if "
                f"{name} is a split, rename it train, val or test; otherwise take it out"
            )
    notes = _two_levels(folder, inner, confirmed=confirmed)
    if not confirmed:
        _refuse_patients(folder, names, below)
        _refuse_no_classes(folder, names)
        _refuse_pictures_of_others(folder, names, below)
    refuse_variants(names, f"{folder.root}: the class folders")
    _refuse_names_of_splits(folder, names)
    if not confirmed:
        _refuse_companions(folder, images)
        in_classes = [image for image, folders in below.items() if folders]
        first = [*in_classes[: 2 * SAMPLE_SIZE], *_first_of_each(in_classes, below)]
        _refuse_masks(folder, [*dict.fromkeys(first)])
        _refuse_masks_of_classes(folder, names, below)
        _refuse_other_groups(folder, names, in_classes)
        _refuse_classes_of_splits(folder, names, in_classes, below)
    dataset = _classes_at(0, folder, below, names, "a folder per class")
    return replace(dataset, notes=tuple(notes))


def _once(below: Mapping[Path, list[str]]) -> dict[Path, list[str]]:
    """Image -> its folders, without the first if it holds one of its own name alone, as archives
    are unpacked: cat/cat/1.png.
    """
    inner = defaultdict(set)
    for folders in below.values():
        inner["".join(folders[:1])].update(folders[1:2] or [""])
    once = {}
    for image, folders in below.items():
        doubled = inner["".join(folders[:1])] == {*folders[:1]}
        once[image] = folders[1:] if doubled else folders
    return once


def _by_inner_folders(
    folder: ImageFolder,
    below: Mapping[Path, Sequence[str]],
    inner: Mapping[str, set[str]],
    *,
    confirmed: bool,
) -> Dataset | None:
    """The images by class, if the classes are folders in those of patients, years or scanners;
    DataError unless this is `confirmed`.

    Args:
        below: image -> its folders.
        inner: first of them -> the folders in it.
    """
    names = sorted_labels(set.union(*inner.values()))
    outer = sorted_labels(inner)
    shared = sorted_labels(set.intersection(*inner.values()))
    of_patients = _hold_classes(inner)
    patients_in_each = all(map(_may_be_patient, shared))
    notes: list[str] = []
    if of_patients:
        first = min(inner)
        layout = "folders of patients, with a folder per class"
        problem = (
            f"{first}, ... hold the folders {', '.join(names)}; if these are classes, and {first}, "
            f"... patients, give --kind classification; if {first}, ... are sites, give "
            "--site-folders; otherwise keep one of the folders in each, or rename them"
        )
    elif len(shared) < 2 or (confirmed and patients_in_each):
        return None
    else:
        layout = f"a folder per class in each of {_first_of(outer)}"
        inside = _first_of(shared)
        remedy = "if they are splits, rename them train, val or test"
        if _have_same_names(below):
            of_copies = (
                f"if {_first_of(outer)} hold the same pictures, as of two sizes, leave one out "
                f"with --leave-out {shlex.quote(outer[0])}"
            )
            remedy += f"; {of_copies}"
            notes.append(f"files have the same names; {of_copies}")
        if patients_in_each:
            remedy += (
                f"; if they are patients, give a table with their classes; if {inside} are the "
                f"classes, move them up; if {outer[0]}, ... are the classes, give"
            )
        else:
            if all(map(str.isdecimal, outer)) or all(map(_may_be_patient, outer)):
                option = _patient_option(folder, next(filter(below.get, below)), outer)
                remedy += (
                    f"; if they are patients and {inside} the classes, give --kind classification "
                    f"{option}; if {inside} are versions of one picture, leave one out with "
                    f"--leave-out {shlex.quote(shared[0])}"
                )
            remedy += (
                f"; if {outer[0]}, ... are classes, move the images in each out of its folders; "
                "if only the folders in them are classes, give"
            )
        problem = (
            f"each of {_first_of(outer)} holds the folders {inside}; if {outer[0]}, ... are "
            f"sites, give --site-folders; {remedy} --kind classification"
        )
    if not confirmed:
        swapped = {}
        for image, (first, *others) in below.items():
            if others:
                swapped[image] = [others[0], first, *others[1:]]
        _refuse_masks_of_classes(folder, names, swapped)
        raise DataError(f"{folder.root}: {problem}")
    refuse_variants(names, f"{folder.root}: the class folders")
    _refuse_names_of_splits(folder, names)
    dataset = _classes_at(1, folder, below, names, layout, of_patients=of_patients)
    return replace(dataset, notes=tuple(notes))


def _have_same_names(below: Mapping[Path, Sequence[str]]) -> bool:
    """Whether nearly all images have the name of one in another first folder; `below`: image -> its
    folders.
    """
    counts = Counter((*folders[1:], stem(image)) for image, folders in below.items())
    repeated = sum(count for count in counts.values() if count > 1)
    return repeated > NEARLY_ALL * len(below)


def _patient_option(
    folder: ImageFolder, image: Path, names: Collection[str], below: int = 0
) -> str:
    """The option whose patients are the folders of these names, or so many levels below."""
    parts = composed(folder.relative(image)).split("/")
    level = min(parts.index(name) for name in names if name in parts) + below
    return f"--patient '^{'[^/]+/' * level}([^/]+)/'"


def _may_be_patient(folder: str) -> bool:
    return bool(PATIENT.search(folder)) or not {*words(folder)}.isdisjoint(_PATIENT_WORDS)


def _hold_classes(inner: Mapping[str, Collection[str]]) -> bool:
    """Whether folders may be of patients, and those in them classes; `inner`: folder -> those in
    it. As 8863/0, 8863/1, 8864/0 of IDC's patches.
    """
    counts = Counter(chain.from_iterable(inner.values()))
    if not 1 < len(counts) <= len(inner) / 4 or min(counts.values()) < 2:
        return False
    if not all(map(PATIENT.search, inner)) or any(map(PATIENT.search, counts)):
        return False
    no_patients = {"fold", *WORDS["site_column"]}
    return no_patients.isdisjoint(chain.from_iterable(map(words, inner)))


def _classes_at(
    level: int,
    folder: ImageFolder,
    below: Mapping[Path, Sequence[str]],
    names: Sequence[str],
    layout: str,
    *,
    of_patients: bool = False,
) -> Dataset:
    """Images whose class is the folder at a level, and whose first folder may be their patient;
    `below`: image -> its folders.
    """
    items = []
    missing = []
    for image, folders in below.items():
        if len(folders) <= level:
            missing.append(f"{folder.relative(image)}: in no class folder")
            continue
        patient = folders[0] if of_patients else ""
        split = split_above(folder, image)
        items.append(Item((image,), names.index(folders[level]), patient, split))
    return Dataset(
        "classification",
        tuple(items),
        numbered(names),
        f"{layout}: {', '.join(names)}",
        missing=tuple(missing),
    )


def _of_one_class(
    folder: ImageFolder, images: Sequence[Path], name: str, *, confirmed: bool
) -> Dataset:
    if not confirmed:
        _refuse_companions(folder, images)
        _refuse_masks(folder, images[: 2 * SAMPLE_SIZE])
    below = dict.fromkeys(images, (name,))
    return _classes_at(0, folder, below, [name], "a folder per class")


def _without_classes(
    folder: ImageFolder,
    below: Mapping[Path, Sequence[str]],
    names: Sequence[str],
    above: Sequence[str],
    *,
    confirmed: bool,
) -> DataError:
    """Why images have no classes.

    Args:
        below: image -> its folders.
        names: the first of these.
        above: the folders of all images.
    """
    loose = [image for image, folders in below.items() if not folders]
    if names and loose:
        masks = f"; if {names[0]} holds masks, call it masks"
        problem = f"{folder.root}: {folder.relative(loose[0])} is beside the folder {names[0]}"
        if split_above(folder, loose[0]):
            return DataError(
                f"{problem}, and in a folder of a split; if {loose[0].parent.name} is a class, "
                f"rename it; if it is a split, move its images into folders of their classes{masks}"
            )
        return DataError(
            f"{problem}; give this folder, or leave the file out with --leave-out {loose[0].name}"
            f"{masks}"
        )
    companions = {} if confirmed else _companions(below)
    if companions:
        first = folder.relative(next(iter(companions.values())))
        return DataError(
            f"{folder.root}: images have companions {' and '.join(companions)}, as {first} has; if "
            "one is the mask, call it NAME_mask and take the others out; otherwise take them out"
        )
    problem = f"{len(below)} images without masks or classes; supported: {LAYOUTS}"
    no_class = {*IMAGE_WORDS, *WORDS["other"]}
    for name in above[-1:]:
        if not (PATIENT.search(name) or no_class.issuperset(words(name))):
            problem += (
                f"; if all are of the class {name}, give a folder of another class, too; if other "
                "sites have them, --classes with the names of all"
            )
    return DataError(f"{folder.root}: {problem}")


def _first_of(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _refuse_sites(folder: ImageFolder, inner: Mapping[str, Collection[str]]) -> None:
    """Raise DataError if the folders of classes hold folders that may be the classes: some of the
    same name in all, or several without a number; `inner`: class -> the folders in it.
    """
    counts = Counter(chain.from_iterable(inner.values()))
    repeated = [name for name, count in counts.items() if count > 1]
    several = max(map(len, inner.values())) > 1 and not any(map(PATIENT.search, counts))
    if len(counts) > 1 and all(inner.values()) and (repeated or several):
        names = sorted(inner)
        raise DataError(
            f"{folder.root}: {', '.join(names)} hold folders, as {min(repeated or counts)}; if "
            f"{names[0]}, ... are sites, give --site-folders; if they are classes and the folders "
            "in them patients, give --kind classification; if the folders in them are the classes, "
            "move them up"
        )


def _two_levels(
    folder: ImageFolder, inner: Mapping[str, Collection[str]], *, confirmed: bool
) -> list[str]:
    """A line, or a DataError if not `confirmed`, that one folder holds several that may be the
    classes, and another images alone, as dataset/benign, dataset/malignant and figures.

    `inner`: folder -> those in it.
    """
    without = [name for name, folders in inner.items() if not folders]
    for name, folders in sorted(inner.items()):
        if without and len(folders) > 1 and not any(map(_may_be_patient, folders)):
            listed = _first_of(sorted(folders))
            line = (
                f"{name} holds the folders {listed}, {without[0]} holds images; if {listed} are "
                f"the classes, give the folder {name}"
            )
            if not confirmed:
                raise DataError(f"{folder.root}: {line}; otherwise give --kind classification")
            return [line]
    return []


def _refuse_no_classes(folder: ImageFolder, names: Sequence[str]) -> None:
    """Raise DataError for a folder that may hold the images of all classes, or ungraded ones."""
    photographs = [name for name in names if {*words(name)} <= IMAGE_WORDS]
    if photographs:
        raise DataError(
            f"{folder.root}: {is_a_class(photographs[:1], names)} if some folders hold "
            "masks, give a table with --mask-column; otherwise give --kind classification"
        )
    versions = [name for name in names if words(name) and _VERSIONS.issuperset(words(name))]
    without = ungraded(names) or versions
    if without:
        raise DataError(
            f"{folder.root}: {is_a_class(without, names)} if its images are not "
            "graded, take the folder out, and also if they are versions or masks of others; "
            "otherwise give --kind classification"
        )


def _refuse_pictures_of_others(
    folder: ImageFolder, names: Sequence[str], below: Mapping[Path, Sequence[str]]
) -> None:
    """Raise DataError for a class whose pictures have the names of those of several others, each of
    one, as heatmaps do; `below`: image -> its folders.
    """
    pictures = {name: set[str]() for name in names}
    for image, folders in below.items():
        for name in folders[:1]:
            pictures[name].add(stem(image))
    for name, own in pictures.items():
        shared = [own & others for other, others in pictures.items() if other != name]
        of_others = [of_other for of_other in shared if of_other]
        if len(of_others) > 1 and own == set.union(*shared) and len(own) == sum(map(len, shared)):
            raise DataError(
                f"{folder.root}: {is_a_class([name], names)} its pictures have the names of "
                f"theirs; leave it out with --leave-out {shlex.quote(name)} if it holds versions "
                "of them; otherwise give --kind classification"
            )


def _refuse_names_of_splits(folder: ImageFolder, names: Sequence[str]) -> None:
    """Raise DataError if names of classes differ in the word of a split alone, and if some have
    one: auto_test beside 0, 1.
    """
    first_of: dict[tuple[str, ...], str] = {}
    for name in names:
        without = tuple(word for word in words(name) if word not in SPLIT_OF_WORD)
        other = first_of.setdefault(without, name)
        if words(other) != words(name):  # -1 and 1 have the same
            raise DataError(
                f"{folder.root}: {other} and {name} differ in the split alone; "
                "move them into folders train, val and test"
            )
    of_splits = [name for name in names if first_split(name)]
    if 0 < len(of_splits) < len(names):
        raise DataError(
            f"{folder.root}: {is_a_class(of_splits, names)} it is called like a split; leave it "
            f"out with --leave-out {shlex.quote(of_splits[0])}, or rename it, train, val or test "
            "if it is a split"
        )


def _first_of_each(images: Iterable[Path], below: Mapping[Path, Sequence[str]]) -> list[Path]:
    """The first images of each class; `below`: image -> its folders, the class the first."""
    counts: Counter[str] = Counter()
    first = []
    for image in images:
        name = below[image][0]
        counts[name] += 1
        if counts[name] <= SAMPLE_SIZE:
            first.append(image)
    return first


def _refuse_classes_of_splits(
    folder: ImageFolder,
    names: Sequence[str],
    images: Iterable[Path],
    below: Mapping[Path, Sequence[str]],
) -> None:
    """Raise DataError if each class is in one of several splits alone; `below`: image -> its
    folders, the class the first.
    """
    pairs = {(below[image][0], split_above(folder, image)) for image in images}
    if len(pairs) == len(names) and len({split for _, split in pairs} - {""}) > 1:
        raise DataError(
            f"{folder.root}: are the folders {_first_of(names)} the classes, though each is in "
            "one split alone? if so, give --kind classification; otherwise give a table with the "
            "classes"
        )


def _refuse_masks(folder: ImageFolder, images: Sequence[Path]) -> None:
    """Raise DataError if some of the images, and not all, look like masks."""
    masks = [image for image in images if are_masks([image])]
    others = [image for image in images if image not in masks]
    if masks and others:
        raise DataError(
            f"{folder.root}: {folder.relative(masks[0])} has two values, as masks have, beside "
            f"{folder.relative(others[0])}; if it is a mask, call it NAME_mask, or give a table "
            "with --mask-column; otherwise give --kind classification"
        )


def _refuse_companions(folder: ImageFolder, images: Iterable[Path]) -> None:
    """Raise DataError for pictures with `_companions`."""
    for kind, picture in _companions(images).items():
        raise DataError(
            f"{folder.root}: images have companions {kind}, as {folder.relative(picture)} has; "
            "take these out, or if they are masks, call them NAME_mask, if images of their own, "
            "give --kind classification"
        )


def _companions(images: Iterable[Path]) -> dict[str, Path]:
    """Kind of companions that nearly every picture has, or nearly every one of a folder -> the
    first picture with one: a file called like it and a word, as overlays are, or one of its name in
    a folder below, as thumbnails are.
    """
    by_name = {(image.parent, stem(image)): image for image in images}
    companions: defaultdict[str, list[Path]] = defaultdict(list)  # kind -> pictures that have one
    found = set()
    for (parent, name), image in by_name.items():
        picture = by_name.get((parent.parent, name))
        if picture:
            companions[f"in {parent.name}/"].append(picture)
            found.add(image)
        for match in re.finditer("[ _.-]+", name):
            picture = by_name.get((parent, name[: match.start()]))
            end = name[match.start() :]
            if picture and not end.strip(" _.-").isdecimal():
                companions[f"called NAME{end}"].append(picture)
                found.add(image)
    alone = Counter(image.parent for image in by_name.values() if image not in found)
    of_most = {}
    for kind, listed in companions.items():
        nearly_all = len(listed) > NEARLY_ALL * alone.total()
        for parent, count in Counter(picture.parent for picture in listed).items():
            of_folder = count >= SAMPLE_SIZE and count > NEARLY_ALL * alone[parent]
            nearly_all = nearly_all or of_folder
        if nearly_all:
            of_most[kind] = min(listed)
    return of_most


def _refuse_patients(
    folder: ImageFolder, names: Sequence[str], below: Mapping[Path, Sequence[str]]
) -> None:
    """Raise DataError if the folders of all classes hold volumes of the same names; `below`: image
    -> its folders.
    """
    volumes = {name: set[str]() for name in names}
    for image, folders in below.items():
        if folders and suffix(image) in NIFTI:
            volumes[folders[0]].add(image.name)
    same = sorted(set.intersection(*volumes.values()))
    if len(same) > 1:
        raise DataError(
            f"{folder.root}: each of {names[0]}, ... holds {', '.join(same)}, as folders of "
            "patients do; call masks NAME_seg, or give --structure NAME for each, or a table with "
            "--mask-column; if the folders are classes, give --kind classification"
        )


def _refuse_masks_of_classes(
    folder: ImageFolder, names: Sequence[str], below: Mapping[Path, Sequence[str]]
) -> None:
    """Raise DataError if the folders of two classes hold pictures of the same names, or those of
    one of them with words behind, and these have few values; `below`: image -> its folders.
    """
    pictures: dict[str, dict[tuple[str, ...], Path]] = {name: {} for name in names}
    for image, folders in below.items():
        if folders:
            inner = (*folders[1:], stem(image))
            pictures[folders[0]][inner] = image
    values: dict[str, list[int]] = {}  # class -> how many its first pictures have
    masks_of = defaultdict(list)  # class of images -> those that may be its masks
    for of_masks, others in permutations(names, 2):
        if len(pictures[of_masks]) < 2 or not _are_named_after(
            pictures[of_masks], pictures[others]
        ):
            continue
        for name in (of_masks, others):
            if name not in values:
                sample = sorted(pictures[name])[:SAMPLE_SIZE]
                values[name] = [count_values(pictures[name][inner]) for inner in sample]
        has_few = min(values[of_masks]) > 1 and max(values[of_masks]) <= MAX_CLASSES
        if has_few and min(values[others]) > MAX_CLASSES:
            masks_of[others].append(of_masks)
    for images, (masks, *more) in masks_of.items():
        remedy = f"rename {masks} masks, and {images} images"
        if more:
            remedy += ", and leave the other masks out:"
            remedy += "".join(f" --leave-out {shlex.quote(name)}" for name in more)
        raise DataError(
            f"{folder.root}: the pictures in {', '.join((masks, *more))} have few values and the "
            f"names of those in {images}; if they are masks, {remedy}; if all are classes, give "
            "--kind classification"
        )


def _are_named_after(
    masks: Collection[tuple[str, ...]], images: Collection[tuple[str, ...]]
) -> bool:
    """Whether masks have the names of images, which other words may follow, as 106_1 and 106."""
    for *folders, name in masks:
        ends = [len(name), *(match.start() for match in re.finditer("[ _.-]", name))]
        if not any((*folders, name[:end]) in images for end in ends):
            return False
    return True


def _refuse_other_groups(folder: ImageFolder, names: Sequence[str], images: Sequence[Path]) -> None:
    """Raise DataError if the folders seem to be patients, years, parts of an export or eyes."""
    numbered_of = defaultdict(list)  # class without its number -> folders
    for name in names:
        numbered_of[re.sub(r"[\d_. -]*\d[\d_. -]*$", "", name)].append(name)
    if len(numbered_of) > 1 and min(map(len, numbered_of.values())) > 1:
        classes = sorted_labels(numbered_of)
        option = _patient_option(folder, images[0], names, below=1)
        raise DataError(
            f"{folder.root}: are {_first_of(names)} patients of the classes "
            f"{', '.join(classes)}? if so, move them into folders of these names, and give "
            f"{option}; if they are parts of these classes, move what is in "
            "them into such folders; if each is a class, give --kind classification"
        )
    most = min(MAX_CLASSES, max(4, len(images) / _IMAGES_OF_CLASS))
    if len(names) > most or len(names) == len(images):
        raise DataError(
            f"{folder.root}: {len(names)} folders ({names[0]}, ...) for {len(images)} images are "
            "many classes; if they are classes and no patients, give --kind classification; if "
            "they are patients, give a table with the classes"
        )
    stems = {re.sub(r"[\d_.-]+", " ", name).lower() for name in names}
    numbers = [int(number) for name in names for number in re.findall(r"\d+", name)]
    are_numbers = stems <= {"", " "} and len(names) <= _MOST_GRADES and max(numbers) < 100
    of_grades = {*words(" ".join(stems))} & _GRADES or are_numbers
    numbered_alike = bool(numbers) and len(stems) == 1 and not of_grades
    if numbered_alike or {name.lower() for name in names} <= {*WORDS["eye"]}:
        raise DataError(
            f"{folder.root}: are the folders {', '.join(names[:3])} the classes? if so, give "
            "--kind classification; otherwise give a table with the classes"
        )
