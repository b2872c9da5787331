"""`medflare data` and `medflare task`: datalists, checks before a site joins, and the task."""

import json
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from medflare.cli import options
from medflare.cli.options import AUTO_HELP, add_command, names_in
from medflare.core.errors import ConfigError, DataError

if TYPE_CHECKING:
    from medflare.preparation.planning import TaskPlan
    from medflare.tasks.config import TaskConfig

_TASK_FILE: Final = "task.json"
_TASK: Final = (
    f"preset name or a JSON file (default: {_TASK_FILE} in the folder or above it, "
    "else what medflare task init proposes)"
)
Root = Annotated[
    Path,
    typer.Argument(
        metavar="DATA", help="Folder with datalist.json, or with one such folder per site"
    ),
]
Seed = Annotated[int, typer.Option(help="Of the random splits and sites")]
Copy = Annotated[
    bool, typer.Option("--copy", help="Copy the files instead of links, for another disk")
]
Force = Annotated[bool, typer.Option("--force", help="Replace files that exist")]
Memory = Annotated[float, typer.Option(metavar="GIB", help="Of the smallest training device")]
Modality = Literal["mr", "ct", "photo"]
Kind = Literal["segmentation", "classification"]
Layout = Literal["png", "csv", "dicom"]


def add_commands(app: typer.Typer) -> None:
    """Declare the commands, in the order in which a site needs them."""
    data = typer.Typer(
        help="Write a site's datalist, and check its images before it joins.",
        epilog="example: medflare data check DATA --task task.json --out check",
        **AUTO_HELP,
    )
    add_command(
        data,
        "init",
        init,
        "medflare data init pictures --patient '^(p\\d+)' --sites 3 --out DATA",
        "medflare data init hospitals --site-folders --out DATA        "
        "# hospitals/north, hospitals/south, ...",
        "medflare data init ham --table ham/metadata.csv --image-column image_id --label-column dx "
        "--patient-column lesion_id",
    )
    add_command(
        data,
        "phantom",
        phantom,
        "medflare data phantom photographs",
        "medflare data phantom grades --kind classification --format csv",
    )
    add_command(data, "check", check, "medflare data check DATA --task brain_lgg --out check")
    add_command(
        data,
        "fingerprint",
        fingerprint,
        "medflare data fingerprint DATA --task brain_lgg_3d --out sites.json",
    )
    add_command(
        data, "prepare", prepare, "medflare data prepare fed_isic2019 --from DOWNLOADS --out DATA"
    )
    add_command(
        data, "features", features, "medflare data features DATA --task task.json --out FEATURES"
    )
    app.add_typer(data, name="data")
    tasks = typer.Typer(
        help="Propose a task from images. A task is a JSON file with labels, image size, network, "
        "loss and optimizer (docs/task.md).",
        epilog="example: medflare task init DATA --out task.json",
        **AUTO_HELP,
    )
    add_command(
        tasks,
        "init",
        init_task,
        "medflare task init CT --modality ct --memory 24 --yes --out liver.json",
    )
    add_command(
        tasks,
        "plan",
        plan,
        "medflare task plan site-1.json site-2.json --modality ct --memory 24 --name liver "
        "--out liver.json",
    )
    app.add_typer(tasks, name="task")


