"""buffer.py against hand-computed values, enumeration and an oracle that ages every entry explicitly."""

import json
import math
import tracemalloc
from decimal import Decimal, localcontext

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from buffer import AGE_LAWS, ReplayBuffer
from drift import DriftEstimator, sequence_kl, token_kl
from episode import Episode, pack_episodes, unpack_episodes
from runtime.metrics import use_stats


def make(step=0, length=5, score=1.0, group=0, advantage=0.5, success=None, **fields):
    mask = np.arange(length) >= 2
    record = dict(
        tokens=np.arange(length), action_mask=mask, behavior_logprobs=np.where(mask, -1.0, 0.0),
        advantages=np.where(mask, advantage, 0.0), turn_ends=[length], turn_rewards=[score], reward=score, score=score,
        problem_id=0, group_id=group, policy_step=step, last_policy_step=step, iteration=step,
        info={} if success is None else {"success": success},
    )  # fmt: skip
    return Episode(**(record | fields))


def filled(base, birthdays=None, step=None, **arguments):
    birthdays = [0] * len(base) if birthdays is None else birthdays
    buffer = ReplayBuffer(len(base), **({"alpha": 1.0} | arguments))
    buffer.add([make()] * len(base), max(birthdays) if step is None else step, birthdays, base)
    return buffer


def check_valid(buffer):
    """Assert every invariant that ties the parts together, O(N)."""
    slots, counts = buffer.live(), buffer.counts
    np.testing.assert_array_equal(buffer.slots(buffer.id[slots]), slots)
    assert len(buffer.slot_of) == len(slots) == len(buffer), "the map of ids has dead ones"
    assert sorted(buffer.free + slots.tolist()) == list(range(len(buffer.id))), "a slot is lost, or free twice"
    assert len(buffer) <= buffer.capacity, f"{len(buffer)} entries, capacity {buffer.capacity}"
    assert all(bool(members) == (id >= 0) for members, id in zip(buffer.members, buffer.id)), "a slot without episodes"
    free = np.setdiff1d(np.arange(len(buffer.id)), slots)
    assert all((getattr(buffer, name)[free] == empty).all() for name, empty in buffer.columns.items()), "not empty"
    assert counts["drawn"] == buffer.uses[slots].sum() + counts["retired_uses"], "uses do not add up"
    assert counts["added"] == len(buffer) + counts["evicted"] + counts["dropped_by_age"], "entries do not add up"


def same(one, two):
    """Deep equality of two state dicts."""
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
    if isinstance(one, np.ndarray):
        return one.dtype == two.dtype and np.array_equal(one, two)
    return one == two


def inclusion_probabilities(weights, n):
    """Brute force: the k largest are certain, the smallest k for which the others stay below 1."""
    order = np.argsort(-weights, kind="stable")
    for certain in range(n + 1):
        rest = order[certain:]
        pi = np.ones(len(weights))
        pi[rest] = (n - certain) * weights[rest] / max(weights[rest].sum(), 1e-300)
        if (pi[rest] < 1 - 1e-9).all():
            return pi


# ------------------------------------------------------------------------------------------------------ Episode


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"action_mask": [True]}, "action_mask has length 1, but tokens has length 5"),
        ({"advantages": np.zeros(6)}, "advantages has length 6"),
        ({"values": np.zeros(2)}, "values has length 2"),
        ({"tokens": np.zeros((5, 1), int)}, r"tokens has shape \(5, 1\)"),
        ({"tokens": [0.5, 1, 2, 3, 4]}, "tokens has dtype float64"),
        ({"tokens": [2**31, 1, 2, 3, 4]}, "tokens does not fit in int32"),
        (
            {"tokens": [], "action_mask": [], "behavior_logprobs": [], "advantages": [], "turn_ends": [0]},
            "tokens is empty",
        ),
        ({"action_mask": [0, 0, 2, 1, 1]}, "action_mask must be of True and False"),
        ({"behavior_logprobs": [0, 0, -1, np.nan, -1]}, r"behavior_logprobs\[3\] is nan; it must be finite"),
        ({"behavior_logprobs": [0, 0, -1, -np.inf, -1]}, r"behavior_logprobs\[3\] is -inf"),
        ({"behavior_logprobs": [0, 0, -1, 0.5, -1]}, r"behavior_logprobs\[3\] is 0.5; a log-probability is at most 0"),
        ({"behavior_logprobs": [0, -2, -1, -1, -1]}, r"behavior_logprobs\[1\] is -2.0; it must be 0 where action_mask"),
        ({"advantages": [1, 0, 0, 0, 0]}, r"advantages\[0\] is 1.0; it must be 0 where action_mask"),
        ({"advantages": [0, 0, np.inf, 0, 0]}, r"advantages\[2\] is inf"),
        ({"values": [0, 0, np.nan, 0, 0]}, r"values\[2\] is nan"),
        ({"turn_ends": [2, 5]}, "turn_rewards has length 1, but turn_ends has length 2"),
        ({"turn_ends": [6]}, r"turn_ends \[6\] must rise"),
        ({"turn_rewards": [np.nan]}, r"turn_rewards\[0\] is nan"),
        ({"reward": math.inf}, "reward is inf"),
        ({"score": math.nan, "reward": 0.0, "turn_rewards": [0]}, "score is nan"),
        ({"policy_step": 4, "last_policy_step": 3}, "policy_step 4 is after last_policy_step 3"),
        ({"images": [np.zeros((2, 2, 3))]}, r"images\[0\] must be \(height, width, 3\) uint8"),
    ],
)
def test_a_wrong_episode_is_refused_with_its_field_and_value(fields, message):
    with pytest.raises(ValueError, match=message):
        make(**fields)


def test_what_cannot_be_saved_is_refused_when_it_is_made():
    with pytest.raises(TypeError):
        make(info={"success": np.float32(1)})
    with pytest.raises(TypeError):
        make(policy_step=1.5)


def test_episode_dtypes_rounding_and_defaults():
    episode = make(behavior_logprobs=[0, 0, 1e-7, -1, -1], advantages=[0, 0, 1, 2, 3])
    dtypes = [getattr(episode, name).dtype for name in ("tokens", "action_mask", "behavior_logprobs", "advantages")]
    assert dtypes == [np.int32, np.bool_, np.float32, np.float32]
    assert episode.values is None and episode.images is None and episode.info == {}


def test_a_slice_of_a_padded_array_does_not_keep_the_padding():
    padded, pixels = np.zeros(4096, np.float32), np.zeros((9, 2, 2, 3), np.uint8)
    episode = make(advantages=padded[:5], images=[pixels[0]])
    assert episode.advantages.base is None and episode.images[0].base is None
    padded[2] = 7
    assert episode.advantages[2] == 0


def test_advantages_filled_in_later_are_checked_by_add():
    episode, buffer = make(), ReplayBuffer(4)
    episode.advantages = [0, 0, 1.0, 2.0, 3.0]
    buffer.add([episode], 0)
    assert episode.advantages.dtype == np.float32
    before = buffer.state_dict()
    episode.advantages = np.full(5, np.nan)
    with pytest.raises(ValueError, match="advantages"):
        buffer.add([episode], 0)
    episode.advantages = np.zeros(5)
    episode.advantages[2:] = [1, 2, 3]
    episode.validate()
    assert same(before, buffer.state_dict())


@st.composite
def episodes(draw):
    length = draw(st.integers(1, 6))
    mask = np.array(draw(st.lists(st.booleans(), min_size=length, max_size=length)))
    number = st.floats(-5, 5, width=32)
    numbers = np.array(draw(st.lists(number, min_size=length, max_size=length)), np.float32)
    turns = draw(st.integers(0, 2))
    images = draw(st.none() | st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), max_size=2))
    step = draw(st.integers(0, 2**40))
    return make(
        length=length, action_mask=mask, behavior_logprobs=np.where(mask, -np.abs(numbers), 0),
        advantages=np.where(mask, numbers, 0), turn_ends=[length] * turns, turn_rewards=[0.5] * turns, policy_step=step,
        last_policy_step=step + 1, values=draw(st.none() | st.just(numbers)), reward=draw(st.floats(-9, 9)),
        images=images and [np.full((h, w, 3), h + w, np.uint8) for h, w in images],
        info={"success": draw(st.booleans())},
    )  # fmt: skip


