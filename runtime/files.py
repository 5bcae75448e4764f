"""Files that a kill at any moment leaves whole: writing and reading them, checksums, one process a folder. No torch here."""
import contextlib
import difflib
import hashlib
import inspect
import json
import math
import os
import re
import shutil
import socket
import sys
import time
from pathlib import Path

import numpy as np
import yaml
from filelock import FileLock, Timeout
from rich.progress import track

FULL_DISK = ("No space left on device", "Disk quota exceeded", "File too large")  # as safetensors says it too, in errors of its own


def fail(message: str):
    """Ends the program as wrong usage: the message and exit code 2."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def progress(items, what: str):
    """The items; meanwhile a bar on a terminal, and in a log file or a pipe a line every ten seconds: `what` 12 of 120."""
    if sys.stdout.isatty():
        yield from track(items, what, transient=True)
        return
    told = time.monotonic()
    for place, item in enumerate(items):
        if time.monotonic() - told >= 10:
            told = time.monotonic()
            print(f"{what} {place} of {len(items)}", flush=True)
        yield item


def sync(path: Path):
    """A file's contents, or a folder's names, are on the disk when this returns."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def temporary_of(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.tmp")


def write_whole(path: Path, text: str):
    """Whoever reads `path`, and whenever the process is killed, finds the old text or the new one."""
    temporary = temporary_of(path)
    try:
        temporary.write_text(text, encoding="utf-8")
        sync(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_state(folder: Path, state: dict):
    """A state_dict as state.npz, its arrays, and state.json."""
    arrays = {name: value for name, value in state.items() if isinstance(value, np.ndarray)}
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / "state.npz", **arrays)
    (folder / "state.json").write_text(json.dumps({name: value for name, value in state.items() if name not in arrays}), "utf-8")


def read_state(folder: Path) -> dict:
    """What `write_state` wrote."""
    with np.load(folder / "state.npz", allow_pickle=False) as arrays:
        return json.loads((folder / "state.json").read_text("utf-8")) | dict(arrays)


def digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def whole_folder(folder: Path, checksums: bool = True):
    """A temporary folder to write into. At the end it gets a manifest of checksums, is on the disk and becomes
    `folder`, in the place of an earlier one. Where anything goes wrong it is removed, and an earlier one stays."""
    temporary, replaced = temporary_of(folder), folder.with_name(f".{folder.name}.old")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        if checksums:
            files = [path for path in sorted(temporary.rglob("*")) if path.is_file()]
            digests = {str(path.relative_to(temporary)): {"sha256": digest(path)} for path in files}
            (temporary / "manifest.json").write_text(json.dumps(digests, indent=1), "utf-8")
        for path in [*temporary.rglob("*"), temporary]:
            sync(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    if folder.exists():  # never be without a whole one: `recover` puts it back
        os.rename(folder, replaced)
    os.rename(temporary, folder)
    sync(folder.parent)
    remove(replaced)


def made_once(folder: Path, needed: tuple[str, ...], make) -> Path:
    """A folder in a cache. Where it lacks a file of `needed`, `make(temporary)` fills it anew; other processes wait meanwhile."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not all((folder / name).is_file() for name in needed):
            with whole_folder(folder, checksums=False) as temporary:
                make(temporary)
    return folder


def task_files(env) -> list[Path]:
    """The files that decide how a task plays: those of its classes, a text or a picture beside one under its name, and what lakes
    have beyond their rules."""
    beyond = Path(__file__).resolve().parent.parent / "tasks" / "boards.py"
    code = {beyond} | {Path(inspect.getfile(kind)).resolve() for kind in type(env).__mro__[:-1]}
    return sorted(path for file in code for path in (file, file.with_suffix(".txt"), file.with_suffix(".png")) if path.is_file())


def remove(folder: Path):
    """Removes a folder so that nobody ever sees a part of it under its name."""
    if folder.exists():
        gone = folder.with_name(f".{folder.name.lstrip('.')}.gone")
        shutil.rmtree(gone, ignore_errors=True)
        os.rename(folder, gone)
        shutil.rmtree(gone, ignore_errors=True)


def recover(parent: Path):
    """After a kill: puts back the folder that was being replaced, removes what was never finished."""
    for replaced in parent.glob(".*.old"):
        folder = parent / replaced.name[1:-len(".old")]
        remove(replaced) if folder.exists() else os.rename(replaced, folder)
    for left in [*parent.glob(".*.tmp"), *parent.glob(".*.gone")]:
        shutil.rmtree(left, ignore_errors=True)


def damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
    try:
        for name, written in json.loads((folder / "manifest.json").read_text("utf-8")).items():
            if digest(folder / name) != written["sha256"]:
                return f"the checksum of {name} is wrong"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return f"its files cannot be checked against manifest.json: {error}"
    return None


def checkpoints(run: Path) -> list[Path]:
    """Complete checkpoints, the oldest first: folders step_NUMBER; a copy under any other name is its owner's."""
    found = [path for path in (run / "checkpoints").glob("step_*") if re.fullmatch("step_[0-9]+", path.name) and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name[5:]))


