"""`medflare run`, `resume`, `results` and `job`: a federation on this machine, as a FLARE job, and the lead's look at its jobs."""

import fcntl
import os
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple

import typer

from medflare.cli.options import (
    AUTO_HELP,
    DEFAULT_ROUNDS,
    PHANTOM,
    SET_HELP,
    TASK,
    DataRoot,
    DefaultGroup,
    add_command,
    data_root,
    refuse_strangers,
    set_values,
    site_names,
    takes,
    task_with,
    weights_place,
)
from medflare.core.errors import ConfigError, FederationFailed, StateError
from medflare.federation.settings import RUN_SETTINGS, WAITS, RunSettings

if TYPE_CHECKING:
    from medflare.methods.method import Method
    from medflare.tasks.config import TaskConfig

EVALUATE: Final = "evaluate"  # in place of a method: no rounds, the final models are the one that was given
_OTHER_OPTIONS: Final = (
    "sites",
    "data_root",
    "resplit",
    "site_algorithm",
    "server_algorithm",
    "out",
)  # no hyper-parameters, as RUN_SETTINGS

Kit = Annotated[Path, typer.Option(help="Startup kit of the lead, or of the project admin")]
Job = Annotated[str, typer.Argument(help="Name (the newest of several), id, or the beginning of an id", metavar="JOB")]
Workers = Annotated[
    int | None,
    typer.Option(
        help="Sites that train at the same time in the plain loop, each in a process with OMP_NUM_THREADS threads (or one); any number "
        "gives the same models (default: one site after the other, on all cores)"
    ),
]


def add_commands(app: typer.Typer) -> None:
    """Declare them."""
    add_command(
        app,
        "run",
        run,
        "medflare run fedsm --sites 4                                      # synthetic images, FLARE's simulator",
        "medflare run fedsm --sites 4 --outside site-4 --engine local      # one process; site-4 never trains",
        "medflare run fedsm --set lam=0.3 --set task.batch_size=8          # a hyper-parameter, a setting of the task",
        "medflare run moon --server-algorithm grace --rounds 20                 # GRACE's aggregation of MOON's sites",
        "medflare run fedavg --task brain_lgg --sites CS,DU,FG,HT --data-root DATA",
        "medflare run ditto --from runs/fedavg-phantom-seed0/models/global  # go on from a delivered model",
        "medflare run evaluate --model runs/fedsm-phantom-seed0/models/global  # every site tests it, nobody trains",
        "medflare run fingerprint --task brain_lgg_3d --sites CS,DU,FG,HT --data-root DATA  # for medflare task plan",
    )
    add_command(
        app,
        "resume",
        resume,
        "medflare resume runs/fedsm-phantom-seed0",
        "medflare resume jobs/fedsm --job 0b9e31c5-6a0c-4d3c-8f0e-0c6b5b0d8a55 --out jobs/fedsm-resumed",
    )
    add_command(
        app,
        "results",
        results,
        "medflare results workspace                  # of nvflare simulator ... -w workspace",
        "medflare results runs/fedsm-phantom-seed0",
    )
    jobs = typer.Typer(cls=DefaultGroup, help="Write a FLARE job folder (job METHOD), or watch, fetch and list jobs.", **AUTO_HELP)
    add_command(
        jobs,
        "write",
        write_job,
        "medflare job fedsm --task brain_lgg --rounds 20 --set lam=0.3 --out jobs/my_fedsm",
        "medflare job fedsm --no-byoc --out jobs/my_fedsm          # for hospitals that take no code",
        "medflare job evaluate --model MODEL --no-byoc --out jobs/test   # every site tests it, nobody trains",
        "medflare job fingerprint --task draft.json --no-byoc --out jobs/look   # what the sites have, for medflare task plan",
        "medflare job fedsm --step-timeout 600 --min-sites 3 --out jobs/my_fedsm",
    )
    add_command(
        jobs,
        "watch",
        watch_job,
        "medflare job watch fedsm-brain_lgg --kit lead@coordination.org",
        "medflare job watch 0b9e31c5 --kit lead@coordination.org --timeout 3600",
    )
    add_command(jobs, "fetch", fetch_job, "medflare job fetch fedsm-brain_lgg --kit lead@coordination.org --out results")
    add_command(jobs, "list", list_jobs, "medflare job list --kit lead@coordination.org")
    app.add_typer(jobs, name="job")


