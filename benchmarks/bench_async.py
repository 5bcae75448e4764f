"""Sampling beside training against sampling and training in turns: cost of a step, idle shares, mu, ages, time to a score.

    python benchmarks/bench_async.py --tiny-width 64 --tiny-layers 2                    # mu near 1; 20 minutes on two cores
    python benchmarks/bench_async.py --tiny-options width 64 layers 2 --wait-ms 40         # moves take a while: mu near 6
    python benchmarks/bench_async.py --seeds 0 --steps 8 --arms "beside, ratio 2" "in turns" --lr 3e-4   # flags of train.py last

Tiny policy, 4x4 FrozenLake, batches of 64 episodes, equal numbers of updates; one thread a process, except where it says two.
Evaluation is not timed: policies are evaluated afterwards, from their checkpoints. Prints Markdown, medians over seeds (lowest to
highest), and a line of JSON for each run to stderr. A run that does not reach a target counts as slower than all that do.
"""
import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
os.environ["OMP_NUM_THREADS"] = "1"  # read when torch loads

from engines import context_length_of, make_engine  # noqa: E402
from envs import make_env_factory  # noqa: E402
from eval import evaluate  # noqa: E402
from models import load_policy  # noqa: E402
from policies import policy_folder  # noqa: E402
from policies.chat import Chat  # noqa: E402
from settings import parse_args  # noqa: E402

FIFO = ["--replay", "uniform", "--fresh-update", "False", "--capacity", "512"]
BESIDE = ["--async-rollouts", "1"]
FIXED = [*BESIDE, *FIFO, "--async-options", "fixed_ratio", "True"]
ARMS = {  # name: (threads, updates an iteration, flags)
    "in turns": (1, 1, ["--replay", "none"]),
    "in turns, two threads": (2, 1, ["--replay", "none"]),
    "in turns, ratio 2": (1, 2, FIFO),
    "beside, queue": (1, 1, [*BESIDE, "--replay", "none"]),
    "beside, ratio 1": (1, 1, FIXED),
    "beside, ratio 2": (1, 2, FIXED),
    "beside, ratio 4": (1, 4, FIXED),
    "beside, nobody waits": (1, 2, [*BESIDE, *FIFO])}
MEASURED = ["gamma", "mu", "y", "sampler idle", "trainer idle", "age on arrival", "age at use", "its p5", "its p95"]


