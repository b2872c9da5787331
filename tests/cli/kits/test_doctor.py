"""Each check of a kit: fine, and with what is wrong and the remedy."""

import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from cli.kits.fake import Root, free_port, make_kit, party
from medflare.cli.federation.kits.doctor import Finding, examine
from medflare.cli.federation.kits.kit import Kit
from medflare.cli.federation.kits.setup import Wishes, set_up, template
from medflare.data.loading import ENVIRONMENT
from medflare.tasks.config import TaskConfig


@pytest.fixture(autouse=True)
def disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """How many gigabytes are free."""

    def free(gigabytes: float) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=gigabytes * 1e9))

    free(100)
    return free


def _found(kit: Kit, check: str) -> Finding:
    return next(finding for finding in examine(kit) if finding.check == check)


def _change(path: Path, **settings: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


def test_a_server_that_is_fit_to_start(tmp_path: Path, root: Root) -> None:
    kit = make_kit(tmp_path / "server", root, "server", free_port())
    set_up(kit, Wishes())
    found = list(examine(kit))
    assert [finding.check for finding in found] == ["policies", "owner", "keys", "certificate", "server", "settings", "disk", "storage"]
    assert {finding.verdict for finding in found} == {"ok"}, found
    with socket.create_server(("", kit.port)):
        assert _found(kit, "server").text.startswith(f"port {kit.port} cannot be had")
    with party(kit) as process:
        said = _found(kit, "server")
        assert said.verdict == "FAILED" and said.text.startswith(f"it runs (process {process.pid}), but nothing listens")


def test_a_site_that_nobody_has_set_up(site: Kit) -> None:
    said = {finding.check: finding for finding in examine(site)}
    assert said["policies"].text.startswith("resources.json, authorization.json, privacy.json missing in ")
    assert {name: said[name].verdict for name in ("policies", "server", "settings", "data")} == {
        **dict.fromkeys(("policies", "server"), "FAILED"),
        **dict.fromkeys(("settings", "data"), "warning"),
    }


def test_policies_that_let_in_too_much_or_nothing(site: Kit) -> None:
    set_up(site, Wishes())
    assert _found(site, "policies").verdict == "ok"
    (site.local / "privacy.json").unlink()
    assert "no OutboundGuard" in _found(site, "policies").text
    usual = template("site", "resources.json")
    for changes, named in (
        ({"class_allow_list": []}, usual["class_allow_list"][0]),
        ({"class_allow_list": ["medflare.", *usual["class_allow_list"]]}, '"medflare."'),
        ({"class_allow_list": ["*"]}, '"*"'),
        ({"class_allow_list": usual["class_allow_list"], "app_validator": {"path": "of.others"}}, "app_validator"),
    ):
        _change(site.local / "resources.json", **changes)
        assert _found(site, "policies").verdict == "FAILED" and named in _found(site, "policies").text
    set_up(site, Wishes(replace_policies=True, stream_logs=True))
    assert _found(site, "policies").verdict == "warning" and "--no-stream-logs" in _found(site, "policies").text
    set_up(site, Wishes(bring_code=True))
    assert _found(site, "policies").verdict == "warning" and "may bring code" in _found(site, "policies").text


def test_a_key_that_others_can_read(site: Kit) -> None:
    assert _found(site, "keys").verdict == "ok"
    (site.folder / "startup").chmod(0o777)
    assert _found(site, "keys").text.endswith(f"chmod 700 {site.folder / 'startup'}")
    site.key.chmod(0o644)
    assert _found(site, "keys").text.endswith(f"chmod 600 {site.key}")
    site.key.unlink()
    assert _found(site, "keys").verdict == "FAILED" and "run the command as the account" in _found(site, "keys").text


def test_a_certificate_before_its_end(tmp_path: Path, root: Root) -> None:
    for name, days, verdict in (("a", 365, "ok"), ("b", 20, "warning"), ("c", -0.5, "FAILED")):
        assert _found(make_kit(tmp_path / name, root, days=(-1, days)), "certificate").verdict == verdict


def test_disk(site: Kit, disk: Callable[[float], None]) -> None:
    for gigabytes, verdict in ((100, "ok"), (9.9, "warning"), (0.9, "FAILED")):
        disk(gigabytes)
        found = _found(site, "disk")
        assert found.verdict == verdict and (verdict == "ok") == ("medflare site clean" not in found.text)


def test_settings_and_device(site: Kit) -> None:
    set_up(site, Wishes())
    own = site.local / "medflare.json"
    assert _found(site, "settings").verdict == _found(site, "device").verdict == "ok"
    _change(own, device="cuda:99")
    assert _found(site, "device").verdict == "FAILED"
    _change(own, device="cpu", minimum_patients=0)
    found = _found(site, "settings")
    assert found.verdict == "warning" and "minimum_patients" in found.text
    _change(own, devise="cpu")
    assert "devise" in _found(site, "settings").text and _found(site, "settings").verdict == "FAILED"


def test_data(site: Kit, tmp_path: Path, make_task: Callable[..., TaskConfig], make_site: Callable[..., Path]) -> None:
    task = make_task()
    set_up(site, Wishes(data_root=tmp_path))
    assert _found(site, "data").verdict == "FAILED" and f"{tmp_path / site.name} holds no datalist.json" in _found(site, "data").text
    set_up(site, Wishes(data_root=tmp_path / "nowhere"))
    assert 'nowhere ("data_root" of local/medflare.json) is not a folder' in _found(site, "data").text
    folder = make_site()
    set_up(site, Wishes(data_root=folder))
    assert _found(site, "data").verdict == "ok"
    (found,) = [finding for finding in examine(site, task) if finding.check == "data"]
    assert found.verdict == "ok" and found.text.startswith("every image can be read: train ")
    next(folder.rglob("*.png")).write_bytes(b"damaged")
    (found,) = [finding for finding in examine(site, task) if finding.check == "data"]
    assert found.verdict == "FAILED" and "see medflare data check" in found.text


def test_data_are_looked_for_where_a_run_does(
    site: Kit, tmp_path: Path, make_task: Callable[..., TaskConfig], make_site: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the folder of the site's name, below the home folder, where the environment says: and in that folder alone."""
    own, other = make_site(name=site.name), make_site(name="other")
    next(other.rglob("*.png")).write_bytes(b"another site's, and damaged")
    monkeypatch.setenv("HOME", str(own.parent.parent))
    set_up(site, Wishes())
    assert _found(site, "data").verdict == "warning"
    monkeypatch.setenv(ENVIRONMENT, str(own.parent))
    assert _found(site, "data") == Finding("data", "ok", f"{own} has a datalist; --task TASK reads every image")
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path / "nowhere"))
    _change(site.local / "medflare.json", data_root=f"~/{own.parent.name}")
    (found,) = [finding for finding in examine(site, make_task()) if finding.check == "data"]
    assert found.verdict == "ok" and found.text.startswith("every image can be read: train ")


