"""The flags of train.py, read from a config and the command line, and what is refused before anything is loaded."""
import difflib
import math
import re
import sys
import time
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Literal, Union

import tyro
import yaml

import losses
from buffer import ReplayBuffer
from envs import MissingData, load_env, make_env_factory, options_for, shows_images
from losses import objective_of, zero_advantage_is_silent
from runtime import ranks
from runtime.files import fail, read_yaml

FIRST_TAU = 100.0  # --tau auto, until the drift is measured


@dataclass
class Args:
    """RL post-training with fresh replay. `step` means optimiser steps that were really taken."""

    # ---- the run
    name: str | None = None
    """Name of the run folder; by default made of config, algorithm, replay, seed and time."""
    runs_dir: str = "runs"
    """Folder of all runs."""
    seed: int = 0
    """Decides problems, sampling, mini-batches and replay draws. The warm start has its own seed."""
    iterations: int = 30
    """RL iterations: sample, update, replay."""
    resume: str | None = None
    """Run folder to go on from its last checkpoint that is whole, with its own config; anew if there is none yet. Iterations,
    learning rates, how often it is evaluated and logging may be changed by flags."""
    checkpoint_every: int = 20
    """Iterations between checkpoints; the last iteration is always saved. 0: only the last."""
    keep_checkpoints: int = 2
    """Checkpoints kept, the newest ones."""
    wandb: Literal["on", "offline", "off"] = "on"
    """on: online if you are logged in, else offline."""
    wandb_project: str = "freshreplay"
    """wandb project."""
    track: Literal["wandb", "tensorboard"] = "wandb"
    """Where curves go beside metrics.jsonl. tensorboard: into the run's folder, tensorboard/."""
    quiet: bool = False
    """Print the result, and notes on what may have gone wrong, only."""
    transcripts: int = 4
    """Episodes an iteration that are written to episodes.jsonl, as text."""

    # ---- policy
    model: str = "tiny"
    """tiny (about 1 M parameters, warm-started by imitating a weak player), tiny-vlm (the same with eyes, for --env-options view
    image), smollm2 (SmolLM2-135M-Instruct from a pip package), a Hugging Face folder or a hub id."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the weights. bfloat16: AdamW steps on float32 masters of what is trained and rounds the weights from them."""
    trust_remote_code: bool = False
    """Let the model run Python code that it brings, with all your rights; only for one whose code you have read."""
    lora_rank: int = 0
    """Rank of LoRA adapters on all linear layers (alpha twice the rank); 0: all weights are trained."""
    tiny_width: int = 128
    """Width of the tiny policies, a multiple of 64; the studies take 64 and 2 layers, for speed."""
    tiny_layers: int = 4
    """Layers of the tiny policies."""
    warm_start_seed: int = 0
    """Seed of the tiny policy's weights and imitation; not tied to --seed, so that all runs start from one policy."""
    warm_start_updates: int = 120
    """Imitation updates of the tiny policy, 8,192 tokens each."""
    warm_start_skill: float = 0.6
    """Share of best moves of the player that is imitated; the rest are random moves that stay on the board."""
    cache_dir: str = "~/.cache/freshreplay"
    """Where warm-started policies are kept."""

    # ---- task
    env: str = "frozenlake"
    """The task: frozenlake, cliffwalking, sokoban, arithmetic, maths, search, geoqa, reasoning_gym:DATASET, or a class of your
    own as path/to/file.py:ClassName, whose file is run as the program it is: with all that you may do."""
    env_options: dict[str, str] = field(default_factory=dict)
    """Options of the task, as name value name value (in a config: a mapping); a wrong name lists those it has."""
    max_turns: int = 10
    """Turns after which an episode is cut."""
    format_penalty: float = 0.15
    """Taken off the training reward, not off the score, for each turn without a valid answer."""
    shuffle_rewards: bool = False
    """Episodes of an iteration swap their rewards at random: a control, which must not learn. Success is still the true one."""
    train_problems: int | None = None
    """Number of different training problems. None: 1,536, or all that the task has."""
    max_env_error_frac: float = 0.1
    """The run ends when more than this share of an iteration's environments raise in a step; each costs its episode."""

    overlong: Literal["train", "mask"] = "train"
    """Episodes whose last turn hit --max-new-tokens, or that the context could not hold any longer: trained like others, or left
    out of the updates (they count in their group's mean and in the metrics)."""
    rewritten_history: Literal["refuse", "keep"] = "refuse"
    """A chat template that shows earlier answers otherwise than they were sampled (drops their thinking), in tasks of several
    turns. refuse: an error at the start. keep: go on with what was sampled, which is what is trained on."""

    problem_sampler: Literal["uniform", "heap", "proportional", "band", "dots"] = "uniform"
    """Which problems are asked: uniform, or by how undecided the policy is on them (p(1-p) of its success rate p)."""
    problem_priority: Literal["variance", "mixed_group"] = "variance"
    """variance: p(1-p). mixed_group: the chance of a group with both outcomes, 1 - p^G - (1-p)^G."""

    # ---- sampling
    engine: str = "auto"
    """hf: transformers, in this process, keys and values kept between turns. vllm: vLLM in this process (requirements-gpu.txt or
    requirements-vllm-cpu.txt). http://HOST:PORT: a running `vllm serve`. auto: vllm on a GPU, else hf, which is faster for small
    models on a CPU and starts at once."""
    engine_memory: float = 0.4
    """vllm: share of the GPU's memory that the engine may take."""
    lora_sync: Literal["merge", "adapter"] = "merge"
    """vllm under --lora-rank: adapters merged into the engine's weights, or sent as an adapter."""
    shared_folder: str | None = None
    """http engine: an existing folder that trainer and server see under one path; weights go through it. None: a temporary
    one."""
    context_length: int | None = None
    """Tokens that an episode may have. None: what the model allows."""
    sync_every: int = 1
    """Optimiser steps after which the sampler gets the policy's weights (without --async-rollouts: looked at between iterations).
    Above 1 it samples from older weights; a resumed run goes on with them, but for --async-rollouts without --async-lockstep,
    whose samplers start with the newest. A batch that is as a whole too old for --max-staleness gets it new weights at once."""
    max_staleness: int | None = None
    """Episodes that are older, in optimiser steps, when they reach the trainer are not trained on."""
    async_rollouts: int = 0
    """Processes that sample beside the training; 0: the trainer samples. With --replay none each episode is trained on once, a
    queue; with --fresh-update False the trainer draws from the buffer and waits for nothing once it is filled. On GPUs each
    sampler takes one, from the second visible one on; an --engine http://... needs an address for each, with commas between."""
    async_queue: int = 2
    """Batches (of --problems-per-iteration) that may be ahead of the trainer, beside those being played; then samplers wait. More
    keeps samplers busy beside long iterations and makes episodes older where an iteration takes one batch."""
    async_fixed_ratio: bool = False
    """One new batch for each iteration also with --fresh-update False: the replay ratio is replay_updates x replay_batch_size /
    episodes of a batch, and the faster side waits. False: it is what the two sides' speeds make it."""
    async_lockstep: bool = False
    """One sampler that plays only while the trainer waits: the results of the loop without --async-rollouts."""
    sampler_dtype: Literal["float32", "bfloat16"] | None = None
    """Data type of the weights in --async-rollouts processes. None: --dtype."""
    restart_samplers: int = 0
    """Deaths of samplers that are survived by starting a new one; the next one ends the run."""
    parallel_episodes: int = 512
    """Episodes played side by side at most; bounds the memory of keys and values. vLLM in --async-rollouts processes, which
    bounds it by itself, gets whole batches."""
    problems_per_iteration: int = 8
    """Problems sampled in an iteration."""
    group_size: int = 8
    """Episodes of each problem: the group that advantages are computed in."""
    temperature: float = 1.0
    """Sampling temperature; log-probs are taken at it, over the whole vocabulary."""
    max_new_tokens: int = 6
    """Tokens a turn may have."""

    # ---- objective
    algo: Literal[tuple(losses.ALGORITHMS)] = "grpo"
    """Bundle of advantage, loss, aggregation and KL (python train.py --list shows them); each can be overridden below."""
    advantage: Literal[tuple(losses.ADVANTAGES)] | None = None
    """Advantage kind. None: the algorithm's."""
    loss: Literal[tuple(losses.LOSSES)] | None = None
    """Policy loss. None: the algorithm's."""
    aggregation: Literal[tuple(losses.AGGREGATIONS)] | None = None
    """How token losses become one number. None: the algorithm's."""
    eps_low: float | None = None
    """Clip range below ratio 1. None: the loss's default, 0.2 for ppo_clip."""
    eps_high: float | None = None
    """Clip range above ratio 1. None: the loss's default, 0.2 for ppo_clip."""
    dual_clip: float | None = None
    """For negative advantages the loss is at most this times |A|. None: the algorithm's, and 3 on replayed data under ppo."""
    correction: Literal[tuple(losses.CORRECTIONS)] | None = None
    """Weight between trainer and sampler, for losses without a ratio to the sampler. None: tis_token for decoupled_ppo, else
    none, since the ratio already runs from the current to the sampling policy."""
    correction_low: float | None = None
    """Lower bound of the correction. None: its default."""
    correction_high: float | None = None
    """Upper bound of the correction. None: its default."""
    asymre_shift: float = -0.1
    """AsymRE's baseline is the group's mean plus this."""
    advantage_clip: float | None = None
    """Advantages are clamped to +- this in the update. None: not."""
    entropy_coef: float = 0.0
    """Weight of an entropy bonus."""
    kl_coef: float = 0.0
    """Weight of the KL to the reference, which is the policy at the start; 0: there is no reference."""
    kl_in: Literal["reward", "loss"] | None = None
    """Where the KL goes. None: the algorithm's."""
    kl_kind: Literal[tuple(losses.KLS)] | None = None
    """KL estimator on fresh data. None: the algorithm's."""
    replay_kl_kind: Literal[tuple(losses.KLS)] = "is_k3"
    """KL estimator in the loss of replayed data; only is_k3 has the right gradient there."""
    gamma: float = 1.0
    """Discount for each action token (gae)."""
    lam: float = 1.0
    """GAE's lambda."""
    critic_lr: float = 1e-3
    """Learning rate of the critic (ppo)."""
    value_clip: float | None = 0.2
    """The critic's values move at most this far from the update's start before the loss stops them. None: no clipping."""
    replay_advantage: Literal["stored", "vtrace", "released"] = "stored"
    """On replay: as computed at collection | V-trace with the current critic | normalised again inside the replayed batch, as
    the released FreshPER code does (a lone member of a group is 0 before the whitening)."""
    fresh_update: bool = True
    """Train on each iteration's own episodes. False: train from the buffer alone."""
    fresh_epochs: int = 1
    """Passes over an iteration's own episodes."""
    minibatches: int = 1
    """Optimiser steps a pass; groups are split at random."""

    # ---- optimiser
    lr: float = 1e-3
    """Peak learning rate of AdamW (betas 0.9, 0.95; no weight decay)."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "linear"
    """Fall of the learning rate after the warm-up, to lr_end_fraction at the end of the planned steps."""
    lr_end_fraction: float = 0.1
    """Learning rate at the end as a share of --lr (linear and cosine)."""
    lr_steps: Literal["all", "fresh"] = "all"
    """Steps the schedule is planned for. fresh: the released FreshPER code's way, without replay steps, though they
    advance it: it ends early."""
    warmup_steps: int = 5
    """Optimiser steps of linear warm-up."""
    max_grad_norm: float = 1.0
    """Gradient clipping by global norm."""
    micro_batch_tokens: int = 4096
    """Padded tokens of one forward and backward pass; changes speed and memory, not the gradient."""
    micro_batch_size: int | None = None
    """Rows of one forward and backward pass at most. None: --micro-batch-tokens alone decides."""
    gradient_checkpointing: bool = False
    """Keep only each layer's input for the backward pass and compute the rest again: a third more work, much less memory for
    long episodes; the gradient stays the same."""
    step_without_signal: bool = False
    """Let the optimiser step (on momentum) when no row has a non-zero advantage, as the released FreshPER code does."""

    # ---- replay
    replay: Literal["none", "uniform", "per", "fresh"] = "fresh"
    """none | uniform | per: prioritised without age decay (tau = inf) | fresh: priorities decay with age."""
    replay_updates: int = 2
    """Updates on replayed episodes an iteration (K)."""
    replay_batch_size: int = 64
    """Entries drawn for one replay update."""
    replay_sampler: Annotated[Literal["prioritized", "uniform", "newest", "never_used_first", "positive_bias"] | None,
                              tyro.conf.arg(aliases=["--sampler"])] = None
    """Which entries are drawn. None: prioritized for per and fresh, uniform for uniform."""
    capacity: int = 1024
    """Entries the buffer holds."""
    tau: Union[float, Literal["auto"]] = 30.0
    """Age, in --age-unit, at which a priority has fallen to 1/e (the weight in the draw falls more slowly, with tau/alpha).
    auto: 1/c of the drift KL(behaviour || current) = k0 + c age of an episode, measured as --drift-kl says, at least 1."""
    alpha: float = 0.6
    """Exponent of the priority; 0 draws uniformly."""
    priority: Literal["advantage", "reward", "td_error", "group_std", "uniform"] = "advantage"
    """Base priority."""
    beta: float = 0.4
    """Importance-weight exponent at the start."""
    beta_end: float = 1.0
    """Importance-weight exponent after --beta-steps draws."""
    beta_steps: int | None = None
    """Draws over which beta rises. None: the planned number of replay updates."""
    eps: float = 0.01
    """Added to base priorities."""
    insert_priority: Literal["base", "max"] = "base"
    """Priority of a new entry: its own, or the largest in the buffer until its first draw."""
    eviction: Literal["fifo", "lowest_priority"] = "fifo"
    """Which entry leaves a full buffer: the one that came in first, or that of the lowest decayed priority."""
    unit: Literal["episode", "group"] = "episode"
    """What an entry is: an episode or all episodes of a problem's group."""
    draw: Literal["systematic", "stratified", "iid"] = "systematic"
    """How a batch is drawn; only systematic never repeats an entry."""
    is_includes_age: bool = False
    """Let importance weights undo the age decay too (at beta 1 they cancel freshness)."""
    max_age: int | None = None
    """Older entries, in --age-unit, are dropped."""
    positive_fraction: float = 0.0
    """Share of the buffer kept for older correct episodes (delta); needs --replay-sampler positive_bias."""
    positive_advantage_only: bool = False
    """positive_bias: a correct episode must also have a non-zero advantage to be kept longer."""
    fresh_fraction: float = 0.0
    """Share of a replay batch taken from the newest entries."""
    probe_episodes: int = 32
    """Episodes drawn uniformly from the last 16 x this many to measure the drift, an iteration (--tau auto)."""
    drift_kl: Literal["token", "sequence"] = "token"
    """What the drift is measured with (--tau auto). token: the sum of the tokens' k3, which scatters less (studies/RESULTS.md).
    sequence: k3 or k1 of the whole episode's ratio."""
    min_size: int = 0
    """Entries the buffer must hold before replay starts."""
    age_unit: Literal["step", "iteration"] = "step"
    """Unit of ages, --tau and --max-age: optimiser steps or iterations."""
    store_without_signal: bool | None = None
    """Store episodes whose advantages are all 0. None: no for per and fresh with a group-mean advantage, else yes."""

    # ---- evaluation
    eval_every: int = 5
    """Iterations between evaluations; the start and the end are always evaluated. 0: only those."""
    eval_problems: int | None = None
    """Held-out problems, one episode each, the same for every method and seed. None: 512, or all that the task has."""
    eval_temperature: float = 1.0
    """Sampling temperature in evaluation; 0 is greedy."""


