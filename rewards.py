"""What a completion is paid: consistency with the twin prompt (ours to give without labels), or accuracy (Eq. 1).

Each reward function takes a pair and the parsed completions of both sides and returns the moments of the task reward; the
format reward is added to either (B.2). `consistency` sees the two answers and how T acts, and nothing else: no code path
from it reaches `questions.ground_truth`, and a test makes that function raise to prove it.

    reward = make_reward("consistency", pairing="minimal")
    c = reward(pair, parsed, parsed_prime)            # PairRewards: E[c], E[c^2] of both groups, (K,) each
"""
from __future__ import annotations

from typing import Callable, Sequence

import numpy as np

from data import BOOLEAN_TASKS, hashed
from dataset import Pair
from pairing import PairRewards, add_format, group_advantages, pair_rewards
from questions import ground_truth
from verifiers import Parsed, accuracy

Reward = Callable[[Pair, Sequence[Parsed], Sequence[Parsed]], PairRewards]
REWARDS = ("consistency", "accuracy")


def make_reward(name: str, pairing: str = "minimal", label_noise: float = 0.0, seed: int = 0) -> Reward:
    """The reward function of `--reward`, chosen once, before the loop starts."""
    if name == "consistency":
        return lambda pair, y, y_prime: pair_rewards([p.answer for p in y], [p.answer for p in y_prime], pair.negates,
                                                     pairing)
    if name == "accuracy":
        return lambda pair, y, y_prime: accuracy_rewards(pair, y, y_prime, label_noise, seed)
    raise ValueError(f"--reward {name}: choose one of {', '.join(REWARDS)}")


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
    return PairRewards(c, c * c, c_prime, c_prime * c_prime)


def advantages_of(rewards: PairRewards, y: Sequence[Parsed], y_prime: Sequence[Parsed]) -> np.ndarray:
    """Task reward plus format reward, normalised in each group on its own (Eq. 2): (2, K).

    differs from Eq. (10): its shared A_i is impossible once the format reward is added; each group has its own mean.
    """
    moments = [add_format(c, c2, np.array([p.format for p in side], dtype=float))
               for c, c2, side in ((rewards.c, rewards.c2, y), (rewards.c_prime, rewards.c2_prime, y_prime))]
    return group_advantages(np.stack([m[0] for m in moments]), np.stack([m[1] for m in moments]))   # (2, K)


if __name__ == "__main__":
    y, y_prime = ([Parsed(a, True, "ok") for a in answers] for answers in ([True] * 6 + [False] * 2, [True] * 3 + [False] * 5))
    c = pair_rewards([p.answer for p in y], [p.answer for p in y_prime], negates=False)
    for name, reward, advantage in zip(("x", "x'"), (c.c, c.c_prime), advantages_of(c, y, y_prime)):
        print(f"{name:<3} E[c] {reward.round(3)}  A {advantage.round(3)}")
