"""FedSM's deployed model: the selector reads an image, a personal model or the global one answers.

With `image_mode` "patch" the selector reads every window of an image and decides for it alone; answers of neighbours are blended.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from medflare.core.errors import StateError
from medflare.core.message import Message
from medflare.core.rng import seeded
from medflare.inference.deployed import network_with
from medflare.methods.fedsm.formulas import GAMMAS, choose_model, paired_gain, patient_scores
from medflare.networks.catalogue import task_network
from medflare.tasks.config import TaskConfig
from medflare.tasks.metrics import Measured, Scores
from medflare.training.patches import Predictor
from medflare.training.scoring import BatchPrediction
from medflare.training.site import Site


class SuperModel(nn.Module):
    """Images (N, C, H, W) to probabilities; each image is answered by one of K + 1 networks.

    Args:
        task: gives the probabilities.
        networks: the global network and the personal ones, K + 1; images (N, C, H, W) -> logits.
        selector: images (N, C, H, W) -> logits (N, K).
        names: "global" and the sites, in the order of the networks.
        gamma: γ of `choose_model`.
        choose_by: "patient": where images come with their patients, one choice for all of a patient's; "image": one for each.

    Attributes:
        names: "global" and the sites, in the order of the networks.
        chosen: how often each network has answered since the module was built.
        recognised: how often each place in the selector's scores was the most probable one.
        answered: which network answered each image of the last batch, by name.
    """

    def __init__(
        self, task: TaskConfig, networks: list[nn.Module], selector: nn.Module, names: list[str], gamma: float, choose_by: str = "image"
    ):
        super().__init__()
        self.task = task
        self.networks = nn.ModuleList(networks)
        self.selector = selector
        self.names = names
        self.gamma = gamma
        self.choose_by = choose_by
        self.chosen: Counter[str] = Counter()
        self.recognised: Counter[str] = Counter()
        self.answered: list[str] = []

    def scores(self, images: Tensor) -> Tensor:
        """Softmax scores of the selector, (N, K).

        Args:
            images: (N, C, H, W).
        """
        return self.selector(images).softmax(dim=1)

    def choose(self, scores: Tensor) -> Tensor:
        """Which network answers each image, (N,) in 0..K, by the selector's scores (N, K); see `choose_model`."""
        return choose_model(scores, self.gamma)

    def answer(self, images: Tensor, choice: Tensor) -> Tensor:
        """Probabilities of the chosen network for each image; a network runs once on all images that chose it.

        Args:
            images: (N, C, H, W).
            choice: (N,) places of networks.

        Returns:
            (N, outputs, ...).
        """
        output: Tensor | None = None
        for place in choice.unique().tolist():
            rows = choice == place
            part = self.task.probabilities(self.networks[place](images[rows]))
            if output is None:
                output = part.new_empty((len(images), *part.shape[1:]))
            output[rows] = part
        assert output is not None  # a batch holds at least one image
        return output

    def forward(self, images: Tensor) -> Tensor:
        """Images (N, C, H, W) to the probabilities (N, outputs, ...) of the network that was chosen for each."""
        scores = self.scores(images)
        choice = self.choose(scores)
        self.note(choice, scores)
        return self.answer(images, choice)

    @property
    def by_patient(self) -> bool:
        """Whether a patient's images are answered together, see `predict_patient`."""
        return self.choose_by == "patient"

    def predict_patient(self, parts: Sequence[Tensor]) -> Tensor:
        """Probabilities of all images of one patient, (N, outputs, ...), by the mean of their scores.

        Args:
            parts: the images (N, C, H, W) in batches.
        """
        scores = torch.cat([self.scores(images) for images in parts])
        scores = scores.mean(dim=0, keepdim=True).expand_as(scores)
        choice = self.choose(scores)
        self.note(choice, scores)
        places = choice.split([len(images) for images in parts])
        return torch.cat([self.answer(images, place) for images, place in zip(parts, places, strict=True)])

    def note(self, choice: Tensor, scores: Tensor) -> None:
        """Remember who answers a batch, and whom the selector took the images for.

        Args:
            choice: (N,) in 0..K.
            scores: (N, K), or (N, K+1) of a selector that knows the global model too.
        """
        known = self.names[-scores.shape[1] :]
        self.answered = [self.names[place] for place in choice.tolist()]
        self.chosen.update(self.answered)
        self.recognised.update(known[place] for place in scores.argmax(dim=1).tolist())

    def every_answer(self, images: Tensor) -> Tensor:
        """Probabilities of all networks, (N, K+1, ...).

        Args:
            images: (N, C, H, W).
        """
        return torch.stack([self.task.probabilities(network(images)) for network in self.networks], dim=1)

    def combined(self, answers: Tensor, scores: Tensor) -> Tensor:
        """What `forward` answers, (N, ...), from the probabilities of all networks (N, K+1, ...) and the selector's scores.

        Args:
            answers: probabilities of all networks.
            scores: of the selector, (N, K).
        """
        choice = self.choose(scores)
        place = choice.reshape(-1, *[1] * (answers.ndim - 1)).expand(-1, 1, *answers.shape[2:])
        return answers.gather(1, place).squeeze(1)

    def unbranched(self) -> "UnbranchedSuperModel":
        """The same answers by one computation for all images."""
        return UnbranchedSuperModel(self)

    def report(self) -> dict[str, Any]:
        """How many images each network has answered, and under "selector" how many were taken for each site's, whatever γ.

        The sites' rows together are the selector's confusion matrix.
        """
        taken = {name: self.recognised[name] for name in self.names if name != "global" or self.recognised[name]}
        return {**{name: self.chosen[name] for name in self.names}, "selector": taken}


