"""Sex, age and scanner of an image: optional keys of datalist.json, for results by group.

They stay at the site: only its own report shows them.
"""

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from medflare.core.text import printable

AGE_BANDS = ("under 20", "20-39", "40-59", "60-79", "80 and over")
NOT_KNOWN = "not known"  # group of patients without a value
SEVERAL = "several"  # group of patients whose images are of several groups
_BAND = 20  # years
OLDEST = 130  # years; a higher number is an age in months or days
_SEXES = {
    **dict.fromkeys(("f", "female", "w", "woman", "weiblich"), "female"),
    **dict.fromkeys(("m", "male", "man", "männlich"), "male"),
    **dict.fromkeys(("o", "other", "d", "divers", "diverse"), "other"),
}
# How programs write a missing value, in lower case.
_MISSING = ("", "na", "n/a", "nan", "none", "null", "unk", "unknown", "not reported")
# DICOM's age string (PS3.5, Sec. 6.2) has a unit; "90+" and ">89" hide the age of the oldest.
_AGE = re.compile(r">?\s*(\d+(?:[.,]\d+)?)\s*([YMWD]?)\+?", re.IGNORECASE)
_PER_YEAR = {"": 1, "y": 1, "m": 12, "w": 52, "d": 365}


class Attributes(NamedTuple):
    """The sex and age of an image's patient, and the device that took it."""

    sex: str = ""  # "female", "male", "other" or the site's word; "" if unknown
    age: float | None = None  # in years, when the image was taken; None if unknown
    scanner: str = ""  # "" if unknown

    def to_dict(self) -> dict[str, Any]:
        """The known ones, as keys of datalist.json.

        Examples:
            >>> Attributes("female", 63.0).to_dict()
            {'sex': 'female', 'age': 63}
        """
        content = self._known()
        if self.age is not None and self.age.is_integer():
            content["age"] = int(self.age)
        return content

    def completed(self, others: "Attributes") -> "Attributes":
        """These attributes; those that are unknown here are taken from the others.

        Examples:
            >>> Attributes("female").completed(Attributes("male", 63.0))
            Attributes(sex='female', age=63.0, scanner='')
        """
        return others._replace(**self._known())

    def _known(self) -> dict[str, Any]:
        values = self._asdict()
        return {name: value for name, value in values.items() if value not in ("", None)}

    @property
    def groups(self) -> dict[str, str]:
        """Attribute -> the group of this image; "" if it is unknown."""
        band = ""
        if self.age is not None:
            band = AGE_BANDS[min(int(self.age) // _BAND, len(AGE_BANDS) - 1)]
        return {"sex": self.sex, "age": band, "scanner": self.scanner}


NO_ATTRIBUTES = Attributes()


def parse_attributes(sex: Any = None, age: Any = None, scanner: Any = None) -> Attributes:
    """Attributes from texts, numbers or None; ValueError for a text that is no age.

    Examples:
        >>> parse_attributes("F", "058Y", " Siemens Aera ")
        Attributes(sex='female', age=58.0, scanner='Siemens Aera')
        >>> parse_attributes("unknown", "90+"), parse_attributes("m", "60,5").age
        (Attributes(sex='', age=90.0, scanner=''), 60.5)
    """
    word = _known_text(sex)
    return Attributes(_SEXES.get(word.lower(), word), _age(age), _known_text(scanner))


def _known_text(value: Any) -> str:
    """A value as printable text; "" if it is missing."""
    text = printable(str(value))
    return "" if text.lower() in _MISSING else text


def _age(value: Any) -> float | None:
    text = _known_text(value)
    if not text:
        return None
    match = _AGE.fullmatch(text)
    years = -1.0
    if match:
        years = float(match[1].replace(",", ".")) / _PER_YEAR[match[2].lower()]
    if not 0 <= years <= OLDEST:
        raise ValueError(f"age {text[:40]!r} is no number of years from 0 to {OLDEST}")
    return years


def groups_of_patients(images: Iterable[tuple[str, Attributes]]) -> dict[str, dict[str, str]]:
    """Attribute -> patient -> group, from the patient and the attributes of every image.

    An attribute that no image has is left out. In the others, every patient is in one group.

    Examples:
        >>> images = [("a", Attributes("female")), ("a", Attributes()), ("b", Attributes())]
        >>> groups_of_patients(images)
        {'sex': {'a': 'female', 'b': 'not known'}}
    """
    # Attribute -> patient -> the groups of the patient's images.
    by_attribute: dict[str, dict[str, set[str]]] = {}
    for patient, attributes in images:
        for name, group in attributes.groups.items():
            by_patient = by_attribute.setdefault(name, {})
            by_patient.setdefault(patient, set()).add(group)
    shown = {}
    for name, by_patient in by_attribute.items():
        if any(groups != {""} for groups in by_patient.values()):
            shown[name] = {patient: _group(groups) for patient, groups in by_patient.items()}
    return shown


def _group(groups: set[str]) -> str:
    """The group of a patient whose images are of these groups."""
    known = groups - {""}
    if not known:
        return NOT_KNOWN
    if len(known) > 1:
        return SEVERAL
    return known.pop()


def sorted_groups(groups: Iterable[str]) -> list[str]:
    """Groups of an attribute as a table lists them: ages by age, the others by name.

    Examples:
        >>> sorted_groups(["not known", "80 and over", "under 20", "20-39"])
        ['under 20', '20-39', '80 and over', 'not known']
    """

    def rank(group: str) -> tuple[bool, int, str]:
        is_no_group = group in (SEVERAL, NOT_KNOWN)
        band = AGE_BANDS.index(group) if group in AGE_BANDS else 0
        return is_no_group, band, group

    return sorted(groups, key=rank)


def age_problem(values: Iterable[Any]) -> str:
    """Why one of the values is no age in years; "" if all are."""
    for value in values:
        try:
            _age(value)
        except ValueError as error:
            return str(error)
    return ""
