"""Opening a run: what is refused, resumed, locked, loaded and made before the first iteration; saving and ending it.

The one file of runtime/ that may import everything. `Run` is all that a run's phases (train.py) pass to each other.
"""
import contextlib
import functools
import json
import math
import shutil
import signal
import sys
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import torch

from buffer import ReplayBuffer
from drift import DriftEstimator
from engines import context_length_of, engine_kind, make_engine
from engines.samplers import Direct, Samplers
from envs import MissingData, make_env_factory, up_to
from look.curves import plot_drift, plot_learning_curves
from models import load_policy
from policies import policy_folder
from policies.chat import Chat
from problems import ProblemSampler
from runtime import ranks
from runtime.checkpoints import GlobalRandomness, checkpoint_to_resume, load_checkpoint, save_checkpoint
from runtime.files import NotFinite, checkpoints, claim, fail, flat, give_back, told_plainly
from runtime.ledger import Ledger, matmul_parameters
from runtime.log import Clock, Interrupt, NoLog, RunLog
from runtime.memories import make_buffer, make_problem_sampler, stores_everything, whole_groups
from runtime.options import MAY_CHANGE_ON_RESUME, list_objectives, spelled
from runtime.watch import Watch, bad_weights
from settings import Args, parse_args
from update import Learner, make_learner

COUNTERS = ("iteration", "step", "episodes", "tokens", "best", "start", "last", "bad_updates", "replay_updates", "minutes", "jobs")
MEMORIES = ("random", "problems", "watch", "buffer", "drift", "recent")  # of Run, in checkpoints by these names


@dataclass
class Run:
    """A run's state, passed from phase to phase; what COUNTERS and MEMORIES name goes into checkpoints."""
    args: Args
    folder: Path
    make_env: Callable
    train_problems: np.ndarray  # (n,) ids; `problems` speaks of their places
    heldout_problems: list[int]
    start_folder: str | Path  # of the policy at the start
    processor: Any
    chat: Chat
    learner: Learner
    play: dict  # what `collect` is told, in training and in evaluation
    random: GlobalRandomness  # Python's, NumPy's and torch's global generators
    problems: ProblemSampler
    watch: Watch
    ledger: Ledger
    buffer: ReplayBuffer | None = None
    drift: DriftEstimator | None = None
    recent: ReplayBuffer | None = None  # the last episodes, stored or not: the drift is measured on them
    stores_all: bool = True  # also episodes whose advantages are all 0
    whole_groups: bool = False  # also those, where others of their group have some
    start_files: dict | None = None  # contents by name, of a policy at the start that would be made anew otherwise
    source: Direct | Samplers | None = None  # where episodes come from
    engine: Any = None  # plays the evaluation
    log: Any = None
    interrupt: Interrupt | None = None
    clock: Clock | None = None
    saved_at: float = 0.0  # seconds since the epoch: up to there `minutes` are counted

    iteration: int = 0  # that is being done, or was done last
    step: int = 0  # optimiser steps taken
    episodes: int = 0
    tokens: int = 0
    jobs: int = 0  # number of the newest batch that was taken
    replay_updates: int = 0
    bad_updates: int = 0  # in a row
    minutes: float = 0.0
    start: float | None = None  # held-out success: at the start, the best, the last
    best: float | None = None
    last: float | None = None


def rng_of(args: Args, purpose: str, iteration: int) -> np.random.Generator:
    """A generator of its own for each purpose and iteration: nothing to save, and no purpose disturbs another."""
    return np.random.default_rng([args.seed, zlib.crc32(purpose.encode()), iteration])


def command_line(main: Callable, description: str):
    """`main` with the arguments of the command line, in one of perhaps many processes."""
    ranks.silence_others()
    if sys.argv[1:] == ["--list"]:
        return list_objectives()
    try:
        main(parse_args(sys.argv[1:], description))
    except SystemExit as ended:
        if ended.code in (128 + signal.SIGINT, 128 + signal.SIGTERM):  # that all agreed on; an error may be one's alone
            ranks.close(ended.code)
        raise
    ranks.close()


