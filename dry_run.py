"""Before anyone rents a GPU: what would be trained, how long the prompts are, and how much memory a step would take.

Nothing is downloaded: the architectures of Qwen2.5-VL-3B and 7B stand here, and memory.py needs no weights. Image tokens are
exact. The text's length is an estimate where the checkpoint's tokenizer is not at hand: the embedded model's gave from 6 tokens
fewer to 28 more per question than Qwen's vocabulary does, of about 50 (200 questions with names of SUN RGB-D), beside some 500 of
a picture.

    python train.py --task depth --dry-run                                                # 3B, no GPU, data or download needed
    python train.py --task depth --dry-run --model Qwen/Qwen2.5-VL-7B-Instruct --memory-gib 24        # refused, with the mend
    python train.py --task depth --dry-run --random-weights      # on the GPU itself: one real step of this size, measured

`python dry_run.py` prints the table of both sizes.
"""
from __future__ import annotations

import sys
import time
import warnings
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Callable

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoTokenizer, Qwen2_5_VLConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

import scenes
from data import Example
from dataset import draw_uniforms, load_examples
from grpo import backward, rollout
from images import DataError
from memory import GIB, RESERVE, LiveBytes, Memory, Shape, predict, tower_bytes_per_patch
from model import (MERGED_PATCH, MIN_PIXELS, ROOT, VLM, add_lora, config_of, find_model, image_tokens, make_prompt,
                   trainable_parameters)
from preflight import longest_prompt, prompt_frame, say_hello
from questions import Question, prompt_text

PICTURE = 730, 530               # pixels, SUN RGB-D's commonest size, where there is no data to look at
HUB = "Qwen/Qwen2.5-VL-{}-Instruct"
# From the published config.json of both checkpoints; what is equal stands in `real_config`.
REAL = {"3B": dict(hidden_size=2048, num_hidden_layers=36, num_attention_heads=16, num_key_value_heads=2,
                   intermediate_size=11008, vocab_size=151936, tie_word_embeddings=True),
        "7B": dict(hidden_size=3584, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4,
                   intermediate_size=18944, vocab_size=152064, tie_word_embeddings=False)}


# ------------------------------------------------------------------------------------------------------ architectures
def real_config(size: str) -> Qwen2_5_VLConfig:
    """The configuration of Qwen2.5-VL-3B-Instruct or -7B-Instruct: 3,754,622,976 and 8,292,166,656 weights."""
    shape = dict(REAL[size])
    tied = shape.pop("tie_word_embeddings")
    return Qwen2_5_VLConfig(
        text_config=dict(shape, max_position_embeddings=128000, rms_norm_eps=1e-6, tie_word_embeddings=tied, bos_token_id=151643,
                         eos_token_id=151645, pad_token_id=151643,
                         rope_parameters=dict(rope_type="default", rope_theta=1e6, mrope_section=[16, 24, 24])),
        vision_config=dict(depth=32, hidden_size=1280, num_heads=16, intermediate_size=3420, patch_size=14, spatial_merge_size=2,
                           temporal_patch_size=2, window_size=112, fullatt_block_indexes=[7, 15, 23, 31], tokens_per_second=2,
                           out_hidden_size=shape["hidden_size"]),
        image_token_id=151655, video_token_id=151656, vision_start_token_id=151652, vision_end_token_id=151653,
        tie_word_embeddings=tied, dtype="bfloat16")


def architecture(name: str) -> tuple[Qwen2_5_VLConfig, str]:
    """The configuration that --model names, and where it comes from. Needs no weights; the two sizes above no file either."""
    for size in REAL:
        if name == HUB.format(size):
            return real_config(size), "configuration from dry_run.py"
    return config_of(find_model(name), name), "configuration from its config.json"


def random_vlm(config, name: str, rank: int, seed: int, dtype: torch.dtype, max_pixels: int, device: torch.device) -> VLM:
    """The architecture with random weights and LoRA; on the `meta` device with none. Token ids are the tokenizer's at hand."""
    tokenizer, own = find_tokenizer(name)
    processor = Qwen2VLImageProcessorPil(size={"shortest_edge": MIN_PIXELS, "longest_edge": max_pixels})
    if not own:                  # its picture tokens have other numbers: the vocabulary's size stays
        config.image_token_id, config.video_token_id = tokenizer.convert_tokens_to_ids(["<|image_pad|>", "<|video_pad|>"])
    torch.manual_seed(seed)
    with device, warnings.catch_warnings(action="ignore"):           # of peft's, that this base has no name on the hub
        model = AutoModelForImageTextToText.from_config(config, dtype=dtype, attn_implementation="sdpa")
        return add_lora(VLM(model.requires_grad_(False).eval(), tokenizer, processor, name), rank, seed)


