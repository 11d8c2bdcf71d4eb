"""Messages or raw text become prompt ids.

Control strings in anybody's words are defused before the template is rendered, so only the
template's own markers become control ids. A prompt starts with exactly one BOS where the template
or the tokenizer wants one, checked on ids.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime

from llmrun.errors import UsageError
from llmrun.text.message import Message
from llmrun.text.template import ChatTemplate
from llmrun.text.tokenizer import Tokenizer

__all__ = ["Message", "encode_chat", "encode_raw"]

# Some templates build their markers from the role, so a role must not be free text.
_ROLES = frozenset(["system", "user", "assistant", "tool", "developer"])


def encode_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Message],
    continue_text: str = "",
    extra: Mapping[str, object] | None = None,
    now: datetime | None = None,
) -> list[int]:
    """Prompt ids up to where the assistant's answer starts; ``continue_text`` begins the answer.

    ``extra`` are further template variables; ``now``, where answers must be the same tomorrow, the
    time that templates are told. UsageError for messages the template refuses or an
    unknown role, ModelFileError for a template that does not work.
    """
    defused = [_defused(tokenizer, message) for message in messages]
    text = template.render(defused, add_generation_prompt=True, extra=extra or {}, now=now)
    text += tokenizer.specials.defuse(continue_text, own_words=True)
    return _with_one_bos(tokenizer, tokenizer.encode_rendered(text))


def encode_raw(tokenizer: Tokenizer, text: str) -> list[int]:
    """Prompt ids of ``text`` without a template; control strings in it become control ids."""
    return _with_one_bos(tokenizer, tokenizer.encode_with_specials(text))


def _defused(tokenizer: Tokenizer, message: Message) -> Message:
    if message.role not in _ROLES:
        raise UsageError(
            f"A message has the unknown role {message.role[:40]!r}.",
            f"Use one of: {', '.join(sorted(_ROLES))}.",
        )
    own_words = message.role == "assistant"
    return Message(message.role, tokenizer.specials.defuse(message.content, own_words=own_words))


def _with_one_bos(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    bos = tokenizer.bos_id
    if bos is None:
        return ids
    start = 0
    while ids[start : start + 2] == [bos, bos]:
        start += 1
    ids = ids[start:]
    if tokenizer.add_bos and ids[:1] != [bos]:
        return [bos, *ids]
    return ids
