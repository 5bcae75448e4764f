"""Runs scripts of this folder's parent as processes that need not import torch anew: this one imports it once, and forks for each
line of its input, [[script, flag, ...], file for stdout, file for stderr]; it answers with a line of the process's exit code."""
import json
import os
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[0] = str(ROOT)  # as `python train.py` has it


def begin(command: list[str], out: str, errors: str):
    """What a new process does before the script's first line."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, nothing), (1, os.open(out, os.O_WRONLY)), (2, os.open(errors, os.O_WRONLY))):
        os.dup2(source, target)
    sys.argv = [str(ROOT / command[0]), *command[1:]]


def main():
    import eval  # noqa: F401  the scripts' own modules, and what they import late
    import train  # noqa: F401
    from transformers import AutoModelForCausalLM, LlamaForCausalLM  # noqa: F401
    answers = os.fdopen(os.dup(1), "w")
    for line in iter(sys.stdin.readline, ""):
        command, out, errors = json.loads(line)
        child = os.fork()
        if not child:
            begin(command, out, errors)
            return command[0]
        answers.write(f"{child}\n")
        answers.flush()
        answers.write(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n")
        answers.flush()


if __name__ == "__main__":
    if script := main():
        runpy.run_path(str(ROOT / script), run_name="__main__")
