"""Teachers: ConDist at sites that annotated some structures, a mean teacher at sites without labels."""

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

from helpers.fixture_types import Edit, SiteOf, TaskOf
from medflare.core.errors import ConfigError, DataError
from medflare.core.message import Message
from medflare.core.states import copy_state
from medflare.data.loading import uncounted
from medflare.federation.local.loop import run_local
from medflare.methods.aggregation import SiteModel
from medflare.methods.catalogue import get_method
from medflare.methods.families.teachers.condist import ConDistHyper, conditional_probabilities
from medflare.methods.families.teachers.mean_teacher import (
    LabelledMean,
    MeanTeacherServerHyper,
    ramp_up,
)
from medflare.training.opening import open_site
from medflare.training.site import Site
from methods import squares

PART = {"A": ("square",)}
NONE = {"C": ()}


def played(
    name: str,
    task: Any,
    annotated: Mapping[str, tuple[str, ...]] = {},
    sites: tuple[str, ...] = ("A", "B", "C"),
    store: Path | None = None,
    **hyper: Any,
) -> Any:
    """Two rounds of a method; the structures that sites annotated, by site, where it is not all."""
    method = get_method(name)
    site_class = method.site_class
    server_class = method.server_class
    counts = {site: (12, 0, 0) for site, names in annotated.items() if not names}
    members = squares.algorithms(
        site_class, task, sites, counts, server_class=server_class, **hyper
    )
    for site, names in annotated.items():
        data = members[site].site.data
        plan = members[site].plan
        train = data.train if names else uncounted(data.train, task)
        data = replace(data, annotated=names, train=train)
        members[site] = site_class(Site(site, task, data, squares.SEED), plan)
    server = squares.server(server_class, rounds=2, outside=(), algorithms=members)
    return squares.play(server, members, store=store)


def moved(run: Any, site: str) -> float:
    """The largest change of a site's model in round 0."""
    sent = run.log[0].outgoing[site].states["model"]
    trained = run.log[0].replies[site].states["model"]
    return max((trained[name] - sent[name]).abs().max().item() for name in sent)


class TestConDist:
    def test_formulas_by_hand(self) -> None:
        p = torch.tensor([[0.4, 0.3, 0.2, 0.1]], dtype=torch.float64)
        expected = torch.tensor([[0.4, 0.2, 0.1]], dtype=torch.float64) / 0.7
        torch.testing.assert_close(conditional_probabilities(p.log(), [1]), expected)
        hyper = ConDistHyper(lam=2.0, ramp_rounds=10)
        weights = list(map(hyper.weight, (0, 5, 10, 11)))
        assert weights == pytest.approx([0.02, 1.01, 2.0, 2.0])

    def test_the_loss_is_a_dice_loss_of_all_other_classes(self) -> None:
        run = played("condist", squares.MULTICLASS, PART, sites=("A", "B"))
        random = torch.Generator().manual_seed(0)
        student, teacher = torch.randn(2, 2, 3, 8, 8, generator=random)
        targets = torch.randint(0, 2, (2, 8, 8), generator=random)
        mask = ((targets != 1) & (teacher.argmax(dim=1) != 1)).float()
        terms = []
        for channel in (0, 2):
            p = (student / 2).softmax(dim=1)
            q = (teacher / 2).softmax(dim=1)
            p, q = (mask * x[:, channel] / (1 - x[:, 1]) for x in (p, q))
            terms.append(1 - 2 * (p * q).sum() / (p + q).sum())
        loss = run.algorithms["A"]._distil(student, teacher, targets)
        torch.testing.assert_close(loss, (terms[0] + terms[1]) / 2)

    @pytest.mark.parametrize("kind", ["MULTICLASS", "MULTILABEL"])
    def test_without_weight_or_missing_structures_it_is_fedavg(
        self, kind: str, tmp_path: Path
    ) -> None:
        # After round 0 the teacher finds more than squares.
        task = replace(getattr(squares, kind), local_epochs=4)
        fedavg = played("fedavg", task, PART).model
        assert squares.equal(played("condist", task, PART, lam=0.0).model, fedavg)
        condist = played("condist", task, PART, store=tmp_path)
        assert not squares.equal(condist.model, fedavg)
        assert not condist.server.context.events.to_list()
        complete = played("condist", task)
        assert squares.equal(complete.model, played("fedavg", task).model)
        (event,) = complete.server.context.events.to_list()
        assert "fedavg" in event["message"]

    def test_the_site_follows_the_global_model(self) -> None:
        task = replace(squares.MULTICLASS, local_epochs=12)
        sites = ("A", "B")
        start = played("fedavg", task, sites=sites).model
        apart = {}
        for lam in (0.0, 1.0):
            site = played("condist", task, PART, sites, lam=lam).algorithms["A"]
            trained = site.perform("train", 99, Message({"model": dict(start)})).states["model"]
            images, targets = next(site.site.ordered("train"))[:2]
            teacher = site.frozen(start)(images)
            student = site.frozen(trained, "student")(images)
            apart[lam] = site._distil(student, teacher, targets).item()
        assert apart[1.0] < 0.9 * apart[0.0]

    @pytest.mark.parametrize("kind", ["SEGMENTATION", "CLASSIFICATION"])
    def test_tasks_without_parts_are_refused(self, kind: str) -> None:
        with pytest.raises(ConfigError, match="run fedavg"):
            get_method("condist").check({}, getattr(squares, kind))


