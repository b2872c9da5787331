"""`medflare run` and `medflare resume`: a federation on this machine, and one that was interrupted."""

import argparse
import fcntl
import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from medflare.cli.options import (
    EVALUATE,
    Commands,
    add_command,
    add_data_root,
    add_federation_options,
    chosen_method,
    data_root,
    hyper_and_task,
    refuse_strangers,
    run_arguments,
    site_names,
    weights_place,
)
from medflare.core.errors import ConfigError, FederationFailed, StateError

if TYPE_CHECKING:
    from medflare.flare.recipes import MedflareRecipe

_OF_FLARE = ("step_timeout", "enrol_timeout", "silence", "threads")  # the plain loop calls one site after the other and waits for each


def add_commands(commands: Commands) -> None:
    """Declare both."""
    _add_run(commands)
    _add_resume(commands)


# -- run -------------------------------------------------------------------------------------------------------------------


def _add_run(commands: Commands) -> None:
    parser = add_command(
        commands,
        "run",
        _run,
        help="run a federation on this machine",
        description="Run a federation here and print its results. The folder METHOD-TASK-seedSEED below --out gets results.json, "
        "report.html, the models, and what each site would keep at home; an earlier run of that name is kept beside it. What Ctrl-C "
        "interrupts in the plain loop, medflare resume takes up.",
        examples=(
            "medflare run fedsm --sites 4                                      # synthetic images, FLARE's simulator",
            "medflare run fedsm --sites 4 --outside site-4 --engine local      # one process; site-4 never trains",
            "medflare run fedsm --set lam=0.3 --set task.batch_size=8          # a hyper-parameter, a setting of the task",
            "medflare run fedsm --sites 4 --engine local --workers 2           # two sites train at the same time, no FLARE",
            "medflare run moon --server-half grace --rounds 20                 # GRACE's aggregation of MOON's sites",
            "medflare run fedavg --task brain_lgg --sites CS,DU,FG,HT --data-root DATA",
            "medflare run ditto --from runs/fedavg-phantom-seed0/models/global  # go on from a delivered model",
            "medflare run evaluate --model runs/fedsm-phantom-seed0/models/global  # every site tests it, nobody trains",
            "medflare run fingerprint --task brain_lgg_3d --sites CS,DU,FG,HT --data-root DATA  # what they have, for medflare plan",
        ),
    )
    add_federation_options(parser)
    parser.add_argument("--sites", default="4", help="number of sites (site-1, ...) or comma-separated names (default: %(default)s)")
    parser.add_argument("--engine", choices=("flare", "local"), default="flare", help="FLARE's simulator (default) or a plain loop")
    add_data_root(parser)
    parser.add_argument("--weights", type=Path, help="file or folder of the task's network.weights (default: MEDFLARE_WEIGHTS)")
    parser.add_argument("--threads", type=int, metavar="N", help="sites that train at the same time under FLARE (default: all)")
    _add_plain_loop(parser)
    parser.add_argument("--out", type=Path, default=Path("runs"), help="where results go (default: %(default)s)")


def _add_plain_loop(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="sites that train at the same time in the plain loop, each in a process with OMP_NUM_THREADS threads (or one); "
        "any number gives the same models (default: one site after the other, on all cores)",
    )