def init(
    root: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of the images, unpacked")],
    kind: Annotated[Kind | None, typer.Option(help="(default: by the folder)")] = None,
    table: Annotated[
        Path | None,
        typer.Option(
            metavar="CSV", help="CSV or TSV with a row per image (default: the one in the folder)"
        ),
    ] = None,
    image_column: Annotated[
        str,
        typer.Option(metavar="NAME", help="File of the image: path, name, or name without suffix"),
    ] = "",
    label_column: Annotated[
        str,
        typer.Option(
            metavar="NAMES", help="Class; or several columns of 0 and 1, separated by commas"
        ),
    ] = "",
    mask_column: Annotated[
        str, typer.Option(metavar="NAMES", help="Mask file; or several columns, one per structure")
    ] = "",
    patient_column: Annotated[str, typer.Option(metavar="NAME", help="ID of the patient")] = "",
    site_column: Annotated[
        str, typer.Option(metavar="NAME", help="Name of the site; a folder each, below --out")
    ] = "",
    split_column: Annotated[str, typer.Option(metavar="NAME", help="train, val or test")] = "",
    patient: Annotated[
        str,
        typer.Option(metavar="REGEX", help="Patient in the file name, its first group: '^(p\\d+)'"),
    ] = "",
    shares: Annotated[
        str, typer.Option(metavar="T,V,T", help="Patients for training, validation and test")
    ] = "70,10,20",
    redraw: Annotated[
        bool, typer.Option("--redraw", help="Draw the splits, also if the folder names them")
    ] = False,
    seed: Seed = 0,
    sites: Annotated[
        int | None,
        typer.Option(
            help="Number of simulated sites that patients are distributed over, below --out"
        ),
    ] = None,
    site_folders: Annotated[
        bool, typer.Option("--site-folders", help="Each folder in FOLDER is a site of that name")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for datalists and hard links to the files (default: FOLDER itself)"
        ),
    ] = None,
    copy: Copy = False,
    skip: Annotated[
        bool, typer.Option("--skip", help="Leave out images without mask or label")
    ] = False,
    force: Force = False,
) -> int:
    """Write datalist.json for a folder of images: class folders, images with masks, or a table.

    Recognises a folder per class, images with masks by name (a.png, a_mask.png; images/ and masks/;
    imagesTr/ and labelsTr/ with _0000 for channels) or a table with file and label; splits by
    patient. PNG, JPEG, BMP, TIFF, NIfTI and DICOM. No image is changed.
    """
    from medflare.preparation.dataset_import.datalists import (
        ImportOptions,
        import_folder,
        parse_shares,
    )
    from medflare.preparation.dataset_import.tables import Columns

    if copy and out is None:
        raise ConfigError("--copy copies files to --out FOLDER; name it, or leave --copy out")
    if sum([sites is not None, bool(site_column), site_folders]) > 1:
        raise ConfigError(
            "--sites simulates sites, --site-column and --site-folders have real ones; "
            "give one of them"
        )
    columns = Columns(
        image_column, label_column, mask_column, patient_column, site_column, split_column
    )
    splits = parse_shares(shares)
    options = ImportOptions(
        kind or "",
        table,
        columns,
        patient,
        sites,
        splits,
        seed,
        redraw,
        skip,
        site_folders,
        out,
        copy,
        force,
    )
    report = import_folder(root, options)
    print(report.render())
    print(f"next: medflare task init {shlex.quote(str(report.home))} --out task.json")
    return 0


def phantom(
    out: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder to write; it must not exist")
    ],
    kind: Annotated[
        Kind,
        typer.Option(help="segmentation: images/ and masks/; classification: a folder per grade"),
    ] = "segmentation",
    layout: Annotated[
        Layout,
        typer.Option(
            "--format",
            help="PNG files; PNG files of three hospitals in a table; DICOM files (masks stay PNG)",
        ),
    ] = "png",
) -> int:
    """Write synthetic photographs of the optic disc, to try the other commands without images of
    your own.
    """
    from medflare.core.store import make_folder
    from medflare.data.phantom import write_photographs

    if out.exists():
        raise ConfigError(f"{out} exists; name another folder")
    make_folder(out, public=True)
    count = write_photographs(out, kind, layout)
    named = {
        "png": "file names begin with the patient",
        "csv": "images.csv names patient and hospital",
        "dicom": "PatientID is set",
    }
    print(
        f"{count} synthetic images of 64 x 64 pixels in {out}; two eyes per patient, "
        f"{named[layout]}"
    )
    arguments = {
        "png": "--patient '^(synthetic-\\d+)' --sites 3",
        "csv": "--site-column hospital",
        "dicom": "--sites 3",
    }
    print(f"next: medflare data init {shlex.quote(str(out))} {arguments[layout]} --out DATA")
    return 0


def check(
    root: Root,
    task: Annotated[str | None, typer.Option(help=_TASK)] = None,
    local: Annotated[
        Path | None,
        typer.Option(help="The site's local/medflare.json, for its bounds and data_folders"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for thumbnails (default: none are written)")
    ] = None,
) -> int:
    """Read every image of a site or a folder of sites: problems, counts, sizes, classes, shift,
    thumbnails.
    """
    from medflare.data.local import local_settings, read_local
    from medflare.preparation.check import check_site

    if local is not None and not local.exists():
        raise ConfigError(f"--local {local}: file not found; correct the path, or leave it out")
    config = _task(task, root)
    settings = local_settings({} if local is None else read_local(local))
    report = check_site(root, config, out=out, local=settings)
    print(report.render())
    return 0 if report.ok else 1


def fingerprint(
    root: Root,
    task: Annotated[
        str | None,
        typer.Option(help=f"Its labels and channels count, size and network do not: {_TASK}"),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="File to write (default: printed)")] = None,
) -> int:
    """Write sizes, spacings, intensities and classes of the training images as JSON, to plan a
    task.

    The file has the site's name and numbers over its training images: no image, file or patient.
    """
    from medflare.core.store import refuse_unwritable, write_json
    from medflare.preparation.fingerprint import fingerprints, to_json

    if out is not None:
        refuse_unwritable(out)
    sites = fingerprints(root, _task(task, root))
    if out is None:
        print(json.dumps(to_json(sites), indent=2))
        return 0
    write_json(out, to_json(sites), public=True)
    for site in sites:
        print(f"{site.site}: {site.images} training images of {site.patients} patients")
    print(f"written: {out}; read it before it leaves the site")
    return 0


