"""`medflare run`, `resume` and `results`: a federation on this machine."""

import fcntl
import os
import shlex
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from medflare.cli import options
from medflare.core.errors import ERRORS, ConfigError, FederationFailed, StateError, StepFailed
from medflare.core.files import csv_cell, free_folder, write_atomically
from medflare.core.text import Json, JsonDict
from medflare.federation.settings import RUN_SETTINGS, WAITS, RunSettings, run_settings

if TYPE_CHECKING:
    import pandas as pd

    from medflare.inference.deployed import StoredModel
    from medflare.methods.method import Method
    from medflare.tasks.config import TaskConfig

EVALUATE = "evaluate"  # the method that tests the model of --model
_OPTIMIZER = f"{options.TASK}optimizer"
_RATE = f"{_OPTIMIZER}.lr"
_SHORT = {  # option -> the setting of the task that it is short for
    "network": f"{options.TASK}network",
    "lr": _RATE,
    "epochs": f"{options.TASK}local_epochs",
    "batch_size": f"{options.TASK}batch_size",
}
_OTHER_OPTIONS = (
    "sites",
    "data_root",
    "resplit",
    "site_algorithm",
    "server_algorithm",
    "out",
    *_SHORT,
)
Workers = Annotated[
    int | None,
    typer.Option(
        help="Sites that train at the same time in the plain loop, each in a process with "
        "OMP_NUM_THREADS threads (or one); the models do not depend on it "
        "(default: one site after the other, on all cores)"
    ),
]


@dataclass(frozen=True)
class FederationOptions:
    """The method with its algorithms and hyper-parameters, and the task.

    Attributes:
        site_algorithm (METHOD): Use the site algorithm of another method
        server_algorithm (METHOD): Use the server algorithm of another method
        task: Preset name or a JSON file, see app_configs/ (default: that of MODEL, else phantom,
            synthetic)
        lr: Learning rate, short for --set task.optimizer.lr=
        epochs: Local epochs of a round, short for --set task.local_epochs=
        batch_size: Images of a training step, short for --set task.batch_size=
        network: Another network for the task, with its defaults and its usual learning rate
        resplit (SEED): Draw a new training / validation / test split by patient
    """

    method: Annotated[
        str,
        typer.Argument(
            help="fedavg, fedsm, ... (see `medflare methods`), or without training: "
            "evaluate (with --model), fingerprint"
        ),
    ]
    site_algorithm: str | None = None
    server_algorithm: str | None = None
    task: str | None = None
    set: Annotated[
        list[str],
        typer.Option(
            help="A hyper-parameter (lam=0.3; site.beta=1 or server.beta=1 if both algorithms "
            "have it) or a setting of the task (task.batch_size=8); may be repeated",
            metavar="NAME=VALUE",
        ),
    ] = ()  # type: ignore[assignment]
    lr: float | None = None
    epochs: int | None = None
    batch_size: int | None = None
    network: str | None = None
    pretrained: Annotated[
        bool,
        typer.Option(
            "--pretrained",
            help="Start from pretrained weights of an installed package (efficientnet_lite0)",
        ),
    ] = False
    model: Annotated[
        Path | None,
        typer.Option(
            "--from",
            "--model",
            help="Start from a final model (its folder), with its task if --task is missing",
        ),
    ] = None
    resplit: int | None = None


def resolve_federation(
    federation: FederationOptions, settings: Json
) -> "tuple[Method, TaskConfig, Json, JsonDict]":
    """The method, the task, the hyper-parameters of each algorithm, and arguments of `run_local`,
    `MedflareRecipe` and `build_job`.

    ConfigError: an unknown method, hyper-parameter or setting, an invalid value, or a model that
        does not fit the task.
    """
    from medflare.methods.catalogue import SURVEYS, get_method

    name = federation.method
    rounds = settings.get("rounds", options.DEFAULT_ROUNDS)
    if name in SURVEYS:
        if settings.get("rounds"):
            raise ConfigError(f"--rounds: {name} does not train; leave it out")
        rounds = 0
    if name == EVALUATE and federation.model is None:
        raise ConfigError(
            "evaluate: name the model with --model FOLDER, "
            "for example runs/fedavg-phantom-seed0/models/global"
        )
    method = get_method(name, site=federation.site_algorithm, server=federation.server_algorithm)
    hyper, task = hyper_and_task(federation, method, settings.get("adapt", RunSettings.adapt))
    may_be_zero = not method.trains or "weights" in task.network
    if rounds < 0 or (rounds == 0 and not may_be_zero):
        raise ConfigError(f"--rounds {rounds}: 1 or more")
    arguments = {
        "seed": 0,
        **settings,
        "method": name,
        "rounds": rounds,
        "site_algorithm": federation.site_algorithm,
        "server_algorithm": federation.server_algorithm,
    }
    return method, task, hyper, arguments


