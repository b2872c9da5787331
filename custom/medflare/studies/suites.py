"""Suites: studies with all their settings: a table of a paper, with the paper's numbers beside
ours, or a test of a mechanism.
"""

import json
from collections.abc import Iterable
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, model_validator

from medflare.core.errors import ConfigError
from medflare.core.settings import checked, strict_dataclass, unknown
from medflare.core.text import JsonDict, read_json
from medflare.evaluation.presentation import UNDEFINED
from medflare.studies.markdown import Table, bullets
from medflare.studies.statistics import (
    ALL_SITES,
    Groups,
    all_runs,
    all_sites,
    distinct,
    metrics_frame,
    study_values,
)
from medflare.tasks.config import PRESETS, json_files, load_task
from medflare.tasks.summaries import mean_interval

MEAN = "mean"  # the column of the mean over the sites
BESIDE_FILE = "beside_the_paper.md"

Text = Annotated[str, Field(min_length=1)]


@strict_dataclass
class Protocol:
    """How the paper's table is made.

    Attributes:
        leave_one_out, leave_out: each site, or each of these sites, in turn is outside.
        role: of the sites in the columns: "inside" (they train) or "outside".
        model: our model that is compared.
        percent: whether the paper's numbers are in percent.
    """

    rounds: PositiveInt
    metric: Text
    leave_one_out: bool = False
    leave_out: tuple[Text, ...] = ()
    role: Literal["inside", "outside"] = "inside"
    model: Text = "deployed"
    percent: bool = False


@strict_dataclass
class Suite:
    """A table of a paper, or, without `numbers`, a study of a paper's mechanism that is no table of
    it.

    Attributes:
        data: the preparation that makes the sites, see `medflare data prepare --list`; "": the
            task's embedded images.
        sites: in the order of the paper's columns.
        methods: row of the table -> method with its hyper-parameters, as for `medflare study`;
            several rows can be models of one method.
        models: row -> our model that is compared, if it is not that of `settings`.
        numbers: row -> site or "mean" -> the paper's number, as far as legible; rows that no method
            of ours has are shown without ours.
        differences: settings that differ from the paper's, one line each.
    """

    paper: Text
    task: Text
    sites: Annotated[tuple[Text, ...], Field(min_length=1)]
    methods: Annotated[dict[str, Text], Field(min_length=1)]
    settings: Protocol
    seeds: Annotated[tuple[int, ...], Field(min_length=1)]
    table: str = ""
    data: str = ""
    numbers: dict[str, dict[str, float]] = field(default_factory=dict)
    source: str = ""
    differences: tuple[Text, ...] = ()
    models: dict[str, Text] = field(default_factory=dict)

    @model_validator(mode="after")
    def _consistent(self) -> "Suite":
        if self.settings.leave_one_out and self.settings.leave_out:
            raise ValueError("settings: leave_one_out and leave_out exclude each other")
        without_method = self.models.keys() - self.methods.keys()
        if without_method:
            raise ValueError(f"models: {min(without_method)!r} is no row of the methods")
        unmatched = self._with_numbers - {*self.sites, MEAN}
        unmatched |= set(self.settings.leave_out) - set(self.sites)
        if self.numbers:
            unmatched |= self.methods.keys() - self.numbers.keys()
        if unmatched:
            raise ValueError(f"{min(unmatched)!r} is no row of the numbers, or no site")
        return self

    @property
    def _with_numbers(self) -> set[str]:
        """The sites, or "mean", for which the paper has a number."""
        return set[str]().union(*self.numbers.values())

    @property
    def columns(self) -> tuple[str, ...]:
        """The sites, then the mean, as far as the paper has numbers for them; all if no number is
        legible.
        """
        columns = (*self.sites, MEAN)
        listed = self._with_numbers or columns
        return tuple(name for name in columns if name in listed)


def suites() -> tuple[str, ...]:
    """Names of the suites that come with medflare; those of mechanisms begin with "mechanisms/"."""
    return tuple(sorted(_files()))


def _files() -> JsonDict:
    return json_files(PRESETS / "suites", "mechanisms/")


