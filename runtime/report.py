"""What an iteration leaves behind: counters, warnings, its line of metrics.jsonl, and the episodes that are shown."""
from episode import episode_record
from runtime import ranks
from runtime.files import fail
from runtime.log import replay_record
from runtime.metrics import buffer_stats, drift_metrics, fresh_metrics, merged, replay_metrics, task_averages, under


def watch_step(run, episodes, metrics: dict):
    """Logs an update that was not finite; ends the run after three in a row."""
    if not metrics["nonfinite"]:
        run.bad_updates = 0
        return
    run.bad_updates += 1
    run.log.bad_update(run.iteration, metrics, ranks.joined(episodes))
    if run.bad_updates == 3:
        fail("three updates in a row had a loss or gradient that is not finite; the last lines of episodes.jsonl name "
             "their episodes; a smaller --lr or --max-grad-norm often helps")


def note_no_replay(run, size: int, now: int):
    """Says in the third iteration why nothing was replayed yet."""
    if run.args.replay_updates and run.iteration == 3 and not run.replay_updates:
        print(f"note: no replay yet: {max(map(str, ranks.gathered(run.buffer.refusal(size, now) or '')))}")


def report(run, batch, fresh: list[dict], replayed: list[dict], draws: list, held: dict | None, drift: dict | None, judged: dict,
           now: int):
    """Writes the iteration down. `held`: what the buffer held by age before the draws; `drift`: the fit behind tau auto; `judged`:
    the evaluation's numbers, {} where none was due; `now`: the time that ages are counted in."""
    for warning in run.watch.look([row["info"] for row in batch.played], fresh, replayed, batch.too_old):
        run.log.warn(run.iteration, warning)
    run.episodes += len(batch.played)
    run.tokens += sum(row["tokens"] for row in batch.played)
    run.jobs = max([run.jobs, *(row["iteration"] for row in batch.played)])
    run.best, run.last = max(run.best, judged.get("success", 0.0)), judged.get("success")
    run.clock.lap("eval")
    run.ledger.scored(run.learner.scored)
    run.ledger.spent(run.clock.laps, batch.busy, batch.idle)
    metrics = iteration_metrics(run, batch, fresh, replayed, draws, drift, judged, now)
    shown = shown_episodes(run, batch, replayed, draws)
    if replayed:
        run.log.append("replay.jsonl", replay_record(run.args, run.learner.objective, run.iteration, run.step, run.buffer, held, draws,
                                                     replayed))
    run.log.iteration(metrics, shown)


def iteration_metrics(run, batch, fresh, replayed, draws, drift, judged, now) -> dict:
    """A line of metrics.jsonl."""
    memory = {"bytes": 0}
    if run.buffer is not None:
        memory = buffer_stats(run.args, run.buffer, now) | drift_metrics(run.args, run.buffer, drift)
    both_sides = fresh and all(row["policy_step"] == batch.arrived for row in batch.played)  # had the same weights
    first = fresh[0] if both_sides else {}
    tokens = sum(row["tokens"] for row in batch.played)
    return {
        "iteration": run.iteration, "step": run.step, "episodes": run.episodes, "tokens": run.tokens,
        **under("fresh", fresh_metrics(batch.played, batch.stored, run.buffer, batch.arrived, batch.oldest) | merged(fresh)),
        "fresh/first_max_abs_ratio_minus_1": first.get("max_abs_ratio_minus_1"),
        **{f"fresh/sampler_trainer_difference_{key}": first.get(f"log_prob_difference_{key}") for key in ("mean", "p99", "max")},
        **under("task", task_averages(batch.played)),
        **under("replay", merged(replayed) | replay_metrics(draws, run.args)),
        **under("time", {"buffer_bytes": memory.pop("bytes")}), **under("buffer", memory),
        **under("problems", run.problems.stats(run.iteration)),
        **under("eval", {"success": None} | judged | {"start_success": run.start, "best_success": run.best}),
        **run.ledger.metrics(), **run.source.metrics(),
        **under("time", run.clock.metrics(tokens, batch.busy))}


def shown_episodes(run, batch, replayed, draws) -> list[dict]:
    """Lines of episodes.jsonl: the first fresh ones and those whose environment broke, of all ranks; of the last draw some."""
    first = ranks.share(run.args.problems_per_iteration, run.iteration).start * run.args.group_size
    shown = []
    for place, (episode, transcript) in enumerate(zip(batch.episodes, batch.transcripts), first):
        if place < run.args.transcripts or episode.info["env_error"]:
            shown.append(episode_record(run.chat, run.iteration, episode, transcript))
    shown = ranks.joined(shown)
    if replayed:
        drawn, log_ratios = draws[-1], replayed[-1]["log_ratios"]
        for row in zip(drawn.episodes, [None] * run.args.transcripts, drawn.ages, drawn.weights, log_ratios):
            shown.append(episode_record(run.chat, run.iteration, *row, kind="replay"))
    return shown
