"""The text side of a model: tokenizer, template, end ids, sampling, and the files they are in."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmrun.cli.generation import end_ids, read_generation_config, sampling_defaults
from llmrun.cli.source import Source
from llmrun.engine.sampler import SamplingOptions
from llmrun.errors import UsageError
from llmrun.text.folder_tokenizer import read_tokenizer_config
from llmrun.text.render_process import RenderProcess
from llmrun.text.template import (
    FALLBACK_STOPS,
    ChatTemplate,
    FoundTemplate,
    find_template,
    gguf_template,
)

if TYPE_CHECKING:
    from llmrun.text.tokenizer import Tokenizer

FALLBACK_NOTE = "the model has no chat template; a plain User/Assistant form is used"


@dataclass(frozen=True, eq=False)
class Conversation:
    """How a model is spoken to."""

    tokenizer: "Tokenizer"
    template: ChatTemplate
    stop_ids: frozenset[int]
    stops: tuple[str, ...]
    sampling: SamplingOptions
    template_note: str | None


def open_conversation(
    path: Path, source: Source, template_file: Path | None, process: RenderProcess | None = None
) -> Conversation:
    """Build tokenizer and template from a folder's files or a GGUF's metadata.

    ``process`` is to render the template. UsageError if ``template_file`` cannot be read;
    ModelFileError for damaged files.
    """
    from llmrun.text.tokenizer import Tokenizer  # while the weights are read

    if source.checkpoint.layout == "gguf":
        tokenizer = Tokenizer.from_gguf(source.checkpoint.config)
        generation: Mapping[str, object] = {}
        found = gguf_template(source.checkpoint.config)
    else:
        tokenizer = Tokenizer.from_folder(path)
        generation = read_generation_config(path)
        found = find_template(path, read_tokenizer_config(path))
    if template_file is not None:
        found = FoundTemplate(_read(template_file), str(template_file))
    template = ChatTemplate(
        found.source,
        _token(tokenizer, tokenizer.bos_id),
        _token(tokenizer, tokenizer.eos_id),
        given_by_user=template_file is not None,
        process=process,
    )
    return Conversation(
        tokenizer=tokenizer,
        template=template,
        stop_ids=end_ids(
            tokenizer.eos_ids,
            source.binding.config.get("eos_token_id"),
            generation.get("eos_token_id"),
        ),
        stops=FALLBACK_STOPS if found.is_fallback else (),
        sampling=sampling_defaults(generation),
        template_note=FALLBACK_NOTE if found.is_fallback else None,
    )


def _token(tokenizer: "Tokenizer", token_id: int | None) -> str | None:
    return None if token_id is None else tokenizer.token_text(token_id)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"the template {path} cannot be read: {error}", "give --template a UTF-8 text file"
        ) from error
