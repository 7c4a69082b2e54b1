"""What counts as an answer, what earns the format reward, and how two answers are compared."""

import doctest
import math
import random
import re
import string

import numpy as np
import pytest

import verifiers
from verifiers import KINDS, TASK_KIND, accuracy, parse, verify

pytestmark = pytest.mark.fast

THINK = "<think>The red box is nearer.</think>"


def answer(content: str, kind: str = "boolean"):
    return parse(f"{THINK}<answer>{content}</answer>", kind).answer


# --- format: requirement 4 -------------------------------------------------------------------------------

WELL_FORMED = {
    "multi-line thinking": "<think>First line.\nSecond line.\n\nThird.</think><answer>True</answer>",
    "blank lines between the blocks": f"{THINK}\n\n \t\n<answer>True</answer>",
    "newline in the answer block": f"{THINK}<answer>\nTrue\n</answer>",
    "trailing newline": f"{THINK}<answer>True</answer>\n",
    "trailing end token": f"{THINK}<answer>True</answer><|im_end|>",
    "several end tokens and newlines": f"{THINK}<answer>True</answer>\n<|im_end|>\n<|endoftext|><|endoftext|>\n",
    "leading white space": f"\r\n\t {THINK}<answer>True</answer>",
    "empty thinking": "<think></think><answer>True</answer>",
    "less-than signs in the thinking": "<think>3 < 5 and <b>7</b> > 5</think><answer>True</answer>",
}


@pytest.mark.parametrize("text", WELL_FORMED.values(), ids=WELL_FORMED.keys())
def test_white_space_and_end_tokens_cost_nothing(text):
    assert parse(text, "boolean") == verifiers.Parsed(True, True, "ok")


MALFORMED_BUT_READABLE = {
    "no thinking": "<answer>True</answer>",
    "opening think tag missing": "The red box.</think><answer>True</answer>",
    "text before": f"Sure! {THINK}<answer>True</answer>",
    "text between": f"{THINK} So <answer>True</answer>",
    "text after": f"{THINK}<answer>True</answer> That is my answer.",
    "two think blocks": f"{THINK}{THINK}<answer>True</answer>",
    "two agreeing answers": f"{THINK}<answer>True</answer><answer>true.</answer>",
    "stray closing tags": f"{THINK}<answer>True</answer></answer></think>",
    "answer tag in the thinking": "<think>Is it <answer>False</answer>?</think><answer>True</answer>",
    "lone opening answer tag in the thinking": "<think>Now <answer> hm</think><answer>True</answer>",
    "lone closing answer tag in the thinking": "<think>Now </answer> hm</think><answer>True</answer>",
    "opening think tag in the thinking": "<think>Now <think> hm</think><answer>True</answer>",
    "end token in the middle": f"{THINK}<|im_end|><answer>True</answer>",
    "answer in the thinking, opening tag missing": "Is it <answer>False</answer>?</think><answer>True</answer>",
}


@pytest.mark.parametrize("text", MALFORMED_BUT_READABLE.values(), ids=MALFORMED_BUT_READABLE.keys())
def test_malformed_completion_is_read_but_earns_no_format_reward(text):
    parsed = parse(text, "boolean")
    assert parsed.answer is True and not parsed.format
    assert parsed.reason.startswith("no format reward: ")


# --- which block is the answer: requirement 5 ------------------------------------------------------------


def test_final_answer_outside_the_thinking_counts():
    parsed = parse("<think>It seems <answer>True</answer>, but no.</think><answer>False</answer>", "boolean")
    assert parsed.answer is False and not parsed.format


