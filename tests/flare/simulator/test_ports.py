"""Sites of a simulator listen on ports that the system gives to nobody else."""

import inspect
import os
import socket
from pathlib import Path

import pytest
from nvflare.private.fed.app.simulator import simulator_runner

from medflare.flare.simulator.ports import keep_ports_apart, quiet_ports

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def test_ports_are_free_and_below_those_that_the_system_hands_out() -> None:
    ports = quiet_ports(3)
    assert len(set(ports)) == 3
    if RANGE.exists():
        assert max(ports) < int(RANGE.read_text().split()[0])
    for port in ports:
        socket.create_server(("localhost", port)).close()


def test_a_port_in_use_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        draws = iter([port, port, 12_345, 12_346])
        monkeypatch.setattr("random.SystemRandom.randrange", lambda *_: next(draws))
        assert quiet_ports(1)[0] in (12_345, 12_346)


def test_a_process_that_is_just_being_forked_lets_nobody_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds what looked at the port, and FLARE, which tries to reach the site's process there, must not reach that."""
    copies: list[int] = []
    close = socket.socket.close

    def copied(self: socket.socket) -> None:
        copies.append(os.dup(self.fileno()))
        close(self)

    with monkeypatch.context() as forking:
        forking.setattr(socket.socket, "close", copied)
        ports = quiet_ports(2)
    try:
        for port in ports:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("localhost", port))
    finally:
        for copy in copies:
            os.close(copy)
    assert len(copies) >= len(ports)


def test_the_simulator_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where another FLARE asks for its ports in another way."""
    source = inspect.getsource(simulator_runner.SimulatorClientRunner.do_one_task)
    assert "get_open_ports(1)[0]" in source
    monkeypatch.setattr(simulator_runner, "get_open_ports", simulator_runner.get_open_ports)
    keep_ports_apart()
    assert simulator_runner.get_open_ports is quiet_ports
