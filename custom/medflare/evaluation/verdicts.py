"""Findings: why a deployed model should not be used, or not yet. The console, both reports, results.json and studies show this list.

Everything is computed from a results dict: nothing more than the results leaves a site.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, Final, NamedTuple

import numpy as np

from medflare.evaluation.labels import labels_of, named_metrics
from medflare.evaluation.presentation import counted, format_metric, metric_label, ordered_sites
from medflare.training.constant import is_at_chance

Curve = dict[int, float]  # rounds of training -> validation metric
_Steps = Sequence[Mapping[str, Any]]  # of a run, see `results.append_round`

# A mask whose volume is more than nine times the true one, or less than a ninth of it, cannot reach a Dice of 0.2: 2 / (1 + 9).
# So a Dice below the floor is named without the volumes, which do not leave the site. As IoU: 0.2 / (2 - 0.2).
FLOORS: Final = {"dice": 0.2, "iou": 1 / 9}
MOST_VOLUME_ERROR: Final = 2.0  # |predicted - true| / true: on average the prediction is three times as large as the truth
RISING: Final = 0.01  # gain of the validation metric
_FEWEST_ROUNDS: Final = 4  # behind a slope
_MOST: Final = 5  # places that one line names


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
        return f"{self.brief} at {', '.join(self.sites)}" if self.sites else self.brief

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {**asdict(self), "sites": list(self.sites)}


class _Text(NamedTuple):
    problem: str
    remedy: str
    brief: str


_TEXTS: Final = {  # the gravest first
    "constant_output": _Text(
        "The deployed model gives one answer for all test images",
        "Do not use it: train more rounds, lower the learning rate, add images, or start from pretrained weights",
        "one answer for all images",
    ),
    "at_chance": _Text(
        "The deployed model is not better than the constant answer, which ignores the image",
        "Do not use it: train more rounds, add images, or start from pretrained weights",
        "not above the constant answer",
    ),
    "below_floor": _Text(
        f"The deployed model hardly finds a structure: Dice below {FLOORS['dice']}",
        "Do not use it for this structure: train more rounds, raise the learning rate, or check the masks",
        "a structure below the floor",
    ),
    "wrong_volume": _Text(
        "The deployed model predicts volumes far from the true ones",
        "Do not use it for volumes: train more rounds, or check the masks",
        "a volume far from the truth",
    ),
    "class_missed": _Text(
        "The deployed model never recognizes a class that occurs in the test images",
        "Do not use it for this class: train more rounds, add images of it, weigh the classes in the loss, or merge it with another class",
        "a class never recognized",
    ),
    "indistinct": _Text(
        "The deployed model cannot be distinguished from the constant answer: the interval contains it",
        "Add test patients, or train more rounds",
        "not distinguishable from the constant answer",
    ),
    "still_rising": _Text("Training ended while the deployed model still became better", "Train more rounds (--rounds)", "still rising"),
    "few_validation_images": _Text(
        "The deployed model was chosen on fewer than ten validation images",
        "Give validation more patients (medflare data init --shares), or use the last round (--set selection=last)",
        "few validation images",
    ),
    "rare_class": _Text(
        "Some classes have too few training images at a site",
        "Merge them with other classes, add images of them, or do not trust the model on them",
        "a rare class",
    ),
}
KINDS: Final = tuple(_TEXTS)
UNUSABLE: Final = ("constant_output", "at_chance", "below_floor")
# The server knows these; a site cannot compute them.
OF_TRAINING: Final = ("still_rising", "few_validation_images")
_OF_EVENTS: Final = ("constant_output", "at_chance", "few_validation_images", "rare_class")


class _Note(NamedTuple):
    kind: str
    site: str | None
    text: str


def findings(results: Mapping[str, Any], history: Sequence[Mapping[str, Any]] = (), model: str = "deployed") -> list[Finding]:
    """The findings about a model, in the order of `KINDS`.

    Args:
        history: the steps of the run, see `results.append_round`; without it, validation metrics come from the results.
        model: another model than the deployed one has no findings from events.
    """
    return _grouped(_notes(results, history, model))


def kinds_of_training(results: Mapping[str, Any], history: _Steps, sites: Iterable[str]) -> dict[str, list[str]]:
    """Site -> the findings about the training that concern it, for its page.

    They have no numbers: those are of other sites, too.
    """
    notes = _notes(results, history, "deployed")
    kinds: dict[str, list[str]] = {}
    for site in sites:
        concerned = {note.kind for note in notes if note.site in (None, site)}
        kinds[site] = [kind for kind in OF_TRAINING if kind in concerned]
    return kinds


def findings_at_site(results: Mapping[str, Any], site: str, kinds: Iterable[str] = ()) -> list[Finding]:
    """The findings of a site's page: about its test images, and the server's `kinds_of_training`."""
    notes = _notes(results, (), "deployed")
    images = results["sites"][site]["n"]["validation"]
    still_rising = "the mean of the sites' validation metrics"
    few = f"{counted(images, 'validation image')} at this site"
    texts = dict(zip(OF_TRAINING, (still_rising, few), strict=True))
    for kind in kinds:
        notes.append(_Note(kind, None, f"{texts[kind]}; the server's report has all numbers"))
    return _grouped(notes)


def _notes(results: Mapping[str, Any], history: _Steps, model: str) -> list[_Note]:
    notes: list[_Note] = []
    task = results["configuration"]["task"]
    if task:
        for name, site in ordered_sites(results).items():
            notes += _against_constant(name, site, task["metric"], model)
            notes += _of_structures(name, site, model)
            notes += _of_classes(name, site, task, model)
        notes += _still_rising(_curve(results, history, model), task["metric"])
    if model == "deployed":
        computed = {(note.kind, note.site) for note in notes}
        noted = [_of_event(event) for event in results["events"] if event["kind"] in _OF_EVENTS]
        notes += [note for note in noted if (note.kind, note.site) not in computed]
    return notes


def findings_of(results: Mapping[str, Any]) -> list[Finding]:
    """The findings that results.json has; those of an older version are computed."""
    if "findings" not in results:
        return findings(results)
    return [Finding(**{**content, "sites": tuple(content["sites"])}) for content in results["findings"]]


def _grouped(notes: Iterable[_Note]) -> list[Finding]:
    by_kind: dict[str, list[_Note]] = {}
    for note in dict.fromkeys(notes):
        by_kind.setdefault(note.kind, []).append(note)
    grouped = []
    for kind, text in _TEXTS.items():
        if kind not in by_kind:
            continue
        by_site: dict[str | None, list[str]] = {}
        for note in by_kind[kind]:
            by_site.setdefault(note.site, []).append(note.text)
        lines = []
        for site, texts in by_site.items():
            lines.append(", ".join(texts) if site is None else f"{site}: {', '.join(texts)}")
        more = f"; and {len(lines) - _MOST} more" if len(lines) > _MOST else ""
        sites = tuple(site for site in by_site if site is not None)
        where = "; ".join(lines[:_MOST]) + more
        grouped.append(Finding(kind, text.problem, where, text.remedy, sites, text.brief))
    return grouped


def _of_event(event: Mapping[str, Any]) -> _Note:
    return _Note(event["kind"], event["site"], event["message"])


# -- test metrics ------------------------------------------------------------------------------------------------------------


def _against_constant(name: str, site: Mapping[str, Any], metric: str, model: str) -> Iterator[_Note]:
    value, constant = site["metrics"].get(model, {}).get(metric), site.get("constant")
    if value is None or constant is None:
        return
    numbers = f"{metric_label(metric)} {format_metric(metric, value)}"
    of_constant = f"the constant answer {format_metric(metric, constant)}"
    bounds = site.get("intervals", {}).get(model, {}).get(metric)
    if is_at_chance(value, constant):
        yield _Note("at_chance", name, f"{numbers}, {'below' if value < constant else 'like'} {of_constant}")
    elif bounds and bounds[0] <= constant:
        interval = f"{format_metric(metric, bounds[0])} to {format_metric(metric, bounds[1])}"
        yield _Note("indistinct", name, f"{numbers} ({interval}), {of_constant}")


def _of_structures(name: str, site: Mapping[str, Any], model: str) -> Iterator[_Note]:
    """Structures below the floor, and of wrong volume; without numbers by structure those of all together."""
    rows = [(f"{label} ", values) for label, values, _ in labels_of(site, model)]
    for label, values in rows or [("", named_metrics(site["metrics"].get(model, {})))]:
        overlap = next((metric for metric in FLOORS if values.get(metric) is not None), None)
        if overlap is not None and values[overlap] < FLOORS[overlap]:
            yield _Note("below_floor", name, f"{label}{metric_label(overlap)} {format_metric(overlap, values[overlap])}")
        error = values.get("volume_error")
        if error is not None and error > MOST_VOLUME_ERROR:
            yield _Note("wrong_volume", name, f"{label}volume error {format_metric('volume_error', error)}")


def _of_classes(name: str, site: Mapping[str, Any], task: Mapping[str, Any], model: str) -> Iterator[_Note]:
    """Classes with true images, of which none is recognized: their sensitivity and F1 are 0."""
    if task.get("kind") != "classification":
        return
    for label, values, _ in labels_of(site, model):
        if values.get("sensitivity") == 0:
            images = _images_of(site, task, label, model)
            yield _Note("class_missed", name, label if images is None else f"{label} (0 of {counted(images, 'image')})")


def _images_of(site: Mapping[str, Any], task: Mapping[str, Any], label: str, model: str) -> int | None:
    """The number of test images of a class, from the confusion counts; None if the site keeps them back."""
    matrices = site.get("classes", {}).get(model, {}).get("confusion") or []
    place = list(task["labels"]).index(label)
    matrix, row = (place, 1) if task["target"] == "multilabel" else (0, place if task["target"] == "multiclass" else 1)
    return sum(matrices[matrix][row]) if matrix < len(matrices) and row < len(matrices[matrix]) else None


# -- validation metrics over the rounds --------------------------------------------------------------------------------------


def _still_rising(curve: Curve, metric: str) -> Iterator[_Note]:
    if not is_rising(curve):
        return
    late = late_rounds(curve)
    first, last = late[0], late[-1]
    numbers = [format_metric(metric, curve[at]) for at in (first, last)]
    best = max(curve, key=lambda at: (curve[at], at))
    last_is_best = "; the last round is the best: train longer" if best == last else ""
    rise = f"{numbers[0]} after round {first}, {numbers[1]} after round {last}"
    yield _Note("still_rising", None, f"validation {metric_label(metric)} {rise}{last_is_best}")


def late_rounds(curve: Mapping[int, float]) -> list[int]:
    """The last third of the rounds, and at least the last four; the untrained model of round 0 is none."""
    trained = sorted(at for at in curve if at > 0)
    third = [at for at in trained if at >= trained[-1] * 2 / 3]
    return third if len(third) >= _FEWEST_ROUNDS else trained[-_FEWEST_ROUNDS:]


def is_rising(curve: Mapping[int, float]) -> bool:
    """Whether training ended while the validation metric still rose.

    Either the last round is better than every other one by more than 0.01, or a least-squares line through `late_rounds`, at least four,
    gains more than 0.01 and more than twice the standard error of its slope.

    Examples:
        >>> is_rising({0: 0.01, 1: 0.05, 2: 0.08}), is_rising({0: 0.01, 1: 0.9}), is_rising({1: 0.8, 2: 0.805, 3: 0.8, 4: 0.805})
        (True, False, False)
    """
    late = late_rounds(curve)
    if len(late) < 2:
        return False
    others = [value for at, value in curve.items() if at != late[-1]]
    if curve[late[-1]] > max(others) + RISING:
        return True
    if len(late) < _FEWEST_ROUNDS:
        return False
    rounds = np.array(late, dtype=float) - fmean(late)
    values = np.array([curve[at] for at in late])
    slope = float(rounds @ values / (rounds @ rounds))
    residuals = values - values.mean() - slope * rounds
    error = float(np.sqrt(residuals @ residuals / (len(late) - 2) / (rounds @ rounds)))
    return slope * (late[-1] - late[0]) > RISING and slope > 2 * error


def mean_curve(of_sites: Iterable[Iterable[Sequence[float]]]) -> Curve:
    """The mean over the sites that have a value after the last round, at the rounds where all of them have one.

    So a site that is missing in some rounds does not look like progress.

    Args:
        of_sites: points (rounds of training, value) of each site.
    """
    curves = [{int(at): float(value) for at, value in points} for points in of_sites]
    last = max((at for curve in curves for at in curve), default=0)
    compared = [curve for curve in curves if last in curve]
    common = [at for at in sorted(compared[0]) if all(at in curve for curve in compared)] if compared else []
    return {at: fmean(curve[at] for curve in compared) for at in common}


def _curve(results: Mapping[str, Any], history: Sequence[Mapping[str, Any]], model: str) -> Curve:
    """The mean validation metric of a model over the sites.

    The deployed model has the personal model's if there is one, else the global one's.
    """
    curves = results.get("curves") or _curves_of_steps(history) or _curves_of_selection(results)
    names = ("global",) if model == "global" else ("personal", "global")
    name = next((name for name in names if curves.get(name)), None)
    return mean_curve(curves[name].values()) if name else {}


def _curves_of_steps(history: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Model -> site -> points; the last value of a round counts."""
    curves: dict[str, dict[str, dict[int, float]]] = {}
    for step in history:
        for site, meta in step["sites"].items():
            for model, value in (meta.get("validation") or {}).items():
                if value is not None and np.isfinite(value):
                    curves.setdefault(model, {}).setdefault(site, {})[step["round"]] = value
    return {model: {site: list(points.items()) for site, points in of_sites.items()} for model, of_sites in curves.items()}


