"""`medflare site ...`: what it prints, and what is known of the jobs at a party."""

import dataclasses
import json
import os
import shutil
from pathlib import Path

import pytest

from cli.fake_kits import JOB, Root, make_kit
from helpers.small_tasks import small_task
from medflare.cli import main
from medflare.cli.site import job_states
from medflare.cli.startup_kit import Kit, read_object
from medflare.core.files import write_json
from medflare.federation.final_models import SiteFolder
from medflare.flare.names import BUILT, REFUSED
from medflare.methods.catalogue import get_method

OTHER = JOB[::-1].replace("-", "")[:8] + JOB[8:]
OUTBOUND = "time,phase,round,entry,tensors,bytes,purpose,sent\n"


def _job(kit: Kit) -> Path:
    """What medflare and FLARE leave of a job; returns the site's own folder of it."""
    folder = kit.folder / JOB
    own = kit.folder / "medflare" / JOB
    SiteFolder(own, kit.name, get_method("fedavg"), small_task(), 0).note_step("train", 1, 20, True)
    folder.mkdir()
    rows = "t,train,0,model,3,2000,update,yes\nt,train,0,meta,0,100,loss,yes\nt,train,1,everything,,,too large,no\n"
    (own / "outbound.csv").write_text(OUTBOUND + rows)
    write_json(folder / "meta.json", {"name": "fedsm-brain"})
    for role in ("deployed", "personal"):
        write_json(own / role / "card.json", {})
    return own


def test_a_job_with_its_round_and_what_left(site: Kit) -> None:
    assert job_states(site) == []
    own = _job(site)
    (site.folder / "not-a-job-at-all").mkdir()
    (job,) = job_states(site)
    assert (job.id, job.name, job.step, job.round, job.rounds, job.working) == (
        JOB,
        "fedsm-brain",
        "train",
        1,
        20,
        True,
    )
    assert job.left == {"entries": 2, "bytes": 2100, "withheld": 1}
    assert job.models == ("deployed", "personal") and job.folder == str(own)


def test_how_a_job_ended(site: Kit, capsys: pytest.CaptureFixture[str]) -> None:
    own = _job(site)
    (job,) = job_states(site)
    assert (job.ended, job.failure) == ("", "")
    write_json(
        own / "status.json", {**read_object(own / "status.json"), "ended": "2026-11-30 10:00"}
    )
    (own / "errors.log").write_text("Traceback\nDataError: 1.png is damaged\n")
    main(["site", "status", str(site.folder)])
    output = capsys.readouterr().out
    assert "ended 2026-11-30 10:00, last step: train, round 2 of 20" in output
    assert "last error: DataError: 1.png is damaged (errors.log)" in output


def test_whether_the_party_runs(site: Kit, capsys: pytest.CaptureFixture[str]) -> None:
    pid = site.folder / "daemon_pid.fl"
    for content, state in (
        (None, "does not run"),
        (os.getpid(), "runs"),
        (2**22 + 1, "does not run"),
    ):
        if content is not None:
            pid.write_text(str(content))
        main(["site", "status", str(site.folder)])
        assert f"site-1, site, {state}" in capsys.readouterr().out


def test_why_the_party_refused_a_job(site: Kit) -> None:
    """FLARE removes the folder of such a job; the party's own log keeps the reason. A line of another kind is not taken for it."""
    lines = (
        f"[E:1][R:{JOB}][T:2026-11-22 11:00:00][U:site-1][A:{REFUSED}]component os.system refused: it is not listed",
        f"[E:2][R:{JOB}][T:2026-11-22 11:00:00][U:site-1][A:{BUILT}]component mine.Executor",
    )
    (site.folder / "audit.log").write_text("\n".join(lines) + "\n")
    (job,) = job_states(site)
    assert (job.id, job.refused) == (JOB, ("component os.system refused: it is not listed",))
    _job(site)
    (job,) = job_states(site)
    assert job.refused and job.round == 1


def test_a_job_is_shown_whose_folder_the_server_has_deleted(site: Kit) -> None:
    own = _job(site)
    (before,) = job_states(site)
    shutil.rmtree(site.folder / JOB)  # FLARE does so for the server
    (after,) = job_states(site)
    assert after == dataclasses.replace(before, name="") and after.folder == str(own)


def test_the_newest_job_comes_first(site: Kit) -> None:
    for day, start in enumerate("abc"):
        folder = site.folder / f"{start}{JOB[1:]}"
        folder.mkdir()
        os.utime(folder, (day * 86400, day * 86400))
    assert [job.id[0] for job in job_states(site)] == ["c", "b", "a"]


def test_status_in_words_and_as_json(site: Kit, capsys: pytest.CaptureFixture[str]) -> None:
    own = _job(site)
    (site.folder / "audit.log").write_text(
        f"[E:1][R:{OTHER}][T:t][U:site-1][A:{REFUSED}]component os.system refused: it is not listed\n"
    )
    assert main(["site", "status", str(site.folder)]) == 0
    output = capsys.readouterr().out
    for word in ("site-1", OTHER, "os.system", JOB, "round 2 of 20", str(own), "2 entries"):
        assert word in output
    assert main(["site", "status", str(site.folder), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert (content["name"], content["kind"], content["jobs"][1]["rounds"]) == (
        "site-1",
        "site",
        20,
    )


def test_status_shows_no_terminal_escapes_of_a_lead(
    site: Kit, capsys: pytest.CaptureFixture[str]
) -> None:
    _job(site)
    write_json(site.folder / JOB / "meta.json", {"name": "ok\x1b[2J\nsite-1: nothing left"})
    assert main(["site", "status", str(site.folder)]) == 0
    output = capsys.readouterr().out
    assert "\x1b" not in output and "\nsite-1: nothing" not in output


def test_setup_names_every_file_and_every_change(
    site: Kit, tmp_path: Path, root: Root, capsys: pytest.CaptureFixture[str]
) -> None:
    other = make_kit(tmp_path / "site-2", root)
    assert main(["site", "setup", str(site.folder), str(other.folder)]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["added"] * 10
    assert (
        main(
            [
                "site",
                "setup",
                str(site.folder),
                "--device",
                "cuda:0",
                "--packages",
                "lab_nets, other",
            ]
        )
        == 0
    )
    output = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert output == ["kept", "changed", "device:", "packages:", "kept", "kept", "kept"]
    assert json.loads((site.local / "medflare.json").read_text())["packages"] == [
        "lab_nets",
        "other",
    ]


def test_setup_says_that_the_folder_of_images_is_not_here(
    site: Kit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder, lines in ((tmp_path, 0), (tmp_path / "missing", 1)):
        assert main(["site", "setup", str(site.folder), "--data-root", str(folder)]) == 0
        assert capsys.readouterr().out.count(f"note: {folder} is no folder") == lines


def test_doctor_counts_what_fails(site: Kit, capsys: pytest.CaptureFixture[str]) -> None:
    main(["site", "setup", str(site.folder)])
    capsys.readouterr()
    assert main(["site", "doctor", str(site.folder)]) == 1
    output = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in output if line.startswith("FAILED")] == [
        "server"
    ] and "1" in output[-1]


@pytest.mark.parametrize("option", ["--data-root", "--storage"])
def test_an_unset_variable_is_not_the_current_folder(
    option: str, site: Kit, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["site", "setup", str(site.folder), option, ""])
    assert option in capsys.readouterr().err and not (site.local / "medflare.json").exists()
