"""Sample K completions of each prompt, computing each prompt once, and keep the log-probabilities as sampled.

Idea (OT-GRPO, section 4.1): GRPO compares K completions of the same prompt, here a picture of hundreds of tokens with a
question. Encoding picture and prompt K times would be most of the work, so:

    1. each picture goes through the vision tower once (the tower is frozen: the update reuses its features);
    2. each prompt goes through the decoder once, which leaves its keys and values in a cache;
    3. the cache is repeated K times and the completions grow on it as B*K ordinary rows, a token at a time.

`run_prompts` and `run_decoder` keep gradients if they are asked to, and grpo.py does the update the same way.

What differs from calling the library's `generate`: nothing of the checkpoint's generation_config (top-k, temperature,
repetition penalty) can leak in; tokens are drawn by inverse CDF from given uniforms, so that a prompt and its numbers
give the same completion in any batch and on any number of ranks; picture tokens are never drawn, and probabilities
renormalise over the rest; the log-probability of each draw is kept and *is* pi_old of Eq. (3).

    completions = rollout(vlm, prompts, torch.rand(len(prompts), K, T, dtype=torch.float64), temperature=1.0)
    vlm.tokenizer.decode(completions.tokens[0, 0, :completions.lengths[0, 0]])

Run `python sampling.py` for inverse-CDF sampling on four tokens. Letters: B prompts, K completions per prompt, P prompt
tokens, T completion tokens, V vocabulary, H width of the decoder, R rows in a batch.
"""
from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from model import VLM, Prompt

recomputed = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)   # nothing recomputed is random


@dataclass
class Rollout:
    """K sampled completions of each of B prompts. What lies beyond a completion's length is 0 and means nothing."""
    tokens: Tensor                                                                                # (B, K, T) long
    lengths: Tensor                                                                # (B, K) long, the end token included
    logp: Tensor                                                                         # (B, K, T) float32, as sampled
    ended: Tensor                                                              # (B, K) bool; False: cut off at T tokens
    features: list[Tensor] = field(default_factory=list)                         # B x (image tokens, H), for the update

    @property
    def mask(self) -> Tensor:
        """From the lengths alone: made from token values it would lose the end token where padding equals it."""
        return torch.arange(self.tokens.shape[-1], device=self.lengths.device) < self.lengths[..., None]  # (B, K, T)


# ---------------------------------------------------------------------------------------------------- log-probabilities
def log_distribution(logits: Tensor, temperature: float, forbidden: Tensor) -> Tensor:
    """log pi over the allowed tokens at the sampling temperature, (..., V) -> (..., V); for 0 (greedy) at 1."""
    logits = logits.float() / (temperature or 1.0)                                                # (..., V)
    return logits.masked_fill(forbidden, -torch.inf).log_softmax(-1)                              # (..., V)


def logprobs_of(logits: Tensor, tokens: Tensor, temperature: float, forbidden: Tensor) -> Tensor:
    """log pi(token), (..., V), (...) -> (...): what the update computes and the rollout kept, by the same formula."""
    return log_distribution(logits, temperature, forbidden).gather(-1, tokens[..., None])[..., 0]  # (...)


def draw(log_pi: Tensor, uniforms: Tensor, greedy: bool = False) -> Tensor:
    """Inverse-CDF sampling: the first token whose cumulated probability exceeds u; (R, V), (R,) -> (R,)."""
    if greedy:
        return log_pi.argmax(-1)                                                                  # (R,)
    cdf = log_pi.exp().double().cumsum(-1)                                                        # (R, V)
    return torch.searchsorted(cdf, (uniforms * cdf[:, -1])[:, None], right=True)[:, 0]            # (R,)


# ------------------------------------------------------------------------------------- prompts as the decoder sees them
@torch.no_grad()
def encode_images(vlm: VLM, prompts: list[Prompt]) -> list[Tensor]:
    """The frozen tower's features of each prompt's picture: B x (image tokens, H)."""
    pixels = torch.cat([p.pixel_values for p in prompts]).to(vlm.device)                          # (patches, 1176)
    grid = torch.stack([p.grid_thw for p in prompts]).to(vlm.device)                              # (B, 3)
    return list(vlm.base.model.get_image_features(pixels, grid, return_dict=True).pooler_output)


