"""What tests of this room share."""

import asyncio
import json
import shutil
import subprocess
import sys
from asyncio.sslproto import SSLProtocol
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from nvflare.apis.impl.job_def_manager import SimpleJobDefManager
from nvflare.app_common.job_schedulers.job_scheduler import DefaultJobScheduler
from nvflare.app_common.logging.job_log_receiver import JobLogReceiver
from nvflare.app_common.np.np_downloader import ArrayConsumer
from nvflare.app_common.storages import filesystem_storage
from nvflare.app_common.streamers import file_streamer
from nvflare.fuel.f3.cellnet import cell
from nvflare.fuel.f3.cellnet.core_cell import CoreCell
from nvflare.fuel.f3.cellnet.net_manager import NetManager
from nvflare.fuel.f3.drivers import aio_http_driver, socket_conn
from nvflare.fuel.f3.drivers.socket_conn import ConnectionHandler
from nvflare.fuel.f3.drivers.tcp_driver import TcpStreamServer
from nvflare.fuel.f3.sfm.conn_manager import ConnManager
from nvflare.fuel.f3.streaming import byte_receiver
from nvflare.fuel.f3.streaming.cacheable import ItemConsumer
from nvflare.fuel.hci.client.file_transfer import FileTransferModule
from nvflare.fuel.hci.server.hci import AdminServer
from nvflare.fuel.sec.audit import Auditor
from nvflare.fuel.utils import zip_utils
from nvflare.fuel.utils.fobs.decomposers.via_downloader import ViaDownloaderDecomposer
from nvflare.private.fed.client.admin import FedAdminAgent
from nvflare.private.fed.server.admin import FedAdminServer
from nvflare.private.fed.server.fed_server import FederatedServer
from nvflare.private.fed.server.job_meta_validator import JobMetaValidator
from nvflare.private.fed.server.job_runner import JobRunner
from nvflare.private.fed.server.server_command_agent import ServerCommandAgent
from nvflare.private.fed.server.server_engine import ServerEngine
from nvflare.private.fed.server.server_runner import ServerRunner

from medflare.cli.startup_kit import template
from medflare.flare.jobs.building import build_job
from medflare.flare.other_parties import connections, jobs, limits, senders

# What `other_parties` changes of FLARE in the processes of a party, as it is without.
_CHANGED = {
    cell: ("decode_payload", "_is_server_job_cell"),
    byte_receiver: ("MAX_COMPLETED_TASK_TTL",),
    byte_receiver.RxTask: ("find_or_create_task",),
    CoreCell: ("_add_adhoc_connector", "_process_received_msg"),
    ConnManager: (
        "update_endpoint",
        "handle_new_connection",
        "get_dict_payload",
        "process_frame",
        "process_frame_task",
    ),
    TcpStreamServer: ("__init__",),
    ConnectionHandler: ("handle",),
    SSLProtocol: ("connection_made", "connection_lost", "_on_handshake_complete"),
    asyncio.constants: ("SSL_HANDSHAKE_TIMEOUT",),
    aio_http_driver: ("MAX_FRAME_SIZE",),
    socket_conn: ("MAX_FRAME_SIZE",),
    filesystem_storage: ("get_all_file_paths",),
    DefaultJobScheduler: ("_do_schedule_job",),
    JobMetaValidator: ("validate", "_validate_zf"),
    JobRunner: ("run", "_job_complete_process"),
    SimpleJobDefManager: ("create",),
    NetManager: ("get_spec",),
    FederatedServer: ("_validate_auth_headers", "_resolve_missing_client_outcome"),
    ServerCommandAgent: ("_execute_command", "_aux_communicate"),
    ServerEngine: ("_handle_aux_message",),
    ServerRunner: ("ABORT_RETURN_CODES",),
    JobLogReceiver: ("_on_chunk_received",),
    ViaDownloaderDecomposer: ("_download_from_remote_cell",),
    ItemConsumer: ("consume",),
    ArrayConsumer: ("_to_dict",),
    zip_utils: ("_validate_zip_entries",),
    AdminServer: ("_process_upload",),
    file_streamer._ChunkConsumerFactory: ("get_consumer",),
    file_streamer._ChunkConsumer: ("consume", "finalize"),
    FileTransferModule: ("_tx_path", "pull_binary_file"),
    FedAdminAgent: ("_dispatch_request",),
    FedAdminServer: ("send_requests",),
    Auditor: ("add_event", "add_job_event"),
}
_ORIGINALS = [(owner, name, vars(owner)[name]) for owner in _CHANGED for name in _CHANGED[owner]]


@pytest.fixture(autouse=True)
def unchanged_flare() -> Iterator[None]:
    """FLARE is as it was after each test, also after one that makes a party's JobComponents."""
    yield
    for owner, name, original in _ORIGINALS:
        setattr(owner, name, original)
    for module in (connections, jobs, limits, senders):
        for change in vars(module).values():
            if hasattr(change, "cache_clear"):
                change.cache_clear()


@pytest.fixture
def simulator() -> "Iterator[subprocess.Popen[bytes]]":
    """A process that a host takes for its simulator. Its hosts, children of the process that tests, are gone when the test is over."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
    before = psutil.Process().children()
    yield process
    process.kill()
    process.wait()
    _, left = psutil.wait_procs(set(psutil.Process().children()) - set(before), timeout=30)
    assert not left


@pytest.fixture
def party(tmp_path: Path) -> Path:
    """The kit of a site with a job's folder in it."""
    root = tmp_path / "site-1"
    (root / "startup").mkdir(parents=True)
    (root / "local").mkdir()
    (root / "local" / "resources.json").write_text(json.dumps(template("site", "resources.json")))
    build_job("fedavg", "phantom", byoc=False, out=tmp_path / "job")
    shutil.copytree(tmp_path / "job" / "app", root / "4711" / "app_site-1")
    return root