class TestMeanTeacher:
    def test_ramp_up_by_hand(self) -> None:
        values = [ramp_up(round, 4) for round in (0, 2, 4, 5)]
        assert values == pytest.approx([math.exp(-5), math.exp(-1.25), 1, 1])
        assert ramp_up(0, 0) == 1

    def test_the_weight_of_sites_without_labels(self) -> None:
        hyper = MeanTeacherServerHyper(unlabelled_weight=0.5, ramp_rounds=4)
        models = {
            "A": SiteModel({"w": torch.zeros(1)}, 10, {"annotated": 2}),
            "B": SiteModel({"w": torch.ones(1)}, 10, {"annotated": 0}),
        }
        factor = 0.5 * math.exp(-1.25)
        assert LabelledMean(hyper).shared(models, 2)["w"].item() == pytest.approx(
            factor / (1 + factor)
        )
        previous = {"w": torch.zeros(1)}
        rule = LabelledMean(MeanTeacherServerHyper(unlabelled_weight=0.0))
        assert rule.shared({"B": models["B"]}, 2, previous) is previous

    def test_a_site_with_labels_has_no_more_than_its_largest_weight(self) -> None:
        models = {
            "A": SiteModel({"w": torch.zeros(1)}, 10, {"annotated": 2}),
            "B": SiteModel({"w": torch.ones(1)}, 10, {"annotated": 0}),
        }
        rule = LabelledMean(MeanTeacherServerHyper(ramp_rounds=10))
        assert rule.shared(models, 0)["w"].item() == pytest.approx(0.0067, abs=1e-4)
        rule.max_client_weight = 0.6
        assert rule.shared(models, 0)["w"].item() == pytest.approx(0.4)

    def test_a_site_with_labels_may_be_alone_where_others_have_no_weight(self) -> None:
        """Then the next model is its own: it demands further inside sites of such a job."""
        run = played("mean_teacher", squares.SEGMENTATION, NONE, ("A", "C"), unlabelled_weight=0.0)
        (last,) = [
            entry for entry in run.log if (entry.step.phase, entry.step.round) == ("train", 1)
        ]
        assert squares.equal(run.model, last.replies["A"].states["model"])
        fewest = get_method("mean_teacher").server_class.fewest_combined
        assert fewest(MeanTeacherServerHyper(unlabelled_weight=0.0), 3) == 1
        assert fewest(MeanTeacherServerHyper(), 3) == 3

    @pytest.mark.parametrize("kind", ["SEGMENTATION", "MULTILABEL", "CLASSIFICATION"])
    def test_a_site_without_labels(self, kind: str, tmp_path: Path) -> None:
        task = getattr(squares, kind)
        run = played("mean_teacher", task, NONE)
        stored = played("mean_teacher", task, NONE, store=tmp_path)
        assert squares.equal(run.model, stored.model) and moved(run, "C") > 0
        assert run.log[-1].replies["C"].meta["validation"] == {"global": None}
        # Without strength its model stays; without weight, or with labels, the mean is FedAvg's.
        assert moved(played("mean_teacher", task, NONE, strength=0.0), "C") == 0
        alone = played("mean_teacher", task, NONE, unlabelled_weight=0.0).model
        assert squares.equal(alone, played("fedavg", task, sites=("A", "B")).model)
        labelled = played("mean_teacher", task).model
        assert squares.equal(labelled, played("fedavg", task).model)

    def test_the_teacher_follows_steps_not_batches(self, monkeypatch: pytest.MonkeyPatch) -> None:
        followed = []
        follow = AveragedModel.update_parameters

        def noted(teacher: AveragedModel, student: torch.nn.Module) -> None:
            followed.append(copy_state(student.state_dict()))
            follow(teacher, student)

        monkeypatch.setattr(AveragedModel, "update_parameters", noted)
        task = squares.task(batch_size=3, accumulate=2)
        played("mean_teacher", task, NONE)
        # A copy, then both steps of each of two rounds.
        assert len(followed) == 6
        assert not any(squares.equal(*pair) for pair in pairwise(followed[:3]))

    def test_noise_and_lag_teach(self) -> None:
        """Without noise the student equals its teacher, so no step has a gradient."""
        task = replace(squares.WITHOUT_BATCH_NORM, optimizer={"name": "sgd", "lr": 0.1})
        options: dict[str, Any] = {"ramp_rounds": 0, "strength": 100.0}
        assert moved(played("mean_teacher", task, NONE, **options, noise=0.0), "C") < 1e-6
        slow = played("mean_teacher", task, NONE, **options, decay=1.0)
        fast = played("mean_teacher", task, NONE, **options, decay=0.0)
        assert moved(slow, "C") > 1e-4 and not squares.equal(slow.model, fast.model)


