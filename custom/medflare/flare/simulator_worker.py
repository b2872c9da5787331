"""FLARE's process of a simulated site, which takes orders of its own simulator alone.

`flare_patches.authenticate_sites` starts it.
"""

import os
from functools import partial
from multiprocessing.connection import Listener

from nvflare.fuel.f3.mpm import MainProcessMonitor
from nvflare.private.fed.app.simulator import simulator_worker

from medflare.flare.names import SIMULATOR_KEY

if __name__ == "__main__":
    key = bytes.fromhex(os.environ.pop(SIMULATOR_KEY))
    simulator_worker.Listener = partial(Listener, authkey=key)
    arguments = simulator_worker.parse_arguments()
    MainProcessMonitor.run(simulator_worker.main, run_dir=arguments.workspace, args=arguments)
