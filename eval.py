"""Evaluation on held-out problems, and the pictures of runs.

    python eval.py runs/NAME                                 # its last checkpoint, as the run itself was judged
    python eval.py runs/NAME --samples 16 --k 1 4 16         # pass@k, pass^k and the majority of 16 samples a problem
    python eval.py runs/NAME/checkpoints/step_40 --temperature 0
    python eval.py FOLDER_OR_HUB_ID --env frozenlake --env-options size 8

    python eval.py compare runs/a* runs/b* --x episodes      # curves and tables of runs over their seeds
    python eval.py replay runs/NAME                          # pictures of a run's replay
    python eval.py show runs/NAME                            # a run's episodes, to read
    python eval.py plan --mu 5 --alpha 0.1 --rho 0.1         # buffer size and reuse that theory advises
    python eval.py fits --model FOLDER_OR_HUB_ID             # the memory that training needs

(each with --help). An evaluation that was stopped goes on where it was: what was played stands in eval_episodes.jsonl.
"""
import importlib
import sys

SUBCOMMANDS = {"compare": "look.compare", "replay": "look.replay", "show": "look.viewer", "plan": "look.planner",
               "fits": "look.fits"}  # word: its module
if __name__ == "__main__" and sys.argv[1:] and sys.argv[1] in SUBCOMMANDS:  # before torch is imported, which takes seconds
    importlib.import_module(SUBCOMMANDS[sys.argv[1]]).main(sys.argv[2:])
    sys.exit()

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # see train.py

import contextlib
import difflib
import hashlib
import json
import math
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import tyro
import yaml
from rich.console import Console
from rich.progress import Progress

from engines import context_length_of, make_engine
from envs import MissingData, load_env, make_env_factory, options_for, up_to
from episode import PLAYED, episode_record, with_files
from look.scores import bootstrap_interval, report
from policies import loaded, policy_folder
from rollout import collect, guarded
from runtime import ranks
from runtime.checkpoints import fingerprint
from runtime.files import digest, fail, find, finite_or_none, read_yaml, task_files, whole_lines, write_whole
from runtime.metrics import task_averages
from settings import Args, other_defaults

LISTED = f"The sub-commands are {', '.join(SUBCOMMANDS)}; see --help"


def seeds_of(problems: int, samples: int = 1) -> np.ndarray:
    """(problems, samples) seeds. They depend on the number of problems alone: all methods and runs get the same, and more
    samples leave those of the first ones as they are."""
    return np.stack([np.random.default_rng([2026, problems, sample]).integers(2**31, size=problems) for sample in range(samples)],
                    axis=1)


def outcome(episode) -> dict:
    """What the numbers of an evaluation are made of; JSON-able. An episode whose environment broke is a failure."""
    return {"problem_id": episode.problem_id, "success": bool(episode.info["success"] and not episode.info["env_error"]),
            "score": episode.score, "tokens": len(episode.tokens), "sampled_tokens": int(episode.action_mask.sum()),
            "info": episode.info}


def evaluate(engine, chat, make_env, problem_ids: list[int], *, temperature: float, **play) -> dict:
    """Plays one episode for each problem, shared among the ranks, with the seeds of `seeds_of`; returns means over them."""
    mine = ranks.share(len(problem_ids))
    episodes, _ = collect(engine, chat, make_env, problem_ids[mine], list(range(len(problem_ids)))[mine],
                          seeds_of(len(problem_ids))[mine, 0], temperature=temperature, policy_step=0, iteration=0, **play)
    engine.release()  # what comes next must not depend on whether there was an evaluation
    outcomes = ranks.joined([outcome(episode) for episode in episodes])
    return task_averages(outcomes) | averages(outcomes)


