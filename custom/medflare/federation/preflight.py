"""Checks before a run starts.

Settings that a method cannot have, and two algorithms whose messages do not match.
"""

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
from medflare.federation.protocol import request_problem
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
            problem = _dry_run(method, plan, rounds or 1, outside, settings.adapt)
        except MedflareError:
            raise
        except Exception as error:
            reason = described(error, method.site_class, method.server_class)
            text = f"{_names(method)} fails in the dry run with zeros: {reason}"
            raise ConfigError(text) from error
        if problem:
            raise ConfigError(f"{_names(method)}: {problem}")


def _names(method: Method) -> str:
    """The method, or the pair of algorithms, at the start of a sentence."""
    if method.origin is None:
        return f"method {method.name!r}"
    of_site, of_server = method.origin
    return f"the site algorithm of {of_site!r} does not match the server algorithm of {of_server!r}"


def _dry_run(
    method: Method, plan: Plan, rounds: int, outside: Sequence[str], adapt: str
) -> str | None:
    """What goes wrong in the first step of each phase if all replies are zeros, in words, or
    None.
    """
    phases = method.site_class.phases
    context = ServerContext(plan, 0, rounds, tuple(outside), phases=phases)
    server = method.make_server(context)
    counts = {"n": {"train": 1, "validation": 1, "test": 1}, "class_counts": []}
    context.site_counts |= dict.fromkeys(_SITES, counts)
    first_steps: dict[str, Step] = {}
    for step in server.steps():
        first_steps.setdefault(step.phase, step)
    for step in first_steps.values():
        if step.phase not in phases:
            return f"the site has no phase {step.phase!r}"
        problem = _step_problem(server, step, phases[step.phase], plan)
        if problem:
            return problem
    final = phases.get(FINALIZE, Phase(FINALIZE))
    for site in (*_SITES, *outside):
        problem = _request_problem(final, plan, server.configure_final(site))
        if problem:
            return f"the server's message with the final models: {problem}"
    last = [server.configure_final(site) for site in (_SITES[0], *outside[:1])]
    return _role_problem(method, plan, last, adapt)


def _request_problem(phase: Phase, plan: Plan, request: Any) -> str | None:
    """Why the server's message is not as its phase declares it, in words, or None."""
    if not isinstance(request, Message):
        return f"it is a {type(request).__name__}; return a Message"
    return request_problem(phase, plan, request)


def _step_problem(server: ServerAlgorithm, step: Step, phase: Phase, plan: Plan) -> str | None:
    """Why a step with replies of zeros is not possible, in words, or None."""
    try:
        for site in _SITES:
            problem = _request_problem(phase, plan, server.configure(step, site))
            if problem:
                return f"the server's message for {phase.name!r}: {problem}"
        return _aggregation_problem(server, step, phase, plan)
    except ConfigError as error:
        return str(error)


def _aggregation_problem(
    server: ServerAlgorithm, step: Step, phase: Phase, plan: Plan
) -> str | None:
    """Why the server cannot process replies of zeros, in words, or None."""
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
            return (
                f"the server needs {name!r}, which the site's reply to {phase.name!r} does not hold"
            )
    for entry, state in server.state().states.items():
        lost = before.get(entry, set()) - state.keys()
        if lost:
            return f"the server's work on {phase.name!r} loses {min(lost)!r} of its {entry!r}"
    return None


def _role_problem(method: Method, plan: Plan, last: Sequence[Message], adapt: str) -> str | None:
    """Why a site that never trained would have no model to deploy or to adapt, in words, or None.

    `last`: the messages with the final models of an inside and of an outside site, if there is one.
    """
    task = plan.task
    image = _image(task)
    site = Site(_SITES[0], task, SiteData(image, image, image))
    models: Any = method.make_site(site, plan).finalize(last[0])
    if not isinstance(models, dict):
        kind = type(models).__name__
        return f"its finalize returns a {kind}; return a dict of role to Message"
    if "deployed" in method.roles and "deployed" not in models:
        return f"its finalize makes no model 'deployed', it makes {', '.join(models) or 'none'}"
    problem = method.role_problem(models)
    if problem:
        return f"its {problem}"
    if adapt == ROUTING and any(map(holds_experts, last)):
        return None
    if adapt != NONE and "deployed" in models:
        build_deployed(task, with_adaptation(models["deployed"], adapt))
    return None


def _image(task: TaskConfig) -> Split:
    """A split of one image of zeros."""
    shape = () if task.kind == "classification" else tuple(task.size)
    target = torch.zeros(1, *shape, dtype=torch.long)
    if task.target == "multilabel":
        target = torch.zeros(1, task.outputs, *shape)
    return Split(torch.zeros(1, task.image_channels, *task.size), target, ("one",), ("one",))


def _zeros(phase: Phase, plan: Plan) -> Message:
    """A reply to a phase whose tensors are zeros."""
    reply = Message.of({N_SAMPLES: 1, LOSS: None, VALIDATION: {}})
    for entry, spec in phase.manifest(plan).items():
        reply.states[entry] = {
            name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in spec.tensors.items()
        }
    return reply
