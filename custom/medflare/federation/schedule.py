"""The schedule of a federation, written once for every engine: enrol, the method's steps, deliver.

An engine supplies an `Exchange`: it takes messages to sites and brings their replies back. Everything that decides what happens
to a reply (screening, k of n, repetition, failure) happens here, so that the plain loop, the simulator and a provisioned
federation cannot differ.
"""

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from medflare.core.errors import FederationFailed
from medflare.core.events import EventLog
from medflare.core.manifest import Manifest
from medflare.core.message import Message
from medflare.core.rng import numpy_generator
from medflare.federation.screening import drop_undefined_metrics, not_plain, screen
from medflare.methods.base import ServerHalf, Step
from medflare.methods.parts.training import total_bytes

ENROL, DELIVER = "enrol", "deliver"


@dataclass
class Reply:
    """A site's answer: a message, or why there is none.

    Attributes:
        problem: empty when the message is there; else one line.
        kind: the event that a problem becomes: "failed" (the site reported an error), "late" or "missing".
    """

    message: Message | None = None
    problem: str = ""
    kind: str = "failed"


class Exchange(Protocol):
    """How messages reach the sites. Implementations never raise for one site's fault: they return a Reply that says so."""

    def present(self, round: int) -> list[str]:
        """Names of the sites that can be asked in this round."""

    def __call__(self, step: Step, outgoing: Mapping[str, Message]) -> Mapping[str, Reply]:
        """Ask every site in `outgoing`; a site without an entry in the answer is missing."""


@dataclass(frozen=True)
class Rules:
    """How a federation treats its members.

    Attributes:
        min_sites: usable replies that a step needs; None: 2, or 1 in a federation of one.
        sites_per_round: how many inside sites are drawn for a round; None: all.
        repeats: how often a step with too few usable replies is tried again before the run fails.
        norm_limit: see `screening.screen`.
    """

    min_sites: int | None = None
    sites_per_round: int | None = None
    repeats: int = 1
    norm_limit: float = 100.0


@dataclass
class StepReport:
    """What an observer learns after a step.

    Attributes:
        index: 0-based number of the step in the run.
        facts: site -> facts of its usable reply.
        rejected: site -> why there is none.
        aggregation: site -> numbers that the server half noted about it, see `ServerContext.note`.
    """

    step: Step
    index: int
    facts: dict[str, dict[str, Any]]
    rejected: dict[str, str]
    seconds: float
    down_bytes: int
    up_bytes: int
    aggregation: dict[str, dict[str, float | None]] = field(default_factory=dict)

    def line(self) -> dict[str, Any]:
        """The step as metrics.jsonl and the report have it."""
        place = {"step": self.index, "phase": self.step.phase, "round": self.step.round, "seconds": self.seconds}
        return {**place, "sites": self.facts, "aggregation": self.aggregation}


@dataclass
class Outcome:
    """How a federation ended.

    Attributes:
        enrolled: site -> facts it enrolled with ("n", "class_counts", ...).
        delivered: site -> facts of its final evaluation ("metrics": role -> metric -> value).
    """

    enrolled: dict[str, dict[str, Any]] = field(default_factory=dict)
    delivered: dict[str, dict[str, Any]] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    down_bytes: int = 0
    up_bytes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass
