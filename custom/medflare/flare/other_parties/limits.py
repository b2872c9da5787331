"""Bounds of what other parties can have this process read, keep and write."""

import json
import logging
import threading
import time
import zipfile
from collections import defaultdict
from functools import cache
from io import BytesIO
from pathlib import Path, PurePath
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
from nvflare.fuel.f3.message import Message
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
