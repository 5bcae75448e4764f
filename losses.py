"""Every objective of this project as pure functions on padded tensors: advantages, policy losses, corrections, KL.

B rows (episodes), T tokens. Log-probs are (B, T) float32, aligned with tokens: position t holds the log-prob of token t
given the tokens before it, at the sampling temperature; masked positions hold 0. `mask_BT` is True on action tokens.
Ratio rho = exp(current - behaviour), its logarithm clamped to +-20; advantages A are frozen at collection.
"""
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from types import SimpleNamespace

import torch

from episode import one_of
from runtime.tensors import (LOG_RATIO_LIMIT, ROUNDING, at_least_float32, check, check_mask, clamp_log_ratio, floats, log_ratio,
                             masked, nearly_equal, no_branch, row_mean, sequence_log_ratio)

LEVELS = ("token", "sequence")  # of a ratio
M2_RULES = ("remove", "cap")  # the harmful tokens beyond M2PO's budget

AGGREGATIONS = {"token_mean": "sum / tokens (DAPO 2503.14476)",
                "seq_mean_token_mean": "sum of the rows' means / rows (GRPO 2402.03300)",
                "seq_mean_token_sum": "sum of the rows' sums / rows (sequence-level REINFORCE)",
                "constant": "sum / (rows * max_length) (Dr. GRPO 2503.20783)"}


def aggregate(values_BT, mask_BT, mode, *, denominator=None, max_length=None, weights_B=None):
    """A scalar from per-token values by AGGREGATIONS[mode]; rows without an action token count nowhere.

    `denominator` (see `step_denominator`) is the one number of the *whole* optimiser step, so that its micro-batches
    add up; None takes this batch's. `weights_B` are detached and multiply rows, never the denominator.
    """
    one_of("aggregation", mode, AGGREGATIONS)
    check_mask(mask_BT)
    check("aggregate", mask_BT.shape, values_BT=values_BT)
    if denominator is None:
        denominator = step_denominator(mask_BT, mode, max_length=max_length)
    elif not denominator > 0:
        raise ValueError(f"denominator must be > 0, got {denominator}")
    values_B = masked(values_BT, mask_BT).sum(1)
    if mode == "seq_mean_token_mean":
        values_B = values_B / mask_BT.sum(1).clamp(min=1)
    if weights_B is not None:
        check("aggregate", mask_BT.shape[:1], weights_B=weights_B)
        values_B = values_B * weights_B.detach().to(values_B)
    return values_B.sum() / denominator


def step_denominator(mask_BT, mode, *, max_length=None, total=int):
    """What `aggregate` divides by: tokens, or rows that have any, times `max_length` for constant; at least 1. `total` turns
    a count of these rows into that of all processes' rows."""
    one_of("aggregation", mode, AGGREGATIONS)
    if mode == "token_mean":
        return max(total(int(mask_BT.sum())), 1)
    rows = max(total(int(mask_BT.any(1).sum())), 1)
    if mode in ("seq_mean_token_mean", "seq_mean_token_sum"):
        return rows
    if mode != "constant":
        raise no_branch("aggregation", mode, "step_denominator")
    if not (max_length and max_length > 0):
        raise ValueError(f"aggregation 'constant' needs max_length > 0, the action tokens an episode may have, got {max_length}")
    return rows * max_length


def compute_advantages(kind, rewards, group_ids_B, mask_BT, *, token_kl_BT=None, values_BT=None, gamma=1.0, lam=1.0,
                       shift=-0.1, baseline=0.0, std_floor=1e-6, whiten=None, joined=lambda values_N: values_N):
    """Advantages (B, T), float32, 0 where the mask is False; computed once, with the whole group or batch in sight.

    `rewards`: (B, T) with each turn's reward on its last action token for the kinds per token, else returns (B,). A
    NaN reward means "not judged": its row gets 0 and counts in no statistic. `token_kl_BT`, already times its
    coefficient, is taken off the rewards (off returns: its row sums). `whiten` None: as the kind does by default; `joined` joins
    the values of all processes for it.
    """
    advantage = ADVANTAGES[one_of("advantage kind", kind, ADVANTAGES)]
    check_mask(mask_BT)
    what, per_token = f"advantage kind {kind!r}", advantage.per_token
    check(what, mask_BT.shape if per_token else mask_BT.shape[:1], rewards=rewards)
    if rewards.isinf().any():
        raise ValueError(f"{what}: rewards has infinite entries at {rewards.isinf().nonzero().tolist()}")
    if advantage.needs_group:
        check(what, mask_BT.shape[:1], group_ids_B=group_ids_B)
    if advantage.needs_values:
        check(what, mask_BT.shape, values_BT=values_BT, finite_under=mask_BT)
    judged_B = ~rewards.isnan().reshape(len(mask_BT), -1).any(1)
    mask_BT, rewards = mask_BT & judged_B[:, None], rewards.double().nan_to_num(0.0)
    if per_token:
        lost_B = (rewards.ne(0) & ~mask_BT).any(1) & mask_BT.any(1)
        if lost_B.any():
            raise ValueError(f"{what}: rewards has entries where mask_BT is False in rows "
                             f"{lost_B.nonzero().flatten().tolist()}; put each turn's reward on its last action token")
    if token_kl_BT is not None:
        check(what, mask_BT.shape, token_kl_BT=token_kl_BT, finite_under=mask_BT)
        token_kl_BT = masked(token_kl_BT.double(), mask_BT)
        rewards = rewards - (token_kl_BT if per_token else token_kl_BT.sum(1))
    x = SimpleNamespace(mask_BT=mask_BT, values_BT=values_BT, gamma=gamma, lam=lam, shift=shift, baseline=baseline,
                        std_floor=std_floor)
    if advantage.needs_group:
        x.centred_B, x.std_B, x.size_B = group_statistics(rewards, group_ids_B, judged_B)
    advantages = advantage.function(rewards, x)
    advantages_BT = masked(advantages if per_token else advantages[:, None], mask_BT)
    if advantage.whitened if whiten is None else whiten:
        advantages_BT = whitened(advantages_BT, mask_BT, std_floor=std_floor, joined=joined)
    return torch.where(advantages_BT.abs() > ROUNDING, advantages_BT, 0.0).float()