def find_tokenizer(name: str) -> tuple[object, bool]:
    """The checkpoint's own tokenizer where it is on this machine, else the embedded model's; and whether it is its own."""
    try:
        return AutoTokenizer.from_pretrained(find_model(name), local_files_only=True), True
    except (OSError, ValueError):
        return AutoTokenizer.from_pretrained(ROOT / "tiny"), False


# ----------------------------------------------------------------------------------------------------------- the report
def some_examples(args: Namespace) -> tuple[list[Example], str]:
    """The training examples; where there is no data, scenes with questions of the same kind, as large as SUN RGB-D's pictures."""
    if args.data in scenes.DOMAINS or Path(args.data).exists():
        return load_examples(args.data, args.task, "train", args.select), args.data
    stand_in = load_examples("synthetic", args.task, "train", args.select, limit=16)
    width, height = PICTURE
    return ([replace(e, record=replace(e.record, width=width, height=height)) for e in stand_in],
            f"none in {args.data}, so questions about synthetic scenes on pictures of {width}x{height}")


def plain_question(e: Example) -> str:
    """The first wording of an example's question, as x would have it."""
    return prompt_text(Question(e.task, e.object_ids, 0, False, 0), {o.id: o.name for o in e.objects})


def print_lengths(vlm: VLM, examples: list[Example], args: Namespace, own_tokenizer: bool) -> int:
    """Token counts of the first examples; returns the longest prompt that any example and any T can make."""
    frame = prompt_frame(vlm, args.system_prompt_text)
    print("prompts: image tokens are exact; text tokens are " + ("the checkpoint's own" if own_tokenizer else
          "the embedded model's: an estimate, the checkpoint's tokenizer is not on this machine"))
    for e in examples[:4]:
        width, height = e.record.width, e.record.height
        pictured = image_tokens(width, height, args.max_pixels)
        text = frame + len(vlm.tokenizer(plain_question(e), add_special_tokens=False)["input_ids"])
        print(f"  {e.id}: {width}x{height} = {pictured} image tokens, + {text} of text = {pictured + text}")
    longest = max(longest_prompt(vlm, e, args, frame) for e in examples)
    print(f"  longest that any of {len(examples)} examples and any transform can make: {longest} (limit: --max-prompt-tokens "
          f"{args.max_prompt_tokens})")
    if longest > args.max_prompt_tokens:
        print("  longer ones would be left out by id")
    return min(longest, args.max_prompt_tokens)


def print_memory(m: Memory, s: Shape, title: str) -> None:
    """One line per part, in GiB."""
    row = lambda name, size, note="": print(f"  {name:<26}{size / GIB:7.2f}   {note}".rstrip())
    print(title)
    row("weights", m.weights)
    row("adapter, fp32", m.adapter)
    row("optimiser", m.optimiser, "two moments of the adapter")
    row("rollout", m.rollout, f"{s.B * s.K} completions at once; keys and values {m.keys_values / GIB:.2f} of it")
    row("or update", m.update, f"{s.prompts_in_microbatch} prompts with their completions at a time; a chunk of logits takes "
        f"{m.logits / GIB:.2f}")
    if m.evaluation:
        row("or evaluation", m.evaluation, f"{s.rows} completions at once")
    row("reserve", m.total - m.weights - m.adapter - m.optimiser - getattr(m, m.phase),
        f"assumed: {RESERVE[0]:g} GiB and {RESERVE[1]:.0%}")
    row("total, at the worst moment", m.total, f"in the {m.phase}")


KNOBS = {"update": [("--activation-checkpointing", dict(checkpointing=True)), ("--tokens-per-microbatch 1", dict(microbatch=1))],
         "evaluation": [("--eval-rows 16", dict(rows=16))],
         "rollout": [("--pairs-per-device 1", dict(B=2)), ("--max-new-tokens 256", dict(T=256)), ("--group-size 4", dict(K=4))]}


def mend(vlm: VLM, s: Shape, tower: float, limit: float) -> str:
    """Which knobs to turn so that it fits: always one of the phase that needs most, those that leave the update alone first."""
    turned, m, knobs = [], predict(vlm, s, tower), {phase: list(options) for phase, options in KNOBS.items()}
    while m.total > limit and (left := knobs[m.phase] or knobs["rollout"]):
        flag, change = left.pop(0)
        lower = predict(vlm, replace(s, **change), tower)
        if getattr(lower, m.phase) < getattr(m, m.phase):
            turned, s, m = [*turned, flag], replace(s, **change), lower
    if m.total <= limit:
        return f"it would fit with {' '.join(turned)} (predicted {m.total / GIB:.1f} GiB)"
    return f"even with {' '.join(turned)} it needs {m.total / GIB:.1f} GiB: take a smaller model or a larger GPU"


