r"""Which texts say nothing that could be right, though Math-Verify's parser makes a formula of them.

It takes what stands side by side for a product: ``\text{I give up, } 0`` is 0 to it, ``1 2 3`` is 6. So where, after
`normal_form`, a number or a text still stands beside something else, the text is refused (`refused_reading`), and so is
one that denies or doubts what the gold does not (`hedged`): ``not x = 5`` is an equation to the parser, whose right
side is 5.
"""

from __future__ import annotations

import re

from basis_rl.rewards.choice import boxed_letter
from basis_rl.rewards.extract import plain_number
from basis_rl.rewards.math.notation import FONT, SPACE

# What the parser passes over, and what is removed before it reads: what stands on both sides stands side by side.
_SKIPPED = (
    r"\\?[$\"]|[€£¥]|\\[-*./=\s]"
    r"|\\(?:and|or|hfil|vspace|vskip|vrule|vbox|vcenter|neg(?:thin|med|thick)space)(?![a-zA-Z])"
)
# What follows is scanned once, from left to right, to find what stands beside something else.
_TOKENS = re.compile(
    rf"(?P<apart>\\q?quad(?![a-zA-Z])|\n)|(?P<row>\\\\|&)|\\(?P<environment>begin|end)\s*\{{[a-zA-Z*]+\}}(?:\{{[clr|\s]+\}})?"
    rf"|(?P<blank>{SPACE}|\\(?:left|right|displaystyle)(?![a-zA-Z])\.?|{_SKIPPED}|{FONT}\s*\{{\s*\}})"
    rf"|{FONT}\s*\{{(?P<text>[^{{}}]*)\}}|(?P<numeral>\d+(?:\.\d+)?|\.\d+)|\\(?P<command>[a-zA-Z]+)"
    r"|(?P<word>[a-zA-Z]+)|(?P<close>[)\]}]|\\\})|(?P<raised>[\^_])|(?P<open>\{)|(?P<postfix>\\?%|[!'])|(?P<other>\\?.)",
    re.DOTALL,
)
_FRACTIONS = {"frac", "dfrac", "tfrac", "cfrac", "binom", "dbinom", "tbinom"}
_FUNCTIONS = {
    "arccos", "arcsin", "arctan", "cos", "cosh", "cot", "csc", "deg", "det", "exp", "gcd", "int", "lcm", "lg", "lim",
    "ln", "log", "mathrm", "max", "min", "operatorname", "prod", "sec", "sin", "sinh", "sqrt", "sum", "tan", "tanh",
}  # fmt: skip
# What may follow a wide space, since it says how the two sides belong together, and the other operators.
_RELATIONS = {
    ",", ";", ":", "=", "<", ">",
    "Rightarrow", "approx", "cap", "colon", "cong", "cup", "equiv", "ge", "geq", "geqslant", "gt", "iff", "implies",
    "in", "land", "le", "leq", "leqslant", "longrightarrow", "lor", "lt", "mapsto", "mid", "ne", "neq", "ni", "notin",
    "pmod", "propto", "rightarrow", "setminus", "sim", "subset", "subseteq", "supset", "to", "vee", "wedge",
}  # fmt: skip
_OPERATORS = _RELATIONS | {
    "angle", "ast", "backslash", "bmod", "cdot", "div", "hline", "langle", "lbrace", "lceil", "lfloor", "lvert", "mod",
    "mp", "neg", "not", "parallel", "perp", "pm", "star", "times", "triangle", "vert",
}  # fmt: skip
_DOTS = re.compile(r"\\[lc]?dots(?![a-zA-Z])|\.\.\.|…")
_BUILDER = re.compile(
    r"\\\{(?:[^{}]|\{[^{}]*\})*?(?::|\\(?:mid|colon|vert)(?![a-z])|\|)[^{}]*(?:[=<>]|\\(?:in|[lgn]e)(?![a-z]))"
    r"|(?<![a-zA-Z\\])([a-zA-Z])\s*(?::|\\(?:mid|colon)(?![a-z]))\s*\1\s*(?:[=<>]|\\(?:in|[lgn]e)(?![a-z]))"
)
_OPTION = re.compile(r"(?:\\text\s*\{\s*)?\(?\s*(?:\\text\s*\{)?[A-J]\}?\s*\)?\s*\}?")
_OPTION_BEFORE = re.compile(
    rf"^(?:{FONT}\s*\{{\s*\(?[A-J][).:]\s*\}}|\([A-J]\)(?=\s|\\)|[A-J][).](?=\s)){SPACE}*(?=\S)"
)
_FUNCTION_OF = re.compile(r"([a-zA-Z])\s*\(([a-z])\)\s*=")
_MONEY = re.compile(r"\\\$|[€£¥₹]")
_BOX = re.compile(r"\\f?box(?:ed)?(?![a-zA-Z])")
_PRIME = re.compile(r"(?:(?<=[a-zA-Z)\]}'])|(?<=\^\d))'|\\prime(?![a-zA-Z])")
_DENIAL = (
    r"no(?!\.\s*of)|not|nor|none|nothing|nope|never|neither|hardly|cannot|[a-z]+n['’]t|isnt|arent|dont|cant|wrong(?:ly)?"
    r"|false(?:ly)?|untrue|incorrect|unequal|maybe|perhaps|possibly|probably|presumably|hopefully|guess|guessing|doubt"
    r"|unsure|uncertain|unknown|unlikely|doubtful|idk|dunno|give up|instead|either|rather|otherwise|else|except|unless"
    r"|if|but|other than|far from|excluded|rejected?|ignore|kidding|joking|etc|besides|opposite|candidates?|doesnt|wont"
    r"|didnt"
)
_NUMBER_WORDS = (
    r"zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|twenty|thirty|forty|fifty|sixty|seventy|eighty"
    r"|ninety"
)
_DENIES = re.compile(
    rf"(?<![a-zA-Z\\])(?:{_DENIAL})(?![a-zA-Z])|\\(?:not|neg|lnot|nexists|nsim|ncong|[bx]?cancel|sout|st)(?![a-zA-Z])|¬"
    rf"|{FONT}\s*\{{(?:[^{{}}]*\b(?:or|vs|versus)\b|\s*-?\d+\s*[,:;?]|[^{{}}]*\d\s*(?:[,;]|and\b))[^{{}}]*\}}(?=[\s$}})\]]*(?:=|\\approx))"
    rf"|{FONT}\s*\{{\s*(?:{_NUMBER_WORDS})\s*[,:;?]?\s*\}}(?=[\s$}})\]]*(?:=|\\approx))",
    re.IGNORECASE,
)


