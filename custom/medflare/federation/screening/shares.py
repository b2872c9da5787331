"""How much a site may count for by its training images."""

from collections.abc import Mapping


def capped(samples: Mapping[str, float], most: float) -> dict[str, float]:
    """Counts in which no site has more than a share of the whole: the largest are lowered, the others stay as they are.

    Args:
        samples: site -> training images, none of them 0.
        most: the largest share; where it is below 1/K, which not all can be, all get the smallest count.

    Examples:
        >>> capped({"A": 98.0, "B": 1.0, "C": 1.0}, 0.5)
        {'A': 2.0, 'B': 1.0, 'C': 1.0}
        >>> capped({"A": 100.0, "B": 100.0, "C": 1.0}, 0.25)
        {'A': 1.0, 'B': 1.0, 'C': 1.0}
        >>> capped({"A": 3, "B": 2}, 1.0)
        {'A': 3, 'B': 2}
    """
    if not samples or most * len(samples) <= 1:
        return dict.fromkeys(samples, min(samples.values(), default=0.0))
    rest = float(sum(samples.values()))
    limit = most * rest
    for lowered, count in enumerate(sorted(samples.values(), reverse=True)):
        limit = most * rest / (1 - lowered * most)  # with so many sites at the limit it is their share of what they and the rest have
        if count <= limit:
            break
        rest -= count
    return {site: min(count, limit) for site, count in samples.items()}
