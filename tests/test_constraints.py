"""Claims about Faithful GRPO: scores of the thinking, masks, separate normalisation, dual ascent, and how they enter training."""
import json
import math
from dataclasses import replace
from functools import cache
from itertools import permutations, product
from types import SimpleNamespace

import numpy as np
import pytest
import test_distributed
import torch
from test_distributed import OPTIONS, assert_same_run, finished, torchrun
from toy import flags, log_of, shortcuts
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

import compare_constraints
import constraints
import contradict
import faithfulness
import pretrain
import rewards
import train
from constraints import MODES, THRESHOLDS, constrained, dual_step, group_normalised
from data import BOOLEAN_TASKS
from dataset import evaluation_pair, load_examples
from faithfulness import RULES, Said, box_score, complete_iou, consistency_rule, entailed, said_of, semantic_rule, written_boxes
from faithfulness_judge import ASK_CONSISTENCY, YES_NO, Judge, first_tokens, load_judge, sentences
from images import DataError
from model import ModelError
from pairing import PairRewards
from questions import COLOURS, RELATIONS, Question, ground_truth, prompt_text
from rewards import Batch, make_reward, over_pairs, plain_advantages
from verifiers import parse

fast = pytest.mark.fast


# --- spatial: Complete IoU and the matching -----------------------------------------------------------------------------
def slow_ciou(a, b):
    """CIoU of boxes with whole-numbered corners: areas by counting cells, angles by complex numbers."""
    cells = lambda box: {(x, y) for x in range(box[0], box[2]) for y in range(box[1], box[3])}
    middle = lambda box: complex(box[0] + box[2], box[1] + box[3]) / 2
    shape = lambda box: math.pi / 2 - np.angle(complex(box[2] - box[0], box[3] - box[1]))      # arctan(w / h)
    both = cells(a) | cells(b)
    iou = len(cells(a) & cells(b)) / len(both)
    corners = [complex(x, y) for box in (a, b) for x, y in (box[:2], box[2:])]
    diagonal = complex(max(z.real for z in corners), max(z.imag for z in corners)) - complex(
        min(z.real for z in corners), min(z.imag for z in corners))
    v = (2 / math.pi * (shape(a) - shape(b))) ** 2
    return iou - (abs(middle(a) - middle(b)) / abs(diagonal)) ** 2 - (v * v / (1 - iou + v) if v > 0 else 0)


def random_box(rng, size=12):
    x0, y0 = rng.integers(0, size - 1, 2)
    return int(x0), int(y0), int(rng.integers(x0 + 1, size)), int(rng.integers(y0 + 1, size))


@fast
def test_complete_iou_is_its_definition_counted_cell_by_cell():
    # IoU 1/7, d^2 = 2, c^2 = 18; then IoU 1/3, d^2 / c^2 = 1/16 and v = 0.1678 with alpha = 0.2011.
    assert complete_iou((0, 0, 2, 2), (1, 1, 3, 3)) == pytest.approx(1 / 7 - 1 / 9)
    assert complete_iou((0, 0, 4, 2), (0, 0, 2, 4)) == pytest.approx(1 / 3 - 1 / 16 - 0.2011 * 0.1678, abs=1e-4)
    assert complete_iou((5, 5, 9, 8), (5, 5, 9, 8)) == 1 and complete_iou((0, 0, 1, 1), (50, 50, 51, 51)) < -0.9
    rng = np.random.default_rng(0)
    for _ in range(300):
        a, b = random_box(rng), random_box(rng)
        assert complete_iou(a, b) == pytest.approx(slow_ciou(a, b)) == pytest.approx(complete_iou(b, a))
        assert complete_iou(*(tuple(3 * v + 7 for v in box) for box in (a, b))) == pytest.approx(complete_iou(a, b))


@fast
def test_box_score_is_the_best_of_all_one_to_one_matchings_over_the_larger_number_of_boxes():
    rng = np.random.default_rng(1)
    for n, m in product(range(1, 5), range(1, 5)):
        written, references = ([random_box(rng) for _ in range(k)] for k in (n, m))
        few, many = sorted((written, references), key=len)
        best = max(sum(max(0, slow_ciou(a, b)) for a, b in zip(few, chosen)) for chosen in permutations(many, len(few)))
        assert box_score(written, references) == pytest.approx(best / max(n, m))
    right, wrong = (0, 0, 4, 4), (80, 80, 90, 90)
    assert box_score([right], [right]) == 1 and box_score([right, wrong], [right]) == 0.5 == box_score([right], [right, wrong])
    assert box_score([(4, 4, 0, 0)], [right]) == 0                   # corners the wrong way round: a box that matches nothing
    assert box_score([], [right]) is None and box_score([right], []) is None


