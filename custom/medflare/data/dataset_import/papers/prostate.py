"""Prostate MRI: the six sites that came with SAML (Liu et al., MICCAI 2020), five of them for PRR, and FedSM's own six."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from medflare.core.errors import DataError
from medflare.data.datalist import SPLITS
from medflare.data.dataset_import.finding import Item, holdings
from medflare.data.dataset_import.layouts import recognise
from medflare.data.dataset_import.papers.preparing import IMAGES, NO_TEST, WITHOUT_TEST, Download, Preparation, expected, files_in

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
_MARK: Final = "_segmentation"
_LICENCE: Final = "those of NCI-ISBI 2013, I2CVB and PROMISE12; research only"
_SLICES: Final = "volumes are cut along their third axis when they are read; the paper's code feeds three neighbouring slices at once"


def _saml(root: Path, sites: Sequence[str]) -> list[Item]:
    """CaseNN.nii.gz with CaseNN_segmentation.nii.gz beside it, a folder for each site; the numbers of cases say nothing across sites."""
    items = []
    for site in sites:
        folder = expected(root, *_FOLDERS[site], download=_SAML)
        volumes = files_in(folder, (".nii.gz", ".nii"))
        masks = {path.name.lower().replace(_MARK, ""): path for path in volumes if _MARK in path.name.lower()}
        for volume in volumes:
            if _MARK in volume.name.lower():
                continue
            mask = masks.get(volume.name.lower())
            if mask is None:
                raise DataError(f"{volume}: no mask {volume.name.replace('.nii', f'{_MARK}.nii')} beside it; unpack the download again")
            items.append(Item((volume,), mask, f"{site} {volume.name.partition('.')[0]}", "", site))
    return items


def find_six(root: Path) -> list[Item]:
    """The volumes of SAML's six sites."""
    return _saml(root, tuple(_FOLDERS))


def find_five(root: Path) -> list[Item]:
    """The volumes of PRR's five sites, see `find_six`."""
    return _saml(root, [site for site in _FOLDERS if site != "I2CVB"])


def find_fedsm(root: Path) -> list[Item]:
    """The volumes of FedSM's six sources, with masks by name as `medflare data init` finds them."""
    dataset = expected(root, "dataset", download=_FLARE)
    items = []
    for site in _FEDSM:
        folder = expected(dataset, site, site.upper(), download=_FLARE)
        found = recognise(holdings(folder), kind="segmentation")
        if found.missing:
            raise DataError(f"{folder}: {len(found.missing)} incomplete, the first: {found.missing[0]}; convert the source again")
        items += [replace(item, patient=f"{site} {item.first.name}", split="", site=site) for item in found.items]
    return items


PREPARATIONS: Final = (
    Preparation(
        name="prostate",
        title="Prostate MRI: T2-weighted volumes of six sites",
        papers="IOP-FL, Tables I-III; GRACE, Tables 1-4",
        licence=_LICENCE,
        downloads=(_SAML,),
        find=find_six,
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
        find=find_five,
        kind="segmentation",
        unit="volumes",
        shares=dict(zip(SPLITS, (0.7, 0.1, 0.2), strict=True)),
        counts={site: {IMAGES: count} for site, count in _VOLUMES.items() if site != "I2CVB"},
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
        shares=dict(zip(SPLITS, (0.5, 0.25, 0.25), strict=True)),
        notes=("Table 2 of the paper counts slices that show the prostate, not volumes, so there is no count to compare",),
    ),
)