# -- a federation from its options -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Federation:
    """The method with its algorithms and hyper-parameters, and the task."""

    method: Annotated[
        str,
        typer.Argument(
            help="fedavg, fedsm, ...; `medflare methods` lists them with their hyper-parameters; or evaluate (--model) or fingerprint: "
            "nobody trains"
        ),
    ]
    site_algorithm: Annotated[str | None, typer.Option(help="Use the site algorithm of another method", metavar="METHOD")] = None
    server_algorithm: Annotated[str | None, typer.Option(help="Use the server algorithm of another method", metavar="METHOD")] = None
    task: Annotated[
        str | None, typer.Option(help=f"Preset name or a JSON file, see app_configs/ (default: that of MODEL, else {PHANTOM}, synthetic)")
    ] = None
    set: Annotated[
        list[str],
        typer.Option(
            help=f"A hyper-parameter (lam=0.3, where both algorithms have it site.beta=1 or server.beta=1) or {SET_HELP}",
            metavar="NAME=VALUE",
        ),
    ] = ()  # type: ignore[assignment]
    network: Annotated[str | None, typer.Option(help="Another network for the task, with its defaults (docs/task.md)")] = None
    pretrained: Annotated[
        bool, typer.Option("--pretrained", help="Start from the weights that a package brings for the network (efficientnet_lite0)")
    ] = False
    model: Annotated[
        Path | None, typer.Option("--from", "--model", help="Go on from a delivered model (its folder), with its task if --task is missing")
    ] = None
    resplit: Annotated[int | None, typer.Option(help="Draw the training / validation / test split anew by patient", metavar="SEED")] = None


class Chosen(NamedTuple):
    """What the options of a federation come to; `arguments` are those of `run_local`, `MedflareRecipe` and `build_job`."""

    method: "Method"
    task: "TaskConfig"
    hyper: dict[str, Any]
    arguments: dict[str, Any]


def chosen(federation: Federation, settings: Mapping[str, Any]) -> Chosen:
    """The method, the task, the hyper-parameters under their algorithms and the settings of the run.

    Raises:
        ConfigError: no such method, a name that neither the method nor the task has, a value that the task cannot have, or a model that
            does not fit it.
    """
    from medflare.methods.catalogue import SURVEYS, get_method

    name, rounds = federation.method, settings.get("rounds", DEFAULT_ROUNDS)
    if name in SURVEYS:
        rounds = 0
    if name == EVALUATE:
        if federation.model is None:
            raise ConfigError("evaluate: say which model with --model FOLDER, for example runs/fedavg-phantom-seed0/models/global")
        name, rounds = "fedavg", 0
    algorithms = {"site_algorithm": federation.site_algorithm, "server_algorithm": federation.server_algorithm}
    method = get_method(name, site=federation.site_algorithm, server=federation.server_algorithm)
    hyper, task = hyper_and_task(federation, method)
    return Chosen(method, task, hyper, {"seed": 0, **settings, "method": name, "rounds": rounds, **algorithms})


def hyper_and_task(federation: Federation, method: "Method") -> "tuple[dict[str, Any], TaskConfig]":
    """The hyper-parameters under their algorithms and the task, from --set, --task, --network, --pretrained, --resplit and --from.

    Raises:
        ConfigError: see `chosen`.
    """
    from medflare.core.hyper import described, halved

    given = set_values(federation.set)
    hyper = {name: value for name, value in given.items() if not name.startswith(TASK)}
    owned = {name for owner in method.hyper_classes.values() for name in described(owner)}
    for name in hyper:
        if name not in owned and name in (*RUN_SETTINGS, *_OTHER_OPTIONS):
            raise ConfigError(f"{name} is no hyper-parameter of {method.name} but an option: --{name.replace('_', '-')}")
    changes = {name: value for name, value in given.items() if name.startswith(TASK)}
    if federation.network is not None:
        changes = {f"{TASK}network": {"name": federation.network}} | changes
    if federation.resplit is not None:
        changes[f"{TASK}resplit"] = federation.resplit
    source: str | Mapping[str, Any] = federation.task or PHANTOM
    if federation.model is not None:
        if federation.pretrained:
            raise ConfigError("--pretrained: --from says what training starts from; leave one of them out")
        from medflare.inference.deployed import WEIGHTS_FILE, load_model

        model = load_model(federation.model)
        changes[f"{TASK}network.weights"] = {"file": WEIGHTS_FILE, "sha256": model.card["sha256"], "format": "medflare"}
        source = federation.task or model.task.to_dict()
    task = task_with(source, changes)
    if federation.pretrained:
        from medflare.networks.weights import pretrained_settings

        task = task_with(task.to_dict() | pretrained_settings(task), {})
    if federation.model is not None:
        from medflare.networks.weights import starting_state

        starting_state(task, 0, federation.model)  # a model of another task is refused before a job is written
    return halved(hyper, method.hyper_classes, method.name), task


