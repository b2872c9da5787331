"""What FedDAG's generator is for: images that have the same class and other features.

That the model is better at unseen sites does not show in generated federations (docs/results.md); here is what does.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from medflare.federation.local.loop import run_local
from medflare.federation.outcome import StepReport

CAP = 0.1  # hyper-parameter m


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_generated_images_differ_stay_classified_and_features_move_less_than_the_cap(
    seed: int, tmp_path: Path
) -> None:
    losses: dict[str, Any] = {}

    def observe(report: StepReport) -> None:
        if report.step.phase == "train":
            losses.update({site: meta["losses"] for site, meta in report.meta.items()})

    sites = ["A", "B", "C"]
    run_local(
        "feddag",
        "mechanisms/shifted_contrast",
        sites,
        rounds=5,
        seed=seed,
        resplit=seed,
        out=tmp_path,
        observe=observe,
    )
    assert sorted(losses) == sites
    for last in losses.values():
        assert 0 < last["discrepancy"] < CAP
        assert last["generator_task"] <= last["task"] + 0.1
        assert last["generator_task"] < 1.0, "chance is log 3 = 1.1"
    for site in sites:
        with Image.open(tmp_path / "sites" / site / "pictures" / "generated.png") as picture:
            images, _, generated = np.split(np.asarray(picture, float), 3)
        assert np.abs(generated - images).mean() >= 0.1 * images.std()
