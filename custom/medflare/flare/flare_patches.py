"""Changes to FLARE 2.9's internals; docs/flare.md has measurements and says when each can go."""

import asyncio
import logging
import math
import random
import re
import socket
import sys
import threading
import time
import weakref
from contextlib import suppress
from functools import cache
from io import BytesIO
from pathlib import Path, PurePath
from typing import Any, NoReturn
from zipfile import ZipFile

from nvflare.apis.fl_constant import ReservedKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_common.np.np_downloader import ArrayConsumer
from nvflare.fuel.f3.cellnet import cell, net_agent
from nvflare.fuel.f3.cellnet.core_cell import CoreCell, make_reply
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey, MessagePropKey, MessageType, ReturnCode
from nvflare.fuel.f3.cellnet.fqcn import FQCN
from nvflare.fuel.f3.message import Message
from nvflare.fuel.f3.streaming.byte_receiver import RxTask
from nvflare.fuel.f3.streaming.cacheable import ItemConsumer
from nvflare.fuel.f3.streaming.stream_const import StreamHeaderKey
from nvflare.fuel.utils.config import ConfigFormat, ConfigLoader
from nvflare.fuel.utils.config_factory import ConfigFactory
from nvflare.fuel.utils.fobs import FOBSContextKey
from nvflare.fuel.utils.fobs.decomposers.via_downloader import ViaDownloaderDecomposer
from nvflare.private.admin_defs import error_reply
from nvflare.private.defs import CellChannel, RequestHeader, SysCommandTopic, new_cell_message
from nvflare.private.fed.app import default_app_validator
from nvflare.widgets.fed_event import FED_EVENT_TOPIC

_SIMULATOR = "nvflare.private.fed.app.simulator.simulator_runner"
# Above services, below the ports that systems hand out (Linux: from 32768).
_PORTS = range(10_000, 30_000)
_JOB_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
# Channels and topics by which the server alone may ask the server: events of FLARE end jobs.
_OF_THE_SERVER = {net_agent._CHANNEL, CellChannel.SERVER_PARENT_LISTENER, FED_EVENT_TOPIC}
_CHANNEL_AND_TOPIC = (
    *(MessageHeaderKey.CHANNEL, StreamHeaderKey.CHANNEL),
    *(MessageHeaderKey.TOPIC, StreamHeaderKey.TOPIC),
)
JSON_ONLY = "medflare reads JSON only"
_POLL_TIMEOUT = 30.0  # seconds; FLARE waits 300 s for the answer to a poll
# Of one party, unfinished at once. FLARE has 64 threads for those of all parties; a job's process
# of a site has a few.
_STREAMS = 16
_STREAM_BYTES = 2**33  # also of the arrays of a message
_BEGIN_TIMEOUT = 60.0  # seconds until the first part of a stream is there
_LOG = logging.getLogger(__name__)


class _RefusedFormat(ConfigLoader):
    """Stands where FLARE has a parser of HOCON or YAML.

    Both can read other files and environment variables, HOCON also URLs.
    """

    def load_config(self, file_path: str) -> NoReturn:
        raise ValueError(f"configuration {PurePath(file_path).name} refused: {JSON_ONLY}")

    def load_config_from_str(self, content: Any) -> NoReturn:
        raise ValueError(f"configuration in {self.format.value} refused: {JSON_ONLY}")

    load_config_from_dict = load_config_from_str


def parse_json_only() -> None:
    """Have FLARE parse configuration in JSON and nothing else, in this process.

    FLARE parses a job's configuration when the job is uploaded and when it is deployed, before it
    asks the party's app_validator.
    """
    for refused in (ConfigFormat.PYHOCON, ConfigFormat.OMEGACONF):
        ConfigFactory._fmt2Loader[refused] = _RefusedFormat(refused)
    # FLARE's own validator only looks whether the file is there, which `components.JobComponents`
    # does as well.
    default_app_validator._config_exists = lambda *args, **kwargs: ""


def search_kits_only() -> None:
    """Have FLARE search for a party's settings in startup/ and local/ of its kit, in this process.

    It searches all folders below the kit, or below the folder in which a person starts a command;
    so it would take comm_config.json of a job, which names Python files to run.
    """
    ConfigFactory.search_config_format = staticmethod(_search_kits_only)


