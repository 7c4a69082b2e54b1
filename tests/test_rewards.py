"""Consistency is structurally label-free: answers may raise, vanish or lie. Accuracy is the labels' mean, noise included."""

import sys
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import data
from data import BOOLEAN_TASKS, TASKS, Box3D, Object
from dataset import draw_pair, evaluation_pair, load_examples
from pairing import PAIRINGS, pair_rewards
from questions import ground_truth, prompt_text
from rewards import PAIR_REWARDS, Batch, accuracy_rewards, advantages_of, entropy_rewards, make_reward, plain_advantages
from verifiers import Parsed, parse, verify

fast = pytest.mark.fast


@cache
def pairs_of(task, n=4):
    examples = load_examples("synthetic", task, "train", limit=n)
    return tuple(draw_pair(examples, 0, step, 0, 1) for step in range(n))


def parsed(*answers, format=True):
    return [Parsed(a, format and a is not None, "") for a in answers]


def completions(task):
    """Two groups of four parsed completions, one of them unparseable, one without format reward."""
    words = ("True", "False", "True") if task in BOOLEAN_TASKS else ("2", "3", "2.5")
    kind = "boolean" if task in BOOLEAN_TASKS else "count"
    texts = [f"<think>t</think><answer>{w}</answer>" for w in words[:2]] + [f"<answer>{words[2]}</answer>", "no answer"]
    y = [parse(t, kind) for t in texts]
    return y, y[1:] + y[:1]


# --- structurally label-free ----------------------------------------------------------------------------------------

def forbid_answers(monkeypatch, boxes=True):
    """From here on whoever computes an answer, or looks at a 3D box, raises."""
    def label(*_, **__):
        raise AssertionError("an answer was read")
    for module in list(sys.modules.values()):                    # everywhere it may have been imported
        if vars(module).get("ground_truth") is ground_truth and module.__name__ != __name__:   # vars: no lazy import of a library's
            monkeypatch.setattr(module, "ground_truth", label)
    monkeypatch.setattr(data, "gap", label)
    for attribute in ("corners", "volume"):
        monkeypatch.setattr(Box3D, attribute, property(label))
    if boxes:
        for attribute in ("center", "dimensions", "R"):
            monkeypatch.setattr(Box3D, attribute, property(label), raising=False)
        monkeypatch.setattr(Object, "box3d", property(label), raising=False)


@fast
@pytest.mark.parametrize("task", TASKS)
def test_with_reward_consistency_nothing_reads_an_answer_once_the_pairs_are_drawn(task, monkeypatch):
    pairs, (y, y_prime) = pairs_of(task), completions(task)
    expected = {p: [vars(make_reward("consistency", p)(pair, y, y_prime)) for pair in pairs] for p in PAIRINGS}
    forbid_answers(monkeypatch)
    for pairing in PAIRINGS:
        reward = make_reward("consistency", pairing)
        for pair, before in zip(pairs, expected[pairing]):
            c = reward(pair, y, y_prime)
            assert all(np.array_equal(before[k], v) for k, v in vars(c).items())
            assert np.isfinite(advantages_of(c, y, y_prime)).all()
    for read_one in (lambda: make_reward("accuracy")(pairs[0], y, y_prime), lambda: pairs[0].example.objects[0].box3d):
        with pytest.raises(AssertionError, match="an answer was read"):  # the trap works
            read_one()


@fast
@pytest.mark.parametrize("select", ["gap", "2d"])
def test_drawing_a_pair_from_an_example_computes_no_answer_either(select, monkeypatch):
    # The flip carries centre and rotation of the 3D boxes along; it never compares two objects.
    examples = {task: load_examples("synthetic", task, "train", select, limit=3) for task in BOOLEAN_TASKS}
    forbid_answers(monkeypatch, boxes=False)
    for task in BOOLEAN_TASKS:
        for step in range(6):
            pair = draw_pair(examples[task], 0, step, 0, 1)
            make_reward("consistency")(pair, *completions(task))


@fast
@pytest.mark.parametrize("task", BOOLEAN_TASKS)
def test_prompts_pictures_and_rewards_are_the_same_when_every_3d_box_lies(task):
    # Once the example is chosen, the 3D boxes could hold anything, or be missing: no bit of a training step changes.
    examples, rng = load_examples("synthetic", task, "train", limit=4), np.random.default_rng(0)
    lie = lambda o: replace(o, box3d=Box3D(rng.uniform(1, 9, 3), tuple(rng.uniform(1, 9, 3).tolist()), np.eye(3)))
    none = lambda o: replace(o, box3d=None)
    def shown(examples):
        out = []
        for step in range(8):
            pair = draw_pair(examples, 0, step, 0, 1)
            c = make_reward("consistency")(pair, *completions(task))
            out.append((pair.negates, [(prompt_text(s.question, {i: o.name for i, o in s.view.objects.items()}),
                                        s.picture.tobytes()) for s in (pair.x, pair.x_prime)], c.c.tolist(), c.c_prime.tolist()))
        return out
    for change in (lie, none):
        changed = [replace(e, record=replace(e.record, objects=tuple(map(change, e.record.objects)))) for e in examples]
        assert shown(changed) == shown(examples)


