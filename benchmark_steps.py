"""The contestants of benchmark.py: one training step in two forms, and the most memory that its update holds.

    ours        rollout and backward (sampling.py, grpo.py), as train.py calls them: P + K C tokens a prompt
    repeated    every prompt and its picture repeated K times, all rows in one batch through the library's own generate
                and forward: K (P + C) tokens a prompt

Both start from text and picture and end with new LoRA weights. What differs from training: every completion has exactly
C tokens (end-of-turn tokens are forbidden), and answers are coins, because the model has random weights. The gradients
of the two are the same (tests/test_benchmark.py).

    stepper = Stepper("ours", Shape(P=66, C=24, pixels=168))
    stepper.step(seed=0)               # {'step': 0.58, 'rollout': 0.34, 'reward': 0.002, 'update': 0.24}
    stepper.update_memory()            # bytes

Letters: B prompts, K completions per prompt, P prompt tokens, C completion tokens.
"""
from __future__ import annotations

import random
import time
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Iterator

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from grpo import Rollout, all_reduce_gradients, backward, logprobs_of, policy_loss, rollout
from model import (DEFAULT_PIXELS, MIN_PIXELS, ROOT, VLM, Prompt, Qwen2VLImageProcessorPil, add_lora, make_prompt,
                   trainable_parameters)
from pairing import group_advantages, pair_rewards
from verifiers import parse

SYSTEM = "Answer."
WORDS = "closer further red the object camera".split()                       # a token each, with the space before them
LORA_RANK = 32


@dataclass(frozen=True)
class Shape:
    """Size of a step. The picture is square; 28 x 28 pixels are one of the P prompt tokens."""
    P: int
    C: int
    K: int = 8
    B: int = 8
    pixels: int = 448              # side of the picture: 256 tokens; 168 gives 36

    def tokens(self, form: str) -> int:
        """Tokens that the decoder computes in an update."""
        return self.B * (self.P + self.K * self.C if form == "ours" else self.K * (self.P + self.C))

    @property
    def token_ratio(self) -> float:
        """K (P + C) / (P + K C): what sharing the prompt saves if all tokens cost the same and pictures nothing."""
        return self.tokens("repeated") / self.tokens("ours")

    def __str__(self) -> str:
        return f"P = {self.P}, C = {self.C}, K = {self.K}, {self.B} prompts"


LONG, SHORT = Shape(293, 64), Shape(66, 24, pixels=168)


# ------------------------------------------------------------------------------------------------ model and questions
class FixedLength(VLM):
    """A VLM whose end-of-turn tokens are forbidden, so that every completion has exactly C tokens."""

    @property
    def forbidden(self) -> Tensor:
        return super().forbidden.index_fill(0, torch.tensor(self.end_ids, device=self.device), True)          # (V,)


def small_config() -> Qwen2_5_VLConfig:
    """The embedded architecture, wider and deeper: decoder 128 x 4 layers, vision tower 96 x 4 layers."""
    config = AutoConfig.from_pretrained(ROOT / "tiny").to_dict()
    text = config.pop("text_config") | dict(hidden_size=128, intermediate_size=384, num_hidden_layers=4, layer_types=None)
    text["rope_parameters"] = text["rope_parameters"] | dict(mrope_section=[4, 6, 6])
    vision = config.pop("vision_config") | dict(hidden_size=96, intermediate_size=288, depth=4, out_hidden_size=128,
                                                fullatt_block_indexes=[3])       # windows elsewhere, as in Qwen's
    return Qwen2_5_VLConfig(text_config=text, vision_config=vision, **config)


