"""Facts about the machine and the software, for `mqa doctor` and for every report."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import mqa
from mqa import config
from mqa.cuda import compiler, targets, variants

_GIB = 1 << 30
_PACKAGES = (
    "mqa-logits",
    "torch",
    "numpy",
    "cuda-python",
    "nvidia-cuda-nvrtc",
    "nvidia-cuda-runtime",
    "nvidia-cuda-cccl",
)


def machine() -> dict[str, Any]:
    """Operating system, CPU, memory and GPUs, ready for JSON."""
    return {
        "os": platform.platform(),
        "cpu": _cpu_model(),
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "memory_gib": memory_gib(),
        "gpus": gpus(),
    }


def versions() -> dict[str, str | None]:
    """Python and packages; None for those that are not installed."""
    found: dict[str, str | None] = {"mqa": mqa.__version__, "python": platform.python_version()}
    return found | {name: installed(name) for name in _PACKAGES}


def installed(distribution: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def kernels() -> str:
    """Short digest of the CUDA sources: reports with the same one measured the same kernels."""
    return compiler.sources_digest()[:12]


def commit() -> str | None:
    """What git calls the checkout that mqa is imported from; None if it is none."""
    root = Path(mqa.__file__).resolve().parent.parent
    if not (root / ".git").exists():  # Else git would name a repository somewhere above.
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
    return _said(command) or None


def gpus() -> list[dict[str, Any]]:
    """Name, capability and memory of each GPU that torch sees."""
    found = []
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        found.append(
            {
                "name": facts.name,
                "capability": f"{facts.major}.{facts.minor}",
                "sms": facts.multi_processor_count,
                "memory_gib": round(facts.total_memory / _GIB, 1),
            }
        )
    return found


def driver() -> str | None:
    """Version of the NVIDIA driver, or None."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    lines = _said(command).split()
    return lines[0] if lines else None


def summary(device: torch.device) -> dict[str, object]:
    """What the head of a table says: what was measured, where, with what. None where unknown."""
    on_gpu = device.type == "cuda"
    gpu = gpus()[device.index or 0] if on_gpu else {}
    return {
        "device": gpu.get("name") or _cpu_model(),
        "compute capability": gpu.get("capability"),
        "SMs": gpu.get("sms"),
        "mqa": mqa.__version__,
        "commit": commit(),
        "kernels": kernels(),
        "compiled for": _own_target(device),
        "portable kernels compiled for": _portable_target(device),
        "NVRTC options": shlex.join(config.nvrtc_options()),
        "torch": torch.__version__,
        "driver": driver() if on_gpu else None,
        "NVRTC": installed("nvidia-cuda-nvrtc"),
    }


def _own_target(device: torch.device) -> str | None:
    """What kernels of one architecture are compiled for; None where there are none."""
    if device.type != "cuda":
        return None
    arch = targets.architecture(device)
    return arch if arch in variants.REGISTRY or arch in variants.ALSO else None


def _portable_target(device: torch.device) -> str | None:
    if device.type != "cuda" or compiler.unavailable() or targets.portable_misfit(device):
        return None
    return targets.portable(device)


def without_paths(text: str) -> str:
    """`text`, an error's, without the folders of this machine: what reports say, people send."""
    folders = {
        compiler.sources(): "csrc",
        Path(mqa.__file__).resolve().parent: "mqa",
        Path(sys.prefix): "python",
        Path.cwd(): ".",
        Path(os.path.expanduser("~")): "~",
    }
    for folder, name in sorted(folders.items(), key=lambda one: -len(str(one[0]))):
        if len(folder.parts) < 2:  # the root is in every path
            continue
        text = re.sub(re.escape(str(folder)) + r"(?=/|\s|$)", name, text)
    return text


def usable_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def existing(folder: Path) -> Path:
    """The folder, or what of its parents there is."""
    return next(parent for parent in (folder, *folder.parents) if parent.exists())


def writable(folder: Path) -> bool:
    """Whether files can be written there; a folder that is missing will be made."""
    found = existing(folder)
    return found.is_dir() and os.access(found, os.W_OK | os.X_OK)


def memory_gib() -> float | None:
    """Physical memory, or None where the system doesn't say."""
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / _GIB, 1)
    except (AttributeError, OSError, ValueError):
        return None


def load() -> float | None:
    """Processes that want a core, averaged over the last minute; None where the system can't say.

    Other work on the same cores slows code with many short parallel loops out of proportion.
    """
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def _said(command: list[str]) -> str:
    """What a program prints; nothing where it is missing, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine()
