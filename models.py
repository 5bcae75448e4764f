"""Policies: loading one, the tiny model and its warm start, padding a batch, log-probs of its tokens."""
import copy
import fcntl
import hashlib
import inspect
import json
import os
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import transformers
from peft import AutoPeftModelForCausalLM
from rich.progress import Progress
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers
from transformers import (AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM,
                          PreTrainedTokenizerFast)

from transformers.utils import logging as transformers_logging

from envs import MissingData
from losses import token_logprobs_from_hidden
from smollm2 import smollm2_folder


transformers_logging.disable_progress_bar()  # ours is the only one on the screen


# ------------------------------------------------------------------------------------------------- tokens and log-probs


class Chat:
    """Turns messages into tokens by the tokenizer's own chat template, appending only: sampled tokens stay as they are."""

    MARKER = "assistant-text"

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.specials = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}

    def tokenize(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def text(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)

    def render(self, *contents: str, start: bool = True) -> str:
        """The template's text of a conversation, user first; `start`: with the head of the next answer."""
        messages = [{"role": ("user", "assistant")[place % 2], "content": content} for place, content in enumerate(contents)]
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=start)

    def plain(self, text: str) -> str:
        """A message in which nothing reads as a special token: those are broken by a space."""
        for special in sorted(self.specials, key=lambda special: (-len(special), special)):
            text = text.replace(special, f"{special[:1]} {special[1:]}")
        return text

    def start(self, message: str) -> list[int]:
        return self.tokenize(self.render(self.plain(message)))

    def after_answer(self) -> list[int]:
        """What the template writes after an assistant's text that is the last one."""
        return self.tokenize(self.render("x", self.MARKER, start=False).split(self.MARKER, 1)[1])

    def follow(self, message: str, last_token: int) -> list[int]:
        """Tokens between an answer that ended in `last_token` and the next one: what the template writes after an
        assistant's text, then the new message. A stop token that was sampled is not written twice."""
        tokens = self.tokenize(self.render("x", self.MARKER, self.plain(message)).split(self.MARKER, 1)[1])
        after = self.after_answer()
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
                                                 padding_value=pad_id if key == "tokens" else 0) for key in rows[0]}


