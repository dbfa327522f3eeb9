r"""How an answer is read before it is graded: notations that mean the same in one form, and readings that are refused.

Math-Verify's parser takes what stands side by side for a product: ``\text{I give up, } 0`` is 0 to it, ``1 2 3`` is 6.
So spaced thousands and mixed numbers are read first (`normal_form`), and where a number or a text still stands beside
something else the text says nothing that could be right (`refused_reading`). Nor does one that denies or doubts what
the gold does not (`hedged`): ``not x = 5`` is an equation to the parser, whose right side is 5.
"""

from __future__ import annotations

import re

_SPACE = r"(?:\s|~|\\[ ,;:>!]|\\q?quad(?![a-zA-Z])|\\(?:thin|med|thick)space(?![a-zA-Z]))"
_ENDS = re.compile(rf"^(?:{_SPACE}|\\displaystyle(?![a-zA-Z])|\\textstyle(?![a-zA-Z]))+|(?:{_SPACE}|(?<!\\)\\$)+$")
_WRAPPED = re.compile(r"(\*\*|__|\*|`|\$\$?)(?!\*)([^*`$]*[^*`$\\])\1|\\\((.*)\\\)|\\\[(.*)\\\]", re.DOTALL)
_TRAILING = re.compile(r"(?<![.\\\s])(?<!\w\.\w)\s*[.,;]$")
_FONT = r"\\(?:(?:math|text)(?:bf|rm|it|sf|tt|normal)|text|mbox|textnormal|boldsymbol|bm|pmb)"
_NUMERAL_IN_FONT = re.compile(rf"{_FONT}\s*\{{((?:[-+.,/\d]|{_SPACE})*\d(?:[-+.,/\d]|{_SPACE})*)\}}")
_BOLD = re.compile(r"\\(?:boldsymbol|bm|pmb)(?=\s*\{)|\\bf(?:series)?(?![a-zA-Z])")
_PHANTOM = re.compile(r"\\[hv]?phantom\s*(?:\{[^{}]*\}|[^\\{}\s])")
_FRACTION_OF_COMMAND = re.compile(r"(\\[dt]?frac)\s*(\\(?!frac|sqrt)[a-zA-Z]+)\s*(\d|\\(?!frac|sqrt)[a-zA-Z]+)")
_ROOT = re.compile(r"√\s*(?:(\d+(?:\.\d+)?|[a-zA-Z])|\(([^()]*)\)|(?=\{))")
_CHARACTERS = str.maketrans(
    {
        "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/", "π": r"\pi ", "∞": r"\infty ",
        "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ",
        "±": r"\pm ", "∅": r"\emptyset ", "\u00a0": " ", "\u2009": " ", "\u202f": " ",
    }
)  # fmt: skip
_NO_DIGIT_BEFORE = r"(?<![\d.,}\])_^])"
_SPACED = re.compile(
    rf"(?<![\d.,])(?<!\d\s)(?<!\\[ ,;:])([1-9]\d{{0,2}})((?:{_SPACE}|\{{,\}})+)(\d{{3}})(?:\2(\d{{3}}))*"
    rf"(?!\d|,\d|(?:{_SPACE})+\d)"
)
_THOUSANDS = re.compile(r"(^|[=$])(\s*[-+]?\s*)([1-9]\d{0,2}(?:(?:,|\{,\}|,\\!)\d{3})+)(?=$|[^\d,]|,\s)")
_MIXED = re.compile(rf"(?<![\d./,}}])(\d{{1,9}}){_SPACE}+(\d{{1,9}})\s*/\s*(\d{{1,9}})(?![\d./(])")
_PRODUCT = re.compile(r"(?<![\d.^_])((?<!\^\{)(?<!_\{)\d+(?:\.\d+)?)\s*\(\s*(?=[-+]?\d)")
_SEPARATING_TEXT = re.compile(rf"(?<=[^\s,;])\s*{_FONT}\s*\{{[\s,;]*(?:[,;]|and|or)[\s,;]*\}}\s*(?=[^\s,;.])")
_POWER_OF_TEN = re.compile(r"^([-+]?\d+(?:\.\d+)?)[eE]([-+]?\d{1,3})(?=$|[\s\\])")
_LONGEST = 10_000