@contextlib.contextmanager
def open_run(args: Args, ask: Callable):
    """The run, ready for its next iteration; its folder is this process's own meanwhile. `ask(run, number, places)` gives the job
    that is played as batch `number`. Exits with 2 where something is refused; a start that fails leaves nothing behind."""
    began = time.monotonic()
    sys.stdout.reconfigure(line_buffering=True)  # so that a log file shows where a run is
    start_processes(args)
    args = replace(args, name=ranks.common(args.name))  # it may hold the time
    folder = Path(args.resume or Path(args.runs_dir) / args.name)
    with contextlib.ExitStack() as stack:
        checkpoint = None
        if ranks.first():
            stack.enter_context(claim(folder, new=not args.resume))
            stack.callback(give_back, folder)
        if ranks.first() and args.resume:
            checkpoint = checkpoint_to_resume(folder, asdict(args), MAY_CHANGE_ON_RESUME)
        run, saved = prepared(args, folder, ranks.common(checkpoint))
        run.saved_at = began
        stack.enter_context(told_plainly(folder))  # the first weights for samplers need a disk with room too
        connect_engines(run, saved, checkpoint, functools.partial(ask, run))
        stack.enter_context(contextlib.closing(run.engine))
        stack.enter_context(contextlib.closing(run.source))
        logs = stack.enter_context(contextlib.ExitStack())
        run.interrupt = stack.enter_context(Interrupt(run.source.interrupt))
        run.source.begin()
        run.log = logs.enter_context(RunLog(folder, run.args, run.iteration, run.make_env()) if ranks.first() else NoLog())
        yield run


def start_processes(args: Args):
    """Joins the other processes, and refuses what they cannot share."""
    try:
        ranks.start()
    except ValueError as error:
        fail(str(error))
    world, values = ranks.world(), flat(vars(args))
    if not args.quiet:
        print(f"processes: {world}" + (f", samplers: {args.async_rollouts}" if args.async_rollouts else ""))
    for name in ("problems_per_iteration", "replay_batch_size", "capacity", "replay_options.probe_episodes", "eval_problems"):
        if (values[name] or math.inf) < world:
            fail(f"{spelled(name)} {values[name]} is less than the {world} processes that share it")
    for name, whole in (("fresh_fraction", "replay_batch_size"), ("positive_fraction", "capacity")):
        fraction, share = args.replay_options[name], values[whole] // world
        if args.replay != "none" and fraction and not round(fraction * share):
            fail(f"--replay-options {name} {fraction:g} of a process's {share} of {spelled(whole)} {values[whole]} rounds to none")
    if args.async_rollouts and world > 1:
        fail(f"--async-rollouts {args.async_rollouts} is for one training process, not {world}")
    shared_folder = args.engine_options["shared_folder"]
    if shared_folder and not Path(shared_folder).is_dir():
        fail(f"--engine-options shared_folder {shared_folder} must be a folder that exists: make it, or correct the path")


def prepared(args: Args, folder: Path, checkpoint: Path | None) -> tuple[Run, dict]:
    """The run with its task, policy and memories, filled from `checkpoint` where there is one; and that one's state.json."""
    make_env = make_env_factory(args.env, args.env_options)
    try:
        train_problems = np.array(problems_of(make_env(), "train", args.train_problems, 1536, "--train-problems"))
        if len(train_problems) < args.problems_per_iteration:
            fail(f"--problems-per-iteration {args.problems_per_iteration} is more than the {len(train_problems)} training problems "
                 "that there are: ask for fewer an iteration, or for more by --train-problems")
        heldout_problems = problems_of(make_env(), "heldout", args.eval_problems, 512, "--eval-problems")
        start_folder = start_policy(args, make_env, folder, checkpoint)
        policy, processor = load_policy(start_folder, getattr(torch, args.dtype), args.trust_remote_code)
    except (MissingData, ValueError) as error:  # too few problems, data or a model that is not there
        fail(str(error))
    args = replace(args, train_problems=len(train_problems), eval_problems=len(heldout_problems))
    chat = Chat(processor)
    refuse_template(args, chat)
    if ranks.sharded() and (chat.image_processor is not None or args.sync_every > 1 or engine_kind(args)[0] != "hf"):
        fail("policies that take images, --sync-every above 1 and engines but hf do not run with sharded weights; use "
             "configs/accelerate/ddp.yaml")
    parameters = matmul_parameters(policy)
    context_length = context_length_of(args, policy)
    learner = make_learner(args, policy, chat.image_processor)
    run = Run(args, folder, make_env, train_problems, heldout_problems, start_folder, processor, chat, learner,
              play={"max_turns": args.max_turns, "max_new_tokens": args.max_new_tokens, "format_penalty": args.format_penalty,
                    "parallel": args.engine_options["parallel"], "context_length": context_length},
              random=GlobalRandomness(args.seed),
              problems=make_problem_sampler(args, len(train_problems)),
              watch=Watch(args), stores_all=stores_everything(args), whole_groups=whole_groups(args),
              ledger=Ledger({}, parameters, lora=args.lora_rank > 0, critic=learner.critic is not None,
                            recompute=args.gradient_checkpointing, samplers=args.async_rollouts))
    if args.replay != "none":
        run.buffer = make_buffer(args)
    if args.tau == "auto" and run.buffer is not None:
        run.drift = DriftEstimator()
        size = 16 * args.replay_options["probe_episodes"]
        run.recent = ReplayBuffer(ranks.share_size(size), sampler="uniform", seed=ranks.seed(args.seed + 1))
    run.start_files = files_to_keep(run)
    return run, resumed(run, checkpoint) if checkpoint else {}


