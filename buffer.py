"""The memory of FreshReplay, NumPy only: `ReplayBuffer` draws past episodes by informativeness and freshness.

Freshness-aware prioritised replay (FreshPER, arXiv 2604.16918): P(i) ∝ (p_i · f(age_i))^alpha. All weights are computed when a
batch is drawn, from NumPy columns: nothing has to be refreshed as entries age.
"""
import contextlib
import math
import operator
from dataclasses import dataclass
from itertools import chain

import numpy as np

from episode import Episode, one_of, require
from runtime.entries import NONE, Entries, checked_birthdays, checked_priorities, log, means_of_repeats, require_same, rows_by_group

# Beside what `Entries` has: what a free slot holds. log_base is in force; real_log_base differs until a "max" is drawn.
COLUMNS = {"log_base": -math.inf, "real_log_base": -math.inf, "correct": False}


# ALGO LOGIC: base priority, an episode's worth without its age; eps is what one without any worth has
def reward(episodes, eps):
    return np.array([abs(episode.score) for episode in episodes]) + eps


def advantage(episodes, eps):
    """Mean |A| over action tokens."""
    sums = np.array([np.abs(episode.advantages).sum(dtype=np.float64) for episode in episodes])
    return sums / [max(1, np.count_nonzero(episode.action_mask)) for episode in episodes] + eps


def group_std(episodes, eps):
    base = np.empty(len(episodes))
    for rows in rows_by_group(episodes):
        base[rows] = np.std([episodes[row].score for row in rows])
    return base + eps


def uniform(episodes, eps):
    return np.ones(len(episodes))


def td_error(episodes, eps):
    raise ValueError("priority='td_error' needs add(..., base=mean |TD error|)")


PRIORITIES = {"reward": reward, "advantage": advantage, "td_error": td_error, "group_std": group_std, "uniform": uniform}


# ALGO LOGIC: age law, log f of all slots from their columns and "age"; draws, weights and eviction follow it
def exponential(entries, step, tau):
    return -entries["age"] / tau


def power(entries, step, tau):
    return -np.log1p(np.maximum(entries["age"], 0) / tau)


def none(entries, step, tau):
    return np.zeros(len(entries["age"]))


AGE_LAWS = {"exponential": exponential, "power": power, "none": none}


def half_life(age_law, tau, alpha):
    """The age at which f^alpha is one half, where that is known."""
    if tau == math.inf or alpha < 1e-3:
        return None
    return {"exponential": tau * math.log(2) / alpha, "power": tau * (2 ** (1 / alpha) - 1)}.get(age_law)


# ALGO LOGIC: draw rule, n targets in the cumulative mass; stratified is the paper's
def systematic(n, total, rng):
    return (np.arange(n) + rng.random()) * (total / n)


def stratified(n, total, rng):
    return (np.arange(n) + rng.random(n)) * (total / n)


def iid(n, total, rng):
    return rng.random(n) * total


DRAWS = {"systematic": systematic, "stratified": stratified, "iid": iid}


# ALGO LOGIC: eviction, of the lowest of these keys, then of the oldest id
def fifo(entries, log_age):
    """By arrival, not by birthday: long episodes of samplers beside the training come old, and would leave unseen."""
    return entries["id"]


def lowest_priority(entries, log_age):
    return entries["log_base"] + (log_age - log_age.max())


EVICTIONS = {"fifo": fifo, "lowest_priority": lowest_priority}


# ---- the buffer

CHOICES = {"sampler": ("prioritized", "uniform", "newest", "never_used_first", "positive_bias"), "priority": PRIORITIES,
           "age_law": AGE_LAWS, "insert_priority": ("base", "max"), "eviction": EVICTIONS, "unit": ("episode", "group"),
           "draw": DRAWS}
SHARES = ("beta", "beta_end", "positive_fraction", "fresh_fraction")
LOWEST = {"capacity": 1, "alpha": 0, "eps": 0, "max_age": 0, "min_size": 0}


@dataclass
class ReplaySample:
    """A batch of n entries, (n,) each; with unit="group" every row of a group repeats the values of its entry."""

    ids: np.ndarray
    episodes: list[Episode]
    weights: np.ndarray  # float32 importance weights, the largest of the batch is 1
    ages: np.ndarray  # step - birthday
    probabilities: np.ndarray  # P(i), as in `ReplayBuffer.probabilities`
    inclusion: np.ndarray  # pi, the expected number of times that the entry is in a batch of this size
    steps_since_last_use: np.ndarray  # -1: never used before; 0: again in the same batch


