"""What every candidate γ would reach at a site, with its standard error: the selector and the networks run once for all of them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from medflare.data.sites.fitting import Predictor
from medflare.data.sites.site import Site
from medflare.methods.fedsm.formulas import choose_model, jackknife_error, patient_scores
from medflare.methods.fedsm.super_model import SuperModel
from medflare.tasks.metrics import Images, score

_GROUPS = 10  # of patients, each of which is left out once for the standard error


@torch.no_grad()
def metric_by_gamma(model: SuperModel, site: Site, candidates: Sequence[float]) -> tuple[dict[str, float | None], dict[str, float]]:
    """γ (as text) -> the task's metric of the super model on a site's validation images, and the metric's standard error.

    The selector runs once, and the networks once for each distinct assignment of images to networks. With `fit` "patch" both run
    anew for every γ, since windows overlap and the selector decides for each.

    Args:
        model: with any γ of its own.
        site: measures.
        candidates: values of γ.

    Returns:
        Metrics, None where undefined, and errors.
    """
    if site.task.fit == "patch":
        every = {f"{gamma:g}": _measured(site, site.predict(_with_gamma(model, gamma), "validation")) for gamma in candidates}
        return {text: value for text, (value, _) in every.items()}, {text: error for text, (_, error) in every.items()}
    images = [batch.images for batch in site.ordered("validation")]
    scores = torch.cat([model.scores(batch) for batch in images]) if images else torch.zeros(0, 1)
    scores = patient_scores(scores, site.data.validation.patients) if model.choose_by == "patient" else scores
    metrics: dict[str, float | None] = {}
    errors: dict[str, float] = {}
    known: dict[tuple[int, ...], tuple[float | None, float]] = {}
    for gamma in candidates:
        choice = choose_model(scores, gamma)
        assignment = tuple(choice.tolist())
        if images and assignment not in known:
            parts = choice.split([len(batch) for batch in images])
            answers = [model.answer(batch, part).cpu() for batch, part in zip(images, parts, strict=True)]
            known[assignment] = _measured(site, torch.cat(answers))
        metrics[f"{gamma:g}"], errors[f"{gamma:g}"] = known.get(assignment, (None, 0.0))
    return metrics, errors


def _with_gamma(model: SuperModel, gamma: float) -> Predictor:
    return lambda images: model.answer(images, choose_model(model.scores(images), gamma))


def _measured(site: Site, outputs: Images) -> tuple[float | None, float]:
    """The task's metric of these outputs, and its standard error by leaving out groups of patients."""
    data = site.data.validation
    names = {patient: place for place, patient in enumerate(dict.fromkeys(data.patients))}
    groups = [names[patient] % _GROUPS for patient in data.patients]
    left_out = [_part(site, outputs, [row for row, own in enumerate(groups) if own != group]) for group in sorted(set(groups))]
    known = [value for value in left_out if value is not None]
    return _part(site, outputs, list(range(len(groups)))), jackknife_error(known)


def _part(site: Site, outputs: Images, rows: list[int]) -> float | None:
    """The metric of some rows."""
    data, metric = site.data.validation, site.task.metric
    patients, spacings = [data.patients[row] for row in rows], [data.spacings[row] for row in rows if data.spacings]
    return score(_rows(outputs, rows), _rows(data.targets, rows), patients, site.task, [metric], spacings).values[metric]


def _rows(values: Images, rows: list[int]) -> Images:
    return values[rows] if isinstance(values, Tensor) else [values[row] for row in rows]
