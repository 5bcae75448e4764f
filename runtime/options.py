"""How settings are spelled: options of a flag (`--tiny-options width 64`, in a config a mapping), configs, names of older versions."""
import difflib
import math
from pathlib import Path
from typing import NamedTuple

import yaml

import losses
from buffer import DRAWS, EVICTIONS
from runtime.files import fail, read_yaml


class Option(NamedTuple):
    default: object
    kind: type | tuple  # int, float, bool, str, or the words that are allowed
    meaning: str
    limits: str = ""  # one of LIMITS
    may_be_none: bool = False  # where the default is not None


LIMITS = {"above 0": lambda value: value > 0, "at least 0": lambda value: value >= 0,
          "between 0 and 1": lambda value: 0 <= value <= 1}

OPTIONS = {
    "tiny_options": {
        "width": Option(128, int, "width of the tiny policies, a multiple of 64; the studies take 64 and 2 layers, for speed", "above 0"),
        "layers": Option(4, int, "layers of the tiny policies", "above 0"),
        "updates": Option(120, int, "imitation updates of the warm start, 8,192 tokens each", "above 0"),
        "skill": Option(0.6, float, "share of best moves of the player that is imitated; the rest are random moves that stay on the "
                        "board", "between 0 and 1"),
        "seed": Option(0, int, "of weights and imitation; not tied to --seed, so that all runs start from one policy", "at least 0")},
    "engine_options": {
        "memory": Option(0.4, float, "vllm: share of the GPU's memory that the engine may take", "between 0 and 1"),
        "lora_sync": Option("merge", ("merge", "adapter"), "vllm under --lora-rank: adapters merged into the engine's weights, or sent "
                            "as an adapter"),
        "shared_folder": Option(None, str, "http engine: an existing folder that trainer and server see under one path; weights go "
                                "through it. None: a temporary one"),
        "parallel": Option(512, int, "episodes played side by side at most; bounds the memory of keys and values. vLLM in "
                           "--async-rollouts processes, which bounds it by itself, gets whole batches", "above 0")},
    "async_options": {
        "queue": Option(2, int, "batches (of --problems-per-iteration) that may be ahead of the trainer, beside those being played; then "
                        "samplers wait. More keeps them busy and makes episodes older where an iteration takes one batch", "at least 0"),
        "fixed_ratio": Option(False, bool, "one new batch for each iteration also with --fresh-update False: the replay ratio is "
                              "replay_updates x replay_batch_size / episodes of a batch, and the faster side waits. False: it is what "
                              "the two sides' speeds make it"),
        "lockstep": Option(False, bool, "one sampler that plays only while the trainer waits: the results of the loop without it"),
        "dtype": Option(None, ("float32", "bfloat16"), "of the samplers' weights. None: --dtype"),
        "restarts": Option(0, int, "deaths of samplers that are survived by starting a new one; the next one ends the run",
                           "at least 0")},
    "problem_options": {
        "priority": Option("variance", ("variance", "mixed_group"), "variance: p(1-p). mixed_group: the chance of a group with both "
                           "outcomes, 1 - p^G - (1-p)^G"),
        "estimate": Option("beta", ("beta", "raw"), "beta: p = (successes + prior) / (trials + 2 prior), counts decay. raw: the last rate"),
        "decay": Option(0.7, float, "factor on a problem's counts at a visit", "between 0 and 1"),
        "prior": Option(1.0, float, "successes and failures that each problem starts with", "above 0"),
        "floor_slots": Option(1, int, "problems of a call that were tried the longest ago", "above 0"),
        "pool_after": Option(2, int, "visits in a row, all solved or all failed, after which a problem leaves for a pool", "above 0"),
        "retest_every": Option(5, int, "calls after which problems of the pools are asked again", "above 0"),
        "retest_slots": Option(1, int, "problems of each pool that are then asked", "at least 0"),
        "alpha": Option(1.0, float, "proportional: exponent of the priority", "at least 0"),
        "eps": Option(0.01, float, "proportional: added to priorities", "at least 0"),
        "band_low": Option(0.25, float, "band: lowest success rate", "between 0 and 1"),
        "band_high": Option(0.75, float, "band: highest success rate", "between 0 and 1"),
        "target": Option(0.5, float, "dots: failure rate that is asked most", "between 0 and 1"),
        "temperature": Option(1e-3, float, "dots: how far from it", "above 0")},
    "replay_options": {
        "beta": Option(0.4, float, "importance-weight exponent at the start", "between 0 and 1"),
        "beta_end": Option(1.0, float, "and in the last iteration", "between 0 and 1"),
        "eps": Option(0.01, float, "added to base priorities", "at least 0"),
        "eviction": Option("fifo", tuple(EVICTIONS), "which entry leaves a full buffer: the one that came in first, or that "
                           "of the lowest decayed priority"),
        "unit": Option("episode", ("episode", "group"), "what an entry is: an episode or all episodes of a problem's group"),
        "draw": Option("systematic", tuple(DRAWS), "how a batch is drawn; only systematic never repeats an entry"),
        "max_age": Option(None, int, "older entries are dropped", "at least 0"),
        "min_size": Option(0, int, "entries the buffer must hold before replay starts", "at least 0"),
        "fresh_fraction": Option(0.0, float, "share of a replay batch taken from the newest entries", "between 0 and 1"),
        "positive_fraction": Option(0.0, float, "positive_bias: share of the buffer kept for older correct episodes (delta)",
                                    "between 0 and 1"),
        "positive_advantage_only": Option(False, bool, "positive_bias: a correct episode must also have an advantage to be kept longer"),
        "store_without_signal": Option(None, bool, "store episodes whose advantages are all 0. None: no for per and fresh with a "
                                       "group-mean advantage, else yes"),
        "drift_kl": Option("token", ("token", "sequence"), "--tau auto measures the drift by the sum of the tokens' k3, which scatters "
                           "less, or by k3 or k1 of the whole episode's ratio"),
        "probe_episodes": Option(32, int, "--tau auto: episodes drawn uniformly from the last 16 x this many, an iteration", "above 0")},
}

