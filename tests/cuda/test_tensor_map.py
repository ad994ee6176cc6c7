"""Tensor maps: what the copy engine takes, what it is told, and descriptors for other kernels."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from cuda.bindings import driver as bindings
from torch import Tensor

import mqa
from mqa.cuda import driver, tensor_map
from mqa.cuda.tensor_map import TensorMap, encode

RIGHT: dict[str, Any] = {
    "tensor": "k",
    "data_type": "UINT8",
    "element_bytes": 1,
    "shape": (128, 100, 3),
    "strides": (128, 12800),
    "box": (64, 8, 1),
    "swizzle": 64,
}


class Encoder:
    """The driver's types, and an encoder that notes what it is asked for."""

    def __init__(self, status: Any = bindings.CUresult.CUDA_SUCCESS) -> None:
        self.status, self.asked = status, ()

    def __getattr__(self, name: str) -> Any:
        assert name.startswith("CU") or name.startswith("cuuint"), f"{name} is no type"
        return getattr(bindings, name)

    def cuTensorMapEncodeTiled(self, *asked: Any) -> tuple[Any, Any]:
        self.asked = asked
        encoded = bindings.CUtensorMap()
        encoded.opaque = [bindings.cuuint64_t(word + 1) for word in range(16)]
        return self.status, encoded


class OnCuda(Tensor):
    """A tensor that says it is on a GPU."""

    device = torch.device("cuda", 0)


@pytest.fixture
def encoder(monkeypatch: pytest.MonkeyPatch) -> Encoder:
    encoder = Encoder()
    monkeypatch.setattr(tensor_map, "_driver", lambda: encoder)
    return encoder


