"""Turn the answers to x and x' = T(x) into one reward per completion, and rewards into advantages.

Idea (OT-GRPO, sections 4.2, 4.3, B.2, B.3). A consistency verifier scores *pairs*: V[i, j] = verif_T(y_i, y'_j).
GRPO needs one reward per completion, so the K answers to x must meet the K answers to x'. Five ways:

    random           y_i meets y'_i, by order of generation                                   section 4.2
    one_to_all       y_i meets everybody, the mean counts                                     section 4.2
    minimal_vertex   the least consistent matching: the paper's rule, one optimal solution    section 4.3, B.3
    minimal          the least consistent matching, averaged over all equally bad ones        ours (default)
    majority         no matching: agree with the vote of all 2K answers                       ours, for comparison

Why `minimal` differs from the paper. With few distinct answers many matchings are optimal, and which of several
*identical* answers is the unlucky one is left to the solver. 8 True against 3 True, 5 False: every completion of x
says the same, yet three get advantage +1.29 and five -0.77. That is noise. We take moments over the ties instead:

    E[c_i] = sum_j gamma_ij V_ij / sum_j gamma_ij       E[c_i^2] = sum_j gamma_ij V_ij^2 / sum_j gamma_ij

with gamma the optimal transport plan between the two histograms of distinct answers (Definition B.1 with equal
answers lumped together), and normalise (Eq. (2)) with the mean and the standard deviation of that mixture. For
boolean answers this is the paper's expected advantage over random completion orders if all parse and the format
reward is the same within each answer; otherwise it is a definition, close but not equal. Normalising the averaged
reward alone, E[c_i^2] = E[c_i]^2, would be another algorithm: majority voting (see the example).

Unparseable answers (None) take no part and get 0; nothing parseable on one side: 0 for the whole pair.

>>> r = pair_rewards([True] * 6 + [False] * 2, [True] * 3 + [False] * 5, negates=False)
>>> r.c[[0, 7]].round(3), group_advantages(r.c, r.c2)[[0, 7]].round(3)
(array([0.167, 0.   ]), array([ 0.126, -0.378]))

Run `python pairing.py` for the table of all pairings on that example. Letters: K completions per prompt, n0 and n1
of them parseable for x and x', m0 and m1 distinct answers among those.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linear_sum_assignment, linprog

from verifiers import Answer, verify

PAIRINGS = ("minimal", "minimal_vertex", "random", "one_to_all", "majority")

FLOAT_NOISE = 1e-6  # rewards of order 1 that differ by less are equal: fp32 rounding must not become advantages

Moments = tuple[np.ndarray, np.ndarray]  # of one group: E[c_i], E[c_i^2]


@dataclass(frozen=True, eq=False)
class PairRewards:
    """First and second moment of every completion's consistency reward; all float64 of shape (K,)."""

    c: np.ndarray  # E[c_i] for completion i of x
    c2: np.ndarray  # E[c_i^2]
    c_prime: np.ndarray  # E[c'_j] for completion j of x'
    c2_prime: np.ndarray  # E[c'_j^2]


def pair_rewards(
    y: Sequence[Answer | None], y_prime: Sequence[Answer | None], negates: bool, pairing: str = "minimal"
) -> PairRewards:
    """Consistency rewards of the K completions of x and the K of x'. None is an unparseable answer (B.2)."""
    if pairing not in PAIRINGS:
        raise ValueError(f"pairing is {pairing!r}, expected one of {', '.join(PAIRINGS)}")
    if len(y) != len(y_prime):
        raise ValueError(f"{len(y)} answers to x but {len(y_prime)} to x': the groups must be of one size")
    rows = [i for i, answer in enumerate(y) if answer is not None]  # n0 of K
    cols = [j for j, answer in enumerate(y_prime) if answer is not None]  # n1 of K
    rewards = PairRewards(*np.zeros((4, len(y))))  # 4 x (K,)
    if not rows or not cols:
        return rewards
    answers, answers_prime = [y[i] for i in rows], [y_prime[j] for j in cols]  # n0, n1
    if len({isinstance(answer, bool) for answer in answers + answers_prime}) > 1:
        raise TypeError("boolean and numeric answers in one pair of groups")

    if pairing == "minimal":
        moments, moments_prime = minimal(answers, answers_prime, negates)
    else:
        if pairing == "majority":
            c, c_prime = majority(answers, answers_prime, negates)
        else:
            V = verifier_matrix(answers, answers_prime, negates)  # (n0, n1)
            if pairing == "random":
                c, c_prime = by_generation_order(V, rows, cols)
            else:
                c, c_prime = one_to_all(V) if pairing == "one_to_all" else minimal_vertex(V)
        moments, moments_prime = (c, c * c), (c_prime, c_prime * c_prime)  # nothing is averaged: no inner variance
    rewards.c[rows], rewards.c2[rows] = moments
    rewards.c_prime[cols], rewards.c2_prime[cols] = moments_prime
    return rewards


