"""`medflare data` and `medflare task`: from downloaded images to datalists, checked before a site joins, and to a task."""

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from medflare.cli.options import AUTO_HELP, add_command, names_in
from medflare.core.errors import ConfigError, DataError, MedflareError

if TYPE_CHECKING:
    from medflare.data.checking.planning import Plan
    from medflare.tasks.config import TaskConfig
    from medflare.training.proposing import Answers

_TASK_FILE: Final = "task.json"
_TASK: Final = f"preset name or a JSON file (default: {_TASK_FILE} in the folder or above it, else what medflare task init proposes)"
Root = Annotated[Path, typer.Argument(metavar="DATA", help="Folder with datalist.json, or with one such folder per site")]
Seed = Annotated[int, typer.Option(help="Of the draws")]
Copy = Annotated[bool, typer.Option("--copy", help="Copy the files: where links cannot be, on another disk")]
Force = Annotated[bool, typer.Option("--force", help="Write a datalist.json anew that exists")]


def add_commands(app: typer.Typer) -> None:
    """Declare them, `data` with its actions in the order in which a site needs them."""
    data = typer.Typer(
        help="Write a site's datalist, and look at its images before it joins: init writes the datalist, check reads every image as the "
        "network will see it, fingerprint says in numbers what there is. For the data of a paper, prepare does what init does for others. "
        "features puts the images through a pretrained network once.",
        epilog="example: medflare data check DATA --task task.json --out check",
        **AUTO_HELP,
    )
    add_command(
        data,
        "init",
        init,
        "medflare data init pictures",
        "medflare data init pictures --patient '^(p\\d+)' --sites 3 --out DATA",
        "medflare data init ham --table ham/metadata.csv --image-column image_id --label-column dx --patient-column lesion_id",
        "medflare data init scans --table scans/list.csv --site-column hospital --out DATA",
    )
    add_command(
        data,
        "check",
        check,
        "medflare data check DATA --task brain_lgg --out check",
        "medflare data check /data/site-1 --task app_configs/ham10000.json",
    )
    add_command(
        data,
        "fingerprint",
        fingerprint,
        "medflare data fingerprint /data/site-1 --task app_configs/brain_lgg_3d.json --out site-1.json",
        "medflare data fingerprint DATA --task brain_lgg_3d --out sites.json",
    )
    add_command(
        data,
        "prepare",
        prepare,
        "medflare data prepare --list",
        "medflare data prepare fed_isic2019 --from DOWNLOADS --to DATA",
        "medflare data prepare midog2022 --from DOWNLOADS --to DATA --strict",
    )
    add_command(
        data,
        "features",
        features,
        "medflare data features DATA --task task.json --to FEATURES",
        "medflare run grace --task FEATURES/task.json --data-root FEATURES --sites a,b,c --rounds 40 --engine local",
    )
    app.add_typer(data, name="data")
    tasks = typer.Typer(
        help="Propose a task from a site's images. A task says what is learnt: labels, size of the images, network, loss and optimizer. It "
        "is a JSON file, there to be changed; docs/data.md has every setting.",
        epilog="example: medflare task init DATA --out task.json",
        **AUTO_HELP,
    )
    add_command(
        tasks,
        "init",
        init_task,
        "medflare task init DATA --out task.json",
        "medflare task init DATA --size 128,128 --labels healthy,ill --yes --out task.json",
        "medflare task init CT --modality ct --memory 24 --out liver.json",
    )
    examples = ("sites.json --out task.json", "site-1.json site-2.json --modality ct --memory 24 --name liver --out liver.json")
    add_command(tasks, "plan", plan, *(f"medflare task plan {words}" for words in examples))
    app.add_typer(tasks, name="task")


# -- data --------------------------------------------------------------------------------------------------------------------


