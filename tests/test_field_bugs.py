"""What went wrong in published RL post-training code, as tests of this one: each through the path that a run takes, with
the right number. Named after the behaviour."""
import http.server
import json
import math
import os
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import replace
from decimal import Decimal

import numpy as np
import pytest
import torch
from test_chat import CHATML, STRIPS, chat_of
from tokenizers import AddedToken, Tokenizer
from tokenizers import models as tokenizer_models
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import train as train_module
from buffer import ReplayBuffer
from conftest import ROOT
from engines import vllm as vllm_engine
from engines.hf import HFEngine
from envs import make_env_factory
from episode import Episode
from eval import evaluate
from judge import add_advantages
from models import load_policy, token_logprobs
from policies.chat import Chat
from policies.tiny import tiny_config, tiny_tokenizer
from problems import ProblemSampler
from rollout import Completion, collect
from runtime import setup
from runtime.files import write_state
from runtime.memories import load_buffer
from settings import Args, parse_args
from tasks import maths, search_qa
from tasks.maths import Maths
from tasks.search_qa import SearchQA
from train import main
from update import gradients, make_learner, step_inputs, update, value_targets

PLAY = dict(max_turns=3, max_new_tokens=4, temperature=1.0, format_penalty=0.0, policy_step=0, iteration=1, context_length=512)


# ------------------------------------------------------------------------------------------------- what the tests are made of


def bigram(logits_VV, biases_V=None) -> LlamaForCausalLM:
    """A real transformer whose logits after token v are exactly row v: one-hot embeddings, layers that add nothing."""
    logits_VV = torch.as_tensor(logits_VV, dtype=torch.float32)
    V = len(logits_VV)
    width = 8 * math.ceil(V / 8)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=V, hidden_size=width, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, rms_norm_eps=0.0,
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, pad_token_id=None, max_position_embeddings=512))
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(V, width))
        if biases_V is not None:
            model.lm_head = torch.nn.Linear(width, V)
            model.lm_head.bias.copy_(torch.as_tensor(biases_V))
        model.lm_head.weight.zero_()
        model.lm_head.weight[:, :V] = logits_VV.T / math.sqrt(width)  # the norm scales a one-hot state by this root
    return model.eval()


def same_rows(probabilities) -> torch.Tensor:
    return torch.tensor(probabilities).log().expand(len(probabilities), -1)


def episode(tokens, actions, advantage=1.0, logprobs=0.0, rewards=None, turn_ends=None, group=0, **fields) -> Episode:
    mask_T = np.array(actions, bool)
    turn_ends = [len(tokens)] if turn_ends is None else turn_ends
    rewards = [0.0] * len(turn_ends) if rewards is None else rewards
    return Episode(**dict(
        tokens=np.array(tokens, np.int32), action_mask=mask_T, turn_ends=np.array(turn_ends),
        turn_rewards=np.array(rewards, np.float32), behavior_logprobs=np.where(mask_T, logprobs, 0.0).astype(np.float32),
        advantages=np.where(mask_T, advantage, 0.0).astype(np.float32), reward=float(sum(rewards)), score=float(sum(rewards)),
        problem_id=group, group_id=group, policy_step=0, last_policy_step=0, iteration=1,
        info={"success": False, "env_error": ""}) | fields)


class Scripted:
    """An engine that says what it is told: `answer(conversation, turn)` is a text or token ids. Remembers what it was fed."""

    def __init__(self, chat, answer, end=True):
        self.chat, self.answer, self.end, self.turns, self.seen = chat, answer, end, {}, {}

    def generate(self, sequences, ids, seeds, max_new_tokens, temperature, stop=()):
        completions = []
        for sequence, id in zip(sequences, ids):
            turn = self.turns[id] = self.turns.get(id, -1) + 1
            said = self.answer(id, turn)
            tokens = self.chat.tokenize(said) if isinstance(said, str) else list(said)
            tokens += [self.chat.tokenizer.eos_token_id] * self.end
            self.seen.setdefault(id, []).append(list(sequence))
            completions.append(Completion(tokens, [-1.0] * len(tokens), "stop" if self.end else "length"))
        return completions

    def release(self):
        pass


def played(chat, answer, make_env, problems=(0,), end=True, **options):
    """Episodes of one group, with what the engine says given (see `Scripted`)."""
    n = len(problems)
    return collect(Scripted(chat, answer, end), chat, make_env, problems, [0] * n, range(n), **PLAY | options)[0]


class Talk:
    """A task that scores what it is told to, turn by turn."""
    stop, slow = (), False

    def __init__(self, scores=(0.0, 0.0, 1.0), message="go on"):
        self.scores, self.message, self.info = scores, message, {}

    def reset(self, problem_id, seed):
        self.turn, self.success = 0, False
        return "start"

    def step(self, answer):
        score, self.turn = self.scores[self.turn], self.turn + 1
        if isinstance(score, Exception):
            raise score
        self.success = score == 1.0
        return self.message, score, self.turn == len(self.scores), True


def one_each(tasks):
    """A make_env that gives out `tasks` in order."""
    waiting = iter(tasks)
    return lambda: next(waiting)


@pytest.fixture(scope="module")
def nano(tmp_path_factory):
    """Folder of a policy that plays anything badly and fast."""
    tokenizer = tiny_tokenizer()
    config = tiny_config(tokenizer)
    config.update(dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1))
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("nano")
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


TASK = '''
PLAYED = {}


class Task:
    name, stop, slow, info = "task", (), False, {}

    def __init__(self, *, prompt: str = "full"):
        self.success = False

    def problems(self, split, count):
        if count > 2:
            raise ValueError("two problems")
        return list(range(count)) if split == "train" else list(range(100, 100 + count))

    def reset(self, problem_id, seed):
        self.problem_id, self.turn, self.success = problem_id, 0, False
        self.number = PLAYED[problem_id] = PLAYED.get(problem_id, -1) + 1
        return "Walk"

    def step(self, answer):
        self.turn += 1
        return self.play()

    def render(self):
        return ""

    def play(self):
'''
RIGHT_EVERY_OTHER_TIME = "return '', float(self.number % 2), True, True"


@pytest.fixture
def run_task(nano, tmp_path, monkeypatch):
    """Trains on a task whose `play` is given; returns (metrics of the iterations, the run folder, the updates' episodes)."""
    def run(play, *flags):
        updates, name = [], f"run{len(list(tmp_path.glob('run*')))}"
        task = tmp_path / f"{name}.py"
        task.write_text(TASK + "".join(f"        {line}\n" for line in play.splitlines()))

        def remembered(learner, episodes, **how):
            updates.append((how.get("replayed", False), list(episodes)))
            return update(learner, episodes, **how)
        monkeypatch.setattr(train_module, "update", remembered)
        flags = ["--env", f"{task}:Task", "--model", nano, "--wandb", "off", "--quiet", "True", "--runs-dir", tmp_path / "runs",
                 "--name", name, "--max-new-tokens", 2, "--eval-problems", 1, "--eval-every", 0, "--group-size", 2,
                 "--problems-per-iteration", 2, "--iterations", 1, "--replay-batch-size", 1, *flags]
        main(parse_args([str(flag) for flag in flags]))
        lines = (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines], tmp_path / "runs" / name, updates
    return run


# --------------------------------------------------------------------------------------- ratios, log-probs, temperature


