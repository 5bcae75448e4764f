"""Nothing is lost: a run that is killed, damaged, changed, started twice or fed NaN goes on as it would have, or says why not."""
import gc
import json
import math
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

import eval as eval_module
import judge
import train as train_module
import update as update_module
from benchmarks.bench_faults import KINDS, SETUPS, differences, killed_run
from conftest import ROOT
from engines import samplers
from envs import MissingData
from runtime import checkpoints, files, setup, watch
from runtime import log as runs
from settings import Args, parse_args

NOISY = '''"""FrozenLake whose first message depends on the global generators, as a careless task's would."""
import random
import numpy as np
import torch
from envs import FrozenLake


class NoisyLake(FrozenLake):
    def reset(self, problem_id, seed):
        message = super().reset(problem_id, seed)
        return message + " ." * (random.randint(0, 1) + np.random.randint(2) + int(torch.randint(2, ())))
'''


@pytest.fixture(scope="module")
def flags(tmp_path_factory, tiny_folder):
    """A run of seconds, on a task that draws from the global generators."""
    task = tmp_path_factory.mktemp("task") / "noisy.py"
    task.write_text(NOISY)
    return ["--env", f"{task}:NoisyLake", "--model", str(tiny_folder), "--env-options", "prompt", "tiny", "--wandb", "off", "--max-turns",
            "5", "--max-new-tokens", "6", "--lr", "1e-3", "--train-problems", "32", "--quiet", "true",
            "--eval-problems", "8", "--eval-every", "0", "--problems-per-iteration", "3", "--group-size", "4", "--replay-batch-size",
            "4", "--checkpoint-every", "2", "--keep-checkpoints", "3"]


def start(folder, name, flags, *more):
    return train_module.main(parse_args([*flags, "--runs-dir", str(folder), "--name", name, *map(str, more)]))


def resume(run, *more):
    return train_module.main(parse_args(["--resume", str(run), *map(str, more)]))


def refused(call, *arguments):
    with pytest.raises(SystemExit) as stop:
        call(*arguments)
    code = stop.value.code
    del stop
    gc.collect()  # the traceback holds the run's lock, which a process that ends would let go
    return code