# -- run ---------------------------------------------------------------------------------------------------------------------


@takes("federation", Federation)
@takes("settings", RunSettings, skip=("resume",))
def run(
    federation: Federation,
    settings: dict[str, Any],
    sites: Annotated[str, typer.Option(help="Number of sites (site-1, ...) or comma-separated names")] = "4",
    engine: Annotated[Literal["flare", "local"], typer.Option(help="FLARE's simulator or a plain loop")] = "flare",
    data_root: DataRoot = None,
    weights: Annotated[Path | None, typer.Option(help="File or folder of the task's network.weights (default: MEDFLARE_WEIGHTS)")] = None,
    threads: Annotated[int | None, typer.Option(help="Sites that train at the same time under FLARE (default: all)")] = None,
    workers: Workers = None,
    out: Annotated[Path, typer.Option(help="Where results go")] = Path("runs"),
) -> int:
    """Run a federation on this machine and print its results.

    The folder METHOD-TASK-seedSEED below --out gets results.json, report.html, the models, and what each site would keep at home; an
    earlier run of that name is kept beside it. What Ctrl-C interrupts in the plain loop, medflare resume takes up.
    """
    from medflare.evaluation.console import show_results

    method, task, hyper, arguments = chosen(federation, settings)
    outside = arguments.get("outside", [])
    names = list(dict.fromkeys([*site_names(sites), *outside]))
    _refuse_too_few(sum(name not in outside for name in names), settings.get("min_sites"))
    if weights is not None and not task.network.get("weights"):
        raise ConfigError(f"--weights: task {task.name} names no network.weights that could lie there; see docs/task.md, or --from")
    label = method.name if arguments["rounds"] or not method.trains else EVALUATE
    folder, place = out / f"{label}-{task.name}-seed{arguments['seed']}", weights or federation.model
    with _data_root(data_root):
        refuse_strangers(names, task)
    if engine == "local":
        if given := [name for name in WAITS if name in settings] + ["threads"] * (threads is not None):
            raise ConfigError(f"--{given[0].replace('_', '-')} is for FLARE's simulator; leave it out with --engine local")
        from medflare.federation.local.loop import run_local

        with _new(folder, place) as start, _resumable(folder, data_root), _data_root(data_root), weights_place(start):
            run_local(task=task, sites=names, out=folder, say=print, workers=workers, **arguments, **hyper)
    elif workers is not None:
        raise ConfigError("--workers is for --engine local; FLARE's simulator has --threads")
    else:
        from medflare.flare.recipes import MedflareRecipe

        recipe = MedflareRecipe(task=task, **arguments, **hyper)
        with _new(folder, place) as start, _data_root(data_root), weights_place(start):
            try:
                recipe.simulate(names, folder, threads=threads)
            except FederationFailed:
                if not _bring_up(folder):
                    raise
            else:
                _bring_up(folder)
    return 0 if show_results(folder) else 1


_data_root = data_root  # commands have an option of that name


def _refuse_too_few(inside: int, least: int | None) -> None:
    """Raise ConfigError where too few sites train, as far as one can know before they are asked."""
    if not inside:
        raise ConfigError("--outside: no site is left to train; name one more with --sites")
    if least is not None and least > inside:
        raise ConfigError(f"--min-sites {least}: {inside} of the sites train; name more with --sites, or lower it")