@dataclass
class Prefix:
    """Prompts padded on the left, so that all end, and their completions begin, in the same column."""
    embeds: Tensor                                                                # (B, P, H), picture features in place
    positions: Tensor                                                                     # (3, B, P): time, row, column
    keep: Tensor                                                                         # (B, P) bool, False on padding
    next_position: Tensor                         # (B,), not P: a picture advances the position by its longer side only


@torch.no_grad()
def embed_prompts(vlm: VLM, prompts: list[Prompt], features: list[Tensor]) -> Prefix:
    """Embed and pad. Positions are explicit, here and everywhere: the model would reuse those of an earlier call."""
    model, image_token = vlm.base.model, vlm.base.config.image_token_id
    kinds = [(p.input_ids == image_token).int() for p in prompts]                                 # B x (P_b,)
    rope = [model.get_rope_index(p.input_ids[None], mm_token_type_ids=kind[None], image_grid_thw=p.grid_thw[None])[0]
            for p, kind in zip(prompts, kinds)]                                                   # B x (3, 1, P_b)
    pad = partial(pad_sequence, batch_first=True, padding_side="left")
    ids = pad([p.input_ids for p in prompts], padding_value=-1).to(vlm.device)                    # (B, P)
    positions = pad([r[:, 0].T for r in rope]).permute(2, 0, 1).to(vlm.device)                    # (3, B, P)
    embeds = model.language_model.embed_tokens(ids.clamp(min=0))                                  # (B, P, H)
    embeds[ids == image_token] = torch.cat(features).to(embeds.dtype)                             # (B, P, H)
    return Prefix(embeds, positions, ids >= 0, positions.amax((0, 2)) + 1)


def additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """Eager attention would silently add a boolean mask as 0 and 1, hence floats; finite, so that no row gives NaN."""
    return torch.zeros_like(allowed, dtype=dtype).masked_fill_(~allowed, torch.finfo(dtype).min)


def causal(n: int, device: torch.device) -> Tensor:
    """(n, n) bool: each token sees itself and those before it."""
    return torch.ones(n, n, dtype=torch.bool, device=device).tril()                               # (n, n)


# ------------------------------------------------------------------------------------------- the decoder and its caches
class GradientCache:
    """All that a decoder layer asks of a cache: `update` takes new keys and values and returns all of them.

    Keys and values, (rows, KV heads, tokens, head size), are only ever concatenated, so gradients flow through.
    """
    def __init__(self, *past: Tensor):
        self.past = past

    def update(self, *new: Tensor, **_) -> tuple[Tensor, ...]:
        new = new[:2]                                        # after keys and values comes the layer's number
        self.past = tuple(torch.cat(pair, 2) for pair in zip(self.past, new)) if self.past else new
        return self.past


class BufferCache:
    """The same for sampling, with room for all tokens from the start: growing by one would copy the whole cache."""
    def __init__(self, past: tuple[Tensor, ...], copies: int, room: int):
        self.used = past[0].shape[2]
        self.buffers = [F.pad(x, (0, 0, 0, room)).repeat_interleave(copies, 0) for x in past]     # 2 x (R, ., P+T, .)

    def update(self, *new: Tensor, **_) -> tuple[Tensor, ...]:
        start, self.used = self.used, self.used + new[0].shape[2]
        for buffer, x in zip(self.buffers, new):
            buffer[:, :, start:self.used] = x
        return tuple(buffer[:, :, :self.used] for buffer in self.buffers)

    def keep_rows(self, rows: Tensor) -> None:
        self.buffers = [buffer[rows] for buffer in self.buffers]