@pytest.fixture(scope="module")
def whole(tmp_path_factory, flags):
    """Six iterations that nothing disturbed; checkpoints after 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("runs")
    start(folder, "whole", flags, "--iterations", 6)
    assert len(files.checkpoints(folder / "whole")) == 3
    return folder / "whole"


def without_last(whole, folder, checkpoints=1, name="whole"):
    """A copy as if it had been killed after its last but one checkpoint, in the middle of a line."""
    run = folder / name
    shutil.copytree(whole, run)
    for checkpoint in files.checkpoints(run)[-checkpoints:]:
        shutil.rmtree(checkpoint)
    (run / "summary.json").unlink()
    for log in ("metrics.jsonl", "episodes.jsonl", "replay.jsonl"):
        with open(run / log, "r+") as file:
            file.truncate((run / log).stat().st_size - 40)
    return run


def test_weights_that_are_not_finite_are_not_saved_and_the_last_good_checkpoint_stays(tmp_path, flags, capsys, monkeypatch):
    assert refused(start, tmp_path, "x", flags, "--iterations", 2, "--lr", 1e308, "--warmup-steps", 0, "--checkpoint-every", 1) == 2
    told = capsys.readouterr().err
    assert "not finite, and not saved: weights of the policy: " in told and "start again with a smaller --lr" in told
    assert files.checkpoints(tmp_path / "x") == []
    start(tmp_path, "y", flags, "--iterations", 2)
    [last] = files.checkpoints(tmp_path / "y")
    monkeypatch.setattr(setup, "bad_weights", lambda model, name: f"weights of the {name}: all")
    assert refused(resume, tmp_path / "y", "--iterations", 4) == 2
    assert f"{last} is as it was: --resume {tmp_path / 'y'} with a smaller --lr" in capsys.readouterr().err
    assert files.checkpoints(tmp_path / "y") == [last]


def test_a_model_that_is_not_finite_is_refused_with_the_name_of_its_weights(tmp_path, tiny_folder, flags, capsys):
    folder = shutil.copytree(tiny_folder, tmp_path / "policy")
    weights = load_file(folder / "model.safetensors")
    name = sorted(weights)[0]
    weights[name].view(-1)[0] = math.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert refused(start, tmp_path, "x", [*flags, "--model", str(folder)], "--iterations", 1) == 2
    assert f"not finite: weights of the policy: {name}" in capsys.readouterr().err


def test_copies_of_checkpoints_under_other_names_are_left_alone(tmp_path, flags):
    start(tmp_path, "x", flags, "--iterations", 2, "--checkpoint-every", 1, "--keep-checkpoints", 1)
    place = tmp_path / "x" / "checkpoints"
    [last] = files.checkpoints(tmp_path / "x")
    shutil.copytree(last, place / "step_9_best")
    (place / "step_3.tar.gz").write_bytes(b"a user's own")
    (place / "step_7").write_bytes(b"no folder")
    resume(tmp_path / "x", "--iterations", 4)
    assert len(files.checkpoints(tmp_path / "x")) == 1 and not last.exists()
    assert {path.name for path in place.iterdir()} >= {"step_9_best", "step_3.tar.gz", "step_7"}


# ------------------------------------------------------------------------------------------------- damage


def damaged(folder, how):
    if how == "truncated":
        path = folder / "policy_optimizer.safetensors"
        os.truncate(path, path.stat().st_size // 2)
    elif how == "flipped":
        path = folder / "model.safetensors"
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif how == "missing":
        path = next((folder / "buffer").glob("*.npz"))
        path.unlink()
    elif how == "no manifest":
        path = folder / "manifest.json"
        path.unlink()
    else:
        path = folder / "state.json"
        path.write_text(path.read_text()[:50])
    return path.name


@pytest.mark.parametrize("how, words", [("truncated", "checksum"), ("flipped", "checksum"), ("missing", "missing"),
                                        ("no manifest", "missing"), ("half a state", "checksum")])
def test_damage_is_seen_and_named(whole, tmp_path, how, words):
    folder = tmp_path / "step_1"
    shutil.copytree(files.checkpoints(whole)[-1], folder)
    assert files.damage(folder) is None
    name = damaged(folder, how)
    assert name in files.damage(folder) and words in files.damage(folder)


def test_every_flipped_byte_of_a_small_checkpoint_is_seen(tmp_path):
    with files.whole_folder(tmp_path / "step_1") as folder:
        (folder / "state.json").write_text('{"format": 2}')
        (folder / "weights").write_bytes(b"abc")
    for path in (tmp_path / "step_1").iterdir():
        content = path.read_bytes()
        for place in range(len(content)):
            for bit in (1, 128):
                changed = bytearray(content)
                changed[place] ^= bit
                path.write_bytes(changed)
                try:
                    same = json.loads(changed) == json.loads(content) and path.name == "manifest.json"
                except ValueError:
                    same = False
                assert files.damage(tmp_path / "step_1") or same, (path.name, place)  # white space of the manifest may differ
        path.write_bytes(content)
    assert files.damage(tmp_path / "step_1") is None


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_leads_to_the_same_end(whole, tmp_path, capsys):
    run = without_last(whole, tmp_path)
    broken = files.checkpoints(run)[-1]
    name = damaged(broken, "flipped")
    resume(run, "--keep-checkpoints", 1)
    message = capsys.readouterr()
    assert f"{broken} is damaged (the checksum of {name} is wrong)" in message.err
    assert differences(whole, run) == ["state.json"]  # which holds --keep-checkpoints
    kept, aside = sorted(path.name for path in (run / "checkpoints").iterdir()), f"damaged_{broken.name}_"
    assert len(kept) == 2 and kept[0].startswith(aside)  # it is not one of those that --keep-checkpoints counts


def test_only_damaged_checkpoints_are_an_error_that_says_what_to_do(whole, tmp_path, capsys):
    run = without_last(whole, tmp_path)
    for folder in files.checkpoints(run):
        damaged(folder, "truncated")
    assert refused(resume, run) == 2
    assert f"delete {run / 'checkpoints'}" in capsys.readouterr().err


def test_what_a_kill_leaves_in_the_folder_is_put_right(tmp_path):
    for name in (".step_4.old", ".step_6.old", "step_6", ".step_8.tmp", ".step_2.gone"):
        (tmp_path / name).mkdir()
    files.recover(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_4", "step_6"]


def test_a_folder_that_cannot_be_written_leaves_the_earlier_one(tmp_path):
    with files.whole_folder(tmp_path / "step_1") as folder:
        (folder / "state.json").write_text('{"format": 2}')
    with pytest.raises(ValueError):
        with files.whole_folder(tmp_path / "step_1") as folder:
            (folder / "state.json").write_text("half")
            raise ValueError("no")
    assert files.damage(tmp_path / "step_1") is None and [path.name for path in tmp_path.iterdir()] == ["step_1"]


@pytest.mark.parametrize("limit, words", [(3_000_000, "step_"), (20_000, "whole: ")])  # bytes a file may have: weights, then logs
def test_a_full_disk_ends_the_run_and_leaves_the_last_checkpoint(whole, tmp_path, capsys, limit, words):
    run = without_last(whole, tmp_path)
    last = files.checkpoints(run)[-1]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        assert refused(resume, run) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    message = capsys.readouterr().err
    assert "cannot write" in message and words in message and f"{last} is complete" in message and "--resume" in message
    assert files.checkpoints(run)[-1] == last and files.damage(last) is None
    assert not list((run / "checkpoints").glob(".*"))
    resume(run)
    assert not differences(whole, run)


# ------------------------------------------------------------------------------------------------- exactly as before


def test_a_run_that_was_cut_in_the_middle_of_a_line_ends_as_the_whole_one(whole, tmp_path):
    run = without_last(whole, tmp_path)
    resume(run)
    assert not differences(whole, run)


def test_a_run_without_a_checkpoint_starts_anew_in_its_folder(whole, tmp_path, capsys):
    run = without_last(whole, tmp_path, checkpoints=3)
    (run / "checkpoints" / ".step_2.tmp").mkdir()
    (run / "summary.json").unlink(missing_ok=True)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:2]))  # it was killed while it wrote its first checkpoint
    resume(run)
    assert "starts anew" in capsys.readouterr().out and not differences(whole, run)


def test_a_run_that_was_killed_after_its_last_checkpoint_gets_its_summary(whole, tmp_path, capsys):
    run = tmp_path / "whole"
    shutil.copytree(whole, run)
    (run / "summary.json").unlink()
    resume(run)
    assert not differences(whole, run)
    assert refused(resume, run) == 2 and "raise --iterations" in capsys.readouterr().err


def test_old_weights_that_are_sampled_from_survive(tmp_path, flags):
    start(tmp_path, "whole", flags, "--iterations", 4, "--sync-every", 8)
    run = without_last(tmp_path / "whole", tmp_path, name="parts")
    assert (files.checkpoints(run)[-1] / "sampled.safetensors").exists()
    resume(run)
    assert not differences(tmp_path / "whole", run)


@pytest.mark.slow  # bfloat16 is slow on a CPU
def test_float32_masters_of_bfloat16_weights_survive(tmp_path, flags):
    """At 1e-6 two steps change next to no weight in bfloat16, and what a resumed run lost would be the whole of them."""
    start(tmp_path, "whole", flags, "--iterations", 4, "--dtype", "bfloat16", "--algo", "ppo", "--lr", 1e-6, "--critic-lr", 1e-6)
    run = without_last(tmp_path / "whole", tmp_path, name="parts")
    saved = load_file(files.checkpoints(run)[-1] / "policy_optimizer.safetensors")
    weights = load_file(files.checkpoints(run)[-1] / "model.safetensors").values()
    assert sum(".master" in name for name in saved) == len(weights) > 0
    resume(run)
    assert not differences(tmp_path / "whole", run)


def test_differences_are_seen(whole, tmp_path, flags):
    """The comparison that all these tests rest on."""
    start(tmp_path, "other", flags, "--iterations", 6, "--lr", 1.1e-3)
    found = differences(whole, tmp_path / "other")
    assert {"metrics.jsonl", "model.safetensors", "policy_optimizer.safetensors", "arrays of buffer"} <= set(found)
    run = tmp_path / "whole"
    shutil.copytree(whole, run)
    path = files.checkpoints(run)[-1] / "random" / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"cuda": [[1]]}))
    assert differences(whole, run) == ["random/state.json"]


def test_the_global_generators_go_on_where_they_were(tmp_path):
    generators = checkpoints.GlobalRandomness(3)
    draw = lambda: (random.random(), random.gauss(0, 1), np.random.normal(), torch.rand(2).tolist())  # noqa: E731
    draw()
    files.write_state(tmp_path / "random", generators.state_dict())
    expected = draw()
    checkpoints.GlobalRandomness(4).load_state_dict(files.read_state(tmp_path / "random"))
    assert draw() == expected


@pytest.fixture
def ctrl_c():
    """A shell's background job ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_stop_signal_ends_the_run_with_a_checkpoint_of_the_iteration(whole, tmp_path, flags, monkeypatch, capfd, number, ctrl_c):
    real = samplers.collect

    def collect(*arguments, iteration, **more):
        if iteration == 3:
            os.kill(os.getpid(), number)
        return real(*arguments, iteration=iteration, **more)

    before = signal.getsignal(number)
    monkeypatch.setattr(samplers, "collect", collect)
    assert refused(start, tmp_path, "whole", flags, "--iterations", 6) == 128 + number
    assert signal.getsignal(number) == before
    run = tmp_path / "whole"
    told = capfd.readouterr().err
    assert f"{number.name}: the run ends after this iteration" in told and "ended after iteration 3 of 6" in told
    assert f"--resume {run}" in told
    assert json.loads((files.checkpoints(run)[-1] / "state.json").read_text())["iteration"] == 3
    monkeypatch.undo()
    resume(run)
    assert not differences(whole, run)