@contextmanager
def _new(folder: Path, start: Path | None) -> Iterator[Path | None]:
    """An empty folder for a run; an earlier run in it is kept beside it.

    Args:
        folder: of the run; as it was before, where the block writes nothing.
        start: the weights that the run starts from, which may be those of the earlier run.

    Yields:
        Where these weights are now.
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
    """Lock the folder of a run, so that nobody else begins or takes up a run in it; ConfigError where somebody has."""
    if not folder.is_dir():  # whoever reads from it says so
        yield
        return
    place = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a disk that knows no locks
            try:
                fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"{folder}: a run is at work there; wait for its end, or name another place with --out") from None
        yield
    finally:
        os.close(place)  # which ends the lock


@contextmanager
def _resumable(folder: Path, root: Path | None) -> Iterator[None]:
    """Ctrl-C in the block says how to go on with the plain loop's run in a folder."""
    from medflare.core.store import StateStore
    from medflare.federation.checkpoint import CHECKPOINT

    try:
        yield
    except KeyboardInterrupt:
        if not StateStore(folder).path(CHECKPOINT).exists():
            raise
        words = ["medflare", "resume", str(folder), *(["--data-root", str(root)] if root else [])]
        raise KeyboardInterrupt(f"go on with: {shlex.join(words)}") from None


# -- resume and results --------------------------------------------------------------------------------------------------------


def resume(
    path: Annotated[Path, typer.Argument(help="Folder of the interrupted run, or the job folder that was submitted")],
    job: Annotated[str | None, typer.Option(help="FLARE's id of the interrupted job: writes a job that takes it up", metavar="ID")] = None,
    out: Annotated[Path | None, typer.Option(help="With --job: job folder to write (default: PATH-resumed)")] = None,
    workers: Workers = None,
    data_root: DataRoot = None,
) -> int:
    """Go on with an interrupted run after the last step that it finished.

    Here (a folder of `medflare run --engine local`), or as a job for the federation whose server was interrupted (a job folder and
    --job).
    """
    if job is not None:
        for name, value in (("--workers", workers), ("--data-root", data_root)):
            if value is not None:
                raise ConfigError(f"{name} is for a run on this machine; leave it out with --job")
        from medflare.flare.jobs.building import resumed_job

        folder = resumed_job(path, job, out or path.with_name(f"{path.name}-resumed"))
        print(f"job folder: {folder}\nsubmit it to the federation that job {job} ran in: nvflare job submit -j {folder}")
        return 0
    if out is not None:
        raise ConfigError("--out is for the job that --job ID writes; a run of the plain loop goes on in its own folder")
    from medflare.evaluation.console import show_results
    from medflare.federation.local.loop import resume_local

    with _held(path), _data_root(data_root):
        _refuse_what_cannot_go_on(path)
        with _resumable(path, data_root):
            resume_local(path, workers=workers, say=print)
    return 0 if show_results(path) else 1


