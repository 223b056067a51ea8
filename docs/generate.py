"""Writes the generated tables into README.md and docs/, and the generated pictures.

    python docs/generate.py            write all of them
    python docs/generate.py --check    list the ones that are out of date; exit status 1 if there is any

A table stands between ``<!-- generated NAME: python docs/generate.py -->`` and ``<!-- end of NAME -->``.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / ".typing"))

import binding_table
import commands_table
import doctor_output
from settings_table import settings_table

from benchmarks.harness import pages
from benchmarks.harness.pictures import streaming_picture
from kvferry.connector.geometry.dtypes import CONVERTIBLE
from kvferry.connector.wire.metrics import PROMPT_ENDS
from kvferry.connector.wire.series import series_table
from kvferry.transport.errors import TO_DO

ROOT = Path(__file__).resolve().parent.parent


def support(what: str) -> str:
    """A table of what is supported, by the script beside the tests that show it."""
    script = [sys.executable, str(ROOT / "tests" / "docs" / "support_matrix.py"), what]
    return subprocess.run(script, capture_output=True, text=True, timeout=240, check=True, cwd=ROOT).stdout


def error_table() -> str:
    """Error bounds of one conversion of an element."""
    rows = ["| converted to | relative error | if smaller than | absolute error | largest number |"]
    rows.append("|---|---|---|---|---|")
    for name, to in CONVERTIBLE.items():
        relative, absolute = f"2^-{to.mantissa + 1}", f"2^{math.frexp(to.absolute_error)[1] - 1}"
        below = f"2^{math.frexp(to.smallest_normal)[1] - 1}"
        rows.append(f"| `{name}` | {relative} | {below} | {absolute} | ±{to.maximum:g} |")
    return "\n".join(rows)


def reasons() -> str:
    """Why D loaded a prompt from no P, by the label in the metrics, and what to do, as ``kvferry check`` says it."""
    rows = ["| reason | result | cause, or what to do |", "|---|---|---|"]
    for reason, todo in TO_DO.items():
        rows.append(f"| `{reason}` | {' or '.join(end for end, why in PROMPT_ENDS if why == reason)} | {todo} |")
    return "\n".join(rows)


REGIONS: dict[str, dict[str, Callable[[], str]]] = pages.SECTIONS | {
    "docs/settings.md": {"settings": settings_table},
    "docs/observability.md": {"metrics": series_table},
    "docs/compatibility.md": {
        **{what: partial(support, what) for what in ("families", "pairings", "features", "caches")},
        "dtypes": error_table,
    },
    "docs/commands.md": {"commands": commands_table.commands, "doctor": doctor_output.doctor},
    "docs/troubleshooting.md": {"reasons": reasons},
    "docs/library.md": {"binding": binding_table.markdown},
}
"""By page, the generator of each of its tables."""
PICTURES: dict[str, Callable[[], str]] = {
    f"docs/pictures/{pages.PICTURE}": pages.gpu_planes_picture,
    "docs/pictures/gpu_streaming.svg": lambda: streaming_picture(pages.load("gpu_streaming")),
}


class PageError(Exception):
    """A page lacks the markers of a table, or has them twice."""


def marks(name: str) -> tuple[str, str]:
    return f"<!-- generated {name}: python docs/generate.py -->", f"<!-- end of {name} -->"


def filled(page: str, text: str) -> str:
    """``text`` of a page with all of its tables as their generators print them.

    Raises:
        PageError: markers are missing, repeated, or out of order.
    """
    for name, make in REGIONS[page].items():
        start, end = marks(name)
        if text.count(start) != 1 or text.count(end) != 1 or text.index(start) > text.index(end):
            raise PageError(f"{page}: expected one pair of markers of {name!r}: {start} ... {end}")
        before, rest = text.split(start)
        text = f"{before}{start}\n{make().strip()}\n{end}{rest.split(end)[1]}"
    return text


def outdated() -> dict[str, str]:
    """The pages and pictures that are not what their generators print, each as it should be."""
    made = {page: filled(page, (ROOT / page).read_text()) for page in REGIONS}
    made |= {name: make() for name, make in PICTURES.items()}
    return {name: new for name, new in made.items() if not (ROOT / name).exists() or (ROOT / name).read_text() != new}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    pages = outdated()
    for page, text in pages.items():
        print(f"{page} {'is out of date; run python docs/generate.py' if check else 'updated'}")
        if not check:
            (ROOT / page).write_text(text)
    return 1 if check and pages else 0


if __name__ == "__main__":
    sys.exit(main())
