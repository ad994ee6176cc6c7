"""Calls like an earlier one: what follows from a call's form is worked out once.

Whether a call is legal, who computes it and with which launch follow from shapes, strides, dtypes,
devices, options and settings; addresses matter only by alignment and overlap, contents not at all.
So the first call of a form takes the long way (`mqa.run`) and leaves a launch here, and later ones
look at their addresses and launch. Only dense FP8 calls on CUDA tensors come here.

That tensors have the form of earlier ones is asked of torch's own guards, those of torch.compile:
in Python the question costs as much as all the rest. Where they don't work, every call takes the
long way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from mqa import config, devices, rules

Launch: TypeAlias = Callable[[tuple[int, ...]], None]
"""Runs a prepared dense call on the tensors at these addresses: q, k, k scale, weights, start, end,
schedule (0 without one), out. Those of q and k are multiples of 16."""

_ALIGNED = 16
_MOST = 2048
"""Keys kept."""
_MOST_FORMS = 8
"""Forms kept of each key, the last ones: few calls differ in strides alone."""

_address = Tensor.data_ptr


@dataclass(frozen=True, slots=True)
class Prepared:
    version: tuple[int, int]
    """The settings that it was made under."""
    guards: Any
    """`guards.check(*tensors)`: they have shapes, strides, dtypes, devices like the first ones, and
    are plain tensors that autograd does not follow."""
    launch: Launch
    reach: tuple[int, ...]
    """Bytes from the first to past the last of each input, in the order of addresses."""
    out_reach: int
    result: tuple[int, int, int]
    """Rows, row stride and width of a fresh result."""


_known: dict[tuple[Any, ...], tuple[Prepared, ...]] = {}


def dense(
    q: Any,
    kv: Any,
    weights: Any,
    start: Any,
    end: Any,
    clean: Any,
    max_seqlen_k: Any,
    dtype: Any,
    schedule: Any,
    backend: Any,
    out: Any,
) -> Tensor | None:
    """Run the call if one of its form is known and its addresses allow it; else None."""
    # traced() first: compiled code must not depend on what is known.
    if traced() or config.debug() or not _known:
        return None
    inputs = _inputs(q, kv, weights, start, end, schedule)
    key = _key(inputs, clean, max_seqlen_k, dtype, schedule, backend, out)
    if key is None:
        return None
    tensors = inputs if out is None else (*inputs, out)
    version = settings()
    for known in _known.get(key, ()):
        if known.version == version and known.guards.check(*tensors):
            return _launch(known, inputs, dtype, schedule, out)
    return None


def _launch(
    known: Prepared, inputs: tuple[Tensor, ...], dtype: Any, schedule: Any, out: Any
) -> Tensor | None:
    addresses = tuple(map(_address, inputs))
    if (addresses[0] | addresses[1]) % _ALIGNED:
        return None
    if out is None:
        rows, stride, width = known.result
        out = inputs[0].new_empty((rows, stride), dtype=dtype)[:, :width]
    elif _overlap(out.data_ptr(), known.out_reach, addresses, known.reach):
        return None
    if schedule is None:
        addresses += (0,)
    known.launch((*addresses, out.data_ptr()))
    return out  # type: ignore[no-any-return]


def keep(
    q: Any,
    kv: Any,
    weights: Tensor,
    start: Tensor,
    end: Tensor,
    clean: bool,  # noqa: FBT001
    max_seqlen_k: int,
    dtype: torch.dtype,
    schedule: Tensor | None,
    backend: str | None,
    given: Tensor | None,
    launch: Launch,
    out: Tensor,
    version: tuple[int, int],
) -> None:
    """Remember how a call was launched. `given` is its argument `out`, `out` its result, `version`
    what `settings()` said before the launch was made."""
    inputs = _inputs(q, kv, weights, start, end, schedule)
    key = _key(inputs, clean, max_seqlen_k, dtype, schedule, backend, given)
    plain = all(type(tensor) is Tensor and tensor.is_cuda for tensor in (*inputs, out))
    if (
        key is None
        or not plain
        or not _guards_work()
        or any(tensor.requires_grad for tensor in (*inputs, out))
    ):
        return
    if len(_known) >= _MOST:
        _known.clear()
    rows, width = out.shape
    result = (rows, out.stride(0), width)
    guards = _guards(inputs if given is None else (*inputs, given))
    reach = tuple(map(_reach, inputs))
    prepared = Prepared(version, guards, launch, reach, _reach(out), result)
    _known[key] = (prepared, *_known.get(key, ())[: _MOST_FORMS - 1])


def _guards(tensors: tuple[Tensor, ...]) -> Any:
    from torch._C._dynamo.guards import TensorGuards

    sizes: Any = [list(tensor.shape) for tensor in tensors]
    strides: Any = [list(tensor.stride()) for tensor in tensors]
    return TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)


@functools.cache
def _guards_work() -> bool:
    """Whether this torch has the guards and they tell tensors apart as we need it: they are not
    among torch's public names, and a call must never fail for them."""
    one, wide = torch.zeros(2, 3), torch.zeros(2, 4)[:, :3]
    try:
        guards = _guards((one, wide))
        others = ((wide, wide), (one, one), (one, wide.double()), (one, torch.zeros(2, 2)))
        return bool(guards.check(one, wide)) and not any(guards.check(*pair) for pair in others)
    except Exception:  # whatever a later torch makes of the question, the answer is no
        return False


def traced() -> bool:
    """Whether a compiler, a dispatch mode or a transform has to see an operator."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def _inputs(q: Any, kv: Any, weights: Any, start: Any, end: Any, schedule: Any) -> tuple[Any, ...]:
    """The tensors of a plain FP8 call in the order of addresses; empty for other calls."""
    if type(q) is tuple and len(q) == 2 and q[1] is None:
        q = q[0]
    if type(q) is not Tensor or type(kv) is not tuple or len(kv) != 2 or kv[1] is None:
        return ()
    inputs = (q, *kv, weights, start, end)
    return inputs if schedule is None else (*inputs, schedule)


def _key(
    inputs: tuple[Any, ...],
    clean: Any,
    max_seqlen_k: Any,
    dtype: Any,
    schedule: Any,
    backend: Any,
    out: Any,
) -> tuple[Any, ...] | None:
    """Where to look for a form; None for calls that are never kept, such as those with an argument
    of a type that may compare equal to the right one."""
    if not inputs or type(inputs[1]) is not Tensor:
        return None
    if type(clean) is not bool or type(max_seqlen_k) is not int or type(dtype) is not torch.dtype:
        return None
    if backend is not None and type(backend) is not str:
        return None
    shapes = (inputs[0].shape, inputs[1].shape)
    return (*shapes, clean, max_seqlen_k, dtype, backend, schedule is None, out is None)


def settings() -> tuple[int, int]:
    """Changes with any setting that a launch depends on."""
    return config.version(), devices.version()


def _overlap(low: int, size: int, addresses: tuple[int, ...], reach: tuple[int, ...]) -> bool:
    """Whether the bytes from `low` on share some with an input: six of them, or seven."""
    high = low + size
    q, k, k_scale, weights, start, end, *schedule = addresses
    return (
        (q < high and low < q + reach[0])
        or (k < high and low < k + reach[1])
        or (k_scale < high and low < k_scale + reach[2])
        or (weights < high and low < weights + reach[3])
        or (start < high and low < start + reach[4])
        or (end < high and low < end + reach[5])
        or (len(schedule) > 0 and schedule[0] < high and low < schedule[0] + reach[6])
    )


def _reach(tensor: Tensor) -> int:
    low, high = rules.reach(tensor)
    return high - low if tensor.numel() else 0