def _refuse_what_cannot_go_on(path: Path) -> None:
    """Raise where no interrupted run is there with its data: an attempt that fails would replace the results.

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

    if (path / RESULTS_FILE).is_file() and load_results(path / RESULTS_FILE)["status"] == COMPLETED:
        raise ConfigError(f"{path}: this run has come to its end; see medflare results {shlex.quote(str(path))}")
    if not path.is_dir():
        raise StateError(f"{path}: not there; give the folder of a run")
    if not StateStore(path).path(CHECKPOINT).exists() and any(path.glob(f"*/server/**/{FOLDER}")):
        raise StateError(f"{path}: a run in FLARE's simulator cannot be resumed; start it afresh, with --engine local it can")
    plan = stored_plan(path)
    refuse_strangers([*plan["sites"], *plan["outside"]], load_task(plan["task"]))


def results(
    path: Annotated[Path, typer.Argument(help="results.json, or a folder somewhere above it (a simulator workspace, a downloaded job)")],
) -> int:
    """Show the results of a finished run; exits non-zero if it failed."""
    from medflare.evaluation.console import show_results

    return 0 if show_results(path) else 1


# -- job ---------------------------------------------------------------------------------------------------------------------


@takes("federation", Federation)
@takes("settings", RunSettings, skip=("resume",))
def write_job(
    federation: Federation,
    settings: dict[str, Any],
    out: Annotated[Path, typer.Option(help="Job folder to write")],
    track: Annotated[
        str | None, typer.Option(help="The server's curves go to MLflow too (medflare[mlflow])", metavar="mlflow[=URI]")
    ] = None,
    no_byoc: Annotated[
        bool, typer.Option("--no-byoc", help="Without app/custom/: what hospitals accept that refuse jobs with code")
    ] = False,
    embed_code: Annotated[
        bool, typer.Option("--embed-code", help="app/custom/ holds medflare: sites need torch, monai and nvflare only")
    ] = False,
) -> int:
    """Write a FLARE job folder for the simulator, POC or production.

    `medflare job watch`, `fetch` and `list` look at the jobs of a federation.
    """
    from medflare.evaluation.presentation import format_bytes
    from medflare.flare.jobs.building import build_job, size_of

    _, task, hyper, arguments = chosen(federation, settings)
    tracked = {} if track is None else {"track": track}
    folder = build_job(task=task, hyper=hyper, out=out, byoc=not no_byoc, embed_code=embed_code, **tracked, **arguments)
    if federation.model is not None:
        sent = task.network["weights"]
        print(
            f"the server reads {sent['file']} of {federation.model} (sha256 {sent['sha256'][:16]}...): name it in its local/medflare.json"
        )
    place = shlex.quote(str(folder))
    trial = f"nvflare simulator {place} -n 4 -t 4 -w workspace"
    if not task.embedded:
        trial = f"MEDFLARE_DATA_ROOT=DATA nvflare simulator {place} -c SITE,SITE -t 2 -w workspace    (DATA has a folder per site)"
    print(f"job folder: {folder} ({format_bytes(size_of(folder))})\ntry it with: {trial}")
    return 0


def watch_job(
    job: Job,
    kit: Kit,
    timeout: Annotated[float, typer.Option(help="Watch no longer than so many seconds (0: to its end)")] = 0.0,
    patience: Annotated[float, typer.Option(help="Wait so many seconds for a server that goes away meanwhile")] = 600.0,
) -> int:
    """Follow a job of a federation to its end; exits non-zero, and says why, unless it completes.

    Every step with its sites' metrics, what is rejected, late or missing, and who is silent. A server that goes away is tried again.
    """
    from medflare.flare.jobs.watching import watch_job

    _refuse_expired(kit)
    return 0 if watch_job(kit, job, partial(print, flush=True), timeout=timeout, patience=patience) else 1


def fetch_job(
    job: Job, kit: Kit, out: Annotated[Path | None, typer.Option(help="Where the results go (default: a folder named by the id)")] = None
) -> int:
    """Download a job's results, for this account alone, and show them; exits non-zero if the federation failed."""
    from medflare.evaluation.console import show_results
    from medflare.flare.jobs.sessions import fetch_job, found_job, id_of, jobs_of, session

    _refuse_expired(kit)
    before = os.umask(0o077)  # what was learnt from patients is for this account
    try:
        with session(kit) as opened:
            identity = id_of(found_job(jobs_of(opened), job))
            place = fetch_job(opened, identity, out or Path(identity))
    finally:
        os.umask(before)
    return 0 if show_results(place) else 1


def list_jobs(kit: Kit) -> int:
    """The jobs of a federation, the newest last."""
    from medflare.flare.jobs.sessions import jobs_of, listing, session

    _refuse_expired(kit)
    with session(kit) as opened:
        print(listing(jobs_of(opened)))
    return 0


def _refuse_expired(folder: Path) -> None:
    """Raise ConfigError where a person's certificate is not valid by this machine's clock: FLARE asks only whether the server is up."""
    from medflare.cli.startup_kit import Kit, certificate_end

    certificate, key, root = (folder / "startup" / name for name in ("client.crt", "client.key", "rootCA.pem"))
    if certificate.is_file() and root.is_file():  # what is missing the session says
        certificate_end(Kit(folder, "site", folder.resolve().name, "", 0, certificate, key, root))
