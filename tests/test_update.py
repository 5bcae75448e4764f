"""The optimiser step with a real tiny policy: critic, reference, corrections and the replay switches."""
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from buffer import ReplayBuffer
from conftest import tiny_lake
from engines.hf import HFEngine
from episode import with_signal
from judge import add_advantages, padded, per_token, score, td_errors, token_rewards, values_and_rewards
from losses import gae, objective_of
from models import load_policy
from policies.chat import Chat
from rollout import collect
from runtime.masters import MasterAdamW
from runtime.memories import whole_groups
from settings import Args
from update import gradients, make_learner, replay_advantages, update, value_targets


@pytest.fixture(scope="module")
def episodes(tiny_folder):
    """Four groups of four, sampled by the very weights that `learner_of` starts from."""
    policy, tokenizer = load_policy(tiny_folder)
    played, _ = collect(HFEngine(policy, [tokenizer.eos_token_id], tokenizer.pad_token_id), Chat(tokenizer), tiny_lake,
                        [problem for problem in tiny_lake().problems("train", 4) for _ in range(4)],
                        [row // 4 for row in range(16)], list(range(16)), max_turns=6, max_new_tokens=6, temperature=1.0,
                        format_penalty=0.15, policy_step=0, iteration=1, context_length=1024)
    return played


def learner_of(tiny_folder, episodes, drift=0.02, **flags):
    """A learner whose weights, critic included, have moved away from those that sampled."""
    learner = make_learner(Args(**flags), load_policy(tiny_folder)[0])
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for module in filter(None, (learner.policy, learner.critic)):
            for parameter in module.parameters():
                parameter.add_(drift * torch.randn(parameter.shape, generator=generator))
    add_advantages(learner, episodes)
    return learner


OBJECTIVES = {
    "ppo": dict(algo="ppo"), "ppo vtrace": dict(algo="ppo", replay_advantage="vtrace"),
    "kl in the loss": dict(algo="grpo", kl_coef=0.3), "kl in the reward": dict(algo="reinforce++", kl_coef=0.3),
    "entropy": dict(algo="grpo", entropy_coef=0.1), "decoupled": dict(algo="decoupled_ppo"), "m2po": dict(algo="m2po"),
    "tba": dict(algo="tba", replay_options={"unit": "group"}), "gspo": dict(algo="gspo"), "asymre": dict(algo="asymre"), "sft": dict(algo="sft_positive"),
    "released": dict(algo="grpo", released=["replay_advantage"], loss_options={"advantage_clip": 0.2})}


@pytest.mark.parametrize("flags", OBJECTIVES.values(), ids=OBJECTIVES)
@pytest.mark.parametrize("replayed", [False, True])
def test_micro_batches_change_no_objective(tiny_folder, episodes, flags, replayed):
    learner = learner_of(tiny_folder, episodes, **flags)
    weights = np.linspace(0.3, 1.0, len(episodes)).astype(np.float32)
    found = []
    for size in (4096, 5 * 100):
        for module in filter(None, (learner.policy, learner.critic)):
            module.zero_grad()
        gradients(replace(learner, args=replace(learner.args, micro_batch_tokens=size)), episodes, weights, replayed=replayed)
        found.append(torch.cat([parameter.grad.flatten() for module in filter(None, (learner.policy, learner.critic))
                                for parameter in module.parameters() if parameter.grad is not None]))
    whole, parts = found
    assert (whole - parts).norm() <= 2e-5 * whole.norm()


def test_a_batch_of_an_older_policy_is_trained_as_replayed_ones_are(tiny_folder, episodes):
    """A queue's stale episodes are not replayed, but their KL in the loss needs the ratio too; weights by age see their ages."""
    def gradient(learner, **how):
        learner.policy.zero_grad()
        metrics = gradients(learner, episodes, **how)
        return torch.cat([parameter.grad.flatten() for parameter in learner.policy.parameters()]), metrics
    learner = learner_of(tiny_folder, episodes, algo="grpo", kl_coef=0.3)
    new, stale, replayed = (gradient(learner, **how)[0] for how in ({}, {"ages": [2] * 16}, {"replayed": True}))
    assert torch.equal(stale, replayed) and (new - stale).norm() > 1e-3 * stale.norm()
    learner = learner_of(tiny_folder, episodes, algo="decoupled_ppo", loss_options={"correction": "age_discount", "correction_low": 0.5})
    assert [gradient(learner, ages=[age] * 16)[1]["correction_weight"] for age in (0, 1, 2)] == pytest.approx([1, 0.5, 0.25])


def test_critic_values_do_not_see_the_token_they_judge(tiny_folder, episodes):
    learner = learner_of(tiny_folder, episodes, algo="ppo")
    episode = episodes[0]
    at = int(np.flatnonzero(episode.action_mask)[5])
    changed = replace(episode, tokens=np.concatenate([episode.tokens[:at], [(episode.tokens[at] + 1) % 40], episode.tokens[at + 1:]]))
    values, moved = (per_token(learner.critic, [record], learner)[0] for record in (episode, changed))
    assert torch.equal(values[:at + 1], moved[:at + 1]) and not torch.allclose(values[at + 1:], moved[at + 1:])
    assert not values[~torch.from_numpy(episode.action_mask)].any()


def test_a_new_critic_says_zero_and_its_advantages_are_returns(tiny_folder, episodes):
    learner = learner_of(tiny_folder, episodes, drift=0.0, algo="ppo")
    assert not per_token(learner.critic, episodes, learner).any()
    for episode in episodes:
        assert not episode.values.any()
    _, returns_BT, _ = value_targets(learner, episodes, replayed=False)
    for row, episode in enumerate(episodes):
        actions = np.flatnonzero(episode.action_mask)
        for at in actions:  # gamma = lambda = 1: what is still to come, across observations
            assert returns_BT[row, at].item() == pytest.approx(float(episode.turn_rewards[episode.turn_ends > at].sum()), abs=1e-5)


def test_whole_groups_keep_the_members_without_signal(episodes):
    """Rewards 0, 1/2, 1/2, 1: two members are at the mean. Where the group is an entry, all four are stored: its base is their mean,
    (0.5 + 0 + 0 + 0.5) / 4 over a std of sqrt(1/6), and a step that draws it counts four rows."""
    learner = SimpleNamespace(objective=objective_of(Args(algo="grpo")))
    group = [replace(episode, reward=reward, group_id=3) for episode, reward in zip(episodes, (0.0, 0.5, 0.5, 1.0))]
    silent = [replace(episode, reward=1.0, group_id=4) for episode in episodes[4:6]]
    add_advantages(learner, group + silent)
    assert with_signal(group + silent, whole_groups=False) == [group[0], group[3]]
    assert with_signal(group + silent, whole_groups=True) == group
    for flags, whole in (({}, False), ({"replay_options": {"unit": "group"}}, True), ({"released": ["replay_advantage"]}, True)):
        assert whole_groups(Args(**flags)) == whole
    buffer = ReplayBuffer(2, unit="group", eps=0.01)
    buffer.add(with_signal(group + silent, whole_groups=True), step=0)
    assert np.exp(buffer.log_base[0]) == pytest.approx(0.25 * math.sqrt(6) + 0.01, rel=1e-5)
    assert len(buffer.sample(1, 0).episodes) == 4


def test_rewards_that_differ_by_rounding_take_no_step(tiny_folder, episodes):
    """Ten turns of -0.1 but one of 0.9: 1.1e-16 or 1.4e-16, by their order. It was a step on momentum alone."""
    learner = learner_of(tiny_folder, episodes, algo="grpo")
    update(learner, episodes)  # so that there is momentum
    before = [parameter.clone() for parameter in learner.policy.parameters()]
    equal = [replace(episode, reward=sum([-0.1] * 9 + [0.9] if row % 2 else [0.9] + [-0.1] * 9)) for row, episode in enumerate(episodes)]
    assert len({episode.reward for episode in equal}) == 2
    for algo in ("grpo", "reinforce++_baseline", "reinforce"):
        other = replace(learner, objective=objective_of(Args(algo=algo)))
        add_advantages(other, equal)
        assert not with_signal(equal, whole_groups=False)
        assert update(other, equal)["steps"] == 0
    assert all(torch.equal(old, new) for old, new in zip(before, learner.policy.parameters()))


def test_a_cut_off_episode_ends_there_or_earns_what_the_critic_expects_after_it(tiny_folder, episodes):
    cut = next(episode for episode in episodes if not episode.info["success"])
    ended = replace(cut, info=cut.info | {"truncated": False})
    cut = replace(cut, info=cut.info | {"truncated": True})
    learner = learner_of(tiny_folder, episodes, algo="ppo", loss_options={"gamma": 0.9, "lam": 1.0, "cut_off": "bootstrap"})
    tokens_1T = torch.from_numpy(np.append(cut.tokens, 0).astype(np.int64))[None]
    after = learner.critic(tokens_1T, torch.arange(tokens_1T.shape[1])[None] == len(cut.tokens), {})[0, -1].item()
    terminal = replace(learner, objective=replace(learner.objective, cut_off="terminal"))
    assert abs(after) > 1e-3
    for kind, rewards in (("bootstrap", values_and_rewards(learner, [cut, ended])[1]),
                          ("terminal", values_and_rewards(terminal, [cut, ended])[1])):
        more = 0.9 * after if kind == "bootstrap" else 0.0
        assert (rewards[0] - rewards[1]).sum().item() == pytest.approx(more, abs=1e-5)
        assert rewards[0, cut.turn_ends[-1] - 1].item() == pytest.approx(float(cut.turn_rewards[-1]) + more, abs=1e-5)
    actions = np.flatnonzero(cut.action_mask)
    gained = 0.9 ** np.arange(len(actions), 0, -1) * after  # gamma for each action token until the end
    returns_BT = value_targets(learner, [cut, ended], replayed=True)[1]
    assert (returns_BT[0] - returns_BT[1])[actions].tolist() == pytest.approx(gained.tolist(), abs=1e-5)


def test_the_first_updates_may_train_the_critic_alone(tiny_folder, episodes):
    learner = learner_of(tiny_folder, episodes, algo="ppo", critic_warmup=2)
    before = [parameter.clone() for parameter in learner.policy.parameters()]
    seen = []
    for _ in range(3):
        critic = [parameter.clone() for parameter in learner.critic.parameters()]
        steps = update(learner, episodes)["steps"]
        moved = any(not torch.equal(old, new) for old, new in zip(before, learner.policy.parameters()))
        learned = any(not torch.equal(old, new) for old, new in zip(critic, learner.critic.parameters()))
        seen.append((steps, moved, learned))
    assert seen == [(0, False, True), (0, False, True), (1, True, True)]


def test_turn_rewards_sit_on_the_last_action_token(episodes):
    rewards_BT = token_rewards(episodes)
    for row, episode in enumerate(episodes):
        found = rewards_BT[row].nonzero().flatten().tolist()
        assert found == [end - 1 for end, reward in zip(episode.turn_ends.tolist(), episode.turn_rewards.tolist()) if reward]
        assert all(episode.action_mask[place] for place in found)
        assert rewards_BT[row].sum().item() == pytest.approx(episode.reward, abs=1e-5)


def test_td_errors_by_hand(tiny_folder, episodes):
    learner = learner_of(tiny_folder, episodes, algo="ppo", loss_options={"gamma": 0.9})
    values_BT = per_token(learner.critic, episodes, learner)
    for row, found in enumerate(td_errors(learner, episodes)):
        actions = np.flatnonzero(episodes[row].action_mask)
        rewards = token_rewards(episodes)[row]
        errors = [abs(rewards[at] + 0.9 * (values_BT[row, after] if after is not None else 0.0) - values_BT[row, at]).item()
                  for at, after in zip(actions, [*actions[1:], None])]
        assert found == pytest.approx(np.mean(errors), abs=1e-5)


def test_ppo_trains_policy_and_critic_together(tiny_folder, episodes):
    learner = learner_of(tiny_folder, episodes, algo="ppo")
    before = [parameter.clone() for parameter in learner.critic.parameters()]
    metrics = update(learner, episodes)
    assert metrics["steps"] == 1 and metrics["value_loss"] > 0 and metrics["critic_grad_norm"] > 0
    assert any(not torch.equal(old, new) for old, new in zip(before, learner.critic.parameters()))
    history = [update(learner, episodes, replayed=True) for _ in range(25)]
    assert history[-1]["explained_variance"] > 0 > history[0]["explained_variance"]
    assert history[-1]["value_loss"] < history[0]["value_loss"]


def test_replay_recomputes_values_but_keeps_stored_advantages(tiny_folder, episodes):
    learner = learner_of(tiny_folder, episodes, algo="ppo")
    mask_BT = padded([episode.action_mask for episode in episodes])
    stored_BT = padded([episode.advantages for episode in episodes])
    for _ in range(3):
        update(learner, episodes, replayed=True)
    old_values_BT, _, vtrace_BT = value_targets(learner, episodes, replayed=True)
    assert torch.allclose(old_values_BT, per_token(learner.critic, episodes, learner))
    assert not torch.allclose(old_values_BT, padded([episode.values for episode in episodes]), atol=1e-4)
    assert torch.equal(replay_advantages(learner, episodes, vtrace_BT), stored_BT)
    other = replay_advantages(replace(learner, args=replace(learner.args, replay_advantage="vtrace")), episodes, vtrace_BT)
    assert other[mask_BT].mean().item() == pytest.approx(0, abs=1e-5) and not torch.allclose(other, stored_BT, atol=1e-3)


def test_released_renormalisation_silences_a_lone_member_and_the_stored_advantage_does_not(tiny_folder, episodes):
    learner = learner_of(tiny_folder, episodes, algo="grpo")
    mixed = [group for group in range(4) if len({e.reward for e in episodes if e.group_id == group}) > 1]
    lone = [next(e for e in episodes if e.group_id == group and e.advantages.any()) for group in mixed]
    assert len(lone) > 1
    released = replace(learner, args=replace(learner.args, released=["replay_advantage"]))
    assert not replay_advantages(released, lone, None).any()
    assert update(released, lone, replayed=True)["without_signal"] == 1
    assert update(learner, lone, replayed=True)["grad_norm"] > 0


def test_the_reference_is_the_start_and_its_kl_starts_at_zero(tiny_folder, episodes):
    learner = learner_of(tiny_folder, episodes, drift=0.0, algo="grpo", kl_coef=0.5)
    metrics = gradients(learner, episodes)
    assert metrics["kl_reference"] == pytest.approx(0.0, abs=1e-6)
    learner.policy.zero_grad()
    moved = learner_of(tiny_folder, episodes, drift=0.05, algo="grpo", kl_coef=0.5)
    assert gradients(moved, episodes)["kl_reference"] > 1e-3
    assert torch.allclose(score(moved.reference, episodes, moved), score(learner.policy, episodes, learner), atol=1e-6)
    assert not any(parameter.requires_grad for parameter in moved.reference.parameters())


def test_reward_kl_lowers_the_return_by_its_sum(tiny_folder, episodes):
    plain = learner_of(tiny_folder, episodes, algo="reinforce++")
    mask_BT = padded([episode.action_mask for episode in episodes])
    without = padded([episode.advantages for episode in episodes])
    learner_of(tiny_folder, episodes, drift=0.0, algo="reinforce++", kl_coef=1.0)  # behaviour = reference: no KL
    assert torch.allclose(padded([episode.advantages for episode in episodes]), without, atol=1e-4)
    moved = replace(make_learner(Args(algo="reinforce++", kl_coef=1.0), load_policy(tiny_folder)[0]))
    with torch.no_grad():
        moved.reference.lm_head.weight.mul_(1.3)
    add_advantages(moved, episodes)
    kl_BT = padded([e.behavior_logprobs for e in episodes]) - score(moved.reference, episodes, moved)
    to_go_BT, _ = gae(token_rewards(episodes) - kl_BT, torch.zeros(mask_BT.shape), mask_BT)
    expected = (to_go_BT - to_go_BT[mask_BT].mean()) / to_go_BT[mask_BT].std(correction=0)
    found = padded([episode.advantages for episode in episodes])
    assert torch.allclose(found[mask_BT], expected[mask_BT], atol=1e-4) and plain.reference is None


def test_importance_weights_scale_losses_and_leave_ratios_alone(tiny_folder, episodes):
    learner = learner_of(tiny_folder, episodes, algo="grpo")
    found = {}
    for scale in (1.0, 0.25):
        learner.policy.zero_grad()
        metrics = gradients(learner, episodes, np.full(len(episodes), scale, np.float32), replayed=True)
        found[scale] = torch.cat([parameter.grad.flatten() for parameter in learner.policy.parameters()]), metrics
    assert (found[0.25][0] - 0.25 * found[1.0][0]).norm() < 1e-5 * found[1.0][0].norm()
    assert found[0.25][1]["ratio_max"] == found[1.0][1]["ratio_max"] != 1.0


def test_decoupled_ratio_is_to_the_start_of_the_update(tiny_folder, episodes):
    """With drifted weights current/behaviour is far from 1, current/proximal is not: nothing is clipped."""
    decoupled = gradients(learner_of(tiny_folder, episodes, drift=0.1, algo="decoupled_ppo"), episodes, replayed=True)
    clipped = gradients(learner_of(tiny_folder, episodes, drift=0.1, algo="dapo"), episodes, replayed=True)
    assert decoupled["clip_fraction"] == 0.0 < clipped["clip_fraction"]
    assert decoupled["correction_weight"] != 1.0 and clipped["correction_weight"] == 1.0


def test_overrides_replace_single_parts_of_a_bundle():
    objective = objective_of(Args(algo="ppo", advantage="grpo",
                                  loss_options={"aggregation": "seq_mean_token_sum", "eps_high": 0.3}))
    assert (objective.advantage, objective.loss, objective.aggregation) == ("grpo", "ppo_clip", "seq_mean_token_sum")
    assert objective.whiten is None and objective.loss_options["eps_high"] == 0.3
    assert objective_of(Args(algo="grpo")).kl_in is None and objective_of(Args(algo="grpo", kl_coef=0.1)).kl_in == "loss"


def test_lora_trains_adapters_only_and_its_reference_is_the_frozen_base(tiny_folder, episodes):
    learner = learner_of(tiny_folder, episodes, drift=0.0, algo="grpo", lora_rank=4, kl_coef=0.1, lr=1e-2, warmup_steps=0)
    base = make_learner(Args(algo="grpo"), load_policy(tiny_folder)[0])
    start = score(base.policy, episodes, base)
    assert learner.reference is None and torch.allclose(score(learner.policy, episodes, learner), start, atol=1e-5)
    before = {name: value.clone() for name, value in learner.policy.named_parameters()}
    for _ in range(3):
        metrics = update(learner, episodes)
    changed = {name for name, value in learner.policy.named_parameters() if not torch.equal(value, before[name])}
    assert changed and all("lora_" in name for name in changed)
    assert metrics["kl_reference"] > 1e-5
    from judge import reference_score
    assert torch.allclose(reference_score(learner, episodes), start, atol=1e-5)
    assert not torch.allclose(score(learner.policy, episodes, learner), start, atol=1e-3)


def test_a_step_without_signal_gives_the_frozen_base_no_gradient(tiny_folder, episodes):
    """Nobody would clear it: zero_grad is the optimiser's, which has the adapters only."""
    learner = learner_of(tiny_folder, episodes, algo="grpo", lora_rank=4, released=["step_without_signal"])
    silent = [replace(episode, advantages=np.zeros_like(episode.advantages)) for episode in episodes]
    assert update(learner, silent)["steps"] == 1
    assert all(parameter.grad is None for parameter in learner.policy.parameters())


def test_the_critic_under_lora_has_adapters_of_its_own(tiny_folder, episodes):
    learner = learner_of(tiny_folder, episodes, drift=0.0, algo="ppo", lora_rank=4)
    trained = {name for name, value in learner.critic.named_parameters() if value.requires_grad}
    assert trained and all("lora_" in name or name.startswith("head.") for name in trained)
    policy_before = score(learner.policy, episodes, learner)
    learner.optimizer.step = lambda: None
    for _ in range(3):
        update(learner, episodes)
    assert torch.equal(score(learner.policy, episodes, learner), policy_before)
    assert per_token(learner.critic, episodes, learner).any()


def test_imitation_counts_a_success_with_a_format_slip(tiny_folder, episodes):
    success = replace(episodes[0], score=1.0, reward=0.85, info=episodes[0].info | {"success": True})
    learner = learner_of(tiny_folder, episodes, algo="sft_positive")
    assert update(learner, [success])["grad_norm"] > 0


# ------------------------------------------------------------------------------------------- float32 masters of bfloat16


def stepped(kind, parameters, steps=50, lr=1e-6):
    """The optimiser after steps on gradients of 1: each is lr long."""
    optimizer = kind(parameters, lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    for _ in range(steps):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def test_steps_below_what_bfloat16_tells_apart_add_up():
    """0.02 is 0.02001953125 in bfloat16, whose neighbours there are 2**-13 = 1.2e-4 away."""
    plain, kept = (torch.nn.Parameter(torch.full((3,), 0.02, dtype=torch.bfloat16)) for _ in range(2))
    exact = torch.nn.Parameter(plain.detach().float())
    stepped(torch.optim.AdamW, [plain])
    stepped(torch.optim.AdamW, [exact])
    optimizer = stepped(MasterAdamW, [kept])
    assert plain.tolist() == [0.02001953125] * 3
    (_, master), = optimizer.rounded()
    assert torch.equal(master, exact) and abs(float(exact.detach()[0]) - (0.02001953125 - 50e-6)) < 1e-7
    assert kept.grad is None and master.grad is None
    optimizer = stepped(MasterAdamW, [kept], lr=2e-6)  # a further 1e-4 from there: a new optimiser begins at the rounded weights
    assert kept.tolist() == [0.02001953125 - 2**-13] * 3 and torch.equal(kept, optimizer.rounded()[0][1].bfloat16())


def test_float32_parameters_are_their_own_masters_also_beside_others():
    whole, other, short = (torch.nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in
                           (torch.float32, torch.float32, torch.bfloat16))
    optimizer = stepped(MasterAdamW, [whole, short], lr=1e-3)
    stepped(torch.optim.AdamW, [other], lr=1e-3)
    assert torch.equal(whole, other) and optimizer.param_groups[0]["params"][0] is whole
    assert [parameter is short for parameter, _ in optimizer.rounded()] == [True]


def test_a_saved_master_goes_on_and_a_missing_one_begins_as_its_parameter():
    first, second, third = (torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16)) for _ in range(3))
    before = stepped(MasterAdamW, [first])
    entry = before.state_dict()["state"][0]
    after, older = MasterAdamW([second], lr=1e-6), MasterAdamW([third], lr=1e-6)
    for parameter in (second, third):
        parameter.data.copy_(first)
    groups = before.state_dict()["param_groups"]
    after.load_state_dict({"state": {0: {key: value.clone() for key, value in entry.items()}}, "param_groups": groups})
    older.load_state_dict({"state": {0: {key: value.clone() for key, value in entry.items() if key != "master"}},
                           "param_groups": groups})
    assert torch.equal(after.rounded()[0][1], before.rounded()[0][1]) and not torch.equal(before.rounded()[0][1], first.float())
    assert torch.equal(older.rounded()[0][1], third.float())
    for optimizer, parameter in ((before, first), (after, second)):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert torch.equal(after.rounded()[0][1], before.rounded()[0][1])


@pytest.mark.parametrize("flags", [dict(algo="ppo"), dict(algo="grpo")], ids=lambda flags: flags["algo"])
def test_a_bfloat16_policy_follows_its_masters(tiny_folder, episodes, flags):
    policy = load_policy(tiny_folder, torch.bfloat16)[0]
    learner = make_learner(Args(dtype="bfloat16", lr=1e-6, critic_lr=1e-6, warmup_steps=0, **flags), policy)
    add_advantages(learner, episodes)
    start = [master.detach().clone() for _, master in learner.optimizer.rounded()]
    for _ in range(2):
        assert update(learner, episodes)["steps"] == 1
    for optimizer in learner.optimizers().values():
        assert all(torch.equal(parameter, master.bfloat16()) for parameter, master in optimizer.rounded())
    moved = torch.cat([(master - before).abs().flatten() for before, (_, master) in zip(start, learner.optimizer.rounded())])
    assert 1e-6 < moved.max() < 2.2e-6 and (moved > 0).double().mean() > 0.5
