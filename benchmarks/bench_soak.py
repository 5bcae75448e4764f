"""Whether a long run keeps its memory and file handles flat. Prints Markdown and draws benchmarks/soak.png.

    python benchmarks/bench_soak.py                       # 2,000 iterations of two episodes
    python benchmarks/bench_soak.py --iterations 200 --figure /tmp/soak.png

The real command line, on a terminal of its own so that the dashboard runs too, with PPO (policy and critic, small ones: what is
looked for does not depend on their size), a full buffer of 32, evaluation, checkpoints and wandb offline. Read from outside, from
/proc: resident memory and open files of the trainer, resident memory of its child processes (wandb's). Every ten seconds the
trainer collects its garbage and gives back what malloc holds, so that what is in use counts; --trim False leaves that out.
"""
import json
import os
import pty
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import tyro

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
FLAGS = ("--algo ppo --problems-per-iteration 1 --group-size 2 --capacity 32 --replay-batch-size 4 --replay-updates 1 --lr 1e-5 "
         "--critic-lr 1e-4 --train-problems 64 --eval-problems 4 --eval-every 50 --checkpoint-every 100 --tau auto "
         "--replay-options probe_episodes 4 --problem-sampler heap --max-turns 2 --max-new-tokens 4 --wandb offline").split()


TRIMMED = """
import ctypes, gc, os, runpy, sys, threading, time

def trim():
    while True:
        time.sleep(10)
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)

threading.Thread(target=trim, daemon=True).start()
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def small_policy(folder: Path):
    import torch
    from transformers import LlamaForCausalLM

    from policies.tiny import tiny_config, tiny_tokenizer
    tokenizer = tiny_tokenizer()
    config = tiny_config(tokenizer)
    config.update({"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1,
                   "num_key_value_heads": 1})
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@dataclass
class SoakArgs:
    """Run the tiny loop for long and watch its memory and files."""
    iterations: int = 2000
    seconds: float = 5.0
    """Between two readings."""
    trim: bool = True
    """Collect garbage and give back what malloc holds, every ten seconds."""
    figure: str = str(Path(__file__).parent / "soak.png")


def proc(pid: int) -> tuple[float, int]:
    """Resident MiB and open file descriptors of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20, len(os.listdir(f"/proc/{pid}/fd"))


def children(pid: int) -> list[int]:
    found = [int(child) for task in os.listdir(f"/proc/{pid}/task")
             for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split()]
    return found + [grandchild for child in found for grandchild in children(child)]


def iterations_done(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def watch(args: SoakArgs, folder: Path) -> list[dict]:
    """Runs the loop; readings {iteration, rss, files, children_rss, children}."""
    terminal, slave = pty.openpty()
    small_policy(folder / "policy")
    command = [sys.executable, *["-c", TRIMMED] * args.trim, str(ROOT / "train.py"), *FLAGS,
               "--model", str(folder / "policy"), "--runs-dir", str(folder),
               "--env-options", "prompt", "tiny", "--iterations", str(args.iterations), "--name", "soak"]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=slave, stderr=slave,
                               env=os.environ | {"OMP_NUM_THREADS": "1", "TERM": "xterm"})
    os.close(slave)
    screen = bytearray()

    def drain():
        try:
            while chunk := os.read(terminal, 65536):
                screen.extend(chunk)
                del screen[:-20_000]
        except OSError:  # the other end is closed
            pass

    threading.Thread(target=drain, daemon=True).start()
    readings = []
    while process.poll() is None:
        time.sleep(args.seconds)
        done = iterations_done(folder / "soak")
        if not 0 < done < args.iterations:  # before the loop, or making the pictures after it
            continue
        try:
            rss, files = proc(process.pid)
            others = [proc(child)[0] for child in children(process.pid)]
        except (FileNotFoundError, ProcessLookupError):  # it ended between the calls
            continue
        readings.append({"iteration": done, "rss": rss, "files": files, "children_rss": sum(others), "children": len(others)})
    if process.returncode:
        sys.exit(screen.decode(errors="replace"))
    return readings


def slope(readings: list[dict], key: str) -> float:
    """Theil and Sen's slope, the median over pairs, of `key` an iteration in the second half of the run."""
    half = [row for row in readings if row["iteration"] >= readings[-1]["iteration"] / 2]
    pairs = [(b[key] - a[key]) / (b["iteration"] - a["iteration"]) for place, a in enumerate(half) for b in half[place + 1:]
             if b["iteration"] > a["iteration"]]
    return statistics.median(pairs)


def draw(readings: list[dict], path: str):
    figure, axes = plt.subplots(figsize=(7, 3.5))
    places = [row["iteration"] for row in readings]
    axes.plot(places, [row["rss"] for row in readings], label="resident memory of the trainer, MiB")
    axes.plot(places, [row["children_rss"] for row in readings], label="of wandb's processes, MiB")
    axes.set(xlabel="iteration", ylabel="MiB", ylim=(0, None))
    files = axes.twinx()
    files.plot(places, [row["files"] for row in readings], color="C2", label="open files of the trainer (right)")
    files.set(ylabel="open files", ylim=(0, None))
    handles = [each for axis in (axes, files) for each in axis.get_legend_handles_labels()[0]]
    axes.legend(handles, [handle.get_label() for handle in handles], loc="center right")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(args: SoakArgs):
    started = time.time()
    with tempfile.TemporaryDirectory(prefix="soak_") as folder:
        readings = watch(args, Path(folder))
        last = json.loads((Path(folder) / "soak" / "metrics.jsonl").read_text().splitlines()[-1])
    print("| iteration | trainer, MiB | its open files | wandb's processes, MiB |\n|---|---|---|---|")
    for share in (0.05, 0.25, 0.5, 0.75, 1.0):
        row = min(readings, key=lambda row: abs(row["iteration"] - share * args.iterations))
        print(f"| {row['iteration']:,} | {row['rss']:.0f} | {row['files']} | {row['children_rss']:.0f} |")
    print(f"\n{last['iteration']:,} iterations, {last['episodes']:,} episodes, {last['step']:,} optimiser steps, "
          f"{(time.time() - started) / 60:.1f} minutes. Second half, a thousand iterations: trainer "
          f"{1000 * slope(readings, 'rss'):+.1f} MiB, {1000 * slope(readings, 'files'):+.1f} files; wandb's processes "
          f"{1000 * slope(readings, 'children_rss'):+.1f} MiB.")
    draw(readings, args.figure)


if __name__ == "__main__":
    main(tyro.cli(SoakArgs, description=__doc__, config=(tyro.conf.FlagConversionOff,)))
