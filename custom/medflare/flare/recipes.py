"""FLARE recipes: a federation in three lines of Python, in FLARE's simulator (SimEnv), POC (PocEnv)
or production (ProdEnv).

from medflare.flare.recipes import FedSMRecipe
from nvflare.recipe import SimEnv

FedSMRecipe(task="phantom", rounds=10, lam=0.3).execute(SimEnv(num_clients=4))
"""

import os
import re
import shutil
import signal
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from nvflare.recipe import SimEnv
from nvflare.recipe.spec import ExecEnv, Recipe

from medflare.core.errors import ConfigError, FederationFailed
from medflare.core.interrupts import interruptible
from medflare.core.settings import checked
from medflare.core.text import Json, printable
from medflare.flare.jobs.building import JOB_SETTINGS, FederationJob, JobSettings
from medflare.flare.names import NO_TABLE
from medflare.tasks.config import TaskConfig, load_task

_ERROR = re.compile(r"^(?:\w+\.)*\w*Error: .+", re.MULTILINE)  # the last line of a traceback
_NO_SPACE = 2**20  # bytes
_SITE_NAME = re.compile(r"[A-Za-z0-9_-]+")  # FLARE uses dots in the names of its cells


class MedflareRecipe(Recipe):
    """A federation of any method by name; the subclasses below are FedAvg and the methods of the
    five papers.

    Args:
        task: preset name, JSON file, mapping or configuration.
        num_rounds: the same as `rounds`, by the name of FLARE's own recipes.
        method: name of the method; the subclasses have one by default.
        settings: fields of `JobSettings` (seed, outside, min_sites, ...) and the method's
            hyper-parameters, by name or as `site={name: value}`, `server={name: value}`.

    Raises:
        ConfigError: an unknown method or hyper-parameter, or a value outside its range.
    """

    default_method = ""

    def __init__(
        self,
        *,
        task: TaskConfig | str | Path | Json = "phantom",
        rounds: int | None = None,
        num_rounds: int | None = None,
        method: str = "",
        **settings: Any,
    ):
        if rounds is not None and num_rounds not in (None, rounds):
            raise ConfigError(
                f"rounds = {rounds} and num_rounds = {num_rounds}: "
                "both mean the same, give one of them"
            )
        if rounds is None:
            rounds = num_rounds
        job = {name: settings.pop(name) for name in JOB_SETTINGS if name in settings}
        if rounds is not None:
            job["rounds"] = rounds
        job |= {"method": method or self.default_method, "hyper": settings}
        super().__init__(FederationJob(load_task(task), checked(JobSettings, job, "recipe")))

    def process_env(self, env: ExecEnv) -> None:
        """Let the job wait for all sites that an environment starts (PocEnv).

        FLARE would start it with those that have registered by then, and a site that registers a
        second later would not take part.
        """
        if not isinstance(env, SimEnv):
            sites = getattr(env, "num_clients", None) or 0
            self._job.job.min_clients = max(self._job.job.min_clients, sites)

    def simulate(
        self, sites: Sequence[str], workspace: Path, *, threads: int | None = None
    ) -> None:
        """Run in FLARE's simulator.

        Args:
            threads: number of sites that work at the same time; None: all.

        Raises:
            ConfigError: see `check_place`.
            FederationFailed: the simulator failed.
            KeyboardInterrupt: Ctrl-C or SIGTERM; the simulator's processes have ended.
        """
        check_place(sites, workspace)
        interrupted = threading.Event()

        def interrupt(number: int, frame: Any) -> None:
            interrupted.set()
            signal.default_int_handler(number, frame)

        env = SimEnv(clients=list(sites), num_threads=threads, workspace_root=str(workspace))
        os.environ[NO_TABLE] = "1"
        try:
            with interruptible(interrupt):
                self.execute(env)
        except RuntimeError as error:
            if interrupted.is_set():
                raise KeyboardInterrupt(
                    "a run in FLARE's simulator cannot be resumed; start it again"
                ) from None
            raise FederationFailed(
                f"FLARE's simulator failed: {error}{_last_error(workspace)}"
            ) from error
        finally:
            del os.environ[NO_TABLE]


class FedAvgRecipe(MedflareRecipe):
    default_method = "fedavg"


class FedSMRecipe(MedflareRecipe):
    default_method = "fedsm"


class PRRRecipe(MedflareRecipe):
    default_method = "prr"


class GraceRecipe(MedflareRecipe):
    default_method = "grace"


class IOPRecipe(MedflareRecipe):
    default_method = "iop_fl"


class FedDAGRecipe(MedflareRecipe):
    default_method = "feddag"


def _last_error(workspace: Path) -> str:
    """The last error in the logs of a simulation, as the end of a line; "" if there is none."""
    errors = []
    for log in sorted(workspace.rglob("log.txt"), key=lambda file: file.stat().st_mtime):
        errors += _ERROR.findall(log.read_text(encoding="utf-8", errors="replace"))
    if shutil.disk_usage(workspace).free < _NO_SPACE:
        errors.append("no space is left on the disk")
    return f"; the last error: {printable(errors[-1])}" if errors else ""


def check_place(sites: Iterable[str], workspace: Path) -> None:
    """Raise if FLARE's simulator would stop with a traceback.

    Raises:
        ConfigError: FLARE does not take a site's name, or the folder's path has blanks.
    """
    for site in sites:
        if not _SITE_NAME.fullmatch(site):
            raise ConfigError(
                f"site {site!r}: FLARE takes names of letters without accents, digits, - and _; "
                "the plain loop (--engine local) takes others"
            )
    if any(letter.isspace() for letter in str(workspace.absolute())):
        raise ConfigError(
            f"{workspace.absolute()}: FLARE's simulator takes no blanks in its path; "
            "use another folder, or the plain loop (--engine local)"
        )
