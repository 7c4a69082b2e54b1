"""LenGuard-GPC: pay a completion for staying close to what a guided prompt would say, and for a sensible length.

Idea (LenGuard-GPC, "Length Guarding with Guided-Prompt Consistency", sections 3.2, 3.3). The same question is asked once
more with one sentence of guidance, h. The sampled tokens are run under both prompts, and at every token the two next-token
distributions are compared over the whole vocabulary: a signal for each token, where the task reward has one per answer.

    D_t = KL( pi(. | x, y_<t) || pi(. | x_guided, y_<t) ),   S_KL(y) = sum_t D_t                                 Eq. (1), (2)
    r   = r_task - l_KL * S_KL(y) + l_len * r_len(T)                                                             Eq. (5), (9)

A sum over tokens pays for being short. The length bonus r_len is there against that: nothing below l1 tokens, rising from r1
to r2 between l1 and l2, constant up to l3, nothing beyond (Eq. 3). Without the rise, a flat bonus, lengths are said to crowd
at l1. Nothing here has a gradient: the policy learns by GRPO, from the number.

What differs: h comes from a table, one sentence per task, where the paper asks GPT-5.3-Chat for one per training instance
(whether that model sees the answer it does not say; the table cannot). One picture per prompt, not several. Eq. (3) leaves
out T > l3; the text says that it pays nothing. l_task is 1 throughout: Eq. (6) divides the scale of a reward out again.
That also means: where all completions of a group earn the same r_task, the weight of the KL alone cancels, and 5e-3 pushes
as hard as 5 (`python lenguard.py` shows it). So does D_1, which no completion can change. The paper's format weight is 0.2;
ours is 1.0 unless `--format-weight 0.2`.

    python train.py --task depth --lenguard staged --format-weight 0.2
    reward = guarded(over_pairs(make_reward("consistency")), kl_weight=5e-3, stages=STAGES["paper"])
    A = plain_advantages(batch, reward(batch), format_weight=0.2)                                        # (B, K)

Letters: B prompts (two per pair), K completions per prompt, T tokens of a completion (the end token counts), N tokens of
all completions, V vocabulary, H width of the decoder.
"""
from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from checkpoint import read_log
from command import Parser, run as run_command
from grpo import LOGITS_AT_ONCE, completion_hidden, microbatches
from images import DataError
from model import VLM, make_prompt
from pairing import PairRewards, add_format, group_advantages
from questions import SYSTEM_PROMPT, prompt_text
from rewards import Batch, Reward
from sampling import Rollout, encode_images, log_distribution
from transforms import Prompted

if TYPE_CHECKING:
    from model import Prompt

MODES = ("off", "kl", "flat", "staged")

# h, one sentence per task: how to go about it, never what comes out. It knows neither the picture nor the question's words.
GUIDANCE = {
    "orientation": "First say where each dot is from left to right, then compare the two, then answer.",
    "depth": "First judge how far each object is from the camera at its nearest point, then compare the two, then answer.",
    "size": "First judge how large each object is in space, not in the picture, then compare the two, then answer.",
    "distance": "First judge how far each of the two other objects is from object 1 in space, then compare, then answer.",
    "counting": "First go through the picture and name every instance once, then count them, then answer.",
    "abs_distance": "First judge where each object is in space, then estimate the distance between them, then answer.",
}


class Stages(NamedTuple):
    """Boundaries in tokens and levels of the length bonus, Eq. (3). r1 = r2 makes it flat."""
    l1: int
    l2: int
    l3: int
    r1: float = 0.25
    r2: float = 0.30


# The embedded model writes 14 or 15 tokens on depth, so the paper's boundaries are divided by 24: l2 is its usual length.
STAGES = {"paper": Stages(160, 360, 768), "tiny": Stages(7, 15, 32)}


# ---------------------------------------------------------------------------------------------------- the length bonus
def length_bonus(T: np.ndarray, stages: Stages) -> np.ndarray:
    """r_len(T), Eq. (3), of completions of T tokens: (...) -> (...)."""
    # differs from Eq. (3): the case T > l3 is missing there; section 4.1 says in words that no bonus is granted.
    l1, l2, l3 = stages.l1, stages.l2, stages.l3
    risen = np.clip((np.asarray(T) - l1) / (l2 - l1), 0.0, 1.0)                                   # (...), 1 from l2 on
    return np.where((T < l1) | (T > l3), 0.0, stages.r1 + (stages.r2 - stages.r1) * risen)        # (...)


