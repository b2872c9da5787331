"""Changes to FLARE 2.9's internals that bound what other parties can do: see docs/flare.md."""

import json
import logging
import re
import secrets
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from io import BytesIO
from pathlib import Path, PurePath
from typing import Any
from zipfile import ZipFile

from nvflare.apis.client import Client
from nvflare.apis.fl_constant import ReservedKey, RunProcessKey, WorkspaceConstants
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.job_def_manager import SimpleJobDefManager
from nvflare.apis.job_def import Job, JobMetaKey
from nvflare.apis.shareable import Shareable
from nvflare.apis.workspace import Workspace
from nvflare.app_common.job_schedulers.job_scheduler import DefaultJobScheduler
from nvflare.app_common.np.np_downloader import ArrayConsumer
from nvflare.app_common.streamers import file_streamer
from nvflare.fuel.f3.cellnet import cell, core_cell, net_agent
from nvflare.fuel.f3.cellnet.core_cell import CoreCell, make_reply
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey, MessagePropKey, MessageType, ReturnCode
from nvflare.fuel.f3.cellnet.fqcn import FQCN
from nvflare.fuel.f3.cellnet.net_manager import NetManager
from nvflare.fuel.f3.comm_error import CommError
from nvflare.fuel.f3.drivers.driver_params import DriverParams
from nvflare.fuel.f3.endpoint import Endpoint
from nvflare.fuel.f3.message import Message
from nvflare.fuel.f3.sfm.conn_manager import ConnManager
from nvflare.fuel.f3.sfm.constants import HandshakeKeys
from nvflare.fuel.f3.streaming import byte_receiver
from nvflare.fuel.f3.streaming.byte_receiver import RxTask
from nvflare.fuel.f3.streaming.cacheable import ItemConsumer
from nvflare.fuel.f3.streaming.stream_const import StreamHeaderKey
from nvflare.fuel.hci.reg import CommandModuleSpec
from nvflare.fuel.hci.server.hci import AdminServer
from nvflare.fuel.sec.audit import Auditor
from nvflare.fuel.utils import zip_utils
from nvflare.fuel.utils.admin_name_utils import is_valid_admin_client_name
from nvflare.fuel.utils.fobs import FOBSContextKey, fobs, lobs
from nvflare.fuel.utils.fobs.decomposers.via_downloader import ViaDownloaderDecomposer
from nvflare.private.admin_defs import Message as AdminMessage
from nvflare.private.admin_defs import MsgHeader, error_reply
from nvflare.private.admin_defs import ReturnCode as AdminReturnCode
from nvflare.private.defs import (
    ERROR_MSG_PREFIX,
    CellChannel,
    CellChannelTopic,
    CellMessageHeaderKeys,
    ClientType,
    JobFailureMsgKey,
    RequestHeader,
    SysCommandTopic,
    TrainingTopic,
    new_cell_message,
)
from nvflare.private.fed.server.job_meta_validator import JobMetaValidator
from nvflare.private.fed.server.message_send import ClientReply
from nvflare.private.scheduler_constants import ShareableHeader
from nvflare.widgets.fed_event import FED_EVENT_TOPIC

from medflare.core.files import refuse_bomb
from medflare.core.text import JsonDict, printable, printable_json, reason_line
from medflare.data.local import find_private_folder
from medflare.flare.names import JOB_ID

