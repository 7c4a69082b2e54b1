"""Claims about sampling.py and grpo.py, each against something independent: the library, autograd, or the formula."""
import copy
import math
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from peft import LoraConfig, get_peft_model
from random_vlm import (END_OF_TURN, IMAGE, VIDEO, VISION_END, VISION_START, VOCABULARY, mixed_prompts, random_prompt,
                        random_vlm)

import grpo
import sampling
from grpo import Rollout, backward, backward_repeated, completion_logprobs, logprobs_of, policy_loss, rollout
from model import LORA_TARGETS
from pairing import group_advantages

FORBIDDEN = [VISION_START, VISION_END, IMAGE, VIDEO]


def uniforms(*shape, seed=0):
    return torch.rand(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def ragged(vlm, prompts, K=4, T=9, temperature=1.0, seed=0):
    """Completions of 1 to T tokens, all lengths mixed, as they come out of sampling with early ends."""
    completions = rollout(vlm, prompts, uniforms(len(prompts), K, T, seed=seed), temperature)
    generator = torch.Generator().manual_seed(seed)
    completions.lengths = torch.randint(1, T + 1, (len(prompts), K), generator=generator)  # (B, K)
    completions.lengths[0, :2] = torch.tensor([1, T])
    completions.tokens *= completions.mask
    completions.logp *= completions.mask
    return completions, torch.randn(len(prompts), K, generator=generator)  # advantages (B, K)


def only(completions, rows):
    """The completions of some of the prompts."""
    return Rollout(*(x[rows] for x in (completions.tokens, completions.lengths, completions.logp, completions.ended)))


def gradients(vlm, compute):
    """Name -> gradient after `compute()`, which calls backward itself."""
    vlm.model.zero_grad(set_to_none=True)
    compute()
    return {n: p.grad.clone() for n, p in vlm.model.named_parameters() if p.grad is not None}


def assert_same(found, expected, tolerance=1e-5):
    assert set(found) == set(expected) and expected
    for name, g in expected.items():
        assert g.norm() > 0 and (found[name] - g).norm() <= tolerance * g.norm(), name


def scores(vlm, prompts, completions, temperature=1.0):
    with torch.no_grad():
        features = sampling.encode_images(vlm, prompts)
        return completion_logprobs(vlm, prompts, features, completions.tokens, completions.mask, temperature)


def library_logits(vlm, prompt, tokens):
    """The library's own forward on one prompt and one completion, no padding, no cache: (T, V)."""
    ids = torch.cat([prompt.input_ids, tokens])[None]  # (1, P+T)
    logits = vlm.model(input_ids=ids, pixel_values=prompt.pixel_values, image_grid_thw=prompt.grid_thw[None],
                       mm_token_type_ids=(ids == IMAGE).int(), attention_mask=torch.ones_like(ids)).logits
    return logits[0, len(prompt.input_ids) - 1:-1]


# ---------------------------------------------------------------------------------------------------- log-probabilities
@pytest.mark.fast
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_match_the_softmax_written_out(temperature):
    logits = [[1.0, -2.0, 0.5, 30.0], [0.0, 3.0, -1.0, 30.0]]
    forbidden = torch.tensor([False, False, False, True])
    got = logprobs_of(torch.tensor(logits), torch.tensor([2, 0]), temperature, forbidden)
    for row, token, value in zip(logits, [2, 0], got.tolist()):
        exponentials = [math.exp(x / temperature) for x in row[:3]]
        assert value == pytest.approx(math.log(exponentials[token] / sum(exponentials)), abs=1e-6)


@pytest.mark.fast
def test_first_and_last_completion_token_get_the_log_probability_of_hand_set_logits():
    vlm, prompts, temperature = random_vlm(rank=0), mixed_prompts(), 0.7
    by_hand = torch.linspace(-3, 3, VOCABULARY)  # (V,), whatever the context
    vlm.base.lm_head = torch.nn.Linear(32, VOCABULARY)
    vlm.base.lm_head.weight.data.zero_()
    vlm.base.lm_head.bias.data = by_hand
    vlm.end_ids = [END_OF_TURN]
    completions = rollout(vlm, prompts, uniforms(3, 2, 6), temperature)
    allowed = [v for v in range(VOCABULARY) if v not in FORBIDDEN]
    normaliser = math.log(sum(math.exp(by_hand[v].item() / temperature) for v in allowed))
    update = scores(vlm, prompts, completions, temperature)  # (B, K, T)
    for b, k in [(b, k) for b in range(3) for k in range(2)]:
        for t in (0, completions.lengths[b, k].item() - 1):
            expected = by_hand[completions.tokens[b, k, t]].item() / temperature - normaliser
            assert completions.logp[b, k, t].item() == pytest.approx(expected, abs=1e-5)
            assert update[b, k, t].item() == pytest.approx(expected, abs=1e-5)


@pytest.mark.fast
def test_inverse_cdf_on_an_even_grid_draws_each_token_as_often_as_its_probability_says():
    log_pi = torch.randn(6, generator=torch.Generator().manual_seed(1)).log_softmax(-1)  # (V,)
    n = 10_000
    drawn = sampling.draw(log_pi.expand(n, -1), (torch.arange(n, dtype=torch.float64) + 0.5) / n).bincount(minlength=6)
    assert (drawn - n * log_pi.exp().double()).abs().max() <= 1


@pytest.mark.fast
@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2**-24, 1 - 2**-53])
def test_a_forbidden_token_is_never_drawn_even_as_the_last_or_first_of_the_vocabulary(u):
    forbidden = torch.tensor([True, False, False, True])
    log_pi = sampling.log_distribution(torch.tensor([[80.0, 0.0, -1.0, 80.0]]), 1.0, forbidden)
    assert log_pi.exp().sum().item() == pytest.approx(1.0)
    assert sampling.draw(log_pi, torch.tensor([u], dtype=torch.float64)).item() in (1, 2)
    assert sampling.draw(log_pi, torch.tensor([u], dtype=torch.float64), greedy=True).item() == 1


