"""What a party allows: methods of other distributions are asked for by name, and not imported before they are allowed."""

import gc
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from nvflare.apis.app_validation import AppValidationKey
from nvflare.apis.fl_constant import FLContextKey, ReservedKey
from nvflare.apis.fl_context import FLContext
from PIL import Image

from flare.server import Server
from foreign.install import METHOD, install
from helpers.picture_sites import SiteOf
from helpers.small_tasks import small_task
from medflare.core import extensions
from medflare.core.errors import ConfigError
from medflare.core.message import Message
from medflare.data.local import private_folder
from medflare.evaluation.results import load_results
from medflare.federation import data_record
from medflare.federation.settings import ENROL
from medflare.flare.aggregators import MethodAggregator
from medflare.flare.controller import MedflareController
from medflare.flare.job_policy import authorize
from medflare.flare.participants import ParticipantSpec, load_ahead
from medflare.methods import catalogue


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Another distribution's method can be found, and has not been imported."""

    def forget() -> None:
        catalogue._foreign.cache_clear()
        for name in [name for name in sys.modules if name.split(".")[0] == METHOD]:
            del sys.modules[name]

    monkeypatch.syspath_prepend(install(tmp_path / "packages"))
    forget()
    yield
    forget()


def party(folder: Path, *allowed: str, byoc: bool = False) -> FLContext:
    """FLARE's context at a site that trusts these packages."""
    (folder / "local").mkdir(exist_ok=True)
    (folder / "local" / "medflare.json").write_text(json.dumps({"packages": list(allowed)}))
    fl_ctx = FLContext()
    fl_ctx.set_prop(ReservedKey.IDENTITY_NAME, "clinic")
    workspace = SimpleNamespace(get_site_config_dir=lambda: str(folder / "local"))
    fl_ctx.set_prop(
        ReservedKey.ENGINE, SimpleNamespace(get_workspace=lambda: workspace), private=True
    )
    fl_ctx.set_prop(FLContextKey.JOB_META, {AppValidationKey.BYOC: byoc})
    return fl_ctx


def test_a_method_of_a_package_that_the_party_does_not_name_is_refused(tmp_path: Path) -> None:
    authorize(("fedavg", "moon"), {}, party(tmp_path))
    for name in (METHOD, "fedavgg"):
        with pytest.raises(ConfigError, match=name):
            authorize(("fedavg", name), {}, party(tmp_path))
    authorize((METHOD, METHOD), {}, party(tmp_path, METHOD))
    # A job that may bring its own code may name installed code.
    authorize((METHOD,), {}, party(tmp_path, byoc=True))
    assert METHOD not in sys.modules


def test_nothing_of_it_is_imported_ahead() -> None:
    """A site's process loads what it will need before anybody has asked the party."""
    load_ahead(METHOD)
    assert METHOD not in sys.modules and "medflare.methods.fedavg.site" in sys.modules
    load_ahead("no such method")


def test_what_is_imported_ahead_is_shared_by_forks() -> None:
    """A collection writes into whatever it looks at, and a fork copies what it writes into."""
    gc.unfreeze()
    load_ahead("fedavg")
    assert gc.get_freeze_count() > 10_000
    gc.unfreeze()


def test_the_server_asks_its_own_list(tmp_path: Path) -> None:
    server = Server(tmp_path, MethodAggregator(method=METHOD))
    context = party(tmp_path)
    server.properties = {FLContextKey.JOB_META: context.get_prop(FLContextKey.JOB_META)}
    server.run(MedflareController(rounds=1, seed=0))
    assert METHOD in load_results(tmp_path)["reason"] and server.panics
    assert METHOD not in sys.modules


def test_a_network_of_ones_own_is_asked_for_like_a_method(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extensions, "_trusted", set())
    task = small_task(network={"name": "lab_nets.small:Plain"}).to_dict()
    with pytest.raises(ConfigError, match="lab_nets"):
        authorize((), task, party(tmp_path))
    assert not extensions._trusted
    assert authorize((), task, party(tmp_path, byoc=True)) == ("lab_nets.small",)
    assert extensions._trusted == {"lab_nets.small"}
    assert authorize((), task, party(tmp_path, "lab_nets")) == ("lab_nets.small",)
    assert extensions._trusted == {"lab_nets", "lab_nets.small"}
    assert authorize((), small_task().to_dict(), party(tmp_path)) == ()


def test_the_sites_own_settings_reach_its_participant(tmp_path: Path) -> None:
    place = Server(tmp_path / "server", MethodAggregator(method="fedavg"))
    local = tmp_path / "local" / "medflare.json"
    local.parent.mkdir()
    local.write_text(json.dumps({"minimum_patients": 5, "keep": "personal"}))
    spec = ParticipantSpec("clinic", "fedavg", "", 0, place.task_file, local, tmp_path / "job")
    participant = spec.participant(lambda: False)
    assert (participant.local.minimum_patients, participant.local.keep) == (5, "personal")


