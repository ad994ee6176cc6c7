"""Launches, without a GPU: what the driver is told, and what its errors become."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_driver import ADDRESSES, DEVICE, OK, PLAN, FakeDriver, launch

from mqa import devices
from mqa.cuda import driver

pytestmark = pytest.mark.usefixtures("fake")
INVALID_VALUE, INVALID_CONTEXT = 1, 201


def test_arguments_and_shape_are_those_of_the_plan(fake: FakeDriver) -> None:
    launch()
    (seen,) = fake.launches
    assert seen["maps"] == [0x10000, 0x20000]
    assert seen["struct"] == (0x30004, 0, 0x50002, -5, 7, True)
    assert seen["shape"] == (132, 1, 1, 640, 1, 1, 200 * 1024)
    assert seen["function"] == ("function", "library", b"symbol")
    assert seen["stream"] == 77


def test_later_launches_take_their_own_addresses_and_stream(
    fake: FakeDriver, gpu: SimpleNamespace
) -> None:
    launch()
    gpu.stream = 78
    launch((0x10000, 0x60000, 1, 2, 3))
    assert fake.launches[1]["maps"] == [0x10000, 0x60000]
    assert fake.launches[1]["struct"][:3] == (1, 2, 3)
    assert fake.launches[1]["stream"] == 78
    assert fake.encoded == [0x10000, 0x20000, 0x60000]


def test_each_thread_has_its_own_arguments(fake: FakeDriver) -> None:
    launch()
    thread = threading.Thread(target=launch)
    thread.start()
    thread.join()
    launch()
    first, other, again = (seen["at"] for seen in fake.launches)
    assert first == again != other


def test_dependent_launch_is_asked_for_where_it_is_switched_on(
    fake: FakeDriver, gpu: SimpleNamespace
) -> None:
    launch()
    devices.set_pdl(True, DEVICE)
    launch()
    gpu.stream = 78
    launch()
    plain, *dependent = fake.launches
    assert "dependent" not in plain
    for seen, stream in zip(dependent, (77, 78), strict=True):
        kind, flag = seen["dependent"]
        assert kind.name == "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION"
        assert flag == 1
        assert seen["stream"] == stream
        assert all(seen[name] == plain[name] for name in ("shape", "maps", "struct", "function"))


def test_a_failed_launch_names_the_kernel(fake: FakeDriver) -> None:
    fake.statuses = [INVALID_VALUE]
    words = r"^launch of mqa::k<64, float>: CUDA_ERROR_INVALID_VALUE, text of 1$"
    with pytest.raises(RuntimeError, match=words):
        launch()
    launch()


def test_a_thread_without_a_context_gets_one_and_tries_once_more(fake: FakeDriver) -> None:
    launch()
    fake.statuses = [INVALID_CONTEXT, OK]
    bound = len(fake.bound)
    launch()
    assert fake.bound[bound:] == ["context 0"]
    assert len(fake.launches) == 3
    fake.statuses = [INVALID_CONTEXT, INVALID_CONTEXT]
    with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_CONTEXT"):
        launch()
    assert len(fake.launches) == 5


def test_a_launch_elsewhere_makes_its_device_current_meanwhile(
    fake: FakeDriver, gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda index: seen.append(gpu.current) or 5
    )
    driver.launcher(PLAN, torch.device("cuda", 1)).launch(ADDRESSES)
    assert seen == [1]
    assert gpu.current == 0
    assert len(fake.launches) == 1


def test_debugging_waits_and_names_the_kernel_that_failed(
    gpu: SimpleNamespace, setenv: Any
) -> None:
    setenv("MQA_DEBUG", "1")
    launch()
    assert gpu.calls == ["synchronize"]
    gpu.failure = RuntimeError("illegal address")
    with pytest.raises(RuntimeError, match=r"^mqa::k<64, float> failed on the device$"):
        launch()
    gpu.capturing = True
    launch()
    assert gpu.calls == ["synchronize"] * 2


def test_only_so_many_tensor_maps_are_kept(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "_MAPS", 4)
    launcher = driver.launcher(PLAN, DEVICE)
    for q in range(10):
        launcher.launch((16 * q, 0x20000, 1, 2, 3))
        assert max(len(map._known) for map in launcher._maps) <= 4
    assert fake.encoded.count(0x20000) == 1
    launcher.launch((16 * 9, 0x20000, 1, 2, 3))
    assert len(fake.encoded) == 11
