"""The texts on which a tokenizer must agree with the engine before it is trusted (engine.md 1.4)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

# Each is here because two tokenizers once differed on something like it.
_PLAIN: Final = (
    "Hello world",
    " leading blank",
    "  two leading blanks, and two at the end  ",
    "I'm he'll THEY'RE we'D can't 'sup",
    "1234567890 3.14159 1e-9 0x7fff",
    "x=1;y+=2;z**=3 # comment",
    "def f(a, *b):\n    return {k: v for k, v in a}\n\n\n",
    '{"name": "f", "arguments": {"a": [1, 2.5, null, true]}}',
    "tabs\tand\t\ttabs\r\nand\r\n\r\ncarriage returns",
    "\n\n\n   \n \t \n",
    "snake_case camelCase SCREAMING_CASE kebab-case",
    "https://example.org/a/b?c=d&e=f#g",
    "naïve café Ünïcödé ß \u017f ŉ",
    "cafe\u0301 n\u0303 a\u0328\u0301 \u0301alone",  # combining marks
    "中文字符,日本語のテキスト。한국어",
    "العربية עברית हिन्दी ไทย ελληνικά русский",
    "🎉 👩\u200d👩\u200d👧\u200d👦 🇩🇪 ❤\ufe0f ☕",  # joiners and selectors are the point
    "\u00a0no-break\u2003em\u3000wide\u200bzero\ufeff",
    "²³¹ ½ Ⅷ ٣ \u0966",  # numbers that are no digits
    "∑∫√≠ «»“”\u2018\u2019…—\u2013",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "<not|special> <| im_start |> <|", "[INST [/ ]", "</", "\x00\x07\x1b[0m\x7f",
)  # fmt: skip


def samples(cuts: Iterable[str]) -> list[str]:
    """About fifty texts; with the engine's own special tokens in every kind of neighbourhood."""
    cuts = list(cuts)[:6]
    texts = list(_PLAIN)
    for cut in cuts:
        texts += [f"{cut}user\nHi there", f"before {cut} after", f"{cut}{cut}\n{cut}  x", f"a\n\n{cut}"]
    if len(cuts) > 1:
        a, b = cuts[:2]
        texts.append(f"{a}system\nBe brief.{b}\n{a}user\n{_PLAIN[4]}{b}\n{a}assistant\n")
        texts.append(f"{_PLAIN[3]}{a} {b}\t{a}\n{b}\n\n{_PLAIN[13]}{a}")
    return texts