def load_suite(source: str) -> Suite:
    """The suite of a name, or of a JSON file; raises ConfigError if there is none, or a setting,
    row or column is wrong.
    """
    file = _files().get(source, Path(source))
    if not file.is_file():
        raise unknown("suite", source, suites())
    location = f"suite {source}"
    remedy = "see app_configs/suites/ for working examples"
    try:
        content = dict(read_json(file))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{location}: not one JSON object ({error}); {remedy}") from error
    return checked(Suite, content, location, remedy=remedy)


def beside_the_paper(suite: Suite, groups: Groups) -> str:
    """Markdown: every row of the paper's table, its numbers and ours in its unit.

    Ours are mean [interval over seeds]. Rows of the study that the suite does not have are last.
    """
    values = study_values(metrics_frame(groups))
    settings = suite.settings
    if settings.percent:
        unit = "in hundredths"
        scale = 100
        digits = 2
    else:
        unit = "as a share"
        scale = 1
        digits = 4

    def cell(row: str, model: str, column: str) -> str:
        site = ALL_SITES if column == MEAN else column
        key = (row, model, settings.role, settings.metric, site)
        by_seed = values.reindex([key]).iloc[0].dropna()
        if by_seed.empty:
            return UNDEFINED
        text = f"{scale * by_seed.mean():.{digits}f}"
        if len(by_seed) > 1:
            low, high = mean_interval(by_seed) or (by_seed.min(), by_seed.max())
            text += f" [{scale * low:.{digits}f}, {scale * high:.{digits}f}]"
        return text

    def ours(paper_row: str, row: str, model: str) -> list[str]:
        source = row if model == settings.model else f"{row}, {model}"
        return [paper_row, source, *(cell(row, model, column) for column in suite.columns)]

    lines = [["row", "of", *suite.columns]]
    for paper_row, numbers in suite.numbers.items():
        texts = {column: f"{number:.{digits}f}" for column, number in numbers.items()}
        lines.append(
            [paper_row, "paper", *(texts.get(column, UNDEFINED) for column in suite.columns)]
        )
        row = suite.methods.get(paper_row, "")
        if row in groups:
            lines.append(ours("", row, suite.models.get(paper_row, settings.model)))
    for row in groups:
        if row not in suite.methods.values():
            lines.append(ours("not in the suite", row, settings.model))
    about = f"{settings.metric} {unit}, {settings.role} sites, our model: {settings.model}"
    if suite.models:
        about += ", or the one after the comma"
    bracket = "[95 % bootstrap interval, below six seeds the lowest and the highest value]"
    seeds = ", ".join(map(str, values.columns))
    about += f". Ours: mean over seeds {seeds} {bracket}. The paper's: {suite.source}.\n"
    parts = [f"# {suite.paper}, {suite.table}, beside ours\n", about, str(Table(lines, left=2))]
    differences = [*suite.differences, *deviations(suite, groups)]
    if differences:
        parts.append(f"What differs:\n\n{bullets(differences)}")
    return "\n".join(parts)


def deviations(suite: Suite, groups: Groups) -> list[str]:
    """Settings of the runs that differ from the suite, one line each."""
    runs = all_runs(groups)
    compared: list[tuple[str, Iterable[Any], Iterable[Any]]] = [
        ("rounds", distinct(runs, "rounds"), [suite.settings.rounds]),
        ("seeds", distinct(runs, "seed"), suite.seeds),
        ("sites", all_sites(runs), suite.sites),
    ]
    lines = []
    for name, used, planned in compared:
        here = ", ".join(map(str, sorted(used)))
        there = ", ".join(map(str, sorted(planned)))
        if here != there:
            lines.append(f"{name}: {here}, the suite has {there}")
    expected = load_task(suite.task).to_dict()
    for run in runs:
        task = run["configuration"]["task"]
        for name, value in expected.items():
            if task and name != "resplit" and task.get(name) != value:
                here = json.dumps(task.get(name))
                lines.append(f"{name} of the task: {here}, the suite has {json.dumps(value)}")
    for row, row_runs in groups.items():
        if any(run["reason"] for run in row_runs):
            lines.append(f"{row}: a run failed, see table.md")
    return list(dict.fromkeys(lines))
