"""GRPO by hand: the clipped policy loss of Eq. (3)-(6), (10), and its gradient with each prompt computed once.

Idea (OT-GRPO, section 4.1). The importance ratio of every sampled token, clipped, times its completion's advantage;
averaged over a completion's own tokens and over the K completions; the two prompts of a pair are summed (Eq. (10)) and
pairs averaged. No reference model (beta = 0), no value network.

What is ours: the prompt, hundreds of image tokens, is computed once for its K completions, forward *and backward*. Its
keys and values are kept with their gradient, repeated K times, and the completions run as K ordinary rows on top, as
in the rollout (sampling.py). The gradient equals that of the plain form, every prompt repeated K times
(`backward_repeated`), to rounding; at K = 8 with short prompts it is three times faster, and more with long ones.

What differs from the paper, marked below: the place of A in Eq. (5), and the plus sign and advantages of Eq. (10).

    completions = rollout(vlm, prompts, uniforms, temperature=1.0)               # x_1, x'_1, x_2, x'_2, ...
    stats = backward(vlm, prompts, completions, advantages, temperature=1.0, pairs=len(prompts) // 2)
    all_reduce_gradients(parameters, world_size=1)

Run `python grpo.py` for loss and slope at several ratios. Letters: B prompts (two per pair), K completions per prompt,
P prompt tokens, T completion tokens, V vocabulary, H width of the decoder, N tokens of all completions.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed
from torch import Tensor
from torch.nn import functional as F

from sampling import (Rollout, additive, causal, embed_prompts, encode_images, logprobs_of, recomputed, rollout,
                      run_decoder, run_prompts)

if TYPE_CHECKING:
    from model import VLM, Prompt

__all__ = ["Rollout", "all_reduce_gradients", "backward", "backward_repeated", "completion_logprobs", "logprobs_of",
           "policy_loss", "rollout"]
CLIP = 0.2                       # epsilon of Eq. (4)
MAX_LOG_RATIO = 20.0             # beyond it exp overflows, and 0 * inf in the backward pass is NaN
LOGITS_AT_ONCE = 2**26           # elements of (tokens, V) that exist at a time: 256 MB in fp32


# ------------------------------------------------------------------------------------------------------------- the loss
def importance_ratio(logp: Tensor, old_logp: Tensor, mask: Tensor) -> Tensor:
    """rho of Eq. (3), 1 where masked. `where` comes before `exp`: a masked NaN or overflow would survive times 0."""
    log_ratio = torch.where(mask, logp - old_logp, 0.0)                                           # (B, K, T)
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()                                   # (B, K, T)


def policy_loss(logp: Tensor, old_logp: Tensor, advantages: Tensor, mask: Tensor, clip: float = CLIP) -> Tensor:
    """-J of Eq. (6), prompt by prompt: (B, K, T), (B, K, T), (B, K), (B, K, T) -> (B,)."""
    rho = importance_ratio(logp, old_logp, mask)                                                  # (B, K, T)
    A = advantages[..., None]                                                                     # (B, K, 1)
    # differs from Eq. (5): A * min(rho, clip(rho)), because for A < 0 that is no lower bound. It lets a bad token go as
    # soon as it has become likelier, and goes on pushing one that is already rare. The two agree at rho = 1.
    surrogate = torch.minimum(A * rho, A * rho.clamp(1 - clip, 1 + clip))                    # Eq. (4), (5)    (B, K, T)
    per_completion = (surrogate * mask).sum(-1) / mask.sum(-1).clamp(min=1)                       # (B, K)
    return -per_completion.mean(-1)                                                               # Eq. (6)         (B,)


# ---------------------------------------------------------------------- log-probabilities of completions, with gradient
def completion_hidden(vlm: VLM, prompts: list[Prompt], features: list[Tensor], tokens: Tensor,
                      checkpointing: bool = False) -> Tensor:
    """The hidden state that predicts each completion token: (B, K, T) -> (B, K, T, H). Each prompt is run once."""
    B, K, T = tokens.shape
    text, prefix = vlm.base.model.language_model, embed_prompts(vlm, prompts, features)
    last, past = run_prompts(text, prefix, checkpointing)                                         # (B, H)
    # The prompt's last token predicts the first of the completion, whose own last token predicts nothing.
    given = tokens.view(B * K, T)[:, :max(T - 1, 1)]                                              # (B*K, S)
    S = given.shape[1]
    seen = prefix.keep[:, None].expand(-1, S, -1)                                                 # (B, S, P)
    allowed = torch.cat([seen, causal(S, seen.device).expand(B, -1, -1)], -1)                     # (B, S, P+S)
    mask = additive(allowed, last.dtype).repeat_interleave(K, 0)[:, None]                         # (B*K, 1, S, P+S)
    positions = prefix.next_position[:, None] + torch.arange(S, device=seen.device)               # (B, S)
    positions = positions.repeat_interleave(K, 0).expand(3, -1, -1)                               # (3, B*K, S)
    hidden, _ = run_decoder(text, text.embed_tokens(given), positions, mask, past, checkpointing)  # (B*K, S, H)
    hidden = torch.cat([last.repeat_interleave(K, 0)[:, None], hidden], 1)                        # (B*K, S+1, H)
    return hidden[:, :T].view(B, K, T, -1)                                                        # (B, K, T, H)


def completion_logprobs(vlm: VLM, prompts: list[Prompt], features: list[Tensor], tokens: Tensor, mask: Tensor,
                        temperature: float, checkpointing: bool = False) -> Tensor:
    """log pi of every completion token, 0 where masked: (B, K, T) -> (B, K, T).

    Logits are the largest tensor of all, (N, V): they are made a chunk at a time and made again in the backward pass.
    """
    hidden = completion_hidden(vlm, prompts, features, tokens, checkpointing)[mask]               # (N, H)
    forbidden = vlm.forbidden.to(hidden.device)                                                   # (V,)
    n = max(1, LOGITS_AT_ONCE // len(forbidden))

    def score(hidden: Tensor, tokens: Tensor) -> Tensor:
        return logprobs_of(vlm.base.lm_head(hidden), tokens, temperature, forbidden)              # (n,)

    chunks = zip(hidden.split(n), tokens[mask].split(n))
    flat = torch.cat([recomputed(score, *chunk) for chunk in chunks])                             # (N,)
    return torch.zeros_like(mask, dtype=flat.dtype).masked_scatter(mask, flat)                    # (B, K, T)


# ----------------------------------------------------------------------------------------------------------- the update
def microbatches(prompts: list[Prompt], lengths: Tensor, chosen: list[int], budget: int) -> list[list[int]]:
    """Split the chosen prompts into parts of at most `budget` tokens, padding included, or of a single prompt."""
    P, T, K = [len(p.input_ids) for p in prompts], lengths.amax(1).tolist(), lengths.shape[1]
    parts: list[list[int]] = []
    for b in sorted(chosen, key=lambda b: P[b] + K * T[b]):
        trial = (parts.pop() if parts else []) + [b]
        padded = len(trial) * (max(P[i] for i in trial) + K * max(T[i] for i in trial))
        parts += [trial] if padded <= budget or len(trial) == 1 else [trial[:-1], [b]]
    return parts


def backward(vlm: VLM, prompts: list[Prompt], completions: Rollout, advantages: Tensor, temperature: float, pairs: int,
             tokens_per_microbatch: int = 16384, activation_checkpointing: bool = False) -> dict[str, float]:
    """Add the gradient of the step's loss, Eq. (10), to .grad and return what to log.

    `pairs` counts the pairs of all ranks together: then the gradient of the step is the plain *sum* over micro-batches
    and ranks, however the prompts are split among them.
    """
    # differs from Eq. (10): the two sums are added (the sign is missing there), and each prompt has advantages of its
    # own, because once the format reward is added the two groups have different means.
    mask, device = completions.mask, completions.tokens.device                                            # (B, K, T)
    advantages = torch.as_tensor(advantages, dtype=torch.float32, device=device)                  # (B, K)
    features = completions.features or encode_images(vlm, prompts)
    loss, clipped, deviation, scored = torch.zeros(4, device=device)                              # () each
    chosen = advantages.any(1).nonzero()[:, 0].tolist()      # a group without spread has no gradient: not computed
    for part in microbatches(prompts, completions.lengths, chosen, tokens_per_microbatch):
        T = max(1, int(completions.lengths[part].max()))
        tokens, old_logp, kept = (x[part][..., :T] for x in (completions.tokens, completions.logp, mask))  # (b, K, T)
        logp = completion_logprobs(vlm, [prompts[b] for b in part], [features[b] for b in part], tokens, kept,
                                   temperature, activation_checkpointing)                         # (b, K, T)
        part_loss = policy_loss(logp, old_logp, advantages[part], kept).sum() / pairs             # ()
        part_loss.backward()
        away = (importance_ratio(logp.detach(), old_logp, kept) - 1).abs()                        # (b, K, T)
        loss, scored = loss + part_loss.detach(), scored + kept.sum()                             # ()
        clipped, deviation = clipped + (away > CLIP).sum(), deviation + away.sum()                # ()
    total = int(mask.sum())
    return {
        "loss": loss.item(),                                                     # about 0 by construction
        "clip_fraction": (clipped / scored.clamp(min=1)).item(),
        "ratio_deviation": (deviation / scored.clamp(min=1)).item(),             # mean |rho - 1|; first update: 0
        "entropy": -completions.logp[mask].sum().item() / max(1, total),         # nats per token
        "completion_tokens": total,
        "truncated": 1 - completions.ended.float().mean().item(),
    }


def backward_repeated(vlm: VLM, prompts: list[Prompt], completions: Rollout, advantages: Tensor, temperature: float,
                      pairs: int) -> None:
    """The reference: the library's own forward on each prompt repeated K times: same gradient, more work."""
    K, image_token = completions.tokens.shape[1], vlm.base.config.image_token_id
    for b, prompt in enumerate(prompts):
        P, device = len(prompt.input_ids), vlm.device
        ids = torch.cat([prompt.input_ids.to(device).expand(K, P), completions.tokens[b]], 1)         # (K, P+T)
        logits = vlm.model(
            input_ids=ids, attention_mask=F.pad(completions.mask[b], (P, 0), value=True).long(),
            mm_token_type_ids=(ids == image_token).int(), pixel_values=prompt.pixel_values.to(device).repeat(K, 1),
            image_grid_thw=prompt.grid_thw.to(device).expand(K, 3)).logits[:, P - 1:-1]           # (K, T, V)
        logp = logprobs_of(logits, completions.tokens[b], temperature, vlm.forbidden.to(device))      # (K, T)
        loss = policy_loss(logp[None], completions.logp[b, None], advantages[b, None], completions.mask[b, None]).sum()
        (loss / pairs).backward()


