"""Time of PRR's Fourier aggregation over the weights of VGG-16, beside a plain complex FFT and its inverse of the same matrices.

python benchmarks/pfa.py                       # 13 convolutions and 3 linear layers, 4 sites
python benchmarks/pfa.py --convolutions-only   # a tenth of the memory and of the time
"""

import argparse
import itertools
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from medflare.core.rng import torch_generator
from medflare.methods.prr import fourier_aggregate

WIDTHS = (3, 64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)
CONVOLUTIONS = [(outputs, inputs, 3, 3) for inputs, outputs in itertools.pairwise(WIDTHS)]
LINEAR = [(4096, 512 * 49), (4096, 4096), (1000, 4096)]
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"components": "amplitude"},
    {"components": "phase"},
    {"phase_mean": "circular"},
    {"window": "official"},
)


def plain_transform(weights: Tensor) -> Tensor:
    """fft2 and ifft2 of the matrices that the aggregation sees, (K, I kh, kw O) or (K, O, I)."""
    matrices = (
        weights.permute(0, 2, 3, 4, 1).flatten(3).flatten(1, 2) if weights.dim() == 5 else weights
    )
    return torch.fft.ifft2(torch.fft.fft2(matrices)).real


def fastest(action: Callable[[], object], repeats: int) -> float:
    """Processor time, of all threads, of the fastest of `repeats` runs: the one that other processes disturbed least."""
    times = []
    for _ in range(repeats):
        started = time.process_time()
        action()
        times.append(time.process_time() - started)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sites", type=int, default=4)
    parser.add_argument("--ratio", type=float, default=0.48, help="low-frequency threshold r")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--convolutions-only", action="store_true")
    arguments = parser.parse_args()

    shapes = CONVOLUTIONS if arguments.convolutions_only else [*CONVOLUTIONS, *LINEAR]
    plain = 0.0
    totals = [0.0] * len(SETTINGS)
    for place, shape in enumerate(shapes):
        weights = torch.randn(
            arguments.sites, *shape, generator=torch_generator(0, "benchmark", place)
        )
        plain += fastest(partial(plain_transform, weights), arguments.repeats)
        last = shape == LINEAR[-1]
        for i, options in enumerate(SETTINGS):
            totals[i] += fastest(
                partial(fourier_aggregate, weights, arguments.ratio, classifier=last, **options),
                arguments.repeats,
            )

    millions = sum(torch.Size(shape).numel() for shape in shapes) / 1e6
    print(
        f"{millions:.1f} million weights, {arguments.sites} sites, r = {arguments.ratio}, {torch.get_num_threads()} thread(s)"
    )
    print(f"{'fft2 + ifft2':42s} {plain:8.2f} s")
    for options, seconds in zip(SETTINGS, totals, strict=True):
        name = ", ".join(f"{key}={value}" for key, value in options.items()) or "defaults"
        print(f"fourier_aggregate {name:24s} {seconds:8.2f} s   {seconds / plain:.2f} x")


if __name__ == "__main__":
    main()