def averages(outcomes: list[dict]) -> dict:
    """Means over episodes; of answers (parse_failures, length_stops) over turns."""
    info = {key: [row["info"].get(key, 0) for row in outcomes] for key in PLAYED}
    turns = max(1, sum(info["turns"]))
    return {**{key: float(np.mean([row[key] for row in outcomes])) for key in ("success", "score", "tokens", "sampled_tokens")},
            **{key: sum(info[key]) / turns for key in ("parse_failures", "length_stops")},
            **{key: float(np.mean(info[key])) for key in ("truncated", "context_full", "turns")},
            "env_errors": float(np.mean([bool(error) for error in info["env_error"]])),
            "problems": len({row["problem_id"] for row in outcomes})}


def wilson_interval(successes: float, trials: int, z: float = 1.959964) -> tuple[float, float]:
    """95 % score interval of a proportion (Wilson 1927).

    >>> [round(end, 4) for end in wilson_interval(8, 10)]
    [0.4902, 0.9433]
    """
    share, spread = successes / trials, z * z / trials
    centre = (share + spread / 2) / (1 + spread)
    half = z * math.sqrt(share * (1 - share) / trials + spread / (4 * trials)) / (1 + spread)
    return max(0.0, centre - half), min(1.0, centre + half)


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Chance that k of the samples, drawn without replacement, hold a right one: 1 - C(n-c, k)/C(n, k) (Chen et al. 2021,
    eq. 1), in whole numbers until the last division.

    >>> pass_at_k(4, 1, 2)  # 3 of the 6 pairs
    0.5
    """
    return (math.comb(samples, k) - math.comb(samples - right, k)) / math.comb(samples, k)


def pass_all_k(samples: int, right: int, k: int) -> float:
    """Chance that k of the samples, drawn without replacement, are all right (pass^k): C(c, k)/C(n, k).

    >>> pass_all_k(4, 3, 2)  # 3 of the 6 pairs
    0.5
    """
    return math.comb(right, k) / math.comb(samples, k)


def majority(outcomes: list[dict]) -> float:
    """Whether the most frequent prediction of one problem's samples is right; the mean over predictions that tie. Samples
    without a prediction do not vote; 0 if none votes."""
    votes = {}
    for row in outcomes:
        if row["info"].get("prediction") not in (None, "") and not row["info"]["env_error"]:
            votes.setdefault(str(row["info"]["prediction"]), []).append(row["success"])
    most = max(map(len, votes.values()), default=0)
    return float(np.mean([np.mean(rows) for rows in votes.values() if len(rows) == most])) if votes else 0.0


def summarise(by_problem: list[list[dict]], ks: list[int]) -> dict:
    """`averages`, and 95 % intervals of success, score, pass@k, pass^k and majority (None: the task names no predictions).

    The problems are the unit, since the samples of one are not independent: Wilson's interval where every problem has 0 or 1
    (a single sample, say), else a bootstrap over problems."""
    n, outcomes = len(by_problem[0]), [row for rows in by_problem for row in rows]
    right = [sum(row["success"] for row in rows) for rows in by_problem]
    columns = {"success": [count / n for count in right],
               "score": [np.mean([row["score"] for row in rows]) for rows in by_problem]}
    for k in ks:
        columns[f"pass@{k}"] = [pass_at_k(n, count, k) for count in right]
        columns[f"pass^{k}"] = [pass_all_k(n, count, k) for count in right]
    if any("prediction" in row["info"] for row in outcomes):
        columns["majority"] = [majority(rows) for rows in by_problem]
    result = {"problems": len(by_problem), "samples": n, "episodes": len(outcomes), "success": None, "majority": None}
    lows, highs = bootstrap_interval(np.array(list(columns.values())).T)
    for (name, values), low, high in zip(columns.items(), lows, highs):
        if set(values) <= {0, 1}:
            low, high = wilson_interval(sum(values), len(values))
        result |= {name: float(np.mean(values)), f"{name}_low": float(low), f"{name}_high": float(high)}
    return averages(outcomes) | result | {"task": task_averages(outcomes)}


@dataclass
class EvalArgs:
    """Evaluate a policy on held-out problems. What is None is taken from its run, or from train.py's defaults."""
    source: Annotated[str, tyro.conf.Positional]
    """Folder of a run (its last checkpoint), of a checkpoint or of a model; a hub id; tiny, tiny-vlm or smollm2."""
    eval_problems: Annotated[int | None, tyro.conf.arg(name="problems")] = None
    """Held-out problems."""
    samples: int = 1
    """Episodes of each problem."""
    k: tuple[int, ...] = ()
    """pass@k and pass^k for these. Empty: 1, 2, 4, ... up to --samples."""
    eval_temperature: Annotated[float | None, tyro.conf.arg(name="temperature")] = None
    """Sampling temperature; 0 takes the likeliest token."""
    env: str | None = None
    """The task."""
    env_options: dict[str, str] = field(default_factory=dict)
    """Options of the task, as name value name value; over those of the run if it is the run's task."""
    max_turns: int | None = None
    """Turns after which an episode is cut."""
    max_new_tokens: int | None = None
    """Tokens a turn may have."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Data type of the weights."""
    trust_remote_code: bool | None = None
    """Let the model run Python code that it brings."""
    engine: str | None = None
    """As in train.py."""
    parallel_episodes: int = 256
    """Episodes played side by side; after so many the results so far are on disk."""
    transcripts: int = 8
    """Episodes that are written to eval_episodes.jsonl with their text and tokens."""
    out: str | None = None
    """Where the result goes. None: eval.json in the folder of the run, checkpoint or model; in this folder for a name."""


