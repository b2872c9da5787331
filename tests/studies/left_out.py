"""A run in which another site is left out."""

from medflare.studies.statistics.seeds import Run


def leaving_out(site: str, value: float, run: Run) -> Run:
    """The run with `site` outside in X's place, where the deployed model has this Dice."""
    outside = {**run["sites"]["X"], "metrics": {"deployed": {"dice": value}}}
    return {**run, "sites": {"A": run["sites"]["A"], site: outside}}
