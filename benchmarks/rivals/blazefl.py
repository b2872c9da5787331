"""BlazeFL 2.0 simulating the federation that `compare.floor` trains by hand."""

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from compare import hospital, sites_model, trained
from torch import Tensor, nn
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


def run(sites: int, rounds: int) -> None:
    """Two sites at a time, each in a process of its own; weights travel in shared memory. BlazeFL leaves the average to its user."""
    import torch.multiprocessing as mp
    from blazefl.core import IPCMode, ProcessPoolClientTrainer
    from blazefl.core.utils import SHMHandle

    class Trainer(ProcessPoolClientTrainer[Up, Down, int]):  # type: ignore[misc]  # skipped by mypy where it is not installed
        """The sites."""

        num_parallels, device, share_dir, ipc_mode = 2, "cpu", Path(), IPCMode.SHARED_MEMORY

        def __init__(self, weights: Tensor):
            self.cache: list[Up] = []
            self.weights, self.manager = weights, mp.Manager()
            self.stop_event = self.manager.Event()

        def get_client_config(self, cid: int) -> int:
            return cid

        def prepare_uplink_package_buffer(self) -> Up:
            return Up(torch.empty_like(self.weights), 0)

        @staticmethod
        def worker(config: int, payload: Down, device: str, stop_event: threading.Event, *, shm_buffer: Up) -> Up:
            return site_round(config, payload, shm_buffer, SHMHandle())

        def uplink_package(self) -> list[Up]:
            found, self.cache = self.cache, []
            return found

    weights = parameters_to_vector(sites_model(sites).parameters()).detach()
    for number in range(sites):
        hospital(number)  # its images: the processes of every round are forked from this one
    trainer = Trainer(weights)
    for round in range(rounds):
        trainer.local_process(Down(weights, round), list(range(sites)))
        packages = trainer.uplink_package()
        total = sum(package.images for package in packages)
        weights = torch.stack([package.weights * (package.images / total) for package in packages]).sum(dim=0)
    assert len(packages) == sites
    trainer.manager.shutdown()


def site_round(number: int, down: Down, buffer: Up, handle: object) -> Up:
    """A site's part of a round, in a process of BlazeFL's pool; its weights go into the buffer."""
    site = hospital(number)
    model: nn.Module = site.network()
    vector_to_parameters(down.weights, model.parameters())
    state = trained(site, model.state_dict(), down.round)
    buffer.weights.copy_(torch.cat([tensor.reshape(-1) for tensor in state.values()]))
    return Up(handle, site.n["train"])
