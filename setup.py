"""The README as a package index shows it, which pyproject.toml cannot say: its links lead into the repository.

Pictures are fetched from there as they are (``raw``), of the tag of this version.
"""

import re
import tomllib
from pathlib import Path

from setuptools import setup  # type: ignore[import-untyped]

ROOT = Path(__file__).resolve().parent
REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]


def absolute(readme: str, version: str) -> str:
    """``readme`` with each link to a file of the repository as a URL; links within the page stay."""

    def url(link: re.Match[str]) -> str:
        return f"{link[1]}({REPOSITORY}/{'raw' if link[1].startswith('!') else 'blob'}/v{version}/{link[2]}"

    return re.sub(r"(!?\[[^\]]*\])\((?![a-z]+:|#)([^)\s]+)", url, readme)


if __name__ == "__main__":
    (version,) = re.findall(r'^__version__ = "(.+)"$', (ROOT / ".typing/kvferry/__init__.py").read_text(), re.MULTILINE)
    readme = absolute((ROOT / "README.md").read_text(), version)
    setup(long_description=readme, long_description_content_type="text/markdown")
