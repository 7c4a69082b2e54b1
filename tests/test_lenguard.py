"""Claims about lenguard.py: the KL against the library and torch.distributions, Eq. (3) and Eq. (9) by hand, no answer in h."""
import json

import numpy as np
import pytest
import torch
from random_vlm import VISION_START, VOCABULARY, mixed_prompts, random_vlm
from test_grpo import only, ragged
from test_rewards import completions as parsed_completions, forbid_answers, pairs_of
from torch.distributions import Categorical, kl_divergence
from toy import flags, log_of

import lenguard
import settings
import train
from data import TASKS
from dataset import draw_uniforms, to_prompt
from grpo import rollout
from images import DataError
from lenguard import GUIDANCE, STAGES, Stages, add_certain, guarded, guided_kl, guided_prompt, length_bonus, token_kl
from model import Prompt
from pairing import PairRewards
from questions import SYSTEM_PROMPT, prompt_text
from rewards import Batch, entropy_rewards, make_reward, over_pairs, plain_advantages

fast = pytest.mark.fast


# --- the KL, Eq. (1) and (2) ----------------------------------------------------------------------------------------

def library_kl(vlm, prompt, guided, tokens, temperature):
    """Eq. (1) the plain way: each prompt with each completion as one row through the library's forward, no cache: (T,)."""
    allowed, image = ~vlm.forbidden, vlm.base.config.image_token_id
    distributions = []
    for p in (prompt, guided):
        ids = torch.cat([p.input_ids, tokens])[None]  # (1, P+T)
        with torch.no_grad():
            logits = vlm.model(input_ids=ids, pixel_values=p.pixel_values, image_grid_thw=p.grid_thw[None],
                               mm_token_type_ids=(ids == image).int(), attention_mask=torch.ones_like(ids)).logits
        distributions.append(Categorical(logits=logits[0, len(p.input_ids) - 1:-1, allowed].double() / temperature))
    return kl_divergence(*distributions)  # (T,)


def longer(prompts):
    """Guided prompts: the same pictures, more text behind."""
    generator = torch.Generator().manual_seed(5)
    return [Prompt(torch.cat([p.input_ids, torch.randint(0, 300, (4 + 3 * i,), generator=generator)]), p.pixel_values, p.grid_thw)
            for i, p in enumerate(prompts)]


@fast
@pytest.mark.parametrize("temperature, budget", [(1.0, 16384), (0.7, 60)])
def test_kl_is_torch_distributions_on_the_librarys_own_forward_of_every_row(temperature, budget):
    vlm, prompts = random_vlm(scale=0.3), mixed_prompts()
    completions, _ = ragged(vlm, prompts, temperature=temperature)
    guided = longer(prompts)
    D = guided_kl(vlm, prompts, guided, completions, temperature, tokens_per_microbatch=budget)  # (B, K, T)
    for b, k in np.ndindex(*D.shape[:2]):
        n = int(completions.lengths[b, k])
        expected = library_kl(vlm, prompts[b], guided[b], completions.tokens[b, k, :n], temperature)
        assert torch.allclose(D[b, k, :n].double(), expected, atol=2e-6, rtol=2e-5) and not D[b, k, n:].any()
    assert (D[completions.mask] > 1e-4).float().mean() > 0.9  # the two prompts do differ


@fast
def test_each_prompt_runs_once_for_its_completions_and_the_picture_not_at_all(monkeypatch):
    vlm, prompts = random_vlm(), mixed_prompts()
    completions, _ = ragged(vlm, prompts)
    sampled = rollout(vlm, prompts, torch.rand(3, 4, 9, dtype=torch.float64), 1.0).features
    expected, rows = guided_kl(vlm, prompts, longer(prompts), completions, 1.0), []  # without features it encodes
    completions.features = sampled
    monkeypatch.setattr(vlm.base.model, "get_image_features", lambda *_, **__: pytest.fail("a picture was encoded again"))
    vlm.base.model.language_model.layers[0].register_forward_pre_hook(lambda _, inputs: rows.append(tuple(inputs[0].shape[:2])))
    assert torch.allclose(guided_kl(vlm, prompts, longer(prompts), completions, 1.0), expected, atol=1e-6)
    P = [max(len(p.input_ids) for p in side) for side in (prompts, longer(prompts))]
    assert rows == [(3, P[0]), (12, 8), (3, P[1]), (12, 8)]  # B prompts, B K completions less their last token; twice


