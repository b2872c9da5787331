"""What a run delivered, as the tests compare it."""

from pathlib import Path
from typing import Any

import torch

from medflare.inference.deployed import StoredModel, load_model
from medflare.inference.inputs import find_inputs
from medflare.inference.predict import adapted, fit, predictions, prepare
from medflare.methods.catalogue import build_deployed


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of every model that a run left."""
    actual: dict[str, torch.Tensor] = {}
    for file in sorted(folder.rglob("model.safetensors")):
        for entry, state in load_model(file.parent).message.states.items():
            actual |= {
                f"{file.parent.relative_to(folder)}:{entry}:{name}": tensor
                for name, tensor in state.items()
            }
    return actual


def same_weights(first: Path, second: Path) -> bool:
    """Whether two runs left the same models, bit for bit."""
    one = weights(first)
    other = weights(second)
    return (
        len(one) > 0
        and one.keys() == other.keys()
        and all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    )


def probabilities(
    stored: StoredModel, images: Path, tmp_path: Path, adapt: str = "auto"
) -> torch.Tensor:
    """What `predict` computes for a folder, before it is written."""
    inputs, _ = find_inputs([images], tmp_path / "nowhere")
    prepared = [prepare(source, stored.task) for source in inputs]
    stored = adapted(stored, build_deployed, adapt)
    model: Any = stored.build(build_deployed).eval()
    if hasattr(model, "adapt") and adapt != "none":
        fit(model, prepared, stored.task, "cpu", stored.kind)
    return torch.cat([actual.probabilities for actual in predictions(model, prepared, stored.task)])
