"""The systemd unit, as text and as systemd reads it."""

import getpass
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import medflare
from cli.kits.fake import Root, make_kit, party, script
from medflare.cli.federation.kits.kit import Kit
from medflare.cli.federation.kits.unit import unit_name, unit_text

MEDFLARE = ("/usr/bin/env", f"PYTHONPATH={Path(medflare.__file__).parents[1]}", sys.executable, "-m", "medflare.cli")


def _lines(text: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, value in re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE):
        found.setdefault(name, []).append(value)
    return found


def test_it_says_who_runs_what(site: Kit) -> None:
    lines = _lines(unit_text(site, MEDFLARE))
    assert unit_name(site) == "medflare-site-1.service" and lines["User"] == [getpass.getuser()] and lines["UMask"] == ["0077"]
    assert lines["ExecStart"] == [f'"{site.folder}/startup/sub_start.sh"'] and lines["Restart"] == ["on-failure"]
    assert '"NVFLARE_CLIENT_OUTCOME_WAIT_TIMEOUT=60"' in lines["Environment"]


def test_it_takes_over_from_a_site_started_by_hand_and_from_a_power_cut(site: Kit) -> None:
    (site.folder / "daemon_pid.fl").write_text("1")
    (command,) = _lines(unit_text(site, MEDFLARE))["ExecStartPre"]
    with party(site) as process:
        done = subprocess.run(shlex.split(command), env={}, capture_output=True, text=True, check=True)
        assert done.stdout == "site-1 has stopped (2 processes)\n" and process.wait(10)
    (site.folder / "daemon_pid.fl").write_text("1")
    subprocess.run(shlex.split(command), env={}, capture_output=True, check=True)
    assert not list(site.folder.glob("*.fl"))


def test_folders_with_characters_of_systemds_own(tmp_path: Path, root: Root) -> None:
    kit = make_kit(tmp_path / "100% of $site", root)
    lines = _lines(unit_text(kit, MEDFLARE))
    assert lines["WorkingDirectory"] == [f"{tmp_path}/100%% of $site"]
    assert lines["ExecStart"] == [f'"{tmp_path}/100%% of $$site/startup/sub_start.sh"']


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_reads_it(site: Kit, tmp_path: Path) -> None:
    script(site.folder / "startup" / "sub_start.sh", "true\n")
    unit = tmp_path / unit_name(site)
    unit.write_text(unit_text(site, MEDFLARE))
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False)
    assert unit.name not in done.stderr, done.stderr
