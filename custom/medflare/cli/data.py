"""`medflare data` and `medflare task`: datalists, checks before a site joins, and the task."""

import dataclasses
import json
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from medflare.cli import options
from medflare.cli.options import AUTO_HELP, PathArgument, PathArguments, add_commands, names_in
from medflare.core.errors import ConfigError, DataError, UnreadableError
from medflare.core.files import make_folder, refuse_unwritable, write_json
from medflare.core.text import Json, JsonDict, escaped

if TYPE_CHECKING:
    from medflare.tasks.config import TaskConfig

Root = Annotated[
    Path,
    typer.Argument(
        metavar="DATA", help="Folder with datalist.json, or with one such folder per site"
    ),
]
Modality = Literal["mr", "ct", "photo"]
Kind = Literal["segmentation", "classification"]


def add_groups(app: typer.Typer) -> None:
    """Declare the commands, in the order in which a site needs them."""
    data = typer.Typer(
        help="Write a site's datalist, and check its images before it joins.",
        epilog="example: medflare data check DATA --task task.json --out check",
        **AUTO_HELP,
    )
    add_commands(
        data,
        init=init,
        phantom=phantom,
        check=check,
        fingerprint=fingerprint,
        prepare=prepare,
        features=features,
    )
    app.add_typer(data, name="data")
    tasks = typer.Typer(
        help="Propose a task from images. A task is a JSON file with labels, image size, network, "
        "loss and optimizer (docs/task.md).",
        epilog="example: medflare task init DATA --out task.json",
        **AUTO_HELP,
    )
    add_commands(tasks, init=init_task, plan=plan)
    app.add_typer(tasks, name="task")


def init(
    root: PathArgument,
    kind: Kind | None = None,
    table: Path | None = None,
    image_column: str = "",
    label_column: str = "",
    mask_column: str = "",
    patient_column: str = "",
    site_column: str = "",
    split_column: str = "",
    patient: str = "",
    shares: str = "70,10,20",
    redraw: bool = False,
    seed: int = 0,
    sites: int | None = None,
    site_folders: bool = False,
    out: Path | None = None,
    copy: bool = False,
    classes: str = "",
    structure: Annotated[list[str], typer.Option()] = (),  # type: ignore[assignment]
    threshold: float | None = None,
    empty_masks: bool = False,
    leave_out: Annotated[list[str], typer.Option()] = (),  # type: ignore[assignment]
    skip: bool = False,
    force: bool = False,
) -> None:
    """Write datalist.json for a folder of images: class folders, images with masks, or a table.

    Recognises a folder per class, images with masks by name (a.png, a_mask.png; images/ and masks/;
    imagesTr/ and labelsTr/ with _0000 for channels) or a table with file and label; splits by
    patient. PNG, JPEG, BMP, TIFF, NIfTI and DICOM. No image is changed.

    Args:
        root (FOLDER): Folder of the images, unpacked
        kind: (default: by the folder)
        table (CSV): CSV or Excel with a row per image (default: the one in the folder)
        image_column (NAME): File of the image: path, name, or name without suffix
        label_column (NAMES): Class; or several columns of 0 and 1, separated by commas
        mask_column (NAMES): Mask file; or several columns, one per structure
        patient_column (NAME): ID of the patient
        site_column (NAME): Name of the site; a folder each, below --out
        split_column (NAME): train, val or test
        patient (REGEX): Patient in the file name, else in the path, its first group: '^(p\\d+)'
        shares (T,V,T): Patients for training, validation and test
        redraw: Draw the splits, also if the folder names them
        seed: Of the random splits and sites
        sites: Number of simulated sites that patients are distributed over, below --out
        site_folders: Each folder in FOLDER is a site of that name
        out: Folder for datalists and hard links to the files (default: FOLDER itself)
        copy: Copy the files instead of links, for another disk
        classes (NAMES): Of all sites, in the order of their numbers (default: those of the images)
        structure (NAME=OTHER,...): A structure to use, with its other names at sites, also behind
            the names of images, and its values in masks of several structures; may be repeated
        threshold (VALUE): Of soft masks; this value and more is the structure
        empty_masks: Images without a mask do not show the structure
        leave_out (NAME): Files or folders that are not read, as mask or '*_old.png'; may be
            repeated
        skip: Leave out images without mask or label
        force: Replace files that exist

    Examples:
        medflare data init pictures --patient '^(p\\d+)' --sites 3 --out DATA
        medflare data init hospitals --site-folders --out DATA        # hospitals/north,
            hospitals/south, ...
        medflare data init ham --table ham/metadata.csv --image-column image_id --label-column dx
            --patient-column lesion_id
        medflare data init eyes --site-folders --structure disc=OD,0,128 --structure cup=0 --out
            DATA
    """
    from medflare.preparation.dataset_import.chosen_structures import parse_structures
    from medflare.preparation.dataset_import.datalists import import_folder
    from medflare.preparation.dataset_import.options import Columns, ImportOptions
    from medflare.preparation.dataset_import.splits import parse_shares

    if copy and out is None:
        raise ConfigError("--copy copies files to --out FOLDER; name it, or leave --copy out")
    if sum([sites is not None, bool(site_column), site_folders]) > 1:
        raise ConfigError(
            "--sites simulates sites, --site-column and --site-folders have real ones; "
            "give one of them"
        )
    if table is not None and not table.exists() and (root / table).is_file():
        table = root / table  # as messages name it
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
        tuple(names_in(classes)),
        parse_structures(structure),
        threshold,
        empty_masks,
        tuple(leave_out),
        skip,
        site_folders,
        out,
        copy,
        force,
    )
    report = import_folder(root, options)
    print(escaped(report.render()))
    home = shlex.quote(str(report.home))
    listed = {item.split for items in report.sites.values() for item in items}
    command = f"task init {home} --out task.json"
    if listed == {"test"}:
        command = f"data check {home} --task task.json    (the task of sites that train)"
    print(f"next: medflare {command}")


