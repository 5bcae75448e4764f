"""Works through studies: every arm with every seed, on the cores there are. Stop and start it as you like: what is done stays.

    python studies/run.py studies/claim_frozenlake.yaml             # two runs side by side, one thread each
    python studies/run.py studies/*.yaml --jobs 8 --dry-run True    # only says what is left to do
    python studies/report.py                                        # then: studies/RESULTS.md and its plots

A study is a YAML file: `config` and `flags` of all its runs, `arms` (flags of each), `seeds`, and `sweep`: the learning rates
that every arm is tried at, on seeds of their own. An arm runs at the learning rate with the largest mean area under its
held-out curve in the sweep; instead of a sweep, `lr_of: STUDY/ARM` (or STUDY, for its arms of the same names) takes over another
one's choice, and `lr` fixes it. What is kept of a run, its evidence, lies in studies/data/STUDY/ARM_lrLR_seedN.
"""
import functools
import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
import yaml

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from look.compare import read_run  # noqa: E402
from runtime.files import fail  # noqa: E402

CURVE = r"iteration|step|episodes|tokens|eval/success|eval/start_success"  # all that is kept of a sweep's runs
KEPT = CURVE + (r"|buffer/(tau|size|drift_.*)|fresh/(success|entropy|signal_share|grad_norm|parse_failures)|"
                r"replay/(updates|age_mean|nonzero_advantage_rows|partnered_rows|success|grad_norm|kl_behavior_k1|ess_token|ess_sequence|clip_fraction|"
                r"weight_min|without_signal)")


@dataclass
class Study:
    """One YAML file. Unknown keys are refused."""
    name: str
    question: str
    config: str
    arms: dict[str, dict]
    seeds: list[int]
    flags: dict = field(default_factory=dict)
    sweep: dict = field(default_factory=dict)
    lr_of: str = ""
    lr: float | None = None
    comparisons: list[dict] = field(default_factory=list)  # {x: episodes or steps, arms: [], against: [arms]}
    table: list[str] = field(default_factory=list)  # further metrics
    same: list[list[str]] = field(default_factory=list)  # pairs of arms that should be one
    drift_of: list[str] = field(default_factory=list)  # arms with --tau auto, whose probes are looked at
    shows: str = ""

    @property
    def data(self) -> Path:
        return ROOT / "studies" / "data" / self.name


@dataclass(frozen=True)
class Job:
    arm: str
    lr: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.arm}_lr{self.lr:g}_seed{self.seed}"


@functools.cache
def read_study(path: Path) -> Study:
    text = yaml.safe_load(Path(path).read_text())
    unknown = set(text) - set(Study.__dataclass_fields__)
    if unknown:
        fail(f"{path}: unknown key {', '.join(sorted(unknown))}; allowed are {', '.join(Study.__dataclass_fields__)}")
    study = Study(name=Path(path).stem, **text)
    if bool(study.sweep) + bool(study.lr_of) + bool(study.lr) != 1:
        fail(f"{path}: give a sweep of learning rates, lr_of or lr, one of them")
    if set(study.sweep.get("seeds", [])) & set(study.seeds):
        fail(f"{path}: sweep and study share seeds; the learning rate has to be chosen on others")
    named = [*sum(study.same, []), *study.drift_of,
             *(arm for comparison in study.comparisons for arm in comparison["arms"] + comparison["against"])]
    for arm in named:
        if arm not in study.arms:
            fail(f"{path}: no arm is called {arm}; there are {', '.join(study.arms)}")
    return study


def flags_of(study: Study, job: Job) -> dict:
    """Those of the arm over the study's; of options, of which both may hold some, each alone."""
    flags = study.flags | study.arms[job.arm] | {"lr": job.lr, "seed": job.seed}
    for key, value in study.flags.items():
        if isinstance(value, dict):
            flags[key] = value | study.arms[job.arm].get(key, {})
    return flags


def command(study: Study, job: Job, runs: Path) -> list[str]:
    """The command line of a run; pairs of options stand in a mapping."""
    words = []
    for key, value in flags_of(study, job).items():
        values = [word for pair in value.items() for word in pair] if isinstance(value, dict) else \
            value if isinstance(value, list) else [value]
        words += [f"--{key.replace('_', '-')}", *map(str, values)]
    return [str(ROOT / "train.py"), str(ROOT / study.config), "--name", job.name, "--runs-dir", str(runs), "--wandb", "off",
            "--quiet", "True", "--transcripts", "0", "--checkpoint-every", "0", *words]


def twin(study: Study, job: Job) -> Path | None:
    """The evidence of the same run in another study. The later arm of a `same` pair is always played."""
    for path in sorted((ROOT / "studies").glob("*.yaml")):
        other = read_study(path)
        if other.name == study.name or job.arm in [later for _, later in study.same] or other.config != study.config:
            continue
        for arm in other.arms:
            same = Job(arm, job.lr, job.seed)
            swept = job.seed not in other.seeds or job.arm in study.drift_of and arm not in other.drift_of
            if flags_of(other, same) == flags_of(study, job) and not swept and (other.data / same.name / "summary.json").exists():
                return other.data / same.name
    return None


def rounded(value):
    return float(f"{value:.5g}") if isinstance(value, float) else value


