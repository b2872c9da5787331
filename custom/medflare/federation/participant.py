"""One site's part in a federation, the same under every engine: enrol, answer steps, remember, evaluate what is delivered."""

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from medflare.core.errors import Aborted, ConfigError
from medflare.core.events import EventLog
from medflare.core.message import Message
from medflare.core.packages import installed
from medflare.core.states import StateDict
from medflare.core.store import MemoryStore, Store
from medflare.data.targets import scarce_classes, scarce_line
from medflare.federation.enrolment import versions_here
from medflare.federation.exchange import START
from medflare.federation.final_models import ArtifactStore, check_choice, chosen_here, evaluated
from medflare.federation.memory import RememberedAlgorithm, WorkingTime
from medflare.federation.settings import ENROL, FACTS_LIMIT, FINALIZE, PHASES_OF_ALL
from medflare.federation.update_validation.messages import DELIVERS, FINISHED, RANGE, ROLE, SITES, STEPS, VERSIONS, SiteGate
from medflare.federation.update_validation.rounding import Rounding
from medflare.federation.update_validation.suppression import Suppression, rare_classes, too_few, withhold, withhold_doubts
from medflare.methods.base import SiteAlgorithm
from medflare.methods.method import Method
from medflare.privacy.ledger import Account, Budget, Ledger
from medflare.privacy.settings import is_private
from medflare.training.site import Site

# Of what a site says of its data; the server's gate takes a hundred events in all, and meta of a size (`update_validation.messages`).
_MOST_EVENTS: Final = 45  # of one kind
_LONGEST_EVENT: Final = 400  # characters
_MOST_BYTES: Final = FACTS_LIMIT // 2  # of all: the rest is for counts and versions


def identity_of(method: Method, hyper: Mapping[str, Any], task_fingerprint: str, seed: int) -> dict[str, Any]:
    """What server and site must agree on before anything is trained.

    Returns:
        The meta "method", "hyper" (all, with defaults), "task" and "seed".
    """
    return {"method": method.name, "hyper": method.effective(hyper), "task": task_fingerprint, "seed": seed}


def import_ahead() -> None:
    """Import what every participant needs sooner or later, for a process from which those of the participants are forked."""
    import monai  # noqa: F401

    from medflare.evaluation.report import template
    from medflare.training import opening  # noqa: F401

    template("site.html")
    if installed("matplotlib"):
        import matplotlib.figure  # noqa: F401

    torch.optim.SGD([torch.zeros(1, requires_grad=True)])  # torch imports a third of itself for the first optimiser


def first_difference(name: str, here: Any, there: Any) -> tuple[str, Any, Any]:
    """(dotted name, value here, value there) of the first setting in which two nested mappings differ.

    Examples:
        >>> first_difference("hyper", {"site": {"mu": 1, "lr": 2}}, {"site": {"mu": 1, "lr": 3}})
        ('hyper.site.lr', 2, 3)
    """
    if isinstance(here, Mapping) and isinstance(there, Mapping):
        for key in sorted({*here, *there}):
            if here.get(key) != there.get(key):
                return first_difference(f"{name}.{key}", here.get(key), there.get(key))
    return name, here, there