WITHOUT_A_FINAL_ANSWER = {
    "nothing": "",
    "only end tokens": "<|im_end|>\n<|endoftext|>",
    "no tags": "True",
    "tag only in the prompt": "<think>The prompt asked for answer tags.</think> True",
    "answer only in the thinking": "<think><answer>True</answer></think>",
    "answer only in a thinking without opening tag": "<answer>True</answer></think>",
    "answer before the thinking": f"<answer>True</answer>{THINK}",
    "thinking never ends": "<think>Let me see. <answer>True</answer>",
    "second thinking never ends": f"{THINK}<answer>True</answer><think>Or",
    "answer never ends": f"{THINK}<answer>True",
    "second answer never ends": f"{THINK}<answer>True</answer><answer>Fal",
    "contradiction": f"{THINK}<answer>True</answer><answer>False</answer>",
    "contradiction, more often True": f"{THINK}{'<answer>True</answer>' * 3}<answer>False</answer>",
    "contradiction across two thinkings": f"{THINK}<answer>True</answer>{THINK}<answer>False</answer>",
    "contradiction before and after the thinking": f"<answer>False</answer>{THINK}<answer>True</answer>",
    "contradiction with an unreadable one": f"{THINK}<answer>True</answer><answer>unsure</answer>",
    "nested answer tags": f"{THINK}<answer><answer>True</answer></answer>",
    "thinking inside the answer": "<answer><think>Hm.</think>True</answer>",
    "tags in capitals": "<THINK>Hm.</THINK><ANSWER>True</ANSWER>",
    "tags with spaces": "<think>Hm.</think>< answer >True</ answer >",
}


@pytest.mark.parametrize("text", WITHOUT_A_FINAL_ANSWER.values(), ids=WITHOUT_A_FINAL_ANSWER.keys())
def test_completion_without_one_clear_final_answer_is_unparseable(text):
    parsed = parse(text, "boolean")
    assert parsed.answer is None and not parsed.format
    assert parsed.reason and parsed.reason != "ok"


# --- what an answer may look like ------------------------------------------------------------------------


SPELLINGS_OF_TRUE = ["True", "true", "TRUE", "tRuE", " True ", "\n\tTrue\r\n", "True.", "True .", " true. "]


@pytest.mark.parametrize("content", SPELLINGS_OF_TRUE)
def test_case_white_space_and_one_full_stop_do_not_matter(content):
    assert answer(content) is True


NO_BOOLEAN = "|not true|True or False|True False|True, False|truefalse|yes|no|1|0|T|True..|.True|True!|'True'"
NO_BOOLEAN += "|**True**|Tr ue|Trueﾠ|ＴＲＵＥ|answer: True|None|True<|im_end|>|<b>True</b>"
NO_BOOLEAN += "|object 1|.|True?|¬True|un true|\u200bTrue"


@pytest.mark.parametrize("content", [*NO_BOOLEAN.split("|"), "True<|im_end|>", "Tr<|im_end|>ue"])
def test_anything_but_true_or_false_is_unparseable(content):
    assert answer(content) is None


PLAIN_DECIMALS = [("3", 3.0), ("0", 0.0), ("2.50", 2.5), (" 007. ", 7.0), (".5", 0.5), ("3.", 3.0)]


@pytest.mark.parametrize("kind", ["count", "distance"])
@pytest.mark.parametrize("content, value", PLAIN_DECIMALS)
def test_plain_decimals_are_numbers(content, value, kind):
    assert answer(content, kind) == value and isinstance(answer(content, kind), float)


NO_NUMBER = "|-3|-0|+3|inf|-inf|infinity|nan|NaN|1e3|1E3|1,000|1_000|3,5|1/2|3..|3.0.0|.|..|3-4|2 3|~3|about 3"
NO_NUMBER += "|three|True|0x10|٣|３|²|½|3%|$3|3 cm|3 km|3 mm|3 ft|m|.m"
NO_NUMBER += "|3 m m|3 m 2|3m2|3 meterſ|3 ms|3 mmetres|−3|3 .5"


@pytest.mark.parametrize("kind", ["count", "distance"])
@pytest.mark.parametrize("content", [*NO_NUMBER.split("|"), "9" * 400, "1" + "0" * 309, "-" + "9" * 400])
def test_signs_exponents_words_and_infinities_are_no_numbers(content, kind):
    assert answer(content, kind) is None


