"""Many processes: two of them on the CPU (gloo), through the real command line, against one."""
import importlib.util
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import weakref
from unittest.mock import Mock

import numpy as np
import psutil
import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env
from peft import LoraConfig
from safetensors.torch import load_file
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import LlamaConfig, LlamaForCausalLM

import losses
from buffer import ReplayBuffer
from conftest import ROOT, train
from engines import engine_kind, samplers
from engines.vllm import VLLMServer
from episode import Episode
from look import fits
from models import load_policy
from runtime import files, ranks
from runtime.memories import load_buffer
from settings import Args, parse_args
from train import main
from update import gradients, make_learner, update

FSDP = ROOT / "configs" / "accelerate" / "fsdp2.yaml"


def make_episode(tokens=range(6, 12), advantage=1.0, group_id=0, policy_step=0) -> Episode:
    """The second half is sampled."""
    tokens = np.array(tokens)
    mask = np.arange(len(tokens)) >= len(tokens) // 2
    return Episode(tokens=tokens, action_mask=mask, behavior_logprobs=-1.0 * mask, advantages=advantage * mask,
                   turn_ends=[len(tokens)], turn_rewards=[1.0], reward=1.0, score=1.0, problem_id=0, group_id=group_id,
                   policy_step=policy_step, last_policy_step=policy_step, iteration=0, info={"success": True})


def launched(*command, check=True, **environment):
    done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, timeout=500, cwd=ROOT,
                          env=os.environ | {"OMP_NUM_THREADS": "1"} | environment)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def torchrun(*flags, processes=2, script="train.py", **how):
    return launched("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", processes, script, *flags, **how)


def accelerate(*flags, config=FSDP, **how):
    return launched("-m", "accelerate.commands.launch", "--config_file", config, "--num_processes", 2,
                    "--main_process_port", 0, "train.py", *flags, **how)


def metrics_of(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def agree(one, two, tolerance=1e-5, but=()):
    """All metrics of two runs but times and costs (rows are batched otherwise), to rounding."""
    lines = list(zip(metrics_of(one), metrics_of(two), strict=True))
    assert lines
    for a, b in lines:
        assert a.keys() == b.keys()
        for name in a:
            if not name.startswith(("time/", "cost/", *but)) and a[name] != b[name]:
                assert a[name] is not None and b[name] is not None and math.isclose(
                    a[name], b[name], rel_tol=tolerance, abs_tol=tolerance), (a["iteration"], name, a[name], b[name])


# five groups on two ranks, five mini-batches: in each of them one rank has no row
UNEVEN = ["--lr", "1e-4", "--iterations", "2", "--problems-per-iteration", "5", "--minibatches", "5", "--eval-problems", "17"]


def test_two_ranks_are_one_process(tmp_path, quick_flags):
    """A run of one process and of two are the same run: the same episodes, statistics over all rows (whitening), one
    denominator, the same steps; each rank keeps its shard of the buffer, and what is written is written once."""
    flags = [*quick_flags, *UNEVEN, "--runs-dir", tmp_path, "--algo", "reinforce++", "--replay-updates", "0"]
    train(*flags, "--name", "one")
    done = torchrun(*flags, "--name", "two")
    assert "processes: 2" in done.stdout and done.stdout.count("held-out success") == 1
    agree(tmp_path / "one", tmp_path / "two", but=("buffer/",))
    for name in ("metrics.jsonl", "episodes.jsonl"):
        lines = [len((tmp_path / run / name).read_text().splitlines()) for run in ("one", "two")]
        assert lines[0] == lines[1], name
    one, two = ([json.loads(line) for line in (tmp_path / run / "episodes.jsonl").read_text().splitlines()]
                for run in ("one", "two"))
    assert [row["transcript"] for row in one] == [row["transcript"] for row in two]
    checkpoint = max((tmp_path / "two" / "checkpoints").iterdir())
    shards = [load_buffer(checkpoint / name) for name in ("buffer", "buffer.1")]
    assert [shard.capacity for shard in shards] == [512, 512]
    groups = [{members[0].group_id for members in shard.members if members} for shard in shards]
    assert not groups[0] & groups[1], "a group is split over the ranks"
    assert metrics_of(tmp_path / "two")[-1]["buffer/size"] == sum(map(len, shards))


# ---------------------------------------------------------------------------------------------- without processes


class Others:
    """Two ranks in one process, one after the other: what a rank says is kept for the next round, in which both are heard."""

    def __init__(self, monkeypatch):
        self.said, self.heard, self.here = [[], []], None, 0
        monkeypatch.setattr(ranks, "world", lambda: 2)
        monkeypatch.setattr(ranks, "rank", lambda: self.here)
        monkeypatch.setattr(ranks, "gathered", self.gathered)

    def gathered(self, value):
        self.said[self.here].append(value)
        place = len(self.said[self.here]) - 1
        known = [said[place] if len(said) > place else value for said in (self.heard or self.said)]
        known[self.here] = value
        return known

    def run(self, function, rounds=4):
        """[function(0), function(1)], once what both say does not change any more."""
        for _ in range(rounds):
            results = []
            for self.here in (0, 1):
                results.append(function(self.here))
            self.heard, self.said = self.said, [[], []]
        return results


def test_whitening_and_the_largest_weight_are_of_all_ranks(monkeypatch):
    values_BT, mask_BT = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)), torch.rand(6, 5) < 0.7
    whole_BT = losses.whitened(values_BT, mask_BT)
    denominator = losses.step_denominator(mask_BT, "token_mean")
    buffers = [ReplayBuffer(8, alpha=1.0, tau=math.inf, beta=1.0, seed=seed) for seed in (0, 1)]
    for buffer, scale in zip(buffers, (1.0, 4.0)):
        buffer.add([make_episode(advantage=scale * (1 + row)) for row in range(8)], step=0)

    def one(rank):
        rows = slice(0, 2) if rank == 0 else slice(2, 6)
        part_BT = losses.whitened(values_BT[rows], mask_BT[rows], joined=ranks.joined)
        torch.testing.assert_close(part_BT, whole_BT[rows]) if others.heard else None
        count = losses.step_denominator(mask_BT[rows], "token_mean", total=ranks.total)
        buffer = buffers[rank]
        buffer.rng = np.random.default_rng(rank)
        sample = buffer.sample(3, 0, lowest=ranks.lowest)
        return count, sample

    others = Others(monkeypatch)
    (count, first), (_, second) = others.run(one)
    assert count == denominator
    inclusion = np.concatenate([first.inclusion, second.inclusion])
    np.testing.assert_allclose(np.concatenate([first.weights, second.weights]), inclusion.min() / inclusion, rtol=1e-6)


