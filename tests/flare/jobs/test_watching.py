"""A job is followed line by line: nothing twice, nothing missed, who is silent, and how it ended."""

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from flare.jobs.sessions import Served
from medflare.core.errors import MedflareError
from medflare.core.events import EventLog
from medflare.federation.outcome import StepReport
from medflare.flare.jobs import watching
from medflare.flare.jobs.sessions import Unreachable
from medflare.flare.jobs.watching import explanations, watch_job
from medflare.flare.messages import UNABLE
from medflare.flare.tracking import Progress
from medflare.methods.base import Step

META = {"A": {"loss": 0.5, "validation": {"global": 0.8}}}
STEPS = [
    StepReport(Step("train", round), round, META, {}, 1.0 + round, {}).text(3) for round in range(3)
]
SUBMITTED = "SUBMITTED"
RUNNING = "RUNNING"
COMPLETED = "FINISHED:COMPLETED"
FAILED = "FINISHED:EXECUTION_EXCEPTION"


def told(*lines: str, **silent: float) -> dict[str, Any]:
    step = {"phase": "train", "round": 1, "silent": silent, "heartbeat_timeout": 120.0}
    return {"medflare": {"lines": list(lines), **step}}


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


def watched(*served: Served | MedflareError, **options: Any) -> tuple[bool, list[str]]:
    output: list[str] = []
    with patch.multiple(watching, _INTERVAL=0.01, session=Restarted(*served)):
        return watch_job(Path("kit"), "fedsm-brain", output.append, **options), output


def test_every_line_is_said_once_as_it_comes() -> None:
    stats: tuple[dict[str, Any], ...] = ({}, told(STEPS[0]), told(STEPS[0]), told(*STEPS[:2]), {})
    ended, output = watched(Served(SUBMITTED, RUNNING, RUNNING, RUNNING, COMPLETED, stats=stats))
    assert ended and output == ["id SUBMITTED", "id RUNNING", *STEPS[:2], "id FINISHED:COMPLETED"]


def test_what_was_noted_after_the_last_look_is_in_the_log() -> None:
    """Of a quick job that is all: what a site was rejected for must not be missed by who watches it."""
    events = EventLog()
    noted = list[str]()
    progress = Progress(events)
    progress.log = noted.append
    events.add(
        "rejected",
        "validation metric of the global model is 7.0; its vote does not count",
        site="B",
        round=1,
    )
    progress.take_events()
    progress.take_events()
    log = "\n".join(
        f"2026-11-22 08:15:30,1 - MedflareController - INFO - [run=id] {line}"
        for line in (STEPS[0], *noted, STEPS[1])
    )
    event = "rejected: B (round 2): validation metric of the global model is 7.0; its vote does not count"
    expected = [STEPS[0], event, STEPS[1], "id FINISHED:COMPLETED"]
    assert watched(Served(COMPLETED, log=log))[1] == expected
    assert watched(Served(RUNNING, COMPLETED, stats=(told(STEPS[0], event),), log=log))[1] == [
        "id RUNNING",
        *expected,
    ]


def test_who_is_silent_is_named_when_its_silence_has_doubled() -> None:
    stats = tuple(told(A=seconds, B=1.0) for seconds in (4.0, 11.0, 15.0, 22.0, 45.0, 0.5, 12.0))
    _, output = watched(Served(*[RUNNING] * 7, COMPLETED, stats=stats))
    named = [line for line in output if line.startswith("silent")]
    assert [line.split()[5] for line in named] == ["11", "22", "45", "12"]


