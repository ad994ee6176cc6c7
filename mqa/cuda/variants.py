"""Which kernels there are, an architecture at a time: for tools that compile ahead."""

from __future__ import annotations

from collections.abc import Callable

from mqa.cuda import sm90, sm100
from mqa.cuda.plan import Kernel

REGISTRY: dict[str, Callable[[bool], tuple[Kernel, ...]]] = {
    "sm_100f": lambda every: sm100.kernels(every=every),
    "sm_90a": lambda every: sm90.kernels(every=every),
}
"""Architecture → its kernels: all of them, or (False) the set that covers every pair of choices.
What kernels are compiled for where MQA_ARCH says nothing."""

ALSO = {"sm_100a": "sm_100f", "sm_103a": "sm_100f"}
"""Architectures that have the kernels of another one: of one GPU alone, not of its family."""


def kernels(arch: str, *, every: bool = False) -> tuple[Kernel, ...]:
    """Kernels compiled for `arch`: a covering set, or `every` one that a call can reach.

    Raises `ValueError` for an architecture that has none.
    """
    same = ALSO.get(arch, arch)
    if same not in REGISTRY:
        also = (name for name, other in ALSO.items() if other in REGISTRY)
        known = ", ".join(sorted((*REGISTRY, *also))) or "none in this version"
        raise ValueError(f"arch={arch!r}, expected one of: {known}")
    return REGISTRY[same](every)
