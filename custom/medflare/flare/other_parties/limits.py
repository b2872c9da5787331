"""Bounds of what other parties can have this process read, keep and write."""

import asyncio
import json
import logging
import threading
import time
import zipfile
from asyncio.sslproto import SSLProtocol
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from io import BytesIO
from pathlib import Path, PurePath
from socket import SHUT_RDWR, socket
from ssl import SSLSocket
from typing import Any
from zipfile import ZipFile

from nvflare.apis.fl_constant import WorkspaceConstants
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.job_def_manager import SimpleJobDefManager
from nvflare.apis.job_def import JobMetaKey
from nvflare.apis.shareable import Shareable
from nvflare.app_common.np.np_downloader import ArrayConsumer
from nvflare.app_common.streamers import file_streamer
from nvflare.fuel.f3.cellnet.core_cell import CoreCell
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey, MessagePropKey
from nvflare.fuel.f3.cellnet.fqcn import FQCN
from nvflare.fuel.f3.drivers import aio_http_driver, socket_conn
from nvflare.fuel.f3.drivers.connector_info import Mode
from nvflare.fuel.f3.drivers.driver_params import DriverParams
from nvflare.fuel.f3.drivers.socket_conn import ConnectionHandler
from nvflare.fuel.f3.drivers.tcp_driver import TcpStreamServer
from nvflare.fuel.f3.message import Message
from nvflare.fuel.f3.sfm.conn_manager import ConnManager
from nvflare.fuel.f3.sfm.constants import HandshakeKeys
from nvflare.fuel.f3.streaming import byte_receiver
from nvflare.fuel.f3.streaming.byte_receiver import RxTask
from nvflare.fuel.f3.streaming.cacheable import ItemConsumer
from nvflare.fuel.f3.streaming.stream_const import StreamHeaderKey
from nvflare.fuel.hci.server.hci import AdminServer
from nvflare.fuel.utils import zip_utils
from nvflare.fuel.utils.admin_name_utils import is_valid_admin_client_name
from nvflare.fuel.utils.fobs import FOBSContextKey, fobs, lobs
from nvflare.fuel.utils.fobs.decomposers.via_downloader import ViaDownloaderDecomposer
from nvflare.private.fed.server.job_meta_validator import JobMetaValidator

from medflare.core.files import refuse_bomb
from medflare.core.text import JsonDict, printable, printable_json
from medflare.flare.names import JOB_ID

# Of one party, unfinished at once. FLARE has 64 threads for those of all parties; a job's process
# of a site has a few.
_STREAMS = 16
_STREAM_BYTES = 2**32  # also of arrays of one kind in a message
_OUT_OF_ORDER_BYTES = 2**28  # FLARE sends 64 MiB of a stream ahead
_OBJECTS = 2**20  # lists, tables and what they hold in a message; one byte can be a table of 64
_LONGEST = 2**16  # of a list or table: up to 1024 unfinished ones lie in each other
_COMMAND_CHARACTERS = 2**20  # of a console's command
_FETCHED = 2  # messages with arrays; a site sends one at a time
_JOB_BYTES = 2**26  # unpacked, which FLARE holds once for each site
_DIRECTORY_BYTES = 2**21  # of the zip's directory: some ten thousand files, which may be empty
LARGEST_CONFIG = 2**20  # bytes of a file of a job's configuration
_META_DEPTH = 16  # of a job's metadata; and their length as JSON
_META_CHARACTERS = 2**18
_UPLOADS = 4  # of one party at once
_UPLOAD_BYTES = 2**29  # of a job, packed
_FRAME_BYTES = 2**24  # of streams' parts, which FLARE makes 1 MiB long
_WAITING = 2**12  # frames of one party that are not processed yet; a large one counts as several
_BYTES_OF_WEIGHT = 2**18
_NAME_BYTES = 2**12  # of an endpoint
_CONNECTIONS = 128  # of one party: a site's processes, a person's commands
_HANDSHAKES = 256  # unfinished ones of all who connect, as dozens of sites after a restart
_HANDSHAKE_TIMEOUT = 20.0  # seconds; asyncio's is 60
_BEGIN_TIMEOUT = 60.0  # seconds until the first part of a stream is there
_LONGEST_RETRY = 120.0  # seconds that a finished stream is kept, as its sender may send parts again
_LOG = logging.getLogger(__name__)


