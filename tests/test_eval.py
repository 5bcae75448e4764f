"""Evaluation: its numbers against enumeration, and its command line on a run that was never trained."""
import itertools
import json
import shutil
from dataclasses import asdict

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model

import eval as eval_module
from engines.hf import HFEngine
from envs import FrozenLake
from eval import averages, dispatch, evaluate, majority, outcome, pass_all_k, pass_at_k, seeds_of, summarise, wilson_interval
from models import load_policy
from policies.chat import Chat
from runtime.files import digest
from settings import Args


def row(problem=0, success=False, **info):
    return {"problem_id": problem, "success": success, "score": float(success), "tokens": 10, "sampled_tokens": 4,
            "info": {"turns": 2, "parse_failures": 1, "length_stops": 0, "truncated": False, "context_full": False,
                     "env_error": ""} | info}


# ------------------------------------------------------------------------------------------------------------- numbers


def test_pass_at_k_and_pass_all_k_are_shares_of_all_subsets():
    for n in range(1, 8):
        for right in range(n + 1):
            for k in range(1, n + 1):
                subsets = list(itertools.combinations([1] * right + [0] * (n - right), k))
                assert pass_at_k(n, right, k) == pytest.approx(np.mean([any(subset) for subset in subsets]), abs=1e-12)
                assert pass_all_k(n, right, k) == pytest.approx(np.mean([all(subset) for subset in subsets]), abs=1e-12)


@given(st.integers(1, 2000), st.data())
def test_pass_at_k_is_exact_for_many_samples(n, data):
    right, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    assert 0 <= pass_all_k(n, right, k) <= right / n <= pass_at_k(n, right, k) <= 1
    assert pass_at_k(n, right, 1) == pass_all_k(n, right, 1) == pytest.approx(right / n)
    assert pass_at_k(n, right, k) == pytest.approx(1 - pass_all_k(n, n - right, k), abs=1e-12)
    assert pass_at_k(n, 1, k) == pytest.approx(k / n)  # the right one is among k of n


def test_the_mean_of_pass_at_k_has_no_bias():
    """Its expectation over c ~ Binomial(n, p) is 1 - (1-p)^k, exactly."""
    n, p = 6, 0.3
    for k in range(1, n + 1):
        chances = [len(list(itertools.combinations(range(n), c))) * p**c * (1 - p)**(n - c) for c in range(n + 1)]
        assert sum(chance * pass_at_k(n, c, k) for c, chance in enumerate(chances)) == pytest.approx(1 - (1 - p)**k)
        assert sum(chance * pass_all_k(n, c, k) for c, chance in enumerate(chances)) == pytest.approx(p**k)


@pytest.mark.parametrize("votes, expected", [
    ([("4", True), ("5", False), ("4", True)], 1.0),
    ([("4", True), ("5", False), ("5", False)], 0.0),
    ([("4", True), ("5", False)], 0.5),  # a tie: the mean over those that tie
    ([("4", True), ("5", False), ("6", False)], pytest.approx(1 / 3)),
    ([("4", True), (None, False), ("", False), (None, False)], 1.0),  # no answer is no vote
    ([(None, False), ("", False)], 0.0),
    ([(4, True), ("4", True), ("5", False)], 1.0),
])
def test_majority_votes_by_prediction(votes, expected):
    assert majority([row(success=success, prediction=prediction) for prediction, success in votes]) == expected


def test_a_crashed_sample_does_not_vote():
    crashed = [row(success=False, prediction="5", env_error="Traceback ...") for _ in range(3)]
    assert majority([row(success=True, prediction="4"), *crashed]) == 1.0


def test_a_crashed_episode_counts_as_a_failure():
    class Played:  # 4 episodes, 1 crashes, 2 succeed: 0.5, not 2/3
        problem_id, score, tokens, action_mask = 0, 1.0, [1, 2], np.array([False, True])

        def __init__(self, success, error=""):
            self.info = row()["info"] | {"success": success, "env_error": error}

    result = averages([outcome(episode) for episode in (Played(True), Played(True), Played(False), Played(True, "Traceback"))])
    assert result["success"] == 0.5 and result["env_errors"] == 0.25


