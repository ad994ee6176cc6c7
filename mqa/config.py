"""Settings: every environment variable that is ours.

Variables are read once, at first use, so that they can be set after `import mqa`.

| variable | meaning |
| --- | --- |
| `MQA_BACKEND` | name of the backend to use where a call names none |
| `MQA_FALLBACK` | `warn` (default), `error` or `silent`: the reference would run on a GPU |
| `MQA_DEBUG` | `1`: check the values of GPU tensors too (synchronises) |
| `MQA_REFERENCE_BYTES` | extra bytes that the reference may use on a CPU, default 64 MiB |
| `MQA_CACHE_DIR` | directory of compiled kernels, default `$XDG_CACHE_HOME/mqa` or `~/.cache/mqa` |
| `MQA_CACHE_PATH` | directories of compiled kernels that are only read, and read first |
| `MQA_ARCH` | what GPUs' kernels are compiled for, such as `sm_100a`; default: by the GPU |
| `MQA_PORTABLE_ARCH` | portable kernels become PTX of this, such as `compute_80` |
| `MQA_NVRTC_OPTIONS` | more options for NVRTC, such as `-G` or `-DNAME`; separated as in a shell |
"""

from __future__ import annotations

import functools
import os
import re
import shlex
from pathlib import Path

_MIB = 1 << 20
_FALLBACKS = ("warn", "error", "silent")


@functools.cache
def backend_name() -> str | None:
    return os.environ.get("MQA_BACKEND") or None


@functools.cache
def fallback() -> str:
    policy = os.environ.get("MQA_FALLBACK") or "warn"
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


@functools.cache
def cache_dir() -> Path | None:
    """Where compiled kernels are written; None where nothing is set and there is no home."""
    chosen = os.environ.get("MQA_CACHE_DIR")
    if chosen:
        return Path(chosen).absolute()
    caches = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(caches):  # The specification says to ignore a relative one.
        return Path(caches) / "mqa"
    try:
        return Path.home() / ".cache/mqa"
    except RuntimeError:
        return None


@functools.cache
def cache_path() -> tuple[Path, ...]:
    """Where compiled kernels are looked for first, and never written."""
    names = os.environ.get("MQA_CACHE_PATH", "").split(os.pathsep)
    return tuple(Path(name).absolute() for name in names if name)


@functools.cache
def arch() -> str | None:
    """What to compile for in place of what the GPU's compute capability says."""
    name = os.environ.get("MQA_ARCH") or None
    if name is not None and not re.fullmatch(r"sm_\d{2,3}[af]", name):
        wanted = "an architecture such as sm_100f or sm_103a"
        other = (
            "" if not re.fullmatch(r"sm_\d+", name) else "; of portable kernels: MQA_PORTABLE_ARCH"
        )
        raise ValueError(f"MQA_ARCH={name!r}, expected {wanted}{other}")
    return name


@functools.cache
def portable_arch() -> str | None:
    """What portable kernels are compiled to in place of a binary for the GPU at hand."""
    name = os.environ.get("MQA_PORTABLE_ARCH") or None
    if name is not None and not re.fullmatch(r"compute_\d{2,3}", name):
        plain = re.fullmatch(r"sm_(\d{2,3})", name)
        example = f"compute_{plain[1] if plain else 80}"
        raise ValueError(f"MQA_PORTABLE_ARCH={name!r}, expected a virtual one such as {example}")
    return name


@functools.cache
def nvrtc_options() -> tuple[str, ...]:
    text = os.environ.get("MQA_NVRTC_OPTIONS", "")
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        expected = "options separated as in a shell"
        raise ValueError(f"MQA_NVRTC_OPTIONS={text!r}, expected {expected}: {error}") from error


@functools.cache
def cuda_homes() -> tuple[Path, ...]:
    """CUDA toolkits that the environment names, in the variables that toolkits go by."""
    names = (os.environ.get(variable) for variable in ("CUDA_HOME", "CUDA_PATH"))
    return tuple(Path(name) for name in names if name)


_READS = (
    backend_name,
    fallback,
    debug,
    reference_bytes,
    cache_dir,
    cache_path,
    arch,
    portable_arch,
    nvrtc_options,
    cuda_homes,
)


def check() -> None:
    """Read every variable. Raises ValueError for the first that has a value it may not have."""
    for read in _READS:
        read()


_version = 0


def version() -> int:
    """Changes whenever settings may have changed."""
    return _version


def reload() -> None:
    """Forget what was read, so that the next use reads the environment again."""
    global _version
    _version += 1
    for read in _READS:
        read.cache_clear()
