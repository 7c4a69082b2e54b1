"""Pairings against brute force over all matchings, other solvers, and the identities that tell them apart."""

import doctest
import inspect
import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

import pairing
from pairing import PAIRINGS, add_format, group_advantages, pair_rewards, verifier_matrix


# ---------------------------------------------------------------------------------------------------------
# Independent references


def answers(true: int, false: int) -> list[bool]:
    return [True] * true + [False] * false


def boolean_cases(K: int):
    """All answer histograms of two groups of K, invariant and negating."""
    for t0, t1, negates in itertools.product(range(K + 1), range(K + 1), (False, True)):
        yield answers(t0, K - t0), answers(t1, K - t1), negates


def optimal_matchings(V: np.ndarray) -> np.ndarray:
    """Rewards of x under every optimal permutation, by trying all: (matchings, n)."""
    n = len(V)
    sigma = np.array(list(itertools.permutations(range(n))))  # (n!, n)
    rewards = V[np.arange(n), sigma]  # (n!, n)
    totals = rewards.sum(1)
    return rewards[totals <= totals.min() + 1e-9]


def grpo(rewards) -> np.ndarray:
    """Eq. (2), retyped: certain rewards only."""
    rewards = np.asarray(rewards, float)
    return np.zeros(len(rewards)) if np.ptp(rewards) < 1e-9 else (rewards - rewards.mean()) / rewards.std()


def expected_vertex_advantage(V: np.ndarray, format_reward=0.0) -> np.ndarray:
    """The paper's advantage, averaged over all optimal permutations (= over random completion orders)."""
    return np.mean([grpo(rewards + format_reward) for rewards in optimal_matchings(V)], axis=0)


def minimal_advantages(y, y_prime, negates=False, f=0.0, f_prime=0.0):
    r = pair_rewards(y, y_prime, negates)
    f, f_prime = np.broadcast_to(f, len(y)), np.broadcast_to(f_prime, len(y))
    return group_advantages(*add_format(r.c, r.c2, f)), group_advantages(*add_format(r.c_prime, r.c2_prime, f_prime))


