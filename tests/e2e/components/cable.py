"""A network cable between a site and the server that a test can pull: a forwarder on loopback."""

import contextlib
import socket
import threading


class Cable:
    """Forwards connections to `port`; `pull` cuts all of them and refuses new ones until `plug`."""

    def __init__(self, port: int):
        self._target = port
        self._plugged = threading.Event()
        self._plugged.set()
        self._ends: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def pull(self) -> None:
        self._plugged.clear()
        self._hang_up()

    def plug(self) -> None:
        self._plugged.set()

    def close(self) -> None:
        self._listener.close()
        self._hang_up()

    def _hang_up(self) -> None:
        while self._ends:
            end = self._ends.pop()
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                near, _ = self._listener.accept()
                if not self._plugged.is_set():
                    near.close()
                    continue
                far = socket.create_connection(("127.0.0.1", self._target))
                self._ends += [near, far]
                for one, other in ((near, far), (far, near)):
                    threading.Thread(target=_forward, args=(one, other), daemon=True).start()


def _forward(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
