"""Writes studies/RESULTS.md and its plots anew from the evidence in studies/data. No number in the tables is typed; a study file
brings its question and the words of its `shows`. A study whose runs are not all there is "Not finished".

    python studies/report.py
"""
import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from run import ROOT, Job, area, chosen_lr, left_of, main_jobs, read_study, sweep_jobs, twin  # noqa: E402

from drift import DriftEstimator  # noqa: E402
from look.compare import (X_AXES, CompareArgs, amount, draw, judge, middle, number, read_run, verdicts,  # noqa: E402
                          with_interval)
from runtime.files import whole_lines

PLOTS = ROOT / "studies" / "plots"
AGE_BINS = (1, 3, 6, 12, 25, 50, 100)  # optimiser steps; the last bin is open


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *rows]] + [""]


def folder(study, arm: str, seed: int) -> Path:
    return study.data / Job(arm, chosen_lr(study, arm), seed).name


def signed(values_N: np.ndarray) -> str:
    """Mean and 95 % t interval of differences over seeds.

    >>> signed(np.array([0.1, 0.2, 0.3]))
    '+0.200 (-0.048 to +0.448)'
    """
    return "{:+.3f} ({:+.3f} to {:+.3f})".format(*middle(values_N))


def gains(scores: dict[str, np.ndarray], baseline: str) -> dict[str, str]:
    """Each arm's scores minus the baseline's, seed by seed; bold where `eval.py compare` would say which of the two is better."""
    others = [arm for arm in scores if arm != baseline]
    told = {baseline: ""}
    for arm, (sign, _) in zip(others, verdicts([scores[arm] for arm in others], scores[baseline])):
        gain = signed(scores[arm] - scores[baseline])
        told[arm] = f"**{gain}**" if sign else gain
    return told


# ---------------------------------------------------------------------------------------------------------- tables


def sweep_table(study) -> list[str]:
    """Mean area under the held-out curve of each arm at each learning rate; the chosen one is bold."""
    rows = []
    for arm in study.arms:
        areas = {lr: number(np.mean([area(study, Job(arm, lr, seed)) for seed in study.sweep["seeds"]]))
                 for lr in study.sweep["lr"]}
        rows.append([arm, *(f"**{value}**" if lr == chosen_lr(study, arm) else value for lr, value in areas.items())])
    return [f"Learning rates, tried on seeds {', '.join(map(str, study.sweep['seeds']))}: mean height of the held-out curve.", "",
            *table(["arm", *(f"{lr:g}" for lr in study.sweep["lr"])], rows)]


def compared(study, comparison: dict) -> list[str]:
    """Table and plot of a comparison at the largest budget that all its runs have, with gains over the arms in `against`."""
    x, against = comparison["x"], comparison["against"]
    groups = {arm: [read_run(folder(study, arm, seed), x, "eval/success") for seed in study.seeds] for arm in comparison["arms"]}
    end = min(run.x[-1] for runs in groups.values() for run in runs)
    rows = judge(groups, against[0], 0.0, end)
    plot = f"{study.name}_{x}.png"
    draw(groups, rows, CompareArgs(runs=(), x=x), end, PLOTS)
    (PLOTS / "comparison.svg").unlink()
    (PLOTS / "comparison.png").rename(PLOTS / plot)
    finals, areas = ({arm: np.array([value(run) for run in runs]) for arm, runs in groups.items()}
                     for value in (lambda run: run.at(end), lambda run: run.area(0.0, end)))
    columns = [gains(finals, against[0]), *(gains(areas, other) for other in against)]
    lines = []
    for row in rows:
        arm, beside = row["settings"], "steps" if x == "episodes" else "episodes"
        spent = [read_run(run.path, beside, "eval/success").x[run.x <= end][-1] for run in groups[arm]]
        lines.append([arm, f"{chosen_lr(study, arm):g}", amount(np.mean(spent)),
                      *(with_interval(row, key) for key in ("final", "best", "area")), *(column[arm] for column in columns)])
    return [f"**At {amount(end)} {X_AXES[x][1]}**", "",
            *table(["arm", "lr", X_AXES[beside][1], "final", "best", "area / width",
                    f"final minus {against[0]}", *(f"area minus {other}" for other in against)], lines),
            f"![{study.name}: held-out success over {X_AXES[x][1]}](plots/{plot})", ""]


