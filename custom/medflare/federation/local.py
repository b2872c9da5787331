"""The plain loop: a whole federation in one process, for tests, sweeps and studies. Same halves, same schedule as under FLARE."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from medflare.core.errors import Aborted, ConfigError, MedflareError
from medflare.core.message import Message
from medflare.core.states import copy_state
from medflare.core.store import StateStore
from medflare.data.sites.opening import open_site
from medflare.data.sites.site import Site
from medflare.federation.checkpoint import stored_plan
from medflare.federation.delivery import SiteFolder
from medflare.federation.exchange import Reply
from medflare.federation.participant import Participant
from medflare.federation.run import Run
from medflare.federation.settings import run_settings
from medflare.methods.base import Step
from medflare.methods.catalogue import get_method
from medflare.tasks.config import TaskConfig, load_task

SITES = "sites"  # below `out`: what each site would keep at home
STATE = "state"  # below a site's folder: what it remembers between two steps


class LocalExchange:
    """Calls the sites' participants one after the other, in sorted order.

    Args:
        sites: names.
        opened: makes a site's participant when it is first asked; its errors are that site's errors.
        absent: round -> sites that cannot be reached in it.
    """

    def __init__(self, sites: Sequence[str], opened: Callable[[str], Participant], absent: Mapping[int, Iterable[str]] | None = None):
        self.sites = sorted(sites)
        self.opened = opened
        self.absent = {round: set(names) for round, names in (absent or {}).items()}
        self.participants: dict[str, Participant] = {}

    def present(self, round: int) -> list[str]:
        """The sites that are not listed as absent in this round, sorted."""
        return [site for site in self.sites if site not in self.absent.get(round, ())]

    def __call__(self, step: Step, outgoing: Mapping[str, Message]) -> dict[str, Reply]:
        replies = {}
        for site in sorted(outgoing):
            try:
                if site not in self.participants:
                    self.participants[site] = self.opened(site)
                sent = Message({entry: copy_state(state) for entry, state in outgoing[site].states.items()}, outgoing[site].facts)
                replies[site] = Reply(self.participants[site].answer(step.phase, step.round, sent))
            except Aborted:
                raise
            except MedflareError as error:
                replies[site] = Reply(problem=str(error))
        return replies


def run_local(
    method: str,
    task: TaskConfig | str | Path | Mapping[str, Any],
    sites: int | Iterable[str],
    *,
    rounds: int,
    seed: int,
    outside: Iterable[str] = (),
    data_root: Path | str | None = None,
    weights: Path | str | None = None,
    resplit: int | None = None,
    site_half: str | None = None,
    server_half: str | None = None,
    min_sites: int | None = None,
    sites_per_round: int | None = None,
    absent: Mapping[int, Iterable[str]] | None = None,
    opener: Callable[[str, str], Site] | None = None,
    out: Path | str | None = None,
    resume: bool = False,
    say: Callable[[str], None] = lambda line: None,
    **hyper: Any,
) -> dict[str, Any]:
    """Run a federation in this process and return its results dict (the content of results.json).

    Args:
        method: name of the method.
        task: preset name, JSON file, mapping or configuration.
        sites: names of the sites that train, or how many (site-1, site-2, ...).
        rounds: federation rounds.
        seed: of everything that is drawn.
        outside: sites that never train and only receive the final models.
        data_root: folder with one subfolder per site; None: MEDFLARE_DATA_ROOT, else the task's embedded images.
        weights: file, or folder of the file, that the task's network.weights name; None: MEDFLARE_WEIGHTS, else an installed package's.
        resplit: draw the splits anew by patient with this seed.
        site_half: method whose site half takes the place of its own; None: its own.
        server_half: method whose server half takes the place of its own; None: its own.
        min_sites: see `settings.RunSettings`.
        sites_per_round: see `settings.RunSettings`.
        absent: round -> sites that cannot be reached in it.
        opener: (name, role) -> site, where a site's data come from elsewhere than `data_root`.
        out: folder for results.json, report.html, models and what each site keeps; None keeps nothing.
        resume: go on where an interrupted run left `out`; everything else must be as it was.
        say: takes a progress line a step.
        hyper: the method's hyper-parameters: by name where one half owns the name, else `site={name: value}`, `server={name: value}`.

    Raises:
        ConfigError: the method, task, a hyper-parameter or a site name is wrong. Whatever fails later is a result: status FAILED.
    """
    chosen = get_method(method, site=site_half, server=server_half)
    config = load_task(task)
    chosen.check(hyper, config)
    config = config if resplit is None else replace(config, resplit=resplit)
    inside, apart = _names(sites), tuple(sorted(_listed(outside, "outside")))
    if both := set(inside) & set(apart):
        raise ConfigError(f"site {min(both)} is both inside and outside; name it once")
    steering = {"rounds": rounds, "seed": seed, "outside": apart, "min_sites": min_sites, "sites_per_round": sites_per_round}
    folder, about = None if out is None else Path(out), {"engine": "local"}
    run = Run(chosen, config, hyper, run_settings(steering), inside, folder=folder, about=about, say=say)
    run.weights = None if weights is None else Path(weights)

    def opened(name: str, role: str) -> Site:
        return opener(name, role) if opener else open_site(name, config, seed=seed, role=role, data_root=data_root)

    exchange = LocalExchange((*inside, *apart), lambda name: _participant(run, name, opened), absent)
    return run.execute(exchange, resume=resume)


def _participant(run: Run, name: str, opened: Callable[[str, str], Site]) -> Participant:
    """A site of the run, which keeps what is its own below the run's folder; `opened` makes it from (name, role)."""
    home = None if run.folder is None else SiteFolder(run.folder / SITES / name, name, run.method, run.task, run.settings.seed)

    def keep(role: str, model: Message, metrics: Mapping[str, Any]) -> None:
        if home is not None:
            home.keep(role, model, metrics)

    def show(title: str, png: bytes) -> None:
        run.pictures[f"{name}: {title}"] = png
        if home is not None:
            home.show(title, png)

    store = None if home is None else StateStore(home.folder / STATE)
    return Participant(name, lambda role: opened(name, role), run.method, run.hyper, store=store, keep=keep, show=show)


def resume_local(
    folder: Path | str,
    *,
    data_root: Path | str | None = None,
    weights: Path | str | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Finish an interrupted run of the plain loop from what it left in `folder`; returns the results dict.

    Args:
        folder: the `out` of the interrupted run.
        data_root: as for `run_local`.
        weights: as for `run_local`.
        say: takes a progress line a step.

    Raises:
        StateError: no run that can be taken up is in `folder`.
    """
    plan = stored_plan(Path(folder))
    site_half, server_half = plan["halves"]
    steering = {name: plan[name] for name in ("rounds", "seed", "outside", "min_sites", "sites_per_round")}
    return run_local(
        site_half,
        plan["task"],
        plan["sites"],
        site_half=site_half,
        server_half=server_half,
        data_root=data_root,
        weights=weights,
        out=folder,
        resume=True,
        say=say,
        **steering,
        **plan["hyper"],
    )


def _names(sites: int | Iterable[str]) -> tuple[str, ...]:
    names = [f"site-{number + 1}" for number in range(sites)] if isinstance(sites, int) else _listed(sites, "sites")
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"sites = {names}: name at least one site, each once")
    return tuple(sorted(names))


def _listed(names: Iterable[str], what: str) -> list[str]:
    """The names; a single text, which Python takes for its letters, is refused."""
    if isinstance(names, str):
        raise ConfigError(f"{what} = {names!r}: give a list of site names, for example [{names!r}]")
    return list(names)
