"""Enrollment: sites report their data before training.

A site that cannot take part when the run starts ends it, unless `min_sites` is given; a late site
joins.
"""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from medflare.core.errors import FederationFailed
from medflare.core.message import Message
from medflare.core.numbers import fractions
from medflare.core.packages import CODE, versions
from medflare.core.text import Json, JsonDict
from medflare.data.acquisition import TrainedOn, far_beyond, joined_range, read_range
from medflare.evaluation.results import versions_of_run
from medflare.federation.builtin_messages import (
    CLASS_COUNTS,
    COMBINED,
    COUNTS,
    EVENTS,
    FINISHED,
    RANGE,
    ROLE,
    SITES,
    START,
    VERSIONS,
)
from medflare.federation.exchange import SiteReply, Transport
from medflare.federation.settings import ENROL, step_name
from medflare.methods.aggregation import capped
from medflare.methods.base import ServerContext, Step
from medflare.methods.method import Method
from medflare.methods.parts.measured import N_SAMPLES
from medflare.tasks.config import TaskConfig
from medflare.training.batches import drawn_counts

_COMPARED = ("torch", "monai")  # by a warning alone


@dataclass
class Enrolment:
    """The members of a federation.

    Args:
        context: names the inside and outside sites; receives counts and events.
        identity: metadata that a site must agree with, see `identity_of`.
        returning: site -> image counts, of sites that enrolled before the run was interrupted; they
            continue from their stored state.
        finished: number of steps that were done before.
        max_client_weight: maximum fraction of all training images that a site counts for; None: no
            maximum.
        combined_sites: the fewest inside sites whose updates a step combines; None: all.
    """

    context: ServerContext
    transport: Transport
    identity: Json
    returning: Mapping[str, Mapping[str, int]]
    finished: int
    max_client_weight: float | None = None
    combined_sites: int | None = None
    _problems: dict[str, SiteReply] = field(default_factory=dict)  # of sites that are not enrolled
    _heaviest: str = ""

    @cached_property
    def _versions(self) -> dict[str, str]:
        return versions_here(self.identity, self.context.task)

    @property
    def enrolled(self) -> dict[str, Json]:
        """site -> metadata that it enrolled with."""
        return self.transport.outcome.enrolled

    @property
    def inside(self) -> list[str]:
        """The enrolled sites that train, sorted."""
        return [site for site in self.context.sites if site in self.enrolled]

    def open(self, needed: int, *, all_present: bool = True) -> None:
        """Enroll every site that is present; the others are named and may join later.

        Args:
            needed: inside sites that have to enroll.
            all_present: whether all sites that are present have to enroll.

        Raises:
            FederationFailed: too few sites enrolled, with the reasons of the others.
        """
        self.invite(0)
        failed = {}
        problems = {}
        for site, reply in self._problems.items():
            problems[site] = reply.problem
            if reply.kind == "failed":
                failed[site] = reply.problem
        if failed and all_present:
            remedy = ""
            if len(self.inside) >= needed and not self.returning:  # resume has no such option
                remedy = f" (with --min-sites {needed} the other sites go on)"
            raise FederationFailed(f"{join_problems(failed)}{remedy}")
        if len(self.inside) < needed:
            listed = f" ({join_problems(problems)})" if problems else ""
            raise FederationFailed(
                f"{len(self.inside)} of the sites {', '.join(self.context.sites)} enrolled "
                f"({', '.join(self.inside) or 'none'}), min_sites is {needed}; "
                f"start or correct the other sites, or lower min_sites{listed}"
            )
        self._weigh(0)
        self._note_ranges(self.enrolled, 0)
        everyone = {*self.context.sites, *self.context.outside}
        for site in sorted(everyone - self.enrolled.keys() - problems.keys()):
            self.context.events.add(
                "missing", "not there when the federation started; it may join later", site, 0
            )

    def members(self, step: Step) -> list[str]:
        """The enrolled inside sites that are present for a step, sorted; new sites enroll first."""
        before = set(self.enrolled)
        events = self.context.events
        self.invite(step.round)
        joined = sorted(self.enrolled.keys() - before)
        for site in joined:
            events.add("joined", f"joined in round {step.round + 1}", site, step.round)
        if joined:
            self._weigh(step.round)
            self._note_ranges(joined, step.round)
        present = self.transport.exchange.present(step.round)
        for site in self.inside:
            if site not in present:
                name = step_name(step.phase, step.round, self.context.rounds)
                events.add("missing", f"not there for {name}", site, step.round)
        return [site for site in self.inside if site in present]

    def invite(self, round: int) -> None:
        """Invite the present sites that are not enrolled.

        A site whose reply was rejected is not invited again.
        """
        context = self.context
        present = {*self.transport.exchange.present(round)}
        rejected = {site for site, reply in self._problems.items() if reply.kind == "rejected"}
        invited = present & {*context.sites, *context.outside} - self.enrolled.keys() - rejected
        invitations = {site: self._invitation(site) for site in sorted(invited)}
        for site, reply in self.transport.ask(Step(ENROL, round), invitations).items():
            if reply.message is not None:
                problem = self._problem(site, reply.message)
                if not problem:
                    self._problems.pop(site, None)
                    self._add_member(site, round, reply.message)
                    continue
                reply = SiteReply(None, problem, "rejected")
            if self._problems.get(site) != reply:  # it is invited at every step
                context.events.add(reply.kind, reply.problem, site, round)
            self._problems[site] = reply

    def _role(self, site: str) -> str:
        return "outside" if site in self.context.outside else "inside"

    def _invitation(self, site: str) -> Message:
        invitation = Message({}, dict(self.identity))
        invitation[SITES] = list(self.context.sites)
        invitation[ROLE] = self._role(site)
        if self.combined_sites is not None:
            invitation[COMBINED] = self.combined_sites
        invitation[FINISHED] = self.finished if site in self.returning else 0
        if self.context.start is not None:
            invitation[START] = self.context.start
        return invitation

    def _add_member(self, site: str, round: int, reply: Message) -> None:
        """Add a site that enrolls, with what it reports."""
        meta = dict(reply.meta)
        difference = package_difference(reply.get(VERSIONS) or {}, self._versions)
        if difference:
            self.context.events.add("warning", difference, site, round)
        noticed = meta.pop(EVENTS.name, [])
        if site not in self.returning:  # else the restored events have them
            self.context.events.extend(noticed, site=site)
        meta[ROLE.name] = self._role(site)
        self.enrolled[site] = meta
        self.context.site_counts[site] = meta

    def _problem(self, site: str, reply: Message) -> str | None:
        """Why a site cannot take part with what it reports, None if it can."""
        images = reply[COUNTS]
        trains = any(N_SAMPLES in phase.meta for phase in self.context.phases.values())
        if trains and self._role(site) == "inside" and not images.get("train"):
            return "it does not say how many training images it has, or has none"
        there = reply.get(VERSIONS) or {}
        for package, here in self._versions.items():
            if package in _COMPARED or package.endswith(CODE) or package not in there:
                continue
            if there[package].split(".")[:2] != here.split(".")[:2]:
                return (
                    f"runs {package} {there[package]}, the server {here}; "
                    "install the same version at both"
                )
        before = self.returning.get(site, images)
        if images != before:
            return (
                f"it came back with the image counts {images} instead of {before}; "
                "counts do not change during a run"
            )
        if RANGE in reply:
            trained = read_range(reply[RANGE])
            problem = trained.misfit(self.context.task)
            if problem:
                return problem
            if trained.images > images.get("train", 0):
                return f"{RANGE.name} is of more images than it trains on"
        return self._count_problem(reply[CLASS_COUNTS], images.get("train", 0))

    def _count_problem(self, counts: Sequence[int], images: int) -> str | None:
        """Why counts by class are not those of so many training images, None if they can be."""
        task = self.context.task
        if not counts:
            return None
        classes = len(task.classes)
        if len(counts) != classes:
            return f"class_counts has {len(counts)} numbers for {classes} classes"
        count = max(counts) if task.target == "multilabel" else sum(counts)
        most = images
        if task.kind == "segmentation":
            most *= math.prod(task.size)
        if count > most and not (task.kind == "segmentation" and task.image_mode == "patch"):
            return f"class_counts has {count}, more than its {images} training images can have"
        return None

    def _note_ranges(self, sites: Collection[str], round: int) -> None:
        """Warn of the images of new sites that are far beyond those of all others."""
        for site, note in far_beyond(_ranges(self.enrolled)).items():
            if site in sites:
                text = f"{note}; the training range of the models leaves out what is beyond"
                self.context.events.add("warning", text, site, round)

    def _weigh(self, round: int) -> None:
        """Limit the weight of sites, and warn if one has more than half of all training images
        (three quarters if there are two sites).
        """
        images = {site: self.enrolled[site][COUNTS.name].get("train", 0) for site in self.inside}
        if self.max_client_weight is not None and all(images.values()):
            counted = capped(images, self.max_client_weight)
            self.context.counted_fraction = {
                site: count / images[site] for site, count in counted.items()
            }
        if len(images) < 2 or self.returning:
            return
        fraction_of = fractions(images)
        heaviest = max(fraction_of, key=fraction_of.__getitem__)
        limit = 0.5 if len(images) > 2 else 0.75
        if fraction_of[heaviest] > limit and heaviest != self._heaviest:
            self.context.events.add(
                "warning",
                f"has {fraction_of[heaviest]:.0%} of all training images; "
                "max_client_weight limits its weight and the length of its updates",
                site=heaviest,
                round=round,
            )
            self._heaviest = heaviest


