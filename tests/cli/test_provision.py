"""An installed medflare provisions a federation without a checkout: kits with policies, the root key under a passphrase."""

import json
import os
import signal
import stat
import subprocess
from pathlib import Path

import pytest
import yaml
from cryptography.x509 import load_pem_x509_certificate

from medflare.cli import main, root_key
from medflare.cli.startup_kit import check_root, open_kit
from medflare.core.errors import ConfigError

ROOT = Path(__file__).parents[2]
PASSPHRASE = "correct horse battery"
KEY = "-----BEGIN PRIVATE KEY-----"
# {"root_pri_key": KEY} under PASSPHRASE, written by poc_workspace/root_key.py, which is gone.
LOCKED_EARLIER = {
    "format": "medflare root key 1",
    "salt": "cGvNtEqPaYOG3+sZxvXJEg==",
    "token": "gAAAAABrCUbNyVxos7lC_s4IpH2ynn3sI09kIISNgx0HqpdoCscnOBt4DQ-YImiYo4WFgWMx1PbkP1cf"
    "4Kyqb0dN1oDB0Qp64BqUhkiLYiYNdcxfbCJSj9KOBeeQWDyqjI4kz5HRKVlE",
}


@pytest.fixture(autouse=True)
def _passphrase(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(root_key.PASSPHRASE_VARIABLE, PASSPHRASE)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """The state of a federation of the example's name, with its root key in the clear."""
    folder = tmp_path / "federation/medflare/state"
    folder.mkdir(parents=True)
    (folder / "cert.json").write_text(json.dumps({"root_pri_key": KEY}))
    return folder


def test_the_example_is_the_federation_of_the_deployment_page(tmp_path: Path) -> None:
    assert main(["provision", "project.yml", "--new"]) == 0
    written = yaml.safe_load((tmp_path / "project.yml").read_text())
    assert written == yaml.safe_load((ROOT / "poc_workspace/project.yml").read_text())
    before = (tmp_path / "project.yml").read_text()
    assert (
        main(["provision", "project.yml", "--new"]) == 1
        and (tmp_path / "project.yml").read_text() == before
    )


def test_kits_are_made_and_a_site_is_added_later(tmp_path: Path) -> None:
    main(["provision", "project.yml", "--new"])
    assert main(["provision", "project.yml"]) == 0
    federation = tmp_path / "federation/medflare"
    parties = [
        one["name"]
        for one in yaml.safe_load((tmp_path / "project.yml").read_text())["participants"]
    ]
    assert sorted(path.name for path in (federation / "prod_00").iterdir()) == sorted(parties)
    for name in ("localhost", "site-3"):
        resources = json.loads((federation / "prod_00" / name / "local/resources.json").read_text())
        assert resources["app_validator"]["path"] == "medflare.flare.components.JobComponents"
    assert [path.name for path in (federation / "state").iterdir()] == ["cert.json.locked"]
    for path in federation.rglob("*"):
        assert path.is_symlink() or not stat.S_IMODE(path.stat().st_mode) & 0o077, path
    (tmp_path / "site-5.yml").write_text("name: site-5\ntype: client\norg: hospital_five\n")
    assert main(["provision", "project.yml", "--add-client", "site-5.yml"]) == 0
    added = open_kit(federation / "prod_01/site-5")
    check_root(added)  # it can join those of the first generation
    first = open_kit(federation / "prod_00/site-1")
    assert load_pem_x509_certificate(added.root.read_bytes()) == load_pem_x509_certificate(
        first.root.read_bytes()
    )


def test_what_is_no_project_is_refused_with_the_remedy(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["provision", "project.yml"]) == 1
    assert "medflare provision project.yml --new" in capsys.readouterr().err
    main(["provision", "project.yml", "--new"])
    assert main(["provision", "project.yml", "--add-client", "site-5.yml"]) == 1
    assert "site-5.yml: no such file" in capsys.readouterr().err
    for content in ("[", "participants: []", "text"):
        (tmp_path / "project.yml").write_text(content)
        assert main(["provision", "project.yml"]) == 1
        assert capsys.readouterr().err.count("\n") == 1 and not (tmp_path / "federation").exists()


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("name: medflare", "name: ../../escaped", "no name of a folder"),
        ("name: site-2", "name: server", "another party"),
        ("name: site-2", "name: Site-1", "another party"),
        ("name: site-2, type: client", "name: relay-1, type: relay", "give orders"),
    ],
)
def test_names_that_lead_elsewhere_or_to_another_party_are_refused(
    old: str, new: str, named: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    main(["provision", "project.yml", "--new"])
    project = tmp_path / "project.yml"
    example = project.read_text()
    project.write_text(example.replace(old, new, 1))
    assert main(["provision", "project.yml"]) == 1
    assert named in capsys.readouterr().err
    project.write_text(example)
    (tmp_path / "site.yml").write_text(f"{{{new}, org: hospital}}")
    if "site" in old:
        assert main(["provision", "project.yml", "--add-client", "site.yml"]) == 1
        assert named in capsys.readouterr().err
    assert not (tmp_path / "federation").exists()


@pytest.mark.parametrize("passphrase", ["", "short"])
def test_no_kit_is_made_without_a_passphrase(
    passphrase: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["provision", "project.yml", "--new"])
    monkeypatch.setenv(root_key.PASSPHRASE_VARIABLE, passphrase)
    assert main(["provision", "project.yml"]) == 1
    assert (
        root_key.PASSPHRASE_VARIABLE in capsys.readouterr().err and not Path("federation").exists()
    )


@pytest.mark.parametrize("options", [[], ["--leave-root-key"]])
def test_no_second_root_is_made(
    options: list[str],
    state: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the locked key away, or beside it, FLARE would make another root.

    The key of another federation in the workspace does not count, and stays.
    """
    monkeypatch.setattr(
        subprocess, "run", lambda *command, **options: pytest.fail("FLARE was started")
    )
    main(["provision", "project.yml", "--new"])
    other = state.parents[1] / "another/state/cert.json"
    other.parent.mkdir(parents=True)
    other.write_text("another")
    root_key.lock(state, PASSPHRASE)
    if options:
        assert main(["provision", "project.yml", *options]) == 1
        assert "--leave-root-key" in capsys.readouterr().err
    (state.parent / "prod_00").mkdir()
    (state / root_key.LOCKED).unlink()
    assert main(["provision", "project.yml", *options]) == 1
    assert str(state.relative_to(Path.cwd())) in capsys.readouterr().err and not list(
        state.iterdir()
    )
    assert os.listdir(other.parent) == ["cert.json"] and other.read_text() == "another"


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("locked", [True, False])
def test_the_root_key_of_a_run_that_is_stopped_is_locked(
    locked: bool, stop: signal.Signals, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(command: list[str], **options: object) -> None:
        assert KEY in (state / "cert.json").read_text()
        signal.raise_signal(stop)

    monkeypatch.setattr(subprocess, "run", stopped)
    main(["provision", "project.yml", "--new"])
    if locked:
        root_key.lock(state, PASSPHRASE)
    before = signal.signal(stop, signal.SIG_DFL)
    try:
        assert main(["provision", "project.yml"]) == 130
        assert signal.getsignal(stop) == signal.SIG_DFL, "the handler is as before"
    finally:
        signal.signal(stop, before)
    assert os.listdir(state) == ["cert.json.locked"]
    root_key.unlock(state, PASSPHRASE)
    assert json.loads((state / "cert.json").read_text()) == {"root_pri_key": KEY}


def test_the_root_key_is_locked_and_unlocked(state: Path) -> None:
    root_key.lock(state, PASSPHRASE)
    assert (
        os.listdir(state) == ["cert.json.locked"]
        and KEY not in (state / root_key.LOCKED).read_text()
    )
    with pytest.raises(ConfigError, match="wrong passphrase"):
        root_key.unlock(state, "incorrect horse")
    assert os.listdir(state) == ["cert.json.locked"]
    root_key.unlock(state, PASSPHRASE)
    assert json.loads((state / "cert.json").read_text()) == {"root_pri_key": KEY}
    assert {stat.S_IMODE(path.stat().st_mode) for path in state.iterdir()} == {0o600}


def test_two_root_keys_are_never_mixed(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["provision", "project.yml", "--new"])
    root_key.lock(state, PASSPHRASE)
    locked = (state / root_key.LOCKED).read_text()
    another = json.dumps({"root_pri_key": "another"})
    (state / "cert.json").write_text(another)
    assert main(["provision", "project.yml"]) == 1
    assert "different root keys" in capsys.readouterr().err
    assert (state / root_key.LOCKED).read_text() == locked and (
        state / "cert.json"
    ).read_text() == another
    # By an interrupted run.
    left = json.dumps({"root_pri_key": KEY, "server": "a certificate more"})
    (state / "cert.json").write_text(left)
    root_key.unlock(state, PASSPHRASE)
    assert (state / "cert.json").read_text() == left


@pytest.mark.parametrize(
    "content", ['{"format": "medflare ro', "{}", '{"salt": "AAAA", "token": 3}', "[]"]
)
def test_a_damaged_file_is_named_and_stays(content: str, state: Path) -> None:
    root_key.lock(state, PASSPHRASE)
    whole = (state / root_key.LOCKED).read_text()
    (state / "cert.json").write_text('{"root_pri')
    with pytest.raises(ConfigError, match=r"cert\.json: damaged"):
        root_key.unlock(state, PASSPHRASE)
    with pytest.raises(ConfigError, match=r"cert\.json: damaged"):
        root_key.lock(state, PASSPHRASE)
    assert (state / root_key.LOCKED).read_text() == whole
    (state / root_key.LOCKED).write_text(content)
    with pytest.raises(ConfigError, match=r"cert\.json\.locked: damaged"):
        root_key.unlock(state, PASSPHRASE)
    assert (state / "cert.json").read_text() == '{"root_pri' and (
        state / root_key.LOCKED
    ).read_text() == content


def test_a_root_key_that_the_earlier_script_locked_unlocks(state: Path) -> None:
    (state / "cert.json").unlink()
    (state / root_key.LOCKED).write_text(json.dumps(LOCKED_EARLIER))
    root_key.unlock(state, PASSPHRASE)
    assert json.loads((state / "cert.json").read_text()) == {"root_pri_key": KEY}
