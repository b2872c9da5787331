"""A job that cannot become a run: whatever is wrong with it, it ends as failed and leaves results that say why."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nvflare.apis.fl_constant import ReservedKey
from nvflare.apis.fl_context import FLContext, FLContextManager
from nvflare.apis.signal import Signal

from medflare.cli import main
from medflare.evaluation.results import load_results
from medflare.flare.aggregators import SoftPullAggregator, WeightedAggregator
from medflare.flare.controller import MedflareController
from medflare.flare.exchange.participants import TASK_FILE
from medflare.tasks.config import load_task


class Server:
    """A server's engine with two sites, as far as a controller needs it before anything is sent."""

    def __init__(self, root: Path, aggregator: Any):
        self.root = root
        self.aggregator = aggregator
        self.panics: list[str] = []
        self.task_file.parent.mkdir(parents=True)
        self.task_file.write_text(json.dumps(load_task("phantom").to_dict()))

    @property
    def task_file(self) -> Path:
        return self.root / "job" / "config" / TASK_FILE

    def get_component(self, name: str) -> Any:
        return self.aggregator if name == "aggregator" else None

    def get_clients(self) -> list[Any]:
        return [SimpleNamespace(name="site-1"), SimpleNamespace(name="site-2")]

    def get_workspace(self) -> Any:
        return SimpleNamespace(
            get_app_config_dir=lambda job: str(self.root / job / "config"),
            get_run_dir=lambda job: str(self.root / job),
            get_root_dir=lambda: str(self.root),
        )

    def fire_event(self, event: str, fl_ctx: FLContext) -> None:
        """Nobody listens."""

    def run(self, controller: MedflareController) -> None:
        fl_ctx: FLContext = FLContextManager(
            engine=self, identity_name="server", job_id="job", public_stickers={}, private_stickers={}
        ).new_context()
        fl_ctx.set_prop(ReservedKey.ENGINE, self, private=True, sticky=False)
        controller._engine = self
        controller.system_panic = lambda reason, ctx: self.panics.append(reason)  # type: ignore[method-assign]
        controller.control_flow(Signal(), fl_ctx)


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(tmp_path, WeightedAggregator())


def no_task(server: Server) -> None:
    server.task_file.unlink()


def task_of_bytes(server: Server) -> None:
    server.task_file.write_bytes(b"\xff\xfe\x00binary")


def cut_short(server: Server) -> None:
    server.task_file.write_text(server.task_file.read_text()[:40])


def unknown_key(server: Server) -> None:
    server.task_file.write_text(json.dumps({**load_task("phantom").to_dict(), "batchsize": 4}))


def unknown_method(server: Server) -> None:
    server.aggregator = WeightedAggregator(method="fedms")


def no_aggregator(server: Server) -> None:
    server.aggregator = None


def broken_aggregator(server: Server) -> None:
    server.aggregator = SoftPullAggregator(method=["fedsm"])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("break_", "method", "task", "said"),
    [
        (no_task, "fedavg", "unknown", "no such task file"),
        (task_of_bytes, "fedavg", "unknown", "not readable as text"),
        (cut_short, "fedavg", "unknown", "not valid JSON"),
        (unknown_key, "fedavg", "unknown", "batchsize"),
        (unknown_method, "fedms", "phantom", "did you mean fedsm"),
        (no_aggregator, "unknown", "phantom", "component 'aggregator' of the job is no medflare aggregator"),
        (broken_aggregator, "['fedsm']", "phantom", "TypeError"),
    ],
)
def test_a_job_that_is_wrong_leaves_results(
    server: Server,
    break_: Callable[[Server], None],
    method: str,
    task: str,
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    break_(server)
    server.run(MedflareController(rounds=3, seed=7, outside=["site-2"]))
    results = load_results(server.root)  # holds the contract
    assert (results["status"], results["method"], results["task"]) == ("FAILED", method, task)
    assert said in results["reason"] and server.panics == [results["reason"]]
    assert (results["rounds"], results["seed"]) == (3, 7)
    assert {name: site["role"] for name, site in results["sites"].items()} == {"site-1": "inside", "site-2": "outside"}
    assert [event["kind"] for event in results["events"]] == ["failed"]
    assert "FAILED" in (server.root / "job" / "medflare" / "report.html").read_text()
    assert main(["results", str(server.root)]) == 1
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"rounds": "three"}, "rounds must be a whole number, got 'three'"),
        ({"rounds": -1}, "rounds must be at least 1, got -1"),
        ({"seed": None}, "seed must be a whole number, got None"),
        ({"outside": 5}, "outside must be a list, got 5"),
        ({"site_half": "fedms"}, "did you mean fedsm"),
        ({"aggregator_id": "mine"}, "component 'mine' of the job"),
        ({"resume": "../other"}, "is no job id"),
        ({"resume": "gone"}, "no checkpoint in"),
    ],
)
def test_settings_that_are_wrong_leave_results(server: Server, settings: dict[str, Any], said: str) -> None:
    server.run(MedflareController(**{"rounds": 3, "seed": 7, **settings}))
    results = load_results(server.root)
    assert results["status"] == "FAILED" and said in results["reason"]
    assert server.panics == [results["reason"]]
