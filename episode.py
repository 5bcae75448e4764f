"""The record that flows: one played `Episode`, how episodes lie in arrays, and what rollouts look like in a file."""
import difflib
import hashlib
import json
import math
import operator
import os
import sys
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> str:
    """`value`, or a ValueError that names the nearest of `allowed`."""
    if value in allowed:
        return value
    near = [f"; did you mean {name}?" for name in difflib.get_close_matches(str(value), allowed, n=1)]
    raise ValueError(f"{name}={value!r} is not one of {', '.join(allowed)}{''.join(near)}")


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _vector(name: str, value: Any, dtype: type, length: int | None = None) -> np.ndarray:
    """A 1-D array of `dtype` that owns its data: a slice of a padded array must not keep the padding alive."""
    array = np.asarray(value)
    require(array.ndim == 1, f"{name} has shape {array.shape}; it must be one-dimensional")
    require(length is None or len(array) == length, f"{name} has length {len(array)}, but tokens has length {length}")
    if array.dtype == dtype and array.base is None:
        return array
    if dtype == np.int32 and array.size:
        require(array.dtype.kind in "iu", f"{name} has dtype {array.dtype}; it must be of integers")
        require(abs(int(array.max())) < 2**31 and abs(int(array.min())) < 2**31, f"{name} does not fit in int32")
    if dtype == np.bool_ and array.dtype != np.bool_:
        require(bool(np.isin(array, (0, 1)).all()), f"{name} must be of True and False, got {array[:8]}...")
    return np.array(array, dtype=dtype)


def require_all(ok_T: np.ndarray, name: str, values_T: np.ndarray, rule: str) -> None:
    if np.count_nonzero(ok_T) < len(ok_T):  # several times faster than ok_T.all()
        position = int(np.argmin(ok_T))
        raise ValueError(f"{name}[{position}] is {values_T[position]}; {rule}")


# ALGO LOGIC: a new field of Episode is checked and saved once it is named in one of these.
TOKEN_FIELDS = {"tokens": np.int32, "action_mask": np.bool_, "behavior_logprobs": np.float32, "advantages": np.float32}
TURN_FIELDS = {"turn_ends": np.int32, "turn_rewards": np.float32}
PLAYED = ("success", "truncated", "turns", "parse_failures", "length_stops", "context_full", "overlong", "env_error")  # in `info`
SCALAR_FIELDS = ("reward", "score", "problem_id", "group_id", "policy_step", "last_policy_step", "iteration")


