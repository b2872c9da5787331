"""The schedule of a federation, written once for every engine: enrollment, the method's steps,
final models.

An engine supplies an `Exchange`. What happens to a reply (validation, k of n, repetition, failure)
is decided here.
"""

import time
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial

from medflare.adaptation.registry import LABEL_SHIFT, NONE
from medflare.core.errors import FederationFailed
from medflare.core.events import EventLog
from medflare.core.message import Message, Messages
from medflare.core.rng import numpy_generator
from medflare.core.states import StateDict
from medflare.core.text import Json
from medflare.evaluation.findings import kinds_of_training
from medflare.federation.builtin_messages import (
    ADAPT,
    COUNTS,
    EVENTS,
    FEDERATION_SHARES,
    PERSONAL_MODEL,
    PERSONAL_MODELS,
    RANGE,
    ROLE,
    TEST_PERSONAL,
    TESTED,
    TRAINING_FINDINGS,
)
from medflare.federation.enrolment import (
    Enrolment,
    join_problems,
    reported_class_shares,
    trained_on,
)
from medflare.federation.exchange import Exchange, Transport, with_step_number
from medflare.federation.outcome import Outcome, StepReport
from medflare.federation.protocol import tensor_problem
from medflare.federation.settings import CROSS_SITE, FINALIZE, Rules, step_name
from medflare.federation.step_errors import named_errors
from medflare.federation.update_validation.drift import DriftMemory
from medflare.federation.update_validation.updates import (
    Validated,
    drop_invalid_metrics,
    exchange_name,
    validate_replies,
)
from medflare.methods.aggregation import capped
from medflare.methods.base import ServerAlgorithm, Step
from medflare.methods.parts.measured import N_SAMPLES, VALIDATION
from medflare.methods.parts.selection import FEW_IMAGES, images_behind, plateau

_REPEATS = 1  # how often a step with too few usable replies is repeated before the run fails
_NO_METRIC = "; no site sent a metric of them, which is suppressed below minimum_patients"


