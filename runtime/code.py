"""Which code a run is of: a digest of each file that decides what is learned, and what was edited since the last commit."""
import difflib
import json
import subprocess
from pathlib import Path

from runtime.files import digest, task_files, write_whole

TOP = Path(__file__).resolve().parent.parent
NAMES = ("train", "settings", "judge", "update", "losses", "episode", "buffer", "problems", "drift", "rollout", "models", "envs",
         "engines/hf", "engines/samplers", "engines/vllm", "runtime/entries", "runtime/masters", "runtime/memories", "runtime/ranks",
         "runtime/tensors")


def code_files(env) -> list[Path]:
    """The files that decide what is learned, the task's own among them."""
    return sorted({TOP / f"{name}.py" for name in NAMES} | set(task_files(env)))


def name_of(path: Path) -> str:
    return str(path.relative_to(TOP)) if path.is_relative_to(TOP) else path.name


def committed(path: Path) -> str:
    """Its text in the last commit; nothing where there is none, or no git."""
    try:
        shown = subprocess.run(["git", "show", f"HEAD:./{path.name}"], cwd=path.parent, capture_output=True, encoding="utf-8", timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return shown.stdout if shown.returncode == 0 else ""


def patch_of(files: list[Path]) -> str:
    """What was edited since the last commit; whole files where that does not know them."""
    lines = []
    for path in files:
        if path.suffix != ".png":
            before, now = committed(path).splitlines(), path.read_text(encoding="utf-8").splitlines()
            lines += difflib.unified_diff(before, now, f"a/{name_of(path)}", f"b/{name_of(path)}", lineterm="")
    return "\n".join([*lines, ""])


def keep_code(run: Path, env, done: int) -> dict[str, str]:
    """Writes code.json, a digest of each file, and code.patch; returns the digests. A run that is gone on with, after iteration
    `done`, by other code has the digests of both, old+new, and its patches apart."""
    files = code_files(env)
    digests, patch = {name_of(path): digest(path)[:16] for path in files}, patch_of(files)
    if done and (run / "code.json").exists():
        before = json.loads((run / "code.json").read_text("utf-8"))
        for name, now in digests.items():
            earlier = before.get(name, now)
            digests[name] = earlier if earlier.split("+")[-1] == now else f"{earlier}+{now}"
        changed = [name for name in digests if digests[name] != before.get(name)]
        if changed:
            (run / "code.patch").rename(run / f"code.until_{done}.patch")
            print(f"note: changed since iteration {done}: {', '.join(changed)}; it does not go on bit for bit as it would have")
    write_whole(run / "code.patch", patch)
    write_whole(run / "code.json", json.dumps(digests, indent=1))
    return digests
