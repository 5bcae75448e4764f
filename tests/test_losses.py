import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import losses
from losses import ADVANTAGES, AGGREGATIONS, ALGORITHMS, CORRECTIONS, KLS, LOSSES
from runtime import metrics as measures
from runtime.log import clipped_share
from settings import Args
from update import value_loss

torch.set_num_threads(1)
NAN = float("nan")
GROUP_KINDS = ["grpo", "dr_grpo", "rloo", "asymre", "reinforce++_baseline"]


def mask_of(rows):
    return torch.tensor(rows).bool()


def advantages_B(kind, rewards_B, group_ids_B, **options):
    """Advantage per row, one action token each."""
    mask_BT = torch.ones(len(rewards_B), 1, dtype=torch.bool)
    return losses.compute_advantages(kind, torch.tensor(rewards_B), torch.tensor(group_ids_B), mask_BT, **options)[:, 0]


# ----------------------------------------------------------------------------------------------------------- advantages
def test_group_advantages_by_hand():
    rewards, groups = [1.0, 0.0, 0.0, 2.0], [7, 7, 7, 7]  # mean .75, unbiased variance 11/12
    std = math.sqrt(11 / 12)
    expected = {
        "grpo": [0.25 / std, -0.75 / std, -0.75 / std, 1.25 / std],
        "dr_grpo": [0.25, -0.75, -0.75, 1.25],
        "rloo": [1 / 3, -1.0, -1.0, 5 / 3],
        "asymre": [0.35, -0.65, -0.65, 1.35]}
    for kind, values in expected.items():
        assert advantages_B(kind, rewards, groups).tolist() == pytest.approx(values, abs=1e-6), kind
    assert advantages_B("reinforce", rewards, groups, baseline=0.5).tolist() == [0.5, -0.5, -0.5, 1.5]
    assert advantages_B("asymre", rewards, groups, shift=-0.5).tolist() == pytest.approx([0.75, -0.25, -0.25, 1.75])


def test_uneven_groups_not_the_batch_and_not_only_the_first():
    # PipelineRL PR 54, grpo-flat 2, slime PR 1918: g0 [1, 0], g1 [1, 1, 1]
    for kind in ("grpo", "dr_grpo", "rloo"):
        advantages = advantages_B(kind, [1.0, 0.0, 1.0, 1.0, 1.0], [0, 0, 1, 1, 1]).tolist()
        assert advantages[0] > 0 and advantages[1] == -advantages[0] and advantages[2:] == [0.0, 0.0, 0.0], kind
        interleaved = advantages_B(kind, [1.0, 1.0, 0.0, 1.0, 1.0], [5, -2, 5, -2, -2]).tolist()
        assert interleaved == [advantages[0], 0.0, advantages[1], 0.0, 0.0], kind


@pytest.mark.parametrize("reward", [0.1, 0.7, 1 / 3, -0.3, 1e8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_and_singletons_are_exactly_zero(reward, dtype):
    # 0.1 + 0.1 + 0.1 != 0.3 in binary: a std of 1e-17 must not become an advantage
    for kind, size in itertools.product(("grpo", "dr_grpo", "rloo"), (2, 3, 6, 7, 11)):
        rewards_B, groups_B = torch.full((size + 1,), reward, dtype=dtype), torch.tensor([0] * size + [1])
        mask_BT = torch.ones(size + 1, 1, dtype=torch.bool)
        got = losses.compute_advantages(kind, rewards_B, groups_B, mask_BT, std_floor=0.0 if kind == "rloo" else 1e-18)
        assert (got == 0).all(), kind
    assert advantages_B("asymre", [reward] * 4, [0, 0, 0, 1]).tolist() == pytest.approx([0.1] * 4, abs=1e-8)


def test_std_floor_keeps_nearly_equal_rewards_small():
    assert advantages_B("grpo", [1.0, 1.0001], [0, 0], std_floor=0.1).abs().max() < 1e-3


def test_nan_reward_does_not_poison_its_group():
    # trl PR 5773: [1, nan, 0, 1] is finite for three, 0 for the NaN row, and one finite member has 0
    assert torch.equal(
        advantages_B("grpo", [1.0, NAN, 0.0, 1.0], [0] * 4)[[0, 2, 3]], advantages_B("grpo", [1.0, 0.0, 1.0], [0] * 3)
    )
    for kind in ADVANTAGES:
        per_token = ADVANTAGES[kind].per_token
        rewards = torch.tensor([1.0, NAN, 0.0, 1.0])
        rewards = rewards[:, None] if per_token else rewards
        options = {"values_BT": torch.zeros(4, 1)} if ADVANTAGES[kind].needs_values else {}
        advantages = losses.compute_advantages(
            kind, rewards, torch.zeros(4, dtype=torch.long), torch.ones(4, 1, dtype=torch.bool), **options
        )
        assert advantages.isfinite().all() and advantages[1] == 0 and advantages[0] > 0, kind
    for kind in ("grpo", "dr_grpo", "rloo"):
        assert advantages_B(kind, [1.0, NAN, NAN], [0] * 3).tolist() == [0.0] * 3
    assert advantages_B("asymre", [1.0, NAN, NAN], [0] * 3).tolist() == pytest.approx([0.1, 0.0, 0.0])
    assert advantages_B("grpo", [NAN, NAN], [0, 0]).tolist() == [0.0, 0.0]


def group_oracle(kind, rewards, groups, shift=-0.1):
    result = []
    for reward, group in zip(rewards, groups):
        members = [r for r, g in zip(rewards, groups) if g == group and not math.isnan(r)]
        if math.isnan(reward):
            result.append(0.0)
            continue
        mean = sum(members) / len(members)
        equal = max(members) == min(members)
        others = [*members]
        others.remove(reward)
        centred = 0.0 if equal else reward - mean
        result.append(
            {
                "dr_grpo": centred,
                "asymre": centred - shift,
                "grpo": 0.0 if equal else centred / np.std(members, ddof=1),
                "rloo": 0.0 if equal else reward - sum(others) / max(len(others), 1),
            }[kind]
        )
    return result


@settings(max_examples=100, deadline=None)
@given(st.data(), st.sampled_from(["grpo", "dr_grpo", "rloo", "asymre"]))
def test_group_advantages_against_an_oracle(data, kind):
    reward = st.one_of(st.sampled_from([0.0, 1.0, 0.1, -1.5]), st.just(NAN), st.integers(-40, 40).map(lambda i: i / 8))
    rows = data.draw(st.lists(st.tuples(reward, st.integers(-2, 2)), min_size=1, max_size=12))
    rewards, groups = (list(column) for column in zip(*rows))
    rewards = [float(np.float32(r)) for r in rewards]
    got = advantages_B(kind, rewards, groups)
    assert got.tolist() == pytest.approx(group_oracle(kind, rewards, groups), rel=1e-5, abs=1e-6)
    order = data.draw(st.permutations(range(len(rows))))
    moved = advantages_B(kind, [rewards[i] for i in order], [groups[i] for i in order])
    assert moved.tolist() == pytest.approx(got[list(order)].tolist(), abs=1e-6)


def test_a_group_may_count_replayed_answers():  # RLEP 2507.07451: group ids name problems
    # 2 fresh failures alone have no signal; with one replayed success of the same problem they do
    assert advantages_B("grpo", [0.0, 0.0], [3, 3]).tolist() == [0.0, 0.0]
    mixed = advantages_B("grpo", [0.0, 0.0, 1.0], [3, 3, 3])
    assert mixed.tolist() == pytest.approx([-1 / math.sqrt(3), -1 / math.sqrt(3), 2 / math.sqrt(3)])


def reward_rows(mask_BT, rewards):
    """Rewards (B, T) with each row's number on its last action token."""
    rewards_BT = torch.zeros(mask_BT.shape)
    for row, reward in enumerate(rewards):
        if mask_BT[row].any():
            rewards_BT[row, mask_BT[row].nonzero().max()] = reward
    return rewards_BT


def test_reinforce_pp_crosses_observation_spans():
    # verl 7278: mask [1,1,0,0,1,1], outcome at the end: return 1 at all four action tokens
    mask_BT = mask_of([[1, 1, 0, 0, 1, 1], [1, 1, 1, 0, 0, 0]])
    advantages = losses.compute_advantages("reinforce++", reward_rows(mask_BT, [1.0, 0.0]), None, mask_BT)
    # returns: four 1s and three 0s: mean 4/7, population std sqrt(12)/7
    std = math.sqrt(12) / 7
    assert advantages.tolist() == [
        pytest.approx([3 / 7 / std, 3 / 7 / std, 0, 0, 3 / 7 / std, 3 / 7 / std]),
        pytest.approx([-4 / 7 / std] * 3 + [0, 0, 0])]


def test_every_turns_reward_reaches_the_learner():
    # SkyRL 201: turn rewards .1, -.1, 1 sum to 1 at the first token
    mask_BT = mask_of([[0, 1, 1, 0, 1, 0, 1]])
    rewards_BT = torch.tensor([[0, 0, 0.1, 0, -0.1, 0, 1.0]])
    returns_BT, _ = losses.gae(rewards_BT, torch.zeros(1, 7), mask_BT)
    assert returns_BT.tolist() == [pytest.approx([0, 1.0, 1.0, 0, 0.9, 0, 1.0])]
    # gamma discounts action tokens, not observation tokens
    returns_BT, _ = losses.gae(rewards_BT, torch.zeros(1, 7), mask_BT, gamma=0.5)
    assert returns_BT.tolist() == [pytest.approx([0, 0.05 - 0.025 + 0.125, 0.1 - 0.05 + 0.25, 0, -0.1 + 0.5, 0, 1.0])]


def test_global_whitening_is_token_weighted():
    # OpenRLHF 830, 924, 856: masked mean 0 and std 1 over all action tokens, not over rows
    torch.manual_seed(0)
    mask_BT = torch.rand(6, 9) < 0.6
    rewards = torch.randn(6)
    groups = torch.tensor([0, 0, 0, 1, 1, 1])
    for kind, given_rewards in (("reinforce++", reward_rows(mask_BT, rewards)), ("reinforce++_baseline", rewards)):
        advantages = losses.compute_advantages(kind, given_rewards, groups, mask_BT)
        assert advantages[mask_BT].mean().abs() < 1e-6
        assert advantages[mask_BT].std(correction=0) == pytest.approx(1.0, abs=1e-5)
        assert (advantages[~mask_BT] == 0).all()
    equal = losses.compute_advantages("reinforce++", reward_rows(mask_BT, torch.full((6,), 0.1)), None, mask_BT)
    assert (equal == 0).all()
    raw = losses.compute_advantages("reinforce++", reward_rows(mask_BT, rewards), None, mask_BT, whiten=False)
    assert torch.allclose(raw[mask_BT], rewards[:, None].expand(6, 9)[mask_BT])


def test_kl_in_the_reward():
    mask_BT = mask_of([[1, 1, 0, 1], [1, 0, 0, 0]])
    token_kl_BT = torch.tensor([[0.5, 0.25, 9.0, 0.125], [1.0, 9.0, 9.0, 9.0]])
    got = losses.compute_advantages(
        "reinforce++", reward_rows(mask_BT, [1.0, 1.0]), None, mask_BT, token_kl_BT=token_kl_BT, whiten=False
    )
    assert got.tolist() == [[0.125, 0.625, 0.0, 0.875], [0.0, 0.0, 0.0, 0.0]]  # 1 - kl of this and the later tokens
    got = losses.compute_advantages("dr_grpo", torch.ones(2), torch.zeros(2).long(), mask_BT, token_kl_BT=token_kl_BT)
    assert got[:, 0].tolist() == pytest.approx([0.0625, -0.0625])


def gae_oracle(rewards, values, mask, gamma, lam):
    """The definition, sum_l (gamma lam)^l delta_{t+l}, on the action tokens alone."""
    rewards, values = rewards[mask], np.append(values[mask], 0.0)
    delta = rewards + gamma * values[1:] - values[:-1]
    return [sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, len(delta))) for t in range(len(delta))]