def test_averages_by_hand():
    rows = [row(0, True, turns=3, parse_failures=0, exact_match=1.0, question="?"), row(1, False, turns=1, truncated=True),
            row(1, True, exact_match=0.0, found=True)]
    result = averages(rows)
    assert result["parse_failures"] == pytest.approx(2 / 6) and result["turns"] == 2
    assert result["truncated"] == pytest.approx(1 / 3)
    assert result["success"] == pytest.approx(2 / 3) and (result["tokens"], result["sampled_tokens"]) == (10, 4)
    assert result["problems"] == 2
    assert eval_module.task_averages(rows) == {"exact_match": 0.5, "found": 1.0}


def test_summarise_by_hand():
    by_problem = [[row(0, True), row(0, True)], [row(1, True), row(1, False)], [row(2, False), row(2, False)]]
    result = summarise(by_problem, [1, 2])
    assert result["success"] == result["pass@1"] == result["pass^1"] == pytest.approx((1 + 0.5 + 0) / 3)
    assert result["pass@2"] == pytest.approx(2 / 3) and result["pass^2"] == pytest.approx(1 / 3)
    assert (result["problems"], result["samples"], result["episodes"], result["majority"]) == (3, 2, 6, None)
    # pass@2 is 0 or 1 for each problem: Wilson's interval of 2 in 3 problems, not of 6 episodes
    assert (result["pass@2_low"], result["pass@2_high"]) == pytest.approx(wilson_interval(2, 3))
    # success is not: all 27 resamples of the problems, of which one in 27 is all zeros and one all ones
    assert (result["success_low"], result["success_high"]) == (0.0, 1.0)


def test_a_single_sample_has_wilsons_interval():
    result = summarise([[row(problem, problem < 8)] for problem in range(10)], [])
    assert (result["success_low"], result["success_high"]) == pytest.approx((0.4902, 0.9433), abs=1e-4)


def test_samples_of_one_problem_do_not_narrow_the_interval():
    """Problems whose samples all agree tell no more than one sample each would."""
    rng = np.random.default_rng(0)
    solved = rng.random(200) < 0.6
    one = summarise([[row(problem, bool(success))] for problem, success in enumerate(solved)], [])
    many = summarise([[row(problem, bool(success))] * 16 for problem, success in enumerate(solved)], [1])
    assert many["success"] == one["success"]
    assert many["success_high"] - many["success_low"] == pytest.approx(one["success_high"] - one["success_low"])


def test_the_bootstrap_covers_the_truth():
    """Of 200 evaluations with 60 problems of 4 samples, about 95 % hold the true success; bound: 4 standard errors."""
    rng, inside = np.random.default_rng(1), 0
    for _ in range(200):
        chances = rng.beta(1, 1, 60)  # mean 0.5
        right = rng.binomial(4, chances) / 4
        low, high = eval_module.bootstrap_interval(right[:, None], draws=400)
        inside += low[0] <= 0.5 <= high[0]
    assert abs(inside / 200 - 0.95) < 4 * np.sqrt(0.95 * 0.05 / 200)


def test_seeds_stay_those_of_published_numbers():
    assert seeds_of(512)[:3, 0].tolist() == [991890742, 1244524562, 273703588]
    assert (seeds_of(512, 4)[:, :2] == seeds_of(512, 2)).all(), "more samples leave the first ones"
    assert len(np.unique(seeds_of(512, 4))) == 4 * 512


# -------------------------------------------------------------------------------------------------------- command line


def seal(checkpoint):
    """Its files are as they should be."""
    digests = {path.name: {"sha256": digest(path)} for path in checkpoint.iterdir() if path.name != "manifest.json"}
    (checkpoint / "manifest.json").write_text(json.dumps(digests))


