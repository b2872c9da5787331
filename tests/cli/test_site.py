"""`medflare site ...` says what it did, and refuses in one line what is not for the kit."""

import json
from pathlib import Path

import pytest

from cli.kits.fake import JOB, Root, make_kit
from medflare.cli import main
from medflare.cli.federation.kits.kit import Kit
from medflare.flare.names import REFUSED

OTHER = JOB[::-1].replace("-", "")[:8] + JOB[8:]


@pytest.fixture(scope="module")
def root() -> Root:
    return Root()


@pytest.fixture
def kit(tmp_path: Path, root: Root) -> Kit:
    return make_kit(tmp_path / "site-1", root)


def test_setup_names_every_file_and_every_change(kit: Kit, tmp_path: Path, root: Root, capsys: pytest.CaptureFixture[str]) -> None:
    other = make_kit(tmp_path / "site-2", root)
    assert main(["site", "setup", str(kit.folder), str(other.folder)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 8 and all(line.startswith("added    ") for line in said)
    assert main(["site", "setup", str(kit.folder), "--device", "cuda:0", "--systemd"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in said] == ["kept", "changed", "device:", "kept", "kept", "unit"]
    unit = kit.folder / "medflare-site-1.service"
    assert "systemctl enable --now medflare-site-1.service" in said[-1] and f"User={kit.folder.owner()}\n" in unit.read_text()
    assert main(["site", "setup", str(kit.folder), str(other.folder), "--systemd", str(tmp_path / "unit")]) == 1
    assert capsys.readouterr().err == "medflare: --systemd FILE is for one kit; leave FILE out, and each kit gets its own\n"


def test_doctor_counts_what_fails(kit: Kit, capsys: pytest.CaptureFixture[str]) -> None:
    main(["site", "setup", str(kit.folder)])
    capsys.readouterr()
    assert main(["site", "doctor", str(kit.folder)]) == 1
    said = capsys.readouterr().out.splitlines()
    failed = [line for line in said if line.startswith("FAILED")]
    assert len(failed) == 1 and "nothing listens at localhost port 1; ask the project admin" in failed[0]
    assert said[-1] == "site-1: 1 of these must be mended before it can work"


def test_status_in_words_and_as_json(kit: Kit, capsys: pytest.CaptureFixture[str]) -> None:
    own = kit.folder / "medflare" / JOB
    own.mkdir(parents=True)
    (kit.folder / JOB).mkdir()
    (kit.folder / "audit.log").write_text(f"[E:1][R:{OTHER}][T:t][U:site-1][A:{REFUSED}]component os.system refused: it is not listed\n")
    note = {"phase": "train", "round": 1, "rounds": 20, "working": False, "time": "2026-11-22 07:00:00"}
    (own / "status.json").write_text(json.dumps(note))
    (own / "outbound.csv").write_text("time,phase,round,entry,tensors,bytes,purpose,sent\nt,train,0,model,3,2048,update,yes\n")
    assert main(["site", "status", str(kit.folder)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "site-1, site; server localhost:1",
        "  does not run",
        "  last contact with the server that a log tells of: never",
        "",
        f"  job {OTHER}",
        "    component os.system refused: it is not listed",
        "",
        f"  job {JOB}",
        "    has ended here; last step: train, round 2 of 20, at 2026-11-22 07:00:00",
        f"    this site's own files of it: {own}",
        "    left: 2.0 KiB in 1 entries; 0 kept back",
    ]
    assert main(["site", "status", str(kit.folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["jobs"][1]["rounds"] == 20


def test_the_others_in_a_line(kit: Kit, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["site", "stop", str(kit.folder)]) == 0
    assert main(["site", "clean", str(kit.folder), "--older-than", "12h", "--jobs"]) == 0
    assert capsys.readouterr().out == "site-1 does not run\nnothing is that old\n"
    assert main(["site", "start", str(kit.folder.parent)]) == 1
    assert "is no startup kit of a server or a site" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["site", "clean", str(kit.folder), "--older-than", "soon"])
    assert "'soon' is no age; write 30d or 12h" in capsys.readouterr().err
    for ages in ("999999999999d", f"{'9' * 5000}h"):
        with pytest.raises(SystemExit):
            main(["site", "clean", str(kit.folder), "--older-than", ages])
        said = capsys.readouterr().err
        assert "is older than time itself; write 30d or 12h" in said and said.count("\n") == 1


@pytest.mark.parametrize("option", ["--data-root", "--cache", "--storage"])
def test_an_unset_variable_is_not_the_current_folder(option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["site", "setup", str(tmp_path), option, ""])
    assert f"{option}: it is empty, as an unset variable is; name a folder" in capsys.readouterr().err