def vtrace_oracle(rewards, values, ratios, mask, gamma, lam, rho_cap, c_cap):
    """IMPALA eq. 1: v_s = V_s + sum_t gamma^(t-s) (prod_{i=s}^{t-1} c_i) rho_t delta_t."""
    rewards, ratios, values = rewards[mask], ratios[mask], np.append(values[mask], 0.0)
    rho, trace = np.minimum(ratios, rho_cap), lam * np.minimum(ratios, c_cap)
    delta = rho * (rewards + gamma * values[1:] - values[:-1])
    targets = [
        values[s] + sum(gamma ** (t - s) * np.prod(trace[s:t]) * delta[t] for t in range(s, len(delta)))
        for s in range(len(delta))
    ]
    following = np.append(targets[1:], 0.0)[: len(targets)]
    return rewards + gamma * following - values[:-1], targets


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([1.0, 0.9]), st.sampled_from([1.0, 0.8, 0.0]))
def test_gae_and_vtrace_against_their_definitions(seed, gamma, lam):
    rng = np.random.default_rng(seed)
    mask = rng.random((3, 8)) < 0.6
    rewards = rng.normal(size=(3, 8)) * mask
    values, log_ratios = rng.normal(size=(3, 8)), rng.normal(size=(3, 8)) * 0.5
    tensors = [torch.tensor(array) for array in (rewards, values)]
    advantages, returns = losses.gae(*tensors, torch.tensor(mask), gamma=gamma, lam=lam)
    vtrace_advantages, targets = losses.vtrace(
        *tensors, torch.tensor(log_ratios), torch.tensor(mask), gamma=gamma, lam=lam, rho_cap=1.2, c_cap=0.9
    )
    assert (advantages[~torch.tensor(mask)] == 0).all()
    for row in range(3):
        action = mask[row]
        expected = gae_oracle(rewards[row], values[row], action, gamma, lam)
        assert advantages[row].numpy()[action] == pytest.approx(expected, abs=1e-5)
        assert returns[row].numpy()[action] == pytest.approx(expected + values[row][action], abs=1e-5)
        expected, expected_targets = vtrace_oracle(
            rewards[row], values[row], np.exp(log_ratios[row]), action, gamma, lam, 1.2, 0.9
        )
        assert vtrace_advantages[row].numpy()[action] == pytest.approx(expected, abs=1e-5)
        assert targets[row].numpy()[action] == pytest.approx(expected_targets, abs=1e-5)


def test_a_fully_masked_row_changes_nothing_and_gets_zero():
    mask_BT = mask_of([[1, 1, 0], [0, 1, 1], [0, 0, 0]])
    for kind in ADVANTAGES:
        per_token = ADVANTAGES[kind].per_token
        rewards = reward_rows(mask_BT, [1.0, 0.0, 0.0]) if per_token else torch.tensor([1.0, 0.0, 5.0])
        groups = torch.tensor([0, 0, 1])
        options = {"values_BT": torch.full((3, 3), 0.3)} if ADVANTAGES[kind].needs_values else {}
        got = losses.compute_advantages(kind, rewards, groups, mask_BT, **options)
        options = {"values_BT": torch.full((2, 3), 0.3)} if ADVANTAGES[kind].needs_values else {}
        alone = losses.compute_advantages(kind, rewards[:2], groups[:2], mask_BT[:2], **options)
        assert torch.equal(got[:2], alone) and (got[2] == 0).all(), kind
        assert got.dtype == torch.float32 and (got[~mask_BT] == 0).all()


# -------------------------------------------------------------------------------------------------------- policy losses
B, T = 5, 7