def group_statistics(rewards_B, group_ids_B, judged_B):
    """Per row: reward minus its group's mean, the group's unbiased std, its size; over judged members (others are 0). A group of
    one or of equal rewards (but for ROUNDING) is exactly 0, never a rounding error over a tiny std."""
    index_B = group_ids_B.unique(return_inverse=True)[1]
    zeros_G = rewards_B.new_zeros(len(index_B))  # at most one group a row
    size_G = zeros_G.index_add(0, index_B, judged_B.double())
    mean_G = zeros_G.index_add(0, index_B, rewards_B) / size_G.clamp(min=1)
    high_G = zeros_G.scatter_reduce(0, index_B, rewards_B.where(judged_B, -torch.inf), "amax", include_self=False)
    low_G = zeros_G.scatter_reduce(0, index_B, rewards_B.where(judged_B, torch.inf), "amin", include_self=False)
    equal_G = nearly_equal(low_G, high_G)
    centred_B = torch.where(judged_B & ~equal_G[index_B], rewards_B - mean_G[index_B], 0.0)
    # a reward at the mean has no signal; what rounding leaves there would count as some
    centred_B = torch.where(centred_B.abs() > 1e-6 * (high_G - low_G)[index_B], centred_B, 0.0)
    std_G = (zeros_G.index_add(0, index_B, centred_B.square()) / (size_G - 1).clamp(min=1)).sqrt()
    return centred_B, std_G[index_B], size_G[index_B]


@dataclass(frozen=True)
class Advantage:
    """An entry of ADVANTAGES: a function of the rewards (float64) and of x, and what others must know of it. x holds the
    arguments of compute_advantages and, with `needs_group`, centred_B = r - mean, std_B and size_B of the row's group."""
    function: Callable
    per_token: bool = False  # rewards_BT, each turn's; else rewards_B, the episode's return
    needs_group: bool = False  # several answers to one problem
    group_mean: bool = False  # exactly 0 for a group of one or of equal rewards
    needs_values: bool = False  # a critic
    whitened: bool = False  # over all action tokens of the batch, unless asked otherwise


def over_std(rewards_B, x):
    """(r - mean) / std, unbiased (DeepSeekMath 2402.03300, section 4.1.2)."""
    return x.centred_B / x.std_B.clamp(min=x.std_floor)


def off_mean(rewards_B, x):
    """r - mean (Dr. GRPO 2503.20783; 2601.02648)."""
    return x.centred_B


def leave_one_out(rewards_B, x):
    """r - mean of the *others* (RLOO 2402.14740)."""
    return x.centred_B * x.size_B / (x.size_B - 1).clamp(min=1)


def off_shifted_mean(rewards_B, x):
    """r - (mean + shift) with shift < 0 (AsymRE 2506.20520): -shift on *every* answer of an all-equal group."""
    return x.centred_B - x.shift


def off_constant(rewards_B, x):
    return rewards_B - x.baseline


def return_to_go(rewards_BT, x):
    return gae(rewards_BT, torch.zeros_like(rewards_BT), x.mask_BT, gamma=x.gamma)[0]


def over_critic(rewards_BT, x):
    return gae(rewards_BT, x.values_BT, x.mask_BT, gamma=x.gamma, lam=x.lam)[0]


# ALGO LOGIC: what a token is worth; a new kind is a function like those above and its entry here
ADVANTAGES = {
    "grpo": Advantage(over_std, needs_group=True, group_mean=True),
    "dr_grpo": Advantage(off_mean, needs_group=True, group_mean=True),
    "rloo": Advantage(leave_one_out, needs_group=True, group_mean=True),
    "asymre": Advantage(off_shifted_mean, needs_group=True),
    "reinforce": Advantage(off_constant),
    "reinforce++": Advantage(return_to_go, per_token=True, whitened=True),  # REINFORCE++ 2501.03262
    "reinforce++_baseline": Advantage(off_mean, needs_group=True, whitened=True),  # same paper
    "gae": Advantage(over_critic, per_token=True, needs_values=True),
}


