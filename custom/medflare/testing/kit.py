"""The checks of a method: runs of a small federation that are compared."""

import random
import time
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from medflare.core.errors import MedflareError, StepFailed
from medflare.core.message import Message
from medflare.core.store import states_digest
from medflare.core.text import Json, JsonDict, Say
from medflare.evaluation.figures import Drawing
from medflare.evaluation.results import COMPLETED, find_results, load_results, validate_results
from medflare.federation.local.loop import resume_local, run_local
from medflare.federation.preflight import check_run
from medflare.federation.request_order import schedule_of
from medflare.federation.settings import RunSettings, step_name
from medflare.federation.step_errors import described
from medflare.inference.deployed import load_model
from medflare.methods.base import SiteAlgorithm, Step
from medflare.methods.catalogue import build_deployed, get_method
from medflare.methods.method import Method
from medflare.tasks.config import TaskConfig, load_task
from medflare.testing.leaks import leak
from medflare.testing.outside_memory import OutsideMemory
from medflare.testing.unused import unused
from medflare.testing.watched import WatchedTorch, keyed_generator
from medflare.training.opening import open_site
from medflare.training.site import Site

# Small images of the phantom with grades; its network has batch normalisation and features.
TASK = load_task(
    {
        **load_task("phantom_grades").to_dict(),
        "size": [16, 16],
        "network": {"name": "small_cnn", "channels": [4, 8], "batch_norm": True},
        "batch_size": 32,
    }
)
SITES = ("a", "b")
OUTSIDE = "z"
_LONG = 20  # rounds, in which every phase of a method has a turn
_RECORDED = "_recorded"  # the end of the name of a method that is recorded


@dataclass(frozen=True)
class Check:
    """One check; `problem` is "" if the method passed it."""

    name: str
    problem: str
    seconds: float


class Failed(Exception):
    """Why a method does not pass a check, one line."""


class Killed(BaseException):
    """Ends a run within a step; no handler of errors takes it for one of its own."""


def check_method(
    method: str | Method,
    task: TaskConfig = TASK,
    *,
    simulator: bool = False,
    say: Say = lambda line: None,
    **hyper: Any,
) -> list[Check]:
    """Checks a method on a small federation of two sites and one outside site, where it can.

    A dry run of its messages; a run in the plain loop; what it sends against what it declares;
    code that nothing uses; the same weights from two workers, from algorithms that are rebuilt
    before every step, from a run that is killed and resumed within every step, and with other test
    images; a missing and a late site.

    Args:
        method: name of the method, or a `Method`.
        task: of the checks, with embedded images.
        simulator: also the same weights from FLARE's simulator; a method by name only.
        say: called with the name of each check before it begins.
        hyper: hyper-parameters, as of `run_local`.

    Returns:
        The checks in their order; if the first run fails, no further ones.
    """
    chosen = get_method(method)
    checks = []
    with TemporaryDirectory() as folder:
        for name, check in _Kit(chosen, task, hyper, Path(folder)).checks(simulator):
            say(name)
            started = time.monotonic()
            with nullcontext() if name == "plain loop" else _without_figures():
                problem = _problem(check, chosen)
            checks.append(Check(name, problem, time.monotonic() - started))
            if problem and name in ("dry run", "plain loop"):
                break
    return checks


def final_models(method: str | Method, **hyper: Any) -> dict[str, str]:
    """Final model -> checksum of its tensors, of a run of two rounds of the kit's sites: for tests
    that compare a method with another one, or with other hyper-parameters.
    """
    with TemporaryDirectory() as folder, _without_figures():
        _Kit(get_method(method), TASK, hyper, Path(folder)).run("run")
        return _checksums(Path(folder, "run"))


def _without_figures() -> Any:
    """Within the context, reports have no figures, which take half of a run's time."""
    return patch.object(Drawing, "svg", return_value=None)


def _problem(check: Callable[[], None], method: Method) -> str:
    """Why a check fails, one line; "" if it does not."""
    try:
        check()
    except (Failed, MedflareError, StepFailed) as error:
        return str(error).replace(f"{method.name}{_RECORDED}", method.name)
    except (Exception, SystemExit) as error:  # whatever the method raises
        return described(error, method.site_class, method.server_class)
    return ""


