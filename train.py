"""FreshReplay: RL post-training that reuses its rollouts. The whole loop is `main`; its phases are the functions above it.

    python train.py                                         # configs/frozenlake_tiny.yaml, minutes on two CPU cores
    python train.py --replay none                           # the same without replay
    python train.py --resume runs/NAME                      # go on from its last checkpoint
    python train.py --help                                  # every flag, its unit and its default; --list: every objective
"""
import os

# threads that wait should sleep: spinning ones make a step 3.4 times as long beside a busy process, sleeping ones 1.6 times
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch loads

import math

import numpy as np

from drift import sequence_kl, token_kl
from engines.samplers import Batch, Job
from episode import is_sound, with_signal
from eval import evaluate
from judge import add_advantages, score, shuffle_rewards, td_errors, token_log_ratios
from losses import LOSSES
from runtime import ranks
from runtime.log import Clock, drift_record
from runtime.metrics import by_age, outline
from runtime.report import note_no_replay, report, watch_step
from runtime.setup import Run, command_line, end_early, finish, open_run, rng_of, save
from runtime.watch import refuse_broken
from settings import Args
from update import follow_plan, update


def now(run: Run) -> int:
    """The time that ages are counted in."""
    return run.iteration if "age_in_iterations" in run.args.released else run.step


def birthdays_of(run: Run, episodes) -> list[int]:
    return [run.iteration if "age_in_iterations" in run.args.released else episode.policy_step for episode in episodes]


def ask(run: Run, number: int, places=None) -> Job:
    """What is played as batch `number` (iteration `number`, where the trainer samples). `places` of its problems: chosen before."""
    args, n = run.args, run.args.problems_per_iteration
    places = run.problems.select(n, run.iteration) if places is None else np.array(places)
    groups, mine = np.arange(n) + number * n, ranks.share(n, number)
    seeds_NG = rng_of(args, "sampling", number).integers(2**31, size=(n, args.group_size))  # whatever the number of ranks
    problems = run.train_problems[places[mine]].repeat(args.group_size)
    return Job(number, places, groups, problems, groups[mine].repeat(args.group_size), seeds_NG[mine].ravel())


def sample(run: Run) -> Batch | None:
    """Played episodes, with the log-probs that they were sampled at; None where the run is to stop."""
    args = run.args
    wait = args.fresh_update or not run.buffer.ready(args.replay_batch_size, now(run))
    batch = run.source.next(run.iteration, wait)
    run.clock.lap("sample")
    return batch


def judge(run: Run, batch: Batch):
    """Advantages, computed once while every group is whole; and which episodes are sound enough to teach something."""
    args = run.args
    run.ledger.generated(batch.episodes, batch.reread)
    batch.arrived = run.step
    batch.oldest = -math.inf if args.max_staleness is None else run.step - args.max_staleness
    if args.shuffle_rewards:
        shuffle_rewards(batch.episodes, rng_of(args, "shuffled rewards", run.iteration))
    if batch.episodes:
        add_advantages(run.learner, batch.episodes)
    sound = [is_sound(run.learner.objective, episode, batch.oldest) for episode in batch.episodes]
    batch.sound = [episode for episode, good in zip(batch.episodes, sound) if good]
    batch.played = ranks.joined([outline(episode, good) for episode, good in zip(batch.episodes, sound)])
    refuse_broken(args, run.iteration, batch.played, run.play["context_length"])


def remember(run: Run, batch: Batch):
    """The problem sampler learns how its problems went; the buffer gets what is worth a draw."""
    args = run.args
    for place, group in zip(batch.asked, batch.groups):
        rows = [row for row in batch.played if row["sound"] and row["group_id"] == group]
        if rows:
            run.problems.update(place, [float(row["info"]["success"]) for row in rows], run.iteration)
    # ALGO LOGIC: what is stored
    stored = batch.sound if run.stores_all else with_signal(batch.sound, run.whole_groups)
    batch.stored = ranks.total(len(stored))
    if run.buffer is None:
        return
    base = td_errors(run.learner, stored) + args.replay_options["eps"] if args.priority == "td_error" else None
    if stored:
        run.buffer.add(stored, now(run), birthdays=birthdays_of(run, stored), base=base)
    if run.drift is not None:
        run.recent.add(batch.sound, now(run), birthdays=birthdays_of(run, batch.sound))


