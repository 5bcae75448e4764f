"""Evaluation on held-out problems, and the picture of a run.

    python eval.py runs/NAME                    # its last checkpoint, on the held-out problems it was judged by
    python eval.py runs/NAME --problems 1000 --temperature 0.5
"""
import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # see train.py

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

import matplotlib
import numpy as np
import torch
import tyro
import yaml

from envs import ENVS
from models import Chat, load_policy
from rollout import HFEngine, collect

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  (after the choice of a backend without a screen)


def evaluate(engine, chat, make_env, problem_ids: list[int], *, temperature: float, **play) -> dict:
    """Plays one episode for each problem. Seeds depend on the number of problems alone: all methods and runs get the same."""
    engine.sync()
    seeds = np.random.default_rng([2026, len(problem_ids)]).integers(2**31, size=len(problem_ids))
    episodes, _ = collect(engine, chat, make_env, problem_ids, list(range(len(problem_ids))), seeds, temperature=temperature,
                          policy_step=0, iteration=0, **play)
    engine.sync()
    turns = sum(episode.info["turns"] for episode in episodes)
    return {"success": float(np.mean([episode.info["success"] for episode in episodes])),
            "score": float(np.mean([episode.score for episode in episodes])),
            "parse_failures": sum(episode.info["parse_failures"] for episode in episodes) / turns,
            "truncated": float(np.mean([episode.info["truncated"] for episode in episodes])),
            "env_errors": float(np.mean([bool(episode.info["env_error"]) for episode in episodes])),
            "turns": turns / len(episodes), "problems": len(episodes)}


def wilson_interval(successes: int, trials: int, z: float = 1.959964) -> tuple[float, float]:
    """95 % score interval of a proportion (Wilson 1927).

    >>> [round(end, 4) for end in wilson_interval(8, 10)]
    [0.4902, 0.9433]
    """
    share, spread = successes / trials, z * z / trials
    centre = (share + spread / 2) / (1 + spread)
    half = z * math.sqrt(share * (1 - share) / trials + spread / (4 * trials)) / (1 + spread)
    return max(0.0, centre - half), min(1.0, centre + half)


def plot_learning_curves(runs: list[Path], path: Path):
    """Held-out success (and, pale, the training reward) of runs over iterations."""
    figure, axes = plt.subplots(figsize=(7, 4))
    for number, run in enumerate(runs):
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        judged = [(line["iteration"], line["eval/success"]) for line in lines if line["eval/success"] is not None]
        places, successes = zip((0, lines[0]["eval/start_success"]), *judged)
        axes.plot([line["iteration"] for line in lines], [line["fresh/reward"] for line in lines], color=f"C{number}", alpha=0.25,
                  label=None if number else "training reward")
        axes.plot(places, successes, color=f"C{number}", marker="o", label=f"held-out success, {run.name}")
    axes.set(xlabel="iteration", ylabel="success, reward", ylim=(min(0, axes.get_ylim()[0]), 1))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def plot_drift(run: Path, drift):
    """drift.png: KL(behaviour || current) of single episodes against their age, and the fitted line behind --tau auto."""
    ages, kl = drift.points()
    fit = drift.fit()
    figure, axes = plt.subplots(figsize=(7, 4))
    axes.scatter(ages, kl, s=6, alpha=0.4, label="one episode of the last probes")
    if fit:
        ends = np.array([0, ages.max()])
        axes.plot(ends, fit["k0"] + fit["c"] * ends, color="C1",
                  label=f"KL = {fit['k0']:.3g} + {fit['c']:.3g} age, R² {fit['r2']:.2f}; tau {drift.tau():.3g}")
    else:
        axes.plot([], [], color="C1", label=f"no fit: {len(ages)} of the {drift.min_rows} episodes needed, or a single age")
    axes.set(xlabel="age (in --age-unit)", ylabel="KL(behaviour || current), nats an episode", title=run.name)
    axes.legend()
    figure.tight_layout()
    figure.savefig(run / "drift.png", dpi=120)
    plt.close(figure)


@dataclass
class EvalArgs:
    """Evaluate the last checkpoint of a run on held-out problems."""
    run: Annotated[str, tyro.conf.Positional]
    """Folder of the run."""
    problems: int | None = None
    """Number of held-out problems. None: the run's own."""
    temperature: float | None = None
    """Sampling temperature. None: the run's own."""


def main(arguments: EvalArgs) -> dict:
    run = Path(arguments.run)
    checkpoints = sorted((run / "checkpoints").glob("step_*"), key=lambda path: int(path.name[5:]))
    if not (run / "config.yaml").is_file() or not checkpoints:
        print(f"error: {run} is not a run with a checkpoint (it needs config.yaml and checkpoints/step_*)", file=sys.stderr)
        sys.exit(2)
    args = SimpleNamespace(**yaml.safe_load((run / "config.yaml").read_text()))
    count = args.eval_problems if arguments.problems is None else arguments.problems
    temperature = args.eval_temperature if arguments.temperature is None else arguments.temperature
    if not count > 0 or not temperature > 0:
        print(f"error: --problems {count} and --temperature {temperature} must be above 0", file=sys.stderr)
        sys.exit(2)
    policy, tokenizer = load_policy(checkpoints[-1], getattr(torch, args.dtype))
    engine = HFEngine(policy, [tokenizer.eos_token_id], tokenizer.pad_token_id)
    make_env = lambda: ENVS[args.env](size=args.board_size, slippery=args.slippery)  # noqa: E731
    problems = make_env().problems("heldout", count)
    result = evaluate(engine, Chat(tokenizer), make_env, problems, temperature=temperature,
                      max_turns=args.max_turns, max_new_tokens=args.max_new_tokens, format_penalty=args.format_penalty,
                      context_length=policy.config.max_position_embeddings)
    low, high = wilson_interval(round(result["success"] * result["problems"]), result["problems"])
    result |= {"success_low": low, "success_high": high, "checkpoint": checkpoints[-1].name}
    (run / "eval.json").write_text(json.dumps(result, indent=1))
    print(f"{run} {checkpoints[-1].name}: success {result['success']:.3f} (95 % interval {low:.3f} to "
          f"{high:.3f}) on {result['problems']} held-out problems; {result['turns']:.1f} turns, {result['parse_failures']:.1%} "
          "answers not valid")
    return result


if __name__ == "__main__":
    main(tyro.cli(EvalArgs))