# Channels and topics by which the server alone may ask the server: events of FLARE end jobs, and
# the messages in a bulk are not looked at.
_OF_THE_SERVER = {
    net_agent._CHANNEL,
    CellChannel.SERVER_PARENT_LISTENER,
    FED_EVENT_TOPIC,
    core_cell._TOPIC_BULK,
}
# Of FLARE's network at a site; others use any memory, or have it connect elsewhere.
_OF_NETWORK = {net_agent._TOPIC_HEARTBEAT, net_agent._TOPIC_STOP, net_agent._TOPIC_STOP_CELL}
# What a site alone, and a person alone, may say to the server, beside its registration.
_OF_SITES = {CellChannelTopic.HEART_BEAT, CellChannelTopic.REPORT_JOB_FAILURE}
_OF_PEOPLE = {CellChannel.HCI}
_CHANNEL_AND_TOPIC = (
    *(MessageHeaderKey.CHANNEL, StreamHeaderKey.CHANNEL),
    *(MessageHeaderKey.TOPIC, StreamHeaderKey.TOPIC),
)
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
LARGEST_CONFIG = 2**20  # bytes of a file of a job's configuration
_TOKEN = 1000  # characters of a token for a site's resources, which a job's metadata repeat
_META_DEPTH = 16  # of a job's metadata; and their length as JSON
_META_CHARACTERS = 2**18
_UPLOADS = 4  # of one party at once
_UPLOAD_BYTES = 2**29  # of a job, packed
_BEGIN_TIMEOUT = 60.0  # seconds until the first part of a stream is there
_LONGEST_RETRY = 120.0  # seconds that a finished stream is kept, as its sender may send parts again
_NO_FIELDS = str.maketrans("[]", "()")  # FLARE writes a field of audit.log in brackets
_UNPACKED = re.compile("[0-9a-f]{16}")  # the end of the name of a job's folder while it is checked
_LOG = logging.getLogger(__name__)


def protect_from_other_parties() -> None:
    """Have FLARE bound what other parties can do to this process, which is a party's or a job's."""
    connect_nowhere_else()
    limit_other_parties()
    obey_the_server_alone()
    authorize_before_deployment()
    start_jobs_without_refusing_sites()
    audit_line_by_line()
    survive_messages()
    schedule_each_job_alone()
    bound_messages()
    bound_streams()
    bound_arrays()
    bound_files()
    bound_metadata()


@cache
def limit_other_parties() -> None:
    """Have FLARE's server accept from sites and people what is meant for it, in this process: no
    message to another site or in the name of another party, no command but for tasks and updates,
    no control of its network, of the parties' networks and of the states of jobs, no logs.

    A site takes a request that comes through the server for the server's, whoever sent it: to run
    `cat` or `grep` on any file, to delete a folder of its kit, to stop. The name of an endpoint is
    that of its certificate, which FLARE checks; the origin is what the sender says. The receiver of
    logs would write any file where the sender says.
    """
    from nvflare.app_common.logging.job_log_receiver import JobLogReceiver
    from nvflare.private.fed.server.fed_server import FederatedServer
    from nvflare.private.fed.server.server_command_agent import ServerCommandAgent
    from nvflare.private.fed.server.server_commands import ServerCommands
    from nvflare.private.fed.server.server_engine import ServerEngine

    validate = FederatedServer._validate_auth_headers
    execute = ServerCommandAgent._execute_command
    communicate = ServerCommandAgent._aux_communicate
    handle = ServerEngine._handle_aux_message

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
        poses = _poses_as_another(message, sender, named)
        if origin != sender or is_relayed or controls or poses:
            party = message.get_prop(MessagePropKey.COMMON_NAME) or sender
            topic = message.get_header(MessageHeaderKey.TOPIC)
            refused = f"refused: {topic} from {party}, as {origin}, to {receiver}"
            server.logger.warning(printable(refused))
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

    def handled(engine: ServerEngine, request: Message) -> Message:
        _name_sender(request)
        return handle(engine, request)

    def received(receiver: JobLogReceiver, data: bytes, stream: Any, fl_ctx: FLContext) -> None:
        sender = fl_ctx.get_peer_context().get_identity_name()
        receiver.logger.warning(f"refused: a log of {sender}")

    FederatedServer._validate_auth_headers = validated
    ServerCommandAgent._execute_command = executed
    ServerCommandAgent._aux_communicate = communicated
    ServerEngine._handle_aux_message = handled
    JobLogReceiver._on_chunk_received = received
    update = ConnManager.update_endpoint

    def updated(manager: ConnManager, connection: Any, data: dict[str, Any]) -> None:
        name = FQCN.normalize(data[HandshakeKeys.ENDPOINT_NAME])
        known = manager.sfm_endpoints.get(name)
        if known and is_valid_admin_client_name(name):
            owner = known.endpoint.conn_props.get(DriverParams.PEER_CN.value)
            person = connection.conn.get_conn_properties().get(DriverParams.PEER_CN.value)
            if person != owner:
                connection.conn.close()
                raise CommError(CommError.BAD_DATA, f"refused: {person} at a console of {owner}")
        update(manager, connection, data)

    ConnManager.update_endpoint = updated
    # Console commands for which FLARE asks no right: memory and settings of any party's processes.
    NetManager.get_spec = lambda manager: CommandModuleSpec("cellnet", [])


