"""Two processes against one: held-out success of short runs over seeds; and what gradient checkpointing saves and costs.

    OMP_NUM_THREADS=1 python benchmarks/bench_ranks.py [--seeds 0 1 2] [--iterations 8]
"""
import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
FLAGS = ["--wandb", "off", "--quiet", "True", "--eval-problems", "128", "--eval-every", "0"]


def run(processes: int, seed: int, iterations: int, folder: Path) -> tuple[float, float]:
    """Held-out success at the end, and the mean training reward over the second half."""
    start = [sys.executable] if processes == 1 else \
        [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(processes), "--master_port", str(29700 + seed)]
    name = f"ranks{processes}_seed{seed}"
    subprocess.run([*start, str(ROOT / "train.py"), *FLAGS, "--runs-dir", str(folder), "--name", name, "--seed", str(seed),
                    "--iterations", str(iterations)], check=True, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return lines[-1]["eval/success"], float(np.mean([line["fresh/reward"] for line in lines[len(lines) // 2:]]))


def learning_curves(seeds: list[int], iterations: int):
    print(f"frozenlake_tiny, {iterations} iterations: mean (standard deviation) over the seeds {seeds}\n\n"
          "| processes | held-out success | training reward, second half |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for processes in (1, 2):
            success, reward = zip(*(run(processes, seed, iterations, Path(folder)) for seed in seeds))
            print(f"| {processes} | " + " | ".join(f"{np.mean(values):.3f} ({np.std(values, ddof=1):.3f}): " + ", ".join(
                f"{value:.3f}" for value in values) for values in (success, reward)) + " |", flush=True)


def checkpointing():
    """Peak of live tensors (tests/test_ranks.py) and median seconds of an update, 4 episodes of 512 tokens."""
    import torch
    from test_ranks import WIDE, Peak, make_episode
    from transformers import LlamaConfig, LlamaForCausalLM

    from settings import Args
    from update import make_learner, update
    print("\n| gradient checkpointing | peak, MiB | seconds an update |\n|---|---|---|")
    for flag in (False, True):
        torch.manual_seed(0)
        policy = LlamaForCausalLM(LlamaConfig(
            vocab_size=WIDE["vocabulary"], hidden_size=256, intermediate_size=1024, num_hidden_layers=12, num_attention_heads=8,
            num_key_value_heads=4, head_dim=32, tie_word_embeddings=True)).eval()
        args = Args(max_turns=1, max_new_tokens=512, micro_batch_tokens=2048, gradient_checkpointing=flag)
        learner = make_learner(args, policy)
        rng = np.random.default_rng(0)
        episodes = [make_episode(tokens=rng.integers(0, WIDE["vocabulary"], 512)) for _ in range(4)]
        update(learner, episodes)
        seconds = []
        for _ in range(3):
            started = time.perf_counter()
            update(learner, episodes)
            seconds.append(time.perf_counter() - started)
        moments = [moment for entry in learner.optimizer.state.values() for moment in entry.values()]
        held = [*policy.state_dict().values(), *moments]
        with Peak(held) as peak:
            update(learner, episodes)
        print(f"| {'yes' if flag else 'no'} | {peak.peak / 2**20:.0f} | {np.median(seconds):.2f} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--iterations", type=int, default=8)
    arguments = parser.parse_args()
    checkpointing()
    learning_curves(arguments.seeds, arguments.iterations)