def least_cost(V: np.ndarray, n0: int, n1: int) -> float:
    """Optimal value of Definition B.1 by replicating to lcm(n0, n1) and solving an assignment."""
    common = math.lcm(n0, n1)
    i, j = pairing.linear_sum_assignment(np.repeat(np.repeat(V, common // n0, 0), common // n1, 1))
    return float(np.repeat(np.repeat(V, common // n0, 0), common // n1, 1)[i, j].mean())


def random_groups(rng: np.random.Generator, K: int, kind: str, unparseable: float = 0.0):
    draw = {
        "boolean": lambda: bool(rng.random() < 0.6),
        "count": lambda: float(rng.integers(0, 6)),
        "distance": lambda: float(rng.uniform(0, 5)),
    }[kind]
    return [[None if rng.random() < unparseable else draw() for _ in range(K)] for _ in range(2)]


# ---------------------------------------------------------------------------------------------------------
# minimal: against all permutations


@pytest.mark.fast
@pytest.mark.parametrize("K", [2, 3, 4, 5])
def test_minimal_is_the_average_over_all_optimal_permutations_boolean(K):
    for y, y_prime, negates in boolean_cases(K):
        rewards = pair_rewards(y, y_prime, negates)
        V = verifier_matrix(y, y_prime, negates)
        for c, c2, matrix in ((rewards.c, rewards.c2, V), (rewards.c_prime, rewards.c2_prime, V.T)):
            brute = optimal_matchings(matrix)
            np.testing.assert_allclose(c, brute.mean(0), atol=1e-12)
            np.testing.assert_allclose(c2, (brute**2).mean(0), atol=1e-12)


@pytest.mark.parametrize("kind, K", [("count", 3), ("count", 4), ("count", 5), ("distance", 4)])
def test_minimal_is_the_average_over_all_optimal_permutations_numeric(kind, K):
    """Exact where one plan between the histograms is optimal; elsewhere reported, and still optimal."""
    rng, gaps, cases = np.random.default_rng(K), [], 300
    for _ in range(cases):
        y, y_prime = random_groups(rng, K, kind)
        rewards, V = pair_rewards(y, y_prime, False), verifier_matrix(y, y_prime, False)
        brute = optimal_matchings(V)
        assert rewards.c.mean() == pytest.approx(brute[0].mean(), abs=1e-12)  # as bad as it can get
        assert rewards.c_prime.mean() == pytest.approx(brute[0].mean(), abs=1e-12)
        gap = max(abs(rewards.c - brute.mean(0)).max(), abs(rewards.c2 - (brute**2).mean(0)).max())
        if number_of_histogram_plans(y, y_prime, V) == 1:
            assert gap < 1e-12
        else:
            gaps.append(gap)
    mean, largest = np.mean(gaps or [0]), max(gaps, default=0)
    print(f"\n{kind}, K = {K}: several optimal plans in {len(gaps) / cases:.1%}, gap {mean:.3f}, at most {largest:.3f}")
    assert len(gaps) <= 0.1 * cases and mean < 0.15


def number_of_histogram_plans(y, y_prime, V) -> int:
    best, plans = np.inf, set()
    for sigma in itertools.permutations(range(len(y))):
        total = sum(V[i, j] for i, j in enumerate(sigma))
        if total < best - 1e-9:
            best, plans = total, set()
        if total <= best + 1e-9:
            plans.add(tuple(sorted((y[i], y_prime[j]) for i, j in enumerate(sigma))))
    return len(plans)


@pytest.mark.fast
@pytest.mark.parametrize("kind", ["boolean", "count", "distance"])
def test_minimal_gives_equal_answers_equal_rewards_in_any_order(kind):
    rng = np.random.default_rng(0)
    for _ in range(50):
        y, y_prime = random_groups(rng, 8, kind, unparseable=0.2)
        negates = kind == "boolean" and bool(rng.integers(2))
        rewards = pair_rewards(y, y_prime, negates)
        for value in set(y):
            assert np.ptp([c for c, answer in zip(rewards.c, y) if answer == value]) == 0.0
        shuffle, shuffle_prime = rng.permutation(8), rng.permutation(8)
        shuffled = pair_rewards([y[i] for i in shuffle], [y_prime[j] for j in shuffle_prime], negates)
        for name, order in (("c", shuffle), ("c2", shuffle), ("c_prime", shuffle_prime), ("c2_prime", shuffle_prime)):
            np.testing.assert_array_equal(getattr(shuffled, name), getattr(rewards, name)[order])


@pytest.mark.fast
def test_boolean_closed_form_is_the_transport_plan_of_any_two_group_sizes():
    for n0, n1 in itertools.product(range(1, 6), repeat=2):
        for t0, t1, negates in itertools.product(range(n0 + 1), range(n1 + 1), (False, True)):
            y, y_prime = answers(t0, n0 - t0), answers(t1, n1 - t1)
            c, c_prime = pairing.minimal_boolean(y, y_prime, negates)
            V = verifier_matrix(y, y_prime, negates)
            gamma = pairing.transport_plan(V)  # one optimal vertex; lumping equal answers makes it unique
            for reward, group, plan, scores in ((c, y, gamma, V), (c_prime, y_prime, gamma.T, V.T)):
                for value in set(group):
                    rows = [i for i, answer in enumerate(group) if answer == value]
                    expected = (plan[rows] * scores[rows]).sum() / plan[rows].sum()
                    np.testing.assert_allclose(reward[rows], expected, atol=1e-9)


@pytest.mark.fast
def test_least_consistency_of_booleans_is_p_plus_q_minus_1():
    for y, y_prime, negates in boolean_cases(6):
        p, q = np.mean(y), np.mean([answer != negates for answer in y_prime])
        assert pair_rewards(y, y_prime, negates).c.mean() == pytest.approx(abs(p + q - 1), abs=1e-12)


@pytest.mark.fast
def test_negation_is_the_same_as_answering_x_prime_the_other_way_round():
    rng = np.random.default_rng(0)
    for _, name in itertools.product(range(50), PAIRINGS):
        y, y_prime = random_groups(rng, 8, "boolean", unparseable=0.2)
        flipped = [None if answer is None else not answer for answer in y_prime]
        a, b = pair_rewards(y, y_prime, True, name), pair_rewards(y, flipped, False, name)
        np.testing.assert_array_equal([a.c, a.c2, a.c_prime, a.c2_prime], [b.c, b.c2, b.c_prime, b.c2_prime])


@pytest.mark.fast
def test_minimal_needs_no_solver_for_boolean_answers(monkeypatch):
    def forbidden(*args, **kwargs):
        raise AssertionError("a solver was called")

    monkeypatch.setattr(pairing, "linprog", forbidden)
    monkeypatch.setattr(pairing, "linear_sum_assignment", forbidden)
    for y, y_prime, negates in boolean_cases(4):
        pair_rewards([None, *y], [*y_prime, y_prime[0]], negates)  # n0 = 4, n1 = 5


# ---------------------------------------------------------------------------------------------------------
# Other solvers, and inequalities every solution obeys


@pytest.mark.fast
@pytest.mark.parametrize("kind", ["boolean", "count", "distance"])
def test_linear_programme_and_assignment_find_the_same_least_consistency(kind):
    rng = np.random.default_rng(0)
    for _ in range(25):
        n0, n1 = (int(n) for n in rng.integers(1, 9, 2))
        V = verifier_matrix(random_groups(rng, n0, kind)[0], random_groups(rng, n1, kind)[0], False)
        gamma = pairing.transport_plan(V)
        histogram = pairing.histogram_plan(V, np.ones(n0, int), np.ones(n1, int))
        for plan in (gamma, histogram):
            assert plan.min() >= -1e-12
            np.testing.assert_allclose(plan.sum(1), 1 / n0, atol=1e-12)
            np.testing.assert_allclose(plan.sum(0), 1 / n1, atol=1e-12)
            assert (plan * V).sum() == pytest.approx(least_cost(V, n0, n1), abs=1e-9)


@pytest.mark.fast
@pytest.mark.parametrize("kind", ["boolean", "count", "distance"])
def test_moments_conserve_mass_and_obey_jensen_and_minimality(kind):
    rng = np.random.default_rng(1)
    for _ in range(100):
        y, y_prime = random_groups(rng, 8, kind, unparseable=0.2)
        r = pair_rewards(y, y_prime, False)
        kept, kept_prime = [a is not None for a in y], [a is not None for a in y_prime]
        if not any(kept) or not any(kept_prime):
            continue
        for moment, moment_prime in ((r.c, r.c_prime), (r.c2, r.c2_prime)):  # what x earns, x' earns
            assert moment[kept].mean() == pytest.approx(moment_prime[kept_prime].mean(), abs=1e-12)
            assert not moment[np.invert(kept)].any() and not moment_prime[np.invert(kept_prime)].any()
        assert (r.c**2 <= r.c2 + 1e-12).all() and (r.c2 <= r.c + 1e-12).all()  # V in [0, 1]
        assert r.c[kept].mean() <= verifier_matrix(y, y_prime, False).mean() + 1e-12  # no worse than one_to_all


# ---------------------------------------------------------------------------------------------------------
# The paper's rule and what averaging over ties does to it


@pytest.mark.fast
@pytest.mark.parametrize("kind", ["boolean", "count", "distance"])
def test_vertex_rule_is_one_optimal_permutation_shared_by_both_sides(kind):
    rng = np.random.default_rng(0)
    for _ in range(50):
        y, y_prime = random_groups(rng, 5, kind)
        r = pair_rewards(y, y_prime, False, "minimal_vertex")
        brute = optimal_matchings(verifier_matrix(y, y_prime, False))
        assert min(abs(brute - r.c).max(1)) < 1e-12
        np.testing.assert_array_equal(np.sort(r.c), np.sort(r.c_prime))
        np.testing.assert_array_equal(r.c2, r.c**2)


@pytest.mark.fast
@pytest.mark.parametrize("K", [2, 3, 4, 5])
def test_tie_average_equals_the_expected_vertex_advantage_for_booleans(K):
    """Where the identity holds: all parsed, one format reward per answer class."""
    for y, y_prime, negates in boolean_cases(K):
        V = verifier_matrix(y, y_prime, negates)
        for f_true, f_false in ((1, 1), (1, 0), (0, 1)):
            f, f_prime = np.where(y, f_true, f_false), np.where(y_prime, f_true, f_false)
            A, A_prime = minimal_advantages(y, y_prime, negates, f, f_prime)
            np.testing.assert_allclose(A, expected_vertex_advantage(V, f), atol=1e-12)
            np.testing.assert_allclose(A_prime, expected_vertex_advantage(V.T, f_prime), atol=1e-12)


def test_vertex_rule_averages_to_ours_over_all_orders_of_six_and_three_true_of_eight():
    """The paper's code path itself, run on every arrangement of 6 T/2 F against 3 T/5 F (28 x 56 of them)."""
    true, false = [], []
    for where, where_prime in itertools.product(
        itertools.combinations(range(8), 6), itertools.combinations(range(8), 3)
    ):
        y, y_prime = [i in where for i in range(8)], [j in where_prime for j in range(8)]
        A = grpo(pair_rewards(y, y_prime, False, "minimal_vertex").c)
        true.append(A[y].mean())
        false.append(A[np.invert(y)].mean())
    A = minimal_advantages(answers(6, 2), answers(3, 5))[0]
    np.testing.assert_allclose([A[0], A[7]], [0.126, -0.378], atol=5e-4)
    np.testing.assert_allclose([np.mean(true), np.mean(false)], [A[0], A[7]], atol=1e-12)


@pytest.mark.fast
def test_ties_are_noise_in_the_papers_rule_and_absent_from_ours():
    """8 T against 3 T/5 F: eight identical answers, for which the paper's rule has two advantages."""
    y, y_prime = answers(8, 0), answers(3, 5)
    vertex = grpo(pair_rewards(y, y_prime, False, "minimal_vertex").c)
    np.testing.assert_allclose(np.sort(vertex), [-0.775] * 5 + [1.291] * 3, atol=1e-3)
    np.testing.assert_array_equal(minimal_advantages(y, y_prime)[0], np.zeros(8))


@pytest.mark.fast
def test_unequal_format_within_a_class_gives_the_pooled_std_form_and_no_identity():
    """K = 7, 2 T/5 F against 6 T/1 F, one T without format: 1.32 is ours, 0.94 the paper's in expectation."""
    y, y_prime, f = answers(2, 5), answers(6, 1), np.array([0, 1, 1, 1, 1, 1, 1])
    V = verifier_matrix(y, y_prime, False)
    ours, paper = minimal_advantages(y, y_prime, f=f)[0], expected_vertex_advantage(V, f)
    np.testing.assert_allclose([ours[1], paper[1]], [1.32, 0.94], atol=6e-3)

    r = optimal_matchings(V) + f  # the definition: E[r_i - mean] / sqrt(E[std^2])
    np.testing.assert_allclose(ours, (r - r.mean(1, keepdims=True)).mean(0) / np.sqrt(r.var(1).mean()), atol=1e-12)


@pytest.mark.parametrize("kind", ["count", "distance"])
def test_pooled_std_form_holds_for_numbers_and_any_format_rewards(kind):
    rng = np.random.default_rng(2)
    for _ in range(60):
        y, y_prime = random_groups(rng, 4, kind)
        V, f = verifier_matrix(y, y_prime, False), rng.integers(0, 2, 4)
        if number_of_histogram_plans(y, y_prime, V) > 1:
            continue
        r = optimal_matchings(V) + f
        expected = (r - r.mean(1, keepdims=True)).mean(0)
        if np.ptp(expected) > 1e-9:
            expected /= np.sqrt(r.var(1).mean())
        np.testing.assert_allclose(minimal_advantages(y, y_prime, f=f)[0], expected, atol=1e-9)


@pytest.mark.fast
def test_argmax_of_unequal_groups_pays_nobody_where_ours_pays_each_true_a_ninth():
    y, y_prime = answers(3, 5), answers(2, 1) + [None] * 5
    rng = np.random.default_rng(0)
    for _ in range(20):
        a, b = [y[i] for i in rng.permutation(8)], [y_prime[j] for j in rng.permutation(8)]
        vertex, ours = pair_rewards(a, b, False, "minimal_vertex"), pair_rewards(a, b, False)
        assert not vertex.c.any() and not vertex.c_prime.any()
        np.testing.assert_allclose(ours.c, np.where(a, 1 / 9, 0), atol=1e-12)
        np.testing.assert_allclose(ours.c_prime, [1 / 16 if answer is True else 0 for answer in b], atol=1e-12)


# ---------------------------------------------------------------------------------------------------------
# The algorithms that are not minimal


@pytest.mark.fast
def test_averaging_the_reward_first_is_grpo_with_the_pooled_majority_as_label():
    A = group_advantages(pair_rewards(answers(6, 2), answers(3, 5), False).c)
    np.testing.assert_allclose([A[0], A[7]], [0.577, -1.732], atol=5e-4)
    for y, y_prime, negates in itertools.chain(boolean_cases(5), boolean_cases(8)):
        votes = [*y, *(answer != negates for answer in y_prime)]
        tie = 2 * sum(votes) == len(votes)
        label = 2 * sum(votes) > len(votes)
        rewards = pair_rewards(y, y_prime, negates)
        expected = np.zeros(len(y)) if tie else grpo([answer == label for answer in y])
        np.testing.assert_allclose(group_advantages(rewards.c), expected, atol=1e-9)
        expected = np.zeros(len(y)) if tie else grpo([answer == (label != negates) for answer in y_prime])
        np.testing.assert_allclose(group_advantages(rewards.c_prime), expected, atol=1e-9)
        vote = pair_rewards(y, y_prime, negates, "majority")
        np.testing.assert_allclose(group_advantages(vote.c), group_advantages(rewards.c), atol=1e-9)
        np.testing.assert_allclose(group_advantages(vote.c_prime), group_advantages(rewards.c_prime), atol=1e-9)


@pytest.mark.fast
def test_one_to_all_is_grpo_with_the_other_groups_majority_as_label():
    for y, y_prime, negates in itertools.chain(boolean_cases(5), boolean_cases(8)):
        r = pair_rewards(y, y_prime, negates, "one_to_all")
        for c, group, other in ((r.c, y, y_prime), (r.c_prime, y_prime, y)):
            votes = [answer != negates for answer in other]
            label = 2 * sum(votes) > len(votes)
            expected = grpo([answer == label for answer in group]) if 2 * sum(votes) != len(votes) else np.zeros(len(y))
            np.testing.assert_allclose(group_advantages(c), expected, atol=1e-9)


@pytest.mark.fast
def test_random_and_one_to_all_are_the_definitions_of_section_4_2():
    rng = np.random.default_rng(0)
    for kind in ("boolean", "count", "distance"):
        y, y_prime = random_groups(rng, 8, kind)
        V = verifier_matrix(y, y_prime, False)
        r = pair_rewards(y, y_prime, False, "random")
        np.testing.assert_array_equal([r.c, r.c_prime], [V.diagonal(), V.diagonal()])
        r = pair_rewards(y, y_prime, False, "one_to_all")
        np.testing.assert_allclose([r.c, r.c_prime], [V.sum(1) / 8, V.sum(0) / 8])
        np.testing.assert_array_equal(r.c2, r.c**2)  # its reward *is* the mean: nothing is left to average


@pytest.mark.fast
def test_majority_pays_the_vote_and_nobody_on_a_tie():
    r = pair_rewards([True, True, None, False], [False, None, True, False], True, "majority")  # T: 2 + 2, F: 1 + 1
    np.testing.assert_array_equal([r.c, r.c_prime], [[1, 1, 0, 0], [1, 0, 0, 1]])
    r = pair_rewards(answers(3, 1), answers(1, 3), False, "majority")
    assert not r.c.any() and not r.c_prime.any()


@pytest.mark.fast
def test_majority_of_numbers_is_closeness_to_the_pooled_median():
    r = pair_rewards([2.0, 4.0, None], [4.0, 8.0, 5.0], False, "majority")  # pooled: 2 4 4 5 8
    np.testing.assert_allclose([r.c, r.c_prime], [[0.5, 1, 0], [1, 0.5, 0.8]])
    np.testing.assert_allclose(r.c2, r.c**2)


# ---------------------------------------------------------------------------------------------------------
# Degenerate policies


@pytest.mark.fast
@pytest.mark.parametrize("name", PAIRINGS)
def test_constant_answer_is_consistent_on_invariant_and_never_on_negating_pairs(name):
    y = [True] * 8
    kept = pair_rewards(y, y, False, name)
    np.testing.assert_array_equal([kept.c, kept.c_prime], np.ones((2, 8)))
    negated = pair_rewards(y, y, True, name)
    np.testing.assert_array_equal([negated.c, negated.c_prime], np.zeros((2, 8)))
    number = pair_rewards([3.0] * 8, [3.0] * 8, False, name)  # why counting needs the best constant beside it
    np.testing.assert_allclose([number.c, number.c_prime], np.ones((2, 8)))


@pytest.mark.fast
@pytest.mark.parametrize("K", [1, 2, 3, 4])
def test_guessing_earns_exactly_the_central_binomial_share(K):
    """Proposition A.1 (iii) without the approximation: E[r] = C(2K, K) / 4^K, over all 4^K outcomes."""
    total = 0
    for bits in itertools.product((True, False), repeat=2 * K):
        consistent = pair_rewards(bits[:K], bits[K:], True).c.sum()
        assert consistent == pytest.approx(round(consistent), abs=1e-12)  # a whole number of agreeing pairs
        total += round(consistent)
    assert Fraction(total, K * 4**K) == Fraction(math.comb(2 * K, K), 4**K)


@pytest.mark.fast
def test_guessing_earns_one_half_under_random_and_one_to_all():
    outcomes = list(itertools.product((True, False), repeat=6))
    for name in ("random", "one_to_all"):
        rewards = [pair_rewards(bits[:3], bits[3:], False, name).c for bits in outcomes]
        np.testing.assert_allclose(np.mean(rewards, axis=0), 0.5)


@pytest.mark.fast
def test_random_partner_that_is_unparseable_earns_nothing():
    r = pair_rewards([True, True, None, True], [True, None, True, False], False, "random")
    np.testing.assert_array_equal([r.c, r.c_prime], [[1, 0, 0, 0], [1, 0, 0, 0]])


@pytest.mark.fast
def test_one_to_all_averages_over_parseable_partners_only():
    r = pair_rewards([True, False, None, None], [True, None, None, None], False, "one_to_all")
    np.testing.assert_array_equal([r.c, r.c_prime], [[1, 0, 0, 0], [0.5, 0, 0, 0]])


@pytest.mark.fast
@pytest.mark.parametrize("name", PAIRINGS)
def test_nothing_parseable_on_one_side_earns_nothing_on_either(name):
    for y, y_prime in (([None] * 3, [True] * 3), ([2.0] * 3, [None] * 3), ([None] * 3, [None] * 3)):
        r = pair_rewards(y, y_prime, False, name)
        assert not np.any([r.c, r.c2, r.c_prime, r.c2_prime]) and r.c.shape == (3,)
    assert verifier_matrix([None], [True, False], False).shape == (0, 2)


@pytest.mark.fast
@pytest.mark.parametrize("name", ["minimal", "minimal_vertex"])
def test_unparseable_completions_get_negative_advantage_where_others_are_consistent(name):
    r = pair_rewards([True] * 6 + [None] * 2, [True] * 8, False, name)
    A = group_advantages(r.c, r.c2)
    assert (A[:6] > 0).all() and (A[6:] < 0).all()


@pytest.mark.fast
def test_impossible_requests_are_refused():
    with pytest.raises(ValueError, match="minimal_vertex"):
        pair_rewards([True] * 2, [True] * 2, False, "greedy")
    with pytest.raises(ValueError, match="one size"):
        pair_rewards([True] * 2, [True] * 3, False)
    for name in PAIRINGS:
        with pytest.raises(TypeError):
            pair_rewards([True] * 2, [1.0, 0.0], False, name)
    for name in PAIRINGS:
        with pytest.raises(ValueError, match="no negation"):
            pair_rewards([3.0] * 2, [1.0, 0.0], True, name)


# ---------------------------------------------------------------------------------------------------------
# Advantages: Eq. (2) and requirements 3 and 21


@pytest.mark.fast
def test_advantages_of_certain_rewards_are_eq_2_and_of_uncertain_ones_its_mixture_form():
    rng = np.random.default_rng(0)
    for _ in range(100):
        r, inner = rng.normal(size=8), rng.uniform(0, 2, 8)
        np.testing.assert_allclose(group_advantages(r), grpo(r), atol=1e-12)
        np.testing.assert_allclose(group_advantages(r, r**2), grpo(r), atol=1e-12)
        r2 = r**2 + inner
        std = np.sqrt(r2.mean() - r.mean() ** 2)  # as written in the definition
        np.testing.assert_allclose(group_advantages(r, r2), (r - r.mean()) / std, atol=1e-12)


@pytest.mark.fast
def test_advantages_do_not_change_with_batch_layout():
    A_rewards, B_rewards = np.ones(4), np.zeros(4)
    np.testing.assert_array_equal(group_advantages(np.stack([A_rewards, B_rewards])), np.zeros((2, 4)))

    rng = np.random.default_rng(0)
    r = rng.uniform(size=(6, 8))
    r2 = r**2 + rng.uniform(size=(6, 8))
    alone = np.stack([group_advantages(r[b], r2[b]) for b in range(6)])
    np.testing.assert_array_equal(group_advantages(r, r2), alone)
    np.testing.assert_array_equal(group_advantages(r[::-1], r2[::-1]), alone[::-1])
    np.testing.assert_array_equal(group_advantages(r.reshape(2, 3, 8), r2.reshape(2, 3, 8)), alone.reshape(2, 3, 8))


@pytest.mark.fast
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("value", [0.1, 0.0, 1.0, 1 / 3, 1e4 + 0.1, -2.7])
@pytest.mark.parametrize("K", [2, 3, 7, 8, 16])
def test_group_without_spread_has_exactly_zero_advantages(K, value, dtype):
    r = np.full(K, value, dtype=dtype)
    for second_moment in (None, r * r, r * r + dtype(1)):  # certain in exact and rounded form, and uncertain
        np.testing.assert_array_equal(group_advantages(r, second_moment), np.zeros(K))


@pytest.mark.fast
def test_rounding_errors_do_not_become_advantages_but_small_differences_do():
    r = np.float32(0.1) + np.float32([0, 1, -1, 0, 1, 0, 0, -1]) * np.finfo(np.float32).eps * np.float32(0.1)
    assert np.ptp(r) > 0
    np.testing.assert_array_equal(group_advantages(r), np.zeros(8))
    r = 0.1 + np.array([0, 1e-5, 0, 0])
    np.testing.assert_allclose(group_advantages(r), grpo(r * 1e5), rtol=1e-6)


@pytest.mark.fast
def test_groups_of_one_and_impossible_moments_are_refused():
    for reward in (np.ones(1), np.ones((3, 1)), np.ones(0), np.float64(1)):
        with pytest.raises(ValueError, match="K >= 2"):
            group_advantages(reward)
    for reward, second in (([0, np.nan], None), ([0, np.inf], None), ([0, 1], [0, np.nan]), ([0, 1], [0, 1, 2])):
        with pytest.raises(ValueError, match="finite"):
            group_advantages(reward, second)
    with pytest.raises(ValueError, match="impossible"):
        group_advantages([0.0, 0.5], [0.0, 0.1])


@pytest.mark.fast
def test_format_reward_shifts_both_moments():
    rng = np.random.default_rng(0)
    samples, f = rng.uniform(size=(1000, 5)), np.array([0, 1, 1, 0, 1])
    mean, second = add_format(samples.mean(0), (samples**2).mean(0), f)
    np.testing.assert_allclose(mean, (samples + f).mean(0))
    np.testing.assert_allclose(second, ((samples + f) ** 2).mean(0))


@pytest.mark.fast
def test_documented_examples_hold(capsys):
    assert doctest.testmod(pairing).failed == 0
    pairing.main()
    table = capsys.readouterr().out
    assert all(name in table for name in PAIRINGS) and "-1.732" in table
    assert inspect.signature(pair_rewards).parameters["pairing"].default == "minimal"
