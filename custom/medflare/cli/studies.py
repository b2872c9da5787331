"""`medflare study`: methods side by side over seeds and splits."""

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Final

from medflare.cli.options import (
    DEFAULT_ROUNDS,
    PHANTOM,
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

if TYPE_CHECKING:
    from medflare.studies.archive import Groups
    from medflare.studies.candidates import Candidate
    from medflare.studies.setting import Setting
    from medflare.tasks.config import TaskConfig


_SEEDS: Final = "0,1,2"


def add_commands(commands: Commands) -> None:
    """Declare it."""
    parser = add_command(
        commands,
        "study",
        _study,
        help="compare methods over seeds and splits; prints and keeps Markdown tables",
        description=(
            "Compare methods over seeds and splits; prints and keeps Markdown tables. A comparison says little without rows that a method "
            "has to beat: --reference all adds them. Every table says by what its models were selected, and warns of rows that are "
            "still rising or that sit at the constant answer. Differences to the first row, and to training alone, have 95 % intervals "
            "over seeds and over patients. Completed runs are kept; what failed is run again whenever the study is; a folder with runs "
            "of other settings is refused. --tables makes the tables of a folder again."
        ),
        examples=(
            "medflare study fedavg fedsm --reference all --sites 3 --rounds 5 --out study",
            "medflare study fedsm fedsm:lam=0.3 fedsm:selection=last,gamma=0.9 --sites 4 --out study",
            "medflare study single-site prr single-site:method=prr --task phantom_grades --sites 4 --out study_alone",
            "medflare study fedavg moon:server_half=grace --sites CS,DU,FG,HT --leave-one-out --task brain_lgg --out study",
            "medflare study fedavg fedsm --selection last --sites 4 --out study_last",
            "medflare study --suite prr_table3 --data-root DATA --out prr_table3",
            "medflare study --tables study --figures study/figures",
        ),
    )
    parser.add_argument(
        "candidates",
        nargs="*",
        metavar="METHOD[:NAME=VALUE,...]",
        help="a method with its hyper-parameters (and site_half=METHOD, server_half=METHOD), or a reference (below)",
    )
    parser.add_argument(
        "--reference",
        default="",
        metavar="NAMES",
        help=(
            "comma-separated rows to hold the methods against, or all. constant: the best answer that looks at no image; single-site: "
            "every site alone (as a row of its own, single-site:method=prr, with another method's loss); batch-statistics: FedAvg "
            "normalised by the test images at hand (networks with BatchNorm); centralised: everybody's images in one place; uniform: "
            "FedAvg with every site counting once (of all: where a row does not weigh sites by their images alone); oracle, which "
            "methods with personal models get in any case: the better of global and personal at each site, chosen on test images as nobody "
            "can"
        ),
    )
    about = "run a table of a paper and lay it beside the paper's numbers: a name or a JSON file, see app_configs/suites/; "
    parser.add_argument(
        "--suite", metavar="NAME", help=f"{about}--task, --set, --sites, --rounds and --seeds change it, and the table says so"
    )
    add_task_options(parser, first="the suite's, else ")
    parser.add_argument("--sites", help="number of sites (site-1, ...) or comma-separated names")
    add_rounds(parser, first="the suite's, else ")
    parser.add_argument("--seeds", help=f"each also draws the split anew by patient (default: the suite's, else {_SEEDS})")
    outside = parser.add_mutually_exclusive_group()
    outside.add_argument(
        "--leave-one-out", action="store_true", help="each site in turn is outside: never trains, receives the final models"
    )
    outside.add_argument("--leave-out", default="", metavar="SITES", help="the same with these sites alone, each in its turn")
    parser.add_argument(
        "--selection",
        metavar="best|last|METRIC",
        help="how rows that do not say it themselves choose the round they deliver: the best by the task's metric on validation images "
        "(best), the last one, or the best by another metric, which becomes the task's",
    )
    add_data_root(parser)
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="runs at the same time (default: %(default)s)")
    place = parser.add_mutually_exclusive_group(required=True)
    place.add_argument("--out", type=Path, help="folder for table.md and study.zip (results of every run, and scores of single patients)")
    place.add_argument("--tables", type=Path, metavar="FOLDER", help="train nothing: print the tables of the runs in this folder")
    parser.add_argument(
        "--figures", type=Path, metavar="FOLDER", help="write figures into this folder as SVG files, those that the runs have numbers for"
    )


def _study(options: argparse.Namespace) -> int:
    from medflare.studies.archive import read_study
    from medflare.studies.setting import Setting
    from medflare.studies.tables.report import TABLE_FILE, study_report

    if options.tables is not None:
        if options.candidates or options.reference or options.suite:
            raise ConfigError("--tables shows what was run; leave the methods, --reference and --suite out, or run them with --out")
        groups = read_study(options.tables)
        print(study_report(groups))
        _figures(options, groups)
        return 0
    if options.suite is not None:
        return _suite(options)
    if options.sites is None:
        raise ConfigError("study: give --sites, a number of sites or their names, or a --suite")
    task, selection = _selected(task_with(options.task or PHANTOM, set_values(options.set)), options.selection)
    candidates = _candidates(options.candidates, options.reference, task, selection)
    rounds = DEFAULT_ROUNDS if options.rounds is None else options.rounds
    groups = _run(options, candidates, Setting(task, tuple(site_names(options.sites)), rounds), _seeds(options.seeds or _SEEDS))
    print((options.out / TABLE_FILE).read_text(encoding="utf-8"))
    _figures(options, groups)
    return _status(groups)


