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