def phantom(
    out: PathArgument,
    kind: Kind = "segmentation",
    layout: Annotated[Literal["png", "csv", "dicom"], typer.Option("--format")] = "png",
) -> None:
    """Write synthetic photographs of the optic disc, to try the other commands without images of
    your own.

    Args:
        out (FOLDER): Folder to write; it must not exist
        kind: segmentation: images/ and masks/; classification: a folder per grade
        layout: PNG files; PNG files of three hospitals in a table; DICOM files (masks stay PNG)

    Examples:
        medflare data phantom photographs
        medflare data phantom grades --kind classification --format csv
    """
    from medflare.data.phantom import write_photographs

    if out.exists():
        raise ConfigError(f"{out} exists; name another folder")
    make_folder(out, public=True)
    count = write_photographs(out, kind, layout)
    patients, arguments = {
        "png": ("file names begin with the patient", "--patient '^(synthetic-\\d+)' --sites 3"),
        "csv": ("images.csv names patient and hospital", "--site-column hospital"),
        "dicom": ("PatientID is set", "--sites 3"),
    }[layout]
    print(f"{count} synthetic images of 64 x 64 pixels in {out}; two eyes per patient, {patients}")
    print(f"next: medflare data init {shlex.quote(str(out))} {arguments} --out DATA")


def check(
    root: Root, task: str | None = None, local: Path | None = None, out: Path | None = None
) -> int:
    """Read every image of a site or a folder of sites: problems, counts, sizes, classes, shift,
    thumbnails.

    Args:
        task: preset name or a JSON file (default: task.json in the folder or above it, else what
            medflare task init proposes)
        local: The site's local/medflare.json, for its bounds and data_folders
        out: Folder for thumbnails (default: none are written)

    Examples:
        medflare data check DATA --task brain_lgg --out check
    """
    from medflare.data.local import local_settings, read_local
    from medflare.evaluation.findings import few_validation_line
    from medflare.methods.parts.selection import FEW_IMAGES, images_behind
    from medflare.preparation.check import check_site, unreadable_files

    if local is not None and not local.exists():
        raise ConfigError(f"--local {local}: file not found; correct the path, or leave it out")
    try:
        config = _task(task, root)
    except DataError:
        for problem in unreadable_files(root):
            print(escaped(f"PROBLEM: {problem}"))
        raise
    settings = local_settings({} if local is None else read_local(local))
    report = check_site(root, config, out=out, local=settings)
    counts = {}
    for name, site in report.sites.items():
        if site.splits and not site.test_only:
            counts[name] = site.splits["validation"][0]
    if counts and images_behind(counts, "median") < FEW_IMAGES:
        report.notes.append(few_validation_line(counts))
    print(escaped(report.render()))
    if not report.ok:
        return 1
    if counts:
        file = task or _task_beside(root)
        home = shlex.quote(str(root))
        command = f"medflare task init {home} --out task.json"
        if file:
            command = _run_command(root, shlex.quote(str(file)))
        print(f"next: {command}")
    return 0


