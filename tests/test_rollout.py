import functools
import json
import math
import sys
import time

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GraniteConfig, LlamaConfig, MistralConfig

from conftest import tiny_lake
from engines.hf import HFEngine
from envs import FrozenLake
from models import collate, load_policy, token_logprobs
from policies.chat import Chat
from rollout import collect

PLAY = dict(max_turns=6, max_new_tokens=6, temperature=1.3, format_penalty=0.15, policy_step=4, iteration=2, context_length=1024)


@pytest.fixture(scope="module")
def policy(tiny_folder):
    return load_policy(tiny_folder)


def engine_of(policy):
    return HFEngine(policy[0], [policy[1].eos_token_id], policy[1].pad_token_id)


def play(policy, problems, seeds, engine=None, **changes):
    return collect(engine or engine_of(policy), Chat(policy[1]), tiny_lake, list(problems), list(range(len(problems))), list(seeds),
                   **(PLAY | changes))


def test_behaviour_logprobs_are_the_trainers_at_the_sampling_temperature(policy):
    episodes, _ = play(policy, range(24), range(24))
    batch = collate([{"tokens": episode.tokens.astype(np.int64), "mask": episode.action_mask,
                      "behavior": episode.behavior_logprobs} for episode in episodes], pad_id=0)
    assert len({len(episode.tokens) for episode in episodes}) > 5  # ragged: gaps in the cache
    with torch.no_grad():
        logprobs_BT, _ = token_logprobs(policy[0], batch["tokens"], batch["mask"], PLAY["temperature"])
    assert (logprobs_BT - batch["behavior"]).abs().max() < 1e-4
    assert (logprobs_BT[batch["mask"]] < -1e-3).any()


def test_ragged_turns_equal_one_sequence_at_a_time_under_greedy(policy):
    model, tokenizer = policy
    generator = np.random.default_rng(0)
    engine = engine_of(policy)
    sequences = [generator.integers(6, 40, size=length).tolist() for length in (5, 17, 9)]
    plain = [list(sequence) for sequence in sequences]
    for turn in range(3):
        completions = engine.generate(sequences, [7, 8, 9], [0, 0, 0], max_new_tokens=4, temperature=1e-4)
        for row, completion in enumerate(completions):
            expected = []
            for _ in range(4):
                with torch.no_grad():
                    token = model(torch.tensor([plain[row] + expected])).logits[0, -1].argmax().item()
                expected.append(token)
                if token == tokenizer.eos_token_id:
                    break
            assert completion.tokens == expected
            observation = generator.integers(6, 40, size=3 + 4 * row).tolist()
            sequences[row] = sequences[row] + completion.tokens + observation
            plain[row] = plain[row] + expected + observation


def test_the_same_seeds_give_the_same_episodes_whoever_plays_beside_them(policy):
    engine = engine_of(policy)
    first, _ = play(policy, range(12), range(12), engine)
    second, _ = play(policy, range(12), range(12), engine)
    other, _ = play(policy, range(12), range(100, 112), engine)
    alone, _ = play(policy, [3], [3])
    assert all((a.tokens == b.tokens).all() for a, b in zip(first, second, strict=True))
    assert any(len(a.tokens) != len(b.tokens) or (a.tokens != b.tokens).any() for a, b in zip(first, other))
    assert (alone[0].tokens == first[3].tokens).all()


def test_sampled_tokens_follow_the_distribution(policy):
    model, _ = policy
    prompt, n = [4, 10, 11, 5], 4000
    completions = engine_of(policy).generate([prompt] * n, list(range(n)), list(range(n)), max_new_tokens=1, temperature=1.0)
    counts = np.bincount([completion.tokens[0] for completion in completions], minlength=model.config.vocab_size)
    with torch.no_grad():
        expected = n * model(torch.tensor([prompt])).logits[0, -1].softmax(-1).double().numpy()
    assert (np.abs(counts - expected) <= 5 * np.sqrt(expected) + 1).all()
    assert completions[0].logprobs[0] == pytest.approx(np.log(expected[completions[0].tokens[0]] / n), abs=1e-4)


