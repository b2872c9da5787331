"""What may leave a hospital, enforced where it leaves: a filter that the site itself puts in front of every result.

The method declares the tensors and meta of every reply (`SiteAlgorithm.phases`); the site may allow less in its local/medflare.json:

    "outbound": {"entries": ["model"], "bytes": 50000000}

The guard protects against mistakes, in a method, a job or another filter. Code that a job brings along runs in the same process
and could go around it: sites that rely on the guard refuse such jobs (`byoc` in authorization.json).
"""

import json
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from nvflare.apis.filter import Filter
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.fl_exception import UnsafeJobError
from nvflare.apis.shareable import ReservedHeaderKey, Shareable

from medflare.core.errors import ConfigError, MedflareError, UpdateError
from medflare.data.local import OUTBOUND, OutboundLimits, local_settings, read_local
from medflare.flare.participants import SITE_TASK, ParticipantSpec, SiteTask, refuse_result_filters

if TYPE_CHECKING:
    from medflare.core.manifest import Manifest, MetaSpec
    from medflare.core.message import Message
    from medflare.methods.base import Plan, SiteAlgorithm

_COLUMNS = ("time", "phase", "round", "entry", "tensors", "bytes", "purpose", "sent")
_CODES: Final = {code: code for name, code in vars(ReturnCode).items() if not name.startswith("_")}
_EVENTS: Final = "events"
_LINE: Final = 1000  # characters that a failed task may say


