"""What medflare changes in FLARE's internals works.

The tests named `test_flare_source_...` detect changes: they read FLARE's source or signatures and
show nothing about what medflare does. After an upgrade of FLARE one can fail at a harmless rename;
it names the patch to read again. The other tests show behaviour.
"""

import asyncio
import inspect
import logging
import os
import shutil
import socket
import ssl
import struct
import threading
import uuid
from asyncio.sslproto import SSLProtocol
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch
from zipfile import ZIP_DEFLATED, ZipFile

import numpy as np
import pytest
from aiohttp import WSCloseCode, WSMsgType, web
from aiohttp.test_utils import TestClient, TestServer
from nvflare.apis.client import Client
from nvflare.apis.controller_spec import Task
from nvflare.apis.fl_constant import ReservedKey, RunProcessKey
from nvflare.apis.fl_context import FLContext, FLContextManager
from nvflare.apis.impl.job_def_manager import SimpleJobDefManager
from nvflare.apis.impl.wf_comm_server import WFCommServer
from nvflare.apis.job_def import RunStatus, job_from_meta
from nvflare.apis.server_engine_spec import ServerEngineSpec
from nvflare.apis.shareable import Shareable
from nvflare.apis.storage import StorageException, StorageSpec
from nvflare.apis.workspace import Workspace
from nvflare.app_common.job_schedulers.job_scheduler import DefaultJobScheduler
from nvflare.app_common.logging.job_log_receiver import JobLogReceiver
from nvflare.app_common.np.np_downloader import ArrayConsumer, ArrayDownloadable
from nvflare.app_common.storages import filesystem_storage
from nvflare.app_common.streamers import file_streamer
from nvflare.app_common.streamers import streamer_base as stream_base
from nvflare.fuel.f3 import mpm
from nvflare.fuel.f3.cellnet import cell
from nvflare.fuel.f3.cellnet.core_cell import CoreCell
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey, MessagePropKey, MessageType
from nvflare.fuel.f3.cellnet.fqcn import FqcnInfo
from nvflare.fuel.f3.cellnet.identity import CellIdentityResolver
from nvflare.fuel.f3.cellnet.net_manager import NetManager
from nvflare.fuel.f3.comm_error import CommError
from nvflare.fuel.f3.drivers import aio_http_driver, tcp_driver
from nvflare.fuel.f3.drivers.connector_info import Mode
from nvflare.fuel.f3.drivers.driver_params import DriverParams
from nvflare.fuel.f3.drivers.socket_conn import ConnectionHandler
from nvflare.fuel.f3.drivers.tcp_driver import TcpStreamServer
from nvflare.fuel.f3.endpoint import Endpoint
from nvflare.fuel.f3.message import Message
from nvflare.fuel.f3.sfm.conn_manager import ConnManager
from nvflare.fuel.f3.sfm.constants import HandshakeKeys
from nvflare.fuel.f3.sfm.prefix import PREFIX_LEN, Prefix
from nvflare.fuel.f3.streaming.byte_receiver import RxTask
from nvflare.fuel.f3.streaming.stream_const import StreamDataType, StreamHeaderKey
from nvflare.fuel.f3.streaming.stream_types import BlobSizeError
from nvflare.fuel.hci.client.file_transfer import FileTransferModule
from nvflare.fuel.hci.server import hci
from nvflare.fuel.hci.server.hci import AdminServer
from nvflare.fuel.sec.audit import Auditor
from nvflare.fuel.utils import fobs, zip_utils
from nvflare.fuel.utils.config_factory import ConfigFactory
from nvflare.fuel.utils.config_service import ConfigService
from nvflare.fuel.utils.fobs import FOBSContextKey, lobs
from nvflare.fuel.utils.fobs.datum import Datum, DatumManager
from nvflare.fuel.utils.fobs.decomposers.via_downloader import ViaDownloaderDecomposer
from nvflare.lighter.utils import (
    Identity,
    generate_cert,
    generate_keys,
    serialize_cert,
    serialize_pri_key,
)
from nvflare.private.admin_defs import Message as AdminMessage
from nvflare.private.defs import (
    ERROR_MSG_PREFIX,
    CellMessageHeaderKeys,
    RequestHeader,
    new_cell_message,
)
from nvflare.private.fed.app.simulator import simulator_runner
from nvflare.private.fed.client import client_runner
from nvflare.private.fed.client.admin import FedAdminAgent
from nvflare.private.fed.client.client_engine import ClientEngine
from nvflare.private.fed.client.client_run_manager import ClientRunManager
from nvflare.private.fed.client.communicator import Communicator
from nvflare.private.fed.server.admin import FedAdminServer
from nvflare.private.fed.server.fed_server import FederatedServer
from nvflare.private.fed.server.job_meta_validator import JobMetaValidator
from nvflare.private.fed.server.job_runner import JobRunner
from nvflare.private.fed.server.message_send import ClientReply
from nvflare.private.fed.server.server_command_agent import ServerCommandAgent
from nvflare.private.fed.server.server_engine import ServerEngine
from nvflare.private.fed.server.server_runner import ServerRunner
from nvflare.private.fed.utils.app_deployer import AppDeployer

from helpers.waiting import eventually
from medflare.flare.flare_patches import (
    keep_ports_apart,
    look_often,
    notice_lost_answers,
    quiet_ports,
    search_kits_only,
    share_cleanup_thread,
    survive_resends,
)
from medflare.flare.other_parties import connections, limits, senders
from medflare.flare.other_parties.connections import (
    bound_connections,
    bound_handshakes,
    bound_waiting_frames,
)
from medflare.flare.other_parties.jobs import (
    archive_whole_jobs,
    audit_line_by_line,
    authorize_before_deployment,
    schedule_each_job_alone,
    start_jobs_without_refusing_sites,
    survive_messages,
)
from medflare.flare.other_parties.limits import (
    bound_arrays,
    bound_files,
    bound_messages,
    bound_metadata,
    bound_streams,
    keep_downloads_inside,
)
from medflare.flare.other_parties.senders import (
    connect_nowhere_else,
    keep_consoles_apart,
    obey_the_server_alone,
    refuse_commands_of_sites,
    refuse_logs,
    refuse_relayed_messages,
)

KIT_JOB = "5f6d8a3c-0b1e-4c57-9a64-2f7f3f1b9c11"


def asked(topic: str, origin: str = "server", job: str | None = None) -> Message:
    """An administrative request as a site's cell receives it."""
    request = AdminMessage(topic=topic, body="pwd")
    if job is not None:
        request.set_header(RequestHeader.JOB_ID, job)
    return new_cell_message({MessageHeaderKey.ORIGIN: origin}, request)


