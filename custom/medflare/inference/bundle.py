"""A final model as a MONAI bundle: configs, metadata and weights.

The fixed parts of the configs are in bundle.json.

The weights are written as a state dict for the network that `network_def` builds with medflare, and
as TorchScript, which needs only MONAI and torch. MONAI runs parts of a configuration as code
("$..." is evaluated, "_target_" is called): no such text of the card enters it.
"""

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import nn

from medflare.core.errors import ExportError
from medflare.core.files import write_json
from medflare.core.packages import installed_versions
from medflare.core.text import JsonDict, read_json
from medflare.data.reading import PICTURES
from medflare.inference.deployed import StoredModel
from medflare.networks.features import FeatureNetwork
from medflare.tasks.config import TaskConfig
from medflare.training.patches import OVERLAP, Predictor

_TEMPLATE = read_json(Path(__file__).with_name("bundle.json"))
_CODE = ("$", "@", "%")  # MONAI evaluates texts that begin with one of these
_PREDICTED = (
    "monai.data.MetaTensor(@inferer(item['image'][None].to(@device), @network)[0].detach().cpu(), "
    "meta=item['image'].meta)"
)
_PICTURE_LIST = (
    "$[{'image': str(p)} for p in sorted(pathlib.Path(@dataset_dir).iterdir()) "
    f"if p.suffix.lower() in {PICTURES}]"
)


def write_bundle(
    stored: StoredModel, model: nn.Module, script: torch.jit.ScriptModule, folder: Path
) -> Predictor:
    """Write the bundle to an empty folder, and load its network.

    Returns:
        The network: images (N, C, H, W) -> probabilities.

    Raises:
        ExportError: see `definition`.
    """
    from monai import bundle
    from monai.data.torchscript_utils import save_net_with_metadata

    for part in ("configs", "models", "docs"):
        (folder / part).mkdir()
    described = metadata(stored)
    write_json(folder / "configs" / "metadata.json", described, public=True)
    config = inference_config(stored.task, definition(model))
    write_json(folder / "configs" / "inference.json", config, public=True)
    (folder / "docs" / "README.md").write_text(_readme(stored))
    torch.save(model.state_dict(), folder / "models" / "model.pt")
    save_net_with_metadata(script, str(folder / "models" / "model.ts"), meta_values=described)

    network = bundle.load(
        name=folder.name, bundle_dir=folder.parent, device="cpu", workflow_type="inference"
    )
    return network.eval()


