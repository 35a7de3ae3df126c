"""Filters of image-text pairs, of the kinds that appendix C of Ramesh et al. 2021 names.

"These filters include discarding instances whose captions are too short, are classified as non-English by the Python
package cld3, or that consist primarily of boilerplate phrases such as 'photographed on <date>', where <date> matches
various formats for dates that we found in the data. We also discard instances whose images have aspect ratios not in
[1/2, 2]."

Only the limits of the aspect ratio are the paper's, which omits the patterns and thresholds of other filters. Each is
a pure function that returns the reason for rejection, or None. py3langid replaces cld3, which is unmaintained. Only a
confident classification rejects a caption, since short captions of names ("Taj Mahal, Agra") are often misclassified.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any

from limner.data.sample import Rejected
from limner.validation import Range, Validated

_ENGLISH = ("en", "pcm")  # lists of English nouns are classified as Nigerian Pidgin

_MONTH = (
    r"(?:jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?"
    r"|sept?(?:ember)?|oct(?:ober)?|nov(?:ember)?|dec(?:ember)?)\.?"
)
_DAY = r"(?:0?[1-9]|[12]\d|3[01])(?:st|nd|rd|th)?"
_YEAR = r"(?:1[89]\d\d|20\d\d)"
_SHORT_YEAR = rf"(?:{_YEAR}|['’]?\d\d)"
_TIME = (
    r"(?:[01]?\d|2[0-3])[:.h][0-5]\d(?:[:.][0-5]\d(?:\.\d+)?)?(?:\s*[ap]\.?m\.?)?"
    r"(?:\s*(?:z|utc|gmt|[a-z]{2,4}t|[+-]\d\d:?\d\d))?\b"
)
_DATE = "|".join(
    (
        rf"{_YEAR}[-/.:_](?:0?[1-9]|1[0-2])[-/.:_]{_DAY}(?:t?(?={_TIME}))?",  # 2010-05-12, EXIF's 2010:05:12
        rf"{_DAY}[-/. ]+(?:of[ ]+)?{_MONTH}[-/., ]*{_SHORT_YEAR}",  # 12 May 2010, 12th of May, 2010
        rf"{_MONTH}[-/ ]+{_DAY}(?:[-/., ]+{_SHORT_YEAR}\b(?![:.]\d))?",  # May 12th, 2010
        rf"\d\d?[-/.]\d\d?[-/.]{_SHORT_YEAR}",  # 5/12/10, 12.05.2010
        rf"{_MONTH}[-/, ]+{_YEAR}|{_YEAR}[-/, ]+{_MONTH}(?:[- ]{_DAY})?",  # May 2010
        rf"{_DAY}[ ]+{_MONTH}",  # 12 May
        rf"{_YEAR}(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01])(?:[-_]?\d{{6}})?",  # 20100512_143000
        _YEAR,
    )
)
_WEEKDAY = r"(?:mon|tues?|wed(?:nes)?|thu(?:rs)?|fri|sat(?:ur)?|sun)(?:day)?\b"
_MEDIUM = r"(?:photo(?:graph)?s?|pictures?|pics?|images?|snapshots?|videos?|scans?|shots?|uploads?)"
_VERB = (
    r"(?:photographed|taken|captured|uploaded|shot|snapped|scanned|posted|created|added|recorded"
    r"|published|digitized|digitised|modified)"
)
_FILE = (
    r"(?:(?:img|dsc[nf]?|pict?|p|cimg|mvi|vid|pxl|gopr|dji|_mg|hpim|sam|image|photo|picture|scan"
    r"|screen ?shot|whatsapp image)[-_ ]?[#(]?\d+\)?(?:[-_ ]\(?(?:wa)?\d+\)?)*|untitled)"
)
FILE_EXTENSION = r"\.(?:jpe?g|png|gif|tiff?|bmp|webp|heic|raw|cr2|nef)\b"
#: Phrases on the time, means or file name of a picture, not its content.
BOILERPLATE_PHRASES = re.compile(
    "|".join(
        (
            rf"\b(?:this\s+)?(?:{_MEDIUM}\s+)?(?:was\s+)?{_VERB}(?:\s+(?:on|at|in|by|with|from|using)\b)?",
            rf"\b{_MEDIUM}\s+(?:from|of|on|dated?)(?=\W+(?:{_WEEKDAY}|{_DATE}))",
            rf"\b(?:{_DATE})(?!\d)",
            rf"\b(?:at\s+|@\s*)?{_TIME}",
            rf"\b{_WEEKDAY}",
            rf"(?<![a-z0-9]){_FILE}(?:{FILE_EXTENSION}|(?![a-z0-9]))",
            # A name with a digit. Without possessive, bounded repeats and the lookahead the time is cubic.
            rf"\b(?=[\w-]{{1,128}}+{FILE_EXTENSION})(?=[\w-]*\d)[\w-]++{FILE_EXTENSION}|{FILE_EXTENSION}",
            r"\bdate(?:\s+(?:taken|created|uploaded))?\s*:",
            r"\b(?:created with|uploaded (?:by|with|from)) [\w ]+$",
            r"\b\d+\s*(?:of|/)\s*\d+\b",
        )
    ),
    re.IGNORECASE,
)
_WORDS = re.compile(r"[^\W\d_]{2,}")
_FUNCTION_WORDS = frozenset(
    ["on", "at", "in", "of", "the", "and", "by", "with", "from", "was", "this", "to", "no", "nr", "am", "pm"]
)


def too_short(caption: str, min_words: int = 2) -> str | None:
    """Reject fewer than `min_words` words. In scripts without spaces, two characters count as a word."""
    words = re.findall(r"\w+", caption)
    units = sum(-(-len(w) // 2) if re.match(r"[\u3040-\u9fff\uac00-\ud7af]", w) else 1 for w in words)
    return "caption too short" if units < min_words else None


def boilerplate(caption: str, share: float = 0.5) -> str | None:
    """Reject captions that consist primarily of dates, means and file names: the remainder has no
    word, or one word with less than `share` of the caption's letters and digits."""
    rest = BOILERPLATE_PHRASES.sub(" ", caption)
    if rest == caption:
        return None
    words = [word for word in _WORDS.findall(rest) if word.lower() not in _FUNCTION_WORDS]
    word_share = sum(map(len, words)) / max(1, sum(character.isalnum() for character in caption))
    return "caption is boilerplate" if not words or (len(words) == 1 and word_share < share) else None


