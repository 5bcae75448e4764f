"""The README's own example of a task, and the flags and files that it names."""
import re
import shlex
from dataclasses import fields

import pytest
from accelerate.commands.launch import launch_command_parser
from torch.distributed.run import get_args_parser

from conftest import ROOT
from envs import make_env_factory
from settings import Args, parse_args

README = (ROOT / "README.md").read_text()
SCALING = (ROOT / "docs" / "scaling.md").read_text()
COMMANDS = [line.strip() for line in SCALING.replace("\\\n", "").splitlines() if line.startswith("    ") and " train.py " in line]


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


@pytest.mark.parametrize("kind", ["python", "torchrun", "ddp", "fsdp2", "--async-rollouts", "http://", "--machine_rank"])
def test_scaling_has_commands_of_each_kind(kind):
    assert any(kind in line for line in COMMANDS)


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_of_scaling_is_accepted(line, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = shlex.split(line, comments=True)
    start = words.index("train.py")
    args = parse_args(words[start + 1:])
    launched = None
    if words[0] == "torchrun":
        launched = get_args_parser().parse_args(words[1:])
    elif words[0] == "accelerate":
        launched = launch_command_parser().parse_args(words[2:])
        assert (ROOT / launched.config_file).is_file()
        assert args.engine == "hf" or "ddp" in launched.config_file  # what train.py refuses when it starts
    assert not (launched and args.async_rollouts)


@pytest.mark.parametrize("kind", ["fsdp2", "zero3"])
def test_commands_that_split_weights_name_the_engine_that_can(kind):
    """Most configs for GPUs ask for vLLM."""
    texts = [README, SCALING, *(path.read_text() for path in (ROOT / "configs" / "accelerate").glob("*.yaml"))]
    lines = [line for text in texts for line in re.sub(r"\\\n#?", "", text).splitlines() if f"{kind}.yaml --num" in line]
    assert lines and all(" --engine hf" in line for line in lines), lines


def test_every_flag_that_scaling_names_is_there():
    text = "\n".join(part for part in re.sub(r"\\\n", "", SCALING).splitlines() if not part.startswith("    "))
    flags = {field.name for field in fields(Args)} | {"from", "machine_rank", "enable_lora", "max_lora_rank"}  # and of launchers
    named = set(re.findall(r"--([a-z][a-z_-]+)", text))
    assert named and not {flag for flag in named if flag.replace("-", "_") not in flags}