@pytest.mark.fast
def test_picture_tokens_are_never_sampled_though_the_model_wants_them():
    vlm = random_vlm(rank=0)
    vlm.base.lm_head = torch.nn.Linear(32, VOCABULARY)
    vlm.base.lm_head.bias.data[FORBIDDEN] = 60.0
    for temperature in (1.0, 0.0):
        completions = rollout(vlm, mixed_prompts(), uniforms(3, 8, 8), temperature)
        assert not torch.isin(completions.tokens, torch.tensor(FORBIDDEN)).any()
        assert completions.logp.isfinite().all()


# ------------------------------------------------------------------------------------------------------------- sampling
@pytest.mark.fast
def test_greedy_equals_the_library_token_for_token():
    vlm, prompts = random_vlm(scale=0.5), mixed_prompts() + [random_prompt(31, 56, 56, seed=9)]
    completions = rollout(vlm, prompts, uniforms(4, 1, 24), temperature=0)
    for b, prompt in enumerate(prompts):
        ids = prompt.input_ids[None]
        expected = vlm.base.generate(
            input_ids=ids, pixel_values=prompt.pixel_values, image_grid_thw=prompt.grid_thw[None],
            mm_token_type_ids=(ids == IMAGE).int(), attention_mask=torch.ones_like(ids), do_sample=False,
            max_new_tokens=24, suppress_tokens=FORBIDDEN, eos_token_id=vlm.end_ids, pad_token_id=0)[0, ids.shape[1]:]
        assert completions.tokens[b, 0, :completions.lengths[b, 0]].tolist() == expected.tolist()


@pytest.mark.fast
def test_nothing_of_the_checkpoints_generation_config_leaks_into_sampling():
    vlm = random_vlm()
    for name, value in dict(do_sample=True, top_k=1, top_p=0.001, temperature=1e-6, repetition_penalty=1.05).items():
        setattr(vlm.base.generation_config, name, value)
    completions = rollout(vlm, [random_prompt(9, 56, 84)], uniforms(1, 64, 8), temperature=1.0)
    assert len({tuple(row) for row in completions.tokens[0].tolist()}) >= 60


