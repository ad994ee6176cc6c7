import pytest

from mqa.problem import FORMATS, parse
from mqa.testing import (
    BOUNDED_FAULTS,
    EXACT_FAULTS,
    FLOAT32,
    HOPPER_FP8,
    Case,
    Fault,
    FusedTruncating,
    detects,
    flagged_fraction,
    logits,
    make_case,
    to_tensor,
)
from mqa.testing.faults import DETECTED

IDS = [fault.name for fault in BOUNDED_FAULTS]


def case_of(line: str) -> Case:
    return make_case(parse(line))


@pytest.mark.parametrize("fault", BOUNDED_FAULTS, ids=IDS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_bounded_cases_show_every_fault_on_every_seed(fmt: str, fault: Fault) -> None:
    for seed in range(20):
        case = case_of(f"dense {fmt} S=16 N=64 H=32 D=128 windows=full seed={seed}")
        assert not fault.applies(case.data) or detects(case, fault), seed


@pytest.mark.parametrize("fault", BOUNDED_FAULTS, ids=IDS)
@pytest.mark.parametrize("heads", [8, 64, 128])
@pytest.mark.parametrize("fmt", FORMATS)
def test_faults_show_for_any_number_of_heads(fmt: str, heads: int, fault: Fault) -> None:
    for seed in range(100, 103):
        case = case_of(f"dense {fmt} S=12 N=64 H={heads} D=64 windows=full seed={seed}")
        assert not fault.applies(case.data) or detects(case, fault), seed


def test_only_the_fault_of_key_scales_does_not_apply_to_bf16() -> None:
    data = case_of("dense bf16 S=12 N=64 H=8 D=64 windows=full").data
    left_out = [fault.name for fault in BOUNDED_FAULTS if not fault.applies(data)]
    assert left_out == ["a neighbour's k scale"]
    assert [fault.name for fault in EXACT_FAULTS if fault.applies(data)] == ["relu dropped"]


@pytest.mark.parametrize("out", ["bfloat16", "float16"])
@pytest.mark.parametrize("fault", BOUNDED_FAULTS[:-1], ids=IDS[:-1])
def test_faults_show_in_short_logits_too(out: str, fault: Fault) -> None:
    for seed in range(4):
        line = f"dense fp8 S=16 N=64 H=8 D=64 windows=full seed={seed} out={out}"
        assert detects(case_of(line), fault), seed


@pytest.mark.parametrize("fault", EXACT_FAULTS, ids=[fault.name for fault in EXACT_FAULTS])
@pytest.mark.parametrize("fmt", FORMATS)
def test_exact_cases_show_every_fault_on_every_seed(fmt: str, fault: Fault) -> None:
    for seed in range(20):
        case = case_of(f"dense {fmt} S=8 N=50 H=8 D=128 windows=full regime=exact seed={seed}")
        if fault.applies(case.data):
            assert detects(case, fault), seed


def test_paged_cases_show_the_faults() -> None:
    line = "paged fp8 B=4 next_n=4 H=16 D=128 P=16 blocks=20 columns=4 L=64 lens=random seed={}"
    for seed in range(4):
        case = case_of(line.format(seed))
        for fault in BOUNDED_FAULTS:
            assert detects(case, fault), (seed, fault.name)


def test_faults_show_on_a_truncating_tensor_unit_once_its_model_is_confirmed() -> None:
    confirmed = FusedTruncating(HOPPER_FP8.bits, HOPPER_FP8.k, -6, confirmed=True)
    case = case_of("dense fp8 S=4 N=40 H=32 D=128 windows=full seed=2")
    for fault in BOUNDED_FAULTS:
        assert detects(case, fault, confirmed), fault.name


def test_right_logits_are_not_flagged() -> None:
    for regime in ("exact", "bounded"):
        case = case_of(f"dense mxfp8 S=4 N=40 H=8 D=64 regime={regime}")
        right = to_tensor(logits(case, FLOAT32).values, "float32")
        assert flagged_fraction(case, right) == 0


def test_nothing_valid_counts_as_flagged_and_a_no_op_fault_does_not() -> None:
    empty = case_of("dense fp8 S=4 N=40 H=8 D=64 windows=empty")
    assert flagged_fraction(empty, to_tensor(logits(empty).values, "float32")) == 1
    case = case_of("dense fp8 S=4 N=40 H=8 D=64")
    nothing = Fault("none", lambda data: True, lambda data, accumulator: logits(case, accumulator))
    assert not detects(case, nothing)
    assert 0 < DETECTED < 1
