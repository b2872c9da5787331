"""What a job without code may have built: exactly the classes that our own jobs name, asked for by full name before anything is called."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import FLContextKey, SiteType
from nvflare.apis.fl_context import FLContext
from nvflare.apis.workspace import Workspace
from nvflare.fuel.utils.class_loader import load_class
from nvflare.private.fed.app.fl_app_validator import FLAppValidator
from nvflare.private.fed.server.job_meta_validator import JobMetaValidator
from nvflare.private.fed.utils.fed_utils import authorize_build_component

from e2e.simulation import ROOT, edit
from helpers.small_tasks import small_task
from medflare.cli.startup_kit import template
from medflare.data.local import find_private_folder, private_folder
from medflare.flare.job_policy import JobComponents, _component_paths, _refusal, _texts
from medflare.flare.jobs.building import build_job
from medflare.flare.recipes import MedflareRecipe
from medflare.methods.catalogue import SURVEYS, get_method, method_names

FILES = {"site": "config_fed_client.json", "server": "config_fed_server.json"}
EXECUTOR = "medflare.flare.executors.FedAvgExecutor"
COMPONENTS = {kind: template(kind, "resources.json")["class_allow_list"] for kind in FILES}
STREAMER = "nvflare.app_common.logging.job_log_streamer.JobLogStreamer"


def named_in(job: Path) -> dict[str, set[str]]:
    return {
        kind: set(_component_paths(json.loads((job / "app" / "config" / file).read_text())))
        for kind, file in FILES.items()
    }


# -- one list ------------------------------------------------------------------------------------------------------------------


def test_kits_list_what_our_jobs_name_and_nothing_else(tmp_path: Path) -> None:
    jobs = [path for path in sorted((ROOT / "jobs").iterdir()) if path.is_dir()]
    options: dict[str, dict[str, Any]] = {
        "grace": {"byoc": True, "outside": ["site-2"]},
        "fedsm": {"track": "mlflow", "min_sites": 2},
        "moon": {"server_algorithm": "grace", "embed_code": True, "byoc": True},
        "fedavg": {"hyper": {"dp_noise": 1.0}},
    }
    for method in (*method_names(), *SURVEYS):
        if method == "condist":  # it needs two structures
            continue
        if get_method(method).site_class.__module__.startswith("medflare."):
            chosen = {"byoc": False, **options.get(method, {})}
            task = small_task(
                network={
                    "name": "unet",
                    "channels": [4, 8],
                    "norm": "instance" if method == "fedavg" else "batch",
                }
            )
            jobs.append(
                build_job(
                    method,
                    task,
                    rounds=0 if method in SURVEYS else 4,
                    out=tmp_path / method,
                    **chosen,
                )
            )
    for recipe in MedflareRecipe.__subclasses__():
        recipe(task="phantom", rounds=4)._job.export_job(
            str(tmp_path / "recipes" / recipe.__name__)
        )
    jobs += [path.parent for path in (tmp_path / "recipes").rglob("meta.json")]
    assert len(jobs) > 25
    actual = {kind: set().union(*(named_in(job)[kind] for job in jobs)) for kind in FILES}
    assert actual == {kind: set(COMPONENTS[kind]) for kind in FILES}


@pytest.mark.parametrize("kind", ["site", "server"])
def test_kits_list_components_by_full_names(kind: Any) -> None:
    allowed = COMPONENTS[kind]
    assert {_refusal(name, allowed) for name in allowed} == {""}
    assert all(issubclass(load_class(name), FLComponent) for name in allowed)


# -- single components ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "os.system",
        "medflare.networks.foreign.trust",
        f"{EXECUTOR}X",
        f"{EXECUTOR}.execute",
        "medflare.flare.executors.HostClient",
        STREAMER,
        "",
        None,
        [EXECUTOR],
    ],
)
def test_a_component_that_is_not_listed_is_refused(name: Any) -> None:
    """A refusal is shown to the lead: it repeats a plain name, and no other value."""
    refusal = _refusal(name, COMPONENTS["site"])
    plain = isinstance(name, str) and name != ""
    assert refusal.startswith(
        f"component {name} refused: " if plain else "component without a plain name refused: "
    )


@pytest.mark.parametrize(
    "name", ["medflare.flare.simulator.HostClient", "medflare.flare.jobs.building.build_job"]
)
def test_a_listed_name_that_is_no_component_is_refused(name: str) -> None:
    assert "no class derived from FLARE's FLComponent" in _refusal(name, [name])


def test_a_refusal_repeats_no_value_that_is_no_name() -> None:
    for value in (
        "/srv/data",
        {"data_root": "/srv"},
        ["JOHN_DOE"],
        "JOHN DOE",
        "0123",
        "a" * 201,
        "\x1b[2J",
    ):
        refusal = _refusal(value, COMPONENTS["site"])
        assert refusal == _refusal(None, COMPONENTS["site"])


@pytest.mark.parametrize(
    "name",
    [
        "os.system",
        "medflare.cli.command.main",
        "medflare.core.message.Message",
        "nvflare.apis.dxo.DXO",
    ],
)
def test_a_listed_function_or_class_that_is_no_component_is_refused(name: str) -> None:
    assert "FLComponent" in _refusal(name, [name]) and name in _refusal(name, [name])


def test_an_entry_that_is_a_prefix_allows_nothing_below_it() -> None:
    assert "refused" in _refusal(EXECUTOR, ["medflare.", "medflare.flare.executors", "*"])


@pytest.mark.parametrize(
    "config",
    [
        {"components": [{"id": "a", "path": "os.system"}]},
        {"components": [{"id": "a", "class_path": "os.system"}]},
        {"components": [{"id": "a", "name": "os.system"}]},
        {"workflows": [{"id": "a", "path": "os.system"}]},
        {"executors": [{"tasks": ["*"], "executor": {"path": "os.system"}}]},
        {"task_data_filters": [{"tasks": ["*"], "filters": [{"path": "os.system"}]}]},
        {"task_result_filters": [{"tasks": ["*"], "filters": [{"name": "os.system"}]}]},
        {
            "executors": [
                {
                    "tasks": ["*"],
                    "executor": {"path": EXECUTOR, "args": {"hyper": {"path": "os.system"}}},
                }
            ]
        },
        {
            "executors": [
                {
                    "tasks": ["*"],
                    "executor": {
                        "path": EXECUTOR,
                        "args": {"hyper": [{"a": {"class_path": "os.system"}}]},
                    },
                }
            ]
        },
    ],
)
def test_wherever_a_configuration_names_it(config: dict[str, Any]) -> None:
    assert "os.system" in set(_component_paths(config))


# -- a party -------------------------------------------------------------------------------------------------------------------


def reason_for(party: Path, *paths: Any) -> str:
    """Why the party refuses the job if it names these components as well."""
    app = party / "4711" / "app_site-1"
    more = [{"id": "a", "path": path} for path in paths]
    edit(
        app / "config" / "config_fed_client.json", lambda config: config["components"].extend(more)
    )
    reason, rest = JobComponents().validate(str(app))
    assert rest == {}
    return reason


def test_a_job_of_ours_is_taken_and_a_refused_one_stands_in_the_audit_log(party: Path) -> None:
    assert reason_for(party) == "" and not (party / "audit.log").exists()
    assert STREAMER in reason_for(party, STREAMER)
    (line,) = (party / "audit.log").read_text().splitlines()
    assert "[R:4711]" in line and "refused" in line and STREAMER in line


@pytest.mark.parametrize("path", ["os.system", ["os.system"], {"os": "system"}])
def test_a_function_that_the_party_lists_is_refused_as_well(party: Path, path: Any) -> None:
    edit(
        party / "local" / "resources.json",
        lambda content: content["class_allow_list"].append("os.system"),
    )
    assert "refused" in reason_for(party, path)


@pytest.mark.parametrize(
    "name",
    [
        "os:system",
        "medflare.cli.command:main",
        "torch.nn:Linear",
        "monai.networks.nets:UNet",
        "lab_nets:Net",
    ],
)
def test_a_network_of_a_package_that_the_party_does_not_name_is_refused(
    party: Path, name: str
) -> None:
    edit(
        party / "4711" / "app_site-1" / "config" / "task.json",
        lambda task: task.update(network={"name": name}),
    )
    assert f"network {name} refused" in reason_for(party)
    (party / "local" / "medflare.json").write_text('{"packages": ["lab_nets"]}')
    assert (reason_for(party) == "") == name.startswith("lab_nets")


def test_a_job_that_brings_code_is_left_to_flares_own_policy(party: Path) -> None:
    (party / "4711" / "app_site-1" / "custom").mkdir()
    assert reason_for(party, "mine.Widget") == ""


# -- other formats -------------------------------------------------------------------------------------------------------------

INCLUDE = (
    'x { include file("local/medflare.json") }\nexecutors = [ { executor { path = ${x} } } ]\n'
)


@pytest.mark.parametrize(
    "name",
    [
        "config_fed_client.conf",
        "config_fed_client.yml",
        "config_fed_client.yaml",
        "config_fed_client.json.default",
        "more/config_fed_client.CONF",
        "../log_config.conf",
        # What FLARE would find in its search for the party's own settings.
        "comm_config.json",
        "../comm_config.json",
        "resources.json",
        "more/task.json",
        "evil.py",
    ],
)
@pytest.mark.parametrize("beside_json", [True, False])
def test_other_files_of_a_job_are_refused_by_name(
    party: Path, name: str, beside_json: bool
) -> None:
    config = party / "4711" / "app_site-1" / "config"
    if not beside_json:
        (config / "config_fed_client.json").unlink()
    (config / name).parent.mkdir(exist_ok=True)
    (config / name).write_text(INCLUDE)
    validator = FLAppValidator(SiteType.CLIENT, [JobComponents()])
    reason, _ = validator.validate(str(party / "4711" / "app_site-1"))
    assert reason.startswith(f"configuration {Path(name).name} refused: beside its code a job has ")
    assert reason in (party / "audit.log").read_text()


def test_missing_configuration_is_refused_without_the_partys_folder(party: Path) -> None:
    (party / "4711" / "app_site-1" / "config" / "config_fed_client.json").unlink()
    reason, _ = FLAppValidator(SiteType.CLIENT, [JobComponents()]).validate(
        str(party / "4711" / "app_site-1")
    )
    assert reason == "configuration config_fed_client.json refused: it is missing"


@pytest.mark.parametrize("name", ["config_fed_client.json", "task.json"])
def test_a_large_configuration_is_refused_before_it_is_read(party: Path, name: str) -> None:
    (party / "4711" / "app_site-1" / "config" / name).write_text("[" + "[]," * 400_000 + "[]]")
    reason, _ = FLAppValidator(SiteType.CLIENT, [JobComponents()]).validate(
        str(party / "4711" / "app_site-1")
    )
    assert reason == f"configuration {name} refused: more than 1048576 bytes"


@pytest.mark.parametrize("suffix", ["conf", "yml", "yaml", "conf.default"])
@pytest.mark.parametrize("file", ["meta", "app/config/config_fed_server"])
def test_the_server_refuses_an_upload_in_another_format(
    tmp_path: Path, file: str, suffix: str
) -> None:
    """Before it reads it, so that no include is followed."""
    job = build_job("fedavg", "phantom", byoc=False, out=tmp_path / "job")
    (job / f"{file}.json").unlink()
    (job / f"{file}.{suffix}").write_text("name = ${PATH}" if "conf" in suffix else "name: x")
    JobComponents()
    valid, reason, _ = JobMetaValidator().validate(
        "job", shutil.make_archive(str(tmp_path / "job"), "zip", tmp_path, "job")
    )
    assert not valid and reason.endswith("refused: medflare reads JSON only")


def asked(party: Path, config: dict[str, Any], byoc: bool = False) -> str:
    """What FLARE answers in a job's process before it builds a component: why it does not, or ""."""
    fl_ctx = FLContext()
    fl_ctx.set_prop(FLContextKey.WORKSPACE_OBJECT, Workspace(str(party), "site-1"), private=True)
    fl_ctx.set_prop(FLContextKey.CURRENT_JOB_ID, "4711", private=False)
    fl_ctx.set_prop(FLContextKey.JOB_META, {"byoc": byoc}, private=True)
    output: str = authorize_build_component(config, None, None, fl_ctx, [JobComponents()])
    return output


