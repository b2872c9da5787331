"""The privacy ledger of a site: every noisy release, counted once.

A ledger is stored apart from the site algorithm's memory. A repeated step starts from an earlier
memory, but its first reply may have left the site: a ledger only grows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from medflare.core.errors import PrivacyError
from medflare.core.files import locked
from medflare.core.message import Message
from medflare.core.store import MemoryStore, StateStore, Store
from medflare.data.local import PrivacyLimit
from medflare.training.site import Site


class Release(NamedTuple):
    """Steps of a Gaussian mechanism on Poisson samples, which a patient joins with the probability
    `rate`.

    The standard deviation `noise` is in units of the largest contribution of one patient.
    """

    noise: float
    rate: float
    steps: int


Accountant = Callable[[Sequence[Release], float], float]  # (releases, delta) -> epsilon


def training_patients(site: Site) -> int:
    return len(set(site.data.train.patients))


class Ledger:
    """Releases in order, read from and written to a store every time, since several processes may
    use it.
    """

    def __init__(self, store: Store, name: str = "privacy"):
        self._store = store
        self._name = name

    def releases(self) -> list[Release]:
        """All releases; StateError if the stored ledger is damaged."""
        message = self._store.load(self._name)
        if message is None:
            return []
        return [Release(*entry) for entry in message.meta["releases"]]

    def add(self, release: Release) -> None:
        """Adds a release; it is stored when this returns."""
        releases = self.releases()
        if releases and releases[-1][:2] == release[:2]:
            release = release._replace(steps=release.steps + releases.pop().steps)
        entries = [list(entry) for entry in (*releases, release)]
        self._store.save(self._name, Message({}, {"releases": entries}))


@dataclass(frozen=True)
class Budget:
    """A site's limit over all jobs, by its local settings.

    Attributes:
        epsilon: limit of the privacy loss ε at `delta`.
        folder: of the site's ledger over all jobs.
        site: names the ledger: several sites may share a folder on one machine.
    """

    epsilon: float
    delta: float
    folder: Path
    site: str

    @property
    def ledger(self) -> Ledger:
        return Ledger(StateStore(self.folder), f"privacy-{self.site}")

    def charge(self, release: Release, epsilon_of: Accountant) -> None:
        """Counts a release before it happens; raises PrivacyError, and counts nothing, if it would
        exceed the budget.
        """
        # Two jobs at the same time must not both spend the rest.
        with locked(self.folder / f".privacy-{self.site}.lock"):
            total = epsilon_of([*self.ledger.releases(), release], self.delta)
            if not total <= self.epsilon:  # also if it is NaN
                raise PrivacyError(
                    f"site {self.site} does not train: the round would bring it to "
                    f"ε = {total:.3g} at δ = {self.delta:g} over all jobs, "
                    f"its own budget is {self.epsilon:g}"
                )
            self.ledger.add(release)


def budget_of(limit: PrivacyLimit | None, site: str, folder: Path) -> Budget | None:
    """A site's budget by its local settings, with `folder` as the default place of the ledger; None
    without a limit.
    """
    if limit is None:
        return None
    ledger = Path(limit.ledger or folder).expanduser()
    return Budget(limit.epsilon, limit.delta, ledger, site)


@dataclass(frozen=True)
class Account:
    """The ledger of one run, and the budget over all runs (None: no limit)."""

    ledger: Ledger = field(default_factory=lambda: Ledger(MemoryStore()))
    budget: Budget | None = None

    def steps(self) -> int:
        """Steps of DP-SGD in this run so far."""
        return sum(release.steps for release in self.ledger.releases())

    def charge(self, release: Release, epsilon_of: Accountant) -> None:
        """Counts a release in both ledgers, as `Budget.charge`."""
        if self.budget is not None:
            self.budget.charge(release, epsilon_of)
        self.ledger.add(release)
