"""The reference that people run: float32, blockwise, bounded memory, batch-invariant.

Query tokens and KV tokens are decoded a block at a time and meet in the products of
`mqa.reference.products`. Where the host may read the windows (CPU tensors), only the tiles that
they need are computed; elsewhere nothing is read on the host: every tile is computed and masked
on the device.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from mqa.reference.environment import isolated
from mqa.reference.products import (
    TILE,
    Decoder,
    PaddedProducts,
    Products,
    Span,
    decoded_span,
    padded_dims,
    padded_heads,
)

MASKED_BYTES = 16 << 20
"""Bound on the extra memory where nothing is read on the host. Not a setting: bits depend on it."""

_SCORES_BYTES = 4 << 20  # dots of a batch of products: stays in a CPU's caches
_SPAN_BYTES = 4 << 20  # decoded KV tokens
_QUERY_BYTES = 4 << 20  # decoded query tokens
_SHARED_ROWS = 16  # from so many rows on, one tile for all rows beats all tiles for one row
_FLOAT32 = 4  # bytes


class Query(NamedTuple):
    """Rows of query tokens as stored: q [B, next_n, H, D or D/2] and q_scale [B, next_n, H] or None
    in any strides, of which row `first` and those behind it have `weights` [rows, H]."""

    q: Tensor
    q_scale: Tensor | None
    weights: Tensor
    decode: Decoder
    first: int = 0

    def part(self, rows: slice) -> Query:
        return self._replace(weights=self.weights[rows], first=self.first + rows.start)

    def decoded(self, rows: slice) -> tuple[Tensor, Tensor]:
        """float32 q and weights of some rows, as `Decoder.heads` gives them."""
        weights = self.weights[rows]
        low, next_n = self.first + rows.start, self.q.shape[1]
        high = low + weights.shape[0]
        entries = slice(low // next_n, -(-high // next_n))
        own = slice(low - entries.start * next_n, high - entries.start * next_n)
        # Joining B and next_n may copy, so it is done to the few entries needed.
        q = self.q[entries].flatten(0, 1)[own]
        scale = None if self.q_scale is None else self.q_scale[entries].flatten(0, 1)[own]
        return self.decode.heads(q, scale, weights)


class Tokens(Protocol):
    """Where KV tokens come from: a dense tensor or a paged cache."""

    def span(self, first: int, last: int) -> Span:
        """Tiles first..last-1, the same for all rows, padded with zeros past the last token."""
        ...

    def gather(self, rows: slice, positions: Tensor) -> Span:
        """Tokens at `positions` int64 [rows, tiles * 256], each row its own; any at a position
        outside a row's window, which is masked later."""
        ...


class DenseTokens:
    def __init__(self, decoder: Decoder, k: Tensor, kv_scale: Tensor | None) -> None:
        self._decode, self._scale = decoder, kv_scale
        self._k = k if decoder.plain else k.view(torch.uint8)  # float8 cannot be gathered

    def span(self, first: int, last: int) -> Span:
        tokens = slice(first * TILE, min(last * TILE, self._k.shape[0]))
        scale = None if self._scale is None else self._scale[None, tokens]
        return decoded_span(self._decode, self._k[None, tokens], scale, last - first)

    def gather(self, rows: slice, positions: Tensor) -> Span:
        at = positions.clamp(0, self._k.shape[0] - 1)
        scale = None if self._scale is None else self._scale[at]
        return decoded_span(self._decode, self._k[at], scale)


class Windows(NamedTuple):
    """Row s sees KV tokens low[s]..high[s]-1, int64 [S] within the tokens there are; column j of
    its result is position origin[s] + j."""

    low: Tensor
    high: Tensor
    origin: Tensor

    def positions(self, rows: slice, first: int, last: int) -> Tensor:
        """Positions [rows, n] of the columns of tiles first..last-1."""
        column = torch.arange(first * TILE, last * TILE, device=self.origin.device)
        return self.origin[rows].unsqueeze(1) + column

    def inside(self, rows: slice, positions: Tensor) -> Tensor:
        return (positions >= self.low[rows].unsqueeze(1)) & (
            positions < self.high[rows].unsqueeze(1)
        )