def test_engine_and_trainer_take_log_probs_at_the_sampling_temperature():
    model = bigram([[2.0, 0.0], [2.0, 0.0]])
    completions = HFEngine(model, [], 0).generate([[0]] * 20, list(range(20)), list(range(20)), 1, temperature=0.5)
    likely = [completion for completion in completions if completion.tokens == [0]]
    assert likely and likely[0].logprobs[0] == pytest.approx(-0.0181, abs=1e-4)  # -0.1269 at temperature 1
    ours_BT, _ = token_logprobs(model, torch.tensor([[0, 0]]), torch.tensor([[False, True]]), temperature=0.5)
    assert ours_BT[0, 1].item() == pytest.approx(likely[0].logprobs[0], abs=1e-6)


def test_the_model_folders_generation_config_changes_neither_training_nor_evaluation(nano, tmp_path, monkeypatch):
    model, tokenizer = load_policy(nano)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.1)  # nearly flat: tokens beyond the best 20 have to come
    model.generation_config.update(do_sample=True, repetition_penalty=1.1, top_p=0.8, top_k=20, temperature=0.6)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "generation_config.json").read_text())["top_k"] == 20
    model, tokenizer = load_policy(tmp_path)
    engine, chat = HFEngine(model, [], tokenizer.pad_token_id), Chat(tokenizer)
    played = []
    real = HFEngine.generate
    monkeypatch.setattr(HFEngine, "generate", lambda *arguments: played.append(real(*arguments)) or played[-1])
    rows, _ = collect(engine, chat, Talk, [0] * 200, [0] * 200, list(range(200)), **PLAY)
    evaluate(engine, chat, Talk, list(range(200)), **{key: PLAY[key] for key in PLAY if key not in ("policy_step", "iteration")})
    sampled, judged = played[0], played[3]  # first turns
    for completions in (sampled, judged):
        assert len({completion.tokens[0] for completion in completions}) > 40  # top-k and top-p are off
    for row in rows[:8]:  # of the whole distribution, without a penalty on what is in the prompt
        ours_BT, _ = token_logprobs(model, torch.tensor(row.tokens[None].astype(np.int64)), torch.tensor(row.action_mask[None]))
        assert ours_BT[0].detach().numpy() == pytest.approx(row.behavior_logprobs, abs=1e-4)


def test_a_vllm_server_gets_every_sampling_field_so_that_no_default_can_leak_in(monkeypatch):
    server, sent = vllm_engine.VLLMServer.__new__(vllm_engine.VLLMServer), {}
    server.model, server.stop_ids = "m", [2]
    monkeypatch.setattr(server, "ask", lambda path, body: sent.update(body) or {"choices": [
        {"token_ids": [5, 2], "logprobs": {"token_logprobs": [-1.0, -1.0]}, "finish_reason": "stop"}]}, raising=False)
    server.generate([[1]], [0], [0], 4, 0.7)
    assert {"temperature": 0.7, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
            "frequency_penalty": 0.0, "logit_bias": None, "min_tokens": 0}.items() <= sent.items()
    assert 'generation_config="vllm"' in (ROOT / "engines" / "vllm.py").read_text()


