"""Tokenizers of the families llmrun meets, small and made on the spot, with their oracles."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader, GGUFWriter
from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from tokenizers import Tokenizer as Backend

from llmrun.text.splits import SPLITS
from llmrun.text.tokenizer import Tokenizer

SEEDS = [
    "The quick brown fox jumps over the lazy dog, didn't it? I'LL say it's 12,345.67 metres.",
    "def f(x: int) -> str:\n\treturn f'{x!r:>10}'  # comment\n\n\n    if x == 10:  pass",
    "敏捷的棕色狐狸跳过了懒狗。日本語のテキスト、カタカナ。한국어 문장입니다.",
    "الثعلب البني السريع يقفز فوق الكلب الكسول ١٢٣",
    "तेज़ भूरी लोमड़ी आलसी कुत्ते के ऊपर कूदती है १२३",
    "👩‍👩‍👧‍👦 👍🏽 🏳️‍🌈 🇩🇪 ❤️ e\u0301 é \u00a0\u2003\u3000 ﬁ Å",
    "  leading, trailing  ",
    "\n\n \t \r\n x\r\ny\x0b\x0c\x00\x01\x7f\x85 end",
    "a1b22c333d4444 ½ ² Ⅷ ٣  1   2    3",
    "<html><table><b>x</b></table> [INST] << >> {{ }} || <|not|> <0x41>",
]

SPECIAL_STRINGS = ["<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>", "<|think|>"]


@dataclass(frozen=True)
class Family:
    """A tokenizer folder, llmrun's reading of it and the reference's."""

    name: str
    folder: Path
    tokenizer: Tokenizer
    oracle: Any


@pytest.fixture(scope="session")
def lines() -> list[str]:
    """A few hundred mixed lines without any special string."""
    rng = random.Random(7)
    pieces = [piece for seed in SEEDS for piece in seed.split(" ")] + ["", "  ", "\n", "ab" * 40]
    mixed = [
        "".join(rng.choice(pieces) + rng.choice(["", " ", "  ", "\n"]) for _ in range(12))
        for _ in range(150)
    ]
    scattered = ["".join(chr(rng.choice(_PLANES)) for _ in range(20)) for _ in range(100)]
    return [*SEEDS, "", " ", "\n", "a", *mixed, *scattered]


_PLANES = [
    *range(0x20, 0x250),
    *range(0x3B1, 0x3C9),
    *range(0x4E00, 0x4E40),
    *range(0x1F600, 0x1F640),
    0x200D,
    0xFE0F,
    0x301,
    0xFFFD,
]


def _train(
    normalizer: Any, pre_tokenizer: Any, trainer: Any, model: Any, spread: bool = False
) -> dict[str, Any]:
    backend = Backend(model)
    backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizer
    backend.train_from_iterator(SEEDS[:6] * 4, trainer)
    data: dict[str, Any] = json.loads(backend.to_str())
    if spread:  # make room for the 256 byte tokens of SentencePiece behind the three specials
        vocab = {t: i + 256 if i >= 3 else i for t, i in data["model"]["vocab"].items()}
        vocab |= {f"<0x{byte:02X}>": byte + 3 for byte in range(256)}
        data["model"]["vocab"] = vocab
        data["model"].update(byte_fallback=True, fuse_unk=True, unk_token="<unk>")
        for token in data["added_tokens"]:
            assert token["id"] < 3
    return data


def _byte_level(split: str | None, normalizer: Any = None, **model: Any) -> Callable[[], Backend]:
    def build() -> Backend:
        cut = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
        steps: list[Any] = [cut]
        if split is not None:
            steps.insert(0, pre_tokenizers.Split(Regex(split), "isolated"))
        trainer = trainers.BpeTrainer(
            vocab_size=700,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=["<s>", "</s>"],
            show_progress=False,
        )
        data = _train(normalizer, pre_tokenizers.Sequence(steps), trainer, models.BPE())
        data["model"].update(model)
        backend = Backend.from_str(json.dumps(data))
        backend.decoder = decoders.ByteLevel()
        return backend

    return build


def _sentencepiece(scheme: str) -> Callable[[], Backend]:
    def build() -> Backend:
        trainer = trainers.BpeTrainer(
            vocab_size=500, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False
        )
        normalizer = None
        cut: Any = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
        data = _train(normalizer, cut, trainer, models.BPE(), spread=True)
        backend = Backend.from_str(json.dumps(data))
        backend.normalizer = None
        backend.pre_tokenizer = None
        steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        if scheme == "always":
            backend.normalizer = normalizers.Sequence(
                [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
            )
        elif scheme == "first":
            backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        else:
            backend.normalizer = normalizers.Replace(" ", "▁")
        if scheme != "never":
            steps.append(decoders.Strip(" ", left=1))
        backend.decoder = decoders.Sequence(steps)
        return backend

    return build


def _unigram() -> Backend:
    trainer = trainers.UnigramTrainer(
        vocab_size=300,
        special_tokens=["<unk>", "<s>", "</s>"],
        unk_token="<unk>",
        show_progress=False,
    )
    data = _train(normalizers.NFKC(), pre_tokenizers.Metaspace(), trainer, models.Unigram())
    backend = Backend.from_str(json.dumps(data))
    backend.decoder = decoders.Metaspace()
    return backend


_FAMILIES: dict[str, Callable[[], Backend]] = {
    "gpt2": _byte_level(None),
    "llama3": _byte_level(str(SPLITS["llama-bpe"].steps[0]), ignore_merges=True),
    "qwen2": _byte_level(str(SPLITS["qwen2"].steps[0]), normalizers.NFC()),
    "spaces": _byte_level(None),
    "llama2": _sentencepiece("always"),
    "mistral": _sentencepiece("first"),
    "gemma": _sentencepiece("never"),
    "unigram": _unigram,
}


def _dress(name: str, backend: Backend) -> None:
    """Chat markers, and per family what real ones have: flags, unflagged tags, runs of spaces."""
    backend.add_special_tokens(
        [
            AddedToken("<|im_start|>", normalized=False, special=True),
            AddedToken("<|im_end|>", normalized=False, special=True, rstrip=name == "gpt2"),
            AddedToken("<|think|>", normalized=False, special=True, lstrip=name == "mistral"),
        ]
    )
    if name in ("qwen2", "gemma"):
        backend.add_tokens([AddedToken(t, normalized=False) for t in ("<think>", "</think>")])
    if name == "gemma":
        backend.add_tokens([AddedToken(t, normalized=False) for t in ("<table>", "\n\n")])
    if name == "spaces":
        backend.add_tokens([AddedToken(" " * n, normalized=True) for n in range(12, 1, -1)])
    if name in ("llama3", "llama2"):
        bos = backend.token_to_id("<s>")
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", bos)]
        )


@pytest.fixture(scope="session")
def make_family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Family]:
    from transformers import AutoTokenizer

    made: dict[str, Family] = {}

    def make(name: str) -> Family:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            backend = _FAMILIES[name]()
            _dress(name, backend)
            backend.save(str(folder / "tokenizer.json"))
            config: dict[str, object] = {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<s>",
                "eos_token": {"__type": "AddedToken", "content": "</s>", "special": True},
                "clean_up_tokenization_spaces": False,
            }
            (folder / "tokenizer_config.json").write_text(json.dumps(config))
            oracle = AutoTokenizer.from_pretrained(folder)
            made[name] = Family(name, folder, Tokenizer.from_folder(folder), oracle)
        return made[name]

    return make


@pytest.fixture(scope="session", params=sorted(_FAMILIES))
def family(request: pytest.FixtureRequest, make_family: Callable[[str], Family]) -> Family:
    return make_family(request.param)


@pytest.fixture(scope="session")
def special_strings() -> list[str]:
    return SPECIAL_STRINGS


@pytest.fixture(scope="session")
def read_metadata() -> Callable[[Path], dict[str, Any]]:
    def read(path: Path) -> dict[str, Any]:
        return {name: field.contents() for name, field in GGUFReader(path).fields.items()}

    return read


@pytest.fixture(scope="session")
def starter_metadata(starter_gguf: Path, read_metadata: Any) -> dict[str, Any]:
    metadata: dict[str, Any] = read_metadata(starter_gguf)
    return metadata


@pytest.fixture(scope="session")
def starter(starter_metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_gguf(starter_metadata)


@pytest.fixture(scope="session")
def starter_oracle(starter_gguf: Path) -> Any:
    """The reference reading of the starter's GGUF, with the split rule of its tokenizer.json.

    transformers does not know the rule named ``smollm`` (digits stand alone) and leaves it out.
    """
    from transformers import AutoTokenizer

    oracle = AutoTokenizer.from_pretrained(starter_gguf.parent, gguf_file=starter_gguf.name)
    oracle.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    return oracle


@pytest.fixture
def write_gguf(tmp_path: Path) -> Callable[..., Path]:
    """Writes a family's tokenizer as a GGUF without tensors."""

    def write(
        family: Family, model: str, pre: str | None = None, architecture: str = "llama"
    ) -> Path:
        data = json.loads((family.folder / "tokenizer.json").read_text())
        added = {token["id"]: token for token in data["added_tokens"]}
        vocab = data["model"]["vocab"] | {t["content"]: i for i, t in added.items()}
        tokens = sorted(vocab, key=lambda token: vocab[token])
        path = tmp_path / "model.gguf"
        writer = GGUFWriter(path, architecture)
        writer.add_tokenizer_model(model)
        if pre is not None:
            writer.add_tokenizer_pre(pre)
            writer.add_token_merges([" ".join(merge) for merge in data["model"]["merges"]])
        else:
            rank = {"".join(merge): -float(i) for i, merge in enumerate(data["model"]["merges"])}
            writer.add_token_scores([rank.get(token, -1e6 - vocab[token]) for token in tokens])
        writer.add_token_list(tokens)
        writer.add_token_types([_gguf_type(t, added.get(vocab[t])) for t in tokens])
        writer.add_bos_token_id(vocab["<s>"])
        writer.add_eos_token_id(vocab["</s>"])
        if "<unk>" in vocab:
            writer.add_unk_token_id(vocab["<unk>"])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        return path

    return write


def _gguf_type(token: str, added: dict[str, Any] | None) -> int:
    if added is not None:
        return 3 if added["special"] else 4
    return 6 if token.startswith("<0x") and len(token) == 6 else 1
