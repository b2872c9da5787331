"""FLARE recipes: a federation in three lines of Python, in FLARE's simulator (SimEnv), POC (PocEnv) or production (ProdEnv).

from medflare.flare.recipes import FedSMRecipe
from nvflare.recipe import SimEnv

FedSMRecipe(task="phantom", num_rounds=10, lam=0.3).execute(SimEnv(num_clients=4))
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar

from nvflare.recipe import SimEnv
from nvflare.recipe.spec import ExecEnv, Recipe

from medflare.flare.jobs.building import FederationJob, JobSettings
from medflare.tasks.config import TaskConfig, load_task


class MedflareRecipe(Recipe):
    """Any method by name; the subclasses are the methods of the five papers.

    Args:
        task: preset name, JSON file, mapping or configuration.
        num_rounds: of the federation.
        method: name of the method; the subclasses name it themselves.
        settings: fields of `JobSettings` (seed, outside, min_sites, ...) and the method's hyper-parameters, by name.

    Raises:
        ConfigError: an unknown method or hyper-parameter, or a value out of its range.
    """

    default_method: ClassVar[str] = ""

    def __init__(
        self,
        *,
        task: TaskConfig | str | Path | Mapping[str, Any] = "phantom",
        num_rounds: int = 10,
        method: str = "",
        **settings: Any,
    ):
        names = {field.name for field in fields(JobSettings)} - {"method", "rounds", "hyper"}
        job = {name: value for name, value in settings.items() if name in names}
        hyper = {name: value for name, value in settings.items() if name not in names}
        chosen = JobSettings(method=method or self.default_method, rounds=num_rounds, hyper=hyper, **job)
        super().__init__(FederationJob(load_task(task), chosen))

    def process_env(self, env: ExecEnv) -> None:
        """In an environment that starts its sites itself (PocEnv) the job waits for all of them: FLARE would start it with those
        that have registered by then, and a site that comes a second later would never be part of it."""
        if not isinstance(env, SimEnv):  # the simulator's sites are all there from the beginning
            self._job.job.min_clients = max(self._job.job.min_clients, getattr(env, "num_clients", None) or 0)

    def simulate(self, sites: Sequence[str], workspace: Path, *, threads: int | None = None) -> None:
        """Run in FLARE's simulator with these sites; `threads` of them work at the same time (None: all)."""
        self.execute(SimEnv(clients=list(sites), num_threads=threads, workspace_root=str(workspace)))


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