def whitened(values_BT, mask_BT, *, std_floor=1e-6, joined=lambda values_N: values_N):
    """(x - mean) / std (population) over the masked tokens, of all processes if `joined` joins theirs, 0 elsewhere; exactly 0
    when all are equal but for ROUNDING, and for a value at the mean."""
    values_N = joined(values_BT[mask_BT].double())
    if len(values_N) == 0 or nearly_equal(values_N.min(), values_N.max()):
        return torch.zeros_like(values_BT)
    centred_BT = values_BT.double() - values_N.mean()
    centred_BT = torch.where(centred_BT.abs() > 1e-6 * (values_N.max() - values_N.min()), centred_BT, 0.0)
    std = values_N.std(correction=0).clamp(min=std_floor)
    return masked(centred_BT / std, mask_BT).to(values_BT.dtype)


def gae(rewards_BT, values_BT, mask_BT, *, gamma=1.0, lam=1.0):
    """(advantages, returns) (B, T) of GAE (1506.02438, eq. 16) over action tokens; returns = advantages + values."""
    values_BT = masked(values_BT.detach().double(), mask_BT)
    returns_BT = _vtrace(rewards_BT, values_BT, torch.ones_like(values_BT), mask_BT, gamma, lam, 1.0, 1.0)[1]
    return (returns_BT - values_BT).float(), returns_BT.float()


def vtrace(rewards_BT, values_BT, log_ratio_BT, mask_BT, *, gamma=1.0, lam=1.0, rho_cap=1.0, c_cap=1.0):
    """(advantages, value targets) (B, T) of V-trace (IMPALA 1802.01561, eq. 1 and remark 2) over action tokens.

    The advantage r + gamma v_{t+1} - V_t comes *without* its factor rho_t: the loss holds that ratio.
    """
    values_BT, ratio_BT = masked(values_BT.detach().double(), mask_BT), log_ratio_BT.detach().double().exp()
    advantages_BT, targets_BT = _vtrace(rewards_BT, values_BT, ratio_BT, mask_BT, gamma, lam, rho_cap, c_cap)
    return advantages_BT.float(), targets_BT.float()


def _vtrace(rewards_BT, values_BT, ratio_BT, mask_BT, gamma, lam, rho_cap, c_cap):
    # backwards over action tokens; the carried value and target pass unchanged, undiscounted, through observation spans
    rewards_BT, rho_BT = masked(rewards_BT.double(), mask_BT), ratio_BT.clamp(max=rho_cap)
    trace_BT = lam * ratio_BT.clamp(max=c_cap)
    advantages_BT, targets_BT = torch.zeros_like(values_BT), torch.zeros_like(values_BT)
    next_value_B, next_target_B = values_BT.new_zeros(2, len(values_BT)).unbind()
    for t in reversed(range(mask_BT.shape[1])):
        reward_B, value_B, mask_B = rewards_BT[:, t], values_BT[:, t], mask_BT[:, t]
        delta_B = rho_BT[:, t] * (reward_B + gamma * next_value_B - value_B)
        target_B = value_B + delta_B + gamma * trace_BT[:, t] * (next_target_B - next_value_B)
        advantages_BT[:, t] = reward_B + gamma * next_target_B - value_B
        targets_BT[:, t] = target_B
        next_value_B = torch.where(mask_B, value_B, next_value_B)
        next_target_B = torch.where(mask_B, target_B, next_target_B)
    return masked(advantages_BT, mask_BT), masked(targets_BT, mask_BT)


def policy_loss(kind, logprobs_BT, behavior_logprobs_BT, advantages_BT, mask_BT, *, proximal_logprobs_BT=None,
                weights_B=None, aggregation="token_mean", denominator=None, max_length=None, correction=None,
                correction_low=None, correction_high=None, ages_B=None, **options):
    """(scalar loss, metrics) of one micro-batch by LOSSES[kind]; `loss_options(kind)` lists the options it uses.

    An option of None takes the kind's default, one that only other kinds use is ignored. `denominator`: `aggregate`'s.
    `weights_B` (PER) and correction weights are detached and multiply losses, never a ratio or the denominator. The
    ratio is current / behaviour; for a kind that needs a proximal policy, current / proximal.
    Metrics are floats: token means over this micro-batch, but `clamped` (log-ratios beyond +-20) a count.
    """
    entry = LOSSES[one_of("loss kind", kind, LOSSES)]
    what = f"loss kind {kind!r}"
    check_mask(mask_BT)
    check(what, mask_BT.shape, logprobs_BT=logprobs_BT)
    check(what, mask_BT.shape, behavior_logprobs_BT=behavior_logprobs_BT, advantages_BT=advantages_BT, finite_under=mask_BT)
    for name in options:
        one_of("option of policy_loss", name, ALL_LOSS_OPTIONS)
    options = {name: value for name, value in options.items() if name in loss_options(kind) and value is not None}
    logprobs_BT = masked(at_least_float32(logprobs_BT), mask_BT)
    advantages_BT = masked(at_least_float32(advantages_BT.detach()), mask_BT)
    if entry.needs_proximal:
        check(what, mask_BT.shape, proximal_logprobs_BT=proximal_logprobs_BT, finite_under=mask_BT)
        anchor_BT = corrected_BT = proximal_logprobs_BT.detach()
        correction = correction or "tis_token"
    else:
        anchor_BT, corrected_BT, correction = behavior_logprobs_BT.detach(), logprobs_BT.detach(), correction or "none"
        if proximal_logprobs_BT is not None:
            raise ValueError(f"proximal_logprobs_BT: {what} divides by the behaviour policy; use 'decoupled_ppo'")
        if entry.holds_ratio and correction in RATIO_CORRECTIONS:
            raise ValueError(f"correction {correction!r}: {what} already holds the ratio to the behaviour policy, "
                             "which must not count twice; use 'decoupled_ppo' or another correction")
    log_ratio_BT = log_ratio(logprobs_BT, anchor_BT, mask_BT)
    loss_BT, metrics = entry.function(logprobs_BT, log_ratio_BT, advantages_BT, mask_BT, **options)
    if correction != "none":
        metrics["correction_weight"] = correction_weights(
            correction, corrected_BT, behavior_logprobs_BT, mask_BT, low=correction_low, high=correction_high,
            ages_B=ages_B, advantages_BT=advantages_BT)
        loss_BT = loss_BT * metrics["correction_weight"]
    loss = aggregate(loss_BT, mask_BT, aggregation, denominator=denominator, max_length=max_length, weights_B=weights_B)
    tokens = mask_BT.sum().clamp(min=1)
    metrics = {name: masked(value_BT.detach().double(), mask_BT).sum() / tokens for name, value_BT in metrics.items()}
    clamped = ((logprobs_BT.detach() - masked(anchor_BT, mask_BT)).abs() > LOG_RATIO_LIMIT).sum()
    return loss, floats({"loss": loss, "clamped": clamped, **metrics})


