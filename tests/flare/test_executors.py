"""A site's executor: tasks in, answers or one-line reasons out, in this process or in a fork of a warm host."""

import errno
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FilterKey, FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext, FLContextManager
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.filters.percentile_privacy import PercentilePrivacy

from helpers.small_tasks import tiny_phantom
from helpers.waiting import eventually
from medflare.core.errors import Aborted, DataError, MedflareError
from medflare.core.files import write_json
from medflare.core.message import Message
from medflare.core.text import read_json
from medflare.data.local import PROGRESS, OutboundLimits, private_folder
from medflare.federation.enrolment import identity_of
from medflare.flare import executors
from medflare.flare import simulator as simulator_module
from medflare.flare.executors import FedAvgExecutor, MedflareExecutor
from medflare.flare.guard import validate_tensors
from medflare.flare.liveness import Heartbeat
from medflare.flare.messages import UNABLE, error_of, register_decomposers, to_message, to_shareable
from medflare.flare.names import TASK_FILE
from medflare.flare.participants import ParticipantSpec, anchor_data_root
from medflare.flare.simulator import HostClient
from medflare.inference.deployed import load_model
from medflare.methods.catalogue import get_method
from medflare.networks.catalogue import initial_network
from medflare.tasks.config import TaskConfig, load_task
from methods import squares


@pytest.fixture
def task() -> TaskConfig:
    return load_task(tiny_phantom(size=[16, 16], batch_size=4))


@pytest.fixture
def place(tmp_path: Path, task: TaskConfig) -> Path:
    """A site's workspace with one job in it."""
    (tmp_path / "config").mkdir()
    (tmp_path / "local").mkdir()
    write_json(tmp_path / "config" / TASK_FILE, task.to_dict())
    return tmp_path


@pytest.fixture
def fl_ctx(place: Path) -> FLContext:
    workspace = SimpleNamespace(
        get_run_dir=lambda job: str(place / job),
        get_app_config_dir=lambda job: str(place / "config"),
        get_site_config_dir=lambda: str(place / "local"),
    )
    engine = SimpleNamespace(
        get_workspace=lambda: workspace,
        fire_event=lambda event, ctx: None,
        send_aux_request=lambda **request: {},
        client=SimpleNamespace(communicator=SimpleNamespace(timeout=300.0)),
    )
    manager = FLContextManager(
        engine=engine, identity_name="CS", job_id="run", public_stickers={}, private_stickers={}
    )
    engine.new_context = manager.new_context
    return manager.new_context()


def enrolment(task: TaskConfig, /, **changes: Any) -> Message:
    identity = identity_of(get_method("fedavg"), {}, task.fingerprint(), 0)
    return Message({}, {**identity, "role": "inside", "sites": ["CS", "DU"], **changes})


def model(task: TaskConfig, step: int = 0) -> Message:
    return Message(
        {"model": initial_network(task, 0).state_dict()}, {"step": step, "run_rounds": 3}
    )


def answered(
    executor: MedflareExecutor,
    fl_ctx: FLContext,
    phase: str,
    message: Message,
    round: int = 0,
    abort: bool = False,
) -> Shareable:
    signal = Signal()
    if abort:
        signal.trigger(True)
    shareable = to_shareable(message)
    shareable.set_header(AppConstants.CURRENT_ROUND, round)
    executor.handle_event(EventType.ABOUT_TO_START_RUN, fl_ctx)
    return executor.execute(phase, shareable, fl_ctx, signal)


def test_a_federation_seen_from_a_site(fl_ctx: FLContext, place: Path, task: TaskConfig) -> None:
    executor = FedAvgExecutor(seed=0)
    assert to_message(answered(executor, fl_ctx, "enrol", enrolment(task))).meta["n"]["train"] > 0
    reply = to_message(answered(executor, fl_ctx, "train", model(task)))
    assert reply.meta["n_samples"] > 0
    assert reply.states["model"].keys() == model(task).states["model"].keys()
    delivered = to_message(answered(executor, fl_ctx, "finalize", model(task, step=4), round=3))
    assert 0 <= delivered.meta["metrics"]["deployed"]["dice"] <= 1
    kept = load_model(place / "medflare" / "run" / "personal")
    assert (kept.card["site"], kept.card["role"], kept.card["method"]) == (
        "CS",
        "personal",
        "fedavg",
    )
    assert [*(place / "medflare-cache").iterdir()], (
        "decoded images are kept for all jobs of the site"
    )
    assert not list((place / "run").rglob("*cache*"))