def test_files_of_another_account(site: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    set_up(site, Wishes())
    assert _found(site, "owner").verdict == "ok"
    own, whole = site.local / "medflare.json", Path.lstat

    def lstat(path: Path) -> os.stat_result:
        found = whole(path)
        return os.stat_result((*found[:4], 54321, *found[5:10])) if path == own else found

    monkeypatch.setattr(Path, "lstat", lstat)
    found = _found(site, "owner")
    assert found.verdict == "FAILED" and found.text.startswith(f"{own} belongs to 54321, the kit to ") and "; sudo chown " in found.text


@pytest.mark.parametrize(
    ("name", "odd"),
    [
        ("resources.json", {"class_allow_list": None}),
        ("authorization.json", {"permissions": []}),
        ("privacy.json", {"scopes": [1]}),
        ("privacy.json", {"scopes": None}),
    ],
)
def test_json_of_another_shape_fails_and_is_named(site: Kit, name: str, odd: dict[str, object]) -> None:
    set_up(site, Wishes())
    _change(site.local / name, **odd)
    assert _found(site, "policies").verdict == "FAILED" and _found(site, "policies").text.startswith(f"{site.local / name}: ")


def test_broken_settings_are_said_once(site: Kit, server: Kit) -> None:
    for kit in (site, server):
        set_up(kit, Wishes())
        (kit.local / "medflare.json").write_text("{")
        said = [finding.check for finding in examine(kit) if "medflare.json" in finding.text]
        assert said == ["settings"] and _found(kit, "settings").verdict == "FAILED"


def test_a_servers_storage(server: Kit, site: Kit, tmp_path: Path) -> None:
    assert _found(server, "storage").verdict == "warning", "nobody has set it up"
    for folder, verdict, said in (
        (tmp_path / "new" / "storage", "ok", f"jobs are kept in {tmp_path / 'new' / 'storage' / 'jobs'}"),
        (site.folder / "storage", "warning", f"lies in another kit, {site.folder}; "),
    ):
        set_up(server, Wishes(storage=folder))
        found = _found(server, "storage")
        assert found.verdict == verdict and said in found.text
        assert not list(folder.iterdir()), "a look changes nothing"
    file = server.local / "resources.json"
    file.write_text(file.read_text().replace(str(site.folder / "storage" / "jobs"), "/proc/nowhere/jobs"))
    found = _found(server, "storage")
    assert found.verdict == "FAILED" and found.text.startswith("/proc/nowhere/jobs cannot be written to (")
    _change(file, components=[])
    assert _found(server, "storage").verdict == "FAILED" and "names no folders for jobs and snapshots" in _found(server, "storage").text
