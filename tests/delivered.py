"""What a run delivered, as the tests compare it."""

from pathlib import Path

import torch

from medflare.inference.deployed import load_model


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of every model that a run left."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.rglob("model.safetensors")):
        for entry, state in load_model(file.parent).message.states.items():
            found |= {f"{file.parent.relative_to(folder)}:{entry}:{name}": tensor for name, tensor in state.items()}
    return found
