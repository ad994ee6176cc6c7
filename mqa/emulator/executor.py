"""Runs PTX as a GPU would be asked to: with a grid, arguments and dynamic shared memory."""

from __future__ import annotations

import functools
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mqa.cuda.plan import MAX_SHARED_BYTES, Plan, SharedPart
from mqa.cuda.tensor_map import TensorMap
from mqa.emulator import parser
from mqa.emulator.engines import encode_map
from mqa.emulator.machine import Machine
from mqa.emulator.memory import CONST_START, PARAM_START, SHARED_START, Checks, Global, own_buffer
from mqa.emulator.program import Program
from mqa.emulator.scheduler import Scheduler

MOST_CLUSTER_CTAS = 16


@dataclass(frozen=True)
class BoundMap:
    """A tensor map as a kernel's argument: how the copy engine sees a tensor, and which."""

    map: TensorMap
    tensor: Tensor | np.ndarray[Any, Any]


Argument = Tensor | np.ndarray[Any, Any] | BoundMap | int | float | bytes | None


@dataclass(frozen=True)
class Summary:
    """What a launch did."""

    steps: int
    """Instructions that others could see: memory, barriers, asynchronous operations."""
    instructions: Mapping[int, int]
    """Instructions executed, by the warp's number in its CTA."""


def run(
    ptx: str,
    entry: str | None,
    grid: int | tuple[int, ...],
    block: int | tuple[int, ...],
    args: Sequence[Argument],
    *,
    smem_bytes: int = 0,
    cluster: int | None = None,
    schedule: str = "eager",
    seed: int = 0,
    checks: bool | None = None,
) -> Summary:
    """Execute a kernel on the CPU.

    Args:
        ptx: What NVRTC or nvcc made of the kernel, for sm_90a.
        entry: Name of the kernel in it; None where there is only one.
        grid: CTAs, up to three dimensions.
        block: Threads of a CTA.
        args: One for each parameter: a CPU tensor or array, whose address is passed and whose
            elements alone may be accessed; None, a null pointer; a `BoundMap`; bytes, as they are;
            a number, as wide as the parameter.
        smem_bytes: Dynamic shared memory.
        cluster: CTAs of a cluster; by default what the kernel itself requires.
        schedule: "eager", "lazy", "random" or "hunt".
        seed: Of the last two.
        checks: None: all that the schedule leaves time for, which in "eager" is all but those of
            order; True: all; False: none of those that a kernel can go on after, so that it does
            what it would mostly do on hardware.

    Raises:
        EmulationError: The kernel does what it must not; its `report` tells what and where.
        PtxError: The PTX is malformed, or an instruction is not modelled.
        ValueError: The launch itself is wrong.
    """
    program, memory = _load(ptx, entry), Global()
    params, maps = _bind(program, memory, args)
    how = _How(schedule, seed, checks)
    return _launch(program, memory, params, maps, grid, block, cluster, smem_bytes, how)


class _How(NamedTuple):
    schedule: str
    seed: int
    checks: bool | None
    parts: Sequence[SharedPart] = ()
    """Of dynamic shared memory."""

    def what(self) -> Checks:
        if self.checks is None:
            return Checks(order=self.schedule != "eager")
        return Checks(any=self.checks, order=self.checks)


def _bind(
    program: Program, memory: Global, args: Sequence[Argument]
) -> tuple[Any, dict[int, tuple[TensorMap, int]]]:
    """The buffer of the kernel's parameters, and its tensor maps by their number among them."""
    maps = {}
    params = own_buffer("parameters", max(program.layout.params, 1), PARAM_START)
    if len(args) != len(program.entry.params):
        raise ValueError(f"len(args)={len(args)}, expected {len(program.entry.params)}")
    for number, (param, value) in enumerate(zip(program.entry.params, args, strict=True)):
        if isinstance(value, BoundMap):
            maps[number] = (value.map, _add(memory, value.map.tensor, value.tensor))
            raw = encode_map(number)
        else:
            raw = _argument(memory, param, value)
        if len(raw) != param.size:
            raise ValueError(f"args[{number}] has {len(raw)} bytes, expected {param.size}")
        at = program.layout.symbols[param.name] - PARAM_START
        params.data[at : at + param.size] = np.frombuffer(raw, np.uint8)
    return params, maps


def run_plan(
    ptx: str,
    symbol: str,
    plan: Plan,
    tensors: Mapping[str, Tensor | None],
    *,
    schedule: str = "eager",
    seed: int = 0,
    checks: bool | None = None,
) -> Summary:
    """Execute what `mqa.cuda.driver` would launch; tensors by the names that the plan has."""
    bound: list[Argument] = []
    for map in plan.maps:
        tensor = tensors[map.tensor]
        if tensor is None:
            raise ValueError(f"{map.tensor} is None, expected the tensor of a tensor map")
        bound.append(BoundMap(map, tensor))
    pointed = [(name, tensors.get(name)) for name in plan.struct.pointers]
    addresses = [0 if tensor is None else tensor.data_ptr() for _, tensor in pointed]
    values = (scalar.value for scalar in plan.struct.scalars)
    packed = plan.struct.layout.pack(*addresses, *values)
    memory = Global()
    for name, tensor in pointed:
        if tensor is not None:
            _add(memory, name, tensor)
    program = _load(ptx, symbol)
    params, maps = _bind(program, memory, (*bound, packed))
    shape = (plan.grid, plan.threads, None, plan.shared_bytes)
    how = _How(schedule, seed, checks, plan.parts)
    return _launch(program, memory, params, maps, *shape, how)


