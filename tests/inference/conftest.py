"""A small federation on disk, trained once per test session and method."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from torch import Tensor, nn

from helpers.small_tasks import small_task
from medflare import run_local
from medflare.inference.deployed import StoredModel, load_model, plain_message, save_model
from medflare.networks.catalogue import initial_network
from medflare.tasks.config import TaskConfig

Runs = Callable[..., Path]  # type of `trained`
Models = Callable[..., Path]  # type of `untrained`
SIDE = 16


class Answer(nn.Module):
    """A network that is a function of its images."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, images: Tensor) -> Tensor:
        return self.function(images)


def rows_of(out: Path) -> list[dict[str, str]]:
    """The table that `predict` writes."""
    with (out / "predictions.csv").open(newline="") as file:
        return list(csv.DictReader(file))


SEGMENTATION = small_task(label_values={"square": [3, 4]}, loss={"name": "dice_ce"})
CLASSIFICATION = small_task("classification")


@pytest.fixture
def unfitted() -> StoredModel:
    """A model without weights, for a builder of the test's own."""
    return StoredModel(SEGMENTATION, plain_message({}), {})


@pytest.fixture(scope="session")
def routed(trained: Runs) -> StoredModel:
    """IOP-FL's model of the outside site O."""
    return load_model(
        trained("iop_fl", outside=["O"], route_epochs=2, route_lr=0.1) / "sites/O/deployed"
    )


def picture(random: np.random.Generator, level: int) -> tuple[np.ndarray, np.ndarray]:
    """A noisy grey picture with a bright square, and where it is, both uint8 (16, 16)."""
    mask = np.zeros((SIDE, SIDE), np.uint8)
    row, column = random.integers(1, SIDE - 8, 2)
    mask[row : row + 6, column : column + 6] = 1
    noise = random.integers(0, 40, (SIDE, SIDE))
    return (noise + 50 * level + 90 * mask).astype(np.uint8), mask


@pytest.fixture(scope="session")
def data_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sites A, B and O, each brighter than the one before it, with 9 test images in test/, in the datalist's order by name."""
    root = tmp_path_factory.mktemp("data")
    for place, site in enumerate("ABO"):
        random = np.random.default_rng(place)
        listed: dict[str, list[dict[str, Any]]] = {}
        for split, count in (("training", 8), ("validation", 4), ("test", 9)):
            (root / site / split).mkdir(parents=True)
            listed[split] = []
            for number in range(count):
                pixels, mask = picture(random, number % 3 + place)
                name = f"{number}.png"
                Image.fromarray(pixels).save(root / site / split / name)
                (root / site / "masks" / split).mkdir(parents=True, exist_ok=True)
                Image.fromarray(3 * mask).save(root / site / "masks" / split / name)
                entry: dict[str, Any] = {
                    "image": f"{split}/{name}",
                    "label": f"masks/{split}/{name}",
                    "patient": f"{split}-{number // 2}",
                }
                listed[split].append(entry)
        (root / site / "datalist.json").write_text(json.dumps(listed))
        for entries in listed.values():
            for number, entry in enumerate(entries):
                entry["label"] = number % 3
        (root / site / "grades").mkdir()
        (root / site / "grades" / "datalist.json").write_text(
            json.dumps(listed).replace('"image": "', '"image": "../')
        )
    return root


@pytest.fixture(scope="session")
def trained(data_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """`trained("fedsm", outside=["O"], ...)`: the folder of a finished run of one round over the sites A and B."""
    known: dict[str, Path] = {}

    def run(method: str, task: TaskConfig = SEGMENTATION, **settings: Any) -> Path:
        key = repr((method, task.name, sorted(settings.items())))
        if key not in known:
            known[key] = tmp_path_factory.mktemp(method)
            results = run_local(
                method,
                task,
                ["A", "B"],
                rounds=1,
                seed=0,
                data_root=data_root,
                out=known[key],
                **settings,
            )
            assert results["status"] == "COMPLETED", results["reason"]
        return known[key]

    return run


@pytest.fixture
def untrained(tmp_path: Path) -> Models:
    """The folder of a delivered plain model with initial weights."""

    def save(task: TaskConfig = SEGMENTATION) -> Path:
        folder = tmp_path / "models" / f"{task.kind}-{task.target}"
        save_model(
            folder,
            task,
            plain_message(initial_network(task, seed=5).state_dict()),
            {"method": "fedavg", "site": "A"},
        )
        return folder

    return save
