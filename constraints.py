"""Faithful GRPO: task reward subject to thresholds on the quality of the thinking (arXiv 2604.08476, section 3).

    maximise E[r_task]   subject to   mean_batch(c_k) >= tau_k   for k in consistency, semantic, spatial (faithfulness.py)

Each constraint's scores are group-normalised on their own and enter as A = A_task + sum_k lambda_k A_k. After every step the
multipliers climb where their constraint is violated, lambda_k <- max(0, lambda_k + eta (tau_k - mean c_k)), over the batch of
all ranks (dual ascent), so pressure rises until the constraint holds and falls afterwards: no weight is tuned by hand.

A completion without a score (the judge abstains; or it is masked, being wrong) is left out of the mean and of its group's
statistics and gets advantage 0 from that constraint. Consistency and semantic are masked to correct completions; without
labels, ours, to those with E[c_i] >= 1/2 under the pairing. A group with fewer than two scores: 0.

Ours, where the paper's table is lost: tau 0.95, 0.85, 0.65, eta 0.05, lambda 0 at the start; the step uses lambda from before
its own update. Stage one of the paper, supervised training on search traces, is left out.

    python train.py --task depth --preset tiny --model runs/contradicting --reward accuracy --constrain consistency
    advantages = constrained(plain_advantages, scores, passes, {"consistency": 0.95}, state)
    A = advantages(batch, reward(batch))          # (B, K)
"""
from __future__ import annotations

from argparse import Namespace
from dataclasses import replace

import numpy as np

from faithfulness import RULES, Score, frame_of, said_of
from images import DataError
from pairing import PairRewards, add_format, group_advantages
from ranks import mean_over_ranks
from rewards import Advantages, Batch, Reward, make_reward, over_pairs

THRESHOLDS = {"consistency": 0.95, "semantic": 0.85, "spatial": 0.65}        # tau_C, tau_S, tau_G
MASKED = ("consistency", "semantic")          # to correct completions
LABELLED = ("accuracy", "judge")              # rewards that read labels: correct then means right
MODES = ("dual", "fixed", "sum", "product", "measure")


# ----------------------------------------------------------------------------------------------------------- the method
def group_normalised(scores: np.ndarray) -> np.ndarray:
    """A_k of one constraint: each group normalised over its scored completions alone; NaN (no score) gets 0. (B, K)"""
    A = np.zeros_like(scores)                                                                       # (B, K)
    for group, a in zip(scores, A):
        has_score = ~np.isnan(group)                                                                # (K,)
        if has_score.sum() >= 2:
            a[has_score] = group_advantages(group[has_score])
    return A


def dual_step(multipliers: dict[str, float], means: dict[str, float], thresholds: dict[str, float], rate: float) -> dict[str, float]:
    """lambda_k <- max(0, lambda_k + eta (tau_k - mean c_k)); a constraint that nobody was scored on keeps its multiplier."""
    return {k: max(0.0, value + rate * (thresholds[k] - means[k])) if k in means else value for k, value in multipliers.items()}


def batch_means(scores: dict[str, np.ndarray], batch: Batch) -> tuple[dict[str, float], dict[str, float]]:
    """(mean of c_k, number of scores) over the completions of all ranks. No entry in the means where there is no score."""
    local = {}
    for k, c in scores.items():
        local |= {f"sum {k}": float(np.nansum(c)), f"count {k}": float((~np.isnan(c)).sum())}
    both = mean_over_ranks(local, batch.world_size, batch.vlm.device)     # sums over the ranks, all divided by their number
    counts = {k: both[f"count {k}"] * batch.world_size for k in scores}
    return {k: both[f"sum {k}"] / both[f"count {k}"] for k in scores if counts[k]}, counts


def constrained(plain: Advantages, scores: dict[str, Score], passes: Reward, thresholds: dict[str, float], state: dict,
                mode: str = "dual", rate: float = 0.05) -> Advantages:
    """Wrap the advantage function `plain` in constraints. `passes` gives E[c_i], which decides who is correct.

    dual      A_task + sum_k lambda_k A_k with dual ascent: the method
    fixed     the same with lambda_k = 1
    sum       r_task + sum_k c_k, normalised as one reward (no score adds nothing)
    product   r_task * prod_k c_k, normalised as one reward (no score changes nothing)
    measure   A_task alone; the scores are only logged
    """
    state["multipliers"] = dict.fromkeys(scores, float(mode == "fixed"))

    def advantages(batch: Batch, rewards: list[PairRewards]) -> np.ndarray:
        c_all = judge(batch, scores)                                                                # each (B, K)
        correct = sides(passes(batch)) >= 0.5                                                       # (B, K)
        c = {k: np.where(correct, value, np.nan) if k in MASKED else value for k, value in c_all.items()}
        means, counts = batch_means(c, batch)
        unmasked, _ = batch_means(c_all, batch)
        multipliers = state["multipliers"]                       # looked up at every step: resuming replaces it
        batch.log |= {f"constraint_{k}": v for k, v in means.items()} | {f"scores_{k}": v for k, v in counts.items()}
        batch.log |= {f"unmasked_{k}": v for k, v in unmasked.items()} | {f"lambda_{k}": v for k, v in multipliers.items()}
        if mode == "dual":
            state["multipliers"] = dual_step(multipliers, means, thresholds, rate)
        if mode in ("sum", "product"):
            return plain(batch, [combined(r, c, 2 * i, mode) for i, r in enumerate(rewards)])
        A = plain(batch, rewards)                                                                   # (B, K)
        return A + sum((multipliers[k] * group_normalised(c[k]) for k in c if multipliers[k]), start=np.zeros_like(A))

    return advantages