def test_a_turn_costs_its_new_tokens_only_and_finished_episodes_leave(policy):
    engine, fed = engine_of(policy), []
    forward = engine.forward
    engine.forward = lambda rows, chunks: fed.append(chunks) or forward(rows, chunks)
    episodes, _ = play(policy, tiny_lake().problems("train", 16), range(16), engine)  # no prompt is shared
    total = sum(len(chunk) for chunks in fed for chunk in chunks)
    # every token but each episode's last answer's last one goes through the model once
    assert total == sum(len(episode.tokens) - 1 for episode in episodes)
    rows = [len(chunks) for chunks in fed]
    assert rows[0] == 16 and rows[-1] < 16
    assert all(len(chunk) for chunks in fed for chunk in chunks)  # nobody is in a batch without a token of its own


def test_stop_tokens_are_trained_when_sampled_and_not_invented_at_the_limit(policy):
    stop = policy[1].eos_token_id
    episodes, _ = play(policy, range(40), range(40), max_new_tokens=2)
    limit_hits = 0
    for episode in episodes:
        starts = np.flatnonzero(np.diff(episode.action_mask.astype(int)) == 1) + 1
        for start, end in zip(starts, episode.turn_ends):
            assert episode.action_mask[start:end].all() and end - start <= 2
            if episode.tokens[end - 1] != stop:
                limit_hits += 1
                if end < len(episode.tokens):  # the template closes the turn, outside the mask
                    assert episode.tokens[end] == stop and not episode.action_mask[end]
    assert limit_hits and limit_hits == sum(episode.info["length_stops"] for episode in episodes)


def test_records_agree_with_what_was_played(policy):
    episodes, transcripts = play(policy, range(30), range(30))
    for episode, transcript in zip(episodes, transcripts):
        turns = len(episode.turn_ends)
        assert turns == episode.info["turns"] == len(transcript) // 2
        assert episode.reward == pytest.approx(episode.score - 0.15 * episode.info["parse_failures"])
        assert episode.reward == pytest.approx(float(episode.turn_rewards.sum()), abs=1e-6)
        assert episode.score == float(episode.info["success"])
        assert (episode.policy_step, episode.iteration) == (4, 2)
        assert episode.turn_ends[-1] == len(episode.tokens)  # nothing after the last answer
        starts = [0, *episode.turn_ends]
        answers = [policy[1].decode(episode.tokens[a:b][episode.action_mask[a:b]], skip_special_tokens=True)
                   for a, b in zip(starts, episode.turn_ends)]
        assert answers == [message["content"] for message in transcript if message["role"] == "assistant"]
    assert any(episode.info["parse_failures"] for episode in episodes)


def test_an_episode_that_would_not_fit_ends_at_a_turn(policy):
    episodes, _ = play(policy, range(8), range(8), context_length=120, max_turns=20)
    assert all(len(episode.tokens) <= 120 for episode in episodes)
    assert any(episode.info["truncated"] for episode in episodes)


def test_a_sync_forgets_what_was_computed_with_the_old_weights(tiny_folder):
    model, tokenizer = load_policy(tiny_folder)
    engine = HFEngine(model, [tokenizer.eos_token_id], tokenizer.pad_token_id)
    prompt = [4, 10, 11, 5]
    engine.generate([prompt], [0], [0], max_new_tokens=1, temperature=1.0)
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.mul_(1.5)
    engine.sync()
    completion, = engine.generate([prompt], [0], [0], max_new_tokens=1, temperature=1.0)
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)[completion.tokens[0]].item()
    assert completion.logprobs[0] == pytest.approx(expected, abs=1e-5)


def test_an_environment_that_raises_costs_one_episode(policy):
    from judge import add_advantages
    from settings import Args
    from update import make_learner

    class Broken(FrozenLake):
        made = 0

        def __init__(self):
            super().__init__(prompt="tiny")
            self.number, Broken.made = Broken.made, Broken.made + 1

        def step(self, answer):
            if self.number == 3:
                raise RuntimeError("the lake is frozen solid")
            return super().step(answer)

    episodes, _ = collect(engine_of(policy), Chat(policy[1]), Broken, [0] * 8, [0] * 8, list(range(8)), **PLAY)
    assert [bool(episode.info["env_error"]) for episode in episodes] == [False] * 3 + [True] + [False] * 4
    assert "frozen solid" in episodes[3].info["env_error"]
    rewards = np.array([episode.reward for episode in episodes if not episode.info["env_error"]])
    for algo in ("grpo", "reinforce++"):
        add_advantages(make_learner(Args(algo=algo), policy[0]), episodes)
        assert not episodes[3].advantages.any()
    add_advantages(make_learner(Args(algo="grpo"), policy[0]), episodes)
    expected = (rewards - rewards.mean()) / max(rewards.std(ddof=1), 1e-6)
    found = [episode.advantages[episode.action_mask][0] for episode in episodes if not episode.info["env_error"]]
    assert found == pytest.approx(expected, abs=1e-4)


