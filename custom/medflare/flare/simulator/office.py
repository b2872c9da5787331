"""The simulator's server process, while the run itself is computed elsewhere: in a fork of the host, which has everything imported.

The run asks for what only FLARE's process can do (reach the sites, write to the job's log, feed FLARE's trackers), and says how it ended.
Its side of the connection is `running`. The imports here are light: neither torch nor MONAI is loaded in the server's process.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import Any, Final

from nvflare.apis.shareable import Shareable

from medflare.core.errors import Aborted, ConfigError, MedflareError
from medflare.core.events import Event
from medflare.flare.exchange.progress import Journal
from medflare.flare.exchange.serving import Ending, ServerSpec
from medflare.flare.exchange.tasks import Answer, TaskExchange
from medflare.flare.exchange.wire import readable, to_bytes, together_from_bytes
from medflare.flare.simulator.relay import Relay

_DIED: Final = (
    "the process in which the simulator's server computed died, as when memory runs out; metrics.jsonl has the steps that were done"
)


class Office:
    """Does what a run elsewhere asks for.

    Args:
        tasks: reaches the sites.
        journal: takes what the run tells; its events follow those of the run.
    """

    def __init__(self, tasks: TaskExchange, journal: Journal):
        self._tasks, self._journal = tasks, journal
        self._noted: list[Event] = []

    def note(self, event: Event) -> None:
        """Add an event to those of the run, which hears of it with the next answer.

        Args:
            event: see `core.events`.
        """
        self._noted.append(event)

    def serve(self, relay: Relay, spec: ServerSpec) -> Ending:
        """Returns when the run is over.

        Args:
            relay: finds the host.
            spec: of the job.

        Raises:
            Aborted: it was stopped, and has written its results.
            MedflareError: the host or the run died.
        """
        with relay.connected("server", asdict(spec)) as connection:
            try:
                said = self._listen(connection)
            except (EOFError, ConnectionError) as error:
                raise MedflareError(_DIED) from error
        if said["aborted"]:
            raise Aborted(said["reason"])
        return Ending(said["reason"], said["table"])

    def _listen(self, connection: Connection) -> dict[str, Any]:
        """What the run says last."""
        while True:
            said: dict[str, Any] = json.loads(connection.recv_bytes())
            if said["events"] is not None:
                self._journal.events.replace(said["events"])
            if said["what"] == "say":
                self._journal.say(said["line"])
            elif said["what"] == "step":
                self._journal.observe(said["line"])
            elif said["what"] == "end":
                return said
            else:
                self._answer(said, connection)

    def _answer(self, asked: Mapping[str, Any], connection: Connection) -> None:
        """What the sites have to do with; that the job is being stopped, or names a site that is not there, is the run's to record."""
        answer: dict[str, Any]
        try:
            if asked["what"] == "present":
                answer = {"sites": self._tasks.present(asked["outside"])}
            else:
                answer = {"answers": self._ask(asked["phase"], asked["round"], connection)}
        except Aborted as error:
            answer = {"aborted": str(error)}
        except ConfigError as error:
            answer = {"refused": str(error)}
        noted, self._noted = self._noted, []
        connection.send_bytes(json.dumps({**answer, "noted": noted}).encode())

    def _ask(self, phase: str, round: int, connection: Connection) -> dict[str, dict[str, Any]]:
        """Site -> what became of its task; the answers that can be read go to the run as they come."""

        def passed_on(site: str, answer: Shareable) -> tuple[str, str]:
            content, problem, kind = readable(answer, to_bytes)
            if content is not None:
                connection.send_bytes(json.dumps({"site": site}).encode())
                connection.send_bytes(content)
            return problem, kind

        found = self._tasks(phase, round, together_from_bytes(connection.recv_bytes()), passed_on)
        return {site: _told(answer) for site, answer in found.items()}


def _told(answer: Answer[tuple[str, str]]) -> dict[str, Any]:
    """What the run hears of a site's task beside the answer."""
    problem, kind = (answer.problem, answer.kind) if answer.content is None or answer.problem else answer.content
    return {"problem": problem, "kind": kind, "seconds": answer.seconds}
