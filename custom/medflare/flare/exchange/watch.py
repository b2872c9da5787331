"""Who lives: when each site was heard of last, and which ones are not asked for the moment."""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

_REFUSED = 10.0  # seconds for which a site asks for a task that lies ready and does not get it, until its polls count as refused ...
_OFTEN = 5  # ... and how often it asks in that time, at least: one poll that is lost on its way is none
_PROCESSES = 1.0  # seconds between two looks at the sites' processes, where they can be seen

REFUSED = (
    "asks for work and is refused it: the server knows another registration of the site, as after a preflight check of a site that runs; "
    "stop and start the site, then submit the job again"
)


@dataclass
class Watch:
    """What the server hears of its sites.

    A site that has an outdated registration still reaches the server with its questions for work, and FLARE then refuses it the task.
    Its questions are no sign of life: a run that took them for one would wait for its answer for ever.

    Attributes:
        silence: seconds without a sign of life after which a site counts as gone.
        dead: tells the sites whose process ended, where processes can be seen, that is in the simulator.
        heard: site -> when it was heard of last, on the monotonic clock.
        lost: sites that are given up until they are heard of again.
        died: those of them whose process was seen to be gone: nobody waits for them, as for others, in the hope that they come back.
        behind: sites whose enrolment was closed before they answered; they are asked again when they ask for work.
        served: sites that have fetched a task of this job, so that the server must know their registration.
    """

    silence: float
    dead: Callable[[], Collection[str]] | None = None
    heard: dict[str, float] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)
    died: set[str] = field(default_factory=set)
    behind: set[str] = field(default_factory=set)
    served: set[str] = field(default_factory=set)
    _in_vain: dict[str, tuple[float, int]] = field(default_factory=dict)  # site -> since when, how often
    _without_process: Collection[str] = ()
    _looked: float = field(default_factory=time.monotonic)

    def sign_of_life(self, site: str) -> None:
        """The site was heard of just now, and is not given up any more."""
        self.heard[site] = time.monotonic()
        self.lost.discard(site)
        self.died.discard(site)

    def question(self, site: str, ready: bool) -> None:
        """The site asks for work.

        Args:
            site: its name.
            ready: whether a task lies there for it. To ask for that again and again without fetching it is no sign of life.
        """
        if ready and site not in self.served:
            since, times = self._in_vain.get(site, (time.monotonic(), 0))
            self._in_vain[site] = since, times + 1
            if times:
                return
        self.behind.discard(site)
        self.sign_of_life(site)

    def fetched(self, site: str) -> None:
        """The site got its task."""
        self.served.add(site)
        self._in_vain.pop(site, None)
        self.sign_of_life(site)

    def refused(self, site: str) -> bool:
        """Whether the site asks for tasks that it cannot fetch; in this job it stays so, see `REFUSED`."""
        since, times = self._in_vain.get(site, (0.0, 0))
        return times >= _OFTEN and time.monotonic() - since > _REFUSED

    def silent_since(self, site: str, *moments: float) -> float:
        """Seconds since the site was heard of or the latest of `moments`, whichever is shorter ago."""
        return time.monotonic() - max(self.heard.get(site, 0.0), *moments)

    def look(self) -> None:
        """Look at the sites' processes, if it is time to; what was seen holds until the next call, as a site may have another one then."""
        due = self.dead is not None and time.monotonic() - self._looked > _PROCESSES
        self._without_process = self.dead() if self.dead is not None and due else ()
        self._looked = time.monotonic() if due else self._looked

    def gone(self, site: str, step: str, fetched: bool, since: float, busy: float) -> str:
        """Why a site that was asked cannot be expected to answer; empty as long as it can.

        A site that works on its task sends a pulse. One that has not fetched its task may be waiting for its turn (FLARE's
        simulator with fewer threads than sites): that it has no process means nothing then, and its silence counts only while no other
        site is at work either.

        Args:
            site: its name.
            step: what it was asked, as the reason names it.
            fetched: whether it has its task.
            since: when it was asked.
            busy: when a site was at work last.
        """
        if self.refused(site):
            return REFUSED
        if fetched and site in self._without_process:
            self.died.add(site)
        if site in self.died:
            return f"its process died; {step} goes on without the site"
        if self.silent_since(site, since if fetched else max(since, busy)) > self.silence:
            return f"no sign of life in {step}; going on without the site"
        return ""

    def there(self, site: str) -> bool:
        """Whether the site can be asked."""
        return site not in self.lost and site not in self.behind and not self.refused(site)
