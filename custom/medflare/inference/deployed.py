"""Delivered models: a folder with `model.safetensors` and `card.json`, and the module that is built from it.

A delivered model is a `Message`. Its item `kind` says how a module is built from it: this file builds the kind "plain" (one
network) and the adapted kinds of `adaptation.registry`; a method's own kinds stand in its `Method.models`. Every module maps images
(N, C, H, W) to probabilities.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Protocol, TypeAlias, TypeVar, runtime_checkable

from torch import Tensor, nn

from medflare.adaptation.registry import ADAPTATIONS, adapted_model
from medflare.core.errors import ConfigError, StateError, one_line
from medflare.core.message import Message
from medflare.core.packages import installed_versions
from medflare.core.rng import seeded
from medflare.core.states import StateDict, misfit
from medflare.core.store import file_digest, read_message, write_json, write_message
from medflare.core.text import printable_json
from medflare.data.reading import ImageBounds
from medflare.data.trial import try_transforms
from medflare.networks.catalogue import task_network
from medflare.networks.features import Probabilities
from medflare.tasks.config import TaskConfig, load_task

MODEL = "model"  # the entry of a plain model that holds its weights
KEPT = "kept"  # item of a deployed model that was chosen at its site: how, for the card and the results
WEIGHTS_FILE, CARD_FILE = "model.safetensors", "card.json"
CARD_SCHEMA = 1
_TRIAL = 16.0  # GiB that the intensity transform of one image may take
SEAL = "signature"  # the card's own checksum, which covers that of the weights
_PREPROCESSING = ("channels", "pick", "size", "intensity", "slices", "spatial_dims", "image_mode", "orientation", "spacing")

Builder: TypeAlias = Callable[[TaskConfig, Message], nn.Module]
T = TypeVar("T")


def no_other_kind(kind: str) -> Builder | None:
    """What builds models of a kind, where nobody knows any but "plain"."""
    return None


def build(task: TaskConfig, message: Message, builder_of: Callable[[str], Builder | None] = no_other_kind) -> nn.Module:
    """The module of a delivered model, in evaluation mode on the CPU.

    Args:
        builder_of: kind -> what builds models of that kind, None where nothing does.

    Raises:
        ConfigError: a kind that nobody here builds.
        StateError: weights that do not fit the task.
    """
    kind = message.meta.get("kind", "plain")
    if kind == "plain":
        return plain_model(task, message)
    if kind in ADAPTATIONS:
        return adapted_model(task, message, lambda base: build(task, base, builder_of))
    builder = builder_of(kind)
    if builder is None:
        remedy = "install the method that delivered it, or build it with methods.catalogue.build_deployed"
        raise ConfigError(f"no builder for a model of kind {kind!r}; {remedy}")
    return builder(task, message)


def plain_message(state: StateDict, **meta: Any) -> Message:
    """One network's weights as a delivered model of kind "plain".

    Args:
        meta: further meta of the message.
    """
    return Message({MODEL: state}, {"kind": "plain", **meta})


def plain_model(task: TaskConfig, message: Message) -> nn.Module:
    """The module of a delivered model of kind "plain", in evaluation mode on the CPU.

    Raises:
        StateError: the message holds no model, or its tensors do not fit the task's network.
    """
    if MODEL not in message.states:
        raise StateError(f"a plain model needs the entry '{MODEL}', this one holds {sorted(message.states)}")
    return Probabilities(network_with(task, message.states[MODEL]), task).eval()


def network_with(
    task: TaskConfig, state: Mapping[str, Tensor], spec: Mapping[str, Any] | None = None, outputs: int | None = None
) -> nn.Module:
    """A network with the weights of `state`, in evaluation mode: the task's own, or one by `spec` (a selector) with `outputs` outputs.

    Args:
        task: gives channels, and what the others leave open.
        state: name -> tensor, every entry of the network.
        spec: the network, see `networks.catalogue`; None: the task's.
        outputs: output channels; None: the task's.

    Raises:
        StateError: names or shapes do not fit; the text names the first three.
    """
    chosen = task.network if spec is None else spec
    with seeded(0, "deployed"):  # the initial weights are overwritten; drawing them must not disturb anybody's generator
        network = task_network(task, chosen, outputs)
    if reason := misfit(state, network.state_dict()):
        raise StateError(
            f"these weights do not fit the network '{chosen['name']}' of task {task.name}: {reason}; "
            "use the task that the model was trained with"
        )
    network.load_state_dict(state)
    return network.eval()


class Repeated(Generic[T]):
    """Things that are made anew for every pass over them, so that no more than one is in memory.

    Args:
        make: gives the same things every time.
    """

    def __init__(self, make: Callable[[], Iterable[T]]):
        self._make = make

    def __iter__(self) -> Iterator[T]:
        return iter(self._make())


@runtime_checkable
class Adaptive(Protocol):
    """A deployed module that fits itself to a site's unlabelled images before it predicts."""

    def adapt(self, batches: "Sequence[Tensor] | Repeated[Tensor]") -> None:
        """Images (N, C, H, W) in the batches in which they will be predicted.

        Args:
            batches: at least one image; taken as often as there are passes.
        """


