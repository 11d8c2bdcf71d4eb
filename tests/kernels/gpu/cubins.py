"""Compiles every variant that the kernels name for every compute capability and reads its code.

A program of its own, because kernels are interpreted in the tests' process. Writes one JSON object
per variant and capability to standard output.
"""

import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import llmrun.kernels.gpu as room
from llmrun.kernels.gpu.mode import Specialization

CAPABILITIES = (80, 89, 90, 100, 120)
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
CODE_BITS = {"w4": 4, "lut": 4, "w8": 8, "dense": 16}


def modules() -> list[str]:
    """Modules of kernels, by name."""
    return sorted(module.name for module in pkgutil.iter_modules(room.__path__))


def variants(name: str) -> list[Specialization]:
    """What a module names."""
    module = import_module(f"{room.__name__}.{name}")
    named: list[Specialization] = getattr(module, "specializations", list)()
    return named


def report(job: tuple[str, int, int]) -> dict[str, Any]:
    """Compile one variant, given by module and number, for one capability."""
    module, number, cc = job
    started = sum(os.times()[:4])
    variant = variants(module)[number]
    found: dict[str, Any] = {"name": variant.name, "cc": cc}
    try:
        read_off = read(compiled(variant, cc), variant)
        return found | read_off | {"cpu_seconds": sum(os.times()[:4]) - started}
    except Exception as error:
        return found | {"error": f"{type(error).__name__}: {error}"[-2000:]}


def compiled(variant: Specialization, cc: int) -> Any:
    """The compiled kernel."""
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, (name, kind) in enumerate(variant.signature.items())
        if kind.startswith("*") or name in variant.multiples_of_16
    }
    source = ASTSource(variant.kernel, dict(variant.signature), dict(variant.constants), aligned)
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    return triton.compile(source, target=GPUTarget("cuda", cc, 32), options=options)


def read(kernel: Any, variant: Specialization) -> dict[str, Any]:
    """Registers, memory and what the main loop consists of."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        code = tool("nvdisasm", "-c", file.name)
        usage = tool("cuobjdump", "-res-usage", file.name)
    figures = {
        name.lower(): int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)
    }
    instructions, loops = taken_apart(code)
    body = main_loop(instructions, loops)
    found = {
        **figures,
        "shared": kernel.metadata.shared,
        "layouts": layouts(kernel.asm["ttgir"]),
        "total": len(instructions),
        "spills": sum(opcode.startswith(("LDL", "STL")) for opcode in instructions),
        "body": len(body),
        "wide": sum(opcode.startswith("LDG") and ".128" in opcode for opcode in body),
    }
    if variant.gate is not None:
        bits = CODE_BITS[str(variant.constants["FORM"])]
        found |= {
            "per_weight": len(body) / variant.gate.weights,
            "gate": variant.gate.instructions,
            "wide_needed": variant.gate.weights * bits // 128,
        }
    return found


def layouts(code: str) -> list[str]:
    """How products and reductions are spread over threads, which decides the order of sums.

    Each is a layout, or of a product those of its factors; sizes are left out.
    """
    named = dict(re.findall(r"^(#\w+) = (.*)$", code, re.MULTILINE))
    found = set()
    for line in code.splitlines():
        if "tt.dot " in line or re.match(r"\s*\}\) : \(tensor", line):
            types = line.split(" : ")[-1].split(" loc(")[0].split("->")[0]
            inner = re.sub(r"tensor<[0-9x]+", "tensor<", types)
            found.add(re.sub(r"#\w+", lambda match: named.get(match[0], match[0]), inner))
    return sorted(found)


def main_loop(instructions: list[str], loops: list[tuple[int, int]]) -> list[str]:
    """The largest loop that multiplies matrices, else everything."""
    bodies = [instructions[first : last + 1] for first, last in loops]
    multiplying = [body for body in bodies if any("MMA" in opcode for opcode in body)]
    return max(multiplying, key=len, default=instructions)


def tool(name: str, *arguments: str) -> str:
    """What one of the toolkit's programs prints."""
    ran = subprocess.run([TOOLS / name, *arguments], capture_output=True, text=True, check=True)
    return ran.stdout


def taken_apart(code: str) -> tuple[list[str], list[tuple[int, int]]]:
    """Opcodes in order, and loops: from the target of a branch backwards to the branch."""
    opcodes: list[str] = []
    labels: dict[str, int] = {}
    loops: list[tuple[int, int]] = []
    for line in code.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(opcodes)
        if instruction := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(\S+)(.*);", line):
            target = re.search(r"(\.L_x_\d+)", instruction[2])
            if instruction[1].startswith("BRA") and target is not None:
                start = labels.get(target[1], len(opcodes))
                if start < len(opcodes):  # (a branch to itself ends each kernel)
                    loops.append((start, len(opcodes)))
            opcodes.append(instruction[1])
    return opcodes, loops


def jobs(wanted: list[str]) -> Iterator[tuple[str, int, int]]:
    """Everything to compile, of all modules or of some."""
    for module in wanted or modules():
        for number in range(len(variants(module))):
            for cc in CAPABILITIES:
                yield module, number, cc


def main() -> None:
    """Compile in a pool of processes, as many as the first argument says, and print the reports.

    The other arguments name modules; all of them without.
    """
    with ProcessPoolExecutor(int(sys.argv[1])) as pool:
        for found in pool.map(report, list(jobs(sys.argv[2:]))):
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
