"""The pipeline as a discrete-event simulation, on the real buffer: what the compute model says of samplers and trainers that
work side by side. No model, no processes; times are random, means as in section 3 of arXiv 2604.08706."""
import heapq
import math
from collections import deque

import numpy as np
import pytest

from buffer import Episode, ReplayBuffer
from ledger import Ledger


def rollout(step: int, number: int) -> Episode:
    return Episode(tokens=[1], action_mask=[True], behavior_logprobs=[0.0], advantages=[1.0], turn_ends=[1], turn_rewards=[0.0],
                   reward=0.0, score=0.0, problem_id=0, group_id=number, policy_step=step, last_policy_step=step, iteration=0)


def simulate(mu, samplers, trainers, *, batch, capacity=None, queue=None, end=3000.0, noise=1.0, seed=0, shards=1) -> dict:
    """Samplers take mu on average for a rollout, `trainers` together batch/trainers for a step; gamma-distributed times of
    relative spread `noise`. With `capacity`: a buffer that is drawn from, in `shards`. Without: a queue of at most `queue`
    rollouts, each used once. What is returned holds the totals that a run's ledger has."""
    rng, step, number = np.random.default_rng(seed), 0, 0
    duration = lambda mean: mean * rng.gamma(1 / noise**2) * noise**2 if noise else mean  # noqa: E731
    buffers = [ReplayBuffer(capacity // shards, "uniform", seed=seed + place) for place in range(shards if capacity else 0)]
    waiting, ages = deque(), []
    idle, busy = {"sampler": 0.0, "trainer": 0.0}, {"sampler": 0.0, "trainer": 0.0}
    events = [(duration(mu), place, 0) for place in range(samplers)]  # (time, sampler or -1, step of its weights)
    heapq.heapify(events)
    blocked, trainer_since, trained = [], 0.0, 0  # blocked: (since, rollout) of samplers that wait for room

    def begin_step(now):
        """The trainer draws if it can; its step ends as an event of the heap."""
        nonlocal trainer_since, trained
        if buffers:
            if any(not buffer.ready(batch // shards, step) for buffer in buffers):
                return
            for buffer in buffers:
                ages.extend(buffer.sample(batch // shards, step).ages)
        else:
            if len(waiting) < batch:
                return
            ages.extend(step - waiting.popleft() for _ in range(batch))
            while blocked and len(waiting) < queue:
                since, born, place = blocked.pop(0)
                idle["sampler"] += now - since
                waiting.append(born)
                began(place, now)
        idle["trainer"] += now - trainer_since
        trained += batch
        spent = duration(batch / trainers)
        busy["trainer"] += spent
        trainer_since = math.inf  # at work
        heapq.heappush(events, (now + spent, -1, 0))

    def began(place, now):
        spent = duration(mu)
        busy["sampler"] += spent
        heapq.heappush(events, (now + spent, place, step))

    busy["sampler"] += sum(time for time, _, _ in events)
    while events[0][0] < end:
        now, place, born = heapq.heappop(events)
        if place < 0:
            step, trainer_since = step + 1, now
        else:
            number += 1
            if buffers:
                buffers[number % shards].add([rollout(born, number)], step)
                began(place, now)
            elif len(waiting) < queue:
                waiting.append(born)
                began(place, now)
            else:
                blocked.append((now, born, place))
        if trainer_since < math.inf:
            begin_step(now)
    counts = [buffer.counts for buffer in buffers]
    return {"generated": number, "trained": trained, "steps": step, "ages": np.array(ages), "busy": busy, "idle": idle,
            "buffers": buffers, "unused": sum(count["evicted_unused"] for count in counts) / max(1, sum(
                count["evicted"] for count in counts))}


def booked(found, samplers, trainers=1) -> dict:
    """The ledger's numbers of a simulated run."""
    ledger = Ledger({}, 1, samplers=samplers)
    ledger.totals |= {"episodes_generated": found["generated"], "episodes_trained": found["trained"]}
    ledger.spent({"sample_s": found["idle"]["trainer"], "fresh_s": 0.0, "replay_s": found["busy"]["trainer"]},
                 busy=found["busy"]["sampler"], idle=found["idle"]["sampler"])
    return ledger.metrics()


@pytest.mark.parametrize("samplers, trainers", [(7, 1), (6, 2), (4, 4)])
def test_where_nobody_waits_the_replay_ratio_is_mu_trainers_over_samplers(samplers, trainers):
    """Counts of rollouts vary by about sqrt(samplers end/mu); the bound is four standard errors of the log of their ratio."""
    mu, batch, end = 5.28, 60, 4000.0
    found = simulate(mu, samplers, trainers, batch=batch, capacity=252, end=end)
    y = found["trained"] / found["generated"]
    bound = 4 * math.sqrt(mu / (samplers * end) + batch / (trainers * end)) + batch / (trainers * end) * 4
    assert abs(math.log(y / (mu * trainers / samplers))) < bound
    numbers = booked(found, samplers)
    assert numbers["cost/replay_ratio"] == y
    assert numbers["time/mu_counts"] == pytest.approx(mu * trainers, rel=2 * bound)  # the trainers count as one here
    assert numbers["time/mu"] == pytest.approx(mu * trainers, rel=2 * bound)
    assert numbers["time/gamma"] == pytest.approx((1 + samplers) / (1 + mu * trainers), rel=2 * bound)  # (1 + W/T)/(1 + mu)
    assert numbers["time/trainer_idle_share"] < 0.05 and numbers["time/sampler_idle_share"] == 0


def test_ages_are_those_of_a_buffer_that_is_renewed_at_the_measured_rate():
    """With steps and rollouts of fixed length R = W/mu B/T rollouts come a step. Those that arrived during the last step were
    begun with the weights before it: ages are those of the synchronous loop, mean (N/R - 1)/2, plus one step, plus the
    mu T/B steps that a rollout takes."""
    mu, samplers, trainers, batch, capacity = 5.28, 6, 2, 60, 252
    found = simulate(mu, samplers, trainers, batch=batch, capacity=capacity, noise=0.0, end=4000.0)
    arriving = samplers / mu * batch / trainers  # R
    assert arriving == pytest.approx(34, abs=0.1)  # section 5.1 of the notes: (252, 34, 60)
    ages = found["ages"][len(found["ages"]) // 10:]
    horizon, lag = capacity / arriving, mu / (batch / trainers)
    assert ages.mean() == pytest.approx((horizon - 1) / 2 + 1 + lag, abs=0.1) and ages.min() == 1
    assert horizon <= ages.max() <= horizon + 1 + lag
    assert found["trained"] / found["generated"] == pytest.approx(1.765, abs=0.03)
    assert found["unused"] == pytest.approx((1 - batch / capacity) ** horizon, abs=0.02)  # 0.134 in the synchronous loop


def test_a_bounded_queue_stalls_the_faster_side_and_a_buffer_does_not():
    slow_trainer = simulate(2.0, 8, 1, batch=20, queue=40)  # four times as many rollouts as it can take
    numbers = booked(slow_trainer, 8)
    assert numbers["time/sampler_idle_share"] == pytest.approx(0.75, abs=0.05) and numbers["time/trainer_idle_share"] < 0.02
    assert slow_trainer["trained"] / slow_trainer["generated"] == pytest.approx(1, abs=0.05)  # each once
    assert 1 < slow_trainer["ages"].mean() < 3  # a full queue is two batches, and samplers do not run ahead of it
    slow_samplers = simulate(8.0, 2, 1, batch=20, queue=40, end=30000.0)  # a quarter of what it could take
    numbers = booked(slow_samplers, 2)
    assert numbers["time/trainer_idle_share"] == pytest.approx(0.75, abs=0.05) and numbers["time/sampler_idle_share"] < 0.01
    for mu, samplers in ((2.0, 8), (8.0, 2)):
        numbers = booked(simulate(mu, samplers, 1, batch=20, capacity=80), samplers)
        assert numbers["time/sampler_idle_share"] == 0 and numbers["time/trainer_idle_share"] < 0.05  # until it is filled
        assert numbers["cost/replay_ratio"] == pytest.approx(mu / samplers, rel=0.1)


def test_at_the_matched_ratio_a_buffer_absorbs_what_stalls_a_queue():
    """W/T = mu: a replay ratio of 1 in both; random times leave one side of a short queue waiting. 6,000 rollouts, 750 steps."""
    queue, buffer = (simulate(4.0, 4, 1, batch=8, end=6000.0, **kind) for kind in ({"queue": 8}, {"capacity": 64}))
    bound = 4 * math.sqrt(1 / 6000 + 1 / 750)
    assert queue["steps"] < 0.9 * buffer["steps"]
    assert booked(queue, 4)["time/trainer_idle_share"] > 0.1 > 0.01 > booked(buffer, 4)["time/trainer_idle_share"]
    assert buffer["trained"] / buffer["generated"] == pytest.approx(1, rel=bound)
    # the estimator from counts is right for the buffer; with idle time it is not, the one from seconds still is
    assert booked(buffer, 4)["time/mu_counts"] == pytest.approx(4, rel=bound)
    for found in (queue, buffer):
        assert booked(found, 4)["time/mu"] == pytest.approx(4, rel=bound)


@pytest.mark.slow
def test_shards_of_a_buffer_are_as_old_as_the_whole():
    whole, parts = (simulate(5.28, 6, 2, batch=60, capacity=252, shards=shards, end=6000.0) for shards in (1, 2))
    assert parts["ages"].mean() == pytest.approx(whole["ages"].mean(), rel=0.05)
    assert parts["unused"] == pytest.approx(whole["unused"], abs=0.03)