def _curves_of_selection(results: Mapping[str, Any]) -> dict[str, dict[str, list[tuple[int, float]]]]:
    curves: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for model, selection in results.get("model_selection", {}).items():
        for candidate in selection["candidates"]:
            for site, value in candidate["votes"].items():
                curves.setdefault(model, {}).setdefault(site, []).append((candidate["round"], value))
    return curves


# -- the sentence below the results ------------------------------------------------------------------------------------------


def verdict(results: Mapping[str, Any]) -> str:
    """The deployed model against the constant answer: the level, and at how many sites it is better; "" without constant answers."""
    metric = results["configuration"]["task"].get("metric", "")
    sites = {name: site for name, site in ordered_sites(results).items() if site.get("constant") is not None}
    places: dict[str, list[str]] = {}
    for name, site in sites.items():
        places.setdefault(_standing(site, metric), []).append(name)
    values = [sites[name]["metrics"]["deployed"][metric] for name in sites if name not in places.get("undefined", [])]
    if not values:
        return ""
    mean = fmean(values)
    level = format_metric(metric, mean)
    constant = format_metric(metric, fmean(sites[name]["constant"] for name in sites if name not in places.get("undefined", [])))
    start = (
        f"Deployed model: {metric_label(metric)} {level}, constant answer (which ignores the image) {constant}, "
        f"mean over {counted(len(values), 'site')}"
    )
    if any(finding.kind == "constant_output" for finding in findings_of(results)):
        return f"{start}: one answer for all test images: not usable."
    if restriction := _restriction(results, metric, mean):
        return f"{start}: {_without_praise(places)}{restriction}."
    parts = []
    if "better" in places:
        parts.append(f"better at {len(places['better'])} of {len(sites)} sites (the whole interval is above it)")
    for standing, words in _STANDINGS.items():
        if standing in places:
            parts.append(f"{words} at {', '.join(places[standing])}")
    return f"{start}: {'; '.join(parts)}."


_STANDINGS: Final = {
    "no interval": "above it, but without an interval,",
    "not better": "not better",
    "open": "not distinguishable",
    "undefined": "undefined",
}


def _standing(site: Mapping[str, Any], metric: str) -> str:
    """How the deployed model stands to the constant answer at a site: "better" or a key of `_STANDINGS`."""
    value, constant = site["metrics"]["deployed"][metric], site["constant"]
    if value is None:
        return "undefined"
    if is_at_chance(value, constant):
        return "not better"
    bounds = site.get("intervals", {}).get("deployed", {}).get(metric)
    if bounds is None:
        return "no interval"
    return "better" if bounds[0] > constant else "open"


def _without_praise(places: Mapping[str, Sequence[str]]) -> str:
    """The comparison in a sentence that ends with a restriction."""
    if "not better" in places:
        return f"not better at {', '.join(places['not better'])}, and "
    return "better than the constant answer, but " if "better" in places or "no interval" in places else ""


def _restriction(results: Mapping[str, Any], metric: str, mean: float) -> str:
    """Why the deployed model must not be called better without it; "" if nothing forbids that."""
    where = {finding.kind: finding.where for finding in findings_of(results)}
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