def last_checkpoint(run: Path, set_aside: bool = False) -> Path | None:
    """The newest checkpoint that is as it was written, None if there is none; says which newer ones are not, and why.
    `set_aside` renames those, so that they do not count as checkpoints any more. Exits with 2 when all are damaged."""
    found = checkpoints(run)
    for folder in reversed(found):
        why = damage(folder)
        if why is None:
            return folder
        if not folder.exists():  # the run went on meanwhile, and removed it
            return last_checkpoint(run, set_aside)
        print(f"warning: {folder} is damaged ({why}); the one before it is taken", file=sys.stderr)
        if set_aside and folder != found[0]:
            os.rename(folder, folder.with_name(f"damaged_{folder.name}_{time.time_ns()}"))
    if found:
        fail(f"no checkpoint of {run} is as it was written; delete {run / 'checkpoints'}, and --resume starts anew in its folder")
    return None


def find(source: str, hint: str) -> tuple[str | Path, Path | None, Path]:
    """Of a run, a checkpoint, a model's folder or its name: (folder or name of the weights, the run that they belong to or None,
    folder for the result). Exits with 2, and the hint, where it is none of them."""
    path = Path(source)
    if (path / "config.yaml").is_file():
        if not checkpoints(path):
            fail(f"{path} has no checkpoint yet (checkpoints/step_*); train.py writes one every --checkpoint-every iterations")
        return last_checkpoint(path), path, path
    if (path / "config.json").is_file() or (path / "adapter_config.json").is_file():
        run = path.resolve().parent.parent
        return path, run if (run / "config.yaml").is_file() else None, path
    here = path.exists() or ("/" in source and path.parent.exists())
    if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", source) and not here:
        return source, None, Path()
    near = [str(config.parent) for config in path.glob("*/config.yaml")][:3]
    near = near or difflib.get_close_matches(source, map(str, path.parent.glob("*/")), n=1, cutoff=0.8)
    fail(f"{source} is not a run (a folder with config.yaml), a checkpoint or a model (config.json)"
         + (f"; did you mean {' or '.join(near)}?" if near else ".") + f" {hint}")