@pytest.mark.parametrize("kind", ["segmentation", "classification"])
def test_labels_of_a_site_without_labels_have_no_influence(
    kind: str, make_site: SiteOf, make_task: TaskOf, edit: Edit
) -> None:
    task = make_task(kind)
    method = get_method("mean_teacher")
    plan = method.plan(task, ("A", "B", "C"), {})
    folders = {name: make_site(kind=kind, name=name) for name in plan.sites}
    models = []
    for label in ("no file", None):

        def relabel(content: dict[str, Any], label: str | None = label) -> None:
            content["annotated"] = []
            for item in content["training"]:
                item["label"] = label

        edit(folders["C"], relabel)
        members = {}
        for name, folder in folders.items():
            members[name] = method.site_class(open_site(name, task, data_root=folder), plan)
        server = squares.server(method.server_class, rounds=2, outside=(), algorithms=members)
        models.append(squares.play(server, members).model)
    assert squares.equal(*models)
    with pytest.raises(DataError, match="take it out"):
        open_site("C", task, data_root=folders["C"], role="outside")


def test_a_run_in_which_one_site_has_no_labels(
    make_site: SiteOf, make_task: TaskOf, edit: Edit
) -> None:
    """Other sites measure the global model; fedavg goes on without the site."""
    for site in ("A", "B", "C", "O"):
        root = make_site(name=site).parent
    edit(root / "C", lambda content: content.update(annotated=[]))
    for name in ("mean_teacher", "fedavg"):
        options: dict[str, Any] = {"outside": ["O"], "data_root": root}
        results = run_local(name, make_task(), ["A", "B", "C"], rounds=2, seed=0, **options)
        assert results["status"] == "COMPLETED", results["reason"]
        dice = {site: of["metrics"]["global"]["dice"] for site, of in results["sites"].items()}
        assert [site for site, value in dice.items() if value is None] == ["C"]
        failed = [event["site"] for event in results["events"] if event["kind"] == "failed"]
        assert set(failed) == ({"C"} if name == "fedavg" else set())