def _poses_as_another(message: Message, sender: str, named: Sequence[Any]) -> bool:
    """Whether a person acts as a site, a site as a person, or either under another party's name.

    To FLARE each certificate is a site's and a person's. A person has an e-mail address there, and
    cells of random names; a site has no such address, and its cell has its name. FLARE takes the
    server's credentials, which stand in its answers, from anyone; and it signs name and token as
    one text: site-12 with token X could be site-1 with token 2X.

    Args:
        sender: the first name of the cell that is connected to the server.
        named: channels and topics of the message.
    """
    credentials = message.get_header(CellMessageHeaderKeys.CLIENT_NAME)
    if is_valid_admin_client_name(sender):
        name = message.get_prop(MessagePropKey.COMMON_NAME) or credentials  # one without mutual TLS
        is_own = credentials is None or ("@" in credentials and credentials == name)
        # Not to the process of a job.
        is_own &= message.get_header(MessageHeaderKey.DESTINATION) == FQCN.ROOT_SERVER
        kind, of_others = ClientType.ADMIN, _OF_SITES
    else:
        is_own = credentials in (None, sender)
        kind, of_others = ClientType.REGULAR, _OF_PEOPLE
    registers = CellChannelTopic.Register in named
    is_kind = not registers or message.get_header(CellMessageHeaderKeys.CLIENT_TYPE) == kind
    return not (is_own and is_kind and of_others.isdisjoint(named))


def _name_sender(request: Message) -> None:
    """Write the name of the party that sent a request over the one that the request gives."""
    sender = FQCN.get_root(request.get_header(MessageHeaderKey.ORIGIN))
    if is_valid_admin_client_name(sender):
        sender = request.get_header(CellMessageHeaderKeys.CLIENT_NAME) or sender
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
def audit_line_by_line() -> None:
    """Have FLARE write an event to audit.log as one line, in this process: texts of other parties
    would be lines, and fields, of their own in anyone's name.
    """
    Auditor.add_event = _plainly(Auditor.add_event)
    Auditor.add_job_event = _plainly(Auditor.add_job_event)


def _plainly(add: Callable[..., str]) -> Callable[..., str]:
    def plain(text: Any) -> str:
        return printable(str(text or "")).translate(_NO_FIELDS)

    def added(auditor: Auditor, *texts: Any, **named: Any) -> str:
        plain_named = {name: plain(text) for name, text in named.items()}
        return add(auditor, *map(plain, texts), **plain_named)

    return added


@cache
def survive_messages() -> None:
    """Have FLARE's job go on in this process when a party sends a message that cannot be decoded,
    says that an answer is too large for it, or sends a return code that ends the job for all; or
    when its process fails, until those of all sites have. One that has ended does not fail because
    a site is gone, or says that it did not run it.
    """
    from nvflare.private.fed.server.fed_server import FederatedServer
    from nvflare.private.fed.server.server_runner import ServerRunner

    end_job = FederatedServer.process_job_failure
    ended: defaultdict[str, set[str]] = defaultdict(set)  # job -> sites whose process has failed

    def reported(server: FederatedServer, request: Message) -> Message:
        report = request.payload
        if isinstance(report, dict) and report.get(JobFailureMsgKey.CODE):
            job = str(report.get(JobFailureMsgKey.JOB_ID))
            client = server.client_manager.clients.get(
                request.get_header(CellMessageHeaderKeys.TOKEN)
            )
            process = server.engine.run_processes.get(job, {})
            participants = process.get(RunProcessKey.PARTICIPANTS, {}).values()
            sites = {participant.name for participant in participants}
            if client and client.name in sites:
                ended[job].add(client.name)
            if not sites or sites != ended[job]:
                if client:
                    _LOG.warning(
                        f"a process of {client.name} has failed; its jobs go on for others"
                    )
                request.payload = {**report, JobFailureMsgKey.CODE: None}
        return end_job(server, request)

    def resolved(server: FederatedServer, client: Client, job: str, reason: str) -> None:
        server.engine.job_runner.resolve_client_outcome(job, client.name)

    FederatedServer.process_job_failure = reported
    FederatedServer._resolve_missing_client_outcome = resolved
    decode = cell.decode_payload

    def decoded(message: Message, *words: Any, **context: Any) -> None:
        try:
            decode(message, *words, **context)
        except Exception as error:
            sender = message.get_header(MessageHeaderKey.ORIGIN)
            _LOG.warning(f"refused: a message of {sender} that cannot be decoded: {error}")
            raise

    cell.decode_payload = decoded
    cell._is_server_job_cell = lambda info: False  # whose process FLARE would end
    ServerRunner.ABORT_RETURN_CODES = []


