r"""Answers in words, in the notation of formulas: numbers, "no solution", all of a set, dates, "Yes, because ..."."""

from __future__ import annotations

import re
from collections.abc import Callable

_ONES = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_VALUES = {word: i for i, word in enumerate(_ONES)} | {word: 10 * i for i, word in enumerate(_TENS, 2)}
_PARTS = {
    "half": 2, "halve": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "sixth": 6, "seventh": 7, "eighth": 8,
    "ninth": 9, "tenth": 10, "hundredth": 100,
}  # fmt: skip
_SCALES = {"thousand": 1_000, "million": 1_000_000}
_BELOW_100 = rf"(?:(?:{'|'.join(_TENS)})(?:[- ](?:{'|'.join(_ONES[1:10])}))?|{'|'.join(reversed(_ONES))})"
_BELOW_1000 = rf"(?:(?:{'|'.join(_ONES[1:10])}|a)[- ]hundred(?:[- ](?:and )?{_BELOW_100})?|{_BELOW_100})"
_WHOLE = rf"{_BELOW_1000}(?:[- ](?:million|thousand)(?:,? (?:and )?{_BELOW_1000})?){{0,2}}"
_FRACTION = rf"(?:(?:{_BELOW_100}|an?)[- ](?:{'|'.join(_PARTS)})s?|half)"
_NUMBER = re.compile(
    rf"(?<![\w\\-])(?P<sign>(?:minus|negative)[- ])?"
    rf"(?:(?P<alone>{_FRACTION})|(?P<whole>{_WHOLE})(?: and (?P<rest>{_FRACTION}))?)(?![\w-])",
    # Otherwise a long s or a dotted capital I of other scripts were letters of these words, and no keys of the tables.
    re.IGNORECASE | re.ASCII,
)
_CHINESE_TENS = {"十": 10, "百": 100, "千": 1000}
# A number in Chinese characters; before another one, 分之, it is the denominator of a fraction.
_CHINESE_NUMBER = "(?:(?:[零一二三四五六七八九]?[十百千])+[零一二三四五六七八九]{0,2}|[零一二三四五六七八九])"
_CHINESE = re.compile(rf"(?<!\d)(负)?({_CHINESE_NUMBER})(?:分之({_CHINESE_NUMBER}))?(?![些样般旦起直切点\d])")
# What is counted by a number in Chinese characters.
_COUNTED = re.compile("[个只条张本人次种名位颗块件台辆双对组瓶杯页道份枚岁元天年月分钟小时米厘公里克吨斤升度]{0,3}")
_TEXT = re.compile(r"\\(?:text(?:bf|rm|it|normal)?|mbox|mathrm)\s*\{([^{}]*)\}")
_MONTHS = "January|February|March|April|May|June|July|August|September|October|November|December"
_KINDS = "real|such|possible|valid"
_THINGS = "(?:solution|root|value|number|integer|pair|triple|zero|intersection)s?"
# That there is none of what is asked for.
NOTHING = (
    rf"(?:(?<![\w\\])no (?:(?:{_KINDS}) )*(?:{_THINGS})\b(?: exists?)?(?! (?:other|besides|except|but))"
    r"|(?:does not|do not|don't|doesn't) exist|DNE|undefined|not defined|(?:the )?empty set"
    r"|keine? (?:reelle )?Lösung(?:en)?|(?:aucune|pas de) solution(?: réelle)?"
    r"|no (?:hay|tiene|existe) soluci(?:ón|ones)(?: real(?:es)?)?|нет (?:действительных )?решений|не существует"
    r"|无(?:实数)?解|不存在|\\emptyset)"
)
_NONE = rf"(?:[A-Z] = |there (?:is|are|exists?) |it |has )?(?:{NOTHING}|none|\\\{{(?:\s|\\,)*\\\}}|\{{\s*\}})"
_REALS = "(?:(?:all|any|every) (?:real )?numbers?|(?:all|any|every) reals?|the (?:reals|real numbers))(?: x)?"
# What all of a text may say, with its fonts left out, and how it is written in a formula.
_PHRASES: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE), form)
    for pattern, form in (
        (_NONE, r"\\emptyset"),
        (rf"(?:x (?:is|can be) )?{_REALS}", r"\\mathbb{R}"),
        (rf"{_REALS},? (?:except(?: for)?|other than|but)\s+(.+)", r"\\mathbb{R} \\setminus \\{\1\\}"),
        (
            rf"{_REALS} (greater|larger|less|smaller) than (or equal to )?(\S+)",
            lambda m: f"x {'>' if m[1].lower() in ('greater', 'larger') else '<'}{'=' if m[2] else ''} {m[3]}",
        ),
        (
            r"(yes|no|true|false)(?!.*\b(?:yes|no|true|false|or|but|if|otherwise|unless)\b)"
            r"(?:\s*[,;:!–—]\s*|\.\s(?=(?-i:[A-Z]))|\s+(?=because|since|as\b)).+",
            r"\1",
        ),
        (rf"(?:the |on )*(\d{{1,2}})(?:st|nd|rd|th)?(?: of)? ({_MONTHS})(?:,? (\d{{4}}))?", r"\2 \1 \3"),
        (
            r"(\d{4})-(0[1-9]|1[0-2])-(\d\d)",
            lambda m: f"{_MONTHS.split('|')[int(m[2]) - 1]} {int(m[3])} {m[1]}",
        ),
        (rf"(?:on )?({_MONTHS}) (\d{{1,2}})(?:st|nd|rd|th)?(?:,? (\d{{4}}))?", r"\1 \2 \3"),
        (r"(?-i:on |an? |the )(?!and |or )([a-z][a-z ]+)", r"\1"),
        (r"(\S+)( [a-z° ]+)? below (?:zero|0)", r"-\1\2"),
    )
)