def test_a_second_signal_acts_at_once(capfd, ctrl_c):
    with runs.Interrupt(lambda: None) as stop:
        assert stop.signal == 0
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.signal == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)


def test_of_several_processes_a_repeated_signal_is_the_launchers(monkeypatch, capfd, ctrl_c):
    """A scheduler signals all processes, and the launcher among them passes it on."""
    monkeypatch.setattr(runs.ranks, "world", lambda: 2)
    with runs.Interrupt(lambda: None) as stop:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
        assert stop.signal == signal.SIGINT and capfd.readouterr().err.count("another 10 s later ends it at once") == 1
        stop.at -= stop.REPEATED + 1
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)


def test_an_adapter_does_not_need_the_cache_that_it_began_from(tmp_path, quick_flags, tiny_folder):
    more, flags = ("--lora-rank", 2, "--kl-coef", 0.01, "--iterations", 2, "--checkpoint-every", 1), quick_flags
    cache = tmp_path / "cache"
    start(tmp_path, "whole", flags, *more)
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    shutil.rmtree(files.checkpoints(tmp_path / "parts")[-1])
    resume(tmp_path / "parts", "--cache-dir", cache)
    assert not cache.exists() and not [
        name for name in differences(tmp_path / "whole", tmp_path / "parts") if name not in ("state.json", "adapter_config.json")]
    from peft import AutoPeftModelForCausalLM

    from models import load_policy
    last = files.checkpoints(tmp_path / "parts")[-1]
    AutoPeftModelForCausalLM.from_pretrained(last)  # peft itself finds the base, while the folder is where it was
    moved = tmp_path / "moved"
    shutil.move(last, moved)
    assert load_policy(moved)[0]
    shutil.rmtree(moved / "base")
    with pytest.raises(MissingData, match="needs its base model"):
        load_policy(moved)


