"""How byte-level tokenizers cut text before merging, by the name a GGUF gives the rule.

A GGUF holds no patterns, only a name in ``tokenizer.ggml.pre``. Each entry says what the published
tokenizer.json of the models with that name does; a name that is not here is refused, since a near
guess would quietly lower a model's quality.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Literal


class Step(Enum):
    """Cuts that are no pattern. ``GPT2`` cuts by GPT-2's rule and then writes bytes as letters, so
    later steps see letters; without it bytes are written after the last step."""

    GPT2 = "gpt2"
    EACH_DIGIT = "each digit"
    DIGIT_RUNS = "digit runs"
    PUNCTUATION_RUNS = "punctuation runs"


@dataclass(frozen=True)
class Split:
    """One rule. A step that is a string is a pattern whose matches stand alone, in Oniguruma's
    spelling; each step cuts the parts that the one before left.

    ``normal_form``: what the text is brought to first. ``ignore_merges``: a part that is a token
    as a whole is that token. ``add_bos``: for files that do not say.
    """

    steps: tuple[str | Step, ...]
    normal_form: Literal["NFC", "NFKC"] | None = None
    ignore_merges: bool = False
    add_bos: bool = False


# The parts that patterns are made of. A word takes one mark or space before it with it; white
# space leaves its last character to the word behind it.
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKED_WORD = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _words_by_case(tail: str) -> str:
    """Words that run from upper to lower case at most once, each with ``tail``."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    head = r"[^\r\n\p{L}\p{N}]?"
    return f"{head}{upper}*{lower}+{tail}|{head}{upper}+{lower}*{tail}"


def _alternatives(*parts: str) -> str:
    return "|".join(parts)


_CL100K = _alternatives(_CONTRACTION, _WORD, r"\p{N}{1,3}", _PUNCTUATION, _SPACE)
_SLASHED = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_O200K = _alternatives(_words_by_case(f"{_CONTRACTION}?"), r"\p{N}{1,3}", _SLASHED, _SPACE)
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_OLD_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# Letters of scripts with upper and lower case, as far as DeepSeek's first rule lists them.
_CASED_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1"
    "\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5"
    "\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3"
    "\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115"
    "\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149"
    "\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06"
    "\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)
_WIDE_PUNCTUATION = "!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002"
_DEEPSEEK_V3 = _alternatives(
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+""",
    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
    r" ?[\p{P}\p{S}]+[\r\n]*",
    _SPACE,
)

_GPT2 = Split((Step.GPT2,))
_NEOX = Split((Step.GPT2,), "NFC")
_DIGITS = Split((Step.EACH_DIGIT, Step.GPT2))
_TIKTOKEN = Split((_CL100K,))
_LLAMA3 = Split((_CL100K,), ignore_merges=True, add_bos=True)
_GLM4 = Split((_CL100K,), ignore_merges=True)
_QWEN2 = Split((_alternatives(_CONTRACTION, _WORD, r"\p{N}", _PUNCTUATION, _SPACE),), "NFC")
_QWEN35 = _alternatives(
    _CONTRACTION, _MARKED_WORD, r"\p{N}", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", _SPACE
)
_TEKKEN = _alternatives(_words_by_case(""), r"\p{N}", _SLASHED, _SPACE)

SPLITS: Mapping[str, Split] = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "exaone4": _GPT2,
    "granite-docling": _GPT2,
    # GPT-NeoX's tokenizer, in MPT, OLMo 1 and OLMoE
    "mpt": _NEOX,
    "olmo": _NEOX,
    # StarCoder's tokenizer and its relatives; refact is also the name of Granite 3
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "minerva-7b": _DIGITS,
    "command-r": Split((Step.EACH_DIGIT, Step.GPT2), "NFC"),
    "exaone": Split((Step.EACH_DIGIT, Step.GPT2), "NFKC"),
    # dbrx is also the name of OLMo 2 and 3, Granite 4 and Phi 4
    "dbrx": _TIKTOKEN,
    "smaug-bpe": _TIKTOKEN,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "lfm2": _LLAMA3,
    "chatglm-bpe": _GLM4,
    "glm4": _GLM4,
    "minicpm5": Split(
        (
            r"\p{N}{1,3}",
            _alternatives(_CONTRACTION, _WORD, r"\p{N}+", _PUNCTUATION, _SPACE),
        )
    ),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "qwen35": Split((_QWEN35,), "NFC"),
    "seed-coder": Split(
        (_alternatives(_CONTRACTION, _WORD, r"\p{N}", r" ?[^\s\p{L}\p{N}\r\n]+", _SPACE),), "NFC"
    ),
    "tekken": Split((_TEKKEN,), ignore_merges=True, add_bos=True),
    # also Phi 4 mini and gpt-oss, whose merges reach every token
    "gpt-4o": Split((_O200K,)),
    "tiny_aya": Split((r"\d{1,3}(?=(?:\d{3})*\b)", _O200K)),
    "deepseek-llm": Split(
        (
            r"[\r\n]",
            rf"\s?[{_CASED_LETTERS}]+",
            rf"\s?[{_WIDE_PUNCTUATION}]+",
            r"\s+$",
            _OLD_CJK,
            Step.EACH_DIGIT,
        )
    ),
    "deepseek-coder": Split(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _OLD_CJK, Step.EACH_DIGIT),
    ),
    "deepseek-v3": Split((r"\p{N}{1,3}", _CJK, _DEEPSEEK_V3)),
    "falcon": Split((Step.PUNCTUATION_RUNS, Step.GPT2, Step.DIGIT_RUNS, "[0-9][0-9][0-9]")),
}
