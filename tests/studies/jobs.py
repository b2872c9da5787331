"""Jobs of a study that train nothing, as other processes can import them."""

import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Broken:
    """Cannot be run."""

    def __call__(self) -> None:
        raise RuntimeError("no images are mounted")


@dataclass(frozen=True)
class Touching:
    """Leaves a file after a while."""

    file: Path

    def __call__(self) -> None:
        time.sleep(0.3)
        self.file.touch()