def normal_form(text: str) -> str:
    r"""The same answer in notations that Math-Verify reads.

    Blanks, Markdown's asterisks, dollar signs and a full stop around it go; ``\mathbf{42}`` is 42, ``√5`` a root,
    ``1 1/2`` a mixed number, ``12\,000``, ``12 000`` and ``x=12,000`` are thousands, ``\varnothing`` is the empty set,
    ``2(3)`` a product, ``\text{, and }`` a comma. Texts of more than 10,000 characters stay as they are.
    """
    if len(text) > _LONGEST:
        return text
    text = _unwrapped(text).translate(_CHARACTERS).replace(r"\varnothing", r"\emptyset").replace("~=", r"\approx ")
    text = _SEPARATING_TEXT.sub(", ", text)
    text = _BOLD.sub("", _NUMERAL_IN_FONT.sub(r"\1", text))
    text = _FRACTION_OF_COMMAND.sub(r"\1{\2}{\3}", _PHANTOM.sub("", text))
    text = _ROOT.sub(lambda m: r"\sqrt" + (f"{{{m[1] or m[2]}}}" if m[1] or m[2] else ""), text)
    text = _SPACED.sub(lambda m: re.sub(r"\D", "", _without_spaces(m[0])), text)
    text = _THOUSANDS.sub(lambda m: m[1] + m[2] + _joined(m, text), text)
    text = _MIXED.sub(_mixed, _POWER_OF_TEN.sub(r"\1\\cdot 10^{\2}", text))
    return _unwrapped(_PRODUCT.sub(r"\1\\cdot (", text))


def _without_spaces(text: str) -> str:
    return re.sub(_SPACE, "", text)


def _unwrapped(text: str) -> str:
    previous = None
    while text != previous:
        previous = text
        text = _ENDS.sub("", text)
        text = _TRAILING.sub("", text)
        match = _WRAPPED.fullmatch(text)
        if match is not None:
            text = next(part for part in match.groups()[1:] if part is not None)
    return text


def _joined(match: re.Match[str], text: str) -> str:
    """The thousands as digits, but where the text has other commas too and may be a list."""
    group = match[3]
    plain = group.replace("{,}", "").replace(r",\!", "")
    others = text[: match.start()] + text[match.end() :]
    return plain if "," in others else plain.replace(",", "")


def _mixed(match: re.Match[str]) -> str:
    whole, top, bottom = match.groups()
    return rf"{whole}\frac{{{top}}}{{{bottom}}}" if 0 < int(top) < int(bottom) else match[0]


