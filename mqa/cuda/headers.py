"""Where the CUDA headers are: in wheels, else in a toolkit that the environment names."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mqa import config
from mqa.errors import CompilerUnavailableError

INSTALL = "pip install 'mqa-logits[cuda]'"
_NEEDED = ("cuda_bf16.h", "cuda/std/cstdint")
_WHEELS = ("nvidia-cuda-runtime", "nvidia-cuda-cccl")
_TELLING = (
    "../version.json",
    "cuda_runtime_api.h",
    "cuda_bf16.hpp",
    "cuda_fp8.hpp",
    "cuda/std/__cccl/version.h",
    "cccl/cuda/std/__cccl/version.h",
)
"""Files that tell one release from another; a toolkit's parts have versions of their own."""


@dataclass(frozen=True, slots=True)
class Headers:
    """CUDA headers found on this machine."""

    directories: tuple[Path, ...]
    """For the include path, in order."""
    identity: str
    """Differs where their contents may differ."""


def find() -> Headers:
    """The CUDA headers of wheels, else those of a toolkit; never parts of both, which clash.

    Raises `CompilerUnavailableError` where neither is whole.
    """
    looked = []
    for root in _roots():
        directories = (root, root / "cccl")
        missing = [name for name in _NEEDED if not _is_in(directories, name)]
        if not missing:
            return Headers(directories, f"{_wheels()} {_contents(root)}")
        looked.append(f"  {root}: no {' and no '.join(missing)}")
    if not config.cuda_homes():
        looked.append("  CUDA_HOME and CUDA_PATH: not set")
    raise CompilerUnavailableError(
        "\n".join(["CUDA headers not found, looked in", *looked, f"To install them: {INSTALL}"])
    )


def _roots() -> Iterator[Path]:
    """Include directories worth a look, best first."""
    wheels = importlib.util.find_spec("nvidia")  # Found without importing it.
    for folder in (wheels and wheels.submodule_search_locations) or ():
        yield from sorted(Path(folder).glob("cu[0-9]*/include"), reverse=True)
    for home in config.cuda_homes():
        yield home / "include"


def _is_in(directories: tuple[Path, ...], name: str) -> bool:
    return any((directory / name).is_file() for directory in directories)


def _wheels() -> str:
    """Names and versions of the wheels with headers that are installed."""
    installed = []
    for name in _WHEELS:
        try:
            installed.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(installed)


def _contents(root: Path) -> str:
    """Digest of the files that tell one release from another."""
    digest = hashlib.sha256()
    for path in (root / name for name in _TELLING):
        content = path.read_bytes() if path.is_file() else b""
        digest.update(hashlib.sha256(content).digest())
    return digest.hexdigest()
