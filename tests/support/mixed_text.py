"""Ten thousand lines of text that tokenizers stumble over, the same in every run.

Whole sentences of many scripts, pieces of them glued together at random, emoji sequences, code,
numbers, white space of all sorts, control characters, lone combining marks, characters scattered
over Unicode. No surrogates, and no noncharacters (llmrun replaces two of them in people's words).
"""

import random
from collections.abc import Sequence

SENTENCES = (
    "The quick brown fox jumps over the lazy dog, didn't it? I'LL say it's 12,345.67 metres.",
    "We'VE seen THEIR camelCase and HTTPServerError2XX, o'clock, rock'n'roll, y'all'd've.",
    "敏捷的棕色狐狸跳过了懒狗\uff0c难道不是吗\uff1f共计一万二千三百四十五米。",
    "日本語のテキスト、カタカナとひらがな。\uff8a\uff9d\uff76 \uff11\uff12\uff13 \uff21",
    "한국어 문장입니다. 각 음절은 조합됩니다: \u1112\u1161\u11ab\u1100\u116e\u11a8.",
    "الثعلب البني السريع يقفز فوق الكلب الكسول ١٢٣، أليس كذلك؟",
    "तेज़ भूरी लोमड़ी आलसी कुत्ते के ऊपर कूदती है १२३ — नमस्ते क्षत्रिय",
    "ที่นี่มีสุนัขขี้เกียจ שָׁלוֹם עִבְרִית Ελληνικά ΆΈΉ Привет, мир! ДОБРЫЙ День",
    "Žluťoučký kůň, İstanbul \u0131I \u01c5 ŉ ﬁ \u2126 \u212a \u212b ½ ² Ⅷ \u0663 \U0001d518",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 \U0001f44d\U0001f3fd"
    "\U0001f3f3\ufe0f\u200d\U0001f308 \U0001f1e9\U0001f1ea\U0001f1ef\U0001f1f5 \u2764\ufe0f"
    "1\ufe0f\u20e3 \U0001f9d1\U0001f3ff\u200d\U0001f4bb",
    "def f(x: int) -> str:\n\treturn f'{x!r:>10}'  # comment\r\n\r\n    if x==10:  pass\n\n\n",
    "for (int i=0;i<n;++i){ a[i] += b->c[i]*0x1F; } // TODO: $\\alpha^{2}_{ij}$ <br/> &amp;",
    "SELECT * FROM t WHERE id IN (1,22,333,4444,55555) AND n='O''Brien'; -- ✓ 1e-5 3.14.15",
    "https://example.org/a/b?q=1&r=%20#frag user@host C:\\Windows\\System32 ../../etc ~!@#$%^&*()",
    "<html><table><b>x</b></table> [INST] << >> {{ }} || <|not|> <0x41> <0x0A> </s <|im_",
    "e\u0301 o\u0302\u0323 A\u030a \u0301\u0300 \u093f x\u20dd Z\u0351\u036b\u0343 \u0b95\u0bcd",
    "  leading, \ttabs\t\tand   runs      of spaces \u00a0\u2003\u3000\u2009 trailing  ",
)
_SPACES = (" ", " ", " ", "", "", "  ", "   ", "    ", "\t", "\n", "\n\n", "\r\n", "\n ", " \n\t")
_MORE = ("\u00a0", "\u3000", "\u2028", "\x0b", "\x0c", "\x85", " " * 9, " " * 33, "\n" * 5)
_ODD = ("\x00", "\x01", "\x08", "\x1b[0m", "\x7f", "\u200b", "\u200d", "\ufeff", "\ue000", "\uf8ff")
_PLANES = (
    *range(0x20, 0x600),
    *range(0x900, 0xE80),
    *range(0x1E00, 0x2300),
    *range(0x3040, 0x3100),
    *range(0x4E00, 0x4F00),
    *range(0xAC00, 0xAD00),
    *range(0xFB00, 0xFB50),
    *range(0xFF00, 0xFF60),
    *range(0x1F1E6, 0x1F650),
    0xFFFD,
    0x10FFFD,
)


def mixed_lines(count: int = 10_000, specials: Sequence[str] = (), seed: int = 20) -> list[str]:
    """``count`` lines; every fourth one also holds some of the strings ``specials``."""
    rng = random.Random(seed)
    words = [word for sentence in SENTENCES for word in sentence.split(" ")]
    lines = [*SENTENCES, "", " ", "\n", "a", "\u0301", "\x00", "\ue000", " a", "  a", "\ta"]
    while len(lines) < count:
        kind = len(lines) % 4
        if kind == 0:
            line = "".join(chr(rng.choice(_PLANES)) for _ in range(rng.randrange(1, 24)))
        elif kind == 1:
            line = "".join(_number(rng) + rng.choice(_SPACES) for _ in range(rng.randrange(1, 7)))
        else:
            line = "".join(
                rng.choice(words) + rng.choice(_SPACES) for _ in range(rng.randrange(1, 14))
            )
        for _ in range(rng.choice((0, 0, 1, 2))):
            line = _inserted(rng, line, rng.choice((*_MORE, *_ODD)))
        if kind == 3 and specials:
            for _ in range(rng.randrange(1, 4)):
                line = _inserted(rng, line, rng.choice(specials) + rng.choice(("", " ", "\n")))
        lines.append(line)
    return lines[:count]


def _number(rng: random.Random) -> str:
    digits = str(rng.randrange(10 ** rng.randrange(1, 12)))
    return rng.choice((digits, f"{digits}.{digits}", f"-{digits}", f"x{digits}y", f"{digits}%"))


def _inserted(rng: random.Random, text: str, piece: str) -> str:
    place = rng.randrange(len(text) + 1)
    return text[:place] + piece + text[place:]