def problems_of(env, split: str, asked: int | None, usual: int, flag: str) -> list[int]:
    """`asked` problems; without a wish the usual number, or all that the task has. Exits with 2 when it has too few."""
    try:
        return up_to(env, split, usual) if asked is None else env.problems(split, asked)
    except ValueError as error:
        fail(f"{flag} {usual if asked is None else asked}: {error}")


def start_policy(args: Args, make_env, folder: Path, checkpoint: Path | None) -> str | Path:
    """Where the policy at the start lies: in the checkpoint, if it needs it to go on; else where --model says."""
    if checkpoint and (checkpoint / "base").is_dir():
        if args.async_rollouts:  # the checkpoint is removed one day, and a sampler started again
            return shutil.copytree(checkpoint / "base", folder / ".start_policy", dirs_exist_ok=True)
        return checkpoint / "base"
    # made by the first process: in the others transformers writes no weights
    return ranks.common(policy_folder(args, make_env()) if ranks.first() else None)


def refuse_template(args: Args, chat: Chat):
    """Exits with 2 where the chat template cannot show a conversation, or not as it was sampled."""
    try:
        rewritten = chat.rewritten_history() if args.max_turns > 1 else None
        chat.stop_ids()
    except (jinja2.TemplateError, IndexError) as error:  # IndexError: it does not show an answer's text as it is
        fail(f"the chat template of {args.model} cannot show a user's message, an answer and another message: {error}")
    if rewritten and args.rewritten_history == "refuse":
        fail(f"the chat template of {args.model} rewrites the conversation: {rewritten}. What is trained on would not be what "
             "the template shows in later turns. --rewritten-history keep goes on with what was sampled; or use --max-turns 1")


def files_to_keep(run: Run) -> dict[str, bytes]:
    """By name, the files of a policy at the start that stays in use and lies in a cache, which other code would make anew."""
    stays = run.args.lora_rank or run.learner.reference is not None
    if not stays or run.args.model not in ("tiny", "tiny-vlm"):
        return {}
    return {path.name: path.read_bytes() for path in Path(run.start_folder).iterdir() if path.is_file()}


def resumed(run: Run, checkpoint: Path) -> dict:
    """Fills the run from its checkpoint; returns that one's state.json."""
    saved = load_checkpoint(checkpoint, run.learner, memories_of(run))
    for name in COUNTERS:
        setattr(run, name, saved[name])
    run.ledger.totals.update(saved["ledger"])
    summary = run.folder / "summary.json"  # not there where the run was killed after its last checkpoint
    done = summary.exists() and json.loads(summary.read_text("utf-8"))["iterations"] == run.args.iterations
    if run.iteration >= run.args.iterations and done:
        fail(f"{run.folder} has done its {run.iteration} iterations; raise --iterations to go on")
    print(f"resuming {run.folder} from {checkpoint.name}, iteration {run.iteration}; learning rate and beta now follow a plan "
          f"of {run.args.iterations} iterations")
    return saved