@cache
def bound_messages() -> None:
    """Have FLARE decode a bounded number of objects in a message, no file, and commands of bounded
    length, in this process: it writes a file where a link in a folder of known name leads to, and
    keeps it.
    """

    def decoded(content: bytes, manager: Any) -> Any:
        """Decode as `fobs.deserialize`, which has no limits."""
        fobs._register_decomposers()
        packer = fobs.Packer(manager)
        objects = 0

        def counted(values: Any) -> Any:
            nonlocal objects
            objects += 1 + len(values)
            if objects > _OBJECTS:
                raise ValueError(f"more than {_OBJECTS} objects")
            return values

        result = fobs.msgpack.unpackb(
            content,
            strict_map_key=False,
            object_hook=lambda table: packer.unpack(counted(table)),
            list_hook=counted,
            max_array_len=_LONGEST,
            max_map_len=_LONGEST,
        )
        manager.post_process()
        return result

    def refuse_file() -> str:
        raise ValueError("a file")

    connect = AdminServer._create_conn

    def connected(server: AdminServer, command: str, *words: Any) -> Any:
        if len(command) > _COMMAND_CHARACTERS:
            _LOG.warning(f"refused: a command of {len(command)} characters")
            command = ""  # which is invalid
        return connect(server, command, *words)

    AdminServer._create_conn = connected
    lobs.deserialize = decoded
    lobs.get_datum_dir = refuse_file


@cache
def bound_handshakes() -> None:
    """Have FLARE bound the number and the time of unfinished TLS handshakes, and wait for each in
    its own thread, in this process: it accepts connections of a party's own processes one by one,
    so that any account of the machine keeps them out by silence; and who reaches the server, even
    without a certificate, has it open files until there are no more.
    """
    make = TcpStreamServer.__init__
    handle = ConnectionHandler.handle
    connect = SSLProtocol.connection_made
    complete = SSLProtocol._on_handshake_complete
    lose = SSLProtocol.connection_lost
    of_threads, of_loop = Handshakes(), Handshakes()

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
        party = connection.get_conn_properties().get(DriverParams.PEER_CN.value)
        count = 0
        for other in list(manager.sfm_conns.values()):
            count += other.conn.get_conn_properties().get(DriverParams.PEER_CN.value) == party
        if party and count >= _CONNECTIONS:
            _LOG.warning(printable(f"refused: {party} has {count} connections"))
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
            waiting[party] += is_taken * _weight(frame)
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


def _connected_party(manager: ConnManager, connection: Any) -> str | None:
    """The other party that has connected to this process; None if it is this party's own process,
    or this process has connected to it, as a site to the server.
    """
    if connection.conn.connector.mode != Mode.PASSIVE:
        return None
    party = connection.conn.get_conn_properties().get(DriverParams.PEER_CN.value)
    own = manager.identity_resolver.resolve(manager.local_endpoint.name)
    return None if party == own else party


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


@cache
def bound_streams() -> None:
    """Have FLARE take a bounded number of unfinished streams, and bytes of them, from a party, in
    this process: it keeps what arrives of a stream, and gives it one of 128 threads for 300 s.
    """
    find_task = RxTask.find_or_create_task.__func__
    open_streams = OpenStreams()

    def found_task(owner: type[RxTask], message: Message, of_cell: CoreCell) -> RxTask | None:
        refusal = open_streams.refusal(message)
        if refusal:
            _LOG.warning(f"refused: {refusal}")
            return None
        is_new = _key_of_stream(message) not in RxTask.rx_task_map
        task = find_task(owner, message, of_cell)
        if is_new and task is not None:
            open_streams.add(message, task)
        return task

    byte_receiver.MAX_COMPLETED_TASK_TTL = _LONGEST_RETRY
    RxTask.find_or_create_task = classmethod(found_task)


@cache
def bound_arrays() -> None:
    """Have FLARE fetch the arrays of a message from its sender alone, bounded, in this process: it
    fetches them from where the message says before anyone has looked at it.
    """
    fetch = ViaDownloaderDecomposer._download_from_remote_cell
    consume = ItemConsumer.consume
    to_dict = ArrayConsumer._to_dict

    def fetched(decomposer: ViaDownloaderDecomposer, context: dict[str, Any], ref: Any) -> Any:
        source = FQCN.get_root(ref["fqcn"])
        sender = FQCN.get_root(context[FOBSContextKey.MESSAGE].get_header(MessageHeaderKey.ORIGIN))
        if source != sender:
            raise ValueError(f"arrays of {source} in a message of {sender}")
        fetching = _fetching(source)
        if not fetching.acquire(blocking=False):  # each that waits would hold a thread of FLARE
            raise ValueError(f"{source} has other messages with arrays")
        try:
            return fetch(decomposer, context, ref)
        finally:
            fetching.release()

    def consumed(consumer: ItemConsumer, ref: str, state: Any, items: list[bytes]) -> Any:
        consumer.received += sum(map(len, items))
        if consumer.received > _STREAM_BYTES:
            raise ValueError(f"arrays of more than {_STREAM_BYTES} bytes")
        return consume(consumer, ref, state, items)

    def array_of(item: bytes) -> dict[str, Any]:
        with ZipFile(BytesIO(item)) as archive:
            if sum(member.file_size for member in archive.infolist()) > len(item):
                raise ValueError("a compressed array")
        return to_dict(item)

    ViaDownloaderDecomposer._download_from_remote_cell = fetched
    ItemConsumer.received = 0
    ItemConsumer.consume = consumed
    ArrayConsumer._to_dict = staticmethod(array_of)


