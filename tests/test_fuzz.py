"""Every fuzz target holds on its corpus, and on a few mutations of it. Long runs: `make fuzz`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TARGETS = sorted(Path(__file__).parent.parent.glob("fuzz/fuzz_*.py"))


@pytest.mark.parametrize("target", TARGETS, ids=lambda path: path.stem)
def test_holds(target: Path) -> None:
    command = [sys.executable, str(target), "--seconds", "0.2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert " hold" in done.stdout
    assert not done.stdout.startswith(f"{target.stem.removeprefix('fuzz_')}: 0 inputs")
