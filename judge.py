"""What an episode is worth: log-probs and values of its tokens, advantages at collection, TD errors, soundness."""
import math
from types import SimpleNamespace

import numpy as np
import torch

from losses import ADVANTAGES, compute_advantages, gae, kl
from models import backbone, collate, knows_trees, micro_batches, pixel_inputs, token_logprobs, tree_of
from runtime import ranks
from runtime.watch import require_finite


def padded(rows) -> torch.Tensor:
    """A list of (T,) arrays as one (B, T) tensor, zeros on the right; (0, 0) of none."""
    return collate([{"row": row} for row in rows], 0)["row"] if len(rows) else torch.zeros(0, 0)


def mask_of(episodes) -> torch.Tensor:
    return padded([episode.action_mask for episode in episodes]).bool()


def pixels_of(learner, episodes) -> dict[str, torch.Tensor]:
    return pixel_inputs(learner.image_processor, [episode.images for episode in episodes], learner.device)


def batches_of(learner, episodes) -> list[list[int]]:
    """Rows of one forward pass each; those of one prompt together where it is read once."""
    args, prompts = learner.args, None
    if knows_trees(backbone(learner.policy)):
        prompts = [tuple(episode.tokens[:episode.action_mask.argmax()].tolist()) for episode in episodes]
    return micro_batches([len(episode.tokens) for episode in episodes], args.micro_batch_tokens, prompts)


def tokens_read(learner, episodes) -> int:
    """Tokens of one forward pass; what episodes begin with alike counts once where it is read once."""
    if knows_trees(backbone(learner.policy)):
        return len(tree_of([episode.tokens.tolist() for episode in episodes])[1])
    return sum(len(episode.tokens) for episode in episodes)


@torch.no_grad()
def per_token(function, episodes, learner, kind: str = "values") -> torch.Tensor:
    """function(tokens_BT, mask_BT, pixels) -> (B, T) of all episodes, by micro-batches, without gradient, on the CPU. `kind` is
    what its cost is booked as, one of ledger.SCORED."""
    rows = [None] * len(episodes)
    passes = batches_of(learner, episodes)
    idle = ranks.idle_passes(len(passes))
    for micro in passes:
        learner.scored[kind] += tokens_read(learner, [episodes[row] for row in micro])
        tokens_BT = padded([episodes[row].tokens.astype(np.int64) for row in micro]).to(learner.device)
        mask_BT = padded([episodes[row].action_mask for row in micro]).to(learner.device)
        pixels = pixels_of(learner, [episodes[row] for row in micro])
        for row, values_T in zip(micro, function(tokens_BT, mask_BT, pixels).cpu()):
            rows[row] = values_T[:len(episodes[row].tokens)]
    for _ in range(idle):
        function(*idle_row(learner))
    return padded(rows)


def idle_row(learner) -> tuple:
    """(tokens, mask, pixels) of a row for a pass that a rank takes part in for the others."""
    return (torch.zeros(1, 2, dtype=torch.long, device=learner.device),
            torch.tensor([[False, True]], device=learner.device), {})


def score(model, episodes, learner, kind: str = "proximal") -> torch.Tensor:
    """(B, T) log-probs of the episodes' action tokens under `model` now."""
    temperature = learner.args.temperature
    return per_token(lambda tokens_BT, mask_BT, pixels: ranks.forward(token_logprobs, model, tokens_BT, mask_BT, temperature,
                                                                    pixels=pixels)[0], episodes, learner, kind)


def token_log_ratios(learner, episodes) -> np.ndarray:
    """(B, T) log current/behaviour of the sampled tokens, 0 elsewhere, float64."""
    behavior_BT = padded([episode.behavior_logprobs for episode in episodes])
    now_BT = score(learner.policy, episodes, learner, "probe")
    require_finite("log-probs of the policy", now_BT, episodes, learner.policy)
    return (now_BT.double() - behavior_BT.double()).numpy()


def reference_score(learner, episodes) -> torch.Tensor:
    """(B, T) log-probs under the policy of the start: a frozen copy, or under LoRA the base without its adapters."""
    if learner.reference is None:
        with learner.policy.disable_adapter():
            return score(learner.policy, episodes, learner, "reference")
    return score(learner.reference, episodes, learner, "reference")


def token_rewards(episodes) -> torch.Tensor:
    """(B, T): each turn's reward on its last action token."""
    rewards_BT = torch.zeros(len(episodes), max((len(episode.tokens) for episode in episodes), default=0))
    for row, episode in enumerate(episodes):
        rewards_BT[row, episode.turn_ends - 1] = torch.from_numpy(episode.turn_rewards)
    return rewards_BT


