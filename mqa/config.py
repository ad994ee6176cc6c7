"""Settings: every environment variable, and the SM count and PDL switch of each device.

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

import torch

_MIB = 1 << 20
_FALLBACKS = ("warn", "error", "silent")

_num_sms: dict[torch.device, int] = {}
_pdl: dict[torch.device, bool] = {}


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


def get_num_sms(device: torch.device | str | int | None = None) -> int:
    """SMs that schedules are made for on `device` (default: the current CUDA device, else the CPU).

    A CUDA device counts all of its multiprocessors and a CPU counts 1, unless `set_num_sms` said
    otherwise.
    """
    where = _resolve(device)
    if where in _num_sms:
        return _num_sms[where]
    if where.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(where).multi_processor_count


def set_num_sms(num_sms: int, device: torch.device | str | int | None = None) -> None:
    """Make schedules on `device` for `num_sms` SMs (at least 1), to leave some to other work.

    Raises TypeError unless `num_sms` is an int, ValueError if it is below 1.
    """
    if isinstance(num_sms, bool) or not isinstance(num_sms, int):
        raise TypeError(f"set_num_sms: num_sms={num_sms!r}, expected an int")
    if num_sms < 1:
        raise ValueError(f"set_num_sms: num_sms={num_sms}, expected at least 1")
    _num_sms[_resolve(device)] = num_sms


def get_pdl(device: torch.device | str | int | None = None) -> bool:
    """Whether launches on `device` use programmatic dependent launch (default: no)."""
    return _pdl.get(_resolve(device), False)


def set_pdl(flag: bool, device: torch.device | str | int | None = None) -> None:  # noqa: FBT001
    """Switch programmatic dependent launch on `device`; TypeError unless `flag` is a bool."""
    if not isinstance(flag, bool):
        raise TypeError(f"set_pdl: flag={flag!r}, expected a bool")
    _pdl[_resolve(device)] = flag


def _resolve(device: torch.device | str | int | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    where = torch.device(device)
    if where.type == "cuda" and where.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return where
