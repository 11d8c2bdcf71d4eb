"""The files other tools expect beside a model's weights, made from a GGUF's metadata."""

import json
from collections.abc import Mapping

from llmrun.text.gguf_tokenizer import GgufVocabulary, read_gguf_vocabulary
from llmrun.text.template import gguf_template
from llmrun.text.tokenizer import gguf_tokenizer_json


def tokenizer_files(metadata: Mapping[str, object]) -> dict[str, bytes]:
    """tokenizer.json, tokenizer_config.json, generation_config.json (BOS and all ids that end an
    answer) and, if the file has a template, chat_template.jinja.

    ModelFileError if the tokenizer in the metadata is damaged or of an unsupported kind.
    """
    gguf = read_gguf_vocabulary(metadata)
    files = {
        "tokenizer.json": gguf_tokenizer_json(gguf).encode(),
        "tokenizer_config.json": _json(
            _tokenizer_config(gguf, metadata.get("tokenizer.ggml.padding_token_id"))
        ),
        "generation_config.json": _json(_generation_config(gguf)),
    }
    template = gguf_template(metadata)
    if not template.is_fallback:
        files["chat_template.jinja"] = template.source.encode()
    return files


def _tokenizer_config(gguf: GgufVocabulary, padding_id: object) -> dict[str, object]:
    texts = {token_id: text for text, token_id in gguf.vocabulary.items()}
    named = {
        "bos_token": texts.get(gguf.bos_id) if gguf.bos_id is not None else None,
        "eos_token": texts.get(gguf.eos_id) if gguf.eos_id is not None else None,
        "unk_token": gguf.unknown,
        "pad_token": texts.get(padding_id) if isinstance(padding_id, int) else None,
    }
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": gguf.add_bos,
        "clean_up_tokenization_spaces": False,
        **{name: text for name, text in named.items() if text is not None},
    }


def _generation_config(gguf: GgufVocabulary) -> dict[str, object]:
    config: dict[str, object] = {}
    if gguf.bos_id is not None:
        config["bos_token_id"] = gguf.bos_id
    if gguf.eos_ids:
        config["eos_token_id"] = sorted(gguf.eos_ids)
    return config


def _json(value: Mapping[str, object]) -> bytes:
    return json.dumps(value, indent=2, ensure_ascii=False).encode()
