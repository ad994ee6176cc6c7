"""The compiler: what it makes of a kernel, what it says when it can't, where headers come from."""

from __future__ import annotations

import importlib.util
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import mqa
from mqa import config
from mqa.cuda import compiler, headers, sm90
from mqa.cuda.plan import Kernel
from mqa.errors import CompileError, CompilerUnavailableError

ARCH = "sm_90a"
Source = Callable[[str], str]

ADD = """
namespace test {
template <int kStep> __global__ void add(float* x) {
  __shared__ float copy[64];
  copy[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = copy[63 - threadIdx.x] + kStep;
}
}
"""
SPILLS = """
__global__ __launch_bounds__(1024) void bad(float* x, int n) {
  float a[100];
  for (int i = 0; i < 100; ++i) a[i] = x[i * n];
  for (int k = 0; k < n; ++k)
    for (int i = 0; i < 100; ++i) a[i] = a[i] * a[(7 * i + 1) % 100] + k;
  for (int i = 0; i < 100; ++i) x[i * n] = a[i];
}
"""
IGNORES_SETMAXNREG = """
__global__ void bad(float* x) {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
  x[0] = 1;
}
"""
SERIALISES_WGMMA = """
__global__ __launch_bounds__(128) void bad(float* x, long a, long b) {
  float d[4] = {x[0], x[1], x[2], x[3]};
  asm volatile("wgmma.fence.sync.aligned;");
  for (int i = 0; i < 2; ++i) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 "
                 "{%0, %1, %2, %3}, %4, %5, 1, 1, 1;"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(a), "l"(b));
    x[i] = d[0];
  }
  asm volatile("wgmma.commit_group.sync.aligned;");
  asm volatile("wgmma.wait_group.sync.aligned 0;");
  x[threadIdx.x] = d[0] + d[1] + d[2] + d[3];
}
"""


@pytest.fixture
def source(tmp_path: Path) -> Source:
    """Write a source file; its absolute path."""

    def write(text: str) -> str:
        path = tmp_path / "kernel.cuh"
        path.write_text(text)
        return str(path)

    return write


