"""How the plain loop reaches its sites: one after the other here, or several at a time in forks.

A site computes in the same way, on as many threads, in either case, so that any number of workers
ends in the same weights.
"""

import json
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from safetensors.torch import load, save

from medflare.core.errors import Aborted, ConfigError, MedflareError, StepFailed
from medflare.core.message import Message, Messages
from medflare.core.store import SEPARATOR, flat
from medflare.core.text import JsonDict
from medflare.federation.builtin_messages import RUN_ROUNDS
from medflare.federation.exchange import SiteReplies, SiteReply
from medflare.federation.participant import Participant, import_ahead
from medflare.federation.settings import step_name
from medflare.federation.step_errors import named_errors
from medflare.methods.base import Step


@dataclass
class LocalExchange:
    """Calls the sites' participants one after the other, in sorted order.

    Args:
        open_participant: makes a site's participant at its first request; its errors are that
            site's errors.
        absent: round -> sites that cannot be reached in it.
        forgetful: make a new participant for every request, as FLARE does with fewer threads than
            sites.
    """

    sites: Sequence[str]
    open_participant: Callable[[str], Participant]
    absent: Mapping[int, Iterable[str]] = field(default_factory=dict)
    forgetful: bool = False
    participants: dict[str, Participant] = field(default_factory=dict)

    def present(self, round: int) -> list[str]:
        """The sites that are not absent in this round, sorted."""
        return sorted(set(self.sites).difference(self.absent.get(round, ())))

    def __call__(self, step: Step, outgoing: Messages) -> SiteReplies:
        return {site: self.reply(site, step, outgoing[site].copied()) for site in sorted(outgoing)}

    def reply(self, site: str, step: Step, message: Message) -> SiteReply:
        """One site's reply, or its MedflareError as a problem.

        Raises:
            Aborted: the run was stopped.
            StepFailed: the method's code has a bug.
        """
        started = time.monotonic()
        reply = SiteReply()
        try:
            if site not in self.participants or self.forgetful:
                self.participants[site] = self.open_participant(site)
            participant = self.participants[site]
            name = step_name(step.phase, step.round, message.get(RUN_ROUNDS))
            with named_errors(f"site {site} in {name}", participant.method.site_class):
                message = participant.reply(step.phase, step.round, message)
            reply.message = message.aligned()
        except Aborted:
            raise
        except MedflareError as error:
            reply.problem = str(error)
        reply.seconds = time.monotonic() - started
        return reply

    def close(self) -> None:
        """End the processes of the sites; this exchange has none."""


def send(connection: Connection, words: JsonDict, message: Message) -> None:
    """Send a message, and JSON values beside it, to another process, which calls `receive`.

    Raises:
        OSError: the process is gone.
    """
    # safetensors changes the order.
    names = {entry: list(state) for entry, state in message.states.items()}
    header = json.dumps({"words": words, "meta": message.meta, "names": names})
    connection.send_bytes(header.encode())
    connection.send_bytes(save(flat(message)))


def receive(connection: Connection) -> tuple[JsonDict, Message]:
    """The next message, and the JSON values beside it.

    Raises:
        EOFError: the other process has closed the connection.
    """
    header = json.loads(connection.recv_bytes())
    tensors = load(connection.recv_bytes())
    states = {}
    for entry, names in header["names"].items():
        states[entry] = {name: tensors[f"{entry}{SEPARATOR}{name}"] for name in names}
    return header["words"], Message(states, header["meta"]).aligned()


