"""Comparison of runs: numbers of small synthetic runs that can be worked out by hand."""
import csv
import json
import re
import subprocess
import sys

import numpy as np
import pytest
import yaml
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from look import compare
from look.compare import CompareArgs, Run, grouped, holm, judge, middle, read_run, task_of, verdicts

CONFIG = {"name": "x", "seed": 0, "runs_dir": "runs", "wandb": "off", "env": "frozenlake", "env_options": {"size": "4"},
          "lr": 1e-3, "replay": "fresh", "replay_updates": 2, "iterations": 4}
FAMILIES = 4000  # of made scores a case: two standard errors of a share of 5 % are 0.7 %


def make_run(folder, evaluations, **config):
    """A run whose iteration i takes 10 episodes, trains on 20, takes 2 steps, 100 tokens, i seconds and 5 more to evaluate and
    save; an episode costs 3 times as much to sample as to train on. None is an iteration without evaluation."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(CONFIG | {"name": folder.name} | config, sort_keys=False))
    lines = [{"iteration": i, "episodes": 10 * i, "step": 2 * i, "tokens": 100 * i, "time/iteration_s": i + 5.0,
              "time/eval_s": 3.0, "time/save_s": 2.0, "time/mu": 9.0 if i < len(evaluations) else 3.0,
              "cost/episodes_generated": 10 * i, "cost/episodes_trained": 20 * i, "cost/flops": 1e9 * i,
              "fresh/reward": i / 10, "eval/success": value, "eval/start_success": 0.1}
             for i, value in enumerate(evaluations, start=1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def curve(x, y, seed=0, **config):
    return Run(f"run{seed}", CONFIG | {"seed": seed} | config, np.array(x, float), np.array(y, float))


# ---------------------------------------------------------------------------------------------------------- statistics


NULLS = {  # scores of seeds, and their mean
    "normal": (lambda rng, shape: rng.normal(0.6, 0.05, shape), 0.6),
    "skewed": (lambda rng, shape: rng.lognormal(0, 1, shape), np.exp(0.5)),
    "bounded": (lambda rng, shape: rng.binomial(256, rng.beta(8, 2, shape)) / 256, 0.8)}


@pytest.mark.parametrize("seeds", (5, 8, 10))
@pytest.mark.parametrize("kind", NULLS)
def test_false_verdicts_are_rare(kind, seeds):
    """Three arms and a baseline that are all the same: how often is any said to be better or worse? At most in 5.5 %, with the
    error of the share (two standard errors) added; and likewise for one arm."""
    draw, _ = NULLS[kind]
    families = draw(np.random.default_rng(seeds), (FAMILIES, 4, seeds))
    for arms in (1, 3):
        false = [any(sign for sign, _ in verdicts(list(family[1:1 + arms]), family[0])) for family in families]
        share = np.mean(false)
        assert share + 2 * np.sqrt(share * (1 - share) / FAMILIES) <= 0.055, (arms, share)


@pytest.mark.parametrize("seeds", (5, 8, 10))
def test_how_often_an_interval_holds_the_mean(seeds):
    """95 % for normal scores; docs/runs.md says what skewed ones have."""
    covered = {}
    for kind, (draw, truth) in NULLS.items():
        _, low, high = middle(draw(np.random.default_rng(seeds), (seeds, 10_000)))
        covered[kind] = np.mean((low <= truth) & (truth <= high))
    assert 0.94 < covered["normal"] < 0.96 and 0.80 < covered["skewed"] < 0.90 and 0.90 < covered["bounded"] < 0.96, covered


def test_a_real_difference_is_found():
    """Two standard deviations apart: with ten seeds nearly always, and the better one is named."""
    rng = np.random.default_rng(0)
    told = [verdicts([rng.normal(2, 1, 10), rng.normal(-2, 1, 10)], rng.normal(0, 1, 10)) for _ in range(100)]
    signs = np.array([[sign for sign, _ in pair] for pair in told])
    assert (signs[:, 0] == 1).mean() > 0.9 and (signs[:, 1] == -1).mean() > 0.9
    assert not (signs[:, 0] == -1).any() and not (signs[:, 1] == 1).any()


def test_verdicts_are_those_of_whole_samples():
    """scipy's own tests of the samples give the same p."""
    rng = np.random.default_rng(0)
    baseline, arms = rng.normal(0, 1, 6), [rng.normal(1.3, 2, 5), rng.normal(1.3, 1, 9), rng.normal(0, 1, 7)]
    p = holm(np.array([stats.ttest_ind(arm, baseline, equal_var=False).pvalue for arm in arms]))
    assert [why.split(",")[0] for _, why in verdicts(arms, baseline)] == [f"p {value:.2g}" for value in p]


