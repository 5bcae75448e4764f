import heapq
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from look.planner import best_plan, main, objective, step_cost

TABLE = [  # mu, rho, alpha, x*, y* as the notes on the paper list them, each with the step of its last digit
    (1, 0.1, 0.1, 6.667, 2.000, 1e-3), (4, 0.1, 0.1, 12.871, 4.745, 1e-3), (4, 1, 0.1, 2.514, 1.692, 1e-3),
    (6.84, 1, 0.1, 2.77, 2.24, 1e-2), (6.84, 0.1, 0.1, 15.71, 6.46, 1e-2),
    (6.84, 0.1, 0.2, 4.80, 4.71, 1e-2), (5.28, 0.1, 0.1, 14.32, 5.58, 1e-2), (5.28, 1, 0.1, 2.65, 1.96, 1e-2)]
SETTINGS = [(mu, alpha, rho) for mu in (0.5, 1, 5.28) for alpha in (0.05, 0.2, 0.4) for rho in (0, 0.1, 1)]


@pytest.mark.parametrize("mu, rho, alpha, x, y, digit", TABLE)
def test_the_optimum_is_that_of_the_table(mu, rho, alpha, x, y, digit):
    assert best_plan(mu, alpha, rho) == (pytest.approx(x, abs=0.51 * digit), pytest.approx(y, abs=0.51 * digit))


def test_optimum_by_hand():
    """rho = 0: y = mu (1 - 2a)/(2a) = 4 * 0.8/0.2, and x = y^2/(2 a (mu + y)) = 256/(0.2 * 20)."""
    assert best_plan(4, 0.1, 0) == (pytest.approx(64, rel=1e-4), pytest.approx(16, rel=1e-4))
    assert best_plan(1e6, 1e-3, 0) == (pytest.approx(499e6**2 / (0.002 * 500e6), rel=1e-4), pytest.approx(499e6, rel=1e-4))


def test_objective_by_hand():
    assert objective(4, 2, mu=4, alpha=0.25, rho=0.5) == pytest.approx(2 * 1.5 * 1.25)  # (1 + 2/4) (1/2 + 1/4 + 1/2)
    for mu, alpha, rho in SETTINGS:  # the lemma, with 1/sqrt(mu) where the paper prints 1/mu
        x, a = 3.0, rho + 1 / 3
        assert objective(x, math.sqrt(mu / a), mu, alpha, rho) == pytest.approx(
            x ** (2 * alpha) * (1 / math.sqrt(mu) + math.sqrt(a)) ** 2)


def test_the_papers_own_form_of_x_with_the_discriminant_set_right():
    for mu, alpha, rho in [(5.28, 0.05, 0.1), (5.28, 0.05, 1), (5.28, 0.1, 1), (1, 0.05, 0.1)]:  # neither bound is met
        share = alpha / mu + rho * (1 - 2 * alpha)
        delta = 16 * alpha**2 / mu * (alpha**2 / mu + rho * (1 - 2 * alpha))
        x = (-4 * alpha * share + math.sqrt(delta)) / (8 * alpha**2 * rho * (1 / mu - rho))
        assert best_plan(mu, alpha, rho)[0] == pytest.approx(x, rel=1e-4)


@pytest.mark.parametrize("mu, alpha, rho", SETTINGS)
def test_no_point_of_a_grid_is_better(mu, alpha, rho):
    """On 400 x 400 points, 3.5 % apart in x and y: at the grid's best, both lie within two steps of the plan."""
    grid = np.exp(np.linspace(math.log(1e-2), math.log(1e4), 400))
    grid[np.abs(grid - 1).argmin()] = 1  # the bound of x
    x, y = np.meshgrid(grid, grid, indexing="ij")
    values = np.where((x >= 1) & (y <= x), objective(x, y, mu, alpha, rho), np.inf)
    best_x, best_y = best_plan(mu, alpha, rho)
    place = np.unravel_index(values.argmin(), values.shape)
    value = objective(best_x, best_y, mu, alpha, rho)
    assert value <= values.min() * (1 + 1e-9) and values.min() <= value * 1.002
    assert best_x >= 1 and best_y <= best_x < 1e4
    assert (x[place], y[place]) == (pytest.approx(best_x, rel=0.07), pytest.approx(best_y, rel=0.07))


