"""A method of another distribution than medflare: FedAvg whose server goes a part of the way only."""

from medflare.methods import Method

METHOD = Method(
    name="damped_fedavg",
    title="Federated averaging with a damped server step",
    paper="nobody's",
    site="medflare.methods.fedavg.site:FedAvgSite",
    server="damped_fedavg.server:DampedServer",
)
