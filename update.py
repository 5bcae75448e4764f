"""One optimiser step on a batch of episodes, fresh or replayed: micro-batches, one denominator, critic and reference."""
import copy
import math
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import torch
from peft import LoraConfig, get_peft_model

from judge import batches_of, idle_row, mask_of, padded, pixels_of, reference_score, score, tokens_read, values_and_rewards
from losses import (ADVANTAGES, LOSSES, Objective, aggregate, compute_advantages, gae, kl, m2po_bound, objective_of, policy_loss,
                    step_denominator, tba_log_z, vtrace, whitened, zero_advantage_is_silent)
from models import Critic, recompute_layers, token_logprobs
from runtime import ranks
from runtime.masters import MasterAdamW
from runtime.metrics import diagnostics, explained_variance
from runtime.tensors import at_least_float32, check, check_mask, floats, masked, no_branch
from runtime.watch import bad_rows, where_not_finite


@dataclass
class Learner:
    """What an update changes and reads. `critic` and `reference` are None where the objective has
    none; under LoRA the reference is the policy without its adapters. `image_processor`: for images only."""
    args: object
    objective: Objective
    accelerator: object
    policy: torch.nn.Module
    optimizer: MasterAdamW
    critic: torch.nn.Module | None = None
    critic_optimizer: MasterAdamW | None = None
    reference: torch.nn.Module | None = None
    scored: Counter = field(default_factory=Counter)  # tokens of `per_token` by kind, for the ledger
    image_processor: object | None = None
    place: int = 0  # updates of the plan that lie behind, whether or not they took a step; learning rate and beta follow it

    @property
    def device(self):
        return self.accelerator.device

    def optimizers(self) -> dict:
        return {"policy": self.optimizer} | ({"critic": self.critic_optimizer} if self.critic is not None else {})


# ------------------------------------------------------------------------------------------------------ the step


def value_targets(learner: Learner, episodes, replayed: bool):
    """(values when the update began, value targets, V-trace advantages), (B, T) each; the last is None on fresh episodes.

    Fresh episodes keep the values of their collection; on replay they are recomputed.
    """
    objective = learner.objective
    values_BT, rewards_BT = values_and_rewards(learner, episodes)
    mask_BT = mask_of(episodes)
    if not replayed:
        values_BT = padded([episode.values for episode in episodes])
        return values_BT, gae(rewards_BT, values_BT, mask_BT, gamma=objective.gamma, lam=objective.lam)[1], None
    log_ratio_BT = torch.zeros_like(values_BT)
    if learner.args.replay_advantage == "vtrace":
        log_ratio_BT = score(learner.policy, episodes, learner) - padded([episode.behavior_logprobs for episode in episodes])
    advantages_BT, targets_BT = vtrace(rewards_BT, values_BT, log_ratio_BT, mask_BT, gamma=objective.gamma,
                                       lam=objective.lam)
    return values_BT, targets_BT, advantages_BT


def replay_advantages(learner: Learner, episodes, vtrace_BT) -> torch.Tensor:
    """(B, T) advantages of a replayed batch: the stored ones, unless a named switch asks for something else."""
    how, mask_BT = learner.args.replay_advantage, mask_of(episodes)
    if how == "vtrace":
        return whitened(vtrace_BT, mask_BT, joined=ranks.joined)
    if "replay_advantage" in learner.args.released:  # again inside the drawn batch: a lone member is 0 before the whitening
        rewards_B = torch.tensor([episode.reward for episode in episodes])
        groups_B = torch.tensor([episode.group_id for episode in episodes])
        return compute_advantages("grpo", rewards_B, groups_B, mask_BT, whiten=True, joined=ranks.joined)
    if how != "stored":
        raise ValueError(f"--replay-advantage {how} is allowed, but replay_advantages in update.py has no branch for it: add one")
    return padded([episode.advantages for episode in episodes])


