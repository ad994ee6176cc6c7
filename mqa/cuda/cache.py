"""Compiled kernels: in memory, in directories that are only read, in one that is written.

A file of the cache is named after everything that its content follows from, so nothing in it ever
goes out of date: an edited source, another compiler or other headers have another name. Processes
that want the same kernel at the same time wait for the first. Whatever happens to the directory,
callers get their kernel: the disk only saves time.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import struct
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from mqa import config
from mqa.cuda import compiler, headers
from mqa.cuda.compiler import Binary
from mqa.cuda.plan import Kernel
from mqa.errors import CacheWarning, callers_level

try:
    import fcntl
except ImportError:  # Windows: two processes may compile the same kernel, and both are right.
    fcntl = None  # type: ignore[assignment]

LOCK_SECONDS = 300.0
"""How long to wait for another process that compiles the same kernel."""

_POLL_SECONDS = 0.02
_MAGIC = b"mqa-bin1"  # The last character is the version of the layout.
_SIZES = struct.Struct("<4Q")
"""A file is the magic, a SHA-256 of the rest, these sizes, and image, symbol, log and PTX."""

_guard = threading.Lock()
_binaries: dict[tuple[Kernel, str], Binary] = {}
_compiling: dict[tuple[Kernel, str], threading.Lock] = {}
_trouble: str | None = None
_told = False
_log = logging.getLogger("mqa")


def get(kernel: Kernel, arch: str) -> Binary:
    """The compiled kernel, from memory, from disk or from the compiler.

    The first call for a kernel reads its sources; later ones don't, and see no edits until
    `forget`. Raises what `compiler.compile_kernel` raises; a failure is not remembered.
    """
    binary = _binaries.get((kernel, arch))
    return _obtain(kernel, arch) if binary is None else binary


def find(kernel: Kernel, arch: str) -> Binary | None:
    """The compiled kernel if it is on disk; nothing is compiled."""
    name = key(kernel, arch)
    own = config.cache_dir()
    for folder in (*config.cache_path(), *([own] if own else [])):
        binary = read(folder, name)
        if binary is not None:
            return binary
    return None


def key(kernel: Kernel, arch: str) -> str:
    """Name of the kernel's file: a digest of all that its binary follows from.

    Where sources and headers lie is not part of it, so that a cache can move between machines;
    what they say is. All of `csrc` counts. A kernel that lies elsewhere counts with its own file,
    not with neighbours that it may include.
    """
    return keys([kernel], arch)[0]


def keys(kernels: Sequence[Kernel], arch: str) -> list[str]:
    """The same of many kernels, for which sources and headers are read once."""
    common, names = [*_surroundings(arch)], []
    for kernel in kernels:
        digest = hashlib.sha256()
        for part in (_MAGIC, *_asked(kernel), *common, *_own_source(kernel)):
            digest.update(struct.pack("<Q", len(part)) + part)
        names.append(digest.hexdigest())
    return names


def trouble() -> str | None:
    """Why this process could not write a kernel to disk; None if it never failed to."""
    return _trouble


def forget() -> None:
    """Start as a new process does: nothing in memory, no trouble seen."""
    global _trouble, _told
    with _guard:
        _binaries.clear()
        _trouble, _told = None, False


def _asked(kernel: Kernel) -> Iterator[bytes]:
    yield compiler.translation_unit(kernel).encode()
    yield str(kernel).encode()


def _surroundings(arch: str) -> Iterator[bytes]:
    """What every kernel for an architecture follows from."""
    yield "\n".join(compiler.flags(arch)).encode()
    yield compiler.identity().encode()
    yield headers.find().identity.encode()
    root = compiler.sources()
    for path in sorted(root.rglob("*.cuh")):
        if not path.is_file():
            continue
        yield path.relative_to(root).as_posix().encode()
        yield path.read_bytes()


def _own_source(kernel: Kernel) -> Iterator[bytes]:
    source = Path(kernel.source)
    if source.is_absolute() and source.is_file():
        yield source.read_bytes()


def _obtain(kernel: Kernel, arch: str) -> Binary:
    """Look on disk, else compile, once for all threads that ask meanwhile."""
    with _guard:
        lock = _compiling.setdefault((kernel, arch), threading.Lock())
    with lock:
        binary = _binaries.get((kernel, arch))
        if binary is None:
            binary = find(kernel, arch) or _make(kernel, arch)
            _binaries[kernel, arch] = binary
    _tell()
    return binary


def _make(kernel: Kernel, arch: str) -> Binary:
    """Compile and put on disk, unless another process does so meanwhile."""
    name = key(kernel, arch)
    folder = config.cache_dir()
    if folder is None:
        _complain("no home directory")
        return compiler.compile_kernel(kernel, arch)
    with _alone(folder / f"{name}.lock", kernel):
        binary = read(folder, name)
        if binary is None:
            begin = time.monotonic()
            binary = compiler.compile_kernel(kernel, arch)
            _log.info("compiled %s for %s in %.1f s", kernel, arch, time.monotonic() - begin)
            if key(kernel, arch) == name:  # Otherwise a source was edited under the compiler.
                write(folder, name, binary)
        return binary


@contextlib.contextmanager
def _alone(path: Path, kernel: Kernel) -> Iterator[None]:
    """Keep other processes waiting at the lock file `path`; do without where that can't be had."""
    handle = _locked(path, kernel)
    try:
        yield
    finally:
        if handle is not None:
            fcntl.flock(handle, fcntl.LOCK_UN)  # A forked child may have the file open still.
            os.close(handle)


