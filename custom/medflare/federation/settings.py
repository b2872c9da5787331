"""What a run fixes beside its method and its task: one list for the controller, the job builder and the recipes."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from medflare.core.errors import ConfigError


@dataclass(kw_only=True, eq=False)
class RunSettings:
    """The settings of a federation's run. `MedflareController` has them as its own fields, so they are its `args` in a job.

    Not frozen, because FLARE's components set attributes of their own.

    Attributes:
        rounds: of the federation.
        seed: of the run.
        outside: names of sites that never train and only receive the final models.
        site_half: method whose site half the sites run, where it is not the job's own.
        min_sites: usable answers that a step needs; None: two, or one in a federation of one.
        sites_per_round: how many inside sites are drawn for a round; None: all.
        step_timeout: seconds after which a step goes on without the sites that have not answered; 0 waits for all that live.
        silence: seconds without a sign of life after which a site counts as gone.
        resume: id of the interrupted job that this one takes up at the last step that it finished.
    """

    rounds: int
    seed: int
    outside: Sequence[str] = ()
    site_half: str | None = None
    min_sites: int | None = None
    sites_per_round: int | None = None
    step_timeout: float = 0.0
    silence: float = 120.0
    resume: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.outside, list):
            self.outside = tuple(self.outside)  # equal to the default where it is empty: FLARE writes what differs from it

    def run_settings(self) -> dict[str, Any]:
        """The settings by name, without what a subclass adds."""
        return {field.name: getattr(self, field.name) for field in fields(RunSettings)}

    def check(self) -> None:
        """Raises:
        ConfigError: a setting that no run can have.
        """
        if not _whole(self.rounds) or self.rounds < 1:
            raise ConfigError(f"rounds = {self.rounds!r}: a federation needs at least one round")
        if not _whole(self.seed):
            raise ConfigError(f"seed = {self.seed!r}: give a whole number")
        if not isinstance(self.outside, tuple) or not all(isinstance(site, str) for site in self.outside):
            raise ConfigError(f"outside = {self.outside!r}: give a list of site names")
        for name in ("min_sites", "sites_per_round"):
            value = getattr(self, name)
            if value is not None and (not _whole(value) or value < 1):
                raise ConfigError(f"{name} = {value!r}: give a number of sites, 1 or more, or leave it out")
        for name in ("step_timeout", "silence"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
                raise ConfigError(f"{name} = {value!r}: give a number of seconds")


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