# ------------------------------------------------------------------------------------------------ the guided prompt's KL
def guided_prompt(vlm: VLM, shown: Prompted, system: str = SYSTEM_PROMPT) -> Prompt:
    """x_guided = (picture, question, h): the prompt with the task's sentence behind it (section 3.2)."""
    names = {i: o.name for i, o in shown.view.objects.items()}
    text = prompt_text(shown.question, names) + "\n" + GUIDANCE[shown.question.task]
    return make_prompt(vlm, system, text, shown.picture)


def kl_divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p || q) over the last axis, (..., V), (..., V) -> (...). Tokens that neither may draw (log 0) count nothing."""
    return torch.where(log_p.isfinite(), log_p.exp() * (log_p - log_q), 0.0).sum(-1)              # (...)


def token_kl(vlm: VLM, hidden: Tensor, guided: Tensor, temperature: float, at_once: int = LOGITS_AT_ONCE) -> Tensor:
    """D_t of Eq. (1) from the states that predict each token under both prompts: (N, H), (N, H) -> (N,).

    Both are the distributions that are sampled from: same temperature, same forbidden tokens. Of the two (N, V) tables
    only `at_once` numbers exist at a time.
    """
    forbidden = vlm.forbidden.to(hidden.device)                                                   # (V,)
    n = max(1, at_once // (2 * len(forbidden)))
    return torch.cat([kl_divergence(*(log_distribution(vlm.base.lm_head(h), temperature, forbidden) for h in both))
                      for both in zip(hidden.split(n), guided.split(n))])                         # (N,)


@torch.no_grad()
def guided_kl(vlm: VLM, prompts: list[Prompt], guided: list[Prompt], completions: Rollout, temperature: float,
              tokens_per_microbatch: int = 16384) -> Tensor:
    """D_t, Eq. (1), of every completion token, teacher-forced under both prompts; 0 where masked: (B, K, T).

    Both prompts of a completion run once for its K completions, and the picture not at all: its features are the rollout's.
    """
    features, mask = completions.features or encode_images(vlm, prompts), completions.mask        # B x (., H), (B, K, T)
    D = torch.zeros(mask.shape, device=mask.device)                                               # (B, K, T)
    for part in microbatches(guided, completions.lengths, list(range(len(prompts))), tokens_per_microbatch):
        T = int(completions.lengths[part].max())
        tokens, kept = completions.tokens[part][..., :T], mask[part][..., :T]                     # (b, K, T)
        states = [completion_hidden(vlm, [side[b] for b in part], [features[b] for b in part], tokens)[kept]
                  for side in (prompts, guided)]                                                  # 2 x (N, H)
        D[part, :, :T] = torch.zeros(kept.shape, device=kept.device).masked_scatter(kept, token_kl(vlm, *states, temperature))
    return D


# ------------------------------------------------------------------------------------------------------------ the reward
def guarded(reward: Reward, kl_weight: float = 5e-3, length_weight: float = 1.0, stages: Stages = STAGES["paper"],
            system: str = SYSTEM_PROMPT, tokens_per_microbatch: int = 16384) -> Reward:
    """Any other reward with the two terms of Eq. (9) added to it. A length weight of 0 leaves the KL alone."""
    def rewards(batch: Batch) -> list[PairRewards]:
        sides = [side for pair in batch.pairs for side in (pair.x, pair.x_prime)]                 # B
        guided = [guided_prompt(batch.vlm, side, system) for side in sides]                       # B
        D = guided_kl(batch.vlm, batch.prompts, guided, batch.completions, batch.temperature, tokens_per_microbatch)
        S = D.double().sum(-1).cpu().numpy()                                                      # Eq. (2)        (B, K)
        T = batch.completions.lengths.cpu().numpy()                                               # (B, K)
        bonus = length_bonus(T, stages)                                                           # Eq. (3)        (B, K)
        task = reward(batch)
        batch.log |= {"task_reward": float(np.mean([np.r_[r.c, r.c_prime] for r in task])),       # without the two terms
                      "guided_kl": float(S.mean()), "guided_kl_per_token": float((S / T).mean()),
                      "length_bonus": length_weight * float(bonus.mean())}
        return [add_certain(r, *extra) for r, extra in zip(task, pairwise(length_weight * bonus - kl_weight * S))]
    return rewards


def pairwise(values: np.ndarray) -> np.ndarray:
    """(B, K) in the order x_1, x'_1, x_2, ... -> (B / 2, 2, K)."""
    return values.reshape(-1, 2, values.shape[-1])                                                # (B / 2, 2, K)


