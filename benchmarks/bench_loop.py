"""The whole loop against TRL's GRPOTrainer, and what the loop's own parts cost. Prints Markdown.

    python3 -m venv .venv-trl && .venv-trl/bin/pip install -r requirements-bench-trl.txt
    OMP_NUM_THREADS=1 .venv-trl/bin/python benchmarks/bench_loop.py             # all of it: half an hour on one core
    OMP_NUM_THREADS=1 .venv-trl/bin/python benchmarks/bench_loop.py trl --cases tiny_turns
    python benchmarks/bench_loop.py turns profile padding                           # these need no TRL

trl      An iteration (sample, score, one optimiser step, log) of the same model on the same prompts with the same group
         size, turns, tokens a turn, rows in a forward pass, learning rate and threads. A process a side and round; the
         sides take turns. Rewards are random, so that no group is without signal: FreshReplay would skip those. TRL
         plays several turns by its `environment_factory`, which calls model.generate() on the whole conversation each
         turn. Gradient checkpointing, TRL's default, is off on both sides without --gradient-checkpointing.
turns    Sampling of ten turns: HFEngine, which keeps keys and values, against generate() on the whole conversation.
profile  Where the time of `train.py`'s iterations goes, on SmolLM2.
padding  Positions that an update computes for its tokens, on FrozenLake episodes.
"""
import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from transformers import LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parent.parent))
import models  # noqa: E402
from engines.hf import HFEngine  # noqa: E402
from envs import FrozenLake  # noqa: E402
from judge import add_advantages  # noqa: E402
from models import load_policy, micro_batches, tree_of  # noqa: E402
from policies.chat import Chat  # noqa: E402
from policies.smollm2 import smollm2_folder  # noqa: E402
from policies.tiny import demonstrations, tiny_config, tiny_tokenizer  # noqa: E402
from rollout import collect  # noqa: E402
from runtime import setup  # noqa: E402
from runtime.log import RunLog  # noqa: E402
from settings import Args, parse_args  # noqa: E402
from train import main as train  # noqa: E402
from update import make_learner, update  # noqa: E402

CACHE = Path("~/.cache/freshreplay")
LEARNING_RATE = 1e-5
SECTIONS = ("trl", "turns", "profile", "padding")

# ------------------------------------------------------------------------------- tasks of equal length on both sides


class Walk(FrozenLake):
    """FrozenLake for the tiny policy, which goes on at holes and goal until its turns are over. Rewards are random."""

    def __init__(self, turns: int):
        super().__init__(prompt="tiny")
        self.turns = turns

    def reset(self, problem_id, seed):
        self.turn, self.rewards = 0, np.random.default_rng(seed)
        return super().reset(problem_id, seed)

    def step(self, answer):
        self.turn += 1
        return super().step(answer)[0], self.rewards.random(), self.turn == self.turns, True


class Sums:
    """Additions that are never right, in words a small chat model knows. Rewards are random."""

    name, stop, slow, success, info = "sums", (), False, False, {}

    def __init__(self, turns: int):
        self.turns = turns

    def problems(self, split, count):
        return list(range(count))

    def reset(self, problem_id, seed):
        self.turn, self.rewards = 0, np.random.default_rng(seed)
        return f"What is {problem_id * 7919 % 900 + 100} + {problem_id * 6101 % 900 + 100}?"

    def step(self, answer):
        self.turn += 1
        return "That is not right. Try again.", self.rewards.random(), self.turn == self.turns, True

    def render(self):
        return ""


@dataclass
class Case:
    words: str
    smollm2: bool
    problems: int
    group_size: int
    turns: int
    turn_tokens: int  # no turn ends earlier
    rows: int  # of one forward and backward pass

    def load(self):
        """(model, tokenizer); the tiny one has random weights, since every length is forced."""
        if self.smollm2:
            return load_policy(smollm2_folder(CACHE))
        torch.manual_seed(0)
        tokenizer = tiny_tokenizer()
        return LlamaForCausalLM(tiny_config(tokenizer)).eval(), tokenizer

    def make_env(self):
        return Sums(self.turns) if self.smollm2 else Walk(self.turns)


