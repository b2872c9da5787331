"""The commands around a delivered model, `medflare predict` and `medflare export`."""

import sys
from pathlib import Path
from typing import Literal

from medflare.cli.options import PathArgument, PathArguments
from medflare.core.text import escaped


def predict(
    model: PathArgument,
    images: PathArguments,
    out: Path,
    adapt: str = "auto",
    device: str = "cpu",
    max_pixels: int | None = None,
    max_voxels: int | None = None,
    unsigned: bool = False,
    strict: bool = False,
    force: bool = False,
    dicom_seg: bool = False,
) -> int:
    """Predict images with a delivered model: masks, or a table of probabilities.

    Writes masks in the images' own geometry (PNG; NIfTI for volumes) and predictions.csv with a row
    for every picture.

    Args:
        model: Folder with model.safetensors and card.json
        images: PNG, JPEG, TIFF, NIfTI or DICOM files, or folders of them
        out: Folder for masks and predictions.csv
        adapt (NAME): Test-time adaptation to these images: dsbn, tent, sar, memo, ttt, labelshift,
            routing, also with arguments (tent,rate=0.01); auto: that of the model's method; none:
            as delivered
        device: cpu, cuda, cuda:1, ...
        max_pixels: Maximum pixels of an image, checked before decoding (default: 8192 x 8192)
        max_voxels: Maximum voxels of a volume (default: 512 x 512 x 1024)
        unsigned: Accept a model whose card has no signature (medflare before 0.3)
        strict: Images outside the range of the training images fail
        force: Also predict grey volumes with a model of pictures in colour
        dicom_seg: Masks of DICOM series as DICOM segmentations; needs highdicom

    Examples:
        medflare predict MODEL images/ --out masks
        medflare predict MODEL images/ --strict --out masks
        medflare predict MODEL scans/*.nii.gz --adapt none --device cuda --out masks
    """
    from medflare.core.settings import checked
    from medflare.data.local import ImageBounds
    from medflare.inference.deployed import load_model
    from medflare.inference.predict import predict
    from medflare.methods.catalogue import build_deployed

    limits = {"pixels": max_pixels, "voxels": max_voxels}
    used = {unit: limit for unit, limit in limits.items() if limit is not None}
    bounds = checked(ImageBounds, used, "--max-pixels, --max-voxels")
    summary = predict(
        load_model(model, unsigned=unsigned, bounds=bounds),
        images,
        out,
        builder=build_deployed,
        adapt=adapt,
        device=device,
        seg=dicom_seg,
        bounds=bounds,
        strict=strict,
        force=force,
        say=lambda line: print(f"medflare: {escaped(line)}", file=sys.stderr),
    )
    print(escaped(summary.render()))
    return 1 if summary.failed else 0


def export(
    model: PathArgument,
    format: Literal["torchscript", "onnx", "monai"],
    out: Path,
    unsigned: bool = False,
) -> None:
    """Write a delivered model as TorchScript, ONNX or a MONAI bundle.

    The exported model maps prepared images to probabilities. It is written only if it gives the
    numbers of the delivered model.

    Args:
        model: Folder with model.safetensors and card.json
        format: onnx needs: pip install 'medflare[export]'
        out: Folder to write
        unsigned: Accept a model whose card has no signature (medflare before 0.3)

    Examples:
        medflare export MODEL --format onnx --out exported
        medflare export MODEL --format monai --out bundle
    """
    from medflare.inference.deployed import load_model
    from medflare.inference.export import export
    from medflare.methods.catalogue import build_deployed

    stored = load_model(model, unsigned=unsigned)
    print(escaped(export(stored, format, out, builder=build_deployed).render()))
