"""Text to token ids and back; the only file that imports ``tokenizers``.

``encode_plain`` never yields a control id, whatever the text holds, and equals the reference for
text without special strings. ``encode_with_specials`` parses them. No encoding adds a BOS here:
prompts decide that. Decoding goes through bytes (spelling.py), so streams equal whole decodes.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from llmrun.errors import LlmrunError, ModelFileError, UsageError
from llmrun.text import limits
from llmrun.text.decode_input import REPLACEMENT
from llmrun.text.folder_tokenizer import TokenizerFacts, is_marker, read_facts, read_limited
from llmrun.text.gguf_tokenizer import GgufVocabulary, read_gguf_vocabulary
from llmrun.text.specials import BREAK, Special, Specials
from llmrun.text.spelling import Spelling, TextStream, read_spelling
from llmrun.text.splits import Split, Step

# Stands before a span that does not start the text, for tokenizers that put a space before the
# very first word only. A noncharacter: never part of real text.
_NOT_FIRST = "\ufdd1"


class Tokenizer:
    """One model's tokenizer.

    ``n_ids``: ids run below this. ``eos_id``: the end of sequence the files name, for templates;
    ``eos_ids``: all ids of the tokenizer that end an answer.
    ``special_tokens``: every control string and its id; ``special_ids`` their ids. ``hidden_ids``:
    those left out of answers (``<think>`` is special but not hidden). ``add_bos``: the reference
    puts ``bos_id`` before a text. ``specials``: finds control strings in text.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        spelling: Spelling,
        bos_id: int | None,
        eos_id: int | None,
        eos_ids: frozenset[int],
        add_bos: bool,
    ) -> None:
        added = backend.get_added_tokens_decoder()
        self.n_ids = max([backend.get_vocab_size(with_added_tokens=True) - 1, *added]) + 1
        if self.n_ids > limits.VOCABULARY_IDS or len(added) > limits.ADDED_TOKENS:
            raise _refused(f"{self.n_ids} ids and {len(added)} added tokens are over the limit")
        self.bos_id = bos_id
        self.eos_id = eos_id
        self.eos_ids = eos_ids
        self.add_bos = add_bos and bos_id is not None
        self.specials = Specials(_control_tokens(added))
        self.special_tokens: Mapping[str, int] = {
            text: special.id for text, special in self.specials.tokens.items()
        }
        self.special_ids = frozenset(self.special_tokens.values())
        self.hidden_ids = frozenset(s.id for s in self.specials.tokens.values() if s.hidden)
        self._backend = backend
        self._spelling = spelling
        self._unknown = _unknown_token(backend)
        self._unknown_id = -1 if self._unknown is None else backend.token_to_id(self._unknown)
        self._never_plain = self.special_ids - {self._unknown_id}
        self._first_differs = b'"Metaspace"' in _state(backend.pre_tokenizer)
        _hide_specials(backend, self.special_tokens, self._first_differs)

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer":
        """Reads tokenizer.json, tokenizer_config.json and special_tokens_map.json of ``folder``.

        ModelFileError if a file is damaged, over a limit or of an unsupported kind.
        """
        data = read_limited(folder / "tokenizer.json", limits.TOKENIZER_FILE_BYTES)
        facts = read_facts(folder)
        with _library_errors():
            backend = tokenizers.Tokenizer.from_buffer(data)
            backend.no_truncation()
            backend.no_padding()
            kind = type(backend.model).__name__
            if kind not in ("BPE", "Unigram"):
                raise _refused(f"its model is {kind}; llmrun reads BPE and Unigram")
            _add_missing(backend, facts)
            spelling = read_spelling(json.loads(_state(backend.decoder)))
            bos_id = backend.token_to_id(facts.bos) if facts.bos else None
            eos_id = backend.token_to_id(facts.eos) if facts.eos else None
            add_bos = facts.add_bos
            if add_bos is None:  # older files say it by what they put before a text
                add_bos = backend.encode("").ids[:1] == [bos_id]
            eos_ids = frozenset() if eos_id is None else frozenset([eos_id])
            return cls(backend, spelling, bos_id, eos_id, eos_ids, add_bos)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object]) -> "Tokenizer":
        """Builds the tokenizer of a GGUF from its metadata (``tokenizer.ggml.*``, full arrays).

        ModelFileError if it is damaged or of an unsupported kind.
        """
        gguf = read_gguf_vocabulary(metadata)
        with _library_errors():
            backend = _gguf_backend(gguf)
            spelling = read_spelling(json.loads(_state(backend.decoder)))
            return cls(backend, spelling, gguf.bos_id, gguf.eos_id, gguf.eos_ids, gguf.add_bos)

    def encode_plain(self, text: str) -> list[int]:
        """Ids of ``text`` as ordinary words: special strings in it become ordinary pieces.

        UsageError in the one case where that cannot be: a control token of a single character.
        """
        return self._encode_span(text, first=True)

    def encode_with_specials(self, text: str) -> list[int]:
        """Ids of ``text`` with special strings parsed, as for ``--raw``."""
        return self.encode_rendered(text.replace(BREAK, REPLACEMENT))

    def encode_rendered(self, text: str) -> list[int]:
        """As ``encode_with_specials``, but strings that ``specials.defuse`` broke stay words."""
        ids: list[int] = []
        for part in self.specials.split(text):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids.extend(self._encode_span(part, first=not ids))
        return ids

    def unencodable(self, text: str) -> frozenset[str]:
        """The characters of ``text`` that the vocabulary cannot spell, so that ids leave them out.

        Cheap: only characters with a byte that has no token are looked at closely.
        """
        if not self._missing_bytes:
            return frozenset()
        return frozenset(
            character
            for character in set(text)
            if not self._missing_bytes.isdisjoint(character.encode("utf-8", "replace"))
            and self._loses(character)
        )

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of ``ids``; ``skip_special`` leaves the hidden ones out."""
        stream = self.text_stream()
        pieces = [
            stream.push(self.token_text(token_id))
            for token_id in ids
            if not (skip_special and token_id in self.hidden_ids)
        ]
        return "".join(pieces) + stream.flush()

    def text_stream(self) -> TextStream:
        """A fresh decoder from token strings to text."""
        return TextStream(self._spelling)

    def token_text(self, token_id: int) -> str:
        """The token as the vocabulary spells it (``Ġthe``, ``▁the``, ``<0x0A>``).

        Empty for an id without a token, such as the padding rows of an embedding.
        """
        token = self._backend.id_to_token(token_id)
        return "" if token is None or token == _NOT_FIRST else token

    @cached_property
    def _missing_bytes(self) -> frozenset[int]:
        return self._spelling.missing_bytes(lambda t: self._backend.token_to_id(t) is not None)

    def _loses(self, character: str) -> bool:
        """Whether ``character`` is unknown or, between two others, dropped or damaged."""
        if self._unknown_id in self._library_encode(character, first=True):
            return True
        with_it, without = (
            self.decode(self._library_encode(text, first=True), skip_special=False)
            for text in (f"a{character}a", "aa")
        )
        return with_it == without or (REPLACEMENT in with_it and character != REPLACEMENT)

    def _encode_span(self, text: str, *, first: bool) -> list[int]:
        ids = self._library_encode(text, first)
        unknown = self._unknown_id in ids and str(self._unknown) in text
        if self._never_plain.isdisjoint(ids) and not unknown:
            return ids
        # Some vocabularies hold their control strings as ordinary pieces too. Cut inside each.
        ids, position = [], 0
        for place in [start + 1 for start, _ in self.specials.find(text)] + [len(text)]:
            ids += self._library_encode(text[position:place], first and position == 0)
            position = place
        if not self._never_plain.isdisjoint(ids):
            raise UsageError(
                "The text holds a character that this model has only as a control token.",
                "Leave the character out, or use --raw to send control tokens on purpose.",
            )
        return ids

    def _library_encode(self, text: str, first: bool) -> list[int]:
        if not self._first_differs:
            return self._backend.encode(text, add_special_tokens=False).ids
        text = text.replace(_NOT_FIRST, REPLACEMENT)
        if first:
            return self._backend.encode(text, add_special_tokens=False).ids
        return self._backend.encode(_NOT_FIRST + text, add_special_tokens=False).ids[1:]


def _control_tokens(added: Mapping[int, AddedToken]) -> dict[str, Special]:
    return {
        token.content: Special(token_id, token.special, token.lstrip, token.rstrip)
        for token_id, token in added.items()
        if token.content and (token.special or is_marker(token.content))
    }


def _hide_specials(
    backend: tokenizers.Tokenizer, special_tokens: Iterable[str], first_differs: bool
) -> None:
    """From here on the library reads special strings as words; Specials finds the real ones."""
    backend.add_special_tokens([AddedToken(t, normalized=False) for t in special_tokens])
    backend.encode_special_tokens = True
    if first_differs:
        backend.add_tokens([AddedToken(_NOT_FIRST, normalized=False)])


def _unknown_token(backend: tokenizers.Tokenizer) -> str | None:
    """The token that stands for unknown characters, if there is one."""
    model = backend.model
    unknown = getattr(model, "unk_token", None)
    if unknown is None and isinstance(model, models.Unigram):
        unknown_id = json.loads(_state(model)).get("unk_id")
        unknown = None if unknown_id is None else backend.id_to_token(unknown_id)
    return unknown


def _add_missing(backend: tokenizers.Tokenizer, facts: TokenizerFacts) -> None:
    """Adds tokens that only tokenizer_config.json lists; their ids must come out as it says."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    for token in facts.added:
        if token.text not in known:
            backend.add_tokens(
                [
                    AddedToken(
                        token.text,
                        lstrip=token.lstrip,
                        rstrip=token.rstrip,
                        normalized=token.normalized,
                        special=token.special,
                    )
                ]
            )
            if backend.token_to_id(token.text) != token.id:
                raise _refused(f"tokenizer_config.json gives {token.text!r} a foreign id")
    named = [text for text in (facts.bos, facts.eos) if text]
    backend.add_special_tokens(
        [AddedToken(t, normalized=False) for t in named if backend.token_to_id(t) is not None]
    )