def test_flare_asks_before_it_builds(party: Path) -> None:
    """Also where the party's list still has the prefix below which FLARE would call anything."""
    edit(
        party / "local" / "resources.json",
        lambda content: content["class_allow_list"].append("medflare."),
    )
    assert asked(party, {"path": EXECUTOR}) == ""
    assert "medflare.networks.foreign.trust" in asked(
        party, {"path": "medflare.networks.foreign.trust", "args": {"module": "os"}}
    )
    built, refused = (party / "audit.log").read_text().splitlines()
    assert (
        "built" in built
        and EXECUTOR in built
        and "refused" in refused
        and "medflare.networks.foreign.trust" in refused
    )
    assert (
        asked(party, {"path": "mine.Widget"}, byoc=True) == ""
        and "mine.Widget" in (party / "audit.log").read_text()
    )


def test_a_list_that_cannot_be_read_lets_nothing_be_built(party: Path) -> None:
    fl_ctx = FLContext()
    fl_ctx.set_prop(FLContextKey.COMPONENT_CONFIG, {"path": EXECUTOR})
    fl_ctx.set_prop(FLContextKey.WORKSPACE_OBJECT, None)
    with pytest.raises(Exception, match="refused") as refused:
        JobComponents().handle_event("_before_build_component", fl_ctx)
    assert type(refused.value).__name__ == "UnsafeComponentError"