def in_notation(text: str) -> str:
    """A text whose words are numbers or one of some phrases, as a formula; what is in no such words stays."""
    if not re.search(rf"[^\W\d_]{{2}}|\d-\d|{_CHINESE_NUMBER}|\{{", text):
        return text
    begin = _CHINESE.match(text)
    if begin is not None and _COUNTED.fullmatch(text, begin.end()):
        return _chinese(begin) + text[begin.end() :]
    text = signed(_NUMBER.sub(_numeral, text))
    plain = " ".join(_TEXT.sub(r"\1", text).replace("~", " ").split()).rstrip(". ")
    for pattern, form in _PHRASES:
        match = pattern.fullmatch(plain)
        if match is not None:
            return match.expand(form) if isinstance(form, str) else form(match)
    return text


def numbers(text: str) -> str:
    """The text with numerals for its numbers in words: ``minus twenty-one``, ``three quarters``, ``one and a half``."""
    return _CHINESE.sub(_chinese, signed(_NUMBER.sub(_numeral, text)))


def signed(text: str) -> str:
    """The text with a sign for "minus" and "negative" before a numeral."""
    return re.sub(r"(?<!\d )\b(?:minus|negative) (?=[\d\\$])", "-", text)


def _chinese(match: re.Match[str]) -> str:
    bottom, top = (part and str(_of_characters(part)) for part in match.group(2, 3))
    return ("-" if match[1] else "") + (rf"\frac{{{top}}}{{{bottom}}}" if top else str(bottom))


def _of_characters(text: str) -> int:
    """A number in Chinese characters: ``二十三`` is 23."""
    total = current = 0
    for character in text:
        if character in _CHINESE_TENS:
            total += (current or 1) * _CHINESE_TENS[character]
            current = 0
        else:
            current = "零一二三四五六七八九".index(character)
    return total + current


def _numeral(match: re.Match[str]) -> str:
    sign = "-" if match["sign"] else ""
    whole = _value(match["whole"] or "")
    part = (match["alone"] or match["rest"] or "").lower()
    if not part:
        return f"{sign}{whole}"
    top, _, name = part.replace("-", " ").rpartition(" ")
    bottom = _PARTS[name.rstrip("s")]
    return rf"{sign}\frac{{{whole * bottom + (_value(top) if top else 1)}}}{{{bottom}}}"


def _value(words: str) -> int:
    total = current = 0
    for word in re.findall("[a-z]+", words.lower()):
        if word == "hundred":
            current *= 100
        elif word in _SCALES:
            total += current * _SCALES[word]
            current = 0
        else:
            current += 1 if word in ("a", "an") else _VALUES.get(word, 0)
    return total + current
