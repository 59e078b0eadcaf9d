"""The manifest: a pure function of the tables, the templates, the toolchain's pin, and the cubins that they give."""

from __future__ import annotations

from collections.abc import Mapping

from chord.build.jobs import Key, Work
from chord.build.planned import OperatorPlan, PlannedProgram
from chord.registry.schema import SCHEMA_VERSION, Build, Manifest, Operator, Program, RegistryInfo, Toolchain


def assemble(work: Work, builds: Mapping[Key, Build]) -> Manifest:
    """`builds` must have every job of `work`."""
    pin = work.pin
    return Manifest(
        schema_version=SCHEMA_VERSION,
        registry=RegistryInfo(version=work.registry.version, serial=work.registry.serial),
        toolchain=Toolchain(
            compiler=pin.compiler.name,
            version=pin.compiler.version,
            options={arch: pin.options(arch) for arch in pin.architectures},
        ),
        sources=work.sources,
        operators={plan.name: _operator(plan, builds) for plan in work.operators},
    )


def _operator(plan: OperatorPlan, builds: Mapping[Key, Build]) -> Operator:
    return Operator(
        abi_version=plan.abi_version,
        axes=plan.axes,
        arms=plan.arms,
        programs={name: _program(name, program, builds) for name, program in plan.programs.items()},
        routes=plan.routes,
        notes=plan.notes,
    )


def _program(name: str, program: PlannedProgram, builds: Mapping[Key, Build]) -> Program:
    num_tokens, block_m = (_number(program, key) for key in ("num_tokens", "block_m"))
    return Program(
        arm=program.arm.name,
        constants=program.constants,
        num_tokens=num_tokens,
        block_m=block_m,
        flags=program.arm.flags,
        kernels=program.kernels,
        workspace=program.workspace,
        architectures=program.architectures,
        builds={arch: builds[name, arch] for arch in program.architectures},
    )


def _number(program: PlannedProgram, key: str) -> int | None:
    value = program.constants.get(key)
    return value if isinstance(value, int) else None