def verifier_matrix(y: Sequence[Answer | None], y_prime: Sequence[Answer | None], negates: bool) -> np.ndarray:
    """V[i, j] = verif_T(y_i, y'_j) over the parseable answers: (n0, n1)."""
    columns = [b for b in y_prime if b is not None]
    V = [[verify(a, b, negates) for b in columns] for a in y if a is not None]
    return np.array(V, dtype=np.float64).reshape(len(V), len(columns))  # (n0, n1), also when one is 0


# ---------------------------------------------------------------------------------------------------------
# Least consistent matching, averaged over ties


def minimal(y: Sequence[Answer], y_prime: Sequence[Answer], negates: bool) -> tuple[Moments, Moments]:
    """E[c], E[c^2] over the optimal matchings of Eq. (9), for the n0 answers to x and the n1 to x'."""
    if isinstance(y[0], bool):
        c, c_prime = minimal_boolean(y, y_prime, negates)
        return (c, c), (c_prime, c_prime)  # c is 0 or 1, so c^2 = c before any averaging
    return minimal_numeric(y, y_prime, negates)


def minimal_boolean(y: Sequence[bool], y_prime: Sequence[bool], negates: bool) -> tuple[np.ndarray, np.ndarray]:
    """Closed form for two answers, no solver: E[c] (n0,) and E[c'] (n1,).

    Let p and q be the shares of True among y and among the y' mapped back through phi_T. A coupling that avoids
    agreement sends True to False as far as the masses allow; what is left over must agree:

        gamma_TT = max(0, p + q - 1),  gamma_FF = max(0, 1 - p - q),  E[c | True] = gamma_TT / p, ...

    so min_gamma P(consistent) = |p + q - 1|. All masses below are integers in units of 1 / (n0 n1), so that equal
    answers get bitwise equal rewards and n0 != n1 is no special case.
    """
    n0, n1 = len(y), len(y_prime)
    true = sum(y) * n1  # n0 n1 p
    true_prime = sum(answer != negates for answer in y_prime) * n0  # n0 n1 q
    false, false_prime = n0 * n1 - true, n0 * n1 - true_prime
    both_true = max(0, true - false_prime)  # n0 n1 gamma_TT
    both_false = max(0, false - true_prime)  # n0 n1 gamma_FF

    if_true, if_false = both_true / max(true, 1), both_false / max(false, 1)  # no mass, nobody to pay: 0 / 1
    c = np.array([if_true if answer else if_false for answer in y])  # (n0,)
    if_true, if_false = both_true / max(true_prime, 1), both_false / max(false_prime, 1)
    c_prime = np.array([if_true if answer != negates else if_false for answer in y_prime])  # (n1,)
    return c, c_prime


def minimal_numeric(y: Sequence[float], y_prime: Sequence[float], negates: bool) -> tuple[Moments, Moments]:
    """Transport between the histograms of distinct answers; row and column means of V and V^2.

    Identical answers share one row, hence one reward. Now and then (5 to 15 % of small counting cases) several plans
    between the *histograms* are optimal too; the average of two of them, found with the answers in ascending and in
    descending order, stands for all: no brute force over all orders, hence not their mean. Exact if the plan is unique.
    """
    values, row, count = np.unique(y, return_inverse=True, return_counts=True)  # (m0,), (n0,), (m0,)
    values_prime, col, count_prime = np.unique(y_prime, return_inverse=True, return_counts=True)
    V = verifier_matrix(values.tolist(), values_prime.tolist(), negates)  # (m0, m1)
    flip = (slice(None, None, -1), slice(None, None, -1))
    ascending = histogram_plan(V, count, count_prime)  # (m0, m1)
    descending = histogram_plan(V[flip], count[::-1], count_prime[::-1])[flip]  # (m0, m1)
    gamma = (ascending + descending) / 2  # (m0, m1), optimal as well: the optimal plans form a convex set

    mass, mass_prime = gamma.sum(1), gamma.sum(0)  # (m0,), (m1,)
    c, c2 = (gamma * V).sum(1) / mass, (gamma * V * V).sum(1) / mass  # (m0,)
    c_prime, c2_prime = (gamma * V).sum(0) / mass_prime, (gamma * V * V).sum(0) / mass_prime  # (m1,)
    return (c[row], c2[row]), (c_prime[col], c2_prime[col])


