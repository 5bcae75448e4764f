"""Buffer size and reuse that the theory of experience replay advises, as ratios.

    python eval.py plan --mu 5 --alpha 0.1 --rho 0.1
    python eval.py plan --from runs/NAME --alpha 0.1         # mu as that run measured it

After Arnal et al. 2026 (arXiv 2604.08706): a first-in-first-out buffer of N rollouts; each step adds R and draws B. N/R
is how many steps a rollout stays in the buffer, B/R how often it is used on average. alpha and rho are about the noise of
single episodes' gradients, which no run records, so that they are never estimated here.
"""
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

from runtime.files import fail, read_yaml, whole_lines

ASSUMED_RHO = 0.1


@dataclass
class PlanArgs:
    alpha: float
    """The standard deviation of the gradient noise of a rollout of age s grows as s^alpha; above 0."""
    mu: float | None = None
    """Cost of generating a batch over the cost of training on it; above 0. The paper measures 5 to 7 (and once words it
    the other way round)."""
    rho: float | None = None
    """How strongly the gradient noise of different rollouts is correlated, 0 to 1 (assumption 4.3)."""
    source: Annotated[str | None, tyro.conf.arg(name="from")] = None
    """Run folder from which mu is taken where it is not given; rho is 0.1 then."""


def objective(x, y, mu: float, alpha: float, rho: float):
    """J(x, y) = x^(2 alpha) (1 + y/mu) (1/y + 1/x + rho) for x = N/R > 0 and y = B/R > 0 (Theorem 4.5, power law): what
    the squared gradient norm at a given budget grows with, up to a factor. x^(2 alpha) is sigma squared averaged over
    the horizon, as in the appendix; Theorem 4.4 is worded for sigma."""
    return x ** (2 * alpha) * (1 + y / mu) * (1 / y + 1 / x + rho)


def best_plan(mu: float, alpha: float, rho: float) -> tuple[float, float]:
    """(x, y) = (N/R, B/R) where `objective` is least, of plans whose buffer holds what a step adds (x >= 1) and whose batches
    hold no rollout twice (y <= x). Each x of a fine grid has its best y = sqrt(mu/(rho + 1/x)) (Theorem 4.5), or y = x if that is
    less: J falls until there. Where neither bound is met, this is the paper's optimum (x*, y*)."""
    x = np.geomspace(1, 1e12, 1_000_001)  # 0.003 % apart; no alpha that is allowed has its optimum beyond
    y = np.minimum(np.sqrt(mu / (rho + 1 / x)), x)
    best = objective(x, y, mu, alpha, rho).argmin()
    return float(x[best]), float(y[best])


def step_cost(mu: float, y: float) -> float:
    """gamma = (1 + W/T)/(1 + mu): cost of a training step over that of one without replay (y = 1) and without stalls, where
    neither side waits: W/T = mu/y. The paper's table for 0.6B prints 0.41 at (W, T) = (6, 2), where this gives 0.51."""
    return (1 + mu / y) / (1 + mu)


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
    elif y == x:
        lines.append("B/R is at its bound N/R: each batch is the whole buffer")
    if y < 1:
        lines.append(f"B/R below 1: at least {1 - y:.0%} of the rollouts that are generated are never used")
    return lines


def taken_from_run(args: PlanArgs) -> list[str]:
    """Fills mu and rho in `args` where they are None; returns lines on where each comes from, and what the run itself did."""
    run, told = Path(args.source), []
    for name in ("metrics.jsonl", "config.yaml"):
        if not (run / name).is_file():
            fail(f"--from {run} is no run: it has no {name}")
    config, lines = read_yaml(run / "config.yaml"), whole_lines(run / "metrics.jsonl")
    if not lines or not lines[-1].get("time/mu"):
        fail(f"mu: the last line of {run}/metrics.jsonl has no time/mu, since nothing was trained on: give --mu, without --from")
    last = lines[-1]
    if args.mu is None:
        args.mu = last["time/mu"]
        told.append(f"mu {args.mu:.2f}: the run's time/mu; other batch sizes or devices have another")
        share = last.get("cost/episodes_computed", math.nan) / last["cost/episodes_trained"]
        if share < 1:  # not of runs of older versions
            told.append(f"   {share:.0%} of what was trained on had a signal, and only that cost time: for each such episode mu is "
                        f"{share * args.mu:.2f}. A buffer of such episodes alone (--replay fresh, per) is nearer to that")
    if args.rho is None:
        args.rho = ASSUMED_RHO
        plans = [(rho, *best_plan(args.mu, args.alpha, rho)) for rho in (0.0, 0.1, 1.0)]
        told.append(f"rho {ASSUMED_RHO}: assumed; " + ", ".join(f"rho {rho:g} would give N/R {x:.2f} and B/R {y:.2f}"
                                                               for rho, x, y in plans))
    if config.get("replay_options", {}).get("unit") == "episode" and config["replay"] != "none":
        fresh, stored = config["problems_per_iteration"] * config["group_size"], last["buffer/added_total"]
        stay = f"{config['capacity'] * last['step'] / stored:.2f}" if stored else "n/a"
        told.append(f"the run itself: capacity {config['capacity']} and batches of {fresh} new episodes, N/R {stay} in "
                    f"optimiser steps (R: what was stored); replay ratio B/R {last['cost/replay_ratio']:.2f} (R: all that was "
                    f"generated), gamma {last['time/gamma']:.2f}")
    return told


def check(args: PlanArgs):
    for name, value, low, high, why in (
            ("mu", args.mu, 1e-6, 1e6, ""), ("rho", args.rho, 0, 1, ""),
            ("alpha", args.alpha, 1e-3, 1e6, "; near 0, where rollouts do not age, the best buffer is unbounded")):
        if value is not None and not low <= value <= high:
            fail(f"--{name} {value:g} must be from {low:g} to {high:g}{why}")


def main(argv: list[str]):
    args = tyro.cli(PlanArgs, args=argv, prog="eval.py plan", description=__doc__)
    missing = [f"--{name}" for name in ("mu", "rho") if getattr(args, name) is None]
    if missing and args.source is None:
        fail(f"{', '.join(missing)} must be given, or --from RUN, from which mu is taken")
    check(args)
    told = taken_from_run(args) if args.source is not None else []
    check(args)
    x, y = best_plan(args.mu, args.alpha, args.rho)
    print(*told, f"mu {args.mu:.4g}, alpha {args.alpha:.4g}, rho {args.rho:g}", sep="\n")
    print(f"  N/R {x:.2f}   a rollout stays in the buffer for so many steps")
    print(f"  B/R {y:.2f}   it is used so many times on average")
    print(f"  W/T {args.mu / y:.2f}   samplers for each trainer at which neither waits\n"
          f"  step cost {step_cost(args.mu, y):.2f} of one without replay (gamma)")
    for line in notes(args.alpha, x, y):
        print(f"note: {line}")