# -------------------------------------------------------------------------------------------------------- reading


def config_flags(path: Path, resumed: bool = False) -> list[str]:
    """The keys of a YAML file as command-line flags; exits with 2 on a key that is not a field of Args."""
    try:
        config = read_yaml(path, yaml.BaseLoader) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        fail(f"cannot read the config {path}: {error}")
    if not isinstance(config, dict):
        fail(f"{path}: a config is a list of `key: value` lines, not a {type(config).__name__}")
    names = [field.name for field in fields(Args)]
    for key, value in config.items():
        if key.replace("-", "_") not in names:
            near = difflib.get_close_matches(key.replace("-", "_"), names, n=1)
            fail(f"{path}: unknown key {key!r}" + (f"; did you mean {near[0]!r}?" if near else "; see --help") + resumed * (
                " The run may be of another version of this code: go on with that, or drop the line if it made no difference"))
        if key.replace("-", "_") == "resume":
            fail(f"{path}: resume is for the command line: python train.py --resume runs/NAME")
        if key.replace("-", "_") == "env_options":
            if not isinstance(value, dict) or not all(isinstance(item, str) and option.isidentifier()
                                                      for option, item in value.items()):
                fail(f"{path}: env_options must be a mapping of single values, such as {{size: 8}}, not {value}")
        elif not isinstance(value, str):
            fail(f"{path}: {key} must be a single value, not {value}")
    spelled = {"null": "None", "~": "None", "": "None", "true": "True", "false": "False", ".inf": "inf"}  # YAML: flag
    return [token for key, value in config.items()
            for token in (f"--{key.replace('_', '-')}", *(sum(value.items(), ()) if isinstance(value, dict) else
                                                          (spelled.get(value, value),)))]


