"""Kernels of this library with one mistake each, made by editing their source."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from mqa.cuda import compiler
from mqa.cuda.compiler import Binary
from mqa.cuda.plan import Kernel
from mqa.emulator import Kind
from mqa.emulator.backend import ARCH


@dataclass(frozen=True)
class Mutant:
    """One edit of one file, and what is to be found."""

    name: str
    file: str
    before: str
    after: str
    kinds: tuple[Kind, ...] = ()
    """Reports that name the mistake; none: a change that is none."""
    says: str = ""
    """What the report has to name."""


def compile_mutant(mutant: Mutant, kernel: Kernel, folder: Path) -> Binary:
    """The kernel with the edit, which has to fit exactly once."""
    sources = folder / "csrc"
    shutil.copytree(compiler.sources(), sources)
    path = sources / mutant.file
    text = path.read_text()
    if text.count(mutant.before) != 1:
        raise ValueError(f"{mutant.name}: {text.count(mutant.before)} places, expected 1")
    path.write_text(text.replace(mutant.before, mutant.after))
    original = compiler.sources
    try:
        compiler.sources = lambda: sources  # type: ignore[assignment]
        return compiler.compile_kernel(kernel, ARCH)
    finally:
        compiler.sources = original