@cache
def schedule_each_job_alone() -> None:
    """Have FLARE start the other jobs if one cannot be scheduled, or its lead deletes it while it
    is deployed, in this process: for the text "1" as its number of sites it starts none any more.
    """
    from nvflare.private.fed.server.job_runner import JobRunner

    schedule = DefaultJobScheduler._do_schedule_job
    run = JobRunner.run
    complete = JobRunner._job_complete_process
    completing = threading.Lock()

    def scheduled(
        scheduler: DefaultJobScheduler,
        jobs: list[Job],
        fl_ctx: FLContext,
        failed: list[Job],
        blocked: list[Job],
    ) -> tuple[Any, Any]:
        for job in sorted(jobs, key=lambda job: job.meta[JobMetaKey.SUBMIT_TIME.value]):
            try:
                ready, sites = schedule(scheduler, [job], fl_ctx, failed, blocked)
            except Exception as error:  # its metadata, or the answer of one of its sites
                for key in scheduler._get_update_meta_keys():
                    job.meta.pop(key, None)
                reason = f"refused: it cannot be scheduled ({type(error).__name__})"
                scheduler._update_schedule_history(job, reason, fl_ctx)  # logs it, too
                blocked.append(job)
                continue
            if ready:
                return ready, sites
        return None, None

    def ran(runner: JobRunner, fl_ctx: FLContext) -> None:
        while not runner.ask_to_stop:
            try:
                run(runner, fl_ctx)
                return
            except Exception as error:  # FLARE would start no job any more
                _LOG.warning(printable(f"a job could not be started ({error})"))
                for job in {*runner.scheduler.scheduled_jobs} - {*runner.running_jobs}:
                    runner.scheduler.remove_scheduled_job(job)

    def completed(runner: JobRunner, engine: Any) -> None:
        if completing.acquire(blocking=False):  # `run` has begun again otherwise
            try:
                complete(runner, engine)
            finally:
                completing.release()

    DefaultJobScheduler._do_schedule_job = scheduled
    JobRunner.run = ran
    JobRunner._job_complete_process = completed


@cache
def start_jobs_without_refusing_sites() -> None:
    """Have FLARE's server take an answer that it cannot use, or by which a site refuses to start a
    job, for none, in this process: it would end the job for all sites.
    """
    from nvflare.private.fed.server.admin import FedAdminServer

    send = FedAdminServer.send_requests

    def sent(server: FedAdminServer, requests: Any, *words: Any, **named: Any) -> list[ClientReply]:
        replies = send(server, requests, *words, **named)
        for answer in replies:
            topic = answer.request.topic
            is_usable = False
            with suppress(Exception):  # whatever the site has sent
                is_usable = answer.reply is None or _is_usable(topic, answer.reply)
            if not is_usable:
                said = getattr(answer.reply, "body", "")
                _LOG.warning(reason_line(f"{answer.client_name} fails in {topic}: {said!s:.1000}"))
                answer.reply = None
        return replies

    FedAdminServer.send_requests = sent


