"""Which language a text is in, by `lingua`; code, formulas and markup are left aside."""

import asyncio
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import xxhash

from megatron_rl.config import ConfigError

if TYPE_CHECKING:
    from lingua import LanguageDetector

MIN_LETTERS = 20
"""Fewer letters of prose say nothing about a language."""
_WINDOW_LETTERS = 80
"""Sentences are joined up to this many letters: single short ones are too often mistaken."""
_WIDE_FROM, _WIDE_LETTERS = 0x2E80, 3
"""A CJK letter says as much as about three Latin ones."""
UNKNOWN = "?"

_NOT_PROSE = re.compile(
    r"```.*?(?:```|\Z)"  # fenced code, also an unfinished block
    r"|~~~.*?(?:~~~|\Z)"
    r"|\$\$.*?\$\$"
    r"|\\\[.*?\\\]"
    r"|\\\(.*?\\\)"
    r"|\\begin\{(\w+\*?)\}.*?\\end\{\1\}"
    r"|`[^`\n]+`"
    r"|\$(?!\s)[^$\n]+?(?<!\s)\$(?!\d)"  # between two prices no formula
    r"|https?://\S+"
    r"|</?[\w|:-]+(?:\s[^<>\n]*)?>"
    r'|[{\[]\s*(?:"[^"\n]*"|\d)[^{}\[\]]*[}\]]'  # JSON
    r"|\w+\([^()\n]*\)"  # a call
    r"|\b\w*_\w+\b",
    re.DOTALL,
)
_SENTENCE_END = re.compile(r"(?<=[.!?:;])\s+|(?<=[。！？；])|\n+")


def prose(text: str) -> str:
    """The text without code, formulas, JSON, addresses, tags and names with underscores."""
    return _NOT_PROSE.sub(" ", text)


def windows(text: str) -> list[str]:
    """Sentences, joined until each piece has enough letters to tell its language; a short rest joins the last."""
    pieces: list[str] = []
    current = ""
    for sentence in _SENTENCE_END.split(text):
        current = f"{current} {sentence}" if current else sentence
        if num_letters(current) >= _WINDOW_LETTERS:
            pieces.append(current)
            current = ""
    if num_letters(current):
        last = pieces.pop() if pieces else ""
        pieces.append(f"{last} {current}".strip())
    return pieces


def num_letters(text: str) -> int:
    """Letters of a text, digits and signs left aside; wide ones count for several."""
    return sum(_WIDE_LETTERS if ord(letter) >= _WIDE_FROM else 1 for letter in text if letter.isalpha())


class LanguageJudge:
    """Tells apart a given set of languages. The first text loads their models: a second or two."""

    def __init__(self, codes: Iterable[str]) -> None:
        """codes: ISO 639-1, such as de. ConfigError names one that the detector does not know."""
        self.codes = sorted(set(codes))
        settings = f"{_WINDOW_LETTERS}/{MIN_LETTERS}/{_NOT_PROSE.pattern}/{self.codes}"
        self.identity = xxhash.xxh3_64_hexdigest(settings.encode())
        """Changes when the same text could be judged otherwise."""
        self._detector = _detector(self.codes)

    def letters(self, text: str) -> dict[str, int]:
        """Letters of prose by language code; what no language fits is under UNKNOWN."""
        pieces = windows(prose(text))
        counts: Counter[str] = Counter()
        for piece in pieces:
            language = self._detector.detect_language_of(piece)
            code = UNKNOWN if language is None else language.iso_code_639_1.name.lower()
            counts[code] += num_letters(piece)
        return dict(counts)

    async def letters_of(self, *texts: str) -> list[dict[str, int]]:
        """letters() of each, beside the event loop: the detector works without Python's lock."""
        return await asyncio.to_thread(lambda: [self.letters(text) for text in texts])


def language_share(letters: Mapping[str, int], language: str) -> float | None:
    """Share of the letters that are in a language; None where there are too few to tell."""
    total = sum(letters.values())
    return letters.get(language, 0) / total if total >= MIN_LETTERS else None


def language_name(code: str) -> str:
    """English name of a language, such as German."""
    from lingua import IsoCode639_1, Language

    return Language.from_iso_code_639_1(IsoCode639_1.from_str(code)).name.capitalize()


def _detector(codes: list[str]) -> "LanguageDetector":
    from lingua import IsoCode639_1, LanguageDetectorBuilder  # 100 MB that other verbs need not load

    known = {str(code.name).lower() for code in IsoCode639_1.__dict__.values() if isinstance(code, IsoCode639_1)}
    if unknown := [code for code in codes if code not in known]:
        raise ConfigError(
            f"a language must be one of {', '.join(sorted(known))}, got {', '.join(unknown)}; correct the column "
            "language or language.default"
        )
    if len(codes) < 2:
        raise ConfigError(
            f"language.others must leave at least two languages to tell apart, got {', '.join(codes)}; add one"
        )
    return LanguageDetectorBuilder.from_iso_codes_639_1(*map(IsoCode639_1.from_str, codes)).build()
