"""What a run writes while it goes on, the line or bar on the screen, its clock, and the end that Ctrl-C asks for."""
import contextlib
import hashlib
import json
import os
import resource
import secrets
import shutil
import signal
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import requests
import yaml
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from episode import rounded, with_files
from losses import LOSSES, clip_range
from runtime import ranks
from runtime.code import keep_code
from runtime.files import finite_or_none, flat, whole_lines, write_whole
from runtime.options import TABLES

LOGS = ("metrics.jsonl", "episodes.jsonl", "replay.jsonl", "drift.jsonl")  # each line has its iteration


class Interrupt:
    """While it is entered, Ctrl-C or SIGTERM asks the run to end after its iteration, with a checkpoint: `signal` is its number
    (0: none came) and `also` is called. A second one ends the run at once; of several processes only one that comes REPEATED
    seconds later, since a launcher passes on to each what a scheduler has sent to all."""
    REPEATED = 10.0

    def __init__(self, also):
        self.signal, self.also, self.before = 0, also, {}

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():
            self.before = {number: signal.signal(number, self.came) for number in (signal.SIGINT, signal.SIGTERM)
                           if signal.getsignal(number) != signal.SIG_IGN}  # nohup, or a shell's background job
        return self

    def __exit__(self, *_):
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def came(self, number, _):
        if self.signal:
            if time.monotonic() - self.at > self.REPEATED:
                self.__exit__()
                signal.raise_signal(number)
            return
        self.signal, self.at, again = number, time.monotonic(), f"another {self.REPEATED:g} s later"
        if ranks.world() == 1:
            self.__exit__()
            again = "once more"
        told = f"{signal.Signals(number).name}: the run ends after this iteration, with a checkpoint; {again} ends it at once\n"
        os.write(sys.__stderr__.fileno(), told.encode())  # a print may be what was interrupted
        self.also()