CASES = {"tiny_turns": Case("tiny, 10 turns of 4", False, 8, 8, 10, 4, 16),
         "tiny_single": Case("tiny, 1 turn of 64", False, 8, 8, 1, 64, 16),
         "smollm2_turns": Case("SmolLM2, 3 turns of 16", True, 2, 4, 3, 16, 4),
         "smollm2_single": Case("SmolLM2, 1 turn of 32", True, 2, 4, 1, 32, 4)}


# ---------------------------------------------------------------------------------------------- the loop against TRL


def freshreplay_side(case: Case, iterations: int, checkpointing: bool) -> tuple[list, list]:
    """(wall, CPU) seconds and sampled tokens of each iteration."""
    policy, tokenizer = case.load()
    chat, problems = Chat(tokenizer), case.make_env().problems("train", case.problems * iterations)
    longest = len(chat.start(case.make_env().reset(problems[0], 0))) + case.turns * (case.turn_tokens + 64)
    args = Args(replay="none", replay_updates=0, lr=LEARNING_RATE, lr_schedule="constant", warmup_steps=0,
                      max_turns=case.turns, max_new_tokens=case.turn_tokens, micro_batch_tokens=case.rows * longest,
                      group_size=case.group_size, problems_per_iteration=case.problems,
                      gradient_checkpointing=checkpointing)
    learner = make_learner(args, policy)
    engine = HFEngine(learner.policy, [], tokenizer.pad_token_id)
    seconds, tokens = [], []
    with tempfile.TemporaryFile("w") as log:
        for iteration in range(iterations):
            started = time.perf_counter(), time.process_time()
            asked = np.repeat(problems[iteration * case.problems:(iteration + 1) * case.problems], case.group_size)
            groups = np.arange(case.problems).repeat(case.group_size)
            episodes, transcripts = collect(
                engine, chat, case.make_env, asked, groups, np.arange(len(asked)) + 1000 * iteration,
                max_turns=case.turns, max_new_tokens=case.turn_tokens, temperature=1.0, format_penalty=0.0,
                policy_step=iteration, iteration=iteration, context_length=policy.config.max_position_embeddings)
            engine.release()
            add_advantages(learner, episodes)
            metrics = update(learner, episodes)
            engine.sync()
            numbers = {key: value for key, value in metrics.items() if not isinstance(value, list)}
            json.dump([numbers, transcripts[:4]], log)
            seconds.append((time.perf_counter() - started[0], time.process_time() - started[1]))
            tokens.append(sum(int(episode.action_mask.sum()) for episode in episodes))
            assert metrics["tokens_trained"] == tokens[-1] and metrics["steps"] == 1, metrics
    return seconds, tokens


def played_by_trl(case: Case):
    """The case's task as TRL wants one: `reset` writes the prompt, the one tool takes the answer."""
    class Environment:
        def reset(self, problem_id: int, **_):
            self._env, self._score = case.make_env(), 0.0
            return self._env.reset(problem_id, int(np.random.default_rng().integers(2**31)))

        def play(self, answer: str) -> str:
            """Play the answer.

            Args:
                answer: What the model wrote.
            """
            message, score, _, _ = self._env.step(answer)
            self._score += score
            return message

        def get_reward(self):
            return self._score + self._env.rewards.random()  # the last answer is not played: TRL stops before it
    return Environment


