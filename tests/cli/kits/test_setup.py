"""What is missing is added, what is named is changed, and nothing else."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from cli.kits.fake import PLAIN
from medflare.cli.federation.kits.kit import Kit, read_object
from medflare.cli.federation.kits.setup import Change, Wishes, differences, set_up, template
from medflare.core.errors import ConfigError
from medflare.flare.names import COMPONENTS


def _read(kit: Kit, name: str) -> Any:
    return json.loads((kit.local / name).read_text())


def _verdicts(changes: list[Change]) -> dict[str, str]:
    return {change.file.name: change.verdict for change in changes}


def _all(kit: Kit) -> dict[str, str]:
    return {path.name: path.read_text() for path in kit.local.glob("*.json")}


def test_a_new_kit_gets_everything(site: Kit, server: Kit) -> None:
    assert set(_verdicts(set_up(site, Wishes())).values()) == {"added"}
    assert _read(site, "medflare.json") == {"device": "cpu", "minimum_patients": 5}
    resources = _read(site, "resources.json")
    assert resources["class_allow_list"] == list(COMPONENTS["site"]) and resources["components"][0]["path"].startswith(
        "medflare.flare.launcher"
    )
    assert resources["app_validator"]["path"].startswith("medflare.") and resources["allow_log_streaming"] is False
    assert _read(site, "privacy.json")["scopes"][0]["task_result_filters"][0]["path"] == "medflare.flare.guard.OutboundGuard"
    set_up(server, Wishes())
    resources = _read(server, "resources.json")
    assert resources["components"][0]["args"]["uri_root"] == str(server.folder / "storage" / "jobs")
    assert resources["servers"][0]["heart_beat_timeout"] == 120
    assert resources["components"][-1]["path"] == "medflare.flare.components.UnfinishedJobs"


def test_a_kit_is_for_its_account_alone(site: Kit, tmp_path: Path) -> None:
    """However it was unpacked; what lies elsewhere is nobody's business here."""
    script, elsewhere = site.folder / "startup" / "start.sh", tmp_path / "elsewhere"
    script.write_text("#!/usr/bin/env bash\n")
    elsewhere.write_text("of others")
    (site.folder / "link").symlink_to(elsewhere)
    for path, mode in ((script, 0o755), (site.folder / "startup", 0o755), (site.folder, 0o755), (elsewhere, 0o644)):
        path.chmod(mode)
    set_up(site, Wishes())
    assert not [path for path in (site.folder, *site.folder.rglob("*")) if path.lstat().st_mode & 0o077 and not path.is_symlink()]
    assert script.stat().st_mode & 0o700 == 0o700 and elsewhere.stat().st_mode & 0o777 == 0o644


def test_settings_are_merged_into_a_kit_that_has_some(site: Kit, tmp_path: Path) -> None:
    set_up(site, Wishes())
    own = {"device": "cpu", "minimum_patients": 9, "outbound": {"entries": ["model"]}, "cache": {"folder": "/old", "limit_gb": 5}}
    (site.local / "medflare.json").write_text(json.dumps(own))
    (site.local / "authorization.json").write_text('{"the hospital\'s": "own"}')
    before = _all(site)
    changes = set_up(site, Wishes(data_root=tmp_path, device="cuda:0", batch_size=4, cache=str(tmp_path / "fast")))
    assert _verdicts(changes) == {
        **dict.fromkeys(("authorization.json", "privacy.json", "resources.json"), "kept"),
        "medflare.json": "changed",
    }
    cache = {"folder": str(tmp_path / "fast"), "limit_gb": 5}
    assert _read(site, "medflare.json") == {**own, "data_root": str(tmp_path), "device": "cuda:0", "batch_size": 4, "cache": cache}
    assert 'device: "cpu" -> "cuda:0"' in changes[1].settings and "batch_size: not set -> 4" in changes[1].settings
    assert {name: text for name, text in _all(site).items() if name != "medflare.json"} == {
        name: text for name, text in before.items() if name != "medflare.json"
    }
    assert set(_verdicts(set_up(site, Wishes())).values()) == {"kept"}


def test_a_link_to_the_data_stays_one(site: Kit, tmp_path: Path) -> None:
    (tmp_path / "mount").symlink_to(tmp_path)
    set_up(site, Wishes(data_root=tmp_path / "mount"))
    assert _read(site, "medflare.json")["data_root"] == str(tmp_path / "mount")


