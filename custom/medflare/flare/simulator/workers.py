"""The processes in which FLARE's simulator runs its sites: children of its own, so that one that dies is noticed at once."""

from contextlib import suppress
from typing import Final

import psutil

_SITE: Final = "--client"  # FLARE's option that names the site on such a process's command line


class Workers:
    """The simulator's site processes, as the process sees them that started them.

    Args:
        simulator: its process id; None: this process.
    """

    def __init__(self, simulator: int | None = None):
        self._simulator = psutil.Process(simulator)
        self._seen: set[str] = set()

    def dead(self) -> set[str]:
        """Sites that had a process when somebody looked and have none now; with fewer threads than sites most of them have none."""
        living = self._living()
        self._seen |= living
        return self._seen - living

    def _living(self) -> set[str]:
        sites = set()
        for child in self._simulator.children():
            with suppress(psutil.Error, ValueError, IndexError):  # it ended meanwhile, or is none of a site
                if child.status() != psutil.STATUS_ZOMBIE:
                    words = child.cmdline()
                    sites.add(words[words.index(_SITE) + 1])
        return sites