def test_a_whole_copy_of_split_weights_takes_them_one_at_a_time(tiny_folder, monkeypatch):
    policy, sampled = (load_policy(tiny_folder)[0] for _ in range(2))
    alive, most = weakref.WeakSet(), []

    def gathered(parameter):
        most.append(len(alive))
        alive.add(whole := parameter + 1)
        return whole

    monkeypatch.setattr(ranks, "whole", gathered)
    samplers.copy_weights(policy, sampled)
    assert len(most) > 10 and max(most) <= 1
    assert all(torch.equal(ours + 1, theirs) for ours, theirs in zip(policy.parameters(), sampled.parameters(), strict=True))


def test_only_the_process_that_sent_an_adapter_takes_it_back(monkeypatch):
    asked = []
    for place in (0, 1):
        monkeypatch.setattr(ranks, "rank", lambda: place)
        server = object.__new__(VLLMServer)
        server.model, server.base, server.session, server.folder = "adapter", "base", Mock(), Mock()
        server.ask = lambda path, *_, **__: asked.append((place, path))
        server.close()
        server.close()
    assert asked == [(0, "/v1/unload_lora_adapter")]


def test_shares_cover_everything_once(monkeypatch):
    for processes in (1, 2, 3, 8):
        monkeypatch.setattr(ranks, "world", lambda: processes)
        for count in (8, 9, 64, 67):
            parts = []
            for place in range(processes):
                monkeypatch.setattr(ranks, "rank", lambda: place)
                parts += list(range(count))[ranks.share(count)]
                assert ranks.share_size(count) in (count // processes, count // processes + 1)
            assert parts == list(range(count))


def test_problems_that_do_not_divide_go_to_each_process_in_turn(monkeypatch):
    """Whole iterations in the order of the ranks, and over several of them as many for each: none stores or trains on more."""
    for processes, count in ((2, 5), (8, 9), (8, 14), (3, 8), (4, 8)):
        monkeypatch.setattr(ranks, "world", lambda: processes)
        had = [0] * processes
        for turn in range(1, 1 + processes):
            parts = []
            for place in range(processes):
                monkeypatch.setattr(ranks, "rank", lambda: place)
                mine = list(range(count))[ranks.share(count, turn)]
                assert len(mine) in (count // processes, -(-count // processes))
                parts, had[place] = parts + mine, had[place] + len(mine)
            assert parts == list(range(count))
        assert had == [count] * processes


# ------------------------------------------------------------------------------------------------ how it is started


def started(monkeypatch, **environment):
    for name in ("WORLD_SIZE", "MASTER_ADDR", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return ranks.start()


def test_what_cannot_work_is_refused_at_the_start(monkeypatch):
    assert started(monkeypatch).num_processes == 1
    with pytest.raises(ValueError, match="silently started one.*torchrun"):
        started(monkeypatch, MASTER_ADDR="127.0.0.1", ACCELERATE_MIXED_PRECISION="no")
    with pytest.raises(ValueError, match=r"4 processes \(WORLD_SIZE\), but this one sees 1"):
        started(monkeypatch, WORLD_SIZE="4")
    monkeypatch.delenv("WORLD_SIZE")
    with pytest.raises(ValueError, match="fsdp_version"):
        started(monkeypatch, ACCELERATE_USE_FSDP="true", FSDP_VERSION="1")
    with pytest.raises(ValueError, match="fsdp_reshard_after_forward in the accelerate config must be true"):
        started(monkeypatch, ACCELERATE_USE_FSDP="true", FSDP_VERSION="2", FSDP_RESHARD_AFTER_FORWARD="false")
    monkeypatch.delenv("FSDP_RESHARD_AFTER_FORWARD")
    with pytest.raises(ValueError, match="gradient-checkpointing"):
        started(monkeypatch, ACCELERATE_USE_FSDP="true", FSDP_VERSION="2", FSDP_ACTIVATION_CHECKPOINTING="true")


def zero3_environment(**keys) -> dict:
    """What `accelerate launch` gives to the processes of configs/accelerate/zero3.yaml, read by its own code; it starts none
    without the deepspeed package."""
    config = ["--config_file", str(FSDP.with_name("zero3.yaml")), "--num_processes", "2", "--main_process_port", "0"]
    parser = launch_command_parser()
    args, defaults, _ = _validate_launch_command(parser.parse_args([*config, "train.py"]))
    assert args.use_deepspeed
    args.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
    for key, value in keys.items():
        setattr(args, key, value)
    before = dict(os.environ)
    return {name: value for name, value in prepare_deepspeed_cmd_env(args)[1].items() if before.get(name) != value}


@pytest.mark.parametrize("keys, told", [
    ({"zero_stage": 2}, "zero_stage 2 .* must be 3.*ddp.yaml"), ({"zero_stage": 1}, "zero_stage 1 "),
    ({"offload_param_device": "nvme"}, "offload_param_device nvme .* none or cpu"),
    ({"offload_optimizer_device": "nvme"}, "offload_optimizer_device nvme .* must be none"),
    ({"offload_optimizer_device": "cpu"}, "offload_optimizer_device cpu .* must be none.*where the weights do"),
    ({"offload_param_device": "cpu"}, "offload_optimizer_device none .* must be cpu"),
    ({"mixed_precision": "bf16"}, "mixed_precision bf16.*--dtype"),
    ({"deepspeed_config_file": "ds.json"}, "deepspeed_config_file ds.json.*zero3.yaml"),
    ({"zero3_init_flag": True}, "zero3_init_flag"), ({"gradient_clipping": 1.0}, "--max-grad-norm"),
    ({"gradient_accumulation_steps": 4}, "--micro-batch-tokens")], ids=str)
def test_what_zero3_cannot_do_is_refused(monkeypatch, keys, told):
    with pytest.raises(ValueError, match=told):
        started(monkeypatch, **zero3_environment(**keys))


@pytest.mark.parametrize("place", ["none", "cpu"])
def test_zero3_becomes_settings_of_fsdp2(monkeypatch, place):
    monkeypatch.setattr(os, "environ", zero3_environment(offload_param_device=place, offload_optimizer_device=place))
    ranks.zero3_by_fsdp2()
    wanted = {"ACCELERATE_USE_DEEPSPEED": False, "ACCELERATE_USE_FSDP": True, "FSDP_OFFLOAD_PARAMS": place == "cpu"}
    assert {name: ranks.option(name) for name in wanted} == wanted


@pytest.mark.parametrize("processes, split, kind", [(1, "false", "vllm"), (2, "false", "vllm"), (2, "true", "hf")])
def test_auto_takes_vllm_on_gpus_unless_weights_are_split(monkeypatch, processes, split, kind):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(ranks, "world", lambda: processes)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", split)
    assert engine_kind(Args())[0] == kind


@pytest.mark.slow
def test_accelerate_that_starts_one_process_is_refused(tmp_path, quick_flags):
    done = launched("-m", "accelerate.commands.launch", "--cpu", "--num_processes", 2, "train.py", *quick_flags,
                    "--runs-dir", tmp_path, check=False)
    assert done.returncode != 0 and "torchrun --nproc_per_node" in done.stderr and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_fewer_problems_than_processes_are_refused(tmp_path, quick_flags):
    done = torchrun(*quick_flags, "--problems-per-iteration", 1, "--runs-dir", tmp_path, check=False)
    assert "--problems-per-iteration 1 is less than the 2 processes" in done.stderr and not list(tmp_path.iterdir())


@pytest.mark.parametrize("flags, words", [
    (["--replay-options", "fresh_fraction", 0.05], "--replay-options fresh_fraction 0.05 of a process's 8 of --replay-batch-size 64 rounds to none"),
    (["--replay", "positive_bias", "--replay-options", "positive_fraction", 0.003], "--replay-options positive_fraction 0.003 of a process's 128")])
def test_a_share_that_rounds_to_nothing_is_refused(monkeypatch, capsys, flags, words):
    """0.05 x 64 is 3 entries for one process, 0.4 of an entry for each of eight."""
    args = parse_args(list(map(str, flags)))
    monkeypatch.setattr(ranks, "world", lambda: 8)
    with pytest.raises(SystemExit) as stop:
        main(args)
    assert stop.value.code == 2 and words in capsys.readouterr().err


@pytest.mark.slow
def test_an_empty_cache_is_filled_by_the_first_process(tmp_path, quick_flags):
    """In the others transformers writes no weights."""
    torchrun(*quick_flags, "--cache-dir", tmp_path / "cache", "--tiny-options", "updates", 1, "--eval-problems", 2, "--iterations", 1,
             "--runs-dir", tmp_path)


# --------------------------------------------------------------------------------------------------- equal to one


@pytest.mark.slow
@pytest.mark.parametrize("flags", [
    ["--algo", "ppo", "--replay-updates", "0"],
    ["--algo", "m2po", "--kl-coef", "0.01", "--fresh-epochs", "2", "--replay-updates", "0", "--problem-sampler", "heap"],
    ["--algo", "decoupled_ppo", "--lora-rank", "4", "--replay-updates", "0"],
    ["--algo", "tba", "--replay", "none"]], ids=lambda flags: flags[1])
def test_every_kind_of_update_is_that_of_one_process(tmp_path, quick_flags, flags):
    for name, start in (("one", train), ("two", torchrun)):
        start(*quick_flags, *UNEVEN, "--runs-dir", tmp_path, *flags, "--name", name)
    agree(tmp_path / "one", tmp_path / "two", but=("buffer/", "fresh/value_clip_fraction"))  # a count of ties to rounding


@pytest.mark.slow
def test_replay_over_ranks_and_its_resharding(tmp_path, quick_flags):
    """Replay, --tau auto and a critic on two ranks; then the run goes on with one process, and with two again."""
    run = tmp_path / "two"
    torchrun(*quick_flags, *UNEVEN, "--runs-dir", tmp_path, "--name", "two", "--algo", "ppo", "--priority", "td_error", "--tau",
             "auto", "--replay-options", "probe_episodes", 8, "--iterations", 3)
    before = metrics_of(run)[-1]
    assert before["replay/updates"] == 2 and before["buffer/size"] == 60 and before["buffer/added_total"] == 60
    train("--resume", run, "--iterations", 4)
    after = metrics_of(run)[-1]
    assert after["buffer/size"] == 80 and after["buffer/drawn_total"] == before["buffer/drawn_total"] + 12
    torchrun("--resume", run, "--iterations", 5)
    last = metrics_of(run)[-1]
    assert last["buffer/size"] == 100 and last["buffer/drawn_total"] == before["buffer/drawn_total"] + 24
    assert last["iteration"] == 5 and last["episodes"] == 100


@pytest.mark.slow
@pytest.mark.parametrize("flags", [["--gradient-checkpointing", "true"], ["--lora-rank", "4", "--kl-coef", "0.01"]],
                         ids=["full", "lora"])
def test_sharded_weights_give_the_same_run(tmp_path, quick_flags, flags):
    """FSDP2 through configs/accelerate/fsdp2.yaml; the checkpoint is whole, and goes on with one process."""
    flags = [*quick_flags, *UNEVEN, "--runs-dir", tmp_path, "--algo", "dapo", "--replay-updates", "0", *flags]
    train(*flags, "--name", "one")
    accelerate(*flags, "--name", "two")
    agree(tmp_path / "one", tmp_path / "two", but=("buffer/",))
    one, two = (max((tmp_path / run / "checkpoints").iterdir()) for run in ("one", "two"))
    for file in (*one.glob("*model.safetensors"), one / "policy_optimizer.safetensors"):
        ours, theirs = load_file(file), load_file(two / file.name)
        assert ours.keys() == theirs.keys()
        assert all(torch.allclose(ours[name], theirs[name], atol=2e-5) for name in ours)
    assert "FSDP" not in "".join(path.read_text() for path in two.glob("*config.json"))
    for name, start in (("one", train), ("two", accelerate)):
        start("--resume", tmp_path / name, "--iterations", 3)
    agree(tmp_path / "one", tmp_path / "two", tolerance=1e-4, but=("buffer/",))


SPLIT = """
import sys
import numpy as np, torch
import torch.distributed as dist
from runtime import ranks
from models import load_policy
from settings import Args
from test_ranks import make_episode
from update import make_learner
from update import update
from runtime.files import NotFinite
from runtime.watch import require_finite

for lora_rank in (0, 4):
    learner = make_learner(Args(algo="ppo", dtype="bfloat16", lora_rank=lora_rank), load_policy(sys.argv[1], torch.bfloat16)[0])
    episodes = [make_episode(group_id=ranks.rank())]
    for episode in episodes:
        episode.values = np.zeros(len(episode.tokens), np.float32)
    metrics = update(learner, episodes)
    assert metrics["steps"] == 1 and metrics["critic_grad_norm"] > 0, metrics
    assert {str(parameter.dtype) for parameter in learner.critic.head.parameters()} == {"torch.float32"}
groups = [dist.group.WORLD, learner.critic.head.weight.device_mesh.get_group()]
assert [group._get_backend(torch.device("cpu")).options._timeout for group in groups] == [ranks.PATIENCE] * 2
if ranks.rank() == 1:  # while the other one has nothing to say
    try:
        require_finite("values", torch.full((1, 4), torch.nan), episodes, learner.policy, learner.critic)
    except NotFinite as error:
        print("found:", error, flush=True)
ranks.barrier()
ranks.close()
"""


@pytest.mark.slow
def test_split_weights_of_two_data_types_and_what_one_process_finds(tmp_path, tiny_folder):
    """The critic's float32 head beside a body in bfloat16; NaN of one rank; how long all wait for one."""
    (tmp_path / "split.py").write_text(SPLIT)
    done = torchrun(tiny_folder, script=tmp_path / "split.py", ACCELERATE_USE_FSDP="true", FSDP_VERSION="2",
                    PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}")
    assert "found: not finite: values (NaN) of 1 of 1 episodes" in done.stdout


class Started:
    """A run of two processes in the background, once it has done an iteration."""

    def __init__(self, folder, *flags):
        self.run, self.log = folder / "x", folder / "log"
        with open(self.log, "w") as log:
            self.launcher = subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "train.py",
                 *map(str, flags), "--runs-dir", str(folder), "--name", "x", "--checkpoint-every", "0", "--iterations", "500"],
                stdout=log, stderr=log, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"})
        end = time.time() + 400
        while not (self.run / "metrics.jsonl").exists():
            assert self.launcher.poll() is None and time.time() < end, self.log.read_text()
            time.sleep(0.2)
        self.workers = [process.pid for process in psutil.Process(self.launcher.pid).children()]
        assert len(self.workers) == 2

    def ended(self):
        assert self.launcher.wait(200) != 0
        assert not any(map(psutil.pid_exists, self.workers))
        return self.log.read_text()


SLOWER = """
import sys
import time

from runtime import ranks

ranks.start()
time.sleep(2 * (ranks.rank() == 0))
ranks.close(int(sys.argv[1]))
"""


@pytest.mark.parametrize("code", [143, 0])
def test_the_launcher_ends_none_that_is_slower_to_end(tmp_path, code):
    """It sends SIGTERM to all others when one ends with an error code, as all processes of an interrupted run do."""
    (tmp_path / "slower.py").write_text(SLOWER)
    done = torchrun(code, script=tmp_path / "slower.py", check=False, PYTHONPATH=str(ROOT))
    assert done.returncode == (code != 0)
    assert set(re.findall(r"exitcode *: (-?\d+)", done.stderr)) == ({str(code)} if code else set()), done.stderr


ALONE = """
import os

from runtime import checkpoints, files
from runtime import ranks
from envs import FrozenLake

if os.environ["RANK"] == "1":
    ranks.sum_gradients = lambda *_: files.fail("what only this one has")
"""


@pytest.mark.slow
def test_an_error_of_one_process_ends_all_while_they_wait_for_it(tmp_path, quick_flags, tiny_folder):
    (tmp_path / "alone.py").write_text(ALONE)
    done = torchrun(*quick_flags, "--runs-dir", tmp_path, "--env", f"{tmp_path / 'alone.py'}:FrozenLake", "--model", tiny_folder,
                    "--env-options", "prompt", "tiny", "--max-new-tokens", 6, check=False)
    assert "error: what only this one has" in done.stderr
    assert re.findall(r"local_rank: (\d).*\n *exitcode *: 2 ", done.stderr) == ["1"], done.stderr


@pytest.mark.slow
def test_a_signal_to_one_process_ends_all_alike(tmp_path, quick_flags):
    run = Started(tmp_path, *quick_flags)
    os.kill(run.workers[1], signal.SIGTERM)
    told = run.ended()
    assert "with a checkpoint; go on" in told
    codes = set(re.findall(r"exitcode *: (-?\d+)", told))
    assert codes == {"143"}, told


@pytest.mark.slow
def test_a_signal_to_all_processes_leaves_a_whole_checkpoint_that_goes_on(tmp_path, quick_flags):
    """As a scheduler sends it; the launcher passes it on, so that it comes twice."""
    run = Started(tmp_path, *quick_flags)
    for pid in (*run.workers, run.launcher.pid):
        os.kill(pid, signal.SIGTERM)
    told, done = run.ended(), metrics_of(run.run)[-1]["iteration"]
    assert told.count("SIGTERM: the run ends after this iteration") == 2
    assert f"ended after iteration {done} of 500, with a checkpoint" in told
    state = json.loads((files.checkpoints(run.run)[-1] / "state.json").read_text())
    assert state["iteration"] == done
    torchrun("--resume", run.run, "--iterations", done + 1)
    assert [row["iteration"] for row in metrics_of(run.run)] == list(range(1, done + 2))


@pytest.mark.slow
def test_a_dead_process_ends_the_run(tmp_path, quick_flags):
    """However patient the others are with a slow one."""
    run = Started(tmp_path, *quick_flags)
    os.kill(run.workers[1], signal.SIGKILL)
    assert "SIGKILL" in run.ended()


@pytest.mark.slow
def test_masters_of_sharded_bfloat16_weights_are_whole_in_a_checkpoint(tmp_path, quick_flags):
    """They go on with one process, whose weights are again their rounding."""
    run = tmp_path / "two"
    accelerate(*quick_flags, *UNEVEN, "--runs-dir", tmp_path, "--name", "two", "--dtype", "bfloat16", "--lr", "1e-6", "--iterations", 2)
    before = masters_of(run)
    train("--resume", run, "--iterations", 3)
    after = masters_of(run)
    assert 0 < max(float((after[name] - before[name]).abs().max()) for name in before) < 1e-5
    accelerate("--resume", run, "--iterations", 4)
    assert metrics_of(run)[-1]["iteration"] == 4 and masters_of(run).keys() == before.keys()


def masters_of(run) -> dict:
    """Float32 masters of the last checkpoint, after a look at whether its weights are their rounding."""
    folder = max((run / "checkpoints").iterdir(), key=lambda path: int(path.name[5:]))
    masters = {name: tensor for name, tensor in load_file(folder / "policy_optimizer.safetensors").items() if "master" in name}
    weights = load_file(folder / "model.safetensors").values()
    assert sorted(tensor.double().sum().item() for tensor in weights) == \
        sorted(tensor.bfloat16().double().sum().item() for tensor in masters.values())
    return masters


@pytest.mark.slow
def test_zero3_is_fsdp2(tmp_path, quick_flags):
    """The same numbers from zero3.yaml as from fsdp2.yaml, also with what is split in the CPU's memory."""
    flags = [*quick_flags, *UNEVEN, "--runs-dir", tmp_path]
    accelerate(*flags, "--name", "fsdp2")
    done = torchrun(*flags, "--name", "zero3", **zero3_environment())
    assert done.stdout.count("ZeRO-3 is carried out by torch's FSDP2") == 1 and "processes: 2" in done.stdout
    offload = zero3_environment(offload_param_device="cpu", offload_optimizer_device="cpu")
    torchrun(*flags, "--name", "offload", **offload)
    for name in ("zero3", "offload"):
        agree(tmp_path / "fsdp2", tmp_path / name, tolerance=0)


def test_configs_are_what_accelerate_knows():
    kinds = {}
    for path in sorted(FSDP.parent.glob("*.yaml")):
        config = load_config_from_file(str(path))
        kinds[path.stem] = config.distributed_type.value
        assert config.mixed_precision == "no" and not config.use_cpu and path.read_text().startswith("#")
    assert kinds == {"ddp": "MULTI_GPU", "fsdp2": "FSDP", "zero3": "DEEPSPEED"}


# --------------------------------------------------------------------------------------------- gradient checkpointing


def test_gradient_checkpointing_gives_the_same_gradient(tiny_folder, monkeypatch):
    """Layers are really computed twice, dropout stays off, and sampling is not touched."""
    rng, calls = np.random.default_rng(0), []
    episodes = [make_episode(tokens=rng.integers(6, 40, 12 + row), advantage=1.0 - row) for row in range(4)]
    found = []
    for flag in (False, True):
        learner = make_learner(Args(algo="ppo", gradient_checkpointing=flag, entropy_coef=0.01), load_policy(tiny_folder)[0])
        layer = learner.policy.get_decoder().layers[0]
        hook = layer.self_attn.register_forward_hook(lambda module, *_: calls.append((flag, module.training)))
        for episode in episodes:
            episode.values = np.zeros(len(episode.tokens), np.float32)
        gradients(learner, episodes)
        hook.remove()
        assert not layer.training
        found.append([parameter.grad for module in (learner.policy, learner.critic) for parameter in module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert calls.count((True, False)) == 2 * calls.count((False, False)) and not any(training for _, training in calls)


# -------------------------------------------------------------------------------------------------------------- memory


class Peak(TorchDispatchMode):
    """The most bytes of tensors that were alive at once; kernels' own scratch is not seen."""

    def __init__(self, tensors):
        super().__init__()
        self.alive, self.peak = {}, 0
        for tensor in tensors:
            self.note(tensor)

    def note(self, tensor):
        storage = tensor.untyped_storage()
        self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor):
                self.note(tensor)
        self.alive = {key: entry for key, entry in self.alive.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return result


WIDE = dict(hidden=128, intermediate=512, layers=6, heads=4, kv_heads=2, head_dim=32, vocabulary=8000, tied=False)
NARROW = dict(hidden=128, intermediate=1536, layers=4, heads=4, kv_heads=2, head_dim=32, vocabulary=200, tied=True)


@pytest.mark.parametrize("shape, flags", [
    (WIDE, {}), pytest.param(WIDE, {"dtype": "bfloat16"}, marks=pytest.mark.slow),
    pytest.param(WIDE, {"dtype": "bfloat16", "gradient_checkpointing": True}, marks=pytest.mark.slow),
    pytest.param(WIDE, {"dtype": "bfloat16", "lora_rank": 8}, marks=pytest.mark.slow), (WIDE, {"algo": "ppo"}),
    (WIDE, {"kl_coef": 0.1}), (NARROW, {"gradient_checkpointing": True}),
    pytest.param(NARROW, {"dtype": "bfloat16", "lora_rank": 8, "gradient_checkpointing": True}, marks=pytest.mark.slow)],
    ids=lambda value: "-".join(map(str, value)) if "hidden" not in value else "narrow" if value["tied"] else "wide")
def test_memory_is_what_torch_allocates(shape, flags):
    rows, length = 4, 512  # of each of two micro-batches; half of the tokens are sampled, as many as a chunk of logits
    config = LlamaConfig(vocab_size=shape["vocabulary"], hidden_size=shape["hidden"], intermediate_size=shape["intermediate"],
                         num_hidden_layers=shape["layers"], num_attention_heads=shape["heads"], head_dim=shape["head_dim"],
                         num_key_value_heads=shape["kv_heads"], tie_word_embeddings=shape["tied"])
    assert fits.shape_of(config) == shape
    policy = LlamaForCausalLM(config).to(getattr(torch, flags.get("dtype", "float32"))).eval()
    part = fits.parameters(shape)
    assert sum(parameter.numel() for parameter in policy.parameters()) == \
        part["layer"] * shape["layers"] + part["embedding"] + part["head"] + shape["hidden"]
    learner = make_learner(Args(max_turns=1, max_new_tokens=length, micro_batch_tokens=rows * length, **flags), policy)
    rng = np.random.default_rng(0)
    episodes = [make_episode(tokens=rng.integers(0, shape["vocabulary"], length)) for _ in range(2 * rows)]
    for episode in episodes:
        episode.values = np.zeros(length, np.float32)
    update(learner, episodes)  # makes the moments
    modules = [module for module in (learner.policy, learner.critic, learner.reference) if module is not None]
    held = [tensor for module in modules for tensor in module.state_dict().values()]
    held += [moment for optimizer in learner.optimizers().values() for entry in optimizer.state.values()
             for moment in entry.values()]
    with Peak(held) as peak:
        update(learner, episodes)
    said = fits.memory_gib(shape, tokens=rows * length, chunk=2**23 // shape["vocabulary"], engine_tokens=0,
                           dtype=flags.get("dtype", "float32"), lora_rank=flags.get("lora_rank", 0),
                           gradient_checkpointing="gradient_checkpointing" in flags, kl="kl_coef" in flags,
                           critic="algo" in flags)
    assert 0.93 < said["training"] * fits.GIB / peak.peak < 1.07


# numbers from the models' published config.json
PUBLISHED = {
    "Qwen2.5-0.5B": dict(hidden=896, intermediate=4864, layers=24, heads=14, kv_heads=2, head_dim=64, vocabulary=151936,
                         tied=True),
    "Qwen2.5-3B": dict(hidden=2048, intermediate=11008, layers=36, heads=16, kv_heads=2, head_dim=128, vocabulary=151936,
                       tied=True),
    "Qwen2.5-7B": dict(hidden=3584, intermediate=18944, layers=28, heads=28, kv_heads=4, head_dim=128, vocabulary=152064,
                       tied=False)}
CARDS = {"one 24 GB": (24e9 / fits.GIB, 1), "one 80 GB": (80e9 / fits.GIB, 1), "eight 80 GB": (80e9 / fits.GIB, 8)}
KINDS = {"all, float32": {"dtype": "float32"}, "all, bfloat16": {}, "LoRA, rank 16, bfloat16": {"lora_rank": 16}}


def table() -> str:
    """Markdown: GiB a GPU at the peak, and where that fits."""
    lines = ["| policy | what is trained | " + " | ".join(CARDS) + " |", "|---|---" + "|---" * len(CARDS) + "|"]
    for name, shape in PUBLISHED.items():
        for what, options in KINDS.items():
            cells = []
            for card, processes in CARDS.values():
                needed = fits.needed_gib(fits.memory_gib(shape, processes=processes, **options))
                cells.append(f"{needed:.0f}" + ("" if needed <= card else ": no"))
            lines.append(f"| {name} | {what} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def test_sizes_of_published_models():
    """The parameters that the models' cards give, and the table of docs/memory.md."""
    for name, billions in (("Qwen2.5-0.5B", 0.494), ("Qwen2.5-3B", 3.086), ("Qwen2.5-7B", 7.616)):
        part, shape = fits.parameters(PUBLISHED[name]), PUBLISHED[name]
        assert abs(part["layer"] * shape["layers"] + part["embedding"] + part["head"] - billions * 1e9) < 1e6
    assert table() in (ROOT / "docs" / "memory.md").read_text()
    one, eight = (fits.memory_gib(PUBLISHED["Qwen2.5-7B"], processes=processes) for processes in (1, 8))
    assert eight["weights"] == one["weights"] / 8 and eight["training"] < one["training"] / 1.5


@pytest.mark.parametrize("flags, words", [
    (["--dtype", "float32", "--processes", "64"], ["--model"]),
    (["--model", "FOLDER", "--dtype", "float16"], ["--dtype", "float32", "bfloat16"]),
    (["--model", "FOLDER", "--processes", "0"], ["--processes 0", "at least 1"]),
    (["--model", "FOLDER", "--tokens", "-5"], ["--tokens -5", "at least 1"]),
    (["--model", "FOLDER", "--lora-rank", "-1"], ["--lora-rank -1", "at least 0"]),
    (["--model", "tiny"], ["--model tiny", "fits anywhere"]),
    (["--model", "/nonexistent"], ["--model /nonexistent", "hub id", "run"]),
    (["--model", str(ROOT / "studies")], [f"--model {ROOT / 'studies'}", "run"])])
def test_what_cannot_be_counted_is_refused(tiny_folder, capsys, flags, words):
    with pytest.raises(SystemExit) as stop:
        fits.main([str(tiny_folder) if flag == "FOLDER" else flag for flag in flags])
    message = capsys.readouterr().err
    assert stop.value.code == 2 and all(word in message for word in words), message


def test_memory_is_counted_for_a_model_a_run_and_an_adapter(tiny_folder, tmp_path, capsys):
    run = tmp_path / "run"
    (run / "checkpoints" / "step_9").mkdir(parents=True)
    (run / "checkpoints" / "step_9" / "config.json").write_text((tiny_folder / "config.json").read_text())
    adapter = tmp_path / "adapter"
    LoraConfig(base_model_name_or_path=str(tiny_folder)).save_pretrained(adapter)
    for model in (tiny_folder, run, adapter):
        fits.main(["--model", str(model)])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 * len(set(lines)) and "a GPU needs" in lines[-1]