@fast
def test_boxes_are_read_from_the_thinking_in_pixels_of_the_picture_as_the_model_saw_it():
    assert written_boxes("The chair [10, 20.5, 30,40] and (1,2,3,4), not [1, 2, 3].") == [(10, 20.5, 30, 40), (1, 2, 3, 4)]
    x = pair_of("depth").x
    for zoom in (1, 2):
        boxes = ", ".join(str([zoom * v for v in x.view.objects[i].box2d]) for i in x.question.object_ids)
        said = said_of(x, f"<think>{boxes}</think><answer>True</answer>", tuple(zoom * v for v in x.picture.size))
        assert RULES["spatial"](said, x) == pytest.approx(1)
    assert RULES["spatial"](said_of(x, "<think>red 7, blue 6, closer</think><answer>True</answer>"), x) is None


# --- consistency and semantic, by rules -----------------------------------------------------------------------------------
@cache
def pairs_of(task):
    return [evaluation_pair(e, 0) for e in load_examples("synthetic", task, "val", limit=6)]


def pair_of(task):
    return pairs_of(task)[0]


@fast
def test_the_consistency_rule_is_the_truth_table_of_who_is_said_to_be_closer_and_what_was_asked():
    for swapped, relation, red_first, word, answer in product((False, True), (0, 1), (False, True), ("closer", "further"), (True, False)):
        thinking = f"red 3, blue 5, {word}" if red_first else f"blue 5, red 3, {word}"
        said_closer = ("red" if red_first else "blue") if word == "closer" else ("blue" if red_first else "red")
        asked = "blue" if swapped else "red"                                                    # object 2 or object 1
        follows = (asked == said_closer) if relation == 0 else (asked != said_closer)
        said = Said(Question("depth", (7, 9), relation, swapped), "", thinking, answer)
        assert consistency_rule(said) == float(follows == answer)


@fast
def test_true_thinking_entails_the_true_answer_on_every_boolean_task_and_counting():
    for task in (*BOOLEAN_TASKS, "counting"):
        for x in (side for pair in pairs_of(task) for side in (pair.x, pair.x_prime)):
            assert entailed(x.question, pretrain.thinking(x)) == ground_truth(x.question, x.view.objects), x.question


@fast
def test_what_the_rules_cannot_read_has_no_score():
    question = Question("depth", (7, 9))
    for thinking in ("", "closer", "red 3, green 5, closer", "red 3, red 5, closer", "red 3, blue 5, left", "red 3, blue 5",
                     "Red is closer.", "red 3, blue 5, closer, further"):
        assert consistency_rule(Said(question, "", thinking, True)) is None, thinking
    assert consistency_rule(Said(question, "", "red 3, blue 5, closer", None)) is None
    assert consistency_rule(Said(Question("abs_distance", (7, 9)), "", "blue 7 8, red 3 4", 2.0)) is None
    x = pair_of("depth").x
    assert semantic_rule(said_of(x, "<think>I look at it.</think><answer>True</answer>"), x) is None
    assert said_of(x, "red 3, blue 5, closer <answer>True</answer>").thinking == ""                 # no thinking was closed


@fast
def test_semantic_is_the_share_of_true_claims_and_a_digit_may_be_one_off():
    x = pair_of("depth").x
    (colour, a), (other, b) = (part.split() for part in pretrain.thinking(x).split(", ")[:2])
    word = pretrain.thinking(x).split(", ")[2]
    wrong = contradict.other_word("depth", word)
    for thinking, expected in ((f"{colour} {a}, {other} {b}, {word}", 1), (f"{colour} {a}, {other} {b}, {wrong}", 2 / 3),
                               (f"{colour} {int(a) - 1}, {other} {b}, {word}", 1), (f"{colour} {int(a) - 3}, {other} {b}, {word}", 2 / 3),
                               (f"{colour} {int(a) - 3}", 0), (f"well, {other} {b}", 1)):
        assert semantic_rule(Said(x.question, "", thinking, None), x) == pytest.approx(expected), thinking


