"""Builds what is published into dist/, the sdist and the wheel, where the checkout is fit to be published.

python .ci/release.py
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLACEHOLDER = "github.com/OWNER/"
"""Stands for whoever publishes this. Reports of vulnerabilities must reach somebody."""
WHERE = ("pyproject.toml", "SECURITY.md")


def faults(root: Path) -> list[str]:
    """Why the checkout in ``root`` must not be published, each with what to do; empty if nothing speaks against it."""
    found = [
        f"{name}:{number}: {PLACEHOLDER} is a placeholder; put in the owner of the repository that takes reports"
        for name in WHERE
        for number, line in enumerate((root / name).read_text().splitlines(), 1)
        if PLACEHOLDER in line
    ]
    (version,) = re.findall(r'__version__ = "(.+)"', (root / ".typing/kvferry/__init__.py").read_text())
    changes = (root / "CHANGELOG.md").read_text()
    if not re.search(rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$", changes, re.MULTILINE):
        found.append(f"CHANGELOG.md: no line '## [{version}] - YYYY-MM-DD'; date this version")
    if not re.search(r"^## \[Unreleased\]\s+## ", changes, re.MULTILINE):
        found.append(
            f"CHANGELOG.md: Unreleased is not empty; raise __version__ above {version} and give it its section"
        )
    return found


def main() -> int:
    found = faults(ROOT)
    print("\n".join(found), file=sys.stderr)
    if not found:
        from setuptools import build_meta  # type: ignore[import-untyped]

        build_meta.build_sdist("dist")
        build_meta.build_wheel("dist")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
