"""Schedule, clipping, sampling, and MONAI's network, loss and optimizer by name, in runs of the plain loop."""

from pathlib import Path
from typing import Any

import pytest

import medflare
from helpers.small_tasks import tiny_phantom
from medflare.federation.local.loop import resume_local
from medflare.training.site import Site

NAMED: dict[str, Any] = {
    "network": {"name": "BasicUNet", "features": [4, 4, 4, 4, 4, 4], "norm": "batch"},
    "loss": {"name": "DiceFocalLoss"},
    "optimizer": {"name": "NAdam", "lr": 0.01},
    "schedule": {"name": "cosine", "warmup_rounds": 1},
    "clip": {"norm": 1.0},
    "sampling": "balanced",
    "augment": [{"name": "RandGridDistortion", "prob": 0.5}, {"name": "RandGibbsNoise", "prob": 0.5}],
}


@pytest.mark.parametrize("method", ["fedsm", "grace", "prr"])
def test_methods_train_with_monais_network_loss_and_optimizer(method: str) -> None:
    results = medflare.run_local(method, tiny_phantom(**NAMED), 2, rounds=1, seed=0)
    assert results["status"] == "COMPLETED", results["reason"]


def test_the_learning_rate_follows_the_schedule_after_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates: list[float] = []
    build = Site.optimizer

    def noted(site: Site, *given: Any, **override: Any) -> Any:
        optimizer = build(site, *given, **override)
        rates.append(optimizer.param_groups[0]["lr"])
        return optimizer

    monkeypatch.setattr(Site, "optimizer", noted)
    task = tiny_phantom(optimizer={"name": "sgd", "lr": 1.0}, schedule={"name": "polynomial", "power": 1.0})

    class Dead(Exception):
        pass

    def die(line: str) -> None:
        if len(rates) >= 4:
            raise Dead

    with pytest.raises(Dead):
        medflare.run_local("fedavg", task, 2, rounds=4, seed=0, out=tmp_path, say=die)
    assert rates == [1.0, 1.0, 0.75, 0.75]
    resume_local(tmp_path)
    assert rates[-4:] == [0.5, 0.5, 0.25, 0.25]
