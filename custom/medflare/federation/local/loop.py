"""The plain loop: a whole federation on one machine, for tests, sweeps and studies. Same algorithms, same schedule as under FLARE."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from medflare.core.errors import ConfigError
from medflare.core.message import Message
from medflare.core.store import StateStore
from medflare.core.text import is_name
from medflare.data.local import MODELS_GB, Bounds
from medflare.federation.checkpoint import stored_plan
from medflare.federation.final_models import ArtifactStore, SiteFolder
from medflare.federation.local.exchange import LocalExchange
from medflare.federation.local.workers import ForkedExchange, threads_of_a_site
from medflare.federation.outcome import StepReport
from medflare.federation.participant import Participant
from medflare.federation.preflight import check_run
from medflare.federation.run import Run
from medflare.federation.settings import RULES, RUN_SETTINGS, run_settings
from medflare.methods.catalogue import get_method
from medflare.methods.method import Method
from medflare.tasks.classes import Cases
from medflare.tasks.config import TaskConfig, load_task
from medflare.training.opening import open_site
from medflare.training.site import Site

SITES = "sites"  # below `out`: what each site would keep at home
STATE = "state"  # below a site's folder: what it remembers between two steps
Delivered = Callable[[str, str, Message, Cases], None]  # (site, role, delivered model, its test scores patient by patient)


def run_local(
    method: str | Method,
    task: TaskConfig | str | Path | Mapping[str, Any],
    sites: int | Iterable[str],
    *,
    rounds: int,
    seed: int,
    outside: Iterable[str] = (),
    data_root: Path | str | None = None,
    weights: Path | str | None = None,
    resplit: int | None = None,
    site_algorithm: str | None = None,
    server_algorithm: str | None = None,
    absent: Mapping[int, Iterable[str]] | None = None,
    opener: Callable[[str, str], Site] | None = None,
    out: Path | str | None = None,
    resume: bool = False,
    workers: int | None = None,
    models_gb: float = MODELS_GB,
    say: Callable[[str], None] = lambda line: None,
    observe: Callable[[StepReport], None] = lambda report: None,
    delivered: Delivered = lambda site, role, model, cases: None,
    **options: Any,
) -> dict[str, Any]:
    """Run a federation on this machine and return its results dict (the content of results.json).

    Args:
        method: name of the method, or a `Method`.
        task: preset name, JSON file, mapping or configuration.
        sites: names of the sites, or how many (site-1, site-2, ...); all but those outside train.
        rounds: federation rounds.
        seed: of everything that is drawn.
        outside: sites that never train and only receive the final models, whether `sites` names them or not.
        data_root: folder with one subfolder per site; None: MEDFLARE_DATA_ROOT, else the task's embedded images.
        weights: file, or folder of the file, that the task's network.weights name; None: MEDFLARE_WEIGHTS, else an installed package's.
        resplit: draw the splits anew by patient with this seed.
        site_algorithm: method whose site algorithm takes the place of its own; None: its own.
        server_algorithm: method whose server algorithm takes the place of its own; None: its own.
        absent: round -> sites that cannot be reached in it.
        opener: (name, role) -> site, where a site's data come from elsewhere than `data_root`.
        out: folder for results.json, report.html, models and what each site keeps; None keeps nothing.
        resume: go on where an interrupted run left `out`; everything else must be as it was.
        workers: how many sites train at the same time, each in a process of its own with OMP_NUM_THREADS threads (one where that
            is not set); any number gives the same models. None: one after the other in this process, on all of torch's threads.
        models_gb: gigabytes that a model of every site may take for all models to lie in memory, see `core.backing`.
        say: takes a progress line a step.
        observe: called after every step.
        delivered: called at a site with every final model that it measured; with several workers that is in the site's process.
        options: the fields of `settings.Rules` (`min_sites`, `sites_per_round`, `max_client_weight`, `outlier_policy`, ...), and the
            method's hyper-parameters: by name where one algorithm owns the name, else `site={name: value}`, `server={name: value}`.

    Raises:
        ConfigError: the method, task, a hyper-parameter or a site name is wrong. Whatever fails later is a result: status FAILED.
        Exception: any that is no MedflareError is a bug, also of one site alone, and is raised after results.json says FAILED.
    """
    chosen = get_method(method, site=site_algorithm, server=server_algorithm)
    config = load_task(task)
    config = config if resplit is None else replace(config, resplit=resplit)
    apart = tuple(sorted(_listed(outside, "outside")))
    inside = tuple(name for name in _names(sites) if name not in apart)
    if not inside:
        raise ConfigError("every site is outside; name at least one that trains")
    if workers is not None and workers < 1:
        raise ConfigError(f"workers = {workers}: how many sites train at the same time, at least 1")
    rules = {name: options[name] for name in RULES if name in options}
    hyper = {name: value for name, value in options.items() if name not in RULES}
    settings = run_settings({"rounds": rounds, "seed": seed, "outside": apart, **rules})
    check_run(chosen, config, hyper, rounds=settings.rounds, outside=apart)
    folder, about = None if out is None else Path(out), {"engine": "local"}
    run = Run(chosen, config, hyper, settings, inside, folder=folder, about=about, say=say, observe=observe, models_gb=models_gb)
    run.weights = None if weights is None else Path(weights)

    def opened(name: str, role: str) -> Site:
        return opener(name, role) if opener else open_site(name, config, seed=seed, role=role, data_root=data_root)

    def participant(name: str) -> Participant:
        return _participant(run, name, opened, delivered)

    names = (*inside, *apart)
    with nullcontext() if workers is None else threads_of_a_site():
        exchange: LocalExchange | ForkedExchange = LocalExchange(names, participant, absent)
        if workers is not None and workers > 1:
            exchange = ForkedExchange(names, participant, absent, workers, run.pictures)
        with closing(exchange):
            return run.execute(exchange, resume=resume)


def _participant(run: Run, name: str, opened: Callable[[str, str], Site], delivered: Delivered) -> Participant:
    """A site of the run, which keeps what is its own below the run's folder; `opened` makes it from (name, role)."""
    home = None if run.folder is None else SiteFolder(run.folder / SITES / name, name, run.method, run.task, run.settings.seed)
    store = None if home is None else StateStore(home.folder / STATE)
    artifacts = _Shown(run, name, delivered, home or ArtifactStore())

    def within_bounds(role: str) -> Site:
        site = opened(name, role)
        aborted = site.abort

        def stopped() -> bool:
            participant.working.refuse()
            return aborted()

        site.abort = stopped
        return site

    participant = Participant(name, within_bounds, run.method, run.hyper, store=store, artifacts=artifacts, minutes=Bounds().minutes)
    return participant


