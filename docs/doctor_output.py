"""The output of ``kvferry doctor`` and ``kvferry top`` for docs/doctor.md, from what was recorded of them.

``docs/doctor.json`` is a file of ``kvferry doctor --peer ... --share``; the pages of two engines are those of the tests
of ``kvferry top``.
"""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
from rich.console import Console

from kvferry.cli.doctor.findings import DoctorSection, lines, verdict
from kvferry.cli.top.command import table
from kvferry.cli.top.figures import EngineFigures, row, samples

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "tests" / "top" / "recorded"
SECONDS = 6.0
"""Between the two pages of an engine."""


def doctor() -> str:
    """The recorded report as the terminal shows it."""
    report = json.loads((ROOT / "docs" / "doctor.json").read_text())
    sections = msgspec.convert(report["sections"], list[DoctorSection])
    text = [line.plain.rstrip() for section in sections for line in lines(section)]
    (engine,) = [s.title.rpartition(" ")[2] for s in sections if s.title.startswith("Engine")]
    return _block(f"kvferry doctor --peer {engine}", [*text, verdict(sections).plain])


def top() -> str:
    """One table of the recorded pages."""
    rows = []
    for name, engine in (("prefill", "127.0.0.1:8001"), ("decode", "127.0.0.1:8002")):
        before, now = (EngineFigures.of(samples((PAGES / f"{name}_{n}.txt").read_text())) for n in (1, 2))
        rows.append(row(engine, EngineFigures(), before, now, SECONDS))
    console = Console(width=160, highlight=False)
    with console.capture() as captured:
        console.print(table(rows))
    return _block("kvferry top --once --interval 6 127.0.0.1:8001 127.0.0.1:8002", captured.get().splitlines())


def _block(command: str, text: list[str]) -> str:
    return "\n".join(["```console", f"$ {command}", *(line.rstrip() for line in text), "```"])