def add_certain(rewards: PairRewards, extra: np.ndarray, extra_prime: np.ndarray) -> PairRewards:
    """The moments of c + e, where c may be uncertain (`minimal`) and e (K,) is not."""
    return PairRewards(*add_format(rewards.c, rewards.c2, extra), *add_format(rewards.c_prime, rewards.c2_prime, extra_prime))


# ------------------------------------------------------------------------------------------------- from the command line
def add_flags(parser) -> None:
    """What train.py takes."""
    parser.add_argument("--lenguard", default="off", choices=MODES, help="guided-prompt KL; kl: no bonus for length")
    parser.add_argument("--lenguard-kl-weight", type=float, default=5e-3, metavar="W", help="l_KL: reward lost per nat of KL")
    parser.add_argument("--lenguard-bonus-weight", type=float, default=1.0, metavar="W", help="l_len: times the length bonus")
    parser.add_argument("--lenguard-lengths", type=int, nargs=3, metavar=("L1", "L2", "L3"),
                        help="tokens from which there is a bonus, it is full, it is gone; default: from the preset")
    parser.add_argument("--lenguard-bonus", type=float, nargs=2, default=[0.25, 0.30], metavar=("R1", "R2"), help="at L1, at L2")


def from_arguments(args: Namespace, reward: Reward) -> Reward:
    """The reward that the flags ask for: `reward` itself with off; kl has no bonus, flat pays R2 from L1 on."""
    if args.lenguard == "off":
        return reward
    r1, r2 = args.lenguard_bonus
    stages = Stages(*args.lenguard_lengths, r2 if args.lenguard == "flat" else r1, r2)
    length_weight = 0.0 if args.lenguard == "kl" else args.lenguard_bonus_weight
    print(f"lenguard {args.lenguard}: l_KL = {args.lenguard_kl_weight:g}, l_len = {length_weight:g}, {stages}")
    return guarded(reward, args.lenguard_kl_weight, length_weight, stages, args.system_prompt_text, args.tokens_per_microbatch)


def check_flags(args: Namespace) -> None:
    """Refuse what cannot be meant."""
    if args.lenguard == "off":
        unused = [f"--{name.replace('_', '-')}" for name in args.given if name.startswith("lenguard_")]
        if unused:
            raise DataError(f"{unused[0]} does nothing without --lenguard kl, flat or staged")
        return
    (l1, l2, l3), (r1, r2) = args.lenguard_lengths, args.lenguard_bonus
    if not 0 <= l1 < l2 <= l3:
        raise DataError(f"--lenguard-lengths {l1} {l2} {l3}: must be 0 <= L1 < L2 <= L3")
    if args.lenguard != "kl" and l1 > args.max_new_tokens:
        raise DataError(f"--lenguard-lengths {l1} {l2} {l3}: no completion reaches L1 under --max-new-tokens "
                        f"{args.max_new_tokens}; lower the one or raise the other")
    if not (0 <= r1 <= r2 and args.lenguard_kl_weight >= 0 and args.lenguard_bonus_weight >= 0):
        raise DataError("--lenguard-bonus must be 0 <= R1 <= R2, --lenguard-kl-weight and --lenguard-bonus-weight at least 0")


