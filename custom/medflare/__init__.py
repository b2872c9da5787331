"""Personalized and generalizing federated learning for medical images, under NVIDIA FLARE.

`medflare.run_local` runs a federation in one process; the job folders, recipes and the `medflare`
command run the same algorithms under FLARE. `medflare.load_model` reads a final model,
`medflare.predict` predicts images with it.
"""

import os
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from medflare.federation.local.loop import run_local

__version__ = "0.3.0"
__all__ = ["__version__", "load_model", "predict", "run_local"]


def load_model(folder: Path | str) -> Any:
    """Read a final model; nothing is unpickled.

    It is a `medflare.inference.deployed.StoredModel` with its task and card.

    Raises:
        StateError: a file is missing, damaged or was changed.
        ConfigError: the model's task cannot be used on this machine.
    """
    return import_module("medflare.inference.deployed").load_model(folder)


def predict(
    model: Any, inputs: Path | str | Sequence[Path | str], out: Path | str, **options: Any
) -> Any:
    """Predict images with a final model, as `medflare predict` does.

    It writes masks, or a table of probabilities.

    Args:
        model: its folder, or what `load_model` returns.
        inputs: files and folders of images, or one of them.
        out: folder for the masks and predictions.csv.
        options: adapt, device, strict, ... of `medflare.inference.predict.predict`; `say`, called
            with a line for each image without a prediction, is print.

    Returns:
        A `medflare.inference.predict.PredictionSummary`, which shows itself in lines.
    """
    if isinstance(model, str | Path):
        model = load_model(model)
    if isinstance(inputs, str | Path):
        inputs = [inputs]
    paths = [Path(path) for path in inputs]
    builder = import_module("medflare.methods.catalogue").build_deployed
    options = {"builder": builder, "say": print, **options}
    return import_module("medflare.inference.predict").predict(model, paths, Path(out), **options)


def __getattr__(name: str) -> Any:
    """Import `run_local` on first use.

    Importing the package must stay cheap: FLARE does it in every process of every site.
    """
    if name == "run_local":
        from medflare.core.threads import limit_spinning

        limit_spinning(os.environ)
        from medflare.federation.local.loop import run_local

        return run_local
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """What there is, `run_local` too before its first use."""
    return sorted({*globals(), *__all__})
