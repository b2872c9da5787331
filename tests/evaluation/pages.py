"""Checks of an HTML page without a browser: it is well-formed and self-contained."""

import re
from collections import Counter
from html.parser import HTMLParser
from typing import Final

VOID: Final = {"meta", "br", "img", "link", "hr", "input"}
_FETCHES: Final = {
    "script",
    "link",
    "iframe",
    "object",
    "embed",
    "form",
    "audio",
    "video",
    "source",
    "base",
}
_ADDRESSES: Final = ("src", "href", "xlink:href", "srcset", "action", "data", "poster")


class Page(HTMLParser):
    """Checks that tags are balanced; collects the cells of tables, captions, text and tags."""

    def __init__(self, page: str):
        super().__init__()
        self.open: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.captions: list[str] = []
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
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

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
    """Ids that are used twice or missing, and addresses that the page would fetch; empty for a correct page."""
    page = Page(html)
    ids = Counter(attributes["id"] for _, attributes in page.tags if "id" in attributes)
    used = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', html))
    problems = [f"id {name!r} {count} times" for name, count in ids.items() if count > 1]
    problems += [f"no id {name!r}" for name in used - ids.keys()]
    for tag, attributes in page.tags:
        addresses = [attributes.get(name) or "#" for name in _ADDRESSES]
        # A reader's link to a model is no fetch.
        beside = re.compile(r"[\w/-]+/(?:card\.json)?") if tag == "a" else re.compile("(?!)")
        problems += [
            f"{tag} {address:.60}"
            for address in addresses
            if not (address.startswith(("#", "data:")) or beside.fullmatch(address))
        ]
        problems += [f"{tag} {name}" for name in attributes if name.startswith("on")] + [tag] * (
            tag in _FETCHES
        )
    return problems + re.findall(r"@import[^;]*|url\((?!#|data:)[^)]*\)|javascript:", html)
