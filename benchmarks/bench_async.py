"""Sampling beside training against sampling and training in turns: idle shares, mu, replay ratio, ages, wall time.

    OMP_NUM_THREADS=1 python benchmarks/bench_async.py                       # three seeds; an hour on two cores
    OMP_NUM_THREADS=1 python benchmarks/bench_async.py --seeds 1 --iterations 12 --warm-start-updates 12  # flags of train.py last

Tiny policy, 4x4 FrozenLake, a batch of 64 episodes for each iteration, 64 drawn for a replay update. Prints Markdown; seconds as
ratios to the synchronous run of the same replay ratio beside it. Runs that reach a score late or never say so.
"""
import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent
FIFO = ["--replay", "uniform", "--fresh-update", "False", "--capacity", "512"]
BESIDE = ["--async-rollouts", "1"]
ARMS = {  # name: (flags, the arm that it is compared with)
    "in turns, each episode once": (["--replay", "none"], None),
    "in turns, ratio 2": ([*FIFO, "--replay-updates", "2"], None),
    "beside, queue": ([*BESIDE, "--replay", "none"], "in turns, each episode once"),
    "beside, ratio 1": ([*BESIDE, *FIFO, "--replay-updates", "1", "--async-fixed-ratio", "True"], "in turns, each episode once"),
    "beside, ratio 2": ([*BESIDE, *FIFO, "--replay-updates", "2", "--async-fixed-ratio", "True"], "in turns, ratio 2"),
    "beside, ratio 4": ([*BESIDE, *FIFO, "--replay-updates", "4", "--async-fixed-ratio", "True"], None),
    "beside, nobody waits": ([*BESIDE, *FIFO, "--replay-updates", "2"], None)}


def measured(run: Path, target: float) -> dict:
    """Numbers of a run without its first iteration, where things start."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    first, last = lines[0], lines[-1]
    change = {name: last[name] - first[name] for name in last if name.startswith(("time/total_", "cost/episodes_"))}
    busy = {side: change[f"time/total_{side}_busy_s"] for side in ("sampler", "trainer")}
    idle = {side: change[f"time/total_{side}_idle_s"] for side in ("sampler", "trainer")}
    generated, trained = change["cost/episodes_generated"], change["cost/episodes_trained"]
    seconds = np.cumsum([line["time/iteration_s"] - line["time/eval_s"] for line in lines])
    mu, y = (busy["sampler"] / generated) / (busy["trainer"] / trained), trained / generated
    reached = [second for second, line in zip(seconds, lines) if (line["eval/success"] or 0) >= target]
    fresh = [line["fresh/staleness_mean"] for line in lines[1:] if line["fresh/staleness_mean"] is not None]
    ages = [(line["replay/age_mean"], line["replay/age_p95"]) for line in lines[1:] if line["replay/age_mean"] is not None]
    return {"s an update": (seconds[-1] - seconds[0]) / max(1, last["step"] - first["step"]),
            "s an episode used": (seconds[-1] - seconds[0]) / trained,
            "sampler idle": idle["sampler"] / (idle["sampler"] + busy["sampler"]),
            "trainer idle": idle["trainer"] / (idle["trainer"] + busy["trainer"]),
            "mu": mu, "mu from counts": trained / generated, "y": y, "gamma": (1 + mu / y) / (1 + mu),
            "age on arrival": np.mean(fresh), "replayed: mean age": np.mean([mean for mean, _ in ages]) if ages else np.nan,
            "p95": np.mean([p95 for _, p95 in ages]) if ages else np.nan,
            "held-out success": last["eval/success"], "s to target": reached[0] if reached else np.inf}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--target", type=float, default=0.7)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS), metavar="ARM")
    arguments, flags_of_all = parser.parse_known_args()
    found = {name: [] for name in arguments.arms}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(arguments.seeds):
            for place, name in enumerate(arguments.arms):
                subprocess.run([sys.executable, ROOT / "train.py", *ARMS[name][0], "--seed", str(seed), "--runs-dir", folder,
                                "--name", f"arm{place}_{seed}", "--iterations", str(arguments.iterations), "--wandb", "off",
                                "--quiet", "True", "--checkpoint-every", "0", "--eval-problems", "256", *flags_of_all],
                               check=True, stdout=subprocess.DEVNULL)
                found[name].append(measured(Path(folder) / f"arm{place}_{seed}", arguments.target))
                print(f"{name}, seed {seed}: {found[name][-1]}", file=sys.stderr, flush=True)
    columns = list(found[arguments.arms[0]][0])
    print("| medians over seeds | " + " | ".join(columns[:-1]) +
          f" | s to {arguments.target:g} (reached) | time an episode used, ratio |")
    print("|---" * (len(columns) + 2) + "|")
    for name in arguments.arms:
        rows, other = found[name], ARMS[name][1]
        cells = [f"{np.median([row[column] for row in rows]):.3g}" for column in columns]
        reached = [row["s to target"] for row in rows if row["s to target"] < np.inf]
        cells[-1] = f"{cells[-1].replace('inf', 'n/a')} ({len(reached)} of {len(rows)})"
        cells.append("" if other not in found else "{:.2f}".format(np.median([
            row["s an episode used"] / base["s an episode used"] for row, base in zip(rows, found[other])])))
        print(f"| {name} | " + " | ".join(cells).replace("nan", "-") + " |")


if __name__ == "__main__":
    main()
