"""Writes studies/RESULTS.md and its plots from the evidence in studies/data: nothing in them is typed.

    python studies/report.py                 # every study that has evidence

A study's comparisons name arms and the budget they are judged at (`x: episodes` or `x: steps`); `tables` of further metrics are
means over a run's iterations, then over seeds. Intervals are 95 % bootstrap intervals over seeds.
"""
import json
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "studies"))
from run import ROOT, Job, area, chosen_lr, main_jobs, missing, read_study, sweep_jobs  # noqa: E402, F811
from compare import (X_AXES, CompareArgs, amount, bootstrap_interval, draw, judge, number, read_run, with_interval)  # noqa: E402


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *rows]]


def sweep_table(study) -> list[str]:
    """Mean area under the held-out curve of each arm at each learning rate; the chosen one is bold."""
    rows = []
    for arm in study.arms:
        best, cells = chosen_lr(study, arm), []
        for lr in study.sweep["lr"]:
            value = number(np.mean([area(study, Job(arm, lr, seed)) for seed in study.sweep["seeds"]]))
            cells.append(f"**{value}**" if lr == best else value)
        rows.append([arm, *cells])
    return [f"Learning rates, chosen on seeds {', '.join(map(str, study.sweep['seeds']))} by the area under the held-out curve:", "",
            *table(["arm", *(f"{lr:g}" for lr in study.sweep["lr"])], rows), ""]


def difference(study, arm: str, reference: str, x: str, end: float) -> str:
    """Mean over seeds of final(arm) - final(reference), the same seed's runs compared, with its interval."""
    pairs = [[read_run(study.data / job.name, x, "eval/success").at(end) for job in
              (Job(name, chosen_lr(study, name), seed) for name in (arm, reference))] for seed in study.seeds]
    gain_N = np.array(pairs)[:, 0] - np.array(pairs)[:, 1]
    low, high = bootstrap_interval(gain_N)
    return f"{gain_N.mean():+.3f} ({low:+.3f} to {high:+.3f})"


def compared(study, comparison: dict, plot: Path) -> list[str]:
    x = comparison["x"]
    groups = {arm: [read_run(study.data / Job(arm, chosen_lr(study, arm), seed).name, x, "eval/success") for seed in study.seeds]
              for arm in comparison["arms"]}
    end = min(run.x[-1] for runs in groups.values() for run in runs)
    args = CompareArgs(runs=(), x=x)
    rows, _ = judge(groups, args, 0.0, end)
    draw(groups, rows, args, end, plot.parent)
    for suffix in (".png", ".svg"):
        (plot.parent / f"comparison{suffix}").rename(plot.with_suffix(suffix))
    plot.with_suffix(".svg").unlink()
    reference, lines = comparison["arms"][0], []
    for row in rows:
        summaries = [json.loads((run.path / "summary.json").read_text()) for run in groups[row["settings"]]]
        spent = [f"{np.mean([summary[key] for summary in summaries]):,.0f}" for key in ("episodes", "steps")]
        gain = "" if row["settings"] == reference else difference(study, row["settings"], reference, x, end)
        lines.append([row["settings"], f"{chosen_lr(study, row['settings']):g}", str(row["seeds"]), *spent,
                      *(with_interval(row, key) for key in ("final", "best", "area")), gain])
    return [f"At {amount(end)} {X_AXES[x][1]}:", "",
            *table(["arm", "lr", "seeds", "episodes in all", "steps in all", "final", "best", "area / width", f"final minus {reference}"],
                   lines), "", f"![{study.name} over {X_AXES[x][1]}]({plot.relative_to(ROOT / 'studies')})", ""]


def metrics_table(study, keys: list[str]) -> list[str]:
    """Means over iterations and seeds of further metrics of metrics.jsonl."""
    rows = []
    for arm in study.arms:
        runs = [[json.loads(line) for line in (study.data / Job(arm, chosen_lr(study, arm), seed).name / "metrics.jsonl").read_text()
                 .splitlines()] for seed in study.seeds]
        rows.append([arm])
        for key in keys:
            means = [np.mean(values) for values in ([line[key] for line in run if key in line] for run in runs) if values]
            rows[-1].append(f"{np.mean(means):.3g}" if means else "")
    return [*table(["arm", *keys], rows), ""]


def section(study) -> list[str]:
    jobs = sweep_jobs(study) * bool(study.sweep) + main_jobs(study)
    summaries = [json.loads(path.read_text()) for job in jobs if (path := study.data / job.name / "summary.json").exists()]
    failed = [job.name for job in jobs if (study.data / job.name / "failed.txt").exists()]
    starts = {round(summary["start_success"], 3) for summary in summaries}
    text = [f"## {study.name}", "", study.question, "",
            f"`python studies/run.py studies/{study.name}.yaml`: {len(summaries)} runs, "
            f"{sum(summary['minutes'] for summary in summaries):.0f} minutes of one core; {len(study.seeds)} seeds an arm; "
            f"{summaries[0]['heldout_problems']} held-out problems, the same in all; warm start at "
            f"{', '.join(f'{start:.3f}' for start in sorted(starts))}." +
            (f" Failed and counted as 0 in the sweep: {', '.join(failed)}." if failed else ""), ""]
    text += sweep_table(study) if study.sweep else []
    for comparison in study.comparisons:
        text += compared(study, comparison, ROOT / "studies" / "plots" / f"{study.name}_{comparison['x']}.png")
    text += metrics_table(study, study.tables) if study.tables else []
    return text + ([study.shows, ""] if study.shows else [])


def main():
    (ROOT / "studies" / "plots").mkdir(exist_ok=True)
    text = ["# What replay and freshness buy on the small tasks", "",
            "Written by `python studies/report.py` from the runs in studies/data; the sentences come from the study files.", ""]
    for path in sorted((ROOT / "studies").glob("*.yaml")):
        study = read_study(path)
        if missing(study, sweep_jobs(study)) or missing(study, main_jobs(study)):
            print(f"{study.name}: not finished, left out")
            continue
        text += section(study)
    (ROOT / "studies" / "RESULTS.md").write_text("\n".join(text))


if __name__ == "__main__":
    main()
