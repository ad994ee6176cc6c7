"""Layout of the paged cache."""

import pytest
import torch

from mqa.formats import pack_kv_cache, unpack_kv_cache

FORMATS = {
    "fp8": (torch.float8_e4m3fn, torch.float32),
    "mxfp8": (torch.float8_e4m3fn, torch.int32),
    "mxfp4": (torch.uint8, torch.int32),
}
each_format = pytest.mark.parametrize("fmt", FORMATS)


def any_bits(*shape: int) -> torch.Tensor:
    """Random bytes: NaN, infinities and subnormals are among what they mean."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.int32).to(torch.uint8)


def tokens(fmt: str, blocks: int, page: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    values_dtype, scale_dtype = FORMATS[fmt]
    scale = any_bits(blocks, page, 4).view(scale_dtype).squeeze(-1)
    return any_bits(blocks, page, width).view(values_dtype), scale


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    as_bytes = (t.contiguous().view(torch.uint8) for t in (a, b))
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*as_bytes)


def test_a_page_has_all_values_then_all_scales():
    values = torch.full((1, 64, 128), 1.0).to(torch.float8_e4m3fn)
    cache = pack_kv_cache(values, torch.arange(1, 65).float().unsqueeze(0))
    assert cache.shape == (1, 64, 1, 132)
    page = cache.flatten()
    assert (page[:8192] == 0x38).all()
    assert page[8192:8200].tolist() == [0, 0, 128, 63, 0, 0, 0, 64]
    assert page[8192:].view(torch.float32).tolist() == list(range(1, 65))


@each_format
@pytest.mark.parametrize("page", [1, 2, 3, 64])
def test_unpacking_returns_every_bit_that_was_packed(fmt, page):
    values, scale = tokens(fmt, 5, page, 64)
    cache = pack_kv_cache(values, scale)
    assert cache.shape == (5, page, 1, 68)
    assert cache.dtype == torch.uint8
    assert cache.is_contiguous()
    for shape in ((5, page, 1, 68), (5, page, 68)):
        got_values, got_scale = unpack_kv_cache(cache.view(shape), fmt)
        assert same_bits(got_values, values)
        assert same_bits(got_scale, scale)


@pytest.mark.parametrize("container", [torch.int8, torch.float4_e2m1fn_x2])
def test_every_fp4_container_packs_to_the_same_bytes(container):
    values, scale = tokens("mxfp4", 2, 4, 64)
    assert torch.equal(pack_kv_cache(values.view(container), scale), pack_kv_cache(values, scale))


@each_format
def test_values_and_scales_of_any_strides_pack_to_the_same_bytes(fmt):
    values, scale = tokens(fmt, 4, 6, 32)
    strided = values.view(torch.uint8).permute(1, 2, 0).contiguous().permute(2, 0, 1)
    cache = pack_kv_cache(strided.view(values.dtype), scale.t().contiguous().t())
    assert torch.equal(cache, pack_kv_cache(values, scale))


@each_format
@pytest.mark.parametrize("offset", [0, 1, 16])
def test_blocks_may_lie_apart_at_any_address(fmt, offset):
    values, scale = tokens(fmt, 3, 4, 32)
    size = 4 * 36
    pool = any_bits(offset + 3 * 200)
    cache = pool[offset:].as_strided((3, 4, 1, 36), (200, 36, 36, 1))
    cache.copy_(pack_kv_cache(values, scale))
    got_values, got_scale = unpack_kv_cache(cache, fmt)
    assert same_bits(got_values, values)
    assert same_bits(got_scale, scale)
    assert size < cache.stride(0)


@pytest.mark.parametrize("blocks", [1, 2])
def test_unpacking_copies(blocks):
    values, scale = tokens("fp8", blocks, 1, 8)
    cache = pack_kv_cache(values, scale)
    got_values, got_scale = unpack_kv_cache(cache, "fp8")
    cache.zero_()
    assert same_bits(got_values, values)
    assert same_bits(got_scale, scale)


@each_format
def test_no_blocks_give_no_blocks(fmt):
    values, scale = tokens(fmt, 0, 4, 32)
    cache = pack_kv_cache(values, scale)
    assert cache.shape == (0, 4, 1, 36)
    got_values, got_scale = unpack_kv_cache(cache, fmt)
    assert got_values.shape == (0, 4, 32)
    assert got_scale.shape == (0, 4)


@pytest.mark.parametrize("page", [1, 3, 64])
def test_a_bf16_cache_is_its_values(page):
    values = any_bits(5, page, 128).view(torch.bfloat16)
    cache = pack_kv_cache(values)
    assert cache.shape == (5, page, 1, 64)
    assert cache.is_contiguous()
    assert same_bits(cache.squeeze(2), values)
    assert same_bits(pack_kv_cache(values.transpose(0, 1).contiguous().transpose(0, 1)), cache)
    apart = torch.empty(5, page * 64 + 8, dtype=torch.bfloat16)
    apart = apart.as_strided(cache.shape, (apart.stride(0), 64, 64, 1)).copy_(cache)
    for shaped in (cache, cache.squeeze(2), apart):
        got, scale = unpack_kv_cache(shaped, "bf16")
        assert scale is None
        assert same_bits(got, values)
        assert got.is_contiguous()
        assert got.data_ptr() != shaped.data_ptr()


FP8_VALUES, FP8_SCALE = tokens("fp8", 2, 4, 48)
FP4_VALUES, FP4_SCALE = tokens("mxfp4", 2, 4, 16)


@pytest.mark.parametrize(
    ("values", "scale", "error", "message"),
    [
        (None, FP8_SCALE, TypeError, "values is a NoneType"),
        (FP8_VALUES.float(), FP8_SCALE, TypeError, r"values\.dtype=torch\.float32"),
        (FP8_VALUES, FP8_SCALE.double(), TypeError, r"scale\.dtype=torch\.float64"),
        (FP8_VALUES, None, TypeError, "scale is a NoneType, expected a torch.Tensor"),
        (FP8_VALUES.bfloat16(), FP8_SCALE, TypeError, "scale is a Tensor, expected None for bf"),
        (FP8_VALUES[0].bfloat16(), None, ValueError, r"values\.shape=\(4, 48\), expected \[num_bl"),
        (FP4_VALUES, FP8_SCALE, TypeError, r"scale\.dtype=torch\.float32, expected torch\.int32"),
        (FP8_VALUES[0], FP8_SCALE[0], ValueError, r"values\.shape=\(4, 48\), expected \[num_bl"),
        (FP8_VALUES[:, :0], FP8_SCALE[:, :0], ValueError, r"values\.shape=\(2, 0, 48\)"),
        (FP8_VALUES, FP8_SCALE[:1], ValueError, r"scale\.shape=\(1, 4\), expected \(2, 4\)"),
        (FP8_VALUES, FP8_SCALE.int(), ValueError, r"values\.shape\[-1\]=48"),
        (FP4_VALUES[..., :8], FP4_SCALE, ValueError, r"values\.shape\[-1\]=8 torch\.uint8"),
    ],
)
def test_packing_rejects(values, scale, error, message):
    with pytest.raises(error, match=f"pack_kv_cache: {message}"):
        pack_kv_cache(values, scale)


CACHE = torch.zeros(2, 4, 1, 36, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("cache", "fmt", "error", "message"),
    [
        (CACHE.int(), "fp8", TypeError, r"cache\.dtype=torch\.int32"),
        (CACHE, "fp4", ValueError, "format='fp4', expected fp8, mxfp8, mxfp4, bf16"),
        (CACHE, "bf16", TypeError, r"cache\.dtype=torch\.uint8, expected torch\.bfloat16"),
        (CACHE.bfloat16(), "mxfp8", TypeError, r"cache\.dtype=torch\.bfloat16, expected torch\.u"),
        (
            CACHE[:, :0].bfloat16(),
            "bf16",
            ValueError,
            r"cache\.shape=\(2, 0, 1, 36\), expected \[n",
        ),
        (
            CACHE[..., :20].bfloat16()[..., :9],
            "bf16",
            ValueError,
            r"cache\.stride\(\)=\(80, 20, 20",
        ),
        (CACHE[0, 0], "fp8", ValueError, r"cache\.shape=\(1, 36\), expected \[num_blocks, P, 1"),
        (CACHE.expand(2, 4, 2, 36), "fp8", ValueError, r"cache\.shape=\(2, 4, 2, 36\)"),
        (CACHE[..., :4].clone(), "fp8", ValueError, r"cache\.shape=\(2, 4, 1, 4\)"),
        (CACHE[..., :20].clone(), "mxfp8", ValueError, r"cache\.shape\[-1\]=20 for mxfp8"),
        (CACHE[..., :12].clone(), "mxfp4", ValueError, r"cache\.shape\[-1\]=12 for mxfp4"),
        (CACHE[..., :20], "fp8", ValueError, r"cache\.stride\(\)=\(144, 36, 36, 1\)"),
        (CACHE[:, ::2], "fp8", ValueError, r"cache\.stride\(\)=\(144, 72, 36, 1\), expected cont"),
    ],
)
def test_unpacking_rejects(cache, fmt, error, message):
    with pytest.raises(error, match=f"unpack_kv_cache: {message}"):
        unpack_kv_cache(cache, fmt)
