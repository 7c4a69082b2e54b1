"""How much memory a step needs, before there is a GPU: the real code on tensors without content.

The usual way to learn that a run does not fit is to be hours into it, at the longest sample. Here the decoder, LoRA, rollout
and update of sampling.py run on *fake tensors*, which have a shape, a type and a size in bytes but no content, and `LiveBytes`
counts what is alive. So nothing is typed from memory, and a change of the code changes the prediction; tests compare it with
what the CPU's allocator really hands out. The vision tower looks at values to find its windows, which fake tensors do not
have: two real blocks on one small picture give its bytes per patch.

What stays an assumption: RESERVE (CUDA's context and workspaces, fragmentation), and that attention on the GPU keeps no P x P
scores, as the fused kernels of torch's `sdpa` do not.

    tower = tower_bytes_per_patch(vlm.base, torch.bfloat16)                   # vlm: on the meta device, no weights needed
    memory = predict(vlm, Shape(B=8, P=600, K=8, T=512, image_tokens=512, microbatch=16384, checkpointing=True, rows=64), tower)
    memory.total / GIB, memory.phase

`python memory.py` shows what activation checkpointing saves on the embedded model. Letters: B prompts, b of them in a micro-batch,
K completions per prompt, P prompt tokens, T completion tokens, V vocabulary, H width of the decoder, N tokens, R rows.
"""
from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from eval import EVALUATED, SAMPLES
from grpo import LOGITS_AT_ONCE
from model import VLM, trainable_parameters
from sampling import (Decoding, Prefix, additive, causal, draw, log_distribution, logprobs_of, recomputed, run_decoder,
                      run_prompts)

GIB = 2**30
RESERVE = 1.0, 0.10              # GiB of CUDA context and workspaces; share of the rest lost to fragmentation: assumed
FAKE = FakeTensorMode()          # one for all: tensors of two of them do not mix


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
def update_peak(base, dtype: torch.dtype, b: int, P: int, K: int, T: int, checkpointing: bool, alone: bool = True) -> int:
    """The most that a micro-batch of b prompts holds in the update, LoRA's gradients included: what
    grpo.completion_logprobs and its backward pass do, on fake tensors. Not `alone`: others have left their gradients."""
    text, V, S = base.model.language_model, base.config.text_config.vocab_size, max(T - 1, 1)
    with LiveBytes(base) as live:
        for parameter in base.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad and not alone else None
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
    patches = torch.zeros(256, 3 * 2 * 14 * 14)                             # (16 x 16 patches, 1176), as the processor gives them
    with torch.no_grad(), LiveBytes(tower) as live:
        tower(patches, torch.tensor([[1, 16, 16]]))
    return live.peak / len(patches)


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
    base, text, trained = vlm.base, vlm.base.config.text_config, trainable_parameters(vlm)
    dtype = base.lm_head.weight.dtype
    adapter = sum(p.nbytes for p in trained.values())
    weights = sum(p.nbytes for p in base.parameters()) - adapter
    picture = s.image_tokens * text.hidden_size * dtype.itemsize                                  # features of one
    head = text.hidden_size // text.num_attention_heads
    keys_values = 2 * text.num_hidden_layers * s.B * s.K * (s.P + s.T) * text.num_key_value_heads * head * dtype.itemsize

    folded = sum(m.base_layer.weight.nbytes for m in base.modules() if hasattr(m, "lora_A")) if dtype == torch.float32 else 0

    def sampling(B: int, K: int) -> int:
        decoder = B * picture + folded + rollout_peak(base, dtype, B, s.P, K, s.T)       # sampling.folded_lora keeps copies
        return max(int(B * 4 * s.image_tokens * tower), decoder)

    with FAKE:
        if base.device.type == "meta":
            without_content(base)
        update = update_peak(base, dtype, b := s.prompts_in_microbatch, s.P, s.K, s.T, s.checkpointing, s.B <= b)
        return Memory(weights, adapter, 2 * adapter, sampling(s.B, s.K), max(s.B * picture + update, 3 * adapter),
                      max(sampling(max(1, min(2 * EVALUATED, s.rows // K)), K) for K in (1, SAMPLES)) if s.rows else 0,
                      keys_values, logits_peak(base, dtype, b * s.K * s.T))


def main() -> None:
    from model import add_lora, load_vlm

    print("Bytes of one micro-batch of the update, embedded model with LoRA of rank 8, 4 prompts of 60 tokens, in MB:\n")
    vlm = add_lora(load_vlm("tiny", torch.device("cpu")), rank=8, seed=0)
    with FAKE:
        without_content(vlm.base)
        for K, T in ((2, 16), (8, 16), (8, 48)):
            sizes = [update_peak(vlm.base, torch.float32, 4, 60, K, T, checkpointing) / 1e6 for checkpointing in (False, True)]
            print(f"K = {K}, T = {T}: {sizes[0]:6.1f}, with activation checkpointing {sizes[1]:6.1f}")


if __name__ == "__main__":
    main()