def random_vlm(config: Qwen2_5_VLConfig, device: torch.device, dtype: torch.dtype = torch.float32) -> FixedLength:
    """Random weights of any size behind the embedded tokenizer, with a fresh LoRA adapter."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "tiny")
    for name in ("image", "video", "vision_start", "vision_end"):
        token = f"<|{name}_pad|>" if name in ("image", "video") else f"<|{name}|>"
        setattr(config, f"{name}_token_id", tokenizer.convert_tokens_to_ids(token))
    torch.manual_seed(0)
    with device:
        model = Qwen2_5_VLForConditionalGeneration._from_config(config, dtype=dtype, attn_implementation="sdpa")
    processor = Qwen2VLImageProcessorPil(size={"shortest_edge": MIN_PIXELS, "longest_edge": DEFAULT_PIXELS})
    vlm = FixedLength(model.eval().requires_grad_(False), tokenizer, processor, "random")
    return add_lora(vlm, LORA_RANK, seed=0)


def questions(vlm: VLM, shape: Shape) -> list[tuple[str, Image.Image]]:
    """B pairs of text and noise picture whose prompts have exactly P tokens."""
    rng, asked = np.random.default_rng(0), []
    for b in range(shape.B):
        picture = Image.fromarray(rng.integers(0, 255, (shape.pixels, shape.pixels, 3), dtype=np.uint8))
        words = rng.choice(WORDS, shape.P).tolist()
        too_long = len(make_prompt(vlm, SYSTEM, " " + " ".join(words), picture).input_ids) - shape.P
        if not 0 < too_long < shape.P:
            raise ValueError(f"a picture of {shape.pixels} pixels and the chat template leave no room in {shape.P} tokens")
        asked.append((" " + " ".join(words[too_long:]), picture))
    return asked


# --------------------------------------------------------------------------------------------- two ways to do a step
def shared_rollout(vlm: VLM, prompts: list[Prompt], shape: Shape, seed: int) -> Rollout:
    uniforms = torch.rand(shape.B, shape.K, shape.C, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return rollout(vlm, prompts, uniforms, temperature=1.0)


def shared_update(vlm: VLM, prompts: list[Prompt], completions: Rollout, advantages: Tensor, pairs: int,
                  **memory) -> dict[str, float]:
    return backward(vlm, prompts, completions, advantages, 1.0, pairs, **memory)


def repeated_inputs(vlm: VLM, prompts: list[Prompt], tokens: Tensor) -> dict[str, Tensor]:
    """Every prompt and its picture once for each of its completions, (B, K, T) tokens behind them (T may be 0)."""
    (B, K, T), device = tokens.shape, vlm.device
    ids = torch.stack([p.input_ids for p in prompts]).to(device)                                  # (B, P)
    ids = torch.cat([ids.repeat_interleave(K, 0), tokens.view(B * K, T)], 1)                      # (B*K, P+T)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids),
            "mm_token_type_ids": (ids == vlm.base.config.image_token_id).int(),
            "pixel_values": torch.cat([p.pixel_values.repeat(K, 1) for p in prompts]).to(device),
            "image_grid_thw": torch.stack([p.grid_thw for p in prompts]).repeat_interleave(K, 0).to(device)}


@torch.no_grad()
def repeated_rollout(vlm: VLM, prompts: list[Prompt], shape: Shape, seed: int) -> Rollout:
    nothing = torch.zeros(shape.B, shape.K, 0, dtype=torch.long, device=vlm.device)               # (B, K, 0)
    torch.manual_seed(seed)
    ids = vlm.model.generate(**repeated_inputs(vlm, prompts, nothing), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                             min_new_tokens=shape.C, max_new_tokens=shape.C,
                             suppress_tokens=vlm.forbidden.nonzero()[:, 0].tolist())              # (B*K, P+C)
    tokens = ids[:, shape.P:].reshape(shape.B, shape.K, shape.C)                                  # (B, K, C)
    lengths = torch.full(tokens.shape[:2], shape.C, device=tokens.device)                         # (B, K)
    return Rollout(tokens, lengths, torch.zeros(tokens.shape, device=tokens.device), torch.zeros_like(lengths).bool())


def repeated_update(vlm: VLM, prompts: list[Prompt], completions: Rollout, advantages: Tensor, pairs: int) -> None:
    """All rows in one batch; only the logits that are needed; old log-probabilities are the detached new ones."""
    tokens, T = completions.tokens, completions.tokens.shape[-1]
    logits = vlm.model(**repeated_inputs(vlm, prompts, tokens), logits_to_keep=T + 1).logits[:, :-1]  # (B*K, T, V)
    logp = logprobs_of(logits.unflatten(0, tokens.shape[:2]), tokens, 1.0, vlm.forbidden)         # (B, K, T)
    loss = policy_loss(logp, logp.detach(), advantages, completions.mask).sum()                   # ()
    (loss / pairs).backward()


FORMS = {"ours": (shared_rollout, shared_update), "repeated": (repeated_rollout, repeated_update)}


def judged(vlm: VLM, completions: Rollout, seed: int) -> Tensor:
    """Decode, parse, pair: (B, K). A random model says nothing that parses, so the answers paired are coins.

    The advantages returned are +1 and -1 whatever the coins said: `backward` skips groups without spread, and here
    nothing is to be skipped.
    """
    B, K, _ = completions.tokens.shape
    for text in vlm.tokenizer.batch_decode(completions.tokens.flatten(0, 1)):
        parse(text, "boolean")
    coins = random.Random(seed)
    answers = [[coins.random() < 0.5 for _ in range(K)] for _ in range(B)]
    for y, y_prime in zip(answers[::2], answers[1::2]):
        pair_advantages(y, y_prime)
    return (1 - 2 * (torch.arange(K, device=vlm.device) % 2)).float().expand(B, K)                # (B, K)


def pair_advantages(y: list[bool], y_prime: list[bool]) -> list[np.ndarray]:
    """All that stands between the parsed answers to one pair and the update: 2 x (K,)."""
    r = pair_rewards(y, y_prime, negates=False)
    return [group_advantages(r.c, r.c2), group_advantages(r.c_prime, r.c2_prime)]


def now(device: torch.device) -> float:
    """A clock. On a CPU it is the processor's, of one thread: what other programs take is not counted."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