def identity_of(method: Method, hyper: Json, task_fingerprint: str, seed: int) -> JsonDict:
    """The metadata in which server and site must agree: "method", "hyper" (all, with defaults),
    "task" and "seed".
    """
    return {
        "method": method.name,
        "hyper": method.effective(hyper),
        "task": task_fingerprint,
        "seed": seed,
    }


def first_difference(name: str, here: Any, there: Any) -> tuple[str, Any, Any]:
    """The first setting in which two nested mappings differ: (dotted name, here, there).

    Examples:
        >>> first_difference("hyper", {"site": {"mu": 1, "lr": 2}}, {"site": {"mu": 1, "lr": 3}})
        ('hyper.site.lr', 2, 3)
    """
    if isinstance(here, Mapping) and isinstance(there, Mapping):
        for key in sorted({*here, *there}):
            if here.get(key) != there.get(key):
                return first_difference(f"{name}.{key}", here.get(key), there.get(key))
    return name, here, there


def trained_on(enrolled: Mapping[str, Json]) -> JsonDict | None:
    """The range of the training images of all sites that report theirs, as JSON; None if no site
    does.
    """
    total = joined_range(list(_ranges(enrolled).values()))
    return None if total is None else total.to_dict()


def _ranges(enrolled: Mapping[str, Json]) -> dict[str, TrainedOn]:
    """Site -> the range of its training images, of the sites that report theirs, sorted."""
    ranges = {}
    for site, meta in sorted(enrolled.items()):
        if RANGE.name in meta:
            ranges[site] = read_range(meta[RANGE.name])
    return ranges


