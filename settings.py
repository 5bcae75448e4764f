"""The flags of train.py, read from a config and the command line, and what is refused before anything is loaded. What `..._options`
hold is in runtime/options.py, but for --loss-options, which are the chosen loss's; `python train.py --list` prints them all."""
import math
import re
import sys
import time
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal, Union

import tyro

import losses
from buffer import AGE_LAWS, PRIORITIES
from envs import MissingData, load_env, make_env_factory, options_for, shows_images
from losses import objective_of
from problems import MODES
from runtime.files import fail, flat
from runtime.memories import PRIORITIZED, make_buffer
from runtime.options import (LIMITS, OPTIONS, RELEASED, TABLES, fill, option_named, read_config, spelled,
                             split_options)


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
    wandb_entity: str | None = None
    """wandb user or team. None: yours."""
    wandb_tags: str | None = None
    """Tags beside those of task, algorithm and replay, with commas between."""
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
    tiny_options: dict[str, str] = field(default_factory=dict)
    """The tiny policies and their warm start, as name value name value (in a config: a mapping); --list shows all options."""
    cache_dir: str = "~/.cache/freshreplay"
    """Where warm-started policies are kept."""

    # ---- task
    env: str = "frozenlake"
    """The task: frozenlake, cliffwalking, sokoban, arithmetic, maths, search, geoqa, reasoning_gym:DATASET, or a class of your
    own as path/to/file.py:ClassName, whose file is run as the program it is: with all that you may do."""
    env_options: dict[str, str] = field(default_factory=dict)
    """Options of the task, as name value name value; a wrong name lists those it has."""
    max_turns: int = 10
    """Turns after which an episode is cut."""
    format_penalty: float = 0.15
    """Taken off the training reward, not off the score, for each turn without a valid answer."""
    shuffle_rewards: bool = False
    """Episodes of an iteration swap their rewards at random: a control, which must not learn. Success is still the true one."""
    train_problems: int | None = None
    """Number of different training problems. None: 1,536, or all that the task has."""
    rewritten_history: Literal["refuse", "keep"] = "refuse"
    """A chat template that shows earlier answers otherwise than they were sampled (drops their thinking), in tasks of several
    turns. refuse: an error at the start. keep: go on with what was sampled, which is what is trained on."""
    problem_sampler: Literal[MODES] = "shuffled"
    """Which problems are asked: shuffled (all of them before one comes again), uniform (drawn anew each time), or by how undecided
    the policy is on them (p(1-p) of its success rate p)."""
    problem_options: dict[str, str] = field(default_factory=dict)
    """Of --problem-sampler, see --list: the estimate of success rates, retests, and what one sampler alone needs."""

    # ---- sampling
    engine: str = "auto"
    """hf: transformers, in this process, keys and values kept between turns. vllm: vLLM in this process (requirements-gpu.txt or
    requirements-vllm-cpu.txt). http://HOST:PORT: a running `vllm serve`. auto: vllm on a GPU, else hf, which is faster for small
    models on a CPU and starts at once."""
    engine_options: dict[str, str] = field(default_factory=dict)
    """Of --engine: memory lora_sync shared_folder parallel (episodes side by side)."""
    context_length: int | None = None
    """Tokens that an episode may have. None: what the model allows."""
    sync_every: int = 1
    """Optimiser steps after which the sampler gets the policy's weights (without --async-rollouts: looked at between iterations).
    Above 1 it samples from older weights; a resumed run goes on with them, but for --async-rollouts that are not in lockstep,
    whose samplers start with the newest. A batch that is as a whole too old for --max-staleness gets it new weights at once."""
    max_staleness: int | None = None
    """Episodes that are older, in optimiser steps, when they reach the trainer are not trained on."""
    async_rollouts: int = 0
    """Processes that sample beside the training; 0: the trainer samples. With --replay none each episode is trained on once, a
    queue; with --fresh-update False the trainer draws from the buffer and waits for nothing once it is filled. On GPUs each
    sampler takes one, from the second visible one on; an --engine http://... needs an address for each, with commas between."""
    async_options: dict[str, str] = field(default_factory=dict)
    """Of --async-rollouts: queue fixed_ratio lockstep dtype restarts."""
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
    loss_options: dict[str, str] = field(default_factory=dict)
    """Of the objective, such as aggregation, correction, gamma, and those of the loss, such as eps_low, eps_high (--list)."""
    entropy_coef: float = 0.0
    """Weight of an entropy bonus."""
    kl_coef: float = 0.0
    """Weight of the KL to the reference, which is the policy at the start; 0: there is no reference."""
    critic_lr: float = 1e-3
    """Learning rate of the critic (ppo). For other models than the tiny ones, of whose layers it is a copy, the default is 1e-5."""
    critic_warmup: int = 0
    """Updates, the first ones, that train the critic alone (ppo)."""
    replay_advantage: Literal["stored", "vtrace"] = "stored"
    """On replay: as computed at collection | V-trace with the current critic."""
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
    warmup_steps: int = 5
    """Optimiser steps of linear warm-up."""
    max_grad_norm: float = 1.0
    """Gradient clipping by global norm."""
    micro_batch_tokens: int = 4096
    """Padded tokens of one forward and backward pass; changes speed and memory, not the gradient. 1: one row a pass."""
    gradient_checkpointing: bool = False
    """Keep only each layer's input for the backward pass and compute the rest again: a third more work, much less memory for
    long episodes; the gradient stays the same."""

    # ---- replay
    replay: Literal["none", "uniform", "per", "fresh", "newest", "never_used_first", "positive_bias"] = "fresh"
    """none | uniform | per: prioritised without age decay (tau = inf) | fresh: priorities decay with age | newest | those never
    used first | positive_bias: the newest, and older correct ones beside them."""
    replay_updates: int = 2
    """Updates on replayed episodes an iteration (K)."""
    replay_batch_size: int = 64
    """Entries drawn for one replay update."""
    replay_options: dict[str, str] = field(default_factory=dict)
    """Of the buffer, such as unit, draw, eviction, beta, eps, max_age (--list)."""
    capacity: int = 1024
    """Entries the buffer holds."""
    tau: Union[float, Literal["auto"]] = 30.0
    """Age, in optimiser steps, at which a priority has fallen to 1/e (the weight in the draw falls more slowly, with tau/alpha).
    auto: 1/c of the drift KL(behaviour || current) = k0 + c age of an episode, at least 1."""
    age_law: Literal[tuple(AGE_LAWS)] = "exponential"
    """How a priority falls with age: exp(-age/tau), the paper's; 1 / (1 + age/tau); or not."""
    alpha: float = 0.6
    """Exponent of the priority."""
    priority: Literal[tuple(PRIORITIES)] = "advantage"
    """Base priority; uniform: age alone decides."""
    insert_priority: Literal["base", "max"] = "base"
    """Priority of a new entry: its own, or the largest in the buffer until its first draw."""
    released: list[Literal[RELEASED]] = field(default_factory=list)
    """Quirks of the released FreshPER code, by name: advantages normalised again inside the replayed batch (a lone member of a group
    is 0 before the whitening) | a schedule planned without replay steps, though they advance it: it ends early | optimiser steps, on
    momentum, when no row has a non-zero advantage | importance weights that undo the age decay too | --insert-priority max | ages,
    --tau and max_age in iterations."""

    # ---- evaluation
    eval_every: int = 5
    """Iterations between evaluations; the start and the end are always evaluated. 0: only those."""
    eval_problems: int | None = None
    """Held-out problems, one episode each, the same for every method and seed. None: 512, or all that the task has."""
    eval_temperature: float = 1.0
    """Sampling temperature in evaluation; 0 is greedy."""

    def __post_init__(self):
        for flag, table in OPTIONS.items():
            setattr(self, flag, {name: option.default for name, option in table.items()} | getattr(self, flag))


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
    names = [each.name for each in fields(Args)]
    for name in sorted(given - set(names)):
        if option := option_named(name):
            fail(f"{spelled(name)} is no flag: it is {option}")
    resumed = "resume" in given
    if resumed and words:
        fail(f"--resume takes its config from the run; leave out {words[0]}")
    flags, pairs = split_options(flags)
    usual = Path(__file__).parent / "configs" / "frozenlake_tiny.yaml"
    run = pairs.pop("resume", None)
    config = Path(run) / "config.yaml" if resumed else Path(words[0]) if words else usual
    from_config, several = read_config(config, names, resumed)
    try:
        args = tyro.cli(Args, args=from_config + flags, config=(tyro.conf.FlagConversionOff,), description=description)
    except SystemExit as stop:
        if stop.code and from_config:
            print(f"(flags come from {config}, then from the command line)", file=sys.stderr)
        raise
    args.resume = run
    fill(args, several, pairs, given)
    in_config = {token[2:].replace("-", "_") for token in from_config if token.startswith("--")} | set(flat(several))
    given = given - set(pairs) | set(flat(pairs))
    return checked(args, given, in_config, config.stem if not resumed else None)