@pytest.fixture
def run(tmp_path, tiny_folder):
    """A run with one checkpoint, the warm-started policy itself."""
    folder = tmp_path / "run"
    shutil.copytree(tiny_folder, folder / "checkpoints" / "step_7")
    (folder / "checkpoints" / "step_7" / "state.json").write_text("{}")
    seal(folder / "checkpoints" / "step_7")
    config = asdict(Args(env_options={"prompt": "tiny"}, eval_problems=12, max_turns=3))
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


def evaluated(*words, out=None):
    dispatch([str(word) for word in words])
    return json.loads((out or words[0] / "eval.json").read_text())


def refused(capsys, *words):
    with pytest.raises(SystemExit) as stop:
        dispatch([str(word) for word in words])
    assert stop.value.code == 2
    return capsys.readouterr().err


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_command_line_gives_what_the_loop_gives(run, tiny_folder, capsys):
    policy, tokenizer = load_policy(tiny_folder)
    chat = Chat(tokenizer)
    make_env = lambda: FrozenLake(prompt="tiny")  # noqa: E731
    engine = HFEngine(policy, chat.stop_ids(), tokenizer.pad_token_id)
    in_loop = evaluate(engine, chat, make_env, make_env().problems("heldout", 12), temperature=1.0, max_turns=3, max_new_tokens=6,
                       format_penalty=0.15, context_length=1024)
    result = evaluated(run)
    assert in_loop["turns"] > 1 and {key: (result | result["task"])[key] for key in in_loop} == in_loop
    assert result["checkpoint"] == "step_7" and result["success_low"] <= result["success"] <= result["success_high"]
    assert "95 %" in capsys.readouterr().out
    lines = lines_of(run / "eval_episodes.jsonl")
    assert [line["problem_id"] for line in lines] == make_env().problems("heldout", 12)
    assert ["transcript" in line for line in lines] == [True] * 8 + [False] * 4


def test_an_evaluation_goes_on_where_it_was_stopped(run, tmp_path, monkeypatch, capsys):
    whole = evaluated(run, "--samples", "2", "--out", tmp_path / "whole.json", out=tmp_path / "whole.json")
    real, sizes = eval_module.collect, []

    def stopped(engine, chat, make_env, problem_ids, *rest, **how):
        sizes.append(len(problem_ids))
        if len(sizes) == 3:
            raise KeyboardInterrupt
        return real(engine, chat, make_env, problem_ids, *rest, **how)

    monkeypatch.setattr(eval_module, "collect", stopped)
    flags = [run, "--samples", "2", "--parallel-episodes", "5"]
    with pytest.raises(KeyboardInterrupt):
        dispatch([str(flag) for flag in flags])
    log = run / "eval_episodes.jsonl"
    assert len(lines_of(log)) == 10 and not (run / "eval.json").exists()
    log.write_text(log.read_text()[:-20])  # and the last line was cut
    assert evaluated(*flags) == whole
    assert sizes[3:] == [5, 5, 5] and "9 of 24 episodes are in" in capsys.readouterr().out
    assert evaluated(*flags) == whole and len(sizes) == 6, "nothing is left to play"
    assert evaluated(run, "--samples", "3")["episodes"] == 36 and sizes[6:] == [12], "only the third samples are played"
    assert evaluated(run, "--samples", "2", "--k", "2")["pass@2"] == whole["pass@2"]
    assert evaluated(run, "--temperature", "0.5")["episodes"] == 12 and sizes[7:] == [12], "another setting starts anew"
    weights = run / "checkpoints" / "step_7" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\0\0")
    seal(weights.parent)
    assert evaluated(run)["episodes"] == 12 and sizes[8:] == [12], "so do other weights under the same name"


