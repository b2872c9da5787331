"""FedSM's deployed model: the selector reads an image, then a personal model or the global one
predicts.

With `image_mode` "patch" the selector decides for every window of an image alone; predictions of
neighbouring windows are blended.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from medflare.core.errors import StateError
from medflare.inference.deployed import network_with
from medflare.methods import (
    MODEL,
    Message,
    MetaSpec,
    Site,
    TaskConfig,
    listing,
    number,
    table,
    text,
)
from medflare.methods.fedsm.formulas import GAMMAS, choose_model, paired_gain, patient_scores
from medflare.methods.fedsm.personalization import PERSONALS
from medflare.methods.fedsm.selector import COMPACT, RIDGE, SELECTOR, VGG11
from medflare.tasks.metrics import MetricParts, Scores
from medflare.training.scoring import BatchPrediction

CLASSES = MetaSpec[list[str]]("sites", "the selector's classes", listing(text()))
SPEC = MetaSpec[dict[str, Any]]("selector", "the selector's network", table())
GAMMA = MetaSpec[float]("gamma", "γ", number(0.0, 1.0))
CHOOSE_BY = MetaSpec[str]("choose_by", "whose scores choose", text("image", "patient"))
# A model comes from another party, whose network may have any size.
_SELECTORS = ({"name": RIDGE}, {"name": COMPACT}, {"name": VGG11})


class SuperModel(nn.Module):
    """Maps images (N, C, H, W) to probabilities (N, outputs, ...), each image by one of K + 1
    networks.

    Args:
        task: gives the probabilities.
        networks: the global network and the personal ones, K + 1; images (N, C, H, W) -> logits.
        selector: images (N, C, H, W) -> logits (N, K).
        names: "global" and the sites, in the order of the networks.
        gamma: γ of `choose_model`.
        choose_by: "patient": one choice for all images of a patient, if patients are known;
            "image": one for each image.

    Attributes:
        chosen: how often each network has predicted since the module was built.
        recognized: how often each of the selector's classes was the most probable one.
        predicted_by: names of the networks that predicted the images of the last batch.
    """

    def __init__(
        self,
        task: TaskConfig,
        networks: list[nn.Module],
        selector: nn.Module,
        names: list[str],
        gamma: float = 0.0,
        choose_by: str = "image",
    ):
        super().__init__()
        self.task = task
        self.names = names
        self.gamma = gamma
        self.choose_by = choose_by
        self.networks = nn.ModuleList(networks)
        self.selector = selector
        self.chosen: Counter[str] = Counter()
        self.recognized: Counter[str] = Counter()
        self.predicted_by: list[str] = []

    def scores(self, images: Tensor) -> Tensor:
        """Softmax scores of the selector, (N, K)."""
        return self.selector(images).softmax(dim=1)

    def choose(self, scores: Tensor) -> Tensor:
        """The network of each image, (N,) in 0..K, by the selector's scores (N, K), see
        `choose_model`.
        """
        return choose_model(scores, self.gamma)

    def predict_with(self, images: Tensor, choice: Tensor) -> Tensor:
        """Probabilities (N, outputs, ...) of the chosen networks (N,).

        A network runs once on all images that chose it.
        """
        predicted = []
        for network in choice.unique().tolist():
            logits = self.networks[network](images[choice == network])
            predicted.append(self.task.probabilities(logits))
        probabilities = torch.cat(predicted)  # by network
        output = torch.empty_like(probabilities)
        output[choice.argsort(stable=True)] = probabilities
        return output

    def forward(self, images: Tensor) -> Tensor:
        """Images (N, C, H, W) to probabilities (N, outputs, ...), each by its chosen network."""
        scores = self.scores(images)
        choice = self.choose(scores)
        self.note(choice, scores)
        return self.predict_with(images, choice)

    @property
    def by_patient(self) -> bool:
        """Whether a patient's images are predicted together, see `predict_patient`."""
        return self.choose_by == "patient"

    def predict_patient(self, parts: Sequence[Tensor]) -> Tensor:
        """Probabilities of all images of one patient, (N, outputs, ...), by their mean scores.

        `parts` are batches of its images.
        """
        scores = torch.cat([self.scores(images) for images in parts])
        scores = scores.mean(dim=0, keepdim=True).expand_as(scores)
        choice = self.choose(scores)
        self.note(choice, scores)
        choices = choice.split([len(images) for images in parts])
        return torch.cat(list(map(self.predict_with, parts, choices)))

    def note(self, choice: Tensor, scores: Tensor) -> None:
        """Counts the chosen networks (N,) and the most probable classes of a batch, by scores (N,
        K) or (N, K + 1).
        """
        classes = self.names[-scores.shape[1] :]
        self.predicted_by = [self.names[network] for network in choice.tolist()]
        self.chosen.update(self.predicted_by)
        self.recognized.update(classes[label] for label in scores.argmax(dim=1).tolist())

    def predict_all(self, images: Tensor) -> Tensor:
        """Probabilities of all networks, (N, K + 1, ...)."""
        probabilities = [self.task.probabilities(network(images)) for network in self.networks]
        return torch.stack(probabilities, dim=1)

    def combined(self, probabilities: Tensor, scores: Tensor) -> Tensor:
        """The prediction (N, ...) by the selector's scores (N, K).

        Args:
            probabilities: the probabilities of all networks (N, K + 1, ...).
        """
        index = self.choose(scores).reshape(-1, *[1] * (probabilities.ndim - 1))
        index = index.expand(-1, 1, *probabilities.shape[2:])
        return probabilities.gather(1, index).squeeze(1)

    def unbranched(self) -> "UnbranchedSuperModel":
        """The same predictions by one computation for all images."""
        return UnbranchedSuperModel(self)

    def report(self) -> dict[str, Any]:
        """Images predicted by each network, and under "selector" images by most probable class;
        those of all sites are the confusion matrix.
        """
        report: dict[str, Any] = {name: self.chosen[name] for name in self.names}
        recognized = {}
        for name in self.names:
            if name != "global" or self.recognized[name]:
                recognized[name] = self.recognized[name]
        report["selector"] = recognized
        return report


