"""`mqa doctor`: what this machine can run, and what to do about the rest."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import unquote, urlparse

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

import mqa
from mqa import config
from mqa.backends import BACKENDS
from mqa.cli import machine
from mqa.cli.console import one_line, print_whole, standard_output
from mqa.cuda import cache, compiler, targets, variants
from mqa.cuda.gpu import Gpu

Row = tuple[str, str]
_TOOLCHAIN = (
    "cuda-python",
    "nvidia-cuda-nvrtc",
    "nvidia-cuda-runtime",
    "nvidia-cuda-cccl",
)
_VARIABLES: tuple[tuple[str, Callable[[], object]], ...] = (
    ("MQA_BACKEND", config.backend_name),
    ("MQA_FALLBACK", config.fallback),
    ("MQA_DEBUG", config.debug),
    ("MQA_REFERENCE_BYTES", config.reference_bytes),
    ("MQA_CACHE_DIR", config.cache_dir),
    ("MQA_CACHE_PATH", lambda: os.pathsep.join(map(str, config.cache_path())) or None),
    ("MQA_ARCH", config.arch),
    ("MQA_PORTABLE_ARCH", config.portable_arch),
    ("MQA_NVRTC_OPTIONS", lambda: shlex.join(config.nvrtc_options()) or None),
)


def doctor() -> None:
    """Show the machine, the software and every backend: usable, or why not and what would help.

    Exits with 1 if something is wrong with the installation or a variable, or a GPU gets the slow
    reference though there are kernels for it; 0 otherwise: a machine without a GPU is fine.

    \b
    Example:
      mqa doctor
    """
    out = standard_output()
    _section(out, "machine", _machine_rows())
    _section(out, "software", _software_rows())
    _section(out, "CUDA toolchain", _toolchain_rows())
    _section(out, "compiled kernels", _cache_rows())
    _section(out, "backends, best first", _backend_rows())
    _section(out, "variables", _variable_rows())
    problems = [*collisions(), *_bad_variables(), *_without_kernels()]
    for problem in problems:
        print_whole(out, f"problem: {problem}", style="bold red")
    if problems:
        raise typer.Exit(1)
    print_whole(out, "no problems found", style="green")


def collisions() -> Iterator[str]:
    """What else answers to the name `mqa` here."""
    other = machine.installed("mqa")
    if other is not None:
        yield (
            f"another distribution named mqa ({other}) is installed and may hide this one: "
            "pip uninstall mqa && pip install --force-reinstall mqa-logits"
        )
    here = Path(mqa.__file__).resolve().parent
    home = _installed_at()
    if home is not None and home != here:
        yield f"mqa is imported from {here}, but mqa-logits is installed in {home}: check sys.path"


def _installed_at() -> Path | None:
    """Folder of the package that mqa-logits installed; None if it is not installed."""
    try:
        distribution = importlib.metadata.distribution("mqa-logits")
    except importlib.metadata.PackageNotFoundError:
        return None
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    if origin.get("dir_info", {}).get("editable"):
        return Path(unquote(urlparse(origin["url"]).path)).resolve() / "mqa"
    return Path(str(distribution.locate_file("mqa"))).resolve()


def _machine_rows() -> Iterator[Row]:
    facts = machine.machine()
    yield "system", facts["os"]
    yield "CPU", f"{facts['cpu']}, {facts['cores']} cores, {facts['cpu_capability']}"
    yield "memory", "unknown" if facts["memory_gib"] is None else f"{facts['memory_gib']} GiB"
    for gpu in facts["gpus"]:
        about = f"capability {gpu['capability']}, {gpu['sms']} SMs, {gpu['memory_gib']} GiB"
        yield "GPU", f"{gpu['name']}, {about}"
    if not facts["gpus"]:
        yield "GPU", "none that torch can use"
    yield "NVIDIA driver", machine.driver() or "none"


def _software_rows() -> Iterator[Row]:
    found = machine.versions()
    home = Path(mqa.__file__).resolve().parent
    installed = found["mqa-logits"]
    yield "mqa-logits", f"{mqa.__version__}, {home}{'' if installed else ' (not installed)'}"
    yield "Python", str(found["python"])
    cuda = torch.version.cuda
    yield "torch", f"{torch.__version__}, {f'CUDA {cuda}' if cuda else 'without CUDA'}"
    yield "numpy", str(found["numpy"])


def _toolchain_rows() -> Iterator[Row]:
    for name in _TOOLCHAIN:
        yield name, machine.installed(name) or "not installed"
    yield "nvcc", shutil.which("nvcc") or "not on PATH (not needed)"
    missing = compiler.unavailable()
    yield "compiler", _release(compiler.identity()) if missing is None else one_line(missing)


def _release(identity: str) -> str:
    """The line of NVRTC's identity that people know it by."""
    found = re.search(r"release .*", identity)
    return f"NVRTC, {found[0]}" if found else "NVRTC"


