"""The receipt of an answer: what made it, so that it can be made again; and ``--json``.

Keys are an interface. Paths below the user's home start with ``~``. ``fallbacks`` and ``dropped``
are here to be read: nothing is replaced or dropped without the user having asked for it.
"""

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import llmrun
from llmrun.cli.answer import Answer, Request
from llmrun.cli.assemble import LoadedModel
from llmrun.measure.statistics import RequestStats, mean, percentile

LIBRARIES = ("torch", "tokenizers", "bitsandbytes", "jinja2", "huggingface-hub", "safetensors")

Json = dict[str, object]


def answer_json(loaded: LoadedModel, request: Request, answer: Answer) -> Json:
    """The object ``run --json`` prints."""
    return {
        "text": answer.text,
        "finish_reason": answer.finish.value,
        "usage": usage(loaded, answer.stats),
        "timings": timings(loaded, answer.stats),
        "receipt": receipt(loaded, request, answer),
    }


def receipt(loaded: LoadedModel, request: Request, answer: Answer) -> Json:
    """What made this answer."""
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
        "finish_reason": answer.finish.value,
        "timings": timings(loaded, answer.stats),
        "versions": versions(),
    }


def usage(loaded: LoadedModel, stats: RequestStats | None) -> Json:
    """Tokens, counted by id."""
    return {
        "prompt_tokens": stats.prompt_tokens if stats else 0,
        "cached_tokens": stats.cached_tokens if stats else 0,
        "generated_tokens": stats.generated_tokens if stats else 0,
        "context": loaded.context,
    }


def timings(loaded: LoadedModel, stats: RequestStats | None) -> Json:
    """Milliseconds and speeds; null where too few values were measured."""
    load: Json = {"load_ms": loaded.times.total_ms, "load_parts_ms": dict(loaded.times.parts_ms)}
    if stats is None:
        return load
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
    found = {"llmrun": llmrun.__version__, "python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def shortened(path: str) -> str:
    """A path below the home folder as ``~/...``; other text as it is."""
    home = str(Path.home())
    inside = path == home or path.startswith(home.rstrip("/\\") + "/")
    return "~" + path[len(home) :] if inside and home != "/" else path
