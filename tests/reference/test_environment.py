"""The reference's own floating-point environment: taken, given back, shared between threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from mqa.reference import environment

MATMUL = torch.backends.mkldnn.matmul


@pytest.fixture
def _reduced_precision() -> Iterator[None]:
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.mark.usefixtures("_reduced_precision")
def test_products_are_ieee_during_a_call_and_as_before_after_it() -> None:
    seen = []
    environment.isolated(lambda _: seen.append(MATMUL.fp32_precision))(torch.ones(1))
    assert seen == ["ieee"]
    assert MATMUL.fp32_precision == "bf16"


@pytest.mark.usefixtures("_reduced_precision")
def test_the_last_of_several_calls_gives_the_switch_back() -> None:
    inside, leave = threading.Event(), threading.Event()
    seen: list[str] = []

    def slow(_: Tensor) -> None:
        inside.set()
        leave.wait(10)
        seen.append(MATMUL.fp32_precision)

    thread = threading.Thread(target=environment.isolated(slow), args=(torch.ones(1),))
    thread.start()
    inside.wait(10)
    environment.isolated(lambda _: seen.append(MATMUL.fp32_precision))(torch.ones(1))
    assert MATMUL.fp32_precision == "ieee"  # the slow one is still at work
    leave.set()
    thread.join()
    assert seen == ["ieee", "ieee"]
    assert MATMUL.fp32_precision == "bf16"


@pytest.mark.usefixtures("_reduced_precision")
def test_the_switch_is_given_back_after_an_error() -> None:
    def fail(_: Tensor) -> None:
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        environment.isolated(fail)(torch.ones(1))
    assert MATMUL.fp32_precision == "bf16"


LEVELS = {
    "torch": torch.backends,
    "mkldnn": torch.backends.mkldnn,
    "matmul": torch.backends.mkldnn.matmul,
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("above", ["none", "ieee"])
def test_a_precision_is_given_back_at_the_level_where_it_was_set(level: str, above: str) -> None:
    switches = list(LEVELS.values())
    for switch in switches:
        switch.fp32_precision = "none"
    torch.backends.fp32_precision = above
    try:
        LEVELS[level].fp32_precision = "tf32"
        before = [switch.fp32_precision for switch in switches]
        seen = []
        environment.isolated(lambda _: seen.append(MATMUL.fp32_precision))(torch.ones(1))
        assert seen == ["ieee"]
        assert [switch.fp32_precision for switch in switches] == before
        LEVELS[level].fp32_precision = "none"  # what was inherited follows
        assert MATMUL.fp32_precision == torch.backends.fp32_precision
    finally:
        for switch in switches:
            switch.fp32_precision = "none"


@pytest.mark.usefixtures("_reduced_precision")
def test_what_is_set_during_a_call_stays() -> None:
    environment.isolated(lambda _: setattr(MATMUL, "fp32_precision", "tf32"))(torch.ones(1))
    assert MATMUL.fp32_precision == "tf32"


def test_errors_come_back_from_the_clean_thread() -> None:
    def fail(_: Tensor) -> None:
        raise RuntimeError(threading.current_thread().name)

    torch.set_flush_denormal(True)
    try:
        with pytest.raises(RuntimeError, match="mqa-reference"):
            environment.isolated(fail)(torch.ones(1))
    finally:
        torch.set_flush_denormal(False)


def test_calls_stay_on_their_thread_where_nothing_flushes() -> None:
    seen = []
    environment.isolated(lambda _: seen.append(threading.current_thread()))(torch.ones(1))
    assert seen == [threading.current_thread()]
