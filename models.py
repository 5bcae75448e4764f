"""Policies: loading one, the tiny model and its warm start, padding a batch, log-probs of its tokens."""
import copy
import fcntl
import functools
import hashlib
import inspect
import json
import logging
import os
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import transformers
from peft import PeftConfig, PeftModel
from rich.progress import Progress
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers
from transformers import (AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer,
                          Idefics3Config, Idefics3ForConditionalGeneration, Idefics3Processor, LlamaConfig, LlamaForCausalLM,
                          PreTrainedTokenizerFast)
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging as transformers_logging

import prefix_tree
from envs import MissingData
from losses import token_logprobs_from_hidden
from smollm2 import smollm2_folder


transformers_logging.disable_progress_bar()  # ours is the only one on the screen
logging.getLogger("transformers.configuration_utils").addFilter(  # Idefics3's own default contradicts itself; ours does not
    lambda record: "got 128002" not in record.getMessage())


# ------------------------------------------------------------------------------------------------- tokens and log-probs


class Chat:
    """Turns messages into tokens by the tokenizer's own chat template, appending only: sampled tokens stay as they are.
    With a model's processor instead of a tokenizer, a message may show an image, (H, W, 3) uint8, ahead of its text."""

    MARKER = "assistant-text"

    def __init__(self, processor):
        self.processor, self.tokenizer = processor, getattr(processor, "tokenizer", processor)
        self.image_processor = getattr(processor, "image_processor", None)
        tokenizer = self.tokenizer
        self.specials = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}

    def tokenize(self, text: str, image=None) -> list[int]:
        if image is None:
            return self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return list(self.with_placeholders(text, image.shape))

    @functools.lru_cache(4096)
    def with_placeholders(self, text: str, shape: tuple[int, ...]) -> list[int]:
        """The processor makes a sequence of placeholder tokens from the image's one in the text, by the image's size alone."""
        return self.processor(text=text, images=[np.zeros(shape, np.uint8)], add_special_tokens=False)["input_ids"][0]

    def text(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)

    def render(self, *contents: str, start: bool = True, image: bool = False) -> str:
        """The template's text of a conversation, user first; `start`: with the head of the next answer; `image`: the last
        message shows one."""
        messages = [{"role": ("user", "assistant")[place % 2], "content": content} for place, content in enumerate(contents)]
        if self.image_processor is not None:
            for message in messages:
                shown = [{"type": "image"}] * (image and message is messages[-1])
                message["content"] = shown + [{"type": "text", "text": message["content"]}]
        return self.processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=start)

    def plain(self, text: str) -> str:
        """A message in which nothing reads as a special token: those are broken by a space."""
        for special in sorted(self.specials, key=lambda special: (-len(special), special)):
            text = text.replace(special, f"{special[:1]} {special[1:]}")
        return text

    def start(self, message: str, image=None) -> list[int]:
        return self.tokenize(self.render(self.plain(message), image=image is not None), image)

    def after_answer(self) -> list[int]:
        """What the template writes after an assistant's text that is the last one."""
        return self.tokenize(self.render("x", self.MARKER, start=False).split(self.MARKER, 1)[1])

    def follow(self, message: str, last_token: int, image=None) -> list[int]:
        """Tokens between an answer that ended in `last_token` and the next one: what the template writes after an
        assistant's text, then the new message. A stop token that was sampled is not written twice."""
        text = self.render("x", self.MARKER, self.plain(message), image=image is not None)
        tokens, after = self.tokenize(text.split(self.MARKER, 1)[1], image), self.after_answer()
        ended = last_token in after and self.tokenizer.convert_ids_to_tokens(last_token) in self.specials
        return tokens[after.index(last_token) + 1:] if ended else tokens

    def stop_ids(self, generation_config=None) -> list[int]:
        """Tokens that end an answer: the tokenizer's and the model's end of text, and the first special one that the template
        writes after an answer."""
        ends = [self.tokenizer.eos_token_id, getattr(generation_config, "eos_token_id", None)]
        ids = {id for end in ends if end is not None for id in (end if isinstance(end, list) else [end])}
        special = [id for id in self.after_answer() if self.tokenizer.convert_ids_to_tokens(id) in self.specials]
        return sorted(ids | set(special[:1]))

    def rewritten_history(self) -> str | None:
        """Why the template does not leave a played conversation as it was sampled, or None if it does."""
        talk = ["x", "<think>\na thought\n</think>\n\nfirst", "y", "second", "z", "<think>\na thought\n</think>\n\nthird", "w"]
        before = self.render("x")
        for played in (3, 5, 7):
            now = self.render(*talk[:played])
            if not now.startswith(before):
                return f"it begins an answer with {before[-40:]!r} and later shows that answer otherwise"
            if not now.startswith(before + talk[played - 2]):
                thinking = "</think>" in talk[played - 2] and "</think>" not in now[len(before):]
                return "it drops the thinking of earlier answers" if thinking else "it shows earlier answers otherwise than given"
            before = now
        return None