@pytest.fixture
def without_toolkit(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    config.reload()


@pytest.fixture
def without_wheels(monkeypatch: pytest.MonkeyPatch) -> Path:
    """Hide the header wheels; the include directory that was hidden."""
    include = headers.find().directories[0]
    monkeypatch.setattr(headers.importlib.util, "find_spec", lambda name: None)
    return include


@pytest.fixture
def forget_nvrtc() -> Iterator[None]:
    compiler._nvrtc.cache_clear()
    yield
    compiler._nvrtc.cache_clear()


def test_a_template_becomes_a_cubin_under_its_mangled_name(source: Source) -> None:
    before = compiler.compilations()
    binary = compiler.compile_kernel(Kernel(source(ADD), "test::add", ("3",)), ARCH)
    assert compiler.compilations() == before + 1
    assert binary.image.startswith(b"\x7fELF")
    assert binary.symbol == "_ZN4test3addILi3EEEvPf"
    assert binary.symbol.encode() in binary.image
    assert f".target {ARCH}" in binary.ptx
    assert f".entry {binary.symbol}" in binary.ptx
    assert "kernel.cuh" in binary.ptx  # -lineinfo
    assert "\0" not in binary.ptx + binary.log


def test_options_of_the_environment_reach_nvrtc(
    source: Source, setenv: Callable[[str, str], None]
) -> None:
    kernel = Kernel(source('extern "C" __global__ void k(int* x) { *x = WANTED[0]; }'), "k")
    with pytest.raises(CompileError, match=r"WANTED"):
        compiler.compile_kernel(kernel, ARCH)
    setenv("MQA_NVRTC_OPTIONS", "'-DWANTED=\"a string with blanks\"' --restrict")
    assert compiler.flags(ARCH)[-2:] == ('-DWANTED="a string with blanks"', "--restrict")
    compiler.compile_kernel(kernel, ARCH)


def test_ptx_alone_is_what_a_cubin_is_assembled_from(source: Source) -> None:
    kernel = Kernel(source(ADD), "test::add", ("3",))
    whole = compiler.compile_kernel(kernel, ARCH)
    alone = compiler.compile_kernel(kernel, ARCH, assemble=False)
    assert (alone.ptx, alone.symbol, alone.image) == (whole.ptx, whole.symbol, b"")
    assert compiler.usage(alone) is None


def test_racecheck_gets_a_kernel_in_which_every_lane_arrives(
    setenv: Callable[[str, str], None],
) -> None:
    kernel = sm90.dense_kernel(sm90.tiles(64, 128), "float32")

    def arrivals() -> set[int]:
        ptx = compiler.compile_kernel(kernel, ARCH, assemble=False).ptx
        registers = re.findall(r"mbarrier\.init\S* \[\S+\], (%r\d+);", ptx)
        constants = dict(re.findall(r"mov\.u32\s+(%r\d+), (\d+);", ptx))
        return {int(constants[name]) for name in registers if name in constants}

    assert arrivals() == {1 + 1 + 32, 16, 2, 1}
    setenv("MQA_NVRTC_OPTIONS", "-DMQA_EVERY_LANE_ARRIVES")
    assert arrivals() == {1 + 32 + 32, 16 * 32, 2 * 32, 32}


def test_a_clean_kernel_has_no_findings_and_known_usage(source: Source) -> None:
    binary = compiler.compile_kernel(Kernel(source(ADD), "test::add", ("3",)), ARCH)
    assert compiler.findings(binary.log) == []
    usage = compiler.usage(binary)
    assert usage is not None
    assert 0 < usage.registers <= 255
    assert (usage.spill_bytes, usage.shared_bytes) == (0, 64 * 4)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (SPILLS, "bytes spill stores"),
        (IGNORES_SETMAXNREG, "(C7508)"),
        (SERIALISES_WGMMA, "wgmma.mma_async instructions are serialized"),
    ],
    ids=["spills", "setmaxnreg", "wgmma"],
)
def test_findings_name_what_a_tensor_core_kernel_must_not_have(
    source: Source, text: str, words: str
) -> None:
    binary = compiler.compile_kernel(Kernel(source(text), "bad"), ARCH)
    assert any(words in finding for finding in compiler.findings(binary.log))
    usage = compiler.usage(binary)
    assert usage is not None
    assert (usage.spill_bytes > 0) == (text is SPILLS)


def test_findings_are_read_line_by_line() -> None:
    log = "\n".join(
        [
            "ptxas info    : (C7511) serialized",
            "ptxas info    : (C7509) something else",
            "    0 bytes stack frame, 0 bytes spill stores, 10 bytes spill loads",
            "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads",
        ]
    )
    assert [line[:20].split()[0] for line in compiler.findings(log)] == ["ptxas", "0"]


def test_usage_is_unknown_without_the_lines_that_tell() -> None:
    assert compiler.usage(compiler.Binary(b"", "add", "no word of it", "")) is None


def test_sources_are_the_checkout_or_the_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (compiler.sources() / "README.md").is_file()
    monkeypatch.setattr(mqa, "__file__", str(tmp_path / "mqa/__init__.py"))
    assert compiler.sources() == tmp_path / "mqa/csrc"
    (tmp_path / "csrc").mkdir()  # Of somebody else, beside packages.
    assert compiler.sources() == tmp_path / "mqa/csrc"
    (tmp_path / "pyproject.toml").touch()
    assert compiler.sources() == tmp_path / "csrc"


def test_relative_sources_and_what_they_include_lie_in_csrc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "with a blank"
    (root / "common").mkdir(parents=True)
    (root / "common/add.cuh").write_text(ADD)
    (root / "kernel.cuh").write_text('#include "common/add.cuh"\n')
    monkeypatch.setattr(compiler, "sources", lambda: root)
    binary = compiler.compile_kernel(Kernel("kernel.cuh", "test::add", ("1",)), ARCH)
    assert binary.symbol == "_ZN4test3addILi1EEEvPf"