def measured(run: Path) -> dict:
    """Numbers of a run without its first iteration, where things start. Work: busy seconds of both sides."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    first, last = lines[0], lines[-1]
    change = {name: last[name] - first[name] for name in last if name.startswith(("step", "time/total_", "cost/episodes_"))}
    busy = {side: change[f"time/total_{side}_busy_s"] for side in ("sampler", "trainer")}
    idle = {"sampler": change["time/total_sampler_idle_s"], "trainer": change["time/total_sample_s"]}  # not its evaluations
    generated, trained = change["cost/episodes_generated"], change["cost/episodes_trained"]
    seconds = np.cumsum([line["time/iteration_s"] - line["time/eval_s"] - line["time/save_s"] for line in lines])
    mu, y = (busy["sampler"] / generated) / (busy["trainer"] / trained), trained / generated
    arrived = [line["fresh/staleness_mean"] for line in lines[1:] if line["fresh/staleness_mean"] is not None]
    ages = [age for line in map(json.loads, (run / "replay.jsonl").read_text().splitlines()) if line["iteration"] > 1
            for age in line["drawn"]["age"]] if (run / "replay.jsonl").exists() else arrived
    return {"s an update": (seconds[-1] - seconds[0]) / change["step"], "work an update": sum(busy.values()) / change["step"],
            "gamma": (1 + mu / y) / (1 + mu), "mu": mu, "y": y,
            **{f"{side} idle": idle[side] / (idle[side] + busy[side]) for side in idle}, "age on arrival": np.mean(arrived),
            "age at use": np.mean(ages), "its p5": np.percentile(ages, 5), "its p95": np.percentile(ages, 95),
            "episodes": last["episodes"], "steps": last["step"],
            # iterations without a signal take no step: the first that stands at a step counts
            "seconds at step": {line["step"]: second for line, second in zip(lines[::-1], seconds[::-1])}}


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_"))


def held_out(args, folder: Path, count: int, temperature: float) -> float:
    make_env = make_env_factory("frozenlake", {"prompt": "tiny"})
    policy, processor = load_policy(folder)
    with contextlib.closing(make_engine(replace(args, engine="hf", quiet=True), policy, Chat(processor), folder)) as engine:
        return evaluate(engine, Chat(processor), make_env, make_env().problems("heldout", count), temperature=temperature,
                        max_turns=args.max_turns, max_new_tokens=args.max_new_tokens, format_penalty=args.format_penalty,
                        parallel=count, context_length=context_length_of(args, policy))["success"]


def time_to(target: float, points: list[tuple[float, float]]) -> float:
    """Seconds at which a line through the points (seconds, success) first reaches the target; inf if it never does.

    >>> time_to(0.5, [(0, 0.2), (10, 0.4), (20, 0.8)]), time_to(0.9, [(0, 0.2), (10, 0.4)]), time_to(0.1, [(0, 0.2), (10, 0.2)])
    (12.5, inf, 0)
    """
    for (before_s, before), (after_s, after) in zip(points, points[1:]):
        if after >= target:
            return before_s if before >= target else before_s + (after_s - before_s) * (target - before) / (after - before)
    return np.inf


def number(value: float) -> str:
    return "never" if value == np.inf else f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def cell(values: list[float]) -> str:
    """Median (lowest to highest), of two values both, or one number if they are the same."""
    low, middle, high = (number(of(values)) for of in (min, np.median, max))
    return middle if low == high else f"{low} and {high}" if len(values) == 2 else f"{middle} ({low} to {high})"


def table(columns: list[str], rows: dict[str, list[str]]):
    print(f"\n| arm | {' | '.join(columns)} |\n{'|---' * (len(columns) + 1)}|")
    for name, cells in rows.items():
        print(f"| {name} | {' | '.join(cells)} |")


def show(found: dict[str, list[dict]], targets: list[float]):
    """The tables; ratios are to the run of the same seed, n/a where one of both did not get there."""
    def cells(name: str, columns: list[str]) -> list[str]:
        return [cell([row[column] for row in found[name]]) for column in columns]

    def ratios(value, name: str, base: str) -> str:
        if base not in found or name == base:
            return ""
        pairs = [(value(row), value(other)) for row, other in zip(found[name], found[base])]
        reached = [one / other for one, other in pairs if one < np.inf and 0 < other < np.inf]
        return (cell(reached) if reached else "n/a") + (f", {len(reached)} of {len(pairs)}" if len(reached) < len(pairs) else "")

    table(["s an update", "to in turns", "work an update to beside, ratio 1", *MEASURED],
          {name: [*cells(name, ["s an update"]), ratios(lambda row: row["s an update"], name, "in turns"),
                  ratios(lambda row: row["work an update"], name, "beside, ratio 1"), *cells(name, MEASURED)] for name in found})
    table(["steps", "episodes", "held out", "greedily", *(column for target in targets for column in (
        f"s to {target:g}", "to in turns", "to beside, queue"))],
        {name: [*cells(name, ["steps", "episodes", "held out", "greedily"]), *(text for target in targets for text in (
            cell([time_to(target, row["curve"]) for row in found[name]]),
            *(ratios(lambda row: time_to(target, row["curve"]), name, base) for base in ("in turns", "beside, queue"))))]
         for name in found})


def plot(found: dict[str, list[dict]], title: str, path: str):
    """Held-out success over seconds: a line a seed."""
    figure, axis = plt.subplots(figsize=(9, 4.5), layout="constrained")
    for name, rows in found.items():
        for seed, row in enumerate(rows):
            axis.plot(*zip(*row["curve"]), color=f"C{list(ARMS).index(name)}", alpha=0.8, label=None if seed else name)
    axis.set(xlabel="seconds, without evaluation", ylabel="held-out success, temperature 1", title=title)
    figure.legend(loc="outside right center")
    figure.savefig(path, dpi=110)


class Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    pass


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Formatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the runs: one of each arm for each")
    parser.add_argument("--steps", type=int, default=96, help="updates, a multiple of --every; without signal they take no step")
    parser.add_argument("--every", type=int, default=8, help="optimiser steps between evaluations, a multiple of 4")
    parser.add_argument("--targets", type=float, nargs="+", default=[0.6, 0.7], help="held-out success, above 0 and at most 1")
    parser.add_argument("--heldout", type=int, default=256, help="held-out problems")
    parser.add_argument("--wait-ms", type=float, default=0.0, help="that the task takes for a move")
    parser.add_argument("--tiny-width", default="128", help="width of the tiny policy, a multiple of 64")
    parser.add_argument("--tiny-layers", default="4", help="layers of the tiny policy")
    parser.add_argument("--plot", help="file for a picture of held-out success over seconds")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS), metavar="ARM", help="what is compared")
    arguments, flags_of_all = parser.parse_known_args()
    if arguments.every < 1 or arguments.every % 4:
        parser.error(f"--every {arguments.every} must be a positive multiple of 4")
    if arguments.steps < 1 or arguments.steps % arguments.every:
        parser.error(f"--steps {arguments.steps} must be a positive multiple of --every {arguments.every}")
    if not all(0 < target <= 1 for target in arguments.targets):
        parser.error(f"--targets {' '.join(map(str, arguments.targets))} must each be above 0 and at most 1")
    if arguments.heldout < 1:
        parser.error(f"--heldout {arguments.heldout} must be above 0")
    if not 0 <= arguments.wait_ms < np.inf:
        parser.error(f"--wait-ms {arguments.wait_ms:g} must be at least 0 and finite")
    args = parse_args(["--tiny-options", "width", arguments.tiny_width, "layers", arguments.tiny_layers])
    start = policy_folder(args, make_env_factory("frozenlake", {"prompt": "tiny"})())  # of the task that does not wait
    task = ["--env", f"{ROOT}/benchmarks/slow_lake.py:SlowLake", "--env-options", "prompt", "tiny", "wait_ms",
            str(arguments.wait_ms)] if arguments.wait_ms else ["--env-options", "prompt", "tiny"]
    at_start = held_out(args, start, arguments.heldout, 1.0)
    print(f"Held out ({arguments.heldout} problems), the policy of the start: success {at_start:.3f} at temperature 1, "
          f"{held_out(args, start, arguments.heldout, 0.0):.3f} greedily.")
    found = {name: [] for name in arguments.arms}
    with tempfile.TemporaryDirectory() as runs:
        for seed in arguments.seeds:
            for place, name in enumerate(arguments.arms):
                threads, updates, flags = ARMS[name]
                if "--fresh-update" in flags:
                    flags = [*flags, "--replay-updates", str(updates), "--replay-batch-size", "64"]
                run = Path(runs) / f"arm{place}_{seed}"
                subprocess.run([sys.executable, ROOT / "train.py", *flags, "--model", start, *task, "--lr", str(args.lr),
                                "--max-new-tokens", str(args.max_new_tokens), "--lr-schedule", "constant", "--seed", str(seed),
                                "--runs-dir", runs, "--name", run.name, "--iterations", str(arguments.steps // updates),
                                "--checkpoint-every", str(arguments.every // updates), "--keep-checkpoints", str(arguments.steps),
                                "--eval-every", "0", "--eval-problems", "16", "--wandb", "off", "--quiet", "True", *flags_of_all],
                               check=True, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": str(threads)})
                row = measured(run)
                folders = sorted((run / "checkpoints").glob("step_*"), key=lambda folder: row["seconds at step"][step_of(folder)])
                row["curve"] = [(0.0, at_start)] + [(row["seconds at step"][step_of(folder)],
                                                     held_out(args, folder, arguments.heldout, 1.0)) for folder in folders]
                row |= {"held out": row["curve"][-1][1], "greedily": held_out(args, folders[-1], arguments.heldout, 0.0)}
                found[name].append(row)
                print(json.dumps({"arm": name, "seed": seed} | row, default=float), file=sys.stderr, flush=True)

    show(found, arguments.targets)
    if arguments.plot:
        plot(found, f"{arguments.wait_ms:g} ms a move", arguments.plot)


if __name__ == "__main__":
    main()
