"""What the portable kernels have to do, in the emulator and on a GPU: cases, and checks of what
changes nothing and of what reaches which logits. `LINES` and `EVERY` are what the corpus `portable`
adds to `all`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from paged_cases import in_pages, paged_line, pool, used_tokens
from torch import Tensor

import mqa
from mqa.cuda.operands import HEAD_DIMS
from mqa.cuda.portable import ELEMENTS, PORTABLE
from mqa.problem import LOGITS_DTYPES, DenseProblem, PagedProblem, Problem, parse
from mqa.reference import definition
from mqa.testing import Case, assert_bitwise, make_case

FORMATS = tuple(ELEMENTS)
NAN_CODE = 0x7F
"""As every byte of q, k or a cache: NaN in E4M3, and twice in bfloat16."""
QUICK = {
    "dense fp8 S=9 N=300 H=24 D=64 clean=1 windows=random sms=2",
    "paged fp8 B=2 next_n=3 H=5 D=64 P=3 blocks=90 columns=33 L=97 clean=1",
    "dense mxfp8 S=5 N=70 H=24 D=64 windows=random q_off=3 kv_off=5 w_off=4",
    "dense mxfp4 S=2 N=70 H=130 D=32 out=bfloat16",
    "paged mxfp4 B=5 next_n=1 H=32 D=128 P=48 blocks=40 columns=3 L=140 varlen=1 lens=random",
}
QUICK_IN_LINE = {
    "paged fp8 B=2 next_n=2 H=24 D=128 P=64 blocks=50 columns=20 L=1216 clean=1 lens=ramp sms=1",
    "paged bf16 B=1 next_n=1 H=24 D=128 P=32 blocks=50 columns=30 L=900 sms=1",
    "dense fp8 S=2 N=200 H=8 D=64 kv_stride=80 kv_scale_stride=3",
    "dense mxfp8 S=2 N=200 H=8 D=64 kv_stride=80 kv_scale_stride=3",
}
LINES = (
    *sorted(QUICK),
    "dense bf16 S=5 N=150 H=24 D=128 windows=random q_off=2 kv_off=6",
    "dense bf16 S=3 N=90 H=130 D=32 M=91 windows=random q_stride=10000x70x2 kv_stride=70x2",
    "dense bf16 S=9 N=300 H=8 D=64 windows=random sms=3",
    "paged bf16 B=2 next_n=3 H=5 D=64 P=3 blocks=90 columns=33 L=97 cache_stride=301 cache_off=6",
    "paged bf16 B=2 next_n=2 H=24 D=128 P=64 blocks=9 columns=3 L=150 clean=1 lens=random",
    "dense fp8 S=7 N=260 H=1 D=32 windows=random",
    "dense fp8 S=5 N=300 H=8 D=128 M=301 out=float16 weights=bfloat16 windows=random",
    "dense fp8 S=5 N=90 H=64 D=128 q_stride=40000x300x2 kv_stride=300x2 q_off=3 kv_off=5",
    "dense fp8 S=5 N=90 H=100 D=128 kv_stride=132 kv_off=4 kv_scale_stride=3 kv_scale_off=4",
    "dense fp8 S=3 N=300 H=128 D=32 windows=packed start_stride=2 end_stride=3 out_off=4",
    "dense mxfp8 S=3 N=90 H=5 D=32 M=91 windows=random q_stride=700x41x2 q_scale_stride=90x3",
    "dense mxfp8 S=3 N=90 H=130 D=128 weights=bfloat16",
    "dense mxfp8 S=5 N=140 H=64 D=128 windows=random q_off=3 kv_off=5 w_off=4",
    "dense mxfp4 S=3 N=90 H=24 D=64 M=91 windows=random kv_stride=33 kv_off=1",
    "dense mxfp4 S=35 N=300 H=16 D=128 windows=random sms=3",
    "paged fp8 B=2 next_n=2 H=64 D=128 P=1 blocks=99 columns=97 L=97 clean=1 lens=random",
    "paged fp8 B=3 next_n=1 H=130 D=64 P=64 blocks=9 columns=2 L=128 clean=1 lens=random",
    "paged fp8 B=2 next_n=9 H=8 D=32 P=256 blocks=4 columns=2 L=300 lens=ramp clean=1 sms=3",
    "paged fp8 B=2 next_n=2 H=16 D=128 P=7 blocks=60 columns=30 L=200 cache_stride=999 cache_off=5",
    "paged fp8 B=17 next_n=1 H=100 D=64 P=48 blocks=20 columns=4 L=97 varlen=1 clean=1 lens=random",
    "paged mxfp8 B=2 next_n=4 H=16 D=64 P=16 blocks=11 columns=4 L=60 lens_rank=1",
    (
        "paged mxfp8 B=2 next_n=2 H=64 D=128 P=48 blocks=11 columns=4 L=180 "
        "q_stride=20001x10000x140 q_scale_stride=300x100x1"
    ),
    "paged mxfp8 B=2 next_n=3 H=128 D=32 P=64 blocks=9 columns=3 L=150 clean=1 lens=ramp",
    "paged mxfp4 B=3 next_n=2 H=1 D=64 P=3 blocks=200 columns=60 L=170 table_stride=70x1 clean=1",
    "paged mxfp4 B=3 next_n=2 H=24 D=32 P=256 blocks=5 columns=1 L=256 lens=random w_stride=70x2",
    # Chunks whose keys all exist, aligned, at one stride, which are copied at once: in pages, which
    # a CTA looks up again for each of its rounds, here three or four; and in rows with gaps, as are
    # their scales.
    *sorted(QUICK_IN_LINE),
    "paged mxfp8 B=2 next_n=2 H=24 D=64 P=64 blocks=50 columns=20 L=1216 clean=1 lens=ramp sms=1",
    "paged mxfp4 B=2 next_n=2 H=24 D=32 P=64 blocks=50 columns=20 L=1216 clean=1 lens=ramp sms=1",
    "paged bf16 B=2 next_n=2 H=24 D=64 P=64 blocks=50 columns=20 L=1216 clean=1 lens=ramp sms=1",
    "dense mxfp4 S=2 N=200 H=8 D=128 kv_stride=80 kv_scale_stride=3",
    "dense bf16 S=2 N=200 H=8 D=64 kv_stride=72",
)


HEADS = (5, 16, 24, 64, 100, 130)
"""One for each number that heads are padded to."""


def lines_of_every_choice() -> Iterator[str]:
    """Each format with each head count and dim, dense and paged; logits dtypes in turn."""
    for number, (format, H, D) in enumerate(itertools.product(FORMATS, HEADS, HEAD_DIMS)):
        facts = f"H={H} D={D} out={LOGITS_DTYPES[number % 3]} seed={number}"
        yield f"dense {format} S=37 N=700 {facts} windows=random"
        P = (1, 3, 48, 64, 256, 7)[number % 6]
        yield paged_line(P, 500, f"next_n={number % 9 + 1} {facts} lens=random", format=format)


EVERY = tuple(lines_of_every_choice())


@dataclass(frozen=True)
class Runner:
    """Where cases lie, and which backend computes them under which guard."""

    backend: str
    device: torch.device
    guard: Callable[[], AbstractContextManager[None]]

    def case(self, line: str | Problem) -> Case:
        return make_case(parse(line) if isinstance(line, str) else line, self.device)

    def call(self, case: Case, **changes: Any) -> Tensor:
        """The public call of a case, without a schedule, with some arguments changed, over NaN."""
        dense = isinstance(case.problem, DenseProblem)
        given = case.kwargs | {"schedule_meta": None} | changes
        width = given.get("max_seqlen_k") or case.problem.width
        shape, dtype = (len(given["weights"]), width), given["logits_dtype"]
        out = torch.full(shape, torch.nan, dtype=dtype, device=self.device)
        with self.guard():
            function = mqa.fp8_fp4_mqa_logits if dense else mqa.fp8_fp4_paged_mqa_logits
            return function(**given, backend=self.backend, out=out)

    def paged(self, case: Case, P: int, next_n: int) -> Tensor:
        """The rows of a dense case as requests over pages."""
        given = in_pages(case, P, next_n)
        with self.guard():
            return mqa.fp8_fp4_paged_mqa_logits(**given, backend=self.backend)

    def int32(self, *numbers: int) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=self.device)


def own_schedule(
    case: Case, parts: int, guard: Callable[[], AbstractContextManager[None]]
) -> Tensor:
    """By the portable kernels, which public calls use where no other backend makes schedules."""
    t, problem = case.tensors, case.problem
    out = torch.full((parts + 1, 2), -7, dtype=torch.int32, device=case.device)
    with guard():
        if isinstance(problem, PagedProblem):
            PORTABLE.paged_metadata(t["lens"], t.get("indices"), out)
        else:
            PORTABLE.dense_metadata(t["start"], t["end"], problem.N, problem.H, out)
    return out


def same_bits_in_every_company(run: Runner, format: str, H: int) -> None:
    """A row alone, among others, compressed, in pages, with bfloat16 weights, of any window."""
    case = run.case(f"dense {format} S=8 N=200 H={H} D=64 weights=bfloat16 windows=full seed=3")
    t = case.tensors
    want = run.call(case)
    assert_bitwise(run.call(case, weights=t["w"].float()), want)
    assert_bitwise(run.call(case, max_seqlen_k=200), want)
    low, high = run.int32(*[67] * 8), run.int32(*[197] * 8)
    part = run.call(case, cu_seq_len_k_start=low, cu_seq_len_k_end=high)
    assert_bitwise(part[:, 67:197], want[:, 67:197])
    for rows in (slice(0, 1), slice(3, 8)):
        q = (t["q"][rows], t["q_scale"][rows]) if "q_scale" in t else t["q"][rows]
        windows = {f"cu_seq_len_k_{side}": t[side][rows] for side in ("start", "end")}
        assert_bitwise(run.call(case, q=q, weights=t["w"][rows], **windows), want[rows])
    for P, next_n in ((3, 1), (48, 2), (256, 8)):
        assert_bitwise(run.paged(case, P, next_n), want, replay=f"{P} {next_n}")


def windows_of_every_kind(run: Runner, H: int) -> None:
    """Empty, inverted and ragged ones, and some past the ends."""
    case = run.case(f"dense fp8 S=8 N=300 H={H} D=64 windows=full regime=exact")
    want = run.call(case)
    start = run.int32(0, 40, -9, 299, 5, 7, 128, 127)
    end = run.int32(0, 39, 1, 900, 6, 7, 256, 129)
    got = run.call(case, cu_seq_len_k_start=start, cu_seq_len_k_end=end)
    n = torch.arange(300, device=run.device)
    inside = (n >= start[:, None]) & (n < end[:, None])
    assert_bitwise(got, torch.where(inside, want, -torch.inf))
    assert run.call(case, cu_seq_len_k_start=start, cu_seq_len_k_end=start).eq(-torch.inf).all()


def nan_reaches_what_uses_it(run: Runner, format: str, D: int) -> None:
    """And nothing else. It lies at the ends of both halves of a row and inside them: a thread may
    have some words of each half."""
    case = run.case(f"dense {format} S=12 N=260 H=24 D={D} windows=full seed=4")
    t, half = case.tensors, D // 2
    dims = ((0, 5), (half - 1, half - 6), (half, half + 5), (D - 1, D - 7))
    t["start"].copy_(run.int32(9, 0, 64, 99, 100, 127, 200, 0, 0, 127, 60, 50))
    t["end"].copy_(run.int32(260, 260, 65, 180, 260, 140, 259, 260, 128, 260, 140, 50))
    want = run.call(case)
    n = torch.arange(260, device=run.device)
    inside = (n >= t["start"][:, None]) & (n < t["end"][:, None])
    assert not want[inside].isnan().any()
    rows = torch.zeros(12, dtype=torch.bool, device=run.device)
    tokens = torch.zeros(260, dtype=torch.bool, device=run.device)
    t["w"][0, 3] = torch.nan
    rows[0] = True
    for at, token in enumerate((0, 127, 128, 259)):
        if format == "fp8":
            t["kv_scale"][token] = torch.nan
        elif format != "bf16":
            t["kv_scale"].view(torch.uint8).view(260, 4)[token, at % 2 * (D // 32 - 1)] = 0xFF
        tokens[token] = format != "bf16"
    if format != "mxfp4":  # E2M1 has no NaN.
        keys, queries = (
            t[name] if format == "bf16" else t[name].view(torch.uint8) for name in ("kv", "q")
        )
        codes = (torch.nan, -torch.nan) if format == "bf16" else (NAN_CODE, NAN_CODE | 0x80)
        for at, (end, inner) in enumerate(dims):
            keys[61 + at, end], keys[130 + at, inner] = codes[at % 2], codes[at // 2]
            tokens[61 + at] = tokens[130 + at] = True
            queries[1 + at, 23 - at, end] = codes[at // 2]
            rows[1 + at] = True
    if format.startswith("mx"):
        for row, block in ((5, 0), (6, D // 32 - 1)):
            t["q_scale"].view(torch.uint8).view(12, 24, 4)[row, 11, block] = 0xFF
            rows[row] = True
    poisoned = inside & (rows[:, None] | tokens)
    assert (inside & ~rows[:, None])[:, tokens].any(0).all()
    assert poisoned[rows].any(1).all()
    assert (inside & ~poisoned).any()
    assert_bitwise(run.call(case), torch.where(poisoned, torch.nan, want))


def nan_elsewhere_does_not_matter(run: Runner, format: str, P: int) -> None:
    """All that a row does not use is NaN: other rows, tokens past its length, unused pages."""
    case = run.case(paged_line(P, 200, "next_n=2 H=24 D=64 clean=1 seed=5", B=2, format=format))
    t = case.tensors
    t["lens"].copy_(run.int32(33, 131, 190, 60).view(2, 2))
    want = run.call(case)
    assert not want.isnan().any()
    codes, scales = (None, None) if format == "bf16" else pool(case)
    t["lens"][0, 0] = t["lens"][1, 0] = t["lens"][1, 1] = 0  # one row, of 131 tokens, is left
    unused = ~used_tokens(case)
    if codes is None or scales is None:
        t["cache"][:, :, 0][unused] = torch.nan
    else:
        codes[unused], scales[unused] = NAN_CODE, (torch.nan if format == "fp8" else -1)
    others = torch.tensor([0, 2, 3], device=run.device)
    t["q"].view(torch.uint8).view(4, 24, -1)[others] = NAN_CODE
    t["w"][others] = torch.nan
    if "q_scale" in t:
        t["q_scale"].view(4, 24)[others] = -1
    got = run.call(case)
    assert_bitwise(got[1:2], want[1:2])
    assert got[others].eq(-torch.inf).all()


def bad_block_ids_read_as_zeros(run: Runner, format: str, P: int) -> None:
    """Negative and too large ones, of pages of every round of a CTA and of one with few tokens."""
    facts = "next_n=1 H=24 D=64 clean=1 lens=full sms=1 seed=5"
    case = run.case(paged_line(P, 1100, facts, B=2, format=format))
    table, cuts = case.tensors["table"], case.stale_schedule()
    want = run.call(case, schedule_meta=cuts).clone()
    blocks = len(case.tensors["cache"])
    later = 1024 // P
    for request, column, number in (
        (0, 1, -1),
        (0, later, blocks + 3),
        (1, 0, 2**31 - 1),
        (1, later - 3, -(2**31)),
        (1, -(-1100 // P) - 1, blocks),
    ):
        table[request, column] = number
        want[request, column * P : column * P + P] = 0.0
    assert_bitwise(run.call(case, schedule_meta=cuts), want)


def infinities_do_what_the_definition_says(run: Runner, H: int) -> None:
    """Those of bfloat16 keys and queries, beside heads that only the kernel has."""
    case = run.case(f"dense bf16 S=5 N=70 H={H} D=64 windows=full regime=exact")
    t = case.tensors
    t["q"][:3].abs_()
    t["q"][3:] = 1
    t["w"][3].abs_()
    t["w"][4].abs_().neg_()
    for token in range(0, 70, 7):
        t["kv"][token, token % 64] = torch.inf if token % 2 else -torch.inf
    t["q"][0, -1, 7] = 0
    t["q"][1, 0, 9] = torch.inf
    t["w"][2, -1] = 0
    q, k, w, start, end = (t[name].cpu() for name in ("q", "kv", "w", "start", "end"))
    want = definition.dense(q, None, k, None, w, start, end)
    want = definition.round_once(want, torch.float32).to(run.device)
    for kind in (torch.isposinf, torch.isneginf, torch.isnan, torch.isfinite):
        assert kind(want).any()
    assert_bitwise(run.call(case), want)


def plateau_is_plus_zero(run: Runner, format: str) -> None:
    """All dots at most 0: exactly +0.0, whatever the signs of the weights."""
    case = run.case(f"dense {format} S=3 N=150 H=24 D=64 windows=full seed=4")
    q, k = (case.tensors[name].view(torch.uint8) for name in ("q", "kv"))
    assert (run.call(case) != 0).float().mean() > 0.2
    if format == "mxfp4":
        q &= 0x77
        k |= 0x88
    elif format == "bf16":
        case.tensors["q"].abs_()
        case.tensors["kv"].copy_(-case.tensors["kv"].abs())
    else:
        q &= 0x7F
        k |= 0x80
        q[q == NAN_CODE], k[k == 0xFF] = 0x38, 0xB8
    w = case.tensors["w"]
    for weights in (w, -w.abs(), (-w.abs()).bfloat16()):
        assert_bitwise(run.call(case, weights=weights), torch.zeros(3, 150, device=run.device))
