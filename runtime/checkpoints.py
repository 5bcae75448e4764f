"""Checkpoints: what a run needs to go on as if it had never stopped, and what may be different then."""
import contextlib
import json
import random
import re
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from buffer import ReplayBuffer
from models import load_policy
from runtime import ranks
from runtime.files import (checkpoints, digest, fail, flat, last_checkpoint, read_state, recover, remove, sync, temporary_of,
                           whole_folder, whole_lines, write_state)
from runtime.log import LOGS
from runtime.options import spelled
from runtime.memories import load_buffer, take_share

FORMAT = 3  # of checkpoints: only those of one format are read


class GlobalRandomness:
    """The global generators of Python, NumPy and torch: nothing here draws from them, but a task of your own may."""

    def __init__(self, seed: int):
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)

    def state_dict(self) -> dict:
        kind, keys, *others = np.random.get_state()
        return {"python": random.getstate(), "numpy": [kind, keys.tolist(), *others], "torch": torch.get_rng_state().tolist(),
                "cuda": [state.tolist() for state in torch.cuda.get_rng_state_all()]}

    def load_state_dict(self, state: dict):
        """Sets the generators, of as many GPUs as there are here and then."""
        version, numbers, gauss = state["python"]
        random.setstate((version, tuple(numbers), gauss))
        np.random.set_state(state["numpy"])
        torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))
        devices = [torch.tensor(numbers, dtype=torch.uint8) for numbers in state["cuda"]]
        torch.cuda.set_rng_state_all(devices[:torch.cuda.device_count()])


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
    state = json.loads((checkpoint / "state.json").read_text("utf-8"))
    if state["format"] != FORMAT:
        fail(f"{checkpoint} has format {state['format']} and this code reads {FORMAT}: go on with the version that wrote it")
    saved, now = flat(state["args"]), flat(args)
    for name in sorted(saved.keys() & now.keys() - {"resume"}):
        if saved[name] == now[name]:
            continue
        if name not in may_change:
            fail(f"{spelled(name)} was {saved[name]} when {checkpoint} was written and cannot become {now[name]} on resume: leave "
                 f"it out, set it back in config.yaml, or start a new run. These can change: {', '.join(sorted(may_change))}")
        print(f"changed on resume: {spelled(name)} {saved[name]} -> {now[name]}")
    return checkpoint


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
            write_state(temporary / shard_name(name, ranks.rank()), memory.state_dict())
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
            (temporary / "state.json").write_text(json.dumps(state | more_state, indent=1), "utf-8")
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
        moved = json.loads(adapter.read_text("utf-8")) | {"base_model_name_or_path": str(place)}
        adapter.write_text(json.dumps(moved, indent=2), "utf-8")


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
    state = json.loads((folder / "state.json").read_text("utf-8"))
    for name, optimizer in learner.optimizers().items():
        moments = {}
        for key, value in load_file(folder / f"{name}_optimizer.safetensors").items():
            index, moment = key.split(".", 1)
            parameter = optimizer.param_groups[0]["params"][int(index)]
            moments.setdefault(int(index), {})[moment] = ranks.like(value, parameter) if value.ndim else value
        optimizer.load_state_dict({"state": moments, "param_groups": optimizer.state_dict()["param_groups"]})
    for name, memory in memories.items():
        shards = [folder / shard_name(name, number) for number in range(len(list(folder.glob(f"{name}.[0-9]*"))) + 1)]
        as_before = len(shards) == ranks.world()
        if isinstance(memory, ReplayBuffer) and not as_before:
            take_share(memory, [load_buffer(shard) for shard in shards], ranks.rank(), ranks.world())
        else:  # of another number of processes, all begin with the state of the first one
            memory.load_state_dict(read_state(shards[ranks.rank() if as_before else 0]))
    return {key: value for key, value in state.items() if key not in ("format", "args")}


def fingerprint(folder: str | Path) -> list[str]:
    """What tells weights apart: the contents of a folder's, the name of a hub id."""
    names = ("config.json", "adapter_config.json", "model*.safetensors", "adapter_model.safetensors", "pytorch_model*.bin")
    paths = [path for name in names for path in sorted(Path(folder).glob(name))]
    return [digest(path) for path in paths] or [str(folder)]
