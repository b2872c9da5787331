"""Final models: a folder with `model.safetensors` and `card.json`, and its module.

A final model is a `Message` with the item `kind`: this file builds the kind "plain" (one network)
and the adapted kinds of `adaptation.registry`; the kinds of a method are in its `Method.models`.
Every module maps images (N, C, H, W) to probabilities.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from torch import Tensor, nn

from medflare.adaptation.registry import ADAPTATIONS, adapted_model
from medflare.core.errors import ConfigError, StateError, one_line
from medflare.core.files import file_digest, write_json
from medflare.core.message import Message
from medflare.core.packages import installed_versions
from medflare.core.rng import seeded
from medflare.core.states import StateDict, misfit
from medflare.core.store import read_message, write_message
from medflare.core.text import Json, JsonDict, printable_json
from medflare.data.local import ImageBounds
from medflare.data.trial import try_task
from medflare.networks.catalogue import task_network
from medflare.networks.features import Probabilities
from medflare.tasks.config import TaskConfig, load_task

MODEL = "model"  # the entry of a plain model that holds its weights
KEPT = "kept"  # item of a deployed model that the site chose: its role, for card and results
WEIGHTS_FILE = "model.safetensors"
CARD_FILE = "card.json"
CARD_SCHEMA = 1
_TRIAL = 16.0  # maximum GiB for the network's shapes and the intensity transform of one image
CARD_CHECKSUM = "signature"  # the checksum of the card, which contains that of the weights
_PREPROCESSING = (
    "channels",
    "pick",
    "size",
    "intensity",
    "slices",
    "spatial_dims",
    "image_mode",
    "orientation",
    "spacing",
)

Builder = Callable[[TaskConfig, Message], nn.Module]
T = TypeVar("T")


def build(
    task: TaskConfig,
    message: Message,
    builder_of: Callable[[str], Builder | None] = lambda kind: None,
) -> nn.Module:
    """The module of a final model, in evaluation mode on the CPU.

    `builder_of`: kind -> its builder, or None.

    Raises:
        ConfigError: an unknown kind.
        StateError: weights that do not fit the task, or content that no such model has.
    """
    kind = message.meta.get("kind", "plain")
    if not isinstance(kind, str):
        raise StateError(
            f"a model names its kind, this one {type(kind).__name__}; fetch the model again"
        )
    if kind == "plain":
        if MODEL not in message.states:
            raise StateError(
                f"a plain model needs the entry '{MODEL}', this one holds {sorted(message.states)}"
            )
        return Probabilities(network_with(task, message.states[MODEL]), task).eval()
    builder: Builder | None
    if kind in ADAPTATIONS:
        builder = partial(adapted_model, build=lambda base: build(task, base, builder_of))
    else:
        builder = builder_of(kind)
    if builder is None:
        raise ConfigError(
            f"unknown kind of model {kind!r}; install its method, "
            "or use methods.catalogue.build_deployed"
        )
    try:
        module = builder(task, message)
        if not isinstance(module, nn.Module):
            raise TypeError(f"its builder returns {type(module).__name__}, not a module")
        return module
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise StateError(
            f"a model of kind {kind!r} has content that cannot be built "
            f"({type(error).__name__}: {one_line(error)}); fetch the model again"
        ) from error


def plain_message(state: StateDict, **meta: Any) -> Message:
    """One network's weights as a final model of kind "plain"."""
    return Message({MODEL: state}, {"kind": "plain", **meta})


def network_with(
    task: TaskConfig,
    state: Mapping[str, Tensor],
    spec: Json | None = None,
    outputs: int | None = None,
) -> nn.Module:
    """A `networks.catalogue.task_network` with the weights `state`, in evaluation mode.

    Raises:
        StateError: names or shapes do not fit.
    """
    with seeded(0, "deployed"):  # leaves torch's global generator unchanged
        network = task_network(task, spec, outputs)
    reason = misfit(state, network.state_dict())
    if reason:
        name = (spec or task.network)["name"]
        raise StateError(
            f"the weights do not fit the network '{name}' of task {task.name}: {reason}; "
            "use the task of the training"
        )
    network.load_state_dict(state)
    return network.eval()


@dataclass
class Repeated(Generic[T]):
    """An iterable that calls `make` for every pass, so that only one item is in memory."""

    make: Callable[[], Iterable[T]]

    def __iter__(self) -> Iterator[T]:
        return iter(self.make())


@runtime_checkable
class Adaptive(Protocol):
    """A deployed module that adapts to a site's unlabeled images before it predicts."""

    def adapt(self, batches: "Sequence[Tensor] | Repeated[Tensor]") -> None:
        """Adapt to images (N, C, H, W), in several passes if needed, in the batches in which they
        will be predicted.
        """


@runtime_checkable
class Branching(Protocol):
    """A deployed module whose computation depends on the image, which exporters cannot record."""

    def unbranched(self) -> nn.Module:
        """An equal module with the same computation for all images."""


