"""Time ReplayBuffer beside its peers in one process: `python benchmarks/bench_buffer.py`. Prints Markdown.

Batches of 128; median microseconds of CPU time per batch, so that other work on the machine counts less, the methods
taking turns in blocks. "sample" draws a batch and returns its stored records, importance weights and ages. "age" makes all N entries one step older: peers must recompute and
write N priorities; ReplayBuffer is given a larger step in `sample`, so its cost is in the sample column already.
"""

import argparse
import importlib
import importlib.metadata
import platform
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
from buffer import ReplayBuffer
from episode import Episode
from runtime.files import write_state
from runtime.memories import load_buffer

BATCH, ALPHA, BETA, TAU = 128, 0.6, 0.4, 500.0


def make_episode(length: int, step: int = 0) -> Episode:
    mask = np.arange(length) >= length // 4
    return Episode(
        tokens=np.arange(length), action_mask=mask, behavior_logprobs=np.where(mask, -1.0, 0.0),
        advantages=np.where(mask, 0.5, 0.0), turn_ends=[length], turn_rewards=[1.0], reward=1.0, score=1.0,
        problem_id=1000 + step, group_id=1000 + step, policy_step=step, last_policy_step=step, iteration=step,
        info={"success": True},
    )  # fmt: skip


class Ours:
    """FreshReplay: weights computed at the draw"""

    def __init__(self, n: int, base: np.ndarray):
        self.episode, self.step = make_episode(4), n // BATCH
        self.buffer = ReplayBuffer(n, alpha=ALPHA, tau=TAU, beta=BETA)
        for start in range(0, n, 10_000):
            birthdays = np.arange(start, min(n, start + 10_000)) // BATCH
            self.buffer.add([self.episode] * len(birthdays), self.step, birthdays, base[start : start + 10_000])

    def add(self, base):
        self.buffer.add([self.episode] * BATCH, self.step, np.full(BATCH, self.step), base)

    def sample(self):
        batch = self.buffer.sample(BATCH, self.step)
        self.ids = batch.ids
        return batch.episodes, batch.weights, batch.ages

    def update(self, base):
        self.buffer.update_priorities(self.ids, base)

    def age(self):
        self.step += 1


class Cpprb:
    """cpprb (C++, float32 priorities)"""

    def __init__(self, n: int, base: np.ndarray):
        from cpprb import PrioritizedReplayBuffer

        self.buffer = PrioritizedReplayBuffer(n, {"row": {"dtype": np.int64}}, alpha=ALPHA, eps=0.0)
        self.n, self.base, self.ages = n, base.copy(), np.arange(n)[::-1] // BATCH
        self.buffer.add(row=np.arange(n), priorities=base)
        self.episodes = [make_episode(4)] * n

    def add(self, base):
        self.buffer.add(row=np.arange(BATCH), priorities=base)

    def sample(self):
        batch = self.buffer.sample(BATCH, beta=BETA)
        self.ids = batch["indexes"]
        return [self.episodes[row] for row in batch["row"][:, 0].tolist()], batch["weights"], self.ages[self.ids]

    def update(self, base):
        self.base[self.ids], decay = base, np.exp(-self.ages[self.ids] / TAU)
        self.buffer.update_priorities(self.ids, base * decay)

    def age(self):
        self.ages += 1
        self.buffer.update_priorities(np.arange(self.n), self.base * np.exp(-self.ages / TAU))


class Tianshou:
    """tianshou SegmentTree (numba)"""

    def __init__(self, n: int, base: np.ndarray):
        from tianshou.data import SegmentTree

        self.tree, self.rng = SegmentTree(n), np.random.default_rng(0)
        self.n, self.base, self.ages, self.next = n, base.copy(), np.arange(n)[::-1] // BATCH, 0
        self.tree[np.arange(n)] = base**ALPHA
        self.episodes = [make_episode(4)] * n

    def add(self, base):
        rows = (self.next + np.arange(BATCH)) % self.n
        self.base[rows], self.ages[rows], self.next = base, 0, self.next + BATCH
        self.tree[rows] = base**ALPHA

    def sample(self):
        self.ids = self.tree.get_prefix_sum_idx(self.rng.random(BATCH) * self.tree.reduce())
        weights = (self.tree[self.ids] / self.tree.reduce() * self.n) ** -BETA
        return [self.episodes[row] for row in self.ids.tolist()], weights / weights.max(), self.ages[self.ids]

    def update(self, base):
        self.base[self.ids] = base
        self.tree[self.ids] = (base * np.exp(-self.ages[self.ids] / TAU)) ** ALPHA

    def age(self):
        self.ages += 1
        self.tree[np.arange(self.n)] = (self.base * np.exp(-self.ages / TAU)) ** ALPHA


