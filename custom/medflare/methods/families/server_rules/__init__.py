"""Server rules: sites train as in FedAvg, the server combines their models in another way."""

from medflare.methods.method import Method


def _rule(name: str, title: str, paper: str, server: str) -> Method:
    """A row: FedAvg's site algorithm with a server algorithm of this package, "module:Class"."""
    return Method(
        name=name,
        title=title,
        paper=paper,
        site="medflare.methods.fedavg.site:FedAvgSite",
        server=f"{__name__}.{server}",
        family="server rules",
    )


ROBUST = _rule(
    "robust",
    "Median, trimmed mean, Krum, geometric median or clipped updates",
    "Yin et al., ICML 2018",
    "robust:RobustServer",
)
