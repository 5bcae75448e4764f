"""What to ask next: prioritised replay of problems (arXiv 2601.02648)."""
import math
from heapq import heapify, heappop, heappush
from typing import Any

import numpy as np

from episode import one_of, require, require_all

ACTIVE, SOLVED, UNSOLVED = 0, 1, -1
PROBLEM_ARRAYS = ("trials", "successes", "streak", "tried", "last_step", "visits")
MODES = ("shuffled", "uniform", "heap", "proportional", "band", "dots")
PROBLEM_COUNTS = ("calls", "retests", "regressed", "rescued")


class ProblemSampler:
    """Which of n problems to ask next: prioritised replay of problems (arXiv 2601.02648), fresh answers every time.

    mode      shuffled (every problem once, in random order, before any comes again) | uniform (drawn anew in each call) |
              heap (highest priority first, ties: least recently tried) | band (uniform over p in `band`) |
              proportional P ∝ (priority + eps)^alpha | dots P ∝ exp(-|1 - p - target|/temperature) (arXiv 2506.05316)
    priority  variance p(1-p) | mixed_group 1 - p^G - (1-p)^G with G = group_size
    estimate  beta: p = (successes + prior)/(trials + 2 prior), counts multiplied by `decay` at a visit | raw: last rate
    In heap and band, a problem with `pool_after` visits in a row all solved (or all failed) leaves for a pool; every
    `retest_every` calls the `retest_slots` least recently tried of each pool are asked again, and return when mixed.
    In the others too, `floor_slots` of a call go to the least recently tried, so each problem is asked within
    ceil(n / floor_slots) calls. Non-uniform asking changes the objective: report accuracy on the uniform distribution.
    """

    def __init__(
        self,
        n: int,
        mode: str = "heap",
        priority: str = "variance",
        group_size: int = 8,
        estimate: str = "beta",
        decay: float = 0.7,
        prior: float = 1.0,
        floor_slots: int = 1,
        pool_after: int = 2,
        retest_every: int = 5,
        retest_slots: int = 1,
        alpha: float = 1.0,
        eps: float = 0.01,
        band: tuple[float, float] = (0.25, 0.75),
        target: float = 0.5,
        temperature: float = 1e-3,
        seed: int = 0,
    ):
        at_least_one = {"n": n, "floor_slots": floor_slots, "pool_after": pool_after, "retest_every": retest_every}
        for name, value in at_least_one.items():
            require(value >= 1, f"{name} is {value}; it must be at least 1")
        require(retest_slots >= 0 and eps >= 0, f"retest_slots={retest_slots} and eps={eps} must be at least 0")
        require(group_size >= 2, f"group_size is {group_size}; it must be at least 2")
        require(0 <= decay <= 1 and prior > 0 and temperature > 0, f"decay={decay} must be in 0..1, prior={prior} and "
                f"temperature={temperature} positive")  # fmt: skip
        require(0 <= band[0] <= band[1] <= 1, f"band is {band}; it must be two rising success rates")
        self.mode = one_of("mode", mode, MODES)
        self.priority = one_of("priority", priority, ("variance", "mixed_group"))
        if one_of("estimate", estimate, ("beta", "raw")) == "raw":
            decay, prior = 0.0, 0.0
        self.n, self.group_size, self.decay, self.prior, self.floor_slots = n, group_size, decay, prior, floor_slots
        self.pool_after, self.retest_every, self.retest_slots = pool_after, retest_every, retest_slots
        self.alpha, self.eps, self.band, self.target, self.temperature = alpha, eps, tuple(band), target, temperature
        self.rng = np.random.default_rng(seed)
        self.trials, self.successes = np.zeros(n), np.zeros(n)
        self.streak = np.zeros(n, np.int64)  # visits in a row that were all solved; negative: all failed
        self.tried = self.rng.permutation(n) - n  # order of the last selection, call · n + place; negative: never
        self.last_step, self.visits = np.zeros((2, n), np.int64)
        self.calls, self.retests, self.regressed, self.rescued = 0, 0, 0, 0
        self._build_heap()

    def success_rates(self) -> np.ndarray:
        """(n,) estimates of p; 1/2, the most informative, for a problem without trials."""
        trials = self.trials + 2 * self.prior
        return np.where(trials > 0, (self.successes + self.prior) / np.where(trials > 0, trials, 1), 0.5)

    def priorities(self) -> np.ndarray:
        p = self.success_rates()
        return p * (1 - p) if self.priority == "variance" else 1 - p**self.group_size - (1 - p) ** self.group_size

    def select(self, k: int, step: int) -> np.ndarray:
        """(k,) different problem ids to ask at `step`."""
        low = self.floor_slots
        require(low <= k <= self.n, f"k={k} must lie between floor_slots={low} and the n={self.n} problems")
        self.calls += 1
        chosen = self._next_of_pass(k) if self.mode == "shuffled" else self._least_recent(np.arange(self.n), low)
        if self.mode in ("heap", "band") and self.calls % self.retest_every == 0:
            for pool in (SOLVED, UNSOLVED):
                waiting = np.setdiff1d(np.flatnonzero(self.pools() == pool), chosen)
                retested = self._least_recent(waiting, min(self.retest_slots, k - len(chosen)))
                self.retests += len(retested)
                chosen = np.concatenate([chosen, retested])
        drawn = self._pop_heap if self.mode == "heap" else self._draw
        chosen = np.concatenate([chosen, drawn(k - len(chosen), chosen)])
        others = np.setdiff1d(np.arange(self.n), chosen)  # too few candidates: the least recently tried of any pool
        chosen = np.concatenate([chosen, self._least_recent(others, k - len(chosen))])
        self.tried[chosen], self.last_step[chosen] = self.calls * self.n + np.arange(k), step
        self.visits[chosen] += 1
        self._push(chosen)
        return chosen

    def _next_of_pass(self, count: int) -> np.ndarray:
        """The least often asked, in random order: when a pass over all problems ends, the next one begins."""
        return np.lexsort((self.rng.random(self.n), self.visits))[:count]

    def update(self, id: int, rewards: Any, step: int) -> None:
        """Fold in the (G,) successes, 0 or 1, of the answers to problem `id`."""
        rewards = np.asarray(rewards, np.float64)
        require(0 <= id < self.n, f"problem id {id} is not one of 0..{self.n - 1}")
        require(rewards.ndim == 1 and len(rewards) > 0, f"rewards has shape {rewards.shape}; it must be (G,)")
        require_all((rewards == 0) | (rewards == 1), "rewards", rewards, "a success is 0 or 1: threshold the score")
        self.trials[id] = self.decay * self.trials[id] + len(rewards)
        self.successes[id] = self.decay * self.successes[id] + rewards.sum()
        self.last_step[id] = step
        direction = 1 if rewards.all() else 0 if rewards.any() else -1
        before = self.pools()[id]
        self.streak[id] = self.streak[id] + direction if direction * self.streak[id] > 0 else direction
        after = self.pools()[id]
        self.regressed += int(before == SOLVED != after)
        self.rescued += int(before == UNSOLVED != after)
        self._push(np.array([id]))

    def pools(self) -> np.ndarray:
        """(n,) SOLVED, UNSOLVED or ACTIVE."""
        return np.where(np.abs(self.streak) < self.pool_after, ACTIVE, np.sign(self.streak))

    def _least_recent(self, ids: np.ndarray, count: int) -> np.ndarray:
        return ids[np.argsort(self.tried[ids])[:count]]

    def _log_weights(self) -> np.ndarray:
        # ALGO LOGIC: which problems are asked more
        if self.mode == "proportional":
            with np.errstate(divide="ignore"):
                return self.alpha * np.log(self.priorities() + self.eps)
        if self.mode == "dots":
            return -np.abs(1 - self.success_rates() - self.target) / self.temperature
        if self.mode == "band":
            p = self.success_rates()
            inside = (self.pools() == ACTIVE) & (self.band[0] <= p) & (p <= self.band[1])
            return np.where(inside, 0.0, -math.inf)
        return np.zeros(self.n)

    def _draw(self, count: int, without: np.ndarray) -> np.ndarray:
        """Up to `count` draws without replacement (Gumbel top-k: as if drawn one by one from what is left)."""
        keys = self._log_weights() + self.rng.gumbel(size=self.n)
        keys[without] = -math.inf
        best = np.argsort(-keys)[:count]
        return best[keys[best] > -math.inf]

    def _push(self, ids: np.ndarray) -> None:
        """Put problems into the heap under their present key; their older keys are recognised and skipped when met."""
        if self.mode != "heap":
            return
        if len(self.heap) > 4 * self.n + 64:
            return self._build_heap()
        priorities, pools = self.priorities()[ids].tolist(), self.pools()[ids].tolist()
        for id, priority, tried, pool in zip(ids.tolist(), priorities, self.tried[ids].tolist(), pools):
            self.key[id] = (-priority, tried, id) if pool == ACTIVE else None
            if pool == ACTIVE:
                heappush(self.heap, self.key[id])

    def _build_heap(self) -> None:
        keys = zip((-self.priorities()).tolist(), self.tried.tolist(), range(self.n))
        self.key = [key if pool == ACTIVE else None for key, pool in zip(keys, self.pools().tolist())]
        self.heap = [key for key in self.key if key]
        heapify(self.heap)

    def _pop_heap(self, count: int, without: np.ndarray) -> np.ndarray:
        found, skip = [], set(without.tolist())
        while self.heap and len(found) < count:
            key = heappop(self.heap)
            if self.key[key[-1]] is key and key[-1] not in skip:
                found.append(key[-1])
        return np.array(found, np.int64)

    def stats(self, step: int) -> dict[str, float | int | None]:
        """Pool sizes, totals, and, over the problems tried (None before the first), means and the longest wait."""
        tried = self.tried >= 0
        pools, waits = self.pools(), step - self.last_step[tried]
        return {
            "active": int((pools == ACTIVE).sum()),
            "solved": int((pools == SOLVED).sum()),
            "unsolved": int((pools == UNSOLVED).sum()),
            "untried": int((self.tried < 0).sum()),
            "priority_mean": float(self.priorities()[tried].mean()) if tried.any() else None,
            "success_rate_mean": float(self.success_rates()[tried].mean()) if tried.any() else None,
            "retests_total": self.retests,
            "regressed_total": self.regressed,
            "rescued_total": self.rescued,
            "since_visit_max": int(waits.max()) if len(waits) else None,
        }

    def state_dict(self) -> dict[str, Any]:
        """JSON-able values and plain arrays; the heap is rebuilt from them."""
        state = {name: getattr(self, name).copy() for name in PROBLEM_ARRAYS}
        return state | {name: getattr(self, name) for name in PROBLEM_COUNTS} | {"rng": self.rng.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        saved = len(state["trials"])
        require(saved == self.n, f"the saved sampler has {saved} problems, this one n={self.n}")
        for name in PROBLEM_ARRAYS:
            setattr(self, name, np.array(state[name]))
        for name in PROBLEM_COUNTS:
            setattr(self, name, state[name])
        self.rng.bit_generator.state = state["rng"]
        self._build_heap()
