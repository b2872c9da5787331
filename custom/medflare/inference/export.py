"""A delivered model in other programs' formats: TorchScript, ONNX and a MONAI bundle, from prepared images to probabilities.

Nothing is handed out unchecked: what was written is loaded again and has to give the numbers of the delivered model on random
inputs and on pictures, for batches of several sizes.
"""

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn

from medflare.core.errors import ConfigError, DataError, ExportError, one_line
from medflare.core.packages import installed
from medflare.core.rng import torch_generator
from medflare.core.store import write_atomically, write_json
from medflare.data.sites.fitting import windows_of
from medflare.data.sources import PhantomSource
from medflare.data.transforms import Preprocessing
from medflare.inference.bundle import write_bundle
from medflare.inference.deployed import CARD_FILE, Branching, Builder, StoredModel, build, sealed
from medflare.inference.inputs import find_inputs
from medflare.inference.predict import prepare
from medflare.tasks.config import TaskConfig

TOLERANCE = 1e-4  # of a probability: float32 arithmetic in another order differs by about 1e-6
_PICTURES = 6  # synthetic photographs for the check
_BATCHES = (1, 3, 5)  # a recorded computation must not be tied to the size of the batch it was recorded with
_REFUSED = {
    "tent": "it goes on learning while it predicts; use `medflare predict`, or export the model without Tent (role global)",
    "routed": "its weights are mixed anew for every image and its statistics are those of the batch; use `medflare predict`, "
    "or export one of its members (roles global and personal)",
}

Predictor = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Exported:
    """What was written, and the largest difference to the delivered model's probabilities by kind of input."""

    files: tuple[Path, ...]
    differences: Mapping[str, float]

    def render(self) -> str:
        """The files, one a line, and how far they are from the delivered model."""
        found = ", ".join(f"{value:.1e} on {inputs}" for inputs, value in self.differences.items())
        return "\n".join([*map(str, self.files), f"gives the numbers of the delivered model; largest difference {found}"])


def export(
    stored: StoredModel,
    format: str,
    out: Path,
    *,
    builder: Builder = build,
    images: Sequence[Path] = (),
    tolerance: float = TOLERANCE,
) -> Exported:
    """Write a delivered model in another format, with its card, once it is known to give the same numbers.

    Args:
        stored: from `load_model`.
        format: one of `FORMATS`.
        out: folder for the files; made where it does not exist.
        builder: `methods.catalogue.build_deployed`; the default refuses the kinds of methods.
        images: pictures or volumes for the check; without any, generated photographs stand in.
        tolerance: largest allowed difference of a probability.

    Raises:
        ConfigError: an unknown format, or one whose packages are not installed.
        DataError: an image for the check that cannot be read.
        ExportError: a model that cannot be exported, with the reason and what to do instead, or one that came out different.
    """
    if format not in FORMATS:
        raise ConfigError(f"no export format {format!r}; known are {', '.join(FORMATS)}")
    for kind in (stored.kind, stored.message.facts.get("base")):
        if kind in _REFUSED:
            raise ExportError(f"a model of kind {kind!r} cannot be exported: {_REFUSED[kind]}")
    model = stored.build(builder).eval()
    checks = {"random input": random_batches(stored.task), **picture_batches(stored.task, images, out)}
    with TemporaryDirectory(prefix="medflare-export-") as folder, _quiet():
        differences: dict[str, float] = {}
        for exported in _WRITERS[format](stored, model, Path(folder)):
            for inputs, batches in checks.items():
                found = largest_difference(model, exported, batches)
                differences[inputs] = max(found, differences.get(inputs, 0.0))
        _refuse_different(differences, tolerance, format)
        write_json(Path(folder) / CARD_FILE, sealed({**stored.card, "export": {"format": format, "largest_difference": differences}}))
        return Exported(_handed_out(Path(folder), out), differences)


@torch.no_grad()
def largest_difference(model: Predictor, exported: Predictor, batches: Sequence[Tensor]) -> float:
    """max |p - p'| over all batches; infinite where shapes differ or one of them is not a number.

    Args:
        model: the delivered model, images to probabilities.
        exported: what was read back.
        batches: images (N, C, H, W), without NaN.
    """
    worst = 0.0
    for images in batches:
        expected, found = model(images), exported(images)
        if found.shape != expected.shape or not torch.isfinite(found).all():
            return float("inf")
        worst = max(worst, float((found - expected).abs().max()))
    return worst


def random_batches(task: TaskConfig) -> list[Tensor]:
    """Normally distributed images in batches of different sizes; the same every time."""
    generator = torch_generator(0, "export")
    return [torch.randn(size, task.image_channels, *task.size, generator=generator) for size in _BATCHES]


