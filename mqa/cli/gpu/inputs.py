"""Tensors of a timed call, in as many sets as keep a cache from helping."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mqa import formats
from mqa.cli.gpu.rows import Party
from mqa.cli.gpu.windows import Batch
from mqa.problem import MX_FORMATS, Format
from mqa.testing._codes import I64

L2_TIMES = 4
"""Inputs rotate through this many times the L2 cache."""
_FEWEST_SETS, _MOST_SETS = 3, 64
"""With two, a party would meet the set that the other one has just read."""
_CHUNK = 1 << 27
"""Numbers quantised at once, which takes many times the memory of the result."""


@dataclass(frozen=True, eq=False)
class Inputs:
    """Row r of the result is valid at positions start[r] to end[r] - 1, `int32` both.

    Values and scales are those of the call's format, of bf16 no scales. A dense call has q
    [S, H, W], k [N, W] and its scale [N]; a paged one q [B, next_n, H, W], a cache
    [pages, P, 1, W + 4] or [pages, P, 1, D] as k and the block table [B, columns]; start is 0 then,
    and end holds the lens.
    """

    q: Tensor
    q_scale: Tensor | None
    k: Tensor
    k_scale: Tensor | None
    w: Tensor
    start: Tensor
    end: Tensor
    width: int
    """max_context_len of a paged call, max_seqlen_k of a compressed one."""
    table: Tensor | None = None

    @property
    def lens(self) -> Tensor:
        """context_lens of a paged call, [B, next_n]."""
        return self.end.view(self.q.shape[:2])

    @property
    def nbytes(self) -> int:
        return sum(value.nbytes for value in vars(self).values() if isinstance(value, Tensor))


def draw(party: Party, generator: torch.Generator) -> Inputs:
    """Random inputs on the generator's device: q, k, weights normal, FP8's k scales 0.5 to 1.5.

    Windows of as many rows and tokens get the same data, in pages or not.
    """
    where, windows, kind = generator.device, party.windows, party.call.format
    q, q_scale = _quantised(kind, (windows.rows, party.H, party.D), generator)
    k, k_scale = _quantised(kind, (windows.tokens, party.D), generator)
    if kind == "fp8":
        k_scale = torch.rand(windows.tokens, generator=generator, device=where) + 0.5
    w = torch.randn(windows.rows, party.H, generator=generator, device=where)
    bounds = (windows.start, windows.end)
    start, end = (torch.from_numpy(bound).to(where, torch.int32) for bound in bounds)
    weights = w.to(getattr(torch, party.call.weights))
    found = Inputs(q, q_scale, k, k_scale, weights, start, end, windows.result_width)
    return _in_pages(found, windows) if isinstance(windows, Batch) else found


def rotation(party: Party, where: torch.device, l2_bytes: int, seed: int = 0) -> list[Inputs]:
    """Sets of inputs that together are `L2_TIMES` times the cache, at least 3 and at most 64."""
    generator = torch.Generator(where).manual_seed(seed)
    sets = [draw(party, generator)]
    wanted = -(-L2_TIMES * l2_bytes // sets[0].nbytes)
    count = min(max(wanted, _FEWEST_SETS), _MOST_SETS)
    return sets + [draw(party, generator) for _ in range(count - 1)]


def _quantised(
    kind: Format, shape: tuple[int, ...], generator: torch.Generator
) -> tuple[Tensor, Tensor | None]:
    """Normal numbers as values and, of MX formats, their block scales."""
    step = max(1, _CHUNK // math.prod(shape[1:]))
    values: list[Tensor] = []
    scales: list[Tensor] = []
    for first in range(0, max(shape[0], 1), step):  # of nothing, one empty part
        size = (min(step, shape[0] - first), *shape[1:])
        numbers = torch.randn(size, generator=generator, device=generator.device)
        if kind not in MX_FORMATS:
            values.append(numbers.to(torch.bfloat16 if kind == "bf16" else torch.float8_e4m3fn))
            continue
        quantise = formats.quantize_mxfp8 if kind == "mxfp8" else formats.quantize_mxfp4
        value, scale = quantise(numbers)
        values.append(value)
        scales.append(scale)
    # float8 has no cat
    joined = torch.cat([value.view(torch.uint8) for value in values]).view(values[0].dtype)
    return joined, torch.cat(scales) if scales else None


def _in_pages(inputs: Inputs, windows: Batch) -> Inputs:
    """The same with its tokens in pages, shuffled, and the table that finds them."""
    where, grouped = inputs.k.device, (windows.rows // windows.next_n, windows.next_n)
    counts = -(-windows.request_tokens // windows.page)
    pages = max(int(counts.sum()), 1)
    at = torch.from_numpy(_slots(windows.request_tokens, counts * windows.page)).to(where)
    k = _spread(inputs.k.view(torch.uint8), at, pages * windows.page).view(inputs.k.dtype)
    shape, scale = (pages, windows.page), inputs.k_scale
    if scale is not None:
        scale = _spread(scale, at, pages * windows.page).view(shape)
    cache = formats.pack_kv_cache(k.view(*shape, -1), scale)
    order = np.random.default_rng(0).permutation(pages)
    columns = np.arange(max(1, -(-windows.keys // windows.page)))
    table = np.zeros((grouped[0], len(columns)), np.int32)
    table[columns < counts[:, None]] = np.argsort(order)[: counts.sum()]
    return dataclasses.replace(
        inputs,
        q=inputs.q.view(*grouped, *inputs.q.shape[1:]),
        q_scale=None if inputs.q_scale is None else inputs.q_scale.view(*grouped, -1),
        k=cache[torch.from_numpy(order).to(where)],
        k_scale=None,
        table=torch.from_numpy(table).to(where),
    )


def _slots(tokens: I64, room: I64) -> I64:
    """Where each token lies if every request's begin after the `room` of those before it."""
    gaps = np.cumsum(room) - room - (np.cumsum(tokens) - tokens)
    return np.asarray(np.arange(tokens.sum()) + np.repeat(gaps, tokens), np.int64)


def _spread(rows: Tensor, at: Tensor, count: int) -> Tensor:
    """`count` rows: these at places `at`, zeros elsewhere."""
    return rows.new_zeros((count, *rows.shape[1:])).index_copy_(0, at, rows)
