"""One picture of what replay does in a run: what is drawn beside what is held, its age, its drift, what it teaches.
It reads replay.jsonl and metrics.jsonl, of finished and of running runs alike."""
import os
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import matplotlib
import numpy as np
import tyro
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from drift import DriftEstimator
from runtime.files import fail, read_lines, temporary_of

BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#767676"  # Okabe and Ito's: apart for every colour vision
DRAWN = ("age", "weight", "ratio", "clip_fraction", "kl", "signal")


def is_whole(record: dict) -> bool:
    """Whether a line of replay.jsonl has all its numbers; ValueError where lists of one part are not of one length."""
    ages, counts, *_ = np.array([record["buffer"][key] for key in ("age", "count", "priority", "mass")], np.float64)
    drawn_ages, *_ = np.array([record["drawn"][key] for key in DRAWN], np.float64)
    others = np.array(record["uses"] + [record["alpha"], record["tau"] or 0], np.float64)
    return bool(np.isfinite(np.concatenate([ages, counts, drawn_ages, others])).all())


def column(records: list[dict], part: str, key: str) -> np.ndarray:
    """All records' values of one list, joined; None becomes NaN."""
    return np.array([value for record in records for value in record[part][key]], np.float64)


def edges_of(values, most: int, multiple_of: int = 1) -> np.ndarray:
    """Edges, whole numbers from the smallest value on, of at most `most` bins [edge, next edge) of one width, a multiple.

    >>> edges_of([0, 3, 9], 5), edges_of([7], 5)
    (array([ 0,  2,  4,  6,  8, 10]), array([7, 8]))
    """
    low, high = int(np.min(values)), int(np.max(values))
    width = -(-(high - low + 1) // (most * multiple_of)) * multiple_of
    return low + width * np.arange(-(-(high - low + 1) // width) + 1)


def age_edges_of(replay: list[dict], ages, most: int) -> np.ndarray:
    """Bins of whole iterations: what the buffer holds was sampled once an iteration, while draws fall between."""
    gaps = np.diff(replay[-1]["buffer"]["age"])
    return edges_of(ages, most, max(1, int(np.median(gaps))) if len(gaps) else 1)


def grouped(ages: np.ndarray, values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """(rows, 4): centre, mean, 10th and 90th percentile of the values of each bin that has any; NaNs left out."""
    ages, values = ages[np.isfinite(values)], values[np.isfinite(values)]
    bins = np.digitize(ages, edges) - 1
    return np.array([[(edges[index] + edges[index + 1] - 1) / 2, values[bins == index].mean(),
                      *np.percentile(values[bins == index], (10, 90))] for index in np.unique(bins)]).reshape(-1, 4)


def drift(ages: np.ndarray, kl: np.ndarray) -> dict | None:
    """{c, k0, r2, rows} of KL = k0 + c age by `DriftEstimator`'s weighted least squares; None for a single age."""
    known = np.isfinite(kl)
    estimator = DriftEstimator(min_rows=2)
    estimator.add(ages[known], kl[known])
    return estimator.fit()


def series(metrics: list[dict], key: str) -> tuple[list, list]:
    """(iterations, values) of a metric, where it has a value."""
    pairs = [(record["iteration"], record[key]) for record in metrics if isinstance(record.get(key), (int, float))]
    return [iteration for iteration, _ in pairs], [value for _, value in pairs]


# Each panel draws on `axes` and returns the sentence below it; MissingData's message is written where the picture would be.


class MissingData(Exception):
    pass


def age_label(replay) -> str:
    return f"age ({replay[-1]['age_unit']}s)"


def ages_panel(axes, replay, metrics):
    held_ages, drawn_ages = column(replay, "buffer", "age"), column(replay, "drawn", "age")
    if not len(drawn_ages):
        raise MissingData("nothing was drawn yet")
    edges = age_edges_of(replay, np.concatenate([held_ages, drawn_ages]), 20)
    held = np.histogram(held_ages, edges, weights=column(replay, "buffer", "count"))[0]
    drawn = np.histogram(drawn_ages, edges)[0]
    expected = np.histogram(held_ages, edges, weights=column(replay, "buffer", "mass"))[0]
    width = edges[1] - edges[0]
    axes.bar(edges[:-1] + 0.26 * width, held / max(1, held.sum()), 0.46 * width, color=GREY, label="held")
    axes.bar(edges[:-1] + 0.74 * width, drawn / drawn.sum(), 0.46 * width, color=BLUE, label="drawn")
    axes.stairs(expected / (expected.sum() or 1), edges, color=ORANGE, linewidth=1.6, label="sampling probability")
    axes.set(title="Ages drawn, beside ages held", xlabel=age_label(replay), ylabel="share, all iterations")
    return ("Blue left of grey: freshness works. Equal shapes: age plays no part (tau is long beside these ages). Blue "
            "should roughly follow the orange line.")


def banded(axes, replay, part, key, title, ylabel, of):
    """Mean and spread, by age, of what one line of replay.jsonl says of `of`."""
    ages, values = column(replay, part, "age"), column(replay, part, key)
    if not np.isfinite(values).any():
        raise MissingData(f"replay.jsonl has no {key} of what is {'held' if part == 'buffer' else part}")
    centre, mean, low, high = grouped(ages, values, age_edges_of(replay, ages, 24)).T
    axes.fill_between(centre, low, high, color=BLUE, alpha=0.2, linewidth=0, label=f"10 to 90 % of {of}")
    axes.plot(centre, mean, color=BLUE, marker="o", markersize=4, label="mean")
    axes.set(title=title, xlabel=age_label(replay), ylabel=ylabel)


def priority_panel(axes, replay, metrics):
    banded(axes, replay, "buffer", "priority", "Base priority of what is held", "before age decay", "batches, all iterations")
    tau, alpha = replay[-1]["tau"], replay[-1]["alpha"]
    if not tau or not alpha:
        return "There is no age decay here (tau infinite or alpha 0): draws follow the priority alone."
    ages = axes.get_xlim()
    beyond = ", beyond the picture" if tau / alpha > ages[1] else ""
    axes.axvline(tau / alpha, color=ORANGE, linestyle="--", label=f"tau/alpha, at the end {tau / alpha:.3g}{beyond}")
    axes.set_xlim(ages)
    return ("High at the left: what is fresh teaches more. At the dashed line age has brought an entry's weight down to 1/e; "
            "all low, late: solved, or hopeless.")


def clip_panel(axes, replay, metrics):
    banded(axes, replay, "drawn", "clip_fraction", "Tokens outside the clip range", "share of an episode's tokens", "episodes")
    axes.set_ylim(bottom=0)
    return ("Outside it, a token that the update would push further out gets no gradient. The higher the line climbs with "
            "age, the less that age still teaches: a shorter tau, or a max_age.")


def kl_panel(axes, replay, metrics):
    ages, kl = column(replay, "drawn", "age"), column(replay, "drawn", "kl")
    if not np.isfinite(kl).any():
        raise MissingData("no drawn episode has a KL")
    some = np.linspace(0, len(ages) - 1, min(len(ages), 5000)).astype(int)
    axes.scatter(ages[some], kl[some], s=5, color=GREY, alpha=0.25, linewidth=0, rasterized=True)
    centre, mean, *_ = grouped(ages, kl, age_edges_of(replay, ages, 24)).T
    axes.plot(centre, mean, color=BLUE, marker="o", markersize=4, label="mean")
    axes.set(title="Drift: KL against age", xlabel=age_label(replay), ylabel="KL(sampling || current) a token, nats",
             ylim=(0, max(1.5 * mean.max(), np.nanpercentile(kl, 97), 1e-9)))
    fit, said = drift(ages, kl), "Only one age was drawn: there is no line to fit."
    if fit:
        c, ends = fit["c"], np.array([0, ages.max()])
        axes.plot(ends, fit["k0"] + c * ends, color=ORANGE, label=f"{fit['k0']:.2g} + {c:.2g} age, R² {fit['r2']:.2f}")
        tokens = sum(series(metrics, "replay/tokens_trained")[1]) / len(ages)
        an_episode = f", {1 / (c * tokens):.3g} for an episode of {tokens:.0f} tokens" if tokens and c > 0 else ""
        used = f"{replay[-1]['tau']:.3g}" if replay[-1]["tau"] else "infinite"
        said = "It does not grow with age." if c <= 0 else \
            f"1/c is {1 / c:.3g} for a token{an_episode}; the run's tau ends at {used}."
    return said + " Drawn episodes are not a fair sample: read the slope as a rough size."


def uses_panel(axes, replay, metrics):
    uses = np.array(replay[-1]["uses"], np.float64)
    if not uses.sum():
        raise MissingData("the buffer is empty")
    bars = axes.bar(range(len(uses)), uses, color=BLUE)
    axes.bar_label(bars, [f"{share:.0%}" if share else "" for share in uses / uses.sum()], fontsize=8)
    axes.set(title=f"Uses of what is held, iteration {replay[-1]['iteration']}", xlabel="times drawn", ylabel="entries")
    axes.set_xticks(range(len(uses)), [*map(str, range(len(uses) - 1)), f"{len(uses) - 1}+"])
    return ("Much at 0: samples that were paid for and not used. Much at the right end: the same few episodes are learned "
            "again and again.")


PANELS = (ages_panel, priority_panel, clip_panel, kl_panel, uses_panel)


def plot_replay(replay: list[dict], metrics: list[dict], title: str, out: Path):
    """All panels as one PNG. `replay` has at least one line; `metrics` may be empty."""
    style = {"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25, "font.size": 9.5,
             "axes.titlesize": 11.5, "axes.titleweight": "bold", "legend.fontsize": 8.5, "legend.framealpha": 0.85}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(16, 9.5))
        grid = figure.subplots(2, 3)
        grid[-1, -1].set_axis_off()  # there are five
        for axes, panel in zip(grid.flat, PANELS):
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            try:
                sentence = panel(axes, replay, metrics)
            except MissingData as why:
                axes.set_axis_off()
                axes.set_title(panel.__name__.removesuffix("_panel").capitalize())
                sentence = f"No picture: {why}."
            if axes.get_legend_handles_labels()[0] and not axes.get_legend():
                axes.legend()
            axes.text(0, -0.19, textwrap.fill(sentence, 68), transform=axes.transAxes, va="top", fontsize=9.5, color="#333333")
        figure.suptitle(title.replace("$", r"\$"), x=0.05, y=0.985, ha="left", fontsize=14)
        figure.subplots_adjust(left=0.05, right=0.98, top=0.9, bottom=0.13, wspace=0.2, hspace=0.55)
        figure.savefig(temporary_of(out), dpi=120, format="png")
    os.replace(temporary_of(out), out)


@dataclass
class ReplayArgs:
    """Draw what replay does in a run."""
    run: Annotated[str, tyro.conf.Positional]
    """Folder of the run."""
    out: str | None = None
    """The file to write. None: replay.png in the run's folder."""


def main(argv: list[str]) -> Path:
    args = tyro.cli(ReplayArgs, args=argv, prog="eval.py replay")
    run = Path(args.run)
    if not run.is_dir():
        fail(f"{run} is not a folder: give the folder of a run, such as runs/NAME")
    if not (run / "replay.jsonl").is_file():
        fail(f"{run} has no replay.jsonl: it ran with --replay none, did not replay yet, or is older than that file")
    replay, broken = read_lines(run / "replay.jsonl", is_whole)
    metrics, also_broken = read_lines(run / "metrics.jsonl")
    if not replay:
        fail(f"{run}/replay.jsonl holds no whole line ({broken} broken)")
    out = Path(args.out or run / "replay.png")
    if not out.parent.is_dir():
        fail(f"--out {out}: the folder {out.parent} does not exist")
    last, drawn = replay[-1], len(column(replay, "drawn", "age"))
    tau = f"{last['tau']:.3g}" if last["tau"] else "infinite"
    left_out = f", broken lines left out: {broken + also_broken}" if broken + also_broken else ""
    plot_replay(replay, metrics, f"Replay in {run.resolve().name}: {drawn:,} draws up to iteration {last['iteration']}, "
                f"tau {tau}, alpha {last['alpha']:.3g}, ages in {last['age_unit']}s{left_out}", out)
    print(f"{out}: {drawn:,} draws in {len(replay)} iterations{left_out}")
    return out
