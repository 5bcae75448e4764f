"""Kills real training runs with SIGKILL at random moments, resumes them, and compares their end with that of runs that were never
stopped: weights, critic, optimisers, buffers, samplers, random generators, counters and every line of the logs but times.

    OMP_NUM_THREADS=1 python benchmarks/bench_faults.py --kills 20

Moments (seeded): `start` while the process starts or reads its checkpoint; `work` anywhere in sampling and updates; `log` just after
a line of metrics.jsonl; `save` while a checkpoint is being written.
"""
import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parent.parent
SMALL = ["--problems-per-iteration", "6", "--group-size", "4", "--replay-batch-size", "6", "--train-problems", "64", "--eval-problems",
         "16", "--eval-every", "2", "--checkpoint-every", "1", "--tiny-options", "updates", "12", "--quiet", "true"]
SETUPS = {
    "GRPO, fresh replay": [],
    "PPO, critic, td_error, LoRA": ["--algo", "ppo", "--priority", "td_error", "--lora-rank", "4"],
    "tau auto, problem heap, keep 1": ["--tau", "auto", "--replay-options", "probe_episodes", "8", "--problem-sampler", "heap", "--keep-checkpoints", "1"],
    "wandb offline, minibatches, KL": ["--wandb", "offline", "--fresh-epochs", "2", "--minibatches", "2", "--kl-coef", "0.01"],
}
KINDS = ("start", "work", "log", "save")


# ---------------------------------------------------------------------------------------------------- what must be the same


def timeless(value):
    """Without what comes of the clock, and the places of the run."""
    if isinstance(value, dict):
        return {key: sorted(item) if key == "target_modules" else timeless(item) for key, item in value.items()
                if not key.startswith(("time/", "seconds_")) and key not in (
                    "minutes", "name", "runs_dir", "resume", "arrays", "base_model_name_or_path")}  # target_modules is a set
    return value