@dataclass(frozen=True)
class _Shown(ArtifactStore):
    """Keeps what a site's own folder does, and shows models and pictures to the caller, who is the site here.

    Whoever follows the run sees its steps, so that the site need not tell them.
    """

    run: Run
    name: str
    delivered: Delivered
    home: ArtifactStore

    def keep(self, role: str, model: Message, metrics: Mapping[str, Any], cases: Cases) -> None:
        self.delivered(self.name, role, model, cases)
        self.home.keep(role, model, metrics, cases)

    def show(self, title: str, png: bytes) -> None:
        self.run.pictures[f"{self.name}: {title}"] = png
        self.home.show(title, png)

    def finish(self, site: Site, role: str, models: Mapping[str, Message], events: Sequence[Mapping[str, Any]]) -> None:
        self.home.finish(site, role, models, events)


def resume_local(
    folder: Path | str,
    *,
    data_root: Path | str | None = None,
    workers: int | None = None,
    models_gb: float = MODELS_GB,
    weights: Path | str | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Finish an interrupted run of the plain loop from what it left in `folder`; returns the results dict.

    Args:
        folder: the `out` of the interrupted run.
        data_root: as for `run_local`.
        workers: as for `run_local`.
        models_gb: as for `run_local`.
        weights: as for `run_local`.
        say: takes a progress line a step.

    Raises:
        StateError: no run that can be taken up is in `folder`.
    """
    plan = stored_plan(Path(folder))
    site_algorithm, server_algorithm = plan["algorithms"]
    steering = {name: plan[name] for name in RUN_SETTINGS if name in plan}  # an older version had fewer
    return run_local(
        site_algorithm,
        plan["task"],
        plan["sites"],
        site_algorithm=site_algorithm,
        server_algorithm=server_algorithm,
        data_root=data_root,
        weights=weights,
        out=folder,
        resume=True,
        workers=workers,
        models_gb=models_gb,
        say=say,
        **steering,
        **plan["hyper"],
    )


def _names(sites: int | Iterable[str]) -> tuple[str, ...]:
    names = [f"site-{number + 1}" for number in range(sites)] if isinstance(sites, int) else _listed(sites, "sites")
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"sites = {names}: name at least one site, each once")
    return tuple(sorted(names))


def _plain_name(name: str) -> str:
    """The name, which is also a folder's.

    Raises:
        ConfigError: as a folder it would lie elsewhere.
    """
    if not isinstance(name, str) or not is_name(name) or "/" in name or "\\" in name:
        raise ConfigError(f"site {name!r}: a site's name is a folder's, too; use letters, digits, - and _")
    return name


def _listed(names: Iterable[str], what: str) -> list[str]:
    """The names; a single text, which Python takes for its letters, is refused."""
    if isinstance(names, str):
        raise ConfigError(f"{what} = {names!r}: give a list of site names, for example [{names!r}]")
    return [_plain_name(name) for name in names]
