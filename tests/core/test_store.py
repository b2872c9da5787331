"""Stored messages are read back bit for bit, and every damage is detected."""

import errno
import json
import math
import os
import posix
import stat
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save as to_safetensors
from torch import nn

from medflare.core import store
from medflare.core.errors import StateError
from medflare.core.files import write_json
from medflare.core.message import Message
from medflare.core.store import StateStore, read_message, write_message


@pytest.fixture
def message() -> Message:
    states = {
        "model": {
            "w": torch.tensor([[1.5, -0.0, 1e-40], [math.inf, -math.inf, 3.0]]),
            "algorithm": torch.arange(4).to(torch.bfloat16),
            "num_batches_tracked": torch.tensor(7),
            "mask": torch.tensor([True, False]),
            "empty": torch.zeros(0, 3),
        },
        "moments/site-1": {"w": torch.full((2, 3), 0.25, dtype=torch.float64)},
        "nothing": {},
    }
    return Message(
        states,
        {
            "round": 3,
            "loss": 0.5,
            "sites": ["Kraków", "B"],
            "metric": None,
            "nested": {"a": [1, 2.5]},
        },
    )


def assert_same(first: Message, second: Message) -> None:
    assert first.meta == second.meta
    assert {entry: list(state) for entry, state in first.states.items()} == {
        entry: list(state) for entry, state in second.states.items()
    }
    for entry, state in first.states.items():
        for name, tensor in state.items():
            other = second.states[entry][name]
            assert (tensor.dtype, tensor.shape) == (other.dtype, other.shape)
            assert torch.equal(tensor, other)
            assert other.data_ptr() % 64 == 0, "as tensors that torch makes"


def test_round_trip(tmp_path: Path, message: Message) -> None:
    store = StateStore(tmp_path / "not" / "there" / "yet")
    assert store.load("algorithm") is None
    store.save("algorithm", message)
    back = store.load("algorithm")
    assert back is not None
    assert_same(back, message)
    assert [path.name for path in store.folder.iterdir()] == ["algorithm.safetensors"], (
        "no temporary file stays behind"
    )


def test_tied_and_strided_tensors_are_stored(tmp_path: Path) -> None:
    layer = nn.Linear(3, 3)
    tied = {"first": layer.weight, "second": layer.weight, "turned": layer.weight.t()}
    write_message(tmp_path / "m", Message({"model": tied}))
    back = read_message(tmp_path / "m").states["model"]
    for name in tied:
        assert torch.equal(back[name], tied[name])
    assert not back["first"].requires_grad


def bytes_of(message: Message, folder: Path) -> bytes:
    write_message(folder / "bytes", message)
    return (folder / "bytes").read_bytes()


def test_equal_messages_have_equal_bytes(tmp_path: Path, message: Message) -> None:
    turned = dict(reversed(message.states.items()))
    again = Message(turned, dict(reversed(message.meta.items())))
    assert bytes_of(message, tmp_path) == bytes_of(again, tmp_path)