def value_loss(values_BT, returns_BT, mask_BT, *, old_values_BT=None, clip=None, aggregation="token_mean",
               denominator=None, max_length=None, weights_B=None):
    """(max((v - R)^2, (clip(v, old - clip, old + clip) - R)^2) / 2, metrics); old: the values when the update began."""
    check_mask(mask_BT)
    check("value_loss", mask_BT.shape, values_BT=values_BT)
    check("value_loss", mask_BT.shape, returns_BT=returns_BT, finite_under=mask_BT)
    values_BT, returns_BT = masked(at_least_float32(values_BT), mask_BT), masked(returns_BT.detach(), mask_BT)
    loss_BT, metrics = (values_BT - returns_BT).square(), {}
    if clip is not None:
        check("value clipping", mask_BT.shape, old_values_BT=old_values_BT, finite_under=mask_BT)
        old_BT = masked(old_values_BT.detach(), mask_BT)
        clipped_BT = (old_BT + (values_BT - old_BT).clamp(-clip, clip) - returns_BT).square()
        metrics["value_clip_fraction"] = (clipped_BT > loss_BT).sum() / mask_BT.sum().clamp(min=1)
        loss_BT = torch.maximum(loss_BT, clipped_BT)
    loss = aggregate(loss_BT / 2, mask_BT, aggregation, denominator=denominator, max_length=max_length,
                     weights_B=weights_B)
    return loss, floats({"value_loss": loss, **metrics})


def step_inputs(learner: Learner, episodes, weights, ages, proximal_BT, replayed: bool) -> tuple[dict, dict]:
    """What the losses of one optimiser step need: tensors of all rows, (B, T) or (B,), by name; and the loss's options.

    Statistics of the whole batch (denominator, M2PO's bound, TBA's log Z, log-probs at the start) are taken here, once, so
    that micro-batches change nothing.
    """
    objective, loss = learner.objective, LOSSES[learner.objective.loss]
    rows = {"tokens": padded([episode.tokens.astype(np.int64) for episode in episodes]),
            "mask": mask_of(episodes),
            "behavior": padded([episode.behavior_logprobs for episode in episodes]),
            "rewards": torch.tensor([episode.score if loss.needs_score else episode.reward for episode in episodes]),
            "ages": torch.zeros(len(episodes)) if ages is None else torch.as_tensor(ages).float(),
            "weights": torch.ones(len(episodes)) if weights is None else torch.as_tensor(weights)}
    vtrace_BT = None
    if learner.critic is not None:
        rows["old_values"], rows["targets"], vtrace_BT = value_targets(learner, episodes, replayed)
    rows["advantages"] = replay_advantages(learner, episodes, vtrace_BT) if replayed else \
        padded([episode.advantages for episode in episodes])
    if objective.advantage_clip is not None:
        rows["advantages"] = rows["advantages"].clamp(-objective.advantage_clip, objective.advantage_clip)
    options = objective.loss_options | (objective.stale_options if is_old(ages, replayed) else {})
    if objective.kl_in == "loss" or "reference_logprobs_BT" in options:
        rows["reference"] = reference_score(learner, episodes)
    if loss.needs_proximal:
        rows["proximal"] = score(learner.policy, episodes, learner) if proximal_BT is None else proximal_BT
    if "m2_bound" in options or "log_z_B" in options:
        now_BT = score(learner.policy, episodes, learner)
    if "m2_bound" in options:
        options["m2_bound"] = m2po_bound(*map(ranks.stacked, (now_BT, rows["behavior"], rows["advantages"], rows["mask"])),
                                         m2_budget=options["m2_budget"])
    if "log_z_B" in options:
        groups_B = torch.tensor([episode.group_id for episode in episodes])
        rows["log_z"] = tba_log_z(now_BT, rows["reference"], rows["rewards"], groups_B, rows["mask"],
                                  tba_beta=options["tba_beta"])
    return rows, options


def is_old(ages, replayed: bool) -> bool:
    """Whether an older policy sampled some of the episodes: replayed ones, and those of a sampler with old weights."""
    return replayed or bool(np.max([0 if ages is None else ages], initial=0) > 0)


