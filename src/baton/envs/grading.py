"""Final answers, and equality of answers.

No text that a model can write makes a grader raise: the worst is the lowest reward with a reason. What a grader cannot
do for a reason of its own (a gold answer that cannot be read, user code that raises) is a `TaskFault`, never reward 0.
"""

from __future__ import annotations

import ast
import json
import logging
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from typing import Any, Literal

from baton.envs.env import Grade
from baton.errors import ConfigError, TaskFault

Match = Literal["exact", "math", "aime", "dapo", "gsm8k", "countdown"]
"""How an answer is compared with the gold answer; see `score_answer`."""

# ---- the final answer ------------------------------------------------------------------------------------------

_OPENING = re.compile(r"\\(?:boxed|fbox)\s*\{")
_LABEL = re.compile(r"answer\s*:", re.IGNORECASE)


def without_thinking(text: str) -> str | None:
    """The text after the last `</think>`; None where thinking was opened and never closed."""
    after = text.rpartition("</think>")[2]
    return None if "<think>" in after else after


def extract_boxed(text: str) -> str | None:
    r"""The content of the last complete, non-empty `\boxed{...}` or `\fbox{...}`, by counting braces.

    None where there is none, and where the last non-empty box was never closed: a cut answer is no answer.
    """
    return _box(text)[0]


def final_answer(text: str) -> str | None:
    r"""What a response gives as its answer: the last box, else the rest of the line after the last `Answer:`.

    Thinking is dropped first. An unterminated last box is no answer. Bare numbers are never picked out of prose.
    """
    said = without_thinking(text)
    if said is None:
        return None
    boxed, was_cut = _box(said)
    return None if was_cut else boxed or labelled(said)


def submitted(text: str) -> str | None:
    """What a response submits as a whole: tags, boxes and labels taken off, else the text itself; None if nothing is left.

    Order: thinking dropped, the last `<answer>...</answer>`, then `final_answer` of what is there, until nothing changes.
    """
    said = without_thinking(text)
    if said is None:
        return None
    said = said.strip()
    while True:
        inner = tagged(said)
        if inner is None:
            boxed, was_cut = _box(said)
            if was_cut:
                return None
            inner = boxed or labelled(said)
        if inner is None or inner == said:
            return said or None
        said = inner


def tagged(text: str) -> str | None:
    """The stripped content of the last complete `<answer>...</answer>`; None where there is none or it is empty."""
    before, close, _ = text.rpartition("</answer>")
    _, opening, inside = before.rpartition("<answer>")
    return (inside.strip() or None) if close and opening else None


def _box(text: str) -> tuple[str | None, bool]:
    """Content of the deciding box, and whether that box was cut."""
    for opening in reversed(list(_OPENING.finditer(text))):
        depth, at = 1, opening.end()
        while at < len(text) and depth:
            char = text[at]
            if char == "\\":
                at += 1  # \{ and \} are text, not structure
            elif char in "{}":
                depth += 1 if char == "{" else -1
            at += 1
        if depth:
            if text[opening.end() :].strip():
                return None, True
            continue
        content = text[opening.end() : at - 1].strip()
        if content:
            return content, False
    return None, False


def labelled(text: str) -> str | None:
    """The rest of the line after the last `Answer:` (any case) that has one, without markdown stars; None without it."""
    for label in reversed(list(_LABEL.finditer(text))):
        line = text[label.end() :].split("\n", 1)[0].strip().strip("*").strip()
        if line:
            return line
    return None


# ---- equality --------------------------------------------------------------------------------------------------

_THOUSANDS = re.compile(r"(?<![0-9.])([0-9]{1,3}(?:,[0-9]{3})+)(?![0-9])")
_MACRO = re.compile(r"\\(?:text|mbox|mathrm|textbf|mathbf)\s*\{([^{}]*)\}")
_INTEGER = re.compile(r"(?:[A-Za-z]\w*\s*=)?\s*([+-]?\s*[0-9]{1,4000})\s*(?:[A-Za-z][A-Za-z\s]*)?")


def as_integer(text: str) -> int | None:
    r"""The integer that an answer writes, after `$`, `\text{}`, degree marks, thousands commas, leading zeros, a full
    stop, `x =` and trailing unit words are taken off; None if that is no integer (of at most 4,000 digits)."""
    plain = _MACRO.sub(r" \1", text).replace("{,}", ",").replace("\\,", "").replace("\\!", "")
    plain = plain.replace("−", "-").replace("^{\\circ}", "").replace("^\\circ", "").replace("\\degree", "")
    plain = plain.replace("°", "").replace("\\$", "").replace("$", "").strip().rstrip(".").strip()
    plain = _THOUSANDS.sub(lambda found: found[1].replace(",", ""), plain)
    found = _INTEGER.fullmatch(plain)
    return int(found[1].replace(" ", "")) if found else None


def canonical(kind: Match, text: str, *, ignore_case: bool = False) -> str | None:
    r"""The answer in the form that votes are counted in: an answer again, which this function leaves as it is.

    `\boxed{33}` for "so it is \boxed{033}", the submitted text for `exact`, `<answer>...</answer>` for `countdown`.
    """
    if kind == "exact":
        said = submitted(text)
        return said.casefold() if said and ignore_case else said
    if kind == "countdown":
        inside = tagged(without_thinking(text) or "")
        return f"<answer>{' '.join(inside.split())}</answer>" if inside else None
    said = _pick(kind, text)
    if said is None:
        return None
    number = as_integer(said)
    plain = str(number) if number is not None else re.sub(r"\\[dt]frac(?![A-Za-z])", r"\\frac", " ".join(said.split()))
    plain = plain.rstrip("\\ ")
    wrapped = f"\\boxed{{{plain}}}"
    return wrapped if extract_boxed(wrapped) == plain else None


