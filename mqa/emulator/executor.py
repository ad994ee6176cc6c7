"""Runs PTX as a GPU would be asked to: with a grid, arguments and dynamic shared memory."""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import os
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mqa.cuda.plan import Plan, Role, SharedPart
from mqa.cuda.tensor_map import TensorMap
from mqa.emulator import parser
from mqa.emulator.device import REGISTERS_OF_SM, launch_registers, pool_of
from mqa.emulator.engines import encode_map
from mqa.emulator.machine import Machine
from mqa.emulator.memory import PARAM_START, SHARED_START, Buffer, Checks, Global, own_buffer
from mqa.emulator.program import Program
from mqa.emulator.reports import EmulationError, Kind
from mqa.emulator.scheduler import Scheduler
from mqa.emulator.summary import Summary, opcodes
from mqa.emulator.tensor_order import TensorPipe, check_pipe
from mqa.emulator.trace import Timeline

MOST_CLUSTER_CTAS = 16
MOST_GRID = (2**31 - 1, 65535, 65535)
MOST_BLOCK = (1024, 1024, 64)
IGNORABLE = frozenset({Kind.PROXY_FENCE, Kind.PRODUCT_FENCE, Kind.TENSOR_FENCE, Kind.UNFINISHED})
"""What hardware mostly does without."""


@dataclass(frozen=True)
class BoundMap:
    """A tensor map as a kernel's argument: how the copy engine sees a tensor, and which."""

    map: TensorMap
    tensor: Tensor | np.ndarray[Any, Any]


Part = Tensor | np.ndarray[Any, Any] | BoundMap | bytes | None
Argument = Part | int | float | Sequence[Part]


@dataclass(frozen=True)
class How:
    """What a launch is run under, and who listens."""

    schedule: str = "eager"
    seed: int = 0
    checks: bool | None = None
    ignored: frozenset[Kind] = frozenset()
    tensor_pipe: TensorPipe = "isa"
    timeline: Timeline | None = None
    kernel: str = ""
    roles: tuple[Role, ...] = ()
    parts: Sequence[SharedPart] = ()
    """Of dynamic shared memory."""

    def looked_for(self) -> Checks:
        if self.checks is None:
            return Checks(order=self.schedule != "eager", ignored=self.ignored)
        return Checks(self.checks, self.checks, self.ignored)


@dataclass(frozen=True)
class Shape:
    """Of a launch."""

    grid: int | tuple[int, ...]
    block: int | tuple[int, ...]
    cluster: int | tuple[int, ...] | None
    smem_bytes: int


def run(
    ptx: str,
    entry: str | None,
    grid: int | tuple[int, ...],
    block: int | tuple[int, ...],
    args: Sequence[Argument],
    *,
    smem_bytes: int = 0,
    cluster: int | tuple[int, ...] | None = None,
    schedule: str = "eager",
    seed: int = 0,
    checks: bool | None = None,
    ignore: Collection[Kind] = (),
    tensor_pipe: TensorPipe = "isa",
    trace: str | os.PathLike[str] | None = None,
) -> Summary:
    """Execute a kernel on the CPU.

    Args:
        ptx: What NVRTC or nvcc made of the kernel, for sm_80 or later: its target says which GPU
            it runs on, such as an H200 for sm_90a or a B200 for sm_100f.
        entry: Name of the kernel in it; None where there is only one.
        grid: CTAs, up to three dimensions.
        block: Threads of a CTA.
        args: One for each parameter: a CPU tensor or array, whose address is passed and whose
            elements alone may be accessed; None, a null pointer; a `BoundMap`; bytes, as they are;
            a number, as wide as the parameter; a list of such parts but numbers, for a struct.
        smem_bytes: Dynamic shared memory.
        cluster: CTAs of a cluster, up to three dimensions; by default what the kernel itself
            requires.
        schedule: "eager", "lazy", "random" or "hunt".
        seed: Of the last two.
        checks: None: all that the schedule leaves time for, which in "eager" is all but those of
            order; True: all; False: none of those that a kernel can go on after, so that it does
            what it would mostly do on hardware.
        ignore: What alone is not looked for, of `Kind.PROXY_FENCE`, `Kind.PRODUCT_FENCE` and
            `Kind.TENSOR_FENCE`, `Kind.UNFINISHED`: for kernels that do without on hardware, and of
            which all else is to be checked.
        tensor_pipe: "isa": products and copies to tensor memory of Blackwell are done in any order
            that the ISA allows; "in-order": as they were issued, for kernels that lean on that.
        trace: File that gets the launch's timeline as Chrome-trace JSON, also where it fails.

    Raises:
        EmulationError: The kernel does what it must not; its `report` tells what and where.
        PtxError: The PTX is malformed, or an instruction is not modelled.
        ValueError: The launch itself is wrong.
        OSError: `trace` cannot be written.
    """
    check_pipe(tensor_pipe)
    check_ignored(ignore)
    program, memory = _load(ptx, entry), Global()
    params, maps = _bind(program, memory, args)
    shape = Shape(grid, block, cluster, smem_bytes)
    with traced(trace) as timeline:
        how = How(
            schedule,
            seed,
            checks,
            frozenset(ignore),
            tensor_pipe,
            timeline=timeline,
            kernel=program.entry.name,
        )
        return _launch(program, memory, params, maps, shape, how)