NAME = re.compile(r"\w[\w.+=@,-]{0,119}", re.ASCII)  # of a run: never a path
CONTROL = re.compile(r"[\0-\x08\x0b-\x1f\x7f\ud800-\udfff]")
TRUNCATING = {"top_p", "top_k", "min_p", "typical_p", "repetition_penalty", "presence_penalty", "frequency_penalty"}


def other_defaults(model: str) -> dict:
    """Some defaults are for the tiny policy; the one with eyes says what it sees before it moves."""
    return {"tiny": {}, "tiny-vlm": {"max_new_tokens": 12}}.get(model, {"max_new_tokens": 128, "lr": 1e-6, "critic_lr": 1e-5})


def told(args: Args, name: str) -> str:
    return f"{spelled(name)} {flat(vars(args))[name]}"


def checked(args: Args, given: set[str], in_config: set[str], config_name: str | None) -> Args:
    """Refuses settings that contradict each other (exit 2), settles what one setting decides for another."""
    check_values(args)
    check_task(args)
    check_sampling(args, given)
    for name, value in other_defaults(args.model).items():
        if name not in given | in_config and not args.resume:
            setattr(args, name, value)
            if not args.quiet:
                print(f"{spelled(name)} {value:g}: the default for --model {args.model}")
    check_replay(args, given, in_config)
    check_updates(args, given)
    check_objective(args)
    if args.replay != "none":
        try:
            make_buffer(args)
        except ValueError as error:
            fail(str(error))
    if args.name is None and not args.resume:
        args.name = name_of(args, config_name)
    return args


