"""The schedule of a federation, written once for every engine: enrollment, the method's steps, final models.

An engine supplies an `Exchange`. What happens to a reply (validation, k of n, repetition, failure) is decided here.
"""

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from medflare.core.errors import FederationFailed
from medflare.core.events import EventLog
from medflare.core.manifest import Manifest, Phase, StateSpec, non_finite, violation
from medflare.core.message import Message
from medflare.core.rng import numpy_generator
from medflare.core.states import StateDict
from medflare.evaluation.verdicts import kinds_of_training
from medflare.federation.enrolment import Enrolment, join_problems, trained_on
from medflare.federation.exchange import Exchange, Transport, numbered
from medflare.federation.outcome import Outcome, StepReport
from medflare.federation.settings import CROSS_SITE, FINALIZE, Rules
from medflare.federation.update_validation.drift import DriftMemory
from medflare.federation.update_validation.messages import CROSS, RANGE, SHARE, SHARED, TRAINING_FINDINGS
from medflare.federation.update_validation.updates import Validated, capped, drop_invalid_metrics, validate_replies
from medflare.methods.base import ServerAlgorithm, Step
from medflare.methods.parts.selection import FEW_IMAGES, images_behind, plateau

_REPEATS: Final = 1  # how often a step with too few usable replies is repeated before the run fails


