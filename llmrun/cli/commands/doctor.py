"""``llmrun doctor``: what this machine offers and what llmrun would use of it."""

import platform
import shutil
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer

from llmrun.cli.options import GeneralOptions, Json, device_name, spread
from llmrun.cli.session import Session
from llmrun.cli.units import size


@spread
def command(
    context: typer.Context,
    *,
    device: Annotated[
        str, typer.Option("--device", parser=device_name, metavar="DEVICE", help="auto, cpu, cuda.")
    ] = "auto",
    as_json: Json = False,
    general: GeneralOptions,
) -> None:
    """Show what this machine offers and what is used of it."""
    from llmrun.cli.tables import show_json, show_pairs, show_table

    session: Session = context.obj.with_options(general)
    facts = {
        **_machine(device),
        "cpu_engine": _engine(),
        "gpus": _gpus(),
        **_store(session),
        **_settings(session),
    }
    if as_json:
        show_json(session, facts)
        return
    show_pairs(session, _lines(facts))
    session.terminal.write("\n")
    show_table(session, ("OP", "FORMS", "KERNEL", "OTHERS"), _kernel_rows(facts["kernels"]))


def _machine(wanted: str) -> dict[str, Any]:
    from llmrun.cli.receipt import versions
    from llmrun.cli.threads import usable_processors
    from llmrun.kernels import bnb, dispatch
    from llmrun.measure.environment import environment

    device = dispatch.choose_device(wanted)
    return {
        "device": device,
        "device_problem": dispatch.problem(device),
        "backends": [
            {"name": c.info.name, "device": on, "available": c.reason is None, "reason": c.reason}
            for on in dict.fromkeys(["cpu", "cuda", device])
            for c in dispatch.candidates(on)
        ],
        "kernels": [
            {"op": r.op, "form": r.kind, "backend": r.backend, "rejected": dict(r.rejected)}
            for r in dispatch.table(device)
        ],
        "bitsandbytes": bnb.available() or "available",
        "usable_processors": usable_processors(),
        "environment": environment({}),
        "python": platform.python_version(),
        "versions": versions(),
    }


def _engine() -> dict[str, Any]:
    """What computes on the CPU, with how many threads and why; ``problem``: why torch has to."""
    from llmrun.cli.threads import choose_threads
    from llmrun.kernels.cpu import library

    problem, choice = library.problem(), choose_threads()
    return {
        "name": "native" if problem is None else "torch",
        "isa": library.library().llmr_isa().decode("ascii") if problem is None else None,
        "problem": problem,
        "threads": choice.count,
        "threads_why": choice.why,
    }


def _gpus() -> dict[str, Any]:
    """The cards and their driver; ``problem``: why none of them can be used."""
    from llmrun.kernels import cuda

    return {
        "driver": cuda.driver_version(),
        "problem": cuda.why_not("cuda"),
        "kernels_need": ".".join(map(str, cuda.KERNELS_NEED)),
        "cards": [asdict(card) for card in cuda.cards()],
    }


def _store(session: Session) -> dict[str, Any]:
    from llmrun.store.store import Store

    root = session.settings.store_root
    models = Store(root).models()
    there = next(folder for folder in (root, *root.parents) if folder.exists())
    return {
        "store": str(root),
        "store_free_bytes": shutil.disk_usage(there).free,
        "models": [
            {"name": model.alias or model.name, "bytes": model.bytes, "problem": model.problem}
            for model in models
        ],
    }


def _settings(session: Session) -> dict[str, Any]:
    settings = session.settings
    token = settings.token
    return {
        "model": session.model(None),
        "config_file": str(settings.config_file),
        "config": dict(settings.config),
        "endpoint": settings.endpoint,
        "offline": settings.offline,
        "token": {"source": token.source, "ends_with": token.value[-4:]} if token else None,
    }