def in_terms_of(gold: str, answer: str) -> str:
    r"""An answer, a normal form, in the gold's own terms, where only these differ.

    The letter of an option with its text, ``B) 17`` for ``B``, or the text alone for a gold that is none; a decimal
    comma for a gold with a point; the name and the variable of a function; the constant of an integral.
    """
    if _OPTION.fullmatch(gold):
        return answer if hedged(gold, answer) or r"\ne" in answer else boxed_letter(answer) or answer
    value = plain_number(gold)
    if ("." in gold and "," not in gold) or (value is not None and value.denominator > 1):
        answer = re.sub(r"^([^,(\[]*?(?<!\d)-?\d+),(\d+)(?![\d,])(?=[^,]*$)", r"\1.\2", answer)
    if re.fullmatch(r"-?\d+", gold):
        answer = re.sub(r"^([-\d.]+) ?[kK]$", r"\1\\cdot 10^{3}", answer)
        answer = re.sub(r"^(-?\d{1,3}(?:\.\d{3}){2,})(?![\d.])", lambda m: m[1].replace(".", ""), answer)
    answer = _OPTION_BEFORE.sub("", answer)
    if r"\pi" in gold and r"\circ" not in gold:
        answer = re.sub(r"(\d+)\^(?:\{\\circ\}|\\circ(?![a-z]))", r"\\frac{\1\\pi}{180}", answer)
    of = _FUNCTION_OF.match(gold)
    named = _FUNCTION_OF.match(answer) or re.match(r"([a-zA-Z])()\s*=", answer)
    if of is not None and named is not None and named[1] != of[2]:
        body = answer[named.end() :]
        if not re.search(rf"(?<![a-zA-Z\\]){of[2]}(?![a-zA-Z])", body):
            body = re.sub(rf"(?<![a-zA-Z\\]){named[2] or of[2]}(?![a-zA-Z])", of[2], body)
            answer = gold[: of.end()] + body
        elif named[2] in ("", of[2]):
            answer = gold[: of.end()] + body
    constant = re.search(r"\+ ?([cCkKDA])$", answer)
    if constant is not None and re.search(r"\+ ?C$", gold) and constant[1] not in gold[:-1] + answer[:-1]:
        return answer[: constant.start()] + "+C"
    return answer


