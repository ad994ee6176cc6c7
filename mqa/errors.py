"""Errors and warnings that callers may want to catch by type."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType


class BackendUnavailableError(RuntimeError):
    """No backend, or not the one asked for, can run this call on this device.

    The message lists every reason of every backend considered and names those that can.
    """


class FallbackWarning(UserWarning):
    """The slow reference runs on a GPU because no other backend accepts the call."""


class CompilerUnavailableError(RuntimeError):
    """NVRTC or the CUDA headers are missing; the message says where they were looked for."""


class CompileError(RuntimeError):
    """A kernel does not compile.

    The message has the kernel with its template arguments, the architecture, the options, the
    source lines that the compiler refers to, and its log.
    """


class CacheWarning(UserWarning):
    """Compiled kernels cannot be written to disk and are kept in this process only."""


def callers_level() -> int:
    """The `stacklevel` that makes a warning point at the code that called this package."""
    home, level = str(Path(__file__).parent), 1
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(home):
        frame, level = frame.f_back, level + 1
    return level
