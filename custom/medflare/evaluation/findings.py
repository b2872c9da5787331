"""Findings: why a deployed model should not be used, or not yet. The console, both reports,
results.json and studies show this list.

Everything is computed from results and the history of the run: nothing more leaves a site.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from medflare.core.events import DOUBTS, EventLog
from medflare.core.text import Json
from medflare.evaluation.presentation import (
    format_metric,
    labels_of,
    metric_label,
    named_metrics,
    ordered_sites,
    task_metric,
    with_number,
)

Curve = dict[int, float]  # rounds of training -> validation metric
_Steps = Sequence[Json]  # of a run, see `results.append_round`
_Curves = dict[str, dict[str, Curve]]  # model -> site -> curve

# A mask whose volume is more than nine times the true one, or less than a ninth of it, cannot reach
# a Dice of 0.2: 2 / (1 + 9). So a Dice below the floor is named without the volumes, which do not
# leave the site. As IoU: 0.2 / (2 - 0.2).
FLOORS = {"dice": 0.2, "iou": 1 / 9}
# |predicted - true| / true: on average the prediction is three times as large as the truth.
MOST_VOLUME_ERROR = 2.0
RISING = 0.01  # gain of the validation metric
_FEWEST_ROUNDS = 4  # behind a slope
_MOST = 5  # places that one line names


@dataclass(frozen=True)
class Finding:
    """One reason not to use the deployed model, or not yet.

    Attributes:
        kind: a key of `_TEXTS`.
        problem: the reason as a sentence, without the full stop.
        where: the sites, structures or classes, and their numbers.
        remedy: what to do.
        sites: the names of the sites; empty if it is of the whole federation.
        brief: the reason in a few words, for a column.
    """

    kind: str
    problem: str
    where: str
    remedy: str
    sites: tuple[str, ...] = ()
    brief: str = ""

    @property
    def line(self) -> str:
        return f"{self.kind}: {self.problem} ({self.where}). {self.remedy}."

    @property
    def at_sites(self) -> str:
        """The reason in a few words, and the sites."""
        if not self.sites:
            return self.brief
        return f"{self.brief} at {', '.join(self.sites)}"

    def to_dict(self) -> Json:
        """The finding as JSON."""
        return {**asdict(self), "sites": list(self.sites)}


class _Text(NamedTuple):
    problem: str
    remedy: str
    brief: str


_TEXTS = {  # the gravest first
    "constant_output": _Text(
        "The deployed model gives one prediction for all test images",
        "Do not use it: train more rounds, lower the learning rate, "
        "add images, or start from pretrained weights",
        "one prediction for all images",
    ),
    "at_chance": _Text(
        "The deployed model is no better than the constant prediction, which ignores the image",
        "Do not use it: train more rounds, add images, or start from pretrained weights",
        "no better than the constant prediction",
    ),
    "below_floor": _Text(
        f"The deployed model hardly finds a structure: Dice below {FLOORS['dice']}",
        "Do not use it for this structure: train more rounds, raise the learning rate, "
        "or check the masks",
        "a structure below the floor",
    ),
    "wrong_volume": _Text(
        "The deployed model predicts volumes far from the true ones",
        "Do not use it for volumes: train more rounds, or check the masks",
        "a volume far from the truth",
    ),
    "class_missed": _Text(
        "The deployed model never recognizes a class that occurs in the test images",
        "Do not use it for this class: train more rounds, add images of it, "
        "or merge it with another class",
        "a class never recognized",
    ),
    "indistinct": _Text(
        "The deployed model cannot be distinguished from the constant prediction: "
        "the interval contains it",
        "Add test patients, or train more rounds",
        "not distinguishable from the constant prediction",
    ),
    "still_rising": _Text(
        "Training ended while the deployed model still became better",
        "Train more rounds (--rounds)",
        "still rising",
    ),
    "few_validation_images": _Text(
        "The deployed model was chosen on fewer than ten validation images",
        "Give validation more patients (medflare data init --shares), "
        "or use the last round (--set selection=last)",
        "few validation images",
    ),
    "rare_class": _Text(
        "Some classes have too few training images at a site",
        "Merge them with other classes, add images of them, or do not trust the model on them",
        "a rare class",
    ),
}
KINDS = tuple(_TEXTS)
UNUSABLE = ("constant_output", "at_chance", "below_floor")
# The server knows these; a site cannot compute them.
OF_TRAINING = ("still_rising", "few_validation_images")


class _Note(NamedTuple):
    kind: str
    site: str | None
    text: str


def findings(results: Json, history: Sequence[Json] = (), model: str = "deployed") -> list[Finding]:
    """The findings about a model, in the order of `KINDS`.

    Args:
        history: the steps of the run, see `results.append_round`; without it, validation metrics
            come from the results.
        model: another model than the deployed one has no findings from events.
    """
    return _grouped(_notes(results, history, model))


def kinds_of_training(
    history: _Steps, events: EventLog, sites: Iterable[str]
) -> dict[str, list[str]]:
    """Site -> the findings about the training that concern it, for its page, without numbers: those
    are of other sites, too.
    """
    rising = is_rising(validation_curve({}, "deployed", history))
    few_images = {event["site"] for event in events.of("few_validation_images")}
    kinds = {}
    for site in sites:
        kinds[site] = ["still_rising"] if rising else []
        if few_images & {None, site}:
            kinds[site].append("few_validation_images")
    return kinds


def few_validation_line(counts: Mapping[str, int]) -> str:
    """What to do, before a run, about few validation images; `counts`: site -> its images."""
    listed = ", ".join(f"{site} {count}" for site, count in counts.items())
    kind = "few_validation_images"
    return f"{kind}: the model will be chosen on few of them ({listed}). {_TEXTS[kind].remedy}"


def findings_at_site(results: Json, site: str, kinds: Iterable[str]) -> list[Finding]:
    """The findings of a site's page: about its test images, and those of `kinds_of_training`."""
    notes = _notes(results, (), "deployed")
    images = results["sites"][site]["n"]["validation"]
    texts = {
        "still_rising": "the mean of the sites' validation metrics",
        "few_validation_images": f"{with_number(images, 'validation image')} at this site",
    }
    for kind in kinds:
        notes.append(_Note(kind, None, f"{texts[kind]}; the server's report has all numbers"))
    return _grouped(notes)


