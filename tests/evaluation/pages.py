"""What a page must be that nobody opens in a browser here: well-formed, named, complete by itself, legible on screen and on paper."""

import re
from collections import Counter
from html.parser import HTMLParser
from itertools import pairwise
from typing import Final

VOID: Final = {"meta", "br", "img", "link", "hr", "input"}
_FETCHES: Final = {"script", "link", "iframe", "object", "embed", "form", "audio", "video", "source", "base"}
_ADDRESSES: Final = ("src", "href", "xlink:href", "srcset", "action", "data", "poster")
_READABLE: Final = 4.5  # contrast of text to what it stands on (WCAG 2.2, 1.4.3)
_TEXTS: Final = (  # text, what it stands on
    *((text, ground) for text in ("ink", "soft") for ground in ("card", "page")),
    *((text, "card") for text in ("accent", "good", "bad", "note")),
    *((text, f"{text}-back") for text in ("good", "bad", "note")),
)


class Page(HTMLParser):
    """Checks that tags are balanced and collects the tables' cells and the text."""

    def __init__(self, page: str):
        super().__init__()
        self.open: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.captions: list[str] = []
        self.widths: list[list[int]] = []  # of every table, columns of every row
        self.text = ""
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)
        assert not self.open, f"unclosed {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
            self.widths.append([])
            self._rows_left: list[list[int]] = []
        elif tag == "tr":
            self.tables[-1].append([])
            self.widths[-1].append(sum(columns for columns, _ in self._rows_left))
            self._rows_left = [[columns, rows - 1] for columns, rows in self._rows_left if rows > 1]
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
            columns, rows = (int(dict(attrs).get(name) or 1) for name in ("colspan", "rowspan"))
            self.widths[-1][-1] += columns
            if rows > 1:
                self._rows_left.append([columns, rows - 1])

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "title"):
            self.text += data
        if "td" in self.open or "th" in self.open:
            self.tables[-1][-1][-1] += data.strip()
        if self.open[-1:] == ["caption"]:
            self.captions.append(data)


def faults(html: str) -> list[str]:
    """What is wrong with a page, in words; empty for one that is as it should be.

    Args:
        html: the page.
    """
    page = Page(html)
    return [*_of_structure(html, page), *_of_names(html, page), *_of_tables(page), *_of_addresses(html, page), *_of_style(html)]


def _of_structure(html: str, page: Page) -> list[str]:
    counts = Counter(tag for tag, _ in page.tags)
    found = [f"{counts[tag]} <{tag}>" for tag in ("html", "head", "title", "main", "h1") if counts[tag] != 1]
    if not html.startswith("<!doctype html>") or page.tags[0] != ("html", {"lang": "en"}):
        found.append("no doctype, or no language")
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch("h[1-6]", tag)]
    found += [f"<h{after}> follows <h{before}>" for before, after in pairwise(levels) if after > before + 1]
    return found


def _of_names(html: str, page: Page) -> list[str]:
    ids = Counter(attributes["id"] for _, attributes in page.tags if "id" in attributes)
    found = [f"id {name!r} {count} times" for name, count in ids.items() if count > 1 or not name]
    used = {name for _, attributes in page.tags for name in (attributes.get("aria-labelledby") or "").split()}
    used |= set(re.findall(r'(?:url\(#|href="#)([^)"]+)', html))
    found += [f"no id {name!r}" for name in sorted(used - ids.keys())]
    for tag, attributes in page.tags:
        if tag == "img" and not attributes.get("alt"):
            found.append("an image without alt")
        if attributes.get("role") in ("img", "region") and not attributes.get("aria-label"):
            found.append(f"a {attributes['role']} without a name")
        if "tabindex" in attributes and "role" not in attributes:
            found.append("a place to tab to without a role")
    drawings = sum(tag == "svg" for tag, _ in page.tags)
    if drawings != sum(attributes.get("role") == "img" for _, attributes in page.tags):
        found.append("a drawing without a name")
    return found


def _of_tables(page: Page) -> list[str]:
    found = [] if len(page.captions) >= len(page.tables) else ["a table without a caption"]
    found += [f"rows of {sorted(set(widths))} columns" for widths in page.widths if len(set(widths)) > 1]
    found += ["a head of a table without a scope" for tag, attributes in page.tags if tag == "th" and not attributes.get("scope")]
    found += ["a table without heads"] * (sum(tag == "thead" for tag, _ in page.tags) != len(page.tables))
    return found


def _of_addresses(html: str, page: Page) -> list[str]:
    found = [f"<{tag}>" for tag, _ in page.tags if tag in _FETCHES]
    for tag, attributes in page.tags:
        found += [
            f"{tag} {name}={attributes[name]!r:.60}" for name in _ADDRESSES if not (attributes.get(name) or "#").startswith(("#", "data:"))
        ]
        found += [f"{tag} {name}" for name in attributes if name.startswith("on")]
    found += re.findall(r"@import[^;]*|url\((?!#|data:)[^)]*\)|javascript:", html)
    return found


def _of_style(html: str) -> list[str]:
    style = html[html.index("<style>") : html.index("</style>")]
    found = [f"no {words}" for words in ("@media print", "@media screen and (prefers-color-scheme: dark)") if words not in style]
    light, dark = (dict(re.findall(r"--([\w-]+): (#\w+)", block)) for block in re.findall(r":root \{([^}]*)\}", style))
    found += [f"no dark {name}" for name in sorted(light.keys() - dark.keys())]
    for scheme, colours in (("light", light), ("dark", {**light, **dark})):
        for text, ground in _TEXTS:
            if (ratio := contrast(colours[text], colours[ground])) < _READABLE:
                found.append(f"{scheme} {text} on {ground}: {ratio:.2f}")
    return found


def contrast(first: str, second: str) -> float:
    """Contrast ratio of two colours (WCAG 2.2), from 1 to 21.

    Args:
        first: as #rgb or #rrggbb.
        second: likewise.
    """
    low, high = sorted((_luminance(first), _luminance(second)))
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: str) -> float:
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    shares = [int(digits[place : place + 2], 16) / 255 for place in (0, 2, 4)]
    linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
