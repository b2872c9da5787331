"""A server's engine with two sites, as far as a controller needs one, and a federation that it runs in this process."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nvflare.apis.fl_constant import ReservedKey
from nvflare.apis.fl_context import FLContext, FLContextManager
from nvflare.apis.signal import Signal

from medflare.data.local import LOCAL_FILE
from medflare.federation.local.local_exchange import LocalExchange
from medflare.federation.participant import Participant
from medflare.flare.controller import MedflareController
from medflare.flare.names import TASK_FILE
from medflare.methods.method import Method
from medflare.tasks.config import TaskConfig, load_task
from medflare.training.opening import open_site

SITES = ("site-1", "site-2")


class Server:
    """The engine; `panics`: why jobs were ended, `properties`: what FLARE's context holds beside what it needs."""

    def __init__(
        self, root: Path, aggregator: Any, task: TaskConfig | None = None, job: str = "job"
    ):
        self.root, self.job = root, job
        self.aggregator = aggregator
        self.panics: list[str] = []
        self.properties: dict[str, Any] = {}
        self.task_file.parent.mkdir(parents=True)
        self.task_file.write_text(json.dumps((task or load_task("phantom")).to_dict()))

    @property
    def task_file(self) -> Path:
        return self.root / self.job / "config" / TASK_FILE

    @property
    def local_file(self) -> Path:
        """The server's own settings; it has none unless a test writes them."""
        return self.root / "local" / LOCAL_FILE

    def get_component(self, name: str) -> Any:
        return self.aggregator if name == "aggregator" else None

    def get_clients(self) -> list[Any]:
        return [SimpleNamespace(name=site) for site in SITES]

    def get_workspace(self) -> Any:
        return SimpleNamespace(
            get_app_config_dir=lambda job: str(self.root / job / "config"),
            get_run_dir=lambda job: str(self.root / job),
            get_root_dir=lambda: str(self.root),
            get_site_config_dir=lambda: str(self.local_file.parent),
        )

    def fire_event(self, event: str, fl_ctx: FLContext) -> None:
        """Nobody listens."""

    def context(self) -> FLContext:
        manager = FLContextManager(
            engine=self,
            identity_name="server",
            job_id=self.job,
            public_stickers={},
            private_stickers={},
        )
        fl_ctx: FLContext = manager.new_context()
        for name, value in {ReservedKey.ENGINE: self, **self.properties}.items():
            fl_ctx.set_prop(name, value, private=True, sticky=False)
        return fl_ctx

    def run(self, controller: MedflareController) -> None:
        controller._engine = self
        controller.system_panic = lambda reason, ctx: self.panics.append(reason)
        controller.control_flow(Signal(), self.context())


def in_this_process(
    method: Method, task: TaskConfig, hyper: dict[str, Any], seed: int
) -> Callable[..., LocalExchange]:
    """What takes the place of `TaskExchange` where the sites are no processes of their own."""

    def opened(site: str) -> Participant:
        return Participant(
            site, lambda role: open_site(site, task, seed=seed, role=role), method, hyper
        )

    return lambda *arguments, **options: LocalExchange(SITES, opened)
