"""What a site stores of a run: its algorithm before the last two steps, and its working time.

A step is repeated if too few replies were usable, and when a killed server continues from its last
checkpoint.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from medflare.core.errors import ConfigError, StateError
from medflare.core.message import Message
from medflare.core.states import StateDict
from medflare.core.store import StateStore, Store
from medflare.core.text import JsonDict
from medflare.federation.builtin_messages import ROLE, SITES, START
from medflare.methods.base import SiteAlgorithm, memory_problem

_PREFIX = "algorithm-"
_MEMBERSHIP = "membership"
_IDENTITY = "identity"
_WORK = "work"


@dataclass
class StoredAlgorithm:
    """A site's algorithm, ready for the requested step: that of this process, or a new one restored
    from the store.

    The store holds the memory under the number of the step that it precedes: the newest one and the
    one before it.

    `make` is (role, inside sites, initial weights) -> a new algorithm; `identify` is role -> what
    the run is, see `enrolment.identity_of`. A job that resumes another one copies its state: it
    must be the same run, as another method may send what this one keeps at the site.
    """

    name: str
    store: Store
    make: Callable[[str, tuple[str, ...], StateDict | None], SiteAlgorithm]
    identify: Callable[[str], JsonDict]
    _algorithm: SiteAlgorithm | None = None
    _precedes: int = 0  # the step that the algorithm of this process is ready for

    def begin(self, role: str, sites: tuple[str, ...], start: StateDict | None) -> None:
        """Begin a new run and delete what an earlier run stored.

        Without `start` the algorithm draws its initial weights from the seed.
        """
        self._algorithm = self.make(role, sites, start)
        self._precedes = 0
        for step in self._stored_steps():
            self.store.delete(f"{_PREFIX}{step}")
        membership = Message.of({SITES: list(sites), ROLE: role})
        membership.meta["site"] = self.name
        membership.meta[_IDENTITY] = self.identify(role)
        if start is not None:
            membership[START] = start
        self.store.save(_MEMBERSHIP, membership)
        self._save(0, self._algorithm)

    @contextmanager
    def ready(self, step: int, *, save: bool) -> Iterator[SiteAlgorithm]:
        """The algorithm as the last step before `step` left it, for the block that performs `step`.

        After the block it is stored if `save`; if the block raises, the next step starts from what
        was stored before.

        Raises:
            StateError: see `recall`.
        """
        algorithm = self.recall(step)
        try:
            yield algorithm
            if save:
                self._save(step + 1, algorithm)
                self._precedes = step + 1
        except BaseException:
            self._algorithm = None
            raise

    def recall(self, step: int) -> SiteAlgorithm:
        """The algorithm as the last step before `step` left it.

        Raises:
            StateError: the site has not enrolled, or its state is lost, damaged, another site's or
                another run's.
        """
        if self._algorithm is not None and self._precedes <= step:
            return self._algorithm
        membership = self.store.load(_MEMBERSHIP)
        if membership is None:
            raise StateError(
                f"site {self.name} has not enrolled, or its state is lost; "
                "restore the state or start the run again"
            )
        owner = membership.meta["site"]
        if owner != self.name:
            raise StateError(
                f"the stored state of site {self.name} belongs to site {owner}; "
                "restore the state of each site"
            )
        self._check_identity(membership)
        usable = [stored for stored in self._stored_steps() if stored <= step]
        memory = self.store.load(f"{_PREFIX}{usable[-1]}") if usable else None
        if memory is None:
            raise StateError(
                f"site {self.name} has lost its state before step {step}; "
                "restore it or start the run again"
            )
        sites = tuple(membership[SITES])
        algorithm = self.make(membership[ROLE], sites, membership.get(START))
        algorithm.restore(memory)
        self._algorithm = algorithm
        self._precedes = usable[-1]
        return algorithm

    def _check_identity(self, membership: Message) -> None:
        stored = membership.meta[_IDENTITY]
        identity = self.identify(membership[ROLE])
        different = [name for name, value in identity.items() if stored.get(name) != value]
        if different:
            raise StateError(
                f"the stored state of site {self.name} is of a job with other "
                f"{', '.join(different)}; resume a job with its own job folder"
            )

    def _save(self, step: int, algorithm: SiteAlgorithm) -> None:
        """Store what `step` starts from, and keep the newest earlier one.

        Raises:
            ConfigError: the memory holds what cannot be stored.
        """
        problem = memory_problem(algorithm.memory)
        if problem:
            raise ConfigError(f"{type(algorithm).__name__}: {problem}")
        self.store.save(f"{_PREFIX}{step}", algorithm.memory)
        steps = self._stored_steps()
        earlier = [stored for stored in steps if stored < step]
        for stored in set(steps) - {step, *earlier[-1:]}:
            self.store.delete(f"{_PREFIX}{stored}")

    def _stored_steps(self) -> list[int]:
        return sorted(
            int(name.removeprefix(_PREFIX))
            for name in self.store.names()
            if name.startswith(_PREFIX)
        )


@dataclass
class WorkingTime:
    """A site's working time on a run, without waiting, over all its processes, and its limits,
    `Bounds.minutes` and `Bounds.hours`.

    Args:
        store: keeps the seconds; those of a step in which a process was killed are lost.
        minutes: limit of one step.
        hours: limit of the run; None: no limit.
    """

    name: str
    store: Store
    minutes: float
    hours: float | None
    _step_ends: float = math.inf  # on the monotonic clock, as the next
    _run_ends: float = math.inf

    @contextmanager
    def step(self, limited: bool) -> Iterator[None]:
        """The time of the block is that of a step; `limited` if `hours` applies to it.

        Raises:
            ConfigError: the limit of the run is reached.
        """
        began = time.monotonic()
        stored = None if self.hours is None else self.store.load(_WORK)
        before = 0.0 if stored is None else stored.meta["seconds"]
        self._step_ends = math.inf
        self._run_ends = math.inf
        if limited and self.hours is not None:
            self._run_ends = began - before + 3600 * self.hours
        self.check()
        self._step_ends = began + 60 * self.minutes
        try:
            yield
        finally:
            if self.hours is not None:
                seconds = before + time.monotonic() - began
                self.store.save(_WORK, Message({}, {"seconds": seconds}))

    def check(self) -> None:
        """Check the limits; called before every batch.

        Raises:
            ConfigError: the step or the run takes longer than the site's limits.
        """
        now = time.monotonic()
        if now > self._step_ends:
            raise ConfigError(
                f"site {self.name} stops: the step takes longer than the {self.minutes:g} minutes "
                "of its bounds.minutes"
            )
        if now > self._run_ends:
            raise ConfigError(
                f"site {self.name} stops: it has worked on this job for the {self.hours:g} hours "
                "of its bounds.hours"
            )


def stored_members(folder: Path) -> tuple[str, ...]:
    """The inside sites with which the participant that stores its state in `folder` enrolled.

    Raises:
        StateError: it has not enrolled, or its state is damaged.
    """
    membership = StateStore(folder).load(_MEMBERSHIP)
    if membership is None:
        raise StateError(f"{folder}: the site has not enrolled in this job, or its state is lost")
    return tuple(membership[SITES])
