"""Training with differential privacy: settings, supported tasks and networks.

Site algorithms opt in: their hyper-parameters inherit `PrivacyHyper`, and their training goes
through `FedAvgSite.descend`. The unit of privacy is a training patient with all images. A round is
in `rounds.py`, its mechanism in `dp_sgd.py`, which alone needs Opacus.
"""

from types import ModuleType
from typing import TypeGuard

from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from medflare.core.errors import ConfigError
from medflare.core.hyper import param
from medflare.core.packages import installed
from medflare.core.settings import strict_dataclass
from medflare.data.local import PLACE
from medflare.networks.catalogue import meta_network
from medflare.networks.features import WholeNetwork, zero_images
from medflare.privacy.ledger import training_patients
from medflare.tasks.config import TaskConfig
from medflare.tasks.losses import pools_images
from medflare.training.site import Site


@strict_dataclass
class PrivacyHyper:
    """Hyper-parameters of an algorithm that can train with DP-SGD."""

    dp_noise: float = param(
        0.0,
        "deviation of DP-SGD's noise in units of dp_clip; 0: none",
        symbol="σ",
        source="Abadi 2016, Alg. 1",
        low=0,
    )
    dp_clip: float = param(
        1.0,
        "largest norm of one patient's gradient",
        symbol="C",
        source="Abadi 2016, Alg. 1",
        low=1e-6,
    )
    dp_delta: float = param(
        1e-5,
        "δ that ε is given for",
        symbol="δ",
        source="Abadi 2016, Sec. 2.1",
        low=1e-12,
        high=0.1,
    )


def is_private(hyper: object) -> TypeGuard[PrivacyHyper]:
    """Whether DP-SGD is on."""
    return isinstance(hyper, PrivacyHyper) and hyper.dp_noise > 0


def check_private(task: TaskConfig) -> None:
    """Raises ConfigError if DP-SGD does not protect all of a task's training: a patient may only
    have effects by its own gradient.
    """
    for name, layer in meta_network(task).named_modules():
        averages = isinstance(layer, _InstanceNorm) and layer.track_running_stats
        if averages or isinstance(layer, _BatchNorm):
            raise ConfigError(
                f"dp_noise: layer {name} ({type(layer).__name__}) of network "
                f"{task.network['name']} mixes the images of a batch, so none has a gradient of "
                "its own; set task.network.norm=instance (unet), or take a network without it "
                "(small_cnn, vgg11)"
            )
    setting = ""
    if task.precision != "fp32":
        setting = f"precision {task.precision!r}"
    elif task.accumulate > 1:
        setting = "accumulate"
    if setting:
        raise ConfigError(
            "dp_noise: gradients are clipped in fp32, a step for every draw of patients; "
            f"leave out task {setting}"
        )
    if task.sampling.name != "shuffle":
        raise ConfigError(
            "dp_noise: DP-SGD draws every patient with the same probability; "
            "set task.sampling=shuffle"
        )
    reason = pools_images(task)
    if reason:
        raise ConfigError(
            f"dp_noise: loss {task.loss['name']} gives no image a gradient of its own: {reason}"
        )


def check_private_site(site: Site, hyper: PrivacyHyper) -> None:
    """Raises ConfigError if Opacus is missing or does not support the site's network, or if δ is
    too large for the site.
    """
    if site.computing.compiled:
        raise ConfigError(
            f"site {site.name}: dp_noise takes each image's gradient from a plain network; "
            f"leave compile out of {PLACE}"
        )
    dp_sgd = dp_sgd_module(site)
    network = site.network()
    if isinstance(network, WholeNetwork):  # medflare's own networks are tested
        images = zero_images(site.task, site.device)
        dp_sgd.check_gradients(network, images)
    patients = training_patients(site)
    if hyper.dp_delta * patients >= 1:
        raise ConfigError(
            f"site {site.name}: dp_delta = {hyper.dp_delta:g} is not below 1 / the number of "
            "training patients; choose it far smaller"
        )


def dp_sgd_module(site: Site) -> ModuleType:
    """`privacy.dp_sgd`; ConfigError if Opacus is not installed."""
    if not installed("opacus"):
        raise ConfigError(
            f"site {site.name}: dp_noise needs Opacus, which is not installed; "
            "pip install 'medflare[privacy]'"
        )
    from medflare.privacy import dp_sgd

    return dp_sgd
