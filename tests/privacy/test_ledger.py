"""What a site has given away: counted, kept, never taken back, and limited by the site's own budget."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from medflare.core.errors import PrivacyError, StateError
from medflare.core.store import MemoryStore, StateStore
from medflare.data.local import local_settings
from medflare.privacy.ledger import Account, Budget, Ledger, Release, budget_of


def steps_of(releases: Sequence[Release], delta: float) -> float:
    """An accountant that is easy to follow: ε is the number of steps."""
    return float(sum(release.steps for release in releases))


def test_equal_releases_are_joined_and_others_listed() -> None:
    ledger = Ledger(MemoryStore())
    assert ledger.releases() == []
    for release in (
        Release(1.0, 0.1, 3),
        Release(1.0, 0.1, 4),
        Release(2.0, 0.1, 5),
        Release(1.0, 0.1, 6),
    ):
        ledger.add(release)
    assert ledger.releases() == [Release(1.0, 0.1, 7), Release(2.0, 0.1, 5), Release(1.0, 0.1, 6)]


def test_a_damaged_ledger_is_an_error(tmp_path: Path) -> None:
    Ledger(StateStore(tmp_path)).add(Release(1.0, 0.5, 3))
    (file,) = tmp_path.glob("*.safetensors")
    file.write_bytes(file.read_bytes().replace(b"3]", b"1]"))
    with pytest.raises(StateError, match="checksum"):
        Ledger(StateStore(tmp_path)).releases()


def test_a_release_beyond_the_budget_is_refused_and_not_counted(tmp_path: Path) -> None:
    budget = Budget(10.0, 1e-5, tmp_path / "kept", "A")
    budget.charge(Release(1.0, 0.5, 6), steps_of)
    with pytest.raises(PrivacyError, match=r"ε = 12.*10"):
        budget.charge(Release(1.0, 0.5, 6), steps_of)
    budget.charge(Release(1.0, 0.5, 4), steps_of)
    assert budget.ledger.releases() == [Release(1.0, 0.5, 10)]
    with pytest.raises(PrivacyError):
        Budget(10.0, 1e-5, tmp_path, "B").charge(
            Release(0.0, 1.0, 1), lambda releases, delta: float("nan")
        )


def test_concurrent_jobs_cannot_exceed_the_budget(tmp_path: Path) -> None:
    def charge(number: int) -> bool:
        try:
            Budget(20.0, 1e-5, tmp_path, "A").charge(Release(1.0, 0.5, 1), steps_of)
        except PrivacyError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        done = list(pool.map(charge, range(40)))
    assert sum(done) == 20
    assert Budget(20.0, 1e-5, tmp_path, "A").ledger.releases() == [Release(1.0, 0.5, 20)]


def test_a_release_counts_for_the_run_and_for_the_budget(tmp_path: Path) -> None:
    free = Account()
    limited = Account(budget=Budget(7.0, 1e-5, tmp_path, "A"))
    for account in (free, limited):
        account.charge(Release(1.0, 0.5, 6), steps_of)
        assert account.ledger.releases() == [Release(1.0, 0.5, 6)]
    free.charge(Release(1.0, 0.5, 2), steps_of)
    with pytest.raises(PrivacyError):
        limited.charge(Release(1.0, 0.5, 2), steps_of)
    assert limited.ledger.releases() == [Release(1.0, 0.5, 6)], (
        "what is not done is not counted on the run's account either"
    )
    another = Account(budget=limited.budget)
    another.charge(Release(1.0, 0.5, 1), steps_of)
    assert another.ledger.releases() == [Release(1.0, 0.5, 1)], (
        "a new run has an account of its own"
    )
    assert Budget(7.0, 1e-5, tmp_path, "A").ledger.releases() == [Release(1.0, 0.5, 7)], (
        "over all runs"
    )


@pytest.mark.parametrize(
    ("place", "folder"),
    [
        ({}, Path("/own")),
        ({"ledger": "/kept"}, Path("/kept")),
        ({"ledger": "~/kept"}, Path.home() / "kept"),
    ],
)
def test_settings(place: dict[str, str], folder: Path) -> None:
    limit = local_settings({"privacy": {"epsilon": 8, "delta": 1e-5, **place}}).privacy
    assert budget_of(limit, "A", Path("/own")) == Budget(8.0, 1e-5, folder, "A")
    assert budget_of(None, "A", folder) is None and local_settings({}).privacy is None
