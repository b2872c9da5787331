"""`medflare data init`, `data prepare`, `data features` and `task init`: from downloaded images to datalists and a task."""

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from medflare.cli.options import Commands, add_command, names_in
from medflare.core.errors import ConfigError

if TYPE_CHECKING:
    from medflare.data.checking.planning import Plan
    from medflare.data.starting.proposing import Answers


def add_commands(commands: Commands) -> None:
    """Declare `task` with its action; `data` has `init` from `add_init`."""
    parser = commands.add_parser(
        "task",
        help="propose a task from a site's images",
        description="A task says what is learnt: labels, size of the images, network, loss and optimizer. It is a JSON file, there to be "
        "changed; docs/data.md has every setting.",
        epilog="example: medflare task init DATA --out task.json",
    )
    _add_task_init(parser.add_subparsers(title="actions", required=True, metavar="ACTION"))


# -- data init -------------------------------------------------------------------------------------------------------------


def add_init(actions: Commands) -> None:
    """Declare `medflare data init` among the actions of `data`."""
    parser = add_command(
        actions,
        "init",
        _init,
        help="write datalist.json for a downloaded folder: class folders, images with masks, or a table",
        description="Recognises a folder per class, images with masks by name (a.png, a_mask.png; images/ and masks/; imagesTr/ and "
        "labelsTr/ with _0000 for channels) or a table with file and label; splits by patient and shows what it made. PNG, JPEG, BMP, "
        "TIFF, NIfTI and DICOM. No image is changed.",
        examples=(
            "medflare data init pictures",
            "medflare data init pictures --patient '^(p\\d+)' --sites 3 --out DATA",
            "medflare data init ham --table ham/metadata.csv --image-column image_id --label-column dx --patient-column lesion_id",
            "medflare data init scans --table scans/list.csv --site-column hospital --out DATA",
        ),
    )
    parser.add_argument("root", type=Path, metavar="FOLDER", help="folder of the images, unpacked")
    parser.add_argument("--kind", choices=("segmentation", "classification"), help="what to make of it (default: what is there)")
    table = parser.add_argument_group("table (default: the one in the folder, its columns by their names)")
    table.add_argument("--table", type=Path, metavar="CSV", help="CSV or TSV file with a row an image")
    table.add_argument("--image-column", default="", metavar="NAME", help="file of the image: path, name, or name without suffix")
    table.add_argument("--label-column", default="", metavar="NAMES", help="class; or several columns of 0 and 1, separated by commas")
    table.add_argument("--mask-column", default="", metavar="NAMES", help="mask file; or several columns, one a structure")
    table.add_argument("--patient-column", default="", metavar="NAME", help="whose image it is")
    table.add_argument("--site-column", default="", metavar="NAME", help="where it is from: a site each, below --out")
    table.add_argument("--split-column", default="", metavar="NAME", help="train, val or test")
    split = parser.add_argument_group("patients, splits and sites")
    split.add_argument("--patient", default="", metavar="REGEX", help="patient in the file name, its first group: '^(p\\d+)'")
    split.add_argument(
        "--shares", default="70,10,20", metavar="T,V,T", help="patients for training, validation and test (default: %(default)s)"
    )
    split.add_argument("--redraw", action="store_true", help="draw the split, also where the folder names one")
    split.add_argument("--seed", type=int, default=0, help="of the draws (default: %(default)s)")
    split.add_argument("--sites", type=int, metavar="N", help="deal the patients to N simulated sites below --out")
    files = parser.add_argument_group("files")
    files.add_argument("--out", type=Path, help="folder for the datalists, with hard links to the files (default: FOLDER itself)")
    files.add_argument("--copy", action="store_true", help="copy the files to --out: where links cannot be, on another disk")
    files.add_argument("--skip", action="store_true", help="leave out what is incomplete or damaged")
    files.add_argument("--force", action="store_true", help="write a datalist.json anew that exists")


