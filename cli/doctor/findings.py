"""What ``kvferry doctor`` has found, as data, and as lines for a terminal."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import msgspec
from rich.text import Text


class Level(enum.StrEnum):
    """How much a finding matters. Only a FAULT makes the machine unfit. A WARNING makes hand-overs slower, or ends some
    of them. A NOTE is for information."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    FAULT = "fault"


MAX_VALUE = 350
STYLES = {Level.OK: "green", Level.NOTE: "cyan", Level.WARNING: "yellow", Level.FAULT: "bold red"}


class Finding(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One finding: ``what`` was looked at, its ``value``, the ``expected`` value, and what to ``do``. Warnings and
    faults say what to do."""

    level: Level
    what: str
    value: str
    expected: str = ""
    do: str = ""

    def __post_init__(self) -> None:
        assert self.do or self.level in (Level.OK, Level.NOTE), f"{self.what}: a {self.level} says what to do"


class DoctorSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Findings about one subject."""

    title: str
    findings: Sequence[Finding]


def _brief(text: str) -> str:
    """One line of at most ``MAX_VALUE`` characters: the begin and the end of a longer one."""
    line = " ".join(text.splitlines())
    return line if len(line) <= MAX_VALUE else f"{line[: MAX_VALUE - 105]} ... {line[-100:]}"


def ok(what: str, value: str, expected: str = "") -> Finding:
    """It is as it should be."""
    return Finding(Level.OK, what, _brief(value), expected)


def note(what: str, value: str, do: str = "", *, expected: str = "") -> Finding:
    """It may be as the user wants it."""
    return Finding(Level.NOTE, what, _brief(value), expected, do)


def warning(what: str, value: str, do: str, *, expected: str = "") -> Finding:
    """Hand-overs work, slower or not all of them."""
    return Finding(Level.WARNING, what, _brief(value), expected, do)


def fault(what: str, value: str, do: str, *, expected: str = "") -> Finding:
    """KVFerry does not work on this machine, or not with these settings."""
    return Finding(Level.FAULT, what, _brief(value), expected, do)


def is_fit(sections: Iterable[DoctorSection]) -> bool:
    """Whether there is no fault."""
    return all(finding.level is not Level.FAULT for section in sections for finding in section.findings)


def lines(section: DoctorSection) -> Iterator[Text]:
    """A section for a terminal: its title, and one line for each finding, or two where there is something to do."""
    yield Text(section.title, style="bold")
    width = max((len(finding.what) for finding in section.findings), default=0)
    for finding in section.findings:
        expected = f"; expected {finding.expected}" if finding.expected else ""
        line = Text("  ")
        line.append(f"{finding.level:<8}", style=STYLES[finding.level])
        line.append(f"{finding.what:<{width}}  {finding.value}{expected}")
        yield line
        if finding.do:
            yield Text(f"{'':<{10 + width}}  ▸ {finding.do}", style="italic")


def verdict(sections: Iterable[DoctorSection]) -> Text:
    """The last line: whether the machine is fit, and how many findings there are of each level."""
    sections = list(sections)
    counts = Counter(finding.level for section in sections for finding in section.findings)
    numbers = ", ".join(f"{counts[level]} {level}" for level in reversed(Level) if counts[level])
    fit = is_fit(sections)
    text = "This machine is fit for KVFerry" if fit else "This machine is not fit for KVFerry"
    return Text(f"{text}: {numbers}.", style="bold green" if fit else "bold red")
