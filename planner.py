"""Buffer size and reuse that the theory of experience replay advises, as ratios.

    python eval.py plan --mu 5 --alpha 0.1 --rho 0.1

After Arnal et al. 2026 (arXiv 2604.08706): a first-in-first-out buffer of N rollouts; each step adds R and draws B. N/R
is how many steps a rollout stays in the buffer, B/R how often it is used on average.
"""
import math
import sys
from dataclasses import dataclass

import tyro

from runs import fail


@dataclass
class PlanArgs:
    """Optimal N/R and B/R of a replay buffer."""
    mu: float
    """Cost of generating a batch over the cost of training on it; above 0. The paper measures 5 to 7 (and once words it
    the other way round)."""
    alpha: float
    """The standard deviation of the gradient noise of a rollout of age s grows as s^alpha; above 0."""
    rho: float
    """How strongly the gradient noise of different rollouts is correlated, 0 to 1 (assumption 4.3)."""


def objective(x: float, y: float, mu: float, alpha: float, rho: float) -> float:
    """J(x, y) = x^(2 alpha) (1 + y/mu) (1/y + 1/x + rho) for x = N/R > 0 and y = B/R > 0 (Theorem 4.5, power law): what
    the squared gradient norm at a given budget grows with, up to a factor. x^(2 alpha) is sigma squared averaged over
    the horizon, as in the appendix; Theorem 4.4 is worded for sigma."""
    return x ** (2 * alpha) * (1 + y / mu) * (1 / y + 1 / x + rho)


def unconstrained(mu: float, alpha: float, rho: float) -> tuple[float, float]:
    """(x*, y*) = (N/R, B/R) where `objective` is least over x, y > 0 (Theorem 4.5, power law); (0, 0) from alpha = 1/2
    on, where there is no interior optimum. The paper's y* = (-alpha + sqrt(D))/rho is rewritten to hold at rho = 0; its
    x* is 0/0 at rho = 1/mu, and the discriminant in it is printed with a stray mu."""
    share = max(1 - 2 * alpha, 0.0)
    y = mu * share / (alpha + math.sqrt(alpha**2 + mu * rho * share))
    return y * y / (2 * alpha * (mu + y)), y


def feasible(x: float, y: float) -> bool:
    """The buffer holds at least what a step adds (N >= R), and a batch holds no rollout twice (B <= N)."""
    return x >= 1 and y <= x


def best_feasible(mu: float, alpha: float, rho: float) -> tuple[float, float]:
    """(x, y) = (N/R, B/R) where `objective` is least over x >= 1 and y <= x. Its log is convex in (log x, log y): where
    (x*, y*) is not feasible, an edge is best. On x = 1, y = sqrt(mu/(rho + 1/x)) (Theorem 4.5), at most 1. On y = x
    (not in the paper), x solves rho (1 + 2 alpha) x^2 + 2 alpha (2 + mu rho) x = 2 mu (1 - 2 alpha), at least 1."""
    share = max(1 - 2 * alpha, 0.0)
    middle = alpha * (2 + mu * rho)
    diagonal = max(2 * mu * share / (middle + math.sqrt(middle**2 + 2 * mu * rho * (1 + 2 * alpha) * share)), 1.0)
    choices = [unconstrained(mu, alpha, rho), (1.0, min(math.sqrt(mu / (rho + 1)), 1.0)), (diagonal, diagonal)]
    return min((choice for choice in choices if feasible(*choice)),
               key=lambda choice: objective(*choice, mu, alpha, rho))


def samplers_per_trainer(mu: float, y: float) -> float:
    """W/T at which neither side waits, from y = B/R = mu T/W (the compute model of the paper)."""
    return mu / y


def step_cost(mu: float, y: float) -> float:
    """gamma = (1 + W/T)/(1 + mu): cost of a training step over that of one without replay (y = 1) and without stalls.
    The paper's table for 0.6B prints 0.41 at (W, T) = (6, 2), where this gives 0.51."""
    return (1 + samplers_per_trainer(mu, y)) / (1 + mu)


def notes(alpha: float, x: float, y: float) -> list[str]:
    """What to know before the plan (x, y) = (N/R, B/R) is followed."""
    lines = ["only these ratios are determined, not N, R and B themselves; mu, alpha and rho have to be measured on "
             "the task",
             "no saving can be predicted from it: the theory draws batches with replacement, which charges training "
             "without replay about double its variance. Use it to order replay settings, and compare with none by "
             "running both, above all at mu near 1"]
    if alpha >= 0.5:
        lines.append(f"alpha {alpha:g} is 1/2 or more: old rollouts lose value too fast for an interior optimum. "
                     "Stay on-policy, without replay")
    elif x == 1:
        lines.append("N/R is at its bound 1: a rollout is gone after its own step, which is training without replay")
    if y < 1:
        lines.append(f"B/R below 1: at least {1 - y:.0%} of the rollouts that are generated are never used")
    return lines


def main(argv: list[str]):
    args = tyro.cli(PlanArgs, args=argv, prog="eval.py plan", description=__doc__)
    for name, value, low, high, why in (
            ("mu", args.mu, 1e-6, 1e6, ""), ("rho", args.rho, 0, 1, ""),
            ("alpha", args.alpha, 1e-6, 1e6, "; near 0, where rollouts do not age, the best buffer is unbounded")):
        if not low <= value <= high:
            fail(f"--{name} {value:g} must be from {low:g} to {high:g}{why}")
    x, y = best_feasible(args.mu, args.alpha, args.rho)
    print(f"mu {args.mu:g}, alpha {args.alpha:g}, rho {args.rho:g}")
    print(f"  N/R {x:.2f}   a rollout stays in the buffer for so many steps")
    print(f"  B/R {y:.2f}   it is used so many times on average")
    free_x, free_y = unconstrained(args.mu, args.alpha, args.rho)
    if args.alpha < 0.5 and not feasible(free_x, free_y):
        broken = [rule for rule, holds in (("N >= R", free_x >= 1), ("B <= N", free_y <= free_x)) if not holds]
        print(f"  projected: the formula's N/R {free_x:.2f} and B/R {free_y:.2f} break {' and '.join(broken)}; "
              "above stands the best that keeps both")
    print(f"  W/T {samplers_per_trainer(args.mu, y):.2f}   samplers for each trainer at which neither waits\n"
          f"  step cost {step_cost(args.mu, y):.2f} of one without replay (gamma)")
    for line in notes(args.alpha, x, y):
        print(f"note: {line}")


if __name__ == "__main__":
    main(sys.argv[1:])