def hyper_and_task(
    federation: FederationOptions, method: "Method", adapt: str = RunSettings.adapt
) -> "tuple[Json, TaskConfig]":
    """The hyper-parameters of each algorithm and the task; errors as `resolve_federation` has."""
    from medflare.adaptation.registry import with_adaptation
    from medflare.core.hyper import described, split_hyper
    from medflare.inference.deployed import load_model
    from medflare.methods.catalogue import build_deployed
    from medflare.networks.weights import pretrained_settings, starting_state

    # 1. What the options set.
    values = options.set_values(federation.set)
    changes = task_changes(values, **{name: getattr(federation, name) for name in _SHORT})
    hyper = {name: value for name, value in values.items() if not name.startswith(options.TASK)}
    owned = {name for owner in method.hyper_classes.values() for name in described(owner)}
    for name in hyper:
        if name not in owned and name in (*RUN_SETTINGS, *_OTHER_OPTIONS):
            raise ConfigError(
                f"{name} is not a hyper-parameter of {method.name} but an option: "
                f"--{name.replace('_', '-')}"
            )
    if federation.resplit is not None:
        changes[f"{options.TASK}resplit"] = federation.resplit

    # 2. The model to start from or to evaluate.
    source: str | Json = federation.task or options.PHANTOM
    evaluates = method.name == EVALUATE
    model = None
    if federation.model is not None:
        if federation.pretrained:
            raise ConfigError(
                "--pretrained and --from name two initial models; leave one of them out"
            )
        model = load_model(federation.model)
        source, of_model = _start_of_model(model, federation.task, evaluates)
        if evaluates:
            hyper |= of_model
        else:
            changes |= of_model

    # 3. The task, and whether model and settings fit it.
    task = options.task_with(source, changes)
    if federation.pretrained:
        task = options.task_with(task.to_dict() | pretrained_settings(task), {})
    task = with_usual_rate(task, changes)
    if model is not None and evaluates:
        for message in (model.message, with_adaptation(model.message, adapt)):
            build_deployed(task, message)  # raises if the model does not fit
    elif model is not None:
        starting_state(task, 0, federation.model)  # as well
    method.refuse_settings(hyper, task)
    return split_hyper(hyper, method.hyper_classes, method.name), task


def _start_of_model(
    model: "StoredModel", task: str | None, evaluates: bool
) -> "tuple[str | Json, Json]":
    """Where the task comes from, and what names the model's file: hyper-parameters of "evaluate",
    or changes of the task, which then starts from its weights.
    """
    from medflare.inference.deployed import WEIGHTS_FILE

    source = task or model.task.to_dict()
    file = {"file": WEIGHTS_FILE, "sha256": model.card["sha256"]}
    if not evaluates:
        return source, {f"{options.TASK}network.weights": {**file, "format": "medflare"}}
    whole = options.task_with(source, {}).to_dict()
    whole["network"].pop("weights", None)
    return whole, file


def task_changes(values: Json, **short: Any) -> JsonDict:
    """The changes of the task, see `options.task_with`.

    First the short options that are used, then those of --set, which are more specific.
    `values`: of `options.set_values`; `short`: network, lr, ... -> value, or None.
    """
    for option in ("lr", "epochs"):
        name = f"{options.TASK}{option}"
        if name in values:
            raise ConfigError(
                f"--set {name} is no setting of the task; use --{option}, or --set {_SHORT[option]}"
            )
    changes = {_SHORT[option]: value for option, value in short.items() if value is not None}
    network = _SHORT["network"]
    if network in changes:
        changes[network] = {"name": changes[network]}
    for name, value in values.items():
        if name.startswith(options.TASK):
            changes[name] = value
    return changes


