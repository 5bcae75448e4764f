"""Sampling with the trainer's own transformers model: `HFEngine`, and the cache that its conversations live in."""
from itertools import groupby

import numpy as np
import torch
from transformers import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from models import attention_kinds, banned_tokens, pixel_inputs
from rollout import Completion
from runtime.files import NotFinite
from runtime.watch import bad_weights

PREFILL_TOKENS = 8192  # padded tokens of one forward pass over new messages
PREFILL_IMAGES = 128  # images that the vision part looks at in one pass


class SlotCache(Cache):
    """Keys and values of many conversations; slot r holds its own tokens at 0 ... length-1, without gaps. A forward pass covers
    the slots `rows`, whose next tokens go to `position_NW`; keys up to `end` are read."""

    def __init__(self):
        super().__init__(layers=[])
        self.stores, self.slots = [], 0  # a layer: keys and values, (slots, heads, capacity, head dim) each

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
        slots, _, capacity, _ = store.shape
        more = 0 if capacity >= self.end else self.end + max(32, self.end // 2) - capacity
        return torch.nn.functional.pad(store, (0, 0, 0, more, 0, 0, 0, max(0, self.slots - slots)))

    def place(self, rows: list[int] | range, position_NW: torch.Tensor, end: int):
        row_N = torch.tensor(rows, device=position_NW.device)
        self.rows = slice(0, len(rows)) if isinstance(rows, range) else row_N  # the first slots are read without a copy
        self.row_N1, self.position_NW, self.end = row_N[:, None], position_NW, end

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
        kinds, rope = attention_kinds(text), getattr(text, "rope_parameters", None) or {}
        if rope.get("rope_type") in ("dynamic", "longrope"):
            raise ValueError(f"--engine hf keeps keys between turns, which {rope['rope_type']} position embeddings change: use "
                             "--engine vllm")
        if kinds != {"full_attention"} or text._attn_implementation != "sdpa":
            raise ValueError(f"--engine hf keeps keys and values of full attention through sdpa; this model has {sorted(kinds)} "
                             f"through {text._attn_implementation}: use --engine vllm")
        self.mrope = "mrope_section" in rope  # the Qwen family: see `positions`
        self.sync()

    def sync(self):
        """The model is shared with the trainer: only what was computed with the old weights has to go."""
        self.cache = SlotCache()
        self.slots = []  # the conversation in each slot
        self.cached = {}  # conversation: its tokens whose keys and values are there
        self.image_names, self.features = {}, {}  # content: names, below 0, of its tiles; name: hidden states (tokens, H)
        self.grids, self.shifts = {}, {}  # name: rows and columns; conversation: position less place of its next token

    release = close = sync  # leave the memory to the training

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
        places = [place[id] for id in self.slots]  # of the conversations that go on, which have the first slots
        for position in range(max_new_tokens):
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
            places = [place[id] for id in self.slots[:len(going)]]
            state_SH = self.forward(range(len(going)), [completions[row].tokens[-1:] for row in places])
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
        self.slots = list(dict.fromkeys([*self.slots[:len(stays)], *ids]))
        self.cached = {id: self.cached[id] for id in ids}
        self.cache.slots = max(self.cache.slots, len(self.slots))
        chunks = [sequence_of[id][len(self.cached[id]):] for id in self.slots]
        first, twins = {}, {}  # slot: the one with the same prompt, of new conversations; that is read once, then copied
        for slot, (id, chunk) in enumerate(zip(self.slots, chunks)):
            if not self.cached[id] and first.setdefault(tuple(chunk), slot) != slot:
                twins[slot] = first[tuple(chunk)]
        state_SH = [None] * len(chunks)
        waiting = sorted(set(range(len(chunks))) - set(twins), key=lambda slot: -len(chunks[slot]))
        while waiting:  # slots of similar length together
            longest = len(chunks[waiting[0]])
            rows = [slot for slot in waiting[:max(1, PREFILL_TOKENS // longest)] if 2 * len(chunks[slot]) > longest]
            waiting = waiting[len(rows):]
            for slot, state_H in zip(rows, self.forward(rows, [chunks[slot] for slot in rows])):
                state_SH[slot] = state_H
        if twins:
            self.cache.copy(list(twins), list(twins.values()))
            for slot, source in twins.items():
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
                    grid_N3 = torch.cartesian_prod(torch.arange(1), torch.arange(height), torch.arange(columns))
                    positions_3NW[:, row, place:place + count] = now + grid_N3.T
                    self.shifts[id] += max(height, columns) - count
                else:
                    positions_3NW[:, row, place:place + count] = now + torch.arange(count)
                place += count
        return positions_3NW

    def forward(self, rows: list[int] | range, chunks: list[list[int]]) -> torch.Tensor:
        """Feed the slots `rows` their next tokens; returns the hidden state (N, H) after each one's last."""
        ids, device, width = [self.slots[slot] for slot in rows], self.model.device, max(map(len, chunks))
        starts = [len(self.cached[id]) for id in ids]
        tokens_NW = torch.tensor([chunk + [self.pad_id] * (width - len(chunk)) for chunk in chunks], device=device)
        position_NW = (torch.tensor(starts)[:, None] + torch.arange(width)).to(device)
        end = max(starts) + width
        mask_N1WE = torch.arange(end, device=device) <= position_NW[:, None, :, None]  # causal; padding is to the right of all
        self.cache.place(rows, position_NW, end)
        decoder = self.model.get_decoder()
        at = self.positions(ids, starts, chunks, width).to(device) if self.mrope else position_NW
        embedded_NWH = self.model.get_input_embeddings()(tokens_NW.clamp(min=0))
        shown = [self.features[name] for chunk in chunks for name, _ in groupby(chunk) if name < 0]
        if shown:  # no chunk ends inside an image, and something stands between two
            embedded_NWH[tokens_NW < 0] = torch.cat(shown).to(embedded_NWH.dtype)
        config = decoder.config
        config._attn_implementation = "grouped"  # for this pass only: the trainer's have no cache and no mask
        try:
            hidden_NWH = decoder(inputs_embeds=embedded_NWH, attention_mask=mask_N1WE, position_ids=at, past_key_values=self.cache,
                                 use_cache=True).last_hidden_state
        finally:
            config._attn_implementation = "sdpa"
        for id, chunk in zip(ids, chunks):
            self.cached[id] += chunk
        return hidden_NWH[torch.arange(len(chunks)), [len(chunk) - 1 for chunk in chunks]]