def not_english(caption: str, confidence: float = 0.6) -> str | None:
    """Reject another language with at least this `confidence`, or mostly non-Latin letters."""
    letters = [character for character in caption if character.isalpha()]
    latin = [c for c in letters if c.isascii() or unicodedata.name(c, "").startswith("LATIN")]
    if 2 * len(latin) < len(letters):
        return "caption not English"  # the model divides its confidence among Russian, Ukrainian and Bulgarian
    language, probability = _identifier().classify(caption)
    return "caption not English" if language not in _ENGLISH and probability >= confidence else None


def aspect_ratio(height: int, width: int, limit: float = 2.0) -> str | None:
    """Reject ratios outside [1 / limit, limit]: square training crops would miss what the caption names."""
    return "aspect ratio" if max(height, width) > limit * min(height, width) else None


@cache
def _identifier() -> Any:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)


@dataclass(frozen=True, kw_only=True)
class Filters(Validated):
    """Thresholds of the filters; `None` turns a filter off. Only that of the aspect ratio is the paper's (App. C)."""

    min_words: Annotated[int | None, Range(0, 10**6)] = 2
    """Minimum number of words in a caption."""
    english: Annotated[float | None, Range(0, 1)] = 0.6
    """Minimum confidence in another language that rejects a caption."""
    boilerplate: Annotated[float | None, Range(0, 1)] = 0.5
    """Minimum share of a caption's letters and digits in its only word; dates and file names do not count as words."""
    aspect_ratio: Annotated[float | None, Range(1, 10**6)] = 2.0
    """Maximum ratio of a picture's longer side to its shorter side; 2 is the paper's."""

    def caption(self, caption: str) -> str | None:
        """Return the reason to reject a caption, or None."""
        return (
            (self.min_words is not None and too_short(caption, self.min_words))
            or (self.boilerplate is not None and boilerplate(caption, self.boilerplate))
            or (self.english is not None and not_english(caption, self.english))
            or None
        )

    def captions(self, captions: Sequence[str]) -> tuple[str, ...]:
        """Return the phrasings that pass. Raises `Rejected` with the first reason if none passes."""
        reasons = [self.caption(caption) for caption in captions]
        kept = tuple(c for c, reason in zip(captions, reasons, strict=True) if reason is None)
        if not kept:
            raise Rejected(reasons[0] or "missing caption")
        return kept

    def image(self, height: int, width: int) -> None:
        """Raise `Rejected` if a picture's aspect ratio is too large."""
        if self.aspect_ratio is not None and (reason := aspect_ratio(height, width, self.aspect_ratio)):
            raise Rejected(reason)
