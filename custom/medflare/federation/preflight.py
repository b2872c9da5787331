"""Checks before a run starts: settings that a method cannot have, and two algorithms whose messages
do not match.
"""

from collections import defaultdict
from collections.abc import Sequence
from traceback import walk_tb
from typing import Any

import torch

from medflare.adaptation.registry import NONE, ROUTING, holds_experts, parsed, with_adaptation
from medflare.core.errors import ConfigError, MedflareError
from medflare.core.message import Message
from medflare.core.phases import Phase
from medflare.core.text import Json
from medflare.data.loading import SiteData, Split
from medflare.federation.protocol import request_problem, state_problem
from medflare.federation.settings import FINALIZE, RunSettings
from medflare.federation.step_errors import described
from medflare.methods.base import Plan, ServerAlgorithm, ServerContext, Step
from medflare.methods.catalogue import build_deployed
from medflare.methods.method import Method
from medflare.methods.parts.measured import LOSS, N_SAMPLES, VALIDATION
from medflare.tasks.config import TaskConfig
from medflare.training.site import Site

_SITES = ("one", "two")  # the messages do not depend on the names


def check_run(method: Method, task: TaskConfig, hyper: Json, settings: RunSettings) -> None:
    """Check a run before it starts.

    Args:
        hyper: the method's hyper-parameters, see `core.hyper.split_hyper`.

    Raises:
        ConfigError: a hyper-parameter is wrong; the method cannot learn the task, has no model for
            outside sites, no personal models to test at other sites, or cannot have this number of
            rounds; the deployed model cannot be adapted so; or the messages of its two algorithms
            do not match.
    """
    method.check(hyper, task)
    rounds = settings.rounds
    outside = settings.outside
    if outside and not method.outside:
        raise ConfigError(
            f"method {method.name!r} has no model for sites that do not train; "
            f"remove outside: {', '.join(outside)}"
        )
    if settings.cross_site and "personal" not in method.roles:
        raise ConfigError(
            f"cross_site: method {method.name!r} has no personal models; "
            "every site tests its one model in any case"
        )
    if not method.trains and rounds:
        raise ConfigError(f"rounds is {rounds}, and method {method.name!r} trains nothing; give 0")
    if method.trains and rounds == 0 and "weights" not in task.network:
        # Every site would test random weights.
        raise ConfigError(
            f"rounds is 0, which trains nothing, and task {task.name} starts from random weights; "
            "give 1 or more, or a model to evaluate (network.weights, --model)"
        )
    parsed(settings.adapt)
    if method.trains:
        plan = method.plan(task, _SITES, hyper)
        try:
            _dry_run(method, plan, rounds or 1, outside, settings.adapt)
        except _Mismatch as problem:
            raise ConfigError(f"{_names(method)}: {problem}") from None
        except MedflareError:
            raise
        except (Exception, SystemExit) as error:
            reason = described(error, method.site_class, method.server_class)
            text = f"{_names(method)} fails in the dry run with zeros: {reason}"
            raise ConfigError(text) from error


class _Mismatch(Exception):
    """What goes wrong in a dry run, in words that follow the method's name."""


def _names(method: Method) -> str:
    """The method, or the pair of algorithms, at the start of a sentence."""
    if method.origin is None:
        return f"method {method.name!r}"
    of_site, of_server = method.origin
    return f"the site algorithm of {of_site!r} does not match the server algorithm of {of_server!r}"


def _dry_run(method: Method, plan: Plan, rounds: int, outside: Sequence[str], adapt: str) -> None:
    """Run the first step of each phase with replies of zeros; raise _Mismatch if one is not
    possible.
    """
    phases = method.site_class.phases
    context = ServerContext(plan, 0, rounds, tuple(outside), phases=phases)
    server = method.make_server(context)
    counts = {"n": {"train": 1, "validation": 1, "test": 1}, "class_counts": []}
    context.site_counts |= dict.fromkeys(_SITES, counts)
    first_steps: dict[str, Step] = {}
    steps = server.steps()
    if not steps:
        raise _Mismatch(f"its steps() returns {steps!r}; return a list with a Step")
    for step in steps:
        first_steps.setdefault(step.phase, step)
    for step in first_steps.values():
        if step.phase not in phases:
            raise _Mismatch(f"the site has no phase {step.phase!r}")
        try:
            for site in _SITES:
                request = server.configure(step, site)
                _check_request(phases[step.phase], plan, request, f"for {step.phase!r}")
            _check_aggregation(server, step, phases[step.phase], plan)
        except ConfigError as error:
            raise _Mismatch(str(error)) from error
    final = phases.get(FINALIZE, Phase(FINALIZE))
    for site in (*_SITES, *outside):
        _check_request(final, plan, server.configure_final(site), "with the final models")
    last = [server.configure_final(site) for site in (_SITES[0], *outside[:1])]
    _check_roles(method, plan, last, adapt)


