"""The public functions.

A plain eager call goes to `mqa.run` directly: torch's dispatcher costs as much as a small launch.
Under torch.compile, torch.export, a dispatch mode or a transform the same calls are the operators
of `mqa.library`, whose kernels end in the same functions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mqa import arguments, devices, library, prepared, rules, run, validate
from mqa.backends import Support, support
from mqa.backends import warmup as warm
from mqa.problem import Format
from mqa.validate import Keys, Query

library.register()


def fp8_fp4_mqa_logits(
    q: Query,
    kv: Keys,
    weights: Tensor,
    cu_seq_len_k_start: Tensor,
    cu_seq_len_k_end: Tensor,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
    logits_dtype: torch.dtype = torch.float32,
    schedule_meta: Tensor | None = None,
    *,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Indexer logits of S query tokens against N KV tokens.

    logits[s, n] = kv_scale[n] * sum_h weights[s, h] * relu(dot(q[s, h], k[n])) for n in
    [start[s], end[s]) clamped to [0, N), see `docs/semantics.md`.

    Args:
        q: FP8: `float8_e4m3fn` [S, H, D], or a pair with None. MXFP8: a pair of that and `int32`
            [S, H], a UE8M0 exponent per 32 elements, block b in byte b. MXFP4: a pair of `int8`
            or `uint8` [S, H, D/2], two E2M1 values a byte, even element low, and `int32` [S, H].
            BF16: `bfloat16` [S, H, D], or a pair with None.
        kv: Values [N, D] or [N, D/2] and their scale [N] (or [N, 1]): `float32` for FP8, `int32`
            as for q in MX formats. BF16: `bfloat16` [N, D], or a pair with None; kv_scale is 1.
        weights: `float32` or `bfloat16` [S, H].
        cu_seq_len_k_start: `int32` [S], first KV token that a row sees.
        cu_seq_len_k_end: `int32` [S], one past the last. An empty or inverted window is legal.
        clean_logits: Write -inf outside the windows; otherwise those entries are unspecified.
        max_seqlen_k: 0 for a result [S, N]; M > 0 for a result [S, M] whose entry j of row s is
            position max(start[s], 0) + j. A window longer than M is an error on CPU tensors and
            cut on GPU tensors.
        logits_dtype: `float32`, `bfloat16` or `float16`.
        schedule_meta: From `get_mqa_logits_metadata`; a stale one is slower, never wrong.
        out: Result to fill, [S, N] or [S, M] in `logits_dtype`, row stride at least its width.
        backend: Name of a backend; None for the best one that can.

    Returns:
        `out`, or a fresh tensor whose row stride is a multiple of 1024 bytes.

    Raises:
        TypeError, ValueError: An argument is wrong; the message names it.
        BackendUnavailableError: No backend, or not the one named, can run this.
        CompileError, RuntimeError: A kernel does not compile, load or launch; no other backend is
            tried.
    """
    rest = (
        weights,
        cu_seq_len_k_start,
        cu_seq_len_k_end,
        clean_logits,
        max_seqlen_k,
        logits_dtype,
        schedule_meta,
    )
    done = prepared.dense(q, kv, *rest, backend, out)
    if done is not None:
        return done
    if not _traced(q, kv, cu_seq_len_k_start, cu_seq_len_k_end, weights, out):
        return run.dense(q, kv, *rest, backend, out)
    rules.flag(clean_logits)
    values, scale = _taken_apart("q", q)
    keys, kv_scale = _taken_apart("kv", kv)
    inputs = (values, scale, keys, kv_scale, *rest, backend)
    if out is None:
        return torch.ops.mqa.mqa_logits(*inputs)  # type: ignore[no-any-return]
    torch.ops.mqa.mqa_logits_out(*inputs, out)
    return out


