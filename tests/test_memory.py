"""What a call reads, and how much memory it takes beside its arguments."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import mqa
from mqa.problem import FORMATS, parse
from mqa.testing import assert_bitwise, logits, make_case

LINES = [
    "dense fp8 S=129 N=101 H=3 D=33 windows=random",
    "dense mxfp8 S=5 N=3 H=2 D=32 weights=bfloat16 windows=full",
    "dense mxfp4 S=17 N=257 H=1 D=64 windows=packed M=257",
    "dense bf16 S=17 N=257 H=3 D=33 windows=random",
    "paged bf16 B=3 next_n=2 H=4 D=33 P=7 blocks=40 columns=6 L=40 lens=random",
    "paged fp8 B=3 next_n=2 H=4 D=33 P=7 blocks=40 columns=6 L=40 lens=random",
    "paged mxfp8 B=3 next_n=1 H=4 D=32 P=16 blocks=40 columns=6 L=90 lens=random lens_rank=1",
    "paged mxfp4 B=9 next_n=1 H=4 D=64 P=5 blocks=99 columns=6 L=30 lens=ramp varlen=1",
]


class Guarded:
    """Copies of tensors that end where a page that cannot be touched begins."""

    def __init__(self) -> None:
        self._maps: list[tuple[mmap.mmap, int, int]] = []
        self._libc = ctypes.CDLL(None, use_errno=True)

    def copy(self, tensor: Tensor) -> Tensor:
        page = mmap.PAGESIZE
        size = tensor.numel() * tensor.element_size()
        whole = -(-size // page) * page
        memory = mmap.mmap(-1, whole + page)
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._protect(start + whole, page, 0)
        self._maps.append((memory, start + whole, page))
        if size == 0:
            return tensor.clone()
        flat = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=whole - size)
        copy = flat.view(tensor.dtype).view(tensor.shape)
        copy.copy_(tensor)
        return copy

    def _protect(self, address: int, size: int, protection: int) -> None:
        arguments = (ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_int(protection))
        if self._libc.mprotect(*arguments):
            raise OSError(ctypes.get_errno(), "mprotect")

    def release(self) -> None:
        for _, address, size in self._maps:
            self._protect(address, size, mmap.PROT_READ | mmap.PROT_WRITE)


@pytest.fixture
def guarded() -> Iterator[Guarded]:
    guard = Guarded()
    yield guard
    guard.release()


@pytest.mark.parametrize("line", LINES)
def test_nothing_behind_the_last_element_is_read(line: str, guarded: Guarded) -> None:
    case = make_case(parse(line))
    want = case.run()
    tensors = {name: guarded.copy(tensor) for name, tensor in case.tensors.items()}
    scale = tensors.get("q_scale")
    common = {
        "weights": tensors["w"],
        "clean_logits": case.problem.clean,
        "logits_dtype": case.out_dtype,
        "out": guarded.copy(torch.zeros(want.shape, dtype=want.dtype)),
    }
    if line.startswith("dense"):
        got = mqa.fp8_fp4_mqa_logits(
            q=(tensors["q"], scale),
            kv=(tensors["kv"], tensors.get("kv_scale")),
            cu_seq_len_k_start=tensors["start"],
            cu_seq_len_k_end=tensors["end"],
            max_seqlen_k=case.problem.M,
            **common,
        )
        mqa.get_mqa_logits_metadata(tensors["start"], tensors["end"], 9, 64)
        assert_bitwise(got, want, replay=line)
        return
    got = mqa.fp8_fp4_paged_mqa_logits(
        q=(tensors["q"], scale),
        kv_cache=tensors["cache"],
        context_lens=tensors["lens"],
        block_table=tensors["table"],
        schedule_meta=None,
        max_context_len=case.problem.L,
        indices=tensors.get("indices"),
        **common,
    )
    mqa.get_paged_mqa_logits_metadata(tensors["lens"], 64, 9, tensors.get("indices"))
    assert_bitwise(got, want, where=logits(case).valid, replay=line)


def test_a_read_behind_a_guarded_tensor_is_fatal() -> None:
    """The guard guards: in a process of its own, one element too many kills it."""
    script = (
        f"import sys; sys.path.insert(0, {str(__file__).rsplit('/', 1)[0]!r})\n"
        "import torch, test_memory\n"
        "copy = test_memory.Guarded().copy(torch.ones(5))\n"
        "assert copy.sum() == 5\n"
        "import ctypes; ctypes.string_at(copy.data_ptr() + 20, 1)\n"
    )
    died = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert died.returncode == -11, died.stderr.decode()


EXTRA = """
import resource, sys, torch, mqa
from mqa.problem import parse
from mqa.testing import make_case

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

make_case(parse("dense {fmt} S=40 N=600 H=64 D=128")).run()
S, N, H, D = {S}, {N}, 64, 128
stored = D // 2 if "{fmt}" == "mxfp4" else D
q = torch.full((S, H, stored), 0x22, dtype=torch.uint8)
k = torch.full((N, stored), 0x22, dtype=torch.uint8)
if "{fmt}" == "bf16":
    q, k = q.to(torch.bfloat16), k.to(torch.bfloat16)
elif "{fmt}" != "mxfp4":
    q, k = q.view(torch.float8_e4m3fn), k.view(torch.float8_e4m3fn)
code = 0x7F7F7F7F
mx = "{fmt}".startswith("mx")
q_scale = torch.full((S, H), code, dtype=torch.int32) if mx else None
k_scale = torch.full((N,), code, dtype=torch.int32) if mx else torch.ones(N)
k_scale = None if "{fmt}" == "bf16" else k_scale
weights = torch.ones(S, H)
window = torch.zeros(S, dtype=torch.int32), torch.full((S,), N, dtype=torch.int32)
out = torch.zeros(S, N)
before = peak()
mqa.fp8_fp4_mqa_logits((q, q_scale), (k, k_scale), weights, *window, out=out)
print(peak() - before)
"""


@pytest.mark.parametrize("fmt", FORMATS)
def test_extra_memory_is_bounded_and_does_not_grow(fmt: str) -> None:
    for S, N in ((128, 8192), (512, 8192), (16, 65536)):
        script = EXTRA.format(fmt=fmt, S=S, N=N)
        printed = subprocess.run(
            [sys.executable, "-c", script], check=True, capture_output=True, text=True
        ).stdout
        assert int(printed) <= 64 << 20, f"{int(printed) >> 20} MiB at S={S} N={N}"


EXTRA_PAGED = """
import resource, torch, mqa

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

def call(B):
    q = torch.full((B, 4, 64, 128), 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)[:, :2]
    cache = torch.zeros(2, 16, 1, 132, dtype=torch.uint8)
    lens, table = torch.ones(B, 2, dtype=torch.int32), torch.ones(B, 1, dtype=torch.int32)
    weights, out = torch.ones(2 * B, 64), torch.zeros(2 * B, 16)
    before = peak()
    mqa.fp8_fp4_paged_mqa_logits(q, cache, weights, lens, table, None, 16, out=out)
    return peak() - before

call(64)
print(call(8192))
"""


def test_a_strided_q_is_not_copied() -> None:
    """q is 128 MiB, in a batch dimension with gaps."""
    command = [sys.executable, "-c", EXTRA_PAGED]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert int(printed) <= 64 << 20, f"{int(printed) >> 20} MiB"
