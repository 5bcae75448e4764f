"""Sampling: an engine that continues token sequences, and `collect`, which plays many multi-turn episodes side by side.

An engine has four methods: `generate`, `release` (its memory, while the policy is trained), `sync` (take the policy's new
weights) and `close`. HFEngine is here, vLLM's two in vllm_engine.py; `make_engine` chooses. What it sampled is what is
trained on: tokens go in and come out, nothing is tokenised twice, and the behaviour log-probs come from the very
forward pass that sampled.
"""
import json
import math
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from envs import shows_images
from episode import Episode

ENV_THREADS = 16  # for tasks that wait for something outside (a checker, a server)


@dataclass
class Completion:
    """What the policy added to one sequence: token ids, their log-probs under the sampled distribution, why it ended."""
    tokens: list[int]
    logprobs: list[float]
    finish_reason: str  # "stop": it ends in a stop token that was sampled, or in a stop string; "length": the limit was hit


# --------------------------------------------------------------------------------------------------------- episodes


def collect(engine, chat, make_env, problem_ids: list[int], group_ids: list[int], seeds: list[int], *,
            max_turns: int, max_new_tokens: int, temperature: float, format_penalty: float, policy_step,
            iteration: int, context_length: int, parallel: int = 512) -> tuple[list[Episode], list[list[dict]]]:
    """Play one episode for each entry of `problem_ids`, `parallel` of them side by side; returns them and their transcripts.

    `seeds` decide everything random of an episode (the environment's noise and the sampled tokens). Advantages are
    zeros: `update.add_advantages` fills them where the whole group is in sight. `policy_step` may be a function that is asked
    at each turn, where an engine takes new weights in between. An episode whose environment raised ends
    there with the traceback in `info["env_error"]`; one that the context cannot hold any longer ends after a turn.
    """
    episodes, transcripts = [], []
    for first in range(0, len(problem_ids), parallel):
        part = slice(first, first + parallel)
        for played, more in zip((episodes, transcripts), play(
                engine, chat, make_env, problem_ids[part], group_ids[part], seeds[part], max_turns=max_turns,
                max_new_tokens=max_new_tokens, temperature=temperature, format_penalty=format_penalty,
                policy_step=policy_step, iteration=iteration, context_length=context_length)):
            played += more
    return episodes, transcripts


def guarded(call, *arguments):
    """(result, "") or (None, traceback): one broken environment costs one episode; train.py counts and limits them."""
    try:
        return call(*arguments), ""
    except Exception:
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
    score = float(score)
    if not math.isfinite(score) or abs(score) > 1e30:
        raise ValueError(f"the score {score} is not finite")
    return (text_of("" if message is None and done else message), None if done else picture(env), score, bool(done), bool(valid),
            bool(env.success == 1))


def told(env) -> dict:
    """The task's own `info` as JSON knows it."""
    return json.loads(json.dumps(dict(getattr(env, "info", {})), default=lambda value: value.tolist(), allow_nan=False))


def shown(text: str, images: list) -> dict:
    """The transcript's entry of a user's message."""
    return {"role": "user", "content": text} | ({"image": images[0]} if images else {})


