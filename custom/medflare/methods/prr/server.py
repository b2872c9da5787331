"""PRR's server algorithm: a model for every site by Fourier aggregation, and global prototypes."""

import torch
from torch import Tensor

from medflare.core.message import FinalModels
from medflare.core.states import States
from medflare.methods import (
    MODEL,
    Aggregation,
    Message,
    PersistentState,
    Replies,
    ServerAlgorithm,
    ServerContext,
    StateDict,
    Step,
    TaskConfig,
    asks,
    handles,
    site_models,
    states_of,
    torch_generator,
    trained_model,
)
from medflare.methods.aggregation import Models, plain_mean
from medflare.methods.parts.class_groups import class_totals, drawn_totals, groups_and_classes
from medflare.methods.prr.formulas import global_prototypes, most_representative
from medflare.methods.prr.fourier import (
    Treatment,
    aggregate_models,
    frequency_ratio,
    treatments,
    treatments_by_shape,
)
from medflare.methods.prr.hyper import PRRServerHyper
from medflare.methods.prr.site import (
    CLASS_TOTALS,
    DEPUTY,
    GLOBAL_PROTOTYPES,
    NORMALISATION,
    PERSONAL,
    PROTOTYPES,
    PRRSite,
    local_part,
)
from medflare.networks.catalogue import meta_network
from medflare.tasks.classes import class_names

# Of the published schedule; used under FLARE's own workflows, which do not give their rounds.
_ROUNDS = 50


class FourierAggregation(Aggregation[PRRServerHyper]):
    """Progressive Fourier Aggregation (Eq. 1-4): a model for every site.

    Other sites get the plain mean. Without a task (FLARE's own workflows) the kind of a layer
    follows from its shape.
    """

    treatments: dict[str, Treatment] | None = None

    def prepare(self, task: TaskConfig, rounds: int) -> None:
        super().prepare(task, rounds)
        self.treatments = treatments(meta_network(task))

    def shared(self, models: Models, round: int, previous: StateDict | None = None) -> StateDict:
        return plain_mean(states_of(models))

    def personal(self, models: Models, round: int) -> dict[str, StateDict]:
        """Site -> its model S_k (Alg. 1, line 7)."""
        states = states_of(models)
        hyper = self.hyper
        rounds = self.rounds or _ROUNDS
        r = frequency_ratio(min(round, rounds), rounds, hyper.r0, hyper.r1)
        plan = self.treatments or treatments_by_shape(states)
        return aggregate_models(states, plan, r, fourier=hyper.pfa, components=hyper.components)


