"""Opening a run."""
import hashlib
import inspect
import json
from pathlib import Path

from envs import up_to
from runtime.files import fail
from settings import Args


def problems_of(env, split: str, asked: int | None, usual: int, flag: str) -> list[int]:
    """`asked` problems; without a wish the usual number, or all that the task has. Exits with 2 when it has too few."""
    try:
        return up_to(env, split, usual) if asked is None else env.problems(split, asked)
    except ValueError as error:
        fail(f"{flag} {usual if asked is None else asked}: {error}")


def finished(run: Path, args: Args) -> bool:
    """Whether the run's end was written; not where it was killed after its last checkpoint."""
    summary = run / "summary.json"
    return summary.exists() and json.loads(summary.read_text())["iterations"] == args.iterations


def code_files(env) -> list[Path]:
    """The files that decide what is learned, the task's own among them."""
    top = Path(__file__).resolve().parent.parent
    names = ("train", "settings", "judge", "update", "losses", "episode", "buffer", "problems", "drift", "rollout", "models", "envs",
             "engines/__init__", "engines/hf", "engines/samplers", "engines/vllm", "runtime/ranks")
    own = [top / f"{name}.py" for name in names]
    return own + sorted({Path(inspect.getfile(kind)) for kind in type(env).__mro__[:-1]} - set(own))


def digest_of(values: list) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]