@pytest.mark.parametrize("unit", ["m", " m", "M", " m.", "meter", " meters", " metre", "\nMetres.", "  METERS "])
def test_metres_may_follow_a_distance_but_not_a_count(unit):
    assert answer("2.5" + unit, "distance") == 2.5
    assert answer("2.5" + unit, "count") is None


def test_equal_answers_in_different_spelling_agree():
    assert parse(f"{THINK}<answer>2.5 m</answer><answer>2.50</answer>", "distance").answer == 2.5
    assert parse(f"{THINK}<answer>2.5 m</answer><answer>2.51</answer>", "distance").answer is None


def test_every_task_has_a_kind_and_unknown_kinds_are_refused():
    assert set(TASK_KIND.values()) == set(KINDS)
    assert TASK_KIND["distance"] == "boolean" and TASK_KIND["abs_distance"] == "distance"
    with pytest.raises(ValueError, match="boolean, count, distance"):
        parse("True", "bool")


# --- random completions ----------------------------------------------------------------------------------


def soup(rng: random.Random) -> str:
    pieces = ["<think>", "</think>", "<answer>", "</answer>", "True", "False", "3", " m", ".", " ", "\n", "<|im_end|>"]
    pieces += ["<think>Hm.</think>", "<answer>True</answer>", "<answer>3</answer>"]
    return "".join(rng.choice(pieces) for _ in range(rng.randrange(12)))


def slow_final_answers(text: str) -> list[str] | None:
    """The same rules as a state machine over tags, written independently of the regular expressions."""
    tags = ("<think>", "</think>", "<answer>", "</answer>")
    tokens, i = [], 0
    while i < len(text):
        tag = next((tag for tag in tags if text.startswith(tag, i)), text[i])
        tokens.append(tag)
        i += len(tag)
    if "</think>" in tokens and "<think>" not in tokens[: tokens.index("</think>")]:
        tokens = tokens[tokens.index("</think>") + 1 :]
    inside, contents, last = None, [], None
    for token in tokens:
        if inside is None and token in ("<think>", "<answer>"):
            inside = last = token
            contents += [""] if token == "<answer>" else []
        elif inside is not None and token == inside.replace("<", "</"):
            inside = None
        elif inside == "<answer>":
            contents[-1] += token
    return contents if inside is None and last == "<answer>" else None


NO_TAG = r"(?:(?!</?(?:think|answer)>).)*"
WELL_FORMED_RETYPED = re.compile(
    rf"\s*<think>{NO_TAG}</think>\s*<answer>{NO_TAG}</answer>(?:\s|<\|im_end\|>|<\|endoftext\|>)*", re.DOTALL
)


@pytest.mark.parametrize("kind", KINDS)
def test_random_tag_soup_is_read_as_by_a_state_machine(kind):
    rng, readable, formatted = random.Random(0), 0, 0
    for _ in range(20_000):
        text = soup(rng)
        if rng.random() < 0.3:
            value = rng.choice(["True", "False", "3", "3 m"])
            text = f"<think>{soup(rng)}</think>{soup(rng)}<answer>{value}</answer>"
        parsed = parse(text, kind)
        contents = slow_final_answers(verifiers.strip_end_of_turn(text)) or []
        values = {verifiers.read_answer(content, kind)[0] for content in contents}
        assert parsed.answer == (values.pop() if len(values) == 1 else None), text
        assert parsed.format == (parsed.answer is not None and WELL_FORMED_RETYPED.fullmatch(text) is not None), text
        assert parsed.reason and (parsed.reason == "ok") == parsed.format
        assert parse(f"\n{text} <|im_end|>\n<|endoftext|>", kind) == parsed, text
        readable, formatted = readable + (parsed.answer is not None), formatted + parsed.format
    assert readable > formatted > 20  # the soup does reach all three verdicts


