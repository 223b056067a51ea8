"""What code costs on every host alike: the lines of Python that it executes. No time of a shared machine is judged."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any


class LineCount:
    """Counts the lines of Python in the functions that this thread calls meanwhile; with ``folders`` those of files
    below these."""

    def __init__(self, *folders: str) -> None:
        self.count, self._before = 0, sys.gettrace()
        self._folders = folders or ("",)

    def __enter__(self) -> LineCount:
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.startswith(self._folders):
            return None
        self.count += event == "line"
        return self._trace