def losses_of(learner: Learner, batch: dict, options: dict, per_step: dict, old: bool):
    """(loss of the policy, loss of the critic or None, log-probs (B, T), sums of metrics over tokens) of a micro-batch."""
    objective = learner.objective
    mask_BT, weights_B, aggregation = batch["mask"], batch["weights"], objective.aggregation
    logprobs_BT, entropy_BT = ranks.forward(token_logprobs, learner.policy, batch["tokens"], mask_BT,
                                            learner.args.temperature, bool(objective.entropy_coef), batch["pixels"])
    tensors = {"reference_logprobs_BT": batch.get("reference"), "log_z_B": batch.get("log_z"), "rewards_B": batch["rewards"]}
    options = options | {name: tensor for name, tensor in tensors.items() if name in options}
    # ALGO LOGIC: the objective of fresh and replayed episodes alike; ratio = current / behaviour (or / proximal)
    loss, part = policy_loss(objective.loss, logprobs_BT, batch["behavior"], batch["advantages"], mask_BT,
                             proximal_logprobs_BT=batch.get("proximal"), weights_B=weights_B, ages_B=batch["ages"],
                             correction=objective.correction, correction_low=objective.correction_low,
                             correction_high=objective.correction_high, aggregation=aggregation, **per_step, **options)
    tokens = int(mask_BT.sum())
    sums = {name: tokens * value for name, value in part.items() if name not in ("loss", "clamped")}
    sums |= {"tokens_trained": tokens, "entropy": entropy_BT.sum().item(),
             "clip_fraction": sums.get("clip_fraction_low", 0.0) + sums.get("clip_fraction_high", 0.0),
             "correction_weight": sums.get("correction_weight", tokens)}
    if objective.kl_in == "loss":  # samples of an older policy need the ratio
        kind = objective.replay_kl_kind if old else objective.kl_kind
        kl_BT = kl(kind, logprobs_BT, batch["reference"], ratio=(logprobs_BT - batch["behavior"]).clamp(-20, 20).exp())
        loss = loss + objective.kl_coef * aggregate(kl_BT, mask_BT, aggregation, weights_B=weights_B, **per_step)
        sums["kl_reference"] = kl_BT.sum().item()
    if objective.entropy_coef:
        loss = loss - objective.entropy_coef * aggregate(entropy_BT, mask_BT, aggregation, weights_B=weights_B, **per_step)
    critic_loss = None
    if learner.critic is not None:
        values_BT = learner.critic(batch["tokens"], mask_BT, batch["pixels"])
        critic_loss, part = value_loss(values_BT, batch["targets"], mask_BT, weights_B=weights_B,
                                       old_values_BT=batch["old_values"], clip=objective.value_clip, aggregation=aggregation,
                                       **per_step)
        sums["value_clip_fraction"] = tokens * part.get("value_clip_fraction", 0.0)
    return loss, critic_loss, logprobs_BT.detach().cpu(), sums


