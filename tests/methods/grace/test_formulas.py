"""The formulas of GRACE: reference numbers, hand-computed values and degenerate cases."""

import math
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from helpers.fixture_types import Golden
from medflare.core.errors import UpdateError
from medflare.core.states import StateDict
from medflare.methods.grace import formulas as grace

P = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
GRANULARITIES, CORAL_FORMS = map(get_args, (grace.Granularity, grace.CoralForm))
PARAMETERS = ["conv1.weight", "conv1.bias", "bn1.weight", "bn1.bias", "fc.weight", "fc.bias"]


def assert_close(actual: Any, expected: Any, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    np.testing.assert_allclose(
        torch.as_tensor(actual).detach().numpy(), np.asarray(expected), rtol=rtol, atol=atol
    )


def flatten(state: StateDict, names: list[str]) -> Tensor:
    """The named entries as one float64 vector."""
    return torch.cat([state[name].double().flatten() for name in names])


def matrix(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


@pytest.fixture
def server(golden: Golden) -> tuple[Any, ...]:
    """(global state, site -> state, weight by site, the reference numbers)"""
    numbers = {key.removeprefix("pos/"): value for key, value in golden("grace_server").items()}

    def state(folder: str) -> StateDict:
        state = {}
        for key, value in numbers.items():
            if key.startswith(f"{folder}/"):
                state[key.removeprefix(f"{folder}/")] = torch.from_numpy(value)
        return state

    sites = {f"c{place}": state(f"c{place}") for place in range(4)}
    return state("global_in"), sites, dict(zip(sites, numbers["p"], strict=True)), numbers


class TestConsistencyWeights:
    @pytest.mark.parametrize(
        ("include_self", "key"),
        [(True, "ref64_paper_incl_self"), (False, "ref64_official_excl_self")],
    )
    def test_reference(self, server: Any, include_self: bool, key: str) -> None:
        model, states, p, numbers = server
        deltas = torch.stack([flatten(state, PARAMETERS) for state in states.values()]) - flatten(
            model, PARAMETERS
        )
        gram = (deltas @ deltas.T)[None]
        assert_close(grace.similarity(gram), numbers[f"{key}_sim"])
        assert_close(
            grace.average_consistency(grace.similarity(gram), include_self),
            numbers[f"{key}_avgcos"],
        )
        weights = grace.consistency_weights(
            deltas, torch.tensor(list(p.values())), include_self=include_self
        )
        assert_close(weights, numbers[f"{key}_weights"])
        assert_close(weights @ deltas, numbers[f"{key}_agg_delta_flat"])
        moved, _ = grace.consistent_aggregate(
            model, states, p, PARAMETERS, include_self=include_self
        )
        assert_close(flatten(moved, PARAMETERS), numbers[f"{key}_global_out_flat"])

    @pytest.mark.parametrize("granularity", GRANULARITIES)
    def test_published_granularities(self, server: Any, granularity: str) -> None:
        model, states, p, numbers = server
        deltas = torch.stack([flatten(state, PARAMETERS) for state in states.values()]) - flatten(
            model, PARAMETERS
        )
        sizes = [model[name].numel() for name in PARAMETERS]
        options: dict[str, Any] = {"include_self": False, "granularity": granularity}
        expected = numbers[f"official_{granularity}_weights"]
        assert_close(
            grace.consistency_weights(
                deltas, torch.tensor(list(p.values())), sizes=sizes, **options
            ),
            expected,
        )
        moved, weights = grace.consistent_aggregate(model, states, p, PARAMETERS, **options)
        assert_close(list(weights.values()), expected)
        for name in [*PARAMETERS, "bn1.running_mean", "bn1.running_var"]:
            assert_close(moved[name], numbers[f"official_{granularity}_global_out_slr1.0/{name}"])
        # The largest; the published code truncates a mean.
        assert moved["bn1.num_batches_tracked"] == 13

    def test_published_server_rate(self, server: Any) -> None:
        model, states, p, numbers = server
        moved, _ = grace.consistent_aggregate(
            model, states, p, PARAMETERS, include_self=False, server_rate=0.5
        )
        for name in (
            "conv1.weight",
            "conv1.bias",
            "fc.weight",
            "fc.bias",
            "bn1.running_mean",
            "bn1.running_var",
        ):
            assert_close(moved[name], numbers[f"official_total_global_out_slr0.5/{name}"])
        # BatchNorm's affine weights are trained, so they step by the server rate too; the published code overwrites them
        whole, _ = grace.consistent_aggregate(model, states, p, PARAMETERS, include_self=False)
        assert_close(moved["bn1.weight"], (model["bn1.weight"] + whole["bn1.weight"]) / 2)

    def test_by_hand(self) -> None:
        # cosines: 1 between the first two, 0 with the third.
        deltas = matrix([1, 0], [1, 0], [0, 2])
        p = torch.tensor([1.0, 2.0, 1.0])
        # C = (2, 2, 1) / 3.
        assert_close(grace.consistency_weights(deltas, p), np.array([2, 4, 1]) / 7)
        # others only: c = (.5, .5, 0); the zero shifts all by .001
        assert_close(
            grace.consistency_weights(deltas, p, include_self=False),
            np.array([0.501, 1.002, 0.001]) / 1.504,
        )

    @pytest.mark.parametrize("include_self", [True, False])
    @pytest.mark.parametrize("granularity", GRANULARITIES)
    @pytest.mark.parametrize(
        "deltas",
        [
            pytest.param(torch.full((4, 8), 0.25), id="identical"),
            pytest.param(torch.eye(4).repeat(1, 2), id="orthogonal"),
            pytest.param(torch.zeros(4, 8), id="no update"),
            pytest.param(torch.tensor([1.0, 1, -1, -1])[:, None].repeat(1, 8), id="opposite pairs"),
        ],
    )
    def test_equal_cosines_give_p(
        self, deltas: Tensor, granularity: str, include_self: bool
    ) -> None:
        options: dict[str, Any] = {"include_self": include_self, "granularity": granularity}
        assert_close(grace.consistency_weights(deltas, P, sizes=[4, 4], **options), P, rtol=1e-12)

    def test_consistency_never_decreases(self) -> None:
        """Eq. 4: sum p' c >= sum p c for positive c and any p."""
        generator = torch.Generator().manual_seed(4)
        for _ in range(20):
            c = torch.rand(4, generator=generator, dtype=torch.float64) + 1e-3
            p = torch.rand(4, generator=generator, dtype=torch.float64)
            p = p / p.sum()
            assert grace.reweighted(c, p) @ c >= p @ c - 1e-12

    def test_errors_name_the_offender(self) -> None:
        with pytest.raises(ValueError, match="parameters"):
            grace.consistent_aggregate(
                {"w": torch.zeros(2)}, {"A": {"w": torch.zeros(2)}}, {"A": 1.0}, []
            )
        deltas = torch.ones(3, 2)
        deltas[1, 0] = math.nan
        with pytest.raises(UpdateError, match="1"):
            grace.consistency_weights(deltas, torch.ones(3))
        states = {"A": {"w": torch.ones(2)}, "B": {"w": torch.tensor([1.0, math.inf])}}
        with pytest.raises(UpdateError, match="B"):
            grace.consistent_aggregate({"w": torch.zeros(2)}, states, {"A": 1.0, "B": 1.0}, ["w"])
        with pytest.raises(ValueError, match="0"):
            grace.consistency_weights(torch.ones(2, 2), torch.zeros(2))


@pytest.mark.parametrize("rate", [1.0, 0.5])
def test_the_global_model_keeps_its_dtype(rate: float) -> None:
    states = {
        site: {"w": torch.full((2,), value).half()} for site, value in (("A", 1.0), ("B", 3.0))
    }
    moved, _ = grace.consistent_aggregate(
        {"w": torch.zeros(2)}, states, {"A": 1.0, "B": 1.0}, ["w"], server_rate=rate
    )
    assert moved["w"].dtype == torch.float32 and moved["w"].tolist() == [2 * rate] * 2


class TestAlignment:
    @pytest.fixture
    def features(self, golden: Golden) -> tuple[Tensor, Tensor, dict[str, np.ndarray]]:
        numbers = golden("grace_align")
        return (
            torch.from_numpy(numbers["x"]),
            torch.from_numpy(numbers["y"]).requires_grad_(),
            numbers,
        )

    def test_reference(self, features: Any) -> None:
        x, y, numbers = features
        assert_close(grace.coral(x, y), numbers["coral_domainbed"])
        assert_close(grace.coral(x, y, form="deep_coral"), numbers["coral_deep"])
        assert_close(grace.mmd(x, y), numbers["mmd_domainbed_gaussian"])

    def test_adversarial_reference(self, features: Any) -> None:
        x, y, numbers = features
        discriminator = nn.Linear(5, 1).double()
        discriminator.load_state_dict(
            {
                "weight": torch.from_numpy(numbers["adv_w"])[None],
                "bias": torch.from_numpy(numbers["adv_b"]).reshape(1),
            }
        )
        loss = grace.adversarial(discriminator, x, y)
        loss.backward()
        assert_close(loss, numbers["adv_bce_global1_local0"])
        assert_close(y.grad, numbers["adv_grad_on_local_features_reversed"])
        # the discriminator's own gradient is not reversed: a step along it lowers the loss
        with torch.no_grad():
            for parameter in discriminator.parameters():
                assert parameter.grad is not None
                parameter.sub_(0.01 * parameter.grad)
        assert grace.adversarial(discriminator, x, y) < loss

    def test_half_batch_of_one(self) -> None:
        x = torch.ones(1, 3)
        y = torch.zeros(1, 3, requires_grad=True)
        for form in CORAL_FORMS:
            loss = grace.coral(x, y, form)
            assert loss.item() == 0
            assert torch.autograd.grad(loss, y)[0].tolist() == [[0, 0, 0]]
        assert grace.mmd(x, x).item() == 0 and 0 < grace.mmd(x, y).item() < 14


class TestMetaTrained:
    def test_reference(self, golden: Golden) -> None:
        numbers = {key: torch.from_numpy(value) for key, value in golden("grace_client").items()}
        network = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        state = {name: numbers[f"init/{name}"] for name in network.state_dict()}
        frozen = {name: numbers[f"global/{name}"] for name in state}
        network.load_state_dict(state)
        parameters = dict(network.named_parameters())
        optimizer = torch.optim.SGD(parameters.values(), lr=0.05)

        def features(weights: Any, images: Tensor) -> Tensor:
            return torch.tanh(F.linear(images, weights["0.weight"], weights["0.bias"]))

        def task_loss(weights: Any, half: str) -> Tensor:
            return F.cross_entropy(
                functional_call(network, weights, (numbers[f"x_{half}"],)), numbers[f"y_{half}"]
            )

        for step in range(2):
            adapted = grace.meta_trained(parameters, lambda weights: task_loss(weights, "tr"), 0.05)
            if step == 0:
                for name in state:
                    assert_close(adapted[name], numbers[f"sgd/theta_prime/{name}"])
            loss = task_loss(adapted, "te") + grace.coral(
                features(frozen, numbers["x_te"]), features(adapted, numbers["x_te"])
            )
            assert_close(loss, numbers[f"sgd/meta_loss_iter{step}"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            for name in state:
                assert_close(parameters[name], numbers[f"sgd/after_iter{step}/{name}"])

    def test_the_inner_gradient_is_a_constant(self) -> None:
        # L = w^4 on both halves, eta = .01, w = 1: w' = 1 - .04, and the gradient is 4 w'^3 without the factor 1 - .01 * 12 w^2
        theta = {"w": torch.tensor(1.0, dtype=torch.float64, requires_grad=True)}
        adapted = grace.meta_trained(theta, lambda weights: weights["w"] ** 4, 0.01)
        (gradient,) = torch.autograd.grad(adapted["w"] ** 4, theta["w"])
        assert_close(gradient, 4 * 0.96**3)


class TestADistance:
    def test_same_and_separable_features(self) -> None:
        x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
        assert grace.a_distance(x, x.clone()) == pytest.approx(0, abs=1e-9)
        assert grace.a_distance(x, x + 20) == pytest.approx(2)
        near = grace.a_distance(x, x + 0.5)
        assert 0 < near < grace.a_distance(x, x + 1.5) < 2

    def test_is_seeded_and_nan_for_one_image(self) -> None:
        x = torch.randn(20, 2, generator=torch.Generator().manual_seed(0))
        assert grace.a_distance(x, x * 2, seed=1) == grace.a_distance(x, x * 2, seed=1)
        assert math.isnan(grace.a_distance(x[:1], x[:1]))
