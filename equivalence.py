"""A consistency set with exact labels: (question, response, reference), written by program, so that the label is known.

Idea (Consistency Reward Models, key designs 1 and 3): whether a response agrees with a reference is a question about two
texts, not about the world. A kind of equivalence is a value, the ways to write it, and the values it could be mistaken
for. A consistent item writes one value twice, an inconsistent one writes the value and a look-alike: a digit off, two
digits transposed, the wrong unit, rounded the wrong way, neighbours of an ordered list exchanged. Half and half of each kind.

differs from the paper: its 860K items are real answers of 13 models on which three judges agree; ours are generated, in a
small language, so labels are exact and held-out *kinds* of equivalence can be defined (HELD_OUT). The analysis and the
reflection, there written by the judges, are written by rule here: each answer brought to one form, then part against part.

    item = draw_item("cm_m", consistent=False, rng=np.random.default_rng(0))
    item.said, item.reference            # '8.62 m', '852 cm'
    item.thinking                        # 'Analysis: response 8.62 m is 8.62 m; reference is 8.52 m.
                                         #  Reflection: 8:8 .:. 6:5 differs. ...'

Run `python equivalence.py` for one item of each kind and label.
"""
from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any, Callable, Sequence

import numpy as np

from data import hashed
from questions import COLOURS, Question, prompt_text

Rng = np.random.Generator
Write = Callable[[Any, Rng], str]                # one way of writing a value
UNANSWERED = 0.05                                # share of the inconsistent items whose response holds no answer
ONES = ("zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
        "eighteen nineteen").split()
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
NAMES = ("bed", "box", "chair", "desk", "door", "lamp", "sofa", "table")


@dataclass(frozen=True)
class Item:
    """One triple with its label. `said` is the answer inside the response ('' if it gives none)."""
    kind: str
    question: str
    response: str
    reference: str
    consistent: bool
    said: str
    read_said: str               # the one form that the analysis brings `said` and `reference` to
    read_reference: str

    @property
    def thinking(self) -> str:
        """Analysis and reflection. The verdict follows from them: `consistent` iff all parts are the same."""
        response = f"response {self.said} is {self.read_said}" if self.said else "response gives no answer"
        same = self.read_said == self.read_reference
        return (f"Analysis: {response}; reference is {self.read_reference}.\n"
                f"Reflection: {side_by_side(self.read_said, self.read_reference)} {'same' if same else 'differs'}.\nConclusion: ")


def side_by_side(a: str, b: str) -> str:
    """Part against part, up to the first difference: '2.35 m', '2.53 m' -> '2:2 .:. 3:5'. Digits are parts of their own."""
    parts = [re.findall(r"\d|[^\W\d]+|[^\w\s]", text) for text in (a, b)]
    n = max(map(len, parts))
    out = []
    for left, right in zip(*(p + ["end"] * (n - len(p)) for p in parts)):
        out.append(f"{left}:{right}")
        if left != right:
            break
    return " ".join(out)


