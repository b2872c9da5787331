"""The pull towards a shared model: by hand, as the gradient of what it stands for, and in a training loop."""

import torch
from torch import nn

from medflare.methods.parts.proximal import proximal_gradients, proximal_term


def test_it_is_the_gradient_of_half_the_squared_distance() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(3, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    anchor = [torch.randn(3, generator=generator, dtype=torch.float64) for _ in range(2)]
    plain = torch.autograd.grad(torch.stack([(w**4).sum() for w in weights]).sum(), weights)
    terms = [(w**4).sum() + 0.35 * (w - a).square().sum() for w, a in zip(weights, anchor, strict=True)]
    penalised = torch.stack(terms).sum()
    for found, expected in zip(proximal_gradients(plain, weights, anchor, 0.7), torch.autograd.grad(penalised, weights), strict=True):
        torch.testing.assert_close(found, expected)


def test_pull_changes_what_has_a_gradient_and_takes_a_gradient() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1))
    for parameter in model[1].parameters():
        parameter.requires_grad_(False)
    anchor = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    gradient_hook = proximal_term(model, anchor, 2.0)
    for tensor in anchor.values():
        tensor.zero_()  # what becomes of the anchor afterwards does not matter
    gradient_hook()
    assert all(parameter.grad is None for parameter in model.parameters()), "nothing was trained, so nothing is drawn"
    for parameter in model[0].parameters():
        parameter.grad = torch.zeros_like(parameter)
    gradient_hook()
    for parameter in model[0].parameters():
        assert parameter.grad is not None and not parameter.grad.requires_grad
        torch.testing.assert_close(parameter.grad, torch.full_like(parameter, -2.0))
    assert all(parameter.grad is None for layer in list(model)[1:] for parameter in layer.parameters())
