"""The kit for authors of methods names each slip."""

import re
from typing import Any

import numpy as np
import pytest
import torch

from medflare.cli import main
from medflare.core.hyper import param
from medflare.core.message import Message
from medflare.core.phases import asks, extends, handles, phase
from medflare.core.settings import strict_dataclass
from medflare.core.specs import MetaSpec, TensorSpec, listing, number
from medflare.methods import catalogue
from medflare.methods.base import PersistentState, Step
from medflare.methods.fedavg import FedAvgServer, FedAvgSite
from medflare.methods.fedavg.site import MODEL, FedAvgSiteHyper
from medflare.methods.method import Method
from medflare.methods.parts.measured import VALIDATION
from medflare.testing import check_method, final_models
from medflare.training.epochs import run_epochs, train_epochs

NORM = MetaSpec[float]("update_norm", "length of the update", number(0))


class Counting(FedAvgSite[Any]):
    """Keeps a number outside of its memory."""

    trained = 0

    def train(self, round: int, incoming: Message) -> Message:
        reply = super().train(round, incoming)
        self.trained += 1
        for tensor in reply[MODEL].values():
            if tensor.is_floating_point():
                tensor.mul_(0.9**self.trained)
        return reply


class Unkeyed(FedAvgSite[Any]):
    """Draws from torch's global generator."""

    def train(self, round: int, incoming: Message) -> Message:
        reply = super().train(round, incoming)
        for tensor in reply[MODEL].values():
            if tensor.is_floating_point():
                tensor.add_(0.01 * torch.randn(tensor.shape))
        return reply


class Seeding(FedAvgSite[Any]):
    """Seeds NumPy's global generator."""

    def fit(self, *arguments: Any) -> float | None:
        np.random.seed(self.site.seed)
        return super().fit(*arguments)


class Unvalidated(FedAvgSite[Any]):
    """Reports no metric of the global model."""

    def validation(self, *arguments: Any) -> float | None:
        return None


class Numbered(FedAvgSite[Any]):
    """Keeps a number where tensors belong."""

    count = PersistentState("count")

    def fit(self, *arguments: Any) -> float | None:
        self.count = 1.0  # type: ignore[assignment]
        return super().fit(*arguments)


class Listed(FedAvgSite[Any]):
    """Keeps a list of tensors where their names belong."""

    seen = PersistentState("seen")

    def fit(self, *arguments: Any) -> float | None:
        self.seen = {"w": [torch.zeros(1)]}  # type: ignore[dict-item]
        return super().fit(*arguments)


class Tensors(FedAvgSite[Any]):
    """Keeps a tensor where numbers belong."""

    def fit(self, *arguments: Any) -> float | None:
        self.memory.meta["mean"] = torch.zeros(1)
        return super().fit(*arguments)


class Counted(FedAvgServer[Any]):
    """The same at the server."""

    def aggregate_models(self, step: Any, replies: Any) -> None:
        super().aggregate_models(step, replies)
        self.memory.meta["mean"] = torch.zeros(1)


class Idle(FedAvgServer[Any]):
    """Uses no reply."""

    def aggregate_models(self, step: Any, replies: Any) -> None:
        self.select_model(step, replies)


class Losing(FedAvgServer[Any]):
    """Forgets a tensor of the mean."""

    def aggregate_models(self, step: Step, replies: Any) -> None:
        before = self.model["head.bias"]
        super().aggregate_models(step, replies)
        self.model = {**self.model, "head.bias": before}


class Renaming(FedAvgSite[Any]):
    """Once it has trained, it makes a model that the method does not declare."""

    trained = PersistentState("trained")

    def train(self, round: int, incoming: Message) -> Message:
        reply = super().train(round, incoming)
        self.trained = reply[MODEL]
        return reply

    def finalize(self, incoming: Message) -> Any:
        models = super().finalize(incoming)
        return {**models, "persnal": models["global"]} if self.trained else models