def settings(arguments: EvalArgs, run: Path | None):
    """train.py's Args: those of the run or the defaults, with the flags over them."""
    try:
        config = read_yaml(run / "config.yaml") if run else {}
    except (yaml.YAMLError, ValueError) as error:
        fail(f"{run / 'config.yaml'} cannot be read: {' '.join(str(error).split())}")
    if not (arguments.env or config):
        what = "belongs to no run" if Path(arguments.source).exists() else "is no folder here, and a model by name has no task"
        fail(f"{arguments.source} {what}: add --env (and --env-options, --max-turns, --max-new-tokens). {LISTED}")
    options = config.get("env_options", {}) if arguments.env in (None, config.get("env")) else {}
    names = {each.name for each in fields(Args)}
    given = {name: value for name, value in vars(arguments).items() if name in names and value is not None}
    usual = {} if config else other_defaults(arguments.source)
    return Args(**usual | {key: value for key, value in config.items() if key in names} | given
                | {"env_options": options | arguments.env_options,
                   "engine_options": config.get("engine_options", {}) | {"parallel": arguments.parallel_episodes}})


def played(args, folder, make_env, problem_ids: list[int], todo: list[tuple[int, int]], transcripts: int):
    """Plays `todo`, pairs of a problem's place and a sample; yields a batch of records for eval_episodes.jsonl at a time."""
    message, error = guarded(make_env().reset, problem_ids[0], 0)
    if error:
        fail(f"the task broke when it was asked for its first problem:\n{error}")
    policy, chat = loaded(folder, args, message)
    seeds = seeds_of(len(problem_ids), 1 + max(sample for _, sample in todo))
    with contextlib.closing(make_engine(args, policy, chat, folder)) as engine:
        for first in range(0, len(todo), args.engine_options["parallel"]):
            batch = todo[first:first + args.engine_options["parallel"]]
            episodes, texts = collect(
                engine, chat, make_env, [problem_ids[place] for place, _ in batch], [place for place, _ in batch],
                [int(seeds[pair]) for pair in batch], temperature=args.eval_temperature, max_turns=args.max_turns,
                max_new_tokens=args.max_new_tokens, format_penalty=args.format_penalty, policy_step=0, iteration=0,
                context_length=context_length_of(args, policy), parallel=len(batch))
            yield [{"iteration": 0, "kind": "eval", "sample": sample, **outcome(episode),
                    **(episode_record(chat, 0, episode, text, kind="eval") if first + row < transcripts else {})}
                   for row, ((_, sample), episode, text) in enumerate(zip(batch, episodes, texts))]