def test_every_truncation_is_detected(tmp_path: Path, message: Message) -> None:
    content = bytes_of(message, tmp_path)
    path = tmp_path / "cut.safetensors"
    for length in [0, 4, 8, 50, len(content) // 2, len(content) - 1]:
        path.write_bytes(content[:length])
        with pytest.raises(StateError, match=r"cut\.safetensors.*(not a readable|checksum)"):
            read_message(path)


def test_every_flipped_byte_is_detected(tmp_path: Path) -> None:
    content = bytes_of(
        Message({"a": {"w": torch.arange(6.0).reshape(2, 3)}, "b": {}}, {"round": 12}), tmp_path
    )
    path = tmp_path / "flipped"
    undetected = []
    for position in range(len(content)):
        damaged = bytearray(content)
        damaged[position] ^= 1
        path.write_bytes(damaged)
        try:
            read = read_message(path)
        except StateError:
            continue
        undetected.append((position, read))
    assert not undetected


@pytest.mark.parametrize(
    "metadata", [None, *({"medflare": header} for header in ("[]", "3", "{", '{"meta": {}}'))]
)
def test_a_file_that_medflare_did_not_write_raises(
    tmp_path: Path, metadata: dict[str, str] | None
) -> None:
    path = tmp_path / "odd.safetensors"
    path.write_bytes(to_safetensors({"a//w": torch.zeros(2)}, metadata=metadata))
    with pytest.raises(StateError, match=r"odd\.safetensors: not a readable"):
        read_message(path)


@pytest.mark.parametrize(
    ("key", "content"),
    [
        ("w", {"meta": {}, "entries": ["model"]}),
        ("other//w", {"meta": {}, "entries": ["model"]}),
        ("model//w", {"meta": [1], "entries": ["model"]}),
        ("model//w", {"meta": {}, "entries": 5}),
        ("model//w", {"meta": {}, "entries": [["model"]]}),
        ("model//w", {"meta": {}, "entries": ["model"], "names": {"model": []}}),
        ("model//w", {"meta": {}, "entries": ["model"], "names": {"model": ["w", "w"]}}),
        ("model//w", {"meta": {}, "entries": ["model"], "names": {}}),
    ],
)
def test_a_crafted_file_with_its_checksum_raises(
    tmp_path: Path, key: str, content: dict[str, Any]
) -> None:
    tensors = {key: torch.zeros(2)}
    header = json.dumps({**content, "digest": store._digest(tensors, content)})
    path = tmp_path / "odd.safetensors"
    path.write_bytes(to_safetensors(tensors, metadata={"medflare": header}))
    with pytest.raises(StateError, match=r"odd\.safetensors: not a readable"):
        read_message(path)


def test_a_failed_write_leaves_the_old_file_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "results.json"
    write_json(path, {"round": 1})
    monkeypatch.setattr(os, "replace", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        write_json(path, {"round": 2})
    assert json.loads(path.read_text()) == {"round": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["results.json"]


@pytest.mark.parametrize("kind", ["json", "message"])
def test_the_content_is_on_disk_before_it_replaces_the_old_file(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the first sync a crash of the machine can leave an empty file under the final name;
    without the second one it can bring the old file back.

    For all other tests conftest.py switches `os.fsync` off; here the system's is called.
    """
    steps: list[tuple[str, int]] = []  # what happens, with the inode of the file or folder
    sizes: list[int] = []  # of what is synced
    rename = os.replace

    def synced(descriptor: int) -> None:
        posix.fsync(descriptor)
        state = os.fstat(descriptor)
        steps.append(("sync", state.st_ino))
        sizes.append(state.st_size)

    def renamed(source: Path, target: Path) -> None:
        steps.append(("rename", source.stat().st_ino))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    path = tmp_path / "file"
    if kind == "json":
        write_json(path, {"round": 1})
    else:
        write_message(path, Message({"model": {"w": torch.ones(3)}}))
    written = path.stat()
    folder = tmp_path.stat()
    assert steps == [("sync", written.st_ino), ("rename", written.st_ino), ("sync", folder.st_ino)]
    assert sizes[0] == written.st_size > 0


def test_a_failed_write_of_tensors_has_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """safetensors gives it in the text only."""
    full = SafetensorError(
        "Error while serializing: I/O error: No space left on device (os error 28)"
    )
    monkeypatch.setattr(store, "save_file", Mock(side_effect=full))
    with pytest.raises(OSError, match="model") as refused:
        write_message(tmp_path / "model", Message({}, {}))
    assert refused.value.errno == errno.ENOSPC
    monkeypatch.setattr(store, "save_file", Mock(side_effect=SafetensorError("odd")))
    with pytest.raises(OSError, match="odd"):
        write_message(tmp_path / "model", Message({}, {}))


def test_nan_in_json_raises_before_the_file_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "results.json", {"dice": math.nan})
    assert not list(tmp_path.iterdir())


def _permissions(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_only_this_account_can_read_files_that_are_not_public(
    tmp_path: Path, message: Message
) -> None:
    before = os.umask(0o027)
    try:
        StateStore(tmp_path / "site/state").save("algorithm", message)
        write_json(tmp_path / "site/card.json", {})
        write_json(tmp_path / "run/more/results.json", {}, public=True)
        (tmp_path / "there").mkdir()
        write_json(tmp_path / "there/card.json", {})
    finally:
        os.umask(before)
    for name in ("site/state/algorithm.safetensors", "site/card.json", "there/card.json"):
        assert _permissions(tmp_path / name) == 0o600
    assert _permissions(tmp_path / "site") == _permissions(tmp_path / "site/state") == 0o700
    assert _permissions(tmp_path / "run/more/results.json") == 0o640
    assert _permissions(tmp_path / "run") == _permissions(tmp_path / "run/more") == 0o750
    assert _permissions(tmp_path / "there") == 0o750, (
        "permissions of existing folders do not change"
    )
