"""What a logit is. Slow, short, float64: every backend, the fallback included, is judged by this.

    logits[s, n] = kv_scale[n] * sum_h weights[s, h] * relu(dot(q[s, h], k[n]))   in the window of s
                 = -inf                                                            outside it

Values are float64, where every product of two elements is exact and a UE8M0 scale is an exponent
of its own, so the definition holds for all scale codes. `round_once` gives the result in an
output dtype.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mqa.formats import elements


def values(elements_: Tensor, scale: Tensor | None = None) -> Tensor:
    """float64 values of bfloat16 or E4M3 [..., D], or of packed E2M1 [..., D/2], times their UE8M0
    block scales."""
    plain = elements.decoder(elements_.dtype)(elements_, torch.float64)
    if scale is None:
        return plain
    return elements.scale_blocks_(plain, scale)


def row(q: Tensor, k: Tensor, weights: Tensor, kv_scale: Tensor | None) -> Tensor:
    """Logits [N] of one query token: q [H, D], k [N, D], weights [H], kv_scale [N] or None."""
    dots = q @ k.T
    logits = weights.double() @ torch.relu(dots)
    if kv_scale is not None:
        logits = logits * kv_scale.double()
    return logits + 0.0  # -0.0 becomes +0.0: ties of top-k are one value


def dense(
    q: Tensor,
    q_scale: Tensor | None,
    k: Tensor,
    kv_scale: Tensor | None,
    weights: Tensor,
    start: Tensor,
    end: Tensor,
    max_seqlen_k: int = 0,
) -> Tensor:
    """Cleaned logits, float64: [S, N], or [S, M] with entry j at position max(start, 0) + j."""
    mx = q_scale is not None
    q64, k64 = values(q, q_scale), values(k, kv_scale if mx else None)
    out = q64.new_full((q64.shape[0], max_seqlen_k or k64.shape[0]), -torch.inf)
    for s, (first, last) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
        first, last = (min(max(n, 0), k64.shape[0]) for n in (first, last))
        if first < last:
            scale = None if mx or kv_scale is None else kv_scale[first:last]
            logits = row(q64[s], k64[first:last], weights[s], scale)
            column = 0 if max_seqlen_k else first
            out[s, column : column + last - first] = logits
    return out


def paged(
    q: Tensor,
    q_scale: Tensor | None,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    max_context_len: int,
    indices: Tensor | None = None,
) -> Tensor:
    """Cleaned logits [B * next_n, max_context_len], float64, of a paged cache."""
    batch, next_n = q.shape[:2]
    lens = row_lens(context_lens, next_n)
    tables = range(batch) if indices is None else _longest_of_request(indices.tolist(), lens)
    q64 = values(q, q_scale).flatten(0, 1)
    out = q64.new_full((batch * next_n, max_context_len), -torch.inf)
    for r, length in enumerate(lens):
        if length > 0:
            pages = kv_cache[block_table[tables[r // next_n], : _pages(length, kv_cache)].long()]
            k, kv_scale = _keys(pages.flatten(1), q, mx=q_scale is not None)
            scale = None if kv_scale is None else kv_scale[:length]
            out[r, :length] = row(q64[r], k[:length], weights[r], scale)
    return out


def row_lens(context_lens: Tensor, next_n: int) -> list[int]:
    """KV tokens that each row sees; below 1 if none."""
    if context_lens.dim() == 2:
        return [int(length) for length in context_lens.flatten().tolist()]
    return [n - next_n + j + 1 for n in context_lens.tolist() for j in range(next_n)]


def round_once(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """Float64 to `dtype`, one rounding to nearest even.

    torch converts float64 to 16-bit types by way of float32, which rounds twice.
    """
    info = torch.finfo(dtype)
    digits = 1 - round(math.log2(info.eps))
    lowest = round(math.log2(info.tiny)) - digits + 1  # exponent of a subnormal's ulp
    finite = torch.where(logits.isfinite(), logits, 0.0)
    ulp = (torch.frexp(finite).exponent.long() - digits).clamp(min=lowest)
    rounded = torch.round(finite * _power(-ulp)) * _power(ulp)
    rounded = torch.where(rounded.abs() > info.max, rounded.sign() * torch.inf, rounded)
    return torch.where(logits.isfinite(), rounded, logits).to(dtype)


def _power(exponent: Tensor) -> Tensor:
    return (exponent.clamp(-1022, 1023) + 1023 << 52).view(torch.float64)


def _longest_of_request(indices: list[int], lens: list[int]) -> list[int]:
    """For each batch entry, the first longest one among the equal indices around it."""
    tables: list[int] = []
    while len(tables) < len(indices):
        first = len(tables)
        last = first
        while last < len(indices) and indices[last] == indices[first]:
            last += 1
        longest = max(range(first, last), key=lambda b: lens[b])
        tables += [longest] * (last - first)
    return tables


def _pages(length: int, kv_cache: Tensor) -> int:
    return -(-length // kv_cache.shape[1])


def _keys(pages: Tensor, q: Tensor, *, mx: bool) -> tuple[Tensor, Tensor | None]:
    """Values [tokens, D] and FP8 scales [tokens] of pages [n, elements of a page].

    A page holds P rows of values and then, unless they are bfloat16, P 4-byte scales.
    """
    row = q.shape[-1]
    if q.dtype == torch.bfloat16:
        return values(pages.reshape(-1, row)), None
    stored, scales = pages.tensor_split([pages.shape[1] // (row + 4) * row], dim=1)
    codes, words = stored.reshape(-1, row).view(q.dtype), scales.reshape(-1, 4)
    words = words.clone(memory_format=torch.contiguous_format)
    if mx:
        return values(codes, words.view(torch.int32).squeeze(1)), None
    return values(codes), words.view(torch.float32).squeeze(1)
