"""Claims about dry_run.py and memory.py: the architectures are the published ones, and predicted bytes are what the allocator hands out."""
import math
import re
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from random_vlm import random_prompt, random_vlm

import dry_run
import train
from dataset import load_examples
from dry_run import HUB, real_config
from grpo import backward, rollout
from memory import FAKE, GIB, Memory, Shape, predict, tower_bytes_per_patch, without_content
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
def prompts_of(s):
    """Real prompts of exactly these sizes."""
    side = 28 * math.isqrt(s.image_tokens)
    prompts = [random_prompt(s.P - s.image_tokens - 2, side, side, seed) for seed in range(s.B)]
    assert {len(p.input_ids) for p in prompts} == {s.P}
    return prompts


@pytest.mark.parametrize("dtype, checkpointing, shape", [
    (torch.float32, False, dict(B=4, P=50, K=3, T=10, image_tokens=16, microbatch=10**6)),
    (torch.float32, True, dict(B=2, P=30, K=8, T=16, image_tokens=9, microbatch=1)),
    (torch.bfloat16, False, dict(B=2, P=30, K=8, T=16, image_tokens=9, microbatch=10**6)),
    (torch.bfloat16, True, dict(B=4, P=50, K=4, T=12, image_tokens=4, microbatch=200))])
