"""What tests of the emulator share."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
# For ptx_kernels, and for paged_cases and schedule_contents.
sys.path[:0] = [str(HERE), str(HERE.parent / "cuda")]


@pytest.fixture
def assembles(tmp_path: Path) -> Callable[[list[str]], None]:
    """Asserts that ptxas takes kernels `k` of modules that have a header of `ptx_kernels`, for the
    target that each names."""
    if shutil.which("ptxas") is None:
        pytest.skip("ptxas is not installed")
    from ptx_kernels import header

    def assemble(texts: list[str], declarations: str = "") -> None:
        modules: dict[str, list[str]] = {}
        for i, text in enumerate(texts):
            (target,) = re.findall(r"^\.target (\w+)", text, re.MULTILINE)
            parts = modules.setdefault(target, [header(target), declarations])
            body = text.removeprefix(header(target)).removeprefix(declarations)
            parts.append(body.replace(".entry k(", f".entry k{i}("))
        for target, parts in modules.items():
            file = tmp_path / f"{target}.ptx"
            file.write_text("".join(parts))
            command = ["ptxas", f"-arch={target}", "-o", str(tmp_path / "all.cubin"), str(file)]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr

    return assemble
