"""What a run of a study costs its process."""

import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from medflare.core.text import JsonDict

PROCESSOR = "processor"  # a stage of a results dict's seconds
PEAK = "peak_memory_bytes"  # in a results dict
_PROCESS = Path("/proc/self")  # on Linux


def with_costs(run: Callable[[], JsonDict]) -> JsonDict:
    """The results dict of a run, with its processor time and, on Linux, peak memory of the
    process.
    """
    with suppress(OSError):
        (_PROCESS / "clear_refs").write_text("5")  # the peak is that of now
    before = time.process_time()
    results = run()
    results["seconds"][PROCESSOR] = time.process_time() - before
    with suppress(OSError):
        kilobytes = re.findall(r"VmHWM:\s+(\d+) kB", (_PROCESS / "status").read_text())
        if kilobytes:
            results[PEAK] = 1024 * int(kilobytes[0])
    return results
