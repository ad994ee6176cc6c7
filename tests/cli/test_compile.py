import functools
import os
import shutil

import pytest

from mqa import config
from mqa.cuda import cache, compiler, variants
from mqa.cuda.plan import Kernel

SOURCE = """
template <int kStep> __global__ void add(float* x) {
  __shared__ float copy[32];
  copy[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = copy[31 - threadIdx.x] + kStep;
}
__global__ void ignored(float* x) {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
  x[0] = 1;
}
"""


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "add.cuh"
    path.write_text(SOURCE.partition("__global__ void ignored")[0])
    return path


@pytest.fixture(autouse=True)
def _three_kernels(source, tmp_path, monkeypatch):
    """Three kernels, of which two are the covering set, sources of our own and an empty cache."""

    def kernels(every):
        steps = ("1", "2", "30")[: 3 if every else 2]
        return tuple(Kernel(str(source), "add", (step,)) for step in steps)

    (tmp_path / "csrc").mkdir()
    monkeypatch.setattr(compiler, "sources", lambda: tmp_path / "csrc")
    monkeypatch.setenv("MQA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(variants, "REGISTRY", {"sm_90a": kernels})
    cache.forget()
    yield
    cache.forget()


def _row(result, kernel):
    (line,) = [line for line in result.stdout.splitlines() if line.startswith(kernel)]
    return line.split()[1:]


def test_help_has_examples(run):
    result = run("compile", "--help")
    assert result.exit_code == 0
    assert "  mqa compile --arch sm_90a" in result.stdout
    assert "mqa compile --arch" in run().stdout


def test_kernels_are_compiled_once_and_then_cached(run, tmp_path):
    first = run("compile", "--arch", "sm_90a", "--jobs", "2")
    assert first.exit_code == 0, first.output
    registers, spills, shared, kib, seconds, unit = _row(first, "add<1>")
    assert (spills, shared, unit) == ("0", "128", "s")
    assert int(registers) > 0
    assert int(kib) > 0
    assert float(seconds) > 0
    assert first.stdout.endswith(f"3 kernels of sm_90a in {tmp_path / 'cache'}: 3 compiled\n")
    assert len(list((tmp_path / "cache").glob("*.bin"))) == 3
    cache.forget()
    before = compiler.compilations()
    second = run("compile", "--arch", "sm_90a")
    assert _row(second, "add<2>")[-1] == "before"
    assert second.stdout.endswith(": 3 there before\n")
    assert compiler.compilations() == before


def test_list_shows_the_names_and_compiles_nothing(run):
    before = compiler.compilations()

    def listed(*arguments):
        return run("compile", "--arch", "sm_90a", "--list", *arguments).stdout.split()

    assert listed() == ["add<1>", "add<2>", "add<30>"]
    assert listed("30") == ["add<30>"]
    assert listed("--covering") == ["add<1>", "add<2>"]
    assert compiler.compilations() == before


def test_kernels_that_are_only_read_are_copied_so_that_the_written_directory_is_whole(
    run, tmp_path, setenv
):
    first, second, own = tmp_path / "cache", tmp_path / "second", tmp_path / "own"
    assert run("compile", "--arch", "sm_90a", "--covering").exit_code == 0
    shutil.copytree(first, second)
    damaged = sorted(first.glob("*.bin"))[0]
    damaged.write_bytes(b"damaged")
    setenv("MQA_CACHE_PATH", os.pathsep.join([str(first), str(second)]))
    setenv("MQA_CACHE_DIR", str(own))
    cache.forget()
    result = run("compile", "--arch", "sm_90a")
    assert result.exit_code == 0, result.output
    assert _row(result, "add<2>")[-1] == "copied"
    assert result.stdout.endswith(f"in {own}: 1 compiled, 2 copied from MQA_CACHE_PATH\n")
    assert len(list(own.glob("*.bin"))) == 3
    for whole in second.glob("*.bin"):
        assert (own / whole.name).read_bytes() == whole.read_bytes()
    cache.forget()
    (own / damaged.name).write_bytes(b"damaged too")
    again = run("compile", "--arch", "sm_90a")
    assert again.stdout.endswith(f"in {own}: 1 copied from MQA_CACHE_PATH, 2 there before\n")
    assert (own / damaged.name).read_bytes() == (second / damaged.name).read_bytes()


def test_a_copy_that_cannot_be_written_fails_the_command(run, tmp_path, setenv):
    assert run("compile", "--arch", "sm_90a", "add<1>").exit_code == 0
    (tmp_path / "file").touch()
    setenv("MQA_CACHE_PATH", str(tmp_path / "cache"))
    setenv("MQA_CACHE_DIR", str(tmp_path / "file"))
    cache.forget()
    result = run("compile", "--arch", "sm_90a", "add<1>")
    assert result.exit_code == 1
    assert f"cannot write to {tmp_path / 'file'}" in result.stderr


def test_nowhere_to_keep_kernels_is_told_before_any_work(run, error_line, monkeypatch):
    monkeypatch.setattr(config, "cache_dir", functools.cache(lambda: None))
    before = compiler.compilations()
    assert "set MQA_CACHE_DIR" in error_line(run("compile", "--arch", "sm_90a"), exit_code=1)
    assert compiler.compilations() == before


def test_one_kernel_is_no_plural(run):
    result = run("compile", "--arch", "sm_90a", "add<1>")
    assert "\n1 kernel of sm_90a in " in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--arch"),
        (["--arch", "sm_12"], "arch='sm_12', expected one of: sm_90a"),
        (["--arch", "sm_90a", "sub"], "'sub' is in the name of no kernel of sm_90a"),
        (["--arch", "sm_90a", "--jobs", "0"], "jobs"),
        (["--arch", "sm_90a", "--covering", "add"], "--covering takes no name, got 'add'"),
    ],
)
def test_wrong_arguments_are_one_line(run, error_line, arguments, words):
    assert words in error_line(run("compile", *arguments))


