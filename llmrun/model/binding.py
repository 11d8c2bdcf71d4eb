"""Matching a checkpoint with a decoder, from headers alone.

The result says which tensor fills which parameter. It exists only if every tensor is used and
every parameter filled with the right shape; otherwise a ModelFileError names the tensors.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from llmrun.errors import ModelFileError
from llmrun.kernels.forms import Dense, Form, rows
from llmrun.kernels.host import DType
from llmrun.kernels.ops import Rope
from llmrun.model.architecture import Config, find, find_gguf
from llmrun.model.gguf import ROPE_FACTORS, canonical_name, half_split_rows
from llmrun.model.parameters import HEAD, Parameter, expected
from llmrun.model.rope import DEFAULT_THETA, llama3_parameters
from llmrun.model.spec import DecoderSpec

Shapes = Mapping[str, tuple[int, ...]]
RECOMPUTED = re.compile(r".*rotary_emb\.inv_freq$")
"""Buffers that older checkpoints store and that follow from the config."""


@dataclass(frozen=True)
class Binding:
    """A decoder's spec and where each of its parameters comes from.

    ``names``: checkpoint name to canonical name, in the checkpoint's order. ``parameters``: by
    canonical name. ``row_orders``: canonical names whose rows are gathered in another order.
    ``config``: the Hugging Face config of the same model, unless ``inexpressible`` says why none
    describes it. ``unused``: tensors left out on purpose, with the reason.
    """

    spec: DecoderSpec
    config: Config
    names: Mapping[str, str]
    parameters: Mapping[str, Parameter]
    row_orders: Mapping[str, list[int]]
    unused: Mapping[str, str]
    inexpressible: str | None = None

    def tensors(self, read: Callable[[str], Form]) -> Iterator[tuple[str, Form]]:
        """Read the parameters one at a time, under their canonical names."""
        for name, canonical in self.names.items():
            form = read(name)
            order = self.row_orders.get(canonical)
            yield canonical, form if order is None else rows(form, order)


def bind_huggingface(config: Config, shapes: Shapes) -> Binding:
    """Match a Hugging Face checkpoint (config.json and tensor shapes by name)."""
    spec = find(config.get("model_type")).spec(config)
    unused = {name: "recomputed from the config" for name in shapes if RECOMPUTED.match(name)}
    if spec.tied and HEAD in shapes:
        unused[HEAD] = "the config ties the head to the embedding"
    names = {name: name for name in shapes if name not in unused}
    return _matched(spec, config, names, shapes, {}, unused)


def bind_gguf(metadata: Config, shapes: Shapes, read: Callable[[str], Form]) -> Binding:
    """Match a GGUF file (metadata, tensor shapes by name); ``read`` serves small vectors."""
    arch, gguf = find_gguf(metadata.get("general.architecture"))
    config = gguf.config(metadata) | {"architectures": [arch.class_names[0]]}
    names = {name: canonical_name(name) for name in shapes if name != ROPE_FACTORS}
    config["tie_word_embeddings"] = HEAD not in names.values()
    biased = any(name.endswith("self_attn.q_proj.bias") for name in names.values())
    if biased and arch.model_type == "llama":
        config["attention_bias"] = True
    spec = arch.spec(config)
    inexpressible = None
    if ROPE_FACTORS in shapes:
        scaled = _scaled(spec.layers[0].rope, read(ROPE_FACTORS))
        theta = config.pop("rope_theta", DEFAULT_THETA)
        parameters = llama3_parameters(float(str(theta)), scaled)
        if parameters is None:
            inexpressible = f"its {ROPE_FACTORS} tensor is of no published kind"
            layers = tuple(replace(layer, rope=Rope(scaled)) for layer in spec.layers)
            spec = replace(spec, layers=layers)
        else:
            config["rope_parameters"] = parameters
            spec = arch.spec(config)
    orders = {}
    if gguf.interleaved:
        for part, n_heads in (("q", spec.heads.n_heads), ("k", spec.heads.n_kv_heads)):
            order = half_split_rows(n_heads, spec.heads.head_dim)
            for layer in range(len(spec.layers)):
                for kind in ("weight", "bias"):
                    orders[f"model.layers.{layer}.self_attn.{part}_proj.{kind}"] = order
    matched = _matched(spec, config, names, shapes, orders, {})
    return replace(matched, inexpressible=inexpressible)


def _matched(
    spec: DecoderSpec,
    config: Config,
    names: Mapping[str, str],
    shapes: Shapes,
    row_orders: Mapping[str, list[int]],
    unused: Mapping[str, str],
) -> Binding:
    parameters = expected(spec)
    surplus = sorted(name for name, canonical in names.items() if canonical not in parameters)
    missing = sorted(parameters.keys() - set(names.values()))
    wrong = [
        f"{name} is {shapes[name]}, expected {parameters[canonical].shape}"
        for name, canonical in names.items()
        if canonical in parameters and tuple(shapes[name]) != parameters[canonical].shape
    ]
    faults = [
        f"{label}: {_some(items)}"
        for label, items in (
            ("not used by this architecture", surplus),
            ("missing", missing),
            ("of the wrong shape", wrong),
        )
        if items
    ]
    if faults:
        raise ModelFileError(
            f"the checkpoint does not match its config; tensors {'; '.join(faults)}",
            "the files are damaged, incomplete or of a variant llmrun does not know; "
            "`llmrun pull` fetches them again",
        )
    return Binding(spec, config, names, parameters, row_orders, unused)


def _scaled(rope: Rope | None, factors: Form) -> tuple[float, ...]:
    if rope is None or not isinstance(factors, Dense) or factors.w.dtype is not DType.F32:
        raise _bad_factors(f"it is {factors.kind} {factors.shape}, expected f32")
    values = factors.w.data.cast("B").cast("f").tolist()
    if len(values) != len(rope.inv_freq) or not all(0 < v < math.inf for v in values):
        raise _bad_factors(f"expected {len(rope.inv_freq)} positive numbers")
    return tuple(f / d for f, d in zip(rope.inv_freq, values, strict=True))


def _bad_factors(why: str) -> ModelFileError:
    return ModelFileError(f"the tensor {ROPE_FACTORS} is damaged: {why}", "download it again")


def _some(items: list[str]) -> str:
    shown = ", ".join(items[:5])
    return shown if len(items) <= 5 else f"{shown} and {len(items) - 5} more"