class Participant:
    """Answers what the federation asks of one site.

    Args:
        name: the site's name.
        opened: role -> the site with its data; called once, when the first task that needs it comes.
        method: whose site algorithm runs.
        hyper: the method's hyper-parameters, see `core.hyper.halved`.
        store: where the algorithm's memory goes after every task, so that the next one may run in a new process; None keeps it in memory.
        artifacts: takes what stays at the site; None: nobody does.
        budget: the site's own limit of what it gives away of its patients' privacy over all runs; None for none.
        minimum_patients: of how many a metric must be for it to leave the site.
        chosen: what the site deploys by its own choice, see `LocalSettings.keep`; None: what the method deploys.
        minutes: how long a step may take; None: as long as it takes.
        hours: how long the site works for the run; None: as long as it takes.
    """

    def __init__(
        self,
        name: str,
        opened: Callable[[str], Site],
        method: Method,
        hyper: Mapping[str, Any],
        *,
        store: Store | None = None,
        artifacts: ArtifactStore | None = None,
        budget: Budget | None = None,
        minimum_patients: int = 0,
        chosen: str | None = None,
        minutes: float | None = None,
        hours: float | None = None,
    ):
        self.name = name
        self.opened = opened
        self.method = method
        self.hyper = hyper
        self.store = store or MemoryStore()
        self.artifacts = artifacts or ArtifactStore()
        self.minimum_patients, self.chosen = minimum_patients, chosen
        self.working = WorkingTime(name, self.store, minutes, hours)
        self.account = Account(Ledger(self.store), budget)
        self._algorithm = RememberedAlgorithm(name, self.store, self._made)
        self._site: Site | None = None
        self._gate = SiteGate(name)

    def answer(self, phase: str, round: int, incoming: Message) -> Message:
        """The reply to one step. Errors are raised: the engine turns them into a reply that names the site.

        The item "step" of `incoming` counts the steps of the run. One that is asked again is answered from the state that it
        was answered from before. The item "run_rounds" says how many rounds the run has, for the schedule of the learning rate.

        Args:
            phase: "enrol", "finalize" or a phase of the method's site algorithm.
            round: 0-based.
            incoming: the server's message.

        Raises:
            MessageError: the server's message is not as the phase declares; nothing of it was used.
            MedflareError: whatever is wrong with the site's data, state or configuration.
        """
        with self.working.step(ends=phase not in PHASES_OF_ALL):
            return self._enrol(round, incoming) if phase == ENROL else self._step(phase, round, incoming)

    def _step(self, phase: str, round: int, incoming: Message) -> Message:
        """The reply to a step of the run or to the delivery."""
        trained_on = self._gate.trained_on(phase, round, incoming)
        step, rounds, rounded = self._gate.numbers(phase, round, incoming, self._algorithm.steps)
        self._gate.refuse(phase, round, incoming, self._algorithm.recall(step), rounded)
        self.artifacts.tell(phase, round, rounds, True)
        try:
            with self._algorithm.ready(step, kept=phase != FINALIZE) as algorithm:
                rounding = Rounding(algorithm.plan) if rounded else None
                incoming = incoming if rounding is None else rounding.widened(incoming)
                algorithm.site.rate_factor = algorithm.site.task.schedule.rate_factor(round, rounds)
                if phase == FINALIZE:
                    return self._deliver(algorithm, incoming, trained_on)
                reply = algorithm.perform(phase, round, incoming)
                reply = self._suppression.suppressed(reply, algorithm.phase(phase))
                return reply if rounding is None else rounding.up(algorithm.phase(phase), reply, incoming)
        finally:  # a step that failed has come to its end, too
            self.artifacts.tell(phase, round, rounds, False)

    # -- enrolment -------------------------------------------------------------------------------------------------------------

    def _enrol(self, round: int, incoming: Message) -> Message:
        """Check that server and site mean the same federation, remember the membership, and say what this site has."""
        self._gate.refuse_invitation(round, incoming)
        role, sites = incoming.meta[ROLE], tuple(incoming.meta[SITES])
        site = self._opened(role)
        self._agree(site, role, incoming.meta)
        if self.method.trains:
            check_choice(site, role, self.chosen)
        self._gate.refuse_start(round, incoming, self.method.plan(site.task, sites, self.hyper), START)
        if incoming.meta.get(FINISHED, 0):
            self._algorithm.recall(incoming.meta[FINISHED])
        else:
            self._algorithm.begin(role, sites, incoming.states.get(START), incoming.meta.get(STEPS))
            self.account.ledger.clear()
            self.working.clear()
        counts = [] if (rare := rare_classes(site, self.minimum_patients)) else site.class_counts().tolist()
        notes = _notes(site, self.minimum_patients, rare)
        seen = site.trained_on(self.minimum_patients) if role == "inside" and not self._private(site) else None
        told: dict[str, Any] = {} if seen is None else {RANGE: seen.to_dict()}
        return Message({}, {"n": site.n, "class_counts": counts, VERSIONS: versions_here(), **told, "events": notes})

    def _agree(self, site: Site, role: str, theirs: Mapping[str, Any]) -> None:
        """ConfigError where site and server do not mean the same run, or the site's own rules forbid it."""
        if self.account.budget is not None and role == "inside" and not self._private(site):
            raise ConfigError(
                f"site {self.name} trains with differential privacy only (privacy in its local/medflare.json), this job without: "
                f"{self.method.dp_unsupported_reason or 'set dp_noise'}"
            )
        for name, value in identity_of(self.method, self.hyper, site.task.fingerprint(), site.seed).items():
            if name in theirs and theirs[name] != value:
                what, here, there = first_difference(name, value, theirs[name])
                raise ConfigError(
                    f"site {self.name} and the server differ in {what}: {here!r} here, {there!r} there; "
                    "submit one job folder to all, and do not edit the site's copy"
                )

    def _private(self, site: Site) -> bool:
        """Whether the run tells of training patients with noise alone."""
        return is_private(self.method.plan(site.task, (), self.hyper).site_hyper)

    def _opened(self, role: str) -> Site:
        """The site with its data, read once in this process."""
        if self._site is None:
            self._site = self.opened(role)
            self._suppression = Suppression(self._site, self.minimum_patients)
        return self._site

    def _made(self, role: str, sites: tuple[str, ...], start: StateDict | None) -> SiteAlgorithm[Any]:
        site = self._opened(role)
        site.start = start
        algorithm = self.method.make_site(site, self.method.plan(site.task, sites, self.hyper))
        algorithm.account, algorithm.minimum_patients = self.account, self.minimum_patients
        return algorithm

    # -- delivery --------------------------------------------------------------------------------------------------------------

    def _deliver(self, algorithm: SiteAlgorithm[Any], incoming: Message, trained_on: Mapping[str, Any] | None) -> Message:
        """Final models and pictures made, measured and handed to the engine to keep; their cards say what they were trained on."""
        models, said = chosen_here(algorithm.finalize(incoming), self.chosen)
        for model in models.values():
            model.meta.update({} if trained_on is None else {RANGE: trained_on})
        meta = evaluated(algorithm.site, models, self.artifacts.keep, self.minimum_patients, method=self.method, inside=algorithm.inside)
        meta["events"] += [{"kind": "warning", "message": line} for line in said]
        few = too_few(algorithm.site, self.minimum_patients)
        withhold(meta, DELIVERS, few)
        for name, png in algorithm.pictures(incoming).items():
            self.artifacts.show(name, png)
        role = "inside" if algorithm.inside else "outside"
        meta["events"] += _own_report(lambda: self.artifacts.finish(algorithm.site, role, models, meta["events"]))
        withhold_doubts(meta["events"], few)
        cost = algorithm.privacy()
        return Message({}, meta if cost is None else {**meta, "privacy": cost})