@cache
def bound_files() -> None:
    """Have FLARE bound what it unpacks of a job and what it takes of files, in this process: it
    unpacks a job before it asks anyone, and keeps each file that anyone uploads.
    """
    last_part: dict[Any, float] = {}  # file that is uploaded -> when a part of it came
    open_file = file_streamer._ChunkConsumerFactory.get_consumer
    close = file_streamer._ChunkConsumer.finalize
    check_entries = zip_utils._validate_zip_entries
    upload = AdminServer._process_upload
    take_part = file_streamer._ChunkConsumer.consume

    def checked_entries(archive: ZipFile, folder: str) -> None:
        refuse_bomb(archive, _JOB_BYTES)
        check_entries(archive, folder)

    def uploaded(server: Any, stream: Any, fl_ctx: FLContext, **words: Any) -> Any:
        try:
            return upload(server, stream, fl_ctx, **words)
        finally:
            location = file_streamer.FileStreamer.get_file_location(stream)
            if location:
                Path(location).unlink(missing_ok=True)

    def opened(factory: Any, stream: Any, fl_ctx: FLContext) -> Any:
        for file, seconds in list(last_part.items()):
            if time.monotonic() - seconds > _BEGIN_TIMEOUT:
                last_part.pop(file, None)
                file.file.close()
                Path(file.file.name).unlink(missing_ok=True)
        peer = fl_ctx.get_peer_context()
        party = peer.get_identity_name() if peer else ""
        if [file.party for file in last_part].count(party) >= _UPLOADS:
            raise ValueError(f"{party} uploads {_UPLOADS} files already")
        file = open_file(factory, stream, fl_ctx)
        file.party = party
        last_part[file] = time.monotonic()
        return file

    def part_taken(file: Any, part: Shareable, *context: Any) -> Any:
        last_part[file] = time.monotonic()
        if file.received_size > _UPLOAD_BYTES:
            raise ValueError(f"a file of more than {_UPLOAD_BYTES} bytes")
        return take_part(file, part, *context)

    def closed(file: Any, *context: Any) -> None:
        last_part.pop(file, None)
        close(file, *context)

    zip_utils._validate_zip_entries = checked_entries
    AdminServer._process_upload = uploaded
    file_streamer._ChunkConsumerFactory.get_consumer = opened
    file_streamer._ChunkConsumer.consume = part_taken
    file_streamer._ChunkConsumer.finalize = closed


@cache
def bound_metadata() -> None:
    """Have FLARE take a job's directory, configuration and metadata of bounded size alone, in this
    process: it parses them before it asks anyone, metadata of all jobs for each console every
    second, and starts no other job while it unpacks. A job's id is no other name, whose folder of
    the kit FLARE would replace.
    """
    validate = JobMetaValidator.validate
    check_job = JobMetaValidator._validate_zf
    create = SimpleJobDefManager.create

    def validated(validator: JobMetaValidator, job: str, packed: Any) -> tuple[bool, str, JsonDict]:
        with BytesIO(packed) if isinstance(packed, bytes) else Path(packed).open("rb") as file:
            end = zipfile._EndRecData(file)  # type: ignore[attr-defined]
        if end and end[zipfile._ECD_SIZE] > _DIRECTORY_BYTES:  # type: ignore[attr-defined]
            return False, f"the names of its files have more than {_DIRECTORY_BYTES} bytes", {}
        return validate(validator, job, packed)

    def checked(validator: JobMetaValidator, job: str, archive: ZipFile) -> Any:
        for member in archive.infolist():
            path = PurePath(member.filename)
            inside = path.parts[len(PurePath(job).parts) :]  # app, its folder, ...
            is_code = inside[1:2] == (WorkspaceConstants.CUSTOM_FOLDER_NAME,)
            # FLARE reads config_fed_server.json.default, too.
            is_config = ".json" in path.suffixes and not is_code
            if is_config and member.file_size > LARGEST_CONFIG:
                raise ValueError(f"{printable(path.name)} has more than {LARGEST_CONFIG} bytes")
        meta = check_job(validator, job, archive)
        _check_metadata(meta)
        return meta

    def created(manager: Any, meta: JsonDict, content: Any, fl_ctx: FLContext) -> JsonDict:
        _check_metadata(meta)  # a console's command adds some
        return create(manager, meta, content, fl_ctx)

    JobMetaValidator.validate = validated
    JobMetaValidator._validate_zf = checked
    SimpleJobDefManager.create = created