def lines_of(path: Path) -> list:
    return [timeless(json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def arrays_of(path: Path) -> dict:
    with np.load(path, allow_pickle=False) as arrays:
        return dict(arrays)


def differences(a: Path, b: Path) -> list[str]:
    """Names of everything that differs between two runs."""
    found = [name for name in ("metrics.jsonl", "episodes.jsonl", "replay.jsonl") if lines_of(a / name) != lines_of(b / name)]
    summaries = [json.loads((run / "summary.json").read_text()) if (run / "summary.json").exists() else None for run in (a, b)]
    if timeless(summaries[0]) != timeless(summaries[1]):
        found.append("summary.json")
    last = [max((run / "checkpoints").glob("step_*"), key=lambda path: int(path.name[5:])) for run in (a, b)]
    names = [sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path.suffix != ".npz")
             for folder in last]
    if last[0].name != last[1].name or names[0] != names[1]:
        return [*found, f"files of {last[0].name} and {last[1].name}"]
    for name in names[0]:
        first, second = (folder / name for folder in last)
        if name.endswith(".safetensors"):
            tensors = [load_file(path) for path in (first, second)]
            same = tensors[0].keys() == tensors[1].keys() and all(torch.equal(tensors[0][key], tensors[1][key]) for key in tensors[0])
        elif name.endswith(".json") and name != "manifest.json":
            same = timeless(json.loads(first.read_text())) == timeless(json.loads(second.read_text()))
        else:
            same = True
        if not same:
            found.append(name)
    packs = [{path.name if path.parent == folder else path.parent.name: arrays_of(path) for path in folder.rglob("*.npz")}
             for folder in last]
    for name in packs[0].keys() | packs[1].keys():
        one, other = packs[0].get(name, {}), packs[1].get(name, {})
        if one.keys() != other.keys() or not all(np.array_equal(one[key], other[key]) for key in one):
            found.append(f"arrays of {name}")
    return found


# ---------------------------------------------------------------------------------------------------- killing


def train(*flags, log: Path) -> subprocess.Popen:
    with open(log, "a") as file:
        return subprocess.Popen([sys.executable, str(ROOT / "train.py"), *map(str, flags)], stdout=file, stderr=file, cwd=ROOT,
                                env=os.environ | {"OMP_NUM_THREADS": "1"})


def count(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for(process, seen, patience: float = 300.0) -> bool:
    """Until `seen()` or the end of the process; whether it was seen."""
    end = time.time() + patience
    while process.poll() is None and time.time() < end:
        if seen():
            return True
        time.sleep(0.005)
    return False


def kill(process, run: Path, kind: str, rng: random.Random) -> str:
    """Kills the process at a random moment of `kind`; says where the run was."""
    if kind == "start":
        time.sleep(rng.uniform(0.5, 12))
    else:
        lowest = [count(run)]

        def grown():  # on resume the file is cut first
            lowest[0] = min(lowest[0], count(run))
            return count(run) > lowest[0]

        if kind == "save":
            wait_for(process, lambda: any((run / "checkpoints").glob(".step_*.tmp")))
            time.sleep(rng.uniform(0, 0.5))
        else:
            wait_for(process, grown)
            time.sleep(rng.uniform(0, 0.01) if kind == "log" else rng.uniform(0.05, 4))
    ended = process.poll() is not None
    process.send_signal(signal.SIGKILL)
    process.wait()
    unfinished = [path.name for path in (run / "checkpoints").glob(".*")]
    whole = sorted((int(path.name[5:]) for path in (run / "checkpoints").glob("step_*")))
    return ("the run had ended" if ended else
            f"{count(run)} iterations logged, last checkpoint {f'step_{whole[-1]}' if whole else 'none'}"
            + (f", {', '.join(unfinished)} being written" if unfinished else ""))


def killed_run(folder: Path, name: str, flags: list, kinds: list[str], rng: random.Random) -> list[tuple[str, str]]:
    """A run that is killed once for each of `kinds` and resumed each time, then left to end: [(kind, where it was)]."""
    run, log, story = folder / name, folder / f"{name}.log", []
    for kind in [*kinds, None]:
        new = not (run / "config.yaml").exists()
        process = train(*(["--runs-dir", folder, "--name", name, *flags] if new else ["--resume", run]), log=log)
        if kind is None:
            process.wait()
            if process.returncode and "raise --iterations" not in log.read_text().splitlines()[-1]:
                raise RuntimeError(f"the last resume of {name} failed:\n{log.read_text()[-3000:]}")
        else:
            story.append((kind, kill(process, run, kind, rng)))
    return story


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", help="where the runs stay; by default a temporary folder")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    folder = Path(options.folder or tempfile.mkdtemp(prefix="bench_faults_"))
    folder.mkdir(parents=True, exist_ok=True)
    each = -(-options.kills // len(SETUPS))
    rows, wrong = [], []
    for number, (title, flags) in enumerate(SETUPS.items()):
        flags = ["--wandb", "off", *SMALL, "--iterations", options.iterations, *flags]
        if train("--runs-dir", folder, "--name", f"whole{number}", *flags, log=folder / f"whole{number}.log").wait():
            raise RuntimeError((folder / f"whole{number}.log").read_text()[-3000:])
        kinds = [KINDS[(number + place) % len(KINDS)] for place in range(min(each, options.kills - each * number))]
        story = killed_run(folder, f"killed{number}", flags, kinds, rng)
        bad = differences(folder / f"whole{number}", folder / f"killed{number}")
        wrong += bad
        rows += [(title if not place else "", *row, "" if place else "nothing" if not bad else ", ".join(bad))
                 for place, row in enumerate(story)]
        print(f"{title}: {len(story)} kills; different: {bad or 'nothing'}", flush=True)
    print("\n| run | killed in | where it was | what differs at the end |\n|---|---|---|---|")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    print(f"\n{len(rows)} kills, {len(wrong)} differences")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