class UnbranchedSuperModel(nn.Module):
    """A super model for exporters, which allow no branches: all networks compute, one prediction is
    taken.
    """

    def __init__(self, model: SuperModel):
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        """Images (N, C, H, W) to the super model's probabilities."""
        return self.model.combined(self.model.predict_all(images), self.model.scores(images))


def super_model(task: TaskConfig, message: Message) -> SuperModel:
    """The super model of a final message, see `super_model_parts`; its metadata also hold γ."""
    networks, selector, names = super_model_parts(task, message, outputs=len(message[CLASSES]))
    choose_by = message.get(CHOOSE_BY) or "image"
    return SuperModel(task, networks, selector, names, float(message[GAMMA]), choose_by).eval()


def super_model_parts(
    task: TaskConfig, message: Message, outputs: int
) -> tuple[list[nn.Module], nn.Module, list[str]]:
    """(networks, selector with `outputs` scores, names) of a super model's message, in evaluation
    mode.

    Raises:
        StateError: the message is incomplete, or names another selector than FedSM's.
    """
    sites = list(message.get(CLASSES) or ())
    entries = [MODEL, *(PERSONALS.member(site) for site in sites)]
    needed = [CLASSES, SPEC, *entries, SELECTOR]
    missing = [spec.name for spec in needed if spec not in message]
    if missing:
        raise StateError(f"the super model lacks {', '.join(missing)}; fetch the model again")
    if message[SPEC] not in _SELECTORS:
        raise StateError("the super model's selector is none of FedSM's; fetch the model again")
    selector = network_with(task, message[SELECTOR], message[SPEC], outputs)
    networks = [network_with(task, message[entry]) for entry in entries]
    return networks, selector, ["global", *sites]


# -- tuning γ -------------------------------------------------------------------------------------


