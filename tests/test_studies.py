"""Studies: which runs a study has, the learning rate it chooses, what it keeps of a run, and that RESULTS.md is what was kept."""
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "studies"))
import report  # noqa: E402
import run as runner  # noqa: E402
from run import Job, Study  # noqa: E402

from episode import Episode  # noqa: E402
from judge import shuffle_rewards  # noqa: E402
from policies.tiny import tiny_config, tiny_tokenizer  # noqa: E402
from runtime.metrics import partnered  # noqa: E402
from runtime.files import flat  # noqa: E402
from settings import parse_args  # noqa: E402

STUDIES = sorted((ROOT / "studies").glob("*.yaml"))


def study_of(tmp_path, monkeypatch, **changes) -> Study:
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    settings = {"question": "?", "config": "configs/frozenlake_tiny.yaml", "arms": {"a": {"tau": 10}, "b": {"tau": 20}},
                "seeds": [0, 1], "sweep": {"lr": [0.1, 0.2], "seeds": [100, 101]}} | changes
    return Study("example", **settings)


def keep(study: Study, job: Job, scores: list[float], **config):
    """Evidence of a run that was judged after 10, 20, ... episodes, from 0 at the start."""
    folder = study.data / job.name
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump({"seed": job.seed, "lr": job.lr, **study.arms[job.arm], **config}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps({
        "iteration": i, "episodes": 10 * i, "step": i, "eval/success": score, "eval/start_success": 0.0}) + "\n"
        for i, score in enumerate(scores, 1)))


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_every_run_of_a_study_has_a_command_that_train_accepts(path):
    study = runner.read_study(path)
    for arm, flags in study.arms.items():
        args = parse_args(runner.command(study, Job(arm, 1e-3, 7), ROOT / "runs")[1:])
        assert (args.seed, args.lr, args.wandb) == (7, 1e-3, "off")
        found = flat(vars(args))
        for name, value in (flat(study.flags) | flat(flags)).items():
            if name != "env_options":
                assert found[name] == value, f"{arm}: {name}"


@pytest.mark.parametrize("change, words", [
    ({"armes": {}}, "unknown key armes"),
    ({"seeds": [0, 100]}, "share seeds"),
    ({"lr_of": "other/arm"}, "give a sweep of learning rates, lr_of or lr, one of them"),
    ({"same": [["a", "c"]]}, "no arm is called c"),
    ({"comparisons": [{"x": "steps", "arms": ["d"], "against": []}]}, "no arm is called d"),
    ({"comparisons": [{"x": "steps", "arms": ["a"], "against": ["e"]}]}, "no arm is called e")])
def test_mistakes_in_a_study_file_are_named(tmp_path, capsys, change, words):
    text = {"question": "?", "config": "c", "arms": {"a": {}}, "seeds": [0], "sweep": {"lr": [0.1], "seeds": [100]}}
    path = tmp_path / "example.yaml"
    path.write_text(yaml.safe_dump(text | change))
    with pytest.raises(SystemExit):
        runner.read_study(path)
    assert words in capsys.readouterr().err


def test_an_arm_gets_the_learning_rate_with_the_largest_mean_area_and_a_failed_run_counts_as_nothing(tmp_path, monkeypatch):
    study = study_of(tmp_path, monkeypatch)
    for seed in (100, 101):
        keep(study, Job("a", 0.1, seed), [0.4, 0.4])  # 0 until 10 episodes, then 0.4: area 0.2
        keep(study, Job("b", 0.2, seed), [0.1, 0.9])  # area 0.05
    keep(study, Job("a", 0.2, 100), [0.6, 0.9])  # 0.3, and the other seed failed: 0.15 in the mean
    (study.data / Job("a", 0.2, 101).name).mkdir()
    (study.data / Job("a", 0.2, 101).name / "failed.txt").write_text("loss is not finite")
    for seed in (100, 101):
        keep(study, Job("b", 0.1, seed), [0.08, 0.08])
    assert runner.area(study, Job("a", 0.1, 100)) == pytest.approx(0.2)
    assert runner.area(study, Job("a", 0.2, 101)) == 0
    assert (runner.chosen_lr(study, "a"), runner.chosen_lr(study, "b")) == (0.1, 0.2)
    assert runner.main_jobs(study) == [Job("a", 0.1, 0), Job("b", 0.2, 0), Job("a", 0.1, 1), Job("b", 0.2, 1)]