def _notes(site: Site, minimum_patients: int, rare: bool) -> list[dict[str, Any]]:
    """What an enrolling site says of its data, as events: what does not leave it, and what its own check of the data noted."""
    log = EventLog()
    for split in too_few(site, minimum_patients):
        log.add("warning", f"no metric of its {split} patients leaves the site: they are fewer than {minimum_patients}")
    if rare:  # which class, and how few, stays here
        log.add("warning", f"no counts by class leave the site: a class is of fewer than {minimum_patients} training patients")
        log.add("rare_class", "a class has too few training images for its number to leave the site")
    elif scarce := scarce_classes(site.data.train.targets, site.task, site.data.annotated):
        log.add("rare_class", scarce_line(scarce))
    room = _MOST_BYTES
    told = 0
    for line in site.notes[:_MOST_EVENTS]:
        room -= len(json.dumps(line[:_LONGEST_EVENT]))  # as the gate counts: a letter that is not Latin is six bytes of JSON
        if room < 0:
            break
        log.add("warning", line[:_LONGEST_EVENT])
        told += 1
    if len(site.notes) > told:
        log.add("warning", f"and {len(site.notes) - told} more, which the site's own data check names")
    if site.data.left_out:  # which they are stays here
        log.add("left_out", f"{len(site.data.left_out)} images cannot be used; the site's own data check names them")
    return log.to_list()


def _own_report(written: Callable[[], None]) -> list[dict[str, Any]]:
    """The site's own report; where it cannot be written that is an event, and no reason to lose models and metrics."""
    log = EventLog()
    try:
        written()
    except Aborted:
        raise
    except Exception as error:
        log.add("warning", f"the site's own report could not be written ({type(error).__name__})")
    return log.to_list()
