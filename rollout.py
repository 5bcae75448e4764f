"""Sampling: an engine that continues token sequences, and `collect`, which plays many multi-turn episodes side by side.

An engine has four methods: `generate`, `release` (its memory, while the policy is trained), `sync` (take the policy's new
weights) and `close`. HFEngine is here, vLLM's two in vllm_engine.py; `make_engine` chooses. What it sampled is what is
trained on: tokens go in and come out, nothing is tokenised twice, and the behaviour log-probs come from the very
forward pass that sampled.
"""
import importlib.util
import json
import math
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from transformers import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import ranks
from buffer import Episode
from durable import fail
from envs import make_env_factory, shows_images
from models import banned_tokens, pixel_inputs
from prefix_tree import attention_kinds
from watch import NotFinite, bad_weights

PREFILL_TOKENS = 8192  # padded tokens of one forward pass over new messages
PREFILL_IMAGES = 128  # images that the vision part looks at in one pass
ENV_THREADS = 16  # for tasks that wait for something outside (a checker, a server)


@dataclass
class Completion:
    """What the policy added to one sequence: token ids, their log-probs under the sampled distribution, why it ended."""
    tokens: list[int]
    logprobs: list[float]
    finish_reason: str  # "stop": it ends in a stop token that was sampled, or in a stop string; "length": the limit was hit


# ------------------------------------------------------------------------------------------------------ transformers


