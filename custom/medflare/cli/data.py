"""`medflare data`: a look at a site's images and labels before it joins."""

import argparse
from pathlib import Path

from medflare.cli.options import Commands, add_command


def add_commands(commands: Commands) -> None:
    """Declare it, with one action."""
    example = "medflare data check DATA --task brain_lgg --out check"
    parser = commands.add_parser("data", help="look at a site's data before it joins", epilog=f"example: {example}")
    check = add_command(
        parser.add_subparsers(required=True, metavar="ACTION"),
        "check",
        _check,
        help="validate a site's folder, or a folder of sites; counts, sizes, classes, shift, thumbnails",
        examples=(example, "medflare data check /data/site-1 --task app_configs/ham10000.json"),
    )
    check.add_argument("root", type=Path, help="folder with datalist.json, or with one such folder per site")
    check.add_argument("--task", required=True, help="preset name or a JSON file, see app_configs/")
    check.add_argument("--out", type=Path, help="folder for thumbnails (default: none are written)")


def _check(options: argparse.Namespace) -> int:
    from medflare.data.checking.check import check_site
    from medflare.tasks.config import load_task

    report = check_site(options.root, load_task(options.task), out=options.out)
    print(report.render())
    return 0 if report.ok else 1
