"""``sum64`` in Triton against the oracle and the host implementation: in the interpreter, and compiled for a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.checksum_pages import found_on
from tests.kernels.triton_process import python

INTERPRETED = """
import torch
from tests.kernels.checksum_cases import SIZES
from tests.kernels.checksum_pages import found_on

for size in SIZES:
    for sms in (None, 2):
        print(*found_on(torch.device("cpu"), *size, sms))
"""
COMPILED = """
import re
import triton.language as tl
from tests.kernels.compiled import ptx
from kvferry.kernels.checksum_triton import _LANES, _copy_kernel, _finish_kernel
from kvferry.kernels.paged_copy_triton import ALL_SMS, tile_shape

for dtype, word, align in ((tl.int64, 8, 16), (tl.int64, 8, 8), (tl.int32, 4, 4), (tl.int16, 2, 2), (tl.int8, 1, 1)):
    constants = dtype, word, align, align // word, *tile_shape(512 // word, word, ALL_SMS), True, _LANES
    code = ptx(_copy_kernel, constants, ALL_SMS.num_warps)
    stores = set(re.findall(r"st\\.global[.\\w]*", code))
    print(align, *sorted(stores), *re.findall(r"\\b(?:atom|red)\\.(\\S*add\\S*)", code))
ptx(_finish_kernel, (_LANES,), 1)
"""
NO_FAULT = ["True", "0", "0", "0", "1", "1", "1"]


def test_kernels_in_the_interpreter_agree_with_oracle_and_host_and_find_faults() -> None:
    assert python(INTERPRETED, interpret=True) == [NO_FAULT] * 14


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("sms", [None, 2])
def test_kernels_on_a_gpu_agree_with_oracle_and_host_and_find_faults(sms: int | None) -> None:
    for size in [(1, 1, 1, 13), (3, 2, 40, 512), (2, 1, 33, 24), (4, 8, 1000, 512)]:
        assert [str(value) for value in found_on(torch.device("cuda", 0), *size, sms)] == NO_FAULT, size


def test_compiled_for_a_gpu_it_stores_as_wide_as_without_checksums() -> None:
    """And each program adds one number, without a fence."""
    stores = {16: "st.global.v2.b64", 8: "st.global.b64", 4: "st.global.b32", 2: "st.global.b16", 1: "st.global.b8"}
    add = "global.gpu.relaxed.add.u64"
    assert python(COMPILED, interpret=False) == [[str(align), store, add] for align, store in stores.items()]
