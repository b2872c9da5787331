"""What may leave a hospital, enforced where it leaves: a filter that the site itself puts in front of every result.

The method declares the tensors of every reply (`SiteHalf.phases`); the site may allow less in its local/medflare.json:

    "outbound": {"entries": ["model"], "bytes": 50000000}

The guard protects against mistakes, in a method, a job or another filter. Code that a job brings along runs in the same process
and could go around it: sites that rely on the guard refuse such jobs (`byoc` in authorization.json).
"""

import json
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvflare.apis.filter import Filter
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import ReservedHeaderKey, Shareable

from medflare.core.errors import MedflareError, UpdateError
from medflare.data.sites.local import OUTBOUND, OutboundLimits, local_settings, read_local
from medflare.flare.exchange.participants import SITE_TASK, ParticipantSpec, SiteTask

if TYPE_CHECKING:
    from medflare.core.manifest import Manifest
    from medflare.core.message import Message
    from medflare.methods.base import Plan, SiteHalf

_COLUMNS = ("time", "phase", "round", "entry", "tensors", "bytes", "purpose", "sent")


class OutboundGuard(Filter):
    """Task-result filter: lets pass what the method's manifest and the site's own list allow, and reports it.

    Anything else becomes a failed task with one line that says what was wrong; not a byte of the result is sent.
    Put it last in `task_result_filters` of the site's privacy.json.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known: tuple[ParticipantSpec, type[SiteHalf[Any]], Plan[Any, Any]] | None = None

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """The result as it is, or a failed task with the reason in its place."""
        from medflare.flare.exchange.wire import UNABLE, error_reply, to_message

        if shareable.get_return_code() != ReturnCode.OK:
            return _without_data(shareable)
        site = fl_ctx.get_identity_name()
        task: SiteTask | None = fl_ctx.get_prop(SITE_TASK)
        if task is None:
            return error_reply(f"site {site} sends results of medflare's methods only; this task has declared none")
        try:
            _check_headers(shareable)
            message = to_message(shareable)
            manifest = self._manifest(task)
            refuse_undeclared(message, manifest, own_limits(Path(task.spec.local_file)))
        except MedflareError as error:
            reason = f"the outbound guard of site {site} kept back the answer to '{task.phase}': {error}"
            self.log_error(fl_ctx, f"{UNABLE}{reason}")
            _report(task, [{"entry": "everything", "purpose": str(error), "sent": "no"}])
            return error_reply(reason)
        _report(task, _rows(message, manifest))
        return shareable

    def _manifest(self, task: SiteTask) -> "Manifest":
        """What the method says that a reply to the task's phase holds.

        Raises:
            MedflareError: the job names no known method or task, or the site has not enrolled.
        """
        from medflare.federation.screening.rounding import WIRE, Rounding
        from medflare.federation.settings import PHASES_OF_ALL
        from medflare.flare.exchange.wire import to_message

        if task.phase in PHASES_OF_ALL:
            self._known = None  # whoever enrols anew may do so among other sites
            return {}
        if self._known is None or self._known[0] != task.spec:
            self._known = task.spec, *planned(task.spec)
        _, half, plan = self._known
        if WIRE in to_message(task.incoming).facts:
            return Rounding(plan).manifest(half.phase(task.phase))
        return half.manifest(task.phase, plan)


def planned(spec: ParticipantSpec) -> "tuple[type[SiteHalf[Any]], Plan[Any, Any]]":
    """The site's half and its plan, from the job's files and what the site remembers: with pretrained weights a large file.

    Args:
        spec: of the site in the job.

    Raises:
        MedflareError: the job names no known method or task, or the site has not enrolled.
    """
    from medflare.federation.memory import stored_members
    from medflare.methods.catalogue import get_method
    from medflare.tasks.config import load_task

    method = get_method(spec.method, server=spec.server_half or None)
    return method.site_class, method.plan(load_task(Path(spec.task_file)), stored_members(spec.state_folder), spec.hyper)


def own_limits(local_file: Path) -> OutboundLimits:
    """The "outbound" part of the site's local/medflare.json.

    Raises:
        ConfigError: it cannot be understood; a limit that is misspelt must not be taken for none.
    """
    return local_settings(read_local(local_file)).outbound


def refuse_undeclared(message: "Message", manifest: "Manifest", limits: OutboundLimits) -> None:
    """Nothing where the message holds exactly what is declared and no more than the site allows.

    Args:
        message: the site's reply.
        manifest: what the method declares of it.
        limits: what the site allows.

    Raises:
        UpdateError: what is wrong with it.
    """
    from medflare.core.manifest import violation
    from medflare.federation.screening.plain import not_plain

    if problem := violation(message, manifest):
        raise UpdateError(f"{problem}; the method declares {', '.join(sorted(manifest)) or 'no tensors'} and nothing else")
    for entry in sorted(message.states):
        if limits.entries is not None and entry not in limits.entries:
            allowed = ", ".join(limits.entries) or "none"
            raise UpdateError(f"{entry} is not among the entries that local/medflare.json lets leave: {allowed}")
    if limits.bytes is not None and message.nbytes > limits.bytes:
        raise UpdateError(f"{message.nbytes} bytes of tensors, local/medflare.json allows {limits.bytes}")
    if problem := not_plain(message.facts):
        raise UpdateError(problem)


def _check_headers(shareable: Shareable) -> None:
    """Tensors hidden in FLARE's headers would escape every filter that looks at the data."""
    for name, value in shareable.get(ReservedHeaderKey.HEADERS, {}).items():
        if not isinstance(value, (str, int, float, bool, type(None))) or len(str(value)) > 1000:
            raise UpdateError(f"header {name!r} holds a {type(value).__name__} of {len(str(value))} characters; headers carry no data")


def _without_data(shareable: Shareable) -> Shareable:
    """A failed task's answer: its return code and its one line, whatever else it holds."""
    from medflare.flare.exchange.wire import error_of, failed

    return failed(shareable.get_return_code(), (error_of(shareable) or "")[:1000])


def _rows(message: "Message", manifest: "Manifest") -> list[dict[str, Any]]:
    from medflare.core.states import state_bytes

    tensors = [
        {"entry": entry, "tensors": len(state), "bytes": state_bytes(state), "purpose": manifest[entry].purpose, "sent": "yes"}
        for entry, state in sorted(message.states.items())
    ]
    names = ", ".join(sorted(message.facts))
    return [*tensors, {"entry": "facts", "tensors": 0, "bytes": len(json.dumps(message.facts)), "purpose": names, "sent": "yes"}]


def _report(task: SiteTask, rows: list[dict[str, Any]]) -> None:
    """Append to the site's report; a spreadsheet opens it."""
    from medflare.core.store import csv_text, make_folder, own_opener

    path = Path(task.spec.folder) / OUTBOUND
    make_folder(path.parent)
    common = {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "phase": task.phase,
        "round": task.round,
    }
    fresh = not path.exists() or path.stat().st_size == 0  # empty: the first line of all did not fit on the disk
    text = csv_text([{**common, **row} for row in rows], _COLUMNS, header=fresh)
    with open(path, "a", encoding="utf-8", opener=own_opener) as file:
        file.write(text)
