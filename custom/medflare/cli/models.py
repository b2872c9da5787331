"""The commands around a delivered model, `medflare predict` and `medflare export`."""

import argparse
import sys
from pathlib import Path

from medflare.cli.options import Commands, add_command


def add_commands(commands: Commands) -> None:
    """Declare both."""
    _add_predict(commands)
    _add_export(commands)


# -- predict ---------------------------------------------------------------------------------------------------------------


def _add_predict(commands: Commands) -> None:
    parser = add_command(
        commands,
        "predict",
        _predict,
        help="predict images with a delivered model: masks, or a table of probabilities",
        description="Writes masks in the images' own geometry (PNG; NIfTI for volumes) and predictions.csv with a row for every picture.",
        examples=(
            "medflare predict MODEL images/ --out masks",
            "medflare predict MODEL images/ --strict --out masks",
            "medflare predict MODEL scans/*.nii.gz --adapt none --device cuda --out masks",
        ),
    )
    parser.add_argument("model", type=Path, help="folder with model.safetensors and card.json")
    parser.add_argument("images", type=Path, nargs="+", help="PNG, JPEG, TIFF, NIfTI or DICOM files, or folders of them")
    parser.add_argument("--out", type=Path, required=True, help="folder for masks and predictions.csv")
    parser.add_argument(
        "--adapt",
        choices=("auto", "none", "tent", "dsbn"),
        default="auto",
        help="test-time adaptation to these images; auto: as the model's method means it; none: as it was delivered (default: auto)",
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, ... (default: %(default)s)")
    for unit, default in (("pixels", "8192 x 8192"), ("voxels", "512 x 512 x 1024")):
        help = f"the most {unit} of an image, which are counted before it is unpacked (default: {default})"
        parser.add_argument(f"--max-{unit}", type=int, metavar="N", help=help)
    _add_unsealed(parser)
    parser.add_argument("--strict", action="store_true", help="images outside what the model was trained on fail and are not predicted")
    parser.add_argument("--dicom-seg", action="store_true", help="masks of DICOM series as DICOM segmentations; needs highdicom")


def _add_unsealed(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--unsealed", action="store_true", help="take a model whose card has no seal, as of medflare before 0.3")


def _predict(options: argparse.Namespace) -> int:
    from medflare.core.settings import checked
    from medflare.data.reading import ImageBounds
    from medflare.inference.deployed import load_model
    from medflare.inference.predict import predict
    from medflare.methods.catalogue import build_deployed

    given = {"pixels": options.max_pixels, "voxels": options.max_voxels}
    bounds = checked(ImageBounds, {unit: most for unit, most in given.items() if most is not None}, "--max-pixels, --max-voxels")
    stored = load_model(options.model, unsealed=options.unsealed, bounds=bounds)
    summary = predict(
        stored,
        options.images,
        options.out,
        builder=build_deployed,
        adapt=options.adapt,
        device=options.device,
        seg=options.dicom_seg,
        bounds=bounds,
        strict=options.strict,
        say=lambda line: print(f"medflare: {line}", file=sys.stderr),
    )
    print(summary.render())
    return 1 if summary.failed else 0


# -- export ----------------------------------------------------------------------------------------------------------------


def _add_export(commands: Commands) -> None:
    parser = add_command(
        commands,
        "export",
        _export,
        help="a delivered model as TorchScript, ONNX or a MONAI bundle, checked to give the same numbers",
        description="Writes a model that maps prepared images to probabilities, once it is known to give the delivered model's numbers.",
        examples=(
            "medflare export MODEL --format onnx --out exported",
            "medflare export MODEL --format monai --out bundle",
        ),
    )
    parser.add_argument("model", type=Path, help="folder with model.safetensors and card.json")
    formats = ("torchscript", "onnx", "monai")
    parser.add_argument("--format", choices=formats, required=True, help="onnx needs: pip install 'medflare[export]'")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    _add_unsealed(parser)


def _export(options: argparse.Namespace) -> int:
    from medflare.inference.deployed import load_model
    from medflare.inference.export import export
    from medflare.methods.catalogue import build_deployed

    stored = load_model(options.model, unsealed=options.unsealed)
    print(export(stored, options.format, options.out, builder=build_deployed).render())
    return 0
