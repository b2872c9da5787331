"""Images whose class is the name of their folder, and what else such folders may be."""

import os
import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
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
    beginnings,
    composed,
    first_split,
    is_a_class,
    numbered,
    refuse_variants,
    shortened,
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
    tree = _tree_of(folder, images, confirmed)
    names = tree.names
    layout = "a folder per class"
    of_sites = [name for name in classes_of_sites if name in tree.above]
    if of_sites and not {*names} & {*classes_of_sites}:
        tree = replace(tree, below=dict.fromkeys(images, of_sites[:1]))
        if not confirmed:
            tree.refuse_companions()
            tree.refuse_masks()
        return tree.dataset(0, of_sites[:1], layout)
    if len(names) < 2:
        raise tree.without_classes()
    dataset = tree.by_inner_folders()
    if dataset is not None:
        return dataset
    tree.refuse_repeated()
    notes = tree.two_levels()
    _refuse_names(folder, names)
    if not confirmed:
        tree.refuse_sites()
        tree.refuse_patients()
        _refuse_no_classes(folder, names)
        tree.refuse_pictures_of_others()
        tree.refuse_companions()
        tree.refuse_masks()
        tree.refuse_masks_of_classes()
        tree.refuse_other_groups()
        tree.refuse_classes_of_splits()
    return replace(tree.dataset(0, names, layout), notes=tuple(notes))


def _tree_of(folder: ImageFolder, images: Sequence[Path], confirmed: bool) -> "_Tree":
    """The images below the folder that all share, without folders that all have in it."""
    common = common_folder(images)
    below = _once({image: folders_below(common, image) for image in images})
    shared = Path(os.path.commonpath(["/".join(folders) for folders in below.values()])).parts
    above = [*folders_below(folder.root, common / "image"), *shared]
    inner = {image: folders[len(shared) :] for image, folders in below.items()}
    return _Tree(folder, inner, above, confirmed)


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


