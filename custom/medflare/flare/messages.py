"""Messages as FLARE sends them: a COLLECTION DXO with one WEIGHTS DXO per state and one METRICS DXO for the meta.

Everything that holds tensors lies in a DXO, so that a hospital's privacy filters reach it; headers carry no more than the
return code and, for a failed task, its one line of text. Tensors travel as numpy arrays, the form that FLARE's own filters
know, and nothing is pickled. A process that only passes messages on needs no torch: it is imported where a message is packed
or unpacked.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

import numpy as np
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import ReservedHeaderKey, Shareable, make_reply
from nvflare.fuel.utils import fobs

from medflare.core.errors import Aborted, DataError, MedflareError, StateError, UpdateError

if TYPE_CHECKING:
    from torch import Tensor

    from medflare.core.message import Message
    from medflare.federation.exchange import Reply
    from medflare.flare.tasks import A, Answer, Read
    from medflare.methods.base import Step

C = TypeVar("C")
UNABLE: Final = "medflare: unable: "  # in a site's log, before the line that says why it has no answer
FACTS = "meta"  # the collection's one METRICS entry; no state may take this name
ERRORS: Final = "errors.log"  # in the site's folder of a job: whole errors, which may name images and patients
_ERROR_HEADER = "medflare.error"
_BFLOAT16 = "bfloat16"  # in a state's DXO: names of the tensors whose bits travel as int16, because numpy has no such type


def to_shareable(message: "Message") -> Shareable:
    """The message as FLARE sends it.

    Raises:
        ValueError: a state is named like the meta, or holds something that is no tensor.
    """
    if FACTS in message.states:
        raise ValueError(f"a state must not be named {FACTS!r}")
    parts = {str(entry): _packed(entry, state) for entry, state in message.states.items()}
    parts[FACTS] = DXO(DataKind.METRICS, data={str(item): value for item, value in message.meta.items()})
    return DXO(DataKind.COLLECTION, data=parts).to_shareable()


def to_message(shareable: Shareable) -> "Message":
    """The message that `to_shareable` packed.

    Raises:
        UpdateError: it is something else.
    """
    from medflare.core.message import Message

    collection = _content(shareable)
    parts = collection.data
    if collection.data_kind != DataKind.COLLECTION or not isinstance(parts.get(FACTS), DXO):
        raise UpdateError(f"not a medflare message: a {collection.data_kind} without meta")
    states = {}
    for entry, part in parts.items():
        if entry == FACTS:
            continue
        if not isinstance(part, DXO) or part.data_kind != DataKind.WEIGHTS:
            raise UpdateError(f"entry {entry!r} is not a state")
        states[entry] = _unpacked(entry, part)
    return Message(states, dict(parts[FACTS].data))


def register_decomposers() -> None:
    """Make FLARE's serialisation know messages, in a process that FLARE itself has not made ready; again changes nothing."""
    from nvflare.apis.utils.decomposers import flare_decomposers
    from nvflare.app_common.decomposers import numpy_decomposers

    flare_decomposers.register()
    numpy_decomposers.register()


def register_tensors() -> None:
    """Let FLARE read torch tensors, which clients of another make may send; for a type that it cannot read it ends the whole job."""
    from nvflare.app_opt.pt.decomposers import TensorDecomposer

    fobs.register(TensorDecomposer)


def turn_into_arrays(value: Any) -> Any:
    """Torch's tensors anywhere in a result as numpy's arrays: the simulator's server process cannot read them.

    Code that a job or a filter brings may have left some; what lies in dictionaries, lists and DXOs is changed in place.
    """
    import torch

    if isinstance(value, torch.Tensor):
        ready = value.detach().to("cpu")
        return (ready.float() if ready.dtype == torch.bfloat16 else ready).numpy()
    if isinstance(value, DXO):
        turn_into_arrays(value.data)
    elif isinstance(value, dict):
        value.update({name: turn_into_arrays(inner) for name, inner in value.items()})
    elif isinstance(value, list):
        value[:] = map(turn_into_arrays, value)
    return value