def decoder_layer(layer, hidden: Tensor, mask: Tensor, rope, *past: Tensor) -> tuple[Tensor, ...]:
    """One layer as a pure function, (hidden, past) -> (hidden, keys, values), so that it can be recomputed.

    The library's own activation checkpointing must stay off: it drops the cache in silence, so that completions run
    without their prompt, or, if it does not recognise it, appends to it twice.
    """
    assert not getattr(layer, "gradient_checkpointing", False), "use backward(activation_checkpointing=True) instead"
    copies = len(hidden) // len(past[0]) if past else 1
    cache = GradientCache(*(x.repeat_interleave(copies, 0) for x in past))
    hidden = layer(hidden, mask, None, cache, True, rope)    # by place: the cache's argument changed its name in 5.24
    assert cache.past and cache.past[0].shape[2] == mask.shape[-1], "the decoder layer ignored its cache"
    return hidden, *cache.past


def run_decoder(text, embeds: Tensor, positions: Tensor, mask: Tensor, past=None, checkpointing: bool = False):
    """All layers: (R, n, H) -> the final hidden states (R, n, H) and every layer's keys and values."""
    call = recomputed if checkpointing else lambda function, *arguments: function(*arguments)
    hidden, rope, present = embeds, text.rotary_emb(embeds, positions), []
    for layer, layer_past in zip(text.layers, past or [()] * len(text.layers)):
        hidden, *keys_values = call(decoder_layer, layer, hidden, mask, rope, *layer_past)        # (R, n, H)
        present.append(tuple(keys_values))
    return text.norm(hidden), present


def run_prompts(text, prefix: Prefix, checkpointing: bool = False):
    """Each prompt once: the hidden state of its last token (B, H) and every layer's keys and values."""
    P, device = prefix.keep.shape[1], prefix.keep.device
    itself = torch.eye(P, dtype=torch.bool, device=device)                      # (P, P), so that padding sees something
    allowed = causal(P, device) & prefix.keep[:, None] | itself                                   # (B, P, P)
    mask = additive(allowed, prefix.embeds.dtype)[:, None]                                        # (B, 1, P, P)
    hidden, past = run_decoder(text, prefix.embeds, prefix.positions, mask, checkpointing=checkpointing)  # (B, P, H)
    return hidden[:, -1], past


# ------------------------------------------------------------------------------------------------------------- sampling
class Decoding:
    """B*K rows that begin as copies of their prompts and grow by a token each. `hidden` (R, H) predicts the next."""
    def __init__(self, text, prefix: Prefix, K: int, room: int):
        last, past = run_prompts(text, prefix)                                                    # (B, H)
        self.text, self.hidden = text, last.repeat_interleave(K, 0)                               # (R, H)
        self.caches = [BufferCache(layer_past, K, room) for layer_past in past]
        keep = F.pad(prefix.keep, (0, room), value=True).repeat_interleave(K, 0)                  # (R, P+T)
        self.mask = additive(keep, last.dtype)[:, None, None]                                     # (R, 1, 1, P+T)
        self.position = prefix.next_position.repeat_interleave(K)                                 # (R,)

    def append(self, token: Tensor) -> None:
        """The loop that sampling spends its time in, hence no more Python than this."""
        hidden = self.text.embed_tokens(token)[:, None]                                           # (R, 1, H)
        rope = self.text.rotary_emb(hidden, self.position.expand(3, -1)[..., None])               # 2 x (R, 1, .)
        for layer, cache in zip(self.text.layers, self.caches):
            hidden = layer(hidden, self.mask[..., :cache.used + 1], None, cache, True, rope)      # (R, 1, H)
        self.hidden, self.position = self.text.norm(hidden)[:, 0], self.position + 1              # (R, H), (R,)

    def keep_rows(self, rows: Tensor) -> None:
        self.mask, self.position = self.mask[rows], self.position[rows]                           # fewer R
        for cache in self.caches:
            cache.keep_rows(rows)


