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
        self._dead: set[str] = set()

    def dead(self) -> set[str]:
        """Sites that had a process when somebody looked and have none now; with fewer threads than sites most of them have none.

        While a process starts nobody can tell whose it is: the answer is then that of the last look.
        """
        commands = self._commands()
        if [] not in commands:
            living = {words[words.index(_SITE) + 1] for words in commands if _SITE in words[:-1]}
            self._seen |= living
            self._dead = self._seen - living
        return self._dead

    def _commands(self) -> list[list[str]]:
        """The command line of every living child; empty for one that is just starting."""
        commands = []
        for child in self._simulator.children():
            with suppress(psutil.Error):  # it ended meanwhile
                if child.status() != psutil.STATUS_ZOMBIE:
                    commands.append(child.cmdline())
        return commands