class PRRServer(ServerAlgorithm[PRRServerHyper]):
    """Keeps every site's model between the rounds.

    A site that misses a round keeps its last model; one that joins later starts from the mean of
    the others' deputies.

    Attributes:
        mean: the mean deputy, without batch normalisation.
        outside: the model for outside sites; complete only if `memory.meta["complete"]`, else its
            normalisation is the initial one.
        prototypes: the global ones, None before the first round.
    """

    site_algorithm = PRRSite
    aggregation_class = FourierAggregation
    mean = PersistentState("mean")
    outside = PersistentState("outside")
    prototypes = PersistentState("prototypes")

    def __init__(self, context: ServerContext):
        super().__init__(context)
        part = local_part(context.plan)
        self.outside = context.initial_state()
        self.mean = part.shared(self.outside)
        self.normalised = bool(part.names)
        self.memory.meta["complete"] = not part.names
        if not part.names:
            name = context.task.network["name"]
            context.warn(f"network {name} has no batch normalisation: PRR keeps none local")

    @property
    def aggregated(self) -> States:
        """Site -> S_k, of the sites that have trained."""
        return self.memory.family(MODEL)

    def steps(self) -> list[Step]:
        """Training, then validation of the last models and, if outside sites need one, the exchange
        that makes their model.
        """
        steps = super().steps()
        if not self.context.outside:
            return steps
        if self.hyper.outside_model == "personal":
            steps.append(self.final_step(PRRSite.share_personal))
        elif self.normalised:
            steps.append(self.final_step(PRRSite.share_normalisation))
        return steps

    @property
    def class_totals(self) -> Tensor:
        """(G, C) training images or pixels of each class, as sampling draws them, over the enrolled
        inside sites, limited by `ServerContext.counted_fraction`.
        """
        context = self.context
        totals = torch.zeros(groups_and_classes(context.task), dtype=torch.float64)
        for site in context.sites:
            if site in context.site_counts:
                of_site = drawn_totals(context.task, context.site_counts[site])
                totals += of_site * context.counted_fraction.get(site, 1.0)
        return totals.round().long()

    @asks(PRRSite.train, PRRSite.validate, PRRSite.share_normalisation, PRRSite.share_personal)
    def request(self, step: Step, site: str) -> Message:
        """The site's S_k, the class counts of all sites, and the global prototypes if any."""
        message = Message.of({DEPUTY: self.aggregated.get(site, self.mean)})
        message[CLASS_TOTALS] = self.class_totals.tolist()
        if self.prototypes is not None:
            message[GLOBAL_PROTOTYPES] = self.prototypes
        return message

    @handles(PRRSite.train)
    def aggregate_deputies(self, step: Step, replies: Replies) -> None:
        """Make every site's next model and the next prototypes."""
        if step.round == 0:
            self._warn_of_absent_classes(self.class_totals)
        deputies = site_models(replies, DEPUTY)
        for site, state in self.aggregation.personal(deputies, step.round).items():
            self.memory[MODEL.member(site)] = state
        self.mean = self.aggregation.shared(deputies, step.round)
        self.outside = {**self.outside, **self.mean}
        if self.context.plan.site_hyper.refines:
            self.prototypes = {"prototypes": self._sampled(step.round, replies)}

    def _sampled(self, round: int, replies: Replies) -> Tensor:
        """The global prototypes, sampled around those of the sites."""
        local = torch.stack([reply[PROTOTYPES]["prototypes"] for reply in replies.values()])
        present = torch.stack([reply[PROTOTYPES]["present"] for reply in replies.values()])
        generator = torch_generator(self.context.seed, "server", round, "prototypes")
        noise = torch.randn(local.shape[1:], generator=generator)
        return global_prototypes(local, present, noise)

    def _warn_of_absent_classes(self, totals: Tensor) -> None:
        counts = self.context.site_counts
        sites = self.context.sites
        suppressed = [site for site in sites if counts.get(site, {}).get("class_counts") == []]
        for site in suppressed:
            text = (
                "keeps its counts by class (minimum_patients): "
                "the class totals of the CPA loss are those of the other sites"
            )
            self.context.warn(text, site=site)
        if suppressed and not totals.any():
            return
        names = [name for group in class_names(self.context.task) for name in group]
        for name, count in zip(names, totals.flatten().tolist(), strict=True):
            if count == 0:
                reason = (
                    "is in no site's training images, or sampling does not draw it: "
                    "the CPA loss does not weight it"
                )
                self.context.warn(f"class {name} {reason}")

    @handles(PRRSite.share_normalisation)
    def complete_mean(self, step: Step, replies: Replies) -> None:
        """Complete the outside sites' model: the mean deputy with the mean normalisation."""
        parts = {site: reply[NORMALISATION] for site, reply in replies.items()}
        self.outside = {**self.mean, **plain_mean(parts)}
        self.memory.meta["complete"] = True

    @handles(PRRSite.share_personal)
    def take_personal(self, step: Step, replies: Replies) -> None:
        """Take the personal model of the most representative site for the outside sites."""
        self.outside = replies[self._most_representative(replies)][PERSONAL]
        self.memory.meta["complete"] = True

    def _most_representative(self, replies: Replies) -> str:
        """The site whose classes are most like those of all; the largest one without counts by
        class.
        """
        counts = self.context.site_counts
        totals = {
            site: class_totals(self.context.task, counts[site])
            for site in replies
            if counts[site]["class_counts"]
        }
        if totals:
            chosen = most_representative(totals)
        else:
            chosen = max(sorted(replies), key=lambda site: counts[site]["n"]["train"])
        if len(totals) < len(replies):
            self.context.warn(
                "some sites keep their counts by class: outside sites get the model of "
                f"{chosen}, chosen among the others or by size"
            )
        return chosen

    def configure_final(self, site: str) -> Message:
        """The site's last S_k, or the outside model."""
        if site in self.context.outside:
            return Message.of({MODEL: self.outside})
        return Message.of({DEPUTY: self.aggregated.get(site, self.outside)})

    def models(self) -> FinalModels:
        """The model for outside sites, if it is complete."""
        if not self.memory.meta["complete"]:
            return {}
        rounds = None  # a personal model is of its site's own best round
        if self.hyper.outside_model == "mean":
            rounds = self.context.rounds
        return {"global": trained_model(self.outside, rounds)}