class UnbranchedSuperModel(nn.Module):
    """A super model whose computation is the same for every image, as exporters need: all networks compute, one answer is taken."""

    def __init__(self, model: SuperModel):
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        """Images (N, C, H, W) to the probabilities that the super model gives; every network computes."""
        return self.model.combined(self.model.every_answer(images), self.model.scores(images))


def super_model(task: TaskConfig, message: Message) -> SuperModel:
    """The super model of a delivery: entries "model", "personal/<site>" and "selector"; meta "sites", "gamma", "selector"."""
    parts = super_model_parts(task, message, outputs=len(message.meta["sites"]))
    return SuperModel(task, *parts, float(message.meta["gamma"]), message.meta.get("choose_by", "image")).eval()


def super_model_parts(task: TaskConfig, message: Message, outputs: int) -> tuple[list[nn.Module], nn.Module, list[str]]:
    """(networks, selector, names) of a delivered super model, in evaluation mode.

    Args:
        task: what the networks were trained for.
        message: the delivered super model.
        outputs: scores that its selector gives.

    Raises:
        StateError: an entry is missing or does not fit.
    """
    sites = list(message.meta.get("sites", ()))
    wanted = ["model", *(f"personal/{site}" for site in sites)]
    missing = [item for item in ("sites", "selector") if item not in message.meta]
    missing += [entry for entry in [*wanted, "selector"] if entry not in message.states]
    if missing:
        raise StateError(f"the super model lacks {', '.join(missing)}; fetch the model again")
    with seeded(0, "deployed"):  # the drawn weights are overwritten; nobody's generator must notice
        selector = task_network(task, message.meta["selector"], outputs)
    selector.load_state_dict(message.states["selector"])
    return [network_with(task, message.states[entry]) for entry in wanted], selector.eval(), ["global", *sites]


# -- tuning γ ----------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def gain_by_gamma(model: SuperModel, site: Site) -> dict[str, float | None]:
    """γ (as text) -> what the super model gains on a site's validation images over γ = 1, the global model, by the task's metric.

    The gain is the mean over patients of their own gains, where the metric is one of patients, else the difference of the site's two.

    Args:
        model: with any γ of its own.
        site: measures.

    Returns:
        A gain for each of `GAMMAS`, None where undefined.
    """
    scores = (_scores_of_patches if site.task.image_mode == "patch" else _scores_of_images)(model, site)
    return {f"{gamma:g}": _gain(found, scores[1.0], site.task.metric) for gamma, found in scores.items()}


def _gain(found: Scores, reference: Scores, metric: str) -> float | None:
    values, others = found.cases.values.get(metric), reference.cases.values.get(metric)
    if values is not None and others is not None:
        return paired_gain(values, others)
    one, other = found.values[metric], reference.values[metric]
    return None if one is None or other is None else one - other


def _scores_of_images(model: SuperModel, site: Site) -> dict[float, Scores]:
    """Each image has two possible answers, whatever γ: the global network's, and that of the most probable site."""
    data = site.data.validation
    parts = [model.scores(batch.images) for batch in site.ordered("validation")]
    sizes, known = [len(part) for part in parts], torch.cat(parts) if parts else torch.zeros(0, 1)
    known = patient_scores(known, data.patients) if model.choose_by == "patient" else known
    sure = choose_model(known, 0.0).cpu()
    both = [_measured(site, _assigned(model, site, choice.split(sizes))) for choice in (torch.zeros_like(sure), sure)]
    answers = Measured(
        site.task,
        [site.task.metric],
        {name: torch.cat([part.parts[name] for part in both]) for name in both[0].parts},
        torch.cat([part.finite for part in both]),
    )
    rows = torch.arange(len(data))
    found: dict[float, Scores] = {}
    for gamma in GAMMAS:
        personal = choose_model(known, gamma).cpu() > 0
        found[gamma] = answers.of(rows + len(data) * personal).scores(data.patients)
    return found


def _scores_of_patches(model: SuperModel, site: Site) -> dict[float, Scores]:
    """Windows choose for themselves and overlap, so that all of them run again for every γ that changes the choice of one."""
    tops: list[Tensor] = []
    reached: dict[int, Scores] = {}
    found: dict[float, Scores] = {}

    def answered(gamma: float) -> Predictor:
        def predict(images: Tensor) -> Tensor:
            scores = model.scores(images)
            if gamma == GAMMAS[0]:
                tops.append(scores.amax(dim=1).cpu())
            return model.answer(images, choose_model(scores, gamma))

        return predict

    for gamma in GAMMAS:
        sure = sum(int((top > gamma).sum()) for top in tops) if gamma > GAMMAS[0] else -1
        if sure not in reached:
            reached[sure] = _measured(site, site.predictions(answered(gamma), "validation")).scores(site.data.validation.patients)
        found[gamma] = reached[sure]
        if gamma == GAMMAS[0]:
            reached[sum(len(top) for top in tops)] = found[gamma]
    return found


def _assigned(model: SuperModel, site: Site, places: Iterable[Tensor]) -> Iterator[BatchPrediction]:
    """What the networks that are chosen for each batch say of the validation images."""
    for batch, chosen in zip(site.ordered("validation"), places, strict=True):
        yield model.answer(batch.images, chosen).cpu(), batch.targets.cpu(), batch.index


def _measured(site: Site, answers: Iterable[BatchPrediction]) -> Measured:
    return site.measure(answers, "validation", [site.task.metric])