def token_logprobs(model, tokens_BT, mask_BT, temperature: float = 1.0,
                   entropy_grad: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of each masked token given those before it, and the entropy there (with a gradient only if asked for);
    (B, T) float32, 0 where the mask is False. Rows are padded on the right, so a causal model needs no attention mask:
    nothing real looks at the padding.
    """
    hidden_BTH = model.get_decoder()(input_ids=tokens_BT).last_hidden_state
    chosen_BT = mask_BT[:, 1:]  # the state before a token predicts it
    head = model.get_output_embeddings()
    logprobs_N, entropy_N = token_logprobs_from_hidden(hidden_BTH[:, :-1][chosen_BT], head.weight,
                                                       tokens_BT[:, 1:][chosen_BT], temperature, head.bias,
                                                       entropy_grad=entropy_grad)
    zeros_BT = torch.zeros(tokens_BT.shape, device=tokens_BT.device)
    return zeros_BT.masked_scatter(mask_BT, logprobs_N), zeros_BT.masked_scatter(mask_BT, entropy_N)


class Critic(torch.nn.Module):
    """A value head on its own copy of the policy's backbone: V of the state before each masked token, (B, T) float32."""

    def __init__(self, policy):
        super().__init__()
        self.backbone = copy.deepcopy(policy.get_decoder())  # under LoRA: the frozen weights with adapters of its own
        self.head = torch.nn.Linear(policy.config.hidden_size, 1, dtype=torch.float32)
        torch.nn.init.zeros_(self.head.weight)  # values start at 0, not at noise
        torch.nn.init.zeros_(self.head.bias)

    def forward(self, tokens_BT, mask_BT):
        hidden_BTH = self.backbone(input_ids=tokens_BT).last_hidden_state
        values_N = self.head(hidden_BTH[:, :-1][mask_BT[:, 1:]].float()).squeeze(-1)
        return torch.zeros(tokens_BT.shape, device=tokens_BT.device).masked_scatter(mask_BT, values_N)


def micro_batches(lengths: list[int], max_tokens: int, max_rows: int | None = None) -> list[list[int]]:
    """Indices of rows, sorted by length and cut into padded batches of at most `max_tokens` (or a single row), so that
    padded tokens are fewest; a batch counts as max_tokens / 16 more, for what it costs beside its tokens.

    >>> micro_batches([5, 2, 9, 2], max_tokens=10)
    [[2], [0], [1, 3]]
    """
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    costs, starts = [0.0], []  # of the first n rows: the least cost, and where its last batch starts
    for end in range(1, len(order) + 1):
        options = []
        for start in range(end - 1, -1, -1):
            rows, padded = end - start, (end - start) * lengths[order[start]]
            if rows > 1 and (padded > max_tokens or rows > (max_rows or rows)):
                break
            options.append((costs[start] + padded + max_tokens / 16, start))
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


def tiny_config(tokenizer) -> LlamaConfig:
    """About 0.9 M parameters; head_dim 32, since vLLM's CPU attention has no kernel for less."""
    return LlamaConfig(vocab_size=len(tokenizer), hidden_size=128, intermediate_size=512, num_hidden_layers=4,
                       num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=1024,
                       tie_word_embeddings=False, initializer_range=0.1, pad_token_id=tokenizer.pad_token_id,
                       eos_token_id=tokenizer.eos_token_id, bos_token_id=None)


def demonstrations(env, chat: Chat, problem_ids, skill: float, max_turns: int, seed: int) -> tuple[list[dict], list]:
    """Scripted episodes as rows {"tokens", "mask": True on the player's}, and each turn's (position, answer)."""
    rng, rows, moves = np.random.default_rng(seed), [], []
    for problem_id in problem_ids:
        tokens = chat.start(env.reset(problem_id, seed=int(rng.integers(2**31))))
        mask = [False] * len(tokens)
        for turn in range(max_turns):
            answer = env.scripted_answer(rng, skill)
            moves.append((getattr(env, "position", None), answer))
            answer_tokens = chat.tokenize(answer) + [chat.tokenizer.eos_token_id]
            tokens, mask = tokens + answer_tokens, mask + [True] * len(answer_tokens)
            message, _, done, _ = env.step(answer)
            if done or turn + 1 == max_turns:
                break
            follow = chat.follow(message, answer_tokens[-1])
            tokens, mask = tokens + follow, mask + [False] * len(follow)
        rows.append({"tokens": tokens, "mask": mask})
    return rows, moves


def blind_loss(moves: list) -> float:
    """Nats a move of the best player that is told where it stands but does not see the board."""
    counts = {}
    for position, answer in moves:
        counts.setdefault(position, {}).setdefault(answer, 0)
        counts[position][answer] += 1
    return -sum(count * np.log(count / sum(answers.values()))
                for answers in counts.values() for count in answers.values()) / len(moves)


def imitate(model, rows: list[dict], updates: int, learning_rate: float, batch_tokens: int, seed: int, progress):
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
            padded = collate([batch[index] for index in chosen], pad_id=0)
            logprobs_BT, _ = token_logprobs(model, padded["tokens"], padded["mask"])
            (-logprobs_BT.sum() / targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        progress.advance(task)


@torch.no_grad()
def imitation_loss(model, rows: list[dict], turns: int) -> float:
    """Nats a turn of the demonstrator's answers under the model."""
    total = 0.0
    for chosen in micro_batches([len(row["tokens"]) for row in rows], max_tokens=8192):
        padded = collate([rows[index] for index in chosen], pad_id=0)
        total -= token_logprobs(model, padded["tokens"], padded["mask"])[0].sum().item()
    return total / turns


def warm_started_tiny(env, cache_dir: Path, *, seed: int, updates: int, skill: float, max_turns: int) -> Path:
    """Folder of the tiny policy after imitation of a scripted player that errs, made once and kept in the cache.

    The key covers all that shapes it (settings, tokenizer, this code, the task's code), not the run's seed: every arm
    and seed of an experiment starts from the same weights. Parallel runs wait for the one that is making it.
    """
    learning_rate, batch_tokens, count = 4e-3, 8192, 40 * updates
    tokenizer = tiny_tokenizer(getattr(env, "tiny_words", ""))
    recipe = {"seed": seed, "updates": updates, "skill": skill, "max_turns": max_turns, "lr": learning_rate,
              "batch_tokens": batch_tokens, "demonstrations": count, "env": vars(env),
              "tokenizer": tokenizer.backend_tokenizer.to_str(), "template": TINY_TEMPLATE,
              "config": tiny_config(tokenizer).to_dict(), "versions": [torch.__version__, transformers.__version__],
              "code": [inspect.getsource(thing) for thing in
                       (demonstrations, imitate, make_warm_start, Chat, token_logprobs, *type(env).__mro__[:-1])]}
    key = hashlib.sha256(json.dumps(recipe, sort_keys=True, default=str).encode()).hexdigest()[:16]
    folder = Path(cache_dir).expanduser() / f"tiny_{type(env).name}_{key}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "warm_start.json").is_file() or not (folder / "model.safetensors").is_file():
            shutil.rmtree(folder, ignore_errors=True)
            make_warm_start(folder, env, seed, updates, skill, max_turns, learning_rate, batch_tokens, count)
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


def make_warm_start(folder, env, seed, updates, skill, max_turns, learning_rate, batch_tokens, count):
    started, tokenizer = time.time(), tiny_tokenizer(getattr(env, "tiny_words", ""))
    chat = Chat(tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(tiny_config(tokenizer)).eval()
    with Progress(transient=True) as progress:
        problems = up_to(env, "train", 1536)
        rows, _ = demonstrations(env, chat, np.random.default_rng(seed).choice(problems, size=count), skill, max_turns, seed)
        imitate(model, rows, updates, learning_rate, batch_tokens, seed, progress)
    rows, moves = demonstrations(env, chat, up_to(env, "heldout", 256), skill, max_turns, seed + 1)
    report = {"imitation_loss_nats_per_move": imitation_loss(model, rows, len(moves)),
              "blind_player_nats_per_move": blind_loss(moves), "updates": updates, "skill": skill,
              "seconds": round(time.time() - started, 1)}
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        (Path(temporary) / "warm_start.json").write_text(json.dumps(report, indent=1))
        os.rename(temporary, folder)
        os.mkdir(temporary)  # what the context manager expects to remove
    print(f"warm start: {updates} updates in {report['seconds']:.0f} s; held-out imitation loss "
          f"{report['imitation_loss_nats_per_move']:.3f} nats a move (a blind player: "
          f"{report['blind_player_nats_per_move']:.3f}); kept in {folder}")


# ---------------------------------------------------------------------------------------------- loading


def policy_folder(args, env) -> str | Path:
    """Where --model is: a folder or hub id as given; `tiny`, warm-started on the task, and `smollm2` are made once and kept."""
    if args.model == "tiny":
        return warm_started_tiny(env, Path(args.cache_dir), seed=args.warm_start_seed, updates=args.warm_start_updates,
                                 skill=args.warm_start_skill, max_turns=args.max_turns)
    return smollm2_folder(args.cache_dir) if args.model == "smollm2" else args.model


def load_policy(path: str | Path, dtype: torch.dtype = torch.float32):
    """(model, tokenizer) of a Hugging Face folder or hub id (a LoRA adapter comes merged into its base), in eval mode for good:
    dropout would make the first ratio of an update differ from 1. MissingData, with a sentence, when there is nothing to load."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        if (Path(path) / "adapter_config.json").is_file():
            model = AutoPeftModelForCausalLM.from_pretrained(path, dtype=dtype).merge_and_unload()
        else:
            model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    except (OSError, ValueError) as error:
        if (Path(path) / "config.json").is_file() or (Path(path) / "adapter_config.json").is_file():
            raise
        raise MissingData(f"no model {str(path)!r}: it is neither a folder with a config.json nor a hub id that can be reached "
                          f"({str(error).splitlines()[0]})") from error
    if tokenizer.pad_token_id is None:
        raise ValueError(f"the tokenizer of {path} has no pad token; set tokenizer.pad_token and save it again")
    if not tokenizer.chat_template:
        raise ValueError(f"the tokenizer of {path} has no chat template; take an instruct model, or set tokenizer.chat_template")
    check_head(model, path)
    return model.eval(), tokenizer


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
