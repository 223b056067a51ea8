"""Triton decides at import whether it interprets, so tests of kernels run each in a process of its own."""

from __future__ import annotations

from typing import Any

from tests.support.fork_server import fork_server

PRELUDE = """
import os, sys
assert "triton" not in sys.modules, "it has decided"
"""


def python(script: str, *arguments: str, interpret: bool) -> list[list[str]]:
    """Words of each line that the script prints."""
    choice = 'os.environ["TRITON_INTERPRET"] = "1"' if interpret else 'os.environ.pop("TRITON_INTERPRET", None)'
    done = fork_server().run("-c", f"{PRELUDE}{choice}\n{script}", *arguments, timeout=800)
    assert done.returncode == 0, done.stderr[-4000:]
    return [line.split() for line in done.stdout.splitlines()]


def ptx(kernel: Any, constants: tuple[object, ...], num_warps: int, capability: int = 90) -> str:
    """What Triton makes of a kernel over one array of int64, for a GPU that need not be there. The constants are in the
    order of the kernel's."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = [param.name for param in kernel.params if param.is_constexpr]
    numbers = [param for param in kernel.params if param.annotation_type]
    assert all(param.do_not_specialize for param in numbers), "a peer's numbers would make it compile again"
    types = {param.name: "constexpr" if param.is_constexpr else "*i64" for param in kernel.params}
    types |= {param.name: param.annotation_type for param in numbers}
    source = ASTSource(fn=kernel, signature=types, constexprs=dict(zip(names, constants, strict=True)))
    target = GPUTarget("cuda", capability, 32)
    return str(triton.compile(source, target=target, options={"num_warps": num_warps}).asm["ptx"])