def test_the_first_ratio_is_one_though_the_model_has_dropout(nano, tmp_path):
    model, tokenizer = load_policy(nano)
    model.config.attention_dropout = 0.1
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model, _ = load_policy(tmp_path)
    assert model.model.layers[0].self_attn.attention_dropout == 0.1
    learner = make_learner(Args(lr=1e-9), model)
    rows, _ = collect(HFEngine(model, [tokenizer.eos_token_id], 0), Chat(tokenizer), one_each([Talk((0.0,)), Talk((1.0,))] * 4),
                      [0] * 8, [row // 2 for row in range(8)], list(range(8)), **PLAY)
    add_advantages(learner, rows)
    assert update(learner, rows)["max_abs_ratio_minus_1"] < 1e-3


def test_the_denominator_of_the_ratio_is_what_was_sampled_and_never_recomputed():
    p = math.exp(-1)
    learner = make_learner(Args(), bigram(same_rows([p, 1 - p])))
    buffer = ReplayBuffer(4)
    buffer.add([episode([1, 0], [0, 1], advantage=1.0, logprobs=-2.0)], step=0)
    metrics = update(learner, buffer.sample(1, step=5).episodes, replayed=True)
    assert metrics["ratio_mean"] == pytest.approx(math.e, rel=1e-5)
    assert metrics["clip_fraction"] == 1.0  # staleness is seen: 2.718 is beyond 1.2


def test_truncated_importance_weights_between_trainer_and_engine_carry_no_gradient():
    p = math.exp(-1)
    policy = bigram(same_rows([0.2, p, 0.8 - p]))
    learner = make_learner(Args(algo="decoupled_ppo", loss_options={"correction_high": 2.0}), policy)
    row = episode([0, 1, 1], [0, 1, 1], advantage=1.0)
    row.behavior_logprobs = np.array([0, -1, -4], np.float32)
    metrics = gradients(learner, [row])
    assert metrics["correction_weight"] == pytest.approx((1 + 2) / 2, rel=1e-5)
    found = policy.lm_head.weight.grad.clone()
    policy.zero_grad()
    logprobs_BT, _ = token_logprobs(policy, torch.tensor([[0, 1, 1]]), torch.tensor([[False, True, True]]))
    (-(1 * logprobs_BT[0, 1] + 2 * logprobs_BT[0, 2]) / 2).backward()
    assert torch.allclose(found, policy.lm_head.weight.grad, atol=1e-6)


def test_both_ratios_are_logged_that_to_the_engine_and_that_to_the_start_of_the_update(run_task):
    metrics, _, _ = run_task(RIGHT_EVERY_OTHER_TIME, "--iterations", 2, "--algo", "decoupled_ppo", "--lr", 0.05)
    first, second = metrics
    assert first["fresh/sampler_trainer_difference_max"] < 1e-4 and first["fresh/first_max_abs_ratio_minus_1"] < 1e-3
    assert second["replay/max_abs_ratio_minus_1"] > 1e-2  # current / sampler moves, though current / proximal is 1 in each update
    assert second["replay/correction_weight"] != pytest.approx(1.0, abs=1e-6)  # proximal / sampler


def test_log_probs_belong_to_the_token_they_stand_at():
    logits = torch.full((10, 10), math.log(0.1 / 9))
    logits[torch.arange(10), (torch.arange(10) + 1) % 10] = math.log(0.9)
    model = bigram(logits)
    completions = HFEngine(model, [], 0).generate([[3], [7, 8]], [0, 1], [0, 1], 6, temperature=1.0)
    for prompt, completion in zip(([3], [7, 8]), completions):
        row = prompt + completion.tokens
        expected = [math.log(0.9 if row[t] == (row[t - 1] + 1) % 10 else 0.1 / 9) for t in range(len(prompt), len(row))]
        assert completion.logprobs == pytest.approx(expected, abs=1e-5)
        mask_1T = torch.arange(len(row))[None] >= len(prompt)
        assert token_logprobs(model, torch.tensor([row]), mask_1T)[0][mask_1T].tolist() == pytest.approx(expected, abs=1e-5)
    assert math.log(0.9) in [pytest.approx(value, abs=1e-5) for value in completions[0].logprobs]


# ------------------------------------------------------------------------------------------------- replay and priorities


def test_exactly_the_group_with_signal_is_stored_with_all_that_belongs_to_it(run_task):
    _, run, updates = run_task("return '', [[1.0, 0.0], [1.0, 1.0]][self.problem_id % 2][self.number % 2], True, True",
                               "--replay-options", "unit", "group", "--capacity", 4, "--replay-updates", 1)
    checkpoint, = (run / "checkpoints").iterdir()
    buffer = load_buffer(checkpoint / "buffer")
    assert len(buffer) == 1
    sample = buffer.sample(1, step=10)
    fresh = {(row.group_id, row.reward): row for row in updates[0][1]}
    assert [row.problem_id for row in sample.episodes] == [0, 0] and sorted(row.reward for row in sample.episodes) == [0.0, 1.0]
    for row in sample.episodes:
        assert set(row.advantages[row.action_mask]) == {np.float32(math.copysign(math.sqrt(0.5), row.reward - 0.5))}
        other = fresh[row.group_id, row.reward]
        for name in ("tokens", "action_mask", "behavior_logprobs", "advantages"):
            assert np.array_equal(getattr(row, name), getattr(other, name))
    assert updates[1][0] and len(updates[1][1]) == 2  # the replay update trained the whole group


@pytest.mark.parametrize("eviction", ["fifo", "lowest_priority"])
def test_equal_priorities_are_no_error_anywhere(eviction):
    buffer = ReplayBuffer(2, unit="group", eviction=eviction, priority="reward")
    for group in range(4):  # overfull, so that eviction has to choose between equals
        buffer.add([episode([1, 2], [0, 1], rewards=[0.5], group=group)] * 2, step=0)
    assert sorted({row.group_id for row in buffer.sample(2, step=0).episodes}) == [2, 3]
    assert sorted(ProblemSampler(4, mode="heap").select(4, 1)) == [0, 1, 2, 3]


def test_single_members_of_groups_are_replayed_with_the_advantage_of_their_group():
    policy = bigram(same_rows([0.5, 0.5]))
    learner, buffer = make_learner(Args(), policy), ReplayBuffer(16)
    rows = [episode([1, 0], [0, 1], rewards=[float(place % 2)], group=group, logprobs=math.log(0.5))
            for group in range(4) for place in range(4)]
    add_advantages(learner, rows)
    buffer.add([rows[4 * group + place] for group, place in enumerate((1, 2, 3, 0))], step=0)  # rewards 1, 0, 1, 0
    sample = buffer.sample(4, step=3)
    inputs, _ = step_inputs(learner, sample.episodes, sample.weights, sample.ages, None, replayed=True)
    expected = [0.5 / math.sqrt(1 / 3) * (1 if row.reward else -1) for row in sample.episodes]
    assert inputs["advantages"][:, 1].tolist() == pytest.approx(expected, rel=1e-5)
    assert update(learner, sample.episodes, weights=sample.weights, replayed=True)["nonzero_advantage_rows"] == 1.0


def test_a_new_entry_has_the_largest_priority_raised_to_alpha_once():
    buffer = ReplayBuffer(4, alpha=0.5, eps=0.0, tau=math.inf, priority="td_error", insert_priority="max", draw="iid")
    row = episode([1, 0], [0, 1])
    first = buffer.add([row], 0, base=[4.0])
    buffer.sample(1, 0)  # the real base is in force after a draw
    second = buffer.add([row], 0, base=[1.0])
    assert np.exp(buffer.log_base[buffer.slots(second)]) == pytest.approx([4.0])
    _, p = buffer.probabilities(0)
    assert p == pytest.approx([0.5, 0.5])  # the leaves are 4^0.5 = 2 both
    buffer.update_priorities(second, [1.0])
    assert buffer.probabilities(0)[1] == pytest.approx([2 / 3, 1 / 3])
    assert len(first) == 1


def test_a_million_draws_never_leave_the_entries_nor_take_one_of_no_weight():
    buffer = ReplayBuffer(100, alpha=1.0, tau=math.inf, priority="td_error", draw="iid")
    ids = buffer.add([episode([1, 0], [0, 1])] * 100, 0, base=[500.0] * 99 + [0.0])
    drawn = np.concatenate([buffer.sample(100_000, 0).ids for _ in range(10)])
    assert drawn.min() == ids[0] and drawn.max() == ids[-2]


def test_the_newest_entry_is_drawn_like_the_others():
    buffer = ReplayBuffer(3, alpha=1.0, tau=math.inf, priority="td_error", draw="iid")
    ids = buffer.add([episode([1, 0], [0, 1])] * 3, 0, base=[1.0, 1.0, 1.0])
    drawn = buffer.sample(30_000, 0).ids
    assert [np.mean(drawn == id) for id in ids] == [pytest.approx(1 / 3, abs=0.01)] * 3


@pytest.mark.parametrize("draw", ["systematic", "iid"])
def test_a_saved_buffer_goes_on_as_the_one_that_was_not_saved(draw, tmp_path):
    def steps(buffer, first, last):
        drawn = []
        for step in range(first, last):
            buffer.add([episode([1, 0], [0, 1], advantage=step + place) for place in range(3)], step, birthdays=[step] * 3)
            sample = buffer.sample(2, step)
            buffer.update_priorities(sample.ids, np.arange(1.0, 3.0))
            drawn.append(sample.ids.tolist())
        return drawn
    whole, part = ReplayBuffer(8, draw=draw), ReplayBuffer(8, draw=draw)
    expected = steps(whole, 0, 4)
    found = steps(part, 0, 2)
    write_state(tmp_path, part.state_dict())
    again = load_buffer(tmp_path)
    assert found + steps(again, 2, 4) == expected
    assert np.array_equal(np.stack(again.probabilities(9)), np.stack(whole.probabilities(9)))
    assert again.rng.bit_generator.state == whole.rng.bit_generator.state


def test_without_replay_a_run_needs_no_buffer_and_equals_one_that_never_draws(run_task, monkeypatch):
    play = RIGHT_EVERY_OTHER_TIME
    kept, _, _ = run_task(play, "--iterations", 3, "--replay-updates", 0, "--lr", 0.01)

    def broken(*_, **__):
        raise AssertionError("a buffer was made")
    monkeypatch.setattr(setup, "ReplayBuffer", broken)
    without, _, _ = run_task(play, "--iterations", 3, "--replay", "none", "--lr", 0.01)
    for a, b in zip(kept, without, strict=True):
        same = [key for key in b if not key.startswith(("time/", "buffer/")) and key != "fresh/stored_share"]
        assert {key: a[key] for key in same} == {key: b[key] for key in same}


def test_only_the_last_groups_with_signal_are_kept(run_task):
    _, run, _ = run_task("return '', float(self.problem_id == 0 and self.number % 2), True, True", "--iterations", 4,
                         "--replay-options", "unit", "group", "--capacity", 2, "--tau", "inf")
    buffer = load_buffer(max((run / "checkpoints").iterdir()) / "buffer")
    rows = buffer.sample(2, step=99).episodes
    assert {row.problem_id for row in rows} == {0} and {row.iteration for row in rows} == {3, 4}


def test_long_episodes_are_trained_as_often_as_short_ones_and_drops_by_age_are_counted_in_tokens(run_task):
    metrics, _, updates = run_task(
        "long = self.problem_id == 1\nreturn 'No', float(self.number % 2), self.turn == (5 if long else 1), True",
        "--iterations", 20, "--problems-per-iteration", 1, "--replay", "uniform", "--replay-updates", 1, "--replay-options", "max_age", 3,
        "--released", "age_in_iterations", "--max-turns", 5)
    fresh = [row for replayed, rows in updates if not replayed for row in rows]
    lengths = [np.mean([len(row.tokens) for row in fresh if row.problem_id == problem]) for problem in (0, 1)]
    assert lengths[1] > 3 * lengths[0]
    assert [sum(row.problem_id == problem for row in fresh) for problem in (0, 1)] == [20, 20]
    last = metrics[-1]
    assert last["buffer/dropped_by_age_total"] == 2 * 16  # each episode of the first 16 iterations, the long ones too
    dropped = [len(row.tokens) for row in fresh if row.iteration <= 16]
    assert last["buffer/dropped_by_age_tokens_mean"] == pytest.approx(np.mean(dropped))


def test_a_thousand_short_episodes_take_no_more_than_their_tokens():
    buffer = ReplayBuffer(1000)
    padded = [np.zeros(4096, dtype) for dtype in (np.int32, bool, np.float32, np.float32)]
    for array in padded[1::2]:
        array[:50] = 1  # actions, of advantage 1
    for start in range(0, 1000, 100):
        buffer.add([Episode(*(array[:50] for array in padded), turn_ends=np.array([50]), turn_rewards=np.zeros(1, np.float32),
                            reward=0.0, score=0.0, problem_id=0, group_id=0, policy_step=0, last_policy_step=0, iteration=0)
                    for _ in range(100)], step=0)
    assert buffer.stats(0)["bytes"] < 2_000_000
    rows = buffer.sample(1000, 0).episodes  # no view keeps the padding alive
    assert all(row.tokens.base is None and row.advantages.base is None for row in rows)


# ------------------------------------------------------------------------------------- masks, end tokens, denominators


@pytest.mark.parametrize("response, mask", [([5, 7, 2], [1, 1, 1, 0, 0]), ([2], [1, 0, 0, 0, 0])])
def test_the_stop_token_is_trained_though_padding_is_the_same_token(response, mask):
    end = 2  # the end and the padding
    chat = chat_of(CHATML)
    assert chat.tokenizer.eos_token_id == end
    chat.tokenizer.pad_token = chat.tokenizer.eos_token
    rows = played(chat, lambda id, turn: response if id == 0 else [5, 7, 5, 7, 5], lambda: Talk((1.0,)), [0, 1], end=False,
                  max_new_tokens=5)
    prompt = len(chat.start("start"))
    learner = make_learner(Args(algo="reinforce"), bigram(torch.zeros(120, 120)))
    add_advantages(learner, rows)
    inputs, _ = step_inputs(learner, rows, None, None, None, replayed=False)
    assert inputs["mask"][0, prompt:].int().tolist() == mask
    assert gradients(learner, rows)["tokens_trained"] == len(response) + 5
    assert inputs["advantages"][0, prompt:].ne(0).int().tolist() == mask


def test_a_row_without_any_answer_divides_nothing_by_zero():
    learner = make_learner(Args(algo="asymre"), bigram(same_rows([0.5, 0.5])))
    empty = episode([1, 1], [0, 0], turn_ends=[])
    full = episode([1, 0], [0, 1], advantage=2.0, logprobs=math.log(0.5))
    for aggregation in ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant"):
        learner.objective = replace(learner.objective, aggregation=aggregation)
        metrics = gradients(learner, [empty, full])
        scale = 1 if aggregation != "constant" else learner.args.max_turns * learner.args.max_new_tokens
        assert metrics["loss"] == pytest.approx(2 * math.log(2) / scale, rel=1e-5)
        assert all(parameter.grad.isfinite().all() for parameter in learner.policy.parameters() if parameter.grad is not None)
    add_advantages(learner, [empty, full])  # and where nothing was sampled at all
    assert update(learner, [empty, empty])["steps"] == 0


def test_no_end_token_is_invented_where_the_limit_cut_an_answer():
    logits = torch.full((16, 16), -30.0)
    logits[:, 5], logits[5, 7], logits[7, 5] = 0.0, 30.0, 30.0
    completion, = HFEngine(bigram(logits), [2], 2).generate([[5]], [0], [0], 2, 1.0)
    assert completion.finish_reason == "length" and completion.tokens == [7, 5]
    chat = chat_of(CHATML)
    rows = played(chat, lambda id, turn: [50, 70], lambda: Talk((1.0,)), end=False)
    assert rows[0].tokens[rows[0].action_mask].tolist() == [50, 70] and rows[0].tokens[-1] == 70
    assert rows[0].info["overlong"] and rows[0].info["length_stops"] == 1


@pytest.mark.parametrize("options", [dict(algo="asymre"), dict(algo="grpo", kl_coef=0.1, entropy_coef=0.1)], ids=str)
def test_observations_get_exactly_no_gradient(options):
    policy, seen = bigram(torch.randn(16, 16, generator=torch.Generator().manual_seed(0))), []
    learner = make_learner(Args(**options), policy)
    policy.model.norm.register_forward_hook(lambda module, inputs, output: seen.append(output) or (
        output.requires_grad and output.retain_grad()))
    gradients(learner, [episode([1, 10, 11, 12, 13, 10, 11], [0, 0, 0, 1, 1, 0, 0], turn_ends=[5])])
    moved = seen[-1].grad[0].abs().sum(1).nonzero().flatten().tolist()
    assert moved == [2, 3]  # the states that predict tokens 12 and 13


@pytest.mark.parametrize("pass_tokens", [1, 4096])
def test_one_token_denominator_however_a_step_is_cut_into_micro_batches(pass_tokens):
    learner = make_learner(Args(algo="dapo", micro_batch_tokens=pass_tokens), bigram(same_rows([0.5, 0.5])))
    half = math.log(0.5)
    rows = [episode([1, 0], [0, 1], advantage=-1.0, logprobs=half), episode([1, 0, 1, 0], [0, 1, 1, 1], logprobs=half)]
    rows[1].advantages = np.array([0, -1, 1, 0], np.float32)  # token losses [1] and [1, -1, 0]: one over four
    assert gradients(learner, rows)["loss"] == pytest.approx(0.25, abs=1e-6)


def test_the_limit_of_a_turn_cuts_no_later_turn():
    chat = chat_of(CHATML)
    row, = played(chat, lambda id, turn: [50 + turn] * 4, lambda: Talk((0.0, 0.0, 1.0), "ab"), end=False)
    assert len(row.tokens) >= len(chat.start("start")) + 16 and len(row.turn_ends) == 3
    assert row.tokens[row.action_mask].tolist() == [50] * 4 + [51] * 4 + [52] * 4 and row.action_mask[-4:].all()
    learner = make_learner(Args(max_new_tokens=4, max_turns=3, algo="dr_grpo"), bigram(torch.zeros(120, 120)))
    row.advantages = row.action_mask.astype(np.float32)
    assert gradients(learner, [row])["tokens_trained"] == 12


def test_absolute_positions_do_not_depend_on_the_padding():
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=64, n_embd=32, n_layer=2, n_head=2, initializer_range=0.5,
                                       bos_token_id=0, eos_token_id=0)).eval()
    short, long = [1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 11]
    together = HFEngine(model, [], 49).generate([short, long], [0, 1], [3, 4], 4, 1.0)
    alone = HFEngine(model, [], 49).generate([short], [0], [3], 4, 1.0)
    assert together[0].tokens == alone[0].tokens and together[0].logprobs == pytest.approx(alone[0].logprobs, abs=1e-4)
    rows = [episode(sequence + completion.tokens, [0] * len(sequence) + [1] * 4, logprobs=-1.0)
            for sequence, completion in zip((short, long), together)]
    learner = make_learner(Args(), model)
    for row, completion, alone in zip(rows, together, gradients(learner, rows)["log_ratios"]):  # one padded batch of both
        assert alone[row.action_mask] - 1.0 == pytest.approx(completion.logprobs, abs=1e-4)