def test_a_site_lives_while_its_task_or_answer_travels(
    fl_ctx: FLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the poll that brings a task until its answer was sent, downloads, filters and uploads included."""
    told: list[str] = []
    monkeypatch.setattr(Heartbeat, "begin", lambda heartbeat, fl_ctx: told.append("lives"))
    monkeypatch.setattr(Heartbeat, "end", lambda heartbeat: told.append("rests"))
    monkeypatch.setattr(executors, "wait_for_work", lambda fl_ctx: told.append("waits"))
    executor = FedAvgExecutor(seed=0)
    pull = EventType.BEFORE_PULL_TASK
    send = EventType.BEFORE_SEND_TASK_RESULT
    sent = EventType.AFTER_SEND_TASK_RESULT
    for event in (pull, send, sent, EventType.END_RUN):
        told.append(event)
        executor.handle_event(event, fl_ctx)
    assert told == [
        pull,
        "rests",
        "waits",
        "lives",
        send,
        sent,
        "rests",
        EventType.END_RUN,
        "rests",
    ]


def test_a_new_process_goes_on_where_the_last_one_stopped(
    fl_ctx: FLContext, task: TaskConfig
) -> None:
    answered(FedAvgExecutor(seed=0), fl_ctx, "enrol", enrolment(task))
    together = FedAvgExecutor(seed=0)
    first = to_message(answered(together, fl_ctx, "train", model(task)))
    again = to_message(answered(FedAvgExecutor(seed=0), fl_ctx, "train", model(task)))
    assert squares.equal(first.states["model"], again.states["model"])


def test_a_resumed_job_continues_from_the_state_of_the_interrupted_one(
    fl_ctx: FLContext, place: Path, task: TaskConfig
) -> None:
    answered(FedAvgExecutor(seed=0), fl_ctx, "enrol", enrolment(task))
    (place / "medflare" / "run").rename(place / "medflare" / "first")
    assert (
        error_of(answered(FedAvgExecutor(seed=0, resume="first"), fl_ctx, "train", model(task)))
        is None
    )
    assert "elsewhere" in str(
        error_of(
            answered(FedAvgExecutor(seed=0, resume="../elsewhere"), fl_ctx, "train", model(task))
        )
    )


def test_reasons_name_the_site_on_one_line(
    fl_ctx: FLContext, place: Path, task: TaskConfig
) -> None:
    hyper = get_method("fedavg").effective({"weighting": "uniform"})
    for token, changed in (
        ("weighting", {"hyper": hyper}),
        ("seed", {"seed": 9}),
        ("task", {"task": "another fingerprint"}),
    ):
        assert token in str(
            error_of(answered(FedAvgExecutor(seed=0), fl_ctx, "enrol", enrolment(task, **changed)))
        )
    (place / "local" / "medflare.json").write_text('{"data_root": "/nowhere"}')
    reason = str(error_of(answered(FedAvgExecutor(seed=0), fl_ctx, "enrol", enrolment(task))))
    assert reason.startswith("DataError") and "\n" not in reason
    assert "fedavgg" in str(
        error_of(answered(MedflareExecutor(seed=0, method="fedavgg"), fl_ctx, "enrol", Message()))
    )


def test_a_sites_own_privacy_budget(fl_ctx: FLContext, place: Path, task: TaskConfig) -> None:
    """PersistentState beside local/medflare.json over processes; what it costs is told, and may leave; what would exceed it is refused."""
    pytest.importorskip("opacus", reason="needs medflare[privacy]")
    write_json(place / "local" / "medflare.json", {"privacy": {"epsilon": 4.8, "delta": 1e-5}})
    reason = str(error_of(answered(FedAvgExecutor(seed=0), fl_ctx, "enrol", enrolment(task))))
    assert "dp_noise" in reason
    hyper = get_method("fedavg").effective({"dp_noise": 1.0})
    executor = FedAvgExecutor(seed=0, hyper=hyper)
    answered(executor, fl_ctx, "enrol", enrolment(task, hyper=hyper))
    reply = to_message(answered(executor, fl_ctx, "train", model(task)))
    assert 0 < reply.meta["privacy"]["epsilon"] < 4.8
    method = get_method("fedavg")
    validate_tensors(
        reply,
        method.site_class.manifest("train", method.plan(task, ("CS", "DU"), hyper)),
        OutboundLimits(),
    )
    assert (place / "local" / "privacy" / "privacy-CS.safetensors").is_file()
    reason = str(
        error_of(
            answered(
                FedAvgExecutor(seed=0, hyper=hyper), fl_ctx, "train", model(task, step=1), round=1
            )
        )
    )
    assert "4.8" in reason


def test_a_job_with_result_filters_of_its_own_is_refused_before_it_starts_work(
    fl_ctx: FLContext, place: Path, task: TaskConfig
) -> None:
    table = {f"train{FilterKey.DELIMITER}{FilterKey.OUT}": [PercentilePrivacy()]}
    fl_ctx.set_prop(FLContextKey.RUNNER, SimpleNamespace(task_result_filters=table), private=True)
    reason = str(error_of(answered(FedAvgExecutor(seed=0), fl_ctx, "enrol", enrolment(task))))
    assert (
        "nvflare.app_common.filters.percentile_privacy.PercentilePrivacy" in reason
        and "CS" in reason
    )
    assert not (place / "medflare-cache").exists() and not (place / "run").exists(), (
        "no image has been read"
    )


def test_no_name_of_a_file_leaves_with_an_error(
    fl_ctx: FLContext,
    place: Path,
    task: TaskConfig,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    executor = FedAvgExecutor(seed=0)
    answered(executor, fl_ctx, "enrol", enrolment(task))
    for error in (
        DataError("/archive/Meier Anna.png is odd"),
        ValueError("/archive/Meier Anna.png is odd"),
        SystemExit("/archive/Meier Anna.png is odd"),
    ):

        def broken(*arguments: object, error: BaseException = error) -> None:
            raise error

        monkeypatch.setattr("medflare.methods.fedavg.FedAvgSite.fit", broken)
        reason = str(error_of(answered(executor, fl_ctx, "train", model(task), round=2)))
        assert (
            reason.startswith(f"{type(error).__name__} in 'train' of round 3")
            and "Meier" not in reason
        )
    assert "Meier" not in caplog.text
    kept = place / "medflare/run/errors.log"
    assert kept.read_text().count("Meier Anna.png is odd") == 3 and kept.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_full_disk_is_said_in_words(
    fl_ctx: FLContext,
    task: TaskConfig,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    number: int,
    wrapped: bool,
) -> None:
    """To the lead, and in the job's log at the site; without a path."""
    executor = FedAvgExecutor(seed=0)
    answered(executor, fl_ctx, "enrol", enrolment(task))

    def full(*arguments: object) -> None:
        try:
            raise OSError(number, os.strerror(number), "/archive/Meier Anna.png")
        except OSError as error:
            if wrapped:
                raise DataError("Meier Anna.png cannot be stored") from error
            raise

    monkeypatch.setattr("medflare.methods.fedavg.FedAvgSite.fit", full)
    reason = str(error_of(answered(executor, fl_ctx, "train", model(task))))
    assert "disk is full" in reason and "Meier" not in reason and "/" not in reason
    assert f"{UNABLE}{reason}" in caplog.text


@pytest.mark.parametrize("bound", ["minutes", "hours"])
def test_a_step_ends_where_the_sites_time_does(
    fl_ctx: FLContext, place: Path, task: TaskConfig, bound: str
) -> None:
    write_json(place / "local" / "medflare.json", {"bounds": {bound: 1e-9}})
    executor = FedAvgExecutor(seed=0)
    assert error_of(answered(executor, fl_ctx, "enrol", enrolment(task))) is None
    assert f"bounds.{bound}" in str(error_of(answered(executor, fl_ctx, "train", model(task))))


def test_the_end_of_a_job_is_noted(fl_ctx: FLContext, task: TaskConfig) -> None:
    executor = FedAvgExecutor(seed=0)
    executor.handle_event(EventType.END_RUN, fl_ctx)  # of a job that began nothing
    answered(executor, fl_ctx, "enrol", enrolment(task))
    answered(executor, fl_ctx, "train", model(task))
    executor.handle_event(EventType.END_RUN, fl_ctx)
    folder = private_folder(Path(fl_ctx.get_engine().get_workspace().get_run_dir("run")))
    status = read_json(folder / PROGRESS)
    assert status["phase"] == "train" and re.fullmatch(r"\d{4}-\d\d-\d\d .+", status["ended"])


def test_abort_is_honoured_before_the_next_batch(fl_ctx: FLContext, task: TaskConfig) -> None:
    executor = FedAvgExecutor(seed=0)
    answered(executor, fl_ctx, "enrol", enrolment(task))
    assert (
        answered(executor, fl_ctx, "train", model(task), abort=True).get_return_code()
        == ReturnCode.TASK_ABORTED
    )


def test_a_relative_data_root_is_meant_where_the_user_was(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PWD", str(tmp_path))
    for given, meant in (
        ("data", tmp_path / "data"),
        ("/data", Path("/data")),
        ("../data", tmp_path / ".." / "data"),
    ):
        monkeypatch.setenv("MEDFLARE_DATA_ROOT", given)
        anchor_data_root()
        assert os.environ["MEDFLARE_DATA_ROOT"] == str(meant)


@pytest.mark.slow
def test_the_simulators_host(
    fl_ctx: FLContext,
    place: Path,
    task: TaskConfig,
    simulator: "subprocess.Popen[bytes]",
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A fork answers as a site's process does, says why it cannot, stops on request, is replaced if killed; all end with the simulator."""
    own = FedAvgExecutor(seed=0)
    answered(own, fl_ctx, "enrol", enrolment(task))
    expected = [
        to_message(answered(own, fl_ctx, "train", model(task, step), round=step)) for step in (0, 1)
    ]
    register_decomposers()  # as FLARE does in every process of its own
    host = HostClient(simulator.pid)
    assert not host.started()
    files = (
        str(place / "config" / TASK_FILE),
        str(place / "local" / "medflare.json"),
        str(place / "run" / "elsewhere"),
    )
    host.start("fedavg", files[0])
    assert host.started()
    with pytest.raises(FileExistsError):
        host.start("fedavg", files[0])
    spec = ParticipantSpec("CS", "fedavg", "", 0, Path(files[0]), Path(files[1]), Path(files[2]))

    def answer(phase: str, message: Message, round: int = 0, aborted: bool = False) -> Message:
        return to_message(
            host.reply(spec, phase, round, to_shareable(message), aborted=lambda: aborted)
        )

    answer("enrol", enrolment(task))
    same(answer("train", model(task)), expected[0])
    (fork,) = psutil.Process(children_of(host)[0]).children()
    with pytest.raises(MedflareError, match="dance"):
        answer("dance", model(task, step=1))
    # A step may take less time than lies between two looks at the request to stop.
    monkeypatch.setattr(simulator_module, "_ABORT_CHECK", 0)
    with pytest.raises(Aborted):
        answer("train", model(task, step=1), round=1, aborted=True)
    fork.kill()
    assert eventually(lambda: fork.status() == psutil.STATUS_ZOMBIE)
    same(answer("train", model(task, step=1), round=1), expected[1])
    forks = psutil.Process(children_of(host)[0]).children()
    assert [one.pid for one in forks] != [fork.pid]
    simulator.kill()
    simulator.wait()
    assert eventually(
        lambda: not host.folder.exists() and not any(one.is_running() for one in forks)
    )
    with pytest.raises(MedflareError):
        answer("train", model(task, step=1), round=1)


def same(one: Message, other: Message) -> None:
    assert one.meta == other.meta and squares.equal(one.states["model"], other.states["model"])


def children_of(host: HostClient) -> list[int]:
    """The processes that serve a host's simulator: their command line names it."""
    expected = ["medflare.flare.simulator", str(host.simulator)]
    return [
        one.pid
        for one in psutil.Process().children()
        if all(word in one.cmdline() for word in expected)
    ]


def test_a_process_of_the_simulator_imports_next_to_nothing() -> None:
    """With fewer threads than sites FLARE starts one for every task."""
    code = "import sys, medflare.flare.executors, medflare.flare.controller; print({'torch', 'monai', 'scipy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
