"""The files other tools expect beside a model's weights, made from a GGUF's metadata."""

import json
from collections.abc import Mapping

from llmrun.text.template import gguf_template
from llmrun.text.tokenizer import gguf_tokenizer_json


def tokenizer_files(metadata: Mapping[str, object]) -> dict[str, bytes]:
    """tokenizer.json, tokenizer_config.json and, if the file has a template, chat_template.jinja.

    ModelFileError if the tokenizer in the metadata is damaged or of an unsupported kind.
    """
    tokens = metadata.get("tokenizer.ggml.tokens")
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": metadata.get("tokenizer.ggml.add_bos_token", False),
        "clean_up_tokenization_spaces": False,
    }
    for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("pad_token", "padding")):
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(token_id, int) and isinstance(tokens, list) and token_id < len(tokens):
            config[name] = tokens[token_id]
    files = {
        "tokenizer.json": gguf_tokenizer_json(metadata).encode(),
        "tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False).encode(),
    }
    template = gguf_template(metadata)
    if not template.is_fallback:
        files["chat_template.jinja"] = template.source.encode()
    return files
