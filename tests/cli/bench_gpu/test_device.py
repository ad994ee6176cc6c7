"""The GPU itself, with a stand-in for torch.cuda and, where there is one, in earnest."""

import contextlib
import types

import pytest
import torch

import mqa
from mqa.cli.gpu import ceilings, tables
from mqa.cli.gpu.device import Gpu
from mqa.cli.gpu.measure import measure
from mqa.cli.gpu.rows import MQA, PEER
from mqa.cli.gpu.windows import batch, causal


def test_ceilings_are_rates(stand, monkeypatch):
    monkeypatch.setattr(ceilings, "_FILL_BYTES", 64)
    monkeypatch.setattr(ceilings, "_SUM_BYTES", 64)
    monkeypatch.setattr(ceilings, "_product", lambda where: lambda: None)
    device = stand.Cpu()
    monkeypatch.setattr(stand.Cpu, "seconds", lambda self, work: work() is None or 2.0)
    rates, missing = ceilings.measure_ceilings(device)
    assert missing == {}
    assert rates["fill"] == ceilings.CEILINGS["fill"].amount / 2.0
    assert set(rates) == set(ceilings.CEILINGS)


def test_a_ceiling_that_torch_cannot_reach_is_left_out(stand, monkeypatch):
    def unsupported(where):
        raise RuntimeError("no such product on this GPU")

    monkeypatch.setattr(ceilings, "_FILL_BYTES", 64)
    monkeypatch.setattr(ceilings, "_SUM_BYTES", 64)
    monkeypatch.setattr(ceilings, "_product", unsupported)
    rates, missing = ceilings.measure_ceilings(stand.Cpu())
    assert set(rates) == {"fill", "read"}
    assert missing == {"fp8": "RuntimeError: no such product on this GPU"}
    row = {"ours": {"tflops": 100.0}}
    assert tables._of_product(row, {"ceilings": rates}) == "–"
    assert tables._of_product(row, {"ceilings": {"fp8": 2e14}}) == "50%"


class _FakeCuda:
    """torch.cuda of a GPU at 2 GHz: events read a counter of clocks that only spins advance."""

    def __init__(self):
        self.clocks, self.calls = 0, []
        fake = self

        class Event:
            def __init__(self, **options):
                pass

            def record(self):
                self.at = fake.clocks

            def synchronize(self):
                fake.calls.append("waited")

            def elapsed_time(self, other):
                return (other.at - self.at) / 2e9 * 1e3

        class Stream:
            def __init__(self, where):
                pass

            def wait_stream(self, other):
                pass

            def wait_event(self, event):
                assert event.at is not None

        class CUDAGraph:
            def capture_begin(self, pool):
                fake.calls.append(f"begin {pool}")

            def capture_end(self):
                fake.calls.append("end")

            def replay(self):
                fake.calls.append("replay")

        self.Event, self.Stream, self.CUDAGraph = Event, Stream, CUDAGraph

    def _sleep(self, clocks):
        self.clocks += clocks

    def get_device_properties(self, where):
        return types.SimpleNamespace(multi_processor_count=132, major=9, L2_cache_size=60 << 20)

    def graph_pool_handle(self):
        return "pool"

    def current_stream(self):
        return self.Stream(None)

    def stream(self, stream):
        return contextlib.nullcontext()

    def synchronize(self, where):
        self.calls.append("waited")

    def empty_cache(self):
        self.calls.append("emptied")


@pytest.fixture
def fake_cuda(monkeypatch):
    fake = _FakeCuda()
    monkeypatch.setattr(torch, "cuda", fake)
    return fake


def test_gpu_times_what_lies_between_two_events(fake_cuda):
    gpu = Gpu(torch.device("cuda", 0))
    assert (gpu.sms, gpu.l2_bytes) == (132, 60 << 20)
    gpu.keep_busy()
    assert gpu.seconds(lambda: fake_cuda._sleep(4000)) == pytest.approx(2e-6)
    gpu.free()
    assert fake_cuda.calls == ["waited", "waited", "emptied"]


def test_gpu_reads_its_clock_beside_the_load(fake_cuda):
    runs = []
    hz = Gpu(torch.device("cuda", 0)).clock_hz(lambda: runs.append(1), 100e-6)
    assert hz == pytest.approx(2e9, rel=1e-4)
    assert len(runs) == 5 * 3


def test_gpu_ends_a_capture_that_fails(fake_cuda):
    gpu = Gpu(torch.device("cuda", 0))
    replay, result = gpu.capture(lambda: 5)
    replay()
    assert result == 5
    with pytest.raises(ZeroDivisionError):
        gpu.capture(lambda: 1 / 0)
    assert fake_cuda.calls == ["begin pool", "end", "replay", "begin pool", "end"]


@pytest.mark.gpu
def test_gpu_replays_times_and_reads_its_clock():
    gpu = Gpu(torch.device("cuda", torch.cuda.current_device()))
    numbers = torch.zeros(1 << 24, device=gpu.where)
    replay, result = gpu.capture(lambda: numbers.add_(1))
    replay()
    gpu.keep_busy()
    seconds = gpu.seconds(replay)
    assert 1e-6 < seconds < 1e-2
    assert 0.2e9 < gpu.clock_hz(replay, seconds) < 4e9
    gpu.synchronize()
    assert float(result[0]) >= 2
    gpu.free()


@pytest.mark.gpu
@pytest.mark.parametrize("windows", [causal(16, 512), batch(4, 2, 700)], ids=["dense", "paged"])
def test_gpu_row_is_measured(stand, monkeypatch, windows):
    gpu = Gpu(torch.device("cuda", torch.cuda.current_device()))
    sides = [stand.party(windows, who, 64, 128, schedule="fresh") for who in (PEER, MQA)]
    row = stand.comparison("main", *sides, after_kernel=True)
    if mqa.supports(**sides[1].variant(), device=gpu.where).backend == "reference":
        for module in ("measure", "graphs"):
            name = f"mqa.cli.gpu.{module}.backend_of"
            monkeypatch.setattr(name, lambda party, where: "reference")
    entry = measure(row, gpu, stand.OtherMqa(), 3, stand.CEILINGS)
    assert entry["ratio"]["rounds"] == 3
    assert entry["errors"]["each other"] == 0
