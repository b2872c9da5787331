"""Bounds of the connections of other parties, and of what waits in them."""

import asyncio
import logging
import threading
from asyncio.sslproto import SSLProtocol
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from socket import SHUT_RDWR, socket
from ssl import SSLSocket
from typing import Any

from nvflare.fuel.f3.drivers import aio_http_driver, socket_conn
from nvflare.fuel.f3.drivers.connector_info import Mode
from nvflare.fuel.f3.drivers.driver_params import DriverParams
from nvflare.fuel.f3.drivers.socket_conn import ConnectionHandler
from nvflare.fuel.f3.drivers.tcp_driver import TcpStreamServer
from nvflare.fuel.f3.sfm.conn_manager import ConnManager
from nvflare.fuel.f3.sfm.constants import HandshakeKeys

from medflare.core.text import JsonDict, printable

_FRAME_BYTES = 2**24  # of streams' parts, which FLARE makes 1 MiB long
_WAITING = 2**12  # frames of one party that are not processed yet; a large one counts as several
_BYTES_OF_WEIGHT = 2**18
_NAME_BYTES = 2**12  # of an endpoint
_CONNECTIONS = 128  # of one party: a site's processes, a person's commands
_HANDSHAKES = 256  # unfinished ones of all who connect, as dozens of sites after a restart
_HANDSHAKE_TIMEOUT = 20.0  # seconds; asyncio's is 60
_LOG = logging.getLogger(__name__)


@cache
def bound_handshakes() -> None:
    """Have FLARE bound the number and the time of unfinished TLS handshakes, and wait for each in
    its own thread, in this process: it accepts connections of a party's own processes one by one,
    so that an idle connection of any account of the machine keeps them out; and who reaches the
    server, even without a certificate, has it open files until there are no more.
    """
    make = TcpStreamServer.__init__
    handle = ConnectionHandler.handle
    connect = SSLProtocol.connection_made
    complete = SSLProtocol._on_handshake_complete
    lose = SSLProtocol.connection_lost
    of_threads = Handshakes()
    of_loop = Handshakes()

    def made(server: TcpStreamServer, *words: Any) -> None:
        make(server, *words)
        if isinstance(server.socket, SSLSocket):
            # When a connection is accepted.
            server.socket.do_handshake_on_connect = False  # type: ignore[attr-defined]

    def handled(handler: ConnectionHandler) -> None:
        connection = handler.request
        if isinstance(connection, SSLSocket):
            of_threads.begin(connection, partial(socket.shutdown, connection, SHUT_RDWR))
            try:
                connection.settimeout(_HANDSHAKE_TIMEOUT)
                connection.do_handshake()
                connection.settimeout(None)
            except OSError as error:
                _LOG.warning(f"refused: a connection without a TLS handshake ({error})")
                return
            finally:
                of_threads.end(connection)
        handle(handler)

    def connected(protocol: Any, transport: Any) -> None:
        of_loop.begin(protocol, transport.abort)
        connect(protocol, transport)

    def completed(protocol: Any, error: Any) -> None:
        of_loop.end(protocol)
        complete(protocol, error)

    def lost(protocol: Any, error: Any) -> None:
        of_loop.end(protocol)
        lose(protocol, error)

    TcpStreamServer.__init__ = made
    ConnectionHandler.handle = handled
    SSLProtocol.connection_made = connected  # type: ignore[assignment,method-assign]
    SSLProtocol._on_handshake_complete = completed  # type: ignore[assignment,method-assign]
    SSLProtocol.connection_lost = lost  # type: ignore[assignment,method-assign]
    asyncio.constants.SSL_HANDSHAKE_TIMEOUT = _HANDSHAKE_TIMEOUT


@cache
def bound_connections() -> None:
    """Have FLARE take frames of bounded size, and a bounded number of connections of a party, in
    this process: it takes, and inflates, 2 GiB of anyone with a certificate, and keeps for ever
    what an endpoint says with its name.
    """
    open_connection = ConnManager.handle_new_connection
    read = ConnManager.get_dict_payload

    def name_read(prefix: Any, frame: Any) -> JsonDict:
        if len(frame) > _NAME_BYTES:
            raise ValueError(f"a name of more than {_NAME_BYTES} bytes")
        values = read(prefix, frame)
        return {HandshakeKeys.ENDPOINT_NAME: values[HandshakeKeys.ENDPOINT_NAME]}

    def opened(manager: ConnManager, connection: Any) -> None:
        party = _certified_name(connection)
        names = [_certified_name(other.conn) for other in list(manager.sfm_conns.values())]
        if party and names.count(party) >= _CONNECTIONS:
            _LOG.warning(printable(f"refused: {party} has {_CONNECTIONS} connections"))
            connection.close()
            return
        open_connection(manager, connection)

    ConnManager.handle_new_connection = opened
    ConnManager.get_dict_payload = staticmethod(name_read)
    aio_http_driver.MAX_FRAME_SIZE = _FRAME_BYTES
    socket_conn.MAX_FRAME_SIZE = _FRAME_BYTES


@cache
def bound_waiting_frames() -> None:
    """Have FLARE close a connection of a party of which too many frames wait, in this process: they
    wait in one queue, with those of all parties, and some are answered by a line of the log.
    """
    add = ConnManager.process_frame
    process = ConnManager.process_frame_task
    waiting: Counter[str] = Counter()  # party -> weight of its frames
    lock = threading.Lock()

    def added(manager: ConnManager, connection: Any, frame: Any) -> None:
        party = _connected_party(manager, connection)
        if party is None:
            add(manager, connection, frame)
            return
        with lock:
            is_taken = waiting[party] < _WAITING
            if is_taken:
                waiting[party] += _weight(frame)
        if is_taken:
            add(manager, connection, frame)
        elif not connection.conn.closing:
            _LOG.warning(printable(f"refused: too many frames of {party} at once"))
            connection.conn.close()

    def processed(manager: ConnManager, connection: Any, frame: Any) -> None:
        try:
            process(manager, connection, frame)
        finally:
            party = _connected_party(manager, connection)
            if party is not None:
                with lock:
                    waiting[party] -= _weight(frame)

    ConnManager.process_frame = added
    ConnManager.process_frame_task = processed


def _weight(frame: Any) -> int:
    return 1 + len(frame) // _BYTES_OF_WEIGHT


def _certified_name(connection: Any) -> str | None:
    """The name in the certificate at the other end; None without TLS."""
    name: str | None = connection.get_conn_properties().get(DriverParams.PEER_CN.value)
    return name


def _connected_party(manager: ConnManager, connection: Any) -> str | None:
    """The other party that has connected to this process; None if it is this party's own process,
    or this process has connected to it, as a site to the server.
    """
    if connection.conn.connector.mode != Mode.PASSIVE:
        return None
    party = _certified_name(connection.conn)
    here = manager.identity_resolver.resolve(manager.local_endpoint.name)
    return None if party == here else party


class Handshakes:
    """The last TLS handshakes that have begun; if too many are unfinished, the oldest is cut."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._unfinished: dict[Any, Callable[[], None]] = {}  # connection -> what cuts it

    def begin(self, connection: Any, cut: Callable[[], None]) -> None:
        """Note a new one."""
        with self._lock:
            self._unfinished[connection] = cut
            if len(self._unfinished) <= _HANDSHAKES:
                return
            oldest = next(iter(self._unfinished))
            cut_oldest = self._unfinished.pop(oldest)
        with suppress(OSError):
            cut_oldest()

    def end(self, connection: Any) -> None:
        """Note that one is done, or has failed."""
        with self._lock:
            self._unfinished.pop(connection, None)
