"""A run in a fork of the simulator's host: what it needs of FLARE it asks the server's process for, see `office`."""

import json
import traceback
from collections.abc import Iterable, Mapping
from multiprocessing.connection import Connection
from typing import Any

from nvflare.apis.shareable import Shareable

from medflare.core.errors import Aborted, ConfigError
from medflare.core.events import Event, EventLog
from medflare.evaluation.record import json_ready
from medflare.federation.outcome import StepReport
from medflare.flare.exchange.messages import MessageExchange
from medflare.flare.exchange.serving import Ending, ServerSpec
from medflare.flare.exchange.tasks import A, Answer, Read
from medflare.flare.exchange.wire import from_bytes, register_tensors, together_to_bytes


class RunSeat:
    """The server's part of a job, in its fork.

    Args:
        spec: of the job, a `ServerSpec` as JSON has it.
    """

    def __init__(self, spec: Mapping[str, Any]):
        self._spec = ServerSpec(**{**spec, "members": tuple(spec["members"])})

    def answer(self, connection: Connection) -> None:
        """Run to the end, and say how it ended."""
        register_tensors()
        line = _Line(connection)
        try:
            ending = self._ended(line)
        except Aborted as error:
            line.tell("end", aborted=True, reason=str(error))
            return
        except Exception as error:  # the run's results say so already
            traceback.print_exc()
            ending = Ending(f"{type(error).__name__}: {error}", "")
        line.tell("end", aborted=False, reason=ending.reason, table=ending.table)

    def _ended(self, line: "_Line") -> Ending:
        try:
            run = self._spec.run(self._spec.aggregator(), say=line.say, observe=line.observe, events=line.events)
        except Exception as error:
            return self._spec.refused(error)
        return Ending.of(run.execute(MessageExchange(RelayedTasks(line), run.outside), resume=bool(run.settings.resume)))


class _Line:
    """The connection to the server's process.

    Attributes:
        events: of the run.
    """

    def __init__(self, connection: Connection):
        self.connection = connection
        self.events = EventLog()
        self._told: list[Event] = []

    def say(self, line: str) -> None:
        """A line for the job's log."""
        self.tell("say", line=line)

    def observe(self, report: StepReport) -> None:
        """A step for FLARE's trackers."""
        self.tell("step", line=json_ready(report.line()))

    def tell(self, what: str, **more: Any) -> None:
        """Send something, and the events if there are others than last time."""
        events = self.events.to_list()
        said = {"what": what, "events": None if events == self._told else events, **more}
        self._told = events
        self.connection.send_bytes(json.dumps(said).encode())

    def hear(self) -> dict[str, Any]:
        """What is answered next.

        Raises:
            Aborted: the job is being stopped.
            ConfigError: the job names a site that is not there.
        """
        answer: dict[str, Any] = json.loads(self.connection.recv_bytes())
        self.events.extend(answer.pop("noted", ()))
        if "aborted" in answer:
            raise Aborted(answer["aborted"])
        if "refused" in answer:
            raise ConfigError(answer["refused"])
        return answer


class RelayedTasks:
    """The job's tasks, which the server's process has; see `TaskExchange`.

    Args:
        line: to that process.
    """

    def __init__(self, line: _Line):
        self._line = line

    def present(self, outside: Iterable[str]) -> list[str]:
        """See `TaskExchange.present`."""
        self._line.tell("present", outside=list(outside))
        found: list[str] = self._line.hear()["sites"]
        return found

    def __call__(self, phase: str, round: int, outgoing: Mapping[str, Shareable], read: Read[A]) -> dict[str, Answer[A]]:
        """See `TaskExchange`."""
        self._line.tell("ask", phase=phase, round=round)
        self._line.connection.send_bytes(together_to_bytes(outgoing))
        contents: dict[str, A] = {}
        while "site" in (said := self._line.hear()):
            contents[said["site"]] = read(said["site"], from_bytes(self._line.connection.recv_bytes()))
        return {site: Answer(contents.get(site), **found) for site, found in said["answers"].items()}
