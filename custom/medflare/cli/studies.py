"""`medflare study`: methods side by side over seeds and splits."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from medflare.cli.options import (
    AUTO_HELP,
    DEFAULT_ROUNDS,
    PHANTOM,
    SET_HELP,
    DataRoot,
    DefaultGroup,
    add_command,
    check_sites,
    environment,
    names_in,
    set_values,
    site_names,
    task_with,
)
from medflare.core.errors import ConfigError

if TYPE_CHECKING:
    from medflare.studies.archive import Groups
    from medflare.studies.candidates import Candidate
    from medflare.studies.setting import Setting
    from medflare.studies.suites import Suite
    from medflare.tasks.config import TaskConfig

_SEEDS: Final = "0,1,2"
Figures = Annotated[Path | None, typer.Option(help="Write figures into this folder as SVG files, those that the runs have numbers for")]


def add_commands(app: typer.Typer) -> None:
    """Declare it."""
    study = typer.Typer(cls=DefaultGroup, help="Compare methods over seeds and splits (study METHODS), or show kept tables.", **AUTO_HELP)
    add_command(
        study,
        "run",
        run_study,
        "medflare study fedavg fedsm --reference all --sites 3 --rounds 5 --out study",
        "medflare study fedsm fedsm:lam=0.3 fedsm:selection=last,gamma=0.9 --sites 4 --out study",
        "medflare study single-site prr single-site:method=prr --task phantom_grades --sites 4 --out study_alone",
        "medflare study fedavg moon:server_algorithm=grace --sites CS,DU,FG,HT --leave-one-out --task brain_lgg --out study",
        "medflare study fedavg fedsm --selection last --sites 4 --out study_last",
        "medflare study --suite prr_table3 --data-root DATA --out prr_table3",
        "medflare study --tables study --figures study/figures",
    )
    add_command(study, "table", show_tables, "medflare study table study --figures study/figures")
    app.add_typer(study, name="study")


def run_study(
    candidates: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="METHOD[:NAME=VALUE,...]",
            help="A method with its hyper-parameters (and site_algorithm=METHOD, server_algorithm=METHOD), or a reference (below)",
        ),
    ] = None,
    reference: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="Comma-separated rows to hold the methods against, or all. constant: the best answer that looks at no image; single-site: "
            "every site alone (as a row of its own, single-site:method=prr, with another method's loss); batch-statistics: FedAvg "
            "normalised by the test images at hand (networks with BatchNorm); centralised: everybody's images in one place; uniform: "
            "FedAvg with every site counting once (of all: where a row does not weigh sites by their images alone); oracle, which "
            "methods with personal models get in any case: the better of global and personal at each site, chosen on test images as "
            "nobody can",
        ),
    ] = "",
    suite: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Run a table of a paper and lay it beside the paper's numbers: a name or a JSON file, see app_configs/suites/; --task, "
            "--set, --sites, --rounds and --seeds change it, and the table says so",
        ),
    ] = None,
    task: Annotated[
        str | None, typer.Option(help=f"Preset name or a JSON file, see app_configs/ (default: the suite's, else {PHANTOM}, synthetic)")
    ] = None,
    set: Annotated[list[str], typer.Option(metavar="NAME=VALUE", help=SET_HELP.capitalize())] = (),  # type: ignore[assignment]
    sites: Annotated[str | None, typer.Option(help="Number of sites (site-1, ...) or comma-separated names")] = None,
    rounds: Annotated[int | None, typer.Option(help=f"Federation rounds (default: the suite's, else {DEFAULT_ROUNDS})")] = None,
    seeds: Annotated[
        str | None, typer.Option(help=f"Each also draws the split anew by patient (default: the suite's, else {_SEEDS})")
    ] = None,
    leave_one_out: Annotated[
        bool, typer.Option("--leave-one-out", help="Each site in turn is outside: never trains, receives the final models")
    ] = False,
    leave_out: Annotated[str, typer.Option(metavar="SITES", help="The same with these sites alone, each in its turn")] = "",
    selection: Annotated[
        str | None,
        typer.Option(
            metavar="best|last|METRIC",
            help="How rows that do not say it themselves choose the round they deliver: the best by the task's metric on validation images "
            "(best), the last one, or the best by another metric, which becomes the task's",
        ),
    ] = None,
    data_root: DataRoot = None,
    processes: Annotated[int, typer.Option(help="Runs at the same time")] = 1,
    out: Annotated[
        Path | None, typer.Option(help="Folder for table.md and study.zip (results of every run, and scores of single patients)")
    ] = None,
    tables: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Train nothing: print the tables of the runs in this folder")
    ] = None,
    figures: Figures = None,
) -> int:
    """Compare methods over seeds and splits; prints and keeps Markdown tables.

    A comparison says little without rows that a method has to beat: --reference all adds them. Every table says by what its models were
    selected, and warns of rows that are still rising or that sit at the constant answer. Differences to the first row, and to training
    alone, have 95 % intervals over seeds and over patients. Completed runs are kept; what failed is run again whenever the study is; a
    folder with runs of other settings is refused. --tables makes the tables of a folder again.
    """
    from medflare.core.store import make_folder, write_atomically
    from medflare.evaluation.results import COMPLETED
    from medflare.studies.grid import run_study
    from medflare.studies.setting import Setting
    from medflare.studies.tables.report import TABLE_FILE

    if (tables is None) == (out is None) or (leave_one_out and leave_out):
        raise ConfigError("study: give one of --out and --tables, and of --leave-one-out and --leave-out at most one")
    if tables is not None:
        if candidates or reference or suite:
            raise ConfigError("--tables shows what was run; leave the methods, --reference and --suite out, or run them with --out")
        return show_tables(tables, figures)
    assert out is not None
    paper = None
    if suite is not None:
        for name, value in (("the methods", candidates), ("--reference", reference), ("--leave-one-out", leave_one_out),
                            ("--leave-out", leave_out), ("--selection", selection)):  # fmt: skip
            if value:
                raise ConfigError(f"--suite {suite} decides {name}; leave it out, or run a study without --suite")
        paper, rows, setting, turns = _suite(suite, task, set, sites, rounds, seeds)
        left_out = _left_out(setting, paper.settings.leave_one_out, list(paper.settings.leave_out))
    else:
        if sites is None:
            raise ConfigError("study: give --sites, a number of sites or their names, or a --suite")
        changed, selection = _selected(task_with(task or PHANTOM, set_values(set)), selection)
        rows = _candidates(candidates or [], reference, changed, selection)
        setting = Setting(changed, tuple(site_names(sites)), DEFAULT_ROUNDS if rounds is None else rounds)
        turns, left_out = _seeds(seeds or _SEEDS), _left_out(setting, leave_one_out, names_in(leave_out))
    with environment(data_root=data_root):
        check_sites(setting.sites, setting.task)
        if figures is not None:
            make_folder(figures, public=True)  # where it cannot be, nothing need be trained
        groups = run_study(rows, setting, turns, out, left_out=left_out, processes=processes, say=print)
    if paper is None:
        print((out / TABLE_FILE).read_text(encoding="utf-8"))
    else:
        from medflare.studies.tables.beside import BESIDE_FILE, beside_the_paper

        text = beside_the_paper(paper, groups)
        write_atomically(out / BESIDE_FILE, text.encode(), public=True)
        print(text)
    _write_figures(figures, groups)
    return 0 if all(run["status"] == COMPLETED for runs in groups.values() for run in runs) else 1


def show_tables(folder: Annotated[Path, typer.Argument(help="Of a study")], figures: Figures = None) -> int:
    """Print the tables of the runs in a study's folder; trains nothing."""
    from medflare.studies.archive import read_study
    from medflare.studies.tables.report import study_report

    groups = read_study(folder)
    print(study_report(groups))
    _write_figures(figures, groups)
    return 0


