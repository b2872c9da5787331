"""FLARE's process of a simulated site, which takes orders of its own simulator alone.

`flare_patches.connect_sites_by_files` runs this file: a site's process finds the package that a job
brings along only later.
"""

import os
from multiprocessing.connection import Listener

FOLDER = "_MEDFLARE_SIMULATOR_SOCKETS"  # environment variable: the folder of the sites' sockets


def socket_at(folder: str, port: int) -> str:
    """The path of the socket of the site that FLARE gives this port."""
    return os.path.join(folder, str(port))


if __name__ == "__main__":
    from nvflare.fuel.f3.mpm import MainProcessMonitor
    from nvflare.private.fed.app.simulator import simulator_worker

    folder = os.environ.pop(FOLDER)

    def listener(address: tuple[str, int]) -> Listener:
        return Listener(socket_at(folder, address[1]), "AF_UNIX")

    simulator_worker.Listener = listener
    arguments = simulator_worker.parse_arguments()
    MainProcessMonitor.run(simulator_worker.main, run_dir=arguments.workspace, args=arguments)