@fast
def test_neither_chunks_of_the_vocabulary_table_nor_microbatches_change_the_kl():
    vlm, prompts = random_vlm(scale=0.3), mixed_prompts()
    completions, _ = ragged(vlm, prompts)
    generator = torch.Generator().manual_seed(0)
    hidden, guided = torch.randn(2, 23, 32, generator=generator)  # (N, H)
    with torch.no_grad():
        whole = token_kl(vlm, hidden, guided, 1.0)
        for at_once in (1, 2 * VOCABULARY, 10 * VOCABULARY, 46 * VOCABULARY):
            assert torch.allclose(token_kl(vlm, hidden, guided, 1.0, at_once), whole, rtol=1e-6)
    one, many = (guided_kl(vlm, prompts, longer(prompts), completions, 1.0, budget) for budget in (10**6, 1))
    assert torch.allclose(one, many, atol=1e-6) and one.any()


@fast
def test_no_more_than_the_given_numbers_of_both_tables_exist_at_a_time(monkeypatch):
    vlm, sizes = random_vlm(), []
    original = lenguard.log_distribution
    monkeypatch.setattr(lenguard, "log_distribution", lambda *a: sizes.append(a[0].numel()) or original(*a))
    with torch.no_grad():
        token_kl(vlm, torch.randn(23, 32), torch.randn(23, 32), 1.0, at_once=10 * VOCABULARY)
    assert max(sizes) <= 5 * VOCABULARY and sum(sizes) == 2 * 23 * VOCABULARY


@fast
def test_kl_is_zero_for_the_same_prompt_and_never_negative_otherwise():
    vlm, prompts = random_vlm(scale=0.3), mixed_prompts()
    completions, _ = ragged(vlm, prompts)
    assert guided_kl(vlm, prompts, prompts, completions, 1.0).abs().max() < 1e-6
    assert guided_kl(vlm, prompts, longer(prompts), completions, 1.0).min() > -1e-6


@fast
def test_forbidden_tokens_take_no_part_however_likely_the_model_finds_them():
    vlm = random_vlm()
    hidden, guided = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    before = token_kl(vlm, hidden, guided, 1.0).detach()
    with torch.no_grad():
        vlm.base.lm_head.weight[VISION_START] = 50.0 * hidden[0]
        assert torch.allclose(token_kl(vlm, hidden, guided, 1.0), before) and before.isfinite().all()


# --- the length bonus, Eq. (3) --------------------------------------------------------------------------------------

@fast
def test_the_bonus_is_eq_3_by_hand_at_every_boundary():
    by_hand = {0: 0.0, 159: 0.0, 160: 0.25, 161: 0.25 + 2.5e-4, 260: 0.275, 360: 0.30, 361: 0.30, 768: 0.30, 769: 0.0, 9999: 0.0}
    found = length_bonus(np.array(list(by_hand)), STAGES["paper"])
    assert np.allclose(found, list(by_hand.values()), atol=1e-12)
    by_hand = {0: 0.0, 6: 0.0, 7: 0.25, 11: 0.275, 15: 0.30, 16: 0.30, 32: 0.30, 33: 0.0}
    assert np.allclose(length_bonus(np.array(list(by_hand)), STAGES["tiny"]), list(by_hand.values()), atol=1e-12)


@fast
def test_equal_levels_make_the_bonus_flat_and_l1_of_zero_pays_the_empty_completion_too():
    assert length_bonus(np.array([9, 10, 15, 20, 40, 41]), Stages(10, 20, 40, 0.3, 0.3)).tolist() == [0, 0.3, 0.3, 0.3, 0.3, 0]
    assert length_bonus(np.array([[0, 5]]), Stages(0, 10, 10, 0.0, 1.0)).tolist() == [[0.0, 0.5]]


@fast
def test_the_tiny_stages_are_the_papers_divided_by_24():
    assert STAGES["tiny"][:3] == tuple(round(l / 24) for l in STAGES["paper"][:3]) and STAGES["tiny"][3:] == STAGES["paper"][3:]


# --- the reward, Eq. (9) --------------------------------------------------------------------------------------------