def with_end_values(learner, rewards_BT, episodes) -> torch.Tensor:
    """Rewards; with --loss-options cut_off bootstrap an episode that was cut off also earns, with its last token, what the critic
    expects after it, gamma V (Pardo et al., 1712.00378). Without, its end is an end like any other: right where the policy can see
    how many turns are left."""
    objective = learner.objective
    if objective.cut_off == "terminal":
        return rewards_BT
    rows = [row for row, episode in enumerate(episodes) if episode.info["truncated"] and len(episode.turn_ends)]
    one_longer = []
    for row in rows:
        tokens_T = np.append(episodes[row].tokens, 0)  # a value is that of the tokens before its place
        last_T = np.arange(len(tokens_T)) == len(tokens_T) - 1
        one_longer.append(SimpleNamespace(tokens=tokens_T, action_mask=last_T, images=episodes[row].images))
    values_BT = per_token(learner.critic, one_longer, learner)
    for row, values_T in zip(rows, values_BT):
        episode = episodes[row]
        rewards_BT[row, episode.turn_ends[-1] - 1] += objective.gamma * values_T[len(episode.tokens)]
    return rewards_BT


def reward_kl(learner, episodes) -> torch.Tensor | None:
    """(B, T) coefficient times KL to the reference where it belongs into the reward, from the behaviour log-probs."""
    objective = learner.objective
    if objective.kl_in != "reward":
        return None
    behavior_BT = padded([episode.behavior_logprobs for episode in episodes])
    return objective.kl_coef * kl(objective.kl_kind, behavior_BT, reference_score(learner, episodes))


def values_and_rewards(learner, episodes) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, T) critic values now, and rewards less the reward KL."""
    values_BT = per_token(learner.critic, episodes, learner)
    require_finite("values of the critic", values_BT, episodes, learner.critic)
    kl_BT = reward_kl(learner, episodes)
    rewards_BT = with_end_values(learner, token_rewards(episodes), episodes)
    return values_BT, rewards_BT - (0 if kl_BT is None else kl_BT)


def td_errors(learner, episodes) -> np.ndarray:
    """(B,) mean |r + gamma V' - V| over action tokens: the base priority `td_error`."""
    values_BT, rewards_BT = values_and_rewards(learner, episodes)
    mask_BT = mask_of(episodes)
    delta_BT, _ = gae(rewards_BT, values_BT, mask_BT, gamma=learner.objective.gamma, lam=0.0)
    return (delta_BT.abs().sum(1) / mask_BT.sum(1)).numpy().astype(np.float64)


def add_advantages(learner, episodes):
    """Fills `episode.advantages` (and `values`), once, while every group is whole."""
    objective, advantage = learner.objective, ADVANTAGES[learner.objective.advantage]
    mask_BT = mask_of(episodes)
    values_BT = None
    if advantage.needs_values:
        values_BT = per_token(learner.critic, episodes, learner)
        require_finite("values of the critic", values_BT, episodes, learner.critic)
        for episode, values_T in zip(episodes, values_BT.numpy()):
            episode.values = values_T[:len(episode.tokens)].copy()
    rewards = token_rewards(episodes) if advantage.per_token else torch.tensor([episode.reward for episode in episodes])
    if advantage.needs_values:
        rewards = with_end_values(learner, rewards, episodes)
    for row, episode in enumerate(episodes):
        if episode.info["env_error"]:  # not judged: it gets 0 and counts in no mean of its group
            rewards[row] = torch.where(mask_BT[row], math.nan, 0.0) if rewards.ndim == 2 else math.nan
    groups_B = torch.tensor([episode.group_id for episode in episodes])
    # ALGO LOGIC: what a token is worth
    advantages_BT = compute_advantages(
        objective.advantage, rewards, groups_B, mask_BT, values_BT=values_BT, gamma=objective.gamma, lam=objective.lam,
        shift=objective.asymre_shift, token_kl_BT=reward_kl(learner, episodes), whiten=objective.whiten, joined=ranks.joined)
    require_finite(f"advantages ({objective.advantage}) from finite rewards", advantages_BT, episodes)
    for episode, advantages_T in zip(episodes, advantages_BT.numpy()):
        episode.advantages = advantages_T[:len(episode.tokens)].copy()


def shuffle_rewards(episodes, rng: np.random.Generator):
    """Gives each episode the reward of another one, at its last turn: a control, from which nothing can be learned."""
    judged = [episode for episode in episodes if len(episode.turn_rewards) and not episode.info["env_error"]]
    for episode, reward in zip(judged, rng.permutation([episode.reward for episode in judged])):
        episode.reward, episode.turn_rewards = float(reward), np.zeros_like(episode.turn_rewards)
        episode.turn_rewards[-1] = reward
