"""FedDAG's site algorithm: generator, student and teacher on every batch; sends back the teacher (or the student), the generator and θ^."""

import math
from functools import cached_property
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from medflare.core.errors import ConfigError
from medflare.core.manifest import MetaSpec, Phase, TensorSpec, merged_phases, number, table
from medflare.core.message import Message
from medflare.core.packages import installed
from medflare.core.states import StateDict, copy_state
from medflare.data.geometry import format_shape
from medflare.data.loading import Batch
from medflare.methods.base import MEASURED, PersistentState, Plan
from medflare.methods.fedavg.site import GLOBAL, MODEL, PRIVACY, SELECTED_ROUND, VALIDATE, FedAvgSite
from medflare.methods.feddag.formulas import round_decay
from medflare.methods.feddag.generation import AdversarialGeneration, build_generator, channel_deviations, initial_generator
from medflare.methods.feddag.generator import DomainGenerator, generated, picture_grid
from medflare.methods.feddag.hyper import FedDAGSiteHyper
from medflare.methods.feddag.scoring import ScoredSite
from medflare.tasks.config import TaskConfig
from medflare.training.epochs import run_epochs, samples_of_pass
from medflare.training.site import Site


def _generator(plan: Plan[FedDAGSiteHyper, Any]) -> StateDict:
    with torch.device("meta"):
        return build_generator(plan.task, plan.site_hyper).state_dict()


GENERATOR = TensorSpec(
    "generator",
    "the site's generator of perturbations, for the mean; without an image it yields none",
    _generator,
    lambda plan: plan.site_hyper.ndag,
)
STUDENT = TensorSpec(
    "student", "the site's student, for the mean that students start from", when=lambda plan: plan.site_hyper.distribution == "type2"
)
LOSSES = MetaSpec("losses", "mean of each loss of the round", table(number(optional=True)), "train")


