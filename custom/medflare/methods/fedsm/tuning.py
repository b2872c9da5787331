"""What every candidate γ would reach at a site, with its standard error: the selector and the networks run once for all of them."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from medflare.data.sites.fitting import Predictor
from medflare.data.sites.scoring import Answer
from medflare.data.sites.site import Site
from medflare.methods.fedsm.formulas import choose_model, jackknife_error, patient_scores
from medflare.methods.fedsm.super_model import SuperModel

_GROUPS = 10  # of patients, each of which is left out once for the standard error


@torch.no_grad()
def metric_by_gamma(model: SuperModel, site: Site, candidates: Sequence[float]) -> tuple[dict[str, float | None], dict[str, float]]:
    """γ (as text) -> the task's metric of the super model on a site's validation images, and the metric's standard error.

    The selector runs once, and the networks once for each distinct assignment of images to networks; images are read again for each,
    a batch at a time. With `fit` "patch" both run anew for every γ, since windows overlap and the selector decides for each.

    Args:
        model: with any γ of its own.
        site: measures.
        candidates: values of γ.

    Returns:
        Metrics, None where undefined, and errors.
    """
    if site.task.fit == "patch":
        every = {f"{gamma:g}": _measured(site, site.answers(_with_gamma(model, gamma), "validation")) for gamma in candidates}
        return {text: value for text, (value, _) in every.items()}, {text: error for text, (_, error) in every.items()}
    scores = [model.scores(batch.images) for batch in site.ordered("validation")]
    sizes, known = [len(part) for part in scores], torch.cat(scores) if scores else torch.zeros(0, 1)
    known = patient_scores(known, site.data.validation.patients) if model.choose_by == "patient" else known
    metrics: dict[str, float | None] = {}
    errors: dict[str, float] = {}
    reached: dict[tuple[int, ...], tuple[float | None, float]] = {(): (None, 0.0)}
    for gamma in candidates:
        choice = choose_model(known, gamma)
        assignment = tuple(choice.tolist())
        if assignment not in reached:
            reached[assignment] = _measured(site, _assigned(model, site, choice.split(sizes)))
        metrics[f"{gamma:g}"], errors[f"{gamma:g}"] = reached[assignment]
    return metrics, errors


def _with_gamma(model: SuperModel, gamma: float) -> Predictor:
    return lambda images: model.answer(images, choose_model(model.scores(images), gamma))


def _assigned(model: SuperModel, site: Site, places: Iterable[Tensor]) -> Iterator[Answer]:
    """What the networks that are chosen for each batch say of the validation images."""
    for batch, chosen in zip(site.ordered("validation"), places, strict=True):
        yield model.answer(batch.images, chosen).cpu(), batch.targets.cpu(), batch.index


def _measured(site: Site, answers: Iterable[Answer]) -> tuple[float | None, float]:
    """The task's metric of these answers, and its standard error by leaving out groups of patients."""
    data, metric = site.data.validation, site.task.metric
    found = site.measured(answers, "validation", [metric])

    def value(rows: list[int]) -> float | None:
        return found.of(rows).scores([data.patients[row] for row in rows]).values[metric]

    names = {patient: place for place, patient in enumerate(dict.fromkeys(data.patients))}
    groups = [names[patient] % _GROUPS for patient in data.patients]
    left_out = [value([row for row, own in enumerate(groups) if own != group]) for group in sorted(set(groups))]
    return value(list(range(len(groups)))), jackknife_error([one for one in left_out if one is not None])