class Clock:
    """Seconds of the parts of an iteration; it runs on from one to the next."""

    def __init__(self):
        self.laps, self.at = {}, time.monotonic()

    def lap(self, name: str):
        self.laps[f"{name}_s"], self.at = time.monotonic() - self.at, time.monotonic()

    def metrics(self, tokens: int, sampling: float | None = None) -> dict:
        """Seconds by part, tokens that were sampled or observed a second of sampling (`sampling` seconds, None: the part
        "sample"), the process's peak memory."""
        sampling = self.laps["sample_s"] if sampling is None else sampling
        return self.laps | {"iteration_s": sum(self.laps.values()), "tokens_per_s": tokens / sampling if sampling else None,
                            "memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def cut(path: Path, done: int):
    """Leaves a .jsonl with the whole lines of the first `done` iterations: the others were written after the checkpoint."""
    write_whole(path, "".join(json.dumps(line) + "\n" for line in whole_lines(path) if line["iteration"] <= done))


def clipped_share(objective, log_ratio_N) -> float | None:
    """Share of an episode's tokens with a ratio outside the loss's clip range: all or none where it is the sequence's; or None."""
    limits = clip_range(objective)
    if limits is None:
        return None
    if LOSSES[objective.loss].clips == "mean":
        log_ratio_N = log_ratio_N.mean(keepdims=True)
    ratio_N = np.exp(log_ratio_N)
    return float(((ratio_N < limits[0]) | (ratio_N > limits[1])).mean())


def replay_record(args, objective, iteration: int, step: int, buffer, held: dict, samples, updates) -> dict:
    """A line of replay.jsonl: what the buffer `held` by age before the draws, and each drawn episode's age, weight, number of
    sampled tokens, mean token ratio, share of tokens outside the loss's clip range (None: it has none), and k3 estimate of
    KL(behaviour || current) a token (the last three None: it had no signal)."""
    drawn = {name: [] for name in ("age", "weight", "signal", "tokens", "ratio", "clip_fraction", "kl")}
    for sample, metrics in zip(samples, updates):
        for episode, age, weight, log_ratios in zip(sample.episodes, sample.ages, sample.weights, metrics["log_ratios"]):
            row = {"age": int(age), "weight": float(weight), "signal": int(episode.advantages.any()),
                   "tokens": int(episode.action_mask.sum()), "ratio": None, "clip_fraction": None, "kl": None}
            if log_ratios is not None:
                log_ratio_N = np.clip(log_ratios[episode.action_mask], -20, 20).astype(np.float64)
                ratio_N = np.exp(log_ratio_N)
                row |= {"ratio": float(ratio_N.mean()), "clip_fraction": clipped_share(objective, log_ratio_N),
                        "kl": float((ratio_N - 1 - log_ratio_N).mean())}
            for name, value in row.items():
                drawn[name].append(value if value is None else round(value, 6))
    return {"iteration": iteration, "step": step, "tau": buffer.tau, "alpha": buffer.alpha,
            "age_unit": "iteration" if "age_in_iterations" in args.released else "step", "uses": held["uses"],
            "buffer": {name: held[name] for name in ("age", "count", "priority", "mass")}, "drawn": drawn}


def drift_record(iteration: int, step: int, ages, log_ratios, kl) -> dict:
    """A line of drift.jsonl: the age of each probed episode, its log current/behaviour, and the estimate of KL(behaviour ||
    current) from its tokens. A uniform draw, so that KL and ESS of an age can be had from it."""
    return {"iteration": iteration, "step": step, "age": list(ages), "log_ratio": rounded(log_ratios), "kl": rounded(kl)}


def sparkline(values: list[float], width: int = 24) -> str:
    """Shares from 0 to 1 as bars, the newest ones.

    >>> sparkline([0.0, 0.5, 1.0])
    '▁▅█'
    """
    return "".join("▁▂▃▄▅▆▇█"[min(7, round(8 * max(0.0, value) - 0.01))] for value in values[-width:])


def wandb_login() -> bool:
    """Whether there are credentials for wandb. Looked up here, since wandb's own look-up tells its server that it ran."""
    return bool(os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE") or
                requests.utils.get_netrc_auth(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai"))


def method_of(config: dict) -> str:
    """Eight digits that the runs share whose settings differ in nothing but seed, places and logging."""
    settings = {name: value for name, value in flat(config).items() if name not in TABLES["not_a_setting"]}
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:8]


class NoLog(contextlib.nullcontext):
    """RunLog of the ranks that write nothing."""

    def __enter__(self):
        return self

    def nothing(self, *_):
        pass

    append = bad_update = warn = iteration = finish = nothing


class RunLog:
    """config.yaml, the .jsonl files, wandb or TensorBoard, and the screen: a small dashboard, or lines without a terminal."""

    def __init__(self, run: Path, args, done: int, env):
        """`done`: iterations of the run that is gone on with; `env`: config.yaml says where its problems come from."""
        source = env.source() if hasattr(env, "source") else "Train and held-out problems are different ones, by their content."
        self.run, self.args, self.console = run, args, Console()
        run.mkdir(parents=True, exist_ok=True)
        write_whole(run / "config.yaml", f"# {' '.join(source.split())}\n" + yaml.safe_dump(
            {key: value for key, value in asdict(args).items() if key != "resume"}, sort_keys=False))
        self.code = keep_code(run, env, done)
        for name in LOGS:
            if (run / name).exists():
                cut(run / name, done)
        self.wandb = self.start_wandb() if args.track == "wandb" and args.wandb != "off" else None
        self.tensorboard = None
        if args.track == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter
            self.tensorboard = SummaryWriter(run / "tensorboard", purge_step=done + 1)
        self.progress = Progress(TextColumn("iteration"), BarColumn(bar_width=24), TextColumn("{task.completed}/{task.total}"),
                                 TimeRemainingColumn(), auto_refresh=False)
        self.task = self.progress.add_task("", total=args.iterations, completed=done)
        # drawn once an iteration and only where it changes, so that it does not flicker over a slow line
        self.live = Live(self.progress, console=self.console, auto_refresh=False) if self.console.is_terminal and not args.quiet \
            else None
        self.successes = []  # held-out, since this process began

    def start_wandb(self):
        mode = "online" if self.args.wandb == "on" and wandb_login() else "offline"
        if mode == "offline":
            os.environ["WANDB_ERROR_REPORTING"] = "false"  # its telemetry goes out in offline mode too
        import wandb  # takes a second: only when it is used
        path = self.run / "wandb_id"
        if not path.exists():
            write_whole(path, secrets.token_hex(8))
        args, method = self.args, method_of(asdict(self.args))
        tags = [Path(args.env).name, args.algo, f"replay {args.replay}", *(args.wandb_tags or "").split(",")]
        run = wandb.init(project=args.wandb_project, entity=args.wandb_entity, name=self.run.name, dir=str(self.run), mode=mode,
                         config=asdict(args) | {"code": self.code}, id=path.read_text("utf-8"), resume="allow",
                         tags=[tag[:64] for tag in tags if tag],
                         group=f"{Path(args.env).name}-{args.algo}-{args.replay}-{method}",
                         settings=wandb.Settings(silent=True, console="off"))
        run.define_metric("eval/*", step_metric="episodes")
        for name in ("fresh/*", "replay/*", "buffer/*"):
            run.define_metric(name, step_metric="step")
        shutil.copy(self.run / "code.patch", run.dir)  # is uploaded with it
        return run

    def __enter__(self):
        if self.live:
            self.live.start(refresh=True)
        return self

    def __exit__(self, *error):
        if self.live:
            self.live.stop()
        if self.wandb is not None:
            self.wandb.finish(exit_code=int(error[0] is not None))
        if self.tensorboard is not None:
            self.tensorboard.close()

    def show(self, metrics: dict):
        """The six numbers that matter, and held-out success over time. Age: of what was drawn, without replay that on arrival."""
        form = lambda key, spec: "-" if metrics.get(key) is None else format(metrics[key], spec)  # noqa: E731
        if not self.successes:
            self.successes.append(metrics["eval/start_success"])
        if metrics["eval/success"] is not None:
            self.successes.append(metrics["eval/success"])
        new = metrics["eval/success"] is not None or self.live
        age = form("replay/age_mean", ".0f") if self.args.replay_updates else form("fresh/staleness_mean", ".1f")
        numbers = {"reward": form("fresh/reward", ".2f"), "held-out": f"{self.successes[-1]:.3f}" if new else "-",
                   "age": age, "ESS": form("replay/ess_token", ".2f"),
                   "signal": form("fresh/signal_share", ".0%"), "tokens/s": form("time/tokens_per_s", ",.0f")}
        if self.live:
            table = Table.grid(padding=(0, 3))
            table.add_row(*(f"[dim]{name}[/] {value}" for name, value in numbers.items()))
            self.progress.update(self.task, completed=metrics["iteration"])
            self.live.update(Group(self.progress, table, f"[dim]held-out success[/] {sparkline(self.successes)}"), refresh=True)
        elif not self.args.quiet:
            print(f"iteration {metrics['iteration']}/{self.args.iterations}  " +
                  "  ".join(f"{name} {value}" for name, value in numbers.items()) + f"  {form('time/iteration_s', '.1f')} s",
                  flush=True)

    def append(self, name: str, record: dict):
        with open(self.run / name, "a", encoding="utf-8") as file:
            file.write(json.dumps(finite_or_none(record), allow_nan=False) + "\n")

    def bad_update(self, iteration: int, metrics: dict, episodes):
        names = [[episode.iteration, episode.group_id, episode.problem_id] for episode in episodes]
        self.append("episodes.jsonl", {"iteration": iteration, "event": "loss or gradient not finite; no step was taken",
                                       "where": metrics["where"], "loss": repr(metrics["loss"]),
                                       "grad_norm": repr(metrics["grad_norm"]),
                                       "episodes [iteration, group_id, problem_id]": names})
        self.console.print(f"iteration {iteration}: loss {metrics['loss']}, gradient norm {metrics['grad_norm']}: not finite, no "
                           f"step was taken; it starts in: {metrics['where']}; episodes.jsonl names the episodes", soft_wrap=True,
                           markup=False)

    def warn(self, iteration: int, warning: str):
        self.console.print(f"warning: iteration {iteration}: {warning}", soft_wrap=True, markup=False)
        self.append("episodes.jsonl", {"iteration": iteration, "event": warning})

    def iteration(self, metrics: dict, shown: list[dict]):
        self.append("metrics.jsonl", metrics)
        shown = [with_files(self.run, record) for record in shown]
        for record in shown:
            self.append("episodes.jsonl", record)
        numbers = {key: value for key, value in metrics.items() if value is not None}
        if self.wandb is not None:
            import wandb
            # a new one each time: a table that grows keeps every transcript in memory
            frames = [[wandb.Image(str(self.run / turn["image"])) for turn in record["transcript"] if "image" in turn]
                      for record in shown]
            columns = ["iteration", "kind", "age", "success", "reward", "transcript", *["frames"] * any(frames)]
            table = wandb.Table(columns=columns)
            for record, pictures in zip(shown, frames):
                text = "\n\n".join(f"[{message['role']}] {message['content']}" for message in record["transcript"])
                table.add_data(record["iteration"], record["kind"], record["age"], record["info"]["success"], record["reward"],
                               text, *[pictures] * any(frames))
            self.wandb.log(numbers | {"transcripts": table}, step=metrics["iteration"])
        if self.tensorboard is not None:
            for key, value in numbers.items():
                self.tensorboard.add_scalar(key, value, metrics["iteration"])
        self.show(metrics)

    def finish(self, summary: dict):
        write_whole(self.run / "summary.json", json.dumps(finite_or_none(summary), indent=1))
        if self.wandb is not None:
            self.wandb.summary.update(summary)
        if self.live:
            self.live.stop()
        print(f"held-out success on {summary['heldout_problems']} problems: {summary['start_success']:.3f} at the start, "
              f"{summary['final_success']:.3f} at the end, {summary['best_success']:.3f} at best; {summary['episodes']} "
              f"episodes, {summary['steps']} optimiser steps, {summary['minutes']} minutes\n"
              "look at it: " + (f"python eval.py replay {self.run}; " if (self.run / "replay.jsonl").exists() else "") +
              f"python eval.py show {self.run}")