@pytest.mark.fast
def test_completions_do_not_depend_on_batch_mates():
    vlm, prompts, numbers = random_vlm(scale=0.3), mixed_prompts(), uniforms(3, 5, 12)
    vlm.end_ids = list(range(0, 300, 12))  # ends come early and at different times, so rows leave the batch
    together = rollout(vlm, prompts, numbers, 1.0)
    assert 1 <= together.lengths.min() < together.lengths.max() and together.ended.float().mean() > 0.3
    for b, prompt in enumerate(prompts):
        for k in range(5):
            alone = rollout(vlm, [prompt], numbers[b:b + 1, k:k + 1], 1.0)
            assert alone.tokens[0, 0].equal(together.tokens[b, k]) and alone.lengths[0, 0] == together.lengths[b, k]
            assert alone.ended[0, 0] == together.ended[b, k]
            assert (alone.logp[0, 0] - together.logp[b, k]).abs().max() < 1e-5


@pytest.mark.fast
def test_every_completion_keeps_its_own_picture_for_mixed_sizes():
    """The library's forward on each row alone: another row's picture would change every number."""
    vlm, prompts = random_vlm(scale=0.3), [random_prompt(8, 56, 84, seed=1), random_prompt(8, 112, 56, seed=2)]
    completions = rollout(vlm, prompts, uniforms(2, 3, 7), 1.0)
    with torch.no_grad():
        for b, k in [(b, k) for b in range(2) for k in range(3)]:
            n = completions.lengths[b, k]
            tokens = completions.tokens[b, k, :n]
            alone = logprobs_of(library_logits(vlm, prompts[b], tokens), tokens, 1.0, vlm.forbidden)  # (n,)
            assert (alone - completions.logp[b, k, :n]).abs().max() < 1e-5


@pytest.mark.fast
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_right_after_sampling_old_and_new_log_probabilities_agree(temperature):
    vlm, prompts = random_vlm(scale=0.3), mixed_prompts()
    completions = rollout(vlm, prompts, uniforms(3, 4, 10), temperature)
    together = scores(vlm, prompts, completions, temperature)
    assert (together - completions.logp).abs().max() < 1e-4
    for b, prompt in enumerate(prompts):
        alone = only(completions, slice(b, b + 1))
        assert (scores(vlm, [prompt], alone, temperature) - together[b]).abs().max() < 1e-4
    stats = backward(vlm, prompts, completions, torch.randn(3, 4), temperature, pairs=1)
    assert stats["ratio_deviation"] < 1e-4 and stats["clip_fraction"] == 0


@pytest.mark.fast
def test_the_end_token_counts_and_either_of_the_two_ends():
    vlm = random_vlm(rank=0)
    vlm.base.lm_head = torch.nn.Linear(32, VOCABULARY)
    vlm.base.lm_head.weight.data.zero_()
    vlm.base.lm_head.bias.data = torch.full((VOCABULARY,), -40.0).index_fill(0, torch.tensor([5, *vlm.end_ids]), 0.0)
    completions = rollout(vlm, mixed_prompts(), uniforms(3, 64, 10), 1.0)
    rows = (x.flatten(0, 1) for x in (completions.tokens, completions.lengths, completions.ended))
    for tokens, length, ended in zip(*rows):
        expected = next((t + 1 for t, v in enumerate(tokens.tolist()) if v in vlm.end_ids), 10)
        assert length == expected and ended == (tokens[length - 1].item() in vlm.end_ids)
        assert (tokens[length:] == 0).all()
    last = completions.tokens.gather(-1, completions.lengths[..., None] - 1)
    assert all((last == end).any() for end in vlm.end_ids)