def histogram_plan(cost: np.ndarray, count: np.ndarray, count_prime: np.ndarray) -> np.ndarray:
    """An optimal transport plan (m0, m1) between two histograms with total masses n0 and n1 brought to one.

    Each answer is repeated until both sides have lcm(n0, n1) equal items; then it is an assignment problem, solved
    in integers: no rounding in the masses, and some ten times faster than a linear programme of this size.
    """
    n0, n1 = int(count.sum()), int(count_prime.sum())
    common = math.lcm(n0, n1)
    items = np.repeat(np.arange(len(count)), count * (common // n0))  # (common,) which distinct answer
    items_prime = np.repeat(np.arange(len(count_prime)), count_prime * (common // n1))  # (common,)
    i, j = linear_sum_assignment(cost[np.ix_(items, items_prime)])  # (common,), (common,)
    plan = np.zeros(cost.shape)  # (m0, m1)
    np.add.at(plan, (items[i], items_prime[j]), 1 / common)
    return plan


# ---------------------------------------------------------------------------------------------------------
# The other pairings. Each maps V (n0, n1) to c (n0,) and c' (n1,).


def minimal_vertex(V: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The paper's own rule (B.3): one optimal permutation, or argmax partners if n0 != n1."""
    n0, n1 = V.shape
    if n0 == n1:
        i, j = linear_sum_assignment(V)  # i = 0 ... n0 - 1, j = sigma*(i)
        c_prime = np.empty(n1)
        c_prime[j] = V[i, j]  # both partners of a pair get the same reward
        return V[i, j], c_prime
    # Rounded, because the solver's last bits must not choose between equal masses; then the first partner wins.
    gamma = transport_plan(V).round(9)  # (n0, n1)
    return V[np.arange(n0), gamma.argmax(1)], V[gamma.argmax(0), np.arange(n1)]


def transport_plan(cost: np.ndarray) -> np.ndarray:
    """A vertex gamma* (n0, n1) of Definition B.1: rows sum to 1 / n0, columns to 1 / n1, least total cost."""
    n0, n1 = cost.shape
    row_sums = np.kron(np.eye(n0), np.ones(n1))  # (n0, n0 n1), acts on gamma flattened row by row
    column_sums = np.kron(np.ones(n0), np.eye(n1))  # (n1, n0 n1)
    marginals = np.repeat([1 / n0, 1 / n1], [n0, n1])  # (n0 + n1,)
    # Dual simplex: it ends in a vertex, whereas an interior point might spread mass over all optimal ones.
    result = linprog(cost.ravel(), A_eq=np.vstack([row_sums, column_sums]), b_eq=marginals, method="highs-ds")
    if not result.success:
        raise RuntimeError(f"transport problem {cost.shape} not solved: {result.message}")
    return result.x.reshape(n0, n1)


def by_generation_order(V: np.ndarray, rows: Sequence[int], cols: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """`random` (section 4.2): the k-th of x meets the k-th of x'; who lost the partner to the parser gets 0.

    rows (n0,) and cols (n1,) are the places in the group of the parseable answers.
    """
    met = V * np.equal.outer(rows, cols)  # (n0, n1), at most one entry per row and column
    return met.sum(1), met.sum(0)


def one_to_all(V: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean over the parseable partners (section 4.2). With boolean answers, all parsed, equal format rewards, the
    advantages are those of GRPO with the *other* group's majority as label: the size of the mean cancels."""
    return V.mean(1), V.mean(0)


def majority(y: Sequence[Answer], y_prime: Sequence[Answer], negates: bool) -> tuple[np.ndarray, np.ndarray]:
    """Agree with the vote of all parsed answers to x and x', mapped back to x; nobody is right on a tie.

    Numeric answers have no majority worth the name: the median votes, and being close to it counts.
    """
    if isinstance(y[0], bool):
        mapped = [answer != negates for answer in y_prime]  # phi_T^-1(y')
        lead = 2 * (sum(y) + sum(mapped)) - len(y) - len(mapped)
        if lead == 0:
            return np.zeros(len(y)), np.zeros(len(mapped))
        return np.equal(y, lead > 0).astype(float), np.equal(mapped, lead > 0).astype(float)
    median = float(np.median([*y, *y_prime]))
    V = verifier_matrix([*y, *y_prime], [median], negates)[:, 0]  # (n0 + n1,)
    return V[: len(y)], V[len(y) :]


# ---------------------------------------------------------------------------------------------------------
# From moments to advantages


def add_format(c: np.ndarray, c2: np.ndarray, format_reward: np.ndarray) -> Moments:
    """E[r] and E[r^2] (K,) of r = c + f, where the format reward f (K,) is certain."""
    f = np.asarray(format_reward, dtype=np.float64)  # (K,)
    return c + f, c2 + 2 * f * c + f * f


def group_advantages(reward: np.ndarray, reward_second_moment: np.ndarray | None = None) -> np.ndarray:
    """Eq. (2), A_i = (E[r_i] - mean) / std, over the last axis: (..., K) -> (..., K), one group per row.

        mean = mean_i E[r_i]        std^2 = mean_i E[r_i^2] - mean^2        (population moments: divided by K)

    differs from Eq. (2): r_i may be uncertain (`minimal`), then std is that of the mixture. Without second moments
    the rewards are certain, E[r_i^2] = r_i^2, and this is Eq. (2). A group without spread in E[r_i] gets exactly 0:
    dividing its rounding errors by their own size would make random gradients of full length.
    """
    r = np.asarray(reward, dtype=np.float64)  # (..., K)
    r2 = r * r if reward_second_moment is None else np.asarray(reward_second_moment, dtype=np.float64)
    if r.ndim == 0 or r.shape[-1] < 2:
        raise ValueError(f"rewards of shape {r.shape}: a group needs K >= 2 completions to be compared")
    if r2.shape != r.shape or not np.isfinite(r).all() or not np.isfinite(r2).all():
        raise ValueError("rewards and their second moments must be finite and of one shape")
    scale = np.maximum(1.0, np.abs(r).max(-1, keepdims=True))  # (..., 1)
    if (r2 - r * r < -FLOAT_NOISE * scale**2).any():
        raise ValueError("E[r^2] < E[r]^2 is impossible: was a reward passed in place of its second moment?")

    mean = r.mean(-1, keepdims=True)  # (..., 1)
    # std^2 as variance between completions + mean variance within: the same number, but nothing large cancels.
    variance = (r - mean) ** 2 + np.maximum(r2 - r * r, 0)  # (..., K)
    std = np.sqrt(variance.mean(-1, keepdims=True))  # (..., 1)
    has_spread = np.ptp(r, axis=-1, keepdims=True) > FLOAT_NOISE * scale  # (..., 1)
    return np.where(has_spread, (r - mean) / np.where(has_spread, std, 1.0), 0.0)  # (..., K)


# ---------------------------------------------------------------------------------------------------------
# Worked example


def main() -> None:
    y, y_prime = [True] * 6 + [False] * 2, [True] * 3 + [False] * 5  # K = 8
    print("x: 6 True, 2 False    x': 3 True, 5 False    T keeps the answer\n")
    print(f"{'pairing':<26}{'c: True':>9}{'False':>8}{'  A: True':>10}{'False':>8}   A of the eight completions of x")
    for pairing in PAIRINGS:
        show(pairing, y, pair_rewards(y, y_prime, negates=False, pairing=pairing), second_moment=True)
    show("minimal, reward averaged", y, pair_rewards(y, y_prime, negates=False), second_moment=False)
    print("\nOne agreement cannot be avoided. The paper's rule pays one of six equal answers for it, all by chance.")
    print("The last line averages the reward before it normalises: that is majority voting, another algorithm.")


def show(name: str, y: list[bool], rewards: PairRewards, second_moment: bool) -> None:
    advantages = group_advantages(rewards.c, rewards.c2 if second_moment else None)  # (K,)
    true = np.array(y)  # (K,)
    means = [rewards.c[true].mean(), rewards.c[~true].mean(), advantages[true].mean(), advantages[~true].mean()]
    print(f"{name:<26}{means[0]:>9.3f}{means[1]:>8.3f}{means[2]:>10.3f}{means[3]:>8.3f}", end="   ")
    print(" ".join(f"{a:+.2f}" for a in advantages))


if __name__ == "__main__":
    main()
