"""Buffer size and reuse that the theory of experience replay advises, as ratios.

    python eval.py plan --mu 5 --alpha 0.1 --rho 0.1
    python eval.py plan --from runs/NAME                     # mu and alpha as that run measured them

After Arnal et al. 2026 (arXiv 2604.08706): a first-in-first-out buffer of N rollouts; each step adds R and draws B. N/R
is how many steps a rollout stays in the buffer, B/R how often it is used on average.
"""
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

from runtime.files import fail, read_yaml, whole_lines

ASSUMED_RHO = 0.1
LEAST_ALPHA = 0.01
FEWEST_DRAWS = 200  # and ages, 3: below, no slope is fitted
FEWEST_ITERATIONS = 10  # below, its error is not told


@dataclass
class PlanArgs:
    mu: float | None = None
    """Cost of generating a batch over the cost of training on it; above 0. The paper measures 5 to 7 (and once words it
    the other way round)."""
    alpha: float | None = None
    """The standard deviation of the gradient noise of a rollout of age s grows as s^alpha; above 0."""
    rho: float | None = None
    """How strongly the gradient noise of different rollouts is correlated, 0 to 1 (assumption 4.3)."""
    source: Annotated[str | None, tyro.conf.arg(name="from")] = None
    """Run folder from which those that are not given are estimated."""


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