@pytest.mark.fast
def test_each_picture_and_each_prompt_is_computed_once():
    vlm, prompts, seen = random_vlm(), mixed_prompts(), {"pictures": 0, "tokens": 0}
    vlm.base.model.visual.register_forward_hook(lambda module, args, out: seen.update(pictures=seen["pictures"] + 1))
    vlm.base.model.language_model.layers[0].register_forward_pre_hook(
        lambda module, args: seen.update(tokens=seen["tokens"] + args[0].shape[:2].numel()))
    B, K, T, P = 3, 4, 6, max(len(p.input_ids) for p in prompts)
    vlm.end_ids = [END_OF_TURN]
    vlm.base.lm_head = torch.nn.Linear(32, VOCABULARY)
    vlm.base.lm_head.bias.data[END_OF_TURN] = -60.0
    completions = rollout(vlm, prompts, uniforms(B, K, T), 1.0)
    assert seen == {"pictures": 1, "tokens": B * P + B * K * (T - 1)}
    backward(vlm, prompts, completions, torch.randn(B, K), 1.0, pairs=1)
    assert seen == {"pictures": 1, "tokens": 2 * (B * P + B * K * (T - 1))}


# --------------------------------------------------------------------------------------------------------- folding LoRA
@pytest.mark.fast
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_folding_lora_brings_the_weights_back_bit_for_bit(dtype):
    vlm = random_vlm(dtype=dtype)
    before = copy.deepcopy(vlm.model.state_dict())
    with pytest.raises(KeyError), sampling.folded_lora(vlm):
        changed = sum(not torch.equal(before[n], w) for n, w in vlm.model.state_dict().items())
        assert changed == 7 * 2  # projections times layers
        raise KeyError("even if sampling fails")
    assert all(torch.equal(before[n], w) for n, w in vlm.model.state_dict().items())


@pytest.mark.fast
def test_folding_leaves_a_plain_model_and_a_switched_off_adapter_alone():
    plain, adapted, prompts = random_vlm(rank=0), random_vlm(), mixed_prompts()
    adapted.base.load_state_dict({n.replace("proj.", "proj.base_layer.") if "language_model.layers" in n else n: w
                                  for n, w in plain.base.state_dict().items()}, strict=False)
    expected = rollout(plain, prompts, uniforms(3, 2, 6), 1.0).tokens
    assert not rollout(adapted, prompts, uniforms(3, 2, 6), 1.0).tokens.equal(expected)
    with adapted.model.disable_adapter(), sampling.folded_lora(adapted):
        assert all(torch.equal(plain.base.state_dict()[n.replace(".base_layer", "")], w)
                   for n, w in adapted.base.state_dict().items() if "lora" not in n)
    with adapted.model.disable_adapter():
        assert rollout(adapted, prompts, uniforms(3, 2, 6), 1.0).tokens.equal(expected)


@pytest.mark.fast
def test_bf16_folding_would_swallow_a_young_adapter_so_rollout_does_not_fold_there(monkeypatch):
    vlm = random_vlm(dtype=torch.bfloat16)
    for name, p in vlm.model.named_parameters():
        if "lora_B" in name:
            p.data = 1e-5 * torch.randn_like(p)  # ten steps of AdamW at 1e-6
    layers = [m for m in vlm.base.modules() if hasattr(m, "lora_A")]
    before = [m.base_layer.weight.clone() for m in layers]
    assert all(m.get_delta_weight("default").abs().min() > 0 for m in layers)
    with sampling.folded_lora(vlm):
        unchanged = [(m.base_layer.weight == w).float().mean().item() for m, w in zip(layers, before)]
    assert min(unchanged) > 0.9
    monkeypatch.setattr(sampling, "folded_lora", lambda vlm: pytest.fail("folded"))
    rollout(vlm, mixed_prompts(), uniforms(3, 2, 4), 1.0)


# ------------------------------------------------------------------------------------------------------------- the loss
@pytest.mark.fast
@pytest.mark.parametrize("A", [1.5, -1.5, 0.0])
@pytest.mark.parametrize("rho", [0.3, 0.79, 0.81, 1.0, 1.19, 1.21, 3.0])
def test_one_token_follows_the_clipped_surrogate_typed_again(A, rho):
    logp = torch.tensor([[[rho]]]).log().requires_grad_()
    policy_loss(logp, torch.zeros(1, 1, 1), torch.tensor([[A]]), torch.ones(1, 1, 1, dtype=torch.bool)).sum().backward()
    clipped = (A > 0 and rho > 1.2) or (A < 0 and rho < 0.8)
    assert logp.grad.item() == pytest.approx(0.0 if clipped else -A * rho, rel=1e-5)


