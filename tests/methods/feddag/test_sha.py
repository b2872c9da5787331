"""SHA's two algorithms on small generated images: perturbation, scores, aggregation, pairs."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from medflare.core.hyper import build_hyper
from medflare.core.message import Message
from medflare.core.states import StateDict
from medflare.federation.request_order import schedule_of
from medflare.methods.aggregation import SiteModel
from medflare.methods.base import Step
from medflare.methods.catalogue import get_method
from medflare.methods.fedavg import FedAvgServer, FedAvgSite
from medflare.methods.feddag.formulas import soft_balancing_weights
from medflare.methods.feddag.server import FedDAGServer
from medflare.methods.feddag.sha import CANDIDATES, HierarchicalAggregation, SHAHyper, SHAServer
from methods import squares

SHASite = get_method("sha").site_class


def state(value: float) -> StateDict:
    return {"weight": torch.tensor([float(value)])}


def replies_to_train(values: Sequence[float], **entries: Any) -> dict[str, Message]:
    """Sites A, B, ... with models of one number, and further entries by name."""
    messages = {}
    for name, value in zip("ABC", values, strict=False):
        states = {
            "model": state(value),
            **{entry: state(numbers[name]) for entry, numbers in entries.items()},
        }
        messages[name] = Message(
            states, {"n_samples": 1, "loss": 0.0, "validation": {"global": 0.5}}
        )
    return messages


def scored(
    table: dict[str, dict[str, Any]], values: Sequence[float] = (1, 2, 3), **hyper: Any
) -> Any:
    """A server after a round of such models, with table[evaluator][model] -> score."""
    server = squares.server(SHAServer, kappa=0, **hyper)
    server.aggregate(Step("train", 0), replies_to_train(values))
    server.aggregate(
        Step("score", 0), {site: Message({}, {"scores": scores}) for site, scores in table.items()}
    )
    return server


def aggregation(**hyper: Any) -> HierarchicalAggregation:
    return HierarchicalAggregation(build_hyper(SHAHyper, hyper))


def averaged(average: Any, states: Any, scores: dict[str, float]) -> StateDict:
    """What the formula makes of models that come with scores."""
    return average.shared(
        {site: SiteModel(model, meta={"score": scores[site]}) for site, model in states.items()}, 0
    )


class TestPerturbation:
    def test_perturbed_model_has_distance_rho_and_a_higher_loss(self) -> None:
        algorithm = squares.algorithm(SHASite, rho=0.3)
        reply = algorithm.perform("train", 0, Message({"model": squares.start()}))
        model = reply.states["model"]
        moved = reply.states["perturbed"]
        names = [name for name, _ in squares.site().network().named_parameters()]
        assert math.sqrt(
            sum((moved[name] - model[name]).square().sum() for name in names)
        ) == pytest.approx(0.3, rel=1e-4)
        for name in model.keys() - set(names):
            assert torch.equal(moved[name], model[name])

        def loss(weights: Any) -> float:
            network = squares.site().network().eval()
            network.load_state_dict(weights)
            ((images, targets, _),) = algorithm.last_batches(0)
            return algorithm.site.loss(network(images), targets).item()

        assert loss(moved) > loss(model)

    @pytest.mark.parametrize("method", ["sha", "feddag"])
    @pytest.mark.parametrize(("minimum", "batches"), [(0, 1), (1, 1), (3, 3)])
    def test_its_direction_is_not_the_gradient_of_few_patients(
        self, method: str, minimum: int, batches: int
    ) -> None:
        """In batches of one image, the last patient's picture could be computed from it."""
        task = squares.task(batch_size=1, network={"name": "unet", "channels": [4, 8]})
        algorithm = squares.algorithm(get_method(method).site_class, task=task)
        algorithm.site.minimum_patients = minimum
        reply = algorithm.perform("train", 0, Message({"model": squares.start(task)}))
        last = list(algorithm.last_batches(0))
        patients = {algorithm.site.data.train.patients[int(batch.index)] for batch in last}
        assert len(last) == len(patients) == batches
        network = algorithm.network("again", reply.states["model"]).eval()
        loss = sum(algorithm.site.loss(network(batch.images), batch.targets) for batch in last)
        weights = dict(network.named_parameters())
        (name, *_) = weights
        (gradient,) = torch.autograd.grad(loss, [weights[name]])
        moved = reply.states["perturbed"][name] - reply.states["model"][name]
        assert torch.cosine_similarity(moved.flatten(), gradient.flatten(), dim=0) > 0.999

    def test_without_rho_nothing_more_is_sent(self) -> None:
        for hyper in ({"rho": 0.0}, {"sha": False}):
            assert squares.algorithm(SHASite, **hyper).perform(
                "train", 0, Message({"model": squares.start()})
            ).states.keys() == {"model"}