@dataclass(frozen=True, repr=False)
class StoredModel:
    """A final model as read from its folder."""

    task: TaskConfig
    message: Message
    card: JsonDict

    def __repr__(self) -> str:
        return f"<{self.kind} model for task {self.task.name}>"

    @property
    def kind(self) -> str:
        """The kind of the model, for example "plain" or "super"."""
        return str(self.message.meta["kind"])

    def build(self, builder: Builder = build) -> nn.Module:
        """The module from images to probabilities, see `build`.

        `methods.catalogue.build_deployed` builds every kind.
        """
        return builder(self.task, self.message)


def save_model(folder: Path | str, task: TaskConfig, message: Message, card: Json) -> None:
    """Write a final model to `folder`: the weights first, then the card with their checksum.

    An older model is replaced. `card`: further JSON values: method, site, role, round, seed,
    metrics, ...
    """
    folder = Path(folder)
    described = task.to_dict()
    kind = message.meta["kind"]
    write_message(folder / WEIGHTS_FILE, message)
    whole = {
        "schema": CARD_SCHEMA,
        **card,
        "kind": kind,
        "labels": list(task.labels),
        "network": described["network"],
        "preprocessing": {key: described[key] for key in _PREPROCESSING},
        "task": described,
        "fingerprint": task.fingerprint(),
        "entries": {entry: len(state) for entry, state in sorted(message.states.items())},
        "bytes": message.nbytes,
        "sha256": file_digest(folder / WEIGHTS_FILE),
        "versions": installed_versions(),
    }
    write_json(folder / CARD_FILE, with_checksum(whole))


def with_checksum(card: Json) -> JsonDict:
    """The card with the SHA-256 of its content, which contains the checksum of the weights.

    It has no key: to prove where a model comes from, the signature is compared with the one that
    the sender gives.
    """
    content = {name: value for name, value in card.items() if name != CARD_CHECKSUM}
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return {**content, CARD_CHECKSUM: hashlib.sha256(canonical.encode()).hexdigest()}


def load_model(
    folder: Path | str, *, unsigned: bool = False, bounds: ImageBounds = ImageBounds()
) -> StoredModel:
    """Read a final model; nothing is unpickled.

    Args:
        unsigned: accept a card without a signature, as of medflare before 0.3.
        bounds: maximum size of the task's images.

    Raises:
        StateError: a file is missing or damaged, the card has another schema, was changed or has no
            signature, its task is invalid, or card and weights do not belong together.
        ConfigError: the task's images are larger than the bounds, or its network or transform needs
            too much time or memory.
    """
    folder = Path(folder)
    card_file = folder / CARD_FILE
    missing = [name for name in (WEIGHTS_FILE, CARD_FILE) if not (folder / name).is_file()]
    if missing:
        remedy = f"give a model's folder, which holds {WEIGHTS_FILE} and {CARD_FILE}"
        problem = f"no delivered model here ({' and '.join(missing)} missing)"
        above = folder
        while not above.exists():
            problem = "there is no such folder"
            above = above.parent
        cards_below = sorted(above.glob(f"*/**/{CARD_FILE}")) if above.name else []
        if cards_below:
            remedy += f", for example {cards_below[0].parent}"
        raise StateError(f"{folder}: {problem}; {remedy}")
    try:
        card = json.loads(card_file.read_text())
        schema = card["schema"]
        checksum = card["sha256"]
        described = card["task"]
        shown = printable_json(card)
        signature = with_checksum(card)[CARD_CHECKSUM]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise StateError(
            f"{card_file}: not a model card ({one_line(error)}); fetch the model again"
        ) from error
    if schema != CARD_SCHEMA:
        raise StateError(
            f"{card_file}: schema {schema}, this version reads {CARD_SCHEMA}; "
            "use the medflare that wrote it"
        )
    if CARD_CHECKSUM not in card and not unsigned:
        raise StateError(
            f"{card_file}: has no {CARD_CHECKSUM}; fetch the model again, "
            "or for a model of medflare before 0.3 use --unsigned"
        )
    if card.get(CARD_CHECKSUM, signature) != signature:
        raise StateError(
            f"{card_file}: was changed after it was written, its signature does not fit; "
            "fetch the model again"
        )
    if file_digest(folder / WEIGHTS_FILE) != checksum:
        raise StateError(
            f"{folder}: {WEIGHTS_FILE} is not the file its {CARD_FILE} describes; "
            "fetch the model again"
        )
    try:
        task = load_task(described)
    except ConfigError as error:
        writer = (card.get("versions") or {}).get("medflare", "no release is named")
        raise StateError(
            f"{card_file}: its task cannot be used here: {error}; "
            f"or use the medflare that wrote it ({writer})"
        ) from error
    bounds.check_task(task, str(card_file))
    try_task(replace(task, augment=()), _TRIAL, str(card_file))
    message = read_message(folder / WEIGHTS_FILE)
    if not isinstance(message.meta.get("kind"), str):
        raise StateError(f"{folder / WEIGHTS_FILE}: names no kind of model; fetch the model again")
    return StoredModel(task, message, shown)