def batch(seed=0, spread=0.6, dtype=torch.float64):
    """Ragged rows with gaps, ratios on both sides of every clip, advantages of both signs between and within rows."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    mask_BT = torch.rand(B, T, generator=generator) < 0.7
    mask_BT[:, 0] = True
    behavior_BT = -draw(B, T).abs() - 2.5
    logprobs_BT = (behavior_BT + spread * draw(B, T)).clamp(max=-0.01)
    data = dict(
        logprobs_BT=logprobs_BT, behavior_logprobs_BT=behavior_BT, mask_BT=mask_BT,
        advantages_BT=draw(B, 1).expand(B, T) + 0.2 * draw(B, T))
    return {
        name: (value if value.dtype == torch.bool else torch.where(mask_BT, value, 0.0).to(dtype))
        for name, value in data.items()
    }


def extras(kind, data):
    """The further inputs a kind needs."""
    generator = torch.Generator().manual_seed(9)
    like = data["behavior_logprobs_BT"]
    noise_BT = torch.randn(len(like), like.shape[1], generator=generator, dtype=torch.float64).to(like.dtype)
    if kind == "decoupled_ppo":
        return {"proximal_logprobs_BT": torch.where(data["mask_BT"], like + 0.5 * noise_BT, 0.0)}
    if kind == "tba":
        return {
            "reference_logprobs_BT": torch.where(data["mask_BT"], like - 0.3 * noise_BT.abs(), 0.0),
            "tba_beta": 0.5,
            "rewards_B": noise_BT[:, 0].round(decimals=1),
            "group_ids_B": torch.arange(len(like)) % 2}
    if kind == "sft_positive":
        return {"rewards_B": torch.arange(len(like)).remainder(2).to(like.dtype)}
    return {}


VARIANTS = [(kind, {}) for kind in LOSSES] + [
    ("ppo_clip", {"eps_low": 0.1, "eps_high": 0.28, "dual_clip": 1.3}), ("ppo_clip", {"ratio_cap": 1.4}),
    ("is_reinforce", {"level": "sequence", "is_cap": 1.5}), ("is_reinforce", {"is_cap": 1.1}),
    ("gspo", {"eps_low": 0.1, "eps_high": 0.1}), ("m2po", {"m2_rule": "cap"}),
    ("cispo", {"eps_low": 1.0, "eps_high": 0.3}), ("one_side", {"eps_low": 0.6, "eps_high": 2.0}),
    ("decoupled_ppo", {"correction_high": 1.1, "dual_clip": 2.0})]


def surrogate(
        kind, logprobs, frozen, behavior, advantages, mask, *, proximal_logprobs_BT=None, correction_high=2.0,
        reference_logprobs_BT=None, tba_beta=None, rewards_B=None, group_ids_B=None, level="token", is_cap=2.0,
        eps_low=None, eps_high=None, dual_clip=None, ratio_cap=None, m2_rule="remove"):
    """Loops over numbers, written from the papers: the loss matrix at `logprobs`, with detached factors at `frozen`."""
    eps_low = eps_low if eps_low is not None else 3e-4 if kind == "gspo" else 0.2
    eps_high = eps_high if eps_high is not None else 4e-4 if kind == "gspo" else 0.2
    loss = np.zeros(mask.shape)
    clip = lambda x, low, high: min(max(x, low), high)
    anchor = proximal_logprobs_BT if kind == "decoupled_ppo" else behavior
    if kind == "m2po":
        squares = sorted((frozen[b, t] - behavior[b, t]) ** 2 for b, t in zip(*np.nonzero(mask))
                         if advantages[b, t] * (frozen[b, t] - behavior[b, t]) > 0)
        kept = list(squares)
        while np.mean(kept) > 0.04:
            removed = kept.pop()
        bound = (kept[-1] ** 0.5 + removed**0.5) / 2
        eps_low, eps_high = 1 - math.exp(-bound), math.exp(bound) - 1
    if kind == "m2po" and m2_rule == "cap":  # bisection on the cap of the harmful tokens' squared log-ratios
        low, high = 0.0, 1e6
        for _ in range(200):
            middle = (low + high) / 2
            low, high = (middle, high) if np.mean(np.minimum(squares, middle)) <= 0.04 else (low, middle)
        eps_low, eps_high = 1 - math.exp(-(low**0.5)), math.exp(low**0.5) - 1
    for b in range(mask.shape[0]):
        tokens = np.nonzero(mask[b])[0]
        if len(tokens) == 0:
            continue
        log_sequence = sum(frozen[b, t] - behavior[b, t] for t in tokens)
        if kind == "tba":
            group = [i for i in range(mask.shape[0]) if group_ids_B[i] == group_ids_B[b] and mask[i].any()]
            gap = lambda table, i: sum(
                (table[i, t] - reference_logprobs_BT[i, t]) * mask[i, t] for t in range(mask.shape[1])
            )
            log_z = np.mean([rewards_B[i] / tba_beta - gap(frozen, i) for i in group])
            loss[b, tokens] = (log_z + gap(logprobs, b) - rewards_B[b] / tba_beta) ** 2 / len(tokens)
            continue
        for t in tokens:
            A, logp = advantages[b, t], logprobs[b, t]
            rho, rho_frozen = math.exp(logp - anchor[b, t]), math.exp(frozen[b, t] - behavior[b, t])
            if kind == "gspo":
                rho = math.exp(log_sequence / len(tokens)) * math.exp(logp - frozen[b, t])
            if kind in ("reinforce", "asymre"):
                loss[b, t] = -A * logp
            elif kind == "sft_positive":
                loss[b, t] = -logp if rewards_B[b] == 1 else 0.0
            elif kind in ("ppo_clip", "decoupled_ppo", "gspo", "m2po"):
                free = rho if ratio_cap is None else min(rho, ratio_cap)
                loss[b, t] = -min(free * A, clip(rho, 1 - eps_low, 1 + eps_high) * A)
                if dual_clip is not None and A < 0:
                    loss[b, t] = min(loss[b, t], -dual_clip * A)
                if kind == "decoupled_ppo":
                    loss[b, t] *= min(math.exp(anchor[b, t] - behavior[b, t]), correction_high)
            elif kind == "is_reinforce":
                loss[b, t] = -min(rho_frozen if level == "token" else math.exp(log_sequence), is_cap) * A * logp
            elif kind == "cispo":
                loss[b, t] = -clip(rho_frozen, 1 - eps_low, 1 + eps_high) * A * logp
            elif kind == "topr":
                loss[b, t] = -(1.0 if A >= 0 else clip(math.exp(log_sequence), 0.0, 1.0)) * A * logp
            elif kind == "one_side":
                kept = rho_frozen <= 1 + eps_high if A > 0 else rho_frozen >= 1 - eps_low
                loss[b, t] = -A * logp if kept else 0.0
    return loss


def reduce(loss, mask, mode, max_length=T, weights=None):
    """Aggregation in plain loops."""
    rows = [b for b in range(len(mask)) if mask[b].any()]
    weights = np.ones(len(mask)) if weights is None else weights
    sums = {b: weights[b] * loss[b, mask[b]].sum() for b in rows}
    return {
        "token_mean": sum(sums.values()) / mask.sum(),
        "seq_mean_token_sum": sum(sums.values()) / len(rows),
        "seq_mean_token_mean": sum(sums[b] / mask[b].sum() for b in rows) / len(rows),
        "constant": sum(sums.values()) / (len(rows) * max_length),
    }[mode]


@pytest.mark.parametrize("kind, options", VARIANTS, ids=str)
@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_value_and_finite_differences(kind, options, mode):
    data = batch(seed=3)
    options = {**options, **extras(kind, data)}
    mask = data["mask_BT"].numpy()
    weights_B = torch.rand(B, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    logprobs_BT = data["logprobs_BT"].clone().requires_grad_()
    loss, metrics = losses.policy_loss(
        kind, **{**data, "logprobs_BT": logprobs_BT}, aggregation=mode, max_length=T, weights_B=weights_B, **options
    )
    loss.backward()
    numpy = {name: value.numpy() if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    frozen = data["logprobs_BT"].numpy()
    others = data["behavior_logprobs_BT"].numpy(), data["advantages_BT"].numpy(), mask

    def objective(logprobs):
        return reduce(surrogate(kind, logprobs, frozen, *others, **numpy), mask, mode, weights=weights_B.numpy())

    assert loss.item() == pytest.approx(objective(frozen), rel=1e-9)
    assert metrics["loss"] == pytest.approx(loss.item())
    step, gradient = 1e-6, np.zeros(mask.shape)
    for b, t in np.ndindex(*mask.shape):
        up, down = frozen.copy(), frozen.copy()
        up[b, t] += step
        down[b, t] -= step
        gradient[b, t] = (objective(up) - objective(down)) / (2 * step)
    assert logprobs_BT.grad.numpy() == pytest.approx(gradient, abs=2e-8 * max(1.0, np.abs(gradient).max()))
    assert (logprobs_BT.grad[~data["mask_BT"]] == 0).all()


def test_the_test_batch_reaches_every_branch():
    # finite differences prove nothing about a branch no token takes
    data = batch(seed=3)
    seen = {}
    for kind, options in VARIANTS:
        _, metrics = losses.policy_loss(kind, **data, **options, **extras(kind, data))
        for name, value in metrics.items():
            seen[name] = max(seen.get(name, 0.0), value)
    for name in ("clip_fraction_low", "clip_fraction_high", "clip_fraction_dual", "clip_fraction_cap"):
        assert seen[name] > 0, (name, seen)


def gradient(kind, data, mode="token_mean", **options):
    logprobs_BT = data["logprobs_BT"].clone().requires_grad_()
    loss, _ = losses.policy_loss(
        kind, **{**data, "logprobs_BT": logprobs_BT}, aggregation=mode, max_length=T, **options
    )
    return torch.autograd.grad(loss, logprobs_BT)[0]


ON_POLICY_KINDS = ["ppo_clip", "is_reinforce", "decoupled_ppo", "asymre", "cispo", "topr", "m2po", "one_side"]


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_at_ratio_one_everything_is_reinforce(mode, dtype):
    data = batch(spread=0.0, dtype=dtype)
    expected = gradient("reinforce", data, mode)
    assert expected.abs().max() > 0.01
    for kind in ON_POLICY_KINDS:
        proximal = {"proximal_logprobs_BT": data["logprobs_BT"]} if kind == "decoupled_ppo" else {}
        for options in ({}, {"dual_clip": 3.0, "ratio_cap": 4.0}):
            assert torch.allclose(gradient(kind, data, mode, **proximal, **options), expected, atol=1e-6), kind
    assert torch.allclose(gradient("gspo", data, mode), expected, atol=1e-6)


def test_gspo_is_the_sequence_level_objective():
    # with seq_mean_token_mean and one advantage a row, the token form is mean_i min(s A, clip(s) A)
    data = batch(seed=5, spread=0.02)
    data["advantages_BT"] = torch.where(data["mask_BT"], data["advantages_BT"][:, :1], 0.0)
    logprobs_BT, mask_BT = data["logprobs_BT"].clone().requires_grad_(), data["mask_BT"]
    ratio_B = ((logprobs_BT - data["behavior_logprobs_BT"]).sum(1) / mask_BT.sum(1)).exp()
    A_B = data["advantages_BT"][:, 0]
    loss = -torch.minimum(ratio_B * A_B, ratio_B.clamp(1 - 3e-4, 1 + 4e-4) * A_B).mean()
    expected = torch.where(mask_BT, torch.autograd.grad(loss, logprobs_BT)[0], 0.0)
    got = gradient("gspo", data, "seq_mean_token_mean")
    assert torch.allclose(got, expected, atol=1e-12) and 0 < (got != 0).any(1).sum() < B
    assert losses.policy_loss("gspo", **data, aggregation="seq_mean_token_mean")[0].item() == pytest.approx(loss.item())


def test_each_loss_differs_from_reinforce_off_policy_where_its_formula_says_so():
    # four tokens: (A > 0, rho 1.5), (A > 0, rho .5), (A < 0, rho 1.5), (A < 0, rho .5); gradient = factor * reinforce's
    mask_BT = torch.ones(4, 1, dtype=torch.bool)
    data = dict(
        logprobs_BT=torch.tensor([[1.5], [0.5], [1.5], [0.5]], dtype=torch.float64).log() - 2.0,
        behavior_logprobs_BT=torch.full((4, 1), -2.0, dtype=torch.float64), mask_BT=mask_BT,
        advantages_BT=torch.tensor([[1.0], [1.0], [-1.0], [-1.0]], dtype=torch.float64))
    base = gradient("reinforce", data)
    factors = {
        "ppo_clip": [0, 0.5, 1.5, 0],
        "is_reinforce": [1.5, 0.5, 1.5, 0.5],
        "cispo": [1.2, 0.8, 1.2, 0.8],
        "topr": [1, 1, 1, 0.5],
        "one_side": [0, 1, 1, 0],
        "asymre": [1, 1, 1, 1],
        "m2po": [0, 0.5, 1.5, 0],
        "gspo": [0, 0.5, 1.5, 0]}
    for kind, expected in factors.items():
        options = {"m2_bound": 0.3} if kind == "m2po" else {}
        assert (gradient(kind, data, **options) / base)[:, 0].tolist() == pytest.approx(expected), kind
    # decoupled: no distance from the proximal policy, so no clip; the weight is truncated at 1.2
    proximal = {"proximal_logprobs_BT": data["logprobs_BT"], "correction_high": 1.2}
    assert (gradient("decoupled_ppo", data, **proximal) / base)[:, 0].tolist() == pytest.approx([1.2, 0.5, 1.2, 0.5])
    capped = {"ratio_cap": 1.3}  # two-sided: a large ratio with A < 0 falls silent too
    assert (gradient("ppo_clip", data, **capped) / base)[:, 0].tolist() == pytest.approx([0, 0.5, 0, 0])
    dual = {"dual_clip": 1.4}
    assert (gradient("ppo_clip", data, **dual) / base)[:, 0].tolist() == pytest.approx([0, 0.5, 0, 0])


@pytest.mark.parametrize("kind", LOSSES)
def test_no_gradient_through_what_must_be_detached(kind):
    data = {
        name: value.clone().requires_grad_() if value.dtype != torch.bool else value for name, value in batch().items()
    }
    more = {
        name: value.clone().requires_grad_() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in extras(kind, batch()).items()
    }
    weights_B = torch.ones(B, dtype=torch.float64, requires_grad=True)
    correction = None if kind == "decoupled_ppo" else "sequence_mask"
    losses.policy_loss(kind, **data, **more, weights_B=weights_B, correction=correction)[0].backward()
    for name, value in {**data, **more, "weights_B": weights_B}.items():
        if name not in ("logprobs_BT", "rewards_B") and isinstance(value, torch.Tensor) and value.is_floating_point():
            assert value.grad is None, name
    assert data["logprobs_BT"].grad.abs().sum() > 0


def test_the_weight_of_truncated_is_carries_no_gradient():
    # d/dlogp of -w A logp is -w A, not -w A (1 + logp)
    data = batch()
    got = gradient("is_reinforce", data, is_cap=1e9)
    ratio_BT = (data["logprobs_BT"] - data["behavior_logprobs_BT"]).exp()
    assert torch.allclose(got, -ratio_BT * data["advantages_BT"] / data["mask_BT"].sum())


@pytest.mark.parametrize("kind, options", VARIANTS, ids=str)
@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_invariances(kind, options, mode):
    """Padding, row order, an extra fully masked row, and any micro-batch split with the step's one denominator."""
    data = batch(seed=4)
    data = {**data, **extras(kind, data), "weights_B": torch.linspace(0.2, 1.0, B, dtype=torch.float64)}
    if kind == "m2po":
        data["m2_bound"] = losses.m2po_bound(
            data["logprobs_BT"], data["behavior_logprobs_BT"], data["advantages_BT"], data["mask_BT"]
        )
    if kind == "tba":
        data["log_z_B"] = losses.tba_log_z(
            data["logprobs_BT"], data["reference_logprobs_BT"], data["rewards_B"], data["group_ids_B"],
            data["mask_BT"], tba_beta=data["tba_beta"])

    def step(rows, pad=0, masked_row=False, denominator=None):
        part = {}
        for name, value in data.items():
            part[name] = value
            if isinstance(value, torch.Tensor):
                part[name] = value[rows]
                if masked_row:
                    part[name] = torch.cat([part[name], torch.zeros_like(part[name][:1])])
                if value.ndim == 2 and pad:
                    part[name] = torch.nn.functional.pad(part[name], (0, pad))
        part["logprobs_BT"] = part["logprobs_BT"].detach().requires_grad_()
        loss, _ = losses.policy_loss(kind, **part, **options, aggregation=mode, max_length=T, denominator=denominator)
        grad_BT = torch.autograd.grad(loss, part["logprobs_BT"])[0]
        return loss.item(), grad_BT[: len(rows), :T]

    everything = list(range(B))
    loss, grad_BT = step(everything)
    order = [3, 0, 4, 1, 2]
    moved_loss, moved = step(order)
    assert moved_loss == pytest.approx(loss, abs=1e-12) and torch.allclose(moved, grad_BT[order], atol=1e-12)
    for changed in (dict(pad=3), dict(masked_row=True), dict(pad=1, masked_row=True)):
        other_loss, other = step(everything, **changed)
        assert other_loss == pytest.approx(loss, abs=1e-12) and torch.allclose(other, grad_BT, atol=1e-12), changed
    denominator = losses.step_denominator(data["mask_BT"], mode, max_length=T)
    for split in ([[0], [1], [2], [3], [4]], [[4, 2], [0, 1, 3]]):
        parts = [step(rows, denominator=denominator) for rows in split]
        assert sum(part_loss for part_loss, _ in parts) == pytest.approx(loss, abs=1e-12)
        joined = torch.cat([part for _, part in parts])
        assert torch.allclose(joined, grad_BT[[row for rows in split for row in rows]], atol=1e-12)


