"""What a site decides for itself: read as it was meant, or refused."""

from dataclasses import replace
from typing import Any

import pytest

from medflare.core.errors import ConfigError
from medflare.data.local import Bounds, CacheSettings, LocalSettings, OutboundLimits, PrivacyLimit, local_settings


def test_nothing_is_decided_by_an_empty_file() -> None:
    settings = local_settings({})
    assert settings == LocalSettings() and settings.minimum_patients == 0
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
            "keep": "personal",
            "minimum_patients": 5,
            "data_root": "/data",
            "device": "cuda:0",
            "outbound": {"entries": ["model"], "bytes": 50_000_000},
            "privacy": {"epsilon": 8, "delta": 1e-5, "ledger": "/kept"},
        }
    )
    assert (settings.batch_size, settings.cache, settings.data_root, settings.device) == (4, CacheSettings("~/cache"), "/data", "cuda:0")
    assert settings.bounds == Bounds(1000, 2**28, 3, 12.0, 8.0, 30.0, 10_000_000) and settings.data_folders == ("/scans",)
    assert settings.minimum_patients == 5 and settings.keep == "personal"
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
        ({"batchsize": 4}, "batchsize"),
        ({"root": "/data"}, "root"),
        ({"bounds": {"pixel": 9}}, "pixel"),
        ({"bounds": {"hours": 0}}, "bounds.hours"),
        ({"bounds": {"memory": None}}, "bounds.memory"),
        ({"bounds": {"pixels": 10**9}}, "bounds.pixels"),
        ({"keep": "mine"}, "keep"),
        ({"minimum_patients": -1}, "minimum_patients"),
        ({"batch_size": 1}, "batch_size"),
        ({"batch_size": "4"}, "batch_size"),
        ({"batch_size": True}, "batch_size"),
        ({"cache": 1}, "cache"),
        ({"cache": None}, "cache"),
        ({"cache": {"limit": 1}}, "limit"),
        ({"cache": {"limit_gb": 0}}, "cache.limit_gb"),
        ({"cache": {"memory_gb": -1}}, "cache.memory_gb"),
        ({"cache": {"folder": 3}}, "cache.folder"),
        ({"data_root": 3}, "data_root"),
        ({"data_root": None}, "data_root"),
        ({"device": None}, "device"),
        ({"device": []}, "device"),
        ({"device": ["cuda:0", "cuda:0"]}, "device"),
        ({"channels_last": 1}, "channels_last"),
        ({"compile": "yes"}, "compile"),
        ({"outbound": None}, "outbound"),
        ({"outbound": ["model"]}, "outbound"),
        ({"outbound": {"entry": ["model"]}}, "entry"),
        ({"outbound": {"entries": "model"}}, "outbound.entries"),
        ({"outbound": {"entries": [1]}}, "outbound.entries.0"),
        ({"outbound": {"entries": None}}, "outbound.entries"),
        ({"outbound": {"bytes": None}}, "outbound.bytes"),
        ({"outbound": {"bytes": 1.5}}, "outbound.bytes"),
        ({"outbound": {"bytes": True}}, "outbound.bytes"),
        ({"outbound": {"bytes": -1}}, "outbound.bytes"),
        ({"privacy": 8}, "privacy"),
        ({"privacy": None}, "privacy"),
        ({"privacy": {}}, "privacy.epsilon"),
        ({"privacy": {"epsilon": 8}}, "privacy.delta"),
        ({"privacy": {"epsilon": 0, "delta": 1e-5}}, "privacy.epsilon"),
        ({"privacy": {"epsilon": True, "delta": 1e-5}}, "privacy.epsilon"),
        ({"privacy": {"epsilon": float("nan"), "delta": 1e-5}}, "privacy.epsilon"),
        ({"privacy": {"epsilon": "8", "delta": 1e-5}}, "privacy.epsilon"),
        ({"privacy": {"epsilon": 8, "delta": 1}}, "privacy.delta"),
        ({"privacy": {"epsilon": 8, "delta": 0}}, "privacy.delta"),
        ({"privacy": {"epsilon": 8, "delta": 1e-5, "epsilom": 3}}, "epsilom"),
        ({"privacy": {"epsilon": 8, "delta": 1e-5, "ledger": 3}}, "privacy.ledger"),
        ({"privacy": {"epsilon": 8, "delta": 1e-5, "ledger": None}}, "privacy.ledger"),
    ],
    ids=str,
)
def test_what_is_misspelt_is_not_taken_for_none(content: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        local_settings(content)
    assert str(caught.value).startswith("local/medflare.json: ") and message in str(caught.value) and "\n" not in str(caught.value)
