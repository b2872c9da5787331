"""Prostate MRI: the six sites of SAML (Liu et al., MICCAI 2020), five of them for PRR, and FedSM's own six."""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from medflare.core.errors import DataError
from medflare.data.dataset_import.folders import Item, pair_masks, scan_folder
from medflare.data.dataset_import.papers.preparing import (
    IMAGES,
    NO_TEST,
    SHARES_50_25_25,
    SHARES_70_10_20,
    WITHOUT_TEST,
    Download,
    Preparation,
    expected,
    files_in,
)

# Site -> the names of its folder; the release was renamed once, ISBI and ISBI_1.5 are the two hospitals of NCI-ISBI 2013.
_FOLDERS: Final = {
    "RUNMC": ("RUNMC", "ISBI"),
    "BMC": ("BMC", "ISBI_1.5"),
    "I2CVB": ("I2CVB",),
    "UCL": ("UCL",),
    "BIDMC": ("BIDMC",),
    "HK": ("HK",),
}
_VOLUMES: Final = {"RUNMC": 30, "BMC": 30, "I2CVB": 19, "UCL": 13, "BIDMC": 12, "HK": 12}
_SAML: Final = Download("RUNMC, BMC, I2CVB, UCL, BIDMC, HK", "https://liuquande.github.io/SAML/")
_FLARE: Final = Download("dataset (what NVFlare's examples/advanced/prostate/data_preparation makes)", "https://github.com/NVIDIA/NVFlare")
_FEDSM: Final = ("I2CVB", "MSD", "NCI_ISBI_3T", "NCI_ISBI_Dx", "Promise12", "PROSTATEx")  # clients 1 ... 6
_PRR: Final = ("RUNMC", "BMC", "UCL", "BIDMC", "HK")
_MARK: Final = "_segmentation"
_LICENCE: Final = "those of NCI-ISBI 2013, I2CVB and PROMISE12; research only"
_SLICES: Final = "volumes are cut along their third axis when they are read; the paper's code feeds three neighbouring slices at once"


def find_saml(root: Path, sites: Iterable[str] = _FOLDERS) -> list[Item]:
    """CaseNN.nii.gz with CaseNN_segmentation.nii.gz beside it, a folder for each site; case numbers are of one site only."""
    items = []
    for site in sites:
        volumes = files_in(expected(root, *_FOLDERS[site], download=_SAML), (".nii.gz", ".nii"))
        masks = {path.name.lower().replace(_MARK, ""): path for path in volumes if _MARK in path.name.lower()}
        for volume in volumes:
            if _MARK not in volume.name.lower():
                if volume.name.lower() not in masks:
                    raise DataError(f"{volume}: no file {volume.name.replace('.nii', f'{_MARK}.nii')}; unpack the download again")
                items.append(Item((volume,), masks[volume.name.lower()], f"{site} {volume.name.partition('.')[0]}", "", site))
    return items


def find_fedsm(root: Path) -> list[Item]:
    """The volumes of FedSM's six sources, with masks by name."""
    dataset = expected(root, "dataset", download=_FLARE)
    items = []
    for site in _FEDSM:
        pairs = pair_masks(scan_folder(expected(dataset, site, site.upper(), download=_FLARE)))
        if pairs.missing:
            raise DataError(f"{dataset / site}: {len(pairs.missing)} incomplete, the first: {pairs.missing[0]}; convert the source again")
        items += [replace(item, patient=f"{site} {item.first.name}", split="", site=site) for item in pairs.items]
    return items


PREPARATIONS: Final = (
    Preparation(
        name="prostate",
        title="Prostate MRI: T2-weighted volumes of six sites",
        papers="IOP-FL, Tables I-III; GRACE, Tables 1-4",
        licence=_LICENCE,
        downloads=(_SAML,),
        find=find_saml,
        kind="segmentation",
        unit="volumes",
        shares={"training": 0.84, "validation": 0.16},  # of IOP-FL's 64, 16 and 20 %
        splits=WITHOUT_TEST,
        counts={site: {IMAGES: count} for site, count in _VOLUMES.items()},
        source="IOP-FL, Sec. IV-A: 12, 12, 30, 30, 13 and 19 volumes; sites by the released data",
        notes=(NO_TEST, _SLICES, "GRACE's code splits by slice, so its patients are on both sides; here they are not"),
    ),
    Preparation(
        name="prostate_prr",
        title="Prostate MRI: T2-weighted volumes of PRR's five clients",
        papers="PRR, Table III",
        licence=_LICENCE,
        downloads=(_SAML,),
        find=partial(find_saml, sites=_PRR),
        kind="segmentation",
        unit="volumes",
        shares=SHARES_70_10_20,
        counts={site: {IMAGES: _VOLUMES[site]} for site in _PRR},
        source="PRR, Table I",
        notes=("volumes are cut along their third axis when they are read",),
    ),
    Preparation(
        name="prostate_fedsm",
        title="Prostate MRI: FedSM's six sources",
        papers="FedSM, Table 4",
        licence="of I2CVB, Medical Segmentation Decathlon, NCI-ISBI 2013, PROMISE12 and PROSTATEx, each its own",
        downloads=(_FLARE,),
        find=find_fedsm,
        kind="segmentation",
        unit="volumes",
        shares=SHARES_50_25_25,
        notes=("Table 2 of the paper counts slices that show the prostate, not volumes, so there is no count to compare",),
    ),
)