def test_per_weights_multiply_episode_losses_only():
    data = batch()
    weights_B = torch.tensor([1.0, 0.5, 0.0, 2.0, 1.0], dtype=torch.float64)
    plain, plain_metrics = losses.policy_loss("ppo_clip", **data)
    weighted, metrics = losses.policy_loss("ppo_clip", **data, weights_B=weights_B)
    rows = [
        losses.policy_loss(
            "ppo_clip",
            **{name: value[b : b + 1] for name, value in data.items()}, denominator=data["mask_BT"].sum().item(),
        )[0]
        for b in range(B)
    ]
    assert weighted.item() == pytest.approx(sum(w * row for w, row in zip(weights_B.tolist(), rows)).item())
    assert plain.item() == pytest.approx(sum(rows).item())
    assert metrics["clip_fraction_low"] == plain_metrics["clip_fraction_low"]


def test_which_losses_are_unbiased_on_stale_data():
    """One token, four arms, sampled from mu: the expected gradient against that of sum pi A, by enumeration."""
    pi_logits_A = torch.tensor([0.5, -0.3, 0.2, -1.0], dtype=torch.float64, requires_grad=True)
    mu_A = torch.tensor([0.1, 0.4, 0.2, 0.3], dtype=torch.float64)
    advantages_A = torch.tensor([1.0, -0.5, 0.3, -0.8], dtype=torch.float64)
    exact = torch.autograd.grad(-(torch.softmax(pi_logits_A, 0) * advantages_A).sum(), pi_logits_A)[0]

    def error(kind, **options):
        logprobs_BT = torch.log_softmax(pi_logits_A, 0)[:, None]
        if kind == "decoupled_ppo":
            options["proximal_logprobs_BT"] = logprobs_BT.detach()
        loss, _ = losses.policy_loss(
            kind, logprobs_BT, mu_A.log()[:, None], advantages_A[:, None], torch.ones(4, 1, dtype=torch.bool),
            weights_B=4 * mu_A, aggregation="seq_mean_token_sum", **options)
        return (torch.autograd.grad(loss, pi_logits_A)[0] - exact).abs().max().item()

    for kind, options in {
        "is_reinforce": {"is_cap": 1e9},
        "cispo": {"eps_low": 1.0, "eps_high": 1e9},
        "ppo_clip": {"eps_low": 1.0, "eps_high": 1e9},
        "decoupled_ppo": {"correction_high": 1e9},
    }.items():
        assert error(kind, **options) < 1e-12, kind
    for kind in ("reinforce", "is_reinforce", "cispo", "ppo_clip", "topr", "one_side"):  # biased at their defaults
        assert error(kind) > 0.01, kind


# ------------------------------------------------------------------------------------------- inputs from public reports
def test_mean_of_means():
    # trl PR 6024 and others: token losses [[1], [0, 0, 0]] are .25 for one batch and for two micro-batches
    values_BT, mask_BT = torch.tensor([[1.0, 0, 0], [0, 0, 0]]), mask_of([[1, 0, 0], [1, 1, 1]])
    assert losses.aggregate(values_BT, mask_BT, "token_mean").item() == 0.25
    parts = [
        losses.aggregate(values_BT[b : b + 1], mask_BT[b : b + 1], "token_mean", denominator=4).item() for b in (0, 1)
    ]
    assert sum(parts) == 0.25
    assert losses.aggregate(values_BT, mask_BT, "seq_mean_token_mean").item() == 0.5
    assert losses.aggregate(values_BT, mask_BT, "constant", max_length=10).item() == pytest.approx(0.05)


def test_ratio_against_stored_behaviour():
    # AReaL 201: stored -2, now -1: the ratio is e, not 1
    one = torch.ones(1, 1, dtype=torch.bool)
    report = measures.diagnostics(torch.tensor([[-1.0]]), torch.tensor([[-2.0]]), torch.tensor([[1.0]]), one)
    assert report["ratio_mean"] == pytest.approx(math.e)
    loss, metrics = losses.policy_loss(
        "ppo_clip", torch.tensor([[-1.0]]), torch.tensor([[-2.0]]), torch.tensor([[1.0]]), one
    )
    assert loss.item() == pytest.approx(-1.2) and metrics["clip_fraction_high"] == 1.0


def test_truncated_is_weights():
    # verl PR 2953: trainer [-1, -1], engine [-1, -4], cap 2: weights [1, 2], detached
    trainer = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    weights = losses.correction_weights("tis_token", trainer, torch.tensor([[-1.0, -4.0]]), mask_of([[1, 1]]), high=2.0)
    assert weights.tolist() == [[1.0, 2.0]] and not weights.requires_grad


def test_observation_tokens_get_no_gradient():
    # RAGEN 71: through real logits, the gradient at observation positions is exactly 0
    torch.manual_seed(0)
    logits_TV = torch.randn(4, 12, requires_grad=True)
    logprobs_BT = torch.log_softmax(logits_TV, 1).gather(1, torch.tensor([[10], [11], [5], [6]])).T
    mask_BT = mask_of([[0, 0, 1, 1]])
    for kind in LOSSES:
        more = {
            "reference_logprobs_BT": logprobs_BT.detach() - 1,
            "rewards_B": torch.ones(1),
            "group_ids_B": torch.zeros(1).long(),
            "log_z_B": torch.ones(1)}
        if kind == "decoupled_ppo":
            more = {"proximal_logprobs_BT": logprobs_BT.detach()}
        loss, _ = losses.policy_loss(kind, logprobs_BT, logprobs_BT.detach(), torch.ones(1, 4), mask_BT, **more)
        grad = torch.autograd.grad(loss, logits_TV, retain_graph=True)[0]
        assert (grad[:2] == 0).all() and (grad[2:] != 0).any(), kind


