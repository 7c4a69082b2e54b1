"""Before anyone rents a GPU: what would be trained, how long the prompts are, and how much memory a step would take.

The usual way to learn that a run does not fit is to be hours into it, at the longest sample. Here the real code predicts it:
the decoder, LoRA, rollout and update of sampling.py run on *fake tensors*, which have a shape, a type and a size in bytes
but no content, and `LiveBytes` counts what is alive. So nothing is typed from memory, and a change of the code changes the
prediction; tests compare it with what the CPU's allocator really hands out. The vision tower looks at values to find its
windows, which fake tensors do not have: two real blocks on one small picture give its bytes per patch.

What stays an assumption: RESERVE (CUDA's context and workspaces, fragmentation), and that attention on the GPU keeps no
K x P x P scores, as the fused kernels of `sdpa` do not.

    python train.py --task depth --dry-run                                                # 3B, no GPU, data or download needed
    python train.py --task depth --dry-run --model Qwen/Qwen2.5-VL-7B-Instruct --memory-gib 24        # refused, with the mend
    python train.py --task depth --dry-run --random-weights      # on the GPU itself: one real step of this size, measured

`python dry_run.py` prints the table of both sizes.
"""
from __future__ import annotations

import sys
import time
import warnings
import weakref
from argparse import Namespace
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Callable

import torch
from PIL import Image
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForImageTextToText, AutoTokenizer, Qwen2_5_VLConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

import scenes
from data import Example
from dataset import draw_uniforms, load_examples
from eval import EVALUATED, SAMPLES
from grpo import LOGITS_AT_ONCE, backward, rollout
from images import DataError
from model import (MERGED_PATCH, MIN_PIXELS, ROOT, VLM, add_lora, config_of, find_model, image_tokens, make_prompt,
                   trainable_parameters)
from preflight import longest_prompt, prompt_frame, say_hello
from questions import Question, prompt_text
from sampling import (Decoding, Prefix, additive, causal, draw, log_distribution, logprobs_of, recomputed, run_decoder,
                      run_prompts)

GIB = 2**30
FAKE = FakeTensorMode()          # one for all: tensors of two of them do not mix
RESERVE = 1.0, 0.10              # GiB of CUDA context and workspaces; share of the rest lost to fragmentation: assumed
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


