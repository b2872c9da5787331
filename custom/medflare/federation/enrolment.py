"""Enrollment: sites report their data before training; a site that cannot take part ends the run, a late one joins."""

from collections.abc import Mapping
from typing import Any, Final

import medflare
from medflare.core.errors import FederationFailed
from medflare.core.message import Message
from medflare.core.packages import installed_versions
from medflare.data.acquisition import joined_range, read_range
from medflare.evaluation.results import shares
from medflare.federation.exchange import Transport
from medflare.federation.settings import ENROL
from medflare.federation.update_validation.messages import FINISHED, RANGE, ROLE, SITES, START, VERSIONS
from medflare.federation.update_validation.updates import capped
from medflare.methods.base import N_SAMPLES, ServerContext, Step

_COMPARED: Final = ("medflare", "torch", "monai")


class Enrolment:
    """The members of a federation.

    Args:
        context: names the inside and outside sites; receives counts and events.
        identity: metadata that a site must agree with, see `participant.identity_of`.
        returning: site -> image counts, of sites that enrolled before the run was interrupted; they continue from their stored state.
        finished: number of steps that were done before.
        max_client_weight: maximum fraction of all training images that a site counts for; None: no maximum.
    """

    def __init__(
        self,
        context: ServerContext,
        transport: Transport,
        identity: Mapping[str, Any],
        returning: Mapping[str, Mapping[str, int]] | None = None,
        finished: int = 0,
        max_client_weight: float | None = None,
    ):
        self.context, self.transport, self.identity = context, transport, identity
        self.returning, self.finished, self.max_client_weight = returning or {}, finished, max_client_weight
        self._problems: dict[str, tuple[str, str]] = {}  # site -> (kind of event, why it is not enrolled)
        self._heaviest = ""

    @property
    def enrolled(self) -> dict[str, dict[str, Any]]:
        """site -> metadata that it enrolled with."""
        return self.transport.outcome.enrolled

    @property
    def inside(self) -> list[str]:
        """The enrolled sites that train, sorted."""
        return [site for site in self.context.sites if site in self.enrolled]

    def open(self, needed: int) -> None:
        """Enroll every site that is present; the others are named and may join later.

        Raises:
            FederationFailed: a site reports that it cannot take part, or fewer than `needed` inside sites enrolled.
        """
        self.admit(0)
        if failed := {site: problem for site, (kind, problem) in self._problems.items() if kind == "failed"}:
            raise FederationFailed(join_problems(failed))
        if len(self.inside) < needed:
            problems = join_problems({site: problem for site, (_, problem) in self._problems.items()})
            raise FederationFailed(
                f"{len(self.inside)} of the sites {', '.join(self.context.sites)} enrolled ({', '.join(self.inside) or 'none'}), "
                f"min_sites is {needed}; start or correct the other sites, or lower min_sites{f' ({problems})' if problems else ''}"
            )
        self._weigh(0)
        for site in sorted({*self.context.sites, *self.context.outside} - self.enrolled.keys() - self._problems.keys()):
            self.context.events.add("missing", "not there when the federation started; it may join later", site=site, round=0)

    def members(self, step: Step) -> list[str]:
        """The enrolled inside sites that are present for a step, sorted; new sites enroll first."""
        before, events = set(self.enrolled), self.context.events
        self.admit(step.round)
        for site in sorted(self.enrolled.keys() - before):
            events.add("joined", f"joined in round {step.round}", site=site, round=step.round)
        if before < set(self.enrolled):
            self._weigh(step.round)
        present = self.transport.exchange.present(step.round)
        for site in self.inside:
            if site not in present:
                events.add("missing", f"not there for '{step.phase}' of round {step.round}", site=site, round=step.round)
        return [site for site in self.inside if site in present]

    def admit(self, round: int) -> None:
        """Invite the present sites that are not enrolled; a site whose reply was rejected is not invited again."""
        context = self.context
        uninvited = {*context.sites, *context.outside} - self.enrolled.keys()
        uninvited -= {site for site, (kind, _) in self._problems.items() if kind == "rejected"}
        start = {} if context.start is None else {START: context.start}
        roles, outgoing = {}, {}
        for site in sorted(uninvited & set(self.transport.exchange.present(round))):
            roles[site] = "outside" if site in context.outside else "inside"
            finished = self.finished if site in self.returning else 0
            meta = {**self.identity, SITES: list(context.sites), ROLE: roles[site], FINISHED: finished}
            outgoing[site] = Message(dict(start), meta)
        for site, reply in self.transport.ask(Step(ENROL, round), outgoing).items():
            kind, problem = reply.kind, reply.problem
            if reply.message is not None:
                kind, problem = "rejected", self._problem(site, roles[site], reply.message.meta)
            if problem:
                if self._problems.get(site) != (kind, problem):  # the site is invited at every step
                    context.events.add(kind, problem, site=site, round=round)
                self._problems[site] = kind, problem
            elif reply.message is not None:
                self._problems.pop(site, None)
                meta = dict(reply.message.meta)
                if difference := package_difference(meta.get(VERSIONS, {})):
                    context.events.add("warning", difference, site=site, round=round)
                context.events.extend(meta.pop("events", []), site=site)
                self.enrolled[site] = context.site_counts[site] = {**meta, ROLE: roles[site]}

    def _problem(self, site: str, role: str, meta: Mapping[str, Any]) -> str:
        """Why a site cannot take part with what it reports, "" if it can."""
        trains = any(N_SAMPLES in phase.reply_meta for phase in self.context.phases)
        if trains and role == "inside" and "train" not in meta["n"]:
            return "it does not say how many training images it has"
        there = meta.get(VERSIONS, {}).get("medflare", medflare.__version__)
        if there.split(".")[:2] != medflare.__version__.split(".")[:2]:
            return f"runs medflare {there}, the server {medflare.__version__}; install the same version at both"
        images, before = meta["n"], self.returning.get(site, meta["n"])
        if images != before:
            return f"it came back with the image counts {images} instead of {before}; counts do not change during a run"
        if RANGE in meta and (problem := read_range(meta[RANGE]).misfit(self.context.task)):
            return problem
        counts, classes = len(meta["class_counts"]), len(self.context.task.classes)
        return "" if counts in (0, classes) else f"class_counts has {counts} numbers for {classes} classes"

    def _weigh(self, round: int) -> None:
        """Limit the weight of sites, and warn if one has more than half of all training images (of two: more than three quarters)."""
        images = {site: self.enrolled[site]["n"].get("train", 0) for site in self.inside}
        if self.max_client_weight is not None and all(images.values()):
            self.context.counted = {site: count / images[site] for site, count in capped(images, self.max_client_weight).items()}
        fractions = shares(images)
        heaviest = max(fractions, key=lambda site: fractions[site], default="")
        limit = 0.5 if len(fractions) > 2 else 0.75
        if len(fractions) > 1 and fractions[heaviest] > limit and heaviest != self._heaviest and not self.returning:
            text = f"has {fractions[heaviest]:.0%} of all training images; max_client_weight limits its weight"
            self.context.events.add("warning", text, site=heaviest, round=round)
            self._heaviest = heaviest


def trained_on(enrolled: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
    """The range of the training images of all sites that report theirs, as JSON; None if no site does."""
    total = joined_range(read_range(meta[RANGE]) for _, meta in sorted(enrolled.items()) if RANGE in meta)
    return None if total is None else total.to_dict()


def versions_here() -> dict[str, str]:
    """Package -> version, of packages that weights depend on; medflare's version is that of the code, which may come with the job."""
    versions = {**installed_versions(), "medflare": medflare.__version__}
    return {package: versions[package] for package in _COMPARED if package in versions}


def package_difference(site: Mapping[str, str]) -> str:
    """Which packages of a site have another version than the server's; builds of one version (+cpu, +cu124) are the same."""
    server = versions_here()
    other = [name for name in server if name in site and site[name].partition("+")[0] != server[name].partition("+")[0]]
    names = ", ".join(f"{name} {site[name]} (the server {server[name]})" for name in other)
    return f"runs {names}: numbers may differ in the last digits" if names else ""


def join_problems(problems: Mapping[str, str]) -> str:
    """All sites' problems on one line, each with the site's name once."""
    return "; ".join(problem if site in problem else f"{site}: {problem}" for site, problem in sorted(problems.items()))
