"""The root key of a provisioned federation is not left in the clear."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "poc_workspace"
KEY = (sys.executable, SCRIPTS / "root_key.py")
SECRET = "-----BEGIN PRIVATE KEY-----"


def _run(*command: object, passphrase: str | None = "correct horse battery") -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "MEDFLARE_ROOT_PASSPHRASE"}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    if passphrase is not None:
        environment["MEDFLARE_ROOT_PASSPHRASE"] = passphrase
    return subprocess.run(
        list(map(str, command)), env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=60
    )


@pytest.fixture
def state(tmp_path: Path) -> Path:
    folder = tmp_path / "medflare/state"
    folder.mkdir(parents=True)
    (folder / "cert.json").write_text(json.dumps({"root_pri_key": SECRET}))
    return folder


def test_locked_and_unlocked(tmp_path: Path, state: Path) -> None:
    assert _run(*KEY, "lock", tmp_path).returncode == 0
    assert [path.name for path in state.iterdir()] == ["cert.json.locked"]
    locked = state / "cert.json.locked"
    assert SECRET not in locked.read_text() and stat.S_IMODE(locked.stat().st_mode) == 0o600
    wrong = _run(*KEY, "unlock", tmp_path, passphrase="incorrect horse")
    assert wrong.returncode == 1 and "passphrase" in wrong.stderr and not (state / "cert.json").exists()
    assert _run(*KEY, "unlock", tmp_path).returncode == 0
    assert json.loads((state / "cert.json").read_text()) == {"root_pri_key": SECRET}
    assert stat.S_IMODE((state / "cert.json").stat().st_mode) == 0o600
    assert _run(*KEY, "lock", tmp_path).returncode == 0 and not (state / "cert.json").exists(), "a second lock replaces the first"


def test_two_root_keys_are_never_mixed(tmp_path: Path, state: Path) -> None:
    """A second one comes about where nvflare provisions while the first is locked; locking it would lose the first."""
    _run(*KEY, "lock", tmp_path)
    locked = (state / "cert.json.locked").read_bytes()
    refused = _run("bash", SCRIPTS / "provision.sh", "--leave-root-key", SCRIPTS / "project.yml", tmp_path)
    assert refused.returncode == 1 and "--leave-root-key" in refused.stderr
    (state / "cert.json").write_text(json.dumps({"root_pri_key": "another"}))
    for done in (_run(*KEY, "unlock", tmp_path), _run("bash", SCRIPTS / "provision.sh", SCRIPTS / "project.yml", tmp_path)):
        assert done.returncode == 1 and "another root key" in done.stderr
    assert (state / "cert.json.locked").read_bytes() == locked and "another" in (state / "cert.json").read_text()
    left = json.dumps({"root_pri_key": SECRET, "server": "a certificate more"})  # by a run that was interrupted
    (state / "cert.json").write_text(left)
    assert _run(*KEY, "unlock", tmp_path).returncode == 0 and (state / "cert.json").read_text() == left


@pytest.mark.parametrize("passphrase", [None, "short"])
def test_no_kit_is_made_without_a_passphrase(tmp_path: Path, passphrase: str | None) -> None:
    done = _run("bash", SCRIPTS / "provision.sh", SCRIPTS / "project.yml", tmp_path / "federation", passphrase=passphrase)
    assert done.returncode == 1 and "MEDFLARE_ROOT_PASSPHRASE" in done.stderr
    assert not (tmp_path / "federation").exists()


def test_no_second_root_while_the_locked_key_is_offline(tmp_path: Path, state: Path) -> None:
    """Another project in the workspace has its key, and that one must not be taken for this one's."""
    (state.parent / "prod_00").mkdir()
    (state / "cert.json").unlink()
    other = tmp_path / "another/state"
    other.mkdir(parents=True)
    (other / "cert.json").write_text(json.dumps({"root_pri_key": "another"}))
    for options in ((), ("--leave-root-key",)):
        refused = _run("bash", SCRIPTS / "provision.sh", *options, SCRIPTS / "project.yml", tmp_path)
        assert refused.returncode == 1 and str(state) in refused.stderr
    assert not list(state.iterdir()) and [path.name for path in other.iterdir()] == ["cert.json"]


@pytest.mark.parametrize("content", ['{"format": "medflare ro', "{}", '{"salt": "AAAA", "token": 3}'])
def test_a_damaged_file_is_named_and_stays(tmp_path: Path, state: Path, content: str) -> None:
    _run(*KEY, "lock", tmp_path)
    whole = (state / "cert.json.locked").read_bytes()
    (state / "cert.json.locked").write_bytes(content.encode(errors="surrogateescape"))
    done = _run(*KEY, "unlock", tmp_path)
    assert done.returncode == 1 and str(state / "cert.json.locked") in done.stderr and done.stderr.count("\n") == 1
    (state / "cert.json.locked").write_bytes(whole)
    (state / "cert.json").write_text('{"root_pri')
    for action in ("unlock", "lock"):
        done = _run(*KEY, action, tmp_path)
        assert done.returncode == 1 and str(state / "cert.json") in done.stderr
    assert (state / "cert.json.locked").read_bytes() == whole