def test_what_may_be_claimed():
    low, high = np.arange(5) / 100, 1 + np.arange(5) / 100
    (better, _), again = verdicts([high, low], low)
    assert better == 1 and again == (0, "p 1")
    assert verdicts([low], high)[0][0] == -1
    few, enough = verdicts([high[:4], high], low)
    assert few == (0, "4 and 5 seeds, a claim needs at least 5 each") and enough[0] == 1
    assert enough == verdicts([high], low)[0], "who has too few seeds is not corrected for"
    assert verdicts([high], low[:4])[0][0] == 0
    same = np.full(5, 0.7)
    assert verdicts([same, same + 0.1], same) == [(0, "p 1"), (1, "p 0")], "no spread is no error"


def test_the_means_alone_make_no_claim():
    """Welch's p is below 0.05, and by ranks 14 of the 252 orders of ten scores are as far apart."""
    arm, baseline = np.array([0.5, 0.8, 0.9, 1.4, 2.8]), np.array([-1.4, -1.3, -0.6, 0.2, 1.0])
    p = stats.ttest_ind(arm, baseline, equal_var=False).pvalue
    assert p < 0.05 and verdicts([arm], baseline) == [(0, f"p {p:.2g}, but 0.056 by ranks")]
    assert verdicts([arm, baseline, baseline], baseline)[0] == (0, f"p {3 * p:.2g}"), "three arms: a third of the level"


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


# ------------------------------------------------------------------------------------------------------------- reading


def test_what_the_axes_count(tmp_path):
    folder = make_run(tmp_path / "a", [0.2, None, 0.6])
    for x, places in (("episodes", [0, 10, 30]), ("steps", [0, 2, 6]), ("tokens", [0, 100, 300]), ("seconds", [0, 1, 1 + 2 + 3]),
                      ("flops", [0, 1e9, 3e9]), ("compute", [0, 20 + 3 * 10, 60 + 3 * 30])):
        run = read_run(folder, x, "eval/success")
        assert run.x.tolist() == places and run.y.tolist() == [0.1, 0.2, 0.6], x
    assert read_run(folder, "compute", "eval/success", mu=0.5).x.tolist() == [0, 25, 75]
    run = read_run(folder, "episodes", "fresh/reward")
    assert run.x.tolist() == [10, 20, 30] and run.y.tolist() == [0.1, 0.2, 0.3]  # no value before the first iteration


def test_runs_of_an_edited_line_are_another_group(tmp_path):
    """Ablations here are edits: the same config and other seeds, but one line of losses.py is another."""
    digests = {"buffer.py": "b" * 16, "losses.py": "1" * 16}
    for seed in range(4):
        folder = make_run(tmp_path / f"run{seed}", [0.2, 0.4], seed=seed)
        (folder / "code.json").write_text(json.dumps(digests | {"losses.py": "2" * 16} if seed > 1 else digests))
    groups, notes = grouped([read_run(tmp_path / f"run{seed}", "episodes", "eval/success") for seed in range(4)])
    assert {label: [run.config["seed"] for run in runs] for label, runs in groups.items()} == {
        "code losses.py=11111111": [0, 1], "code losses.py=22222222": [2, 3]}
    assert not notes
    (tmp_path / "run1" / "code.json").unlink()
    groups, notes = grouped([read_run(tmp_path / f"run{seed}", "episodes", "eval/success") for seed in range(2)])
    assert list(groups) == ["all runs"] and "do not say which code" in notes[0]


