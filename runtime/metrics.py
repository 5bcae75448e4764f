"""What the loop logs: of the updates and beside them, of all ranks, as plain numbers."""
import math

import numpy as np
import torch

from episode import PLAYED
from episode import has_signal
from runtime import ranks
from runtime.ledger import ratio
from runtime.tensors import LOG_RATIO_LIMIT, check, check_mask, clamp_log_ratio, floats, masked, sequence_log_ratio


DIAGNOSTICS = ("ratio_mean", "ratio_max", "ratio_min", "max_abs_ratio_minus_1", "ess_token", "ess_sequence", "chi2",
               "kl_behavior_k1", "kl_behavior_k3", "m2", "clamped", "log_prob_difference_mean",
               "log_prob_difference_p99", "log_prob_difference_max", "advantage_mean", "nonzero_advantage_rows")


@torch.no_grad()
def diagnostics(logprobs_BT, behavior_logprobs_BT, advantages_BT, mask_BT):
    """How far the rows are from the current policy: floats, None where undefined. E ratio != 1 on much data is a bug.

    ess: (sum w)^2 / (n sum w^2) of token or sequence ratios w; chi2: E w^2 - 1; kl_behavior: KL(behaviour || current);
    m2: E (log w)^2; clamped: count beyond +-20; log_prob_difference: |current - behaviour|.
    """
    check_mask(mask_BT)
    check("diagnostics", mask_BT.shape, logprobs_BT=logprobs_BT, behavior_logprobs_BT=behavior_logprobs_BT,
           advantages_BT=advantages_BT)
    rows_B = mask_BT.any(1)
    if not rows_B.any():
        return dict.fromkeys(DIAGNOSTICS)
    difference_BT = masked(logprobs_BT.double() - behavior_logprobs_BT.double(), mask_BT)
    difference_N, advantages_BT = difference_BT[mask_BT], masked(advantages_BT.double(), mask_BT)
    log_ratio_N, distance_N = clamp_log_ratio(difference_N), difference_N.abs()
    ratio_N, ratio_R = log_ratio_N.exp(), sequence_log_ratio(clamp_log_ratio(difference_BT))[rows_B, 0].exp()
    values = (ratio_N.mean(), ratio_N.max(), ratio_N.min(), (ratio_N - 1).abs().max(),
              ratio_N.mean() ** 2 / (ratio_N ** 2).mean(), ratio_R.mean() ** 2 / (ratio_R ** 2).mean(),
              (ratio_N ** 2).mean() - 1, -difference_N.mean(), (ratio_N - 1 - log_ratio_N).mean(),
              (difference_N ** 2).mean(), (distance_N > LOG_RATIO_LIMIT).sum(), distance_N.mean(),
              distance_N.kthvalue(math.ceil(0.99 * len(distance_N))).values, distance_N.max(),
              advantages_BT[mask_BT].mean(), advantages_BT[rows_B].ne(0).any(1).double().mean())
    finite = floats(dict(zip(DIAGNOSTICS, values, strict=True)))
    return {name: value if math.isfinite(value) else None for name, value in finite.items()}


def explained_variance(values_BT, returns_BT, mask_BT):
    """1 - Var(R - v) / Var(R) over the masked tokens, a float; None where the returns do not vary."""
    returns_N, values_N = returns_BT[mask_BT].double(), values_BT.detach()[mask_BT].double()
    if len(returns_N) == 0 or returns_N.max() == returns_N.min():
        return None
    return float(1 - (returns_N - values_N).var(correction=0) / returns_N.var(correction=0))


EVERY_UPDATE = ("loss", "grad_norm", "lr", "steps", "without_signal", "nonfinite", "tokens_trained", "clip_fraction",
                "correction_weight", "entropy", *DIAGNOSTICS)  # None in iterations without an update, so that curves have gaps there
SUMMED = ("steps", "tokens_trained", "tokens_computed", "without_signal", "nonfinite", "clamped")


