"""The pipeline as a discrete-event simulation, on the real buffer: what the compute model says of samplers and trainers that
work side by side. No model, no processes; times are random, means as in section 3 of arXiv 2604.08706."""
import heapq
import math
from collections import deque

import numpy as np
import pytest

from buffer import ReplayBuffer
from episode import Episode
from runtime.ledger import Ledger


def rollout(step: int, number: int) -> Episode:
    return Episode(tokens=[1], action_mask=[True], behavior_logprobs=[0.0], advantages=[1.0], turn_ends=[1], turn_rewards=[0.0],
                   reward=0.0, score=0.0, problem_id=0, group_id=number, policy_step=step, last_policy_step=step, iteration=0)


def simulate(mu, samplers, trainers, *, batch, job, ahead=2, capacity=None, end=3000.0, noise=0.3, seed=0, shards=1,
             updates=1) -> dict:
    """Samplers take mu a rollout and send `job` of them at once, `trainers` together take batch/trainers for a step; gamma-
    distributed times of relative spread `noise`. As in the loop, at most samplers + `ahead` jobs are open (given out and not
    taken), and the trainer takes and gives out only between two iterations, which are `updates` steps. With `capacity`: all that
    arrived goes into a buffer that is drawn from, in `shards`. Without: one job an iteration. What is returned holds the totals
    of a run's ledger."""
    rng, step, trained, generated = np.random.default_rng(seed), 0, 0, 0
    duration = lambda mean: mean * rng.gamma(1 / noise**2) * noise**2 if noise else mean  # noqa: E731
    buffers = [ReplayBuffer(capacity // shards, "uniform", seed=seed + place) for place in range(shards if capacity else 0)]
    idle, ages, drawn = {"sampler": 0.0, "trainer": 0.0}, [], []
    # samplers at work, each at another place in its job, as after a while
    events = [(duration(mu * job) * (place + 1) / samplers, place, 0) for place in range(samplers)]
    heapq.heapify(events)  # (time, sampler or -1, step of its weights)
    arrived, free, jobs, since = deque(), deque(), ahead, 0.0  # free: (since, sampler); jobs: nobody's yet; since: trainer waits

    def begin(place, now):
        nonlocal jobs
        jobs -= 1
        heapq.heappush(events, (now + duration(mu * job), place, step))

    def train(now):
        for buffer in buffers:
            drawn.extend(buffer.sample(batch // shards, step).ages)
        heapq.heappush(events, (now + duration(batch / trainers), -1, 0))

    def look(now):
        """The trainer takes what arrived, gives out as many jobs and makes a step if it can."""
        nonlocal jobs, since
        taken = [arrived.popleft() for _ in range(len(arrived) if buffers else min(1, len(arrived)))]
        ages.extend(step - born for born in taken)
        jobs += len(taken)
        while jobs and free:
            waited, place = free.popleft()
            idle["sampler"] += now - waited
            begin(place, now)
        for shard, buffer in enumerate(buffers):
            for born in taken:
                buffer.add([rollout(born, number) for number in range(job)][shard::shards], step)
        if not all(buffer.ready(batch // shards, step) for buffer in buffers) if buffers else not taken:
            return
        idle["trainer"] += now - since
        since = math.inf  # at work
        train(now)

    while events[0][0] < end:
        now, place, born = heapq.heappop(events)
        if place < 0:
            step, trained = step + 1, trained + batch
            if step % updates:
                train(now)
            else:
                since = now
        else:
            generated += job
            arrived.append(born)
            if jobs:
                begin(place, now)
            else:
                free.append((now, place))
        if since < math.inf:
            look(now)
    idle["sampler"] += sum(end - waited for waited, _ in free)
    idle["trainer"] += max(0.0, end - since)
    counts = [buffer.counts for buffer in buffers]
    return {"generated": generated, "trained": trained, "steps": step, "arrival": np.array(ages), "drawn": np.array(drawn),
            "busy": {"sampler": samplers * end - idle["sampler"], "trainer": end - idle["trainer"]}, "idle": idle,
            "unused": sum(count["evicted_unused"] for count in counts) / max(1, sum(count["evicted"] for count in counts))}


def booked(found, samplers, trainers=1) -> dict:
    """The ledger's numbers of a simulated run."""
    ledger = Ledger({}, 1, samplers=samplers)
    ledger.totals |= {"episodes_generated": found["generated"], "episodes_trained": found["trained"]}
    ledger.spent({"sample_s": found["idle"]["trainer"], "fresh_s": 0.0, "replay_s": found["busy"]["trainer"]},
                 busy=found["busy"]["sampler"], idle=found["idle"]["sampler"])
    return ledger.metrics()


def settled(ages) -> np.ndarray:
    """Without the first tenth, where things start."""
    return ages[len(ages) // 10:]


PAPER = dict(batch=60, job=64, capacity=252)  # 4 problems of 16 rollouts a job, as in configs/openr1math_qwen25_7b_fifo.yaml


@pytest.mark.parametrize("samplers, trainers, waiting", [(7, 1, 0.02), (6, 2, 0.002), (4, 4, 0.002)])
def test_where_nobody_waits_the_replay_ratio_is_mu_trainers_over_samplers(samplers, trainers, waiting):
    """Jobs and steps are counted: the bound is four standard errors of the log of their ratio, and a job and two steps at the
    ends. Two jobs ahead are nearly enough for a trainer that looks once a step; with none each job waits for that look, evenly
    spread over a step."""
    mu, end, noise = 5.28, 12000.0, 0.1
    step, length = PAPER["batch"] / trainers, mu * PAPER["job"]
    bound = 4 * noise * math.sqrt(length / (samplers * end) + step / end) + (length + 2 * step) / end
    even = 4 / math.sqrt(3 * samplers * end / length)
    for ahead, idle in (2, None), (0, step / 2 / (length + step / 2)):
        found = simulate(mu, samplers, trainers, **PAPER, ahead=ahead, noise=noise, end=end)
        y, numbers = found["trained"] / found["generated"], booked(found, samplers)
        waits = numbers["time/sampler_idle_share"]
        assert waits == pytest.approx(idle, rel=even) if idle else waits < waiting
        assert numbers["time/trainer_idle_share"] < 0.01  # until the buffer is filled
        assert abs(math.log(y * (1 - waits) / (mu * trainers / samplers))) < bound
        assert numbers["cost/replay_ratio"] == y
        assert numbers["time/mu_counts"] == pytest.approx(mu * trainers / (1 - waits), rel=bound)  # trainers count as one here
        assert numbers["time/mu"] == pytest.approx(mu * trainers, rel=bound)
        if ahead:  # gamma is the paper's (1 + W/T)/(1 + mu)
            assert numbers["time/gamma"] == pytest.approx((1 + samplers) / (1 + mu * trainers), rel=2 * bound)
            assert settled(found["arrival"]).mean() == pytest.approx(1 + length / step, rel=0.03)  # docs/scaling.md


@pytest.mark.parametrize("job, ahead", [(64, 2), (16, 4)])
def test_ages_are_those_of_a_buffer_that_is_renewed_at_the_measured_rate(job, ahead):
    """With steps and jobs of fixed length R = W/mu B/T rollouts come a step. A job is taken by the first step that begins after
    it, and was begun with the weights of the last step that had ended: ages are those of the synchronous loop, mean (N/R - 1)/2,
    plus one step, plus the steps that a job takes."""
    mu, samplers, trainers, batch, capacity = 5.28, 6, 2, 60, 252
    found = simulate(mu, samplers, trainers, batch=batch, job=job, capacity=capacity, ahead=ahead, noise=0.0, end=12000.0)
    arriving = samplers / mu * batch / trainers  # R
    assert arriving == pytest.approx(34, abs=0.1)  # section 5.1 of the notes: (252, 34, 60)
    assert found["idle"]["sampler"] == 0
    horizon, lag = capacity / arriving, mu * job / (batch / trainers)
    arrival, drawn = settled(found["arrival"]), settled(found["drawn"])
    assert arrival.mean() == pytest.approx(1 + lag, abs=0.1) and set(arrival) == {math.ceil(lag), math.ceil(lag) + 1}
    assert drawn.mean() == pytest.approx((horizon - 1) / 2 + 1 + lag, abs=0.2)
    assert drawn.min() == math.ceil(lag) and horizon + lag - 1 <= drawn.max() <= horizon + lag + 1 + job / arriving
    assert found["trained"] / found["generated"] == pytest.approx(1.76, abs=0.02)
    assert found["unused"] == pytest.approx((1 - batch / capacity) ** horizon, abs=0.02)  # 0.134 in the synchronous loop


@pytest.mark.parametrize("updates, mu, arrival", [(1, 5.5, 6.5), (2, 5.5, 7), (4, 5.5, 8), (2, 1.2, 2.7)])
def test_age_on_arrival_by_the_steps_of_an_iteration(updates, mu, arrival):
    """Where nobody waits: a job takes mu R/B steps, half a step is gone since its weights, and it waits for half an iteration."""
    found = simulate(mu, 1, 1, batch=64, job=64, capacity=512, ahead=4, noise=0.1, updates=updates, end=6e4)
    assert found["idle"]["sampler"] < 0.01 * 6e4
    assert settled(found["arrival"]).mean() == pytest.approx(arrival, abs=0.15)  # docs/scaling.md
    assert settled(found["drawn"]).mean() == pytest.approx(arrival + (512 / 64 * mu - 1) / 2, rel=0.03)


def test_a_queue_stalls_the_faster_side_and_is_as_old_as_it_is_long():
    slow_trainer = simulate(2.0, 8, 1, batch=20, job=20, end=12000.0)  # four times as many rollouts as it can take
    numbers = booked(slow_trainer, 8)
    assert numbers["time/sampler_idle_share"] == pytest.approx(0.75, abs=0.02) and numbers["time/trainer_idle_share"] < 0.01
    assert 0 <= slow_trainer["generated"] - slow_trainer["trained"] <= (8 + 2 + 1) * 20  # each once; the rest is open
    assert 9 < settled(slow_trainer["arrival"]).mean() < 10.05  # W + Q
    even = simulate(2.0, 8, 1, batch=20, job=20, noise=0.0)
    assert set(settled(even["arrival"])) == {10}  # nobody overtakes
    slow_samplers = simulate(8.0, 2, 1, batch=20, job=20, end=30000.0)  # a quarter of what it could take
    numbers = booked(slow_samplers, 2)
    assert numbers["time/trainer_idle_share"] == pytest.approx(0.75, abs=0.02) and numbers["time/sampler_idle_share"] == 0
    assert slow_samplers["arrival"].mean() == pytest.approx(2, abs=0.2)  # W


@pytest.mark.parametrize("mu, samplers, ahead, waits", [
    (2.0, 8, 12, (0, 0.002)),   # four jobs come in a step: with two ahead half of the samplers run dry in many steps
    (2.0, 8, 2, (0.05, 0.15)),
    (8.0, 2, 2, (0, 0.002)),    # a quarter of a job in a step: with none ahead it waits for the trainer's look
    (8.0, 2, 0, (0.05, 0.08))])
def test_a_buffer_stalls_only_samplers_that_run_out_of_jobs_between_two_looks(mu, samplers, ahead, waits):
    found = simulate(mu, samplers, 1, batch=20, job=20, capacity=80, ahead=ahead, end=4000.0 if mu < 8 else 12000.0)
    numbers, share = booked(found, samplers), booked(found, samplers)["time/sampler_idle_share"]
    assert waits[0] <= share <= waits[1] and numbers["time/trainer_idle_share"] < 0.01  # until it is filled
    assert numbers["cost/replay_ratio"] == pytest.approx(mu / samplers / (1 - share), rel=0.08)


def test_at_the_matched_ratio_a_buffer_absorbs_what_stalls_a_queue():
    """W/T = mu: a replay ratio of 1 in both; random times leave one side of a short queue waiting. About 750 jobs and steps."""
    queue, buffer = (simulate(4.0, 4, 1, batch=8, job=8, end=6000.0, noise=1.0, **kind) for kind in ({}, {"capacity": 64}))
    bound = 4 * math.sqrt(2 / 750)
    assert queue["steps"] < 0.9 * buffer["steps"]
    assert booked(queue, 4)["time/trainer_idle_share"] > 0.08 > 0.01 > booked(buffer, 4)["time/trainer_idle_share"]
    assert booked(queue, 4)["time/sampler_idle_share"] > 0.12 > 0.06 > booked(buffer, 4)["time/sampler_idle_share"] > 0
    assert buffer["trained"] / buffer["generated"] == pytest.approx(1, rel=bound)
    for found in (queue, buffer):
        assert booked(found, 4)["time/mu"] == pytest.approx(4, rel=bound)


@pytest.mark.slow
def test_shards_of_a_buffer_are_as_old_as_the_whole():
    whole, parts = (simulate(5.28, 6, 2, **PAPER, shards=shards, end=12000.0) for shards in (1, 2))
    assert parts["drawn"].mean() == pytest.approx(whole["drawn"].mean(), rel=0.05)
    assert parts["unused"] == pytest.approx(whole["unused"], abs=0.03)
