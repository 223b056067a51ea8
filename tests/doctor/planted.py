"""Machines whose files a test writes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from kvferry.cli.doctor.findings import Finding, Level, Machine

NOBODY = 65534


def machine(root: Path, files: Mapping[str, str] | None = None, environ: Mapping[str, str] | None = None) -> Machine:
    """A machine with these files below ``root``, and with this environment alone."""
    for name, text in (files or {}).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Machine(environ=environ or {}, root=root)


def only(findings: list[Finding], what: str) -> Finding:
    """The one finding about ``what``."""
    (found,) = [finding for finding in findings if finding.what == what]
    return found


def is_bad(finding: Finding, level: Level, *words: str) -> None:
    """The finding has this level, these words, and something to do."""
    assert finding.level is level, finding
    assert finding.do
    text = f"{finding.what} {finding.value} {finding.expected} {finding.do}"
    assert not [word for word in words if word not in text], text
    assert "\n" not in text


@contextmanager
def as_nobody() -> Iterator[None]:
    """Open files as a user without rights, where this process is root."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
