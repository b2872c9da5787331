"""Export of a final model as TorchScript, ONNX or a MONAI bundle.

The exported model maps prepared images to probabilities. It is loaded again and compared with the
final model, on a batch of another size than that of the recording.
"""

import logging
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from medflare.adaptation.registry import ADAPTATIONS
from medflare.core.errors import ConfigError, ExportError, one_line
from medflare.core.files import write_json
from medflare.core.packages import installed
from medflare.core.rng import torch_generator
from medflare.inference.bundle import write_bundle
from medflare.inference.deployed import (
    CARD_FILE,
    Branching,
    Builder,
    StoredModel,
    build,
    with_checksum,
)
from medflare.tasks.config import TaskConfig
from medflare.training.patches import Predictor

TOLERANCE = 1e-4  # of a probability: float32 arithmetic in another order differs by about 1e-6
_ONLINE = (
    "it adapts while it predicts; use `medflare predict`, or export the model without it "
    "(role global)"
)
_REFUSED = {
    **dict.fromkeys(("tent", "sar", "memo", "ttt"), _ONLINE),
    "routed": "its weights depend on the image and its statistics on the batch; "
    "use `medflare predict`, or export role global or personal",
}


@dataclass(frozen=True)
class Exported:
    """The files, and the largest difference from the final model's probabilities."""

    files: tuple[Path, ...]
    difference: float
    note: str

    def render(self) -> str:
        """The files and the difference, one a line."""
        result = f"equal to the delivered model; largest difference {self.difference:.1e}"
        return "\n".join([*map(str, self.files), result, *filter(None, [self.note])])


def export(stored: StoredModel, format: str, out: Path, *, builder: Builder = build) -> Exported:
    """Write a final model in another format, with its card, to the folder `out`, if it gives the
    same numbers.

    Raises:
        ConfigError: an unknown format, or a missing package.
        ExportError: the model cannot be exported, or the exported model gives other numbers.
    """
    if format not in FORMATS:
        raise ConfigError(f"no export format {format!r}; known are {', '.join(FORMATS)}")
    for kind in (stored.kind, stored.message.meta.get("base")):
        if kind in _REFUSED:
            raise ExportError(f"a model of kind {kind!r} cannot be exported: {_REFUSED[kind]}")
        if kind in ADAPTATIONS.names():
            raise ExportError(
                f"a model of kind {kind!r} cannot be exported: {ADAPTATIONS.module(kind)} adapts "
                "it; use `medflare predict`, or export the model without it (role global)"
            )
    # TorchScript stores whether gradients are needed: outside medflare, outputs become arrays.
    model = stored.build(builder).eval().requires_grad_(False)
    with TemporaryDirectory(prefix="medflare-export-") as temporary, _quiet():
        folder = Path(temporary)
        difference = largest_difference(model, _WRITERS[format](stored, model, folder), stored.task)
        if not difference <= TOLERANCE:
            raise ExportError(
                f"{format} differs from the delivered model by {difference:.1e}; "
                "use another format or `medflare predict`"
            )
        about = {"format": format, "largest_difference": difference}
        write_json(folder / CARD_FILE, with_checksum({**stored.card, "export": about}))
        shutil.copytree(folder, out, dirs_exist_ok=True)
        written = sorted(path for path in folder.rglob("*") if path.is_file())
        files = tuple(out / file.relative_to(folder) for file in written)
        note = ""
        if getattr(model, "by_patient", False):
            note = "it chooses a network for each image; medflare predict chooses for each patient"
        return Exported(files, difference, note)


@torch.no_grad()
def largest_difference(model: Predictor, exported: Predictor, task: TaskConfig) -> float:
    """max |p - p'| on five normally distributed images; infinite if shapes differ or a result is
    not finite.
    """
    images = torch.randn(5, task.image_channels, *task.size, generator=torch_generator(0, "export"))
    expected = model(images)
    actual = exported(images)
    if actual.shape != expected.shape or not torch.isfinite(actual).all():
        return float("inf")
    return float((actual - expected).abs().max())


# -- formats: each writes into a folder and returns the model that it loads from there -------------


def _graph(model: nn.Module) -> nn.Module:
    """The model with the same computation for all images."""
    if isinstance(model, Branching):
        return model.unbranched().eval()
    return model


def _traced(model: nn.Module, task: TaskConfig) -> torch.jit.ScriptModule:
    example = torch.rand(2, task.image_channels, *task.size)
    with _recording("torchscript"), torch.no_grad():
        return torch.jit.trace(_graph(model), example, check_trace=False)


def _write_torchscript(stored: StoredModel, model: nn.Module, folder: Path) -> Any:
    torch.jit.save(_traced(model, stored.task), folder / "model.ts")
    return torch.jit.load(folder / "model.ts", map_location="cpu")


def _write_onnx(stored: StoredModel, model: nn.Module, folder: Path) -> Predictor:
    needed = ("onnx", "onnxruntime", "onnxscript")
    missing = [package for package in needed if not installed(package)]
    if missing:
        raise ConfigError(f"ONNX export needs {', '.join(missing)}; pip install 'medflare[export]'")
    import onnxruntime

    example = torch.rand(2, stored.task.image_channels, *stored.task.size)
    file = folder / "model.onnx"
    with _recording("onnx"):
        torch.onnx.export(
            _graph(model),
            (example,),
            file,
            input_names=["images"],
            output_names=["probabilities"],
            dynamic_shapes={"images": {0: torch.export.Dim("batch")}},
            dynamo=True,
            external_data=False,
            verbose=False,
        )
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


def _write_monai(stored: StoredModel, model: nn.Module, folder: Path) -> Predictor:
    return write_bundle(stored, model, _traced(model, stored.task), folder)


_WRITERS = {"torchscript": _write_torchscript, "onnx": _write_onnx, "monai": _write_monai}
FORMATS = tuple(_WRITERS)


@contextmanager
def _recording(format: str) -> Iterator[None]:
    """Within the context, whatever the network raises becomes an ExportError."""
    try:
        yield
    except Exception as error:
        raise ExportError(
            f"the model cannot be recorded as {format} ({one_line(error)}); "
            "use another format or `medflare predict`"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Within the context, exporters print no warnings and no progress."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
