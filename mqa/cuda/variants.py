"""Which kernels there are, an architecture at a time: for tools that compile ahead."""

from __future__ import annotations

from collections.abc import Callable

from mqa.cuda import portable, sm90, sm100
from mqa.cuda.plan import Kernel

PORTABLE = "sm_80"
"""Of the oldest GPUs that portable kernels are for."""
REGISTRY: dict[str, Callable[[bool], tuple[Kernel, ...]]] = {
    "sm_100f": lambda every: sm100.kernels(every=every),
    "sm_90a": lambda every: sm90.kernels(every=every),
    PORTABLE: lambda every: portable.kernels(every=every),
}
"""Architecture → its kernels: all of them, or (False) the set that covers every pair of choices.
What kernels are compiled for where MQA_ARCH says nothing."""

_CAPABILITIES = (80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121)
ALSO = {
    "sm_100a": "sm_100f",
    "sm_103a": "sm_100f",
    **{f"{kind}_{number}": PORTABLE for kind in ("sm", "compute") for number in _CAPABILITIES},
}
"""Architectures that have the kernels of another one: one GPU of a family, targets of portable
kernels, and what these become PTX of (MQA_PORTABLE_ARCH)."""


def kernels(arch: str, *, every: bool = False) -> tuple[Kernel, ...]:
    """Kernels compiled for `arch`: a covering set, or `every` one that a call can reach.

    Raises `ValueError` for an architecture that has none.
    """
    same = ALSO.get(arch, arch)
    if same not in REGISTRY:
        also = {name for name, other in ALSO.items() if other in REGISTRY}
        known = ", ".join(sorted({*REGISTRY} | also)) or "none in this version"
        raise ValueError(f"arch={arch!r}, expected one of: {known}")
    return REGISTRY[same](every)
