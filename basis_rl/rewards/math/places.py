r"""Where the answer to a problem of mathematics is, in rollouts that need not have a ``\boxed{}``."""

from __future__ import annotations

import html
import re
from itertools import pairwise
from typing import Literal

from basis_rl.rewards.extract import last_boxed, take_answer
from basis_rl.rewards.math.notation import bare
from basis_rl.rewards.math.spelled import NOTHING, numbers, signed

MathAnswerIn = Literal["box", "tag", "hashes", "last_line", "last_number", "anywhere", "auto"]

_MARKED: tuple[MathAnswerIn, ...] = ("tag", "hashes")
_OPENS_BOX = re.compile(r"(?<!\\)\\(?:boxed|fbox)")

# An answer stands at the end; a rollout may be a loop of a megabyte.
_TAIL = 4_000
_MATH = r"\\\[.*?\\\]|\\\(.*?\\\)|\$\$.*?\$\$|\$(?=[^\s$])[^$]*?(?<=\S)\$(?!\d)"
_FUNCTIONS = "sqrt|pi|a?(?:sin|cos|tan)h?|arc(?:sin|cos|tan)|cot|sec|csc|ln|log|lg|exp|cis|mod|gcd|lcm|infinity"
# A letter of a word: raised and lowered digits and fractions are letters to Unicode.
_LETTER = r"[^\W\d_²³¹⁰-₟¼-¾⅐-⅞]"


def _word(choices: str) -> str:
    return rf"(?<!{_LETTER})(?:{choices})(?!{_LETTER})"