def merged(updates: list[dict]) -> dict:
    """All metrics of an iteration's updates that are numbers, as one: sums of counts, extremes of extremes, means of the rest."""
    numbers = {name: [] for name in EVERY_UPDATE}
    for metrics in updates:
        for name, value in metrics.items():
            if isinstance(value, (int, float)):
                numbers.setdefault(name, []).append(value)
    result = {}
    for name, values in numbers.items():
        if name in SUMMED:
            result[name] = sum(values)
        else:
            how = max if "max" in name else min if "min" in name else np.mean
            result[name] = float(how(values)) if values else None
    return result


def mean(values) -> float | None:
    return float(np.mean(values)) if len(values) else None


def under(name: str, metrics: dict) -> dict:
    return {f"{name}/{key}": value for key, value in metrics.items()}


def outline(episode, sound: bool) -> dict:
    """What all ranks need to know of an episode."""
    return {"group_id": episode.group_id, "reward": episode.reward, "tokens": len(episode.tokens), "info": episode.info,
            "answered": bool(episode.action_mask.any()), "signal": has_signal(episode), "sound": sound,
            **{name: getattr(episode, name) for name in ("iteration", "policy_step", "last_policy_step")}}


def fresh_metrics(played: list[dict], stored: int, buffer, step: int, oldest: float) -> dict:
    """`step` is that of their arrival; those sampled before the step `oldest` were dropped."""
    info = {key: [row["info"][key] for row in played] for key in PLAYED}
    turns = sum(info["turns"]) or len(played)  # without a turn nothing failed
    staleness = [step - row["policy_step"] for row in played]
    return {"episodes": len(played), "staleness_mean": mean(staleness), "staleness_max": max(staleness, default=None),
            "version_span_mean": mean([row["last_policy_step"] - row["policy_step"] for row in played]),
            "dropped_stale": sum(row["policy_step"] < oldest for row in played),
            "reward": mean([row["reward"] for row in played]),
            **{name: mean(info[name]) for name in ("success", "turns", "truncated", "context_full", "overlong")},
            "env_errors": mean([bool(error) for error in info["env_error"]]),
            "parse_failures": ratio(sum(info["parse_failures"]), turns), "length_stops": ratio(sum(info["length_stops"]), turns),
            "tokens_per_episode": mean([row["tokens"] for row in played]),
            "signal_share": mean([row["signal"] for row in played]),
            "stored_share": ratio(stored, len(played)) if buffer is not None else None}


def partnered(episodes) -> list[bool]:
    """Whether each episode of a draw has a member of its group with another reward beside it: only then is its advantage not 0
    where it is normalised inside the draw, as the released FreshPER code does (before the whitening, which shifts all rows)."""
    rewards = {}
    for episode in episodes:
        rewards.setdefault(episode.group_id, set()).add(episode.reward)
    return [len(rewards[episode.group_id]) > 1 for episode in episodes]


def replay_metrics(samples, args) -> dict:
    if not samples:
        return {"updates": 0} | dict.fromkeys(("age_mean", "age_p95", "unique_fraction", "success", "partnered_rows", "weight_min"))
    ages = ranks.joined(np.concatenate([sample.ages for sample in samples]))
    return {"updates": len(samples), "age_mean": ages.mean(), "age_p95": np.percentile(ages, 95),
            "unique_fraction": np.mean([ranks.total(len(np.unique(sample.ids))) / args.replay_batch_size for sample in samples]),
            "success": np.mean(ranks.joined([episode.info["success"] for sample in samples for episode in sample.episodes])),
            "partnered_rows": np.mean(ranks.joined([row for sample in samples for row in partnered(sample.episodes)])),
            "weight_min": ranks.lowest(min(sample.weights.min() for sample in samples))}


