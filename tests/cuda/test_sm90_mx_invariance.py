"""On Hopper a row of an MX call has the same bits in any batch, dense and paged, with any
schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from mx_cases import FORMATS, HEAD_DIMS, HEADS, SPREAD, mx_line, paged_call, short_dtype
from paged_cases import PAGE_SIZES, in_pages, seen
from schedule_contents import CONTENTS
from torch import Tensor

from mqa.testing import Case, assert_bitwise, guards_intact

pytestmark = pytest.mark.gpu
S, N = 72, 1000
SMS = (1, 67, 200)


@dataclass(frozen=True)
class Scored:
    """A dense case whose windows begin at 0, and its logits."""

    case: Case
    whole: Tensor


@pytest.fixture(scope="module", params=[(format, H) for format in FORMATS for H in HEADS])
def scored(sm90: Any, request: pytest.FixtureRequest) -> Scored:
    format, H = request.param
    D = HEAD_DIMS[(HEADS.index(H) + FORMATS.index(format)) % 2]
    case = sm90.case(f"dense {format} S={S} N={N} H={H} D={D} windows=random seed=1")
    case.tensors["start"].zero_()
    case.tensors["end"].clamp_(0, N)
    return Scored(case, sm90.call(case))


@pytest.mark.parametrize("next_n", [1, 2, 3, 4, 8, 9, 24])
def test_paged_logits_are_the_dense_ones(sm90: Any, scored: Scored, next_n: int) -> None:
    for P in PAGE_SIZES:
        arguments = in_pages(scored.case, P, next_n)
        assert_bitwise(paged_call(sm90, arguments), scored.whole)
    got = paged_call(sm90, arguments, max_context_len=N - 77)
    assert_bitwise(got, scored.whole[:, : N - 77])


@pytest.mark.parametrize("length", [1, 3, 8, 11])
def test_varlen_logits_are_the_dense_ones(sm90: Any, scored: Scored, length: int) -> None:
    row = torch.arange(S, device=sm90.device)
    for P in (8, 64, 256):
        arguments = in_pages(scored.case, P, 1)
        for indices in (row // length, (row + 5) // length % 2):
            got = paged_call(sm90, arguments, indices=indices.int())
            assert_bitwise(got, scored.whole)


@pytest.mark.parametrize("next_n", [1, 3, 8])
def test_requests_scored_apart_have_the_same_bits(sm90: Any, scored: Scored, next_n: int) -> None:
    arguments, B = in_pages(scored.case, 64, next_n), S // next_n
    for first, last in ((0, 1), (B - 1, B), (B // 2, B // 2 + 1), (1, B)):
        rows = slice(first * next_n, last * next_n)
        part = {name: arguments[name][first:last] for name in ("context_lens", "block_table")}
        q = tuple(tensor[first:last] for tensor in arguments["q"])
        got = paged_call(sm90, arguments | part, q=q, weights=arguments["weights"][rows])
        assert_bitwise(got, scored.whole[rows])


@pytest.mark.parametrize("step", [1, 3, 16, 65])
def test_rows_scored_apart_have_the_same_bits(sm90: Any, scored: Scored, step: int) -> None:
    for first in (0, 7):
        cuts = range(first, S, step)
        parts = [sm90.call(scored.case, slice(row, row + step)) for row in cuts]
        assert_bitwise(torch.cat(parts), scored.whole[first:], replay=scored.case.problem)


def test_a_row_has_the_same_bits_at_any_place_of_a_batch(sm90: Any, scored: Scored) -> None:
    """Rows in another order, and one row repeated."""
    t = scored.case.tensors
    order = torch.randperm(S, generator=torch.Generator().manual_seed(1)).to(sm90.device)
    for index in (order, order[:11], torch.full((140,), 37, device=sm90.device)):
        q = t["q"].view(torch.uint8)[index].view(t["q"].dtype)
        got = sm90.call(
            scored.case,
            q=(q, t["q_scale"][index]),
            weights=t["w"][index],
            cu_seq_len_k_start=t["start"][index],
            cu_seq_len_k_end=t["end"][index],
        )
        assert_bitwise(got, scored.whole[index], replay=scored.case.problem)


def test_any_window_scored_alone_has_the_same_bits(sm90: Any, scored: Scored) -> None:
    case, t = scored.case, scored.case.tensors
    bound = lambda n: torch.full((S,), n, dtype=torch.int32, device=sm90.device)  # noqa: E731
    full = sm90.call(case, cu_seq_len_k_start=bound(0), cu_seq_len_k_end=bound(N))
    for low, high in ((0, 1), (1, 255), (255, 257), (300, 700), (511, N)):
        window = {"cu_seq_len_k_start": bound(low), "cu_seq_len_k_end": bound(high)}
        want = full[:, low:high]
        assert_bitwise(sm90.call(case, **window)[:, low:high], want)
        compressed = sm90.call(case, **window, max_seqlen_k=N)
        assert_bitwise(compressed[:, : high - low], want)
        # The same tokens as a tensor of their own: at another place in a tile.
        own = {"cu_seq_len_k_start": bound(0), "cu_seq_len_k_end": bound(high - low)}
        kv = t["kv"][low:high], t["kv_scale"][low:high]
        assert_bitwise(sm90.call(case, kv=kv, **own), want)


def test_clean_weights_dtype_and_out_do_not_change_bits(sm90: Any, scored: Scored) -> None:
    case = scored.case
    halves = case.tensors["w"].bfloat16()
    want = sm90.call(case, weights=halves)
    assert_bitwise(sm90.call(case, weights=halves.float()), want)
    assert_bitwise(sm90.call(case, max_seqlen_k=N), scored.whole)
    inside = scored.whole.isfinite().cpu().numpy()
    assert_bitwise(sm90.call(case, clean_logits=False), scored.whole, where=inside)
    short = getattr(torch, short_dtype(case.problem.format, case.problem.H, case.problem.D))
    assert_bitwise(sm90.call(case, logits_dtype=short), scored.whole.to(short))
    for stride in (N + 1, 1024):
        out = torch.full((S, stride), torch.nan, device=sm90.device)[:, :N]
        assert_bitwise(sm90.call(case, out=out), scored.whole)


@pytest.mark.parametrize(("format", "H", "next_n", "D"), SPREAD)
def test_lens_of_other_rows_do_not_change_bits(
    sm90: Any, format: str, H: int, next_n: int, D: int
) -> None:
    case = sm90.case(mx_line(format, 64, 600, f"next_n={next_n} H={H} D={D} seed=3", B=4))
    whole, lens = sm90.call(case), case.tensors["lens"]
    generator = torch.Generator().manual_seed(1)
    for _ in range(6):
        lens.copy_(torch.randint(0, 601, lens.shape, generator=generator))
        assert_bitwise(sm90.call(case), torch.where(seen(case), whole, -torch.inf))


@pytest.mark.parametrize(("format", "H", "next_n", "D"), SPREAD)
def test_twenty_repeats_have_the_same_bits(
    sm90: Any, format: str, H: int, next_n: int, D: int
) -> None:
    facts = f"H={H} D={D} seed=3"
    pages = mx_line(format, 16, 900, f"next_n={next_n} lens=random {facts}", B=20)
    for line in (pages, f"dense {format} S=150 N=900 windows=random {facts}"):
        case = sm90.case(line)
        want, cuts = sm90.call(case), sm90.metadata(case)
        for _ in range(20):
            for meta in (None, cuts):
                assert_bitwise(sm90.call(case, schedule_meta=meta), want, replay=line)


def scheduled(sm90: Any, case: Case, cuts: Tensor | None) -> Tensor:
    """The logits with this schedule, written over NaN; nothing around them is written."""
    out = case.new_out()
    sm90.run(case, out=out, schedule_meta=cuts)
    assert guards_intact(out)
    return out


@pytest.mark.parametrize(("format", "H", "next_n", "D"), SPREAD)
def test_contents_of_a_schedule_do_not_change_bits(
    sm90: Any, format: str, H: int, next_n: int, D: int
) -> None:
    facts = f"H={H} D={D} clean=1 seed=2"
    layout = "out_off=4 out_stride=701"
    for line in (
        mx_line(format, 32, 700, f"next_n={next_n} lens=random {facts} {layout}", B=9),
        f"dense {format} S=140 N=700 windows=random {facts} {layout}",
    ):
        case = sm90.case(line)
        want = scheduled(sm90, case, None)
        for sms in SMS:
            fresh = sm90.metadata(case, sms).cpu()
            for contents in CONTENTS.values():
                cuts = contents(fresh).to(sm90.device)
                assert_bitwise(scheduled(sm90, case, cuts), want, replay=f"{line} sms={sms}")
            with sm90.num_sms(sms):
                assert_bitwise(scheduled(sm90, case, None), want, replay=f"{line} sms={sms}")


@pytest.mark.parametrize("sms", [1, 200])
@pytest.mark.parametrize(("format", "H", "next_n", "D"), SPREAD)
def test_uncleaned_logits_with_garbage_schedules_are_right(
    sm90: Any, format: str, H: int, next_n: int, D: int, sms: int
) -> None:
    facts = f"H={H} D={D} clean=0 seed=2 sms={sms} regime=exact"
    sm90.check(mx_line(format, 32, 700, f"next_n={next_n} lens=random {facts}", B=9))
    sm90.check(f"dense {format} S=70 N=700 windows=random {facts}")
