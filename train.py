"""FreshReplay: RL post-training that reuses its rollouts. The whole loop is `main`, at the bottom.

    python train.py                                         # configs/frozenlake_tiny.yaml, minutes on two CPU cores
    python train.py configs/frozenlake_tiny.yaml --seed 1 --tau 30
    python train.py --replay none                           # the same without replay
    python train.py --resume runs/NAME                      # go on from its last checkpoint
    python train.py --help                                  # every flag, its unit and its default
    python train.py --list                                  # every objective
"""
import os

# Threads that wait should sleep: beside one busy process on two cores, spinning ones make a step 3.4 times as long, sleeping
# ones 1.6 times (benchmarks/bench_threads.py).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch loads

import contextlib
import math
import shutil
import signal
import sys
import time
import zlib
from dataclasses import asdict, replace
from pathlib import Path

import jinja2
import numpy as np
import torch

from buffer import ReplayBuffer
from drift import DriftEstimator, sequence_kl, token_kl
from engines import context_length_of, engine_kind, make_engine
from engines.samplers import Direct, Job, Samplers
from envs import MissingData, make_env_factory
from episode import episode_record
from eval import evaluate
from judge import add_advantages, has_signal, is_sound, score, shuffle_rewards, td_errors, token_log_ratios
from look.curves import plot_drift, plot_learning_curves
from losses import objective_of
from models import load_policy
from policies import policy_folder
from policies.chat import Chat
from problems import ProblemSampler
from runtime import ranks
from runtime.checkpoints import (
    GlobalRandomness,
    checkpoint_to_resume,
    fingerprint,
    load_checkpoint,
    save_checkpoint,
    surroundings,
    warn_of_changes,
)
from runtime.files import claim, fail, give_back, taken, told_plainly
from runtime.ledger import Ledger, matmul_parameters
from runtime.log import Clock, Interrupt, NoLog, RunLog, drift_record, replay_record
from runtime.metrics import buffer_stats, by_age, drift_metrics, fresh_metrics, outline, replay_metrics, task_averages, under
from runtime.setup import code_files, digest_of, finished, problems_of
from runtime.watch import Watch
from settings import MAY_CHANGE_ON_RESUME, Args, list_objectives, make_buffer, parse_args, stores_everything
from update import CRITIC_METRICS, POLICY_METRICS, make_learner, merged, update

# --------------------------------------------------------------------------------------------------------- the loop


def rng_of(args: Args, purpose: str, iteration: int) -> np.random.Generator:
    """A generator of its own for each purpose and iteration: nothing to save, and no purpose disturbs another."""
    return np.random.default_rng([args.seed, zlib.crc32(purpose.encode()), iteration])


