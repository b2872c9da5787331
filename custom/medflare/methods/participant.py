"""One site's part in a federation, the same under every engine: enrol, answer steps, remember, evaluate what is delivered."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from medflare.core.errors import ConfigError, DataError, StateError
from medflare.core.events import EventLog
from medflare.core.message import Message
from medflare.core.store import StateStore
from medflare.methods.base import SiteHalf
from medflare.methods.federation import DELIVER, ENROL
from medflare.methods.registry import Method, build_deployed
from medflare.methods.training import finite_or_none
from medflare.tasks.site import Site

ROLES = ("global", "personal", "deployed")
_MEMBERSHIP, _HALF = "membership", "half"


def identity_of(method: Method, hyper: Mapping[str, Any], task_fingerprint: str, seed: int) -> dict[str, Any]:
    """What server and site must agree on before anything is trained."""
    return {"method": method.name, "hyper": dict(sorted(hyper.items())), "task": task_fingerprint, "seed": seed}


class Participant:
    """Answers what the federation asks of one site.

    Args:
        site: the site's data, task and seed.
        store: where the half's state goes after every task, so that the next one may run in a new process; None keeps the half
            in memory.
        keep: called at delivery with (role, delivered model, metrics) for each final model, so that an engine can put it on disk.
    """

    def __init__(
        self,
        site: Site,
        method: Method,
        hyper: Mapping[str, Any],
        *,
        store: StateStore | None = None,
        keep: Callable[[str, Message, Mapping[str, Any]], None] = lambda role, message, metrics: None,
    ):
        self.site = site
        self.method = method
        self.hyper = hyper
        self.store = store
        self.keep = keep
        self._half: SiteHalf | None = None

    def answer(self, phase: str, round: int, incoming: Message) -> Message:
        """The reply to one step. Errors are raised: the engine turns them into a reply that names the site.

        Raises:
            MedflareError: whatever is wrong with the site's data, state or configuration.
        """
        if phase == ENROL:
            return self._enrol(incoming)
        half = self._restored()
        reply = self._deliver(half, incoming) if phase == DELIVER else half.perform(phase, round, incoming)
        if self.store is not None:
            self.store.save(_HALF, half.state())
        return reply

    def _enrol(self, incoming: Message) -> Message:
        """Check that server and site mean the same federation, remember the membership, and say what this site has."""
        own = identity_of(self.method, self.hyper, self.site.task.fingerprint(), self.site.seed)
        for name, value in own.items():
            if name in incoming.facts and incoming.facts[name] != value:
                raise ConfigError(
                    f"site {self.site.name} and the server differ in {name}: {value!r} here, {incoming.facts[name]!r} there; "
                    "submit one job folder to all, and do not edit the site's copy"
                )
        if incoming.facts["role"] == "inside" and self.site.n["train"] == 0:
            raise DataError(f"site {self.site.name} has no training images; add some or let it take part as an outside site")
        self._half = self._make_half(tuple(incoming.facts["sites"]))
        if self.store is not None:
            self.store.save(_MEMBERSHIP, Message({}, {"site": self.site.name, "sites": list(incoming.facts["sites"])}))
            self.store.save(_HALF, self._half.state())
        return Message({}, {"n": self.site.n, "class_counts": self.site.class_counts().tolist(), "events": self._notes()})

    def _notes(self) -> list[dict[str, Any]]:
        log = EventLog()
        for note in self.site.notes:
            log.add("warning", note, site=self.site.name)
        return log.to_list()

    def _make_half(self, sites: tuple[str, ...]) -> SiteHalf:
        return self.method.make_site(self.site, self.hyper, sites)

    def _restored(self) -> SiteHalf:
        """The half as the last task left it."""
        if self._half is None:
            membership = self.store.load(_MEMBERSHIP) if self.store is not None else None
            if membership is None or self.store is None:
                raise StateError(f"site {self.site.name} was asked to work before it enrolled, or its state is gone; restart the job")
            if membership.facts["site"] != self.site.name:
                raise StateError(f"the state in {self.store.folder} belongs to site {membership.facts['site']}, not to {self.site.name}; put it back")
            self._half = self._make_half(tuple(membership.facts["sites"]))
            state = self.store.load(_HALF)
            if state is None:
                raise StateError(f"site {self.site.name} has lost {self.store.path(_HALF)}; restore it or restart the job")
            self._half.restore(state)
        return self._half

    def _deliver(self, half: SiteHalf, incoming: Message) -> Message:
        """Build the final models, measure them on this site's test images and hand them to the engine to keep."""
        models = half.deliver(incoming)
        log = EventLog(self._notes())
        metrics: dict[str, dict[str, float | None]] = {}
        seen: dict[int, dict[str, float | None]] = {}
        reports: dict[str, Any] = {}
        for role in ROLES:
            if role not in models:
                metrics[role] = dict.fromkeys(self.site.task.metrics)
                log.add("undefined", f"{role}: a site that did not train has no such model", site=self.site.name)
                continue
            if id(models[role]) not in seen:
                seen[id(models[role])], module = self._measure(models[role], role, log)
                if hasattr(module, "report"):
                    reports[role] = module.report()
            metrics[role] = seen[id(models[role])]
            self.keep(role, models[role], metrics[role])
        return Message({}, {"metrics": metrics, "n": self.site.n, "reports": reports, "events": log.to_list()})

    def _measure(self, message: Message, role: str, log: EventLog) -> tuple[dict[str, float | None], nn.Module]:
        module = build_deployed(self.site.task, message).to(self.site.device)
        scores = self.site.score(module, "test")
        for metric, reason in scores.undefined.items():
            log.add("undefined", f"{role} {metric}: {reason}", site=self.site.name)
        if scores.left_out:
            log.add("undefined", f"{role}: {scores.left_out} image or patient scores were 0/0 and left out of the means", site=self.site.name)
        return {metric: finite_or_none(value) for metric, value in scores.values.items()}, module