def fp8_fp4_paged_mqa_logits(
    q: Query,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Tensor | None,
    max_context_len: int,
    clean_logits: bool = False,
    logits_dtype: torch.dtype = torch.float32,
    indices: Tensor | None = None,
    *,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Indexer logits of B requests of next_n query tokens each over a paged KV cache.

    Args:
        q: As in `fp8_fp4_mqa_logits`, with values [B, next_n, H, D] or [B, next_n, H, D/2] and
            scale [B, next_n, H].
        kv_cache: `uint8` [num_blocks, P, 1, D + 4], for MXFP4 [num_blocks, P, 1, D/2 + 4]. In a
            block the P rows of values come first, then the P 4-byte scales. BF16: `bfloat16`
            [num_blocks, P, 1, D]. The dimension of size 1 may be left out, and stride(0) may be
            larger than a block.
        weights: `float32` or `bfloat16` [B * next_n, H].
        context_lens: `int32` [B, next_n], KV tokens that each row sees, in any order; or [B]:
            row j sees positions up to len - next_n + j.
        block_table: `int32` [B, columns]; columns from ceil(len / P) on are not read.
        schedule_meta: From `get_paged_mqa_logits_metadata`, or None.
        max_context_len: Width of the result. On CPU tensors a len beyond it or beyond the table
            is an error; on GPU tensors it is cut.
        clean_logits: Write -inf past each row's len; otherwise those entries are unspecified.
        logits_dtype: `float32`, `bfloat16` or `float16`.
        indices: `int32` [B] with next_n = 1: runs of equal indices are one request, whose rows
            share the pages of the longest one.
        out: Result to fill, [B * next_n, max_context_len], row stride at least its width.
        backend: Name of a backend; None for the best one that can.

    Returns:
        `out`, or a fresh tensor whose row stride is a multiple of 1024 bytes.

    Raises:
        TypeError, ValueError: An argument is wrong; the message names it.
        IndexError: A needed block id is not in the cache (CPU tensors; on GPU tensors it reads
            as zeros).
        BackendUnavailableError: No backend, or not the one named, can run this.
        CompileError, RuntimeError: A kernel does not compile, load or launch; no other backend is
            tried.
    """
    rest = (
        kv_cache,
        weights,
        context_lens,
        block_table,
        schedule_meta,
        max_context_len,
        clean_logits,
        logits_dtype,
        indices,
    )
    if not _traced(q, kv_cache, weights, context_lens, block_table, indices, out):
        return run.paged(q, *rest, backend, out)
    rules.flag(clean_logits)
    values, scale = _taken_apart("q", q)
    inputs = (values, scale, *rest, backend)
    if out is None:
        return torch.ops.mqa.paged_mqa_logits(*inputs)  # type: ignore[no-any-return]
    torch.ops.mqa.paged_mqa_logits_out(*inputs, out)
    return out


def fp8_mqa_logits(
    q: Query,
    kv: tuple[Tensor, Tensor],
    weights: Tensor,
    cu_seq_len_k_start: Tensor,
    cu_seq_len_k_end: Tensor,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
) -> Tensor:
    """`fp8_fp4_mqa_logits` for plain FP8 with float32 logits.

    Args, result and errors as there: q is `float8_e4m3fn` [S, H, D], or a pair of it and None, kv a
    pair of `float8_e4m3fn` [N, D] and `float32` [N].
    """
    _plain(q, "fp8_fp4_mqa_logits")
    return fp8_fp4_mqa_logits(
        q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits, max_seqlen_k
    )


def fp8_paged_mqa_logits(
    q: Query,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Tensor | None,
    max_context_len: int,
    clean_logits: bool = False,
    indices: Tensor | None = None,
) -> Tensor:
    """`fp8_fp4_paged_mqa_logits` for plain FP8 with float32 logits.

    Args, result and errors as there: q is `float8_e4m3fn` [B, next_n, H, D], or a pair of it and
    None. `indices` stands in the place that `logits_dtype` has there.
    """
    _plain(q, "fp8_fp4_paged_mqa_logits")
    return fp8_fp4_paged_mqa_logits(
        q,
        kv_cache,
        weights,
        context_lens,
        block_table,
        schedule_meta,
        max_context_len,
        clean_logits,
        indices=indices,
    )


def get_mqa_logits_metadata(
    cu_seq_len_k_start: Tensor,
    cu_seq_len_k_end: Tensor,
    num_kv_tokens: int,
    num_heads: int,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Schedule of a dense call: cut points `int32` [get_num_sms() + 1, 2], see `docs/semantics.md`.

    Args:
        cu_seq_len_k_start: `int32` [S], as in the call.
        cu_seq_len_k_end: `int32` [S].
        num_kv_tokens: N.
        num_heads: H.
        out: Result to fill, `int32` [get_num_sms() + 1, 2].

    Raises:
        TypeError, ValueError: An argument is wrong; the message names it.
    """
    arguments.tensor("cu_seq_len_k_start", cu_seq_len_k_start)
    sms = devices.get_num_sms(cu_seq_len_k_start.device)
    inputs = (cu_seq_len_k_start, cu_seq_len_k_end, num_kv_tokens, num_heads, sms)
    if not _traced(cu_seq_len_k_start, cu_seq_len_k_end, out):
        return run.dense_metadata(*inputs, out=out)
    validate.metadata_out(out, sms, cu_seq_len_k_start.device)
    cuts: Tensor = torch.ops.mqa.mqa_logits_metadata(*inputs)
    return cuts if out is None else out.copy_(cuts)


def get_paged_mqa_logits_metadata(
    context_lens: Tensor,
    block_kv: int,
    num_sms: int,
    indices: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Schedule of a paged call: cut points `int32` [num_sms + 1, 2], see `docs/semantics.md`.

    Args:
        context_lens: `int32` [B, next_n], those of all rows. [B] counts as next_n = 1: with
            such a schedule a call of more rows is right, and the last SM gets all from B on.
        block_kv: P, tokens in a page. The cuts do not depend on it.
        num_sms: SMs to cut for, usually `get_num_sms()`.
        indices: `int32` [B] as in the call, or None.
        out: Result to fill, `int32` [num_sms + 1, 2].

    Raises:
        TypeError, ValueError: An argument is wrong; the message names it.
    """
    inputs = (context_lens, block_kv, num_sms, indices)
    if not _traced(context_lens, indices, out):
        return run.paged_metadata(*inputs, out=out)
    validate.metadata_out(out, num_sms, context_lens.device)
    cuts: Tensor = torch.ops.mqa.paged_mqa_logits_metadata(*inputs)
    return cuts if out is None else out.copy_(cuts)


def supports(
    num_heads: int,
    head_dim: int,
    format: Format,
    *,
    page_size: int | None = None,
    weights_dtype: torch.dtype = torch.float32,
    logits_dtype: torch.dtype = torch.float32,
    clean: bool = True,
    compressed: bool = False,
    device: torch.device | str | None = None,
) -> Support:
    """Which backend would run such calls on `device`, and every reason against the others.

    Args:
        num_heads: H.
        head_dim: D.
        format: `fp8`, `mxfp8`, `mxfp4` or `bf16`.
        page_size: P of a paged cache; None asks about dense calls.
        weights_dtype: dtype of the weights.
        logits_dtype: dtype of the result.
        clean: Whether entries outside windows are to be -inf.
        compressed: Whether a dense call gives max_seqlen_k.
        device: Default: the current CUDA device if there is one, else the CPU.

    Raises:
        TypeError, ValueError: No machine can do this; the message names the argument.
    """
    where = _device(device)
    options = (page_size, weights_dtype, logits_dtype, clean, compressed)
    problem = validate.configuration(num_heads, head_dim, format, *options)
    return support(problem, where)


def warmup(
    num_heads: int,
    head_dim: int,
    format: Format,
    *,
    page_size: int | None = None,
    weights_dtype: torch.dtype = torch.float32,
    logits_dtype: torch.dtype = torch.float32,
    clean: bool = True,
    compressed: bool = False,
    device: torch.device | str | None = None,
    backend: str | None = None,
) -> tuple[str, ...]:
    """Compile and load on `device` every kernel variant that such calls can reach.

    Arguments as in `supports`. Returns the names of the variants, those of schedules among them;
    none for a backend that compiles nothing, like the reference.

    Raises:
        TypeError, ValueError: An argument is wrong; the message names it.
        BackendUnavailableError: No backend, or not the one named, can run such calls.
        CompileError, RuntimeError: A kernel does not compile or load.
    """
    where = _device(device)
    options = (page_size, weights_dtype, logits_dtype, clean, compressed)
    problem = validate.configuration(num_heads, head_dim, format, *options)
    return warm(problem, where, backend)


def _traced(*values: object) -> bool:
    """Whether something has to see an operator: a compiler, a dispatch mode, a transform, a tensor
    that is more or less than memory."""
    return prepared.traced() or any(map(_special, values))


def _special(value: object) -> bool:
    if isinstance(value, Tensor):
        return type(value) not in (Tensor, torch.nn.Parameter) or value.is_meta
    return isinstance(value, tuple | list) and any(map(_special, value))


def _taken_apart(argument: str, value: object) -> tuple[Tensor, Tensor | None]:
    """Values and scale as operators take them, whose schemas would not name the argument."""
    if isinstance(value, Tensor):
        return value, None
    wanted = "a torch.Tensor, or a pair (values, scale or None)"
    values, scale = arguments.pair(argument, value, wanted)
    arguments.tensor(f"{argument}[0]", values)
    return values, None if scale is None else arguments.tensor(f"{argument}[1]", scale)


def _device(device: torch.device | str | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return arguments.device("device", device)


def _plain(q: object, general: str) -> None:
    if isinstance(q, tuple | list) and len(q) == 2 and q[1] is not None:
        raise TypeError(f"q has a scale, expected plain FP8: mqa.{general} takes the MX formats")
    values = q[0] if isinstance(q, tuple | list) and q else q
    if isinstance(values, Tensor) and values.dtype == rules.BF16:
        raise TypeError(
            f"q.dtype={values.dtype}, expected {rules.FP8}: mqa.{general} takes format bf16"
        )
