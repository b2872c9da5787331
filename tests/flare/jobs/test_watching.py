"""A job is followed line by line: nothing twice, nothing missed, who is silent, and how it ended."""

from typing import Any

import pytest

from flare.jobs.sessions import Served
from medflare.evaluation.console import round_line
from medflare.flare.jobs.watching import watch

STEPS = [round_line("train", round, 3, {"A": {"loss": 0.5, "validation": {"global": 0.8}}}, {}, 1.0 + round) for round in range(3)]
SUBMITTED, RUNNING, COMPLETED, FAILED = "SUBMITTED", "RUNNING", "FINISHED:COMPLETED", "FINISHED:EXECUTION_EXCEPTION"


def told(*lines: str, count: int | None = None, **silent: float) -> dict[str, Any]:
    step = {"phase": "train", "round": 1, "silent": silent, "silence": 120.0}
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


def test_a_job_that_waits_says_what_for() -> None:
    tried = [f"2026-11-22 08:15:{second}: connected sites (1) < min_sites (2)" for second in (10, 20)]
    served = Served(SUBMITTED, SUBMITTED, SUBMITTED, RUNNING, COMPLETED, history=([], tried[:1], tried, tried, tried))
    waiting = "id SUBMITTED, waits: connected sites (1) < min_sites (2)"
    assert followed(served)[1] == ["id SUBMITTED", waiting, "id RUNNING", "id FINISHED:COMPLETED"]


def test_lines_that_are_kept_no_more_are_not_missed_in_count() -> None:
    _, said = followed(Served(RUNNING, RUNNING, COMPLETED, stats=(told("a", "b"), told("d", "e", count=5))))
    assert said[1:5] == ["a", "b", "d", "e"]
    _, said = followed(Served(RUNNING, RUNNING, COMPLETED, stats=(told("a", "b"), told("b", "c", count=3))))
    assert said[1:4] == ["a", "b", "c"]


def test_steps_after_the_last_look_are_in_the_log() -> None:
    log = "\n".join(f"2026-11-22 08:15:30,1 - MedflareController - INFO - [run=id] {step}" for step in STEPS)
    ended, said = followed(Served(RUNNING, COMPLETED, stats=(told(STEPS[0]),), log=log))
    assert ended and said == ["id RUNNING", *STEPS, "id FINISHED:COMPLETED"]


def test_who_is_silent_is_named_when_its_silence_has_doubled() -> None:
    stats = tuple(told(A=seconds, B=1.0) for seconds in (4.0, 11.0, 15.0, 22.0, 45.0, 0.5, 12.0))
    _, said = followed(Served(*[RUNNING] * 7, COMPLETED, stats=stats))
    named = [line for line in said if line.startswith("silent")]
    assert named[0] == "silent: A: nothing heard for 11 s in 'train' of round 1; given up after 120 s"
    assert [line.split()[5] for line in named] == ["11", "22", "45", "12"]


def test_a_failed_job_says_why() -> None:
    ended, said = followed(Served(RUNNING, FAILED, log="ERROR - medflare: FAILED: no site is present\n"))
    assert not ended and said[-1] == "the federation failed: no site is present"
    ended, said = followed(Served(SUBMITTED, "FINISHED:FAILED_TO_RUN", details=("site-3: BYOC not permitted",)))
    assert not ended and said[-1].startswith("site-3 refuses jobs that bring their own code") and "--no-byoc" in said[-1]
    ended, said = followed(Served("FINISHED:ABORTED"))
    assert not ended and said[-1].startswith("nothing known about job id explains its end")


def test_who_has_watched_long_enough_is_told_that_the_job_goes_on() -> None:
    ended, said = followed(Served(RUNNING), timeout=3)
    assert not ended and said[-1] == "id is still RUNNING after 3 s; it goes on, nobody watches"


@pytest.mark.parametrize("stats", [{}, {"medflare": "?"}])
def test_a_job_that_says_nothing_is_followed_by_its_state(stats: dict[str, Any]) -> None:
    assert followed(Served(RUNNING, COMPLETED, stats=(stats,)))[1] == ["id RUNNING", "id FINISHED:COMPLETED"]
