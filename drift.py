"""How fast stored data ages: the drift of the policy, and tau = 1/c from it (`--tau auto`)."""
from collections import deque
from typing import Any

import numpy as np

from episode import require


def sequence_kl(log_ratios: np.ndarray) -> np.ndarray:
    """(B,) estimates whose mean is KL(behaviour || current), from (B,) log current/behaviour of whole episodes.

    k3 = r - 1 - log r while the ratios are mild (root mean square of log r at most 1), else k1 = -log r, whose variance
    does not explode. Take the mean, not a median: both estimators are skewed.
    """
    log_ratios = np.asarray(log_ratios, np.float64)
    mild = np.mean(log_ratios**2) <= 1
    return np.expm1(log_ratios) - log_ratios if mild else -log_ratios


def token_kl(log_ratios_BT: np.ndarray, largest: float = 3.0) -> np.ndarray:
    """(B,) estimates of the same KL from the log-ratios of single tokens (0 where none was sampled): the sum of their k3.

    By the chain rule its mean is the KL of whole episodes, and no term is negative, so it scatters less than what is had from the
    episode's ratio alone. Log-ratios are cut at `largest`: a token 20 times as likely as it was is rare and would outweigh all.
    """
    log_ratios_BT = np.minimum(np.asarray(log_ratios_BT, np.float64), largest)
    return (np.expm1(log_ratios_BT) - log_ratios_BT).sum(1)


class DriftEstimator:
    """tau = 1/c from the drift KL(behaviour || current) = k0 + c · age (the argument of FreshPER for its tau).

    Feed it a uniform probe of recent episodes, stored or not: a prioritised draw is selected on the outcome and biases
    every KL estimate. Smoothed by fitting the last `window` batches together; tau is bounded to [tau_min, tau_max].
    """

    def __init__(self, window: int = 20, min_rows: int = 64, tau_min: float = 1.0, tau_max: float = 1e5):
        require(window >= 1 and min_rows >= 2, f"window={window} must be at least 1 and min_rows={min_rows} at least 2")
        require(0 < tau_min <= tau_max, f"tau_min={tau_min} must be positive and at most tau_max={tau_max}")
        self.min_rows, self.tau_min, self.tau_max = min_rows, tau_min, tau_max
        self.batches: deque[tuple[np.ndarray, np.ndarray]] = deque(maxlen=window)

    def add(self, ages: Any, kl: Any) -> None:
        """One probe batch: ages (B,) and one KL estimate an episode (B,), see `token_kl` and `sequence_kl`."""
        ages, kl = np.array(ages, np.float64), np.array(kl, np.float64)
        require(ages.shape == kl.shape == (ages.size,), f"ages {ages.shape} and kl {kl.shape} must have one shape (B,)")
        require(bool(np.isfinite(kl).all() and np.isfinite(ages).all()), "ages and kl must be finite")
        self.batches.append((ages, kl))

    def points(self) -> tuple[np.ndarray, np.ndarray]:
        """(ages, kl) of the window, for the scatter plot."""
        columns = zip(*self.batches) if self.batches else ((), ())
        return tuple(np.concatenate([np.zeros(0), *column]) for column in columns)

    def fit(self) -> dict[str, float] | None:
        """{c, k0, r2, rows} of least squares weighted by 1/KL of the fit itself (the variance of a log-ratio grows with
        KL), k0 >= 0 as a KL is; None with fewer than min_rows rows or a single age.
        """
        ages, kl = self.points()
        if len(ages) < self.min_rows or ages.min() == ages.max():
            return None
        weights = np.ones(len(ages))
        for _ in range(4):
            mean_age, mean_kl = np.average(ages, weights=weights), np.average(kl, weights=weights)
            c = (weights * (ages - mean_age) * kl).sum() / (weights * (ages - mean_age) ** 2).sum()
            k0 = mean_kl - c * mean_age
            if k0 < 0:
                k0, c = 0.0, (weights * ages * kl).sum() / (weights * ages**2).sum()
            weights = 1 / np.maximum(k0 + c * ages, 0.1 * abs(kl.mean()) + 1e-12)
        spread = ((kl - kl.mean()) ** 2).sum()
        r2 = 1 - ((kl - k0 - c * ages) ** 2).sum() / spread if spread else 0.0
        return {"c": float(c), "k0": float(k0), "r2": float(r2), "rows": len(ages)}

    def tau(self) -> float | None:
        """1/c within the bounds (tau_max if the policy does not drift), or None before there is enough to fit."""
        fit = self.fit()
        if fit is None:
            return None
        return min(max(1 / fit["c"], self.tau_min), self.tau_max) if fit["c"] > 0 else self.tau_max

    def state_dict(self) -> dict[str, Any]:
        ages, kl = self.points()
        return {"ages": ages, "kl": kl, "lengths": np.array([len(ages) for ages, _ in self.batches], np.int64)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        ends = np.cumsum(state["lengths"])[:-1]
        self.batches.clear()
        if len(state["lengths"]):
            self.batches.extend(zip(np.split(state["ages"], ends), np.split(state["kl"], ends)))