class ReplayBuffer(Entries):
    """Past episodes, drawn by priority and age. What its rules may be is above.

    capacity        of entries; an entry is an episode or a whole prompt group (`unit`)
    sampler         positive_bias (arXiv 2604.08706): the last (1-delta)·N entries and the last delta·N correct ones before
                    them, delta = positive_fraction, drawn uniformly; all but prioritized have weights of 1
    alpha, tau      alpha=0 is uniform, tau=inf is PER; unit of tau: that of `step`
    beta            importance exponent; it rises to beta_end with `progress`, the share of the training that is done, 0 to 1
    insert_priority max: the largest real base there is, until the first draw (Schaul et al., 2016)
    fresh_fraction  share of a batch that is the newest entries; the sampler draws the rest from the others
    """

    def __init__(
            self, capacity, sampler="prioritized", priority="advantage", alpha=0.6, tau=500.0, beta=0.4, beta_end=1.0, eps=0.01,
            insert_priority="base", eviction="fifo", unit="episode", draw="systematic", is_includes_age=False, max_age=None,
            positive_fraction=0.0, positive_advantage_only=False, fresh_fraction=0.0, min_size=0, seed=0, age_law="exponential"):
        self.config = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        super().__init__(COLUMNS)
        for name, allowed in CHOICES.items():
            one_of(name, self.config[name], allowed)
        for name in SHARES:
            require(0 <= self.config[name] <= 1, f"{name}={self.config[name]} must lie between 0 and 1")
        for name, low in LOWEST.items():
            value = self.config[name]
            require(value is None or low <= value < math.inf, f"{name}={value} must be finite and at least {low}")
        require(min_size <= capacity, f"min_size={min_size} is larger than capacity={capacity}")
        if sampler == "positive_bias":
            require(eviction == "fifo", f"sampler='positive_bias' has its own eviction; drop eviction={eviction!r}")
        else:
            require(not positive_fraction, f"positive_fraction={positive_fraction} needs sampler='positive_bias'")
        vars(self).update(self.config)  # self.capacity and so on; beta is a property
        self.set_tau(tau)
        self.progress = 0.0
        self.rng = np.random.default_rng(seed)

    @property
    def beta(self) -> float:
        start = self.config["beta"]
        return start + (self.beta_end - start) * self.progress

    # ---- adding, evicting

    def add(self, episodes: list[Episode], step: int, birthdays=None, base=None) -> np.ndarray:
        """Store episodes, evict what is beyond capacity, and return the id of each episode's entry, (B,) int64.

        birthdays: (B,) integers; default `episode.policy_step`. base: (B,) final base priorities instead of `priority`. A group
        is added in one call; it is as old as its oldest member, its base is their mean.
        """
        step = operator.index(step)
        for episode in episodes:
            episode.validate()
        if birthdays is None:
            birthdays = [episode.policy_step for episode in episodes]
        if base is None:
            needed = self.sampler == "prioritized" or self.eviction == "lowest_priority"
            base = PRIORITIES[self.priority if needed else "uniform"](episodes, self.eps)
        birthdays, base = checked_birthdays(birthdays, len(episodes), step), checked_priorities(base, len(episodes))
        if not episodes:
            return NONE
        correct = np.array([self.sampler == "positive_bias" and self._is_correct(episode) for episode in episodes])

        entries = rows_by_group(episodes) if self.unit == "group" else [[row] for row in range(len(episodes))]
        largest = self.real_log_base.max(initial=-math.inf)
        groups = [tuple(episodes[row] for row in rows) for rows in entries]
        slots = self.insert(groups, [birthdays[rows].min() for rows in entries], self.capacity)
        self.correct[slots] = [correct[rows].any() for rows in entries]
        self.log_base[slots] = self.real_log_base[slots] = log([base[rows].mean() for rows in entries])
        if self.insert_priority == "max":
            self.log_base[slots] = largest if largest > -math.inf else self.real_log_base[slots].max()
        id_of_row = np.empty(len(episodes), np.int64)
        for rows, id in zip(entries, self.id[slots]):
            id_of_row[rows] = id
        self.retire(self.expired(step, self.max_age), "dropped_by_age")
        self.retire(self._beyond_capacity(step), "evicted")
        return id_of_row

    def _is_correct(self, episode):
        require("success" in episode.info, "sampler='positive_bias' needs episode.info['success'], which is missing")
        return bool(episode.info["success"]) and (not self.positive_advantage_only or bool(episode.advantages.any()))

    def _beyond_capacity(self, step):
        slots = self.live()
        if self.sampler == "positive_bias":
            n_correct = round(self.positive_fraction * self.capacity)
            older = self.lowest(slots, self.id[slots], len(slots) - (self.capacity - n_correct))
            wrong, correct = older[~self.correct[older]], older[self.correct[older]]
            return np.concatenate([wrong, self.lowest(correct, self.id[correct], len(correct) - n_correct)])
        if len(slots) <= self.capacity:
            return NONE
        keys = EVICTIONS[self.eviction](self.table(step), self._log_age(step))
        return self.lowest(slots, keys[slots], len(slots) - self.capacity)

    # ---- priorities

    def update_priorities(self, ids, base) -> int:
        """Set final base priorities, of repeated ids their mean; returns of how many. Ids of entries that left are skipped."""
        ids, base = np.asarray(ids), checked_priorities(base, len(ids))
        slots = self.slots(ids)
        slots, base = slots[slots >= 0], base[slots >= 0]
        self.counts["stale_updates"] += len(ids) - len(slots)
        distinct, means = means_of_repeats(slots, base)
        self.log_base[distinct] = self.real_log_base[distinct] = log(means)
        return len(slots)

    def set_tau(self, tau: float) -> None:
        require(not isinstance(tau, str) and tau > 0, f"tau={tau!r} must be a positive number (inf: no decay)")
        self.tau = float(tau)

    def _log_age(self, step):
        """The age law of each slot; -inf where it is free."""
        return np.where(self.id >= 0, AGE_LAWS[self.age_law](self.table(step), step, self.tau), -math.inf)

    def _mass(self, log_age, without=NONE):
        """(p · f(age))^alpha of each slot over the largest of those that are not in `without`, which have 0."""
        if len(without):
            log_age = log_age.copy()
            log_age[without] = -math.inf
        if self.alpha == 0:
            return (log_age > -math.inf).astype(np.float64)
        log_mass = self.alpha * (self.log_base + (log_age - log_age.max()))  # the youngest keep the digits of their base
        return np.exp(log_mass - max(log_mass.max(), -1e300))  # all priorities may be 0

    def probabilities(self, step: int) -> tuple:
        """(ids, P), ids ascending: the distribution of a single draw."""
        expired = self.expired(step, self.max_age)
        slots = self.live(without=expired)
        require(len(slots) > 0, "the buffer is empty; there is no sampling distribution")
        slots = slots[np.argsort(self.id[slots])]
        if self.sampler == "prioritized":
            mass = self._mass(self._log_age(step), without=expired)[slots]
        elif self.sampler == "newest":
            mass = np.isin(slots, self.newest(1))
        elif self.sampler == "never_used_first" and not self.uses[slots].all():
            mass = self.uses[slots] == 0
        else:
            mass = np.ones(len(slots))
        require(mass.any(), "every priority is 0: there is no mass to sample from")
        return self.id[slots], mass / mass.sum()

    # ---- drawing

    def ready(self, n: int, step: int) -> bool:
        return self.refusal(n, step) is None

    def refusal(self, n: int, step: int) -> str | None:
        """Why `sample(n, step)` would raise, or None."""
        expired, n_fresh = self.expired(step, self.max_age), round(self.fresh_fraction * n)
        size = len(self) - len(expired)
        repeats = self.sampler == "prioritized" and self.draw != "systematic"
        if n < 1:
            return f"n is {n}; it must be at least 1"
        if size < max(1, self.min_size):
            return f"the buffer is empty or below min_size={self.min_size}: it holds {size} entries"
        if step < self.newest_birthday:
            return f"step={step} is earlier than a birthday, {self.newest_birthday}"
        if n > size and not (repeats and n_fresh <= size):
            return f"n={n} is larger than the buffer, {size} entries, and entries do not repeat"
        if self.sampler == "prioritized" and n > n_fresh:
            drawable = self.id >= 0 if self.alpha == 0 else self.log_base > -math.inf
            drawable[expired] = drawable[self.newest(n_fresh)] = False
            positive, needed = np.count_nonzero(drawable), 1 if repeats else n - n_fresh
            if positive < needed:
                return f"n={n} needs {needed} entries of positive mass besides {n_fresh} fresh ones, not {positive}"
        return None

    def sample(self, n: int, step: int, lowest=float) -> ReplaySample:
        """Draw n entries in random order; with draw="systematic" none repeats, and inclusion probabilities pi are exact.

        weights are (N·pi/n)^-beta over their largest. With is_includes_age, at beta=1, they estimate the mean over the buffer:
        freshness is cancelled. Without, pi is first divided by f(age)^alpha, and they estimate the mean weighted by that: the
        base priority is undone, freshness is kept. `lowest`: of this batch's lowest log pi, that of all processes' batches.
        """
        n, step = operator.index(n), operator.index(step)
        refusal = self.refusal(n, step)
        if refusal:
            raise ValueError(f"cannot sample: {refusal}")
        self.retire(self.expired(step, self.max_age), "dropped_by_age")
        fresh = self.newest(round(self.fresh_fraction * n))
        if self.sampler == "prioritized":
            log_age = self._log_age(step)
            mass = self._mass(log_age)
            slots, inclusion = self._draw_by_mass(n - len(fresh), fresh, log_age, mass)
            probabilities = mass[slots] / (mass.sum() or 1.0)  # no mass: all are fresh
            log_pi = np.log(inclusion) - (0.0 if self.is_includes_age else self.alpha * log_age[slots])
            weights = np.exp(self.beta * (lowest(log_pi.min()) - log_pi)).astype(np.float32)
        else:
            slots, inclusion = self._draw_evenly(n - len(fresh), fresh)
            probabilities, weights = inclusion / n, np.ones(n, np.float32)

        self.log_base[slots] = self.real_log_base[slots]
        ids, ages, gaps = self.id[slots], step - self.birthday[slots], self.count_uses(slots, step)
        members = [self.members[slot] for slot in slots.tolist()]
        columns = (weights, ages, probabilities, inclusion, gaps)
        if self.unit == "group":
            rows = np.repeat(np.arange(n), [len(group) for group in members])
            ids, columns = ids[rows], [column[rows] for column in columns]
        return ReplaySample(ids, list(chain.from_iterable(members)), *columns)

    def _draw_by_mass(self, n, fresh, log_age, mass):
        """`fresh` and n other slots, and the expected number of times that each is drawn."""
        out, parts = fresh, [(fresh, np.ones(len(fresh)))]
        while n > 0:
            if len(out):
                mass = self._mass(log_age, without=out)
            cumulative = np.cumsum(mass)
            total = cumulative[-1]
            targets = np.minimum(DRAWS[self.draw](n, total, self.rng), np.nextafter(total, 0))  # not past the end
            slots = np.searchsorted(cumulative, targets, side="right")[self.rng.permutation(n)]
            expected = mass[slots] * (n / total)
            certain = expected >= 1 - 1e-9
            if self.draw != "systematic" or not certain.any():
                parts.append((slots, expected))
                break
            certain = np.unique(slots[certain])
            parts.append((certain, np.ones(len(certain))))
            out = np.concatenate([out, certain])
            n -= len(certain)
        slots, inclusion = map(np.concatenate, zip(*parts))
        return self._shuffled(slots, inclusion) if len(out) else (slots, inclusion)

    def _draw_evenly(self, n, fresh):
        """The same for samplers without priorities."""
        if self.sampler == "newest":
            return self._shuffled(self.newest(n + len(fresh)), np.ones(n + len(fresh)))
        slots = self.live(without=fresh)
        later = self.uses[slots] > 0 if self.sampler == "never_used_first" else np.zeros(len(slots), bool)
        first, others = slots[~later], slots[later]
        n_first = min(n, len(first))
        drawn = [self.rng.choice(first, n_first, replace=False), self.rng.choice(others, n - n_first, replace=False)]
        inclusion = [1.0, n_first / max(1, len(first)), (n - n_first) / max(1, len(others))]
        return self._shuffled(np.concatenate([fresh, *drawn]), np.repeat(inclusion, [len(fresh), n_first, n - n_first]))

    def _shuffled(self, slots, inclusion):
        order = self.rng.permutation(len(slots))
        return slots[order], inclusion[order]

    # ---- stats, state

    def stats(self, step: int) -> dict:
        """Plain numbers, None where undefined; ages in the unit of `step`, entropy in nats (uniform: log size)."""
        stats = super().stats(step) | {
            "fill": len(self) / self.capacity, "tau": self.tau if self.tau < math.inf else None, "beta": self.beta,
            "sampling_half_life": half_life(self.age_law, self.tau, self.alpha),
            **dict.fromkeys(("priority_min", "priority_max", "correct_fraction", "priority_entropy", "newest_mass"))}
        slots = self.live()
        if len(slots):
            base = np.exp(self.log_base[slots])
            stats |= {"priority_min": float(base.min()), "priority_max": float(base.max())}
            if self.sampler == "positive_bias":
                stats["correct_fraction"] = float(self.correct[slots].mean())
        with contextlib.suppress(ValueError):  # nothing can be drawn
            ids, p = self.probabilities(step)
            birthdays = self.birthday[self.slots(ids)]
            stats["priority_entropy"] = float(-(p[p > 0] * np.log(p[p > 0])).sum())
            stats["newest_mass"] = float(p[birthdays == birthdays.max()].sum())
        return stats

    def state_dict(self) -> dict:
        return super().state_dict() | {"tau": self.tau, "config": dict(self.config), "rng": self.rng.bit_generator.state}

    def load_state_dict(self, state: dict) -> None:
        """Continue from the `state_dict()` of a buffer with the same arguments; tau becomes the saved one."""
        require_same(state["config"], self.config, but=("tau", "seed"))
        self.__init__(**self.config)
        super().load_state_dict(state)
        self.tau, self.rng.bit_generator.state = state["tau"], state["rng"]
