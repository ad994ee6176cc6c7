import itertools
from collections import Counter
from pathlib import Path

import pytest

from mqa.problem import FORMATS, DenseProblem, PagedProblem
from mqa.testing import make_case, read_corpus

CORPUS = Path(__file__).parents[1] / "corpus"
NAMES = ("smoke", "ci", "all", "portable")


@pytest.mark.parametrize("name", NAMES)
def test_every_line_is_a_problem_in_its_own_form_and_stands_once(name: str) -> None:
    path = CORPUS / f"{name}.txt"
    texts = [line.partition("#")[0].strip() for line in path.read_text().splitlines()]
    problems = read_corpus(path)
    assert [str(problem) for problem in problems] == [text for text in texts if text]
    assert max(Counter(map(str, problems)).values()) == 1


@pytest.mark.parametrize("name", ["smoke", "ci"])
def test_every_problem_makes_a_case(name: str) -> None:
    for problem in read_corpus(CORPUS / f"{name}.txt"):
        make_case(problem)


def test_ci_has_every_value_of_every_axis() -> None:
    problems = read_corpus(CORPUS / "ci.txt")
    dense = [p for p in problems if isinstance(p, DenseProblem)]
    paged = [p for p in problems if isinstance(p, PagedProblem)]
    for kind in (dense, paged):
        assert {p.H for p in kind} == {1, 8, 16, 32, 64, 128}
        assert {p.D for p in kind} == {32, 64, 128}
        pairs = set(itertools.product(FORMATS, ("float32", "bfloat16", "float16")))
        assert {(p.format, p.out) for p in kind} == pairs
    sizes = {(0, 5), (3, 0), (1, 1), (5, 3), (17, 260), (129, 4100)}
    assert {(p.S, p.N) for p in dense} == sizes
    assert {(p.compressed, p.clean) for p in dense} == set(itertools.product((0, 1), (0, 1)))
    assert {p.next_n for p in paged} == set(range(1, 9))
    assert {p.varlen for p in paged} == {False, True}
    assert {p.lens_rank for p in paged} == {1, 2}


def test_all_contains_ci() -> None:
    assert set(read_corpus(CORPUS / "ci.txt")) <= set(read_corpus(CORPUS / "all.txt"))
