import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from look import replay as replay_plots
from look.replay import age_edges_of, drift, edges_of, grouped, is_whole, main, series
from runtime.files import read_lines


def a_line(iteration, ages=(0, 3, 6), tau=30.0, alpha=0.6, drawn=((0, 3, 6), (0.1, 0.2, 0.3))):
    """A line of replay.jsonl: entries of `ages`, and draws of (ages, KLs)."""
    ages, (drawn_ages, kls) = list(ages), drawn
    n = len(drawn_ages)
    return {"iteration": iteration, "step": 3 * iteration, "tau": tau, "alpha": alpha, "age_unit": "step",
            "buffer": {"age": ages, "count": [2] * len(ages), "priority": [0.5 + 0.1 * place for place in range(len(ages))],
                       "mass": [1 / max(1, len(ages))] * len(ages)},
            "uses": [1, 2, 0, 0, 0, 0, 0, 0, 3],
            "drawn": {"age": list(drawn_ages), "weight": [1.0] * n, "ratio": [1.1] * n, "clip_fraction": [0.25] * n,
                      "kl": list(kls), "signal": [1] * n}}


def write(run, replay, metrics=(), end=""):
    run.mkdir(exist_ok=True)
    (run / "replay.jsonl").write_text("".join(json.dumps(line) + "\n" for line in replay) + end)
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics) + end)
    return run


@given(st.lists(st.integers(0, 10**6), min_size=1), st.integers(1, 60), st.integers(1, 9))
def test_edges_hold_every_value_in_few_equal_bins(values, most, multiple):
    edges = edges_of(values, most, multiple)
    assert edges[0] == min(values) and edges[-1] > max(values) >= edges[-2]
    assert 1 <= len(edges) - 1 <= most and len(set(np.diff(edges))) == 1 and (edges[1] - edges[0]) % multiple == 0


def test_ages_are_counted_in_whole_iterations():
    """Three steps an iteration: draws of age 1 and 2 belong to what is held at age 3 when the iteration ends."""
    assert age_edges_of([a_line(9, ages=(3, 6, 9))], [1, 9], 20).tolist() == [1, 4, 7, 10]
    assert age_edges_of([a_line(9, ages=(3, 6, 9))], [1, 9], 2).tolist() == [1, 7, 13]
    assert age_edges_of([a_line(9, ages=())], [1, 3], 20).tolist() == [1, 2, 3, 4]


def test_grouped_by_hand():
    rows = grouped(np.array([0, 1, 1, 4, 5]), np.array([1.0, 2, 6, 10, math.nan]), np.array([0, 2, 4, 6]))
    assert rows[:, 0].tolist() == [0.5, 4.5]  # no row for the empty bin, and no NaN in the last
    np.testing.assert_allclose(rows[:, 1], [3, 10])
    np.testing.assert_allclose(rows[0, 2:], [1.2, 5.2])  # percentiles of 2, 6 and 1: 1 + 0.2, 2 + 0.8 · 4


def test_drift_finds_the_line():
    ages = np.array([0, 10, 20, 30, 40.0])
    fit = drift(ages, 0.05 + 0.002 * ages)
    assert fit == pytest.approx({"k0": 0.05, "c": 0.002, "r2": 1, "rows": 5})
    assert drift(np.append(ages, 7), np.append(0.05 + 0.002 * ages, math.nan))["rows"] == 5
    assert drift(np.array([3.0, 3.0]), np.array([0.1, 0.2])) is None


def test_series_leaves_out_what_has_no_value():
    metrics = [{"iteration": 1, "a": 2.0}, {"iteration": 2, "a": None}, {"iteration": 3}, {"iteration": 4, "a": "x"},
               {"iteration": 5, "a": 0}]
    assert series(metrics, "a") == ([1, 5], [2.0, 0])