# What the parser passes over, and what is removed before it reads: what stands on both sides stands side by side.
_SKIPPED = (
    r"\\?[$\"]|[€£¥]|\\[-*./=\s]"
    r"|\\(?:and|or|hfil|vspace|vskip|vrule|vbox|vcenter|neg(?:thin|med|thick)space)(?![a-zA-Z])"
)
# What follows is scanned once, from left to right, to find what stands beside something else.
_TOKENS = re.compile(
    rf"(?P<apart>\\q?quad(?![a-zA-Z])|\n)|(?P<blank>{_SPACE}|\\(?:left|right|[bB]igg?[lr]?|displaystyle)(?![a-zA-Z])\.?"
    rf"|{_SKIPPED}|{_FONT}\s*\{{\s*\}})"
    rf"|{_FONT}\s*\{{(?P<text>[^{{}}]*)\}}|(?P<numeral>\d+(?:\.\d+)?|\.\d+)|\\(?P<command>[a-zA-Z]+)"
    r"|(?P<word>[a-zA-Z]+)|(?P<close>[)\]}]|\\\})|(?P<raised>[\^_])|(?P<open>\{)|(?P<postfix>\\?%|[!'°])|(?P<other>\\?.)",
    re.DOTALL,
)
_FRACTIONS = {"frac", "dfrac", "tfrac", "cfrac", "binom", "dbinom", "tbinom"}
_FUNCTIONS = {
    "arccos", "arcsin", "arctan", "cos", "cosh", "cot", "csc", "deg", "det", "exp", "gcd", "int", "lcm", "lg", "lim",
    "ln", "log", "mathrm", "max", "min", "operatorname", "prod", "sec", "sin", "sinh", "sqrt", "sum", "tan", "tanh",
}  # fmt: skip
_OPERATORS = {
    "Rightarrow", "angle", "approx", "ast", "backslash", "begin", "bmod", "cap", "cdot", "colon", "cong", "cup",
    "div", "end", "equiv", "ge", "geq", "geqslant", "gt", "hline", "iff", "implies", "in", "land", "langle",
    "lbrace", "lceil", "le", "leq", "leqslant", "lfloor", "longrightarrow", "lor", "lt", "lvert", "mapsto", "mid",
    "mod", "mp", "ne", "neg", "neq", "ni", "not", "notin", "parallel", "perp", "pm", "pmod", "propto", "rightarrow",
    "setminus", "sim", "star", "subset", "subseteq", "supset", "times", "to", "triangle", "vee", "vert", "wedge",
}  # fmt: skip
_CONNECTIVE = re.compile(r"[\s,;]*(?:and|or|,|;|&)?[\s,;]*")
_DOTS = re.compile(r"\\[lc]?dots(?![a-zA-Z])|\.\.\.|…")
_BUILDER = re.compile(r"\\\{[^{}]*(?::|\\mid|\|)[^{}]*(?:[=<>]|\\(?:in|[lgn]e)(?![a-z]))")
_IMPROPER = re.compile(r"(?<![\d.,^_{}])\d+\s*\\[dt]?frac\{\s*(\d{1,30})\s*\}\{\s*(\d{1,30})\s*\}")
_LAST_TEXT = re.compile(rf"{_FONT}\s*\{{([^{{}}]*)\}}(?:\^\d|\^\{{\d\}})?$")
_DENIAL = (
    r"no(?!\.\s*of)|not|nor|none|nothing|never|neither|cannot|[a-z]+n['’]t|isnt|arent|dont|cant|wrong|false|untrue"
    r"|incorrect|unequal|maybe|perhaps|possibly|probably|presumably|hopefully|guess|guessing|unsure|uncertain|unknown"
    r"|unlikely|doubtful|idk|give up|instead|either|rather|otherwise|else|except|unless|if|but|other than|far from"
    r"|plus|minus|excluded|rejected|ignore|kidding|joking|etc"
)
_DENIES = re.compile(
    rf"(?<![a-zA-Z\\])(?:{_DENIAL})(?![a-zA-Z])|\\(?:not|neg|lnot|nexists|nsim|ncong|[bx]?cancel|sout|st)(?![a-zA-Z])|¬"
    rf"|{_FONT}\s*\{{(?:[^{{}}]*\bor\b|\s*-?\d+\s*[,;?])[^{{}}]*\}}(?=[\s$]*(?:=|\\approx))",
    re.IGNORECASE,
)
_NO_UNIT = re.compile(rf"\d|\?|\b(?:{_DENIAL}|or|and|about|any|all|every)\b", re.IGNORECASE)


def refused_reading(text: str) -> str | None:
    """Why no formula is read in `text`, a normal form; None where one may be.

    ``beside``: a number or a text beside something else, which is a product to the parser; ``dots``: something is left
    out; ``builder``: a set of all that has a property, which is a quotient to the parser; ``improper``: a mixed number
    whose fraction is 1 or more; ``unit``: a text at the end that is not a unit.
    """
    if _DOTS.search(text):
        return "dots"
    if _BUILDER.search(text):
        return "builder"
    if any(int(top) >= int(bottom) for top, bottom in _IMPROPER.findall(text)):
        return "improper"
    last = _LAST_TEXT.search(text)
    if last is not None and last.start() > 0 and _NO_UNIT.search(last[1]):
        return "unit"
    return "beside" if r"\begin" not in text and _beside(_tokens(text)) else None


