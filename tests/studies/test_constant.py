"""The constant answer: the best that looks at no image."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from medflare.data.sites.constant import answers_of
from medflare.data.sites.site import Site
from medflare.data.splits import SiteData, Split
from medflare.data.targets import LazyTensors
from medflare.evaluation.contract import validate_results
from medflare.studies import constant
from medflare.studies.constant import CONSTANT, constant_answer
from medflare.studies.setting import Setting
from medflare.tasks.config import TaskConfig
from small import small_task


def split(targets: torch.Tensor) -> Split:
    names = tuple(str(number) for number in range(len(targets)))
    return Split(torch.zeros(len(targets), 1, 16, 16), targets, names, names)


def opened(monkeypatch: pytest.MonkeyPatch, data: dict[str, SiteData]) -> None:
    def open_site(name: str, task: TaskConfig, **_: Any) -> Site:
        return Site(name, task, data[name])

    monkeypatch.setattr(constant, "open_site", open_site)


def grades(*of: int) -> Split:
    return split(torch.tensor(of, dtype=torch.long))


def test_a_class_is_chosen_by_the_training_images_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A's own majority is 0, everybody's is 2."""
    data = {
        "A": SiteData(grades(0, 0, 2), grades(2), grades(0, 0, 2, 2)),
        "B": SiteData(grades(2, 2, 2), grades(2), grades(2, 0)),
        "X": SiteData(grades(), grades(), grades(2, 2, 2, 1)),
    }
    opened(monkeypatch, data)
    results = constant_answer(Setting(small_task("classification"), ("A", "B", "X"), 5), 0, outside=("X",))
    validate_results({name: content for name, content in results.items() if name != "scores"})
    metrics = {name: {model: of["accuracy"] for model, of in site["metrics"].items()} for name, site in results["sites"].items()}
    assert metrics == {
        "A": {"global": 0.5, "personal": 0.5, "deployed": 0.5},
        "B": {"global": 0.5, "personal": 0.5, "deployed": 0.5},
        "X": {"global": 0.75, "personal": None, "deployed": 0.75},
    }
    assert results["method"] == CONSTANT and results["rounds"] == 5
    assert results["sites"]["A"]["metrics"]["global"]["auc_macro"] == 0.5, "equal scores order nothing"
    assert results["scores"]["A"]["personal"]["probabilities"][0] == pytest.approx([2 / 3, 0, 1 / 3], abs=1e-5)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [(8, 1.0), (2, 2 * 2 / (2 + 4))],  # the mean of the training masks, or what comes nearest to it
)
def test_the_mean_mask_is_taken_where_it_is_best_on_validation(monkeypatch: pytest.MonkeyPatch, rows: int, expected: float) -> None:
    def masks(filled: int, count: int) -> Split:
        target = torch.zeros(count, 16, 16, dtype=torch.long)
        target[:, :filled] = 1
        return split(target)

    training = rows if rows == 8 else 4
    opened(monkeypatch, {"A": SiteData(masks(training, 3), masks(training, 2), masks(rows, 2))})
    results = constant_answer(Setting(small_task(), ("A",), 1), 0)
    assert results["sites"]["A"]["metrics"]["deployed"]["dice"] == pytest.approx(expected)


def test_answers_of_segmentation() -> None:
    targets = torch.tensor([[[1, 0]], [[1, 0]]])
    binary = SimpleNamespace(kind="segmentation", target="binary", outputs=1, fit="resize")
    several = SimpleNamespace(kind="segmentation", target="multiclass", outputs=2, fit="resize")
    assert [answer.flatten().tolist() for answer in answers_of(binary, targets)][:3] == [[0.0], [1.0], [1.0, 0.0]]  # type: ignore[arg-type]
    assert [answer.flatten().tolist() for answer in answers_of(several, targets)] == [[1, 0], [0, 1], [0, 1, 1, 0]]  # type: ignore[arg-type]
    binary.fit = "patch"
    assert len(list(answers_of(binary, [targets[0], targets[1][:, :1]]))) == 2, "masks of many sizes have no mean"  # type: ignore[arg-type]


def test_masks_that_are_read_one_by_one_give_the_same_answers() -> None:
    """A mean mask does not depend on whether masks are in memory."""
    masks = torch.rand(7, 16, 16, generator=torch.Generator().manual_seed(0)).gt(0.6).long()
    several: dict[str, Any] = {"target": "multiclass", "labels": ["background", "square"]}
    for changes in ({}, several):
        at_once, one_by_one = (list(answers_of(small_task(**changes), targets)) for targets in (masks, LazyTensors(7, masks.__getitem__)))
        assert len(at_once) == len(one_by_one) > 2 and all(map(torch.equal, at_once, one_by_one))
    binary = list(answers_of(small_task(), masks))
    assert all(
        torch.equal(answer[0], (masks.float().mean(dim=0) > share).float())
        for answer, share in zip(binary[2:], (0.1, 0.2, 0.3, 0.4, 0.5), strict=True)
    )
