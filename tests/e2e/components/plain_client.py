"""A client that knows nothing of medflare: adds its own number to every weight and keeps a note of what it was sent."""

from pathlib import Path
from typing import Any

from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import FLMetaKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.utils.fl_model_utils import FLModelUtils


class PlainClient(Executor):
    def execute(
        self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal
    ) -> Shareable:
        number = int(fl_ctx.get_identity_name().removeprefix("site-"))
        model = FLModelUtils.from_shareable(shareable)
        folder = Path(fl_ctx.get_engine().get_workspace().get_run_dir(fl_ctx.get_job_id()))
        with (folder / "received.txt").open("a") as notes:
            notes.write(f"{sorted(model.params)} {model.params['w'][0]:.6f}\n")
        params = {name: value + number for name, value in numpy_params(model.params).items()}
        meta = {FLMetaKey.NUM_STEPS_CURRENT_ROUND: number}
        return FLModelUtils.to_shareable(
            FLModel(
                params=params,
                params_type=ParamsType.FULL,
                metrics={"dice": 0.1 * number},
                meta=meta,
            )
        )


def numpy_params(params: dict[str, Any]) -> dict[str, Any]:
    import numpy as np

    return {name: np.asarray(value, dtype=np.float32) for name, value in params.items()}