def collate(rows: list[dict], pad_id: int) -> dict[str, torch.Tensor]:
    """Pad rows of equal keys on the right: {"tokens": (T,), ...} each -> {"tokens": (B, T), ...}.

    >>> collate([{"tokens": [5, 6], "mask": [False, True]}, {"tokens": [7], "mask": [True]}], pad_id=0)["tokens"]
    tensor([[5, 6],
            [7, 0]])
    """
    return {key: torch.nn.utils.rnn.pad_sequence([torch.as_tensor(row[key]) for row in rows], batch_first=True,
                                                 padding_value=pad_id if key == "tokens" else 0)
            for key in rows[0] if key != "images"}


def pixel_inputs(image_processor, images: list[list | None], device="cpu") -> dict[str, torch.Tensor]:
    """Model inputs of the images of a batch's rows, in the order of their placeholders; {} without images. Made anew from the
    stored (H, W, 3) uint8 pixels each time: what is trained on is what was seen."""
    flat = [image for row in images for image in row or ()]
    if not flat:
        return {}
    inputs = image_processor(images=flat, return_tensors="pt")
    return {name: tensor.to(device) for name, tensor in inputs.items() if name not in ("rows", "cols")}


def banned_tokens(config) -> list[int]:
    """Tokens that only stand for an image: a sampled one would have no pixels. Neither engine nor trainer gives them
    probability. [] for a model of text."""
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    return [getattr(config, name) for name in names if getattr(config, name, None) is not None]


def output_bias(model) -> torch.Tensor | None:
    """(V,) bias of the logits: the head's own, and -1e9 for banned tokens; None where there is neither."""
    head, banned = model.get_output_embeddings(), banned_tokens(model.config)
    if not banned:
        return head.bias
    bias_V = torch.zeros(head.weight.shape[0], device=head.weight.device) if head.bias is None else head.bias.clone()
    bias_V[banned] = -1e9
    return bias_V


def backbone(model):
    """The policy without its head; a vision-language model's with its eyes."""
    if not banned_tokens(model.config):
        return model.get_decoder()
    return (model.get_base_model() if hasattr(model, "get_base_model") else model).model


def hidden_states(body, tokens_BT, pixels: dict | None = None) -> torch.Tensor:
    """(B, T, H) final hidden states of a `backbone`."""
    if pixels and "image_grid_thw" in pixels:  # the Qwen family's positions need to know which tokens are an image
        pixels = pixels | {"mm_token_type_ids": (tokens_BT == body.config.image_token_id).int()}
    return body(input_ids=tokens_BT, use_cache=False, **(pixels or {})).last_hidden_state


def states_before(body, tokens_BT, mask_BT, pixels: dict | None = None, share: bool = True) -> torch.Tensor:
    """(N, H): the final hidden state before each token of the mask, which predicts it."""
    if share and not pixels and prefix_tree.knows_trees(body) and mask_BT.any():
        return prefix_tree.states_before(body, tokens_BT, mask_BT)
    return hidden_states(body, tokens_BT, pixels)[:, :-1][mask_BT[:, 1:]]