def all_reduce_gradients(parameters, world_size: int) -> None:
    """Sum the gradients over all ranks in one call. A parameter without a gradient here takes part with zeros.

    A sum, not a mean: `backward` has already divided by the number of pairs of all ranks.
    """
    parameters = list(parameters)
    flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters])  # (all,)
    if world_size > 1:
        torch.distributed.all_reduce(flat, op=torch.distributed.ReduceOp.SUM)
    for p, gradient in zip(parameters, flat.split([p.numel() for p in parameters])):
        p.grad = gradient.view_as(p)


def main() -> None:
    print("One token: loss and slope d loss / d log pi by ratio rho = pi / pi_old; the same for Eq. (5) as printed\n")
    print(f"{'A':>3} {'rho':>5} {'loss':>7} {'slope':>7} {'printed: loss':>15} {'slope':>7}")
    mask = torch.ones(1, 1, 1, dtype=torch.bool)                                                  # (1, 1, 1)
    for A, rho in [(A, rho) for A in (1.0, -1.0) for rho in (0.5, 0.9, 1.0, 1.1, 2.0)]:
        logp = torch.tensor(rho).log().requires_grad_()                                           # ()
        ours = policy_loss(logp.view(1, 1, 1), torch.zeros(1, 1, 1), torch.tensor([[A]]), mask).sum()  # ()
        printed = -A * torch.minimum(logp.exp(), logp.exp().clamp(1 - CLIP, 1 + CLIP))            # ()
        slopes = [torch.autograd.grad(loss, logp)[0].item() for loss in (ours, printed)]
        print(f"{A:3.0f} {rho:5.1f} {ours.item():7.2f} {slopes[0]:7.2f} {printed.item():15.2f} {slopes[1]:7.2f}")


if __name__ == "__main__":
    main()
