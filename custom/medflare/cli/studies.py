"""`medflare study`: methods side by side over seeds and splits."""

import argparse
from pathlib import Path

from medflare.cli.options import (
    Commands,
    add_command,
    add_data_root,
    add_rounds,
    add_task_options,
    data_root,
    names_in,
    refuse_strangers,
    set_values,
    site_names,
    task_with,
)
from medflare.core.errors import ConfigError


def add_commands(commands: Commands) -> None:
    """Declare it."""
    parser = add_command(
        commands,
        "study",
        _study,
        help="compare methods over seeds and splits; prints and keeps a Markdown table",
        examples=(
            "medflare study single-site fedavg fedsm centralised --sites 3 --rounds 5 --out study",
            "medflare study fedsm fedsm:lam=0.3 fedsm:selection=last,gamma=0.9 --sites 4 --out study",
            "medflare study fedavg moon:server_half=grace --sites CS,DU,FG,HT --leave-one-out --task brain_lgg --out study",
        ),
    )
    parser.add_argument(
        "candidates",
        nargs="+",
        metavar="METHOD[:NAME=VALUE,...]",
        help="a method with its hyper-parameters (and site_half=METHOD, server_half=METHOD), or single-site or centralised",
    )
    add_task_options(parser)
    parser.add_argument("--sites", required=True, help="number of sites (site-1, ...) or comma-separated names")
    add_rounds(parser)
    parser.add_argument("--seeds", default="0,1,2", help="each also draws the split anew by patient (default: %(default)s)")
    parser.add_argument(
        "--leave-one-out", action="store_true", help="each site in turn is outside: never trains, receives the final models"
    )
    add_data_root(parser)
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="runs at the same time (default: %(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="folder for every run's results.json and table.md; finished runs are kept")


def _study(options: argparse.Namespace) -> int:
    from medflare.evaluation.results import COMPLETED
    from medflare.studies.grid import Candidate, Setting, run_study
    from medflare.studies.report import TABLE_FILE

    candidates = [Candidate.parse(text) for text in options.candidates]
    setting = Setting(task_with(options.task, set_values(options.set)), tuple(site_names(options.sites)), options.rounds)
    seeds = _seeds(options.seeds)
    with data_root(options.data_root):
        refuse_strangers(setting.sites, setting.task)
        groups = run_study(
            candidates, setting, seeds, options.out, leave_one_out=options.leave_one_out, processes=options.processes, say=print
        )
    print((options.out / TABLE_FILE).read_text(encoding="utf-8"))
    return 0 if all(run["status"] == COMPLETED for runs in groups.values() for run in runs) else 1


def _seeds(text: str) -> list[int]:
    seeds = names_in(text)
    if not seeds or not all(seed.removeprefix("-").isdecimal() for seed in seeds):
        raise ConfigError(f"--seeds {text!r}: give whole numbers separated by commas, for example 0,1,2")
    return [int(seed) for seed in seeds]