def test_in_a_container_what_is_kept_lies_in_the_jobs_folder(
    party: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It alone outlives the job: a site's own files and the audit log would be lost anywhere else."""
    run = party / "4711"
    assert private_folder(run) == find_private_folder(run) == party / "medflare" / "4711"
    with monkeypatch.context() as pod:
        pod.setenv("NVFL_WORKSPACE_OWNER_FQCN", "site-1")
        assert private_folder(run) == run / "medflare", "a pod gives back this folder alone"
    monkeypatch.setattr(Path, "is_mount", lambda path: path == run)
    assert private_folder(run) == run / "medflare"
    assert (
        asked(party, {"path": EXECUTOR}) == ""
        and EXECUTOR in (run / "audit.log").read_text()
        and not (party / "audit.log").exists()
    )


# -- values that FLARE would replace ---------------------------------------------------------------

BRACES = "a name or text has braces, which FLARE replaces; write the values themselves"


@pytest.mark.parametrize(
    "more",
    [
        {"x": "{$HOME}"},
        {"{$HOME}": 1},
        {"x": "before {$HOME} after"},
        {"x": [{"y": ["{{name}}"]}]},
        {"x": "{"},
        {"x": "}"},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", FILES)
def test_a_configuration_with_braces_is_refused_without_their_text(
    kind: str, more: dict[str, Any], party: Path
) -> None:
    app = party / "4711" / "app_site-1"
    if kind == "server":
        (party / "local" / "resources.json").write_text(
            json.dumps(template("server", "resources.json"))
        )
        app = app.rename(app.with_name("app_server"))
    assert JobComponents().validate(str(app)) == ("", {})
    edit(app / "config" / FILES[kind], lambda config: config.update(more))
    reason, _ = JobComponents().validate(str(app))
    assert reason == f"configuration {FILES[kind]} refused: {BRACES}"
    assert "HOME" not in (party / "audit.log").read_text()


def test_jobs_of_ours_have_no_braces() -> None:
    configs = [file for name in FILES.values() for file in (ROOT / "jobs").rglob(name)]
    assert len(configs) > 10
    texts = [text for file in configs for text in _texts(json.loads(file.read_text()))]
    assert texts and not [text for text in texts if "{" in text or "}" in text]