def test_in_containers_jobs_are_counted_in_a_folder_that_outlives_them(
    tmp_path: Path, make_site: SiteOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod in Kubernetes has a copy of local/, which ends with it; in Docker it is read-only."""
    monkeypatch.setenv("NVFL_WORKSPACE_OWNER_FQCN", "A")
    task_file = tmp_path / "task.json"
    task_file.write_text(json.dumps(small_task().to_dict()))
    make_site()

    def enrol(job: str, **settings: str) -> None:
        local = tmp_path / job / "local" / "medflare.json"
        local.parent.mkdir(parents=True)
        mine = {"minimum_patients": 3, "data_root": str(tmp_path / "A"), **settings}
        local.write_text(json.dumps(mine))
        folder = private_folder(tmp_path / job / job)
        spec = ParticipantSpec("A", "fedavg", "", 0, task_file, local, folder)
        asked = Message({}, {"role": "inside", "sites": ["A", "B"], "seed": 0.0})
        spec.participant(lambda: False).reply(ENROL, 0, asked)

    with pytest.raises(ConfigError, match="name it as records"):
        enrol("first")
    for job in ("second", "third"):
        enrol(job, records=str(tmp_path / "records"))
    selection = json.loads(next(tmp_path.glob("records/*/selection.json")).read_text())
    assert selection["job"] == "second"


def enrolled(root: Path, number: int, seed: int = 0, **settings: Any) -> Message:
    """The enrolment of site A in a job of its own, whose server has seed 0."""
    local = root / "kit" / "local" / "medflare.json"
    local.parent.mkdir(parents=True, exist_ok=True)
    local.write_text(json.dumps({"minimum_patients": 3, "data_root": str(root / "A")}))
    task_file = root / "kit" / f"job-{number}" / "task.json"
    task_file.parent.mkdir()
    task_file.write_text(json.dumps(small_task(**settings).to_dict()))
    spec = ParticipantSpec("A", "fedavg", "", seed, task_file, local, task_file.parent)
    asked = Message({}, {"role": "inside", "sites": ["A", "B"], "seed": 0.0})
    return spec.participant(lambda: False).reply(ENROL, 0, asked)


def test_a_lead_does_not_read_the_training_images_in_as_many_ways_as_it_likes(
    tmp_path: Path, make_site: SiteOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether images are plain for an intensity from v to v + 0.001 tells the brightest pixels."""
    make_site()
    monkeypatch.setattr(data_record, "_MOST_READINGS", 3)

    def intensity(low: float) -> dict[str, Any]:
        values = {"a_min": low, "a_max": 255, "b_min": 0, "b_max": 1}
        return {"name": "ScaleIntensityRange", **values}

    for low in range(2):
        assert enrolled(tmp_path, low, intensity=intensity(low)).meta["class_counts"]
    other_size = enrolled(tmp_path, 19, intensity=intensity(0), size=[24, 24])
    assert not other_size.meta["class_counts"], "two sizes tell a pixel of few patients"
    enrolled(tmp_path, 20, intensity=intensity(1))
    with pytest.raises(ConfigError, match=r"read this data in 3 ways.*readings\.json"):
        enrolled(tmp_path, 21, intensity=intensity(20))


@pytest.mark.parametrize("fixed", [True, False])
def test_a_lead_does_not_ask_by_transforms_that_fail_on_one_image(
    fixed: bool, tmp_path: Path, make_site: SiteOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MONAI's HistogramNormalize fails on an image with fewer grey values than bins; with another
    seed the job is refused in any case.
    """
    image = make_site() / "images" / "3.png"
    Image.fromarray(np.arange(200, 212, dtype=np.uint8).repeat(22)[:256].reshape(16, 16)).save(
        image
    )
    monkeypatch.setattr(data_record, "_MOST_READINGS", 2)

    def bins(number: int) -> dict[str, Any]:
        return {"name": "HistogramNormalize", "num_bins": 4 * 10**6 + number}

    if fixed:
        enrolled(tmp_path, 100)
    for number in range(int(fixed), 2):
        with pytest.raises((ConfigError, ValueError), match=r"other images|Too many bins"):
            enrolled(tmp_path, number, seed=1, intensity=bins(number))
    for number, transform in enumerate((bins(2), {"name": "ScaleIntensity", "minv": 0.25}), 2):
        with pytest.raises(ConfigError, match=r"in 2 ways.*readings\.json"):
            enrolled(tmp_path, number, intensity=transform)
    if fixed:
        assert enrolled(tmp_path, 101).meta["class_counts"]