def check_values(args: Args):
    for name, value in flat(vars(args)).items():
        if isinstance(value, float) and math.isnan(value):
            fail(f"{told(args, name)} must be a number")
        for text in value.values() if isinstance(value, dict) else (value,):
            if isinstance(text, str) and CONTROL.search(text):
                fail(f"{spelled(name)} {text!r} holds a control character or half of a character")
    if args.name is not None and not args.resume and not NAME.fullmatch(args.name):
        fail(f"--name {args.name!r} must be at most 120 letters of a to z, digits and _.+=@,- (the first a letter, digit or _)")
    for limits, names in TABLES["limits"].items():
        for name in names:
            value, may_be_infinite = getattr(args, name), name in TABLES["may_be_infinite"]
            fine = value in (None, "auto") or LIMITS[limits](value) and (math.isfinite(value) or may_be_infinite)
            if not fine:
                fail(f"{told(args, name)} must be {limits}" + ("" if may_be_infinite else " and finite"))


def check_task(args: Args):
    tiny = args.model in ("tiny", "tiny-vlm")
    try:
        args.env_options = options_for(args.model, load_env(args.env)) | args.env_options
        looks = shows_images(make_env_factory(args.env, args.env_options)())
    except (MissingData, ValueError) as error:
        if tiny and "prompt='tiny'" in str(error):
            fail(f"--env {args.env} has no text for the tiny policy; take another, such as --model smollm2")
        fail(str(error))
    if tiny and (looks != (args.model == "tiny-vlm") or looks and "prompt" not in args.env_options):
        fail(f"--model {args.model} with --env {args.env} {args.env_options}: tiny-vlm is for tasks that show images "
             "(frozenlake and sokoban with --env-options view image), tiny for those that do not")
    if args.tiny_options["width"] % 64:
        fail(f"{told(args, 'tiny_options.width')}: the width must be a multiple of 64")
    lora_sync = args.engine_options["lora_sync"]
    if looks and (args.engine.startswith("http://") or lora_sync == "adapter"):
        fail(f"--engine {args.engine} --engine-options lora_sync {lora_sync} takes no images: use --engine hf or vllm, lora_sync merge")