def refused_reading(text: str) -> str | None:
    """Why no formula is read in `text`, a normal form; None where one may be.

    ``beside``: a number or a text beside something else, which is a product to the parser; ``dots``: something is left
    out; ``builder``: a set of all that has a property, which is a quotient to the parser.
    """
    if _DOTS.search(text):
        return "dots"
    if _BUILDER.search(text):
        return "builder"
    if _BOX.search(text) or len(set(_MONEY.findall(text))) > 1:
        return "beside"
    return "beside" if _beside(_tokens(text)) else None


def hedged(gold: str, answer: str) -> bool:
    r"""Whether the answer, a normal form, denies or doubts what the gold does not: ``not x = 5``, ``\text{maybe} = 5``.

    The parser takes such a word for a name, and of an equation or an approximation the side that is no name; so it does
    with a text that has another candidate, ``\text{7 or} = 5``.
    """
    said, meant = ({word.lower() for word in _DENIES.findall(text)} for text in (answer, gold))
    return not said <= meant


def primes_differ(gold: str, answer: str) -> bool:
    r"""Whether only one of two normal forms has a prime: ``(x^2)'`` for ``x^2``, ``f'(x) = x^2`` for ``f(x) = x^2``.

    The parser passes over it. Of a name, before ``=``, it only counts where the gold has one too; behind a numeral it
    is feet, minutes or inches.
    """
    named = "=" in gold and "=" in answer
    counts = {len(_PRIME.findall(text if named else text.rpartition("=")[2])) for text in (gold, answer)}
    return len(counts) > 1


def _tokens(text: str) -> list[tuple[str, str]]:
    found = [(match.lastgroup or "other", match[match.lastgroup or 0]) for match in _TOKENS.finditer(text)]
    return [token for token in found if token[0] != "blank"]


def _beside(tokens: list[tuple[str, str]]) -> bool:
    """Whether a numeral follows an operand, or anything a text or a wide space."""
    # What ended just before: "", "operand", "numeral", "text", "apart" (and a wide space), "function".
    ended = ""
    # So many arguments of a command or an index are to come, and what they end as.
    awaited = 0
    becomes = ""
    # Of each open brace: what is awaited behind it, and what it ends as; None: as what is in it.
    groups: list[tuple[int, str | None]] = []
    bars = environments = 0
    padded = [("", ""), *tokens, ("", "")]
    for before, (kind, value), following in zip(padded, tokens, padded[2:], strict=False):
        if awaited and kind == "open":
            groups.append((awaited - 1, becomes))
            awaited = 0
            ended = ""
        elif awaited:
            # Two of \frac12.
            awaited -= 2 if awaited == 2 and kind == "numeral" and len(value) > 1 else 1
            ended = ended if awaited else becomes
        elif kind == "apart" or (kind == "row" and not environments):
            ended = "apart" if ended else ""
        elif kind == "environment":
            environments += 1 if value == "begin" else -1
            if environments < 0 or (value == "begin" and ended in ("text", "apart")):
                return True
            ended = "" if value == "begin" else "operand"
        elif value == "}" and groups:
            awaited, outer = groups.pop()
            becomes = ended = ended if outer is None else outer
        elif kind in ("close", "postfix") or (value == "|" and bars and ended not in ("", "apart")):
            ended = "operand"
            bars -= value == "|"
        elif kind == "raised":
            awaited, becomes = 1, ended if ended == "function" else "operand"
        elif _is_operator(kind, value) and (ended != "apart" or kind in ("word", "row") or value in _RELATIONS):
            ended = ""
            bars += value == "|"
        elif ended in ("text", "apart"):
            return True
        elif kind == "open":
            # What is in it is a factor of what ended, {2}{3}, or belongs to a command.
            groups.append((0, None))
            ended = "" if before[0] == "command" or before[1] == "]" else ended
        elif kind == "numeral":
            # (n-2) 2^n, n2^n and 3!2! are products; to the parser 0'5! is 05!.
            binds = following[0] == "raised" or (following[1] == "!" and before[1] != "'")
            if ended == "numeral" or (ended == "operand" and not binds):
                return True
            ended = "numeral"
        elif kind == "command" and value in _FRACTIONS:
            awaited, becomes = 2, "operand"
        else:
            named = kind in ("command", "word") and value in _FUNCTIONS
            ended = "text" if kind == "text" else "function" if named else "operand"
    return environments > 0


def _is_operator(kind: str, value: str) -> bool:
    if kind == "word":
        return value in ("and", "or")
    return kind in ("other", "row") or (kind == "command" and value in _OPERATORS)
