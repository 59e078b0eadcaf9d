"""What came out of the compiler, against what the table asked for: architecture, kernels, arguments, memory."""

from __future__ import annotations

import hashlib

from chord.build.jobs import Job
from chord.errors import CompileError, VerificationError
from chord.registry import cubin
from chord.registry.cubin import CubinInfo, KernelInfo
from chord.registry.schema import Build, KernelResources
from chord.registry.verify import argument_bytes


def describe(job: Job, data: bytes) -> Build:
    """The manifest's entry for a cubin. Raises CompileError, or TableError that names the cell of a broken limit."""
    info = _parse(job, data)
    for position, config in enumerate(job.program.kernels):
        _check_kernel(job, position, info.kernels[config.symbol])
    resources = [info.kernels[config.symbol] for config in job.program.kernels]
    return Build(
        closure_sha256=job.require_closure().sha256,
        cubin_sha256=hashlib.sha256(data).hexdigest(),
        size_bytes=len(data),
        min_driver=job.min_driver,
        kernels=tuple(
            KernelResources(
                registers=kernel.registers, spill_bytes=kernel.spill_bytes, static_smem_bytes=kernel.static_smem_bytes
            )
            for kernel in resources
        ),
    )


def _parse(job: Job, data: bytes) -> CubinInfo:
    if not data:
        raise CompileError("the compiler's result has 0 bytes")
    try:
        info = cubin.parse(data)
    except VerificationError as error:
        raise CompileError(f"the compiler's result: {error}") from error
    if info.arch != job.arch:
        raise CompileError(f"the compiler's result is for {info.arch}, expected {job.arch}")
    expected = [config.symbol for config in job.program.kernels]
    if set(info.kernels) != set(expected):
        raise CompileError(
            f"templates/{job.program.arm.template}: expected the kernels {', '.join(expected)}; "
            f"it defines {', '.join(info.kernels) or 'none'}"
        )
    return info


def _check_kernel(job: Job, position: int, kernel: KernelInfo) -> None:
    arm, config = job.program.arm, job.program.kernels[position]
    expected = argument_bytes(job.program.args)
    if kernel.parameter_bytes != expected:
        raise CompileError(
            f"templates/{arm.template}: {config.symbol} takes parameters of {list(kernel.parameter_bytes)} bytes, "
            f"the table's args ({', '.join(arm.args)}) are {list(expected)}"
        )
    if kernel.spill_bytes and not arm.allow_spills:
        raise CompileError(
            f"{config.symbol} needs {kernel.spill_bytes} bytes of local memory a thread "
            f"({kernel.registers} registers): expected 0; use less, or set allow_spills = true for arm {arm.name}"
        )
    total = kernel.static_smem_bytes + config.dynamic_smem_bytes
    if total > job.max_shared_bytes:
        raise job.cells.error(
            f"{job.program.arm_cell}.kernels[{position}].dynamic_smem_bytes",
            f"{config.symbol} needs {kernel.static_smem_bytes} bytes of static and {config.dynamic_smem_bytes} of "
            f"dynamic shared memory, a block on {job.arch} has {job.max_shared_bytes}",
        )