@dataclass(slots=True, eq=False)
class Episode:
    """One played episode, ragged, never padded; T tokens: the prompt, then turn by turn actions and observations.

    Arrays are converted to the dtypes below and copied if they are views. `validate` raises a ValueError that names the
    field and the value; it runs at creation and again in `ReplayBuffer.add`, so advantages may be filled in between.
    """

    tokens: np.ndarray  # (T,) int32
    action_mask: np.ndarray  # (T,) bool, True exactly on the tokens that the policy sampled
    behavior_logprobs: np.ndarray  # (T,) float32, under the distribution really sampled from; 0 where the mask is False
    advantages: np.ndarray  # (T,) float32, computed once, at collection; 0 where the mask is False
    turn_ends: np.ndarray  # (turns,) int32, token index after each turn
    turn_rewards: np.ndarray  # (turns,) float32
    reward: float  # what training uses: return with format penalty and shaping
    score: float  # the task's own return: priorities and evaluation
    problem_id: int
    group_id: int
    policy_step: int  # optimiser steps done when the first token was sampled: the birthday
    last_policy_step: int  # ... when the last token was sampled
    iteration: int
    values: np.ndarray | None = None  # (T,) float32, critic values at collection
    images: list[np.ndarray] | None = None  # (H, W, 3) uint8 each, in the order of their tokens; equal ones are one array
    info: dict[str, Any] = field(default_factory=dict)  # JSON-able; "success" among its keys

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        for name, dtype in TOKEN_FIELDS.items():
            setattr(self, name, _vector(name, getattr(self, name), dtype, len(self.tokens)))
        for name, dtype in TURN_FIELDS.items():
            setattr(self, name, _vector(name, getattr(self, name), dtype))
        if self.values is not None:
            self.values = _vector("values", self.values, np.float32, len(self.tokens))
        require(len(self.tokens) > 0, "tokens is empty; an episode has at least one token")
        for name in ("behavior_logprobs", "advantages", "values", "turn_rewards"):
            array = getattr(self, name)
            if array is not None:
                require_all(np.isfinite(array), name, array, "it must be finite")
        for name in ("behavior_logprobs", "advantages"):
            array = getattr(self, name)
            require_all((array == 0) | self.action_mask, name, array, "it must be 0 where action_mask is False")
        logprobs = self.behavior_logprobs
        require_all(logprobs <= 1e-6, "behavior_logprobs", logprobs, "a log-probability is at most 0")

        ends, turns = self.turn_ends.tolist(), len(self.turn_rewards)
        require(len(ends) == turns, f"turn_rewards has length {turns}, but turn_ends has length {len(ends)}")
        rising = [0] + ends + [len(self.tokens)] == sorted([0] + ends + [len(self.tokens)])
        require(rising, f"turn_ends {ends} must rise from 0 to at most the {len(self.tokens)} tokens")
        for name in ("reward", "score"):
            value = float(getattr(self, name))
            setattr(self, name, value)
            require(math.isfinite(value), f"{name} is {value}; it must be finite")
        for name in SCALAR_FIELDS[2:]:
            setattr(self, name, operator.index(getattr(self, name)))
        first, last = self.policy_step, self.last_policy_step
        require(first <= last, f"policy_step {first} is after last_policy_step {last}")
        for number, image in enumerate(self.images or ()):
            good = isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.ndim == 3 and image.shape[2] == 3
            require(good, f"images[{number}] must be (height, width, 3) uint8, got {getattr(image, 'shape', image)}")
            if image.base is not None:
                self.images[number] = image.copy()
        if self.info:
            json.dumps(self.info)  # a TypeError here names what cannot be saved

    @property
    def nbytes(self) -> int:
        """Bytes of memory, Python objects included."""
        values = [getattr(self, name) for name in self.__dataclass_fields__]
        return sys.getsizeof(self) + sum(_sizeof(value) for value in {id(value): value for value in values}.values())


def _sizeof(value: Any) -> int:
    if value is None or isinstance(value, bool) or (isinstance(value, int) and -5 <= value <= 256):
        return 0  # shared by all of Python
    size = sys.getsizeof(value)
    if isinstance(value, dict):
        size += sum(_sizeof(item) for item in value.values())
    elif isinstance(value, list):
        size += sum(_sizeof(item) for item in {id(item): item for item in value}.values())
    return size


def pack_episodes(episodes: list[Episode]) -> dict[str, Any]:
    """Episodes as a flat dict of concatenated arrays, their lengths, and one JSON-able list, `info`; no padding."""

    def join(arrays: list[np.ndarray], dtype: type) -> np.ndarray:
        return np.concatenate([np.zeros(0, dtype), *arrays])

    images = [image for episode in episodes for image in episode.images or ()]
    places = {key: place for place, key in enumerate(dict.fromkeys(map(id, images)))}  # one array may stand in many episodes
    distinct = list({id(image): image for image in images}.values())
    packed: dict[str, Any] = {
        "lengths": np.array([len(episode.tokens) for episode in episodes], np.int64),
        "turns": np.array([len(episode.turn_ends) for episode in episodes], np.int64),
        "has_values": np.array([episode.values is not None for episode in episodes], bool),
        "values": join([episode.values for episode in episodes if episode.values is not None], np.float32),
        "image_counts": np.array([-1 if e.images is None else len(e.images) for e in episodes], np.int64),
        "image_places": np.array([places[id(image)] for image in images], np.int64),
        "image_shapes": np.array([image.shape for image in distinct], np.int64).reshape(-1, 3),
        "image_bytes": join([image.reshape(-1) for image in distinct], np.uint8),
        "info": [episode.info for episode in episodes],
    }
    packed |= {name: np.array([getattr(episode, name) for episode in episodes]) for name in SCALAR_FIELDS}
    fields = (TOKEN_FIELDS | TURN_FIELDS).items()
    return packed | {name: join([getattr(episode, name) for episode in episodes], dtype) for name, dtype in fields}