class FedDAGSite(ScoredSite, FedAvgSite[FedDAGSiteHyper]):
    """Trains generator, student and teacher on every batch; sends back the teacher (or the student), the generator and θ^.

    In distribution type 3 one of the two models never leaves the site: it is the site's state.
    """

    Hyper: ClassVar[type] = FedDAGSiteHyper
    phases: ClassVar[tuple[Phase, ...]] = merged_phases(
        (
            Phase("warm_up", request=(GLOBAL,), reply=(MODEL,), reply_meta=(*MEASURED, PRIVACY)),
            Phase(
                "train",
                request=(GLOBAL, GENERATOR.as_optional(), STUDENT.as_optional()),
                reply=(MODEL, GENERATOR, STUDENT),
                reply_meta=(*MEASURED, LOSSES),
            ),
            VALIDATE,
        ),
        ScoredSite.phases,
    )
    delivery: ClassVar[Phase | None] = Phase(
        "finalize", request=(GLOBAL, GENERATOR.as_optional()), request_meta=(SELECTED_ROUND.as_optional(),)
    )
    dp_unsupported_reason = (
        "generator, student and teacher learn from each other on every batch, and the perturbed model shows a bare gradient"
    )
    kept = PersistentState("kept")  # type 3: the model that never leaves

    @classmethod
    def needs_features(cls, hyper: FedDAGSiteHyper) -> bool:
        """Generated images are judged by them."""
        return hyper.ndag

    @classmethod
    def check(cls, task: TaskConfig, hyper: FedDAGSiteHyper, server_hyper: Any) -> None:
        """Refuse images that the generator cannot look around in, beside what scores need.

        Raises:
            ConfigError: a side of a single pixel, as features have.
        """
        super().check(task, hyper, server_hyper)
        if hyper.ndag and min(task.size) < 2:
            size = format_shape(task.size)
            raise ConfigError(f"ndag: the generator needs images of 2 pixels a side, task {task.name} has {size}; set ndag=false")

    def __init__(self, site: Site, plan: Plan[FedDAGSiteHyper, Any]):
        super().__init__(site, plan)
        self._last_batch: Batch | None = None

    @cached_property
    def generator(self) -> DomainGenerator:
        """The site's generator network; its weights come with every round."""
        return initial_generator(self.site.task, self.site.seed, self.hyper).to(self.site.device)

    @property
    def unit(self) -> Tensor:
        """What α counts: deviations of the training images as the network sees them, by channel (C, 1, 1), which stay here."""
        if "deviations" not in self.memory.meta:
            self.memory.meta["deviations"] = channel_deviations(batch.images for batch in self.site.ordered("train"))
        deviations = torch.tensor(self.memory.meta["deviations"], dtype=torch.float32, device=self.site.device)
        return deviations.view(-1, *[1] * self.site.task.spatial_dims)

    def warm_up(self, round: int, incoming: Message) -> Message:
        """A round of FedAvg."""
        return FedAvgSite.train(self, round, incoming)

    def train(self, round: int, incoming: Message) -> Message:
        """A round of NDAG (Alg. 1); the reply holds what the distribution type shares, and the perturbed model."""
        validation = self.validation(self.network("model", incoming.states[GLOBAL]))
        generation = self._begin(incoming)
        losses = self._epochs(generation, round)
        student, teacher = copy_state(generation.student.state_dict()), copy_state(generation.teacher.state_dict())
        sends_teacher = self.hyper.distribution == "type2" or self.hyper.chain == "student_from_global"
        states: dict[str, StateDict] = {MODEL: teacher if sends_teacher else student}
        if self.hyper.ndag:
            states[GENERATOR] = copy_state(generation.generator.state_dict())
        if self.hyper.distribution == "type2":
            states[STUDENT] = student
        if self.hyper.distribution == "type3":
            self.kept = states[MODEL]
        reply = Message(states, self.meta(loss=losses["student"], validation={"global": validation}, losses=losses))
        self.add_perturbed(round, reply)
        return reply

    def _begin(self, incoming: Message) -> AdversarialGeneration:
        """Student, teacher and generator at the start of a round (Sec. III-D); what a site does not have yet is θ_g."""
        received = incoming.states[GLOBAL]
        kept = received if self.kept is None else self.kept
        starts = {
            "type1": (received, received),
            "type2": (incoming.states.get(STUDENT, received), received),
            "type3": (received, kept) if self.hyper.chain == "student_from_global" else (kept, received),
        }
        student, teacher = starts[self.hyper.distribution]
        if GENERATOR in incoming.states:
            self.generator.load_state_dict(incoming.states[GENERATOR])
        networks = self.network("model", student), self.network("teacher", teacher)
        return AdversarialGeneration(self.site, self.hyper, *networks, self.generator, self.unit if self.hyper.ndag else 1.0)

    def _epochs(self, generation: AdversarialGeneration, round: int) -> dict[str, float]:
        """The task's local epochs; mean losses by name."""
        batches = self.site.task.local_epochs * math.ceil(samples_of_pass(self.site) / self.site.batch_size)
        decay = round_decay(max(1, batches)) if self.hyper.ema == "auto" else self.hyper.ema

        def step(batch: Batch) -> dict[str, Tensor]:
            self._last_batch = batch
            return generation.step(batch, decay)

        with self.continued(generation.optimizers):
            return run_epochs(self.site, round, "model", step)

    def last_batch(self, round: int) -> Batch:
        """The batch that the round's training ended with."""
        return cast(Batch, self._last_batch)  # `train` has just set it

    def pictures(self, incoming: Message) -> dict[str, bytes]:
        """Some of the site's training images, what the final generator adds to them, and the sums; none without Pillow to store them."""
        if GENERATOR not in incoming.states or not self.site.n["train"] or not self.hyper.pictures or not installed("PIL"):
            return {}
        images = next(self.site.ordered("train", self.hyper.pictures)).images.cpu()
        self.generator.load_state_dict(incoming.states[GENERATOR])
        with torch.no_grad():
            perturbations = self.generator(images.to(self.site.device)).cpu()
        x_hat = generated(images, perturbations, self.hyper.alpha, unit=self.unit.cpu())
        return {"generated": picture_grid(images, perturbations, x_hat)}
