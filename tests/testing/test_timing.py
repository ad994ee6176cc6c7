import pytest

from mqa.testing import interleaved, wall_clock


def test_ratio_is_that_of_the_pairs_and_order_alternates() -> None:
    calls: list[str] = []
    timed: list[str] = []

    def timer(work):
        work()
        timed.append(calls[-1])
        return {"a": 2.0, "b": 4.0}[calls[-1]] * len(timed)  # drifts: later runs take longer

    ratio = interleaved(lambda: calls.append("a"), lambda: calls.append("b"), rounds=4, timer=timer)
    assert timed == ["a", "b", "b", "a"] * 2
    # An untimed launch of the first party opens each pair.
    assert calls == ["a", "a", "b", "b", "b", "a"] * 2
    assert ratio.low <= ratio.median <= ratio.high
    assert ratio.rounds == 4


def test_before_runs_ahead_of_every_timed_run() -> None:
    count: list[int] = []
    interleaved(lambda: None, lambda: None, rounds=3, before=lambda: count.append(1))
    assert len(count) == 6


def test_wall_clock_tells_slow_from_fast() -> None:
    ratio = interleaved(lambda: sum(range(40000)), lambda: sum(range(400)), rounds=9)
    assert ratio.median > 5
    assert "9 pairs" in str(ratio)
    assert wall_clock(lambda: None) >= 0


def test_rounds_must_be_positive() -> None:
    with pytest.raises(ValueError, match="rounds=0"):
        interleaved(lambda: None, lambda: None, rounds=0)