def measured_mu(lines: list[dict]) -> tuple[float, list[str]]:
    """mu from the seconds of both sides after the first quarter of a run (its start is slower), and what to know of it."""
    key = "time/total_sampler_busy_s"
    lines = [line for line in lines if line.get(key) is not None]
    if len(lines) < 4:
        fail(f"mu: the run's metrics.jsonl has {len(lines)} iterations with {key}, at least 4 are needed: give --mu")
    first, last = lines[len(lines) // 4 - 1], lines[-1]
    names = (key, "time/total_trainer_busy_s", "cost/episodes_generated", "cost/episodes_trained")
    sampling, training, generated, trained = (last[name] - first[name] for name in names)
    if not min(sampling, training, generated, trained) > 0:
        fail("mu: the run generated or trained on nothing after its first quarter: give --mu")
    mu = (sampling / generated) / (training / trained)
    told = [f"mu {mu:.2f}: {sampling / generated:.3g} s to sample an episode over {training / trained:.3g} s to train on one, "
            f"from iteration {first['iteration'] + 1} on; other batch sizes or devices have another"]
    counts = [line.get("cost/episodes_computed") for line in (first, last)]  # runs begun with older code have none at first
    if None not in counts and (computed := counts[1] - counts[0]) < trained:
        told.append(f"   {computed / trained:.0%} of these had a signal, and only they cost time: for each of them mu is "
                    f"{mu * computed / trained:.2f}. A buffer of such episodes alone (--replay fresh, per) is nearer to that")
    if last.get("time/mu_counts") is not None:
        idle = {side: last[f"time/{side}_idle_share"] for side in ("sampler", "trainer")}
        told.append(f"   the paper's estimator (K_train/T)/(K_inf/W) gives {last['time/mu_counts']:.2f}; samplers waited "
                    f"{idle['sampler']:.0%} of their time and the trainer {idle['trainer']:.0%}" +
                    (", so that it is not valid here" if max(idle.values()) > 0.1 else ""))
    else:
        told.append("   sampled and trained in turns on the same processors: beside each other they may slow each other down")
    return mu, told


def fitted_alpha(ages_N: np.ndarray, squares_N: np.ndarray, iterations_N: np.ndarray) -> tuple[float, float]:
    """(alpha, standard error): half the slope of log E[ratio^2 | age] over log age, ages from 1 on, least squares weighted by
    the number of draws; the error is the spread over 200 resamplings of whole iterations, which hang together (NaN: few)."""
    age_K, place_N = np.unique(ages_N, return_inverse=True)
    line_L, line_N = np.unique(iterations_N, return_inverse=True)
    count_LK, total_LK = np.zeros((2, len(line_L), len(age_K)))
    np.add.at(count_LK, (line_N, place_N), 1)
    np.add.at(total_LK, (line_N, place_N), squares_N)

    def slope(times_L):
        count_K, total_K = times_L @ count_LK, times_L @ total_LK
        seen = count_K > 0
        return np.polyfit(np.log(age_K[seen]), np.log(total_K[seen] / count_K[seen]), 1, w=np.sqrt(count_K[seen]))[0] / 2 \
            if seen.sum() > 1 else math.nan

    drawn = np.random.default_rng(0).multinomial(len(line_L), np.full(len(line_L), 1 / len(line_L)), size=200)
    error = float(np.nanstd([slope(times_L) for times_L in drawn])) if len(line_L) >= FEWEST_ITERATIONS else math.nan
    return slope(np.ones(len(line_L))), error


def measured_alpha(records: list[dict]) -> tuple[float, list[str]]:
    """alpha from the ages and ratios of the replayed episodes, and what to know of it."""
    if any("ratio_square" not in record["drawn"] for record in records):
        fail("alpha: the run's replay.jsonl was written before it held the squares of ratios: give --alpha")
    rows = [(age, square, record["iteration"]) for record in records
            for age, square in zip(record["drawn"]["age"], record["drawn"]["ratio_square"]) if age >= 1 and square is not None]
    ages_N, squares_N, iterations_N = np.array(rows, float).reshape(-1, 3).T
    if len(rows) < FEWEST_DRAWS or len(set(ages_N)) < 3:
        fail(f"alpha: replay.jsonl holds {len(rows)} replayed episodes with a signal, of {len(set(ages_N))} ages from 1 on; "
             f"{FEWEST_DRAWS} of 3 ages are needed: give --alpha")
    alpha, error = fitted_alpha(ages_N, squares_N, iterations_N)
    spread = "not known" if math.isnan(error) else f"{error:.3f}"
    told = [f"alpha {alpha:.3f} (standard error {spread}): how the mean square of a token's ratio current/behaviour grows with "
            f"its episode's age, over {len(rows)} replayed episodes aged 1 to {ages_N.max():.0f}. The ratio stands for the noise "
            "of the gradient, which a run does not record: clipping and the base priority's choice are left out"]
    if alpha < LEAST_ALPHA:
        told.append(f"   no growth of the noise can be seen at these ages: {LEAST_ALPHA} is taken, and N/R below is no more than "
                    "'larger than what was tried'")
    return max(alpha, LEAST_ALPHA), told


def estimate(args: PlanArgs) -> list[str]:
    """Fills what is None in `args` from the run; returns lines on where each number comes from."""
    run, told = Path(args.source), []
    for name in ("metrics.jsonl", "config.yaml"):
        if not (run / name).is_file():
            fail(f"--from {run} is no run: it has no {name}")
    if args.mu is None:
        args.mu, more = measured_mu(whole_lines(run / "metrics.jsonl"))
        told += more
    if args.alpha is None:
        if not (run / "replay.jsonl").is_file():
            fail(f"alpha: {run} has no replay.jsonl, since it did not replay: give --alpha")
        args.alpha, more = measured_alpha(whole_lines(run / "replay.jsonl"))
        told += more
    if args.rho is None:
        args.rho = ASSUMED_RHO
        plans = [(rho, *best_feasible(args.mu, args.alpha, rho)) for rho in (0.0, 0.1, 1.0)]
        told.append(f"rho {ASSUMED_RHO}: assumed. It cannot be estimated from a run's records, which hold no gradients of single "
                    "episodes; " + ", ".join(f"rho {rho:g} would give N/R {x:.2f} and B/R {y:.2f}" for rho, x, y in plans))
    config = read_yaml(run / "config.yaml")
    unit = config.get("replay_options", config)["unit"]  # runs of older versions have it outside
    if unit == "episode" and config["replay"] != "none":
        fresh, last = config["problems_per_iteration"] * config["group_size"], whole_lines(run / "metrics.jsonl")[-1]
        ratio, gamma = ("n/a" if last[key] is None else f"{last[key]:.2f}" for key in ("cost/replay_ratio", "time/gamma"))
        stored = last["buffer/added_total"]
        stay = f"{config['capacity'] * last['step'] / stored:.2f}" if stored else "n/a"
        told.append(f"the run itself: capacity {config['capacity']} and batches of {fresh} new episodes, N/R {stay} in "
                    f"optimiser steps (R: what was stored); replay ratio B/R {ratio} (R: all that was generated), gamma {gamma}")
    return told


def check(args: PlanArgs):
    for name, value, low, high, why in (
            ("mu", args.mu, 1e-6, 1e6, ""), ("rho", args.rho, 0, 1, ""),
            ("alpha", args.alpha, 1e-6, 1e6, "; near 0, where rollouts do not age, the best buffer is unbounded")):
        if value is not None and not low <= value <= high:
            fail(f"--{name} {value:g} must be from {low:g} to {high:g}{why}")


def main(argv: list[str]):
    args = tyro.cli(PlanArgs, args=argv, prog="eval.py plan", description=__doc__)
    missing = [f"--{name}" for name in ("mu", "alpha", "rho") if getattr(args, name) is None]
    if missing and args.source is None:
        fail(f"{', '.join(missing)} must be given, or --from RUN, from which mu and alpha are estimated")
    check(args)
    told = estimate(args) if args.source is not None else []
    check(args)
    x, y = best_feasible(args.mu, args.alpha, args.rho)
    print(*told, f"mu {args.mu:.4g}, alpha {args.alpha:.4g}, rho {args.rho:g}", sep="\n")
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