@pytest.mark.fast
def test_eq_5_as_printed_is_no_pessimistic_bound_for_negative_advantages():
    """PPO's bound never exceeds the unclipped surrogate A rho; the printed form does, for A < 0 and rho > 1.2."""
    rho = torch.linspace(0.1, 3, 59).view(1, 1, -1)  # (1, 1, T)
    mask = torch.ones_like(rho, dtype=torch.bool)
    ours = torch.cat([-policy_loss(r.log().view(1, 1, 1), torch.zeros(1, 1, 1), torch.tensor([[-1.0]]), mask[..., :1])
                      for r in rho.flatten()])
    printed = -torch.minimum(rho, rho.clamp(0.8, 1.2)).flatten()
    assert (ours <= -rho.flatten() + 1e-6).all() and (printed > -rho.flatten() + 0.1).any()


@pytest.mark.fast
def test_each_completion_is_averaged_over_its_own_tokens_then_over_k():
    mask = torch.arange(8) < torch.tensor([[2, 8]])[..., None]  # (1, 2, 8)
    logp = torch.zeros(1, 2, 8, requires_grad=True)
    policy_loss(logp, torch.zeros(1, 2, 8), torch.tensor([[1.0, -3.0]]), mask).sum().backward()
    assert torch.allclose(logp.grad[0, 0], -mask[0, 0].float() * 1.0 / (2 * 2))
    assert torch.allclose(logp.grad[0, 1], torch.full((8,), 3.0 / (2 * 8)))


@pytest.mark.fast
@pytest.mark.parametrize("poison", [100.0, -100.0, float("nan"), float("inf")])
def test_masked_positions_cannot_influence_loss_or_gradient(poison):
    generator = torch.Generator().manual_seed(0)
    clean, old = torch.randn(2, 3, 5, generator=generator), torch.randn(2, 3, 5, generator=generator)
    mask, A = torch.arange(5) < torch.tensor([[1, 2, 5], [3, 4, 0]])[..., None], torch.randn(2, 3, generator=generator)
    results = []
    for value in (0.0, poison):
        logp = torch.where(mask, clean, value).requires_grad_()
        loss = policy_loss(logp, old, A, mask)
        loss.sum().backward()
        results.append((loss.detach(), logp.grad))
    assert all(x.isfinite().all() for x in results[1])
    assert all(torch.equal(x, y) for x, y in zip(*results)) and (results[1][1][~mask] == 0).all()


@pytest.mark.fast
@pytest.mark.parametrize("log_ratio", [100.0, -100.0])
def test_extreme_ratios_stay_finite(log_ratio):
    logp, mask = torch.full((1, 3, 2), log_ratio, requires_grad=True), torch.ones(1, 3, 2, dtype=torch.bool)
    loss = policy_loss(logp, torch.zeros(1, 3, 2), torch.tensor([[1.0, 0.0, -1.0]]), mask)
    loss.sum().backward()
    assert loss.isfinite().all() and logp.grad.isfinite().all()


# --------------------------------------------------------------------------------------------------------- the gradient
@pytest.mark.fast
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gradient_equals_that_of_repeated_prompts(checkpointing, temperature):
    """Mixed prompt lengths, picture sizes and completion lengths; ratios moved away from 1 so that some are clipped."""
    vlm, prompts = random_vlm(scale=0.3), mixed_prompts()
    completions, advantages = ragged(vlm, prompts, temperature=temperature)
    completions.logp += 0.3 * torch.randn(completions.logp.shape, generator=torch.Generator().manual_seed(5))
    expected = gradients(vlm, lambda: backward_repeated(vlm, prompts, completions, advantages, temperature, pairs=2))
    stats = {}
    found = gradients(vlm, lambda: stats.update(backward(
        vlm, prompts, completions, advantages, temperature, pairs=2, activation_checkpointing=checkpointing)))
    assert_same(found, expected)
    assert 0.1 < stats["clip_fraction"] < 0.9