_TOKENS = re.compile(
    rf"(?P<formula>{_MATH})|(?P<bold>\*\*|__|`+)"
    r"|(?P<end>[.!?](?=[\s*_`]|$)|[。！？]|\n\s*\n|\n(?=\s*[-*#A-Z]))"
    r"|(?P<number>\d+(?::\d\d)+|\d[\d.,']*\d(?:…|\.\.\.)?|\d)"
    rf"|(?P<function>\\[a-zA-Z]+|_(?:max|min)(?![a-z_])|{_word(_FUNCTIONS)})"
    rf"|(?P<word>{_LETTER}['’]{_LETTER}{{2,}}|{_LETTER}{{2,}}(?:['’-]{_LETTER}+)*)|(?P<letter>[a-zA-Zα-ωΑ-Ω])"
    r"|(?P<sign>[-−–+*/^=<>≤≥≠≈±×÷·⋅√°%⇒∕⁄()\[\]{}|!'′∈∞∪∩∅_&∠⟨⟩$€£¥₹¢Ω½¼¾⅓⅔²³⁴⁵⁶⁷⁸⁹⁰¹⁻₀₁₂₃₄₅₆₇₈₉]|\\[,;:! ]|\\[{}%$])"
    r"|(?P<list>[,;:，、；：])|(?P<blank>\s+)|(?P<other>.)",
    re.DOTALL,
)
_JOINS = {"and", "or", "und", "oder", "et", "ou", "y", "o", "и", "или", *";,，、和或与と"}
_NO_NAMES = {"a", "A", "I"}
_IS = "is|are|be|ist|lautet|est|es|sind|sont|son|равен|равна|равно"
# What says that the answer follows.
_STATES = re.compile(
    r"(?:\b(?:answer|antwort|lösung|réponse|respuesta|solución|risposta|resposta|ответ)|答案?)(?![a-z])[^.。:=\n]{0,40}?"
    rf"(?:[:：=—是为]|{_word(_IS)})(?:\s*(?:therefore|thus|then|simply|just))?",
    re.IGNORECASE,
)
# What a sentence says the value of a thing with, or draws a conclusion with.
_SAYS = re.compile(
    r"[:：是为—]|"
    + _word(
        f"{_IS}|was|were|equals?|becomes?|gives?|has|have|costs?|takes?|means|beträgt|vaut|hence|so|thus|therefore"
        r"|altogether|in total|i\.e\.|that is|also|donc|por tanto"
    ),
    re.IGNORECASE,
)
# What denies or doubts a value before or behind it.
_DENIES = re.compile(
    _word(
        r"not|[a-z]+n['’]t|cannot|never|neither|nor|no|none|wrong|incorrect|maybe|perhaps|might|could|probably|possibly"
        r"|guess|reject|unless|if|nicht|kein\w*|vielleicht|pas|peut-être|quizás?|tal vez|не|нет|может|up to"
        r"|at (?:least|most)|mindestens|höchstens|au (?:moins|plus)|al menos|como mínimo|не (?:менее|более)"
    )
    + "|[不没非未]|可能|也许|至少|至多|超过|以上|以下",
    re.IGNORECASE,
)
# What bounds or supposes the value behind it.
_BOUNDS = re.compile(
    _word(
        r"(?:more|less|fewer|greater) than|below|under|over|beyond|above|exceeds?|differs?|nowhere|far from"
        r"|anything but|other than|different|rarely|near|close to|almost|nearly|bounded|false|doubt|suppose|assume"
        r"|claims?|possible(?= answer)|between(?= \$?\d)|größer|kleiner|mehr als|weniger als|unter|über|niemals|falsch"
        r"|plus de|moins de|jamais|(?:sup|inf)[ée]rieure?|mayor|menor|más de|menos de|nunca|больше|меньше"
        r"|более|менее|никогда|около"
    )
    + "|大于|小于|约|错误|假设",
    re.IGNORECASE,
)
# What makes a label of a number behind it.
_LABELS = re.compile(
    r"\b(?:page|step|case|part|figure|table|problem|equation|question|number|theorem|lemma|section|line|row|item|formula)"
    r"[\s(]{0,2}\Z",
    re.IGNORECASE,
)
# What takes back an answer before it.
_RETRACTS = re.compile(
    _word(
        "wait|hmm|actually|mistake|let me(?! know)|let us check|recheck|re-check|double[- ]check|could not|couldn't"
        "|give up|not sure|alternatively|wrong|incorrect|sorry|oops|contradiction|scratch that|ignore that|just kidding"
        "|this is false|this cannot be|no, (?:it|that|the)"
    )
    + r"|\?\s*\Z",
    re.IGNORECASE,
)
_RUNS_OF_BLANKS = re.compile(r"([ \t\n])\1{2,}")
_PROVED = re.compile(r"[\s$]*(?:\\(?:black)?square|\\qed|[■□∎]|Q\.?E\.?D\.?)[\s$]*\Z")
_ASIDE = re.compile(rf"\s\((?=[^()]{{0,200}}{_LETTER}{{3}}[^()]{{0,200}}\s{_LETTER}{{3}})[^()]{{0,400}}\)")
_CHECKS = re.compile(r"\n\s*(?:\*\*)?(?:check|verification|note|probe)\s*[:：]", re.IGNORECASE)
_REMARK = re.compile(
    r"\([a-z]{2}|(?:note|as a check|check|remark|without|i hope|let me know|feel free)\b", re.IGNORECASE
)
# A question to the reader that offers something, with no number in it, and no doubt about the answer.
_OFFER = re.compile(
    r"[*_ ]{0,4}(?!.*"
    + _word(r"right|correct\w*|wrong|errors?|mistakes?|check|verify|agree|think|again|instead|different|another answer")
    + ")"
    + _word(
        "(?:what |how )?would you (?:like|prefer)|(?:do|did) you (?:have|need|want) (?:any|another|help|me|more)"
        "|(?:do you )?want (?:another|help|me|more|to (?:know|learn|see))|need (?:any|further|help|more)"
        "|(?:is there )?anything else(?: I can| you(?:'d| would) like| you want|(?=\\W*\\Z))"
        "|any (?:further |more |other )?questions|(?:does|did) (?:this|that) help"
        "|(?:what else |what |how )?(?:can|may|shall|should) I (?:explain|help|show)"
    )
    + r"\D*\?[\s*_`]*\Z",
    re.IGNORECASE | re.DOTALL,
)
_AS_JSON = re.compile(r'"(?:final_)?answer"\s?:\s?(?:"([^"]{1,200})"|([^\s",}]{1,200}))[\s}\]`]*(?:</\w+>)?\s*\Z')
_BOLD = re.compile(r"(\*\*|__|`)(.+?)\1")
_BOLD_WORDS = re.compile(rf"\*\*({_LETTER}{{2,}}(?: {_LETTER}{{2,}}){{0,2}})[.!]?\*\*(?!:)")
_NOTHING = re.compile(NOTHING, re.IGNORECASE)
_ENDS_UNIT = re.compile(
    r"[,;:.!?。，；(（]|\*\*|\A\s*of\b|"
    + _word("from|to|for|in(?!/)|at|after|before|when|if|with|by|on|that|which|since|because|as|so|is|are|was")
)
# "14 is the sum of 7 and 7": what a number is said to be, up to two others.
_DEFINES = re.compile(rf" (?:is|equals) the (?:{_LETTER}+ ){{1,4}}(?:of|between) [^{{}}]{{1,40}}? (?:and|und) \S*\d")
# "14 when you add 7 and 7": up to the end of the sentence, and with no result of its own.
_WHEN = re.compile(r"\bwhen (?:you|we) (?:(?!\b(?:you|we)\b)[^,;=])*\Z")
_CLAUSE = (",", ";", ":", "，", "；", " but ", " sondern ")