class Promising(FedAvgSite[Any]):
    """Declares what it never sends."""

    @extends(meta=(NORM,))
    def train(self, round: int, incoming: Message) -> Message:
        return super().train(round, incoming)


class Impatient(FedAvgServer[Any]):
    """Needs the site "a" in every round."""

    def aggregate_models(self, step: Any, replies: Any) -> None:
        if step.round > 0 and len(self.context.sites) == 3:
            replies["a"]
        super().aggregate_models(step, replies)


class Broken(FedAvgSite[Any]):
    def fit(self, *arguments: Any) -> float | None:
        return dict[str, float]()["weights"]


class Vectors(FedAvgSite[Any]):
    """Its loss is no scalar; the error is not in its own code."""

    def round_loss(self, *arguments: Any) -> Any:
        return lambda model, images, targets: model(images).sum(dim=1)


class Forgotten(FedAvgSite[Any]):
    def train(self, round: int, incoming: Message) -> Message:  # type: ignore[return]
        super().train(round, incoming)


class Undeclared(FedAvgSite[Any]):
    def train(self, round: int, incoming: Message) -> Message:
        reply = super().train(round, incoming)
        reply.meta["extra"] = 1.0
        return reply


pytestmark = pytest.mark.usefixtures("plain_reports")


@pytest.fixture(autouse=True)
def forgotten() -> Any:
    yield
    catalogue._OBJECTS.clear()


class Peeking(FedAvgSite[Any]):
    """Chooses its model by test images."""

    def fit(self, model: Any, *arguments: Any) -> float | None:
        self.site.score(self.site.predictor(model), "test")
        return super().fit(model, *arguments)


class Reading(FedAvgSite[Any]):
    """Trains by what test images tell, past the site's counts."""

    def fit(self, model: Any, *arguments: Any) -> float | None:
        loss = super().fit(model, *arguments)
        with torch.no_grad():
            model.head.bias += 0.01 * self.site.data.test.images.mean()
        return loss


VISITED: list[str] = []


class Visiting(FedAvgSite[Any]):
    """Keeps in its module which sites have trained, and sends other weights from the first."""

    def train(self, round: int, incoming: Message) -> Message:
        reply = super().train(round, incoming)
        if not VISITED:
            for tensor in reply[MODEL].values():
                tensor.mul_(0.5) if tensor.is_floating_point() else None
        if self.site.name not in VISITED:
            VISITED.append(self.site.name)
        return reply


class Impersonal(FedAvgSite[Any]):
    """Makes no personal model, which its method promises."""

    def finalize(self, incoming: Message) -> dict[str, Message]:
        models = super().finalize(incoming)
        del models["personal"]
        return models


class Unasked(FedAvgSite[Any]):
    """Has a phase that no step asks for."""

    @phase(request=(MODEL,))
    def fisher(self, round: int, incoming: Message) -> Message:
        return Message()


class Handling(FedAvgServer[Any]):
    """Has a request and a handler for this phase, and no step."""

    site_algorithm = Unasked

    @asks(Unasked.fisher)
    def request_fisher(self, step: Any, site: str) -> Message:
        return self.request_of_model(step, site)

    @handles(Unasked.fisher)
    def take_fisher(self, step: Any, replies: Any) -> None:
        self.memory.meta["replies"] = len(replies)


class Leftover(FedAvgSite[Any]):
    """Has a function under the name that `finalize` had."""

    def deliver(self, incoming: Message) -> dict[str, Message]:
        return {}


class Former(FedAvgSite[Any]):
    """Has an attribute under the name that `dp_unsupported_reason` had."""

    unprotected = "sends statistics"


class Misspelt(FedAvgSite[Any]):
    """Means `fit`."""

    def fitt(self, *arguments: Any) -> float | None:
        return None


class Anchored(FedAvgSite[Any]):
    """Keeps the model's own tensors as what it is to stay near."""

    def fit(self, model: Any, optimizer: Any, round: int) -> float | None:
        anchor = model.state_dict()

        def stay_near() -> None:
            for name, weight in model.named_parameters():
                weight.grad += weight.detach() - anchor[name]

        return train_epochs(model, optimizer, self.site, round, "model", gradient_hook=stay_near)


