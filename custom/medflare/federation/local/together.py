"""The plain loop with the sites' training as one batch: each site answers on its own, and where it would train, it waits for the others.

What a site does before and after its training is what it does under every engine, one site after the other. An answer that waits keeps
its place in a thread of its own; no two threads ever work at the same time.
"""

import time
from collections.abc import Callable, Mapping
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any

from medflare.core.errors import Aborted, ConfigError, MedflareError
from medflare.core.message import Message
from medflare.data.sites.local import PLACE
from medflare.data.sites.site import Site
from medflare.federation.exchange import Reply
from medflare.federation.local.exchange import LocalExchange, own_copy
from medflare.federation.settings import PHASES_OF_ALL
from medflare.methods.base import Step
from medflare.methods.catalogue import get_method, method_names
from medflare.methods.method import Method
from medflare.methods.parts.together import check_together, train_together
from medflare.methods.parts.training import Lesson, trained_by
from medflare.privacy.settings import is_private, more_than_plain
from medflare.tasks.config import TaskConfig


class TogetherExchange(LocalExchange):
    """As `LocalExchange`, with the lessons of a step done by `parts.together`."""

    def __call__(self, step: Step, outgoing: Mapping[str, Message]) -> dict[str, Reply]:
        if step.phase in PHASES_OF_ALL:  # nothing is trained, and what the caller gave is called in the caller's thread
            return super().__call__(step, outgoing)
        answers = {site: _Answer(partial(self._own, site, step, outgoing[site])) for site in sorted(outgoing)}
        try:
            said = {site: answer.go_on() for site, answer in answers.items()}
            while lessons := {site: word for site, word in said.items() if isinstance(word, Lesson)}:
                for site, outcome in _trained(lessons, answers).items():
                    said[site] = answers[site].go_on(outcome)
        finally:
            for answer in answers.values():
                answer.end()
        return {site: replace(word, seconds=answers[site].seconds) for site, word in said.items() if isinstance(word, Reply)}

    def _own(self, site: str, step: Step, message: Message) -> Reply:
        return self.answer(site, step, own_copy(message))


class _Answer:
    """A site's answer on its way: a thread that works only while somebody waits in `go_on`.

    Args:
        answer: gives it; what it would train is handed out by `go_on`.

    Attributes:
        seconds: that the site was at work, its share of what sites do together included.
    """

    def __init__(self, answer: Callable[[], Reply]):
        self.seconds = 0.0
        self._told: SimpleQueue[float | BaseException] = SimpleQueue()
        self._says: SimpleQueue[Lesson | Reply | BaseException] = SimpleQueue()
        self._thread = Thread(target=copy_context().run, args=(self._work, answer), daemon=True)

    def go_on(self, outcome: float | BaseException | None = None) -> Lesson | Reply:
        """Let the site work until it would train, or has answered.

        Args:
            outcome: of the lesson that it waits for; None: it begins.

        Raises:
            BaseException: whatever its answer raised.
        """
        started = time.monotonic()
        if outcome is None:
            self._thread.start()
        else:
            self._told.put(outcome)
        said = self._says.get()
        self.seconds += time.monotonic() - started
        if isinstance(said, BaseException):
            raise said
        return said

    def end(self) -> None:
        """Leave no thread behind: an answer that still waits is given up as one that was stopped."""
        if self._thread.is_alive():
            self._told.put(Aborted("another site's answer ended the step"))
            self._thread.join()

    def _work(self, answer: Callable[[], Reply]) -> None:
        try:
            with trained_by(self._wait):
                said: Reply | BaseException = answer()
        except BaseException as error:
            said = error
        self._says.put(said)

    def _wait(self, lesson: Lesson) -> float:
        self._says.put(lesson)
        outcome = self._told.get()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome


def _trained(lessons: Mapping[str, Lesson], answers: Mapping[str, _Answer]) -> dict[str, float | MedflareError]:
    """site -> what became of its lesson; those of one device are one batch."""
    outcomes: dict[str, float | MedflareError] = {}
    for device in dict.fromkeys(lesson.site.device for lesson in lessons.values()):
        sites = [site for site, lesson in lessons.items() if lesson.site.device == device]
        started = time.monotonic()
        outcomes |= zip(sites, train_together([lessons[site] for site in sites]), strict=True)
        for site in sites:
            answers[site].seconds += (time.monotonic() - started) / len(sites)
    return outcomes


def check_method(method: Method, task: TaskConfig, hyper: Mapping[str, Any]) -> None:
    """Before anything starts: the method's sites can train as one batch.

    Args:
        method: what runs.
        task: what is to be learnt.
        hyper: its hyper-parameters, see `core.hyper.halved`.

    Raises:
        ConfigError: they cannot, with the reason.
    """
    if not declared(method):
        able = ", ".join(name for name in method_names() if declared(get_method(name)))
        raise ConfigError(f"together: sites of method {method.name!r} train in a way of their own; leave it out, or run one of {able}")
    if is_private(method.plan(task, (), hyper).site_hyper):
        raise ConfigError("together: with dp_noise every site draws and clips on its own; leave out one of them")
    check_together(task)


def declared(method: Method) -> bool:
    """Whether a method's site half says of itself that its sites can train as one batch."""
    return bool(vars(method.site_class).get("together"))


def check_site(site: Site) -> None:
    """What only the site can tell.

    Raises:
        ConfigError: it shares its batches among devices, or has its networks compiled.
    """
    if setting := more_than_plain(site):
        raise ConfigError(f"site {site.name}: together takes plain networks on one device; leave {setting} out of {PLACE}, or together")