class Federation:
    """One run of a method over an exchange.

    Attributes:
        server: the server half; its context names the inside and outside sites.
        manifest: phase -> what a reply holds (the site half's declaration).
        identity: facts sent with "enrol"; a site whose task or method differs refuses, by name.
        on_step: called after every step, for progress and tracking.
        checkpoint: called after every step with the number of finished steps.
        returning: sites that were enrolled when the run that is taken up was interrupted; they go on from what they remember.
    """

    server: ServerHalf
    exchange: Exchange
    manifest: Callable[[str], Manifest]
    rules: Rules = Rules()
    identity: Mapping[str, Any] = field(default_factory=dict)
    on_step: Callable[[StepReport], None] = lambda report: None
    checkpoint: Callable[[int, "Federation"], None] = lambda finished, federation: None
    outcome: Outcome = field(default_factory=Outcome)
    returning: Collection[str] = ()
    _finished: int = field(default=0, init=False)

    @property
    def events(self) -> EventLog:
        return self.server.context.events

    def run(self, finished: int = 0) -> Outcome:
        """Everything from enrolment to delivery; `finished` steps are skipped (a resumed run has restored the server half).

        Raises:
            FederationFailed: with the reason; what was noted until then is in `events` and `outcome`.
            Aborted: raised by the exchange when the engine was asked to stop.
        """
        started = time.monotonic()
        self._finished = finished
        self._enrol()
        steps = self.server.steps()
        for index, step in enumerate(steps[finished:], start=finished):
            self._step(index, step)
            self.checkpoint(index + 1, self)
        self.outcome.seconds["training"] = time.monotonic() - started
        self._deliver(len(steps))
        self.outcome.seconds["total"] = time.monotonic() - started
        return self.outcome

    # -- enrolment ---------------------------------------------------------------------------------------------------------

    def _enrol(self) -> None:
        """Every site that is present says what it has; any site that cannot take part ends the run before training starts."""
        context = self.server.context
        problems = self._admit(Step(ENROL, 0), self.exchange.present(0))
        if problems:
            raise FederationFailed(_listed(problems))
        here = [site for site in context.sites if site in self.outcome.enrolled]
        if len(here) < self._needed():
            raise FederationFailed(
                f"{len(here)} of the sites {', '.join(context.sites)} enrolled ({', '.join(here) or 'none'}), "
                f"min_sites is {self._needed()}; start the missing sites or lower min_sites"
            )
        for site in sorted({*context.sites, *context.outside} - self.outcome.enrolled.keys()):
            self.events.add("missing", "not there when the federation started; it may join later", site=site, round=0)

    def _admit(self, step: Step, sites: list[str]) -> dict[str, str]:
        """Ask newcomers what they have; returns site -> problem for those that cannot take part."""
        context, problems = self.server.context, {}
        known = {*context.sites, *context.outside}
        new = [site for site in sorted(sites) if site in known and site not in self.outcome.enrolled]
        roles = {site: "outside" if site in context.outside else "inside" for site in new}
        invitation = {**self.identity, "sites": list(context.sites)}
        finished = {site: self._finished if site in self.returning else 0 for site in new}
        replies = self._ask(step, {site: Message({}, {**invitation, "role": roles[site], "finished": finished[site]}) for site in new})
        for site in new:
            reply = replies[site]
            if reply.message is None:
                problems[site] = reply.problem
                self.events.add(reply.kind, reply.problem, site=site, round=step.round)
                continue
            facts = dict(reply.message.facts)
            self.events.extend(facts.pop("events", []), site=site)
            self.outcome.enrolled[site] = context.site_counts[site] = {**facts, "role": roles[site]}
        return problems

    def _needed(self) -> int:
        return self.rules.min_sites if self.rules.min_sites is not None else min(2, len(self.server.context.sites))

    # -- steps -------------------------------------------------------------------------------------------------------------

    def _step(self, index: int, step: Step) -> None:
        for attempt in range(self.rules.repeats + 1):
            started = time.monotonic()
            down, up = self.outcome.down_bytes, self.outcome.up_bytes
            outgoing = {site: _numbered(self.server.outgoing(step, site), index) for site in self._asked(step)}
            accepted, rejected = self._exchange(step, outgoing)
            if len(accepted) >= min(self._needed(), self.rules.sites_per_round or self._needed()):
                break
            reason = f"{len(accepted)} usable replies to '{step.phase}' in round {step.round}, {self._needed()} are needed"
            named = _listed(rejected) or "no site is present"
            if attempt == self.rules.repeats:
                raise FederationFailed(f"{reason} ({named})")
            self.events.add("repeated", f"{reason}; asking again ({named})", round=step.round)
        context = self.server.context
        context.aggregation = {}
        self.server.accept(step, accepted)
        report = StepReport(
            step,
            index,
            {site: reply.facts for site, reply in accepted.items()},
            rejected,
            time.monotonic() - started,
            self.outcome.down_bytes - down,
            self.outcome.up_bytes - up,
            context.aggregation,
        )
        self.outcome.history.append(report.line())
        self.on_step(report)

    def _asked(self, step: Step) -> list[str]:
        """The enrolled inside sites that this step asks, sorted; sites that came in since the last step enrol first."""
        present = self.exchange.present(step.round)
        before = set(self.outcome.enrolled)
        for site, problem in self._admit(Step(ENROL, step.round), present).items():
            self.events.add("warning", f"wants to join and cannot: {problem}", site=site, round=step.round)
        for site in sorted(self.outcome.enrolled.keys() - before):
            self.events.add("joined", f"joined in round {step.round}", site=site, round=step.round)
        here = [site for site in self.server.context.sites if site in self.outcome.enrolled]
        for site in here:
            if site not in present:
                self.events.add("missing", f"not there for '{step.phase}' of round {step.round}", site=site, round=step.round)
        members = [site for site in here if site in present]
        return members if step.everyone else self._drawn(step.round, members)

    def _drawn(self, round: int, members: list[str]) -> list[str]:
        """Partial participation: the same sites in every engine and after a restart."""
        count = self.rules.sites_per_round
        if count is None or count >= len(members):
            return members
        generator = numpy_generator(self.server.context.seed, "server", round, "participants")
        return sorted(generator.choice(members, size=count, replace=False).tolist())

    def _exchange(self, step: Step, outgoing: Mapping[str, Message]) -> tuple[dict[str, Message], dict[str, str]]:
        """Usable replies in sorted site order, and the reason for every other site; each reason becomes an event."""
        replies = self._ask(step, outgoing)
        rejected: dict[str, str] = {}
        for site, reply in replies.items():
            if reply.message is None:
                rejected[site] = reply.problem
                self.events.add(reply.kind, reply.problem, site=site, round=step.round)
        usable = {site: reply.message for site, reply in replies.items() if reply.message is not None}
        counts = {site: facts.get("n", {}) for site, facts in self.outcome.enrolled.items()}
        screened = screen(usable, self.manifest(step.phase), outgoing, counts, norm_limit=self.rules.norm_limit)
        for site, reason in screened.rejected.items():
            self.events.add("rejected", f"update to '{step.phase}' not used: {reason}", site=site, round=step.round)
        for site, message in screened.accepted.items():
            for metric in drop_undefined_metrics(message.facts):
                self.events.add("undefined", f"validation metric of the {metric} model is not a number", site=site, round=step.round)
            self.events.extend(message.facts.pop("events", []), site=site, round=step.round)
        return screened.accepted, {**rejected, **screened.rejected}

    def _ask(self, step: Step, outgoing: Mapping[str, Message]) -> dict[str, Reply]:
        """The engine's exchange, counted; a site without an answer gets one that says so."""
        answers = self.exchange(step, outgoing) if outgoing else {}
        silent = Reply(problem=f"no answer to '{step.phase}' of round {step.round}", kind="missing")
        replies = {site: _plain(answers.get(site, silent)) for site in sorted(outgoing)}
        self.outcome.down_bytes += total_bytes(outgoing.values())
        self.outcome.up_bytes += total_bytes(reply.message for reply in replies.values() if reply.message is not None)
        return replies

    # -- delivery ----------------------------------------------------------------------------------------------------------

    def _deliver(self, index: int) -> None:
        """Every enrolled site, inside and outside, gets its final models and measures them on its own test images."""
        step = Step(DELIVER, self.server.context.rounds, everyone=True)
        self._admit(Step(ENROL, step.round), self.exchange.present(step.round))
        outgoing = {site: _numbered(self.server.delivery(site), index) for site in sorted(self.outcome.enrolled)}
        replies = self._ask(step, outgoing)
        for site, reply in replies.items():
            if reply.message is None:
                self.events.add(reply.kind, f"final models not evaluated: {reply.problem}", site=site, round=step.round)
                continue
            facts = dict(reply.message.facts)
            self.events.extend(facts.pop("events", []), site=site)
            self.outcome.delivered[site] = facts
        if not self.outcome.delivered:
            raise FederationFailed("no site could take and evaluate the final models; see the events")


def _numbered(message: Message, index: int) -> Message:
    """The message with the number of its step, by which a site knows a step that it has done before."""
    return Message(message.states, {**message.facts, "step": index})


def _plain(reply: Reply) -> Reply:
    """The reply, or why its facts must not get as far as the results."""
    problem = not_plain(reply.message.facts) if reply.message is not None else None
    return reply if problem is None else Reply(problem=problem, kind="rejected")


def _listed(problems: Mapping[str, str]) -> str:
    """Every site's problem on one line, each with the site's name once."""
    return "; ".join(problem if site in problem else f"{site}: {problem}" for site, problem in sorted(problems.items()))
