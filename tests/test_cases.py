"""Inputs that broke other libraries of this kind, each with its known right value.

RAMP: every q and k is 1.0, the k scale of position n is n + 1, every weight is 1 / (H * D): the
logit of position n is n + 1. MX-RAMP: q scales are 1, the k scale of position n is 2**(n mod 8).
Everything is exact, so values are compared bit for bit. Unused pages hold NaN.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import mqa
from mqa.reference import schedule
from mqa.testing import assert_bitwise

NAN_BYTE = 0x7F
STRAY = 1073741824


def ints(device: torch.device, values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def ramp_q(device: torch.device, *rows: int, H: int = 64, D: int = 128) -> tuple[Tensor, Tensor]:
    q = torch.full((*rows, H, D), 0x38, dtype=torch.uint8, device=device)
    count = torch.Size(rows).numel()
    return q.view(torch.float8_e4m3fn), torch.full((count, H), 1 / (H * D), device=device)


def pool(device: torch.device, blocks: int, P: int, D: int = 128) -> Tensor:
    return torch.full((blocks, P, 1, D + 4), NAN_BYTE, dtype=torch.uint8, device=device)


def put_page(cache: Tensor, block: int, first: int, count: int | None = None) -> None:
    """Positions first.. of RAMP into a page; only `count` of its rows, the rest stays NaN."""
    P, D = cache.shape[1], cache.shape[3] - 4
    count = P if count is None else count
    scale = torch.arange(first + 1, first + 1 + count, dtype=torch.float32)
    page = cache[block].view(-1)
    page[: count * D] = 0x38
    page[P * D : P * D + 4 * count] = scale.view(torch.uint8).to(cache.device)


def ramp_pool(
    device: torch.device, blocks: int, P: int, table: list[list[int]], length: int
) -> Tensor:
    cache = pool(device, blocks, P)
    for entry in table:
        for column, block in enumerate(entry):
            first = column * P
            if first < length:
                put_page(cache, block, first, min(P, length - first))
    return cache


def paged(
    cache: Tensor, lens: Tensor, table: Tensor, max_context_len: int, next_n: int = 1, **more: Any
) -> Tensor:
    q, weights = ramp_q(cache.device, table.shape[0], next_n)
    more = {"clean_logits": True} | more
    return mqa.fp8_fp4_paged_mqa_logits(
        q, cache, weights, lens, table, None, max_context_len, **more
    )


def ramp_rows(lens: list[int], width: int) -> Tensor:
    """Rows 1 2 3 … up to their lens, then -inf."""
    position = torch.arange(width, dtype=torch.float32)
    return torch.stack([torch.where(position < n, position + 1, -torch.inf) for n in lens])


# Case 1


@pytest.mark.parametrize("batch", [1, 31, 32, 33, 64, 96, 128, 250, 256])
def test_zero_lengths_give_only_neg_inf(device: torch.device, batch: int) -> None:
    lens = torch.zeros(batch, 1, dtype=torch.int32, device=device)
    for num_sms in (1, 78, 132, 148, 152):
        cuts = mqa.get_paged_mqa_logits_metadata(lens, 64, num_sms)
        assert cuts.shape == (num_sms + 1, 2)
        assert sum(map(len, schedule.tasks(cuts.cpu(), schedule.paged_groups(lens.cpu())))) == 0
    table = torch.full((batch, 2), -1, dtype=torch.int32, device=device)
    logits = paged(pool(device, 3, 64), lens, table, 100)
    assert (logits == -torch.inf).all()


def test_the_last_of_32_rows_has_length_one(device: torch.device) -> None:
    cache = pool(device, 3, 64)
    put_page(cache, 2, 0, 1)
    lens = ints(device, [0] * 31 + [1])
    logits = paged(cache, lens, ints(device, [[2]] * 32), 64)
    assert_bitwise(logits, ramp_rows([0] * 31 + [1], 64))


def test_fewer_tasks_than_sms() -> None:
    lens = torch.ones(96, 1, dtype=torch.int32)
    done = schedule.tasks(
        mqa.get_paged_mqa_logits_metadata(lens, 64, 132), schedule.paged_groups(lens)
    )
    assert sorted(itertools.chain.from_iterable(done)) == [(row, 0) for row in range(96)]
    assert max(map(len, done)) == 1


# Case 2


@pytest.mark.parametrize("batch", [4096, 8192, 12896, 16384, 32768])
@pytest.mark.parametrize("paired", [False, True])
def test_large_batches_are_scheduled_once(batch: int, paired: bool) -> None:
    lens = torch.full((batch, 1), 4096, dtype=torch.int32)
    indices = torch.arange(batch, dtype=torch.int32) // 2 if paired else None
    groups = schedule.paged_groups(lens, indices)
    assert sum(group.rows for group in groups) == batch
    for num_sms in (78, 132, 152):
        cuts = mqa.get_paged_mqa_logits_metadata(lens, 64, num_sms, indices)
        pairs = [tuple(cut) for cut in cuts.tolist()]
        assert pairs == sorted(pairs)
        done = [task for sm in schedule.tasks(cuts, groups) for task in sm]
        assert len(done) == len(set(done)) == len(groups) * 16


@pytest.mark.parametrize("batch", [4096, pytest.param(32768, marks=pytest.mark.slow)])
def test_values_of_large_batches(device: torch.device, batch: int) -> None:
    cache = pool(device, 2, 64)
    put_page(cache, 1, 0, 3)
    lens = 1 + torch.arange(batch, dtype=torch.int32, device=device) % 3
    table = ints(device, [[1]]).expand(batch, 1)
    q, weights = ramp_q(device, 1, 1, H=8)
    logits = mqa.fp8_fp4_paged_mqa_logits(
        q.expand(batch, 1, 8, 128),
        cache,
        weights.expand(batch, 8),
        lens,
        table,
        None,
        3,
        clean_logits=True,
    )
    assert_bitwise(logits, ramp_rows([1, 2, 3], 3).repeat(batch // 3 + 1, 1)[:batch])


# Case 3


@pytest.mark.parametrize("next_n", [1, 2, 3])
def test_nothing_behind_the_lens_is_read(device: torch.device, next_n: int) -> None:
    cache = ramp_pool(device, 2, 64, [[0]], 64)
    want = list(range(65 - next_n, 65))
    for behind in (0, STRAY):
        stored = ints(device, [*want, behind, behind])
        logits = paged(cache, stored[None, :next_n], ints(device, [[0]]), 64, next_n)
        assert_bitwise(logits, ramp_rows(want, 64))


def test_nothing_behind_a_block_table_row_is_read(device: torch.device) -> None:
    cache = ramp_pool(device, 2, 64, [[0]], 64)
    for behind in (0, STRAY):
        table = ints(device, [[0, behind]])
        for columns in (1, 2):
            logits = paged(cache, ints(device, [[64]]), table[:, :columns], 64)
            assert_bitwise(logits, ramp_rows([64], 64))


# Case 4


@pytest.mark.parametrize(
    ("P", "length", "entry", "max_context_len"),
    [
        (64, 257, [7, 2, 9, 0, 4], 257),
        (64, 257, [7, 2, 9, 0, 4], 320),
        (32, 65, [5, 1, 8], 65),
        (32, 1, [3], 1),
    ],
)
def test_a_table_just_wide_enough(
    device: torch.device, P: int, length: int, entry: list[int], max_context_len: int
) -> None:
    cache = ramp_pool(device, 10, P, [entry], length)
    table = ints(device, [[*entry, STRAY]])[:, : len(entry)]
    logits = paged(cache, ints(device, [[length]]), table, max_context_len)
    assert_bitwise(logits, ramp_rows([length], max_context_len))


# Case 5


@pytest.mark.parametrize(
    ("lens", "next_n", "want"),
    [
        ([8], 4, [5, 6, 7, 8]),
        ([7], 3, [5, 6, 7]),
        ([2], 4, [0, 0, 1, 2]),
        ([[5, 6, 7, 8]], 4, [5, 6, 7, 8]),
        ([[8, 1, 0, 3]], 4, [8, 1, 0, 3]),
    ],
)
def test_speculative_rows(
    device: torch.device, lens: list[Any], next_n: int, want: list[int]
) -> None:
    cache = ramp_pool(device, 3, 64, [[2]], 8)
    logits = paged(cache, ints(device, lens), ints(device, [[2]]), 64, next_n)
    assert_bitwise(logits, ramp_rows(want, 64))


@pytest.mark.parametrize("next_n", range(1, 9))
def test_speculative_rows_equal_single_calls_bitwise(device: torch.device, next_n: int) -> None:
    generator = torch.Generator().manual_seed(next_n)
    q = torch.randn(1, next_n, 64, 128, generator=generator).to(torch.float8_e4m3fn).to(device)
    k = torch.randn(5, 64, 128, generator=generator).to(torch.float8_e4m3fn)
    cache = mqa.formats.pack_kv_cache(k, torch.rand(5, 64, generator=generator)).to(device)
    weights = torch.randn(next_n, 64, generator=generator).to(device)
    table = ints(device, [[3, 1, 4, 0, 2]])
    lens = ints(device, [300 + next_n])
    rest = (table, None, 310)
    got = mqa.fp8_fp4_paged_mqa_logits(q, cache, weights, lens, *rest, clean_logits=True)
    for row in range(next_n):
        alone = mqa.fp8_fp4_paged_mqa_logits(
            q[:, row : row + 1],
            cache,
            weights[row : row + 1],
            ints(device, [301 + row]),
            *rest,
            clean_logits=True,
        )
        assert_bitwise(got[row : row + 1], alone)


# Case 6


@pytest.mark.parametrize("P", [1, 2, 16, 32, 64, 128, 256])
def test_values_come_first_in_a_page_then_scales(device: torch.device, P: int) -> None:
    scale = torch.arange(1, P + 1, dtype=torch.float32)
    page = torch.cat((torch.full((P * 128,), 0x38, dtype=torch.uint8), scale.view(torch.uint8)))
    if P == 64:
        assert page.numel() == 8448
        assert page[8192:8200].tolist() == [0, 0, 128, 63, 0, 0, 0, 64]
    cache = page.view(1, P, 1, 132).to(device)
    logits = paged(cache, ints(device, [[P]]), ints(device, [[0]]), P)
    assert_bitwise(logits, ramp_rows([P], P))


# Case 7


def test_blocks_past_two_gib(device: torch.device) -> None:
    stride, last = 1_002_240, 2143
    # On a CPU only the pages written below get memory behind them.
    storage = torch.empty(last * stride + 8448, dtype=torch.uint8, device=device)
    cache = storage.as_strided((last + 1, 64, 1, 132), (stride, 132, 132, 1))
    for block in (last - 1, last):
        put_page(cache, block, 0)
        logits = paged(cache, ints(device, [[64]]), ints(device, [[block]]), 64)
        assert_bitwise(logits, ramp_rows([64], 64))


def test_results_past_two_gib(device: torch.device) -> None:
    # Uncleaned on a CPU, so that only the entries written get memory behind them.
    clean = device.type == "cuda"
    cache = ramp_pool(device, 1, 64, [[0]], 64)
    table = ints(device, [[0]]).expand(256, 1)
    lens = torch.full((256,), 64, dtype=torch.int32, device=device)
    logits = paged(cache, lens, table, 1048576, next_n=3, clean_logits=clean)
    assert logits.stride(0) * 4 * 512 >= 2**31
    for row, count in ((511, 63), (512, 64), (767, 64)):
        assert_bitwise(logits[row : row + 1, :count], ramp_rows([count], count))
        if clean:
            assert (logits[row, count:] == -torch.inf).all()


# Case 8


@pytest.mark.parametrize("shift", [0, 1, 3])
def test_packed_requests_with_cached_prefixes(device: torch.device, shift: int) -> None:
    starts, ends = [0, 0, 0, 5, 5], [3, 4, 5, 10, 11]
    N = 11 + shift
    q, weights = ramp_q(device, 5)
    k = torch.full((N, 128), 0x38, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    scale = torch.arange(1 - shift, 12, dtype=torch.float32, device=device)
    scale[:shift] = torch.nan
    start, end = (ints(device, [n + shift for n in side]) for side in (starts, ends))
    full = mqa.fp8_fp4_mqa_logits(q, (k, scale), weights, start, end)
    compressed = mqa.fp8_fp4_mqa_logits(q, (k, scale), weights, start, end, True, 6)
    for row, (first, last) in enumerate(zip(starts, ends, strict=True)):
        want = torch.arange(first + 1, last + 1, dtype=torch.float32)
        columns = torch.full((1, N), -torch.inf)
        columns[0, first + shift : last + shift] = want
        assert_bitwise(full[row : row + 1], columns)
        columns = torch.full((1, 6), -torch.inf)
        columns[0, : last - first] = want
        assert_bitwise(compressed[row : row + 1], columns)


# Case 9


@pytest.mark.gpu
@pytest.mark.parametrize("captured_len", [0, 1])
def test_graph_replay_with_other_lengths(
    captured_len: int, setenv: Callable[[str, str], None]
) -> None:
    setenv("MQA_FALLBACK", "silent")
    device = torch.device("cuda")
    cache = ramp_pool(device, 40, 64, [list(range(9 * b, 9 * b + 9)) for b in range(4)], 576)
    table = torch.arange(36, dtype=torch.int32, device=device).view(4, 9)
    lens = torch.full((4, 1), captured_len, dtype=torch.int32, device=device)
    q, weights = ramp_q(device, 4, 1)

    def call() -> tuple[Tensor, Tensor]:
        cuts = mqa.get_paged_mqa_logits_metadata(lens, 64, 132)
        logits = mqa.fp8_fp4_paged_mqa_logits(
            q, cache, weights, lens, table, cuts, 576, clean_logits=True
        )
        return cuts, logits

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cuts, logits = call()
    for replayed in ([256, 257, 1, 0], [513, 0, 0, 64], [576] * 4, [1] * 4):
        lens.copy_(ints(device, replayed).view(4, 1))
        graph.replay()
        torch.cuda.synchronize()
        eager_cuts, eager = call()
        assert torch.equal(cuts, eager_cuts)
        assert_bitwise(logits, eager)
        assert_bitwise(logits, ramp_rows(replayed, 576))


def test_a_stale_schedule_changes_nothing(device: torch.device) -> None:
    lens = ints(device, [[257], [256], [256], [256]])
    cache = ramp_pool(device, 20, 64, [[0, 1, 2, 3, 4]], 257)
    table = ints(device, [[0, 1, 2, 3, 4]]).expand(4, 5)
    q, weights = ramp_q(device, 4, 1)
    stale = mqa.get_paged_mqa_logits_metadata(ints(device, [[256]] * 4), 64, 132)
    logits = mqa.fp8_fp4_paged_mqa_logits(
        q, cache, weights, lens, table, stale, 320, clean_logits=True
    )
    assert_bitwise(logits, ramp_rows([257, 256, 256, 256], 320))
    groups = schedule.paged_groups(lens.cpu())
    done = [task for sm in schedule.tasks(stale.cpu(), groups) for task in sm]
    assert sorted(done) == [(0, 0), (0, 1), (1, 0), (2, 0), (3, 0)]


# Case 10


def test_strided_lens_windows_and_weights(device: torch.device) -> None:
    cache = ramp_pool(device, 2, 64, [[1]], 40)
    table = ints(device, [[1]]).expand(2, 1)
    wide = ints(device, [[10, 20, 99, 99], [30, 40, 99, 99]])
    dense = ints(device, [[10, 20], [30, 40]])
    got = paged(cache, wide[:, :2], table, 64, next_n=2)
    assert_bitwise(got, paged(cache, dense, table, 64, next_n=2))
    assert_bitwise(got, ramp_rows([10, 20, 30, 40], 64))

    q, weights = ramp_q(device, 3)
    k = torch.full((9, 128), 0x38, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    scale = torch.arange(1, 10, dtype=torch.float32, device=device)
    start, end = ints(device, [0, 99, 0, 99, 0, 99]), ints(device, [3, 0, 4, 0, 9, 0])
    padded = torch.full((3, 100), torch.nan, device=device)
    padded[:, :64] = weights
    logits = mqa.fp8_fp4_mqa_logits(q, (k, scale), padded[:, :64], start[::2], end[::2])
    assert_bitwise(logits, ramp_rows([3, 4, 9], 9))


# Case 11


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("H", [1, 8, 64])
def test_heads_below_zero_give_plus_zero(
    device: torch.device, H: int, sign: float, mixed: bool
) -> None:
    q, weights = ramp_q(device, 2, H=H)
    weights = weights * sign
    if mixed:
        weights[:, ::2] *= -1
    k = torch.full((7, 128), 0xB8, dtype=torch.uint8, device=device)  # -1.0
    k[3] = 0x80  # -0.0
    scale = torch.ones(7, device=device)
    end = ints(device, [7, 5])
    logits = mqa.fp8_fp4_mqa_logits(
        q, (k.view(torch.float8_e4m3fn), scale), weights, ints(device, [0, 1]), end
    )
    want = torch.zeros(2, 7)
    want[1, [0, 5, 6]] = -torch.inf
    assert_bitwise(logits, want)


def test_minus_zero_codes_count_as_zero(device: torch.device) -> None:
    q = torch.full((1, 4, 16), 0x88, dtype=torch.uint8, device=device)
    one = torch.full((1, 4), 0x7F, dtype=torch.int32, device=device)
    k = torch.full((5, 16), 0x22, dtype=torch.uint8, device=device)
    weights = -torch.ones(1, 4, device=device)
    window = ints(device, [0]), ints(device, [5])
    logits = mqa.fp8_fp4_mqa_logits((q, one), (k, one[0, :1].expand(5)), weights, *window)
    assert_bitwise(logits, torch.zeros(1, 5))


@pytest.mark.parametrize(("code", "value"), [(0x7E, 448.0), (0xFE, -448.0), (0x01, 2.0**-9)])
def test_extreme_e4m3_values(device: torch.device, code: int, value: float) -> None:
    q = torch.full((1, 1, 32), code, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    weights = torch.ones(1, 1, device=device)
    logits = mqa.fp8_fp4_mqa_logits(
        q, (q[0], torch.ones(1, device=device)), weights, ints(device, [0]), ints(device, [1])
    )
    assert logits.item() == value * value * 32


@pytest.mark.parametrize("fmt", ["mxfp8", "mxfp4"])
@pytest.mark.parametrize("code", [10, 127, 246])
def test_ends_of_the_scale_range(device: torch.device, fmt: str, code: int) -> None:
    byte, stored = (0x38, 32) if fmt == "mxfp8" else (0x22, 16)
    values = torch.full((1, 1, stored), byte, dtype=torch.uint8, device=device)
    if fmt == "mxfp8":
        values = values.view(torch.float8_e4m3fn)
    codes = [ints(device, [n]) for n in (code, 254 - code)]
    logits = mqa.fp8_fp4_mqa_logits(
        (values, codes[0].view(1, 1)),
        (values[0], codes[1]),
        torch.ones(1, 1, device=device),
        ints(device, [0]),
        ints(device, [1]),
    )
    assert logits.item() == 32.0


def test_mx_ramp(device: torch.device) -> None:
    for fmt, byte, stored in (("mxfp8", 0x38, 128), ("mxfp4", 0x22, 64)):
        dtype = torch.float8_e4m3fn if fmt == "mxfp8" else torch.uint8
        q = torch.full((1, 64, stored), byte, dtype=torch.uint8, device=device).view(dtype)
        k = torch.full((20, stored), byte, dtype=torch.uint8, device=device).view(dtype)
        code = 127 + torch.arange(20, device=device, dtype=torch.int32) % 8
        q_scale = torch.full((1, 64), 0x7F7F7F7F, dtype=torch.int32, device=device)
        logits = mqa.fp8_fp4_mqa_logits(
            (q, q_scale),
            (k, code * 0x01010101),
            torch.full((1, 64), 1 / (64 * 128), device=device),
            ints(device, [0]),
            ints(device, [20]),
        )
        assert_bitwise(logits, torch.exp2(torch.arange(20) % 8).unsqueeze(0).float())
