"""What is missing is added, what is named is changed, and nothing else."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from cli.fake_kits import PLAIN
from medflare.cli.startup_kit import Change, Kit, KitSettings, set_up, template
from medflare.core.errors import ConfigError, StateError


def _read(kit: Kit, name: str) -> Any:
    return json.loads((kit.local / name).read_text())


def _write(kit: Kit, name: str, content: Any) -> None:
    (kit.local / name).write_text(json.dumps(content))


def _actions(changes: list[Change]) -> dict[str, str]:
    return {change.file.name: change.action for change in changes}


def _all(kit: Kit) -> dict[str, str]:
    return {path.name: path.read_text() for path in kit.local.glob("*.json")}


def test_a_new_kit_gets_everything(site: Kit, server: Kit) -> None:
    assert set(_actions(set_up(site, KitSettings())).values()) == {"added"}
    assert _read(site, "medflare.json") == {
        "device": "cpu",
        "minimum_patients": 5,
        "bounds": {"inside_sites": 2, "drop_share": 0.5},
    }
    resources = _read(site, "resources.json")
    assert "medflare.flare.executors.MedflareExecutor" in resources["class_allow_list"]
    assert (
        resources["components"][0]["path"]
        == template("site", "resources.json")["components"][2]["path"]
        != PLAIN
    )
    assert (
        resources["app_validator"]["path"] == "medflare.flare.components.JobComponents"
        and resources["allow_log_streaming"] is False
    )
    assert (
        _read(site, "privacy.json")["scopes"][0]["task_result_filters"][0]["path"]
        == "medflare.flare.guard.OutboundGuard"
    )
    set_up(server, KitSettings())
    resources = _read(server, "resources.json")
    assert resources["components"][0]["args"]["uri_root"] == str(server.folder / "storage" / "jobs")
    assert resources["servers"][0]["heart_beat_timeout"] == 120
    assert resources["components"][-1]["path"] == "medflare.flare.components.UnfinishedJobs"
    for kit in (site, server):
        internal = _read(kit, "comm_config.json")["internal"]
        assert internal["resources"]["connection_security"] == "mtls"
        paths = [item["path"] for item in _read(kit, "resources.json")["components"]]
        assert not any("app_common.logging" in path for path in paths)
        assert set(_actions(set_up(kit, KitSettings())).values()) == {"kept"}


def test_processes_of_a_site_with_a_relay_use_mtls(site: Kit) -> None:
    """FLARE writes "clear" into such a kit."""
    listener = {"host": "localhost", "connection_security": "clear"}
    _write(site, "comm_config.json", {"internal": {"scheme": "tcp", "resources": listener}})
    assert _actions(set_up(site, KitSettings()))["comm_config.json"] == "changed"
    internal = _read(site, "comm_config.json")["internal"]
    assert internal["resources"]["connection_security"] == "mtls"
    _write(site, "comm_config.json", {"internal": {"scheme": "shared-file", "resources": listener}})
    assert _actions(set_up(site, KitSettings()))["comm_config.json"] == "kept"


def test_a_kit_with_a_link_to_another_one_is_refused(site: Kit, server: Kit) -> None:
    """Root would write the other party's policies, and give them to this account."""
    before = _all(server)
    (site.local / "medflare.json").symlink_to(server.local / "medflare.json")
    with pytest.raises(StateError, match="is a link"):
        set_up(site, KitSettings(minimum_patients=0))
    shutil.rmtree(site.local)
    site.local.symlink_to(server.local)
    with pytest.raises(StateError, match="is a link"):
        set_up(site, KitSettings(minimum_patients=0))
    assert _all(server) == before


def test_a_kit_is_for_its_account_alone(site: Kit, tmp_path: Path) -> None:
    """However it was unpacked; a file elsewhere, to which a link leads, stays as it is."""
    script = site.folder / "startup" / "start.sh"
    elsewhere = tmp_path / "elsewhere"
    script.write_text("#!/usr/bin/env bash\n")
    elsewhere.write_text("of others")
    (site.folder / "link").symlink_to(elsewhere)
    for path, mode in (
        (script, 0o755),
        (site.folder / "startup", 0o755),
        (site.folder, 0o755),
        (elsewhere, 0o644),
    ):
        path.chmod(mode)
    set_up(site, KitSettings())
    assert not [
        path
        for path in (site.folder, *site.folder.rglob("*"))
        if path.lstat().st_mode & 0o077 and not path.is_symlink()
    ]
    assert script.stat().st_mode & 0o700 == 0o700 and elsewhere.stat().st_mode & 0o777 == 0o644


def test_settings_are_merged_into_a_kit_that_has_some(site: Kit, tmp_path: Path) -> None:
    set_up(site, KitSettings())
    own = {
        "device": "cpu",
        "minimum_patients": 9,
        "outbound": {"entries": ["model"]},
        "cache": {"folder": "/old", "limit_gb": 5},
    }
    _write(site, "medflare.json", own)
    _write(site, "authorization.json", {"the hospital's": "own"})
    before = _all(site)
    (tmp_path / "mount").symlink_to(tmp_path)
    changes = set_up(
        site,
        KitSettings(
            data_root=tmp_path / "mount",
            device="cuda:0",
            batch_size=4,
            cache=str(tmp_path / "fast"),
        ),
    )
    assert {name for name, action in _actions(changes).items() if action != "kept"} == {
        "medflare.json"
    }
    cache = {"folder": str(tmp_path / "fast"), "limit_gb": 5}
    # A link stays one.
    named = {
        "data_root": str(tmp_path / "mount"),
        "device": "cuda:0",
        "batch_size": 4,
        "cache": cache,
    }
    assert _read(site, "medflare.json") == {**own, **named}
    assert 'device: "cpu" -> "cuda:0"' in changes[1].settings
    assert {name: text for name, text in _all(site).items() if before[name] != text}.keys() == {
        "medflare.json"
    }