def find_answer(text: str, where: MathAnswerIn) -> str | None:
    r"""The answer of a rollout; None where there is none.

    A place as `take_answer` has them. A box in a tag, behind ``####`` or in the last line is the answer, and "The
    answer is", signs of a formula and a full stop around one are left out. ``anywhere``: the box, without one the tag,
    without one what follows ``####``, without all three `stated_answer`. A box that is never closed is no answer.
    """
    if where == "anywhere":
        if _OPENS_BOX.search(text):
            return last_boxed(text)
        marked = (find_answer(text, place) for place in _MARKED)
        return next((found for found in marked if found is not None), None) or stated_answer(text)
    assert where in ("box", "tag", "hashes", "last_line", "last_number"), where
    found = take_answer(text, where)
    if found is None or where == "box":
        return found
    boxed = last_boxed(found)
    return bare(found) if boxed is None else boxed


def stated_answer(text: str) -> str | None:
    """The answer that the last sentences of a rollout state without a mark; None where none does, or doubts follow it.

    It is the first formula behind "the answer is"; without such a sentence one in bold, the first behind a verb such as
    "is", or the last of the last sentence that has a formula. A formula is the longest row of formulas between signs of
    mathematics, numbers, names and signs, lists of them joined; the words behind it are its unit.
    """
    tail = text[-_TAIL:]
    if "</" in tail or "&" in tail:
        tail = html.unescape(re.sub(r"</?(?:b|strong)>", "**", re.sub(r"<sup>([^<]{1,99})</sup>", r"^{\1}", tail)))
    tail = _PROVED.sub("", _RUNS_OF_BLANKS.sub(r"\1\1", tail))
    if (told := _AS_JSON.search(tail)) is not None:
        return bare(told[1] or told[2])
    read, *checks = _CHECKS.split(tail)
    if any(_RETRACTS.search(aside) for aside in (*_ASIDE.findall(read), *checks)):
        return None
    sentences = [each for each in _sentences(_ASIDE.sub("", read)) if not (_REMARK.match(each) or _OFFER.match(each))]
    states = [bool(_STATES.search(sentence)) for sentence in sentences]
    doubted = False
    for i in reversed(range(len(sentences))):
        sentence, runs = _with_runs(sentences[i])
        end = runs[-1][1] if runs else 0
        taken_back = doubted or _RETRACTS.search(sentence, end) is not None
        doubted = doubted or _RETRACTS.search(sentence) is not None
        if taken_back:
            if runs:
                return None
        elif states[i]:
            return _stated(sentence, runs)
        elif not any(states[:i]):
            if _NOTHING.search(sentence):
                return r"\emptyset"
            if runs:
                return _concluded(sentence, runs)
            if (words := _BOLD_WORDS.search(sentence)) is not None:
                return words[1]
    return None


