"""What lets a run be killed at any moment: files that are whole or not there, checksums, one process a folder, and what may be
different when it goes on."""
import contextlib
import errno
import fcntl
import hashlib
import json
import os
import random
import re
import shutil
import socket
import sys
import time
from pathlib import Path

import numpy as np
import torch
import transformers

from watch import NotFinite

FORMAT = 2  # of checkpoints; 1 had no checksums
LOOK_SECONDS = 0.5  # more than the moment for which `holder` has the lock of a folder that nobody trains in
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def fail(message: str):
    """Ends the program as wrong usage: the message and exit code 2."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


# ------------------------------------------------------------------------------------------------------ whole files


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
        temporary.write_text(text)
        sync(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def files_of(folder: Path) -> dict[str, Path]:
    return {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}


def digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def whole_folder(folder: Path):
    """A temporary folder to write into. At the end it gets a manifest of sizes and checksums, is on the disk and becomes
    `folder`, in the place of an earlier one. Where anything goes wrong it is removed, and an earlier one stays."""
    temporary, replaced = temporary_of(folder), folder.with_name(f".{folder.name}.old")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        files = {name: {"bytes": path.stat().st_size, "sha256": digest(path)} for name, path in files_of(temporary).items()}
        (temporary / "manifest.json").write_text(json.dumps(files, indent=1))
        for path in [*temporary.rglob("*"), temporary]:
            sync(path)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if not isinstance(error, OSError) and (number := full_disk(error)):
            raise OSError(number, os.strerror(number), str(folder)) from error
        raise
    if folder.exists():  # never be without a whole one: `recover` puts it back
        os.rename(folder, replaced)
    os.rename(temporary, folder)
    sync(folder.parent)
    remove(replaced)


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
    for pattern in (".*.tmp", ".*.gone"):
        for left in parent.glob(pattern):
            shutil.rmtree(left, ignore_errors=True)


def damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint, or None. Those of format 1 have no checksums and are taken as they are."""
    try:
        state = json.loads((folder / "state.json").read_text())
    except (OSError, ValueError) as error:
        return f"state.json cannot be read: {error}"
    try:
        files = json.loads((folder / "manifest.json").read_text())
        for name, written in files.items():
            path = folder / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != written["bytes"]:
                return f"{name} has {path.stat().st_size:,} bytes instead of {written['bytes']:,}"
            if digest(path) != written["sha256"]:
                return f"the checksum of {name} is wrong"
    except FileNotFoundError:
        return "manifest.json is missing" if state.get("format", 1) > 1 else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return f"its files cannot be checked against manifest.json: {error}"
    return None


# ------------------------------------------------------------------------------------------------------ checkpoints


def checkpoints(run: Path) -> list[Path]:
    """Complete checkpoints, the oldest first."""
    return sorted((run / "checkpoints").glob("step_*"), key=lambda path: int(path.name.split("_")[1]))


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


# ------------------------------------------------------------------------------------------------------ one process a folder