@pytest.mark.parametrize(
    ("asked_of_it", "refusal"),
    [
        (asked("sys.shell"), "no shell command"),
        (asked("sys.shell", "site-2"), "not come from the server"),
        (asked("train.abort", "site-2", KIT_JOB), "not come from the server"),
        (asked("train.delete_run", job="local"), "names no job"),
        (asked("train.delete_run", job=""), "names no job"),
        (asked("train.delete_run", job=f"medflare/{KIT_JOB}"), "names no job"),
        (asked("train.delete_run", job=KIT_JOB), ""),
        (asked("train.status", f"server.{KIT_JOB}"), ""),
        (asked("train.notify_job_status", f"relay.site-1.{KIT_JOB}", KIT_JOB), ""),
        (asked("train.delete_run", f"relay.site-1.{KIT_JOB}", KIT_JOB), "tells its status alone"),
        (
            asked("train.notify_job_status", f"relay.site-2.{KIT_JOB}", KIT_JOB),
            "not come from the server",
        ),
    ],
)
def test_a_site_obeys_its_server_alone_and_runs_no_shell_command(
    asked_of_it: Message, refusal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FLARE alone would read any file for another hospital, and delete the folder of the settings."""
    monkeypatch.setattr(FedAdminAgent, "_dispatch_request", lambda *words: "done")
    obey_the_server_alone()
    events: list[str] = []
    agent = FedAdminAgent.__new__(FedAdminAgent)
    agent.cell = SimpleNamespace(get_fqcn=lambda: "relay.site-1")
    agent.auditor = SimpleNamespace(add_event=lambda user, action: events.append(action))
    answer = agent._dispatch_request(asked_of_it)
    assert (answer == "done") == (not refusal) == (not events)
    if refusal:
        assert refusal in answer.payload.body and refusal in events[0]


@pytest.mark.parametrize(
    ("cell", "endpoint", "is_heard"),
    [
        ("site-1", "server", True),
        ("site-1", f"site-1.{KIT_JOB}", True),
        (f"site-1.{KIT_JOB}", "site-1", True),
        ("site-1", "site-2", False),
        ("site-1", "server.site-2", False),
        (f"site-1.{KIT_JOB}", "site-2", False),
        (f"site-1.{KIT_JOB}", f"site-1.{KIT_JOB}.site-2", False),
        ("server", "site-2", True),
    ],
)
def test_a_site_hears_the_server_and_its_own_processes_alone(
    cell: str, endpoint: str, is_heard: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name of an endpoint is that of its certificate, and any party can be at an address."""
    monkeypatch.setattr(CoreCell, "_process_received_msg", lambda *words: "heard")
    monkeypatch.setattr(FedAdminAgent, "_dispatch_request", FedAdminAgent._dispatch_request)
    obey_the_server_alone.__wrapped__()
    receiver = CoreCell.__new__(CoreCell)
    receiver.my_info = FqcnInfo(cell)
    message = new_cell_message({MessageHeaderKey.ORIGIN: "server"}, None)
    heard = receiver._process_received_msg(Endpoint(endpoint), None, message)
    assert (heard == "heard") == is_heard


@pytest.mark.parametrize(
    ("topic", "is_heard"),
    [
        ("speed", False),
        ("change_root", False),
        ("conns", False),
        ("heartbeat", True),
        ("stop", True),
    ],
)
def test_a_process_of_a_site_is_no_part_of_a_test_of_the_network(
    topic: str, is_heard: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member's `speed site-1 server 1 100000000` takes 100 GB of a hospital's memory, and FLARE asks for no right."""
    monkeypatch.setattr(CoreCell, "_process_received_msg", lambda *words: "heard")
    obey_the_server_alone()
    keep_consoles_apart()
    assert not NetManager(MagicMock()).get_spec().cmd_specs
    receiver = CoreCell.__new__(CoreCell)
    receiver.my_info = FqcnInfo("site-1")
    headers = {
        MessageHeaderKey.ORIGIN: "server",
        MessageHeaderKey.MSG_TYPE: MessageType.REQ,
        MessageHeaderKey.CHANNEL: "_net_manager",
        MessageHeaderKey.TOPIC: topic,
    }
    message = Message(headers, None)
    heard = receiver._process_received_msg(Endpoint("server"), None, message)
    assert (heard == "heard") == is_heard


@pytest.mark.parametrize("refusal", ["BYOC not permitted", ""])
def test_a_job_lies_in_its_folder_only_when_it_is_authorized(
    refusal: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the server could start another job with its code on the path."""
    for of_kit in ("startup", "local"):
        (tmp_path / of_kit).mkdir()
    workspace = Workspace(str(tmp_path), "site-1")
    folder = tmp_path / KIT_JOB
    seen: list[str] = []

    def deployed(deployer: Any, workspace: Workspace, job_id: str, *words: Any, **more: Any) -> str:
        code = Path(workspace.get_app_custom_dir(job_id))
        code.mkdir(parents=True)
        seen.append(job_id)
        assert not (folder / "app_site-1" / "custom").exists()
        return refusal

    monkeypatch.setattr(AppDeployer, "deploy", deployed)
    monkeypatch.setattr(ClientEngine, "start_app", lambda engine, job_id, **words: "started")
    authorize_before_deployment.__wrapped__()
    named = {"app_name": "app", "app_data": b"", "fl_ctx": None}
    deploy = partial(AppDeployer().deploy, workspace=workspace, job_id=KIT_JOB, **named)
    folder.mkdir()
    (folder / "of an earlier deployment").touch()
    (tmp_path / f"{uuid.uuid4()}.0123456789abcdef").mkdir()  # of a process that was killed
    assert "another job" in str(deploy(job_meta={"job_id": str(uuid.uuid4())})) and not seen
    of_kit = deploy(job_id="local", job_meta={"job_id": "local"})
    assert "it names no job" in str(of_kit) and not seen
    private = tmp_path / "medflare" / KIT_JOB
    private.mkdir(parents=True)  # what a job of this id has left, which its lead has deleted
    assert "was here before" in str(deploy(job_meta={"job_id": KIT_JOB})) and not seen
    shutil.rmtree(tmp_path / "medflare")
    assert (deploy(job_meta={"job_id": KIT_JOB}) or "") == refusal
    assert [path.name for path in folder.iterdir()] == [
        "of an earlier deployment" if refusal else "app_site-1"
    ]
    log = tmp_path / "audit.log"
    assert {path.name for path in tmp_path.iterdir()} == {"startup", "local", KIT_JOB, log.name}
    assert log.read_text().count("refused train.deploy") == 3 + bool(refusal)
    engine = ClientEngine.__new__(ClientEngine)
    engine.args = SimpleNamespace(workspace=str(tmp_path))
    engine.client = SimpleNamespace(client_name="site-1")
    for job, is_started in ((KIT_JOB, not refusal), (str(uuid.uuid4()), False)):
        assert (engine.start_app(job, job_meta={}) == "started") == is_started
    assert log.read_text().count("refused train.start_job") == 1 + bool(refusal)


def test_an_event_is_one_line_of_the_audit_log_and_has_no_fields_but_its_own(
    tmp_path: Path,
) -> None:
    """FLARE writes a text of a lead or a member as it is: with lines in anyone's name."""
    audit_line_by_line()
    auditor = Auditor(str(tmp_path / "audit.log"))
    forged = f"x\n[E:1][R:{KIT_JOB}][T:2026-11-22 11:00:00][U:it@hospital-one.org][A:shell\x1b[2J]"
    auditor.add_event(user=forged, action=forged, ref=forged, msg=forged)
    auditor.add_event("lead@coordination.org", "list_jobs")
    auditor.add_job_event(KIT_JOB, forged, forged, forged, msg=forged)
    auditor.close()
    event, plain, of_job = (tmp_path / "audit.log").read_text().splitlines()
    assert [event.count("["), plain.count("["), of_job.count("[")] == [5, 4, 5]
    assert "[U:lead@coordination.org][A:list_jobs]" in plain and event.isprintable()


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """What FLARE does with what it accepts is replaced by "done"."""
    monkeypatch.setattr(FederatedServer, "_validate_auth_headers", lambda *words: "done")
    monkeypatch.setattr(ServerCommandAgent, "_execute_command", lambda *words: "done")
    refuse_relayed_messages()
    refuse_commands_of_sites()


@pytest.mark.parametrize(
    ("sender", "receiver", "channel", "accepted"),
    [
        ("site-2", "site-1", "admin", False),
        ("site-2", f"site-1.{KIT_JOB}", "aux_communication", False),
        ("_admin_member", "site-1", "admin", False),
        ("site-2", "server", "_net_manager", False),  # its topic "stop" ends the server
        ("site-2", "server", "server_parent_listener", False),  # sets the state of any job
        ("site-2", f"server.{KIT_JOB}", "fed.event", False),  # ends a job, or all scheduling
        ("site-2", "server", "bulk", False),  # whose messages FLARE looks at no more
        (f"site-1.{KIT_JOB}", f"server.{KIT_JOB}", "server_command", True),
        (f"site-1.{KIT_JOB}", "site-1", "admin", True),
        (f"server.{KIT_JOB}", f"site-1.{KIT_JOB}", "aux_communication", True),
    ],
)
@pytest.mark.parametrize("key", senders._CHANNEL_AND_TOPIC)
@pytest.mark.usefixtures("limited")
def test_the_server_takes_from_sites_and_people_what_is_meant_for_it(
    sender: str, receiver: str, channel: str, accepted: bool, key: str
) -> None:
    server = FederatedServer.__new__(FederatedServer)
    server.logger = logging.getLogger("test")
    headers = {MessageHeaderKey.DESTINATION: receiver, MessageHeaderKey.MSG_TYPE: MessageType.REQ}
    for origin in (sender, "server", "site-3"):  # what the sender says of itself
        named = {MessageHeaderKey.ORIGIN: origin, key: channel}
        message = Message(headers | named, None)
        message.set_prop(MessagePropKey.ENDPOINT, SimpleNamespace(name=sender))
        honest = origin == sender or sender.startswith("server")
        assert (server._validate_auth_headers(message) == "done") == (accepted and honest)


LEAD = "lead@coordination.org"
CONSOLE = "_admin_1c9a2c4e-52b3-4c39-9d0e-3a5c7f1f0b11"
TASKS = "task"  # FLARE's channel on which clients register


@pytest.mark.parametrize(
    ("sender", "certificate", "credentials", "more", "accepted"),
    [
        ("site-12", "site-12", "site-12", {}, True),
        ("site-12", "site-12", None, {"topic": "challenge"}, True),
        ("site-12", "site-12", "server", {}, False),
        ("site-12", "site-12", "server_job", {}, False),
        ("site-12", "site-12", "site-1", {"topic": "heart_beat"}, False),  # of token 2X
        ("site-12", "site-12", "site-12", {"topic": "register", "type": "regular"}, True),
        ("site-12", "site-12", LEAD, {"topic": "register", "type": "regular"}, False),
        ("site-12", "site-12", LEAD, {"topic": "heart_beat"}, False),
        ("site-12", "site-12", "site-12", {"topic": "register", "type": "admin"}, False),
        ("site-12", "site-12", "site-12", {"channel": "hci_channel"}, False),
        (CONSOLE, "site-12", "site-12", {"topic": "register", "type": "admin"}, False),
        (CONSOLE, "site-12", "site-12", {"channel": "hci_channel"}, False),
        (CONSOLE, LEAD, None, {"topic": "challenge"}, True),
        (CONSOLE, LEAD, LEAD, {"topic": "register", "type": "admin"}, True),
        (CONSOLE, LEAD, LEAD, {"topic": "register", "type": "regular"}, False),
        (CONSOLE, LEAD, LEAD, {"topic": "register"}, False),
        (CONSOLE, LEAD, LEAD, {"topic": "heart_beat"}, False),
        (CONSOLE, LEAD, LEAD, {"channel": "hci_channel"}, True),
        (CONSOLE, None, LEAD, {"channel": "hci_channel"}, True),  # without mutual TLS
        (CONSOLE, LEAD, "member@hospital-two.org", {"channel": "hci_channel"}, False),
        (CONSOLE, LEAD, LEAD, {"channel": "server_command", "to": f"server.{KIT_JOB}"}, False),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.usefixtures("limited")
def test_a_party_acts_as_what_it_is_and_under_its_own_name(
    sender: str,
    certificate: str | None,
    credentials: str | None,
    more: dict[str, str],
    accepted: bool,
    streamed: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """FLARE takes any certificate for a client's: a person would train in a job and get its models."""
    server = FederatedServer.__new__(FederatedServer)
    server.logger = logging.getLogger("test")
    keys = StreamHeaderKey if streamed else MessageHeaderKey
    headers = {
        MessageHeaderKey.ORIGIN: sender,
        MessageHeaderKey.DESTINATION: more.get("to", "server"),
        keys.CHANNEL: more.get("channel", TASKS),
        keys.TOPIC: more.get("topic", "any"),
        CellMessageHeaderKeys.CLIENT_NAME: credentials,
        CellMessageHeaderKeys.CLIENT_TYPE: more.get("type"),
    }
    message = Message(headers, None)
    message.set_prop(MessagePropKey.ENDPOINT, SimpleNamespace(name=sender))
    message.set_prop(MessagePropKey.COMMON_NAME, certificate)
    assert (server._validate_auth_headers(message) == "done") == accepted
    assert accepted or f"from {certificate}, as {sender}, to server" in caplog.text


@pytest.mark.parametrize(
    ("sender", "name"),
    [("site-2", "site-2"), ("site-2.site-1", "site-2"), ("site-1", "site-1"), (CONSOLE, LEAD)],
)
@pytest.mark.parametrize(
    ("owner", "handler"),
    [
        (ServerCommandAgent, "_execute_command"),
        (ServerCommandAgent, "_aux_communicate"),
        (ServerEngine, "_handle_aux_message"),
    ],
)
def test_a_request_is_of_the_party_that_sent_it(
    owner: Any, handler: str, sender: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FLARE takes the name that the request gives: a site would get another one's model."""
    requests: list[Message] = []
    monkeypatch.setattr(owner, handler, lambda _, r: requests.append(r))
    monkeypatch.setattr(FederatedServer, "_validate_auth_headers", lambda *words: "done")
    refuse_relayed_messages()
    refuse_commands_of_sites()
    agent = owner.__new__(owner)
    origin = {
        MessageHeaderKey.ORIGIN: f"{sender}.{KIT_JOB}",
        MessageHeaderKey.TOPIC: "get_task",
        CellMessageHeaderKeys.CLIENT_NAME: name,
    }
    asks = Shareable()
    peer = FLContext()
    peer.set_prop(ReservedKey.IDENTITY_NAME, "site-1", private=False)
    asks.set_peer_context(peer)
    asks.set_peer_props(peer.get_all_public_props())
    getattr(agent, handler)(Message(origin, asks))
    getattr(agent, handler)(Message(origin, None))  # not decoded
    named, empty = [request.payload for request in requests]
    assert named.get_peer_context().get_identity_name() == name
    assert named.get_peer_prop(ReservedKey.IDENTITY_NAME, "") == name
    assert isinstance(empty, Shareable) and not empty.get_peer_props()


def peer_context(name: str) -> FLContext:
    """The context of a message of a party."""
    fl_ctx = FLContext()
    peer = FLContext()
    peer.set_prop(ReservedKey.IDENTITY_NAME, name, private=False)
    fl_ctx.set_peer_context(peer)
    return fl_ctx


def test_the_server_writes_no_log_of_another_party(tmp_path: Path) -> None:
    """FLARE writes DIR/JOB/SITE/FILE, where all three are what the sender says, as .. and msgpack.py."""
    refuse_logs()
    receiver = JobLogReceiver(str(tmp_path))
    stream: dict[str, Any] = {}
    receiver._on_chunk_received(b"import os", stream, peer_context("site-2"))
    assert not stream and not [*tmp_path.iterdir()]


@pytest.fixture
def surviving(monkeypatch: pytest.MonkeyPatch) -> None:
    """FLARE bounds what parties send; what it does with files and arrays is replaced by words."""
    monkeypatch.setattr(RxTask, "rx_task_map", {})
    monkeypatch.setattr(AdminServer, "_process_upload", lambda *words: "uploaded")
    fetch = "_download_from_remote_cell"
    monkeypatch.setattr(ViaDownloaderDecomposer, fetch, lambda *words: "done")
    for change in (survive_messages, bound_messages, bound_streams, bound_arrays, bound_files):
        change()


@pytest.mark.usefixtures("surviving")
def test_an_update_that_cannot_be_decoded_is_refused_and_its_site_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """FLARE ends the job's process for all sites."""
    headers = {
        MessageHeaderKey.ORIGIN: f"site-2.{KIT_JOB}",
        StreamHeaderKey.PAYLOAD_ENCODING: "fobs",
    }
    update = Message(headers, b"\xc1 no msgpack")
    with pytest.raises(RuntimeError):  # the sender learns of it, and may send it again
        cell.decode_payload(update, StreamHeaderKey.PAYLOAD_ENCODING, fobs_ctx={})
    assert f"a message of site-2.{KIT_JOB}" in caplog.text


def test_the_failed_process_of_a_site_ends_no_job_before_those_of_all_sites_have_failed(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    codes = []
    monkeypatch.setattr(
        FederatedServer,
        "process_job_failure",
        lambda server, report: codes.append(report.payload["code"]),
    )
    survive_messages.cache_clear()
    request.getfixturevalue("surviving")
    clients = {token: SimpleNamespace(name=f"site-{token}") for token in "12"}
    server: Any = FederatedServer.__new__(FederatedServer)
    server.client_manager = SimpleNamespace(clients=clients)
    server.engine = SimpleNamespace(run_processes={KIT_JOB: {RunProcessKey.PARTICIPANTS: clients}})
    for token in ("1", "1", "nobody's", "2"):
        report = {"job_id": KIT_JOB, "code": 101, "reason": "unsafe component"}
        headers = {CellMessageHeaderKeys.TOKEN: token}
        FederatedServer.process_job_failure(server, new_cell_message(headers, report))
    server.engine.run_processes.clear()  # the job has ended
    FederatedServer.process_job_failure(server, new_cell_message(headers, report))
    assert codes == [None, None, None, 101, None]


@pytest.mark.usefixtures("surviving")
def test_no_site_fails_a_job_that_has_ended() -> None:
    """FLARE calls it abnormal if one site, of those that had to say how it ended, is gone."""
    server = FederatedServer.__new__(FederatedServer)
    server.engine = MagicMock(run_processes={}, exception_run_processes={})
    runner = server.engine.job_runner
    server._resolve_missing_client_outcome(Client("site-3", "token"), KIT_JOB, "missing job")
    assert not runner.fail_run.called
    runner.resolve_client_outcome.assert_called_once_with(KIT_JOB, "site-3")


@pytest.mark.parametrize("wrong", [{"min_clients": "1"}, {"schedule_count": "1"}])
def test_a_job_that_cannot_be_scheduled_does_not_hold_up_the_others(wrong: dict[str, Any]) -> None:
    """FLARE takes the text for a number, and then starts no job any more."""
    engine = MagicMock(spec=ServerEngineSpec)
    engine.new_context = FLContextManager(engine=engine, identity_name="server").new_context
    engine.get_clients.return_value = [Client("site-1", "token")]
    engine.check_client_resources.return_value = {"site-1": (True, "")}
    manager = MagicMock()
    jobs = []
    for number, meta in enumerate((wrong, {})):
        meta = {"submit_time": number, "job_id": str(number), **meta}
        jobs.append(job_from_meta({"deploy_map": {"app": ["@ALL"]}, **meta}))
    schedule_each_job_alone()
    ready, _ = DefaultJobScheduler().schedule_job(manager, [*jobs], engine.new_context())
    assert ready is jobs[1]
    assert manager.set_status.call_args.args[:2] == ("0", RunStatus.FINISHED_CANT_SCHEDULE)
    assert "refused" in jobs[0].meta["schedule_history"][0]


def test_the_server_starts_jobs_after_one_that_its_lead_deletes_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """FLARE's thread ends by the error, and no job of anybody starts any more."""
    looked: list[int] = []
    threads: list[threading.Thread] = []

    def run(runner: JobRunner, fl_ctx: Any) -> None:
        threads.append(threading.Thread(target=runner._job_complete_process, args=[None]))
        threads[-1].start()
        looked.append(len(threads))
        runner.ask_to_stop = len(looked) == 3
        if not runner.ask_to_stop:
            raise StorageException("object of the job does not exist")

    completing: list[int] = []
    stop = threading.Event()

    def complete(runner: JobRunner, engine: Any) -> None:
        completing.append(threading.get_ident())
        stop.wait(10)

    monkeypatch.setattr(JobRunner, "run", run)
    monkeypatch.setattr(JobRunner, "_job_complete_process", complete)
    schedule_each_job_alone()
    runner = JobRunner("workspace")
    runner.scheduler = DefaultJobScheduler()
    runner.scheduler.scheduled_jobs = ["deleted", "running"]
    runner.running_jobs = {"running": None}
    runner.run(None)
    stop.set()
    for thread in threads:
        thread.join()
    assert looked == [1, 2, 3] and len(completing) == 1
    assert runner.scheduler.scheduled_jobs == ["running"]


def admin_message(body: Any, **headers: Any) -> AdminMessage:
    message = AdminMessage("reply", body)
    message.headers = headers
    return message


def resources(token: str) -> Shareable:
    answer = Shareable()
    answer.set_header("_resource_reserve_token", token)
    return answer


@pytest.mark.parametrize(
    ("topic", "answer", "is_used"),
    [
        ("scheduler.check_resource", admin_message(resources("7")), True),
        ("scheduler.check_resource", admin_message(resources("7" * 10**6)), False),
        ("scheduler.check_resource", admin_message(resources("7\n8")), False),
        ("scheduler.check_resource", admin_message("no right", _rtnCode="_error"), True),
        ("scheduler.check_resource", admin_message("a text"), False),
        ("scheduler.check_resource", admin_message("a text", _rtnCode="OK"), False),
        ("scheduler.check_resource", {"no": "message"}, False),
        ("train.deploy", admin_message("deployed", _rtnCode="_ok"), True),
        ("train.deploy", admin_message("x" * 10**6, _rtnCode="_error"), True),
        ("train.deploy", ["no message"], False),
        ("train.start_job", admin_message("Start the client app..."), True),
        ("train.start_job", admin_message(f"{ERROR_MSG_PREFIX}: no"), False),
        ("train.start_job", None, False),
        ("info.show_stats", admin_message({"a": 1}), True),
    ],
)
def test_no_answer_of_a_site_ends_a_job_before_it_starts(
    topic: str, answer: Any, is_used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FLARE fails, or ends the job for all sites."""
    request = AdminMessage(topic, None)
    reply = ClientReply("token", "site-1", request, answer)
    monkeypatch.setattr(FedAdminServer, "send_requests", lambda *words, **named: [reply])
    start_jobs_without_refusing_sites()
    (sent,) = FedAdminServer.send_requests(MagicMock(), {"token": request}, None)
    assert (sent.reply is not None) == is_used
    assert not is_used or len(str(sent.reply.body)) <= 2000


@pytest.mark.parametrize(
    "meta", [{"custom_props": {"a": [[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]}}, {"name": "n" * 300_000}]
)
def test_metadata_of_a_job_are_bounded(meta: dict[str, Any]) -> None:
    """Each console reads those of all jobs, and the server those that wait once a second."""
    bound_metadata()
    engine = MagicMock(spec=ServerEngineSpec)
    engine.get_component.return_value = MagicMock(spec=StorageSpec)
    fl_ctx = FLContextManager(engine=engine, identity_name="server").new_context()
    manager = SimpleJobDefManager.__new__(SimpleJobDefManager)
    manager.uri_root, manager.job_store_id = "jobs", "job_store"
    manager.create({"name": "n", "custom_props": {"medflare": {"rounds": 3}}}, b"", fl_ctx)
    with pytest.raises(ValueError, match=r"nested too deep|more than 262144 characters"):
        manager.create(meta, b"", fl_ctx)
    with pytest.raises(ValueError, match="job_id is not as FLARE makes it"):
        manager.create({"name": "n", "job_id": "local"}, b"", fl_ctx)
    manager.create({"name": "n", "job_id": KIT_JOB}, b"", fl_ctx)


def test_the_configuration_of_a_job_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(JobMetaValidator, "_validate_zf", lambda *words: {"name": "n"})
    bound_metadata()
    large = " " * (limits.LARGEST_CONFIG + 1)
    for name, refused in (
        ("job/meta.json", True),
        ("job/app/config/config_fed_client.json", True),
        ("job/app/config/config_fed_server.json.default", True),
        ("job/custom/config/config_fed_client.json", True),
        ("custom/app/config/config_fed_client.json", True),
        ("job/app/custom/table.json", False),
    ):
        packed = BytesIO()
        with ZipFile(packed, "w", ZIP_DEFLATED) as archive:
            archive.writestr(name, large)
        job = name.partition("/")[0]
        valid, reason, _ = JobMetaValidator().validate(job, packed.getvalue())
        assert valid != refused and ("more than 1048576 bytes" in reason) == refused


@pytest.mark.parametrize(("files", "is_valid"), [(100, True), (2_000, False)])
def test_the_number_of_files_of_a_job_is_bounded(
    files: int, is_valid: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five million empty files are a zip of 0.5 GB; meanwhile FLARE starts no other job."""
    bound_metadata()
    monkeypatch.setattr(limits, "_DIRECTORY_BYTES", 100_000)
    monkeypatch.setattr(JobMetaValidator, "_validate_zf", lambda *words: {"name": "n"})
    packed = tmp_path / "job.zip"
    with ZipFile(packed, "w") as archive:
        for number in range(files):
            archive.writestr(f"job/app/{number}", "")
    valid, reason, _ = JobMetaValidator().validate("job", str(packed))
    assert valid == is_valid and ("names of its files" in reason) != is_valid


def test_a_frame_is_bounded_when_it_is_inflated(monkeypatch: pytest.MonkeyPatch) -> None:
    """FLARE inflates 2 MB to 2 GB for anyone with a certificate, before it looks at them."""
    monkeypatch.setattr(aio_http_driver, "MAX_FRAME_SIZE", aio_http_driver.MAX_FRAME_SIZE)
    monkeypatch.setattr(ConnManager, "handle_new_connection", None)
    monkeypatch.setattr(connections, "_FRAME_BYTES", 100_000)
    bound_connections.__wrapped__()
    seen: list[Any] = []

    async def listen(websocket: Any) -> None:
        seen.extend([message.type async for message in websocket])

    driver = SimpleNamespace(_connection_handler=listen)

    async def sent(size: int) -> int | None:
        app = web.Application()
        app.router.add_get("/", partial(aio_http_driver.AioHttpDriver._websocket_handler, driver))
        async with TestClient(TestServer(app)) as client:
            websocket = await client.ws_connect("/", compress=15)
            await websocket.send_bytes(bytes(size))
            await websocket.close()
            return websocket.close_code

    assert asyncio.run(sent(90_000)) == WSCloseCode.OK
    assert asyncio.run(sent(110_000)) == WSCloseCode.MESSAGE_TOO_BIG
    assert seen == [WSMsgType.BINARY, WSMsgType.ERROR]


def test_an_endpoint_says_its_name_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """FLARE keeps all that it says: 12 MB are a gigabyte of empty tables, for each connection."""
    monkeypatch.setattr(ConnManager, "handle_new_connection", None)
    monkeypatch.setattr(ConnManager, "get_dict_payload", staticmethod(ConnManager.get_dict_payload))
    bound_connections.__wrapped__()
    prefix = Prefix()
    for tables, is_read in ((1000, True), (5000, False)):
        said = {HandshakeKeys.ENDPOINT_NAME: "site-1", "x": [{}] * tables}
        frame = bytes(PREFIX_LEN) + fobs.fobs.msgpack.packb(said)
        with nullcontext() if is_read else pytest.raises(ValueError, match="more than 4096 bytes"):
            assert ConnManager.get_dict_payload(prefix, frame) == {
                HandshakeKeys.ENDPOINT_NAME: "site-1"
            }


def test_a_party_has_few_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []
    monkeypatch.setattr(ConnManager, "handle_new_connection", lambda *words: opened.append(words))
    monkeypatch.setattr(connections, "_CONNECTIONS", 2)
    bound_connections.__wrapped__()
    manager = ConnManager.__new__(ConnManager)

    def connection_of(party: str | None) -> Any:
        named = {DriverParams.PEER_CN.value: party} if party else {}
        return MagicMock(get_conn_properties=lambda: named)

    manager.sfm_conns = {}
    for number, party in enumerate(("site-1", "site-2", "site-1", None, None)):
        manager.sfm_conns[number] = SimpleNamespace(conn=connection_of(party))
    for party, is_opened in (("site-1", False), ("site-2", True), (None, True)):
        connection = connection_of(party)
        manager.handle_new_connection(connection)
        assert ((manager, connection) in opened) == is_opened != connection.close.called


@pytest.mark.parametrize(
    ("party", "mode", "is_bounded"),
    [
        ("site-1", Mode.PASSIVE, True),
        ("coordination.example.org", Mode.PASSIVE, False),  # the server's own job
        ("site-1", Mode.ACTIVE, False),
        (None, Mode.PASSIVE, False),
    ],
)
def test_few_frames_of_a_party_wait(
    party: str | None, mode: Any, is_bounded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """3.6 MB of a member keep FLARE's server busy for a minute, which hears nobody else."""
    waiting: list[Any] = []
    monkeypatch.setattr(ConnManager, "process_frame", lambda *words: waiting.append(words))
    monkeypatch.setattr(ConnManager, "process_frame_task", lambda *words: None)
    monkeypatch.setattr(connections, "_WAITING", 12)
    bound_waiting_frames.__wrapped__()
    manager = ConnManager.__new__(ConnManager)
    manager.local_endpoint = Endpoint("server")
    named = {"server": "coordination.example.org"}
    manager.identity_resolver = CellIdentityResolver("server", exact_identity_map=named)
    connection = MagicMock()
    connection.conn.connector.mode = mode
    connection.conn.get_conn_properties.return_value = {DriverParams.PEER_CN.value: party}
    connection.conn.closing = False
    manager.process_frame(connection, bytes(2**21))  # counts as nine
    for _ in range(5):
        manager.process_frame(connection, b"")
    assert len(waiting) == (4 if is_bounded else 6)
    assert connection.conn.close.called == is_bounded
    for words in waiting:
        manager.process_frame_task(*words[1:])
    manager.process_frame(connection, b"")
    assert len(waiting) == (5 if is_bounded else 7)


def test_an_archive_of_a_job_has_all_files_or_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FLARE skips a folder that it cannot open, as without any more open files, and deletes it."""
    archive_whole_jobs()
    results = tmp_path / "job" / "medflare"
    results.mkdir(parents=True)
    (results / "results.json").touch()
    archive = tmp_path / "archive.zip"
    filesystem_storage._write_multi(str(archive), [str(results.parent)])
    assert ZipFile(archive).namelist() == ["medflare/", "medflare/results.json"]
    monkeypatch.setattr(os, "scandir", MagicMock(side_effect=OSError(24, "Too many open files")))
    with pytest.raises(OSError, match="Too many open files"):
        filesystem_storage._write_multi(str(archive), [str(results.parent)])


@pytest.fixture
def patched_handshakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ssl.SSLContext:
    """The context of a server; FLARE is patched, and its connections say "heard"."""
    key, public_key = generate_keys()
    here = Identity("localhost")
    certificate = generate_cert(here, here, key, public_key, server_default_host="localhost")
    files = tmp_path / "server.crt", tmp_path / "server.key"
    for file, content in zip(
        files, (serialize_cert(certificate), serialize_pri_key(key)), strict=True
    ):
        file.write_bytes(content)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*files)
    for changed, name in (
        (TcpStreamServer, "__init__"),
        (SSLProtocol, "connection_made"),
        (SSLProtocol, "_on_handshake_complete"),
        (SSLProtocol, "connection_lost"),
        (asyncio.constants, "SSL_HANDSHAKE_TIMEOUT"),
    ):
        monkeypatch.setattr(changed, name, getattr(changed, name))
    monkeypatch.setattr(tcp_driver, "get_ssl_context", lambda *words, **named: context)
    monkeypatch.setattr(
        ConnectionHandler, "handle", lambda handler: handler.request.sendall(b"heard")
    )
    monkeypatch.setattr(connections, "_HANDSHAKES", 3)
    bound_handshakes.__wrapped__()
    return context


def hears(address: Any) -> bool:
    """Whether a server answers who finishes the handshake."""
    connection = socket.create_connection(address, 5)
    with ssl._create_unverified_context().wrap_socket(connection) as secured:
        return secured.recv(5) == b"heard"


@pytest.mark.usefixtures("patched_handshakes")
def test_a_silent_connection_keeps_no_other_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """FLARE waits for each TLS handshake before it accepts the next connection."""
    server = TcpStreamServer(MagicMock(), MagicMock(params={"host": "localhost", "port": 0}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = server.server_address
    silent = [socket.create_connection(address, 5) for _ in range(4)]
    assert hears(address)
    assert silent[0].recv(5) == b""  # the oldest of too many
    monkeypatch.setattr(connections, "_HANDSHAKE_TIMEOUT", 0.1)
    silent.append(socket.create_connection(address, 5))
    assert silent[-1].recv(5) == b""
    for connection in silent:
        connection.close()
    server.shutdown()
    server.server_close()


@pytest.mark.usefixtures("patched_handshakes")
def test_a_server_without_tls_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in POC mode."""
    monkeypatch.setattr(tcp_driver, "get_ssl_context", lambda *words, **named: None)
    server = TcpStreamServer(MagicMock(), MagicMock(params={"host": "localhost", "port": 0}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with socket.create_connection(server.server_address, 5) as connection:
        assert connection.recv(5) == b"heard"
    server.shutdown()
    server.server_close()


def test_silent_connections_use_up_no_files(patched_handshakes: ssl.SSLContext) -> None:
    """Who reaches the server's port needs no certificate to open any number."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()

    def say(_: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(b"heard")

    listening = asyncio.start_server(say, "localhost", 0, ssl=patched_handshakes)
    server = asyncio.run_coroutine_threadsafe(listening, loop).result(5)
    address = server.sockets[0].getsockname()[:2]
    silent = [socket.create_connection(address, 5) for _ in range(4)]
    assert hears(address)
    with suppress(ConnectionResetError):  # the oldest of too many
        assert silent[0].recv(5) == b""
    for connection in silent:
        connection.close()
    slow = socket.create_connection(address, 5)
    for _ in range(4):  # one after the other, reset
        gone = socket.create_connection(address, 5)
        gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        gone.close()
        assert hears(address)
    slow.settimeout(0.2)
    with pytest.raises(TimeoutError):  # it may still finish its handshake
        slow.recv(5)
    slow.close()
    loop.call_soon_threadsafe(loop.stop)


@pytest.mark.parametrize(("person", "is_taken"), [(LEAD, True), ("member@example.org", False)])
@pytest.mark.usefixtures("limited")
def test_the_cell_of_a_console_is_its_persons(
    person: str, is_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FLARE gives the connection to whoever came last: a lead's answers would reach a member."""
    monkeypatch.setattr(ConnManager, "update_endpoint", lambda *words: taken.append(words))
    taken: list[Any] = []
    keep_consoles_apart.__wrapped__()
    manager = ConnManager.__new__(ConnManager)
    known = Endpoint(CONSOLE, conn_props={DriverParams.PEER_CN.value: LEAD})
    manager.sfm_endpoints = {CONSOLE: SimpleNamespace(endpoint=known)}
    connection = MagicMock()
    connection.conn.get_conn_properties.return_value = {DriverParams.PEER_CN.value: person}
    with nullcontext() if is_taken else pytest.raises(CommError, match="at a console of lead"):
        manager.update_endpoint(connection, {HandshakeKeys.ENDPOINT_NAME: CONSOLE})
    assert bool(taken) == is_taken != connection.conn.close.called


@pytest.mark.usefixtures("surviving")
def test_a_site_ends_no_job_by_a_return_code_or_a_refused_answer() -> None:
    assert not ServerRunner.ABORT_RETURN_CODES
    adapter = cell.Adapter.__new__(cell.Adapter)
    adapter.my_info = SimpleNamespace(fqcn=f"server.{KIT_JOB}")
    adapter.logger = logging.getLogger("test")
    refused = SimpleNamespace(exception=lambda: BlobSizeError("too large for site-2"))
    adapter._handle_reply_stream_done(refused)  # FLARE ends the process


@pytest.mark.usefixtures("surviving")
def test_a_job_unpacks_to_what_is_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = BytesIO()
    with ZipFile(packed, "w", ZIP_DEFLATED) as archive:
        archive.writestr("app/config/task.json", "{}" + " " * 10_000)
    zip_utils.unzip_all_from_bytes(packed.getvalue(), str(tmp_path))
    assert (tmp_path / "app" / "config" / "task.json").exists()
    monkeypatch.setattr(limits, "_JOB_BYTES", 9_000)
    with pytest.raises(ValueError, match="unpacked it has"):
        zip_utils.unzip_all_from_bytes(packed.getvalue(), str(tmp_path))


@pytest.mark.usefixtures("surviving")
def test_an_uploaded_file_is_bounded_and_does_not_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a session FLARE refuses its command, and keeps the file."""
    stream: dict[str, Any] = {stream_base.KEY_FILE_SIZE: 3000}
    file = file_streamer._ChunkConsumer(stream, str(tmp_path))
    part = Shareable({stream_base.KEY_DATA: bytes(1000), stream_base.KEY_DATA_SIZE: 1000})
    monkeypatch.setattr(limits, "_UPLOAD_BYTES", 1500)
    for _ in range(2):
        file.consume(part, stream, FLContext())
    with pytest.raises(ValueError, match="more than 1500 bytes"):
        file.consume(part, stream, FLContext())
    assert [*tmp_path.iterdir()]
    server = AdminServer.__new__(AdminServer)
    assert server._process_upload(stream, FLContext()) == "uploaded"
    assert not [*tmp_path.iterdir()]


@pytest.mark.usefixtures("surviving")
def test_a_party_uploads_few_files_at_once_and_none_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FLARE keeps a file whose end never comes; a member would keep all leads from submitting."""
    factory = file_streamer._ChunkConsumerFactory(str(tmp_path))
    of_member, of_lead = [peer_context(f"{name}@example.org") for name in ("member", "lead")]
    streams: list[dict[str, Any]] = [{} for _ in range(limits._UPLOADS)]
    files = [factory.get_consumer(stream, of_member) for stream in streams]
    with pytest.raises(ValueError, match=r"member@example\.org uploads"):
        factory.get_consumer({}, of_member)
    factory.get_consumer({}, of_lead)
    files[0].finalize(streams[0], of_member)
    factory.get_consumer({}, of_member)
    monkeypatch.setattr(limits, "_BEGIN_TIMEOUT", -1.0)
    factory.get_consumer({}, of_member)
    assert len([*tmp_path.iterdir()]) == 2, "the finished one, and the last one"


@pytest.mark.usefixtures("surviving")
def test_a_persons_streams_count_by_the_certificate() -> None:
    """Each session of a person has a random name."""

    def parts(person: str) -> list[bool]:
        taken = []
        for number in range(2 * limits._STREAMS):
            message = part(number, f"_admin_{uuid.uuid4()}")
            message.set_prop(MessagePropKey.COMMON_NAME, person)
            taken.append(receive(message))
        return taken

    half = [True] * limits._STREAMS + [False] * limits._STREAMS
    assert parts("member@one.org") == parts("member@two.org") == half


@pytest.mark.usefixtures("surviving")
def test_messages_and_commands_are_bounded_and_hold_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table of one byte takes 64, and FLARE writes a file to where a link in its folder leads."""
    sent = {"numbers": [*range(1000)], "weights": b"w" * 2**24, "text": "ε" * 2**24}
    assert fobs.loads(fobs.dumps(sent)) == sent
    monkeypatch.setattr(limits, "_OBJECTS", 100)
    listed: list[Any] = [[{}] * 101, [[[]] * 60] * 2, dict.fromkeys(range(101), 1)]
    for many in listed:
        with pytest.raises(ValueError, match=r"more than 100 objects|exceeds max"):
            fobs.loads(fobs.dumps(many))

    commands: list[str] = []
    monkeypatch.setattr(hci, "validate_proto", commands.append)
    for command in ("check_status", "x" * 2_000_000):
        AdminServer._create_conn(MagicMock(), command)
    assert commands == ["check_status", ""]

    monkeypatch.setenv("NVFLARE_DATUM_DIR", str(tmp_path))
    sent_file = tmp_path / "sent"
    sent_file.write_bytes(b"{}")
    message = BytesIO()
    with patch.object(
        DatumManager, "get_datums", lambda _: {str(uuid.uuid4()): Datum.file_datum(str(sent_file))}
    ):
        lobs.dump_to_stream({}, message)
    with pytest.raises(ValueError, match="a file"):
        fobs.loads(message.getvalue())
    assert [*tmp_path.iterdir()] == [sent_file]


@pytest.mark.usefixtures("surviving")
def test_a_message_has_arrays_of_its_sender_alone_and_as_many_bytes_as_are_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    origin = {MessageHeaderKey.ORIGIN: f"site-2.{KIT_JOB}"}
    context = {FOBSContextKey.MESSAGE: Message(origin, None)}
    fetch = ViaDownloaderDecomposer._download_from_remote_cell
    assert fetch(SimpleNamespace(), context, {"fqcn": "site-2"}) == "done"
    with pytest.raises(ValueError, match="arrays of site-1 in a message of site-2"):
        fetch(SimpleNamespace(), context, {"fqcn": f"site-1.{KIT_JOB}"})

    weights = {"weight": np.zeros(10_000)}
    item = ArrayDownloadable(weights, 2**20).produce_item(0)
    consumer = ArrayConsumer(None, {})
    consumer.consume("ref", {}, [item])
    assert (consumer.result["weight"] == 0).all()
    monkeypatch.setattr(limits, "_STREAM_BYTES", 100_000)
    with pytest.raises(ValueError, match="more than 100000 bytes"):
        consumer.consume("ref", {}, [item])

    bomb = BytesIO()
    np.savez_compressed(bomb, weight=weights["weight"])
    assert len(bomb.getvalue()) < 1000
    with pytest.raises(ValueError, match="compressed"):
        ArrayConsumer(None, {}).consume("ref", {}, [bomb.getvalue()])


def part(stream: int, origin: str = "site-2", sequence: int = 5, payload: bytes = b"x") -> Message:
    """A part of a stream; part 0 begins it."""
    headers = {MessageHeaderKey.ORIGIN: origin, StreamHeaderKey.STREAM_ID: stream}
    return Message(headers | {StreamHeaderKey.SEQUENCE: sequence}, payload)


def receive(message: Message) -> bool:
    """Whether FLARE takes a part of a stream."""
    task = RxTask.find_or_create_task(message, SimpleNamespace(fire_and_forget=dict))
    if task is not None:
        task.process_chunk(message)
    return task is not None


@pytest.mark.usefixtures("surviving")
def test_a_party_has_few_unfinished_streams(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    most = limits._STREAMS
    taken = [receive(part(number, f"site-2.{KIT_JOB}")) for number in range(2 * most)]
    assert taken == [True] * most + [False] * most
    assert f"refused: site-2 has {most} unfinished streams" in caplog.text
    assert receive(part(0, f"site-2.{KIT_JOB}", 6))  # of one that it has
    assert all(receive(part(number, "site-1")) for number in range(most))
    assert all(receive(part(number, f"server.{KIT_JOB}")) for number in range(2 * most))
    monkeypatch.setattr(limits, "_BEGIN_TIMEOUT", -1.0)  # they never began
    assert receive(part(-1))
    for stream in range(2 * most):
        ended = part(stream, "site-3", sequence=0)
        ended.set_header(StreamHeaderKey.DATA_TYPE, StreamDataType.FINAL)
        assert receive(ended)


@pytest.mark.usefixtures("surviving")
def test_a_party_has_few_bytes_in_unfinished_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_STREAM_BYTES", 500)
    monkeypatch.setattr(limits, "_OUT_OF_ORDER_BYTES", 500)
    assert receive(part(4, "site-4", sequence=0, payload=bytes(600)))
    assert not receive(part(5, "site-4"))
    assert receive(part(1, sequence=0, payload=bytes(400)))
    assert receive(part(2, sequence=3, payload=bytes(600)))
    assert not receive(part(2, sequence=4)) and not receive(part(3))
    assert receive(part(1, "site-1"))


def test_a_party_connects_to_no_address_that_another_one_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CoreCell, "_add_adhoc_connector", CoreCell._add_adhoc_connector)
    connect_nowhere_else()
    cell = CoreCell.__new__(CoreCell)
    assert cell._add_adhoc_connector("server.evil", "tcp://127.0.0.1:1") is None


@pytest.mark.parametrize(
    ("tx_id", "name", "inside"),
    [
        (KIT_JOB, "results.zip", True),
        (KIT_JOB, "folder/results.zip", True),
        (KIT_JOB, "../../.bashrc", False),
        (KIT_JOB, "/home/lead/.bashrc", False),
        ("../../home", "results.zip", False),
        ("/../..", "results.zip", False),
    ],
)
def test_a_download_stays_in_its_folder(
    tx_id: str, name: str, inside: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server names the files: FLARE alone would replace any file of the lead's account."""
    monkeypatch.setattr(FileTransferModule, "_tx_path", FileTransferModule._tx_path)
    monkeypatch.setattr(FileTransferModule, "pull_binary_file", lambda *words: "done")
    keep_downloads_inside()
    module = FileTransferModule.__new__(FileTransferModule)
    module.download_dir = str(tmp_path)
    args = ["pull", "server", tx_id, "ref", KIT_JOB, name]
    if inside:
        assert module.pull_binary_file(args, None) == "done"
    else:
        with pytest.raises(RuntimeError, match="outside of the download"):
            module.pull_binary_file(args, None)


@pytest.mark.parametrize(
    ("sender", "command", "accepted"),
    [
        (f"site-2.{KIT_JOB}", "abort", False),
        ("site-2", "show_stats", False),
        (f"site-2.{KIT_JOB}", "get_task", True),
        (f"site-2.{KIT_JOB}", "submit_update", True),
        ("server", "abort", True),
    ],
)
@pytest.mark.usefixtures("limited")
def test_a_site_aborts_no_job_at_the_server(sender: str, command: str, accepted: bool) -> None:
    agent = ServerCommandAgent.__new__(ServerCommandAgent)
    agent.logger = logging.getLogger("test")
    headers = {MessageHeaderKey.ORIGIN: sender, MessageHeaderKey.TOPIC: command}
    assert (agent._execute_command(Message(headers, None)) == "done") == accepted


RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


@pytest.mark.parametrize("suffix", [".json", ".json.default", ".conf", ".yml"])
def test_flare_finds_its_settings_in_a_kit_and_not_in_a_jobs_folder(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FLARE alone takes comm_config.json of any folder below the kit, or below the working one."""
    search_kits_only()
    monkeypatch.setattr(ConfigService, "_config_path", [])
    of_job = tmp_path / "0815" / "app_site-1" / "config" / f"comm_config{suffix}"
    for folder in (of_job.parent, tmp_path / "startup", tmp_path / "local"):
        folder.mkdir(parents=True)
    of_job.write_text('{"comm_driver_path": "."}')
    monkeypatch.chdir(tmp_path)
    assert ConfigService.load_configuration("comm_config.json") is None, "the working folder"
    ConfigService.initialize({}, [str(tmp_path)])
    assert ConfigService.load_configuration("comm_config.json") is None, "the kit"
    own = tmp_path / "local" / "comm_config.json"
    own.write_text('{"max_message_size": 7}')
    loaded = ConfigService.load_configuration("comm_config.json")
    assert loaded is not None and loaded.to_dict() == {"max_message_size": 7}
    job = ConfigFactory.search_config_format(of_job.name, [str(of_job.parent)])
    assert job[1] == str(of_job), "the folder of a job by its name"


def test_flare_source_has_a_timer_for_each_stream() -> None:
    """Detects a change of what `share_cleanup_thread` replaces; it shows no behaviour."""
    source = inspect.getsource(inspect.getmodule(RxTask))  # type: ignore[arg-type]
    assert "threading.Timer" in source and "self.cleanup_timer.cancel()" in source


def test_received_streams_share_one_cleanup_thread() -> None:
    share_cleanup_thread()
    before = threading.active_count()
    tasks = [RxTask(number, "somebody", cell=None) for number in range(50)]
    for task in tasks:
        RxTask.rx_task_map[(task.origin, task.sid)] = task
        task._schedule_remove_task(0.2)
    assert threading.active_count() <= before + 1
    assert eventually(lambda: not any(key[0] == "somebody" for key in RxTask.rx_task_map))


@contextmanager
def monitored() -> Iterator[tuple[WFCommServer, FLContext]]:
    """FLARE's own server side of tasks with two sites, as a run's controller has it, its monitor at work."""
    engine = SimpleNamespace(get_clients=lambda: [Client("CS", "1"), Client("DU", "2")])
    manager = FLContextManager(
        engine=engine, identity_name="server", job_id="job", public_stickers={}, private_stickers={}
    )
    engine.new_context = manager.new_context
    communicator = WFCommServer(task_check_period=0.01)
    communicator._engine, communicator.controller = engine, SimpleNamespace(name="controller")
    survive_resends(communicator)
    communicator._task_monitor.start()
    try:
        yield communicator, manager.new_context()
    finally:
        communicator._all_done = True
        communicator._task_monitor.join()


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_task_monitor_survives_a_task_that_is_fetched_twice() -> None:
    """While another site still has one: FLARE then notes the task twice. A model would stay in memory for every later step."""
    with monitored() as (communicator, fl_ctx):
        for step in range(2):
            for site in ("CS", "DU"):
                task = Task(
                    "train", Shareable(), result_received_cb=lambda client_task, fl_ctx: None
                )
                communicator.send(task, fl_ctx, targets=[site])
            given = {}
            for site in ("CS", "DU", "CS") if step == 0 else ("CS", "DU"):
                _, given[site], _ = communicator.process_task_request(Client(site, "1"), fl_ctx)
            if step == 0:
                assert [len(task.client_tasks) for task in communicator._tasks] == [2, 1], (
                    "FLARE notes it once: the patch can go"
                )
            for site, number in given.items():
                communicator.process_submission(
                    Client(site, "1"), "train", number, Shareable(), fl_ctx
                )
            assert eventually(lambda: not communicator._tasks, seconds=20)
        assert communicator._task_monitor.is_alive() and not communicator._client_task_map


def test_flare_source_has_the_timeout_of_polls() -> None:
    """Detects a change of what `notice_lost_answers` sets; it shows no behaviour."""
    assert "client" in inspect.signature(ClientRunManager).parameters
    assert "self.client = client" in inspect.getsource(ClientRunManager)
    assert "timeout" in inspect.signature(Communicator).parameters
    assert "timeout = self.timeout" in inspect.getsource(Communicator.pull_task)


def test_a_poll_without_an_answer_is_repeated_after_30_seconds() -> None:
    communicator = Communicator(client_config={"client_name": "A"})
    engine = SimpleNamespace(client=SimpleNamespace(communicator=communicator))
    fl_ctx: Any = SimpleNamespace(get_engine=lambda: engine)
    notice_lost_answers(fl_ctx)
    assert communicator.timeout == 30.0


def test_simulator_ports_are_free_and_not_handed_out_by_the_system(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ports = quiet_ports(3)
    assert len(set(ports)) == 3
    if RANGE.exists():
        assert max(ports) < int(RANGE.read_text().split()[0])
    for port in ports:
        socket.create_server(("localhost", port)).close()
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        draws = iter([port, port, 12_345, 12_346])
        monkeypatch.setattr("random.SystemRandom.choice", lambda *_: next(draws))
        assert quiet_ports(1)[0] in (12_345, 12_346), "a port in use is not taken"


def test_flare_source_draws_the_ports_of_simulated_sites() -> None:
    """Detects a change of what `keep_ports_apart` replaces; it shows no behaviour."""
    source = inspect.getsource(simulator_runner.SimulatorClientRunner.do_one_task)
    assert "get_open_ports(1)[0]" in source


def test_flare_source_waits_for_seconds_between_two_looks() -> None:
    """Detects a change of what `look_often` replaces; it shows no behaviour."""
    source = inspect.getsource(simulator_runner.SimulatorClientRunner)
    assert "time.sleep(1.0)" in source and "time.sleep(interval)" in source
    assert "time.sleep(0.5)" in inspect.getsource(client_runner.ClientRunner.init_run)
    assert "time.sleep(shutdown_grace_time)" in inspect.getsource(mpm.MainProcessMonitor)
    source = inspect.getsource(FederatedServer.start_run)
    assert "time.sleep(self.check_engine_frequency)" in source  # see `end_soon`


def test_the_simulator_looks_ten_times_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (simulator_runner, mpm):
        monkeypatch.setattr(module, "time", module.time)
    look_often()
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    for module, seconds in ((simulator_runner, 1.0), (simulator_runner, 0.02), (mpm, 3.0)):
        module.time.sleep(seconds)
    assert slept == [0.1, 0.02, 0.1] and simulator_runner.time.time() > 0


def test_the_simulator_takes_its_ports_from_the_patch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulator_runner, "get_open_ports", simulator_runner.get_open_ports)
    keep_ports_apart()
    assert simulator_runner.get_open_ports is quiet_ports