@pytest.fixture
def batch(lora_vlm):
    """Two pairs, four completions each of a random model, cut to unequal lengths, and answers that a random model lacks."""
    pairs = list(pairs_of("depth", 2))
    prompts = [to_prompt(lora_vlm, side, SYSTEM_PROMPT) for pair in pairs for side in (pair.x, pair.x_prime)]
    completions = rollout(lora_vlm, prompts, torch.cat([draw_uniforms(0, 0, i, 4, 8) for i in range(2)]), 1.0)
    completions.lengths = torch.tensor([[1, 3, 5, 8], [2, 2, 7, 6], [8, 4, 4, 1], [3, 6, 5, 2]]).minimum(completions.lengths)
    completions.tokens *= completions.mask
    completions.logp *= completions.mask
    y, y_prime = parsed_completions("depth")
    return Batch(lora_vlm, pairs, prompts, completions, [[""] * 4] * 4, [y, y_prime, y_prime, y])


CONSISTENCY = over_pairs(make_reward("consistency"))
STAGED = dict(kl_weight=0.1, length_weight=0.7, stages=Stages(2, 5, 6))


def extra_by_hand(batch, kl_weight, length_weight, stages):
    """- l_KL S_KL + l_len r_len typed again: (B, K)."""
    guided = [guided_prompt(batch.vlm, side) for pair in batch.pairs for side in (pair.x, pair.x_prime)]
    S = guided_kl(batch.vlm, batch.prompts, guided, batch.completions, batch.temperature).sum(-1).double().numpy()
    bonus = [[0 if T < stages.l1 or T > stages.l3 else stages.r2 if T > stages.l2 else
              stages.r1 + (stages.r2 - stages.r1) * (T - stages.l1) / (stages.l2 - stages.l1) for T in row]
             for row in batch.completions.lengths.tolist()]
    assert (S > 1e-4).all()
    return length_weight * np.array(bonus) - kl_weight * S


@fast
def test_the_reward_is_eq_9_and_its_second_moment_that_of_a_coin_plus_a_certain_term(batch):
    extra, task = extra_by_hand(batch, **STAGED), CONSISTENCY(batch)
    for b, (r, c) in enumerate(zip(guarded(CONSISTENCY, **STAGED)(batch), task)):
        for p, e, mean, second in ((c.c, extra[2 * b], r.c, r.c2), (c.c_prime, extra[2 * b + 1], r.c_prime, r.c2_prime)):
            assert np.allclose(mean, p * (1 + e) + (1 - p) * e)  # a boolean c is 1 with probability p = E[c], else 0
            assert np.allclose(second, p * (1 + e) ** 2 + (1 - p) * e ** 2)
    assert np.isfinite(plain_advantages(batch, guarded(CONSISTENCY, **STAGED)(batch), 0.2)).all()


@fast
def test_a_numeric_reward_with_inner_variance_keeps_its_variance():
    rng = np.random.default_rng(0)
    c, e = rng.random((3, 5)), rng.normal(size=5)  # three equally likely values of c_i
    moments = PairRewards(c.mean(0), (c ** 2).mean(0), c.mean(0), (c ** 2).mean(0))
    found = add_certain(moments, e, -e)
    assert np.allclose(found.c, (c + e).mean(0)) and np.allclose(found.c2, ((c + e) ** 2).mean(0))
    assert np.allclose(found.c_prime, (c - e).mean(0)) and np.allclose(found.c2_prime, ((c - e) ** 2).mean(0))


@fast
@pytest.mark.parametrize("inner", [entropy_rewards, over_pairs(make_reward("vote")), guarded(CONSISTENCY, **STAGED)],
                         ids=["entropy", "vote", "itself"])
def test_it_adds_the_same_term_to_any_other_reward(batch, inner):
    extra, before = extra_by_hand(batch, **STAGED), inner(batch)
    for b, (r, c) in enumerate(zip(guarded(inner, **STAGED)(batch), before)):
        assert np.allclose(r.c - c.c, extra[2 * b]) and np.allclose(r.c_prime - c.c_prime, extra[2 * b + 1])
        assert np.allclose(r.c2 - r.c ** 2, c.c2 - c.c ** 2)  # a certain term adds no variance


@fast
def test_no_gradient_reaches_a_weight_and_the_next_update_is_none_the_wiser(batch):
    parameters = dict(batch.vlm.model.named_parameters())
    guarded(CONSISTENCY, **STAGED)(batch)
    assert any(p.requires_grad for p in parameters.values()) and all(p.grad is None for p in parameters.values())
    sides = [side for pair in batch.pairs for side in (pair.x, pair.x_prime)]
    D = guided_kl(batch.vlm, batch.prompts, [guided_prompt(batch.vlm, s) for s in sides], batch.completions, 1.0)
    assert not D.requires_grad and torch.is_grad_enabled()


