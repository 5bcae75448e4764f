"""Where the loop's episodes come from: `Direct` samples in this process when it is asked, `Samplers` in processes of their own
beside the training, with the same methods.

A sampler plays a job (what a synchronous iteration would play), sends the episodes through its pipe and gets the next one; a
thread here, one for each, receives them. Jobs that are not taken yet are bounded, so that samplers wait for a slow trainer. Weights go through
one file that is replaced as a whole; a sampler looks for newer ones before each turn, so that an episode may hold tokens of
several policies: `policy_step` and `last_policy_step` are those of its ends.
"""
import contextlib
import hashlib
import math
import multiprocessing
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from dataclasses import dataclass, field, replace
from multiprocessing import connection
from pathlib import Path

import numpy as np
import torch
from accelerate.utils import patch_environment
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from engines import make_engine
from engines.hf import HFEngine
from engines.vllm import plain_weights
from envs import make_env_factory
from models import load_policy
from policies.chat import Chat
from rollout import collect
from runtime.files import fail

CLOSE_SECONDS = 10  # for a sampler to end before it is killed
LOOK_SECONDS = 1  # between looks whether a sampler died without ending its pipe


@dataclass
class Job:
    """A batch to be played: places `asked` (n,) and `groups` (n,) of its problems; what this process plays of it, episode by
    episode: `problems`, `group_ids`, `seeds`."""
    number: int
    asked: np.ndarray
    groups: np.ndarray
    problems: np.ndarray
    group_ids: np.ndarray
    seeds: np.ndarray

    def play(self, engine, chat, make_env, policy_step, play: dict):
        return collect(engine, chat, make_env, self.problems, self.group_ids, self.seeds, policy_step=policy_step,
                       iteration=self.number, **play)


@dataclass
class Batch:
    """Played jobs. Of samplers beside the training: their `busy` and `idle` seconds for it, and tokens that they `reread`."""
    asked: np.ndarray
    groups: np.ndarray
    episodes: list
    transcripts: list
    busy: float | None = None
    idle: float | None = None
    reread: int = 0
    # what the loop's judge finds
    arrived: int = 0  # optimiser steps when the episodes reached the trainer
    oldest: float = -math.inf  # step; episodes that were sampled earlier are too old
    sound: list = field(default_factory=list)  # episodes that can teach something
    played: list[dict] = field(default_factory=list)  # outlines of all processes' episodes
    stored: int = 0  # of all processes

    @property
    def too_old(self) -> int:
        return sum(row["policy_step"] < self.oldest for row in self.played)


def joined(batches: list[Batch]) -> Batch:
    none = np.zeros(0, int)
    return Batch(np.concatenate([none, *(batch.asked for batch in batches)]),
                 np.concatenate([none, *(batch.groups for batch in batches)]),
                 [episode for batch in batches for episode in batch.episodes],
                 [transcript for batch in batches for transcript in batch.transcripts],
                 sum(batch.busy for batch in batches), sum(batch.idle for batch in batches),
                 sum(batch.reread for batch in batches))


