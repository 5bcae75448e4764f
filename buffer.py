"""The memory of FreshReplay, NumPy only: the played `Episode`, the `ReplayBuffer` that draws past episodes by
informativeness and freshness, the `DriftEstimator` behind `--tau auto`, the `ProblemSampler` that picks what to ask.

Freshness-aware prioritised replay (FreshPER, arXiv 2604.16918) draws entry i with P(i) ∝ (p_i · exp(-age_i/tau))^alpha.
All entries age together, so the decay is folded into a weight that is set once, exp(alpha·(log p_i + birthday_i/tau)):
the ratios between weights, hence P, are the same at every step, and ageing costs nothing.
"""
import math
import operator
import sys
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import numpy as np

from episode import Episode, _require_all, one_of, pack_episodes, require, unpack_episodes

PRIORITIES = ("reward", "advantage", "td_error", "group_std", "uniform")
SLOT_ARRAYS = ("id", "birthday", "last_use", "uses", "log_base", "real_log_base", "correct", "bytes")
STATE_VALUES = ("tau", "next_id", "newest_birthday", "base_birthday", "shift", "positive")
SAMPLERS = ("prioritized", "uniform", "newest", "never_used_first", "positive_bias")


# ------------------------------------------------------------------------------------------------ the sum tree


class SumTree:
    """Non-negative float64 leaves and, level above level, the sums of blocks of WIDTH of them: `set` and `find` touch
    WIDTH numbers a level, TOP at the top. Sums are added up anew, never corrected by a difference: no error builds up.
    """

    WIDTH, TOP = 64, 16_384

    def __init__(self, leaves: np.ndarray):
        self.levels = [leaves]
        while len(self.levels[-1]) > self.TOP:
            lower = self.levels[-1]
            self.levels[-1] = lower = np.concatenate([lower, np.zeros(-len(lower) % self.WIDTH)])
            self.levels.append(lower.reshape(-1, self.WIDTH).sum(axis=1))
        self.leaves, self.top = self.levels[0], None  # top: cumulative sums of the last level, when needed

    @property
    def total(self) -> float:
        if self.top is None:
            self.top = np.cumsum(self.levels[-1])
        return self.top[-1] if len(self.top) else 0.0

    @property
    def nbytes(self) -> int:
        return sum(sys.getsizeof(level) for level in self.levels)

    def set(self, indices: np.ndarray, values: np.ndarray | float) -> None:
        self.leaves[indices], self.top = values, None
        for lower, upper in zip(self.levels, self.levels[1:]):
            indices = indices // self.WIDTH
            upper[indices] = lower.reshape(-1, self.WIDTH)[indices].sum(axis=1)

    def find(self, targets: np.ndarray) -> np.ndarray:
        """For each target the smallest index whose cumulative sum is strictly greater: never a leaf of zero."""
        targets = np.minimum(targets, np.nextafter(self.total, 0))  # rounding must not lead past the last leaf
        indices = children = np.searchsorted(self.top, targets, side="right")
        sums, rows = self.top[None], 0
        for lower in self.levels[-2::-1]:
            targets = targets - np.where(children > 0, sums[rows, children - 1], 0.0)
            sums, rows = np.cumsum(lower.reshape(-1, self.WIDTH)[indices], axis=1), np.arange(len(targets))
            targets = np.minimum(targets, np.nextafter(sums[:, -1], 0))
            children = np.count_nonzero(sums <= targets[:, None], axis=1)
            indices = indices * self.WIDTH + children
        return indices


# -------------------------------------------------------------------------------------------------- the buffer


@dataclass
class ReplaySample:
    """A drawn batch of n entries; with unit="group" every row of a group repeats the values of its entry."""

    ids: np.ndarray  # (n,) int64
    episodes: list[Episode]
    weights: np.ndarray  # (n,) float32 importance weights, the largest of the batch is 1
    ages: np.ndarray  # (n,) int64, step - birthday
    probabilities: np.ndarray  # (n,) P(i), as in `ReplayBuffer.probabilities`
    inclusion: np.ndarray  # (n,) pi, the expected number of times that the entry is in a batch of this size
    steps_since_last_use: np.ndarray  # (n,) int64; -1: never used before; 0: again in the same batch


