"""PRR's server algorithm: gives every site a model of its own by Fourier aggregation, and samples the global prototypes."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from medflare.core.message import Message
from medflare.core.rng import torch_generator
from medflare.core.states import StateDict, weighted_mean
from medflare.methods.aggregation import Aggregation, SiteModel, site_models, states_of
from medflare.methods.base import PersistentState, ServerAlgorithm, ServerContext, Step
from medflare.methods.fedavg.site import trained_model
from medflare.methods.prr.formulas import global_prototypes, most_representative
from medflare.methods.prr.fourier import Treatment, aggregate_models, frequency_ratio, treatments, treatments_by_shape
from medflare.methods.prr.hyper import PRRServerHyper, PRRSiteHyper
from medflare.methods.prr.site import CLASS_TOTALS, DEPUTY, NORMALISATION, PERSONAL, PROTOTYPES, local_part
from medflare.methods.prr.transfer import class_totals
from medflare.networks.catalogue import meta_network
from medflare.tasks.classes import class_names
from medflare.tasks.config import TaskConfig

_ROUNDS = 50  # of the published schedule; used under FLARE's own workflows, which do not give the number of rounds


class FourierAggregation(Aggregation[PRRServerHyper]):
    """Progressive Fourier Aggregation (Eq. 1-4): a model for every site, and the plain mean for other sites.

    Without a task (FLARE's own workflows) the kind of a layer follows from its shape.
    """

    def __init__(self, hyper: PRRServerHyper):
        super().__init__(hyper)
        self.treatments: dict[str, Treatment] | None = None

    def prepare(self, task: TaskConfig, rounds: int) -> None:
        super().prepare(task, rounds)
        self.treatments = treatments(meta_network(task))

    def shared(self, models: Mapping[str, SiteModel], round: int, previous: StateDict | None = None) -> StateDict:
        return weighted_mean(states_of(models), dict.fromkeys(models, 1.0))

    def own(self, models: Mapping[str, SiteModel], round: int) -> dict[str, StateDict]:
        """Site -> its model S_k (Alg. 1, line 7)."""
        states, hyper = states_of(models), self.hyper
        rounds = self.rounds or _ROUNDS
        low_band = frequency_ratio(min(round, rounds), rounds, hyper.r0, hyper.r1)
        plan = self.treatments or treatments_by_shape(states)
        return aggregate_models(states, plan, low_band, fourier=hyper.pfa, components=hyper.components)


class PRRServer(ServerAlgorithm[PRRServerHyper]):
    """A site that misses a round keeps its last model; one that joins later starts from the mean of the others' deputies.

    Attributes:
        mean: the mean deputy, without batch normalisation.
        outside: the model for outside sites; complete only if `memory.meta["complete"]`, else its normalisation is the initial one.
        prototypes: the global ones, None before the first round.
    """

    Hyper: ClassVar[type] = PRRServerHyper
    site_hyper: ClassVar[type] = PRRSiteHyper
    aggregation_class: ClassVar[type[Aggregation[Any]]] = FourierAggregation
    mean, outside, prototypes = PersistentState("mean"), PersistentState("outside"), PersistentState("prototypes")

    def __init__(self, context: ServerContext):
        super().__init__(context)
        part = local_part(context.plan)
        self.refines = context.plan.site_hyper.refines
        self.outside = context.initial_state()
        self.mean = part.shared(self.outside)
        self.normalised = bool(part.names)
        self.memory.meta["complete"] = not part.names
        if not part.names:
            context.events.add("warning", f"network {context.task.network['name']} has no batch normalisation: PRR keeps none local")

    @property
    def aggregated(self) -> dict[str, StateDict]:
        """Site -> S_k, of the sites that have trained."""
        return {site: self.memory.states[f"model/{site}"] for site in self.context.sites if f"model/{site}" in self.memory.states}

    def steps(self) -> list[Step]:
        """Training, validation of the last models, and the exchange that makes the outside sites' model if they need one."""
        personal = self.hyper.outside_model == "personal"
        if not self.context.outside or not (personal or self.normalised):
            return super().steps()
        return [*super().steps(), Step("share_personal" if personal else "share_normalisation", self.context.rounds, everyone=True)]

    @property
    def class_totals(self) -> Tensor:
        """(G, C) training images or pixels of each class over the enrolled inside sites, limited as `ServerContext.counted` says."""
        context = self.context
        enrolled = {site: context.site_counts[site] for site in context.sites if site in context.site_counts}
        if not context.counted:
            return class_totals(context.task, enrolled)
        totals = [class_totals(context.task, {site: counts}).double() * context.counted.get(site, 1.0) for site, counts in enrolled.items()]
        return torch.stack(totals).sum(dim=0).round().long()

    def configure(self, step: Step, site: str) -> Message:
        """The site's S_k, the class counts of all sites and the global prototypes, if there are any."""
        message = Message({DEPUTY: self.aggregated.get(site, self.mean)}, {CLASS_TOTALS: self.class_totals.tolist()})
        if self.prototypes is not None:
            message.states[PROTOTYPES] = self.prototypes
        return message

    def aggregate(self, step: Step, replies: Mapping[str, Message]) -> None:
        """Every site's next model and the next prototypes; at the end the model for outside sites."""
        if step.phase.startswith("share"):
            self.outside, self.memory.meta["complete"] = self._outside(replies), True
        if step.phase != "train":
            return
        round = step.round
        if round == 0:
            self._warn_of_absent_classes(self.class_totals)
        deputies = site_models(replies, DEPUTY)
        self.memory.states |= {f"model/{site}": state for site, state in self.aggregation.own(deputies, round).items()}
        self.mean = self.aggregation.shared(deputies, round)
        self.outside = {**self.outside, **self.mean}
        if self.refines:
            local = torch.stack([reply.states[PROTOTYPES]["prototypes"] for reply in replies.values()])
            present = torch.stack([reply.states[PROTOTYPES]["present"] for reply in replies.values()])
            noise = torch.randn(local.shape[1:], generator=torch_generator(self.context.seed, "server", round, "prototypes"))
            self.prototypes = {"prototypes": global_prototypes(local, present, noise)}

    def _warn_of_absent_classes(self, totals: Tensor) -> None:
        suppressed = [site for site in self.context.sites if self.context.site_counts.get(site, {}).get("class_counts") == []]
        for site in suppressed:
            text = "keeps its counts by class (minimum_patients): the class totals of the CPA loss are those of the other sites"
            self.context.events.add("warning", text, site=site)
        if suppressed and not totals.any():
            return
        names = [name for group in class_names(self.context.task) for name in group]
        for name in (name for name, count in zip(names, totals.flatten().tolist(), strict=True) if count == 0):
            self.context.events.add("warning", f"class {name} is in no site's training images: the CPA loss does not weight it")

    def _outside(self, replies: Mapping[str, Message]) -> StateDict:
        """The model for outside sites: the mean deputy, or the personal model of the most representative site."""
        if self.hyper.outside_model == "mean":
            parts = {site: reply.states[NORMALISATION] for site, reply in replies.items()}
            return {**self.mean, **weighted_mean(parts, dict.fromkeys(parts, 1.0))}
        counts = self.context.site_counts
        totals = {site: class_totals(self.context.task, {site: counts[site]}) for site in replies if counts[site]["class_counts"]}
        chosen = most_representative(totals) if totals else max(sorted(replies), key=lambda site: counts[site]["n"]["train"])
        if len(totals) < len(replies):
            text = f"some sites keep their counts by class: outside sites get the model of {chosen}, chosen among the others or by size"
            self.context.events.add("warning", text)
        return replies[chosen].states[PERSONAL]

    def configure_final(self, site: str) -> Message:
        """The site's last S_k, or the outside model."""
        return Message({DEPUTY: self.outside if site in self.context.outside else self.aggregated.get(site, self.outside)})

    def models(self) -> dict[str, Message]:
        """The model for outside sites, if it is complete."""
        rounds = self.context.rounds if self.hyper.outside_model == "mean" else None  # a personal model is of its site's best round
        return {"global": trained_model(self.outside, rounds)} if self.memory.meta["complete"] else {}