def _notes(results: Json, history: _Steps, model: str) -> list[_Note]:
    notes: list[_Note] = []
    task = results["configuration"]["task"]
    if task:
        for name, site in ordered_sites(results).items():
            notes += _against_constant(name, site, task["metric"], model)
            notes += _of_structures(name, site, model)
            notes += _of_classes(name, site, task, model)
        notes += _still_rising(validation_curve(results, model, history), task["metric"])
    if model == "deployed":
        computed = {(note.kind, note.site) for note in notes}
        for event in results["events"]:
            note = _Note(event["kind"], event["site"], event["message"])
            if note.kind in DOUBTS and (note.kind, note.site) not in computed:
                notes.append(note)
    return notes


def findings_of(results: Json) -> list[Finding]:
    """The findings that results.json has; those of an older version are computed."""
    if "findings" not in results:
        return findings(results)
    saved = results["findings"]
    return [Finding(**{**content, "sites": tuple(content["sites"])}) for content in saved]


def _grouped(notes: Iterable[_Note]) -> list[Finding]:
    by_kind: dict[str, dict[str | None, list[str]]] = {}  # kind -> site -> texts
    for note in dict.fromkeys(notes):
        by_kind.setdefault(note.kind, {}).setdefault(note.site, []).append(note.text)
    grouped = []
    for kind, text in _TEXTS.items():
        if kind not in by_kind:
            continue
        by_site = by_kind[kind]
        lines = []
        for site, texts in by_site.items():
            line = ", ".join(texts)
            if site is not None:
                line = f"{site}: {line}"
            lines.append(line)
        where = "; ".join(lines[:_MOST])
        if len(lines) > _MOST:
            where += f"; and {len(lines) - _MOST} more"
        sites = tuple(site for site in by_site if site is not None)
        grouped.append(Finding(kind, text.problem, where, text.remedy, sites, text.brief))
    return grouped