def _write_figures(folder: Path | None, groups: "Groups") -> None:
    from medflare.core.store import write_atomically
    from medflare.studies.figures import study_figures

    if folder is None:
        return
    for name, svg in study_figures(groups).items():
        write_atomically(folder / f"{name}.svg", svg.encode(), public=True)
        print(f"figure: {folder / name}.svg")


def _suite(
    name: str, task: str | None, changes: list[str], sites: str | None, rounds: int | None, seeds: str | None
) -> "tuple[Suite, list[Candidate], Setting, list[int]]":
    """A suite, as it stands or with what was given otherwise: its rows, its setting, its seeds."""
    from medflare.studies.candidates import Candidate
    from medflare.studies.setting import Setting
    from medflare.studies.suites import load_suite

    suite = load_suite(name)
    setting = Setting(
        task_with(task or suite.task, set_values(changes)),
        suite.sites if sites is None else tuple(site_names(sites)),
        suite.settings.rounds if rounds is None else rounds,
    )
    rows = [Candidate.parse(text) for text in dict.fromkeys(suite.methods.values())]
    return suite, rows, setting, list(suite.seeds) if seeds is None else _seeds(seeds)


def _left_out(setting: "Setting", each: bool, named: list[str]) -> list[str]:
    """The sites that are outside in turn; ConfigError where one of them is no site of the study."""
    if strangers := [site for site in named if site not in setting.sites]:
        raise ConfigError(f"--leave-out {strangers[0]!r}: no site of this study; there are {', '.join(setting.sites)}")
    return list(setting.sites) if each else named


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