def token_logprobs(model, tokens_BT, mask_BT, temperature: float = 1.0, entropy_grad: bool = False,
                   pixels: dict | None = None, share: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of each masked token given those before it, and the entropy there (with a gradient only if asked for);
    (B, T) float32, 0 where the mask is False. Rows are padded on the right, so a causal model needs no attention mask:
    nothing real looks at the padding. `pixels` are the images' inputs, see `pixel_inputs`. `share`: what several
    rows begin with is read once, where the model allows it.
    """
    states_NH = states_before(backbone(model), tokens_BT, mask_BT, pixels, share)
    logprobs_N, entropy_N = token_logprobs_from_hidden(states_NH, model.get_output_embeddings().weight,
                                                       tokens_BT[:, 1:][mask_BT[:, 1:]], temperature, output_bias(model),
                                                       entropy_grad=entropy_grad)
    zeros_BT = torch.zeros(tokens_BT.shape, device=tokens_BT.device)
    return zeros_BT.masked_scatter(mask_BT, logprobs_N), zeros_BT.masked_scatter(mask_BT, entropy_N)


def recompute_layers(module):
    """Gradient checkpointing: inside functions with `recomputing`, layers keep no activations but compute them again in the
    backward pass. ValueError for layers that would behave otherwise there."""
    for layer in layers_of(module):
        if "self.training" in inspect.getsource(type(layer).forward):
            raise ValueError(f"--gradient-checkpointing: {type(layer).__name__} has dropout of its own")
    module.gradient_checkpointing_enable({"use_reentrant": False})


def layers_of(module) -> list:
    return [part for part in module.modules() if isinstance(part, GradientCheckpointingLayer)]


def recomputing(function):
    """Lets the policy and critic of the learner, its first argument, recompute their activations where --gradient-checkpointing
    is on. transformers does so in training mode only, which would turn dropout on as well: here the layers alone are told that
    they are trained, not their parts."""
    @functools.wraps(function)
    def wrapped(learner, *arguments, **named):
        layers = layers_of(learner.policy) + (layers_of(learner.critic) if learner.critic is not None else [])
        for layer in layers:
            layer.training = layer.gradient_checkpointing
        try:
            return function(learner, *arguments, **named)
        finally:
            for layer in layers:
                layer.training = False
    return wrapped


class Critic(torch.nn.Module):
    """A value head on its own copy of the policy's backbone: V of the state before each masked token, (B, T) float32."""

    def __init__(self, policy):
        super().__init__()
        self.backbone = copy.deepcopy(backbone(policy))  # under LoRA: the frozen weights with adapters of its own
        self.head = torch.nn.Linear(policy.config.get_text_config().hidden_size, 1, dtype=torch.float32)
        torch.nn.init.zeros_(self.head.weight)  # values start at 0, not at noise
        torch.nn.init.zeros_(self.head.bias)

    def forward(self, tokens_BT, mask_BT, pixels=None):
        values_N = self.head(states_before(self.backbone, tokens_BT, mask_BT, pixels).float()).squeeze(-1)
        return torch.zeros(tokens_BT.shape, device=tokens_BT.device).masked_scatter(mask_BT, values_N)


def micro_batches(lengths: list[int], max_tokens: int, max_rows: int | None = None, prompts=None) -> list[list[int]]:
    """Indices of rows, sorted by length and cut into padded batches of at most `max_tokens` (or a single row), so that
    padded tokens are fewest; a batch counts as max_tokens / 16 more, for what it costs beside its tokens.

    With `prompts`, the tokens that each row begins with, rows of one prompt stay side by side: it counts once a batch, and
    padding, which only attention sees then, a quarter.

    >>> micro_batches([5, 2, 9, 2], max_tokens=10)
    [[2], [0], [1, 3]]
    """
    padding, prompts, longest = 1 / 4 if prompts else 1, prompts or [()] * len(lengths), {}
    for prompt, length in zip(prompts, lengths):
        longest[prompt] = max(length, longest.get(prompt, 0))
    order = sorted(range(len(lengths)), key=lambda row: (-longest[prompts[row]], prompts[row], -lengths[row]))
    again = [len(prompts[row]) * (prompts[row] == prompts[before]) for before, row in zip(order, order[1:])] + [0]
    costs, starts = [0.0], []  # of the first n rows: the least cost, and where its last batch starts
    for end in range(1, len(order) + 1):
        options, width, tokens = [], 0, again[end - 1]
        for start in range(end - 1, -1, -1):
            rows, width = end - start, max(width, lengths[order[start]])
            if rows > 1 and (rows * width > max_tokens or rows > (max_rows or rows)):
                break
            tokens += lengths[order[start]] - again[start]
            options.append((costs[start] + padding * rows * width + (1 - padding) * tokens + max_tokens / 16, start))
        cost, start = min(options)
        costs.append(cost)
        starts.append(start)
    batches, end = [], len(order)
    while end:
        batches.append(order[starts[end - 1]:end])
        end = starts[end - 1]
    return batches[::-1]


# ---------------------------------------------------------------------------------------------- the tiny policy

TINY_WORDS = ("Walk from P to G never into O The ice is slippery No valid answer player goal row column move "
              "Left Down Right Up _ X √ . , : # * @ <answer> </answer>").split() + [str(digit) for digit in range(10)]
TINY_TEMPLATE = ("{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
                 "{% if add_generation_prompt %}<|assistant|>{% endif %}")


def tiny_tokenizer(words: str = "") -> PreTrainedTokenizerFast:
    """A word-level tokenizer: one token for a word, digit, sign or tag; white space only separates. `words` are a task's own."""
    specials = ["<|pad|>", "<|unknown|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    vocabulary = {word: index for index, word in enumerate(dict.fromkeys(specials + TINY_WORDS + words.split()))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unknown|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(r"\s+"), "removed"),
        pre_tokenizers.Split(Regex(r"</?[a-z]+>|[A-Za-z]+|."), "isolated")])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|pad|>", unk_token="<|unknown|>",
                                   eos_token="<|end|>", chat_template=TINY_TEMPLATE)