def prepare(
    name: Annotated[str | None, typer.Argument(help="See --list")] = None,
    listed: Annotated[
        bool,
        typer.Option(
            "--list", help="Show what can be prepared: sites, sizes, licence, where to download"
        ),
    ] = False,
    source: Annotated[
        Path | None,
        typer.Option("--from", metavar="DOWNLOADS", help="Folder of the downloads, unpacked"),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DATA", help="Folder for the sites, with hard links to the files"),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Fail if counts differ from the paper's")
    ] = False,
    redraw: Annotated[
        bool,
        typer.Option(
            "--redraw",
            help="Draw the splits by patient across sites, also if the download names them",
        ),
    ] = False,
    split: Annotated[
        Literal["paper"] | None,
        typer.Option(
            help="paper: split_of_the_paper.csv in DOWNLOADS (default: "
            "as the download names the splits, or drawn)"
        ),
    ] = None,
    seed: Seed = 0,
    copy: Copy = False,
    force: Force = False,
) -> int:
    """Make the sites of a paper from its downloads.

    Makes a folder per site with its files and datalist.json, and compares the counts with the
    paper's. Warns of patients in two splits or at two sites; splits that are drawn keep each
    patient in one split at all sites. No image is changed.
    """
    from medflare.preparation.dataset_import.papers.catalogue import get_preparation, listing
    from medflare.preparation.dataset_import.papers.preparing import prepare

    if listed:
        print(listing())
        return 0
    if name is None or source is None or out is None:
        raise ConfigError(
            "data prepare: give NAME, --from DOWNLOADS and --out DATA; --list shows the names"
        )
    prepared = prepare(
        get_preparation(name),
        source,
        out,
        strict=strict,
        redraw=redraw,
        paper_split=split == "paper",
        seed=seed,
        copy=copy,
        force=force,
    )
    print(prepared.render())
    return 0


def features(
    root: Root,
    task: Annotated[
        str, typer.Option(help="Classification, with network.weights: preset name or a JSON file")
    ],
    out: Annotated[
        Path, typer.Option(metavar="FEATURES", help="Folder for the sites and their task.json")
    ],
    weights: Annotated[
        Path | None,
        typer.Option(
            help="File or its folder (default: MEDFLARE_WEIGHTS, or an installed package)"
        ),
    ] = None,
    force: Force = False,
) -> int:
    """Compute features of every image with a pretrained network, so that heads train in seconds.

    Makes sites whose images are the features, without augmentation, and a task that trains a head
    on them. Patients, labels and splits are unchanged.
    """
    from medflare.preparation.dataset_import.features import write_features
    from medflare.tasks.config import load_task

    print(write_features(root, load_task(task), out, weights=weights, force=force).render())
    return 0


def _task(name: str | None, root: Path) -> "TaskConfig":
    """The named task, otherwise the one beside the data, otherwise the proposed one.

    DataError: no task can be proposed.
    """
    from medflare.preparation.proposing import TaskHints, propose
    from medflare.tasks.config import load_task

    if name is not None:
        return load_task(name)
    root = root.resolve()
    for folder in (root, root.parent):
        file = folder / _TASK_FILE
        if file.is_file():
            print(f"task: {file}", file=sys.stderr)
            return load_task(file)
    try:
        task = load_task(propose(root, TaskHints()).settings)
    except DataError as error:
        raise DataError(f"no task can be proposed: {error}; or name one with --task") from error
    print(
        f"task: {task.name}, as medflare task init proposes it; name another with --task",
        file=sys.stderr,
    )
    return task


def plan(
    fingerprints: Annotated[
        list[Path],
        typer.Argument(metavar="FINGERPRINT...", help="Files of medflare data fingerprint"),
    ],
    out: Annotated[Path, typer.Option(help="Task file to write")],
    memory: Memory = 8.0,
    modality: Annotated[
        Modality,
        typer.Option(help="ct: Hounsfield units; photo: colours; mr: numbers without a unit"),
    ] = "mr",
    voxels: Annotated[
        bool,
        typer.Option("--voxels", help="Ignore the files' spacings, if they are unknown or wrong"),
    ] = False,
    name: Annotated[
        str | None,
        typer.Option(help="Of the task (default: that of the fingerprints' task, and _planned)"),
    ] = None,
) -> int:
    """Propose a segmentation task from the fingerprints of its sites, by nnU-Net's rules.

    Writes a task with spacing, patch, network, batch and normalisation, and prints each setting
    with its reason.
    """
    from medflare.core.store import write_json
    from medflare.preparation.fingerprint import read_fingerprints
    from medflare.preparation.planning import plan

    sites = read_fingerprints(fingerprints)
    proposed = plan(sites, modality=modality, memory=memory, voxels=voxels, name=name)
    write_json(out, proposed.settings, public=True)
    print(proposed.render())
    images = sum(site.images for site in sites)
    names = ", ".join(site.site for site in sites)
    print(f"planned from {images} training images ({names}); written: {out}")
    return 0


