"""The two ways to launch a compiled kernel: by the driver's call, and by Triton's own launcher.

On a GPU all cases of the kernels that ``launch`` launches run both ways. Without one, a kernel of this file shows which
way each launch goes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvferry.kernels import launch
from kvferry.kernels.launch import variant_of
from kvferry.transport import cuda
from tests.kernels import convert_cases, paged_copy_cases, paged_parts, zero_blocks_cases
from tests.kernels.triton_process import python
from tests.support.inside import use_triton_launcher_only

GPU = torch.device("cuda", 0)
PLAIN = {
    "shared": 512, "num_warps": 4, "num_ctas": 1, "global_scratch_size": 0, "profile_scratch_size": 0,
    "launch_cooperative_grid": False, "launch_pdl": False,
}  # fmt: skip
"""Metadata of a kernel that takes nothing but its arguments."""
SWITCH = """
import importlib, os
from kvferry.kernels import launch
from tests.support.inside import use_triton_launcher_only

os.environ.pop("KVFERRY_TRITON_LAUNCHER", None)
for value in (None, "", "0", "1"):
    os.environ |= {} if value is None else {"KVFERRY_TRITON_LAUNCHER": value}
    importlib.reload(launch)  # it reads the variable at its import
    print(repr(value), use_triton_launcher_only(True), use_triton_launcher_only(False))
"""


@pytest.fixture(autouse=True)
def default_launcher() -> Iterator[None]:
    before = use_triton_launcher_only(False)
    yield
    use_triton_launcher_only(before)


class Kernel:
    """Stands in for a kernel of Triton's, and for the buffers and table of its launches. ``launches``: which way each
    one went, with its programs and arguments."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, metadata: Mapping[str, object]) -> None:
        self.launches: list[tuple[object, ...]] = []
        self._compiled = SimpleNamespace(metadata=SimpleNamespace(**metadata), function=7)
        buffers = SimpleNamespace(launch=self._direct)
        monkeypatch.setattr(launch, "stream_buffers", lambda device: buffers)
        monkeypatch.setattr(cuda, "device_guard", lambda device: nullcontext())
        self.table: Any = SimpleNamespace(on_device=lambda buffers: ("tensor", 4096))

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def run(*arguments: object, **options: object) -> Any:
            self.launches.append(("triton", grid, arguments, options))
            return self._compiled

        return run

    def _direct(self, kernel: Any, num_programs: int, table: int, scalars: tuple[int, ...]) -> None:
        assert (kernel.function, kernel.shared_bytes, kernel.num_threads) == (7, 512, 128)
        self.launches.append(("direct", num_programs, table, scalars))

    def ways(self, count: int, scalars: tuple[int, ...] = (1, 2)) -> list[object]:
        """Which way so many launches go."""
        variant = variant_of(self, 4, ("constant",))
        for _ in range(count):
            variant(9, self.table, GPU, scalars)
        found = [way for way, *_ in self.launches]
        self.launches.clear()
        return found


def test_a_kernel_is_launched_directly_once_triton_has_compiled_it(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(monkeypatch, PLAIN)
    for _ in range(2):
        variant_of(kernel, 4, ("constant",))(9, kernel.table, GPU, (1, 2))
    assert kernel.launches == [
        ("triton", (9, 1, 1), ("tensor", 1, 2, "constant"), {"num_warps": 4}),
        ("direct", 9, 4096, (1, 2)),
    ]


def test_the_switch_sends_every_launch_through_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(monkeypatch, PLAIN)
    assert not use_triton_launcher_only(True)
    assert kernel.ways(3) == ["triton"] * 3
    assert use_triton_launcher_only(False)
    assert kernel.ways(3) == ["direct"] * 3, "it is compiled by now"
    use_triton_launcher_only(True)
    assert kernel.ways(2) == ["triton"] * 2


NEEDS: list[tuple[str, object]] = [
    ("global_scratch_size", 128), ("profile_scratch_size", 128), ("num_ctas", 2), ("launch_cooperative_grid", True),
    ("launch_pdl", True), ("instrumentation_mode", "gsan"), ("global_scratch_size", None),
    ("profile_scratch_size", None),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), NEEDS)
def test_a_kernel_that_needs_more_is_launched_by_triton(
    monkeypatch: pytest.MonkeyPatch, field: str, value: object
) -> None:
    """``None``: the metadata of this Triton have no such field; it may pass arguments in another way."""
    metadata = {name: value for name, value in (PLAIN | {field: value}).items() if value is not None}
    assert Kernel(monkeypatch, metadata).ways(3) == ["triton"] * 3


def test_a_kernel_of_many_arguments_is_launched_by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table, the scalars and two addresses of scratch memory."""
    assert Kernel(monkeypatch, PLAIN).ways(2, tuple(range(37))) == ["triton", "direct"]
    assert Kernel(monkeypatch, PLAIN).ways(2, tuple(range(38))) == ["triton", "triton"]


def test_the_environment_variable_sets_the_switch() -> None:
    found = python(SWITCH, interpret=False)
    assert found == [[value, str("1" in value), "True"] for value in ("None", "''", "'0'", "'1'")]


gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def direct_launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Programs of each launch that did not go through Triton, in order."""
    made: list[int] = []
    launch_kernel = cuda.launch_kernel

    def counted(function: int, num_programs: int, *arguments: Any) -> None:
        made.append(num_programs)
        launch_kernel(function, num_programs, *arguments)

    monkeypatch.setattr(cuda, "launch_kernel", counted)
    return made


RUNS = [
    (case_file, name, how)
    for case_file, ways in (
        (paged_copy_cases, ({}, {"sms": 3}, {"over_link": True})),
        (convert_cases, ({}, {"sms": 3})),
        (zero_blocks_cases, ({},)),
    )
    for name in case_file.CASES
    for how in ways
]


@gpu
@pytest.mark.parametrize(("cases", "name", "how"), RUNS)
def test_by_both_launchers_the_bytes_on_a_gpu_are_those_of_the_oracle(
    cases: Any, name: str, how: dict[str, Any], direct_launches: list[int]
) -> None:
    """By all SMs, by a few, and as if from another GPU."""
    use_triton_launcher_only(True)
    assert cases.differing(cases.CASES[name], GPU, **how) == 0
    assert not direct_launches
    use_triton_launcher_only(False)
    for _ in range(2):  # Triton launches what it compiles for the first time
        direct_launches.clear()
        assert cases.differing(cases.CASES[name], GPU, **how) == 0
    assert len(direct_launches) == 1, "kernels of this Triton are launched by Triton alone"


@gpu
@pytest.mark.parametrize("number", range(4))
def test_parts_of_pages_by_both_launchers_on_a_gpu(number: int, direct_launches: list[int]) -> None:
    for only_triton in (True, False):
        use_triton_launcher_only(only_triton)
        assert paged_parts.differing(number, GPU) == (0, 0)
        assert bool(direct_launches) != only_triton


@gpu
def test_a_table_whose_place_on_a_gpu_was_given_away_is_uploaded_again() -> None:
    buffers, numbers = launch.stream_buffers(GPU), np.arange(100, dtype=np.int64)
    table = launch.DeviceTable(numbers[:60], numbers[60:])
    place, _ = table.on_device(buffers)
    assert place[:100].tolist() == numbers.tolist()
    assert table.on_device(buffers)[0] is place, "not again while it is there"
    for other in range(40):
        launch.DeviceTable(np.full(100, -other, dtype=np.int64)).on_device(buffers)
    assert place[:100].tolist() != numbers.tolist()
    assert table.on_device(buffers)[0][:100].tolist() == numbers.tolist()