@dataclass
class Federation:
    """One run of a method over an exchange.

    Attributes:
        server: the server algorithm; its context names the inside and outside sites, and the site
            algorithm's phases.
        identity: metadata in which the sites must agree, see `enrolment.identity_of`.
        on_step: called after every step, for progress and tracking.
        checkpoint: called after every step with the number of finished steps, see `Checkpoint`.
        returning: site -> image counts, of sites that enrolled before the run was interrupted.
    """

    server: ServerAlgorithm
    exchange: Exchange
    rules: Rules = field(default_factory=Rules)
    identity: Json = field(default_factory=dict)
    on_step: Callable[[StepReport], None] = lambda report: None
    outcome: Outcome = field(default_factory=Outcome)
    checkpoint: Callable[[int, "Federation"], None] = lambda finished, federation: None
    returning: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._context = self.server.context
        self.server.aggregation.max_client_weight = self.rules.max_client_weight
        # Inside sites that have to enroll, and usable replies that a step needs.
        self._min_sites = self.rules.min_sites or min(2, len(self._context.sites))
        self._needed = min(self._min_sites, self.rules.sites_per_round or self._min_sites)
        self._transport = Transport(self.exchange, self.outcome)
        self.drift = DriftMemory(self._context.seed)

    @property
    def events(self) -> EventLog:
        """The events of the run."""
        return self._context.events

    def run(self, finished: int = 0) -> None:
        """Run everything from enrollment to final models, without the `finished` steps: a resumed
        run has restored the server algorithm.

        Raises:
            FederationFailed: with the reason; `events` and `outcome` hold what was noted until
                then.
            Aborted: raised by the exchange when the engine is stopped.
        """
        started = time.monotonic() - self.outcome.seconds_of_steps

        # 1. Enroll.
        enrolment = Enrolment(
            context=self._context,
            transport=self._transport,
            identity=self.identity,
            returning=self.returning,
            finished=finished,
            max_client_weight=self.rules.max_client_weight,
            combined_sites=self._needed,
        )
        # Whoever names `min_sites` can do without the others.
        enrolment.open(self._min_sites, all_present=self.rules.min_sites is None)

        # 2. Train, step by step; early stopping may shorten the schedule.
        steps = self._schedule_after(finished)
        while finished < len(steps):
            self._step(finished, steps[finished], enrolment)
            finished += 1
            self.checkpoint(finished, self)
            steps = self._schedule_after(finished)
        self._note_selections()
        self.outcome.seconds["training"] = time.monotonic() - started

        # 3. Finalize: the sites evaluate their final models.
        self._finalize(finished, enrolment)

    # -- the schedule -----------------------------------------------------------------------------

    def _schedule_after(self, finished: int) -> list[Step]:
        """The whole schedule; after early stopping, that of as many rounds as are done.

        It follows from the history alone, so that a resumed run stops in the same round.
        """
        context = self._context
        steps = self.server.steps()
        patience = self.rules.patience
        if patience is None or not 0 < finished < len(steps):
            return steps
        round = steps[finished].round
        first = self.server.warmup + 1
        earlier = (line for line in self.outcome.history if first <= line["round"] < round)
        done = plateau(earlier, patience)
        rounds = context.rounds
        if done is None or done >= rounds:
            return steps
        context.rounds = done
        shorter = self.server.steps()
        if not _can_end(steps, shorter, done, rounds):
            context.rounds = rounds
            return steps
        if not self.events.of("stopped_early"):  # a resumed run has it already
            text = (
                f"no validated model became better in {patience} rounds; "
                f"training ends after {done} of {rounds} rounds"
            )
            self.events.add("stopped_early", text, round=done - 1)
        return shorter

    def _sites_to_ask(
        self, step: Step, members: list[str], attempt: int, failed: Collection[str]
    ) -> list[str]:
        """The sites to ask, sorted: all members or, with `sites_per_round`, those drawn for the
        round.

        Sites that `failed` in an earlier attempt at the step are not drawn if there are enough
        others.
        """
        count = self.rules.sites_per_round
        if step.everyone or count is None or count >= len(members):
            return members
        if not attempt:
            drawn = self._drawn_before(step)
            if drawn is not None:
                return [site for site in members if site in drawn]
        others = [site for site in members if site not in failed]
        candidates = others if len(others) >= count else members
        repeated = [attempt] if attempt else []
        generator = numpy_generator(
            self._context.seed, "server", step.round, "participants", *repeated
        )
        return sorted(generator.choice(candidates, size=count, replace=False).tolist())

    def _drawn_before(self, step: Step) -> Collection[str] | None:
        """The sites of the round's last step if one of the round's steps was repeated, as its steps
        build on each other; None if the draw gives the same sites anyway.
        """
        history = self.outcome.history
        if not history or history[-1]["round"] != step.round:
            return None
        repeated = [event["round"] for event in self.events.of("repeated")]
        return history[-1]["sites"] if step.round in repeated else None

    # -- one step ---------------------------------------------------------------------------------

    def _step(self, index: int, step: Step, enrolment: Enrolment) -> None:
        """Ask the sites, refuse what is not usable, limit weights, aggregate, report."""
        started = time.monotonic()

        # 1. Ask; 2. refuse.
        validated = self._usable_replies(index, step, enrolment)
        accepted = validated.accepted
        self.drift.remember(exchange_name(step), validated.sketches)
        for site, reason in validated.suspicious.items():
            text = f"update to '{step.phase}' used, though {reason}"
            self.events.add("suspicious", text, site, step.round)

        # 3. Limit the weight of single sites.
        if self.rules.max_client_weight is not None:
            counting = {site: reply for site, reply in accepted.items() if N_SAMPLES in reply}
            samples = {site: reply[N_SAMPLES] for site, reply in counting.items()}
            for site, count in capped(samples, self.rules.max_client_weight).items():
                accepted[site][N_SAMPLES] = count

        # 4. Aggregate.
        self._context.notes = {}
        with self._of_server(step):
            self.server.aggregate(step, accepted)

        # 5. Report.
        meta = {site: reply.meta for site, reply in accepted.items()}
        seconds = time.monotonic() - started
        report = StepReport(step, index, meta, validated.rejected, seconds, self._context.notes)
        self.outcome.history.append(report.line())
        self.on_step(report)

    def _of_server(self, step: Step) -> AbstractContextManager[None]:
        """A context for a block that calls the server algorithm; its errors name the step."""
        name = step_name(step.phase, step.round, self._context.rounds)
        return named_errors(f"the server in {name}", type(self.server))

    def _requests(
        self, index: int, step: Step, sites: list[str], configure: Callable[[str], Message]
    ) -> dict[str, Message]:
        """Site -> the server algorithm's request."""
        outgoing = {}
        for site in sites:
            with self._of_server(step):
                request = configure(site)
            outgoing[site] = with_step_number(request, index, self._context.rounds)
        return outgoing

    def _usable_replies(self, index: int, step: Step, enrolment: Enrolment) -> Validated:
        """The validated replies to a step, which is repeated if too few of them are usable.

        Raises:
            FederationFailed: too few replies are usable when it is repeated, too.
        """
        failed = set[str]()
        for attempt in range(_REPEATS + 1):
            members = enrolment.members(step)
            asked = self._sites_to_ask(step, members, attempt, failed)
            outgoing = self._requests(index, step, asked, partial(self.server.configure, step))
            validated = self._validated_replies(step, outgoing)
            usable = len(validated.accepted)
            if usable >= self._needed:
                break
            name = step_name(step.phase, step.round, self._context.rounds)
            reason = f"{usable} of {self._needed} needed replies to {name} are usable"
            problems = "no site is present"
            if asked:
                absent = [site for site in enrolment.inside if site not in members]
                problems = join_problems(dict.fromkeys(absent, "not there") | validated.rejected)
            if attempt == _REPEATS:
                raise FederationFailed(
                    f"{reason} ({problems}); correct this and resume the run, or give a smaller "
                    "--min-sites"
                )
            self.events.add("repeated", f"{reason}; asking again ({problems})", round=step.round)
            failed |= validated.rejected.keys()
        return validated

    def _replies(
        self, step: Step, outgoing: Messages, context: str = ""
    ) -> tuple[dict[str, Message], dict[str, str]]:
        """Site -> its reply, and site -> why there is none, which becomes an event."""
        replies = {}
        problems = {}
        for site, reply in self._transport.ask(step, outgoing).items():
            if reply.message is None:
                problems[site] = reply.problem
                self.events.add(reply.kind, context + reply.problem, site, step.round)
            else:
                replies[site] = reply.message
        return replies, problems

    def _validated_replies(self, step: Step, outgoing: Messages) -> Validated:
        """The validated replies, and site -> reason for every other site; each reason becomes an
        event.
        """
        replies, rejected = self._replies(step, outgoing)
        validated = validate_replies(
            self._context,
            step,
            replies,
            outgoing,
            self.drift,
            strict=self.rules.outlier_policy == "rejected",
        )
        for site, reason in validated.rejected.items():
            text = f"update to '{step.phase}' not used: {reason}"
            self.events.add("rejected", text, site, step.round)
        for site, message in validated.accepted.items():
            for model, (kind, problem) in drop_invalid_metrics(message).items():
                text = f"validation metric of the {model} model {problem}; its vote does not count"
                self.events.add(kind, text, site, step.round)
            self.events.extend(message.meta.pop(EVENTS.name, []), site, step.round)
        return replace(validated, rejected={**rejected, **validated.rejected})

    # -- the end ----------------------------------------------------------------------------------

    def _note_selections(self) -> None:
        """Note which rounds were selected, and whether on few images."""
        self.outcome.rounds = self._context.rounds
        for model, selector in self.server.model_selectors().items():
            self.outcome.model_selection[model] = {
                "round": selector.round,
                "rule": selector.rule,
                "candidates": selector.record,
            }
        if getattr(self.server.hyper, "selection", "last") != "last":  # a survey has no rule
            self._note_few_validation_images()

    def _finalize(self, index: int, enrolment: Enrolment) -> None:
        """Have every enrolled site, inside and outside, evaluate its final models on its test
        images.
        """
        step = Step(FINALIZE, self._context.rounds)
        enrolment.invite(step.round)
        outgoing = self._final_requests(index, step)
        replies, problems = self._replies(step, outgoing, "final models not evaluated: ")
        shared = {}
        for site, reply in replies.items():
            meta = dict(reply.meta)
            self.events.extend(meta.pop(EVENTS.name, []), site)
            self.outcome.final_metadata[site] = meta
            if reply.states and self._is_shared(site, step, reply):
                shared[site] = reply[PERSONAL_MODEL]
        if not self.outcome.final_metadata:
            first = dict(list(problems.items())[:1])
            raise FederationFailed(f"no site evaluated the final models ({join_problems(first)})")
        if shared:
            self._cross_site(index, shared)

    def _final_requests(self, index: int, step: Step) -> dict[str, Message]:
        enrolled = sorted(self.outcome.enrolled)
        outgoing = self._requests(index, step, enrolled, self.server.configure_final)
        findings = kinds_of_training(self.outcome.history, self.events, outgoing)
        total = trained_on(self.outcome.enrolled)
        adapt = self.rules.adapt
        if adapt == LABEL_SHIFT and step.round:
            self.outcome.class_shares = reported_class_shares(
                self.outcome.enrolled, self._context.task
            )
        for site, message in outgoing.items():
            if adapt != NONE:
                message[ADAPT] = adapt
            if self.outcome.class_shares:
                message[FEDERATION_SHARES] = self.outcome.class_shares
            message[TRAINING_FINDINGS] = findings[site]
            if total:
                message[RANGE] = total
            if self.rules.cross_site:
                message[TEST_PERSONAL] = True
        return outgoing

    def _is_shared(self, site: str, step: Step, message: Message) -> bool:
        """Whether a site's personal model can be tested at the others; else an event says why."""
        manifest = {}
        if self.rules.cross_site:
            manifest = {PERSONAL_MODEL.name: PERSONAL_MODEL.spec(self._context.plan)}
        problem = tensor_problem(message, manifest)
        if problem:
            text = f"its personal model is not tested at other sites: {problem}"
            self.events.add("rejected", text, site, step.round)
        return problem is None

    def _cross_site(self, index: int, shared: Mapping[str, StateDict]) -> None:
        """Have every site that evaluated its final models test the shared personal models."""
        step = Step(CROSS_SITE, self._context.rounds)
        request = Message()
        for site, state in shared.items():
            request[PERSONAL_MODELS.member(site)] = state
        outgoing = {}
        for site in sorted(self.outcome.final_metadata):
            outgoing[site] = with_step_number(request, index, step.round)
        self.outcome.cross_site = {owner: {} for owner in shared}
        replies, _ = self._replies(step, outgoing, "personal models of other sites not tested: ")
        for site, reply in replies.items():
            for owner in shared:
                self.outcome.cross_site[owner][site] = reply[TESTED].get(owner)

    def _note_few_validation_images(self) -> None:
        """Add an event for every model whose round was chosen on few validation images, of all
        sites or of one that chooses alone.
        """
        outcome = self.outcome
        images = {}
        for site, enrolled in outcome.enrolled.items():
            if enrolled[ROLE.name] == "inside":
                images[site] = enrolled[COUNTS.name].get("validation", 0)
        for model, selection in outcome.model_selection.items():
            scores = [candidate["votes"] for candidate in selection["candidates"]]
            scoring = set().union(*scores)
            counts = {site: images[site] for site in sorted(scoring & images.keys())}
            if scores and images_behind(counts, selection["rule"]) < FEW_IMAGES:
                listed = ", ".join(f"{site} {count}" for site, count in counts.items())
                text = f"the round of the {model} model was chosen on few validation images"
                text += f" ({listed})" if counts else _NO_METRIC
                self.events.add("few_validation_images", text)
        for site in sorted(images):
            alone = sorted(self._validated_at(site) - outcome.model_selection.keys())
            if alone and images[site] < FEW_IMAGES:
                text = (
                    f"its {' and '.join(alone)} model was chosen on {images[site] or 'few'} "
                    "validation images of this site"
                )
                self.events.add("few_validation_images", text, site=site)

    def _validated_at(self, site: str) -> set[str]:
        """The models that a site has validated after some training."""
        models: set[str] = set()
        for line in self.outcome.history:
            if line["round"] > 0:
                models |= (line["sites"].get(site, {}).get(VALIDATION.name) or {}).keys()
        return models


def _can_end(steps: list[Step], shorter: list[Step], done: int, rounds: int) -> bool:
    """Whether training can end after `done` rounds: the shorter schedule has the steps so far, and
    then only phases that end the run.
    """
    before = [step for step in steps if step.round < done]
    endings = {step.phase for step in steps if step.round >= rounds}
    rest = {step.phase for step in shorter if step.round >= done}
    return before == [step for step in shorter if step.round < done] and rest <= endings
