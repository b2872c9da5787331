"""FedDAG on small generated images: NDAG's two stages on a batch, distribution types, warm-up, selection."""

import io
import math
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn

from medflare.core.errors import ConfigError
from medflare.core.hyper import build_hyper
from medflare.core.message import Message
from medflare.core.states import StateDict, copy_state
from medflare.data.loading import Batch
from medflare.methods.base import Step
from medflare.methods.feddag import site as feddag_site
from medflare.methods.feddag.formulas import discrepancy
from medflare.methods.feddag.server import FedDAGServer
from medflare.methods.parts.normalisation import batch_statistics
from medflare.networks.features import pooled
from medflare.tasks.config import TaskConfig
from methods import squares


def weights(module: nn.Module) -> StateDict:
    return copy_state(module.state_dict())


class TestSite:
    @pytest.mark.parametrize(
        ("hyper", "expected"), [({}, math.exp(-1 / (0.2 * 6))), ({"ema": 0.5}, 0.5)]
    )
    def test_the_teachers_decay_follows_the_rounds_length(
        self, hyper: dict[str, Any], expected: float, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Twelve images in batches of six, three epochs: six batches a round."""
        algorithm = squares.algorithm(
            feddag_site.FedDAGSite, "A", squares.task(local_epochs=3), ndag=False, **hyper
        )
        decays = []
        monkeypatch.setattr(
            feddag_site, "ema_update", lambda teacher, student, decay: decays.append(decay)
        )
        algorithm.perform("train", 0, Message({"model": squares.start()}))
        assert decays == pytest.approx([expected] * 6)

    @pytest.mark.parametrize("distribution", ["type1", "type2", "type3"])
    def test_initial_student_and_teacher(self, distribution: str) -> None:
        algorithm = squares.algorithm(feddag_site.FedDAGSite, distribution=distribution)
        request = squares.server(FedDAGServer, distribution=distribution).configure(
            Step("train", 1), "A"
        )
        first = algorithm.perform("train", 0, request).states["model"]
        generation = algorithm._generation(request)
        shared = request.states["model"]
        student = request.states.get("student")
        assert (student is not None) is (distribution == "type2")
        assert squares.equal(weights(generation.student), student or shared)
        assert squares.equal(
            weights(generation.teacher), first if distribution == "type3" else shared
        )

    @pytest.mark.parametrize(
        ("minimum", "ema", "refused"),
        [(3, 0.01, True), (3, 0.9, False), (3, 0.0, False), (0, 0.01, False)],
    )
    def test_student_and_teacher_do_not_differ_by_the_steps_of_few_patients(
        self, minimum: int, ema: float, refused: bool
    ) -> None:
        """In batches of one image, the last patient's picture could be computed from both."""
        task = squares.task(batch_size=1)
        algorithm = squares.algorithm(
            feddag_site.FedDAGSite, "A", task, ndag=False, distribution="type2", ema=ema
        )
        algorithm.site.minimum_patients = minimum
        incoming = Message({"model": squares.start(task)})
        if refused:
            with pytest.raises(ConfigError, match="ema"):
                algorithm.perform("train", 0, incoming)
        else:
            algorithm.perform("train", 0, incoming)

    def test_pictures(self) -> None:
        algorithm = squares.algorithm(feddag_site.FedDAGSite)
        generator = feddag_site.initial_generator(
            algorithm.site.task, algorithm.site.seed, algorithm.hyper
        ).state_dict()
        content = algorithm.pictures(Message({"model": squares.start(), "generator": generator}))[
            "generated"
        ]
        # Four images; original, perturbation, sum.
        assert Image.open(io.BytesIO(content)).size == (4 * 96, 3 * 96)
        assert algorithm.pictures(Message({"model": squares.start()})) == {}
        server = squares.server(FedDAGServer)
        assert (
            "generator" in server.configure_final("A").states
            and "generator" not in server.configure_final("O").states
        )


class TestFederation:
    def test_warm_up_is_fedavg(self) -> None:
        server = squares.server(FedDAGServer, rounds=8, warmup=2)
        steps = server.steps()
        assert [(step.phase, step.round) for step in steps[:4]] == [
            ("warm_up", 0),
            ("warm_up", 1),
            ("train", 2),
            ("score", 2),
        ]
        server.steps = lambda: steps[:2]
        after = squares.play(server, squares.algorithms(feddag_site.FedDAGSite)).model
        assert squares.equal(after, squares.run("fedavg").model)
        assert not server.aggregation.history

    @pytest.mark.parametrize("sha", [True, False])
    def test_no_round_of_the_warm_up_is_selected(self, sha: bool) -> None:
        """Not even the best by validation, nor the last one, with which the first round of training begins."""
        server = squares.server(FedDAGServer, rounds=4, warmup=1, sha=sha, ndag=False)
        values = {1: 0.9, 2: 0.3, 3: 0.5, 4: 0.4}
        models = {}
        for shift, step in enumerate(server.steps(), start=1):
            models[step.round] = copy_state(server.model)
            meta = {"n_samples": 1, "loss": 0.0, "validation": {"global": values.get(step.round)}}
            moved = {
                name: tensor + shift if tensor.is_floating_point() else tensor
                for name, tensor in server.model.items()
            }
            states = {"warm_up": {"model": moved}, "train": {"model": moved}}.get(step.phase, {})
            reply = Message(states, {"scores": {}} if step.phase == "score" else meta)
            server.aggregate(step, dict.fromkeys("ABC", reply))
        assert server.best.round == 3 and squares.equal(server.selected[0], models[3])

    def test_warm_up_is_shorter_in_short_runs(self) -> None:
        server = squares.server(FedDAGServer, rounds=8)
        assert (
            server.warmup == 2
            and "2 instead of 5" in server.context.events.of("warning")[0]["message"]
        )
        assert not squares.server(FedDAGServer, rounds=20).context.events.of("warning")

    def test_generators_are_averaged_with_the_models_weights(self) -> None:
        log, server, _ = squares.federation(
            feddag_site.FedDAGSite, FedDAGServer, squares.CLASSIFICATION, rounds=1, beta=4.0
        )
        shares = server.aggregation.weights
        assert sum(shares.values()) == pytest.approx(1) and len(set(shares.values())) > 1
        for name, tensor in server.companions["generator"].items():
            expected = sum(
                shares[site] * reply.states["generator"][name]
                for site, reply in log[0].replies.items()
            )
            torch.testing.assert_close(tensor, expected)


def generation(
    task: TaskConfig = squares.SEGMENTATION, **hyper: Any
) -> feddag_site.AdversarialGeneration:
    """Student, teacher and generator of a fresh site with some settings."""
    site = squares.site(task=task)
    settings = build_hyper(feddag_site.FedDAGSiteHyper, hyper)
    networks = site.network(), site.network()
    return feddag_site.AdversarialGeneration(
        site, settings, *networks, feddag_site.initial_generator(site.task, site.seed, settings)
    )


def first_batch(generation: feddag_site.AdversarialGeneration) -> Batch:
    return next(generation.site.batches("train", 0, "model", 0))


class TestStages:
    def test_generator_moves_away_from_the_teacher_within_the_task(self) -> None:
        """Stage 1 lowers its objective and changes only the generator."""
        dag = generation(m=2.0)
        images, targets, _ = first_batch(dag)
        reference = dag.reference(images)

        def objective() -> float:
            with torch.no_grad(), batch_statistics(dag.student.eval()):
                features, logits = dag.student.features_and_output(
                    images + 0.3 * dag.generator(images)
                )
            return (
                dag.site.loss(logits, targets) - discrepancy(reference, pooled(features), 2.0)
            ).item()

        before = objective()
        frozen = (weights(dag.student), weights(dag.teacher))
        for _ in range(20):
            dag._generator_step(images, targets, reference)
        assert objective() < before
        assert squares.equal(weights(dag.student), frozen[0]) and squares.equal(
            weights(dag.teacher), frozen[1]
        )
        for network in (dag.student, dag.teacher):
            for parameter in network.parameters():
                assert parameter.grad is None

    def test_student_comes_closer_on_fixed_generated_images(self) -> None:
        """Stage 2 lowers L_S and changes only the student."""
        dag = generation(alpha=1.0)
        images, targets, _ = first_batch(dag)
        reference = dag.reference(images)
        frozen = (weights(dag.generator), weights(dag.teacher))
        losses = [
            dag._student_step(images, targets, reference)["student"].item() for _ in range(20)
        ]
        assert losses[-1] < losses[0]
        assert squares.equal(weights(dag.generator), frozen[0]) and squares.equal(
            weights(dag.teacher), frozen[1]
        )
        assert not squares.equal(weights(dag.student), weights(dag.teacher))

    @pytest.mark.parametrize("train_on", ["both", "perturbation"])
    @pytest.mark.parametrize("sam_rho", [0.0, 0.1])
    def test_running_statistics_are_the_originals(self, train_on: str, sam_rho: float) -> None:
        def statistics(network: nn.Module) -> StateDict:
            return {name: tensor for name, tensor in weights(network).items() if "running" in name}

        dag = generation(alpha=1.0, train_on=train_on, sam_rho=sam_rho)
        clean = dag.site.network().train()
        batch = first_batch(dag)
        clean(batch.images)
        dag._generator_step(batch.images, batch.targets, dag.reference(batch.images))
        dag._student_step(batch.images, batch.targets, dag.reference(batch.images))
        assert squares.equal(statistics(dag.student), statistics(clean))

    @pytest.mark.parametrize("task", [squares.SEGMENTATION, squares.CLASSIFICATION_WITH_BATCH_NORM])
    def test_the_attack_is_the_same_in_both_stages(self, task: TaskConfig) -> None:
        """1 - cos of a generated image is the same in the generator's and in the student's step."""
        dag = generation(task, alpha=1.0, m=2.0)
        for batch in dag.site.batches("train", 0, "model", 0):  # changes the student's statistics
            dag.step(batch, 0.5)
        dag.optimizers["generator"].param_groups[0]["lr"] = 0.0  # the generator does not change
        images, targets, _ = first_batch(dag)
        reference = dag.reference(images)
        attacked = dag._generator_step(images, targets, reference)["discrepancy"]
        assert (
            attacked - dag._student_step(images, targets, reference)["similarity"]
        ).item() == pytest.approx(0, abs=1e-6)

    def test_without_strength_images_and_generator_do_not_change(self) -> None:
        dag = generation(alpha=0.0)
        images = first_batch(dag).images
        assert torch.equal(dag.student_images(images), images)
        before = weights(dag.generator)
        assert "discrepancy" not in dag.step(first_batch(dag), 0.9)
        assert squares.equal(weights(dag.generator), before)


class TestStrength:
    def test_deviations_by_hand(self) -> None:
        """Over all pixels of all images; 0 for a constant channel."""
        images = (
            torch.randn(7, 2, 4, 4, generator=torch.Generator().manual_seed(0))
            * torch.tensor([3.0, 0.0]).view(2, 1, 1)
            + 5
        )
        actual = feddag_site.channel_deviations([images[:5], images[5:]])
        assert actual == pytest.approx(
            [images[:, 0].double().std(correction=0).item(), 0.0], abs=1e-6
        )
        assert feddag_site.channel_deviations([torch.ones(1, 1, 1, 1)]) == [0.0]

    @pytest.mark.parametrize("train_on", ["both", "perturbation"])
    def test_unit_scales_the_perturbation(self, train_on: str) -> None:
        algorithm = squares.algorithm(feddag_site.FedDAGSite, train_on=train_on, alpha=0.5)
        dag = algorithm._generation(Message({"model": squares.start()}))
        images = first_batch(dag).images
        expected = 0.5 * algorithm.unit * dag.generator(images).detach() + (
            images if train_on == "both" else 0
        )
        torch.testing.assert_close(dag.student_images(images), expected)


def test_the_gradient_of_a_sharpness_aware_step_is_taken_uphill() -> None:
    """L = w^2 / 2 at w = 1: ε = ρ, so the gradient is 1 + ρ and a step of 0.1 ends at 1 - 0.1 (1 + ρ)."""
    model = torch.nn.Linear(1, 1, bias=False)
    model.weight.data.fill_(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    feddag_site.sharpness_aware_step(model, optimizer, lambda: model.weight.square().sum() / 2, 0.5)
    assert model.weight.item() == pytest.approx(0.85)