@pytest.mark.fast
def test_gradient_equals_autograd_through_the_library_row_by_row_with_the_formula_typed_again():
    vlm, prompts, pairs, eps = random_vlm(scale=0.3), mixed_prompts()[:2], 1, 0.2
    completions, advantages = ragged(vlm, prompts)
    completions.logp += 0.3 * torch.randn(completions.logp.shape, generator=torch.Generator().manual_seed(5))

    def by_hand():
        total = 0.0
        for b, k in [(b, k) for b in range(2) for k in range(4)]:
            n, A = completions.lengths[b, k].item(), advantages[b, k].item()
            tokens = completions.tokens[b, k, :n]
            logits = library_logits(vlm, prompts[b], tokens).clone()
            logits[:, FORBIDDEN] = -1e9
            for t in range(n):
                logp = logits[t, tokens[t]] - logits[t].exp().sum().log()
                rho = (logp - completions.logp[b, k, t]).exp()
                stop = rho > 1 + eps if A > 0 else rho < 1 - eps
                total = total + (0 * rho if stop else A * rho) / n / 4 / pairs
        (-total).backward()

    expected = gradients(vlm, by_hand)
    assert_same(gradients(vlm, lambda: backward(vlm, prompts, completions, advantages, 1.0, pairs)), expected)


@pytest.mark.fast
@pytest.mark.parametrize("budget", [1, 80, 150, 10**6])
def test_gradient_is_the_same_for_any_split_into_microbatches(budget):
    vlm, prompts = random_vlm(scale=0.3), [random_prompt(9, 56, 84, seed=1), random_prompt(12, 56, 56, seed=2)]
    completions, advantages = ragged(vlm, prompts, K=4, T=8)
    completions.lengths[0], completions.lengths[1] = 2, 8
    expected = gradients(vlm, lambda: [backward(
        vlm, prompts[b:b + 1], only(completions, slice(b, b + 1)), advantages[b:b + 1], 1.0, pairs=1) for b in (1, 0)])
    assert_same(gradients(vlm, lambda: backward(vlm, prompts, completions, advantages, 1.0, 1, budget)), expected)


@pytest.mark.fast
def test_microbatches_hold_every_chosen_prompt_once_and_keep_to_the_budget():
    prompts = [random_prompt(n, 56, 56) for n in (5, 40, 11, 23, 60, 8)]
    lengths = torch.tensor([[1, 2], [9, 3], [4, 4], [2, 30], [1, 1], [7, 2]])
    for budget in (1, 60, 100, 150, 1000):
        parts = grpo.microbatches(prompts, lengths, [0, 1, 3, 4, 5], budget)
        assert sorted(b for part in parts for b in part) == [0, 1, 3, 4, 5]
        for part in parts:
            padded = len(part) * (max(len(prompts[b].input_ids) for b in part) + 2 * lengths[part].max().item())
            assert padded <= budget or len(part) == 1
    assert grpo.microbatches(prompts, lengths, [], 100) == []


@pytest.mark.fast
def test_logits_in_chunks_give_the_same_gradient(monkeypatch):
    vlm, prompts = random_vlm(scale=0.3), mixed_prompts()
    completions, advantages = ragged(vlm, prompts)
    expected = gradients(vlm, lambda: backward(vlm, prompts, completions, advantages, 1.0, 1))
    monkeypatch.setattr(grpo, "LOGITS_AT_ONCE", 5 * VOCABULARY)
    assert_same(gradients(vlm, lambda: backward(vlm, prompts, completions, advantages, 1.0, 1)), expected, 2e-6)


@pytest.mark.fast
def test_loss_is_zero_but_gradient_is_not():
    vlm, prompts = random_vlm(), mixed_prompts()
    completions = rollout(vlm, prompts, uniforms(3, 4, 8), 1.0)
    advantages = torch.tensor([[1.0, -1.0, 1.0, -1.0]]).expand(3, 4)
    stats = {}
    found = gradients(vlm, lambda: stats.update(backward(vlm, prompts, completions, advantages, 1.0, 1)))
    assert abs(stats["loss"]) < 1e-5 and sum(g.norm() for g in found.values()) > 0.1


