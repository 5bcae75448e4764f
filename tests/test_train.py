"""The loop through its real command line, and the promises that the loop makes about numbers."""
import json
import math
import shutil
import subprocess
import sys
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

import envs
import losses
import train as train_module
from buffer import ReplayBuffer
from conftest import ROOT, script, tiny_lake, train
from drift import DriftEstimator
from engines.hf import HFEngine
from envs import FrozenLake
from judge import add_advantages
from models import load_policy
from policies.chat import Chat
from rollout import collect
from runtime import setup
from runtime.log import RunLog, method_of
from runtime.memories import FIRST_TAU
from settings import Args, parse_args
from train import main
from update import follow_plan, gradients, learning_rate, make_learner, update


def metrics_of(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def weights_of(run):
    checkpoint = max((run / "checkpoints").glob("step_*"), key=lambda path: int(path.name[5:]))
    names = ("model.safetensors", "adapter_model.safetensors")
    return load_file(next(checkpoint / name for name in names if (checkpoint / name).exists()))


def same_weights(a, b):
    first, second = weights_of(a), weights_of(b)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


# ------------------------------------------------------------------------------------------------- arguments


def refused(capsys, *flags):
    with pytest.raises(SystemExit) as stop:
        parse_args([str(flag) for flag in flags])
    assert stop.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("flags, words", [
    (["--replay", "none", "--replay-updates", "2"], ["--replay none", "--replay-updates 2", "contradict"]),
    (["--group-size", "1", "--algo", "grpo"], ["--group-size 1", "0"]),
    (["--tau", "0"], ["--tau 0", "above 0"]),
    (["--tau", "-3"], ["--tau -3"]),
    (["--replay", "per", "--tau", "20"], ["--replay per", "--tau 20"]),
    (["--fresh-update", "False", "--replay", "none"], ["trains on nothing"]),
    (["--fresh-update", "False", "--replay", "uniform", "--fresh-epochs", "3"], ["--fresh-epochs 3", "--fresh-update False"]),
    (["--fresh-update", "False", "--replay", "uniform", "--released", "lr_steps"], ["--released lr_steps"]),
    (["--replay-batch-size", "100", "--capacity", "50"], ["--replay-batch-size 100", "--capacity 50"]),
    (["--replay-options", "min_size", "5000"], ["min_size=5000", "capacity=1024"]),
    (["--replay-options", "positive_fraction", "0.5"], ["positive_fraction", "0.5", "positive_bias"]),
    (["--alpha", "-1"], ["alpha", "-1"]),
    (["--minibatches", "99"], ["--minibatches 99"]),
    (["--lr", "0"], ["--lr"]),
    (["--replay-updats", "2"], ["--replay-updates"]),
    (["--lr", "fast"], ["fast"]),
    (["--fresh-update", "maybe"], ["maybe"]),
    (["--algo", "grop"], ["grpo"]),
    (["configs/no_such.yaml"], ["configs/no_such.yaml"]),
    (["--resume", "runs/none_such"], ["runs/none_such"]),
    (["--replay", "uniform", "--tau", "auto"], ["--tau auto", "uniform"]),
    (["--alpha", "0"], ["--alpha 0", "above 0"]),
    (["--replay", "per", "--priority", "uniform"], ["--replay per", "--replay uniform"]),
    (["--eps-high", "0.3"], ["--eps-high", "--loss-options eps_high"]),
    (["--lr-steps", "fresh"], ["--lr-steps", "--released lr_steps"]),
    (["--loss-options", "eps_hihg", "0.3"], ["eps_hihg", "did you mean eps_high"]),
    (["--loss", "gspo", "--loss-options", "dual_clip", "3"], ["dual_clip", "gspo", "It has", "eps_low"]),
    (["--loss", "is_reinforce", "--loss-options", "level", "tokens"], ["level tokens", "token or sequence"]),
    (["--loss-options", "m2_bound", "3", "--loss", "m2po"], ["m2_bound", "m2_budget"]),
    (["--loss-options", "eps_high"], ["--loss-options", "pairs"]),
    (["--tiny-options", "layers", "1.5"], ["--tiny-options layers 1.5", "whole number"]),
    (["--tiny-options", "layers", "None"], ["--tiny-options layers None", "must not be None"]),
    (["--engine-options", "memory", "2"], ["--engine-options memory 2", "between 0 and 1"]),
    (["--async-options", "lockstep", "maybe"], ["lockstep maybe", "True or False"]),
    (["--problem-options", "band_low", "0.9"], ["band_low 0.9", "band_high 0.75"]),
    (["--released", "lr_step"], ["lr_step", "did you mean lr_steps"]),
    (["--released", "insert_max", "--insert-priority", "base"], ["insert_max", "--insert-priority base"]),
    (["--algo", "asymre", "--group-size", "1"], ["--group-size 1", "the same"]),
    (["--algo", "tba"], ["--replay-options unit group"]),
    (["--kl-coef", "0.1", "--loss-options", "kl_in", "reward", "kl_kind", "is_k3"], ["is_k3", "k1"]),
    (["--replay-advantage", "vtrace"], ["vtrace", "--algo ppo"]),
    (["--priority", "td_error"], ["td_error", "--algo ppo"]),
    (["--loss-options", "correction", "tis_token"], ["tis_token", "decoupled_ppo"]),
    (["--format-penalty", "nan"], ["--format-penalty nan", "a number"]),
    (["--tiny-options", "skill", "1.5"], ["between 0 and 1"]),
    (["--replay-options", "beta_end", "1.5"], ["--replay-options beta_end 1.5", "between 0 and 1"]),
    (["--critic-warmup", "3"], ["--critic-warmup 3", "critic", "--algo ppo"]),
    (["--loss-options", "cut_off", "bootstrap"], ["cut_off bootstrap", "critic", "--algo ppo"]),
    (["--loss-options", "advantage_clip", "-1"], ["--loss-options advantage_clip -1", "above 0"]),
    (["--seed", "-1"], ["--seed -1"]),
    (["--env", "frozen_lake"], ["frozen_lake", "frozenlake"]),
    (["--env-options", "sizes", "8"], ["sizes", "size"]),
    (["--env-options", "size", "big"], ["size", "big"]),
    (["--engine", "vlm"], ["--engine vlm", "vllm"]),
    (["--top-p", "0.9"], ["--top-p", "part of the vocabulary", "--temperature"]),
    (["--top_k", "5"], ["--top-k", "part of the vocabulary"]),
    (["--min-p=0.1"], ["--min-p"]),
    (["--engine-options", "parallel", "0"], ["--engine-options parallel 0"]),
    (["--env-options", "size", "-5"], ["size", "-5"]),
    (["--env", "maths"], ["--env maths", "tiny"]),
    (["--lr", "inf"], ["--lr inf", "finite"]),
    (["--seed", "1", "configs/frozenlake_tiny.yaml"], ["config comes first"]),
])
def test_a_wrong_setting_is_refused_with_its_name(capsys, flags, words):
    message = refused(capsys, *flags)
    assert all(word in message for word in words), message


def test_help_names_every_task(capsys):
    with pytest.raises(SystemExit):
        parse_args(["--help"])
    text = capsys.readouterr().out
    assert all(name in text for name in envs.ENVS)


@pytest.mark.parametrize("text, words", [
    ("replay_updats: 2", ["replay_updats", "did you mean replay_updates?"]),
    ("zzzzz: 2", ["zzzzz", "--help"]),
    ("lr: fast", ["fast"]),
    ("lr: [1, 2]", ["lr", "single value"]),
    ("- lr", ["key: value"]),
    ("replay: none\nreplay_updates: 2", ["contradict"]),
    ("lr: {", ["cannot read"]),
    ("replay: per\ntau: 5", ["--replay per", "--tau 5"]),
    ("env_options: 8", ["env_options", "mapping"]),
    ("env_options: {size: [8]}", ["env_options", "mapping"]),
    ("env_options: {sizes: 8}", ["sizes", "size"]),
    ("top_p: 0.9", ["top_p"]),
    ("eps_high: 0.3\nage_unit: iteration", ["eps_high", "--loss-options eps_high"]),
    ("loss_options: 0.3", ["loss_options", "mapping"]),
    ("loss_options: {eps_hihg: 0.3}", ["eps_hihg", "did you mean eps_high"]),
    ("released: lr_steps", ["released", "list"]),
    ("released: [lr_step]", ["lr_step", "lr_steps"]),
    ("resume: runs/x", ["resume", "--resume"]),
])
def test_a_wrong_config_is_refused(capsys, tmp_path, text, words):
    (tmp_path / "x.yaml").write_text(text)
    message = refused(capsys, tmp_path / "x.yaml")
    assert all(word in message for word in words), message


def test_options_that_are_given_twice_are_those_of_both():
    args = parse_args(["--name", "x", "--replay-options", "unit", "group", "--seed", "1", "--replay-options", "eps", "0.5"])
    assert (args.replay_options["unit"], args.replay_options["eps"], args.seed) == ("group", 0.5, 1)


def test_an_unknown_key_exits_with_2_before_anything_heavy():
    done = subprocess.run([sys.executable, str(ROOT / "train.py"), "--replay-updats", "2"], capture_output=True, text=True)
    assert done.returncode == 2 and "--replay-updates" in done.stdout + done.stderr and "warm start" not in done.stdout


def test_flags_override_the_config_and_yaml_types_hold(tmp_path):
    (tmp_path / "x.yaml").write_text("lr: 1e-6\nwandb: off\nreplay: fresh\nreplay-updates: 3\nfresh_update: false\nreplay_options: {max_age: null, eps: 1e-3}\n")
    args = parse_args([str(tmp_path / "x.yaml"), "--lr", "2e-6", "--tau", "inf", "--replay-options", "store_without_signal", "true"])
    assert args.replay_options["store_without_signal"] is True and args.replay_options["eps"] == 1e-3
    assert (args.lr, args.wandb, args.replay_updates, args.fresh_update, args.replay_options["max_age"], args.tau) == (2e-6, "off", 3, False, None, math.inf)


@pytest.mark.parametrize("flags", [[], ["--replay", "per"], ["--replay", "none"], ["--tau", "auto", "--lr", "1e-6"]])
def test_the_config_of_a_run_reads_back_as_its_arguments(tmp_path, flags):
    args = parse_args(["--name", "x", *flags])
    RunLog(tmp_path, replace(args, wandb="off"), 0, tiny_lake())
    again = parse_args(["--resume", str(tmp_path)])
    assert again == replace(args, wandb="off", resume=str(tmp_path))


def test_a_flag_over_a_config_is_no_contradiction_within_the_config(tmp_path, capsys):
    (tmp_path / "x.yaml").write_text("replay: fresh\nreplay_updates: 2\ntau: 30.0\n")
    assert parse_args([str(tmp_path / "x.yaml"), "--replay", "none"]).replay_updates == 0
    assert parse_args([str(tmp_path / "x.yaml"), "--replay", "per"]).tau == math.inf
    (tmp_path / "y.yaml").write_text("replay: per\n")
    assert "--tau 5" in refused(capsys, tmp_path / "y.yaml", "--tau", 5)
    (tmp_path / "z.yaml").write_text("replay: none\nreplay_updates: 0\ntau: .inf\n")  # as a finished run writes it
    assert "--replay-updates 2" in refused(capsys, tmp_path / "z.yaml", "--replay", "fresh")
    assert "--tau 30" in refused(capsys, tmp_path / "z.yaml", "--replay", "fresh", "--replay-updates", "2")
    assert parse_args([str(tmp_path / "z.yaml"), "--replay", "fresh", "--replay-updates", "2", "--tau", "9"]).tau == 9


def test_replay_none_over_a_config_with_updates_means_none_and_says_so(tmp_path, capsys):
    (tmp_path / "x.yaml").write_text("replay_updates: 3\n")
    assert parse_args([str(tmp_path / "x.yaml"), "--replay", "none"]).replay_updates == 0
    assert "no replay updates" in capsys.readouterr().out
    (tmp_path / "y.yaml").write_text("replay: none\n")
    assert "--replay none" in refused(capsys, tmp_path / "y.yaml", "--replay-updates", 2)


def test_help_explains_every_flag():
    text = train("--help").stdout
    for field in fields(Args):
        assert f"--{field.name.replace('_', '-')}" in text
    assert "optimiser steps" in text


def test_every_config_parses():
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        parse_args([str(path)])


# ------------------------------------------------------------------------------------------------- the whole loop


@pytest.fixture(scope="module")
def run(tmp_path_factory, quick_flags):
    """Four iterations with fresh replay."""
    folder = tmp_path_factory.mktemp("runs")
    train(*quick_flags, "--runs-dir", folder, "--name", "fresh", "--iterations", 4, "--checkpoint-every", 2, "--eval-every", 2)
    return folder / "fresh"


def test_what_a_run_leaves(run):
    lines = metrics_of(run)
    assert [line["iteration"] for line in lines] == [1, 2, 3, 4]
    assert all("NaN" not in line for line in (run / "metrics.jsonl").read_text().splitlines())
    for key in ("fresh/ratio_mean", "fresh/ratio_max", "fresh/clip_fraction", "fresh/ess_token", "fresh/nonzero_advantage_rows",
                "fresh/grad_norm", "replay/grad_norm", "replay/ratio_max", "replay/age_mean", "replay/age_p95", "replay/ess_token",
                "replay/unique_fraction", "fresh/stored_share", "buffer/size", "eval/success", "time/sample_s", "time/tokens_per_s"):
        assert all(key in line for line in lines), key
    assert [line["eval/success"] is None for line in lines] == [True, False, True, False]
    assert lines[-1]["step"] == sum(line["fresh/steps"] + line["replay/steps"] for line in lines)
    assert any(line["replay/grad_norm"] for line in lines) and any(line["replay/age_mean"] for line in lines)
    clock = [key for line in lines for key in line if key.endswith(("_s", "_mb", "per_s", "seconds"))]
    assert all(key.startswith("time/") for key in clock)
    assert "Train and held-out problems" in (run / "config.yaml").read_text().splitlines()[0]
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert set(config) == {field.name for field in fields(Args)} - {"resume"}
    episodes = [json.loads(line) for line in (run / "episodes.jsonl").read_text().splitlines()]
    fresh = [episode for episode in episodes if episode["kind"] == "fresh"]
    assert "player" in fresh[0]["transcript"][0]["content"] and len(fresh) == 4 * 4
    assert (run / "learning_curve.png").stat().st_size > 5000
    assert {"config.json", "model.safetensors", "tokenizer.json", "policy_optimizer.safetensors", "state.json", "buffer"} <= {
        path.name for path in max((run / "checkpoints").iterdir()).iterdir()}


def test_the_first_fresh_step_has_ratio_one(run):
    for line in metrics_of(run):
        if line["fresh/steps"]:
            assert line["fresh/first_max_abs_ratio_minus_1"] < 1e-3
            assert line["fresh/sampler_trainer_difference_max"] < 1e-3


def test_eval_gives_the_number_of_the_training_run(run):
    done = script("eval.py", run)
    result = json.loads((run / "eval.json").read_text())
    assert result["success"] == metrics_of(run)[-1]["eval/success"]
    assert result["success_low"] <= result["success"] <= result["success_high"] and "95 %" in done.stdout
    for flags, words in (([run / "checkpoints"], "is not a run"), ([run, "--temperature", "-1"], "--temperature -1")):
        wrong = script("eval.py", *flags, check=False)
        assert wrong.returncode == 2 and words in wrong.stderr


def test_a_resumed_run_equals_the_one_that_was_not_stopped(run, tmp_path, quick_flags):
    train(*quick_flags, "--runs-dir", tmp_path, "--name", "fresh", "--iterations", 4, "--checkpoint-every", 2, "--eval-every", 2)
    shutil.rmtree(max((tmp_path / "fresh" / "checkpoints").iterdir(), key=lambda path: int(path.name[5:])))
    train("--resume", tmp_path / "fresh")
    assert same_weights(run, tmp_path / "fresh")
    timeless = [[{key: value for key, value in line.items() if not key.startswith("time/")} for line in metrics_of(folder)]
                for folder in (run, tmp_path / "fresh")]
    assert timeless[0] == timeless[1]


def test_what_a_resume_refuses_and_survives(run, tmp_path, quick_flags):
    finished = train("--resume", run, check=False)
    assert finished.returncode == 2 and "raise --iterations" in finished.stderr
    assert yaml.safe_load((run / "config.yaml").read_text())["iterations"] == 4
    for flags in (["--tau", "7"], ["--capacity", "512"], ["--released", "age_in_iterations"], ["--algo", "ppo"]):
        done = train("--resume", run, "--iterations", 5, *flags, check=False)
        assert done.returncode == 2 and flags[0] in done.stderr and "on resume" in done.stderr
    shutil.copytree(run, tmp_path / "cut")
    with open(tmp_path / "cut" / "metrics.jsonl", "a") as file:
        file.write('{"iteration": 5, "st')  # killed while it wrote
    train("--resume", tmp_path / "cut", "--iterations", 5)
    assert [line["iteration"] for line in metrics_of(tmp_path / "cut")] == [1, 2, 3, 4, 5]


def test_replay_that_cannot_start_says_why(tmp_path, quick_flags):
    done = train(*quick_flags, "--runs-dir", tmp_path, "--name", "x", "--iterations", 3, "--replay-options", "min_size", 1000)
    assert "no replay yet: the buffer is empty or below min_size=1000: it holds" in done.stdout
    assert json.loads((tmp_path / "x" / "summary.json").read_text())["replay_updates"] == 0


def test_replay_none_is_replay_with_no_updates_bit_for_bit(tmp_path, quick_flags):
    flags = ["--runs-dir", tmp_path, "--iterations", 2, *quick_flags]
    train("--name", "none", "--replay", "none", *flags)
    train("--name", "zero", "--replay", "fresh", "--replay-updates", 0, *flags)
    assert same_weights(tmp_path / "none", tmp_path / "zero")
    assert metrics_of(tmp_path / "none")[0]["replay/grad_norm"] is None
    assert metrics_of(tmp_path / "zero")[0]["buffer/size"] > 0


@pytest.mark.parametrize("flags", [
    ["--algo", "reinforce++", "--fresh-epochs", "2", "--minibatches", "2"],
    ["--fresh-update", "False", "--capacity", "64", "--replay", "uniform", "--replay-updates", "1", "--wandb", "offline"],
])
def test_other_ways_to_run_it(tmp_path, quick_flags, flags):
    train(*quick_flags, "--runs-dir", tmp_path, "--name", "x", "--iterations", 2, *flags)
    lines = metrics_of(tmp_path / "x")
    assert lines[-1]["step"] == sum(line["fresh/steps"] + line["replay/steps"] for line in lines) > 0
    assert len(list(tmp_path.glob("x/wandb/offline-run-*/*.wandb"))) == ("offline" in flags)


@pytest.mark.slow
def test_tau_auto_and_the_problem_heap_survive_a_resume(tmp_path, quick_flags):
    flags = ["--runs-dir", tmp_path, "--tau", "auto", "--replay-options", "drift_kl", "token", "probe_episodes", "16", "--problem-sampler", "heap", "--released", "age_in_iterations",
             "--checkpoint-every", 4]
    train(*quick_flags, "--name", "whole", "--iterations", 6, *flags)
    train(*quick_flags, "--name", "parts", "--iterations", 6, *flags)
    shutil.rmtree(max((tmp_path / "parts" / "checkpoints").iterdir(), key=lambda path: int(path.name[5:])))
    train("--resume", tmp_path / "parts")
    whole, parts = metrics_of(tmp_path / "whole"), metrics_of(tmp_path / "parts")
    assert [{key: value for key, value in line.items() if "time/" not in key} for line in whole] == \
        [{key: value for key, value in line.items() if "time/" not in key} for line in parts]
    assert same_weights(tmp_path / "whole", tmp_path / "parts")
    assert whole[0]["buffer/tau"] == FIRST_TAU and whole[-1]["buffer/drift_c"] is not None
    c = whole[-1]["buffer/drift_c"]
    assert whole[-1]["buffer/tau"] == pytest.approx(min(max(1 / c, 1.0), 1e5) if c > 0 else 1e5)
    assert (tmp_path / "whole" / "drift.png").stat().st_size > 5000
    probes, again = ((tmp_path / name / "drift.jsonl").read_text() for name in ("whole", "parts"))
    assert probes == again
    estimator = DriftEstimator()
    for probe in map(json.loads, probes.splitlines()):
        estimator.add(probe["age"], probe["kl"])
    assert estimator.fit()["c"] == pytest.approx(c, rel=0.01)  # the log-ratios are rounded


@pytest.mark.slow
def test_ppo_with_td_error_priorities_and_lora_resumes_exactly(tmp_path, quick_flags):
    flags = ["--runs-dir", tmp_path, "--algo", "ppo", "--priority", "td_error", "--lora-rank", 4, "--checkpoint-every", 1, "--iterations", 2]
    train(*quick_flags, "--name", "whole", *flags)
    train(*quick_flags, "--name", "parts", *flags)
    shutil.rmtree(max((tmp_path / "parts" / "checkpoints").iterdir(), key=lambda path: int(path.name[5:])))
    train("--resume", tmp_path / "parts")
    assert same_weights(tmp_path / "whole", tmp_path / "parts")
    assert metrics_of(tmp_path / "whole")[-1]["replay/explained_variance"] is not None
    done = script("eval.py", tmp_path / "parts", check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "parts" / "eval.json").read_text())["success"] == metrics_of(tmp_path / "whole")[-1]["eval/success"]