# --------------------------------------------------------------------------------------------------------- worked example
def worked_example() -> None:
    from dataset import draw_pair, draw_uniforms, load_examples, to_prompt
    from model import load_vlm
    from sampling import rollout

    print("Length bonus, Eq. (3)")
    for name, s in STAGES.items():
        lengths = np.array([0, s.l1 - 1, s.l1, (s.l1 + s.l2) // 2, s.l2, s.l3, s.l3 + 1])         # (7,)
        print(f"{name:>6}  " + "  ".join(f"{T}: {b:.3f}" for T, b in zip(lengths, length_bonus(lengths, s))))

    vlm = load_vlm("tiny", torch.device("cpu"), max_pixels=112 * 112)
    pair = draw_pair(load_examples("synthetic", "depth", "train", limit=4), 0, 0, 0, 4)
    prompt, guided = to_prompt(vlm, pair.x, SYSTEM_PROMPT), guided_prompt(vlm, pair.x)
    completions = rollout(vlm, [prompt], draw_uniforms(0, 0, 0, 8, 48)[:1], temperature=1.0)
    D = guided_kl(vlm, [prompt], [guided], completions, temperature=1.0)[0]                       # (K, T)
    words = vlm.tokenizer.convert_ids_to_tokens(completions.tokens[0, 0, :completions.lengths[0, 0]].tolist())
    print(f"\nGuidance: {GUIDANCE['depth']}\nD_t of the embedded model, token by token, nats:")
    print("  ".join(f"{word.replace('Ġ', ' ').strip() or repr(word)} {d:.2f}" for word, d in zip(words, D[0].tolist())))

    S = D.double().sum(-1).numpy()                                                                # (K,)
    print("\nS_KL of eight completions ", " ".join(f"{s:6.2f}" for s in S))
    print("All eight earn the same r_task? Then the weight cancels, Eq. (6):")
    for weight in (5e-3, 5.0):
        print(f"A at l_KL = {weight:<13g}  ", " ".join(f"{a:+6.2f}" for a in group_advantages(1.0 - weight * S)))


# ---------------------------------------------------------------------------------------------------- runs side by side
SHOWN = {"length": "tokens per completion", "task_reward": "task reward", "guided_kl_per_token": "KL per token, nats"}


def read_arm(runs: list[str]) -> dict[str, np.ndarray]:
    """What the logs of an arm's runs hold over the steps that all of them have: name -> (seeds, steps)."""
    logs = [read_log(Path(run)) for run in runs]
    steps = min(map(len, logs))
    return {name: np.array([[row[name] for row in log[:steps]] for log in logs]) for name in SHOWN if name in logs[0][0]}


def compare_arms(arms: dict[str, dict[str, np.ndarray]], out: str) -> None:
    """Means over the first and the last 20 steps, with the standard deviation over seeds, and the curves as a picture."""
    from plots import plt, smooth

    figure, axes = plt.subplots(1, len(SHOWN), figsize=(14, 3.8), constrained_layout=True)
    steps = min(curves["length"].shape[1] for curves in arms.values())
    print(f"mean +- standard deviation over seeds, steps 1-20 -> {max(1, steps - 19)}-{steps}")
    for color, (arm, curves) in enumerate(arms.items()):
        for axis, (name, title) in zip(axes, SHOWN.items()):
            if name not in curves:
                continue
            values = curves[name][:, :steps]                                                      # (seeds, steps)
            for one in values:
                axis.plot(range(1, steps + 1), smooth(one.tolist()), color=f"C{color}", alpha=0.25)
            axis.plot(range(1, steps + 1), smooth(values.mean(0).tolist()), color=f"C{color}", label=f"{arm} (n = {len(values)})")
            axis.set(title=f"{title} (mean of 10 steps)", xlabel="step")
            ends = [f"{v.mean():.3f} +- {v.std(ddof=1) if len(v) > 1 else float('nan'):.3f}"
                    for v in (values[:, :20].mean(1), values[:, -20:].mean(1))]
            print(f"{arm:<13} {title:<22} {ends[0]:>16} -> {ends[1]:<16} per seed " + " ".join(
                f"{v:.3f}" for v in values[:, -20:].mean(1)))
    for axis in axes:
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend(fontsize=9)
    figure.savefig(out, dpi=100)


def main(argv: list[str] | None = None) -> int:
    p = Parser(description=__doc__.splitlines()[0])
    p.add_argument("--arm", nargs="+", action="append", metavar="NAME RUN", help="compare runs; without: a worked example")
    p.add_argument("--out", default="lenguard.png", metavar="FILE", help="the picture of that comparison")
    args = p.parse_args(argv)
    if not args.arm:
        worked_example()
    elif min(map(len, args.arm)) < 2:
        p.error("--arm needs a name and at least one run")
    else:
        compare_arms({name: read_arm(runs) for name, *runs in args.arm}, args.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(run_command(main))
