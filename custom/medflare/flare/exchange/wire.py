"""Messages on FLARE's wire: a COLLECTION DXO with one WEIGHTS DXO per state and one METRICS DXO for the facts.

Everything that holds tensors lies in a DXO, so that a hospital's privacy filters reach it; headers carry no more than the
return code and, for a failed task, its one line of text. Tensors stay torch tensors all the way: `TensorDecomposer` writes
them as safetensors, nothing is pickled or turned into numpy arrays.
"""

from collections.abc import Mapping
from typing import Any

from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.app_opt.pt.decomposers import TensorDecomposer
from nvflare.fuel.utils import fobs
from torch import Tensor

from medflare.core.errors import UpdateError
from medflare.core.message import Message

FACTS = "facts"  # the collection's one METRICS entry; no state may take this name
_ERROR_HEADER = "medflare.error"


def register_tensors() -> None:
    """Make FLARE able to carry torch tensors in this process; called by every component that sends or receives."""
    fobs.register(TensorDecomposer)


def to_shareable(message: Message) -> Shareable:
    """The message as FLARE sends it.

    Raises:
        ValueError: a state is named like the facts, or holds something that is no tensor.
    """
    if FACTS in message.states:
        raise ValueError(f"a state must not be named {FACTS!r}")
    parts = {str(entry): DXO(DataKind.WEIGHTS, data=_sendable(entry, state)) for entry, state in message.states.items()}
    parts[FACTS] = DXO(DataKind.METRICS, data={str(fact): value for fact, value in message.facts.items()})
    return DXO(DataKind.COLLECTION, data=parts).to_shareable()


def to_message(shareable: Shareable) -> Message:
    """The message that `to_shareable` packed.

    Raises:
        UpdateError: it is something else.
    """
    try:
        collection = from_shareable(shareable)
    except ValueError as error:
        raise UpdateError(f"not a medflare message: {error}") from error
    parts = collection.data
    if collection.data_kind != DataKind.COLLECTION or not isinstance(parts.get(FACTS), DXO):
        raise UpdateError(f"not a medflare message: a {collection.data_kind} without facts")
    states = {}
    for entry, part in parts.items():
        if entry == FACTS:
            continue
        if not isinstance(part, DXO) or part.data_kind != DataKind.WEIGHTS:
            raise UpdateError(f"entry {entry!r} is not a state")
        states[entry] = dict(part.data)
    return Message(states, dict(parts[FACTS].data))


def error_reply(text: str) -> Shareable:
    """What a site answers when its task failed: no data, one line that says why."""
    return failed(ReturnCode.EXECUTION_EXCEPTION, text)


def failed(code: str, text: str) -> Shareable:
    """As `error_reply`, with a return code of FLARE's."""
    return make_reply(code, headers={_ERROR_HEADER: " ".join(text.split())})


def error_of(shareable: Shareable) -> str | None:
    """Why a task failed, or None where it did not; FLARE's bare return code where the site could not say more."""
    code = shareable.get_return_code()
    if code == ReturnCode.OK:
        return None
    return shareable.get_header(_ERROR_HEADER) or f"the task ended with FLARE's return code {code}"


def _sendable(entry: str, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Contiguous CPU tensors that share no memory with the network they came from: training goes on while FLARE streams."""
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{entry}/{name} is {type(tensor).__name__}, not a tensor; numbers belong to the facts")
    return {name: tensor.detach().to("cpu").contiguous() for name, tensor in state.items()}