_SEARCH = ConfigFactory.search_config_format
_OF_KITS = ("startup", "local")


def _search_kits_only(
    init_file_path: str, search_dirs: Any = None, target_fmt: ConfigFormat | None = None
) -> tuple[ConfigFormat | None, str | None]:
    """As FLARE's function, with the folders of a kit in place of the kit."""
    folders = [search_dirs] if isinstance(search_dirs, str) else search_dirs or []
    is_name = not PurePath(init_file_path).parent.parts
    if not folders and is_name:
        return None, None
    searched: list[str] = []
    for folder in folders:
        of_kit = [Path(folder, name) for name in _OF_KITS]
        if all(path.is_dir() for path in of_kit):
            searched += map(str, of_kit)
        else:
            searched.append(folder)
    return _SEARCH(init_file_path, searched, target_fmt)


@cache
def limit_other_parties() -> None:
    """Have FLARE's server accept from sites and people what is meant for it, in this process: no
    message to another site or in the name of another party, no command but for tasks and updates,
    no control of its network and of the states of jobs, no logs.

    A site takes a request that comes through the server for the server's, whoever sent it: to run
    `cat` or `grep` on any file, to delete a folder of its kit, to stop. The name of an endpoint is
    that of its certificate, which FLARE checks; the origin is what the sender says. The receiver of
    logs would write any file where the sender says.
    """
    from nvflare.app_common.logging.job_log_receiver import JobLogReceiver
    from nvflare.private.fed.server.fed_server import FederatedServer
    from nvflare.private.fed.server.server_command_agent import ServerCommandAgent
    from nvflare.private.fed.server.server_commands import ServerCommands

    validate = FederatedServer._validate_auth_headers
    execute = ServerCommandAgent._execute_command
    communicate = ServerCommandAgent._aux_communicate

    def validated(server: FederatedServer, message: Message) -> Message | None:
        sender = FQCN.get_root(message.get_prop(MessagePropKey.ENDPOINT).name)
        if sender == FQCN.ROOT_SERVER:
            return validate(server, message)
        origin = FQCN.get_root(message.get_header(MessageHeaderKey.ORIGIN))
        receiver = FQCN.get_root(message.get_header(MessageHeaderKey.DESTINATION))
        named = [message.get_header(key) for key in _CHANNEL_AND_TOPIC]
        asks = message.get_header(MessageHeaderKey.MSG_TYPE) == MessageType.REQ
        controls = asks and not _OF_THE_SERVER.isdisjoint(named)
        is_relayed = receiver not in (FQCN.ROOT_SERVER, sender)
        if origin != sender or is_relayed or controls:
            server.logger.warning(f"refused: a message from {sender}, as {origin}, to {receiver}")
            return make_reply(ReturnCode.AUTHENTICATION_ERROR, "the server does not pass this on")
        return validate(server, message)

    def executed(agent: ServerCommandAgent, request: Message) -> Message:
        sender = FQCN.get_root(request.get_header(MessageHeaderKey.ORIGIN))
        command = request.get_header(MessageHeaderKey.TOPIC)
        of_sites = ServerCommands.client_request_commands_names
        if sender != FQCN.ROOT_SERVER and command not in of_sites:
            agent.logger.warning(f"refused: {command!r} of {sender}")
            return make_reply(ReturnCode.AUTHENTICATION_ERROR, "this is the server's command")
        _name_sender(request)
        return execute(agent, request)

    def communicated(agent: ServerCommandAgent, request: Message) -> Message:
        _name_sender(request)
        return communicate(agent, request)

    def received(receiver: JobLogReceiver, data: bytes, stream: Any, fl_ctx: FLContext) -> None:
        sender = fl_ctx.get_peer_context().get_identity_name()
        receiver.logger.warning(f"refused: a log of {sender}")

    FederatedServer._validate_auth_headers = validated
    ServerCommandAgent._execute_command = executed
    ServerCommandAgent._aux_communicate = communicated
    JobLogReceiver._on_chunk_received = received


