"""The output of ``kvferry doctor`` for docs/commands.md, from a recorded report.

``docs/doctor.json`` is what ``kvferry doctor --peer ... --model ... --json`` prints.
"""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from kvferry.cli.doctor.findings import DoctorSection, lines, verdict

ROOT = Path(__file__).resolve().parent.parent


def doctor() -> str:
    """The recorded report as the terminal shows it."""
    report = json.loads((ROOT / "docs" / "doctor.json").read_text())
    sections = msgspec.convert(report["sections"], list[DoctorSection])
    text = [line.plain.rstrip() for section in sections for line in lines(section)]
    (engine,) = [s.title.rpartition(" ")[2] for s in sections if s.title.startswith("Engine")]
    return _block(f"kvferry doctor --peer {engine} --model config.json", [*text, verdict(sections).plain])


def _block(command: str, text: list[str]) -> str:
    return "\n".join(["```console", f"$ {command}", *(line.rstrip() for line in text), "```"])
