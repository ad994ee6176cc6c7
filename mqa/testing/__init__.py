"""Test your own indexer kernel: cases from one line, an oracle, derived bounds, planted faults.

    import torch
    from mqa.problem import parse
    from mqa.testing import assert_logits, make_case

    def my_logits(q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, **options):
        (k, k_scale), (start, end) = kv, (cu_seq_len_k_start, cu_seq_len_k_end)
        dots = torch.einsum("shd,nd->shn", q.float(), k.float())
        logits = torch.einsum("sh,shn->sn", weights, dots).relu() * k_scale  # relu comes too late
        position = torch.arange(len(k))
        outside = (position < start[:, None]) | (position >= end[:, None])
        return logits.masked_fill(outside, float("-inf"))

    case = make_case(parse("dense fp8 S=3 N=40 H=8 D=64 seed=2"))
    try:
        assert_logits(case, case.run(my_logits))
    except AssertionError as error:
        message = str(error)
    else:
        raise SystemExit("the fault went unnoticed")
    assert "entries are out of bounds" in message
    assert message.endswith("replay: dense fp8 S=3 N=40 H=8 D=64 seed=2")

`mqa.testing.strategies` (which needs hypothesis) draws problems. More: `docs/testing.md`.
"""

from mqa.testing.accumulators import (
    AMPERE_BF16,
    EXACT,
    FLOAT32,
    HOPPER_BF16,
    HOPPER_FP8,
    HOPPER_MMA_BF16,
    Accumulator,
    Float32AnyOrder,
    Float64,
    FusedTruncating,
    Tiled,
)
from mqa.testing.cases import CORPORA, Case, corpus, make_case, read_corpus
from mqa.testing.check import assert_logits, largest_error
from mqa.testing.compare import assert_bitwise, assert_within, round_once, to_tensor
from mqa.testing.data import Data, Group
from mqa.testing.faults import BOUNDED_FAULTS, EXACT_FAULTS, Fault, detects, flagged_fraction
from mqa.testing.layout import guards_intact
from mqa.testing.oracle import OracleResult, logits
from mqa.testing.regimes import assert_bounded, assert_exact
from mqa.testing.timing import Ratio, interleaved, wall_clock
from mqa.testing.tolerance import tolerance

__all__ = [
    "AMPERE_BF16",
    "BOUNDED_FAULTS",
    "CORPORA",
    "EXACT",
    "EXACT_FAULTS",
    "FLOAT32",
    "HOPPER_BF16",
    "HOPPER_FP8",
    "HOPPER_MMA_BF16",
    "Accumulator",
    "Case",
    "Data",
    "Fault",
    "Float32AnyOrder",
    "Float64",
    "FusedTruncating",
    "Group",
    "OracleResult",
    "Ratio",
    "Tiled",
    "assert_bitwise",
    "assert_bounded",
    "assert_exact",
    "assert_logits",
    "assert_within",
    "corpus",
    "detects",
    "flagged_fraction",
    "guards_intact",
    "interleaved",
    "largest_error",
    "logits",
    "make_case",
    "read_corpus",
    "round_once",
    "to_tensor",
    "tolerance",
    "wall_clock",
]