@pytest.mark.parametrize("gamma, expected", [(1.0, [1, 1, 0, 0, 1, 1]), (0.5, [0.125, 0.25, 0, 0, 0.5, 1])])
def test_a_reward_at_the_end_reaches_the_turns_before_an_observation_undiscounted_by_it(gamma, expected):
    learner = make_learner(Args(algo="ppo", loss_options={"gamma": gamma}), bigram(same_rows([0.5, 0.5])))
    mask = [0, 1, 1, 0, 0, 1, 1]
    rows = [episode([1] * 7, mask, rewards=[0.0, reward], turn_ends=[3, 7]) for reward in (1.0, 0.0)]
    add_advantages(learner, rows)  # values are 0 at the start
    returns_BT = value_targets(learner, rows, replayed=False)[1]
    assert returns_BT[0, 1:].tolist() == pytest.approx(expected) and not returns_BT[1].any()
    for algo in ("reinforce++", "ppo") if gamma == 1 else ():
        add_advantages(make_learner(Args(algo=algo), learner.policy), rows)
        assert rows[0].advantages[rows[0].action_mask] == pytest.approx([1.0] * 4, rel=1e-4)
        assert rows[1].advantages[rows[1].action_mask] == pytest.approx([-1.0] * 4, rel=1e-4)


