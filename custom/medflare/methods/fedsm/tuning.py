"""What every candidate γ would gain at a site over the global model: on the same patients, with two passes over the images."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from medflare.data.sites.fitting import Predictor
from medflare.data.sites.scoring import Answer
from medflare.data.sites.site import Site
from medflare.methods.fedsm.formulas import GAMMAS, choose_model, paired_gain, patient_scores
from medflare.methods.fedsm.super_model import SuperModel
from medflare.tasks.metrics import Measured, Scores


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
    scores = (_scores_of_patches if site.task.fit == "patch" else _scores_of_images)(model, site)
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
        {name: torch.cat([part.found[name] for part in both]) for name in both[0].found},
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
            reached[sure] = _measured(site, site.answers(answered(gamma), "validation")).scores(site.data.validation.patients)
        found[gamma] = reached[sure]
        if gamma == GAMMAS[0]:
            reached[sum(len(top) for top in tops)] = found[gamma]
    return found


def _assigned(model: SuperModel, site: Site, places: Iterable[Tensor]) -> Iterator[Answer]:
    """What the networks that are chosen for each batch say of the validation images."""
    for batch, chosen in zip(site.ordered("validation"), places, strict=True):
        yield model.answer(batch.images, chosen).cpu(), batch.targets.cpu(), batch.index


def _measured(site: Site, answers: Iterable[Answer]) -> Measured:
    return site.measured(answers, "validation", [site.task.metric])
