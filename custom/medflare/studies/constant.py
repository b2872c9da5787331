"""The constant answer: what a model reaches that says the same of every image. A row that sits there has learnt nothing yet."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F

from medflare.data.sites.opening import open_site
from medflare.data.sites.scoring import Answer
from medflare.data.sites.site import Site
from medflare.data.splits import Samples, joined
from medflare.evaluation.record import mean_of_defined
from medflare.evaluation.results import RunRecord, SiteRecord, build_results
from medflare.methods.parts.training import finite_or_none
from medflare.studies.recorded import SCORES
from medflare.studies.setting import Setting
from medflare.tasks.cases import Cases
from medflare.tasks.config import TaskConfig
from medflare.tasks.metrics import Images, Scores

CONSTANT: Final = "constant"
_SHARES: Final = (0.1, 0.2, 0.3, 0.4, 0.5)  # of training masks that must cover a pixel for a mean mask to cover it


def constant_answer(setting: Setting, seed: int, outside: Sequence[str] = (), hyper: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The best answer that looks at no image; nothing is trained.

    Classification: the classes' shares of the training images as probabilities, so that the majority class is chosen. Segmentation:
    all background, all of one structure, or the mean of the training masks, whichever is best on validation images by the task's metric.

    Args:
        setting: task, sites, data and rounds.
        seed: of the split.
        outside: sites that have no training images.
        hyper: none; a constant has no hyper-parameters.

    Returns:
        A results dict: "global" comes from the training images of all inside sites, "personal" from a site's own; an inside site deploys
        its own, an outside site the global one.
    """
    started, task = time.monotonic(), replace(setting.task, resplit=seed)
    roles = {site: "outside" if site in outside else "inside" for site in setting.sites}
    sites = {name: open_site(name, task, seed=seed, role=role, data_root=setting.data_root) for name, role in roles.items()}
    training = {name: site.data.train for name, site in sites.items() if roles[name] == "inside"}
    everybody = joined(list(training.values()), list(training))
    records: dict[str, SiteRecord] = {}
    scores: dict[str, dict[str, Any]] = {}
    for name, site in sites.items():
        judges = [site] if name in training else [sites[other] for other in training]
        found = {"global": _best(task, everybody, judges, site)}
        if name in training:
            found["personal"] = _best(task, training[name], judges, site)
        found["deployed"] = found.get("personal", found["global"])
        values = {model: {metric: finite_or_none(value) for metric, value in of.values.items()} for model, of in found.items()}
        records[name] = SiteRecord(roles[name], site.n, values)
        scores[name] = {model: of.cases.to_dict() for model, of in found.items()}
    seconds = {"total": time.monotonic() - started}
    return build_results(RunRecord(CONSTANT, task, seed, setting.rounds, records, seconds=seconds)) | {SCORES: scores}


def _best(task: TaskConfig, training: Samples, judges: Sequence[Site], site: Site) -> Scores:
    """The test scores at `site` of the answer that is best by the judges' validation images; the earliest of equals."""
    answers = list(answers_of(task, training.targets))

    def value(answer: Tensor) -> float:
        found = mean_of_defined(_scores(judge, answer, "validation").values.get(task.metric) for judge in judges)
        return float("-inf") if found is None else found

    chosen = answers[0] if len(answers) == 1 else max(answers, key=value)
    return _scores(site, chosen, "test")


def _scores(site: Site, answer: Tensor, split: str) -> Scores:
    samples = site.data.split(split)
    if not len(samples):
        return Scores(dict.fromkeys(site.task.metrics), cases=Cases())
    metrics = site.task.metrics if split == "test" else (site.task.metric,)
    return site.measured(_repeated(answer, samples, site.task), split, metrics).scores(samples.patients)


def _repeated(answer: Tensor, samples: Samples, task: TaskConfig) -> Iterator[Answer]:
    """The answer (outputs,) or (outputs, ...) for every image, one by one, in the size of its target."""
    sides = task.spatial_dims if task.kind == "segmentation" else 0
    for row in range(len(samples)):
        target = samples.targets[row]
        shape = target.shape[target.ndim - sides :]
        whole = answer if answer.ndim > 1 else answer.reshape(-1, *[1] * sides).expand(-1, *shape)
        yield whole[None], target[None], torch.tensor([row])


def answers_of(task: TaskConfig, targets: Images) -> Iterator[Tensor]:
    """The constant answers that training targets suggest.

    Args:
        task: gives kind, target and classes.
        targets: of the training images, as in `data.splits.Samples`.

    Yields:
        Probabilities (outputs,), or (outputs, H, W) for a mean mask, which needs targets of one size.

    Examples:
        >>> from types import SimpleNamespace
        >>> grades = SimpleNamespace(kind="classification", target="multiclass", outputs=3)
        >>> list(answers_of(grades, torch.tensor([0, 2, 2, 2])))
        [tensor([0.2500, 0.0000, 0.7500])]
    """
    if task.kind == "classification":
        yield _frequencies(task, targets, task.outputs).mean(dim=0)
        return
    if task.target == "multiclass":
        yield from torch.eye(task.outputs)  # class 0 is the background
    else:
        yield from (torch.zeros(task.outputs), torch.ones(task.outputs))
    if task.fit == "resize" and len(targets):
        mean = sum((_frequencies(task, target[None], task.outputs)[0] for target in targets), torch.zeros(())) / len(targets)
        if task.target == "multiclass":
            yield mean
        else:
            yield from ((mean > share).float() for share in _SHARES)


def _frequencies(task: TaskConfig, targets: Tensor, outputs: int) -> Tensor:
    """Targets as probabilities, float (N, outputs, ...)."""
    if task.target == "multiclass":
        return F.one_hot(targets.long(), outputs).movedim(-1, 1).float()
    return targets[:, None].float() if task.target == "binary" else targets.float()