def _init(options: argparse.Namespace) -> int:
    from medflare.data.starting.datalists import Wishes, init
    from medflare.data.starting.dealing import shares_in
    from medflare.data.starting.tables import Columns

    if options.copy and options.out is None:
        raise ConfigError("--copy copies files to --out FOLDER; name it, or leave --copy out")
    if options.sites is not None and options.site_column:
        raise ConfigError("--sites deals patients, --site-column says where they are; give one of them")
    columns = Columns(*(getattr(options, f"{name}_column") for name in ("image", "label", "mask", "patient", "site", "split")))
    wishes = Wishes(
        kind=options.kind or "",
        table=options.table,
        columns=columns,
        patient=options.patient,
        sites=options.sites,
        shares=shares_in(options.shares),
        **{name: getattr(options, name) for name in ("seed", "redraw", "skip", "out", "copy", "force")},
    )
    written = init(options.root, wishes)
    print(written.render())
    print(f"next: medflare task init {shlex.quote(str(written.home))} --out task.json")
    return 0


# -- data prepare ----------------------------------------------------------------------------------------------------------


def add_prepare(actions: Commands) -> None:
    """Declare `medflare data prepare` among the actions of `data`."""
    parser = add_command(
        actions,
        "prepare",
        _prepare,
        help="make the sites of a paper from what is downloaded for it",
        description="Makes a folder per site with its files and datalist.json, counts them against the paper's table, and refuses a "
        "patient who is in two splits or at two sites. No image is changed.",
        examples=(
            "medflare data prepare --list",
            "medflare data prepare fed_isic2019 --from DOWNLOADS --to DATA",
            "medflare data prepare prostate --from DOWNLOADS --to DATA --strict",
        ),
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="see --list")
    parser.add_argument("--list", action="store_true", help="show what can be prepared: sites, sizes, licence, where to download")
    parser.add_argument("--from", dest="source", type=Path, metavar="DOWNLOADS", help="folder of the downloads, unpacked")
    parser.add_argument("--to", type=Path, metavar="DATA", help="folder for the sites, with hard links to the files, or patches of them")
    parser.add_argument("--strict", action="store_true", help="fail where counts differ from the paper's")
    parser.add_argument("--redraw", action="store_true", help="draw the split by patient, also where the download names one")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default: %(default)s)")
    parser.add_argument("--copy", action="store_true", help="copy the files: where links cannot be, on another disk")
    parser.add_argument("--force", action="store_true", help="write a datalist.json anew that exists")


def _prepare(options: argparse.Namespace) -> int:
    from medflare.data.starting.papers.catalogue import get_preparation, listing
    from medflare.data.starting.papers.preparing import Choices, prepare

    if options.list:
        print(listing())
        return 0
    if options.name is None or options.source is None or options.to is None:
        raise ConfigError("data prepare: give NAME, --from DOWNLOADS and --to DATA; --list shows the names")
    preparation = get_preparation(options.name)
    choices = Choices(**{name: getattr(options, name) for name in ("strict", "redraw", "seed", "copy", "force")})
    print(prepare(preparation, options.source, options.to, choices).render())
    return 0


# -- data features ---------------------------------------------------------------------------------------------------------


def add_features(actions: Commands) -> None:
    """Declare `medflare data features` among the actions of `data`."""
    parser = add_command(
        actions,
        "features",
        _features,
        help="put every image through a pretrained body once, and keep what it sees: heads then train in seconds",
        description="Makes a site, or a folder of sites, whose images are features of the task's network as its file of weights has it, "
        "and a task that trains a head on them. Patients, labels and splits stay as they are. Images are taken without augmentation.",
        examples=(
            "medflare data features DATA --task task.json --to FEATURES",
            "medflare run grace --task FEATURES/task.json --data-root FEATURES --sites a,b,c --rounds 40 --engine local",
        ),
    )
    parser.add_argument("root", type=Path, metavar="DATA", help="folder with datalist.json, or with one such folder per site")
    parser.add_argument("--task", required=True, help="classification, with network.weights: preset name or a JSON file")
    parser.add_argument("--to", type=Path, required=True, metavar="FEATURES", help="folder for the sites and their task.json")
    parser.add_argument("--weights", type=Path, help="the file, or its folder (default: MEDFLARE_WEIGHTS, or a package that brings it)")
    parser.add_argument("--force", action="store_true", help="write a datalist.json anew that exists")


def _features(options: argparse.Namespace) -> int:
    from medflare.data.starting.features import write_features
    from medflare.tasks.config import load_task

    print(write_features(options.root, load_task(options.task), options.to, weights=options.weights, force=options.force).render())
    return 0


# -- task init -------------------------------------------------------------------------------------------------------------


