"""The outbound guard: a filter of the site, in front of each result, that enforces what may leave.

A method declares the tensors and metadata of each reply (`SiteAlgorithm.phases`); a site may allow
less in its local/medflare.json:

    "outbound": {"entries": ["model"], "bytes": 50000000}

The guard protects against mistakes of a method, a job or another filter. Code that a job brings
runs in the same process and could avoid it: sites that rely on the guard refuse such jobs (`byoc`
in authorization.json).
"""

import json
import math
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from nvflare.apis.filter import Filter
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.fl_exception import UnsafeJobError
from nvflare.apis.shareable import ReservedHeaderKey, Shareable

from medflare.core.errors import ConfigError, MedflareError, UpdateError
from medflare.core.files import appending, csv_text
from medflare.core.text import Json, JsonDict, reason_line, shown
from medflare.data.local import OUTBOUND, OutboundLimits, local_settings, read_local
from medflare.flare.job_policy import refuse_result_filters
from medflare.flare.messages import (
    DISK_FULL,
    UNABLE,
    disk_is_full,
    error_reply,
    error_text,
    to_message,
    to_shareable,
    without_folders,
)
from medflare.flare.participants import RESULT_CONTEXT, ParticipantSpec, ResultContext

if TYPE_CHECKING:
    from medflare.core.message import Message
    from medflare.core.specs import Manifest, MetaSpec
    from medflare.methods.base import Plan, SiteAlgorithm

    _Planned = tuple[ParticipantSpec, type[SiteAlgorithm], Plan]

_COLUMNS = ("time", "phase", "round", "entry", "tensors", "bytes", "purpose", "sent")
_RETURN_CODES = [code for name, code in vars(ReturnCode).items() if not name.startswith("_")]
_LONGEST = 1000  # characters of a failed task's reason, and of a header


class OutboundGuard(Filter):
    """A task-result filter that sends what the method declares and the site allows, and records it
    in outbound.csv.

    What is sent is built anew from what was checked: tensors and metadata, or a failed task's
    return code and one line. No other key or header of the Shareable and no metadata of a DXO is
    sent. A result with anything undeclared becomes a failed task whose line says what was wrong.
    Put the guard last in `task_result_filters` of the site's privacy.json.
    """

    def __init__(self) -> None:
        super().__init__()
        self._planned: _Planned | None = None

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """What may leave of the result, or a failed task with the reason in its place.

        Raises:
            UnsafeJobError: the job has filters of its own, which FLARE would run after this one;
                FLARE sends nothing and ends the job.
        """
        site = fl_ctx.get_identity_name()
        try:
            refuse_result_filters(fl_ctx)
        except ConfigError as error:
            self.log_error(fl_ctx, f"{UNABLE}{error}")
            raise UnsafeJobError(str(error)) from error
        task = fl_ctx.get_prop(RESULT_CONTEXT)
        if task is None:
            return _undeclared(shareable, site)
        try:
            return self._checked(shareable, task, fl_ctx)
        except OSError as error:  # what outbound.csv cannot record does not leave
            if not disk_is_full(error):
                raise
            self.log_error(fl_ctx, f"{UNABLE}{DISK_FULL}")
            return error_reply(DISK_FULL)

    def _checked(self, shareable: Shareable, task: ResultContext, fl_ctx: FLContext) -> Shareable:
        """What may leave of a declared result, recorded; OSError if it cannot be recorded."""
        site = fl_ctx.get_identity_name()
        code = _return_code(shareable)
        if code != ReturnCode.OK:
            line = _one_line(error_text(shareable, code))
            _record(task, [_row("error", 0, len(line.encode()), line)])
            return error_reply(line, code)
        try:
            _check_headers(shareable)
            message = to_message(shareable)
            local = local_settings(read_local(task.spec.local_file))
            share_model = local.share_model and bool(message.states)
            manifest, declared = self._declared(task, share_model=share_model)
            validate_tensors(message, manifest, local.outbound)
            message.meta = plain_meta(message.meta, declared, site)
        except MedflareError as error:
            problem = str(error)
        except Exception as error:  # whatever a filter or an executor has put into the result
            problem = f"it cannot be read ({type(error).__name__})"
        else:
            _record(task, _rows(message, manifest, declared))
            return to_shareable(message)
        reason = _one_line(
            f"the outbound guard of site {site} kept back the reply to '{task.phase}': {problem}"
        )
        self.log_error(fl_ctx, f"{UNABLE}{reason}")
        _record(task, [{"entry": "everything", "purpose": reason, "sent": "no"}])
        return error_reply(reason)

    def _declared(
        self, task: ResultContext, *, share_model: bool
    ) -> "tuple[Manifest, tuple[MetaSpec, ...]]":
        """The tensors and metadata that the method declares for a reply.

        Args:
            share_model: whether the final reply may hold the personal model.
        """
        from medflare.federation.builtin_messages import BUILTIN_REPLY_META, PERSONAL_MODEL
        from medflare.federation.memory import stored_members
        from medflare.federation.settings import ENROL, FINALIZE
        from medflare.methods.catalogue import get_method
        from medflare.tasks.config import load_task

        spec = task.spec
        if task.phase == ENROL:
            self._planned = None  # a site that enrolls again may do so among other sites
        if task.phase in BUILTIN_REPLY_META and not (share_model and task.phase == FINALIZE):
            return {}, BUILTIN_REPLY_META[task.phase][0]
        if self._planned is None or self._planned[0] != spec:
            method = get_method(spec.method, server=spec.server_algorithm or None)
            sites = stored_members(spec.state_folder)
            plan = method.plan(load_task(spec.task_file), sites, spec.hyper)
            self._planned = spec, method.site_class, plan
        _, algorithm, plan = self._planned
        if task.phase == FINALIZE:
            return {PERSONAL_MODEL.name: PERSONAL_MODEL.spec(plan)}, BUILTIN_REPLY_META[FINALIZE][0]
        return algorithm.manifest(task.phase, plan), algorithm.phase(task.phase).meta