def test_logs_without_checkpoints_are_not_erased(tmp_path, quick_flags, capsys):
    start(tmp_path, "gone", quick_flags, "--iterations", 2)
    shutil.rmtree(tmp_path / "gone" / "checkpoints")
    before = (tmp_path / "gone" / "metrics.jsonl").read_text()
    with pytest.raises(SystemExit):
        resume(tmp_path / "gone")
    assert "checkpoints are gone" in capsys.readouterr().err and (tmp_path / "gone" / "metrics.jsonl").read_text() == before


def test_a_checkpoint_that_is_removed_while_it_is_read_is_not_called_damaged(tmp_path, monkeypatch, capsys):
    def save(step):
        with files.whole_folder(tmp_path / "checkpoints" / f"step_{step}") as folder:
            (folder / "state.json").write_text('{"format": 2}')
    save(1)
    real = files.digest

    def digest(path):
        if (tmp_path / "checkpoints" / "step_1").exists():  # the trainer drops it meanwhile and saves another
            shutil.rmtree(tmp_path / "checkpoints" / "step_1")
            save(3)
        return real(path) if path.exists() else ""
    monkeypatch.setattr(files, "digest", digest)
    assert files.last_checkpoint(tmp_path).name == "step_3" and "damaged" not in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------- changes


def edit_config(run, **changes):
    config = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump(config | changes))