def claim(run: Path, new: bool = False):
    """Makes the folder this process's own until what is returned, a context, is left, or the process ends, however it ends. Exits
    with 2 where another process has it, or where a `new` run would find something in it, and writes nothing there."""
    left = {"lock", ".sampler_weights", temporary_of(run / "config.yaml").name}  # by one that was killed before it had a config
    mine = FileLock(run / "lock", timeout=0)
    full = new and (run.is_symlink() or run.exists() and set(os.listdir(run)) - left)
    try:
        if not full:
            run.mkdir(parents=True, exist_ok=True)
        if not full or (run / "lock").exists():
            mine.acquire()
    except Timeout:
        who = (run / "lock").read_text("utf-8").strip() or "a process that just started"
        fail(f"{run} is being trained by {who}: " + ("choose another --name" if new else "wait for its end, or stop it"))
    if full:
        mine.release()
        fail(f"{run} exists already: choose another --name" + (f", or go on with --resume {run}" if (run / "config.yaml").exists()
             else "; it is no run (no config.yaml), or a link"))
    who = f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S')}\n"
    (run / "lock").write_text(who, "utf-8")
    return mine


def give_back(run: Path):
    """Removes the claimed folder of a run that has written nothing, and that of all runs where it is empty then."""
    if os.listdir(run) == ["lock"]:
        (run / "lock").unlink()
        run.rmdir()
        with contextlib.suppress(OSError):
            run.parent.rmdir()


class NotFinite(ValueError):
    """A NaN or an infinity where the run cannot go on; the message says where it starts."""


@contextlib.contextmanager
def told_plainly(run: Path):
    """A full disk and numbers that are not finite end the run with a sentence instead of a traceback."""
    try:
        yield
    except NotFinite as error:
        fail(str(error))
    except Exception as error:
        reasons = [reason for reason in FULL_DISK if reason in str(error)]
        if not reasons:
            raise
        safe = f"; {checkpoints(run)[-1]} is complete" if checkpoints(run) else ""
        again = f"go on with --resume {run}" if (run / "config.yaml").exists() else "start again"
        fail(f"cannot write {getattr(error, 'filename', None) or run}: {reasons[0]}{safe}. Free some space (smaller "
             f"--keep-checkpoints and --transcripts need less), then {again}")


def flat(config: dict) -> dict:
    """Settings without their mappings, {"async_options.queue": 2, ...}; the task's options stay together."""
    result = {}
    for key, value in config.items():
        inner = value if isinstance(value, dict) and key.endswith("_options") and key != "env_options" else None
        result |= {key: value} if inner is None else {f"{key}.{name}": each for name, each in inner.items()}
    return result


def read_yaml(path: Path, loader=yaml.SafeLoader):
    """The content of a YAML file, at most 64 kB, without aliases and deep nesting: a few lines of those can mean gigabytes.
    OSError, UnicodeDecodeError or yaml.YAMLError where it cannot be read."""
    with open(path, encoding="utf-8") as file:
        text, depth = file.read(2**16 + 1), 0
    if len(text) > 2**16:
        raise yaml.YAMLError("a config has at most 65,536 characters")
    for event in yaml.parse(text):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.AliasEvent) or depth > 8:
            raise yaml.YAMLError(f"line {event.start_mark.line + 1}: a config has no aliases (*name) and no deep nesting")
    return yaml.load(text, loader)


def finite_or_none(value):
    """JSON has no NaN, no infinity and no NumPy numbers."""
    if isinstance(value, dict):
        return {key: finite_or_none(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite_or_none(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def parsed(line: bytes) -> dict:
    """A line of a .jsonl that a run wrote; ValueError if it is cut off or not an object."""
    record = json.loads(line.decode(errors="replace"))
    if not isinstance(record, dict):
        raise ValueError(f"a {type(record).__name__}, not an object")
    return record


def read_lines(path: Path, is_whole=lambda record: True) -> tuple[list[dict], int]:
    """Records of a .jsonl, none without a file; and how many lines were left out: cut off by a kill, or not `is_whole`."""
    records, lines = [], path.read_bytes().splitlines() if path.is_file() else []
    for line in lines:
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):  # counted by its absence
            record = parsed(line)
            if isinstance(record["iteration"], int) and is_whole(record):
                records.append(record)
    return records, len(lines) - len(records)


def whole_lines(path: Path) -> list[dict]:
    return read_lines(path)[0]
