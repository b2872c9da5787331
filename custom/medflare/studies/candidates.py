"""The rows of a study: methods with their hyper-parameters, and references."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from medflare.adaptation.registry import check_adaptable
from medflare.core.errors import ConfigError, StepFailed, one_line
from medflare.core.hyper import SplitHyper, parsed_value, split_hyper
from medflare.core.settings import unknown
from medflare.core.text import Json, JsonDict
from medflare.evaluation.results import RunRecord, SiteRecord, build_results, versions_of_run
from medflare.federation.preflight import check_run
from medflare.federation.settings import RunSettings
from medflare.methods.catalogue import get_method, method_names
from medflare.methods.method import Method
from medflare.studies.references import (
    BATCH_STATISTICS,
    CONSTANT,
    PARTICIPATING,
    REFERENCES,
    SINGLE_SITE,
    TRAINED_AS,
    Draw,
    recorded_run,
    single_site,
    with_other_task,
)
from medflare.tasks.config import TaskConfig, load_task

# Name of the reference `UNIFORM_ROW`: FedAvg with every site counted once.
UNIFORM = "uniform"
UNIFORM_ROW = "fedavg:weighting=uniform"


@dataclass(frozen=True)
class Candidate:
    """One row of a study.

    Attributes:
        method: name of a method or of one of `REFERENCES`.
        hyper: hyper-parameters that differ from the defaults, under "site" and "server".
        site_algorithm, server_algorithm: methods whose algorithm replaces the method's own.
        trained_as: the method that a reference trains with.
        task_changes: settings of the task that this row alone has.
    """

    row: str
    method: str
    hyper: Json = field(default_factory=dict)
    site_algorithm: str | None = None
    server_algorithm: str | None = None
    trained_as: str = TRAINED_AS
    task_changes: Json = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str, selection: str | None = None) -> "Candidate":
        """The row that a text describes: "fedsm:lam=0.3,gamma=0.9", "prr:site.beta=1",
        "moon:server_algorithm=grace" or "single-site:method=prr".

        `selection`: a rule, if the text does not set it; None: the method's default.

        Raises:
            ConfigError: an unknown method or hyper-parameter, an invalid value, or a setting that
                the reference does not have.
        """
        method, _, settings = text.partition(":")
        values = {}
        for setting in filter(None, settings.split(",")):
            name, equals, value = setting.partition("=")
            if not equals:
                raise ConfigError(
                    f"method {text!r}: {name!r} has no value; write METHOD:NAME=VALUE,NAME=VALUE"
                )
            values[name] = parsed_value(value)
        algorithms = {"site_algorithm", "server_algorithm"}
        special = {name: values.pop(name) for name in {"method", *algorithms} & values.keys()}
        allowed = set()
        if method == SINGLE_SITE:
            allowed = {"method"}
        elif method not in REFERENCES:
            allowed = algorithms
        refused = list(special.keys() - allowed)
        if method == CONSTANT:
            refused += values
        if refused:
            raise ConfigError(f"{text}: {method} has no setting {refused[0]!r}; leave it out")
        trained_as = special.pop("method", TRAINED_AS)
        candidate = cls(text, method, {}, **special, trained_as=trained_as)
        trained = candidate._trained
        trained.check(values)
        hyper = split_hyper(values, trained.hyper_classes, trained.name)
        if selection is not None and method != CONSTANT:
            hyper["server"] = {"selection": selection, **hyper["server"]}
        return replace(candidate, hyper=hyper)

    @property
    def _trained(self) -> Method:
        """The method whose algorithms train."""
        method = self.trained_as if self.method in REFERENCES else self.method
        return get_method(method, site=self.site_algorithm, server=self.server_algorithm)

    @property
    def effective(self) -> SplitHyper:
        """Every hyper-parameter as the row's runs use it."""
        if self.method == CONSTANT:
            return {"site": {}, "server": {}}
        return self._trained.effective(self.hyper)

    @property
    def hyper_names(self) -> set[str]:
        """The hyper-parameters that it has, also as "site.NAME" and "server.NAME"."""
        names = set()
        for algorithm, values in self.effective.items():
            for name in values:
                names |= {name, f"{algorithm}.{name}"}
        return names

    def varied(self, named: Json, hyper: Json, task: Json) -> "Candidate":
        """The row with further hyper-parameters and settings of the task, which are `named` in its
        text; ConfigError for a wrong hyper-parameter.
        """
        trained = self._trained
        merged = split_hyper(hyper, trained.hyper_classes, trained.name)
        for algorithm, values in self.hyper.items():
            merged[algorithm] = {**values, **merged[algorithm]}
        trained.check(merged)
        settings = []
        for name, value in named.items():
            text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
            settings.append(f"{name}={text}")
        mark = "," if ":" in self.row else ":"
        row = f"{self.row}{mark}{','.join(settings)}"
        return replace(self, row=row, hyper=merged, task_changes=task)

    def task_of(self, task: TaskConfig) -> TaskConfig:
        """The study's task as this row trains it."""
        return load_task({**task.to_dict(), **self.task_changes})

    def versions(self, task: TaskConfig) -> dict[str, str]:
        """The versions and code that the row's runs use, see `versions_of_run`."""
        method = "" if self.method == CONSTANT else self._trained.name
        return versions_of_run(method, self.task_of(task), self.effective)

    def check(
        self, task: TaskConfig, rounds: int | None = None, outside: Sequence[str] = ()
    ) -> None:
        """Raise ConfigError, which begins with the row, if it cannot run, with `rounds` or, if
        None, with any number.
        """
        try:
            task = self.task_of(task)
            if self.method == BATCH_STATISTICS:
                check_adaptable(task)
            if self.method != CONSTANT:
                if rounds is None:
                    rounds = int(self._trained.trains)
                settings = RunSettings(rounds=rounds, seed=0, outside=self._served(outside))
                check_run(self._trained, task, self.hyper, settings)
        except ConfigError as error:
            raise ConfigError(f"{self.row}: {error}") from error

    def _served(self, outside: Sequence[str]) -> tuple[str, ...]:
        """The outside sites that get a model; a method may have none for them."""
        return tuple(outside) if self._trained.outside else ()

    def run(self, draw: Draw) -> JsonDict:
        """The results dict of one run, with curves and scores.

        It has the study's task, which all rows share, and the row's changes in its settings.
        """
        if not self.task_changes:
            return self._run(draw)
        return with_other_task(self.task_changes, draw, self._run)

    def failed(self, draw: Draw, error: Exception) -> JsonDict:
        """The results dict of a run that ended with an error."""
        reason = f"{type(error).__name__}: {one_line(error)}"
        if isinstance(error, StepFailed):
            reason = str(error)
        record = RunRecord(
            self.method if self.method in REFERENCES else self._trained.name,
            draw.task,
            draw.seed,
            draw.setting.rounds,
            {site: SiteRecord(draw.role(site)) for site in draw.setting.sites},
            reason=reason,
            seconds={"total": 0.0},
            hyper=self.effective,
        )
        return build_results(record)

    def _run(self, draw: Draw) -> JsonDict:
        if self.method == SINGLE_SITE:
            return single_site(draw, self.hyper, self.trained_as)
        if self.method in REFERENCES:
            return REFERENCES[self.method](draw, self.hyper)
        return recorded_run(
            self.method,
            draw,
            draw.inside,
            outside=self._served(draw.outside),
            site_algorithm=self.site_algorithm,
            server_algorithm=self.server_algorithm,
            **self.hyper,
        )


