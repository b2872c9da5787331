"""Suites: a table of a paper as a study, with the paper's numbers to lay beside what comes out."""

import json
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from medflare.core.errors import ConfigError
from medflare.core.settings import STRICT, checked, nested, unknown

MEAN: Final = "mean"  # the column of the mean over the sites

Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[tuple[Text, ...], Field(min_length=1)]


@dataclass(frozen=True, config=STRICT)
class Protocol:
    """How the paper's table is made.

    Attributes:
        rounds: federation rounds.
        metric: that the table shows.
        leave_one_out: each site in turn is outside.
        leave_out: these sites alone are, each in its turn.
        role: of the sites that a column is about: "inside" where they train, "outside" where they were left out.
        model: of ours that is compared.
        percent: whether the paper's numbers are hundredths.
    """

    rounds: Annotated[int, Field(ge=1)]
    metric: Text
    leave_one_out: bool = False
    leave_out: tuple[Text, ...] = ()
    role: Literal["inside", "outside"] = "inside"
    model: Text = "deployed"
    percent: bool = False


@dataclass(frozen=True, config=STRICT)
class Suite:
    """A table of a paper.

    Attributes:
        paper: whose it is.
        table: which one.
        task: preset of what is learnt.
        data: the preparation that makes the sites, see `medflare data prepare --list`.
        sites: in the order of the paper's columns.
        methods: row of the table -> method with its hyper-parameters, as `medflare study` takes it.
        settings: see `Protocol`.
        seeds: every method runs with each.
        numbers: row -> site or "mean" -> the paper's number, as far as it is legible; rows that no method of ours has are shown without.
        source: where the numbers stand.
        differences: of settings, which remain also where everything is run as it stands, one line each.
    """

    paper: Text
    table: Text
    task: Text
    data: Text
    sites: Texts
    methods: Annotated[dict[str, Text], Field(min_length=1)]
    settings: Annotated[Protocol, nested(Protocol)]
    seeds: Annotated[tuple[int, ...], Field(min_length=1)]
    numbers: Annotated[dict[str, dict[str, float]], Field(min_length=1)]
    source: Text
    differences: tuple[Text, ...] = ()

    @model_validator(mode="after")
    def _consistent(self) -> "Suite":
        if self.settings.leave_one_out and self.settings.leave_out:
            raise ValueError("settings: leave_one_out leaves out every site, leave_out some; give one of them")
        columns = (*self.sites, MEAN)
        strange = [row for row in self.methods if row not in self.numbers] + [
            site for site in self.settings.leave_out if site not in self.sites
        ]
        strange += [column for numbers in self.numbers.values() for column in numbers if column not in columns]
        if strange:
            raise ValueError(f"{strange[0]!r} is no row of the numbers, or no site")
        return self

    @property
    def columns(self) -> tuple[str, ...]:
        """The sites that the paper has numbers for, then the mean where it has one; all of them where no number of it is known."""
        listed = {name for row in self.numbers.values() for name in row}
        return tuple(name for name in (*self.sites, MEAN) if name in listed or not listed)


def suites() -> tuple[str, ...]:
    """Names of the suites that come with medflare."""
    return tuple(sorted(_files()))


def _files() -> dict[str, Any]:
    """Their files by their names."""
    folder = resources.files("medflare.tasks") / "presets" / "suites"
    return {file.name.removesuffix(".json"): file for file in folder.iterdir() if file.name.endswith(".json")}


def load_suite(source: str) -> Suite:
    """The suite of a name, or of a JSON file.

    Raises:
        ConfigError: there is none, it is unreadable, a setting is unknown, missing or wrong, or a row or column has no counterpart.
    """
    file = _files().get(source, Path(source))
    if not file.is_file():
        raise unknown("suite", source, suites())
    place, remedy = f"suite {source}", "see app_configs/suites/ for working examples"
    try:
        content = dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{place}: not one JSON object ({error}); {remedy}") from error
    return checked(Suite, content, place, remedy=remedy)
