"""Every bundle of ALGORITHMS learns a small contextual bandit of known optimum, from fresh and from stale batches.

Two problems, answers of two tokens out of three, reward 1 for the one right pair: the uniform policy has 1/9.
"""

import random

import pytest
import torch

import losses
from update import value_loss

torch.set_num_threads(1)
ANSWERS = torch.tensor([[2, 1], [0, 2]])
GROUP, ITERATIONS, MEMORY, BETA = 16, 120, 4, 0.3


def contexts(tokens_BT):
    """What each token follows: 0 for the first, 1 + the first token for the second."""
    return torch.stack([torch.zeros_like(tokens_BT[:, 0]), 1 + tokens_BT[:, 0]], 1)


def token_logprobs(logits_PCV, problems_B, tokens_BT):
    return torch.log_softmax(logits_PCV, 2)[problems_B[:, None], contexts(tokens_BT), tokens_BT]


def collect(bundle, logits_PCV, values_PC, generator):
    """A batch of GROUP answers a problem, with what is stored beside it: behaviour log-probs and frozen advantages."""
    problems_B = torch.arange(2).repeat_interleave(GROUP)
    with torch.no_grad():
        probs_PCV = torch.softmax(logits_PCV, 2)
        first_B1 = torch.multinomial(probs_PCV[problems_B, 0], 1, generator=generator)
        second_B1 = torch.multinomial(probs_PCV[problems_B, 1 + first_B1[:, 0]], 1, generator=generator)
        tokens_BT = torch.cat([first_B1, second_B1], 1)
        rewards_B = (tokens_BT == ANSWERS[problems_B]).all(1).float()
        rewards_BT = torch.stack([torch.zeros_like(rewards_B), rewards_B], 1)
        mask_BT, values_BT = (
            torch.ones_like(tokens_BT, dtype=torch.bool), values_PC[problems_B[:, None], contexts(tokens_BT)])
        rewards = rewards_BT if losses.ADVANTAGES[bundle.advantage].per_token else rewards_B
        advantages_BT = losses.compute_advantages(
            bundle.advantage, rewards, problems_B, mask_BT, values_BT=values_BT, whiten=bundle.whiten,
            baseline=0.1)
        returns_BT = losses.gae(rewards_BT, values_BT, mask_BT)[1]
        return dict(
            problems_B=problems_B, tokens_BT=tokens_BT, rewards_B=rewards_B, mask_BT=mask_BT,
            advantages_BT=advantages_BT, returns_BT=returns_BT,
            behavior_logprobs_BT=token_logprobs(logits_PCV, problems_B, tokens_BT))


def update(bundle, batch, logits_PCV, values_PC, optimizer):
    logprobs_BT = token_logprobs(logits_PCV, batch["problems_B"], batch["tokens_BT"])
    arguments = batch["behavior_logprobs_BT"], batch["advantages_BT"], batch["mask_BT"]
    more = {"proximal_logprobs_BT": logprobs_BT.detach()} if losses.LOSSES[bundle.loss].needs_proximal else {}
    loss, _ = losses.policy_loss(
        bundle.loss, logprobs_BT, *arguments, aggregation=bundle.aggregation, max_length=2,
        rewards_B=batch["rewards_B"], group_ids_B=batch["problems_B"], tba_beta=BETA,
        reference_logprobs_BT=torch.full_like(logprobs_BT, 1 / 3).log(), **bundle.loss_options, **more)
    critic, _ = value_loss(
        values_PC[batch["problems_B"][:, None], contexts(batch["tokens_BT"])], batch["returns_BT"], batch["mask_BT"]
    )
    optimizer.zero_grad()
    (loss + critic).backward()
    optimizer.step()


def success_after_training(name, replay, seed=0):
    bundle = losses.ALGORITHMS[name]
    generator, chooser, memory = torch.Generator().manual_seed(seed), random.Random(seed), []
    logits_PCV, values_PC = torch.zeros(2, 4, 3, requires_grad=True), torch.zeros(2, 4, requires_grad=True)
    optimizer = torch.optim.Adam([logits_PCV, values_PC], lr=0.08)
    for _ in range(ITERATIONS):
        fresh = collect(bundle, logits_PCV, values_PC, generator)
        update(bundle, fresh, logits_PCV, values_PC, optimizer)
        memory = [*memory, fresh][-MEMORY:]
        if replay:
            update(bundle, chooser.choice(memory), logits_PCV, values_PC, optimizer)
    exact_P = token_logprobs(logits_PCV, torch.arange(2), ANSWERS).sum(1).exp()
    return exact_P.detach()


@pytest.mark.parametrize("replay", [False, True], ids=["fresh", "replay"])
@pytest.mark.parametrize("name", losses.ALGORITHMS)
def test_bandit_reaches_the_optimum(name, replay):
    success_P = success_after_training(name, replay)
    if name == "tba":  # its optimum is ref exp(r / beta) / Z, not the best arm
        optimum = torch.tensor(1 / BETA).exp() / (torch.tensor(1 / BETA).exp() + 8)
        assert (success_P - optimum).abs().max() < 0.03
    else:
        assert success_P.min() > 0.95, success_P
