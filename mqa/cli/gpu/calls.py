"""Our side of a row: the public functions, as an engine calls them."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

import mqa
from mqa.cli.gpu.inputs import Inputs
from mqa.cli.gpu.rows import Call, Party
from mqa.reference.schedule import SPLIT


class Unsupported(RuntimeError):
    """None of our CUDA backends takes the party's calls."""


def backend_of(party: Party, where: torch.device) -> str | None:
    """Which of our backends runs the party's calls. Raises Unsupported if a GPU would fall back, or
    the one that is named cannot."""
    found, named = mqa.supports(**party.variant(), device=where), party.call.by
    if named:
        if named in found.reasons:
            raise Unsupported(f"{named}: {', '.join(found.reasons[named])}")
        return named
    if where.type == "cuda" and found.backend in (None, "reference"):
        reasons = "; ".join(f"{name}: {', '.join(why)}" for name, why in found.reasons.items())
        what = f"{party.call.format} H={party.H} D={party.D}"
        raise Unsupported(f"no CUDA backend takes {what}: {reasons}")
    return found.backend


def call_mqa(inputs: Inputs, call: Call, out: Tensor | None = None) -> Callable[[], Tensor]:
    """The call, ready to be timed; its schedule, if any, is made here, once."""
    cuts = schedule_of(inputs, call)
    logits = getattr(torch, call.logits)
    if inputs.table is not None:
        return functools.partial(
            mqa.fp8_fp4_paged_mqa_logits,
            (inputs.q, inputs.q_scale),
            inputs.k,
            inputs.w,
            inputs.lens,
            inputs.table,
            cuts,
            inputs.width,
            clean_logits=call.clean,
            logits_dtype=logits,
            out=out,
            backend=call.by or None,
        )
    return functools.partial(
        mqa.fp8_fp4_mqa_logits,
        (inputs.q, inputs.q_scale),
        (inputs.k, inputs.k_scale),
        inputs.w,
        inputs.start,
        inputs.end,
        clean_logits=call.clean,
        max_seqlen_k=inputs.width if call.compressed else 0,
        logits_dtype=logits,
        schedule_meta=cuts,
        out=out,
        backend=call.by or None,
    )


def schedule_of(inputs: Inputs, call: Call) -> Tensor | None:
    """The cut points that the call is given: the right ones, or such as callers must not give."""
    if not call.schedule:
        return None
    if call.schedule == "stale":  # of rows that all saw everything
        return _cuts(inputs, torch.full_like(inputs.end, inputs.width))
    fresh = _cuts(inputs, inputs.end)
    if call.schedule == "reversed":
        return fresh.flip(0)
    if call.schedule == "random":
        generator = torch.Generator(fresh.device).manual_seed(0)
        most = torch.tensor([len(inputs.w), max(1, inputs.width // SPLIT)], device=fresh.device)
        parts = torch.rand(fresh.shape, generator=generator, device=fresh.device)
        return (parts * most).int()
    return fresh


def _cuts(inputs: Inputs, end: Tensor) -> Tensor:
    if inputs.table is None:
        return mqa.get_mqa_logits_metadata(inputs.start, end, len(inputs.k), inputs.q.shape[1])
    lens = end.view(inputs.q.shape[:2])
    return mqa.get_paged_mqa_logits_metadata(lens, inputs.k.shape[1], mqa.get_num_sms(end.device))