def _launch(
    program: Program,
    memory: Global,
    params: Any,
    maps: dict[int, Any],
    grid: int | tuple[int, ...],
    block: int | tuple[int, ...],
    cluster: int | None,
    smem_bytes: int,
    how: _How,
) -> Summary:
    if program.layout.initial:
        end = max(address + len(data) for address, data in program.layout.initial)
        constants = own_buffer("module-scope variables", end - CONST_START, CONST_START)
        for address, data in program.layout.initial:
            first = address - CONST_START
            constants.data[first : first + len(data)] = np.frombuffer(data, np.uint8)
        memory.add_buffer(constants)
    shape, threads = _three(grid), _three(block)
    size = cluster or program.entry.directives.get("reqnctapercluster", (1,))[0]
    _check_launch(program, shape, threads, size, smem_bytes)
    machine = Machine(
        program,
        memory,
        params,
        grid=shape,
        block=threads,
        cluster=size,
        dynamic_shared=smem_bytes,
        maps=maps,
        checks=how.what(),
        names=_names(program, how.parts),
    )
    scheduler = Scheduler(machine, how.schedule, how.seed)
    with np.errstate(all="ignore"):
        scheduler.run()
    counts: Counter[int] = Counter()
    for cta in machine.ctas:
        for warp in cta.warps:
            counts[warp.index] += warp.counts
    return Summary(scheduler.steps, counts)


def _names(program: Program, parts: Sequence[SharedPart]) -> list[tuple[int, str]]:
    """Parts of shared memory by their first addresses: variables, and those of the plan."""
    start = SHARED_START + program.layout.static_shared
    found = [(start + part.offset, part.name) for part in parts]
    variables = {**program.module.variables, **program.entry.variables}
    for data in variables.values():
        if data.space == "shared" and data.size:
            found.append((program.layout.symbols[data.name], data.name))
    return sorted(found)


def _check_launch(
    program: Program,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    cluster: int,
    smem_bytes: int,
) -> None:
    threads = block[0] * block[1] * block[2]
    limits = program.entry.directives.get("maxntid", (1024,))
    most = functools.reduce(lambda a, b: a * b, limits)
    if not 1 <= threads <= most:
        raise ValueError(f"block={block}, expected 1 to {most} threads")
    if min(grid) < 1 or grid[0] % cluster:
        raise ValueError(f"grid={grid}, expected at least 1 and a multiple of {cluster}")
    if not 1 <= cluster <= MOST_CLUSTER_CTAS:
        raise ValueError(f"cluster={cluster}, expected 1 to {MOST_CLUSTER_CTAS}")
    shared = program.layout.static_shared + smem_bytes
    if shared > MAX_SHARED_BYTES:
        raise ValueError(f"{shared} bytes of shared memory, expected at most {MAX_SHARED_BYTES}")


def _three(size: int | tuple[int, ...]) -> tuple[int, int, int]:
    given = (size,) if isinstance(size, int) else size
    padded = (*given, 1, 1)[:3]
    return padded[0], padded[1], padded[2]


@functools.lru_cache(maxsize=64)
def _load(ptx: str, entry: str | None) -> Program:
    module = parser.parse(ptx)
    if entry is None:
        if len(module.entries) != 1:
            raise ValueError(f"entry=None, expected one of {', '.join(module.entries)}")
        (entry,) = module.entries
    if entry not in module.entries:
        raise ValueError(f"entry={entry!r}, expected one of {', '.join(module.entries)}")
    return Program(module, module.entries[entry])


def _argument(memory: Global, param: parser.Data, value: Argument) -> bytes:
    if isinstance(value, bytes):
        return value
    if value is None:
        return bytes(param.size)
    if isinstance(value, Tensor | np.ndarray):
        return struct.pack("<Q", _add(memory, param.name, value))
    if isinstance(value, float):
        return struct.pack("<f" if param.size == 4 else "<d", value)
    if isinstance(value, BoundMap):
        raise TypeError("a tensor map is no plain argument")
    return (value & (1 << 8 * param.size) - 1).to_bytes(param.size, "little")


def _add(memory: Global, name: str, value: Tensor | np.ndarray[Any, Any]) -> int:
    """Allow access to a tensor's elements; its address."""
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    if value.device.type != "cpu":
        raise ValueError(f"{name}.device={value.device}, expected a CPU tensor")
    address, item = value.data_ptr(), value.element_size()
    if value.numel() == 0:
        return address
    pairs = list(zip(value.shape, value.stride(), strict=True))
    span = (sum((size - 1) * step for size, step in pairs) + 1) * item
    allowed = None
    if span > value.numel() * item:
        allowed = np.zeros(span, bool)
        steps = [step * item for _, step in pairs]
        shape = [*value.shape, item]
        np.lib.stride_tricks.as_strided(allowed, shape, [*steps, 1])[...] = True
    memory.add(name, address, span, allowed)
    return address
