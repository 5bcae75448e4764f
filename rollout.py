"""Sampling: an engine that continues token sequences, and `collect`, which plays many multi-turn episodes side by side.

An engine has four methods: `generate`, `release` (its memory, while the policy is trained), `sync` (take the policy's new
weights) and `close`; engines/ has them, and none is imported here. What it sampled is what is trained on: tokens go in and come
out, nothing is tokenised twice, and the behaviour log-probs come from the very forward pass that sampled.
"""
import json
import math
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from envs import shows_images
from episode import Episode

FAILED = "(the environment failed)"  # shown in place of a message
ENV_THREADS = 16  # for tasks that wait for something outside (a checker, a server)


@dataclass
class Completion:
    """What the policy added to one sequence: token ids, their log-probs under the sampled distribution, why it ended."""
    tokens: list[int]
    logprobs: list[float]
    finish_reason: str  # "stop": it ends in a stop token that was sampled, or in a stop string; "length": the limit was hit


def collect(engine, chat, make_env, problem_ids: list[int], group_ids: list[int], seeds: list[int], *, parallel: int = 512,
            **options) -> tuple[list[Episode], list[list[dict]]]:
    """Play one episode for each entry of `problem_ids`, `parallel` of them side by side; returns them and their transcripts.
    The options are those of `play`.

    `seeds` decide everything random of an episode (the environment's noise and the sampled tokens). Advantages are
    zeros: `judge.add_advantages` fills them where the whole group is in sight. `policy_step` may be a function that is asked
    at each turn, where an engine takes new weights in between. An episode whose environment raised ends
    there with the traceback in `info["env_error"]`; one that the context cannot hold any longer ends after a turn.
    """
    episodes, transcripts = [], []
    for first in range(0, len(problem_ids), parallel):
        part = slice(first, first + parallel)
        more, their_transcripts = play(engine, chat, make_env, problem_ids[part], group_ids[part], seeds[part], **options)
        episodes += more
        transcripts += their_transcripts
    return episodes, transcripts


def guarded(call, *arguments):
    """(result, "") or (None, traceback): one broken environment costs one episode; train.py counts and limits them."""
    try:
        return call(*arguments), ""
    except (Exception, SystemExit):  # a task that calls sys.exit is broken too
        return None, traceback.format_exc(limit=-3)


def text_of(message) -> str:
    if not isinstance(message, str):
        raise TypeError(f"a message must be a str, not {message!r}")
    message.encode()  # a lone surrogate is an error here
    return message


def picture(env) -> np.ndarray | None:
    """What the policy sees beside the message, checked; with the view "blank" nothing, in a picture of the same size."""
    image = env.image() if shows_images(env) else None
    if image is not None and not (isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.ndim == 3 and
                                  image.shape[2] == 3 and image.size):
        raise TypeError(f"image() must be an (H, W, 3) uint8 array, not {getattr(image, 'dtype', type(image))} "
                        f"{getattr(image, 'shape', '')}")
    return np.zeros_like(image) if getattr(env, "view", "") == "blank" and image is not None else image


def begin(env, problem_id, seed) -> tuple[str, np.ndarray | None]:
    return text_of(env.reset(int(problem_id), int(seed))), picture(env)


def step(env, answer: str) -> tuple[str, np.ndarray | None, float, bool, bool, bool]:
    """(message, image, score, done, valid, success) of a turn, checked."""
    message, score, done, valid = env.step(answer)
    for name, flag in (("done", done), ("valid", valid), ("success", env.success)):
        if flag not in (0, 1):  # a text such as "False" would count as true
            raise TypeError(f"{name} must be True or False, not {flag!r} of the type {type(flag).__name__}")
    if isinstance(score, str) or not math.isfinite(score) or abs(score) > 1e30:
        raise ValueError(f"the score {score!r} is not a finite number")
    return (text_of("" if message is None and done else message), None if done else picture(env), float(score), bool(done),
            bool(valid), bool(env.success))


def stop_strings(env) -> tuple[str, ...]:
    """The task's `stop`; a str is one stop string."""
    stop = getattr(env, "stop", ())
    stop = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(text, str) and text for text in stop):
        raise TypeError(f"stop must be a tuple of texts, like (\"</answer>\",), not {env.stop!r}")
    return stop


def told(env) -> dict:
    """The task's own `info` as JSON knows it."""
    return json.loads(json.dumps(dict(getattr(env, "info", {})), default=lambda value: value.tolist(), allow_nan=False))


def shown(text: str, images: list) -> dict:
    """The transcript's entry of a user's message."""
    return {"role": "user", "content": text} | ({"image": images[0]} if images else {})


@dataclass
class Game:
    """An episode while it is played; images of equal content are one array."""
    env: object
    info: dict
    images: list
    transcript: list[dict]
    first_step: int
    last_step: int
    tokens: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    turn_ends: list[int] = field(default_factory=list)
    turn_rewards: list[float] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)

    def show(self, tokens: list[int]):
        self.tokens += tokens
        self.mask += [False] * len(tokens)
        self.logprobs += [0.0] * len(tokens)


def kept(image, known: dict) -> list:
    """[image], one array for all of one content; [] for None."""
    return [] if image is None else [known.setdefault((image.shape, image.tobytes()), image)]