class TestScoring:
    def test_scores_are_the_validation_metric_of_each_model(self) -> None:
        algorithm = squares.algorithm(SHASite)
        trained, _ = squares.trained(FedAvgSite, rounds=1)
        scores = algorithm.perform(
            "score", 0, Message({"candidate/B": squares.start(), "candidate/C": trained})
        ).meta["scores"]
        networks = {"B": algorithm.site.network(), "C": algorithm.site.network()}
        networks["C"].load_state_dict(trained)
        assert scores == {name: algorithm.validation(network) for name, network in networks.items()}
        assert algorithm.perform("score", 0, Message()).meta["scores"] == {}

    def test_score_is_auc_if_the_task_has_it(self) -> None:
        task = squares.task("classification")
        algorithm = squares.algorithm(SHASite, task=task)
        start = squares.start(task)
        scores = algorithm.perform("score", 0, Message({"candidate/B": start})).meta["scores"]
        predictor = algorithm.site.predictor(algorithm.network("again", start).eval())
        assert (
            scores["B"]
            == algorithm.site.score(predictor, "validation", ["auc_macro"]).values["auc_macro"]
        )

    def test_site_without_validation_images_gives_no_score(self) -> None:
        algorithm = squares.algorithm(SHASite, counts=(12, 0, 1))
        assert algorithm.perform("score", 0, Message({"candidate/B": squares.start()})).meta[
            "scores"
        ] == {"B": None}


class TestAggregation:
    def test_higher_scores_have_larger_weights_and_earlier_models_join(self) -> None:
        average = aggregation(kappa=1)
        assert averaged(average, {"A": state(0), "B": state(1)}, {"A": 0.9, "B": 0.1})[
            "weight"
        ].item() == pytest.approx(0.1)
        assert averaged(average, {"A": state(8), "B": state(1)}, {"A": 0.3, "B": 0.2})[
            "weight"
        ].item() == pytest.approx(0.75 * 4 + 0.25)
        assert average.scores == pytest.approx(
            {"A": 0.6, "B": 0.2}
        ) and average.weights == pytest.approx({"A": 0.75, "B": 0.25})
        assert [score for _, score in average.history["A"]] == [0.3]  # the raw model

    def test_history_begins_once_there_are_kappa_earlier_models(self) -> None:
        """Scores fall, so all earlier models would join: 16 alone, 8 alone, then (16 + 8 + 4) / 3."""
        average = aggregation(kappa=2)
        means = [
            averaged(average, {"A": state(value)}, {"A": value / 16})["weight"].item()
            for value in (16, 8, 4)
        ]
        assert means == pytest.approx([16, 8, 28 / 3])

    def test_a_model_without_a_score_counts_as_an_average_one(self) -> None:
        unknown = aggregation()
        averaged(
            unknown,
            {"A": state(0), "B": state(1), "C": state(2)},
            {"A": 0.4, "B": math.nan, "C": 0.8},
        )
        assert unknown.weights == pytest.approx({"A": 0.4 / 1.8, "B": 0.6 / 1.8, "C": 0.8 / 1.8})