def check_sampling(args: Args, given: set[str]):
    beside = args.async_options
    if args.async_rollouts and not beside["lockstep"] and "age_in_iterations" in args.released:
        fail("--released age_in_iterations needs episodes of the trainer's own iterations: with --async-rollouts ages are in steps")
    if beside["lockstep"] and args.async_rollouts != 1:
        fail(f"--async-options lockstep is for one sampler: add --async-rollouts 1 (it is {args.async_rollouts})")
    for name in OPTIONS["async_options"]:
        if not args.async_rollouts and f"async_options.{name}" in given:
            fail(f"{told(args, f'async_options.{name}')} is for --async-rollouts, which is 0")
    if beside["lockstep"] and "async_options.queue" in given:
        fail(f"{told(args, 'async_options.queue')} contradicts lockstep, where no batch is ahead of the trainer")
    if args.async_rollouts and args.engine_options["lora_sync"] == "adapter":
        fail(f"--engine-options lora_sync adapter with {told(args, 'async_rollouts')}: these samplers get merged weights; use merge")
    if "," in args.engine and args.engine.count(",") + 1 != args.async_rollouts or \
            args.async_rollouts > 1 and args.engine.startswith("http://") and "," not in args.engine:
        fail(f"{told(args, 'engine')} with {told(args, 'async_rollouts')}: give each sampler a server's address, with commas")
    if not args.engine.startswith("http://") and args.engine not in ("auto", "hf", "vllm"):
        fail(f"--engine {args.engine} must be auto, hf, vllm or the address of a running server, http://HOST:PORT")
    if args.problem_options["band_low"] > args.problem_options["band_high"]:
        fail(f"{told(args, 'problem_options.band_low')} is above band_high {args.problem_options['band_high']}")


def check_replay(args: Args, given: set[str], in_config: set[str]):
    """--replay against what goes with it; sets the updates of none and the tau of per."""
    kept = given if "replay" in given else given | in_config  # what a --replay on the command line does not replace
    if args.replay == "none":
        if args.replay_updates and "replay_updates" in kept:
            fail(f"--replay none and {told(args, 'replay_updates')} contradict each other: choose --replay fresh, or drop the latter")
        if args.replay_updates and not args.quiet:
            print("--replay none: no buffer and no replay updates")
        args.replay_updates = 0
    if "replay" in given and args.replay != "none":  # over the config of a run that had no replay or no decay
        if not args.replay_updates and "replay_updates" in in_config - given:
            fail(f"{told(args, 'replay')} would never replay, since the config says replay_updates: 0; add --replay-updates 2")
        if args.replay == "fresh" and args.tau == math.inf and "tau" in in_config - given:
            fail("--replay fresh would not decay, since the config says tau: inf; add --tau 30")
    if args.replay == "per":
        if args.tau != math.inf and "tau" in kept:
            fail(f"--replay per has no age decay, so {told(args, 'tau')} contradicts it: use --replay fresh")
        args.tau = math.inf
    if args.tau == "auto" and args.replay not in PRIORITIZED:
        fail(f"--tau auto sets the age decay of priorities, but {told(args, 'replay')} has none here: use --replay fresh")
    if args.replay in PRIORITIZED and args.priority == "uniform" and (args.tau == math.inf or args.age_law == "none"):
        fail(f"{told(args, 'replay')} --priority uniform without age decay would draw uniformly: say so with --replay uniform")
    if "insert_max" in args.released and "insert_priority" in given and args.insert_priority == "base":
        fail("--insert-priority base contradicts --released insert_max: drop one of them")
    if args.replay_updates and args.replay_batch_size > args.capacity:
        fail(f"{told(args, 'replay_batch_size')} is larger than {told(args, 'capacity')}: nothing could be drawn")