@given(st.floats(-3, 3), st.floats(1e-3, 2), st.floats(0, 1), st.floats(0, 9), st.floats(0, 9))
@settings(max_examples=50, deadline=None)
def test_no_feasible_choice_is_better_than_the_plan(log_mu, alpha, rho, log_x, below):
    mu, x = math.exp(log_mu), math.exp(log_x)
    best = best_plan(mu, alpha, rho)
    assert best[0] >= 1 and best[1] <= best[0]
    assert objective(*best, mu, alpha, rho) <= objective(x, x * math.exp(-below), mu, alpha, rho) * (1 + 1e-9)


def test_bounds_by_hand():
    """At (4, 1/4, 1/4), y* = 2 is above x* = 4/3, so x = y with 0.375 x^2 + 1.5 x = 4. From alpha = 1/2 on, x = 1, and
    y = 1 where mu >= 1 + rho, else sqrt(mu/(1 + rho))."""
    x = (-1.5 + math.sqrt(2.25 + 6)) / 0.75
    assert best_plan(4, 0.25, 0.25) == (pytest.approx(x, rel=1e-4), pytest.approx(x, rel=1e-4))
    assert best_plan(4, 0.6, 0.2) == best_plan(1.2, 0.5, 0.2) == (1, 1)
    assert best_plan(0.3, 0.6, 0.2) == (1, pytest.approx(0.5))


@pytest.mark.parametrize("mu, costs", [(5.28, (1.274, 0.637, 0.425, 0.318, 0.212, 0.182)),
                                       (6.84, (1.020, 0.510, 0.340, 0.255, 0.170, 0.146))])  # 0.510: printed as 0.41
def test_step_costs_are_those_of_the_table(mu, costs):
    for (samplers, trainers), cost in zip([(7, 1), (6, 2), (5, 3), (4, 4), (2, 6), (1, 7)], costs):
        y = mu * trainers / samplers
        assert step_cost(mu, y) == pytest.approx(cost, abs=6e-4) == (1 + samplers / trainers) / (1 + mu)


def simulate(mu: float, samplers: int, trainers: int, end: float, seed: int) -> tuple[int, int]:
    """(rollouts generated, rollouts trained on counted at each use) until `end`, with a buffer that lets no side wait.
    Times are exponential: mean mu for a rollout of a sampler, 1 for one of a trainer."""
    rng = np.random.default_rng(seed)
    means = [mu] * samplers + [1.0] * trainers
    events = [(rng.exponential(mean), worker) for worker, mean in enumerate(means)]
    heapq.heapify(events)
    done = [0] * len(means)
    while events[0][0] < end:
        time, worker = events[0]
        done[worker] += 1
        heapq.heapreplace(events, (time + rng.exponential(means[worker]), worker))
    return sum(done[:samplers]), sum(done[samplers:])


@pytest.mark.parametrize("samplers, trainers", [(7, 1), (6, 2), (4, 4)])
def test_simulated_workers_reuse_as_the_compute_model_says(samplers, trainers):
    """Counts of workers with exponential times are Poisson: the log of their ratio has variance 1/mean + 1/mean."""
    mu, end = 5.28, 4000.0
    generated, trained = simulate(mu, samplers, trainers, end, seed=1)
    bound = 4 * math.sqrt(mu / (samplers * end) + 1 / (trainers * end))
    estimate = (trained / trainers) / (generated / samplers)  # of mu, from counts
    ratio = mu / (trained / generated)
    assert math.log(ratio / (samplers / trainers)) == pytest.approx(0, abs=bound)
    assert math.log(estimate / mu) == pytest.approx(0, abs=bound)


def printed(capsys, *words):
    main(list(map(str, words)))
    return capsys.readouterr().out


def test_plan_is_printed_to_two_decimals(capsys):
    text = printed(capsys, "--mu", 5.28, "--alpha", 0.1, "--rho", 0.1)
    assert "N/R 14.32 " in text and "B/R 5.58 " in text and "W/T 0.95 " in text
    assert "only these ratios" in text and "no saving can be predicted" in text