@fast
def test_the_consistency_judge_gets_no_picture():
    x = pair_of("depth").x
    said = said_of(x, "<think>red 3, blue 5, closer</think><answer>True</answer>")
    assert RULES["consistency"](said, None) in (0.0, 1.0)
    assert not any(value is x or value is x.picture or value is x.view for value in vars(said).values())


# --- normalisation, masks and multipliers ---------------------------------------------------------------------------------
@fast
def test_a_constraints_advantages_are_normalised_over_the_scored_completions_of_a_group_alone():
    none = np.nan
    scores = np.array([[1, 0, 1, none], [1, none, none, none], [none] * 4, [1, 1, none, 1], [0.2, 0.6, none, 1.0]])
    root = math.sqrt(2)
    expected = [[1 / root, -root, 1 / root, 0], [0] * 4, [0] * 4, [0] * 4, [-math.sqrt(1.5), 0, 0, math.sqrt(1.5)]]
    assert group_normalised(scores) == pytest.approx(np.array(expected), abs=1e-12)


@fast
def test_multipliers_follow_the_sequence_computed_by_hand():
    # tau 0.95, eta 0.1: four violated steps, then held for good
    means, expected, value = [0.75, 0.75, 0.85, 0.95, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1], [], {"consistency": 0.0}
    for mean in means:
        value = dual_step(value, {"consistency": mean}, {"consistency": 0.95}, 0.1)
        expected.append(value["consistency"])
    assert expected == pytest.approx([0.02, 0.04, 0.05, 0.05, 0.045, 0.04, 0.035, 0.03, 0.025, 0.02, 0.015, 0.01, 0.005, 0, 0], abs=1e-12)
    both = dual_step({"consistency": 0.3, "semantic": 0.2}, {"semantic": 0.05}, THRESHOLDS, 0.05)
    assert both == pytest.approx({"consistency": 0.3, "semantic": 0.2 + 0.05 * 0.8})        # nobody scored: it keeps its multiplier


def batch_of(group, group_prime, task="depth"):
    """A batch of one pair from (says closer?, answer) per completion: None as a thinking cannot be read."""
    pair = pair_of(task)
    word = {True: RELATIONS["depth"][0].split()[0], False: RELATIONS["depth"][1].split()[0]}
    texts = []
    for x, completions in ((pair.x, group), (pair.x_prime, group_prime)):
        asked, other = (COLOURS[i - 1] for i in faithfulness.compared(x.question))
        texts.append([f"<think>{'Hm.' if closer is None else f'{asked} 3, {other} 5, {word[closer]}'}</think><answer>{answer}</answer>"
                      for closer, answer in completions])
    prompts = [SimpleNamespace(grid_thw=torch.tensor([1, 8, 8]))] * 2
    vlm = SimpleNamespace(device=torch.device("cpu"))
    return Batch(vlm, [pair], prompts, None, texts, [[parse(t, "boolean") for t in side] for side in texts])


def right_and_wrong(x):
    """((closer?, answer) that agree and are right, the same answer with the opposite conclusion, a wrong answer) for this side."""
    truth = ground_truth(x.question, x.view.objects)
    closer = truth == (x.question.relation == 0)
    return (closer, truth), (not closer, truth), (not closer, not truth)


def four_completions():
    """x: right and consistent, right and contradicting, right and consistent, wrong. x': all right and consistent."""
    pair = pair_of("depth")
    good, contradicting, wrong = right_and_wrong(pair.x)
    return batch_of([good, contradicting, good, wrong], [right_and_wrong(pair.x_prime)[0]] * 4)


ACCURACY = over_pairs(make_reward("accuracy"))


