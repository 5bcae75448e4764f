"""Forward-backward of every loss from hidden states: chunked log-probs against plain log_softmax + gather.

    python benchmarks/bench_losses.py                     # (16, 512) tokens, vocabulary 50k: 10 minutes on one core
    python benchmarks/bench_losses.py --rows 2 --kinds ppo_clip

Each kind runs in its own process, chunked first, because a process's peak resident memory only grows: the peak of each
way is read after it and counted from the memory held before it. Seconds are medians of --repeats alternating runs.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import losses  # noqa: E402
import models  # noqa: E402


def chunked(hidden_ND, weight_VD, tokens_N):
    return models.token_logprobs_from_hidden(hidden_ND, weight_VD, tokens_N)[0]


def plain(hidden_ND, weight_VD, tokens_N):
    return torch.log_softmax(hidden_ND @ weight_VD.T, 1).gather(1, tokens_N[:, None]).squeeze(1)


def resident_megabytes():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def peak_megabytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def measure(kind, rows, length, vocabulary, hidden, repeats):
    """{way: [seconds, peak megabytes]} of one kind, in this process."""
    torch.manual_seed(0)
    tokens_N = torch.randint(0, vocabulary, (rows * length,))
    hidden_ND = torch.empty(rows * length, hidden).normal_().requires_grad_()
    weight_VD = torch.empty(vocabulary, hidden).normal_(std=0.05).requires_grad_()
    mask_BT = torch.rand(rows, length) < 0.8
    behavior_BT = torch.where(mask_BT, -10 - torch.rand(rows, length), 0.0)
    advantages_BT = torch.where(mask_BT, torch.randn(rows, length), 0.0)
    options = {"rewards_B": torch.ones(rows), "log_z_B": torch.zeros(rows), "reference_logprobs_BT": behavior_BT}
    if kind == "decoupled_ppo":
        options["proximal_logprobs_BT"] = behavior_BT
    # first use of the matrix and element-wise kernels, outside the measurements
    plain(hidden_ND[:8], weight_VD, tokens_N[:8]).sum().backward()

    seconds, peaks, values = {"chunked": [], "plain": []}, {}, {}
    for repeat in range(repeats):
        for name, logprobs in (("chunked", chunked), ("plain", plain)):
            hidden_ND.grad = weight_VD.grad = None
            held, start = resident_megabytes(), time.perf_counter()
            logprobs_BT = torch.where(mask_BT, logprobs(hidden_ND, weight_VD, tokens_N).view(rows, length), 0.0)
            loss, _ = losses.policy_loss(kind, logprobs_BT, behavior_BT, advantages_BT, mask_BT, **options)
            loss.backward()
            seconds[name].append(time.perf_counter() - start)
            values[name] = loss.item(), weight_VD.grad.norm().item()
            del logprobs_BT, loss
            if repeat == 0:
                peaks[name] = peak_megabytes() - held
    for fast, slow in zip(values["chunked"], values["plain"]):
        assert abs(fast - slow) <= 1e-4 * abs(slow) + 1e-7, f"{kind}: the two ways disagree, {values}"
    return {name: [statistics.median(seconds[name]), peaks[name]] for name in seconds}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=50_000)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--kinds", nargs="+", default=list(losses.LOSSES), choices=list(losses.LOSSES))
    parser.add_argument("--one-process", action="store_true", help="measure the only kind here and print JSON")
    args = parser.parse_args()
    sizes = args.rows, args.length, args.vocabulary, args.hidden, args.repeats
    if args.one_process:
        print(json.dumps(measure(args.kinds[0], *sizes)))
        sys.exit()
    print(
        f"Tokens ({args.rows}, {args.length}), vocabulary {args.vocabulary}, hidden {args.hidden}, float32, "
        f"{torch.get_num_threads()} thread(s), torch {torch.__version__}, median of {args.repeats}.\n"
    )
    print("| loss | chunked s | plain s | time ratio | chunked peak MB | plain peak MB | memory ratio |")
    print("|---|---|---|---|---|---|---|", flush=True)
    ratios = []
    for kind in args.kinds:
        command = [sys.executable, __file__, *sys.argv[1:], "--one-process", "--kinds", kind]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        (fast, small), (slow, large) = json.loads(output).values()
        ratios.append((fast / slow, small / large))
        columns = f"{fast:.2f} | {slow:.2f} | {fast / slow:.2f} | {small:.0f} | {large:.0f} | {small / large:.3f}"
        print(f"| {kind} | {columns} |", flush=True)
    time_ratio, memory_ratio = (max(column) for column in zip(*ratios))
    print(
        f"\nWorst kind: {time_ratio:.2f} of the plain time (at most 1.3 wanted), {memory_ratio:.3f} of its peak memory "
        "(at most 0.5 wanted)."
    )
