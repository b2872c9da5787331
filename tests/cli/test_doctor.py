import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from cli.fake_kits import Root, free_port, make_kit
from helpers.fixture_types import SiteOf, TaskOf
from medflare.cli.doctor import CheckResult, examine
from medflare.cli.startup_kit import Kit, KitSettings, set_up, template
from medflare.data.local import DATA_ROOT_VARIABLE
from medflare.tasks.config import TaskConfig


@pytest.fixture(autouse=True)
def disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """How many gigabytes are free."""

    def free(gigabytes: float) -> None:
        monkeypatch.setattr(
            shutil, "disk_usage", lambda place: SimpleNamespace(free=gigabytes * 1e9)
        )

    free(100)
    return free


def _found(kit: Kit, check: str, task: TaskConfig | None = None) -> CheckResult:
    return next(finding for finding in examine(kit, task) if finding.check == check)


def _change(path: Path, **settings: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


def test_a_server_that_is_fit_to_start(tmp_path: Path, root: Root) -> None:
    kit = make_kit(tmp_path / "server", root, "server", free_port())
    set_up(kit, KitSettings())
    actual = list(examine(kit))
    assert {finding.status for finding in actual} == {"ok"}, actual
    with socket.create_server(("", kit.port)):
        assert (
            _found(kit, "server").status == "FAILED" and str(kit.port) in _found(kit, "server").text
        )


def test_a_site_that_is_not_set_up(site: Kit) -> None:
    actual = {finding.check: finding.status for finding in examine(site)}
    assert (actual["policies"], actual["server"], actual["settings"], actual["data"]) == (
        "FAILED",
        "FAILED",
        "warning",
        "warning",
    )


USUAL = template("site", "resources.json")["class_allow_list"]


@pytest.mark.parametrize(
    ("name", "changes", "status", "named"),
    [
        ("resources", {}, "ok", ""),
        ("resources", {"class_allow_list": []}, "FAILED", USUAL[0]),
        ("resources", {"class_allow_list": ["medflare.", *USUAL]}, "FAILED", '"medflare."'),
        ("resources", {"class_allow_list": ["*"]}, "FAILED", '"*"'),
        ("resources", {"app_validator": {"path": "of.others"}}, "FAILED", "app_validator"),
        ("resources", {"allow_log_streaming": True}, "warning", "--replace-policies"),
        ("resources", {"class_allow_list": None}, "FAILED", "resources.json"),
        ("authorization", {"permissions": {"lead": {"byoc": "any"}}}, "warning", "byoc"),
        ("authorization", {"permissions": []}, "FAILED", "authorization.json"),
        ("comm_config", {"internal": {"scheme": "tcp", "resources": {}}}, "FAILED", "in clear"),
        ("comm_config", {"internal": {}}, "FAILED", "comm_config.json"),
        ("privacy", {"scopes": []}, "warning", "privacy.json"),
        ("privacy", {"scopes": [1]}, "FAILED", "privacy.json"),
    ],
)
def test_the_policies(
    site: Kit, name: str, changes: dict[str, object], status: str, named: str
) -> None:
    set_up(site, KitSettings())
    _change(site.local / f"{name}.json", **changes)
    assert _found(site, "policies").status == status and named in _found(site, "policies").text


def test_a_key_that_others_can_read_and_files_that_they_can_change(site: Kit) -> None:
    assert _found(site, "keys").status == "ok"
    settings = site.local / "settings.json"
    settings.touch()
    for path in (settings, site.local, site.folder, site.folder / "startup"):
        path.chmod(0o777)
        assert f"chmod go-w {path}" in _found(site, "keys").text
        path.chmod(0o755)
    settings.chmod(0o664)  # of an account whose umask is 002
    assert _found(site, "keys").status == "FAILED"
    site.folder.chmod(0o700)
    assert _found(site, "keys").status == "ok", "nobody else gets there"
    site.key.chmod(0o644)
    assert "chmod 600" in _found(site, "keys").text
    site.key.unlink()
    assert _found(site, "keys").status == "FAILED"


@pytest.mark.parametrize(
    ("days", "status", "named"),
    [
        ((-1, 365), "ok", "clock"),
        ((-1, 20), "warning", "new kit"),
        ((-1, -0.5), "FAILED", "clock"),
        ((3, 9), "FAILED", "clock"),
    ],
)
def test_a_certificate_by_the_clock(
    tmp_path: Path, root: Root, days: tuple[float, float], status: str, named: str
) -> None:
    finding = _found(make_kit(tmp_path / "site-1", root, days=days), "certificate")
    assert finding.status == status and named in finding.text


@pytest.mark.parametrize(("gigabytes", "status"), [(100, "ok"), (9.9, "warning"), (0.9, "FAILED")])
def test_free_disk(site: Kit, disk: Callable[[float], None], gigabytes: float, status: str) -> None:
    disk(gigabytes)
    assert _found(site, "disk").status == status


def test_settings_and_device(site: Kit, server: Kit) -> None:
    set_up(site, KitSettings())
    own = site.local / "medflare.json"
    assert _found(site, "settings").status == _found(site, "device").status == "ok"
    _change(own, device="cuda:99")
    assert _found(site, "device").status == "FAILED"
    _change(own, device="cpu", minimum_patients=0)
    assert (
        _found(site, "settings").status == "warning"
        and "minimum_patients" in _found(site, "settings").text
    )
    for kit in (site, server):
        (kit.local / "medflare.json").write_text("{")
        actual = [finding for finding in examine(kit) if "medflare.json" in finding.text]
        assert [(finding.check, finding.status) for finding in actual] == [
            ("settings", "FAILED")
        ], "once"


@pytest.mark.parametrize("launcher", ["docker_launcher", "k8s_launcher"])
def test_a_kit_for_containers_needs_a_folder_that_outlives_them(site: Kit, launcher: str) -> None:
    set_up(site, KitSettings())
    assert "records" not in [finding.check for finding in examine(site)]
    _change(site.local / "resources.json", components=[{"id": launcher, "path": "x", "args": {}}])
    found = _found(site, "records")
    assert found.status == "FAILED" and '"records": ' in found.text
    _change(site.local / "medflare.json", records="/data/brain/records")
    mounts = site.local / "study_runtime.yaml"
    for text in ("", "# mode: rw\n", "studies: {brain: {datasets: {images: {mode: ro}}}}\n"):
        mounts.write_text(text)
        assert _found(site, "records").status == "warning"
    mounts.write_text("studies:\n  brain:\n    datasets:\n      records:\n        mode: rw\n")
    assert _found(site, "records").status == "ok"
    _change(site.local / "medflare.json", records="", minimum_patients=1)
    assert _found(site, "records").status == "ok", "nothing is counted"


def test_data_as_the_task_needs_them(
    site: Kit, tmp_path: Path, make_task: TaskOf, make_site: SiteOf
) -> None:
    for root in (tmp_path, tmp_path / "nowhere"):
        set_up(site, KitSettings(data_root=root))
        assert _found(site, "data").status == "FAILED" and str(root) in _found(site, "data").text
    folder = make_site()
    set_up(site, KitSettings(data_root=folder))
    assert "minimum_patients" in _found(site, "data", make_task()).text, (
        "it has four training patients"
    )
    set_up(site, KitSettings(minimum_patients=4))
    few = _found(site, "data", make_task())
    assert few.status == "warning" and "validation patients and" in few.text
    assert "fewer than minimum_patients 4, so that no metric" in few.text
    set_up(site, KitSettings(minimum_patients=1))
    assert _found(site, "data").status == _found(site, "data", make_task()).status == "ok"
    next(folder.rglob("*.png")).write_bytes(b"damaged")
    assert (
        _found(site, "data").status == "ok" and _found(site, "data", make_task()).status == "FAILED"
    )


def test_data_are_looked_for_where_a_run_does(
    site: Kit, tmp_path: Path, make_task: TaskOf, make_site: SiteOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = make_site(name=site.name)
    other = make_site(name="other")
    next(other.rglob("*.png")).write_bytes(b"another site's, and damaged")
    monkeypatch.setenv("HOME", str(own.parent.parent))
    set_up(site, KitSettings(minimum_patients=1))
    assert _found(site, "data").status == "warning"
    monkeypatch.setenv(DATA_ROOT_VARIABLE, str(own.parent))
    assert _found(site, "data").status == "ok" and str(own) in _found(site, "data").text
    monkeypatch.setenv(DATA_ROOT_VARIABLE, str(tmp_path / "nowhere"))
    _change(site.local / "medflare.json", data_root=f"~/{own.parent.name}")
    assert _found(site, "data", make_task()).status == "ok"


def test_storage_of_a_server(server: Kit, tmp_path: Path) -> None:
    assert _found(server, "storage").status == "FAILED", "before setup"
    storage = tmp_path / "new" / "storage"
    set_up(server, KitSettings(storage=storage))
    assert (
        _found(server, "storage").status == "ok" and str(storage) in _found(server, "storage").text
    )
    assert not list(storage.iterdir()), "the check changes nothing"
    file = server.local / "resources.json"
    file.write_text(file.read_text().replace(str(storage / "jobs"), "/dev/null/jobs"))
    assert (
        _found(server, "storage").status == "FAILED"
        and "/dev/null/jobs" in _found(server, "storage").text
    )
    _change(file, components=[])
    assert (
        _found(server, "storage").status == "FAILED"
        and "resources.json" in _found(server, "storage").text
    )
