"""Whether a network is built in seconds, whatever its arguments say. Light to import."""

from collections.abc import Iterator, Mapping
from typing import Any

from medflare.networks.foreign import NetworkSpec, foreign_module

_FEW = 32  # values of an argument
_DEEP = 64  # largest number: of blocks, of layers, ...
_WIDE = 2048  # largest width
_WIDTHS = frozenset(
    {"channels", "features", "hidden", "hidden_size", "mlp_dim", "width", "dimension"}
)


def builds_quickly(spec: NetworkSpec) -> bool:
    """Whether no argument of {"name": ..., arguments} can make the network slow to build.

    Examples:
        >>> builds_quickly({"name": "unet", "channels": [16, 32, 512], "num_res_units": 2})
        True
        >>> builds_quickly({"name": "DenseNet", "block_config": [200, 1, 1, 1]})
        False
    """
    arguments = {name: value for name, value in spec.items() if name not in ("name", "weights")}
    if foreign_module(spec):
        return not arguments
    return all(_is_small(name, tuple(_leaves(value))) for name, value in arguments.items())


def _is_small(argument: str, values: tuple[Any, ...]) -> bool:
    largest = _WIDE if argument in _WIDTHS else _DEEP
    numbers = [value for value in values if isinstance(value, int | float)]
    return len(values) <= _FEW and all(value <= largest for value in numbers)


def _leaves(value: Any) -> Iterator[Any]:
    """The values in nested lists and mappings."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for inner in value:
            yield from _leaves(inner)
    else:
        yield value
