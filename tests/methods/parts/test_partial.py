"""Which entries of a network stay at the site: by layer type, by running statistics, by path."""

import pytest
from torch import nn

from medflare.core.states import batch_norm_entries
from medflare.methods.parts.partial import LocalPart


class Small(nn.Module):
    """Layers with and without running statistics, one with a name that begins like another's."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.InstanceNorm2d(2), nn.InstanceNorm2d(2, track_running_stats=True)
        )
        self.head = nn.Linear(2, 2)
        self.head2 = nn.Linear(2, 2)


STATISTICS = {"body.1.running_mean", "body.1.running_var", "body.1.num_batches_tracked"}


def test_batch_norm_is_found_by_its_type() -> None:
    names = LocalPart.of_batch_norm(Small()).names
    assert {"body.1.weight", "body.1.bias"} | STATISTICS <= names == batch_norm_entries(Small())
    assert not any(name.startswith(("body.0", "head")) for name in names)


def test_a_path_is_a_module_and_all_below_it() -> None:
    assert LocalPart.of_paths(Small(), ["head"]).names == {"head.weight", "head.bias"}
    assert (
        LocalPart.of_paths(Small(), ["body.1", "head2"]).names
        == {"body.1.weight", "body.1.bias", "head2.weight", "head2.bias"} | STATISTICS
    )
    assert LocalPart.of_paths(Small(), []).names == frozenset()


@pytest.mark.parametrize("path", ["heads", "body.9", "head.weight", "bod"])
def test_a_path_that_names_no_module_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match=path):
        LocalPart.of_paths(Small(), ["head", path])
