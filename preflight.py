"""Before the first step: do all prompts fit, does the picture limit work, does every adapter matrix learn, and what will run?

Each of these is a way that runs went wrong for others and was found hours later: cut prompts, a limit without effect, LoRA
that gets no gradient (the loss of GRPO is 0 anyway and does not tell), a batch of another size than meant.
"""
from __future__ import annotations

import hashlib
import sys
from argparse import Namespace

import torch

from data import Example
from dataset import Pair, draw_uniforms, to_prompt
from grpo import backward, rollout
from images import DataError
from lenguard import GUIDANCE
from model import MERGED_PATCH, VLM, ModelError, chat_text, image_tokens, trainable_parameters
from questions import TEMPLATES, Question, prompt_text
from ranks import gather


def prompt_frame(vlm: VLM, system: str) -> int:
    """Tokens of a prompt apart from its picture and its question: the same for every example."""
    return len(vlm.tokenizer(chat_text(vlm, system, ""), add_special_tokens=False)["input_ids"]) - 1


def longest_prompt(vlm: VLM, example: Example, args: Namespace, frame: int | None = None) -> int:
    """Tokens of the longest prompt that any question about this example and any T can make."""
    record, names = example.record, {o.id: o.name for o in example.objects}
    whole = image_tokens(record.width, record.height, sys.maxsize)       # a crop has no more than the whole picture, but
    picture = min(whole, args.max_pixels // MERGED_PATCH**2)             # may fill the limit better where that shrinks it
    texts = [prompt_text(Question(example.task, example.object_ids, relation, False, template), names)
             for relation in (0, 1) for template in range(len(TEMPLATES[example.task]))]
    texts += [text + "\n" + GUIDANCE[example.task] for text in texts] if args.lenguard != "off" else []
    frame = prompt_frame(vlm, args.system_prompt_text) if frame is None else frame
    return frame + picture + max(map(len, vlm.tokenizer(texts, add_special_tokens=False)["input_ids"]))


def refuse_long(vlm: VLM, examples: list[Example], args: Namespace) -> list[Example]:
    """Examples whose prompt may be over --max-prompt-tokens are named and left out: prompts are never cut."""
    kept, frame = [], prompt_frame(vlm, args.system_prompt_text)
    for e in examples:
        length = longest_prompt(vlm, e, args, frame)
        if length <= args.max_prompt_tokens:
            kept.append(e)
        else:
            print(f"left out: {e.id} may need {length} prompt tokens, over --max-prompt-tokens {args.max_prompt_tokens}")
    if not kept:
        raise DataError(f"every example needs more than --max-prompt-tokens {args.max_prompt_tokens}: raise it or lower --max-pixels")
    return kept


def same_examples(examples: list[Example], args: Namespace, world_size: int) -> None:
    """All ranks, and a resumed run, must draw from one list: each rank reads its own disk, and a picture may be gone since."""
    args.examples_digest, begun_with = hashlib.sha256("\n".join(e.id for e in examples).encode()).hexdigest()[:16], getattr(
        args, "examples_digest", None)
    if len(found := set(gather((args.examples_digest, len(examples)), world_size))) > 1:
        raise DataError(f"--data {args.data}: the ranks see different examples ({', '.join(f'{n} with digest {d}' for d, n in sorted(found))}); "
                        f"run `python data.py --check {args.data}` on every node and make the folders equal")
    if begun_with not in (None, args.examples_digest):
        raise DataError(f"--resume {args.resume}: --data {args.data} no longer gives the examples that the run was begun with (now "
                        f"{len(examples)}); restore the files, or start a new run")


def self_check(vlm: VLM, pair: Pair, args: Namespace) -> None:
    """One backward pass with advantages of both signs: every LoRA B must get a gradient, or training would do nothing."""
    prompts = [to_prompt(vlm, side, args.system_prompt_text) for side in (pair.x, pair.x_prime)]
    for prompt, side in zip(prompts, (pair.x, pair.x_prime)):
        expected = image_tokens(*side.picture.size, args.max_pixels)
        if (found := int(prompt.grid_thw.prod()) // 4) != expected:
            raise ModelError(f"self-check: a picture became {found} tokens, expected {expected}: --max-pixels has no effect")
    completions = rollout(vlm, prompts, draw_uniforms(args.seed, 0, 0, 2, 8), args.temperature)     # (2, 2, 8)
    backward(vlm, prompts, completions, torch.tensor([[1.5, -0.5], [1.5, -0.5]]), args.temperature, pairs=1,
             activation_checkpointing=args.activation_checkpointing)
    dead = [n for n, p in trainable_parameters(vlm).items() if "lora_B" in n and (p.grad is None or not p.grad.any())]
    vlm.model.zero_grad(set_to_none=True)
    if dead:
        raise ModelError(f"self-check: {len(dead)} LoRA matrices get no gradient (first: {dead[0]}); nothing would be trained")


def say_hello(vlm: VLM, args: Namespace, world_size: int, n_examples: int) -> None:
    """What will run: what is trainable, the batch as one sentence, how answers are sampled."""
    layers, weights = {}, {True: 0, False: 0}                      # per projection; in the vision tower or not
    for name, parameter in trainable_parameters(vlm).items():
        module = name.split(".lora_")[0].split(".")[-1]
        layers[module] = layers.get(module, 0) + ("lora_A" in name)
        weights[".visual." in name] += parameter.numel()
    total, pairs = sum(p.numel() for p in vlm.base.parameters()), args.pairs_per_step
    print(f"model {args.model}, data {args.data} ({n_examples} training examples of {args.task}), reward {args.reward}, "
          f"pairing {args.pairing}, transforms {args.transforms}, select {args.select}\n"
          f"trainable: {sum(weights.values()):,} of {total:,} weights, LoRA rank {args.lora_rank} (alpha {2 * args.lora_rank}) on "
          + ", ".join(f"{n} x {module}" for module, n in layers.items()) + f"; vision tower: {weights[True]}\n"
          f"batch: {world_size} rank{'s' * (world_size > 1)} x {args.pairs_per_device} pairs x 2 prompts x {args.group_size} "
          f"completions = {pairs * 2 * args.group_size} answers per step, {args.steps} steps at rate {args.lr:g}\n"
          f"sampling: temperature {args.temperature:g}, no top-k, no top-p, no penalties, at most {args.max_new_tokens} tokens; "
          f"pictures at most {args.max_pixels:,} pixels ({args.max_pixels // MERGED_PATCH**2} tokens); seed {args.seed}", flush=True)
