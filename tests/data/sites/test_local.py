"""What a site decides for itself: read as it was meant, or refused."""

from dataclasses import replace
from typing import Any

import pytest

from medflare.core.errors import ConfigError
from medflare.data.settings import CacheSettings
from medflare.data.sites.local import Bounds, LocalSettings, OutboundLimits, PrivacyLimit, local_settings


def test_nothing_is_decided_by_an_empty_file() -> None:
    settings = local_settings({})
    assert settings == LocalSettings() and not settings.redact and settings.minimum_patients == 0
    assert settings.bounds == Bounds(2**26, 2**28, 1000, 720.0, 64.0, 1440.0, 2**33, 2**16) and settings.outbound == OutboundLimits(
        None, None
    )


def test_everything_decided() -> None:
    settings = local_settings(
        {
            "batch_size": 4,
            "bounds": {"pixels": 1000, "epochs": 3, "hours": 12, "memory": 8, "minutes": 30, "model_bytes": 10_000_000},
            "cache": "~/cache",
            "data_folders": ["/scans"],
            "keep": "best",
            "minimum_patients": 5,
            "redact": True,
            "data_root": "/data",
            "device": "cuda:0",
            "outbound": {"entries": ["model"], "bytes": 50_000_000},
            "privacy": {"epsilon": 8, "delta": 1e-5, "ledger": "/kept"},
        }
    )
    assert (settings.batch_size, settings.cache, settings.data_root, settings.device) == (4, CacheSettings("~/cache"), "/data", "cuda:0")
    assert settings.bounds == Bounds(1000, 2**28, 3, 12.0, 8.0, 30.0, 10_000_000) and settings.data_folders == ("/scans",)
    assert settings.minimum_patients == 5 and settings.redact and settings.keep == "best"
    assert settings.outbound == OutboundLimits(("model",), 50_000_000)
    assert settings.privacy == PrivacyLimit(8.0, 1e-5, "/kept")


def test_ways_to_say_where_decoded_images_are_kept() -> None:
    assert local_settings({}).cache == local_settings({"cache": True}).cache == CacheSettings("", 100.0, 4.0)
    assert local_settings({"cache": False}).cache is None
    assert local_settings({"cache": "/kept"}).cache == local_settings({"cache": {"folder": "/kept"}}).cache == CacheSettings("/kept")
    assert local_settings({"cache": {"limit_gb": 1, "memory_gb": 0}}).cache == CacheSettings("", 1.0, 0.0)


def test_nothing_may_leave_is_not_everything_may() -> None:
    assert local_settings({"outbound": {"entries": []}}).outbound.entries == ()
    assert local_settings({"outbound": {"bytes": 0}}).outbound.bytes == 0
    assert local_settings({"outbound": {}}).outbound == OutboundLimits()


def test_limits_can_be_changed() -> None:
    assert replace(OutboundLimits(), bytes=3) == OutboundLimits(None, 3)
    assert replace(LocalSettings(), privacy=PrivacyLimit(8.0, 1e-5)).privacy == PrivacyLimit(8.0, 1e-5)


def test_a_batch_size_of_null_is_the_tasks() -> None:
    assert local_settings({"batch_size": None}).batch_size is None