def reinforce(logprobs_BT, log_ratio_BT, advantages_BT, mask_BT):
    """-A logp. Also AsymRE's loss (2506.20520), summed over tokens: its shift lives in the advantage."""
    return -advantages_BT * logprobs_BT, {}


def ppo_clip(logprobs_BT, log_ratio_BT, advantages_BT, mask_BT, *, eps_low=0.2, eps_high=0.2, dual_clip=None, ratio_cap=None):
    """max(-rho A, -clip(rho, 1 - eps_low, 1 + eps_high) A) (PPO 1707.06347, eq. 7; clip-higher: DAPO 2503.14476).

    For A < 0: at most -dual_clip A (1912.09729); rho of the free branch at most ratio_cap (INTELLECT-2 2505.07291). As
    decoupled_ppo (2110.00641, eq. 11; AReaL 2505.24298) rho = current / proximal, times sg(proximal / behaviour).
    """
    ratio_BT = log_ratio_BT.exp()
    free_BT = ratio_BT if ratio_cap is None else ratio_BT.clamp(max=ratio_cap)
    loss_BT = torch.maximum(-free_BT * advantages_BT, -ratio_BT.clamp(1 - eps_low, 1 + eps_high) * advantages_BT)
    negative_BT = advantages_BT < 0
    metrics = {"clip_fraction_low": negative_BT & (ratio_BT < 1 - eps_low),
               "clip_fraction_high": (advantages_BT > 0) & (ratio_BT > 1 + eps_high)}
    if ratio_cap is not None:
        metrics["clip_fraction_cap"] = negative_BT & (ratio_BT > ratio_cap)
    if dual_clip is not None:
        metrics["clip_fraction_dual"] = negative_BT & (loss_BT > -dual_clip * advantages_BT)
        loss_BT = torch.where(metrics["clip_fraction_dual"], -dual_clip * advantages_BT, loss_BT)
    return loss_BT, metrics


def is_reinforce(logprobs_BT, log_ratio_BT, advantages_BT, mask_BT, *, level="token", is_cap=2.0):
    """-sg(min(rho, is_cap)) A logp, sg = detached, rho of the token or the sequence (truncated IS, 1802.01561)."""
    if one_of("level", level, LEVELS) == "sequence":
        log_ratio_BT = sequence_log_ratio(log_ratio_BT)
    ratio_BT = log_ratio_BT.detach().exp()
    return -ratio_BT.clamp(max=is_cap) * advantages_BT * logprobs_BT, {"clip_fraction_high": ratio_BT > is_cap}


def cispo(logprobs_BT, log_ratio_BT, advantages_BT, mask_BT, *, eps_low=0.2, eps_high=0.2):
    """-sg(clip(rho, 1 - eps_low, 1 + eps_high)) A logp (CISPO, MiniMax-M1 2506.13585, eq. 4)."""
    ratio_BT = log_ratio_BT.detach().exp()
    return (-ratio_BT.clamp(1 - eps_low, 1 + eps_high) * advantages_BT * logprobs_BT,
            {"clip_fraction_low": ratio_BT < 1 - eps_low, "clip_fraction_high": ratio_BT > 1 + eps_high})


def gspo(logprobs_BT, log_ratio_BT, advantages_BT, mask_BT, *, eps_low=3e-4, eps_high=4e-4):
    """PPO clip of the row's ratio exp(mean_t log rho_t), token form (GSPO 2507.18071); use seq_mean_token_mean."""
    log_s_BT = row_mean(log_ratio_BT.detach(), mask_BT) + logprobs_BT - logprobs_BT.detach()
    return ppo_clip(logprobs_BT, log_s_BT, advantages_BT, mask_BT, eps_low=eps_low, eps_high=eps_high)


