"""Sampling: an engine that continues token sequences, and `collect`, which plays many multi-turn episodes side by side.

An engine has three methods: `generate`, `sync` (take the policy's new weights) and `close`. What it sampled is what is
trained on: tokens go in and come out, nothing is tokenised twice, and the behaviour log-probs come from the very
forward pass that sampled.
"""
import traceback
from dataclasses import dataclass

import numpy as np
import torch
from transformers import DynamicCache

from buffer import Episode


@dataclass
class Completion:
    """What the policy added to one sequence: token ids, their log-probs under the sampled distribution, why it ended."""
    tokens: list[int]
    logprobs: list[float]
    finish_reason: str  # "stop": the last token is a stop token that was sampled; "length": the limit was hit


class HFEngine:
    """Samples with the trainer's own transformers model. Sequences of one batch keep their keys and values between
    calls, so a turn costs its new tokens only."""

    def __init__(self, model, stop_ids: list[int], pad_id: int):
        self.model, self.stop_ids, self.pad_id = model, set(stop_ids), pad_id
        self.sync()

    def sync(self):
        """The model is shared with the trainer: only what was computed with the old weights has to go."""
        self.cache, self.ids, self.cached = None, [], {}

    def close(self):
        self.sync()

    @torch.inference_mode()
    def generate(self, sequences: list[list[int]], ids: list[int], seeds: list[int], max_new_tokens: int,
                 temperature: float) -> list[Completion]:
        """Continue each sequence by at most `max_new_tokens` tokens, up to and with a stop token.

        `ids` name the conversations; one whose cached tokens are still a prefix of its sequence is continued from the
        cache, and conversations that are missing from `ids` leave it. What a sequence gets depends on its seed and
        its length, not on its neighbours in the batch.
        """
        self.model.eval()
        self.keep(ids, sequences)
        uniforms_BT = np.stack([np.random.default_rng([seed, len(sequence)]).random(max_new_tokens)
                                for seed, sequence in zip(seeds, sequences)])
        completions = [Completion([], [], "length") for _ in ids]
        chunks = [sequence[len(self.cached[id]):] for id, sequence in zip(ids, sequences)]
        for position in range(max_new_tokens):
            logprobs_BV = torch.log_softmax(self.forward(chunks).float() / temperature, dim=-1)
            # inverse-CDF sampling, so that a row's draw needs nothing but its own uniform number
            if not logprobs_BV.isfinite().all():
                raise ValueError("the policy's log-probs are not finite: its weights have diverged; a smaller --lr or "
                                 "--max-grad-norm often helps")
            cdf_BV = logprobs_BV.double().exp().cumsum(dim=-1)
            uniform_B1 = torch.from_numpy(uniforms_BT[:, position:position + 1]).to(cdf_BV.device)
            token_B1 = torch.searchsorted(cdf_BV, uniform_B1 * cdf_BV[:, -1:], right=True)
            logprob_B = logprobs_BV.gather(1, token_B1).squeeze(1).tolist()
            for row, (completion, token) in enumerate(zip(completions, token_B1.squeeze(1).tolist())):
                if completion.finish_reason == "stop":
                    continue
                completion.tokens.append(token)
                completion.logprobs.append(logprob_B[row])
                if token in self.stop_ids:
                    completion.finish_reason = "stop"
            chunks = [[] if completion.finish_reason == "stop" else completion.tokens[-1:]
                      for completion in completions]
            if not any(chunks):
                break
        return completions

    def keep(self, ids, sequences):
        """Reduce the cache to these conversations, or start it afresh where one is new or was rewritten."""
        if self.cache is not None and all(
                id in self.cached and sequence[:len(self.cached[id])] == self.cached[id]
                for id, sequence in zip(ids, sequences)):
            if ids != self.ids:
                rows = torch.tensor([self.ids.index(id) for id in ids], device=self.valid_BL.device)
                self.cache.batch_select_indices(rows)
                self.valid_BL = self.valid_BL[rows]
        else:
            self.cache = DynamicCache(config=self.model.config)
            self.valid_BL = torch.zeros(len(ids), 0, dtype=torch.long, device=self.model.device)
            self.cached = {id: [] for id in ids}
        self.ids = list(ids)

    def forward(self, chunks: list[list[int]]) -> torch.Tensor:
        """Feed each conversation its next tokens, padded on the left; returns the logits (B, V) after the last one."""
        width = max(map(len, chunks))
        tokens_BW = torch.full((len(chunks), width), self.pad_id)
        valid_BW = torch.zeros(len(chunks), width, dtype=torch.long)
        position_BW = torch.zeros(len(chunks), width, dtype=torch.long)
        for row, (id, chunk) in enumerate(zip(self.ids, chunks)):
            if chunk:
                tokens_BW[row, -len(chunk):] = torch.tensor(chunk)
                valid_BW[row, -len(chunk):] = 1
                start = len(self.cached[id])
                position_BW[row, -len(chunk):] = torch.arange(start, start + len(chunk))
                self.cached[id] = self.cached[id] + chunk
        device = self.valid_BL.device
        self.valid_BL = torch.cat([self.valid_BL, valid_BW.to(device)], dim=1)
        output = self.model(input_ids=tokens_BW.to(device), attention_mask=self.valid_BL,
                            position_ids=position_BW.to(device), past_key_values=self.cache, use_cache=True,
                            logits_to_keep=1)
        return output.logits[:, -1]


