"""A job is followed line by line: nothing twice, nothing missed, who is silent, and how it ended."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal

from flare.jobs.sessions import Served
from medflare.core.errors import ConfigError, MedflareError
from medflare.core.events import EventLog
from medflare.evaluation.console import round_line
from medflare.flare.executors import FedAvgExecutor
from medflare.flare.jobs.sessions import Unreachable
from medflare.flare.jobs.watching import explained, explanations, watch, watch_job
from medflare.flare.tracking import Progress

STEPS = [round_line("train", round, 3, {"A": {"loss": 0.5, "validation": {"global": 0.8}}}, {}, 1.0 + round) for round in range(3)]
SUBMITTED, RUNNING, COMPLETED, FAILED = "SUBMITTED", "RUNNING", "FINISHED:COMPLETED", "FINISHED:EXECUTION_EXCEPTION"


def told(*lines: str, count: int | None = None, **silent: float) -> dict[str, Any]:
    step = {"phase": "train", "round": 1, "silent": silent, "heartbeat_timeout": 120.0}
    return {"medflare": {"count": len(lines) if count is None else count, "lines": list(lines), **step}}


def followed(served: Served, **options: Any) -> tuple[bool, list[str]]:
    said: list[str] = []
    return watch(served, "id", said.append, **options), said


def test_every_line_is_said_once_as_it_comes() -> None:
    stats: tuple[dict[str, Any], ...] = ({}, told(STEPS[0]), told(STEPS[0]), told(*STEPS[:2]), {})
    assert followed(Served(SUBMITTED, RUNNING, RUNNING, RUNNING, COMPLETED, stats=stats)) == (
        True,
        ["id SUBMITTED", "id RUNNING", *STEPS[:2], "id FINISHED:COMPLETED"],
    )


def test_lines_that_are_kept_no_more_are_not_missed_in_count() -> None:
    _, said = followed(Served(RUNNING, RUNNING, COMPLETED, stats=(told("a", "b"), told("d", "e", count=5))))
    assert said[1:5] == ["a", "b", "d", "e"]
    _, said = followed(Served(RUNNING, RUNNING, COMPLETED, stats=(told("a", "b"), told("b", "c", count=3))))
    assert said[1:4] == ["a", "b", "c"]


def test_steps_after_the_last_look_are_in_the_log() -> None:
    log = "\n".join(f"2026-11-22 08:15:30,1 - MedflareController - INFO - [run=id] {step}" for step in STEPS)
    ended, said = followed(Served(RUNNING, COMPLETED, stats=(told(STEPS[0]),), log=log))
    assert ended and said == ["id RUNNING", *STEPS, "id FINISHED:COMPLETED"]


def test_what_was_noted_after_the_last_look_is_in_the_log() -> None:
    """Of a quick job that is all: what a site was rejected for must not be missed by who watches it."""
    events = EventLog()
    noted = list[str]()
    progress = Progress(events, noted.append)
    events.add("rejected", "validation metric of the global model is 7.0; its vote does not count", site="B", round=1)
    progress.log_events()
    progress.log_events()
    log = "\n".join(f"2026-11-22 08:15:30,1 - MedflareController - INFO - [run=id] {line}" for line in (STEPS[0], *noted, STEPS[1]))
    event = "rejected: B (round 1): validation metric of the global model is 7.0; its vote does not count"
    assert followed(Served(COMPLETED, log=log))[1] == [STEPS[0], event, STEPS[1], "id FINISHED:COMPLETED"]
    stats = (told(STEPS[0], event),)
    assert followed(Served(RUNNING, COMPLETED, stats=stats, log=log))[1] == [
        "id RUNNING",
        STEPS[0],
        event,
        STEPS[1],
        "id FINISHED:COMPLETED",
    ]


def test_who_is_silent_is_named_when_its_silence_has_doubled() -> None:
    stats = tuple(told(A=seconds, B=1.0) for seconds in (4.0, 11.0, 15.0, 22.0, 45.0, 0.5, 12.0))
    _, said = followed(Served(*[RUNNING] * 7, COMPLETED, stats=stats))
    named = [line for line in said if line.startswith("silent")]
    assert [line.split()[5] for line in named] == ["11", "22", "45", "12"]


def test_who_refused_a_job_that_the_others_run_is_named() -> None:
    details = ("site-1: OK", "site-2: ERROR: component os.system refused: it is not listed")
    ended, said = followed(Served(SUBMITTED, RUNNING, COMPLETED, details=details))
    assert ended and sum("site-2" in line and "os.system" in line for line in said) == 1 and "os.system" not in said[-1]


def test_a_failed_job_says_why() -> None:
    ended, said = followed(Served(RUNNING, FAILED, log="ERROR - medflare: FAILED: no site is present\n"))
    assert not ended and "no site is present" in said[-1]
    ended, said = followed(Served(SUBMITTED, "FINISHED:FAILED_TO_RUN", details=("site-3: BYOC not permitted",)))
    assert not ended and said[-1].startswith("site-3") and "--no-byoc" in said[-1]
    ended, said = followed(Served("FINISHED:ABORTED"))
    assert not ended and "job id" in said[-1]


def test_who_has_watched_long_enough_is_told_that_the_job_goes_on() -> None:
    ended, said = followed(Served(RUNNING), timeout=3)
    assert not ended and said[-1].startswith("id is still RUNNING")


class Restarted:
    """What opens sessions with a server that goes away: a Served for each that it lets in, an error for each that it does not."""

    def __init__(self, *served: Served | MedflareError):
        self.served = list(served)

    @contextmanager
    def __call__(self, kit: Path) -> Iterator[Any]:
        one = self.served.pop(0) if len(self.served) > 1 else self.served[0]
        if isinstance(one, MedflareError):
            raise one
        yield one


class Leaving(Served):
    """Goes away at its last look."""

    def get_job_meta(self, identity: str) -> dict[str, Any]:
        if self.looks == len(self.states) - 1:
            raise Unreachable("no more session with the server of kit: inactive")
        return super().get_job_meta(identity)


def watched(*served: Served | MedflareError, **options: Any) -> tuple[bool, list[str]]:
    said: list[str] = []
    return watch_job(Path("kit"), "fedsm-brain", said.append, every=0.01, opening=Restarted(*served), **options), said


GONE = Unreachable("no session with the server by kit: refused; is the server up?")


def test_a_server_that_comes_back_is_watched_on() -> None:
    first, second = Leaving(RUNNING, "", stats=(told(STEPS[0]),)), Served(RUNNING, COMPLETED, stats=(told(*STEPS[:2]),))
    ended, said = watched(first, GONE, GONE, second)
    assert ended and said[:2] == ["id RUNNING", STEPS[0]]
    assert "600" in said[2] and "back" in said[3] and said[4:] == ["id RUNNING", STEPS[1], "id FINISHED:COMPLETED"]


def test_a_server_that_does_not_come_back_is_given_up_by_name() -> None:
    with pytest.raises(Unreachable, match="job id"):
        watched(Leaving(RUNNING, ""), GONE, patience=0.05)
    with pytest.raises(Unreachable, match="kit"):
        watched(GONE)


def test_a_job_that_the_server_lost_ends_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    ended, said = watched(Leaving(RUNNING, ""), Served("FINISHED:ABANDONED"))
    assert not ended and said[-2] == "id FINISHED:ABANDONED" and "`medflare resume`" in said[-1]
    monkeypatch.setattr("medflare.flare.jobs.watching._GONE", 0.0)
    ended, said = watched(Served(RUNNING, RUNNING))
    assert not ended and "no process" in said[-1]


# -- why a job failed ----------------------------------------------------------------------------------------------------


LINES = (
    "site A stops: the step takes longer than the 5 minutes of its bounds.minutes",
    "the process that worked on 'train' of round 3 died",
)


def logged(error: Exception, folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the executor writes to the site's log when a step ends with this error."""

    def broken(*arguments: object) -> Shareable:
        raise error

    monkeypatch.setattr(FedAvgExecutor, "_reply", broken)
    monkeypatch.setattr(FedAvgExecutor, "_make_spec", lambda *arguments: SimpleNamespace(folder=folder))
    FedAvgExecutor(seed=0).execute("train", Shareable(), FLContext(), Signal())
    return caplog.text