def metrics_table(study) -> list[str]:
    """Further metrics of metrics.jsonl: means over iterations, then over seeds."""
    rows = []
    for arm in study.arms:
        runs = [whole_lines(folder(study, arm, seed) / "metrics.jsonl") for seed in study.seeds]
        means = [[np.mean(values) for values in ([line[key] for line in run if key in line] for run in runs) if values]
                 for key in study.table]
        rows.append([arm, *(f"{np.mean(mean):.3g}" if mean else "" for mean in means)])
    return ["Means over a run's iterations, and over seeds:", "", *table(["arm", *study.table], rows)]


def same_table(study) -> list[str]:
    """Pairs of arms that should be one: evaluations that are equal to the last digit, and the largest difference."""
    rows = []
    for arms in study.same:
        runs = [[folder(study, arm, seed) for arm in arms] for seed in study.seeds]
        curves = [[read_run(run, "episodes", "eval/success").y for run in pair] for pair in runs]
        records = [[whole_lines(run / "metrics.jsonl") for run in pair] for pair in runs]
        rows.append([" and ".join(arms), f"{sum(np.array_equal(*pair) for pair in curves)} of {len(runs)}",
                     f"{max(np.abs(a - b).max() for a, b in curves):.3g}", f"{sum(a == b for a, b in records)} of {len(runs)}"])
    return table(["arms", "seeds whose held-out curves are equal", "largest difference of an evaluation",
                  "seeds whose every metric is equal"], rows)


# ----------------------------------------------------------------------------------------------------------- drift


def probes(study, arm: str) -> dict[str, np.ndarray]:
    """{age, log_ratio (current/behaviour), kl (from its tokens), seed} of every episode that the arm's runs probed, each (N,)."""
    lines = [line | {"seed": [seed] * len(line["age"])} for seed in study.seeds
             for line in whole_lines(folder(study, arm, seed) / "drift.jsonl")]
    return {key: np.concatenate([line[key] for line in lines]) for key in ("age", "log_ratio", "kl", "seed") if key in lines[0]}


def drift_of(study, arm: str, axes) -> list[str]:
    """KL(behaviour || current) and ESS of whole episodes by age, and its fit; drawn on axes."""
    found = probes(study, arm)
    ages, seeds, ratio = found["age"], found["seed"], np.exp(found["log_ratio"])
    kls = {"from ratios": -found["log_ratio"]} | ({"from tokens": found["kl"]} if "kl" in found else {})
    rows, points = [], []
    for low, high in zip(AGE_BINS, (*AGE_BINS[1:], np.inf)):
        inside = (ages >= low) & (ages < high)
        if not inside.any():
            continue
        rows.append([f"{low} to {high - 1:g}" if np.isfinite(high) else f"{low} and more", f"{inside.sum():,}",
                     f"{ages[inside].mean():.1f}"])
        for kl in kls.values():
            of_seeds = np.array([kl[inside & (seeds == seed)].mean() for seed in sorted(set(seeds[inside]))])
            point = (ages[inside].mean(), *middle(of_seeds))
            rows[-1].append("{:.3f} ({:.3f} to {:.3f})".format(*point[1:]))
        points.append((*point, inside.sum()))
        rows[-1] += [f"{ratio[inside].mean():.3f}", f"{ratio[inside].sum()**2 / inside.sum() / (ratio[inside]**2).sum():.3f}"]
    (centres, means, lows, highs, counts), words = np.array(points).T, []
    for name, kl in kls.items():
        estimator = DriftEstimator(window=1)
        estimator.add(ages, kl)
        fit = estimator.fit()
        words.append(f"{name} KL = {fit['k0']:.3g} + {fit['c']:.3g} · age, R² {fit['r2']:.3f} of single episodes, 1/c = "
                     f"{1 / fit['c']:.3g} steps")
    power = np.polyfit(np.log(centres), np.log(means), 1, w=np.sqrt(counts))[0]
    taus = [line["buffer/tau"] for seed in study.seeds for line in whole_lines(folder(study, arm, seed) / "metrics.jsonl")
            if "buffer/drift_c" in line]
    points = axes.errorbar(centres, means, (means - lows, highs - means), fmt="o", capsize=3, label=arm)
    axes.plot(grid := np.linspace(0, max(centres)), fit["k0"] + fit["c"] * grid, color=points[0].get_color())
    return [f"**Staleness**, by {len(ages):,} episodes that {arm} probed, drawn uniformly from its last ones:", "",
            *table(["age, steps", "episodes", "mean age", *(f"KL(behaviour ‖ current) {name}, nats an episode" for name in kls),
                    "mean ratio", "ESS / episodes"], rows),
            f"Fitted over all of them, weighted by 1/KL: {'; '.join(words)}. The means of the ages grow about as "
            f"age^{power:.2f}. `--tau auto` itself chose {np.min(taus):.3g} to {np.max(taus):.3g} steps, half of the time "
            f"{np.percentile(taus, 25):.3g} to {np.percentile(taus, 75):.3g}.", ""]


