"""The flags, options and files that README and docs/ name, and the commands of docs/scaling.md."""
import re
import shlex
from dataclasses import fields

import pytest
from accelerate.commands.launch import launch_command_parser
from torch.distributed.run import get_args_parser

from conftest import ROOT
from eval import EvalArgs
from runtime.options import OPTIONS
from settings import Args, parse_args

README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OTHERS = {"list", "help", "x", "y", "mu", "alpha", "rho", "from", "out", "target", "baseline", "problems", "temperature", "max_episodes",  # of eval.py
          "config_file", "num_processes", "nproc_per_node", "cpu", "machine_rank",  # of launchers
          "main_process_ip", "main_process_port", "num_machines",
          "enable_lora", "max_lora_rank", "max_model_len", "max_num_batched_tokens", "no_enable_chunked_prefill",
          "generation_config", "logprobs_mode", "port"}  # of vLLM's server
SCALING = (ROOT / "docs" / "scaling.md").read_text()
COMMANDS = [line.strip() for line in SCALING.replace("\\\n", "").splitlines() if line.startswith("    ") and " train.py " in line]


def names_of(text: str) -> set[str]:
    return set(re.findall(r"--([a-z][a-z_-]+)", text))


def unknown(named: set[str]) -> set[str]:
    """Flags that neither train.py, nor eval.py, nor a launcher has."""
    flags = {field.name for field in fields(Args)} | {field.name for field in fields(EvalArgs)} | OTHERS
    return {flag for flag in named if flag.replace("-", "_") not in flags}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_flag_that_a_page_names_is_there(path):
    text = re.sub(r"\\\n", "", path.read_text())
    assert not unknown(names_of(text))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_option_that_a_page_names_is_there(path):
    for flag, option in re.findall(r"--((?:tiny|engine|async|problem|replay)-options) (\w+)", path.read_text()):
        assert option in OPTIONS[flag.replace("-", "_")], (flag, option)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_file_that_a_page_names_is_there(path):
    text = path.read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if not link.startswith("http")]
    assert not [link for link in links if not (path.parent / link).exists()]
    files = re.findall(r"(?<![\w/.])(?:configs|studies|tests|examples)/[\w./]+\.(?:yaml|py|png)", text)
    assert not [file for file in files if not (ROOT / file).exists()]


def test_the_readme_names_every_file_of_the_top_level():
    named = set(re.findall(r"`(\w+\.py)`", README))
    assert {path.name for path in ROOT.glob("*.py")} <= named


def test_every_ablation_of_the_readme_has_its_mark():
    rows = re.findall(r"^\| ([\w ]+) \| `(\w+\.py)`(?:, `([^`]+)`| or)", README, re.MULTILINE)
    marked = [(file, mark) for _, file, mark in rows if mark]
    assert len(marked) == 6
    for file, mark in marked:
        assert re.search(f"# ALGO LOGIC: .*{mark}", (ROOT / file).read_text()), (file, mark)


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