def _check_metadata(meta: JsonDict) -> None:
    """Raise ValueError for large metadata of a job, or for an id that is no job's."""
    job = meta.get(JobMetaKey.JOB_ID.value)
    if job and not JOB_ID.fullmatch(str(job)):
        raise ValueError("job_id is not as FLARE makes it; leave it out")
    printable_json(meta, _META_DEPTH)
    if len(json.dumps(meta)) > _META_CHARACTERS:
        raise ValueError(f"metadata of more than {_META_CHARACTERS} characters")


@cache
def _fetching(party: str) -> threading.Semaphore:
    """Held while arrays of a party are fetched, those of few messages at a time."""
    return threading.Semaphore(_FETCHED)


def _party_of(message: Message) -> str:
    """The party that sent a message; a person by the name in the certificate, as each session of a
    person has a random one.
    """
    origin = FQCN.get_root(message.get_header(MessageHeaderKey.ORIGIN))
    if is_valid_admin_client_name(origin):
        return message.get_prop(MessagePropKey.COMMON_NAME) or "a person"
    return origin


def _key_of_stream(message: Message) -> tuple[Any, Any]:
    origin = message.get_header(MessageHeaderKey.ORIGIN)
    return origin, message.get_header(StreamHeaderKey.STREAM_ID)


class OpenStreams:
    """The unfinished streams of each party to this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Party -> its streams, each with when its first part came, as time.monotonic() gives it.
        self._streams: defaultdict[str, list[tuple[RxTask, float]]] = defaultdict(list)

    def add(self, message: Message, task: RxTask) -> None:
        """Take a new stream, whose first part is this message."""
        with self._lock:
            self._streams[_party_of(message)].append((task, time.monotonic()))

    def refusal(self, message: Message) -> str | None:
        """Why a part of a stream is not taken: its party has too many others, or too much in them;
        None if it is.
        """
        party = _party_of(message)
        if party == FQCN.ROOT_SERVER:
            return None
        with self._lock:
            self._streams[party] = list(filter(_is_open, self._streams[party]))
            tasks = [task for task, _ in self._streams[party]]
        others = 0
        size = 0
        out_of_order = 0
        for task in tasks:
            others += (task.origin, task.sid) != _key_of_stream(message)
            size += task.received_offset
            for _, payload in list(task.out_seq_chunks.values()):
                out_of_order += len(payload or b"")
        if others >= _STREAMS:
            return f"{party} has {others} unfinished streams"
        if size > _STREAM_BYTES or out_of_order > _OUT_OF_ORDER_BYTES:
            return f"{party} has {size + out_of_order} bytes in unfinished streams"
        return None


def _is_open(stream: tuple[RxTask, float]) -> bool:
    """Whether a stream is unfinished; one that never began is removed after some time."""
    task, since = stream
    if task.completed or task.failed:
        return False
    never_began = task.stream_future is None
    if never_began and time.monotonic() - since > _BEGIN_TIMEOUT:
        task._remove_task()
        return False
    return True


@cache
def keep_downloads_inside() -> None:
    """Have FLARE's console write what it downloads into its own folder, in this process: the server
    names the files.
    """
    from nvflare.fuel.hci.client.file_transfer import FileTransferModule

    pull = FileTransferModule.pull_binary_file

    def tx_path(module: FileTransferModule, tx_id: str, folder_name: str) -> str:
        name = f"{folder_name}__{tx_id}"
        if PurePath(name).name != name:
            raise RuntimeError(f"the server names a folder outside of the download, {name!r}")
        return str(Path(module.download_dir, name))

    def pulled(module: FileTransferModule, args: list[str], ctx: Any) -> Any:
        folder = Path(module._tx_path(args[2], args[4])).resolve()
        if not Path(folder, args[5]).resolve().is_relative_to(folder):
            raise RuntimeError(f"the server names a file outside of the download, {args[5]!r}")
        return pull(module, args, ctx)

    FileTransferModule._tx_path = tx_path
    FileTransferModule.pull_binary_file = pulled
