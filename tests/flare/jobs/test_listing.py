"""The jobs of a federation: found by name, id and the beginning of an id; their table; kits that are none."""

import json
from pathlib import Path
from typing import Any, cast

import pytest

from flare.jobs.sessions import Served, job
from medflare.cli import main
from medflare.core.errors import ConfigError
from medflare.flare.jobs.listing import listing
from medflare.flare.jobs.sessions import found_job, id_of, jobs_of, name_of

OLD, NEW, OTHER = "11112222-old", "11113333-new", "44445555-other"


def props(**about: Any) -> dict[str, Any]:
    return {"custom_props": {"medflare": about}}


def test_a_job_is_found_by_id_and_its_beginning() -> None:
    jobs = [job(OLD), job(NEW, name="4444"), job(OTHER, name=OLD)]
    for wanted, expected in ((NEW, NEW), ("11113", NEW), ("44445555-OTHER", OTHER), ("4444", OTHER), (OLD, OLD)):
        assert id_of(found_job(jobs, wanted)) == expected


def test_a_name_that_another_lead_gave_is_shown_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Served("RUNNING")
    monkeypatch.setattr(server, "list_jobs", lambda detailed: [job(OLD, name="a\x1b[2Jb\u202e")])
    assert [name_of(found) for found in jobs_of(cast(Any, server))] == [r"a\x1b[2Jb\u202e"]


def test_of_a_name_the_newest_that_runs() -> None:
    jobs = [job(OLD, status="FINISHED:COMPLETED"), job(NEW), job(OTHER)]
    assert id_of(found_job(jobs, "fedsm-brain")) == OTHER
    assert id_of(found_job(jobs[:1], "fedsm-brain")) == OLD


def test_what_is_not_found_or_not_clear_is_one_line() -> None:
    done = [job(OLD, status="FINISHED:COMPLETED"), job(NEW, status="FINISHED:ABORTED")]
    with pytest.raises(ConfigError, match=r"^2 jobs fit 'fedsm-brain': 11112222 \(FINISHED:COMPLETED\), 11113333 .*; give the id"):
        found_job(done, "fedsm-brain")
    with pytest.raises(ConfigError, match=r"^2 jobs fit '1111'"):
        found_job(done, "1111")
    with pytest.raises(ConfigError, match=r"^unknown job 'fedsm-brian'; did you mean fedsm-brain\? .*`medflare job list`"):
        found_job(done, "fedsm-brian")
    for nothing in ("", "x"):
        with pytest.raises(ConfigError, match=r"^unknown job"):
            found_job([], nothing)


def test_the_table_says_who_takes_up_whom() -> None:
    about = {"method": "fedsm", "rounds": 20}
    jobs = [job(OLD, **props(**about)), job(NEW, **props(**about, resume=OLD)), job(OTHER, duration="N/A")]
    heading, *rows = listing(jobs).splitlines()
    assert heading.split() == ["name", "id", "state", "method", "rounds", "submitted", "by", "at", "took"]
    first = ["fedsm-brain", "11112222", "RUNNING", "fedsm", "20", "lead@coordination.org"]
    assert rows[0].split()[:6] == first and rows[0].endswith("0:01:05  taken up by 11113333")
    assert rows[1].endswith("takes up 11112222")
    assert rows[2].split()[3:5] == ["-", "-"], "of a job that says nothing of itself"
    assert len({row.index("RUNNING") for row in rows}) == 1
    assert listing([]) == "no jobs"


def test_a_kit_of_nobody_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["job", "list"], ["job", "watch", "fedsm"]):
        assert main([*command, "--kit", str(tmp_path)]) == 1
        said = capsys.readouterr().err
        assert said.startswith(f"medflare: {tmp_path} is no startup kit of a person") and said.count("\n") == 1
    (tmp_path / "startup").mkdir()
    (tmp_path / "startup" / "fed_admin.json").write_text(json.dumps({"admin": {}}))
    assert main(["job", "list", "--kit", str(tmp_path)]) == 1
    spoilt: tuple[Any, ...] = ({"admin": None}, [], None, {"admin": []})
    for wrong in spoilt:
        (tmp_path / "startup" / "fed_admin.json").write_text(json.dumps(wrong))
        assert main(["job", "list", "--kit", str(tmp_path)]) == 1
        assert "is no startup kit of a person" in capsys.readouterr().err
