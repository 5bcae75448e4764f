"""The numbers that the configs promise, run again: which moved? Minutes a config on two cores.

    python studies/promises.py                               # every config with an `# expect:` line
    python studies/promises.py configs/frozenlake_tiny.yaml

A config promises by a line such as `# expect: final_success 0.914 of 512 (seed 0)`: the key of summary.json, its value,
and the number of held-out problems. On one machine a seed gives the same digits every time; elsewhere other kernels
round otherwise, so a number has moved when it differs by more than three standard errors of two such shares.

Those of arithmetic_tiny, frozenlake_tiny_problems, frozenlake_tiny_reinforce and sokoban_tiny were measured before updates read
shared beginnings once, which changed log-probs in their last digits. Those of arithmetic_tiny, frozenlake_tiny_problems,
frozenlake_vlm_tiny, the two fifo ones and sokoban_tiny were measured before problems came in shuffled passes and learning rate and beta followed the iterations:
they may come out "close" or "MOVED".
"""
import json
import math
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
PROMISE = re.compile(r"^# expect: (\w+) ([0-9.]+) of (\d+) \(seed (\d+)\)$", re.MULTILINE)


def moved(promised: float, found: float, problems: int) -> bool:
    """Whether two shares of `problems` each differ by more than three standard errors of their difference.

    >>> moved(0.90, 0.86, 512), moved(0.90, 0.80, 512)
    (False, True)
    """
    mean = min(1 - 1 / problems, max(1 / problems, (promised + found) / 2))
    return abs(promised - found) > 3 * math.sqrt(2 * mean * (1 - mean) / problems)


def main(paths: list[Path]) -> int:
    worse = 0
    for path in paths:
        for key, promised, problems, seed in PROMISE.findall(path.read_text()):
            with tempfile.TemporaryDirectory() as folder:
                subprocess.run([sys.executable, ROOT / "train.py", path, "--seed", seed, "--runs-dir", folder, "--name", "run",
                                "--wandb", "off", "--quiet", "true"], check=True)
                found = json.loads((Path(folder) / "run" / "summary.json").read_text())[key]
            verdict = "same" if round(found, 3) == float(promised) else "MOVED" if moved(float(promised), found, int(problems)) else "close"
            worse += verdict == "MOVED"
            print(f"{path.name}: {key} {found:.3f}, promised {promised}: {verdict}", flush=True)
    return worse


if __name__ == "__main__":
    sys.exit(min(1, main([Path(path) for path in sys.argv[1:]] or sorted((ROOT / "configs").glob("*.yaml")))))
