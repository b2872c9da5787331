"""Who takes part: sites say what they have before anything is trained; a site that cannot take part ends the run, a late one joins."""

from collections.abc import Mapping
from typing import Any, Final

import medflare
from medflare.core.errors import FederationFailed
from medflare.core.message import Message
from medflare.core.packages import installed_versions
from medflare.data.acquisition import joined_range, read_range
from medflare.evaluation.results import shares
from medflare.federation.exchange import START, Transport
from medflare.federation.settings import ENROL
from medflare.federation.update_validation.messages import RANGE, VERSIONS
from medflare.federation.update_validation.updates import capped
from medflare.methods.base import ServerContext, Step

_COMPARED: Final = ("medflare", "torch", "monai")


class Enrolment:
    """The members of a federation.

    Args:
        context: names the inside and outside sites, takes their counts and what is noticed.
        transport: reaches them.
        identity: meta that a site must agree with; it refuses, by name, where its task or method differs.
        returning: sites that have enrolled in the run that is taken up, before one of its interruptions, with their counts; they go on from
            what they remember, and with the images that they had.
        finished: steps that were done before.
        max_client_weight: the most of all training images that one site may count for; None: no limit.
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
        self._turned_away: dict[str, str] = {}  # site -> why
        self._silent: dict[str, str] = {}  # site -> why there was no answer when it was asked last
        self._problems: dict[str, str] = {}  # site -> what it said when it was asked last
        self._heaviest = ""

    @property
    def enrolled(self) -> dict[str, dict[str, Any]]:
        """site -> what it enrolled with."""
        return self.transport.outcome.enrolled

    @property
    def inside(self) -> list[str]:
        """The enrolled sites that train, sorted."""
        return [site for site in self.context.sites if site in self.enrolled]

    def open(self, needed: int) -> None:
        """Every site that is present says what it has; who has not answered in time, or is silent, is named and may join later.

        Raises:
            FederationFailed: a site cannot take part, or fewer than `needed` inside sites are there.
        """
        if problems := self.admit(0):
            raise FederationFailed(listed(problems))
        reasons = {**self._silent, **self._turned_away}
        if len(self.inside) < needed:
            missing = {*self.context.sites} - self.enrolled.keys()
            away = missing & self._turned_away.keys()
            remedies = ["start the missing sites"] * (missing > away) + ["put right what was turned away"] * bool(away)
            raise FederationFailed(
                f"{len(self.inside)} of the sites {', '.join(self.context.sites)} enrolled ({', '.join(self.inside) or 'none'}), "
                f"min_sites is {needed}; {', '.join(remedies)} or lower min_sites{f' ({listed(reasons)})' if reasons else ''}"
            )
        self._weigh(0)
        for site in sorted({*self.context.sites, *self.context.outside} - self.enrolled.keys() - reasons.keys()):
            self.context.events.add("missing", "not there when the federation started; it may join later", site=site, round=0)

    def members(self, step: Step) -> list[str]:
        """The enrolled inside sites that are there for a step, sorted; sites that came in since the last step enrol first."""
        before, events = set(self.enrolled), self.context.events
        self.admit(step.round)
        for site in sorted(self.enrolled.keys() - before):
            events.add("joined", f"joined in round {step.round}", site=site, round=step.round)
        if before < set(self.enrolled):
            self._weigh(step.round)
        present = self.transport.present(step.round)
        for site in self.inside:
            if site not in present:
                events.add("missing", f"not there for '{step.phase}' of round {step.round}", site=site, round=step.round)
        return [site for site in self.inside if site in present]

    def admit(self, round: int) -> dict[str, str]:
        """Ask newcomers what they have; returns site -> problem for those that say that they cannot take part.

        A site whose answer nobody can work with is not asked again, and one that does not answer may do so later; the run goes on without
        either where enough others are there.
        """
        context, problems = self.context, dict[str, str]()
        wanted = {*context.sites, *context.outside} - self._turned_away.keys() - self.enrolled.keys()
        new = [site for site in sorted(self.transport.present(round)) if site in wanted]
        roles = {site: "outside" if site in context.outside else "inside" for site in new}
        invitation = {**self.identity, "sites": list(context.sites)}
        finished = {site: self.finished if site in self.returning else 0 for site in new}
        start = {} if context.start is None else {START: context.start}
        outgoing = {site: Message(dict(start), {**invitation, "role": roles[site], "finished": finished[site]}) for site in new}
        for site, reply in self.transport.ask(Step(ENROL, round), outgoing).items():
            if reply.message is None:
                if reply.problem != self._problems.get(site):  # it is asked at every step
                    context.events.add(reply.kind, reply.problem, site=site, round=round)
                self._problems[site] = reply.problem
                if reply.kind == "rejected":  # what it says makes no sense: the others need not wait for it
                    self._turned_away[site] = reply.problem
                else:
                    (problems if reply.kind == "failed" else self._silent)[site] = reply.problem
                continue
            meta = dict(reply.message.meta)
            if problem := self._refusal(site, meta):
                context.events.add("rejected", problem, site=site, round=round)
                self._turned_away[site] = problem
                continue
            if other := other_packages(meta.get(VERSIONS, {}), versions_here()):
                context.events.add("warning", other, site=site, round=round)
            context.events.extend(meta.pop("events", []), site=site)
            self.enrolled[site] = context.site_counts[site] = {**meta, "role": roles[site]}
        return problems

    def _refusal(self, site: str, meta: Mapping[str, Any]) -> str:
        """Why a site cannot take part with what it says, "" where it can."""
        if problem := other_release(meta.get(VERSIONS, {}), versions_here()):
            return problem
        images, known = meta["n"], self.returning.get(site, meta["n"])
        if images != known:
            return f"it came back with {_counts(images)} instead of {_counts(known)}; counts do not change during a run"
        if RANGE in meta and (problem := read_range(meta[RANGE]).misfit(self.context.task)):
            return problem
        counted, classes = len(meta["class_counts"]), len(self.context.task.classes)
        return "" if counted in (0, classes) else f"class_counts has {counted} numbers for {classes} classes"

    def _weigh(self, round: int) -> None:
        """An event where one of several inside sites has more than half of all training images, one of two more than three quarters."""
        images = {site: self.enrolled[site]["n"]["train"] for site in self.inside}
        if self.max_client_weight is not None and all(images.values()):
            self.context.counted = {site: most / images[site] for site, most in capped(images, self.max_client_weight).items()}
        found = shares(images)
        heaviest = max(found, key=lambda site: found[site], default="")
        most = 0.5 if len(found) > 2 else 0.75  # of two sites one has more than half anyway
        if len(found) > 1 and found[heaviest] > most and heaviest != self._heaviest and not self.returning:
            text = f"has {found[heaviest]:.0%} of all training images, so that the others hardly count; max_client_weight limits its weight"
            self.context.events.add("warning", text, site=heaviest, round=round)
            self._heaviest = heaviest


def trained_on(enrolled: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
    """The range of the training images of all sites that tell theirs, as JSON values; None where none does."""
    found = joined_range(read_range(meta[RANGE]) for _, meta in sorted(enrolled.items()) if RANGE in meta)
    return None if found is None else found.to_dict()


def _counts(images: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {split}" for split, count in images.items()) + " images"


def versions_here() -> dict[str, str]:
    """Package -> version, of what weights depend on; of medflare that of the code, which may have come with the job."""
    known = {**installed_versions(), "medflare": medflare.__version__}
    return {package: known[package] for package in _COMPARED if package in known}


def other_release(theirs: Mapping[str, str], here: Mapping[str, str]) -> str:
    """Why a site with another release of medflare cannot take part, "" where it can, or does not tell.

    Examples:
        >>> other_release({"medflare": "0.3.0"}, {"medflare": "0.2.0"})
        'runs medflare 0.3.0, the server 0.2.0; install the same version at both'
        >>> other_release({"medflare": "0.2.1"}, {"medflare": "0.2.0"})
        ''
    """
    own, other = here["medflare"], theirs.get("medflare", here["medflare"])
    if other.split(".")[:2] == own.split(".")[:2]:
        return ""
    return f"runs medflare {other}, the server {own}; install the same version at both"


def other_packages(theirs: Mapping[str, str], here: Mapping[str, str]) -> str:
    """What of a site is of another version than at the server, "" where nothing is; builds of one version are not told apart.

    Examples:
        >>> other_packages({"torch": "2.4.1+cpu"}, {"torch": "2.5.0+cu124"})
        'runs torch 2.4.1+cpu (the server 2.5.0+cu124): numbers may differ in the last digits'
        >>> other_packages({"torch": "2.5.0+cpu"}, {"torch": "2.5.0+cu124"})
        ''
    """
    other = {name: own for name, own in here.items() if name in theirs and theirs[name].partition("+")[0] != own.partition("+")[0]}
    named = ", ".join(f"{name} {theirs[name]} (the server {own})" for name, own in other.items())
    return f"runs {named}: numbers may differ in the last digits" if named else ""


def listed(problems: Mapping[str, str]) -> str:
    """Every site's problem on one line, each with the site's name once.

    Examples:
        >>> listed({"B": "no data", "A": "A is late"})
        'A is late; B: no data'
    """
    return "; ".join(problem if site in problem else f"{site}: {problem}" for site, problem in sorted(problems.items()))