@contextmanager
def folded_lora(vlm: VLM):
    """W + scaling * B A in place of W while sampling; afterwards W comes back bit for bit, from a copy.

    Exact in fp32 only: a bf16 W swallows a young adapter (a change below half a unit in the last place), and another
    policy would be sampled than the one that is trained. So `rollout` folds fp32 weights and leaves others alone.
    """
    layers = [m for m in vlm.base.modules() if hasattr(m, "lora_A") and not m.disable_adapters]
    saved = [m.base_layer.weight.detach().clone() for m in layers]
    try:
        for m in layers:
            m.base_layer.weight.data += sum(m.get_delta_weight(name) for name in m.active_adapters)
            m.merged_adapters = list(m.active_adapters)      # tells the layer to leave out A and B
        yield
    finally:
        for m, weight in zip(layers, saved):
            m.base_layer.weight.data.copy_(weight)
            m.merged_adapters = []


@torch.no_grad()
def rollout(vlm: VLM, prompts: list[Prompt], uniforms: Tensor, temperature: float) -> Rollout:
    """One completion for each row of `uniforms` (B, K, T), numbers in [0, 1); none is longer than T tokens.

    It ends with either end-of-turn token. Temperature 0 takes the likeliest token and ignores the numbers.
    """
    B, K, T = uniforms.shape
    features = encode_images(vlm, prompts)
    prefix = embed_prompts(vlm, prompts, features)
    dtype, device = prefix.embeds.dtype, prefix.embeds.device
    forbidden, end_ids = vlm.forbidden.to(device), torch.tensor(vlm.end_ids, device=device)       # (V,), (2,)
    uniforms = uniforms.reshape(B * K, T).to(device, torch.float64)                               # (B*K, T)
    tokens = torch.zeros(B * K, T, dtype=torch.long, device=device)                               # (B*K, T)
    logp = torch.zeros(B * K, T, device=device)                                                   # (B*K, T)
    rows = torch.arange(B * K, device=device)                       # (R,): which of the B*K rows are still in the batch
    alive = torch.ones_like(rows, dtype=torch.bool)                                # (R,): which of those have not ended
    lengths, ended = torch.zeros_like(rows), torch.zeros_like(alive)                              # (B*K,)

    with folded_lora(vlm) if dtype == torch.float32 else nullcontext():
        decoding = Decoding(vlm.base.model.language_model, prefix, K, room=T)
        for t in range(T):
            log_pi = log_distribution(vlm.base.lm_head(decoding.hidden), temperature, forbidden)  # (R, V)
            token = draw(log_pi, uniforms[rows, t], greedy=temperature == 0)                      # (R,)
            tokens[rows, t], logp[rows, t] = token, log_pi.gather(-1, token[:, None])[:, 0]       # (R,)
            lengths[rows] += alive
            alive = alive & ~torch.isin(token, end_ids)                                           # (R,)
            ended[rows] = ~alive
            share = alive.float().mean().item()
            if share == 0 or t == T - 1:
                break
            if share < 0.8:                                  # dropping rows copies the cache: not for every single one
                decoding.keep_rows(alive)
                rows, token, alive = rows[alive], token[alive], alive[alive]                      # fewer R
            decoding.append(token)
    mask = torch.arange(T, device=device) < lengths[:, None]      # (B*K, T): ended rows babbled until they were dropped
    tokens, logp = (tokens * mask).view(B, K, T), (logp * mask).view(B, K, T)                     # (B, K, T)
    return Rollout(tokens, lengths.view(B, K), logp, ended.view(B, K), features)


def main() -> None:
    logits, forbidden = torch.tensor([2.0, 1.0, 0.0, 9.0]), torch.tensor([False, False, False, True])  # (V,)
    uniforms = torch.rand(10_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))  # (R,)
    print("Four tokens with logits 2, 1, 0 and 9; the last may not be drawn. 10,000 draws:\n")
    for temperature in (1.0, 0.7):
        log_pi = log_distribution(logits, temperature, forbidden)                                 # (V,)
        drawn = draw(log_pi.expand(10_000, -1), uniforms).bincount(minlength=4) / 10_000          # (V,)
        print(f"T = {temperature}   probability", *(f"{p:.3f}" for p in log_pi.exp().tolist()),
              "   drawn", *(f"{p:.3f}" for p in drawn.tolist()))


if __name__ == "__main__":
    main()
