"""Drift: a site moves the model round after round in a direction of its own, each time by no more
than is usual.

The server keeps a sample of the coordinates of every site's last updates, never whole updates.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from medflare.core.message import Message, Messages
from medflare.core.rng import torch_generator
from medflare.core.states import cosines
from medflare.federation.update_validation.clipping import usual_lengths

_WINDOW = 3  # updates of a site that are added up
_SAMPLE = 512  # coordinates of a tensor
# Of 711 sums of honest sites (phantom, ham10000, fundus_vessels, brain_lgg) none meets all four
# conditions, of 84 drifting ones all do.
_APART = 0.1  # a drifting sum has a smaller cosine to that of every other site
_AGREE = 0.2  # the others' sums have a larger cosine to each other, by their median
_SHORT = 0.25  # a sum below this fraction of the usual length does no harm
_LONG = 2.0  # a drift beyond so many times the usual length is not used

Reasons = dict[str, str]  # by site
ImageCounts = Mapping[str, float]  # training images by site
Sketches = dict[str, dict[str, Tensor]]  # entry -> site -> sampled coordinates of its update


@dataclass
class DriftMemory:
    """The last sampled updates of every site, for each phase and entry; `memory` holds them for a
    checkpoint.
    """

    seed: int
    memory: Message = field(default_factory=Message)

    def usual_length(self, phase: str, entry: str) -> float:
        """The largest of all steps' lower medians of lengths so far; 0 if there is none."""
        return float(self.memory.meta.get(f"{phase}/{entry} length", 0.0))

    def note_lengths(self, phase: str, entry: str, lengths: Sequence[float]) -> None:
        """Note the lengths of a step's updates that were accepted."""
        usual = max(self.usual_length(phase, entry), statistics.median_low(lengths))
        self.memory.meta[f"{phase}/{entry} length"] = usual

    def sketch(
        self, phase: str, entry: str, replies: Messages, sent: Messages, salt: str
    ) -> dict[str, Tensor]:
        """Site -> sampled coordinates of its update, each times sqrt(size / sample) of its tensor,
        so that lengths are estimated without bias.

        Args:
            replies: site -> its message with the entry.
            sent: site -> message that it was sent.
            salt: part of the random generator's key, in the first round. It holds what no single
                site knows: a site that could foresee the coordinates would drift along others.
        """
        salt = self.memory.meta.setdefault(f"{phase}/{entry}", salt)
        parts: dict[str, list[Tensor]] = {site: [] for site in replies}
        for name, tensor in next(iter(replies.values())).states[entry].items():
            if not tensor.is_floating_point():
                continue
            drawn = torch.arange(tensor.numel())
            if tensor.numel() > _SAMPLE:
                generator = torch_generator(self.seed, "drift", salt, entry, name)
                drawn = torch.randint(tensor.numel(), (_SAMPLE,), generator=generator)
            scale = math.sqrt(tensor.numel() / max(len(drawn), 1))
            for site, reply in replies.items():
                end = reply.states[entry][name].reshape(-1)[drawn].float()
                start = sent[site].states[entry][name].reshape(-1)[drawn].float()
                parts[site].append(scale * (end - start))
        return {site: torch.cat(updates) for site, updates in parts.items() if updates}

    def drifting(
        self, phase: str, sketches: Sketches, image_counts: ImageCounts
    ) -> tuple[Reasons, Reasons]:
        """The sites whose last updates, with the present one, are a drift, with the reason: those
        with long drifts, whose updates are rejected, and the others.
        """
        long: Reasons = {}
        others: Reasons = {}
        for entry, present in sketches.items():
            full = {}  # windows of the sites with enough updates
            for site, sketch in present.items():
                window = self._window(phase, entry, site, sketch)
                if len(window) == _WINDOW:
                    full[site] = window
            if len(full) < 3:  # two sites have no majority
                continue
            counts = [image_counts.get(site, 0) for site in full]
            drifts = drift(torch.stack(list(full.values())), counts)
            for site, times in zip(full, drifts, strict=True):
                text = (
                    f"its last {_WINDOW} updates of {entry} add up in a direction "
                    f"that no other site shares, {times:.3g} times as far"
                )
                if times > _LONG:
                    long.setdefault(site, text)
                elif times > 0:
                    others.setdefault(site, text)
        return long, others

    def remember(self, phase: str, sketches: Sketches) -> None:
        """Store the updates of a finished step."""
        for entry, present in sketches.items():
            state = self.memory.states.setdefault(f"{phase}/{entry}", {})
            for site, sketch in present.items():
                state[site] = self._window(phase, entry, site, sketch)[1 - _WINDOW :]

    def _window(self, phase: str, entry: str, site: str, sketch: Tensor) -> Tensor:
        """The site's last updates and the present one, (rounds, coordinates)."""
        none = sketch.new_zeros(0, len(sketch))
        earlier = self.memory.states.get(f"{phase}/{entry}", {}).get(site, none)
        return torch.cat([earlier, sketch.unsqueeze(0)])


def drift(updates: Tensor, image_counts: Sequence[float]) -> list[float]:
    """|s_k| / usual length for those of K sites that drift, else 0; s_k = Σ_r u_rk of its last R
    updates, (K, R, coordinates).

    1. cos(s_k, s_j) < 0.1 for every other site j, and the median of cos(s_i, s_j) over the others
       is above 0.2: they agree.
    2. |s_k| / Σ_r |u_rk| is larger than every other site's: it is the straightest.
    3. |s_k| is at least a quarter of the usual length.
    """
    sums = updates.double().sum(dim=1)
    lengths = sums.norm(dim=1)
    paths = updates.double().norm(dim=2).sum(dim=1)
    straight = torch.where(paths > 0, lengths / paths, torch.zeros_like(paths))
    cosine = cosines(sums @ sums.T)
    usual = usual_lengths(lengths, image_counts)
    drifts = [0.0] * len(sums)
    for site in range(len(sums)):
        others = [other for other in range(len(sums)) if other != site]
        pairs = cosine[others][:, others][torch.triu_indices(len(others), len(others), 1).unbind()]
        apart = bool((cosine[site, others] < _APART).all()) and float(pairs.median()) > _AGREE
        straightest = bool((straight[site] > straight[others]).all())
        if apart and straightest and usual[site] > 0:
            times = float(lengths[site] / usual[site])
            if times >= _SHORT:
                drifts[site] = times
    return drifts
