"""Methods: a room for each paper, a shelf of baselines, and what a method is made of.

What an author of a method needs can be imported from here: `Method`, the halves `SiteHalf` and `ServerHalf`, FedAvg's halves to
start from, and the words of their declarations.
"""

from typing import Any

from medflare.core.facade import public

_PUBLIC = {
    "Aggregation": "aggregation",
    "FedAvgServer": "fedavg.server",
    "FedAvgServerHyper": "fedavg.server",
    "FedAvgSite": "fedavg.site",
    "FedAvgSiteHyper": "fedavg.site",
    "Entry": "medflare.core.manifest",
    "Fact": "medflare.core.manifest",
    "Kept": "base",
    "Method": "method",
    "Phase": "medflare.core.manifest",
    "Plan": "base",
    "ServerContext": "base",
    "ServerHalf": "base",
    "ServerHyper": "base",
    "SiteHalf": "base",
    "SiteHyper": "base",
    "Step": "base",
    "get_method": "catalogue",
    "param": "medflare.core.hyper",
}


def __getattr__(name: str) -> Any:
    return public(__name__, _PUBLIC, name)
