"""Flower's simulation (flwr 1.41, on Ray) of the federation that `compare.floor` trains by hand."""

import os
from typing import Any

from compare import hospital, sites_model, trained


def run(sites: int, rounds: int) -> None:
    """FedAvg of Flower's own strategy; two sites at a time, each in an actor of Ray on one core."""
    os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    client = ClientApp()
    server = ServerApp()
    counted: list[int] = []

    @client.train()
    def train(message: Message, context: Context) -> Message:
        site = hospital(int(context.node_config["partition-id"]))
        state = trained(
            site,
            message.content["arrays"].to_torch_state_dict(),
            message.content["config"]["server-round"],
        )
        metrics = MetricRecord({"num-examples": site.n["train"]})
        return Message(
            content=RecordDict({"arrays": ArrayRecord(state), "metrics": metrics}), reply_to=message
        )

    @server.main()
    def serve(grid: Grid, context: Context) -> None:
        strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=sites, min_available_nodes=sites)
        result = strategy.start(
            grid=grid,
            initial_arrays=ArrayRecord(sites_model(sites).state_dict()),
            num_rounds=rounds,
        )
        counted.append(len(result.train_metrics_clientapp))

    backend: dict[str, Any] = {
        "init_args": {"num_cpus": 2},
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
    }
    run_simulation(server, client, num_supernodes=sites, backend_config=backend)
    assert counted == [rounds], "Flower logs what went wrong and goes on"