def test_policies_are_replaced_only_where_that_is_asked(site: Kit, server: Kit, tmp_path: Path) -> None:
    for kit, wishes in ((site, Wishes(minimum_patients=9)), (server, Wishes(storage=tmp_path / "store"))):
        set_up(kit, wishes)
        (kit.local / "authorization.json").write_text('{"own": 1}')
        set_up(kit, Wishes(replace_policies=True))
        assert "permissions" in _read(kit, "authorization.json")
    assert _read(site, "medflare.json")["minimum_patients"] == 9, "settings are no policies"
    jobs = _read(server, "resources.json")["components"][0]["args"]["uri_root"]
    assert jobs == str(tmp_path / "store" / "jobs"), "jobs are where they were"


def test_storage_can_be_changed_later(server: Kit, tmp_path: Path) -> None:
    set_up(server, Wishes())
    changes = set_up(server, Wishes(storage=tmp_path))
    said = next(change.settings for change in changes if change.file.name == "resources.json")
    assert [line.split(":")[0] for line in said] == [
        "snapshot_persistor.args.storage.args.root_dir",
        "components.job_manager.args.uri_root",
    ]


@pytest.mark.parametrize("earlier", [False, True])
def test_where_medflare_is_not_installed_policies_name_nothing_of_it(site: Kit, earlier: bool) -> None:
    if earlier:
        set_up(site, Wishes())
    set_up(site, Wishes(bring_code=True))
    assert "medflare." not in "".join(_all(site).values()) and not (site.local / "privacy.json").exists()
    assert _read(site, "authorization.json")["permissions"]["lead"]["byoc"] == "any"
    assert _read(site, "resources.json")["components"][0]["path"] == PLAIN


def test_a_server_without_medflare_has_no_component_of_it(server: Kit) -> None:
    set_up(server, Wishes())
    set_up(server, Wishes(bring_code=True))
    assert "medflare." not in (server.local / "resources.json").read_text().replace(str(server.folder), "")


def test_the_hospitals_own_filters_stay_where_the_guard_goes(site: Kit) -> None:
    set_up(site, Wishes())
    privacy = _read(site, "privacy.json")
    privacy["scopes"][0]["task_result_filters"].insert(0, {"path": "hospital.Filter"})
    (site.local / "privacy.json").write_text(json.dumps(privacy))
    set_up(site, Wishes(bring_code=True))
    assert _read(site, "privacy.json")["scopes"][0]["task_result_filters"] == [{"path": "hospital.Filter"}]