def test_masked_positions_may_hold_anything():
    data = batch()
    loss, _ = losses.policy_loss("ppo_clip", **data)
    dirty = {name: value.clone() for name, value in data.items()}
    for name in ("logprobs_BT", "behavior_logprobs_BT", "advantages_BT"):
        dirty[name][~data["mask_BT"]] = NAN
    dirty["logprobs_BT"].requires_grad_()
    dirty_loss, _ = losses.policy_loss("ppo_clip", **dirty)
    dirty_loss.backward()
    assert dirty_loss.item() == loss.item() and dirty["logprobs_BT"].grad.isfinite().all()
    assert measures.diagnostics(**dirty) == measures.diagnostics(**data)


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("bad", [-math.inf, NAN])
def test_a_non_finite_current_logprob_makes_the_loss_non_finite(kind, bad):
    # unsloth 3006: the trainer must see it; a clamped ratio would hide it
    data = batch()
    data["logprobs_BT"] = data["logprobs_BT"].clone()
    data["logprobs_BT"][1, 0] = bad
    loss, metrics = losses.policy_loss(kind, **data, **extras(kind, data))
    assert not math.isfinite(loss.item()) and not math.isfinite(metrics["loss"])


def test_log_ratios_are_clamped_and_counted():
    mask_BT = mask_of([[1, 1, 1]])
    logprobs_BT = torch.tensor([[-1.0, -60.0, -2.0]], requires_grad=True)
    loss, metrics = losses.policy_loss(
        "is_reinforce", logprobs_BT, torch.tensor([[-50.0, -1.0, -2.0]]), -torch.ones(1, 3), mask_BT, is_cap=1e12
    )
    assert metrics["clamped"] == 2.0
    assert loss.item() == pytest.approx(-(math.exp(20) + math.exp(-20) * 60 + 2) / 3)
    report = measures.diagnostics(logprobs_BT, torch.tensor([[-50.0, -1.0, -2.0]]), torch.ones(1, 3), mask_BT)
    assert report["clamped"] == 2.0 and report["ratio_max"] == pytest.approx(math.exp(20))
    assert report["log_prob_difference_max"] == 59.0


def test_everything_masked_is_a_loss_of_zero():
    mask_BT = torch.zeros(2, 3, dtype=torch.bool)
    logprobs_BT = torch.zeros(2, 3, requires_grad=True)
    for mode, kind in itertools.product(AGGREGATIONS, ["ppo_clip", "reinforce", "gspo", "m2po"]):
        loss, metrics = losses.policy_loss(
            kind, logprobs_BT, torch.zeros(2, 3), torch.ones(2, 3), mask_BT, aggregation=mode, max_length=3
        )
        loss.backward()
        assert loss.item() == 0 and (logprobs_BT.grad == 0).all() and all(map(math.isfinite, metrics.values()))


# --------------------------------------------------------------------------------------------- kinds with their own law
def test_topr_is_bounded_where_reinforce_is_not():
    mask_BT, negative = mask_of([[1]]), -torch.ones(1, 1)
    behavior_BT = torch.tensor([[-1.0]])
    losses_at = lambda kind: [
        losses.policy_loss(kind, torch.tensor([[logp]]), behavior_BT, negative, mask_BT)[0].item()
        for logp in (-1.0, -5.0, -10.0, -15.0)
    ]
    assert min(losses_at("topr")) > -1.01 and min(losses_at("reinforce")) == -15.0


def test_m2po_as_in_algorithm_1_keeps_as_many_harmful_tokens_as_the_budget_holds():
    data = batch(seed=8, spread=0.8)
    logprobs_BT, behavior_BT, mask_BT, advantages_BT = data.values()
    difference_BT = logprobs_BT - behavior_BT
    harmful_BT = mask_BT & (advantages_BT * difference_BT > 0)
    for budget in (0.001, 0.04, 0.3):
        bound = losses.m2po_bound(**data, m2_budget=budget)
        kept_BT = harmful_BT & (difference_BT.abs() <= bound)
        square_N = difference_BT[harmful_BT].square().sort().values
        assert not kept_BT.any() or difference_BT[kept_BT].square().mean() <= budget
        assert square_N[:kept_BT.sum() + 1].mean() > budget  # one more would be too much
        # what is taken out has no gradient, what is kept has that of ratio * A
        logprobs_BT.requires_grad_(True).grad = None
        losses.policy_loss("m2po", **data, m2_budget=budget)[0].backward()
        right_BT = torch.where(mask_BT & (kept_BT | ~harmful_BT), -difference_BT.detach().exp() * advantages_BT, 0.0) / mask_BT.sum()
        assert torch.allclose(logprobs_BT.grad, right_BT)
        logprobs_BT.requires_grad_(False)
    assert losses.m2po_bound(**data, m2_budget=100.0) == math.inf
    assert losses.m2po_bound(behavior_BT, behavior_BT, advantages_BT, mask_BT) == math.inf
    # by hand: squares 1, 4, 9 with budget 2: mean 14/3, without the largest 5/2, without two 1; between 1 and 2
    ones = torch.ones(1, 3)
    by_hand = torch.tensor([[1.0, 2.0, 3.0]]) - 9, ones - 10, ones, ones.bool()
    assert losses.m2po_bound(*by_hand, m2_budget=2.0) == pytest.approx(1.5)
    assert losses.m2po_bound(*by_hand, m2_budget=0.5) == pytest.approx(0.5)  # all go
    assert losses.m2po_bound(*by_hand, m2_budget=2.6) == pytest.approx(2.5)
    # the released training caps them: (1 + c + c) / 3 = 2
    assert losses.m2po_bound(*by_hand, m2_budget=2.0, m2_rule="cap") == pytest.approx(math.sqrt(2.5))


def test_m2po_with_a_cap_meets_the_budget_and_is_idempotent():
    data = batch(seed=8, spread=0.8)
    logprobs_BT, behavior_BT, mask_BT, advantages_BT = data.values()
    for budget in (0.001, 0.04, 0.3):
        bound = losses.m2po_bound(**data, m2_budget=budget, m2_rule="cap")
        difference_BT = logprobs_BT - behavior_BT
        harmful_BT = mask_BT & (advantages_BT * difference_BT > 0)
        capped_BT = torch.where(harmful_BT, difference_BT.clamp(-bound, bound), difference_BT)
        assert capped_BT[harmful_BT].square().mean().item() == pytest.approx(budget, rel=1e-9)
        again = losses.m2po_bound(behavior_BT + capped_BT * (1 - 1e-9), behavior_BT, advantages_BT, mask_BT, m2_budget=budget,
                                  m2_rule="cap")
        assert again == math.inf


def test_m2po_needs_the_whole_steps_bound_to_split():
    data = batch(seed=8, spread=0.8)
    rows = [{name: value[b : b + 1] for name, value in data.items()} for b in range(B)]
    own = {losses.m2po_bound(**row) for row in rows}
    assert len(own) > 1  # the micro-batches' own bounds disagree: hence the m2_bound argument


def test_tba_is_zero_at_its_optimum():
    # pi = ref exp(r / beta) / Z: the loss and its gradient vanish whoever sampled
    torch.manual_seed(0)
    reference_A, rewards_A, beta = torch.log_softmax(torch.randn(6), 0), torch.rand(6), 0.3
    optimal_A = torch.log_softmax(reference_A + rewards_A / beta, 0)
    more = dict(
        reference_logprobs_BT=reference_A[:, None], rewards_B=rewards_A, group_ids_B=torch.zeros(6).long(),
        tba_beta=beta)
    logprobs_BT = optimal_A[:, None].clone().requires_grad_()
    loss, _ = losses.policy_loss(
        "tba",
        logprobs_BT, torch.full((6, 1), -1.0), torch.zeros(6, 1), torch.ones(6, 1, dtype=torch.bool),
        aggregation="seq_mean_token_sum", **more)
    loss.backward()
    assert loss.item() < 1e-10 and logprobs_BT.grad.abs().max() < 1e-5
    log_z_B = losses.tba_log_z(
        optimal_A[:, None], reference_A[:, None], rewards_A, torch.zeros(6).long(), torch.ones(6, 1, dtype=torch.bool),
        tba_beta=beta)
    assert log_z_B.tolist() == pytest.approx([torch.logsumexp(reference_A + rewards_A / beta, 0).item()] * 6, abs=1e-5)


def test_tba_leaves_out_unjudged_and_empty_rows():
    mask_BT = mask_of([[1], [1], [1], [0]])
    logprobs_BT = torch.tensor([[-1.0], [-2.0], [-3.0], [0.0]])
    more = dict(
        reference_logprobs_BT=torch.full((4, 1), -1.5), rewards_B=torch.tensor([1.0, 0.0, NAN, 5.0]),
        group_ids_B=torch.zeros(4).long(), tba_beta=1.0, aggregation="seq_mean_token_sum", denominator=1)
    loss, _ = losses.policy_loss("tba", logprobs_BT, logprobs_BT, torch.zeros(4, 1), mask_BT, **more)
    log_z = ((-1.5 + 1.0 + 1.0) + (-1.5 + 2.0)) / 2
    assert loss.item() == pytest.approx((log_z - 1.0 + 1.5 - 1.0) ** 2 + (log_z - 2.0 + 1.5) ** 2)


