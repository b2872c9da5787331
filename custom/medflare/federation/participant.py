"""One site's part in a federation, the same in every engine: it enrolls, replies to steps, stores
its state, and evaluates the final models.
"""

from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from typing import Any

import torch

from medflare.core.errors import Aborted, ConfigError, DataError, MessageError
from medflare.core.events import Event, EventLog
from medflare.core.message import Message
from medflare.core.packages import installed
from medflare.core.states import StateDict
from medflare.core.store import MemoryStore, Store
from medflare.core.text import Json, JsonDict
from medflare.data.class_counts import scarce_classes, scarce_line
from medflare.data.loading import NOT_LISTED
from medflare.data.local import PLACE, LocalSettings
from medflare.federation.builtin_messages import (
    ADAPT,
    CLASS_COUNTS,
    COMBINED,
    COUNTS,
    CROSS_SITE_PHASE,
    EVENTS,
    FEDERATION_SHARES,
    FINAL_REPLY_META,
    FINISHED,
    PERSONAL_MODEL,
    PERSONAL_MODELS,
    PRIVACY_COST,
    RANGE,
    ROLE,
    RUN_ROUNDS,
    SITES,
    START,
    STEP,
    TEST_PERSONAL,
    TESTED,
    TRAINING_FINDINGS,
    VERSIONS,
)
from medflare.federation.data_record import DataRecord, other_images_refusal
from medflare.federation.enrolment import first_difference, identity_of, versions_here
from medflare.federation.final_models import (
    SiteFolder,
    evaluate_final_models,
    metric_of,
    with_adapted,
    with_choice,
)
from medflare.federation.memory import StoredAlgorithm, WorkingTime
from medflare.federation.protocol import RequestValidator
from medflare.federation.request_order import RequestOrder
from medflare.federation.settings import BUILTIN_PHASES, CROSS_SITE, ENROL, FINALIZE, step_name
from medflare.federation.suppression import (
    OF_TEST,
    Suppression,
    count_in_words,
    count_values,
    counts_of_splits,
    small_classes,
    small_splits,
    suppress_splits,
)
from medflare.inference.deployed import plain_message
from medflare.methods.base import SiteAlgorithm
from medflare.methods.fedavg.site import MODEL
from medflare.methods.method import Method
from medflare.methods.parts.measured import LOSS
from medflare.privacy.ledger import Account, Budget, Ledger
from medflare.privacy.settings import is_private
from medflare.tasks.classes import Cases
from medflare.tasks.summaries import Summary
from medflare.training.site import Site
from medflare.training.site_rules import (
    check_contrast,
    check_inside_sites,
    check_method_bounds,
    check_used_images,
)

# Notes about a site's data, up to 48 kB of JSON, in which a character may take six bytes.
_MOST_NOTES = 20
_LONGEST_NOTE = 400  # characters


def import_ahead() -> None:
    """Import what every participant needs, in a process from which those of the participants are
    forked.

    MONAI is left out: not every task uses it.
    """
    from medflare.evaluation.report import template
    from medflare.training import opening  # noqa: F401

    template("site.html")
    if installed("matplotlib"):
        import matplotlib.figure  # noqa: F401

    # torch imports a third of itself for the first optimizer.
    torch.optim.SGD([torch.zeros(1, requires_grad=True)])


