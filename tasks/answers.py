"""The answer in a model's text: what stands in \\boxed{...} or a tag, and whether it is the right one, plain text and LaTeX alike.
Whatever needs sympy is done in processes of their own, by tasks/maths.py."""
import re
from decimal import Context, Decimal
from fractions import Fraction

DECIMALS = 40  # places after the point that a number may be written with
MAX_ANSWER = 300  # characters; the longest gold of MATH has 81

BOXES = re.compile(r"\\(?:boxed|fbox)\s*(?P<open>\{)|\\(?:boxed|fbox)\s+(?P<bare>[^\s${}]+)|\\.|[{}]", re.DOTALL)
ANSWER = re.compile(r"<answer>\s*[*_`]*([A-Za-z]{1,10})[*_`]*\s*</answer>", re.IGNORECASE | re.ASCII)
NUMBER = re.compile(r"[-+]?(?:[0-9]+|[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?|[0-9]*\.[0-9]+)(?:[eE][-+]?[0-9]{1,3})?")
MIXED = re.compile(r"([-+]?)([0-9]*)\\frac\{([0-9]+)\}\{([0-9]*[1-9][0-9]*)\}")  # 1\frac{1}{2}; without a whole part \frac{1}{2}

NAMES = re.compile(  # x=, x_1=, f(2)= or (x,y)=
    r"(?:^|,|;|or|and)(?:\\?[A-Za-z]+(?:_\{?\w+\}?)?'*(?:\(-?\w+\))?|\([a-z](?:,[a-z])+\))=")


def after_thoughts(text: str) -> str:
    """What follows the last </think>, up to a thought that is not closed, since the length cut it."""
    return text.rpartition("</think>")[2].partition("<think>")[0]


def parse_answer(text: str, allowed: list[str]) -> int | None:
    """Index of the one allowed word, bold or not, in the one <answer> tag after the thoughts; None for none and for several.

    >>> parse_answer("I go <answer> up </answer>", ["Up", "Down"]), parse_answer("<answer>Up</answer><answer>Up</answer>", ["Up"])
    (0, None)
    """
    text = after_thoughts(text)
    answers = ANSWER.findall(text)
    if len(answers) != 1 or text.lower().count("<answer>") != 1:
        return None
    places = {word.lower(): place for place, word in enumerate(allowed)}
    return places.get(answers[0].lower())


def first_line(text: str) -> str:
    """The first line after the thoughts that says anything; small chat models answer there and ramble on."""
    return after_thoughts(text).strip().partition("\n")[0].strip()


def first_word(text: str, allowed: list[str]) -> int | None:
    """Index of the allowed word that comes first in the first line; None when it has none.

    >>> first_word("\\nI'd go down, then right.", ["Left", "Down", "Right"])
    1
    """
    places = {word.lower(): place for place, word in enumerate(allowed)}
    found = (places.get(word) for word in re.findall(r"\w+", first_line(text).lower()))
    return next((place for place in found if place is not None), None)


def boxed(text: str) -> list[str]:
    """Contents of each \\boxed{...} without a box inside, in order; one pass, whatever the text.

    >>> boxed(r"\\boxed{1} so \\boxed{\\sqrt{2}}, \\boxed{never closed")
    ['1', '\\\\sqrt{2}']
    """
    contents, opened, last = [], [], -1
    for token in BOXES.finditer(text):
        if token["bare"]:
            contents.append(token["bare"])
        elif token["open"] or token[0] == "{":
            opened.append(token.end() if token["open"] else None)
        elif token[0] == "}" and opened:
            start = opened.pop()
            if start is not None and start > last:
                contents.append(text[start:token.start()].strip())
                last = start
    return contents


def tagged(text: str) -> list[str]:
    """Contents of each closed <answer> tag, bold or not.

    >>> tagged("<answer>1</answer> or <ANSWER> **2** </answer>, <answer>3")
    ['1', '2']
    """
    parts = [re.split("</answer>", part, maxsplit=1, flags=re.IGNORECASE)
             for part in re.split("<answer>", text, flags=re.IGNORECASE)[1:]]
    contents = [part[0].strip() for part in parts if len(part) == 2]
    return [content[2:-2].strip() if re.fullmatch(r"\*\*.+\*\*", content, re.DOTALL) else content for content in contents]


def final_answer(text: str) -> str | None:
    """The one answer of a model's text, in \\boxed{...} or an <answer> tag; None when there is none. Boxes and tags
    that disagree are none either, so that listing many never pays; boxes with the same value are fine. Thoughts count for nothing.

    >>> final_answer(r"\\boxed{7} <answer>7.0</answer>"), final_answer(r"\\boxed{7} or \\boxed{8}")
    ('7.0', None)
    """
    text = after_thoughts(text)
    answers = boxed(text) + [content for content in tagged(text) if not boxed(content)]
    answers = [answer for answer in answers if says_something(answer)]
    return answers[-1] if len({value(answer) for answer in answers}) == 1 else None


# What plain text has for LaTeX
SIGNS = {"°": r"^\circ ", "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "÷": "/", "⁄": "/", "π": r"\pi ", "√": "sqrt",
         "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "<=": r"\le ", ">=": r"\ge ", "±": r"\pm ", "+-": r"\pm ", "∪": r"\cup ",
         "∈": r"\in ", "∅": r"\emptyset ", "²": "^2", "³": "^3", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}",
         "{,}": "", r",\!": ""}