def _lines(facts: dict[str, Any]) -> list[tuple[str, str]]:
    env, token = facts["environment"], facts["token"]
    config = "" if Path(facts["config_file"]).exists() else " (none)"
    lines = [
        ("device", _with_problem(facts["device"], facts["device_problem"])),
        *_backend_lines(facts["backends"]),
        *_engine_lines(facts["cpu_engine"]),
        *_gpu_lines(facts["gpus"]),
        ("bitsandbytes", facts["bitsandbytes"]),
        ("processor", f"{env['cpu'] or 'unknown'}, {facts['usable_processors']} usable"),
        ("memory", size(env["memory_bytes"]) if env["memory_bytes"] else "unknown"),
        ("versions", ", ".join(f"{name} {v}" for name, v in facts["versions"].items())),
        ("store", f"{facts['store']}, {size(facts['store_free_bytes'])} free"),
    ]
    lines += [
        ("model", f"{m['name']}  {size(m['bytes'])}  {m['problem'] or 'ok'}")
        for m in facts["models"]
    ]
    return [
        *lines,
        ("default model", facts["model"]),
        ("config file", facts["config_file"] + config),
        ("hub", facts["endpoint"] + (" (offline)" if facts["offline"] else "")),
        ("hub token", f"...{token['ends_with']} from {token['source']}" if token else "none"),
    ]


def _backend_lines(backends: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """For each device the backends that serve it, then those that do not, with the reason."""
    lines = []
    for device in dict.fromkeys(b["device"] for b in backends):
        asked = [b for b in backends if b["device"] == device]
        serving = ", ".join(b["name"] for b in asked if b["reason"] is None)
        others = _reasons({b["name"]: b["reason"] for b in asked if b["reason"] is not None})
        kernels = f"{serving or 'none'}{f'; not {others}' if others else ''}"
        lines.append((f"kernels on {device}", kernels))
    return lines


def _engine_lines(engine: dict[str, Any]) -> list[tuple[str, str]]:
    threads = f"{engine['threads']} threads ({engine['threads_why']})"
    if engine["problem"] is None:
        return [("cpu engine", f"native library for {engine['isa']}, {threads}")]
    remedy = "install a C++ compiler (g++ or clang), then llmrun again; `pip install -v` shows more"
    return [
        ("cpu engine", f"torch, 20 to 30 times slower in decode, {threads}: {engine['problem']}"),
        ("faster engine", f"the native library is made during installation: {remedy}"),
    ]


def _gpu_lines(gpus: dict[str, Any]) -> list[tuple[str, str]]:
    lines = [
        (
            f"card cuda:{card['index']}",
            f"{card['name']}, {size(card['total_bytes'])}, {size(card['free_bytes'])} free, "
            f"compute capability {card['capability']}",
        )
        for card in gpus["cards"]
    ]
    if not lines:
        lines.append(("GPU", f"none ({gpus['problem']})" if gpus["problem"] else "none"))
    if gpus["driver"] is not None:
        lines.append(("NVIDIA driver", gpus["driver"]))
    if gpus["cards"] and gpus["problem"] is not None:
        lines.append(("cards unused", gpus["problem"]))
    return lines


def _kernel_rows(kernels: list[dict[str, Any]]) -> list[tuple[str, str, str, str]]:
    """Neighbours that differ in the storage form alone share a row."""
    rows = []
    for (op, backend, others), same in groupby(
        kernels, key=lambda k: (k["op"], k["backend"] or "none", _reasons(k["rejected"]))
    ):
        rows.append((op, " ".join(k["form"] for k in same), backend, others))
    return rows


def _reasons(rejected: dict[str, str]) -> str:
    names: dict[str, list[str]] = {}
    for name, reason in rejected.items():
        names.setdefault(reason, []).append(name)
    return "; ".join(f"{', '.join(some)}: {reason}" for reason, some in names.items())


def _with_problem(device: str, problem: str | None) -> str:
    return device if problem is None else f"{device}, which cannot be used: {problem}"
