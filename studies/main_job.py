"""The main job for three seeds: the curves and the numbers of the README. About 15 minutes on two cores.

    python studies/main_job.py                      # runs what is not there yet, in runs/main_job_seed<n>
    python studies/main_job.py --algo reinforce++   # flags go on to train.py
"""
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from eval import wilson_interval  # noqa: E402
from look.curves import plot_learning_curves  # noqa: E402

flags = sys.argv[1:]
tag = "_".join(["main_job", *(flag.strip("-") for flag in flags)])
runs = [ROOT / "runs" / f"{tag}_seed{seed}" for seed in range(3)]
for seed, run in enumerate(runs):
    if not (run / "summary.json").exists():
        subprocess.run([sys.executable, str(ROOT / "train.py"), "--name", run.name, "--runs-dir", str(run.parent), "--seed", str(seed),
                        "--wandb", "off", *flags], check=True)
plot_learning_curves(runs, ROOT / "studies" / f"{tag}.png")

print("| seed | start | end (95 % interval) | best | episodes | optimiser steps | minutes |\n|---|---|---|---|---|---|---|")
for seed, run in enumerate(runs):
    summary = json.loads((run / "summary.json").read_text())
    low, high = wilson_interval(round(summary["final_success"] * summary["heldout_problems"]), summary["heldout_problems"])
    print(f"| {seed} | {summary['start_success']:.3f} | {summary['final_success']:.3f} ({low:.3f} to {high:.3f}) | "
          f"{summary['best_success']:.3f} | {summary['episodes']:,} | {summary['steps']} | {summary['minutes']:.1f} |")