def test_a_first_message_longer_than_the_context_ends_the_episode_before_its_first_turn(policy):
    (episode,), (transcript,) = play(policy, [0], [0], context_length=40)
    assert not episode.action_mask.any() and len(transcript) == 1 and episode.reward == 0
    assert episode.info["truncated"] and episode.info["context_full"] and episode.info["overlong"]
    assert episode.info["turns"] == 0


def test_weights_that_are_not_finite_are_named(tiny_folder):
    model, tokenizer = load_policy(tiny_folder)
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="not finite"):
        engine_of((model, tokenizer)).generate([[4, 10]], [0], [0], max_new_tokens=1, temperature=1.0)


def greedy(model, sequence, count, stop_ids=()):
    """One sequence, one token at a time, no cache."""
    tokens, logprobs = [], []
    for _ in range(count):
        with torch.no_grad():
            logprobs_V = model(torch.tensor([sequence + tokens])).logits[0, -1].log_softmax(-1)
        tokens.append(logprobs_V.argmax().item())
        logprobs.append(logprobs_V.max().item())
        if tokens[-1] in stop_ids:
            break
    return tokens, logprobs


def test_temperature_0_is_greedy_with_the_log_probs_of_temperature_1(policy):
    generator = np.random.default_rng(1)
    sequences = [generator.integers(6, 40, size=length).tolist() for length in (30, 7, 7, 19)]
    completions = engine_of(policy).generate(sequences, [0, 1, 2, 3], [0] * 4, max_new_tokens=7, temperature=0)
    for sequence, completion in zip(sequences, completions):
        tokens, logprobs = greedy(policy[0], sequence, 7, [policy[1].eos_token_id])
        assert completion.tokens == tokens and completion.logprobs == pytest.approx(logprobs, abs=1e-4)


def test_random_ragged_conversations_equal_the_plain_model(policy):
    """Many turns of random lengths, rows that finish inside a turn, that leave, that come back rewritten, that join late."""
    model, tokenizer = policy
    generator, engine = np.random.default_rng(2), engine_of(policy)
    talks = {id: generator.integers(6, 40, size=generator.integers(2, 60)).tolist() for id in range(10)}
    talks[4], talks[5] = list(talks[3]), list(talks[3])  # one prompt, three conversations
    for turn in range(6):
        ids = sorted(generator.choice(10, size=generator.integers(3, 9), replace=False).tolist(), key=lambda id: (id * 7) % 10)
        if turn == 3:  # rewritten in the middle: what was cached behind it must go
            talks[ids[0]] = talks[ids[0]][:5] + [9, 8, 7] + talks[ids[0]][8:]
        limit = int(generator.integers(1, 9))
        completions = engine.generate([talks[id] for id in ids], ids, [turn] * len(ids), max_new_tokens=limit, temperature=0)
        for id, completion in zip(ids, completions):
            tokens, logprobs = greedy(model, talks[id], limit, [tokenizer.eos_token_id])
            assert completion.tokens == tokens and completion.logprobs == pytest.approx(logprobs, abs=1e-4)
            assert completion.finish_reason == ("stop" if tokens[-1] == tokenizer.eos_token_id else "length")
            talks[id] = talks[id] + tokens + generator.integers(6, 40, size=generator.integers(1, 30)).tolist()


def test_a_prompt_that_a_group_shares_is_read_once(policy):
    engine, fed = engine_of(policy), []
    forward = engine.forward
    engine.forward = lambda rows, chunks: fed.append(chunks) or forward(rows, chunks)
    prompts = [[4, *range(10, 30), 5]] * 8 + [[4, *range(20, 40), 5]] * 8
    completions = engine.generate(prompts, list(range(16)), list(range(16)), max_new_tokens=3, temperature=1.0)
    assert [len(chunks) for chunks in fed][0] == 2
    for prompt, seed, completion in zip(prompts, range(16), completions):
        alone, = engine_of(policy).generate([prompt], [0], [seed], max_new_tokens=3, temperature=1.0)
        assert completion.tokens == alone.tokens and completion.logprobs == pytest.approx(alone.logprobs, abs=1e-5)


