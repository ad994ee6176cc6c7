"""What tests of calls in graphs share: dense, paged and MX."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

import mqa
from mqa.testing import Case


def refill(case: Case, other: Case) -> None:
    """The contents of `other` in the tensors of `case`."""
    for name, tensor in other.tensors.items():
        case.tensors[name].copy_(tensor)


@contextlib.contextmanager
def dependent_launch(device: torch.device) -> Iterator[None]:
    mqa.set_pdl(True, device)
    try:
        yield
    finally:
        mqa.set_pdl(False, device)


def free(harness: Any) -> Any:
    """A harness without the guard, which waits for the device: nothing would overlap."""
    return dataclasses.replace(harness, guard=contextlib.nullcontext)