# -- test metrics ----------------------------------------------------------------------------------


def _against_constant(name: str, site: Json, metric: str, model: str) -> Iterator[_Note]:
    kind, metric, value, constant = _standing_at(site, metric, model)
    if kind not in (NO_BETTER, "open"):
        return
    numbers = f"{metric_label(metric)} {format_metric(metric, value)}"
    constant_text = f"the constant prediction {format_metric(metric, constant)}"
    if kind == NO_BETTER:
        comparison = "below" if value < constant else "like"
        yield _Note("at_chance", name, f"{numbers}, {comparison} {constant_text}")
    else:
        low, high = site["intervals"][model][metric]
        interval = f"{format_metric(metric, low)} to {format_metric(metric, high)}"
        yield _Note("indistinct", name, f"{numbers} ({interval}), {constant_text}")


def _of_structures(name: str, site: Json, model: str) -> Iterator[_Note]:
    """Structures below the floor, and those of wrong volume; without numbers by structure, all
    structures together.
    """
    rows = [(f"{label} ", values) for label, values, _ in labels_of(site, model)]
    if not rows:
        rows = [("", named_metrics(site["metrics"].get(model, {})))]
    for label, values in rows:
        overlap = next((metric for metric in FLOORS if values.get(metric) is not None), None)
        if overlap is not None and values[overlap] < FLOORS[overlap]:
            number = format_metric(overlap, values[overlap])
            yield _Note("below_floor", name, f"{label}{metric_label(overlap)} {number}")
        error = values.get("volume_error")
        if error is not None and error > MOST_VOLUME_ERROR:
            number = format_metric("volume_error", error)
            yield _Note("wrong_volume", name, f"{label}volume error {number}")


def _of_classes(name: str, site: Json, task: Json, model: str) -> Iterator[_Note]:
    """Classes with true images, of which none is recognized: their sensitivity and F1 are 0."""
    if task.get("kind") != "classification":
        return
    for label, values, _ in labels_of(site, model):
        if values.get("sensitivity") != 0:
            continue
        images = _images_of(site, task, label, model)
        if images is not None:
            label = f"{label} (0 of {with_number(images, 'image')})"
        yield _Note("class_missed", name, label)


def _images_of(site: Json, task: Json, label: str, model: str) -> int | None:
    """The number of test images of a class, from the confusion counts; None if the site keeps them
    back.
    """
    matrices = site.get("classes", {}).get(model, {}).get("confusion") or []
    index = list(task["labels"]).index(label)
    matrix = index if task["target"] == "multilabel" else 0
    row = index if task["target"] == "multiclass" else 1
    if matrix >= len(matrices) or row >= len(matrices[matrix]):
        return None
    return sum(matrices[matrix][row])


# -- validation metrics over the rounds ------------------------------------------------------------


def _still_rising(curve: Curve, metric: str) -> Iterator[_Note]:
    if not is_rising(curve):
        return
    late = late_rounds(curve)
    start = f"{format_metric(metric, curve[late[0]])} after round {late[0]}"
    end = f"{format_metric(metric, curve[late[-1]])} after round {late[-1]}"
    text = f"validation {metric_label(metric)} {start}, {end}"
    if late[-1] == max(curve, key=lambda at: (curve[at], at)):
        text += "; the last round is the best"
    yield _Note("still_rising", None, text)


def late_rounds(curve: Mapping[int, float]) -> list[int]:
    """The last third of the rounds, and at least the last four; the untrained model of round 0 is
    none.
    """
    trained = sorted(at for at in curve if at > 0)
    third = [at for at in trained if at >= trained[-1] * 2 / 3]
    if len(third) < _FEWEST_ROUNDS:
        return trained[-_FEWEST_ROUNDS:]
    return third