class OutboundGuard(Filter):
    """Task-result filter: sends what the method's declaration and the site's own list allow, and reports it.

    What leaves is made anew from what was checked: tensors and meta, of a failed task its return code and one line. Nothing else of the
    result is sent, wherever it is in it: no further key or header of a Shareable, no meta of a DXO. A result with anything undeclared
    becomes a failed task with one line that says what was wrong. Put the guard last in `task_result_filters` of the site's privacy.json.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known: tuple[ParticipantSpec, type[SiteAlgorithm[Any]], Plan[Any, Any]] | None = None

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """What may leave of the result, or a failed task with the reason in its place.

        Raises:
            UnsafeJobError: the job names filters of its own, which FLARE would run after this one; FLARE sends nothing and ends the job.
        """
        from medflare.flare.messages import UNABLE, error_reply, to_message, to_shareable

        site = fl_ctx.get_identity_name()
        try:
            refuse_result_filters(fl_ctx)
        except ConfigError as error:
            self.log_error(fl_ctx, f"{UNABLE}{error}")
            raise UnsafeJobError(str(error)) from error
        task: SiteTask | None = fl_ctx.get_prop(SITE_TASK)
        if (code := _return_code(shareable)) != ReturnCode.OK:
            return _failed(shareable, code, task)
        if task is None:
            return error_reply(f"site {site} sends results of medflare's methods only; this task has declared none")
        try:
            _check_headers(shareable)
            message = to_message(shareable)
            manifest, declared = self._declared(task)
            refuse_undeclared(message, manifest, own_limits(Path(task.spec.local_file)))
            message.meta = plain_facts(message, declared, site)
        except MedflareError as error:
            problem = str(error)
        except Exception as error:  # whatever a filter or an executor has put into the result
            problem = f"it cannot be read ({type(error).__name__})"
        else:
            _report(task, _rows(message, manifest, declared))
            return to_shareable(message)
        reason = _line(f"the outbound guard of site {site} kept back the answer to '{task.phase}': {problem}")
        self.log_error(fl_ctx, f"{UNABLE}{reason}")
        _report(task, [{"entry": "everything", "purpose": reason, "sent": "no"}])
        return error_reply(reason)

    def _declared(self, task: SiteTask) -> "tuple[Manifest, tuple[MetaSpec, ...]]":
        """What the method says that a reply to the task's phase holds: entries and meta.

        Raises:
            MedflareError: the job names no known method or task, or the site has not enrolled.
        """
        from medflare.federation.exchange import REPORTS_OF_ALL
        from medflare.federation.update_validation.rounding import WIRE, Rounding
        from medflare.flare.messages import to_message

        if task.phase in REPORTS_OF_ALL:
            self._known = None  # whoever enrols anew may do so among other sites
            return {}, REPORTS_OF_ALL[task.phase][0]
        if self._known is None or self._known[0] != task.spec:
            self._known = task.spec, *planned(task.spec)
        _, algorithm, plan = self._known
        phase = algorithm.phase(task.phase)
        rounded = WIRE in to_message(task.incoming).meta
        return Rounding(plan).manifest(phase) if rounded else algorithm.manifest(task.phase, plan), phase.reply_meta


def planned(spec: ParticipantSpec) -> "tuple[type[SiteAlgorithm[Any]], Plan[Any, Any]]":
    """The site's algorithm and its plan, from the job's files and what the site remembers: with pretrained weights a large file.

    Raises:
        MedflareError: the job names no known method or task, or the site has not enrolled.
    """
    from medflare.federation.memory import stored_members
    from medflare.methods.catalogue import get_method
    from medflare.tasks.config import load_task

    method = get_method(spec.method, server=spec.server_algorithm or None)
    return method.site_class, method.plan(load_task(Path(spec.task_file)), stored_members(spec.state_folder), spec.hyper)


def own_limits(local_file: Path) -> OutboundLimits:
    """The "outbound" part of the site's local/medflare.json.

    Raises:
        ConfigError: it cannot be understood; a limit that is misspelt must not be taken for none.
    """
    return local_settings(read_local(local_file)).outbound


def refuse_undeclared(message: "Message", manifest: "Manifest", limits: OutboundLimits) -> None:
    """Nothing where the message holds exactly what is declared and no more than the site allows.

    Raises:
        UpdateError: what is wrong with it.
    """
    from medflare.core.manifest import violation
    from medflare.federation.update_validation.messages import not_states

    if problem := not_states(message.states) or violation(message, manifest):
        raise UpdateError(f"{problem}; the method declares {', '.join(sorted(manifest)) or 'no tensors'} and nothing else")
    for entry in sorted(message.states):
        if limits.entries is not None and entry not in limits.entries:
            allowed = ", ".join(limits.entries) or "none"
            raise UpdateError(f"{entry} is not among the entries that local/medflare.json lets leave: {allowed}")
    if limits.bytes is not None and message.nbytes > limits.bytes:
        raise UpdateError(f"{message.nbytes} bytes of tensors, local/medflare.json allows {limits.bytes}")


def plain_facts(message: "Message", declared: "tuple[MetaSpec, ...]", site: str) -> dict[str, Any]:
    """The meta of a reply as new plain JSON values, where each is declared and what its declaration takes; see `messages.unfit`.

    An error names the item and never its value: the error leaves the site.

    Raises:
        UpdateError: a metadata item that is not declared, or that its declaration does not take.
    """
    from medflare.federation.update_validation.messages import not_events, not_plain, shown

    if problem := not_plain(message.meta):
        raise UpdateError(problem)
    meta: dict[str, Any] = json.loads(json.dumps(message.meta))
    if extra := sorted(meta.keys() - {*declared, _EVENTS}):
        names = ", ".join(sorted(declared)) or "no item"
        raise UpdateError(f"unexpected item {shown(extra[0])}; the method declares {names} and nothing else")
    for item in declared:
        if item in meta and item.validator(meta[item]):
            raise UpdateError(f"item {str(item)!r} is not what the method declares it to be ({item.about})")
    if not_events(meta.get(_EVENTS, []), site):
        raise UpdateError(f"item {_EVENTS!r} is no list of a site's events")
    return meta


def _check_headers(shareable: Shareable) -> None:
    """Headers are not sent; tensors in them show that something tries to send data past the filters."""
    for name, value in shareable.get(ReservedHeaderKey.HEADERS, {}).items():
        if not isinstance(value, (str, int, float, bool, type(None))) or len(str(value)) > _LINE:
            raise UpdateError(f"header {name!r} holds a {type(value).__name__} of {len(str(value))} characters; headers carry no data")


def _return_code(shareable: Shareable) -> str:
    """FLARE's own return code; of a result with none of FLARE's that of a failed task."""
    headers = shareable.get(ReservedHeaderKey.HEADERS)
    code = headers.get(ReservedHeaderKey.RC, ReturnCode.OK) if isinstance(headers, dict) else None
    return _CODES.get(code, ReturnCode.EXECUTION_EXCEPTION) if isinstance(code, str) else ReturnCode.EXECUTION_EXCEPTION


def _failed(shareable: Shareable, code: str, task: SiteTask | None) -> Shareable:
    """A failed task's answer: its return code and its one line, whatever else the result holds."""
    from medflare.flare.messages import failed, reason_of

    line = _line(reason_of(shareable) or f"the task ended with FLARE's return code {code}")
    if task is not None:
        _report(task, [{"entry": "error", "tensors": 0, "bytes": len(line.encode()), "purpose": line, "sent": "yes"}])
    return failed(code, line)


def _line(text: str) -> str:
    """A reason as it may leave the site: one line, not too long, without the site's folders."""
    from medflare.federation.update_validation.messages import one_line
    from medflare.flare.messages import without_folders

    return one_line(without_folders(text))[:_LINE]


def _rows(message: "Message", manifest: "Manifest", declared: "tuple[MetaSpec, ...]") -> list[dict[str, Any]]:
    """A row for each entry and for each item."""
    from medflare.core.states import state_bytes

    about = {_EVENTS: "what the site noticed", **{str(item): item.about for item in declared}}
    tensors = [
        {"entry": entry, "tensors": len(state), "bytes": state_bytes(state), "purpose": manifest[entry].purpose, "sent": "yes"}
        for entry, state in sorted(message.states.items())
    ]
    meta = [
        {"entry": item, "tensors": 0, "bytes": len(json.dumps(value)), "purpose": about[item], "sent": "yes"}
        for item, value in sorted(message.meta.items())
    ]
    return [*tensors, *meta]


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
