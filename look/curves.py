"""The pictures that a run leaves beside its logs: learning.png and drift.png."""
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from runtime.files import whole_lines


def plain(run: Path) -> str:
    return run.name.replace("$", r"\$")  # matplotlib reads formulas between two of them


def plot_learning_curves(runs: list[Path], path: Path):
    """Held-out success (and, pale, the training reward) of runs over iterations."""
    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    for number, run in enumerate(runs):
        lines = whole_lines(run / "metrics.jsonl")
        judged = [(line["iteration"], line["eval/success"]) for line in lines if line["eval/success"] is not None]
        places, successes = zip((0, lines[0]["eval/start_success"]), *judged)
        axes.plot([line["iteration"] for line in lines], [line["fresh/reward"] for line in lines], color=f"C{number}", alpha=0.25,
                  label=None if number else "training reward")
        axes.plot(places, successes, color=f"C{number}", marker="o", label=f"held-out success, {plain(run)}")
    axes.set(xlabel="iteration", ylabel="success, reward", ylim=(min(0, axes.get_ylim()[0]), 1))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def plot_drift(run: Path, drift):
    """drift.png, from a `DriftEstimator`: KL(behaviour || current) of single episodes against their age, and the fitted line
    behind --tau auto."""
    ages, kl = drift.points()
    fit = drift.fit()
    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    axes.scatter(ages, kl, s=6, alpha=0.4, label="one episode of the last probes")
    if fit:
        ends = np.array([0, ages.max()])
        axes.plot(ends, fit["k0"] + fit["c"] * ends, color="C1",
                  label=f"KL = {fit['k0']:.3g} + {fit['c']:.3g} age, R² {fit['r2']:.2f}; tau {drift.tau():.3g}")
    else:
        axes.plot([], [], color="C1", label=f"no fit: {len(ages)} of the {drift.min_rows} episodes needed, or a single age")
    axes.set(xlabel="age (steps, or iterations under --released age_in_iterations)", title=plain(run),
             ylabel="KL(behaviour || current), nats an episode")
    axes.legend()
    figure.tight_layout()
    figure.savefig(run / "drift.png", dpi=120)
