"""What GGUF files share across architectures: tensor names and metadata keys.

Keys and names as in the GGUF specification of the ggml project. A file's metadata becomes the
config a Hugging Face checkpoint of the same model would have; keys that nobody reads are refused.
"""

import math
from collections.abc import Callable, Mapping

from llmrun.errors import ModelFileError
from llmrun.kernels.forms import Dense, Form
from llmrun.kernels.host import DType
from llmrun.model.config import positive_integer
from llmrun.model.rope import DEFAULT_THETA, llama3_parameters
from llmrun.model.windows import FULL, SLIDING, every_nth_full

Config = Mapping[str, object]

ROPE_FACTORS = "rope_freqs.weight"
"""A vector that divides the rotary frequencies: how GGUF files carry Llama 3's scaling."""

LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
"""Two such vectors, for sequences beyond and within the trained length (LongRoPE)."""

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output_norm.bias": "model.norm.bias",
    "output.weight": "lm_head.weight",
}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_sinks.weight": "self_attn.sinks",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}


class GgufFile:
    """A GGUF's metadata and small tensors, as an architecture file reads them.

    ``names``: what its files call a layer's tensors differently from the names above. Keys are
    given without the architecture's prefix. ``finish`` refuses keys nobody took. ``consumed``:
    tensors that became part of the config. ``inexpressible``: why no published config says the
    same as this file.
    """

    def __init__(
        self,
        metadata: Config,
        shapes: Mapping[str, tuple[int, ...]],
        read: Callable[[str], Form],
        names: Mapping[str, str],
    ) -> None:
        self.metadata = metadata
        self.shapes = shapes
        self.consumed: set[str] = set()
        self.inexpressible: str | None = None
        self._read = read
        self._names = {**_BLOCK, **names}
        self._prefix = f"{metadata['general.architecture']}."
        self._taken: set[str] = set()

    def take(self, key: str, default: object = None) -> object:
        """The value of a key, or ``default``."""
        self._taken.add(key)
        return self.metadata.get(self._prefix + key, default)

    def move(self, config: dict[str, object], keys: Mapping[str, str]) -> None:
        """Give the values of the keys that are there to a config, under its names for them."""
        for key, name in keys.items():
            value = self.take(key)
            if value is not None:
                config[name] = value

    def expect(self, key: str, *supported: object) -> None:
        """ModelFileError if a key is there with another value than these."""
        value = self.take(key)
        if value is not None and value not in supported:
            raise ModelFileError(
                f"the file says {self._prefix}{key} = {value!r}; llmrun supports {supported[0]!r}",
                "use another file of this model, or its safetensors version",
            )

    def finish(self) -> None:
        """ModelFileError for keys of the architecture that nobody took: they may change the
        mathematics."""
        mine = {key for key in self.metadata if key.startswith(self._prefix)}
        unknown = sorted(mine - {self._prefix + key for key in self._taken})
        if unknown:
            names = ", ".join(f"{key} = {self.metadata[key]!r}" for key in unknown)
            raise ModelFileError(
                f"the file has keys llmrun does not know: {names}",
                "they may change the computation, so the model is not loaded; "
                "a newer llmrun may know them",
            )

    def floats(self, name: str, count: int) -> tuple[float, ...] | None:
        """The numbers of an f32 vector that belongs to the config; None if it is not there.

        ModelFileError unless they are ``count`` positive numbers.
        """
        if name not in self.shapes:
            return None
        self.consumed.add(name)
        form = self._read(name)
        if not isinstance(form, Dense) or form.w.dtype is not DType.F32:
            raise _damaged(name, f"it is {form.kind} {form.shape}, expected f32")
        values = tuple(form.w.data.cast("B").cast("f").tolist())
        if len(values) != count or not all(0 < value < math.inf for value in values):
            raise _damaged(name, f"expected {count} positive numbers")
        return values

    def published_name(self, name: str) -> str:
        """The Hugging Face name of a tensor; an unknown name comes back unchanged."""
        if name in _TOP:
            return _TOP[name]
        parts = name.split(".")
        if len(parts) != 4 or parts[0] != "blk":
            return name
        whole = f"{parts[2]}.{parts[3]}"
        if whole in self._names:
            return f"model.layers.{parts[1]}.{self._names[whole]}"
        if parts[2] in self._names:
            return f"model.layers.{parts[1]}.{self._names[parts[2]]}.{parts[3]}"
        return name


_CONFIG_KEYS = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "context_length": "max_position_embeddings",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
}


