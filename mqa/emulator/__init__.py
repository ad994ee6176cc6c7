"""Runs the PTX of kernels on a CPU, with real asynchrony and an adversarial scheduler.

`run` executes any kernel of PTX on CPU tensors; `mqa.fp8_fp4_mqa_logits(..., backend=
"sm90-emulated")` and its paged sister execute those of this library. See docs/emulator.md.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "BoundMap",
    "EmulationError",
    "Kind",
    "PtxError",
    "Report",
    "Summary",
    "run",
    "scheduled",
]

_HOMES = {
    "BoundMap": "executor",
    "EmulationError": "reports",
    "Kind": "reports",
    "PtxError": "parser",
    "Report": "reports",
    "Summary": "summary",
    "run": "executor",
    "scheduled": "backend",
}


def __getattr__(name: str) -> Any:
    """Loaded at first use: `import mqa` needs none of it."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