def _name_sender(request: Message) -> None:
    """Write the name of the party that sent a request over the name that the request gives."""
    sender = FQCN.get_root(request.get_header(MessageHeaderKey.ORIGIN))
    if not isinstance(request.payload, Shareable):
        request.payload = Shareable()  # FLARE refuses it
    if sender == FQCN.ROOT_SERVER:
        return
    properties = request.payload.get_peer_props()
    if isinstance(properties, dict):
        properties[ReservedKey.IDENTITY_NAME] = sender
    context = request.payload.get_peer_context()
    if isinstance(context, FLContext):
        context.put(ReservedKey.IDENTITY_NAME, sender, private=False, sticky=False)


@cache
def survive_messages() -> None:
    """Have FLARE survive what one party sends, in this process: a message that cannot be decoded,
    streams that do not end, arrays without end, and the wish to end the job.

    FLARE ends the job's process for an update that it cannot decode. It keeps what arrives of a
    stream, and gives it one of 128 threads for 300 s. It fetches the arrays of a message from where
    the message says.
    """
    from nvflare.private.fed.server.server_runner import ServerRunner

    decode = cell.decode_payload
    find_task = RxTask.find_or_create_task.__func__
    fetch = ViaDownloaderDecomposer._download_from_remote_cell
    consume = ItemConsumer.consume
    to_dict = ArrayConsumer._to_dict

    def decoded(message: Message, *words: Any, **context: Any) -> None:
        try:
            decode(message, *words, **context)
        except Exception as error:
            sender = message.get_header(MessageHeaderKey.ORIGIN)
            _LOG.warning(f"refused: a message of {sender} that cannot be decoded: {error}")
            message.payload = None

    def found_task(owner: type[RxTask], message: Message, of_cell: CoreCell) -> RxTask | None:
        refusal = _refusal_of_stream(message)
        if refusal:
            _LOG.warning(f"refused: {refusal}")
            return None
        is_new = _key_of_stream(message) not in RxTask.rx_task_map
        task = find_task(owner, message, of_cell)
        if is_new and task is not None:
            task.since = time.monotonic()
        return task

    def fetched(decomposer: ViaDownloaderDecomposer, context: dict[str, Any], ref: Any) -> Any:
        source = FQCN.get_root(ref["fqcn"])
        sender = FQCN.get_root(context[FOBSContextKey.MESSAGE].get_header(MessageHeaderKey.ORIGIN))
        if source != sender:
            raise ValueError(f"arrays of {source} in a message of {sender}")
        with _fetching(source):
            return fetch(decomposer, context, ref)

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

    ServerRunner.ABORT_RETURN_CODES = []  # by which a site would end the job for all
    ViaDownloaderDecomposer._download_from_remote_cell = fetched
    ItemConsumer.received = 0
    ItemConsumer.consume = consumed
    ArrayConsumer._to_dict = staticmethod(array_of)
    cell.decode_payload = decoded
    RxTask.since = math.inf  # when its first part arrived, as time.monotonic() gives it
    RxTask.find_or_create_task = classmethod(found_task)


@cache
def _fetching(party: str) -> threading.Lock:
    """Held while arrays of a party are fetched: those of one message at a time."""
    return threading.Lock()


def _key_of_stream(message: Message) -> tuple[Any, Any]:
    origin = message.get_header(MessageHeaderKey.ORIGIN)
    return origin, message.get_header(StreamHeaderKey.STREAM_ID)


def _refusal_of_stream(message: Message) -> str:
    """Why a part of a stream is not taken: its party has too many others, or too much in them."""
    party = FQCN.get_root(message.get_header(MessageHeaderKey.ORIGIN))
    if party == FQCN.ROOT_SERVER:
        return ""
    streams = 0
    size = 0
    with RxTask.map_lock:
        tasks = list(RxTask.rx_task_map.items())
    for key, task in tasks:
        is_finished = task.completed or task.failed
        if is_finished or FQCN.get_root(task.origin) != party:
            continue
        never_began = task.stream_future is None
        if never_began and time.monotonic() - task.since > _BEGIN_TIMEOUT:
            task._remove_task()
            continue
        streams += key != _key_of_stream(message)
        size += task.received_offset
        size += sum(len(payload or b"") for _, payload in list(task.out_seq_chunks.values()))
    if streams >= _STREAMS:
        return f"{party} has {streams} unfinished streams"
    if size > _STREAM_BYTES:
        return f"{party} has {size} bytes in unfinished streams"
    return ""