class Stepper:
    """A model with its optimiser that does the step in one of the two forms."""
    def __init__(self, form: str, shape: Shape, vlm: VLM | None = None, world_size: int = 1, **memory):
        self.sample, self.update = FORMS[form]
        self.vlm = vlm or random_vlm(small_config(), torch.device("cpu"))
        self.shape, self.asked, self.memory = shape, questions(self.vlm, shape), memory
        self.pairs, self.world_size = shape.B // 2 * world_size, world_size
        self.parameters = list(trainable_parameters(self.vlm).values())
        self.optimiser = torch.optim.AdamW(self.parameters, lr=1e-6, weight_decay=0.0)

    def prompts(self) -> list[Prompt]:
        return [make_prompt(self.vlm, SYSTEM, text, picture) for text, picture in self.asked]

    def step(self, seed: int) -> dict[str, float]:
        """One step, from text and picture to new weights: seconds of the whole and of its parts."""
        began = now(self.vlm.device)
        prompts = self.prompts()
        self.completions = self.sample(self.vlm, prompts, self.shape, seed)
        sampled = now(self.vlm.device)
        advantages = judged(self.vlm, self.completions, seed)                                     # (B, K)
        paired = now(self.vlm.device)
        self.stats = self.update(self.vlm, prompts, self.completions, advantages, self.pairs, **self.memory)
        all_reduce_gradients(self.parameters, self.world_size)
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        ended = now(self.vlm.device)
        return {"step": ended - began, "rollout": sampled - began, "reward": paired - sampled, "update": ended - paired}

    def update_memory(self) -> int:
        """Peak bytes of the update alone, the optimiser's step left out, on completions of its own."""
        prompts = self.prompts()
        completions = self.sample(self.vlm, prompts, self.shape, seed=0)
        advantages = judged(self.vlm, completions, seed=0)                                        # (B, K)
        with peak_memory(self.vlm.device) as peak:
            self.update(self.vlm, prompts, completions, advantages, self.pairs, **self.memory)
        self.optimiser.zero_grad(set_to_none=True)
        return peak[0]


@contextmanager
def peak_memory(device: torch.device) -> Iterator[list[int]]:
    """The list that it gives holds, afterwards, the most bytes of tensors alive at a time beyond those alive before."""
    peak: list[int] = []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield peak
        peak.append(torch.cuda.max_memory_allocated(device) - before)
        return
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as recorded:
        yield peak
    changes = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes.sort(key=lambda e: e.start_ns())
    peak.append(max(accumulate((e.nbytes() for e in changes), initial=0)))


def main() -> None:
    shape = Shape(P=66, C=8, K=4, B=2, pixels=168)
    print(f"{shape}: {shape.tokens('repeated')} tokens repeated, {shape.tokens('ours')} ours, ratio {shape.token_ratio:.2f}\n")
    for form in FORMS:
        stepper = Stepper(form, shape)
        stepper.step(0)                                                           # the first step warms up
        took = ", ".join(f"{part} {s:.3f} s" for part, s in stepper.step(1).items())
        print(f"{form:<9} {took}, update holds at most {stepper.update_memory() / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