def _run(options: argparse.Namespace) -> int:
    from medflare.evaluation.console import show_results

    method = chosen_method(options)
    hyper, task = hyper_and_task(options, method)
    settings = run_arguments(options)
    sites = list(dict.fromkeys([*site_names(options.sites), *settings["outside"]]))
    _refuse_too_few([site for site in sites if site not in settings["outside"]], settings["min_sites"])
    if options.weights is not None and not task.network.get("weights"):
        raise ConfigError(f"--weights: task {task.name} names no network.weights that could lie there; see docs/learning.md, or --from")
    weights = options.weights or options.model
    name = method.name if options.rounds or not method.trains else EVALUATE
    folder = options.out / f"{name}-{task.name}-seed{options.seed}"
    with data_root(options.data_root):
        refuse_strangers(sites, task)
    if options.engine == "local":
        if given := [name for name in _OF_FLARE if getattr(options, name) is not None]:
            raise ConfigError(f"--{given[0].replace('_', '-')} is for FLARE's simulator; leave it out with --engine local")
        from medflare.federation.local.loop import run_local

        with _new(folder, weights) as start, _resumable(folder, options), data_root(options.data_root), weights_place(start):
            run_local(
                options.method, task, sites, rounds=options.rounds, out=folder, say=print, workers=options.workers, **settings, **hyper
            )
    elif options.workers is not None:
        raise ConfigError("--workers is for --engine local; FLARE's simulator has --threads")
    else:
        from medflare.flare.recipes import MedflareRecipe

        recipe = MedflareRecipe(method=options.method, task=task, num_rounds=options.rounds, **settings, **hyper)
        with _new(folder, weights) as start, data_root(options.data_root), weights_place(start):
            _simulate(recipe, sites, folder, options.threads)
    return 0 if show_results(folder) else 1


def _refuse_too_few(inside: list[str], least: int | None) -> None:
    """Nothing where enough sites train, as far as one can know before they are asked.

    Raises:
        ConfigError: nobody does, or fewer than --min-sites.
    """
    if not inside:
        raise ConfigError("--outside: no site is left to train; name one more with --sites")
    if least is not None and least > len(inside):
        raise ConfigError(f"--min-sites {least}: {len(inside)} of the sites train; name more with --sites, or lower it")


# -- the folder of a run ---------------------------------------------------------------------------------------------------


@contextmanager
def _new(folder: Path, start: Path | None) -> Iterator[Path | None]:
    """An empty folder for a run; an earlier run in it is kept beside it, since what two left in one folder nobody can tell apart.

    Args:
        folder: of the run; as it was before, where the block writes nothing.
        start: the weights that the run starts from, which may be those of the earlier run.

    Yields:
        Where these weights are now.

    Raises:
        ConfigError: a run is at work there.
    """
    kept = None
    if folder.is_dir() and any(folder.iterdir()):
        kept = next(place for number in count(1) if not (place := folder.with_name(f"{folder.name}.{number}")).exists())
        with _held(folder):
            folder.rename(kept)
        if start is not None and start.absolute().is_relative_to(folder.absolute()):
            start = kept / start.absolute().relative_to(folder.absolute())
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with _held(folder):
            yield start
    finally:
        if any(folder.iterdir()):
            print(f"the earlier run of this name is kept: {kept}\n" if kept else "", end="")
        else:
            folder.rmdir()
            if kept:
                kept.rename(folder)


def _simulate(recipe: "MedflareRecipe", sites: list[str], folder: Path, threads: int | None) -> None:
    """The run in FLARE's simulator, its results brought up; of a run that failed they say why.

    Raises:
        FederationFailed: it came to no results.
    """
    try:
        recipe.simulate(sites, folder, threads=threads)
    except FederationFailed:
        if not _bring_up(folder):
            raise
    else:
        _bring_up(folder)


def _bring_up(folder: Path) -> bool:
    """Link results, report and models of a run in FLARE's simulator, deep in its workspace, to where the plain loop has them.

    Returns:
        Whether there are any; of none says so who shows them.
    """
    from medflare.evaluation.results import find_results
    from medflare.federation.checkpoint import CHECKPOINT

    try:
        found = find_results(folder)
    except StateError:
        return False
    for path in sorted(found.parent.iterdir()):
        if not path.name.startswith(CHECKPOINT):  # the plain loop does not go on with it
            (folder / path.name).symlink_to(os.path.relpath(path, folder))
    return True


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Nobody else begins or takes up a run in a folder meanwhile.

    Raises:
        ConfigError: somebody has.
    """
    if not folder.is_dir():  # whoever reads from it says so
        yield
        return
    place = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a disk that knows no locks
            if not _locked(place):
                raise ConfigError(f"{folder}: a run is at work there; wait for its end, or name another place with --out")
        yield
    finally:
        os.close(place)  # which ends the lock


def _locked(place: int) -> bool:
    """Lock an open folder; whether nobody else had."""
    try:
        fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def _resumable(folder: Path, options: argparse.Namespace) -> Iterator[None]:
    """Ctrl-C in the block says how to go on with the plain loop's run in a folder."""
    from medflare.core.store import StateStore
    from medflare.federation.checkpoint import CHECKPOINT

    try:
        yield
    except KeyboardInterrupt:
        if not StateStore(folder).path(CHECKPOINT).exists():
            raise
        words = ["medflare", "resume", str(folder)] + (["--data-root", str(options.data_root)] if options.data_root else [])
        raise KeyboardInterrupt(f"go on with: {shlex.join(words)}") from None


