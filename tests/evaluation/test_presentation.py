"""Numbers and names as text."""

from typing import Any

from medflare.evaluation.presentation import (
    format_bytes,
    format_setting,
    model_columns,
    spread_over_sites,
)


def test_bytes() -> None:
    sizes = {
        0: "0 B",
        1023: "1023 B",
        1536: "1.5 KiB",
        3 * 2**20: "3.0 MiB",
        1.45 * 2**30: "1.4 GiB",
        2**41: "2.0 TiB",
    }
    assert {count: format_bytes(count) for count in sizes} == sizes


def test_settings_as_the_command_line_takes_them() -> None:
    values: dict[str, Any] = {
        "none": None,
        "true": True,
        "1e-05": 1e-05,
        "tune": "tune",
        "1,none": (1, None),
        "": [],
    }
    assert {text: format_setting(value) for text, value in values.items()} == {
        text: text for text in values
    }


def test_models_with_equal_numbers_share_a_column() -> None:
    def site(**dice: float | None) -> dict[str, Any]:
        return {
            "role": "inside",
            "metrics": {
                "global": {"dice": 0.5},
                **{model: {"dice": value} for model, value in dice.items()},
            },
        }

    def columns(*sites: dict[str, Any]) -> dict[str, str]:
        return model_columns({"sites": dict(zip("AB", sites, strict=False))})

    assert columns(site(personal=0.5, deployed=0.5)) == {"model": "global"}
    assert columns(site(personal=0.5), site(personal=0.6)) == {
        "global": "global",
        "personal": "personal",
    }, "different at one site"
    assert columns(site(personal=0.5), site(personal=None)) == {
        "global": "global",
        "personal": "personal",
    }, "undefined is not equal"
    assert list(columns(site(personal=None, deployed=None))) == [
        "global",
        "personal",
        "deployed",
    ], "undefined models are not equal"
    assert list(columns(site(personal=0.6, mixture=0.6))) == ["global", "personal = mixture"]
    assert columns() == {}


def test_the_worst_site_and_the_disparity_are_of_inside_sites() -> None:
    def site(role: str, dice: float | None, hd95: float | None) -> dict[str, Any]:
        return {"role": role, "metrics": {"deployed": {"dice": dice, "hd95": hd95}}}

    sites = {
        "A": site("inside", 0.75, 2.0),
        "B": site("inside", 0.5, 5.5),
        "C": site("inside", None, None),
        "X": site("outside", 0.1, 99.0),
    }
    rows = spread_over_sites({"sites": sites}, "dice")
    assert rows == {
        "worst inside site": {"deployed": "0.500\nB"},
        "disparity (best minus worst)": {"deployed": "0.250"},
    }
    rows = spread_over_sites({"sites": sites}, "hd95")
    assert [of["deployed"] for of in rows.values()] == ["5.5\nB", "3.5"], (
        "lower is better: the highest is the worst"
    )
    assert spread_over_sites({"sites": {"A": sites["A"], "X": sites["X"]}}, "dice") == {}
