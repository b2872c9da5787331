"""What a site has given away of its patients' privacy: every noisy release, counted once and for good.

A ledger is kept apart from what a site algorithm remembers. A step that is asked again starts from an earlier state of the algorithm, but
the first answer may have left the site: nothing is ever taken off a ledger.
"""

import fcntl
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from medflare.core.errors import PrivacyError
from medflare.core.message import Message
from medflare.core.store import MemoryStore, StateStore, Store, make_folder, own_opener
from medflare.data.local import PrivacyLimit


class Release(NamedTuple):
    """Steps of a Gaussian mechanism on Poisson samples.

    Attributes:
        noise: standard deviation, in units of the largest contribution of one patient.
        rate: probability with which a patient joins a step.
        steps: how many.
    """

    noise: float
    rate: float
    steps: int


Accountant = Callable[[Sequence[Release], float], float]  # (releases, delta) -> epsilon


class Ledger:
    """Releases in the order in which they were counted, read and written afresh every time: another process may go on with it."""

    def __init__(self, store: Store, name: str = "privacy"):
        self._store = store
        self._name = name

    def releases(self) -> list[Release]:
        """Everything counted so far.

        Raises:
            StateError: the stored ledger is damaged.
        """
        message = self._store.load(self._name)
        return [] if message is None else [Release(*entry) for entry in message.meta["releases"]]

    def add(self, release: Release) -> None:
        """Count a release; it is on disk, where the store is, when this returns."""
        releases = self.releases()
        if releases and releases[-1][:2] == release[:2]:
            release = release._replace(steps=release.steps + releases.pop().steps)
        self._store.save(self._name, Message({}, {"releases": [list(entry) for entry in [*releases, release]]}))

    def clear(self) -> None:
        """A new run begins, with an account of its own."""
        self._store.delete(self._name)


@dataclass(frozen=True)
class Budget:
    """The most that a site gives away over all jobs, by its own decision.

    Attributes:
        epsilon: limit of the privacy loss ε at `delta`.
        folder: where the site's ledger lies, for all jobs; losing it is losing count.
        site: names the ledger: several sites may share a folder on one machine.
    """

    epsilon: float
    delta: float
    folder: Path
    site: str

    @property
    def ledger(self) -> Ledger:
        """The site's ledger in `folder`, over all jobs."""
        return Ledger(StateStore(self.folder), f"privacy-{self.site}")

    def charge(self, release: Release, epsilon_of: Accountant) -> None:
        """Count a release that is about to happen.

        Raises:
            PrivacyError: it would exceed the budget; nothing is counted then.
        """
        with self._alone():
            total = epsilon_of([*self.ledger.releases(), release], self.delta)
            if not total <= self.epsilon:  # not a number is too much
                raise PrivacyError(
                    f"site {self.site} does not train: the round would bring it to ε = {total:.3g} at δ = {self.delta:g} over all jobs, "
                    f"its own budget is {self.epsilon:g}"
                )
            self.ledger.add(release)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Two jobs that run at the same time must not both spend the last of the budget."""
        make_folder(self.folder)
        with open(self.folder / f".privacy-{self.site}.lock", "w", opener=own_opener) as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # released with the file
            yield


def budget_of(limit: PrivacyLimit | None, site: str, folder: Path) -> Budget | None:
    """A site's budget by its own settings, None where it has set none."""
    if limit is None:
        return None
    return Budget(limit.epsilon, limit.delta, Path(limit.ledger or folder).expanduser(), site)


@dataclass(frozen=True)
class Account:
    """What a site gives away in one run, and how much it may.

    Attributes:
        ledger: of this run.
        budget: over all runs; None for no limit.
    """

    ledger: Ledger = field(default_factory=lambda: Ledger(MemoryStore()))
    budget: Budget | None = None

    def charge(self, release: Release, epsilon_of: Accountant) -> None:
        """Count a release that is about to happen.

        Raises:
            PrivacyError: it would exceed the budget; nothing is counted then.
        """
        if self.budget is not None:
            self.budget.charge(release, epsilon_of)
        self.ledger.add(release)
