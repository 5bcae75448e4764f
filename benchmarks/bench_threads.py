"""How much a busy neighbour slows a training step, by how OpenMP's threads wait. Prints Markdown.

    python benchmarks/bench_threads.py
"""
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

SETTINGS = {"default (spin)": {}, "OMP_WAIT_POLICY=PASSIVE": {"OMP_WAIT_POLICY": "PASSIVE"}, "OMP_NUM_THREADS=1": {"OMP_NUM_THREADS": "1"}}


def step_seconds() -> float:
    """Median of 10 forward and backward passes of the tiny policy on (20, 200) tokens."""
    sys.path.insert(0, str(Path(__file__).parent.parent))
    import torch
    from transformers import LlamaForCausalLM

    from models import token_logprobs
    from policies.tiny import tiny_config, tiny_tokenizer
    model = LlamaForCausalLM(tiny_config(tiny_tokenizer()))
    tokens_BT = torch.randint(6, 40, (20, 200))
    mask_BT = torch.rand(20, 200) < 0.1
    mask_BT[:, 0] = False
    seconds = []
    for _ in range(12):
        started = time.time()
        token_logprobs(model, tokens_BT, mask_BT)[0].sum().backward()
        seconds.append(time.time() - started)
    return statistics.median(seconds[2:])


def measure(setting: dict) -> float:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("OMP_")} | setting
    return float(subprocess.run([sys.executable, __file__, "child"], env=environment, capture_output=True, text=True, check=True).stdout)


if __name__ == "__main__":
    if sys.argv[1:] == ["child"]:
        print(step_seconds())
        sys.exit()
    print("| threads | alone, s | beside one busy process, s | ratio |\n|---|---|---|---|")
    for name, setting in SETTINGS.items():
        alone = measure(setting)
        busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        try:
            beside = measure(setting)
        finally:
            busy.kill()
        print(f"| {name} | {alone:.3f} | {beside:.3f} | {beside / alone:.1f}x |", flush=True)