@pytest.mark.parametrize(
    "shift, limit", [(-0.5, (0.08, 0.66, 0.04, 0.22)), (-0.2, (0, 0.9, 0, 0.1)), (-0.1, (0, 1, 0, 0))]
)
def test_asymre_fixed_points(shift, limit):
    # off-policy flow with a frozen behaviour policy: the limit is sparsemax(mu (r - V) / (V_mu - V)), V = V_mu + shift
    behavior_A = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    rewards_A = torch.tensor([0.0, 1.0, 0.0, 1.0], dtype=torch.float64)
    weights_A = behavior_A * 4  # the expectation over mu: each arm once, weighted
    advantages_A = rewards_A - ((behavior_A * rewards_A).sum() + shift)
    mask_BT = torch.ones(4, 1, dtype=torch.bool)
    logits_A = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    for _ in range(4000):
        loss, _ = losses.policy_loss(
            "asymre",
            torch.log_softmax(logits_A, 0)[:, None], behavior_A.log()[:, None], advantages_A[:, None], mask_BT,
            weights_B=weights_A, aggregation="seq_mean_token_sum")
        with torch.no_grad():
            logits_A -= 5.0 * torch.autograd.grad(loss, logits_A)[0]
    assert torch.softmax(logits_A, 0).tolist() == pytest.approx(limit, abs=0.01)


# ---------------------------------------------------------------------------------------------------------- corrections
def test_correction_weights_by_hand():
    mask_BT = mask_of([[1, 1, 0], [1, 1, 1]])
    behavior_BT = torch.tensor([[-2.0, -2.0, 0.0], [-2.0, -2.0, -2.0]])
    w_BT = torch.tensor([[4.0, 0.25, 1.0], [0.4, 0.5, 1.0]])
    proximal_BT = behavior_BT + w_BT.log()
    weights = lambda kind, **options: losses.correction_weights(kind, proximal_BT, behavior_BT, mask_BT, **options)
    assert weights("none").tolist() == [[1, 1, 0], [1, 1, 1]]
    approx = lambda rows: [pytest.approx(row, abs=1e-6) for row in rows]
    assert weights("tis_token").tolist() == approx([[2, 0.25, 0], [0.4, 0.5, 1]])
    assert weights("tis_token", low=0.45, high=3.0).tolist() == approx([[3, 0.45, 0], [0.45, 0.5, 1]])
    assert weights("tis_sequence").tolist() == approx([[1, 1, 0], [0.2, 0.2, 0.2]])
    assert weights("tis_sequence", high=0.5).tolist() == approx([[0.5, 0.5, 0], [0.2, 0.2, 0.2]])
    assert weights("mis").tolist() == approx([[4, 0, 0], [0, 0.5, 1]])
    assert weights("mis", low=0.3, high=3.9).tolist() == approx([[0, 0, 0], [0.4, 0.5, 1]])
    assert weights("geometric").tolist() == approx([[1, 1, 0], [0, 0, 0]])
    assert weights("geometric", low=0.5, high=0.9).tolist() == approx([[0, 0, 0], [1, 1, 1]])  # 0.2 ** (1/3) = .585
    # padding does not dilute the mean: exp(mean log w) is .5, not .707
    half = torch.tensor([[-2.0 + math.log(0.5), 0.0]]), torch.tensor([[-2.0, 0.0]]), mask_of([[1, 0]])
    assert losses.correction_weights("geometric", *half, low=0.6, high=0.9).tolist() == [[0, 0]]
    assert losses.correction_weights("geometric", *half, low=0.4, high=0.6).tolist() == [[1, 0]]
    # mean -log w is 0 and .536: only the second row is far, and only its negative tokens go
    advantages_BT = torch.tensor([[-1.0, -1.0, 0.0], [-1.0, 1.0, -1.0]])
    assert weights("sequence_mask", advantages_BT=advantages_BT).tolist() == approx([[1, 1, 0], [0, 1, 0]])
    assert weights("sequence_mask", advantages_BT=advantages_BT, high=0.6).tolist() == approx([[1, 1, 0], [1, 1, 1]])
    ages_B = torch.tensor([2, 5])
    assert weights("age_discount", ages_B=ages_B, low=0.9).tolist() == approx([[0.81, 0.81, 0], [0.9**5] * 3])
    assert weights("age_discount", ages_B=ages_B, low=0.9, high=4).tolist() == approx([[0.81, 0.81, 0], [0, 0, 0]])
    assert weights("age_discount", ages_B=ages_B, low=1.0, high=5).tolist() == [[1, 1, 0], [1, 1, 1]]


def test_corrections_in_the_loss():
    data = batch()
    # a ratio-free loss with a truncated weight of the current policy is truncated importance sampling
    for level, correction in (("token", "tis_token"), ("sequence", "tis_sequence")):
        assert torch.allclose(
            gradient("reinforce", data, correction=correction, correction_high=1.5),
            gradient("is_reinforce", data, level=level, is_cap=1.5), atol=1e-12)
    # decoupled_ppo: weights capped at 0 leave no gradient; with `none` it is the clip around the proximal policy
    proximal = extras("decoupled_ppo", data)
    assert (gradient("decoupled_ppo", data, **proximal, correction_high=0.0) == 0).all()
    around = {**data, "behavior_logprobs_BT": proximal["proximal_logprobs_BT"]}
    assert torch.equal(gradient("decoupled_ppo", data, **proximal, correction="none"), gradient("ppo_clip", around))
    ages_B = torch.arange(B)
    assert torch.allclose(
        gradient("ppo_clip", data, correction="age_discount", correction_low=0.5, ages_B=ages_B),
        gradient("ppo_clip", data, weights_B=0.5 ** ages_B.double()))


@pytest.mark.parametrize("kind", [kind for kind in LOSSES if LOSSES[kind].holds_ratio])
@pytest.mark.parametrize("correction", losses.RATIO_CORRECTIONS)
def test_a_ratio_never_counts_twice(kind, correction):
    with pytest.raises(ValueError, match="decoupled_ppo"):
        losses.policy_loss(kind, **batch(), correction=correction)


# ------------------------------------------------------------------------------------------------------------------- KL
PI_LOGITS, REF_LOGITS, MU_LOGITS = ([0.3, -0.5, 1.2], [1.0, 0.1, -0.4], [-0.2, 0.8, 0.4])


def kl_gradient(kind, sampler):
    """Expected gradient of the KL loss by enumeration of the actions under `sampler`, and those of both exact KLs."""
    logits = torch.tensor(PI_LOGITS, dtype=torch.float64, requires_grad=True)
    ref, mu = (torch.log_softmax(torch.tensor(x, dtype=torch.float64), 0) for x in (REF_LOGITS, MU_LOGITS))
    logp = torch.log_softmax(logits, 0)
    behavior = logp.detach() if sampler == "pi" else mu
    estimates = losses.kl(kind, logp, ref, ratio=(logp - behavior).exp())
    (behavior.exp() * estimates).sum().backward(retain_graph=True)
    grads = [
        torch.autograd.grad(value, logits, retain_graph=True)[0]
        for value in ((logp.exp() * (logp - ref)).sum(), (ref.exp() * (ref - logp)).sum())
    ]
    value = (behavior.exp() * estimates).sum().item()
    return logits.grad, *grads, value, (logp.exp() * (logp - ref)).sum().item()


def test_kl_gradients_by_enumeration():
    # trl 3025, OpenRLHF PR 1309, NeMo-RL PR 2506
    close = lambda a, b: torch.allclose(a, b, atol=1e-12)
    for sampler in ("pi", "mu"):
        got, forward, reverse, value, exact = kl_gradient("is_k3", sampler)
        assert close(got, forward) and value == pytest.approx(exact, rel=1e-12), sampler
    for kind in ("k2", "k3_straight_through"):
        assert close(kl_gradient(kind, "pi")[0], kl_gradient(kind, "pi")[1])
        assert not torch.allclose(kl_gradient(kind, "mu")[0], kl_gradient(kind, "mu")[1], atol=0.01)
    assert close(kl_gradient("k1", "pi")[0], torch.zeros(3, dtype=torch.float64))
    got, forward, reverse, value, exact = kl_gradient("k3", "pi")
    assert close(got, reverse) and not torch.allclose(got, forward, atol=0.01)
    assert not torch.allclose(kl_gradient("k3", "mu")[0], forward, atol=0.01)
    for kind in ("k1", "k3", "k3_straight_through"):  # values are unbiased on samples of pi
        assert kl_gradient(kind, "pi")[3] == pytest.approx(kl_gradient(kind, "pi")[4], rel=1e-12)


@pytest.mark.parametrize("kind, slopes", [
    ("k1", [1, 1, 1, 1, 1]), ("k2", [-20, -19, 0.5, 19, 20]), ("k3_straight_through", [-20, -19, 0.5, 19, 20]),
    ("k3", [-20, -20, 1 - math.exp(-0.5), 1 - math.exp(-19), 1])])
def test_the_gradient_of_a_kl_is_bounded_and_keeps_its_direction_far_away(kind, slopes):
    """k3's was -1.8e8 at a log-ratio of -19, and 0 beyond +-20 for all."""
    d = torch.tensor([-40.0, -19.0, 0.5, 19.0, 40.0])
    logp = (d - 50).requires_grad_(True)
    losses.kl(kind, logp, torch.full((5,), -50.0)).sum().backward()
    assert logp.grad.tolist() == pytest.approx(slopes, rel=1e-5)


