"""A backend of one architecture of GPUs: what is the same whichever it is.

A call becomes facts (`dense.py`, `paged.py`), facts become a plan (an architecture's module), and
`driver.py` launches the plan on the tensors' addresses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from mqa.cuda import driver, metadata, targets
from mqa.cuda.dense import DenseFacts, dense_addresses, dense_facts
from mqa.cuda.paged import PagedFacts, paged_addresses, paged_facts
from mqa.cuda.plan import Kernel, Plan
from mqa.cuda.reasons import problem_reasons
from mqa.prepared import Launch
from mqa.problem import Format, PagedProblem, Problem
from mqa.validate import DenseCall, PagedCall


class Gpu(ABC):
    """`elements`: how each format reaches the tensor cores; `models`: how its dot products are
    summed, names in `mqa.testing.accumulators`."""

    capability: str
    """Which GPUs, for people: "9.0", "10.x"."""
    metadata: tuple[Kernel, ...] = metadata.METADATA
    """Kernels of dense and of paged schedules."""

    def __init__(
        self,
        name: str,
        elements: dict[Format, str],
        models: dict[Format, str],
        *,
        by_default: bool,
    ) -> None:
        self._name, self._by_default = name, by_default
        self.elements, self._models = elements, models

    @property
    def name(self) -> str:
        return self._name

    @property
    def by_default(self) -> bool:
        return self._by_default

    @abstractmethod
    def takes(self, major: int, minor: int) -> bool:
        """Whether the kernels run on GPUs of this compute capability."""

    @abstractmethod
    def dense_plan(self, facts: DenseFacts) -> Plan: ...

    @abstractmethod
    def paged_plan(self, facts: PagedFacts) -> Plan: ...

    @abstractmethod
    def scoring_kernels(
        self, heads: int, dim: int, logits: str, elements: str, *, paged: bool
    ) -> dict[Kernel, int]:
        """Those that calls may reach, and their dynamic shared memory."""

    def reasons_against(self, problem: Problem, device: torch.device) -> Iterator[str]:
        yield from self._device_reasons(device)
        yield from self.problem_reasons(problem)

    def reasons_elsewhere(self, problem: Problem, major: int, minor: int) -> Iterator[str]:
        """Reasons on a GPU of that compute capability that this machine need not have."""
        if not self.takes(major, minor):
            yield f"needs compute capability {self.capability}"
        yield from self.problem_reasons(problem)

    def problem_reasons(self, problem: Problem) -> Iterator[str]:
        """Reasons that hold on every device, and for an emulator of one."""
        return problem_reasons(problem, self.elements)

    def unusable_here(self) -> str | None:
        if not torch.cuda.is_available():
            wanted = f"an NVIDIA GPU of compute capability {self.capability}"
            return f"needs {wanted}; torch finds no CUDA device"
        device = torch.device("cuda", torch.cuda.current_device())
        return "; ".join(self._device_reasons(device)) or None

    def _device_reasons(self, device: torch.device) -> Iterator[str]:
        needs = f"needs a CUDA device of compute capability {self.capability}"
        if device.type != "cuda":
            yield f"{needs}, this is {device}"
        elif not torch.cuda.is_available():
            yield f"{needs}; torch finds none here"
        elif not self.takes(*(found := torch.cuda.get_device_capability(device))):
            has = f"{device} has {found[0]}.{found[1]}"
            yield f"needs compute capability {self.capability}, {has}"
        elif (missing := self.misfit(device) or driver.unavailable()) is not None:
            yield missing

    def misfit(self, device: torch.device) -> str | None:
        """Why kernels compiled as the environment says do not run on `device`."""
        return targets.misfit(device)

    def plan_dense(self, call: DenseCall, out: Tensor) -> Plan:
        return self.dense_plan(dense_facts(call, out, self.elements[call.problem.format]))

    def plan_paged(self, call: PagedCall, out: Tensor) -> Plan:
        return self.paged_plan(paged_facts(call, out, self.elements[call.problem.format]))

    def plan_dense_cuts(
        self, start: Tensor, end: Tensor, num_kv_tokens: int, num_heads: int, out: Tensor
    ) -> Plan:
        kernel = self.metadata[0]
        return metadata.dense_cuts_plan(start, end, num_kv_tokens, num_heads, out, kernel)

    def plan_paged_cuts(self, context_lens: Tensor, indices: Tensor | None, out: Tensor) -> Plan:
        return metadata.paged_cuts_plan(context_lens, indices, out, self.metadata[1])

    def dense(self, call: DenseCall, out: Tensor) -> Launch | None:
        plan = self.plan_dense(call, out)
        launcher = driver.launcher(plan, out.device)
        launcher.launch(dense_addresses(call, out, plan))
        # What is prepared is calls whose tensors are those of plain FP8 by tensor maps, in order.
        plain = self.elements[call.problem.format] == "Fp8" and not plan.kernel.portable
        return launcher.launch if call.problem.N and plain else None

    def paged(self, call: PagedCall, out: Tensor) -> None:
        plan = self.plan_paged(call, out)
        driver.launcher(plan, out.device).launch(paged_addresses(call, out, plan))

    def dense_metadata(
        self, start: Tensor, end: Tensor, num_kv_tokens: int, num_heads: int, out: Tensor
    ) -> None:
        plan = self.plan_dense_cuts(start, end, num_kv_tokens, num_heads, out)
        addresses = (start.data_ptr(), end.data_ptr(), out.data_ptr())
        driver.launcher(plan, out.device).launch(addresses)

    def paged_metadata(self, context_lens: Tensor, indices: Tensor | None, out: Tensor) -> None:
        plan = self.plan_paged_cuts(context_lens, indices, out)
        where = 0 if indices is None else indices.data_ptr()
        addresses = (context_lens.data_ptr(), where, out.data_ptr())
        driver.launcher(plan, out.device).launch(addresses)

    def schedules_on(self, device: torch.device) -> bool:
        return not any(self._device_reasons(device))

    def accumulator(self, format: Format) -> str:
        return self.accumulator_of(format, None)

    def accumulator_of(self, format: Format, arch: str | None) -> str:
        """The same of a GPU of that architecture; None: of the one at hand."""
        return self._models[format]

    def warmup(self, problem: Problem, device: torch.device) -> tuple[str, ...]:
        kernels = self.kernels_of(problem)
        for kernel, size in kernels.items():
            driver.load(kernel, device, size)
        return tuple(map(str, kernels))

    def warmup_schedules(self, problem: Problem, device: torch.device) -> tuple[str, ...]:
        kernel = self.metadata[isinstance(problem, PagedProblem)]
        driver.load(kernel, device, 0)
        return (str(kernel),)

    def kernels_of(self, problem: Problem) -> dict[Kernel, int]:
        """Those that calls of a configuration may reach, and their dynamic shared memory."""
        paged = isinstance(problem, PagedProblem)
        facts = (problem.H, problem.D, problem.out, self.elements[problem.format])
        return self.scoring_kernels(*facts, paged=paged) | {self.metadata[paged]: 0}
