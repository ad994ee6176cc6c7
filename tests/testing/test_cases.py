import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mqa.problem import parse
from mqa.testing import Case, guards_intact, logits, make_case, read_corpus, to_tensor


def case_of(line: str) -> Case:
    return make_case(parse(line))


def digest(case: Case) -> str:
    state = hashlib.sha256()
    for name, tensor in sorted(case.tensors.items()):
        state.update(name.encode() + repr(tuple(tensor.shape)).encode())
        state.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return state.hexdigest()[:16]


GOLDEN = {
    "dense fp8 S=5 N=33 H=4 D=64 windows=random seed=7": "179ad45c2ff179e1",
    "dense mxfp8 S=5 N=33 H=4 D=64 windows=packed seed=8 regime=exact": "d6bad305115f108b",
    "paged mxfp4 B=3 next_n=2 H=4 D=64 P=5 blocks=9 columns=3 L=14 seed=9": "788b50f6ed8afbbc",
    "dense bf16 S=5 N=33 H=4 D=64 windows=random seed=7": "88a94003f0154b46",
    "paged bf16 B=3 next_n=2 H=4 D=64 P=5 blocks=9 columns=3 L=14 seed=8 regime=exact": (
        "893fa30b1c8eb36d"
    ),
}


@pytest.mark.parametrize("line", GOLDEN)
def test_a_line_names_the_same_bits_everywhere(line: str) -> None:
    assert digest(case_of(line)) == digest(case_of(line)) == GOLDEN[line]


def test_another_seed_is_another_case() -> None:
    line = "dense fp8 S=5 N=33 H=4 D=64 seed={}"
    assert len({digest(case_of(line.format(seed))) for seed in range(8)}) == 8


def test_tensors_are_contiguous_and_aligned_by_default() -> None:
    for line in GOLDEN:
        for name, tensor in case_of(line).tensors.items():
            assert tensor.is_contiguous(), name
            assert tensor.data_ptr() % 16 == 0, name


def test_dense_strides_and_offsets_are_those_of_the_layout() -> None:
    case = case_of(
        "dense mxfp8 S=5 N=9 H=3 D=64 weights=bfloat16 w_stride=100 w_off=6 kv_scale_off=4 "
        "kv_stride=80 kv_off=3 q_stride=400x100 q_off=1 q_scale_stride=9 start_stride=3 end_off=12"
    )
    strides = {name: tensor.stride() for name, tensor in case.tensors.items()}
    assert strides["w"] == (100, 1)
    assert strides["kv"] == (80, 1)
    assert strides["q"] == (400, 100, 1)
    assert strides["q_scale"] == (9, 1)
    assert strides["start"] == (3,)
    offsets = {name: tensor.data_ptr() % 16 for name, tensor in case.tensors.items()}
    assert offsets == {
        "q": 1, "q_scale": 0, "kv": 3, "kv_scale": 4, "w": 6, "start": 0, "end": 12
    }  # fmt: skip


def test_paged_strides_and_offsets_are_those_of_the_layout() -> None:
    case = case_of(
        "paged fp8 B=4 next_n=1 H=3 D=64 P=4 blocks=9 columns=2 L=8 varlen=1 cache_stride=1024 "
        "lens_stride=5 lens_off=4 table_stride=7 table_off=8 indices_stride=2"
    )
    assert case.tensors["cache"].shape == (9, 4, 1, 68)
    assert case.tensors["cache"].stride() == (1024, 68, 68, 1)
    assert case.tensors["lens"].stride() == (5, 1)
    assert case.tensors["lens"].data_ptr() % 16 == 4
    assert case.tensors["table"].stride() == (7, 1)
    assert case.tensors["table"].data_ptr() % 16 == 8
    assert case.tensors["indices"].stride() == (2,)


def test_bf16_has_no_scales_and_unused_slots_are_nan() -> None:
    assert set(case_of("dense bf16 S=5 N=9 H=3 D=64").tensors) == {"q", "kv", "w", "start", "end"}
    case = case_of("paged bf16 B=3 next_n=1 H=2 D=32 P=8 blocks=12 columns=4 L=32 lens=random")
    cache = case.tensors["cache"]
    assert cache.shape == (12, 8, 1, 32)
    assert cache.dtype == torch.bfloat16
    unused = cache.isnan().all(-1)
    assert int((~unused).sum()) == len(case.data.k_codes)
    assert not cache[~unused].isnan().any()


def test_layout_changes_addresses_and_not_values() -> None:
    line = "dense mxfp4 S=4 N=20 H=2 D=64 M=20 windows=random seed=5"
    plain, moved = case_of(line), case_of(line + " kv_stride=40 start_stride=2 w_stride=9 w_off=4")
    assert digest(plain) == digest(moved)


def test_allocations_end_behind_the_last_element_and_gaps_hold_poison() -> None:
    case = case_of("dense fp8 S=4 N=3 H=2 D=32 w_stride=5 start_stride=3")
    weights, start = case.tensors["w"], case.tensors["start"]
    assert weights.untyped_storage().nbytes() == 4 * (3 * 5 + 2)
    gaps = torch.as_strided(weights, (3, 3), (5, 1), 2)
    assert torch.isnan(gaps).all()
    assert int(torch.as_strided(start, (1,), (1,), 1)) == 0x7F7F7F7F


