"""Who may say what: messages are the sender's own, and a site obeys its server alone."""

import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from nvflare.apis.fl_constant import ReservedKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.fuel.f3.cellnet import core_cell, net_agent
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
from nvflare.fuel.f3.streaming.stream_const import StreamHeaderKey
from nvflare.fuel.hci.reg import CommandModuleSpec
from nvflare.fuel.utils.admin_name_utils import is_valid_admin_client_name
from nvflare.private.admin_defs import error_reply
from nvflare.private.defs import (
    CellChannel,
    CellChannelTopic,
    CellMessageHeaderKeys,
    ClientType,
    RequestHeader,
    SysCommandTopic,
    TrainingTopic,
    new_cell_message,
)
from nvflare.widgets.fed_event import FED_EVENT_TOPIC

from medflare.core.text import printable
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
_LOG = logging.getLogger(__name__)


@cache
def refuse_relayed_messages() -> None:
    """Have FLARE's server pass on no message to another site or in the name of another party, and
    take no control of its network, of the parties' networks and of the states of jobs, in this
    process.

    A site takes a request that comes through the server for the server's, whoever sent it: to run
    `cat` or `grep` on any file, to delete a folder of its kit, to stop. The name of an endpoint is
    that of its certificate, which FLARE checks; the origin is what the sender says.
    """
    from nvflare.private.fed.server.fed_server import FederatedServer

    validate = FederatedServer._validate_auth_headers

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

    FederatedServer._validate_auth_headers = validated


@cache
def refuse_commands_of_sites() -> None:
    """Have a job's process at FLARE's server execute tasks and updates alone for a site, each in
    the site's own name, in this process.
    """
    from nvflare.private.fed.server.server_command_agent import ServerCommandAgent
    from nvflare.private.fed.server.server_commands import ServerCommands
    from nvflare.private.fed.server.server_engine import ServerEngine

    execute = ServerCommandAgent._execute_command

    def executed(agent: ServerCommandAgent, request: Message) -> Message:
        sender = FQCN.get_root(request.get_header(MessageHeaderKey.ORIGIN))
        command = request.get_header(MessageHeaderKey.TOPIC)
        of_sites = ServerCommands.client_request_commands_names
        if sender != FQCN.ROOT_SERVER and command not in of_sites:
            agent.logger.warning(f"refused: {command!r} of {sender}")
            return make_reply(ReturnCode.AUTHENTICATION_ERROR, "this is the server's command")
        _name_sender(request)
        return execute(agent, request)

    ServerCommandAgent._execute_command = executed
    ServerCommandAgent._aux_communicate = _with_sender(ServerCommandAgent._aux_communicate)
    ServerEngine._handle_aux_message = _with_sender(ServerEngine._handle_aux_message)


def _with_sender(handle: Callable[[Any, Message], Message]) -> Callable[[Any, Message], Message]:
    """A method of FLARE that gets each request in the name of the party that sent it."""

    def handled(receiver: Any, request: Message) -> Message:
        _name_sender(request)
        return handle(receiver, request)

    return handled


@cache
def refuse_logs() -> None:
    """Have FLARE's server take no logs, in this process: it writes any file where a sender says."""
    from nvflare.app_common.logging.job_log_receiver import JobLogReceiver

    def received(receiver: JobLogReceiver, data: bytes, stream: Any, fl_ctx: FLContext) -> None:
        sender = fl_ctx.get_peer_context().get_identity_name()
        receiver.logger.warning(f"refused: a log of {sender}")

    JobLogReceiver._on_chunk_received = received


@cache
def keep_consoles_apart() -> None:
    """Have FLARE's server leave a console's connection to the person who made it, and offer no
    command for which FLARE asks no right, in this process: these show memory and settings of any
    party's processes.
    """
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
    NetManager.get_spec = lambda manager: CommandModuleSpec("cellnet", [])


def _poses_as_another(message: Message, sender: str, named: Sequence[Any]) -> bool:
    """Whether a person acts as a site, a site as a person, or either in another party's name.

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
        names_itself = credentials is None or ("@" in credentials and credentials == name)
        to_job = message.get_header(MessageHeaderKey.DESTINATION) != FQCN.ROOT_SERVER
        if to_job or not names_itself:
            return True
        kind, of_others = ClientType.ADMIN, _OF_SITES
    else:
        if credentials not in (None, sender):
            return True
        kind, of_others = ClientType.REGULAR, _OF_PEOPLE
    registers = CellChannelTopic.Register in named
    if registers and message.get_header(CellMessageHeaderKeys.CLIENT_TYPE) != kind:
        return True
    return not of_others.isdisjoint(named)


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


def connect_nowhere_else() -> None:
    """Have FLARE open no connection to an address that another party names, in this process.

    The connection would be unencrypted, and the other end may call itself the server.
    """
    CoreCell._add_adhoc_connector = lambda cell, to_cell, url: None


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

    `cell`: the site's full name, below which the names of its jobs are.
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