def topr(logprobs_BT, log_ratio_BT, advantages_BT, mask_BT):
    """-A logp where A >= 0, -sg(min(pi / mu, 1)) A logp where A < 0, pi / mu of the sequence (TOPR 2503.14286)."""
    weight_BT = sequence_log_ratio(log_ratio_BT).detach().clamp(max=0.0).exp()
    weight_BT = torch.where(advantages_BT < 0, weight_BT, 1.0)
    return -weight_BT * advantages_BT * logprobs_BT, {"is_weight": weight_BT}


def m2po(logprobs_BT, log_ratio_BT, advantages_BT, mask_BT, *, m2_budget=0.04, m2_rule="remove", m2_bound=None):
    """PPO clip at exp(-b) and exp(b), b = m2_bound: harmful tokens beyond it have no gradient (M2PO 2510.01161).

    `m2_bound` is a number of the whole optimiser step (`m2po_bound`); None takes that of this micro-batch alone.
    """
    if m2_bound is None:
        m2_bound = m2po_bound(log_ratio_BT, 0 * log_ratio_BT, advantages_BT, mask_BT, m2_budget=m2_budget, m2_rule=m2_rule)
    m2_bound = min(m2_bound, LOG_RATIO_LIMIT)
    return ppo_clip(logprobs_BT, log_ratio_BT, advantages_BT, mask_BT,
                    eps_low=1 - math.exp(-m2_bound), eps_high=math.exp(m2_bound) - 1)


def m2po_bound(logprobs_BT, behavior_logprobs_BT, advantages_BT, mask_BT, *, m2_budget=0.04, m2_rule="remove"):
    """The b beyond which |log rho| of a harmful token (A > 0, rho > 1 or A < 0, rho < 1) is clipped; infinite if the mean square
    over the harmful tokens is within the budget (M2PO 2510.01161).

    remove (the paper's Algorithm 1): the largest are taken out until the mean square of the others is within the budget; b lies
    between the two. cap (the released training): the b at which mean(min((log rho)^2, b^2)) is the budget.
    """
    log_ratio_BT = log_ratio(logprobs_BT.detach(), behavior_logprobs_BT, mask_BT)
    square_N = log_ratio_BT[mask_BT & (advantages_BT * log_ratio_BT > 0)].double().square().sort().values
    if len(square_N) == 0 or square_N.mean() <= m2_budget:
        return math.inf
    sums_N = square_N.cumsum(0)
    ranks_N = torch.arange(len(square_N), device=square_N.device)
    if one_of("m2_rule", m2_rule, M2_RULES) == "remove":
        smallest_out = square_N[sums_N > m2_budget * (ranks_N + 1)][0]
        largest_kept = max(square_N[square_N < smallest_out].tolist(), default=0.0)
        return (math.sqrt(largest_kept) + math.sqrt(smallest_out)) / 2
    # with the k smallest kept and the others capped at b^2: (sum of the k) + (n - k) b^2 = budget n
    cap_N = (m2_budget * len(square_N) - (sums_N - square_N)) / (len(square_N) - ranks_N)
    return math.sqrt(cap_N[cap_N <= square_N][0])


def one_side(logprobs_BT, log_ratio_BT, advantages_BT, mask_BT, *, eps_low=0.2, eps_high=0.2):
    """-M A logp, M = 1[A > 0, rho <= 1 + eps_high] + 1[A < 0, rho >= 1 - eps_low] (REC-OneSide-NoIS 2509.24203)."""
    ratio_BT = log_ratio_BT.detach().exp()
    low_BT, high_BT = (advantages_BT < 0) & (ratio_BT < 1 - eps_low), (advantages_BT > 0) & (ratio_BT > 1 + eps_high)
    return (torch.where(low_BT | high_BT, 0.0, -advantages_BT) * logprobs_BT,
            {"clip_fraction_low": low_BT, "clip_fraction_high": high_BT})


def tba(logprobs_BT, log_ratio_BT, advantages_BT, mask_BT, *, reference_logprobs_BT=None, rewards_B=None,
        group_ids_B=None, tba_beta=0.01, log_z_B=None):
    """(log Z + log pi - log ref - r / beta)^2 of a row (TBA 2503.18929), spread over its tokens; seq_mean_token_sum.

    `log_z_B` comes from `tba_log_z` over whole groups; None takes it from this micro-batch. A NaN reward drops a row.
    """
    check("loss kind 'tba'", mask_BT.shape, reference_logprobs_BT=reference_logprobs_BT, finite_under=mask_BT)
    if log_z_B is None:
        log_z_B = tba_log_z(logprobs_BT, reference_logprobs_BT, rewards_B, group_ids_B, mask_BT, tba_beta=tba_beta)
    check("loss kind 'tba'", mask_BT.shape[:1], rewards_B=rewards_B, log_z_B=log_z_B)
    log_pi_B = (logprobs_BT - masked(reference_logprobs_BT.detach(), mask_BT)).sum(1)
    error_B = masked(log_z_B.detach() + log_pi_B - rewards_B / tba_beta, ~rewards_B.isnan())
    loss_B1 = (error_B.square() / mask_BT.sum(1).clamp(min=1))[:, None]
    return loss_B1.expand(mask_BT.shape), {"tba_error": error_B[:, None].abs().expand(mask_BT.shape)}