def main(arguments: EvalArgs) -> dict:
    """Plays what is not on disk yet, writes eval.json and prints it."""
    folder, run, home = find(arguments.source, LISTED)
    args, n, ks = settings(arguments, run), arguments.samples, sorted(set(arguments.k))
    count, temperature = 512 if args.eval_problems is None else args.eval_problems, args.eval_temperature
    for name, value in (("problems", count), ("samples", n), ("parallel-episodes", args.engine_options["parallel"]),
                        ("k", min(ks, default=1))):
        if value < 1:
            fail(f"--{name} {value} must be above 0")
    if not temperature >= 0:
        fail(f"--temperature {temperature} must be at least 0")
    if temperature == 0 and n > 1:
        print(f"note: at --temperature 0 the {n} samples of a problem differ only where the task itself has chance in it")
    if max(ks, default=1) > n:
        fail(f"--k {max(ks)} needs as many samples of a problem, and --samples is {n}: raise --samples or lower --k")
    try:
        args.env_options = options_for(arguments.source, load_env(args.env)) | args.env_options  # as train.py does
        make_env = make_env_factory(args.env, args.env_options)
        env = make_env()
        problems = up_to(env, "heldout", count) if args.eval_problems is None else env.problems("heldout", count)
        problem_ids = list(map(int, problems))
        args.model = folder
        folder = policy_folder(args, env)
    except (MissingData, ValueError) as error:
        fail(str(error))

    count = len(problem_ids)
    out = Path(arguments.out or home / "eval.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    log = out.with_name(f"{out.stem}_episodes.jsonl")
    shown = {"checkpoint": Path(folder).name, **{name: getattr(args, name) for name in (
        "env", "env_options", "max_turns", "max_new_tokens", "format_penalty", "context_length", "dtype")},
        "temperature": temperature}
    task = [digest(path) for path in task_files(env)]  # an edited task is another one
    key = hashlib.sha256(json.dumps([shown, fingerprint(folder), problem_ids, task]).encode()).hexdigest()[:12]
    done = {(line["problem_id"], line["sample"]): line for line in whole_lines(log)
            if line["key"] == key and not line["info"]["env_error"]}  # what broke is played again
    todo = [(place, sample) for sample in range(n) for place in range(count) if (problem_ids[place], sample) not in done]
    if len(todo) < n * count:
        print(f"{n * count - len(todo)} of {n * count} episodes are in {log} already; delete it to play them again")
    if todo:
        terminal = Console().is_terminal
        with Progress(transient=True, disable=not terminal) as progress, open(log, "a", encoding="utf-8") as file:
            bar = progress.add_task("episodes", total=n * count, completed=n * count - len(todo))
            if file.tell() and not log.read_bytes().endswith(b"\n"):  # the last line was cut
                file.write("\n")
            for lines in played(args, folder, make_env, problem_ids, todo, arguments.transcripts):
                file.write("".join(json.dumps(finite_or_none(with_files(out.parent, line) | {"key": key})) + "\n"
                                   for line in lines))
                file.flush()
                done |= {(line["problem_id"], line["sample"]): line for line in lines}
                progress.advance(bar, len(lines))
                if not terminal:
                    print(f"{len(done)} of {n * count} episodes", flush=True)
    result = shown | summarise([[done[id, sample] for sample in range(n)] for id in problem_ids],
                               ks or [2**power for power in range(n.bit_length()) if n > 1])
    write_whole(out, json.dumps(finite_or_none(result), indent=1))
    print(report(result), f"{out}: all numbers; {log}: the episodes", sep="\n")
    return result


def dispatch(argv: list[str]):
    word = argv[0] if argv else ""
    near = difflib.get_close_matches(word, SUBCOMMANDS, n=1, cutoff=0.7)
    if word in SUBCOMMANDS:
        importlib.import_module(SUBCOMMANDS[word]).main(argv[1:])
    elif near and not Path(word).exists():
        fail(f"{word} is no sub-command and no run; did you mean {near[0]}? {LISTED}")
    else:
        main(tyro.cli(EvalArgs, args=argv, prog="eval.py", description=__doc__, config=(tyro.conf.FlagConversionOff,)))


if __name__ == "__main__":
    dispatch(sys.argv[1:])