def validate_tensors(message: "Message", manifest: "Manifest", limits: OutboundLimits) -> None:
    """Raise if the message holds anything but what is declared, or more than the site allows.

    Raises:
        UpdateError: with what is wrong.
    """
    from medflare.federation.protocol import state_problem, violation

    problem = state_problem(message.states) or violation(message, manifest)
    if problem:
        names = ", ".join(sorted(manifest)) or "no tensors"
        raise UpdateError(f"{problem}; the method declares {names} and nothing else")
    for entry in sorted(message.states):
        if limits.entries is not None and entry not in limits.entries:
            allowed = ", ".join(limits.entries) or "none"
            raise UpdateError(
                f"{entry} is not among the entries that local/medflare.json lets leave: {allowed}"
            )
    if limits.bytes is not None and message.nbytes > limits.bytes:
        raise UpdateError(
            f"{message.nbytes} bytes of tensors, local/medflare.json allows {limits.bytes}"
        )


def plain_meta(meta: Json, declared: "tuple[MetaSpec, ...]", site: str) -> JsonDict:
    """The metadata of a reply as new plain JSON values, each declared and valid by its declaration.

    An error names the item and not its value, since the error leaves the site.

    Raises:
        UpdateError: an item is not declared, or is invalid.
    """
    from medflare.federation.builtin_messages import EVENTS
    from medflare.federation.protocol import event_problem, meta_problem

    problem = meta_problem(meta)
    if problem:
        raise UpdateError(problem)
    plain = json.loads(json.dumps(meta))
    by_name = {item.name: item for item in declared}
    extra = sorted(plain.keys() - by_name.keys() - {EVENTS.name})
    if extra:
        names = ", ".join(sorted(by_name)) or "no item"
        raise UpdateError(
            f"unexpected item {shown(extra[0])}; the method declares {names} and nothing else"
        )
    for name, item in by_name.items():
        value = plain.get(name)
        if isinstance(value, float) and not math.isfinite(value):
            raise UpdateError(
                f"item {name!r} is {value}; if training diverges, lower the learning rate"
            )
        if name in plain and item.problem(value):
            raise UpdateError(
                f"item {name!r} is not what the method declares it to be ({item.about})"
            )
    if event_problem(plain.get(EVENTS.name, []), site):
        raise UpdateError(f"item {EVENTS.name!r} is no list of a site's events")
    return plain


def _check_headers(shareable: Shareable) -> None:
    """Raise for large headers: headers are not sent, but large ones show that something tries to
    send data past the filters.
    """
    for name, value in shareable.get(ReservedHeaderKey.HEADERS, {}).items():
        length = len(str(value))
        if not isinstance(value, (str, int, float, bool, type(None))) or length > _LONGEST:
            raise UpdateError(
                f"header {name!r} holds a {type(value).__name__} of {length} characters; "
                "headers carry no data"
            )


def _return_code(shareable: Shareable) -> str:
    """The return code if it is one of FLARE's, else that of a failed task."""
    headers = shareable.get(ReservedHeaderKey.HEADERS)
    code = headers.get(ReservedHeaderKey.RC, ReturnCode.OK) if isinstance(headers, dict) else None
    if not isinstance(code, str):
        return ReturnCode.EXECUTION_EXCEPTION
    return code if code in _RETURN_CODES else ReturnCode.EXECUTION_EXCEPTION


def _undeclared(shareable: Shareable, site: str) -> Shareable:
    """The reply to a task that no method of medflare has declared: a failed task."""
    code = _return_code(shareable)
    if code != ReturnCode.OK:
        return error_reply(_one_line(error_text(shareable, code)), code)
    return error_reply(
        f"site {site} sends results of medflare's methods only; this task has declared none"
    )


def _one_line(text: str) -> str:
    """A reason as it may leave the site: one line of limited length, without the site's folders."""
    return reason_line(without_folders(text))[:_LONGEST]


def _rows(
    message: "Message", manifest: "Manifest", declared: "tuple[MetaSpec, ...]"
) -> list[JsonDict]:
    """The rows of outbound.csv for each entry and each item of the metadata."""
    from medflare.core.states import state_bytes
    from medflare.federation.builtin_messages import EVENTS

    purposes = {item.name: item.about for item in (EVENTS, *declared)}
    rows = []
    for entry, state in sorted(message.states.items()):
        rows.append(_row(entry, len(state), state_bytes(state), manifest[entry].purpose))
    for item, value in sorted(message.meta.items()):
        rows.append(_row(item, 0, len(json.dumps(value)), purposes[item]))
    return rows


def _row(entry: str, tensors: int, size: int, purpose: str) -> JsonDict:
    """A row of outbound.csv about something that leaves the site."""
    return {"entry": entry, "tensors": tensors, "bytes": size, "purpose": purpose, "sent": "yes"}


def _record(task: ResultContext, rows: list[JsonDict]) -> None:
    """Append rows to outbound.csv in the site's folder of the job."""
    common = {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "phase": task.phase,
        "round": task.round,
    }
    with appending(task.spec.folder / OUTBOUND) as file:
        is_new = file.tell() == 0  # or a full disk has left it empty
        text = csv_text([{**common, **row} for row in rows], _COLUMNS, header=is_new)
        file.write(text.encode())
