"""What can be refused before a run starts: settings that a method cannot have, and two algorithms whose messages do not fit."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from medflare.core.errors import ConfigError
from medflare.core.manifest import Phase
from medflare.core.message import Message
from medflare.federation.update_validation.messages import Incoming
from medflare.methods.base import Plan, ServerContext
from medflare.methods.method import Method
from medflare.tasks.config import TaskConfig

_SITES = ("one", "two")  # any names: what is exchanged does not depend on them


def check_run(
    method: Method, task: TaskConfig, hyper: Mapping[str, Any], *, rounds: int | None = None, outside: Sequence[str] = ()
) -> None:
    """Refuse before it starts a run that could not come to its end.

    Args:
        hyper: the method's hyper-parameters, see `core.hyper.halved`.
        rounds: of the run; None: any number.
        outside: sites that never train.

    Raises:
        ConfigError: a hyper-parameter is wrong; the method cannot learn the task, has nothing for outside sites, or has no such number of
            rounds; or one algorithm's messages are not the other algorithm's.
    """
    method.check(hyper, task)
    if outside and not method.outside:
        raise ConfigError(f"method {method.name!r} has no model for sites that never train; leave out outside: {', '.join(outside)}")
    if rounds is not None:
        _check_rounds(rounds, task, method)
    if method.origin is not None and (problem := _misfit(method, method.plan(task, _SITES, hyper), outside)):
        of_site, of_server = method.origin
        raise ConfigError(f"the site algorithm of {of_site!r} does not go with the server algorithm of {of_server!r}: {problem}")


def _check_rounds(rounds: int, task: TaskConfig, method: Method) -> None:
    """Without rounds every site tests the model that the run starts from; there must be one."""
    if not method.trains and rounds > 0:
        raise ConfigError(f"rounds is {rounds}, and method {method.name!r} trains nothing; give 0")
    if method.trains and rounds == 0 and "weights" not in task.network:
        raise ConfigError(
            f"rounds is 0, which trains nothing, and task {task.name} starts from random weights; give 1 or more, "
            "or a model to evaluate (network.weights, --model)"
        )


def _misfit(pair: Method, plan: Plan[Any, Any], outside: Sequence[str]) -> str | None:
    """What one half sends or asks for that the other does not know, in words, or None.

    A new server is asked for its schedule and for its first message; that message and an empty reply, with what the site declares, are
    compared with the declarations.
    """
    site = pair.site_class
    server = pair.make_server(ServerContext(plan, 0, 1, tuple(outside), phases=site.phases))
    steps = server.steps()
    phases = {phase.name: phase for phase in site.phases}
    if unknown := [step.phase for step in steps if step.phase not in phases]:
        return f"the site has no phase {unknown[0]!r}"
    first = steps[0]
    phase, gate = phases[first.phase], Incoming(plan)
    if problem := gate.refusal(phase, server.configure(first, _SITES[0])):
        return f"the server's message for {phase.name!r}: {problem}"
    try:
        server.aggregate(first, {name: _empty_reply(phase, plan) for name in _SITES})
    except KeyError as missing:
        name = missing.args[0] if missing.args else None
        if isinstance(name, str) and name not in (*phase.reply, *phase.reply_meta):
            return f"the server needs {name!r}, which the site's reply to {phase.name!r} does not hold"
    return None


def _empty_reply(phase: Phase, plan: Plan[Any, Any]) -> Message:
    """A reply as the phase declares it, of zeros."""
    states = {
        entry: {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in spec.tensors.items()}
        for entry, spec in phase.manifest(plan).items()
    }
    return Message(states, {"n_samples": 1, "loss": None, "validation": {}})
