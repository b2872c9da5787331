"""Test-time training: the deployed model adapts itself to every image that it predicts."""

from medflare.methods import Method

TTT = Method(
    name="ttt",
    title="Training on each test image by its rotations",
    paper="Sun et al., Test-time training with self-supervision, ICML 2020",
    site=f"{__name__}.ttt:TTTSite",
    server=f"{__name__}.ttt:TTTServer",
    family="test time",
)