def tiny_config(tokenizer, width: int = 128, layers: int = 4) -> LlamaConfig:
    """About 0.9 M parameters; heads of 32 numbers each, since vLLM's CPU attention has no kernel for less."""
    return LlamaConfig(vocab_size=len(tokenizer), hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers,
                       num_attention_heads=width // 32, num_key_value_heads=width // 64, head_dim=32,
                       max_position_embeddings=1024, tie_word_embeddings=False, initializer_range=0.1,
                       pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, bos_token_id=None)


TINY_VLM_TEMPLATE = ("{% for message in messages %}<|{{ message.role }}|>{% for part in message.content %}"
                     "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}<|end|>{% endfor %}"
                     "{% if add_generation_prompt %}<|assistant|>{% endif %}")
TINY_PATCH = 16  # pixels: a cell of a board is one patch and one token


def tiny_processor(words: str, image_size: int, mean=(0.5,) * 3, std=(0.5,) * 3) -> Idefics3Processor:
    """The tiny tokenizer with an image processor for square pictures, which are scaled to `image_size` pixels and less `mean`, by
    `std` (of colours from 0 to 1)."""
    tokenizer, size = tiny_tokenizer(words), {"longest_edge": image_size}
    tokenizer.add_special_tokens({"additional_special_tokens": ["<fake_token_around_image>", "<image>", "<global-img>",
                                                                "<end_of_utterance>"]})
    image_processor = Idefics3ImageProcessorPil(do_image_splitting=False, size=size, max_image_size=size, image_mean=list(mean),
                                                image_std=list(std))
    return Idefics3Processor(image_processor, tokenizer, image_seq_len=(image_size // TINY_PATCH)**2,
                             chat_template=TINY_VLM_TEMPLATE)


def tiny_vlm_config(processor, width: int = 128, layers: int = 4) -> Idefics3Config:
    """About 1.2 M parameters: the tiny policy, and a layer that looks at the patches of a picture."""
    tokenizer = processor.tokenizer
    vision = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4,
              "image_size": processor.image_processor.max_image_size["longest_edge"], "patch_size": TINY_PATCH,
              "initializer_range": 0.1}
    return Idefics3Config(text_config=tiny_config(tokenizer, width, layers).to_dict(), vision_config=vision, scale_factor=1,
                          image_token_id=processor.image_token_id, pad_token_id=tokenizer.pad_token_id,
                          eos_token_id=tokenizer.eos_token_id, tie_word_embeddings=False, initializer_range=0.1)