# ------------------------------------------------------------------------------------------------------ writing values
def decimal(value: Fraction) -> str:
    """Exactly, without trailing zeros: 3/8 -> 0.375. Only for fractions that terminate."""
    exact = Decimal(value.numerator) / Decimal(value.denominator)
    assert Fraction(exact) == value, value
    text = format(exact, "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


def number_words(n: int) -> str:
    """0 to 99 in English."""
    if n < 20:
        return ONES[n]
    return TENS[n // 10 - 2] + (f"-{ONES[n % 10]}" if n % 10 else "")


def digits(n: int, rng: Rng) -> str:
    return str(n)


def words(n: int, rng: Rng) -> str:
    return number_words(n)


def measured(per_unit: int, *names: str) -> Write:
    """A length that is an integer number of small units, written in a unit of `per_unit` small ones."""
    return lambda n, rng: f"{decimal(Fraction(n, per_unit))} {rng.choice(names)}"


def feet_inches(n: int, rng: Rng) -> str:
    return f"{n // 12} ft" + (f" {n % 12} in" if n % 12 else "")


def fraction(nd: tuple[int, int], rng: Rng) -> str:
    return f"{nd[0]}/{nd[1]}"


def latex_fraction(nd: tuple[int, int], rng: Rng) -> str:
    return str(rng.choice([r"\frac{%d}{%d}", r"$\frac{%d}{%d}$", r"\dfrac{%d}{%d}", r"\boxed{\frac{%d}{%d}}"])) % nd


def latex_number(n: int, rng: Rng) -> str:
    return str(rng.choice([r"\boxed{%s}", "$%s$", "%s"])) % f"{n // 1000}{{,}}{n % 1000:03d}"


def one_of(*texts: tuple[str, str]) -> Write:
    """A truth value, written by one of these pairs (if false, if true)."""
    return lambda value, rng: str(texts[rng.integers(len(texts))][value])


def listed(items: tuple[str, ...], rng: Rng) -> str:
    return ", ".join(items) if rng.random() < 0.5 else f"{', '.join(items[:-1])} and {items[-1]}"


def listed_in_any_order(items: tuple[str, ...], rng: Rng) -> str:
    return listed(tuple(rng.permutation(items)), rng)


# ---------------------------------------------------------------------------------------------------------- look-alikes
def alike_integers(n: int, factors: Sequence[int] = (10,)) -> list[int]:
    """What n > 0 could be mistaken for: one digit off by one, two neighbours transposed, the point or the unit shifted."""
    text, found = str(n), {n * f for f in factors} | {n // f for f in factors if n % f == 0}
    for i, d in enumerate(text):
        found |= {int(text[:i] + str(int(d) + step) + text[i + 1:]) for step in (-1, 1) if 0 <= int(d) + step <= 9}
        found.add(int(text[:i] + text[i:i + 2][::-1] + text[i + 2:]))
    return sorted(found - {n, 0})


def alike_fractions(nd: tuple[int, int]) -> list[tuple[int, int]]:
    n, d = nd
    return [(m, d) for m in {n - 1, n + 1, d - n} - {n} if 0 < m < d]


def neighbours_exchanged(items: tuple[str, ...]) -> list[tuple[str, ...]]:
    return [items[:i] + (items[i + 1], items[i]) + items[i + 2:] for i in range(len(items) - 1)]


def one_replaced(items: tuple[str, ...]) -> list[tuple[str, ...]]:
    return [items[:i] + (name,) + items[i + 1:] for i in range(len(items)) for name in NAMES if name not in items]


# --------------------------------------------------------------------------------------------------------------- kinds
@dataclass(frozen=True)
class Kind:
    """One kind of equivalence. `read` gives the one form of a value; a closed kind has only a few pairs of answers."""
    draw: Callable[[Rng], Any]
    alike: Callable[[Any], list]
    forms: tuple[tuple[Write, Write], ...]
    read: Callable[[Any], str]
    ask: Callable[[Rng], str]
    closed: bool = False


def asking(*texts: str) -> Callable[[Rng], str]:
    return lambda rng: str(rng.choice(texts))


def project_question(*tasks: str) -> Callable[[Rng], str]:
    """What the policy itself is asked (questions.py)."""
    def ask(rng: Rng) -> str:
        ids = dict(enumerate(rng.choice(NAMES, 3, replace=False), start=1))
        task = str(rng.choice(tasks))
        n = {"distance": 3, "counting": 1}.get(task, 2)
        return without_listing(prompt_text(Question(task, tuple(range(1, n + 1)), int(rng.integers(2)),
                                                    bool(rng.integers(2)) and n > 1, int(rng.integers(5))), ids))
    return ask


def without_listing(prompt: str) -> str:
    """The question and how to answer it. Which object is marked how belongs to the picture, which a judge never sees."""
    return "\n".join(prompt.splitlines()[-2:])


BOOLEAN = dict(draw=lambda rng: bool(rng.integers(2)), alike=lambda value: [not value], closed=True)
SPATIAL = project_question("orientation", "depth", "size", "distance")
true_false = one_of(("False", "True"), ("false", "true"), ("False.", "True."))
sides = one_of(("left", "right"), ("to the left", "to the right"), ("on the left side", "on the right side"))

LENGTH = dict(draw=lambda rng: int(rng.integers(11, 1000)), alike=lambda n: alike_integers(n, (10, 100)),     # in cm
              read=lambda n: f"{decimal(Fraction(n, 100))} m", ask=asking("How long is the table?", "How far away is the lamp?"))
metres, centimetres = measured(100, "m", "metres", "meters"), measured(1, "cm", "centimetres")
bare_metres = measured(100, "m", "metres", "meters", "")
millimetres = lambda n, rng: f"{10 * n} mm"

FRACTION = dict(draw=lambda rng: draw_fraction(rng), alike=alike_fractions, read=lambda nd: decimal(Fraction(*nd)),
                ask=asking("What share of the floor is covered?", "What is the probability?"))
as_decimal = lambda nd, rng: decimal(Fraction(*nd))
percent = lambda nd, rng: decimal(100 * Fraction(*nd)) + str(rng.choice(["%", " percent"]))
latex_percent = lambda nd, rng: decimal(100 * Fraction(*nd)) + r"\%"

INTEGER = dict(alike=lambda n: [m for m in alike_integers(n) if m < 100], read=str, ask=asking("How many chairs are there?"))
small = lambda rng: int(rng.integers(1, 10 if rng.random() < 0.5 else 100))
LIST = dict(draw=lambda rng: tuple(rng.choice(NAMES, 3, replace=False)))


def draw_fraction(rng: Rng) -> tuple[int, int]:
    d = int(rng.choice([4, 5, 8, 10, 20, 25]))
    return int(rng.integers(1, d)), d


def draw_rounded(rng: Rng) -> tuple[int, int]:
    """(thousandths of a metre, decimals to keep), never half-way between two roundings."""
    keep, n = int(rng.integers(1, 3)), 0
    while n % 10 ** (3 - keep) == 5 * 10 ** (2 - keep) or n == 0:
        n = int(rng.integers(200, 10000))
    return n, keep


def rounded(n: int, keep: int) -> Fraction:
    return Fraction(round(Fraction(n, 10 ** (3 - keep))), 10**keep)


def rounded_text(n_keep: tuple[int, int], rng: Rng) -> str:
    return f"{float(rounded(*n_keep)):.{n_keep[1]}f}" + str(rng.choice(["", " m"]))


def rounded_wrongly(n_keep: tuple[int, int]) -> list[tuple[int, int]]:
    """The neighbour on the other side of the exact value, and the one further on."""
    n, keep = n_keep
    step = 10 ** (3 - keep)
    return [(m, keep) for m in (n - step, n + step) if m > 0]


KINDS: dict[str, Kind] = {
    "true_false": Kind(forms=((true_false, one_of(("False", "True"))),), read=str, ask=SPATIAL, **BOOLEAN),
    "yes_no": Kind(forms=((one_of(("no", "yes"), ("No", "Yes")), one_of(("False", "True"))),), read=str, ask=SPATIAL, **BOOLEAN),
    "side": Kind(forms=((sides, sides),), read=lambda right: "right" if right else "left",
                 ask=asking("On which side of the bed is the lamp?", "Is the box left or right of the door?"), **BOOLEAN),
    "count": Kind(small, forms=((digits, digits),), **INTEGER | dict(ask=project_question("counting"))),
    "words": Kind(small, forms=((words, digits),), **INTEGER),
    "m_m": Kind(forms=((bare_metres, metres),), **LENGTH),
    "cm_m": Kind(forms=((centimetres, metres),), **LENGTH),
    "mm_cm": Kind(forms=((millimetres, centimetres),), **LENGTH),
    "ft_in": Kind(lambda rng: int(rng.integers(12, 120)), alike_integers, ((feet_inches, lambda n, rng: f"{n} in"),),
                  lambda n: f"{n} in", asking("How tall is the door?")),
    "fraction_decimal": Kind(forms=((fraction, as_decimal),), **FRACTION),
    "decimal_percent": Kind(lambda rng: int(rng.integers(1, 1000)), alike_integers,
                            ((lambda n, rng: as_decimal((n, 1000), rng), lambda n, rng: percent((n, 1000), rng)),),
                            lambda n: decimal(Fraction(n, 1000)), FRACTION["ask"]),
    "latex_fraction": Kind(forms=((latex_fraction, fraction),), **FRACTION),
    "latex_number": Kind(lambda rng: int(rng.integers(1000, 10000)), lambda n: [m for m in alike_integers(n) if 999 < m < 10000],
                         ((latex_number, digits),), str, asking("How many tiles are there?")),
    "rounding": Kind(draw_rounded, rounded_wrongly, ((rounded_text, lambda v, rng: decimal(Fraction(v[0], 1000)) + " m"),),
                     lambda v: decimal(rounded(*v)), project_question("abs_distance")),
    "ordered": Kind(alike=neighbours_exchanged, forms=((listed, listed),), read=", ".join,
                    ask=asking("List the objects from nearest to furthest."), **LIST),
    "unordered": Kind(alike=one_replaced, forms=((listed_in_any_order, listed_in_any_order),),
                      read=lambda items: ", ".join(sorted(items)), ask=asking("Which objects are there, in any order?"), **LIST),
    # held out, made of parts that the kinds above have ...
    "mm_m": Kind(forms=((millimetres, metres),), **LENGTH),
    "word_metres": Kind(lambda rng: 100 * int(rng.integers(1, 21)), lambda n: [n - 100, n + 100][n == 100:],
                        ((lambda n, rng: f"{number_words(n // 100)} metres", centimetres),), LENGTH["read"], LENGTH["ask"]),
    "fraction_percent": Kind(forms=((fraction, percent),), **FRACTION),
    "latex_decimal": Kind(forms=((latex_fraction, as_decimal),), **FRACTION),
    "latex_percent": Kind(forms=((latex_percent, as_decimal),), **FRACTION),
    # ... or with a part that they have not
    "km_m": Kind(lambda rng: 10 * int(rng.integers(11, 1000)), alike_integers,
                 ((measured(1000, "km"), lambda n, rng: f"{n} m"),), lambda n: f"{n} m", LENGTH["ask"]),
    "weeks_days": Kind(lambda rng: int(rng.integers(1, 10)), lambda n: [n - 1, n + 1][n == 1:],
                       ((lambda n, rng: f"{number_words(n)} week{'s' * (n > 1)}", lambda n, rng: f"{7 * n} days"),),
                       lambda n: f"{7 * n} days", asking("How long did it stand there?")),
    "correct": Kind(forms=((one_of(("incorrect", "correct"), ("wrong", "right")), one_of(("False", "True"))),), read=str,
                    ask=SPATIAL, **BOOLEAN),
}
NEW_COMBINATIONS = ("mm_m", "word_metres", "fraction_percent", "latex_decimal", "latex_percent")
NEW_PARTS = ("km_m", "weeks_days", "correct")
HELD_OUT = NEW_COMBINATIONS + NEW_PARTS
TRAINED = tuple(name for name in KINDS if name not in HELD_OUT)


# --------------------------------------------------------------------------------------------------------------- items
def respond(said: str, mention: str, rng: Rng) -> str:
    """A response that ends in this answer ('': in none). The thinking may mention another one, and does not count."""
    thoughts = [f"{rng.choice(COLOURS)} {rng.integers(10)}, {rng.choice(COLOURS)} {rng.integers(10)}, "
                f"{rng.choice(['left', 'right', 'closer', 'further', 'bigger', 'smaller'])}",
                "I look at the marks.", f"At first I thought {mention}.", ""]
    thought = str(rng.choice(thoughts))
    if not said:
        return f"<think>{thought}" + str(rng.choice(["", "</think>"]))
    shape = str(rng.choice(["<think>{t}</think><answer>{a}</answer>", "<think>{t}</think>\n<answer> {a} </answer>",
                            "{t} The answer is {a}.", "{a}"]))
    return shape.format(t=thought, a=said).strip()


def draw_item(name: str, consistent: bool, rng: Rng) -> Item:
    """One item of a kind with the wanted label."""
    kind = KINDS[name]
    value = kind.draw(rng)
    alike = kind.alike(value)
    other = alike[rng.integers(len(alike))]
    writes = kind.forms[rng.integers(len(kind.forms))]
    if name != "rounding" and rng.random() < 0.5:            # only the response may be the rounded one
        writes = writes[::-1]
    reference = writes[1](value, rng)
    said, read = (writes[0](value, rng), kind.read(value)) if consistent else (writes[0](other, rng), kind.read(other))
    mention = writes[0](other if consistent else value, rng)
    said, reference = said.strip(), reference.strip()
    if not consistent and rng.random() < UNANSWERED:
        said, read = "", "nothing"
    return Item(name, kind.ask(rng), respond(said, mention, rng), reference, consistent, said, read, kind.read(value))


def in_test(item: Item) -> bool:
    """A fifth is for testing only: by the pair of answers, or by the whole text where a kind has only a few pairs."""
    what = (item.question, item.response) if KINDS[item.kind].closed else (item.said,)
    return hashed("judge", item.kind, *what, item.reference) < 0.2


def draw_set(names: Sequence[str], n: int, seed: int, split: str = "train") -> list[Item]:
    """n items, kind after kind in an order of this seed's own, each consistent and inconsistent by turns.

    Split: train or test, no pair in both. The order matters where n is small: all kinds must have their turn over the seeds.
    """
    rng, items = np.random.default_rng([seed, split == "test"]), []
    order = rng.permutation(len(names))
    while len(items) < n:
        i = len(items)
        item = draw_item(names[order[i // 2 % len(names)]], i % 2 == 0, rng)
        if in_test(item) == (split == "test"):
            items.append(item)
    return items


if __name__ == "__main__":
    for item in (item for name in KINDS for item in draw_set((name,), 2, seed=0)):
        print(f"{item.kind:<17}{'<|+|>' if item.consistent else '<|-|>'}  {item.said!r:<24} {item.reference!r:<24} "
              f"{item.thinking.splitlines()[1]}")