@fast
def test_consistency_is_the_pairing_of_the_answers_and_how_T_acts_and_nothing_else():
    y, y_prime = parsed(True, True, None, False), parsed(False, True, True, None)
    for task in BOOLEAN_TASKS:
        for pair in pairs_of(task):
            for pairing in PAIRINGS:
                got = make_reward("consistency", pairing, label_noise=0.7)(pair, y, y_prime)
                want = pair_rewards([True, True, None, False], [False, True, True, None], pair.negates, pairing)
                assert all(np.array_equal(a, b) for a, b in zip(vars(got).values(), vars(want).values()))


# --- accuracy, the reference ----------------------------------------------------------------------------------------

@fast
def test_accuracy_rewards_of_boolean_answers_by_hand():
    y, y_prime = parsed(True, False, None), parsed(False, False, True)
    met = set()
    for task in BOOLEAN_TASKS:
        for pair in pairs_of(task, 8):
            truth = ground_truth(pair.x.question, pair.x.view.objects)
            truth_prime = ground_truth(pair.x_prime.question, pair.x_prime.view.objects)            # anew, not by phi_T
            c = make_reward("accuracy")(pair, y, y_prime)
            assert c.c.tolist() == ([1, 0, 0] if truth else [0, 1, 0])
            assert c.c_prime.tolist() == ([0, 0, 1] if truth_prime else [1, 1, 0])
            assert np.array_equal(c.c2, c.c**2) and np.array_equal(c.c2_prime, c.c_prime**2)
            met.add((truth, truth_prime))
    assert len(met) == 4


@fast
def test_accuracy_rewards_of_numeric_answers_by_hand():
    for task in ("counting", "abs_distance"):
        for pair in pairs_of(task):
            truth = ground_truth(pair.x.question, pair.x.view.objects)
            y, y_prime = parsed(truth, 2 * truth, truth / 2, None), parsed(1.25 * truth, 0.0, 10 * truth, truth)
            c = make_reward("accuracy")(pair, y, y_prime)
            assert c.c == pytest.approx([1, 0, 0.5, 0]) and c.c_prime == pytest.approx([0.75, 0, 0, 1])
            assert c.c2 == pytest.approx([1, 0, 0.25, 0])
            assert ground_truth(pair.x_prime.question, pair.x_prime.view.objects) == pytest.approx(truth)


def label_under_noise(pair, noise, seed):
    """The labels that accuracy rewards act on, (x, x'), read off the reward of the answer True."""
    c = accuracy_rewards(pair, parsed(True), parsed(True), noise, seed)
    return bool(c.c[0]), bool(c.c_prime[0])


@cache
def noisy_pairs():
    return tuple(evaluation_pair(e, 0) for e in load_examples("synthetic", "depth", "train", limit=300))


def test_label_noise_flips_about_p_of_the_examples_reproducibly_and_both_sides_together():
    clean = [label_under_noise(p, 0, 0) for p in noisy_pairs()]
    flipped = {}
    for noise in (0.1, 0.3, 0.5, 1.0):
        for seed in (0, 1):
            labels = [label_under_noise(p, noise, seed) for p in noisy_pairs()]
            assert labels == [label_under_noise(p, noise, seed) for p in noisy_pairs()]              # once and for all
            assert all((x != x_prime) == p.negates for (x, x_prime), p in zip(labels, noisy_pairs()))  # phi_T of the label
            flips = np.array([a != b for (a, _), (b, _) in zip(labels, clean)])
            assert abs(flips.mean() - noise) <= 3.3 * (noise * (1 - noise) / len(flips)) ** 0.5
            flipped[noise, seed] = flips
    assert (flipped[0.1, 0] <= flipped[0.3, 0]).all() and (flipped[0.3, 0] <= flipped[0.5, 0]).all()   # more noise: more, not other
    assert abs(np.corrcoef(flipped[0.5, 0], flipped[0.5, 1])[0, 1]) < 3.3 / len(clean) ** 0.5          # another seed: others


@fast
def test_an_example_keeps_its_flipped_label_through_all_questions_and_transforms():
    examples = load_examples("synthetic", "size", "train", limit=5)
    wrong = {}
    for step in range(40):
        pair = draw_pair(examples, 0, step, 0, 1)
        is_wrong = label_under_noise(pair, 0.5, 3)[0] != ground_truth(pair.x.question, pair.x.view.objects)
        wrong.setdefault(pair.example.id, set()).add(is_wrong)
    assert len(wrong) == 5 and all(len(v) == 1 for v in wrong.values()) and len(set.union(*wrong.values())) == 2


@fast
def test_an_unknown_reward_is_refused_with_the_choices():
    with pytest.raises(ValueError, match=", ".join(PAIR_REWARDS)):
        make_reward("votes")