def _is_usable(topic: str, reply: Any) -> bool:
    """Whether the server can use a site's answer to a request on the way to a job's start. The text
    of a refusal is made plain, as metadata of the job keep it.
    """
    if topic not in (TrainingTopic.CHECK_RESOURCE, TrainingTopic.DEPLOY, TrainingTopic.START_JOB):
        return True
    if not isinstance(reply, AdminMessage) or not isinstance(reply.headers, dict):
        return False
    code = reply.headers.get(MsgHeader.RETURN_CODE)
    if topic == TrainingTopic.CHECK_RESOURCE and code != AdminReturnCode.ERROR:
        token = reply.body.get_header(ShareableHeader.RESOURCE_RESERVE_TOKEN, "")
        return code is None and isinstance(token, str) and token == printable(token[:_TOKEN])
    reply.body = reason_line(reply.body)
    is_error = code == AdminReturnCode.ERROR or reply.body.startswith(ERROR_MSG_PREFIX)
    return not (is_error and topic == TrainingTopic.START_JOB)


@cache
def bound_messages() -> None:
    """Have FLARE decode a bounded number of objects in a message, no file, and commands of bounded
    length, in this process: it writes a file where a link in a folder of known name leads to, and
    keeps it.
    """

    def decoded(content: bytes, manager: Any) -> Any:
        """As `fobs.deserialize`, which has no limits."""
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
    """Have FLARE take a job's configuration and metadata of a bounded size alone, in this process:
    it parses them before it asks anyone, and those of all jobs for each console and each second.
    """
    check_job = JobMetaValidator._validate_zf
    create = SimpleJobDefManager.create

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

    JobMetaValidator._validate_zf = checked
    SimpleJobDefManager.create = created


def _check_metadata(meta: JsonDict) -> None:
    """Raise ValueError for large metadata of a job."""
    printable_json(meta, _META_DEPTH)
    if len(json.dumps(meta)) > _META_CHARACTERS:
        raise ValueError(f"metadata of more than {_META_CHARACTERS} characters")


@cache
def _fetching(party: str) -> threading.Semaphore:
    """Held while arrays of a party are fetched: those of few messages at a time."""
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
    """Have FLARE's client refuse messages of other parties than the server, shell commands, and
    any request that names a folder of the kit as its job, in this process.

    FLARE asks for a right only if the sender wants it, and deletes the folder of the kit that has a
    job's id. It connects to whoever is at the server's address with a certificate of the
    federation: the name of the endpoint is that of the certificate, the origin what it says.
    """
    from nvflare.private.fed.client.admin import FedAdminAgent

    dispatch = FedAdminAgent._dispatch_request
    receive = CoreCell._process_received_msg

    def received(of_cell: CoreCell, endpoint: Endpoint, connection: Any, message: Message) -> Any:
        is_heard = of_cell.my_info.is_on_server or is_own(of_cell.my_info.fqcn, endpoint.name)
        if not is_heard:
            _LOG.warning(f"refused: a message of {endpoint.name}, which is not the server")
            return None
        named = [message.get_header(key) for key in _CHANNEL_AND_TOPIC]
        asks = message.get_header(MessageHeaderKey.MSG_TYPE) == MessageType.REQ
        if asks and net_agent._CHANNEL in named and _OF_NETWORK.isdisjoint(named):
            _LOG.warning(printable(f"refused: {named} of {endpoint.name}"))
            return None
        return receive(of_cell, endpoint, connection, message)

    def dispatched(agent: FedAdminAgent, request: Message) -> Message:
        refusal = _administrative_refusal(agent.cell.get_fqcn(), request)
        if not refusal:
            return dispatch(agent, request)
        agent.auditor.add_event(user="", action=f"refused {request.payload.topic}: {refusal}")
        return new_cell_message({}, error_reply(refusal))

    CoreCell._process_received_msg = received
    FedAdminAgent._dispatch_request = dispatched