def with_usual_rate(task: "TaskConfig", changes: Json) -> "TaskConfig":
    """A task with the usual learning rate, which is printed, if `changes` name another network or
    optimizer and no rate.
    """
    from medflare.preparation.learning_rate import usual_rate

    network = _SHORT["network"]
    named = {network, f"{network}.name", f"{_OPTIMIZER}.name"} & changes.keys()
    if not named or {_RATE, _OPTIMIZER} & changes.keys():
        return task
    rate, reason = usual_rate(task)
    print(f"learning rate {rate:g}: {reason}; set another with --lr", file=sys.stderr)
    return options.task_with(task.to_dict(), {_RATE: rate})


@options.takes("federation", FederationOptions)
@options.takes("settings", RunSettings, skip=("resume",))
def run(
    federation: JsonDict,
    settings: JsonDict,
    sites: str | None = None,
    engine: Literal["flare", "local"] = "flare",
    data_root: options.DataRoot = None,
    weights: Path | None = None,
    threads: int | None = None,
    workers: Workers = None,
    device: options.Device = None,
    dry_run: bool = False,
    track: options.Track = None,
    out: Path = Path("runs"),
    options_file: options.OptionsFile = None,
) -> int:
    """Run a federation on this machine and print its results.

    The folder METHOD-TASK-seedSEED below --out receives results.json, report.html, the models and
    each site's files. An earlier run keeps this name; the new one is then METHOD-TASK-seedSEED.1,
    .2, ... After Ctrl-C in the plain loop, medflare resume continues the run.

    Args:
        sites: Number of sites (site-1, ...) or comma-separated names (default: the data root's
            folders, else 4)
        engine: FLARE's simulator or a plain loop
        weights: File or folder of the task's network.weights (default: MEDFLARE_WEIGHTS)
        threads: Sites that train at the same time under FLARE (default: all)
        dry_run: Check the settings and an image of each site (all images: medflare data check),
            print what would run, and write nothing
        out: Folder for the results

    Examples:
        medflare run fedsm --sites 4                                      # synthetic images,
            FLARE's simulator
        medflare run fedsm --sites 4 --outside site-4 --engine local      # one process; site-4
            never trains
        medflare run fedsm --sites 4 --dry-run                            # checks, and trains
            nothing
        medflare run fedsm --set lam=0.3 --set task.batch_size=8          # a hyper-parameter, a
            setting of the task
        medflare run moon --server-algorithm grace --rounds 20                 # GRACE's
            aggregation of MOON's sites
        medflare run fedavg --task brain_lgg --sites CS,DU,FG,HT --data-root DATA
        medflare run ditto --from runs/fedavg-phantom-seed0/models/global  # continue from a final
            model
        medflare run evaluate --model runs/fedsm-phantom-seed0/models/deployed  # every site
            evaluates it, no site trains
        medflare run fingerprint --task brain_lgg_3d --sites CS,DU,FG,HT --data-root DATA  # for
            medflare task plan
    """
    from medflare.evaluation.console import show_results
    from medflare.federation.preflight import check_run
    from medflare.federation.tracking import check_track

    # 1. Method, task and sites.
    choice = FederationOptions(**federation)
    method, task, hyper, arguments = resolve_federation(choice, settings)
    outside = arguments.get("outside", [])
    names = options.site_names(sites) if sites else options.default_sites(data_root)
    names = list(dict.fromkeys([*names, *outside]))
    _check_number(len(names) - len(outside), settings)

    # 2. Refuse options that are wrong or have no effect.
    if weights is not None and not task.network.get("weights"):
        raise ConfigError(
            f"--weights: task {task.name} has no network.weights; see docs/task.md, or --from"
        )
    if weights is not None and choice.model is not None:
        raise ConfigError(
            "--weights and --from name two places of initial weights; leave one of them out"
        )
    for option, count in (("threads", threads), ("workers", workers)):
        if count is not None and count < 1:
            raise ConfigError(
                f"--{option} {count}: how many sites train at the same time, at least 1"
            )
    if engine == "flare":
        other = {"workers": workers}
    else:
        other = {"threads": threads, **{name: settings.get(name) for name in WAITS}}
    options.refuse_used(f"has no effect with --engine {engine}; leave it out", **other)
    if track is not None:
        check_track(track)
        arguments["track"] = track

    # 3. Check, then run.
    target = out / f"{method.name}-{task.name}-seed{arguments['seed']}"
    with options.environment(data_root, weights or choice.model, device):
        options.check_sites(names, task, sites)
        values = {name: arguments[name] for name in RUN_SETTINGS if name in arguments}
        check_run(method, task, hyper, run_settings(values))
        if dry_run:
            _dry_run(method, task, hyper, names, arguments)
            free = free_folder(target)
            print("checked: settings and an image of each site; medflare data check reads them all")
            print(f"nothing was written; without --dry-run the results come to {free}")
            return 0
        with _new_folder(target) as folder:
            if engine == "local":
                from medflare.federation.local.loop import run_local

                with _explained(
                    folder, workers=workers, data_root=data_root, device=device, track=track
                ):
                    run_local(
                        task=task,
                        sites=names,
                        out=folder,
                        say=print,
                        workers=workers,
                        **arguments,
                        **hyper,
                    )
            else:
                from medflare.flare.recipes import MedflareRecipe

                _simulate(MedflareRecipe(task=task, **arguments, **hyper), names, folder, threads)
    return 0 if show_results(folder) else 1


