"""`medflare data` and `medflare plan`: a look at a site's images and labels before it joins, and a task proposed from what was seen."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from medflare.cli.options import Commands, add_command
from medflare.cli.starting import add_features, add_init, add_prepare
from medflare.core.errors import ConfigError, DataError

if TYPE_CHECKING:
    from medflare.tasks.config import TaskConfig

_ROOT = "folder with datalist.json, or with one such folder per site"
_TASK_FILE = "task.json"
_TASK = f"preset name or a JSON file (default: {_TASK_FILE} in the folder or above it, else what medflare task init proposes)"


def add_commands(commands: Commands) -> None:
    """Declare both, `data` with its actions in the order in which a site needs them."""
    parser = commands.add_parser(
        "data",
        help="write a site's datalist, and look at its images before it joins",
        description="From a folder of images to a site that can join: init writes its datalist, check reads every image as the network "
        "will see it, fingerprint says in numbers what there is. For the data of a paper, prepare does what init does for others. features "
        "puts the images through a pretrained network once and keeps what it sees.",
        epilog="example: medflare data check DATA --task task.json --out check",
    )
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION")
    add_init(actions)
    _add_check(actions)
    _add_fingerprint(actions)
    add_prepare(actions)
    add_features(actions)
    _add_plan(commands)


def _task(options: argparse.Namespace) -> "TaskConfig":
    """The task that was named; else the one that lies with the data, else what `medflare task init` would propose, and a line which it is.

    Raises:
        ConfigError: it is no task.
        DataError: none can be proposed.
    """
    from medflare.data.starting.proposing import Answers, propose
    from medflare.tasks.config import load_task

    if options.task is not None:
        return load_task(options.task)
    root = options.root.resolve()
    if lying := next((file for folder in (root, root.parent) if (file := folder / _TASK_FILE).is_file()), None):
        print(f"task: {lying}", file=sys.stderr)
        return load_task(lying)
    try:
        proposed = load_task(propose(root, Answers()).settings)
    except DataError as error:
        raise DataError(f"no task can be proposed: {error}; or name one with --task") from error
    print(f"task: {proposed.name}, as medflare task init proposes it; name another with --task", file=sys.stderr)
    return proposed


# -- check -----------------------------------------------------------------------------------------------------------------


def _add_check(actions: Commands) -> None:
    example = "medflare data check DATA --task brain_lgg --out check"
    check = add_command(
        actions,
        "check",
        _check,
        help="validate a site's folder, or a folder of sites; counts, sizes, classes, shift, thumbnails",
        examples=(example, "medflare data check /data/site-1 --task app_configs/ham10000.json"),
    )
    check.add_argument("root", type=Path, help=_ROOT)
    check.add_argument("--task", help=_TASK)
    check.add_argument("--local", type=Path, help="the site's local/medflare.json, for its bounds and data_folders (default: none)")
    check.add_argument("--out", type=Path, help="folder for thumbnails (default: none are written)")


def _check(options: argparse.Namespace) -> int:
    from medflare.data.checking.check import check_site
    from medflare.data.sites.local import local_settings, read_local

    if options.local is not None and not options.local.exists():  # a site's own may be missing, one that is named may not
        raise ConfigError(f"--local {options.local}: file not found; correct the path, or leave it out")
    own = local_settings({} if options.local is None else read_local(options.local))
    report = check_site(options.root, _task(options), out=options.out, own=own)
    print(report.render())
    return 0 if report.ok else 1


# -- fingerprint and plan --------------------------------------------------------------------------------------------------


def _add_fingerprint(actions: Commands) -> None:
    parser = add_command(
        actions,
        "fingerprint",
        _fingerprint,
        help="sizes, spacings, intensities and classes of the training images as numbers, to plan a task from",
        description="Writes JSON with the site's name and numbers over its training images: no image, no file, no patient is in it.",
        examples=(
            "medflare data fingerprint /data/site-1 --task app_configs/brain_lgg_3d.json --out site-1.json",
            "medflare data fingerprint DATA --task brain_lgg_3d --out sites.json",
        ),
    )
    parser.add_argument("root", type=Path, help=_ROOT)
    parser.add_argument("--task", help=f"what files and labels mean, size and network do not matter: {_TASK}")
    parser.add_argument("--out", type=Path, help="file to write (default: printed)")


def _fingerprint(options: argparse.Namespace) -> int:
    from medflare.core.store import refuse_unwritable, write_json
    from medflare.data.checking.fingerprint import fingerprints, to_json

    if options.out is not None:
        refuse_unwritable(options.out)
    found = fingerprints(options.root, _task(options))
    if options.out is None:
        print(json.dumps(to_json(found), indent=2))
        return 0
    write_json(options.out, to_json(found), public=True)
    for item in found:
        print(f"{item.site}: {item.images} training images of {item.patients} patients")
    print(f"written: {options.out}; read it before it leaves the site")
    return 0


def _add_plan(commands: Commands) -> None:
    parser = add_command(
        commands,
        "plan",
        _plan,
        help="propose a segmentation task from the fingerprints of its sites, by nnU-Net's rules",
        description="Writes a task with spacing, patch, network, batch and normalisation, and prints each choice with its reason.",
        examples=(
            "medflare plan sites.json --out task.json",
            "medflare plan site-1.json site-2.json --modality ct --memory 24 --name liver --out liver.json",
        ),
    )
    parser.add_argument("fingerprints", type=Path, nargs="+", metavar="FINGERPRINT", help="files of medflare data fingerprint")
    parser.add_argument("--out", type=Path, required=True, help="task file to write")
    parser.add_argument("--memory", type=float, default=8.0, metavar="GIB", help="of the smallest training device (default: %(default)g)")
    parser.add_argument(
        "--modality",
        choices=("mr", "ct", "photo"),
        default="mr",
        help="ct: Hounsfield units; photo: colours; mr: all whose numbers have no unit (default: mr)",
    )
    parser.add_argument("--voxels", action="store_true", help="do not use the files' millimetres: where spacings are unknown or wrong")
    parser.add_argument("--name", help="of the task (default: that of the fingerprints' task, and _planned)")


def _plan(options: argparse.Namespace) -> int:
    from medflare.core.store import write_json
    from medflare.data.checking.fingerprint import read_fingerprints
    from medflare.data.checking.planning import plan

    found = read_fingerprints(options.fingerprints)
    proposed = plan(found, modality=options.modality, memory=options.memory, voxels=options.voxels, name=options.name)
    write_json(options.out, proposed.settings, public=True)
    print(proposed.render())
    sites = ", ".join(item.site for item in found)
    print(f"planned from {sum(item.images for item in found)} training images ({sites}); written: {options.out}")
    return 0