def parse_args(argv: list[str], description: str = "") -> Args:
    """Args of `[config.yaml] --flag value ...`; without a config, configs/frozenlake_tiny.yaml. Exits with 2 on errors."""
    words = [] if not argv or argv[0].startswith("-") else [argv[0]]
    flags = [{"true": "True", "false": "False"}.get(word, word) for word in argv[len(words):]]
    given = {token[2:].split("=")[0].replace("-", "_") for token in flags if token.startswith("--")}
    if not words and any(word.endswith((".yaml", ".yml")) for word in flags):
        fail("the config comes first: python train.py CONFIG.yaml --flag value ...")
    for name in sorted(given & TRUNCATING):
        fail(f"--{name.replace('_', '-')} is not offered: it samples from a part of the vocabulary, and log-probs over the whole "
             "of it would then be wrong in every ratio; lower --temperature instead")
    resumed = "resume" in given
    if resumed and words:
        fail(f"--resume takes its config from the run; leave out {words[0]}")
    if resumed:
        tokens = [flag.split("=", 1)[1] if "=" in flag else flags[place + 1] for place, flag in enumerate(flags)
                  if flag.split("=")[0] == "--resume" and ("=" in flag or place + 1 < len(flags))]
        config = Path(tokens[0] if tokens else "") / "config.yaml"
        if not config.is_file():
            fail(f"--resume: {config} does not exist; give the folder of a run, such as runs/NAME")
    else:
        config = Path(words[0]) if words else Path(__file__).parent / "configs" / "frozenlake_tiny.yaml"
    from_config = config_flags(config, resumed)
    try:
        args = tyro.cli(Args, args=from_config + flags, config=(tyro.conf.FlagConversionOff,), description=description)
    except SystemExit as stop:
        if stop.code and from_config:
            print(f"(flags come from {config}, then from the command line)", file=sys.stderr)
        raise
    before = tyro.cli(Args, args=from_config, config=(tyro.conf.FlagConversionOff,))
    if "env_options" in given and "env" not in given:
        args.env_options = before.env_options | args.env_options  # an option from the command line leaves the config's others
    in_config = {token[2:].replace("-", "_") for token in from_config if token.startswith("--")}
    if resumed:
        for name in sorted(given - MAY_CHANGE_ON_RESUME):
            if getattr(before, name, None) != getattr(args, name, None):
                fail(f"--{name.replace('_', '-')} is {getattr(before, name)} in {config} and cannot become {getattr(args, name)} "
                     f"on resume; these can change: {', '.join(sorted(MAY_CHANGE_ON_RESUME - {'resume'}))}")
    return checked(args, given, in_config, config.stem if not resumed else None)