def test_every_turns_reward_reaches_the_learner():
    chat = chat_of(CHATML)
    rows = played(chat, lambda id, turn: "a", lambda: Talk((0.1, -0.1, 1.0)), [0, 1])
    assert rows[0].reward == pytest.approx(1.0) and rows[0].turn_rewards.tolist() == pytest.approx([0.1, -0.1, 1.0])
    learner = make_learner(Args(algo="ppo", loss_options={"lam": 1.0}), bigram(torch.zeros(120, 120)))
    add_advantages(learner, rows)
    returns_BT = value_targets(learner, rows, replayed=False)[1]
    assert returns_BT[0, rows[0].turn_ends - 1].tolist() == pytest.approx([1.0, 0.9, 1.0], abs=1e-6)


# ------------------------------------------------------------------------------------------------------ groups, NaN, KL


@pytest.mark.parametrize("scores, expected", [
    ((1.0, math.nan, 0.0, 1.0), [1 / 3, 0, -2 / 3, 1 / 3]), ((math.nan, math.nan, 0.5, math.nan), [0, 0, 0, 0]),
    ((math.inf, 1.0, 0.0, 0.0), [0, 2 / 3, -1 / 3, -1 / 3])])
def test_a_reward_that_is_no_number_costs_its_own_row_only(scores, expected):
    chat = chat_of(CHATML)
    tasks = [Talk((score,)) for score in scores]
    rows = played(chat, lambda id, turn: "a", one_each(tasks), [0] * 4)
    add_advantages(make_learner(Args(algo="dr_grpo"), bigram(torch.zeros(120, 120))), rows)
    assert [row.advantages[row.action_mask][0] for row in rows] == pytest.approx(expected, abs=1e-6)
    assert [bool(row.info["env_error"]) for row in rows] == [not math.isfinite(score) for score in scores]
    for algo in ("grpo", "rloo", "reinforce++", "reinforce++_baseline", "ppo"):
        add_advantages(make_learner(Args(algo=algo), bigram(torch.zeros(120, 120))), rows)
        assert all(np.isfinite(row.advantages).all() for row in rows)
        assert not any(row.advantages.any() for row, score in zip(rows, scores) if not math.isfinite(score))


def test_the_mean_is_that_of_the_group_whatever_its_size():
    rows = [episode([1, 0], [0, 1], rewards=[reward], group=group)
            for group, reward in ((0, 1.0), (1, 1.0), (0, 0.0), (1, 1.0), (1, 1.0))]
    for algo, up in (("dr_grpo", 0.5), ("grpo", math.sqrt(0.5)), ("rloo", 1.0)):
        add_advantages(make_learner(Args(algo=algo), bigram(same_rows([0.5, 0.5]))), rows)
        assert [row.advantages[1] for row in rows] == pytest.approx([up, 0, -up, 0, 0], rel=1e-5)


@pytest.mark.parametrize("replayed", [False, True])
def test_the_kl_in_the_loss_has_the_gradient_of_the_kl_on_fresh_and_on_replayed_data(replayed):
    reference, pi, mu = (torch.tensor(row) for row in ([0.2, 0.3, 0.5], [0.6, 0.3, 0.1], [0.3, 0.3, 0.4]))
    policy = bigram(reference.log().expand(3, -1))
    learner = make_learner(Args(algo="grpo", kl_coef=1.0, temperature=1.0, loss_options={
        "kl_kind": "k3_straight_through", "aggregation": "seq_mean_token_sum"}), policy)
    with torch.no_grad():
        policy.lm_head.weight[:, :3] = pi.log()[:, None].expand(-1, 3) / math.sqrt(8)
    sampler = mu if replayed else pi  # every action once, weighted by its probability: an expectation
    rows = [episode([0, action], [0, 1], advantage=0.0, logprobs=sampler[action].log().item()) for action in range(3)]
    gradients(learner, rows, weights=3 * sampler.numpy(), replayed=replayed)
    found = policy.lm_head.weight.grad.clone()
    policy.zero_grad()
    logits_V = policy(input_ids=torch.tensor([[0]])).logits[0, 0]
    (logits_V.softmax(0) * (logits_V.log_softmax(0) - reference.log())).sum().backward()
    assert policy.lm_head.weight.grad.norm() > 0.1
    assert torch.allclose(found, policy.lm_head.weight.grad, atol=1e-5)


def test_whitening_is_over_all_action_tokens_of_the_batch():
    rows = [episode([1] * length, [0] + [1] * (length - 1), rewards=[reward], group=place // 2)
            for place, (length, reward) in enumerate(((2, 1.0), (9, 0.0), (5, 1.0), (3, 0.25)))]
    for algo in ("reinforce++", "reinforce++_baseline", "ppo"):
        add_advantages(make_learner(Args(algo=algo), bigram(same_rows([0.5, 0.5]))), rows)
        values_N = np.concatenate([row.advantages[row.action_mask] for row in rows])
        assert values_N.mean() == pytest.approx(0, abs=1e-6) and values_N.std() == pytest.approx(1, abs=1e-5)


def test_a_log_prob_of_minus_infinity_stops_the_step_and_names_the_episodes(run_task, nano, monkeypatch, capsys):
    biases = [0.0, -math.inf]
    policy = bigram(same_rows([0.5, 0.5]), biases)
    learner, before = make_learner(Args(), policy), policy.lm_head.weight.detach().clone()
    rows = [episode([0, 0], [0, 1], logprobs=-0.1), episode([0, 1], [0, 1], logprobs=-0.1)]  # token 1 has probability 0
    metrics = update(learner, rows)
    assert metrics["nonfinite"] == 1 and metrics["steps"] == 0 and torch.equal(policy.lm_head.weight, before)
    assert metrics["log_ratios"][1][1] == -math.inf  # which of the two it was

    def impossible(model, *arguments, **named):
        logprobs_BT, entropy_BT = token_logprobs(model, *arguments, **named)
        return logprobs_BT - math.inf * arguments[1], entropy_BT
    monkeypatch.setattr("update.token_logprobs", impossible)
    with pytest.raises(SystemExit):
        run_task(RIGHT_EVERY_OTHER_TIME, "--iterations", 9)
    assert "not finite" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------ rewards and evaluation


def test_a_crashed_episode_is_a_failure_in_evaluation_not_a_smaller_number_of_episodes():
    chat = chat_of(CHATML)
    tasks = [Talk((1.0,)), Talk((RuntimeError("crash"),)), Talk((1.0,)), Talk((0.0,))]
    result = evaluate(Scripted(chat, lambda id, turn: "a"), chat, one_each(tasks), [0, 1, 2, 3],
                      **{key: value for key, value in PLAY.items() if key not in ("policy_step", "iteration")})
    assert result["success"] == 0.5 and result["problems"] == 4 and result["env_errors"] == 0.25


@pytest.fixture
def sums_file(tmp_path):
    """Maths problems with the gold answers 1, 2 and 9."""
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps({"problem": f"say {gold}", "answer": gold}) + "\n" for gold in ("1", "2", "9")))
    return path


