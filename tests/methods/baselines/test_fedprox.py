"""FedProx by its formula; μ = 0 is FedAvg, a large μ keeps the model near the global one."""

import numpy as np
import pytest
import torch
from torch import nn

from helpers.fixture_types import Golden
from medflare.core.states import StateDict, copy_state
from medflare.methods.parts.proximal import proximal_term


def loaded(network: nn.Module, numbers: dict[str, np.ndarray], name: str) -> StateDict:
    network.load_state_dict({key: torch.from_numpy(numbers[f"{name}/{key}"]) for key in ("weight", "bias")})
    return copy_state(network.state_dict())


@pytest.mark.parametrize("step", ["official", "ref"])
def test_step_is_the_reference(golden: Golden, step: str) -> None:
    numbers = golden("baselines")
    network = nn.Linear(4, 3)
    anchor = loaded(network, numbers, "anchor")
    loaded(network, numbers, "theta")
    for name, weight in network.named_parameters():
        weight.grad = torch.from_numpy(numbers[f"grad/{name}"])
    proximal_term(network, anchor, 0.1)()
    torch.optim.SGD(network.parameters(), lr=0.1).step()
    for name, weight in network.named_parameters():
        expected = torch.from_numpy(numbers[f"fedprox_step_{step}_lr.1_mu.1/{name}"])
        torch.testing.assert_close(weight.detach(), expected, rtol=1e-5, atol=1e-6)