def assert_equal_episodes(one, two):
    for name in Episode.__dataclass_fields__:
        a, b = getattr(one, name), getattr(two, name)
        if name == "images":
            assert (a is None) == (b is None) and len(a or []) == len(b or [])
            assert all(np.array_equal(x, y) for x, y in zip(a or [], b or []))
        elif isinstance(a, np.ndarray):
            assert a.dtype == b.dtype and np.array_equal(a, b), name
        else:
            assert a == b, name


@given(st.lists(episodes(), max_size=4))
@settings(max_examples=50, deadline=None)
def test_episodes_survive_packing(batch):
    packed = pack_episodes(batch)
    assert all(
        isinstance(value, np.ndarray) and value.dtype != object for key, value in packed.items() if key != "info"
    )
    for one, two in zip(batch, unpack_episodes(packed), strict=True):
        assert_equal_episodes(one, two)


# ------------------------------------------------------------------------------------------- what others got wrong


def test_the_newest_item_is_drawn_as_often_as_the_others():
    # stable-baselines#941: priorities [1, 1, 1], 30k draws
    buffer = filled([1.0, 1.0, 1.0], draw="iid")
    counts = np.bincount(buffer.sample(30_000, 0).ids, minlength=3)
    assert np.abs(counts - 10_000).max() < 5 * math.sqrt(30_000 * (1 / 3) * (2 / 3))


def test_alpha_is_applied_once():
    # pytorch/rl PR #3925: alpha 0.5, p = 4 against 1 -> 2 : 1, not sqrt(2) : 1
    _, p = filled([4.0, 1.0], alpha=0.5).probabilities(0)
    np.testing.assert_allclose(p, [2 / 3, 1 / 3], rtol=1e-14)


# ---------------------------------------------------------------------------------------------- probabilities


def effective_log_priority(log_base, age, tau):
    """log p - age/tau, with so many digits that an age of 1e9 at tau = 1e-3 loses none of log p."""
    with localcontext(prec=60):
        return Decimal(log_base) - (0 if tau == math.inf else Decimal(int(age)) / Decimal(tau))


def oracle_probabilities(log_base, birthdays, step, alpha, tau):
    """Ages every entry explicitly."""
    if alpha == 0:
        return np.full(len(log_base), 1 / len(log_base))
    logits = [effective_log_priority(lp, step - b, tau) for lp, b in zip(log_base, birthdays)]
    with localcontext(prec=60):
        mass = np.exp([float(Decimal(alpha) * (logit - max(logits))) for logit in logits])
    return mass / mass.sum()


class BufferAgainstOracle(RuleBasedStateMachine):
    """An O(N) list of (id, base, birthday), aged at every look, beside the buffer."""

    @initialize(
        capacity=st.integers(1, 12), alpha=st.sampled_from([0.0, 0.6, 1.0, 3.0]),
        eviction=st.sampled_from(["fifo", "lowest_priority"]),
        tau=st.sampled_from([1e-3, 0.5, 10.0, 500.0, math.inf]), max_age=st.sampled_from([None, 0, 50]),
        start=st.sampled_from([0, 10**9]), seed=st.integers(0, 99),
    )  # fmt: skip
    def begin(self, capacity, alpha, eviction, tau, max_age, start, seed):
        self.buffer = ReplayBuffer(capacity, alpha=alpha, tau=tau, eviction=eviction, max_age=max_age, seed=seed)
        self.entries, self.step, self.given, self.added, self.drawn = {}, start, [], 0, 0
        self.max_age = math.inf if max_age is None else max_age

    def forget_old(self):
        self.entries = {i: (p, b) for i, (p, b) in self.entries.items() if self.step - b <= self.max_age}

    @rule(ages=st.lists(st.integers(0, 60), min_size=1, max_size=8), data=st.data())
    def add(self, ages, data):
        base = data.draw(
            st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0, 1e-8, 1e200]), min_size=len(ages), max_size=len(ages))
        )
        birthdays = [self.step - age for age in ages]
        ids = self.buffer.add([make() for _ in ages], self.step, birthdays, base).tolist()
        assert not set(ids) & set(self.given), "an id was given out twice"
        self.given += ids
        self.added += len(ids)
        self.entries |= {i: (p, b) for i, p, b in zip(ids, base, birthdays)}
        self.forget_old()
        if self.buffer.eviction == "fifo":
            rank = lambda i: i  # noqa: E731
        else:
            aged = {
                i: effective_log_priority(log(p), self.step - b, self.buffer.tau) for i, (p, b) in self.entries.items()
            }
            rank = lambda i: (aged[i], i)  # noqa: E731
        for i in sorted(self.entries, key=rank)[: max(0, len(self.entries) - self.buffer.capacity)]:
            del self.entries[i]

    @precondition(lambda self: self.given)
    @rule(data=st.data())
    def update(self, data):
        ids = data.draw(st.lists(st.sampled_from(self.given), min_size=1, max_size=6))
        base = [data.draw(st.sampled_from([0.0, 0.25, 2.0, 7.0])) for _ in ids]
        applied = self.buffer.update_priorities(ids, base)
        assert applied == sum(i in self.entries for i in ids)
        for i in set(ids) & set(self.entries):
            values = [b for j, b in zip(ids, base) if j == i]
            self.entries[i] = (sum(values) / len(values), self.entries[i][1])

    @rule(steps=st.sampled_from([1, 7, 1000, 10**9]))
    def age(self, steps):
        self.step += steps

    @rule(tau=st.sampled_from([1e-3, 2.0, 77.0, math.inf]))
    def set_tau(self, tau):
        self.buffer.set_tau(tau)

    @rule(n=st.integers(1, 6))
    def sample(self, n):
        alive = {i for i, (p, b) in self.entries.items() if self.step - b <= self.max_age}
        possible = {i for i in alive if self.entries[i][0] > 0 or self.buffer.alpha == 0}
        assert self.buffer.ready(n, self.step) == (len(possible) >= n)
        if len(possible) < n:
            before = self.buffer.state_dict()
            with pytest.raises(ValueError):
                self.buffer.sample(n, self.step)
            assert same(before, self.buffer.state_dict())
            return
        sample = self.buffer.sample(n, self.step)
        self.forget_old()
        self.drawn += n
        assert len(set(sample.ids.tolist())) == n and set(sample.ids.tolist()) <= possible
        assert sample.ages.tolist() == [self.step - self.entries[i][1] for i in sample.ids.tolist()]
        ids, p = self.buffer.probabilities(self.step)
        np.testing.assert_allclose(sample.probabilities, p[np.searchsorted(ids, sample.ids)], atol=1e-9)
        pi = inclusion_probabilities(p, n)
        if np.count_nonzero(p > 1e-250) >= n:  # else p does not hold what decides
            np.testing.assert_allclose(sample.inclusion, pi[np.searchsorted(ids, sample.ids)], atol=1e-7)
        assert 0 < sample.weights.max() == 1

    @rule()
    def save_and_load(self):
        state = json.loads(
            json.dumps({k: v for k, v in self.buffer.state_dict().items() if not isinstance(v, np.ndarray)})
        )
        state |= {k: v for k, v in self.buffer.state_dict().items() if isinstance(v, np.ndarray)}
        loaded = ReplayBuffer(**self.buffer.config)
        loaded.load_state_dict(state)
        assert same(loaded.state_dict(), self.buffer.state_dict())
        self.buffer = loaded

    @invariant()
    def agrees(self):
        if not hasattr(self, "buffer"):
            return
        check_valid(self.buffer)
        counts = self.buffer.counts
        assert (counts["added"], counts["drawn"], len(self.buffer)) == (self.added, self.drawn, len(self.entries))
        alive = sorted(i for i, (_, b) in self.entries.items() if self.step - b <= self.max_age)
        if not any(self.entries[i][0] > 0 or self.buffer.alpha == 0 for i in alive):
            with pytest.raises(ValueError):
                self.buffer.probabilities(self.step)
            return
        ids, p = self.buffer.probabilities(self.step)
        assert ids.tolist() == alive
        log_base, birthdays = [log(self.entries[i][0]) for i in alive], [self.entries[i][1] for i in alive]
        expected = oracle_probabilities(log_base, birthdays, self.step, self.buffer.alpha, self.buffer.tau)
        digits = 1e-15 * (self.step - min(birthdays)) / self.buffer.tau  # an age of a billion tau has no more
        np.testing.assert_allclose(p, expected, atol=1e-9 + digits)