@fast
def test_advantages_of_a_group_of_four_are_those_computed_by_hand():
    batch, state = four_completions(), {}
    advantages = constrained(plain_advantages, {"consistency": RULES["consistency"]}, ACCURACY, {"consistency": 0.95}, state)
    task, C = np.array([1, 1, 1, -3]) / math.sqrt(3), np.array([1, -2, 1, 0]) / math.sqrt(2)
    c_mean = 6 / 7                                                            # the wrong one has no score; x': four times 1
    for expected in (0.0, 0.05 * (0.95 - c_mean), 0.1 * (0.95 - c_mean)):     # lambda that this step uses
        A = advantages(batch, ACCURACY(batch))
        assert A[0] == pytest.approx(task + expected * C) and not A[1].any()
        assert batch.log["lambda_consistency"] == pytest.approx(expected)
    assert batch.log["constraint_consistency"] == pytest.approx(c_mean) and batch.log["scores_consistency"] == 7
    assert batch.log["unmasked_consistency"] == pytest.approx(7 / 8)          # the wrong one agrees with itself
    state["multipliers"] = {"consistency": 0.5}                               # as a resumed run does
    assert advantages(batch, ACCURACY(batch))[0] == pytest.approx(task + 0.5 * C)


@fast
@pytest.mark.parametrize("mode, r", [("sum", [2, 1, 2, 0]), ("product", [1, 0, 1, 0])])
def test_the_baselines_are_one_reward_normalised_once(mode, r):
    batch, state = four_completions(), {}
    advantages = constrained(plain_advantages, {"consistency": RULES["consistency"]}, ACCURACY, {"consistency": 0.95}, state, mode)
    r = np.array(r)
    for _ in range(2):
        assert advantages(batch, ACCURACY(batch))[0] == pytest.approx((r - r.mean()) / r.std())
    assert state["multipliers"] == {"consistency": 0.0}


@fast
def test_measuring_changes_nothing_and_fixed_is_a_multiplier_of_one():
    batch = four_completions()
    plain = plain_advantages(batch, ACCURACY(batch))
    make = lambda mode: constrained(plain_advantages, {"consistency": RULES["consistency"]}, ACCURACY, {"consistency": 0.95}, {}, mode)
    measured, fixed = make("measure"), make("fixed")
    for _ in range(2):
        assert measured(batch, ACCURACY(batch)).tolist() == plain.tolist()
        assert fixed(batch, ACCURACY(batch))[0] == pytest.approx(plain[0] + np.array([1, -2, 1, 0]) / math.sqrt(2))


@fast
@pytest.mark.parametrize("mode", MODES)
def test_a_batch_on_which_the_judge_abstains_trains_on_the_task_alone_and_stays_finite(mode):
    pair, state = pair_of("depth"), {}
    good, _, wrong = right_and_wrong(pair.x)
    batch = batch_of([(None, good[1]), (None, good[1]), (None, wrong[1]), (None, None)], [(None, True)] * 4)
    advantages = constrained(plain_advantages, dict(RULES), ACCURACY, THRESHOLDS, state, mode)
    before = dict(state["multipliers"])
    assert advantages(batch, ACCURACY(batch)) == pytest.approx(plain_advantages(batch, ACCURACY(batch)))
    assert state["multipliers"] == before and json.loads(json.dumps(state)) == state
    assert all(math.isfinite(v) for v in batch.log.values()) and batch.log["scores_consistency"] == 0
    assert not any(name.startswith("constraint_") for name in batch.log)


@fast
def test_without_labels_the_mask_is_agreement_with_the_twin_of_at_least_one_half():
    pair = pair_of("depth")
    good, _, wrong = right_and_wrong(pair.x)
    good_prime = right_and_wrong(pair.x_prime)[0]
    batch = batch_of([good, good, good, wrong], [good_prime] * 4)
    consistency = over_pairs(make_reward("consistency"))
    assert constraints.sides(consistency(batch))[0].tolist() == [1, 1, 1, 0]
    half = lambda batch: [PairRewards(*[np.array([0.5, 0.49, 1, 0])] * 4)]
    for passes, scored in ((consistency, 7), (half, 4)):
        constrained(plain_advantages, {"consistency": RULES["consistency"]}, passes, THRESHOLDS, {})(batch, consistency(batch))
        assert batch.log["scores_consistency"] == scored


@fast
def test_spatial_is_scored_where_there_are_boxes_and_not_masked_to_correct_completions():
    pair = pair_of("depth")
    boxes = ", ".join(str(list(pair.x.view.objects[i].box2d)) for i in pair.x.question.object_ids)
    batch = batch_of([right_and_wrong(pair.x)[2]] * 4, [right_and_wrong(pair.x_prime)[0]] * 4)
    batch.texts[0][1] = batch.texts[0][1].replace("<think>", f"<think>{boxes} ")
    batch.texts[0][2] = batch.texts[0][2].replace("<think>", "<think>[0, 0, 3, 3] ")
    advantages = constrained(plain_advantages, {"spatial": RULES["spatial"]}, ACCURACY, {"spatial": 0.65}, {}, "fixed")
    plain = plain_advantages(batch, ACCURACY(batch))
    assert advantages(batch, ACCURACY(batch)) - plain == pytest.approx(np.array([[0, 1, -1, 0], [0] * 4]))
    assert batch.log["scores_spatial"] == 2


