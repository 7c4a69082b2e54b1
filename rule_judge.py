"""Two judges without a model, to measure a model judge against: exact match, and rules with sympy.

Idea (Consistency Reward Models, background): rule checkers such as MathRuler read numbers out of LaTeX and compare them
exactly, and fail on units, number words and paraphrase: consistent answers are called inconsistent. `rule_judge` is one in
that manner: fractions, percents, \\boxed, thousands, a relative tolerance of 1e-4; it knows no unit and no word. Somebody who
knows the kinds of equivalence.py could write rules for each of them: that is how its labels are made.

differs from MathRuler: only digits and + - * / ( ) . ever reach sympy, whose parser would run whatever a policy writes.

    rule_judge([("", "The answer is \\\\frac{3}{4}.", "0.75"), ("", "75 cm", "0.75 m")])      # consistent, inconsistent

Both have the signature of judge.Judge: [(question, response, reference), ...] -> [Verdict, ...]. They never abstain.
Run `python rule_judge.py` for what they say about one consistent item of each kind.
"""
from __future__ import annotations

import re
from typing import Sequence

import sympy

from judge import Triple, Verdict

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
ANSWER_IS = re.compile(r"answer is (.*)", re.DOTALL)
ARITHMETIC = re.compile(r"[0-9.+\-*/() ]+")


def exact_match(triples: Sequence[Triple]) -> list[Verdict]:
    """The answer and the reference are the same text, apart from case, white space around and full stops behind."""
    return [verdict(plain(answer_in(response)) == plain(reference)) for _, response, reference in triples]


def rule_judge(triples: Sequence[Triple]) -> list[Verdict]:
    """The same text, or the same number."""
    return [verdict(equal(answer_in(response), reference)) for _, response, reference in triples]


def verdict(consistent: bool) -> Verdict:
    return Verdict(int(consistent), 1.0 if consistent else -1.0, "")


def answer_in(response: str) -> str:
    """The last answer block, else what follows the last `answer is`, else everything behind the thinking."""
    behind = response.rpartition("</think>")[2]
    found = ANSWER.findall(behind) or ANSWER_IS.findall(behind)
    return found[-1] if found else "" if "<think>" in behind else behind


def plain(text: str) -> str:
    return text.strip().rstrip(".").rstrip().lower()


def equal(a: str, b: str) -> bool:
    if plain(a) == plain(b):
        return True
    x, y = number(a), number(b)
    return x is not None and y is not None and bool(abs(x - y) <= 1e-4 * max(abs(x), abs(y)))


def number(text: str) -> sympy.Number | None:
    """The value of a number, fraction, percentage or product of these in plain or LaTeX form, or None."""
    text = plain(text).replace("{,}", "").replace("$", "").replace("\\%", "%").replace("dfrac", "frac")
    text = re.sub(r"\\frac\{([^{}]*)\}\{([^{}]*)\}", r"((\1)/(\2))", text)
    text = re.sub(r"\\boxed\{(.*)\}", r"\1", text)
    text = re.sub(r"%$", "/100", text)
    if not ARITHMETIC.fullmatch(text) or len(text) > 40 or "**" in text:                    # no towers of powers
        return None
    try:
        value = sympy.sympify(text, rational=True)
    except (sympy.SympifyError, TypeError, ZeroDivisionError):
        return None
    return value if value.is_number and value.is_finite else None


if __name__ == "__main__":
    from equivalence import KINDS, draw_set

    print(f"{'kind':<17} {'response says':<24} {'reference':<24} exact  rules     (all of them are consistent)")
    for item in (draw_set((name,), 2, seed=1)[0] for name in KINDS):
        triple = (item.question, item.response, item.reference)
        print(f"{item.kind:<17} {item.said:<24} {item.reference:<24} "
              f"{'yes' if exact_match([triple])[0].hard else '-':<6} {'yes' if rule_judge([triple])[0].hard else '-'}")