@torch.no_grad()
def tba_log_z(logprobs_BT, reference_logprobs_BT, rewards_B, group_ids_B, mask_BT, *, tba_beta=0.01):
    """log Z (B,): the mean over the row's group of log ref - log pi + r / beta (TBA 2503.18929)."""
    check("tba_log_z", mask_BT.shape[:1], rewards_B=rewards_B, group_ids_B=group_ids_B)
    log_pi_B = masked(logprobs_BT.double() - reference_logprobs_BT.double(), mask_BT).sum(1)
    used_B = mask_BT.any(1) & ~rewards_B.isnan()
    same_BB = (group_ids_B[:, None] == group_ids_B).double() * used_B
    log_z_B = same_BB @ masked(rewards_B.double() / tba_beta - log_pi_B, used_B) / same_BB.sum(1).clamp(min=1)
    return log_z_B.to(at_least_float32(logprobs_BT).dtype)


def sft_positive(logprobs_BT, log_ratio_BT, advantages_BT, mask_BT, *, rewards_B=None, success_reward=1.0):
    """-1[r >= success_reward] logp: imitation of successes (RAFT 2304.06767; used by RLEP 2507.07451)."""
    check("loss kind 'sft_positive'", mask_BT.shape[:1], rewards_B=rewards_B)
    positive_BT = (rewards_B >= success_reward)[:, None].expand(mask_BT.shape)
    return torch.where(positive_BT, -logprobs_BT, 0.0), {"positive_fraction": positive_BT}


@dataclass(frozen=True)
class Loss:
    """An entry of LOSSES: the function, and what others must know of it. Where the function has an option reference_logprobs_BT,
    log_z_B or m2_bound, the update computes it for each step."""
    function: Callable
    replayed: str  # whether replayed data suits it: no | mild (while it is of a policy nearby) | biased | yes
    why: str
    holds_ratio: bool = False  # to the policy that sampled, as a weight: no correction may count it twice
    clips: str | None = None  # clip_range is of the ratio to that policy of a "token" or of the sequence's "mean"
    needs_proximal: bool = False  # the policy when the batch's first update began
    needs_score: bool = False  # rewards_B is the task's own score, without format penalty and shaping
    silent_at_zero: bool = True  # a row of zero advantages has zero gradient


# ALGO LOGIC: a loss is a function (logprobs, log_ratio, advantages, mask, *, options) -> (per-token loss, {metric: (B, T)})
# like those above, and its entry here; its metrics are logged as fresh/<name> and replay/<name>
LOSSES = {
    "reinforce": Loss(reinforce, "no", "no ratio: stale rows give the gradient of another policy's objective"),
    "ppo_clip": Loss(ppo_clip, "mild", "tokens that moved past the trust region fall silent", holds_ratio=True, clips="token"),
    "decoupled_ppo": Loss(ppo_clip, "yes", "truncated weight, trust region around the proximal policy", needs_proximal=True),
    "is_reinforce": Loss(is_reinforce, "biased", "truncated weight; a token's ratio ignores the prefix", holds_ratio=True),
    "cispo": Loss(cispo, "biased", "clipped weight: every token keeps a gradient", holds_ratio=True, clips="token"),
    "gspo": Loss(gspo, "mild", "less noise, but a whole sequence falls silent", holds_ratio=True, clips="mean"),
    "topr": Loss(topr, "yes", "positives need no ratio, negatives weigh in [0, 1]: bounded as pi -> 0", holds_ratio=True),
    "m2po": Loss(m2po, "yes", "clips only as many harmful tokens as the second-moment budget demands", holds_ratio=True),
    "one_side": Loss(one_side, "yes", "no ratio as a weight, only a mask against going too far", clips="token"),
    "asymre": Loss(reinforce, "yes", "no ratio: a baseline below the mean keeps the fixed point safe (a pull to the data)"),
    "tba": Loss(tba, "yes", "squared error of an identity that holds under any sampler", silent_at_zero=False),
    "sft_positive": Loss(sft_positive, "yes", "no negatives: diversity shrinks", needs_score=True, silent_at_zero=False),
}


def loss_options(kind):
    """{option: default} of a loss kind."""
    parameters = inspect.signature(LOSSES[one_of("loss kind", kind, LOSSES)].function).parameters.values()
    return {parameter.name: parameter.default for parameter in parameters if parameter.kind == parameter.KEYWORD_ONLY}


def user_options(kind):
    """Those that --loss-options may set: not tensors, and not what is computed for each step."""
    return {name: default for name, default in loss_options(kind).items() if not name.endswith(("_B", "_BT", "m2_bound"))}


ALL_LOSS_OPTIONS = sorted({name for kind in LOSSES for name in loss_options(kind)})


