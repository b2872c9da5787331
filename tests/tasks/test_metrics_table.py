"""The names of metrics, and which way is better."""

import pytest
import torch

from helpers.picture_sites import CLASSIFICATION, SEGMENTATION
from helpers.small_tasks import score
from medflare.core.errors import ConfigError
from medflare.core.packages import installed
from medflare.tasks.config import load_task
from medflare.tasks.metrics_table import METRICS, metrics_of, selection_metrics


def test_every_metric_belongs_to_one_kind_of_task() -> None:
    assert metrics_of("segmentation") == ("dice", "iou", "hd95")
    assert metrics_of("classification") == ("accuracy", "balanced_accuracy", "f1_macro", "auc_macro")
    assert metrics_of("segmentation", spatial_dims=3) == ("dice", "iou", "hd95_mm", "surface_dice")
    assert {*metrics_of("segmentation"), *metrics_of("segmentation", 3), *metrics_of("classification")} == set(METRICS)


def test_models_are_selected_by_what_is_higher_where_better() -> None:
    assert selection_metrics("segmentation") == ("dice", "iou")
    assert selection_metrics("classification") == metrics_of("classification")
    assert [name for name, metric in METRICS.items() if metric.lower_is_better] == ["hd95", "hd95_mm"]


def test_every_metric_of_the_table_can_be_computed() -> None:
    assert installed("scipy")
    mask = torch.zeros(2, 8, 8, dtype=torch.long)
    mask[:, 2:5, 2:5] = 1
    scores = score(mask[:, None].float(), mask, ["a", "b"], load_task(SEGMENTATION), metrics_of("segmentation"))
    assert scores.values == {"dice": 1.0, "iou": 1.0, "hd95": 0.0}
    labels = torch.tensor([0, 1, 2])
    scores = score(torch.eye(3), labels, ["a", "b", "c"], load_task(CLASSIFICATION), metrics_of("classification"))
    assert scores.values == dict.fromkeys(metrics_of("classification"), 1.0)


@pytest.mark.parametrize("settings", [SEGMENTATION, CLASSIFICATION])
def test_a_metric_that_nobody_computes_is_refused(settings: dict[str, object]) -> None:
    task = load_task(settings)
    probabilities, truth = (
        (torch.ones(1, 1, 8, 8), torch.ones(1, 8, 8).long()) if task.kind == "segmentation" else (torch.eye(3), torch.arange(3))
    )
    with pytest.raises(ConfigError, match="dise"):
        score(probabilities, truth, ["p"] * len(truth), task, ["dise"])