def gguf_tokenizer_json(gguf: GgufVocabulary) -> str:
    """The tokenizer of a GGUF as the text of a tokenizer.json that other tools read.

    They put a BOS before a text where this file says so, whatever stands in the others.
    """
    with _library_errors():
        backend = _gguf_backend(gguf)
        bos = None if gguf.bos_id is None else backend.id_to_token(gguf.bos_id)
        if gguf.add_bos and bos is not None:
            backend.post_processor = processors.TemplateProcessing(
                single=[bos, "$A"],
                pair=[bos, "$A", bos, "$B:1"],
                special_tokens=[(bos, gguf.bos_id)],
            )
        return str(backend.to_str())


def _gguf_backend(gguf: GgufVocabulary) -> tokenizers.Tokenizer:
    split = gguf.split
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=gguf.vocabulary,
            merges=gguf.merges,
            unk_token=gguf.unknown,
            fuse_unk=split is None,
            byte_fallback=split is None,
            ignore_merges=split is not None and split.ignore_merges,
        )
    )
    if split is None:
        _dress_sentencepiece(backend, gguf.prefix_space)
    else:
        _dress_byte_level(backend, split)
    added = [
        [AddedToken(t, normalized=False, rstrip=t in gguf.strip_after) for t in tokens]
        for tokens in (gguf.control, gguf.user_defined)
    ]
    backend.add_special_tokens(added[0])
    backend.add_tokens(added[1])
    return backend


