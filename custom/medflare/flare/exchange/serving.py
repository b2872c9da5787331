"""A job at the server: where its files lie, and the run that its task, its components and its settings describe."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvflare.apis.controller_spec import ControllerSpec
from nvflare.apis.fl_context import FLContext
from nvflare.apis.workspace import Workspace

from medflare.core.errors import ConfigError, MedflareError
from medflare.core.events import EventLog
from medflare.data.sites.local import LOCAL_FILE, LocalSettings, local_settings, read_local
from medflare.evaluation.results import FOLDER
from medflare.federation.checkpoint import take_up
from medflare.federation.run import Run, refused_run
from medflare.federation.settings import run_settings
from medflare.flare.aggregators import MethodAggregator
from medflare.flare.exchange.participants import TASK_FILE, authorize, authorize_network, interrupted, rebuild_hint
from medflare.flare.exchange.tracking import Tracking
from medflare.methods.catalogue import get_method
from medflare.tasks.config import TaskConfig, load_task


@dataclass(frozen=True)
class JobPlace:
    """Where a job has its files at the server."""

    workspace: Workspace
    job: str

    def of(self, job: str) -> "JobPlace":
        """Another job's place."""
        return JobPlace(self.workspace, job)

    def task(self) -> TaskConfig:
        """The job's task.

        Raises:
            ConfigError: it is wrong.
        """
        return load_task(Path(self.workspace.get_app_config_dir(self.job)) / TASK_FILE)

    def own(self) -> LocalSettings:
        """The server's own settings.

        Raises:
            ConfigError: its local/medflare.json is wrong.
        """
        return local_settings(read_local(Path(self.workspace.get_site_config_dir()) / LOCAL_FILE))

    @property
    def results(self) -> Path:
        """Where the job's results go: into what FLARE packs up for download."""
        return Path(self.workspace.get_run_dir(self.job)) / FOLDER

    @property
    def checkpoints(self) -> Path:
        """Beside the job folders, which FLARE packs up for download when a job ends, however it ends."""
        return Path(self.workspace.get_root_dir()) / FOLDER / self.job


@dataclass(frozen=True)
class ServedJob:
    """The job that a controller serves.

    Attributes:
        controller: whose events and log lines those of the run become.
        fl_ctx: of the run.
        settings: fields of `RunSettings` as the job has them, not checked yet.
        site_half: method whose site half the sites run; None: the aggregator's.
        aggregator_id: the component that holds the server half's formula.
        members: names of the sites that FLARE has in the job at the moment.
        say: takes a line for the log.
        events: what is noted, beside what the run itself notes.
    """

    controller: ControllerSpec
    fl_ctx: FLContext
    settings: Mapping[str, Any]
    site_half: str | None
    aggregator_id: str
    members: Callable[[], list[str]]
    say: Callable[[str], None]
    events: EventLog

    @property
    def place(self) -> JobPlace:
        """Where its files lie."""
        return JobPlace(self.fl_ctx.get_engine().get_workspace(), self.fl_ctx.get_job_id())

    @property
    def aggregator(self) -> MethodAggregator:
        """The component that holds the server half's formula.

        Raises:
            ConfigError: the job has none.
        """
        aggregator = self.fl_ctx.get_engine().get_component(self.aggregator_id)
        if not isinstance(aggregator, MethodAggregator):
            raise ConfigError(f"component {self.aggregator_id!r} of the job is no medflare aggregator; name one in config_fed_server.json")
        return aggregator

    def run(self) -> Run:
        """The run that the job describes.

        Raises:
            MedflareError: the job's task, method, aggregator or settings are wrong, or there is nothing to take up.
        """
        settings, place, aggregator = run_settings(self.settings), self.place, self.aggregator
        own = place.own()
        if settings.resume:
            take_up(place.of(interrupted(settings.resume)).checkpoints, place.checkpoints)
        halves = self.site_half or aggregator.method_name, aggregator.method_name
        task = place.task()
        authorize(halves, self.fl_ctx)
        authorize_network(task, self.fl_ctx)
        method = get_method(halves[0], server=halves[1])
        with rebuild_hint():  # the formula goes by the halves' own values, whichever way the job spells them
            aggregator.hyper = method.effective(aggregator.hyper or {})
        return Run(
            method=method,
            task=task,
            hyper=aggregator.hyper,
            settings=settings,
            sites=tuple(site for site in sorted(self.members()) if site not in settings.outside),
            aggregation=aggregator.aggregation,
            folder=place.results,
            weights=Path(own.weights).expanduser() if own.weights else None,
            models_gb=own.models_gb,
            checkpoints=place.checkpoints,
            say=self.say,
            about={"engine": "flare"},
            observe=Tracking(self.controller, self.fl_ctx, settings.rounds),
            events=self.events,
        )

    def refused(self, error: Exception) -> dict[str, Any]:
        """The results of a job that cannot even become a run: they say why, and what is known of it.

        Args:
            error: why.
        """
        reason = str(error) if isinstance(error, MedflareError) else f"{type(error).__name__}: {error}"
        known = {name: self.settings[name] for name in ("seed", "rounds")}
        with suppress(Exception):  # what is wrong here is the reason already
            known["method"] = str(self.aggregator.method_name)
        with suppress(Exception):
            known["task"] = self.place.task()
        outside = self.settings["outside"]
        named = outside if isinstance(outside, list | tuple) else ()
        roles = {site: "outside" if site in named else "inside" for site in self.members()}
        return refused_run(self.place.results, reason, roles, **known)