def played_maths(path, said):
    """Episodes of (gold, answer) pairs, one attempt each."""
    chat = chat_of(CHATML)
    ids = {problem.gold: id for id, problem in enumerate(maths.load(str(path))[0])}
    return played(chat, lambda id, turn: said[id][1], lambda: Maths(data=str(path), attempts=1), [ids[gold] for gold, _ in said],
                  max_new_tokens=2000, context_length=100_000)


def test_one_score_a_sample_also_where_no_answer_can_be_found(sums_file):
    rows = played_maths(sums_file, [("1", "I don't know."), ("2", r"\boxed{2}")])
    assert [row.score for row in rows] == [0.0, 1.0]


def test_a_tower_of_powers_neither_hangs_nor_makes_right_answers_wrong(sums_file):
    tower = "2003^{2002^{2001}}"
    started = time.time()
    rows = played_maths(sums_file, [("9", rf"By {tower} it is \boxed{{009}}")] * 200 + [("9", rf"\boxed{{{tower}}}")])
    assert [row.score for row in rows] == [1.0] * 200 + [0.0]
    assert time.time() - started < 60


def test_a_list_of_guesses_is_worth_nothing(sums_file):
    guesses = " ".join(rf"\boxed{{{number}}}" for number in range(1, 101))
    tags = "".join(f"<answer>{number}</answer>" for number in range(1, 101))
    rows = played_maths(sums_file, [("9", guesses), ("9", tags), ("9", guesses + r" \boxed{9}"), ("9", r"\boxed{9} \boxed{9}")])
    assert [row.score for row in rows] == [0.0, 0.0, 0.0, 1.0]
    assert [row.info["success"] for row in rows] == [False, False, False, True]