class Aliased(FedAvgSite[Any]):
    """Keeps the model's own tensors in its memory, which the next round's model overwrites."""

    last = PersistentState("last")

    def fit(self, model: Any, *arguments: Any) -> float | None:
        if self.last is not None:
            with torch.no_grad():
                model.head.bias += 0.1 * self.last["head.bias"]
        loss = super().fit(model, *arguments)
        self.last = model.state_dict()
        return loss


class Penalized(FedAvgSite[Any]):
    """The same in the loss, with the parameters."""

    def round_loss(self, model: Any, *arguments: Any) -> Any:
        anchor = [weight.detach() for weight in model.parameters()]

        def loss(model: Any, images: Any, targets: Any) -> Any:
            pairs = zip(model.parameters(), anchor, strict=True)
            distance = sum(torch.nn.functional.mse_loss(*pair) for pair in pairs)
            return self.site.loss(model(images), targets) + distance

        return loss


class Repeating(FedAvgSite[Any]):
    """Draws the same numbers at every site and in every round."""

    def fit(self, model: Any, *arguments: Any) -> float | None:
        generator = torch.Generator().manual_seed(self.site.seed)
        with torch.no_grad():
            model.head.bias += 0.01 * torch.randn(model.head.bias.shape, generator=generator)
        return super().fit(model, *arguments)


class RepeatingServer(FedAvgServer[Any]):
    """The same at the server, with NumPy."""

    def aggregate_models(self, step: Any, replies: Any) -> None:
        super().aggregate_models(step, replies)
        self.memory.meta["drawn"] = np.random.default_rng(0).random()


EXTRA = TensorSpec("extra", "for the tests", lambda plan: {"x": torch.empty(plan.task.outputs, 2)})
HEAD = MetaSpec[Any]("head", "the head", listing(listing(number()), 100))
BY_CLASS = MetaSpec[Any]("by_class", "images of each class", listing(number()))


class Sending(FedAvgSite[Any]):
    """Sends images by class as a tensor."""

    @extends(reply=(EXTRA,))
    def train(self, round: int, incoming: Message) -> Message:
        reply = super().train(round, incoming)
        reply[EXTRA] = {"x": self.site.class_counts().float()[:, None].repeat(1, 2)}
        return reply


class Ignored(FedAvgSite[Any]):
    """Sends what no server reads."""

    @extends(reply=(EXTRA,))
    def train(self, round: int, incoming: Message) -> Message:
        reply = super().train(round, incoming)
        reply[EXTRA] = {"x": torch.zeros(self.site.task.outputs, 2)}
        return reply


class Telling(FedAvgSite[Any]):
    """Sends its head as metadata."""

    @extends(meta=(HEAD,))
    def train(self, round: int, incoming: Message) -> Message:
        reply = super().train(round, incoming)
        reply[HEAD] = reply[MODEL]["head.weight"].tolist()
        return reply


class Shares(FedAvgSite[Any]):
    """Sends the shares of its classes as metadata."""

    @extends(meta=(BY_CLASS,))
    def train(self, round: int, incoming: Message) -> Message:
        reply = super().train(round, incoming)
        counts = self.site.class_counts()
        reply[BY_CLASS] = (counts / counts.sum()).tolist()
        return reply


class Asking(FedAvgServer[Any]):
    """Asks with what it keeps outside of its memory."""

    asked = 0

    def request_of_model(self, step: Any, site: str) -> Message:
        message = super().request_of_model(step, site)
        self.asked += 1
        bias = message[MODEL]["head.bias"] + 0.001 * self.asked
        message[MODEL] = {**message[MODEL], "head.bias": bias}
        return message


@strict_dataclass
class StrongHyper(FedAvgSiteHyper):
    strength: float = param(1.0, "never read")