@runtime_checkable
class Branching(Protocol):
    """A deployed module that computes different things for different images, which no exporter can record."""

    def unbranched(self) -> nn.Module:
        """A module that gives the same answers by one computation for all images."""


@dataclass(frozen=True)
class StoredModel:
    """A delivered model as read from its folder."""

    task: TaskConfig
    message: Message
    card: dict[str, Any]

    @property
    def kind(self) -> str:
        """The kind of model, for example "plain" or "super"."""
        return str(self.message.meta["kind"])

    def build(self, builder: Builder = build) -> nn.Module:
        """The module from images to probabilities, in evaluation mode on the CPU.

        Args:
            builder: `methods.catalogue.build_deployed` knows every kind; the default refuses what it does not know.

        Raises:
            ConfigError: a kind that the builder does not know.
            StateError: weights that do not fit the task.
        """
        return builder(self.task, self.message)


def save_model(folder: Path | str, task: TaskConfig, message: Message, card: Mapping[str, Any]) -> None:
    """Write a delivered model to `folder`: the weights first, then the card that carries their checksum.

    Args:
        folder: made where it does not exist; an older model in it is replaced.
        task: what the model was trained for; part of the card.
        card: what the caller knows beside the task: method, site, role, round, seed, metrics, ... (JSON-serialisable).

    Raises:
        ValueError: the message does not say of which kind it is.
    """
    if "kind" not in message.meta:
        raise ValueError("a delivered model needs the item 'kind'")
    folder, described = Path(folder), task.to_dict()
    write_message(folder / WEIGHTS_FILE, message)
    whole = {
        "schema": CARD_SCHEMA,
        **card,
        "kind": message.meta["kind"],
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
    write_json(folder / CARD_FILE, signed(whole))


def signed(card: Mapping[str, Any]) -> dict[str, Any]:
    """The card with the SHA-256 of all that it says, the checksum of the weights included, in place of an older one.

    It shows what was changed by mistake or by hand. Who forges a card can compute it too: a signature that is to prove where a model comes
    from is compared with the one that the delivering party tells.

    Args:
        card: JSON values.
    """
    content = {name: value for name, value in card.items() if name != SEAL}
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return {**content, SEAL: hashlib.sha256(canonical.encode()).hexdigest()}


def load_model(folder: Path | str, *, unsigned: bool = False, bounds: ImageBounds = ImageBounds()) -> StoredModel:
    """Read a delivered model; nothing is unpickled.

    Args:
        folder: holds weights and card.
        unsigned: take a card without a signature too, as a medflare before 0.3 wrote it: nothing tells whether somebody changed it.
        bounds: how large an image of its task may be.

    Raises:
        StateError: a file is missing or damaged, the card has another schema, was changed or lacks its signature, its task is none that
            this version knows, or card and weights do not belong together.
        ConfigError: its images are larger than the bounds.
    """
    folder = Path(folder)
    missing = [name for name in (WEIGHTS_FILE, CARD_FILE) if not (folder / name).is_file()]
    if missing:
        below = next(iter(sorted(folder.glob(f"*/**/{CARD_FILE}"))), folder / CARD_FILE).parent
        remedy = "give the folder that holds both files" + (f", for example {below}" if below != folder else "")
        raise StateError(f"{folder}: no delivered model here ({' and '.join(missing)} missing); {remedy}")
    try:
        card = json.loads((folder / CARD_FILE).read_text())
        schema, checksum, described = card["schema"], card["sha256"], card["task"]
        shown = printable_json(card)
        resealed = signed(card)[SEAL]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise StateError(f"{folder / CARD_FILE}: not a model card ({one_line(error)}); fetch the model again") from error
    if schema != CARD_SCHEMA:
        raise StateError(f"{folder / CARD_FILE}: schema {schema}, this version reads {CARD_SCHEMA}; use the medflare that wrote it")
    if SEAL not in card and not unsigned:
        raise StateError(
            f"{folder / CARD_FILE}: has no {SEAL}, so that nothing tells whether somebody changed it; fetch the model again, or allow it "
            "where you know that it is of an older medflare (predict and export: --unsigned)"
        )
    if card.get(SEAL, resealed) != resealed:
        raise StateError(f"{folder / CARD_FILE}: was changed after it was written, its signature does not fit; fetch the model again")
    if file_digest(folder / WEIGHTS_FILE) != checksum:
        raise StateError(f"{folder}: {WEIGHTS_FILE} is not the file its {CARD_FILE} describes; fetch the model again")
    try:
        task = load_task(described)
    except ConfigError as error:
        release = (card.get("versions") or {}).get("medflare", "no release is named")
        remedy = f"use the medflare that wrote it ({release})"
        raise StateError(f"{folder / CARD_FILE}: its task cannot be used here, {remedy}: {error}") from error
    bounds.check_task(task, str(folder / CARD_FILE))
    try_transforms(replace(task, augment=()), _TRIAL, str(folder / CARD_FILE))
    return StoredModel(task, read_message(folder / WEIGHTS_FILE), shown)
