"""Filters of a job's data on their way between server and site."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.filter import Filter
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable

if TYPE_CHECKING:
    from torch import Tensor

    from medflare.core.states import StateDict

_SEPARATOR = "//"
_ANYBODY = "*"


def joined_parts(parts: "Mapping[str, StateDict]", anybody: "StateDict") -> "StateDict":
    """One state that holds every site's part, and one for sites that have none of their own.

    Returns:
        A state whose names begin with the site's.
    """
    named = {**parts, _ANYBODY: anybody}
    return {f"{site}{_SEPARATOR}{name}": tensor for site, part in named.items() for name, tensor in part.items()}


def own_part(joined: "Mapping[str, Tensor]", site: str) -> "StateDict":
    """The site's part of what `joined_parts` made, or the one for anybody.

    Returns:
        A state with its own names; empty where there is neither.

    Examples:
        >>> joined = joined_parts({"A": {"w": 1}}, {"w": 0})
        >>> own_part(joined, "A"), own_part(joined, "B")
        ({'w': 1}, {'w': 0})
    """
    for owner in (site, _ANYBODY):
        prefix = f"{owner}{_SEPARATOR}"
        part = {name.removeprefix(prefix): tensor for name, tensor in joined.items() if name.startswith(prefix)}
        if part:
            return part
    return {}


class OwnPartFilter(Filter):
    """Server-side task-data filter: hands each site its own part of an aggregated model, see `aggregators`.

    A model without parts, as in the first round of FLARE's FedAvg, passes as it is.
    """

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """The task's data with the part of the site that they are sent to."""
        dxo = from_shareable(shareable)
        if dxo.data_kind != DataKind.WEIGHTS or not any(_SEPARATOR in name for name in dxo.data):
            return shareable
        site = fl_ctx.get_peer_context().get_identity_name()
        return DXO(DataKind.WEIGHTS, own_part(dxo.data, site), dxo.meta).update_shareable(shareable)
