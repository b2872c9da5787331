"""The plain loop: a federation on one machine without FLARE, with the same algorithms."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from medflare.core.errors import ConfigError
from medflare.core.files import free_folder, refuse_links
from medflare.core.message import Message
from medflare.core.settings import check_site_name
from medflare.core.store import MemoryStore, StateStore, Store
from medflare.core.text import Json, Say
from medflare.data.loading import resolve_data_root
from medflare.data.local import LocalSettings
from medflare.evaluation.run_results import RunResults, in_notebook
from medflare.federation.checkpoint import has_run, stored_plan
from medflare.federation.final_models import SiteFolder
from medflare.federation.local.local_exchange import (
    ForkedExchange,
    LocalExchange,
    threads_of_a_site,
)
from medflare.federation.outcome import StepReport
from medflare.federation.participant import Participant
from medflare.federation.run import SITES_FOLDER, Run
from medflare.federation.settings import RULES, RUN_SETTINGS, STATE, run_settings
from medflare.federation.tracking import check_track
from medflare.methods.catalogue import get_method
from medflare.methods.method import Method
from medflare.tasks.classes import Cases
from medflare.tasks.config import TaskConfig, load_task
from medflare.training.computing import usable_device
from medflare.training.opening import open_site
from medflare.training.site import Site

# (site, name of a final model, the model, its test scores by patient)
Delivered = Callable[[str, str, Message, Cases], None]


def run_local(
    method: str | Method,
    task: TaskConfig | str | Path | Json,
    sites: int | Iterable[str],
    *,
    rounds: int,
    seed: int,
    outside: Iterable[str] = (),
    data_root: Path | str | None = None,
    weights: Path | str | None = None,
    device: str | None = None,
    resplit: int | None = None,
    site_algorithm: str | None = None,
    server_algorithm: str | None = None,
    absent: Mapping[int, Iterable[str]] | None = None,
    opener: Callable[[str, str], Site] | None = None,
    out: Path | str | None = None,
    resume: bool = False,
    workers: int | None = None,
    forgetful: bool = False,
    track: str | None = None,
    progress: bool | None = None,
    say: Say | None = None,
    observe: Callable[[StepReport], None] = lambda report: None,
    delivered: Delivered = lambda site, name, model, cases: None,
    **options: Any,
) -> RunResults:
    """Run a federation on this machine and return its results.

    They are a dict, the content of results.json, that a notebook shows as a page.

    Args:
        method: name of the method, or a `Method`.
        task: preset name, JSON file, mapping or configuration.
        sites: names of the sites, or how many (site-1, site-2, ...); all but those outside train.
        rounds: federation rounds.
        seed: of everything that is random.
        outside: sites that do not train and only receive the final models, whether `sites` names
            them or not.
        data_root: folder with one folder per site; None: MEDFLARE_DATA_ROOT, else the task's
            embedded images.
        weights: file of the task's network.weights, or its folder; None: MEDFLARE_WEIGHTS, else an
            installed package's.
        device: torch device of the networks; None: MEDFLARE_DEVICE, else cpu.
        resplit: draw the splits again by patient with this seed.
        site_algorithm: method whose site algorithm replaces that of `method`.
        server_algorithm: method whose server algorithm replaces that of `method`.
        absent: round -> sites that cannot be reached in it.
        opener: (name, role) -> site, for data from elsewhere than `data_root`.
        out: folder for results.json, report.html, models and the sites' folders; an earlier run in
            it is renamed (OUT.1, ...); None: nothing is written.
        resume: continue an interrupted run in `out`; everything else must be as before.
        workers: how many sites train at the same time, each in a process with OMP_NUM_THREADS
            threads (default 1); any number gives the same models. None: one after the other in this
            process, on all of torch's threads.
        forgetful: rebuild every site's algorithm from its stored memory before each step, to find
            state that a method keeps outside of it; not with several workers.
        track: "tensorboard", "mlflow[=URI]", "wandb[=PROJECT]" or "none"; None: TensorBoard files
            in `out`, where it is installed.
        progress: print a progress line after every step; None: in a notebook only.
        say: called with a progress line after every step, in place of `print`.
        observe: called after every step.
        delivered: called with every final model, in the site's process if there are several
            workers.
        options: the fields of `settings.Rules` (`min_sites`, `sites_per_round`, ...), and the
            method's hyper-parameters: by name if one algorithm has the name, else `site={name:
            value}`, `server={name: value}`.

    Raises:
        ConfigError: the method, task, a hyper-parameter, a site name, the weights or the device is
            wrong. Later errors give a result with status FAILED.
        DataError: `data_root` has no data of a site.
        StepFailed: the method's code has a bug; it is raised after results.json says FAILED.
    """
    chosen = get_method(method, site=site_algorithm, server=server_algorithm)
    config = load_task(task)
    if resplit is not None:
        config = replace(config, resplit=resplit)
    apart = tuple(sorted(_listed(outside, "outside")))
    inside = tuple(name for name in _names(sites) if name not in apart)
    if not inside:
        raise ConfigError("every site is outside; name at least one that trains")
    _check_machine(device, workers)
    rules = {name: options.pop(name) for name in RULES if name in options}
    hyper = options  # the others
    settings = run_settings({"rounds": rounds, "seed": seed, "outside": apart, **rules})
    folder = None if out is None else Path(out)
    if say is None:
        printed = in_notebook() if progress is None else progress
        say = print if printed else lambda line: None
    run = Run(
        chosen,
        config,
        hyper,
        settings,
        inside,
        folder=folder,
        weights=None if weights is None else Path(weights),
        say=say,
        observe=observe,
        track=track,
    )
    run.check(resume=resume)
    check_track(track)
    names = (*inside, *apart)
    if opener is None:
        for name in names:
            resolve_data_root(name, config, data_root=data_root)

    memory: dict[str, MemoryStore] = {}

    def open_participant(name: str) -> Participant:
        def open_data(role: str) -> Site:
            if opener is not None:
                return opener(name, role)
            return open_site(name, config, seed=seed, role=role, data_root=data_root, device=device)

        stays = None
        state: Store = memory.setdefault(name, MemoryStore())
        if folder is not None:
            site_folder = folder / SITES_FOLDER / name
            stays = SiteFolder(site_folder, name, chosen, config, seed)
            state = StateStore(site_folder / STATE)
        return Participant(
            name,
            open_data,
            chosen,
            hyper,
            store=state,
            folder=stays,
            on_final_model=partial(delivered, name),
            local=LocalSettings(share_model=True),
        )

    if folder is not None and not resume and has_run(folder):
        earlier = free_folder(folder)
        folder.rename(earlier)
        say(f"the earlier run in {folder} is in {earlier} now")
    with nullcontext() if workers is None else threads_of_a_site():
        if workers is None or workers == 1:
            exchange = LocalExchange(names, open_participant, absent or {}, forgetful)
        else:
            exchange = ForkedExchange(names, open_participant, absent or {}, workers=workers)
        with closing(exchange):
            results = run.execute(exchange, resume=resume, checked=True)
    return RunResults(results, run.outcome.history, folder)


def resume_local(folder: Path | str, **options: Any) -> RunResults:
    """Finish an interrupted run of the plain loop in `folder`, its `out`.

    `options`: `data_root`, `weights`, `device`, `workers`, `track`, `progress`, `say` and `observe`
    of `run_local`; everything else is as before.

    Raises:
        StateError: the folder holds no checkpoint, or a link.
    """
    refuse_links(Path(folder))
    plan = stored_plan(Path(folder))
    site_algorithm, server_algorithm = plan["algorithms"]
    settings = {name: plan[name] for name in RUN_SETTINGS if name in plan}
    return run_local(
        site_algorithm,
        plan["task"],
        plan["sites"],
        site_algorithm=site_algorithm,
        server_algorithm=server_algorithm,
        out=folder,
        resume=True,
        **settings,
        **plan["hyper"],
        **options,
    )


def _names(sites: int | Iterable[str]) -> tuple[str, ...]:
    if isinstance(sites, int):
        names = [f"site-{number + 1}" for number in range(sites)]
    else:
        names = _listed(sites, "sites")
    if not names or len(set(names)) < len(names):
        shown = sites if isinstance(sites, int) else names
        raise ConfigError(f"sites = {shown}: name at least one site, each once")
    return tuple(sorted(names))


def _check_machine(device: str | None, workers: int | None) -> None:
    if device is not None:
        usable_device(device, "device", initialize=False)
    if workers is not None and workers < 1:
        raise ConfigError(f"workers = {workers}: how many sites train at the same time, at least 1")


def _listed(names: Iterable[str], setting: str) -> list[str]:
    """The names of sites, which are names of folders, too."""
    if isinstance(names, str):
        example = [name.strip() for name in names.split(",")]
        raise ConfigError(f"{setting} = {names!r}: give a list of site names, such as {example}")
    listed = list(names)
    for name in listed:
        check_site_name(name)
    return listed
