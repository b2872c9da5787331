"""Extensions of other distributions under FLARE: each party's `packages` decide, before a task is read."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from nvflare.apis.event_type import EventType
from nvflare.apis.signal import Signal
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType

from flare.server import Server
from foreign.install import LAB, METHOD, install, installed_extensions
from helpers import small_tasks
from medflare.core.errors import ConfigError
from medflare.core.message import Message
from medflare.data.local import LOCAL_FILE
from medflare.flare.aggregators import MethodAggregator, WeightedAggregator
from medflare.flare.components import JobComponents
from medflare.flare.controller import MedflareController
from medflare.flare.executors import FedAvgExecutor
from medflare.flare.messages import error_of, to_shareable
from medflare.flare.participants import ParticipantSpec
from medflare.methods import catalogue

TASK: dict[str, Any] = {
    **small_tasks.CLASSIFICATION,
    "embedded": "phantom",
    "metrics": ["lab_confidence"],
}


@pytest.fixture(autouse=True)
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The distributions of tests/foreign, installed and not trusted."""
    install(tmp_path / "site-packages")
    for folder in installed_extensions(tmp_path, monkeypatch):
        catalogue._foreign.cache_clear()
        yield folder
    catalogue._foreign.cache_clear()


@pytest.fixture
def server(tmp_path: Path) -> Server:
    """A server whose job has a metric of a distribution that it does not trust."""
    server = Server(tmp_path / "server", WeightedAggregator())
    server.task_file.write_text(json.dumps(TASK))
    return server


def trust(local_file: Path) -> None:
    local_file.parent.mkdir(exist_ok=True)
    local_file.write_text(json.dumps({"packages": [LAB]}))


def test_a_site_trusts_its_packages_before_it_reads_the_task(
    server: Server, tmp_path: Path
) -> None:
    local = tmp_path / "site" / "local" / LOCAL_FILE
    local.parent.mkdir(parents=True)
    spec = ParticipantSpec("A", "fedavg", "", 0, server.task_file, local, tmp_path / "job")
    with pytest.raises(ConfigError, match=f"does not trust {LAB}"):
        spec.participant(lambda: False)
    trust(local)
    assert spec.participant(lambda: False)


def test_the_server_trusts_its_packages_before_it_reads_the_task(server: Server) -> None:
    controller = MedflareController(rounds=1, seed=0)
    controller._engine = server
    with pytest.raises(ConfigError, match="'lab_confidence' comes from lab_extensions, which"):
        controller._run(server.context())
    assert LAB not in sys.modules
    trust(server.local_file)
    assert controller._run(server.context()).task.metrics == ("lab_confidence",)


def test_an_executor_trusts_its_packages_before_it_reads_the_task(server: Server) -> None:
    def problem() -> str:
        request = to_shareable(Message({}, {}))
        return str(error_of(FedAvgExecutor(seed=0).execute("enrol", request, fl_ctx, Signal())))

    fl_ctx = server.context()
    assert "'lab_confidence' comes from lab_extensions, which" in problem()
    assert LAB not in sys.modules
    trust(server.local_file)
    assert "lab_" not in problem() and LAB in sys.modules


def test_flares_own_workflows_use_what_the_server_trusts(server: Server) -> None:
    def aggregated(aggregator: MethodAggregator) -> Any:
        aggregator.handle_event(EventType.START_RUN, server.context())
        for site, samples in (("A", 1), ("B", 3), ("C", 2)):
            params = {"w": torch.full((2,), float(samples))}
            meta = {"client_name": site, "NUM_STEPS_CURRENT_ROUND": samples}
            aggregator.accept_model(FLModel(params=params, params_type=ParamsType.FULL, meta=meta))
        return aggregator.aggregate_model().params["w"].tolist()

    for name in (LAB, METHOD):  # of earlier tests of this process
        sys.modules.pop(name, None)
    for aggregator in (
        WeightedAggregator({"rule": "lab_largest"}),
        MethodAggregator(method=METHOD),
    ):
        with pytest.raises(ConfigError, match=r"lab_extensions|damped_fedavg"):
            aggregated(aggregator)
    assert not {LAB, METHOD} & sys.modules.keys()
    trust(server.local_file)
    assert aggregated(WeightedAggregator({"rule": "lab_largest"})) == [3.0, 3.0]


@pytest.mark.parametrize(
    "change",
    [
        {"network": {"name": "lab_cnn"}},
        {"loss": {"name": "lab_poly"}},
        {"optimizer": {"name": "lab_sign", "lr": 0.1}},
        {"intensity": {"name": "lab_halved"}},
        {"augment": [{"name": "RandFlip"}, {"name": "lab_shifted"}]},
        {"metric": "lab_confidence"},
        {"metrics": ["accuracy", "lab_confidence"]},
        {"rule": "lab_largest"},
        {"server.rule": "lab_largest"},
        {"adapt": "lab_sharper, rate=0.1"},
    ],
    ids=str,
)
def test_a_job_that_names_what_the_party_does_not_trust_is_refused_when_it_arrives(
    party: Path, change: dict[str, Any]
) -> None:
    app = party / "4711" / "app_site-1"
    file = app / "config" / "task.json"
    edit = change
    (setting,) = change
    if setting in ("rule", "server.rule", "adapt"):
        file = app / "config" / "config_fed_client.json"
        edit = {"components": [], "hyper": {"server": change}}
    file.write_text(json.dumps({**json.loads(file.read_text()), **edit}))
    reason, _ = JobComponents().validate(str(app))
    assert (
        reason.startswith(f"{setting.rpartition('.')[2]} lab_")
        and " refused: to trust it, add" in reason
    )
    assert LAB in reason and "\n" not in reason and LAB not in sys.modules
    assert reason in (party / "audit.log").read_text()
    trust(party / "local" / LOCAL_FILE)
    assert JobComponents().validate(str(app)) == ("", {}) and LAB not in sys.modules