def test_predicted_memory_is_what_the_allocator_hands_out(dtype, checkpointing, shape):
    s = Shape(**shape, checkpointing=checkpointing, rows=0)
    small = dict(hidden=64, layers=7, heads=4, kv_heads=2, dtype=dtype)
    vlm, fake, prompts = random_vlm(**small), random_vlm(**small), prompts_of(s)
    vlm.end_ids = []                                          # nothing ends: every completion has T tokens
    uniforms = torch.rand(s.B, s.K, s.T, dtype=torch.float64)
    advantages = torch.ones(s.B, s.K).index_fill(1, torch.arange(0, s.K, 2), -1.0)
    done = rollout(vlm, prompts, uniforms, 1.0)
    sampled = allocator_peak(lambda: rollout(vlm, prompts, uniforms, 1.0))
    updated = allocator_peak(lambda: backward(vlm, prompts, done, advantages, 1.0, s.B // 2, s.microbatch, checkpointing))
    tower = tower_bytes_per_patch(vlm.base, dtype)
    with FAKE:
        without_content(fake.base)
    m = predict(fake, s, tower)
    assert (m.update, m.rollout) == (pytest.approx(updated, rel=0.05), pytest.approx(sampled, rel=0.05))


@fast
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_towers_bytes_per_patch_hold_for_more_pictures_and_deeper_towers(dtype):
    vlm = random_vlm(vision=640, layers=3, dtype=dtype)
    prompts = prompts_of(Shape(B=3, P=40, K=1, T=1, image_tokens=36, microbatch=1, checkpointing=False, rows=0))
    found = allocator_peak(lambda: encode_images(vlm, prompts))
    assert 3 * 4 * 36 * tower_bytes_per_patch(vlm.base, dtype) == pytest.approx(found, rel=0.1)


# --- the command ------------------------------------------------------------------------------------------------------
@pytest.fixture
def dry(base, monkeypatch, tmp_path, capsys):
    """`train.py --dry-run` on a small folder, in a directory without data; its exit code, output and error."""
    def call(*argv, model=base):
        from command import run

        monkeypatch.chdir(tmp_path)
        try:
            code = run(lambda: train.main(["--task", "depth", "--dry-run", "--model", model, *map(str, argv)]))
        except SystemExit as stop:
            code = stop.code
        return code, *capsys.readouterr()
    return call


SMALL = ("--max-new-tokens", 8, "--max-pixels", 112 * 112, "--eval-rows", 8)


def test_a_dry_run_says_preset_batch_lengths_and_memory_and_leaves_nothing(dry, tmp_path):
    code, out, err = dry(*SMALL)
    assert code == 0, err
    assert out.startswith("preset paper: what --dry-run is for\ndry run: nothing is trained or written; configuration from its config.json")
    assert "data none in data/omni3d, so questions about synthetic scenes on pictures of 730x530 (16 training examples of depth)" in out
    assert "vision tower: 0" in out and "= 64 answers per step, 500 steps at rate 1e-06" in out
    assert [line.split()[0] for line in out.splitlines() if line.endswith("reserve") or re.search(r"\d\.\d\d", line)][:3] == ["weights", "adapter,", "optimiser"]
    assert not list(tmp_path.iterdir())


@fast
def test_printed_image_tokens_are_exact_and_no_question_of_the_first_examples_is_longer_than_said(dry, photos, vlm):
    code, out, err = dry(*SMALL, "--data", photos, "--preset", "paper", "--memory-gib", 8)
    assert code == 0 and out.endswith("it fits into 8.0 GiB\n"), err
    found = re.findall(r"  (\S+): (\d+)x(\d+) = (\d+) image tokens, \+ (\d+) of text = (\d+)", out)
    examples = {e.id: e for e in load_examples(photos, "depth", "train")}
    longest = int(re.search(r"can make: (\d+)", out)[1])
    assert len(found) == 4
    for name, width, height, pictured, text, total in found:
        prompt = make_prompt(vlm, SYSTEM_PROMPT, dry_run.plain_question(examples[name]), examples[name].record.load())
        assert int(pictured) == image_tokens(int(width), int(height), 112 * 112) == int(prompt.grid_thw.prod()) // 4
        assert int(total) == len(prompt.input_ids) == int(pictured) + int(text) <= longest


def test_what_does_not_fit_is_refused_in_one_line(dry):
    code, out, err = dry("--max-new-tokens", 4, "--max-pixels", 112 * 112, "--eval-size", 0, "--memory-gib", 0.5)
    assert code == 2 and err.count("\n") == 1
    assert re.search(r"^error: .* needs 1.\d GiB but there are 0.5; even with --\S+ .*: take a smaller model or a larger GPU", err)


@fast
def test_the_mend_turns_a_knob_of_the_largest_part_until_it_fits(monkeypatch):
    def simple(vlm, s, tower):                    # GiB: 10 of weights, and a phase each
        sizes = 10, 0, 0, s.B * s.K / 16, (2 if s.checkpointing else 8) * (3 if s.microbatch > 1 else 1), s.rows / 16, 0, 0
        return Memory(*(int(size * GIB) for size in sizes))

    monkeypatch.setattr(dry_run, "predict", simple)
    s = Shape(B=8, P=600, K=8, T=512, image_tokens=512, microbatch=16384, checkpointing=False, rows=64)
    said = lambda limit, **change: dry_run.mend(None, replace(s, **change), 0, limit * GIB)
    assert said(40) == "it would fit with  (predicted 38.4 GiB)"
    assert said(20) == "it would fit with --activation-checkpointing (predicted 18.6 GiB)"
    assert said(17) == "it would fit with --activation-checkpointing --tokens-per-microbatch 1 (predicted 16.4 GiB)"
    assert said(16).startswith("it would fit with --activation-checkpointing --tokens-per-microbatch 1 --")
    assert "--pairs-per-device 1" in said(14.3) and "--eval-rows 16" in said(14.3)
    assert said(12).endswith("take a smaller model or a larger GPU")


@fast
def test_flags_of_a_dry_run_need_a_dry_run(base, capsys):
    for flag in (["--random-weights"], ["--memory-gib", "24"]):
        with pytest.raises(SystemExit):
            train.parse_arguments(["--task", "depth", *flag])
        assert "need --dry-run" in capsys.readouterr().err


def test_random_weights_run_one_real_step_whose_memory_is_the_predicted_one(dry, monkeypatch):
    monkeypatch.setattr(dry_run, "GIB", 2**20)                # in MiB: the small model would be 0.01 GiB
    code, out, err = dry(*SMALL, "--random-weights", "--pairs-per-device", 2, "--group-size", 4, "--max-new-tokens", 16)
    assert code == 0 and "AdamW" in out, err
    print(out)
    found = re.findall(r"([\d.]+) GiB \(predicted ([\d.]+)\)", out)
    assert len(found) == 2                                    # the longest prompt that could be is a little longer than these
    for measured, predicted in found:
        assert float(measured) > 1 and 0.8 * float(predicted) < float(measured) < 1.02 * float(predicted)