def test_virtual_architectures_have_no_cubin(run, monkeypatch):
    only = variants.REGISTRY["sm_90a"]
    monkeypatch.setattr(variants, "REGISTRY", {variants.PORTABLE: only})
    result = run("compile", "--arch", "compute_86", "add<1>")
    assert result.exit_code == 0, result.output
    assert _row(result, "add<1>")[:4] == ["-", "-", "-", "-"]
    assert run("compile", "--arch", "sm_86", "--list").stdout.split() == [
        "add<1>",
        "add<2>",
        "add<30>",
    ]


def test_a_version_without_kernels_says_so(run, error_line, monkeypatch):
    monkeypatch.setattr(variants, "REGISTRY", {})
    assert "none in this version" in error_line(run("compile", "--arch", "sm_90a"))


def test_a_kernel_that_does_not_compile_fails_the_command_after_the_others(run, source):
    text = source.read_text()
    source.write_text(text.replace("{\n", '{\n  static_assert(kStep != 2, "not two");\n', 1))
    result = run("compile", "--arch", "sm_90a", "--jobs", "1")
    assert result.exit_code == 1
    assert _row(result, "add<2>") == ["-", "-", "-", "-", "failed"]
    assert _row(result, "add<1>")[-1] == "s"
    assert result.stderr.startswith(f"cannot compile add<2> of {source} for sm_90a")
    assert f'{source}:3: static_assert(kStep != 2, "not two");' in result.stderr


def test_a_kernel_with_findings_fails_the_command(run, source):
    source.write_text(SOURCE)
    result = run("compile", "--arch", "sm_90a", "add<1>")
    assert result.exit_code == 1
    assert result.stderr.startswith("add<1>: ptxas info")
    assert "(C7508)" in result.stderr
    again = run("compile", "--arch", "sm_90a", "add<1>")
    assert (again.exit_code, _row(again, "add<1>")[-1]) == (1, "before")


def test_a_cache_that_cannot_be_written_fails_the_command(run, tmp_path):
    (tmp_path / "cache").touch()
    result = run("compile", "--arch", "sm_90a")
    assert result.exit_code == 1
    assert f"cannot write to {tmp_path / 'cache'}: File exists" in result.stderr
    assert _row(result, "add<1>")[-1] == "s"


def test_without_a_compiler_one_line_says_what_to_install(run, error_line, monkeypatch):
    monkeypatch.setattr(compiler, "unavailable", lambda: "no NVRTC\npip install it")
    line = error_line(run("compile", "--arch", "sm_90a"), exit_code=1)
    assert line == "mqa: no NVRTC; pip install it"


def test_a_log_that_tells_nothing_leaves_the_table_blank(run, monkeypatch):
    monkeypatch.setattr(compiler, "usage", lambda binary: None)
    assert _row(run("compile", "--arch", "sm_90a"), "add<1>")[:3] == ["-", "-", "-"]