def test_no_random_string_crashes_the_parser_or_yields_a_bad_number():
    rng = random.Random(1)
    alphabet = string.printable + "\0\u200b\u2028\ufefféİſK٣😀<>/.-0123456789"
    for _ in range(20_000):
        content = "".join(rng.choice(alphabet) for _ in range(rng.randrange(8)))
        for kind in ("count", "distance"):
            value = answer(content, kind)
            assert value is None or (math.isfinite(value) and value >= 0)


PIECES = ["<think>", "</think>", "<answer>", "</answer>", " ", "\n", "<|im_end|>", "9", "<", "m "]


@pytest.mark.parametrize("piece", PIECES)
def test_long_repetitions_are_parsed_in_linear_time(piece):
    # A quadratic regular expression would take minutes on these.
    for text in (piece * 20_000, f"{THINK}<answer>{piece * 20_000}</answer>x", f"{THINK}{piece * 20_000}<answer>1"):
        assert parse(text, "distance").format is False


# --- verifiers -------------------------------------------------------------------------------------------


def test_boolean_verifier_is_the_truth_table_of_section_3():
    for y in (True, False):
        assert verify(y, y, negates=False) == 1.0 and verify(y, not y, negates=False) == 0.0
        assert verify(y, y, negates=True) == 0.0 and verify(y, not y, negates=True) == 1.0


def test_numeric_verifier_is_the_ratio_of_smaller_to_larger():
    # 1 - |y - y'| / max = min / max for numbers >= 0: another form of the same function.
    rng = np.random.default_rng(0)
    pairs = np.concatenate([rng.uniform(0, 10, (500, 2)), rng.integers(1, 6, (100, 2))])
    for y, y_prime in pairs.tolist():
        assert verify(y, y_prime, False) == pytest.approx(min(y, y_prime) / max(y, y_prime), abs=1e-12)
        assert verify(y, y_prime, False) == verify(y_prime, y, False)


def test_numeric_verifier_pulls_upwards_against_a_uniform_draw_of_1_2_3():
    earned = [float(np.mean([verify(y, z, False) for z in (1.0, 2.0, 3.0)])) for y in (1.0, 2.0, 3.0)]
    assert earned == pytest.approx([11 / 18, 13 / 18, 2 / 3]) and earned[2] > earned[0]


def test_numeric_verifier_at_the_edges():
    assert verify(0.0, 0.0, False) == 1.0
    assert verify(0.0, 3.0, False) == verify(3.0, 0.0, False) == 0.0
    assert verify(5e-324, 5e-324, False) == 1.0 and 0 <= verify(1e308, 1e-308, False) <= 1


def test_accuracy_is_zero_for_the_unparseable_and_the_rescaled_error_otherwise():
    assert accuracy(None, True) == accuracy(None, 3.0) == 0.0
    assert accuracy(True, True) == accuracy(False, False) == 1.0 and accuracy(True, False) == 0.0
    assert accuracy(3.0, 4.0) == 0.75 and accuracy(5.0, 4.0) == 0.75 and accuracy(9.0, 4.0) == 0.0
    assert accuracy(0.0, 0.0) == 1.0 and accuracy(1.0, 0.0) == 0.0


def test_answering_three_scores_0_7125_on_uniform_counts():
    assert np.mean([accuracy(3.0, float(truth)) for truth in (2, 3, 4, 5)]) == pytest.approx(0.7125)


def test_mixed_kinds_and_negated_numbers_are_refused():
    for compare in (lambda: verify(True, 1.0, False), lambda: verify(1.0, True, False), lambda: accuracy(1.0, True)):
        with pytest.raises(TypeError):
            compare()
    with pytest.raises(ValueError, match="no negation"):
        verify(1.0, 2.0, negates=True)


def test_documented_examples_hold(capsys):
    assert doctest.testmod(verifiers).failed == 0
    verifiers.main()
    assert "2 answer blocks disagree" in capsys.readouterr().out