class LinearScan:
    """plain Python, as the released FreshPER buffer is described"""

    def __init__(self, n: int, base: np.ndarray):
        self.n, self.base, self.ages = n, base.tolist(), (np.arange(n)[::-1] // BATCH).tolist()
        self.rng, self.leaves, self.next = np.random.default_rng(0), [b**ALPHA for b in base.tolist()], 0
        self.episodes = [make_episode(4)] * n

    def add(self, base):
        for value in base.tolist():
            oldest = self.next % self.n
            self.base[oldest], self.ages[oldest], self.leaves[oldest] = value, 0, value**ALPHA
            self.next += 1

    def sample(self):
        total, self.ids = sum(self.leaves), []
        for stratum in range(BATCH):
            target, cumulative, index = (stratum + self.rng.random()) * total / BATCH, 0.0, self.n - 1
            for index, leaf in enumerate(self.leaves):
                cumulative += leaf
                if cumulative > target:
                    break
            self.ids.append(index)
        largest = (min(self.leaves) / total * self.n) ** -BETA  # normalised by the smallest priority of the buffer
        weights = [(self.leaves[index] / total * self.n) ** -BETA / largest for index in self.ids]
        return [self.episodes[index] for index in self.ids], weights, [self.ages[index] for index in self.ids]

    def update(self, base):
        for index, value in zip(self.ids, base.tolist()):
            self.base[index] = value
            self.leaves[index] = (value * np.exp(-self.ages[index] / TAU)) ** ALPHA

    def age(self):
        for index in range(self.n):
            self.ages[index] += 1
            self.leaves[index] = (self.base[index] * np.exp(-self.ages[index] / TAU)) ** ALPHA


class TorchRL:
    """torchrl PrioritizedSampler (C++ tree)"""

    def __init__(self, n: int, base: np.ndarray):
        import torch
        from tensordict import TensorDict
        from torchrl.data import LazyTensorStorage, PrioritizedSampler, TensorDictReplayBuffer

        self.torch, self.n, self.base, self.ages = torch, n, base.copy(), np.arange(n)[::-1] // BATCH
        sampler = PrioritizedSampler(n, alpha=ALPHA, beta=BETA, eps=0.0)
        self.buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(n), sampler=sampler, batch_size=BATCH)
        self.episodes = [make_episode(4)] * n
        self.make = lambda rows: TensorDict({"row": torch.arange(rows)}, [rows])
        self.buffer.extend(self.make(n))
        sampler.update_priority(torch.arange(n), torch.as_tensor(base))

    def add(self, base):
        self.buffer.update_priority(self.buffer.extend(self.make(BATCH)), self.torch.as_tensor(base))

    def sample(self):
        batch = self.buffer.sample()
        self.ids = batch["index"]
        return (
            [self.episodes[row] for row in batch["row"].tolist()],
            batch["priority_weight"],
            self.ages[self.ids.numpy()],
        )

    def update(self, base):
        self.buffer.update_priority(self.ids, self.torch.as_tensor(base))

    def age(self):
        self.ages += 1
        self.buffer.update_priority(
            self.torch.arange(self.n), self.torch.as_tensor(self.base * np.exp(-self.ages / TAU))
        )


METHODS = {"FreshReplay": Ours, "cpprb": Cpprb, "tianshou": Tianshou, "torchrl": TorchRL, "linear scan": LinearScan}
OPERATIONS = ("add", "sample", "update", "age")