CORRECTIONS = {  # kind: (default low, default high, weight)
    "none": (None, None, "1"),
    "tis_token": (0.0, 2.0, "w clamped to [low, high] (verl, AReaL 2505.24298)"),
    "tis_sequence": (0.0, 5.0, "the product of the row's w, clamped (verl); long rows end at a bound"),
    "mis": (0.5, 5.0, "w where low <= w <= high, else 0 (IcePop 2510.18855)"),
    "geometric": (0.999, 1.001, "1 in rows with low <= exp(mean log w) <= high, else 0 (verl)"),
    "sequence_mask": (None, 0.5, "0 where A < 0 in rows with mean -log w > high, else 1 (DeepSeek-V3.2)"),
    "age_discount": (0.99, math.inf, "low ^ age, 0 in rows older than high (AReaL)"),
}
RATIO_CORRECTIONS = ("tis_token", "tis_sequence", "mis")


@torch.no_grad()
def correction_weights(kind, proximal_BT, behavior_BT, mask_BT, *, low=None, high=None, ages_B=None, advantages_BT=None):
    """Detached weights (B, T) by CORRECTIONS[kind] from w = proximal / behaviour, 0 where masked; None: the default."""
    default_low, default_high, _ = CORRECTIONS[one_of("correction", kind, CORRECTIONS)]
    low, high = default_low if low is None else low, default_high if high is None else high
    what = f"correction {kind!r}"
    check_mask(mask_BT)
    check(what, mask_BT.shape, proximal_BT=proximal_BT)
    check(what, mask_BT.shape, behavior_BT=behavior_BT, finite_under=mask_BT)
    log_w_BT = log_ratio(proximal_BT, behavior_BT, mask_BT)
    if kind == "none":
        weights_BT = torch.ones_like(log_w_BT)
    elif kind == "tis_token":
        weights_BT = log_w_BT.exp().clamp(low, high)
    elif kind == "tis_sequence":
        weights_BT = sequence_log_ratio(log_w_BT).exp().clamp(low, high)
    elif kind == "mis":
        w_BT = log_w_BT.exp()
        weights_BT = torch.where((w_BT >= low) & (w_BT <= high), w_BT, 0.0)
    elif kind == "geometric":
        w_B1 = row_mean(log_w_BT, mask_BT).exp()
        weights_BT = (w_B1 >= low) & (w_B1 <= high)
    elif kind == "sequence_mask":
        check(what, mask_BT.shape, advantages_BT=advantages_BT)
        weights_BT = ~((advantages_BT < 0) & (-row_mean(log_w_BT, mask_BT) > high))
    elif kind == "age_discount":
        check(what, mask_BT.shape[:1], ages_B=ages_B)
        weights_BT = torch.where(ages_B <= high, low ** ages_B.double(), 0.0)[:, None]
    else:
        raise no_branch("correction", kind, "correction_weights")
    return masked(weights_BT.to(log_w_BT.dtype), mask_BT)


KLS = {  # kind: its gradient with respect to logp, d = logp - ref; at most 20, with its direction however far pi is from ref
    "k1": "1: no pull to ref as a loss; use it in the reward",
    "k2": "d: that of KL(pi || ref), safe far away",
    "k3": "1 - exp(-d): that of KL(ref || pi); grows exponentially below ref, so that it sits at its bound from d = -3 on",
    "k3_straight_through": "d, with the value of k3: safe far away",
    "is_k3": "ratio d: right on replayed samples (DeepSeek-V3.2; a token's ratio ignores the prefix)",
}


def kl(kind, logprobs, reference, *, ratio=None):
    """Per-token KL(pi || ref) estimates on samples of pi (joschu.net/blog/kl-approx; 2506.09477), of is_k3 on replayed ones with
    ratio = exp(logp - behaviour), which others ignore; gradients by KLS."""
    one_of("KL kind", kind, KLS)
    check(f"KL kind {kind!r}", logprobs.shape, reference=reference)
    logprobs = at_least_float32(logprobs)
    d = clamp_log_ratio(logprobs.detach() - at_least_float32(reference.detach()))
    k3 = torch.expm1(-d) + d
    if kind == "is_k3":
        check("KL kind 'is_k3'", logprobs.shape, ratio=ratio)
        value, slope = ratio.detach() * k3, ratio.detach() * d
    else:
        value, slope = {"k1": (d, torch.ones_like(d)), "k2": (d.square() / 2, d), "k3": (k3, -torch.expm1(-d)),
                        "k3_straight_through": (k3, d)}[kind]
    return value + slope.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT) * (logprobs - logprobs.detach())


@dataclass(frozen=True)
class Objective:
    """What is optimised. `loss_options` are those of the loss, `stale_options` take their place on data of an older policy."""
    advantage: str
    loss: str
    aggregation: str
    note: str = ""
    loss_options: dict = field(default_factory=dict)
    stale_options: dict = field(default_factory=dict)
    whiten: bool | None = None  # None: as the advantage does by default
    kl_in: str | None = None  # "reward" or "loss": where a KL to the reference goes; None: nowhere
    kl_kind: str | None = None
    replay_kl_kind: str = "is_k3"  # in the loss of data of an older policy
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    correction: str | None = None
    correction_low: float | None = None
    correction_high: float | None = None
    asymre_shift: float = -0.1
    advantage_clip: float | None = None
    value_clip: float | None = 0.2
    gamma: float = 1.0
    lam: float = 1.0
    cut_off: str = "terminal"  # or "bootstrap": the critic's value takes the place of what an episode that was cut off would earn
    overlong: str = "train"  # or "mask": left out of the updates