@dataclass
class _Record:
    """What the sites did in a run.

    Attributes:
        sent: phase -> names of metadata and states in its replies.
        read: phase and name of the states that the server has read.
        received: site, phase, entry and name -> this tensor of the phase's requests, of those that
            are answered with tensors.
        returned: those that are weights, and come back.
        trained: those of which a site has sent another one.
        slip: the first step that changed a global random generator, or the first reply with a
            `leak`, in words.
    """

    sent: dict[str, set[str]] = field(default_factory=dict)
    received: dict[tuple[str, str, str, str], list[Tensor]] = field(default_factory=dict)
    returned: set[tuple[str, str, str, str]] = field(default_factory=set)
    trained: set[tuple[str, str, str, str]] = field(default_factory=set)
    slip: str = ""
    read: set[tuple[str, str]] = field(default_factory=set)

    @property
    def problem(self) -> str:
        """What is wrong with the messages of the run, in words; "" if nothing is."""
        if self.slip:
            return self.slip
        if self.untrained:
            return (
                f"all sites send back the weights of {self.untrained!r} as they came: call "
                "optimizer.step(), or do not send it"
            )
        if self.unchanged:
            return (
                f"the server sends {self.unchanged} in every round; "
                "use the replies in a method with @handles"
            )
        return ""

    @property
    def untrained(self) -> str:
        """An entry whose weights all sites send back as they came, or ""."""
        entries = {entry for _, _, entry, _ in self.returned}
        trained = {entry for _, _, entry, _ in self.returned & self.trained}
        return min(entries - trained, default="")

    @property
    def unchanged(self) -> str:
        """What the server sends in several rounds without a change although it should, in words;
        "" if there is nothing.
        """
        repeated = {key: tensors for key, tensors in self.received.items() if len(tensors) > 1}
        constant = []
        for key, tensors in repeated.items():
            if all(torch.equal(tensor, tensors[0]) for tensor in tensors):
                constant.append(key)
        if repeated and len(constant) == len(repeated):
            return "the same tensors"
        for key in constant:
            if key in self.trained:
                *_, entry, name = key
                return f"the same {name!r} of {entry!r}, which sites train,"
        return ""

    @contextmanager
    def watched(self, networks: dict[str, Any], party: str) -> Iterator[None]:
        """A step of a party's algorithm, which has these networks."""
        before = _drawn_generators()
        with patch.object(np.random, "default_rng", keyed_generator), WatchedTorch(networks):
            yield
        for library, state in _global_generators().items():
            if state != before[library]:
                self.slip = self.slip or (
                    f"{party} draws from the global generator of {library}, or seeds it; use those "
                    "of medflare.core.rng"
                )

    def note(self, algorithm: SiteAlgorithm, phase: str, incoming: Message, reply: Message) -> None:
        self.slip = self.slip or leak(algorithm, phase, reply)
        self.sent.setdefault(phase, set()).update(reply.meta, reply.states)
        if not reply.states:
            return
        weights = dict(algorithm.plan.network().named_parameters())
        for entry, state in incoming.states.items():
            sent = reply.states.get(entry, {})
            for name, tensor in state.items():
                key = (algorithm.site.name, phase, entry, name)
                self.received.setdefault(key, []).append(tensor.clone())
                if name in sent and name in weights:
                    self.returned.add(key)
                if name in sent and not torch.equal(sent[name], tensor):
                    self.trained.add(key)

    def noted(self, phase: str, reply: Message) -> Message:
        """A reply that notes which of its states are read."""
        read = self.read

        class States(UserDict[str, Any]):
            def __getitem__(self, entry: str) -> Any:
                read.add((phase, entry))
                return super().__getitem__(entry)

        return Message(States(reply.states), reply.meta)  # type: ignore[arg-type]