# ------------------------------------------------------------------------------------------------------- checking


NAME = re.compile(r"\w[\w.+=@,-]{0,119}", re.ASCII)  # of a run: never a path
CONTROL = re.compile(r"[\0-\x08\x0b-\x1f\x7f\ud800-\udfff]")
TRUNCATING = {"top_p", "top_k", "min_p", "typical_p", "repetition_penalty", "presence_penalty", "frequency_penalty"}
ABOVE_ZERO = ("iterations", "max_turns", "train_problems", "problems_per_iteration", "group_size", "max_new_tokens",
              "fresh_epochs", "minibatches", "replay_batch_size", "capacity", "sync_every", "eval_problems", "micro_batch_tokens",
              "micro_batch_size", "keep_checkpoints", "probe_episodes", "lr", "critic_lr", "temperature",
              "max_grad_norm", "warm_start_updates", "parallel_episodes", "engine_memory", "tau",
              "beta_steps", "advantage_clip", "context_length", "value_clip", "dual_clip", "eps_low", "eps_high")
NOT_NEGATIVE = ("eval_temperature", "replay_updates", "checkpoint_every", "eval_every", "warmup_steps", "format_penalty",
                "transcripts", "kl_coef", "entropy_coef", "lora_rank", "seed", "warm_start_seed", "max_age", "min_size",
                "max_staleness", "async_rollouts", "async_queue", "restart_samplers")
