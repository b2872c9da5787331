"""FLARE's privacy filters on what a site changed.

`PercentilePrivacy` and `SVTPrivacy` were made for weight differences: they drop small values and clip large ones. A site sends full models.
`UpdatePrivacy` therefore applies the filter to the difference from the model that came with the task, and sends that model plus the
filtered difference.
"""

from typing import TYPE_CHECKING, Any

from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.dxo_filter import DXOFilter
from nvflare.apis.filter import Filter
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_common.filters.percentile_privacy import PercentilePrivacy
from nvflare.app_common.filters.svt_privacy import SVTPrivacy

from medflare.core.errors import ConfigError, MedflareError, UpdateError
from medflare.flare.participants import SITE_TASK, SiteTask

if TYPE_CHECKING:
    from medflare.core.states import StateDict

_FILTERS: dict[str, type[DXOFilter]] = {"percentile": PercentilePrivacy, "svt": SVTPrivacy}


class UpdatePrivacy(Filter):
    """Task-result filter: one of FLARE's privacy filters, applied to the change of each floating-point tensor in this task.

    An entry that did not come with the task (PRR's prototypes, a new head) has no change to filter; then nothing is sent but the reason.
    Put the filter before `OutboundGuard`.

    Args:
        name: "percentile" (Shokri and Shmatikov, CCS 2015) or "svt" (sparse vector technique).
        options: arguments of FLARE's filter, for example {"percentile": 10, "gamma": 0.01} or {"epsilon": 0.1, "fraction": 0.1}.

    Raises:
        ConfigError: an unknown filter or argument, or values with which no change would pass.
    """

    def __init__(self, name: str, options: dict[str, Any] | None = None):
        super().__init__()
        if name not in _FILTERS:
            raise ConfigError(f"no privacy filter {name!r}; choose {' or '.join(sorted(_FILTERS))}")
        try:
            self.filter = _FILTERS[name](**(options or {}))
        except TypeError as error:
            raise ConfigError(f"privacy filter {name}: {error}") from error
        if isinstance(self.filter, SVTPrivacy) and self.filter.tau >= self.filter.gamma:
            raise ConfigError(
                f"privacy filter svt: tau = {self.filter.tau} is not below gamma = {self.filter.gamma}: no change would ever pass"
            )

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """The result with filtered changes, or a failed task if an entry has no change to filter."""
        from medflare.core.message import Message
        from medflare.flare.messages import error_reply, to_message, to_shareable

        if shareable.get_return_code() != ReturnCode.OK:
            return shareable
        task: SiteTask | None = fl_ctx.get_prop(SITE_TASK)
        try:
            message = to_message(shareable)
            origins = to_message(task.incoming).states if task is not None else {}
            states = {entry: self._filtered(entry, state, origins.get(entry), shareable, fl_ctx) for entry, state in message.states.items()}
        except MedflareError as error:
            return error_reply(f"the privacy filter of site {fl_ctx.get_identity_name()} blocked the reply: {error}")
        return to_shareable(Message(states, message.meta)) if states else shareable

    def _filtered(self, entry: str, state: "StateDict", origin: "StateDict | None", shareable: Shareable, fl_ctx: FLContext) -> "StateDict":
        """`origin` plus the filtered change; integer tensors (counters) stay as they are."""
        import torch

        if origin is None:
            raise UpdateError(f"{entry} did not come in with the task, so it has no change to filter; the method cannot be used with it")
        names = [name for name, tensor in state.items() if tensor.is_floating_point() and tensor.numel()]
        if unknown := [name for name in names if name not in origin]:
            raise UpdateError(f"{entry}/{unknown[0]} did not come in with the task, so it has no change to filter")
        changes = DXO(DataKind.WEIGHT_DIFF, {name: (state[name].double() - origin[name].double()).numpy() for name in names})
        filtered = self.filter.process_dxo(changes, shareable, fl_ctx) or changes
        sent = {name: origin[name].double() + torch.from_numpy(filtered.data[name].reshape(state[name].shape)) for name in names}
        return {name: sent[name].to(tensor.dtype) if name in sent else tensor for name, tensor in state.items()}