def init_task(
    root: Root,
    out: Annotated[Path, typer.Option(help="Task file to write")],
    name: Annotated[
        str | None, typer.Option(help="Of the task (default: that of the data)")
    ] = None,
    labels: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="Classes or structures, without the background"),
    ] = None,
    channels: Annotated[int | None, typer.Option(help="Of an image: 1 grey, 3 colour")] = None,
    dims: Annotated[
        int | None,
        typer.Option(
            min=2, max=3, help="3: whole volumes; 2: pictures, and volumes cut into slices"
        ),
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(
            metavar="SIDES", help="Resize images to H,W or X,Y,Z (default: by the images)"
        ),
    ] = None,
    network: Annotated[
        str | None, typer.Option(metavar="NAME", help="medflare's or MONAI's, see docs/task.md")
    ] = None,
    pretrained: Annotated[
        bool,
        typer.Option(
            "--pretrained", help="Require pretrained weights (default: if they are installed)"
        ),
    ] = False,
    modality: Annotated[
        Modality | None, typer.Option(help="See medflare task plan (default: by the intensities)")
    ] = None,
    memory: Memory = 8.0,
    minutes: Annotated[float, typer.Option(help="Of a round on this device, at most")] = 2.0,
    device: options.Device = None,
    yes: Annotated[bool, typer.Option("--yes", help="Ask nothing")] = False,
    force: Force = False,
) -> int:
    """Write a task for the images of a folder with datalist.json; on a terminal it asks for labels,
    size and network.

    Writes kind, labels, channels, size, network and the other settings, and prints each with its
    reason.
    """
    from medflare.core.store import refuse_unwritable, write_json
    from medflare.preparation.proposing import TIMED_ROUNDS, TaskHints, propose

    if out.is_file() and not force:
        raise ConfigError(f"{out} exists; keep it, or replace it with --force")
    refuse_unwritable(out)

    def proposed_with(texts: Mapping[str, str | None]) -> "TaskPlan":
        hints = TaskHints(
            **_parsed(texts),
            channels=channels,
            dims=dims,
            modality=modality,
            memory=memory,
            minutes=minutes,
            pretrained=pretrained,
        )
        with options.environment(device=device):
            return propose(root, hints)

    texts = {"name": name, "labels": labels, "size": size, "network": network}
    proposed = proposed_with(texts)
    if sys.stdin.isatty() and not yes:
        changed = _changes(proposed.settings, texts)
        if changed:
            proposed = proposed_with(texts | changed)
    write_json(out, proposed.settings, public=True)
    print(proposed.render())
    place = shlex.quote(str(root))
    file = shlex.quote(str(out))
    print(f"written: {out}\nnext: medflare data check {place} --task {file}")
    print(
        f"      medflare run fedavg --task {file} --data-root {place} --rounds {TIMED_ROUNDS} "
        "--engine local"
    )
    return 0


def _changes(proposed: Mapping[str, Any], texts: Mapping[str, str | None]) -> dict[str, str | None]:
    """Ask for every setting without a text; the answers that differ from what is proposed."""
    defaults = {
        "name": proposed["name"],
        "labels": ",".join(label for label in proposed["labels"] if label != "background"),
        "size": ",".join(map(str, proposed["size"])),
        "network": proposed["network"]["name"],
    }
    changed: dict[str, str | None] = {}
    for option, text in texts.items():
        if text is None:
            answer = typer.prompt(option, default=defaults[option])
            if answer != defaults[option]:
                changed[option] = answer
    return changed


def _parsed(texts: Mapping[str, str | None]) -> dict[str, Any]:
    """The fields of `TaskHints` that can be asked for, from text."""
    size = texts["size"] or ""
    try:
        sides = tuple(int(side) for side in size.split(",")) if size else ()
    except ValueError:
        raise ConfigError(
            f"--size {size!r}: give the sides in pixels, for example 128,128"
        ) from None
    return {
        "name": texts["name"] or "",
        "labels": tuple(names_in(texts["labels"] or "")),
        "size": sides,
        "network": texts["network"] or "",
    }