# --- advantages -----------------------------------------------------------------------------------------------------

def eq_2(rewards_):
    """Eq. (2), typed again: population standard deviation."""
    r = np.array(rewards_, dtype=float)
    return (r - r.mean()) / r.std() if r.std() > 1e-9 else np.zeros(len(r))


@fast
def test_each_group_is_normalised_on_its_own_with_its_own_format_rewards():
    pair = pairs_of("depth")[0]
    truth, truth_prime = label_under_noise(pair, 0, 0)
    y = [Parsed(truth, True, ""), Parsed(truth, False, ""), Parsed(not truth, True, ""), Parsed(None, False, "")]
    y_prime = [Parsed(truth_prime, True, ""), Parsed(truth_prime, True, ""), Parsed(truth_prime, False, ""), Parsed(None, False, "")]
    A = advantages_of(make_reward("accuracy")(pair, y, y_prime), y, y_prime)
    assert A.shape == (2, 4)
    assert A[0] == pytest.approx(eq_2([2, 1, 1, 0])) and A[1] == pytest.approx(eq_2([2, 2, 1, 0]))


@fast
def test_minimal_advantages_use_the_spread_of_the_mixture():
    # 6 True, 2 False against 3 True, 5 False, invariant: A_T = 0.126, A_F = -0.378 (specification 1.6).
    pair = next(p for p in pairs_of("depth", 8) if not p.negates)
    y, y_prime = parsed(*[True] * 6, *[False] * 2), parsed(*[True] * 3, *[False] * 5)
    A = advantages_of(make_reward("consistency", "minimal")(pair, y, y_prime), y, y_prime)
    assert A[0] == pytest.approx([0.126] * 6 + [-0.378] * 2, abs=5e-4) and np.abs(A.mean(1)).max() < 1e-12


@fast
@pytest.mark.parametrize("name", PAIR_REWARDS)
def test_K_identical_rewards_give_advantages_of_exactly_zero(name):
    for task in ("depth", "counting"):
        for pair in pairs_of(task):
            for answer in ((True, False) if task == "depth" else (2.0, 7.3)):
                for format in (True, False):
                    y = parsed(*[answer] * 8, format=format)
                    assert not advantages_of(make_reward(name)(pair, y, y), y, y).any()
            silent = parsed(*[None] * 8)
            c = make_reward(name)(pair, silent, y)
            assert not c.c.any() and not advantages_of(c, silent, y)[0].any()


@fast
def test_nothing_parseable_on_one_side_pays_nobody_consistency_but_format_still_counts():
    pair = pairs_of("depth")[0]
    y, y_prime = parsed(None, None, None, None), [Parsed(True, f, "") for f in (True, True, False, True)]
    c = make_reward("consistency")(pair, y, y_prime)
    assert not c.c.any() and not c.c_prime.any()
    A = advantages_of(c, y, y_prime)
    assert not A[0].any() and A[1] == pytest.approx(eq_2([1, 1, 0, 1]))


# --- the label-free baselines -----------------------------------------------------------------------------------------

@fast
def test_vote_pays_for_the_majority_of_ones_own_group_and_never_looks_at_the_other():
    pair = pairs_of("depth")[0]
    y = parsed(True, True, False, None)
    for y_prime, expected in ((parsed(False, False, False, True), [1, 1, 1, 0]), (parsed(True, False, None, None), [0, 0, 0, 0])):
        c = make_reward("vote")(pair, y, y_prime)
        assert c.c.tolist() == [1, 1, 0, 0] and c.c_prime.tolist() == expected and c.c2.tolist() == c.c.tolist()
    counting = pairs_of("counting")[0]
    c = make_reward("vote")(counting, parsed(2.0, 3.0, 3.0, None), parsed(2.0, 2.0, 2.0, 2.0))
    assert c.c.tolist() == [verify(2.0, 3.0, False), 1, 1, 0] and c.c_prime.tolist() == [1] * 4


@fast
def test_entropy_pays_the_mean_log_probability_of_a_completions_own_tokens():
    logp = torch.tensor([[[-1.0, -3.0, -9.0], [-0.5, -0.5, -0.5]], [[-2.0, -9.0, -9.0], [-1.0, -2.0, -9.0]]])    # (2, 2, 3)
    mask = torch.tensor([[[1, 1, 0], [1, 1, 1]], [[1, 0, 0], [1, 1, 0]]], dtype=torch.bool)
    y = parsed(True, False)
    batch = Batch(None, [pairs_of("depth")[0]], [], SimpleNamespace(logp=logp, mask=mask), [], [y, y])
    rewards = entropy_rewards(batch)
    assert rewards[0].c.tolist() == [-2.0, -0.5] and rewards[0].c_prime.tolist() == [-2.0, -1.5]
    assert plain_advantages(batch, rewards) == pytest.approx(np.array([[-1, 1], [-1, 1]]))
