"""Tensors of a timed call, in as many sets as keep a cache from helping."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mqa.cli.gpu.rows import Party

L2_TIMES = 4
"""Inputs rotate through this many times the L2 cache."""
_MOST_SETS = 64


@dataclass(frozen=True, eq=False)
class Inputs:
    """q, k `float8_e4m3fn`, k_scale `float32`, w of the call's dtype, start, end `int32`."""

    q: Tensor
    k: Tensor
    k_scale: Tensor
    w: Tensor
    start: Tensor
    end: Tensor

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in vars(self).values())


def draw(party: Party, generator: torch.Generator) -> Inputs:
    """Random inputs on the generator's device: q, k, weights normal, k scales from 0.5 to 1.5."""
    where, windows = generator.device, party.windows

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=where)

    return Inputs(
        q=normal(windows.rows, party.H, party.D).to(torch.float8_e4m3fn),
        k=normal(windows.keys, party.D).to(torch.float8_e4m3fn),
        k_scale=torch.rand(windows.keys, generator=generator, device=where) + 0.5,
        w=normal(windows.rows, party.H).to(getattr(torch, party.call.weights)),
        start=torch.from_numpy(windows.start).to(where, torch.int32),
        end=torch.from_numpy(windows.end).to(where, torch.int32),
    )


def rotation(party: Party, where: torch.device, l2_bytes: int, seed: int = 0) -> list[Inputs]:
    """Sets of inputs that together are `L2_TIMES` times the cache, at least 2 and at most 64."""
    generator = torch.Generator(where).manual_seed(seed)
    sets = [draw(party, generator)]
    wanted = -(-L2_TIMES * l2_bytes // sets[0].nbytes)
    count = min(max(wanted, 2), _MOST_SETS)
    return sets + [draw(party, generator) for _ in range(count - 1)]