def picture_batches(task: TaskConfig, images: Sequence[Path], out: Path) -> dict[str, list[Tensor]]:
    """Images as the network is fed with them: the given ones (files, and folders that are searched), or generated photographs.

    Volumes and other channels than a photograph's have no generated ones: random input alone is compared.

    Args:
        task: how they are prepared.
        images: given files and folders; none for generated photographs.
        out: the output folder, which is not searched.

    Returns:
        What they are, in words -> batches (N, C, H, W), one for each input.

    Raises:
        DataError: a folder without images, or an image that cannot be read.
    """
    if images:
        inputs, problems = find_inputs(images, out, task.channel_names)
        if problems:
            raise DataError(problems[0])
        pictures = [prepare(source, task).images for source in inputs]
        if task.fit == "patch":
            pictures = [windows_of(image, task.size) for part in pictures for image in part]
        return {f"{len(inputs)} images": pictures}
    if task.spatial_dims == 3 or task.image_channels not in (1, 3):
        return {}
    source, preprocessing = PhantomSource("export", task), Preprocessing(task)
    photographs = [preprocessing.image(source.image(entry).array) for entry in source.entries()[:_PICTURES]]
    if task.fit == "patch":
        photographs = [window for photograph in photographs for window in windows_of(photograph, task.size)]
    return {f"{_PICTURES} synthetic photographs": [torch.stack(photographs)]}


def _refuse_different(differences: Mapping[str, float], tolerance: float, format: str) -> None:
    for inputs, value in differences.items():
        if not value <= tolerance:
            raise ExportError(
                f"the model as {format} differs from the delivered one by {value:.1e} on {inputs}, allowed is {tolerance:.0e}; "
                "nothing was written: use another format or `medflare predict`"
            )


def _handed_out(folder: Path, out: Path) -> tuple[Path, ...]:
    """The finished files, moved to where they were asked for."""
    files = []
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        files.append(out / file.relative_to(folder))
        try:
            write_atomically(files[-1], file.read_bytes())
        except OSError as error:
            raise ExportError(f"{files[-1]}: cannot be written ({error.strerror or error}); give --out another folder") from error
    return tuple(files)


# -- formats: each writes into a folder and gives back what it reads from there --------------------------------------------------


def _graph(model: nn.Module) -> nn.Module:
    """The model as one computation that is the same for all images."""
    return model.unbranched().eval() if isinstance(model, Branching) else model


def traced(model: nn.Module, task: TaskConfig) -> torch.jit.ScriptModule:
    """The computation recorded on two random images.

    Args:
        model: images (N, C, H, W) to probabilities.
        task: gives channels and size.

    Raises:
        ExportError: it cannot be recorded.
    """
    try:
        with torch.no_grad():
            return torch.jit.trace(_graph(model), torch.rand(2, task.image_channels, *task.size), check_trace=False)
    except Exception as error:  # a tracer meets whatever a network does in Python
        raise _unrecordable(error, "torchscript") from error


def _write_torchscript(stored: StoredModel, model: nn.Module, folder: Path) -> list[Predictor]:
    torch.jit.save(traced(model, stored.task), folder / "model.ts")
    return [torch.jit.load(folder / "model.ts", map_location="cpu")]


def _write_onnx(stored: StoredModel, model: nn.Module, folder: Path) -> list[Predictor]:
    missing = [package for package in ("onnx", "onnxruntime", "onnxscript") if not installed(package)]
    if missing:
        raise ConfigError(f"ONNX export needs {', '.join(missing)}; pip install 'medflare[export]'")
    import onnxruntime

    example, file = torch.rand(2, stored.task.image_channels, *stored.task.size), folder / "model.onnx"
    try:
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
    except Exception as error:
        raise _unrecordable(error, "onnx") from error
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    return [lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])]


def _write_monai(stored: StoredModel, model: nn.Module, folder: Path) -> list[Predictor]:
    return write_bundle(stored, model, traced(model, stored.task), folder)


_WRITERS: dict[str, Callable[[StoredModel, nn.Module, Path], list[Predictor]]] = {
    "torchscript": _write_torchscript,
    "onnx": _write_onnx,
    "monai": _write_monai,
}
FORMATS = tuple(_WRITERS)


def _unrecordable(error: Exception, format: str) -> ExportError:
    return ExportError(
        f"the model's computation cannot be recorded as {format} ({one_line(error)}); use another format or `medflare predict`"
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporters' remarks on their own future, on packages that are not needed and on what they are doing."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