def main(args: Args) -> dict:
    """Train; returns the summary that is also written to summary.json."""
    started = time.time()
    sys.stdout.reconfigure(line_buffering=True)  # so that a log file shows where a run is
    try:
        ranks.start()
    except ValueError as error:
        fail(str(error))
    if not args.quiet:
        print(f"processes: {ranks.world()}" + (f", samplers: {args.async_rollouts}" if args.async_rollouts else ""))
    for name in ("problems_per_iteration", "replay_batch_size", "capacity", "probe_episodes", "eval_problems"):
        if (getattr(args, name) or math.inf) < ranks.world():
            fail(f"--{name.replace('_', '-')} {getattr(args, name)} is less than the {ranks.world()} processes that share it")
    for name, whole in (("fresh_fraction", "replay_batch_size"), ("positive_fraction", "capacity")):
        fraction, share = getattr(args, name), getattr(args, whole) // ranks.world()
        if args.replay != "none" and fraction and not round(fraction * share):
            fail(f"--{name.replace('_', '-')} {fraction:g} of the {share} that a process has of --{whole.replace('_', '-')} "
                 f"{getattr(args, whole)} rounds to none")
    args.name = ranks.common(args.name)  # it may hold the time
    run = Path(args.resume or Path(args.runs_dir) / args.name)
    if args.async_rollouts and ranks.world() > 1:
        fail(f"--async-rollouts {args.async_rollouts} is for one training process, not {ranks.world()}")
    if args.shared_folder and not Path(args.shared_folder).is_dir():
        fail(f"--shared-folder {args.shared_folder} must be a folder that exists: make it, or correct the path")
    checkpoint, lock = None, contextlib.nullcontext()
    if ranks.first() and args.resume:
        lock = claim(run)
        checkpoint = checkpoint_to_resume(run, asdict(args), MAY_CHANGE_ON_RESUME)
    elif ranks.first() and taken(run):
        fail(taken(run))
    checkpoint = ranks.common(checkpoint)

    make_env = make_env_factory(args.env, args.env_options)
    try:
        train_problems = np.array(problems_of(make_env(), "train", args.train_problems, 1536, "--train-problems"))
        heldout_problems = problems_of(make_env(), "heldout", args.eval_problems, 512, "--eval-problems")
        args.train_problems, args.eval_problems = len(train_problems), len(heldout_problems)
        base = checkpoint / "base" if checkpoint and (checkpoint / "base").is_dir() else None
        if base and args.async_rollouts:  # the checkpoint is removed one day, and a sampler started again
            base = shutil.copytree(base, run / ".start_policy", dirs_exist_ok=True)
        # made by the first process: in the others transformers writes no weights
        folder = base or ranks.common(policy_folder(args, make_env()) if ranks.first() else None)
        policy, processor = load_policy(folder, getattr(torch, args.dtype), args.trust_remote_code)
    except (MissingData, ValueError) as error:  # too few problems, data or a model that is not there
        fail(str(error))
    chat = Chat(processor)
    try:
        rewritten = chat.rewritten_history() if args.max_turns > 1 else None
        chat.stop_ids()
    except (jinja2.TemplateError, IndexError) as error:  # IndexError: it does not show an answer's text as it is
        fail(f"the chat template of {args.model} cannot show a user's message, an answer and another message: {error}")
    if rewritten and args.rewritten_history == "refuse":
        fail(f"the chat template of {args.model} rewrites the conversation: {rewritten}. What is trained on would not be what "
             "the template shows in later turns. --rewritten-history keep goes on with what was sampled; or use --max-turns 1")
    parameters = matmul_parameters(policy)
    # the reference is the policy at the start, also when a run is resumed
    if ranks.sharded() and (chat.image_processor is not None or args.sync_every > 1 or engine_kind(args)[0] != "hf"):
        fail("policies that take images, --sync-every above 1 and engines but hf do not run with sharded weights; use "
             "configs/accelerate/ddp.yaml")
    learner = make_learner(args, policy, chat.image_processor)

    memories = {"random": GlobalRandomness(args.seed),
                "problems": ProblemSampler(len(train_problems), mode=args.problem_sampler, priority=args.problem_priority,
                                           group_size=max(2, args.group_size), seed=args.seed),
                "watch": Watch(args)}
    buffer, drift = None, None
    if args.replay != "none":
        buffer = memories["buffer"] = make_buffer(args)
    if args.tau == "auto" and buffer is not None:
        drift = memories["drift"] = DriftEstimator()
        memories["recent"] = ReplayBuffer(ranks.share_size(16 * args.probe_episodes), sampler="uniform",
                                          seed=ranks.seed(args.seed + 1))
    state = {"iteration": 0, "step": 0, "episodes": 0, "tokens": 0, "best": None, "start": None, "last": None, "bad_updates": 0,
             "replay_updates": 0, "minutes": 0.0, "ledger": {}, "jobs": 0}
    around = {"train problems": digest_of(train_problems.tolist()), "held-out problems": digest_of(heldout_problems)}
    start_files = {}  # of the policy at the start, where it stays in use
    if args.lora_rank or learner.reference is not None:
        around["policy at the start"] = digest_of(fingerprint(folder))
        if args.model in ("tiny", "tiny-vlm"):  # it is in a cache, which other code would make anew
            start_files = {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.is_file()}
    around = surroundings(code_files(make_env()), **around)
    if checkpoint:
        state |= load_checkpoint(checkpoint, learner, memories)
        warn_of_changes(state.get("surroundings", {}), around)
        if state["iteration"] >= args.iterations and (finished(run, args) or state["last"] is None):
            fail(f"{run} has done its {state['iteration']} iterations; raise --iterations to go on")
        print(f"resuming {run} from {checkpoint.name}, iteration {state['iteration']}; learning rate and beta now follow a plan "
              f"of {args.iterations} iterations")

    ledger = Ledger(state["ledger"], parameters, lora=args.lora_rank > 0, critic=learner.critic is not None,
                    recompute=args.gradient_checkpointing, samplers=args.async_rollouts)
    state["surroundings"] = around
    store_all = stores_everything(args)
    play = {"max_turns": args.max_turns, "max_new_tokens": args.max_new_tokens, "format_penalty": args.format_penalty,
            "parallel": args.parallel_episodes, "context_length": context_length_of(args, policy)}
    n = args.problems_per_iteration

    def job(number, asked=None):
        """What is played as iteration `number`, by samplers beside the training: as batch `number`. `asked`: places of its
        problems, where they are chosen already."""
        asked = memories["problems"].select(n, state["iteration"] + 1) if asked is None else np.array(asked)
        groups, mine = np.arange(n) + number * n, ranks.share(n, number)
        seeds_NG = rng_of(args, "sampling", number).integers(2**31, size=(n, args.group_size))  # whatever the number of ranks
        return Job(number, asked, groups, train_problems[asked[mine]].repeat(args.group_size),
                   groups[mine].repeat(args.group_size), seeds_NG[mine].ravel())

    sampling = play | {"temperature": args.temperature}
    try:
        if not args.async_rollouts:
            same = args.sync_every == 1 and not (ranks.sharded() and engine_kind(args)[0] == "hf")
            sampled = learner.policy if same else \
                load_policy(folder, getattr(torch, args.dtype), args.trust_remote_code)[0].to(learner.device)
            source = Direct(args, learner.policy, sampled, chat, make_env,
                            lambda sampled: make_engine(args, sampled, chat, folder), sampling, job, state["step"])
            if checkpoint:
                source.restore(checkpoint, state.get("synced", 0))
        own = args.async_rollouts or args.sync_every > 1  # evaluation needs the policy as it is, not the sampler's
        engine = make_engine(replace(args, engine="hf", quiet=True), learner.policy, chat, folder) if own else source.engine
    except (ImportError, RuntimeError, ValueError) as error:  # no vLLM, no server, a model that the engine cannot play
        fail(str(error))
    judge = lambda: evaluate(engine, chat, make_env, heldout_problems, temperature=args.eval_temperature, **play)  # noqa: E731
    if not args.resume and ranks.first():
        lock = claim(run)  # not earlier: a start that fails leaves nothing behind
        if taken(run, mine=True):
            fail(taken(run, mine=True))
    if args.async_rollouts:
        with told_plainly(run):  # the first weights need a disk with room
            source = Samplers(args, learner.accelerator.unwrap_model(learner.policy), folder, run, sampling, job,
                              max(state["jobs"], state["iteration"]) + 1, state["step"], state.get("under_way", ()))
        if checkpoint:
            source.restore(checkpoint, state.get("synced", 0))
    told = getattr(make_env(), "source", lambda: "Train and held-out problems are different ones, by their content.")

    def step_on(episodes, first_use, **how):
        """One update; counts the step, and ends the run after three in a row that were not finite."""
        metrics = update(learner, episodes, **how)
        ledger.trained(episodes, metrics, first_use)
        state["step"] += metrics["steps"]
        source.sync(state["step"], within=True)
        state["bad_updates"] = state["bad_updates"] + 1 if metrics["nonfinite"] else 0
        if metrics["nonfinite"]:
            log.bad_update(iteration, metrics, ranks.joined(episodes))
        if state["bad_updates"] == 3:
            fail("three updates in a row had a loss or gradient that is not finite; the last lines of episodes.jsonl name "
                 "their episodes; a smaller --lr or --max-grad-norm often helps")
        return metrics

    def save():
        nonlocal started
        state["minutes"], started = state["minutes"] + (time.time() - started) / 60, time.time()
        state["synced"], state["under_way"] = source.step, source.under_way()
        save_checkpoint(run, learner, processor, memories, state, args.keep_checkpoints, start_files, source.kept())

    with (lock, told_plainly(run), contextlib.closing(engine), contextlib.closing(source),
          contextlib.ExitStack() as stack, Interrupt(source.interrupt) as interrupt):
        try:
            source.begin()
        except SystemExit:  # a sampler cannot start: leaves nothing behind, like an engine here
            source.close()
            give_back(run)
            raise
        log = stack.enter_context(RunLog(run, args, state["iteration"], told()) if ranks.first() else NoLog())
        if state["start"] is None:
            state["start"] = state["best"] = judge()["success"]
        clock = Clock()
        for iteration in range(state["iteration"] + 1, args.iterations + 1):
            clock.lap("save")  # logs and checkpoint of the iteration before
            now = lambda: state["step"] if args.age_unit == "step" else iteration  # noqa: E731

            # ---- sample
            waits = args.fresh_update or not buffer.ready(args.replay_batch_size, now())
            batch = source.next(iteration, waits)
            clock.lap("sample")
            if batch is None:  # interrupted, or a sampler died
                save()
                break
            asked, groups, episodes, transcripts = batch.asked, batch.groups, batch.episodes, batch.transcripts
            arrived, oldest = state["step"], -math.inf if args.max_staleness is None else state["step"] - args.max_staleness
            birthdays = lambda kept: [e.policy_step if args.age_unit == "step" else iteration for e in kept]  # noqa: E731
            ledger.generated(episodes, batch.reread)
            if args.shuffle_rewards:
                shuffle_rewards(episodes, rng_of(args, "shuffled rewards", iteration))
            if episodes:
                add_advantages(learner, episodes)
            played = ranks.joined([outline(episode, is_sound(args, episode, oldest)) for episode in episodes])  # of all ranks

            # ---- store
            broken = [row["info"]["env_error"] for row in played if row["info"]["env_error"]]
            if len(broken) > args.max_env_error_frac * len(played):
                fail(f"{len(broken) / len(played):.0%} of the environments raised, more than --max-env-error-frac "
                     f"{args.max_env_error_frac:g}; the first:\n{broken[0]}")
            if played and all(row["info"]["context_full"] and not row["answered"] for row in played):
                fail(f"no first message of iteration {iteration} leaves room for --max-new-tokens {args.max_new_tokens} in the "
                     f"model's context of {play['context_length']} tokens")
            sound = [episode for episode in episodes if is_sound(args, episode, oldest)]  # the others teach nothing
            stored = [episode for episode in sound if store_all or has_signal(episode)]
            for place, group in zip(asked, groups):
                successes = [float(row["info"]["success"]) for row in played if row["sound"] and row["group_id"] == group]
                if successes:
                    memories["problems"].update(place, successes, iteration)
            base = td_errors(learner, stored) + args.eps if args.priority == "td_error" and buffer is not None else None
            if buffer is not None and stored:
                buffer.add(stored, now(), birthdays=birthdays(stored), base=base)
            if drift is not None:
                memories["recent"].add(sound, now(), birthdays=birthdays(sound))

            # ---- update on fresh episodes
            fresh, shuffle = [], rng_of(args, "minibatches", iteration)
            several = args.fresh_epochs * args.minibatches > 1 and objective_of(args).loss == "decoupled_ppo"
            proximal_BT = score(learner.policy, sound, learner) if args.fresh_update and several else None
            for epoch in range(args.fresh_epochs if args.fresh_update else 0):
                for members in np.array_split(shuffle.permutation(groups), args.minibatches):
                    rows = [row for row, episode in enumerate(sound) if episode.group_id in members]
                    if ranks.somewhere(rows):
                        fresh.append(step_on([sound[row] for row in rows], first_use=epoch == 0,
                                             ages=[arrived - sound[row].policy_step for row in rows],
                                             proximal_BT=None if proximal_BT is None else proximal_BT[rows]))
            clock.lap("fresh")

            # ---- update on replayed episodes
            replayed, samples, drawn = [], [], ranks.share_size(args.replay_batch_size)
            held = by_age(buffer, now()) if args.replay_updates else None
            while len(replayed) < args.replay_updates and ranks.agreed(buffer.ready(drawn, now())):
                sample = buffer.sample(drawn, now(), lowest=ranks.lowest)
                unused = sample.steps_since_last_use < 0 if not args.fresh_update else False
                replayed.append(step_on(sample.episodes, unused, weights=sample.weights, ages=sample.ages, replayed=True))
                samples.append(sample)
                if args.priority == "td_error":  # the one base priority that changes with the learner
                    buffer.update_priorities(sample.ids, td_errors(learner, sample.episodes) + args.eps)
            too_old = sum(row["policy_step"] < oldest for row in played)
            source.sync(state["step"], stale=0 < too_old == len(played))
            state["replay_updates"] += len(replayed)
            if args.replay_updates and iteration == 3 and not state["replay_updates"]:
                print(f"note: no replay yet: {max(map(str, ranks.gathered(buffer.refusal(drawn, now()) or '')))}")
            for warning in memories["watch"].look([row["info"] for row in played], fresh, replayed, too_old):
                log.warn(iteration, warning)
            clock.lap("replay")

            # ---- measure the drift, set tau
            fit = None
            if drift is not None:
                if ranks.agreed(memories["recent"].ready(ranks.share_size(args.probe_episodes), now())):
                    probe = memories["recent"].sample(ranks.share_size(args.probe_episodes), now())
                    log_ratios_BT = token_log_ratios(learner, probe.episodes)
                    ages, log_ratios, kl = map(ranks.joined, (probe.ages, log_ratios_BT.sum(1), token_kl(log_ratios_BT)))
                    drift.add(ages, kl if args.drift_kl == "token" else sequence_kl(log_ratios))
                    log.append("drift.jsonl", drift_record(iteration, state["step"], ages, log_ratios, kl))
                fit = drift.fit()
                if fit:
                    buffer.set_tau(drift.tau())
                clock.lap("probe")

            # ---- evaluate, log, save
            last = iteration == args.iterations
            due = last or (args.eval_every and iteration % args.eval_every == 0)
            judged = judge() if due else {}
            state |= {"iteration": iteration, "episodes": state["episodes"] + len(played),
                      "tokens": state["tokens"] + sum(row["tokens"] for row in played),
                      "jobs": max([state["jobs"], *(row["iteration"] for row in played)]),
                      "best": max(state["best"], judged.get("success", 0.0)), "last": judged.get("success")}
            clock.lap("eval")
            ledger.scored(learner.scored)
            ledger.spent(clock.laps, batch.busy, batch.idle)
            names = POLICY_METRICS + (CRITIC_METRICS if learner.critic is not None else ())
            memory = {"bytes": 0} if buffer is None else \
                buffer_stats(args, buffer, now()) | drift_metrics(args, buffer, fit)
            equal = fresh[0] if fresh and all(row["policy_step"] == arrived for row in played) else {}  # weights of both sides
            metrics = {
                **{key: state[key] for key in ("iteration", "step", "episodes", "tokens")},
                **under("fresh", fresh_metrics(played, ranks.total(len(stored)), buffer, arrived, oldest) | merged(fresh, names)),
                "fresh/first_max_abs_ratio_minus_1": equal.get("max_abs_ratio_minus_1"),
                **{f"fresh/sampler_trainer_difference_{key}": equal.get(f"log_prob_difference_{key}")
                   for key in ("mean", "p99", "max")},
                **under("task", task_averages(played)),
                **under("replay", merged(replayed, names) | replay_metrics(samples, args)),
                **under("time", {"buffer_bytes": memory.pop("bytes")}), **under("buffer", memory),
                **under("problems", memories["problems"].stats(iteration)),
                **under("eval", {"success": None} | judged | {"start_success": state["start"], "best_success": state["best"]}),
                **ledger.metrics(), **source.metrics(),
                **under("time", clock.metrics(sum(row["tokens"] for row in played), batch.busy))}
            shown = ranks.joined([
                episode_record(chat, iteration, episode, transcript) for place, (episode, transcript)
                in enumerate(zip(episodes, transcripts), ranks.share(n, iteration).start * args.group_size)
                if place < args.transcripts or episode.info["env_error"]])
            if replayed:
                shown += [episode_record(chat, iteration, *row, kind="replay") for row in zip(
                    samples[-1].episodes, [None] * args.transcripts, samples[-1].ages, samples[-1].weights,
                    replayed[-1]["log_ratios"])]
                log.append("replay.jsonl", replay_record(args, iteration, state["step"], buffer, held, samples, replayed))
            log.iteration(metrics, shown)
            stopped = ranks.somewhere(interrupt.signal)
            if last or stopped or (args.checkpoint_every and iteration % args.checkpoint_every == 0):
                save()
            if stopped:
                break
        if state["iteration"] < args.iterations:
            number = max(ranks.gathered(interrupt.signal))  # all processes end alike, whichever got it
            asked_to = number or not source.error  # samplers may have got the signal too
            print(f"{'stopped' if asked_to else 'sampling failed, as told above'}\nended after iteration {state['iteration']} of "
                  f"{args.iterations}, with a checkpoint; go on: python train.py --resume {run}", file=sys.stderr)
            sys.exit(128 + number if asked_to else 1)
        if ranks.first():
            plot_learning_curves([run], run / "learning_curve.png")
        if drift is not None and ranks.first():
            plot_drift(run, drift)
        summary = {"name": run.name, "start_success": state["start"], "best_success": state["best"],
                   "final_success": state["last"], "heldout_problems": len(heldout_problems), "iterations": args.iterations,
                   "steps": state["step"], "replay_updates": state["replay_updates"],
                   "episodes": state["episodes"], "minutes": round(state["minutes"], 2)}
        log.finish(summary)
    return summary


if __name__ == "__main__":
    ranks.silence_others()
    if sys.argv[1:] == ["--list"]:
        list_objectives()
    else:
        try:
            main(parse_args(sys.argv[1:], __doc__))
        except SystemExit as ended:
            if ended.code in (128 + signal.SIGINT, 128 + signal.SIGTERM):  # that all agreed on; an error may be one's alone
                ranks.close(ended.code)
            raise
        ranks.close()
