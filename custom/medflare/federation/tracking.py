"""Curves, test metrics and settings of a run for TensorBoard, MLflow or Weights & Biases.

In every engine, the run feeds one writer, where the server is. Its package is imported when the run
begins, and may be missing.
"""

import json
import math
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from medflare.core.errors import ConfigError, MedflareError, one_line
from medflare.core.packages import installed, require
from medflare.core.text import Json, JsonDict, Say
from medflare.evaluation.results import COMPLETED
from medflare.federation.outcome import StepReport

TENSORBOARD = "tb_events"  # folder beside results.json
_TRACK = re.compile(r"none|tensorboard|mlflow(=https?://\S+)?|wandb(=[\w.-]+)?", re.ASCII)
_BATCH = 100  # settings that MLflow takes at a time


def check_track(track: str | None, *, here: bool = True) -> None:
    """Check the setting `track`: "tensorboard", "mlflow[=URI]", "wandb[=PROJECT]" or "none"; None
    means TensorBoard where it is installed.

    Raises:
        ConfigError: it is something else or, with `here`, its package is not installed here.
    """
    if track is not None and not _TRACK.fullmatch(track):
        raise ConfigError(
            "track must be tensorboard, mlflow, mlflow=URI (http or https), wandb, wandb=PROJECT "
            f"or none, got {track!r}"
        )
    if here and track not in (None, "none"):
        package = track.partition("=")[0]
        require(package, f"track {package}")


class Tracker:
    """Feeds the writer of a run. If the writer fails, the tracking ends, and the run continues.

    Args:
        track: see `check_track`.
        folder: of the run; None: it has none.
        experiment: name for the runs of a task.
        name: of the run.
        warn: called with what failed.
    """

    def __init__(
        self, track: str | None, folder: Path | None, experiment: str, name: str, warn: Say
    ):
        self._warn = warn
        self._writer: Any = None  # a `_TensorBoard`, `_MLflow` or `_Wandb`
        default = "tensorboard" if folder is not None and installed("tensorboard") else "none"
        with self._guarded():
            check_track(track)
            kind, _, target = (track or default).partition("=")
            if kind != "none":
                self._writer = _WRITERS[kind](folder, experiment, name, target)

    def step(self, report: StepReport, rate: float) -> None:
        """Write the curves of a finished step and the learning rate of its round."""
        for site in sorted({*report.meta, *report.aggregation}):
            aggregation = report.aggregation.get(site, {})
            curves = site_curves(report.meta.get(site, {}), aggregation, rate)
            self._log(site, curves, report.step.round)

    def end(self, results: Json) -> None:
        """Write the results."""
        for site, content in results["sites"].items():
            tests: JsonDict = {}
            for model, values in content["metrics"].items():
                tests |= {f"test_{model}_{tag}": value for tag, value in values.items()}
            self._log(site, tests, results["rounds"])
        with self._guarded():
            if self._writer:
                settings = flat_settings(results["configuration"])
                self._writer.end(settings, results["status"] == COMPLETED)

    def _log(self, site: str, values: Json, round: int) -> None:
        """Write the values that are finite numbers."""
        with self._guarded():
            numbers = {
                tag: float(value)
                for tag, value in values.items()
                if isinstance(value, int | float) and math.isfinite(value)
            }
            if self._writer and numbers:
                self._writer.log(site, numbers, round)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._writer = None
            reason = getattr(error, "strerror", None) or type(error).__name__
            if isinstance(error, MedflareError):  # the text of others may have a password
                reason = one_line(error)
            self._warn(f"the run is not tracked any more: {reason}")


def site_curves(meta: Json, aggregation: Json, rate: float) -> JsonDict:
    """A site's curves after a step: loss, learning rate, validation metric by role, aggregation.

    Examples:
        >>> site_curves({"loss": 0.5, "validation": {"global": 0.75}}, {"weight": 1}, 0.01)
        {'loss': 0.5, 'learning_rate': 0.01, 'validation_global': 0.75, 'aggregation_weight': 1}
    """
    curves: JsonDict = {}
    if meta.get("loss") is not None:
        curves |= {"loss": meta["loss"], "learning_rate": rate}
    validation = meta.get("validation") or {}
    curves |= {f"validation_{role}": value for role, value in validation.items()}
    return curves | {f"aggregation_{name}": value for name, value in aggregation.items()}


