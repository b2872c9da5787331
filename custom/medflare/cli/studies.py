"""`medflare study`: methods side by side over seeds and splits."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from medflare.cli import options
from medflare.cli.run import task_changes, with_usual_rate, write_csv
from medflare.core.errors import ConfigError
from medflare.core.files import make_folder, write_atomically
from medflare.core.text import Json

if TYPE_CHECKING:
    from medflare.tasks.config import TaskConfig

_SEEDS = "0,1,2"
Figures = Annotated[
    Path | None,
    typer.Option(
        help="Write the learning curves and the differences to the first row into this folder, as "
        "PDF (curves also as SVG)"
    ),
]


def add_groups(app: typer.Typer) -> None:
    """Add `study` with its actions."""
    about = "Compare methods over seeds and splits (study METHODS), or print tables again."
    study = typer.Typer(cls=options.DefaultGroup, help=about, **options.AUTO_HELP)
    options.add_commands(study, run=run_study, table=show_tables)
    app.add_typer(study, name="study")


def run_study(
    out: Path,
    candidates: Annotated[
        list[str] | None, typer.Argument(metavar="METHOD[:NAME=VALUE,...]")
    ] = None,
    reference: str = "",
    suite: str | None = None,
    task: str | None = None,
    set: list[str] = (),  # type: ignore[assignment]
    lr: float | None = None,
    network: str | None = None,
    sites: str | None = None,
    rounds: int | None = None,
    seeds: str | None = None,
    leave_one_out: bool = False,
    leave_out: str = "",
    selection: str | None = None,
    cross_site: bool = False,
    data_root: options.DataRoot = None,
    grid: list[str] = (),  # type: ignore[assignment]
    rerun: list[str] = (),  # type: ignore[assignment]
    processes: int = 1,
    cluster: Annotated[str | None, typer.Option(metavar="slurm[:NAME=VALUE,...]")] = None,
    device: options.Device = None,
    figures: Figures = None,
) -> int:
    """Compare methods over seeds and splits; prints and writes Markdown tables.

    --reference all adds the rows that a method has to beat. Tables show how each row's round was
    selected, and warn of rows that still rise or that equal the constant prediction. Differences to
    the first row, and to training alone, have 95 % intervals over seeds and over patients. A run
    that fails does not stop the others. Completed runs are kept and failed ones repeated when the
    study is run again, and the tables show all rows in the folder; --out with runs of other
    settings, or of a row's earlier code, is an error.

    Args:
        out: Folder for table.md, study.html and study.zip (all results, and scores of single
            patients)
        candidates: A method with its hyper-parameters (and
            site_algorithm=METHOD, server_algorithm=METHOD), or a reference (below)
        reference (NAMES): Comma-separated rows that a method has to beat, or all that the task can
            have. constant: the constant prediction; single-site: every site alone
            (as a row, single-site:method=prr, with another method's loss); batch-statistics: FedAvg
            normalized by the test images (networks with BatchNorm); centralised: the images of all
            sites in one place; uniform: FedAvg with every site counted once; augmentation: FedAvg
            with more augmentation (contrast, intensity, noise); equal-compute: FedAvg with twice
            the local epochs; participating (not of all): FedAvg in which the outside sites train
            too, an oracle. A method with personal models always gets the row oracle: the better
            of global and personal model at each site, chosen on test images
        suite (NAME): Run a table of a paper and show the paper's numbers beside ours, or test a
            mechanism on generated images (mechanisms/NAME): a name or a JSON file, see
            app_configs/suites/; methods and --reference add rows; --task, --set, --sites, --rounds
            and --seeds change it, and the output beside a paper's numbers lists what differs
        task: Preset name or a JSON file, see app_configs/ (default: the suite's, else phantom,
            synthetic)
        set (NAME=VALUE): A setting of the task (task.batch_size=8); may be repeated
        lr: Learning rate, short for --set task.optimizer.lr=
        network: Another network for the task, with its defaults and its usual learning rate
        sites: Number of sites (site-1, ...) or comma-separated names (default: the suite's, else
            the data root's folders, else 4)
        rounds: Federation rounds (default: the suite's, else 10)
        seeds: Each also draws the split by patient (default: the suite's, else 0,1,2)
        leave_one_out: Each site in turn is outside: it does not train and gets the final models
        leave_out (SITES): The same with these sites only, each in its turn
        selection (median|paired|mean|last|METRIC): How rows without a selection of their own select
            the deployed round: by the sites' median, median gain or mean of the task's metric on
            validation images, the last, or by the median of another metric, which becomes the
            task's
        cross_site: Also test every site's model (personal, else deployed) on every site's test
            images
        grid (NAME=VALUE,VALUE): Run each row that has this hyper-parameter (or lr, task.NAME) with
            each value and show the best by validation images; several: all combinations
        rerun (ROW): Run all of this row again, for example after its code changed; may be repeated
        processes: Runs at the same time
        cluster: Run as an array of Slurm jobs, with settings of the
            package submitit (slurm:timeout_min=600,gpus_per_node=1,slurm_partition=gpu); all
            machines need the folders --out and --data-root

    Examples:
        medflare study fedavg fedsm --reference all --sites 3 --rounds 5 --out study
        medflare study fedsm fedsm:lam=0.3 fedsm:selection=last,gamma=0.9 --sites 4 --out study
        medflare study single-site prr single-site:method=prr --task phantom_grades --sites 4 --out
            study_alone
        medflare study fedavg moon:server_algorithm=grace --sites CS,DU,FG,HT --leave-one-out
            --task brain_lgg --out study
        medflare study fedavg fedsm --selection last --sites 4 --out study_last
        medflare study fedavg fedprox --grid mu=0.01,0.1 --grid lr=0.001,0.003 --out study_grid
        medflare study --suite prr_table3 --data-root DATA --out prr_table3
        medflare study moon --suite fedsm_table3 --reference equal-compute --data-root DATA --out
            fedsm_table3
    """
    rows_are_named = candidates or options.names_in(reference)
    if suite is None and not rows_are_named:  # before torch and MONAI are imported
        raise ConfigError(
            "study: name at least one method or --reference, or a --suite; "
            "medflare methods lists the methods"
        )
    if processes < 1:
        raise ConfigError(f"--processes {processes}: give 1 or more")
    values = options.set_values(set)
    if suite is None and sites is None:
        sites = ",".join(options.default_sites(data_root))
    from medflare.studies import study as studies
    from medflare.studies.candidates import rows_of
    from medflare.studies.grid import cells_of, parse_grid
    from medflare.studies.references import Setting
    from medflare.studies.report import TABLE_FILE
    from medflare.studies.suites import BESIDE_FILE, beside_the_paper, load_suite

    methods = candidates or []
    left_out = options.names_in(leave_out)
    names: Sequence[str] = ()
    paper = None
    if suite is not None:
        paper = load_suite(suite)
        options.refuse_used(
            f"is set by --suite {suite}; leave it out, or run a study without --suite",
            leave_one_out=leave_one_out,
            leave_out=leave_out or None,
            selection=selection,
            grid=grid or None,
        )
        of_the_paper = list(dict.fromkeys(paper.methods.values()))
        methods = of_the_paper + [text for text in methods if text not in of_the_paper]
        leave_one_out = paper.settings.leave_one_out
        left_out = list(paper.settings.leave_out)
        names = paper.sites
        task = task or paper.task
        rounds = paper.settings.rounds if rounds is None else rounds
        seeds = seeds or ",".join(map(str, paper.seeds))
    elif leave_one_out and left_out:
        raise ConfigError("study: --leave-one-out and --leave-out exclude each other")
    config = _changed_task(task or options.PHANTOM, values, network, lr)
    config, selection = _selected(config, selection)
    if sites is not None:
        names = options.site_names(sites)
    rounds = options.DEFAULT_ROUNDS if rounds is None else rounds
    setting = Setting(config, tuple(names), rounds, cross_site=cross_site)
    for site in left_out:
        if site not in setting.sites:
            raise ConfigError(
                f"--leave-out {site!r} is no site of this study; "
                f"there are {', '.join(setting.sites)}"
            )
    rows = rows_of(methods, options.names_in(reference), config, selection)
    cells = cells_of(rows, parse_grid(grid), config, options.task_with)
    draws = _seeds(seeds or _SEEDS)
    with options.environment(data_root=data_root, device=device):
        options.check_sites(setting.sites, config, sites)
        if figures is not None:
            make_folder(figures, public=True)  # fails before anything is trained
        left_out = list(setting.sites) if leave_one_out else left_out
        groups = studies.run_study(
            rows,
            setting,
            draws,
            out,
            left_out=left_out,
            grids=cells,
            rerun=rerun,
            processes=processes,
            cluster=cluster,
            say=print,
        )
    if paper is None or not paper.numbers:
        print((out / TABLE_FILE).read_text(encoding="utf-8"))
        print(f"page: {out / 'study.html'}")
    else:
        text = beside_the_paper(paper, groups)
        write_atomically(out / BESIDE_FILE, text.encode(), public=True)
        print(text)
    if figures is not None:
        _write_figures(figures, studies.study_tables(out))
    return _reported_failures(groups)


def _reported_failures(groups: Mapping[str, Sequence[Json]]) -> int:
    """Print a line for every row with failed runs; 1 if there is one."""
    failed = 0
    for row, runs in groups.items():
        reasons = [run["reason"] for run in runs if run["reason"]]
        if reasons:
            failed = 1
            print(f"FAILED: {row}, {len(reasons)} of {len(runs)} runs: {reasons[0]}")
    return failed


def _changed_task(source: str, values: Json, network: str | None, lr: float | None) -> "TaskConfig":
    """The task with the settings of --set, --network and --lr; `values`: of --set."""
    for name in values:
        if not name.startswith(options.TASK):
            is_option = name in ("lr", "network")
            remedy = f"use --{name}" if is_option else f"write {options.TASK}NAME=VALUE"
            raise ConfigError(f"--set {name} is not a setting of the task; {remedy}")
    changes = task_changes(values, network=network, lr=lr)
    return with_usual_rate(options.task_with(source, changes), changes)


def show_tables(
    folders: options.PathArguments,
    metrics: str = "",
    latex: bool = False,
    figures: Figures = None,
    csv: Path | None = None,
    summary: Path | None = None,
    target: float | None = None,
    html: Path | None = None,
) -> None:
    """Print the tables of a study's folder again, or compare rows over several tasks; trains
    nothing.

    Over tasks: mean ranks, Friedman's test, Nemenyi's critical difference, and Wilcoxon's test of
    every pair with Holm's correction (Demsar, JMLR 2006).

    Args:
        folders (FOLDER...): Of a study; several: studies of different tasks, same rows
        metrics (NAMES): Only these metrics, comma-separated (default: all)
        latex: Print LaTeX (booktabs) in place of Markdown
        csv: Write the test metrics into this file: a row per site, model, structure or class, and
            metric, with intervals
        summary: Write a CSV file with a line for each row: means over seeds with intervals,
            traffic, time, rounds, selection, versions
        target: Of --summary: count the rounds until the validation metric reaches this (default: 95
            % of FedAvg's at the end, without FedAvg of the best row's)
        html: Write the study's page into this file

    Examples:
        medflare study table study --figures study/figures --summary study.csv
        medflare study table study --latex --metrics dice,hd95
        medflare study table brain_study fundus_study grades_study --figures figures
    """
    from medflare.studies import export, page
    from medflare.studies.latex import latex_tables
    from medflare.studies.report import study_report
    from medflare.studies.study import read_study, study_tables

    wanted = options.names_in(metrics)
    if target is not None and summary is None:
        raise ConfigError("--target is of --summary FILE; name the file, or leave --target out")
    if len(folders) > 1:
        options.refuse_used(
            "is of one study; name one folder, or leave it out", csv=csv, summary=summary, html=html
        )
        _show_tasks(folders, wanted, figures, latex)
        return
    groups = read_study(folders[0])
    study = study_tables(folders[0], wanted)
    print(latex_tables(study) if latex else study_report(study))
    if html is not None:
        write_atomically(html, page.study_page(study).encode(), public=True)
        print(f"page: {html}")
    if figures is not None:
        _write_figures(figures, study)
    if csv is not None:
        write_csv(csv, export.long_table(groups, study.metrics))
    if summary is not None:
        write_csv(summary, export.summary_table(study, target))


def _show_tasks(
    folders: Sequence[Path], metrics: Sequence[str], figures: Path | None, latex: bool
) -> None:
    """Print the comparison over tasks, and write ranks.pdf into the folder of figures."""
    from medflare.studies.figures import ranks_drawing
    from medflare.studies.latex import latex_ranking
    from medflare.studies.study import read_study
    from medflare.studies.tables import StudyTables
    from medflare.studies.tasks_compared import (
        critical_difference,
        ranks_of,
        task_means,
        tasks_report,
    )

    studies = [StudyTables(read_study(folder), metrics) for folder in folders]
    print(latex_ranking(studies) if latex else tasks_report(studies))
    if figures is not None:
        means = task_means(studies)
        drawing = ranks_drawing(ranks_of(means), critical_difference(*means.shape))
        file = figures / "ranks.pdf"
        write_atomically(file, drawing.pdf(), public=True)
        print(f"figure: {file}")


def _write_figures(folder: Path, study: Any) -> None:
    from medflare.studies.figures import write_figures

    for file in write_figures(folder, study):
        print(f"figure: {file}")


def _selected(task: "TaskConfig", selection: str | None) -> "tuple[TaskConfig, str | None]":
    """The task with the metric that selects rounds, and `selection` of rows that do not set it."""
    from medflare.methods.parts.selection import RULES
    from medflare.tasks.metrics_table import selection_metrics

    if selection in (None, *RULES, "best"):
        return task, selection
    metrics = selection_metrics(task.kind)
    if selection not in metrics:
        raise ConfigError(f"--selection {selection!r}: choose {', '.join((*RULES, *metrics))}")
    return dataclasses.replace(task, metric=selection), "median"


def _seeds(text: str) -> list[int]:
    try:
        return [int(seed) for seed in options.names_in(text)] or [int(text)]
    except ValueError:
        raise ConfigError(
            f"--seeds {text!r}: give whole numbers separated by commas, for example {_SEEDS}"
        ) from None
