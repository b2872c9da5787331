"""The metadata of every reply to training or validation, see `SiteAlgorithm.measured`."""

from typing import Annotated

from pydantic import Field

from medflare.core.specs import MetaSpec, by_model, number

N_SAMPLES = MetaSpec[float](
    "n_samples", "training images", Annotated[number(), Field(gt=0)], public=True
)
LOSS = MetaSpec[float | None](
    "loss", "mean training loss", number(-1e12, 1e12, optional=True), "train"
)
VALIDATION = MetaSpec[dict[str, float | None]](
    "validation",
    "model -> the task's metric on validation images before training; "
    "the server ignores values that no metric can have",
    by_model(Annotated[float, Field(strict=True)] | None),
    "validation",
)
MEASURED = (N_SAMPLES, LOSS, VALIDATION)