def gradients(learner: Learner, episodes, weights=None, ages=None, proximal_BT=None, replayed=False) -> dict:
    """Adds the gradient of one optimiser step over `episodes` (of all ranks) to policy and critic; returns the step's metrics.

    `weights` (B,) multiply episodes' losses (importance weights of the draw); `ages` (B,) serve the correction age_discount,
    and say whether an older policy sampled;
    `proximal_BT`, for decoupled_ppo, are the log-probs when the batch's first update began, None: now. All micro-batches
    share one denominator. Rows that can add nothing to the gradient count in it but are not computed.
    """
    args, objective = learner.args, learner.objective
    rows, options = step_inputs(learner, episodes, weights, ages, proximal_BT, replayed)
    longest = args.max_turns * args.max_new_tokens
    per_step = {"max_length": longest, "denominator": step_denominator(rows["mask"], objective.aggregation, max_length=longest,
                                                                       total=ranks.total)}
    signal_B = rows["advantages"].ne(0).any(1)
    chosen = signal_B.nonzero().flatten() if zero_advantage_is_silent(objective) else torch.arange(len(episodes))
    order, seen, totals = [], [], dict.fromkeys(("loss", "tokens_trained", "tokens_computed"), 0)
    bad = [text for name, tensor in rows.items() if (text := bad_rows(name, tensor, episodes))]
    passes = batches_of(learner, [episodes[row] for row in chosen])
    idle = ranks.idle_passes(len(passes))
    for micro in passes:
        picked = chosen[micro]
        width = max(len(episodes[row].tokens) for row in picked)
        batch = {name: (tensor[picked, :width] if tensor.ndim == 2 else tensor[picked]).to(learner.device)
                 for name, tensor in rows.items()}
        batch["pixels"] = pixels_of(learner, [episodes[row] for row in picked])
        loss, critic_loss, logprobs_BT, sums = losses_of(learner, batch, options, per_step, is_old(ages, replayed))
        learner.accelerator.backward(loss)
        sums |= {"loss": loss.item(), "tokens_computed": tokens_read(learner, [episodes[row] for row in picked])}
        bad += [text] if (text := bad_rows("log-probs", logprobs_BT, [episodes[row] for row in picked])) else []
        if critic_loss is not None:
            learner.accelerator.backward(critic_loss)
            sums["value_loss"] = critic_loss.item()
        totals = {name: totals.get(name, 0) + value for name, value in sums.items()}
        order += picked.tolist()
        seen += list(logprobs_BT)
    for _ in range(idle):  # the forward and backward passes of a micro-batch, in the same order
        tokens_BT, mask_BT, pixels = idle_row(learner)
        outputs = [ranks.forward(token_logprobs, learner.policy, tokens_BT, mask_BT)[0]]
        outputs += [learner.critic(tokens_BT, mask_BT, pixels)] if learner.critic is not None else []
        for output in outputs:
            (0 * output.sum()).backward()

    totals = ranks.total(totals)
    if totals["tokens_trained"]:
        for optimizer in learner.optimizers().values():
            ranks.sum_gradients(optimizer.trained)
    summed = ("loss", "value_loss", "tokens_trained", "tokens_computed")
    metrics = {name: value if name in summed else value / totals["tokens_trained"] for name, value in totals.items()}
    metrics["log_ratios"] = [None] * len(episodes)  # log current/behaviour of the rows that were computed, (T,) each
    for row, logprobs_T in zip(order, seen):
        episode = episodes[row]
        metrics["log_ratios"][row] = logprobs_T[:len(episode.tokens)].numpy() - episode.behavior_logprobs
    if totals["tokens_trained"]:
        logprobs_BT = padded(seen)
        aligned = (rows[name][order, :logprobs_BT.shape[1]] for name in ("behavior", "advantages", "mask"))
        metrics |= diagnostics(*map(ranks.stacked, (logprobs_BT, *aligned)))
    if learner.critic is not None:
        metrics["explained_variance"] = explained_variance(*(ranks.stacked(rows[name])
                                                             for name in ("old_values", "targets", "mask")))
    return metrics | {"nonzero_advantage_rows": ranks.joined(signal_B).double().mean().item(), "bad": ranks.joined(bad)}