def judge(batch: Batch, scores: dict[str, Score]) -> dict[str, np.ndarray]:
    """Every score of every completion of this rank, NaN where the judge abstains: each (B, K)."""
    found = {k: np.full((len(batch.texts), len(batch.texts[0])), np.nan) for k in scores}
    shown = [side for pair in batch.pairs for side in (pair.x, pair.x_prime)]                       # B
    for b, (x, prompt, group) in enumerate(zip(shown, batch.prompts, batch.texts)):
        for i, text in enumerate(group):
            said = said_of(x, text, frame_of(prompt))
            for k, score in scores.items():
                value = score(said, x)
                found[k][b, i] = np.nan if value is None else value
    return found


def sides(rewards: list[PairRewards]) -> np.ndarray:
    """E[c_i] of both sides of every pair, in the order of the prompts: (B, K)."""
    return np.stack([c for r in rewards for c in (r.c, r.c_prime)])


def combined(rewards: PairRewards, scores: dict[str, np.ndarray], b: int, mode: str) -> PairRewards:
    """The two baselines: one reward in place of separate advantages, for the pair at rows b and b + 1."""
    moments = []
    for row, (c, c2) in zip((b, b + 1), ((rewards.c, rewards.c2), (rewards.c_prime, rewards.c2_prime))):
        if mode == "sum":
            moments += add_format(c, c2, sum(np.nan_to_num(s[row], nan=0.0) for s in scores.values()))
        else:
            factor = np.prod([np.nan_to_num(s[row], nan=1.0) for s in scores.values()], axis=0)      # (K,)
            moments += [c * factor, c2 * factor**2]
    return replace(rewards, **dict(zip(("c", "c2", "c_prime", "c2_prime"), moments)))


# --------------------------------------------------------------------------------------------------------- command line
def thresholds_of(names: list[str]) -> dict[str, float]:
    """`consistency semantic=0.8` as {"consistency": 0.95, "semantic": 0.8}."""
    found = {}
    for text in names:
        name, given, value = text.partition("=")
        try:
            found[name] = float(value) if given else THRESHOLDS[name]
        except (KeyError, ValueError):
            raise DataError(f"--constrain {text}: give {', '.join(THRESHOLDS)}, each alone or as NAME=THRESHOLD") from None
        if name not in THRESHOLDS or not 0 <= found[name] <= 1:
            raise DataError(f"--constrain {text}: the names are {', '.join(THRESHOLDS)}, a threshold lies between 0 and 1")
    return found


def add_flags(parser) -> None:
    """What train.py takes."""
    parser.add_argument("--constrain", nargs="+", metavar="NAME", help="of the thinking: consistency, semantic, spatial; NAME=0.9 sets tau")
    parser.add_argument("--constraint-mode", default="dual", choices=MODES, help="dual: Faithful GRPO; the others to compare")
    parser.add_argument("--constraint-rate", type=float, default=0.05, metavar="ETA", help="of the multipliers")
    parser.add_argument("--constraint-judge", metavar="MODEL", help="its checkpoint; default: rules for the tiny model's language")


def check_flags(args: Namespace) -> None:
    """Refuse what cannot be meant."""
    if not args.constrain:
        idle = [n for n in ("constraint_mode", "constraint_rate", "constraint_judge") if n in args.given]
        if idle and not args.resume:
            raise DataError(f"--{idle[0].replace('_', '-')} does nothing without --constrain consistency, semantic or spatial")
        return
    names = thresholds_of(args.constrain)
    if not args.constraint_rate >= 0:
        raise DataError(f"--constraint-rate {args.constraint_rate}: must not be negative")
    if args.constraint_judge is None and "semantic" in names and args.reward not in LABELLED:
        raise DataError("--constrain semantic: its rules read the 3D boxes, that is, labels; give a model with --constraint-judge, "
                        "or train with --reward accuracy")
    if args.constraint_judge is None and args.preset == "paper" and {"consistency", "semantic"} & names.keys():
        raise DataError("--constrain: the rules read the tiny model's language only; give a model with --constraint-judge")


def from_arguments(args: Namespace, plain: Advantages, state: dict) -> Advantages:
    """The advantage function that the flags ask for: `plain` itself without --constrain."""
    if not args.constrain:
        return plain
    thresholds = thresholds_of(args.constrain)
    scores = dict(RULES)
    if args.constraint_judge:
        from faithfulness_judge import load_judge              # here, so that the rules need no second model

        scores |= load_judge(args.constraint_judge, tuple(thresholds))
    passes = over_pairs(make_reward("accuracy" if args.reward in LABELLED else "consistency", args.pairing, args.label_noise,
                                    args.seed))
    return constrained(plain, {k: scores[k] for k in thresholds}, passes, thresholds, state, args.constraint_mode,
                       args.constraint_rate)


if __name__ == "__main__":
    task, c = np.array([1.0, 1, 1, 0]), np.array([[1.0, 0, 1, np.nan]])          # the wrong completion has no score
    multiplier = {"consistency": 0.0}
    print("r_task 1 1 1 0, c 1 0 1 -: A_task", group_advantages(task).round(3), " A_C", group_normalised(c)[0].round(3))
    for step in range(1, 5):
        A = group_advantages(task) + multiplier["consistency"] * group_normalised(c)[0]
        print(f"step {step}: lambda {multiplier['consistency']:.4f}  A {A.round(3)}")
        multiplier = dual_step(multiplier, {"consistency": 2 / 3}, THRESHOLDS, rate=0.5)