# --------------------------------------------------------------------------------------------------- counting the bytes
class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors made inside that are alive (`now`), and the most there ever were (`peak`)."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.now = self.peak = 0
        self.outside = [t.untyped_storage() for t in (*model.parameters(), *model.buffers())]     # kept, so ids stay taken
        self.known = {id(storage) for storage in self.outside}

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and id(storage := tensor.untyped_storage()) not in self.known:
                self.known.add(id(storage))
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self.forget, id(storage), storage.nbytes())
        return result

    def forget(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def without_content(model: nn.Module) -> None:
    """Replace meta weights by fake ones that say they are on the CPU: only there attention takes its fused kernel."""
    made = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, old in tensors.items():
                if old is not None and id(old) not in made:                    # tied weights stay tied
                    new = torch.empty(old.shape, dtype=old.dtype, device="cpu")
                    made[id(old)] = nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
                tensors[name] = None if old is None else made[id(old)]


@dataclass(frozen=True)
class Shape:
    """The sizes that a step's memory depends on."""
    B: int                       # prompts per rank
    P: int                       # tokens of the longest prompt
    K: int                       # completions per prompt
    T: int                       # tokens of the longest completion
    image_tokens: int            # of one picture, at most
    microbatch: int              # --tokens-per-microbatch
    checkpointing: bool
    rows: int                    # completions that evaluation samples at a time

    @property
    def prompts_in_microbatch(self) -> int:
        return min(self.B, max(1, self.microbatch // (self.P + self.K * self.T)))


def fake_prefix(B: int, P: int, H: int, dtype: torch.dtype) -> Prefix:
    """B prompts of P tokens, as embed_prompts returns them."""
    return Prefix(torch.empty(B, P, H, dtype=dtype), torch.zeros(3, B, P, dtype=torch.long), torch.ones(B, P, dtype=torch.bool),
                  torch.zeros(B, dtype=torch.long))


@cache
def rollout_peak(base, dtype: torch.dtype, B: int, P: int, K: int, T: int) -> int:
    """The most that sampling holds: prefill, caches with room for all tokens, the last token's attention and draw."""
    text, V = base.model.language_model, base.config.text_config.vocab_size
    with torch.no_grad(), LiveBytes(base) as live:
        decoding = Decoding(text, fake_prefix(B, P, text.config.hidden_size, dtype), K, room=T)
        for layer in decoding.caches:
            layer.used = P + T - 1
        log_pi = log_distribution(base.lm_head(decoding.hidden), 1.0, torch.zeros(V, dtype=torch.bool))      # (R, V)
        decoding.append(draw(log_pi, torch.zeros(B * K, dtype=torch.float64)))
    return live.peak


@cache
def update_peak(base, dtype: torch.dtype, b: int, P: int, K: int, T: int, checkpointing: bool) -> int:
    """The most that a micro-batch of b prompts holds in the update, LoRA's gradients included.

    Layers are alike and each keeps the same for the backward pass, so 4 and 6 of them give what every further one adds.
    """
    text, layers, found = base.model.language_model, base.model.language_model.layers, []
    for n in (min(4, len(layers)), min(6, len(layers))):
        text.layers = layers[:n]
        found.append(update_peak_of(base, dtype, b, P, K, T, checkpointing))
    text.layers = layers
    return found[1] + max(0, len(layers) - 6) * (found[1] - found[0]) // 2


def update_peak_of(base, dtype: torch.dtype, b: int, P: int, K: int, T: int, checkpointing: bool) -> int:
    """The same with all the layers there are: what grpo.completion_logprobs and its backward pass do, on fake tensors."""
    text, V, S = base.model.language_model, base.config.text_config.vocab_size, max(T - 1, 1)
    for parameter in base.parameters():
        parameter.grad = None
    with LiveBytes(base) as live:
        last, past = run_prompts(text, fake_prefix(b, P, text.config.hidden_size, dtype), checkpointing)
        seen = torch.ones(b, S, P, dtype=torch.bool)                                              # (b, S, P)
        allowed = torch.cat([seen, causal(S, seen.device).expand(b, -1, -1)], -1)                 # (b, S, P+S)
        mask = additive(allowed, dtype).repeat_interleave(K, 0)[:, None]                          # (b*K, 1, S, P+S)
        positions = torch.zeros(3, b * K, S, dtype=torch.long)
        given = text.embed_tokens(torch.zeros(b * K, S, dtype=torch.long))                        # (b*K, S, H)
        hidden = run_decoder(text, given, positions, mask, past, checkpointing)[0]
        hidden = torch.cat([last.repeat_interleave(K, 0)[:, None], hidden], 1)                    # (b*K, S+1, H)
        hidden = hidden[:, :T].reshape(b * K * T, -1).clone()                                     # (N, H)
        forbidden, n = torch.zeros(V, dtype=torch.bool), max(1, LOGITS_AT_ONCE // V)
        chunks = zip(hidden.split(n), torch.zeros(len(hidden), dtype=torch.long).split(n))
        score = lambda h, tokens: logprobs_of(base.lm_head(h), tokens, 1.0, forbidden)
        torch.cat([recomputed(score, *chunk) for chunk in chunks]).sum().backward()
    return live.peak


def logits_peak(base, dtype: torch.dtype, N: int) -> int:
    """What scoring one chunk of at most N tokens holds at its worst, forward and backward."""
    V = base.config.text_config.vocab_size
    n = min(N, max(1, LOGITS_AT_ONCE // V))
    hidden = torch.zeros(n, base.config.text_config.hidden_size, dtype=dtype, requires_grad=True)            # (n, H)
    with LiveBytes(base) as live:
        logprobs_of(base.lm_head(hidden), torch.zeros(n, dtype=torch.long), 1.0, torch.zeros(V, dtype=torch.bool)).sum().backward()
    return live.peak


def tower_bytes_per_patch(base, dtype: torch.dtype) -> float:
    """What the frozen tower holds per 14 x 14 patch: two real blocks, with windows and without, on one small picture."""
    settings = base.config.vision_config.to_dict() | {"depth": 2} | ({"fullatt_block_indexes": [1]} if hasattr(
        base.config.vision_config, "fullatt_block_indexes") else {})
    small = type(base.config.vision_config).from_dict(settings)
    tower = type(base.model.visual)._from_config(small, dtype=dtype, attn_implementation="sdpa").eval()
    patches = torch.zeros(256, 3 * 2 * 14 * 14, dtype=dtype)                                      # (16 x 16 patches, 1176)
    with torch.no_grad(), LiveBytes(tower) as live:
        tower(patches, torch.tensor([[1, 16, 16]]))
    return live.peak / len(patches) + patches[0].nbytes


@dataclass(frozen=True)
class Memory:
    """Predicted bytes of one rank. The last three are never needed at the same time."""
    weights: int
    adapter: int                 # fp32, whatever the weights are
    optimiser: int               # AdamW: two moments
    rollout: int
    update: int
    evaluation: int
    keys_values: int             # of `rollout`
    logits: int                  # one chunk with its gradient, within `update`

    @property
    def phase(self) -> str:
        return max(("rollout", "update", "evaluation"), key=lambda name: getattr(self, name))

    @property
    def total(self) -> int:
        """Everything at the worst moment, with the reserve."""
        used = self.weights + self.adapter + self.optimiser + getattr(self, self.phase)
        return int(RESERVE[0] * GIB + (1 + RESERVE[1]) * used)


def predict(vlm: VLM, s: Shape, tower: float) -> Memory:
    """The memory of a step and of an evaluation. `vlm` is on the meta device or made of fake tensors and stays that way."""
    base, text = vlm.base, vlm.base.config.text_config
    dtype, trained = base.lm_head.weight.dtype, trainable_parameters(vlm)
    adapter = sum(p.nbytes for p in trained.values())
    weights = sum(p.nbytes for p in base.parameters()) - adapter
    picture = s.image_tokens * text.hidden_size * dtype.itemsize                                  # features of one
    head = text.hidden_size // text.num_attention_heads
    keys_values = 2 * text.num_hidden_layers * s.B * s.K * (s.P + s.T) * text.num_key_value_heads * head * dtype.itemsize

    def sampling(B: int, K: int) -> int:
        return max(int(B * 4 * s.image_tokens * tower), B * picture + rollout_peak(base, dtype, B, s.P, K, s.T))

    with FAKE:
        if base.device.type == "meta":
            without_content(base)
        update = update_peak(base, dtype, b := s.prompts_in_microbatch, s.P, s.K, s.T, s.checkpointing)
        return Memory(weights, adapter, 2 * adapter, sampling(s.B, s.K), max(s.B * picture + update, 3 * adapter),
                      max(sampling(max(1, min(2 * EVALUATED, s.rows // K)), K) for K in (1, SAMPLES)) if s.rows else 0,
                      keys_values, logits_peak(base, dtype, b * s.K * s.T))


# ----------------------------------------------------------------------------------------------------------- the report
def some_examples(args: Namespace) -> tuple[list[Example], str]:
    """The training examples; where there is no data, scenes with questions of the same kind, as large as SUN RGB-D's pictures."""
    if args.data in scenes.DOMAINS or Path(args.data).exists():
        return load_examples(args.data, args.task, "train", args.select), f"data {args.data}"
    stand_in = load_examples("synthetic", args.task, "train", args.select, limit=16)
    width, height = PICTURE
    return ([replace(e, record=replace(e.record, width=width, height=height)) for e in stand_in],
            f"no data in {args.data}: questions about synthetic scenes, pictures of {width}x{height}")


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


def mend(vlm: VLM, s: Shape, tower: float, limit: float) -> str:
    """Which knobs to turn so that it fits: those that leave the update as it is first."""
    turned, least = [], predict(vlm, s, tower).total
    for flag, change in (("--activation-checkpointing", dict(checkpointing=True)), ("--tokens-per-microbatch 1", dict(microbatch=1)),
                         ("--eval-rows 16", dict(rows=16)), ("--pairs-per-device 1", dict(B=2)), ("--max-new-tokens 256", dict(T=256)),
                         ("--group-size 4", dict(K=4))):
        found = predict(vlm, trial := replace(s, **change), tower).total
        if found < least:
            turned, s, least = [*turned, flag], trial, found
        if least <= limit:
            return f"it would fit with {' '.join(turned)} (predicted {least / GIB:.1f} GiB)"
    return f"even with {' '.join(turned)} it needs {least / GIB:.1f} GiB: take a smaller model or a larger GPU"


def dry_run(args: Namespace, world_size: int, device: torch.device) -> int:
    """The whole report, as an exit code. Raises DataError where it will not fit, naming the knobs to turn."""
    config, origin = architecture(args.model)
    dtype = torch.bfloat16 if getattr(config, "dtype", None) in ("bfloat16", torch.bfloat16) else torch.float32
    vlm = random_vlm(config, args.model, args.lora_rank, args.seed, dtype, args.max_pixels, torch.device("meta"))
    examples, data = some_examples(args)
    print(f"dry run: nothing is trained or written. {origin}; {data}")
    say_hello(vlm, args, world_size, len(examples))
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
