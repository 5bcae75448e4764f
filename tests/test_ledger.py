"""The ledger against values by hand, and against what a real run left in its files."""
import json
from collections import Counter

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from conftest import train
from episode import Episode
from policies.tiny import tiny_config, tiny_tokenizer
from runtime.ledger import PHASES, Ledger, cost_ratio, matmul_parameters


def episode(prompt, turns, group):
    """`turns`: (sampled, observed) tokens of each."""
    mask = [False] * prompt + [token for sampled, observed in turns for token in [True] * sampled + [False] * observed]
    T = len(mask)
    return Episode(tokens=np.arange(T), action_mask=mask, behavior_logprobs=-np.array(mask, float), advantages=np.zeros(T),
                   turn_ends=[], turn_rewards=[], reward=0.0, score=0.0, problem_id=0, group_id=group, policy_step=0,
                   last_policy_step=0, iteration=1)


def test_tokens_by_hand():
    ledger = Ledger({}, parameters=100)
    a, b, c = episode(5, [(2, 3), (1, 0)], group=0), episode(5, [(4, 0)], group=0), episode(7, [(2, 0)], group=1)
    ledger.generated([a, b, c])
    ledger.settle()
    assert ledger.totals["tokens_generated"] == 3 + 4 + 2
    assert ledger.totals["tokens_read"] == (5 + 3) + 0 + 7  # the group's prompt is read once
    ratios = [np.zeros(11), None, np.zeros(9)]  # b had no signal and was not computed
    for first in (True, [False, True, True], False):
        ledger.trained([a, b, c], {"tokens_trained": 5, "tokens_computed": 20, "log_ratios": ratios}, first)
    ledger.settle()
    assert ledger.totals["episodes_trained"] == 9 and ledger.totals["episodes_computed"] == 6
    assert ledger.totals["tokens_trained"] == 15
    assert ledger.totals["tokens_trained_unique"] == (3 + 2) + 2 + 0
    scored = Counter(values=30, reference=10)
    ledger.scored(scored)
    ledger.scored(scored)  # taken over once
    ledger.settle()
    assert ledger.totals["tokens_scored_values"] == 30 and ledger.totals["tokens_scored_reference"] == 10
    assert ledger.flops() == {"generate": 2 * 100 * (9 + 15), "train": 6 * 100 * 60, "score": 2 * 100 * 40}
    assert Ledger(ledger.totals, 100, lora=True).flops()["train"] == 4 * 100 * 60
    assert Ledger(ledger.totals, 100, critic=True).flops()["train"] == 12 * 100 * 60
    assert Ledger(ledger.totals, 100, recompute=True).flops()["train"] == 8 * 100 * 60


def test_ratios_by_hand():
    """100 episodes in 50 s, 400 uses in 40 s: mu = 0.5/0.1 = 5, y = 4, gamma = (1 + 5/4)/(1 + 5), compute 400 + 5 x 100."""
    ledger = Ledger({}, parameters=1)
    ledger.totals |= {"episodes_generated": 100, "episodes_trained": 400}
    for _ in range(10):
        ledger.spent({"sample_s": 5.0, "fresh_s": 1.0, "replay_s": 3.0, "eval_s": 7.0})
    found = ledger.metrics()
    assert found["time/mu"] == pytest.approx(5) and found["cost/replay_ratio"] == 4
    assert found["time/gamma"] == pytest.approx(2.25 / 6) and found["time/compute"] == pytest.approx(900)
    assert found["time/trainer_idle_share"] == pytest.approx(50 / 90)  # while the other side works
    assert found["time/sampler_idle_share"] == pytest.approx(40 / 90)
    assert found["time/mu_counts"] is None and found["time/total_eval_s"] == 70


def test_side_by_side_the_estimator_from_counts_is_the_one_from_seconds_when_nobody_waits():
    """3 samplers and a trainer work all of 40 s: mu = 0.3 s x ... = (400/1)/(100/3) = 12, from seconds (120/100)/(40/400)."""
    ledger = Ledger({}, parameters=1, samplers=3)
    ledger.totals |= {"episodes_generated": 100, "episodes_trained": 400}
    ledger.spent({"sample_s": 0.0, "fresh_s": 0.0, "replay_s": 40.0}, busy=120.0, idle=0.0)
    found = ledger.metrics()
    assert found["time/mu"] == pytest.approx(12) == found["time/mu_counts"]
    assert found["time/gamma"] == pytest.approx((1 + 3 / 1) / (1 + 12))  # the paper's (1 + W/T)/(1 + mu)
    assert found["time/sampler_idle_share"] == found["time/trainer_idle_share"] == 0