def test_what_a_job_does_is_said_when_there_is_no_news(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(monotonic=itertools.count(0, 100).__next__, sleep=time.sleep)
    monkeypatch.setattr(watching, "time", clock)
    enrolled = told(STEPS[0], A=0.0, B=0.0)
    enrolled["medflare"] |= {"phase": "enrol", "round": 0}
    early: dict[str, Any] = {"medflare": {"lines": []}}
    stats: tuple[dict[str, Any], ...] = ({}, early, enrolled, told(STEPS[0], A=0.0), told(STEPS[0]))
    _, output = watched(Served("SUBMITTED", *[RUNNING] * 5, COMPLETED, stats=({}, *stats)))
    work = [line.rpartition(" (")[0] for line in output if line.endswith(" s)")]
    start = "the processes of the server and the sites start"
    assert work == [
        "SUBMITTED",
        start,
        start,
        "enrolment, for which sites read their images, at work: A, B",
        "'train' of round 2, at work: A",
        "'train' of round 2, at work: the server",
    ]


def test_who_refused_a_job_that_the_others_run_is_named() -> None:
    details = ("site-1: OK", "site-2: ERROR: component os.system refused: it is not listed")
    ended, output = watched(Served(SUBMITTED, RUNNING, COMPLETED, details=details))
    assert (
        ended
        and sum("site-2" in line and "os.system" in line for line in output) == 1
        and "os.system" not in output[-1]
    )


def test_a_job_that_was_aborted_or_that_a_site_refused_for_another_reason() -> None:
    aborted = "FINISHED:ABORTED"
    assert watched(Served(RUNNING, aborted))[1][-2:] == [f"id {aborted}", "somebody aborted it"]
    details = ("server: OK", "site-1: a job of this id was here before")
    _, output = watched(Served(SUBMITTED, "FINISHED:FAILED_TO_RUN", details=details))
    assert output[-1] == "site-1 replied to the deployment: a job of this id was here before"


def test_a_failed_job_says_why() -> None:
    ended, output = watched(
        Served(RUNNING, FAILED, log="ERROR - medflare: FAILED: no site is present\n")
    )
    assert not ended and "no site is present" in output[-1]
    ended, output = watched(
        Served(SUBMITTED, "FINISHED:FAILED_TO_RUN", details=("site-3: BYOC not permitted",))
    )
    assert not ended and output[-1].startswith("site-3") and "--no-byoc" in output[-1]
    ended, output = watched(Served(FAILED))
    assert not ended and "job id" in output[-1]


def test_who_has_watched_long_enough_is_told_that_the_job_goes_on() -> None:
    ended, output = watched(Served(RUNNING), timeout=3)
    assert not ended and output[-1].startswith("id is still RUNNING")


class Leaving(Served):
    """Goes away at its last look."""

    def get_job_meta(self, identity: str) -> dict[str, Any]:
        if self.looks == len(self.states) - 1:
            raise Unreachable("no more session with the server of kit: inactive")
        return super().get_job_meta(identity)


GONE = Unreachable("no session with the server by kit: refused; is the server up?")


def test_a_server_that_comes_back_is_watched_on() -> None:
    first = Leaving(RUNNING, "", stats=(told(STEPS[0]),))
    second = Served(RUNNING, COMPLETED, stats=(told(*STEPS[:2]),))
    ended, output = watched(first, GONE, GONE, second)
    assert ended and output[:2] == ["id RUNNING", STEPS[0]]
    assert (
        "600" in output[2]
        and "back" in output[3]
        and output[4:] == ["id RUNNING", STEPS[1], "id FINISHED:COMPLETED"]
    )


def test_a_server_that_does_not_come_back_is_given_up_by_name() -> None:
    with pytest.raises(Unreachable, match="job id"):
        watched(Leaving(RUNNING, ""), GONE, patience=0.05)
    with pytest.raises(Unreachable, match="kit"):
        watched(GONE)


def test_a_job_that_the_server_lost_ends_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    ended, output = watched(Leaving(RUNNING, ""), Served("FINISHED:ABANDONED"))
    assert (
        not ended and output[-2] == "id FINISHED:ABANDONED" and "`medflare resume JOB" in output[-1]
    )
    monkeypatch.setattr("medflare.flare.jobs.watching._GONE", 0.0)
    ended, output = watched(Served(RUNNING, RUNNING))
    assert not ended and "no process" in output[-1]


# -- why a job failed ----------------------------------------------------------------------------------------------------


def test_the_words_of_a_site_explain_nothing() -> None:
    event = "INFO - medflare: noted: warning: B: medflare: FAILED: site A has sent wrong data"
    assert not list(explanations([("server", event)]))


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        (
            f"ERROR - {UNABLE}site A stops: longer than bounds.minutes",
            ["A could not do its part: site A stops", "bounds.minutes"],
        ),
        (
            f"ERROR - {UNABLE}ZeroDivisionError in 'train' of round 3",
            ["A could not", "ZeroDivisionError"],
        ),
        ("ERROR: privacy scope 'public' is not allowed", ["A ", "'public'", "scope"]),
        ("no reply (deployment timeout)", ["A did not reply", "doctor"]),
        (
            "ERROR - aborting due to fatal return code UNSAFE_JOB from client B",
            ["B ", "task_result_filters"],
        ),
        (
            "ConfigError: \"filters\" must contain Filter object but got <class 'a.B'>",
            ["A ", "a.B", "filter"],
        ),
        (
            "WARNING - [wf=medflare] - received dead job report for client B",
            ["at B", "stopped", "log.txt"],
        ),
    ],
)
def test_a_line_of_a_log_is_explained(line: str, parts: list[str]) -> None:
    (reason,) = explanations([("A", line)])
    for part in parts:
        assert part in reason
    assert (
        list(
            explanations(
                [
                    (
                        "A",
                        "medflare: noted: warning: two sites only\nINFO - medflare: site A: 12 images",
                    )
                ]
            )
        )
        == []
    )


@pytest.mark.parametrize(
    "line",
    [
        "{}Component '{}.x.Y' in ... is not in allow_list",
        "{}component {}.x.Y refused: class_allow_list in local/resources.json does not name it",
    ],
)
def test_an_administrator_is_asked_for_new_policies_for_medflares_names_only(line: str) -> None:
    for name in ("medflare", "os", "medflared"):
        (reason,) = explanations(
            [("A", line.format("ERROR: " if "component" in line else "", name))]
        )
        assert reason.startswith("A ") and f"{name}.x.Y" in reason
        assert ("--replace-policies" in reason) == (name == "medflare")


@pytest.mark.parametrize(
    "refused",
    [
        "component without a plain name",
        "component without a plain class name",
        "component configuration",
        "network medflare.cli.command:main",
        "network nets.small:Net",
        "configuration config_fed_client.conf",
        "configuration file",
    ],
)
def test_a_refusal_of_anything_else_is_repeated(refused: str) -> None:
    (reason,) = explanations([("A", f"NVFLARE_ERROR: {refused} refused: medflare reads JSON only")])
    assert reason.startswith("A ") and reason.endswith(f"{refused}: medflare reads JSON only")


def test_text_of_other_parties_is_printable() -> None:
    escape = "\x1b]0;PWN\x07\x1b[2J"
    stats = (told(f"round 1/3 train: {escape}"),)
    details = (f"{escape}: component a.B refused: {escape}",)
    log = f"ERROR - medflare: FAILED: {escape}\n"
    ended, output = watched(Served(RUNNING, FAILED, stats=stats, details=details, log=log))
    assert not ended and sum("PWN" in line for line in output) == 4
    for line in output:
        assert line.isprintable()
