"""The files and the environment that the sections of ``kvferry doctor`` look at."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Machine:
    """``environ``: a copy, because UCXX sets variables of its own when it is loaded. ``root``: the directory whose
    ``proc``, ``sys`` and ``dev`` are looked at; tests give one of their own."""

    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    root: Path = Path("/")

    def path(self, name: str) -> Path:
        """A file of this machine, by its path without the first slash."""
        return self.root / name

    def text(self, name: str) -> str:
        """The content of a small file, without spaces at its ends; empty where it cannot be read."""
        try:
            return self.path(name).read_text(errors="replace").strip()
        except OSError:
            return ""

    def names(self, name: str) -> list[str]:
        """The names in a directory, sorted; empty where it cannot be read."""
        try:
            return sorted(path.name for path in self.path(name).iterdir())
        except OSError:
            return []
