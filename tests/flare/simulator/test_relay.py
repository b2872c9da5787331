"""What a process of the simulator asks the host for."""

import inspect
import json
import threading
from multiprocessing.connection import Listener

import pytest
from nvflare.private.fed.app.simulator import simulator_worker

from medflare.core.errors import MedflareError
from medflare.flare.simulator.relay import Relay


def test_a_fork_gets_the_gpu_that_flare_gave_its_sites_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    relay, asked = Relay(0), list[dict[str, object]]()
    relay.folder.mkdir()

    def host() -> None:
        with listener.accept() as connection:
            asked.append(json.loads(connection.recv_bytes()))

    try:
        with Listener(relay.address, family="AF_UNIX") as listener:
            answering = threading.Thread(target=host)
            answering.start()
            with pytest.raises(MedflareError, match="the simulator computes is gone"):
                relay.connected("site", {"name": "CS"})
            answering.join()
    finally:
        relay.folder.rmdir()
    assert asked == [{"kind": "site", "spec": {"name": "CS"}, "devices": "3"}]
    assert 'os.environ["CUDA_VISIBLE_DEVICES"] = args.gpu' in inspect.getsource(simulator_worker), "FLARE's name for it"
