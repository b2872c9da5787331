"""One site's part in a federation, the same under every engine: enrol, answer steps, remember, evaluate what is delivered."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import nn

from medflare.core.errors import ConfigError, StateError
from medflare.core.events import EventLog
from medflare.core.message import Message
from medflare.core.store import MemoryStore, StateStore, Store, write_atomically
from medflare.federation.memory import HalfMemory
from medflare.federation.schedule import DELIVER, ENROL
from medflare.inference.deployed import save_model
from medflare.methods.base import SiteHalf
from medflare.methods.catalogue import Method, build_deployed
from medflare.methods.parts.training import finite_or_none
from medflare.privacy.ledger import Ledger
from medflare.sites.site import Site
from medflare.tasks.config import TaskConfig


@runtime_checkable
class SelfReporting(Protocol):
    """A deployed model that can say how it came to its answers, for example which member answered how often."""

    def report(self) -> dict[str, Any]: ...


ROLES = ("global", "personal", "deployed")
_MEMBERSHIP = "membership"


def identity_of(method: Method, hyper: Mapping[str, Any], task_fingerprint: str, seed: int) -> dict[str, Any]:
    """What server and site must agree on before anything is trained."""
    return {"method": method.name, "hyper": dict(sorted(hyper.items())), "task": task_fingerprint, "seed": seed}


def stored_members(folder: Path) -> tuple[str, ...]:
    """The federation's inside sites as the participant that keeps its state in `folder` enrolled with them.

    Raises:
        StateError: it has not enrolled, or its state is damaged.
    """
    membership = StateStore(folder).load(_MEMBERSHIP)
    if membership is None:
        raise StateError(f"no membership in {folder}: the site has not enrolled in this job, or its state is gone")
    return tuple(membership.facts["sites"])


@dataclass(frozen=True)
class Home:
    """A site's own folder in a run, for `Participant`'s `keep` and `show`: delivered models with their cards, and pictures.

    Pictures show patients: they stay here.
    """

    folder: Path
    site: str
    method: Method
    task: TaskConfig
    seed: int

    def keep(self, role: str, model: Message, metrics: Mapping[str, Any]) -> None:
        card = {"method": self.method.name, "site": self.site, "role": role, "seed": self.seed, "metrics": dict(metrics)}
        save_model(self.folder / role, self.task, model, card)

    def show(self, title: str, png: bytes) -> None:
        write_atomically(self.folder / "pictures" / f"{title}.png", png)


class Participant:
    """Answers what the federation asks of one site.

    Args:
        name: the site's name.
        opened: role -> the site with its data; called once, when the first task that needs it comes.
        store: where the half's state goes after every task, so that the next one may run in a new process; None keeps it in memory.
        keep: called at delivery with (role, delivered model, metrics) for each final model, so that an engine can put it on disk.
        show: called at delivery with (name, PNG content) for each picture that the method makes for the site itself.
    """

    def __init__(
        self,
        name: str,
        opened: Callable[[str], Site],
        method: Method,
        hyper: Mapping[str, Any],
        *,
        store: Store | None = None,
        keep: Callable[[str, Message, Mapping[str, Any]], None] = lambda role, message, metrics: None,
        show: Callable[[str, bytes], None] = lambda name, png: None,
    ):
        self.name = name
        self.opened = opened
        self.method = method
        self.hyper = hyper
        self.store = store or MemoryStore()
        self.keep = keep
        self.show = show
        self._memory = HalfMemory(self.store)
        self._site: Site | None = None
        self._half: SiteHalf | None = None
        self._precedes = 0  # the step that the half in memory is ready for

    def answer(self, phase: str, round: int, incoming: Message) -> Message:
        """The reply to one step. Errors are raised: the engine turns them into a reply that names the site.

        The fact "step" of `incoming` counts the steps of the run. One that is asked again is answered from the state that it
        was answered from before.

        Raises:
            MedflareError: whatever is wrong with the site's data, state or configuration.
        """
        if phase == ENROL:
            return self._enrol(incoming)
        step = int(incoming.facts["step"])
        half = self._ready(step)
        try:
            if phase == DELIVER:
                return self._deliver(half, incoming)
            reply = half.perform(phase, round, incoming)
            self._memory.save(step + 1, half.state())
        except BaseException:
            self._half = None  # half way through a step; the next one starts from what was saved
            raise
        self._precedes = step + 1
        return reply

    def _enrol(self, incoming: Message) -> Message:
        """Check that server and site mean the same federation, remember the membership, and say what this site has."""
        role, sites = incoming.facts["role"], tuple(incoming.facts["sites"])
        site = self._opened(role)
        if site.budget is not None and role == "inside" and not self.method.private(self.hyper):
            raise ConfigError(
                f"site {self.name} trains with differential privacy only (privacy in its local/medflare.json), this job without: "
                f"{self.method.unprotected or 'set dp_noise'}"
            )
        own = identity_of(self.method, self.hyper, site.task.fingerprint(), site.seed)
        for name, value in own.items():
            if name in incoming.facts and incoming.facts[name] != value:
                raise ConfigError(
                    f"site {self.name} and the server differ in {name}: {value!r} here, {incoming.facts[name]!r} there; "
                    "submit one job folder to all, and do not edit the site's copy"
                )
        if incoming.facts.get("finished", 0):
            self._ready(incoming.facts["finished"])
        else:
            self._half = self.method.make_site(site, self.hyper, sites)
            self._memory.clear()
            site.ledger.clear()
            self.store.save(_MEMBERSHIP, Message({}, {"site": self.name, "sites": list(sites), "role": role}))
            self._memory.save(0, self._half.state())
            self._precedes = 0
        return Message({}, {"n": site.n, "class_counts": site.class_counts().tolist(), "events": self._notes(site)})

    def _notes(self, site: Site) -> list[dict[str, Any]]:
        log = EventLog()
        for note in site.notes:
            log.add("warning", note, site=self.name)
        return log.to_list()

    def _opened(self, role: str) -> Site:
        """The site with its data, read once in this process."""
        if self._site is None:
            self._site = self.opened(role)
            self._site.ledger = Ledger(self.store)
        return self._site

    def _ready(self, step: int) -> SiteHalf:
        """The half as the last step before `step` left it."""
        if self._half is not None and self._precedes <= step:
            return self._half
        membership = self.store.load(_MEMBERSHIP)
        if membership is None:
            raise StateError(f"site {self.name} was asked to work before it enrolled, or its state is gone; restart the job")
        owner = membership.facts["site"]
        if owner != self.name:
            raise StateError(f"the state that site {self.name} finds belongs to site {owner}; put each site's state back in its place")
        kept = self._memory.before(step)
        if kept is None:
            raise StateError(f"site {self.name} has lost what it remembered before step {step}; restore its state or restart the job")
        half = self.method.make_site(self._opened(membership.facts["role"]), self.hyper, tuple(membership.facts["sites"]))
        self._precedes, state = kept
        half.restore(state)
        self._half = half
        return half

    def _deliver(self, half: SiteHalf, incoming: Message) -> Message:
        """Build the final models, measure them on this site's test images and hand them to the engine to keep."""
        site = half.site
        models = half.deliver(incoming)
        log = EventLog()
        metrics: dict[str, dict[str, float | None]] = {}
        seen: dict[int, dict[str, float | None]] = {}
        reports: dict[str, Any] = {}
        for role in dict.fromkeys([*ROLES, *models]):  # a method may deliver further models, to be compared with its own
            if role not in models:
                metrics[role] = dict.fromkeys(site.task.metrics)
                log.add("undefined", f"{role}: a site that did not train has no such model", site=self.name)
                continue
            if id(models[role]) not in seen:
                seen[id(models[role])], module = self._measure(site, models[role], role, log)
                if isinstance(module, SelfReporting):
                    reports[role] = module.report()
            metrics[role] = seen[id(models[role])]
            self.keep(role, models[role], metrics[role])
        for name, png in half.pictures(incoming).items():
            self.show(name, png)
        cost = half.privacy()
        more = {} if cost is None else {"privacy": cost}
        return Message({}, {"metrics": metrics, "n": site.n, "reports": reports, "events": log.to_list(), **more})

    def _measure(self, site: Site, message: Message, role: str, log: EventLog) -> tuple[dict[str, float | None], nn.Module]:
        module = build_deployed(site.task, message).to(site.device)
        scores = site.score(module, "test")
        for metric, reason in scores.undefined.items():
            log.add("undefined", f"{role} {metric}: {reason}", site=self.name)
        for metric, count in (("dice and iou", scores.left_out), ("hd95", scores.hd95_left_out)):
            if count:
                words = f"{role} {metric}: undefined for {count} patients and structures, left out of the means"
                log.add("undefined", words, site=self.name)
        return {metric: finite_or_none(value) for metric, value in scores.values.items()}, module