def let_trl_play(tokenizer):
    """Every answer is a call of the one tool, and the tool's words are the next user message, as in FreshReplay."""
    tokenizer.chat_template = (
        "{% set seen = namespace(messages=[]) %}{% for message in messages %}"
        "{% set role = 'user' if message.role == 'tool' else message.role %}"
        "{% set content = message.content ~ (message.tool_calls or '') %}"
        "{% set seen.messages = seen.messages + [{'role': role, 'content': content}] %}"
        "{% endfor %}{% set messages = seen.messages %}") + tokenizer.chat_template
    tokenizer.response_template = {"unused": True}  # or TRL would not call parse_response

    def parse_response(ids, **_):
        text = tokenizer.decode(ids, skip_special_tokens=True)
        call = {"type": "function", "function": {"name": "play", "arguments": {"answer": text}}}
        return {"role": "assistant", "content": text, "tool_calls": [call]}
    tokenizer.parse_response = parse_response


def trl_side(case: Case, iterations: int, checkpointing: bool) -> tuple[list, list]:
    """(wall, CPU) seconds and sampled tokens of each iteration."""
    import datasets
    import transformers
    from trl import GRPOConfig, GRPOTrainer
    model, tokenizer = case.load()
    problems = case.make_env().problems("train", case.problems * iterations)
    stamps = []

    class Stamps(transformers.TrainerCallback):
        def on_step_begin(self, *_, **__):
            stamps.append((time.perf_counter(), time.process_time()))

    several, rows = case.turns > 1, case.problems * case.group_size
    rewards, first = np.random.default_rng(0), [case.make_env().reset(problem, 0) for problem in problems]
    data = datasets.Dataset.from_dict({"problem_id": problems, "prompt": [
        [{"role": "user", "content": "" if several else text}] for text in first]})
    how = {"reward_funcs": lambda completions, **_: rewards.random(len(completions)).tolist()}
    if several:
        how = {"environment_factory": played_by_trl(case)}
        let_trl_play(tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder, use_cpu=True, bf16=False, gradient_checkpointing=checkpointing, max_steps=iterations,
            per_device_train_batch_size=case.rows, gradient_accumulation_steps=rows // case.rows,
            num_generations=case.group_size, max_completion_length=case.turns * (case.turn_tokens + 64),
            max_tool_calling_iterations=case.turns - 1, temperature=1.0, beta=0.0, loss_type="grpo",
            generation_kwargs={"max_new_tokens": case.turn_tokens, "min_new_tokens": case.turn_tokens},
            learning_rate=LEARNING_RATE, lr_scheduler_type="constant", adam_beta2=0.95, weight_decay=0.0,
            max_grad_norm=1.0, logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True,
            shuffle_dataset=False, dataloader_pin_memory=False)
        trainer = GRPOTrainer(model, args=config, train_dataset=data, processing_class=tokenizer, callbacks=[Stamps()],
                              **how)
        trainer.train()
        stamps.append((time.perf_counter(), time.process_time()))
    logs = [line for line in trainer.state.log_history if "completions/mean_length" in line]
    if several:
        assert all(line["tools/call_frequency"] == case.turns - 1 for line in logs), logs[-1]
    return np.diff(stamps, axis=0).tolist(), [line["completions/mean_length"] * rows for line in logs]


def one_side(side: str, case: Case, iterations: int, checkpointing: bool) -> dict:
    seconds, tokens = (freshreplay_side if side == "freshreplay" else trl_side)(case, iterations, checkpointing)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    assert len(seconds) == len(tokens) == iterations
    return {"seconds": seconds, "tokens": tokens, "peak_mb": peak}


