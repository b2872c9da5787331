"""Sites whose images have the same classes and the same channels."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

from medflare.core.errors import DataError
from medflare.data.reading import NIFTI, PICTURES, suffix
from medflare.preparation.dataset_import.folders import Dataset
from medflare.preparation.dataset_import.names import numbered, refuse_variants, sorted_labels


def with_all_classes(datasets: Mapping[str, Dataset], root: Path) -> dict[str, Dataset]:
    """The sites' images with one list of classes, those of all sites.

    DataError if one site has masks and another classes, or if the findings of images differ.
    """
    first_site, first = next(iter(datasets.items()))
    names: set[str] = set()
    differ = False
    for site, dataset in datasets.items():
        if dataset.kind != first.kind:
            raise DataError(
                f"{root}: {first_site} is read as {first.kind}, {site} as {dataset.kind}; "
                "give --kind, or import them apart"
            )
        if dataset.kind == "classification":
            names.update(dataset.labels.values())
        if names and dataset.labels != first.labels:
            differ = True
            if any(isinstance(item.label, list) for item in dataset.items):
                raise DataError(
                    f"{root}: {first_site} has the findings {_names_of_labels(first)}, {site} "
                    f"{_names_of_labels(dataset)}; choose those of all sites with --label-column, "
                    "or import them apart"
                )
    if not differ:
        return _with_findings(datasets)
    names_of_all = sorted_labels(names)
    refuse_variants(names_of_all, f"{root}: the sites' classes")
    return {site: _renumbered(dataset, names_of_all) for site, dataset in datasets.items()}


def _with_findings(datasets: Mapping[str, Dataset]) -> dict[str, Dataset]:
    """The sites' images, those of all with lists of 0 and 1 if one site has them: where each image
    has one finding by chance, they are read as classes.
    """
    items_of_sites = [dataset.items for dataset in datasets.values()]
    lists = any(isinstance(item.label, list) for item in chain(*items_of_sites) if not item.masks)
    if not lists:
        return dict(datasets)
    complete = {}
    for site, dataset in datasets.items():
        items = []
        for item in dataset.items:
            if isinstance(item.label, int):
                findings = [0] * len(dataset.labels)
                findings[item.label] = 1
                item = replace(item, label=findings)
            items.append(item)
        complete[site] = dataset.with_items(items)
    return complete


def with_classes(dataset: Dataset, classes: Sequence[str], root: Path) -> Dataset:
    """The images with these classes, of all sites, of which some may lack; DataError for another
    class, and for masks or findings.
    """
    if not classes:
        return dataset
    if any(not isinstance(item.label, int) for item in dataset.items):
        raise DataError(f"{root}: --classes is for images of one class each, these have others")
    others = [name for name in dataset.labels.values() if name not in classes]
    if others:
        raise DataError(f"{root}: images are of the class {others[0]}, which --classes lacks")
    refuse_variants(classes, f"{root}: the sites' classes")
    return _renumbered(dataset, classes)


def with_all_channels(datasets: Mapping[str, Dataset], root: Path) -> dict[str, Dataset]:
    """The sites' images with the same channels in the same order, None for one without a file.

    DataError for sites whose images have all channels in one file, in different orders.
    """
    orders = {site: list(dataset.channels.values()) for site, dataset in datasets.items()}
    names = sorted(set(chain(*orders.values())))
    if not all(orders.values()) or len({*map(tuple, orders.values())}) == 1:
        return dict(datasets)
    complete = {}
    for site, dataset in datasets.items():
        lacking = sorted({*names} - {*orders[site]})
        items = []
        for item in dataset.items:
            if len(item.files) != len(orders[site]):
                raise DataError(
                    f"{root}: sites name different channels, {site} {', '.join(orders[site])}; "
                    "store the same ones in the same order, or a file for each channel"
                )
            file_of = dict(zip(orders[site], item.files, strict=True))
            items.append(replace(item, files=tuple(map(file_of.get, names))))
        line = f"no file of channel {', '.join(lacking)} (null in the datalist)"
        notes = [line] if lacking else []
        complete[site] = dataset.with_items(items, *notes, channels=numbered(names))
    return complete


def mixed_warning(datasets: Mapping[str, Dataset]) -> str:
    """A line about sites of volumes and sites of pictures; "" if all have one of them."""
    volumes = []
    pictures = []
    for site, dataset in datasets.items():
        ending = suffix(dataset.items[0].first)
        if ending in NIFTI:
            volumes.append(site)
        elif ending in PICTURES:
            pictures.append(site)
    if not volumes or not pictures:
        return ""
    found = f"volumes are at {', '.join(volumes)}, pictures at {', '.join(pictures)}"
    return f"{found}; a task is for one of them, so import them apart"


def _renumbered(dataset: Dataset, names: Sequence[str]) -> Dataset:
    """The images with these names of classes."""
    items = []
    for item in dataset.items:
        items.append(replace(item, label=names.index(dataset.labels[str(item.label)])))
    lacking = [name for name in names if name not in dataset.labels.values()]
    notes = [f"no image of {', '.join(lacking)}"] if lacking else []
    return dataset.with_items(items, *notes, labels=numbered(names))


def _names_of_labels(dataset: Dataset) -> str:
    names = []
    for key, value in dataset.labels.items():
        names.append(str(key if isinstance(value, int) else value))
    return ", ".join(names) or dataset.structure or "nothing"