def test_a_setting_changed_in_the_config_is_named_and_refused_or_allowed(whole, tmp_path, capsys):
    run = without_last(whole, tmp_path)
    edit_config(run, tau=7.0)
    assert refused(resume, run) == 2
    message = capsys.readouterr().err
    assert "--tau was 30.0" in message and "cannot become 7.0" in message and "max_grad_norm" in message
    edit_config(run, tau=30.0, lr=2e-3)
    resume(run)
    assert "changed on resume: --lr 0.001 -> 0.002" in capsys.readouterr().out


def test_checkpoints_of_a_version_with_another_format_are_refused(whole, tmp_path, capsys):
    run = without_last(whole, tmp_path)
    folder = files.checkpoints(run)[-1]
    with files.whole_folder(run / "checkpoints" / "step_99999") as newer:
        (newer / "state.json").write_text(json.dumps(json.loads((folder / "state.json").read_text()) | {"format": 99}))
    assert refused(resume, run) == 2 and "format 99" in capsys.readouterr().err


def test_a_key_that_this_code_does_not_know_says_where_it_comes_from(whole, tmp_path, capsys):
    run = without_last(whole, tmp_path)
    edit_config(run, gone=1)
    assert refused(resume, run) == 2
    message = capsys.readouterr().err
    assert "gone" in message and "another version" in message


# ------------------------------------------------------------------------------------------------- two at once


def test_a_folder_belongs_to_one_process(whole, tmp_path, flags, capsys):
    run = without_last(whole, tmp_path)
    with files.claim(run):
        assert refused(resume, run) == 2
        message = capsys.readouterr().err
        assert f"{run} is being trained by process {os.getpid()} on" in message
        assert refused(start, tmp_path, "whole", flags) == 2 and "is being trained by" in capsys.readouterr().err
    assert refused(start, tmp_path, "whole", flags) == 2 and f"exists already: choose another --name, or go on with --resume {run}" in \
        capsys.readouterr().err
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("")
    assert refused(start, tmp_path, "mine", flags) == 2 and "it is no run" in capsys.readouterr().err