def median_times(n: int, rounds: int) -> dict[str, dict[str, float] | str]:
    """{method: {operation: median microseconds}}, or the reason why a method is absent."""
    rng = np.random.default_rng(0)
    base, results, methods = rng.random(n) + 0.01, {}, {}
    for name, method in METHODS.items():
        if method is LinearScan and n > 10_000:
            results[name] = "not run: minutes a batch"
            continue
        try:
            methods[name] = method(n, base)
        except (ImportError, OSError, RuntimeError, NameError) as error:
            results[name] = f"absent: {type(error).__name__}: {str(error).splitlines()[0][:70]}"
    times = {name: {operation: [] for operation in OPERATIONS} for name in methods}

    def measure(name: str, operation: str) -> None:
        arguments = (rng.random(BATCH) + 0.01,) if operation in ("add", "update") else ()
        start = time.thread_time()
        getattr(methods[name], operation)(*arguments)
        times[name][operation].append(time.thread_time() - start)

    for _ in range(5):  # blocks: warm caches inside, and a busy moment of the machine hits every method
        for name in methods:
            repeats = rounds // 5 if name != "linear scan" else max(1, 4_000 // n)
            for _ in range(repeats):
                for operation in ("sample", "update", "age"):
                    measure(name, operation)
            for _ in range(max(1, repeats // 10)):
                measure(name, "add")
    return results | {
        name: {op: float(np.median(t)) * 1e6 for op, t in column.items()} for name, column in times.items()
    }


def report_speed(n: int, rounds: int) -> None:
    results = median_times(n, rounds)
    ours = sum(results["FreshReplay"][operation] for operation in ("sample", "update", "age"))
    print(f"\n### N = {n:,}\n")
    print("| method | add | sample | update | age | sample+update+age | ratio to FreshReplay | sample alone |")
    print("|---|---|---|---|---|---|---|---|")
    for name in METHODS:
        row = results[name]
        if isinstance(row, str):
            print(f"| {name} | {row} | | | | | | |")
            continue
        total = row["sample"] + row["update"] + row["age"]
        ratio = row["sample"] / results["FreshReplay"]["sample"]
        cells = [f"{row[operation]:,.1f}" for operation in OPERATIONS]
        print(f"| {name} | {' | '.join(cells)} | {total:,.0f} | {total / ours:,.2f}x | {ratio:,.2f}x |")


def report_memory() -> None:
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    buffer = ReplayBuffer(1000)
    buffer.add([make_episode(50, step) for step in range(1000)], 1000)
    traced = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    print(f"\n1,000 episodes of 50 tokens: {traced / 1e6:.2f} MB traced, nbytes {buffer.nbytes / traced:.3f} of it. "
          f"Padded to 4,096 tokens the token arrays alone would take {1000 * 4096 * 13 / 1e6:.0f} MB.")  # fmt: skip


def report_saving(n: int, length: int) -> None:
    buffer = ReplayBuffer(n)
    buffer.add([make_episode(length, step) for step in range(n)], n)
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        start = time.perf_counter()
        write_state(folder, buffer.state_dict())
        saved = time.perf_counter()
        loaded = load_buffer(folder)
        end = time.perf_counter()
        size = sum(file.stat().st_size for file in folder.iterdir())
    one, two = buffer.sample(BATCH, n), loaded.sample(BATCH, n)
    equal = np.array_equal(one.ids, two.ids) and all(
        np.array_equal(getattr(a, name), getattr(b, name))
        for a, b in zip(one.episodes, two.episodes) for name in ("tokens", "behavior_logprobs", "advantages")
    )  # fmt: skip
    print(f"\n{n:,} episodes of {length} tokens: saved in {saved - start:.1f} s, loaded in {end - saved:.1f} s, "
          f"{size / 1e6:.0f} MB, no pickle, next draw {'equal' if equal else 'DIFFERENT'}.")  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="*", default=[1_000, 10_000, 100_000, 1_000_000])
    parser.add_argument("--rounds", type=int, default=200)
    arguments = parser.parse_args()
    versions = {}
    for name in ("numpy", "cpprb", "tianshou", "torchrl"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "absent"
    versions["Python"] = platform.python_version()
    print("## Replay buffer\n\nMedian microseconds of CPU time a batch of 128. " + ", ".join(map(" ".join, versions.items())) + ".")
    for size in arguments.sizes:
        report_speed(size, arguments.rounds)
    report_memory()
    report_saving(50_000, 500)
