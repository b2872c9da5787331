"""A site's seat in a job: what a process needs to know to act for the site, and the participant that it becomes.

The imports at the top are light, see `executors`.
"""

import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medflare.core.errors import ConfigError

if TYPE_CHECKING:
    from medflare.core.message import Message
    from medflare.federation.participant import Participant
    from medflare.sites.site import Site

LOCAL_FILE = "medflare.json"  # in the site's local/ folder: see tasks.site.LOCAL_SETTINGS
TASK_FILE = "task.json"  # in the job's config folder
FOLDER = "medflare"  # below the job's folder: a site's state and models, the server's results
LEDGER = "privacy"  # folder beside it: what the site's jobs have given away of its patients' privacy
ASSIGNMENT = "medflare.assignment"  # in FLARE's context while a task and the filters of its result run
_MEMBER = "state"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Seat:
    """JSON-serialisable, so that another process can take it over.

    Attributes:
        name: the site's name.
        method: whose site half runs; `server_half` names the other half's method where it is another one.
        task_file: the job's task.json.
        local_file: the site's own settings; may not exist.
        folder: the site's folder in the job.
        resumed: the site's folder in the interrupted job that this one takes up; "" where it takes up none.
    """

    name: str
    method: str
    server_half: str
    seed: int
    task_file: str
    local_file: str
    folder: str
    hyper: Mapping[str, Any] = field(default_factory=dict)
    resumed: str = ""

    @property
    def state_folder(self) -> Path:
        return Path(self.folder) / _MEMBER

    def taken_before(self) -> bool:
        """Whether another process has acted for the site already."""
        return self.state_folder.exists()

    def participant(self, aborted: Callable[[], bool]) -> "Participant":
        """The site's participant; its data are read when the first task needs them.

        Args:
            aborted: asked before every batch.

        Raises:
            ConfigError: the task, the method or the site's own settings are wrong.
        """
        from medflare.core.store import StateStore
        from medflare.federation.participant import Home, Participant
        from medflare.methods.catalogue import get_method
        from medflare.sites.opening import open_site
        from medflare.tasks.config import load_task

        folder = Path(self.folder)
        if self.resumed:
            self._take_up(Path(self.resumed) / _MEMBER)
        task, local = load_task(Path(self.task_file)), read_local(Path(self.local_file))
        method = get_method(self.method, server=self.server_half or None)
        method.check(self.hyper, task)

        def opened(role: str) -> "Site":
            ledger = Path(self.local_file).with_name(LEDGER)
            site = open_site(self.name, task, seed=self.seed, role=role, local=local, cache=folder / "cache", ledger=ledger)
            site.abort = aborted
            for note in site.notes:
                _log.info("%s: %s", self.name, note)
            return site

        home, store = Home(folder, self.name, method, task, self.seed), StateStore(self.state_folder)
        return Participant(self.name, opened, method, self.hyper, store=store, keep=home.keep, show=home.show)

    def _take_up(self, interrupted: Path) -> None:
        """Copy what the site remembers of the interrupted job, once and in one piece; that job's own folder stays as it is."""
        if interrupted.exists() and not self.state_folder.exists():
            partial = self.state_folder.with_name(f".{_MEMBER}")
            shutil.rmtree(partial, ignore_errors=True)
            shutil.copytree(interrupted, partial)
            partial.rename(self.state_folder)


@dataclass(frozen=True)
class Assignment:
    """What a site is working on, for the filters that its result passes."""

    phase: str
    round: int
    incoming: "Message"
    seat: Seat


def interrupted(job: str) -> str:
    """The id of a job to take up, as a folder's name.

    Raises:
        ConfigError: it is no such name, but a way to somewhere else.
    """
    if not re.fullmatch(r"[\w-]+", job):
        raise ConfigError(f"resume = {job!r} is no job id; give the id that FLARE listed the interrupted job under")
    return job


def read_local(path: Path) -> dict[str, Any]:
    """The site's own settings; none where the file does not exist.

    Raises:
        ConfigError: the file is not a JSON object.
    """
    if not path.exists():
        return {}
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON ({error}); correct it or delete it") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{path}: must hold a JSON object with the site's own settings; correct it or delete it")
    return settings


def anchor(variable: str) -> None:
    """Make a relative path in an environment variable absolute: FLARE changes the working directory, the shell's PWD stays."""
    value, started_in = os.environ.get(variable), os.environ.get("PWD")
    if value and started_in and not Path(value).expanduser().is_absolute():
        os.environ[variable] = str(Path(started_in) / value)