def collect(engine, chat, make_env, problem_ids: list[int], group_ids: list[int], seeds: list[int], *,
            max_turns: int, max_new_tokens: int, temperature: float, format_penalty: float, policy_step: int,
            iteration: int, context_length: int) -> tuple[list[Episode], list[list[dict]]]:
    """Play one episode for each entry of `problem_ids`, all side by side; returns them and their transcripts.

    `seeds` decide everything random of an episode (the environment's noise and the sampled tokens). Advantages are
    zeros: `update.add_advantages` fills them where the whole group is in sight. An episode whose environment raised ends
    there with the traceback in `info["env_error"]`.
    """
    envs = [make_env() for _ in problem_ids]
    transcripts = [[{"role": "user", "content": env.reset(problem, seed)}]
                   for env, problem, seed in zip(envs, problem_ids, seeds)]
    tokens = [chat.start(transcript[0]["content"]) for transcript in transcripts]
    longest = max(map(len, tokens))
    if longest + max_new_tokens > context_length:
        raise ValueError(f"the first message has {longest} tokens; with {max_new_tokens} to sample it does not fit the model's "
                         f"context of {context_length}")
    masks = [[False] * len(row) for row in tokens]
    logprobs = [[0.0] * len(row) for row in tokens]
    turn_ends, turn_rewards, scores = ([[] for _ in envs] for _ in range(3))
    infos = [{"success": False, "truncated": False, "turns": 0, "parse_failures": 0, "length_stops": 0,
              "context_full": False, "env_error": ""} for _ in envs]
    playing = list(range(len(envs)))
    for turn in range(max_turns):
        completions = engine.generate([tokens[i] for i in playing], playing, [seeds[i] for i in playing],
                                      max_new_tokens, temperature)
        still_playing = []
        for i, completion in zip(playing, completions):
            tokens[i] = tokens[i] + completion.tokens
            masks[i] += [True] * len(completion.tokens)
            logprobs[i] += completion.logprobs
            answer = chat.text(completion.tokens)
            try:
                message, score, done, valid = envs[i].step(answer)
            except Exception:  # one broken environment costs one episode; train.py counts it and limits their share
                infos[i]["env_error"] = traceback.format_exc(limit=-3)
                message, score, done, valid = "(the environment failed)", 0.0, True, True
            transcripts[i] += [{"role": "assistant", "content": answer}, {"role": "user", "content": message}]
            turn_ends[i].append(len(tokens[i]))
            turn_rewards[i].append(score - format_penalty * (not valid))
            scores[i].append(score)
            infos[i]["turns"] += 1
            infos[i]["parse_failures"] += not valid
            infos[i]["length_stops"] += completion.finish_reason == "length"
            infos[i]["success"] = envs[i].success and not infos[i]["env_error"]
            if done:
                continue
            follow = chat.follow(message, completion.tokens[-1])
            fits = len(tokens[i]) + len(follow) + max_new_tokens <= context_length
            if turn + 1 == max_turns or not fits:
                infos[i]["truncated"] = True
                infos[i]["context_full"] = turn + 1 < max_turns
                continue
            tokens[i] = tokens[i] + follow
            masks[i] += [False] * len(follow)
            logprobs[i] += [0.0] * len(follow)
            still_playing.append(i)
        playing = still_playing
        if not playing:
            break
    episodes = [
        Episode(tokens=np.array(tokens[i], np.int32), action_mask=np.array(masks[i], bool),
                behavior_logprobs=np.array(logprobs[i], np.float32), advantages=np.zeros(len(tokens[i]), np.float32),
                turn_ends=np.array(turn_ends[i], np.int32), turn_rewards=np.array(turn_rewards[i], np.float32),
                reward=float(sum(turn_rewards[i])), score=float(sum(scores[i])), problem_id=int(problem_ids[i]),
                group_id=int(group_ids[i]), policy_step=policy_step, last_policy_step=policy_step,
                iteration=iteration, info=infos[i])
        for i in range(len(envs))]
    return episodes, transcripts
