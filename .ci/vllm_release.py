"""Puts the Python files of a vLLM release into a folder, for tests of the connector contract on a machine without GPU.

A release's wheel on PyPI is built for GPUs: its compiled parts do not load here, and its requirements include another
torch. The tests of KVFerry's vLLM adapter need neither. So only the Python and JSON files are unpacked, into
``.vllm-VERSION``, with metadata that names the version as one for the CPU. The folder goes before the installed vLLM on
``PYTHONPATH``; everything else comes from ``.venv``.

    python .ci/vllm_release.py 0.33.0        about 340 MB to download and 65 MB to keep; nothing where the folder exists
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLATFORM, PYTHON = "manylinux_2_28_x86_64", "3.12"
"""Of the wheel; its Python files are the same for all."""
KEPT = (".py", ".json")


def download(version: str, folder: Path) -> Path:
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:",
        "--platform", PLATFORM, "--python-version", PYTHON, "--dest", str(folder), f"vllm=={version}",
    ]  # fmt: skip
    if subprocess.run(command, check=False).returncode:
        sys.exit(f"pip could not download vllm {version}; its messages are above. Nothing was tested")
    (wheel,) = folder.glob("*.whl")
    return wheel


def unpack(wheel: Path, version: str, folder: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.startswith("vllm/") and name.endswith(KEPT)]
        archive.extractall(folder, names)
    info = folder / f"vllm-{version}+cpu.dist-info"  # "cpu" lets vLLM choose its platform without a GPU
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")


def main() -> None:
    version = sys.argv[1] if len(sys.argv) == 2 else ""
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        sys.exit(f"the version of vLLM is {version!r}, expected one such as 0.33.0: make test-vllm VLLM=0.33.0")
    target = ROOT / f".vllm-{version}"
    if target.exists():
        return
    with tempfile.TemporaryDirectory(dir=ROOT, prefix=".vllm-part-") as folder:  # a folder that exists is complete
        parts = Path(folder)
        wheel = download(version, parts)
        unpack(wheel, version, parts / "files")
        shutil.move(parts / "files", target)
    print(f"vLLM {version}: Python files in {target.name}", flush=True)


if __name__ == "__main__":
    main()
