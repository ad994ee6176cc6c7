"""The one-line form: it round-trips, and a wrong line is an error that names the word."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given

from mqa import validate
from mqa.problem import DenseProblem, PagedProblem, Problem, parse
from mqa.testing import make_case, read_corpus
from mqa.testing.strategies import dense_problems, paged_problems


@given(problem=dense_problems() | paged_problems())
def test_lines_round_trip(problem: Problem) -> None:
    assert parse(str(problem)) == problem
    assert str(parse(str(problem))) == str(problem)


@pytest.mark.parametrize("name", ["smoke", "ci", "all"])
def test_corpus_lines_are_canonical(name: str, corpus: object) -> None:
    problems = read_corpus(f"{corpus}/{name}.txt")
    assert len(set(problems)) == len(problems)
    for problem in problems:
        assert parse(str(problem)) == problem


def test_the_line_of_the_design() -> None:
    line = "dense fp8 S=512 N=8192 H=32 D=128 seed=7 kv_scale_off=4 w_stride=100"
    problem = parse(line)
    assert problem == DenseProblem(
        "fp8", 512, 8192, 32, 128, seed=7, layout=(("kv_scale_off", (4,)), ("w_stride", (100,)))
    )
    assert str(problem) == line
    assert parse("dense fp8 w_stride=100 D=128 H=32 kv_scale_off=4 N=8192 S=512 seed=7") == problem


def test_defaults_are_left_out() -> None:
    line = "paged mxfp4 B=4 next_n=2 H=64 D=128 P=64 blocks=40 columns=9 L=576"
    assert str(parse(line)) == line
    assert str(parse(f"{line} clean=0 lens=full out=float32 seed=0")) == line
    assert str(parse(f"{line} clean=1 varlen=0 lens_rank=1")) == f"{line} clean=1 lens_rank=1"


FULL = "S=1 N=2 H=3 D=32"
WRONG = [
    ("", "problem=''"),
    ("dense", "problem='dense'"),
    ("sparse fp8 S=1", "problem="),
    (f"dense fp16 {FULL}", "format='fp16'"),
    ("dense fp8 S=1 N=2 H=3", "missing D"),
    ("paged fp8 B=1 next_n=1 H=1 D=32", "missing P, blocks, columns, L"),
    (f"dense fp8 {FULL} S=2", "'S=2'"),
    (f"dense fp8 {FULL} w_stride=3 w_stride=3", "'w_stride=3'"),
    (f"dense fp8 {FULL} clean", "'clean'"),
    (f"dense fp8 {FULL} P=64", "unknown field 'P'"),
    (f"dense fp8 {FULL} layout=3", "unknown field 'layout'"),
    (f"dense fp8 {FULL} table_stride=3", "unknown field 'table_stride'"),
    (f"dense fp8 {FULL} w_stride=3x", "w_stride=''"),
    (f"dense fp8 {FULL} seed=-1", "seed='-1'"),
    (f"dense fp8 {FULL} seed=²", "seed='²'"),
    (f"dense fp8 {FULL} clean=2", "clean='2'"),
    (f"dense fp8 {FULL} out=float64", "out='float64'"),
    (f"dense fp8 {FULL} windows=odd", "windows='odd'"),
    ("dense fp8 S=1 N=2 H=0 D=32", "H=0"),
    ("dense mxfp8 S=1 N=2 H=3 D=40", "D=40"),
    ("dense mxfp4 S=1 N=2 H=3 D=160", "D=160"),
    ("paged fp8 B=1 next_n=1 H=1 D=32 P=8 blocks=1 columns=1 L=8 lens_rank=3", "lens_rank='3'"),
    ("paged fp8 B=1 next_n=2 H=1 D=32 P=8 blocks=1 columns=1 L=8 varlen=1", "varlen=1"),
]


@pytest.mark.parametrize(("line", "words"), WRONG)
def test_a_wrong_line_names_the_word(line: str, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse(line)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@given(problem=dense_problems(schedules=False))
def test_a_call_knows_its_problem(problem: DenseProblem) -> None:
    """What validation reads off the tensors is what the case was made from."""
    case = make_case(problem)
    kwargs = case.kwargs
    call = validate.dense(
        kwargs["q"],
        kwargs["kv"],
        kwargs["weights"],
        kwargs["cu_seq_len_k_start"],
        kwargs["cu_seq_len_k_end"],
        problem.clean,
        problem.M,
        kwargs["logits_dtype"],
        None,
        None,
    )
    facts = ("format", "S", "N", "H", "D", "M", "weights", "out", "clean", "rows", "width")
    for fact in facts:
        assert getattr(call.problem, fact) == getattr(problem, fact)
    assert parse(str(call.problem)) == call.problem


def test_a_call_knows_its_layout() -> None:
    line = "dense fp8 S=3 N=9 H=4 D=32 kv_scale_off=4 w_off=8 w_stride=100x1"
    case = make_case(parse(line))
    kwargs = case.kwargs
    names = ("q", "kv", "weights", "cu_seq_len_k_start", "cu_seq_len_k_end")
    out = torch.empty(3, 9)
    call = validate.dense(*(kwargs[name] for name in names), True, 0, torch.float32, None, out)
    layout = dict(call.problem.layout)
    assert layout["kv_scale_off"] == (4,)
    assert layout["w_off"] == (8,)
    assert layout["w_stride"] == (100, 1)
    assert isinstance(
        parse("paged fp8 B=1 next_n=1 H=1 D=8 P=8 blocks=1 columns=1 L=8"), PagedProblem
    )
