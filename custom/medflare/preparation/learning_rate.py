"""The learning rate that a network usually trains with (medflare's own rule)."""

from medflare.networks.catalogue import meta_network
from medflare.tasks.config import TaskConfig

_ADAMS = ("adam", "adamw")
_SGD_OVER_ADAM = 10  # rate of SGD with momentum, relative to Adam's
# Adam's rate of a network with random weights, by its millions of weights.
_SEGMENTATION = ((1.0, 0.01), (5.0, 0.003), (float("inf"), 0.001))
_CLASSIFICATION = ((1.0, 0.003), (float("inf"), 0.001))
_FROZEN_BODY = 0.001  # the head alone is trained
_FINE_TUNING = 0.0003  # of pretrained weights


def usual_rate(task: TaskConfig) -> tuple[float, str]:
    """The rate for a task's network and optimizer, whatever its batch size, and the reason."""
    millions = sum(weight.numel() for weight in meta_network(task).parameters()) / 1e6
    by_size = _CLASSIFICATION if task.kind == "classification" else _SEGMENTATION
    if task.freeze.parts:
        rate = _FROZEN_BODY
        reason = "only the head is trained"
    elif task.network.get("weights"):
        rate = _FINE_TUNING
        reason = "pretrained weights change slowly"
    else:
        rate = next(value for limit, value in by_size if millions < limit)
        reason = f"the network has {millions:.2g} million weights, small ones take larger steps"
    if task.optimizer["name"].lower() not in _ADAMS:
        rate *= _SGD_OVER_ADAM
        reason += f"; {_SGD_OVER_ADAM} times Adam's"
    return rate, f"{reason} (medflare's own rule)"