def update(learner: Learner, episodes, weights=None, ages=None, proximal_BT=None, replayed=False) -> dict:
    """One optimiser step on `episodes`, or none where nothing carries signal or something is not finite."""
    args = learner.args

    def clipped(module) -> float:
        """The norm of its gradient before the clipping. A gradient that is not finite stays as it is, so that it can be named."""
        parameters = [parameter for parameter in module.parameters() if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters])
        whole = float(ranks.whole(norm))
        if math.isfinite(whole):
            torch.nn.utils.clip_grads_with_norm_(parameters, args.max_grad_norm, norm)
        return whole

    lr = learning_rate(args, learner.place)
    learner.place += 1
    for group in learner.optimizer.param_groups:
        group["lr"] = lr
    metrics = gradients(learner, episodes, weights, ages, proximal_BT, replayed)
    trained = metrics["tokens_trained"] > 0
    metrics |= {"lr": lr, "without_signal": int(not trained),
                "grad_norm": clipped(learner.policy) if trained else 0.0}
    checked = [metrics["loss"], metrics["grad_norm"]]
    if learner.critic is not None:
        metrics["critic_grad_norm"] = clipped(learner.critic) if trained else 0.0
        checked += [metrics["value_loss"], metrics["critic_grad_norm"]]
    metrics["nonfinite"] = int(bool(metrics["bad"]) or not all(map(math.isfinite, checked)))
    if metrics["nonfinite"]:
        metrics["where"] = where_not_finite(learner, metrics)
    fine = not metrics["nonfinite"] and (trained or "step_without_signal" in args.released)
    warming = args.critic_warmup > 0 and steps_of(learner.critic_optimizer) < args.critic_warmup
    metrics["steps"] = int(fine and not warming)
    if metrics["steps"]:
        if not trained:  # the released code's step on momentum alone
            for parameter in learner.optimizer.trained:
                parameter.grad = torch.zeros_like(parameter)
        learner.optimizer.step()
    if fine and learner.critic is not None:
        learner.critic_optimizer.step()
    for optimizer in learner.optimizers().values():
        optimizer.zero_grad()
    return metrics


def steps_of(optimizer) -> int:
    """Steps that it has taken, also before the run was resumed; of its first parameter, as all take each step."""
    for entry in optimizer.state.values():
        return int(entry["step"])
    return 0


def planned_updates(args) -> tuple[int, int]:
    """Of an iteration: on fresh episodes, and on replayed ones."""
    return args.fresh_update * args.fresh_epochs * args.minibatches, args.replay_updates


def follow_plan(learner: Learner, buffer, iteration: int):
    """Learning rate and beta follow the share of iterations that is done: updates that find nothing to learn change neither."""
    learner.place = (iteration - 1) * sum(planned_updates(learner.args))
    if buffer is not None:
        buffer.progress = (iteration - 1) / max(1, learner.args.iterations - 1)


def learning_rate(args, place: int) -> float:
    """At a place among the planned updates: linear warm-up, then the schedule until the last one."""
    fresh, replayed = planned_updates(args)
    planned = args.iterations * (fresh + replayed * ("lr_steps" not in args.released))
    done = min(1.0, max(0, place - args.warmup_steps) / max(1, planned - args.warmup_steps))
    falls = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}
    if args.lr_schedule not in falls:
        raise no_branch("--lr-schedule", args.lr_schedule, "learning_rate in update.py")
    warm = min(1.0, (place + 1) / max(1, args.warmup_steps))
    return args.lr * (warm * (args.lr_end_fraction + (1 - args.lr_end_fraction) * falls[args.lr_schedule]))


def make_learner(args, policy, image_processor=None) -> Learner:
    """The policy with its optimiser, and critic and reference where the objective needs them."""
    accelerator, objective = ranks.start(), objective_of(args)

    def placed(module):
        module.to(accelerator.device)
        apart = [module.head] if isinstance(module, Critic) else []  # float32 whatever the rest is
        return ranks.shard(module, accelerator.device, apart) if ranks.sharded() else module

    def prepared(module, lr):
        trained = [parameter for parameter in placed(module).parameters() if parameter.requires_grad]
        return module, MasterAdamW(trained, lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)

    reference = None
    needed = objective.kl_in is not None or "reference_logprobs_BT" in objective.loss_options
    if needed and not args.lora_rank:  # under LoRA it is the policy without adapters
        reference = placed(copy.deepcopy(policy).requires_grad_(False))
    if args.lora_rank:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(args.seed)
            policy = get_peft_model(policy, LoraConfig(r=args.lora_rank, lora_alpha=2 * args.lora_rank, lora_dropout=0.0,
                                                       target_modules="all-linear", task_type="CAUSAL_LM")).eval()
    if args.gradient_checkpointing:
        recompute_layers(policy)
    critic = prepared(Critic(policy), args.critic_lr) if ADVANTAGES[objective.advantage].needs_values else (None, None)
    policy, optimizer = prepared(policy, args.lr)
    return Learner(args, objective, accelerator, policy, optimizer, *critic, reference, image_processor=image_processor)