def init(
    root: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of the images, unpacked")],
    kind: Annotated[
        Literal["segmentation", "classification"] | None, typer.Option(help="What to make of it (default: what is there)")
    ] = None,
    table: Annotated[
        Path | None, typer.Option(metavar="CSV", help="CSV or TSV file with a row an image (default: the one in the folder)")
    ] = None,
    image_column: Annotated[str, typer.Option(metavar="NAME", help="File of the image: path, name, or name without suffix")] = "",
    label_column: Annotated[str, typer.Option(metavar="NAMES", help="Class; or several columns of 0 and 1, separated by commas")] = "",
    mask_column: Annotated[str, typer.Option(metavar="NAMES", help="Mask file; or several columns, one a structure")] = "",
    patient_column: Annotated[str, typer.Option(metavar="NAME", help="Whose image it is")] = "",
    site_column: Annotated[str, typer.Option(metavar="NAME", help="Where it is from: a site each, below --out")] = "",
    split_column: Annotated[str, typer.Option(metavar="NAME", help="train, val or test")] = "",
    patient: Annotated[str, typer.Option(metavar="REGEX", help="Patient in the file name, its first group: '^(p\\d+)'")] = "",
    shares: Annotated[str, typer.Option(metavar="T,V,T", help="Patients for training, validation and test")] = "70,10,20",
    redraw: Annotated[bool, typer.Option("--redraw", help="Draw the split, also where the folder names one")] = False,
    seed: Seed = 0,
    sites: Annotated[int | None, typer.Option(help="Deal the patients to so many simulated sites below --out")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the datalists, with hard links to the files (default: FOLDER itself)")
    ] = None,
    copy: Copy = False,
    skip: Annotated[bool, typer.Option("--skip", help="Leave out what is incomplete or damaged")] = False,
    force: Force = False,
) -> int:
    """Write datalist.json for a downloaded folder: class folders, images with masks, or a table.

    Recognises a folder per class, images with masks by name (a.png, a_mask.png; images/ and masks/; imagesTr/ and labelsTr/ with _0000 for
    channels) or a table with file and label; splits by patient and shows what it made. PNG, JPEG, BMP, TIFF, NIfTI and DICOM. No image is
    changed.
    """
    from medflare.data.dataset_import.datalists import Wishes, init
    from medflare.data.dataset_import.partition import shares_in
    from medflare.data.dataset_import.tables import Columns

    if copy and out is None:
        raise ConfigError("--copy copies files to --out FOLDER; name it, or leave --copy out")
    if sites is not None and site_column:
        raise ConfigError("--sites deals patients, --site-column says where they are; give one of them")
    columns = Columns(image_column, label_column, mask_column, patient_column, site_column, split_column)
    written = init(
        root,
        Wishes(kind or "", table, columns, patient, sites, shares_in(shares), seed, redraw, skip=skip, out=out, copy=copy, force=force),
    )
    print(written.render())
    print(f"next: medflare task init {shlex.quote(str(written.home))} --out task.json")
    return 0