def test_bounds_are_said(capsys):
    text = printed(capsys, "--mu", 4, "--alpha", 0.25, "--rho", 0.25)
    assert "N/R 1.83 " in text and "B/R 1.83 " in text and "each batch is the whole buffer" in text
    text = printed(capsys, "--mu", 0.3, "--alpha", 0.6, "--rho", 0.2)
    assert "N/R 1.00 " in text and "Stay on-policy" in text and "at least 50% of the rollouts" in text
    assert "N/R is at its bound" in printed(capsys, "--mu", 1, "--alpha", 0.4, "--rho", 1)


@pytest.mark.parametrize("name, value", [("mu", 0), ("mu", -1), ("mu", math.nan), ("mu", math.inf), ("alpha", 0), ("alpha", -1),
                                         ("rho", 1.5), ("rho", math.nan)])
def test_wrong_numbers_are_refused(name, value, capsys, tmp_path):
    good = {"mu": 5, "alpha": 0.1, "rho": 0.1} | {name: value}
    run = made_run(tmp_path / "a")
    for given in (good, {"mu": 5, "alpha": 0.1} | {name: value, "from": run}):  # rho is not given: it is assumed
        with pytest.raises(SystemExit) as stop:
            main([word for key, number in given.items() for word in (f"--{key}", str(number))])
        assert stop.value.code == 2 and f"--{name} {value:g} must be" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------- from a run's records


def made_run(folder):
    """16 iterations of 10 new episodes, half of which are stored; each is trained on 4 times, a quarter of them with a signal."""
    folder.mkdir()
    (folder / "config.yaml").write_text("replay: uniform\nreplay_options: {unit: episode}\nproblems_per_iteration: 5\n"
                                        "group_size: 2\ncapacity: 60\n")
    lines = [{"iteration": i, "step": 2 * i, "buffer/added_total": 5 * i, "cost/episodes_trained": 40 * i,
              "cost/episodes_computed": 10 * i, "cost/replay_ratio": 4.0, "time/mu": 100 / i if i < 16 else 5.0,
              "time/gamma": 0.375} for i in range(1, 17)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_a_plan_from_a_runs_records_says_where_its_numbers_come_from(tmp_path, capsys):
    run = made_run(tmp_path / "a")
    text = printed(capsys, "--from", run, "--alpha", 0.1)
    x, y = best_plan(5, 0.1, 0.1)
    assert "mu 5.00: the run's time/mu" in text and "25% of what was trained on had a signal" in text
    assert "for each such episode mu is 1.25" in text
    assert "rho 0.1: assumed; rho 0 would" in text and "rho 1 would give N/R {:.2f} and B/R {:.2f}".format(
        *best_plan(5, 0.1, 1)) in text
    assert f"N/R {x:.2f} " in text and f"B/R {y:.2f} " in text
    assert "replay ratio B/R 4.00 (R: all that was generated), gamma 0.38" in text
    # half are stored: R = 2.5
    assert "capacity 60 and batches of 10 new episodes, N/R 24.00 in optimiser steps (R: what was stored)" in text
    log = run / "metrics.jsonl"
    log.write_text(log.read_text().replace("cost/episodes_computed", "other"))  # of older code
    assert "had a signal" not in printed(capsys, "--from", run, "--alpha", 0.1)
    text = printed(capsys, "--from", run, "--mu", 2, "--alpha", 0.2, "--rho", 1)
    assert text.splitlines()[1] == "mu 2, alpha 0.2, rho 1" and "assumed" not in text and "time/mu" not in text


def test_what_a_run_does_not_hold_is_asked_for(tmp_path, capsys):
    def refused(*words):
        with pytest.raises(SystemExit) as stop:
            main(list(map(str, words)))
        assert stop.value.code == 2
        return capsys.readouterr().err

    assert "--rho must be given, or --from" in refused("--mu", 5, "--alpha", 0.1)
    run = made_run(tmp_path / "a")
    assert "--alpha" in refused("--from", run)  # no run records what it would have to be read from
    assert "is no run" in refused("--from", tmp_path / "none", "--alpha", 0.1)
    for content in ("", '{"iteration": 1, "time/mu": null}\n'):
        (run / "metrics.jsonl").write_text(content)
        assert "has no time/mu" in refused("--from", run, "--alpha", 0.1)
    (run / "config.yaml").unlink()
    assert "it has no config.yaml" in refused("--from", run, "--mu", 3, "--alpha", 0.1)