@isolated
def dense(
    out: Tensor,
    q: Tensor,
    q_scale: Tensor | None,
    k: Tensor,
    kv_scale: Tensor | None,
    weights: Tensor,
    start: Tensor,
    end: Tensor,
    *,
    compressed: bool,
    clean: bool,
    on_host: bool,
    memory: int,
) -> None:
    """Score S query tokens against N KV tokens into `out` [S, N], or [S, M] if compressed.

    Shapes and dtypes as in `docs/semantics.md`, all strides allowed. `on_host`: windows may be
    read on the host, and were checked; `memory` then bounds the extra bytes.
    """
    count = k.shape[0]
    low, high = (bound.long().clamp(0, count) for bound in (start, end))
    origin = start.long().clamp(min=0) if compressed else torch.zeros_like(low)
    windows = Windows(low, high, origin)
    scale = None if q_scale is None else q_scale.unsqueeze(1)
    query = Query(q.unsqueeze(1), scale, weights, Decoder(q, q_scale))
    tokens = DenseTokens(query.decode, k, kv_scale)
    if clean and (on_host or count == 0):
        out.fill_(-torch.inf)
    if count == 0:
        return
    if on_host:
        score_windows(out, query, tokens, windows, memory=memory)
    else:
        score_masked(out, query, tokens, windows, shared=not compressed, clean=clean)