def common_config(file: GgufFile, model_type: str) -> dict[str, object]:
    """The part of a Hugging Face config that all architectures share, rotation included.

    ModelFileError for values that do not fit together or are not supported.
    """
    config: dict[str, object] = {"model_type": model_type}
    file.move(config, _CONFIG_KEYS)
    embedding = file.shapes.get("token_embd.weight")
    if "vocab_size" not in config and embedding:
        config["vocab_size"] = embedding[0]
    for name, key in (("bos_token_id", "bos"), ("eos_token_id", "eos")):
        token_id = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            config[name] = token_id
    config["tie_word_embeddings"] = "output.weight" not in file.shapes
    head_dim = head_dim_of(config)
    file.expect("attention.value_length", head_dim)
    rotated = positive_integer(file.take("rope.dimension_count", head_dim))
    if rotated is not None and rotated != head_dim:
        config["partial_rotary_factor"] = rotated / head_dim
    rope = _rope(file, config, rotated or head_dim)
    if rope is not None:
        config["rope_parameters"] = rope
        config.pop("rope_theta", None)
    return config


def read_windows(
    file: GgufFile, config: dict[str, object], pattern: int | None = None
) -> dict[str, object]:
    """The ``sliding_window`` of a file and, if it has one, its ``layer_types``.

    ``pattern``: every how many layers one sees everything where the file does not say; None: the
    file has no pattern and all layers slide.
    """
    window = positive_integer(file.take("attention.sliding_window"))
    n_layers = positive_integer(config.get("num_hidden_layers")) or 0
    given = file.take("attention.sliding_window_pattern", pattern)
    if window is None or given is None:
        return {"sliding_window": window}
    every = positive_integer(given)
    types = every_nth_full(n_layers, every) if every else None
    if isinstance(given, list):
        types = [SLIDING if slides else FULL for slides in given]
    if types is None:
        file.expect("attention.sliding_window_pattern", pattern)
    return {"sliding_window": window, "layer_types": types}


def head_dim_of(config: Config) -> int:
    """The size of a head, from a config that may leave it out."""
    given = positive_integer(config.get("head_dim"))
    hidden, n_heads = (
        positive_integer(config.get(key)) for key in ("hidden_size", "num_attention_heads")
    )
    return given or ((hidden or 1) // (n_heads or 1)) or 1


def _rope(file: GgufFile, config: Config, rotated: int) -> dict[str, object] | None:
    """``rope_parameters`` of a scaled rotation; None for a plain one."""
    theta = config.get("rope_theta", DEFAULT_THETA)
    factors = file.floats(ROPE_FACTORS, rotated // 2)
    if factors is not None:
        parameters = llama3_parameters(float(str(theta)), factors)
        if parameters is None:
            file.inexpressible = f"its {ROPE_FACTORS} tensor is of no published kind"
            parameters = {"rope_type": "divided", "rope_theta": theta, "factors": list(factors)}
        return parameters
    kind, factor = file.take("rope.scaling.type"), file.take("rope.scaling.factor")
    original = file.take("rope.scaling.original_context_length")
    file.take("rope.scaling.finetuned")  # says how the model was trained, not how it computes
    if LONG_FACTORS in file.shapes or SHORT_FACTORS in file.shapes:
        return _longrope(file, rotated) | {
            "rope_theta": theta,
            "original_max_position_embeddings": original,
        }
    if kind in (None, "none") or (kind == "linear" and factor == 1.0):
        if factor not in (None, 1.0):
            file.expect("rope.scaling.factor", 1.0)  # a factor of no kind
        return None
    parameters = {"rope_type": kind, "rope_theta": theta, "factor": factor}
    if kind == "yarn":
        parameters["original_max_position_embeddings"] = original
        file.move(
            parameters,
            {
                "rope.scaling.yarn_attn_factor": "attention_factor",
                "rope.scaling.yarn_beta_fast": "beta_fast",
                "rope.scaling.yarn_beta_slow": "beta_slow",
            },
        )
    elif kind != "linear":
        file.expect("rope.scaling.type", "none", "linear", "yarn")
    return parameters


def _longrope(file: GgufFile, rotated: int) -> dict[str, object]:
    parameters: dict[str, object] = {"rope_type": "longrope"}
    file.expect("rope.scaling.type", "longrope")  # Phi 3's files leave it out
    for name, key in ((LONG_FACTORS, "long_factor"), (SHORT_FACTORS, "short_factor")):
        factors = file.floats(name, rotated // 2)
        if factors is None:
            raise _damaged(name, "it is not there, only its other half is")
        parameters[key] = list(factors)
    file.move(parameters, {"rope.scaling.attn_factor": "attention_factor"})
    return parameters


def _damaged(name: str, why: str) -> ModelFileError:
    return ModelFileError(f"the tensor {name} is damaged: {why}", "download it again")