# ALGO LOGIC: what `--algo NAME` sets; every part can be overridden alone. `kl_in` says where a KL goes once its
# coefficient, 0 by default, is raised; on replayed rows a KL in the loss should be is_k3 whatever `kl_kind` says.
ALGORITHMS = {
    "reinforce++": Objective("reinforce++", "ppo_clip", "token_mean", "2501.03262: whitened returns", kl_in="reward", kl_kind="k1"),
    "reinforce++_baseline": Objective("reinforce++_baseline", "ppo_clip", "token_mean", "2501.03262: group mean, then whitened",
                                      kl_in="loss", kl_kind="k2"),
    "grpo": Objective("grpo", "ppo_clip", "seq_mean_token_mean", "2402.03300: group mean and std", kl_in="loss", kl_kind="k3"),
    "dapo": Objective("grpo", "ppo_clip", "token_mean", "2503.14476: clip-higher, token mean", {"eps_high": 0.28}),
    # a stale token with A < 0 and a large ratio would dominate the step
    "ppo": Objective("gae", "ppo_clip", "token_mean", "1707.06347: GAE with a critic", stale_options={"dual_clip": 3.0},
                     whiten=True, kl_in="reward", kl_kind="k1"),
    "dr_grpo": Objective("dr_grpo", "ppo_clip", "constant", "2503.20783: no std, constant denominator"),
    "rloo": Objective("rloo", "ppo_clip", "seq_mean_token_sum", "2402.14740: leave-one-out, clipped", kl_in="reward", kl_kind="k1"),
    "reinforce": Objective("reinforce", "reinforce", "seq_mean_token_sum", "-A logp with a constant baseline: fresh data only"),
    "is_reinforce": Objective("dr_grpo", "is_reinforce", "seq_mean_token_sum", "truncated weight", {"level": "sequence"}),
    "asymre": Objective("asymre", "asymre", "seq_mean_token_sum", "2506.20520, 2604.08706: baseline below the mean, no ratio"),
    "decoupled_ppo": Objective("grpo", "decoupled_ppo", "token_mean", "2110.00641, 2505.24298: clip around the proximal policy"),
    "cispo": Objective("grpo", "cispo", "token_mean", "2506.13585: weight at most 5", {"eps_low": 1.0, "eps_high": 4.0}),
    "gspo": Objective("grpo", "gspo", "seq_mean_token_mean", "2507.18071: sequence ratio"),
    "topr": Objective("dr_grpo", "topr", "seq_mean_token_sum", "2503.14286: only negatives are weighted"),
    "m2po": Objective("grpo", "m2po", "token_mean", "2510.01161: second-moment budget"),
    "one_side": Objective("grpo", "one_side", "token_mean", "2509.24203: REC-OneSide-NoIS"),
    "tba": Objective("dr_grpo", "tba", "seq_mean_token_sum", "2503.18929: trajectory balance, needs a reference policy"),
    "sft_positive": Objective("reinforce", "sft_positive", "token_mean", "2304.06767: imitation of successes"),
}


def objective_of(args) -> Objective:
    """The bundle of --algo, with what the flags replace of it."""
    bundle, given = ALGORITHMS[args.algo], args.loss_options
    loss, advantage = args.loss or bundle.loss, args.advantage or bundle.advantage
    options = loss_options(loss)
    for name, value in (*bundle.loss_options.items(), *given.items()):
        if name in options and value is not None:
            options[name] = value
    parts = {each.name for each in fields(Objective)} - {"aggregation", "kl_in", "kl_kind"}
    return replace(
        bundle, loss=loss, advantage=advantage, aggregation=given.get("aggregation") or bundle.aggregation, loss_options=options,
        stale_options={name: value for name, value in bundle.stale_options.items() if given.get(name) is None},
        whiten=bundle.whiten if advantage == bundle.advantage else None,
        kl_in=(given.get("kl_in") or bundle.kl_in or "loss") if args.kl_coef else None,
        kl_kind=given.get("kl_kind") or bundle.kl_kind or "k3", kl_coef=args.kl_coef, entropy_coef=args.entropy_coef,
        **{name: value for name, value in given.items() if name in parts})


def zero_advantage_is_silent(objective) -> bool:
    """Whether a row of zero advantages has zero gradient, so that it need not be computed."""
    return (objective.kl_in != "loss" and not objective.entropy_coef and LOSSES[objective.loss].silent_at_zero
            and not ADVANTAGES[objective.advantage].needs_values)


def clip_range(objective) -> tuple[float, float] | None:
    """(low, high) of the ratio to the sampler that the loss leaves as it is; None where it has no such range of its own."""
    if LOSSES[objective.loss].clips is None:
        return None
    return 1 - objective.loss_options["eps_low"], 1 + objective.loss_options["eps_high"]