def score_windows(
    out: Tensor,
    query: Query,
    tokens: Tokens,
    windows: Windows,
    *,
    memory: int,
) -> None:
    """Write the logits inside the windows, read on the host; every other entry keeps its value."""
    batch, rows, span = _block_sizes(query, memory)
    products = Products(batch, query.q.shape[2], out.device)
    for low in range(0, len(out), rows):
        at = slice(low, low + rows)
        here = Windows(windows.low[at], windows.high[at], windows.origin[at])
        used = here.low < here.high
        if not used.any():
            continue
        part = _Rows(out[at], *query.decoded(at), here, products)
        first = int(here.low[used].min()) // TILE
        last = -(-int(here.high[used].max()) // TILE)
        for tile in range(first, last, span):
            part.score(tokens, tile, min(tile + span, last))


def score_short(
    out: Tensor, query: Query, tokens: Tokens, lens: Tensor, tiles: int, *, memory: int
) -> None:
    """Write the first lens[s] logits of each row, read on the host, for rows that have KV tokens of
    their own, few of them: all within `tiles` tiles. Every other entry keeps its value."""
    batch, _, span = _block_sizes(query, memory)
    batch = max(tiles, min(batch, span))
    products = Products(batch, query.q.shape[2], out.device)
    column = torch.arange(tiles * TILE, device=out.device)
    for low in range(0, len(lens), batch // tiles):
        at = slice(low, low + batch // tiles)
        length = lens[at].unsqueeze(1)
        own = tokens.gather(at, torch.minimum(column, (length - 1).clamp(min=0)))
        target = out[at, : tiles * TILE]
        logits = products.score(*query.decoded(at), own)[:, : target.shape[1]]
        target.copy_(torch.where(column[: target.shape[1]] < length, logits, target))


def _block_sizes(query: Query, memory: int) -> tuple[int, int, int]:
    """Products in a batch, query tokens and KV tiles decoded at a time, on a CPU."""
    num_heads, head_dim = query.q.shape[2], query.decode.head_dim
    share = memory // 8  # decoding holds the codes, the values and the block scales at once
    return (
        max(1, min(_SCORES_BYTES, share) // (num_heads * TILE * _FLOAT32)),
        max(1, min(_QUERY_BYTES, share) // (num_heads * head_dim * _FLOAT32)),
        max(1, min(_SPAN_BYTES, share) // (TILE * head_dim * _FLOAT32)),
    )


class _Rows:
    """Decoded query tokens, their windows, and where their logits go."""

    def __init__(
        self, out: Tensor, queries: Tensor, weights: Tensor, windows: Windows, products: Products
    ) -> None:
        self._out, self._queries, self._weights = out, queries, weights
        self._windows, self._products = windows, products
        self._bounds = list(zip(windows.low.tolist(), windows.high.tolist(), strict=True))
        self._origin: list[int] = windows.origin.tolist()
        self._full = not any(self._origin)
        self._width = out.shape[1]

    def score(self, tokens: Tokens, first: int, last: int) -> None:
        """Write what tiles first..last-1 hold for these rows."""
        runs = self._needing(first, last, range(len(self._bounds)))
        if not runs:
            return
        span = tokens.span(first, last)
        batch = self._products.batch
        for run in runs:
            for low in range(run.start, run.stop, batch):
                block = range(low, min(low + batch, run.stop))
                if len(block) < _SHARED_ROWS:
                    for row in block:
                        self._score_row(row, span, first, last)
                else:
                    self._score_tiles(block, span, first, last)

    def _needing(self, first: int, last: int, among: range) -> list[range]:
        """Runs of neighbouring rows whose windows meet the tiles."""
        low, high = first * TILE, last * TILE
        runs: list[range] = []
        for row in among:
            if max(self._bounds[row][0], low) < min(self._bounds[row][1], high):
                if runs and runs[-1].stop == row:
                    runs[-1] = range(runs[-1].start, row + 1)
                else:
                    runs.append(range(row, row + 1))
        return runs

    def _score_tiles(self, block: range, span: Span, first: int, last: int) -> None:
        bounds = self._bounds[block.start : block.stop]
        all_from, all_to = max(low for low, _ in bounds), min(high for _, high in bounds)
        for tile in range(first, last):
            one = span.tiles(tile - first, tile - first + 1)
            left, right = tile * TILE, min(tile * TILE + TILE, self._width)
            whole = self._full and all_from <= left and right <= all_to
            if whole and right - left == TILE:
                at = slice(block.start, block.stop)
                pairs = (self._queries[at], self._weights[at], one)
                self._products.score(*pairs, into=self._out[at, left:right])
                continue
            for rows in self._needing(tile, tile + 1, block):
                self._score_edge(rows, one, left, right)

    def _score_edge(self, rows: range, one: Span, left: int, right: int) -> None:
        """Write one tile, columns left..right-1 of a full result, for rows that need part of it."""
        at = slice(rows.start, rows.stop)
        logits = self._products.score(self._queries[at], self._weights[at], one)
        if not self._full:
            for row in rows:
                self._write(row, logits[row - rows.start], left)
            return
        target, logits = self._out[at, left:right], logits[:, : right - left]
        position = torch.arange(left, right, device=logits.device)
        target.copy_(torch.where(self._windows.inside(at, position), logits, target))

    def _score_row(self, row: int, span: Span, first: int, last: int) -> None:
        low, high = self._bounds[row]
        if low >= high:
            return
        first_needed, last_needed = max(first, low // TILE), min(last, -(-high // TILE))
        for tile in range(first_needed, last_needed, self._products.batch):
            stop = min(tile + self._products.batch, last_needed)
            queries, weights = self._queries[row : row + 1], self._weights[row : row + 1]
            logits = self._products.score(queries, weights, span.tiles(tile - first, stop - first))
            self._write(row, logits[0], tile * TILE)

    def _write(self, row: int, logits: Tensor, position: int) -> None:
        """Copy the logits from `position` on, as far as they are in the row's window."""
        low = max(self._bounds[row][0], position)
        high = min(self._bounds[row][1], position + logits.shape[0])
        if low < high:
            left, right = low - self._origin[row], high - self._origin[row]
            self._out[row, left:right] = logits[low - position : high - position]


def score_masked(
    out: Tensor, query: Query, tokens: Tokens, windows: Windows, *, shared: bool, clean: bool
) -> None:
    """Write every entry of `out`, masked on the device; nothing is read on the host.

    `shared`: column j is KV token j for all rows, so a span serves them all.
    """
    count, num_heads = out.shape[0], query.q.shape[2]
    head_dim, last_tile = query.decode.head_dim, -(-out.shape[1] // TILE)
    # Tokens are there three times over: gathered bytes and codes, decoded, and in the batch.
    heads, dims = padded_heads(num_heads), padded_dims(head_dim)
    pair_bytes = (TILE * heads + 3 * TILE * dims + heads * dims) * _FLOAT32
    batch = max(1, MASKED_BYTES * 3 // 4 // pair_bytes)
    tiles = batch // min(count, batch) if shared else min(batch, last_tile)
    rows = max(1, batch // tiles)
    reach = max(tiles, batch // 2) // tiles * tiles if shared else tiles
    products = PaddedProducts(batch, num_heads, head_dim, out.device)
    for low in range(0, count, rows):
        row = slice(low, min(low + rows, count))
        decoded = query.decoded(row)
        for first in range(0, last_tile, reach):
            last = min(first + reach, last_tile)
            positions = windows.positions(row, first, last)
            span = tokens.span(first, last) if shared else tokens.gather(row, positions)
            inside = windows.inside(row, positions) if clean else None
            for tile in range(first, last, tiles):
                part = slice((tile - first) * TILE, (min(tile + tiles, last) - first) * TILE)
                logits = products.score(*decoded, span.tiles(tile - first, part.stop // TILE))
                if inside is not None:
                    logits = torch.where(inside[:, part], logits, -torch.inf)
                target = out[row, tile * TILE : first * TILE + part.stop]
                target.copy_(logits[:, : target.shape[1]])