def hedged(gold: str, answer: str) -> bool:
    r"""Whether the answer, a normal form, denies or doubts what the gold does not: ``not x = 5``, ``\text{maybe} = 5``.

    The parser takes such a word for a name, and of an equation or an approximation the side that is no name; so it does
    with a text that has another candidate, ``\text{7 or} = 5``.
    """
    said, meant = ({word.lower() for word in _DENIES.findall(text)} for text in (answer, gold))
    return not said <= meant


Token = tuple[str, str]


def _tokens(text: str) -> list[Token]:
    return [(match.lastgroup or "other", match[match.lastgroup or 0]) for match in _TOKENS.finditer(text)]


def _beside(tokens: list[Token]) -> bool:
    """Whether a numeral follows an operand, or anything a text or a wide space."""
    ended = ""  # what ended just before: "", "operand", "bracket", "text", "apart" (and a wide space), "function"
    before: Token = ("", "")
    bars = at = 0
    while at < len(tokens):
        kind, value = tokens[at]
        at += 1
        if kind == "blank":
            continue
        previous, before = before, (kind, value)
        if kind == "apart":
            ended = "apart" if ended else ""
        elif kind in ("close", "postfix") or (value == "|" and bars and ended):
            ended = "bracket"
            bars -= value == "|"
        elif kind == "raised":
            at, group = _argument(tokens, at)
            if _beside(group):
                return True
            before = tokens[at - 1]
            ended = ended if ended == "function" else "operand"
        elif _is_operator(kind, value):
            ended = ""
            bars += value == "|"
        elif ended in ("text", "apart") or (kind == "numeral" and _is_product(ended, tokens[at : at + 1])):
            return True
        elif kind == "command" and value in _FRACTIONS:
            at, first = _argument(tokens, at)
            both = tokens[at - 1][0] == "numeral" and len(tokens[at - 1][1]) > 1  # \frac12
            at, second = (at, []) if both else _argument(tokens, at)
            if _beside(first) or _beside(second):
                return True
            before = tokens[at - 1]
            ended = "operand"
        elif kind == "open":  # what is in it is a factor of what ended, {2}{3}, or belongs to a command
            ended = "" if previous[0] == "command" or previous[1] == "]" else ended
        elif kind == "text":
            ended = "text"
        else:
            ended = "function" if kind in ("command", "word") and value in _FUNCTIONS else "operand"
    return False


def _is_operator(kind: str, value: str) -> bool:
    if kind == "word":
        return value in ("and", "or")
    if kind == "command":
        return value in _OPERATORS
    return kind == "other" or (kind == "text" and _CONNECTIVE.fullmatch(value) is not None)


def _is_product(ended: str, following: list[Token]) -> bool:
    """Whether a numeral stands beside an operand; ``(n-2) 2^n`` is meant."""
    return ended == "operand" or (ended == "bracket" and following != [("raised", "^")])


def _argument(tokens: list[Token], at: int) -> tuple[int, list[Token]]:
    """Where the argument that begins at `at` ends, and what it consists of."""
    while at < len(tokens) and tokens[at][0] == "blank":
        at += 1
    if at < len(tokens) and tokens[at][0] == "open":
        depth = 0
        for end in range(at, len(tokens)):
            depth += (tokens[end][0] == "open") - (tokens[end][1] == "}")
            if depth == 0:
                return end + 1, tokens[at + 1 : end]
    return min(at + 1, len(tokens)), tokens[at : at + 1]


def text_form(text: str) -> str:
    """A normal form without insignificant blanks and braces, for the comparison of texts that are not formulas."""
    text = re.sub(r"([_^])\s*\{\s*(\w)\s*\}", r"\1\2", " ".join(text.split()))
    return re.sub(r"(?<![a-zA-Z0-9]) | (?![a-zA-Z0-9])", "", re.sub(r"\\(?:left|right)(?![a-zA-Z])", "", text))
