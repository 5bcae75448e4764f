"""ProblemSampler: priorities, pools, the visit guarantee, and the distribution of each mode."""

import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from problems import ACTIVE, MODES, SOLVED, UNSOLVED, ProblemSampler



def play(sampler, success, calls, k, rng, group=8):
    """Selections of `calls` calls, answered with the given success rates."""
    visited = []
    for step in range(calls):
        ids = sampler.select(k, step)
        assert len(set(ids.tolist())) == k and ids.min() >= 0 and ids.max() < sampler.n
        visited.append(ids.tolist())
        for id in ids.tolist():
            sampler.update(id, rng.random(group) < success[id], step)
    return visited


def sampler_at(rates, **arguments):
    """A sampler whose raw estimates are `rates` (multiples of 1/8), every problem visited once, in order of id."""
    sampler = ProblemSampler(len(rates), **({"estimate": "raw"} | arguments))
    order = []
    while len(order) < len(rates):
        order.append(sampler.select(sampler.floor_slots, 0)[0])
    for id, rate in enumerate(rates):
        sampler.update(id, [1] * round(8 * rate) + [0] * (8 - round(8 * rate)), 0)
    sampler.tried = np.arange(len(rates)) + len(rates) * sampler.calls
    sampler._build_heap()
    return sampler


# --------------------------------------------------------------------------------------------------- priorities


def test_priority_is_the_mean_squared_advantage_of_every_outcome():
    # arXiv 2601.02648: A = r - mean(r), priority = mean(A^2) = p(1-p), on all 2^6 outcomes
    for rewards in itertools.product([0, 1], repeat=6):
        sampler = ProblemSampler(1, estimate="raw")
        sampler.update(0, rewards, 0)
        advantages = np.array(rewards) - np.mean(rewards)
        assert sampler.priorities()[0] == pytest.approx((advantages**2).mean(), abs=1e-15)


def test_mixed_group_priority_is_the_chance_of_a_mixed_group():
    sampler = ProblemSampler(1, priority="mixed_group", group_size=4, estimate="raw")
    sampler.update(0, [1, 0, 0, 0], 0)
    outcomes = [math.prod(0.25 if r else 0.75 for r in rewards) for rewards in itertools.product([0, 1], repeat=4)]
    mixed = sum(outcomes[1:-1])  # all but "none" and "all"
    assert sampler.priorities()[0] == pytest.approx(mixed)
    assert mixed == pytest.approx(1 - 0.25**4 - 0.75**4)


def test_decayed_beta_estimate_by_hand():
    sampler = ProblemSampler(2, decay=0.5, prior=1.0)
    assert sampler.success_rates().tolist() == [0.5, 0.5] and sampler.priorities().tolist() == [0.25, 0.25]
    sampler.update(0, [1, 1, 1, 0], 0)
    assert sampler.success_rates()[0] == pytest.approx((3 + 1) / (4 + 2))
    sampler.update(0, [0, 0], 1)  # successes 0.5 * 3, trials 0.5 * 4 + 2
    assert sampler.success_rates()[0] == pytest.approx((1.5 + 1) / (4 + 2))
    raw = ProblemSampler(2, estimate="raw")
    raw.update(0, [1, 1, 1, 0], 0)
    raw.update(0, [0, 0, 0, 1], 0)
    assert raw.success_rates().tolist() == [0.25, 0.5]


# ---------------------------------------------------------------------------------------------------- selection


def test_heap_takes_the_highest_priority_and_breaks_ties_by_the_least_recent():
    #                      0     1    2      3    4      5    6
    sampler = sampler_at([0.125, 0.5, 0.25, 0.5, 0.125, 0.5, 0.875], pool_after=9)
    # floor: 0, tried longest ago. Then the three of 1/2 by age, then 2; 4 and 6 (both 7/64) would follow, 4 first
    assert sampler.select(5, 1).tolist() == [0, 1, 3, 5, 2]
    # nothing was updated: only the times changed. floor: 4; then the ties of 1/2 again, in their new order
    assert sampler.select(4, 2).tolist() == [4, 1, 3, 5]
    sampler.update(6, [1, 0], 2)  # 6 is now one of the best too, tried longest ago of them: the floor takes it
    sampler.update(3, [1] * 8, 2)
    assert sampler.select(4, 3).tolist() == [6, 1, 5, 2]


