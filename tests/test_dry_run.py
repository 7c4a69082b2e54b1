"""Claims about dry_run.py: the architectures are the published ones, and predicted bytes are what the allocator hands out."""
import json
import math
import re
from itertools import accumulate

import pytest
import torch
from random_vlm import random_prompt, random_vlm
from toy import flags

import dry_run
import train
from dataset import load_examples
from dry_run import FAKE, HUB, Shape, predict, real_config, tower_bytes_per_patch, update_peak, update_peak_of, without_content
from grpo import backward, rollout
from images import DataError
from model import image_tokens, make_prompt, trainable_parameters
from questions import SYSTEM_PROMPT
from sampling import encode_images

fast = pytest.mark.fast
META = torch.device("meta")


def allocator_peak(call):
    """The most bytes that torch's CPU allocator had handed out during `call`, from its own records."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    return max(accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))


# --- the architectures ------------------------------------------------------------------------------------------------
def weights_by_hand(layers, H, I, kv, V, tied):
    """Every matrix and bias of the published shapes, added up: decoder, then vision tower."""
    decoder = layers * (H * H + H + 2 * (H * kv + kv) + H * H + 3 * H * I + 2 * H) + H + V * H * (1 if tied else 2)
    W, J = 1280, 3420
    block = 3 * W * W + 3 * W + W * W + W + 3 * W * J + 2 * J + W + 2 * W
    tower = 3 * 2 * 14 * 14 * W + 32 * block + W + (4 * W) ** 2 + 4 * W + 4 * W * H + H
    return decoder + tower


@fast
@pytest.mark.parametrize("size, total, trainable, layers, H, I, kv, V, tied", [
    ("3B", 3_754_622_976, 59_867_136, 36, 2048, 11008, 256, 151936, True),
    ("7B", 8_292_166_656, 80_740_352, 28, 3584, 18944, 512, 152064, False)])
def test_the_built_in_architectures_have_as_many_weights_as_the_published_ones(size, total, trainable, layers, H, I, kv, V, tied):
    vlm = dry_run.random_vlm(real_config(size), HUB.format(size), 32, 0, torch.bfloat16, 512 * 784, META)
    assert sum(p.numel() for n, p in vlm.base.named_parameters() if "lora_" not in n) == total
    assert weights_by_hand(layers, H, I, kv, V, tied) == total
    per_layer = 32 * ((H + H) + 2 * (H + kv) + (H + H) + 2 * (H + I) + (I + H))       # rank times inputs and outputs
    found = trainable_parameters(vlm)
    assert sum(p.numel() for p in found.values()) == layers * per_layer == trainable
    assert all(".language_model.layers." in n and p.dtype == torch.float32 for n, p in found.items()) and len(found) == 2 * 7 * layers


@fast
def test_the_built_in_architectures_speak_of_the_family_as_its_checkpoints_do():
    for size in ("3B", "7B"):
        config = real_config(size)
        text, vision = config.text_config, config.vision_config
        assert config.model_type == "qwen2_5_vl" and vision.out_hidden_size == text.hidden_size
        assert text.hidden_size == 128 * text.num_attention_heads and sum(text.rope_parameters["mrope_section"]) == 64
        assert (config.image_token_id, config.vision_start_token_id, vision.fullatt_block_indexes) == (151655, 151652, [7, 15, 23, 31])
        assert config.tie_word_embeddings == (size == "3B")


# --- bytes ------------------------------------------------------------------------------------------------------------
def measured(vlm, s, T, K):
    """What rollout, update and tower of real prompts of these sizes take from the allocator."""
    side = 28 * math.isqrt(s.image_tokens)
    prompts = [random_prompt(s.P - s.image_tokens - 2, side, side, seed) for seed in range(s.B)]
    assert {len(p.input_ids) for p in prompts} == {s.P}
    vlm.end_ids = []                                          # nothing ends: every completion has T tokens
    uniforms = torch.rand(s.B, K, T, dtype=torch.float64)
    done = rollout(vlm, prompts, uniforms, 1.0)
    advantages = torch.ones(s.B, K).index_fill(1, torch.arange(0, K, 2), -1.0)
    sampled = allocator_peak(lambda: rollout(vlm, prompts, uniforms, 1.0))
    updated = allocator_peak(lambda: backward(vlm, prompts, done, advantages, 1.0, s.B // 2, s.microbatch, s.checkpointing))
    return sampled, updated, allocator_peak(lambda: encode_images(vlm, prompts))


@fast
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("shape", [dict(B=4, P=80, K=4, T=24, image_tokens=36, microbatch=10**6),
                                   dict(B=2, P=40, K=8, T=64, image_tokens=16, microbatch=1),
                                   dict(B=8, P=200, K=2, T=8, image_tokens=144, microbatch=500)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_predicted_memory_is_what_the_allocator_hands_out(shape, checkpointing, dtype):
    s = Shape(**shape, checkpointing=checkpointing, rows=0)
    small = dict(hidden=64, layers=8, heads=4, kv_heads=2, vision=64, dtype=dtype)
    real = random_vlm(**small)
    sampled, updated, pictured = measured(real, s, s.T, s.K)
    tower = tower_bytes_per_patch(real.base, dtype)
    fake = random_vlm(**small)
    with FAKE:
        without_content(fake.base)
    m = predict(fake, s, tower)
    assert m.update == pytest.approx(updated, rel=0.1)
    assert m.rollout == pytest.approx(sampled, rel=0.1)
    assert 4 * s.image_tokens * s.B * tower == pytest.approx(pictured, rel=0.15)