def _check_number(inside: int, settings: Json) -> None:
    """Raise ConfigError if fewer sites train than the settings need; `inside`: sites that train."""
    if not inside:
        raise ConfigError("--outside: no site is left to train; name one more with --sites")
    for name in ("min_sites", "sites_per_round"):
        needed = settings.get(name)
        if needed is not None and needed > inside:
            raise ConfigError(
                f"--{name.replace('_', '-')} {needed}: {inside} of the sites train; "
                "name more with --sites, or lower it"
            )


def _dry_run(
    method: "Method", task: "TaskConfig", hyper: Json, names: list[str], arguments: Json
) -> None:
    """Check the initial weights and an image of each site, and print what a run would do."""
    from medflare.core.states import state_bytes
    from medflare.data.loading import check_first_image
    from medflare.evaluation.presentation import format_bytes
    from medflare.networks.weights import starting_state

    outside = arguments.get("outside", [])
    inside = [name for name in names if name not in outside]
    starting_state(task, arguments["seed"])
    for name in names:
        check_first_image(name, task, role="outside" if name in outside else "inside")
    weights = state_bytes(method.plan(task, tuple(sorted(inside)), hyper).template())
    sites = f"sites that train: {', '.join(inside)}"
    if outside:
        sites += f"; outside sites: {', '.join(outside)}"
    size = " x ".join(map(str, task.size))
    steps = f"images of a step: {task.batch_size}; local epochs of a round: {task.local_epochs}"
    print(f"{method.name} on {task.name}, {arguments['rounds']} rounds, seed {arguments['seed']}")
    print(sites)
    print(f"task: {task.kind} of {', '.join(task.labels)}; images {size}; metric {task.metric}")
    print(f"network: {task.network['name']}, {format_bytes(weights)}; {steps}")
    print(f"optimizer: {task.optimizer['name']} with lr {task.optimizer['lr']}")


def _simulate(recipe: Any, names: list[str], folder: Path, threads: int | None) -> None:
    """Run FLARE's simulator in a folder.

    Results, report and models of its workspace are linked to where the plain loop writes them.
    """
    from medflare.evaluation.results import RESULTS_FILE, find_results
    from medflare.federation.checkpoint import CHECKPOINT

    print(f"FLARE's simulator starts with {len(names)} sites", flush=True)
    try:
        recipe.simulate(names, folder, threads=threads)
    except FederationFailed:  # results say why
        if not any(folder.rglob(RESULTS_FILE)):
            raise
    with suppress(StateError):  # without results, whoever reads them says so
        for path in sorted(find_results(folder).parent.iterdir()):
            if not path.name.startswith(CHECKPOINT):  # the plain loop cannot resume it
                (folder / path.name).symlink_to(os.path.relpath(path, folder))