RELEASED = ("replay_advantage", "lr_steps", "step_without_signal", "is_includes_age", "insert_max", "age_in_iterations")
SEVERAL = (*OPTIONS, "env_options", "loss_options", "released")  # flags that take several words


def loss_table(kind: str) -> dict[str, Option]:
    """What --loss-options may hold with this loss. None: the algorithm's, or the loss's own default."""
    words = {"aggregation": losses.AGGREGATIONS, "correction": losses.CORRECTIONS, "kl_in": ("reward", "loss"), "kl_kind": losses.KLS}
    table = {name: Option(None, tuple(allowed), "") for name, allowed in words.items()}
    table |= {
        "correction_low": Option(None, float, "lower bound of the correction"),
        "correction_high": Option(None, float, "upper bound of the correction"),
        "asymre_shift": Option(-0.1, float, "AsymRE's baseline is the group's mean plus this"),
        "advantage_clip": Option(None, float, "advantages are clamped to +- this in the update", "above 0"),
        "replay_kl_kind": Option("is_k3", tuple(losses.KLS), "in the loss of replayed data; only is_k3 has the right gradient there"),
        "value_clip": Option(0.2, float, "how far the critic's values may move from the update's start; None: no clipping", "above 0",
                             may_be_none=True),
        "gamma": Option(1.0, float, "discount for each action token", "between 0 and 1"),
        "lam": Option(1.0, float, "GAE's lambda", "between 0 and 1"),
        "cut_off": Option("terminal", ("terminal", "bootstrap"), "what comes after an episode that --max-turns or the context cut off, for "
                          "the critic: nothing, which is right where the policy sees how many turns are left, or the critic's value"),
        "overlong": Option("train", ("train", "mask"), "episodes whose last turn hit --max-new-tokens, or that the context could not "
                           "hold any longer: trained like others, or left out of the updates (they count in their group's mean)")}
    for name, default in losses.user_options(kind).items():
        what = {"level": losses.LEVELS, "m2_rule": losses.M2_RULES}.get(name, float)
        table[name] = Option(None, what, f"of {kind}, {default} by default", "" if name == "success_reward" else "at least 0")
    return table


# what older versions called it: the flag, the option of a flag, or the name in --released
OLD_NAMES = {
    "tiny_width": "tiny_options width", "tiny_layers": "tiny_options layers", "warm_start_updates": "tiny_options updates",
    "warm_start_skill": "tiny_options skill", "warm_start_seed": "tiny_options seed", "engine_memory": "engine_options memory",
    "lora_sync": "engine_options lora_sync", "shared_folder": "engine_options shared_folder",
    "parallel_episodes": "engine_options parallel", "async_queue": "async_options queue",
    "async_fixed_ratio": "async_options fixed_ratio", "async_lockstep": "async_options lockstep",
    "sampler_dtype": "async_options dtype", "restart_samplers": "async_options restarts",
    "problem_priority": "problem_options priority", "replay_sampler": "replay", "sampler": "replay",
    "lr_steps": "released lr_steps", "step_without_signal": "released step_without_signal",
    "is_includes_age": "released is_includes_age", "age_unit": "released age_in_iterations",
    "micro_batch_size": "micro_batch_tokens", "max_env_error_frac": "",
    **{name: f"loss_options {name}" for name in (
        "eps_low", "eps_high", "dual_clip", "correction", "correction_low", "correction_high", "asymre_shift", "advantage_clip",
        "aggregation", "kl_in", "kl_kind", "replay_kl_kind", "value_clip", "gamma", "lam", "overlong")},
    **{name: f"replay_options {name}" for name in OPTIONS["replay_options"]},
}