def log(base):
    return math.log(base) if base else -math.inf


TestBufferAgainstOracle = BufferAgainstOracle.TestCase
TestBufferAgainstOracle.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


@pytest.mark.slow
class TestBufferAgainstOracleWide(BufferAgainstOracle.TestCase):
    settings = settings(
        max_examples=1500, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
    )


@pytest.mark.parametrize("tau", [1e-3, 1.0, 500.0, math.inf])
def test_the_distribution_depends_on_ages_not_on_the_date(tau):
    rng = np.random.default_rng(0)
    base, ages = rng.random(40) + 0.01, rng.integers(0, 2000, 40)
    reference = None
    for step in (2000, 10**6, 10**9, 10**12):
        _, p = filled(base, step - ages, step, alpha=0.6, tau=tau).probabilities(step)
        reference = p if reference is None else reference
        np.testing.assert_allclose(p, reference, atol=1e-15)
    np.testing.assert_allclose(reference, oracle_probabilities(np.log(base), -ages, 0, 0.6, tau), atol=1e-14)


def test_weights_survive_a_billion_steps_without_a_rebuild_by_the_user():
    buffer = ReplayBuffer(50, tau=10.0, alpha=0.6)
    for step in range(0, 10**9, 10**7):
        buffer.add([make(step)] * 20, step, base=np.arange(1.0, 21.0))
        buffer.add([make(step)] * 20, step + 3, [step + 3] * 20, np.arange(1.0, 21.0))
        ids, p = buffer.probabilities(step + 5)
        newest = buffer.birthday[buffer.slots(ids)] == step + 3
        expected = 1 / (1 + math.exp(-0.6 * 3 / 10))
        np.testing.assert_allclose(p[newest].sum(), expected, rtol=1e-9)
        buffer.sample(10, step + 5)
        check_valid(buffer)


def test_per_and_uniform_are_special_cases():
    base, birthdays = [1.0, 2.0, 4.0], [0, 10, 100]
    _, per = filled(base, birthdays, alpha=0.5, tau=math.inf).probabilities(100)
    np.testing.assert_allclose(per, np.sqrt(base) / np.sqrt(base).sum(), rtol=1e-14)
    _, uniform = filled(base, birthdays, alpha=0.0, tau=1.0).probabilities(100)
    np.testing.assert_allclose(uniform, 1 / 3)


def test_half_life_of_the_sampling_weight():
    buffer = filled([1.0, 1.0], [0, 100], alpha=0.6, tau=0.6 * 100 / math.log(2))
    _, p = buffer.probabilities(100)
    np.testing.assert_allclose(p[1] / p[0], 2.0, rtol=1e-12)
    assert buffer.stats(100)["sampling_half_life"] == pytest.approx(100)


def test_age_unit_is_what_the_caller_passes():
    episodes_ = [make(step=12 * k, iteration=k) for k in range(4)]  # 12 optimiser steps an iteration
    by_step, by_iteration = ReplayBuffer(4, alpha=1.0, tau=10.0), ReplayBuffer(4, alpha=1.0, tau=10.0)
    by_step.add(episodes_, 36)
    by_iteration.add(episodes_, 3, birthdays=[e.iteration for e in episodes_])
    ratio = [p[3] / p[2] for p in (by_step.probabilities(36)[1], by_iteration.probabilities(3)[1])]
    np.testing.assert_allclose(ratio, [math.exp(1.2), math.exp(0.1)])


def test_the_birthday_is_the_first_token_not_the_step_of_add():
    buffer = ReplayBuffer(4)
    buffer.add([make(3, last_policy_step=5)], 9)
    assert buffer.sample(1, 10).ages.tolist() == [7]
    with pytest.raises(ValueError, match="birthday 3 is later than step=2"):
        buffer.add([make(3)], 2)


# ----------------------------------------------------------------------------------------------------- age laws


LAWS = {
    "exponential": lambda age, tau: math.exp(-age / tau),
    "power": lambda age, tau: 1 / (1 + age / tau),
    "none": lambda age, tau: 1.0,
}


def aged_by_hand(base, birthdays, step, law, alpha, tau):
    return np.array([(p * LAWS[law](step - b, tau)) ** alpha for p, b in zip(base, birthdays)])


@pytest.mark.parametrize(
    "law, mass", [("exponential", [3 * math.exp(-2), 2 * math.exp(-1), 1]), ("power", [1, 1, 1]), ("none", [3, 2, 1])]
)
def test_age_laws_by_hand(law, mass):
    """Ages 20, 10 and 0 at tau = 10: f is e^-2, e^-1, 1 | 1/3, 1/2, 1 | 1, 1, 1; bases 3, 2, 1."""
    buffer = filled([3.0, 2.0, 1.0], [0, 10, 20], tau=10.0, age_law=law, beta=1.0, seed=3)
    np.testing.assert_allclose(buffer.probabilities(20)[1], np.array(mass) / sum(mass), rtol=1e-12)
    whole = filled([3.0, 2.0, 1.0], [0, 10, 20], tau=10.0, age_law=law, beta=1.0, is_includes_age=True, draw="iid", seed=3)
    kept = filled([3.0, 2.0, 1.0], [0, 10, 20], tau=10.0, age_law=law, beta=1.0, draw="iid", seed=3)
    sample, other = whole.sample(64, 20), kept.sample(64, 20)
    assert set(sample.ids.tolist()) == {0, 1, 2} and np.array_equal(sample.ids, other.ids)
    undone = 1 / np.array(mass)[sample.ids]  # base and age
    np.testing.assert_allclose(sample.weights, undone / undone.max(), rtol=1e-5)
    undone = 1 / np.array([3.0, 2.0, 1.0])[sample.ids]  # the base alone
    np.testing.assert_allclose(other.weights, undone / undone.max(), rtol=1e-5)


@pytest.mark.parametrize("law, gone", [("exponential", 0), ("power", 1), ("none", 2)])
def test_lowest_priority_follows_the_age_law(law, gone):
    """Ages 90, 10, 0 at tau = 10, bases 11, 1.8, 1.1: 0.0014, 0.66, 1.1 | 1.1, 0.9, 1.1 | 11, 1.8, 1.1; the new one has 1.5."""
    buffer = filled([11.0, 1.8, 1.1], [0, 80, 90], step=90, tau=10.0, age_law=law, eviction="lowest_priority")
    buffer.add([make()], 90, [90], [1.5])
    assert sorted(buffer.probabilities(90)[0].tolist()) == [id for id in range(4) if id != gone]


@pytest.mark.parametrize("law", LAWS)
@given(st.integers(0, 10**6), st.sampled_from([0.3, 1.0, 2.0]), st.sampled_from([0.5, 20.0, math.inf]), st.booleans())
@settings(max_examples=25, deadline=None)
def test_draws_probabilities_weights_and_eviction_have_one_age_law(law, seed, alpha, tau, includes_age):
    rng, step, n = np.random.default_rng(seed), 1000, 4
    base, birthdays = rng.random(14) + 0.05, rng.integers(980, step + 1, 14)
    how = {"alpha": alpha, "tau": tau, "beta": 0.7, "age_law": law, "is_includes_age": includes_age}
    buffer = ReplayBuffer(12, eviction="lowest_priority", **how)
    buffer.add([make()] * 14, step, birthdays, base)
    kept = np.sort(np.argsort(aged_by_hand(base, birthdays, step, law, 1.0, tau), kind="stable")[2:])
    ids, p = buffer.probabilities(step)
    assert ids.tolist() == kept.tolist()
    mass = aged_by_hand(base[kept], birthdays[kept], step, law, alpha, tau)
    np.testing.assert_allclose(p, mass / mass.sum(), rtol=1e-9)
    sample = buffer.sample(n, step)
    place = np.searchsorted(kept, sample.ids)
    np.testing.assert_allclose(sample.probabilities, p[place], rtol=1e-9)
    np.testing.assert_allclose(sample.inclusion, inclusion_probabilities(mass, n)[place], rtol=1e-6)
    age_factor = 1.0 if includes_age else aged_by_hand(np.ones(12), birthdays[kept], step, law, alpha, tau)[place]
    weights = (sample.inclusion / age_factor) ** -0.7
    np.testing.assert_allclose(sample.weights, weights / weights.max(), rtol=1e-5)