def test_finished_rows_cost_nothing_within_a_turn(policy):
    engine, fed = engine_of(policy), []
    forward = engine.forward
    engine.forward = lambda rows, chunks: fed.append(len(chunks)) or forward(rows, chunks)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(6, 40, size=12).tolist() for _ in range(32)]
    completions = engine.generate(prompts, list(range(32)), list(range(32)), max_new_tokens=40, temperature=2.0)
    lengths = [len(completion.tokens) for completion in completions]
    assert min(lengths) < max(lengths) and sum(fed) == 32 + sum(length - 1 for length in lengths)


def test_a_stop_string_ends_a_turn_and_stays_in_it(policy):
    model, tokenizer = policy
    engine = HFEngine(model, [], tokenizer.pad_token_id, Chat(tokenizer).text)
    prompt = Chat(tokenizer).start(tiny_lake().reset(0, 0))
    found = engine.generate([prompt] * 16, list(range(16)), list(range(16)), max_new_tokens=8, temperature=1.0, stop=("</answer>",))
    ended = [completion for completion in found if completion.finish_reason == "stop"]
    assert len(ended) > 8
    for completion in found:
        text = tokenizer.decode(completion.tokens)
        assert text.count("</answer>") == (completion.finish_reason == "stop")
        assert completion.finish_reason == "length" or text.endswith("</answer>")


def test_weights_in_another_layout_of_attention_are_refused(tiny_folder):
    model, tokenizer = load_policy(tiny_folder)
    model.config.layer_types = ["full_attention", "sliding_attention"] * 2
    with pytest.raises(ValueError, match="sliding_attention.*use --engine vllm"):
        HFEngine(model, [tokenizer.eos_token_id], tokenizer.pad_token_id)


def test_the_trainers_attention_is_untouched_by_sampling(policy):
    engine_of(policy).generate([[4, 10, 11]], [0], [0], max_new_tokens=2, temperature=1.0)
    assert policy[0].config._attn_implementation == "sdpa"


@pytest.mark.parametrize("slow_task", [False, True])
def test_an_environment_that_calls_exit_costs_one_episode(policy, slow_task):
    class Leaves(FrozenLake):
        slow = slow_task

        def step(self, answer):
            sys.exit(0)

    episodes, _ = collect(engine_of(policy), Chat(policy[1]), functools.partial(Leaves, prompt="tiny"), [0, 1], [0, 1], [0, 1], **PLAY)
    assert all("SystemExit" in episode.info["env_error"] for episode in episodes)


def test_an_environment_that_raises_at_its_start_costs_one_episode(policy):
    class Closed(FrozenLake):
        def reset(self, problem_id, seed):
            if problem_id == 1:
                raise ConnectionError("the lake is closed")
            return super().reset(problem_id, seed)

    episodes, transcripts = collect(engine_of(policy), Chat(policy[1]), functools.partial(Closed, prompt="tiny"), [0, 1, 2], [0, 1, 2], [0, 1, 2], **PLAY)
    assert ["closed" in episode.info["env_error"] for episode in episodes] == [False, True, False]
    assert not episodes[1].action_mask.any() and episodes[0].action_mask.any() and len(transcripts[1]) == 1


def test_slow_environments_step_side_by_side_and_in_order(policy):
    under_way, at_once = [], []

    class Slow(FrozenLake):
        slow = True

        def step(self, answer):
            under_way.append(self.number)
            at_once.append(len(under_way))
            time.sleep(0.02 * (self.number % 3))
            under_way.remove(self.number)
            return super().step(answer)

        def reset(self, problem_id, seed):
            self.number = problem_id
            return super().reset(problem_id, seed)

    slow, _ = collect(engine_of(policy), Chat(policy[1]), functools.partial(Slow, prompt="tiny"), list(range(24)), list(range(24)), list(range(24)), **PLAY)
    fast, _ = play(policy, range(24), range(24))
    assert all((a.tokens == b.tokens).all() for a, b in zip(slow, fast, strict=True))
    assert max(at_once) > 4


def test_what_the_task_tells_reaches_the_record_and_cannot_replace_the_loops_own(policy):
    class Telling(FrozenLake):
        def reset(self, problem_id, seed):
            message = super().reset(problem_id, seed)
            self.info = {"true_return": 3.5, "prediction": "x", "success": "mine", "turns": -1}
            return message

    (episode,), _ = collect(engine_of(policy), Chat(policy[1]), functools.partial(Telling, prompt="tiny"), [0], [0], [0], **PLAY)
    assert episode.info["true_return"] == 3.5 and episode.info["prediction"] == "x"
    assert episode.info["success"] in (True, False) and episode.info["turns"] == len(episode.turn_ends)


