"""A message counts its bytes and starts empty."""

import torch

from medflare.core.message import Message


def test_nbytes_counts_tensors_of_every_entry() -> None:
    message = Message({"model": {"w": torch.zeros(10)}, "moments": {"m": torch.zeros(3, dtype=torch.float64)}}, {"n_samples": 5})
    assert message.nbytes == 10 * 4 + 3 * 8


def test_empty_messages_share_nothing() -> None:
    first, second = Message(), Message()
    first.states["model"] = {}
    first.meta["loss"] = 1.0
    assert second == Message({}, {})
    assert second.nbytes == 0
