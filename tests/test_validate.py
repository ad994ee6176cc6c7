"""Every wrong argument is an error that names it, raised before anything is written."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import mqa

FP8 = torch.float8_e4m3fn
S, N, H, D = 3, 20, 4, 64
Arguments = dict[str, Any]


def ints(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def fp8(*shape: int) -> Tensor:
    return torch.ones(shape).to(FP8)


def dense() -> Arguments:
    return {
        "q": fp8(S, H, D),
        "kv": (fp8(N, D), torch.ones(N)),
        "weights": torch.ones(S, H),
        "cu_seq_len_k_start": torch.zeros(S, dtype=torch.int32),
        "cu_seq_len_k_end": torch.full((S,), N, dtype=torch.int32),
    }


def dense_mx(fmt: str = "mxfp8") -> Arguments:
    if fmt == "mxfp8":
        q, k = fp8(S, H, D), fp8(N, D)
    else:
        q = torch.zeros(S, H, D // 2, dtype=torch.uint8)
        k = torch.zeros(N, D // 2, dtype=torch.uint8)
    scales = (torch.full(shape, 127, dtype=torch.int32) for shape in ((S, H), (N,)))
    return dense() | {"q": (q, next(scales)), "kv": (k, next(scales))}


def bf16(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.bfloat16)


def dense_bf16() -> Arguments:
    return dense() | {"q": bf16(S, H, D), "kv": (bf16(N, D), None)}


def paged_bf16() -> Arguments:
    return paged() | {"q": bf16(2, 2, H, D), "kv_cache": bf16(5, 8, 1, D)}


def paged(next_n: int = 2) -> Arguments:
    return {
        "q": fp8(2, next_n, H, D),
        "kv_cache": torch.zeros(5, 8, 1, D + 4, dtype=torch.uint8),
        "weights": torch.ones(2 * next_n, H),
        "context_lens": torch.full((2, next_n), 20, dtype=torch.int32),
        "block_table": ints([0, 1, 2, -1], [3, 4, 0, 999]),
        "schedule_meta": None,
        "max_context_len": 24,
    }


Change = Callable[[Arguments], Arguments]
META = torch.device("meta")

# (what is changed, the argument that the message names, the error)
DENSE: list[tuple[Arguments, str, type[Exception]]] = [
    ({"q": "text"}, "q", TypeError),
    ({"q": (fp8(S, H, D),)}, "q", TypeError),
    ({"q": torch.ones(S, H, D)}, "q.dtype", TypeError),
    ({"q": torch.zeros(S, H, D // 2, dtype=torch.uint8)}, "q.dtype", TypeError),
    ({"q": fp8(S, H, D).view(torch.uint8).view(torch.float8_e5m2)}, "q.dtype", TypeError),
    ({"q": fp8(S * H, D)}, "q.shape", ValueError),
    ({"q": fp8(S, 0, D)}, "q.shape", ValueError),
    ({"q": fp8(S, H, 0)}, "q.shape", ValueError),
    ({"q": (fp8(S, H, D), 3)}, r"q\[1\]", TypeError),
    ({"q": (torch.ones(S, H, D), ints(1))}, r"q\[0\].dtype", TypeError),
    ({"kv": fp8(N, D)}, "kv", TypeError),
    ({"kv": (fp8(N, D), None)}, r"kv\[1\]", TypeError),
    ({"kv": (fp8(N, D).float(), torch.ones(N))}, r"kv\[0\].dtype", TypeError),
    ({"kv": (fp8(N, D + 1), torch.ones(N))}, r"kv\[0\].shape", ValueError),
    ({"kv": (fp8(N, 1, D), torch.ones(N))}, r"kv\[0\].shape", ValueError),
    ({"kv": (fp8(N, D), torch.ones(N + 1))}, r"kv\[1\].shape", ValueError),
    ({"kv": (fp8(N, D), torch.ones(N).double())}, r"kv\[1\].dtype", TypeError),
    ({"kv": (fp8(N, D), torch.ones(N, dtype=torch.int32))}, r"kv\[1\].dtype", TypeError),
    ({"kv": (fp8(N, D), torch.ones(N).to_sparse())}, r"kv\[1\].layout", TypeError),
    ({"weights": torch.ones(S, H).half()}, "weights.dtype", TypeError),
    ({"weights": torch.ones(S, H + 1)}, "weights.shape", ValueError),
    ({"weights": torch.ones(S * H)}, "weights.shape", ValueError),
    ({"weights": [1.0]}, "weights", TypeError),
    ({"weights": torch.ones(S, H, requires_grad=True)}, "weights.requires_grad", ValueError),
    ({"cu_seq_len_k_start": torch.zeros(S).long()}, "cu_seq_len_k_start.dtype", TypeError),
    ({"cu_seq_len_k_start": torch.zeros(S + 1).int()}, "cu_seq_len_k_start.shape", ValueError),
    ({"cu_seq_len_k_end": torch.zeros(S, 1).int()}, "cu_seq_len_k_end.shape", ValueError),
    ({"cu_seq_len_k_end": torch.zeros(S)}, "cu_seq_len_k_end.dtype", TypeError),
    ({"cu_seq_len_k_end": [N] * S}, "cu_seq_len_k_end", TypeError),
    (
        {"cu_seq_len_k_end": torch.zeros(S, device=META).int()},
        "cu_seq_len_k_end.device",
        ValueError,
    ),
    ({"clean_logits": 4096}, "clean_logits", TypeError),
    ({"clean_logits": torch.ones(())}, "clean_logits", TypeError),
    ({"clean_logits": 1}, "clean_logits", TypeError),
    ({"max_seqlen_k": -1}, "max_seqlen_k", ValueError),
    ({"max_seqlen_k": True}, "max_seqlen_k", TypeError),
    ({"max_seqlen_k": 4.0}, "max_seqlen_k", TypeError),
    ({"max_seqlen_k": N - 1}, "max_seqlen_k", ValueError),
    ({"logits_dtype": torch.float64}, "logits_dtype", TypeError),
    ({"logits_dtype": "float32"}, "logits_dtype", TypeError),
    ({"logits_dtype": np.zeros(3)}, "logits_dtype", TypeError),
    ({"kv": (fp8(N, D), torch.ones(N, requires_grad=True))}, r"kv\[1\].requires_grad", ValueError),
    ({"max_seqlen_k": 2**62}, "max_seqlen_k", ValueError),
    ({"schedule_meta": torch.zeros(2, 2)}, "schedule_meta.dtype", TypeError),
    ({"schedule_meta": torch.zeros(1, 2).int()}, "schedule_meta.shape", ValueError),
    ({"schedule_meta": torch.zeros(4, 3).int()}, "schedule_meta.shape", ValueError),
    ({"schedule_meta": [[0, 0], [1, 0]]}, "schedule_meta", TypeError),
    ({"schedule_meta": torch.zeros(2, 2, device=META).int()}, "schedule_meta.device", ValueError),
    ({"out": torch.zeros(S, N - 1)}, "out.shape", ValueError),
    ({"out": torch.zeros(S + 1, N)}, "out.shape", ValueError),
    ({"out": torch.zeros(S, N).bfloat16()}, "out.dtype", TypeError),
    ({"out": torch.zeros(N, S).t()}, "out.stride", ValueError),
    ({"out": torch.zeros(1, N).expand(S, N)}, "out.stride", ValueError),
    ({"out": torch.zeros(S, N, device=META)}, "out.device", ValueError),
    ({"backend": "cuda"}, "backend", ValueError),
    ({"backend": ""}, "backend", ValueError),
    ({"backend": 3}, "backend", TypeError),
]
MX: list[tuple[str, Arguments, str, type[Exception]]] = [
    ("mxfp8", {"q": (fp8(S, H, D), torch.ones(S, H))}, r"q\[1\].dtype", TypeError),
    ("mxfp8", {"q": (fp8(S, H, D), torch.ones(S).int())}, r"q\[1\].shape", ValueError),
    ("mxfp8", {"q": (fp8(S, H, 40), torch.ones(S, H).int())}, "head_dim", ValueError),
    ("mxfp8", {"q": (fp8(S, H, 160), torch.ones(S, H).int())}, "head_dim", ValueError),
    ("mxfp8", {"kv": (fp8(N, D), torch.ones(N))}, r"kv\[1\].dtype", TypeError),
    ("mxfp4", {"kv": (fp8(N, D), torch.ones(N).int())}, r"kv\[0\].dtype", TypeError),
    ("mxfp8", {"kv": (torch.zeros(N, D).byte(), ints(*[1] * N))}, r"kv\[0\].dtype", TypeError),
]
BF16: list[tuple[Arguments, str, type[Exception]]] = [
    ({"q": (bf16(S, H, D), torch.ones(S, H).int())}, r"q\[1\]", TypeError),
    ({"q": (bf16(S, H, D), 3)}, r"q\[1\]", TypeError),
    ({"q": (bf16(S, H, D),)}, "q", TypeError),
    ({"q": fp8(S, H, D)}, r"kv\[0\].dtype", TypeError),
    ({"q": bf16(S, H, D).half()}, "q.dtype", TypeError),
    ({"q": bf16(S, H, 0)}, "q.shape", ValueError),
    ({"kv": (bf16(N, D), torch.ones(N))}, r"kv\[1\]", TypeError),
    ({"kv": (bf16(N, D), 1.0)}, r"kv\[1\]", TypeError),
    ({"kv": (fp8(N, D), torch.ones(N))}, r"kv\[0\].dtype", TypeError),
    ({"kv": (fp8(N, D), None)}, r"kv\[0\].dtype", TypeError),
    ({"kv": fp8(N, D)}, r"kv\[0\].dtype", TypeError),
    ({"kv": bf16(N, D).half()}, r"kv\[0\].dtype", TypeError),
    ({"kv": "text"}, "kv", TypeError),
    ({"kv": bf16(N, D + 1)}, r"kv\[0\].shape", ValueError),
    ({"kv": bf16(N, 1, D)}, r"kv\[0\].shape", ValueError),
    ({"kv": bf16(N, D).to_sparse()}, "kv.layout", TypeError),
    ({"kv": bf16(N, D).requires_grad_()}, r"kv\[0\].requires_grad", ValueError),
    ({"kv": torch.ones(N, D, dtype=torch.bfloat16, device=META)}, r"kv\[0\].device", ValueError),
]
PAGED_BF16: list[tuple[Arguments, str, type[Exception]]] = [
    ({"q": (bf16(2, 2, H, D), torch.ones(2, 2, H).int())}, r"q\[1\]", TypeError),
    ({"q": fp8(2, 2, H, D)}, "kv_cache.dtype", TypeError),
    ({"kv_cache": torch.zeros(5, 8, 1, D + 4).byte()}, "kv_cache.dtype", TypeError),
    ({"kv_cache": bf16(5, 8, 1, D + 4)}, "kv_cache.shape", ValueError),
    ({"kv_cache": bf16(5, 8, 2, D)}, "kv_cache.shape", ValueError),
    ({"kv_cache": bf16(5, 8, 1, D + 1)[..., :-1]}, "kv_cache.stride", ValueError),
    ({"kv_cache": bf16(5, 8, 1, D).requires_grad_()}, "kv_cache.requires_grad", ValueError),
]
PAGED: list[tuple[Arguments, str, type[Exception]]] = [
    ({"q": fp8(2, H, D)}, "q.shape", ValueError),
    ({"q": fp8(2, 0, H, D), "weights": torch.ones(0, H)}, "q.shape", ValueError),
    ({"q": (fp8(2, 2, H, D), torch.ones(2, H).int())}, r"q\[1\].shape", ValueError),
    ({"kv_cache": torch.zeros(5, 8, 1, D + 4)}, "kv_cache.dtype", TypeError),
    ({"kv_cache": torch.zeros(5, 8, 1, D).byte()}, "kv_cache.shape", ValueError),
    ({"kv_cache": torch.zeros(5, 8, 2, D + 4).byte()}, "kv_cache.shape", ValueError),
    ({"kv_cache": torch.zeros(5, 0, 1, D + 4).byte()}, "kv_cache.shape", ValueError),
    ({"kv_cache": torch.zeros(5 * 8 * (D + 4)).byte()}, "kv_cache.shape", ValueError),
    ({"kv_cache": torch.zeros(5, 8, 1, D + 5).byte()[..., :-1]}, "kv_cache.stride", ValueError),
    (
        {"kv_cache": torch.zeros(5, 1, 8, D + 4).byte().transpose(1, 2)[:, ::2]},
        "kv_cache",
        ValueError,
    ),
    ({"weights": torch.ones(2, H)}, "weights.shape", ValueError),
    ({"context_lens": torch.full((2, 2), 20)}, "context_lens.dtype", TypeError),
    ({"context_lens": torch.full((2, 1), 20).int()}, "context_lens.shape", ValueError),
    ({"context_lens": torch.full((4,), 20).int()}, "context_lens.shape", ValueError),
    ({"context_lens": ints([20, 20], [20, 25])}, "context_lens", ValueError),
    ({"context_lens": ints(20, 25)}, "context_lens", ValueError),
    ({"context_lens": ints(20, 33), "max_context_len": 40}, "context_lens", ValueError),
    ({"block_table": ints([0, 1, 2], [3, 4, 0]).long()}, "block_table.dtype", TypeError),
    ({"block_table": ints([0, 1, 2])}, "block_table.shape", ValueError),
    ({"block_table": ints(0, 1)}, "block_table.shape", ValueError),
    ({"block_table": ints([0, 1], [3, 4])}, "context_lens", ValueError),
    ({"block_table": ints([0, 1, 2, 3], [3, 5, 0, 0])}, r"block_table\[1, 1\]", IndexError),
    ({"block_table": ints([0, 1, -1, 3], [3, 4, 0, 0])}, r"block_table\[0, 2\]", IndexError),
    ({"schedule_meta": torch.zeros(0, 2).int()}, "schedule_meta.shape", ValueError),
    ({"max_context_len": -1}, "max_context_len", ValueError),
    ({"max_context_len": 24.0}, "max_context_len", TypeError),
    ({"clean_logits": torch.float32}, "clean_logits", TypeError),
    ({"logits_dtype": None}, "logits_dtype", TypeError),
    ({"indices": ints(0, 1)}, "q.shape", ValueError),
    ({"indices": torch.zeros(2)}, "indices.dtype", TypeError),
    ({"indices": ints(0, 1, 2)}, "indices.shape", ValueError),
    ({"out": torch.zeros(4, 23)}, "out.shape", ValueError),
    ({"out": torch.zeros(4, 24, dtype=torch.float16)}, "out.dtype", TypeError),
]


def assert_rejected(
    function: Callable[..., Tensor], arguments: Arguments, name: str, error: type[Exception]
) -> None:
    out = arguments.get("out")
    if isinstance(out, Tensor) and out.device.type == "cpu":
        out = out.fill_(7) if out.stride(0) else out
    with pytest.raises(error, match=rf"^{name}.*expected") as caught:
        function(**arguments)
    assert type(caught.value) is error
    if isinstance(out, Tensor) and out.device.type == "cpu" and out.stride(0):
        assert (out == 7).all(), "a rejected call wrote to out"


@pytest.mark.parametrize(("change", "name", "error"), DENSE)
def test_a_wrong_dense_argument_is_named(
    change: Arguments, name: str, error: type[Exception]
) -> None:
    arguments = dense() | {"out": torch.zeros(S, N)} | change
    if "max_seqlen_k" in change:
        del arguments["out"]
    assert_rejected(mqa.fp8_fp4_mqa_logits, arguments, name, error)


@pytest.mark.parametrize(("fmt", "change", "name", "error"), MX)
def test_a_wrong_mx_argument_is_named(
    fmt: str, change: Arguments, name: str, error: type[Exception]
) -> None:
    assert_rejected(mqa.fp8_fp4_mqa_logits, dense_mx(fmt) | change, name, error)


@pytest.mark.parametrize(("change", "name", "error"), BF16)
def test_a_wrong_bf16_argument_is_named(
    change: Arguments, name: str, error: type[Exception]
) -> None:
    arguments = dense_bf16() | {"out": torch.zeros(S, N)} | change
    assert_rejected(mqa.fp8_fp4_mqa_logits, arguments, name, error)


@pytest.mark.parametrize(("change", "name", "error"), PAGED_BF16)
def test_a_wrong_paged_bf16_argument_is_named(
    change: Arguments, name: str, error: type[Exception]
) -> None:
    arguments = paged_bf16() | {"out": torch.zeros(4, 24)} | change
    assert_rejected(mqa.fp8_fp4_paged_mqa_logits, arguments, name, error)


def test_keys_in_bf16_come_alone_or_with_none() -> None:
    want = mqa.fp8_fp4_mqa_logits(**dense_bf16())
    k, q = dense_bf16()["kv"][0], dense_bf16()["q"]
    for kv, query in ((k, q), ([k, None], q), (k, (q, None))):
        got = mqa.fp8_fp4_mqa_logits(**dense_bf16() | {"kv": kv, "q": query})
        assert torch.equal(got, want)
    cache = paged_bf16()["kv_cache"].squeeze(2)
    got = mqa.fp8_fp4_paged_mqa_logits(**paged_bf16() | {"kv_cache": cache})
    assert torch.equal(got[:, :20], mqa.fp8_fp4_paged_mqa_logits(**paged_bf16())[:, :20])


def test_what_is_neither_tensor_nor_pair_is_told_what_the_format_takes() -> None:
    alone = re.escape("kv=None, expected a torch.Tensor of torch.bfloat16, as q is, or a pair (")
    with pytest.raises(TypeError, match=alone):
        mqa.fp8_fp4_mqa_logits(**dense_bf16() | {"kv": None})
    with pytest.raises(TypeError, match=re.escape("kv=None, expected a pair (values, scale)")):
        mqa.fp8_fp4_mqa_logits(**dense() | {"kv": None})
    with pytest.raises(TypeError, match=re.escape("q=None, expected a torch.Tensor, or a pair (")):
        mqa.fp8_fp4_mqa_logits(**dense() | {"q": None})


def test_a_scale_of_bf16_keys_is_an_error_that_says_why() -> None:
    wanted = (
        r"^kv\[1\]=torch.float32 tensor \(20,\), expected None: keys in torch.bfloat16, as q is"
    )
    with pytest.raises(TypeError, match=wanted):
        mqa.fp8_fp4_mqa_logits(**dense_bf16() | {"kv": (bf16(N, D), torch.ones(N))})


@pytest.mark.parametrize(("change", "name", "error"), PAGED)
def test_a_wrong_paged_argument_is_named(
    change: Arguments, name: str, error: type[Exception]
) -> None:
    arguments = paged() | {"out": torch.zeros(4, 24)} | change
    if "max_context_len" in change:
        del arguments["out"]
    assert_rejected(mqa.fp8_fp4_paged_mqa_logits, arguments, name, error)


def test_the_calls_that_the_wrong_ones_start_from_are_accepted() -> None:
    for arguments in (dense(), dense_mx("mxfp8"), dense_mx("mxfp4"), dense_bf16()):
        assert mqa.fp8_fp4_mqa_logits(**arguments).shape == (S, N)
    for arguments in (paged(), paged_bf16()):
        assert mqa.fp8_fp4_paged_mqa_logits(**arguments).shape == (4, 24)


def test_the_clean_logits_error_says_what_may_have_happened() -> None:
    with pytest.raises(TypeError, match="pass everything after the fifth argument by name"):
        mqa.fp8_fp4_mqa_logits(**dense(), clean_logits=4096)


def test_an_error_shows_what_came_and_what_was_expected() -> None:
    with pytest.raises(ValueError, match=r"^kv\[1\].shape=\(19,\), expected \(20,\)$"):
        mqa.fp8_fp4_mqa_logits(**(dense() | {"kv": (fp8(N, D), torch.ones(N - 1))}))


def test_a_block_id_that_no_row_needs_may_be_anything() -> None:
    arguments = paged() | {"block_table": ints([0, 1, 2, 2**31 - 1], [3, 4, 0, -(2**31)])}
    assert mqa.fp8_fp4_paged_mqa_logits(**arguments).shape == (4, 24)


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        torch.ones(2),
        (fp8(S, H, D), torch.ones(S, H).int()),
        bf16(S, H, D),
        (bf16(S, H, D), None),
    ],
)
def test_the_plain_fp8_functions_take_plain_fp8(wrong: object) -> None:
    arguments = dense() | {"q": wrong}
    with pytest.raises(TypeError, match=r"^q"):
        mqa.fp8_mqa_logits(**arguments)
    with pytest.raises(TypeError, match=r"^q"):
        mqa.fp8_paged_mqa_logits(**(paged() | {"q": wrong}))


def test_the_plain_fp8_functions_give_the_same_bits() -> None:
    got, want = mqa.fp8_mqa_logits(**dense()), mqa.fp8_fp4_mqa_logits(**dense())
    assert torch.equal(got, want)
    pair = dense() | {"q": (dense()["q"], None)}
    assert torch.equal(mqa.fp8_mqa_logits(**pair), want)
    got, want = mqa.fp8_paged_mqa_logits(**paged()), mqa.fp8_fp4_paged_mqa_logits(**paged())
    assert torch.equal(got[:, :20], want[:, :20])


def test_an_out_that_overlaps_an_input_is_refused() -> None:
    memory = torch.ones(S, N)
    arguments = dense() | {"weights": memory[:, :H], "out": memory}
    with pytest.raises(ValueError, match=r"^out=.*it overlaps weights"):
        mqa.fp8_fp4_mqa_logits(**arguments)
    assert (memory == 1).all()
    workspace = torch.ones(S * (H + N))
    weights = workspace[: S * H].view(S, H)
    apart = dense() | {"weights": weights, "out": workspace[S * H :].view(S, N)}
    assert torch.equal(mqa.fp8_fp4_mqa_logits(**apart), mqa.fp8_fp4_mqa_logits(**dense()))


def test_an_out_that_overlaps_the_schedule_is_refused() -> None:
    memory = torch.ones(S, N)
    arguments = dense() | {"schedule_meta": memory.view(torch.int32).view(-1)[:4].view(2, 2)}
    with pytest.raises(ValueError, match=r"^out=.*it overlaps schedule_meta"):
        mqa.fp8_fp4_mqa_logits(**arguments, out=memory)
    shape = mqa.fp8_fp4_paged_mqa_logits(**paged()).shape
    memory = torch.ones(shape)
    batch = paged() | {"schedule_meta": memory.view(torch.int32).view(-1)[:4].view(2, 2)}
    with pytest.raises(ValueError, match=r"^out=.*it overlaps schedule_meta"):
        mqa.fp8_fp4_paged_mqa_logits(**batch, out=memory)


def test_a_schedule_that_overlaps_what_it_is_made_of_is_refused() -> None:
    memory = torch.zeros(12, dtype=torch.int32)
    out = memory[:4].view(2, 2)
    with pytest.raises(ValueError, match=r"^out=.*it overlaps cu_seq_len_k_end"):
        mqa.get_mqa_logits_metadata(memory[8:], memory[3:7], 9, 64, out=out)
    with pytest.raises(ValueError, match=r"^out=.*it overlaps context_lens"):
        mqa.get_paged_mqa_logits_metadata(memory[2:5], 64, 1, out=out)


def test_more_tokens_than_an_int32_can_number_are_refused() -> None:
    k = torch.empty(2**31 + 5, 32, device="meta", dtype=torch.float8_e4m3fn)
    kv = (k, torch.empty(len(k), device="meta"))
    q = torch.empty(2, 8, 32, device="meta", dtype=torch.float8_e4m3fn)
    window = torch.empty(2, device="meta", dtype=torch.int32)
    with pytest.raises(ValueError, match=r"^kv\[0\].shape=.*at most 2147483647 rows"):
        mqa.fp8_fp4_mqa_logits(q, kv, torch.empty(2, 8, device="meta"), window, window)


def test_an_out_that_wants_a_gradient_is_refused() -> None:
    out = torch.zeros(S, N, requires_grad=True)
    with pytest.raises(ValueError, match=r"^out.requires_grad"):
        mqa.fp8_fp4_mqa_logits(**dense(), out=out)
    with torch.no_grad():
        assert mqa.fp8_fp4_mqa_logits(**dense(), out=out) is out


def test_sizes_may_be_numpy_integers() -> None:
    got = mqa.fp8_fp4_mqa_logits(**dense(), max_seqlen_k=np.int64(N))
    assert torch.equal(got, mqa.fp8_fp4_mqa_logits(**dense()))
    for wrong in (torch.tensor(N), np.float64(N), np.bool_(True), "20"):
        with pytest.raises(TypeError, match=r"^max_seqlen_k"):
            mqa.fp8_fp4_mqa_logits(**dense(), max_seqlen_k=wrong)


def test_devices_that_are_none_are_named() -> None:
    for wrong in ("tpu", 3.5):
        with pytest.raises(ValueError, match=r"^device="):
            mqa.supports(64, 128, "fp8", device=wrong)
        with pytest.raises(ValueError, match=r"^device="):
            mqa.get_num_sms(wrong)
    with pytest.raises(ValueError, match=r"^device=cuda:99, expected one of the"):
        mqa.get_num_sms("cuda:99")


METADATA: list[tuple[Arguments, str, type[Exception]]] = [
    ({"cu_seq_len_k_start": torch.zeros(3)}, "cu_seq_len_k_start.dtype", TypeError),
    ({"cu_seq_len_k_start": [0, 0, 0]}, "cu_seq_len_k_start", TypeError),
    ({"num_kv_tokens": 2**64}, "num_kv_tokens", ValueError),
    ({"out": torch.zeros(1, 2).int().expand(2, 2)}, "out.stride", ValueError),
    ({"out": torch.zeros(9).int().as_strided((2, 2), (1, 1))}, "out.stride", ValueError),
    ({"cu_seq_len_k_start": torch.zeros(3, 1).int()}, "cu_seq_len_k_start.shape", ValueError),
    ({"cu_seq_len_k_end": torch.zeros(4).int()}, "cu_seq_len_k_end.shape", ValueError),
    ({"num_kv_tokens": -1}, "num_kv_tokens", ValueError),
    ({"num_heads": 0}, "num_heads", ValueError),
    ({"num_heads": 4.0}, "num_heads", TypeError),
    ({"out": torch.zeros(2, 2)}, "out.dtype", TypeError),
    ({"out": torch.zeros(3, 2).int()}, "out.shape", ValueError),
    ({"out": torch.zeros(2, 2, device=META).int()}, "out.device", ValueError),
]
PAGED_METADATA: list[tuple[Arguments, str, type[Exception]]] = [
    ({"context_lens": torch.zeros(3)}, "context_lens.dtype", TypeError),
    ({"context_lens": torch.zeros(1, 1, 1).int()}, "context_lens.shape", ValueError),
    ({"context_lens": torch.zeros(3, 0).int()}, "context_lens.shape", ValueError),
    ({"context_lens": 3}, "context_lens", TypeError),
    ({"block_kv": 0}, "block_kv", ValueError),
    ({"num_sms": 0}, "num_sms", ValueError),
    ({"num_sms": True}, "num_sms", TypeError),
    ({"indices": torch.zeros(3).int()}, "context_lens.shape", ValueError),
    ({"out": torch.zeros(8, 2).int()}, "out.shape", ValueError),
]


@pytest.mark.parametrize(("change", "name", "error"), METADATA)
def test_a_wrong_metadata_argument_is_named(
    change: Arguments, name: str, error: type[Exception]
) -> None:
    window = torch.zeros(3, dtype=torch.int32)
    arguments = {"cu_seq_len_k_start": window, "cu_seq_len_k_end": window}
    arguments |= {"num_kv_tokens": 4, "num_heads": 64}
    assert_rejected(mqa.get_mqa_logits_metadata, arguments | change, name, error)


@pytest.mark.parametrize(("change", "name", "error"), PAGED_METADATA)
def test_a_wrong_paged_metadata_argument_is_named(
    change: Arguments, name: str, error: type[Exception]
) -> None:
    arguments = {"context_lens": torch.zeros(3, 2).int(), "block_kv": 64, "num_sms": 6}
    assert_rejected(mqa.get_paged_mqa_logits_metadata, arguments | change, name, error)


SUPPORTS: list[tuple[Arguments, str, type[Exception]]] = [
    ({"format": "fp16"}, "format", ValueError),
    ({"num_heads": 0}, "num_heads", ValueError),
    ({"head_dim": 0}, "head_dim", ValueError),
    ({"head_dim": 40, "format": "mxfp8"}, "head_dim", ValueError),
    ({"head_dim": 65, "format": "mxfp4"}, "head_dim", ValueError),
    ({"head_dim": 256, "format": "mxfp4"}, "head_dim", ValueError),
    ({"page_size": 0}, "page_size", ValueError),
    ({"page_size": 64, "compressed": True}, "compressed", ValueError),
    ({"weights_dtype": torch.float16}, "weights_dtype", TypeError),
    ({"weights_dtype": np.zeros(3)}, "weights_dtype", TypeError),
    ({"logits_dtype": torch.float64}, "logits_dtype", TypeError),
    ({"clean": 1}, "clean", TypeError),
]


@pytest.mark.parametrize(("change", "name", "error"), SUPPORTS)
def test_a_wrong_configuration_is_named(
    change: Arguments, name: str, error: type[Exception]
) -> None:
    arguments = {"num_heads": 64, "head_dim": 128, "format": "fp8"} | change
    for function in (mqa.supports, mqa.warmup):
        with pytest.raises(error, match=rf"^{name}.*expected"):
            function(**arguments)