@dataclass
class Participant:
    """Answers the federation's requests to one site.

    Args:
        name: the site's name.
        open_site: role -> the site with its data; called for the first request, and again if a
            later invitation gives the site another role.
        hyper: the method's hyper-parameters, see `core.hyper.split_hyper`.
        store: where the algorithm's memory is stored after every step; by default in this process.
        folder: of what stays at the site; None: nothing is stored.
        on_final_model: called with the name of a final model, the model and its scores by patient.
        budget: the site's privacy budget over all runs; None: no limit.
        local: the site's settings.
        hours: limit of the site's work on the run; None: no limit.
        record: opens the record of the site's data over all jobs; None: there is none, as for a
            site without secrets.
        note_step: called with phase, round, rounds and True when a step begins, False when it ends.
    """

    name: str
    open_site: Callable[[str], Site]
    method: Method
    hyper: Json
    _: KW_ONLY
    store: Store = field(default_factory=MemoryStore)
    folder: SiteFolder | None = None
    on_final_model: Callable[[str, Message, Cases], None] = lambda name, model, cases: None
    budget: Budget | None = None
    local: LocalSettings = LocalSettings()
    hours: float | None = None
    record: Callable[[], DataRecord | None] = lambda: None
    note_step: Callable[[str, int, int, bool], None] = lambda *step: None

    def __post_init__(self) -> None:
        bounds = self.local.bounds
        self._working = WorkingTime(self.name, self.store, bounds.minutes, self.hours)
        self._account = Account(Ledger(self.store), self.budget)
        self._algorithm = StoredAlgorithm(self.name, self.store, self._make, self._identity)
        self._site: Site | None = None
        self._role = ""  # in which the site was opened
        self._order = RequestOrder(self.name, self.store, self.method, bounds.rounds)

    def reply(self, phase: str, round: int, incoming: Message) -> Message:
        """The reply to one step. The engine turns errors into a reply that names the site.

        A step that is requested again (the item "step" counts the steps of the run) is answered
        from the same state as before. Any other order than the schedule's is refused.

        Args:
            phase: "enrol", "finalize", "cross_site" or a phase of the method's site algorithm.
            round: 0-based.
            incoming: the server's message.

        Raises:
            MessageError: the server's message is not as declared; nothing of it was used.
            MedflareError: the site's data, state or configuration is wrong, or its GPU has too
                little memory.
        """
        with self._working.step(limited=phase not in BUILTIN_PHASES):
            if phase == ENROL:
                return self._accept_invitation(round, incoming)
            return self._step(phase, round, incoming)

    def _step(self, phase: str, round: int, incoming: Message) -> Message:
        validator = RequestValidator(self.name, phase, round)
        run_items = validator.pop_run_items(incoming)
        step = run_items[STEP]
        rounds = run_items[RUN_ROUNDS]
        recalled = self._algorithm.recall(step)
        of_method = phase not in BUILTIN_PHASES
        if of_method and self.name not in recalled.plan.sites:
            raise MessageError(
                f"site {self.name} refuses {step_name(phase, round, rounds)}: "
                "it is an outside site, which does not train"
            )
        validator.check_request(incoming, recalled)
        is_repeated = self._order.admit(phase, round, incoming, run_items, recalled)
        self.note_step(phase, round, rounds, True)
        try:
            with self._algorithm.ready(step, save=of_method) as algorithm:
                site = algorithm.site
                site.rate_factor = site.task.schedule.rate_factor(round, rounds)
                if phase == FINALIZE:
                    return self._finalize(algorithm, incoming, run_items, is_repeated)
                if phase == CROSS_SITE:
                    return self._cross_site(site, incoming, is_repeated)
                return self._suppressed_reply(algorithm, phase, round, incoming)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"site {self.name}: the GPU's memory is full in {step_name(phase, round, rounds)}; "
                f"set a smaller batch_size in its {PLACE}, or end other programs on the GPU"
            ) from error
        finally:
            self.note_step(phase, round, rounds, False)

    def _suppressed_reply(
        self, algorithm: SiteAlgorithm, phase: str, round: int, incoming: Message
    ) -> Message:
        """The reply without small cells.

        Its values about validation images are counted or, if there are more, its reads of these
        images, as a model can depend on them, too.

        Raises:
            ConfigError: a method that trains has read test images.
        """
        declared = algorithm.phase(phase)
        of_validation = [item for item in declared.meta if item.measured == "validation"]
        validations = len(of_validation)  # an error tells of images, too
        before = algorithm.site.reads.copy()
        try:
            reply = self._performed_within_privacy(algorithm, phase, round, incoming)
            reply = self._suppression.suppressed(reply, declared, algorithm.plan)
            validations = sum(count_values(reply[item]) for item in of_validation if item in reply)
        finally:
            reads = algorithm.site.reads - before
            self._note_validations(algorithm.site, max(validations, reads["validation"]))
        if reads["test"] and self.method.trains:
            raise ConfigError(
                f"method {self.method.name} reads test images in '{phase}'; take training or "
                "validation images, so that its test metrics mean something"
            )
        return reply

    def _performed_within_privacy(
        self, algorithm: SiteAlgorithm, phase: str, round: int, incoming: Message
    ) -> Message:
        """The algorithm's reply, checked if the run trains with DP-SGD.

        Raises:
            ConfigError: tensors that DP-SGD has not made, or values of training images, would
                leave the site.
        """
        if not self._private:
            return algorithm.perform(phase, round, incoming)
        earlier = self._account.steps()
        reply = algorithm.perform(phase, round, incoming)
        items = algorithm.phases[phase].meta
        # A phase without a loss does not train: what it sends follows from models that DP-SGD made
        # before, as IOP-FL's average of models.
        trained_before = earlier > 0 and LOSS not in items
        if reply.states and self._account.steps() == earlier and not trained_before:
            raise ConfigError(
                f"site {self.name} sends nothing: method {self.method.name} has trained "
                f"{', '.join(reply.states)} in '{phase}' without DP-SGD, although dp_noise is set; "
                "its site algorithm has to train with `descend` or `train_privately`"
            )
        for item in items:
            of_training = item.measured != "validation" and not item.public
            if of_training and reply.get(item) is not None:
                raise ConfigError(
                    f"site {self.name} sends nothing: {item.name!r} of method {self.method.name} "
                    "leaves without the noise of DP-SGD; declare it as `public` if it tells "
                    "nothing of single images, or leave it out with dp_noise"
                )
        return reply

    def _check_selection(self, site: Site, hyper: Any, record: DataRecord | None) -> None:
        minimum = site.minimum_patients
        strength = self.method.site_class.proximal_strength(hyper)
        try:
            check_used_images(self.name, site.task, site.data, minimum, self.local.bounds, strength)
        except ConfigError:
            if record is not None:
                record.note_refusal()
            raise
        if self._account.budget is None:  # it protects a single patient of whom a model would be
            check_contrast(site)

    def _note_evaluations(
        self, phase: str, models: Iterable[Message | StateDict], is_repeated: bool
    ) -> None:
        """Count the models that are evaluated on the test images, see `DataRecord`."""
        record = self.record()
        if record is not None:
            count = len({id(model) for model in models})
            record.note_evaluation(phase, count, self.name, repeated=is_repeated)

    def _note_validations(self, site: Site, values: int) -> None:
        """Count the values about validation images that a step reports, if there are any."""
        record = self.record() if values else None
        if record is not None and "validation" in counts_of_splits(site):
            record.note_validations(values, self.name)

    def _accept_invitation(self, round: int, incoming: Message) -> Message:
        """Check that server and site run the same federation, store the membership, and report the
        site's data.
        """
        validator = RequestValidator(self.name, ENROL, round)
        validator.check_invitation(incoming)
        role = incoming[ROLE]
        sites = tuple(incoming[SITES])
        site = self._opened_at_enrolment(role)
        self._check_identity(role, incoming.meta)
        trains = self.method.trains
        plan = self.method.plan(site.task, sites, self.hyper)
        if role == "inside" and trains:
            combined = min(len(sites), incoming.get(COMBINED) or len(sites))
            combined = self.method.server_class.fewest_combined(plan.server_hyper, combined)
            check_inside_sites(self.name, combined, self.local.bounds)
            replies = [phase.manifest(plan) for phase in self.method.site_class.phases.values()]
            check_method_bounds(self.name, plan.site_hyper, replies, self.local.bounds)
        record = self.record()
        if record is not None:
            # First, since later refusals would tell the counts of another selection.
            record.fix_used_images(site)
        same_size = record is None or record.note_enrolment(site.task)
        if role == "inside" and trains:
            self._check_selection(site, plan.site_hyper, record)
        if trains and self.local.keep == "personal" and role == "outside":
            raise ConfigError(
                f"site {self.name}: keep in its {PLACE} is 'personal', "
                "but a site that does not train has no personal model"
            )
        validator.check_start(incoming, plan)
        self._order.note_enrolment(round, incoming)
        finished = incoming.get(FINISHED)
        if finished:
            self._algorithm.recall(finished)
        else:
            self._algorithm.begin(role, sites, incoming.get(START))
        return self._enrolment(site, role, same_size)

    def _enrolment(self, site: Site, role: str, same_size: bool) -> Message:
        """What the server learns of the site's data."""
        small = bool(small_classes(site, "train"))
        counts_pixels = site.task.kind == "segmentation"
        hidden = small or (counts_pixels and not same_size)
        reply = Message.of({COUNTS: counts_of_splits(site)})
        reply[CLASS_COUNTS] = [] if hidden else site.class_counts().tolist()
        reply[VERSIONS] = versions_here(self._identity(role), site.task)
        if self.method.trains and role == "inside" and not self._private:
            trained_on = site.trained_on()
            if trained_on is not None:
                reply[RANGE] = trained_on.to_dict()
        reply[EVENTS] = _data_events(site, small)
        if hidden and not small:
            text = "no counts of pixels by class leave the site: an earlier job used another size"
            reply[EVENTS].append(_warning(text))
        return reply

    def _check_identity(self, role: str, server: Json) -> None:
        """Raise ConfigError if site and server run different federations, or if the site's settings
        forbid this one.
        """
        limited = self._account.budget is not None and self.method.site_class.uses_training
        if limited and role == "inside" and not self._private:
            raise ConfigError(
                f"site {self.name} trains with differential privacy only "
                f"(privacy in its local/medflare.json), this job without: "
                f"{self.method.dp_unsupported_reason or 'set dp_noise'}"
            )
        for name, value in self._identity(role).items():
            if name in server and server[name] != value:
                setting, here, there = first_difference(name, value, server[name])
                raise ConfigError(
                    f"site {self.name} and the server differ in {setting}: "
                    f"{here!r} here, {there!r} there; "
                    "submit one job folder to all, and do not edit the site's copy"
                )

    def _identity(self, role: str) -> JsonDict:
        site = self._opened(role)
        return identity_of(self.method, self.hyper, site.task.fingerprint(), site.seed)

    @cached_property
    def _private(self) -> bool:
        """Whether the run trains with differential privacy."""
        hyper, _ = self.method.built(self.hyper)
        return is_private(hyper)

    def _opened(self, role: str) -> Site:
        """The site with its data, read once in this process for each change of role, as an inside
        site has bounds that an outside site does not check.

        Its `abort` also checks the limits of working time. However it was opened, the participant's
        `minimum_patients` holds.
        """
        if self._site is None or self._role != role:
            site = self.open_site(role)
            aborted = site.abort

            def abort() -> bool:
                self._working.check()
                return aborted()

            site.abort = abort
            site.minimum_patients = self.local.minimum_patients
            self._site = site
            self._role = role
            self._suppression = Suppression(site)
        return self._site

    def _opened_at_enrolment(self, role: str) -> Site:
        """As `_opened`; but if an earlier job has fixed the selection, unusable data has the same
        error as another selection: by two different errors a lead could count images.

        Data that the task's transform fails on has this error, too.
        """
        try:
            return self._opened(role)
        except (DataError, ArithmeticError, ValueError, RuntimeError) as error:
            record = self.record()
            if record is not None and record.is_fixed():
                raise other_images_refusal(self.name) from error
            raise

    def _make(self, role: str, sites: tuple[str, ...], start: StateDict | None) -> SiteAlgorithm:
        site = self._opened(role)
        site.start = start
        algorithm = self.method.make_site(site, self.method.plan(site.task, sites, self.hyper))
        algorithm.account = self._account
        return algorithm

    def _finalize(
        self, algorithm: SiteAlgorithm, incoming: Message, run_items: Message, is_repeated: bool
    ) -> Message:
        """Make, evaluate and store the final models.

        The run items RANGE and FEDERATION_SHARES go into their metadata, ADAPT adapts the deployed
        model, TEST_PERSONAL requests the personal one.
        """
        # 1. The models, with what describes them.
        models, notes = with_choice(algorithm.finalize(incoming), self.local.keep)
        for model in models.values():
            for item in (RANGE, FEDERATION_SHARES):
                if item in run_items:
                    model[item] = run_items[item]
        if ADAPT in run_items:
            models, remarks = with_adapted(algorithm.site, models, run_items[ADAPT])
            notes += remarks

        # 2. Evaluate and store them.
        self._note_evaluations(FINALIZE, models.values(), is_repeated)
        meta = evaluate_final_models(
            algorithm.site,
            models,
            self._store,
            method=self.method,
            inside=algorithm.inside,
            private=self._account.budget is not None or self._private,
        )
        reply = Message({}, meta)
        reply[EVENTS] += map(_warning, notes)
        small = small_splits(algorithm.site)
        suppress_splits(reply, FINAL_REPLY_META, small)

        # 3. The site's report shows all events; those of too few test patients do not leave.
        events = list(reply[EVENTS])
        if self.folder is not None:
            pictures = algorithm.pictures(incoming)
            of_training = run_items.get(TRAINING_FINDINGS) or []
            try:
                self.folder.finish(algorithm, models, reply, of_training, pictures)
            except Aborted:
                raise
            except Exception as error:  # models and metrics are not lost because of the report
                text = f"the site's report could not be written ({type(error).__name__})"
                events.append(_warning(text))
        if "test" in small:
            events = [event for event in events if event["kind"] not in OF_TEST]
            events.append({"kind": "undefined", "message": "test metrics: too few patients"})

        # 4. What else the server asks for.
        personal = models.get("personal")
        if run_items.get(TEST_PERSONAL) and personal is not None:
            reason = self._unshared(personal)
            if reason:
                text = f"its personal model is not tested at other sites: {reason}"
                events.append(_warning(text))
            else:
                reply[PERSONAL_MODEL] = personal[MODEL]
        reply[EVENTS] = events
        cost = algorithm.privacy()
        if cost is not None:
            reply[PRIVACY_COST] = cost
        return reply

    def _store(self, name: str, model: Message, summary: Summary) -> None:
        self.on_final_model(name, model, summary.cases)
        if self.folder is not None:
            self.folder.store(name, model, summary)

    def _unshared(self, personal: Message) -> str | None:
        """Why the personal model does not leave the site; None if it does."""
        if not self.local.share_model:
            return f"share_model in its {PLACE} is not true"
        if self._private:
            return "it is trained with differential privacy, which does not cover this"
        kind = personal.meta["kind"]
        return None if kind == "plain" else f"it is of kind {kind}"

    def _cross_site(self, site: Site, incoming: Message, is_repeated: bool) -> Message:
        """The task's metric of the other sites' personal models on this site's test images."""
        values = {}
        shared = incoming.family(PERSONAL_MODELS)
        self._note_evaluations(CROSS_SITE, shared.values(), is_repeated)
        for owner, state in shared.items():
            values[owner] = metric_of(plain_message(state), site)
        reply = Message.of({TESTED: values})
        suppress_splits(reply, CROSS_SITE_PHASE.meta, small_splits(site))
        return reply