def aligned(*shape: int, dtype: torch.dtype = torch.uint8, offset: int = 0) -> Tensor:
    """Zeros, `offset` bytes past a multiple of 16."""
    size = torch.Size(shape).numel() * dtype.itemsize
    memory = torch.zeros(size + 16 + offset, dtype=torch.uint8)
    start = -memory.data_ptr() % 16 + offset
    return memory[start : start + size].view(dtype).view(shape).as_subclass(OnCuda)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"shape": (), "strides": (), "box": ()}, r"^k\.shape=\(\), expected 1 to 5 dimensions"),
        ({"shape": (16,) * 6, "strides": (16,) * 5, "box": (16,) * 6}, "1 to 5 dimensions"),
        (
            {"strides": (128,)},
            r"^byte strides of k=\(128,\), expected 2 of them, none for the last",
        ),
        ({"strides": (1, 128, 12800)}, "2 of them"),
        ({"box": (64, 8)}, r"^box=\(8, 64\) for k, expected 3 sizes, one for each dim"),
        ({"shape": (16,), "strides": (), "box": ()}, "expected 1 size, one for each dimension"),
        ({"shape": (128, 0, 3)}, r"^k\.shape=\(3, 0, 128\), expected sizes from 1 to 2\^32"),
        ({"shape": (128, 2**32 + 1, 3)}, "sizes from 1 to 2"),
        (
            {"strides": (120, 12800)},
            r"^k\.stride\(\)=\(12800, 120, 1\), expected multiples of 16 by",
        ),
        ({"strides": (120, 256), "element_bytes": 2}, "=.128, 60, 1., .* 8 elements"),
        ({"strides": (-128, 12800)}, "multiples of 16"),
        ({"strides": (128, 2**40)}, "multiples of 16"),
        ({"box": (64, 0, 1)}, r"^box=\(1, 0, 64\) for k, expected sizes from 1 to 256"),
        ({"box": (64, 257, 1)}, "sizes from 1 to 256"),
        ({"swizzle": 16}, "^swizzle=16 for k, expected one of 0, 32, 64, 128"),
        ({"box": (24, 8, 1)}, "a last size that makes a multiple of 16 bytes"),
        ({"box": (4, 8, 1), "element_bytes": 2}, "a multiple of 16 bytes"),
        ({"box": (80, 8, 1)}, "at most swizzle=64 bytes"),
        ({"box": (64, 8, 1), "element_bytes": 2}, "at most swizzle=64 bytes"),
    ],
)
def test_what_the_copy_engine_cannot_take_names_the_field(
    changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        TensorMap(**RIGHT | changes)


def test_the_limits_themselves_are_legal() -> None:
    TensorMap(**RIGHT)
    most = {"shape": (2**32, 2**32, 1), "strides": (0, 2**40 - 16), "box": (64, 256, 1)}
    assert TensorMap(**RIGHT | most).box_bytes == 64 * 256
    wide = {"swizzle": 0, "box": (256, 256, 2), "element_bytes": 8}
    assert TensorMap(**RIGHT | wide).box_bytes == 256 * 256 * 2 * 8


def test_a_tensor_is_described_innermost_first_in_bytes() -> None:
    tensor = torch.zeros(3, 10, 64, dtype=torch.bfloat16)[:, :7, :32]
    got = tensor_map.tensor_map(tensor, (1, 5, 32), name="x", swizzle=64)
    assert got == TensorMap("x", "BFLOAT16", 2, (32, 7, 3), (128, 1280), (32, 5, 1), swizzle=64)
    assert tensor_map.tensor_map(torch.zeros(9), (4,), name="x").strides == ()


def test_strides_of_dimensions_of_size_one_mean_nothing() -> None:
    memory = torch.zeros(999, dtype=torch.uint8)
    got = tensor_map.tensor_map(
        memory.as_strided((1, 5, 1, 40), (7, 48, 3, 1)), (1,) * 3 + (16,), name="x"
    )
    assert got.strides == (48, 48, 240)
    assert tensor_map.tensor_map(memory.as_strided((1, 1), (3, 5)), (1, 16), name="x").strides == (
        16,
    )


def test_dtypes_that_no_copy_moves_and_gaps_in_rows_are_refused() -> None:
    with pytest.raises(TypeError, match=r"^x\.dtype=torch\.complex64, expected one of uint8, int8"):
        tensor_map.tensor_map(torch.zeros(8, dtype=torch.complex64), (8,), name="x")
    with pytest.raises(ValueError, match=r"^x\.stride\(\)=\(32, 2\), expected a contiguous last"):
        tensor_map.tensor_map(torch.zeros(4, 32)[:, ::2], (1, 16), name="x")


def test_every_data_type_is_one_of_the_drivers() -> None:
    for dtype, name in tensor_map._DATA_TYPES.items():
        assert hasattr(bindings.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{name}"), dtype
    for span in tensor_map._SWIZZLES.values():
        assert hasattr(bindings.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{span}")


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
def test_the_driver_is_told_all_of_the_map(swizzle: int) -> None:
    encoder = Encoder()
    encode(encoder, TensorMap(**RIGHT | {"swizzle": swizzle, "box": (32, 8, 1)}), 4096)
    kind, rank, address, shape, strides, box, steps, interleave, pattern, _, fill = encoder.asked
    assert kind == bindings.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8
    assert (rank, address) == (3, 4096)
    assert [*map(int, shape)] == [128, 100, 3]
    assert [*map(int, strides)] == [128, 12800]
    assert [*map(int, box)] == [32, 8, 1]
    assert [*map(int, steps)] == [1, 1, 1]
    assert int(interleave) == int(fill) == 0
    assert int(pattern) == [0, 32, 64, 128].index(swizzle)


def test_an_address_off_16_bytes_and_a_refusal_of_the_driver_are_errors() -> None:
    for address in (1, 8, 4104):
        words = rf"^k\.data_ptr\(\)={address:#x}, expected a multiple of 16$"
        with pytest.raises(ValueError, match=words):
            encode(Encoder(), TensorMap(**RIGHT), address)
    refusing = Encoder(bindings.CUresult.CUDA_ERROR_INVALID_VALUE)
    with pytest.raises(RuntimeError, match=r"CUDA_ERROR_INVALID_VALUE for TensorMap\(tensor='k'"):
        encode(refusing, TensorMap(**RIGHT), 4096)


def test_a_descriptor_is_what_the_driver_encodes(encoder: Encoder) -> None:
    tensor = aligned(3, 7, 32, dtype=torch.float16)
    descriptor = mqa.cuda.make_tma_descriptor(tensor, (1, 5, 32), swizzle=64)
    assert descriptor == b"".join((word + 1).to_bytes(8, "little") for word in range(16))
    _, _, address, shape, strides, box, *_ = encoder.asked
    assert address == tensor.data_ptr()
    assert ([*map(int, shape)], [*map(int, strides)]) == ([32, 7, 3], [64, 448])
    assert [*map(int, box)] == [32, 5, 1]
    assert len(mqa.cuda.make_tma_descriptor(tensor, [1, 5, 64 // 2])) == 128


@pytest.mark.parametrize(
    ("tensor", "options", "kind", "words"),
    [
        (None, {}, TypeError, "tensor=None, expected a torch.Tensor"),
        (torch.zeros(4, 32), {}, ValueError, "tensor.device=cpu, expected a CUDA device"),
        (aligned(4, 32), {"box": 32}, TypeError, "box=32, expected a size for each dimension"),
        (aligned(4, 32), {"box": (1, 32.0)}, TypeError, r"box\[1\]=32.0, expected an int"),
        (aligned(4, 32), {"box": (32,)}, ValueError, r"^box=\(32,\) for tensor, expected 2 sizes"),
        (aligned(4, 32), {"box": (0, 32)}, ValueError, r"^box\[0\]=0, expected at least 1"),
        (
            aligned(4, 32),
            {"box": (300, 32)},
            ValueError,
            r"^box=\(300, 32\) for tensor, expected s",
        ),
        (aligned(4, 32), {"swizzle": 48}, ValueError, "^swizzle=48 for tensor, expected one of"),
        (
            aligned(4, 32, offset=8),
            {},
            ValueError,
            r"^tensor\.data_ptr\(\)=.*, expected a multiple",
        ),
        (aligned(0, 32), {}, ValueError, r"^tensor\.shape=\(0, 32\), expected sizes from 1 to 2"),
        (
            aligned(4, 40)[:, :32],
            {},
            ValueError,
            r"^tensor\.stride\(\)=\(40, 1\), expected multiples",
        ),
        (
            aligned(4, 32, dtype=torch.bool),
            {},
            TypeError,
            r"^tensor\.dtype=torch\.bool, .*bfloat16",
        ),
    ],
)
@pytest.mark.usefixtures("encoder")
def test_a_descriptor_of_something_else_is_refused(
    tensor: Any, options: dict[str, Any], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        mqa.cuda.make_tma_descriptor(tensor, **{"box": (1, 32)} | options)


def test_without_cuda_python_a_descriptor_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("cuda", "cuda.bindings"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(RuntimeError, match=r"pip install 'mqa-logits\[cuda\]'"):
        mqa.cuda.make_tma_descriptor(aligned(4, 32), (1, 32))


@pytest.mark.gpu
def test_the_driver_takes_descriptors_and_makes_those_of_launches() -> None:
    memory = torch.zeros(2, 3, 5, 7, 256, dtype=torch.uint8, device="cuda")
    box = (1, 1, 2, 3, 32)
    for rank in range(1, 6):
        tensor = memory[(0,) * (5 - rank)]
        for swizzle in (0, 32, 64, 128):
            got = mqa.cuda.make_tma_descriptor(tensor, box[-rank:], swizzle=swizzle)
            plan = tensor_map.tensor_map(tensor, box[-rank:], name="tensor", swizzle=swizzle)
            launched = driver._Encoded(plan).at(tensor.data_ptr())
            assert got == b"".join(int(word).to_bytes(8, "little") for word in launched.opaque)
    for dtype in tensor_map._DATA_TYPES:
        view = memory.view(dtype)
        assert any(mqa.cuda.make_tma_descriptor(view, (1, 1, 1, 1, 16 // dtype.itemsize)))