def _figures(options: argparse.Namespace, groups: "Groups") -> None:
    from medflare.core.store import write_atomically
    from medflare.studies.figures import study_figures

    for name, svg in study_figures(groups).items() if options.figures is not None else ():
        write_atomically(options.figures / f"{name}.svg", svg.encode(), public=True)
        print(f"figure: {options.figures / name}.svg")


def _run(options: argparse.Namespace, candidates: "list[Candidate]", setting: "Setting", seeds: list[int]) -> "Groups":
    from medflare.core.store import make_folder
    from medflare.studies.grid import run_study

    with data_root(options.data_root):
        refuse_strangers(setting.sites, setting.task)
        if options.figures is not None:
            make_folder(options.figures, public=True)  # where it cannot be, nothing need be trained
        return run_study(
            candidates, setting, seeds, options.out, left_out=_left_out(options, setting), processes=options.processes, say=print
        )


def _left_out(options: argparse.Namespace, setting: "Setting") -> list[str]:
    """The sites that are outside in turn.

    Raises:
        ConfigError: one of them is no site of the study.
    """
    named = names_in(options.leave_out)
    if strangers := [site for site in named if site not in setting.sites]:
        raise ConfigError(f"--leave-out {strangers[0]!r}: no site of this study; there are {', '.join(setting.sites)}")
    return list(setting.sites) if options.leave_one_out else named


def _status(groups: "Groups") -> int:
    from medflare.evaluation.results import COMPLETED

    return 0 if all(run["status"] == COMPLETED for runs in groups.values() for run in runs) else 1


def _suite(options: argparse.Namespace) -> int:
    """Run a suite, as it stands or with what was given otherwise.

    Raises:
        ConfigError: an option that the suite decides.
    """
    from medflare.core.store import write_atomically
    from medflare.studies.candidates import Candidate
    from medflare.studies.setting import Setting
    from medflare.studies.suites import load_suite
    from medflare.studies.tables.beside import BESIDE_FILE, beside_the_paper

    for name in ("candidates", "reference", "leave_one_out", "leave_out", "selection"):
        if getattr(options, name):
            raise ConfigError(f"--suite {options.suite} decides {name.replace('_', ' ')}; leave it out, or run a study without --suite")
    suite = load_suite(options.suite)
    task = task_with(options.task or suite.task, set_values(options.set))
    sites = suite.sites if options.sites is None else tuple(site_names(options.sites))
    rounds = suite.settings.rounds if options.rounds is None else options.rounds
    seeds = list(suite.seeds) if options.seeds is None else _seeds(options.seeds)
    options.leave_one_out, options.leave_out = suite.settings.leave_one_out, ",".join(suite.settings.leave_out)
    candidates = [Candidate.parse(text) for text in dict.fromkeys(suite.methods.values())]
    groups = _run(options, candidates, Setting(task, sites, rounds), seeds)
    text = beside_the_paper(suite, groups)
    write_atomically(options.out / BESIDE_FILE, text.encode(), public=True)
    print(text)
    _figures(options, groups)
    return _status(groups)


def _candidates(methods: list[str], references: str, task: "TaskConfig", selection: str | None) -> "list[Candidate]":
    """The rows in their order: methods as they were given, then the references that are not among them.

    Raises:
        ConfigError: there is none, a method is wrong, or there is no such reference.
    """
    from medflare.studies.candidates import REFERENCES, UNIFORM, UNIFORM_ROW, Candidate
    from medflare.studies.tables.rows import ORACLE

    given = names_in(references)
    known = (*REFERENCES, UNIFORM, ORACLE)
    if unknown := [name for name in given if name not in (*known, "all")]:
        raise ConfigError(f"--reference {unknown[0]!r}: there are all, {', '.join(known)}")
    names = [UNIFORM_ROW if name == UNIFORM else name for name in given if name != ORACLE]  # tables make its row of a method's own models
    rows = [Candidate.parse(text, selection) for text in methods]
    if "all" in names and not all(row.by_samples for row in rows):
        names.append(UNIFORM_ROW)
    wanted = [name for name in ([*REFERENCES, *names] if "all" in names else names) if name not in (*methods, "all")]
    for reference in (Candidate.parse(name, selection) for name in dict.fromkeys(wanted)):
        if reference.label in names or reference.takes(task):  # of all, those that the task can have
            rows.append(reference)
    if not rows:
        raise ConfigError("study: name at least one method, for example fedavg, or a --reference")
    return rows


def _selected(task: "TaskConfig", selection: str | None) -> "tuple[TaskConfig, str | None]":
    """The task, by whose metric rounds are chosen, and the hyper-parameter `selection` of rows that do not say it themselves."""
    if selection in (None, "best", "last"):
        return task, selection
    from medflare.tasks.metrics_table import selection_metrics

    if selection not in selection_metrics(task.kind):
        raise ConfigError(f"--selection {selection!r}: choose best, last, {', '.join(selection_metrics(task.kind))}")
    return dataclasses.replace(task, metric=selection), "best"


def _seeds(text: str) -> list[int]:
    seeds = names_in(text)
    if not seeds or not all(seed.removeprefix("-").isdecimal() for seed in seeds):
        raise ConfigError(f"--seeds {text!r}: give whole numbers separated by commas, for example 0,1,2")
    return [int(seed) for seed in seeds]
