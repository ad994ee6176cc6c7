"""The cache of compiled kernels: one compilation, no wrong binary, no failure of the disk seen."""

from __future__ import annotations

import errno
import fcntl
import functools
import os
import shutil
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mqa import config
from mqa.cuda import cache, compiler, headers
from mqa.cuda.compiler import Binary
from mqa.cuda.plan import Kernel
from mqa.errors import CacheWarning, CompileError

ARCH = "sm_90a"
SOURCE = "template <int kStep> __global__ void add(float* x) { x[threadIdx.x] += kStep; }\n"
ADD = Kernel("add.cuh", "add", ("1",))


@pytest.fixture(autouse=True)
def csrc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setenv: Callable[[str, str], None]
) -> Iterator[Path]:
    """Sources of our own, an empty cache on disk and none in memory."""
    root = tmp_path / "csrc"
    root.mkdir()
    (root / "add.cuh").write_text(SOURCE)
    monkeypatch.setattr(compiler, "sources", lambda: root)
    setenv("MQA_CACHE_DIR", str(tmp_path / "cache"))
    cache.forget()
    yield root
    cache.forget()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def _compiled_by(call: Callable[[], object]) -> int:
    before = compiler.compilations()
    call()
    return compiler.compilations() - before


def _get() -> Binary:
    return cache.get(ADD, ARCH)


def _files(directory: Path) -> list[Path]:
    """What is in a cache, lock files aside."""
    return sorted(path for path in directory.iterdir() if path.suffix != ".lock")


def test_a_warm_kernel_is_looked_up_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    binary = _get()
    monkeypatch.delattr(cache, "key")
    monkeypatch.delattr(cache, "_obtain")
    assert _get() is binary


def test_another_process_finds_the_same_binary_on_disk(directory: Path) -> None:
    assert cache.find(ADD, ARCH) is None
    binary = _get()
    cache.forget()
    assert _compiled_by(lambda: cache.find(ADD, ARCH)) == 0
    assert _compiled_by(_get) == 0
    assert _get() == binary
    assert _files(directory) == [directory / f"{cache.key(ADD, ARCH)}.bin"]


def test_read_only_directories_come_first_and_stay_as_they_are(
    directory: Path, tmp_path: Path, setenv: Callable[[str, str], None]
) -> None:
    binary = _get()
    shutil.move(directory, tmp_path / "image")
    (tmp_path / "image" / f"{cache.key(ADD, 'sm_80')}.bin").write_bytes(b"garbage")
    before = _files(tmp_path / "image")
    setenv("MQA_CACHE_PATH", os.pathsep.join(["", str(tmp_path / "none"), str(tmp_path / "image")]))
    cache.forget()
    assert _compiled_by(_get) == 0
    assert _get() == binary
    assert not directory.exists()
    assert _compiled_by(lambda: cache.get(ADD, "sm_80")) == 1
    assert _files(tmp_path / "image") == before
    assert len(_files(directory)) == 1


SPOILED: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda whole: b"",
    "garbage": lambda whole: b"garbage",
    "cut in the magic": lambda whole: whole[:7],
    "cut in the header": lambda whole: whole[:60],
    "cut at the end": lambda whole: whole[:-1],
    "longer": lambda whole: whole + b"\0",
    "one bit": lambda whole: whole[:200] + bytes([whole[200] ^ 1]) + whole[201:],
    "another version": lambda whole: b"mqa-bin0" + whole[8:],
    "sizes swapped": lambda whole: whole[:40] + whole[48:56] + whole[40:48] + whole[56:],
}


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED)
def test_a_bad_file_is_compiled_again_and_replaced(
    directory: Path, spoil: Callable[[bytes], bytes]
) -> None:
    binary = _get()
    (file,) = _files(directory)
    file.write_bytes(spoil(file.read_bytes()))
    cache.forget()
    assert _compiled_by(_get) == 1
    assert _get().image == binary.image
    cache.forget()
    assert _compiled_by(_get) == 0


def test_a_file_under_the_name_of_another_kernel_is_not_taken(directory: Path) -> None:
    _get()
    (file,) = _files(directory)
    other = Kernel("add.cuh", "add", ("2",))
    shutil.copy(file, directory / f"{cache.key(other, ARCH)}.bin")
    assert cache.get(other, ARCH).symbol == "_Z3addILi2EEvPf"


def _another_header_version(monkeypatch: pytest.MonkeyPatch, csrc: Path) -> None:
    monkeypatch.setattr(headers.importlib.metadata, "version", lambda name: "99.0")


def _another_compiler(monkeypatch: pytest.MonkeyPatch, csrc: Path) -> None:
    monkeypatch.setattr(compiler, "identity", lambda: "release 99.0")


def _another_option(monkeypatch: pytest.MonkeyPatch, csrc: Path) -> None:
    monkeypatch.setattr(compiler, "_FLAGS", (*compiler._FLAGS, "--restrict"))


