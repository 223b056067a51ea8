"""``make explore`` draws new examples, repeats a seed, ends in time, and does not pass over a failure."""

from __future__ import annotations

from pathlib import Path

from tests import explore
from tests.support.fork_server import fork_server

DRAWN = """
from hypothesis import given
from hypothesis import strategies as st

@given(st.integers(0, 1 << 60))
def test_drawn(number):
    with open({path!r}, "a") as file:
        print(number, file=file)
    {check}

def test_no_property():
    raise AssertionError("not of the property tests")
"""


def drawn(folder: Path, *options: str, check: str = "", status: int = 0) -> tuple[list[int], str]:
    """The examples of one run, and what it printed. ``options``: of ``explore.py``; none: a run of pytest alone."""
    path, file = folder / "examples", folder / "test_drawn.py"
    path.write_text("")
    (folder / "conftest.py").write_text("import tests.conftest\n")
    file.write_text(DRAWN.format(path=str(path), check=check))
    command = [explore.__file__, *options] if options else ["-m", "pytest", "-m", "hypothesis"]
    done = fork_server().run(*command, str(file), timeout=800)
    assert done.returncode == status, done.stdout + done.stderr
    return [int(line) for line in path.read_text().split()], done.stdout


def test_a_failure_ends_it_with_its_seed_and_its_example(tmp_path: Path) -> None:
    """Also in the round in which the time is over."""
    _, said = drawn(tmp_path, "--seconds", "0", "--seed", "7", check="assert number < 1 << 59", status=1)
    assert "make explore SEED=7" in said and "1 failed" in said and "reproduce_failure" in said
    assert f"number={1 << 59:_}" in said or f"number={1 << 59}" in said, "the smallest example that fails"
