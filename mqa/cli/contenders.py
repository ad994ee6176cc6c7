"""What `mqa bench` compares on a CPU: ours, the usual fallback, and what sgemm can do."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mqa.formats import dequantize_mxfp4, dequantize_mxfp8, unpack_kv_cache
from mqa.problem import DenseProblem
from mqa.testing import Case

Work = Callable[[], object]
SQUARE = 2048
"""Side of the square product that stands for this machine's best sgemm."""


def flops(case: Case) -> int:
    """Multiply-adds, counted twice, of the dots inside the windows."""
    return 2 * case.problem.H * case.problem.D * int(case.data.lengths().sum())


def ours(case: Case) -> Work:
    """The public function, as a caller would use it."""
    return case.run


def einsum(case: Case) -> Work:
    """What engines do without the kernel: widen, einsum over [S, H, N], relu, weigh, sum, mask."""
    return (lambda: _einsum_dense(case)) if _dense(case) else (lambda: _einsum_paged(case))


def sgemm(case: Case) -> Work:
    """The bare float32 product of the same operands, widened beforehand, into a ready result."""
    q, q_scale = _queries(case)
    wide = _widen(case, q, q_scale)
    if _dense(case):
        keys = _widen(case, case.tensors["kv"], case.tensors.get("kv_scale"))
        flat = wide.reshape(-1, wide.shape[-1])
        product = torch.empty(len(flat), len(keys))
        return lambda: torch.mm(flat, keys.T, out=product)
    pages = torch.stack([_request_keys(case, entry)[0] for entry in range(len(q))])
    batched = wide.flatten(1, 2)
    products = torch.empty(*batched.shape[:2], pages.shape[1])
    return lambda: torch.bmm(batched, pages.transpose(1, 2), out=products)


def square() -> Work:
    """A float32 product of square matrices, where sgemm does its best."""
    a, b = torch.randn(SQUARE, SQUARE), torch.randn(SQUARE, SQUARE)
    product = torch.empty(SQUARE, SQUARE)
    return lambda: torch.mm(a, b, out=product)


CONTENDERS: dict[str, Callable[[Case], Work]] = {"mqa": ours, "einsum": einsum, "sgemm": sgemm}


def _dense(case: Case) -> bool:
    return isinstance(case.problem, DenseProblem)


def _queries(case: Case) -> tuple[Tensor, Tensor | None]:
    return case.tensors["q"], case.tensors.get("q_scale")


def _widen(case: Case, values: Tensor, scale: Tensor | None) -> Tensor:
    """Values in float32; FP8 without its k scale, which comes after the head sum."""
    if case.problem.format == "fp8" or scale is None:
        return values.to(torch.float32)
    widen = dequantize_mxfp4 if case.problem.format == "mxfp4" else dequantize_mxfp8
    return widen(values, scale)


def _score(case: Case, q: Tensor, k: Tensor, k_scale: Tensor | None, weights: Tensor) -> Tensor:
    """q [S, H, D], k [N, D], weights [S, H] -> [S, N]."""
    dots = torch.einsum("shd,nd->shn", q, k)
    logits = (dots.relu() * weights.float()[..., None]).sum(dim=1)
    return logits if k_scale is None or case.problem.format != "fp8" else logits * k_scale


def _einsum_dense(case: Case) -> Tensor:
    tensors = case.tensors
    k, k_scale = tensors["kv"], tensors.get("kv_scale")
    wide = _widen(case, *_queries(case))
    logits = _score(case, wide, _widen(case, k, k_scale), k_scale, tensors["w"])
    position = torch.arange(len(k))
    outside = (position < tensors["start"][:, None]) | (position >= tensors["end"][:, None])
    return logits.masked_fill(outside, float("-inf")).to(case.out_dtype)


def _einsum_paged(case: Case) -> Tensor:
    """Request by request, with the keys gathered from their pages."""
    q, q_scale = _queries(case)
    weights = case.tensors["w"].unflatten(0, q.shape[:2])
    logits = torch.full((case.problem.rows, case.problem.width), float("-inf"))
    rows = logits.unflatten(0, q.shape[:2])
    for entry in range(len(q)):
        k, k_scale = _request_keys(case, entry)
        scale = None if q_scale is None else q_scale[entry]
        wide = _widen(case, q[entry], scale)
        count = min(len(k), logits.shape[1])
        rows[entry, :, :count] = _score(case, wide, k, k_scale, weights[entry])[:, :count]
    outside = torch.arange(logits.shape[1]) >= torch.from_numpy(case.data.lengths())[:, None]
    return logits.masked_fill_(outside, float("-inf")).to(case.out_dtype)


def _request_keys(case: Case, entry: int) -> tuple[Tensor, Tensor | None]:
    """Keys [tokens, D] in float32 and their scales, if any, of all pages that the request's row
    needs."""
    cache, table = case.tensors["cache"], case.tensors["table"]
    page = cache.shape[1]
    lens = torch.from_numpy(case.data.lengths()).unflatten(0, case.tensors["q"].shape[:2])
    pages = table[entry, : -(-int(lens[entry].max()) // page)].long()
    values, scale = unpack_kv_cache(cache[pages], case.problem.format)
    scale = None if scale is None else scale.flatten()
    return _widen(case, values.flatten(0, 1), scale), scale
