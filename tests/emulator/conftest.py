"""What tests of the emulator share."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for ptx_kernels


@pytest.fixture
def assembles(tmp_path: Path) -> Callable[[list[str]], None]:
    """Asserts that ptxas takes kernels `k` of modules that have the header of `ptx_kernels`."""
    if shutil.which("ptxas") is None:
        pytest.skip("ptxas is not installed")
    from ptx_kernels import HEADER

    def assemble(texts: list[str], declarations: str = "") -> None:
        parts = [HEADER, declarations]
        for i, text in enumerate(texts):
            body = text.removeprefix(HEADER).removeprefix(declarations)
            parts.append(body.replace(".entry k(", f".entry k{i}("))
        file = tmp_path / "all.ptx"
        file.write_text("".join(parts))
        command = ["ptxas", "-arch=sm_90a", "-o", str(tmp_path / "all.cubin"), str(file)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    return assemble