def check_ignored(ignore: Collection[Kind]) -> None:
    """Raise ValueError unless all of these can be left out alone."""
    unknown = set(ignore) - IGNORABLE
    if unknown:
        names = ", ".join(sorted(kind.name for kind in IGNORABLE))
        raise ValueError(f"ignore has {min(kind.name for kind in unknown)}, expected {names} alone")


@contextlib.contextmanager
def traced(path: str | os.PathLike[str] | None) -> Iterator[Timeline | None]:
    """A timeline that is written to `path` at the end; None without one."""
    timeline = None if path is None else Timeline()
    try:
        yield timeline
    finally:
        if timeline is not None and path is not None:
            timeline.write(path)


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
        raw = b"".join(
            _argument(memory, maps, param.name, size, part, param.type) for part in parts
        )
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
    tensor_pipe: TensorPipe = "isa",
    ignore: Collection[Kind] = (),
    timeline: Timeline | None = None,
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
    shape = Shape(plan.grid, plan.threads, None, plan.shared_bytes)
    how = How(
        schedule,
        seed,
        checks,
        frozenset(ignore),
        tensor_pipe=tensor_pipe,
        timeline=timeline,
        kernel=str(plan.kernel),
        roles=plan.roles,
        parts=plan.parts,
    )
    return _launch(program, memory, params, maps, shape, how)


def _launch(
    program: Program,
    memory: Global,
    params: Any,
    maps: dict[int, Any],
    shape: Shape,
    how: How,
) -> Summary:
    if program.layout.initial:
        names = {address: name for name, address in program.layout.symbols.items()}
        for address, data in program.layout.initial:
            memory.add_buffer(_variable(names[address], address, data))
    grid, block = _three(shape.grid), _three(shape.block)
    required = program.entry.directives.get("reqnctapercluster", (1,))
    cluster = _three(shape.cluster or required)
    _check_launch(program, grid, block, cluster, shape.smem_bytes)
    machine = Machine(
        program,
        memory,
        params,
        grid=grid,
        block=block,
        cluster=cluster,
        dynamic_shared=shape.smem_bytes,
        maps=maps,
        checks=how.looked_for(),
        names=_names(program, how.parts),
        tensor_pipe=how.tensor_pipe,
    )
    return _execute(machine, how)