def play(engine, chat, make_env, problem_ids, group_ids, seeds, *, max_turns, max_new_tokens, temperature, format_penalty,
         policy_step, iteration, context_length):
    """`collect` of one batch of episodes."""
    step_now = policy_step if callable(policy_step) else lambda: policy_step
    envs = [make_env() for _ in problem_ids]
    pool = ThreadPoolExecutor(ENV_THREADS) if getattr(envs[0], "slow", False) else None
    each = pool.map if pool else map  # both keep the order, so that threads do not change a run
    infos = [{"success": False, "truncated": False, "turns": 0, "parse_failures": 0, "length_stops": 0, "context_full": False,
              "overlong": False, "env_error": ""} for _ in envs]
    firsts, pictures, known = [], [], {}

    def kept(image) -> list:
        """[image], one array for all of one content; [] for None."""
        return [] if image is None else [known.setdefault((image.shape, image.tobytes()), image)]

    for info, (result, error) in zip(infos, each(lambda env, problem, seed: guarded(begin, env, problem, seed),
                                                 envs, problem_ids, seeds)):
        info["env_error"] = error
        message, image = ("(the environment failed)", None) if error else result
        firsts.append(message)
        pictures.append(kept(image))
    transcripts = [[shown(message, images)] for message, images in zip(firsts, pictures)]
    tokens = [chat.start(message, *images) for message, images in zip(firsts, pictures)]
    turn_ends, turn_rewards, scores = ([[] for _ in envs] for _ in range(3))
    for i, info in enumerate(infos):
        if len(tokens[i]) + max_new_tokens > context_length:  # never played
            info["truncated"] = info["context_full"] = True
            tokens[i], pictures[i] = chat.start(firsts[i])[:context_length], []
    masks = [[False] * len(row) for row in tokens]
    logprobs = [[0.0] * len(row) for row in tokens]
    first_steps, last_steps = [step_now()] * len(envs), [step_now()] * len(envs)
    playing = [i for i, info in enumerate(infos) if not info["env_error"] and not info["context_full"]]
    looks = shows_images(envs[0])
    for turn in range(max_turns):
        if not playing:
            break
        seen = {"images": [pictures[i] for i in playing]} if looks else {}
        completions = engine.generate([tokens[i] for i in playing], playing, [seeds[i] for i in playing],
                                      max_new_tokens, temperature, tuple(getattr(envs[0], "stop", ())), **seen)
        for i in playing:
            last_steps[i] = step_now()
            first_steps[i] = first_steps[i] if turn else last_steps[i]
        answers = [chat.text(completion.tokens) for completion in completions]
        results = each(lambda i, answer: guarded(step, envs[i], answer), playing, answers)
        still_playing = []
        for i, completion, answer, (result, error) in zip(playing, completions, answers, results):
            message, image, score, done, valid, success = (("(the environment failed)", None, 0.0, True, True, False) if error
                                                           else result)
            more = kept(image)
            tokens[i] += completion.tokens
            masks[i] += [True] * len(completion.tokens)
            logprobs[i] += completion.logprobs
            transcripts[i] += [{"role": "assistant", "content": answer}, shown(message, more)]
            turn_ends[i].append(len(tokens[i]))
            turn_rewards[i].append(score - format_penalty * (not valid))
            scores[i].append(score)
            info, cut = infos[i], completion.finish_reason == "length"
            info["turns"] += 1
            info["parse_failures"] += not valid
            info["length_stops"] += cut
            info["overlong"] = cut  # of the last turn
            info["env_error"] = error
            info["success"] = success
            if done:
                continue
            if turn + 1 == max_turns:
                info["truncated"] = True
                continue
            follow = chat.follow(message, completion.tokens[-1], *more)
            if len(tokens[i]) + len(follow) + max_new_tokens > context_length:
                info["truncated"] = info["context_full"] = True
                continue  # the image that has no room goes with its tokens
            tokens[i] += follow
            pictures[i] += more
            masks[i] += [False] * len(follow)
            logprobs[i] += [0.0] * len(follow)
            still_playing.append(i)
        playing = still_playing
    if pool:
        pool.shutdown()
    for env, info in zip(envs, infos):
        info["overlong"] |= info["context_full"]
        own, error = guarded(told, env)
        info["env_error"] = info["env_error"] or error
        info |= {key: value for key, value in (own or {}).items() if key not in info}
    episodes = [
        Episode(tokens=np.array(tokens[i], np.int32), action_mask=np.array(masks[i], bool),
                behavior_logprobs=np.array(logprobs[i], np.float32), advantages=np.zeros(len(tokens[i]), np.float32),
                turn_ends=np.array(turn_ends[i], np.int32), turn_rewards=np.array(turn_rewards[i], np.float32),
                reward=float(sum(turn_rewards[i])), score=float(sum(scores[i])), problem_id=int(problem_ids[i]),
                group_id=int(group_ids[i]), policy_step=first_steps[i], last_policy_step=last_steps[i],
                iteration=iteration, images=pictures[i] if looks else None, info=infos[i])
        for i in range(len(envs))]
    return episodes, transcripts
