"""A job at the server: what a process needs to know to run it, and the run that it becomes.

The imports at the top are light, see `executors`.
"""

import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvflare.apis.fl_context import FLContext
from nvflare.apis.workspace import Workspace

from medflare.core.errors import ConfigError, MedflareError
from medflare.core.events import Event
from medflare.data.local import LOCAL_FILE, local_settings, read_local
from medflare.evaluation.results import FAILED, FOLDER, UNKNOWN
from medflare.federation.settings import run_settings
from medflare.flare.aggregators import MethodAggregator
from medflare.flare.participants import TASK_FILE, authorize, authorize_network, interrupted
from medflare.flare.tasks import TaskExchange

if TYPE_CHECKING:
    from medflare.federation.run import Run


@dataclass(frozen=True)
class ServerSpec:
    """JSON-serialisable, so that another process can take it over.

    Attributes:
        method: whose site algorithm the sites run; `server_algorithm` names the other algorithm's method.
        hyper: the aggregator's, as the job has them.
        settings: fields of `RunSettings` as the job has them, not checked yet.
        members: names of the sites that FLARE has in the job.
        task_file: the job's task.json.
        local_file: the server's own settings; may not exist.
        results: the job's folder of results, in what FLARE packs up for download.
        kept: folder of all jobs' checkpoints, beside their folders, which FLARE packs up when a job ends, however it ends.
        job: its id.
        trusted: module of the task's network, where that is one of its own and the server allows it; see `allowed`.
    """

    method: str
    server_algorithm: str
    hyper: Mapping[str, Any] | None
    settings: Mapping[str, Any]
    members: tuple[str, ...]
    task_file: str
    local_file: str
    results: str
    kept: str
    job: str
    trusted: str = ""

    @classmethod
    def of(
        cls, fl_ctx: FLContext, aggregator: Any, site_algorithm: str | None, settings: Mapping[str, Any], members: Iterable[str]
    ) -> "ServerSpec":
        """What FLARE knows of the job; whatever is wrong with it is found later."""
        workspace: Workspace = fl_ctx.get_engine().get_workspace()
        job, server_algorithm = fl_ctx.get_job_id(), getattr(aggregator, "method_name", "")
        return cls(
            method=site_algorithm or server_algorithm,
            server_algorithm=server_algorithm,
            hyper=getattr(aggregator, "hyper", None),
            settings=settings,
            members=tuple(members),
            task_file=str(Path(workspace.get_app_config_dir(job)) / TASK_FILE),
            local_file=str(Path(workspace.get_site_config_dir()) / LOCAL_FILE),
            results=str(Path(workspace.get_run_dir(job)) / FOLDER),
            kept=str(Path(workspace.get_root_dir()) / FOLDER),
            job=job,
        )

    @property
    def checkpoints(self) -> Path:
        """Of this job."""
        return Path(self.kept) / self.job

    def forget(self) -> None:
        """Remove the checkpoints of a completed job, and of the one that it took up: nothing of them is left to do."""
        for job in filter(None, (self.job, self.settings["resume"])):
            shutil.rmtree(Path(self.kept) / interrupted(job), ignore_errors=True)

    def aggregator(self) -> MethodAggregator:
        """One that does what the job's component does, in a process that has no components."""
        return MethodAggregator(dict(self.hyper or {}), self.server_algorithm)

    def run(self, aggregator: MethodAggregator, **watching: Any) -> "Run":
        """The run that the job describes.

        Raises:
            MedflareError: the job's task, method, aggregator or settings are wrong, or there is nothing to take up.
        """
        from medflare.federation.checkpoint import take_up
        from medflare.federation.run import Run
        from medflare.methods.catalogue import get_method
        from medflare.networks.own import trust
        from medflare.tasks.config import load_task

        settings, own = run_settings(self.settings), local_settings(read_local(Path(self.local_file)))
        if settings.resume:
            take_up(Path(self.kept) / interrupted(settings.resume), self.checkpoints)
        for module in filter(None, (*own.packages, self.trusted)):
            trust(module)
        task, method = load_task(Path(self.task_file)), get_method(self.method, server=self.server_algorithm)
        aggregator.hyper = method.effective(aggregator.hyper or {})  # the algorithms' own values, whichever way the job spells them
        return Run(
            method=method,
            task=task,
            hyper=aggregator.hyper,
            settings=settings,
            sites=tuple(site for site in sorted(self.members) if site not in settings.outside),
            aggregation=aggregator.aggregation,
            folder=Path(self.results),
            weights=Path(own.weights).expanduser() if own.weights else None,
            models_gb=own.models_gb,
            checkpoints=self.checkpoints,
            about={"engine": "flare"},
            **watching,
        )

    def refused(self, error: Exception, events: Iterable[Event] = ()) -> "Ending":
        """The end of a job that cannot even become a run, or whose process has died: its results say why, and what is known of it."""
        from medflare.federation.run import refused_run
        from medflare.tasks.config import load_task

        reason = str(error) if isinstance(error, MedflareError) else f"{type(error).__name__}: {error}"
        known = {name: self.settings[name] for name in ("seed", "rounds")}
        with suppress(Exception):  # what is wrong here is the reason already
            known["task"] = load_task(Path(self.task_file))
        outside = self.settings["outside"]
        named = outside if isinstance(outside, list | tuple) else ()
        roles = {site: "outside" if site in named else "inside" for site in self.members}
        return Ending.of(
            refused_run(Path(self.results), reason, roles, method=str(self.server_algorithm) or UNKNOWN, events=events, **known)
        )


@dataclass(frozen=True)
class Ending:
    """What became of a job.

    Attributes:
        reason: why it failed, one line; "" for a completed one.
        table: its results, for the log.
    """

    reason: str
    table: str

    @classmethod
    def of(cls, results: Mapping[str, Any]) -> "Ending":
        """Of what results.json holds."""
        from medflare.evaluation.console import results_table

        return cls(results["reason"] if results["status"] == FAILED else "", results_table(results))


def formula(aggregator: Any, name: str) -> MethodAggregator:
    """A job's component that holds the server algorithm's formula.

    Raises:
        ConfigError: it is something else.
    """
    if not isinstance(aggregator, MethodAggregator):
        raise ConfigError(f"component {name!r} of the job is no medflare aggregator; name one in config_fed_server.json")
    return aggregator


def allowed(spec: ServerSpec, fl_ctx: FLContext) -> ServerSpec:
    """The same with what the server allows, before anything of another distribution is imported; see `participants.authorized`.

    Raises:
        ConfigError: the method, or the task's network, is code that the server does not allow.
    """
    from medflare.tasks.config import load_task

    authorize((spec.method, spec.server_algorithm), fl_ctx)
    return replace(spec, trusted=authorize_network(load_task(Path(spec.task_file)), fl_ctx))


def executed(run: "Run", tasks: TaskExchange) -> Ending:
    """What becomes of a run in this process.

    Raises:
        Aborted: it was stopped, after its results were written.
    """
    from medflare.flare.messages import MessageExchange, register_tensors

    register_tensors()
    return Ending.of(run.execute(MessageExchange(tasks, run.outside), resume=bool(run.settings.resume)))