def drift(study) -> list[str]:
    """The drift of each arm of `drift_of`, and the area under the curves by tau."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    text = [line for arm in study.drift_of for line in drift_of(study, arm, left)]
    swept = {float(flags.get("tau", "inf")): arm for arm, flags in study.arms.items()
             if flags.get("replay", "fresh") in ("fresh", "per") and flags.get("tau") != "auto"}
    areas = {tau: np.array([area(study, Job(arm, chosen_lr(study, arm), seed)) for seed in study.seeds])
             for tau, arm in sorted(swept.items())}
    left.set(xlabel="age, optimiser steps", ylabel="KL(behaviour || current), nats an episode")
    left.legend()
    means, lows, highs = np.array([middle(values) for values in areas.values()]).T
    right.errorbar(range(len(areas)), means, (means - lows, highs - means), fmt="o-", capsize=3)
    right.set_xticks(range(len(areas)), ["inf (PER)" if tau == np.inf else f"{tau:g}" for tau in areas])
    right.set(xlabel="tau, optimiser steps", ylabel="mean height of the held-out curve")
    figure.savefig(PLOTS / f"{study.name}_drift.png", dpi=120)
    plt.close(figure)
    if len(areas) > 1:
        best, *_, worst = sorted(areas, key=lambda tau: -areas[tau].mean())
        text += [f"Of the taus tried, {best:g} has the largest area and {worst:g} the smallest; one minus the other: "
                 f"{signed(areas[best] - areas[worst])}.", ""]
    return text + [f"![{study.name}: drift by age, and the area by tau](plots/{study.name}_drift.png)", ""]


# ---------------------------------------------------------------------------------------------------------- the text


def section(study) -> list[str]:
    jobs = sweep_jobs(study) + main_jobs(study)
    summaries = [json.loads(path.read_text()) for job in jobs if (path := study.data / job.name / "summary.json").exists()]
    failed = [job.name for job in jobs if (study.data / job.name / "failed.txt").exists()]
    minutes = sum(summary["minutes"] for summary in summaries)
    shared = sum(twin(study, job) is not None for job in jobs)
    starts = sorted({round(summary["start_success"], 3) for summary in summaries})
    text = [f"## {study.name}", "", study.question, "",
            f"`python studies/run.py studies/{study.name}.yaml`: {len(summaries)} runs ({shared} of them also in other studies), "
            f"{minutes:.0f} minutes of one core, about {minutes / 2:.0f} on two; {len(study.seeds)} seeds an arm; "
            f"{summaries[0]['heldout_problems']} held-out problems, the same in all; warm start at "
            f"{', '.join(map(number, starts))}." +
            (f" Failed: {', '.join(failed)}." if failed else ""), ""]
    text += [study.shows, ""] if study.shows else []
    text += sweep_table(study) if study.sweep else [
        f"Learning rate: {f'{study.lr:g}, fixed' if study.lr else f'chosen in {study.lr_of}'}.", ""]
    text += [line for comparison in study.comparisons for line in compared(study, comparison)]
    text += metrics_table(study) if study.table else []
    text += same_table(study) if study.same else []
    return text + (drift(study) if study.drift_of else [])


def written() -> str:
    """The text of RESULTS.md; draws the plots on the way."""
    PLOTS.mkdir(exist_ok=True)
    text = ["# What replay and freshness buy on the small tasks", "",
            "Written by `python studies/report.py` from the runs in studies/data; the words above the tables come from the study "
            "files. Intervals are over seeds, 95 %, by Student's t; those of a gain pair the runs of a seed and are corrected for "
            "nothing. **Bold** are gains and losses that `eval.py compare` would claim: Welch's t-test has p < 0.05 after Holm's "
            "correction over the arms of the column, and Mann-Whitney's U agrees (docs/runs.md); neither test pairs the seeds. "
            "Learning rates are chosen, and arms judged first, by the mean height of the held-out curve (area / width; each "
            "evaluation holds until the next one, so that the last has no weight); a final score is a "
            "single evaluation, and a best one the largest of several, which flatters.", ""]
    for path in sorted((ROOT / "studies").glob("*.yaml")):
        study = read_study(path)
        if left_of(study) != ([], []):
            text += [f"## {study.name}", "", study.question, "", f"Not finished: `python studies/run.py studies/{path.name}`", ""]
        else:
            text += section(study)
    return "\n".join(text)


if __name__ == "__main__":
    (ROOT / "studies" / "RESULTS.md").write_text(written())