def memories_of(run: Run) -> dict:
    """What has a state of its own, by its name in checkpoints."""
    return {name: getattr(run, name) for name in MEMORIES if getattr(run, name) is not None}


def connect_engines(run: Run, saved: dict, checkpoint: Path | None, job: Callable):
    """What plays the evaluation, and what samples: in this process, or in others beside the training."""
    args, policy, play = run.args, run.learner.policy, run.play | {"temperature": run.args.temperature}
    try:
        if args.async_rollouts or args.sync_every > 1:  # evaluation needs the policy as it is, not the sampler's
            run.engine = make_engine(replace(args, engine="hf", quiet=True), policy, run.chat, run.start_folder)
        if not args.async_rollouts:
            run.source = Direct(args, policy, sampled_policy(run), run.chat, run.make_env,
                                lambda sampled: make_engine(args, sampled, run.chat, run.start_folder), play, job, run.step)
            if run.engine is None:
                run.engine = run.source.engine
    except (ImportError, RuntimeError, ValueError) as error:  # no vLLM, no server, a model that the engine cannot play
        fail(str(error))
    if args.async_rollouts:
        run.source = Samplers(args, run.learner.accelerator.unwrap_model(policy), run.start_folder, run.folder, play, job,
                              max(run.jobs, run.iteration) + 1, run.step, saved.get("under_way", ()))
    if checkpoint:
        run.source.restore(checkpoint, saved.get("synced", 0))


def sampled_policy(run: Run):
    """What is sampled from: the policy itself, or a copy where it is older or the policy's weights are split."""
    args = run.args
    if args.sync_every == 1 and not (ranks.sharded() and engine_kind(args)[0] == "hf"):
        return run.learner.policy
    policy, _ = load_policy(run.start_folder, getattr(torch, args.dtype), args.trust_remote_code)
    return policy.to(run.learner.device)


def save(run: Run):
    """A checkpoint of all that the run needs to go on as if it had not stopped. NotFinite for weights from which nobody could go
    on."""
    models = {"policy": run.learner.policy} | ({"critic": run.learner.critic} if run.learner.critic is not None else {})
    bad = ranks.joined([found for name, model in models.items() if (found := bad_weights(model, name))])
    if bad:
        last = checkpoints(run.folder)
        again = f"{last[-1]} is as it was: --resume {run.folder} with a smaller --lr" if last else "start again with a smaller --lr"
        raise NotFinite(f"not finite, and not saved: {bad[0]}. {again} or --max-grad-norm")
    now = time.monotonic()
    run.minutes, run.saved_at = run.minutes + (now - run.saved_at) / 60, now
    state = {name: getattr(run, name) for name in COUNTERS}
    state |= {"ledger": run.ledger.totals, "synced": run.source.step, "under_way": run.source.under_way()}
    save_checkpoint(run.folder, run.learner, run.processor, memories_of(run), state, run.args.keep_checkpoints, run.start_files,
                    run.source.kept())


def end_early(run: Run):
    """Ends the program after an interrupt or a sampler's death: with the signal's code, or 1."""
    number = max(ranks.gathered(run.interrupt.signal))  # all processes end alike, whichever got it
    asked_to = number or not run.source.error  # samplers may have got the signal too
    print(f"{'stopped' if asked_to else 'sampling failed, as told above'}\nended after iteration {run.iteration} of "
          f"{run.args.iterations}, with a checkpoint; go on: python train.py --resume {run.folder}", file=sys.stderr)
    sys.exit(128 + number if asked_to else 1)


def finish(run: Run) -> dict:
    """Pictures and summary.json; returns the summary."""
    if ranks.first():
        plot_learning_curves([run.folder], run.folder / "learning_curve.png")
    if run.drift is not None and ranks.first():
        plot_drift(run.folder, run.drift)
    summary = {"name": run.folder.name, "start_success": run.start, "best_success": run.best, "final_success": run.last,
               "heldout_problems": len(run.heldout_problems), "iterations": run.args.iterations, "steps": run.step,
               "replay_updates": run.replay_updates, "episodes": run.episodes, "minutes": round(run.minutes, 2)}
    run.log.finish(summary)
    return summary
