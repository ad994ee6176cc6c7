"""A floating-point environment of our own: bits must not depend on torch's switches.

What can reach into a matrix product from outside, and what is done about it:

| switch | effect | answer |
| --- | --- | --- |
| grad, inference mode | graph recorded, views refused | computed in inference mode |
| default device, dtype | factory functions change | both are always named |
| autocast | products in half precision | switched off for the call, thread-local |
| float32 matmul precision | TF32 or bfloat16 products | IEEE during the call, then put back |
| flush-denormal | subnormals are zeros on some threads | computed on a clean thread |
| number of threads | none: shapes of products are constant | - |
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

_CHUNK = 32768  # elements from which torch gives each thread a share of an elementwise operation


def isolated(compute: Callable[..., None]) -> Callable[..., None]:
    """Decorate `compute(out, ...)` so that its bits are the same whatever the switches say."""

    @functools.wraps(compute)
    def call(out: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        def run() -> None:
            with torch.inference_mode(), _no_autocast(out.device.type):
                compute(out, *args, **kwargs)

        with _ieee_matmul(out.device.type):
            if out.device.type == "cpu" and _some_thread_flushes():
                _on_clean_thread(run)
            else:
                run()

    return call


@contextlib.contextmanager
def _no_autocast(device_type: str) -> Iterator[None]:
    # Entering torch.autocast costs more than a small call, so it is not entered needlessly.
    if not torch.is_autocast_enabled(device_type):
        yield
        return
    with torch.autocast(device_type, enabled=False):
        yield


class _IeeeMatmul:
    """Counts the calls that need IEEE float32 products: the first saves the switch, the last puts
    it back.

    The switch is process-wide: while a call runs, matrix products of other threads are exact
    float32 too, never less precise than they asked for. What another thread sets meanwhile stays.
    """

    def __init__(self, switch: Any, parent: Any) -> None:
        self._switch, self._parent = switch, parent
        self._lock = threading.Lock()
        self._users = 0
        self._saved = "none"

    def __enter__(self) -> None:
        with self._lock:
            if self._users == 0:
                self._saved = self._own_value()
                self._switch.fp32_precision = "ieee"
            self._users += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._switch.fp32_precision == "ieee":
                self._switch.fp32_precision = self._saved

    def needed(self) -> bool:
        # The users first: a call that ends between the two looks must still count.
        return self._users > 0 or self._switch.fp32_precision not in ("ieee", "none")

    def _own_value(self) -> str:
        """What was set on the switch itself: it reads as its parent's value while it has none, and
        the parent as torch's. A value that follows a change above is not its own."""
        top, above, value = torch.backends, self._parent.fp32_precision, self._switch.fp32_precision
        highest = top.fp32_precision  # type: ignore[attr-defined]
        top.fp32_precision = "tf32" if above == "ieee" else "ieee"  # type: ignore[attr-defined]
        own_above = "none" if self._parent.fp32_precision != above else above
        self._parent.fp32_precision = "ieee"
        own_value = "none" if self._switch.fp32_precision != value else value
        self._parent.fp32_precision = own_above
        top.fp32_precision = highest  # type: ignore[attr-defined]
        return str(own_value)


_IEEE = {
    "cpu": _IeeeMatmul(torch.backends.mkldnn.matmul, torch.backends.mkldnn),  # type: ignore[attr-defined]
    "cuda": _IeeeMatmul(torch.backends.cuda.matmul, torch.backends.cudnn),
}


def _ieee_matmul(device_type: str) -> contextlib.AbstractContextManager[None]:
    guard = _IEEE.get(device_type)
    return guard if guard is not None and guard.needed() else contextlib.nullcontext()


def _some_thread_flushes() -> bool:
    # A worker thread keeps the mode that its parent had when the pool started, whatever
    # torch.set_flush_denormal says later, so every thread is asked to make a subnormal.
    tiny = _tiny(torch.get_num_threads())
    return int(tiny.mul(2.0**-40).count_nonzero()) < tiny.numel()


@functools.cache
def _tiny(threads: int) -> torch.Tensor:
    shape = (_CHUNK * threads,)
    return torch.full(shape, 2.0**-100, dtype=torch.float32, device="cpu", requires_grad=False)


def _on_clean_thread(run: Callable[[], None]) -> None:
    # Worker threads belong to the thread that starts them and inherit its mode.
    error: list[BaseException] = []

    def target() -> None:
        torch.set_flush_denormal(False)
        try:
            run()
        except BaseException as caught:
            error.append(caught)

    thread = threading.Thread(target=target, name="mqa-reference")
    thread.start()
    try:
        thread.join()
    except KeyboardInterrupt:
        thread.join()  # nothing writes to `out` once the call is over, however it ends
        raise
    if error:
        raise error[0]