def test_waves_of_episodes_equal_all_at_once(policy):
    whole, _ = play(policy, range(10), range(10))
    waves, transcripts = play(policy, range(10), range(10), parallel=3)
    assert len(transcripts) == 10 and all((a.tokens == b.tokens).all() for a, b in zip(whole, waves, strict=True))


def test_overlong_is_a_last_turn_cut_by_the_limit_or_a_full_context(policy):
    episodes, _ = play(policy, range(30), range(30), max_new_tokens=4, max_turns=3)
    for episode in episodes:
        assert episode.info["overlong"] == (episode.tokens[-1] != policy[1].eos_token_id)
    assert {episode.info["overlong"] for episode in episodes} == {True, False}


@pytest.mark.parametrize("fault", ["None", "three", "nan", "huge", "message", "surrogate", "numpy info", "object info", "success raises",
                                   "nan info"])
def test_whatever_one_environment_does_wrong_costs_its_episode_only(policy, fault):
    class Odd(FrozenLake):
        def reset(self, problem_id, seed):
            self.odd = problem_id == 1
            message = super().reset(problem_id, seed)
            if self.odd and "info" in fault:
                self.info |= {"x": {"numpy info": np.int64(3), "object info": object(), "nan info": [math.nan]}[fault]}
            return message

        def step(self, answer):
            result = super().step(answer)
            if not self.odd:
                return result
            return {"None": None, "three": result[:3], "nan": (result[0], math.nan, *result[2:]), "huge": (result[0], 1e39, *result[2:]),
                    "message": (None, 0.0, False, True), "surrogate": ("\ud800", 0.0, False, True)}.get(fault, result)

        @property
        def success(self):
            if fault == "success raises" and getattr(self, "odd", False):
                raise RuntimeError("no idea")
            return self._success

        @success.setter
        def success(self, value):
            self._success = value

    episodes, transcripts = collect(engine_of(policy), Chat(policy[1]), functools.partial(Odd, prompt="tiny"), [0, 1, 2, 3], [0, 0, 0, 0],
                                    [0, 1, 2, 3], **PLAY)
    broken = [bool(episode.info["env_error"]) for episode in episodes]
    assert broken == [False, fault != "numpy info", False, False]
    json.dumps([episode.info for episode in episodes], allow_nan=False)
    if fault == "numpy info":
        assert episodes[1].info["x"] == 3


def test_ids_are_plain_integers_for_a_task(policy):
    seen = []

    class Noting(FrozenLake):
        def reset(self, problem_id, seed):
            seen.append((type(problem_id), type(seed)))
            return super().reset(problem_id, seed)

    collect(engine_of(policy), Chat(policy[1]), functools.partial(Noting, prompt="tiny"), np.arange(2), [0, 1], np.arange(2), **PLAY)
    assert set(seen) == {(int, int)}


@pytest.mark.parametrize("config, words", [
    (MistralConfig(sliding_window=8), "sliding_attention"),
    (LlamaConfig(rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}), "dynamic")])
def test_models_whose_keys_cannot_be_kept_are_refused(config, words):
    small = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=60)
    config.update(small)
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match=f"{words}.*use --engine vllm"):
        HFEngine(model, [1], 0)


def test_a_model_that_scales_its_logits_is_refused():
    from models import check_head
    small = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=60,
                 initializer_range=0.3)
    with pytest.raises(ValueError, match="scales or caps its logits"):
        check_head(AutoModelForCausalLM.from_config(GraniteConfig(logits_scaling=8.0, **small)), "x")
    check_head(AutoModelForCausalLM.from_config(LlamaConfig(**small)), "x")


def test_nothing_to_generate_and_a_conversation_twice(policy):
    assert engine_of(policy).generate([], [], [], 4, 1.0) == []
    with pytest.raises(ValueError, match="twice"):
        engine_of(policy).generate([[4], [5]], [0, 0], [0, 0], 4, 1.0)


def test_a_stop_string_of_many_byte_tokens_is_found(policy):
    engine = HFEngine(policy[0], [], policy[1].pad_token_id, lambda tokens: bytes(tokens).decode(errors="replace"))
    assert engine.ends_with(list("a lot before ストップ".encode()), ("ストップ",))
    assert not engine.ends_with(list("a lot before ストッ".encode()), ("ストップ",))