def is_rising(curve: Mapping[int, float]) -> bool:
    """Whether training ended while the validation metric still rose.

    It did if the last round is better than every other one by more than 0.01, or if a least-squares
    line through `late_rounds`, at least four, gains more than 0.01 and more than twice the standard
    error of its slope.

    Examples:
        >>> is_rising({0: 0.01, 1: 0.05, 2: 0.08}), is_rising({0: 0.01, 1: 0.9})
        (True, False)
        >>> is_rising({1: 0.8, 2: 0.805, 3: 0.8, 4: 0.805})
        False
    """
    late = late_rounds(curve)
    if len(late) < 2:
        return False
    others = [value for at, value in curve.items() if at != late[-1]]
    if curve[late[-1]] > max(others) + RISING:
        return True
    if len(late) < _FEWEST_ROUNDS:
        return False
    values = [curve[at] for at in late]
    (slope, _), covariance = np.polyfit(late, values, 1, cov=True)
    error = np.sqrt(covariance[0, 0])
    return bool(slope * (late[-1] - late[0]) > RISING and slope > 2 * error)


def mean_curve(site_curves: Iterable[Curve]) -> Curve:
    """The mean over the sites that have a value after the last round, at the rounds where all of
    them have one.

    So a site that is missing in some rounds does not look like progress.

    Args:
        site_curves: the curve of each site, or its points (rounds of training, value).
    """
    curves = [dict(points) for points in site_curves]
    last = max(chain.from_iterable(curves), default=0)
    compared = [curve for curve in curves if last in curve]
    if not compared:
        return {}
    mean = {}
    for at in sorted(set(compared[0]).intersection(*compared)):
        mean[at] = fmean(curve[at] for curve in compared)
    return mean


def validation_curve(results: Json, model: str, history: _Steps = ()) -> Curve:
    """The mean validation metric over the sites of a model; of the deployed model, that of the
    personal model if there is one, else of the global one.
    """
    curves = results.get("curves")
    if not curves:
        curves = validation_curves(history) or _curves_of_selection(results)
    for name in ("global",) if model == "global" else ("personal", "global"):
        if curves.get(name):
            return mean_curve(curves[name].values())
    return {}


def validation_curves(history: _Steps) -> _Curves:
    """The validation metric in the steps of a run; the last value of a round counts."""
    curves: _Curves = {}
    for step in history:
        for site, meta in step["sites"].items():
            for model, value in (meta.get("validation") or {}).items():
                if value is not None and np.isfinite(value):
                    curves.setdefault(model, {}).setdefault(site, {})[step["round"]] = value
    return curves


def _curves_of_selection(results: Json) -> _Curves:
    curves: _Curves = {}
    for model, selection in results.get("model_selection", {}).items():
        for candidate in selection["candidates"]:
            for site, value in candidate["votes"].items():
                curves.setdefault(model, {}).setdefault(site, {})[candidate["round"]] = value
    return curves


# -- the sentence below the results ----------------------------------------------------------------


def level_sentence(results: Json) -> str:
    """The level of the deployed model against the constant prediction, and at how many sites it is
    better; "" without constant predictions.
    """
    metric = task_metric(results)
    standings = defaultdict(list)  # kind -> sites
    values = []
    constants = []
    for name, site in ordered_sites(results).items():
        if site.get("constant") is None:
            continue
        kind = _standing_at(site, metric).kind
        standings[kind].append(name)
        if kind != "undefined":
            values.append(site["metrics"]["deployed"][metric])
            constants.append(site["constant"])
    if not values:
        return ""
    mean = fmean(values)
    start = (
        f"Deployed model: {metric_label(metric)} {format_metric(metric, mean)}, "
        f"constant prediction (which ignores the image) {format_metric(metric, fmean(constants))}, "
        f"mean over {with_number(len(values), 'site')}"
    )
    where = {finding.kind: finding.where for finding in findings_of(results)}
    if "constant_output" in where:
        return f"{start}: one prediction for all test images: not usable."
    restriction = _restriction(where, metric, mean)
    if restriction:
        return f"{start}: {_without_praise(standings)}{restriction}."
    parts = []
    if "better" in standings:
        sites = sum(map(len, standings.values()))
        better = len(standings["better"])
        parts.append(f"better at {better} of {sites} sites (the whole interval is above it)")
    for kind, phrase in _STANDINGS.items():
        if kind in standings:
            parts.append(f"{phrase} at {', '.join(standings[kind])}")
    return f"{start}: {'; '.join(parts)}."


