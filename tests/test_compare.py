"""Comparison of runs: numbers of small synthetic runs that can be worked out by hand."""
import csv
import itertools
import json

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from look import compare
from look.compare import (CompareArgs, Run, bootstrap_interval, grouped, interquartile_mean, judge, probability_of_improvement,
                          read_run, spread, task_of, verdict)

CONFIG = {"name": "x", "seed": 0, "runs_dir": "runs", "wandb": "off", "env": "frozenlake", "env_options": {"size": "4"},
          "lr": 1e-3, "replay": "fresh", "replay_updates": 2, "iterations": 4}


def make_run(folder, evaluations, **config):
    """A run whose iteration i takes 10 episodes, 2 steps, 100 tokens, i seconds; None is an iteration without evaluation."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(CONFIG | {"name": folder.name} | config, sort_keys=False))
    lines = [{"iteration": i, "episodes": 10 * i, "step": 2 * i, "tokens": 100 * i, "time/iteration_s": float(i),
              "cost/flops": 1e9 * i, "fresh/reward": i / 10, "eval/success": value, "eval/start_success": 0.1}
             for i, value in enumerate(evaluations, start=1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def curve(x, y, seed=0, **config):
    return Run(f"run{seed}", CONFIG | {"seed": seed} | config, np.array(x, float), np.array(y, float))


# ---------------------------------------------------------------------------------------------------------- statistics


@given(st.lists(st.integers(-50, 50), min_size=1, max_size=13))
def test_the_interquartile_mean_drops_a_quarter_on_each_side(values):
    kept = list(values)
    for _ in range(len(values) // 4):
        kept.remove(max(kept))
        kept.remove(min(kept))
    assert interquartile_mean(np.array(values, float)) == pytest.approx(sum(kept) / len(kept))
    both = np.array([values, values[::-1]], float).T
    assert interquartile_mean(both) == pytest.approx([sum(kept) / len(kept)] * 2)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=6), st.lists(st.integers(0, 4), min_size=1, max_size=6))
def test_the_probability_of_improvement_counts_pairs(a, b):
    expected = sum(1.0 if x > y else 0.5 if x == y else 0.0 for x in a for y in b) / (len(a) * len(b))
    there = probability_of_improvement(np.array(a, float), np.array(b, float))
    back = probability_of_improvement(np.array(b, float), np.array(a, float))
    assert there == pytest.approx(expected) and there + back == pytest.approx(1)


def test_the_bootstrap_is_the_distribution_of_all_resamples():
    values = np.array([0.0, 0.1, 0.4, 1.0])
    means = np.array([np.mean(draw) for draw in itertools.product(values, repeat=4)])  # all 256, each as likely
    low, high = bootstrap_interval(values, draws=20_000)
    for end, share in ((low, 0.025), (high, 0.975)):  # the end is a quantile of the exact distribution
        assert (means < end - 1e-9).mean() <= share + 0.01 and (means <= end + 1e-9).mean() >= share - 0.01
    assert bootstrap_interval(values) == bootstrap_interval(values), "the seed is fixed"
    assert np.isnan(bootstrap_interval(np.array([0.3]))).all()
    assert np.isnan(bootstrap_interval(np.array([0.3]), values, statistic=probability_of_improvement)).all()


def test_the_bootstrap_of_two_groups_draws_both_anew():
    a, b = np.array([1.0, 3.0]), np.array([2.0, 0.0])
    exact = [probability_of_improvement(np.array(x), np.array(y)) for x in itertools.product(a, repeat=2)
             for y in itertools.product(b, repeat=2)]
    low, high = bootstrap_interval(a, b, statistic=probability_of_improvement)
    assert (low, high) == (min(exact), max(exact)) == (0.0, 1.0)


# -------------------------------------------------------------------------------------------------------------- curves


def test_a_curve_keeps_its_value_until_the_next_point():
    run = curve([0, 10, 30], [0.1, 0.5, 0.4])
    assert run.at([0, 9.9, 10, 29, 30, 50]).tolist() == [0.1, 0.1, 0.5, 0.5, 0.4, 0.4]
    assert run.area(0, 30) == pytest.approx((10 * 0.1 + 20 * 0.5) / 30)
    assert run.area(5, 20) == pytest.approx((5 * 0.1 + 10 * 0.5) / 15)
    assert np.isnan(run.area(7, 7))
    assert run.scores(0, 20, target=0.5) == {"final": 0.5, "best": 0.5, "area": pytest.approx(0.3), "time_to_target": 10.0}
    assert run.scores(20, 30, target=0.6) == {"final": 0.4, "best": 0.5, "area": pytest.approx(0.5), "time_to_target": np.inf}
    with pytest.raises(AssertionError, match="no value at -1"):
        run.at([-1])


def test_several_points_at_one_place_leave_the_last():
    assert curve([0, 2, 2], [0.1, 0.3, 0.7]).at(2) == 0.7  # iterations that took no optimiser step


@given(st.lists(st.floats(0, 1), min_size=2, max_size=8), st.integers(0, 10**6))
def test_the_area_is_the_mean_of_the_curve(heights, seed):
    rng = np.random.default_rng(seed)
    run = curve(np.cumsum(rng.integers(1, 5, len(heights))), heights)
    low, high = run.x[0], run.x[-1] + 3
    fine = np.arange(low, high, 0.25)  # all corners are on this grid
    assert run.area(low, high) == pytest.approx(run.at(fine).mean())


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6))
def test_labels_are_spread_in_their_order(heights):
    placed = np.array(spread(heights, gap=0.1))
    order = np.argsort(heights, kind="stable")
    assert (np.diff(placed[order]) > 0.1 - 1e-3).all()
    assert sum(placed) == pytest.approx(sum(heights))


# ------------------------------------------------------------------------------------------------------------- reading


def test_what_the_axes_count(tmp_path):
    folder = make_run(tmp_path / "a", [0.2, None, 0.6])
    for x, places in (("episodes", [0, 10, 30]), ("steps", [0, 2, 6]), ("tokens", [0, 100, 300]), ("seconds", [0, 1, 1 + 2 + 3]),
                      ("compute", [0, 1e9, 3e9])):
        run = read_run(folder, x, "eval/success")
        assert run.x.tolist() == places and run.y.tolist() == [0.1, 0.2, 0.6], x
    run = read_run(folder, "episodes", "fresh/reward")
    assert run.x.tolist() == [10, 20, 30] and run.y.tolist() == [0.1, 0.2, 0.3]  # no value before the first iteration


def test_a_line_that_was_cut_is_dropped(tmp_path):
    folder = make_run(tmp_path / "a", [0.2, 0.5, 0.6])
    text = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(text[:-30])
    assert read_run(folder, "episodes", "eval/success").y.tolist() == [0.1, 0.2, 0.5]


def test_settings_group_runs_and_the_seed_does_not(tmp_path):
    runs = [curve([0], [0], seed=0), curve([0], [0], seed=1, name="other", wandb="on"),
            curve([0], [0], seed=0, replay="none", replay_updates=0), curve([0], [0], seed=0, lr=0.1), curve([0], [0], seed=1)]
    groups, notes = grouped(runs)
    assert {label: [run.config["seed"] for run in members] for label, members in groups.items()} == {
        "lr=0.001, replay=fresh": [0, 1], "lr=0.001, replay=none": [0], "lr=0.1, replay=fresh": [0]}
    assert "lr=0.001, replay=none goes with replay_updates=0" in notes
    assert any("skipped run1" in note and "the settings and the seed are those of" in note for note in notes)
    older = curve([0], [0], seed=3)
    del older.config["lr"]
    assert any("different versions: lr" in note for note in grouped([runs[0], older])[1])
    assert list(grouped(runs[:2])[0]) == ["all runs"]


def test_the_prompt_is_no_part_of_the_task():
    other = CONFIG | {"env_options": {"size": "4", "prompt": "tiny"}}
    assert task_of(CONFIG) == task_of(other) != task_of(CONFIG | {"env_options": {"size": "5"}})
    assert task_of(CONFIG) != task_of(CONFIG | {"env": "sokoban"})


# ------------------------------------------------------------------------------------------------------------- judging


def test_groups_are_judged_where_the_shortest_run_ends():
    groups = {"long": [curve([0, 10, 20, 40], [0.1, 0.5, 0.7, 0.9], 0), curve([0, 20, 40], [0.1, 0.6, 0.8], 1)],
              "short": [curve([0, 10, 20], [0.1, 0.4, 0.3], 0), curve([0, 10, 30], [0.1, 0.2, 0.8], 1)]}
    rows, pairs = judge(groups, CompareArgs(runs=(), target=0.75), start=0, end=20)
    first, second = rows
    assert first["final"] == pytest.approx((0.7 + 0.6) / 2) and second["final"] == pytest.approx((0.3 + 0.2) / 2)
    assert first["best"] == pytest.approx((0.7 + 0.6) / 2) and second["best"] == pytest.approx((0.4 + 0.2) / 2)
    assert first["area"] == pytest.approx((0.3 + 0.1) / 2) and second["area"] == pytest.approx((0.25 + 0.15) / 2)
    assert (first["final_low"], first["final_high"]) == pytest.approx((0.6, 0.7))  # of two seeds: both ends are resamples
    assert (first["reached"], first["time_to_target"]) == (2, 40) and (second["reached"], second["time_to_target"]) == (1, np.inf)
    pair, = pairs
    assert pair["probability"] == 1.0 and "no claim: 2 and 2 seeds" in pair["verdict"]


def row(seeds, low, high, group="A"):
    return {"group": group, "seeds": seeds, "final_low": low, "final_high": high}


def test_what_is_saved_is_counted_at_a_score_that_both_reach():
    """0.5 after 30 instead of 40: a quarter is saved; the other way round a third more is spent; 0.8 is reached by one only."""
    groups = {"a": [curve([0, 30, 40], [0, 0.5, 0.6])], "b": [curve([0, 40], [0, 0.9])]}
    [pair] = judge(groups, CompareArgs(runs=(), target=0.5), start=0, end=40)[1]
    assert pair["saved"] == pytest.approx(0.25)
    [pair] = judge(dict(reversed(groups.items())), CompareArgs(runs=(), target=0.5), start=0, end=40)[1]
    assert pair["saved"] == pytest.approx(-1 / 3)
    rows, [pair] = judge(groups, CompareArgs(runs=(), target=0.8), start=0, end=40)
    assert np.isnan(pair["saved"])
    assert "optimiser steps that the first saves on the way to 0.8 |" in (
        text := compare.markdown(rows, [pair], [], CompareArgs(runs=(), target=0.8, x="steps"), 40)) and text.count("| n/a |") == 1


def test_what_may_be_claimed():
    a, b = row(5, 0.8, 0.9), row(5, 0.5, 0.7, "B")
    assert verdict(a, b, 0.9, 1.0) == "A is better" and verdict(b, a, 0.0, 0.1) == "A is better"
    assert verdict(a, row(5, 0.5, 0.85, "B"), 0.6, 1.0) == "A is better, though the intervals of the final scores overlap"
    assert verdict(a, b, 0.5, 1.0).startswith("no claim: the interval holds 0.5")
    assert verdict(row(4, 0.8, 0.9), b, 0.9, 1.0) == "no claim: 4 and 5 seeds, a claim needs at least 5 each"


# -------------------------------------------------------------------------------------------------------- command line


def test_a_comparison_from_the_command_line(tmp_path, capsys):
    for seed in range(5):
        make_run(tmp_path / f"fresh{seed}", [0.3, None, 0.8 + seed / 100, 0.9], seed=seed)
        make_run(tmp_path / f"none{seed}", [0.2, None, 0.5 + seed / 100], seed=seed, replay="none", replay_updates=0)
    (tmp_path / "broken").mkdir()
    compare.main([*map(str, sorted(tmp_path.glob("*"))), "--target", "0.8", "--out", str(tmp_path / "out")])
    text = capsys.readouterr().out
    assert f"skipped {tmp_path / 'broken'}: not a run" in text and "judged up to 30 episodes, where the shortest run" in text
    assert "| A | replay=fresh | 5 | 0.820 (" in text and "| 30; 5 of 5 |" in text and "| n/a; 0 of 5 |" in text
    assert "| A over B | 1.000 (1.000 to 1.000) | A is better |" in text
    assert text.startswith((tmp_path / "out" / "comparison.md").read_text())
    with open(tmp_path / "out" / "comparison.csv") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["final"]) for row in rows] == pytest.approx([0.82, 0.52])
    # fresh: 0.1 until 10, 0.3 until 30, where it is judged
    assert [float(row["area"]) for row in rows] == pytest.approx([(10 * 0.1 + 20 * 0.3) / 30, (10 * 0.1 + 20 * 0.2) / 30])
    with open(tmp_path / "out" / "runs.csv") as file:
        assert [float(row["last_y"]) for row in csv.DictReader(file)][:5] == [0.9] * 5
    assert (tmp_path / "out" / "comparison.png").stat().st_size > 10_000
    assert (tmp_path / "out" / "comparison.svg").read_text().rstrip().endswith("</svg>")


def test_one_seed_has_no_interval(tmp_path, capsys):
    compare.main([str(make_run(tmp_path / "a", [0.2, 0.5])), "--out", str(tmp_path / "out"), "--statistic", "iqm"])
    text = capsys.readouterr().out
    assert "| A | all runs | 1 | 0.500 | 0.500 | 0.150 |" in text and "nan" not in text and "no claim can be made" in text


def refused(capsys, *words):
    with pytest.raises(SystemExit) as stop:
        compare.main([str(word) for word in words])
    assert stop.value.code == 2
    return capsys.readouterr().err


def test_what_cannot_be_compared_says_why(tmp_path, capsys):
    run = make_run(tmp_path / "a", [0.2, 0.5])
    other = make_run(tmp_path / "b", [0.2, 0.5], env_options={"size": "8"})
    message = refused(capsys, run, other)
    assert all(word in message for word in (str(run), str(other), "size=4", "size=8", "different tasks"))
    assert "did you mean eval/success?" in refused(capsys, run, "--y", "eval/sucess")
    assert "no such folder" in refused(capsys, tmp_path / "none") and "two or more" in refused(capsys)
    without = make_run(tmp_path / "c", [None, None])
    assert "no eval/success yet" in refused(capsys, without)
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(text.replace("cost/flops", "cost/other"))
    message = refused(capsys, run, "--x", "compute")
    assert "no cost/flops" in message and str(run) in message
    (run / "config.yaml").write_text("a: {")
    assert "config.yaml cannot be read" in refused(capsys, run)
    (other / "metrics.jsonl").unlink()
    assert "no metrics yet" in refused(capsys, other)
    assert "episodes" in refused(capsys, without, "--x", "epochs")


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 400))
def test_a_file_that_is_cut_anywhere_is_read_or_skipped_by_name(tmp_path_factory, cut):
    folder = make_run(tmp_path_factory.mktemp("cut") / "a", [0.2, 0.5])
    text = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(text[:cut])
    whole = text[:cut].count("}")
    if whole:
        assert len(read_run(folder, "episodes", "eval/success").y) == 1 + whole  # and the start
    else:
        with pytest.raises(ValueError, match="no metrics yet"):
            read_run(folder, "episodes", "eval/success")
