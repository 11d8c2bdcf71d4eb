"""The receipt of an answer: what made it out of a prompt, so that it can be made again; ``--json``.

Keys are an interface. Paths below the user's home start with ``~``. ``fallbacks`` and ``dropped``
are here to be read: nothing is replaced or dropped without the user having asked for it.
"""

from dataclasses import dataclass
from pathlib import Path

import llmrun
from llmrun.cli.answer import Answer, Request
from llmrun.cli.assemble import LoadedModel
from llmrun.cli.options import PromptFlags
from llmrun.measure.coldstart import Stage
from llmrun.measure.statistics import mean, percentile

LIBRARIES = ("torch", "tokenizers", "bitsandbytes", "jinja2", "huggingface-hub", "safetensors")

Json = dict[str, object]


@dataclass(frozen=True, eq=False)
class Result:
    """An answer and what it was made of.

    ``cold``: the stages from the start of the process to the first token; none if unknown.
    """

    loaded: LoadedModel
    request: Request
    answer: Answer
    prompting: PromptFlags
    cold: tuple[Stage, ...] = ()


def answer_json(result: Result) -> Json:
    """The object ``run --json`` prints."""
    return {"text": result.answer.text, **last_line(result), "receipt": receipt(result)}


def last_line(result: Result) -> Json:
    """The line ``run --json-stream`` ends with."""
    return {
        "finish_reason": result.answer.finish.value,
        "usage": usage(result),
        "timings": timings(result),
    }


def receipt(result: Result) -> Json:
    """What made this answer; the prompt itself is the user's to keep."""
    loaded, request, prompting = result.loaded, result.request, result.prompting
    local, sampling = loaded.local, request.sampling
    given = len(request.prompt.ids)
    return {
        "schema": "llmrun.receipt/1",
        "model": local.alias or local.name,
        "source": local.source,
        "origin": shortened(local.origin),
        "revision": local.revision,
        "files": [
            {"path": file.path, "size": file.size, "sha256": file.sha256} for file in local.files
        ],
        "scheme": loaded.scheme,
        "bits_per_weight": loaded.coverage.total.bits_per_weight,
        "device": loaded.backend.device,
        "kernels": loaded.backend.name,
        "isa": loaded.backend.isa,
        "threads": loaded.backend.threads,
        "context": loaded.context,
        "kv": loaded.kv_form,
        "prompt_tokens": {"given": given, "used": given, "dropped": 0},
        "fallbacks": [],
        "seed": sampling.seed,
        "sampling": {
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "repeat_penalty": sampling.repeat_penalty,
        },
        "max_tokens": request.max_tokens,
        "stop": list(request.stops),
        "ignore_eos": request.ignore_eos,
        "raw": prompting.raw,
        "template": _template(loaded, prompting),
        "system": prompting.system,
        "prefill": request.opening,
        "finish_reason": result.answer.finish.value,
        "timings": timings(result),
        "versions": versions(),
    }


def usage(result: Result) -> Json:
    """Tokens, counted by id; those of the prompt as given, whether they were computed or not."""
    stats = result.answer.stats
    return {
        "prompt_tokens": len(result.request.prompt.ids),
        "cached_tokens": stats.cached_tokens if stats else 0,
        "generated_tokens": stats.generated_tokens if stats else 0,
        "context": result.loaded.context,
    }


def timings(result: Result) -> Json:
    """Milliseconds and speeds; null where too few values were measured."""
    times, stats = result.loaded.times, result.answer.stats
    load: Json = {"load_ms": times.total_ms, "load_parts_ms": dict(times.parts_ms)}
    if stats is None:
        return load
    cold_ns = sum(stage.duration_ns for stage in result.cold)
    itl = [gap / 1e6 for gap in stats.itl_ns]
    parts = stats.parts
    return {
        **load,
        "ttft_ms": stats.ttft_ns / 1e6,
        "ttft_parts_ms": {
            "tokenize": parts.tokenize_ns / 1e6,
            "handover": parts.handover_ns / 1e6,
            "lookup": parts.lookup_ns / 1e6,
            "prefill": parts.prefill_ns / 1e6,
            "sample": parts.sample_ns / 1e6,
        },
        "cold_ttft_ms": cold_ns / 1e6 if result.cold else None,
        "cold_parts_ms": {stage.name: stage.duration_ns / 1e6 for stage in result.cold} or None,
        "itl_ms": {
            "mean": mean(itl),
            "p50": percentile(itl, 50),
            "p95": percentile(itl, 95),
            "p99": percentile(itl, 99),
            "max": max(itl, default=None),
        },
        "prefill_tokens_per_s": stats.prefill_tokens_per_s,
        "decode_tokens_per_s": stats.decode_tokens_per_s,
        "wait_share": stats.wait_share,
    }


def versions() -> dict[str, str]:
    """llmrun, Python and the libraries that are installed; none of them is imported."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    found = {"llmrun": llmrun.__version__, "python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _template(loaded: LoadedModel, prompting: PromptFlags) -> str | None:
    """The file of ``--template``, ``model`` for the model's own, ``fallback``; None: ``--raw``."""
    if prompting.raw:
        return None
    if prompting.template is not None:
        return shortened(str(prompting.template.absolute()))
    return "fallback" if loaded.template_note else "model"


def shortened(path: str) -> str:
    """A path below the home folder as ``~/...``; other text as it is."""
    home = str(Path.home())
    inside = path == home or path.startswith(home.rstrip("/\\") + "/")
    return "~" + path[len(home) :] if inside and home != "/" else path