@pytest.mark.parametrize("law", LAWS)
def test_without_decay_all_age_laws_are_per(law):
    buffer = filled([1.0, 2.0, 4.0], [0, 10, 100], tau=math.inf, age_law=law)
    np.testing.assert_allclose(buffer.probabilities(10**6)[1], np.array([1, 2, 4]) / 7, rtol=1e-14)


def test_half_lives():
    """Where the weight of a draw really is one half."""
    for law, age in (("exponential", 100), ("power", 100)):
        tau = 0.5 * 100 / math.log(2) if law == "exponential" else 100 / 3  # alpha 0.5: (1 + 100/tau)^-0.5 = 0.5
        buffer = filled([1.0, 1.0], [0, age], alpha=0.5, tau=tau, age_law=law)
        np.testing.assert_allclose(buffer.probabilities(age)[1], [1 / 3, 2 / 3], rtol=1e-12)
        assert buffer.stats(age)["sampling_half_life"] == pytest.approx(age)
    for arguments in ({"age_law": "none"}, {"alpha": 0.0}, {"tau": math.inf}, {"age_law": "power", "tau": math.inf}):
        assert filled([1.0], **arguments).stats(0)["sampling_half_life"] is None


def test_an_age_law_sees_every_column(monkeypatch):
    """An ablation: what was drawn often ages faster."""
    monkeypatch.setitem(AGE_LAWS, "none", lambda entries, step, tau: -entries["uses"] * entries["age"] / tau)
    buffer = filled([1.0, 1.0], [0, 0], tau=10.0, age_law="none", seed=1)
    drawn = buffer.sample(1, 10).ids[0]
    np.testing.assert_allclose(buffer.probabilities(10)[1][drawn], math.exp(-1) / (1 + math.exp(-1)))


# --------------------------------------------------------------------------------------------------------- draws


@pytest.mark.parametrize("n", [1, 3, 5, 8])
def test_systematic_inclusion_frequencies(n):
    weights, draws = np.array([50.0, 20.0, 5.0, 3.0, 2.0, 1.0, 1.0, 0.5, 0.25, 0.0]), 6000
    buffer = filled(weights, tau=math.inf, seed=n)
    pi = inclusion_probabilities(weights, n)
    counts = np.zeros(10)
    for _ in range(draws):
        sample = buffer.sample(n, 0)
        assert len(set(sample.ids.tolist())) == n
        np.testing.assert_allclose(sample.inclusion, pi[sample.ids], rtol=1e-12)
        counts[sample.ids] += 1
    certain = pi == 1
    assert (counts[certain] == draws).all() and (counts[pi == 0] == 0).all() and pi.sum() == pytest.approx(n)
    assert (np.abs(counts - draws * pi) <= 5 * np.sqrt(draws * pi * (1 - pi)) + 1e-9).all()


def test_known_inclusion_probabilities():
    # weights 6, 1, 1, 1, 1 and n = 2: 2 * 6/10 >= 1, so the first is certain; the others share one draw: 1/4 each
    buffer = filled([6.0, 1.0, 1.0, 1.0, 1.0], tau=math.inf)
    sample = buffer.sample(2, 0)
    assert dict(zip(sample.ids.tolist(), sample.inclusion.tolist())).pop(0) == 1
    assert sorted(sample.inclusion.tolist()) == [0.25, 1.0]


@pytest.mark.parametrize("draw, n", [("iid", 40_000), ("stratified", 40_000)])
def test_repeated_draws_follow_the_distribution(draw, n):
    weights = np.array([5.0, 3.0, 1.0, 0.5, 0.5, 0.0])
    sample = filled(weights, tau=math.inf, draw=draw, seed=1).sample(n, 0)
    expected = n * weights / weights.sum()
    counts = np.bincount(sample.ids, minlength=6)
    assert counts[5] == 0
    chi_square = ((counts - expected)[:5] ** 2 / expected[:5]).sum()
    assert chi_square < 4 + 5 * math.sqrt(2 * 4)
    np.testing.assert_allclose(sample.inclusion, expected[sample.ids])
    if draw == "stratified":  # one target in each stratum: at most the two at an entry's ends are uncertain
        assert np.abs(counts - expected).max() < 2
    else:  # independent: not so even
        assert np.abs(counts - expected).max() > 2


def test_one_stratum_one_draw():
    buffer = filled([1.0] * 4, tau=math.inf, draw="stratified")
    for _ in range(50):
        assert sorted(buffer.sample(4, 0).ids.tolist()) == [0, 1, 2, 3]
    middle = filled([1.0] * 3, tau=math.inf, draw="stratified")  # both strata hit entry 1 with 1/3 each, independently
    both = sum((middle.sample(2, 0).ids == 1).all() for _ in range(3000))
    assert abs(both - 3000 / 9) < 5 * math.sqrt(3000 * 8 / 81)
    repeats = filled([3.0, 1.0], tau=math.inf, draw="stratified").sample(4, 0)
    assert sorted(repeats.ids.tolist()) == [0, 0, 0, 1]


@pytest.mark.parametrize("n", [3, 6, 9, 12])
def test_an_extreme_decay_takes_cohort_after_cohort(n):
    """tau = 1e-3: a cohort has e^-600 of the next one's mass; the sum of all cannot hold both, the draw can."""
    buffer = filled([1.0] * 12, np.repeat([0, 10, 10**9, 10**9 + 1], 3), alpha=0.6, tau=1e-3)
    for _ in range(20):
        sample = buffer.sample(n, 10**9 + 1)
        assert set(sample.ids.tolist()) == set(range(12 - n, 12))
        np.testing.assert_allclose(sample.inclusion, 1.0)
        check_valid(buffer)
    sample = filled([1.0] * 12, np.repeat([0, 10, 10**9, 10**9 + 1], 3), alpha=0.6, tau=1e-3).sample(4, 10**9 + 1)
    assert np.sort(sample.inclusion) == pytest.approx([1 / 3, 1, 1, 1])


@pytest.mark.parametrize("sampler", ["prioritized", "uniform", "newest", "never_used_first"])
@pytest.mark.parametrize("n", [16, 64])
def test_batches_come_in_random_order(sampler, n):
    buffer = filled(np.ones(64), tau=math.inf, sampler=sampler)
    first = [buffer.sample(n, 0).ids[0] for _ in range(200)]
    assert len(set(first)) > (12 if sampler == "newest" and n == 16 else 40)  # 61 of 64, or 16 of 16, expected


# ------------------------------------------------------------------------------------------- importance weights