# -- resume ----------------------------------------------------------------------------------------------------------------


def _add_resume(commands: Commands) -> None:
    parser = add_command(
        commands,
        "resume",
        _resume,
        help="go on with an interrupted run after the last step that it finished",
        description="Go on with an interrupted run: here (a folder of `medflare run --engine local`), or as a job for the federation "
        "whose server was interrupted (a job folder and --job).",
        examples=(
            "medflare resume runs/fedsm-phantom-seed0",
            "medflare resume jobs/fedsm --job 0b9e31c5-6a0c-4d3c-8f0e-0c6b5b0d8a55 --out jobs/fedsm-resumed",
        ),
    )
    parser.add_argument("path", type=Path, help="folder of the interrupted run, or the job folder that was submitted")
    parser.add_argument("--job", metavar="ID", help="FLARE's id of the interrupted job: writes a job that takes it up")
    parser.add_argument("--out", type=Path, help="with --job: job folder to write (default: PATH-resumed)")
    _add_plain_loop(parser)
    add_data_root(parser)


def _resume(options: argparse.Namespace) -> int:
    if options.job is not None:
        return _resume_job(options)
    if options.out is not None:
        raise ConfigError("--out is for the job that --job ID writes; a run of the plain loop goes on in its own folder")
    from medflare.evaluation.console import show_results
    from medflare.federation.local.loop import resume_local

    with _held(options.path):
        _refuse_what_cannot_go_on(options)
        with _resumable(options.path, options), data_root(options.data_root):
            resume_local(options.path, workers=options.workers, say=print)
    return 0 if show_results(options.path) else 1


def _refuse_what_cannot_go_on(options: argparse.Namespace) -> None:
    """Nothing where an interrupted run is there with its data: an attempt that fails would replace the results.

    Raises:
        ConfigError: the run has come to its end.
        DataError: a site without data.
        StateError: no run that can be taken up is there.
    """
    from medflare.core.store import StateStore
    from medflare.evaluation.names import COMPLETED, FOLDER, RESULTS_FILE
    from medflare.evaluation.results import load_results
    from medflare.federation.checkpoint import CHECKPOINT, stored_plan
    from medflare.tasks.config import load_task

    if (options.path / RESULTS_FILE).is_file() and load_results(options.path / RESULTS_FILE)["status"] == COMPLETED:
        raise ConfigError(f"{options.path}: this run has come to its end; see medflare results {shlex.quote(str(options.path))}")
    if not options.path.is_dir():
        raise StateError(f"{options.path}: not there; give the folder of a run")
    if not StateStore(options.path).path(CHECKPOINT).exists() and any(options.path.glob(f"*/server/**/{FOLDER}")):
        raise StateError(f"{options.path}: a run in FLARE's simulator cannot be resumed; start it afresh, with --engine local it can")
    plan = stored_plan(options.path)
    with data_root(options.data_root):
        refuse_strangers([*plan["sites"], *plan["outside"]], load_task(plan["task"]))


def _resume_job(options: argparse.Namespace) -> int:
    if options.workers is not None:
        raise ConfigError("--workers is for a run on this machine; leave it out with --job")
    if options.data_root is not None:
        raise ConfigError("--data-root is for a run on this machine; with --job every site has its own, in local/medflare.json")
    from medflare.flare.jobs.building import resumed_job

    folder = resumed_job(options.path, options.job, options.out or options.path.with_name(f"{options.path.name}-resumed"))
    print(f"job folder: {folder}\nsubmit it to the federation that job {options.job} ran in: nvflare job submit -j {folder}")
    return 0