def new_tiny(env, images: bool, width: int, layers: int):
    """(model, processor or tokenizer) of a tiny policy for the task, with the weights of torch's generator."""
    words = getattr(env, "tiny_words", "")
    if not images:
        tokenizer = tiny_tokenizer(words)
        return LlamaForCausalLM(tiny_config(tokenizer, width, layers)).eval(), tokenizer
    pictures = []
    for problem_id in env.problems("train", 32):
        env.reset(problem_id, seed=0)
        pictures.append(env.image() / 255)
    mean, std = (getattr(np.stack(pictures), name)((0, 1, 2)).round(4).tolist() for name in ("mean", "std"))
    processor = tiny_processor(words, max(pictures[0].shape), mean, std)  # what all pictures share teaches nothing
    return Idefics3ForConditionalGeneration(tiny_vlm_config(processor, width, layers)).eval(), processor


def demonstrations(env, chat: Chat, problem_ids, skill: float, max_turns: int, seed: int) -> tuple[list[dict], list]:
    """Scripted episodes as rows {"tokens", "mask": True on the player's, "images"}, and each turn's (position, answer)."""
    rng, rows, moves, known = np.random.default_rng(seed), [], [], {}

    def look():
        if chat.image_processor is not None:
            image = env.image()
            return known.setdefault(image.tobytes(), image)  # thousands of episodes show few different pictures

    for problem_id in problem_ids:
        message, images = env.reset(problem_id, seed=int(rng.integers(2**31))), [look()]
        tokens = chat.start(message, images[-1])
        mask = [False] * len(tokens)
        for turn in range(max_turns):
            answer = env.scripted_answer(rng, skill)
            moves.append((getattr(env, "position", None), answer))
            answer_tokens = chat.tokenize(answer) + [chat.tokenizer.eos_token_id]
            tokens, mask = tokens + answer_tokens, mask + [True] * len(answer_tokens)
            message, _, done, _ = env.step(answer)
            if done or turn + 1 == max_turns:
                break
            images.append(look())
            follow = chat.follow(message, answer_tokens[-1], images[-1])
            tokens, mask = tokens + follow, mask + [False] * len(follow)
        rows.append({"tokens": tokens, "mask": mask} | ({"images": images} if chat.image_processor else {}))
    return rows, moves


def blind_loss(moves: list) -> float:
    """Nats a move of the best player that is told where it stands but does not see the board."""
    counts = {}
    for position, answer in moves:
        counts.setdefault(position, {}).setdefault(answer, 0)
        counts[position][answer] += 1
    return -sum(count * np.log(count / sum(answers.values()))
                for answers in counts.values() for count in answers.values()) / len(moves)


