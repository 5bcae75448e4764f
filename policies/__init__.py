"""From --model to a folder of weights."""
from pathlib import Path

from policies.smollm2 import smollm2_folder
from policies.tiny import warm_started_tiny

# ---------------------------------------------------------------------------------------------- loading


def policy_folder(args, env) -> str | Path:
    """Where --model is: a folder or hub id as given; `tiny` and `tiny-vlm`, warm-started on the task, and `smollm2` are made
    once and kept."""
    if args.model in ("tiny", "tiny-vlm"):
        return warm_started_tiny(env, Path(args.cache_dir), max_turns=args.max_turns, images=args.model == "tiny-vlm",
                                 **args.tiny_options)
    return smollm2_folder(args.cache_dir) if args.model == "smollm2" else args.model