def by_age(buffer, step: int, bins: int = 128) -> dict[str, list]:
    """The live entries by rising age (grouped into `bins` when there are more ages): how many, their mean base priority,
    their share of the draw's mass; `uses`: how many were used 0, 1, ... 7, and 8 or more times."""
    if not buffer.ready(1, step):
        return {"age": [], "count": [], "mass": [], "priority": [], "uses": [0] * 9}
    slots = buffer.live(without=buffer.expired(step, buffer.max_age))
    slots = slots[np.argsort(buffer.id[slots])]
    no_mass = buffer.sampler == "prioritized" and buffer.alpha > 0 and not np.isfinite(buffer.log_base[slots]).any()
    p = np.zeros(len(slots)) if no_mass else buffer.probabilities(step)[1]  # without mass only fresh_fraction draws
    ages = step - buffer.birthday[slots]
    if len(np.unique(ages)) > bins:
        width = -(-(int(ages.max()) + 1) // bins)
        ages = ages // width * width
    age, place = np.unique(ages, return_inverse=True)
    count = np.bincount(place)
    return {"age": age.tolist(), "count": count.tolist(), "mass": np.bincount(place, p).tolist(),
            "priority": (np.bincount(place, np.exp(buffer.log_base[slots])) / count).tolist(),
            "uses": np.bincount(np.minimum(buffer.uses[slots], 8), minlength=9).tolist()}


def use_stats(counts: dict[str, int]) -> dict[str, float | int | None]:
    """What the counts of a buffer, or the sums over its shards, say of the use of its entries."""
    return {
        "added_total": counts["added"],
        "drawn_total": counts["drawn"],
        "replay_ratio": ratio(counts["drawn"], counts["added"]),
        "new_fraction": ratio(counts["first_uses"], counts["drawn"]),
        "steps_since_last_use_mean": ratio(counts["reuse_gap"], counts["drawn"] - counts["first_uses"]),
        "evicted_total": counts["evicted"],
        "evicted_unused_total": counts["evicted_unused"],
        "evicted_unused_fraction": ratio(counts["evicted_unused"], counts["evicted"]),
        "uses_of_retired_mean": ratio(counts["retired_uses"], counts["evicted"] + counts["dropped_by_age"]),
        "dropped_by_age_total": counts["dropped_by_age"],
        "dropped_by_age_tokens_mean": ratio(counts["dropped_by_age_tokens"], counts["dropped_by_age"]),
        "stale_updates_total": counts["stale_updates"],
    }


def buffer_stats(args, buffer, now: int) -> dict:
    """`buffer.stats` over the shards of all ranks: sums of counts, extremes of extremes, means of the rest weighted by entries
    (for quantiles and the entropy that is the mean over the shards)."""
    shards, uses = ranks.gathered(buffer.stats(now)), use_stats(ranks.total(buffer.counts))
    if len(shards) == 1:
        return shards[0] | uses
    result = dict.fromkeys(shards[0])
    for name in result:
        rows = [shard for shard in shards if shard[name] is not None and shard["size"]]
        values = [shard[name] for shard in rows]
        if name in ("size", "episodes", "bytes"):
            result[name] = sum(shard[name] for shard in shards)
        elif rows:
            extreme = max if name.endswith("_max") else min if name.endswith("_min") else None
            result[name] = extreme(values) if extreme else float(np.average(values, weights=[shard["size"] for shard in rows]))
    return result | uses | {"fill": result["size"] / args.capacity}


def drift_metrics(args, buffer, fit) -> dict:
    found = {f"drift_{name}": fit and fit[name] for name in ("c", "k0", "r2")} if args.tau == "auto" else {}
    return found | {"tau": buffer.tau, "tau_over_alpha": buffer.tau / args.alpha if args.alpha else None}


def task_averages(outcomes: list[dict]) -> dict:
    """The task's own numbers (reward components, exact match, ...): means over the episodes that have them."""
    keys = dict.fromkeys(key for row in outcomes for key in row["info"] if key not in PLAYED)
    told = {key: [row["info"][key] for row in outcomes if isinstance(row["info"].get(key), (bool, int, float))] for key in keys}
    return {key: mean(values) for key, values in told.items() if values}
