"""Paged calls in the forms that tests of them share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mqa.formats import pack_kv_cache
from mqa.problem import PagedProblem
from mqa.testing import Case

HEADS = (8, 16, 32, 64, 128)
HEAD_DIMS = (32, 64, 128)
PAGE_SIZES = (8, 16, 32, 64, 128, 256)
VARIANTS = (
    (8, 1, 64),
    (16, 3, 32),
    (64, 1, 128),
    (64, 2, 64),
    (64, 3, 128),
    (64, 8, 128),
    (128, 8, 64),
)
"""(H, next_n, D): 64, 128, 256 and 512 columns; at the last a group takes two blocks."""


def paged_line(P: int, tokens: int, facts: str, *, B: int = 3, format: str = "fp8") -> str:
    """A problem whose pool has a page for each entry of the table and two more."""
    columns = -(-tokens // P)
    sizes = f"B={B} P={P} blocks={B * columns + 2} columns={columns} L={tokens}"
    return f"paged {format} {sizes} {facts}"


def pool(case: Case) -> tuple[Tensor, Tensor]:
    """Views of the cache: codes uint8 [blocks, P, bytes of a token] and scales [blocks, P], float32
    or, packed, int32."""
    problem, cache = case.problem, case.tensors["cache"]
    assert isinstance(problem, PagedProblem)
    flat, size = cache.view(problem.blocks, -1), problem.P * (cache.shape[-1] - 4)
    scales = flat[:, size:].view(torch.float32 if problem.format == "fp8" else torch.int32)
    return flat[:, :size].view(problem.blocks, problem.P, -1), scales


def used_tokens(case: Case) -> Tensor:
    """bool [blocks, P]: some row sees that token; of a case with lens [B, next_n]."""
    problem, table = case.problem, case.tensors["table"].cpu().long()
    assert isinstance(problem, PagedProblem)
    used = torch.zeros(problem.blocks, problem.P, dtype=torch.bool)
    for request, lens in enumerate(case.tensors["lens"].tolist()):
        position = torch.arange(max(lens))
        used[table[request, position // problem.P], position % problem.P] = True
    return used.to(case.device)


def seen(case: Case, width: int | None = None) -> Tensor:
    """bool [rows, width]: the row sees the position; of a case with lens [B, next_n]."""
    position = torch.arange(case.problem.width if width is None else width, device=case.device)
    return position < case.tensors["lens"].flatten()[:, None]


def as_runs(case: Case) -> dict[str, Tensor]:
    """The arguments that make each request of a case with lens [B, next_n] a run of next_n tokens.

    Only the first of the longest rows of a run has its pages in the table.
    """
    t, problem = case.tensors, case.problem
    assert isinstance(problem, PagedProblem)
    lens, next_n = t["lens"], problem.next_n
    table = t["table"].repeat_interleave(next_n, 0)
    row = torch.arange(next_n, device=case.device)
    first = torch.where(lens == lens.amax(1, keepdim=True), row, next_n).amin(1, keepdim=True)
    table[(row != first).flatten()] = -1
    request = torch.arange(problem.B, dtype=torch.int32, device=case.device)
    return {
        "q": t["q"].flatten(0, 1).unsqueeze(1),
        "context_lens": lens.flatten(),
        "block_table": table,
        "indices": (request % 3).repeat_interleave(next_n),
    }


def in_pages(case: Case, P: int, next_n: int) -> dict[str, Any]:
    """The rows of a dense case whose windows are [0, end) as requests of next_n rows over pages of
    P tokens, which lie in the pool in a random order."""
    t = case.tensors
    tokens, dim = t["kv"].shape
    columns = -(-tokens // P)
    generator = torch.Generator().manual_seed(P + next_n)
    order = torch.randperm(columns + 3, generator=generator)[:columns].to(case.device)
    plain = "kv_scale" not in t
    kind, nan = (torch.uint8, 0x7F) if not plain else (torch.bfloat16, torch.nan)
    codes = torch.full((columns + 3, P, dim), nan, dtype=kind, device=case.device)
    token = torch.arange(tokens, device=case.device)
    at = order[token // P], token % P
    codes[at], scales = t["kv"].view(kind), None
    if not plain:
        kind = t["kv_scale"].dtype
        unused = torch.nan if kind.is_floating_point else -1  # NaN too: bytes of 0xFF
        scales = torch.full((columns + 3, P), unused, dtype=kind, device=case.device)
        scales[at] = t["kv_scale"]
    B = t["w"].shape[0] // next_n
    q, *q_scale = (t[name].unflatten(0, (B, next_n)) for name in ("q", "q_scale") if name in t)
    return {
        "q": (q, *q_scale) if q_scale else q,
        "kv_cache": pack_kv_cache(codes.view(t["kv"].dtype), scales),
        "weights": t["w"],
        "context_lens": t["end"].view(B, next_n),
        "block_table": order.int().expand(B, -1),
        "schedule_meta": None,
        "max_context_len": tokens,
        "clean_logits": True,
    }
