"""Comparison of runs over their seeds: curves, tables, and whether there are enough seeds for a claim.

    python eval.py compare runs/fresh* runs/none*                       # held-out success over episodes
    python eval.py compare runs/* --baseline runs/none_0 --x compute --mu 5

Runs whose settings and code differ in nothing but the seed form a group. Between two evaluations a curve keeps its last value; nothing
is extrapolated: a group's curve ends where its shortest seed ends, and groups are judged up to where the shortest run ends.
All groups are compared with one of them, the baseline. Which test gives a verdict: `verdicts`, and docs/runs.md.
"""
import csv
import difflib
import json
import string
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import tyro
import yaml

from runtime.files import fail, flat, read_yaml, whole_lines

OPTIONS_TABLE = Path(__file__).parent.parent / "runtime" / "options.yaml"
NOT_A_SETTING = set(read_yaml(OPTIONS_TABLE)["not_a_setting"])  # places and logging, by all their names
TELLING = ("model", "algo", "loss", "problem_sampler", "replay", "replay_sampler", "tau")
X_AXES = {  # metrics that are needed, and the unit
    "episodes": (["episodes"], "episodes"), "steps": (["step"], "optimiser steps"), "tokens": (["tokens"], "tokens"),
    "flops": (["cost/flops"], "floating-point operations"),
    "seconds": (["time/iteration_s", "time/eval_s", "time/save_s"], "seconds without evaluation and saving"),
    "compute": (["cost/episodes_trained", "cost/episodes_generated"], "episodes' training costs (B + mu R)")}
LINES = ("-", "--", ":")
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")  # Okabe and Ito, without yellow
FEWEST_SEEDS = 5  # below, nothing is claimed: with 3 against 3 seeds Mann-Whitney's U cannot reach 0.05
LEVEL = 0.05


@dataclass
class CompareArgs:
    runs: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Run folders. Those that differ in nothing but the seed form a group."""
    baseline: str | None = None
    """Folder of a run whose group all others are compared with. None: the group of the first run."""
    x: Literal["episodes", "steps", "tokens", "flops", "seconds", "compute"] = "episodes"
    """What the budget is counted in. compute: B + mu R for B episodes trained on and R sampled; seconds: without evaluation and
    saving."""
    mu: float | None = None
    """What sampling an episode costs over training on one, for --x compute: on another machine, say. None: by each run's clock."""
    y: str = "eval/success"
    """Metric of metrics.jsonl; larger is better."""
    target: float | None = None
    """Score to reach. None: the time to a score is not reported."""
    out: str = "comparison"
    """Folder of comparison.png, .svg, .md and .csv, and of runs.csv."""


@dataclass
class Run:
    """A curve: `y` holds from its `x` on until the next one. Both (points,), x not falling."""
    path: Path
    config: dict
    x: np.ndarray
    y: np.ndarray
    mu: float | None = None  # that `x` was counted with, under --x compute

    def at(self, places) -> np.ndarray:
        """y at each place, none of which lies before the first x."""
        assert np.min(places) >= self.x[0], f"{self.path} starts at {self.x[0]} and has no value at {np.min(places)}"
        return self.y[np.searchsorted(self.x, places, side="right") - 1]

    def area(self, low: float, high: float) -> float:
        """Mean height between low and high (the area under the curve over its width), in units of y.

        >>> Run(Path(), {}, np.array([0, 10, 30]), np.array([0.0, 0.5, 1.0])).area(0, 40)  # (10*0 + 20*0.5 + 10*1) / 40
        0.5
        """
        corners = np.unique([low, high, *self.x[(self.x > low) & (self.x < high)]])
        return float((self.at(corners[:-1]) * np.diff(corners)).sum() / (high - low)) if high > low else np.nan

    def scores(self, low: float, high: float, target: float | None) -> dict:
        """What a run is judged by between low and high; the time to the target is inf when the run ends before."""
        within = self.y[(self.x >= low) & (self.x <= high)]
        reached = self.x[self.y >= target] if target is not None else []
        return {"final": float(self.at(high)), "best": float(within.max(initial=self.at(low))), "area": self.area(low, high),
                "time_to_target": float(reached[0]) if len(reached) else np.inf}


