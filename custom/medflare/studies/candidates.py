"""The rows of a study: methods with their hyper-parameters, and references."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from medflare.adaptation.registry import check_adaptable
from medflare.core.errors import ConfigError
from medflare.core.hyper import SplitHyper, parsed_value, split_hyper
from medflare.federation.preflight import check_run
from medflare.methods.catalogue import get_method
from medflare.methods.method import Method
from medflare.studies.references import (
    BATCH_STATISTICS,
    CONSTANT,
    REFERENCES,
    SINGLE_SITE,
    TRAINED_AS,
    Setting,
    recorded_run,
    single_site,
)
from medflare.tasks.config import TaskConfig

# Name of the reference `UNIFORM_ROW`: FedAvg with every site counted once.
UNIFORM: Final = "uniform"
UNIFORM_ROW: Final = "fedavg:weighting=uniform"


@dataclass(frozen=True)
class Candidate:
    """One row of a study.

    Attributes:
        method: name of a method or of one of `REFERENCES`.
        hyper: hyper-parameters that differ from the defaults, under "site" and "server".
        site_algorithm, server_algorithm: methods whose algorithm replaces the method's own.
        trained_as: the method that a reference trains with.
    """

    label: str
    method: str
    hyper: Mapping[str, Any] = field(default_factory=dict)
    site_algorithm: str | None = None
    server_algorithm: str | None = None
    trained_as: str = TRAINED_AS

    @classmethod
    def parse(cls, text: str, selection: str | None = None) -> "Candidate":
        """From "fedsm:lam=0.3,gamma=0.9", "prr:site.beta=1", "moon:server_algorithm=grace" or
        "single-site:method=prr".

        `selection`: "best" or "last", if the text does not set it; None: the method's default.
        ConfigError: an unknown method or hyper-parameter, an invalid value, or a setting that the
        reference does not have.
        """
        method, _, settings = text.partition(":")
        values: dict[str, Any] = {}
        for setting in filter(None, settings.split(",")):
            name, equals, value = setting.partition("=")
            if not equals:
                raise ConfigError(
                    f"method {text!r}: {name!r} has no value; write METHOD:NAME=VALUE,NAME=VALUE"
                )
            values[name] = parsed_value(value)
        algorithms = {"site_algorithm", "server_algorithm"}
        special = {name: values.pop(name) for name in {"method", *algorithms} & values.keys()}
        allowed: set[str] = set()
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
        row = cls(text, method, {}, **special, trained_as=trained_as)
        row._trained.check(values)
        hyper = split_hyper(values, row._trained.hyper_classes, row._trained.name)
        if selection is not None and method != CONSTANT:
            hyper["server"] = {"selection": selection, **hyper["server"]}
        return replace(row, hyper=hyper)

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

    def check(
        self, task: TaskConfig, rounds: int | None = None, outside: Sequence[str] = ()
    ) -> None:
        """Raise ConfigError, which begins with the row's label, if the row cannot run; rounds:
        None: any number.
        """
        try:
            if self.method == BATCH_STATISTICS:
                check_adaptable(task)
            if self.method != CONSTANT:
                check_run(self._trained, task, self.hyper, rounds=rounds, outside=outside)
        except ConfigError as error:
            raise ConfigError(f"{self.label}: {error}") from error

    def run(self, setting: Setting, seed: int, outside: Sequence[str] = ()) -> dict[str, Any]:
        """Results dict of one run, with curves and scores; the seed also draws the split by
        patient, and `outside` sites do not train.
        """
        if self.method == SINGLE_SITE:
            return single_site(setting, seed, outside, self.hyper, self.trained_as)
        if self.method in REFERENCES:
            return REFERENCES[self.method](setting, seed, outside, self.hyper)
        return recorded_run(
            self.method,
            setting,
            seed,
            setting.sites,
            outside=outside,
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

    ConfigError: a row is wrong, see `Candidate.parse`.
    """
    rows = [Candidate.parse(text, selection) for text in methods]
    labels = [UNIFORM_ROW if name == UNIFORM else name for name in references if name != "all"]
    optional = (*REFERENCES, UNIFORM_ROW) if "all" in references else ()
    for label in dict.fromkeys([*labels, *optional]):
        if label in methods:
            continue
        row = Candidate.parse(label, selection)
        if label not in labels:
            try:
                row.check(task)
            except ConfigError:  # the task cannot have it
                continue
        rows.append(row)
    return rows


def weighs_by_samples(server: Mapping[str, Any]) -> bool:
    """Whether a server with these hyper-parameters weights sites by training images alone: not by
    scores (SHA) or consistency (GRACE).
    """
    if server.get("sha") or server.get("consistency"):
        return False
    # The other robust rules take no weights.
    weighted = server.get("rule", "mean") in ("mean", "geometric", "clipped")
    return weighted and server.get("weighting") == "samples"