class Strong(FedAvgSite[StrongHyper]):
    """Has a hyper-parameter that it does not read."""


class Stepless(FedAvgSite[Any]):
    """Takes gradients, and no steps; running statistics move."""

    def fit(self, model: Any, optimizer: Any, round: int) -> float | None:
        def step(batch: Any) -> Any:
            loss = self.site.loss(model(batch.images), batch.targets)
            loss.backward()
            return {"loss": loss.detach()}

        return run_epochs(self.site, round, "model", step)["loss"]


class Percent(FedAvgSite[Any]):
    """Its metric is in percent."""

    def train(self, round: int, incoming: Message) -> Message:
        reply = super().train(round, incoming)
        reply[VALIDATION] = {"global": 87.5}
        return reply


class Keys(FedAvgSite[Any]):
    """Its memory has numbers as keys."""

    def train(self, round: int, incoming: Message) -> Message:
        self.memory.meta["losses"] = [{round: 1}]
        return super().train(round, incoming)


class Deaf(FedAvgServer[Any]):
    """Handles a phase of another site algorithm."""

    @handles(Unasked.fisher)
    def take_fisher(self, step: Any, replies: Any) -> None:
        self.memory.meta["replies"] = len(replies)


class SeedingServer(FedAvgServer):
    """Seeds torch's global generator at the server."""

    @handles(FedAvgSite.train)
    def aggregate_models(self, step: Step, replies: Any) -> None:
        torch.manual_seed(1)
        super().aggregate_models(step, replies)