def run_job(study: Study, job: Job, scratch: Path):
    """Plays one run and keeps its evidence: config, summary, and of metrics.jsonl what the report reads; of a sweep's runs the
    evaluations alone. A run that fails leaves failed.txt, and is counted in the report."""
    out, run = study.data / job.name, scratch / study.name / job.name
    half = out.with_name(out.name + ".half")
    shutil.rmtree(half, ignore_errors=True)
    if known := twin(study, job):
        shutil.copytree(known, half)
        half.rename(out)
        return print(f"{study.name}: {job.name} is {known.parent.name}/{known.name}", flush=True)
    shutil.rmtree(run, ignore_errors=True)
    done = subprocess.run([sys.executable, *command(study, job, run.parent)], capture_output=True, text=True,
                          env=os.environ | {"OMP_NUM_THREADS": "1"})
    half.mkdir(parents=True)
    if (run / "summary.json").exists():
        config = yaml.safe_load((run / "config.yaml").read_text())
        (half / "config.yaml").write_text(yaml.safe_dump({key: value for key, value in config.items() if key != "runs_dir"}))
        swept = job.seed not in study.seeds
        with open(half / "metrics.jsonl", "w") as kept:
            for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
                if not swept or line["eval/success"] is not None:
                    kept.write(json.dumps({key: rounded(value) for key, value in line.items() if value is not None and
                                           re.fullmatch(CURVE if swept else KEPT, key)}) + "\n")
        shutil.copy(run / "summary.json", half)
        if job.arm in study.drift_of and not swept and (run / "drift.jsonl").exists():  # none where too few episodes were played
            shutil.copy(run / "drift.jsonl", half)
    elif done.returncode < 0:  # killed, and may be played again
        return print(f"{study.name}: {job.name} was killed by signal {-done.returncode}", flush=True)
    else:
        (half / "failed.txt").write_text(done.stderr[-2000:])
    half.rename(out)
    shutil.rmtree(run, ignore_errors=True)
    print(f"{study.name}: {job.name} {'failed' if (out / 'failed.txt').exists() else 'done'}", flush=True)


@functools.cache
def area_of(evidence: Path) -> float:
    if (evidence / "failed.txt").exists():
        return 0.0
    run = read_run(evidence, "episodes", "eval/success")
    return run.area(0, run.x[-1])


def area(study: Study, job: Job) -> float:
    """Mean held-out success over the run; a failed run counts as 0."""
    return area_of(study.data / job.name)


def sweep_jobs(study: Study) -> list[Job]:
    return [Job(arm, lr, seed) for seed in study.sweep.get("seeds", []) for arm in study.arms for lr in study.sweep["lr"]]


def chooser(study: Study, arm: str) -> tuple[Study, str]:
    """The study and its arm whose sweep chooses the learning rate."""
    if not study.lr_of:
        return study, arm
    other, _, others_arm = study.lr_of.partition("/")
    return read_study(ROOT / "studies" / f"{other}.yaml"), others_arm or arm


def chosen_lr(study: Study, arm: str) -> float:
    """The sweep's learning rate with the largest mean area, or the one that the study fixes."""
    study, arm = chooser(study, arm)
    if study.lr:
        return study.lr
    return max(study.sweep["lr"], key=lambda lr: np.mean([area(study, Job(arm, lr, seed)) for seed in study.sweep["seeds"]]))


def main_jobs(study: Study) -> list[Job]:
    return [Job(arm, chosen_lr(study, arm), seed) for seed in study.seeds for arm in study.arms]


def missing(study: Study, jobs: list[Job]) -> list[Job]:
    """The jobs that are left. Exits when a kept run was played with other flags than the study's of today."""
    for job in jobs:
        path = study.data / job.name / "config.yaml"
        played = yaml.safe_load(path.read_text()) if path.exists() else {}
        for key, value in flags_of(study, job).items():
            if not isinstance(value, (dict, list)) and played.get(key, value) != value:  # a flag may be newer than the run
                fail(f"{path}: {key} was {played[key]!r}, and {study.name}.yaml says {value!r}: remove that folder, or undo the "
                     "change")
    return [job for job in jobs if not (study.data / job.name).exists()]


def left_of(study: Study) -> tuple[list[Job], list[Job] | None]:
    """The runs of the sweep and of the study that are left; None while the sweep that chooses learning rates is not done."""
    chooses, _ = chooser(study, "")
    waits = missing(chooses, sweep_jobs(chooses))
    return missing(study, sweep_jobs(study)), None if waits else missing(study, main_jobs(study))


@dataclass
class RunArgs:
    """Work through studies."""
    studies: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Study files."""
    jobs: int = 2
    """Runs side by side, one thread each."""
    scratch: Path = ROOT / "runs" / "studies"
    """Where runs play; only their evidence is kept."""
    dry_run: bool = False
    """Only say what is left to do."""


def play(study: Study, jobs: list[Job], args: RunArgs):
    for job in jobs[:1]:  # alone: it makes the warm start that all share
        run_job(study, job, args.scratch)
    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(lambda job: run_job(study, job, args.scratch), jobs[1:]))


def main(argv: list[str]):
    args = tyro.cli(RunArgs, args=argv, prog="studies/run.py", description=__doc__, config=(tyro.conf.FlagConversionOff,))
    for study in map(read_study, args.studies):
        swept, jobs = left_of(study)
        if args.dry_run:
            print(f"{study.name}: {len(swept)} runs of the sweep are left, and " +
                  (f"{len(study.arms) * len(study.seeds)} after it" if jobs is None else f"{len(jobs)} of the study"))
            continue
        play(study, swept, args)
        jobs = left_of(study)[1]
        if jobs is None:
            fail(f"{study.name} waits for the sweep of {study.lr_of or 'its own'}, which is not finished")
        play(study, jobs, args)


if __name__ == "__main__":
    main(sys.argv[1:])