def test_the_ledger_may_be_the_engines_choice() -> None:
    privacy = local_settings({"privacy": {"epsilon": 8, "delta": 1e-5}}).privacy
    assert privacy == PrivacyLimit(8.0, 1e-5) and privacy is not None and privacy.ledger is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"batchsize": 4}, "unknown setting 'batchsize'; did you mean batch_size"),
        ({"root": "/data"}, "unknown setting 'root'; did you mean data_root? known: batch_size, bounds, cache, channels_last"),
        ({"bounds": {"pixel": 9}}, "bounds: unknown setting 'pixel'; did you mean pixels"),
        ({"bounds": {"hours": 0}}, "bounds.hours must be above 0, got 0"),
        ({"bounds": {"memory": None}}, "bounds.memory must not be null, which looks like a limit and is none"),
        ({"bounds": {"pixels": 10**9}}, "bounds.pixels must be at most 1.78957e"),
        ({"keep": "mine"}, "keep must be one of"),
        ({"minimum_patients": -1}, "minimum_patients must be at least 0, got -1"),
        ({"batch_size": 1}, "batch_size must be 2 or more, since batch normalisation cannot train on a single image, got 1"),
        ({"batch_size": "4"}, "batch_size must be a whole number, got '4'"),
        ({"batch_size": True}, "batch_size must be a whole number, got True"),
        ({"cache": 1}, "cache must be true, false, a folder, or an object with folder, limit_gb and memory_gb, got 1"),
        ({"cache": None}, "cache must be true, false, a folder, or an object with folder, limit_gb and memory_gb, got None"),
        ({"cache": {"limit": 1}}, "cache: unknown setting 'limit'; did you mean limit_gb? known: folder, limit_gb, memory_gb"),
        ({"cache": {"limit_gb": 0}}, "cache.limit_gb must be above 0, got 0"),
        ({"cache": {"memory_gb": -1}}, "cache.memory_gb must be at least 0, got -1"),
        ({"cache": {"folder": 3}}, "cache.folder must be text, got 3"),
        ({"data_root": 3}, "data_root must be text, got 3"),
        ({"data_root": None}, "data_root must be text, got None"),
        ({"device": None}, "device must be text or a list, got None"),
        ({"device": []}, "device must be text, or a list of different devices, got []"),
        ({"device": ["cuda:0", "cuda:0"]}, "device must be text, or a list of different devices, got ['cuda:0', 'cuda:0']"),
        ({"channels_last": 1}, "channels_last must be true or false, got 1"),
        ({"compile": "yes"}, "compile must be true or false, got 'yes'"),
        ({"outbound": None}, "outbound must not be null"),
        ({"outbound": ["model"]}, "outbound must be an object, got ['model']"),
        ({"outbound": {"entry": ["model"]}}, "outbound: unknown setting 'entry'; did you mean entries? known: bytes, entries"),
        ({"outbound": {"entries": "model"}}, "outbound.entries must be a list, got 'model'"),
        ({"outbound": {"entries": [1]}}, "outbound.entries[0] must be text, got 1"),
        ({"outbound": {"entries": None}}, "outbound.entries must not be null"),
        ({"outbound": {"bytes": None}}, "outbound.bytes must not be null"),
        ({"outbound": {"bytes": 1.5}}, "outbound.bytes must be a whole number, got 1.5"),
        ({"outbound": {"bytes": True}}, "outbound.bytes must be a whole number, got True"),
        ({"outbound": {"bytes": -1}}, "outbound.bytes must be at least 0, got -1"),
        ({"privacy": 8}, "privacy must be an object, got 8"),
        ({"privacy": None}, "privacy must not be null, which looks like a limit and is none; leave it out where none is meant"),
        ({"privacy": {}}, "setting 'privacy.epsilon' is missing"),
        ({"privacy": {"epsilon": 8}}, "setting 'privacy.delta' is missing"),
        ({"privacy": {"epsilon": 0, "delta": 1e-5}}, "privacy.epsilon must be above 0, got 0"),
        ({"privacy": {"epsilon": True, "delta": 1e-5}}, "privacy.epsilon must be a number, got True"),
        ({"privacy": {"epsilon": float("nan"), "delta": 1e-5}}, "privacy.epsilon must be a finite number, got nan"),
        ({"privacy": {"epsilon": "8", "delta": 1e-5}}, "privacy.epsilon must be a number, got '8'"),
        ({"privacy": {"epsilon": 8, "delta": 1}}, "privacy.delta must be below 1, got 1"),
        ({"privacy": {"epsilon": 8, "delta": 0}}, "privacy.delta must be above 0, got 0"),
        ({"privacy": {"epsilon": 8, "delta": 1e-5, "epsilom": 3}}, "privacy: unknown setting 'epsilom'; did you mean epsilon? known: "),
        ({"privacy": {"epsilon": 8, "delta": 1e-5, "ledger": 3}}, "privacy.ledger must be text, got 3"),
        ({"privacy": {"epsilon": 8, "delta": 1e-5, "ledger": None}}, "privacy.ledger must not be null"),
    ],
    ids=str,
)
def test_what_is_misspelt_is_not_taken_for_none(content: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        local_settings(content)
    assert str(caught.value).startswith(f"local/medflare.json: {message}") and "\n" not in str(caught.value)
