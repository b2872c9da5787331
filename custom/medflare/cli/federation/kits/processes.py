"""The processes that run from a kit: found, whoever started them, and ended.

FLARE's shell (startup/sub_start.sh) starts the party and starts it again when it is gone; the party starts a process for every job. The
shell writes pid.fl and daemon_pid.fl, which outlive a power cut and may then name somebody else's process. So processes are known by their
command lines, which name the kit. Processes in a container are not seen from outside it.
"""

import contextlib
import os
import time
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

import psutil

from medflare.cli.federation.kits.kit import Kit
from medflare.core.errors import StateError

_SHUTDOWN: Final = "shutdown.fl"  # FLARE's shell starts nobody again where it finds this file
_LEFT_BEHIND: Final = ("pid.fl", "daemon_pid.fl", _SHUTDOWN, "restart.fl")  # by a shell that was killed
_MODULES: Final = "nvflare.private.fed.app."
_PARTIES: Final = (f"{_MODULES}client.client_train", f"{_MODULES}server.server_train")
_SHELLS: Final = ("bash", "sh", "dash")  # that read FLARE's script
_SHELL_PERIOD: Final = 5.0  # seconds between two looks of FLARE's shell
_PASSES: Final = 4  # of a stop


class Processes(NamedTuple):
    """What runs from a kit.

    Attributes:
        shells: FLARE's shells.
        parties: the party itself; more than one only where somebody started it twice.
        jobs: id -> processes of that job.
    """

    shells: list[psutil.Process]
    parties: list[psutil.Process]
    jobs: dict[str, list[psutil.Process]]

    @property
    def all(self) -> list[psutil.Process]:
        """In the order in which they are to end: nobody is started again by one that is still there."""
        return [*self.shells, *self.parties, *(process for processes in self.jobs.values() for process in processes)]

    @property
    def first(self) -> psutil.Process | None:
        """The party, or the shell that is about to start it; None where nothing runs."""
        return next(iter([*self.parties, *self.shells]), None)


def running(kit: Kit) -> Processes:
    """Everything that runs from the kit."""
    found = Processes([], [], {})
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
        except psutil.Error:  # gone meanwhile, or not to be seen by this account
            continue
        if _is_shell(words, kit):
            found.shells.append(process)
        elif _workspace(words) == str(kit.folder):
            if any(word in _PARTIES for word in words):
                found.parties.append(process)
            elif any(word.startswith(_MODULES) for word in words):
                found.jobs.setdefault(_value(words, "-n"), []).append(process)
    return found


def stop(kit: Kit, patience: float = 10.0) -> int:
    """End everything that runs from the kit: asked first, killed after `patience` seconds.

    The server takes note when the site's heartbeats stay away, and takes the site in again when it is started.

    Args:
        kit: whose processes end.
        patience: seconds.

    Returns:
        How many processes ran.

    Raises:
        StateError: some still do, most likely those of another account.
    """
    ended: set[int] = set()
    for _ in range(_PASSES):  # FLARE's shell may start the party after a look that found none
        found = running(kit)
        if {process.pid for process in found.all} <= ended:  # none, or none that was not tried already
            break
        (kit.folder / _SHUTDOWN).touch(mode=0o600)  # once more: a party that starts removes it
        ended |= _end_all(found, patience)
    if (first := running(kit).first) is not None:
        raise StateError(f"{kit.name} still runs (process {first.pid}{_remedy(first)}")
    clear(kit)
    return len(ended)


def clear(kit: Kit) -> None:
    """Remove what FLARE's shell leaves in the kit when it is killed: it would take another process of that number for itself."""
    for name in _LEFT_BEHIND:
        (kit.folder / name).unlink(missing_ok=True)


def since(process: psutil.Process) -> float:
    """When a process was started, in seconds since 1970; now for one that is gone."""
    try:
        return float(process.create_time())
    except psutil.Error:
        return time.time()


def _end_all(found: Processes, patience: float) -> set[int]:
    """End what was found, with its children; returns their numbers."""
    working = [*found.parties, *(process for processes in found.jobs.values() for process in processes)]
    for process in working[:]:
        with contextlib.suppress(psutil.Error):
            working += process.children(recursive=True)
    if not found.parties:  # a shell that is about to start one has nothing to clear up
        _end(found.shells, patience)
    _end(list({process.pid: process for process in working}.values()), patience)
    _, left = psutil.wait_procs(found.shells, timeout=patience + 2 * _SHELL_PERIOD)  # it clears up behind itself
    _end(left, patience)
    return {process.pid for process in (*working, *found.shells)}


def _end(processes: list[psutil.Process], patience: float) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    _, left = psutil.wait_procs(processes, timeout=patience)
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(left, timeout=patience)


def _remedy(process: psutil.Process) -> str:
    """The end of the line about a process that still runs: its account where it is another one, and what to do."""
    with contextlib.suppress(psutil.Error):
        if (account := process.username()) != psutil.Process().username():
            return f", account {account}): stop it as that account, or as root"
    return "): run the command again"


def _workspace(words: list[str]) -> str:
    """The folder after `-m` that is no module; "" where there is none."""
    folders = [word for flag, word in pairwise(words) if flag == "-m" and os.sep in word]
    return str(Path(folders[0]).resolve()) if folders else ""


def _value(words: list[str], flag: str) -> str:
    return next((word for found, word in pairwise(words) if found == flag), "")


def _is_shell(words: list[str], kit: Kit) -> bool:
    """Whether a command line is the kit's start script, run by a shell or by itself; an editor's or a pager's is not."""
    word = next(iter(words[1:2] if words and Path(words[0]).name in _SHELLS else words[:1]), "")
    return word.endswith("/startup/sub_start.sh") and Path(word).resolve().parents[1] == kit.folder
