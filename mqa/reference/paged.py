"""The reference over a paged cache: each request is a dense call whose KV tokens lie in pages."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from mqa.formats.kv_cache import SCALE_BYTES
from mqa.reference.blockwise import Query, Windows, score_masked, score_short, score_windows
from mqa.reference.environment import isolated
from mqa.reference.products import TILE, Decoder, Span, decoded_span

# A request of so few rows and tiles costs more in calls than in arithmetic: it joins others.
_SHORT_ROWS, _SHORT_TILES = 4, 4


def lens_of_rows(context_lens: Tensor, next_n: int) -> Tensor:
    """KV tokens that each row sees, int64 [B * next_n], never below 0.

    Lens [B, next_n] say so outright; with lens [B], row j of a request sees the positions up to
    len - next_n + j.
    """
    lens = context_lens.long()
    if lens.dim() == 1:
        lens = lens.unsqueeze(1) + torch.arange(1 - next_n, 1, device=lens.device)
    return lens.flatten().clamp(min=0)


def entries_of_requests(lens: Tensor, indices: Tensor) -> Tensor:
    """For each token of a varlen batch the batch entry whose block table it uses, int64 [B]: the
    first of the longest in its request, a maximal run of equal `indices`."""
    entry = torch.arange(lens.shape[0], device=lens.device)
    if lens.shape[0] == 0:
        return entry
    new = torch.cat((torch.ones_like(indices[:1]), (indices[1:] != indices[:-1]).int()))
    request = new.cumsum(0) - 1
    zeros = torch.zeros_like(entry)
    longest = zeros.scatter_reduce(0, request, lens, "amax")[request]
    candidates = torch.where(lens == longest, entry, lens.shape[0])
    first = torch.full_like(entry, lens.shape[0]).scatter_reduce(0, request, candidates, "amin")
    return first[request]


class Pages:
    """A cache by token: in each block P rows of values come first, then P 4-byte scales, of which
    bfloat16 has none."""

    def __init__(self, kv_cache: Tensor, decode: Decoder) -> None:
        self.count, self.size, *_, token = kv_cache.shape
        if self.count == 0:  # something to read from: gathers are masked, not branched around
            kv_cache = kv_cache.new_zeros((1, *kv_cache.shape[1:]))
        self._scale_dtype = torch.int32 if decode.block_scaled else torch.float32
        self._row = token if decode.plain else token - SCALE_BYTES
        blocks, stride, offset = kv_cache.shape[0], kv_cache.stride(0), kv_cache.storage_offset()
        self._blocks = kv_cache.as_strided((blocks, self.size * token), (stride, 1), offset)
        values, scales = self._split(self._blocks)
        self._values, self._scales = values, scales

    def read(self, block: Tensor, slot: Tensor) -> tuple[Tensor, Tensor | None]:
        """Stored values [..., bytes or D] and scales [...] of tokens `slot` of `block`, both
        int64."""
        if self._scales is None:
            return self._values[block, slot], None
        scales = self._scales[block, slot].view(self._scale_dtype)
        return self._values[block, slot], scales.squeeze(-1)

    def read_whole(self, blocks: Tensor) -> tuple[Tensor, Tensor | None]:
        """Stored values [n * P, bytes or D] and scales [n * P] of all tokens of `blocks` int [n]: a
        few long copies, which a CPU does many times faster than many short ones."""
        values, scales = self._split(self._blocks.index_select(0, blocks))
        values = values.reshape(-1, self._row)
        if scales is None:
            return values, None
        return values, scales.reshape(-1, SCALE_BYTES).view(self._scale_dtype).squeeze(-1)

    def _split(self, blocks: Tensor) -> tuple[Tensor, Tensor | None]:
        """Values [n, P, bytes or D] and scales [n, P, 4] of blocks [n, elements of a block]."""
        behind = self.size * self._row
        values = blocks[:, :behind].unflatten(1, (self.size, -1))
        if behind == blocks.shape[1]:
            return values, None
        return values, blocks[:, behind:].unflatten(1, (self.size, SCALE_BYTES))


class PagedTokens:
    """Tokens of requests: row r reads pages through row entries[r] of an int32 block table."""

    def __init__(
        self, pages: Pages, decode: Decoder, block_table: Tensor, entries: Tensor, count: int
    ) -> None:
        self._pages, self._decode = pages, decode
        self._table, self._entries, self._count = block_table, entries, count

    def span(self, first: int, last: int) -> Span:
        """Tiles of the first row's request, whose needed block ids are known to be good."""
        low, high, size = first * TILE, min(last * TILE, self._count), self._pages.size
        if size > TILE:
            position = torch.arange(low, high, device=self._table.device).unsqueeze(0)
            stored = self._pages.read(*self._locate(slice(0, 1), position))
            return decoded_span(self._decode, *stored, last - first)
        table = self._table[self._entries[0], low // size : -(-high // size)]
        skipped = low % size
        values, scales = self._pages.read_whole(table.contiguous())
        needed = slice(skipped, skipped + high - low)
        scales = None if scales is None else scales[None, needed]
        return decoded_span(self._decode, values[None, needed], scales, last - first)

    def gather(self, rows: slice, positions: Tensor) -> Span:
        """Tokens of each row's request; a block id outside the cache reads as zeros."""
        block, slot = self._locate(rows, positions.clamp(max=self._count - 1))
        exists = (block >= 0) & (block < self._pages.count)
        values, scales = self._pages.read(torch.where(exists, block, 0), slot)
        values = torch.where(exists.unsqueeze(-1), values, 0)
        scales = None if scales is None else torch.where(exists, scales, 0)
        return decoded_span(self._decode, values, scales)

    def _locate(self, rows: slice, positions: Tensor) -> tuple[Tensor, Tensor]:
        size = self._pages.size
        block = self._table[self._entries[rows].unsqueeze(1), positions // size]
        return block.long(), positions % size


@isolated
def paged(
    out: Tensor,
    q: Tensor,
    q_scale: Tensor | None,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    indices: Tensor | None,
    *,
    clean: bool,
    on_host: bool,
    memory: int,
) -> None:
    """Score B * next_n query tokens against their requests' pages into `out` [B * next_n, L].

    Shapes and dtypes as in `docs/semantics.md`, all strides allowed. `on_host`: lens may be read
    on the host, lens and block ids were checked, and `memory` bounds the extra bytes. Otherwise
    lens are cut to what there is.
    """
    batch, next_n = q.shape[:2]
    decode = Decoder(q, q_scale)
    query = Query(q, q_scale, weights, decode)
    pages = Pages(kv_cache, decode)
    reach = min(out.shape[1], block_table.shape[1] * pages.size)
    lens = lens_of_rows(context_lens, next_n)
    if indices is None:
        entries = torch.arange(batch, device=lens.device).repeat_interleave(next_n)
    else:
        entries = entries_of_requests(lens, indices)
    lens = lens.clamp(max=reach)
    if on_host:
        if clean:
            out.fill_(-torch.inf)
        for rows, tiles in _alike(_requests(entries), lens.tolist()):
            count = int(lens[rows].max())
            tokens = PagedTokens(pages, decode, block_table, entries[rows], count)
            part = (out[rows], query.part(rows), tokens)
            if tiles:
                score_short(*part, lens[rows], tiles, memory=memory)
            else:
                score_windows(*part, _first(lens[rows]), memory=memory)
        return
    if clean:
        out[:, reach:].fill_(-torch.inf)
    if reach:
        tokens = PagedTokens(pages, decode, block_table, entries, reach)
        score_masked(out[:, :reach], query, tokens, _first(lens), shared=False, clean=clean)


def _first(lens: Tensor) -> Windows:
    """Row s sees the first lens[s] KV tokens."""
    zeros = torch.zeros_like(lens)
    return Windows(zeros, lens, zeros)


def _alike(requests: list[slice], lens: list[int]) -> Iterator[tuple[slice, int]]:
    """Rows to score together: (rows, tiles) of neighbouring short requests that need equally many
    tiles, (rows, 0) of one longer request. Requests without KV tokens are left out."""
    together, tiles = slice(0, 0), 0
    for rows in requests:
        needed = -(-max(lens[rows]) // TILE)
        short = 0 < needed <= _SHORT_TILES and rows.stop - rows.start <= _SHORT_ROWS
        if short and needed == tiles and together.stop == rows.start:
            together = slice(together.start, rows.stop)
            continue
        if tiles:
            yield together, tiles
        together, tiles = rows, needed if short else 0
        if needed and not short:
            yield rows, 0
    if tiles:
        yield together, tiles


def _requests(entries: Tensor) -> list[slice]:
    """Runs of rows that read the same pages."""
    entry = entries.tolist()
    cuts = [r for r in range(len(entry)) if r == 0 or entry[r] != entry[r - 1]]
    return [slice(low, high) for low, high in pairwise([*cuts, len(entry)])]
