"""Who computes a call: one ordered list of backends, each with its reasons against a problem.

A backend answers `reasons_against(problem, device)` from the facts of a problem alone, without a
driver call. `choose` takes the first backend that has none; a named one that has some is an
error that lists every reason.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mqa import arguments, config
from mqa.cuda.gpu import Gpu
from mqa.cuda.portable import PORTABLE
from mqa.cuda.sm90 import SM90, SM90_ACCURATE
from mqa.cuda.sm100 import SM100
from mqa.emulator.backend import (
    PORTABLE_EMULATED,
    SM90_ACCURATE_EMULATED,
    SM90_EMULATED,
    SM100_EMULATED,
)
from mqa.errors import BackendUnavailableError, FallbackWarning, callers_level
from mqa.prepared import Launch
from mqa.problem import Format, Problem
from mqa.reference import blockwise, schedule
from mqa.reference import paged as reference_paged
from mqa.validate import DenseCall, PagedCall


class Backend(Protocol):
    """What the list holds."""

    @property
    def name(self) -> str: ...

    @property
    def by_default(self) -> bool:
        """Whether a call that names no backend may get this one."""
        ...

    def reasons_against(self, problem: Problem, device: torch.device) -> Iterator[str]:
        """Every reason why this backend cannot run `problem` on `device`; nothing if it can."""
        ...

    def unusable_here(self) -> str | None:
        """Why this machine cannot run the backend at all and what would change that, or None."""
        ...

    def dense(self, call: DenseCall, out: Tensor) -> Launch | None:
        """Compute. Returns a launch of calls like this one, whose tensors may lie elsewhere, if
        there is one (`mqa.prepared`)."""
        ...

    def paged(self, call: PagedCall, out: Tensor) -> None: ...

    def dense_metadata(
        self, start: Tensor, end: Tensor, num_kv_tokens: int, num_heads: int, out: Tensor
    ) -> None:
        """Write the cut points int32 [M + 1, 2] of `mqa.reference.schedule` to `out`. Called only
        where `schedules_on` says yes."""
        ...

    def paged_metadata(self, context_lens: Tensor, indices: Tensor | None, out: Tensor) -> None:
        """The same for a paged call: lens int32 [B, next_n], or [B] as next_n = 1."""
        ...

    def schedules_on(self, device: torch.device) -> bool:
        """Whether the metadata functions work on this device."""
        ...

    def accumulator(self, format: Format) -> str:
        """How a dot product of that format is summed: a name in `mqa.testing.accumulators`."""
        ...

    def warmup(self, problem: Problem, device: torch.device) -> tuple[str, ...]:
        """Compile and load what `problem` needs on `device`; the names of these variants."""
        ...

    def warmup_schedules(self, problem: Problem, device: torch.device) -> tuple[str, ...]:
        """The same of what the metadata functions need, also for calls that another backend
        computes. Called only where `schedules_on` says yes."""
        ...


class Reference:
    """Plain PyTorch, on any device: see `mqa.reference`."""

    name = "reference"
    by_default = True

    def reasons_against(self, problem: Problem, device: torch.device) -> Iterator[str]:
        return iter(())

    def unusable_here(self) -> str | None:
        return None

    def dense(self, call: DenseCall, out: Tensor) -> Launch | None:
        blockwise.dense(
            out,
            call.q,
            call.q_scale,
            call.k,
            call.kv_scale,
            call.weights,
            call.start,
            call.end,
            compressed=call.problem.compressed,
            clean=call.problem.clean,
            on_host=out.device.type == "cpu",
            memory=config.reference_bytes(),
        )
        return None

    def paged(self, call: PagedCall, out: Tensor) -> None:
        reference_paged.paged(
            out,
            call.q,
            call.q_scale,
            call.kv_cache,
            call.weights,
            call.context_lens,
            call.block_table,
            call.indices,
            clean=call.problem.clean,
            on_host=out.device.type == "cpu",
            memory=config.reference_bytes(),
        )

    def dense_metadata(
        self, start: Tensor, end: Tensor, num_kv_tokens: int, num_heads: int, out: Tensor
    ) -> None:
        parts = out.shape[0] - 1
        out.copy_(schedule.dense_metadata(start, end, num_kv_tokens, num_heads, parts))

    def paged_metadata(self, context_lens: Tensor, indices: Tensor | None, out: Tensor) -> None:
        out.copy_(schedule.paged_metadata(context_lens, out.shape[0] - 1, indices))

    def schedules_on(self, device: torch.device) -> bool:
        return True

    def accumulator(self, format: Format) -> str:
        return "FLOAT32"

    def warmup(self, problem: Problem, device: torch.device) -> tuple[str, ...]:
        return ()

    def warmup_schedules(self, problem: Problem, device: torch.device) -> tuple[str, ...]:
        return ()


REFERENCE = Reference()
BACKENDS: tuple[Backend, ...] = (
    SM100,
    SM90,
    SM90_ACCURATE,
    PORTABLE,
    REFERENCE,
    SM100_EMULATED,
    SM90_EMULATED,
    SM90_ACCURATE_EMULATED,
    PORTABLE_EMULATED,
)
"""Best first."""


@dataclass(frozen=True)
class BackendStatus:
    """A line of `mqa.backends()`."""

    name: str
    usable: bool
    reason: str
    """Why this machine cannot run it and what would change that; empty if it can."""


@dataclass(frozen=True)
class Support:
    """What `mqa.supports` says of a configuration."""

    backend: str | None
    """The backend that a call would get; None if none accepts it."""
    reasons: dict[str, tuple[str, ...]]
    """Every reason of each backend that does not accept it."""

    def __bool__(self) -> bool:
        return self.backend is not None


def backends() -> tuple[BackendStatus, ...]:
    """Every backend, best first: usable on this machine, or the reason why not."""
    found = ((backend.name, _unusable_here(backend)) for backend in BACKENDS)
    return tuple(BackendStatus(name, reason is None, reason or "") for name, reason in found)


def _unusable_here(backend: Backend) -> str | None:
    """The backend's answer, or which environment variable it could not read: who asks what is
    wrong is told, and the next call raises."""
    try:
        return backend.unusable_here()
    except ValueError as error:
        return str(error)


def support(problem: Problem, device: torch.device) -> Support:
    """Who would run `problem`, and why the others cannot."""
    reasons = {backend.name: _reasons(backend, problem, device) for backend in BACKENDS}
    asked = config.backend_name()
    if asked is None:
        if device.type != "cpu" and config.fallback() == "error":
            reasons[REFERENCE.name] = (f"MQA_FALLBACK=error forbids it on {device}",)
        considered = [backend for backend in BACKENDS if backend.by_default]
    else:
        considered = [_named("MQA_BACKEND", asked)]
    able = (backend.name for backend in considered if not reasons[backend.name])
    return Support(next(able, None), {name: why for name, why in reasons.items() if why})


def choose(problem: Problem, device: torch.device, name: str | None = None) -> Backend:
    """The backend named (by `name`, else by MQA_BACKEND), or the first without a reason against it.

    Raises ValueError for a name that no backend has, BackendUnavailableError where the one named,
    or every one, has reasons, and where the reference would run on a GPU under
    MQA_FALLBACK=error; under MQA_FALLBACK=warn that is a FallbackWarning, once for new reasons.
    """
    asked = "MQA_BACKEND" if name is None else "backend"
    name = config.backend_name() if name is None else name
    if name is not None:
        backend = _named(asked, name)
        if _reasons(backend, problem, device):
            raise BackendUnavailableError(explain(problem, device, asked=name))
        return backend
    for backend in BACKENDS:
        if backend.by_default and not _reasons(backend, problem, device):
            if backend is REFERENCE and device.type != "cpu":
                _fall_back(problem, device)
            return backend
    raise BackendUnavailableError(explain(problem, device))


def scheduler(device: torch.device) -> Backend:
    """The first backend that computes schedules on `device`. All give the same bits."""
    return next(backend for backend in BACKENDS if backend.schedules_on(device))


def warmup(problem: Problem, device: torch.device, name: str | None = None) -> tuple[str, ...]:
    """Compile and load what calls like `problem` need, of the backend that `choose` gives and of
    `scheduler`, which may be another one; the names of these variants. Raises as `choose` does."""
    names = choose(problem, device, name).warmup(problem, device)
    if not names:
        return ()
    return tuple(dict.fromkeys(names + scheduler(device).warmup_schedules(problem, device)))


def on_gpus_alone(name: str, device: torch.device) -> bool:
    """Whether the backend of that name runs on `device`, a GPU, and not on the CPU."""
    backend = _named("backend", name)
    return backend.schedules_on(device) and not backend.schedules_on(torch.device("cpu"))


def explain(problem: Problem, device: torch.device, asked: str | None = None) -> str:
    """Who can run `problem` on `device` and why the others cannot, a line each; first of all why
    the one that was `asked` cannot."""
    title = f"{problem} on {device}"
    if asked is not None:
        title = f"backend {asked!r} cannot run {title}"
    in_order = sorted(BACKENDS, key=lambda backend: backend.name != asked)
    return _table(title, [(backend, _reasons(backend, problem, device)) for backend in in_order])


def explain_elsewhere(problem: Problem, major: int, minor: int) -> str:
    """The same of a GPU of that compute capability on a machine that has what kernels need."""
    device = torch.device("cuda")
    found = [
        (one, tuple(one.reasons_elsewhere(problem, major, minor)))
        if isinstance(one, Gpu)
        else (one, _reasons(one, problem, device))
        for one in BACKENDS
    ]
    return _table(f"{problem} on a GPU of compute capability {major}.{minor}", found)


def _table(title: str, found: Iterable[tuple[Backend, tuple[str, ...]]]) -> str:
    lines, width = [title], max(len(backend.name) for backend in BACKENDS)
    for backend, reasons in found:
        default = "can run it" if backend.by_default else "can run it, only by name"
        lines += [f"  {backend.name:<{width}}  {reason}" for reason in reasons or (default,)]
    return "\n".join(lines)


def check_name(backend: object) -> None:
    """Raise TypeError or ValueError unless `backend` is None or the name of a backend."""
    if backend is None:
        return
    if not isinstance(backend, str):
        arguments.reject("backend", backend, "a backend's name or None", TypeError)
    _named("backend", backend)


def _named(argument: str, name: str) -> Backend:
    for backend in BACKENDS:
        if backend.name == name:
            return backend
    known = ", ".join(backend.name for backend in BACKENDS)
    arguments.reject(argument, name, f"one of {known}")


def _reasons(backend: Backend, problem: Problem, device: torch.device) -> tuple[str, ...]:
    return tuple(backend.reasons_against(problem, device))


_warned: set[str] = set()
_warned_lock = threading.Lock()


def _fall_back(problem: Problem, device: torch.device) -> None:
    policy = config.fallback()
    if policy == "silent":
        return
    faster = [b for b in BACKENDS if b.by_default and b is not REFERENCE]
    reasons = [f"{b.name}: {why}" for b in faster for why in _reasons(b, problem, device)]
    why = "; ".join(reasons)
    if policy == "error":
        raise BackendUnavailableError(
            f"MQA_FALLBACK=error, and only the reference can run {problem} on {device}: {why}"
        )
    with _warned_lock:
        known = why in _warned
        _warned.add(why)
    if not known:
        message = f"the slow reference runs on {device}: {why} (MQA_FALLBACK=silent hides this)"
        warnings.warn(message, FallbackWarning, stacklevel=callers_level())
