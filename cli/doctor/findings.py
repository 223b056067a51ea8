"""What ``kvferry doctor`` looks at, and what it has found: as data, and as lines for a terminal."""

from __future__ import annotations

import enum
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec
from rich.text import Text


@dataclass(frozen=True)
class Machine:
    """``environ``: a copy, because UCXX sets variables of its own when it is loaded. ``root``: the directory whose
    ``proc``, ``sys`` and ``dev`` are looked at; tests give one of their own."""

    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    root: Path = Path("/")

    def text(self, name: str) -> str:
        """The content of a small file, without spaces at its ends; empty where it cannot be read."""
        try:
            return (self.root / name).read_text(errors="replace").strip()
        except OSError:
            return ""

    def names(self, name: str) -> list[str]:
        """The names in a directory, sorted; empty where it cannot be read."""
        try:
            return sorted(path.name for path in (self.root / name).iterdir())
        except OSError:
            return []


class Level(enum.StrEnum):
    """How much a finding matters. A FAULT makes the machine unfit. A WARNING makes hand-overs slower, or ends some of
    them. A NOTE is for information."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    FAULT = "fault"


STYLES = {Level.OK: "green", Level.NOTE: "cyan", Level.WARNING: "yellow", Level.FAULT: "bold red"}
MAX_VALUE = 350


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


def _finding(level: Level, what: str, value: str, do: str = "", *, expected: str = "") -> Finding:
    """The value in one line of at most ``MAX_VALUE`` characters: the begin and the end of a longer one."""
    line = " ".join(value.splitlines())
    line = line if len(line) <= MAX_VALUE else f"{line[: MAX_VALUE - 105]} ... {line[-100:]}"
    return Finding(level, what, line, expected, do)


ok, note, warning, fault = (partial(_finding, level) for level in Level)


def _faults(sections: Iterable[DoctorSection]) -> list[Finding]:
    return [finding for section in sections for finding in section.findings if finding.level is Level.FAULT]


def is_fit(sections: Iterable[DoctorSection]) -> bool:
    return not _faults(sections)


def in_one_line(sections: Iterable[DoctorSection]) -> str:
    """Whether the machine is fit, and if not, each reason and what to do about it."""
    reasons = [
        f"{each.what}: {each.value}{', expected ' * bool(each.expected)}{each.expected}; {each.do}"
        for each in _faults(sections)
    ]
    return f"this machine is not fit: {' / '.join(reasons)}" if reasons else "this machine is fit"


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


def verdict(sections: Sequence[DoctorSection]) -> Text:
    """The last line: whether the machine is fit, and how many findings there are of each level."""
    counts = Counter(finding.level for section in sections for finding in section.findings)
    numbers = ", ".join(f"{counts[level]} {level}" for level in reversed(Level) if counts[level])
    text, style = ("is fit", "bold green") if is_fit(sections) else ("is not fit", "bold red")
    return Text(f"This machine {text} for KVFerry: {numbers}.", style=style)