def test_broken_lines_are_left_out_and_counted(tmp_path):
    def but(part, **change):
        line = a_line(2)
        line[part] = line[part] | change
        return line
    lines = [a_line(1), but("buffer", mass=[1]), but("drawn", age=[0, None, 1]), but("drawn", kl=["a", 1, 2]),
             a_line(2) | {"uses": None}, a_line(2) | {"alpha": None}, a_line("2"), {"iteration": 2}, [1]]
    records, broken = read_lines(write(tmp_path, lines, end='{"iteration": 3, "st') / "replay.jsonl", is_whole)
    assert records == [a_line(1)] and broken == 9
    assert read_lines(tmp_path / "absent.jsonl") == ([], 0)


def drawn_text(monkeypatch, run):
    """main's picture, and all text in it by panel title."""
    figures = []

    class Kept(replay_plots.Figure):
        def savefig(self, *arguments, **options):
            figures.append(self)
            super().savefig(*arguments, **options)
    monkeypatch.setattr(replay_plots, "Figure", Kept)
    out = main([str(run)])
    texts = {}
    for axes in figures[0].axes:
        found = [*axes.texts, *(axes.get_legend().get_texts() if axes.get_legend() else [])]
        if axes.get_title():
            texts[axes.get_title()] = " ".join(text.get_text().replace("\n", " ") for text in found)
    return out, figures[0].get_suptitle(), texts


def test_the_picture_of_a_run(tmp_path, monkeypatch, capsys):
    metrics = [{"iteration": iteration, "replay/tokens_trained": 60} for iteration in range(1, 6)]
    run = write(tmp_path / "run", [a_line(iteration) for iteration in range(1, 6)], metrics, end='{"cut')
    out, title, texts = drawn_text(monkeypatch, run)
    assert out == run / "replay.png" and Image.open(out).size == (1920, 1140)
    assert sorted(path.name for path in run.iterdir()) == ["metrics.jsonl", "replay.jsonl", "replay.png"]
    assert "15 draws up to iteration 5" in title and "tau 30, alpha 0.6, ages in steps" in title and "broken lines left out: 2" in title
    assert len(texts) == 5 and not any("No picture" in text for text in texts.values())
    # KL 0.1, 0.2, 0.3 at ages 0, 3, 6: c = 1/30, so 1/c = 30 for a token; 20 tokens an episode: 1.5
    assert "0.1 + 0.033 age, R² 1.00" in texts["Drift: KL against age"]
    assert "1/c is 30 for a token, 1.5 for an episode of 20 tokens; the run's tau ends at 30" in texts["Drift: KL against age"]
    assert "tau/alpha, at the end 50, beyond the picture" in texts["Base priority of what is held"]
    assert "15 draws in 5 iterations, broken lines left out: 2" in capsys.readouterr().out


@pytest.mark.parametrize("change", [{"tau": None}, {"alpha": 0}, {"ages": ()}, {"ages": (5,)}, {"ages": (0, 10**6)},
                                    {"drawn": ((), ())}, {"drawn": ((4, 4), (0.1, None))},
                                    {"drawn": ((4, 5), (None, None))}])
def test_pictures_of_odd_runs(tmp_path, monkeypatch, change):
    savefig = replay_plots.Figure.savefig  # small, so fast
    monkeypatch.setattr(replay_plots.Figure, "savefig", lambda figure, path, dpi, format: savefig(figure, path, dpi=15,
                                                                                                  format=format))
    _, _, texts = drawn_text(monkeypatch, write(tmp_path / "run", [a_line(7, **change)]))
    if change.get("drawn") == ((), ()):
        assert texts["Ages"] == "No picture: nothing was drawn yet."
    if change in ({"tau": None}, {"alpha": 0}):
        assert "no age decay" in texts["Base priority of what is held"]


def test_main_refuses(tmp_path, capsys):
    def refused(*argv):
        with pytest.raises(SystemExit) as stop:
            main([str(word) for word in argv])
        assert stop.value.code == 2
        return capsys.readouterr().err
    assert "not a folder" in refused(tmp_path / "absent")
    assert "has no replay.jsonl" in refused(tmp_path) and "--replay none" in refused(tmp_path)
    run = write(tmp_path / "run", [], end='{"cut')
    assert "no whole line (1 broken)" in refused(run)
    assert "does not exist" in refused(write(run, [a_line(1)]), "--out", tmp_path / "no" / "x.png")