@dataclass
class _Kit:
    """The checks of one method.

    Attributes:
        folder: of the runs.
    """

    method: Method
    task: TaskConfig
    hyper: Json
    folder: Path
    _record: _Record = field(default_factory=_Record)

    def __post_init__(self) -> None:
        self._outside_memory = OutsideMemory(self.method)
        self._changed = ""  # one of these values, which the first run has changed

    def checks(self, simulator: bool) -> Iterator[tuple[str, Callable[[], None]]]:
        """Name and function of every check."""
        yield "dry run", self.dry_run
        yield "plain loop", self.plain_loop
        yield "declared messages", self.declared_messages
        yield "unused code", self.unused_code
        yield "two workers", partial(self.repeated, "workers", workers=2)
        yield "rebuilt before every step", partial(self.repeated, "forgetful", forgetful=True)
        yield "killed and resumed", self.resumed
        yield "other test images", self.other_test_images
        yield "missing and late sites", self.missing_sites
        if simulator:
            yield "FLARE's simulator", self.simulator

    @property
    def outside(self) -> list[str]:
        return [OUTSIDE] if self.method.outside else []

    def run(self, name: str, method: Method | None = None, **options: Any) -> JsonDict:
        """Results of a completed run of two rounds in the folder `name`."""
        settings: JsonDict = {
            "sites": SITES,
            "outside": self.outside,
            "rounds": 2,
            "seed": 1,
            "workers": 1,
            "out": self.folder / name,
            **self.hyper,
            **options,
        }
        self._outside_memory.restore()
        return _completed(run_local(method or self.method, self.task, **settings))

    def dry_run(self) -> None:
        settings = RunSettings(rounds=2, seed=1, outside=tuple(self.outside))
        check_run(self.method, self.task, self.hyper, settings)

    def plain_loop(self) -> None:
        results = self.run("loop", _recorded(self.method, self._record))
        self._changed = self._outside_memory.changed()
        validate_results(results)
        for event in results["events"]:
            if event["kind"] in ("failed", "rejected"):
                raise Failed(f"site {event['site']}: {event['message']}")
        for site, entry in results["sites"].items():
            for role in self.method.roles if entry["role"] == "inside" else ["deployed"]:
                if entry["metrics"][role][self.task.metric] is None:
                    raise Failed(
                        f"site {site} has no model {role!r}, which the method's roles have, or its "
                        f"{self.task.metric} is NaN"
                    )
            measured = [role for role, metrics in entry["metrics"].items() if any(metrics.values())]
            problem = self.method.role_problem(measured) if entry["role"] == "inside" else None
            if problem:
                raise Failed(f"site {site}: {problem}")
        for card in (self.folder / "loop").rglob("card.json"):
            load_model(card.parent).build(build_deployed)
        if self._record.problem:
            raise Failed(self._record.problem)
        for model, selection in results["model_selection"].items():
            votes = [candidate["votes"] for candidate in selection["candidates"]]
            if votes and not any(votes):
                raise Failed(
                    f"the server selects the round of its model {model!r}, and no reply has a "
                    f"metric of it; send validation={{{model!r}: self.validation(network)}}"
                )

    def declared_messages(self) -> None:
        """Metadata that no reply of the plain loop's run holds, and states that the server does not
        read; every reply is checked for its states.
        """
        for name, held in self._record.sent.items():
            declared = self.method.site_class.phases[name].meta
            never = {item.name for item in declared if not item.optional} - held
            if never:
                raise Failed(
                    f"the reply to {name!r} never holds {min(never)!r}: send it, or declare it "
                    "as_optional()"
                )
            for state in sorted(held - {item.name for item in declared}):
                if (name, state) not in self._record.read:
                    raise Failed(
                        f"no code of the server reads {state!r} of the replies to {name!r}: use it "
                        "in a method with @handles, or do not send it"
                    )

    def unused_code(self) -> None:
        plan = self.method.plan(self.task, SITES, self.hyper)
        asked = {step.phase for step in schedule_of(self.method, plan, 1, _LONG)}
        problem = unused(self.method, asked)
        if problem:
            raise Failed(problem)

    def other_test_images(self) -> None:
        """Check that the server's models do not depend on the test images; those that a site adapts
        to its images do.
        """
        self.run("tests", opener=partial(_with_other_tests, self.task))
        problem = "depends on test images; train and select without them"
        self._compare(self.folder / "tests", "models", problem)

    def repeated(self, name: str, **options: Any) -> None:
        self.run(name, **options)
        self._compare(self.folder / name)

    def resumed(self) -> None:
        resume = partial(resume_local, self.folder / "resumed", workers=1)
        results = in_pieces(partial(self.run, "resumed"), resume)
        if "the same step was asked before, with other" in str(results["reason"]):
            server = self.method.server_class.__name__
            raise Failed(f"after a restart a request of {server} {self._differs}")
        _completed(results)
        self._compare(self.folder / "resumed")

    def missing_sites(self) -> None:
        absent = {0: ["c"], 1: ["a"]}
        self.run("missing", sites=(*SITES, "c"), rounds=3, absent=absent, min_sites=1)

    def simulator(self) -> None:
        from medflare.flare.recipes import MedflareRecipe

        folder = self.folder / "simulator"
        settings: JsonDict = {"method": self.method.name, "outside": self.outside, **self.hyper}
        recipe = MedflareRecipe(task=self.task, rounds=2, seed=1, **settings)
        recipe.simulate([*SITES, *self.outside], folder)
        results_file = find_results(folder)
        _completed(load_results(results_file))
        self._compare(results_file.parent, "models")

    def _compare(self, folder: Path, part: str = "", problem: str = "") -> None:
        """Raises Failed if models below `part` of a run's folder differ from the plain loop's."""
        expected = _checksums(self.folder / "loop" / part)
        different = expected.items() ^ _checksums(folder / part).items()
        if different:
            path = Path(part, min(different)[0])
            raise Failed(f"{path} {problem or self._differs}")

    @property
    def _differs(self) -> str:
        changes = f"; {self._changed} changes during a run" if self._changed else ""
        return (
            "differs from the plain loop's: what lasts from step to step belongs into `memory`, a "
            f"model's state as copied_state(model), and random numbers need keys{changes}"
        )


