"""Threads of OpenMP."""

import pytest

from medflare.core.threads import limit_spinning


@pytest.mark.parametrize(
    "chosen",
    [{}, {"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "7"}, {"OMP_NUM_THREADS": "3"}],
    ids=str,
)
def test_openmp_threads_sleep_soon_unless_the_user_has_chosen(chosen: dict[str, str]) -> None:
    environment = dict(chosen)
    limit_spinning(environment)
    spins = (
        {} if chosen.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} else {"GOMP_SPINCOUNT": "1000"}
    )
    assert environment == chosen | spins
