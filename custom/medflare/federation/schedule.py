"""The schedule of a federation, written once for every engine: enrol, the method's steps, deliver.

An engine supplies an `Exchange`: it takes messages to sites and brings their replies back. Everything that decides what happens
to a reply (screening, k of n, repetition, failure) happens here, once for the plain loop, the simulator and a provisioned
federation. What they differ in is a bug in a site's code: the plain loop raises it, see `exchange.Exchange`.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from torch import Tensor

from medflare.core.errors import FederationFailed
from medflare.core.events import EventLog
from medflare.core.manifest import Manifest, MetaSpec, Phase, StateSpec, violation
from medflare.core.message import Message
from medflare.core.rng import numpy_generator
from medflare.federation.enrolment import Enrolment, listed, trained_on
from medflare.federation.exchange import Exchange, Reply, Transport, numbered
from medflare.federation.outcome import Outcome, StepReport
from medflare.federation.settings import FINALIZE, Rules
from medflare.federation.update_validation.messages import RANGE, STEPS
from medflare.federation.update_validation.rounding import BF16, Rounding
from medflare.federation.update_validation.updates import Screened, capped, lost_votes, screen
from medflare.methods.base import ServerAlgorithm, Step
from medflare.methods.parts.selection import FEW_IMAGES, images_behind, plateau

_REPEATS: Final = 1  # how often a step with too few usable replies is tried again before the run fails


@dataclass
class Federation:
    """One run of a method over an exchange.

    Attributes:
        server: the server algorithm; its context names the inside and outside sites.
        manifest: phase -> what a reply holds (the site algorithm's declaration).
        identity: meta sent with "enrol"; a site whose task or method differs refuses, by name.
        on_step: called after every step, for progress and tracking.
        checkpoint: called after every step with the number of finished steps.
        reply_meta: phase -> the meta that a reply may hold, from the same declaration.
        returning: sites that have enrolled in the run that is taken up, before one of its interruptions, with their counts.
    """

    server: ServerAlgorithm[Any]
    exchange: Exchange
    manifest: Callable[[str], Manifest]
    rules: Rules = field(default_factory=Rules)
    identity: Mapping[str, Any] = field(default_factory=dict)
    on_step: Callable[[StepReport], None] = lambda report: None
    checkpoint: Callable[[int], None] = lambda finished: None
    outcome: Outcome = field(default_factory=Outcome)
    returning: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    reply_meta: Callable[[str], tuple[MetaSpec, ...]] = lambda phase: ()

    def __post_init__(self) -> None:
        self._courier = Transport(self.exchange, self.outcome)
        self._network = StateSpec.like(self.server.context.plan.template(), "").tensors.items()
        self._rounding = Rounding(self.server.context.plan) if self.rules.transport_dtype == BF16 else None

    @property
    def events(self) -> EventLog:
        """Whatever was noticed."""
        return self.server.context.events

    def run(self, finished: int = 0) -> Outcome:
        """Everything from enrolment to delivery; `finished` steps are skipped (a resumed run has restored the server algorithm).

        Raises:
            FederationFailed: with the reason; what was noted until then is in `events` and `outcome`.
            Aborted: raised by the exchange when the engine was asked to stop.
        """
        started = time.monotonic()
        told = {**self.identity, STEPS: len(self.server.steps())}
        enrolment = Enrolment(self.server.context, self._courier, told, self.returning, finished, self.rules.max_client_weight)
        enrolment.open(self._needed)
        while finished < len(steps := steps_now(self, finished)):
            self._step(finished, steps[finished], enrolment)
            finished += 1
            self.checkpoint(finished)
        self.outcome.rounds = self.server.context.rounds
        for model, election in self.server.model_selectors().items():
            self.outcome.model_selection[model] = {"round": election.round, "rule": election.rule, "candidates": election.record}
        if getattr(self.server.hyper, "selection", "last") != "last":  # a survey has no such setting
            doubt_model_selection(self.outcome, self.events)
        self.outcome.seconds["training"] = time.monotonic() - started
        self._deliver(finished, enrolment)
        self.outcome.seconds["total"] = time.monotonic() - started
        return self.outcome

    @property
    def _needed(self) -> int:
        return self.rules.min_sites if self.rules.min_sites is not None else min(2, len(self.server.context.sites))

    # -- a step ----------------------------------------------------------------------------------------------------------------

    def _step(self, index: int, step: Step, enrolment: Enrolment) -> None:
        failed: set[str] = set()
        for attempt in range(_REPEATS + 1):
            started = time.monotonic()
            members = enrolment.members(step)
            asked = drawn(self, step, members, attempt, failed)
            outgoing = {site: numbered(self.server.configure(step, site), index, self.server.context.rounds) for site in asked}
            screened, rejected = self._exchange(step, outgoing)
            accepted = screened.accepted
            if len(accepted) >= min(self._needed, self.rules.sites_per_round or self._needed):
                break
            reason = f"{len(accepted)} usable replies to '{step.phase}' in round {step.round}, {self._needed} are needed"
            gone = dict.fromkeys((site for site in enrolment.inside if site not in members), "not there")
            named = listed({**gone, **rejected}) if asked else "no site is present"
            if attempt == _REPEATS:
                raise FederationFailed(f"{reason} ({named})")
            self.events.add("repeated", f"{reason}; asking again ({named})", round=step.round)
            failed |= rejected.keys()
        self._take(step, screened)
        context = self.server.context
        context.notes = {}
        self.server.aggregate(step, accepted)
        meta = {site: reply.meta for site, reply in accepted.items()}
        report = StepReport(step, index, meta, rejected, time.monotonic() - started, context.notes)
        self.outcome.history.append(report.line())
        self.on_step(report)

    def _exchange(self, step: Step, outgoing: Mapping[str, Message]) -> tuple[Screened, dict[str, str]]:
        """Usable replies in sorted site order, and the reason for every other site; each reason becomes an event."""
        phase = next((phase for phase in self.server.context.phases if phase.name == step.phase), Phase(step.phase))
        replies = ask_rounded(self._courier, self._rounding, phase, step, outgoing)
        rejected = {site: reply.problem for site, reply in replies.items() if reply.message is None}
        for site, problem in rejected.items():
            self.events.add(replies[site].kind, problem, site=site, round=step.round)
        usable = {site: reply.message for site, reply in replies.items() if reply.message is not None}
        counts = {site: meta.get("n", {}) for site, meta in self.outcome.enrolled.items()}
        manifest = self.manifest(step.phase)
        screened = screen(
            usable,
            manifest,
            outgoing,
            counts,
            reply_meta=self.reply_meta(step.phase),
            weights=[entry for entry, spec in manifest.items() if spec.tensors.items() <= self._network],
            strict=self.rules.outlier_policy == "rejected",
        )
        for site, reason in screened.rejected.items():
            self.events.add("rejected", f"update to '{step.phase}' not used: {reason}", site=site, round=step.round)
        for site, message in screened.accepted.items():
            for model, (kind, problem) in lost_votes(message.meta).items():
                text = f"validation metric of the {model} model {problem}; its vote does not count"
                self.events.add(kind, text, site=site, round=step.round)
            self.events.extend(message.meta.pop("events", []), site=site, round=step.round)
        return screened, {**rejected, **screened.rejected}

    def _take(self, step: Step, screened: Screened) -> None:
        """The usable replies of a step that is done: name what is odd about them, and cap what they count for."""
        for site, reason in screened.suspicious.items():
            self.events.add("suspicious", f"update to '{step.phase}' used, though {reason}", site=site, round=step.round)
        if self.rules.max_client_weight is not None:
            given = {site: message.meta["n_samples"] for site, message in screened.accepted.items() if "n_samples" in message.meta}
            for site, samples in capped(given, self.rules.max_client_weight).items():
                screened.accepted[site].meta["n_samples"] = samples

    # -- delivery --------------------------------------------------------------------------------------------------------------

    def _deliver(self, index: int, enrolment: Enrolment) -> None:
        """Every enrolled site, inside and outside, gets its final models and measures them on its own test images."""
        step = Step(FINALIZE, self.server.context.rounds, everyone=True)
        enrolment.admit(step.round)
        outgoing = {site: numbered(self.server.configure_final(site), index, step.round) for site in sorted(self.outcome.enrolled)}
        if seen := trained_on(self.outcome.enrolled):
            outgoing = {site: Message(message.states, {**message.meta, RANGE: seen}) for site, message in outgoing.items()}
        for site, reply in self._courier.ask(step, outgoing).items():
            if reply.message is None:
                self.events.add(reply.kind, f"final models not evaluated: {reply.problem}", site=site, round=step.round)
                continue
            meta = dict(reply.message.meta)
            self.events.extend(meta.pop("events", []), site=site)
            self.outcome.delivered[site] = meta
        if not self.outcome.delivered:
            raise FederationFailed("no site could take and evaluate the final models; see the events")


def drawn(federation: Federation, step: Step, members: list[str], attempt: int = 0, failed: Collection[str] = ()) -> list[str]:
    """Who is asked, sorted: everybody, or of partial participation the same sites in every engine and after a restart.

    Args:
        federation: its rules, seed and history.
        step: what is asked.
        members: sites that are there.
        attempt: how often the step was asked before.
        failed: sites without a usable answer to the step so far, which are not drawn where there are enough others.
    """
    count = federation.rules.sites_per_round
    if step.everyone or count is None or count >= len(members):
        return members
    history, repeated = federation.outcome.history, federation.events.of("repeated")
    if not attempt and history and history[-1]["round"] == step.round and any(event["round"] == step.round for event in repeated):
        return [site for site in members if site in history[-1]["sites"]]  # steps of a round build on each other
    others = [site for site in members if site not in failed]
    keys = ("server", step.round, "participants", *((attempt,) if attempt else ()))
    generator = numpy_generator(federation.server.context.seed, *keys)
    return sorted(generator.choice(others if len(others) >= count else members, size=count, replace=False).tolist())


def ask_rounded(
    transport: Transport, rounding: Rounding | None, phase: Phase, step: Step, outgoing: Mapping[str, Message]
) -> dict[str, Reply]:
    """Site -> reply; where weights travel rounded, the reply as it was meant.

    Args:
        transport: asks the sites.
        rounding: of the run; None: weights travel in fp32.
        phase: of the step, as the site algorithm declares it.
        outgoing: site -> what it is sent, in fp32.
    """
    if rounding is None:
        return transport.ask(step, outgoing)
    shared: dict[int, Tensor] = {}
    replies = transport.ask(step, {site: rounding.down(phase, message, shared) for site, message in outgoing.items()})
    manifest = rounding.manifest(phase)
    for site, reply in replies.items():
        if reply.message is not None and (problem := violation(reply.message, manifest)):
            replies[site] = Reply(problem=f"update to '{step.phase}' not used: {problem}", kind="rejected", seconds=reply.seconds)
        elif reply.message is not None:
            replies[site] = replace(reply, message=rounding.restored(reply.message, outgoing[site]))
    return replies


def steps_now(federation: Federation, finished: int) -> list[Step]:
    """The whole schedule; where the sites' patience is over, that of as many rounds as are done.

    It follows from the history alone, so that a run that is taken up ends where it would have ended.
    """
    context, steps, patience = federation.server.context, federation.server.steps(), federation.rules.patience
    if patience is None or not 0 < finished < len(steps):
        return steps
    over = [line for line in federation.outcome.history if line["round"] < steps[finished].round]
    asked, done = context.rounds, plateau(over, patience)
    if done is None or done >= asked:
        return steps
    context.rounds = done
    shorter = federation.server.steps()
    if not cut_short(steps, shorter, done, asked):
        context.rounds = asked
        return steps
    if not federation.events.of("stopped_early"):  # a run that is taken up has it already
        text = f"no validated model became better in {patience} rounds; training ends after {done} of {asked} rounds"
        federation.events.add("stopped_early", text, round=done - 1)
    return shorter


def cut_short(steps: Sequence[Step], shorter: Sequence[Step], done: int, asked: int) -> bool:
    """Whether a shorter schedule has the rounds that are done, and after them only what ends a run."""
    before, after = ([step for step in shorter if (step.round >= done) == ended] for ended in (False, True))
    endings = {step.phase for step in steps if step.round >= asked}
    return before == [step for step in steps if step.round < done] and {step.phase for step in after} <= endings


# -- doubts ------------------------------------------------------------------------------------------------------------------


def doubt_model_selection(outcome: Outcome, events: EventLog) -> None:
    """An event for every choice that rests on fewer than ten validation images: of all sites together, and of each that chooses alone."""
    images = {site: enrolled["n"]["validation"] for site, enrolled in outcome.enrolled.items() if enrolled["role"] == "inside"}
    for model, election in outcome.model_selection.items():
        voters = sorted({site for candidate in election["candidates"] for site in candidate["votes"]})
        behind = {site: images[site] for site in voters if site in images}
        if election["candidates"] and images_behind(behind, election["rule"]) < FEW_IMAGES:
            told = ", ".join(f"{site} {count}" for site, count in behind.items()) or "none"
            events.add("few_validation_images", f"the round of the {model} model was chosen by votes on few validation images ({told})")
    for site in sorted(images):
        alone = sorted(_validated(outcome.history, site) - outcome.model_selection.keys())
        if alone and images[site] < FEW_IMAGES:
            text = f"its {' and '.join(alone)} model was chosen on {images[site]} validation images of its own"
            events.add("few_validation_images", text, site=site)


def _validated(history: list[dict[str, Any]], site: str) -> set[str]:
    """The models that a site has measured on validation images after a round of training."""
    reports: list[Mapping[str, Any]] = [line["sites"].get(site, {}) for line in history if line["round"] > 0]
    return {model for meta in reports for model in meta.get("validation") or {}}
