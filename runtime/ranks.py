"""Many processes (ranks), started by `torchrun` or `accelerate launch`. On one process nothing here does anything.

Every rank runs the whole loop on its own share of each iteration's problems and of the replay buffer. What is decided from
numbers of all ranks is decided from gathered ones, so that every rank decides alike and takes part in the same exchanges.
"""
import os
import signal
import sys
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from accelerate.utils import parse_flag_from_env as option  # a switch of its config, which the launcher passes on
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer

PATIENCE = timedelta(hours=2)  # of ranks for one that samples longer or writes a checkpoint; the launcher sees one that died


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if world() > 1 else 0


def first() -> bool:
    """Whether this is the rank that prints and writes."""
    return rank() == 0


def silence_others():
    """Before the ranks know each other: only the first of them prints. Errors are printed by every rank that has one."""
    if os.environ.get("RANK", "0") != "0":
        sys.stdout = open(os.devnull, "w", encoding="utf-8")


def start() -> Accelerator:
    """Joins the other processes. ValueError if the launcher promised more of them than came, or asks for what is not done."""
    promised = int(os.environ.get("WORLD_SIZE", 1))
    if {"ACCELERATE_MIXED_PRECISION", "MASTER_ADDR"} <= os.environ.keys() and "WORLD_SIZE" not in os.environ:
        # accelerate's launcher for CPUs sets a meeting point and then starts a single process
        raise ValueError("`accelerate launch` was asked for several processes on a CPU and silently started one; use "
                         "torchrun --nproc_per_node N train.py ...")
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if precision != "no":
        raise ValueError(f"mixed_precision {precision} in the accelerate config: set it to 'no'; the data type of the weights is "
                         "--dtype")
    if option("ACCELERATE_USE_DEEPSPEED"):
        zero3_by_fsdp2()
    for name, wanted, why in (("FSDP_VERSION", "2", "the older one is not supported"),
                              ("FSDP_CPU_RAM_EFFICIENT_LOADING", "false", "every process reads the weights itself"),
                              ("FSDP_RESHARD_AFTER_FORWARD", "true", "weights that stay gathered after a pass without gradient "
                               "would miss the next step"),
                              ("FSDP_ACTIVATION_CHECKPOINTING", "false", "use --gradient-checkpointing")):
        if option("ACCELERATE_USE_FSDP") and os.environ.get(name, wanted).lower() != wanted:
            raise ValueError(f"{name.lower()} in the accelerate config must be {wanted}: {why}")
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), kwargs_handlers=[InitProcessGroupKwargs(timeout=PATIENCE)])
    if accelerator.num_processes != promised:
        raise ValueError(f"the launcher says {promised} processes (WORLD_SIZE), but this one sees {accelerator.num_processes}; "
                         "start them with torchrun --nproc_per_node N or accelerate launch --num_processes N")
    return accelerator


def zero3_by_fsdp2():
    """DeepSpeed's ZeRO-3 in an accelerate config becomes FSDP2, for which DeepSpeed is not imported: the same tensors are split
    over the same processes (Rajbhandari et al. 2020, arXiv 1910.02054). ValueError names what cannot be done so."""
    def asked(name, usual):
        return os.environ.get(f"ACCELERATE_{name}", usual).lower()

    place = asked("DEEPSPEED_OFFLOAD_PARAM_DEVICE", "none")
    for key, name, usual, allowed, why in (
            ("deepspeed_config_file", "DEEPSPEED_CONFIG_FILE", "none", ("none",),
             "DeepSpeed's own settings are not read; use the keys of configs/accelerate/zero3.yaml"),
            ("zero_stage", "DEEPSPEED_ZERO_STAGE", "2", ("3",),
             "optimiser and gradients are split with the weights or not at all; the latter is configs/accelerate/ddp.yaml"),
            ("offload_param_device", "DEEPSPEED_OFFLOAD_PARAM_DEVICE", "none", ("none", "cpu"), "nothing is kept on disks"),
            ("offload_optimizer_device", "DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "none", (place,),
             "the optimiser lies where the weights do, at offload_param_device, and nothing on disks"),
            ("zero3_init_flag", "DEEPSPEED_ZERO3_INIT", "false", ("false",), "every process reads the weights itself"),
            ("gradient_accumulation_steps", "GRADIENT_ACCUMULATION_STEPS", "1", ("1",), "use --micro-batch-tokens"),
            ("gradient_clipping", "GRADIENT_CLIPPING", "none", ("none",), "use --max-grad-norm")):
        if asked(name, usual) not in allowed:
            raise ValueError(f"{key} {asked(name, usual)} in the accelerate config must be {' or '.join(allowed)}: {why}")
    os.environ.update(ACCELERATE_USE_DEEPSPEED="false", ACCELERATE_USE_FSDP="true", FSDP_VERSION="2",
                      FSDP_STATE_DICT_TYPE="FULL_STATE_DICT", FSDP_OFFLOAD_PARAMS=str(place == "cpu").lower())
    print("ZeRO-3 is carried out by torch's FSDP2: the same tensors are split over the same processes")