def test_what_is_done_is_left_out_and_a_run_of_other_flags_is_refused(tmp_path, monkeypatch, capsys):
    study = study_of(tmp_path, monkeypatch)
    keep(study, Job("a", 0.1, 100), [0.5])
    left = runner.missing(study, runner.sweep_jobs(study))
    assert len(left) == 7 and Job("a", 0.1, 100) not in left
    study.arms["a"]["tau"] = 11
    with pytest.raises(SystemExit):
        runner.missing(study, runner.sweep_jobs(study))
    assert "tau was 10, and example.yaml says 11" in capsys.readouterr().err


def test_differences_are_of_the_same_seed_and_areas_of_the_same_width(tmp_path, monkeypatch):
    study = study_of(tmp_path, monkeypatch, comparisons=[{"x": "episodes", "arms": ["a", "b"], "against": ["a"]}])
    monkeypatch.setattr(report, "PLOTS", tmp_path)
    for seed in (100, 101):
        for arm in "ab":
            keep(study, Job(arm, 0.1, seed), [0.5, 0.5])
            keep(study, Job(arm, 0.2, seed), [0.1, 0.1])
    for seed, scores in enumerate(([0.2, 0.4], [0.3, 0.5])):
        keep(study, Job("a", 0.1, seed), scores)
        keep(study, Job("b", 0.1, seed), [score + 0.1 for score in scores] + [1.0])  # judged at 20 episodes, where a ends
    text = "\n".join(report.compared(study, study.comparisons[0]))
    assert "At 20 episodes" in text
    row_a, row_b = ([cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()
                    if line.startswith(("| a ", "| b ")))
    assert row_a[:3] == ["a", "0.1", "2"] and row_a[3].startswith("0.450") and row_a[5].startswith("0.125")  # (0.1 + 0.15) / 2
    assert row_b[3].startswith("0.550") and row_b[6:] == ["+0.100 (+0.100 to +0.100)", "+0.050 (+0.050 to +0.050)"]


def test_arms_that_should_be_one_are_compared_to_the_last_digit(tmp_path, monkeypatch):
    study = study_of(tmp_path, monkeypatch, sweep={"lr": [0.1], "seeds": [100]}, same=[["a", "b"]])
    for arm in "ab":
        keep(study, Job(arm, 0.1, 100), [0.5])
        keep(study, Job(arm, 0.1, 0), [0.2, 0.4])
        keep(study, Job(arm, 0.1, 1), [0.2, 0.4 + 0.125 * (arm == "b")])
    assert report.same_table(study)[2] == "| a and b | 1 of 2 | 0.125 | 1 of 2 |"


def test_drift_is_the_mean_log_ratio_of_an_age_and_its_fit(tmp_path, monkeypatch):
    arms = {"auto": {"replay": "fresh", "tau": "auto"}, "short": {"replay": "fresh", "tau": 3}, "per": {"replay": "per"}}
    study = study_of(tmp_path, monkeypatch, arms=arms, sweep={"lr": [0.1], "seeds": [100]}, drift_of=["auto"])
    monkeypatch.setattr(report, "PLOTS", tmp_path)
    rng = np.random.default_rng(0)
    for arm in arms:
        keep(study, Job(arm, 0.1, 100), [0.5])
        for seed in (0, 1):
            keep(study, Job(arm, 0.1, seed), [0.5 + 0.1 * (arm == "short")] * 2)
            if arm == "auto":
                folder = study.data / Job(arm, 0.1, seed).name
                ages = rng.integers(1, 60, size=4000)
                kl = 0.02 * ages  # a Gaussian log-ratio of mean -kl and variance 2 kl has mean ratio 1 and KL kl
                log_ratio = rng.normal(-kl, np.sqrt(2 * kl))
                probes = {"age": ages.tolist(), "log_ratio": log_ratio.tolist(), "kl": kl.tolist()}
                (folder / "drift.jsonl").write_text(json.dumps({"iteration": 1, "step": 60} | probes) + "\n")
                metrics = folder / "metrics.jsonl"
                metrics.write_text("".join(json.dumps(json.loads(line) | {"buffer/tau": 40.0, "buffer/drift_c": 0.025}) + "\n"
                                           for line in metrics.read_text().splitlines()))
    text = "\n".join(report.drift(study))
    slope, exact = (float(part.split("·")[0]) for part in text.split("Fitted")[1].split("+ ")[1:])
    assert exact == pytest.approx(0.02) and "R² 1.000 of single episodes, 1/c = 50 steps" in text
    # standard error of the slope: sd of a log-ratio at the mean age over sd of the ages, by the root of 8,000 episodes
    assert abs(slope - 0.02) < 4 * np.sqrt(2 * 0.02 * 30) / 17 / np.sqrt(8000)
    first = next(line for line in text.splitlines() if line.startswith("| 1 to 2 "))
    kl, ratio, ess = (float(first.split("|")[place].split("(")[0]) for place in (4, 6, 7))
    assert abs(kl - 0.03) < 4 * np.sqrt(0.06 / 270) and abs(ratio - 1) < 0.06
    assert abs(ess - np.exp(-0.06)) < 0.05  # of log-normal ratios: exp(-variance)
    assert "Of the taus tried, 3 has the largest area and inf the smallest; one minus the other: +0.050" in text


def test_a_run_that_another_study_has_is_taken_over_but_not_where_sameness_is_tested(tmp_path, monkeypatch):
    study = study_of(tmp_path, monkeypatch, lr_of="other", sweep={}, flags={"iterations": 5}, same=[["a", "again"]],
                     arms={"a": {"tau": 10}, "b": {"tau": 20}, "again": {"tau": 10}})
    (tmp_path / "studies").mkdir()
    text = {"question": "?", "config": study.config, "arms": {"a": {}, "c": {"iterations": 5}}, "seeds": [0, 1],
            "flags": {"iterations": 4, "tau": 10}, "sweep": {"lr": [0.1, 0.2], "seeds": [100]}}
    (tmp_path / "studies" / "other.yaml").write_text(yaml.safe_dump(text))
    other = runner.read_study(tmp_path / "studies" / "other.yaml")
    for arm, best in (("a", 0.2), ("c", 0.1)):
        for lr in (0.1, 0.2):
            keep(other, Job(arm, lr, 100), [0.5 * (lr == best), 0.5])
    assert runner.chosen_lr(study, "a") == 0.2  # that of the arm with the same name
    job = Job("a", 0.2, 0)
    assert runner.twin(study, job) is None  # nobody has played it yet
    keep(other, Job("c", 0.2, 0), [0.5])
    (other.data / "c_lr0.2_seed0" / "summary.json").write_text("{}")
    assert runner.twin(study, job) == other.data / "c_lr0.2_seed0"  # an arm of another name, with the same flags in all
    for arm, lr, seed in (("a", 0.2, 1), ("a", 0.1, 0), ("b", 0.2, 0), ("again", 0.2, 0)):
        assert runner.twin(study, Job(arm, lr, seed)) is None
    runner.run_job(study, job, tmp_path / "scratch")
    assert (study.data / job.name / "metrics.jsonl").read_text() == (other.data / "c_lr0.2_seed0" / "metrics.jsonl").read_text()


def test_every_score_in_the_readme_stands_in_the_results():
    section = (ROOT / "README.md").read_text().split("## What we found")[1].split("\n## ")[0]
    scores = set(re.findall(r"[+-]?\d+\.\d{3}", section))
    results = (ROOT / "studies" / "RESULTS.md").read_text()
    assert scores and not {score for score in scores if not re.search(rf"(?<![\d.]){re.escape(score)}(?!\d)", results)}
    assert all((ROOT / path).is_file() for path in re.findall(r"\]\((studies/[^)]+)\)", section))


@pytest.mark.slow
def test_the_results_are_what_the_evidence_says(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "PLOTS", tmp_path)
    assert report.written() == (ROOT / "studies" / "RESULTS.md").read_text(), "run python studies/report.py"


def episode_of(rewards: list[float], error: str | None = None) -> Episode:
    episode = Episode.__new__(Episode)
    episode.turn_rewards, episode.reward = np.array(rewards, np.float32), float(sum(rewards))
    episode.info = {"env_error": error}
    return episode


def test_shuffled_rewards_are_the_same_ones_at_other_episodes_and_no_turn_keeps_its_own():
    episodes = [episode_of([0.0, -0.15, float(i)]) for i in range(50)]
    broken, silent = episode_of([9.0], error="KeyError"), episode_of([])
    before = [episode.reward for episode in episodes]
    shuffle_rewards([broken, *episodes, silent], np.random.default_rng(0))
    after = [episode.reward for episode in episodes]
    assert sorted(after) == sorted(before) and after != before
    assert (broken.reward, silent.reward) == (9.0, 0.0)
    for episode in episodes:
        assert episode.turn_rewards[:-1].tolist() == [0, 0] and episode.turn_rewards[-1] == np.float32(episode.reward)


def test_partnered_rows_are_those_whose_group_has_another_reward_in_the_draw():
    draw = [episode_of([reward]) for reward in (1.0, 0.0, 1.0, 1.0, 0.0)]
    for episode, group in zip(draw, (0, 0, 1, 1, 2)):
        episode.group_id = group
    assert partnered(draw) == [True, True, False, False, False]


def test_a_smaller_tiny_policy_has_heads_that_fill_its_width():
    config = tiny_config(tiny_tokenizer(), width=64, layers=2)
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads * config.head_dim) == (64, 2, 64)
    usual = tiny_config(tiny_tokenizer())
    assert (usual.hidden_size, usual.num_hidden_layers, usual.num_attention_heads, usual.num_key_value_heads) == (128, 4, 4, 2)