class Direct:
    """Samples in this process, with `policy` or, under `--sync-every` above 1, with `sampled`, which is as old as that."""

    def __init__(self, args, policy, sampled, chat, make_env, make_engine, play: dict, job, step: int):
        self.args, self.policy, self.sampled, self.chat, self.make_env, self.play = args, policy, sampled, chat, make_env, play
        self.job, self.step, self.error = job, step, None
        copy_weights(policy, sampled)
        self.engine = make_engine(sampled)

    def kept(self) -> dict:
        """For a checkpoint: the weights that are sampled from, where they are older than the policy's."""
        return {"sampled": dict(plain_weights(self.sampled))} if self.args.sync_every > 1 else {}

    def restore(self, checkpoint: Path, step: int):
        """What `kept` gave, as old as `step`."""
        if (checkpoint / "sampled.safetensors").exists():
            fill(self.sampled, load_file(checkpoint / "sampled.safetensors").items())
            self.engine.sync()
            self.step = step

    def under_way(self) -> list:
        """Nothing: a job is played when it is asked for."""
        return []

    def begin(self):
        """Nothing to wait for, and so nothing to interrupt."""

    interrupt = begin

    def next(self, number: int, wait: bool) -> Batch:
        job = self.job(number)
        played = job.play(self.engine, self.chat, self.make_env, self.step, self.play)
        self.engine.release()
        return Batch(job.asked, job.groups, *played)

    def sync(self, step: int, within: bool = False, stale: bool = False):
        """`within`: in the middle of an iteration, where nothing is sampled. `stale`: a whole batch was dropped as too old, so
        that no step may come before there are newer weights."""
        if not within and step - self.step >= (1 if stale else self.args.sync_every):
            copy_weights(self.policy, self.sampled)
            self.engine.sync()
            self.step = step

    def metrics(self) -> dict:
        return {}

    def close(self):
        self.engine.close()


@torch.no_grad()
def fill(policy, weights):
    """Copies (name, tensor) pairs into the parameters, one at a time: of split ones, whole copies of all might not fit."""
    left = dict(policy.named_parameters())
    for name, weight in weights:
        left.pop(name).copy_(weight)
    assert not left, f"there are no weights for {', '.join(left)}"


def copy_weights(policy, sampled):
    if sampled is not policy:
        fill(sampled, plain_weights(policy))


def publish(policy, path: Path, step: int, dtype: torch.dtype | None = None):
    """Writes the policy's weights, LoRA adapters merged, under their Hugging Face names; a reader never sees half of them."""
    write_weights({name: weight.to("cpu", dtype).contiguous() for name, weight in plain_weights(policy)}, path, step)


def write_weights(weights: dict[str, torch.Tensor], path: Path, step: int):
    temporary = path.with_name(f".{path.name}.tmp")
    save_file(weights, temporary, metadata={"step": str(step)})
    os.replace(temporary, path)


def weights_name(run: Path) -> str:
    """A file's name of this run only, on all machines that share a folder, and the same when it is resumed."""
    folder = run.stat()
    place = f"{socket.gethostname()} {folder.st_dev} {folder.st_ino}"
    return f"{run.resolve().name}_{hashlib.sha256(place.encode()).hexdigest()[:12]}.safetensors"


def take(policy, path: Path) -> int:
    """Fills the policy from what `publish` wrote; returns its step."""
    with safe_open(path, "pt") as file:
        fill(policy, ((name, file.get_tensor(name)) for name in file.keys()))
        return int(file.metadata()["step"])


class Stopped(Exception):
    """The trainer wants no more."""


class Follower:
    """The sampler's engine: takes newer weights before a turn, `step` is theirs. `reread`: tokens of a job that were read again,
    since new weights have no use for the keys and values of the old ones."""

    def __init__(self, engine, policy, path: Path, version, stop):
        self.engine, self.policy, self.path, self.version, self.stop, self.step = engine, policy, path, version, stop, -1
        self.reread, self.known = 0, {}  # known: the tokens of each conversation that the engine has read

    def refresh(self) -> bool:
        """Whether there were newer weights."""
        if self.stop.value:
            raise Stopped
        newer = self.version.value > self.step
        if newer:
            self.step = take(self.policy, self.path)
            self.engine.sync()
        return newer

    def generate(self, sequences, ids, *more, **options):
        if self.refresh():
            for id, sequence in zip(ids, sequences):
                known = self.known.get(id, [])
                self.reread += len(known) if sequence[:len(known)] == known else 0
        completions = self.engine.generate(sequences, ids, *more, **options)
        self.known = {id: sequence + completion.tokens[:-1]  # a turn's last token is read with what follows it
                      for id, sequence, completion in zip(ids, sequences, completions)}
        return completions

    def play(self, job: Job, chat, make_env, play: dict) -> dict:
        """What came of the job, and what it cost."""
        began, self.reread, self.known = time.monotonic(), 0, {}
        self.refresh()  # an episode that is never played has a step, too
        if not isinstance(self.engine, HFEngine):  # the others bound their own memory
            play = play | {"parallel": len(job.seeds)}
        played = job.play(self, chat, make_env, lambda: self.step, play)
        if isinstance(self.engine, HFEngine):
            self.engine.release()
        return {"played": played, "busy": time.monotonic() - began, "reread": self.reread}


