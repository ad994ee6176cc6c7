"""Errors and warnings that callers may want to catch by type."""

from __future__ import annotations


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