def against_trl(names, rounds: int, iterations: int, warmup: int, checkpointing: bool):
    recompute = ", gradient checkpointing" * checkpointing
    print(f"TRL {version('trl')}, transformers {version('transformers')}, torch {torch.__version__}, float32, "
          f"{torch.get_num_threads()} thread(s){recompute}. Medians of {rounds * iterations} iterations a side, from {rounds} "
          f"processes that take turns, each after {warmup} to warm up. CPU seconds, since others use the machine. "
          "Tokens: those that the policy sampled. Peak: resident memory of the larger process.\n")
    print("| case | side | CPU s an iteration | tokens | CPU ms a token | ratio | wall ratio | peak MB | ratio |\n"
          "|---|---|---|---|---|---|---|---|---|", flush=True)
    for name in names:
        runs = {"freshreplay": [], "trl": []}
        for _ in range(rounds):
            for side in runs:
                flags = ["--side", side, "--cases", name, "--iterations", str(warmup + iterations)]
                flags += ["--gradient-checkpointing"] * checkpointing
                done = subprocess.run([sys.executable, __file__, *flags], capture_output=True, text=True)
                if done.returncode:
                    sys.exit(done.stderr)
                runs[side].append(json.loads(done.stdout.splitlines()[-1]))
        found = {}
        for side in runs:
            wall_N, cpu_N = np.concatenate([run["seconds"][warmup:] for run in runs[side]]).T
            tokens_N = np.concatenate([run["tokens"][warmup:] for run in runs[side]])
            found[side] = [np.median(cpu_N), np.median(tokens_N), 1000 * np.median(cpu_N / tokens_N),
                           1000 * np.median(wall_N / tokens_N), max(run["peak_mb"] for run in runs[side])]
        for side, (cpu, tokens, cpu_token, wall_token, peak) in found.items():
            ours = side == "freshreplay"
            ratios = [f"{mine / theirs:.2f}" if ours else "" for mine, theirs in zip(found[side], found["trl"])]
            names_of_row = f"{CASES[name].words} | FreshReplay" if ours else " | TRL"
            print(f"| {names_of_row} | {cpu:.2f} | {tokens:.0f} | {cpu_token:.2f} | {ratios[2]} | {ratios[3]} | "
                  f"{peak:.0f} | {ratios[4]} |", flush=True)


# ------------------------------------------------------------------------------------------- sampling of many turns


@torch.inference_mode()
def sample_turns(engine, model, lengths, turns: int, turn_tokens: int, message_tokens: int) -> float:
    """CPU seconds to sample all turns, each followed by a message of random tokens. `engine` None: by generate()."""
    rng, ids = np.random.default_rng(0), list(range(len(lengths)))
    vocabulary, pad_id = model.config.vocab_size, model.config.pad_token_id
    sequences = [rng.integers(20, vocabulary, length).tolist() for length in lengths]
    started = time.process_time()
    for _ in range(turns):
        if engine is not None:
            new = [completion.tokens for completion in
                   engine.generate([list(sequence) for sequence in sequences], ids, ids, turn_tokens, 1.0)]
        else:
            width = max(map(len, sequences))
            tokens_BT = torch.tensor([[pad_id] * (width - len(row)) + row for row in sequences])
            mask_BT = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in sequences])
            new = model.generate(tokens_BT, attention_mask=mask_BT, do_sample=True, max_new_tokens=turn_tokens,
                                 min_new_tokens=turn_tokens, top_k=0)[:, width:].tolist()
        assert all(len(row) == turn_tokens for row in new)
        messages = rng.integers(20, vocabulary, (len(sequences), message_tokens)).tolist()
        sequences = [row + more + message for row, more, message in zip(sequences, new, messages)]
    return time.process_time() - started


def kept_turns(repeats: int):
    print("\nTen turns; tokens a CPU second, medians of alternating runs.\n")
    print("| policy | conversations | tokens a turn | tokens a message | HFEngine | generate() on all of it | ratio |")
    print("|---|---|---|---|---|---|---|")
    for name, case, conversations, turn_tokens, message_tokens, prompt in (
            ("tiny", CASES["tiny_turns"], 64, 4, 36, 60), ("SmolLM2", CASES["smollm2_turns"], 4, 8, 40, 80)):
        model, _ = case.load()
        model.requires_grad_(False)
        lengths = np.random.default_rng(1).integers(prompt - 5, prompt + 6, conversations)
        seconds = {"engine": [], "generate": []}
        for _ in range(repeats if name == "tiny" else 1):
            for way in seconds:
                engine = HFEngine(model, [], model.config.pad_token_id) if way == "engine" else None
                seconds[way].append(sample_turns(engine, model, lengths, 10, turn_tokens, message_tokens))
        fast, slow = (10 * turn_tokens * conversations / statistics.median(values) for values in seconds.values())
        print(f"| {name} | {conversations} | {turn_tokens} | {message_tokens} | {fast:.0f} | {slow:.0f} | "
              f"{fast / slow:.1f}x |", flush=True)