@cache
def authorize_before_deployment() -> None:
    """Have FLARE unpack a job elsewhere until it is authorized, and a site start only jobs that
    this process has deployed, each by its own id, in this process.

    FLARE unpacks a job into its folder and then deletes it if its code is refused. Meanwhile the
    server could start any job whose metadata name this folder: it is on the path of its process.
    """
    from nvflare.private.fed.client.client_engine import ClientEngine
    from nvflare.private.fed.utils.app_deployer import AppDeployer

    deploy = AppDeployer.deploy
    start = ClientEngine.start_app
    authorized: set[str] = set()
    lock = threading.Lock()
    cleaned: list[str] = []  # the kit, whose process may have been killed while it unpacked a job

    def clean(root: str) -> None:
        with lock:
            for path in Path(root).iterdir() if not cleaned else ():
                job, _, end = path.name.partition(".")
                if JOB_ID.fullmatch(job) and _UNPACKED.fullmatch(end):
                    shutil.rmtree(path, ignore_errors=True)
            cleaned.append(root)

    def refused(workspace: Workspace, job: str, topic: str, reason: str) -> None:
        auditor = Auditor(workspace.get_audit_file_path())
        auditor.add_event(user="", action=f"refused {topic}", ref=job, msg=reason)
        auditor.close()

    def deployed(
        deployer: AppDeployer, workspace: Workspace, job_id: str, job_meta: Any, **words: Any
    ) -> str | None:
        if job_meta.get(JobMetaKey.JOB_ID.value) != job_id:
            reason = "the metadata are those of another job"
            refused(workspace, job_id, TrainingTopic.DEPLOY, reason)
            return reason
        folder = Path(workspace.get_run_dir(job_id))
        if find_private_folder(folder).exists():  # a lead can delete a job, and give its id again
            reason = "a job of this id was here before"
            refused(workspace, job_id, TrainingTopic.DEPLOY, reason)
            return reason
        clean(workspace.root_dir)
        staged_job = f"{job_id}.{secrets.token_hex(8)}"
        unpacked = Path(workspace.get_run_dir(staged_job))
        try:
            refusal = deploy(deployer, workspace, staged_job, job_meta, **words)
            if refusal:
                refused(workspace, job_id, TrainingTopic.DEPLOY, refusal)
                return refusal
            shutil.rmtree(folder, ignore_errors=True)
            unpacked.rename(folder)
            authorized.add(job_id)
            return None
        finally:
            shutil.rmtree(unpacked, ignore_errors=True)

    def started(engine: ClientEngine, job_id: str, *words: Any, **more: Any) -> str:
        if job_id not in authorized:
            workspace = Workspace(engine.args.workspace, engine.client.client_name)
            refused(workspace, job_id, TrainingTopic.START_JOB, "it is not deployed")
            return f"{ERROR_MSG_PREFIX}: the job is not deployed"
        return start(engine, job_id, *words, **more)

    AppDeployer.deploy = deployed
    ClientEngine.start_app = started


def is_own(cell: str, endpoint: str) -> bool:
    """Whether a site's process hears an endpoint: the server, the site's own process, and of this
    one the processes of jobs. FLARE takes any party's certificate for that of a process below a
    job's.

    Examples:
        >>> [is_own("a", name) for name in ("server", "a.job", "b", "server.b")]
        [True, True, False, False]
        >>> [is_own("a.job", name) for name in ("server", "a", "a.job.b")]
        [True, True, False]
    """
    is_job_of_site = "." not in cell and endpoint.startswith(f"{cell}.")
    is_parent = cell.startswith(f"{endpoint}.")
    return endpoint == FQCN.ROOT_SERVER or is_parent or is_job_of_site


def _administrative_refusal(cell: str, request: Message) -> str | None:
    """Why a site does not answer an administrative request; None if it does.

    `cell`: the site's full name, below which those of its jobs are.
    """
    origin = request.get_header(MessageHeaderKey.ORIGIN)
    is_of_job = origin.startswith(f"{cell}.")
    if FQCN.get_root(origin) != FQCN.ROOT_SERVER and not is_of_job:
        return "it does not come from the server"
    asked = request.payload
    if is_of_job and asked.topic != TrainingTopic.NOTIFY_JOB_STATUS:
        return "a job's process tells its status alone"
    if asked.topic == SysCommandTopic.SHELL:
        return "medflare's sites run no shell command"
    job = asked.get_header(RequestHeader.JOB_ID)
    if job is not None and not JOB_ID.fullmatch(job):
        return "it names no job"
    return None