def _add_task_init(actions: Commands) -> None:
    parser = add_command(
        actions,
        "init",
        _task_init,
        help="write a task for the images of a folder with datalist.json; asks on a terminal",
        description="Looks at the images and writes a task: kind, labels, channels, size, network and the rest, each with its reason. On a "
        "terminal it asks what was not said; Return takes what is proposed.",
        examples=(
            "medflare task init DATA --out task.json",
            "medflare task init DATA --size 128,128 --labels healthy,ill --yes --out task.json",
            "medflare task init CT --modality ct --memory 24 --out liver.json",
        ),
    )
    parser.add_argument("root", type=Path, metavar="DATA", help="folder with datalist.json, or with one such folder per site")
    parser.add_argument("--out", type=Path, required=True, help="task file to write")
    parser.add_argument("--name", help="of the task (default: that of the data)")
    parser.add_argument("--labels", metavar="NAMES", help="classes or structures, separated by commas, without the background")
    parser.add_argument("--channels", type=int, metavar="N", help="of an image: 1 grey, 3 colour")
    parser.add_argument("--dims", type=int, choices=(2, 3), help="3: volumes whole; 2: pictures, and volumes cut into slices")
    parser.add_argument("--size", metavar="SIDES", help="shrink images to H,W or X,Y,Z: quick on a CPU (default: by the images)")
    parser.add_argument("--network", metavar="NAME", help="medflare's or MONAI's, see docs/learning.md")
    about = "insist on weights that a package brings (default: where it is installed and fits the images; --network small_cnn: never)"
    parser.add_argument("--pretrained", action="store_true", help=about)
    parser.add_argument("--modality", choices=("mr", "ct", "photo"), help="what intensities are (default: by what they look like)")
    parser.add_argument("--memory", type=float, default=8.0, metavar="GIB", help="of the smallest training device (default: %(default)g)")
    parser.add_argument("--yes", action="store_true", help="ask nothing")
    parser.add_argument("--force", action="store_true", help="write a task file anew that exists")


def _task_init(options: argparse.Namespace) -> int:
    from medflare.core.store import refuse_unwritable, write_json
    from medflare.data.starting.proposing import propose

    if options.out.is_file() and not options.force:
        raise ConfigError(f"{options.out} exists; keep it, or write it anew with --force")
    refuse_unwritable(options.out)
    proposed = propose(options.root, _answers(options))
    if sys.stdin.isatty() and not options.yes:
        proposed = _agreed(options, proposed)
    write_json(options.out, proposed.settings, public=True)
    print(proposed.render())
    root, task = shlex.quote(str(options.root)), shlex.quote(str(options.out))
    print(f"written: {options.out}")
    print(f"next: medflare data check {root} --task {task}")
    print(f"      medflare run fedavg --task {task} --data-root {root} --sites {_sites(options.root)} --engine local")
    return 0


def _answers(options: argparse.Namespace) -> "Answers":
    from medflare.data.starting.proposing import Answers

    try:
        size = tuple(int(side) for side in options.size.split(",")) if options.size else ()
    except ValueError:
        raise ConfigError(f"--size {options.size!r}: give the sides in pixels, for example 128,128") from None
    return Answers(
        name=options.name or "",
        labels=tuple(names_in(options.labels or "")),
        channels=options.channels,
        dims=options.dims,
        size=size,
        network=options.network or "",
        modality=options.modality,
        memory=options.memory,
        pretrained=options.pretrained,
    )


def _agreed(options: argparse.Namespace, proposed: "Plan") -> "Plan":
    """Asks for what no option said, and proposes anew what follows from other answers."""
    from medflare.data.starting.proposing import propose

    settings = proposed.settings
    shown = {
        "labels": ",".join(label for label in settings["labels"] if label != "background"),
        "size": ",".join(map(str, settings["size"])),
        "network": settings["network"]["name"],
    }
    asked = {name: value for name, value in shown.items() if getattr(options, name) is None}
    answers = {name: input(f"{name} [{value}]: ").strip() for name, value in asked.items()}
    for name, answer in answers.items():
        setattr(options, name, answer if answer not in ("", asked[name]) else None)
    return propose(options.root, _answers(options)) if any(getattr(options, name) for name in asked) else proposed


def _sites(root: Path) -> str:
    """What --sites is for a data root."""
    from medflare.data.datalist import site_folders, site_name

    folders = site_folders(root)
    return "1" if folders == [root] else ",".join(site_name(folder) for folder in folders)
