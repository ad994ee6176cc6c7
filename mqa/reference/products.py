"""The products of the reference: one shape, many at once.

A query token's heads [H, D] meet one tile of 256 KV tokens [D, 256], relu follows, and
[1, H] x [H, 256] sums the heads; a batch of such (row, tile) pairs goes to `torch.bmm` at once.
The shape depends on H and D alone, and a batched product does not look at its neighbours: so a
row's bits depend neither on the other rows nor on where its window starts, nor on how the work
was cut. (A plain matrix product changes bits with its shape, because the library behind it
changes kernels.)

Zeros pad short tiles to 256 tokens, H to a multiple of 8, D to a multiple of 16 and a batch of one
to two: with other sizes a library was seen to take other kernels for a batch of one, for another
number of threads, or for another address.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from mqa.formats import elements

TILE = 256
"""KV tokens of one product."""
_HEADS, _DIMS, _PAIRS = 8, 16, 2
"""Products have a multiple of so many heads and dims, and batches at least so many pairs."""


def padded_heads(num_heads: int) -> int:
    return -(-num_heads // _HEADS) * _HEADS


def padded_dims(head_dim: int) -> int:
    return -(-head_dim // _DIMS) * _DIMS


class Decoder:
    """Element codes to float32 [..., D padded] for one call's format."""

    def __init__(self, q: Tensor, q_scale: Tensor | None) -> None:
        self._decode = elements.decoder(q.dtype)
        self.block_scaled = q_scale is not None
        self.plain = q.dtype == torch.bfloat16
        """Whether keys have no scale of any kind."""
        self.head_dim = q.shape[-1] * (2 if self._decode is elements.decode_e2m1 else 1)

    def __call__(self, values: Tensor, block_scale: Tensor | None) -> Tensor:
        decoded = self._decode(values, torch.float32)
        if block_scale is not None:
            return elements.scale_blocks_(decoded, block_scale)
        return _padded(decoded, dims=padded_dims(self.head_dim))

    def heads(self, q: Tensor, q_scale: Tensor | None, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Query tokens as products take them: float32 [rows, H padded, D padded], and weights of
        any stride and dtype as float32 [rows, 1, H padded]."""
        heads = padded_heads(q.shape[1])
        queries = _padded(self(q, q_scale), heads=heads)
        return queries, _padded(weights.float(), dims=heads).contiguous().unsqueeze(1)


class Span(NamedTuple):
    """Decoded KV tokens: values [R, tiles, 256, D padded], scale [R, tiles * 256] or None; R = 1
    serves all rows."""

    values: Tensor
    scale: Tensor | None

    def tiles(self, first: int, last: int) -> Span:
        scale = None if self.scale is None else self.scale[:, first * TILE : last * TILE]
        return Span(self.values[:, first:last], scale)


class Products:
    """Batches of up to `batch` products, with their buffers: allocating those anew for each batch
    costs a CPU as much as the products."""

    def __init__(self, batch: int, num_heads: int, device: torch.device) -> None:
        self.batch, self._num_heads = batch, num_heads
        room, heads = max(batch, _PAIRS), padded_heads(num_heads)
        self._dots = torch.empty(room, heads, TILE, device=device, dtype=torch.float32)
        self._sums = torch.empty(room, 1, TILE, device=device, dtype=torch.float32)
        self._zero = torch.zeros((), device=device, dtype=torch.float32)

    def score(
        self, queries: Tensor, weights: Tensor, span: Span, into: Tensor | None = None
    ) -> Tensor:
        """Logits [rows, tiles * 256] of queries [rows, H, D] and weights [rows, 1, H], written to
        `into`, or float32 and valid until the next call."""
        rows, tiles = queries.shape[0], span.values.shape[1]
        tokens = span.values.expand(rows, -1, -1, -1).flatten(0, 1)
        sums = self._multiply(_pairs(queries, tiles), _pairs(weights, tiles), tokens)
        logits = sums.view(rows, tiles * TILE)
        into = logits if into is None else into
        # The sum with 0 makes -0.0 a +0.0: ties of top-k are one value.
        if span.scale is None:
            return torch.add(logits, 0.0, out=into)
        return torch.addcmul(self._zero, logits, span.scale, out=into)

    def _multiply(self, queries: Tensor, weights: Tensor, tokens: Tensor) -> Tensor:
        """Weighted head sums [n, 1, 256] of n pairs."""
        count = len(tokens)
        if count < _PAIRS:
            queries, weights, tokens = (
                x.expand(_PAIRS, -1, -1) for x in (queries, weights, tokens)
            )
        dots, sums = self._dots[: len(tokens)], self._sums[: len(tokens)]
        torch.bmm(queries, tokens.mT, out=dots)
        # An infinite key makes NaN of the zeros that stand for missing heads.
        dots[:, self._num_heads :].zero_()
        return torch.bmm(weights, dots.relu_(), out=sums)[:count]


class PaddedProducts(Products):
    """Batches of always the same size and strides: a GPU's library chooses its kernel, and so the
    bits, by the number of products too. Places left over hold what an earlier batch left."""

    def __init__(self, batch: int, num_heads: int, head_dim: int, device: torch.device) -> None:
        super().__init__(batch, num_heads, device)
        room, heads, _ = self._dots.shape
        dims, like = padded_dims(head_dim), self._dots
        self._queries = like.new_zeros(room, heads, dims)
        self._weights = like.new_zeros(room, 1, heads)
        self._tokens = like.new_zeros(room, TILE, dims)

    def _multiply(self, queries: Tensor, weights: Tensor, tokens: Tensor) -> Tensor:
        count = len(tokens)
        self._queries[:count], self._weights[:count] = queries, weights
        self._tokens[:count] = tokens
        return super()._multiply(self._queries, self._weights, self._tokens)[:count]


def _padded(values: Tensor, dims: int | None = None, heads: int | None = None) -> Tensor:
    """Zeros behind the last dimension up to `dims`, behind the one before up to `heads`; `values`
    themselves where nothing is missing."""
    right = 0 if dims is None else dims - values.shape[-1]
    below = 0 if heads is None else heads - values.shape[-2]
    return pad(values, (0, right, 0, below)) if right or below else values


def _pairs(rows: Tensor, tiles: int) -> Tensor:
    """[rows, a, b] to [rows * tiles, a, b], a view where one of both is 1."""
    return rows.unsqueeze(1).expand(-1, tiles, -1, -1).flatten(0, 1)


def decoded_span(
    decode: Decoder, values: Tensor, scale: Tensor | None, tiles: int | None = None
) -> Span:
    """Stored tokens, values [rows, n, bytes or D] and scale [rows, n] or None, padded with zeros to
    `tiles`."""
    rows, count = values.shape[:2]
    k = decode(values, scale if decode.block_scaled else None)
    after = None if decode.block_scaled else scale
    missing = 0 if tiles is None else tiles * TILE - count
    if missing:
        k = torch.cat((k, k.new_zeros(rows, missing, k.shape[2])), dim=1)
        if after is not None:
            after = torch.cat((after, after.new_zeros(rows, missing)), dim=1)
    return Span(k.view(rows, -1, TILE, k.shape[2]), after)