def check_updates(args: Args, given: set[str]):
    if not args.fresh_update and not args.replay_updates:
        fail("--fresh-update False without replay updates trains on nothing: set --replay fresh --replay-updates 1")
    for name in ("fresh_epochs", "minibatches"):
        if not args.fresh_update and name in given and getattr(args, name) > 1:
            fail(f"{told(args, name)} is of the updates on fresh episodes, and --fresh-update False has none")
    if not args.fresh_update and "lr_steps" in args.released and args.lr_schedule != "constant":
        fail("--released lr_steps plans for no step at all with --fresh-update False: drop it")
    if args.minibatches > args.problems_per_iteration:
        fail(f"{told(args, 'minibatches')} is larger than {told(args, 'problems_per_iteration')}")


def check_objective(args: Args):
    objective = objective_of(args)
    loss, advantage, kind = losses.LOSSES[objective.loss], losses.ADVANTAGES[objective.advantage], objective.advantage
    if args.group_size == 1 and advantage.needs_group:
        fail(f"--group-size 1 with the advantage {kind!r}: a group of one is its own mean, so every advantage would be "
             f"{'0' if advantage.group_mean else 'the same'}; use --group-size 2 or more, or --algo reinforce++")
    for name, value in (("replay_advantage", "vtrace"), ("priority", "td_error"), ("loss_options.cut_off", "bootstrap")):
        if flat(vars(args))[name] == value and not advantage.needs_values:
            fail(f"{spelled(name)} {value} needs a critic, but the advantage is {kind!r}: use --algo ppo")
    if args.critic_warmup and not advantage.needs_values:
        fail(f"{told(args, 'critic_warmup')} needs a critic, but the advantage is {kind!r}: use --algo ppo, or drop it")
    if args.replay_advantage == "vtrace" and "replay_advantage" in args.released:
        fail("--replay-advantage vtrace contradicts --released replay_advantage: drop one of them")
    if loss.holds_ratio and objective.correction in losses.RATIO_CORRECTIONS:
        fail(f"{told(args, 'loss_options.correction')}: the loss {objective.loss!r} already holds the ratio to the sampling policy, "
             "which must not count twice; use --loss decoupled_ppo")
    if objective.kl_in == "reward" and objective.kl_kind == "is_k3":
        fail("--loss-options kl_kind is_k3 is an estimator for the loss; use k1 in the reward, or kl_in loss")
    if "log_z_B" in objective.loss_options and args.replay_updates and args.replay_options["unit"] != "group":
        fail(f"--loss {objective.loss} compares the members of a group, so that replay must draw whole groups: add --replay-options "
             "unit group and count --replay-batch-size and --capacity in groups")
    if loss.replayed == "no" and args.replay_updates and objective.correction in (None, "none"):
        print(f"note: replayed episodes do not suit --loss {objective.loss}: {loss.why}")


def name_of(args: Args, config_name: str) -> str:
    """The name of a run that got none: config (task and model, where the default config was changed), method, seed, time."""
    if config_name == "frozenlake_tiny" and (args.env, args.model) != ("frozenlake", "tiny"):
        config_name = f"{Path(args.env).name}_{Path(args.model).name}"
    config_name = re.sub(r"[^\w.-]+", "_", config_name, flags=re.ASCII).lstrip(".-")[:80]
    return f"{config_name}-{args.algo}-{args.replay}-seed{args.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
