"""Slips that show while a step computes: they raise ValueError at the line of the method's code."""

from typing import Any

import numpy as np
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_DIFFERENCES = ("sub", "sub_", "mse_loss", "dist")
# Seeds of `core.rng` have 63 bits; this is above that of a generator which nobody has seeded.
_LEAST_SEED = 2**46
_new_generator = np.random.default_rng


class WatchedTorch(TorchDispatchMode):
    """Every operation within a step of an algorithm with these networks."""

    def __init__(self, networks: dict[str, Any]):
        super().__init__()
        self._networks = networks

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        arguments = kwargs or {}
        generator = arguments.get("generator")
        if generator:
            _require_key(generator.initial_seed())
        if operation.overloadpacket.__name__ in _DIFFERENCES:
            first, second = map(_place, args[:2])
            for network in self._networks.values():
                if first == second and first in map(_place, network.state_dict().values()):
                    raise ValueError(
                        "weights of the model minus themselves are always 0; keep a copy of what "
                        "they are to be compared with, as copied_state(model)"
                    )
        return operation(*args, **arguments)


def _place(value: Any) -> Any:
    return isinstance(value, Tensor) and (value.data_ptr(), value.shape)


def keyed_generator(seed: Any = None) -> np.random.Generator:
    """The generator of `default_rng`, whose seed must have keys."""
    _require_key(seed)
    return _new_generator(seed)


def _require_key(seed: Any) -> None:
    """Raise ValueError for a generator's seed that has no keys."""
    if isinstance(seed, int) and seed < _LEAST_SEED:
        raise ValueError(
            f"a generator with seed {seed} has no keys, its numbers repeat at other sites or in "
            "other rounds; use torch_generator(self.site.seed, self.site.name, round, PURPOSE)"
        )
