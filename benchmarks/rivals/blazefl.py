"""BlazeFL 2.0 simulating the federation that `compare.floor` trains by hand; imported only where it is installed."""

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from blazefl.core import IPCMode, ProcessPoolClientTrainer
from blazefl.core.utils import SHMHandle
from compare import hospital, network_of, sites_model, trained
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters


@dataclass
class Down:
    """What every site is sent."""

    weights: Tensor
    round: int


@dataclass
class Up:
    """What a site sends."""

    weights: Any  # a tensor, or BlazeFL's handle of one in shared memory
    images: int


class Trainer(ProcessPoolClientTrainer[Up, Down, int]):
    """The sites, two at a time, each in a process of its own; weights travel in shared memory.

    Args:
        weights: any, of the network's size.
    """

    num_parallels = 2
    device = "cpu"
    share_dir = Path()
    ipc_mode = IPCMode.SHARED_MEMORY

    def __init__(self, weights: Tensor):
        self.cache: list[Up] = []
        self.weights, self.manager = weights, mp.Manager()
        self.stop_event = self.manager.Event()

    def get_client_config(self, cid: int) -> int:
        """All that a site's process needs beside the images, which it has from the process that it is forked from."""
        return cid

    def prepare_uplink_package_buffer(self) -> Up:
        """Room for a site's answer."""
        return Up(torch.empty_like(self.weights), 0)

    @staticmethod
    def worker(
        config: int, payload: Down, device: str, stop_event: threading.Event, *, shm_buffer: Up
    ) -> Up:
        """A site's part of a round; its weights go into the buffer."""
        site = hospital(config)
        model = network_of(site)
        # All sites see the same memory.
        vector_to_parameters(payload.weights.clone(), model.parameters())
        state = trained(site, model.state_dict(), payload.round)
        shm_buffer.weights.copy_(
            torch.cat([state[name].reshape(-1) for name, _ in model.named_parameters()])
        )
        return Up(SHMHandle(), site.n["train"])

    def uplink_package(self) -> list[Up]:
        """The answers of the round."""
        found = self.cache
        self.cache = []
        return found


def run(sites: int, rounds: int) -> None:
    """FedAvg, weighted by images; BlazeFL leaves the mean to its user."""
    weights = parameters_to_vector(sites_model(sites).parameters()).detach()
    for number in range(sites):
        hospital(number)
    trainer = Trainer(weights)
    for round in range(rounds):
        trainer.local_process(Down(weights, round), list(range(sites)))
        packages = trainer.uplink_package()
        total = sum(package.images for package in packages)
        weights = torch.stack(
            [package.weights * (package.images / total) for package in packages]
        ).sum(dim=0)
    assert len(packages) == sites
    trainer.manager.shutdown()
