"""What callers set for a device: how many SMs schedules are made for, and dependent launch."""

from __future__ import annotations

import torch

from mqa import arguments

_num_sms: dict[torch.device, int] = {}
_pdl: dict[torch.device, bool] = {}
_version = 0


def version() -> int:
    """Changes whenever a setting of a device may have changed."""
    return _version


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
    """Use `num_sms` SMs of `device`, to leave the others to other work.

    Schedules made from then on have that many parts, and calls without a schedule launch that many
    blocks, in all threads and on all streams of the process. A call with a schedule launches as
    many as its schedule has parts. Graphs captured before keep what they captured.

    Raises TypeError unless `num_sms` is an int, ValueError unless it is in [1, 2^31 - 1].
    """
    _num_sms[_resolve(device)] = arguments.integer("num_sms", num_sms, least=1)
    _changed()


def get_pdl(device: torch.device | str | int | None = None) -> bool:
    """Whether launches on `device` use programmatic dependent launch (default: no)."""
    return _pdl.get(_resolve(device), False)


def set_pdl(flag: bool, device: torch.device | str | int | None = None) -> None:  # noqa: FBT001
    """Switch programmatic dependent launch on `device`; TypeError unless `flag` is a bool.

    Kernels launched from then on may start while the kernel before them on their stream still runs;
    they wait for its results before they read anything. In turn they let a dependent start early:
    a kernel of yours that is launched with the attribute right after one of these must execute
    `griddepcontrol.wait` before it touches the logits.
    """
    if not isinstance(flag, bool):
        raise TypeError(f"set_pdl: flag={flag!r}, expected a bool")
    _pdl[_resolve(device)] = flag
    _changed()


def _changed() -> None:
    global _version
    _version += 1


def _resolve(device: torch.device | str | int | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    where = arguments.device("device", device)
    if where.type != "cuda":
        return where
    there = torch.cuda.device_count()
    index: int | None = where.index
    if index is None and there:
        index = torch.cuda.current_device()
    if index is None or index >= there:
        arguments.reject("device", where, f"one of the {there} CUDA devices of this machine")
    return torch.device("cuda", index)