# --------------------------------------------------------------------------------------------------------- statistics


def middle(values_NM: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean over rows and its 95 % interval by Student's t, low and high; they are nan where there is one row.

    >>> print("%.3f %.3f %.3f" % middle(np.array([0.1, 0.2, 0.3])))  # 0.2 +- 4.303 * 0.1 / sqrt(3)
    0.200 -0.048 0.448
    """
    from scipy import stats  # takes a second
    centre, count = values_NM.mean(axis=0), len(values_NM)
    if count < 2:
        return centre, centre * np.nan, centre * np.nan
    reach = stats.t.ppf(0.975, count - 1) * values_NM.std(axis=0, ddof=1) / np.sqrt(count)
    return centre, centre - reach, centre + reach


def holm(p_N: np.ndarray) -> np.ndarray:
    """p-values corrected so that the chance of any false one below a level is at most that level (Holm 1979).

    >>> holm(np.array([0.04, 0.01, 0.03])).round(3).tolist()  # 3 * 0.01, then 2 * 0.03, and the last is not below it
    [0.06, 0.03, 0.06]
    """
    order = np.argsort(p_N)
    scaled = p_N[order] * np.arange(len(p_N), 0, -1)
    corrected = np.empty(len(p_N))
    corrected[order] = np.minimum(np.maximum.accumulate(scaled), 1)
    return corrected


def verdicts(arms: list[np.ndarray], baseline_N: np.ndarray) -> list[tuple[int, str]]:
    """What the scores of each arm's seeds allow to say against the baseline's: 1 (better), -1 (worse) or 0 (no claim), and why.

    Better: Welch's t-test has p < 0.05, corrected over all the arms that have FEWEST_SEEDS, and Mann-Whitney's U, which one far
    seed does not move, has p < 0.05, uncorrected, the same way. Neither pairs the seeds."""
    from scipy import stats
    told = [(0, f"{len(arm)} and {len(baseline_N)} seeds, a claim needs at least {FEWEST_SEEDS} each") for arm in arms]
    tested = [place for place, arm in enumerate(arms) if min(len(arm), len(baseline_N)) >= FEWEST_SEEDS]
    if not tested:
        return told
    moments = [[arms[place].mean(), arms[place].std(ddof=1), len(arms[place])] for place in tested]
    welch = stats.ttest_ind_from_stats(*np.array(moments).T, baseline_N.mean(), baseline_N.std(ddof=1), len(baseline_N),
                                       equal_var=False)
    for place, t, p in zip(tested, welch.statistic, holm(np.nan_to_num(welch.pvalue, nan=1.0))):  # nan: all scores are equal
        told[place] = (0, f"p {p:.2g}")
        if p < LEVEL:
            ranks = stats.mannwhitneyu(arms[place], baseline_N)
            same_way = t * (ranks.statistic - len(arms[place]) * len(baseline_N) / 2) > 0
            agrees = ranks.pvalue < LEVEL and same_way
            told[place] = (int(np.sign(t)), f"p {p:.2g}") if agrees else (0, f"p {p:.2g}, but {ranks.pvalue:.2g} by ranks")
    return told


# ------------------------------------------------------------------------------------------------------------ reading


def budget(lines: list[dict], x: str, mu: float | None) -> np.ndarray:
    """(lines,) what had been spent when each line was written. Raises ValueError where the metrics do not tell."""
    keys, _ = X_AXES[x]
    for key in keys:
        if not all(isinstance(line.get(key), (int, float)) for line in lines):
            raise ValueError(f"its metrics have no {key}, which --x {x} counts: older code did not log it. --x episodes needs less")
    columns = [np.array([line[key] for line in lines], dtype=float) for key in keys]
    if x == "seconds":
        whole, evaluation, saving = columns
        return np.cumsum(whole - evaluation - saving)
    if x == "compute":
        trained, generated = columns
        return trained + mu * generated
    return columns[0]  # logged as totals


def read_run(path: Path, x: str, y: str, mu: float | None = None) -> Run:
    """`mu`: see CompareArgs. Raises ValueError with the reason why the folder cannot be compared."""
    if not (path / "config.yaml").is_file():
        raise ValueError("not a run (no config.yaml)" if path.is_dir() else "no such folder")
    try:
        config = read_yaml(path / "config.yaml")
    except (yaml.YAMLError, ValueError):
        config = None
    if not isinstance(config, dict) or "seed" not in config:
        raise ValueError("its config.yaml cannot be read")
    lines = whole_lines(path / "metrics.jsonl")
    if not lines:
        raise ValueError("no metrics yet")
    keys = sorted({key for line in lines for key in line})
    if x == "compute" and mu is None:  # one for all of the run, so that its first, slow iterations do not bend the axis
        mu = lines[-1].get("time/mu")
        if mu is None:
            raise ValueError("its metrics have no time/mu, the price of sampling by its own clock: give --mu")
    places = budget(lines, x, mu)
    points = [(place, line[y]) for place, line in zip(places, lines) if isinstance(line.get(y), (int, float))]
    if not points:
        near = difflib.get_close_matches(y, keys, n=1)
        raise ValueError(f"no {y} yet" if y in keys else f"no metric {y}" + (f"; did you mean {near[0]}?" if near else ""))
    start = lines[0].get(y.replace("eval/", "eval/start_")) if y.startswith("eval/") else None
    points = [(0.0, start)] * (start is not None) + points
    return Run(path, flat(config) | code_of(path), *np.array(points, dtype=float).T, mu if x == "compute" else None)


def code_of(path: Path) -> dict[str, str]:
    """Digests of the files that decide what is learned, by "code FILE"; none of a run of older code."""
    if not (path / "code.json").is_file():
        return {}
    digests = json.loads((path / "code.json").read_text("utf-8"))
    return {f"code {name}": "+".join(part[:8] for part in digest.split("+")) for name, digest in digests.items()}


def task_of(config: dict) -> dict:
    """What decides which problems are asked and how they are scored; the wording of the prompt is a setting."""
    options = config.get("env_options") or {key: config[key] for key in ("board_size", "slippery") if key in config}
    return {"env": config["env"]} | {key: value for key, value in options.items() if key != "prompt"}


def values_of(runs: list[Run], key: str) -> set[str]:
    """Of those that have it."""
    return {json.dumps(run.config[key]) for run in runs if key in run.config}


def grouped(runs: list[Run]) -> tuple[dict[str, list[Run]], list[str]]:
    """Runs by the settings that differ among them, and notes on what was left aside."""
    notes, groups = [], {}
    every = list(dict.fromkeys(key for run in runs for key in run.config if key not in NOT_A_SETTING))
    lone = [key for key in every if any(key not in run.config for run in runs) and len(values_of(runs, key)) == 1]
    if any(key.startswith("code ") for key in lone):
        notes.append("some runs do not say which code, or which task's file, they are of: taken for the same as the others'")
    versions = [key for key in lone if not key.startswith(("code ", "loss_options."))]  # options differ with the loss
    if versions:
        notes.append(f"runs of different versions: {', '.join(versions)} stand in some configs only and were not compared")

    def kinds(keys) -> list[str]:
        return [json.dumps([run.config.get(key) for key in keys]) for run in runs]

    differing = [key for key in every if key not in lone and len(set(kinds([key]))) > 1]
    names = list(differing)  # as few as tell the groups apart
    for key in sorted(reversed(differing), key=lambda key: key in TELLING):  # what says most is dropped last
        fewer = [name for name in names if name != key]
        names = fewer if len(set(kinds(fewer))) == len(set(kinds(differing))) else names
    for run in runs:
        told = [key for key in names if key in run.config] or [key for key in differing if key in run.config]
        label = words({key: run.config[key] for key in told}) or "all runs"
        members = groups.setdefault(label, [])
        same = [member.path for member in members if member.config["seed"] == run.config["seed"]]
        if same:
            notes.append(f"skipped {run.path}: the settings and the seed are those of {same[0]}")
            continue
        if not members and len(names) < len(differing):
            notes.append(f"{label} goes with {words({key: run.config[key] for key in differing if key in run.config and key not in told})}")
        members.append(run)
    if len(groups) > len(COLOURS) * len(LINES):
        fail(f"{len(groups)} different settings ({', '.join(differing)}) are more than can be told apart: compare fewer at once")
    return groups, notes


def baseline_of(groups: dict[str, list[Run]], folder: str | None) -> str:
    """Label of the group that has the run in `folder`; None: the first label."""
    for label, members in groups.items():
        if folder is None or Path(folder) in [run.path for run in members]:
            return label
    return fail(f"--baseline {folder}: no run that is compared lies there; name one of the folders that are given")


# ----------------------------------------------------------------------------------------------------------- judging


def with_ends(name: str, interval) -> dict[str, float]:
    return dict(zip((name, f"{name}_low", f"{name}_high"), map(float, interval)))


def judge(groups: dict[str, list[Run]], baseline: str, start: float, end: float, target: float | None = None) -> list[dict]:
    """A row a group, judged between start and end and compared with the group labelled `baseline`."""
    rows, finals, seeds = [], [], []
    for label, runs in groups.items():
        runs = sorted(runs, key=lambda run: run.config["seed"])
        scores = [run.scores(start, end, target) for run in runs]
        row = {"group": string.ascii_uppercase[len(rows)], "settings": label, "seeds": len(runs)}
        for name in ("final", "best", "area"):
            row |= with_ends(name, middle(np.array([score[name] for score in scores])))
        if target is not None:
            times = [score["time_to_target"] for score in scores]
            row |= {"reached": int(np.isfinite(times).sum()), "time_to_target": float(np.median(times))}
        rows.append(row)
        finals.append(np.array([score["final"] for score in scores]))
        seeds.append([run.config["seed"] for run in runs])
    base = list(groups).index(baseline)
    told = verdicts(finals[:base] + finals[base + 1:], finals[base])
    told.insert(base, (0, "it is the baseline"))
    for row, final_N, of_seeds, (sign, why) in zip(rows, finals, seeds, told):
        gap = final_N.mean() - finals[base].mean(), np.nan, np.nan
        row |= with_ends("difference", middle(final_N - finals[base]) if of_seeds == seeds[base] else gap)
        above = np.sign(final_N[:, None] - finals[base][None])
        row["probability"] = float(np.mean((above + 1) / 2))  # ties count half
        better = row["group"] if sign > 0 else rows[base]["group"]
        row["verdict"] = f"{better} is better ({why})" if sign else f"no claim: {why}"
        if target is not None:  # only at a score that both reach, never from the cost of a step alone
            mine, others = row["time_to_target"], rows[base]["time_to_target"]
            row["saved"] = 1 - mine / others if np.isfinite([mine, others]).all() and others else np.nan
    return rows


# ----------------------------------------------------------------------------------------------------------- writing


def words(settings: dict) -> str:
    return ", ".join(f"{key}={value}" for key, value in settings.items())


def number(score: float) -> str:
    return f"{score:.3f}" if np.isfinite(score) else "n/a"


def amount(budget: float) -> str:
    """
    >>> amount(1920), amount(2.5), amount(3e15), amount(float("inf"))
    ('1,920', '2.5', '3e+15', 'n/a')
    """
    return "n/a" if not np.isfinite(budget) else f"{budget:,.0f}" if 10 <= budget < 1e9 else f"{budget:.3g}"


def with_interval(row: dict, name: str) -> str:
    interval = "" if np.isnan(row[f"{name}_low"]) else f" ({number(row[f'{name}_low'])} to {number(row[f'{name}_high'])})"
    return number(row[name]) + interval


def markdown(rows: list[dict], baseline: str, notes: list[str], args: CompareArgs, end: float) -> str:
    unit = X_AXES[args.x][1]
    base = next(row["group"] for row in rows if row["settings"] == baseline)
    head = ["", "settings", "seeds", f"{args.y} at {amount(end)} {unit}", "best", "area under the curve / width",
            f"at the end, minus {base}", f"probability that a run ends above one of {base}", ""]
    if args.target is not None:
        head += [f"{unit} to {args.target:g} (median; reached)", f"saved of {base}'s"]
    table = [head, ["---"] * len(head)]
    for row in rows:
        intervals = [with_interval(row, name) for name in ("final", "best", "area", "difference")]
        table.append([row["group"], row["settings"], str(row["seeds"]), *intervals, number(row["probability"]), row["verdict"]])
        if args.target is not None:
            table[-1].append(f"{amount(row['time_to_target'])}; {row['reached']} of {row['seeds']}")
            table[-1].append(f"{row['saved']:.0%}" if np.isfinite(row["saved"]) else "n/a")
    text = [f"# {args.y} over {unit}", "", "Means over seeds, with 95 % intervals by Student's t.", ""]
    text += ["| " + " | ".join(cells) + " |" for cells in table]
    return "\n".join([*text, "", *(f"- {note}" for note in notes), ""])


def write_csv(path: Path, rows: list[dict]):
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def draw(groups: dict[str, list[Run]], rows: list[dict], args: CompareArgs, end: float, out: Path):
    """comparison.png and .svg: curves with bands over the seeds and, beside them, the scores at the end that all share."""
    from matplotlib.figure import Figure  # takes longer than all else, and what is refused needs no picture
    from matplotlib.ticker import MaxNLocator
    figure = Figure(figsize=(11, max(4.6, 0.6 * len(rows))), layout="constrained")
    curves, finals = figure.subplots(1, 2, width_ratios=(2, 1))
    for place, (runs, row) in enumerate(zip(groups.values(), rows)):
        look = {"color": COLOURS[place % len(COLOURS)], "linestyle": LINES[place // len(COLOURS)]}
        first, last = max(run.x[0] for run in runs), min(run.x[-1] for run in runs)
        grid = np.unique([x for run in runs for x in run.x if first <= x <= last])
        values = np.array([run.at(grid) for run in runs])
        centre, low, high = middle(values)
        curves.plot(grid, centre, linewidth=2, drawstyle="steps-post", label=row["group"], **look)
        curves.plot(last, centre[-1], "o", color=look["color"], markersize=5)
        if len(runs) > 1:
            curves.fill_between(grid, low, high, step="post", color=look["color"], alpha=0.15, linewidth=0)
            finals.plot([row["final_low"], row["final_high"]], [place, place], color=look["color"], linewidth=2.5)
        if 1 < len(runs) < FEWEST_SEEDS:
            curves.plot(grid, values.T, linewidth=0.7, alpha=0.4, drawstyle="steps-post", **look)
        finals.plot([run.at(end) for run in runs], [place + 0.2] * len(runs), ".", color=look["color"], alpha=0.5)
        finals.plot(row["final"], place, "o", color=look["color"], markersize=7)
        title = textwrap.fill(f"{row['group']}  {row['settings']}, {row['seeds']} seed{'s' * (row['seeds'] > 1)}", 46)
        title = title.replace("$", r"\$")  # matplotlib reads formulas between two of them
        finals.text(0, place - 0.18, title, transform=finals.get_yaxis_transform(), color=look["color"], va="bottom", fontsize=9)
    curves.axvline(end, color="grey", linewidth=0.8, linestyle=":")
    if args.target is not None:
        curves.axhline(args.target, color="grey", linewidth=0.8, linestyle="--")
        curves.text(curves.get_xlim()[0], args.target, f" target {args.target:g}", color="dimgrey", va="bottom", fontsize=9)
    curves.legend(ncols=2)
    unit = X_AXES[args.x][1]
    curves.set(xlabel=unit, ylabel=args.y)
    few = "; too few seeds for a claim" if min(row["seeds"] for row in rows) < FEWEST_SEEDS else ""
    curves.set_title(f"Mean over seeds, 95 % band by Student's t{few}", fontsize=10, loc="left")
    curves.xaxis.set_major_formatter(lambda value, _: amount(value))
    finals.set(xlabel=args.y, yticks=[], ylim=(max(len(rows), 4) - 0.5, -0.8))
    finals.xaxis.set_major_locator(MaxNLocator(5))
    finals.set_title(f"At {amount(end)} {unit}; small: the seeds", fontsize=10, loc="left")
    for axes, lines, sides in ((curves, "y", ["top", "right"]), (finals, "x", ["top", "right", "left"])):
        axes.grid(alpha=0.3, axis=lines)
        axes.spines[sides].set_visible(False)
    figure.savefig(out / "comparison.png", dpi=120)
    figure.set_layout_engine("none")  # it is laid out by now
    figure.savefig(out / "comparison.svg", metadata={"Date": None})


def main(argv: list[str]):
    args = tyro.cli(CompareArgs, args=argv, prog="eval.py compare", description=__doc__)
    if args.mu is not None and (args.x != "compute" or not args.mu > 0):
        fail(f"--mu {args.mu:g} with --x {args.x}: --mu prices sampling under --x compute, and is above 0")
    runs, skipped = [], {}
    for path in dict.fromkeys(map(Path, args.runs)):
        try:
            runs.append(read_run(path, args.x, args.y, args.mu))
        except ValueError as error:
            skipped.setdefault(str(error), []).append(str(path))
    notes = [f"skipped {', '.join(paths)}: {reason}" for reason, paths in skipped.items()]
    if not runs:
        fail("nothing to compare: " + ("; ".join(notes) or "name two or more run folders"))
    for run in runs[1:]:
        if task_of(run.config) != task_of(runs[0].config):
            fail(f"{runs[0].path} ({words(task_of(runs[0].config))}) and {run.path} ({words(task_of(run.config))}) are runs of "
                 "different tasks and cannot be compared")
    groups, more = grouped(runs)
    baseline = baseline_of(groups, args.baseline)
    runs = [run for members in groups.values() for run in members]
    latest, shortest = max(runs, key=lambda run: run.x[0]), min(runs, key=lambda run: run.x[-1])
    start, end = latest.x[0], shortest.x[-1]
    if start > end:
        fail(f"{shortest.path} ends at {amount(end)} {X_AXES[args.x][1]}, before {latest.path} starts at {amount(start)}")
    rows = judge(groups, baseline, start, end, args.target)
    where = f", where the shortest run, {shortest.path}, ends" if any(run.x[-1] > end for run in runs) else ""
    notes += more + [f"judged up to {amount(end)} {X_AXES[args.x][1]}{where}; a curve keeps its value until its next point"]
    if min(row["seeds"] for row in rows) < FEWEST_SEEDS:
        notes.append(f"fewer than {FEWEST_SEEDS} seeds: no claim can be made")
    if len(rows) > 1:
        notes.append("p is of Welch's t-test, after Holm's correction for all that are compared with the baseline (--baseline "
                     "FOLDER); what is better is so by ranks too (Mann-Whitney's U); intervals of differences pair the runs of a seed")
    if args.x == "compute":
        prices = [run.mu for run in runs]
        notes.append(f"mu {min(prices):.3g} to {max(prices):.3g} by the runs' own clocks; --mu prices sampling alike in all of them"
                     if args.mu is None else f"sampling an episode is priced at {args.mu:g} times training on one, in all runs")
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    text = markdown(rows, baseline, notes, args, end)
    (out / "comparison.md").write_text(text, "utf-8")
    write_csv(out / "comparison.csv", rows)
    write_csv(out / "runs.csv", [
        {"settings": label, "run": run.path, "seed": run.config["seed"], **run.scores(start, end, args.target),
         "last_x": run.x[-1], "last_y": run.y[-1]} for label, members in groups.items() for run in members])
    draw(groups, rows, args, end, out)
    print(f"{text}\n{out}: comparison.png, comparison.svg, comparison.md, comparison.csv, runs.csv")
