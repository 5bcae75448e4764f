"""Who continues tokens: `make_engine` gives what --engine asks for."""
import importlib.util
import math

import torch

from engines.hf import HFEngine
from envs import make_env_factory, shows_images
from runtime import ranks
from runtime.files import fail


def engine_kind(args) -> tuple[str, str]:
    """What --engine asks for, and why."""
    if args.engine != "auto":
        return args.engine, "as --engine asks"
    if not torch.cuda.is_available():
        return "hf", "there is no GPU; for small models it is faster than vLLM there, and it starts at once"
    if ranks.sharded():
        return "hf", "the weights are split over the processes; it samples from a whole copy"
    if importlib.util.find_spec("vllm") is None:
        return "hf", "there is a GPU, but vllm is not installed: requirements-gpu.txt"
    return "vllm", "there is a GPU"


def make_engine(args, policy, chat, folder):
    """The sampler that --engine asks for; `folder` holds the policy's configuration and tokenizer."""
    options, stop_ids = args.engine_options, chat.stop_ids(policy.generation_config)
    if chat.image_processor is None and shows_images(make_env_factory(args.env, args.env_options)()):
        fail(f"{folder} takes no images, which --env {args.env} shows: use --model tiny-vlm or another that does")
    kind, why = engine_kind(args)
    if not args.quiet:
        print(f"engine: {kind} ({why})")
    if kind == "hf":
        return HFEngine(policy, stop_ids, chat.tokenizer.pad_token_id, chat.text, chat.image_processor)
    from engines.vllm import VLLMEngine, VLLMServer  # vLLM takes half a minute to import
    if kind == "vllm":
        return VLLMEngine(policy, folder, stop_ids, lora=options["lora_sync"], gpu_memory=options["memory"], chat=chat,
                          trust_remote_code=args.trust_remote_code, max_model_len=context_length_of(args, policy))
    return VLLMServer(kind, policy, stop_ids, lora=options["lora_sync"], shared_folder=options["shared_folder"])


def context_length_of(args, policy) -> int:
    return min(args.context_length or math.inf, policy.config.get_text_config().max_position_embeddings)
