"""What fits where: the memory of a training process, counted tensor by tensor.

    python eval.py fits --model FOLDER --dtype bfloat16 --processes 8 --lora-rank 16 --tokens 8192

Counted: weights, gradients, AdamW's two moments and its float32 masters of shorter weights, a reference, a critic, what a layer
keeps of a micro-batch for the backward pass, the float32 logits of a chunk; and, while sampling, vLLM's weights and keys and
values. The buffer is in the CPU's memory. docs/memory.md has a table of common models. tests/test_ranks.py compares this with what
torch really allocates for small models; nothing here was measured on a GPU.
"""
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from runtime.files import checkpoints, fail

GIB = 2**30
OVERHEAD = 1.5  # GiB of a GPU that CUDA's context, its libraries and fragments take


@dataclass
class FitsArgs:
    model: str
    """Folder of a model, a checkpoint or a run, a hub id, or smollm2."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Data type of the weights (train.py takes float32 unless told otherwise)."""
    lora_rank: int = 0
    """Rank of LoRA adapters on all linear layers; 0: all weights are trained."""
    processes: int = 1
    """GPUs that weights, gradients and moments are split over (configs/accelerate/fsdp2.yaml)."""
    tokens: int = 8192
    """Tokens of a micro-batch (--micro-batch-tokens), or of the longest episode if that is more."""
    gradient_checkpointing: bool = True
    """Whether layers keep only their input for the backward pass (in train.py they keep all unless told otherwise)."""
    kl: bool = False
    """Whether there is a reference (--kl-coef above 0); under LoRA it costs nothing."""
    critic: bool = False
    """Whether there is a critic (--algo ppo)."""


def shape_of(config) -> dict:
    """What is counted from, of a transformers configuration."""
    config = config.get_text_config()
    return dict(hidden=config.hidden_size, intermediate=config.intermediate_size, layers=config.num_hidden_layers,
                heads=config.num_attention_heads, kv_heads=config.num_key_value_heads, vocabulary=config.vocab_size,
                head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
                tied=config.tie_word_embeddings)


def parameters(shape: dict) -> dict[str, int]:
    """Weights of the parts of a Llama-like model: `layer` (one), `embedding`, `head` (0 if it is the embedding)."""
    wide, narrow = shape["heads"] * shape["head_dim"], shape["kv_heads"] * shape["head_dim"]
    layer = shape["hidden"] * (2 * wide + 2 * narrow + 3 * shape["intermediate"] + 2)
    embedding = shape["hidden"] * shape["vocabulary"]
    return {"layer": layer, "embedding": embedding, "head": 0 if shape["tied"] else embedding}


def adapters(shape: dict, rank: int) -> int:
    """Weights of LoRA on all linear layers but the output matrix."""
    hidden, wide, narrow = shape["hidden"], shape["heads"] * shape["head_dim"], shape["kv_heads"] * shape["head_dim"]
    sides = 2 * (hidden + wide) + 2 * (hidden + narrow) + 3 * (hidden + shape["intermediate"])  # of its seven matrices
    return shape["layers"] * rank * sides


def kept_by_layer(shape: dict, width: int, lora: bool = False) -> int:
    """Bytes a token that a layer keeps for its backward pass, at `width` bytes a number. RMSNorm works in float32: in other types
    it keeps its input so as well; with adapters each of the seven matrices' inputs is also kept in their own float32."""
    hidden, intermediate = shape["hidden"], shape["intermediate"]
    wide, narrow = shape["heads"] * shape["head_dim"], shape["kv_heads"] * shape["head_dim"]
    norms = 2 * (2 * hidden * width + (4 * hidden if width < 4 else 0))
    attention = (3 * wide + 2 * narrow) * width + 4 * shape["heads"]
    mlp = 4 * intermediate * width
    return norms + attention + mlp + (4 * (2 * hidden + wide + intermediate) if lora and width < 4 else 0)