def test_greedy_samples_are_one_and_the_same(run):
    result = evaluated(run, "--temperature", "0", "--samples", "3")
    assert result["temperature"] == 0 and result["pass@1"] == result["pass@2"] == result["pass^2"] == result["success"]
    rows = lines_of(run / "eval_episodes.jsonl")
    assert len({(line["problem_id"], line["tokens"], line["score"]) for line in rows}) == 12


TASK = '''
from envs import FrozenLake

class {name}(FrozenLake):
    """A single answer; success is a move down."""

    def __init__(self):
        super().__init__(prompt="tiny")

    def reset(self, problem_id, seed):
        self.info, self.problem = {{}}, problem_id
        return super().reset(problem_id, seed)

    def step(self, answer):
        if {fails}:
            raise RuntimeError("the lake is frozen solid")
        self.success = "Down" in answer
        self.info = {{"prediction": answer if "<answer>" in answer else None, "share_down": float(self.success)}}
        return "", float(self.success), True, "<answer>" in answer
'''


def test_majority_and_the_numbers_of_the_task(run, tmp_path, capsys):
    (tmp_path / "down.py").write_text(TASK.format(name="Down", fails="False"))
    result = evaluated(run, "--env", tmp_path / "down.py:Down", "--samples", "5", "--problems", "20")
    by_problem = {}
    for line in lines_of(run / "eval_episodes.jsonl"):
        by_problem.setdefault(line["problem_id"], []).append(line)
    assert len(by_problem) == 20
    assert result["majority"] == pytest.approx(np.mean([majority(lines) for lines in by_problem.values()]))
    assert result["success"] == result["task"]["share_down"] == pytest.approx(
        np.mean([line["success"] for lines in by_problem.values() for line in lines]))
    assert 0 < result["success"] < 1 and result["majority_low"] <= result["majority"] <= result["majority_high"]
    assert "majority" in capsys.readouterr().out
    assert evaluated(run, "--samples", "2")["majority"] is None and "n/a" in capsys.readouterr().out
    (tmp_path / "down.py").write_text((tmp_path / "down.py").read_text() + "# another task from here on")
    assert evaluated(run, "--env", tmp_path / "down.py:Down", "--samples", "5", "--problems", "20")["episodes"] == 100
    assert "episodes are in" not in capsys.readouterr().out, "nothing is taken from the task as it was"


def test_episodes_that_break_count_and_are_played_again(run, tmp_path, capsys):
    task = tmp_path / "brittle.py"
    mended = f"open({str(tmp_path / 'on')!r}).read()"
    task.write_text(TASK.format(name="Brittle", fails=f"self.problem % 3 == 0 and not {mended}"))
    (tmp_path / "on").write_text("")
    broken = evaluated(run, "--env", f"{task}:Brittle")
    share = np.mean([problem % 3 == 0 for problem in FrozenLake().problems("heldout", 12)])
    assert share > 0 and broken["env_errors"] == pytest.approx(share) and broken["episodes"] == 12
    assert f"{round(12 * share)} of 12 broken by the environment, counted as failures" in capsys.readouterr().out
    assert broken["success"] <= 1 - share
    (tmp_path / "on").write_text("yes")
    assert evaluated(run, "--env", f"{task}:Brittle")["env_errors"] == 0
    assert f"{12 - round(12 * share)} of 12 episodes are in" in capsys.readouterr().out


def test_a_checkpoint_finds_its_run_and_a_model_needs_a_task(run, tmp_path, tiny_folder, capsys):
    checkpoint = run / "checkpoints" / "step_7"
    assert evaluated(checkpoint)["success"] == evaluated(run)["success"]
    shutil.copytree(tiny_folder, tmp_path / "model")
    assert all(word in refused(capsys, tmp_path / "model") for word in ("belongs to no run", "--env"))
    assert all(word in refused(capsys, tmp_path / "model", "--env", "frozenlake") for word in ("does not know", "prompt tiny"))
    result = evaluated(tmp_path / "model", "--env", "frozenlake", "--env-options", "prompt", "tiny", "--max-turns", "3",
                       "--problems", "12")
    assert {key: result[key] for key in ("success", "tokens", "score")} == {
        key: evaluated(run)[key] for key in ("success", "tokens", "score")}