def rows_of(
    methods: Sequence[str],
    references: Sequence[str],
    task: TaskConfig,
    selection: str | None = None,
) -> list[Candidate]:
    """The rows of a study in their order: the methods, then the references that are not among them,
    "all" for those that the task can have.

    Raises:
        ConfigError: a row is wrong, see `Candidate.parse`.
    """
    candidates = [Candidate.parse(text, selection) for text in methods]
    offered = {*REFERENCES, UNIFORM, "all"}
    for name in references:
        if name.partition(":")[0] not in {*offered, *method_names()}:
            raise unknown("reference", name, offered)
    requested = [UNIFORM_ROW if name == UNIFORM else name for name in references if name != "all"]
    optional = (*REFERENCES, UNIFORM_ROW) if "all" in references else ()
    for row in dict.fromkeys([*requested, *optional]):
        is_oracle = row == PARTICIPATING and row not in requested
        if row in methods or is_oracle:
            continue
        candidate = Candidate.parse(row, selection)
        if row not in requested:
            try:
                candidate.check(task)
            except ConfigError:  # the task cannot have it
                continue
        candidates.append(candidate)
    return candidates


def weighs_by_samples(server: Json) -> bool:
    """Whether a server with these hyper-parameters weights sites by training images alone: not by
    scores (SHA) or consistency (GRACE).
    """
    if server.get("sha") or server.get("consistency"):
        return False
    # The other robust rules take no weights.
    weighted = server.get("rule", "mean") in ("mean", "geometric", "clipped")
    return weighted and server.get("weighting") == "samples"