def unpack_episodes(packed: dict[str, Any]) -> list[Episode]:
    """The inverse of `pack_episodes`."""

    def split(array: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
        ends = np.cumsum(lengths).tolist()
        return [array[start:end] for start, end in zip([0] + ends, ends)]  # views: Episode copies them

    columns = {name: split(packed[name], packed["lengths"]) for name in TOKEN_FIELDS}
    columns |= {name: split(packed[name], packed["turns"]) for name in TURN_FIELDS}
    columns |= {name: packed[name].tolist() for name in SCALAR_FIELDS} | {"info": packed["info"]}
    values = split(packed["values"], packed["lengths"] * packed["has_values"])
    columns["values"] = [value if has else None for value, has in zip(values, packed["has_values"])]
    shapes = packed["image_shapes"]
    flat_images = split(packed["image_bytes"], shapes.prod(axis=1))
    distinct = [flat.reshape(shape).copy() for flat, shape in zip(flat_images, shapes)]
    images = iter([distinct[place] for place in packed.get("image_places", range(len(distinct)))])  # none before images repeated
    counts = packed["image_counts"].tolist()
    columns["images"] = [None if count < 0 else list(islice(images, count)) for count in counts]
    return [Episode(**dict(zip(columns, row))) for row in zip(*columns.values())]


def rounded(values) -> list[float]:
    return [round(float(value), 5) for value in values]


def episode_record(chat, iteration: int, episode, transcript=None, age=0, weight=1.0, log_ratios=None, kind="fresh") -> dict:
    """A line of episodes.jsonl: the transcript (a replayed episode's is read from its tokens) and what each token got."""
    if transcript is None:
        edges = np.flatnonzero(np.diff(episode.action_mask.astype(int))) + 1
        transcript = [{"role": "user" if place % 2 == 0 else "assistant", "content": chat.text(part.tolist())}
                      for place, part in enumerate(np.split(episode.tokens, edges))]
        for turn, image in zip(transcript[::2], episode.images or ()):
            turn["image"] = image
    return {"iteration": iteration, "kind": kind, "problem_id": episode.problem_id, "group_id": episode.group_id,
            "policy_step": episode.policy_step, "age": int(age), "weight": float(weight), "reward": episode.reward,
            "score": episode.score, "info": episode.info, "transcript": transcript,
            "pieces": [chat.tokenizer.decode([token]) for token in episode.tokens.tolist()],
            "action_mask": episode.action_mask.astype(int).tolist(), "advantages": rounded(episode.advantages),
            "behavior_logprobs": rounded(episode.behavior_logprobs),
            "log_ratios": None if log_ratios is None else rounded(log_ratios)}


def with_files(folder: Path, record: dict) -> dict:
    """The record with the images of its transcript as files images/<hash of the content>.png in `folder`."""
    transcript = [dict(turn) for turn in record.get("transcript", ())]
    for turn in transcript:
        if "image" in turn:
            image = turn["image"]
            turn["image"] = f"images/{hashlib.sha256(repr(image.shape).encode() + image.tobytes()).hexdigest()[:16]}.png"
            if not (folder / turn["image"]).exists():
                (folder / "images").mkdir(exist_ok=True)
                Image.fromarray(image).save(folder / "images" / ".new", format="PNG")
                os.replace(folder / "images" / ".new", folder / turn["image"])
    return record | ({"transcript": transcript} if transcript else {})


def is_sound(objective, episode, oldest: float) -> bool:
    """Whether an episode can teach something and was not sampled before the step `oldest`."""
    return episode.policy_step >= oldest and not episode.info["env_error"] and bool(episode.action_mask.any()) and \
        not (objective.overlong == "mask" and episode.info["overlong"])


def has_signal(episode) -> bool:
    return bool(episode.advantages.any())


def with_signal(episodes, whole_groups: bool) -> list:
    """Those whose advantages are not all 0; with `whole_groups` also the other members of their groups."""
    kept = [episode for episode in episodes if has_signal(episode)]
    if not whole_groups:
        return kept
    groups = {episode.group_id for episode in kept}
    return [episode for episode in episodes if episode.group_id in groups]
