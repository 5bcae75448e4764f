"""The README's own example of a task, and the flags and files that it names."""
import re

from conftest import ROOT

from envs import make_env_factory
from dataclasses import fields
from settings import Args

README = (ROOT / "README.md").read_text()


def test_the_example_task_plays(tmp_path):
    code = re.search(r"```python\n(.*?)```", README, re.DOTALL)[1]
    assert len(code.splitlines()) < 60
    (tmp_path / "guess.py").write_text(code)
    env = make_env_factory(f"{tmp_path / 'guess.py'}:Guess", {"top": "100"})()
    train, heldout = env.problems("train", 75), env.problems("heldout", 25)
    assert not set(train) & set(heldout)
    assert "from 1 to 100" in env.reset(heldout[0], 0)
    low, high, done = 1, 100, False
    while not done:
        guess = (low + high) // 2
        message, score, done, valid = env.step(f"<answer>{guess}</answer>")
        low, high = (guess + 1, high) if "larger" in message else (low, guess - 1)
    assert env.success and score == 1 and valid and env.info["guesses"] <= 7
    assert env.step("<answer>1</answer><answer>2</answer>")[3] is False


def test_every_flag_and_file_that_the_readme_names_is_there():
    flags = {field.name for field in fields(Args)} | {"samples", "k", "x", "env", "problems", "list", "help", "mu", "alpha", "rho", "from", "out"}
    flags |= {"config", "num", "nproc", "cpu"}  # of launchers: --config_file, --num_processes, --nproc_per_node
    named = set(re.findall(r"--([a-z][a-z-]+)", README))
    assert not {flag for flag in named if flag.replace("-", "_") not in flags}
    files = set(re.findall(r"(?:configs|studies|tests)/[\w./]+\.(?:yaml|py|png)", README)) | set(re.findall(r"`(\w+\.py)`", README))
    assert files and not {file for file in files if not (ROOT / file).exists()}