def imitate(model, image_processor, rows: list[dict], updates: int, learning_rate: float, batch_tokens: int, seed: int,
            progress):
    """Cross-entropy on the demonstrator's tokens, AdamW, cosine to 0, batches of about `batch_tokens`."""
    rng = np.random.default_rng(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / 20) * (1 + np.cos(np.pi * step / updates)) / 2)
    size = max(1, round(batch_tokens / np.mean([len(row["tokens"]) for row in rows])))
    task = progress.add_task("warm start: imitating a weak player", total=updates)
    for _ in range(updates):
        batch = [rows[index] for index in rng.integers(len(rows), size=size)]
        targets = sum(sum(row["mask"]) for row in batch)
        for chosen in micro_batches([len(row["tokens"]) for row in batch], max_tokens=4096):
            logprobs_BT = row_logprobs(model, image_processor, [batch[index] for index in chosen])
            (-logprobs_BT.sum() / targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        progress.advance(task)


def row_logprobs(model, image_processor, rows: list[dict]) -> torch.Tensor:
    """(B, T) log-probs of the demonstrator's tokens."""
    padded = collate(rows, pad_id=0)
    pixels = pixel_inputs(image_processor, [row.get("images") for row in rows])
    # not shared, so that a warm start keeps every bit that measured runs began with
    return token_logprobs(model, padded["tokens"], padded["mask"], pixels=pixels, share=False)[0]


@torch.no_grad()
def imitation_loss(model, image_processor, rows: list[dict], turns: int) -> float:
    """Nats a turn of the demonstrator's answers under the model."""
    total = 0.0
    for chosen in micro_batches([len(row["tokens"]) for row in rows], max_tokens=8192):
        total -= row_logprobs(model, image_processor, [rows[index] for index in chosen]).sum().item()
    return total / turns


def warm_started_tiny(env, cache_dir: Path, *, seed: int, updates: int, skill: float, max_turns: int, images: bool = False,
                      width: int = 128, layers: int = 4) -> Path:
    """Folder of the tiny policy after imitation of a scripted player that errs, made once and kept in the cache.

    The key covers all that shapes it (settings, tokenizer, this code, the task's code), not the run's seed: every arm
    and seed of an experiment starts from the same weights. Parallel runs wait for the one that is making it.
    """
    learning_rate, batch_tokens, count = 4e-3, 8192, 40 * updates
    tokenizer = tiny_tokenizer(getattr(env, "tiny_words", ""))
    recipe = {"seed": seed, "updates": updates, "skill": skill, "max_turns": max_turns, "lr": learning_rate, "images": images,
              "batch_tokens": batch_tokens, "demonstrations": count, "env": vars(env),
              "tokenizer": tokenizer.backend_tokenizer.to_str(), "template": TINY_TEMPLATE,
              "config": tiny_config(tokenizer, width, layers).to_dict(),
              "versions": [torch.__version__, transformers.__version__],
              "code": [inspect.getsource(thing) for thing in
                       (demonstrations, imitate, make_warm_start, Chat, token_logprobs, new_tiny, tiny_vlm_config,
                        tiny_processor, pixel_inputs, hidden_states, row_logprobs, *type(env).__mro__[:-1])]}
    key = hashlib.sha256(json.dumps(recipe, sort_keys=True, default=str).encode()).hexdigest()[:16]
    folder = Path(cache_dir).expanduser() / f"tiny{'_vlm' * images}_{type(env).name}_{key}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "warm_start.json").is_file() or not (folder / "model.safetensors").is_file():
            shutil.rmtree(folder, ignore_errors=True)
            make_warm_start(folder, env, seed, updates, skill, max_turns, learning_rate, batch_tokens, count, images, width,
                            layers)
    return folder


def up_to(env, split: str, count: int) -> list[int]:
    """`count` problems, or all there are where the task has fewer."""
    try:
        return env.problems(split, count)
    except ValueError:
        if count < 2:
            raise
    enough, missing = 1, count  # the largest count that the task has, by bisection
    while missing - enough > 1:
        try:
            env.problems(split, (enough + missing) // 2)
            enough = (enough + missing) // 2
        except ValueError:
            missing = (enough + missing) // 2
    return env.problems(split, enough)


def make_warm_start(folder, env, seed, updates, skill, max_turns, learning_rate, batch_tokens, count, images, width, layers):
    started = time.time()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, processor = new_tiny(env, images, width, layers)
    chat = Chat(processor)
    with Progress(transient=True) as progress:
        problems = up_to(env, "train", 1536)
        rows, _ = demonstrations(env, chat, np.random.default_rng(seed).choice(problems, size=count), skill, max_turns, seed)
        imitate(model, chat.image_processor, rows, updates, learning_rate, batch_tokens, seed, progress)
    rows, moves = demonstrations(env, chat, up_to(env, "heldout", 256), skill, max_turns, seed + 1)
    report = {"imitation_loss_nats_per_move": imitation_loss(model, chat.image_processor, rows, len(moves)),
              "blind_player_nats_per_move": blind_loss(moves), "updates": updates, "skill": skill,
              "seconds": round(time.time() - started, 1)}
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        model.save_pretrained(temporary)
        processor.save_pretrained(temporary)
        (Path(temporary) / "warm_start.json").write_text(json.dumps(report, indent=1))
        os.rename(temporary, folder)
        os.mkdir(temporary)  # what the context manager expects to remove
    print(f"warm start: {updates} updates in {report['seconds']:.0f} s; held-out imitation loss "
          f"{report['imitation_loss_nats_per_move']:.3f} nats a move (a blind player: "
          f"{report['blind_player_nats_per_move']:.3f}); kept in {folder}")


# ---------------------------------------------------------------------------------------------- loading


def policy_folder(args, env) -> str | Path:
    """Where --model is: a folder or hub id as given; `tiny` and `tiny-vlm`, warm-started on the task, and `smollm2` are made
    once and kept."""
    if args.model in ("tiny", "tiny-vlm"):
        return warm_started_tiny(env, Path(args.cache_dir), seed=args.warm_start_seed, updates=args.warm_start_updates,
                                 skill=args.warm_start_skill, max_turns=args.max_turns, images=args.model == "tiny-vlm",
                                 width=args.tiny_width, layers=args.tiny_layers)
    return smollm2_folder(args.cache_dir) if args.model == "smollm2" else args.model


def base_of(path: str | Path) -> str | Path:
    """Where the weights under a LoRA adapter are, and the model's configuration; the path itself where there is no adapter."""
    if not (Path(path) / "adapter_config.json").is_file():
        return path
    base = Path(path) / "base"
    return base if base.is_dir() else PeftConfig.from_pretrained(path).base_model_name_or_path


def load_policy(path: str | Path, dtype: torch.dtype = torch.float32, trust_remote_code: bool = False):
    """(model, tokenizer) of a Hugging Face folder or hub id (a LoRA adapter comes merged into its base), in eval mode for good:
    dropout would make the first ratio of an update differ from 1. A model that takes images comes with its processor instead.
    MissingData, with a sentence, when there is nothing to load; ValueError where weights are pickled, or where the model brings
    code of its own and `trust_remote_code` is off."""
    adapter, trust = (Path(path) / "adapter_config.json").is_file(), {"trust_remote_code": trust_remote_code}
    weights = "adapter_model.safetensors" if adapter else "model*.safetensors"
    if (adapter or (Path(path) / "config.json").is_file()) and not any(Path(path).glob(weights)):
        raise ValueError(f"{path} has no weights in .safetensors, and pickled ones are not loaded: they could run code")
    try:
        base = base_of(path)
        if hasattr(AutoConfig.from_pretrained(base, **trust), "vision_config"):
            processor, kind = AutoProcessor.from_pretrained(path, **trust), AutoModelForImageTextToText
        else:
            processor, kind = AutoTokenizer.from_pretrained(path, **trust), AutoModelForCausalLM
        model = kind.from_pretrained(base, dtype=dtype, use_safetensors=True, **trust)
        if adapter:
            words = len(getattr(processor, "tokenizer", processor))
            if words > model.get_input_embeddings().num_embeddings:  # the adapter was trained with more tokens than its base has
                model.resize_token_embeddings(words)
            model = PeftModel.from_pretrained(model, path).merge_and_unload()
    except (OSError, ValueError) as error:
        if "trust_remote_code" in str(error):
            raise ValueError(f"{path} brings its own Python code, which runs only with --trust-remote-code True: read it first, "
                             "it can do whatever you may do") from error
        if (Path(path) / "adapter_config.json").is_file():
            base = PeftConfig.from_pretrained(path).base_model_name_or_path
            raise MissingData(f"the LoRA adapter {str(path)!r} needs its base model, {base!r}, which cannot be loaded "
                              f"({str(error).splitlines()[0]}): put it back, or change base_model_name_or_path in its "
                              "adapter_config.json") from error
        if (Path(path) / "config.json").is_file():
            raise
        raise MissingData(f"no model {str(path)!r}: it is neither a folder with a config.json nor a hub id that can be reached "
                          f"({str(error).splitlines()[0]})") from error
    tokenizer = getattr(processor, "tokenizer", processor)
    if tokenizer.pad_token_id is None:
        raise ValueError(f"the tokenizer of {path} has no pad token; set tokenizer.pad_token and save it again")
    if not processor.chat_template:
        raise ValueError(f"the tokenizer of {path} has no chat template; take an instruct model, or set tokenizer.chat_template")
    check_head(model, path)
    return model.eval(), processor


@torch.no_grad()
def check_head(model, path):
    """Log-probs are taken from the last hidden state and the output matrix alone. ValueError for a model that does more to its
    logits (scales or caps them): its ratios would look right while another policy was trained."""
    model.eval()
    tokens_1T = torch.arange(8)[None].to(model.device) % model.config.get_text_config().vocab_size
    ours_V = model.get_output_embeddings()(model.get_decoder()(input_ids=tokens_1T).last_hidden_state[0, -1]).float()
    theirs_V = model(input_ids=tokens_1T).logits[0, -1].float()
    if not torch.allclose(ours_V, theirs_V, rtol=1e-2, atol=1e-2):
        raise ValueError(f"{path}: this kind of model ({type(model).__name__}) scales or caps its logits, which the log-probs "
                         "here do not know; take another model, or teach models.token_logprobs and HFEngine.draw what it does")