class ReplayBuffer:
    """Past episodes, drawn by priority and age; `sample` defines the draws and the importance weights.

    capacity         entries kept, the best ones by `eviction`; an entry is an episode or a whole prompt group (`unit`)
    sampler          prioritized | uniform | newest | never_used_first | positive_bias (arXiv 2604.08706: the last
                     (1-delta)·N entries and the last delta·N correct ones before them, delta = positive_fraction;
                     with fewer correct ones the buffer is smaller). All but prioritized: weights of 1, no repeats.
    priority         reward |score|+eps | advantage mean |A| over action tokens+eps | td_error (given to `add`) |
                     group_std of the scores of the group+eps | uniform 1
    alpha, tau       P(i) ∝ (p_i · exp(-age_i/tau))^alpha; tau=inf is PER, alpha=0 uniform; unit of tau: that of `step`.
                     The half-life of the sampling weight is tau · ln 2 / alpha.
    beta, beta_end, beta_steps    importance exponent, annealed linearly over beta_steps draws (None: it stays at beta)
    insert_priority  base | max: the largest real base of the live entries, until the first draw (Schaul et al., 2016)
    eviction         fifo: what came in first leaves | lowest_priority: the lowest p · exp(-age/tau), then oldest id
    draw             systematic (no repeats) | stratified | iid
    is_includes_age  see `sample`
    max_age          older entries are dropped and counted
    positive_advantage_only    a correct entry of positive_bias must also have a non-zero advantage
    fresh_fraction   share of a batch taken from the newest entries; the sampler draws the rest from the others
    min_size         `sample` refuses below this many entries (ask `ready`)
    """

    def __init__(
        self,
        capacity: int,
        sampler: str = "prioritized",
        priority: str = "advantage",
        alpha: float = 0.6,
        tau: float = 500.0,
        beta: float = 0.4,
        beta_end: float = 1.0,
        beta_steps: int | None = None,
        eps: float = 0.01,
        insert_priority: str = "base",
        eviction: str = "fifo",
        unit: str = "episode",
        draw: str = "systematic",
        is_includes_age: bool = False,
        max_age: int | None = None,
        positive_fraction: float = 0.0,
        positive_advantage_only: bool = False,
        fresh_fraction: float = 0.0,
        min_size: int = 0,
        seed: int = 0,
    ):
        self.config = {name: value for name, value in locals().items() if name != "self"}
        for name in ("beta", "beta_end", "positive_fraction", "fresh_fraction"):
            require(0 <= self.config[name] <= 1, f"{name} is {self.config[name]}; it must lie between 0 and 1")
        for name, low in {"capacity": 1, "alpha": 0, "eps": 0, "beta_steps": 1, "max_age": 0, "min_size": 0}.items():
            value = self.config[name]
            require(value is None or low <= value < math.inf, f"{name}={value} must be finite and at least {low}")
        require(min_size <= capacity, f"min_size={min_size} is larger than capacity={capacity}")
        if sampler == "positive_bias":
            require(eviction == "fifo", f"sampler='positive_bias' has its own eviction; drop eviction={eviction!r}")
        else:
            require(positive_fraction == 0, f"positive_fraction={positive_fraction} needs sampler='positive_bias'")
        self.sampler = one_of("sampler", sampler, SAMPLERS)
        self.priority = one_of("priority", priority, PRIORITIES)
        self.insert_priority = one_of("insert_priority", insert_priority, ("base", "max"))
        self.eviction = one_of("eviction", eviction, ("fifo", "lowest_priority"))
        self.unit = one_of("unit", unit, ("episode", "group"))
        self.draw = one_of("draw", draw, ("systematic", "stratified", "iid"))
        self.capacity, self.min_size, self.eps, self.alpha = capacity, min_size, eps, float(alpha)
        self.beta_start, self.beta_end, self.beta_steps = beta, beta_end, beta_steps
        self.is_includes_age, self.fresh_fraction = is_includes_age, fresh_fraction
        self.max_age = math.inf if max_age is None else max_age
        self.positive_capacity = round(positive_fraction * capacity)
        self.positive_advantage_only = positive_advantage_only
        self.rng = np.random.default_rng(seed)

        # An entry lives in a slot. Free slots have id -1, priority 0 and no members.
        self.next_id, self.free = 0, []
        self.first_id, self.slot_of = 0, np.full(1, -1, np.int32)  # slot of id first_id + i or -1: left; the last is -1
        self.members: list[tuple[Episode, ...]] = []
        self.id, self.birthday, self.last_use, self.uses = (np.zeros(0, np.int64) for _ in range(4))
        self.log_base, self.real_log_base = np.zeros(0), np.zeros(0)  # in force; real: differs until a "max" is drawn
        self.correct, self.bytes = np.zeros(0, bool), np.zeros(0, np.int64)
        self.tree = SumTree(np.zeros(0))  # folded weights
        self.base_birthday, self.shift = 0, 0.0  # their scale, see `_log_weights`
        self.positive = 0  # entries of positive priority
        self.newest_birthday = -(2**62)
        self.set_tau(tau)
        names = ("added", "draws", "drawn", "first_uses", "reuse_gap", "evicted", "evicted_unused", "retired_uses")
        self.counts = dict.fromkeys(names + ("dropped_by_age", "dropped_by_age_tokens", "stale_updates"), 0)

    def __len__(self) -> int:
        return len(self.members) - len(self.free)

    @property
    def beta(self) -> float:
        progress = min(1.0, self.counts["draws"] / self.beta_steps) if self.beta_steps else 0.0
        return self.beta_start + (self.beta_end - self.beta_start) * progress

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the buffer holds, episodes and Python objects included."""
        index = sys.getsizeof(self.members) + sys.getsizeof(self.free) + self.slot_of.nbytes + self.tree.nbytes
        return int(self.bytes.sum()) + index + sum(getattr(self, name).nbytes for name in SLOT_ARRAYS)

    # -------------------------------------------------------------------------------------------- adding, evicting

    def add(self, episodes: list[Episode], step: int, birthdays: Any = None, base: Any = None) -> np.ndarray:
        """Store episodes, evict what is beyond capacity, and return the id of each episode's entry, (B,) int64.

        birthdays: (B,) integers in the unit of `step`; default `episode.policy_step`. base: (B,) final base priorities,
        instead of those that `priority` computes. A group is added in one call; it is as old as its oldest member, and
        its base is their mean.
        """
        step = operator.index(step)
        for episode in episodes:
            episode.validate()
        birthdays = np.array([e.policy_step for e in episodes] if birthdays is None else birthdays)
        require(birthdays.shape == (len(episodes),), f"birthdays has shape {birthdays.shape}, not ({len(episodes)},)")
        base = self._base_priorities(episodes) if base is None else _checked_priorities(base, len(episodes))
        if not episodes:
            return np.zeros(0, np.int64)
        require(birthdays.dtype.kind in "iu", f"birthdays has dtype {birthdays.dtype}; it must be of integers")
        require(birthdays.max() <= step, f"birthday {birthdays.max()} is later than step={step}")
        correct = np.array([self._is_correct(episode) for episode in episodes])

        entries = _rows_by_group(episodes) if self.unit == "group" else [[row] for row in range(len(episodes))]
        if self.unit == "group":
            base = np.array([base[rows].mean() for rows in entries])
            birthdays = np.array([birthdays[rows].min() for rows in entries])
            correct = np.array([correct[rows].any() for rows in entries])
        if len(self.free) < len(entries):
            self._grow(len(entries))
        slots = np.array([self.free.pop() for _ in entries])
        ids = np.arange(self.next_id, self.next_id + len(entries))
        self._name(slots, ids)
        self.newest_birthday = max(self.newest_birthday, int(birthdays.max()))
        # ALGO LOGIC: the first priority of a new entry
        real = _log(base)
        largest = self.real_log_base.max(initial=-math.inf)
        first = real if self.insert_priority == "base" else np.full(len(real), largest if largest > -math.inf else 0.0)
        self.id[slots], self.birthday[slots], self.correct[slots] = ids, birthdays, correct
        self.last_use[slots], self.uses[slots] = 0, 0
        self._set_log_base(slots, first, real)
        for rows, slot in zip(entries, slots.tolist()):
            self.members[slot] = tuple(episodes[row] for row in rows)
            self.bytes[slot] = sys.getsizeof(self.members[slot]) + sum(episode.nbytes for episode in self.members[slot])
        self.counts["added"] += len(entries)
        self._remove(self._expired(step), "dropped_by_age")
        self._remove(self._beyond_capacity(), "evicted")

        id_of_row = np.empty(len(episodes), np.int64)
        for rows, id in zip(entries, ids):
            id_of_row[rows] = id
        return id_of_row

    def _base_priorities(self, episodes: list[Episode]) -> np.ndarray:
        if self.priority == "uniform" or (self.sampler != "prioritized" and self.eviction != "lowest_priority"):
            return np.ones(len(episodes))
        # ALGO LOGIC: base priorities
        if self.priority == "reward":
            return np.array([abs(episode.score) for episode in episodes]) + self.eps
        if self.priority == "advantage":
            return np.array([_mean_abs_advantage(episode) for episode in episodes]) + self.eps
        require(self.priority == "group_std", "priority='td_error' needs add(..., base=mean |TD error| an episode)")
        std = np.empty(len(episodes))
        for rows in _rows_by_group(episodes):
            std[rows] = np.std([episodes[row].score for row in rows])
        return std + self.eps

    def _is_correct(self, episode: Episode) -> bool:
        if self.sampler != "positive_bias":
            return False
        require("success" in episode.info, "sampler='positive_bias' needs episode.info['success'], which is missing")
        return bool(episode.info["success"]) and (not self.positive_advantage_only or bool(episode.advantages.any()))

    def _grow(self, n: int) -> None:
        old = len(self.id)
        self._resize(max(old + n - len(self.free), min(2 * old, self.capacity + n)))
        self.free = list(range(len(self.id) - 1, old - 1, -1)) + self.free
        self._rescale()

    def _resize(self, size: int) -> None:
        empty = {"id": -1, "log_base": -math.inf, "real_log_base": -math.inf}
        for name in SLOT_ARRAYS:
            array = getattr(self, name)
            setattr(self, name, np.concatenate([array, np.full(size - len(array), empty.get(name, 0), array.dtype)]))
        self.members += [()] * (size - len(self.members))

    def _name(self, slots: np.ndarray, ids: np.ndarray) -> None:
        """Record the slots of new, consecutive ids; the map starts at the oldest id that is still here."""
        self.next_id = int(ids[-1]) + 1
        if self.next_id - self.first_id >= len(self.slot_of):
            gone = int(np.argmax(self.slot_of >= 0)) if (self.slot_of >= 0).any() else int(ids[0]) - self.first_id
            kept = self.slot_of[gone:]
            self.slot_of = np.concatenate([kept, np.full(max(len(kept), len(ids)) + 1, -1, np.int32)])
            self.first_id += gone
        self.slot_of[ids - self.first_id] = slots

    def _slots(self, ids: np.ndarray) -> np.ndarray:
        """Slots of ids that were given out, -1 for those that have left."""
        return self.slot_of[np.maximum(ids - self.first_id, -1)]

    def _live(self) -> np.ndarray:
        return np.flatnonzero(self.id >= 0)

    def _lowest(self, slots: np.ndarray, keys: np.ndarray, n: int) -> np.ndarray:
        """The n of `slots` with the smallest keys, O(N); among equal keys the smallest ids."""
        if n <= 0 or n >= len(slots):
            return slots[: max(n, 0)]
        threshold = np.partition(keys, n - 1)[n - 1]
        lower, ties = slots[keys < threshold], slots[keys == threshold]
        return np.concatenate([lower, ties[np.argsort(self.id[ties])[: n - len(lower)]]])

    def _newest(self, n: int) -> np.ndarray:
        """Slots of the n newest entries."""
        if n == 0:
            return np.zeros(0, np.int64)
        slots = self._live()
        return np.setdiff1d(slots, self._lowest(slots, self.birthday[slots], len(slots) - n))

    def _beyond_capacity(self) -> np.ndarray:
        """The entries to evict: the same ones whether they came in one call or in many."""
        excess = len(self) - self.capacity
        # ALGO LOGIC: who leaves. By arrival, not by birthday: from samplers beside the training long episodes come late and old,
        # and would leave unseen
        if self.sampler == "positive_bias":
            slots = self._live()
            older = self._lowest(slots, self.id[slots], len(slots) - (self.capacity - self.positive_capacity))
            wrong, correct = older[~self.correct[older]], older[self.correct[older]]
            surplus = self._lowest(correct, self.id[correct], len(correct) - self.positive_capacity)
            return np.concatenate([wrong, surplus])
        if excess <= 0:
            return np.zeros(0, np.int64)
        slots = self._live()
        keys = self.id[slots]
        if self.eviction == "lowest_priority":
            keys = self.log_base[slots] + (self.birthday[slots] - self.birthday[slots].max()) / self.tau
        return self._lowest(slots, keys, excess)

    def _expired(self, step: int) -> np.ndarray:
        if self.max_age == math.inf:
            return np.zeros(0, np.int64)
        return np.flatnonzero((self.id >= 0) & (step - self.birthday > self.max_age))

    def _remove(self, slots: np.ndarray, reason: str) -> None:
        if not len(slots):
            return
        self.counts[reason] += len(slots)
        self.counts["retired_uses"] += int(self.uses[slots].sum())
        if reason == "evicted":
            self.counts["evicted_unused"] += int(np.count_nonzero(self.uses[slots] == 0))
        else:
            self.counts["dropped_by_age_tokens"] += sum(len(e.tokens) for slot in slots for e in self.members[slot])
        self.positive -= int(np.count_nonzero(np.isfinite(self.log_base[slots])))
        self.slot_of[self.id[slots] - self.first_id] = -1
        for slot in slots.tolist():
            self.members[slot] = ()
        self.id[slots], self.log_base[slots], self.real_log_base[slots], self.bytes[slots] = -1, -math.inf, -math.inf, 0
        self.tree.set(slots, 0.0)
        self.free += slots.tolist()

    # ---------------------------------------------------------------------------------------------- priorities

    def update_priorities(self, ids: Any, base: Any) -> int:
        """Set final base priorities (n,), without eps; birthdays stay. Repeated ids get their mean. Ids whose entry has
        left are skipped and counted as stale; ids never given out are an error. Returns how many ids applied.
        """
        ids = np.asarray(ids)
        base = _checked_priorities(base, len(ids))
        if not len(ids):
            return 0
        if ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= self.next_id:
            raise ValueError(f"ids {ids} must be integers that `add` gave out: 0..{self.next_id - 1}")
        slots = self._slots(ids)
        alive = slots >= 0
        applied = int(np.count_nonzero(alive))
        self.counts["stale_updates"] += len(ids) - applied
        if applied < len(ids) or len(set(ids.tolist())) < len(ids):
            slots, inverse, repeats = np.unique(slots[alive], return_inverse=True, return_counts=True)
            base = np.bincount(inverse, base[alive]) / repeats
        if applied:
            log_base = _log(base)
            self._set_log_base(slots, log_base, log_base)
        return applied

    def set_tau(self, tau: float) -> None:
        """Change the decay; all folded weights are rebuilt from log p and birthday."""
        require(not isinstance(tau, str), f"tau={tau!r} is not a number; train.py resolves 'auto', by set_tau")
        require(tau > 0, f"tau is {tau}; it must be positive (inf: no decay)")
        self.tau = float(tau)
        self._rescale()

    def _set_log_base(self, slots: np.ndarray, log_base: np.ndarray, real: np.ndarray) -> None:
        """For slots without repeats, whose id and birthday are set."""
        before = np.count_nonzero(np.isfinite(self.log_base[slots]))
        self.positive += int(np.count_nonzero(np.isfinite(log_base)) - before)
        self.log_base[slots], self.real_log_base[slots] = log_base, real
        log_weights = self._log_weights(slots)
        if log_weights.max() > 200:  # far from overflow, which is at 709
            self._rescale()
        else:
            self.tree.set(slots, np.exp(log_weights))

    def _log_weights(self, slots: np.ndarray) -> np.ndarray:
        """alpha · (log p + (birthday - base_birthday)/tau) - shift. Birthdays are subtracted as integers: birthday/tau
        alone would lose digits once it is large.
        """
        if self.alpha == 0:
            return np.zeros(len(slots))
        return self.alpha * (self.log_base[slots] + (self.birthday[slots] - self.base_birthday) / self.tau) - self.shift

    def _rescale(self, without: np.ndarray | None = None) -> None:
        """Rebuild the folded weights so that the largest is 1; entries in the slots `without` get weight 0."""
        leaves, slots = np.zeros(len(self.id)), self._live()
        if without is not None:
            slots = np.setdiff1d(slots, without)
        if len(slots):
            self.base_birthday, self.shift = int(self.birthday[slots].max()), 0.0
            log_weights = self._log_weights(slots)
            self.shift = max(float(log_weights.max()), -1e300)  # all priorities may be 0
            leaves[slots] = np.exp(log_weights - self.shift)
        self.tree = SumTree(leaves)

    def probabilities(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """(ids, P), ids ascending: the distribution of a single draw at `step` over the live entries, exact."""
        slots = np.setdiff1d(self._live(), self._expired(step))
        require(len(slots) > 0, "the buffer is empty; there is no sampling distribution")
        slots = slots[np.argsort(self.id[slots])]
        if self.sampler == "prioritized":
            log_weights = self._log_weights(slots)
            require(log_weights.max() > -math.inf, "every priority is 0: there is no mass to sample from")
            mass = np.exp(log_weights - log_weights.max())
        elif self.sampler == "newest":
            mass = np.isin(slots, self._newest(1))
        elif self.sampler == "never_used_first" and not self.uses[slots].all():
            mass = self.uses[slots] == 0
        else:
            mass = np.ones(len(slots))
        return self.id[slots], mass / mass.sum()

    # ------------------------------------------------------------------------------------------------- drawing

    def ready(self, n: int, step: int) -> bool:
        """True if `sample(n, step)` would succeed."""
        return self.refusal(n, step) is None

    def refusal(self, n: int, step: int) -> str | None:
        """Why `sample(n, step)` would raise, or None."""
        return self._refusal(n, step, self._expired(step))

    def _refusal(self, n: int, step: int, expired: np.ndarray) -> str | None:
        """Why a batch of n cannot be drawn at `step`, or None."""
        n_fresh = round(self.fresh_fraction * n)
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
            positive = size - n_fresh  # at alpha 0 all have mass
            if self.alpha > 0:
                out = np.union1d(expired, self._newest(n_fresh)) if n_fresh or len(expired) else expired
                positive = self.positive - np.count_nonzero(self.log_base[out] > -math.inf)
            needed = 1 if repeats else n - n_fresh
            if positive < needed:
                return f"n={n} needs {needed} entries of positive mass besides {n_fresh} fresh ones, not {positive}"
        return None

    def sample(self, n: int, step: int, lowest=float) -> ReplaySample:
        """Draw n entries (episodes or groups) at `step`, in random order.

        systematic: one random offset u, targets (u + k)·S/n over the cumulative mass S. An entry whose expected count
        n·w/S reaches 1 is taken once and removed, and the rest is drawn again from the others: nothing repeats, and the
        inclusion probability pi is exactly 1 for those, n'·w/S' for the others (n', S': what is left).
        stratified: one target in each n-th of S (the paper's). iid: n independent targets. For both pi is n·P.

        weights are (N·pi/n)^-beta, over their largest in the batch. At beta=1, with is_includes_age, the mean of x
        times the unnormalised weights estimates the uniform mean of x over the buffer: freshness is cancelled. Without
        (the default) pi is first divided by the age factor exp(-alpha·age/tau), and the self-normalised mean estimates
        the mean weighted by that factor: the base priority is undone, freshness is kept. `lowest` turns this batch's lowest
        log pi into that of all processes' batches, so that their largest weight is 1.
        """
        n, step = operator.index(n), operator.index(step)
        expired = self._expired(step)
        refusal = self._refusal(n, step, expired)
        if refusal:
            raise ValueError(f"cannot sample: {refusal}")
        self._remove(expired, "dropped_by_age")
        if self.tree.total < 1e-200:
            self._rescale()

        fresh = self._newest(round(self.fresh_fraction * n))
        slots, inclusion = self._draw(n - len(fresh), fresh)
        ages = step - self.birthday[slots]
        if self.sampler == "prioritized":
            probabilities = self.tree.leaves[slots] / (self.tree.total or 1.0)  # 0: all is fresh, which needs no priority
            log_pi = np.log(inclusion) if self.is_includes_age else np.log(inclusion) + self.alpha / self.tau * ages
            weights = np.exp(self.beta * (lowest(log_pi.min()) - log_pi)).astype(np.float32)
        else:
            probabilities, weights = inclusion / n, np.ones(n, np.float32)
        ids, gaps = self.id[slots], self._count_uses(slots, step)

        members = list(map(self.members.__getitem__, slots.tolist()))
        columns = (weights, ages, probabilities, inclusion, gaps)
        if self.unit == "group":
            rows = np.repeat(np.arange(n), [len(group) for group in members])
            ids, columns = ids[rows], [column[rows] for column in columns]
        return ReplaySample(ids, list(chain.from_iterable(members)), *columns)

    def _draw(self, n: int, taken: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """`taken` and n slots besides, and the expected number of times that each is drawn."""
        # ALGO LOGIC: sampling rules
        if self.sampler == "prioritized":
            return self._draw_prioritized(n, taken)
        if self.sampler == "newest":
            return self._shuffled(self._newest(n + len(taken)), np.ones(n + len(taken)))
        slots = np.setdiff1d(self._live(), taken)
        unused = self.uses[slots] == 0 if self.sampler == "never_used_first" else np.ones(len(slots), bool)
        first, others = slots[unused], slots[~unused]
        n_first = min(n, len(first))
        n_others = n - n_first
        drawn = [self.rng.choice(first, n_first, replace=False), self.rng.choice(others, n_others, replace=False)]
        inclusion = [1.0, n_first / max(1, len(first)), n_others / max(1, len(others))]
        return self._shuffled(np.concatenate([taken, *drawn]), np.repeat(inclusion, [len(taken), n_first, n_others]))

    def _draw_prioritized(self, n: int, taken: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        out, parts, underflow = taken, [], False
        if len(out):
            parts.append((taken, np.ones(len(taken))))
            self.tree.set(out, 0.0)
        while n > 0:
            total = self.tree.total
            if total < 1e-200:  # what is left is too small beside what is out: scale it up
                self._rescale(without=out)
                total, underflow = self.tree.total, True
            if self.draw == "iid":
                targets = self.rng.random(n) * total
            else:
                targets = (np.arange(n) + self.rng.random(None if self.draw == "systematic" else n)) * (total / n)
            slots = self.tree.find(targets)[self.rng.permutation(n)]
            expected = self.tree.leaves[slots] * (n / total)
            certain = expected >= 1 - 1e-9
            if self.draw != "systematic" or not np.count_nonzero(certain):
                parts.append((slots, expected))
                break
            certain = np.unique(slots[certain])
            parts.append((certain, np.ones(len(certain))))
            self.tree.set(certain, 0.0)
            out = np.concatenate([out, certain])
            n -= len(certain)
        if underflow:
            self._rescale()
        elif len(out):
            self.tree.set(out, np.exp(self._log_weights(out)))
        return self._shuffled(*map(np.concatenate, zip(*parts))) if len(out) else parts[0]

    def _shuffled(self, slots: np.ndarray, inclusion: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        order = self.rng.permutation(len(slots))
        return slots[order], inclusion[order]

    def _count_uses(self, slots: np.ndarray, step: int) -> np.ndarray:
        """Count a batch's uses; returns each row's steps since its last use (arXiv 2604.08706, see `ReplaySample`)."""
        uses = self.uses[slots]
        gaps = np.where(uses == 0, -1, step - self.last_use[slots])
        self.uses[slots] = uses + 1
        if self.draw != "systematic":
            again = np.ones(len(slots), bool)
            again[np.unique(slots, return_index=True)[1]] = False
            gaps[again] = 0
            np.add.at(self.uses, slots[again], 1)
        self.last_use[slots] = step
        first_uses = int(np.count_nonzero(gaps < 0))
        self.counts["draws"] += 1
        self.counts["drawn"] += len(slots)
        self.counts["first_uses"] += first_uses
        self.counts["reuse_gap"] += int(gaps.sum()) + first_uses
        if self.insert_priority == "max":
            waiting = np.unique(slots[self.log_base[slots] != self.real_log_base[slots]])
            if len(waiting):
                self._set_log_base(waiting, self.real_log_base[waiting], self.real_log_base[waiting])
        return gaps

    # ----------------------------------------------------------------------------------------- stats, state, files

    def stats(self, step: int) -> dict[str, float | int | None]:
        """Plain numbers, None where undefined; ages in the unit of `step`, entropy in nats (uniform: log size)."""
        slots, finite = self._live(), 0 < self.alpha and self.tau < math.inf
        stats: dict[str, float | int | None] = {
            "size": len(self),
            "episodes": sum(len(members) for members in self.members),
            "fill": len(self) / self.capacity,
            "bytes": self.nbytes,
            "tau": self.tau if self.tau < math.inf else None,
            "sampling_half_life": self.tau * math.log(2) / self.alpha if finite else None,
            "beta": self.beta,
        }
        names = ("age_mean", "age_p50", "age_p95", "age_max", "uses_mean", "priority_min", "priority_max")
        stats |= dict.fromkeys(names + ("correct_fraction", "priority_entropy", "newest_mass"))
        if not len(slots):
            return stats
        ages, base = step - self.birthday[slots], np.exp(self.log_base[slots])
        quantiles = np.percentile(ages, (50, 95, 100))
        values = (ages.mean(), *quantiles, self.uses[slots].mean(), base.min(), base.max())
        stats |= {name: float(value) for name, value in zip(names, values)}
        if self.sampler == "positive_bias":
            stats["correct_fraction"] = float(self.correct[slots].mean())
        young = slots[ages <= self.max_age]
        if len(young) and (self._log_weights(young).max() > -math.inf or self.sampler != "prioritized"):
            ids, p = self.probabilities(step)
            birthdays = self.birthday[self._slots(ids)]
            stats["priority_entropy"] = float(-(p[p > 0] * np.log(p[p > 0])).sum())
            stats["newest_mass"] = float(p[birthdays == birthdays.max()].sum())
        return stats

    def check_valid(self) -> None:
        """Assert every invariant that ties the parts together, O(N)."""
        slots, counts = self._live(), self.counts
        np.testing.assert_array_equal(self._slots(self.id[slots]), slots)
        assert np.count_nonzero(self.slot_of >= 0) == len(slots) == len(self), "the map of ids has dead ones"
        assert sorted(self.free + slots.tolist()) == list(range(len(self.id))), "a slot is lost, or free twice"
        assert len(self) <= self.capacity, f"{len(self)} entries, capacity {self.capacity}"
        assert all(bool(members) == (id >= 0) for members, id in zip(self.members, self.id)), "a slot without episodes"
        assert self.positive == np.count_nonzero(self.log_base > -math.inf), f"positive={self.positive} is wrong"
        weights = np.zeros(len(self.tree.leaves))
        weights[slots] = np.exp(self._log_weights(slots))
        np.testing.assert_allclose(self.tree.leaves, weights, rtol=1e-12)
        for level, rebuilt in zip(self.tree.levels, SumTree(self.tree.leaves.copy()).levels, strict=True):
            np.testing.assert_array_equal(level, rebuilt)
        assert counts["drawn"] == self.uses[slots].sum() + counts["retired_uses"], "uses do not add up"
        assert counts["added"] == len(self) + counts["evicted"] + counts["dropped_by_age"], "entries do not add up"

    def state_dict(self) -> dict[str, Any]:
        """All of the state: JSON-able values and plain arrays. Slots are part of it, so that draws continue exactly."""
        slots = self._live()
        members = [self.members[slot] for slot in slots.tolist()]
        state = {name: getattr(self, name)[slots] for name in SLOT_ARRAYS}
        state |= {"slots": slots, "free": np.array(self.free, np.int64)}
        state["sizes"] = np.array([len(group) for group in members], np.int64)
        packed = pack_episodes([episode for group in members for episode in group])
        state |= {f"episodes/{name}": value for name, value in packed.items()}
        state |= {name: getattr(self, name) for name in STATE_VALUES}
        return state | {"config": dict(self.config), "counts": dict(self.counts), "rng": self.rng.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the `state_dict()` of a buffer with the same arguments; beta_steps may differ (longer run), and
        tau becomes the saved one.
        """
        for name, value in self.config.items():
            saved = state["config"][name]
            same = value == saved or name in ("tau", "beta_steps", "seed")
            require(same, f"the saved buffer has {name}={saved!r}, this one {name}={value!r}")
        packed = {name.partition("/")[2]: value for name, value in state.items() if name.startswith("episodes/")}
        episodes = iter(unpack_episodes(packed))
        slots = state["slots"]
        self.__init__(**self.config)
        self._resize(len(slots) + len(state["free"]))
        for name in SLOT_ARRAYS:
            getattr(self, name)[slots] = state[name]
        for name in STATE_VALUES:
            setattr(self, name, state[name])
        self.free, self.counts = state["free"].tolist(), dict(state["counts"])
        self.rng.bit_generator.state = state["rng"]
        self.first_id = int(self.id[slots].min(initial=self.next_id))
        self.slot_of = np.full(self.next_id - self.first_id + 1, -1, np.int32)
        self.slot_of[self.id[slots] - self.first_id] = slots
        for slot, size in zip(slots.tolist(), state["sizes"].tolist()):
            self.members[slot] = tuple(islice(episodes, size))
        leaves = np.zeros(len(self.id))
        leaves[slots] = np.exp(self._log_weights(slots))
        self.tree = SumTree(leaves)


def _checked_priorities(base: Any, n: int) -> np.ndarray:
    base = np.asarray(base, np.float64)
    require(base.shape == (n,), f"base has shape {base.shape}, not ({n},)")
    _require_all((base >= 0) & (base < math.inf), "base", base, "a priority must be finite and at least 0")
    return base


def _log(base: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):  # a priority of 0 is never drawn
        return np.log(base)


def _rows_by_group(episodes: list[Episode]) -> list[list[int]]:
    groups: dict[int, list[int]] = {}
    for row, episode in enumerate(episodes):
        groups.setdefault(episode.group_id, []).append(row)
    return list(groups.values())


def _mean_abs_advantage(episode: Episode) -> float:
    actions = np.count_nonzero(episode.action_mask)
    return float(np.abs(episode.advantages).sum(dtype=np.float64)) / actions if actions else 0.0
