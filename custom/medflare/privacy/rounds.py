"""A round of training with differential privacy, and what it costs."""

import math
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import ConfigDict, Field
from torch import nn
from typing_extensions import TypedDict

from medflare.privacy.ledger import Account, Release, training_patients
from medflare.privacy.settings import PrivacyHyper, dp_sgd_module
from medflare.training.epochs import Loss
from medflare.training.site import Site


def train_privately(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    site: Site,
    account: Account,
    hyper: PrivacyHyper,
    loss: Loss | None,
) -> None:
    """A round of DP-SGD in place; arguments as of `dp_sgd.train_dp_sgd`. It is counted before its
    first step, in case of a crash.

    Raises:
        PrivacyError: it would exceed the site's budget.
    """
    dp_sgd = dp_sgd_module(site)
    release = planned(site, hyper)
    account.charge(release, dp_sgd.epsilon_of)
    dp_sgd.train_dp_sgd(model, optimizer, site, release, hyper.dp_clip, system_generator(), loss)


def planned(site: Site, hyper: PrivacyHyper) -> Release:
    """The release of one round: the steps of an epoch draw every patient at least once
    on average."""
    patients = training_patients(site)
    rate = min(1.0, site.batch_size / patients)
    steps = site.task.local_epochs * math.ceil(patients / site.batch_size)
    return Release(hyper.dp_noise, rate, steps)


def system_generator() -> np.random.Generator:
    """A generator from 128 bits of the operating system: the server knows the run's seed, and could
    subtract the noise.
    """
    return np.random.default_rng()


def privacy_cost(site: Site, account: Account, hyper: PrivacyHyper) -> dict[str, Any] | None:
    """{"epsilon", "delta", "steps"} of this run so far, None before the first release; "epsilon" is
    None if infinite.
    """
    releases = account.ledger.releases()
    if not releases:
        return None
    epsilon = dp_sgd_module(site).epsilon_of(releases, hyper.dp_delta)
    finite = epsilon if math.isfinite(epsilon) else None
    return {"epsilon": finite, "delta": hyper.dp_delta, "steps": account.steps()}


class PrivacyCost(TypedDict):
    """What `privacy_cost` returns, as metadata."""

    # Pydantic's place for the configuration:
    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]
    epsilon: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)] | None
    delta: Annotated[float, Field(strict=True, ge=0, le=1)]
    steps: Annotated[int, Field(strict=True, ge=0)]