def reference_heap(sampler, k):
    """The rule, by sorting."""
    retest = sampler.calls + 1
    chosen = sorted(range(sampler.n), key=lambda i: sampler.tried[i])[: sampler.floor_slots]
    pools, priorities = sampler.pools(), sampler.priorities()
    if retest % sampler.retest_every == 0:
        for pool in (SOLVED, UNSOLVED):
            waiting = sorted(
                (i for i in range(sampler.n) if pools[i] == pool and i not in chosen), key=lambda i: sampler.tried[i]
            )
            chosen += waiting[: min(sampler.retest_slots, k - len(chosen))]
    active = sorted(
        (i for i in range(sampler.n) if pools[i] == ACTIVE), key=lambda i: (-priorities[i], sampler.tried[i])
    )
    chosen += [i for i in active if i not in chosen][: k - len(chosen)]
    rest = sorted((i for i in range(sampler.n) if i not in chosen), key=lambda i: sampler.tried[i])
    return chosen + rest[: k - len(chosen)]


@given(
    st.integers(1, 12),
    st.integers(1, 3),
    st.integers(0, 2**32 - 1),
    st.sampled_from(["variance", "mixed_group"]),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_heap_with_lazy_invalidation_equals_sorting(n, floor, seed, priority, raw):
    rng = np.random.default_rng(seed)
    floor = min(floor, n)
    sampler = ProblemSampler(
        n,
        priority=priority,
        floor_slots=floor,
        estimate="raw" if raw else "beta",
        retest_every=3,
        pool_after=2,
        seed=seed,
    )
    for step in range(60):
        k = int(rng.integers(floor, n + 1))
        expected = reference_heap(sampler, k)
        assert sampler.select(k, step).tolist() == expected
        for id in rng.integers(0, n, rng.integers(0, 4)).tolist():  # updates of any problem, also of none
            sampler.update(id, rng.random(4) < rng.choice([0, 0.5, 1]), step)
        assert len(sampler.heap) <= 5 * n + 64 + 4


@given(st.sampled_from([mode for mode in MODES if mode != "shuffled"]), st.integers(1, 30), st.integers(1, 4), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_every_problem_is_visited_in_time(mode, n, floor, seed):
    rng = np.random.default_rng(seed)
    floor = min(floor, n)
    k = int(rng.integers(floor, min(n, floor + 4) + 1))
    sampler = ProblemSampler(n, mode=mode, floor_slots=floor, seed=seed)
    success = rng.choice([0.0, 0.5, 1.0], n)
    bound = math.ceil(n / floor)
    visited = play(sampler, success, 4 * bound + 3, k, rng)
    for start in range(len(visited) - bound + 1):
        assert set(itertools.chain(*visited[start : start + bound])) == set(range(n))


def test_proportional_frequencies():
    # priorities 0.25 : 15/64 : 3/16 : 7/64 by p = 1/2, 3/8, 1/4, 1/8; k = 2, one of them the floor's
    sampler = sampler_at([0.5, 0.375, 0.25, 0.125], mode="proportional", alpha=2.0, eps=0.0)
    weights = np.array([16, 15, 12, 7]) ** 2.0
    np.testing.assert_allclose(
        np.exp(sampler._log_weights()) / np.exp(sampler._log_weights()).sum(), weights / weights.sum()
    )
    counts, draws = np.zeros(4), 8000
    for _ in range(draws):
        counts[sampler._draw(1, np.array([2]))] += 1  # without problem 2
    expected = draws * np.where(np.arange(4) == 2, 0, weights) / weights[[0, 1, 3]].sum()
    assert counts[2] == 0 and (np.abs(counts - expected) <= 5 * np.sqrt(expected)).all()


def test_draws_without_replacement_are_as_if_one_by_one():
    sampler = sampler_at([0.5, 0.25, 0.125], mode="proportional", eps=0.0)
    p = np.array([16, 12, 7]) / 35
    counts, draws = {}, 8000
    for _ in range(draws):
        pair = tuple(sampler._draw(2, np.zeros(0, int)).tolist())
        counts[pair] = counts.get(pair, 0) + 1
    for (i, j), count in counts.items():
        expected = draws * p[i] * p[j] / (1 - p[i])
        assert abs(count - expected) < 5 * math.sqrt(expected)
    assert len(counts) == 6


def test_band_stays_inside_and_is_filled_by_the_least_recent():
    sampler = sampler_at([0.5, 0.125, 0.75, 0.25, 0.875, 0.375], mode="band", pool_after=9)
    for _ in range(20):
        assert set(sampler._draw(3, np.array([0])).tolist()) <= {2, 3, 5}
    assert set(sampler.select(6, 1).tolist()) == set(range(6))


def test_dots_prefers_the_target_difficulty():
    # arXiv 2506.05316: P ∝ exp(-|d - target|/temperature), d = 1 - p
    sampler = sampler_at([0.5, 0.25, 0.75, 0.0], mode="dots", target=0.75, temperature=0.25)
    weights = np.exp(sampler._log_weights())
    np.testing.assert_allclose(weights, np.exp([-1, 0, -2, -1]))


@pytest.mark.parametrize("n, k", [(12, 4), (12, 5), (7, 7), (5, 3)])
def test_a_shuffled_pass_asks_every_problem_before_any_comes_again(n, k):
    sampler, rng = ProblemSampler(n, mode="shuffled", seed=3), np.random.default_rng(0)
    asked = list(itertools.chain(*play(sampler, [0.5] * n, 10 * n, k, rng)))
    passes = [asked[start:start + n] for start in range(0, len(asked), n)]
    if n % k == 0:  # three batches of four of twelve problems: all twelve, in another order each time
        assert all(sorted(each) == list(range(n)) for each in passes) and passes[0] != passes[1]
    counts = np.bincount(asked, minlength=n)
    assert counts.max() - counts.min() <= 1
    first = [tuple(ProblemSampler(n, mode="shuffled", seed=seed).select(k, 0).tolist()) for seed in range(20)]
    assert len(set(first)) > 1


def test_uniform_is_uniform():
    sampler, rng = ProblemSampler(6, mode="uniform"), np.random.default_rng(0)
    visited = play(sampler, [0.0, 1.0, 0.5, 0.5, 0.5, 0.5], 3000, 3, rng)
    counts = np.bincount(list(itertools.chain(*visited)))
    assert np.abs(counts - 1500).max() < 5 * math.sqrt(1500)
    assert sampler.stats(3000)["retests_total"] == 0


# --------------------------------------------------------------------------------------------------------- pools


def test_solved_and_unsolved_leave_and_return():
    sampler = ProblemSampler(3, pool_after=2)
    sampler.update(0, [1, 1], 0)
    sampler.update(1, [0, 0], 0)
    assert sampler.pools().tolist() == [ACTIVE] * 3
    sampler.update(0, [1, 1], 1)
    sampler.update(1, [0, 0], 1)
    assert sampler.pools().tolist() == [SOLVED, UNSOLVED, ACTIVE]
    sampler.update(0, [1, 1], 2)
    assert sampler.pools()[0] == SOLVED and sampler.stats(2)["regressed_total"] == 0
    sampler.update(0, [1, 0], 3)
    sampler.update(1, [0, 1], 3)
    assert sampler.pools().tolist() == [ACTIVE] * 3
    assert (sampler.stats(3)["regressed_total"], sampler.stats(3)["rescued_total"]) == (1, 1)
    sampler.update(0, [1, 1], 4)  # one success after a mixed visit is not two in a row
    assert sampler.pools()[0] == ACTIVE


def test_retests_come_on_schedule_and_are_counted():
    sampler, rng = ProblemSampler(40, retest_every=4, retest_slots=2), np.random.default_rng(0)
    success = np.repeat([0.0, 1.0, 0.5, 0.5], 10)
    play(sampler, success, 60, 4, rng)
    pools = sampler.pools()
    before = sampler.retests
    for step in range(60, 68):
        ids = sampler.select(6, step)
        retested = [id for id in ids[1:] if pools[id] != ACTIVE]  # [0] is the floor's
        assert len(retested) == (4 if sampler.calls % 4 == 0 else 0)
    assert sampler.retests - before == 8 and sampler.stats(68)["retests_total"] == sampler.retests


def test_heap_asks_the_undecided_problems_more():
    rng, success = np.random.default_rng(0), np.repeat([0.0, 1.0, 0.5], 10)
    visits = {mode: np.array(play(ProblemSampler(30, mode=mode), success, 200, 5, rng)) for mode in MODES}
    share = {mode: (ids >= 20).mean() for mode, ids in visits.items()}
    assert share["uniform"] == pytest.approx(1 / 3, abs=0.03)
    assert share["shuffled"] == pytest.approx(1 / 3, abs=1e-3)
    assert all(share[mode] > 0.45 for mode in MODES if mode not in ("uniform", "shuffled"))
    assert share["heap"] > 0.65


def test_retests_find_what_changed():
    """A problem that becomes solvable only later is found again; with no retests only the floor would look at it."""
    rng, success = np.random.default_rng(0), np.zeros(20)
    success[10:] = 0.5
    sampler = ProblemSampler(20)
    play(sampler, success, 40, 4, rng)
    assert sampler.stats(40)["unsolved"] == 10
    success[:] = 0.5
    play(sampler, success, 40, 4, rng)
    assert sampler.stats(80)["unsolved"] == 0 and sampler.stats(80)["rescued_total"] >= 10


# ---------------------------------------------------------------------------------------------- state and errors


@pytest.mark.parametrize("mode", MODES)
def test_state_continues_alike(mode):
    success = np.random.default_rng(1).choice([0.0, 0.5, 1.0], 25)
    one = ProblemSampler(25, mode=mode, seed=3)
    play(one, success, 30, 4, np.random.default_rng(2))
    state = one.state_dict()
    plain = json.loads(json.dumps({key: value for key, value in state.items() if not isinstance(value, np.ndarray)}))
    two = ProblemSampler(25, mode=mode, seed=99)
    two.load_state_dict({key: plain.get(key, value) for key, value in state.items()})
    assert play(one, success, 30, 4, np.random.default_rng(5)) == play(two, success, 30, 4, np.random.default_rng(5))
    assert one.stats(60) == two.stats(60)


def test_state_is_a_copy():
    sampler = ProblemSampler(3)
    state = sampler.state_dict()
    sampler.update(0, [1], 0)
    assert state["trials"].tolist() == [0, 0, 0]


def test_stats_before_and_after():
    sampler = ProblemSampler(5)
    stats = sampler.stats(0)
    assert stats["untried"] == 5 and stats["since_visit_max"] is None and stats["priority_mean"] is stats["success_rate_mean"] is None
    sampler.select(2, 10)
    sampler.select(2, 14)
    assert sampler.stats(20)["untried"] == 1 and sampler.stats(20)["since_visit_max"] == 10
    json.dumps(sampler.stats(20), allow_nan=False)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda s: s.select(0, 0), "k=0 must lie between floor_slots=1 and the n=4 problems"),
        (lambda s: s.select(5, 0), "k=5 must lie"),
        (lambda s: s.update(4, [1], 0), r"problem id 4 is not one of 0\.\.3"),
        (lambda s: s.update(-1, [1], 0), "problem id -1"),
        (lambda s: s.update(0, [0.5, 1], 0), r"rewards\[0\] is 0.5; a success is 0 or 1"),
        (lambda s: s.update(0, [math.nan], 0), r"rewards\[0\] is nan"),
        (lambda s: s.update(0, [], 0), r"rewards has shape \(0,\)"),
        (lambda s: s.load_state_dict(ProblemSampler(7).state_dict()), "has 7 problems, this one n=4"),
    ],
)
def test_bad_input_names_itself_and_changes_nothing(call, message):
    sampler = ProblemSampler(4)
    before = sampler.state_dict()
    with pytest.raises(ValueError, match=message):
        call(sampler)
    after = sampler.state_dict()
    assert all(np.array_equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"mode": "heapq"}, "did you mean heap"),
        ({"priority": "varience"}, "did you mean variance"),
        ({"estimate": "bta"}, "did you mean beta"),
        ({"floor_slots": 0}, "floor_slots is 0"),
        ({"decay": 2.0}, "decay=2.0"),
        ({"band": (0.8, 0.2)}, "band is"),
        ({"group_size": 1}, "group_size is 1"),
    ],
)
def test_wrong_settings_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        ProblemSampler(4, **arguments)