def test_unused_slots_of_a_pool_are_nan_and_table_tails_are_garbage() -> None:
    case = case_of("paged fp8 B=3 next_n=1 H=2 D=32 P=8 blocks=12 columns=4 L=32 lens=random")
    pool = case.tensors["cache"].reshape(12, -1)
    values = pool[:, : 8 * 32].reshape(96, 32)
    scales = pool[:, 8 * 32 :].reshape(96, 4).contiguous().view(torch.float32)[:, 0]
    used = torch.zeros(96, dtype=torch.bool)
    table = case.tensors["table"]
    for row, count in enumerate(case.tensors["lens"].flatten().tolist()):
        for n in range(count):
            used[int(table[row, n // 8]) * 8 + n % 8] = True
        tail = table[row, -(-count // 8) :].tolist()
        assert all(-1 <= entry < 12 or entry == 1_073_741_824 for entry in tail)
    assert 0 < int(used.sum()) < 96
    assert torch.isnan(scales[~used]).all()
    assert not torch.isnan(scales[used]).any()
    assert (values[~used] == 0x7F).all()


def test_varlen_rows_of_a_run_share_pages_and_truncate_their_tables() -> None:
    case = case_of(
        "paged fp8 B=40 next_n=1 H=1 D=32 P=2 blocks=99 columns=5 L=10 lens=random varlen=1"
    )
    indices = case.tensors["indices"].tolist()
    table, lens = case.tensors["table"], case.tensors["lens"].flatten().tolist()
    shared = 0
    for row in range(1, 40):
        if indices[row] == indices[row - 1]:
            need = -(-min(lens[row], lens[row - 1]) // 2)
            assert torch.equal(table[row, :need], table[row - 1, :need])
            shared += need > 0
    assert shared > 5


def test_bad_layouts_are_refused_by_name() -> None:
    for words, text in [
        ("w_off=2", "w_off=2, expected < 16 and a multiple of 4"),
        ("w_stride=1", "elements of"),
        ("w_stride=9x1x1", "at most 2 strides"),
        ("q_scale_stride=9", "no tensor for q_scale_stride"),
    ]:
        with pytest.raises(ValueError, match=text):
            case_of(f"dense fp8 S=4 N=3 H=4 D=32 {words}")


def test_zero_strides_make_constant_tensors_that_the_oracle_knows() -> None:
    case = case_of("dense fp8 S=6 N=30 H=2 D=32 windows=random end_stride=0 w_stride=0 seed=1")
    assert case.tensors["end"].unique().numel() == 1
    assert (case.data.weights == case.data.weights[0]).all()


def test_windows_of_compressed_cases_fit() -> None:
    for windows in ("causal", "full", "random", "packed", "empty"):
        for seed in range(5):
            case = case_of(f"dense fp8 S=20 N=30 H=1 D=32 M=7 windows={windows} seed={seed}")
            start, end = (case.tensors[name].clamp(0, 30) for name in ("start", "end"))
            assert int((end - start).max()) <= 7


def test_random_windows_have_every_kind() -> None:
    case = case_of("dense fp8 S=200 N=30 H=1 D=32 windows=random")
    start, end = case.tensors["start"], case.tensors["end"]
    for kind in (start == end, start > end, start < 0, end > 30, (start > 0) & (start < end)):
        assert kind.any()


def test_run_passes_the_arguments_of_the_public_functions() -> None:
    seen: dict[str, Any] = {}

    def spy(**arguments: Any) -> torch.Tensor:
        seen.clear()
        seen.update(arguments)
        return torch.zeros(())

    case_of("dense fp8 S=3 N=5 H=2 D=32 M=5 seed=1").run(spy)
    assert seen["q"][1] is None
    assert seen["max_seqlen_k"] == 5
    assert seen["schedule_meta"] is None
    assert not {"out", "backend"} & set(seen)
    case_of("dense fp8 S=3 N=5 H=2 D=32 sms=4 out_stride=9 out=float16").run(spy, backend="x")
    assert isinstance(seen["q"], torch.Tensor)
    assert seen["schedule_meta"].shape == (5, 2)
    assert seen["out"].stride() == (9, 1)
    assert seen["logits_dtype"] == seen["out"].dtype == torch.float16
    assert seen["backend"] == "x"
    case_of("paged mxfp4 B=2 next_n=1 H=2 D=32 P=4 blocks=3 columns=1 L=4 varlen=1").run(spy)
    assert set(seen) == {
        "q", "kv_cache", "weights", "context_lens", "block_table", "schedule_meta",
        "max_context_len", "clean_logits", "logits_dtype", "indices",
    }  # fmt: skip


def test_guards_of_out_notice_a_stray_write() -> None:
    case = case_of("dense fp8 S=3 N=5 H=2 D=32 out_stride=9 out_off=4")
    out = case.new_out()
    assert out.data_ptr() % 16 == 4
    assert torch.isnan(out).all()
    out.copy_(to_tensor(logits(case).values, "float32"))
    assert guards_intact(out)
    for place in (-1, 5, 2 * 9 + 5):
        spoilt = case.new_out()
        spoilt.as_strided((1,), (1,), spoilt.storage_offset() + place).fill_(0)
        assert not guards_intact(spoilt)


def test_read_corpus_skips_comments_and_names_the_bad_line(tmp_path: Path) -> None:
    path = tmp_path / "some.txt"
    path.write_text("# all\n\ndense fp8 S=1 N=2 H=1 D=32  # one\n")
    assert [str(p) for p in read_corpus(path)] == ["dense fp8 S=1 N=2 H=1 D=32"]
    path.write_text("\ndense fp9\n")
    with pytest.raises(ValueError, match=r"some.txt:2: .*fp9"):
        read_corpus(path)


def test_nan_beyond_the_needed_keys_never_reaches_the_oracle() -> None:
    case = case_of("paged mxfp4 B=3 next_n=2 H=2 D=32 P=8 blocks=12 columns=4 L=32 lens=random")
    result = logits(case)
    assert np.isfinite(result.values[result.valid]).all()