# --- in training ------------------------------------------------------------------------------------------------------------
def score_by_length(patch=None):
    """A judge that reads anything and abstains on a third, so that a random model has scores."""
    set_ = patch.setattr if patch else setattr
    set_(constraints, "said_of", lambda x, text, frame: Said(x.question, "", text, True, frame))
    set_(constraints, "RULES", {k: lambda said, _: None if len(said.thinking) % 3 == 0 else float(len(said.thinking) % 2) for k in RULES})


CONSTRAINED = dict(preset="tiny", constrain="consistency", constraint_rate=0.5)


def test_two_ranks_have_the_multipliers_of_one_rank_with_all_pairs(base, photos, tmp_path, monkeypatch):
    options = dict(OPTIONS, steps=3, **CONSTRAINED)
    with monkeypatch.context() as patch:
        shortcuts(patch)
        score_by_length(patch)
        assert train.main(flags(base, photos, tmp_path / "alone", pairs_per_device=4, **options)) == 0
    driver = test_distributed.DRIVER.replace("from verifiers import Parsed\n", "from verifiers import Parsed\n"
                                             "import test_constraints\ntest_constraints.score_by_length()\n")
    monkeypatch.setattr(test_distributed, "DRIVER", driver)
    finished(torchrun(tmp_path, [("plain", flags(base, photos, str(tmp_path / "two"), **options))], "--standalone", "--nproc_per_node", "2"))
    assert_same_run(tmp_path / "two", tmp_path / "alone")
    for row, expected in zip(log_of(tmp_path / "two"), log_of(tmp_path / "alone")):
        for name in ("constraint_consistency", "scores_consistency", "unmasked_consistency", "lambda_consistency"):
            assert row[name] == pytest.approx(expected[name], rel=1e-9), name
        assert 0 < row["scores_consistency"] < 32
    assert log_of(tmp_path / "alone")[-1]["lambda_consistency"] > 0


def test_a_resumed_run_has_the_multipliers_of_the_uninterrupted_one(base, photos, tmp_path, monkeypatch, quick):
    score_by_length(monkeypatch)
    assert train.main(flags(base, photos, tmp_path / "whole", steps=4, **CONSTRAINED)) == 0
    assert train.main(flags(base, photos, tmp_path / "parts", steps=2, **CONSTRAINED)) == 0
    assert train.main(["--resume", str(tmp_path / "parts"), "--steps", "4"]) == 0
    values = [[row["lambda_consistency"] for row in log_of(tmp_path / run)] for run in ("whole", "parts")]
    assert values[0] == values[1] and values[0][0] == 0 and values[0][3] > 0
    states = [json.loads((tmp_path / run / "checkpoints/step-00004/state.json").read_text()) for run in ("whole", "parts")]
    assert states[0] == states[1] and states[0]["multipliers"]["consistency"] > 0
    adapters = [test_distributed.adapter_of(tmp_path / run) for run in ("whole", "parts")]
    assert all(torch.equal(adapters[0][n], adapters[1][n]) for n in adapters[0])


def test_a_label_free_constrained_run_reads_no_label(base, photos, tmp_path, monkeypatch, quick):
    def label(*_):
        raise AssertionError("a label was read")

    for module in (rewards, faithfulness, pretrain):
        monkeypatch.setattr(module, "ground_truth", label)
    argv = flags(base, photos, tmp_path / "run", steps=1, preset="tiny")
    assert train.main([*argv, "--constrain", "consistency", "spatial"]) == 0
    assert log_of(tmp_path / "run")[0]["scores_consistency"] == 0            # a random model writes nothing the rules can read


