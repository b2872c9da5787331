"""FedProto (Tan et al., AAAI 2022, Alg. 1): prototypes, not models, are exchanged.

    C_k^(c) = mean feature of class c at site k                          (Eq. 3)
    min_w  L(w) + λ sum_c ||C_k^(c) - C̄^(c)||²                           (Eq. 7-8)
    C̄^(c) = mean of the sites' C_k^(c), weighted by their samples        (Eq. 6, `pooled_means`)

In a batch C_k^(c) is its mean feature of class c. (The official code takes the mean of squares over
images and dimensions instead.) Sites send prototypes after training, in evaluation mode. Every site
keeps its model. As in the paper, it predicts the class of the nearest global prototype, with
probabilities softmax(-||f - C̄^(c)||²), which is a linear head (`prototype_head`). The trained head
serves the training alone, and predicts before there are prototypes.
"""

from typing import Any

import torch
from torch import Tensor

from medflare.core.message import FinalModels
from medflare.methods import (
    LOSS,
    MEASURED,
    SELECTED_ROUND,
    FedAvgSiteHyper,
    Message,
    PersistentState,
    PersonalSite,
    Replies,
    ServerAlgorithm,
    ServerHyper,
    StateDict,
    Step,
    TaskConfig,
    TensorSpec,
    asks,
    copied_state,
    handles,
    param,
    phase,
    strict_dataclass,
)
from medflare.methods.families.class_statistics.statistics import (
    ClassMeansSite,
    class_moments,
    class_samples,
    feature_vectors,
    means,
    one_hot_classes,
    pooled_means,
    specs_by_class,
    stacked,
    usable,
    with_head,
)
from medflare.methods.families.local_terms.features import class_indices

_NEVER = -1e6  # logit of a class without a prototype


PROTOTYPES = specs_by_class(
    "prototypes", "mean feature of each class over the training images or pixels", means
)
GLOBAL = TensorSpec("prototypes", template=means, optional=True)  # absent in the first round


@strict_dataclass
class FedProtoHyper(FedAvgSiteHyper):
    """The prototypes' term."""

    lam: float = param(
        1.0,
        "weight of the squared distance to the global prototypes, a sum over features (the "
        "published code has its mean: 1 / features); 0: training alone",
        symbol="λ",
        source="Eq. 7",
        low=0,
    )


def prototype_distance(features: Tensor, labels: Tensor, prototypes: Tensor) -> Tensor:
    """sum_c ||C^(c) - C̄^(c)||² (Eq. 8) over the classes of a batch that have a global prototype.

    Args:
        features: (N, D, ...).
        labels: (G, N, P) classes at their P positions.
        prototypes: (G C, D); zero rows stand for classes without one.
    """
    members = one_hot_classes(labels.flatten(1), len(prototypes) // len(labels)).to(features)
    counts = members.sum(dim=1).flatten()
    sums = torch.einsum("gmc,md->gcd", members, feature_vectors(features)).flatten(0, 1)
    known = (counts > 0) & prototypes.any(dim=1)
    local = sums / counts.clamp_min(1)[:, None]
    return (local - prototypes)[known].square().sum()


def prototype_head(prototypes: Tensor, task: TaskConfig) -> tuple[Tensor, Tensor]:
    """(weight (outputs, D), bias (outputs,)) of the nearest prototype (K, D).

    -||f - C||² = 2 f·C - ||C||² - ||f||², and ||f||² is the same for all classes. A sigmoid's logit
    is the difference between the positive and the negative class.
    """
    bias = -prototypes.square().sum(dim=1)
    bias[~prototypes.any(dim=1)] = _NEVER
    weight = 2 * prototypes
    if task.target == "multiclass":
        return weight, bias
    return weight[1::2] - weight[::2], bias[1::2] - bias[::2]


class FedProtoSite(ClassMeansSite, PersonalSite[FedProtoHyper]):
    """Trains its model towards the global prototypes; the site uses the model of the best round."""

    personal = PersistentState("personal")  # None before the first training

    def start(self) -> StateDict:
        """The site's model; the common initial one before the first training."""
        return self.personal or copied_state(self.site.network())

    def predicting(self, incoming: Message) -> StateDict:
        """The site's model with the head of the nearest prototype."""
        sent = incoming.get(GLOBAL)
        if sent is None:
            return self.start()
        return with_head(self.start(), *prototype_head(sent["means"], self.site.task))

    @phase(request=(GLOBAL,), reply=PROTOTYPES, meta=MEASURED)
    def train(self, round: int, incoming: Message) -> Message:
        """Validates the predicting model, trains the site's and sends its prototypes."""
        reply = self.validate(round, incoming)
        model = self.network("model", self.start())
        sent = incoming.get(GLOBAL)
        prototypes = None
        if sent is not None and self.site.annotation.complete:
            prototypes = sent["means"].to(self.site.device)

        def loss(network: Any, images: Tensor, targets: Tensor) -> Tensor:
            features, logits = network.features_and_output(images)
            value = self.site.loss(logits, targets)
            if prototypes is None:
                return value
            labels = class_indices(self.site, targets, features)
            return value + self.hyper.lam * prototype_distance(features, labels, prototypes)

        reply[LOSS] = self.optimized(
            model, "model", lambda optimizer: self.descend(model, optimizer, round, loss)
        )
        self.personal = copied_state(model)
        local, _ = class_moments(self.site, model)
        reply[PROTOTYPES[0]] = {"means": local}
        return reply

    @phase(request=(GLOBAL,), meta=MEASURED)
    def validate(self, round: int, incoming: Message) -> Message:
        """The metric of the predicting model, a candidate once the site has trained."""
        state = self.predicting(incoming)
        value = self.validation(self.network("model", state))
        if self.personal is not None:
            self.selection.add(value, round, state)
        return self.reply(validation={"personal": value})

    @phase(request=(GLOBAL,), request_meta=(SELECTED_ROUND,))
    def finalize(self, incoming: Message) -> FinalModels:
        """The model of the best round; if the site never trained, its model as it is now."""
        model = self.selection.final(self.predicting(incoming), incoming.get(SELECTED_ROUND))
        return dict.fromkeys(("personal", "deployed"), model)


class FedProtoServer(ServerAlgorithm[ServerHyper]):
    """Averages the prototypes; a class that no site of a round has keeps its prototype."""

    site_algorithm = FedProtoSite
    prototypes = PersistentState("prototypes")  # None before the first round

    @asks(FedProtoSite.train, FedProtoSite.validate)
    def request(self, step: Step, site: str) -> Message:
        """The global prototypes."""
        return Message() if self.prototypes is None else Message.of({GLOBAL: self.prototypes})

    @handles(FedProtoSite.train)
    def average_prototypes(self, step: Step, replies: Replies) -> None:
        statistics = usable(self.context, step, replies, PROTOTYPES[0])
        if not statistics:
            return
        samples = class_samples(self.context, statistics)
        pooled = pooled_means(stacked(statistics, "means"), samples).float()
        if self.prototypes is not None:
            pooled = torch.where(samples.any(dim=0)[:, None], pooled, self.prototypes["means"])
        self.prototypes = {"means": pooled}

    def configure_final(self, site: str) -> Message:
        message = self.request(Step("finalize", self.context.rounds), site)
        message[SELECTED_ROUND] = self.context.rounds
        return message