def dry_run(args: Namespace, world_size: int, device: torch.device) -> int:
    """The whole report, as an exit code. Raises DataError where it will not fit, naming the knobs to turn."""
    config, origin = architecture(args.model)
    dtype = torch.bfloat16 if getattr(config, "dtype", None) in ("bfloat16", torch.bfloat16) else torch.float32
    vlm = random_vlm(config, args.model, args.lora_rank, args.seed, dtype, args.max_pixels, torch.device("meta"))
    examples, data = some_examples(args)
    print(f"dry run: nothing is trained or written; {origin}")
    say_hello(vlm, Namespace(**{**vars(args), "data": data}), world_size, len(examples))
    P = print_lengths(vlm, examples, args, find_tokenizer(args.model)[1])
    pictured = max(min(image_tokens(e.record.width, e.record.height, sys.maxsize), args.max_pixels // MERGED_PATCH**2)
                   for e in examples)
    s = Shape(2 * args.pairs_per_device, P, args.group_size, args.max_new_tokens, pictured, args.tokens_per_microbatch,
              args.activation_checkpointing, args.eval_rows if args.eval_size else 0)
    tower = tower_bytes_per_patch(vlm.base, dtype)
    m = predict(vlm, s, tower)
    print_memory(m, s, f"predicted memory of one rank in GiB ({str(dtype)[6:]} weights, {s.B} prompts of {P} tokens, K = {s.K}, "
                       f"{s.T} new tokens, activation checkpointing {'on' if s.checkpointing else 'off'})")
    limit = args.memory_gib or (torch.cuda.get_device_properties(device).total_memory / GIB if device.type == "cuda" else None)
    if limit and m.total > limit * GIB:
        raise DataError(f"{args.model} needs {m.total / GIB:.1f} GiB but there are {limit:.1f}; {mend(vlm, s, tower, limit * GIB)}")
    print(f"it fits into {limit:.1f} GiB" if limit else "give --memory-gib to compare this with a GPU")
    if args.random_weights:
        real = random_vlm(architecture(args.model)[0], args.model, args.lora_rank, args.seed, dtype, args.max_pixels, device)
        measure_step(real, examples, args, s, m)
    return 0


def measure_step(vlm: VLM, examples: list[Example], args: Namespace, s: Shape, m: Memory) -> None:
    """One real step at these sizes with random weights: seconds and the most memory, beside what was predicted."""
    longest = sorted(examples, key=lambda e: -longest_prompt(vlm, e, args))[:s.B]
    longest = (longest * s.B)[:s.B]
    prompts = [make_prompt(vlm, args.system_prompt_text, plain_question(e), Image.new("RGB", (e.record.width, e.record.height)))
               for e in longest]
    uniforms = torch.cat([draw_uniforms(args.seed, 0, i, s.K, s.T) for i in range(args.pairs_per_device)])    # (B, K, T)
    parameters = list(trainable_parameters(vlm).values())
    optimiser = torch.optim.AdamW(parameters, lr=args.lr)
    advantages = torch.ones(s.B, s.K).index_fill(1, torch.arange(0, s.K, 2), -1.0)                # (B, K)

    def update() -> None:
        backward(vlm, prompts, completions, advantages, args.temperature, args.pairs_per_device, s.microbatch, s.checkpointing)

    completions, seconds, peak = measured(vlm, lambda: rollout(vlm, prompts, uniforms, args.temperature))
    print(f"one real step, random weights: prompts of up to {max(len(p.input_ids) for p in prompts)} tokens, completions of "
          f"{completions.lengths.float().mean():.0f}")
    print(f"  rollout  {seconds:8.1f} s  {peak / GIB:7.2f} GiB (predicted {m.rollout / GIB:.2f})")
    _, seconds, peak = measured(vlm, update)
    print(f"  update   {seconds:8.1f} s  {peak / GIB:7.2f} GiB (predicted {m.update / GIB:.2f})")
    _, seconds, _ = measured(vlm, optimiser.step)
    print(f"  AdamW    {seconds:8.1f} s", flush=True)


def measured(vlm: VLM, call: Callable) -> tuple[object, float, int]:
    """Result, seconds, and the most bytes in use beyond what was there before: the allocator's count on a GPU."""
    cuda, began = vlm.device.type == "cuda", time.perf_counter()
    if not cuda:
        with LiveBytes(vlm.model) as live:
            return call(), time.perf_counter() - began, live.peak
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    torch.cuda.synchronize()
    return result, time.perf_counter() - began, torch.cuda.max_memory_allocated() - before


if __name__ == "__main__":
    for size in REAL:
        vlm = random_vlm(real_config(size), HUB.format(size), 32, 0, torch.bfloat16, 512 * MERGED_PATCH**2, torch.device("meta"))
        shape = Shape(B=8, P=720, K=8, T=512, image_tokens=512, microbatch=16384, checkpointing=True, rows=64)
        print_memory(predict(vlm, shape, tower_bytes_per_patch(vlm.base, torch.bfloat16)), shape,
                     f"Qwen2.5-VL-{size}: 4 pairs of prompts with 720 tokens, K = 8, 512 new tokens, in GiB")
