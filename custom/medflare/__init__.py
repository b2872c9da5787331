"""Personalized and generalizing federated learning for medical imaging, as NVIDIA FLARE applications.

`medflare.run_local` runs a federation in one process; the job folders, recipes and the `medflare` command run the same algorithms
under FLARE. `medflare.load_model` reads a final model, `medflare.predict` predicts images with it.
"""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from medflare.federation.local.loop import run_local

__version__ = "0.3.0"
__all__ = ["__version__", "load_model", "predict", "run_local"]


def load_model(folder: Path | str) -> Any:
    """Read a final model, a `medflare.inference.deployed.StoredModel` with its task and card; nothing is unpickled.

    Raises:
        StateError: a file is missing, damaged or was changed.
        ConfigError: the model's task cannot be used on this machine.
    """
    return import_module("medflare.inference.deployed").load_model(folder)


def predict(model: Any, inputs: Path | str | Sequence[Path | str], out: Path | str, **options: Any) -> Any:
    """Predict images with a final model: masks, or a table of probabilities, as `medflare predict` writes them.

    Args:
        model: its folder, or what `load_model` returns.
        inputs: files and folders of images, or one of them.
        out: folder for the masks and predictions.csv.
        options: adapt, device, strict, ... of `medflare.inference.predict.predict`.

    Returns:
        A `medflare.inference.predict.Summary`; its `render()` is the summary in lines, `failed` a line for each image without a prediction.
    """
    stored = load_model(model) if isinstance(model, str | Path) else model
    paths = [inputs] if isinstance(inputs, str | Path) else inputs
    options = {"builder": import_module("medflare.methods.catalogue").build_deployed, **options}
    return import_module("medflare.inference.predict").predict(stored, [Path(path) for path in paths], Path(out), **options)


def __getattr__(name: str) -> Any:
    """`run_local` on first use: importing the package must stay cheap, FLARE does it in every process of every site."""
    if name == "run_local":
        from medflare.federation.local.loop import run_local

        return run_local
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """What there is, `run_local` too before its first use."""
    return sorted({*globals(), *__all__})
