"""FLARE's process of a simulated site, which takes orders of its own simulator alone.

`flare_patches.authenticate_sites` runs this file: a site's process finds the package that a job
brings along only later.
"""

import os
from functools import partial
from multiprocessing.connection import Listener

KEY = "_MEDFLARE_SIMULATOR_KEY"  # environment variable: the site's key, in hexadecimal

if __name__ == "__main__":
    from nvflare.fuel.f3.mpm import MainProcessMonitor
    from nvflare.private.fed.app.simulator import simulator_worker

    key = bytes.fromhex(os.environ.pop(KEY))
    simulator_worker.Listener = partial(Listener, authkey=key)
    arguments = simulator_worker.parse_arguments()
    MainProcessMonitor.run(simulator_worker.main, run_dir=arguments.workspace, args=arguments)