def graded(tmp_path, pairs):
    """Scores of (gold as JSON, answer) pairs, each answer in a box."""
    path = tmp_path / "golds.jsonl"
    rows = [{"problem": f"problem {place}", "answer": gold} for place, (gold, _) in enumerate(pairs)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    ids = {int(problem.text.split()[1]): id for id, problem in enumerate(maths.load(str(path))[0])}
    env, scores = Maths(data=str(path), attempts=1), []
    for place, (_, answer) in enumerate(pairs):
        env.reset(ids[place], 0)
        scores.append(env.step(rf"so \boxed{{{answer}}}")[1])
    return scores


UNEQUAL = [("0.0000001", "10^{-8}"), (r"1.6\times10^{-19}", r"9.1\times10^{-31}"), (r"\frac{1}{2^{99}}", r"\frac{1}{2^{98}}"),
           ("x=10^{-8}", "x=10^{-9}"), ("(10^{-20},1)", "(10^{-21},1)"), (r"\{10^{-20},1\}", r"\{10^{-21},1\}"),
           ("10^{-20}x", "10^{-21}x"), (r"\begin{pmatrix}10^{-20}\\1\end{pmatrix}", r"\begin{pmatrix}10^{-21}\\1\end{pmatrix}"),
           (r"\pi", "3.1416"), ("1", r"\frac{1000001}{1000000}"), ("1", r"\frac{1000000}{999999}"), ("2", r"\infty"),
           (r"\sqrt{10^{12}+1}", "10^6"), (r"6.02\times10^{23}", "602000000000000000000001"), ("11_3", "11_5"), ("|x|", "x")]
EQUAL = [(r"\pi", "3.14159"), (r"\frac{1}{6}", "0.166667"), ("0.333333333333", r"\frac{1}{3}"), (r"10^{5000}", r"100^{2500}"),
         (r"1.6\times10^{-19}", "1.6e-19"), ("0.5x", r"\frac{x}{2}"), (r"\sqrt{x^2}", "|x|")]
ALIKE = [("71/6", "11 5/6"), ("3.5", "3 1/2"), ("-3.5", "-3 1/2"), ("3.5", "3½"), (r"106^\circ", "106°"),
         (r"12\text{ degrees}", "12°"),
         ("73", "**73**"), ("73", "`73`"), ("73", r"\textbf{73}"), (r"1\frac{1}{4}", "1 1/4"), (r"1\frac14", "5/4"),
         (r"\frac{\pi}{2}", "pi/2"),
         (r"\frac{\pi}{2}", "π/2"), (r"\frac{2}{3}\pi", "2/3 pi"), (r"10\sqrt{2}", "10*sqrt(2)"),
         (r"\sqrt{2+\sqrt{3}}", "sqrt(2+sqrt(3))"),
         (r"\sqrt{15}", "√15"), ("3+4i", "3 + 4*i"), (r"(-\infty,2)\cup(3,\infty)", "(-infinity, 2) U (3, infinity)"),
         (r"x \le 5", "x <= 5"),
         (r"2\cos 15^{\circ}", "2cos 15°"), ("5", "5 cm"), (r"3 \pm 2\sqrt{2}", "3 ± 2√2"), ("x^2", "x**2")]


def test_numbers_are_compared_relatively_and_exact_ones_exactly(tmp_path):
    assert graded(tmp_path, UNEQUAL + EQUAL) == [0.0] * len(UNEQUAL) + [1.0] * len(EQUAL)


def test_what_plain_text_and_latex_say_alike_counts_alike(tmp_path):
    assert graded(tmp_path, ALIKE) == [1.0] * len(ALIKE)


def test_a_number_of_a_data_file_is_a_decimal_and_never_eulers_e(tmp_path):
    assert graded(tmp_path, [(1e-5, "0.00001"), (1e-5, "1e-5"), (1e16, "1" + "0" * 16), (1e16, "1e16"), ("1000000", "1e6"),
                             (2.5, r"\frac52")]
                  ) == [1.0] * 6
    assert graded(tmp_path, [(1e-5, "e-5"), ("1e-5", "e-5"), (1e16, "e16"), (1e16, "1e15")]) == [0.0] * 4


def test_files_of_other_trainers_are_read(tmp_path):
    table = pytest.importorskip("pyarrow").Table
    parquet = pytest.importorskip("pyarrow.parquet")
    said = [{"role": "system", "content": "You count."}, {"role": "user", "content": "1 + 1?"}]
    verl = {"data_source": "sums", "prompt": said, "ability": "maths", "reward_model": {"ground_truth": "2", "style": "rule"},
            "extra_info": {"split": "train", "index": 0}}
    parquet.write_table(table.from_pylist([verl]), tmp_path / "verl.parquet")
    (tmp_path / "trl.jsonl").write_text("\ufeff" + json.dumps({"prompt": said, "solution": r"It is \boxed{2}."}), "utf-8")
    rows = [{"question": "1 + 1?"}] * 150 + [{"question": "1 + 1?", "answer": "2"}]
    (tmp_path / "plain.json").write_text("\ufeff" + json.dumps(rows), "utf-8")
    parquet.write_table(table.from_pylist([{"problem": "1 + 1?", "answer": Decimal("2.00")}]), tmp_path / "decimal.parquet")
    for name, gold in (("verl.parquet", "2"), ("trl.jsonl", "2"), ("plain.json", "2"), ("decimal.parquet", "2.00")):
        [problem] = maths.load(str(tmp_path / name))[0]
        assert (problem.text, problem.gold) == ("1 + 1?", gold), name
    assert "150 rows without problem or short answer left out" in Maths(data=str(tmp_path / "plain.json")).source()
    (tmp_path / "none.jsonl").write_text(json.dumps({"prompt": said, "reward_model": {"ground_truth": ""}}))
    with pytest.raises(ValueError, match="none.jsonl: none of its 1 rows has a problem and an answer"):
        maths.load(str(tmp_path / "none.jsonl"))


def test_a_tokenizer_without_a_pad_token_takes_its_end_token_and_says_so(tiny_folder, tmp_path, capsys):
    folder = shutil.copytree(tiny_folder, tmp_path / "policy")
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (folder / name).exists():
            kept = json.loads((folder / name).read_text())
            kept.pop("pad_token", None)
            (folder / name).write_text(json.dumps(kept))
    _, tokenizer = load_policy(folder, torch.float32)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    assert f"its tokenizer has no pad token; rows are filled with its end token, {tokenizer.eos_token}\n" in capsys.readouterr().out


def test_golds_that_are_nothing_are_left_out_and_told_and_answers_that_are_nothing_are_not_valid(tmp_path):
    path, empty = tmp_path / "golds.jsonl", ["$$", ".", "%", r"\text{}", math.nan, math.inf, True, None, "None", "null", "N/A",
                                              "nan"]
    rows = [{"problem": f"p {place}", "answer": gold} for place, gold in enumerate([*empty, "7"])]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [problem.gold for problem in maths.load(str(path))[0]] == ["7"]
    assert "12 rows without problem or short answer left out" in Maths(data=str(path)).source()
    for answer in (r"\boxed{$}", "<answer>.</answer>", r"\boxed{\text{}}", r"\boxed{%}", r"\boxed{{}}"):
        env = Maths(data=str(path))
        env.reset(0, 0)
        assert env.step(answer)[1:] == (0.0, False, False), answer


OPENS = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")


@pytest.mark.parametrize("template, said, scores", [
    (CHATML, r"<think> I guess \boxed{7}, wait", 0.0), (OPENS, r" I guess \boxed{7}, wait", 0.0),
    (CHATML, r" I guess \boxed{7}, wait", 1.0),
    (OPENS, r" I guess \boxed{8}</think> \boxed{7}", 1.0), (CHATML, r"<think>\boxed{8}</think>\boxed{7}", 1.0)])
def test_an_unfinished_thought_holds_no_answer_also_where_the_template_opens_it(tmp_path, template, said, scores):
    path = tmp_path / "seven.jsonl"
    path.write_text('{"problem": "3 + 4", "answer": 7}\n')
    row, = played(chat_of(template), lambda id, turn: said, lambda: Maths(data=str(path), attempts=1), max_new_tokens=50, end=False)
    assert row.score == scores and row.info["parse_failures"] == 1 - scores


@pytest.mark.parametrize("name, options, wrong, right", [
    ("frozenlake", {}, "Left", "Right"), ("cliffwalking", {}, "Left", "Up"), ("sokoban", {}, "Left", "Right"),
    ("arithmetic", {}, "1", "46"),
    ("reasoning_gym:chain_sum", {}, "1", "2"), ("geoqa", {}, "A", "B"), ("examples/guess.py:Guess", {}, "1", "2")])
def test_tags_in_thoughts_are_no_answers_in_any_task(name, options, wrong, right):
    env = make_env_factory(str(ROOT / name) if name.endswith("Guess") else name, options)()
    for text, valid in ((f"<think>no <answer>{wrong}</answer></think><answer>{right}</answer>", True),
                        (f"<think>maybe <answer>{right}</answer></think> so", False),
                        (f"<think>maybe <answer>{right}</answer>", False)):
        env.reset(env.problems("train", 1)[0], 0)
        assert env.step(text)[3] is valid, text


def test_the_answer_after_the_thoughts_is_the_one_that_counts():
    env = make_env_factory("arithmetic", {})()
    env.reset(1234, 0)
    assert env.step("<think>no <answer>45</answer></think><answer>**46**</answer>")[1] == 1.0


@pytest.mark.parametrize("gold, answer", [
    ("3.5", "35"), ("1.0", "10"), ("-5", "5"), ("1/2", "12"), ("C++", "C"), ("2–1", "21"), ("C#", "C"), ("10:30", "1030"),
    ("10²", "102"),
    ("3½", "31/2"), ("A+", "A"), (".NET", "net"), ("1e-5", "1e5")])
def test_punctuation_that_is_part_of_a_number_or_a_name_counts_but_for_squads_own_normalisation(tmp_path, gold, answer):
    (tmp_path / "passages.jsonl").write_text(json.dumps({"contents": '"Title"\nowl text'}) + "\n")
    for number, (accepted, said, normalization, score) in enumerate([
            (gold, answer, "own", 0.0), (gold, gold, "own", 1.0), (gold, f"The **{gold}**.", "own", 1.0),
            ("U.S.A. — 1,000", "usa 1000", "own", 1.0), ("2–1", "2-1", "own", 1.0), ("3.5", "35", "squad", 1.0),
            ("2-1", "21", "squad", 1.0)]):
        path = tmp_path / f"questions{number}.jsonl"
        path.write_text(json.dumps({"question": "How?", "answers": [accepted]}) + "\n")
        env = SearchQA(questions=str(path), corpus=str(tmp_path / "passages.jsonl"), cache_dir=str(tmp_path),
            normalization=normalization)
        env.reset(0, 0)
        assert env.step(f"<answer>{said}</answer>")[1] == score, (accepted, said)


@pytest.mark.parametrize("field, value", [("done", "False"), ("success", "True"), ("valid", "yes"), ("success", None),
                                          ("score", "1.0")])
def test_a_flag_of_a_task_that_is_a_text_is_an_error_that_names_it_and_its_type(field, value):
    class Told(Talk):
        def step(self, answer):
            said = dict(done=True, valid=True, success=True, score=1.0) | {field: value}
            self.success = said["success"]
            return "", said["score"], said["done"], said["valid"]
    row, = played(chat_of(CHATML), lambda id, turn: "a", Told)
    error = row.info["env_error"]
    assert field in error and repr(value) in error and (field == "score" or type(value).__name__ in error)
    assert not row.info["success"] and row.score == 0.0


def test_a_stop_that_is_a_text_is_one_stop_string():
    class Engine(Scripted):
        def generate(self, *arguments):
            stops.append(arguments[-1])
            return super().generate(*arguments)
    stops, chat = [], chat_of(CHATML)
    for stop in ("</answer>", ("</answer>",), [], ()):
        make_env = type("Task", (Talk,), {"stop": stop})
        collect(Engine(chat, lambda id, turn: "a"), chat, make_env, [0], [0], [0], **PLAY | {"max_turns": 1})
    assert stops == [("</answer>",), ("</answer>",), (), ()]
    with pytest.raises(TypeError, match="stop must be a tuple of texts"):
        collect(Engine(chat, lambda id, turn: "a"), chat, type("Task", (Talk,), {"stop": ("",)}), [0], [0], [0], **PLAY)


def test_a_format_penalty_stays_out_of_score_success_and_the_priority_by_reward():
    chat = chat_of(CHATML)

    class Format(Talk):
        def step(self, answer):
            return "", 0.0, True, answer == "valid"
    rows = played(chat, lambda id, turn: "valid" if id == 0 else "no", Format, [0] * 4, format_penalty=0.1)
    assert [row.reward for row in rows] == pytest.approx([0.0, -0.1, -0.1, -0.1]) and [row.score for row in rows] == [0.0] * 4
    assert not any(row.info["success"] for row in rows)
    buffer = ReplayBuffer(4, priority="reward", eps=0.01)
    buffer.add(rows, step=0)
    assert buffer.probabilities(0)[1] == pytest.approx([0.25] * 4)
    add_advantages(make_learner(Args(algo="dr_grpo"), bigram(torch.zeros(120, 120))), rows)  # no std: format alone stays small
    assert max(abs(row.advantages).max() for row in rows) == pytest.approx(0.075)


# --------------------------------------------------------------------------------- tokens of several turns, environments


def test_sampled_tokens_are_never_tokenised_again():
    specials = ["<|pad|>", "<|im_end|>", "<|im_start|>"]
    vocabulary = {token: place for place, token in enumerate(specials + list("helo\nstarunigd") + ["he", "ll", "llo", "hello"])}
    merges = [("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo")]
    tokenizer = Tokenizer(tokenizer_models.BPE(vocabulary, merges, unk_token="<|pad|>"))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    chat = Chat(PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|pad|>",
                                        chat_template=CHATML))
    he, llo, hello = (vocabulary[token] for token in ("he", "llo", "hello"))
    assert chat.tokenize("hello") == [hello]
    engine = Scripted(chat, lambda id, turn: [he, llo])
    rows, transcripts = collect(engine, chat, lambda: Talk((0.0, 1.0)), [0], [0], [0], **PLAY)
    row, end = rows[0], chat.tokenizer.eos_token_id
    assert row.tokens[row.action_mask].tolist() == [he, llo, end] * 2
    first, second = engine.seen[0]
    assert second[:len(first) + 3] == first + [he, llo, end] and hello not in second
    assert row.tokens[:len(second)].tolist() == second
    assert "hello" in transcripts[0][1]["content"].replace(" ", "")