# ----------------------------------------------------------------------------------------------- where the time goes


class Spent:
    """CPU seconds by name; a name inside another is not counted in the outer one."""

    def __init__(self):
        self.seconds, self.open = defaultdict(float), []

    def start(self, name):
        self.open.append([name, time.process_time(), 0.0])

    def stop(self):
        name, started, inside = self.open.pop()
        seconds = time.process_time() - started
        self.seconds[name] += seconds - inside
        if self.open:
            self.open[-1][2] += seconds

    def around(self, owner, attribute, name):
        """Replaces owner.attribute by itself with the clock on."""
        function = getattr(owner, attribute)

        def timed(*arguments, **options):
            self.start(name)
            try:
                return function(*arguments, **options)
            finally:
                self.stop()
        setattr(owner, attribute, timed)


def profile(iterations: int):
    """Runs train.py's own loop on SmolLM2: 8 episodes of 3 turns and 16 tokens a turn, a fresh and a replay update."""
    spent, ends, logged = Spent(), [], RunLog.iteration

    def load(*arguments):
        policy, tokenizer = load_policy(*arguments)
        for module in (policy.model, policy.lm_head):
            module.register_forward_pre_hook(
                lambda *_: spent.start(f"forward, {'sampling' if torch.is_inference_mode_enabled() else 'training'}"))
            module.register_forward_hook(lambda *_: spent.stop())
        return policy, tokenizer

    def log(*arguments):
        spent.start("JSON and logging")
        logged(*arguments)
        spent.stop()
        ends.append((time.process_time(), dict(spent.seconds)))

    spent.around(HFEngine, "draw", "drawing tokens, their log-probs")
    spent.around(models, "token_logprobs_from_hidden", "forward, training")  # the head and the log-softmax
    spent.around(torch.Tensor, "backward", "backward")
    spent.around(torch.optim.AdamW, "step", "optimiser")
    spent.around(Accelerator, "clip_grad_norm_", "optimiser")
    spent.around(RunLog, "append", "JSON and logging")
    setup.load_policy, RunLog.iteration = load, log
    with tempfile.TemporaryDirectory() as runs:
        # one iteration more before, to warm up, and one after, which evaluates and saves
        flags = {"runs-dir": runs, "name": "profile", "model": "smollm2", "iterations": iterations + 2, "eval-every": 0,
                 "problems-per-iteration": 2, "group-size": 4, "max-turns": 3, "max-new-tokens": 16,
                 "replay-updates": 1, "replay-batch-size": 8, "lr": 1e-5, "eval-problems": 2, "train-problems": 64,
                 "checkpoint-every": 0, "wandb": "off"}
        train(parse_args(["--env", f"{__file__}:Sums", "--env-options", "turns", "3"] +
                         [str(word) for name, value in flags.items() for word in (f"--{name}", value)]))
    (started, before), (ended, after) = ends[0], ends[iterations]
    total = ended - started
    parts = {name: after[name] - before.get(name, 0) for name in after}
    parts["environments, padding, replay buffer, Python"] = total - sum(parts.values())
    print(f"\ntrain.py on SmolLM2: {iterations} iterations of 8 episodes, 3 turns, up to 16 tokens a turn, one "
          f"fresh and one replay update; {total / iterations:.1f} CPU seconds an iteration.\n")
    print("| part | share |\n|---|---|")
    for name, seconds in sorted(parts.items(), key=lambda part: -part[1]):
        print(f"| {name} | {seconds / total:.1%} |")
    model = sum(seconds for name, seconds in parts.items() if name.startswith(("forward", "backward")))
    print(f"\nOutside the model's forward and backward passes: {1 - model / total:.1%}; without the optimiser: "
          f"{1 - (model + parts['optimiser']) / total:.1%}.")