_AUC = "auc_macro"
_NEAR = 0.01  # difference of metrics up to which a model is no better
NO_BETTER = "no better"
_STANDINGS = {
    "no interval": "above it, but without an interval,",
    NO_BETTER: NO_BETTER,
    "open": "not distinguishable",
    "undefined": "undefined",
}


class Standing(NamedTuple):
    """How a model stands to the constant prediction: "better" or a key of `_STANDINGS`, and the
    metric that decides it.
    """

    kind: str
    metric: str
    value: Any
    constant: Any


def standing(
    values: Json, metric: str, constant: float | None, interval: Sequence[float] | None
) -> Standing:
    """How a model with these values of metrics stands to the constant prediction, by a metric (0 to
    1, higher is better) and its interval.

    Without an interval above the constant prediction the AUC decides, too, of which the constant
    prediction has 0.5: a guess has a higher F1.

    Examples:
        >>> standing({"dice": 0.505}, "dice", 0.5, None).kind
        'no better'
        >>> standing({"dice": 0.75}, "dice", 0.5, (0.6, 0.8)).kind
        'better'
        >>> standing({"f1_macro": 0.46, "auc_macro": 0.5}, "f1_macro", 0.41, None)
        Standing(kind='no better', metric='auc_macro', value=0.5, constant=0.5)
    """
    value = values.get(metric)
    auc = values.get(_AUC)
    kind = "open" if interval else "no interval"
    if value is None or constant is None:
        kind = "undefined"
    elif _no_better(value, constant):
        kind = NO_BETTER
    elif interval and interval[0] > constant:
        kind = "better"
    elif auc is not None and _no_better(auc, 0.5):
        return Standing(NO_BETTER, _AUC, auc, 0.5)
    return Standing(kind, metric, value, constant)


def _no_better(value: float, constant: float) -> bool:
    return value <= constant + _NEAR and value < 1 - _NEAR


def _standing_at(site: Json, metric: str, model: str = "deployed") -> Standing:
    interval = site.get("intervals", {}).get(model, {}).get(metric)
    return standing(site["metrics"].get(model, {}), metric, site.get("constant"), interval)


def _without_praise(standings: Mapping[str, Sequence[str]]) -> str:
    """The comparison in a sentence that ends with a restriction."""
    if NO_BETTER in standings:
        return f"{NO_BETTER} at {', '.join(standings[NO_BETTER])}, and "
    if "better" in standings or "no interval" in standings:
        return "better than the constant prediction, but "
    return ""


def _restriction(where: Mapping[str, str], metric: str, mean: float) -> str:
    """Why the deployed model must not be called better without it; "" if nothing forbids that.

    `where`: kind of a finding -> where it is.
    """
    if "below_floor" in where:
        if metric in FLOORS and mean < FLOORS[metric]:
            level = f"{metric_label(metric)} {format_metric(metric, mean)}"
            return f"{level}: not usable ({where['below_floor']})"
        return f"not usable for a structure below the floor ({where['below_floor']})"
    if "class_missed" in where:
        return f"it never recognizes a class ({where['class_missed']})"
    if "wrong_volume" in where:
        return f"it predicts volumes far from the true ones ({where['wrong_volume']})"
    return ""
