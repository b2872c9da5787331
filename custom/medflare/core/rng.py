"""Random generators keyed by (seed, site, round, purpose): the same keys give the same numbers in
every process and after a restart.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

Key = str | int


def derived_seed(seed: int, *keys: Key) -> int:
    """A 63-bit seed from a hash of the keys, the same in every process; integers of any type are
    equal keys, and never equal to a text.
    """
    parts = [str(int(seed))]
    for key in keys:
        parts.append(f"str:{key}" if isinstance(key, str) else f"int:{int(key)}")
    digest = hashlib.blake2b("\x1f".join(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def torch_generator(seed: int, *keys: Key) -> "torch.Generator":
    """A CPU generator; draw on the CPU and move the result, so that a GPU site sees the same
    numbers.
    """
    import torch

    return torch.Generator().manual_seed(derived_seed(seed, *keys))


def numpy_generator(seed: int, *keys: Key) -> np.random.Generator:
    """A NumPy generator, see `derived_seed`."""
    return np.random.default_rng(derived_seed(seed, *keys))


def numpy_random_state(seed: int, *keys: Key) -> np.random.RandomState:
    """The legacy generator that MONAI's random transforms take."""
    return np.random.RandomState(derived_seed(seed, *keys) % 2**32)


@contextmanager
def seeded(seed: int, *keys: Key) -> Iterator[None]:
    """Seed torch's global generators inside the block, for code that can only draw from them
    (module initialisation and dropout), and restore them after it.
    """
    import torch

    devices = []
    if torch.cuda.is_initialized():
        devices = list(range(torch.cuda.device_count()))
    number = derived_seed(seed, *keys)
    with torch.random.fork_rng(devices=devices):
        if devices:
            torch.manual_seed(number)
        else:
            # torch.manual_seed would store the seed, with a stack trace, for GPUs that are
            # initialized later.
            torch.default_generator.manual_seed(number)
        yield
