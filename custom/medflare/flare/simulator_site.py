"""FLARE's process of a simulated site, which takes orders of its own simulator alone.

`flare_patches.connect_sites_by_files` runs this file: a site's process finds the package that a job
brings along only later.
"""

import os
import time
from multiprocessing.connection import Connection, Listener

SOCKET = "_MEDFLARE_SIMULATOR_SOCKET"  # environment variable: where the process listens


class Clock:
    """Replaces FLARE's module `time`: waits at most 0.1 s between two looks."""

    time = staticmethod(time.time)

    @staticmethod
    def sleep(seconds: float) -> None:
        time.sleep(min(seconds, 0.1))


if __name__ == "__main__":
    from nvflare.fuel.f3.mpm import MainProcessMonitor
    from nvflare.private.fed.app.simulator import simulator_worker
    from nvflare.private.fed.client import client_runner

    path = os.environ.pop(SOCKET)

    class SiteListener(Listener):
        """Takes one connection, and removes its socket and the folder of it."""

        def __init__(self, port: object):
            super().__init__(path, "AF_UNIX")

        def accept(self) -> Connection:
            connection = super().accept()
            self.close()
            os.rmdir(os.path.dirname(path))
            return connection

    simulator_worker.Listener = SiteListener
    client_runner.time = Clock
    arguments = simulator_worker.parse_arguments()
    MainProcessMonitor.run(simulator_worker.main, run_dir=arguments.workspace, args=arguments)