def _an_option_of_the_environment(monkeypatch: pytest.MonkeyPatch, csrc: Path) -> None:
    monkeypatch.setenv("MQA_NVRTC_OPTIONS", "--restrict")
    config.reload()


def _an_edited_source(monkeypatch: pytest.MonkeyPatch, csrc: Path) -> None:
    (csrc / "add.cuh").write_text(SOURCE + "//\n")


def _another_source(monkeypatch: pytest.MonkeyPatch, csrc: Path) -> None:
    (csrc / "deeper").mkdir()
    (csrc / "deeper/new.cuh").touch()


def _a_renamed_source(monkeypatch: pytest.MonkeyPatch, csrc: Path) -> None:
    (csrc / "add.cuh").rename(csrc / "sum.cuh")


@pytest.mark.parametrize(
    "change",
    [
        _another_header_version,
        _another_compiler,
        _another_option,
        _an_option_of_the_environment,
        _an_edited_source,
        _another_source,
        _a_renamed_source,
    ],
)
def test_the_key_changes_with_all_that_a_binary_follows_from(
    change: Callable[[pytest.MonkeyPatch, Path], None], monkeypatch: pytest.MonkeyPatch, csrc: Path
) -> None:
    before = cache.key(ADD, ARCH)
    change(monkeypatch, csrc)
    assert cache.key(ADD, ARCH) != before


def test_the_key_tells_kernels_and_architectures_apart(tmp_path: Path) -> None:
    own = tmp_path / "own.cuh"
    own.write_text(SOURCE)
    kernels = [
        ADD,
        Kernel("add.cuh", "add", ("2",)),
        Kernel("add.cuh", "sub", ("1",)),
        Kernel(str(own), "add", ("1",)),
    ]
    keys = {cache.key(kernel, arch) for kernel in kernels for arch in (ARCH, "sm_90")}
    assert len(keys) == 2 * len(kernels)
    own.write_text(SOURCE + "//\n")
    assert cache.key(kernels[-1], ARCH) not in keys