def test_threads_compile_at_the_same_time(source: Source) -> None:
    path, before = source(ADD), compiler.compilations()
    symbols: list[str] = []

    def work(step: int) -> None:
        kernel = Kernel(path, "test::add", (str(step),))
        symbols.append(compiler.compile_kernel(kernel, ARCH).symbol)

    threads = [threading.Thread(target=work, args=(step,)) for step in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(symbols) == [f"_ZN4test3addILi{step}EEEvPf" for step in range(4)]
    assert compiler.compilations() == before + 4


def _error(kernel: Kernel, arch: str = ARCH) -> str:
    with pytest.raises(CompileError) as raised:
        compiler.compile_kernel(kernel, arch)
    return str(raised.value)


def test_a_compile_error_is_complete(source: Source) -> None:
    path = source("template <int N>\n__global__ void add(float* x) {\n  x[0] = missing<N>;\n}\n")
    message = _error(Kernel(path, "add", ("3",)))
    assert message.startswith(f"cannot compile add<3> of {path} for {ARCH}\n")
    assert "options: -std=c++17 " in message
    assert f"-arch={ARCH}" in message
    assert f"\n{path}:3: x[0] = missing<N>;\n" in message
    assert 'identifier "missing" is undefined' in message


def test_a_failed_assertion_shows_who_instantiated_it(source: Source, tmp_path: Path) -> None:
    pair = tmp_path / "pair.cuh"
    pair.write_text("template <int N> struct Pair {\n  Even<N> first, second;\n};\n")
    path = source(
        "template <int N> struct Even {\n"
        '  static_assert(N % 2 == 0, "even, please");\n'
        "};\n"
        '#include "pair.cuh"\n'
        "template <int N> __global__ void add(float* x) {\n"
        "  x[0] = sizeof(Even<N>) + sizeof(Pair<N + 2>);\n"
        "}\n"
    )
    message = _error(Kernel(path, "add", ("3",)))
    assert "even, please" in message
    assert f'{path}:2: static_assert(N % 2 == 0, "even, please");' in message
    assert f"{path}:6: x[0] = sizeof(Even<N>) + sizeof(Pair<N + 2>);" in message
    assert f"{pair}:2: Even<N> first, second;" in message


def test_an_assembler_error_shows_the_line_of_ptx_and_of_source(source: Source) -> None:
    path = source('__global__ void add(float* x) {\n  asm("frobnicate.f32 %0;" ::"f"(x[0]));\n}\n')
    message = _error(Kernel(path, "add"))
    assert ": frobnicate.f32 %f1;\n" in message
    assert f'{path}:2: asm("frobnicate.f32 %0;" ::"f"(x[0]));' in message
    assert "Not a name of any known instruction" in message


def test_lines_of_ptx_without_a_source_line_are_no_trouble() -> None:
    log = "ptxas application ptx input, line 2; error   : no"
    kernel = Kernel("k.cuh", "k")
    assert list(compiler._places(kernel, log, "a;\nb;")) == ["ptx:2: b;"]
    assert list(compiler._places(kernel, log, ".loc 7 1 0\nb;")) == ["ptx:2: b;"]
    lost = '.loc 1 9 0\nb;\n.file 1 "/nowhere/k.cuh"'
    assert list(compiler._places(kernel, log, lost)) == ["ptx:2: b;"]


@pytest.mark.parametrize(
    ("name", "arch", "words"),
    [
        ("test::add", ARCH, "Input name expression"),
        ("test::sub<1>", ARCH, 'has no member "sub"'),
        ("test::add<1>", "sm_12345", "invalid value for --gpu-architecture"),
    ],
)
def test_wrong_names_and_architectures_are_compile_errors(
    source: Source, name: str, arch: str, words: str
) -> None:
    assert words in _error(Kernel(source(ADD), name), arch)


def test_a_missing_source_is_named() -> None:
    message = _error(Kernel("nowhere/kernel.cuh", "add"))
    assert 'mqa_kernel.cu:1: #include "nowhere/kernel.cuh"' in message
    assert "cannot open source file" in message


@pytest.mark.parametrize("arch", ["compute_90a", "90a", "sm_90x", ""])
def test_only_real_architectures_are_compiled_for(source: Source, arch: str) -> None:
    with pytest.raises(ValueError, match=f"arch='{arch}', expected an architecture such as"):
        compiler.compile_kernel(Kernel(source(ADD), "test::add", ("1",)), arch)


INCLUDES = "#include <cuda/std/cstdint>\n#include <cuda_bf16.h>\n" + ADD


def test_headers_of_wheels_are_used_before_those_of_a_toolkit(
    source: Source, setenv: Callable[[str, str], None], tmp_path: Path
) -> None:
    setenv("CUDA_HOME", str(tmp_path))
    assert tmp_path not in headers.find().directories[0].parents
    compiler.compile_kernel(Kernel(source(INCLUDES), "test::add", ("1",)), ARCH)


@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH"])
@pytest.mark.usefixtures("without_toolkit")
def test_headers_of_a_toolkit_stand_in_for_the_wheels(
    source: Source,
    setenv: Callable[[str, str], None],
    tmp_path: Path,
    without_wheels: Path,
    variable: str,
) -> None:
    (tmp_path / "include").symlink_to(without_wheels)
    setenv(variable, str(tmp_path))
    assert headers.find().directories == (tmp_path / "include", tmp_path / "include/cccl")
    compiler.compile_kernel(Kernel(source(INCLUDES), "test::add", ("1",)), ARCH)


@pytest.mark.usefixtures("without_toolkit", "without_wheels")
def test_without_headers_the_error_says_what_to_install(
    source: Source, setenv: Callable[[str, str], None], tmp_path: Path
) -> None:
    with pytest.raises(CompilerUnavailableError) as raised:
        compiler.compile_kernel(Kernel(source(ADD), "test::add", ("1",)), ARCH)
    assert "CUDA_HOME and CUDA_PATH: not set" in str(raised.value)
    assert "pip install 'mqa-logits[cuda]'" in str(raised.value)
    (tmp_path / "include").mkdir()
    (tmp_path / "include/cuda_bf16.h").touch()
    setenv("CUDA_HOME", str(tmp_path))
    reason = compiler.unavailable()
    assert reason is not None
    assert f"{tmp_path}/include: no cuda/std/cstdint" in reason


def test_headers_without_metadata_are_told_apart_by_contents(
    setenv: Callable[[str, str], None], tmp_path: Path, without_wheels: Path
) -> None:
    def missing(name: str) -> str:
        raise headers.importlib.metadata.PackageNotFoundError(name)

    include = tmp_path / "include"
    (include / "cuda/std").mkdir(parents=True)
    (include / "cuda/std/cstdint").touch()
    (include / "cuda_bf16.h").touch()
    setenv("CUDA_HOME", str(tmp_path))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(headers.importlib.metadata, "version", missing)
        first = headers.find().identity
        (include / "cuda_runtime_api.h").write_text("#define CUDART_VERSION 13010")
        assert headers.find().identity != first


def test_all_is_there_to_compile_with() -> None:
    assert compiler.unavailable() is None
    assert "Cuda compilation tools" in compiler.identity()


@pytest.mark.usefixtures("forget_nvrtc")
def test_without_cuda_python_the_module_loads_and_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("cuda", "cuda.bindings", "cuda.bindings.nvrtc"):
        monkeypatch.setitem(sys.modules, name, None)
    spec = importlib.util.spec_from_file_location("fresh_compiler", compiler.__file__)
    assert spec is not None
    assert spec.loader is not None
    fresh = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, fresh)
    spec.loader.exec_module(fresh)
    reason = fresh.unavailable()
    assert "NVRTC, which compiles the CUDA kernels, cannot be loaded" in reason
    assert "pip install 'mqa-logits[cuda]'" in reason


@pytest.mark.usefixtures("forget_nvrtc")
def test_bindings_without_the_library_are_no_compiler(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_found() -> None:
        raise RuntimeError("libnvrtc.so.13 not found")

    bindings = SimpleNamespace(nvrtc=SimpleNamespace(nvrtcVersion=not_found))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    with pytest.raises(CompilerUnavailableError, match=r"libnvrtc\.so\.13 not found"):
        compiler.compile_kernel(Kernel(source(ADD), "test::add", ("1",)), ARCH)


def test_a_status_of_nvrtc_is_not_ignored() -> None:
    assert compiler._value((0,)) is None
    with pytest.raises(RuntimeError, match="NVRTC failed: 5"):
        compiler._value((5, None))
