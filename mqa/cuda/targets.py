"""What kernels are compiled for: the GPU that runs them, or what the environment says.

Hopper's and Blackwell's kernels use what one GPU or one family of GPUs has (`sm_90a`, `sm_100f`).
Portable ones use nothing that compute capability 8.0 lacks, nor what such targets add (`wgmma`,
`tcgen05`, block-scaled `mma`, registers that move between warps): they are compiled for the plain
target of the GPU at hand, of which later minor versions run the same binary, or to PTX that its
driver assembles.
"""

from __future__ import annotations

import re

import torch

from mqa import config
from mqa.cuda import compiler
from mqa.cuda.plan import Kernel

FIRST_PORTABLE = 80
"""The least compute capability, times 10, that portable kernels run on."""
_FIRST_DEPENDENT = 90
"""That from which on a kernel can wait for the one before it."""


def of(kernel: Kernel, device: torch.device | int) -> str:
    """What `kernel` is compiled for on `device`: `sm_90a`, or `compute_80` for PTX alone."""
    return portable(device) if kernel.portable else architecture(device)


def number(arch: str) -> int:
    """Compute capability times 10: 80 of `sm_80`, 90 of `sm_90a`, 120 of `compute_120`."""
    return int(re.sub(r"\D", "", arch))


def waits(arch: str) -> bool:
    """Whether kernels compiled for `arch` wait for the grids that they depend on. Others would read
    what is not yet written if they were launched before those are complete."""
    return number(arch) >= _FIRST_DEPENDENT


def architecture(device: torch.device | int) -> str:
    """What kernels of one architecture are compiled for: what MQA_ARCH says, else of compute
    capability 10.x the features of the whole family, so that one binary serves all of it, else
    those of that very architecture."""
    chosen = config.arch()
    if chosen is not None:
        return chosen
    major, minor = torch.cuda.get_device_capability(device)
    return "sm_100f" if major == 10 else f"sm_{major}{minor}a"


def misfit(device: torch.device | int) -> str | None:
    """Why what MQA_ARCH says does not run on `device`, None if it does or nothing is said: a
    binary of `sm_100a` runs on 10.0 alone, one of `sm_100f` on 10.0 and later ones of 10.x."""
    chosen = config.arch()
    if chosen is None:
        return None
    found = torch.cuda.get_device_capability(device)
    major, minor = int(chosen[3:-2]), int(chosen[-2])
    family = chosen.endswith("f") and found[0] == major and found[1] >= minor
    if family or found == (major, minor):
        return None
    return f"MQA_ARCH={chosen} does not run on compute capability {found[0]}.{found[1]}"


def portable(device: torch.device | int) -> str:
    """What portable kernels are compiled for: what MQA_PORTABLE_ARCH says, else the device's plain
    target, else, of a GPU that this NVRTC does not know, PTX of the newest that it does."""
    chosen = config.portable_arch()
    if chosen is not None:
        return chosen
    has, known = _capability(device), compiler.architectures()
    if has in known:
        return f"sm_{has}"
    return f"compute_{max(other for other in known if other <= has)}"


def portable_misfit(device: torch.device | int) -> str | None:
    """Why portable kernels cannot be compiled for `device` or as MQA_PORTABLE_ARCH says, None if
    they can. PTX runs on its own compute capability and on all later ones."""
    if compiler.unavailable() is not None:
        return None  # which is a reason of its own
    chosen, has, known = config.portable_arch(), _capability(device), compiler.architectures()
    release = ".".join(map(str, compiler.release()))
    if has < FIRST_PORTABLE:
        return f"portable kernels need compute capability {FIRST_PORTABLE / 10} or newer"
    if chosen is None:
        if min(known) <= has:
            return None
        return f"NVRTC {release} compiles for compute capability {min(known) / 10} and newer only"
    if not FIRST_PORTABLE <= number(chosen) <= has:
        on = f"compute capability {has / 10}"
        return f"MQA_PORTABLE_ARCH={chosen} does not run on {on}, only compute_80 to compute_{has}"
    if number(chosen) not in known:
        names = ", ".join(f"compute_{one}" for one in known if FIRST_PORTABLE <= one <= has)
        return f"MQA_PORTABLE_ARCH={chosen} is none that NVRTC {release} compiles to: {names}"
    return None


def _capability(device: torch.device | int) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