def test_options_that_only_some_runs_have_tell_them_apart(tmp_path):
    """A sweep of an option of a loss, beside a run of another loss that has no such option."""
    runs = [curve([0], [0], seed=0, loss="ppo_clip", **{"loss_options.eps_low": 0.2})]
    runs += [curve([0], [0], seed=seed, loss="soft_clip", **{"loss_options.width": width}) for seed, width in ((0, 0.3), (1, 0.5))]
    groups, notes = grouped(runs)
    assert [len(members) for members in groups.values()] == [1, 1, 1] and "all runs" not in groups
    assert not any("different versions" in note for note in notes)


def test_a_run_that_went_on_with_other_code_is_another_group(tmp_path):
    for seed, digest in enumerate(("1" * 16, "1" * 16 + "+" + "2" * 16, "2" * 16)):
        folder = make_run(tmp_path / f"run{seed}", [0.2, 0.4], seed=seed)
        (folder / "code.json").write_text(json.dumps({"losses.py": digest}))
    groups, _ = grouped([read_run(tmp_path / f"run{seed}", "episodes", "eval/success") for seed in range(3)])
    assert len(groups) == 3


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
    first, second = judge(groups, "short", start=0, end=20, target=0.75)
    assert first["final"] == pytest.approx((0.7 + 0.6) / 2) and second["final"] == pytest.approx((0.3 + 0.2) / 2)
    assert first["best"] == pytest.approx((0.7 + 0.6) / 2) and second["best"] == pytest.approx((0.4 + 0.2) / 2)
    assert first["area"] == pytest.approx((0.3 + 0.1) / 2) and second["area"] == pytest.approx((0.25 + 0.15) / 2)
    assert (first["final_low"], first["final_high"]) == pytest.approx((0.65 - 12.706 * 0.05, 0.65 + 12.706 * 0.05), abs=1e-4)
    assert (first["reached"], first["time_to_target"]) == (2, 40) and (second["reached"], second["time_to_target"]) == (1, np.inf)
    assert first["probability"] == 1.0 and "no claim: 2 and 2 seeds" in first["verdict"]
    assert first["difference"] == pytest.approx(0.4) and second["verdict"] == "no claim: it is the baseline"


def test_differences_pair_the_runs_of_a_seed():
    """Each seed gains 0.1, whatever the order; other seeds have no pairs."""
    a = [curve([0], [0.1 * seed], seed) for seed in (2, 0, 1)]
    b = [curve([0], [0.1 * seed + 0.1], seed) for seed in (0, 1, 2)]
    _, row = judge({"a": a, "b": b}, "a", 0, 0)
    assert [row[f"difference{end}"] for end in ("", "_low", "_high")] == pytest.approx([0.1] * 3)
    _, row = judge({"a": a, "b": b[:2]}, "a", 0, 0)
    assert row["difference"] == pytest.approx(0.05) and np.isnan(row["difference_low"])


def test_what_is_saved_is_counted_at_a_score_that_both_reach():
    """0.5 after 30 instead of 40: a quarter is saved; the other way round a third more is spent; 0.8 is reached by one only."""
    groups = {"a": [curve([0, 30, 40], [0, 0.5, 0.6])], "b": [curve([0, 40], [0, 0.9])]}
    assert [row["saved"] for row in judge(groups, "b", 0, 40, target=0.5)] == pytest.approx([0.25, 0])
    assert [row["saved"] for row in judge(groups, "a", 0, 40, target=0.5)] == pytest.approx([0, -1 / 3])
    rows = judge(groups, "b", 0, 40, target=0.8)
    assert np.isnan(rows[0]["saved"])
    text = compare.markdown(rows, "b", [], CompareArgs(runs=(), target=0.8, x="steps"), 40)
    assert "saved of B's |" in text and "| n/a; 0 of 1 | n/a |" in text and "| 40; 1 of 1 | 0% |" in text