def to_bytes(shareable: Shareable) -> bytes:
    """The data of a task or of its result, without FLARE's headers, as FLARE itself serialises them.

    Raises:
        UpdateError: it holds no data.
    """
    return fobs.dumps(_content(shareable).to_shareable())


def from_bytes(content: bytes) -> Shareable:
    """What `to_bytes` was given."""
    return fobs.loads(content)


def together_to_bytes(messages: Mapping[str, Shareable]) -> bytes:
    """All sites' messages, as `to_shareable` packed them; an array that several of them hold is there once.

    Args:
        messages: site -> message; left without its arrays.
    """
    places: dict[tuple[Any, ...], int] = {}
    arrays: list[np.ndarray] = []
    for message in messages.values():
        for state in _states(message):
            for name, array in state.items():
                same = array.__array_interface__["data"], array.shape, array.dtype.str
                if same not in places:
                    places[same] = len(arrays)
                    arrays.append(array)
                state[name] = places[same]
    return fobs.dumps({"arrays": arrays, "messages": dict(messages)})


def together_from_bytes(content: bytes) -> dict[str, Shareable]:
    """What `together_to_bytes` was given; arrays that messages share are one array."""
    found = fobs.loads(content)
    messages: dict[str, Shareable] = found["messages"]
    for message in messages.values():
        for state in _states(message):
            state.update({name: found["arrays"][place] for name, place in state.items()})
    return messages


def _states(message: Shareable) -> list[dict[str, Any]]:
    """The arrays of each state, by name, where the message has them."""
    return [part.data for part in from_shareable(message).data.values() if part.data_kind == DataKind.WEIGHTS]


def _content(shareable: Shareable) -> DXO:
    """UpdateError where there is none."""
    try:
        return from_shareable(shareable)
    except ValueError as error:
        raise UpdateError(f"not a medflare message: {error}") from error


def error_reply(text: str) -> Shareable:
    """What a site answers when its task failed: no data, one line that says why."""
    return failed(ReturnCode.EXECUTION_EXCEPTION, text)


def outward(error: Exception, phase: str, round: int) -> str:
    """What an error may tell outside the site: nothing that may name an image or a patient, and no folder.

    Examples:
        >>> outward(MedflareError("/srv/kit/local/medflare.json: not JSON"), "enrol", 0)
        'medflare.json: not JSON'
        >>> outward(DataError("Meier.png: file not found"), "enrol", 0)
        "DataError in 'enrol' of round 0; errors.log at the site says why"
    """
    known = isinstance(error, MedflareError) and not isinstance(error, DataError)
    return without_folders(str(error)) if known else f"{type(error).__name__} in '{phase}' of round {round}; {ERRORS} at the site says why"


def without_folders(text: str) -> str:
    """Text in which of a path only the file is named."""
    return re.sub(r"(?<![\w.:/)])/(?:[^\s'\":;,()/]+/)+", "", text)


def failed(code: str, text: str) -> Shareable:
    """As `error_reply`, with a return code of FLARE's."""
    return make_reply(code, headers={_ERROR_HEADER: " ".join(text.split())})


def error_of(shareable: Shareable) -> str | None:
    """Why a task failed, or None where it did not; FLARE's bare return code where the site could not say more."""
    code = shareable.get_return_code()
    if code == ReturnCode.OK:
        return None
    return reason_of(shareable) or f"the task ended with FLARE's return code {code}"


def reason_of(shareable: Shareable) -> str:
    """The line that a failed task gives; empty where it gives none."""
    headers = shareable.get(ReservedHeaderKey.HEADERS)
    text = headers.get(_ERROR_HEADER) if isinstance(headers, dict) else None
    return text if isinstance(text, str) else ""


