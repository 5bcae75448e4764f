import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from envs import FrozenLake

# on a busy machine one example of a hundred can take long
settings.register_profile("busy", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")

ROOT = Path(__file__).parent.parent
tiny_lake = functools.partial(FrozenLake, prompt="tiny")  # as the command line makes it for --model tiny


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory):
    """A cache of its own, with a barely trained tiny policy: most tests need a policy that runs, not a good one."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def tiny_folder(cache_dir):
    from policies.tiny import warm_started_tiny
    return warm_started_tiny(tiny_lake(), cache_dir, seed=0, updates=12, skill=0.6, max_turns=10)


@pytest.fixture(scope="session")
def quick_flags(cache_dir, tiny_folder):
    """Flags of a run of seconds; the warm start is the session's own (same key as `tiny_folder`)."""
    return ["--wandb", "off", "--cache-dir", str(cache_dir), "--tiny-options", "updates", "12", "--eval-problems", "16",
            "--eval-every", "0", "--problems-per-iteration", "6", "--group-size", "4", "--replay-batch-size", "6",
            "--train-problems", "64"]


@functools.cache
def forker() -> subprocess.Popen:
    return subprocess.Popen([sys.executable, str(ROOT / "tests" / "forked.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def script(name: str, *flags, check=True, timeout=1500) -> subprocess.CompletedProcess:
    """The real command line, as a user runs it, in a process of its own; that process is forked from one that has imported torch."""
    command = [name, *map(str, flags)]
    with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as errors:
        forker().stdin.write(json.dumps([command, out.name, errors.name]) + "\n")
        forker().stdin.flush()
        process = int(forker().stdout.readline())
        timer = threading.Timer(timeout, os.kill, (process, signal.SIGKILL))
        timer.start()
        code = int(forker().stdout.readline())
        timer.cancel()
        done = subprocess.CompletedProcess(command, code, out.read(), errors.read())
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def train(*flags, check=True):
    return script("train.py", *flags, check=check)