def end_with_parent():
    """A trainer that was killed closes nothing: its samplers must not run on."""
    connection.wait([multiprocessing.parent_process().sentinel])
    os._exit(1)


def sampler_process(args, folder, play: dict, pipe, version, stop, path: Path):
    """Plays jobs from `pipe` until None comes; what it sends is a dict: episodes, an error, or that it is ready."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; the trainer decides
    threading.Thread(target=end_with_parent, daemon=True).start()
    with contextlib.ExitStack() as stack:
        try:
            make_env = make_env_factory(args.env, args.env_options)
            policy, processor = load_policy(folder, getattr(torch, args.dtype), args.trust_remote_code)
            policy, chat = policy.to("cuda" if torch.cuda.is_available() else "cpu"), Chat(processor)
            take(policy, path)
            engine = stack.enter_context(contextlib.closing(make_engine(args, policy, chat, folder)))
            follower = Follower(engine, policy, path, version, stop)
            pipe.send({"ready": True})
            idle_since = None
            while job := pipe.recv():
                idle = time.monotonic() - idle_since if idle_since else 0.0
                pipe.send(follower.play(job, chat, make_env, play) | {"idle": idle})
                idle_since = time.monotonic()
        except Stopped:
            pass
        except BaseException as error:  # told before the engine is closed, which may hang then
            with contextlib.suppress(OSError):
                pipe.send(why_not_started(error))
            sys.exit(1)


def why_not_started(error: BaseException) -> dict:
    """The traceback; `refused`, which counts before the run has begun, is the sentence for what is one where the trainer samples
    itself (no vLLM, no server)."""
    message = {"error": traceback.format_exc()}
    if isinstance(error, SystemExit) and error.code == 2:  # `fail` has told it
        message["refused"] = ""
    elif isinstance(error, (ImportError, RuntimeError, ValueError)):
        message["refused"] = str(error) or repr(error)
    return message


def gpu_of(sampler: int, visible: list[str]) -> str | None:
    """The GPU of a sampler; the first visible one is the trainer's, and also theirs where it is the only one.

    >>> gpu_of(0, ["0", "1", "2"]), gpu_of(2, ["0", "1", "2"]), gpu_of(1, ["5"]), gpu_of(0, [])
    ('1', '1', '5', None)
    """
    others = visible[1:] or visible
    return others[sampler % len(others)] if others else None


def visible_gpus() -> list[str]:
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return named or [str(number) for number in range(torch.cuda.device_count())]


def heard(process, pipe) -> dict:
    """What a sampler says next; an error without words where it is gone."""
    try:
        while not pipe.poll(LOOK_SECONDS):
            if not process.is_alive() and not pipe.poll():  # its own children may hold the pipe open
                return {"error": ""}
        return pipe.recv()
    except (EOFError, OSError):
        return {"error": ""}


class Samplers:
    """`--async-rollouts` processes that play jobs beside the training. `next` gives what has arrived."""

    def __init__(self, args, policy, folder, run: Path, play: dict, job, number: int, step: int, again=()):
        """`job`: (number, None or the places that it asks) -> Job, called in the trainer's thread only: first those of `again`,
        which `under_way` gave, then in rising order from `number` on."""
        self.args, self.policy, self.folder, self.play, self.job, self.number = args, policy, folder, play, job, number
        self.beside = args.async_options
        self.context = multiprocessing.get_context("spawn")
        # without locks: a sampler that is killed while it holds one would stop all
        self.version, self.stop = self.context.Value("q", -1, lock=False), self.context.Value("b", 0, lock=False)
        shared_folder = args.engine_options["shared_folder"]
        self.weights = Path(shared_folder or run) / ".sampler_weights"
        self.weights.mkdir(parents=True, exist_ok=True)
        for old in self.weights.glob("*") if not shared_folder else ():  # of a trainer that was killed
            old.unlink()
        self.path, self.step = self.weights / weights_name(run), -args.sync_every
        self.sync(step)
        self.jobs = queue.SimpleQueue()  # for samplers; None: there are no more
        self.arrived = queue.SimpleQueue()  # (job's number, batch); None wakes who waits
        self.open, self.again = {}, deque(again)  # number: asked, of jobs whose batch was not taken; such of the run before
        self.restarts, self.error, self.interrupted, self.closing = 0, None, False, False
        self.ready, self.refused = set(), None  # numbers of those that were ready once; why another cannot start
        self.processes, self.lock = {}, threading.Lock()
        pipes = [self.start(number) for number in range(args.async_rollouts)]
        self.threads = [threading.Thread(target=self.look_after, args=sampler, daemon=True) for sampler in enumerate(pipes)]
        for thread in self.threads:
            thread.start()

    def kept(self) -> dict:
        """As Direct.kept in lockstep; else nothing: samplers begin with the policy's own weights."""
        return {"sampled": load_file(self.path)} if self.beside["lockstep"] and self.args.sync_every > 1 else {}

    def restore(self, checkpoint: Path, step: int):
        """What `kept` gave, as old as `step`; before the first `next`."""
        if (checkpoint / "sampled.safetensors").exists():
            write_weights(load_file(checkpoint / "sampled.safetensors"), self.path, step)
            self.step = self.version.value = step

    def under_way(self) -> list:
        """[number, asked] of the jobs that were given out and not taken, for a checkpoint."""
        return [[number, asked.tolist()] for number, asked in self.open.items()] + list(self.again)

    def start(self, number: int) -> connection.Connection:
        ours, theirs = self.context.Pipe()
        args, engines, gpu = self.args, self.args.engine.split(","), gpu_of(number, visible_gpus())
        args = replace(args, lora_rank=0, engine_options=args.engine_options | {"lora_sync": "merge"},  # what it gets is merged
                       engine=engines[number % len(engines)], dtype=self.beside["dtype"] or args.dtype,
                       quiet=args.quiet or number > 0)
        process = self.processes[number] = self.context.Process(
            target=sampler_process, name=f"sampler {number}", daemon=True,
            args=(args, self.folder, self.play, theirs, self.version, self.stop, self.path))
        with patch_environment(**({"CUDA_VISIBLE_DEVICES": gpu} if gpu else {})):  # it must be there before it imports
            process.start()
        theirs.close()  # so that its death ends the pipe
        return ours

    def look_after(self, number: int, pipe):
        """The thread of a sampler: gives it jobs, takes what it played, starts it again where it dies."""
        job = None
        try:
            while True:
                message = heard(self.processes[number], pipe)
                if "error" in message:
                    pipe.close()
                    with self.lock:
                        if not self.may_start_again(number, message):
                            return
                        pipe = self.start(number)
                    continue
                if "ready" in message:
                    self.ready.add(number)
                else:
                    batch = Batch(job.asked, job.groups, *message.pop("played"), **message)
                    self.arrived.put((job.number, batch))
                    job = None
                job = job or self.jobs.get()
                with contextlib.suppress(OSError):  # it died, which is heard next
                    pipe.send(job)
                if job is None:
                    return
        except Exception:  # never leave the trainer waiting
            self.failed(traceback.format_exc())

    def may_start_again(self, number: int, message: dict) -> bool:
        """Of a sampler that told its error, or is gone without a word."""
        if "refused" in message and number not in self.ready:
            self.refused = message["refused"]
            return False
        process = self.processes[number]
        process.join(CLOSE_SECONDS)
        process.kill()  # where it hangs while it ends
        process.join()
        code = process.exitcode
        how = message["error"] or (f"it was ended by {signal.Signals(-code).name}" if code < 0 else f"it ended with code {code}")
        if self.closing or self.interrupted or self.restarts >= self.beside["restarts"]:
            self.failed(f"sampler {number} died: {how}")
            return False
        self.restarts += 1
        print(f"sampler {number} died and is started again, {self.restarts} of --async-options restarts "
              f"{self.beside['restarts']}: {how}", file=sys.stderr)
        return True

    def failed(self, why: str):
        if not self.closing and not self.interrupted:  # a signal may have reached samplers, too
            print(f"{why}\nthe run ends after this iteration", file=sys.stderr)
        self.error, self.closing = self.error or why, True
        self.arrived.put(None)

    def begin(self):
        """Waits until all samplers are there, so that nobody's start counts as idle time; exits with 2 where one cannot start."""
        while len(self.ready) < len(self.threads) and not self.error and not self.interrupted and self.refused is None:
            time.sleep(0.1)
        if self.refused is not None:
            fail(self.refused) if self.refused else sys.exit(2)

    def next(self, number: int, wait: bool) -> Batch | None:
        """What has arrived: one batch where each is trained on by itself (`--fresh-update`) or the replay ratio is fixed, else
        all, or none of it if `wait` is False. None: stop, a sampler died or the run was interrupted."""
        self.order()
        one = self.args.fresh_update or self.beside["fixed_ratio"] or self.beside["lockstep"]
        taken = []
        with contextlib.suppress(queue.Empty):
            while not self.error and not (one and taken):
                arrived = self.arrived.get(block=(wait or one) and not taken and not self.interrupted)
                taken += [arrived] if arrived else []
        if self.error or (self.interrupted and not taken):
            return None
        for number, _ in taken:
            del self.open[number]
        if not self.beside["lockstep"]:
            self.order()
        return joined([batch for _, batch in taken])

    def order(self):
        """New jobs, as many as may be open."""
        room = 1 if self.beside["lockstep"] else self.args.async_rollouts + self.beside["queue"]
        while len(self.open) < room:
            job = self.job(*self.again.popleft()) if self.again else self.job(self.number, None)
            self.jobs.put(job)
            self.open[job.number], self.number = job.asked, max(self.number, job.number + 1)

    def sync(self, step: int, within: bool = False, stale: bool = False):
        """Publishes the policy if it is `--sync-every` steps ahead of the published one, or at all with `stale` (see Direct)."""
        if step - self.step >= (1 if stale else self.args.sync_every) and not (within and self.beside["lockstep"]):
            publish(self.policy, self.path, step, self.beside["dtype"] and getattr(torch, self.beside["dtype"]))
            self.step = self.version.value = step

    def metrics(self) -> dict:
        return {"async/batches_waiting": self.arrived.qsize(), "async/restarts": self.restarts, "async/published_step": self.step}

    def interrupt(self):
        """From a signal's handler, during which a SimpleQueue can be filled: `next` waits no longer."""
        self.interrupted = True
        self.arrived.put(None)

    def close(self):
        self.closing, self.stop.value = True, 1
        for _ in self.threads:
            self.jobs.put(None)
        end = time.monotonic() + CLOSE_SECONDS
        for number, thread in enumerate(self.threads):
            for ending in thread, self.processes[number]:
                ending.join(max(0, end - time.monotonic()))
            self.processes[number].kill()  # where it did not end
            self.processes[number].join()
            thread.join()
        self.path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not empty: another run's
            self.weights.rmdir()
