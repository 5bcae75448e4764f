"""Checkpoints: what a run needs to go on as if it had never stopped, and what may be different then."""
import contextlib
import json
import random
import re
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

from buffer import ReplayBuffer
from models import load_policy
from runtime import ranks
from runtime.files import (checkpoints, digest, fail, flat, last_checkpoint, read_state, recover, remove, sync, temporary_of,
                           whole_folder, whole_lines, write_state)
from runtime.log import LOGS
from runtime.options import spelled
from runtime.memories import load_buffer, save_buffer, take_share

FORMAT = 2  # of checkpoints; 1 had no checksums


class GlobalRandomness:
    """The global generators of Python, NumPy and torch: nothing here draws from them, but a task of your own may."""

    def __init__(self, seed: int):
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)

    def save(self, folder: Path):
        version, numbers, gauss = random.getstate()
        kind, keys, *others = np.random.get_state()
        devices = {f"cuda{number}": state.numpy() for number, state in enumerate(torch.cuda.get_rng_state_all())}
        folder.mkdir()
        write_state(folder / "state", devices | {
            "python": np.array(numbers, np.int64), "python_version": version, "python_gauss": gauss, "numpy": keys,
            "numpy_kind": kind, "numpy_others": others, "torch": torch.get_rng_state().numpy()})

    @staticmethod
    def load(folder: Path):
        """Sets the generators."""
        state = read_state(folder / "state")
        random.setstate((state["python_version"], tuple(state["python"].tolist()), state["python_gauss"]))
        np.random.set_state((state["numpy_kind"], state["numpy"], *state["numpy_others"]))
        torch.set_rng_state(torch.from_numpy(state["torch"].copy()))
        devices = [torch.from_numpy(state[f"cuda{number}"].copy()) for number in range(torch.cuda.device_count())
                   if f"cuda{number}" in state]
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
    """The newest sound checkpoint, None if there is none. Says which settings changed since; exits with 2 where they must not."""
    recover(run / "checkpoints")
    checkpoint = last_checkpoint(run, set_aside=True)
    if checkpoint is None:
        logged = len(whole_lines(run / "metrics.jsonl"))
        if (run / "summary.json").exists() or 0 < args["checkpoint_every"] < logged:
            fail(f"{run} has logged {logged} iterations, but its checkpoints are gone: there is nothing to go on from, and "
                 "starting anew would erase its logs; start a run of another --name")
        print(f"{run} has no checkpoint yet: it starts anew in its folder")
        return None
    state = json.loads((checkpoint / "state.json").read_text())
    if state.get("format", 1) > FORMAT:
        fail(f"{checkpoint} has format {state['format']} and this code knows those up to {FORMAT}: go on with the newer code")
    for name, (before, now) in changed(flat(state.get("args", {})), flat(args)).items():
        flag = spelled(name)
        if name == "resume":
            continue
        if name not in may_change:
            fail(f"{flag} was {before} when {checkpoint} was written and cannot become {now} on resume: leave it out, set it "
                 f"back in config.yaml, or start a new run. These can change: {', '.join(sorted(may_change - {'resume'}))}")
        print(f"changed on resume: {flag} {before} -> {now}")
    return checkpoint


def warn_of_changes(saved: dict, now: dict):
    """Says which code, library or device is another one than when the checkpoint was written."""
    found = [name if name.endswith((".py", "problems", "start")) else f"{name} {before} -> {after}"
             for name, (before, after) in changed(saved, now).items()]
    if found:
        print(f"warning: changed since the checkpoint was written: {', '.join(found)}. The run goes on, but not bit for bit as "
              "it would have", file=sys.stderr)


