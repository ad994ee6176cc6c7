"""Scores of sparse-attention indexers from FP8, MXFP8, MXFP4 and BF16 inputs, dense and paged.

    logits[s, n] = sum_h weights[s, h] * relu(dot(q[s, h], k[n]))

`docs/semantics.md` says what that means to the bit, `mqa.reference` defines it in PyTorch.
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from mqa import cuda, formats
from mqa.backends import BackendStatus, Support, backends
from mqa.devices import get_num_sms, get_pdl, set_num_sms, set_pdl
from mqa.errors import (
    BackendUnavailableError,
    CacheWarning,
    CompileError,
    CompilerUnavailableError,
    FallbackWarning,
)
from mqa.ops import (
    fp8_fp4_mqa_logits,
    fp8_fp4_paged_mqa_logits,
    fp8_mqa_logits,
    fp8_paged_mqa_logits,
    get_mqa_logits_metadata,
    get_paged_mqa_logits_metadata,
    supports,
    warmup,
)

__version__ = "0.1.0"

__all__ = [
    "BackendStatus",
    "BackendUnavailableError",
    "CacheWarning",
    "CompileError",
    "CompilerUnavailableError",
    "FallbackWarning",
    "Support",
    "backends",
    "cuda",
    "formats",
    "fp8_fp4_mqa_logits",
    "fp8_fp4_paged_mqa_logits",
    "fp8_mqa_logits",
    "fp8_paged_mqa_logits",
    "get_mqa_logits_metadata",
    "get_num_sms",
    "get_paged_mqa_logits_metadata",
    "get_pdl",
    "set_num_sms",
    "set_pdl",
    "supports",
    "warmup",
]


if TYPE_CHECKING:
    from mqa import testing as testing  # An attribute, but one that type checkers know by name.
else:

    def __getattr__(name: str) -> ModuleType:
        if name == "testing":  # not needed to compute, so not imported until asked for
            return importlib.import_module("mqa.testing")
        raise AttributeError(f"module 'mqa' has no attribute {name!r}")