# ------------------------------------------------------------------------------------------------------------ padding


def padding():
    """What an update computes for 100 of its tokens, on scripted FrozenLake episodes of the main job's skill."""
    env = FrozenLake(prompt="tiny")
    problems = np.repeat(env.problems("train", 128), 8)
    rows, _ = demonstrations(env, Chat(tiny_tokenizer()), problems, skill=0.6, max_turns=10, seed=0)
    prompts = [tuple(row["tokens"][:row["mask"].index(True)]) for row in rows]
    lengths = [len(row["tokens"]) for row in rows]
    print("\nPositions computed for 100 tokens in an update of 64 FrozenLake episodes, 8 of each problem, mean of 16 updates; "
          f"episodes of {min(lengths)} to {max(lengths)} tokens, mean {np.mean(lengths):.0f}. Read once: what rows begin with "
          "alike, with padding in attention only. Row by row: as with images, padded least. The peers: rows in the order of "
          "arrival, cut by the same budget; and all rows as long as the longest.\n")
    print("| tokens of a micro-batch | read once | in attention | micro-batches | row by row | order of arrival | "
          "as long as the longest |\n|---|---|---|---|---|---|---|")
    for budget in (2048, 4096, 8192):
        found, count = defaultdict(list), []
        for first in range(0, 1024, 64):
            batch = lengths[first:first + 64]
            fit = budget // max(batch)
            trees = micro_batches(batch, budget, prompts=prompts[first:first + 64])
            ways = {"attention": trees, "row by row": micro_batches(batch, budget),
                    "arrival": [range(start, min(64, start + fit)) for start in range(0, 64, fit)], "longest": [range(64)]}
            positions = {"once": sum(len(tree_of([rows[first + row]["tokens"] for row in micro])[1]) for micro in trees)}
            for way, micros in ways.items():
                positions[way] = sum(len(micro) * max(batch[row] for row in micro) for micro in micros)
            for way, computed in positions.items():
                found[way].append(100 * computed / sum(batch))
            count.append(len(trees))
        means = {way: f"{np.mean(values):.0f}" for way, values in found.items()}
        print(f"| {budget} | {means['once']} | {means['attention']} | {np.mean(count):.1f} | {means['row by row']} | "
              f"{means['arrival']} | {means['longest']} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", help=f"some of {', '.join(SECTIONS)}; without any, all")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--rounds", type=int, default=2, help="processes a side")
    parser.add_argument("--iterations", type=int, default=3, help="measured iterations a process")
    parser.add_argument("--warmup", type=int, default=1, help="iterations before them")
    parser.add_argument("--gradient-checkpointing", action="store_true", help="on both sides of trl")
    parser.add_argument("--side", choices=("freshreplay", "trl"), help="run one side here and print JSON")
    args = parser.parse_args()
    unknown = set(args.sections) - set(SECTIONS)
    if unknown:
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    sections = args.sections or SECTIONS
    if args.side:
        print(json.dumps(one_side(args.side, CASES[args.cases[0]], args.iterations, args.gradient_checkpointing)))
        sys.exit()
    if "trl" in sections:
        against_trl(args.cases, args.rounds, args.iterations, args.warmup, args.gradient_checkpointing)
    if "turns" in sections:
        kept_turns(args.rounds + 1)
    if "profile" in sections:
        profile(args.iterations)
    if "padding" in sections:
        padding()
