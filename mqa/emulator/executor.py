"""Runs PTX as a GPU would be asked to: with a grid, arguments and dynamic shared memory."""

from __future__ import annotations

import functools
import struct
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mqa.cuda.plan import MAX_SHARED_BYTES, Plan
from mqa.cuda.tensor_map import TensorMap
from mqa.emulator import parser
from mqa.emulator.engines import encode_map
from mqa.emulator.machine import Machine
from mqa.emulator.memory import CONST_START, PARAM_START, Global, own_buffer
from mqa.emulator.program import Program
from mqa.emulator.reports import Kind
from mqa.emulator.scheduler import Scheduler

MOST_CLUSTER_CTAS = 16


@dataclass(frozen=True)
class BoundMap:
    """A tensor map as a kernel's argument: how the copy engine sees a tensor, and which."""

    map: TensorMap
    tensor: Tensor | np.ndarray[Any, Any]


Part = Tensor | np.ndarray[Any, Any] | BoundMap | bytes | None
Argument = Part | int | float | Sequence[Part]


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
    ignore: Collection[Kind] = (),
) -> Summary:
    """Execute a kernel on the CPU.

    Args:
        ptx: What NVRTC or nvcc made of the kernel, for sm_90a.
        entry: Name of the kernel in it; None where there is only one.
        grid: CTAs, up to three dimensions.
        block: Threads of a CTA.
        args: One for each parameter: a CPU tensor or array, whose address is passed and whose
            elements alone may be accessed; None, a null pointer; a `BoundMap`; bytes, as they are;
            a number, as wide as the parameter; a list of such parts but numbers, for a struct.
        smem_bytes: Dynamic shared memory.
        cluster: CTAs of a cluster; by default what the kernel itself requires.
        schedule: "eager", "lazy", "random" or "hunt".
        seed: Of the last two.
        ignore: What is not looked for, of `Kind.PROXY_FENCE` and `Kind.PRODUCT_FENCE`: for kernels
            that do without on hardware.

    Raises:
        EmulationError: The kernel does what it must not; its `report` tells what and where.
        PtxError: The PTX is malformed, or an instruction is not modelled.
        ValueError: The launch itself is wrong.
    """
    unknown = set(ignore) - {Kind.PROXY_FENCE, Kind.PRODUCT_FENCE}
    if unknown:
        raise ValueError(f"ignore has {min(kind.name for kind in unknown)}, expected fences alone")
    program, memory = _load(ptx, entry), Global()
    params, maps = _bind(program, memory, args)
    shape = (grid, block, cluster, smem_bytes)
    return _launch(program, memory, params, maps, *shape, schedule, seed, frozenset(ignore))


def _bind(
    program: Program, memory: Global, args: Sequence[Argument]
) -> tuple[Any, dict[int, tuple[TensorMap, int]]]:
    """The buffer of the kernel's parameters, and its tensor maps by number."""
    maps: dict[int, tuple[TensorMap, int]] = {}
    params = own_buffer("parameters", max(program.layout.params, 1), PARAM_START)
    if len(args) != len(program.entry.params):
        raise ValueError(f"len(args)={len(args)}, expected {len(program.entry.params)}")
    for number, (param, value) in enumerate(zip(program.entry.params, args, strict=True)):
        parts = value if isinstance(value, list | tuple) else (value,)
        size = param.size if len(parts) == 1 else 8
        raw = b"".join(_argument(memory, maps, param.name, size, part) for part in parts)
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
    return _launch(program, memory, params, maps, *shape, schedule, seed)


def _launch(
    program: Program,
    memory: Global,
    params: Any,
    maps: dict[int, Any],
    grid: int | tuple[int, ...],
    block: int | tuple[int, ...],
    cluster: int | None,
    smem_bytes: int,
    schedule: str,
    seed: int,
    ignored: frozenset[Kind] = frozenset(),
) -> Summary:
    if program.layout.initial:
        end = max(address + len(data) for address, data in program.layout.initial)
        constants = own_buffer("module-scope variables", end - CONST_START, CONST_START)
        for address, data in program.layout.initial:
            first = address - CONST_START
            constants.data[first : first + len(data)] = np.frombuffer(data, np.uint8)
        memory.add_buffer(constants)
    shape, threads = _three(grid), _three(block)
    along, *others = program.entry.directives.get("reqnctapercluster", (1,))
    if any(other > 1 for other in others):
        raise ValueError(f"clusters of {(along, *others)} CTAs, expected all along x")
    size = cluster or along
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
        ignored=ignored,
    )
    scheduler = Scheduler(machine, schedule, seed)
    with np.errstate(all="ignore"):
        scheduler.run()
    counts: Counter[int] = Counter()
    for cta in machine.ctas:
        for warp in cta.warps:
            counts[warp.index] += warp.counts
    return Summary(scheduler.steps, counts)


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


def _argument(
    memory: Global,
    maps: dict[int, tuple[TensorMap, int]],
    name: str,
    size: int,
    value: Argument,
) -> bytes:
    """Bytes of an argument, or of a part of one. Maps get the numbers in which they come."""
    if isinstance(value, bytes):
        return value
    if value is None:
        return bytes(size)
    if isinstance(value, BoundMap):
        address = _add(memory, value.map.tensor, value.tensor)
        if address % value.map.address_bytes:
            expected = f"a multiple of {value.map.address_bytes}"
            raise ValueError(f"{value.map.tensor} is at {address:#x}, expected {expected}")
        maps[len(maps)] = value.map, address
        return encode_map(len(maps) - 1)
    if isinstance(value, Tensor | np.ndarray):
        return struct.pack("<Q", _add(memory, name, value))
    if isinstance(value, float):
        return struct.pack("<f" if size == 4 else "<d", value)
    if not isinstance(value, int):
        raise TypeError(f"{name}={value!r} is no argument")
    return (value & (1 << 8 * size) - 1).to_bytes(size, "little")


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
