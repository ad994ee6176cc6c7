"""Rules about what windows, lens and tables hold, for tensors whose values may be read."""

from __future__ import annotations

import torch
from torch import Tensor

from mqa import arguments, config
from mqa.reference.paged import entries_of_requests, lens_of_rows

_MOST_IDS = 1 << 20
"""Block ids looked at in one go: a table may be larger than the memory a call may take."""


def readable(q: Tensor) -> bool:
    """Values are checked where reading them costs no synchronisation, or when debugging."""
    if q.device.type == "cpu":
        return True
    return config.debug() and not (q.is_cuda and torch.cuda.is_current_stream_capturing())


def windows_fit(start: Tensor, end: Tensor, num_kv: int, max_seqlen_k: int) -> None:
    length = end.long().clamp(0, num_kv) - start.long().clamp(0, num_kv)
    too_long = (length > max_seqlen_k).nonzero()
    if too_long.numel():
        row = int(too_long[0])
        window = f"row {row} sees {int(length[row])} KV tokens"
        arguments.reject("max_seqlen_k", max_seqlen_k, f"no shorter than any window, but {window}")


def lens_fit(context_lens: Tensor, next_n: int, max_context_len: int, table: int) -> None:
    lens = lens_of_rows(context_lens, next_n)
    longest = int(lens.max()) if lens.numel() else 0
    if longest > max_context_len:
        arguments.reject("context_lens", longest, f"at most max_context_len={max_context_len}")
    if longest > table:
        arguments.reject(
            "context_lens", longest, f"at most {table}: block_table columns x page size"
        )


def blocks_exist(
    context_lens: Tensor,
    next_n: int,
    block_table: Tensor,
    indices: Tensor | None,
    page_size: int,
    blocks: int,
) -> None:
    lens = lens_of_rows(context_lens, next_n)
    if lens.numel() == 0:
        return
    if indices is None:
        entries = torch.arange(block_table.shape[0], device=lens.device)
        needed = lens.view(-1, next_n).amax(1)
    else:
        entries = torch.unique(entries_of_requests(lens, indices))
        needed = lens[entries]
    pages = (needed + page_size - 1) // page_size
    column = torch.arange(int(pages.max()), device=lens.device)
    rows = max(1, _MOST_IDS // max(1, len(column)))
    for some, their_pages in zip(entries.split(rows), pages.split(rows), strict=True):
        table = block_table[some, : len(column)]
        wrong = ((table < 0) | (table >= blocks)) & (column < their_pages.unsqueeze(1))
        if wrong.any():
            row, at = (int(i) for i in wrong.nonzero()[0])
            where, expected = f"block_table[{int(some[row])}, {at}]", f"from 0 to {blocks - 1}"
            arguments.reject(where, int(table[row, at]), f"a block id {expected}", IndexError)
