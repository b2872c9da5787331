"""Suites: studies with all their settings: a table of a paper, with the paper's numbers beside ours, or a test of a mechanism."""

import json
from dataclasses import field
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import pandas as pd
from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from medflare.core.errors import ConfigError
from medflare.core.settings import STRICT, checked, nested, unknown
from medflare.evaluation.presentation import UNDEFINED
from medflare.studies.statistics import ALL_SITES, Groups, mean_interval, study_values
from medflare.studies.tables import markdown
from medflare.tasks.config import load_task

MEAN: Final = "mean"  # the column of the mean over the sites
BESIDE_FILE: Final = "beside_the_paper.md"
FURTHER_ROW: Final = "not in the suite"  # a row of the command line

Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[tuple[Text, ...], Field(min_length=1)]


@dataclass(frozen=True, config=STRICT)
class Protocol:
    """How the paper's table is made.

    Attributes:
        leave_one_out, leave_out: each site, or each of these sites, in turn is outside.
        role: of the sites in the columns: "inside" (they train) or "outside".
        model: our model that is compared.
        percent: whether the paper's numbers are in percent.
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
    """A table of a paper, or, without `numbers`, a study of a paper's mechanism that is no table of it.

    Attributes:
        data: the preparation that makes the sites, see `medflare data prepare --list`; "": the task's embedded images.
        sites: in the order of the paper's columns.
        methods: row of the table -> method with its hyper-parameters, as for `medflare study`;
            several rows can be models of one method.
        models: row -> our model that is compared, if it is not that of `settings`.
        numbers: row -> site or "mean" -> the paper's number, as far as legible; rows that no method of ours has are shown without ours.
        differences: settings that differ from the paper's, one line each.
    """

    paper: Text
    task: Text
    sites: Texts
    methods: Annotated[dict[str, Text], Field(min_length=1)]
    settings: Annotated[Protocol, nested(Protocol)]
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
        if without_method := sorted(self.models.keys() - self.methods.keys()):
            raise ValueError(f"models: {without_method[0]!r} is no row of the methods")
        columns = {column for numbers in self.numbers.values() for column in numbers}
        without_row = self.methods.keys() - self.numbers if self.numbers else set()
        unmatched = sorted(columns - {*self.sites, MEAN} | without_row | set(self.settings.leave_out) - {*self.sites})
        if unmatched:
            raise ValueError(f"{unmatched[0]!r} is no row of the numbers, or no site")
        return self

    @property
    def columns(self) -> tuple[str, ...]:
        """The sites, then the mean, as far as the paper has numbers for them; all if no number is legible."""
        listed = {name for row in self.numbers.values() for name in row}
        return tuple(name for name in (*self.sites, MEAN) if name in listed or not listed)


def suites() -> tuple[str, ...]:
    """Names of the suites that come with medflare; those of mechanisms begin with "mechanisms/"."""
    return tuple(sorted(_files()))


def _files() -> dict[str, Any]:
    folder = resources.files("medflare.tasks") / "presets" / "suites"
    files = {}
    for place in ("", "mechanisms/"):
        for file in (folder / place).iterdir():
            if file.name.endswith(".json"):
                files[place + file.name.removesuffix(".json")] = file
    return files


def load_suite(source: str) -> Suite:
    """The suite of a name, or of a JSON file; raises ConfigError if there is none, or a setting, row or column is wrong."""
    file = _files().get(source, Path(source))
    if not file.is_file():
        raise unknown("suite", source, suites())
    place, remedy = f"suite {source}", "see app_configs/suites/ for working examples"
    try:
        content = dict(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{place}: not one JSON object ({error}); {remedy}") from error
    return checked(Suite, content, place, remedy=remedy)


def beside_the_paper(suite: Suite, groups: Groups) -> str:
    """Markdown: every row of the paper's table, its numbers and ours in its unit.

    Ours are mean [interval over seeds]. Rows of the study that the suite does not have are last.
    """
    values = study_values(groups)
    settings = suite.settings
    scale, digits = (100, 2) if settings.percent else (1, 4)

    def cell(label: str, model: str, column: str) -> str:
        key = (label, model, settings.role, settings.metric, ALL_SITES if column == MEAN else column)
        by_seed = values.loc[key].dropna() if key in values.index else pd.Series(dtype=float)
        if by_seed.empty:
            return UNDEFINED
        interval = mean_interval(by_seed) or (by_seed.min(), by_seed.max())
        bounds = "" if len(by_seed) < 2 else f" [{', '.join(f'{scale * bound:.{digits}f}' for bound in interval)}]"
        return f"{scale * by_seed.mean():.{digits}f}{bounds}"

    def ours(row: str, label: str, model: str) -> list[str]:
        of = label if model == settings.model else f"{label}, {model}"
        return [row, of, *(cell(label, model, column) for column in suite.columns)]

    lines = [["row", "of", *suite.columns]]
    for row, numbers in suite.numbers.items():
        lines.append([row, "paper", *(f"{numbers[column]:.{digits}f}" if column in numbers else UNDEFINED for column in suite.columns)])
        label = suite.methods.get(row)
        if label is not None and label in groups:
            lines.append(ours("", label, suite.models.get(row, settings.model)))
    further = [label for label in groups if label not in suite.methods.values()]
    lines.extend(ours(FURTHER_ROW, label, settings.model) for label in further)
    unit = "in hundredths" if settings.percent else "as a share"
    about = f"{settings.metric} {unit}, {settings.role} sites, our model: {settings.model}"
    about += ", or the one after the comma. " if suite.models else ". "
    bracket = "[95 % bootstrap interval, below six seeds the lowest and the highest value]"
    about += f"Ours: mean over seeds {', '.join(map(str, values.columns))} {bracket}. The paper's: {suite.source}.\n"
    differences = "".join(f"- {line}\n" for line in (*suite.differences, *deviations(suite, groups)))
    parts = [f"# {suite.paper}, {suite.table}, beside ours\n", about, markdown(lines, 2)]
    return "\n".join([*parts, *([f"What differs:\n\n{differences}"] if differences else [])])


def deviations(suite: Suite, groups: Groups) -> list[str]:
    """Settings of the runs that differ from the suite, one line each."""
    runs = [run for of_label in groups.values() for run in of_label]
    compared: dict[str, tuple[list[Any], list[Any]]] = {
        "rounds": (sorted({run["rounds"] for run in runs}), [suite.settings.rounds]),
        "seeds": (sorted({run["seed"] for run in runs}), sorted(suite.seeds)),
        "sites": (sorted({site for run in runs for site in run["sites"]}), sorted(suite.sites)),
    }
    texts = {name: [", ".join(map(str, values)) for values in pair] for name, pair in compared.items()}
    lines = [f"{name}: {here}, the suite has {there}" for name, (here, there) in texts.items() if here != there]
    for task in (run["configuration"]["task"] for run in runs if run["configuration"]["task"]):
        for name, value in load_task(suite.task).to_dict().items():
            if name != "resplit" and task.get(name) != value:
                lines.append(f"{name} of the task: {json.dumps(task.get(name))}, the suite has {json.dumps(value)}")
    failed = [label for label, of_label in groups.items() if any(run["reason"] for run in of_label)]
    return [*dict.fromkeys(lines), *(f"{label}: a run failed, see table.md" for label in failed)]