def said_now(name: str) -> str | None:
    """What stands in the place of a setting of older versions, as a sentence; None for other names."""
    if name not in OLD_NAMES:
        return None
    flag, _, option = OLD_NAMES[name].partition(" ")
    old = f"--{name.replace('_', '-')}"
    if not flag:
        return f"{old} is gone: it is always 0.1"
    return f"{old} is now --{flag.replace('_', '-')} {option}".rstrip() + {
        "micro_batch_size": " (1 is one row a pass)", "replay_sampler": " uniform, newest, never_used_first or positive_bias",
        "sampler": " uniform, newest, never_used_first or positive_bias"}.get(name, "")


def with_new_names(config: dict) -> dict:
    """A run's config.yaml by today's names; what has none is left out."""
    result = {key: value for key, value in config.items() if key not in OLD_NAMES}
    for key, value in config.items():
        flag, _, option = OLD_NAMES.get(key, "").partition(" ")
        if flag in OPTIONS or flag == "loss_options":
            result[flag] = {option: value} | result.get(flag, {})
    return result


# ----------------------------------------------------------------------------------------------------- reading


def nearest(name: str, allowed) -> str:
    near = difflib.get_close_matches(name, list(allowed), n=1)
    return f"; did you mean {near[0]}?" if near else "."


def one_value(text, option: Option):
    """The value that a word stands for; ValueError with what is allowed."""
    text = str(text)
    if text in ("None", "null", "~", ""):
        if option.default is None or option.may_be_none:
            return None
        raise ValueError("must not be None")
    if isinstance(option.kind, tuple):
        if text not in option.kind:
            raise ValueError(f"must be {', '.join(option.kind[:-1])} or {option.kind[-1]}{nearest(text, option.kind)}")
        return text
    if option.kind is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError("must be True or False")
        return text.lower() == "true"
    try:
        value = option.kind(text)
    except ValueError:
        raise ValueError({int: "must be a whole number", float: "must be a number"}[option.kind]) from None
    if option.kind is str:
        return value
    if not math.isfinite(value):
        raise ValueError("must be a finite number")
    if option.limits and not LIMITS[option.limits](value):
        raise ValueError(f"must be {option.limits}")
    return value


def complete(flag: str, given: dict, table: dict[str, Option], beside: str = "") -> dict:
    """Every option of `flag` with its value, by the words that were given for some; exits with 2 on a wrong one."""
    spelled = f"--{flag.replace('_', '-')}"
    for name in given:
        if name not in table:
            fail(f"{spelled} has no option {name}{beside}{nearest(name, table)} It has: {', '.join(table)}")
    values = {}
    for name, option in table.items():
        try:
            values[name] = one_value(given[name], option) if name in given else option.default
        except ValueError as error:
            fail(f"{spelled} {name} {given[name]} {error}")
    return values


def split_options(words: list[str]) -> tuple[list[str], dict]:
    """The command line without the flags that take several words, and those: pairs by name for `..._options`, else a list.
    A flag that is given twice counts as one with the words of both."""
    rest, several, current = [], {}, None
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            current = name.replace("-", "_") if name.replace("-", "_") in SEVERAL else None
            if current is None:
                rest.append(word)
            else:
                several.setdefault(current, []).extend([value] * bool(equals))
        elif current is None:
            rest.append(word)
        else:
            several[current].append(word)
    for name, found in several.items():
        if not name.endswith("_options"):
            continue
        if len(found) % 2:
            fail(f"--{name.replace('_', '-')} takes pairs, name value name value, not {' '.join(found)}")
        several[name] = dict(zip(found[::2], found[1::2]))
    return rest, several