def close(code: int = 0):
    """Ends the exchange when all is written; and this process at once, since torch's threads of an exchange that still hold
    tensors while the interpreter ends can abort it, and a run that is done would count as failed (pytorch#179291). All end with
    an error `code` together, and signals are ignored then: at the first such end the launcher sends SIGTERM to the others."""
    if dist.is_initialized():
        if code:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
            barrier()
        dist.destroy_process_group()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def gathered(value) -> list:
    """`value` of every rank, by rank."""
    if world() == 1:
        return [value]
    values = [None] * world()
    dist.all_gather_object(values, value)
    return values


def joined(rows):
    """The rows of all ranks, in the order of the ranks: lists, (N,) arrays or tensors."""
    parts = gathered(rows)
    if isinstance(rows, list):
        return sum(parts, [])
    return torch.cat(parts) if isinstance(rows, torch.Tensor) else np.concatenate(parts)


def stacked(rows_BT: torch.Tensor) -> torch.Tensor:
    """(B, T) of every rank as one tensor, padded on the right with zeros."""
    parts = gathered(rows_BT)
    width = max(part.shape[1] for part in parts)
    return torch.cat([torch.nn.functional.pad(part, (0, width - part.shape[1])) for part in parts])


def total(value):
    """The sum over ranks of a number, or of each entry of a dict (one that a rank lacks counts 0 there)."""
    parts = gathered(value)
    if isinstance(value, dict):
        return {name: sum(part.get(name, 0) for part in parts) for name in dict.fromkeys(name for part in parts for name in part)}
    return sum(parts)


def lowest(value):
    return min(gathered(value))


def common(value):
    """The first rank's value."""
    return gathered(value)[0]


def barrier():
    gathered(None)


def share(count: int, turn: int = 0) -> slice:
    """This rank's part of `count` things in order; where they do not divide, some ranks take one more: in turn 0 the first ones,
    in each turn those after the last."""
    each, more = divmod(count, world())
    extra = [(place - turn * more) % world() < more for place in range(world())]
    start = rank() * each + sum(extra[:rank()])
    return slice(start, start + each + extra[rank()])


def seed(seed: int) -> int | list[int]:
    """A seed of this rank's own; the first one's is `seed` itself."""
    return [seed, rank()] if rank() else seed


def share_size(count: int) -> int:
    return len(range(count)[share(count)])


@torch.no_grad()
def sum_gradients(parameters):
    """Replaces every parameter's gradient by its sum over the ranks; one that a rank lacks counts as zeros there. Those of
    sharded weights were summed by the backward pass."""
    if world() == 1 or sharded():
        return
    waiting = []
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        waiting.append(dist.all_reduce(parameter.grad, async_op=True))
    for exchange in waiting:
        exchange.wait()


def sharded() -> bool:
    """Whether the weights are split over the ranks (FSDP2)."""
    return world() > 1 and option("ACCELERATE_USE_FSDP")


def shard(module, device, apart=()):
    """Every rank keeps a part of each weight; a layer's are gathered while it computes, and its gradients summed, not averaged.
    What is gathered together has one data type: parts that have another are named in `apart`.

    The same calls on GPUs and on CPUs, where Accelerate's own preparation knows no FSDP.
    """
    mesh = init_device_mesh(device.type, (world(),))
    options = {"mesh": mesh, "reshard_after_forward": True}
    if option("FSDP_OFFLOAD_PARAMS"):
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    parts = [part for part in module.modules() if isinstance(part, GradientCheckpointingLayer)]
    for part in [*parts, *apart]:
        fully_shard(part, **options)
    fully_shard(module, **options)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
    module.inside = lambda function, *arguments, **named: function(module, *arguments, **named)
    register_fsdp_forward_method(module, "inside")
    return module


def forward(function, model, *arguments, **named):
    """function(model, ...) as a forward pass of the model, for which a sharded one gathers its weights."""
    return model.inside(function, *arguments, **named) if isinstance(model, FSDPModule) else function(model, *arguments, **named)


def idle_passes(passes: int) -> int:
    """How many passes of sharded weights this rank has to take part in beyond its own `passes`."""
    return max(gathered(passes)) - passes if sharded() else 0


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor that may be sharded; an exchange of all ranks."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def on_first(tensors: dict) -> dict:
    """The whole of each tensor, on the CPU of the first rank; elsewhere nothing. An exchange of all ranks."""
    result = {}
    for name, tensor in tensors.items():
        tensor = whole(tensor.detach())
        if first():
            result[name] = tensor.cpu().clone()
    return result


def untied(module) -> dict:
    """The module's state without the second names of tied weights."""
    second = dict(module.named_parameters(remove_duplicate=False)).keys() - dict(module.named_parameters()).keys()
    return {name: tensor for name, tensor in module.state_dict().items() if name not in second}


def like(tensor: torch.Tensor, model: torch.Tensor) -> torch.Tensor:
    """`tensor`, which every rank has, sharded as `model` is."""
    if not isinstance(model, DTensor):
        return tensor
    return distribute_tensor(tensor.to(model.device), model.device_mesh, model.placements)


@torch.no_grad()
def fill(module, state: dict):
    """Gives a module that may be sharded the whole tensors of `state`, by name."""
    own = module.state_dict()
    for name, tensor in state.items():
        own[name].copy_(like(tensor, own[name]))
