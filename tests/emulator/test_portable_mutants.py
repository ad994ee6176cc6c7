"""Mistakes in the portable kernels are found, by name where results would not tell."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
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
    # Pages of whole chunks, three rounds of a CTA.
    "in_line": "paged fp8 B=3 next_n=1 H=24 D=32 P=64 blocks=60 columns=19 L=1216 regime=exact "
    "lens=full",
    "bad_id": "paged fp8 B=2 next_n=1 H=24 D=32 P=64 blocks=9 columns=3 L=150 regime=exact "
    "lens=full",
    "nan": "dense fp8 S=3 N=150 H=24 D=128 regime=exact windows=full",
    "gaps": "dense fp8 S=2 N=200 H=8 D=64 regime=exact windows=full kv_stride=80 kv_scale_stride=3",
}
SCORE, LOAD, MATH = (f"portable/{name}.cuh" for name in ("score", "load", "math"))
QUERIES, SOURCES = "portable/queries.cuh", "portable/sources.cuh"
IN_BLOCK = "block(args, Source::task(args"
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
           "past the end of kv", IN_BLOCK, case="wide"),
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
    Mutant("page_of_the_first_round_in_the_second", SCORE,
           "coming(args, keys, token + Tiling::kRound, end)", "coming(args, keys, token, end)",
           case="in_line"),
    Mutant("page_of_an_earlier_round", SCORE, "token + 2 * Tiling::kRound, end)", "token, end)",
           case="in_line"),
    Mutant("page_that_does_not_exist_copied", LOAD, " && line.key != nullptr", "",
           Kind.OUT_OF_BOUNDS, "no allocation is near", IN_BLOCK, case="bad_id"),
    Mutant("nan_of_the_first_part_alone", MATH,
           "#pragma unroll 1\n      for (int part = 0; part < Row::kParts; part++)",
           "#pragma unroll 1\n      for (int part = 0; part < 1; part++)", case="nan"),
    Mutant("scales_without_their_stride", SOURCES, "args.k_scale_stride * 4}", "4}",
           Kind.OUT_OF_BOUNDS, "of kv_scale, which", IN_BLOCK, case="gaps"),
    Mutant("keys_without_their_stride", SOURCES, "place.scale, args.k_row_stride, ",
           "place.scale, Tiling::kRowBytes, ", Kind.OUT_OF_BOUNDS, "of kv, which", IN_BLOCK,
           case="gaps"),
)  # fmt: skip
QUICK = {
    "keys_not_waited_for",
    "warps_without_tokens_leave",
    "page_of_an_earlier_round",
    "page_that_does_not_exist_copied",
    "nan_of_the_first_part_alone",
}
"""What `make test` has; each takes some seconds."""


def launch_of(case: str, patch: pytest.MonkeyPatch) -> Launch:
    launch = Launch(CASES[case], patch, backend="portable-emulated")
    t, data = launch.case.tensors, launch.case.data
    if case == "bad_id":  # Whose tokens are zeros.
        t["table"][1, 1] = -1
        tokens = data.groups[1].keys[64:128]
        data.k_codes[tokens], data.key_scale[tokens] = 0, 0
    elif case == "nan":  # In the second part of a row.
        t["kv"].view(torch.uint8)[77, 100] = data.k_codes[77, 100] = 0x7F
    return launch


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
    assert len(MUTANTS) >= 20
    assert 3 * len(named) >= 2 * len(MUTANTS)
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