@pytest.mark.fast
@pytest.mark.parametrize("checkpointing", [False, True])
def test_every_trainable_tensor_gets_a_gradient_and_the_vision_tower_none(checkpointing):
    vlm = random_vlm(rank=0)
    vlm.model = get_peft_model(vlm.model, LoraConfig(r=4, target_modules=LORA_TARGETS))  # B = 0, as at the start
    completions = rollout(vlm, mixed_prompts(), uniforms(3, 4, 6), 1.0)
    advantages = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    found = gradients(vlm, lambda: backward(vlm, mixed_prompts(), completions, advantages, 1.0, 1,
                                            activation_checkpointing=checkpointing))
    assert set(found) == {n for n, p in vlm.model.named_parameters() if p.requires_grad}
    assert sum("lora_B" in n for n in found) == 7 * 2 and not any("visual" in n for n in found)
    assert all(g.norm() > 0 for n, g in found.items() if "lora_B" in n)
    expected = gradients(vlm, lambda: backward(vlm, mixed_prompts(), completions, advantages, 1.0, 1))
    assert all((found[n] - g).norm() <= 1e-4 * g.norm() for n, g in expected.items())


@pytest.mark.fast
def test_the_librarys_own_checkpointing_is_refused():
    """It drops the cache: the completions would be scored without their prompts, and nobody would know."""
    vlm, prompts = random_vlm(), mixed_prompts()
    completions = rollout(vlm, prompts, uniforms(3, 2, 4), 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        vlm.base.gradient_checkpointing_enable()
        vlm.base.train()
        with pytest.raises(AssertionError, match="activation_checkpointing=True"):
            backward(vlm, prompts, completions, torch.randn(3, 2), 1.0, 1)


@pytest.mark.fast
def test_a_batch_without_a_usable_token_changes_nothing_and_is_finite():
    vlm, prompts = random_vlm(), mixed_prompts()
    parameters = [p for p in vlm.model.parameters() if p.requires_grad]
    before, optimizer = [p.detach().clone() for p in parameters], torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0)
    for step in range(3):
        completions = rollout(vlm, prompts, uniforms(3, 4, 1, seed=step), 1.0)
        optimizer.zero_grad()
        stats = backward(vlm, prompts, completions, torch.zeros(3, 4), 1.0, 1)
        grpo.all_reduce_gradients(parameters, world_size=1)
        assert torch.nn.utils.clip_grad_norm_(parameters, 1.0) == 0
        optimizer.step()
        assert stats["truncated"] == 1.0 and stats["loss"] == 0 and all(math.isfinite(v) for v in stats.values())
    assert all(torch.equal(p, q) for p, q in zip(parameters, before))


@pytest.mark.fast
def test_advantages_are_those_of_one_prompt_and_a_uniform_batch_has_none():
    """Prompt A rewards all with 1, prompt B all with 0: a spread over the batch, none within a group."""
    groups = [group_advantages(np.full(4, r), np.full(4, r) ** 2) for r in (1.0, 0.0)]  # 2 x (K,)
    assert not np.any(groups)
    vlm, prompts = random_vlm(), mixed_prompts()[:2]
    completions = rollout(vlm, prompts, uniforms(2, 4, 5), 1.0)
    assert gradients(vlm, lambda: backward(vlm, prompts, completions, torch.tensor(np.stack(groups)), 1.0, 1)) == {}


@pytest.mark.fast
def test_a_completion_cap_of_one_token_still_trains_where_rewards_differ():
    vlm, prompts = random_vlm(), mixed_prompts()
    completions = rollout(vlm, prompts, uniforms(3, 4, 1), 1.0)
    advantages = torch.tensor([[1.0, -1.0, 1.0, -1.0]]).expand(3, 4).contiguous()
    expected = gradients(vlm, lambda: backward_repeated(vlm, prompts, completions, advantages, 1.0, 1))
    assert_same(gradients(vlm, lambda: backward(vlm, prompts, completions, advantages, 1.0, 1)), expected)


