"""What a schedule may hold: anything."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

INT32 = torch.iinfo(torch.int32)


def random_cuts(sms: int, low: int, high: int) -> Tensor:
    generator = torch.Generator().manual_seed(sms)
    return torch.randint(low, high, (sms + 1, 2), generator=generator).int()


def in_order(cuts: Tensor) -> Tensor:
    rows: list[list[int]] = sorted(cuts.tolist())
    return torch.tensor(rows, dtype=torch.int32)


CONTENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "fresh": lambda fresh: fresh,
    "reversed": lambda fresh: fresh.flip(0),
    "halved": lambda fresh: fresh // 2,
    "moved on": lambda fresh: fresh + 1,
    "zeros": torch.zeros_like,
    "lowest": lambda fresh: torch.full_like(fresh, INT32.min),
    "highest": lambda fresh: torch.full_like(fresh, INT32.max),
    "small": lambda fresh: random_cuts(len(fresh) - 1, -1, 9),
    "small in order": lambda fresh: in_order(random_cuts(len(fresh) - 1, -1, 9)),
    "any": lambda fresh: random_cuts(len(fresh) - 1, INT32.min, INT32.max),
    "any in order": lambda fresh: in_order(random_cuts(len(fresh) - 1, INT32.min, INT32.max)),
}
"""Cut points int32 [sms + 1, 2] from fresh ones, on the CPU."""