@pytest.mark.parametrize("line", LINES)
def test_every_kind_of_line_is_explained(
    line: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = logged(ConfigError(line), tmp_path, caplog, monkeypatch)
    (said,) = explanations([("A", text)])
    assert said.startswith("A ") and said.endswith(line)


def test_an_unexpected_error_is_explained_by_its_kind_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = logged(ZeroDivisionError("division by zero"), tmp_path, caplog, monkeypatch)
    assert "Traceback" not in text and "division by zero" in (tmp_path / "errors.log").read_text()
    (said,) = explanations([("A", text)])
    assert said.startswith("A ") and "ZeroDivisionError" in said


def test_what_nobody_failed_for_is_no_explanation() -> None:
    assert list(explanations([("A", "medflare: noted: warning: two sites only\nINFO - medflare: site A: 12 images")])) == []


def test_the_logs_that_are_read_do_not_stay_in_the_kit(tmp_path: Path) -> None:
    """Else results that are fetched later would get another name there."""

    class Logged(Served):
        def list_job_components(self, identity: str) -> list[str]:
            return ["ERRORLOG_site-1"]

        def download_job_components(self, identity: str) -> str:
            (tmp_path / identity).mkdir()
            (tmp_path / identity / "ERRORLOG_site-1").write_text("ERROR - No module named 'medflare'")
            return str(tmp_path / identity)

    (said,) = explained(cast(Any, Logged("FINISHED:ABORTED")), "id")
    assert said.startswith("site-1 lacks the Python package medflare") and not [*tmp_path.iterdir()]