def test_the_run_s_context_length_holds_in_evaluation_too(run):
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert evaluated(run)["context_full"] == 0
    (run / "config.yaml").write_text(yaml.safe_dump(config | {"context_length": 100}))
    assert evaluated(run)["context_full"] > 0


def test_a_lora_checkpoint_is_loaded_with_its_base(run, tiny_folder):
    policy, tokenizer = load_policy(tiny_folder)
    folder = run / "checkpoints" / "step_8"
    adapted = get_peft_model(policy, LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False))
    adapted.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "state.json").write_text("{}")
    seal(folder)
    lora = evaluated(run)
    assert lora["checkpoint"] == "step_8"
    shutil.rmtree(folder)
    assert (evaluated(run)["tokens"], evaluated(run)["success"]) != (lora["tokens"], lora["success"]), "the adapter counts"


def test_what_cannot_be_evaluated_says_why(run, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tasks.sources.PATIENCE", 100)
    for words, expected in [
        (["runn", "--env", "x"], ["x"]),
        ([tmp_path / "rum"], ["is not a run", "did you mean", str(run), "compare, replay, show"]),
        ([tmp_path], ["is not a run", str(run)]),
        (["comapre", run], ["compare"]),
        (["comapre"], ["did you mean compare?"]),
        ([run, "--samples", "2", "--k", "1", "3"], ["--k 3", "--samples is 2"]),
        ([run, "--k", "0"], ["--k 0"]),
        ([run, "--problems", "0"], ["--problems 0"]),
        ([run, "--samples", "0"], ["--samples 0"]),
        ([run, "--temperature", "-1"], ["--temperature -1"]),
        ([run, "--temperature", "nan"], ["--temperature nan"]),
        ([run, "--problems", "1000", "--env-options", "size", "3"], ["there are only", "1000"]),
        ([run, "--env", "frozenlak"], ["frozenlake"]),
        ([run, "--env-options", "siz", "5"], ["siz", "size"]),
        ([run, "--sample", "5"], ["--samples"]),
    ]:
        message = refused(capsys, *words)
        assert all(word in message for word in expected), message
    (run / "config.yaml").write_text("env: {")
    assert "config.yaml cannot be read" in refused(capsys, run)
    shutil.rmtree(run / "checkpoints")
    assert "no checkpoint" in refused(capsys, run)


def test_a_tokenizer_and_weights_of_different_models_are_refused(run, capsys):
    checkpoint = run / "checkpoints" / "step_7"
    tokenizer = load_policy(checkpoint)[1]
    tokenizer.add_tokens([f"word{number}" for number in range(5)])
    tokenizer.save_pretrained(checkpoint)
    seal(checkpoint)
    assert "of different models" in refused(capsys, run)
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] + 5}))
    seal(checkpoint)
    assert "cannot load" in refused(capsys, run)
    (checkpoint / "model.safetensors").unlink()
    seal(checkpoint)
    assert "cannot load" in refused(capsys, run)


@pytest.mark.parametrize("word, module", eval_module.SUBCOMMANDS.items())
def test_sub_commands_are_dispatched_on_the_first_word(word, module, monkeypatch):
    class Module:
        given = []

        def main(self, argv):
            self.given.append(argv)

    fake = Module()
    monkeypatch.setattr(eval_module.importlib, "import_module", {module: fake}.__getitem__)
    dispatch([word, "runs/a", "--flag"])
    assert fake.given == [["runs/a", "--flag"]]


def test_help_lists_the_sub_commands(capsys):
    with pytest.raises(SystemExit) as stop:
        dispatch(["--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0 and all(f"eval.py {word}" in text for word in eval_module.SUBCOMMANDS) and "--samples" in text
