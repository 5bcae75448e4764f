"""How settings are spelled: options of a flag (`--tiny-options width 64`, in a config a mapping), and configs."""
import argparse
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


TABLES = read_yaml(Path(__file__).with_name("options.yaml"))
KINDS = {"int": int, "float": float, "bool": bool, "str": str}
WORDS = {"eviction": EVICTIONS, "draw": DRAWS, "aggregation": losses.AGGREGATIONS, "correction": losses.CORRECTIONS,
         "kl_kind": losses.KLS, "replay_kl_kind": losses.KLS}
LIMITS = {"above 0": lambda value: value > 0, "at least 0": lambda value: value >= 0,
          "between 0 and 1": lambda value: 0 <= value <= 1}
MAY_CHANGE_ON_RESUME = set(TABLES["may_change_on_resume"])
RELEASED = ("replay_advantage", "lr_steps", "step_without_signal", "is_includes_age", "insert_max", "age_in_iterations")


def option_of(name: str, default, meaning: str, kind: str | None = None, words=None, **more) -> Option:
    words = words or WORDS.get(name)
    return Option(default, tuple(words) if words else KINDS[kind or type(default).__name__], meaning, **more)


OPTIONS = {}
for flag, table in TABLES["options"].items():
    OPTIONS[flag] = {name: option_of(name, **facts) for name, facts in table.items()}
LOSS_OPTIONS = OPTIONS.pop("loss_options")  # without the chosen loss's own
MAPPINGS = (*OPTIONS, "env_options", "loss_options")  # flags that take names and values
SEVERAL = (*MAPPINGS, "released")  # flags that take several words


def loss_table(kind: str) -> dict[str, Option]:
    """What --loss-options may hold with this loss."""
    table = dict(LOSS_OPTIONS)
    for name, default in losses.user_options(kind).items():
        what = {"level": losses.LEVELS, "m2_rule": losses.M2_RULES}.get(name, float)
        table[name] = Option(None, what, f"of {kind}, {default} by default", "" if name == "success_reward" else "at least 0")
    return table


def option_named(name: str) -> str | None:
    """How the option is set whose name was taken for a flag; None where there is none."""
    for flag, table in (OPTIONS | {"loss_options": {*LOSS_OPTIONS, *losses.ALL_LOSS_OPTIONS}}).items():
        if name in table:
            return f"set by {spelled(flag)} {name}"
    now = f"--released {name}" if name in RELEASED else TABLES["renamed"].get(name)
    return f"set by {now}" if now and not now.startswith("gone") else now


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
    for name in given:
        if name not in table:
            fail(f"{spelled(flag)} has no option {name}{beside}{nearest(name, table)} It has: {', '.join(table)}")
    values = {}
    for name, option in table.items():
        try:
            values[name] = one_value(given[name], option) if name in given else option.default
        except ValueError as error:
            fail(f"{spelled(flag)} {name} {given[name]} {error}")
    return values


def split_options(words: list[str]) -> tuple[list[str], dict]:
    """The command line without the flags that take several words, and those: pairs by name for `..._options`, else a list.
    A flag that is given twice counts as one with the words of both."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in SEVERAL:
        parser.add_argument(f"--{flag}", f"--{flag.replace('_', '-')}", nargs="*", action="extend", default=argparse.SUPPRESS)
    parser.add_argument("--resume", nargs="?", const="", default=argparse.SUPPRESS)
    found, rest = parser.parse_known_args(words)
    several = vars(found)
    for flag in several.keys() & set(MAPPINGS):
        given = several[flag]
        if len(given) % 2:
            fail(f"{spelled(flag)} takes pairs, name value name value, not {' '.join(given)}")
        several[flag] = dict(zip(given[::2], given[1::2]))
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
    words, found = [], {}
    as_flag = {"null": "None", "~": "None", "": "None", "true": "True", "false": "False", ".inf": "inf"}  # YAML: flag
    for key, value in config.items():
        if key not in names:
            option = option_named(key)
            meant = f": it is {option}." if option else nearest(key, names)
            fail(f"{path}: unknown key {key!r}{meant} See --help." + resumed * (
                " The run may be of another version of this code: go on with that, or drop the line if it made no difference"))
        if key == "resume":
            fail(f"{path}: resume is for the command line: python train.py --resume runs/NAME")
        if key in SEVERAL:
            kind, wanted = (dict, "mapping of single values, such as {size: 8}") if key in MAPPINGS else (list, "list of names")
            inner = value.values() if isinstance(value, dict) else value
            if not isinstance(value, kind) or not all(isinstance(item, str) for item in inner) \
                    or not all(str(name).isidentifier() for name in value):
                fail(f"{path}: {key} must be a {wanted}, not {value}")
            found[key] = value
        elif not isinstance(value, str):
            fail(f"{path}: {key} must be a single value, not {value}")
        else:
            words += [spelled(key), as_flag.get(value, value)]
    return words, found


def fill(args, config: dict, told: dict, given: set[str]):
    """Gives `args` the flags that take several words: from the command line, and options that it leaves from the config."""
    loss = args.loss or losses.ALGORITHMS[args.algo].loss
    args.released = told.get("released", config.get("released", []))
    for name in args.released:
        if name not in RELEASED:
            fail(f"--released has no {name}{nearest(name, RELEASED)} There are: {', '.join(RELEASED)}")
    for flag in MAPPINGS:
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
                        ("loss-options correction", losses.CORRECTIONS)):
        print(f"--{flag}: {', '.join(parts)}")
    print("--loss-options kl_kind and replay_kl_kind, and the gradient of each, d = logp - ref, bounded at 20:")
    for name, gradient in losses.KLS.items():
        print(f"  {name:20} {gradient}")
    for flag, table in (OPTIONS | {"loss_options": LOSS_OPTIONS}).items():
        print(f"{spelled(flag)}:")
        for name, option in table.items():
            print(f"  {name:24} {option.default!s:12} {option.meaning}")