@dataclass
class ForkedExchange(LocalExchange):
    """A `LocalExchange` with every site in a separate process, forked at its first request.

    Args:
        workers: how many sites work at the same time.

    Raises:
        ConfigError: this process cannot be forked.
    """

    workers: int = 2
    _forks: dict[str, tuple[BaseProcess, Connection]] = field(default_factory=dict)
    _seconds: dict[str, float] = field(default_factory=dict)  # of each site's last reply

    def __post_init__(self) -> None:
        if torch.cuda.is_initialized():
            raise ConfigError(
                "this process has used a GPU already and cannot be forked: "
                "start a new one, or remove 'workers'"
            )
        import_ahead()

    def __call__(self, step: Step, outgoing: Messages) -> SiteReplies:
        # The slowest site begins first, so that the others need not wait for it at the end.
        waiting = sorted(outgoing, key=lambda site: self._seconds.get(site, 0.0))
        busy: dict[Any, str] = {}  # connection -> site
        replies: SiteReplies = {}
        while waiting or busy:
            while waiting and len(busy) < self.workers:
                site = waiting.pop()
                busy[self._start(site, step, outgoing[site])] = site
            for connection in wait(list(busy)):
                site = busy.pop(connection)
                replies[site] = self._received(site, step)
                self._seconds[site] = replies[site].seconds
        return replies

    def close(self) -> None:
        """End all processes, at the same time."""
        for process, _ in self._forks.values():
            process.kill()
        for site in list(self._forks):
            self._end(site)

    def _start(self, site: str, step: Step, message: Message) -> Connection:
        """The connection to the site's process, which works on the step."""
        words = {"phase": step.phase, "round": step.round}
        try:
            send(self._connection(site), words, message)
        except OSError:  # it was killed between two steps; its state is on disk
            self._end(site)
            send(self._connection(site), words, message)
        return self._connection(site)

    def _end(self, site: str) -> int:
        """Kill the site's process and return its exit code: minus the signal that ended it."""
        process, connection = self._forks.pop(site)
        connection.close()
        process.kill()
        process.join()
        return process.exitcode or 0

    def _received(self, site: str, step: Step) -> SiteReply:
        where = step_name(step.phase, step.round)
        try:
            words, message = receive(self._forks[site][1])
        except (EOFError, ConnectionError):
            code = self._end(site)
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            return SiteReply(problem=f"site {site}: its process ended in {where} ({how})")
        if "bug" in words:
            raise StepFailed(words["bug"]) from RuntimeError(words["trace"])
        if "trace" in words:
            raise RuntimeError(f"site {site} failed in {where}:\n{words['trace']}")
        if "aborted" in words:
            raise Aborted(words["aborted"])
        reply = SiteReply(**words)
        if not reply.problem:
            reply.message = message
        return reply

    def _connection(self, site: str) -> Connection:
        """The connection to the site's process, which is forked if there is none."""
        if site in self._forks:
            return self._forks[site][1]
        here, there = Pipe()
        inherited = [here, *(connection for _, connection in self._forks.values())]
        process = get_context("fork").Process(
            target=self._work, args=(os.getpid(), site, there, inherited)
        )
        process.start()
        there.close()
        self._forks[site] = process, here
        return here

    def _work(self, parent: int, *arguments: Any) -> None:
        """Run the site's process, which ends with its parent. It works in a new thread: torch's
        other threads belong to the process that forked, and are missing in this one.
        """
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        thread = threading.Thread(target=self._serve, args=arguments)
        thread.start()
        while thread.is_alive() and os.getppid() == parent:
            thread.join(1)
        os._exit(0)

    def _serve(self, site: str, connection: Connection, inherited: Iterable[Connection]) -> None:
        """Reply to one step after the other until the parent closes the connection."""
        for of_the_parent in inherited:
            of_the_parent.close()
        with suppress(BaseException):
            while True:
                request, message = receive(connection)
                words, message = self._replied(site, Step(**request), message)
                send(connection, words, message)

    def _replied(self, site: str, step: Step, message: Message) -> tuple[JsonDict, Message]:
        try:
            reply = self.reply(site, step, message)
        except Aborted as error:
            return {"aborted": str(error)}, Message()
        except StepFailed as error:
            return {"bug": str(error), "trace": traceback.format_exc()}, Message()
        except Exception:
            return {"trace": traceback.format_exc()}, Message()
        words = {"problem": reply.problem, "seconds": reply.seconds}
        return words, reply.message or Message()


@contextmanager
def threads_of_a_site() -> Iterator[None]:
    """Within the context, this process and its forks compute on OMP_NUM_THREADS threads, by default
    one.

    The number of threads decides the order of sums, hence the last bits: it must not depend on the
    number of workers.

    Raises:
        ConfigError: OMP_NUM_THREADS is not a number of threads.
    """
    value = os.environ.get("OMP_NUM_THREADS") or "1"
    first = value.split(",")[0].strip()  # it may list a number for each level of nested regions
    if not first.isdecimal() or int(first) < 1:
        raise ConfigError(
            f"OMP_NUM_THREADS is {value!r}: give the number of threads of a site, for example 1"
        )
    before = torch.get_num_threads()
    torch.set_num_threads(int(first))
    try:
        yield
    finally:
        torch.set_num_threads(before)