def _pick(kind: Match, text: str) -> str | None:
    said = without_thinking(text)
    if said is None:
        return None
    if kind == "dapo":
        return labelled(said) or extract_boxed(said)
    if kind == "gsm8k" and "####" in said:
        return said.rpartition("####")[2].strip().split("\n", 1)[0].strip() or None
    return final_answer(said)


def score_answer(kind: Match, gold: str, text: str, *, ignore_case: bool = False) -> Grade:
    r"""1 or 0 for a response against a gold answer.

    exact      `submitted` text equal to the gold text, both stripped (casefolded with `ignore_case`)
    math       `final_answer` equivalent to the gold by math-verify, which sees that one box only, gold first
    aime       `final_answer` equal as an integer; where either is none, as `math`
    dapo       as `aime`, but the last `Answer:` comes before a box
    gsm8k      as `aime`, but what follows the last `####` comes first
    countdown  the last `<answer>` is an expression of + - * / and brackets that uses each number once and has exactly the
               target's value; the gold is JSON: {"target": 13, "nums": [4, 9]}

    There is no time limit here: model text can keep math-verify busy for ever. A run grades through `GraderPool`.

    Raises:
        TaskFault: the gold answer is empty or cannot be read.
    """
    if not gold.strip():
        raise TaskFault("the gold answer is empty: nothing can be compared with it; mend or drop the row")
    if kind == "exact":
        said = submitted(text)
        if said is None:
            return Grade(0.0, "empty: no answer")
        want = submitted(gold) or gold.strip()
        is_equal = said.casefold() == want.casefold() if ignore_case else said == want
        return Grade(1.0) if is_equal else Grade(0.0, "wrong")
    if kind == "countdown":
        return _score_countdown(gold, text)
    if kind == "gsm8k":
        gold = gold.rpartition("####")[2].strip()
    gold = extract_boxed(gold) or gold
    whole = as_integer(gold) if kind != "math" else None
    if whole is None:
        _read_gold(gold)  # first, so that a bad gold is a fault whatever the model wrote
    said = _pick(kind, text)
    if said is None:
        return Grade(0.0, "unparsed: no final answer")
    number = as_integer(said) if whole is not None else None
    is_equal = number == whole if number is not None else _is_equivalent(gold, said)
    if is_equal is None:
        return Grade(0.0, "unparsed: the final answer is no mathematics that can be read")
    return Grade(1.0) if is_equal else Grade(0.0, "wrong")


@lru_cache(maxsize=512)
def _read_gold(gold: str) -> list[Any]:
    read = _parse(gold)
    if not read:
        raise TaskFault(f"math-verify reads nothing in the gold answer {gold!r}; mend or drop the row")
    return read


def _parse(answer: str) -> list[Any]:
    try:
        from math_verify import parse
    except ImportError as error:
        raise ConfigError("grading mathematics needs math-verify; pip install 'baton-rl[tasks]'") from error
    _quiet_math_verify()
    # Its own limits raise from SIGALRM and would replace ours; the pool limits the whole grading.
    return parse(f"\\boxed{{{answer}}}", parsing_timeout=None)  # pyright: ignore[reportArgumentType]


def _is_equivalent(gold: str, said: str) -> bool | None:
    """Whether math-verify finds the two equal; None where it reads nothing in what was said, or fails on it."""
    from math_verify import verify

    want = _read_gold(gold)
    try:
        read = _parse(said)
        return bool(verify(want, read, timeout_seconds=None, raise_on_error=True)) if read else None
    except Exception:  # the documented edge: sympy raises anything at all on odd text, and the gold was read
        return None


def warm_math() -> None:
    """Loads math-verify and its grammar (seconds), so that no answer's limit pays for it.

    Raises:
        ConfigError: math-verify is not installed.
    """
    _is_equivalent("\\frac{1}{2}", "0.5")


@lru_cache(maxsize=1)
def _quiet_math_verify() -> None:
    """It logs each text that it cannot read, and that it runs without its own limits; we count both."""
    for name in ("math_verify", "latex2sympy2_extended"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def _score_countdown(gold: str, text: str) -> Grade:
    try:
        row = json.loads(gold)
        target, nums = Fraction(row["target"]), sorted(int(n) for n in row["nums"])
    except (ValueError, TypeError, KeyError) as error:
        raise TaskFault(f'countdown gold {gold!r} is not JSON like {{"target": 13, "nums": [4, 9]}}') from error
    inside = tagged(without_thinking(text) or "")
    if inside is None:
        return Grade(0.0, "unparsed: no <answer>")
    # A right answer has a few characters per number; the bound keeps deep nesting away from the parser.
    if len(inside) > 200 or not re.fullmatch(r"[0-9+\-*/()\s]+", inside):
        return Grade(0.0, "unparsed: more than numbers, + - * / and brackets")
    used: list[int] = []

    def value(node: ast.expr) -> Fraction:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            used.append(node.value)
            return Fraction(node.value)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](value(node.left), value(node.right))
        raise SyntaxError

    try:
        result = value(ast.parse(inside, mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError):
        return Grade(0.0, "unparsed: no expression with a value")
    if sorted(used) != nums:
        return Grade(0.0, "wrong: not each number once")
    return Grade(1.0) if result == target else Grade(0.0, "wrong")