def _dress_byte_level(backend: tokenizers.Tokenizer, split: Split) -> None:
    if split.normal_form is not None:
        backend.normalizer = getattr(normalizers, split.normal_form)()
    steps = [_pre_tokenizer(step) for step in split.steps]
    if Step.GPT2 not in split.steps:
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()


def _pre_tokenizer(step: str | Step) -> pre_tokenizers.PreTokenizer:
    match step:
        case Step.GPT2:
            return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        case Step.EACH_DIGIT:
            return pre_tokenizers.Digits(individual_digits=True)
        case Step.DIGIT_RUNS:
            return pre_tokenizers.Digits(individual_digits=False)
        case Step.PUNCTUATION_RUNS:
            return pre_tokenizers.Punctuation("contiguous")
        case pattern:
            return pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")


def _dress_sentencepiece(backend: tokenizers.Tokenizer, prefix_space: str) -> None:
    steps: list[decoders.Decoder] = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if prefix_space != "never":
        steps.append(decoders.Strip(" ", left=1))
    backend.decoder = decoders.Sequence(steps)
    if prefix_space == "always":
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(
            replacement="▁", prepend_scheme=prefix_space, split=False
        )


def _state(part: object) -> bytes:
    """The JSON of one part of a tokenizer (``null`` if it has no such part)."""
    return b"null" if part is None else bytes(part.__getstate__())  # type: ignore[call-overload]


@contextmanager
def _library_errors() -> Iterator[None]:
    try:
        yield
    except LlmrunError:
        raise
    except BaseException as error:
        # The library raises bare Exception, and its Rust panics derive from BaseException.
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise _refused(str(error)[:300]) from error
        raise


def _refused(reason: str) -> ModelFileError:
    return ModelFileError(
        f"The tokenizer of the model cannot be used: {reason}.",
        "Download the model again (llmrun pull), or use another version of it.",
    )