def _locked(path: Path, kernel: Kernel) -> int | None:
    """The open, locked file. None where there are no locks, or its owner keeps it too long."""
    if fcntl is None:
        return None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDONLY | os.O_CREAT, 0o666)
    except OSError:
        return None  # Writing the kernel will fail as well, and say so.
    deadline, waiting = time.monotonic() + LOCK_SECONDS, False
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle
        except BlockingIOError:
            if not waiting:
                _log.info("waiting for another process that compiles %s", kernel)
            waiting = True
            if time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
                continue
        except OSError:
            pass  # A file system without locks.
        os.close(handle)
        return None


def read(folder: Path, name: str) -> Binary | None:
    """The kernel in that file; None if there is none, or not every byte of it is right."""
    try:
        content = (folder / f"{name}.bin").read_bytes()
    except OSError:
        return None
    return _unpacked(content, name)


def write(folder: Path, name: str, binary: Binary) -> None:
    """Put the whole file in place at once. Where that fails, say so once and go on."""
    temporary = folder / f".{name}.{secrets.token_hex(8)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, "xb") as file:
                file.write(_packed(binary, name))
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(folder / f"{name}.bin")
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        _complain(f"cannot write to {folder}: {error.strerror}")


def _packed(binary: Binary, name: str) -> bytes:
    parts = (binary.image, binary.symbol.encode(), binary.log.encode(), binary.ptx.encode())
    body = _SIZES.pack(*map(len, parts)) + b"".join(parts)
    return _MAGIC + _digest(name, body) + body


def _unpacked(content: bytes, name: str) -> Binary | None:
    head = len(_MAGIC) + hashlib.sha256().digest_size
    body = content[head:]
    if content[:head] != _MAGIC + _digest(name, body):
        return None
    parts, end = [], _SIZES.size
    for size in _SIZES.unpack_from(body):
        parts.append(body[end : end + size])
        end += size
    image, symbol, log, ptx = parts
    return Binary(image, symbol.decode(), log.decode(), ptx.decode())


def _digest(name: str, body: bytes) -> bytes:
    """Over the name too: a file copied to another kernel's name is not taken for its."""
    return hashlib.sha256(name.encode() + body).digest()


def _complain(reason: str) -> None:
    """Note that kernels are not kept."""
    global _trouble
    with _guard:
        if _trouble is None:
            _trouble = f"compiled kernels are kept in this process only: {reason}"


def _tell() -> None:
    """Warn of trouble, once in a process, when the kernel at hand is safe in memory."""
    global _told
    with _guard:
        if _told or _trouble is None:
            return
        _told = True
    message = f"{_trouble}. Set MQA_CACHE_DIR to a directory to keep them in"
    warnings.warn(message, CacheWarning, stacklevel=callers_level())
