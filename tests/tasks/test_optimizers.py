import pytest
import torch
from torch import nn

from medflare.core.errors import ConfigError
from medflare.tasks.optimizers import SCHEDULES, build_optimizer, build_schedule, check_optimizer
from medflare.training.epochs import pack_optimizer, unpack_optimizer

BY_NAME = [
    "Adam",
    "AdamW",
    "NAdam",
    "RAdam",
    "Adagrad",
    "Adadelta",
    "Adamax",
    "RMSprop",
    "Rprop",
    "ASGD",
    "SGD",
    "Adafactor",
]


def test_short_names_build_torchs_optimizers() -> None:
    for name, expected in (
        ("adam", torch.optim.Adam),
        ("adamw", torch.optim.AdamW),
        ("sgd", torch.optim.SGD),
    ):
        optimizer = build_optimizer(
            {"name": name, "lr": 0.25, "weight_decay": 0.5}, [nn.Parameter(torch.ones(2))], "task x"
        )
        assert (
            type(optimizer) is expected
            and optimizer.defaults["lr"] == 0.25
            and optimizer.defaults["weight_decay"] == 0.5
        )


@pytest.mark.parametrize("name", BY_NAME)
def test_moments_continue_in_another_process(name: str) -> None:
    settings = {
        "name": name,
        "lr": 0.1,
        **({"momentum": 0.9} if name in ("SGD", "RMSprop") else {}),
    }

    def steps(optimizer: torch.optim.Optimizer, weight: nn.Parameter, *gradients: float) -> None:
        for gradient in gradients:
            weight.grad = torch.full_like(weight, gradient)
            optimizer.step()

    first = nn.Parameter(torch.ones(2, 2))
    optimizer = build_optimizer(settings, [first], "task x")
    steps(optimizer, first, 1.0, -0.5)
    second = nn.Parameter(first.detach().clone())
    fresh = build_optimizer(settings, [second], "task x")
    unpack_optimizer(fresh, pack_optimizer(optimizer))
    steps(optimizer, first, 0.25, 0.5)
    steps(fresh, second, 0.25, 0.5)
    assert torch.equal(first, second)


@pytest.mark.parametrize("name", BY_NAME)
def test_values_are_validated_without_building_an_optimizer(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if another torch reads the parameters before it validates the values."""
    monkeypatch.setattr(
        torch.optim.Optimizer, "add_param_group", lambda *_: pytest.fail("an optimizer was built")
    )
    check_optimizer({"name": name, "lr": 0.1}, "task x")
    for wrong in (
        {"lr": -1.0},
        {"lr": 0.1, "weight_decay": -1.0},
        {"lr": "fast"},
        {"lr": 0.1, "momentumm": 0.9},
    ):
        with pytest.raises(ConfigError, match=name):
            check_optimizer({"name": name, **wrong}, "task x")


@pytest.mark.parametrize("name", ["LBFGS", "SparseAdam", "Muon", "adan"])
def test_an_unknown_or_unsupported_optimizer_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        build_optimizer({"name": name, "lr": 0.1}, [nn.Parameter(torch.ones(1))], "task x")


@pytest.mark.parametrize(
    ("clip", "gradient", "expected"),
    [({"norm": 1.0}, [3.0, 4.0], [-0.6, -0.8]), ({"value": 0.5}, [3.0, -0.1], [-0.5, 0.1])],
)
def test_every_step_clips_the_gradients(
    clip: dict[str, float], gradient: list[float], expected: list[float]
) -> None:
    weight = nn.Parameter(torch.zeros(2))
    optimizer = build_optimizer({"name": "sgd", "lr": 1.0}, [weight], "task x", **clip)
    weight.grad = torch.tensor(gradient)
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.tensor(expected))


def factors(rounds: int, **settings: object) -> list[float]:
    return [build_schedule(settings).rate_factor(round, rounds) for round in range(rounds)]


def test_formulas_of_the_schedules() -> None:
    assert factors(4, name="constant") == [1.0] * 4
    assert factors(5, name="step", every=2, factor=0.5) == [1.0, 1.0, 0.5, 0.5, 0.25]
    assert factors(4, name="cosine") == pytest.approx([1.0, 0.853553, 0.5, 0.146447], abs=1e-6)
    assert factors(4, name="cosine", minimum=0.5)[2] == pytest.approx(0.75)
    assert factors(4, name="polynomial", power=2.0) == pytest.approx([1.0, 0.5625, 0.25, 0.0625])


@pytest.mark.parametrize("name", SCHEDULES)
def test_warm_up_comes_before_every_schedule(name: str) -> None:
    warmed = factors(6, name=name, warmup_rounds=2)
    assert warmed[:2] == pytest.approx([1 / 3, 2 / 3])
    assert warmed[2:] == factors(4, name=name)


def test_after_the_last_round_the_factor_stays_and_a_warm_up_may_take_all_rounds() -> None:
    cosine = build_schedule({"name": "cosine"})
    assert cosine.rate_factor(9, 4) == cosine.rate_factor(3, 4) and cosine.rate_factor(0, 0) == 1
    assert factors(2, name="cosine", warmup_rounds=3) == [0.25, 0.5]