class SlotCache(Cache):
    """Keys and values of many conversations; slot r holds its own tokens at 0 ... length-1, without gaps.

    A forward pass covers the slots `rows`, whose next tokens go to `position_NW`; keys up to `end` are read.
    """

    def __init__(self):
        super().__init__(layers=[])
        self.stores = []  # a layer: keys and values, (slots, heads, capacity, head dim) each
        self.rows, self.position_NW, self.end, self.slots = slice(0, 0), None, 0, 0

    def update(self, keys, values, layer, *_, **__):
        if layer == len(self.stores):
            self.stores.append([new.new_zeros(0, new.shape[1], 0, new.shape[3]) for new in (keys, values)])
        if self.stores[layer][0].shape[0] < self.slots or self.stores[layer][0].shape[2] < self.end:
            self.stores[layer] = [self.grown(store) for store in self.stores[layer]]
        for store, new in zip(self.stores[layer], (keys, values)):
            store[self.row_N1, :, self.position_NW] = new.transpose(1, 2)
        return tuple(store[self.rows, :, :self.end] for store in self.stores[layer])

    def grown(self, store):
        """More slots, or room for half as many tokens again."""
        slots, heads, capacity, dim = store.shape
        larger = store.new_zeros(max(slots, self.slots), heads,
                                 capacity if capacity >= self.end else self.end + max(32, self.end // 2), dim)
        larger[:slots, :, :capacity] = store
        return larger

    def place(self, rows: slice | torch.Tensor, position_NW: torch.Tensor, end: int):
        self.rows, self.position_NW, self.end = rows, position_NW, end
        self.row_N1 = rows[:, None] if isinstance(rows, torch.Tensor) else \
            torch.arange(rows.start, rows.stop, device=position_NW.device)[:, None]

    def copy(self, targets: list[int], sources: list[int]):
        """Slots `targets` become what slots `sources` hold now."""
        for layer in self.stores:
            for store in layer:
                store[targets] = store[sources]


def grouped_attention(module, query, key, value, attention_mask, scaling=None, **_):
    """Attention of grouped heads, (N, H, W, D) to (N, W, H, D), without repeating keys and values: the heads that share
    them stand as further queries."""
    N, H, W, D = query.shape
    groups = H // key.shape[1]
    mixed = torch.nn.functional.scaled_dot_product_attention(
        query.reshape(N, key.shape[1], groups * W, D), key, value, scale=scaling,
        attn_mask=attention_mask if W == 1 else attention_mask.repeat(1, 1, groups, 1))
    return mixed.reshape(N, H, W, -1).transpose(1, 2), None


ALL_ATTENTION_FUNCTIONS.register("grouped", grouped_attention)


class HFEngine:
    """Samples with the trainer's own transformers model. Conversations keep their keys and values between calls, so a turn
    costs its new tokens only; a prompt that a whole group shares is read once; and rows that are finished leave the batch."""

    def __init__(self, model, stop_ids: list[int], pad_id: int, decode=None, image_processor=None):
        """`decode` (token ids -> text) is needed for stop strings only, `image_processor` for images only."""
        self.model, self.stop_ids, self.pad_id, self.decode = model, set(stop_ids), pad_id, decode
        self.image_processor, self.banned = image_processor, banned_tokens(model.config)
        text = model.config.get_text_config()
        kinds = attention_kinds(text)
        rope = (getattr(text, "rope_parameters", None) or {}).get("rope_type", "default")
        if rope in ("dynamic", "longrope"):
            raise ValueError(f"--engine hf keeps keys between turns, which {rope} position embeddings change: use --engine vllm")
        if kinds != {"full_attention"} or text._attn_implementation != "sdpa":
            raise ValueError(f"--engine hf keeps keys and values of full attention through sdpa; this model has {sorted(kinds)} "
                             f"through {text._attn_implementation}: use --engine vllm")
        self.mrope = "mrope_section" in (getattr(text, "rope_parameters", None) or {})  # the Qwen family: see `positions`
        self.sync()

    def sync(self):
        """The model is shared with the trainer: only what was computed with the old weights has to go."""
        self.cache = SlotCache()
        self.slots = []  # the conversation in each slot
        self.cached = {}  # conversation: its tokens whose keys and values are there
        self.image_names, self.features = {}, {}  # content: names, below 0, of its tiles; name: hidden states (tokens, H)
        self.grids, self.shifts = {}, {}  # name: rows and columns; conversation: position less place of its next token

    def release(self):
        """Sampling is over for now: leave the memory to the training."""
        self.sync()

    def close(self):
        self.sync()

    @torch.inference_mode()
    def generate(self, sequences: list[list[int]], ids: list[int], seeds: list[int], max_new_tokens: int,
                 temperature: float, stop: tuple[str, ...] = (), images: list[list] | None = None) -> list[Completion]:
        """Continue each sequence by at most `max_new_tokens` tokens, up to and with a stop token or a string of `stop`.
        `images` of each sequence, (H, W, 3) uint8, stand in the order of their placeholders.

        `ids` name the conversations; what is cached of one and still begins its sequence is not computed again, and
        conversations that are missing from `ids` leave the cache. What a sequence gets depends on its seed and its
        length, not on its neighbours in the batch. Temperature 0 is greedy; log-probs are then those at 1.
        """
        if not ids:
            return []
        if len(set(ids)) < len(ids):
            raise ValueError(f"a conversation stands twice in ids {ids}")
        self.model.eval()
        uniform_BT = np.stack([np.random.default_rng([seed, len(sequence)]).random(max_new_tokens)
                               for seed, sequence in zip(seeds, sequences)])
        if images is not None:
            sequences = self.with_names(sequences, images)
        place = {id: place for place, id in enumerate(ids)}
        completions = [Completion([], [], "length") for _ in ids]
        state_SH = self.read(ids, sequences)
        active = len(ids)  # the first slots are those that go on
        for position in range(max_new_tokens):
            places = [place[id] for id in self.slots[:active]]
            tokens, logprobs = self.draw(state_SH, uniform_BT[places, position], temperature)
            for row, token, logprob in zip(places, tokens, logprobs):
                completions[row].tokens.append(token)
                completions[row].logprobs.append(logprob)
                if token in self.stop_ids or (stop and self.ends_with(completions[row].tokens, stop)):
                    completions[row].finish_reason = "stop"
            going = [slot for slot, row in enumerate(places) if completions[row].finish_reason != "stop"]
            if not going or position + 1 == max_new_tokens:
                break
            self.to_front(going)
            active = len(going)
            rows = [place[id] for id in self.slots[:active]]
            state_SH = self.forward(slice(0, active), [completions[row].tokens[-1:] for row in rows])
        return completions

    def draw(self, state_SH, uniform_S: np.ndarray, temperature: float) -> tuple[list[int], list[float]]:
        """A token and its log-prob for each final hidden state, by the row's own uniform number."""
        logits_SV = self.model.get_output_embeddings()(state_SH).float()
        if self.banned:
            logits_SV[:, self.banned] = -1e9  # as the trainer has it
        logprobs_SV = torch.log_softmax(logits_SV / (temperature or 1.0), dim=-1)
        if temperature == 0:
            token_S1 = logprobs_SV.argmax(-1, keepdim=True)
        else:  # inverse CDF: a row's draw needs nothing but its own number
            cdf_SV = logprobs_SV.exp().cumsum(dim=-1, dtype=torch.float64)
            uniform_S1 = torch.from_numpy(uniform_S)[:, None].to(cdf_SV.device)
            token_S1 = torch.searchsorted(cdf_SV, uniform_S1 * cdf_SV[:, -1:], right=True)
            token_S1 = token_S1.clamp(max=logprobs_SV.shape[1] - 1)
        logprob_S = logprobs_SV.gather(1, token_S1).squeeze(1)
        if not logprob_S.isfinite().all():
            place = bad_weights(self.model) or ("logits of finite hidden states" if state_SH.isfinite().all() else
                                                "hidden states of finite weights")
            raise NotFinite(f"the policy's log-probs are not finite in sampling; it starts in: {place}. A smaller --lr or "
                            "--max-grad-norm often helps")
        return token_S1.squeeze(1).tolist(), logprob_S.tolist()

    def ends_with(self, tokens: list[int], stop: tuple[str, ...]) -> bool:
        tail = self.decode(tokens[-max(len(string.encode()) for string in stop) - 16:])  # a token is a byte or more; 16: specials
        return any(string in tail for string in stop)

    def with_names(self, sequences, images) -> list[list[int]]:
        """The sequences with each image's placeholders replaced by its name (its tiles' names), so that what is the same to the
        model is the same here. What an image looks like to the language model is computed once for each content."""
        keys = [[(image.shape, image.tobytes()) for image in row] for row in images]
        new = {key: image for row, more in zip(keys, images) for key, image in zip(row, more) if key not in self.image_names}
        tiled = getattr(self.image_processor, "do_image_splitting", False)  # an image may come as several then
        together = 1 if tiled else PREFILL_IMAGES
        for first in range(0, len(new), together):
            part = list(new.items())[first:first + together]
            pixels = pixel_inputs(self.image_processor, [[image for _, image in part]], self.model.device)
            seen = self.model.get_image_features(**pixels)
            if getattr(seen, "deepstack_features", None) is not None:
                raise ValueError(f"--engine hf cannot give images to {self.model.config.model_type}, which feeds them to several "
                                 "layers")
            for place, state_TH in enumerate(seen.pooler_output):
                name = -1 - len(self.features)
                self.features[name] = state_TH
                self.image_names.setdefault(part[min(place, len(part) - 1)][0], []).append(name)
                if self.mrope:
                    self.grids[name] = (pixels["image_grid_thw"][place, 1:] //
                                        self.model.config.vision_config.spatial_merge_size).tolist()
        placeholder, named = self.model.config.image_token_id, []
        for sequence, row in zip(sequences, keys):
            names = [name for key in row for part in self.image_names[key] for name in [part] * len(self.features[part])]
            if sequence.count(placeholder) != len(names):
                raise ValueError(f"{len(row)} images of {len(names)} tokens for {sequence.count(placeholder)} placeholders")
            name_of = iter(names)
            named.append([next(name_of) if token == placeholder else token for token in sequence])
        return named

    def read(self, ids, sequences) -> torch.Tensor:
        """Give each conversation a slot, feed what is not cached; returns the last hidden states (S, H) in slot order."""
        for id, sequence in zip(ids, sequences):
            known = self.cached.get(id, [])
            if known != sequence[:len(known)]:  # rewritten: what still begins it stays
                known = known[:next((place for place, (a, b) in enumerate(zip(known, sequence)) if a != b), len(sequence))]
            self.cached[id] = known[:len(sequence) - 1]  # the last token is fed again: its state is needed
            self.shifts[id] = sum(max(self.grids[name]) - len(self.features[name]) for name, _ in groupby(self.cached[id])
                                  if name < 0 and self.mrope)
        sequence_of = dict(zip(ids, sequences))
        stays = [slot for slot, id in enumerate(self.slots) if id in sequence_of]
        self.to_front(stays)
        self.slots = self.slots[:len(stays)]
        known = set(self.slots)
        self.slots += [id for id in ids if id not in known]
        self.cached = {id: self.cached[id] for id in ids}
        self.cache.slots = max(self.cache.slots, len(self.slots))
        chunks = [sequence_of[id][len(self.cached[id]):] for id in self.slots]
        first, twins = {}, []  # new conversations with one and the same prompt: read once, then copied
        for slot, (id, chunk) in enumerate(zip(self.slots, chunks)):
            if not self.cached[id] and tuple(chunk) in first:
                twins.append((slot, first[tuple(chunk)]))
            elif not self.cached[id]:
                first[tuple(chunk)] = slot
        state_SH = [None] * len(chunks)
        waiting = sorted(set(range(len(chunks))) - {slot for slot, _ in twins}, key=lambda slot: -len(chunks[slot]))
        while waiting:  # slots of similar length together
            longest = len(chunks[waiting[0]])
            rows = [slot for slot in waiting[:max(1, PREFILL_TOKENS // longest)] if 2 * len(chunks[slot]) > longest]
            waiting = waiting[len(rows):]
            for slot, state_H in zip(rows, self.forward(torch.tensor(rows), [chunks[slot] for slot in rows])):
                state_SH[slot] = state_H
        if twins:
            self.cache.copy([slot for slot, _ in twins], [source for _, source in twins])
            for slot, source in twins:
                state_SH[slot] = state_SH[source]
                self.cached[self.slots[slot]] = list(self.cached[self.slots[source]])
                self.shifts[self.slots[slot]] = self.shifts[self.slots[source]]
        return torch.stack(state_SH)

    def to_front(self, going: list[int]):
        """Swap slots so that those of `going` (rising) are the first ones."""
        holes = sorted(set(range(len(going))) - set(going))
        movers = [slot for slot in going if slot >= len(going)]
        if holes:
            self.cache.copy(holes + movers, movers + holes)
            for hole, mover in zip(holes, movers):
                self.slots[hole], self.slots[mover] = self.slots[mover], self.slots[hole]

    def positions(self, ids, starts: list[int], chunks: list[list[int]], width: int) -> torch.Tensor:
        """(3, N, W) multimodal rotary positions (Qwen2-VL, arXiv 2409.12191, 2.1): an image's tokens share one position in time
        and count rows and columns from there; the text after it goes on behind the larger of the two."""
        positions_3NW = torch.zeros(3, len(ids), width, dtype=torch.long)
        for row, (id, start, chunk) in enumerate(zip(ids, starts, chunks)):
            place = 0
            for name, run in groupby(chunk, key=lambda token: min(token, 0)):
                count, now = len(list(run)), start + place + self.shifts[id]
                if name < 0:
                    height, columns = self.grids[name]
                    grid = torch.meshgrid(torch.arange(1), torch.arange(height), torch.arange(columns), indexing="ij")
                    positions_3NW[:, row, place:place + count] = now + torch.stack(grid).reshape(3, -1)
                    self.shifts[id] += max(height, columns) - count
                else:
                    positions_3NW[:, row, place:place + count] = now + torch.arange(count)
                place += count
        return positions_3NW

    def forward(self, rows: slice | torch.Tensor, chunks: list[list[int]]) -> torch.Tensor:
        """Feed the slots `rows` their next tokens; returns the hidden state (N, H) after each one's last."""
        ids = self.slots[rows] if isinstance(rows, slice) else [self.slots[slot] for slot in rows.tolist()]
        device, width = self.model.device, max(map(len, chunks))
        starts = [len(self.cached[id]) for id in ids]
        tokens_NW = torch.tensor([chunk + [self.pad_id] * (width - len(chunk)) for chunk in chunks], device=device)
        position_NW = (torch.tensor(starts)[:, None] + torch.arange(width)).to(device)
        end = max(starts) + width
        mask_N1WE = torch.arange(end, device=device) <= position_NW[:, None, :, None]  # causal; padding is to the right of all
        self.cache.place(rows if isinstance(rows, slice) else rows.to(device), position_NW, end)
        decoder, at = self.model.get_decoder(), position_NW
        if self.mrope:
            at = self.positions(ids, starts, chunks, width).to(device)
        inputs = {"input_ids": tokens_NW}
        shown = [self.features[name] for chunk in chunks for name, _ in groupby(chunk) if name < 0]
        if shown:  # no chunk ends inside an image, and something stands between two
            embedded_NWH = self.model.get_input_embeddings()(tokens_NW.clamp(min=0))
            embedded_NWH[tokens_NW < 0] = torch.cat(shown).to(embedded_NWH.dtype)
            inputs = {"inputs_embeds": embedded_NWH}
        config = decoder.config
        config._attn_implementation = "grouped"  # for this pass only: the trainer's have no cache and no mask
        try:
            hidden_NWH = decoder(**inputs, attention_mask=mask_N1WE, position_ids=at, past_key_values=self.cache,
                                 use_cache=True).last_hidden_state
        finally:
            config._attn_implementation = "sdpa"
        for id, chunk in zip(ids, chunks):
            self.cached[id] += chunk
        return hidden_NWH[torch.arange(len(chunks)), [len(chunk) - 1 for chunk in chunks]]


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
    if chat.image_processor is None and shows_images(make_env_factory(args.env, args.env_options)()):
        fail(f"{folder} takes no images, which --env {args.env} shows: use --model tiny-vlm or another that does")
    kind, why = engine_kind(args)
    if not args.quiet:
        print(f"engine: {kind} ({why})")
    stop_ids = chat.stop_ids(policy.generation_config)
    if kind == "hf":
        return HFEngine(policy, stop_ids, chat.tokenizer.pad_token_id, chat.text, chat.image_processor)
    from vllm_engine import VLLMEngine, VLLMServer  # vLLM takes half a minute to import
    if kind == "vllm":
        return VLLMEngine(policy, folder, stop_ids, dtype=args.dtype, lora=args.lora_sync, gpu_memory=args.engine_memory,
                          trust_remote_code=args.trust_remote_code, max_model_len=context_length_of(args, policy), chat=chat)
    return VLLMServer(kind, policy, stop_ids, lora=args.lora_sync, shared_folder=args.shared_folder)


def context_length_of(args, policy) -> int:
    return min(args.context_length or math.inf, policy.config.get_text_config().max_position_embeddings)
