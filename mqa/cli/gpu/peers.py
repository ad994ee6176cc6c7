"""The peer that ours is timed against: DeepGEMM, from whichever package is installed."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

import mqa
from mqa.cli import machine
from mqa.cli.gpu.inputs import Inputs
from mqa.cli.gpu.rows import Call

_DISTRIBUTIONS = ("sgl-deep-gemm", "deep-gemm")
_DENSE = ("fp8_fp4_mqa_logits", "fp8_mqa_logits")
_PAGED = ("fp8_fp4_paged_mqa_logits", "fp8_paged_mqa_logits")
"""Newest first. The older of each takes q without a scale beside it."""
_METADATA = "get_paged_mqa_logits_metadata"


class PeerMissing(RuntimeError):
    """There is no peer on this machine, or it cannot do this call."""


class Peer(Protocol):
    name: str
    version: str | None

    def work(self, inputs: Inputs, call: Call) -> Callable[[], Tensor]:
        """The call, ready to be timed, a paged one with a schedule of its own making.

        Raises PeerMissing where the peer can't be asked for it.
        """
        ...

    def settings(self) -> dict[str, Any]:
        """What it launches with: SM count and dependent launch."""
        ...


class NoPeer:
    """Stands where no peer is installed; rows that need one fail with the reason."""

    def __init__(self, reason: str) -> None:
        self.name, self.reason = "no peer", reason
        self.version: str | None = None

    def work(self, inputs: Inputs, call: Call) -> Callable[[], Tensor]:
        raise PeerMissing(self.reason)

    def settings(self) -> dict[str, Any]:
        return {}


class DeepGemm:
    """Module `deep_gemm`, given the SM count and the dependent-launch flag that ours uses."""

    def __init__(self, module: Any) -> None:
        found = [name for name in _DISTRIBUTIONS if machine.installed(name)]
        self.name = found[0] if found else "deep_gemm"
        self.version = machine.installed(self.name) or getattr(module, "__version__", None)
        self._module = module
        for name, value in (("num_sms", mqa.get_num_sms()), ("pdl", mqa.get_pdl())):
            setter = getattr(module, f"set_{name}", None)
            if setter is not None:
                setter(value)

    def settings(self) -> dict[str, Any]:
        getters = {name: getattr(self._module, f"get_{name}", None) for name in ("num_sms", "pdl")}
        return {name: getter() for name, getter in getters.items() if getter is not None}

    def work(self, inputs: Inputs, call: Call) -> Callable[[], Tensor]:
        newer, older = _DENSE if inputs.table is None else _PAGED
        name, function = self._function(newer, older)
        options = _accepted(function, call)
        q = inputs.q if name == older else (inputs.q, inputs.q_scale)
        arguments = (q, *self._rest(inputs))
        return lambda: _tensor(function(*arguments, **options))

    def _rest(self, inputs: Inputs) -> tuple[Any, ...]:
        """The arguments after q; of a paged call with the peer's own schedule, made here, once."""
        if inputs.table is None:
            return (inputs.k, inputs.k_scale), inputs.w, inputs.start, inputs.end
        _, metadata = self._function(_METADATA)
        sms = self.settings().get("num_sms", mqa.get_num_sms(inputs.w.device))
        cuts = _tensor(metadata(inputs.lens, inputs.k.shape[1], sms))
        return inputs.k, inputs.w, inputs.lens, inputs.table, cuts, inputs.width

    def _function(self, *names: str) -> tuple[str, Callable[..., Any]]:
        """The first of these that the module has."""
        for name in names:
            if hasattr(self._module, name):
                return name, getattr(self._module, name)
        raise PeerMissing(f"{self.name} {self.version} has no {' or '.join(names)}")


def _tensor(result: Any) -> Tensor:
    return result if isinstance(result, Tensor) else torch.utils.dlpack.from_dlpack(result)


def find_peer() -> Peer:
    """DeepGEMM if it can be imported here, else a NoPeer that says why not."""
    try:
        return DeepGemm(importlib.import_module("deep_gemm"))
    except (ImportError, OSError, AssertionError, RuntimeError) as error:
        return NoPeer(f"the peer cannot be imported: {type(error).__name__}: {error}")


def _accepted(function: Callable[..., Any], call: Call) -> dict[str, Any]:
    """The options of `call` that the function has; PeerMissing if one that it lacks matters."""
    options: dict[str, tuple[Any, bool]] = {
        "clean_logits": (call.clean, call.clean),
        "max_seqlen_k": (0, call.compressed),
        "logits_dtype": (getattr(torch, call.logits), call.logits != "float32"),
    }
    known = inspect.signature(function).parameters
    lacking = [name for name, (_, matters) in options.items() if matters and name not in known]
    if lacking:
        raise PeerMissing(f"{function.__name__} has no {', '.join(lacking)}")
    return {name: value for name, (value, _) in options.items() if name in known}