@dataclass
class Federation:
    """One run of a method over an exchange.

    Attributes:
        server: the server algorithm; its context names the inside and outside sites, and the site algorithm's phases.
        identity: metadata in which the sites must agree, see `participant.identity_of`.
        on_step: called after every step, for progress and tracking.
        checkpoint: called after every step with the number of finished steps.
        returning: site -> image counts, of sites that enrolled before the run was interrupted.
    """

    server: ServerAlgorithm[Any]
    exchange: Exchange
    rules: Rules = field(default_factory=Rules)
    identity: Mapping[str, Any] = field(default_factory=dict)
    on_step: Callable[[StepReport], None] = lambda report: None
    checkpoint: Callable[[int], None] = lambda finished: None
    outcome: Outcome = field(default_factory=Outcome)
    returning: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._transport = Transport(self.exchange, self.outcome)
        self._network = StateSpec.like(self.server.context.plan.template(), "").tensors.items()
        self.drift = DriftMemory(self.server.context.seed)
        self._manifests: dict[str, Manifest] = {}  # the networks behind them are built once

    @property
    def events(self) -> EventLog:
        """The events of the run."""
        return self.server.context.events

    def run(self, finished: int = 0) -> Outcome:
        """Everything from enrollment to final models; `finished` steps are skipped (a resumed run has restored the server algorithm).

        Raises:
            FederationFailed: with the reason; `events` and `outcome` hold what was noted until then.
            Aborted: raised by the exchange when the engine is stopped.
        """
        started, context = time.monotonic(), self.server.context
        enrolment = Enrolment(context, self._transport, self.identity, self.returning, finished, self.rules.max_client_weight)
        enrolment.open(self._needed)
        while finished < len(steps := self._steps(finished)):
            self._step(finished, steps[finished], enrolment)
            finished += 1
            self.checkpoint(finished)
        self.outcome.rounds = context.rounds
        for model, selector in self.server.model_selectors().items():
            self.outcome.model_selection[model] = {"round": selector.round, "rule": selector.rule, "candidates": selector.record}
        if getattr(self.server.hyper, "selection", "last") != "last":  # a survey has no such setting
            self._note_few_validation_images()
        self.outcome.seconds["training"] = time.monotonic() - started
        self._finalize(finished, enrolment)
        self.outcome.seconds["total"] = time.monotonic() - started
        return self.outcome

    @property
    def _needed(self) -> int:
        return self.rules.min_sites if self.rules.min_sites is not None else min(2, len(self.server.context.sites))

    def _steps(self, finished: int) -> list[Step]:
        """The whole schedule; after early stopping, that of as many rounds as are done.

        It follows from the history alone, so that a resumed run stops in the same round.
        """
        context, steps, patience = self.server.context, self.server.steps(), self.rules.patience
        if patience is None or not 0 < finished < len(steps):
            return steps
        rounds, done = context.rounds, plateau((line for line in self.outcome.history if line["round"] < steps[finished].round), patience)
        if done is None or done >= rounds:
            return steps
        context.rounds = done
        shorter = self.server.steps()
        # Early stopping is possible if the shorter schedule has the steps so far, and then only phases that end the run.
        so_far = [step for step in steps if step.round < done] == [step for step in shorter if step.round < done]
        endings = {step.phase for step in steps if step.round >= rounds}
        if not so_far or not {step.phase for step in shorter if step.round >= done} <= endings:
            context.rounds = rounds
            return steps
        if not self.events.of("stopped_early"):  # a resumed run has it already
            text = f"no validated model became better in {patience} rounds; training ends after {done} of {rounds} rounds"
            self.events.add("stopped_early", text, round=done - 1)
        return shorter

    def _participants(self, step: Step, members: list[str], attempt: int, failed: Collection[str]) -> list[str]:
        """The sites to ask, sorted: all members that are present or, with `sites_per_round`, those drawn for the round.

        Sites that `failed` in an earlier attempt at the step are not drawn if there are enough others.
        """
        count = self.rules.sites_per_round
        if step.everyone or count is None or count >= len(members):
            return members
        history, repeated = self.outcome.history, self.events.of("repeated")
        if not attempt and history and history[-1]["round"] == step.round and any(event["round"] == step.round for event in repeated):
            return [site for site in members if site in history[-1]["sites"]]  # steps of a round build on each other
        others = [site for site in members if site not in failed]
        keys = ("server", step.round, "participants", *((attempt,) if attempt else ()))
        generator = numpy_generator(self.server.context.seed, *keys)
        return sorted(generator.choice(others if len(others) >= count else members, size=count, replace=False).tolist())

    def _step(self, index: int, step: Step, enrolment: Enrolment) -> None:
        context, failed = self.server.context, set[str]()
        for attempt in range(_REPEATS + 1):
            started = time.monotonic()
            members = enrolment.members(step)
            participants = self._participants(step, members, attempt, failed)
            outgoing = {site: numbered(self.server.configure(step, site), index, context.rounds) for site in participants}
            validated, rejected = self._exchange(step, outgoing)
            accepted = validated.accepted
            if len(accepted) >= min(self._needed, self.rules.sites_per_round or self._needed):
                break
            reason = f"{len(accepted)} usable replies to '{step.phase}' in round {step.round}, {self._needed} are needed"
            absent = dict.fromkeys((site for site in enrolment.inside if site not in members), "not there")
            problems = join_problems({**absent, **rejected}) if participants else "no site is present"
            if attempt == _REPEATS:
                raise FederationFailed(f"{reason} ({problems})")
            self.events.add("repeated", f"{reason}; asking again ({problems})", round=step.round)
            failed |= rejected.keys()
        self.drift.remember(_named(step), validated.sketches)
        for site, reason in validated.suspicious.items():
            self.events.add("suspicious", f"update to '{step.phase}' used, though {reason}", site=site, round=step.round)
        if self.rules.max_client_weight is not None:
            samples = {site: message.meta["n_samples"] for site, message in accepted.items() if "n_samples" in message.meta}
            for site, count in capped(samples, self.rules.max_client_weight).items():
                accepted[site].meta["n_samples"] = count
        context.notes = {}
        self.server.aggregate(step, accepted)
        meta = {site: reply.meta for site, reply in accepted.items()}
        report = StepReport(step, index, meta, rejected, time.monotonic() - started, context.notes)
        self.outcome.history.append(report.line())
        self.on_step(report)

    def _exchange(self, step: Step, outgoing: Mapping[str, Message]) -> tuple[Validated, dict[str, str]]:
        """The validated replies, and site -> reason for every other site; each reason becomes an event."""
        phase = next((phase for phase in self.server.context.phases if phase.name == step.phase), Phase(step.phase))
        if phase.name not in self._manifests:
            self._manifests[phase.name] = phase.manifest(self.server.context.plan)
        manifest = self._manifests[phase.name]
        replies = self._transport.ask(step, outgoing)
        rejected = {site: reply.problem for site, reply in replies.items() if reply.message is None}
        for site, problem in rejected.items():
            self.events.add(replies[site].kind, problem, site=site, round=step.round)
        validated = validate_replies(
            {site: reply.message for site, reply in replies.items() if reply.message is not None},
            manifest,
            outgoing,
            {site: meta.get("n", {}) for site, meta in self.outcome.enrolled.items()},
            reply_meta=phase.reply_meta,
            weights=[entry for entry, spec in manifest.items() if spec.tensors.items() <= self._network],
            strict=self.rules.outlier_policy == "rejected",
            drift=self.drift,
            phase=_named(step),
        )
        for site, reason in validated.rejected.items():
            self.events.add("rejected", f"update to '{step.phase}' not used: {reason}", site=site, round=step.round)
        for site, message in validated.accepted.items():
            for model, (kind, problem) in drop_invalid_metrics(message.meta).items():
                text = f"validation metric of the {model} model {problem}; its vote does not count"
                self.events.add(kind, text, site=site, round=step.round)
            self.events.extend(message.meta.pop("events", []), site=site, round=step.round)
        return validated, {**rejected, **validated.rejected}

    def _finalize(self, index: int, enrolment: Enrolment) -> None:
        """Every enrolled site, inside and outside, gets its final models and evaluates them on its test images."""
        step = Step(FINALIZE, self.server.context.rounds, everyone=True)
        enrolment.admit(step.round)
        total = trained_on(self.outcome.enrolled)
        outgoing = {site: numbered(self.server.configure_final(site), index, step.round) for site in sorted(self.outcome.enrolled)}
        task = self.server.context.plan.task.to_dict()
        so_far = {
            "sites": {},
            "events": self.events.to_list(),
            "configuration": {"task": task},
            "model_selection": self.outcome.model_selection,
        }
        kinds = kinds_of_training(so_far, self.outcome.history, outgoing)
        for site, message in outgoing.items():
            message.meta[TRAINING_FINDINGS] = kinds[site]
            message.meta |= {RANGE: total} if total else {}
            message.meta |= {SHARE: True} if self.rules.cross_site else {}
        shared: dict[str, StateDict] = {}
        for site, reply in self._transport.ask(step, outgoing).items():
            if reply.message is None:
                self.events.add(reply.kind, f"final models not evaluated: {reply.problem}", site=site, round=step.round)
                continue
            meta = dict(reply.message.meta)
            self.events.extend(meta.pop("events", []), site=site)
            self.outcome.delivered[site] = meta
            if reply.message.states:
                manifest = {str(SHARED): SHARED.spec(self.server.context.plan)} if self.rules.cross_site else {}
                if problem := violation(reply.message, manifest) or non_finite(reply.message):
                    self.events.add("rejected", f"its personal model is not tested at other sites: {problem}", site=site, round=step.round)
                else:
                    shared[site] = reply.message.states[SHARED]
        if not self.outcome.delivered:
            raise FederationFailed("no site evaluated the final models; see the events")
        if shared:
            self._cross_site(index, shared)

    def _cross_site(self, index: int, shared: Mapping[str, StateDict]) -> None:
        """Every site that evaluated its final models tests the shared personal models."""
        step = Step(CROSS_SITE, self.server.context.rounds, everyone=True)
        request = Message({CROSS.request[0].of(site): state for site, state in shared.items()})
        outgoing = {site: numbered(request, index, step.round) for site in sorted(self.outcome.delivered)}
        self.outcome.cross_site = {owner: {} for owner in shared}
        for site, reply in self._transport.ask(step, outgoing).items():
            if reply.message is None:
                self.events.add(reply.kind, f"personal models of other sites not tested: {reply.problem}", site=site, round=step.round)
                continue
            for owner in shared:
                self.outcome.cross_site[owner][site] = reply.message.meta[CROSS_SITE].get(owner)

    def _note_few_validation_images(self) -> None:
        """An event for every model whose round was chosen on few validation images, of all sites or of one that chooses alone."""
        outcome = self.outcome
        images = {site: enrolled["n"].get("validation", 0) for site, enrolled in outcome.enrolled.items() if enrolled["role"] == "inside"}
        for model, selection in outcome.model_selection.items():
            voters = sorted({site for candidate in selection["candidates"] for site in candidate["votes"]})
            counts = {site: images[site] for site in voters if site in images}
            if selection["candidates"] and images_behind(counts, selection["rule"]) < FEW_IMAGES:
                listed = ", ".join(f"{site} {count}" for site, count in counts.items()) or "none"
                self.events.add("few_validation_images", f"the round of the {model} model was chosen on few validation images ({listed})")
        for site in sorted(images):
            reports: list[Mapping[str, Any]] = [line["sites"].get(site, {}) for line in outcome.history if line["round"] > 0]
            validated = {model for meta in reports for model in meta.get("validation") or {}}
            alone = sorted(validated - outcome.model_selection.keys())
            if alone and images[site] < FEW_IMAGES:
                text = f"its {' and '.join(alone)} model was chosen on {images[site]} validation images of this site"
                self.events.add("few_validation_images", text, site=site)


def _named(step: Step) -> str:
    """The exchange of a round whose updates are compared over the rounds."""
    return f"{step.phase}/{step.part}"