def learn_from_fresh(run: Run, batch: Batch) -> list[dict]:
    """Updates on this iteration's own episodes; returns their metrics."""
    args, sound, updates = run.args, batch.sound, []
    shuffle = rng_of(args, "minibatches", run.iteration)
    several = args.fresh_epochs * args.minibatches > 1 and LOSSES[run.learner.objective.loss].needs_proximal
    proximal_BT = score(run.learner.policy, sound, run.learner) if args.fresh_update and several else None
    for epoch in range(args.fresh_epochs if args.fresh_update else 0):
        for members in np.array_split(shuffle.permutation(batch.groups), args.minibatches):
            rows = [row for row, episode in enumerate(sound) if episode.group_id in members]
            if not any(ranks.gathered(rows)):
                continue
            ages = [batch.arrived - sound[row].policy_step for row in rows]
            updates.append(take_step(run, [sound[row] for row in rows], first_use=epoch == 0, ages=ages,
                                     proximal_BT=None if proximal_BT is None else proximal_BT[rows]))
    run.clock.lap("fresh")
    return updates


def learn_from_replayed(run: Run) -> tuple[list[dict], list]:
    """K updates on draws from the buffer; returns their metrics and the draws."""
    args, buffer, updates, draws = run.args, run.buffer, [], []
    size = ranks.share_size(args.replay_batch_size)
    while len(updates) < args.replay_updates and all(ranks.gathered(buffer.ready(size, now(run)))):
        drawn = buffer.sample(size, now(run), lowest=ranks.lowest)
        unused = False if args.fresh_update else drawn.steps_since_last_use < 0
        updates.append(take_step(run, drawn.episodes, unused, weights=drawn.weights, ages=drawn.ages, replayed=True))
        draws.append(drawn)
        if args.priority == "td_error":  # the one base priority that changes with the learner
            buffer.update_priorities(drawn.ids, td_errors(run.learner, drawn.episodes) + args.replay_options["eps"])
    run.replay_updates += len(updates)
    note_no_replay(run, size, now(run))
    return updates, draws


def take_step(run: Run, episodes, first_use, **how) -> dict:
    """One optimiser step at most; returns its metrics."""
    metrics = update(run.learner, episodes, **how)
    run.step += metrics["steps"]
    run.ledger.trained(episodes, metrics, first_use)
    run.source.sync(run.step, within=True)
    watch_step(run, episodes, metrics)
    return metrics


def measure_drift(run: Run) -> dict | None:
    """--tau auto: how fast the policy moves away from recent episodes, whether or not they were stored; sets tau."""
    if run.drift is None:
        return None
    size = ranks.share_size(run.args.replay_options["probe_episodes"])
    if all(ranks.gathered(run.recent.ready(size, now(run)))):
        probe = run.recent.sample(size, now(run))
        log_ratios_BT = token_log_ratios(run.learner, probe.episodes)
        ages, log_ratios, kl = map(ranks.joined, (probe.ages, log_ratios_BT.sum(1), token_kl(log_ratios_BT)))
        run.drift.add(ages, kl if run.args.replay_options["drift_kl"] == "token" else sequence_kl(log_ratios))
        run.log.append("drift.jsonl", drift_record(run.iteration, run.step, ages, log_ratios, kl))
    fit = run.drift.fit()
    if fit:
        run.buffer.set_tau(run.drift.tau())
    run.clock.lap("probe")
    return fit


def held_out(run: Run) -> dict:
    """One episode on each held-out problem."""
    return evaluate(run.engine, run.chat, run.make_env, run.heldout_problems, temperature=run.args.eval_temperature, **run.play)


def main(args: Args) -> dict:
    """Train; returns the summary that is also written to summary.json."""
    with open_run(args, ask) as run:
        if run.start is None:
            run.start = run.best = held_out(run)["success"]
        run.clock = Clock()
        for run.iteration in range(run.iteration + 1, args.iterations + 1):
            run.clock.lap("save")  # logs and checkpoint of the iteration before
            follow_plan(run.learner, run.buffer, run.iteration)
            batch = sample(run)
            if batch is None:  # interrupted, or a sampler died: this iteration did not happen
                run.iteration -= 1
                save(run)
                break
            judge(run, batch)
            remember(run, batch)
            fresh = learn_from_fresh(run, batch)
            held = by_age(run.buffer, now(run)) if args.replay_updates else None
            replayed, draws = learn_from_replayed(run)
            run.source.sync(run.step, stale=0 < batch.too_old == len(batch.played))
            run.clock.lap("replay")
            drift = measure_drift(run)
            last = run.iteration == args.iterations
            due = last or args.eval_every and run.iteration % args.eval_every == 0
            judged = held_out(run) if due else {}
            report(run, batch, fresh, replayed, draws, held, drift, judged, now(run))
            stopped = any(ranks.gathered(run.interrupt.signal))
            if last or stopped or args.checkpoint_every and run.iteration % args.checkpoint_every == 0:
                save(run)
            if stopped:
                break
        if run.iteration < args.iterations:
            end_early(run)
        return finish(run)


if __name__ == "__main__":
    command_line(main, __doc__)