@pytest.mark.parametrize("draw", ["systematic", "stratified", "iid"])
@pytest.mark.parametrize("includes_age", [False, True])
def test_which_mean_the_weights_estimate(draw, includes_age):
    rng = np.random.default_rng(0)
    base, birthdays, x = rng.random(30) * 4 + 0.1, rng.integers(0, 100, 30), rng.normal(size=30)
    x += birthdays / 30  # so that the two means differ
    alpha, tau, n, step, draws = 0.8, 60.0, 8, 100, 4000
    buffer = filled(
        base, birthdays, step, alpha=alpha, tau=tau, beta=1.0, draw=draw, is_includes_age=includes_age, seed=2
    )
    age_factor = np.exp(-alpha * (step - birthdays) / tau)
    numerators, denominators = [], []
    for _ in range(draws):
        sample = buffer.sample(n, step)
        pi = sample.inclusion if includes_age else sample.inclusion / age_factor[sample.ids]
        unnormalised = 1 / (30 * pi / n)
        np.testing.assert_allclose(sample.weights, unnormalised / unnormalised.max(), rtol=1e-5)
        numerators.append((unnormalised * x[sample.ids]).mean())
        denominators.append(unnormalised.mean())
    numerators, denominators = np.array(numerators), np.array(denominators)
    if includes_age:  # the unnormalised mean is unbiased for the uniform mean
        assert abs(numerators.mean() - x.mean()) < 5 * numerators.std() / math.sqrt(draws)
    age_mean = (age_factor * x).sum() / age_factor.sum()
    target = x.mean() if includes_age else age_mean
    residual = numerators - target * denominators  # mean zero for the right target
    assert abs(residual.mean()) < 5 * residual.std() / math.sqrt(draws)
    wrong = numerators - (age_mean if includes_age else x.mean()) * denominators
    assert abs(wrong.mean()) > 10 * wrong.std() / math.sqrt(draws), "the test could not tell the two means apart"


def test_weights_by_hand():
    # one group of birthdays, P = (1/10, 2/10, 3/10, 4/10), n = 2: pi = 2P; w = (4 pi/2)^-0.5 over the batch's largest
    buffer = filled([1.0, 2.0, 3.0, 4.0], tau=math.inf, beta=0.5, seed=5)
    for _ in range(20):
        sample = buffer.sample(2, 0)
        expected = (4 * np.array([0.1, 0.2, 0.3, 0.4])[sample.ids]) ** -0.5
        np.testing.assert_allclose(sample.weights, expected / expected.max(), rtol=1e-6)
        assert sample.weights.dtype == np.float32


def test_beta_zero_gives_ones_and_beta_is_annealed_to_its_end():
    assert (filled([1.0, 5.0, 9.0], beta=0.0, beta_end=0.0).sample(2, 0).weights == 1).all()
    buffer = filled([1.0, 2.0, 3.0, 4.0], tau=math.inf, beta=0.4, beta_end=1.0)
    for progress, beta in ((0.0, 0.4), (0.25, 0.55), (0.5, 0.7), (1.0, 1.0)):
        buffer.progress = progress
        assert buffer.beta == pytest.approx(beta)
        sample = buffer.sample(2, 0)
        expected = (4 * np.array([0.1, 0.2, 0.3, 0.4])[sample.ids]) ** -beta
        np.testing.assert_allclose(sample.weights, expected / expected.max(), rtol=1e-6)


# --------------------------------------------------------------------------------------------- base priorities


def test_base_priorities_by_hand():
    batch = [
        make(score=-2.0, advantage=0.5, group=7),
        make(score=4.0, advantage=-1.5, group=7),
        make(score=3.0, group=8),
    ]
    expected = {
        "reward": [2.25, 4.25, 3.25],
        "advantage": [0.75, 1.75, 0.75],  # over the 3 action tokens, not over all 5
        "group_std": [3.25, 3.25, 0.25],  # std of (-2, 4) is 3; a group of one has 0
        "uniform": [1.0, 1.0, 1.0],
    }
    for priority, base in expected.items():
        buffer = ReplayBuffer(3, priority=priority, eps=0.25, alpha=1.0, tau=math.inf)
        buffer.add(batch, 0)
        np.testing.assert_allclose(buffer.probabilities(0)[1], np.array(base) / sum(base), rtol=1e-12)
    buffer = ReplayBuffer(3, priority="td_error", eps=0.25, alpha=1.0, tau=math.inf)
    with pytest.raises(ValueError, match="td_error.*base="):
        buffer.add(batch, 0)
    assert len(buffer) == 0
    buffer.add(batch, 0, base=[1.0, 2.0, 5.0])  # final: no eps
    np.testing.assert_allclose(buffer.probabilities(0)[1], [1 / 8, 2 / 8, 5 / 8])


def test_an_episode_without_action_tokens_has_no_advantage():
    buffer = ReplayBuffer(2, eps=0.25)
    buffer.add([make(length=2)], 0)
    assert math.exp(buffer.log_base.max()) == pytest.approx(0.25)


def test_an_update_keeps_the_birthday_and_adds_no_eps():
    buffer = filled([1.0, 1.0], [0, 50], alpha=1.0, tau=50.0, eps=9.0)
    buffer.update_priorities([0], [3.0])
    _, p = buffer.probabilities(50)
    np.testing.assert_allclose(p[0] / p[1], 3 * math.exp(-1))


def test_repeated_ids_in_an_update_get_their_mean():
    buffer = filled([1.0, 1.0], tau=math.inf)
    assert buffer.update_priorities([0, 1, 0], [2.0, 4.0, 6.0]) == 3
    np.testing.assert_allclose(buffer.probabilities(0)[1], [0.5, 0.5])


def test_insert_priority_max():
    buffer = ReplayBuffer(8, alpha=1.0, tau=math.inf, insert_priority="max", fresh_fraction=0.5)
    first = ReplayBuffer(8, insert_priority="max")
    first.add([make()] * 2, 0, base=[0.5, 0.2])
    np.testing.assert_allclose(np.exp(first.log_base[:2]), 0.5)  # empty: the largest of those that come
    buffer.add([make()], 0, base=[0.5])
    buffer.add([make()], 0, base=[0.3])
    assert math.exp(buffer.log_base[1]) == pytest.approx(0.5)  # the largest *real* base, not the 1 in force
    buffer.sample(2, 0)
    np.testing.assert_allclose(buffer.probabilities(0)[1], [5 / 8, 3 / 8])  # both drawn: real values
    buffer.update_priorities([0], [8.0])
    buffer.add([make()] * 2, 0, base=[0.1, 0.2])
    np.testing.assert_allclose(np.exp(buffer.log_base[2:4]), 8.0)
    plain = ReplayBuffer(8, alpha=1.0, tau=math.inf)
    plain.add([make()] * 2, 0, base=[0.5, 0.3])
    np.testing.assert_allclose(plain.probabilities(0)[1], [5 / 8, 3 / 8])  # base: at once


# --------------------------------------------------------------------------------------- eviction and samplers


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=40),
    st.integers(1, 8),
    st.lists(st.integers(1, 5), min_size=40, max_size=40),
)
@settings(max_examples=60, deadline=None)
def test_first_in_is_first_out_whatever_the_ages(birthdays, capacity, chunks):
    """By birthdays, a batch that comes late from a slow sampler would leave as it comes."""
    buffer, start = ReplayBuffer(capacity), 0
    ids = []
    for size in chunks:
        chunk = birthdays[start : start + size]
        ids += buffer.add([make() for _ in chunk], 10, chunk).tolist()
        start += size
        assert sorted(buffer.id[buffer.id >= 0].tolist()) == ids[-capacity:]


def test_lowest_priority_evicts_by_decayed_priority():
    buffer = filled([5.0, 1.0, 3.0], [0, 10, 10], tau=2.0, eviction="lowest_priority")
    buffer.add([make()], 10, [10], [2.0])  # 5 e^-5 = 0.03 is now the lowest
    assert sorted(buffer.probabilities(10)[0].tolist()) == [1, 2, 3]
    buffer.add([make()], 10, [10], [1.0])  # a tie of two ones: the oldest id leaves
    assert sorted(buffer.probabilities(10)[0].tolist()) == [2, 3, 4]
    fifo = filled([5.0, 1.0, 3.0], [10, 0, 10], tau=2.0)
    fifo.add([make()], 10, [10], [0.1])
    assert sorted(fifo.probabilities(10)[0].tolist()) == [1, 2, 3]


def colours(text):
    return [make(step, success=colour == "g") for step, colour in enumerate(text)]