def test_policies_are_replaced_only_where_that_is_asked(
    site: Kit, server: Kit, tmp_path: Path
) -> None:
    for kit, expected in (
        (site, KitSettings(minimum_patients=9)),
        (server, KitSettings(storage=tmp_path / "store")),
    ):
        set_up(kit, expected)
        _write(kit, "authorization.json", {"own": 1})
        set_up(kit, KitSettings())
        assert _read(kit, "authorization.json") == {"own": 1}
        set_up(kit, KitSettings(replace_policies=True))
        assert "permissions" in _read(kit, "authorization.json")
    assert _read(site, "medflare.json")["minimum_patients"] == 9, "settings are no policies"
    jobs = _read(server, "resources.json")["components"][0]["args"]["uri_root"]
    assert jobs == str(tmp_path / "store" / "jobs"), "jobs are where they were"


@pytest.mark.parametrize("earlier", [False, True])
def test_where_medflare_is_not_installed_policies_name_nothing_of_it(
    site: Kit, server: Kit, earlier: bool
) -> None:
    for kit in (site, server):
        if earlier:
            set_up(kit, KitSettings())
        set_up(kit, KitSettings(bring_code=True))
        assert "medflare." not in "".join(_all(kit).values()).replace(str(kit.folder), "")
        assert _read(kit, "authorization.json")["permissions"]["lead"]["byoc"] == "any"
    assert (
        not (site.local / "privacy.json").exists()
        and _read(site, "resources.json")["components"][0]["path"] == PLAIN
    )


def test_the_hospitals_own_filters_stay_where_the_guard_goes(site: Kit) -> None:
    set_up(site, KitSettings())
    privacy = _read(site, "privacy.json")
    privacy["scopes"][0]["task_result_filters"].insert(0, {"path": "hospital.Filter"})
    _write(site, "privacy.json", privacy)
    set_up(site, KitSettings(bring_code=True))
    assert _read(site, "privacy.json")["scopes"][0]["task_result_filters"] == [
        {"path": "hospital.Filter"}
    ]


@pytest.mark.parametrize(
    ("kind", "expected", "named"),
    [
        ("site", KitSettings(storage=Path("x")), "--storage"),
        ("site", KitSettings(batch_size=1), "batch_size"),
        ("site", KitSettings(minimum_patients=-1), "minimum_patients"),
        ("site", KitSettings(packages=["os"]), "packages"),
        ("site", KitSettings(packages=["medflare"]), "packages"),
        ("site", KitSettings(packages=["lab nets"]), "packages"),
        ("server", KitSettings(minimum_patients=3), "--minimum-patients"),
    ],
)
def test_a_wrong_setting_is_refused_before_anything_is_written(
    kind: str, expected: KitSettings, named: str, request: pytest.FixtureRequest
) -> None:
    kit = request.getfixturevalue(kind)
    with pytest.raises(ConfigError, match=named):
        set_up(kit, expected)
    assert _all(kit) == {}


def test_what_a_party_says_of_packages(site: Kit, server: Kit) -> None:
    for packages in (["lab_nets"], None):
        set_up(site, KitSettings(packages=packages))
        assert _read(site, "medflare.json")["packages"] == ["lab_nets"]
    set_up(server, KitSettings())
    assert not (server.local / "medflare.json").exists()
    set_up(server, KitSettings(packages=["lab_nets"]))
    assert _read(server, "medflare.json") == {"packages": ["lab_nets"]}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root writes for others")
def test_what_root_writes_for_another_account_is_that_accounts(server: Kit) -> None:
    for path in (server.folder, *server.folder.rglob("*")):
        os.chown(path, 54321, 54321)
    set_up(server, KitSettings(storage=server.folder / "far" / "storage"))
    assert {(path.stat().st_uid, path.stat().st_gid) for path in server.folder.rglob("*")} == {
        (54321, 54321)
    }
    assert (server.folder / "far" / "storage").stat().st_mode & 0o777 == 0o700


def test_another_accounts_kit_is_refused(site: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    with pytest.raises(ConfigError, match=str(site.folder)):
        set_up(site, KitSettings())
    assert _all(site) == {}


@pytest.mark.parametrize(
    ("name", "odd"),
    [
        ("resources.json", {"class_allow_list": None, "components": []}),
        ("resources.json", {"components": [1]}),
        ("authorization.json", {"permissions": {"lead": "any"}}),
        ("privacy.json", {"scopes": None}),
        ("privacy.json", "no JSON"),
    ],
)
def test_json_of_another_shape_is_named_and_left(site: Kit, name: str, odd: object) -> None:
    set_up(site, KitSettings())
    _write(site, name, odd)
    before = _all(site)
    with pytest.raises(ConfigError, match=str(site.local / name)):
        set_up(site, KitSettings(bring_code=True, device="cuda"))
    assert _all(site) == before