@fast
def test_where_all_earn_the_same_task_reward_the_weight_of_the_kl_cancels(batch):
    y = [p for p in batch.parsed[0] if p.answer is not None and p.format][:1] * 4
    batch.parsed = [y] * 4
    weak, strong = (plain_advantages(batch, guarded(CONSISTENCY, w, length_weight=0.0)(batch)) for w in (5e-3, 5.0))
    assert np.abs(weak).max() > 0.5 and np.allclose(weak, strong, atol=1e-6)
    batch.parsed = [parsed_completions("depth")[0]] * 4  # unequal answers: now it matters
    weak, strong = (plain_advantages(batch, guarded(CONSISTENCY, w, length_weight=0.0)(batch)) for w in (5e-3, 5.0))
    assert not np.allclose(weak, strong, atol=0.1)


@fast
def test_two_ranks_with_a_pair_each_reward_and_log_as_one_with_both(batch):
    reward = guarded(CONSISTENCY, **STAGED)
    whole, halves, logs = reward(batch), [], []
    for rows in ((0, 1), (2, 3)):
        part = only(batch.completions, list(rows))
        half = Batch(batch.vlm, [batch.pairs[rows[0] // 2]], [batch.prompts[b] for b in rows], part, batch.texts[:2],
                     [batch.parsed[b] for b in rows], world_size=2)
        halves += reward(half)
        logs.append(half.log)
    for a, b in zip(whole, halves):
        assert all(np.allclose(x, y, atol=1e-7) for x, y in zip(vars(a).values(), vars(b).values()))
    assert {"task_reward", "guided_kl", "guided_kl_per_token", "length_bonus"} == batch.log.keys() == logs[0].keys()
    for name, value in batch.log.items():  # what the loop logs is the mean over ranks
        assert value == pytest.approx((logs[0][name] + logs[1][name]) / 2, abs=1e-7)


# --- guidance -------------------------------------------------------------------------------------------------------

@fast
@pytest.mark.parametrize("task", TASKS)
def test_guidance_is_one_sentence_that_never_holds_nor_changes_with_the_answer(task, monkeypatch, tokenizer):
    pairs, seen = pairs_of(task), []
    forbid_answers(monkeypatch)
    monkeypatch.setattr(lenguard, "make_prompt", lambda vlm, system, text, picture: (system, text, picture))
    for side in (side for pair in pairs for side in (pair.x, pair.x_prime)):
        system, text, picture = guided_prompt(None, side, "as for x")
        question = prompt_text(side.question, {i: o.name for i, o in side.view.objects.items()})
        assert (system, picture) == ("as for x", side.picture) and text.startswith(question + "\n")
        seen.append(text.removeprefix(question + "\n"))
    assert set(seen) == {GUIDANCE[task]}  # whatever picture, relation, order, template or T
    sentence = GUIDANCE[task].lower()
    assert sentence.endswith(".") and sentence.count(".") == 1
    words = set(sentence.replace(",", "").split())
    assert not words & {"true", "false", "yes", "no", "red", "blue", "green", "closer", "further", "bigger", "smaller"}
    assert not any(ch.isdigit() for ch in sentence.replace("object 1", ""))


@fast
def test_every_task_has_guidance_and_no_reward_of_the_guarded_kind_reads_an_answer(batch, monkeypatch):
    assert set(GUIDANCE) == set(TASKS)
    expected = guarded(CONSISTENCY, **STAGED)(batch)
    forbid_answers(monkeypatch)
    for a, b in zip(guarded(CONSISTENCY, **STAGED)(batch), expected):
        assert np.array_equal(a.c, b.c)


# --- the command line -----------------------------------------------------------------------------------------------

def settled(*argv):
    return train.settle(train.parse_arguments(["--task", "depth", "--preset", "tiny", *argv]))[0]


@fast
def test_lengths_come_from_the_preset_and_modes_differ_by_the_bonus_alone(monkeypatch, capsys):
    assert settled("--lenguard", "staged").lenguard_lengths == [7, 15, 32]
    assert settings.PRESETS["paper"]["lenguard_lengths"] == [160, 360, 768]
    calls = {}
    for mode in ("kl", "flat", "staged"):
        monkeypatch.setattr(lenguard, "guarded", lambda *a: calls.setdefault(mode, a))
        train.choose_methods(settled("--lenguard", mode, "--lenguard-kl-weight", "0.2"), {})
    assert {mode: call[1:4] for mode, call in calls.items()} == {
        "kl": (0.2, 0.0, Stages(7, 15, 32, 0.25, 0.30)), "flat": (0.2, 1.0, Stages(7, 15, 32, 0.30, 0.30)),
        "staged": (0.2, 1.0, Stages(7, 15, 32, 0.25, 0.30))}
    assert "lenguard staged: l_KL = 0.2, l_len = 1, Stages(l1=7, l2=15, l3=32" in capsys.readouterr().out


@fast
@pytest.mark.parametrize("argv, message", [
    (["--lenguard-kl-weight", "1"], "--lenguard-kl-weight does nothing without --lenguard"),
    (["--lenguard", "flat", "--lenguard-lengths", "9", "9", "20"], "must be 0 <= L1 < L2 <= L3"),
    (["--lenguard", "flat", "--lenguard-lengths", "50", "60", "70"], "no completion reaches L1 under --max-new-tokens 48"),
    (["--lenguard", "staged", "--lenguard-bonus", "0.3", "0.2"], "0 <= R1 <= R2"),
    (["--lenguard", "kl", "--lenguard-kl-weight", "-1"], "at least 0"),
    (["--lenguard", "kl", "--lenguard-kl-weight", "nan"], "at least 0"),
    (["--lenguard", "kl", "--lenguard-bonus-weight", "nan"], "at least 0"),
    (["--format-weight", "-0.1"], "--format-weight -0.1: must be at least 0")])
def test_settings_that_cannot_be_meant_are_refused(argv, message):
    with pytest.raises(DataError, match=message):
        settled(*argv)


def test_a_run_logs_the_parts_of_its_reward_and_resumes_with_its_own_settings(base, photos, tmp_path, quick):
    options = dict(lenguard="staged", lenguard_kl_weight=0.05, format_weight=0.2)
    argv = [*flags(base, photos, tmp_path / "run", steps=2, **options), "--lenguard-lengths", "1", "8", "9"]
    assert train.main(argv) == 0
    assert train.main(["--resume", str(tmp_path / "run"), "--steps", "3"]) == 0
    whole = [*flags(base, photos, tmp_path / "whole", steps=3, **options), "--lenguard-lengths", "1", "8", "9"]
    assert train.main(whole) == 0
    rows, expected = log_of(tmp_path / "run"), log_of(tmp_path / "whole")
    assert len(rows) == 3
    for row, other in zip(rows, expected):
        for name in ("reward", "task_reward", "guided_kl", "guided_kl_per_token", "length_bonus", "length"):
            assert row[name] == pytest.approx(other[name], rel=1e-5), name
        parts = row["task_reward"] + 0.2 * row["format"] - 0.05 * row["guided_kl"] + row["length_bonus"]
        assert row["reward"] == pytest.approx(parts)
        assert row["guided_kl"] > 0 and 0 < row["guided_kl_per_token"] <= row["guided_kl"]
    assert all(0.25 <= row["length_bonus"] <= 0.30 for row in rows)
    with pytest.raises(DataError, match="--lenguard kl differs from the run's own staged"):
        train.main(["--resume", str(tmp_path / "run"), "--lenguard", "kl"])


@fast
def test_runs_side_by_side_are_compared_over_the_steps_they_share(tmp_path, capsys):
    for name, steps, length in (("a", 30, 10.0), ("b", 25, 14.0)):
        (tmp_path / name).mkdir()
        rows = [dict(step=s + 1, length=length + (s >= 20), task_reward=0.5) for s in range(steps)]
        (tmp_path / name / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arm = ["--arm", "both", str(tmp_path / "a"), str(tmp_path / "b")]
    assert lenguard.main([*arm, "--out", str(tmp_path / "arms.png")]) == 0 and (tmp_path / "arms.png").stat().st_size > 1000
    out = capsys.readouterr().out  # 25 shared steps: the last 20 hold 15 of the old length and 5 of the new
    assert "steps 1-20 -> 6-25" in out and "12.000 +- 2.828 -> 12.250 +- 2.828" in out and "per seed 10.250 14.250" in out
    with pytest.raises(DataError, match="nothing.*give the folder of a run"):
        lenguard.main(["--arm", "none", str(tmp_path / "nothing")])
