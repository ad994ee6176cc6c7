"""The public functions as torch operators `torch.ops.mqa.*`, with fake implementations.

Registered with `Library.define` and `impl`: the wrappers that `custom_op` adds cost more than a
small launch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mqa import run, validate
from mqa.backends import check_name

_LIBRARY = torch.library.Library("mqa", "DEF")
_DENSE = (
    "(Tensor q, Tensor? q_scale, Tensor k, Tensor? kv_scale, Tensor weights, Tensor start,"
    " Tensor end, bool clean_logits, SymInt max_seqlen_k, ScalarType logits_dtype,"
    " Tensor? schedule_meta, str? backend"
)
_PAGED = (
    "(Tensor q, Tensor? q_scale, Tensor kv_cache, Tensor weights, Tensor context_lens,"
    " Tensor block_table, Tensor? schedule_meta, SymInt max_context_len, bool clean_logits,"
    " ScalarType logits_dtype, Tensor? indices, str? backend"
)
_DENSE_METADATA = "Tensor start, Tensor end, SymInt num_kv_tokens, SymInt num_heads, SymInt num_sms"
_PAGED_METADATA = "Tensor context_lens, SymInt block_kv, SymInt num_sms, Tensor? indices"
_SCHEMAS = (
    f"mqa_logits{_DENSE}) -> Tensor",
    f"mqa_logits_out{_DENSE}, Tensor(a!) out) -> ()",
    f"paged_mqa_logits{_PAGED}) -> Tensor",
    f"paged_mqa_logits_out{_PAGED}, Tensor(a!) out) -> ()",
    f"mqa_logits_metadata({_DENSE_METADATA}) -> Tensor",
    f"paged_mqa_logits_metadata({_PAGED_METADATA}) -> Tensor",
)


def _dense(
    q: Tensor, q_scale: Tensor | None, k: Tensor, kv_scale: Tensor | None, *rest: Any
) -> Tensor:
    arguments: list[Any] = [(q, q_scale), (k, kv_scale), *rest, None]
    return run.dense(*arguments)


def _dense_out(
    q: Tensor, q_scale: Tensor | None, k: Tensor, kv_scale: Tensor | None, *rest: Any
) -> None:
    arguments: list[Any] = [(q, q_scale), (k, kv_scale), *rest]
    run.dense(*arguments)


def _paged(q: Tensor, q_scale: Tensor | None, *rest: Any) -> Tensor:
    arguments: list[Any] = [(q, q_scale), *rest, None]
    return run.paged(*arguments)


def _paged_out(q: Tensor, q_scale: Tensor | None, *rest: Any) -> None:
    arguments: list[Any] = [(q, q_scale), *rest]
    run.paged(*arguments)


def _dense_metadata(*rest: Any) -> Tensor:
    arguments: list[Any] = [*rest, None]
    return run.dense_metadata(*arguments)


def _paged_metadata(*rest: Any) -> Tensor:
    arguments: list[Any] = [*rest, None]
    return run.paged_metadata(*arguments)


def _fake_dense(
    q: Tensor, q_scale: Tensor | None, k: Tensor, kv_scale: Tensor | None, *rest: Any
) -> Tensor:
    return _checked_dense(q, q_scale, k, kv_scale, *rest, None)


def _fake_dense_out(*inputs: Any) -> None:
    _checked_dense(*inputs)


def _checked_dense(
    q: Tensor, q_scale: Tensor | None, k: Tensor, kv_scale: Tensor | None, *rest: Any
) -> Tensor:
    *others, backend, out = rest
    arguments: list[Any] = [(q, q_scale), (k, kv_scale), *others, out]
    tensors = validate.check_dense(*arguments)
    check_name(backend)
    return run.new_result(q, q.shape[0], tensors.width, others[-2])


def _fake_paged(*inputs: Any) -> Tensor:
    return _checked_paged(*inputs, None)


def _fake_paged_out(*inputs: Any) -> None:
    _checked_paged(*inputs)


def _checked_paged(q: Tensor, q_scale: Tensor | None, *rest: Any) -> Tensor:
    *others, backend, out = rest
    arguments: list[Any] = [(q, q_scale), *others, out]
    validate.check_paged(*arguments)
    check_name(backend)
    max_context_len, dtype = others[5], others[7]
    return run.new_result(q, q.shape[0] * q.shape[1], max_context_len, dtype)


def _fake_dense_metadata(start: Tensor, *rest: Any) -> Tensor:
    *others, num_sms = rest
    validate.dense_metadata(start, *others)
    return start.new_empty((num_sms + 1, 2))


def _fake_paged_metadata(context_lens: Tensor, *rest: Any) -> Tensor:
    validate.paged_metadata(context_lens, *rest)
    return context_lens.new_empty((rest[1] + 1, 2))


def register() -> None:
    kernels: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
        "mqa_logits": (_dense, _fake_dense),
        "mqa_logits_out": (_dense_out, _fake_dense_out),
        "paged_mqa_logits": (_paged, _fake_paged),
        "paged_mqa_logits_out": (_paged_out, _fake_paged_out),
        "mqa_logits_metadata": (_dense_metadata, _fake_dense_metadata),
        "paged_mqa_logits_metadata": (_paged_metadata, _fake_paged_metadata),
    }
    for schema in _SCHEMAS:
        _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for name, (kernel, fake) in kernels.items():
        _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"mqa::{name}", fake, lib=_LIBRARY)