@fast
def test_what_cannot_be_meant_is_refused_with_the_mend(base, tmp_path):
    def refuse(match, *argv):
        with pytest.raises(DataError, match=match):
            train.settle(train.parse_arguments([*flags(base, "synthetic", tmp_path / "never", preset="tiny"), *argv]))

    refuse("--constrain colour: give consistency, semantic, spatial", "--constrain", "colour")
    refuse("a threshold lies between 0 and 1", "--constrain", "consistency=95")
    refuse("each alone or as NAME=THRESHOLD", "--constrain", "consistency=high")
    refuse("--constraint-rate -1.0: must not be negative", "--constrain", "consistency", "--constraint-rate", "-1")
    refuse("does nothing without --constrain", "--constraint-mode", "sum")
    refuse("semantic: its rules read the 3D boxes, that is, labels", "--constrain", "semantic")
    refuse("the rules read the tiny model's language only", "--constrain", "consistency", "--preset", "paper")
    assert constraints.thresholds_of(["consistency", "semantic=0.8"]) == {"consistency": 0.95, "semantic": 0.8}


# --- a model as the judge ---------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def language_model(tokenizer, tmp_path_factory):
    """Folder of a text-only model that says YES where the answer is True and NO where it is False, to one thinking each."""
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                                         num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False,
                                         initializer_range=0.5)).eval()              # so that the text matters
    folder = str(tmp_path_factory.mktemp("judge"))
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)          # as the judge will read it: the class follows the model's type
    with torch.no_grad():
        hidden = torch.stack([model.model(tokenizer(chat(tokenizer, a), return_tensors="pt", add_special_tokens=False)["input_ids"])
                              .last_hidden_state[0, -1] for a in (True, False)])                     # (2, H)
        model.lm_head.weight.zero_()
        for word, wanted in (("YES", [20.0, -20.0]), ("NO", [-20.0, 20.0])):
            token = tokenizer(word, add_special_tokens=False)["input_ids"][0]
            model.lm_head.weight[token] = torch.linalg.lstsq(hidden, torch.tensor(wanted)[:, None]).solution[:, 0]
    model.save_pretrained(folder)
    return folder


def statement(answer):
    question = Question("depth", (1, 2))
    return Said(question, prompt_text(question, {1: "table", 2: "lamp"}), "Object 1 is in front.", answer)


def chat(tokenizer, answer):
    said = statement(answer)
    text = ASK_CONSISTENCY.format(prompt=said.prompt, thinking=said.thinking, answer=answer)
    messages = [{"role": "system", "content": "You are a careful judge. Reply with one word."}, {"role": "user", "content": text}]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


@fast
def test_a_language_model_judges_consistency_from_the_text_and_is_refused_for_pictures(language_model):
    score = load_judge(language_model, ("consistency",))["consistency"]
    assert score(statement(True), None) == 1 and score(statement(False), None) == 0
    assert score(replace(statement(True), thinking=""), None) is None and score(statement(None), None) is None
    with pytest.raises(DataError, match="sees no pictures: constrain consistency only"):
        load_judge(language_model, ("consistency", "semantic"))


@fast
def test_an_undecided_model_abstains(base):
    x = pair_of("depth").x
    scores = load_judge(base, ("consistency", "semantic"))                     # random weights: the mass is spread over all tokens
    said = said_of(x, "<think>Red is near. Blue is far.</think><answer>True</answer>")
    assert scores["consistency"](said, x) is None and scores["semantic"](said, x) is None


@fast
def test_semantic_is_the_share_of_correct_among_the_sentences_that_were_not_skipped(base, monkeypatch):
    x, judge, asked = pair_of("depth").x, Judge(base, torch.device("cpu")), []
    verdicts = {"I will look.": "SKIP", "Red is near.": "CORRECT", "Blue is far.": "CORRECT", "It is night.": "INCORRECT"}

    def verdict(text, words, picture):
        asked.append((text, picture))
        return verdicts[text.split("Latest sentence:\n")[1].split("\n")[0]]

    monkeypatch.setattr(judge, "verdict", verdict)
    assert judge.semantic(Said(x.question, "Q", "I will look. Red is near.\nBlue is far. It is night.", True), x) == 2 / 3
    assert all(picture is x.picture for _, picture in asked)
    assert "Reasoning so far:\nI will look. Red is near.\n" in asked[2][0] and "Blue" not in asked[1][0]
    assert judge.semantic(Said(x.question, "Q", "I will look.", True), x) is None
    assert sentences("A is near; B is far.\n\nSo True.") == ["A is near;", "B is far.", "So True."]


