"""Puts the proxy servers of vLLM's own repository into a folder, for tests that run them unmodified before KVFerry.

They are in no wheel, so they come from the source distribution of a release: about 45 MB, from the index that pip is
configured for. They go to ``.vllm-proxies-VERSION``.

    python .ci/vllm_proxies.py 0.32.0        nothing where the folder exists
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from html.parser import HTMLParser
from pathlib import Path

from pip._internal.models.index import PyPI

ROOT = Path(__file__).resolve().parents[1]
PROXIES = (
    "tests/v1/kv_connector/nixl_integration/toy_proxy_server.py",
    "examples/disaggregated/disaggregated_serving/disagg_proxy_pushconnector_demo.py",
)
SECONDS = 60


class Links(HTMLParser):
    """The targets of the links of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attrs if tag == "a" and name == "href" and value]


def index_url() -> str:
    command = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return (said or PyPI.simple_url).rstrip("/")


def download(version: str, file: Path) -> None:
    page_url = f"{index_url()}/vllm/"
    with urllib.request.urlopen(page_url, timeout=SECONDS) as page:
        links = Links()
        links.feed(page.read().decode())
    name = f"vllm-{version}.tar.gz"
    found = [link for link in links.found if urllib.parse.urlsplit(link).path.endswith(f"/{name}")]
    if not found:
        sys.exit(f"the package index has no {name}. Nothing was tested")
    url = urllib.parse.urljoin(page_url, found[0])
    with urllib.request.urlopen(url, timeout=SECONDS) as source, file.open("wb") as target:
        shutil.copyfileobj(source, target)


def unpack(file: Path, version: str, folder: Path) -> None:
    folder.mkdir()
    with tarfile.open(file) as archive:
        for path in PROXIES:
            source = archive.extractfile(f"vllm-{version}/{path}")
            if source is None:
                sys.exit(f"vllm {version} has no {path}. Nothing was tested")
            (folder / Path(path).name).write_bytes(source.read())


def main() -> None:
    version = sys.argv[1] if len(sys.argv) == 2 else ""
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        sys.exit(f"the version of vLLM is {version!r}, expected one such as 0.32.0")
    target = ROOT / f".vllm-proxies-{version}"
    if target.exists():
        return
    with tempfile.TemporaryDirectory(dir=ROOT, prefix=".vllm-part-") as folder:  # a folder that exists is complete
        file = Path(folder) / "source.tar.gz"
        try:
            download(version, file)
        except (OSError, urllib.error.URLError) as error:
            sys.exit(f"vllm {version}: the source distribution could not be downloaded: {error}. Nothing was tested")
        unpack(file, version, Path(folder) / "files")
        shutil.move(Path(folder) / "files", target)
    print(f"vLLM {version}: proxies in {target.name}", flush=True)


if __name__ == "__main__":
    main()
