"""Faults planted in the reference itself: the suites flag each, on every seed.

A mutant replaces one function inside the running reference. Each fault must show in at least a
fifth of the valid entries, and the suite's own check must fail.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mqa.formats import elements
from mqa.problem import parse
from mqa.reference import blockwise, paged, products
from mqa.testing import assert_logits, flagged_fraction, make_case
from mqa.testing.faults import DETECTED

Mutate = Callable[[pytest.MonkeyPatch], None]
multiply = products.Products._multiply
decode_e2m1, unpack_scale = elements.decode_e2m1, elements.unpack_scale
decoded_span = products.decoded_span


def on_operands(change: Callable[[Tensor, Tensor], None]) -> Mutate:
    """`change(queries, weights)` in copies of what enters the products."""

    def mutate(patch: pytest.MonkeyPatch) -> None:
        def wrong(
            self: products.Products, queries: Tensor, weights: Tensor, tokens: Tensor
        ) -> Tensor:
            queries, weights = queries.clone(), weights.clone()
            change(queries, weights)
            return multiply(self, queries, weights, tokens)

        patch.setattr(products.Products, "_multiply", wrong)

    return mutate


def drop_head(_queries: Tensor, weights: Tensor) -> None:
    weights[..., -1] = 0


def swap_weights(_queries: Tensor, weights: Tensor) -> None:
    weights[..., [0, 1]] = weights[..., [1, 0]]


def swap_dims(queries: Tensor, _weights: Tensor) -> None:
    queries[..., [0, 1]] = queries[..., [1, 0]]


def drop_last_step(queries: Tensor, _weights: Tensor) -> None:
    queries[..., -32:] = 0


def neighbours_scale(patch: pytest.MonkeyPatch) -> None:
    def wrong(decode: object, values: Tensor, scale: Tensor, *rest: int) -> products.Span:
        return decoded_span(decode, values, scale.roll(1, 1), *rest)

    for module in (blockwise, paged):
        patch.setattr(module, "decoded_span", wrong)


def coarse_head_sum(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: products.Products, queries: Tensor, weights: Tensor, tokens: Tensor) -> Tensor:
        multiply(self, queries, weights, tokens)
        dots, sums = self._dots[: len(tokens)], self._sums[: len(tokens)]
        total = torch.zeros_like(sums).bfloat16()
        for head in range(dots.shape[1]):
            total += (weights[:, :, head, None] * dots[:, None, head]).bfloat16()
        return sums.copy_(total)

    patch.setattr(products.Products, "_multiply", wrong)


def no_relu(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Tensor, "relu_", lambda self: self)


def swap_nibbles(patch: pytest.MonkeyPatch) -> None:
    def wrong(packed: Tensor, *rest: torch.dtype) -> Tensor:
        return decode_e2m1(packed, *rest).unflatten(-1, (-1, 2)).flip(-1).flatten(-2)

    # q keeps its order: swapping both sides alike would be no fault.
    patch.setattr(
        products.elements,
        "decode_e2m1",
        lambda packed, *rest: (decode_e2m1 if packed.shape[-2] == 8 else wrong)(packed, *rest),
    )


def reverse_scale_bytes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(elements, "unpack_scale", lambda s, d: unpack_scale(s, d).flip(-1))


BOUNDED: dict[str, Mutate] = {
    "one head dropped": on_operands(drop_head),
    "two weights swapped": on_operands(swap_weights),
    "two dims swapped": on_operands(swap_dims),
    "last K-step dropped": on_operands(drop_last_step),
    "a neighbour's k scale": neighbours_scale,
    "head sum in bfloat16": coarse_head_sum,
}
EXACT: dict[str, tuple[str, Mutate]] = {
    "relu dropped": ("fp8", no_relu),
    "wrong nibble order": ("mxfp4", swap_nibbles),
    "wrong scale byte order": ("mxfp8", reverse_scale_bytes),
}


def flagged(line: str, mutate: Mutate) -> float:
    case = make_case(parse(line))
    assert_logits(case, case.run())
    with pytest.MonkeyPatch.context() as patch:
        mutate(patch)
        wrong = case.run()
    with pytest.raises(AssertionError, match="replay: "):
        assert_logits(case, wrong)
    return flagged_fraction(case, wrong)


@pytest.mark.parametrize("fault", BOUNDED)
@pytest.mark.parametrize("fmt", ["fp8", "mxfp8", "mxfp4"])
def test_bounded_suite_flags_the_fault_on_every_seed(fmt: str, fault: str) -> None:
    for seed in range(20):
        line = f"dense {fmt} S=8 N=80 H=16 D=128 windows=full seed={seed}"
        assert flagged(line, BOUNDED[fault]) >= DETECTED, line


@pytest.mark.parametrize("fault", EXACT)
def test_exact_suite_flags_the_fault_on_every_seed(fault: str) -> None:
    fmt, mutate = EXACT[fault]
    for seed in range(20):
        line = f"dense {fmt} S=5 N=80 H=8 D=128 windows=full regime=exact seed={seed}"
        assert flagged(line, mutate) >= DETECTED, line


@pytest.mark.parametrize("fault", BOUNDED)
def test_paged_bounded_suite_flags_the_fault(fault: str) -> None:
    for seed in range(5):
        line = "paged fp8 B=3 next_n=2 H=16 D=128 P=16 blocks=40 columns=6 L=90 clean=1"
        assert flagged(f"{line} seed={seed}", BOUNDED[fault]) >= DETECTED, seed
