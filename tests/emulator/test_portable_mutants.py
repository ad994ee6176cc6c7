"""Mistakes in the portable kernels are found, by name where results would not tell."""

from __future__ import annotations

from pathlib import Path

import pytest
from mutants import (
    DEEP_SEEDS,
    DEEP_STEP,
    MARKS,
    SEEDS,
    Launch,
    Mutant,
    assert_found,
    assert_seen_or_not,
    hunt_nothing,
    with_slow_ones,
)

from mqa.emulator import Kind

pytestmark = MARKS
CASES = {
    "dense": "dense fp8 S=7 N=1100 H=24 D=32 regime=exact windows=full",
    "wide": "dense fp8 S=3 N=150 H=24 D=128 regime=exact windows=full",
    "many": "dense fp8 S=2 N=100 H=130 D=32 regime=exact windows=full",
    "mx": "dense mxfp4 S=5 N=150 H=24 D=64 regime=exact windows=random",
    "paged": "paged fp8 B=3 next_n=1 H=24 D=32 P=48 blocks=90 columns=24 L=1100 regime=exact "
    "lens=full",
}
SCORE, LOAD, MATH = (f"portable/{name}.cuh" for name in ("score", "load", "math"))
QUERIES, SOURCES = "portable/queries.cuh", "portable/sources.cuh"
AT_LOAD = "load_words(shared.k[warp], half, part, words);"
WAIT = "        ptx::cp_async_wait_group_0();\n"
FREE = "        __syncwarp();  // the place is free again\n"
TAKE = "        Products::take(shared, operand, scales);\n"
BY_WARP = "      Ranges::find_range_by_warp(args, shared);\n    }\n"
AGAIN = (
    "        if (token + Tiling::kRound < end)\n"
    "          Loader::begin(args, keys, coming, token + Tiling::kRound, end, shared);\n"
)
MUTANTS = (
    Mutant("keys_not_waited_for", SCORE, WAIT, "",
           Kind.RACE, "cp.async of 16 bytes", AT_LOAD, seen=False),
    Mutant("keys_not_committed", LOAD, "    ptx::cp_async_commit_group();\n", "",
           Kind.RACE, "cp.async of 16 bytes", AT_LOAD, seen=False),
    Mutant("place_filled_before_it_is_read", SCORE, TAKE + FREE + AGAIN, AGAIN + TAKE + FREE,
           Kind.RACE, "while it is written by cp.async", AT_LOAD),
    Mutant("queries_not_waited_for", SCORE,
           "    __syncthreads();\n    // All warps take part in all rounds",
           "    // All warps take part in all rounds",
           Kind.UNWRITTEN, "comes from rows[0]", "if (!sees)"),
    Mutant("block_not_waited_for", SCORE, "      __syncthreads();\n      const Found found",
           "      const Found found", Kind.UNWRITTEN, "comes from found", "found.length == 0"),
    Mutant("range_not_waited_for", SCORE, f"{BY_WARP}    __syncthreads();\n", BY_WARP,
           Kind.RACE, "cuts", "shared.cuts.cuts[i] = cut;", seen=False),
    Mutant("heads_overwritten_while_they_are_read", SCORE,
           "      __syncthreads();\n      Queries<Tiling, Source>::bring(args, row, 1, head",
           "      Queries<Tiling, Source>::bring(args, row, 1, head", Kind.RACE, "q + ",
           "const uint4 b = shared.q[", case="many"),
    Mutant("warps_without_tokens_leave", SCORE, "done < found.length; done += Tiling::kRound",
           "token < end; done += Tiling::kRound", Kind.DEADLOCK, "barrier 4", "kTurnBarrier"),
    Mutant("turns_of_the_wrong_warp", MATH, "^ kWarps / 2)", "^ 1)", Kind.DEADLOCK, "barrier 4",
           "kTurnBarrier"),
    Mutant("tokens_past_the_end_copied", SOURCES,
           "if (token >= end) return {};\n    return of_token(args, token);",
           "if (token > end) return {};\n    return of_token(args, token);", Kind.OUT_OF_BOUNDS,
           "past the end of kv", "block(args, Source::task(args", case="wide"),
    Mutant("pages_past_the_end_looked_up", SOURCES, "keys, min(first, end - 1)", "keys, first",
           Kind.OUT_OF_BOUNDS, "of table", "args.page.divide(token)", case="paged"),
    Mutant("heads_past_the_last_read", QUERIES, "const bool exists = head < args.heads;",
           "const bool exists = head <= args.heads;", Kind.OUT_OF_BOUNDS, "past the end of q",
           "if (exists) load(from", case="wide"),
    Mutant("row_ends_late", MATH, "token < end && token - row.start < row.length)",
           "token - row.start <= row.length)", Kind.OUT_OF_BOUNDS, "of out", "ptx::st_global(",
           seen=False, case="wide"),
    Mutant("swizzled_otherwise", MATH, "swizzled<Row::kBytes>(g,", "swizzled<Row::kBytes>(g ^ 1,",
           case="wide"),
    Mutant("scale_of_another_token", MATH, "shared.scales[warp][token_of(output)]",
           "shared.scales[warp][token_of(output) ^ 8]", case="wide"),
    Mutant("codes_of_the_other_half", MATH, "shared.scales[warp][half * 8 + g]",
           "shared.scales[warp][(half ^ 1) * 8 + g]", case="mx"),
    Mutant("sums_of_other_lanes", MATH, "__shfl_xor_sync(kAllLanes, given, 2)",
           "__shfl_xor_sync(kAllLanes, given, 1)",
           case="wide"),
)  # fmt: skip
QUICK = {"keys_not_waited_for", "warps_without_tokens_leave"}
"""What `make test` has; each takes some seconds."""


def launch_of(case: str, patch: pytest.MonkeyPatch) -> Launch:
    return Launch(CASES[case], patch, backend="portable-emulated")


@pytest.mark.parametrize("mutant", with_slow_ones(MUTANTS, QUICK))
def test_a_mistake_is_found_and_named(
    mutant: Mutant, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert_found(mutant, launch_of(mutant.case, monkeypatch), tmp_path, range(SEEDS // 4))


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_a_mistake_is_seen_without_checks_or_not(
    mutant: Mutant, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert_seen_or_not(mutant, launch_of(mutant.case, monkeypatch), tmp_path)


def test_most_mistakes_are_named() -> None:
    named = [mutant for mutant in MUTANTS if mutant.kind is not None]
    assert len(MUTANTS) >= 15
    assert 4 * len(named) >= 3 * len(MUTANTS)
    assert all(mutant.names and mutant.at for mutant in named)
    assert sum(not mutant.seen for mutant in MUTANTS) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, DEEP_SEEDS // 4, DEEP_STEP))
@pytest.mark.parametrize("case", CASES)
def test_the_kernels_themselves_are_hunted_and_nothing_is_found(
    case: str, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = launch_of(case, monkeypatch)
    hunt_nothing(launch, launch.compiled(), range(first, first + DEEP_STEP // 2))