def check(
    root: Root,
    task: Annotated[str | None, typer.Option(help=_TASK)] = None,
    local: Annotated[
        Path | None, typer.Option(help="The site's local/medflare.json, for its bounds and data_folders (default: none)")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for thumbnails (default: none are written)")] = None,
) -> int:
    """Validate a site's folder, or a folder of sites; counts, sizes, classes, shift, thumbnails."""
    from medflare.data.local import local_settings, read_local
    from medflare.training.check import check_site

    if local is not None and not local.exists():  # a site's own may be missing, one that is named may not
        raise ConfigError(f"--local {local}: file not found; correct the path, or leave it out")
    report = check_site(root, _task(task, root), out=out, own=local_settings({} if local is None else read_local(local)))
    print(report.render())
    return 0 if report.ok else 1


def fingerprint(
    root: Root,
    task: Annotated[str | None, typer.Option(help=f"What files and labels mean, size and network do not matter: {_TASK}")] = None,
    out: Annotated[Path | None, typer.Option(help="File to write (default: printed)")] = None,
) -> int:
    """Sizes, spacings, intensities and classes of the training images as numbers, to plan a task from.

    Writes JSON with the site's name and numbers over its training images: no image, no file, no patient is in it.
    """
    from medflare.core.store import refuse_unwritable, write_json
    from medflare.data.checking.fingerprint import fingerprints, to_json

    if out is not None:
        refuse_unwritable(out)
    found = fingerprints(root, _task(task, root))
    if out is None:
        print(json.dumps(to_json(found), indent=2))
        return 0
    write_json(out, to_json(found), public=True)
    for item in found:
        print(f"{item.site}: {item.images} training images of {item.patients} patients")
    print(f"written: {out}; read it before it leaves the site")
    return 0


def prepare(
    name: Annotated[str | None, typer.Argument(help="See --list")] = None,
    listed: Annotated[bool, typer.Option("--list", help="Show what can be prepared: sites, sizes, licence, where to download")] = False,
    source: Annotated[Path | None, typer.Option("--from", metavar="DOWNLOADS", help="Folder of the downloads, unpacked")] = None,
    to: Annotated[
        Path | None, typer.Option(metavar="DATA", help="Folder for the sites, with hard links to the files, or patches of them")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Fail where counts differ from the paper's")] = False,
    redraw: Annotated[bool, typer.Option("--redraw", help="Draw the split by patient, also where the download names one")] = False,
    seed: Seed = 0,
    copy: Copy = False,
    force: Force = False,
) -> int:
    """Make the sites of a paper from what is downloaded for it.

    Makes a folder per site with its files and datalist.json, counts them against the paper's table, and refuses a patient who is in two
    splits or at two sites. No image is changed.
    """
    from medflare.data.dataset_import.papers.catalogue import get_preparation, listing
    from medflare.data.dataset_import.papers.preparing import Choices, prepare

    if listed:
        print(listing())
        return 0
    if name is None or source is None or to is None:
        raise ConfigError("data prepare: give NAME, --from DOWNLOADS and --to DATA; --list shows the names")
    preparation = get_preparation(name)
    print(prepare(preparation, source, to, Choices(strict=strict, redraw=redraw, seed=seed, copy=copy, force=force)).render())
    return 0


def features(
    root: Root,
    task: Annotated[str, typer.Option(help="Classification, with network.weights: preset name or a JSON file")],
    to: Annotated[Path, typer.Option(metavar="FEATURES", help="Folder for the sites and their task.json")],
    weights: Annotated[
        Path | None, typer.Option(help="The file, or its folder (default: MEDFLARE_WEIGHTS, or a package that brings it)")
    ] = None,
    force: Force = False,
) -> int:
    """Put every image through a pretrained body once, and keep what it sees: heads then train in seconds.

    Makes a site, or a folder of sites, whose images are features of the task's network as its file of weights has it, and a task that
    trains a head on them. Patients, labels and splits stay as they are. Images are taken without augmentation.
    """
    from medflare.data.dataset_import.features import write_features
    from medflare.tasks.config import load_task

    print(write_features(root, load_task(task), to, weights=weights, force=force).render())
    return 0


def _task(named: str | None, root: Path) -> "TaskConfig":
    """The task that was named; else the one beside the data, else what `medflare task init` would propose, and a line which it is.

    Raises:
        ConfigError: it is no task.
        DataError: none can be proposed.
    """
    from medflare.tasks.config import load_task
    from medflare.training.proposing import Answers, propose

    if named is not None:
        return load_task(named)
    root = root.resolve()
    if beside := next((file for folder in (root, root.parent) if (file := folder / _TASK_FILE).is_file()), None):
        print(f"task: {beside}", file=sys.stderr)
        return load_task(beside)
    try:
        proposed = load_task(propose(root, Answers()).settings)
    except DataError as error:
        raise DataError(f"no task can be proposed: {error}; or name one with --task") from error
    print(f"task: {proposed.name}, as medflare task init proposes it; name another with --task", file=sys.stderr)
    return proposed


# -- task --------------------------------------------------------------------------------------------------------------------


def plan(
    fingerprints: Annotated[list[Path], typer.Argument(metavar="FINGERPRINT...", help="Files of medflare data fingerprint")],
    out: Annotated[Path, typer.Option(help="Task file to write")],
    memory: Annotated[float, typer.Option(metavar="GIB", help="Of the smallest training device")] = 8.0,
    modality: Annotated[
        Literal["mr", "ct", "photo"], typer.Option(help="ct: Hounsfield units; photo: colours; mr: all whose numbers have no unit")
    ] = "mr",
    voxels: Annotated[
        bool, typer.Option("--voxels", help="Do not use the files' millimetres: where spacings are unknown or wrong")
    ] = False,
    name: Annotated[str | None, typer.Option(help="Of the task (default: that of the fingerprints' task, and _planned)")] = None,
) -> int:
    """Propose a segmentation task from the fingerprints of its sites, by nnU-Net's rules.

    Writes a task with spacing, patch, network, batch and normalisation, and prints each choice with its reason.
    """
    from medflare.core.store import write_json
    from medflare.data.checking.fingerprint import read_fingerprints
    from medflare.data.checking.planning import plan

    found = read_fingerprints(fingerprints)
    proposed = plan(found, modality=modality, memory=memory, voxels=voxels, name=name)
    write_json(out, proposed.settings, public=True)
    print(proposed.render())
    sites = ", ".join(item.site for item in found)
    print(f"planned from {sum(item.images for item in found)} training images ({sites}); written: {out}")
    return 0


def init_task(
    root: Root,
    out: Annotated[Path, typer.Option(help="Task file to write")],
    name: Annotated[str | None, typer.Option(help="Of the task (default: that of the data)")] = None,
    labels: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Classes or structures, separated by commas, without the background")
    ] = None,
    channels: Annotated[int | None, typer.Option(help="Of an image: 1 grey, 3 colour")] = None,
    dims: Annotated[int | None, typer.Option(min=2, max=3, help="3: volumes whole; 2: pictures, and volumes cut into slices")] = None,
    size: Annotated[
        str | None, typer.Option(metavar="SIDES", help="Shrink images to H,W or X,Y,Z: quick on a CPU (default: by the images)")
    ] = None,
    network: Annotated[str | None, typer.Option(metavar="NAME", help="medflare's or MONAI's, see docs/task.md")] = None,
    pretrained: Annotated[
        bool,
        typer.Option("--pretrained", help="Insist on weights that a package brings (default: where it is installed and fits the images)"),
    ] = False,
    modality: Annotated[
        Literal["mr", "ct", "photo"] | None, typer.Option(help="What intensities are (default: by what they look like)")
    ] = None,
    memory: Annotated[float, typer.Option(metavar="GIB", help="Of the smallest training device")] = 8.0,
    yes: Annotated[bool, typer.Option("--yes", help="Ask nothing")] = False,
    force: Annotated[bool, typer.Option("--force", help="Write a task file anew that exists")] = False,
) -> int:
    """Write a task for the images of a folder with datalist.json; asks on a terminal.

    Looks at the images and writes a task: kind, labels, channels, size, network and the rest, each with its reason. On a terminal it asks
    what was not said; Return takes what is proposed.
    """
    from medflare.core.store import refuse_unwritable, write_json
    from medflare.training.proposing import propose

    if out.is_file() and not force:
        raise ConfigError(f"{out} exists; keep it, or write it anew with --force")
    refuse_unwritable(out)
    asked = {"name": name, "labels": labels, "size": size, "network": network}
    fixed = {"channels": channels, "dims": dims, "modality": modality, "memory": memory, "pretrained": pretrained}
    proposed = propose(root, _answers(asked, fixed))
    if sys.stdin.isatty() and not yes:
        proposed = _agreed(asked, proposed, lambda given: propose(root, _answers(given, fixed)))
    write_json(out, proposed.settings, public=True)
    print(proposed.render())
    place, file = shlex.quote(str(root)), shlex.quote(str(out))
    print(f"written: {out}\nnext: medflare data check {place} --task {file}")
    print(f"      medflare run fedavg --task {file} --data-root {place} --sites {_sites(root)} --engine local")
    return 0


def _answers(asked: dict[str, str | None], fixed: dict[str, Any]) -> "Answers":
    """What the user says of a task: what can be asked on a terminal, as text, and the rest."""
    from medflare.training.proposing import Answers

    size, labels = asked["size"] or "", names_in(asked["labels"] or "")
    try:
        sides = tuple(int(side) for side in size.split(",")) if size else ()
    except ValueError:
        raise ConfigError(f"--size {size!r}: give the sides in pixels, for example 128,128") from None
    return Answers(name=asked["name"] or "", labels=tuple(labels), size=sides, network=asked["network"] or "", **fixed)


def _agreed(asked: dict[str, str | None], proposed: "Plan", propose: Callable[[dict[str, str | None]], "Plan"]) -> "Plan":
    """Ask for what no option said, again where the images cannot be had as was answered, and propose anew what follows from it."""
    settings = proposed.settings
    shown = {
        "name": settings["name"],
        "labels": ",".join(label for label in settings["labels"] if label != "background"),
        "size": ",".join(map(str, settings["size"])),
        "network": settings["network"]["name"],
    }
    first = shown = {name: value for name, value in shown.items() if asked[name] is None}
    refused: dict[str, str] = {}
    while True:
        shown = {name: input(f"{name} [{value}]: ").strip() or value for name, value in shown.items()}
        if shown == first:
            return proposed
        if shown == refused:  # Return on every question: back to what was proposed
            shown = first
            continue
        try:
            return propose(asked | {name: answer for name, answer in shown.items() if answer != first[name]})
        except MedflareError as error:
            print(f"medflare: {error}", file=sys.stderr)
            refused = shown


def _sites(root: Path) -> str:
    """What --sites is for a data root."""
    from medflare.data.datalist import site_folders, site_name

    folders = site_folders(root)
    return "1" if folders == [root] else ",".join(site_name(folder) for folder in folders)