@pytest.mark.fast
def test_a_group_without_spread_costs_nothing_and_changes_nothing():
    vlm, prompts = random_vlm(), mixed_prompts()
    completions, advantages = ragged(vlm, prompts)
    advantages[1] = 0
    expected = gradients(vlm, lambda: backward_repeated(vlm, prompts, completions, advantages, 1.0, 1))
    assert_same(gradients(vlm, lambda: backward(vlm, prompts, completions, advantages, 1.0, 1)), expected)
    vlm.base.model.language_model.layers[0].register_forward_pre_hook(lambda *_: pytest.fail("computed"))
    stats = backward(vlm, prompts, completions, torch.zeros(3, 4), 1.0, 1)
    assert stats["loss"] == 0 and stats["completion_tokens"] == completions.lengths.sum()


@pytest.mark.fast
def test_bf16_weights_with_fp32_lora_give_finite_gradients_near_those_of_fp32():
    exact, rounded, prompts = random_vlm(), random_vlm(dtype=torch.bfloat16), mixed_prompts()
    rounded.model.load_state_dict(exact.model.state_dict())
    completions, advantages = ragged(exact, prompts)
    expected = gradients(exact, lambda: backward(exact, prompts, completions, advantages, 1.0, 1))
    completions.features = []
    found = gradients(rounded, lambda: backward(rounded, prompts, completions, advantages, 1.0, 1,
                                                activation_checkpointing=True))
    assert all(g.dtype == torch.float32 for g in found.values())
    assert sum((found[n] - g).norm() for n, g in expected.items()) < 0.1 * sum(g.norm() for g in expected.values())


# -------------------------------------------------------------------------------------------------------- several ranks
@pytest.mark.fast
def test_one_rank_alone_keeps_its_gradients_and_gets_zeros_where_it_has_none():
    parameters = [torch.nn.Parameter(torch.randn(2, 3)), torch.nn.Parameter(torch.randn(4))]
    parameters[0].grad = expected = torch.randn(2, 3)
    grpo.all_reduce_gradients(iter(parameters), world_size=1)
    assert torch.equal(parameters[0].grad, expected) and torch.equal(parameters[1].grad, torch.zeros(4))


def one_rank(rank, world_size, port, completions, advantages, folder):
    """Each rank has its half of the prompts; pairs counts those of both."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    vlm, mine = random_vlm(scale=0.3), slice(2 * rank, 2 * rank + 2)
    share = only(completions, mine)
    for name, A in advantages.items():
        vlm.model.zero_grad(set_to_none=True)
        backward(vlm, four_prompts()[mine], share, A[mine], 1.0, pairs=2)
        grpo.all_reduce_gradients((p for p in vlm.model.parameters() if p.requires_grad), world_size)
        reduced = {n: p.grad for n, p in vlm.model.named_parameters() if p.requires_grad}
        torch.save(reduced, f"{folder}/{name}-{rank}.pt")
    dist.destroy_process_group()


def four_prompts():
    return mixed_prompts() + [random_prompt(14, 56, 56, seed=4)]


def test_two_ranks_with_half_the_prompts_each_equal_one_also_if_one_has_no_signal(tmp_path):
    vlm, prompts = random_vlm(scale=0.3), four_prompts()
    completions, both = ragged(vlm, prompts, K=4, T=6)
    completions.features = []
    advantages = {"both": both, "only_rank_0": both.clone().index_fill_(0, torch.tensor([2, 3]), 0.0)}
    mp.spawn(one_rank, (2, free_port(), completions, advantages, str(tmp_path)), nprocs=2)
    for name, A in advantages.items():
        expected = gradients(vlm, lambda: backward(vlm, prompts, completions, A, 1.0, pairs=2))
        first, second = (torch.load(tmp_path / f"{name}-{rank}.pt") for rank in range(2))
        assert all(torch.equal(first[n], second[n]) for n in first)
        assert_same(first, expected)


def free_port():
    import socket
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