def _sentences(text: str) -> list[str]:
    """The sentences and lines of a text; a line that ends with a colon goes on in the next."""
    ends = [0]
    before = ""
    for token in _TOKENS.finditer(text):
        if token.lastgroup == "end" and (token[0].strip() or not before.endswith((":", "：", "is", "are", "="))):
            ends.append(token.end())
        if token.lastgroup not in ("blank", "bold", "end"):
            before = token[0]
    pairs = pairwise([*ends, len(text)])
    return [sentence for start, end in pairs if (sentence := text[start:end].strip())]


def _with_runs(sentence: str) -> tuple[str, list[tuple[int, int]]]:
    """A sentence and where its formulas are; with numerals for its numbers in words, where its verb has no formula."""
    sentence = signed(sentence)
    runs = _runs(sentence)
    # A letter alone is the name of something, unless it stands out.
    formulas = [run for run in runs if not re.fullmatch(r"[\s$\\()]*[^\W\d_][\s$\\()]*", sentence[slice(*run)])]
    verb = _last_verb(sentence)
    if not any(run[0] >= verb for run in formulas):
        spelled = numbers(sentence)
        verb = _last_verb(spelled)
        found = [run for run in _runs(spelled) if run[0] >= verb and re.search(r"\d", spelled[slice(*run)])]
        if found and spelled != sentence:
            return spelled, found
    marked = [run for run in runs if re.search(r"(?:\*\*|__|`|[:：]\s?)\(?\Z", sentence[max(0, run[0] - 4) : run[0]])]
    return sentence, formulas or marked or runs


def _last_verb(sentence: str) -> int:
    """Where what follows the last "is" or "so" begins."""
    return max((match.end() for match in _SAYS.finditer(sentence)), default=0)


def _runs(sentence: str) -> list[tuple[int, int]]:
    """Where the formulas of a sentence are: rows of numbers, signs, names and formulas between signs of mathematics."""
    runs: list[tuple[int, int]] = []
    start = end = -1
    # Whether there is more than signs in it.
    says = False
    for token in [*_TOKENS.finditer(sentence), None]:
        kind = token.lastgroup if token else "other"
        value = token[0] if token else ""
        is_name = kind == "letter" and (value not in _NO_NAMES or start >= 0)
        if token and (kind in ("formula", "number", "function", "sign") or is_name):
            start = token.start() if start < 0 else start
            end = token.end()
            says = says or kind != "sign"
        elif start >= 0 and kind not in ("blank", "bold") and value not in _JOINS:
            if says:
                runs.append((start, start + len(sentence[start:end].rstrip(" ([{"))))
            start = -1
            says = False
    return runs


# What may stand between "the answer is" and the answer.
_BEFORE = re.compile(
    rf"(?:[^\w]|[一-鿿]|{_word(_IS)}|"
    + _word(
        "an?|the|that|this|equal|equals|to|exactly|simply|just|therefore|thus|then|hence|also|about|approximately|roughly"
        "|option|choice|letter|answer|points?|set|interval|pair|ordered|triple|tuple|value|fraction|matrix|vector|line"
        "|equation|expression|polynomial|ratio|given|by|all|reals?|integers?|positive|nonnegative|les?|la|el|los|las|die|der"
        "|das|sans|aucun|doute|donc|somit|valeurs?|valor(?:es)?|x|y|z|n|k|or|and"
    )
    + ")*",
    re.IGNORECASE,
)