def _warning(text: str) -> Event:
    return {"kind": "warning", "message": text}


def _data_events(site: Site, small: bool) -> list[Event]:
    """Events that tell the server of the site's data: what is suppressed, rare or left out, and the
    notes of its data check.
    """
    log = EventLog()
    minimum_patients = site.minimum_patients
    for split in small_splits(site):
        log.add(
            "warning",
            f"no metric of its {split} patients leaves the site: "
            f"they are fewer than {minimum_patients}",
        )
    if small:  # neither the class nor the number is sent
        log.add(
            "warning",
            "no counts by class leave the site: "
            f"a class has fewer than {minimum_patients} training patients",
        )
        log.add(
            "rare_class", "a class has too few training images for its number to leave the site"
        )
    else:
        scarce = scarce_classes(site.data.train.targets, site.task, site.data.annotated)
        if scarce:
            log.add("rare_class", scarce_line(scarce))
    for note in site.notes[:_MOST_NOTES]:
        log.add("warning", note[:_LONGEST_NOTE])
    if len(site.notes) > _MOST_NOTES:
        log.add(
            "warning",
            f"and {len(site.notes) - _MOST_NOTES} more, which the site's data check names",
        )
    if site.data.dropped:
        count = count_in_words(site.data.dropped, minimum_patients)
        log.add("warning", f"{count} images left out: {NOT_LISTED}")
    if site.data.left_out:  # their names are not sent
        count = count_in_words(tuple(site.data.left_out.values()), minimum_patients)
        log.add("left_out", f"{count} images cannot be used; the site's data check names them")
    return log.to_list()
