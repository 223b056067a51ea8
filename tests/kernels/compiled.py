"""What Triton makes of a kernel over one array of int64, for a GPU that need not be there."""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


def ptx(kernel: Any, constants: tuple[object, ...], num_warps: int, capability: int = 90) -> str:
    """PTX; the constants are in the order of the kernel's."""
    names = [param.name for param in kernel.params if param.is_constexpr]
    numbers = [param for param in kernel.params if param.annotation_type]
    assert all(param.do_not_specialize for param in numbers), "a peer's numbers would make it compile again"
    types = {param.name: "constexpr" if param.is_constexpr else "*i64" for param in kernel.params}
    types |= {param.name: param.annotation_type for param in numbers}
    source = ASTSource(fn=kernel, signature=types, constexprs=dict(zip(names, constants, strict=True)))
    target = GPUTarget("cuda", capability, 32)
    return str(triton.compile(source, target=target, options={"num_warps": num_warps}).asm["ptx"])
