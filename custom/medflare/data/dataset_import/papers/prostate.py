"""Prostate MRI: the six sites of SAML (Liu et al., MICCAI 2020), five of them for PRR, and FedSM's own six."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Final

from medflare.core.errors import DataError
from medflare.data.dataset_import.folders import Item, pair_masks, scan_folder
from medflare.data.dataset_import.papers.preparing import Download, expected, files_in

# Site -> the names of its folder; the release was renamed once, ISBI and ISBI_1.5 are the two hospitals of NCI-ISBI 2013.
_FOLDERS: Final = {
    "RUNMC": ("RUNMC", "ISBI"),
    "BMC": ("BMC", "ISBI_1.5"),
    "I2CVB": ("I2CVB",),
    "UCL": ("UCL",),
    "BIDMC": ("BIDMC",),
    "HK": ("HK",),
}
_FEDSM: Final = ("I2CVB", "MSD", "NCI_ISBI_3T", "NCI_ISBI_Dx", "Promise12", "PROSTATEx")  # clients 1 ... 6
PRR_SITES: Final = ("RUNMC", "BMC", "UCL", "BIDMC", "HK")
_MARK: Final = "_segmentation"


def find_saml(root: Path, download: Download, sites: Iterable[str] = _FOLDERS) -> list[Item]:
    """CaseNN.nii.gz with CaseNN_segmentation.nii.gz beside it, a folder for each site; case numbers are of one site only."""
    items = []
    for site in sites:
        volumes = files_in(expected(root, *_FOLDERS[site], download=download), (".nii.gz", ".nii"))
        masks = {path.name.lower().replace(_MARK, ""): path for path in volumes if _MARK in path.name.lower()}
        for volume in volumes:
            if _MARK not in volume.name.lower():
                if volume.name.lower() not in masks:
                    raise DataError(f"{volume}: no file {volume.name.replace('.nii', f'{_MARK}.nii')}; unpack the download again")
                items.append(Item((volume,), masks[volume.name.lower()], f"{site} {volume.name.partition('.')[0]}", "", site))
    return items


def find_fedsm(root: Path, download: Download) -> list[Item]:
    """The volumes of FedSM's six sources, with masks by name."""
    dataset = expected(root, "dataset", download=download)
    items = []
    for site in _FEDSM:
        pairs = pair_masks(scan_folder(expected(dataset, site, site.upper(), download=download)))
        if pairs.missing:
            raise DataError(f"{dataset / site}: {len(pairs.missing)} incomplete, the first: {pairs.missing[0]}; convert the source again")
        items += [replace(item, patient=f"{site} {item.first.name}", split="", site=site) for item in pairs.items]
    return items
