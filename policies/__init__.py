"""From --model to a folder of weights, and from there to a policy and its chat."""
from pathlib import Path

import torch

from envs import MissingData
from models import load_policy
from policies.chat import Chat
from policies.smollm2 import smollm2_folder
from policies.tiny import warm_started_tiny
from runtime.files import fail


def policy_folder(args, env) -> str | Path:
    """Where --model is: a folder or hub id as given; `tiny` and `tiny-vlm`, warm-started on the task, and `smollm2` are made
    once and kept."""
    if args.model == "smollm2":
        return smollm2_folder(args.cache_dir)
    if args.model not in ("tiny", "tiny-vlm"):
        return args.model
    images = args.model == "tiny-vlm"
    if not hasattr(env, "scripted_answer"):
        raise ValueError(f"--model {args.model} learns from a scripted player, which {env.name} has none of: give the task a "
                         "scripted_answer (see the top of envs.py), or choose another --model")
    if images and not hasattr(env, "image"):
        raise ValueError(f"--model {args.model} looks at pictures, which {env.name} has none of: give the task an image (see the "
                         "top of envs.py), or choose --model tiny")
    return warm_started_tiny(env, Path(args.cache_dir), max_turns=args.max_turns, images=images, **args.tiny_options)


def loaded(folder, args, first_message: str):
    """(policy, chat); exits with 2 where they are not of one model or not made for the task."""
    try:
        policy, processor = load_policy(folder, getattr(torch, args.dtype), args.trust_remote_code)
    except (MissingData, OSError, ValueError, RuntimeError) as error:
        fail(f"cannot load {folder}: {' '.join(str(error).split())[:500]}")
    chat, rows = Chat(processor), policy.get_input_embeddings().num_embeddings
    tokenizer = chat.tokenizer
    if rows < len(tokenizer):
        fail(f"{folder}: its tokenizer has {len(tokenizer)} tokens, its weights have {rows}: they are of different models")
    tokens = chat.start(first_message)
    unknown = tokens.count(tokenizer.unk_token_id)
    if unknown > len(tokens) / 10:
        fail(f"{folder}: its tokenizer does not know {unknown} of the {len(tokens)} tokens of the task's first message: the "
             "policy was made for another task or prompt (for the tiny policy: --env-options prompt tiny)")
    return policy.to("cuda" if torch.cuda.is_available() else "cpu"), chat