class TestServer:
    def test_every_site_gets_the_perturbed_models_of_the_others(self) -> None:
        server = squares.server(SHAServer)
        server.aggregate(
            Step("train", 0), replies_to_train((1, 2, 3), perturbed={"A": 10, "B": 20, "C": 30})
        )
        sent = server.configure(Step("score", 0), "B").states
        assert {name: tensors["weight"].item() for name, tensors in sent.items()} == {
            "candidate/A": 10,
            "candidate/C": 30,
        }

    def test_a_sampled_number_of_evaluators(self) -> None:
        server = squares.server(SHAServer, evaluators=1)
        sent_by_round = []
        for round in range(8):
            server.aggregate(Step("train", round), replies_to_train((1, 2, 3)))
            sent = {
                site: set(server.configure(Step("score", round), site).family(CANDIDATES))
                for site in "ABC"
            }
            # Each is scored once.
            assert sorted(model for models in sent.values() for model in models) == ["A", "B", "C"]
            for site, models in sent.items():
                assert site not in models
            sent_by_round.append(sent)
        assert any(sent != sent_by_round[0] for sent in sent_by_round)

    def test_scores_become_weights(self) -> None:
        server = scored(
            {"A": {"B": 0.2, "C": 0.4}, "B": {"A": 0.6, "C": 0.6}, "C": {"A": 0.8, "B": 0.4}},
            centred=False,
        )
        expected = soft_balancing_weights([0.7, 0.3, 0.5])
        assert server.model["weight"].item() == pytest.approx(
            float((expected * torch.tensor([1.0, 2.0, 3.0])).sum())
        )

    @pytest.mark.parametrize("bad", [1.5, -0.1, math.nan, "high", None])
    def test_invalid_scores_are_ignored_with_an_event(self, bad: Any) -> None:
        server = scored(
            {"A": {"B": 0.5, "C": 0.5}, "B": {"A": bad, "C": 0.5}, "C": {"A": 0.5, "B": 0.5}}
        )
        assert server.model["weight"].item() == pytest.approx(2)
        rejected = server.context.events.of("rejected")
        assert ([event["site"] for event in rejected] == ["B"]) == (bad is not None)

    def test_only_scores_of_sent_models_count(self) -> None:
        server = squares.server(SHAServer, evaluators=1)
        score = Step("score", 0)
        server.aggregate(Step("train", 0), replies_to_train((1, 2, 3)))
        sent = server.configure(score, "A").family(CANDIDATES)
        told: dict[str, Any] = {
            "A": dict.fromkeys(sent, 0.5),
            "B": {"B": 1.0},
            "C": {"absent": 1.0},
        }
        server.aggregate(
            score, {site: Message({}, {"scores": scores}) for site, scores in told.items()}
        )
        assert {
            site for site, value in server.aggregation.scores.items() if not math.isnan(value)
        } == set(sent)

    def test_sites_without_a_reply(self) -> None:
        server = scored({"A": {"B": 0.5, "C": 0.5}}, values=(1, 2, 6))
        # A's own model has no score and counts as an average one.
        assert server.model["weight"].item() == pytest.approx(3)
        assert [event["site"] for event in server.context.events.of("undefined")] == ["A"]


@pytest.mark.parametrize("sha", [True, False])
def test_phases_that_the_site_algorithm_adds_stay_in_the_schedule(sha: bool) -> None:
    method = get_method("finetune", server="sha")
    task = squares.task(network={"name": "small_cnn", "channels": [2], "batch_norm": True})
    plan = method.plan(task, ("A", "B"), {"site": {}, "server": {"sha": sha}})
    phases = [step.phase for step in schedule_of(method, plan, 0, 2)]
    scored = ["score"] if sha else []
    assert phases[-1] == "validate" or phases[-1] == "fine_tune"
    assert phases.count("train") == 2 and phases.count("score") == 2 * len(scored)
    assert "fine_tune" in phases
    for place, phase in enumerate(phases):
        if phase == "train":
            assert phases[place + 1 : place + 1 + len(scored)] == scored


@pytest.mark.parametrize(
    ("server_class", "phase", "settings"),
    [(SHAServer, "train", {"sha": False}), (FedDAGServer, "warm_up", {})],
)
def test_rounds_without_scores_are_fedavgs_also_by_a_robust_rule(
    server_class: Any, phase: str, settings: dict[str, Any]
) -> None:
    """Updates 1, 2 and 9 of the round's model, clipped to 2."""
    server = squares.server(server_class, rounds=4, rule="clipped", **settings)
    fedavg = squares.server(FedAvgServer, rule="clipped")
    before = {name: torch.zeros_like(tensor) for name, tensor in fedavg.model.items()}
    replies = {}
    for site, value in {"A": 1, "B": 2, "C": 9}.items():
        moved = {name: torch.full_like(tensor, value) for name, tensor in before.items()}
        replies[site] = Message({"model": moved}, {"n_samples": 4, "validation": {}})
    for each, name in ((server, phase), (fedavg, "train")):
        each.model = before
        each.aggregate(Step(name, 0), replies)
    assert squares.equal(server.model, fedavg.model)
    assert server.model["head.weight"].mean().item() == pytest.approx(5 / 3)
