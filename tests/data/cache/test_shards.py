"""Images and targets on disk: what is read by the row is what was written, to the bit."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from medflare.core.errors import StateError
from medflare.data.cache import shards
from medflare.data.cache.folder import CacheSettings, Room, private
from medflare.data.cache.shards import Shards, write

Pair = tuple[Tensor, Tensor]


def _stored(folder: Path, rows: list[Pair]) -> Shards:
    found = write(folder, rows, Room(CacheSettings(str(folder))))
    return Shards(folder, tuple(found), rows[0][1].dtype, torch.zeros(len(rows), 2), private(folder / "lock"))


def _pictures(count: int) -> list[Pair]:
    drawn = torch.Generator().manual_seed(0)
    return [(torch.rand(3, 8, 6, generator=drawn), torch.randint(0, 3, (8, 6), generator=drawn)) for _ in range(count)]


def test_rows_in_any_order_from_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "SHARD_BYTES", 3000)  # three rows
    rows = _pictures(8)
    stored = _stored(tmp_path, rows)
    assert [shard.rows for shard in stored.shards] == [3, 3, 2] == [len(rows) for rows in stored.portions(9)]
    assert list(stored.portions(2)) == [[0, 1], [2], [3, 4], [5], [6, 7]]
    for chosen in ([7, 0, 3, 3, 4], [2], list(range(8))):
        assert torch.equal(stored.images(chosen), torch.stack([rows[row][0] for row in chosen]))
        targets = stored.targets(chosen)
        assert targets.dtype == torch.int64 and torch.equal(targets, torch.stack([rows[row][1] for row in chosen]))
    stored.verify()
    library = load_file(tmp_path / "00001.safetensors")  # any reader of the format can read it
    assert torch.equal(library["images"][0], rows[3][0]) and library["targets"].dtype == torch.uint8


def test_images_of_sizes_of_their_own(tmp_path: Path) -> None:
    rows = [(torch.full((1, side, 4, 5), float(side)), torch.full((side, 4, 5), side)) for side in (2, 3, 3, 300)]
    stored = _stored(tmp_path, rows)
    assert [shard.rows for shard in stored.shards] == [1, 2, 1]
    for row, (image, target) in enumerate(rows):
        assert torch.equal(stored.images([row])[0], image) and torch.equal(stored.targets([row])[0], target)
    with pytest.raises(ValueError, match="rows of 2 shapes"):
        stored.images([0, 1])


@pytest.mark.parametrize("target", [torch.tensor(2), torch.tensor([0.0, 1.0]), torch.tensor([[300]]), torch.tensor([[0.25]])], ids=str)
def test_targets_come_back_as_they_were(tmp_path: Path, target: Tensor) -> None:
    stored = _stored(tmp_path, [(torch.zeros(1, 1, 1), target)] * 2)
    assert torch.equal(stored.targets([1, 0]), torch.stack([target] * 2)) and stored.targets([0]).dtype == target.dtype


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_a_batch_of_files_that_pack_targets_differently(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """A file whose targets fit into bytes stores bytes; the next one, with a larger value, does not."""
    monkeypatch.setattr(shards, "SHARD_BYTES", 100)
    targets = [torch.tensor(values, dtype=dtype) for values in ([5, 5], [300, 1], [7, 255])]
    stored = _stored(tmp_path, [(torch.full((1, 4, 4), float(number)), target) for number, target in enumerate(targets)])
    assert len({shard.targets.dtype for shard in stored.shards}) == 2 and len(stored.shards) == 3
    for chosen in ([0, 1], [1, 0], [2, 1, 0, 1], [0, 2], [1]):
        found = stored.targets(chosen)
        assert found.dtype == dtype and torch.equal(found, torch.stack([targets[row] for row in chosen]))


def test_a_changed_file_is_found(tmp_path: Path) -> None:
    stored = _stored(tmp_path, _pictures(2))
    file = tmp_path / "00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(StateError, match=r"00000.safetensors: gone or changed while it was used; start again"):
        stored.verify()
    file.write_bytes(content[:-200])
    with pytest.raises(StateError, match="gone or changed"):
        stored.images([1])
    file.unlink()
    for read in (stored.verify, lambda: stored.targets([0])):
        with pytest.raises(StateError, match="gone or changed"):
            read()


def test_no_room(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="limit_gb"):
        write(tmp_path, _pictures(2), Room(CacheSettings(str(tmp_path), limit_gb=100 / 10**9)))