@pytest.mark.parametrize(
    ("site", "server", "failing", "named"),
    [
        (Counting, FedAvgServer, {"rebuilt before every step", "killed and resumed"}, "memory"),
        (
            Unkeyed,
            FedAvgServer,
            {"plain loop"},
            "site a in 'train' of round 1 draws from the global generator of torch",
        ),
        (Seeding, FedAvgServer, {"plain loop"}, "global generator of numpy"),
        (
            Unvalidated,
            FedAvgServer,
            {"plain loop"},
            r"model 'global', .* send validation={'global':",
        ),
        (FedAvgSite, Idle, {"plain loop"}, "same tensors in every round"),
        (
            FedAvgSite,
            Losing,
            {"plain loop"},
            r"the same 'head\.bias' of 'model', which sites train, in every round",
        ),
        (
            Renaming,
            FedAvgServer,
            {"plain loop"},
            r"site a: finalize makes a model 'persnal', its roles are global, personal, deployed",
        ),
        (FedAvgSite, SeedingServer, {"plain loop"}, r"the server after 'train' .* of torch, or"),
        (Peeking, FedAvgServer, {"plain loop"}, r"method slip reads test images in 'train'; take"),
        (Reading, FedAvgServer, {"other test images"}, "models/global depends on test images"),
        (Visiting, FedAvgServer, {"two workers"}, r"test_kit\.VISITED changes during a run"),
        (Impersonal, FedAvgServer, {"plain loop"}, "site a has no model 'personal', which"),
        (
            Anchored,
            FedAvgServer,
            {"plain loop"},
            r"weights of the model minus themselves .* copied_state\(model\) \(test_kit.py, line \d+, in stay_near",
        ),
        (Aliased, FedAvgServer, {"rebuilt before every step"}, r"as copied_state\(model\)"),
        (
            Penalized,
            FedAvgServer,
            {"plain loop"},
            r"themselves .* \(test_kit.py, line .* in <genexpr",
        ),
        (Repeating, FedAvgServer, {"plain loop"}, r"with seed 1 .* use torch_generator.* in fit\)"),
        (
            FedAvgSite,
            RepeatingServer,
            {"plain loop"},
            "with seed 0 has no keys.* in aggregate_models",
        ),
        (
            Sending,
            FedAvgServer,
            {"plain loop"},
            "'extra' of the reply to 'train' has numbers by cl",
        ),
        (
            Shares,
            FedAvgServer,
            {"plain loop"},
            "'by_class' .* numbers by class; declare .*per_class",
        ),
        (Telling, FedAvgServer, {"plain loop"}, "metadata 'head' .* holds weights .* TensorSpec"),
        (
            Ignored,
            FedAvgServer,
            {"declared messages"},
            "no code of the server reads 'extra' of the replies to 'train'",
        ),
        (
            FedAvgSite,
            Asking,
            {"killed and resumed"},
            "a request of Asking differs from the plain loop's: .* belongs into `memory`",
        ),
        (Unasked, FedAvgServer, {"unused code"}, r"no step asks for phase 'fisher': add Step\.of"),
        (Unasked, Handling, {"unused code"}, "no step asks for phase 'fisher'"),
        (Leftover, FedAvgServer, {"unused code"}, r"nothing uses Leftover\.deliver; leave it out"),
        (Former, FedAvgServer, {"unused code"}, r"nothing uses Former\.unprotected; leave it out"),
        (Misspelt, FedAvgServer, {"unused code"}, r"Misspelt\.fitt; is it to be 'fit'\?"),
        (Strong, FedAvgServer, {"unused code"}, "no code .* reads its hyper-parameter 'strength'"),
        (Numbered, FedAvgServer, {"plain loop"}, r"a, b: Numbered: state 'count' .* float; .*meta"),
        (
            Listed,
            FedAvgServer,
            {"plain loop"},
            "Listed: 'w' of state 'seen' .* a list; a Persistent",
        ),
        (Tensors, FedAvgServer, {"plain loop"}, "item 'mean': .*Tensor .* into a PersistentState"),
        (FedAvgSite, Counted, {"dry run"}, "Counted: memory.meta: item 'mean'"),
        (Promising, FedAvgServer, {"declared messages"}, "update_norm"),
        (FedAvgSite, Impatient, {"missing and late sites"}, "a"),
        (
            Broken,
            FedAvgServer,
            {"plain loop"},
            r"^method 'slip' fails at site a in 'train' of round 1: KeyError: 'weights' \(test_kit.py, line \d+, in fit",
        ),
        (Vectors, FedAvgServer, {"plain loop"}, r"a, b: the loss of a batch has shape \(\d+,\); "),
        (Stepless, FedAvgServer, {"plain loop"}, r"weights of 'model' .* optimizer\.step\(\)"),
        (Percent, FedAvgServer, {"plain loop"}, "site a: validation metric of the global model"),
        (Keys, FedAvgServer, {"plain loop"}, r"Keys: memory.meta: item 'losses': .* str\(key\)"),
        (FedAvgSite, Deaf, {"unused code"}, r"no phase 'fisher', which Deaf\.take_fisher"),
        (
            Forgotten,
            FedAvgServer,
            {"plain loop"},
            r"'train' of round 1 are usable \(a, b: Forgotten: train returns NoneType; return a M",
        ),
        (
            Undeclared,
            FedAvgServer,
            {"plain loop"},
            r"\(a, b: Undeclared: the reply to 'train' .*'extra'",
        ),
    ],
)
def test_a_slip_is_named(site: Any, server: Any, failing: set[str], named: str) -> None:
    method = Method("slip", "A method with a slip", "unpublished", site, server)
    problems = {check.name: check.problem for check in check_method(method) if check.problem}
    assert failing <= problems.keys()
    for name in failing:
        assert re.search(named, problems[name])


def test_final_models_of_two_methods_can_be_compared() -> None:
    fedavg = final_models("fedavg")
    assert {"models/global", "sites/a/personal"} <= fedavg.keys()
    assert final_models("fedprox", mu=0.0) == fedavg
    assert final_models("fedprox", mu=1.0)["models/global"] != fedavg["models/global"]


def test_the_command_prints_every_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods", "fedavg", "--check"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 9
    for line in lines:
        assert ": passed (" in line
    assert main(["methods", "--check"]) == 1
    assert "medflare methods METHOD --check" in capsys.readouterr().err
