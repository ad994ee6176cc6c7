"""The format functions on a GPU: the CPU's bits, no wait for the device, capturable in a graph."""

from collections.abc import Callable

import pytest
import torch

from mqa import formats

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
Pair = tuple[torch.Tensor, torch.Tensor]


def power_of_two(x: torch.Tensor) -> Pair:
    return formats.quantize_fp8(x, power_of_two_scale=True)


ROUND_TRIPS: dict[str, tuple[Callable[[torch.Tensor], Pair], Callable[..., torch.Tensor]]] = {
    "fp8": (formats.quantize_fp8, formats.dequantize_fp8),
    "fp8 power of two": (power_of_two, formats.dequantize_fp8),
    "mxfp8": (formats.quantize_mxfp8, formats.dequantize_mxfp8),
    "mxfp4": (formats.quantize_mxfp4, formats.dequantize_mxfp4),
}


def any_floats(seed: int) -> torch.Tensor:
    """Blocks of arbitrary bits, subnormals and NaN included, and blocks of ordinary numbers."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31, (32, 64, 128), generator=generator)
    ordinary = torch.randn(32, 64, 128, generator=generator)
    return torch.cat((bits.to(torch.int32).view(torch.float32), ordinary))


def round_trip(name: str, x: torch.Tensor) -> list[torch.Tensor]:
    quantize, dequantize = ROUND_TRIPS[name]
    values, scale = quantize(x)
    cache = formats.pack_kv_cache(values, scale)
    unpacked = formats.unpack_kv_cache(cache, name.split()[0])
    return [values, scale, cache, *unpacked, dequantize(values, scale)]


def assert_same_bits(gpu: list[torch.Tensor], cpu: list[torch.Tensor]) -> None:
    for a, b in zip(gpu[:-1], cpu[:-1], strict=True):
        assert torch.equal(a.cpu().view(torch.uint8), b.view(torch.uint8))
    torch.testing.assert_close(gpu[-1].cpu(), cpu[-1], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_a_gpu_gives_the_bits_of_the_cpu_without_waiting(name, no_host_reads):
    x = any_floats(0)
    on_gpu = x.cuda()
    with no_host_reads():
        results = round_trip(name, on_gpu)
    assert_same_bits(results, round_trip(name, x))


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_a_captured_graph_replays_with_other_contents(name):
    x = any_floats(1).cuda()
    round_trip(name, x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = round_trip(name, x)
    x.copy_(any_floats(2))
    graph.replay()
    assert_same_bits(results, round_trip(name, any_floats(2)))