def locked(lock, how: int) -> bool:
    """Whether the lock of an open file could be had at once."""
    try:
        fcntl.flock(lock, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def holder(run: Path) -> str | None:
    """Who trains in the folder right now, or None."""
    try:
        with open(run / "lock") as lock:
            return None if locked(lock, fcntl.LOCK_SH) else lock.read().strip() or "a process that just started"
    except FileNotFoundError:
        return None


def taken(run: Path, mine: bool = False) -> str | None:
    """Why a new run cannot have this folder, or None; `mine`: this process holds its lock."""
    if not mine and (who := holder(run)):
        return f"{run} is being trained by {who}: choose another --name, or wait for its end"
    if run.is_symlink():
        return f"{run} exists already and is a link: choose another --name"
    left = {"lock", ".sampler_weights", temporary_of(run / "config.yaml").name}  # by one that was killed before it had a config
    if run.exists() and set(os.listdir(run)) - left:
        return f"{run} exists already: choose another --name" + \
            (f", or go on with --resume {run}" if (run / "config.yaml").exists() else "; it is no run (no config.yaml)")
    return None


def claim(run: Path):
    """Makes the folder this process's own until the file that is returned is closed or the process ends, however it ends; exits
    with 2 where another process has it."""
    run.mkdir(parents=True, exist_ok=True)
    lock, end = open(run / "lock", "a+"), time.monotonic() + LOOK_SECONDS
    while not (mine := locked(lock, fcntl.LOCK_EX)) and time.monotonic() < end:
        time.sleep(0.01)
    if not mine:
        lock.seek(0)
        fail(f"{run} is being trained by {lock.read().strip() or 'a process that just started'}: wait for its end, or stop it")
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
    lock.flush()
    return lock


def give_back(run: Path):
    """Removes the claimed folder of a run that has written nothing."""
    if os.listdir(run) == ["lock"]:
        (run / "lock").unlink()
        run.rmdir()


def full_disk(error: BaseException) -> int | None:
    """The error's number where it says that a disk is full; safetensors has exceptions of its own."""
    return next((number for number in FULL_DISK
                 if getattr(error, "errno", None) == number or f"(os error {number})" in str(error)), None)


@contextlib.contextmanager
def told_plainly(run: Path):
    """A full disk and numbers that are not finite end the run with a sentence instead of a traceback."""
    try:
        yield
    except NotFinite as error:
        fail(str(error))
    except Exception as error:
        if not (number := full_disk(error)):
            raise
        safe = f"; {checkpoints(run)[-1]} is complete" if checkpoints(run) else ""
        again = f"go on with --resume {run}" if (run / "config.yaml").exists() else "start again"
        fail(f"cannot write {getattr(error, 'filename', None) or run}: {os.strerror(number)}{safe}. Free some space (smaller "
             f"--keep-checkpoints and --transcripts need less), then {again}")


# ------------------------------------------------------------------------------------------------------ the same on resume


class GlobalRandomness:
    """The global generators of Python, NumPy and torch: nothing here draws from them, but a task of your own may."""

    def __init__(self, seed: int):
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)

    def state_dict(self) -> dict:
        version, numbers, gauss = random.getstate()
        kind, keys, *others = np.random.get_state()
        devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        return {"python": np.array(numbers, np.int64), "python_version": version, "python_gauss": gauss, "numpy": keys,
                "numpy_kind": kind, "numpy_others": others, "torch": torch.get_rng_state().numpy(),
                **{f"cuda{number}": state.numpy() for number, state in enumerate(devices)}}

    def save(self, folder: Path):
        folder.mkdir()
        state = self.state_dict()
        arrays = {key: value for key, value in state.items() if isinstance(value, np.ndarray)}
        np.savez(folder / "state.npz", **arrays)
        (folder / "state.json").write_text(json.dumps({key: value for key, value in state.items() if key not in arrays}))

    @classmethod
    def load(cls, folder: Path) -> "GlobalRandomness":
        """Sets the generators, too."""
        generators = cls.__new__(cls)
        with np.load(folder / "state.npz", allow_pickle=False) as arrays:
            generators.load_state_dict(json.loads((folder / "state.json").read_text()) | dict(arrays))
        return generators

    def take_share(self, shards: list, rank: int, world: int):
        """Of another number of processes: all begin with the first one's."""
        self.load_state_dict(shards[0].state_dict())

    def load_state_dict(self, state: dict):
        random.setstate((state["python_version"], tuple(state["python"].tolist()), state["python_gauss"]))
        np.random.set_state((state["numpy_kind"], state["numpy"], *state["numpy_others"]))
        torch.set_rng_state(torch.from_numpy(state["torch"].copy()))
        devices = [torch.from_numpy(state[f"cuda{number}"].copy()) for number in range(torch.cuda.device_count())
                   if f"cuda{number}" in state]
        if devices:
            torch.cuda.set_rng_state_all(devices)


def surroundings(files: list[Path], **more) -> dict[str, str]:
    """What a run depends on beside its settings, by name: the code in `files`, libraries, threads, the device, and `more`."""
    return {path.name: digest(path)[:16] for path in files} | {
        "torch": torch.__version__, "transformers": transformers.__version__, "numpy": np.__version__,
        "threads": str(torch.get_num_threads()),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU", **more}


def changed(saved: dict, now: dict) -> dict[str, tuple]:
    """{name: (saved, now)} of what both have and differs."""
    return {name: (saved[name], now[name]) for name in sorted(saved.keys() & now.keys()) if saved[name] != now[name]}


def checkpoint_to_resume(run: Path, args: dict, may_change: set[str]) -> Path | None:
    """The newest sound checkpoint, None if there is none yet. Says which settings are others than when it was written; exits
    with 2 where they must not be."""
    recover(run / "checkpoints")
    checkpoint = last_checkpoint(run, set_aside=True)
    if checkpoint is None:
        log = run / "metrics.jsonl"
        logged = len(re.findall(r"^{.*}$", log.read_text(), re.MULTILINE)) if log.exists() else 0
        if (run / "summary.json").exists() or 0 < args["checkpoint_every"] < logged:
            fail(f"{run} has logged {logged} iterations, but its checkpoints are gone: there is nothing to go on from, and "
                 "starting anew would erase its logs; start a run of another --name")
        print(f"{run} has no checkpoint yet: it starts anew in its folder")
        return None
    state = json.loads((checkpoint / "state.json").read_text())
    if state.get("format", 1) > FORMAT:
        fail(f"{checkpoint} has format {state['format']} and this code knows those up to {FORMAT}: go on with the newer code")
    for name, (before, now) in changed(state.get("args", {}), args).items():
        flag = f"--{name.replace('_', '-')}"
        if name == "resume":
            continue
        if name not in may_change:
            fail(f"{flag} was {before} when {checkpoint} was written and cannot become {now} on resume: set it back in its "
                 f"config.yaml, or start a new run. These can change: {', '.join(sorted(may_change - {'resume'}))}")
        print(f"changed on resume: {flag} {before} -> {now}")
    return checkpoint


def warn_of_changes(saved: dict, now: dict):
    """Says which code, library or device is another one than when the checkpoint was written."""
    found = [name if name.endswith((".py", "problems", "start")) else f"{name} {before} -> {after}"
             for name, (before, after) in changed(saved, now).items()]
    if found:
        print(f"warning: changed since the checkpoint was written: {', '.join(found)}. The run goes on, but not bit for bit as "
              "it would have", file=sys.stderr)
