from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, find, given, settings

from mqa.problem import DenseProblem, PagedProblem, parse
from mqa.testing import EXACT, FLOAT32, assert_logits, logits, make_case, to_tensor
from mqa.testing.strategies import dense_problems, paged_problems

FEW = settings(
    max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
MANY = settings(FEW, max_examples=3000, phases=[Phase.generate])

DENSE_KINDS: dict[str, Callable[[DenseProblem], bool]] = {
    "no rows": lambda p: p.S == 0 and p.N > 0,
    "no keys": lambda p: p.N == 0 and p.S > 0,
    "longer than N": lambda p: p.M > p.N > 0,
    "compressed packed mxfp4": lambda p: p.compressed and p.windows == "packed" and p.D == 96,
    "empty windows": lambda p: p.windows == "empty" and p.out == "float16",
    "random windows": lambda p: p.windows == "random" and not p.clean,
    "bfloat16 weights with row stride": lambda p: (
        p.weights == "bfloat16" and any(n == "w_stride" for n, _ in p.layout)
    ),
    "k scale offset": lambda p: any(n == "kv_scale_off" for n, _ in p.layout),
    "window stride": lambda p: any(n == "start_stride" for n, _ in p.layout),
    "out": lambda p: any(n == "out_off" for n, _ in p.layout),
    "q": lambda p: any(n == "q_stride" for n, _ in p.layout),
    "schedule": lambda p: p.sms == 132,
    "exact": lambda p: p.regime == "exact" and p.H == 128,
}
PAGED_KINDS: dict[str, Callable[[PagedProblem], bool]] = {
    **{f"next_n {n}": (lambda p, n=n: p.next_n == n and p.B > 0) for n in range(1, 9)},
    "page of one": lambda p: p.P == 1 and p.columns > 3,
    "odd page": lambda p: p.P == 31 and p.columns > 1,
    "varlen": lambda p: p.varlen and p.B > 8,
    "rank 1": lambda p: p.lens_rank == 1 and p.next_n > 2,
    "short table": lambda p: p.columns * p.P < p.L,
    "wide table": lambda p: p.columns * p.P > p.L > 0,
    "shared pages": lambda p: 0 < p.blocks < p.columns,
    "no pages": lambda p: p.blocks == 0 and p.B > 0,
    "cache stride": lambda p: any(n == "cache_stride" for n, _ in p.layout),
    "table stride": lambda p: any(n == "table_stride" for n, _ in p.layout),
    "lens stride": lambda p: any(n == "lens_stride" for n, _ in p.layout),
}


@pytest.mark.parametrize("kind", DENSE_KINDS)
def test_dense_problems_reach(kind: str) -> None:
    assert find(dense_problems(), DENSE_KINDS[kind], settings=MANY)


@pytest.mark.parametrize("kind", PAGED_KINDS)
def test_paged_problems_reach(kind: str) -> None:
    assert find(paged_problems(), PAGED_KINDS[kind], settings=MANY)


def rounded_oracle_is_right(problem: DenseProblem | PagedProblem) -> None:
    assert parse(str(problem)) == problem
    case = make_case(problem)
    accumulator = EXACT if problem.regime == "exact" else FLOAT32
    assert_logits(case, to_tensor(logits(case, accumulator).values, problem.out))


@FEW
@given(dense_problems())
def test_dense_problems_become_cases(problem: DenseProblem) -> None:
    rounded_oracle_is_right(problem)


@FEW
@given(paged_problems())
def test_paged_problems_become_cases(problem: PagedProblem) -> None:
    rounded_oracle_is_right(problem)


@FEW
@given(
    dense_problems(
        formats=("mxfp4",),
        regimes=("exact",),
        max_rows=3,
        layouts=False,
        schedules=False,
        accepted_by=lambda problem: problem.N % 2 == 0,
    )
)
def test_options_narrow_the_draw(problem: DenseProblem) -> None:
    assert problem.format == "mxfp4"
    assert problem.regime == "exact"
    assert problem.S <= 3
    assert problem.N % 2 == 0
    assert problem.layout == ()
    assert problem.sms == 0