def definition(value: Any) -> Any:
    """MONAI's `network_def`: networks and tasks by their function, other modules by their class.

    The arguments of a class's constructor are attributes of the module.

    Raises:
        ExportError: a module lacks such attributes, or MONAI would run a text of the card as code.
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
    is_ours = cls.__module__.split(".")[0] == "medflare"
    if not is_ours or not all(hasattr(value, name) for name in names):
        raise ExportError(
            f"{cls.__name__} cannot be described in a MONAI bundle; export torchscript or onnx"
        )
    arguments = {name: definition(getattr(value, name)) for name in names}
    return {"_target_": f"{cls.__module__}.{cls.__qualname__}", **arguments}


def as_data(value: Any) -> Any:
    """The value as JSON data.

    Raises:
        ExportError: it is not JSON, or MONAI would run a part of it as code.
    """
    if isinstance(value, dict):
        for name in value:
            if str(name).startswith("_"):
                raise ExportError(
                    f"{name!r} in the model's card is a command in a MONAI bundle; "
                    "rename it, or export torchscript or onnx"
                )
        return {name: as_data(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_data(item) for item in value]
    if isinstance(value, str) and value.startswith(_CODE):
        raise ExportError(
            f"{value[:40]!r} in the model's card would be run by MONAI; "
            "rename it, or export torchscript or onnx"
        )
    if not isinstance(value, str | int | float | None):
        raise ExportError(
            f"{type(value).__name__} cannot be written into a MONAI bundle; "
            "export torchscript or onnx"
        )
    return value


def inference_config(task: TaskConfig, network: Any) -> JsonDict:
    """A workflow over a folder of pictures or NIfTI volumes.

    Raises:
        ExportError: the task has `pick`.
    """
    if task.pick:
        raise ExportError(
            "a MONAI bundle cannot pick volumes of a file; export torchscript or onnx"
        )
    if task.spatial_dims == 3:
        datalist = _volume_list(task.channel_names)
        steps = _read_volumes(task)
    else:
        datalist = _PICTURE_LIST
        steps = _read_pictures(task)
    intensity = as_data(task.intensity)
    steps.append({"_target_": f"{intensity.pop('name')}d", "keys": "image", **intensity})
    inferer = _resizing(task)
    if task.image_mode == "patch":
        inferer = _TEMPLATE["window"] | {"roi_size": list(task.size), "overlap": OVERLAP}
    content = _TEMPLATE["inference"] | {
        "datalist": datalist,
        "network_def": network,
        "preprocessing": {"_target_": "Compose", "transforms": steps},
        "inferer": inferer,
    }
    if task.kind == "classification":
        # predictions.csv: file, then the probabilities in the order of the metadata.
        saving = f"$[@saver.save({_PREDICTED}, item['image'].meta) for item in @dataset]"
        content["saver"] = _TEMPLATE["table"]
        content["run"] = ["$@checkpoint", saving, "$@saver.finalize()"]
    else:
        run = f"$[@postprocessing({{**item, 'pred': {_PREDICTED}}}) for item in @dataset]"
        content["postprocessing"] = {"_target_": "Compose", "transforms": _write_masks(task)}
        content["run"] = ["$@checkpoint", run]
    return content


def _write_masks(task: TaskConfig) -> list[Any]:
    """The steps that write probabilities as a file with a mask."""
    # MONAI includes the threshold, which is the float32 after 0.5: medflare does not.
    discrete = _TEMPLATE["argmax" if task.target == "multiclass" else "threshold"]
    save = _TEMPLATE["save"]
    if task.spatial_dims == 3:
        return [_TEMPLATE["invert"], discrete, {**save, "output_ext": ".nii.gz", "resample": True}]
    # MONAI writes pictures by columns.
    ending = ".nii.gz" if task.target == "multilabel" else ".png"
    return [discrete, _TEMPLATE["transpose"], {**save, "output_ext": ending}]


def _resizing(task: TaskConfig) -> str:
    """An inferer that resizes images and masks as `transforms.resized` does."""
    resize = "torch.nn.functional.interpolate"
    linear = "bilinear" if task.spatial_dims == 2 else "trilinear"
    sides = f"for side, new in zip(images.shape[2:], {task.size})"
    there = f"'area' if all(side >= new {sides}) else '{linear}'"
    output = f"network({resize}(images, {task.size}, mode={there}))"
    if task.kind == "classification":
        return f"$lambda images, network: {output}"
    back = f"'area' if all(side <= new {sides}) else '{linear}'"
    return f"$lambda images, network: {resize}({output}, images.shape[2:], mode={back})"


def _read_pictures(task: TaskConfig) -> list[Any]:
    """The steps that read pictures as `data.reading` does; Pillow rounds gray values."""
    mode = {1: "L", 3: "RGB"}.get(task.image_channels)
    upright = "$lambda image: ImageOps.exif_transpose(image)"
    if mode:  # 16 bits and floats are unchanged
        upright += f".convert({mode!r}) if image.mode[0] not in 'IF' else image"
    step = _TEMPLATE["picture"]
    return [step | {"reader": step["reader"] | {"converter": upright}}]


def _volume_list(channels: tuple[str, ...]) -> str:
    """The list of NIfTI files; with named channels, each item is NAME_CHANNEL.nii.gz of all
    channels.
    """
    if not channels:
        return "$[{'image': str(p)} for p in sorted(pathlib.Path(@dataset_dir).glob('*.nii*'))]"
    first = f"_{channels[0]}.nii"
    renamed = f"p.with_name(p.name.replace({first!r}, '_' + name + '.nii'))"
    files = f"[str({renamed}) for name in {list(channels)!r}]"
    paths = f"pathlib.Path(@dataset_dir).glob({f'*{first}*'!r})"
    return f"$[{{'image': {files}}} for p in sorted({paths})]"


def _read_volumes(task: TaskConfig) -> list[Any]:
    steps = [_TEMPLATE["volume"], _TEMPLATE["orient"] | {"axcodes": task.orientation}]
    if task.spacing is not None:
        steps.append(_TEMPLATE["space"] | {"pixdim": list(task.spacing)})
    return steps


def metadata(stored: StoredModel) -> JsonDict:
    """configs/metadata.json by MONAI's schema."""
    task = stored.task
    versions = installed_versions()
    classes = {str(number): name for number, name in enumerate(task.classes)}
    channels = task.channel_names
    if not channels and task.spatial_dims == 2:
        channels = {1: ("grey",), 3: ("red", "green", "blue")}.get(task.image_channels, ())
    if not channels:
        channels = tuple(f"channel {number}" for number in range(task.image_channels))
    common = {"is_patch_data": task.image_mode == "patch", "spatial_shape": list(task.size)}
    image = _TEMPLATE["images"] | common
    image["num_channels"] = task.image_channels
    image["channel_def"] = as_data({str(number): name for number, name in enumerate(channels)})
    output = _TEMPLATE["masks"] | common
    output["num_channels"] = task.outputs
    output["channel_def"] = {"0": task.labels[0]} if task.target == "binary" else classes
    if task.kind == "classification":
        output |= _TEMPLATE["probabilities"]
    return _TEMPLATE["metadata"] | {
        "monai_version": versions["monai"],
        "pytorch_version": versions["torch"],
        "numpy_version": versions["numpy"],
        # medflare has no version if it is not installed.
        "required_packages_version": {"medflare": versions.get("medflare", "")},
        "name": as_data(f"medflare {task.name}"),
        "task": f"{task.target} {task.kind}",
        "description": as_data(
            f"Model of kind {stored.kind}, "
            f"trained by {stored.card.get('method', 'an unnamed method')} on task {task.name}"
        ),
        "data_source": as_data(task.source),
        "label_classes": as_data(classes),
        "eval_metrics": as_data(stored.card.get("metrics", {})),
        "network_data_format": {"inputs": {"image": image}, "outputs": {"pred": as_data(output)}},
    }


def _readme(stored: StoredModel) -> str:
    task = stored.task
    inputs = "NIfTI volumes"
    if task.spatial_dims == 2:
        inputs = "2-D pictures"
    elif task.channel_names:
        inputs += f", a file NAME_{task.channel_names[0]}.nii.gz for every channel"
    return f"""# medflare {task.name}

A delivered model ({stored.kind}) as a MONAI bundle; `card.json` has its origin. Predict a folder of {inputs} from the bundle's root:

    from monai import bundle
    bundle.run(config_file="configs/inference.json", dataset_dir="IMAGES", output_dir="OUT")

Without medflare, use the TorchScript file:

    without = {{"network_def": "$torch.jit.load('models/model.ts')", "checkpoint": "$None"}}
    bundle.run(config_file="configs/inference.json", dataset_dir="IMAGES", output_dir="OUT", **without)

The network returns probabilities. For other formats, label values and adaptation use `medflare predict`.
"""  # noqa: E501