# -------------------------------------------------------------------------------------------------------- command line


def test_a_comparison_from_the_command_line(tmp_path, capsys):
    for seed in range(5):
        make_run(tmp_path / f"fresh{seed}", [0.3, None, 0.8 + seed / 100, 0.9], seed=seed)
        make_run(tmp_path / f"none{seed}", [0.2, None, 0.5 + seed / 100], seed=seed, replay="none", replay_updates=0)
    (tmp_path / "broken").mkdir()
    compare.main([*map(str, sorted(tmp_path.glob("*"))), "--target", "0.8", "--baseline", str(tmp_path / "none3"),
                  "--out", str(tmp_path / "out")])
    text = capsys.readouterr().out
    assert f"skipped {tmp_path / 'broken'}: not a run" in text and "judged up to 30 episodes, where the shortest run" in text
    assert "| A | replay=fresh | 5 | 0.820 (" in text and "| 30; 5 of 5 |" in text and "| n/a; 0 of 5 |" in text
    assert "| 0.300 (0.300 to 0.300) | 1.000 | A is better (p " in text and "at the end, minus B" in text
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


@pytest.mark.parametrize("kind", NULLS)
def test_the_command_line_gives_the_verdicts_that_are_measured(tmp_path, capsys, kind):
    """Run folders of scores that are all drawn alike, judged by the function whose false verdicts are counted above."""
    draw, _ = NULLS[kind]
    scores = draw(np.random.default_rng(3), (3, 5))
    for arm, rate in zip(scores, (0.1, 0.2, 0.3)):
        for seed, score in enumerate(arm):
            make_run(tmp_path / f"{rate}_{seed}", [float(score)], seed=seed, lr=rate)
    compare.main([*map(str, sorted(tmp_path.glob("*"))), "--out", str(tmp_path / "out")])
    text = capsys.readouterr().out
    for letter, (sign, why) in zip("BC", verdicts(list(scores[1:]), scores[0])):
        verdict = f"{letter if sign > 0 else 'A'} is better ({why})" if sign else f"no claim: {why}"
        assert re.search(rf"^\| {letter} \| .*\| {re.escape(verdict)} \|$", text, re.MULTILINE)


def test_compute_is_priced_by_each_runs_clock_or_by_a_given_mu(tmp_path, capsys):
    make_run(tmp_path / "a", [0.2, 0.5])
    compare.main([str(tmp_path / "a"), "--x", "compute", "--out", str(tmp_path / "out")])
    assert "judged up to 100 episodes' training costs" in (text := capsys.readouterr().out) and "mu 3 to 3" in text  # 40 + 3 * 20
    compare.main([str(tmp_path / "a"), "--x", "compute", "--mu", "6", "--out", str(tmp_path / "out")])
    assert "judged up to 160" in (text := capsys.readouterr().out) and "priced at 6 times" in text


def test_help_and_imports_stay_quick():
    """scipy is not there before something is judged."""
    code = "import look.compare, sys; print('torch' in sys.modules, 'scipy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"


def test_one_seed_has_no_interval(tmp_path, capsys):
    compare.main([str(make_run(tmp_path / "a", [0.2, 0.5])), "--out", str(tmp_path / "out")])
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
    (run / "metrics.jsonl").write_text(text.replace("cost/flops", "cost/other").replace("time/mu", "time/other"))
    message = refused(capsys, run, "--x", "flops")
    assert "no cost/flops" in message and str(run) in message
    assert "no time/mu" in refused(capsys, run, "--x", "compute") and "above 0" in refused(capsys, run, "--x", "compute", "--mu", 0)
    assert "--mu prices sampling" in refused(capsys, run, "--mu", 5) and "no run" in refused(capsys, run, "--baseline", other)
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
