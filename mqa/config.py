"""Settings: every environment variable that is ours.

Variables are read once, at first use, so that they can be set after `import mqa`.

| variable | meaning |
| --- | --- |
| `MQA_BACKEND` | name of the backend to use where a call names none |
| `MQA_FALLBACK` | `warn` (default), `error` or `silent`: the reference would run on a GPU |
| `MQA_DEBUG` | `1`: check the values of GPU tensors too (synchronises) |
| `MQA_REFERENCE_BYTES` | extra bytes that the reference may use on a CPU, default 64 MiB |
"""

from __future__ import annotations

import functools
import os

_MIB = 1 << 20
_FALLBACKS = ("warn", "error", "silent")


@functools.cache
def backend_name() -> str | None:
    return os.environ.get("MQA_BACKEND") or None


@functools.cache
def fallback() -> str:
    policy = os.environ.get("MQA_FALLBACK", "warn")
    if policy not in _FALLBACKS:
        raise ValueError(f"MQA_FALLBACK={policy!r}, expected one of {', '.join(_FALLBACKS)}")
    return policy


@functools.cache
def debug() -> bool:
    flag = os.environ.get("MQA_DEBUG", "0")
    if flag not in ("0", "1"):
        raise ValueError(f"MQA_DEBUG={flag!r}, expected 0 or 1")
    return flag == "1"


@functools.cache
def reference_bytes() -> int:
    """Bound on the reference's extra memory on a CPU; no more is used than fits in caches."""
    text = os.environ.get("MQA_REFERENCE_BYTES")
    if text is None:
        return 64 * _MIB
    if not (text.isascii() and text.isdigit()) or int(text) < _MIB:
        raise ValueError(f"MQA_REFERENCE_BYTES={text!r}, expected an integer, at least {_MIB}")
    return int(text)


def reload() -> None:
    """Forget what was read, so that the next use reads the environment again."""
    for read in (backend_name, fallback, debug, reference_bytes):
        read.cache_clear()