MAY_BE_INFINITE = ("tau", "max_grad_norm")
SHARES = ("engine_memory", "warm_start_skill", "lr_end_fraction", "gamma", "lam", "max_env_error_frac")
MAY_CHANGE_ON_RESUME = {"resume", "iterations", "lr", "lr_schedule", "lr_end_fraction", "lr_steps", "warmup_steps",
                        "max_grad_norm", "critic_lr", "eval_every", "checkpoint_every", "keep_checkpoints", "wandb",
                        "wandb_project", "track", "quiet", "transcripts", "micro_batch_tokens", "micro_batch_size",
                        "max_env_error_frac", "cache_dir", "parallel_episodes", "engine_memory", "restart_samplers"}


def other_defaults(model: str) -> dict:
    """Two of the defaults are for the tiny policy; the one with eyes says what it sees before it moves."""
    return {"tiny": {}, "tiny-vlm": {"max_new_tokens": 12}}.get(model, {"max_new_tokens": 128, "lr": 1e-6})


def checked(args: Args, given: set[str], in_config: set[str], config_name: str | None) -> Args:
    """Refuses settings that contradict each other (exit 2), settles what one setting decides for another."""
    def together(*names):  # all from the command line, or all from the config with none replaced there
        return set(names) <= given or (set(names) <= in_config and not set(names) & given)

    def flag(name):
        return f"--{name.replace('_', '-')} {getattr(args, name)}"

    for name, value in vars(args).items():
        if isinstance(value, float) and math.isnan(value):
            fail(f"{flag(name)} must be a number")
        for text in (value, *value.values()) if isinstance(value, dict) else (value,):
            if isinstance(text, str) and CONTROL.search(text):
                fail(f"--{name.replace('_', '-')} {text!r} holds a control character or half of a character")
    if args.name is not None and not args.resume and not NAME.fullmatch(args.name):
        fail(f"--name {args.name!r} must be a name of a folder in --runs-dir: letters of a to z, digits and _ . + = @ , - (the "
             "first a letter, a digit or _), at most 120")
    for names, fine, words in ((ABOVE_ZERO, lambda value: value > 0, "above 0"),
                               (NOT_NEGATIVE, lambda value: value >= 0, "at least 0"),
                               (SHARES, lambda value: 0 <= value <= 1, "between 0 and 1")):
        for name in names:
            value = getattr(args, name)
            if value not in (None, "auto") and not (fine(value) and (math.isfinite(value) or name in MAY_BE_INFINITE)):
                fail(f"{flag(name)} must be {words}" + ("" if name in MAY_BE_INFINITE else " and finite"))

    try:
        args.env_options = options_for(args.model, load_env(args.env)) | args.env_options
        looks = shows_images(make_env_factory(args.env, args.env_options)())
    except (MissingData, ValueError) as error:
        if args.model in ("tiny", "tiny-vlm") and "prompt='tiny'" in str(error):
            fail(f"--env {args.env} has no text for the tiny policy; take another, such as --model smollm2")
        fail(str(error))
    if args.model in ("tiny", "tiny-vlm") and (looks != (args.model == "tiny-vlm") or looks and "prompt" not in args.env_options):
        fail(f"--model {args.model} with --env {args.env} {args.env_options}: tiny-vlm is for tasks that show images "
             "(frozenlake and sokoban with --env-options view image), tiny for those that do not")
    if args.tiny_width < 64 or args.tiny_width % 64 or args.tiny_layers < 1:
        fail(f"--tiny-width {args.tiny_width} --tiny-layers {args.tiny_layers}: the width must be a multiple of 64, with "
             "at least one layer")
    if looks and (args.engine.startswith("http://") or args.lora_sync == "adapter"):
        fail(f"--engine {args.engine} --lora-sync {args.lora_sync} takes no images: use --engine hf or vllm, --lora-sync merge")
    if args.async_rollouts and not args.async_lockstep and args.age_unit == "iteration":
        fail("--age-unit iteration needs episodes of the trainer's own iterations: with --async-rollouts ages are in steps")
    if args.async_lockstep and args.async_rollouts != 1:
        fail(f"--async-lockstep is for one sampler: add --async-rollouts 1 (it is {args.async_rollouts})")
    for name in ("restart_samplers", "sampler_dtype", "async_queue", "async_fixed_ratio"):
        if not args.async_rollouts and name in given:
            fail(f"{flag(name)} is for --async-rollouts, which is 0")
    if args.async_lockstep and "async_queue" in given:
        fail(f"{flag('async_queue')} contradicts --async-lockstep, where no batch is ahead of the trainer")
    for name in ("fresh_update", "async_lockstep"):
        if args.async_fixed_ratio and "async_fixed_ratio" in given and getattr(args, name):
            fail(f"--async-fixed-ratio True with {flag(name)} changes nothing, as an iteration takes one batch anyway: drop it, "
                 f"or set --{name.replace('_', '-')} False")
    if args.async_rollouts and args.lora_sync == "adapter":
        fail(f"--lora-sync adapter with {flag('async_rollouts')}: these samplers get merged weights; use --lora-sync merge")
    if "," in args.engine and args.engine.count(",") + 1 != args.async_rollouts or \
            args.async_rollouts > 1 and args.engine.startswith("http://") and "," not in args.engine:
        fail(f"{flag('engine')} with {flag('async_rollouts')}: give one server's address for each sampler, with commas between")
    if not args.engine.startswith("http://") and args.engine not in ("auto", "hf", "vllm"):
        fail(f"--engine {args.engine} must be auto, hf, vllm or the address of a running server, http://HOST:PORT")
    for name, value in other_defaults(args.model).items():
        if name not in given | in_config and not args.resume:
            setattr(args, name, value)
            if not args.quiet:
                print(f"--{name.replace('_', '-')} {value:g}: the default for --model {args.model}")
    objective = objective_of(args)
    kind = objective.advantage
    advantage = losses.ADVANTAGES[kind]
    if args.replay == "none":
        if args.replay_updates and together("replay", "replay_updates"):
            fail(f"--replay none and {flag('replay_updates')} contradict each other: choose --replay uniform, per or fresh, or "
                 "drop --replay-updates")
        if args.replay_updates and "replay_updates" in given:
            fail(f"{flag('replay_updates')} needs a buffer, but the config says replay: none; add --replay fresh")
        if args.replay_updates and not args.quiet:
            print("--replay none: no buffer and no replay updates")
        args.replay_updates = 0
    if "replay" in given and args.replay != "none":  # over the config of a run that had no replay or no decay
        if not args.replay_updates and "replay_updates" in in_config - given:
            fail(f"{flag('replay')} would never replay, since the config says replay_updates: 0; add --replay-updates 2")
        if args.replay == "fresh" and args.tau == math.inf and "tau" in in_config - given:
            fail("--replay fresh would not decay, since the config says tau: inf; add --tau 30")
    if args.replay == "per":
        if args.tau != math.inf and (together("replay", "tau") or "tau" in given):
            fail(f"--replay per has no age decay, so {flag('tau')} contradicts it: use --replay fresh")
        args.tau = math.inf
    if args.tau == "auto" and sampler_of(args) != "prioritized":
        fail(f"--tau auto sets the age decay of priorities, but {flag('replay')} has none here: use --replay fresh")
    if args.replay == "uniform" and args.replay_sampler == "prioritized":
        fail("--replay uniform and --replay-sampler prioritized contradict each other: use --replay per or fresh")
    if args.group_size == 1 and advantage.needs_group:
        fail(f"--group-size 1 with the advantage {kind!r}: a group of one is its own mean, so every advantage would be "
             f"{'0' if advantage.group_mean else 'the same'}; use --group-size 2 or more, or --algo reinforce++")
    if not args.fresh_update and not args.replay_updates:
        fail("--fresh-update False without replay updates trains on nothing: set --replay fresh --replay-updates 1")
    for name in ("fresh_epochs", "minibatches"):
        if not args.fresh_update and name in given and getattr(args, name) > 1:
            fail(f"{flag(name)} is of the updates on fresh episodes, and --fresh-update False has none")
    if not args.fresh_update and args.lr_steps == "fresh" and args.lr_schedule != "constant":
        fail("--lr-steps fresh plans for no step at all with --fresh-update False: use --lr-steps all")
    if args.replay_updates and args.replay_batch_size > args.capacity:
        fail(f"{flag('replay_batch_size')} is larger than {flag('capacity')}: nothing could be drawn")
    if args.replay != "none" and args.min_size > args.capacity:
        fail(f"{flag('min_size')} is larger than {flag('capacity')}: replay would never start")
    if not advantage.needs_values and args.replay_advantage == "vtrace":
        fail(f"--replay-advantage vtrace needs a critic, but the advantage is {kind!r}: use --algo ppo")
    if not advantage.needs_values and args.priority == "td_error":
        fail(f"--priority td_error needs a critic, but the advantage is {kind!r}: use --algo ppo")
    if losses.LOSSES[objective.loss].holds_ratio and args.correction in losses.RATIO_CORRECTIONS:
        fail(f"{flag('correction')}: the loss {objective.loss!r} already holds the ratio to the sampling policy, which must not "
             "count twice; use --loss decoupled_ppo")
    if objective.kl_in == "reward" and objective.kl_kind == "is_k3":
        fail("--kl-kind is_k3 is an estimator for the loss; use --kl-kind k1 in the reward, or --kl-in loss")
    if "log_z_B" in objective.loss_options and args.replay_updates and args.unit != "group":
        fail(f"--loss {objective.loss} compares the members of a group, so that replay must draw whole groups: add --unit group and count "
             "--replay-batch-size and --capacity in groups")
    if losses.LOSSES[objective.loss].replayed == "no" and args.replay_updates and args.correction in (None, "none"):
        print(f"note: replayed episodes do not suit --loss {objective.loss}: {losses.LOSSES[objective.loss].why}")
    if args.minibatches > args.problems_per_iteration:
        fail(f"{flag('minibatches')} is larger than {flag('problems_per_iteration')}")
    if args.problems_per_iteration > (args.train_problems or math.inf):
        fail(f"{flag('problems_per_iteration')} is larger than {flag('train_problems')}")
    if args.replay != "none":
        try:
            make_buffer(args)
        except ValueError as error:
            fail(str(error))
    if args.name is None and not args.resume:
        args.name = name_of(args, config_name)
    return args


