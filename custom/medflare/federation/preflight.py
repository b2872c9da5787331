"""Checks before a run starts.

Settings that a method cannot have, and two algorithms whose messages do not match.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from medflare.core.errors import ConfigError
from medflare.core.message import Message
from medflare.core.phases import Phase
from medflare.core.specs import Spec
from medflare.federation.protocol import request_problem
from medflare.methods.base import Plan, ServerContext
from medflare.methods.method import Method
from medflare.methods.parts.measured import LOSS, N_SAMPLES, VALIDATION
from medflare.tasks.config import TaskConfig

_SITES = ("one", "two")  # the messages do not depend on the names


def check_run(
    method: Method,
    task: TaskConfig,
    hyper: Mapping[str, Any],
    *,
    rounds: int | None = None,
    outside: Sequence[str] = (),
    cross_site: bool = False,
) -> None:
    """Check a run before it starts.

    Args:
        hyper: the method's hyper-parameters, see `core.hyper.split_hyper`.
        rounds: of the run; None: any number.
        outside: sites that do not train.
        cross_site: see `settings.Rules`.

    Raises:
        ConfigError: a hyper-parameter is wrong; the method cannot learn the task, has no model for
            outside sites, no personal models to test at other sites, or cannot have this number of
            rounds; or the messages of its two algorithms do not match.
    """
    method.check(hyper, task)
    if outside and not method.outside:
        raise ConfigError(
            f"method {method.name!r} has no model for sites that do not train; "
            f"remove outside: {', '.join(outside)}"
        )
    if cross_site and "personal" not in method.roles:
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
    if method.origin is not None:
        problem = _mismatch(method, method.plan(task, _SITES, hyper), outside)
        if problem:
            of_site, of_server = method.origin
            raise ConfigError(
                f"the site algorithm of {of_site!r} does not match the server algorithm of "
                f"{of_server!r}: {problem}"
            )


def _mismatch(pair: Method, plan: Plan[Any, Any], outside: Sequence[str]) -> str | None:
    """What one algorithm sends or needs that the other does not declare, in words, or None.

    The server gets replies of zeros.
    """
    phases = pair.site_class.phases
    server = pair.make_server(ServerContext(plan, 0, 1, tuple(outside), phases=phases))
    steps = server.steps()
    for step in steps:
        if step.phase not in phases:
            return f"the site has no phase {step.phase!r}"
    phase = phases[steps[0].phase]
    problem = request_problem(phase, plan, server.configure(steps[0], _SITES[0]))
    if problem:
        return f"the server's message for {phase.name!r}: {problem}"
    try:
        server.aggregate(steps[0], {name: _zeros(phase, plan) for name in _SITES})
    except KeyError as missing:
        name = missing.args[0] if missing.args else None
        specs: list[Spec] = [*phase.reply, *phase.meta]
        declared = [spec.name for spec in specs]
        if isinstance(name, str) and name not in declared:
            return (
                f"the server needs {name!r}, which the site's reply to {phase.name!r} does not hold"
            )
    return None


def _zeros(phase: Phase, plan: Plan[Any, Any]) -> Message:
    """A reply to a phase whose tensors are zeros."""
    reply = Message.of({N_SAMPLES: 1, LOSS: None, VALIDATION: {}})
    for entry, spec in phase.manifest(plan).items():
        reply.states[entry] = {
            name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in spec.tensors.items()
        }
    return reply