def _checksums(folder: Path) -> dict[str, str]:
    """Model below a folder -> checksum of its tensors."""
    checksums = {}
    for file in folder.rglob("model.safetensors"):
        name = file.parent.relative_to(folder).as_posix()
        checksums[name] = states_digest({"": load_file(file)})
    return checksums


def _with_other_tests(task: TaskConfig, name: str, role: str) -> Site:
    """The site with the negatives of its test images, and their targets in another order."""
    site = open_site(name, task, seed=1, role=role)
    test = site.data.test
    other = replace(test, images=-test.images, targets=test.targets.flip(0))
    site.data = replace(site.data, test=other)
    return site


def _completed(results: JsonDict) -> JsonDict:
    if results["status"] != COMPLETED:
        raise Failed(f"the run ended {results['status']}: {results['reason']}")
    return results


def _global_generators() -> dict[str, Any]:
    """Library -> state of its global random generator."""
    return {
        "torch": torch.get_rng_state().tolist(),
        "numpy": repr(np.random.get_state()),
        "random": random.getstate(),
    }


def _drawn_generators() -> dict[str, Any]:
    """The states after a draw from each generator, which shows if one is seeded as before."""
    torch.rand(1)
    np.random.random()
    random.random()
    return _global_generators()


def _recorded(method: Method, record: _Record) -> Method:
    """The method under another name; `record` gets what its sites do."""

    class Recorded(method.site_class):  # type: ignore[name-defined]
        def perform(self, phase: str, round: int, incoming: Message) -> Message:
            party = f"site {self.site.name} in {step_name(phase, round)}"
            with record.watched(self._networks, party):
                reply = super().perform(phase, round, incoming)
            record.note(self, phase, incoming, reply)
            return reply

    class RecordedServer(method.server_class):  # type: ignore[name-defined]
        def aggregate(self, step: Step, replies: Mapping[str, Message]) -> None:
            noted = {site: record.noted(step.phase, reply) for site, reply in replies.items()}
            with record.watched({}, f"the server after {step.phase!r}"):
                super().aggregate(step, noted)

    Recorded.__name__ = method.site_class.__name__  # which messages name
    RecordedServer.__name__ = method.server_class.__name__
    name = f"{method.name}{_RECORDED}"
    return replace(method, name=name, site=Recorded, server=RecordedServer)


def in_pieces(begin: Callable[..., JsonDict], resume: Callable[..., JsonDict]) -> JsonDict:
    """Results of a run that is killed within every step but the first.

    Args:
        begin: reporter of progress `say` -> results of the run.
        resume: the same for the interrupted run, which repeats the lost step.
    """
    attempt = begin
    while True:
        try:
            return attempt(say=_dying())
        except Killed:
            attempt = resume


def _dying() -> Say:
    """A reporter of progress that ends the run within its second step: the sites have done it, the
    checkpoint does not hold it.
    """
    steps = count(1)

    def say(line: str) -> None:
        if next(steps) == 2:
            raise Killed

    return say