@pytest.mark.parametrize("fraction, kept", [(0.25, 8), (0.5, 8), (0.75, 7), (0.0, 8)])
def test_positive_bias_worked_example(fraction, kept):
    # arXiv 2604.08706: N = 8, history t-9..t; the printed result holds for delta 0.25 and 0.5, not for the printed 0.75
    buffer = ReplayBuffer(8, sampler="positive_bias", positive_fraction=fraction)
    for episode in colours("rggrggrgrr"):
        buffer.add([episode], episode.policy_step)
    relative = sorted(buffer.birthday[buffer.id >= 0] - 9)
    expected = {0.25: [-8, -7, -5, -4, -3, -2, -1, 0], 0.75: [-8, -7, -5, -4, -2, -1, 0], 0.0: list(range(-7, 1))}
    assert relative == expected[0.25 if fraction == 0.5 else fraction] and len(buffer) == kept


@given(
    st.text("rgz", min_size=1, max_size=40),
    st.integers(1, 10),
    st.sampled_from([0.0, 0.2, 0.5, 0.75, 1.0]),
    st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_positive_bias_is_its_rule(history, capacity, fraction, needs_advantage):
    """z: correct, from a group of all correct, so without advantage. Ages are in no order: what counts is when entries came."""
    buffer = ReplayBuffer(
        capacity, sampler="positive_bias", positive_fraction=fraction, positive_advantage_only=needs_advantage
    )
    positive = round(fraction * capacity)
    for step, colour in enumerate(history):
        buffer.add([make(success=colour != "r", advantage=0.0 if colour == "z" else 1.0)], step, [7 * step % (step + 1)])
        past = list(range(step, -1, -1))
        fresh, older = past[: capacity - positive], past[capacity - positive :]
        correct = [i for i in older if history[i] == "g" or (history[i] == "z" and not needs_advantage)]
        assert sorted(buffer.id[buffer.id >= 0].tolist()) == sorted(fresh + correct[:positive])
        check_valid(buffer)


def test_positive_bias_draws_uniformly_and_needs_to_know_success():
    buffer = ReplayBuffer(8, sampler="positive_bias", positive_fraction=0.25)
    buffer.add(colours("rggrggrgrr"), 9)
    np.testing.assert_allclose(buffer.probabilities(9)[1], 1 / 8)
    assert (buffer.sample(5, 9).weights == 1).all() and buffer.stats(9)["correct_fraction"] == 5 / 8
    with pytest.raises(ValueError, match=r"info\['success'\]"):
        buffer.add([make()], 9)


def test_uniform_draws_every_subset_equally_often():
    buffer = ReplayBuffer(5, sampler="uniform")
    buffer.add([make(score=9.0 * i) for i in range(5)], 0)
    counts, draws = {}, 10_000
    for _ in range(draws):
        sample = buffer.sample(2, 0)
        key = tuple(sorted(sample.ids.tolist()))
        counts[key] = counts.get(key, 0) + 1
    assert len(counts) == 10 and all(len(set(key)) == 2 for key in counts)
    assert sum((c - draws / 10) ** 2 / (draws / 10) for c in counts.values()) < 9 + 5 * math.sqrt(18)
    np.testing.assert_allclose(sample.probabilities, 0.2)
    np.testing.assert_allclose(sample.inclusion, 0.4)


def test_newest_and_its_ties():
    buffer = filled([1.0] * 6, [5, 1, 9, 9, 9, 0], sampler="newest")
    assert sorted(buffer.sample(2, 9).ids.tolist()) == [3, 4]  # of equal birthdays the latest added
    assert sorted(buffer.sample(4, 9).ids.tolist()) == [0, 2, 3, 4]
    assert buffer.probabilities(9)[1].tolist() == [0, 0, 0, 0, 1, 0]


def test_never_used_first():
    buffer = filled([1.0] * 7, sampler="never_used_first")
    first, second = buffer.sample(3, 0), buffer.sample(3, 0)
    assert not set(first.ids.tolist()) & set(second.ids.tolist())
    third = buffer.sample(3, 0)  # one is left unused: it is certain, the other two come from the six used ones
    assert sorted(np.round(third.inclusion, 12).tolist()) == pytest.approx([1 / 3, 1 / 3, 1])
    assert len(set(third.ids.tolist())) == 3 and buffer.uses.tolist().count(0) == 0


@pytest.mark.parametrize("sampler", ["prioritized", "uniform", "never_used_first", "newest"])
def test_fresh_fraction_takes_the_newest_first(sampler):
    buffer = filled([1.0] * 10, list(range(10)), sampler=sampler, fresh_fraction=0.5, tau=math.inf)
    for _ in range(30):
        sample = buffer.sample(4, 9)
        assert {8, 9} <= set(sample.ids.tolist()) and len(set(sample.ids.tolist())) == 4
        np.testing.assert_allclose(sample.inclusion[np.isin(sample.ids, [8, 9])], 1)
        if sampler in ("prioritized", "uniform"):
            np.testing.assert_allclose(sample.inclusion[~np.isin(sample.ids, [8, 9])], 2 / 8)
    check_valid(buffer)


def test_fresh_entries_need_no_priority():
    buffer = filled([1.0, 1.0, 0.0], [0, 0, 5], fresh_fraction=1 / 3, tau=math.inf)
    assert sorted(buffer.sample(3, 5).ids.tolist()) == [0, 1, 2]


def test_max_age_drops_and_counts():
    buffer = ReplayBuffer(9, max_age=4)
    buffer.add([make(0, length=6), make(0, length=4), make(3)], 3)
    assert len(buffer.probabilities(4)[0]) == 3 and len(buffer.probabilities(5)[0]) == 1
    assert not buffer.ready(2, 5) and buffer.ready(1, 5)
    buffer.sample(1, 5)
    stats = buffer.stats(5) | use_stats(buffer.counts)
    assert (
        stats["dropped_by_age_total"] == 2 and stats["dropped_by_age_tokens_mean"] == 5 and stats["evicted_total"] == 0
    )
    assert buffer.add([make(0)], 5).tolist() == [3] and len(buffer) == 1  # born too old: gone at once
    check_valid(buffer)
    assert not buffer.ready(1, 100)
    with pytest.raises(ValueError, match="empty"):
        buffer.sample(1, 100)


# -------------------------------------------------------------------------------------------------------- groups


def test_groups_are_stored_drawn_and_evicted_whole():
    buffer = ReplayBuffer(3, unit="group", priority="group_std", eps=0.0, alpha=1.0, tau=math.inf)
    for step in range(5):  # two groups of two a call, rows interleaved; the second of each call has twice the spread
        rows = [make(step, score=k * (g + 1), group=2 * step + g) for k in range(2) for g in range(2)]
        ids = buffer.add(rows, step)
        assert ids.tolist() == [2 * step, 2 * step + 1, 2 * step, 2 * step + 1]
    assert len(buffer) == 3 and buffer.stats(5)["episodes"] == 6
    kept, p = buffer.probabilities(5)
    assert kept.tolist() == [7, 8, 9]
    np.testing.assert_allclose(p, np.array([2, 1, 2]) / 5)
    sample = buffer.sample(2, 5)
    assert len(sample.episodes) == len(sample.ids) == len(sample.weights) == len(sample.ages) == 4
    for i, id in enumerate(sample.ids.tolist()):
        assert sample.episodes[i].group_id == id
    assert len(set(sample.ids.tolist())) == 2
    for name in ("weights", "ages", "probabilities", "inclusion", "steps_since_last_use"):
        assert (np.diff(getattr(sample, name).reshape(2, 2), axis=1) == 0).all()
    buffer.update_priorities(sample.ids, [1.0, 3.0, 5.0, 5.0])  # one value an episode: the group gets the mean
    assert math.exp(buffer.log_base[buffer.slots(sample.ids[:1])[0]]) == pytest.approx(2.0)
    check_valid(buffer)


def test_a_group_is_as_old_as_its_oldest_member():
    buffer = ReplayBuffer(3, unit="group")
    buffer.add([make(4, group=1), make(2, group=1)], 6)
    assert buffer.sample(1, 6).ages.tolist() == [4, 4]


def test_one_member_keeps_the_advantage_of_its_group():
    # alibaba/ROLL#397: replaying one member of each group must not turn its advantage into 0
    batch = [make(score=s, group=g, advantage=a) for g in range(4) for s, a in ((1, 0.5), (0, -0.5))]
    buffer = ReplayBuffer(8)
    buffer.add(batch, 0)
    for episode in buffer.sample(4, 0).episodes:
        assert any(episode is other for other in batch) and abs(episode.advantages[-1]) == 0.5


# ----------------------------------------------------------------------------------------------------- accounting


def test_steps_since_last_use_example():
    # arXiv 2604.08706: one rollout used once in batch 3 and three times in batch 5 -> new, 2, 0, 0
    buffer = filled([1.0], draw="iid")
    assert buffer.sample(1, 3).steps_since_last_use.tolist() == [-1]
    assert sorted(buffer.sample(3, 5).steps_since_last_use.tolist()) == [0, 0, 2]
    stats = buffer.stats(5) | use_stats(buffer.counts)
    assert (stats["drawn_total"], stats["uses_mean"], stats["new_fraction"]) == (4, 4, 0.25)
    assert stats["steps_since_last_use_mean"] == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    "capacity, added, drawn, ratio, age, oldest", [(252, 34, 60, 1.765, 3.22, 7), (84, 20, 60, 3.0, 1.62, 4)]
)
def test_replay_ratio_of_a_fifo(capacity, added, drawn, ratio, age, oldest):
    """The simulation of arXiv 2604.08706 (N, R, B): ratio B/R, mean and largest age, share evicted unused."""
    buffer, rng_episode, ages = ReplayBuffer(capacity, sampler="uniform"), make(), []
    for step in range(500):
        buffer.add([rng_episode] * added, step, [step] * added)
        if buffer.ready(drawn, step):
            sample = buffer.sample(drawn, step)
            if step > 50:
                ages += sample.ages.tolist()
    stats = buffer.stats(500) | use_stats(buffer.counts)
    assert stats["replay_ratio"] == pytest.approx(ratio, rel=0.01)
    assert np.mean(ages) == pytest.approx(age, abs=0.03) and max(ages) == oldest
    life = capacity / added  # draws that an entry lives through, the last cohort partly
    unused = (1 - drawn / capacity) ** life
    spread = 5 * math.sqrt(unused * (1 - unused) / stats["evicted_total"])
    assert stats["evicted_unused_fraction"] == pytest.approx(unused, abs=spread + 0.01)
    assert stats["uses_of_retired_mean"] == pytest.approx(ratio, abs=0.05)
    check_valid(buffer)


