"""The references of a study: what they train on and with what, and the best answer that ignores the image."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers.fixture_types import SiteOf
from helpers.forked_trial import fork_trials
from helpers.picture_sites import grades, masks
from helpers.small_tasks import small_task, tiny_grades, tiny_phantom
from medflare.data.loading import SiteData, Split
from medflare.evaluation.results import RunRecord, SiteRecord, build_results, validate_results
from medflare.federation.local.loop import run_local
from medflare.studies import references
from medflare.studies.references import (
    CONSTANT,
    CROSS_SITE,
    Draw,
    Setting,
    augmentation,
    batch_statistics,
    centralised,
    constant_prediction,
    equal_compute,
    participating,
    pooled_images,
    recorded_run,
    single_site,
)
from medflare.studies.tables import StudyTables
from medflare.tasks.config import load_task
from medflare.training.constant import constant_predictions
from medflare.training.site import Site


def split(count: int, value: float) -> Split:
    return Split(
        torch.full((count, 1, 2, 2), value),
        torch.zeros(count, 2, 2),
        tuple("p" * count),
        tuple(map(str, range(count))),
    )


def test_pooled_patients_of_two_sites_stay_two_patients() -> None:
    one = SiteData(split(2, 0.0), split(1, 0.0), split(1, 0.0))
    other = SiteData(split(3, 1.0), split(1, 1.0), split(2, 1.0))
    both = pooled_images([one, other])
    assert [len(both.split(name)) for name in ("train", "validation", "test")] == [5, 2, 3]
    assert set(both.train.patients) == {"0/p", "1/p"}
    assert both.train.images.flatten(1).mean(1).tolist() == [0, 0, 1, 1, 1]


def test_a_method_alone_is_that_method_in_a_federation_of_one() -> None:
    task = load_task(
        {
            **load_task("phantom_grades").to_dict(),
            "size": [16, 16],
            "network": {"name": "small_cnn", "channels": [4, 8]},
        }
    )
    last = {"server": {"selection": "last"}}
    results = single_site(
        Draw(Setting(task, ("site-1", "site-2"), rounds=2), 0),
        last | {"site": {"cpa": "local"}},
        method="prr",
    )
    one = run_local(
        "prr", task, ["site-2"], rounds=2, seed=0, resplit=0, cpa="local", selection="last"
    )
    assert results["method"] == "single-site"
    assert results["sites"]["site-2"]["metrics"] == one["sites"]["site-2"]["metrics"]
    plain = single_site(Draw(Setting(task, ("site-2",), rounds=2), 0), last)
    assert plain["sites"]["site-2"]["metrics"] != one["sites"]["site-2"]["metrics"]


def test_batch_statistics_are_measured_beside_the_plain_model() -> None:
    task = load_task(tiny_phantom(network={"name": "unet", "channels": [4, 8], "norm": "batch"}))
    setting = Setting(task, ("site-1", "site-2", "site-3"), rounds=1)
    results = batch_statistics(
        Draw(setting, 0, ("site-3",)), hyper={"server": {"selection": "last"}}
    )
    plain = run_local(
        "fedavg",
        task,
        ["site-1", "site-2"],
        rounds=1,
        seed=0,
        resplit=0,
        outside=["site-3"],
        selection="last",
    )
    validate_results(
        {name: content for name, content in results.items() if name not in ("scores", "curves")}
    )
    for name, site in results["sites"].items():
        assert site["metrics"]["global"] == plain["sites"][name]["metrics"]["global"]
        assert site["metrics"]["deployed"]["dice"] != site["metrics"]["global"]["dice"]
        values = []
        for value in results["scores"][name]["deployed"]["values"]["dice"]:
            if value is not None:
                values.append(value)
        assert sum(values) / len(values) == pytest.approx(
            site["metrics"]["deployed"]["dice"], abs=1e-5
        )
    assert [at for at, _ in results["curves"]["global"]["site-1"]] == [0, 1]
    assert results["traffic"] == plain["traffic"]


def test_batch_statistics_have_no_confusion_matrix_of_the_plain_model() -> None:
    network = {"name": "resnet18", "small_images": True}
    setting = Setting(load_task(tiny_grades(network=network)), ("site-1", "site-2"), rounds=1)
    for site in batch_statistics(Draw(setting, 0), {})["sites"].values():
        assert "global" in site["classes"] and "deployed" not in site["classes"]


@pytest.mark.parametrize(
    ("reference", "changes"),
    [
        (
            augmentation,
            {
                "augment": [
                    {"name": "RandFlip", "prob": 0.5, "spatial_axis": 1},
                    {"name": "RandAdjustContrast", "prob": 0.5, "gamma": [0.5, 2.0]},
                    {"name": "RandShiftIntensity", "prob": 0.5, "offsets": 0.5},
                    {"name": "RandScaleIntensity", "prob": 0.5, "factors": 0.5},
                    {"name": "RandGaussianNoise", "prob": 0.5, "std": 0.1},
                ]
            },
        ),
        (equal_compute, {"local_epochs": 4}),
    ],
)
def test_fedavg_with_another_task_is_that_fedavg(
    reference: Callable[..., dict[str, Any]],
    changes: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The results have the study's task, which all rows share, and the changes beside it."""
    fork_trials(monkeypatch)
    task = load_task(
        tiny_phantom(augment=[{"name": "RandFlip", "prob": 0.5, "spatial_axis": 1}], local_epochs=2)
    )
    setting = Setting(task, ("site-1", "site-2", "site-3"), rounds=1)
    draw = Draw(setting, 0, ("site-3",))
    results = reference(draw, hyper={"server": {"selection": "last"}})
    validate_results(
        {name: content for name, content in results.items() if name not in ("scores", "curves")}
    )
    other = load_task({**task.to_dict(), **changes})
    options: dict[str, Any] = {
        "rounds": 1,
        "seed": 0,
        "resplit": 0,
        "outside": ["site-3"],
        "selection": "last",
    }
    expected = run_local("fedavg", other, ["site-1", "site-2"], **options)
    plain = run_local("fedavg", task, ["site-1", "site-2"], **options)
    metrics = []
    for run in (results, expected, plain):
        metrics.append({name: site["metrics"] for name, site in run["sites"].items()})
    assert metrics[0] == metrics[1] != metrics[2]
    assert results["configuration"]["task"] == plain["configuration"]["task"]
    assert results["configuration"]["settings"]["task_changes"] == changes
    assert results["traffic"] == plain["traffic"]