def test_list_shows_bundles_and_parts():
    text = train("--list").stdout
    assert all(name in text for name in [*losses.ALGORITHMS, *losses.LOSSES, "is_k3", "tis_sequence"])


def test_a_name_that_exists_is_refused(run, quick_flags):
    done = train("--runs-dir", run.parent, "--name", "fresh", *quick_flags, check=False)
    assert done.returncode == 2 and "exists already" in done.stderr


# ------------------------------------------------------------------------------------------------- numbers


@pytest.fixture(scope="module")
def played(tiny_folder):
    """A learner and eight groups of eight episodes with advantages, mixed rewards in several of them."""
    policy, tokenizer = load_policy(tiny_folder)
    args = Args(algo="grpo")
    problems = tiny_lake().problems("train", 8)
    episodes, _ = collect(HFEngine(policy, [tokenizer.eos_token_id], tokenizer.pad_token_id), Chat(tokenizer), tiny_lake,
                          [problem for problem in problems for _ in range(8)], [row // 8 for row in range(64)], list(range(64)),
                          max_turns=10, max_new_tokens=6, temperature=1.0, format_penalty=0.15, policy_step=0, iteration=1,
                          context_length=1024)
    learner = make_learner(args, policy)
    add_advantages(learner, episodes)
    return learner, episodes


def gradient(learner, episodes, weights=None, replayed=False, **changes):
    learner.policy.zero_grad()
    args = Args(**{"algo": "grpo", **changes})
    metrics = gradients(replace(learner, args=args, objective=losses.objective_of(args)), episodes, weights, replayed=replayed)
    return torch.cat([parameter.grad.flatten() for parameter in learner.policy.parameters()]).clone(), metrics


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant"])
def test_gradients_do_not_depend_on_micro_batches(played, aggregation):
    learner, episodes = played
    weights = torch.linspace(0.2, 1.0, len(episodes))
    whole, metrics = gradient(learner, episodes, weights, micro_batch_tokens=10**6, loss_options={"aggregation": aggregation})
    for size in (1, 600):
        part, part_metrics = gradient(learner, episodes, weights, micro_batch_tokens=size, loss_options={"aggregation": aggregation})
        assert (part - whole).norm() < 1e-5 * whole.norm()
        for key in ("loss", "ratio_mean", "ess_token", "clip_fraction", "entropy", "nonzero_advantage_rows"):
            assert part_metrics[key] == pytest.approx(metrics[key], rel=1e-4, abs=1e-6), key
    assert whole.norm() > 0


def test_a_replayed_member_keeps_the_advantage_of_its_whole_group(played):
    learner, episodes = played
    groups = [[episode for episode in episodes if episode.group_id == group] for group in range(8)]
    mixed = [group for group in groups if len({episode.reward for episode in group}) > 1]
    assert mixed
    for group in mixed:
        rewards = np.array([episode.reward for episode in group])
        expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
        buffer = ReplayBuffer(64, min_size=1)
        buffer.add([group[0]], step=0)
        replayed, = buffer.sample(1, step=5).episodes
        assert replayed.advantages[replayed.action_mask] == pytest.approx(expected[0], abs=1e-5)
        assert not replayed.advantages[~replayed.action_mask].any()
        assert gradient(learner, [replayed], replayed=True)[0].norm() > 0 or expected[0] == 0


def test_rows_without_signal_change_nothing_but_the_denominator(played):
    learner, episodes = played
    episodes = [replace(episode, advantages=0 * episode.advantages) if episode.group_id < 3 else episode for episode in episodes]
    useful = [episode for episode in episodes if episode.advantages.any()]
    assert len(useful) < len(episodes)
    tokens = {rows: sum(int(episode.action_mask.sum()) for episode in chosen)
              for rows, chosen in (("all", episodes), ("useful", useful))}
    whole, metrics = gradient(learner, episodes, loss_options={"aggregation": "token_mean"})
    part, _ = gradient(learner, useful, loss_options={"aggregation": "token_mean"})
    assert (part * tokens["useful"] / tokens["all"] - whole).norm() < 1e-5 * whole.norm()
    assert metrics["nonzero_advantage_rows"] == pytest.approx(len(useful) / len(episodes))


def test_the_learning_rate_covers_all_planned_updates():
    args = Args(iterations=10, replay_updates=2, fresh_epochs=2, minibatches=3, warmup_steps=4, lr=1.0, lr_end_fraction=0.1)
    planned = 10 * (2 * 3 + 2)
    assert [learning_rate(args, place) for place in range(5)] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert learning_rate(args, planned) == pytest.approx(0.1) and learning_rate(args, 10 * planned) == pytest.approx(0.1)
    assert learning_rate(args, planned // 2) == pytest.approx(0.1 + 0.9 * (1 - (40 - 4) / (80 - 4)))
    fresh_only = Args(**{**vars(args), "released": ["lr_steps"]})
    assert learning_rate(fresh_only, 60) == pytest.approx(0.1) and learning_rate(args, 60) > 0.2


def test_learning_rate_and_beta_follow_the_iterations_whatever_the_updates_find(played, tiny_folder):
    """Updates without signal, or replay that is not ready yet, take no step: the schedule must end with the run all the same."""
    _, episodes = played
    silent = [replace(episode, advantages=0 * episode.advantages) for episode in episodes[:8]]
    args = Args(iterations=5, replay_updates=3, warmup_steps=0, lr=1.0, lr_end_fraction=0.0)
    learner, buffer = make_learner(args, load_policy(tiny_folder)[0]), ReplayBuffer(4, beta=0.4, beta_end=1.0)
    rates, betas = [], []
    for iteration in range(1, 6):
        follow_plan(learner, buffer, iteration)
        rates += [update(learner, silent)["lr"] for _ in range(iteration % 2 + 1)]  # of the four that were planned
        betas.append(buffer.beta)
    planned = [(1, 0), (1, 1), (2, 0), (3, 0), (3, 1), (4, 0), (5, 0), (5, 1)]
    assert rates == pytest.approx([1 - (4 * (iteration - 1) + number) / 20 for iteration, number in planned])
    assert betas == pytest.approx([0.4, 0.55, 0.7, 0.85, 1.0])


def test_an_update_that_is_not_finite_leaves_everything_as_it_was(played, tiny_folder):
    _, episodes = played
    learner = make_learner(Args(algo="grpo"), load_policy(tiny_folder)[0])
    with torch.no_grad():
        learner.policy.lm_head.weight[0] = math.nan
    before = {name: value.clone() for name, value in learner.policy.state_dict().items()}
    metrics = update(learner, episodes)
    assert metrics["nonfinite"] == 1 and metrics["steps"] == 0
    assert all(torch.equal(before[name], value, ) or name == "lm_head.weight" for name, value in learner.policy.state_dict().items())
    assert torch.equal(before["lm_head.weight"][1:], learner.policy.lm_head.weight[1:])
    assert not learner.optimizer.state_dict()["state"]


def test_an_update_without_signal_takes_no_step(played, tiny_folder):
    _, episodes = played
    silent = [replace(episode, advantages=0 * episode.advantages) for episode in episodes[:8]]
    for released, steps in (([], 0), (["step_without_signal"], 1)):
        learner = make_learner(Args(algo="grpo", released=released), load_policy(tiny_folder)[0])
        metrics = update(learner, silent)
        assert (metrics["steps"], metrics["without_signal"]) == (steps, 1)


def test_too_many_broken_environments_end_the_run_with_the_traceback(tmp_path, quick_flags, tiny_folder, monkeypatch, capsys):
    class Broken(FrozenLake):
        def step(self, answer):
            raise RuntimeError("the lake is frozen solid")

    args = parse_args([*quick_flags, "--runs-dir", str(tmp_path), "--name", "broken", "--iterations", "1"])
    args.model = str(tiny_folder)  # the broken task would be warm-started anew
    monkeypatch.setitem(envs.ENVS, "frozenlake", Broken)
    with pytest.raises(SystemExit) as stop:
        train_module.main(args)
    message = capsys.readouterr().err
    assert stop.value.code == 2 and "100% of the environments raised" in message and "frozen solid" in message


def test_three_updates_that_are_not_finite_end_the_run_and_name_their_episodes(tmp_path, quick_flags, monkeypatch, capsys):
    import update as update_module
    real = update_module.policy_loss
    monkeypatch.setattr(update_module, "policy_loss", lambda *args, **kwargs: (real(*args, **kwargs)[0] * math.nan, {}))
    with pytest.raises(SystemExit):
        train_module.main(parse_args([*quick_flags, "--runs-dir", str(tmp_path), "--name", "nan", "--iterations", "1",
                                      "--fresh-epochs", "3"]))
    assert "three updates in a row" in capsys.readouterr().err
    events = [json.loads(line) for line in (tmp_path / "nan" / "episodes.jsonl").read_text().splitlines()]
    assert len(events) == 3 and all("not finite" in event["event"] and event["loss"] == "nan" for event in events)
    named = events[0]["episodes [iteration, group_id, problem_id]"]
    assert len(named) == 24 and all(iteration == 1 for iteration, _, _ in named)


def test_options_of_the_task_come_from_the_config_or_the_command_line(tmp_path):
    (tmp_path / "x.yaml").write_text("env_options: {size: 8, slippery: true}\nlr: 2e-3\n")
    args = parse_args([str(tmp_path / "x.yaml"), "--name", "x"])
    assert args.env_options == {"prompt": "tiny", "size": "8", "slippery": "true"} and args.lr == 2e-3
    env = envs.make_env_factory(args.env, args.env_options)()
    assert (env.size, env.slippery, env.prompt) == (8, True, "tiny")
    args = parse_args([str(tmp_path / "x.yaml"), "--env-options", "size", "5"])  # the config's other options stay
    assert args.env_options == {"prompt": "tiny", "size": "5", "slippery": "true"}


def test_a_replayed_episode_is_shown_with_its_age_and_its_log_ratios(run):
    records = [json.loads(line) for line in (run / "episodes.jsonl").read_text().splitlines()]
    replayed = [record for record in records if record["kind"] == "replay"]
    assert replayed and all(record["age"] >= 1 for record in replayed)
    for record in records:
        mask = np.array(record["action_mask"], bool)
        assert len(record["pieces"]) == len(mask) == len(record["advantages"]) == len(record["behavior_logprobs"])
        for name in ("advantages", "behavior_logprobs", "log_ratios"):
            assert record[name] is None or not np.array(record[name])[~mask].any()
        assert "".join(record["pieces"]).count("<answer>") == sum(
            message["content"].count("<answer>") for message in record["transcript"])
    assert any(np.any(record["log_ratios"]) for record in replayed if record["log_ratios"])


def test_the_record_of_replay_agrees_with_the_metrics(run):
    lines = {line["iteration"]: line for line in metrics_of(run)}
    records = [json.loads(line) for line in (run / "replay.jsonl").read_text().splitlines()]
    assert records
    for record in records:
        line, drawn, held = lines[record["iteration"]], record["drawn"], record["buffer"]
        assert np.mean(drawn["age"]) == pytest.approx(line["replay/age_mean"])
        assert sum(held["count"]) == sum(record["uses"]) and sum(held["mass"]) == pytest.approx(1)
        counted = [row for row, ratio in enumerate(drawn["ratio"]) if ratio is not None]
        assert counted == [row for row, signal in enumerate(drawn["signal"]) if signal]  # GRPO: the others are not computed
        tokens = np.array(drawn["tokens"])[counted]
        assert tokens.sum() == line["replay/tokens_trained"]
        if line["replay/updates"] == 1:
            assert np.average(np.array(drawn["ratio"])[counted], weights=tokens) == pytest.approx(line["replay/ratio_mean"], abs=1e-4)
            assert np.average(np.array(drawn["kl"])[counted], weights=tokens) == pytest.approx(line["replay/kl_behavior_k3"], abs=1e-4)


def test_a_model_that_is_not_there_is_one_sentence(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(SystemExit) as stop:
        train_module.main(parse_args(["--model", "runs/no_such", "--runs-dir", str(tmp_path), "--wandb", "off"]))
    assert stop.value.code == 2 and "no model 'runs/no_such'" in capsys.readouterr().err


def test_a_template_that_drops_thinking_is_refused_in_several_turns_unless_asked(tmp_path, tiny_folder, quick_flags, capsys):
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}<|{{ message.role }}|>{{ message.content.split('</think>')[-1] }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}")
    flags = [*quick_flags, "--model", str(folder), "--env-options", "prompt", "tiny", "--runs-dir", str(tmp_path), "--iterations", "1"]
    with pytest.raises(SystemExit) as stop:
        train_module.main(parse_args([*flags, "--name", "refused"]))
    message = capsys.readouterr().err
    assert stop.value.code == 2 and "drops the thinking" in message and "--rewritten-history keep" in message
    train_module.main(parse_args([*flags, "--name", "one", "--max-turns", "1"]))
    train_module.main(parse_args([*flags, "--name", "kept", "--rewritten-history", "keep"]))


def test_overlong_episodes_can_be_left_out_of_the_updates(tmp_path, quick_flags, tiny_folder):
    """With two tokens a turn every episode ends in a cut turn: nothing is left to train on, and the metrics say so."""
    flags = [*quick_flags, "--max-new-tokens", "2", "--max-turns", "2", "--iterations", "1", "--runs-dir", str(tmp_path),
             "--model", str(tiny_folder), "--env-options", "prompt", "tiny"]
    train_module.main(parse_args([*flags, "--name", "masked", "--loss-options", "overlong", "mask"]))
    line, = metrics_of(tmp_path / "masked")
    assert line["fresh/overlong"] == 1 and line["step"] == 0 and not line["fresh/tokens_trained"]


def test_curves_go_to_tensorboard(tmp_path, quick_flags, capsys):
    train_module.main(parse_args([*quick_flags, "--runs-dir", str(tmp_path), "--name", "board", "--iterations", "2", "--track",
                                  "tensorboard", "--quiet", "true"]))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    events = EventAccumulator(str(tmp_path / "board" / "tensorboard")).Reload()
    rewards = [(event.step, event.value) for event in events.Scalars("fresh/reward")]
    assert rewards == [(line["iteration"], pytest.approx(line["fresh/reward"])) for line in metrics_of(tmp_path / "board")]
    assert "iteration 1/2" not in capsys.readouterr().out


def test_wandb_offline_gets_the_namespaces_and_the_episodes(tmp_path, quick_flags, monkeypatch):
    import wandb
    logged = []
    real = wandb.init
    monkeypatch.setattr(wandb, "init", lambda **settings: logged.append(settings) or real(**settings))
    flags = [flag if flag != "off" else "offline" for flag in quick_flags]
    train_module.main(parse_args([*flags, "--runs-dir", str(tmp_path), "--name", "w", "--iterations", "2", "--quiet", "true"]))
    settings, = logged
    assert settings["mode"] == "offline" and settings["config"]["env_options"] == {"prompt": "tiny"}
    assert set(settings["config"]) == {field.name for field in fields(Args)} | {"code"}
    assert settings["config"]["code"] == json.loads((tmp_path / "w" / "code.json").read_text())
    assert settings["tags"] == ["frozenlake", "grpo", "replay fresh"] and settings["group"].startswith("frozenlake-grpo-fresh-")
    args = {name: value for name, value in settings["config"].items() if name != "code"}
    assert method_of(args) == method_of(args | {"seed": 7, "name": "y", "wandb_tags": "z"}) == settings["group"][-8:]
    assert method_of(args) != method_of(args | {"lr": 1e-5})
    folder, = (tmp_path / "w" / "wandb").glob("offline-run-*")
    summary = json.loads((folder / "files" / "wandb-summary.json").read_text()) if (
        folder / "files" / "wandb-summary.json").exists() else None
    assert list(folder.glob("*.wandb")) and (summary is None or summary["iteration"] == 2)
    spaces = {key.split("/")[0] for key in metrics_of(tmp_path / "w")[-1] if "/" in key}
    assert spaces == {"fresh", "replay", "buffer", "problems", "eval", "time", "task", "cost"}
    assert any("transcripts" in path.name for path in folder.rglob("*.table.json"))  # `episodes` is their number
    assert summary is None or summary["episodes"] == metrics_of(tmp_path / "w")[-1]["episodes"]
    assert (folder / "files" / "code.patch").read_text() == (tmp_path / "w" / "code.patch").read_text()


def test_a_server_that_is_not_there_ends_the_start_and_leaves_nothing(tmp_path, quick_flags, capsys, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with pytest.raises(SystemExit) as stop:
        train_module.main(parse_args([*quick_flags, "--engine", "http://localhost:1", "--runs-dir", str(tmp_path), "--name", "x"]))
    assert stop.value.code == 2 and "did not answer" in capsys.readouterr().err and not (tmp_path / "x").exists()


def test_fewer_problems_than_an_iteration_asks_are_a_sentence_and_leave_nothing(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        train_module.main(parse_args(["--wandb", "off", "--model", "smollm2", "--env", "cliffwalking", "--problems-per-iteration", "28",
                                      "--eval-problems", "4", "--runs-dir", str(tmp_path), "--name", "x"]))
    told = capsys.readouterr().err
    assert stop.value.code == 2 and "--problems-per-iteration 28 is more than the 27 training problems" in told
    assert not (tmp_path / "x").exists()


def test_other_models_and_tasks_get_defaults_that_fit_them(tmp_path, capsys):
    args = parse_args(["--model", "smollm2", "--env", "cliffwalking"])
    assert (args.max_new_tokens, args.lr, args.critic_lr) == (128, 1e-6, 1e-5) and "the default for --model smollm2" in capsys.readouterr().out
    assert args.name.startswith("cliffwalking_smollm2-grpo-fresh-seed0-")
    assert (parse_args(["--model", "smollm2", "--lr", "1e-4"]).lr, parse_args([]).lr) == (1e-4, 1e-3)
    env = envs.make_env_factory("cliffwalking", {})()
    assert len(setup.problems_of(env, "train", None, 1536, "--train-problems")) == 27
    with pytest.raises(SystemExit):
        setup.problems_of(env, "heldout", 512, 512, "--eval-problems")
    assert "--eval-problems 512" in capsys.readouterr().err


def test_a_terminal_gets_a_dashboard_of_six_numbers_and_held_out_success(tmp_path, monkeypatch):
    import io

    from rich.console import Console

    from runtime import log as runs
    screen = io.StringIO()
    monkeypatch.setattr(runs, "Console", lambda: Console(file=screen, force_terminal=True, width=100, color_system=None))
    metrics = {"fresh/reward": 0.5, "replay/age_mean": 12.0, "replay/ess_token": 0.9, "fresh/signal_share": 0.25,
               "time/tokens_per_s": 1234.0, "time/iteration_s": 1.0, "eval/start_success": 0.25}
    args = replace(parse_args(["--name", "x", "--wandb", "off"]), iterations=2)
    with runs.RunLog(tmp_path / "run", args, 0, tiny_lake()) as log:
        log.show(metrics | {"iteration": 1, "eval/success": None})
        log.show(metrics | {"iteration": 2, "eval/success": 1.0})
    for words in ("1/2", "2/2", "reward 0.50", "held-out 0.250", "held-out 1.000", "age 12", "ESS 0.90", "signal 25%",
                  "tokens/s 1,234", "held-out success \u2583\u2588"):
        assert words in screen.getvalue(), words


def test_the_screen_without_replay_shows_the_age_on_arrival(tmp_path, capsys):
    args = replace(parse_args(["--name", "x", "--wandb", "off", "--replay", "none"]), iterations=1)
    with RunLog(tmp_path / "run", args, 0, tiny_lake()) as log:
        log.show({"iteration": 1, "replay/age_mean": None, "fresh/staleness_mean": 1.4, "eval/start_success": 0.25, "eval/success": None})
    assert "  age 1.4  " in capsys.readouterr().out


def test_delayed_weights_are_booked_as_ages(tmp_path, quick_flags):
    main(parse_args([*quick_flags, "--runs-dir", str(tmp_path), "--name", "late", "--iterations", "4", "--replay", "none",
                     "--sync-every", "3", "--algo", "decoupled_ppo", "--loss-options", "correction", "age_discount", "correction_low", "0.5"]))
    lines = metrics_of(tmp_path / "late")
    stale = [line for line in lines if line["fresh/staleness_mean"]]
    assert stale and all(line["fresh/correction_weight"] == pytest.approx(0.5 ** line["fresh/staleness_mean"])
                         for line in lines if line["fresh/steps"])
    assert all((line["fresh/sampler_trainer_difference_max"] is None) == (line in stale) for line in lines if line["fresh/steps"])


def test_new_td_error_priorities_have_their_eps_too(tmp_path, quick_flags):
    main(parse_args([*quick_flags, "--runs-dir", str(tmp_path), "--name", "td", "--iterations", "1", "--algo", "ppo", "--priority",
                     "td_error", "--replay-options", "eps", "0.5", "--replay-updates", "0"]))
    [saved] = (tmp_path / "td").glob("checkpoints/*/buffer/*.npz")
    log_base = np.load(saved)["log_base"]
    assert (log_base[np.isfinite(log_base)] >= np.log(0.5) - 1e-9).all() and np.isfinite(log_base).any()