def _cache_rows() -> Iterator[Row]:
    yield "sources", f"{machine.kernels()}, {compiler.sources()}"
    wanted = _wanted()
    for folder in config.cache_path():
        yield "read first", f"{folder}: {', '.join(_contents(folder, wanted))}"
    own = config.cache_dir()
    if own is None:
        yield "read and written", "none: no home directory, and MQA_CACHE_DIR is not set"
    else:
        yield "read and written", f"{own}: {', '.join((*_contents(own, wanted), _access(own)))}"


def _wanted() -> dict[str, list[str]]:
    """For each architecture the names of its kernels' files; nothing without a compiler, or what
    it is to be told."""
    try:
        config.nvrtc_options()
        config.portable_arch()
    except ValueError:
        return {}  # the variables' section tells of it
    if compiler.unavailable() is not None:
        return {}
    own = _own_targets() if variants.PORTABLE in variants.REGISTRY else ()
    wanted = {*variants.REGISTRY, *own}
    return {arch: cache.keys(variants.kernels(arch, every=True), arch) for arch in sorted(wanted)}


def _own_targets() -> Iterator[str]:
    """What portable kernels are compiled for on this machine's GPUs."""
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        if not targets.portable_misfit(index):
            yield targets.portable(index)


def _contents(folder: Path, wanted: dict[str, list[str]]) -> Iterator[str]:
    sizes = [path.stat().st_size for path in folder.glob("*.bin")]
    yield f"{len(sizes)} compiled, {sum(sizes) / 2**20:.1f} MiB"
    for arch, names in wanted.items():
        present = sum((folder / f"{name}.bin").is_file() for name in names)
        yield f"{present} of {len(names)} kernels of {arch} present for this compiler"


def _access(folder: Path) -> str:
    """Whether kernels can be written there; a folder that is missing will be made."""
    if machine.writable(folder):
        return "writable"
    existing = machine.existing(folder)
    return f"not writable: kernels are compiled anew in each process ({existing})"


def _backend_rows() -> Iterator[Row]:
    for status in mqa.backends():
        yield status.name, "usable" if status.usable else f"not usable: {status.reason}"


def _variable_rows() -> Iterator[Row]:
    for name, read in _VARIABLES:
        try:
            value = read()
        except ValueError as error:
            yield name, str(error)
            continue
        origin = "set" if os.environ.get(name) else "default"
        shown = "none" if value is None else int(value) if isinstance(value, bool) else value
        yield name, f"{shown} ({origin})"


def _bad_variables() -> Iterator[str]:
    known = {status.name: status for status in mqa.backends()}
    for name, read in _VARIABLES:
        try:
            value = read()
        except ValueError as error:
            yield str(error)
            continue
        if name != "MQA_BACKEND" or value is None:
            continue
        if value not in known:
            yield f"MQA_BACKEND={value!r}, expected one of {', '.join(known)}"
        elif not known[str(value)].usable:
            yield f"MQA_BACKEND={value!r} is not usable here: {known[str(value)].reason}"


def _without_kernels() -> Iterator[str]:
    """Why the GPU at hand gets the reference, if one of its compute capability need not."""
    if not torch.cuda.is_available():
        return
    gpu = torch.cuda.current_device()
    capability = torch.cuda.get_device_capability(gpu)
    own = [one.name for one in BACKENDS if isinstance(one, Gpu) and one.takes(*capability)]
    reasons = {one.name: one.reason for one in mqa.backends() if one.name in own}
    if reasons and all(reasons.values()):
        told = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        yield f"calls on cuda:{gpu} get the slow reference: {told}"


def _section(out: Console, title: str, rows: Iterator[Row]) -> None:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.show_header = False
    table.add_column(style="cyan", no_wrap=True, min_width=20)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, Text(value))
    out.print(table)
    out.print()