def test_a_full_disk_at_the_first_weights_for_samplers_is_told_and_the_name_is_free(tmp_path, capsys):
    (tmp_path / ".sampler_weights").mkdir()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(SystemExit) as stop, files.told_plainly(tmp_path):
            samplers.write_weights({"weight": torch.zeros(1000)}, tmp_path / ".sampler_weights" / "x.safetensors", 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    message = capsys.readouterr().err
    assert stop.value.code == 2 and f"cannot write {tmp_path}: File too large" in message and message.endswith("then start again\n")
    with files.claim(tmp_path, new=True):
        pass


def test_a_name_whose_process_died_before_it_wrote_anything_is_free(tmp_path, capsys):
    with files.claim(tmp_path / "x", new=True):
        pass
    (tmp_path / "x" / ".config.yaml.tmp").write_text("half of th")
    (tmp_path / "x" / ".sampler_weights").mkdir()
    with files.claim(tmp_path / "x", new=True):
        with pytest.raises(SystemExit):
            files.claim(tmp_path / "x", new=True)
    assert "being trained" in capsys.readouterr().err


def test_readers_of_a_growing_run_leave_out_half_a_line(whole, tmp_path):
    """compare, show and replay while a run writes: each through its command line."""
    run = without_last(whole, tmp_path)
    for command in (["compare", run, "--y", "fresh/reward", "--out", tmp_path / "c"], ["show", run], ["replay", run]):
        eval_module.dispatch(list(map(str, command)))


# ------------------------------------------------------------------------------------------------- not finite


def messed(monkeypatch, mess, at=2):
    """`mess(learner, episodes)` once, after the advantages of iteration `at`."""
    real = train_module.add_advantages

    def add_advantages(learner, episodes):
        real(learner, episodes)
        if episodes[0].iteration == at:
            mess(learner, episodes)

    monkeypatch.setattr(train_module, "add_advantages", add_advantages)


def events_of(run):
    return [line for line in map(json.loads, (run / "episodes.jsonl").read_text().splitlines()) if "event" in line]


def spoil_weight(learner, episodes):
    with torch.no_grad():
        dict(learner.policy.named_parameters())["model.layers.1.mlp.up_proj.weight"][0, 0] = math.nan


def spoil_module(learner, episodes):
    learner.policy.model.layers[1].mlp.register_forward_hook(
        lambda module, inputs, output: output * math.inf)


def spoil_gradient(monkeypatch):
    real = update_module.policy_loss

    def policy_loss(name, logprobs_BT, *arguments, **more):
        loss, part = real(name, logprobs_BT, *arguments, **more)
        return loss + (logprobs_BT * 0).square().sum().sqrt(), part  # the gradient of sqrt at 0

    monkeypatch.setattr(update_module, "policy_loss", policy_loss)


@pytest.mark.parametrize("mess, words", [
    (spoil_weight, ["weights of the policy: model.layers.1.mlp.up_proj.weight"]),
    (spoil_module, ["log-probs (", "episodes: iteration 2 group"]),
])
def test_what_is_not_finite_is_named_where_it_starts(tmp_path, flags, monkeypatch, mess, words):
    messed(monkeypatch, mess)
    assert refused(start, tmp_path, "x", flags, "--iterations", 3) == 2
    event = events_of(tmp_path / "x")[0]
    assert "not finite" in event["event"] and event["iteration"] == 2
    assert all(word in event["where"] for word in words), event["where"]


def test_a_loss_or_a_gradient_that_is_not_finite_is_named(tmp_path, flags, monkeypatch, capsys):
    spoil_gradient(monkeypatch)
    assert refused(start, tmp_path, "gradient", flags, "--iterations", 2) == 2
    where = events_of(tmp_path / "gradient")[0]["where"]
    assert where.startswith("gradient of policy lm_head.weight") or where.startswith("gradient of policy model.norm.weight"), where
    assert "of a finite loss" in where and "it starts in: gradient of policy" in capsys.readouterr().out
    monkeypatch.undo()
    real = update_module.policy_loss
    monkeypatch.setattr(update_module, "policy_loss", lambda *args, **more: (real(*args, **more)[0] * math.inf, {}))
    assert refused(start, tmp_path, "loss", flags, "--iterations", 2) == 2
    assert events_of(tmp_path / "loss")[0]["where"] == "loss (ppo_clip), of finite log-probs and advantages"


@pytest.mark.parametrize("place", ["advantages", "values", "log-probs in sampling", "probe"])
def test_what_is_not_finite_outside_an_update_ends_the_run_with_its_name(tmp_path, flags, monkeypatch, capsys, place):
    more, words = [], ["advantages (grpo) from finite rewards (NaN) of 1 of 12 episodes: iteration 1 group 3"]
    if place == "advantages":
        real = judge.compute_advantages

        def compute_advantages(*arguments, **options):
            advantages_BT = real(*arguments, **options)
            advantages_BT[0] = math.nan
            return advantages_BT

        monkeypatch.setattr(judge, "compute_advantages", compute_advantages)
    elif place == "values":
        more, words = ["--algo", "ppo"], ["values of the critic (NaN)"]
        real = setup.make_learner

        def make_learner(*arguments):
            learner = real(*arguments)
            learner.critic.head.bias.data.fill_(math.nan)
            return learner

        monkeypatch.setattr(setup, "make_learner", make_learner)
    elif place == "probe":
        more, words = ["--tau", "auto", "--replay-options", "probe_episodes", 4, "--replay-updates", 0], ["log-probs of the policy", "weights of the policy: lm_head"]
        real = train_module.token_log_ratios

        def token_log_ratios(learner, episodes):
            learner.policy.lm_head.weight.data[3] = math.nan
            return real(learner, episodes)

        monkeypatch.setattr(train_module, "token_log_ratios", token_log_ratios)
    else:
        words = ["not finite in sampling", "it starts in: weights of the policy: lm_head.weight"]
        real = train_module.update

        def spoiled(learner, *arguments, **options):
            metrics = real(learner, *arguments, **options)
            learner.policy.lm_head.weight.data[3] = math.nan
            return metrics

        monkeypatch.setattr(train_module, "update", spoiled)
        more = ["--replay", "none"]
    assert refused(start, tmp_path, "x", flags, "--iterations", 2, *more) == 2
    message = capsys.readouterr().err
    assert all(word in message for word in words), message


# ------------------------------------------------------------------------------------------------- told once


def test_answers_that_are_never_valid_are_told_once_and_not_again_on_resume(tmp_path, flags, capsys):
    more = ["--max-new-tokens", 1, "--checkpoint-every", 1]
    start(tmp_path, "x", flags, *more, "--iterations", 2)
    out = capsys.readouterr().out
    assert out.count("answers was valid") == 1 and out.count("nearly every answer was cut at --max-new-tokens 1") == 1
    assert "--format-penalty" in out and "where answers are cut" in out
    resume(tmp_path / "x", "--iterations", 3)
    assert "answers was valid" not in capsys.readouterr().out
    assert [event["iteration"] for event in events_of(tmp_path / "x")] == [1, 1]


def test_a_gradient_spike_is_told_once(tmp_path, flags, monkeypatch, capsys):
    monkeypatch.setattr(watch, "SPIKE_HISTORY", 10)
    real, calls = update_module.policy_loss, []

    def policy_loss(*arguments, **more):
        calls.append(1)
        loss, part = real(*arguments, **more)
        return loss * (1e4 if len(calls) > 12 else 1), part

    monkeypatch.setattr(update_module, "policy_loss", policy_loss)
    start(tmp_path, "x", flags, "--iterations", 8, "--max-grad-norm", 0.5)
    out = capsys.readouterr().out
    assert out.count("the gradient norm of a replay update is") == 1 and out.count("the gradient norm of a fresh update is") <= 1
    assert "times the median of the last" in out and "--max-grad-norm 0.5" in out and "--replay-options max_age" in out


def test_a_collapsed_entropy_and_exploded_ratios_are_told_once(tmp_path, flags, monkeypatch, capsys):
    def sharpen(learner, episodes):
        learner.policy.lm_head.weight.data.mul_(40)

    messed(monkeypatch, sharpen, at=2)
    start(tmp_path, "x", flags, "--iterations", 4, "--lr", 1e-5)
    out = capsys.readouterr().out
    assert out.count("the entropy has collapsed to") == 1 and "--entropy-coef" in out
    assert out.count("the ratios of a fresh update have exploded") == 1 and "--fresh-epochs 1" in out
    assert out.count("the ratios of a replay update have exploded") == 1 and "--tau, --capacity or --replay-options max_age" in out


def test_a_sound_run_is_told_nothing(whole):
    assert not events_of(whole)


def test_the_median_of_a_spike_is_of_updates_before_it():
    look = watch.Watch(Args())
    usual = {"grad_norm": 1.0, "tokens_trained": 5}
    look.gradient("fresh", [usual] * 9 + [usual | {"grad_norm": 1000.0}])  # too few to know what is usual
    assert not look.told and look.norms["fresh"][-1] == 1000.0
    look.gradient("fresh", [usual] * 60)
    assert not look.told and len(look.norms["fresh"]) == watch.SPIKE_HISTORY
    look.gradient("fresh", [usual | {"grad_norm": watch.SPIKE}])
    assert not look.told
    look.gradient("fresh", [usual | {"grad_norm": 1.01 * watch.SPIKE}])
    look.gradient("replay", [usual | {"grad_norm": 1000.0}])
    assert look.told == ["spike fresh"]
    again = watch.Watch(Args())
    again.load_state_dict(json.loads(json.dumps(look.state_dict())))
    assert again.state_dict() == look.state_dict()


# ------------------------------------------------------------------------------------------------- kills


@pytest.mark.slow
def test_a_run_that_is_killed_three_times_ends_as_the_one_that_was_not(tmp_path, cache_dir):
    from benchmarks.bench_faults import SMALL
    small = ["--wandb", "off", "--cache-dir", cache_dir, *SMALL, "--iterations", 6, *SETUPS["tau auto, problem heap, keep 1"]]
    start(tmp_path, "whole", list(map(str, small)))
    kinds = random.Random(0).sample(KINDS, 3)
    story = killed_run(tmp_path, "killed", small, kinds, random.Random(1))
    assert [kind for kind, _ in story] == kinds
    assert not differences(tmp_path / "whole", tmp_path / "killed")


@pytest.mark.slow
def test_two_starts_of_one_name_at_one_moment(tmp_path, quick_flags):
    command = [sys.executable, str(ROOT / "train.py"), *quick_flags, "--runs-dir", str(tmp_path), "--name", "x", "--iterations", "2"]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=500) for process in both]
    assert sorted(process.returncode for process in both) == [0, 2]
    loser = next(error for process, (_, error) in zip(both, outputs) if process.returncode == 2)
    assert "is being trained by" in loser
    assert [line["iteration"] for line in map(json.loads, (tmp_path / "x" / "metrics.jsonl").read_text().splitlines())] == [1, 2]