def _has_trained_nothing(run: Path) -> bool:
    """Whether a run failed before its first round ended, and cannot be resumed."""
    from medflare.evaluation.results import FAILED, RESULTS_FILE, ROUNDS_FILE, load_results
    from medflare.federation.checkpoint import checkpoint_of

    if (run / ROUNDS_FILE).exists() or checkpoint_of(run).exists():
        return False
    with suppress(StateError):  # a damaged file says nothing
        return bool(load_results(run / RESULTS_FILE)["status"] == FAILED)
    return False


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """Make an empty folder for a run, see `free_folder`; it is removed if the block writes nothing.

    Yields the folder. ConfigError: another process runs in `folder`.
    """
    with locked(folder):
        free = free_folder(folder)
        free.mkdir(parents=True, exist_ok=True)
    if free != folder:
        earlier = f"an earlier run keeps the name {folder}"
        if _has_trained_nothing(folder):
            earlier += " (it failed before its first round; delete it to free the name)"
        print(f"{earlier}; this run is {free}")
    try:
        with locked(free):
            yield free
    finally:
        if not any(free.iterdir()):
            free.rmdir()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the folder of a run; raises ConfigError if another process runs in it."""
    if not folder.is_dir():  # reading from it reports that
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(
                    f"{folder}: another run writes there; wait for its end, or choose another --out"
                ) from None
        yield
    finally:
        os.close(descriptor)  # unlocks


@contextmanager
def _explained(folder: Path, **options: Any) -> Iterator[None]:
    """After Ctrl-C in the block, print the command that continues the run with these options; after
    an error of the method's code store the traceback.
    """
    try:
        yield
    except StepFailed as error:
        file = folder / ERRORS
        write_atomically(file, "".join(traceback.format_exception(error)).encode())
        raise FederationFailed(f"{error}; traceback: {file}") from error
    except KeyboardInterrupt:
        from medflare.federation.checkpoint import checkpoint_of

        if not checkpoint_of(folder).exists():
            raise KeyboardInterrupt(
                "no step is complete, so that nothing can be resumed; start the run again"
            ) from None
        words = ["medflare", "resume", str(folder)]
        for name, value in options.items():
            if value:
                words += [f"--{name.replace('_', '-')}", str(value)]
        raise KeyboardInterrupt(f"continue with: {shlex.join(words)}") from None


def resume(
    path: options.PathArgument,
    job: str | None = None,
    out: Path | None = None,
    workers: Workers = None,
    device: options.Device = None,
    track: options.Track = None,
    data_root: options.DataRoot = None,
) -> int:
    """Continue an interrupted run after its last complete step.

    On this machine (a folder of `medflare run --engine local`), or as a job for the federation
    whose server was interrupted (a job folder and --job).

    Args:
        path: Folder of the interrupted run, or the job folder that was submitted
        job (ID): FLARE's id of the interrupted job: writes a job that resumes it
        out: With --job: job folder to write (default: PATH-resumed)

    Examples:
        medflare resume runs/fedsm-phantom-seed0
        medflare resume jobs/fedsm --job 0b9e31c5-6a0c-4d3c-8f0e-0c6b5b0d8a55 --out
            jobs/fedsm-resumed
    """
    if job is not None:
        options.refuse_used(
            "is for a run on this machine; leave it out with --job",
            workers=workers,
            device=device,
            track=track,
            data_root=data_root,
        )
        from medflare.flare.jobs.building import resumed_job

        folder = resumed_job(path, job, out or path.with_name(f"{path.name}-resumed"))
        print(
            f"job folder: {folder}\nsubmit it to the federation of job {job}: "
            f"medflare job submit {folder} --kit KIT"
        )
        return 0
    if out is not None:
        raise ConfigError(
            "--out is for the job that --job ID writes; "
            "a run of the plain loop continues in its own folder"
        )
    from medflare.evaluation.console import show_results
    from medflare.federation.local.loop import resume_local

    with locked(path), options.environment(data_root=data_root, device=device):
        _check_resumable(path)
        used = {"data_root": data_root, "device": device, "track": track, "workers": workers}
        with _explained(path, **used):
            resume_local(path, workers=workers, track=track, say=print)
    return 0 if show_results(path) else 1


def _check_resumable(path: Path) -> None:
    """Raise an error for a run that cannot be resumed: the attempt would replace the results.

    ConfigError: a complete run. DataError: a site without data. StateError: no run of the plain
    loop was interrupted.
    """
    from medflare.data.local import FOLDER
    from medflare.evaluation.results import COMPLETED, RESULTS_FILE, load_results
    from medflare.federation.checkpoint import checkpoint_of, stored_plan
    from medflare.tasks.config import load_task

    if (path / RESULTS_FILE).is_file() and load_results(path / RESULTS_FILE)["status"] == COMPLETED:
        raise ConfigError(
            f"{path}: this run is complete; see medflare results {shlex.quote(str(path))}"
        )
    if not path.is_dir():
        raise StateError(f"{path}: no such folder; give the folder of a run")
    if not checkpoint_of(path).exists() and any(path.glob(f"*/server/**/{FOLDER}")):
        raise StateError(
            f"{path}: a run in FLARE's simulator cannot be resumed; run it again, "
            "or use --engine local"
        )
    plan = stored_plan(path)
    options.check_sites([*plan["sites"], *plan["outside"]], load_task(plan["task"]))


def results(paths: options.PathArguments, csv: Path | None = None) -> int:
    """Show the results of a finished run; exits non-zero if it failed.

    Of several runs: the settings that differ, and the deployed models' test metric by site with
    differences to the first run.

    Args:
        paths (RUN...): results.json, or a folder above it (a simulator workspace, a downloaded
            job); several: compare them
        csv: Write the test metrics into this file: a row per site, model, structure or class, and
            metric, with intervals

    Examples:
        medflare results workspace                  # of nvflare simulator ... -w workspace
        medflare results runs/fedsm-phantom-seed0 --csv results.csv
        medflare results runs/fedavg-phantom-seed0 runs/fedsm-phantom-seed0   # compares them
    """
    from medflare.evaluation.console import show_results
    from medflare.evaluation.results import COMPLETED, find_results, load_results, results_frame

    if len(paths) == 1:
        completed = show_results(paths[0])
        if not completed:
            _print_resumption(find_results(paths[0]))
        table = None if csv is None else results_frame(load_results(paths[0]))
    else:
        import pandas as pd

        from medflare.studies.compared_runs import comparison, read_run

        names = [path.resolve().name for path in paths]
        if len(set(names)) < len(names):
            names = [str(path) for path in paths]
        runs = {name: read_run(path) for name, path in zip(names, paths, strict=True)}
        if len(runs) < len(paths):
            raise ConfigError("results: a run is named twice; name each run once")
        print(comparison(runs))
        completed = all(run["status"] == COMPLETED for run in runs.values())
        table = pd.concat([results_frame(run).assign(run=name) for name, run in runs.items()])
    if csv is not None and table is not None:
        write_csv(csv, table)
    return 0 if completed else 1


def _print_resumption(file: Path) -> None:
    """Print the command that continues a run of the plain loop whose state is with its results."""
    from medflare.evaluation.results import load_results
    from medflare.federation.checkpoint import checkpoint_of

    engine = load_results(file)["configuration"]["settings"].get("engine")
    if engine == "local" and checkpoint_of(file.parent).exists():
        print(f"next: medflare resume {shlex.quote(str(file.parent))}")


def write_csv(path: Path, table: "pd.DataFrame") -> None:
    """Write a table for a spreadsheet, and print its path."""
    text = table.map(csv_cell).rename(columns=csv_cell).to_csv(index=False)
    write_atomically(path, text.encode(), public=True)
    print(f"table: {path}")
