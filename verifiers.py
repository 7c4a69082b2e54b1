"""Read the answer out of a completion and score it without, or with, a label.

Idea (OT-GRPO, sections 3, 4.4, 5.5, B.1, B.2). A transform T of a question changes its right answer in a
known way phi_T: it stays, or it is negated. So two answers y, y' to x and x' = T(x) can be checked against
each other although nobody knows the right one:

    boolean   verif_T(y, y') = 1 iff y' = phi_T(y)
    numeric   verif_T(y, y') = max(0, 1 - |y - y'| / max(y, y')),  and 1 when both are 0

`accuracy` is the labelled counterpart of Eq. (1), used for evaluation and for the reference runs only.

A completion should read `<think>...</think><answer>True</answer>`. The paper only says that malformed text
is "unparseable"; the rules here are ours and lean to caution, because whatever the parser forgives, a policy
under reinforcement learning will find:

- thinking and answers are told apart from left to right: a tag inside a block is part of its content, so an
  answer written inside the thinking is never taken for the answer (but costs the format reward);
- every answer block outside the thinking must read the same, and the last block must be an answer;
- the answer must be the whole content: `not true`, `True or False`, `about 3` are unparseable;
- a thinking whose opening tag is missing is still a thinking: all text before its closing tag belongs to it;
- tags are matched literally (lower case), the answer in any case.

Only the completion may be passed in: the prompt itself may contain answer tags.

>>> parse("<think>The bed is nearer.</think> <answer>true.</answer><|im_end|>", "boolean")
Parsed(answer=True, format=True, reason='ok')
>>> parse("<think>Far.</think><answer>about 3 m</answer>", "distance").reason
"not a plain decimal in metres: 'about 3 m'"
>>> verify(True, True, negates=True), verify(2.0, 4.0, negates=False)
(0.0, 0.5)

Run `python verifiers.py` for a table of verdicts.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

Answer = bool | float

# What the answer to each task looks like. Careful: the *task* "distance" asks which object is nearer to a
# third one and is boolean; the *kind* "distance" is a length in metres.
TASK_KIND = {
    "orientation": "boolean",
    "depth": "boolean",
    "size": "boolean",
    "distance": "boolean",
    "counting": "count",
    "abs_distance": "distance",
}
KINDS = ("boolean", "count", "distance")

END_OF_TURN = ("<|im_end|>", "<|endoftext|>")
TAG_ORDER = ["<think>", "</think>", "<answer>", "</answer>"]

TAG = re.compile(r"</?(?:think|answer)>")
# Leftmost first, up to the nearest closing tag of the same name, or to the end if there is none.
BLOCK = re.compile(r"<(think|answer)>(.*?)(</\1>|\Z)", re.DOTALL)
WELL_FORMED = re.compile(r"<think>.*</think>\s*<answer>.*</answer>", re.DOTALL)
# [0-9] and not \d: \d would let in the digits of every script.
DECIMAL = r"([0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
NUMBER = {
    "count": re.compile(DECIMAL),
    "distance": re.compile(DECIMAL + r"(?:\s*(?:m|meters?|metres?))?"),
}
WANTED = {"count": "a plain decimal", "distance": "a plain decimal in metres"}


@dataclass(frozen=True)
class Parsed:
    """Verdict on one completion. `answer` None means unparseable; `reason` is 'ok' or says what is missing."""

    answer: Answer | None
    format: bool  # the format reward: well-formed as a whole, and the answer parses
    reason: str


# ---------------------------------------------------------------------------------------------------------
# Parsing


def parse(text: str, kind: str) -> Parsed:
    """Read one completion (never prompt + completion). kind: 'boolean', 'count' or 'distance'; see TASK_KIND."""
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}, expected one of {', '.join(KINDS)}")
    text = strip_end_of_turn(text)
    contents, fault = final_answers(text)
    if fault:
        return Parsed(None, False, fault)

    readings = [read_answer(content, kind) for content in contents]
    answers = {answer for answer, _ in readings}
    if len(answers) > 1:  # a block that cannot be read disagrees with one that can
        return Parsed(None, False, f"{len(contents)} answer blocks disagree")
    answer, fault = readings[0]
    if answer is None:
        return Parsed(None, False, fault)

    fault = format_fault(text)
    return Parsed(answer, not fault, f"no format reward: {fault}" if fault else "ok")


def strip_end_of_turn(text: str) -> str:
    """Drop white space around the text and the end-of-turn tokens behind it.

    Only behind it: sampling stops at the first such token, so one in the middle was spelt out by the policy.
    """
    text = text.strip()
    while text.endswith(END_OF_TURN):
        for token in END_OF_TURN:
            text = text.removesuffix(token).rstrip()
    return text


def final_answers(text: str) -> tuple[list[str], str]:
    """Contents of all answer blocks outside the thinking, and '' or the reason why there is no final answer."""
    before, closing_tag, after = text.partition("</think>")
    if closing_tag and "<think>" not in before:
        text = after  # the opening tag is missing: everything up to here was thinking
    blocks = BLOCK.findall(text)  # [(name, content, closing tag or '')]; only the last can be unclosed
    if not blocks:
        return [], "no answer block after the thinking" if closing_tag else "no answer block"
    last_name, _, last_closing_tag = blocks[-1]
    if not last_closing_tag:
        return [], "the thinking never ends" if last_name == "think" else "the answer block never ends"
    if last_name == "think":
        return [], "no answer block after the thinking"
    return [content for name, content, _ in blocks if name == "answer"], ""


def read_answer(content: str, kind: str) -> tuple[Answer | None, str]:
    """The value an answer block holds, or None and the reason. Negative, infinite and NaN are no answers."""
    text = content.strip().removesuffix(".").rstrip().lower()
    shown = content.strip() if len(content) <= 40 else content.strip()[:37] + "..."
    if kind == "boolean":
        if text in ("true", "false"):
            return text == "true", ""
        return None, f"not exactly True or False: {shown!r}"
    match = NUMBER[kind].fullmatch(text)  # no sign, exponent, separator, "inf" or "nan" gets through
    if not match:
        return None, f"not {WANTED[kind]}: {shown!r}"
    value = float(match[1])
    if not math.isfinite(value):  # a few hundred digits in a row
        return None, f"too large: {shown!r}"
    return value, ""


def format_fault(text: str) -> str:
    """'' if the text is one think block, white space, one answer block and nothing else; otherwise the reason."""
    tags = TAG.findall(text)
    if tags != TAG_ORDER:
        found = " ".join(tags[:6]) + (" ..." if len(tags) > 6 else "")
        return f"the tags are {found}"
    return "" if WELL_FORMED.fullmatch(text) else "text outside the two blocks"


# ---------------------------------------------------------------------------------------------------------
# Verifiers


def verify(y: Answer, y_prime: Answer, negates: bool) -> float:
    """Consistency verifier verif_T(y, y') in [0, 1] of section 3 (boolean) and section 5.5 (numeric).

    Both answers are parsed ones: booleans, or finite numbers >= 0. negates: phi_T is the negation.
    Symmetric in y and y', since phi_T is its own inverse.
    """
    if isinstance(y, bool) != isinstance(y_prime, bool):
        raise TypeError(f"cannot compare {y!r} with {y_prime!r}: one is boolean, the other numeric")
    if isinstance(y, bool):
        return float(y_prime == (y != negates))  # != on booleans is "exclusive or": phi_T(y)
    if negates:
        raise ValueError("a numeric answer has no negation: no transform of counting or abs_distance negates")
    larger = max(y, y_prime)
    # differs from section 5.5: 0 / 0 is defined, because two "0" are the same answer.
    return max(0.0, 1.0 - abs(y - y_prime) / larger) if larger > 0 else 1.0


def accuracy(y: Answer | None, truth: Answer) -> float:
    """Accuracy verifier verif(y, y*) in [0, 1]: Eq. (1) for boolean, section 5.5 for numeric; 0 if unparseable.

    Chance is not 1/2 for numbers: a constant answer near the middle of the range scores far higher.
    """
    if y is None:
        return 0.0
    if isinstance(y, bool) != isinstance(truth, bool):
        raise TypeError(f"cannot score {y!r} against {truth!r}: one is boolean, the other numeric")
    if isinstance(truth, bool):
        return float(y == truth)
    return max(0.0, 1.0 - abs(y - truth) / truth) if truth > 0 else float(y == truth)


# ---------------------------------------------------------------------------------------------------------
# Worked example


def main() -> None:
    thinking = "<think>The red box is nearer.</think>"
    examples = [
        ("boolean", f"{thinking}\n<answer>True</answer><|im_end|>"),
        ("boolean", f"{thinking}<answer> FALSE. </answer>\n"),
        ("boolean", "<answer>True</answer>"),
        ("boolean", "<think>Maybe <answer>True</answer>? No.</think><answer>False</answer>"),
        ("boolean", f"{thinking}<answer>True</answer><answer>true</answer>"),
        ("boolean", f"{thinking}<answer>True</answer><answer>False</answer>"),
        ("boolean", f"{thinking}<answer>not true</answer>"),
        ("boolean", "<think>Let me see. <answer>True</answer>"),
        ("count", "<think>One, two, three.</think><answer>3</answer>"),
        ("count", "<think>One, two, three.</think><answer>three</answer>"),
        ("distance", "<think>A bed is 2 m long.</think><answer>2.5 metres.</answer>"),
        ("distance", "<think>A bed is 2 m long.</think><answer>-2.5 m</answer>"),
    ]
    print(f"{'completion':<78} {'answer':>7} format  reason")
    for kind, text in examples:
        parsed = parse(text, kind)
        shown = text.replace("\n", "\\n")
        print(f"{shown:<78} {parsed.answer!s:>7} {parsed.format:>6}  {parsed.reason}")

    print("\nverif_T(y, y')")
    for y, y_prime, negates in [(True, True, False), (True, True, True), (2.0, 3.0, False), (0.0, 0.0, False)]:
        effect = "negates" if negates else "keeps"
        print(f"  y = {y!s:<5} y' = {y_prime!s:<5} T {effect:<8} {verify(y, y_prime, negates):.3f}")


if __name__ == "__main__":
    main()