def save_checkpoint(run: Path, learner, processor, memories: dict, state: dict, keep: int, base: dict[str, bytes] = {},
                    more: dict[str, dict] = {}):
    """checkpoints/step_<n>: the policy as a Hugging Face folder, critic, optimisers, `memories` (buffers and samplers by
    name) and the counters of `state`; written whole, with checksums. Older ones than the newest `keep` go, last of all.
    `base`: files of the policy at the start, where it is needed to go on and might not be found then; `more`: other tensors by
    the name of their file."""
    folder = run / "checkpoints" / f"step_{state['step']}"
    for name in LOGS:
        if ranks.first() and (run / name).exists():
            sync(run / name)  # a checkpoint never has more than the logs
    with whole_folder(folder) if ranks.first() else contextlib.nullcontext(temporary_of(folder)) as temporary:
        ranks.barrier()  # now the folder is there
        for name, memory in memories.items():
            place = temporary / shard_name(name, ranks.rank())
            if isinstance(memory, ReplayBuffer):
                save_buffer(memory, place)
            elif isinstance(memory, GlobalRandomness):
                memory.save(place)
            elif ranks.first():  # the ranks have it alike
                write_state(place, memory.state_dict())
        weights = {"state_dict": ranks.on_first(ranks.untied(learner.policy))} if ranks.sharded() else {}
        others = {f"{name}_optimizer": ranks.on_first({
            f"{index}.{key}": value for index, entry in optimizer.state_dict()["state"].items() for key, value in entry.items()})
            for name, optimizer in learner.optimizers().items()}
        if learner.critic is not None:
            others["critic"] = ranks.on_first(learner.critic.state_dict())
        ranks.barrier()
        if ranks.first():
            learner.policy.save_pretrained(temporary, **weights)
            processor.save_pretrained(temporary)
            for name, tensors in (others | more).items():
                save_file(tensors, temporary / f"{name}.safetensors")
            more_state = {"args": asdict(learner.args), "format": FORMAT}
            (temporary / "state.json").write_text(json.dumps(state | more_state, indent=1))
            save_base(temporary, base, (folder / "base").resolve())
    if ranks.first():
        for old in checkpoints(run)[:-keep]:
            remove(old)
    ranks.barrier()


def save_base(folder: Path, files: dict[str, bytes], place: Path):
    """The policy at the start as base/; `place` is where that will be, and an adapter names it, so that peft finds it."""
    for name, content in files.items():
        (folder / "base").mkdir(exist_ok=True)
        (folder / "base" / name).write_bytes(content)
    adapter = folder / "adapter_config.json"
    if files and adapter.exists():
        adapter.write_text(json.dumps(json.loads(adapter.read_text()) | {"base_model_name_or_path": str(place)}, indent=2))


def shard_name(name: str, rank: int) -> str:
    return f"{name}.{rank}" if rank else name


def load_checkpoint(folder: Path, learner, memories: dict) -> dict:
    """Fills policy, critic, optimisers and memories from `save_checkpoint`'s folder; returns the counters."""
    if learner.args.lora_rank:
        ranks.fill(learner.policy, {re.sub(r"(lora_[AB])\.", r"\1.default.", name): tensor for name, tensor
                                    in load_file(folder / "adapter_model.safetensors").items()})
    else:
        ranks.fill(learner.policy, load_policy(folder, learner.policy.dtype, learner.args.trust_remote_code)[0].state_dict())
    if learner.critic is not None:
        ranks.fill(learner.critic, load_file(folder / "critic.safetensors"))
    state = json.loads((folder / "state.json").read_text())
    for name, optimizer in learner.optimizers().items():
        moments = {}
        for key, value in load_file(folder / f"{name}_optimizer.safetensors").items():
            index, moment = key.split(".", 1)
            parameter = optimizer.param_groups[0]["params"][int(index)]
            moments.setdefault(int(index), {})[moment] = ranks.like(value, parameter) if value.ndim else value
        optimizer.load_state_dict({"state": moments, "param_groups": optimizer.state_dict()["param_groups"]})
    state.pop("schedule", None)  # of older checkpoints
    for name, memory in memories.items():
        shards = [shard_name(name, number) for number in range(len(list(folder.glob(f"{name}.[0-9]*"))) + 1)]
        as_before = len(shards) == ranks.world()
        mine = folder / (shards[ranks.rank()] if as_before else name)  # else all begin with the first one's generators
        if state.get("format", 1) < 2 and not (folder / name).exists() and not (folder / f"{name}.json").exists():
            print(f"note: {folder} is older than the state of {name!r}, which begins anew")
        elif isinstance(memory, GlobalRandomness):
            memory.load(mine)
        elif isinstance(memory, ReplayBuffer) and not as_before:
            take_share(memory, [load_buffer(folder / shard) for shard in shards], ranks.rank(), ranks.world())
        elif isinstance(memory, ReplayBuffer):
            memory.load_state_dict(read_state(mine / "buffer"))
        else:
            memory.load_state_dict(read_state(folder / name))
    return {key: value for key, value in state.items() if key not in ("format", "args")}


def fingerprint(folder: str | Path) -> list[str]:
    """What tells weights apart: the contents of a folder's, the name of a hub id."""
    names = ("config.json", "adapter_config.json", "model*.safetensors", "adapter_model.safetensors", "pytorch_model*.bin")
    paths = [path for name in names for path in sorted(Path(folder).glob(name))]
    return [digest(path) for path in paths] or [str(folder)]