def _check_request(phase: Phase, plan: Plan, request: Any, what: str) -> None:
    """Check that the server's message is as its phase declares it."""
    problem: str | None = f"it is a {type(request).__name__}; return a Message"
    if isinstance(request, Message):
        problem = state_problem(request.states) or request_problem(phase, plan, request)
    if problem:
        raise _Mismatch(f"the server's message {what}: {problem}")


def _check_aggregation(server: ServerAlgorithm, step: Step, phase: Phase, plan: Plan) -> None:
    """Check that the server can process replies of zeros."""
    before = {entry: set(state) for entry, state in server.state().states.items()}
    try:
        server.aggregate(step, {name: _zeros(phase, plan) for name in _SITES})
    except KeyError as missing:
        name = missing.args[0] if missing.args else None
        declared = [spec.name for spec in (*phase.reply, *phase.meta)]
        if name not in declared:  # zeros hold no metadata of the method's own
            frame, _ = list(walk_tb(missing.__traceback__))[-1]
            if frame.f_code is not Message.__getitem__.__code__:
                raise
            raise _Mismatch(
                f"the server needs {name!r}, which the site's reply to {phase.name!r} does not hold"
            ) from missing
    for entry, state in server.state().states.items():
        lost = before.get(entry, set()) - state.keys()
        if lost:
            raise _Mismatch(
                f"the server's work on {phase.name!r} loses {min(lost)!r} of its {entry!r}"
            )


def _check_roles(method: Method, plan: Plan, last: Sequence[Message], adapt: str) -> None:
    """Check that a site that never trained makes the final models, and that its deployed one can be
    adapted.

    `last`: the messages with the final models of an inside and of an outside site, if there is one.
    """
    task = plan.task
    image = _image(task)
    site = Site(_SITES[0], task, SiteData(image, image, image))
    models: Any = method.make_site(site, plan).finalize(last[0])
    if not isinstance(models, dict):
        kind = type(models).__name__
        raise _Mismatch(f"its finalize returns a {kind}; return a dict of role to Message")
    for role, model in models.items():
        if not isinstance(model, Message):
            kind = type(model).__name__
            raise _Mismatch(f"its finalize makes {role!r} a {kind}; make it by trained_model(...)")
    if "deployed" in method.roles and "deployed" not in models:
        made = ", ".join(models) or "none"
        raise _Mismatch(f"its finalize makes no model 'deployed', it makes {made}")
    problem = method.role_problem(models)
    if problem:
        raise _Mismatch(f"its {problem}")
    is_routed = adapt == ROUTING and any(map(holds_experts, last))
    if adapt != NONE and "deployed" in models and not is_routed:
        build_deployed(task, with_adaptation(models["deployed"], adapt))


def _image(task: TaskConfig) -> Split:
    """A split of one image of zeros."""
    shape = () if task.kind == "classification" else tuple(task.size)
    target = torch.zeros(1, *shape, dtype=torch.long)
    if task.target == "multilabel":
        target = torch.zeros(1, task.outputs, *shape)
    return Split(torch.zeros(1, task.image_channels, *task.size), target, ("one",), ("one",))


def _zeros(phase: Phase, plan: Plan) -> Message:
    """A reply to a phase whose tensors are zeros."""
    undefined = defaultdict[str, None](lambda: None)  # the metric of any model
    reply = Message.of({N_SAMPLES: 1, LOSS: None, VALIDATION: undefined})
    for entry, spec in phase.manifest(plan).items():
        reply.states[entry] = {
            name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in spec.tensors.items()
        }
    return reply
