"""A delivered model as a MONAI bundle (configs, metadata, weights), for MONAI's own tools.

The weights come twice: as a state dict for the network that `network_def` builds with medflare, and as TorchScript, which
needs MONAI and torch alone. A bundle's configuration is code to MONAI ("$..." is evaluated, "_target_" is called), so nothing
from a model's card enters it that could be read as such.
"""

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from medflare.core.errors import ExportError
from medflare.core.packages import installed_versions
from medflare.data.reading import GREY, LUMA, PICTURES
from medflare.data.sites.fitting import OVERLAP
from medflare.inference.deployed import StoredModel
from medflare.networks.features import FeatureNetwork
from medflare.tasks.config import TaskConfig

_META_SCHEMA = "https://github.com/Project-MONAI/MONAI-extra-test-data/releases/download/0.8.1/meta_schema_20240725.json"
_CODE = ("$", "@", "%")  # MONAI evaluates texts that begin so
_UPRIGHT = (  # as data.reading, but for 16 bits: what a camera says of its position, transparency, palettes
    "$lambda image: (lambda image: image.convert('L') if image.mode == 'LA' else image.convert('RGB') "
    f"if image.mode.split(';')[0] not in {GREY!r} else image)(ImageOps.exif_transpose(image))"
)
_LUMA = f"torch.tensor({list(LUMA)}).reshape(3, 1, 1)"


def write_bundle(stored: StoredModel, model: nn.Module, script: torch.jit.ScriptModule, folder: Path) -> list[Callable[[Tensor], Tensor]]:
    """Write the bundle and load it back, both ways.

    Args:
        stored: the delivered model as read from its folder, with its card.
        model: the delivered model, images to probabilities.
        script: the same as TorchScript.
        folder: empty; becomes the bundle's root.

    Returns:
        Both ways as images (N, C, H, W) -> probabilities: the configured network, and the TorchScript one.

    Raises:
        ExportError: a text of the card that MONAI would run as code, or a module that no configuration can describe.
    """
    from monai import bundle
    from monai.data.torchscript_utils import save_net_with_metadata

    for part in ("configs", "models", "docs"):
        (folder / part).mkdir()
    described = metadata(stored)
    _write_config(folder / "configs" / "metadata.json", described)
    _write_config(folder / "configs" / "inference.json", inference_config(stored.task, definition(model)))
    (folder / "docs" / "README.md").write_text(_readme(stored))
    torch.save(model.state_dict(), folder / "models" / "model.pt")
    save_net_with_metadata(script, str(folder / "models" / "model.ts"), meta_values=described)

    place = {"name": folder.name, "bundle_dir": folder.parent, "device": "cpu"}
    network = bundle.load(**place, workflow_type="inference")
    recorded, _, _ = bundle.load(**place, load_ts_module=True)
    return [network.eval(), recorded]


def definition(value: Any) -> Any:
    """What MONAI's `network_def` needs to build an object anew: modules by their constructor's arguments, which they keep as
    attributes of the same names; networks and tasks by the functions that made them.

    Raises:
        ExportError: an object that does not say how it was made, or a text that MONAI would run as code.
    """
    if isinstance(value, TaskConfig):
        return {"_target_": "medflare.tasks.config.load_task", "source": as_data(value.to_dict())}
    if isinstance(value, FeatureNetwork) and value.settings:
        return {"_target_": "medflare.networks.catalogue.build_network", **as_data(value.settings)}
    if isinstance(value, list | nn.ModuleList):
        return [definition(item) for item in value]
    if not isinstance(value, nn.Module):
        return as_data(value)
    cls = type(value)
    names = list(inspect.signature(cls).parameters)
    if cls.__module__.split(".")[0] != "medflare" or not all(hasattr(value, name) for name in names):
        raise ExportError(f"{cls.__name__} does not say how it was made, so no bundle can build it; export torchscript or onnx")
    return {"_target_": f"{cls.__module__}.{cls.__qualname__}", **{name: definition(getattr(value, name)) for name in names}}


