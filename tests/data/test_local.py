from typing import Any

import pytest

from medflare.core.errors import ConfigError
from medflare.data.local import (
    Bounds,
    CacheSettings,
    LocalSettings,
    OutboundLimits,
    PrivacyLimit,
    local_settings,
)


def test_defaults_and_nested_settings() -> None:
    settings = local_settings({})
    assert (
        settings == LocalSettings()
        and settings.minimum_patients == 0
        and settings.outbound == OutboundLimits(None, None)
    )
    assert settings.bounds == Bounds(
        pixels=2**26,
        voxels=2**28,
        epochs=1000,
        hours=720.0,
        memory=64.0,
        minutes=1440.0,
        model_bytes=2**33,
        batch=2**16,
    )
    content = {
        "bounds": {"pixels": 1000, "epochs": 3, "hours": 12},
        "data_folders": ["/scans"],
        "outbound": {"entries": ["model"], "bytes": 50_000_000},
        "privacy": {"epsilon": 8, "delta": 1e-5, "ledger": "/kept"},
    }
    given = local_settings(content)
    assert given.bounds == Bounds(pixels=1000, epochs=3, hours=12.0) and given.data_folders == (
        "/scans",
    )
    assert given.outbound == OutboundLimits(
        ("model",), 50_000_000
    ) and given.privacy == PrivacyLimit(8.0, 1e-5, "/kept")


def test_shorthands_of_the_cache() -> None:
    assert (
        local_settings({}).cache
        == local_settings({"cache": True}).cache
        == CacheSettings("", 100.0, 4.0)
    )
    assert local_settings({"cache": False}).cache is None
    assert (
        local_settings({"cache": "/kept"}).cache
        == local_settings({"cache": {"folder": "/kept"}}).cache
        == CacheSettings("/kept")
    )
    assert local_settings({"cache": {"limit_gb": 1, "memory_gb": 0}}).cache == CacheSettings(
        "", 1.0, 0.0
    )


def test_an_empty_list_of_entries_is_a_limit() -> None:
    assert local_settings({"outbound": {"entries": []}}).outbound.entries == ()
    assert local_settings({"outbound": {"bytes": 0}}).outbound.bytes == 0
    assert local_settings({"outbound": {}}).outbound == OutboundLimits()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"batchsize": 4}, "batchsize"),
        ({"bounds": {"hours": 0}}, "bounds.hours"),
        ({"bounds": {"pixels": 10**9}}, "bounds.pixels"),
        ({"minimum_patients": -1}, "minimum_patients"),
        ({"batch_size": 1}, "batch_size"),
        ({"outbound": ["model"]}, "outbound"),
        ({"outbound": {"entry": ["model"]}}, "entry"),
        ({"outbound": {"entries": "model"}}, "outbound.entries"),
        ({"outbound": {"bytes": -1}}, "outbound.bytes"),
        ({"privacy": {"epsilon": 8}}, "privacy.delta"),
        ({"privacy": {"epsilon": 0, "delta": 1e-5}}, "privacy.epsilon"),
        ({"privacy": {"epsilon": float("nan"), "delta": 1e-5}}, "privacy.epsilon"),
        ({"privacy": {"epsilon": 8, "delta": 1}}, "privacy.delta"),
        ({"outbound": None}, "outbound"),  # null looks like a limit and would be none
        ({"outbound": {"entries": None}}, "outbound"),
        ({"outbound": {"bytes": None}}, "outbound"),
        ({"privacy": None}, "privacy"),
    ],
    ids=str,
)
def test_wrong_settings_are_refused(content: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        local_settings(content)
    assert (
        str(caught.value).startswith("local/medflare.json: ")
        and message in str(caught.value)
        and "\n" not in str(caught.value)
    )