def test_the_key_stays_where_sources_move_or_hidden_files_come(
    csrc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = cache.key(ADD, ARCH)
    shutil.copytree(csrc, tmp_path / "elsewhere")
    (tmp_path / "elsewhere/.add.cuh.swp").touch()
    monkeypatch.setattr(compiler, "sources", lambda: tmp_path / "elsewhere")
    assert cache.key(ADD, ARCH) == before


def test_a_source_edited_under_the_compiler_is_not_stored(
    csrc: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_kernel = compiler.compile_kernel

    def edited_meanwhile(kernel: Kernel, arch: str) -> Binary:
        binary = compile_kernel(kernel, arch)
        (csrc / "add.cuh").write_text(SOURCE + "//\n")
        return binary

    monkeypatch.setattr(compiler, "compile_kernel", edited_meanwhile)
    assert _get().symbol == "_Z3addILi1EEvPf"
    assert _files(directory) == []


def test_threads_that_ask_for_one_kernel_compile_it_once() -> None:
    got: list[Binary] = []

    def ask() -> None:
        threads = [threading.Thread(target=lambda: got.append(_get())) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert _compiled_by(ask) == 1
    assert len(got) == 4
    assert all(binary is got[0] for binary in got)


def test_a_failure_is_not_remembered(csrc: Path) -> None:
    (csrc / "add.cuh").write_text("broken\n")
    for _ in range(2):
        with pytest.raises(CompileError):
            _get()
    (csrc / "add.cuh").write_text(SOURCE)
    assert _get().symbol == "_Z3addILi1EEvPf"


def test_a_missing_source_is_a_compile_error(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match="cannot open source file"):
        cache.get(Kernel(str(tmp_path / "none.cuh"), "add"), ARCH)


# A script and not multiprocessing: it forks before anything is loaded but Python code.
PROCESSES = """
import os, shutil, sys, time, traceback, warnings
from pathlib import Path
from mqa.cuda import cache, compiler
from mqa.cuda.plan import Kernel

root, count, removals = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
compiler.sources = lambda: root
warnings.simplefilter("ignore", DeprecationWarning)
wait, go = os.pipe()
children = []
for _ in range(count):
    child = os.fork()
    if child == 0:
        os.close(go)
        os.read(wait, 1)  # Returns when the parent closes its end.
        try:
            binary = cache.get(Kernel("add.cuh", "add", ("1",)), "sm_90a")
            line = f"{compiler.compilations()} {binary.symbol} {len(binary.image)}\\n"
        except BaseException:
            line = traceback.format_exc()
        os.write(1, line.encode())
        os._exit(0)
    children.append(child)
os.close(go)
for _ in range(removals):
    shutil.rmtree(os.environ["MQA_CACHE_DIR"], ignore_errors=True)
    time.sleep(0.005)
for child in children:
    os.waitpid(child, 0)
"""


def _processes(csrc: Path, count: int, removals: int) -> list[tuple[int, str, int]]:
    """(compilations, symbol, bytes) of each of `count` processes that start at the same time."""
    arguments = [sys.executable, "-c", PROCESSES, str(csrc), str(count), str(removals)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=True)
    lines = [line.split(" ") for line in done.stdout.splitlines()]
    assert [len(line) for line in lines] == [3] * count, done.stdout + done.stderr
    return [(int(compiled), symbol, int(size)) for compiled, symbol, size in lines]


def test_eight_processes_with_a_cold_cache_compile_once(csrc: Path, directory: Path) -> None:
    results = _processes(csrc, count=8, removals=0)
    assert sum(compiled for compiled, *_ in results) == 1
    assert len({result[1:] for result in results}) == 1
    assert _compiled_by(_get) == 0
    assert len(_files(directory)) == 1


def test_eight_processes_survive_that_their_directory_vanishes(csrc: Path) -> None:
    results = _processes(csrc, count=8, removals=200)
    assert {symbol for _, symbol, _ in results} == {"_Z3addILi1EEvPf"}


def _lock(directory: Path) -> int:
    """Lock the kernel as another process would."""
    directory.mkdir(exist_ok=True)
    handle = os.open(directory / f"{cache.key(ADD, ARCH)}.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(handle, fcntl.LOCK_EX)
    return handle


def test_who_waits_for_another_process_takes_its_binary(directory: Path, tmp_path: Path) -> None:
    _get()
    shutil.move(directory, tmp_path / "ready")
    cache.forget()
    handle = _lock(directory)
    thread = threading.Thread(target=_get)

    def wait() -> None:
        thread.start()
        time.sleep(0.1)
        assert thread.is_alive()
        shutil.copytree(tmp_path / "ready", directory, dirs_exist_ok=True)
        os.close(handle)
        thread.join(timeout=60)

    assert _compiled_by(wait) == 0
    assert not thread.is_alive()


def test_who_waits_too_long_compiles(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "LOCK_SECONDS", 0.1)
    handle = _lock(directory)
    try:
        assert _compiled_by(_get) == 1
    finally:
        os.close(handle)
    assert len(_files(directory)) == 1


def test_without_locks_kernels_are_compiled_and_stored(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    with monkeypatch.context() as patch:
        patch.setattr(cache.fcntl, "flock", no_locks)
        assert _compiled_by(_get) == 1
    cache.forget()
    monkeypatch.setattr(cache, "fcntl", None)  # As on Windows.
    assert _compiled_by(lambda: cache.get(ADD, "sm_90")) == 1
    assert len(_files(directory)) == 2


def _full_disk(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cache.os, "fsync", full)


def _no_rename(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    (directory / f"{cache.key(ADD, ARCH)}.bin").mkdir(parents=True)


def _parent_is_a_file(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    directory.touch()
    monkeypatch.setenv("MQA_CACHE_DIR", str(directory / "deeper"))
    config.reload()


def _not_ours(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(cache.Path, "mkdir", refuse)


def _homeless(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    monkeypatch.setattr(config, "cache_dir", functools.cache(lambda: None))


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (_full_disk, "No space left on device"),
        (_no_rename, "Is a directory"),
        (_parent_is_a_file, "Not a directory"),
        (_not_ours, "Permission denied"),
        (_homeless, "no home directory"),
    ],
)
def test_a_directory_that_cannot_be_written_means_one_warning_and_memory_only(
    break_it: Callable[[pytest.MonkeyPatch, Path], None],
    words: str,
    directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        break_it(patch, directory)
        assert cache.trouble() is None
        with pytest.warns(CacheWarning, match=words):
            binary = _get()
        assert binary.symbol == "_Z3addILi1EEvPf"
        cache.get(Kernel("add.cuh", "add", ("2",)), ARCH)  # A second warning would be an error.
        assert words in str(cache.trouble())
        assert _compiled_by(_get) == 0
    assert not list(tmp_path.rglob(".*")), "a temporary file was left"


def test_a_warning_that_is_an_error_leaves_the_next_call_whole(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _homeless(monkeypatch, directory)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(CacheWarning):
            _get()
        assert _get().symbol == "_Z3addILi1EEvPf"


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"MQA_CACHE_DIR": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"MQA_CACHE_DIR": "", "XDG_CACHE_HOME": "/b"}, "/b/mqa"),
        ({"XDG_CACHE_HOME": "relative"}, "/home/me/.cache/mqa"),
        ({}, "/home/me/.cache/mqa"),
    ],
)
def test_the_directory_follows_the_environment(
    variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MQA_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/me", **variables}.items():
        monkeypatch.setenv(name, value)
    config.reload()
    assert config.cache_dir() == Path(expected)


def test_a_user_without_a_home_has_no_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("MQA_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    config.reload()
    assert config.cache_dir() is None
    assert cache.find(ADD, ARCH) is None
