"""Random settings, hostile text, extreme numbers. Each property has a quick profile, and a wide one under `slow`."""
import json
import math
import random
import re
import shutil
import time
import tracemalloc
import types
from dataclasses import fields
from typing import Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from test_buffer import check_valid
from test_chat import CHATML, chat_of
from test_field_bugs import PLAY, Scripted, Talk, episode, nano  # noqa: F401  (nano is a fixture)

from buffer import PRIORITIES, ReplayBuffer
from envs import make_env_factory
from episode import episode_record
from look.viewer import page, page_data
from losses import (ADVANTAGES, AGGREGATIONS, ALGORITHMS, CORRECTIONS, KLS, LOSSES, RATIO_CORRECTIONS, compute_advantages, kl,
                    policy_loss)
from rollout import collect
from runtime import watch
from runtime.files import finite_or_none
from runtime.metrics import by_age, diagnostics
from runtime.options import OPTIONS, RELEASED, complete
from settings import Args, checked, parse_args
from tasks import maths, search_qa
from tasks.answers import parse_answer
from train import main


def fuzz(quick: int, wide: int, phases=(Phase.generate, Phase.shrink), **inputs):
    """Makes of `check(random inputs)` two tests: `quick` examples, the same ones each time, and `wide` random ones."""
    def both(check):
        loud = dict(deadline=None, suppress_health_check=list(HealthCheck), database=None, phases=phases)
        return (settings(max_examples=quick, derandomize=True, **loud)(given(**inputs)(check)),
                pytest.mark.slow(settings(max_examples=wide, **loud)(given(**inputs)(check))))
    return both


# ------------------------------------------------------------------------------------------------- settings of a run

TASK = '''
import random


class Task:
    name, stop, slow = "task", (), False

    def __init__(self, *, prompt: str = "full"):
        self.success, self.info = False, {}

    def problems(self, split, count):
        if count > 8:
            raise ValueError("eight problems")
        return list(range(count)) if split == "train" else list(range(100, 100 + count))

    def reset(self, problem_id, seed):
        self.random, self.success = random.Random(seed), False
        return "Walk from P to G " * (1 + problem_id % 3)

    def step(self, answer):
        if self.random.random() < 0.02:
            raise RuntimeError("broken")
        score = self.random.choice([0.0, 0.0, 0.5, 1.0])
        self.success = score == 1
        return "No", score, self.random.random() < 0.4, self.random.random() < 0.8

    def render(self):
        return ""
'''
VALUES = {  # options stand behind the name of their flag
    "algo": list(ALGORITHMS), "advantage": list(ADVANTAGES), "loss": list(LOSSES),
    **{f"loss_options.{name}": values for name, values in {
        "aggregation": list(AGGREGATIONS), "correction": list(CORRECTIONS), "kl_kind": list(KLS), "replay_kl_kind": list(KLS),
        "eps_low": [0.1, 0.9], "eps_high": [0.3, 4.0], "dual_clip": [2.0], "kl_in": ["reward", "loss"], "advantage_clip": [0.2],
        "overlong": ["train", "mask"], "gamma": [0, 0.9, 1], "lam": [0, 0.9, 1], "value_clip": [0.1, None]}.items()},
    "kl_coef": [0.0, 0.1], "entropy_coef": [0.0, 0.01], "replay_advantage": ["stored", "vtrace"], "fresh_update": [True, False], "fresh_epochs": [1, 2],
    "minibatches": [1, 2],
    "lr": [1e-6, 0.1], "lr_schedule": ["constant", "linear", "cosine"], "warmup_steps": [0, 5],
    "micro_batch_tokens": [1, 16, 4096], "lora_rank": [0, 2],
    "replay": ["none", "uniform", "per", "fresh", "newest", "never_used_first", "positive_bias"], "replay_updates": [0, 1, 3], "replay_batch_size": [1, 4],
    "released": [name for name in RELEASED], "age_law": ["exponential"], "capacity": [2, 5, 16],
    "tau": [0.01, 30, "inf", "auto"], "alpha": [0, 0.6, 3], "priority": list(PRIORITIES),
    **{f"replay_options.{name}": values for name, values in {
        "beta": [0, 0.4, 1], "beta_end": [0, 1], "eps": [0, 0.01],
        "eviction": ["fifo", "lowest_priority"], "unit": ["episode", "group"], "draw": ["systematic", "stratified", "iid"],
        "max_age": [0, 1, 9], "positive_fraction": [0, 0.5, 1], "positive_advantage_only": [True], "fresh_fraction": [0, 0.5, 1],
        "probe_episodes": [2, 8], "min_size": [0, 3], "store_without_signal": [True, False]}.items()},
    "insert_priority": ["base", "max"], "problem_sampler": ["uniform", "heap", "proportional", "band", "dots"],
    **{f"problem_options.{name}": values for name, values in {
        "priority": ["variance", "mixed_group"], "estimate": ["beta", "raw"], "decay": [0, 0.7, 1], "floor_slots": [1, 2],
        "pool_after": [1, 2], "retest_every": [1, 5], "retest_slots": [0, 2], "band_low": [0, 0.4], "band_high": [0.6, 1]}.items()},
    "group_size": [1, 2, 3],
    "problems_per_iteration": [1, 2, 3], "temperature": [0.3, 1, 2], "max_turns": [1, 2, 3], "max_new_tokens": [1, 3],
    "format_penalty": [0, 0.15], "eval_temperature": [0, 1], "eval_every": [0, 1], "engine_options.parallel": [1, 3],
    "critic_lr": [1e-3], "context_length": [24, 60],
    "max_grad_norm": [0.1, "inf"], "train_problems": [3, 8], "seed": [0, 3], "checkpoint_every": [0, 1], "transcripts": [0, 2]}