@dataclass(frozen=True)
class _Tree:
    """Images below folders that may be their classes."""

    folder: ImageFolder
    below: Mapping[Path, Sequence[str]]  # image -> its folders, of which the first may be its class
    above: Sequence[str]  # the folders of all images
    confirmed: bool  # by --kind classification

    @cached_property
    def images(self) -> dict[str, list[Path]]:
        """Class -> its images."""
        images = defaultdict(list)
        for image, folders in self.below.items():
            if folders:
                images[folders[0]].append(image)
        return images

    @cached_property
    def inner(self) -> dict[str, set[str]]:
        """Class -> the folders in it."""
        inner = {}
        for name, images in self.images.items():
            inner[name] = set[str]().union(*(self.below[image][1:2] for image in images))
        return inner

    @property
    def names(self) -> list[str]:
        """The classes in the order of their numbers."""
        return sorted_labels(self.images)

    def dataset(
        self, level: int, names: Sequence[str], layout: str, *, of_patients: bool = False
    ) -> Dataset:
        """Images whose class is the folder at a level, and whose first folder may be their
        patient.
        """
        items = []
        missing = []
        for image, folders in self.below.items():
            if len(folders) <= level:
                missing.append(f"{self.folder.relative(image)}: in no class folder")
                continue
            patient = folders[0] if of_patients else ""
            split = split_above(self.folder, image)
            items.append(Item((image,), names.index(folders[level]), patient, split))
        return Dataset(
            "classification",
            tuple(items),
            numbered(names),
            f"{layout}: {', '.join(names)}",
            missing=tuple(missing),
        )

    def by_inner_folders(self) -> Dataset | None:
        """The images by class, if the classes are folders in those of patients, years or scanners;
        DataError unless this is confirmed.
        """
        names = sorted_labels(set.union(*self.inner.values()))
        outer = self.names
        shared = sorted_labels(set.intersection(*self.inner.values()))
        of_patients = self.hold_classes()
        patients_in_each = all(map(_may_be_patient, shared))
        notes: list[str] = []
        if of_patients:
            first = min(outer)
            layout = "folders of patients, with a folder per class"
            problem = (
                f"{first}, ... hold the folders {', '.join(names)}; if these are classes, and "
                f"{first}, ... patients, give --kind classification; if {first}, ... are sites, "
                "give --site-folders; otherwise keep one of the folders in each, or rename them"
            )
        elif len(shared) < 2 or (self.confirmed and patients_in_each):
            return None
        else:
            layout = f"a folder per class in each of {shortened(outer)}"
            inside = shortened(shared)
            remedy = "if they are splits, rename them train, val or test"
            if self.have_same_names():
                of_copies = (
                    f"if {shortened(outer)} hold the same pictures, as of two sizes, leave one out "
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
                    remedy += (
                        f"; if they are patients and {inside} the classes, give --kind "
                        f"classification {self.patient_option(0)}; if {inside} are versions of one "
                        f"picture, leave one out with --leave-out {shlex.quote(shared[0])}"
                    )
                remedy += (
                    f"; if {outer[0]}, ... are classes, move the images in each out of its "
                    "folders; if only the folders in them are classes, give"
                )
            problem = (
                f"each of {shortened(outer)} holds the folders {inside}; if {outer[0]}, ... are "
                f"sites, give --site-folders; {remedy} --kind classification"
            )
        if not self.confirmed:
            swapped = {}
            for image, folders in self.below.items():
                if len(folders) > 1:
                    swapped[image] = [folders[1], folders[0], *folders[2:]]
            replace(self, below=swapped).refuse_masks_of_classes()
            raise DataError(f"{self.folder.root}: {problem}{self.mask_option()}")
        _refuse_names(self.folder, names)
        dataset = self.dataset(1, names, layout, of_patients=of_patients)
        return replace(dataset, notes=tuple(notes))

    def hold_classes(self) -> bool:
        """Whether folders may be of patients, and those in them classes, as 8863/0, 8863/1, 8864/0
        of IDC's patches.
        """
        counts = Counter(chain.from_iterable(self.inner.values()))
        if not 1 < len(counts) <= len(self.inner) / 4 or min(counts.values()) < 2:
            return False
        if not all(map(PATIENT.search, self.inner)) or any(map(PATIENT.search, counts)):
            return False
        no_patients = {"fold", *WORDS["site_column"]}
        return no_patients.isdisjoint(chain.from_iterable(map(words, self.inner)))

    def mask_option(self) -> str:
        """The option for folders that all hold a volume and its mask under a few names; "" if the
        images have other names.
        """
        names = sorted({stem(image) for image in self.below})
        are_volumes = all(suffix(image) in NIFTI for image in self.below)
        if not are_volumes or not 1 < len(names) <= len(self.below) / 4:
            return ""
        return f"; if one of {', '.join(names)} is the mask of an image, give --structure NAME"

    def have_same_names(self) -> bool:
        """Whether nearly all images have the name of one in another first folder."""
        counts = Counter((*folders[1:], stem(image)) for image, folders in self.below.items())
        repeated = sum(count for count in counts.values() if count > 1)
        return repeated > NEARLY_ALL * len(self.below)

    def patient_option(self, below: int) -> str:
        """The option whose patients are the folders that may be classes, or so many levels
        below.
        """
        image = next(filter(self.below.get, self.below))
        parts = composed(self.folder.relative(image)).split("/")
        level = min(parts.index(name) for name in self.names if name in parts) + below
        return f"--patient '^{'[^/]+/' * level}([^/]+)/'"

    def without_classes(self) -> DataError:
        """Why images have no classes."""
        root = self.folder.root
        loose = [image for image, folders in self.below.items() if not folders]
        if self.names and loose:
            name = self.names[0]
            masks = f"; if {name} holds masks, call it masks"
            problem = f"{root}: {self.folder.relative(loose[0])} is beside the folder {name}"
            if split_above(self.folder, loose[0]):
                return DataError(
                    f"{problem}, and in a folder of a split; if {loose[0].parent.name} is a class, "
                    "rename it; if it is a split, move its images into folders of their "
                    f"classes{masks}"
                )
            return DataError(
                f"{problem}; give this folder, or leave the file out with --leave-out "
                f"{loose[0].name}{masks}"
            )
        companions = {} if self.confirmed else _companions(self.below)
        if companions:
            first = self.folder.relative(next(iter(companions.values())))
            return DataError(
                f"{root}: images have companions {' and '.join(companions)}, as {first} has; if "
                "one is the mask, call it NAME_mask, if each is of a structure, give --structure, "
                "as --structure lung for NAME_lung, for each; if they are of several objects, "
                "unite them; take the others out"
            )
        problem = f"{len(self.below)} images without masks or classes; supported: {LAYOUTS}"
        no_class = {*IMAGE_WORDS, *WORDS["other"]}
        for name in self.above[-1:]:
            if not (PATIENT.search(name) or no_class.issuperset(words(name))):
                problem += (
                    f"; if all are of the class {name}, give a folder of another class, too; if "
                    "other sites have them, --classes with the names of all"
                )
        return DataError(f"{root}: {problem}")

    def refuse_sites(self) -> None:
        """Raise DataError if the folders of classes hold folders that may be the classes: some of
        the same name in all, or several without a number.
        """
        inner = self.inner
        counts = Counter(chain.from_iterable(inner.values()))
        repeated = [name for name, count in counts.items() if count > 1]
        several = max(map(len, inner.values())) > 1 and not any(map(PATIENT.search, counts))
        if len(counts) > 1 and all(inner.values()) and (repeated or several):
            names = sorted(inner)
            raise DataError(
                f"{self.folder.root}: {', '.join(names)} hold folders, as "
                f"{min(repeated or counts)}; if {names[0]}, ... are sites, give --site-folders; if "
                "they are classes and the folders in them patients, give --kind classification; if "
                "the folders in them are the classes, move them up"
            )

    def refuse_repeated(self) -> None:
        """Raise DataError for a folder of a class that holds folders of classes."""
        for name in self.names:
            deeper = chain.from_iterable(self.below[image][1:] for image in self.images[name])
            same = sorted({*self.names} & {*deeper})
            if same == [name]:
                raise DataError(
                    f"{self.folder.root}: {name} holds {name}; move what is in the inner one up"
                )
            if same:
                raise DataError(
                    f"{self.folder.root}: {name} repeats the class folders {' and '.join(same)}; "
                    f"if {name} is a split, rename it train, val or test; otherwise take it out"
                )

    def two_levels(self) -> list[str]:
        """A line, or a DataError unless confirmed, that one folder holds several that may be the
        classes, and another images alone, as dataset/benign, dataset/malignant and figures.
        """
        without = [name for name, folders in self.inner.items() if not folders]
        for name, folders in sorted(self.inner.items()):
            if without and len(folders) > 1 and not any(map(_may_be_patient, folders)):
                listed = shortened(sorted(folders))
                line = (
                    f"{name} holds the folders {listed}, {without[0]} holds images; if {listed} "
                    f"are the classes, give the folder {name}"
                )
                if not self.confirmed:
                    raise DataError(
                        f"{self.folder.root}: {line}; otherwise give --kind classification"
                    )
                return [line]
        return []

    def refuse_companions(self) -> None:
        """Raise DataError for pictures with `_companions`."""
        for kind, picture in _companions(self.below).items():
            raise DataError(
                f"{self.folder.root}: images have companions {kind}, as "
                f"{self.folder.relative(picture)} has; take these out, or if they are masks, call "
                "them NAME_mask or give --structure, as --structure lung for NAME_lung, if images "
                "of their own, --kind classification"
            )

    def refuse_pictures_of_others(self) -> None:
        """Raise DataError for a class of which every picture has the name of one in exactly one
        other class, and these are two or more, as of heatmaps. Of one other class see
        `refuse_masks_of_classes`.
        """
        pictures = {name: set(map(stem, images)) for name, images in self.images.items()}
        for name, of_class in pictures.items():
            shared = [of_class & other for key, other in pictures.items() if key != name]
            shared = [both for both in shared if both]
            once = len(of_class) == sum(map(len, shared))
            if len(shared) > 1 and of_class == set.union(*shared) and once:
                raise DataError(
                    f"{self.folder.root}: {is_a_class([name], self.names)} its pictures have the "
                    f"names of theirs; leave it out with --leave-out {shlex.quote(name)} if it "
                    "holds versions of them; otherwise give --kind classification"
                )

    def refuse_masks(self) -> None:
        """Raise DataError if some of the first images, and not all, look like masks."""
        first = [image for image, folders in self.below.items() if folders][: 2 * SAMPLE_SIZE]
        for images in self.images.values():
            first += images[:SAMPLE_SIZE]
        masks = [image for image in dict.fromkeys(first) if are_masks([image])]
        others = [image for image in first if image not in masks]
        if masks and others:
            raise DataError(
                f"{self.folder.root}: {self.folder.relative(masks[0])} has two values, as masks "
                f"have, beside {self.folder.relative(others[0])}; if it is a mask, call it "
                "NAME_mask, or give --structure NAME for each structure, or a table with "
                "--mask-column; otherwise give --kind classification"
            )

    def refuse_masks_of_classes(self) -> None:
        """Raise DataError if the folders of two classes hold pictures of the same names, or those
        of one of them with words behind, and these have few values.
        """
        pictures = {}
        for name, images in self.images.items():
            pictures[name] = {(*self.below[image][1:], stem(image)): image for image in images}

        @cache
        def values_of(name: str) -> list[int]:
            return [
                count_values(pictures[name][inner])
                for inner in sorted(pictures[name])[:SAMPLE_SIZE]
            ]

        masks_of = defaultdict(list)  # class of images -> those that may be its masks
        for masks, others in permutations(self.names, 2):
            named_after = _are_named_after(pictures[masks], pictures[others])
            if len(pictures[masks]) < 2 or not named_after:
                continue
            has_few = min(values_of(masks)) > 1 and max(values_of(masks)) <= MAX_CLASSES
            if has_few and min(values_of(others)) > MAX_CLASSES:
                masks_of[others].append(masks)
        for name, (masks, *more) in masks_of.items():
            remedy = f"rename {masks} masks, and {name} images"
            if more:
                remedy += ", and leave the other masks out:"
                remedy += "".join(f" --leave-out {shlex.quote(other)}" for other in more)
            raise DataError(
                f"{self.folder.root}: the pictures in {', '.join((masks, *more))} have few values "
                f"and the names of those in {name}; if they are masks, {remedy}; if all are "
                "classes, give --kind classification"
            )

    def refuse_patients(self) -> None:
        """Raise DataError if the folders of all classes hold volumes of the same names."""
        volumes = []
        for images in self.images.values():
            volumes.append({image.name for image in images if suffix(image) in NIFTI})
        same = sorted(set.intersection(*volumes))
        if len(same) > 1:
            raise DataError(
                f"{self.folder.root}: each of {self.names[0]}, ... holds {', '.join(same)}, as "
                "folders of patients do; call masks NAME_seg, or give --structure NAME for each, "
                "or a table with --mask-column; if the folders are classes, give --kind "
                "classification"
            )

    def refuse_classes_of_splits(self) -> None:
        """Raise DataError if each class is in one of several splits alone."""
        splits = set()
        for images in self.images.values():
            of_class = {split_above(self.folder, image) for image in images}
            if len(of_class) > 1:
                return
            splits |= of_class
        if len(splits - {""}) > 1:
            raise DataError(
                f"{self.folder.root}: are the folders {shortened(self.names)} the classes, though "
                "each is in one split alone? if so, give --kind classification; otherwise give a "
                "table with the classes"
            )

    def refuse_other_groups(self) -> None:
        """Raise DataError if the folders seem to be patients, years, parts of an export or eyes."""
        root = self.folder.root
        names = self.names
        numbered_of = defaultdict(list)  # class without its number -> folders
        for name in names:
            numbered_of[re.sub(r"[\d_. -]*\d[\d_. -]*$", "", name)].append(name)
        if len(numbered_of) > 1 and min(map(len, numbered_of.values())) > 1:
            classes = ", ".join(sorted_labels(numbered_of))
            raise DataError(
                f"{root}: are {shortened(names)} patients of the classes {classes}? if so, move "
                f"them into folders of these names, and give {self.patient_option(1)}; if they are "
                "parts of these classes, move what is in them into such folders; if each is a "
                "class, give --kind classification"
            )
        images = sum(map(len, self.images.values()))
        most = min(MAX_CLASSES, max(4, images / _IMAGES_OF_CLASS))
        if len(names) > most or len(names) == images:
            raise DataError(
                f"{root}: {len(names)} folders ({names[0]}, ...) for {images} images are many "
                "classes; if they are classes and no patients, give --kind classification; if they "
                "are patients, give a table with the classes"
            )
        stems = {re.sub(r"[\d_.-]+", " ", name).lower() for name in names}
        numbers = [int(number) for name in names for number in re.findall(r"\d+", name)]
        are_numbers = stems <= {"", " "} and len(names) <= _MOST_GRADES and max(numbers) < 100
        of_grades = {*words(" ".join(stems))} & _GRADES or are_numbers
        numbered_alike = bool(numbers) and len(stems) == 1 and not of_grades
        if numbered_alike or {name.lower() for name in names} <= {*WORDS["eye"]}:
            raise DataError(
                f"{root}: are the folders {shortened(names)} the classes? if so, give --kind "
                "classification; otherwise give a table with the classes"
            )


def _may_be_patient(folder: str) -> bool:
    return bool(PATIENT.search(folder)) or not {*words(folder)}.isdisjoint(_PATIENT_WORDS)


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


def _refuse_names(folder: ImageFolder, names: Sequence[str]) -> None:
    """Raise DataError if names of classes are written in two ways, or differ in the word of a split
    alone, and if some have one: auto_test beside 0, 1.
    """
    refuse_variants(names, f"{folder.root}: the class folders")
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
        for beginning in beginnings(name)[1:]:
            picture = by_name.get((parent, beginning))
            end = name.removeprefix(beginning)
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


def _are_named_after(
    masks: Collection[tuple[str, ...]], images: Collection[tuple[str, ...]]
) -> bool:
    """Whether masks have the names of images, which other words may follow, as 106_1 and 106."""
    for *folders, name in masks:
        if not any((*folders, beginning) in images for beginning in beginnings(name)):
            return False
    return True