def _stated(sentence: str, runs: list[tuple[int, int]]) -> str | None:
    """What follows "the answer is": the first formula, or the words up to a comma."""
    start, begin = [match.span() for match in _STATES.finditer(sentence)][-1]
    run = next(((max(first, begin), last) for first, last in runs if last > begin), None)
    if run is None:
        return bare(re.split(r"[,;:.]|\s[-–—]\s", sentence[begin:])[0]) or None
    start = max(sentence.rfind(mark, 0, start) for mark in _CLAUSE) + 1
    if _is_denied(sentence, start, run[0]) or not _BEFORE.fullmatch(sentence, begin, run[0]):
        return None
    return _with_unit(sentence, run)


def _concluded(sentence: str, runs: list[tuple[int, int]]) -> str | None:
    """What a sentence without such words says: the last formula in bold, the first behind its verb, or the last."""
    bold = [match.span() for match in _BOLD.finditer(sentence)]
    inside = [run for run in runs if any(start <= run[0] < end for start, end in bold)]
    if (condition := _WHEN.search(sentence)) is not None:
        runs = [run for run in runs if run[0] < condition.start()] or runs
    verb = _last_verb(sentence)
    behind = [run for run in runs if verb and run[0] >= verb]
    defines = _DEFINES.match(sentence, runs[0][1])
    if defines and verb <= defines.end() and not sentence[: runs[0][0]].strip(" *_`"):
        behind = runs[:1]
    for run in inside[-1:] or behind or runs[-1:]:
        clause = max(sentence.rfind(mark, 0, run[0]) for mark in _CLAUSE)
        if not _is_denied(sentence, clause + 1, run[0]):
            return _with_unit(sentence, run)
    return None


def _is_denied(sentence: str, start: int, end: int) -> bool:
    """Whether what stands from `start` to a formula at `end` denies or bounds it, or makes a label of it."""
    said = _DENIES.search(sentence, start, end) or _BOUNDS.search(sentence, start, end)
    return said is not None or (sentence[end].isdigit() and _LABELS.search(sentence, start, end) is not None)


def _with_unit(sentence: str, run: tuple[int, int]) -> str | None:
    """The formula as it is graded, the words behind it as a text; None where they deny it."""
    behind = sentence[run[1] :]
    # A function in pieces is more than its first one, and another number behind "but" or "or" is another answer.
    in_pieces = len(re.findall(r"\b(?:for|if|when)\b", behind)) > 1 or re.search(r"\b(?:but|or)\b[^.]*\d", behind)
    if in_pieces or _DENIES.search(re.split("[,;，；(（]", behind)[0]):
        return None
    unit = _ENDS_UNIT.split(behind, maxsplit=1)[0].rstrip(' *_`\n\\"”✓✔✅🎉😊🙂👍\ufe0f')
    unit = re.sub(r"\A ?(?:left|remaining|total|altogether|older|younger|more|and nothing else)\b.*", "", unit)
    # A Japanese verb is none, and what follows a plural is none: "9 marbles remain".
    unit = re.sub(r".*[\u3040-\u309f].*", "", unit)
    unit = re.sub(rf"({_LETTER}{{3,}}s)\b(?! (?:per|of|or|and|squared|cubed|below|above)\b)[^\d]*\Z", r"\1", unit)
    formula = re.sub(r"\*\*|__|`", "", sentence[slice(*run)])
    formula = re.sub(_MATH, lambda m: m[0].strip("$") if m[0][0] == "$" else m[0][2:-2], formula, flags=re.DOTALL)
    # Of m = 4 and m + n = 9 the last, which is made of the others.
    formula = re.sub(r"^(?:[a-z] = [^=]*?(?:,|and) )+(?=[a-z] [-+*/·] [a-z][^=]*= [^=]*$)", "", formula)
    # What follows the last arrow; the letter of 0.2 s.
    formula = re.split(r"⇒|→|\\Rightarrow|\\implies", formula)[-1].strip()
    formula = re.sub(r"(?<=\d) ([a-zA-Z])\Z", r"\\text{ \1}", formula)
    return bare(rf"{formula}\text{{{unit}}}" if unit else formula) or None