@torch.no_grad()
def gain_by_gamma(model: SuperModel, site: Site) -> dict[str, float | None]:
    """γ of `GAMMAS` (as text) -> gain over γ = 1, the global model, on a site's validation images.

    The gain is by the task's metric; None if it is undefined, or defined for fewer than the site's
    `minimum_patients`. It is the mean of the patients' gains if the metric is one of patients, else
    the difference of the site's two values.
    """
    if site.task.image_mode == "patch":
        scores = _scores_of_patches(model, site)
    else:
        scores = _scores_of_images(model, site)
    metric = site.task.metric
    gains = {}
    for gamma, scores_of_gamma in scores.items():
        gains[f"{gamma:g}"] = _gain(scores_of_gamma, scores[1.0], metric, site.minimum_patients)
    return gains


def _gain(scores: Scores, reference: Scores, metric: str, minimum_patients: int) -> float | None:
    values = scores.cases.values.get(metric)
    others = reference.cases.values.get(metric)
    if values is not None and others is not None:
        compared = int((~(values - others).isnan()).sum())
        few = compared < minimum_patients or reference.cases.has_few(metric, minimum_patients)
        return None if few else paired_gain(values, others)
    value = scores.values[metric]
    other = reference.values[metric]
    if value is None or other is None:
        return None
    return value - other


def _scores_of_images(model: SuperModel, site: Site) -> dict[float, Scores]:
    """γ -> the metric's scores: each image has two possible predictions for all γ, the global
    network's and that of the most probable site.
    """
    data = site.data.validation
    parts = [model.scores(batch.images) for batch in site.ordered("validation")]
    sizes = [len(part) for part in parts]
    scores = torch.cat(parts) if parts else torch.zeros(0, 1)
    if model.choose_by == "patient":
        scores = patient_scores(scores, data.patients)
    most_probable = choose_model(scores, 0.0).cpu()
    of_global = torch.zeros_like(most_probable)
    first = _metric_parts(model, site, of_global.split(sizes))
    second = _metric_parts(model, site, most_probable.split(sizes))
    joined = {name: torch.cat([part, second.parts[name]]) for name, part in first.parts.items()}
    finite = torch.cat([first.finite, second.finite])
    measured = MetricParts(site.task, [site.task.metric], joined, finite)
    rows = torch.arange(len(data))
    by_gamma = {}
    for gamma in GAMMAS:
        personal = choose_model(scores, gamma).cpu() > 0
        by_gamma[gamma] = measured.of(rows + len(data) * personal).scores(data.patients)
    return by_gamma


def _scores_of_patches(model: SuperModel, site: Site) -> dict[float, Scores]:
    """γ -> the metric's scores: windows overlap, so all of them run again for every γ that changes
    the choice of one.
    """
    largest = [torch.empty(0)]  # each window's largest score

    def scored(gamma: float) -> Scores:
        def predict(images: Tensor) -> Tensor:
            scores = model.scores(images)
            if gamma == GAMMAS[0]:
                largest.append(scores.amax(dim=1).cpu())
            return model.predict_with(images, choose_model(scores, gamma))

        return site.score(predict, "validation", [site.task.metric])

    by_gamma = {GAMMAS[0]: scored(GAMMAS[0])}
    windows = torch.cat(largest)
    for last, gamma in pairwise(GAMMAS):
        changes = ((windows > last) & (windows <= gamma)).any()
        by_gamma[gamma] = scored(gamma) if changes else by_gamma[last]
    return by_gamma


def _metric_parts(model: SuperModel, site: Site, choices: Iterable[Tensor]) -> MetricParts:
    """The task's metric on the validation images, by the networks chosen for each batch."""

    def predictions() -> Iterator[BatchPrediction]:
        for batch, choice in zip(site.ordered("validation"), choices, strict=True):
            yield model.predict_with(batch.images, choice).cpu(), batch.targets.cpu(), batch.index

    return site.measure(predictions(), "validation", [site.task.metric])
