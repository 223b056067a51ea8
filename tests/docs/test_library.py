"""The code of docs/library.md, as it stands there."""

from __future__ import annotations

import pytest

from tests.docs.pages import BLOCK, ROOT
from tests.support.fork_server import fork_server

((_, CODE),) = [found for found in BLOCK.findall((ROOT / "docs" / "library.md").read_text()) if found[0] == "python"]
WRONG = {"a byte of D is another": ("both = ", "d.cache[5, 1, 9, 3] += 1\nboth = "), "": ("", "")}


@pytest.mark.parametrize("fault", WRONG)
def test_the_code_runs(fault: str) -> None:
    done = fork_server().run("-c", CODE.replace(*WRONG[fault], 1), timeout=800)
    if fault:
        assert "AssertionError" in done.stderr
    else:
        assert (done.returncode, done.stdout) == (0, "40 tokens handed over\n"), done.stderr
    assert len(CODE.splitlines()) < 50
