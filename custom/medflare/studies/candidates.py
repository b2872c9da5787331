"""The rows of a study: methods with their hyper-parameters, and the references that methods are held against."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from medflare.adaptation.registry import check_adaptable
from medflare.core.errors import ConfigError
from medflare.core.hyper import SplitHyper, parsed_value, split_hyper
from medflare.federation.preflight import check_run
from medflare.methods.catalogue import get_method
from medflare.methods.method import Method
from medflare.studies.references import (
    BATCH_STATISTICS,
    CENTRALISED,
    CONSTANT,
    SINGLE_SITE,
    TRAINED_AS,
    batch_statistics,
    centralised,
    constant_answer,
    recorded_run,
    single_site,
)
from medflare.studies.setting import Setting
from medflare.tasks.config import TaskConfig

REFERENCES: Final = {
    CONSTANT: constant_answer,
    SINGLE_SITE: single_site,
    BATCH_STATISTICS: batch_statistics,
    CENTRALISED: centralised,
}
UNIFORM: Final = "uniform"  # name of a reference that is a setting of a method: FedAvg with every site counting once
UNIFORM_ROW: Final = "fedavg:weighting=uniform"


@dataclass(frozen=True)
class Candidate:
    """One row of a study: a method (or reference) with its hyper-parameters.

    Attributes:
        method: name of a method or of one of `REFERENCES`.
        hyper: hyper-parameters under their algorithms, those that differ from the defaults.
        site_algorithm, server_algorithm: see `run_local`.
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
        """From "fedsm:lam=0.3,gamma=0.9", "prr:site.beta=1", "moon:server_algorithm=grace" or "single-site:method=prr".

        Args:
            text: a method or reference with settings.
            selection: "best" or "last", for a row that does not say it itself; None: the method's default.

        Raises:
            ConfigError: no such method or hyper-parameter, a value that it cannot have, or a reference with algorithms of its own.
        """
        method, _, settings = text.partition(":")
        pairs = [setting.partition("=") for setting in settings.split(",") if setting]
        if bad := [name for name, equals, _ in pairs if not equals]:
            raise ConfigError(f"method {text!r}: {bad[0]!r} has no value; write METHOD:NAME=VALUE,NAME=VALUE")
        if method == CONSTANT and pairs:
            raise ConfigError(f"{text}: {method} trains nothing and has no settings; leave {pairs[0][0]!r} out")
        values = {name: parsed_value(value) for name, _, value in pairs}
        algorithms = {name: values.pop(name, None) for name in ("site_algorithm", "server_algorithm")}
        if method in REFERENCES and any(algorithms.values()):
            raise ConfigError(
                f"{text}: {method} is no federation, it trains with {TRAINED_AS}'s algorithms alone; leave the algorithms out"
            )
        if method != SINGLE_SITE and "method" in values:
            raise ConfigError(f"{text}: only {SINGLE_SITE} trains with a method of choice; leave 'method' out")
        trained_as = values.pop("method", TRAINED_AS)
        trained = get_method(
            trained_as if method in REFERENCES else method, site=algorithms["site_algorithm"], server=algorithms["server_algorithm"]
        )
        trained.check(values)
        hyper = split_hyper(values, trained.hyper_classes, trained.name)
        if selection is not None and method != CONSTANT:
            hyper["server"] = {"selection": selection, **hyper["server"]}
        return cls(text, method, hyper, **algorithms, trained_as=trained_as)

    @property
    def effective(self) -> SplitHyper:
        """Every hyper-parameter as the row's runs use it, under its algorithm; a constant has none."""
        if self.method == CONSTANT:
            return {"site": {}, "server": {}}
        return self._trained.effective(self.hyper)

    @property
    def by_samples(self) -> bool:
        """Whether the row has no mean of sites, or one as `weighs_by_samples` says."""
        return self.method in (CONSTANT, SINGLE_SITE, CENTRALISED) or weighs_by_samples(self.effective["server"])

    @property
    def _trained(self) -> Method:
        """The method whose algorithms train."""
        return get_method(
            self.trained_as if self.method in REFERENCES else self.method, site=self.site_algorithm, server=self.server_algorithm
        )

    def check(self, task: TaskConfig, rounds: int | None = None, outside: Sequence[str] = ()) -> None:
        """Refuse a task or a number of rounds that the row cannot have, before anything runs.

        Args:
            rounds: of the study; None: any.
            outside: sites that never train.

        Raises:
            ConfigError: what is wrong, after the row's name.
        """
        try:
            if self.method == BATCH_STATISTICS:
                check_adaptable(task)
            if self.method != CONSTANT:
                check_run(self._trained, task, self.hyper, rounds=rounds, outside=outside)
        except ConfigError as error:
            raise ConfigError(f"{self.label}: {error}") from error

    def takes(self, task: TaskConfig) -> bool:
        """Whether `check` has nothing against a task."""
        try:
            self.check(task)
        except ConfigError:
            return False
        return True

    def run(self, setting: Setting, seed: int, outside: Sequence[str] = ()) -> dict[str, Any]:
        """Results dict of one run, with curves and scores; the seed also draws the split anew by patient.

        Args:
            outside: sites that never train.
        """
        if self.method == SINGLE_SITE:
            return single_site(setting, seed, outside, self.hyper, self.trained_as)
        if self.method in REFERENCES:
            return REFERENCES[self.method](setting, seed, outside, self.hyper)
        return recorded_run(
            self.method,
            setting.task,
            setting.sites,
            rounds=setting.rounds,
            seed=seed,
            outside=outside,
            data_root=setting.data_root,
            resplit=seed,
            site_algorithm=self.site_algorithm,
            server_algorithm=self.server_algorithm,
            **self.hyper,
        )


def weighs_by_samples(server: Mapping[str, Any]) -> bool:
    """Whether a server's mean weighs sites by their training images and by nothing else: not alike, by scores (SHA) or consistency (GRACE).

    Args:
        server: hyper-parameters of the server algorithm, every one.

    Examples:
        >>> weighs_by_samples({"weighting": "samples"}), weighs_by_samples({"weighting": "uniform"}), weighs_by_samples({"r0": 0.35})
        (True, False, False)
        >>> weighs_by_samples({"weighting": "samples", "sha": True}), weighs_by_samples({"weighting": "samples", "rule": "median"})
        (False, False)
    """
    by_shares = server.get("rule", "mean") in ("mean", "geometric", "clipped")  # the other robust rules take no weights
    return server.get("weighting") == "samples" and by_shares and not server.get("sha") and not server.get("consistency")
