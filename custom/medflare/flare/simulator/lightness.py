"""Keeps torch out of the simulator's server process, whose run is computed elsewhere (`office`)."""

import sys
from typing import Any

from nvflare.apis.fl_context import FLContext


def spare_torch(communicator: Any) -> None:
    """Let a workflow end without importing torch for it.

    FLARE 2.9 imports torch when a workflow ends, to clean up after tensors that are still being downloaded; where nobody has imported
    it there are none. It takes some three seconds.

    Args:
        communicator: of the workflow's controller, a `WFCommServer`.
    """
    clean_up = communicator._cleanup_inflight_tensor_downloads

    def where_there_may_be_some(fl_ctx: FLContext) -> None:
        if "torch" in sys.modules:
            clean_up(fl_ctx)

    communicator._cleanup_inflight_tensor_downloads = where_there_may_be_some
