"""The plain loop on several cores: every site lives in a fork of this process, and so many of them work at the same time.

Each site computes as it does where one process calls all sites in turn, on as many threads, so that any number of workers ends in
the same bits. A fork is made when its site is first asked, and holds the site's data from then on.
"""

import json
import os
import selectors
import signal
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import torch
from safetensors.torch import load, save

from medflare.core.errors import Aborted, ConfigError
from medflare.core.message import Message
from medflare.core.store import SEPARATOR, flat
from medflare.federation.exchange import Reply, laid_aside
from medflare.federation.local.exchange import LocalExchange
from medflare.federation.participant import Participant, import_ahead
from medflare.methods.base import Step

_PICTURES = "pictures of this site"  # entry beside those of the message; no method's entry has blanks
Words = dict[str, Any]  # what is said beside a message, as JSON


@dataclass
class _Fork:
    """The process that acts for a site."""

    process: int
    connection: Connection

    def kill(self) -> None:
        """Begin to end it: the system takes a while to have its memory back."""
        self.connection.close()
        with suppress(ProcessLookupError):
            os.kill(self.process, signal.SIGKILL)

    def end(self) -> int:
        """Its exit status, as of `os.waitstatus_to_exitcode`: minus a signal's number where one ended it."""
        self.kill()
        return os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])


def send(connection: Connection, words: Words, message: Message) -> None:
    """Send a message to another process of this machine, which calls `receive`.

    Raises:
        OSError: the other process is gone.
    """
    names = {entry: list(state) for entry, state in message.states.items()}  # safetensors has an order of its own
    connection.send_bytes(json.dumps({"words": words, "meta": message.meta, "names": names}).encode())
    connection.send_bytes(save(flat(message)))


def receive(connection: Connection) -> tuple[Words, Message]:
    """The next message.

    Raises:
        EOFError: the other process has closed the connection.
    """
    said = json.loads(connection.recv_bytes())
    tensors = load(connection.recv_bytes())
    states = {entry: {name: tensors[f"{entry}{SEPARATOR}{name}"] for name in names} for entry, names in said["names"].items()}
    return said["words"], Message(states, said["meta"])


class ForkedExchange:
    """As `LocalExchange`, with every site in a process of its own.

    Args:
        sites: names.
        opened: as for `LocalExchange`; called in the site's process.
        absent: as for `LocalExchange`.
        workers: how many sites work at the same time.
        pictures: takes what sites show, which would stay in their processes.

    Raises:
        ConfigError: this process cannot be forked.
    """

    def __init__(
        self,
        sites: Sequence[str],
        opened: Callable[[str], Participant],
        absent: Mapping[int, Iterable[str]] | None,
        workers: int,
        pictures: dict[str, bytes],
    ):
        if not hasattr(os, "fork"):
            raise ConfigError("this system cannot fork a process: leave 'workers' out")
        if torch.cuda.is_initialized():
            raise ConfigError("this process has used a GPU already and cannot be forked: start a new one, or leave 'workers' out")
        import_ahead()
        self._local = LocalExchange(sites, opened, absent)
        self._workers = workers
        self._pictures = pictures
        self._forks: dict[str, _Fork] = {}

    def present(self, round: int) -> list[str]:
        """The sites that are not listed as absent in this round, sorted."""
        return self._local.present(round)

    def __call__(self, step: Step, outgoing: Mapping[str, Message]) -> dict[str, Reply]:
        waiting = sorted(outgoing)[::-1]
        replies: dict[str, Reply] = {}
        with selectors.DefaultSelector() as answers:
            while waiting or answers.get_map():
                while waiting and len(answers.get_map()) < self._workers:
                    site = waiting.pop()
                    fork = self._asked(site, step, outgoing[site])
                    answers.register(fork.connection, selectors.EVENT_READ, site)
                for key, _ in answers.select():
                    answers.unregister(key.fileobj)
                    replies[key.data] = self._reply(key.data, step)
        return replies

    def close(self) -> None:
        """End all processes, at the same time."""
        for fork in self._forks.values():
            fork.kill()
        for fork in self._forks.values():
            fork.end()
        self._forks.clear()

    def _asked(self, site: str, step: Step, message: Message) -> _Fork:
        """The site's process, at work on the step."""
        words = {"phase": step.phase, "round": step.round}
        if site not in self._forks:
            self._forks[site] = self._forked(site)
        try:
            send(self._forks[site].connection, words, message)
        except OSError:  # it died between two steps: what it remembered on disk is enough for another one
            self._forks.pop(site).end()
            self._forks[site] = self._forked(site)
            send(self._forks[site].connection, words, message)
        return self._forks[site]

    def _reply(self, site: str, step: Step) -> Reply:
        try:
            words, message = receive(self._forks[site].connection)
        except (EOFError, ConnectionError):
            code = self._forks.pop(site).end()
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            return Reply(problem=f"site {site}: its process ended in '{step.phase}' of round {step.round} ({how})")
        if trace := words.get("trace"):
            raise RuntimeError(f"site {site} failed in '{step.phase}' of round {step.round}:\n{trace}")
        if "aborted" in words:
            raise Aborted(words["aborted"])
        for title, png in message.states.pop(_PICTURES, {}).items():
            self._pictures[title] = png.numpy().tobytes()
        problem, seconds = words["problem"], words["seconds"]
        return Reply(problem=problem, seconds=seconds) if problem else laid_aside(Reply(message, seconds=seconds))

    def _forked(self, site: str) -> _Fork:
        ours, theirs = Pipe()
        parent = os.getpid()
        process = os.fork()
        if process == 0:
            ours.close()
            for other in self._forks.values():
                other.connection.close()
            self._act(site, theirs, parent)
        theirs.close()
        return _Fork(process, ours)

    def _act(self, site: str, connection: Connection, parent: int) -> NoReturn:
        """A site's life: step after step, until the parent closes the connection or is gone."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
        known = set(self._pictures)
        with suppress(BaseException):  # this process never leaves the loop in which it was forked
            while True:
                asked, message = receive(connection)
                if os.getppid() != parent:
                    break
                words, reply = self._answered(site, Step(asked["phase"], asked["round"]), message)
                if new := sorted(self._pictures.keys() - known):
                    shown = {title: torch.frombuffer(bytearray(self._pictures[title]), dtype=torch.uint8) for title in new}
                    reply = Message({**reply.states, _PICTURES: shown}, reply.meta)
                    known |= shown.keys()
                send(connection, words, reply)
        os._exit(0)

    def _answered(self, site: str, step: Step, message: Message) -> tuple[Words, Message]:
        try:
            reply = self._local.answer(site, step, message)
        except Aborted as error:
            return {"aborted": str(error)}, Message()
        except Exception:
            return {"trace": traceback.format_exc()}, Message()
        return {"problem": reply.problem, "seconds": reply.seconds}, reply.message or Message()


@contextmanager
def threads_of_a_site() -> Iterator[None]:
    """Meanwhile this process, and what is forked from it, computes on OMP_NUM_THREADS threads; on one where that is not set.

    The number of threads decides in which order sums are taken, hence the last bits: it must not depend on the number of workers.

    Raises:
        ConfigError: OMP_NUM_THREADS is no number of threads.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(_threads())
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _threads() -> int:
    """Of OMP_NUM_THREADS, which may be a list with a number for each level of nested regions: sites compute at the first."""
    said = os.environ.get("OMP_NUM_THREADS") or "1"
    first = said.split(",")[0].strip()
    if not first.isdecimal() or int(first) < 1:
        raise ConfigError(f"OMP_NUM_THREADS is {said!r}: give the number of threads that a site computes on, for example 1")
    return int(first)
