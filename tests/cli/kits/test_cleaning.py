"""What goes after how long, and what stays whatever one asks."""

import os
import time
from datetime import timedelta
from pathlib import Path

import pytest

from cli.kits.fake import JOB, party
from medflare.cli.federation.kits.cleaning import clean_kit
from medflare.cli.federation.kits.kit import Kit
from medflare.core.errors import ConfigError

MONTH = timedelta(days=30)
KEPT = {f"medflare/{JOB}/outbound.csv", f"medflare/{JOB}/deployed/model.safetensors", f"{JOB}/audit.log", f"{JOB}/meta.json"}
GONE = {f"medflare/{JOB}/state/half-3.safetensors", f"{JOB}/app_site-1/config/task.json", f"{JOB}/log.txt"}


@pytest.fixture
def used(site: Kit) -> Kit:
    """A kit with an entry of the cache and a job, both from forty days ago."""
    (site.local / "medflare.json").write_text("{}")
    entry = site.folder / "medflare-cache" / ("0" * 32)
    entry.mkdir(parents=True)
    (entry / "images").write_bytes(b"x" * 5000)
    (entry / "lock").touch()
    for name in KEPT | GONE:
        file = site.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"y" * 100)
    old = time.time() - timedelta(days=40).total_seconds()
    for path in site.folder.rglob("*"):
        os.utime(path, (old, old))
    return site


def _files(kit: Kit) -> set[str]:
    folders = (kit.folder / JOB, kit.folder / "medflare")
    return {str(path.relative_to(kit.folder)) for folder in folders for path in folder.rglob("*") if path.is_file()}


def test_decoded_images_go_and_jobs_stay(used: Kit) -> None:
    for dry_run in (True, False):
        (gone,) = clean_kit(used, MONTH, dry_run=dry_run)
        assert gone.bytes == 5000 and gone.what.startswith("1 sets of decoded images in ")
        assert any((used.folder / "medflare-cache").iterdir()) == dry_run
    assert _files(used) == KEPT | GONE and clean_kit(used, MONTH) == []


def test_of_ended_jobs_models_and_the_account_of_what_left_stay(used: Kit) -> None:
    for dry_run in (True, False):
        *_, gone = clean_kit(used, MONTH, jobs=True, dry_run=dry_run)
        assert gone.bytes == 300 and JOB in gone.what
        assert _files(used) == (KEPT | GONE if dry_run else KEPT)
    assert clean_kit(used, timedelta(0), jobs=True) == []


def test_what_is_young_or_runs_stays(used: Kit, tmp_path: Path) -> None:
    assert clean_kit(used, timedelta(days=41), jobs=True) == []
    with party(used, "job"):
        assert not [gone for gone in clean_kit(used, MONTH, jobs=True) if JOB in gone.what]
    (used.folder / "medflare" / JOB / "outbound.csv").touch()
    assert clean_kit(used, MONTH, jobs=True) == [] and _files(used) == KEPT | GONE


def test_the_server_caches_nothing(server: Kit) -> None:
    with pytest.raises(ConfigError, match="which caches nothing; old jobs go with `nvflare job delete"):
        clean_kit(server, MONTH)


def test_checkpoints_at_the_server_go_when_somebody_says_so(server: Kit) -> None:
    """A failed job is resumed from its own: how much there is one is told, and with --jobs goes what is old and of no job that runs."""
    old, young = (server.folder / "medflare" / name for name in (JOB, "young"))
    for folder in (old, young):
        folder.mkdir(parents=True)
        (folder / "checkpoint.safetensors").write_bytes(b"x" * 2000)
    time_ago = time.time() - timedelta(days=40).total_seconds()
    for path in (old, *old.iterdir()):
        os.utime(path, (time_ago, time_ago))
    with pytest.raises(ConfigError, match=rf"jobs that came to no end \(2, 3\.9 KiB in {server.folder}/medflare\) go with --jobs"):
        clean_kit(server, MONTH)
    with party(server, "job"):
        assert clean_kit(server, MONTH, jobs=True) == []
    for dry_run in (True, False):
        (gone,) = clean_kit(server, MONTH, jobs=True, dry_run=dry_run)
        assert gone.bytes == 2000 and JOB in gone.what and old.exists() == dry_run
    assert young.exists() and clean_kit(server, MONTH, jobs=True) == []