def begun(chat, env, result, error: str, known: dict, policy_step: int, context_length: int, max_new_tokens: int) -> Game:
    """The game with its first message, from what `begin` gave. One whose message leaves no room for an answer is never played."""
    message, image = (FAILED, None) if error else result
    images = kept(image, known)
    info = {"success": False, "truncated": False, "turns": 0, "parse_failures": 0, "length_stops": 0, "context_full": False,
            "overlong": False, "env_error": error}
    game = Game(env, info, images, [shown(message, images)], policy_step, policy_step)
    tokens = chat.start(message, *images)
    if len(tokens) + max_new_tokens > context_length:
        info["truncated"] = info["context_full"] = True
        tokens, game.images = chat.start(message)[:context_length], []
    game.show(tokens)
    return game


def took(game: Game, completion: Completion, answer: str, result, error: str, known: dict, format_penalty: float):
    """Writes down a turn, from what `step` gave; returns the next message, its images, and whether the episode is over."""
    message, image, score, done, valid, success = (FAILED, None, 0.0, True, True, False) if error else result
    images, cut, info = kept(image, known), completion.finish_reason == "length", game.info
    game.tokens += completion.tokens
    game.mask += [True] * len(completion.tokens)
    game.logprobs += completion.logprobs
    game.turn_ends.append(len(game.tokens))
    game.transcript += [{"role": "assistant", "content": answer}, shown(message, images)]
    game.turn_rewards.append(score - format_penalty * (not valid))
    game.scores.append(score)
    info["turns"] += 1
    info["parse_failures"] += not valid
    info["length_stops"] += cut
    info["overlong"] = cut  # of the last turn
    info["env_error"] = error
    info["success"] = success
    return message, images, done


def ended(game: Game, problem_id: int, group_id: int, iteration: int) -> Episode:
    info = game.info
    info["overlong"] |= info["context_full"]
    own, error = guarded(told, game.env)
    info["env_error"] = info["env_error"] or error
    info |= {key: value for key, value in (own or {}).items() if key not in info}
    return Episode(
        tokens=np.array(game.tokens, np.int32), action_mask=np.array(game.mask, bool),
        behavior_logprobs=np.array(game.logprobs, np.float32), advantages=np.zeros(len(game.tokens), np.float32),
        turn_ends=np.array(game.turn_ends, np.int32), turn_rewards=np.array(game.turn_rewards, np.float32),
        reward=float(sum(game.turn_rewards)), score=float(sum(game.scores)), problem_id=int(problem_id), group_id=int(group_id),
        policy_step=game.first_step, last_policy_step=game.last_step, iteration=iteration,
        images=game.images if shows_images(game.env) else None, info=info)


def play(engine, chat, make_env, problem_ids, group_ids, seeds, *, max_turns: int, max_new_tokens: int, temperature: float,
         format_penalty: float, policy_step, iteration: int, context_length: int):
    """`collect` of one batch of episodes."""
    step_now = policy_step if callable(policy_step) else lambda: policy_step
    envs = [make_env() for _ in problem_ids]
    pool = ThreadPoolExecutor(ENV_THREADS) if getattr(envs[0], "slow", False) else None
    each = pool.map if pool else map  # both keep the order, so that threads do not change a run
    known, stop, opening = {}, stop_strings(envs[0]), chat.opening()
    firsts = list(each(lambda env, problem, seed: guarded(begin, env, problem, seed), envs, problem_ids, seeds))
    games = [begun(chat, env, *first, known, step_now(), context_length, max_new_tokens) for env, first in zip(envs, firsts)]
    playing = [i for i, game in enumerate(games) if not game.info["env_error"] and not game.info["context_full"]]
    for turn in range(max_turns):
        if not playing:
            break
        seen = {"images": [games[i].images for i in playing]} if shows_images(envs[0]) else {}
        completions = engine.generate([games[i].tokens for i in playing], playing, [seeds[i] for i in playing],
                                      max_new_tokens, temperature, stop, **seen)
        for i in playing:
            games[i].last_step = step_now()
            games[i].first_step = games[i].first_step if turn else games[i].last_step
        answers = [chat.text(completion.tokens) for completion in completions]
        results = each(lambda i, answer: guarded(step, envs[i], opening + answer), playing, answers)
        still_playing = []
        for i, completion, answer, (result, error) in zip(playing, completions, answers, results):
            message, images, done = took(games[i], completion, answer, result, error, known, format_penalty)
            if done:
                continue
            if turn + 1 == max_turns:
                games[i].info["truncated"] = True
                continue
            follow = chat.follow(message, completion.tokens[-1], *images)
            if len(games[i].tokens) + len(follow) + max_new_tokens > context_length:
                games[i].info["truncated"] = games[i].info["context_full"] = True
                continue  # the image that has no room goes with its tokens
            games[i].show(follow)
            games[i].images += images
            still_playing.append(i)
        playing = still_playing
    if pool:
        pool.shutdown()
    episodes = [ended(game, problem, group, iteration) for game, problem, group in zip(games, problem_ids, group_ids)]
    return episodes, [game.transcript for game in games]