@fast
def test_a_judge_that_cannot_be_used_is_refused_with_the_mend(tmp_path, tokenizer):
    with pytest.raises(ModelError, match="--constraint-judge"):
        Judge(str(tmp_path / "nothing"), torch.device("cpu"))
    with pytest.raises(ModelError, match="begins YES and YOU alike"):
        first_tokens(tokenizer, ("YES", "YOU"))
    assert len(set.union(*first_tokens(tokenizer, YES_NO).values())) >= 4


# --- measurement ------------------------------------------------------------------------------------------------------------
@fast
def test_the_inconsistency_rate_is_over_what_was_judged_and_the_masked_one_over_the_correct_of_it():
    rows = [dict(correct=a, consistency=c, semantic=s) for a, c, s in ((1, 1, 1), (1, 0, 0.5), (0, 1, None), (0, 0, None), (1, None, None), (1, 1, 0))]
    values = {name: (e["value"], e["n"]) for name, e in faithfulness.summarise(rows).items()}
    assert values == {"accuracy": (pytest.approx(4 / 6), 6), "inconsistency": (pytest.approx(2 / 5), 5),
                      "inconsistency_if_correct": (pytest.approx(1 / 3), 3), "semantic": (0.5, 3)}


@fast
def test_runs_are_compared_by_mean_and_standard_deviation_and_a_step_without_scores_keeps_the_last_mean(tmp_path, capsys):
    estimates = lambda value: {how: {what: {"value": value, "n": 9} for h, what in compare_constraints.HELD_OUT if h == how}
                               for how in ("sampled", "greedy")}
    for n, value in enumerate((0.1, 0.3)):
        run = tmp_path / f"run{n}"
        run.mkdir()
        (run / "test.json").write_text(json.dumps(estimates(value)))
        (run / "config.json").write_text(json.dumps({"constrain": ["consistency"]}))
        means = [{"constraint_consistency": 0.5, "unmasked_consistency": 0.5}, {}, {"constraint_consistency": 0.8, "unmasked_consistency": 0.7}]
        lines = [json.dumps({"step": i, "task_reward": 1.0, "lambda_consistency": 0.1 * i, **row}) for i, row in enumerate(means)]
        (run / "log.jsonl").write_text("\n".join(lines))
    (tmp_path / "base.json").write_text(json.dumps(estimates(0.5)))
    argv = ["--base", str(tmp_path / "base.json"), "--arm", "ours", str(tmp_path / "run0"), str(tmp_path / "run1"), "--picture",
            str(tmp_path / "curves.png")]
    assert compare_constraints.main(argv) == 0
    out = capsys.readouterr().out
    assert "ours                    20.0 +- 14.1     per seed 10.0 30.0" in out and "ours                    60.0 +- 0.0      per seed 60.0 60.0" in out
    assert "ours                    0.20 +- 0.00     per seed 0.20 0.20" in out and (tmp_path / "curves.png").stat().st_size > 0
    with pytest.raises(DataError, match="test.json is missing"):
        (tmp_path / "run1/test.json").unlink()
        compare_constraints.main(argv)


# --- the base of the demonstration ------------------------------------------------------------------------------------------
@fast
def test_in_the_stated_share_of_lessons_conclusion_and_answer_are_independent_and_the_digits_stay_right():
    rows = []
    for step in range(10):
        for shown, target in contradict.draw_lessons(step, 0, 32):
            said, true = said_of(shown, target), pretrain.thinking(shown)
            assert said.thinking.rsplit(",", 1)[0] == true.rsplit(",", 1)[0]
            rows.append((said.thinking == true, said.answer == ground_truth(shown.question, shown.view.objects)))
    conclusion, answer = np.array(rows).T                                       # (n,), (n,)
    n, share, right = len(rows), contradict.SHARE, contradict.ANSWER_RIGHT
    for found, expected in ((~conclusion, share / 2), (~answer, share * (1 - right)), (~conclusion & ~answer, share / 2 * (1 - right))):
        assert abs(found.mean() - expected) < 3.3 * (expected * (1 - expected) / n) ** 0.5
    assert answer[~conclusion].mean() == pytest.approx(right, abs=3.3 * (right * (1 - right) / (~conclusion).sum()) ** 0.5)