def fingerprint(root: Root, task: str | None = None, out: Path | None = None) -> None:
    """Write sizes, spacings, intensities and classes of the training images as JSON, to plan a
    task.

    The file has the site's name and numbers over its training images: no image, file or patient.

    Args:
        task: Its labels and channels count, size and network do not: preset name or a JSON file
            (default: task.json in the folder or above it, else what medflare task init proposes)
        out: File to write (default: printed)

    Examples:
        medflare data fingerprint DATA --task brain_lgg_3d --out sites.json
    """
    from medflare.preparation.fingerprint import fingerprints, to_json

    if out is not None:
        refuse_unwritable(out)
    sites = fingerprints(root, _task(task, root))
    if out is None:
        print(json.dumps(to_json(sites), indent=2))
        return
    write_json(out, to_json(sites), public=True)
    for site in sites:
        line = f"{site.site}: {site.images} training images of {site.patients} patients"
        print(escaped(line))
    print(f"written: {out}; read it before it leaves the site")


def prepare(
    name: Annotated[str | None, typer.Argument()] = None,
    listed: Annotated[bool, typer.Option("--list")] = False,
    source: Annotated[Path | None, typer.Option("--from")] = None,
    out: Path | None = None,
    strict: bool = False,
    redraw: bool = False,
    split: Literal["paper"] | None = None,
    seed: int = 0,
    copy: bool = False,
    force: bool = False,
) -> None:
    """Make the sites of a paper from its downloads.

    Makes a folder per site with its files and datalist.json, and compares the counts with the
    paper's. Warns of patients in two splits or at two sites; splits that are drawn keep each
    patient in one split at all sites. No image is changed.

    Args:
        name: See --list
        listed: Show what can be prepared: sites, sizes, licence, where to download
        source (DOWNLOADS): Folder of the downloads, unpacked
        out (DATA): Folder for the sites, with hard links to the files
        strict: Fail if counts differ from the paper's
        redraw: Draw the splits by patient across sites, also if the download names them
        split: paper: split_of_the_paper.csv in DOWNLOADS (default: as the download names the
            splits, or drawn)
        seed: Of the random splits and sites
        copy: Copy the files instead of links, for another disk
        force: Replace files that exist

    Examples:
        medflare data prepare fed_isic2019 --from DOWNLOADS --out DATA
    """
    from medflare.preparation.dataset_import.papers.catalogue import (
        get_preparation,
        list_preparations,
    )
    from medflare.preparation.dataset_import.papers.preparing import prepare

    if listed:
        print(list_preparations())
        return
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
    print(escaped(prepared.render()))


def features(
    root: Root, task: str, out: Path, weights: Path | None = None, force: bool = False
) -> None:
    """Compute features of every image with a pretrained network, so that heads train in seconds.

    Makes sites whose images are the features, without augmentation, and a task that trains a head
    on them. Patients, labels and splits are unchanged.

    Args:
        task: Classification, with network.weights: preset name or a JSON file
        out (FEATURES): Folder for the sites and their task.json
        weights: File or its folder (default: MEDFLARE_WEIGHTS, or an installed package)
        force: Replace files that exist

    Examples:
        medflare data features DATA --task task.json --out FEATURES
    """
    from medflare.preparation.dataset_import.features import write_features
    from medflare.tasks.config import load_task

    report = write_features(root, load_task(task), out, weights=weights, force=force)
    print(escaped(report.render()))


def _task(name: str | None, root: Path) -> "TaskConfig":
    """The named task, otherwise the one beside the data, otherwise the proposed one.

    Raises:
        DataError: no task can be proposed.
    """
    from medflare.preparation.mask_values import UnclearValuesError
    from medflare.preparation.proposing import TaskHints, propose
    from medflare.tasks.config import load_task

    if name is not None:
        return load_task(name)
    file = _task_beside(root)
    if file is not None:
        print(f"task: {file}", file=sys.stderr)
        return load_task(file)
    try:
        task = load_task(propose(root.resolve(), TaskHints()).settings)
    except DataError as error:
        remedy = "; or name one with --task" if isinstance(error, UnclearValuesError) else ""
        raise DataError(f"no task can be proposed: {error}{remedy}") from error
    print(
        f"task: {task.name}, as medflare task init proposes it; name another with --task",
        file=sys.stderr,
    )
    return task


def _task_beside(root: Path) -> Path | None:
    """The task.json in a data root or above it."""
    home = root.resolve()
    files = [folder / "task.json" for folder in (home, home.parent)]
    return next(filter(Path.is_file, files), None)


