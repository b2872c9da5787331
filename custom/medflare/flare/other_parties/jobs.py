"""Jobs of others go on, whatever one party sends, and start only as they were authorized."""

import logging
import os
import re
import secrets
import shutil
import threading
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from nvflare.apis.client import Client
from nvflare.apis.fl_constant import RunProcessKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_def import Job, JobMetaKey
from nvflare.apis.workspace import Workspace
from nvflare.app_common.job_schedulers.job_scheduler import DefaultJobScheduler
from nvflare.app_common.storages import filesystem_storage
from nvflare.fuel.f3.cellnet import cell
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey
from nvflare.fuel.f3.message import Message
from nvflare.fuel.sec.audit import Auditor
from nvflare.private.admin_defs import Message as AdminMessage
from nvflare.private.admin_defs import MsgHeader
from nvflare.private.admin_defs import ReturnCode as AdminReturnCode
from nvflare.private.defs import (
    ERROR_MSG_PREFIX,
    CellMessageHeaderKeys,
    JobFailureMsgKey,
    TrainingTopic,
)
from nvflare.private.fed.server.message_send import ClientReply
from nvflare.private.scheduler_constants import ShareableHeader

from medflare.core.text import printable, reason_line
from medflare.data.local import find_private_folder
from medflare.flare.names import JOB_ID

_TOKEN = 1000  # characters of a token for a site's resources, which a job's metadata repeat
_NO_FIELDS = str.maketrans("[]", "()")  # FLARE writes a field of audit.log in brackets
_UNPACKED = re.compile("[0-9a-f]{16}")  # the end of the name of a job's folder while it is checked
_LOG = logging.getLogger(__name__)


@cache
def audit_line_by_line() -> None:
    """Have FLARE write an event to audit.log as one line, in this process: otherwise texts of other
    parties could be lines, and fields, in anyone's name.
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
    """Have FLARE start the other jobs, in this process, if one cannot be scheduled, or its lead
    deletes it while it is deployed: for the text "1" as a number of sites, FLARE starts none any
    more.
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
def archive_whole_jobs() -> None:
    """Have FLARE's server, in this process, archive a job with all its files or try again: it skips
    folders that it cannot open, as without any more open files, and then deletes them.
    """

    def refuse(error: OSError) -> None:
        raise error

    def all_paths(folder: str) -> list[str]:
        paths = []
        for inside, folders, files in os.walk(folder, onerror=refuse):
            paths += [os.path.join(inside, name) for name in (*files, *folders)]
        return paths

    filesystem_storage.get_all_file_paths = all_paths


@cache
def start_jobs_without_refusing_sites() -> None:
    """Have FLARE's server, in this process, ignore an answer that it cannot use, or by which a site
    refuses to start a job: otherwise it ends the job for all sites.
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
    of a refusal is made plain, as metadata of the job store it.
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


def _deployment_refusal(folder: Path, job_meta: Any) -> str | None:
    """Why a job is not unpacked into this folder of the kit, named as its id; None if it is."""
    if not JOB_ID.fullmatch(folder.name):  # it would replace local/
        return "it names no job"
    if job_meta.get(JobMetaKey.JOB_ID.value) != folder.name:
        return "the metadata are those of another job"
    if find_private_folder(folder).exists():  # a lead can delete a job, and give its id again
        return "a job of this id was here before"
    return None


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
        folder = Path(workspace.get_run_dir(job_id))
        reason = _deployment_refusal(folder, job_meta)
        if reason:
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