SIGN = re.compile("|".join(map(re.escape, SIGNS)))
WORDS = {"infinity": r"\infty ", "inf": r"\infty ", "oo": r"\infty ", "percent": "", "dollars": "", "degree": "", "degrees": ""}
WORDS |= {name: f"\\{name} " for name in ("pi", "theta", "sin", "cos", "tan", "cot", "sec", "csc", "log", "ln")}
WORD = re.compile(rf"(?<![A-Za-z\\])(?:{'|'.join(WORDS)})(?![A-Za-z])")
UNIT = re.compile(r"(?<=[0-9]) ((?:square |cubic )?(?:units|cm|mm|km|kg|ft|feet|inches|miles|mph|cents|hours|minutes|days|years|"
                  r"points|ways)(?:\^[23])?)$")
ROOT = re.compile(r"(?<![A-Za-z\\])sqrt *(?:\(((?:[^()]|\([^()]*\))*)\)|([0-9]+|[A-Za-z]))")


def without_dress(text: str) -> str:
    """A text as LaTeX, without what never changes an answer: the signs of bold text, dollar, percent and degree signs, sizes of
    brackets, \\text."""
    text = SIGN.sub(lambda sign: SIGNS[sign[0]], text.strip().strip("*`"))
    text = re.sub(r"\\(?:text|textbf|textit|mathrm|mathbf|boldsymbol|mbox)\s*\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\\[dtc]frac(?![A-Za-z])", r"\\frac", text)
    text = re.sub(r"\\frac *([0-9]|\\pi) *([0-9])", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\(?:left|right|displaystyle)(?![A-Za-z])|\\[,!;: $%]|[$%]|\^ ?\{?\\circ *\}?", "", text)
    text = re.sub(r"(?<=[)\]}]) *U *(?=[(\[{])", r"\\cup ", WORD.sub(lambda word: WORDS[word[0]], text))
    return re.sub(r"(?<![\w.^}/)\\])([0-9]+)/([0-9]+)(?![0-9.^/]|,[0-9])", r"\\frac{\1}{\2}", text.strip().rstrip(".,;:"))


def as_latex(text: str) -> str:
    """
    >>> as_latex("2*sqrt(3)/5"), as_latex("3e5"), as_latex("5 cm")
    ('2\\\\sqrt{3}/5', '3\\\\cdot 10^{5}', '5\\\\text{ cm}')
    """
    text = UNIT.sub(r"\\text{ \1}", without_dress(text)).replace("**", "^")
    text = re.sub(r"([0-9])[eE]([-+]?[0-9]+)(?![0-9A-Za-z.])", r"\1\\cdot 10^{\2}", text)
    text = re.sub(r"(?<=[0-9)}]) *\* *(?=[A-Za-z\\(])", "", text)  # math-verify does not read 4*i as 4i
    for _ in range(2):  # a root in a root
        text = ROOT.sub(lambda root: f"\\sqrt{{{root[1] or root[2]}}}", text)
    return text


def value(text: str) -> Fraction | str:
    """The exact number where a text is an integer, a decimal, a plain fraction or a mixed number; else the text without spaces.

    >>> value(r"\\$1,234.50"), value(r"-\\dfrac{3}{6}"), value(r"\\left( 3, x \\right)$."), value("1 1/2"), value("1e-3")
    (Fraction(2469, 2), Fraction(-1, 2), '(3,x)', Fraction(3, 2), Fraction(1, 1000))
    """
    text = re.sub(r"(?<![0-9])\s+|\s+(?![0-9])", "", without_dress(text[:2 * MAX_ANSWER]))
    mixed = MIXED.fullmatch(text)
    if mixed and (not mixed[2] or int(mixed[3]) < int(mixed[4])):
        return Fraction(f"{mixed[1]}1") * (int(mixed[2] or 0) + Fraction(int(mixed[3]), int(mixed[4])))
    return Fraction(text.replace(",", "")) if NUMBER.fullmatch(text) else text


def says_something(text: str) -> bool:
    """
    >>> [says_something(text) for text in ("$$", ".", r"\\text{}", "0", r"\\{\\}")]
    [False, False, False, True, True]
    """
    return str(value(text)).strip("{}()[]") != ""


def rounded(number: Fraction, digits: int) -> Decimal:
    return Context(prec=digits).divide(Decimal(number.numerator), Decimal(number.denominator))


def equal_numbers(right: Fraction, given: Fraction) -> bool:
    """Numbers must be equal, but one without a finite decimal form, such as 1/3, may be given to six significant digits. (A whole
    number is no such decimal, nor is a gold of five digits: 1 is not 1000001/1000000.)"""
    decimals = [10**DECIMALS % number.denominator == 0 for number in (right, given)]
    if right == given or decimals[0] == decimals[1]:
        return right == given
    decimal, number = (right, given) if decimals[0] else (given, right)
    if decimal.denominator == 1 or decimals[0] and rounded(right, 5) == right:
        return False
    return abs(decimal - number) <= abs(number) / 10**6 or rounded(decimal, 6) == rounded(number, 6)


def states_one_thing(gold: str, answer: str) -> bool:
    """Whether an answer is no list of guesses of which math-verify would pick one: it closes its braces, does not say
    "about", and has "=" only after a name (x = 2, y = 3), or once where gold has one too.

    >>> [states_one_thing("7", text) for text in ("x_1 = 7", "8 = 7", "x = 8 = 7", r"7 \\approx 8", "7} {8")]
    [True, False, False, False, False]
    """
    if boxed(f"\\boxed{{{answer}}}") != [answer.strip()] or re.search(r"\\approx|≈", answer):
        return False
    text = str(value(answer))
    bases = [re.findall(r"[0-9]_\{?([0-9]+)", text) for text in (gold, answer)]
    if all(bases) and bases[0] != bases[1]:  # 11_3 is not 11_5, and math-verify drops both
        return False
    return "=" not in NAMES.sub(",", text) or "=" in gold and text.count("=") == 1