def test_a_template_that_drops_thinking_is_named_and_what_was_sampled_only_grows():
    chat = chat_of(STRIPS)
    assert "thinking" in chat.rewritten_history()
    engine = Scripted(chat, lambda id, turn: "<think>why</think>yes")
    rows, _ = collect(engine, chat, lambda: Talk((0.0, 0.0, 1.0)), [0], [0], [0], **PLAY)
    for earlier, later in zip(engine.seen[0], engine.seen[0][1:] + [rows[0].tokens.tolist()]):
        assert later[:len(earlier)] == earlier
    assert chat.text(rows[0].tokens[rows[0].action_mask].tolist()) == "<think>why</think>yes" * 3


def test_a_special_token_that_the_model_writes_moves_no_mask():
    chat = chat_of(CHATML)
    start = chat.tokenizer.convert_tokens_to_ids("<|im_start|>")
    plain, hostile = ([chat.tokenize("a")[0], token, chat.tokenize("b")[0]] for token in (chat.tokenize("c")[0], start))
    masks = []
    for answer in (plain, hostile):
        row, = played(chat, lambda id, turn: answer, lambda: Talk((0.0, 1.0)))
        masks.append(row.action_mask.tolist())
    assert masks[0] == masks[1] and start in row.tokens[row.action_mask]


MAPS = """
import json
from envs import FrozenLake
from tasks.sokoban import Sokoban
boards = []
for task in (FrozenLake(), FrozenLake(random_start=True, size=5), Sokoban(), Sokoban(size=8, boxes=2)):
    for problem in task.problems("train", 3) + task.problems("heldout", 2):
        boards.append([task.reset(problem, seed=7), task.reset(problem, seed=8)])
print(json.dumps(boards))
"""


def test_a_problem_is_the_same_board_in_every_process_and_for_the_whole_group():
    printed = [subprocess.run([sys.executable, "-c", MAPS], cwd=ROOT, env=os.environ | {"PYTHONHASHSEED": seed},
                              capture_output=True, text=True, check=True, timeout=120).stdout for seed in ("1", "2")]
    assert printed[0] == printed[1]
    boards = json.loads(printed[0])
    assert len(boards) == 20 and all(first == second for first, second in boards)


@pytest.mark.parametrize("name, options", [("frozenlake", {"size": "2"}), ("sokoban", {"boxes": "4", "max_moves": "16"})])
def test_looking_for_rooms_ends_where_there_are_no_more(name, options):
    started = time.time()
    task = make_env_factory(name, options)()
    with pytest.raises(ValueError, match="ask for fewer|allow more moves"):
        task.problems("train", 100_000)
    assert time.time() - started < 60


def test_one_environment_of_eight_that_raises_costs_one_row_and_is_counted(run_task, monkeypatch):
    monkeypatch.setattr("runtime.watch.ENV_ERRORS", 0.2)
    metrics, _, updates = run_task(
        "if self.problem_id == 0 and self.number == 2:\n    raise RuntimeError('the tool is gone')\n" +
        RIGHT_EVERY_OTHER_TIME, "--group-size", 4, "--replay", "none")
    assert metrics[0]["fresh/env_errors"] == 0.125
    assert len(updates[0][1]) == 7 and metrics[0]["fresh/nonzero_advantage_rows"] == 1.0


def test_a_retriever_that_is_down_is_an_error_not_a_wrong_answer(tmp_path, monkeypatch):
    monkeypatch.setattr(search_qa, "BACKOFF", 0.01)

    class Retriever(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            body = json.dumps({"result": [[{"document": {"contents": '"Paris"\nThe capital of France.'}}]]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Retriever)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    questions = tmp_path / "questions.jsonl"
    questions.write_text(json.dumps({"question": "What is the capital of France?", "answers": ["Paris"]}) + "\n")
    url = f"http://127.0.0.1:{server.server_address[1]}/retrieve"
    make_env = lambda: SearchQA(retriever=url, questions=str(questions), cache_dir=str(tmp_path))  # noqa: E731
    chat = chat_of(CHATML)
    told = ("<search>capital of France</search>", "<answer>Paris</answer>")
    rows = played(chat, lambda id, turn: told[turn], make_env, context_length=5000)
    assert rows[0].score == 1.0 and not rows[0].info["env_error"]
    server.shutdown()
    server.server_close()
    told = ("<search>capital city of France</search>", "<answer>Paris</answer>")
    rows = played(chat, lambda id, turn: told[turn], make_env, context_length=5000)
    assert "RetrieverError" in rows[0].info["env_error"] and rows[0].info["turns"] == 1


def test_a_run_can_be_repeated_from_what_it_leaves(run_task):
    _, run, _ = run_task(RIGHT_EVERY_OTHER_TIME, "--seed", 5, "--lr", 0.003)
    again = parse_args(["--resume", str(run), "--iterations", "2"])
    assert (again.seed, again.lr, again.replay, again.tau) == (5, 0.003, "fresh", 30.0)
    for name in ("config.yaml", "metrics.jsonl", "episodes.jsonl", "summary.json", "learning_curve.png"):
        assert (run / name).stat().st_size > 0
    for config in (ROOT / "configs").glob("*.yaml"):  # a published config says what to expect of it
        assert config.read_text().lstrip().startswith("#")
