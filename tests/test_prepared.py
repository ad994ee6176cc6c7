"""Calls like an earlier one launch at once; all others take the long way.

On a CPU: here tensors claim to be on a GPU, and the backend notes addresses instead of launching.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import mqa
from mqa import devices, prepared
from mqa.problem import parse
from mqa.testing import make_case

backends = importlib.import_module("mqa.backends")
S, N, H = 3, 40, 8
LINE = f"dense fp8 S={S} N={N} H={H} D=32 seed=2"
SetEnv = Callable[[str, str], None]


class Recorder(backends.Reference):  # type: ignore[misc, name-defined]
    """The reference, with launches that compute nothing."""

    name = "recorder"

    def __init__(self) -> None:
        self.long_ways = 0
        self.launches: list[tuple[int, ...]] = []

    def dense(self, call: Any, out: Tensor) -> Any:
        self.long_ways += 1
        super().dense(call, out)
        return self.launches.append

    @property
    def counts(self) -> tuple[int, int]:
        return self.long_ways, len(self.launches)


@pytest.fixture(autouse=True)
def recorder(monkeypatch: pytest.MonkeyPatch, backend_list: Callable[..., None]) -> Recorder:
    recorder = Recorder()
    backend_list(recorder)
    monkeypatch.setattr(prepared, "_known", {})
    for name in ("_num_sms", "_pdl"):
        monkeypatch.setattr(devices, name, {})
    monkeypatch.setattr(Tensor, "is_cuda", True)
    return recorder


def arguments(**changes: Any) -> dict[str, Any]:
    return make_case(parse(LINE)).kwargs | changes


def call(**changes: Any) -> Tensor:
    return mqa.fp8_fp4_mqa_logits(**arguments(**changes))


def addresses(given: dict[str, Any], out: Tensor) -> tuple[int, ...]:
    """In the order of `mqa.prepared.Launch`."""
    names = ("weights", "cu_seq_len_k_start", "cu_seq_len_k_end", "schedule_meta")
    tensors = (given["q"], *given["kv"], *map(given.get, names), out)
    return tuple(0 if tensor is None else tensor.data_ptr() for tensor in tensors)


def test_a_call_like_an_earlier_one_only_launches(recorder: Recorder) -> None:
    first = call()
    assert recorder.counts == (1, 0)
    given = arguments()
    second = mqa.fp8_fp4_mqa_logits(**given)
    assert recorder.counts == (1, 1)
    assert recorder.launches == [addresses(given, second)]
    assert second.data_ptr() != first.data_ptr()
    facts = [(x.shape, x.stride(), x.dtype) for x in (first, second)]
    assert facts[0] == facts[1]


def test_out_and_schedule_are_those_of_the_call(recorder: Recorder) -> None:
    for _ in range(2):
        out = torch.empty(S, 100)[:, :N]
        given = arguments(out=out, schedule_meta=torch.zeros(9, 2, dtype=torch.int32))
        assert mqa.fp8_fp4_mqa_logits(**given) is out
    assert recorder.launches == [addresses(given, out)]


def test_q_as_a_pair_without_a_scale_is_like_q_alone(recorder: Recorder) -> None:
    call()
    call(q=(arguments()["q"], None))
    assert recorder.counts == (1, 1)


def windows(count: int = S) -> Tensor:
    return torch.zeros(count, dtype=torch.int32)


CHANGES: dict[str, Callable[[], dict[str, Any]]] = {
    "clean": lambda: {"clean_logits": False},
    "compressed": lambda: {"max_seqlen_k": N},
    "dtype": lambda: {"logits_dtype": torch.float16},
    "backend": lambda: {"backend": "recorder"},
    "out": lambda: {"out": torch.empty(S, N)},
    "schedule": lambda: {"schedule_meta": torch.zeros(2, 2, dtype=torch.int32)},
    "weights' type": lambda: {"weights": torch.zeros(S, H, dtype=torch.bfloat16)},
    "weights' stride": lambda: {"weights": torch.zeros(S, 2 * H)[:, :H]},
    "windows' stride": lambda: {"cu_seq_len_k_start": windows(2 * S)[::2]},
    "scales' shape": lambda: {"kv": (arguments()["kv"][0], torch.zeros(N, 1))},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_call_that_differs_takes_the_long_way_and_is_remembered_too(
    recorder: Recorder, change: Callable[[], dict[str, Any]]
) -> None:
    call()
    call(**change())
    assert recorder.counts == (2, 0)
    call(**change())
    call()
    assert recorder.counts == (2, 2)


class Special(Tensor):
    pass


def mxfp8() -> dict[str, Any]:
    return make_case(parse(LINE.replace("fp8", "mxfp8"))).kwargs


CLOSER: dict[str, Callable[[], dict[str, Any]]] = {
    "a scale of q": mxfp8,
    "q in a list": lambda: {"q": [arguments()["q"], None]},
    "kv in a list": lambda: {"kv": list(arguments()["kv"])},
    "a parameter": lambda: {"weights": torch.nn.Parameter(torch.zeros(S, H), requires_grad=False)},
    "numpy's integer": lambda: {"max_seqlen_k": np.int64(N)},
    "a subclass": lambda: {"weights": torch.zeros(S, H).as_subclass(Special)},
}


@pytest.mark.parametrize("change", CLOSER.values(), ids=CLOSER)
def test_calls_that_need_a_closer_look_always_take_the_long_way(
    recorder: Recorder, change: Callable[[], dict[str, Any]]
) -> None:
    call()
    before = len(prepared._known)
    for _ in range(2):
        call(**change())
    assert len(prepared._known) == before
    assert not recorder.launches


WRONG: dict[str, Callable[[], dict[str, Any]]] = {
    "q": lambda: {"q": 3},
    "kv": lambda: {"kv": (*arguments()["kv"], None)},
    "weights": lambda: {"weights": None},
    "requires_grad": lambda: {"weights": torch.zeros(S, H, requires_grad=True)},
    "clean_logits": lambda: {"clean_logits": 1},
    "max_seqlen_k": lambda: {"max_seqlen_k": False},
    "logits_dtype": lambda: {"logits_dtype": None},
    "backend": lambda: {"backend": ["recorder"]},
    "schedule_meta": lambda: {"schedule_meta": [[0, 0], [0, 0]]},
    "out": lambda: {"out": [0.0]},
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_an_error_after_right_calls_too(recorder: Recorder, name: str) -> None:
    call()
    call(out=torch.empty(S, N))
    with pytest.raises((TypeError, ValueError), match=name):
        call(**WRONG[name]())
    assert not recorder.launches


def test_calls_on_a_cpu_and_calls_to_debug_take_the_long_way(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, setenv: SetEnv
) -> None:
    setenv("MQA_DEBUG", "1")
    for _ in range(2):
        call()
    setenv("MQA_DEBUG", "0")
    monkeypatch.setattr(Tensor, "is_cuda", False)
    for _ in range(2):
        call()
    assert recorder.counts == (4, 0)


def test_a_call_that_is_watched_is_an_operator_and_no_launch(recorder: Recorder) -> None:
    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, given: Any, options: Any) -> Any:
            seen.append(str(function))
            return function(*given, **(options or {}))

    seen: list[str] = []
    call()
    with Watch():
        call()
    assert "mqa.mqa_logits.default" in seen
    assert not recorder.launches


def test_compiled_code_does_not_depend_on_what_is_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(Tensor, "is_cuda")  # torch.compile looks at it too
    graphs: list[Any] = []

    def count(module: Any, _inputs: Any) -> Any:
        graphs.append(module)
        return module

    given = arguments()
    torch.compiler.reset()
    compiled = torch.compile(lambda: mqa.fp8_fp4_mqa_logits(**given), fullgraph=True, backend=count)
    for number in range(3):
        compiled()
        monkeypatch.setitem(prepared._known, (number,), None)
    assert len(graphs) == 1


SETTINGS: dict[str, Callable[[SetEnv], None]] = {
    "the environment": lambda setenv: setenv("MQA_FALLBACK", "error"),
    "SMs": lambda _: mqa.set_num_sms(7, "cpu"),
    "dependent launch": lambda _: mqa.set_pdl(True, "cpu"),
}


@pytest.mark.parametrize("change", SETTINGS.values(), ids=SETTINGS)
def test_a_setting_that_changes_makes_the_next_call_take_the_long_way(
    recorder: Recorder, setenv: SetEnv, change: Callable[[SetEnv], None]
) -> None:
    call()
    change(setenv)
    call()
    assert recorder.counts == (2, 0)
    call()
    assert recorder.counts == (2, 1)


def moved(tensor: Tensor, offset: int) -> Tensor:
    """A copy at an address `offset` bytes past a multiple of 16."""
    room = torch.zeros(tensor.numel() + 16 + offset, dtype=torch.uint8)
    start = -room.data_ptr() % 16 + offset
    view = room[start : start + tensor.numel()].view(tensor.dtype).view(tensor.shape)
    return view.copy_(tensor)


def test_addresses_that_the_copy_engine_refuses_take_the_long_way(recorder: Recorder) -> None:
    given = arguments()
    call(q=moved(given["q"], 0), kv=(moved(given["kv"][0], 0), given["kv"][1]))
    call(q=moved(given["q"], 8))
    call(kv=(moved(given["kv"][0], 1), given["kv"][1]))
    assert recorder.counts == (3, 0)
    call(q=moved(given["q"], 16))
    assert recorder.counts == (3, 1)


def test_a_result_over_an_input_takes_the_long_way_and_is_refused(recorder: Recorder) -> None:
    kv, memory = arguments()["kv"][0], torch.zeros(S * N + N)
    out, scale = memory[: S * N].view(S, N), memory[S * N :]
    for _ in range(2):
        call(out=out, kv=(kv, scale))
    assert recorder.counts == (1, 1)
    for first in (S * N - 1, 0, 17):
        with pytest.raises(ValueError, match="overlaps"):
            call(out=out, kv=(kv, memory[first : first + N]))
    assert recorder.counts == (1, 1)


def test_nothing_is_remembered_of_backends_without_launches_and_of_empty_results(
    recorder: Recorder, backend_list: Callable[..., None]
) -> None:
    empty = {"max_seqlen_k": 0, "kv": (arguments()["kv"][0][:0], torch.zeros(0))}
    for _ in range(2):
        call(backend="reference")
        assert call(**empty).shape == (S, 0)
    assert recorder.counts == (0, 0)
    assert not prepared._known


def test_only_so_many_calls_are_remembered(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepared, "_MOST", 3)
    for width in range(N, N + 8):
        call(max_seqlen_k=width)
        assert len(prepared._known) <= 3
    call(max_seqlen_k=N + 7)
    assert recorder.counts == (8, 1)