def _variable(name: str, address: int, data: bytes) -> Buffer:
    """A variable of the module, with bounds of its own."""
    origin = address & -16
    raw = np.zeros(-(-(address + len(data) - origin) // 16) * 16, np.uint8)
    raw[address - origin :][: len(data)] = np.frombuffer(data, np.uint8)
    return Buffer(name, raw, address, address + len(data), origin)


def _execute(machine: Machine, how: How) -> Summary:
    scheduler = Scheduler(machine, how.schedule, how.seed)
    program, finding = machine.program, None
    if how.timeline is not None:
        machine.recorder = how.timeline.recorder(how.kernel, program, how.roles)
    try:
        with np.errstate(all="ignore"):
            scheduler.run()
    except EmulationError as error:
        finding = str(error)
        raise
    finally:
        if machine.recorder is not None:
            machine.recorder.finish(finding)
    counts = dict(sorted(machine.instructions.items()))
    kinds = opcodes(program, machine.executed)
    printed = "".join(machine.printed)
    return Summary(scheduler.steps, counts, kinds, how.kernel, how.roles, printed)


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
    cluster: tuple[int, int, int],
    smem_bytes: int,
) -> None:
    directives, threads, ctas = program.entry.directives, math.prod(block), math.prod(cluster)
    if smem_bytes < 0:
        raise ValueError(f"smem_bytes={smem_bytes}, expected 0 or more")
    wanted = directives.get("reqnctapercluster")
    if wanted is not None and cluster != _three(wanted):
        raise ValueError(f"cluster={cluster}, expected {_three(wanted)}, which the kernel requires")
    most = math.prod(directives.get("maxntid", (1024,)))
    if not 1 <= threads <= most:
        raise ValueError(f"block={block}, expected 1 to {most} threads")
    required = directives.get("reqntid")
    if required is not None and block != _three(required):
        raise ValueError(f"block={block}, expected {_three(required)}, which the kernel requires")
    if ctas > 1 and not program.device.clusters:
        raise ValueError(f"cluster={cluster}, expected none: {program.device.name} has no clusters")
    if not 1 <= ctas <= MOST_CLUSTER_CTAS:
        raise ValueError(f"cluster={cluster}, expected 1 to {MOST_CLUSTER_CTAS} CTAs")
    for name, sizes, most_sizes in (
        ("grid", grid, MOST_GRID),
        ("block", block, MOST_BLOCK),
        ("cluster", cluster, (MOST_CLUSTER_CTAS,) * 3),
    ):
        if any(not 1 <= x <= limit for x, limit in zip(sizes, most_sizes, strict=True)):
            raise ValueError(f"{name}={sizes}, expected 1 to {most_sizes}")
    if min(grid) < 1 or any(size % step for size, step in zip(grid, cluster, strict=True)):
        raise ValueError(f"grid={grid}, expected at least 1 and multiples of {cluster}")
    registers = pool_of(launch_registers(program, threads), threads)
    if registers > REGISTERS_OF_SM:
        raise ValueError(f"{registers} registers of a CTA, expected at most {REGISTERS_OF_SM}")
    shared = program.layout.static_shared + smem_bytes
    most_shared = program.device.shared_of_cta
    if shared > most_shared:
        raise ValueError(f"{shared} bytes of shared memory, expected at most {most_shared}")


def _three(size: int | tuple[int, ...]) -> tuple[int, int, int]:
    given = size if isinstance(size, Sequence) else (size,)
    if not 1 <= len(given) <= 3:
        raise ValueError(f"{size} has {len(given)} dimensions, expected 1 to 3")
    x, y, z = (operator.index(part) for part in (*given, 1, 1)[:3])
    return x, y, z


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
    kind: str,
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
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, int | float) and kind in ("f32", "f64"):
        return struct.pack("<f" if kind == "f32" else "<d", value)
    if isinstance(value, float):
        if kind[:1] in ("u", "s") or size not in (4, 8):
            raise ValueError(f"{name}={value}, expected a whole number of type .{kind}")
        return struct.pack("<f" if size == 4 else "<d", value)
    if not isinstance(value, int):
        raise TypeError(f"{name}={value!r} is no argument")
    if not -(1 << 8 * size - 1) <= value < 1 << 8 * size:
        raise ValueError(f"{name}={value}, expected a number of {8 * size} bits")
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
