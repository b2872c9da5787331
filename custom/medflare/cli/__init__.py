"""The `medflare` command. Every subcommand exits non-zero when it failed and says why in one line."""

import argparse
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medflare.cli.models import add_commands
from medflare.core.errors import MedflareError

if TYPE_CHECKING:
    from medflare.tasks.config import TaskConfig

DEFAULT_ROUNDS = 10
_TASK_PREFIX = "task."


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.command(options) or 0)
    except MedflareError as error:
        print(f"medflare: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("medflare: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever read the output (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains when it flushes at the end
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="medflare",
        description="Federated medical imaging: personal models for the hospitals that train, a good one for those that never did.",
        epilog="Start with: medflare run fedsm --sites 4    (embedded synthetic images, a few minutes on two cores)",
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_run(commands)
    _add_job(commands)
    _add_resume(commands)
    _add_study(commands)
    _add_results(commands)
    _add_methods(commands)
    _add_data(commands)
    add_commands(commands)
    return parser


def _federation_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("method", help="fedavg, fedsm, ...; `medflare methods` lists them with their hyper-parameters")
    parser.add_argument("--task", default="phantom", help="preset name or a JSON file, see app_configs/ (default: phantom, synthetic)")
    parser.add_argument("--rounds", type=int, default=DEFAULT_ROUNDS, help="federation rounds (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of everything that is drawn (default: %(default)s)")
    parser.add_argument("--resplit", type=int, metavar="SEED", help="draw the training / validation / test split anew by patient")
    parser.add_argument("--outside", default="", metavar="NAMES", help="comma-separated sites that only receive the final models")
    parser.add_argument("--min-sites", type=int, help="usable answers a step needs (default: 2); a job also starts only with so many")
    parser.add_argument("--sites-per-round", type=int, help="draw this many sites for each round (default: all)")
    parser.add_argument("--site-half", metavar="METHOD", help="use the site half of another method")
    parser.add_argument("--server-half", metavar="METHOD", help="use the server half of another method")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        dest="settings",
        help="a hyper-parameter (lam=0.3) or, with the prefix task., a task setting (task.batch_size=8); may be repeated",
    )


def _settings(options: argparse.Namespace) -> tuple[dict[str, Any], "TaskConfig"]:
    """(hyper-parameters, task) from --set and --task, checked."""
    from medflare.methods.catalogue import get_method

    values = dict(_named_values(options.settings))
    hyper = {name: value for name, value in values.items() if not name.startswith(_TASK_PREFIX)}
    changes = {name: value for name, value in values.items() if name.startswith(_TASK_PREFIX)}
    if options.resplit is not None:
        changes["task.resplit"] = options.resplit
    get_method(options.method, site=options.site_half, server=options.server_half).check(hyper)
    return hyper, _task(options.task, changes)


def _named_values(settings: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """(name, value) of every --set NAME=VALUE."""
    from medflare.core.errors import ConfigError
    from medflare.core.hyper import parsed_value

    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(f"--set {setting!r} has no value; write NAME=VALUE, for example lam=0.3")
        yield name, parsed_value(value)


def _task(source: str, changes: dict[str, Any]) -> "TaskConfig":
    """The task with the settings that `changes` name by `task.NAME`."""
    from medflare.tasks.config import load_task

    task = load_task(source)
    stripped = {name.removeprefix(_TASK_PREFIX): value for name, value in changes.items()}
    return load_task(_merged(task.to_dict(), stripped)) if changes else task


def _merged(task: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The task with dotted names set: `optimizer.lr` reaches into the mapping `optimizer`."""
    for name, value in changes.items():
        *path, last = name.split(".")
        target = task
        for part in path:
            target = target.setdefault(part, {})
        target[last] = value
    return task


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


# -- run -------------------------------------------------------------------------------------------------------------------


def _add_run(commands: Any) -> None:
    parser = commands.add_parser("run", help="run a federation on this machine", description="Run a federation here and print its results.")
    _federation_options(parser)
    parser.add_argument("--sites", default="4", help="number of sites (site-1, ...) or comma-separated names (default: %(default)s)")
    parser.add_argument("--engine", choices=("flare", "local"), default="flare", help="FLARE's simulator (default) or a plain loop")
    parser.add_argument("--data-root", type=Path, help="folder with a subfolder per site (default: MEDFLARE_DATA_ROOT, else embedded)")
    parser.add_argument("--threads", type=int, help="sites that train at the same time under FLARE (default: all)")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="where results go (default: %(default)s)")
    parser.set_defaults(command=_run)


def _run(options: argparse.Namespace) -> int:
    from medflare.evaluation.console import show_results

    hyper, task = _settings(options)
    sites = [f"site-{place + 1}" for place in range(int(options.sites))] if options.sites.isdigit() else _names(options.sites)
    folder = options.out / f"{options.method}-{task.name}-seed{options.seed}"
    common: dict[str, Any] = {
        "seed": options.seed,
        "outside": _names(options.outside),
        "site_half": options.site_half,
        "server_half": options.server_half,
        "min_sites": options.min_sites,
        "sites_per_round": options.sites_per_round,
        **hyper,
    }
    if options.engine == "local":
        from medflare.federation.local import run_local

        inside = [site for site in sites if site not in common["outside"]]
        run_local(options.method, task, inside, rounds=options.rounds, data_root=options.data_root, out=folder, say=print, **common)
        return 0 if show_results(folder) else 1
    from medflare.flare.recipes import MedflareRecipe

    if options.data_root is not None:
        os.environ["MEDFLARE_DATA_ROOT"] = str(options.data_root.resolve())
    recipe = MedflareRecipe(method=options.method, task=task, num_rounds=options.rounds, **common)
    recipe.simulate(sites, folder, threads=options.threads)
    return 0 if show_results(folder) else 1


# -- study -----------------------------------------------------------------------------------------------------------------


def _add_study(commands: Any) -> None:
    parser = commands.add_parser("study", help="compare methods over seeds and splits; prints and keeps a Markdown table")
    parser.add_argument("candidates", nargs="+", metavar="METHOD[:NAME=VALUE,...]", help="methods, or single-site and centralised")
    parser.add_argument("--task", default="phantom", help="preset name or a JSON file (default: %(default)s)")
    parser.add_argument("--sites", required=True, help="comma-separated names")
    parser.add_argument("--rounds", type=int, default=DEFAULT_ROUNDS, help="federation rounds (default: %(default)s)")
    parser.add_argument("--seeds", default="0,1,2", help="each also draws the split anew by patient (default: %(default)s)")
    parser.add_argument(
        "--leave-one-out", action="store_true", help="each site in turn is outside: never trains, receives the final models"
    )
    parser.add_argument("--data-root", type=Path, help="folder with a subfolder per site")
    parser.add_argument("--processes", type=int, default=1, help="runs at the same time (default: %(default)s)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="task.NAME=VALUE", dest="settings", help="a task setting; may be repeated"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for every run's results.json and table.md; finished runs are kept")
    parser.set_defaults(command=_study)


def _study(options: argparse.Namespace) -> int:
    from medflare.studies.grid import Candidate, Setting, run_study

    candidates = [Candidate.parse(text) for text in options.candidates]
    task = _task(options.task, dict(_named_values(options.settings)))
    setting = Setting(task, tuple(_names(options.sites)), options.rounds, options.data_root)
    seeds = [int(seed) for seed in _names(options.seeds)]
    groups = run_study(candidates, setting, seeds, options.out, leave_one_out=options.leave_one_out, processes=options.processes, say=print)
    print((options.out / "table.md").read_text())
    return 0 if all(run["status"] == "COMPLETED" for runs in groups.values() for run in runs) else 1


# -- job -------------------------------------------------------------------------------------------------------------------


def _add_job(commands: Any) -> None:
    parser = commands.add_parser("job", help="write a FLARE job folder for the simulator, POC or production")
    _federation_options(parser)
    parser.add_argument("--out", type=Path, required=True, help="job folder to write")
    form = parser.add_argument_group("form (default: app/custom/ with a README, the place for classes of your own; medflare is installed)")
    form.add_argument("--no-byoc", action="store_true", help="without app/custom/: what hospitals accept that refuse jobs with code")
    form.add_argument("--embed-code", action="store_true", help="app/custom/ holds medflare: sites need torch, monai and nvflare only")
    parser.set_defaults(command=_job)


def _job(options: argparse.Namespace) -> int:
    from medflare.evaluation.presentation import format_bytes
    from medflare.flare.jobs.building import build_job
    from medflare.flare.jobs.embedding import size_of

    hyper, task = _settings(options)
    folder = build_job(
        options.method,
        task,
        rounds=options.rounds,
        hyper=hyper,
        out=options.out,
        seed=options.seed,
        outside=_names(options.outside),
        min_sites=options.min_sites,
        sites_per_round=options.sites_per_round,
        site_half=options.site_half,
        server_half=options.server_half,
        byoc=not options.no_byoc,
        embed_code=options.embed_code,
    )
    print(f"job folder: {folder} ({format_bytes(size_of(folder))})\ntry it with: nvflare simulator {folder} -n 4 -t 4 -w workspace")
    return 0


# -- resume ----------------------------------------------------------------------------------------------------------------


def _add_resume(commands: Any) -> None:
    parser = commands.add_parser(
        "resume",
        help="go on with an interrupted run after the last step that it finished",
        description="Go on with an interrupted run: here (a folder of `medflare run --engine local`), or as a job for the federation "
        "whose server was interrupted (a job folder and --job).",
    )
    parser.add_argument("path", type=Path, help="folder of the interrupted run, or the job folder that was submitted")
    parser.add_argument("--job", metavar="ID", help="FLARE's id of the interrupted job: writes a job that takes it up")
    parser.add_argument("--out", type=Path, help="with --job: job folder to write")
    parser.add_argument("--data-root", type=Path, help="without --job: folder with a subfolder per site")
    parser.set_defaults(command=_resume)


def _resume(options: argparse.Namespace) -> int:
    from medflare.evaluation.console import show_results

    if options.job is None:
        from medflare.federation.local import resume_local

        resume_local(options.path, data_root=options.data_root, say=print)
        return 0 if show_results(options.path) else 1
    from medflare.flare.jobs.building import resumed_job

    folder = resumed_job(options.path, options.job, options.out or options.path.with_name(f"{options.path.name}-resumed"))
    print(f"job folder: {folder}\nsubmit it to the federation that job {options.job} ran in: nvflare job submit -j {folder}")
    return 0


# -- results ---------------------------------------------------------------------------------------------------------------


def _add_results(commands: Any) -> None:
    parser = commands.add_parser("results", help="show the results of a finished run; exits non-zero if it failed")
    parser.add_argument("path", type=Path, help="results.json, or a folder somewhere above it (a simulator workspace, a downloaded job)")
    parser.set_defaults(command=_results)


def _results(options: argparse.Namespace) -> int:
    from medflare.evaluation.console import show_results

    return 0 if show_results(options.path) else 1


# -- methods ---------------------------------------------------------------------------------------------------------------


def _add_methods(commands: Any) -> None:
    parser = commands.add_parser("methods", help="list methods with hyper-parameters, defaults, paper symbols and equations")
    parser.add_argument("name", nargs="?", help="one method (default: all)")
    parser.set_defaults(command=_methods)


def _methods(options: argparse.Namespace) -> int:
    from medflare.cli.listing import method_listing
    from medflare.methods.catalogue import METHODS, get_method

    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    chosen = [get_method(options.name)] if options.name else METHODS.values()
    print("\n\n".join(method_listing(method, width) for method in chosen))
    return 0


# -- data ------------------------------------------------------------------------------------------------------------------


def _add_data(commands: Any) -> None:
    parser = commands.add_parser("data", help="look at a site's data before it joins")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    check = actions.add_parser("check", help="validate a site's folder, or a folder of sites; counts, sizes, classes, shift, thumbnails")
    check.add_argument("root", type=Path, help="folder with datalist.json, or with one such folder per site")
    check.add_argument("--task", required=True, help="preset name or JSON file")
    check.add_argument("--out", type=Path, help="folder for thumbnails (default: none are written)")
    check.set_defaults(command=_data_check)


def _data_check(options: argparse.Namespace) -> int:
    from medflare.data.check import check_site
    from medflare.tasks.config import load_task

    report = check_site(options.root, load_task(options.task), out=options.out)
    print(report.render())
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
