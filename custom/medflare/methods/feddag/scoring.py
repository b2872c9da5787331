"""What SHA asks of a site beside training: a perturbed model, and scores of the perturbed models of other sites (Sec. III-C1)."""

from collections import deque
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from medflare.core.errors import ConfigError
from medflare.core.manifest import MetaSpec, Phase, TensorSpec, number, table
from medflare.core.message import Message
from medflare.core.settings import no_such
from medflare.core.states import StateDict, moved
from medflare.data.loading import Batch
from medflare.methods.base import Capability, SiteAlgorithm
from medflare.methods.fedavg.site import MODEL
from medflare.methods.feddag.formulas import sharpness_perturbation
from medflare.methods.feddag.hyper import SHAHyper
from medflare.privacy.settings import is_private
from medflare.tasks.config import TaskConfig
from medflare.tasks.metrics_table import selection_metrics
from medflare.training.epochs import finite_or_none, trainable

PERTURBED = TensorSpec(
    "perturbed",
    "the site's model moved along its last batch's gradient (whose direction it reveals), for other sites to score",
    when=lambda plan: _perturbs(plan.server_hyper),
)
_RANKING = "auc_macro"
CANDIDATE = TensorSpec("candidate/")  # the model of another site, to be scored
SCORES = MetaSpec("scores", "site -> score of its model on this site's validation images", table(number(optional=True)), "validation")


class ScoredSite(SiteAlgorithm[Any]):
    """What SHA asks of a site beside training, mixed into any algorithm whose `train` replies with a model.

    `train` adds the perturbed model to the reply; `score` measures the perturbed models of other sites.
    """

    capabilities: ClassVar[frozenset[Capability]] = frozenset()
    phases: ClassVar[tuple[Phase, ...]] = (
        Phase("train", reply=(PERTURBED,)),
        Phase("score", request=(CANDIDATE,), reply_meta=(SCORES,)),
    )

    @property
    def asked(self) -> SHAHyper:
        """The server's hyper-parameters, which say what it wants of a site."""
        return self.plan.server_hyper

    @classmethod
    def check(cls, task: TaskConfig, hyper: Any, server_hyper: Any) -> None:
        """Refuse a score that the task does not have, and differential privacy where θ^ leaves the site.

        Raises:
            ConfigError: one of both.
        """
        super().check(task, hyper, server_hyper)
        if not isinstance(server_hyper, SHAHyper):  # FedDAG's site with another server
            return
        if is_private(hyper) and server_hyper.perturbs:
            raise ConfigError("dp_noise: the perturbed model shows the direction of a gradient without noise; set rho=0 (CEA)")
        known = ("auto", *selection_metrics(task.kind))
        if server_hyper.score_metric not in known:
            raise ConfigError(no_such("score_metric", server_hyper.score_metric, known, f"a {task.kind} task"))

    def train(self, round: int, incoming: Message) -> Message:
        """The other algorithm's training; the perturbed model is added to its reply."""
        reply: Message = super().train(round, incoming)  # type: ignore[misc]
        self.add_perturbed(round, reply)
        return reply

    def add_perturbed(self, round: int, reply: Message) -> None:
        """θ^ beside θ in a reply to `train`, where the settings ask for it; one more backward pass."""
        if _perturbs(self.plan.server_hyper):
            gradients = self.gradients(self.network("model", reply.states[MODEL]), self.last_batch(round))
            reply.states[PERTURBED] = perturbed(reply.states[MODEL], gradients, self.asked.rho)

    def last_batch(self, round: int) -> Batch:
        """The batch that the round's training ended with."""
        return deque(self.site.batches("train", round, "model", self.site.task.local_epochs - 1), maxlen=1)[0]

    def gradients(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Gradients in evaluation mode: of the model as others will measure it, its running statistics untouched."""
        model.eval()
        names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        found = torch.autograd.grad(self.site.loss(model(batch.images), batch.targets), trainable(model), allow_unused=True)
        return {name: gradient.cpu() for name, gradient in zip(names, found, strict=True) if gradient is not None}

    def score(self, round: int, incoming: Message) -> Message:
        """Scores of the incoming models on this site's validation images, by entry; None where undefined."""
        found = {site: finite_or_none(self._score(state)) for site, state in CANDIDATE.family(incoming.states).items()}
        return Message({}, {SCORES: found})

    def _score(self, state: StateDict) -> float | None:
        model = self.network("model", state).eval()
        metric = score_metric(self.site.task, self.asked)
        return self.site.score(self.site.predictor(model), "validation", [metric]).values[metric]


def score_metric(task: TaskConfig, hyper: SHAHyper) -> str:
    """The metric that scores are; "auto" is AUC for classification.

    A model's F1 of a site's images is often that of one constant answer, the same for every model; AUC still tells how well it ranks them.
    """
    if hyper.score_metric != "auto":
        return hyper.score_metric
    return _RANKING if _RANKING in selection_metrics(task.kind) else task.metric


def _perturbs(server_hyper: Any) -> bool:
    return isinstance(server_hyper, SHAHyper) and server_hyper.perturbs


def perturbed(state: StateDict, gradients: Mapping[str, Tensor], rho: float) -> StateDict:
    """θ^ = θ + ρ g / ||g||_2 (Sec. III-C1); what has no gradient (buffers, frozen weights) stays as it is.

    Returns:
        A state with all entries of `state`.

    Examples:
        >>> perturbed({"w": torch.tensor([1.0, 1.0]), "n": torch.tensor(3)}, {"w": torch.tensor([3.0, 4.0])}, rho=5.0)
        {'w': tensor([4., 5.]), 'n': tensor(3)}
    """
    return {**state, **moved({name: state[name] for name in gradients}, sharpness_perturbation(gradients, rho))}