def test_stats_by_hand_and_undefined_values():
    empty = ReplayBuffer(4).stats(0)
    assert empty["size"] == 0 and empty["age_mean"] is None
    buffer = filled([1.0, 1.0, 2.0], [0, 5, 10], step=10, tau=math.inf, alpha=1.0)
    stats = buffer.stats(20)
    assert (stats["age_mean"], stats["age_p50"], stats["age_max"]) == (15, 15, 20)
    assert (stats["priority_min"], stats["priority_max"]) == pytest.approx((1, 2))
    assert stats["newest_mass"] == pytest.approx(0.5) and stats["fill"] == 1.0
    assert stats["priority_entropy"] == pytest.approx(0.5 * math.log(4) + 0.5 * math.log(2))
    assert stats["tau"] is None and stats["sampling_half_life"] is None
    assert all(value is None or type(value) in (int, float) for value in stats.values())
    json.dumps(stats, allow_nan=False)


def test_stats_when_nothing_can_be_drawn():
    for buffer in (filled([0.0, 0.0]), filled([1.0, 1.0], max_age=3)):
        assert buffer.stats(100)["priority_entropy"] is None


# ------------------------------------------------------------------------------------------------- memory, files


def test_memory_is_ragged_and_reported():
    def load():
        buffer = ReplayBuffer(1000)
        for start in range(1000, 2000, 100):
            buffer.add([make(step, length=50, success=True) for step in range(start, start + 100)], start + 99)
        return buffer

    load()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    buffer = load()
    traced = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert traced < 2e6
    assert abs(buffer.nbytes / traced - 1) < 0.05


def test_memory_does_not_grow_with_the_number_of_entries_seen():
    for eviction in ("fifo", "lowest_priority"):
        buffer = ReplayBuffer(100, eviction=eviction)
        sizes = []
        for step in range(200):
            buffer.add([make(step)] * 25, step)
            sizes.append(buffer.nbytes)
        assert sizes[-1] < 1.1 * sizes[20] and len(buffer.id) <= 125


def test_loading_into_other_settings_is_refused():
    state = filled([1.0, 2.0]).state_dict()
    with pytest.raises(ValueError, match="unit='episode', this one unit='group'"):
        ReplayBuffer(2, alpha=1.0, unit="group").load_state_dict(state)
    other = ReplayBuffer(2, alpha=1.0, seed=50)
    other.load_state_dict(state)
    assert len(other) == 2


# ----------------------------------------------------------------------------------------------------- bad input


BAD = {
    "n too large": (lambda b: b.sample(9, 9), "n=9 is larger than the buffer, 4 entries"),
    "n zero": (lambda b: b.sample(0, 9), "n is 0"),
    "too few with mass": (lambda b: b.sample(4, 9), "n=4 needs 4 entries of positive mass.*not 3"),
    "step in the past": (lambda b: b.sample(2, 3), "step=3 is earlier than a birthday, 5"),
    "NaN": (lambda b: b.update_priorities([0, 1], [1.0, math.nan]), r"base\[1\] is nan"),
    "negative": (lambda b: b.update_priorities([0, 1], [-1.0, 1.0]), r"base\[0\] is -1.0"),
    "infinite": (lambda b: b.update_priorities([0], [math.inf]), r"base\[0\] is inf"),
    "wrong length": (lambda b: b.update_priorities([0, 1], [1.0]), r"base has shape \(1,\), not \(2,\)"),
    "unknown id": (lambda b: b.update_priorities([0, 5], [1.0, 1.0]), r"ids \[0 5\].*0..4"),
    "negative id": (lambda b: b.update_priorities([-1], [1.0]), r"ids \[-1\]"),
    "float ids": (lambda b: b.update_priorities([0.5], [1.0]), r"ids \[0.5\]"),
    "add NaN": (lambda b: b.add([make()], 9, base=[math.nan]), r"base\[0\] is nan"),
    "add birthdays": (lambda b: b.add([make()], 9, birthdays=[1, 2]), r"birthdays has shape \(2,\), not \(1,\)"),
    "add float birthdays": (lambda b: b.add([make()], 9, birthdays=[1.0]), "birthdays has dtype float64"),
    "add from the future": (lambda b: b.add([make()], 9, birthdays=[10]), "birthday 10 is later than step=9"),
    "tau zero": (lambda b: b.set_tau(0), "tau=0 must be a positive number"),
    "tau auto": (lambda b: b.set_tau("auto"), "tau='auto' must be a positive number"),
    "tau NaN": (lambda b: b.set_tau(math.nan), "tau=nan must be"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_names_itself_and_changes_nothing(case):
    buffer = ReplayBuffer(4, alpha=1.0, eviction="lowest_priority")
    buffer.add([make()] * 5, 5, [1, 2, 3, 4, 5], [1.0, 2.0, 0.0, 0.0, 3.0])  # id 2 leaves at once
    before, (call, message) = buffer.state_dict(), BAD[case]
    with pytest.raises(ValueError, match=message):
        call(buffer)
    assert same(before, buffer.state_dict())
    check_valid(buffer)


def test_empty_and_massless_buffers_refuse_to_draw():
    for buffer in (ReplayBuffer(3), filled([0.0, 0.0])):
        with pytest.raises(ValueError):
            buffer.sample(1, 0)
        with pytest.raises(ValueError):
            buffer.probabilities(0)
        assert not buffer.ready(1, 0)
    with pytest.raises(ValueError, match="needs 1 entries of positive mass"):
        filled([0.0, 0.0], draw="iid").sample(1, 0)
    with pytest.raises(ValueError, match="min_size=3"):
        ReplayBuffer(5, min_size=3).sample(1, 0)


def test_min_size():
    buffer = ReplayBuffer(5, min_size=3)
    buffer.add([make()] * 2, 0)
    assert not buffer.ready(1, 0)
    with pytest.raises(ValueError, match="min_size=3: it holds 2"):
        buffer.sample(1, 0)
    buffer.add([make()], 0)
    assert buffer.ready(1, 0) and len(buffer.sample(1, 0).ids) == 1


def test_stale_ids_are_recognised_not_applied_to_the_new_occupant():
    buffer = filled([1.0, 1.0], [0, 0], tau=math.inf)
    buffer.add([make()], 1, [1], [1.0])  # takes over from id 0
    before = buffer.probabilities(1)
    assert buffer.update_priorities([0], [50.0]) == 0
    assert np.array_equal(buffer.probabilities(1)[1], before[1]) and buffer.counts["stale_updates"] == 1
    assert buffer.update_priorities([0, 2], [50.0, 3.0]) == 1
    np.testing.assert_allclose(buffer.probabilities(1)[1], [0.25, 0.75])
    assert buffer.update_priorities([], []) == 0


def test_adding_nothing_is_nothing():
    buffer = ReplayBuffer(3)
    assert buffer.add([], 0).tolist() == [] and len(buffer) == 0


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"sampler": "priorit"}, "did you mean prioritized"),
        ({"priority": "advantages"}, "did you mean advantage"),
        ({"draw": "systematc"}, "did you mean systematic"),
        ({"eviction": "lru"}, "eviction='lru' is not one of fifo, lowest_priority"),
        ({"unit": "groups"}, "did you mean group"),
        ({"insert_priority": "mx"}, "did you mean max"),
        ({"age_law": "exponetial"}, "did you mean exponential"),
        ({"alpha": -1}, "alpha=-1 must be finite and at least 0"),
        ({"alpha": math.nan}, "alpha=nan"),
        ({"beta": 1.5}, "beta=1.5 must lie between 0 and 1"),
        ({"tau": -3}, "tau=-3 must be"),
        ({"capacity": 0}, "capacity=0 must be finite and at least 1"),
        ({"positive_fraction": 0.5}, "positive_fraction=0.5 needs sampler='positive_bias'"),
        ({"sampler": "positive_bias", "eviction": "lowest_priority"}, "positive_bias.*eviction='lowest_priority'"),
        ({"min_size": 11}, "min_size=11 is larger than capacity=10"),
    ],
)
def test_wrong_settings_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        ReplayBuffer(**({"capacity": 10} | arguments))