@pytest.mark.parametrize(
    ("wishes", "said"),
    [
        (Wishes(storage=Path("x")), "--storage is a setting of the server"),
        (Wishes(batch_size=1), "batch_size must be"),
        (Wishes(minimum_patients=-1), "minimum_patients must be"),
    ],
)
def test_a_wrong_wish_is_refused_before_anything_is_written(site: Kit, wishes: Wishes, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        set_up(site, wishes)
    assert _all(site) == {}


def test_a_sites_setting_is_none_of_the_servers(server: Kit) -> None:
    with pytest.raises(ConfigError, match=r"--minimum-patients is a setting of a site; .* is the kit of the server localhost"):
        set_up(server, Wishes(minimum_patients=3))


def test_a_file_that_cannot_be_understood_is_named_and_left(site: Kit) -> None:
    set_up(site, Wishes())
    (site.local / "privacy.json").write_text("{")
    with pytest.raises(ConfigError, match=r"privacy\.json: not JSON"):
        set_up(site, Wishes(device="cuda"))
    assert _read(site, "medflare.json")["device"] == "cpu"


def test_differences_of_lists_and_components() -> None:
    old = {"list": ["a", "b"], "components": [{"id": "x", "path": "p"}], "long": "l" * 100}
    new = {"list": ["b", "c"], "components": [{"id": "x", "path": "q"}, {"id": "y"}], "long": None}
    assert list(differences(old, new)) == [
        'list: "a" removed',
        'list: "c" added',
        'components.x.path: "p" -> "q"',
        'components.y: not set -> {"id": "y"}',
        f'long: "{"l" * 27}...{"l" * 28}" -> not set',
    ]
    assert list(differences(["a", "b"], ["b", "a"], "order")) == ['order: ["a", "b"] -> ["b", "a"]']
    assert list(differences(old, old)) == []


def test_a_kit_that_an_earlier_medflare_set_up_gets_the_list_of_names(site: Kit, server: Kit) -> None:
    """The prefix goes, and what FLARE provisioned; what the hospital has added stays, and so do its other policies."""
    for kit in (site, server):
        set_up(kit, Wishes())
        resources = _read(kit, "resources.json")
        provisioned = read_object(kit.local / "resources.json.default")["class_allow_list"]
        resources["class_allow_list"] = ["medflare.", "hospital.filters.Own", *provisioned]
        del resources["app_validator"]
        if kit is site:
            resources["allow_log_streaming"] = True
        (kit.local / "resources.json").write_text(json.dumps(resources))
        changes = set_up(kit, Wishes())
        assert any('"medflare." removed' in setting for change in changes for setting in change.settings)
        new = _read(kit, "resources.json")
        assert new["class_allow_list"] == [*COMPONENTS[kit.kind], "hospital.filters.Own"]
        assert new["app_validator"] == template(kit.kind, "resources.json")["app_validator"]
        assert set(_verdicts(set_up(kit, Wishes())).values()) == {"kept"}
    assert new.get("allow_log_streaming") is None and _read(site, "resources.json")["allow_log_streaming"] is False


def test_what_a_party_says_of_logs_and_packages(site: Kit, server: Kit) -> None:
    set_up(site, Wishes(stream_logs=True, packages=["lab_nets"]))
    assert _read(site, "resources.json")["allow_log_streaming"] is True and _read(site, "medflare.json")["packages"] == ["lab_nets"]
    set_up(site, Wishes(stream_logs=False))
    assert _read(site, "resources.json")["allow_log_streaming"] is False and _read(site, "medflare.json")["packages"] == ["lab_nets"]
    set_up(server, Wishes())
    assert not (server.local / "medflare.json").exists()
    set_up(server, Wishes(packages=["lab_nets"]))
    assert _read(server, "medflare.json") == {"packages": ["lab_nets"]}
    for wrong in ("os", "medflare", "lab nets"):
        with pytest.raises(ConfigError, match="packages"):
            set_up(site, Wishes(packages=[wrong]))
    with pytest.raises(ConfigError, match="stream-logs"):
        set_up(server, Wishes(stream_logs=True))


def test_resources_that_name_no_classes(site: Kit) -> None:
    """FLARE's own list holds then, which no kit of ours leaves in force."""
    provisioned = site.local / "resources.json.default"
    content = json.loads(provisioned.read_text())
    del content["class_allow_list"]
    provisioned.write_text(json.dumps(content))
    set_up(site, Wishes())
    assert _read(site, "resources.json")["class_allow_list"] == list(COMPONENTS["site"])
    resources = _read(site, "resources.json")
    for name in ("class_allow_list", "components", "app_validator"):
        del resources[name]
    (site.local / "resources.json").write_text(json.dumps(resources))
    set_up(site, Wishes(bring_code=True))
    assert _read(site, "resources.json") == {**resources, "components": []}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root writes for others")
def test_what_root_writes_for_another_account_is_that_accounts(server: Kit) -> None:
    for path in (server.folder, *server.folder.rglob("*")):
        os.chown(path, 54321, 54321)
    set_up(server, Wishes(storage=server.folder / "far" / "storage"))
    assert {(path.stat().st_uid, path.stat().st_gid) for path in server.folder.rglob("*")} == {(54321, 54321)}


def test_another_accounts_kit_is_refused(site: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    with pytest.raises(ConfigError, match=f"{site.folder} belongs to (.+); run it as \\1$"):
        set_up(site, Wishes())
    assert _all(site) == {}


@pytest.mark.parametrize("place", ["/proc/nowhere", "a file/storage", "a file"])
def test_a_storage_that_cannot_be_made_is_refused(server: Kit, tmp_path: Path, place: str) -> None:
    (tmp_path / "a file").write_text("")
    with pytest.raises(ConfigError, match=rf"--storage {tmp_path / place}: cannot be made"):
        set_up(server, Wishes(storage=tmp_path / place))
    assert _all(server) == {}
    set_up(server, Wishes(storage=tmp_path / "new" / "storage"))
    assert (tmp_path / "new" / "storage").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("name", "odd"),
    [
        ("resources.json", {"class_allow_list": None, "components": []}),
        ("resources.json", {"components": {}}),
        ("resources.json", {"components": [{"path": "no id"}]}),
        ("resources.json", {"components": [1]}),
        ("authorization.json", {"permissions": []}),
        ("authorization.json", {"permissions": {"lead": "any"}}),
        ("privacy.json", {"scopes": None}),
        ("privacy.json", {"scopes": [{"task_result_filters": "none"}]}),
    ],
)
def test_json_of_another_shape_is_named(site: Kit, name: str, odd: object) -> None:
    set_up(site, Wishes())
    (site.local / name).write_text(json.dumps(odd))
    before = _all(site)
    with pytest.raises(ConfigError, match=f"^{site.local / name}: .*; correct it$"):
        set_up(site, Wishes(bring_code=True))
    assert _all(site) == before
