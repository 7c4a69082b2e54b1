"""What a completion is paid: consistency with the twin prompt (ours to give without labels), accuracy (Eq. 1), or a baseline.

    consistency    agrees with the least favourable matching of the twin's answers (pairing.py)              no labels
    accuracy       agrees with the label, Eq. (1): the reference
    vote           agrees with the majority of its own group, as in test-time RL (TTRL)                      no labels
    entropy        its own mean log-probability: a one-sample estimate of minus the entropy per token        no labels
    judge          a language model finds that it agrees with the label (judge.py)

Each gives the moments of the task reward of both sides; the format reward is added to any of them (B.2). All but `accuracy` and
`judge` see the answers and how T acts, and nothing else: no code path from them reaches `questions.ground_truth`, and a test
makes that function raise to prove it.

Training calls two functions, chosen once, before its loop: rewards = reward(batch), advantages = advantages(batch, rewards).
These are the two places where another method enters; it may carry numbers from step to step in a dict that checkpoints keep.

    reward = over_pairs(make_reward("consistency", pairing="minimal"))
    A = plain_advantages(batch, reward(batch))        # (B, K)
"""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Callable, Sequence

import numpy as np

from data import BOOLEAN_TASKS, hashed
from dataset import Pair
from pairing import PairRewards, add_format, group_advantages, majority, pair_rewards
from questions import ground_truth
from verifiers import Parsed, accuracy

if TYPE_CHECKING:
    from model import VLM, Prompt
    from sampling import Rollout

PAIR_REWARDS = ("consistency", "accuracy", "vote")          # the answers alone decide
REWARDS = (*PAIR_REWARDS, "entropy", "judge")


@dataclass(eq=False)
class Batch:
    """One step on one rank, as reward and advantage functions see it. Prompts in the order x_1, x'_1, x_2, x'_2, ..."""
    vlm: VLM
    pairs: list[Pair]                        # B / 2
    prompts: list[Prompt]                    # B
    completions: Rollout                     # tokens, lengths, log-probs: (B, K, ...)
    texts: list[list[str]]                   # B x K, end-of-turn token included
    parsed: list[list[Parsed]]               # B x K
    temperature: float = 1.0
    world_size: int = 1
    log: dict[str, float] = field(default_factory=dict)      # what they want in the log, same keys on all ranks: averaged

    @property
    def answered(self) -> list[tuple[Pair, list[Parsed], list[Parsed]]]:
        """(pair, parsed completions of x, of x') one by one."""
        return list(zip(self.pairs, self.parsed[::2], self.parsed[1::2]))


PairReward = Callable[[Pair, Sequence[Parsed], Sequence[Parsed]], PairRewards]
Reward = Callable[[Batch], list[PairRewards]]
Advantages = Callable[[Batch, list[PairRewards]], np.ndarray]                                       # (B, K)


def over_pairs(reward: PairReward) -> Reward:
    """A reward of one pair's answers, for every pair of a batch."""
    return lambda batch: [reward(*answered) for answered in batch.answered]


def make_reward(name: str, pairing: str = "minimal", label_noise: float = 0.0, seed: int = 0) -> PairReward:
    """The reward of `--reward` where the answers alone decide it (all but `entropy` and `judge`)."""
    if name == "consistency":
        return lambda pair, y, y_prime: pair_rewards([p.answer for p in y], [p.answer for p in y_prime], pair.negates,
                                                     pairing)
    if name == "accuracy":
        return lambda pair, y, y_prime: accuracy_rewards(pair, y, y_prime, label_noise, seed)
    if name == "vote":
        return lambda pair, y, y_prime: certain(own_vote(y), own_vote(y_prime))
    raise ValueError(f"--reward {name}: choose one of {', '.join(PAIR_REWARDS)}")


def certain(c: np.ndarray, c_prime: np.ndarray) -> PairRewards:
    """Rewards (K,), (K,) that nothing was averaged over."""
    return PairRewards(c, c * c, c_prime, c_prime * c_prime)


def own_vote(side: Sequence[Parsed]) -> np.ndarray:
    """1 for agreeing with the majority of one's own K answers (numbers: closeness to their median), else 0: (K,)."""
    read = [i for i, p in enumerate(side) if p.answer is not None]
    c = np.zeros(len(side))                                                                         # (K,)
    if read:
        c[read] = majority([side[i].answer for i in read], [], negates=False)[0]
    return c


def entropy_rewards(batch: Batch) -> list[PairRewards]:
    """Mean log-probability of a completion's own tokens. Its expectation is minus the entropy per token."""
    mask = batch.completions.mask                                                                   # (B, K, T)
    c = (batch.completions.logp * mask).sum(-1) / mask.sum(-1).clamp(min=1)                         # (B, K)
    c = c.double().cpu().numpy()
    return [certain(c[b], c[b + 1]) for b in range(0, len(c), 2)]


def accuracy_rewards(pair: Pair, y: Sequence[Parsed], y_prime: Sequence[Parsed], label_noise: float,
                     seed: int) -> PairRewards:
    """Eq. (1): verif(y, y*). With label noise the label of an example is flipped once and for all, by a hash of its id.

    The label of x' is phi_T of the (perhaps flipped) label of x, so both sides are wrong together.
    """
    truth = ground_truth(pair.x.question, pair.x.view.objects)
    if pair.example.task in BOOLEAN_TASKS:
        truth = truth != (hashed("label noise", seed, pair.example.id) < label_noise)
        truth_prime = truth != pair.negates
    else:
        truth_prime = truth                                  # no transform changes a count or a distance in metres
    c, c_prime = (np.array([accuracy(p.answer, label) for p in side])
                  for side, label in ((y, truth), (y_prime, truth_prime)))                          # (K,), (K,)
    return certain(c, c_prime)


def advantages_of(rewards: PairRewards, y: Sequence[Parsed], y_prime: Sequence[Parsed], format_weight: float = 1.0) -> np.ndarray:
    """Task reward plus format reward, normalised in each group on its own (Eq. 2): (2, K).

    differs from Eq. (10): its shared A_i is impossible once the format reward is added; each group has its own mean.
    """
    moments = [add_format(c, c2, format_weight * np.array([p.format for p in side], dtype=float))
               for c, c2, side in ((rewards.c, rewards.c2, y), (rewards.c_prime, rewards.c2_prime, y_prime))]
    return group_advantages(np.stack([m[0] for m in moments]), np.stack([m[1] for m in moments]))   # (2, K)


def plain_advantages(batch: Batch, rewards: list[PairRewards], format_weight: float = 1.0) -> np.ndarray:
    """OT-GRPO's own: `advantages_of` for every pair, (B, K)."""
    return np.concatenate([advantages_of(r, y, y_prime, format_weight) for r, (_, y, y_prime) in zip(rewards, batch.answered)])


if __name__ == "__main__":
    y, y_prime = ([Parsed(a, True, "ok") for a in answers] for answers in ([True] * 6 + [False] * 2, [True] * 3 + [False] * 5))
    c = pair_rewards([p.answer for p in y], [p.answer for p in y_prime], negates=False)
    for name, reward, advantage in zip(("x", "x'"), (c.c, c.c_prime), advantages_of(c, y, y_prime)):
        print(f"{name:<3} E[c] {reward.round(3)}  A {advantage.round(3)}")
