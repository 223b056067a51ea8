"""What ``make test`` does when a part of it fails."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("fails", "status"), [("not nixl", 2), ("nixl and", 2), ("nothing", 0)])
def test_both_parts_run_whatever_becomes_of_the_other(tmp_path: Path, fails: str, status: int) -> None:
    runs, pytest_stand_in = tmp_path / "runs", tmp_path / "pytest"
    pytest_stand_in.write_text(
        f'#!/bin/sh\necho "$OMP_NUM_THREADS $2" >> {runs}\ncase "$2" in *"{fails}"*) exit 1;; esac\n'
    )
    pytest_stand_in.chmod(0o755)
    command = ["make", "--silent", "--assume-old=install", "test", f"PYTEST={pytest_stand_in}"]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, timeout=800, check=False).returncode == status
    assert sorted(runs.read_text().splitlines()) == ["1 nixl and not engines", "1 not engines and not nixl"]
