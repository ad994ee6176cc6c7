"""Number formats of indexer inputs: quantise, dequantise, and the layout of a paged KV cache.

Layouts and special values: docs/formats.md.
"""

from mqa.formats.fp8 import dequantize_fp8, quantize_fp8
from mqa.formats.kv_cache import pack_kv_cache, unpack_kv_cache
from mqa.formats.mxfp4 import dequantize_mxfp4, quantize_mxfp4
from mqa.formats.mxfp8 import dequantize_mxfp8, quantize_mxfp8

__all__ = [
    "dequantize_fp8",
    "dequantize_mxfp4",
    "dequantize_mxfp8",
    "pack_kv_cache",
    "quantize_fp8",
    "quantize_mxfp4",
    "quantize_mxfp8",
    "unpack_kv_cache",
]
