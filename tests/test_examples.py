"""The examples: a task of one's own keeps the contract at the top of envs.py, and trains."""
import json

import numpy as np
import pytest
from conftest import ROOT, train

from envs import load_env, make_env_factory

GUESS = f"{ROOT / 'examples' / 'guess.py'}:Guess"
WITHOUT_PLAYER = '''
class Silent:
    name, stop, slow, success = "silent", (), False, False

    def problems(self, split, count):
        return list(range(count)) if split == "train" else list(range(1000, 1000 + count))

    def reset(self, problem_id, seed):
        self.info = {}
        return "Walk"

    def step(self, answer):
        return "", 0.0, True, True

    def render(self):
        return ""
'''


def guess(**options):
    return make_env_factory(GUESS, {name: str(value) for name, value in options.items()})()


def test_the_splits_share_no_number():
    env = guess(top=64)
    train_ids, heldout_ids = env.problems("train", 48), env.problems("heldout", 16)
    assert sorted(train_ids + heldout_ids) == list(range(1, 65))
    assert env.problems("train", 5) == train_ids[:5]
    with pytest.raises(ValueError, match="16 heldout numbers up to 64, 17 were asked for"):
        env.problems("heldout", 17)


@pytest.mark.parametrize("options, message", [({"top": 7}, "top=7"), ({"prompt": "short"}, "prompt=short")])
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        guess(**options)


@pytest.mark.parametrize("prompt", ["full", "tiny"])
def test_bisecting_finds_every_number(prompt):
    env, rng = guess(top=64, prompt=prompt), np.random.default_rng(0)
    for secret in range(1, 65):
        env.reset(secret, seed=0)
        for _ in range(7):
            _, score, done, valid = env.step(env.scripted_answer(rng, skill=1.0))
            assert valid
            if done:
                break
        assert done and score == 1.0 and env.success and env.info["guesses"] <= 7


def test_a_player_without_skill_still_finds_it():
    env, rng = guess(top=64), np.random.default_rng(0)
    env.reset(17, seed=0)
    while not env.success:
        env.step(env.scripted_answer(rng, skill=0.0))
    assert "17" in env.render()


@pytest.mark.parametrize("answer", ["", "7", "<answer></answer>", "<answer>1</answer><answer>2</answer>", "<answer>-7</answer>",
                                    "<answer>x</answer>", "<answer>7 8</answer>"])
def test_what_is_no_guess_is_a_turn_without_one(answer):
    env = guess(top=64)
    env.reset(7, seed=0)
    message, score, done, valid = env.step(answer)
    assert "No valid answer" in message and (score, done, valid) == (0.0, False, False) and env.info["guesses"] == 0


def test_the_tiny_prompt_says_what_is_left_in_words_that_the_tokenizer_knows():
    from policies.tiny import tiny_tokenizer
    env = guess(top=64, prompt="tiny")
    tokenizer = tiny_tokenizer(env.tiny_words)
    assert env.reset(20, seed=0) == "between 01 and 64"
    for answer, left in (("<answer> 3 2 </answer>", "between 01 and 31"), ("<answer>9</answer>", "between 10 and 31"),
                         ("nothing", "between 10 and 31"), ("<answer>5</answer>", "between 10 and 31")):
        message = env.step(answer)[0]
        assert message == left
        assert tokenizer.unk_token_id not in tokenizer(message)["input_ids"]


def test_the_loader_takes_the_class():
    assert load_env(GUESS).name == "guess"


def test_the_tiny_policy_trains_on_it(tmp_path, quick_flags):
    flags = quick_flags + ["--train-problems", "32", "--runs-dir", tmp_path, "--name", "guess", "--iterations", "1"]
    train("--env", GUESS, "--env-options", "top", "64", *flags)
    (line,) = map(json.loads, (tmp_path / "guess" / "metrics.jsonl").read_text().splitlines())
    assert line["fresh/parse_failures"] < 0.9 and line["task/guesses"] > 0


def test_a_task_without_a_scripted_player_is_refused_for_the_tiny_policy(tmp_path, quick_flags):
    (tmp_path / "silent.py").write_text(WITHOUT_PLAYER)
    done = train("--env", f"{tmp_path / 'silent.py'}:Silent", *quick_flags, "--runs-dir", tmp_path / "runs", check=False)
    assert done.returncode == 2
    assert "--model tiny learns from a scripted player, which silent has none of" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()