def memory_gib(shape: dict, *, dtype: str = "bfloat16", lora_rank: int = 0, processes: int = 1, tokens: int = 8192,
               gradient_checkpointing: bool = True, kl: bool = False, critic: bool = False, chunk: int = 1024,
               engine_tokens: int = 65536) -> dict[str, float]:
    """GiB of each part on each of `processes` GPUs, and the peaks `training` and `sampling`. `tokens`: of each of several
    micro-batches; `chunk`: of models.token_logprobs_from_hidden; `engine_tokens`: keys and values that the engine should hold, 0:
    none is there.
    """
    width = {"bfloat16": 2, "float32": 4}[dtype]
    part, layers = parameters(shape), shape["layers"]
    body = part["layer"] * layers + part["embedding"] + shape["hidden"]
    policy = body + part["head"]
    added = adapters(shape, lora_rank)  # 0 where there are none
    trained = (added or policy) + critic * (added or body)
    trained_width = 4 if added else width  # adapters are kept in float32
    layer = kept_by_layer(shape, width, bool(lora_rank)) * tokens
    inputs = shape["hidden"] * width * tokens
    kept = (1 + critic) * layers * (inputs if gradient_checkpointing else layer)  # both forward passes come before both backward
    outputs = 8 * min(chunk, tokens) * shape["vocabulary"] + 4 * inputs  # logits and their exponentials; the last states
    # the output matrix's gradient adds up in float32, of parts in the weights' type
    head = 0 if lora_rank else (4 if width == 4 else 4 + width) * part["embedding"]
    gradients = trained * trained_width / processes
    recomputed = (layer if gradient_checkpointing else 0) + 2 * shape["intermediate"] * width * tokens
    sizes = {
        "weights": (policy * width + 4 * added) / processes,
        "masters": 0 if trained_width == 4 else 4 * trained / processes,
        "moments": 2 * trained * 4 / processes,
        "reference": policy * width / processes if kl and not lora_rank else 0,
        "critic": critic * body * width / processes,
        "activations": kept,
        "gradients": gradients + max(outputs + head, recomputed),  # those of earlier micro-batches, at the logits or in a layer
        # what is gathered of split weights: the first and last matrices, two layers, and a layer's gradients
        "gathered": 0 if processes == 1 else
        (2 * part["layer"] + part["embedding"] + part["head"]) * width + (0 if lora_rank else part["layer"] * width),
        "copy": 0 if processes == 1 else policy * width,  # of split weights, for --engine hf
    }
    cache = 2 * layers * shape["kv_heads"] * shape["head_dim"] * width * engine_tokens
    engine = cache + (policy * width if engine_tokens and processes == 1 else 0)
    sizes = {name: size / GIB for name, size in sizes.items()} | {"engine": engine / GIB}
    resting = sum(sizes[name] for name in ("weights", "masters", "moments", "reference", "critic", "copy"))
    return sizes | {"training": sum(sizes.values()) - sizes["engine"], "sampling": resting + sizes["engine"]}


def needed_gib(sizes: dict[str, float]) -> float:
    """GiB that a GPU must have, from what `memory_gib` gives."""
    return max(sizes["training"], sizes["sampling"]) + OVERHEAD


def shape_from(model: str) -> dict:
    """The shape of what train.py or eval.py would load; exits with 2 where there is none."""
    if model in ("tiny", "tiny-vlm"):
        fail(f"--model {model} has about 1 M parameters and fits anywhere: give a folder, a hub id or smollm2")
    # these import torch, which takes seconds
    from transformers import AutoConfig

    from envs import MissingData
    from models import base_of
    from policies.smollm2 import smollm2_folder
    from settings import Args
    try:
        folder = smollm2_folder(Args.cache_dir) if model == "smollm2" else [model, *checkpoints(Path(model))][-1]
        return shape_of(AutoConfig.from_pretrained(base_of(folder)))
    except (MissingData, OSError, ValueError, AttributeError) as error:  # the last: a kind of model that is not Llama-like
        reason = str(error).partition("\n")[0]
        fail(f"cannot read --model {model} ({reason}): give the folder of a model, of a checkpoint or of a "
             "run that has one, a hub id that can be reached, or smollm2")


def main(argv: list[str]):
    arguments = tyro.cli(FitsArgs, args=argv, config=(tyro.conf.FlagConversionOff,), prog="eval.py fits", description=__doc__)
    for name, least in (("processes", 1), ("tokens", 1), ("lora_rank", 0)):
        if getattr(arguments, name) < least:
            fail(f"--{name.replace('_', '-')} {getattr(arguments, name)} must be at least {least}")
    options = {name: value for name, value in vars(arguments).items() if name != "model"}
    sizes = memory_gib(shape_from(arguments.model), **options)
    for name, size in sizes.items():
        print(f"{name:12} {size:8.2f} GiB")
    print(f"a GPU needs {needed_gib(sizes):.1f} GiB, {OVERHEAD} of them for CUDA itself")