def reported_class_shares(enrolled: Mapping[str, Json], task: TaskConfig) -> list[float] | None:
    """Class shares of the training images of all inside sites, as sampling and class weights make
    the model learn them; rounded, so that no number of images follows from them. None if a site
    does not send its counts.
    """
    counts = [meta[CLASS_COUNTS.name] for meta in enrolled.values() if meta[ROLE.name] == "inside"]
    if not all(counts):
        return None
    learnt = [_learnt_counts(task, of_site).tolist() for of_site in counts]
    totals = [sum(of_class) for of_class in zip(*learnt, strict=True)]
    if not sum(totals):
        return None
    return [round(total / sum(totals), 3) for total in totals]


def _learnt_counts(task: TaskConfig, counts: Sequence[int]) -> Tensor:
    """A site's images divided by how much each class counts in its training, float64 (C,): by
    sampling and, as the cross entropy alone has such, by weights of the loss.
    """
    drawn = drawn_counts(task, counts)
    weights = task.loss.get("weights") if task.loss["name"] == "ce" else None
    if not weights:
        return drawn
    of_classes = [1.0, *weights] if task.target == "binary" else weights
    weighted = drawn * torch.tensor(of_classes, dtype=torch.float64)
    return drawn.sum() * weighted / weighted.sum().clamp(min=1e-12)


def versions_here(identity: Json, task: TaskConfig) -> dict[str, str]:
    """Package -> version, and digest of its code, of the packages that weights depend on, see
    `versions_of_run`.

    The version of medflare is that of its code, which may come with the job.

    Args:
        identity: method and hyper-parameters, see `identity_of`.
    """
    of_run = versions_of_run(identity["method"], task, identity["hyper"])
    return versions(_COMPARED) | of_run


def package_difference(site: Mapping[str, str], server: Mapping[str, str]) -> str:
    """Which packages of a site have another version or other code than the server's.

    Builds of one version (+cpu, +cu124) count as equal.
    """
    differences = {}
    for name, version in server.items():
        there = site.get(name, version)
        package = name.removesuffix(CODE)
        if there.partition("+")[0] == version.partition("+")[0]:
            continue
        if package == name:
            differences[package] = f"{name} {there} (the server {version})"
        else:  # unless the version differs, too
            differences.setdefault(package, f"other code of {package} than the server")
    if not differences:
        return ""
    return f"runs {', '.join(differences.values())}: results may differ"


def join_problems(problems: Mapping[str, str]) -> str:
    """All sites' problems on one line, each site and each problem once.

    Examples:
        >>> join_problems({"a": "holds NaN", "b": "site b: no images", "c": "holds NaN"})
        'a, c: holds NaN; site b: no images'
    """
    sites: dict[str, list[str]] = {}
    for site, problem in sorted(problems.items()):
        sites.setdefault(problem, []).append(site)
    lines = []
    for problem, having in sites.items():
        named = re.match(rf"(site )?{re.escape(having[0])}(?![\w.-])", problem)
        lines.append(problem if named else f"{', '.join(having)}: {problem}")
    return "; ".join(lines)
