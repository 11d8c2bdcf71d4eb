"""StarCoder 2: LayerNorm with biases, biases in every projection, an MLP without a gate.

Reference: ``Starcoder2ForCausalLM`` in transformers (Lozhkov et al. 2024).
"""

from dataclasses import replace

from llmrun.model.architecture import Architecture, Config, GgufForm
from llmrun.model.config import HARMLESS, ConfigReader
from llmrun.model.gguf import GgufFile, common_config
from llmrun.model.layout import Layout, Place
from llmrun.model.llama_family import TINY, Defaults, read_spec
from llmrun.model.spec import DecoderSpec
from llmrun.model.windows import windowed

MODEL_TYPE = "starcoder2"

PUBLISHED_WINDOW = 4096
"""The window of all published sizes, which their GGUF files leave out."""


def spec(config: Config) -> DecoderSpec:
    """Read a StarCoder 2 config. ModelFileError names what is not supported."""
    reader = ConfigReader(config)
    bias = reader.flag("use_bias", True)
    reader.pinned("mlp_type", "default")
    reader.pinned("norm_type", "layer_norm")
    window = reader.optional_integer("sliding_window")
    defaults = Defaults(
        kv_heads=2,
        positions=4096,
        eps=1e-5,
        eps_key="norm_epsilon",
        activation="gelu_pytorch_tanh",
        tied=True,
    )
    result = read_spec(reader, MODEL_TYPE, defaults)
    reader.finish(HARMLESS | {"embedding_dropout"})
    return replace(
        windowed(result, [window] * len(result.layers)),
        norm=replace(result.norm, centered=True, bias=True),
        gated=False,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
    )


def _gguf_config(file: GgufFile) -> dict[str, object]:
    config = common_config(file, MODEL_TYPE)
    file.move(config, {"attention.layer_norm_epsilon": "norm_epsilon"})
    config["use_bias"] = "blk.0.attn_q.bias" in file.shapes
    return config | {"sliding_window": PUBLISHED_WINDOW}


_STARCODER2 = {key: value for key, value in TINY.items() if key != "rms_norm_eps"} | {
    "model_type": MODEL_TYPE
}

ARCH = Architecture(
    model_type=MODEL_TYPE,
    class_names=("Starcoder2ForCausalLM",),
    spec=spec,
    tiny=(
        _STARCODER2 | {"tie_word_embeddings": True, "norm_epsilon": 1e-4},
        _STARCODER2 | {"sliding_window": 20, "use_bias": False, "num_key_value_heads": 1},
    ),
    layout=Layout({"mlp.c_fc": Place(("mlp.up_proj",)), "mlp.c_proj": Place(("mlp.down_proj",))}),
    gguf=GgufForm(
        "starcoder2", _gguf_config, names={"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
    ),
)