def readable(answer: Shareable, read: Callable[[Shareable], C]) -> tuple[C | None, str, str]:
    """What `read` makes of a site's answer, "" and ""; or None, why nobody can read it, and the event that this is.

    Args:
        answer: of a site.
        read: raises UpdateError where the answer is no message.

    Raises:
        StateError, Aborted, MemoryError: as `read` does, where the server is at fault.
    """
    try:
        problem = error_of(answer)
        return (read(answer), "", "") if problem is None else (None, problem, "failed")
    except (StateError, Aborted, MemoryError):  # the server's own
        raise
    except UpdateError as error:
        return None, str(error), "rejected"
    except Exception as error:  # FLARE carries whatever a filter or a forger put into the answer, and it is this site's alone
        return None, f"its answer cannot be read ({type(error).__name__}: {error})", "rejected"


# -- what the schedule uses ---------------------------------------------------------------------------------------------------


class Tasks(Protocol):
    """What reaches the sites, see `TaskExchange`."""

    def present(self, outside: Iterable[str]) -> list[str]:
        """Names of the sites that can be asked."""

    def __call__(self, phase: str, round: int, outgoing: Mapping[str, Shareable], read: "Read[A]") -> "dict[str, Answer[A]]":
        """Ask every site that is sent something."""


class MessageExchange:
    """The exchange that the schedule uses under FLARE."""

    def __init__(self, tasks: Tasks, outside: Iterable[str]):
        self._tasks, self._outside = tasks, tuple(outside)

    def present(self, round: int) -> list[str]:
        """See `TaskExchange.present`."""
        return self._tasks.present(self._outside)

    def __call__(self, step: "Step", outgoing: "Mapping[str, Message]") -> "dict[str, Reply]":
        packed = {site: to_shareable(message) for site, message in outgoing.items()}
        answers = self._tasks(step.phase, step.round, packed, lambda site, answer: reply_of(answer))
        return {site: replied(answer) for site, answer in answers.items()}


def reply_of(answer: Shareable) -> "Reply":
    """A site's answer, laid aside, or why nobody can read it."""
    from medflare.federation.exchange import Reply, laid_aside

    return laid_aside(Reply(*readable(answer, to_message)))


def replied(answer: "Answer[Reply]") -> "Reply":
    """What the schedule hears of a site's task: an answer that came after the site was given up does not count."""
    from medflare.federation.exchange import Reply

    if answer.content is None or answer.problem:
        return Reply(problem=answer.problem, kind=answer.kind, seconds=answer.seconds)
    return replace(answer.content, seconds=answer.seconds)


# -- helpers -------------------------------------------------------------------------------------------------------------------


def _packed(entry: str, state: Mapping[str, Any]) -> DXO:
    """A state as contiguous arrays in the computer's main memory."""
    import torch

    arrays, odd = {}, []
    for name, tensor in state.items():
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{entry}/{name} is {type(tensor).__name__}, not a tensor; numbers belong to the meta")
        ready = tensor.detach().to("cpu").contiguous()
        if ready.dtype == torch.bfloat16:
            odd.append(name)
            ready = ready.view(torch.int16)
        arrays[name] = ready.numpy()
    return DXO(DataKind.WEIGHTS, data=arrays, meta={_BFLOAT16: odd} if odd else None)


def _unpacked(entry: str, part: DXO) -> dict[str, "Tensor"]:
    """The state that `_packed` packed; filters may have put numpy's scalars or torch's tensors in the place of arrays.

    Raises:
        UpdateError: something that is neither, or an array of numbers that torch does not know.
    """
    import torch

    odd = part.get_meta_prop(_BFLOAT16) or ()
    if not isinstance(odd, list | tuple):
        raise UpdateError(f"{entry}: {_BFLOAT16} must be a list of names, got {type(odd).__name__}")
    state = {}
    for name, value in part.data.items():
        try:
            tensor = value if isinstance(value, torch.Tensor) else torch.from_numpy(np.require(value, requirements=["C", "W"]))
        except (TypeError, ValueError) as error:
            raise UpdateError(f"{entry}/{name} is no tensor but {type(value).__name__}: {error}") from error
        if name in odd and tensor.dtype != torch.int16:
            raise UpdateError(f"{entry}/{name} is said to be bfloat16 but travels as {tensor.dtype}")
        state[name] = tensor.view(torch.bfloat16) if name in odd else tensor
    return state