def read_config(path: Path, names: list[str], resumed: bool = False) -> tuple[list[str], dict]:
    """The keys of a YAML file as command-line words, and those that take several words; exits with 2 on a key that is no flag."""
    try:
        config = read_yaml(path, yaml.BaseLoader) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        fail(f"cannot read the config {path}: {error}")
    if not isinstance(config, dict):
        fail(f"{path}: a config is a list of `key: value` lines, not a {type(config).__name__}")
    config = {key.replace("-", "_"): value for key, value in config.items()}
    old = [key for key in config if key in OLD_NAMES]
    if old:
        fail(f"{path} is of an older version of this code: {'; '.join(map(said_now, old))}." + resumed * (
            " Go on with that version, or write the new names into it"))
    words, found = [], {}
    spelled = {"null": "None", "~": "None", "": "None", "true": "True", "false": "False", ".inf": "inf"}  # YAML: flag
    for key, value in config.items():
        if key not in names:
            near = difflib.get_close_matches(key, names, n=1)
            fail(f"{path}: unknown key {key!r}" + (f"; did you mean {near[0]!r}?" if near else "; see --help") + resumed * (
                " The run may be of another version of this code: go on with that, or drop the line if it made no difference"))
        if key == "resume":
            fail(f"{path}: resume is for the command line: python train.py --resume runs/NAME")
        if key in SEVERAL and key.endswith("_options"):
            if not isinstance(value, dict) or not all(isinstance(item, str) and str(option).isidentifier()
                                                      for option, item in value.items()):
                fail(f"{path}: {key} must be a mapping of single values, such as {{size: 8}}, not {value}")
            found[key] = value
        elif key in SEVERAL:
            if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
                fail(f"{path}: {key} must be a list of names, not {value}")
            found[key] = value
        elif not isinstance(value, str):
            fail(f"{path}: {key} must be a single value, not {value}")
        else:
            words += [f"--{key.replace('_', '-')}", spelled.get(value, value)]
    return words, found


def config_of_run(flags: list[str]) -> Path:
    values = [flag.split("=", 1)[1] if "=" in flag else flags[place + 1] for place, flag in enumerate(flags)
              if flag.split("=")[0] == "--resume" and ("=" in flag or place + 1 < len(flags))]
    config = Path(values[0] if values else "") / "config.yaml"
    if not config.is_file():
        fail(f"--resume: {config} does not exist; give the folder of a run, such as runs/NAME")
    return config


def fill(args, config: dict, told: dict, given: set[str]):
    """Gives `args` the flags that take several words: from the command line, and options that it leaves from the config."""
    loss = args.loss or losses.ALGORITHMS[args.algo].loss
    for flag in SEVERAL:
        if flag == "released":
            args.released = told.get(flag, config.get(flag, []))
            for name in args.released:
                if name not in RELEASED:
                    fail(f"--released has no {name}{nearest(name, RELEASED)} There are: {', '.join(RELEASED)}")
            continue
        kept = {} if flag == "env_options" and "env" in given else config.get(flag, {})
        options = kept | told.get(flag, {})
        if flag == "loss_options":  # a config may hold options of another loss that were not set
            table, unset = loss_table(loss), ("null", "None", "")
            options = {name: value for name, value in options.items()
                       if name in table or name not in losses.ALL_LOSS_OPTIONS or value not in unset}
            options = complete(flag, options, table, f" with the loss {loss}")
        elif flag != "env_options":
            options = complete(flag, options, OPTIONS[flag])
        setattr(args, flag, options)


# ------------------------------------------------------------------------------------------------------ telling


def spelled(name: str) -> str:
    """lr: --lr; async_options.queue: --async-options queue."""
    flag, _, option = name.partition(".")
    return f"--{flag.replace('_', '-')} {option}".rstrip()


def list_objectives():
    print("bundles (--algo), and what each sets:")
    for name, bundle in losses.ALGORITHMS.items():
        options = " ".join(f"{key}={value}" for key, value in bundle.loss_options.items())
        print(f"  {name:21} advantage {bundle.advantage:21} loss {bundle.loss:14} {bundle.aggregation:20} {options:28} {bundle.note}")
    print("losses (--loss), whether replayed data suits them, and options of their own (--loss-options):")
    for name, loss in losses.LOSSES.items():
        options = " ".join(f"{key}={value}" for key, value in losses.user_options(name).items())
        print(f"  {name:14} {loss.replayed:7} {loss.why}{options and f'; {options}'}")
    for flag, parts in (("advantage", losses.ADVANTAGES), ("loss-options aggregation", losses.AGGREGATIONS),
                        ("loss-options correction", losses.CORRECTIONS), ("loss-options kl_kind", losses.KLS)):
        print(f"--{flag}: {', '.join(parts)}")
    shared = {name: option for name, option in loss_table("reinforce").items()}
    for flag, table in (OPTIONS | {"loss_options": shared}).items():
        print(f"{spelled(flag)}:")
        for name, option in table.items():
            print(f"  {name:24} {option.default!s:12} {option.meaning}")