def flat_settings(content: Json, prefix: str = "") -> JsonDict:
    """Settings by dotted names, in characters that all writers take.

    Examples:
        >>> flat_settings({"hyper": {"site": {"lam": 0.3}}, "outside": ["A"], "patience": None})
        {'hyper.site.lam': 0.3, 'outside': '["A"]', 'patience': 'null'}
    """
    settings: JsonDict = {}
    for key, value in content.items():
        name = prefix + re.sub(r"[^\w.-]", "_", key)
        if isinstance(value, Mapping) and value:
            settings |= flat_settings(value, f"{name}.")
        elif isinstance(value, int | float | str):
            settings[name] = value
        else:
            settings[name] = json.dumps(value)
    return settings


class _TensorBoard:
    """A TensorBoard run for each site, so that the curves of the sites share a chart."""

    def __init__(self, folder: Path | None, experiment: str, name: str, target: str):
        from torch.utils import tensorboard

        if folder is None:
            raise ConfigError("TensorBoard needs files; give the run a folder")
        self._package = tensorboard
        self._folder = folder / TENSORBOARD
        self._sites: JsonDict = {}

    def log(self, site: str, values: Mapping[str, float], round: int) -> None:
        if site not in self._sites:
            self._sites[site] = self._package.SummaryWriter(str(self._folder / site))
        for tag, value in values.items():
            self._sites[site].add_scalar(tag, value, round)
        self._sites[site].flush()

    def end(self, settings: Json, completed: bool) -> None:
        for writer in self._sites.values():
            _, *summaries = self._package.summary.hparams(dict(settings), {})
            for summary in summaries:  # `add_hparams` would open a second file
                writer.file_writer.add_summary(summary)
            writer.close()


class _MLflow:
    """One MLflow run with the curves "SITE/loss", at the URI, else at MLFLOW_TRACKING_URI, else in
    the run's folder.
    """

    def __init__(self, folder: Path | None, experiment: str, name: str, target: str):
        import mlflow.entities

        if not target and folder is not None and not os.environ.get("MLFLOW_TRACKING_URI"):
            target = f"sqlite:///{folder.resolve() / 'mlflow.db'}"
        self._package = mlflow
        self._client = mlflow.MlflowClient(tracking_uri=target or None)
        existing = self._client.get_experiment_by_name(experiment)
        if existing is None:
            identity = self._client.create_experiment(experiment)
        else:
            identity = existing.experiment_id
        self._run = self._client.create_run(identity, run_name=name).info.run_id

    def log(self, site: str, values: Mapping[str, float], round: int) -> None:
        metric = self._package.entities.Metric
        now = int(time.time() * 1000)
        metrics = [metric(f"{site}/{tag}", value, now, round) for tag, value in values.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def end(self, settings: Json, completed: bool) -> None:
        param = self._package.entities.Param
        params = [param(name, str(value)) for name, value in settings.items()]
        for start in range(0, len(params), _BATCH):
            self._client.log_batch(self._run, params=params[start : start + _BATCH])
        self._client.set_terminated(self._run, "FINISHED" if completed else "FAILED")


class _Wandb:
    """One W&B run with the curves "SITE/loss", in the run's folder; it sends nothing unless the
    environment's WANDB_MODE says so.
    """

    def __init__(self, folder: Path | None, experiment: str, name: str, target: str):
        mode = os.environ.get("WANDB_MODE", "offline")
        if mode == "offline":
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # it would send even then
        import wandb

        settings = wandb.Settings(silent=True, console="off", disable_git=True, save_code=False)
        self._run = wandb.init(
            project=target or "medflare",
            group=experiment,
            name=name,
            dir=None if folder is None else str(folder),
            mode=mode,
            settings=settings,
        )
        self._run.define_metric("*", step_metric="round")

    def log(self, site: str, values: Mapping[str, float], round: int) -> None:
        curves = {f"{site}/{tag}": value for tag, value in values.items()}
        self._run.log({"round": round, **curves})

    def end(self, settings: Json, completed: bool) -> None:
        self._run.config.update(settings)
        self._run.finish(exit_code=0 if completed else 1)


_WRITERS: JsonDict = {"tensorboard": _TensorBoard, "mlflow": _MLflow, "wandb": _Wandb}
