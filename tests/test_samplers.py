"""Sampling beside the training, through the real command line: lockstep, queue, replay, deaths and signals."""
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import train as train_module
from conftest import ROOT, tiny_lake, train
from engines import samplers as samplers_module
from engines.hf import HFEngine
from engines.samplers import Batch, Direct, Follower, Job, Samplers, Stopped, joined, publish, take, weights_name, why_not_started
from envs import MissingData
from models import load_policy
from policies.chat import Chat
from problems import ProblemSampler
from rollout import Completion
from runtime import setup
from runtime.ledger import Ledger
from runtime.log import Clock
from runtime.watch import Watch
from settings import Args, parse_args

FROM_BUFFER = ["--replay", "uniform", "--fresh-update", "False", "--replay-batch-size", 12, "--capacity", 40]


def metrics_of(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def timeless(run):
    return [{key: value for key, value in line.items() if not key.startswith(("time/", "async/"))} for line in metrics_of(run)]


def last_checkpoint(run):
    return max((run / "checkpoints").glob("step_*"), key=lambda path: int(path.name[5:]))


def running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def children(pid: int) -> list[int]:
    """Samplers of a trainer (not multiprocessing's resource tracker)."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            if parent == pid and b"spawn_main" in (path.parent / "cmdline").read_bytes():
                found.append(int(path.parent.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def wait_for(what, seconds=450):
    end = time.time() + seconds
    while not (found := what()):
        assert time.time() < end, "it did not happen"
        time.sleep(0.2)
    return found


class Started:
    """A run in the background, with its samplers once it has done `iterations`."""

    def __init__(self, folder, *flags, iterations=2):
        self.run = folder / "x"
        self.process = subprocess.Popen([sys.executable, str(ROOT / "train.py"), *map(str, flags), "--runs-dir", str(folder),
                                         "--name", "x", "--checkpoint-every", "0"], stdout=subprocess.PIPE,
                                        stderr=subprocess.PIPE, text=True,  # a background job's children ignore Ctrl-C:
                                        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
        path = self.run / "metrics.jsonl"
        wait_for(lambda: self.process.poll() is not None or path.exists() and path.read_text().count("\n") >= iterations)
        assert self.process.poll() is None, self.process.communicate()
        self.samplers = children(self.process.pid)

    def ended(self, code, seconds=200):
        out, errors = self.process.communicate(timeout=seconds)
        assert self.process.returncode == code, out + errors
        wait_for(lambda: not any(map(running, self.samplers)), 30)  # no orphans
        assert not list((self.run / ".sampler_weights").glob("*"))
        return errors


# ------------------------------------------------------------------------------------------------------------- parts


def test_weights_go_through_a_file_whole_and_carry_their_step(tiny_folder, tmp_path):
    policy, other = load_policy(tiny_folder)[0], load_policy(tiny_folder)[0]
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.1)
    publish(policy, tmp_path / "weights.safetensors", 17)
    assert [path.name for path in tmp_path.iterdir()] == ["weights.safetensors"]
    assert take(other, tmp_path / "weights.safetensors") == 17
    assert all(torch.equal(a, b) for a, b in zip(policy.parameters(), other.parameters()))


def test_runs_that_share_a_folder_do_not_share_a_file_and_a_resumed_one_takes_its_own(tmp_path, monkeypatch):
    """Two trainers in two containers may have one process id, one run's name and one path."""
    runs = [tmp_path / folder / "x" for folder in "ab"]
    for run in runs:
        run.mkdir(parents=True)
    names = [weights_name(run) for run in runs]
    monkeypatch.setattr("engines.samplers.os.getpid", lambda: 4711)
    assert names == [weights_name(run) for run in runs] and len(set(names)) == 2 and names[0].startswith("x_")
    monkeypatch.setattr("engines.samplers.socket.gethostname", lambda: "another")
    assert not set(names) & {weights_name(run) for run in runs}


def test_a_sampler_takes_newer_weights_between_turns_and_stops_when_told(tiny_folder, tmp_path):
    policy, path = load_policy(tiny_folder)[0], tmp_path / "weights.safetensors"
    engine = SimpleNamespace(syncs=0, generate=lambda sequences, ids: [])
    engine.sync = lambda: setattr(engine, "syncs", engine.syncs + 1)
    steps = lambda: follower.generate([], []) or follower.step  # noqa: E731
    version, stop = SimpleNamespace(value=3), SimpleNamespace(value=0)
    publish(policy, path, 3)
    follower = Follower(engine, policy, path, version, stop)
    assert [steps(), steps()] == [3, 3] and engine.syncs == 1
    publish(policy, path, 5)
    version.value = 5
    assert steps() == 5 and engine.syncs == 2
    stop.value = 1
    with pytest.raises(Stopped):
        follower.generate([], [])


class Scripted:
    """An engine that says `answers` in turn to every conversation, and that is told of new weights; it notes how many it plays."""

    def __init__(self, answers, version=None, newer_before=()):
        self.answers, self.version, self.newer_before, self.asked, self.step = answers, version, newer_before, [], 0

    def generate(self, sequences, ids, *_):
        self.asked.append(len(sequences))
        if self.version and len(self.asked) in self.newer_before:
            self.version.value += 1
        return [Completion(answer, [-0.5] * len(answer), "stop") for answer in [self.answers] * len(ids)]

    def sync(self):
        pass


@pytest.fixture
def played(tiny_folder, monkeypatch):
    """What a sampler sends of a job of 6 episodes (3 problems twice) with the engine."""
    monkeypatch.setattr("engines.samplers.take", lambda policy, path: path.value)  # the weights' step is the version itself
    _, tokenizer = load_policy(tiny_folder)
    chat, problems = Chat(tokenizer), np.array(tiny_lake().problems("train", 3))

    def play(engine, version, **more):
        job = Job(1, np.arange(3), np.arange(3), problems.repeat(2), np.arange(3).repeat(2), np.arange(6))
        follower = Follower(engine, None, version, version, SimpleNamespace(value=0))
        settings = dict(max_turns=3, max_new_tokens=6, temperature=1.0, format_penalty=0.0, context_length=1024, parallel=4)
        return follower.play(job, chat, tiny_lake, settings | more), tokenizer
    return play


def test_tokens_that_new_weights_read_again_are_counted(played):
    """Three turns of a token that moves nobody. Weights that come while turn 2 is sampled are taken before turn 3: the engine has
    read a conversation up to the last token but one of turn 2."""
    version = SimpleNamespace(value=3)
    for newer_before, turns in ((), 0), ((2,), 2), ((1,), 1), ((1, 2), 3), ((3,), 0):  # 3: turn 1 and turn 2 again
        message, tokenizer = played(Scripted([9, 9], version, newer_before), version)
        episodes, _ = message["played"]
        assert all(episode.turn_ends.tolist() == episodes[0].turn_ends.tolist() for episode in episodes)
        first, second, _ = episodes[0].turn_ends - 1
        assert message["reread"] == 6 * {0: 0, 1: first, 2: second, 3: first + second}[turns]
    ledger = Ledger({}, parameters=1)
    ledger.generated(episodes)
    ledger.settle()
    before = ledger.totals["tokens_read"]
    ledger.generated([], 17)
    ledger.settle()
    assert ledger.totals["tokens_read"] == before + 17


def test_an_episode_that_is_never_played_has_the_step_of_the_published_weights(played):
    message, _ = played(Scripted([9]), SimpleNamespace(value=12), context_length=8)
    assert all(episode.info["context_full"] and not episode.action_mask.any() for episode in message["played"][0])
    assert [(episode.policy_step, episode.last_policy_step) for episode in message["played"][0]] == [(12, 12)] * 6


def test_a_limit_for_keys_and_values_of_transformers_does_not_slice_a_batch_of_vllm(played):
    engine = Scripted([9])
    played(engine, SimpleNamespace(value=0), max_turns=1, parallel=4)
    assert engine.asked == [6]


def test_an_episode_carries_the_steps_of_its_first_and_last_token(tiny_folder):
    """An engine whose weights are one step newer at every turn."""
    policy, tokenizer = load_policy(tiny_folder)
    engine = HFEngine(policy, [tokenizer.eos_token_id], tokenizer.pad_token_id)
    turns = []
    newer = SimpleNamespace(generate=lambda *arguments: turns.append(0) or engine.generate(*arguments))
    problems = np.array(tiny_lake().problems("train", 4))
    job = Job(1, np.arange(4), np.arange(4), problems, np.arange(4), np.arange(4))
    play = dict(max_turns=4, max_new_tokens=6, temperature=1.0, format_penalty=0.0, context_length=1024)
    episodes, _ = job.play(newer, Chat(tokenizer), tiny_lake, lambda: 10 + len(turns), play)
    assert len(turns) > 1
    for episode in episodes:
        assert (episode.policy_step, episode.last_policy_step) == (11, 10 + episode.info["turns"])


def test_a_batch_that_was_too_old_gets_the_sampler_new_weights_before_its_turn(tiny_folder, beside):
    policy = load_policy(tiny_folder)[0]
    direct = Direct(SimpleNamespace(sync_every=8), policy, policy, None, None, lambda _: SimpleNamespace(sync=lambda: None), {},
                    None, 4)
    for source, start in (direct, 4), (beside(plays, sync_every=8), 0):
        for step, stale, synced in ((0, True, 0), (3, False, 0), (5, True, 5), (5, True, 5), (12, False, 5), (13, False, 13)):
            source.sync(start + step, stale=stale)
            assert source.step == start + synced


def test_batches_are_joined_in_their_order():
    batch = joined([Batch(np.array([1]), np.array([5]), ["a"], ["x"], busy=3.0, idle=1.0, reread=7),
                    Batch(np.array([2, 3]), np.array([6, 7]), ["b"], ["y"], busy=2.0, idle=0.5)])
    assert batch.asked.tolist() == [1, 2, 3] and batch.groups.tolist() == [5, 6, 7]
    assert batch.episodes == ["a", "b"] and batch.transcripts == ["x", "y"]
    assert (batch.busy, batch.idle, batch.reread) == (5.0, 1.5, 7)  # counted with their episodes, not when they arrive
    assert joined([]).episodes == [] and joined([]).asked.dtype == int


def test_without_processes_delayed_weights_are_those_of_the_last_sync(tiny_folder):
    args, policy, copied = SimpleNamespace(sync_every=3), load_policy(tiny_folder)[0], load_policy(tiny_folder)[0]
    engine = SimpleNamespace(sync=lambda: None)
    source = Direct(args, policy, copied, None, None, lambda sampled: setattr(engine, "model", sampled) or engine, {}, None, 4)
    first = next(policy.parameters())
    before = first.clone()
    for step, synced in ((5, 4), (6, 4), (7, 7), (9, 7), (12, 12)):
        with torch.no_grad():
            first.add_(1.0)
        source.sync(step, within=True)  # in the middle of an iteration: nothing
        source.sync(step)
        assert source.step == synced
        assert torch.equal(next(engine.model.parameters()), first if synced == step else before)
        before = next(engine.model.parameters()).clone()


@pytest.mark.parametrize("flags, words", [
    (["--async-options", "lockstep", "True"], ["--async-options", "lockstep", "--async-rollouts 1"]),
    (["--async-options", "lockstep", "True", "--async-rollouts", "2"], ["--async-options", "lockstep", "2"]),
    (["--async-options", "restarts", "2"], ["--async-options restarts 2", "--async-rollouts"]),
    (["--async-options", "queue", "1"], ["--async-options queue 1", "--async-rollouts"]),
    (["--async-options", "queue", "1", "lockstep", "True", "--async-rollouts", "1"], ["--async-options queue 1", "lockstep"]),
    (["--lora-rank", "4", "--engine-options", "lora_sync", "adapter", "--async-rollouts", "1"], ["lora_sync adapter", "--async-rollouts 1"]),
    (["--async-rollouts", "-1"], ["--async-rollouts -1", "at least 0"]),
    (["--sync-every", "0"], ["--sync-every 0", "above 0"]),
    (["--async-rollouts", "2", "--engine", "http://a:1"], ["--engine", "each sampler"]),
    (["--engine", "http://a:1,http://b:1"], ["--engine", "each sampler"]),
])
def test_wrong_settings_are_refused(capsys, flags, words):
    with pytest.raises(SystemExit) as stop:
        parse_args(flags)
    message = capsys.readouterr().err
    assert stop.value.code == 2 and all(word in message for word in words), message


def test_a_shared_folder_that_does_not_exist_is_refused_and_not_made(quick_flags, tmp_path):
    done = train(*quick_flags, "--runs-dir", tmp_path / "runs", "--iterations", 1, "--replay", "none", "--async-rollouts", 1,
                 "--engine-options", "shared_folder", tmp_path / "smh", check=False)
    assert done.returncode == 2 and f"error: --engine-options shared_folder {tmp_path / 'smh'} must be a folder that exists" in done.stderr
    assert not list(tmp_path.iterdir())


# ----------------------------------------------------------------------------------------- what the trainer does with samplers


def plays(args, folder, play, pipe, *_):
    """A sampler that says which job it got."""
    pipe.send({"ready": True})
    while job := pipe.recv():
        pipe.send({"played": ([job.number], [None]), "busy": 2.0, "idle": 1.0, "reread": 5})


def waits(args, folder, play, pipe, *_):
    pipe.send({"ready": True})
    time.sleep(1000)


def tells_and_hangs(args, folder, play, pipe, *_):
    pipe.send({"ready": True})
    pipe.recv()
    pipe.send({"error": "ZeroDivisionError: a bug of the task"})
    time.sleep(1000)


def refuses(args, folder, play, pipe, *_):
    pipe.send({"error": "Traceback: no server there", "refused": "no server there"})
    sys.exit(1)


def never_ready(args, folder, play, pipe, *_):
    time.sleep(1000)


def refuses_once_restarted(args, folder, play, pipe, version, stop, path):
    if path.with_name("before").exists():
        return refuses(args, folder, play, pipe)
    path.with_name("before").touch()
    tells_and_hangs(args, folder, play, pipe)


def dies_before_its_child(args, folder, play, pipe, version, stop, path):
    """The child, such as an engine's process, has the pipe open."""
    pipe.send({"ready": True})
    pipe.recv()
    if os.fork():
        os._exit(3)
    began = time.time()
    while not stop.value and time.time() < began + 30:
        time.sleep(0.1)
    os._exit(0)


@pytest.fixture
def beside(monkeypatch, tmp_path):
    """Samplers whose processes run `behave`, forked: they are there in no time."""
    started, fork = [], multiprocessing.get_context("fork")

    def start(behave, again=(), number=1, folder=tmp_path, async_rollouts=1, **flags):
        monkeypatch.setattr("engines.samplers.multiprocessing.get_context", lambda kind: fork)
        monkeypatch.setattr("engines.samplers.sampler_process", behave)
        args = Args(async_rollouts=async_rollouts, quiet=True, **flags)
        job = lambda number, asked: Job(number, np.array([number]) if asked is None else np.array(asked),  # noqa: E731
                                        np.array([number]), *[np.zeros(1, int)] * 3)
        started.append(Samplers(args, torch.nn.Linear(1, 1), None, folder, {}, job, number, 0, again))
        started[-1].begin()
        return started[-1]

    monkeypatch.setattr("engines.samplers.CLOSE_SECONDS", 0.5)
    monkeypatch.setattr("engines.samplers.LOOK_SECONDS", 0.2)
    yield start
    for source in started:
        source.close()


@pytest.mark.parametrize("behave, words", [(tells_and_hangs, "sampler 0 died: ZeroDivisionError: a bug of the task"),
                                           (dies_before_its_child, "sampler 0 died: it ended with code 3")])
def test_a_sampler_that_fails_but_keeps_its_pipe_ends_the_wait_and_is_told_at_once(beside, behave, words, capfd):
    source, began = beside(behave), time.time()
    assert source.next(1, True) is None and time.time() - began < 20
    assert words in capfd.readouterr().err and words in source.error


@pytest.mark.parametrize("second", [refuses, never_ready])
def test_one_sampler_that_cannot_start_ends_the_program_at_once_and_is_told_once(beside, capfd, second):
    behaviours, began = [refuses, second], time.time()
    with pytest.raises(SystemExit) as stop:
        beside(lambda args, *more: behaviours[int(args.engine)](args, *more), async_rollouts=2, engine="0,1", async_options={"restarts": 3})
    assert stop.value.code == 2 and time.time() - began < 20
    assert capfd.readouterr().err == "error: no server there\n"


def test_a_sampler_that_cannot_start_again_is_a_sampler_that_died(beside, capfd):
    source = beside(refuses_once_restarted, async_options={"restarts": 2})
    assert source.next(1, True) is None and source.error == "sampler 0 died: Traceback: no server there"
    (source.weights / "before").unlink()
    told = capfd.readouterr().err
    assert "started again, 2 of --async-options restarts 2: Traceback: no server there" in told and "the run ends after this iteration" in told


@pytest.mark.parametrize("error, sentence", [
    (ImportError("no vLLM"), "no vLLM"), (SystemExit(2), ""), (MissingData("no data"), "no data"), (ValueError("long"), "long"),
    (RuntimeError(), "RuntimeError()")])
def test_a_start_fails_with_a_sentence_where_the_trainers_own_would(error, sentence):
    try:
        raise error
    except BaseException as raised:
        message = why_not_started(raised)
    assert message["refused"] == sentence and "Traceback" in message["error"]


@pytest.mark.parametrize("error", [ZeroDivisionError("a bug"), SystemExit(1), KeyboardInterrupt()])
def test_a_start_that_fails_otherwise_has_a_traceback(error):
    try:
        raise error
    except BaseException as raised:
        message = why_not_started(raised)
    assert message.keys() == {"error"} and "Traceback" in message["error"]


def test_a_signal_between_the_look_and_the_wait_is_not_missed(beside):
    """The handler runs in the main thread, here just before it begins to wait."""
    source = beside(waits)
    arrived, first = source.arrived, iter([source.interrupt])
    source.arrived = Mock(put=arrived.put, get=lambda block: next(first, lambda: None)() or arrived.get(block, 20))
    began = time.time()
    assert source.next(1, True) is None and time.time() - began < 15


def test_seconds_are_those_of_the_batches_that_were_taken(beside):
    source = beside(plays, async_options={"queue": 2})
    wait_for(lambda: source.metrics()["async/batches_waiting"] or source.order(), 30)
    wait_for(lambda: source.metrics()["async/batches_waiting"] == 3, 30)
    batch = source.next(1, True)
    assert (batch.episodes, batch.busy, batch.idle, batch.reread) == ([1], 2.0, 1.0, 5)


def test_tokens_a_second_are_those_of_the_samplers_seconds_not_of_the_wait_for_them():
    clock = Clock()
    clock.laps = {"sample_s": 0.5}
    assert [clock.metrics(*of)["tokens_per_s"] for of in ((100,), (100, 4.0), (0, 0.0))] == [200, 25, None]


def test_a_resumed_run_plays_first_what_was_under_way(beside, tmp_path):
    source = beside(plays, async_options={"queue": 2})
    assert source.next(1, True).episodes == [1]
    assert source.under_way() == [[2, [2]], [3, [3]], [4, [4]]]
    left = json.loads(json.dumps([[2, [20]], [4, [40]]]))
    (tmp_path / "again").mkdir()
    resumed = beside(plays, again=left, number=4, folder=tmp_path / "again", async_options={"queue": 2})
    assert resumed.under_way() == left
    batches = [resumed.next(number, True) for number in range(4)]
    assert [batch.episodes for batch in batches] == [[2], [4], [5], [6]]
    assert [batch.asked.tolist() for batch in batches] == [[20], [40], [5], [6]]


def test_a_resumed_run_in_lockstep_begins_with_the_weights_that_were_sampled_from(beside, tmp_path):
    source = beside(plays, sync_every=3, async_options={"lockstep": True})
    kept = source.kept()["sampled"]
    with torch.no_grad():
        source.policy.weight.add_(1.0)
    source.sync(2)
    assert torch.equal(source.kept()["sampled"]["weight"], kept["weight"]) and source.step == 0
    save_file(kept, tmp_path / "sampled.safetensors")
    (tmp_path / "again").mkdir()
    resumed = beside(plays, folder=tmp_path / "again", sync_every=3, async_options={"lockstep": True})
    resumed.sync(9)
    resumed.restore(tmp_path, 7)
    other = torch.nn.Linear(1, 1)
    assert take(other, resumed.path) == 7 == resumed.step == resumed.version.value
    assert torch.equal(other.weight, kept["weight"])
    assert beside(plays, folder=tmp_path / "again", sync_every=3).kept() == {}


# -------------------------------------------------------------------------------------------------------- whole runs


def same_run(first, second) -> bool:
    weights, others = (load_file(last_checkpoint(run) / "model.safetensors") for run in (first, second))
    drift = [run / "drift.jsonl" for run in (first, second)]
    return timeless(first) == timeless(second) and all(torch.equal(weights[name], others[name]) for name in weights) and (
        not drift[0].exists() or drift[0].read_text() == drift[1].read_text())


@pytest.mark.slow
@pytest.mark.parametrize("flags, ages", [
    (FROM_BUFFER, [0, 0, 0, 0]), ([*FROM_BUFFER, "--sync-every", "3"], [0, 2, 0, 2]),
    (["--replay", "fresh"], [0, 0, 0, 0]), (["--replay", "fresh", "--tau", "auto", "--replay-options", "probe_episodes", "4"], [0, 0, 0, 0]),
], ids=["buffer alone", "delayed", "fresh update", "tau auto"])
def test_lockstep_is_the_synchronous_loop(tmp_path, quick_flags, flags, ages):
    both = [*quick_flags, *flags, "--runs-dir", tmp_path, "--iterations", 4]
    train(*both, "--name", "sync")
    train(*both, "--name", "lock", "--async-rollouts", 1, "--async-options", "lockstep", "True")
    assert same_run(tmp_path / "sync", tmp_path / "lock")
    assert [line["fresh/staleness_mean"] for line in timeless(tmp_path / "lock")] == ages
    assert (tmp_path / "lock" / "drift.jsonl").exists() == ("auto" in flags)


@pytest.fixture
def lingering(tmp_path, tiny_folder):
    """Flags of a task whose episodes take a while in a sampler's process, so that a signal meets it at work."""
    (tmp_path / "lingering.py").write_text("""
import multiprocessing
import time
from envs import FrozenLake
class Lingering(FrozenLake):
    def reset(self, problem_id, seed):
        if multiprocessing.parent_process() is not None:
            time.sleep(0.15)
        return super().reset(problem_id, seed)
""")
    return ["--env", f"{tmp_path / 'lingering.py'}:Lingering", "--model", tiny_folder, "--env-options", "prompt", "tiny",
            "--max-new-tokens", 6, "--lr", 1e-3]


def interrupted(run) -> tuple[int, list]:
    """(iterations done, jobs under way) of a run after Ctrl-C."""
    os.kill(run.process.pid, signal.SIGINT)
    run.ended(130)
    state = json.loads((last_checkpoint(run.run) / "state.json").read_text())
    return state["iteration"], [number for number, _ in state["under_way"]]


@pytest.mark.slow
def test_lockstep_goes_on_after_an_interrupt_as_the_synchronous_run(tmp_path, quick_flags, lingering):
    flags = [*quick_flags, *lingering, *FROM_BUFFER, "--sync-every", 3, "--iterations", 6]
    train(*flags, "--runs-dir", tmp_path, "--name", "sync")
    run = Started(tmp_path, *flags, "--async-rollouts", 1, "--async-options", "lockstep", "True")
    done, under_way = interrupted(run)
    assert done < 6 and under_way == [done + 1]
    train("--resume", run.run)
    assert same_run(tmp_path / "sync", run.run)


@pytest.mark.slow
def test_every_batch_is_played_once_in_a_run_that_was_interrupted(tmp_path, quick_flags, lingering):
    run = Started(tmp_path, *quick_flags, *lingering, "--replay", "none", "--async-rollouts", 1, "--async-options", "queue", 1, "--iterations", 500)
    done, under_way = interrupted(run)
    assert under_way == [done + 1, done + 2]
    train("--resume", run.run, "--iterations", done + 4)
    shown = [json.loads(line) for line in (run.run / "episodes.jsonl").read_text().splitlines()]
    first = {row["group_id"] // 6: row["problem_id"] for row in shown if "group_id" in row}  # four of a batch's first group
    assert len(shown) == 4 * len(first) and sorted(first) == list(range(1, done + 5))
    problems, sampler = np.array(tiny_lake().problems("train", 64)), ProblemSampler(64, "shuffled", group_size=4, seed=0)
    assert first == {number: problems[sampler.select(6, number)[0]] for number in range(1, done + 5)}  # as if undisturbed


def test_old_weights_with_a_bound_on_staleness_do_not_stop_the_training(tmp_path, quick_flags, capsys):
    """Weights that are up to 8 steps old and a bound of 0: once a batch was too old nothing would be trained on, and no step would
    come that brings new weights."""
    train_module.main(parse_args([*quick_flags, "--problems-per-iteration", "2", "--eval-problems", "2", "--max-turns", "2",
                                  "--replay", "none", "--sync-every", "8", "--quiet", "True", "--checkpoint-every", "0", "--runs-dir",
                                  str(tmp_path), "--name", "x", "--iterations", "8", "--max-staleness", "0"]))
    lines = metrics_of(tmp_path / "x")
    ages, dropped = ([line[f"fresh/{name}"] for line in lines] for name in ("staleness_max", "dropped_stale"))
    assert max(ages) == 1 and dropped == [8 * (age > 0) for age in ages] and sum(dropped) >= 16
    assert all(after == 0 for age, after in zip(ages, ages[1:]) if age) and lines[-1]["step"] >= 3  # it goes on
    assert capsys.readouterr().out.count("--max-staleness 0") == 1  # the warning


def test_problems_are_asked_at_the_iteration_of_the_trainer_whatever_the_batchs_number(tmp_path, quick_flags, monkeypatch):
    """Both problems are asked as batch 1 in iteration 1 and as batch 2 in iteration 4, and none comes back."""
    def beside(args, policy, folder, run, play, job, *_):
        def next(number, wait):
            if number in (1, 4):
                job(1 + number // 4)
            return joined([])
        return Mock(next=next, step=0, error=None, kept=lambda: {}, under_way=lambda: [], metrics=lambda: {})

    monkeypatch.setattr(setup, "Samplers", beside)
    train_module.main(parse_args(list(map(str, [
        *quick_flags, *FROM_BUFFER, "--async-rollouts", 1, "--problems-per-iteration", 2, "--train-problems", 2, "--eval-problems", 2,
        "--max-turns", 2, "--iterations", 5, "--quiet", True, "--runs-dir", tmp_path, "--name", "x"]))))
    assert [line["problems/since_visit_max"] for line in metrics_of(tmp_path / "x")] == [0, 1, 2, 0, 1]


def test_what_is_too_old_counts_in_its_groups_mean_and_is_not_trained_on(tmp_path, quick_flags, monkeypatch):
    """Every second episode of a group is made too old; advantages are rewards less the mean of the whole group."""
    collect, update, played, trained = samplers_module.collect, train_module.update, {}, []

    def older(*arguments, **more):
        episodes, transcripts = collect(*arguments, **more)
        for episode in episodes:
            played.setdefault(episode.group_id, []).append(episode.reward)
        for episode in episodes[::2]:
            episode.policy_step -= 3
        return episodes, transcripts

    monkeypatch.setattr(samplers_module, "collect", older)
    monkeypatch.setattr(train_module, "update", lambda learner, episodes, **how: trained.extend(episodes) or update(
        learner, episodes, **how))
    train_module.main(parse_args([*quick_flags, "--replay", "none", "--max-staleness", "2", "--advantage", "dr_grpo", "--quiet", "True",
                                  "--eval-problems", "2", "--iterations", "2", "--runs-dir", str(tmp_path), "--name", "x"]))
    assert [line["fresh/dropped_stale"] for line in metrics_of(tmp_path / "x")] == [12, 12] and len(trained) == 24
    differ = 0
    for episode in trained:
        rewards = played[episode.group_id]
        assert episode.reward in rewards[1::2]
        assert episode.advantages[episode.action_mask] == pytest.approx(episode.reward - np.mean(rewards), abs=1e-6)
        differ += abs(np.mean(rewards) - np.mean(rewards[1::2])) > 1e-6
    assert differ > 0  # a mean after the drop would be another one


def test_most_episodes_too_old_is_told_once_with_the_flags_that_help():
    answers = [{"turns": 1, "parse_failures": 0, "length_stops": 0}] * 8
    for pattern, told in ((0, 0, 8), 0), ((0, 8), 1), ((8,), 1), ((5,), 1), ((3,), 0):
        look = Watch(Args(max_staleness=1, async_rollouts=1))
        found = []
        for round in range(6):
            for too_old in pattern:
                found += look.look(answers, [], [], too_old) + look.look([], [], [], 0)  # nothing came: no new evidence
                again = Watch(look.args)
                again.load_state_dict(json.loads(json.dumps(look.state_dict())))
                look = again
        assert len(found) == told
        assert all(flag in text for text in found for flag in ("--max-staleness 1", "--async-options queue", "--sync-every"))
    look.load_state_dict({key: value for key, value in look.state_dict().items() if key != "dropped"})  # of an older checkpoint


@pytest.mark.slow
def test_a_queue_trains_on_each_episode_once_and_drops_what_is_too_old(tmp_path, quick_flags):
    flags = [*quick_flags, "--replay", "none", "--async-rollouts", 1, "--runs-dir", tmp_path]
    train(*flags, "--name", "queue", "--iterations", 5, "--async-options", "queue", 1)
    lines = metrics_of(tmp_path / "queue")
    assert all(line["fresh/episodes"] == 24 for line in lines) and lines[-1]["cost/episodes_generated"] == 120
    assert lines[-1]["cost/episodes_trained"] == 120 and lines[-1]["cost/replay_ratio"] == 1
    assert lines[-1]["cost/tokens_trained"] == lines[-1]["cost/tokens_trained_unique"]
    busy = np.diff([0, *(line["time/total_sampler_busy_s"] for line in lines)])
    tokens = [line["fresh/episodes"] * line["fresh/tokens_per_episode"] for line in lines]
    assert [line["time/tokens_per_s"] for line in lines] == pytest.approx(tokens / busy)
    groups = [json.loads(line)["group_id"] for line in (tmp_path / "queue" / "episodes.jsonl").read_text().splitlines()]
    assert len(set(groups)) == 5  # four transcripts of the first group of each batch
    # one batch being played and one that waits: none is older than the two before it, each a step
    assert max(line["fresh/staleness_max"] for line in lines) <= 2
    assert sum(line["fresh/dropped_stale"] for line in lines) == 0
    train(*flags, "--name", "young", "--iterations", 6, "--max-staleness", 0)
    lines = metrics_of(tmp_path / "young")
    assert sum(line["fresh/dropped_stale"] for line in lines) == 24 * sum(line["fresh/staleness_mean"] > 0 for line in lines) > 0
    assert lines[-1]["cost/episodes_trained"] == 144 - sum(line["fresh/dropped_stale"] for line in lines)


@pytest.mark.slow
def test_replay_beside_sampling_and_a_sampler_that_is_killed_is_replaced(tmp_path, quick_flags):
    run = Started(tmp_path, *quick_flags, *FROM_BUFFER, "--async-rollouts", 2, "--iterations", 12, "--async-options", "restarts", 1)
    assert len(run.samplers) == 2
    os.kill(run.samplers[0], signal.SIGKILL)
    errors = run.ended(0, 450)
    assert "sampler 0 died and is started again" in errors or "sampler 1 died and is started again" in errors
    assert "SIGKILL" in errors
    lines = metrics_of(run.run)
    assert lines[-1]["async/restarts"] == 1 and [line["iteration"] for line in lines] == list(range(1, 13))
    last = lines[-1]
    assert last["cost/episodes_generated"] == sum(line["fresh/episodes"] for line in lines)
    assert last["cost/episodes_trained"] == 12 * sum(line["replay/updates"] for line in lines)
    assert last["buffer/drawn_total"] == last["cost/episodes_trained"]
    assert last["buffer/added_total"] == last["cost/episodes_generated"]
    assert last["async/published_step"] == last["step"]
    assert 0 <= last["time/sampler_idle_share"] <= 1 and 0 <= last["time/trainer_idle_share"] <= 1
    assert all(line["fresh/staleness_mean"] is None or line["fresh/staleness_mean"] >= 0 for line in lines)


@pytest.mark.slow
def test_a_dead_sampler_ends_the_run_in_seconds_with_a_checkpoint(tmp_path, quick_flags):
    run = Started(tmp_path, *quick_flags, *FROM_BUFFER, "--async-rollouts", 1, "--iterations", 500)
    os.kill(run.samplers[0], signal.SIGKILL)
    errors = run.ended(1, 60)  # seconds: an iteration, a checkpoint and the end of a process beside other load
    assert "sampler 0 died: it was ended by SIGKILL" in errors and "--resume" in errors
    done = metrics_of(run.run)[-1]["iteration"]
    state = json.loads((last_checkpoint(run.run) / "state.json").read_text())
    assert state["iteration"] == done
    train("--resume", run.run, "--iterations", done + 1)
    assert [line["iteration"] for line in metrics_of(run.run)] == list(range(1, done + 2))


def test_a_task_that_fails_in_a_sampler_only_is_one_sentence_and_leaves_nothing(tmp_path, quick_flags):
    (tmp_path / "mine.py").write_text(f"""
import multiprocessing
import os
from pathlib import Path
from envs import FrozenLake
if multiprocessing.parent_process() is not None:
    Path({str(tmp_path)!r}, f"pid_{{os.getpid()}}").touch()
    raise ValueError("one process at a time may open the boards")
class Mine(FrozenLake):
    pass
""")
    done = train(*quick_flags, *FROM_BUFFER, "--env", f"{tmp_path / 'mine.py'}:Mine", "--async-rollouts", 1,
                 "--async-options", "restarts", 2, "--runs-dir", tmp_path / "runs", "--name", "x", check=False)
    assert done.returncode == 2 and done.stderr == "error: one process at a time may open the boards\n", done.stderr
    assert "processes: 1, samplers: 1\n" in done.stdout and not (tmp_path / "runs").exists()
    [pid] = [int(path.name[4:]) for path in tmp_path.glob("pid_*")]
    assert not running(pid)


@pytest.mark.slow
def test_an_error_in_a_sampler_is_shown_with_its_traceback(tmp_path, quick_flags, tiny_folder):
    (tmp_path / "once.py").write_text("""
import multiprocessing
from envs import FrozenLake
class Once(FrozenLake):
    def problems(self, split, count):
        if multiprocessing.parent_process() is not None:
            raise KeyboardInterrupt
        return super().problems(split, count)
    @property
    def stop(self):
        if multiprocessing.parent_process() is not None:
            raise ZeroDivisionError("a bug of the task")
        return ()
""")
    done = train(*quick_flags, *FROM_BUFFER, "--env", f"{tmp_path / 'once.py'}:Once", "--async-rollouts", 1, "--iterations", 3,
                 "--runs-dir", tmp_path, "--name", "x", check=False)
    assert done.returncode == 1 and "ZeroDivisionError: a bug of the task" in done.stderr and "sampler 0 died" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("number, beside", [(signal.SIGINT, 1), (signal.SIGTERM, 1), (signal.SIGTERM, 0)])
def test_a_signal_leaves_a_checkpoint_that_goes_on_and_no_process(tmp_path, quick_flags, number, beside):
    run = Started(tmp_path, *quick_flags, *FROM_BUFFER, "--iterations", 500, "--async-rollouts", beside)
    for pid in [run.process.pid] + run.samplers:  # to all of them, as a terminal or a job's scheduler does
        os.kill(pid, number)
    errors = run.ended(128 + number)
    assert "--resume" in errors
    done = metrics_of(run.run)[-1]["iteration"]
    assert json.loads((last_checkpoint(run.run) / "state.json").read_text())["iteration"] == done
    train("--resume", run.run, "--iterations", done + 1)


@pytest.mark.slow
def test_samplers_end_with_a_trainer_that_is_killed(tmp_path, quick_flags):
    run = Started(tmp_path, *quick_flags, "--replay", "none", "--async-rollouts", 1, "--iterations", 500)
    run.process.kill()
    run.process.communicate()
    wait_for(lambda: not any(map(running, run.samplers)), 30)
    assert multiprocessing.active_children() == []


@pytest.mark.slow
def test_samplers_of_a_resumed_run_start_from_a_policy_that_no_checkpoint_takes_along(tmp_path, quick_flags):
    flags = [*quick_flags, "--async-rollouts", 1, *FROM_BUFFER, "--lora-rank", 2, "--checkpoint-every", 1, "--keep-checkpoints", 1]
    train(*flags, "--runs-dir", tmp_path, "--name", "x", "--iterations", 1)
    base = last_checkpoint(tmp_path / "x") / "base"
    weights = (base / "model.safetensors").read_bytes()
    train("--resume", tmp_path / "x", "--iterations", 3)
    assert not base.exists()
    assert (tmp_path / "x" / ".start_policy" / "model.safetensors").read_bytes() == weights


@pytest.mark.slow
def test_samplers_take_a_model_that_is_named(tmp_path, quick_flags, tiny_folder):
    """A folder or hub id is a name, not a path: a run of the published configs, but for the size."""
    train(*quick_flags, "--model", tiny_folder, "--env-options", "prompt", "tiny", "--max-new-tokens", 6, "--async-rollouts", 1,
          *FROM_BUFFER, "--runs-dir", tmp_path, "--name", "x", "--iterations", 2)
    assert len(metrics_of(tmp_path / "x")) == 2
