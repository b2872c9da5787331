"""Messages as FLARE sends them: a COLLECTION DXO with one WEIGHTS DXO for each state and one
METRICS DXO for the metadata.

Everything that holds tensors is in a DXO, so that a hospital's privacy filters reach it; headers
hold the return code and, for a failed task, one line of text. Tensors are sent as numpy arrays,
which FLARE's filters expect; nothing is pickled. Torch is imported only where a message is packed
or unpacked: the simulator's processes pass messages on without it.
"""

import errno
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import ReservedHeaderKey, Shareable, make_reply
from nvflare.fuel.utils import fobs

from medflare.core.errors import ERRORS, DataError, MedflareError, UpdateError
from medflare.federation.settings import step_name

if TYPE_CHECKING:
    from torch import Tensor

    from medflare.core.message import Message

UNABLE = "medflare: unable: "  # in a site's log, before the reason of a failed task
META = "meta"  # name of the METRICS DXO; no state may have it
DISK_FULL = "the disk is full: free some space at the site and submit the job again"
_ERROR_HEADER = "medflare.error"
# In a state's DXO: names of tensors whose bits are sent as int16, because numpy has no bfloat16.
_BFLOAT16 = "bfloat16"


def to_shareable(message: "Message") -> Shareable:
    """The message as FLARE sends it.

    Raises:
        ValueError: a state has the name of the metadata, or holds something that is not a tensor.
    """
    if META in message.states:
        raise ValueError(f"a state must not be named {META!r}")
    parts = {str(entry): _packed(entry, state) for entry, state in message.states.items()}
    meta = {str(item): value for item, value in message.meta.items()}
    parts[META] = DXO(DataKind.METRICS, data=meta)
    return DXO(DataKind.COLLECTION, data=parts).to_shareable()


def to_message(shareable: Shareable) -> "Message":
    """The message that `to_shareable` packed.

    Raises:
        UpdateError: it is something else.
    """
    from medflare.core.message import Message

    collection = _collection(shareable)
    parts = collection.data
    if collection.data_kind != DataKind.COLLECTION or not isinstance(parts.get(META), DXO):
        raise UpdateError(f"not a medflare message: a {collection.data_kind} without metadata")
    states = {}
    for entry, part in parts.items():
        if entry == META:
            continue
        if not isinstance(part, DXO) or part.data_kind != DataKind.WEIGHTS:
            raise UpdateError(f"entry {entry!r} is not a state")
        states[entry] = _unpacked(entry, part)
    return Message(states, dict(parts[META].data)).aligned()


def _collection(shareable: Shareable) -> DXO:
    try:
        return from_shareable(shareable)
    except ValueError as error:
        raise UpdateError(f"not a medflare message: {error}") from error


def _packed(entry: str, state: Mapping[str, Any]) -> DXO:
    """A state as contiguous arrays in main memory."""
    import torch

    arrays = {}
    bfloat16 = []
    for name, tensor in state.items():
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(
                f"{entry}/{name} is {type(tensor).__name__}, not a tensor; "
                "numbers belong to the meta"
            )
        array = tensor.detach().to("cpu").contiguous()
        if array.dtype == torch.bfloat16:
            bfloat16.append(name)
            array = array.view(torch.int16)
        arrays[name] = array.numpy()
    return DXO(DataKind.WEIGHTS, data=arrays, meta={_BFLOAT16: bfloat16} if bfloat16 else None)


def _unpacked(entry: str, part: DXO) -> dict[str, "Tensor"]:
    """The state that `_packed` packed, of which a filter may have replaced arrays by numpy scalars
    or torch tensors.

    Raises:
        UpdateError: a value is something else.
    """
    import torch

    bfloat16 = part.get_meta_prop(_BFLOAT16) or ()
    state = {}
    for name, value in part.data.items():
        try:
            if isinstance(value, torch.Tensor):
                tensor = value
            else:
                tensor = torch.from_numpy(np.require(value, requirements=["C", "W"]))
        except (TypeError, ValueError) as error:
            raise UpdateError(
                f"{entry}/{name} is {type(value).__name__}, not a tensor: {error}"
            ) from error
        if name in bfloat16:
            if tensor.dtype != torch.int16:
                raise UpdateError(
                    f"{entry}/{name} is listed as bfloat16, but its array is {tensor.dtype}"
                )
            tensor = tensor.view(torch.bfloat16)
        state[name] = tensor
    return state


def register_decomposers() -> None:
    """Let FLARE serialise messages in a process that FLARE did not start."""
    from nvflare.apis.utils.decomposers import flare_decomposers
    from nvflare.app_common.decomposers import numpy_decomposers

    flare_decomposers.register()
    numpy_decomposers.register()


def register_tensors() -> None:
    """Let FLARE read torch tensors, which a filter or another client may send: for an unknown type
    FLARE ends the whole job.
    """
    from nvflare.app_opt.pt.decomposers import TensorDecomposer

    fobs.register(TensorDecomposer)


def to_bytes(shareable: Shareable) -> bytes:
    """The data of a task or of its reply, without FLARE's headers, in FLARE's serialisation;
    `fobs.loads` reads it.
    """
    return fobs.dumps(_collection(shareable).to_shareable())


def error_reply(text: str, code: str = ReturnCode.EXECUTION_EXCEPTION) -> Shareable:
    """A failed task's reply: a return code and one line of text, no data."""
    return make_reply(code, headers={_ERROR_HEADER: " ".join(text.split())})


def error_of(shareable: Shareable) -> str | None:
    """Why a task failed, or None if it did not fail."""
    code = shareable.get_return_code()
    return None if code == ReturnCode.OK else error_text(shareable, code)


def error_text(shareable: Shareable, code: str) -> str:
    """The line of text of a failed task's reply, else one that names its return code."""
    headers = shareable.get(ReservedHeaderKey.HEADERS)
    text = headers.get(_ERROR_HEADER) if isinstance(headers, dict) else None
    if isinstance(text, str) and text:
        return text
    return f"the task ended with FLARE's return code {code}"


def outward(error: BaseException, phase: str, round: int) -> str:
    """The text of an error as it may leave the site: without a folder, or anything that may name an
    image or a patient.

    Examples:
        >>> outward(MedflareError("/srv/kit/local/medflare.json: not JSON"), "enrol", 0)
        'medflare.json: not JSON'
        >>> outward(DataError("Meier.png: file not found"), "enrol", 0)
        "DataError in 'enrol' of round 1; errors.log at the site says why"
        >>> outward(OSError(errno.ENOSPC, "full", "/srv/kit/outbound.csv"), "train", 1) == DISK_FULL
        True
    """
    if disk_is_full(error):
        return DISK_FULL
    if isinstance(error, MedflareError) and not isinstance(error, DataError):
        return without_folders(str(error))
    step = step_name(phase, round)
    return f"{type(error).__name__} in {step}; {ERRORS} at the site says why"


def disk_is_full(error: BaseException) -> bool:
    """Whether an error, or the one that led to it, says that the disk or the quota is full."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    earlier = error.__cause__ or error.__context__
    return earlier is not None and disk_is_full(earlier)


def without_folders(text: str) -> str:
    """The text without paths: of all between a path and the last / before a colon, nothing stays,
    as folders are called by patients, with commas, blanks and brackets.
    """
    return re.sub(r"(?:file:/+|(?<![\w./)])/(?!/))(?:(?!: ).)*/", "", text)