@pytest.mark.parametrize("name, value, words", [("width", 96, "multiple of 64"), ("width", 32, "multiple of 64"),
                                                ("width", 0, "above 0"), ("layers", 0, "above 0")])
def test_a_width_without_whole_heads_is_refused(name, value, words, capsys):
    with pytest.raises(SystemExit):
        parse_args(["--tiny-options", name, str(value)])
    assert words in capsys.readouterr().err


@pytest.mark.slow
def test_a_study_is_played_by_the_real_train_resumed_after_a_kill_and_keeps_failures(tmp_path):
    """Two arms, one of which cannot learn (its first update is not finite), in a copy of the project's studies folder."""
    root = tmp_path / "project"
    root.mkdir()
    for path in ROOT.iterdir():
        if path.suffix == ".py" or path.name == "configs" or (path / "__init__.py").exists():
            (root / path.name).symlink_to(path)
    (root / "studies").mkdir()
    for name in ("run.py", "report.py"):
        (root / "studies" / name).write_text((ROOT / "studies" / name).read_text())
    (root / "studies" / "example.yaml").write_text(yaml.safe_dump({
        "question": "Does it run?", "config": "configs/frozenlake_tiny.yaml",
        "seeds": [0], "sweep": {"lr": [1e-3], "seeds": [100]},
        "flags": {"tiny_options": {"width": 64, "layers": 2, "updates": 4}, "iterations": 3, "problems_per_iteration": 4,
                  "group_size": 2, "replay_batch_size": 2, "eval_problems": 8, "eval_every": 1, "max_turns": 4,
                  "cache_dir": str(tmp_path / "cache")},
        "arms": {"on_policy": {"replay": "none", "replay_updates": 0},
                 "auto": {"replay": "fresh", "tau": "auto", "replay_options": {"probe_episodes": 8}}, "too_few": {"replay": "fresh", "tau": "auto"},
                 "failing": {"replay": "fresh", "env": "no_such_task"}},
        "comparisons": [{"x": "episodes", "arms": ["on_policy", "auto"], "against": ["on_policy"]}],
        "drift_of": ["auto", "too_few"]}))
    command = [sys.executable, str(root / "studies" / "run.py"), str(root / "studies" / "example.yaml")]
    quiet = {"env": os.environ | {"OMP_NUM_THREADS": "1"}, "capture_output": True, "text": True}
    data = root / "studies" / "data" / "example"
    playing = subprocess.Popen(command, start_new_session=True, env=quiet["env"])
    while not data.exists() or all(path.name.endswith(".half") for path in data.iterdir()):
        assert playing.poll() is None
        signal.sigtimedwait([], 0.2)
    os.killpg(playing.pid, signal.SIGKILL)
    playing.wait()
    done = {path.name: path.stat().st_mtime_ns for path in data.iterdir() if not path.name.endswith(".half")}
    assert done
    assert subprocess.run(command, **quiet).returncode == 0
    kept = {path.name for path in data.iterdir() if not path.name.endswith(".half")}
    assert kept == {f"{arm}_lr0.001_seed{seed}" for arm in ("on_policy", "auto", "too_few", "failing") for seed in (0, 100)}
    assert all((data / name).stat().st_mtime_ns == time for name, time in done.items())
    assert "no_such_task" in (data / "failing_lr0.001_seed0" / "failed.txt").read_text()
    assert [name for name in sorted(kept) if (data / name / "drift.jsonl").exists()] == ["auto_lr0.001_seed0"]
    lines = [json.loads(line) for line in (data / "auto_lr0.001_seed0" / "metrics.jsonl").read_text().splitlines()]
    assert [line["episodes"] for line in lines] == [8, 16, 24]
    again = subprocess.run([*command, "--dry-run", "True"], **quiet)
    assert again.stdout == "example: 0 runs of the sweep are left, and 0 of the study\n"