# -------------------------------------------------------------------------------------------------------- tau="auto"


def synthetic_drift(c, largest_age, seed, k0=0.0, batches=20):
    """Log-ratios of a Gaussian policy that drifts: KL = k0 + c·age has log-ratios N(-KL, 2 KL)."""
    rng, drift = np.random.default_rng(seed), DriftEstimator()
    for _ in range(batches):
        ages = rng.integers(0, largest_age + 1, 128)
        kl = k0 + c * ages
        drift.add(ages, sequence_kl(rng.normal(-kl, np.sqrt(2 * kl))))
    return drift


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("c, largest_age", [(1 / 200, 200), (1 / 30, 60), (1 / 500, 2000)])
def test_drift_finds_tau_within_ten_percent(c, largest_age, seed):
    assert synthetic_drift(c, largest_age, seed).tau() * c == pytest.approx(1, abs=0.1)


def test_drift_is_exact_without_noise_and_finds_an_offset():
    drift = DriftEstimator()
    ages = np.arange(100)
    drift.add(ages, 0.3 + ages / 50)
    fit = drift.fit()
    assert (fit["c"], fit["k0"], fit["r2"], fit["rows"]) == pytest.approx((0.02, 0.3, 1.0, 100))
    assert drift.tau() == pytest.approx(50)


def test_drift_on_average_unbiased_and_efficient():
    ratios = [synthetic_drift(1 / 100, 150, seed, k0=0.1).fit()["c"] * 100 for seed in range(60)]
    assert np.mean(ratios) == pytest.approx(1, abs=5 * np.std(ratios) / math.sqrt(60) + 0.01)
    # k1 rows of variance 2·KL: the best linear estimate of c without an offset errs by sqrt(2 / sum of KL) = 4 %
    assert np.std([synthetic_drift(1 / 200, 200, seed).fit()["c"] * 200 for seed in range(60)]) < 0.05


def test_drift_bounds_and_missing_data():
    drift = DriftEstimator(tau_min=10, tau_max=1000, min_rows=8)
    assert drift.tau() is None and drift.points()[0].size == 0
    drift.add([1, 2, 3], [0.1, 0.2, 0.3])
    assert drift.tau() is None
    drift.add(np.full(8, 3), np.full(8, 0.3))
    assert drift.tau() == pytest.approx(10)
    flat = DriftEstimator(tau_max=1000, min_rows=8)
    flat.add(np.arange(8), np.full(8, 0.2))
    assert flat.tau() == 1000
    one_age = DriftEstimator(min_rows=8)
    one_age.add(np.full(99, 5), np.full(99, 0.5))
    assert one_age.tau() is None
    with pytest.raises(ValueError, match="finite"):
        drift.add([1], [math.nan])
    with pytest.raises(ValueError, match="one shape"):
        drift.add([1, 2], [0.1])


def test_drift_window_forgets_and_state_survives():
    drift = DriftEstimator(window=3, min_rows=4)
    for slope in (1.0, 1.0, 0.1, 0.1, 0.1):
        drift.add(np.arange(10), slope * np.arange(10))
    assert drift.fit()["c"] == pytest.approx(0.1) and drift.fit()["rows"] == 30
    loaded = DriftEstimator(window=3, min_rows=4)
    loaded.load_state_dict(drift.state_dict())
    assert loaded.fit() == drift.fit()
    for one in (drift, loaded):
        one.add(np.arange(10), 0.5 * np.arange(10))
    assert loaded.fit() == drift.fit()
    empty = DriftEstimator()
    empty.load_state_dict(DriftEstimator().state_dict())
    assert empty.tau() is None


def test_token_kl_has_the_mean_of_sequence_kl_and_scatters_less():
    """Two tokens out of three words each, the second's chances depending on the first: all nine episodes, each with its chance."""
    rng = np.random.default_rng(3)
    behaviour, current = ([rng.dirichlet(np.full(3, 4.0), size=shape) for shape in ((), 3)] for _ in range(2))
    chance, log_ratios = [], []
    for first in range(3):
        for second in range(3):
            chance.append(behaviour[0][first] * behaviour[1][first, second])
            log_ratios.append([np.log(current[0][first] / behaviour[0][first]),
                               np.log(current[1][first, second] / behaviour[1][first, second])])
    chance, log_ratios = np.array(chance), np.array(log_ratios)
    assert np.abs(log_ratios).max() < 3  # nothing is cut
    exact = -chance @ log_ratios.sum(1)  # KL(behaviour || current) by its definition
    padded = np.concatenate([log_ratios, np.zeros((9, 4))], axis=1)
    assert chance @ token_kl(padded) == pytest.approx(exact)
    spread = {name: chance @ (values - exact)**2 for name, values in (
        ("token", token_kl(padded)), ("k1", -log_ratios.sum(1)), ("sequence", sequence_kl(log_ratios.sum(1))))}
    assert spread["token"] < 0.5 * spread["k1"] and spread["token"] < spread["sequence"]
    assert token_kl([[9.0, 0.0]]).tolist() == [pytest.approx(np.exp(3) - 1 - 3)]  # cut


def test_sequence_kl_has_the_right_mean():
    # behaviour (0.5, 0.5), current (0.8, 0.2): KL = 0.5 ln(0.5/0.8) + 0.5 ln(0.5/0.2) = 0.22314
    log_ratios = np.log([0.8 / 0.5, 0.2 / 0.5])
    expected = 0.5 * math.log(0.5 / 0.8) + 0.5 * math.log(0.5 / 0.2)
    assert sequence_kl(log_ratios).mean() == pytest.approx(expected)
    assert (sequence_kl(log_ratios) >= 0).all()  # k3
    wild = np.array([-9.0, 2.0])
    assert sequence_kl(wild).tolist() == [9.0, -2.0]  # k1