def test_the_gradient_of_is_k3_is_the_ratio_times_the_log_ratio_and_bounded():
    logp, ref = torch.tensor([-2.0, -2.0, -2.0], requires_grad=True), torch.tensor([-1.0, -2.5, -32.0])
    behavior = torch.tensor([-1.0, -3.0, -4.0])
    losses.kl("is_k3", logp, ref, ratio=(logp - behavior).exp()).sum().backward()
    assert logp.grad.tolist() == pytest.approx([-1 * math.exp(-1), 0.5 * math.e, 20])


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo", "reinforce", "reinforce++_baseline", "reinforce++"])
def test_rewards_that_are_equal_but_for_rounding_are_no_signal(kind):
    """-0.1 nine times and 0.9 sum to 1.1e-16 in one order, to 1.4e-16 in the other, and in float32 to 1e-8."""
    turns = np.array([[-0.1] * 9 + [0.9], [0.9] + [-0.1] * 9])
    returns = [sum(turns[0]), sum(turns[1]), 1.5e-8, -1.2e-8]
    assert returns[0] != returns[1]
    mask_BT = torch.ones(4, 10, dtype=torch.bool)
    rewards = torch.tensor(returns, dtype=torch.float64)
    if ADVANTAGES[kind].per_token:
        rewards = torch.nn.functional.pad(rewards[:, None], (9, 0))
    advantages_BT = losses.compute_advantages(kind, rewards, torch.zeros(4, dtype=torch.long), mask_BT)
    assert not advantages_BT.any()
    shifted_BT = losses.compute_advantages(kind, rewards if ADVANTAGES[kind].per_token else rewards + 3e4, torch.arange(4) // 2,
                                           mask_BT, baseline=3e4)
    assert not shifted_BT.any()


def test_whitening_leaves_nothing_of_a_value_at_the_mean():
    """Group means of (0, 0.1, 0.2) and of (1, 1): the middle ones are 8e-18 from the mean of all."""
    mask_BT = torch.ones(5, 3, dtype=torch.bool)
    rewards_B, groups_B = torch.tensor([0.0, 0.1, 0.2, 1.0, 1.0], dtype=torch.float64), torch.tensor([0, 0, 0, 1, 1])
    advantages_BT = losses.compute_advantages("reinforce++_baseline", rewards_B, groups_B, mask_BT)
    assert advantages_BT.any(1).tolist() == [True, False, True, False, False]


def test_kl_values_by_hand_and_reference_detached():
    logp, ref = torch.tensor([[-1.0, -2.0]], requires_grad=True), torch.tensor([[-1.5, -1.0]], requires_grad=True)
    expected = {"k1": [0.5, -1.0], "k2": [0.125, 0.5], "k3": [math.exp(-0.5) - 0.5, math.e - 2]}
    expected["k3_straight_through"] = expected["k3"]
    for kind, values in expected.items():
        got = losses.kl(kind, logp, ref)
        assert got.tolist() == [pytest.approx(values)], kind
        got.sum().backward()
        assert ref.grad is None
    ratio = torch.tensor([[2.0, 0.5]])
    assert losses.kl("is_k3", logp, ref, ratio=ratio).tolist() == [
        pytest.approx([2 * expected["k3"][0], expected["k3"][1] / 2])
    ]
    tiny = losses.kl("k3", torch.tensor([-1.0]), torch.tensor([-1.0001]))
    assert 0 < tiny.item() < 1e-8 and losses.kl("k3", torch.tensor([-90.0]), torch.tensor([-1.0])).isfinite().all()


# -------------------------------------------------------------------------------------------------- critic, diagnostics
def test_value_loss():
    values_BT, returns_BT = torch.tensor([[1.0, 0.5, 9.0]], requires_grad=True), torch.tensor([[0.0, 0.0, NAN]])
    mask_BT = mask_of([[1, 1, 0]])
    loss, _ = value_loss(values_BT, returns_BT, mask_BT)
    assert loss.item() == pytest.approx((1.0 + 0.25) / 4)
    # old .1: the first value is clipped to .3, whose error is smaller, so the maximum stays unclipped; with old 2.0 the
    # clipped 1.8 is worse and has no gradient
    loss, metrics = value_loss(
        values_BT, returns_BT, mask_BT, old_values_BT=torch.tensor([[2.0, 0.5, 0.0]]), clip=0.2
    )
    loss.backward()
    assert loss.item() == pytest.approx((1.8**2 + 0.25) / 4) and metrics["value_clip_fraction"] == 0.5
    assert values_BT.grad.tolist() == [pytest.approx([0.0, 0.25, 0.0])]
    assert value_loss(values_BT, returns_BT, mask_BT, old_values_BT=torch.full((1, 3), 0.1), clip=0.2)[
        0
    ].item() == pytest.approx((1.0 + 0.25) / 4)
    parts = value_loss(values_BT, returns_BT, mask_BT, denominator=4, weights_B=torch.tensor([0.5]))[0]
    assert parts.item() == pytest.approx(1.25 / 2 / 4 * 0.5)


def test_explained_variance():
    returns_BT, mask_BT = torch.tensor([[0.0, 1.0, 2.0, 50.0]]), mask_of([[1, 1, 1, 0]])
    assert measures.explained_variance(returns_BT, returns_BT, mask_BT) == 1.0
    assert measures.explained_variance(torch.ones(1, 4), returns_BT, mask_BT) == 0.0
    assert measures.explained_variance(returns_BT, torch.ones(1, 4), mask_BT) is None


