"""What a site remembers of a run: its algorithm, so that a step can be done again as if it had never been done, and its hours at work.

A step is repeated when too few answers were usable, and when a killed server goes on from its last checkpoint: sites that had
answered that step already must not answer it from a state that has it behind them.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from medflare.core.errors import ConfigError, StateError
from medflare.core.message import Message
from medflare.core.states import StateDict
from medflare.core.store import StateStore, Store
from medflare.federation.exchange import START
from medflare.methods.base import SiteAlgorithm

_PREFIX = "algorithm-"
_MEMBERSHIP = "membership"
_WORK = "work"


class HalfMemory:
    """States of an algorithm, each under the number of the step that it precedes: the newest one and the one before it."""

    def __init__(self, store: Store):
        self.store = store

    def save(self, step: int, state: Message) -> None:
        """Keep `state` as what `step` starts from, and the newest state of an earlier step; nothing else is needed any more."""
        self.store.save(f"{_PREFIX}{step}", state)
        earlier = [kept for kept in self._steps() if kept < step]
        for kept in self._steps():
            if kept != step and kept not in earlier[-1:]:
                self.store.delete(f"{_PREFIX}{kept}")

    def before(self, step: int) -> tuple[int, Message] | None:
        """(step that it precedes, state): the newest state that `step` may start from; None where there is none.

        Raises:
            StateError: it is damaged.
        """
        usable = [kept for kept in self._steps() if kept <= step]
        state = self.store.load(f"{_PREFIX}{usable[-1]}") if usable else None
        return None if state is None else (usable[-1], state)

    def clear(self) -> None:
        """Forget every state: a new run begins."""
        for kept in self._steps():
            self.store.delete(f"{_PREFIX}{kept}")

    def _steps(self) -> list[int]:
        return sorted(int(name.removeprefix(_PREFIX)) for name in self.store.names() if name.startswith(_PREFIX))


class RememberedAlgorithm:
    """A site's algorithm, ready for the step that is asked for: the one of this process, or one made anew from what the store holds.

    Args:
        name: of the site; a state of another site is not taken.
        store: holds the memory of the algorithm, and in which federation the site is a member.
        made: (role, inside sites, what its networks start from) -> a fresh algorithm.
    """

    def __init__(self, name: str, store: Store, made: Callable[[str, tuple[str, ...], StateDict | None], SiteAlgorithm[Any]]):
        self.name, self.store, self.made = name, store, made
        self._memory = HalfMemory(store)
        self._algorithm: SiteAlgorithm[Any] | None = None
        self._precedes = 0  # the step that the half of this process is ready for
        self._steps: int | None = None

    @property
    def steps(self) -> int | None:
        """Steps of the run, as the site was told when it enrolled; None where it was not told."""
        if self._steps is None and (membership := self.store.load(_MEMBERSHIP)) is not None:
            self._steps = membership.meta.get("steps")
        return self._steps

    def begin(self, role: str, sites: tuple[str, ...], start: StateDict | None = None, steps: int | None = None) -> None:
        """A new run: a fresh algorithm, and nothing of an earlier run is remembered.

        Args:
            role: "inside" or "outside".
            sites: the inside sites.
            start: what the task's network starts from; None: a random draw.
            steps: of the run; None: nobody has said.
        """
        self._algorithm, self._precedes = self.made(role, sites, start), 0
        self._memory.clear()
        self._steps = steps
        states = {} if start is None else {START: start}
        self.store.save(_MEMBERSHIP, Message(states, {"site": self.name, "sites": list(sites), "role": role, "steps": steps}))
        self._memory.save(0, self._algorithm.memory)

    @contextmanager
    def ready(self, step: int, *, kept: bool = True) -> Iterator[SiteAlgorithm[Any]]:
        """The half as the last step before `step` left it, for the time of this step.

        Args:
            step: number of the step in the run.
            kept: remember it as the step leaves it; a delivery leaves nothing behind.

        Yields:
            The algorithm; what it raises inside makes the next step start from what was saved.

        Raises:
            StateError: see `recall`.
        """
        algorithm = self.recall(step)
        try:
            yield algorithm
            if kept:
                self._memory.save(step + 1, algorithm.memory)
        except BaseException:
            self._algorithm = None  # half way through a step; the next one starts from what was saved
            raise
        if kept:
            self._precedes = step + 1

    def recall(self, step: int) -> SiteAlgorithm[Any]:
        """The half as the last step before `step` left it.

        Raises:
            StateError: the site has not enrolled, or its state is gone or another site's.
        """
        if self._algorithm is not None and self._precedes <= step:
            return self._algorithm
        membership = self.store.load(_MEMBERSHIP)
        if membership is None:
            raise StateError(
                f"site {self.name} was asked to work before it enrolled, or its state is gone; put back that of the last job in which the "
                "site took part, or start the run afresh"
            )
        owner = membership.meta["site"]
        if owner != self.name:
            raise StateError(f"the state that site {self.name} finds belongs to site {owner}; put each site's state back in its place")
        kept = self._memory.before(step)
        if kept is None:
            raise StateError(f"site {self.name} has lost what it remembered before step {step}; restore its state or restart the job")
        algorithm = self.made(membership.meta["role"], tuple(membership.meta["sites"]), membership.states.get(START))
        self._precedes, memory = kept
        algorithm.restore(memory)
        self._algorithm = algorithm
        return algorithm


class WorkingTime:
    """How long a site has been at work on a run, over all its processes, and the most that it may be by its own settings.

    Time in which it waits for others does not count.

    Args:
        store: keeps the hours from one process to the next; those of a step at which a process was killed are lost.
        minutes: the most of one step; None for no bound.
        hours: the most of the run; None for no bound.
    """

    def __init__(self, name: str, store: Store, minutes: float | None = None, hours: float | None = None):
        self.name, self.store, self.minutes, self.hours = name, store, minutes, hours
        self._began = time.monotonic()
        self._before, self._ends = 0.0, False

    def clear(self) -> None:
        """A new run begins, with the step at hand."""
        self._before = 0.0

    @contextmanager
    def step(self, ends: bool) -> Iterator[None]:
        """The time inside is that of a step, however it ends.

        Raises:
            ConfigError: they are.
        """
        self._began, self._ends = time.monotonic(), ends
        if self.hours is not None and (kept := self.store.load(_WORK)) is not None:
            self._before = kept.meta["seconds"]
        self._refuse_further_hours()
        try:
            yield
        finally:
            if self.hours is not None:
                self.store.save(_WORK, Message({}, {"seconds": self._before + self._now}))

    def refuse(self) -> None:
        """Nothing as long as the step at hand is within the site's bounds; asked before every batch.

        Raises:
            ConfigError: it is not.
        """
        if self.minutes is not None and self._now > 60 * self.minutes:
            raise ConfigError(f"site {self.name} stops: the step takes longer than the {self.minutes:g} minutes of its bounds.minutes")
        self._refuse_further_hours()

    def _refuse_further_hours(self) -> None:
        if self.hours is not None and self._ends and self._before + self._now > 3600 * self.hours:
            raise ConfigError(
                f"site {self.name} takes part no longer: it has been at work on this job for the {self.hours:g} hours of its bounds.hours"
            )

    @property
    def _now(self) -> float:
        """Seconds of the step at hand."""
        return time.monotonic() - self._began


def stored_members(folder: Path) -> tuple[str, ...]:
    """The federation's inside sites as the participant that keeps its state in `folder` enrolled with them.

    Raises:
        StateError: it has not enrolled, or its state is damaged.
    """
    membership = StateStore(folder).load(_MEMBERSHIP)
    if membership is None:
        raise StateError(f"no membership in {folder}: the site has not enrolled in this job, or its state is gone")
    return tuple(membership.meta["sites"])