def connect_nowhere_else() -> None:
    """Have FLARE open no connection to an address that another party names, in this process.

    It would, in clear, and the other end may call itself the server.
    """
    CoreCell._add_adhoc_connector = lambda cell, to_cell, url: None


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


@cache
def obey_the_server_alone() -> None:
    """Have FLARE's client refuse administrative requests of other parties than the server, shell
    commands, and any that names a folder of the kit as its job, in this process.

    FLARE asks for a right only if the sender wants it, and deletes the folder of the kit that has a
    job's id.
    """
    from nvflare.private.fed.client.admin import FedAdminAgent

    dispatch = FedAdminAgent._dispatch_request

    def dispatched(agent: FedAdminAgent, request: Message) -> Message:
        refusal = _administrative_refusal(agent.cell.get_fqcn(), request)
        if not refusal:
            return dispatch(agent, request)
        agent.auditor.add_event(user="", action=f"refused {request.payload.topic}: {refusal}")
        return new_cell_message({}, error_reply(refusal))

    FedAdminAgent._dispatch_request = dispatched


def _administrative_refusal(cell: str, request: Message) -> str:
    """Why a site does not answer an administrative request; "" if it does. `cell`: the site's full
    name, below which those of its jobs are.
    """
    origin = request.get_header(MessageHeaderKey.ORIGIN)
    is_of_job = origin.startswith(f"{cell}.")
    if FQCN.get_root(origin) != FQCN.ROOT_SERVER and not is_of_job:
        return "it does not come from the server"
    asked = request.payload
    if asked.topic == SysCommandTopic.SHELL:
        return "medflare's sites run no shell command"
    job = asked.get_header(RequestHeader.JOB_ID)
    if job is not None and not _JOB_ID.fullmatch(job):
        return "it names no job"
    return ""


def share_cleanup_thread() -> None:
    """Let one thread remove all received streams of this process.

    FLARE starts a timer thread of 65 s for each.
    """
    RxTask._schedule_remove_task = _schedule_remove_task


def _schedule_remove_task(task: RxTask, ttl: float | None = None) -> None:
    with task.stop_lock:
        if task.cleanup_timer is None:  # which FLARE cancels if the stream is removed earlier
            seconds = task.completed_task_ttl if ttl is None else ttl
            loop = _cleanup_loop()
            task.cleanup_timer = loop.call_soon_threadsafe(
                loop.call_later, seconds, _remove, weakref.ref(task)
            )


def _remove(stream: "weakref.ref[RxTask]") -> None:
    task = stream()
    if task is not None:
        task._remove_task()


@cache
def _cleanup_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="stream_cleanup", daemon=True).start()
    return loop


class _ClientTasks(dict[str, Any]):
    """FLARE's map of the tasks that sites have fetched; removing one twice raises nothing."""

    def pop(self, key: str, default: Any = None) -> Any:
        return super().pop(key, default)


def survive_resends(communicator: Any) -> None:
    """Keep FLARE's task monitor alive when a site fetches its task twice.

    A site does so after a lost answer or a restart; the monitor would end by a KeyError.

    Without it FLARE keeps each later task and its model, and notices no dead site.
    """
    communicator._client_task_map = _ClientTasks(communicator._client_task_map)


def notice_lost_answers(fl_ctx: FLContext) -> None:
    """Let a site poll again 30 s after an answer was lost, instead of 300 s.

    An answer is lost, for example, in a cut network.
    """
    fl_ctx.get_engine().client.communicator.timeout = _POLL_TIMEOUT


def keep_ports_apart() -> None:
    """If this is a simulator, give its sites ports that the system hands out to no connection."""
    runner = sys.modules.get(_SIMULATOR)
    if runner:
        runner.get_open_ports = quiet_ports  # type: ignore[attr-defined]


def quiet_ports(number: int) -> list[int]:
    """Different free ports below those that the system hands out.

    Bound, never listened on: FLARE's forks would inherit a listening socket, and a site that
    connects to it is reset.
    """
    ports: set[int] = set()
    draw = random.SystemRandom()  # no seed: two simulators must not draw the same ports
    while len(ports) < number:
        port = draw.choice(_PORTS)
        with suppress(OSError), socket.socket() as bound:
            bound.bind(("localhost", port))
            ports.add(port)
    return sorted(ports)