def test_diagnostics_by_hand():
    mask_BT = mask_of([[1, 1, 0], [1, 0, 0], [0, 0, 0]])
    behavior_BT = torch.tensor([[-2.0, -2.0, 0.0], [-2.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    w = torch.tensor([[2.0, 0.5, 1.0], [3.0, 1.0, 1.0], [1.0, 1.0, 1.0]])
    got = measures.diagnostics(
        behavior_BT + w.log(), behavior_BT, torch.tensor([[1.0, -0.5, 7], [0, 7, 7], [7, 7, 7]]), mask_BT
    )
    ln = math.log
    expected = {
        "ratio_mean": 5.5 / 3,
        "ratio_max": 3.0,
        "ratio_min": 0.5,
        "max_abs_ratio_minus_1": 2.0,
        "ess_token": 5.5**2 / (3 * 13.25),
        "ess_sequence": 4**2 / (2 * (1 + 9)),
        "chi2": 13.25 / 3 - 1,
        "kl_behavior_k1": -(ln(2) + ln(0.5) + ln(3)) / 3,
        "kl_behavior_k3": (5.5 - 3 - ln(3)) / 3,
        "m2": (2 * ln(2) ** 2 + ln(3) ** 2) / 3,
        "clamped": 0.0,
        "log_prob_difference_mean": (2 * ln(2) + ln(3)) / 3,
        "log_prob_difference_p99": ln(3),
        "log_prob_difference_max": ln(3),
        "advantage_mean": 0.5 / 3,
        "nonzero_advantage_rows": 0.5}
    assert got == pytest.approx(expected, rel=1e-5) and tuple(got) == measures.DIAGNOSTICS
    assert all(type(value) is float for value in got.values())


def test_diagnostics_limits_and_undefined():
    mask_BT = torch.ones(50, 1, dtype=torch.bool)
    behavior_BT = torch.full((50, 1), -3.0)
    same = measures.diagnostics(behavior_BT, behavior_BT, torch.zeros(50, 1), mask_BT)
    assert same["ess_token"] == same["ess_sequence"] == same["ratio_mean"] == 1.0 and same["chi2"] == same["m2"] == 0.0
    dominant_BT = behavior_BT.clone()
    dominant_BT[0] = 14.0
    assert measures.diagnostics(dominant_BT, behavior_BT, behavior_BT, mask_BT)["ess_sequence"] == pytest.approx(
        1 / 50, rel=1e-4
    )
    empty = measures.diagnostics(behavior_BT, behavior_BT, behavior_BT, ~mask_BT)
    assert set(empty.values()) == {None}
    broken = behavior_BT.clone()
    broken[3] = -math.inf
    report = measures.diagnostics(broken, behavior_BT, behavior_BT, mask_BT)
    assert report["ratio_mean"] is None and not any(value != value for value in report.values() if value is not None)


def test_kl_to_behaviour_estimates_are_unbiased():
    # E_mu[k1] = E_mu[k3] = KL(mu || pi), by enumeration
    mu, pi = torch.tensor([0.2, 0.5, 0.3]), torch.tensor([0.3, 0.3, 0.4])
    rows = torch.tensor([0] * 2 + [1] * 5 + [2] * 3)  # ten samples in exactly mu's shares
    report = measures.diagnostics(pi.log()[rows, None], mu.log()[rows, None], torch.ones(10, 1), torch.ones(10, 1).bool())
    exact = (mu * (mu / pi).log()).sum().item()
    assert report["kl_behavior_k1"] == pytest.approx(exact, rel=1e-5)
    assert report["kl_behavior_k3"] == pytest.approx(exact, rel=1e-4)
    assert report["ratio_mean"] == pytest.approx(1.0)


# --------------------------------------------------------------------------------------------------- bundles and errors
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_bundle_is_made_of_known_parts(name):
    bundle = ALGORITHMS[name]
    assert bundle.advantage in ADVANTAGES and bundle.loss in LOSSES and bundle.aggregation in AGGREGATIONS
    assert set(bundle.loss_options) | set(bundle.stale_options) <= set(losses.loss_options(bundle.loss)) and bundle.note
    assert bundle.kl_in in (None, "reward", "loss") and (bundle.kl_kind in KLS) == (bundle.kl_in is not None)
    assert bundle.kl_in != "reward" or bundle.kl_kind == "k1"  # k1 is right in the reward, and useless as a loss


@pytest.mark.parametrize("kind", LOSSES)
def test_the_facts_of_a_loss_are_those_of_its_function(kind):
    entry, data = LOSSES[kind], batch()
    assert entry.replayed in ("no", "mild", "biased", "yes") and entry.why
    assert entry.clips is None or {"eps_low", "eps_high"} <= set(losses.loss_options(kind))
    silent = data | {"advantages_BT": torch.zeros_like(data["advantages_BT"]), "logprobs_BT": data["logprobs_BT"].requires_grad_()}
    loss, _ = losses.policy_loss(kind, **silent, **extras(kind, data))
    gradient_BT, = torch.autograd.grad(loss, silent["logprobs_BT"])
    assert gradient_BT.any() != entry.silent_at_zero


@pytest.mark.parametrize("kind", ADVANTAGES)
def test_the_facts_of_an_advantage_are_those_of_its_function(kind):
    entry, mask_BT = ADVANTAGES[kind], torch.ones(3, 1, dtype=torch.bool)
    rewards_B, groups_B = torch.tensor([0.5, 0.5, 0.7]), torch.tensor([0, 0, 1])
    rewards = rewards_B[:, None] if entry.per_token else rewards_B
    found_B1 = losses.compute_advantages(kind, rewards, groups_B, mask_BT, values_BT=torch.zeros(3, 1), whiten=False)
    assert (not found_B1.any()) == (entry.group_mean or kind == "reinforce++_baseline")
    assert not entry.group_mean or not entry.whitened  # the mean over the batch would make it something again


def args_with(algo, loss=None, **options):
    return Args(name="x", algo=algo, loss=loss, loss_options=options)


@pytest.mark.parametrize("flags, limits", [
    ({"algo": "grpo"}, (0.8, 1.2)), ({"algo": "ppo"}, (0.8, 1.2)), ({"algo": "dapo"}, (0.8, 1.28)), ({"algo": "cispo"}, (0.0, 5.0)),
    ({"algo": "dapo", "eps_low": 0.1}, (0.9, 1.28)), ({"algo": "grpo", "eps_high": 0.5}, (0.8, 1.5)),
    ({"algo": "gspo"}, (1 - 3e-4, 1 + 4e-4)), ({"algo": "one_side"}, (0.8, 1.2)),
    ({"algo": "grpo", "loss": "gspo"}, (1 - 3e-4, 1 + 4e-4)), ({"algo": "asymre"}, None), ({"algo": "m2po"}, None),
    ({"algo": "decoupled_ppo"}, None)])  # around the proximal policy, not around the one that sampled
def test_one_place_knows_the_clip_range(flags, limits):
    found = losses.clip_range(losses.objective_of(args_with(**flags)))
    assert found == limits if limits is None else found == pytest.approx(limits)


def test_the_share_of_clipped_tokens_is_of_the_losss_own_range():
    log_ratio_N = np.log([1.25, 1.0, 1.3, 0.7])
    share = lambda algo: clipped_share(losses.objective_of(args_with(algo=algo)), log_ratio_N)  # noqa: E731
    assert (share("grpo"), share("dapo"), share("cispo"), share("asymre")) == (0.75, 0.5, 0.0, None)
    assert share("gspo") == 1.0  # the whole sequence, whose mean ratio is far outside
    assert clipped_share(losses.objective_of(args_with(algo="gspo")), np.log([1.25, 0.8])) == 0.0  # and inside


def test_options_of_other_kinds_are_ignored_and_none_is_the_default():
    data = batch()
    assert (
        losses.policy_loss("reinforce", **data, eps_low=0.5, m2_budget=1.0)[0]
        == losses.policy_loss("reinforce", **data)[0]
    )
    assert losses.policy_loss("gspo", **data, eps_low=None)[1] == losses.policy_loss("gspo", **data)[1]
    assert losses.loss_options("gspo") == {"eps_low": 3e-4, "eps_high": 4e-4}


ONES = torch.ones(2, 3)
MASK = torch.ones(2, 3, dtype=torch.bool)
GROUPS = torch.zeros(2, dtype=torch.long)
BAD_NAN = torch.tensor([[0.0, 0, 0], [0, NAN, 0]])
ERRORS = {
    "unknown loss": (
        lambda: losses.policy_loss("ppo_clipp", ONES, ONES, ONES, MASK), "loss kind='ppo_clipp'.*did you mean ppo_clip"),
    "unknown advantage": (lambda: losses.compute_advantages("gpro", ONES[:, 0], GROUPS, MASK), "did you mean grpo"),
    "unknown KL": (lambda: losses.kl("k4", ONES, ONES), "KL kind='k4' is not one of"),
    "unknown correction": (
        lambda: losses.correction_weights("tis_tokens", ONES, ONES, MASK), "did you mean tis_token"),
    "unknown mode": (lambda: losses.aggregate(ONES, MASK, "token_meen"), "did you mean token_mean"),
    "unknown option": (
        lambda: losses.policy_loss("ppo_clip", ONES, ONES, ONES, MASK, eps_hihg=1.0), "did you mean eps_high"),
    "unknown level": (
        lambda: losses.policy_loss("is_reinforce", ONES, ONES, ONES, MASK, level="tokens"), "did you mean token"),
    "logprob shape": (
        lambda: losses.policy_loss("reinforce", ONES[:, :2], ONES, ONES, MASK), r"logprobs_BT has shape \(2, 2\)"),
    "behaviour shape": (
        lambda: losses.policy_loss("reinforce", ONES, ONES[:1], ONES, MASK),
        r"behavior_logprobs_BT has shape \(1, 3\), expected \(2, 3\)"),
    "behaviour missing": (
        lambda: losses.policy_loss("reinforce", ONES, None, ONES, MASK), "behavior_logprobs_BT.*missing"),
    "advantage shape": (
        lambda: losses.policy_loss("reinforce", ONES, ONES, ONES[:, 0], MASK), r"advantages_BT has shape \(2,\)"),
    "float mask": (lambda: losses.policy_loss("reinforce", ONES, ONES, ONES, ONES), "mask_BT must be a bool.*float32"),
    "mask rank": (lambda: losses.compute_advantages("grpo", ONES[:, 0], GROUPS, MASK[0]), r"mask_BT.*\(3,\)"),
    "NaN behaviour": (
        lambda: losses.policy_loss("reinforce", ONES, BAD_NAN, ONES, MASK), r"behavior_logprobs_BT.*rows \[1\]"),
    "NaN advantage": (lambda: losses.policy_loss("reinforce", ONES, ONES, BAD_NAN, MASK), r"advantages_BT.*rows \[1\]"),
    "groups missing": (lambda: losses.compute_advantages("grpo", ONES[:, 0], None, MASK), "needs group_ids_B.*missing"),
    "groups shape": (
        lambda: losses.compute_advantages("rloo", ONES[:, 0], GROUPS[:1], MASK), r"group_ids_B has shape \(1,\)"),
    "rewards rank": (
        lambda: losses.compute_advantages("grpo", ONES, GROUPS, MASK), r"rewards has shape \(2, 3\), expected \(2,\)",
    ),
    "rewards rank 2": (
        lambda: losses.compute_advantages("reinforce++", ONES[:, 0], None, MASK), r"rewards has shape \(2,\)"),
    "infinite reward": (
        lambda: losses.compute_advantages("grpo", torch.tensor([math.inf, 0]), GROUPS, MASK), "infinite.*0"),
    "lost reward": (
        lambda: losses.compute_advantages("reinforce++", ONES, None, mask_of([[1, 1, 1], [1, 1, 0]])), r"rows \[1\]"),
    "values missing": (lambda: losses.compute_advantages("gae", ONES, None, MASK), "needs values_BT"),
    "proximal missing": (
        lambda: losses.policy_loss("decoupled_ppo", ONES, ONES, ONES, MASK), "needs proximal_logprobs_BT"),
    "proximal unwanted": (
        lambda: losses.policy_loss("ppo_clip", ONES, ONES, ONES, MASK, proximal_logprobs_BT=ONES), "decoupled_ppo"),
    "reference missing": (lambda: losses.policy_loss("tba", ONES, ONES, ONES, MASK), "needs reference_logprobs_BT"),
    "rewards missing": (lambda: losses.policy_loss("sft_positive", ONES, ONES, ONES, MASK), "needs rewards_B"),
    "KL ratio missing": (lambda: losses.kl("is_k3", ONES, ONES), "needs ratio"),
    "KL shapes": (lambda: losses.kl("k3", ONES, ONES[:1]), r"reference has shape \(1, 3\)"),
    "ages missing": (lambda: losses.correction_weights("age_discount", ONES, ONES, MASK), "needs ages_B"),
    "max_length missing": (lambda: losses.aggregate(ONES, MASK, "constant"), "max_length"),
    "denominator": (
        lambda: losses.aggregate(ONES, MASK, "token_mean", denominator=0), "denominator must be > 0, got 0"),
    "weights shape": (
        lambda: losses.aggregate(ONES, MASK, "token_mean", weights_B=ONES), r"weights_B has shape \(2, 3\)"),
    "diagnostics shape": (lambda: measures.diagnostics(ONES, ONES[:1], ONES, MASK), "behavior_logprobs_BT has shape"),
    "old values missing": (lambda: value_loss(ONES, ONES, MASK, clip=0.2), "needs old_values_BT")}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_name_the_argument(case):
    call, message = ERRORS[case]
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("kind", CORRECTIONS)
def test_every_correction_runs_through_the_loss(kind):
    data = batch(dtype=torch.float32)
    loss, metrics = losses.policy_loss("reinforce", **data, correction=kind, ages_B=torch.arange(B))
    assert loss.isfinite() and loss.dtype == torch.float32
    assert ("correction_weight" in metrics) == (kind != "none") and all(
        type(value) is float for value in metrics.values()
    )


def test_a_reward_at_the_mean_of_its_group_is_exactly_silent():
    rewards_B, mask_BT = torch.tensor([-0.45, 0.0, -1.35, 0.0]), torch.ones(4, 1, dtype=torch.bool)
    for kind in ("grpo", "dr_grpo", "rloo"):
        found_B = losses.compute_advantages(kind, rewards_B, torch.zeros(4, dtype=torch.long), mask_BT)[:, 0]
        assert found_B[0] == 0.0 and found_B[1] == found_B[3] > 0 > found_B[2]