def test_participating_outside_sites_are_tested_on_the_same_images(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fork_trials(monkeypatch)
    sites = ("site-1", "site-2", "site-3")
    draw = Draw(Setting(load_task(tiny_phantom()), sites, rounds=1), 0, ("site-3",))
    results = participating(draw, {"server": {"selection": "last"}})
    expected = run_local("fedavg", draw.task, sites, rounds=1, seed=0, resplit=0, selection="last")
    fedavg = recorded_run("fedavg", draw, draw.inside, outside=draw.outside)
    for name, site in results["sites"].items():
        assert site["metrics"] == expected["sites"][name]["metrics"]
        patients = [run["scores"][name]["deployed"]["patients"] for run in (results, fedavg)]
        assert patients[0] == patients[1]
    assert results["sites"]["site-3"]["role"] == "outside"
    mean = results["mean"]["outside"]["deployed"]["dice"]
    assert mean == results["sites"]["site-3"]["metrics"]["deployed"]["dice"]
    # An oracle is neither the best of a column nor one of the comparisons that Holm counts.
    tables = StudyTables({"fedavg": [fedavg], "participating": [results]})
    assert tables.compared == ["fedavg"]
    assert [equal.is_attainable for equal in tables.equal_models("dice")] == [True, False]


def test_a_site_that_fails_alone_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(method: str, draw: Draw, sites: list[str], **_: Any) -> dict[str, Any]:
        means = {role: {"deployed": {"dice": None}} for role in ("inside", "outside")}
        value = {"deployed": {"dice": 0.5 if sites == ["A"] else None}}
        reason = None if sites == ["A"] else "no images"
        site = {sites[0]: {"role": "inside", "metrics": value}}
        event = {"kind": "warning", "site": sites[0], "round": None, "message": "of this site"}
        outcome: dict[str, Any] = {
            "status": "FAILED" if reason else "COMPLETED",
            "reason": reason,
            "seconds": {"total": 2.0},
            "events": [event],
        }
        outcome["configuration"] = {"task": {}}
        recorded = {
            "curves": {"global": {sites[0]: [[1, 0.5]]}},
            "scores": {sites[0]: {"global": {}}},
        }
        return {
            **outcome,
            **recorded,
            "method": method,
            "sites": site,
            "mean": means,
            "traffic": {"down_bytes": 9, "up_bytes": 9},
        }

    monkeypatch.setattr(references, "recorded_run", run)
    results = single_site(Draw(Setting(load_task("phantom"), ("A", "B", "C"), 1), 0, ("C",)), {})
    assert (results["method"], results["status"], results["reason"]) == (
        "single-site",
        "FAILED",
        "B: no images",
    )
    assert list(results["sites"]) == [event["site"] for event in results["events"]] == ["A", "B"]
    assert results["curves"] == {"global": {"A": [[1, 0.5]], "B": [[1, 0.5]]}}
    assert results["scores"] == {"A": {"global": {}}, "B": {"global": {}}}
    assert results["mean"]["inside"]["deployed"]["dice"] == 0.5
    assert (results["seconds"], results["traffic"]) == (
        {"total": 4.0},
        {"down_bytes": 0, "up_bytes": 0},
    )


def opened(monkeypatch: pytest.MonkeyPatch, data: dict[str, SiteData]) -> None:
    monkeypatch.setattr(
        references, "open_site", lambda name, task, **_: Site(name, task, data[name])
    )


def test_the_constant_class_is_chosen_on_training_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """The majority of A's images is 0, of all images 2."""
    data = {
        "A": SiteData(grades(0, 0, 2), grades(2), grades(0, 0, 2, 2)),
        "B": SiteData(grades(2, 2, 2), grades(2), grades(2, 0)),
        "X": SiteData(grades(), grades(), grades(2, 2, 2, 1)),
    }
    opened(monkeypatch, data)
    results = constant_prediction(
        Draw(Setting(small_task("classification"), ("A", "B", "X"), 5), 0, outside=("X",))
    )
    validate_results({name: content for name, content in results.items() if name != "scores"})
    metrics = {}
    for name, site in results["sites"].items():
        metrics[name] = {model: of["accuracy"] for model, of in site["metrics"].items()}
    assert metrics == {
        "A": {"global": 0.5, "personal": 0.5, "deployed": 0.5},
        "B": {"global": 0.5, "personal": 0.5, "deployed": 0.5},
        "X": {"global": 0.75, "personal": None, "deployed": 0.75},
    }
    assert results["method"] == CONSTANT and results["rounds"] == 5
    assert results["sites"]["A"]["metrics"]["global"]["auc_macro"] == 0.5, "all scores are equal"
    assert results["scores"]["A"]["personal"]["probabilities"][0] == pytest.approx(
        [2 / 3, 0, 1 / 3], abs=1e-5
    )


@pytest.mark.parametrize(
    ("rows", "expected"),
    # The test masks equal the mean training mask, or have half of its rows.
    [(8, 1.0), (2, 2 * 2 / (2 + 4))],
)
def test_the_constant_mask_is_the_best_on_validation_images(
    monkeypatch: pytest.MonkeyPatch, rows: int, expected: float
) -> None:
    training = rows if rows == 8 else 4
    opened(monkeypatch, {"A": SiteData(masks(training, 3), masks(training, 2), masks(rows, 2))})
    results = constant_prediction(Draw(Setting(small_task(), ("A",), 1), 0))
    assert results["sites"]["A"]["metrics"]["deployed"]["dice"] == pytest.approx(expected)


def test_constant_predictions_of_segmentation() -> None:
    targets = torch.tensor([[[1, 0]], [[1, 0]]])
    binary = SimpleNamespace(kind="segmentation", target="binary", outputs=1, image_mode="resize")
    several = SimpleNamespace(
        kind="segmentation", target="multiclass", outputs=2, image_mode="resize"
    )
    answers = constant_predictions(binary, targets)  # type: ignore[arg-type]
    assert [answer.flatten().tolist() for answer in answers][:3] == [[0.0], [1.0], [1.0, 0.0]]
    answers = constant_predictions(several, targets)  # type: ignore[arg-type]
    assert [answer.flatten().tolist() for answer in answers] == [[1, 0], [0, 1], [0, 1, 1, 0]]
    binary.image_mode = "patch"
    masks = [targets[0], targets[1][:, :1]]
    answers = constant_predictions(binary, masks)  # type: ignore[arg-type]
    assert len(list(answers)) == 2, "masks of different sizes have no mean"


def test_every_sites_model_is_tested_at_every_site() -> None:
    setting = Setting(load_task(tiny_phantom()), ("site-1", "site-2"), rounds=1, cross_site=True)
    draw = Draw(setting, 0)
    personal = recorded_run("ditto", draw, setting.sites)
    matrix = personal[CROSS_SITE]
    assert {owner: matrix[owner][owner] for owner in matrix} == {
        site: content["metrics"]["personal"]["dice"] for site, content in personal["sites"].items()
    }
    assert matrix["site-1"] != matrix["site-2"]
    shared = recorded_run("fedavg", draw, setting.sites)[CROSS_SITE]
    assert shared["site-1"] == shared["site-2"], "one model"
    alone = single_site(draw, {})[CROSS_SITE]
    assert {owner: sorted(row) for owner, row in alone.items()} == {
        site: list(setting.sites) for site in setting.sites
    }
    table = StudyTables({"ditto": [personal]}).cross_site()
    assert (
        f"| ditto | site-1 | **{matrix['site-1']['site-1']:.3f}** | {matrix['site-1']['site-2']:.3f} | 1 |"
        in str(table)
    )


def without_test_list(make_site: SiteOf, monkeypatch: pytest.MonkeyPatch) -> Draw:
    """Ten patients at each of three sites; two of ten are 20 %, the share of a missing test list."""
    for name in ("A", "B", "X"):
        folder = make_site({"training": list("abcdefghij")}, "classification", name)
    task = small_task("classification", size=[8, 8])
    monkeypatch.setenv("MEDFLARE_DATA_ROOT", str(folder.parent))
    return Draw(Setting(task, ("A", "B", "X"), 1, cross_site=True), 3, ("X",))


def test_centralised_is_tested_on_the_test_images_of_fedavg(
    make_site: SiteOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = without_test_list(make_site, monkeypatch)
    fedavg = recorded_run("fedavg", draw, ["A", "B"], outside=["X"])
    one_model = centralised(draw, {})
    patients = {}
    for run in (fedavg, one_model):
        of_run = {name: of["deployed"]["patients"] for name, of in run["scores"].items()}
        patients[run["method"]] = {name: sorted(of_site) for name, of_site in of_run.items()}
    assert patients["centralised"] == patients["fedavg"]
    assert {name: len(of) for name, of in patients["fedavg"].items()} == {"A": 2, "B": 2, "X": 10}


def test_sites_alone_are_tested_on_test_images_of_other_sites(
    make_site: SiteOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(references, "metric_of", lambda model, site: len(site.data.test))
    matrix = single_site(without_test_list(make_site, monkeypatch), {})[CROSS_SITE]
    images = {"A": 2, "B": 2, "X": 10}
    assert matrix == {"A": images, "B": images}


def test_batch_statistics_drop_events_of_the_plain_model(monkeypatch: pytest.MonkeyPatch) -> None:
    task = small_task()

    def plain(*_: Any, **options: Any) -> dict[str, Any]:
        kinds = ("at_chance", "constant_output", "rejected")
        events = [{"kind": kind, "message": kind, "site": "A", "round": None} for kind in kinds]
        sites = {"A": SiteRecord("inside", metrics={"deployed": {"dice": 0.9}}, constant=0.5)}
        return build_results(RunRecord("fedavg", task, 0, 1, sites, events=events))

    monkeypatch.setattr(references, "recorded_run", plain)
    results = batch_statistics(Draw(Setting(task, ("A",), 1), 0), {})
    assert [event["kind"] for event in results["events"]] == ["rejected"]
    findings = {finding["kind"] for finding in results["findings"]}
    assert not findings & {"at_chance", "constant_output"}
