import torch

from medflare.core.rng import (
    derived_seed,
    numpy_generator,
    numpy_random_state,
    seeded,
    torch_generator,
)


def test_derived_seed_is_a_fixed_function_of_its_keys() -> None:
    # Written down once: if these numbers change, no earlier run can be repeated.
    assert derived_seed(0) == 4761921975702974394
    assert derived_seed(1, "CS", 3, "shuffle") == 8620250998237654061
    assert 0 <= derived_seed(2**62, "x") < 2**63


def test_every_key_counts_and_so_do_their_order_and_type() -> None:
    keys: list[tuple[int | str, ...]] = [
        (0,),
        (1,),
        (0, 1),
        (1, 0),
        (0, "1"),
        (0, 1, "a"),
        (0, "a", 1),
        (0, "a1"),
        (0, "a", "1"),
        (0, ""),
    ]
    assert len({derived_seed(int(seed), *more) for seed, *more in keys}) == len(keys)


def test_generators_repeat_themselves() -> None:
    for draw in (
        lambda *keys: torch.rand(4, generator=torch_generator(*keys)).tolist(),
        lambda *keys: numpy_generator(*keys).random(4).tolist(),
        lambda *keys: numpy_random_state(*keys).random(4).tolist(),
    ):
        assert draw(1, "A") == draw(1, "A") != draw(1, "B")


def test_seeded_gives_the_same_initial_weights_and_leaves_the_global_generator_alone() -> None:
    before = torch.random.get_rng_state()
    with seeded(3, "initial"):
        first = torch.nn.Linear(4, 4).weight.detach().clone()
    torch.testing.assert_close(torch.random.get_rng_state(), before, rtol=0, atol=0)
    torch.rand(17)
    with seeded(3, "initial"):
        assert torch.equal(torch.nn.Linear(4, 4).weight, first)
    with seeded(4, "initial"):
        assert not torch.equal(torch.nn.Linear(4, 4).weight, first)
