"""Python loads this module at its start where its folder is on PYTHONPATH: then its wall clock is wrong by CLOCK_SKEW seconds.

Everything that Python code sees as the time of day is; monotonic clocks and what OpenSSL compares certificates with are not.
"""

import datetime
import os
import time
from typing import Any

SKEW = float(os.environ["CLOCK_SKEW"])

_time, _time_ns, _datetime = time.time, time.time_ns, datetime.datetime


class _Kind(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _datetime)


class _Skewed(_datetime, metaclass=_Kind):  # type: ignore[misc, valid-type]
    __slots__ = ()

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:
        return cls.fromtimestamp(time.time(), tz)

    @classmethod
    def utcnow(cls) -> datetime.datetime:
        return cls.now(datetime.timezone.utc).replace(tzinfo=None)

    today = now


time.time = lambda: _time() + SKEW
time.time_ns = lambda: _time_ns() + int(SKEW * 1e9)
datetime.datetime = _Skewed  # type: ignore[misc]
