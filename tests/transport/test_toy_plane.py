"""A data plane of another distribution: all of it is in this file. It is registered by entry point, passes the contract
of every plane, and carries hand-overs, without an edit elsewhere."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import re
import runpy
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest

from kvferry.connector.config import Settings, load_settings
from kvferry.transport.channels import CPU, ByteRanges, Copy, PageRead
from kvferry.transport.errors import ConfigError, PlaneUnavailableError
from kvferry.transport.peer_process import PeerProcess
from kvferry.transport.plane import PlaneContext
from kvferry.transport.planes.pull import ProcessChannel, PullPlane, Ranges, joined
from kvferry.transport.registry import PlaneSpec, Use, make_plane, plane_names, plane_spec, preferred_planes
from tests.support.fork_server import fork_server

SPEC = PlaneSpec(
    "toy", "test_toy_plane:ToyPlane", "same host", "D reads `/proc/PID/mem` of P", host=Use(80), extra="toy-planes"
)
ENTRY_POINTS = "toy = test_toy_plane:SPEC"

# --- the plane -------------------------------------------------------------------------------------------------


class ToyMemory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    ranges: Ranges


class ToyCopy(Copy):
    def __init__(self, channel: ToyReader, ranges: ByteRanges) -> None:
        super().__init__()
        self.channel = channel
        self._left = deque(zip(*(column.tolist() for column in ranges), strict=True))

    def turn(self) -> None:
        """Copy the next few ranges."""
        try:
            for _ in range(min(256, len(self._left))):
                dst, src, nbytes = self._left.popleft()
                into = memoryview((ctypes.c_uint8 * nbytes).from_address(dst))
                if os.preadv(self.channel.fd, [into], src) != nbytes:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
        except (OSError, OverflowError) as error:
            self.end(f"toy: P's memory cannot be read: {error}")
            self.peer_lost = True
        self.done |= not self._left

    def end(self, why: str) -> None:
        self._left.clear()
        self.error, self.done = why, True


class ToyReader(ProcessChannel):
    def __init__(self, plane: ToyPlane, process: PeerProcess) -> None:
        super().__init__("toy", process)
        self._plane = plane
        self.fd = os.open(f"/proc/{process.pid}/mem", os.O_RDONLY | os.O_CLOEXEC)

    def read(self, request: PageRead) -> Copy:
        copy = ToyCopy(self, request.byte_ranges())
        self._plane.copies.append(copy)
        return copy

    def _close(self) -> None:
        for copy in [copy for copy in self._plane.copies if copy.channel is self]:
            self._plane.copies.remove(copy)
            copy.end("toy: the channel was closed")
        self.process.close()
        os.close(self.fd)


class ToyPlane(PullPlane[ToyReader, ToyMemory]):
    name: ClassVar[str] = "toy"
    memory = ToyMemory

    def __init__(self, context: PlaneContext) -> None:
        super().__init__()
        self.copies: list[ToyCopy] = []
        self.publish(ToyMemory(joined(context.memory.ranges)))

    def join(self, process: PeerProcess) -> ToyReader:
        return ToyReader(self, process)

    def begin(self, channel: ToyReader, memory: ToyMemory) -> None:
        channel.ranges = memory.ranges

    @property
    def active(self) -> bool:
        return bool(self.copies)

    def progress(self) -> bool:
        for copy in list(self.copies):
            copy.turn()
            if copy.done:
                self.copies.remove(copy)
        return self.watch() or bool(self.copies)

    def arm(self) -> bool:
        return not self.copies


# --- the tests ----------------------------------------------------------------------------------------------------

ROOT = Path(__file__).parents[2]
CONTEXT = PlaneContext("127.0.0.1", 1 << 20, 4 << 20)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """What an installer leaves of a distribution that registers these entry points; also child processes find it."""

    def installed(entry_points: str) -> None:
        info = tmp_path / "toy_planes-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy_planes\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[kvferry.planes]\n{entry_points}\n")
        for folder in (str(Path(__file__).parent), str(tmp_path)):
            monkeypatch.syspath_prepend(folder)
            monkeypatch.setenv("PYTHONPATH", folder, prepend=os.pathsep)

    return installed


CONTRACT = {
    "tests/transport/test_pull_planes.py": 14, "tests/handover/test_handover.py": 4,
}  # fmt: skip
"""The files of the contract, and of hand-overs, with how many of their tests the toy plane takes at least."""


@pytest.mark.timeout(1800)
def test_it_passes_the_contract_and_carries_hand_overs(
    install: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(ENTRY_POINTS)
    monkeypatch.chdir(ROOT)
    command = ["-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", "-k", "toy", *CONTRACT]
    run = fork_server().run(*command, timeout=1700, environment=os.environ)
    summary = run.stdout.splitlines()[-1]
    assert run.returncode == 0 and not re.search("failed|error|skipped", summary), run.stdout[-8000:] + run.stderr
    passed = Counter(re.findall(r"^PASSED ([^:]+)::", run.stdout, re.MULTILINE))
    assert all(passed[file] >= least for file, least in CONTRACT.items()), passed


def test_it_is_registered(install: Callable[[str], None], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="'toy' is not usable: expected one of"):
        load_settings({"plane": "toy"}, {})
    install(ENTRY_POINTS)
    assert "toy" in plane_names()
    names = preferred_planes(CPU)
    assert (names[0], names[-1]) == ("cma", "toy")
    plane = make_plane("toy", CONTEXT)
    assert plane.name == "toy" and plane.pulls
    plane.close()
    assert load_settings({"plane": "toy"}, {}) == Settings(plane="toy")
    with pytest.raises(ConfigError, match=r"expected one of auto, .*, toy, .*did you mean 'toy'"):
        load_settings({"plane": "toyy"}, {})
    runpy.run_module("kvferry.transport.registry", run_name="__main__")
    table = capsys.readouterr().out.splitlines()
    assert "| `toy` | same host | host | `pip install 'toy-planes'` | D reads `/proc/PID/mem` of P |" in table


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("no_such_module:SPEC", "does not load: ModuleNotFoundError"),
        ("test_toy_plane:ROOT", "is no PlaneSpec named 'broken'"),
        ("test_toy_plane:SPEC", "is no PlaneSpec named 'broken'"),
    ],
)
def test_a_broken_distribution_costs_its_own_plane_only(
    value: str, why: str, install: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    install(f"broken = {value}")
    with pytest.raises(PlaneUnavailableError, match=why):
        make_plane("broken", CONTEXT)
    with caplog.at_level(logging.WARNING):
        assert preferred_planes(CPU)[0] == "cma"
    assert sum("no data plane broken" in line for line in caplog.messages) == 1


def test_a_class_that_cannot_be_imported_is_named() -> None:
    spec = PlaneSpec("broken", "no_such_module:Plane", "same host", "does not exist", host=Use(1))
    with pytest.raises(PlaneUnavailableError, match="no_such_module:Plane cannot be imported"):
        spec.load()


def test_another_distribution_cannot_replace_one_of_ours(install: Callable[[str], None]) -> None:
    install("cma = test_toy_plane:SPEC")
    assert plane_spec("cma").plane == "kvferry.transport.planes.cma:CmaPlane"