def as_data(value: Any) -> Any:
    """The value as data that MONAI reads and never runs.

    Raises:
        ExportError: it is not JSON, or MONAI would run a part of it as code.
    """
    if isinstance(value, dict):
        for name in value:
            if str(name).startswith("_"):
                raise ExportError(f"{name!r} in the model's card is a command in a MONAI bundle; rename it, or export torchscript or onnx")
        return {name: as_data(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_data(item) for item in value]
    if isinstance(value, str) and value.startswith(_CODE):
        raise ExportError(f"{value[:40]!r} in the model's card would be run by MONAI; rename it, or export torchscript or onnx")
    if not isinstance(value, str | int | float | None):
        raise ExportError(f"{type(value).__name__} cannot be written into a MONAI bundle; export torchscript or onnx")
    return value


# -- configs/inference.json --------------------------------------------------------------------------------------------------------


def inference_config(task: TaskConfig, network: Any) -> dict[str, Any]:
    """A workflow over a folder of pictures, or of NIfTI volumes where the task has them.

    Raises:
        ExportError: a task that picks volumes of a file.
    """
    if task.pick:
        raise ExportError("a MONAI bundle reads all volumes of a file, this task picks some; export torchscript or onnx")
    volumes = task.spatial_dims == 3
    found = f"$[{{'image': str(p)}} for p in sorted(pathlib.Path(@dataset_dir).iterdir()) if p.suffix.lower() in {PICTURES!r}]"
    weights = "torch.load(@bundle_root + '/models/model.pt', map_location=@device, weights_only=True)"
    output = "@inferer(item['image'][None].to(@device), @network)[0].detach().cpu()"
    saving = _volume_masks(task) if volumes else _segmentation(task) if task.kind == "segmentation" else _classification()
    return {
        "imports": ["$import pathlib", "$import torch", "$import monai", "$import nibabel" if volumes else "$from PIL import ImageOps"],
        "bundle_root": ".",
        "device": "$torch.device('cuda' if torch.cuda.is_available() else 'cpu')",
        "dataset_dir": "$@bundle_root + '/images'",
        "output_dir": "$@bundle_root + '/eval'",
        "datalist": _volume_list(task) if volumes else found,
        "network_def": network,
        "network": "$@network_def.to(@device).eval()",
        "checkpoint": f"$@network.load_state_dict({weights})",
        "preprocessing": {"_target_": "Compose", "transforms": _volume_preprocessing(task) if volumes else _preprocessing(task)},
        "dataset": {"_target_": "Dataset", "data": "@datalist", "transform": "@preprocessing"},
        "inferer": sliding_window(task) if task.fit == "patch" else _resized(task) if volumes else {"_target_": "SimpleInferer"},
        **saving,
        "run": [
            "$@checkpoint",
            f"$[@postprocessing({{**item, 'pred': monai.data.MetaTensor({output}, meta=item['image'].meta)}}) for item in @dataset]",
            *(["$@saver.finalize()"] if "saver" in saving else []),
        ],
    }


def _preprocessing(task: TaskConfig) -> list[Any]:
    """What `readers.read_image` and `Preprocessing` do to a picture, in MONAI's words."""
    height, width = task.size
    grey = f"image[:1] if len(image) < 3 else (image[:3] * {_LUMA}).sum(dim=0, keepdim=True)"
    colour = "image[:3] if len(image) >= 3 else image[:1].repeat(3, 1, 1)"
    chosen = {1: grey, 3: colour}.get(task.image_channels, "image")
    mode = f"'area' if image.shape[1] >= {height} and image.shape[2] >= {width} else 'bilinear'"
    resize = f"image if image.shape[1:] == ({height}, {width}) else monai.transforms.Resize(({height}, {width}), mode={mode})(image)"
    intensity, reader = as_data(task.intensity), {"_target_": "PILReader", "converter": _UPRIGHT}
    return [
        {"_target_": "LoadImaged", "keys": "image", "reader": reader, "ensure_channel_first": True},
        {"_target_": "Transposed", "keys": "image", "indices": [0, 2, 1]},  # MONAI reads pictures column by column
        {"_target_": "CastToTyped", "keys": "image", "dtype": "$torch.float32"},
        "$lambda item: {**item, 'size': tuple(item['image'].shape[1:])}",
        {"_target_": "Lambdad", "keys": "image", "func": f"$lambda image: {chosen}"},
        {"_target_": f"{intensity['name']}d", "keys": "image", **{key: item for key, item in intensity.items() if key != "name"}},
        *([{"_target_": "Lambdad", "keys": "image", "func": f"$lambda image: {resize}"}] if task.fit == "resize" else []),
    ]


# -- volumes -----------------------------------------------------------------------------------------------------------------------


def sliding_window(task: TaskConfig) -> dict[str, Any]:
    """MONAI's inferer as `data.sites.fitting.windowed` uses it.

    Args:
        task: gives the window's size.
    """
    return {"_target_": "SlidingWindowInferer", "roi_size": list(task.size), "sw_batch_size": 4, "overlap": OVERLAP, "mode": "gaussian"}


def _resized(task: TaskConfig) -> str:
    """To the network's size as `Preprocessing` and back as `masks.restored`; in MONAI's transforms the way back would be another one."""
    resize = "torch.nn.functional.interpolate"
    there = f"'area' if all(side >= new for side, new in zip(images.shape[2:], {task.size})) else 'trilinear'"
    back = f"'area' if all(side <= new for side, new in zip(images.shape[2:], {task.size})) else 'trilinear'"
    return f"$lambda images, network: {resize}(network({resize}(images, {task.size}, mode={there})), images.shape[2:], mode={back})"


def _volume_list(task: TaskConfig) -> str:
    """NIfTI files; with named channels, NAME_CHANNEL.nii.gz of all channels together."""
    if not task.channel_names:
        return "$[{'image': str(p)} for p in sorted(pathlib.Path(@dataset_dir).glob('*.nii*'))]"
    first, names = task.channel_names[0], list(task.channel_names)
    files = f"[str(p)[:-len(end)] + '_' + name + ending for name in {names!r}]"
    found = f"sorted(pathlib.Path(@dataset_dir).glob('*_{first}' + ending))"
    ends = f"[(p, '_{first}' + ending, ending) for ending in ('.nii', '.nii.gz') for p in {found}]"
    return f"$[{{'image': {files}}} for p, end, ending in {ends}]"


def _volume_preprocessing(task: TaskConfig) -> list[Any]:
    intensity = as_data(task.intensity)
    steps: list[Any] = [
        {"_target_": "LoadImaged", "keys": "image", "reader": "NibabelReader", "ensure_channel_first": True},
        {"_target_": "Orientationd", "keys": "image", "axcodes": task.orientation, "labels": [["L", "R"], ["P", "A"], ["I", "S"]]},
    ]
    if task.spacing is not None:
        steps.append({"_target_": "Spacingd", "keys": "image", "pixdim": list(task.spacing), "mode": "bilinear", "padding_mode": "border"})
    settings = {key: item for key, item in intensity.items() if key != "name"}
    return [*steps, {"_target_": f"{intensity['name']}d", "keys": "image", **settings}]


def _volume_masks(task: TaskConfig) -> dict[str, Any]:
    """NIfTI masks on the grid of the file, in its unit of length: class numbers, or one channel per structure (multilabel)."""
    label = "p.argmax(dim=0, keepdim=True)" if task.target == "multiclass" else "(p > 0.5)"
    # nibabel and not SaveImaged, which refuses a volume whose axes are not those of its affine in turn
    name = "pathlib.Path(item['image'].meta['filename_or_obj']).name.split('.nii')[0] + '_seg.nii.gz'"
    meta = "item['image'].meta"
    affine = f"torch.as_tensor({meta}['original_affine']).double().numpy()"
    mask = "item['pred'].as_tensor().movedim(0, -1).numpy().astype('uint8')"
    image = f"nibabel.Nifti1Image({mask}[..., 0] if len(item['pred']) == 1 else {mask}, {affine})"
    in_units = f"(lambda image: (image.header.__setitem__('xyzt_units', int({meta}['xyzt_units'])), image)[1])({image})"
    steps = [
        {"_target_": "Invertd", "keys": "pred", "transform": "@preprocessing", "orig_keys": "image", "nearest_interp": False},
        {"_target_": "Lambdad", "keys": "pred", "func": f"$lambda p: {label}"},
        f"$lambda item: (pathlib.Path(@output_dir).mkdir(exist_ok=True), nibabel.save({in_units}, pathlib.Path(@output_dir) / ({name})))",
    ]
    return {"postprocessing": {"_target_": "Compose", "transforms": steps}}


def _segmentation(task: TaskConfig) -> dict[str, Any]:
    """Masks of the picture's size: class numbers as PNG, or one channel per structure as NIfTI (multilabel)."""
    height, width = task.size
    mode = f"{{'mode': 'area'}} if size[0] <= {height} and size[1] <= {width} else {{'mode': 'bilinear', 'align_corners': False}}"
    restored = f"(lambda size: torch.nn.functional.interpolate(item['pred'][None], size, **({mode}))[0])(item['size'])"
    label = "p.argmax(dim=0, keepdim=True)" if task.target == "multiclass" else "(p > 0.5)"
    saver = {
        "_target_": "SaveImaged",
        "keys": "pred",
        "output_dir": "@output_dir",
        "output_postfix": "seg",
        "output_ext": ".nii.gz" if task.target == "multilabel" else ".png",
        "output_dtype": "$torch.uint8",
        "separate_folder": False,
        "resample": False,
        "print_log": False,
    }
    steps = [
        f"$lambda item: {{**item, 'pred': {restored}}}",
        {"_target_": "Lambdad", "keys": "pred", "func": f"$lambda p: {label}.to(torch.uint8)"},
        {"_target_": "Transposed", "keys": "pred", "indices": [0, 2, 1]},
        saver,
    ]
    return {"postprocessing": {"_target_": "Compose", "transforms": steps}}


def _classification() -> dict[str, Any]:
    """predictions.csv: file, then one probability per class in the order of the metadata."""
    return {
        "saver": {"_target_": "CSVSaver", "output_dir": "@output_dir", "filename": "predictions.csv", "overwrite": True},
        "postprocessing": {"_target_": "Compose", "transforms": ["$lambda item: @saver.save(item['pred'], item['pred'].meta)"]},
    }


# -- configs/metadata.json and docs ------------------------------------------------------------------------------------------------


def metadata(stored: StoredModel) -> dict[str, Any]:
    """What MONAI's metadata schema asks for, as far as the card knows it."""
    task, card, versions = stored.task, stored.card, installed_versions()
    classes = {str(number): name for number, name in enumerate(task.labels if task.target != "binary" else task.classes)}
    image = {
        "type": "image",
        "format": "magnitude",
        "modality": "n/a",
        "num_channels": task.image_channels,
        "spatial_shape": list(task.size),
        "dtype": "float32",
        "value_range": [],
        "is_patch_data": task.fit == "patch",
        "channel_def": as_data(_channel_words(task)),
    }
    output = {
        "type": "image" if task.kind == "segmentation" else "probabilities",
        "format": "segmentation" if task.kind == "segmentation" else "classes",
        "num_channels": task.outputs,
        "spatial_shape": list(task.size) if task.kind == "segmentation" else [],
        "dtype": "float32",
        "value_range": [0, 1],
        "is_patch_data": task.fit == "patch",
        "channel_def": {"0": task.labels[0]} if task.target == "binary" else classes,
    }
    return {
        "schema": _META_SCHEMA,
        "version": "1.0.0",
        "changelog": {"1.0.0": "exported by medflare"},
        "monai_version": versions["monai"],
        "pytorch_version": versions["torch"],
        "numpy_version": versions["numpy"],
        "required_packages_version": {"medflare": versions.get("medflare", "")},  # absent where the code is not installed
        "name": as_data(f"medflare {task.name}"),
        "task": f"{task.target} {task.kind}",
        "description": as_data(f"Model of kind {stored.kind}, trained by {card.get('method', 'an unnamed method')} on task {task.name}"),
        "authors": "the federation that trained it",
        "copyright": "see the data's licence",
        "data_source": as_data(task.source),
        "label_classes": as_data(classes),
        "eval_metrics": as_data(card.get("metrics", {})),
        "intended_use": "research; not a medical device",
        "network_data_format": {"inputs": {"image": image}, "outputs": {"pred": as_data(output)}},
    }


def _channel_words(task: TaskConfig) -> dict[str, str]:
    colours = {1: ("grey",), 3: ("red", "green", "blue")}.get(task.image_channels) if task.spatial_dims == 2 else None
    names = task.channel_names or colours or [f"channel {number}" for number in range(task.image_channels)]
    return {str(number): name for number, name in enumerate(names)}


def _readme(stored: StoredModel) -> str:
    first = f", a file NAME_{stored.task.channel_names[0]}.nii.gz for every channel" if stored.task.channel_names else ""
    inputs = "2-D pictures" if stored.task.spatial_dims == 2 else f"NIfTI volumes{first}"
    return f"""# medflare {stored.task.name}

A delivered model ({stored.kind}) as a MONAI bundle; `card.json` says where it comes from. A folder of {inputs} is predicted
from the bundle's root by

    from monai import bundle
    bundle.run(config_file="configs/inference.json", dataset_dir="IMAGES", output_dir="OUT")

Where medflare is not installed, the TorchScript file takes the place of network and weights:

    without = {{"network_def": "$torch.jit.load('models/model.ts')", "checkpoint": "$None"}}
    bundle.run(config_file="configs/inference.json", dataset_dir="IMAGES", output_dir="OUT", **without)

The network gives probabilities. Other formats, label values and adaptation to a site: `medflare predict`.
"""


def _write_config(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
