"""Where a written checkpoint comes from and how it was made, for programs and for people.

The same facts go into llmrun.json, into the header of every shard and into the model card. There
are no times, machines or numbers of threads among them: same input, same bytes.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from llmrun.formats.layout import Layout
from llmrun.formats.planned import Writing
from llmrun.formats.portable import violations

CARD_NAME = "README.md"
_MOST_RULES = 3
_MOST_CARD_BYTES = 1 << 20
_FIELD = re.compile(r"(license|license_name|license_link):[ \t]*([^\r\n]{1,200})")


@dataclass(frozen=True)
class Provenance:
    """What made a checkpoint.

    ``tool``: llmrun's version. ``model``, ``revision``: the source as its publisher names it;
    ``files``: its files, each with bytes and, where somebody took it, sha256. ``scheme``: what was
    asked for; ``recipe``: everything else that changes the result, as JSON. ``calibration``: the
    text that importance was measured on, with the ``sha256`` of its token ids.
    ``requantized_from``: how the source was quantized. ``license``: the source's own words.
    """

    tool: str
    model: str
    revision: str | None
    files: Mapping[str, Mapping[str, object]]
    scheme: str
    recipe: Mapping[str, object]
    calibration: Mapping[str, object] | None = None
    requantized_from: str | None = None
    license: Mapping[str, str] | None = None

    @property
    def document(self) -> dict[str, object]:
        """The facts as llmrun.json holds them."""
        return {
            "llmrun": self.tool,
            "source": {
                "model": self.model,
                "revision": self.revision,
                "license": self.license,
                "files": dict(sorted(self.files.items())),
            },
            "scheme": self.scheme,
            "requantized_from": self.requantized_from,
            "calibration": self.calibration,
            **self.recipe,
        }

    @property
    def metadata(self) -> dict[str, str]:
        """The facts as a safetensors header can hold them: words only."""
        facts = {
            "llmrun": self.tool,
            "source": self.model,
            "revision": self.revision,
            "scheme": self.scheme,
            "calibration": self._calibration_hash,
        }
        return {"format": "pt", **{key: fact for key, fact in facts.items() if fact}}

    @property
    def _calibration_hash(self) -> str:
        return str((self.calibration or {}).get("sha256") or "")


def license_of(folder: Path) -> dict[str, str] | None:
    """Return what the card of a model's folder says about its licence; None if it says nothing."""
    path = folder / CARD_NAME
    if not path.is_file() or path.stat().st_size > _MOST_CARD_BYTES:
        return None
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    if not lines or lines[0].strip() != "---":
        return None
    found: dict[str, str] = {}
    for line in lines[1:]:
        if line.strip() == "---":
            return found or None
        field = _FIELD.fullmatch(line.rstrip())
        if field is not None:
            found[field[1]] = field[2].strip().strip("'\"")
    return None


def model_card(provenance: Provenance, layout: Layout) -> bytes:
    """Return the README.md of a checkpoint: what it is and what loads it."""
    title = provenance.model.rpartition("/")[2]
    card = [
        *_front_matter(provenance, layout.writing),
        f"# {title}, {provenance.scheme}",
        "",
        f"Weights of `{provenance.model}`{_at(provenance.revision)}, quantized by "
        f"llmrun {provenance.tool}.",
        "",
        *_contents(provenance, layout),
        "",
        "## Loading",
        "",
        *_loading(layout),
    ]
    return ("\n".join(card) + "\n").encode()


def _front_matter(provenance: Provenance, writing: Writing | None) -> list[str]:
    lines = [f"{key}: {_quoted(value)}" for key, value in (provenance.license or {}).items()]
    if re.fullmatch(r"[\w.-]+/[\w.-]+", provenance.model):
        lines += [f"base_model: {provenance.model}", "base_model_relation: quantized"]
    if writing is not None and "transformers" in writing.readers:
        lines.append("library_name: transformers")
    return ["---", *lines, "---", ""] if lines else []


def _quoted(value: str) -> str:
    return value if re.fullmatch(r"[\w.-]+", value) else '"' + re.sub(r'["\\]', "", value) + '"'


def _at(revision: str | None) -> str:
    return f" at revision `{revision}`" if revision else ""


def _contents(provenance: Provenance, layout: Layout) -> list[str]:
    kinds = Counter(tensor.kind for tensor in layout.planned if not tensor.is_plain)
    lines = [f"- {count} weights as {kind}" for kind, count in sorted(kinds.items())]
    lines.append("- norms, biases, embedding and head in 16 bits or more, if not listed above")
    if provenance.requantized_from:
        lines.append(f"- the source was quantized already ({provenance.requantized_from})")
    digest = (provenance.calibration or {}).get("sha256")
    if digest:
        lines.append(
            f"- weighted by what the layers see when they read token ids of sha256 `{digest}`"
        )
    return [*lines, "- `llmrun.json` lists every tensor, its bits per weight and its error"]


def _loading(layout: Layout) -> list[str]:
    writing = layout.writing
    lines = ["- llmrun: `llmrun chat DIR`"]
    if writing is None:
        return [*lines, "- any program that reads safetensors"]
    if "vLLM" in writing.readers:
        lines += [_by_vllm(layout), *_by_transformers(layout)]
    elif "transformers" in writing.readers:
        lines.append(f"- transformers, with the package bitsandbytes: {_call()}")
    else:
        lines.append("- nothing else: no other program knows this format")
    return lines


def _by_vllm(layout: Layout) -> str:
    broken = [found for found in violations(layout.planned) if found.program == "vLLM"]
    if not broken:
        return "- vLLM: `vllm serve DIR`"
    rules = "; ".join(sorted({found.problem for found in broken})[:_MOST_RULES])
    return f"- vLLM may refuse it, by the rules in its sources: {rules}"


def _by_transformers(layout: Layout) -> list[str]:
    """transformers (5.24) reads zero points only where it opens weights while loading, and then
    of one kind only; experts of all layers have one scheme for it."""
    quantized = [tensor for tensor in layout.planned if not tensor.is_plain]
    kinds = {tensor.kind for tensor in quantized}
    shifted = any(kind.endswith("+zero") for kind in kinds)
    experts = {tensor.kind for tensor in quantized if tensor.is_expert}
    if (shifted and len(kinds) > 1) or len(experts) > 1:
        return ["- transformers does not read this mix of weights"]
    how = ", quantization_config=CompressedTensorsConfig(dequantize=True)" if shifted else ""
    return [
        f"- transformers, with the package compressed-tensors: {_call(how)}. It decompresses the "
        "weights, so it needs the memory of a 16-bit model"
    ]


def _call(more: str = "") -> str:
    return f'`AutoModelForCausalLM.from_pretrained("DIR"{more})`'