SETTINGS = st.fixed_dictionaries({}, optional={name: st.sampled_from(values) for name, values in VALUES.items()})


def spelled(options: dict) -> list[str]:
    words = []
    for name, value in options.items():
        flag, _, option = name.partition(".")
        words += [f"--{flag.replace('_', '-')}", *[option] * bool(option), str(value)]
    return words


def names_one(message: str, names) -> bool:
    text = re.sub(r"[\W_]+", "", message)  # messages in a box are wrapped anywhere
    return any(name.rpartition(".")[2].replace("_", "") in text for name in names)


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("task")
    (folder / "task.py").write_text(TASK)
    return folder


@fuzz(quick=10, wide=80, phases=[Phase.generate], options=SETTINGS)  # runs are too slow to shrink
def runs_or_is_refused(nano, task, capsys, options):  # noqa: F811
    fixed = ["--model", str(nano), "--env", f"{task / 'task.py'}:Task", "--wandb", "off", "--quiet", "True", "--name", "run",
             "--runs-dir", str(task), "--iterations", "2", "--eval-problems", "4"]
    small = {"problems_per_iteration": 2, "group_size": 2, "replay_batch_size": 2, "max_new_tokens": 2, "max_turns": 2,
             "capacity": 8, "train_problems": 8} | options
    shutil.rmtree(task / "run", ignore_errors=True)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(watch, "ENV_ERRORS", 1.0)  # the task breaks now and then
            summary = main(parse_args([*fixed, *spelled(small)]))
    except SystemExit as stop:
        message = capsys.readouterr().err
        assert stop.code == 2 and names_one(message, small), (options, message)
        return
    lines = [json.loads(line) for line in (task / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == [1, 2] and summary["iterations"] == 2
    assert lines[-1]["fresh/nonfinite"] in (0, None) and lines[-1]["replay/nonfinite"] in (0, None)
    episodes = task / "run" / "episodes.jsonl"
    for line in episodes.read_text().splitlines() if episodes.exists() else []:  # with --transcripts 0 there is none
        record = json.loads(line)
        assert "event" in record or len(record["pieces"]) == len(record["action_mask"]) == len(record["advantages"])


test_a_random_setting_runs_or_is_refused_by_name, test_random_settings_widely = runs_or_is_refused


def wrong_values(kind):
    """Values that a field of this type must refuse."""
    if get_origin(kind) in (Union, types.UnionType):
        parts = [part for part in get_args(kind) if part is not type(None)]
        return [value for value in wrong_values(parts[0]) if len(parts) == 1 or value != "auto"]
    if get_origin(kind) is Literal:
        return ["zzz", "0.5", str(get_args(kind)[0]) + "x"]
    return {int: ["x", "1.5", "nan", ""], float: ["x", "nan", "1,5"], bool: ["maybe", "2"]}.get(kind, [])


WRONG = [(field.name, value) for field in fields(Args) for value in wrong_values(get_type_hints(Args)[field.name])]


@fuzz(quick=25, wide=150, wrong=st.sampled_from(WRONG))
def a_wrong_value_is_refused(capsys, wrong):
    name, value = wrong
    with pytest.raises(SystemExit) as stop:
        parse_args([f"--{name.replace('_', '-')}", value])
    printed = capsys.readouterr()
    assert stop.value.code == 2 and names_one(printed.err + printed.out, [name]), (name, value, printed)


test_a_wrong_value_is_refused_with_its_key, test_wrong_values_widely = a_wrong_value_is_refused


@pytest.mark.parametrize("flag", OPTIONS)
def test_a_wrong_value_of_an_option_is_refused_with_both_names(capsys, flag):
    wrong = {int: ["x", "1.5", "nan"], float: ["x", "nan", "1,5", "inf"], bool: ["maybe", "2"], str: []}
    for name, option in OPTIONS[flag].items():
        for value in wrong.get(option.kind, ["zzz"]) if isinstance(option.kind, type) else ["zzz", option.kind[0] + "x"]:
            with pytest.raises(SystemExit) as stop:
                complete(flag, {name: value}, OPTIONS[flag])
            message = capsys.readouterr().err
            assert stop.value.code == 2 and f"--{flag.replace('_', '-')} {name} {value} must be" in message
        assert complete(flag, {name: str(option.default)}, OPTIONS[flag])[name] == option.default


def test_no_number_may_be_nan(capsys):
    for name in [field.name for field in fields(Args) if float in (get_type_hints(Args)[field.name],
                                                                  *get_args(get_type_hints(Args)[field.name]))]:
        args = Args(name="x")
        setattr(args, name, math.nan)
        with pytest.raises(SystemExit):
            checked(args, {name}, set(), None)
        assert names_one(capsys.readouterr().err, [name]), name


# ------------------------------------------------------------------------------------------------------ hostile text

FRAGMENTS = ["\\boxed{", "\\fbox {", "\\boxed ", "{", "}", "<answer>", "</answer>", "<ANSWER>", "<think>", "</think>", "<search>",
             "</search>", "<information>", "\\frac{", "\\dfrac12", "^{", "\\left(", "\\text{", "\\sqrt[", "1", "9" * 50, "1,234",
             "1/0", "0.", "-", "+", "=", "x=", "$", "\\", "%", " ", "\n", "\0", "\u2028", "\u202e", "\ufffd", "٣", "①", "é",
             "\U0001f600", "Left", "<|im_end|>", "<|end|>", "{{x}}", "{% for %}", "%s", "\x1b[2J", "nan", "inf", "1e999",
             "__import__('os')", "a" * 200]
TEXT = st.one_of(st.lists(st.sampled_from(FRAGMENTS), max_size=40).map("".join), st.text(max_size=200))
PARSERS = {
    "one word": lambda text: parse_answer(text, ["Left", "Right"]), "boxes": maths.boxed, "tags": maths.tagged,
    "final answer": maths.final_answer, "value": maths.value, "one thing": lambda text: maths.states_one_thing("7", text),
    "gold": maths.gold_of, "worked gold": lambda text: maths.gold_of(text, worked=True), "calls": maths.calls_something,
    "search turn": search_qa.parse_turn, "normalised": search_qa.normalize, "neutral": search_qa.neutral,
    "holds": lambda text: search_qa.holds_answer(text, ("Paris", text)), "f1": lambda text: search_qa.f1_score(text, "Paris"),
    "passage": search_qa.split_contents}


@fuzz(quick=80, wide=1500, text=TEXT)
def parsers_survive(text):
    found = {name: parse(text) for name, parse in PARSERS.items()}
    assert found["one word"] in (None, 0, 1)
    assert found["final answer"] is None or found["final answer"] in text
    assert all(box in text for box in found["boxes"]) and all(tag in text for tag in found["tags"])
    assert found["search turn"][0] in ("search", "answer", "thought", "invalid") and 0 <= found["f1"] <= 1
    assert not set(found["neutral"]) & set("<>") and "\n" not in found["neutral"]


test_parsers_survive_any_text, test_parsers_widely = parsers_survive


@pytest.mark.parametrize("name", PARSERS)
def test_parsers_take_time_and_memory_in_proportion_to_the_text(name):
    """Of 100,000 characters of each fragment."""
    for fragment in FRAGMENTS:
        text = fragment * (100_000 // len(fragment))
        tracemalloc.start()
        started = time.process_time()
        PARSERS[name](text)
        seconds, peak = time.process_time() - started, tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert seconds < 3 and peak < 100e6, (fragment, seconds, peak)


@fuzz(quick=15, wide=300, text=TEXT, kind=st.sampled_from(["frozenlake", "cliffwalking", "sokoban", "arithmetic"]))
def tasks_survive(text, kind):
    env = make_env_factory(kind, {})()
    env.reset(env.problems("train", 1)[0], 3)
    for answer in (text, f"<answer>{text}</answer>", text * 50):
        message, score, done, valid = env.step(answer)
        assert isinstance(message, str) and math.isfinite(score) and valid in (True, False)
        assert isinstance(env.render(), str)
        if done:
            env.reset(env.problems("train", 1)[0], 3)


test_tasks_survive_any_answer, test_tasks_widely = tasks_survive


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(answer=TEXT.map(lambda text: text[:300]))
def test_checking_any_answer_ends_in_time(answer):
    started = time.process_time()
    assert maths.is_right("\\frac{\\sqrt{3}}{2}", answer) in (True, False, None)
    assert time.process_time() - started < 5  # of this process; the checker has a limit of its own


@fuzz(quick=15, wide=200, data=st.data())
def any_tokens_make_a_sound_record(tmp_path_factory, data):
    """What the policy samples may be any tokens, special ones of the chat template included."""
    chat = chat_of(CHATML)
    said = data.draw(st.lists(st.lists(st.integers(0, len(chat.tokenizer) - 1), min_size=1, max_size=9), min_size=3, max_size=3))
    message = data.draw(TEXT)
    engine = Scripted(chat, lambda id, turn: said[turn], end=data.draw(st.booleans()))
    (row,), transcripts = collect(engine, chat, lambda: Talk((0.0, 0.5, 1.0), message), [0], [0], [0],
                                  **PLAY | {"context_length": 10**6})
    if not row.info["env_error"]:
        sampled = [token for turn in said for token in turn + [chat.tokenizer.eos_token_id] * engine.end]
        assert row.tokens[row.action_mask].tolist() == sampled
    starts = chat.tokenizer.convert_tokens_to_ids("<|im_start|>")
    between = row.tokens[~row.action_mask].tolist().count(starts)
    assert between == 1 + 2 * len(row.turn_ends)  # the system's, then the user's and the answer's: a message holds none
    folder = tmp_path_factory.mktemp("run")
    (folder / "episodes.jsonl").write_text(json.dumps(finite_or_none(episode_record(chat, 1, row, transcripts[0]))) + "\n")
    assert len(page_data(folder / "episodes.jsonl", 5)["episodes"]) == 1 and page(page_data(folder / "episodes.jsonl", 5))
    shutil.rmtree(folder)


test_any_sampled_tokens_make_a_sound_record, test_any_tokens_widely = any_tokens_make_a_sound_record


# --------------------------------------------------------------------------------------------------- losses, advantages


def random_rows(seed: int, scale: float):
    """(log-probs with gradient, behaviour, advantages, mask, rewards, groups): extreme values, empty rows."""
    generator = random.Random(seed)
    B, T = generator.randint(1, 5), generator.randint(1, 6)
    torch.manual_seed(seed)
    mask_BT = torch.rand(B, T) < generator.choice([0.2, 0.7, 1.0])
    logprobs_BT, behavior_BT = (-scale * torch.rand(B, T) ** 4 for _ in range(2))
    advantages_BT = torch.randn(B, 1).expand(B, T) * generator.choice([0.0, 1.0, 1e4])
    return logprobs_BT.requires_grad_(), behavior_BT, advantages_BT, mask_BT, torch.rand(B), torch.randint(0, 2, (B,))


@fuzz(quick=150, wide=1500, seed=st.integers(0, 10**6), scale=st.sampled_from([0.1, 5.0, 100.0, 1e4]),
      kind=st.sampled_from(list(LOSSES)), aggregation=st.sampled_from(list(AGGREGATIONS)),
      correction=st.sampled_from([None, *CORRECTIONS]))
def losses_are_finite(seed, scale, kind, aggregation, correction):
    if LOSSES[kind].holds_ratio and correction in RATIO_CORRECTIONS:
        correction = None
    logprobs_BT, behavior_BT, advantages_BT, mask_BT, rewards_B, groups_B = random_rows(seed, scale)
    options = {"rewards_B": rewards_B, "group_ids_B": groups_B, "reference_logprobs_BT": behavior_BT - 0.1, "max_length": 8,
               "ages_B": torch.arange(len(rewards_B)), "correction": correction}
    if kind == "decoupled_ppo":
        options["proximal_logprobs_BT"] = behavior_BT - 0.3 * torch.rand_like(behavior_BT)

    def of(order, width, logprobs_BT):
        pad = lambda tensor, value: torch.nn.functional.pad(tensor[order], (0, width), value=value)  # noqa: E731
        given = {name: value[order] if isinstance(value, torch.Tensor) and value.ndim == 1 else
                 pad(value, 7.0) if isinstance(value, torch.Tensor) else value for name, value in options.items()}
        return policy_loss(kind, pad(logprobs_BT, math.nan), pad(behavior_BT, math.nan), pad(advantages_BT, math.nan),
                           pad(mask_BT, False), aggregation=aggregation, **given)
    order = torch.arange(len(rewards_B))
    loss, metrics = of(order, 0, logprobs_BT)
    loss.backward()
    grad_BT = logprobs_BT.grad
    assert math.isfinite(loss.item()) and grad_BT.isfinite().all() and not grad_BT[~mask_BT].any()
    assert all(math.isfinite(value) for value in metrics.values())
    (loss, _), (again, _) = of(order, 0, logprobs_BT.double()), of(order.flip(0), 3, logprobs_BT.double())
    assert again.item() == pytest.approx(loss.item(), rel=1e-6, abs=1e-6)  # other order of rows, padding full of NaN
    numbers = diagnostics(logprobs_BT.detach(), behavior_BT, advantages_BT, mask_BT)
    assert all(value is None or math.isfinite(value) for value in numbers.values())
    for each in KLS:
        values_BT = kl(each, logprobs_BT, behavior_BT, ratio=torch.ones_like(behavior_BT))
        assert values_BT.isfinite().all() and (each in ("k1",) or (values_BT >= -1e-3).all())


test_losses_are_finite_and_see_no_padding, test_losses_widely = losses_are_finite


@fuzz(quick=80, wide=1000, seed=st.integers(0, 10**6), kind=st.sampled_from(list(ADVANTAGES)),
      size=st.sampled_from([0.0, 1e-12, 1.0, 1e8]), lost=st.booleans())
def advantages_are_finite(seed, kind, size, lost):
    _, _, values_BT, mask_BT, rewards_B, groups_B = random_rows(seed, 1.0)
    mask_BT[:, 0] |= ~mask_BT.any(1)  # rewards need a token to stand at
    rewards_B = rewards_B.round(decimals=1) * size
    per_token = ADVANTAGES[kind].per_token
    rewards = torch.zeros(mask_BT.shape)
    last_B = mask_BT.shape[1] - 1 - mask_BT.flip(1).int().argmax(1)
    rewards[torch.arange(len(rewards)), last_B] = rewards_B
    rewards = rewards if per_token else rewards_B.clone()
    if lost:
        rewards[0] = torch.where(mask_BT[0], math.nan, 0.0) if per_token else math.nan
    advantages_BT = compute_advantages(kind, rewards, groups_B, mask_BT, values_BT=values_BT)
    assert advantages_BT.isfinite().all() and not advantages_BT[~mask_BT].any()
    assert not lost or not advantages_BT[0].any()
    if ADVANTAGES[kind].group_mean:
        for group in groups_B.unique():
            members = rewards_B[(groups_B == group) & ~rewards.isnan()]
            if len(members) == 0 or members.max() == members.min():
                assert not advantages_BT[groups_B == group].any()


test_advantages_are_finite_and_groups_of_equals_silent, test_advantages_widely = advantages_are_finite


# -------------------------------------------------------------------------------------------------------------- buffer

BUFFERS = st.fixed_dictionaries({"capacity": st.integers(1, 6)}, optional={name: st.sampled_from(values) for name, values in {
    "sampler": ["prioritized", "uniform", "newest", "never_used_first"], "alpha": [0.0, 0.6, 5.0],
    "tau": [1e-6, 1.0, 500.0, math.inf], "eps": [0.0, 1e-300, 0.01], "beta": [0.0, 1.0],
    "priority": ["advantage", "reward", "group_std", "uniform"], "insert_priority": ["base", "max"],
    "eviction": ["fifo", "lowest_priority"], "unit": ["episode", "group"], "draw": ["systematic", "stratified", "iid"],
    "is_includes_age": [False, True], "max_age": [0, 3], "fresh_fraction": [0.0, 0.4, 1.0], "min_size": [0, 1]}.items()})


@fuzz(quick=60, wide=1000, options=BUFFERS, seed=st.integers(0, 10**6), start=st.sampled_from([0, 10**9, 2**61]))
def a_buffer_that_is_ready_draws(options, seed, start):
    buffer, rng, step = ReplayBuffer(**options), np.random.default_rng(seed), start
    for _ in range(6):
        step += int(rng.choice([0, 1, 40]))
        rows = [episode([1, 0], [0, 1], advantage=float(rng.choice([0.0, 1e-30, 1.0, 1e30])), group=int(rng.integers(3)),
                        rewards=[float(rng.choice([0, 1, 1e20]))]) for _ in range(rng.integers(0, 4))]
        buffer.add(rows, step, birthdays=[step - int(rng.integers(3))] * len(rows))
        check_valid(buffer)
        n = int(rng.integers(1, 6))
        if not buffer.ready(n, step):
            with pytest.raises(ValueError, match="cannot sample"):
                buffer.sample(n, step)
            continue
        assert buffer.refusal(n, step) is None
        held = by_age(buffer, step)
        assert not held["age"] or sum(held["mass"]) == pytest.approx(1.0) or not any(held["priority"])
        sample = buffer.sample(n, step)
        assert len(set(sample.ids.tolist())) <= n and np.isfinite(sample.weights).all() and (sample.weights >= 0).all()
        assert sample.weights.max() == 1.0 and (sample.ages >= 0).all() and (sample.inclusion > 0).all()
        assert json.dumps(finite_or_none(buffer.stats(step)), allow_nan=False)


test_a_buffer_draws_exactly_when_it_says_so, test_buffers_widely = a_buffer_that_is_ready_draws


def test_what_is_held_can_be_told_where_no_priority_is_above_zero():
    buffer = ReplayBuffer(4, eps=0.0, fresh_fraction=1.0)
    buffer.add([episode([1, 0], [0, 1], advantage=0.0)] * 2, step=0)
    sample = buffer.sample(2, 0)  # the newest need no priority
    assert sample.probabilities.tolist() == [0.0, 0.0] and sample.inclusion.tolist() == [1.0, 1.0]
    held = by_age(buffer, 0)
    assert (held["count"], held["mass"], held["priority"]) == ([2], [0.0], [0.0])


@pytest.mark.parametrize("alpha", [0.0, 0.6])
def test_a_batch_of_fresh_and_repeated_entries_needs_some_that_are_not_fresh(alpha):
    buffer = ReplayBuffer(2, alpha=alpha, draw="stratified", fresh_fraction=0.5)
    buffer.add([episode([1, 0], [0, 1])], step=0)
    assert not buffer.ready(2, 0) and "besides 1 fresh" in buffer.refusal(2, 0)
    with pytest.raises(ValueError, match="cannot sample"):
        buffer.sample(2, 0)
    buffer.add([episode([1, 0], [0, 1])], step=0)
    assert not buffer.ready(4, 0) and len(buffer.sample(2, 0).ids) == 2  # two fresh ones of two leave none