def plan(
    fingerprints: PathArguments,
    out: Path,
    memory: float = 8.0,
    modality: Modality = "mr",
    voxels: bool = False,
    name: str | None = None,
    force: bool = False,
) -> None:
    """Propose a segmentation task from the fingerprints of its sites, by nnU-Net's rules.

    Writes a task with spacing, patch, network, batch and normalisation, and prints each setting
    with its reason.

    Args:
        fingerprints (FINGERPRINT...): Files of medflare data fingerprint
        out: Task file to write
        memory (GIB): Of the smallest training device
        modality: ct: Hounsfield units; photo: colours; mr: numbers without a unit
        voxels: Ignore the files' spacings, if they are unknown or wrong
        name: Of the task (default: that of the fingerprints' task, and _planned)
        force: Replace an existing file

    Examples:
        medflare task plan site-1.json site-2.json --modality ct --memory 24 --name liver --out
            liver.json
    """
    from medflare.preparation.fingerprint import read_fingerprints
    from medflare.preparation.planning import plan

    if out.is_file() and not force:
        raise ConfigError(f"{out} exists; keep it, or replace it with --force")
    sites = read_fingerprints(fingerprints)
    proposed = plan(sites, modality=modality, memory=memory, voxels=voxels, name=name)
    write_json(out, proposed.settings, public=True)
    print(escaped(proposed.render()))
    images = sum(site.images for site in sites)
    names = ", ".join(site.site for site in sites)
    print(escaped(f"planned from {images} training images ({names}); written: {out}"))


def init_task(
    root: Root,
    out: Path,
    name: str | None = None,
    labels: str | None = None,
    channels: int | None = None,
    dims: Annotated[int | None, typer.Option(min=2, max=3)] = None,
    size: str | None = None,
    network: str | None = None,
    pretrained: bool = False,
    modality: Modality | None = None,
    memory: float = 8.0,
    minutes: float = 2.0,
    device: options.Device = None,
    yes: bool = False,
    force: bool = False,
) -> None:
    """Write a task for the images of a folder with datalist.json; on a terminal it asks for labels,
    size and network.

    Writes kind, labels, channels, size, network and the other settings, and prints each with its
    reason.

    Args:
        out: Task file to write
        name: Of the task (default: that of the data)
        labels (NAMES): Classes or structures, without the background
        channels: Of an image: 1 grey, 3 colour
        dims: 3: whole volumes; 2: pictures, and volumes cut into slices
        size (SIDES): Resize images to H,W or X,Y,Z (default: by the images)
        network (NAME): medflare's or MONAI's, see docs/task.md
        pretrained: Require pretrained weights (default: if they are installed)
        modality: See medflare task plan (default: by the intensities)
        memory (GIB): Of the smallest training device
        minutes: Of a round on this device, at most
        yes: Ask nothing
        force: Replace files that exist

    Examples:
        medflare task init CT --modality ct --memory 24 --yes --out liver.json
    """
    from medflare.preparation.proposing import TaskHints, propose

    if out.is_file() and not force:
        raise ConfigError(f"{out} exists; keep it, or replace it with --force")
    refuse_unwritable(out)

    texts = {"name": name, "labels": labels, "size": size, "network": network}
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
        try:
            proposed = propose(root, hints)
        except UnreadableError as error:
            remedy = "medflare data check DATA lists all such files"
            raise DataError(f"{error}; {remedy}") from error
        if sys.stdin.isatty() and not yes:
            changed = _changes(proposed.settings, texts)
            if changed:
                hints = dataclasses.replace(hints, **_parsed(texts | changed))
                proposed = propose(root, hints)
    write_json(out, proposed.settings, public=True)
    print(escaped(proposed.render()))
    data_root = shlex.quote(str(root))
    file = shlex.quote(str(out))
    print(f"written: {out}\nnext: medflare data check {data_root} --task {file}")
    print(f"      {_run_command(root, file)}")


def _run_command(root: Path, task: str) -> str:
    """The command that trains on the images of a data root; `task`: its quoted file."""
    from medflare.data.datalist import has_test_only, site_folders, site_name
    from medflare.preparation.proposing import TIMED_ROUNDS

    command = f"medflare run fedavg --task {task} --data-root {shlex.quote(str(root))}"
    outside = [site_name(folder) for folder in site_folders(root) if has_test_only(folder)]
    if outside:
        command += f" --outside {shlex.quote(','.join(outside))}"
    return escaped(f"{command} --rounds {TIMED_ROUNDS} --engine local")


def _changes(proposed: Json, texts: Mapping[str, str | None]) -> dict[str, str | None]:
    """Ask for every setting without a text; the answers that differ from what is proposed."""
    defaults = {
        "name": proposed["name"],
        "labels": ",".join(label for label in proposed["labels"] if label != "background"),
        "size": ",".join(map(str, proposed["size"])),
        "network": proposed["network"]["name"],
    }
    changed = {}
    for option, text in texts.items():
        if text is None:
            default = escaped(defaults[option])
            answer = typer.prompt(option, default=default)
            if answer != default:
                changed[option] = answer
    return changed


def _parsed(texts: Mapping[str, str | None]) -> JsonDict:
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