def test_beside_samplers_a_trainer_that_evaluates_measures_or_saves_is_idle():
    """It trains 4 of 20 s; the estimator from counts would take all of them for training."""
    ledger = Ledger({}, parameters=1, samplers=1)
    laps = {"save_s": 3.0, "sample_s": 1.0, "fresh_s": 1.0, "replay_s": 3.0, "probe_s": 2.0, "eval_s": 10.0}
    ledger.spent(laps, busy=15.0, idle=5.0)
    found = ledger.metrics()
    assert (found["time/total_trainer_busy_s"], found["time/total_trainer_idle_s"]) == (4, 16)
    assert found["time/trainer_idle_share"] == 0.8 and found["time/total_save_s"] == 3
    alone = Ledger({}, parameters=1)
    alone.spent(laps)
    assert alone.metrics()["time/total_trainer_idle_s"] == 1 and alone.metrics()["time/total_sampler_idle_s"] == 4


@pytest.mark.parametrize("mu, costs", [(5.28, (1.274, 0.637, 0.425, 0.318, 0.212, 0.182)),
                                       (6.84, (1.020, 0.510, 0.340, 0.255, 0.170, 0.146))])
def test_gamma_is_that_of_the_papers_tables(mu, costs):
    """Table 3 prints 0.41 for (6, 2) at 0.6B, where its own captions and the formula have 0.51."""
    for (samplers, trainers), cost in zip([(7, 1), (6, 2), (5, 3), (4, 4), (2, 6), (1, 7)], costs):
        assert cost_ratio(mu, mu * trainers / samplers) == pytest.approx(cost, abs=6e-4)


def test_nothing_is_none_before_there_is_something():
    found = Ledger({}, parameters=1).metrics()
    assert all(found[key] is None for key in ("cost/replay_ratio", "time/mu", "time/gamma", "time/compute", "cost/mu_flops"))


def test_parameters_that_multiply():
    """4 layers: attention 128 x (128 + 64 + 64 + 128), MLP 3 x 128 x 512, two norms; a final norm; the output matrix."""
    tokenizer = tiny_tokenizer()
    model = LlamaForCausalLM(tiny_config(tokenizer))
    layer = 128 * (128 + 64 + 64 + 128) + 3 * 128 * 512 + 2 * 128
    assert matmul_parameters(model) == 4 * layer + 128 + 128 * len(tokenizer)
    model.lm_head.weight = model.model.embed_tokens.weight
    assert matmul_parameters(model) == 4 * layer + 128 + 128 * len(tokenizer)
    assert isinstance(model.lm_head.weight, torch.nn.Parameter)


def test_what_episodes_begin_with_alike_is_computed_once(tiny_folder):
    from judge import score, tokens_read
    from models import load_policy
    from settings import Args
    from update import make_learner
    policy, tokenizer = load_policy(tiny_folder)
    learner, rows = make_learner(Args(), policy), [episode(5, [(2, 3)], 0), episode(5, [(4, 0)], 0), episode(7, [(2, 0)], 1)]
    rows[2].tokens[:] = len(tokenizer) - 1
    assert tokens_read(learner, rows) == 10 + 0 + 9  # the second one's 9 tokens begin the first one's 10
    score(learner.policy, rows, learner, "probe")
    assert learner.scored == {"probe": 19}


def test_a_run_is_booked(tmp_path, quick_flags):
    """Buffer alone, R = 24 fresh episodes, K = 2 draws of B = 6: y = 12/24."""
    train(*quick_flags, "--fresh-update", "False", "--replay", "uniform", "--runs-dir", tmp_path, "--name", "x",
          "--iterations", 3, "--checkpoint-every", 1, "--keep-checkpoints", 1)
    lines = [json.loads(line) for line in (tmp_path / "x" / "metrics.jsonl").read_text().splitlines()]
    last = lines[-1]
    assert [line["cost/episodes_generated"] for line in lines] == [24, 48, 72]
    assert last["cost/episodes_trained"] == 36 and last["cost/replay_ratio"] == 0.5
    assert last["cost/episodes_computed"] == round(sum(12 * line["replay/nonzero_advantage_rows"] for line in lines)) < 36
    assert last["cost/tokens_trained"] == sum(line["replay/tokens_trained"] for line in lines)
    assert last["cost/tokens_trained_unique"] <= last["cost/tokens_trained"] < last["cost/tokens_computed"]
    assert last["cost/tokens_generated"] < last["tokens"] > last["cost/tokens_read"]
    assert last["cost/flops"] == last["cost/flops_generate"] + last["cost/flops_train"] and last["cost/flops_score"] == 0
    assert last["time/mu"] > 0 and last["time/compute"] > last["cost/episodes_trained"]
    assert last["time/iteration_s"] == pytest.approx(sum(last[f"time/{name}_s"] for name in PHASES if name != "probe"))
    assert lines[0]["time/save_s"] < lines[1]["time/save_s"] > 1e-3 and last["time/total_save_s"] == pytest.approx(
        sum(line["time/save_s"] for line in lines))  # each line has the writing of the one before
    [checkpoint] = (tmp_path / "x" / "checkpoints").iterdir()  # what a resumed run goes on from
    kept = json.loads((checkpoint / "state.json").read_text())["ledger"]
    assert all(kept[key.removeprefix("cost/")] == last[key] for key in last if key.startswith(("cost/tokens", "cost/episodes")))