def name_of(args: Args, config_name: str) -> str:
    """The name of a run that got none: config (task and model, where the default config was changed), method, seed, time."""
    if config_name == "frozenlake_tiny" and (args.env, args.model) != ("frozenlake", "tiny"):
        config_name = f"{Path(args.env).name}_{Path(args.model).name}"
    config_name = re.sub(r"[^\w.-]+", "_", config_name, flags=re.ASCII).lstrip(".-")[:80]
    return f"{config_name}-{args.algo}-{args.replay}-seed{args.seed}-{time.strftime('%Y%m%d-%H%M%S')}"


def stores_everything(args: Args) -> bool:
    """Whether episodes whose advantages are all 0 are stored: not where they would never be worth a draw."""
    if args.store_without_signal is not None:
        return args.store_without_signal
    objective = objective_of(args)
    silent = losses.ADVANTAGES[objective.advantage].group_mean and zero_advantage_is_silent(objective)
    return not (silent and sampler_of(args) == "prioritized")


def sampler_of(args: Args) -> str:
    return args.replay_sampler or ("uniform" if args.replay == "uniform" else "prioritized")


def make_buffer(args: Args) -> ReplayBuffer:
    shared = ("capacity", "priority", "alpha", "tau", "beta", "beta_end", "eps", "insert_priority", "eviction", "unit",
              "draw", "is_includes_age", "max_age", "positive_fraction",
              "positive_advantage_only", "fresh_fraction", "min_size", "seed")
    settings = {name: getattr(args, name) for name in shared} | ({"tau": FIRST_TAU} if args.tau == "auto" else {})
    settings |= {name: ranks.share_size(settings[name]) for name in ("capacity", "min_size")}
    settings["seed"] = ranks.seed(args.seed)
    return ReplayBuffer(sampler=sampler_of(args), beta_steps=args.beta_steps or max(1, args.iterations * args.replay_updates),
                        **settings)


def list_objectives():
    print("bundles (--algo), and what each sets:")
    for name, bundle in losses.ALGORITHMS.items():
        options = " ".join(f"{key}={value}" for key, value in bundle.loss_options.items())
        print(f"  {name:21} advantage {bundle.advantage:21} loss {bundle.loss:14} {bundle.aggregation:20} {options:28} {bundle.note}")
    print("losses (--loss), and whether replayed data suits them:")
    for name, loss in losses.LOSSES.items():
        print(f"  {name:21} {loss.replayed:7} {loss.why}")
    for flag, parts in (("advantage", losses.ADVANTAGES), ("loss", losses.LOSSES), ("aggregation", losses.AGGREGATIONS),
                        ("correction", losses.CORRECTIONS), ("kl-kind", losses.KLS)):
        print(f"--{flag}: {', '.join(parts)}")
