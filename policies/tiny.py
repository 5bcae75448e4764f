"""The tiny policies: made here, warm-started by imitation of a weak scripted player, kept in a cache."""
import hashlib
import inspect
import json
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch
import transformers
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from envs import up_to
from models import collate, hidden_states, micro_batches, pixel_inputs, token_logprobs
from policies.chat import Chat
from runtime.files import digest, made_once, progress, task_files

LEARNS_BY = (Chat, token_logprobs, hidden_states, pixel_inputs)  # code beside this file's that shapes the weights
TINY_WORDS = ("Walk from P to G never into O The ice is slippery No valid answer player goal row column move "
              "Left Down Right Up _ X √ . , : # * @ <answer> </answer>").split() + [str(digit) for digit in range(10)]
TINY_TEMPLATE = ("{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
                 "{% if add_generation_prompt %}<|assistant|>{% endif %}")


def tiny_tokenizer(words: str = "") -> transformers.PreTrainedTokenizerFast:
    """A word-level tokenizer: one token for a word, digit, sign or tag; white space only separates. `words` are a task's own."""
    specials = ["<|pad|>", "<|unknown|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    vocabulary = {word: index for index, word in enumerate(dict.fromkeys(specials + TINY_WORDS + words.split()))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unknown|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(r"\s+"), "removed"),
        pre_tokenizers.Split(Regex(r"</?[a-z]+>|[A-Za-z]+|."), "isolated")])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|pad|>", unk_token="<|unknown|>",
                                                eos_token="<|end|>", chat_template=TINY_TEMPLATE)


def tiny_config(tokenizer, width: int = 128, layers: int = 4) -> transformers.LlamaConfig:
    """About 0.9 M parameters; heads of 32 numbers each, since vLLM's CPU attention has no kernel for less."""
    return transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers, head_dim=32,
        num_attention_heads=width // 32, num_key_value_heads=width // 64, max_position_embeddings=1024, tie_word_embeddings=False,
        initializer_range=0.1, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, bos_token_id=None)


TINY_VLM_TEMPLATE = ("{% for message in messages %}<|{{ message.role }}|>{% for part in message.content %}"
                     "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}<|end|>{% endfor %}"
                     "{% if add_generation_prompt %}<|assistant|>{% endif %}")
TINY_PATCH = 16  # pixels: a cell of a board is one patch and one token


def tiny_processor(words: str, image_size: int, mean=(0.5,) * 3, std=(0.5,) * 3) -> transformers.Idefics3Processor:
    """The tiny tokenizer with an image processor for square pictures, which are scaled to `image_size` pixels and less `mean`, by
    `std` (of colours from 0 to 1)."""
    tokenizer, size = tiny_tokenizer(words), {"longest_edge": image_size}
    tokenizer.add_special_tokens({"additional_special_tokens": ["<fake_token_around_image>", "<image>", "<global-img>",
                                                                "<end_of_utterance>"]})
    image_processor = Idefics3ImageProcessorPil(do_image_splitting=False, size=size, max_image_size=size, image_mean=list(mean),
                                                image_std=list(std))
    return transformers.Idefics3Processor(image_processor, tokenizer, image_seq_len=(image_size // TINY_PATCH)**2,
                                          chat_template=TINY_VLM_TEMPLATE)


def tiny_vlm_config(processor, width: int = 128, layers: int = 4) -> transformers.Idefics3Config:
    """About 1.2 M parameters: the tiny policy, and a layer that looks at the patches of a picture."""
    tokenizer = processor.tokenizer
    vision = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4,
              "image_size": processor.image_processor.max_image_size["longest_edge"], "patch_size": TINY_PATCH,
              "initializer_range": 0.1}
    return transformers.Idefics3Config(
        text_config=tiny_config(tokenizer, width, layers).to_dict(), vision_config=vision, scale_factor=1,
        image_token_id=processor.image_token_id, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=False, initializer_range=0.1)


def new_tiny(env, images: bool, width: int, layers: int):
    """(model, processor or tokenizer) of a tiny policy for the task, with the weights of torch's generator."""
    words = getattr(env, "tiny_words", "")
    if not images:
        tokenizer = tiny_tokenizer(words)
        return transformers.LlamaForCausalLM(tiny_config(tokenizer, width, layers)).eval(), tokenizer
    pictures = []
    for problem_id in env.problems("train", 32):
        env.reset(problem_id, seed=0)
        pictures.append(env.image() / 255)
    mean, std = (getattr(np.stack(pictures), name)((0, 1, 2)).round(4).tolist() for name in ("mean", "std"))
    processor = tiny_processor(words, max(pictures[0].shape), mean, std)  # what all pictures share teaches nothing
    return transformers.Idefics3ForConditionalGeneration(tiny_vlm_config(processor, width, layers)).eval(), processor


def demonstrations(env, chat: Chat, problem_ids, skill: float, max_turns: int, seed: int) -> tuple[list[dict], list]:
    """Scripted episodes as rows {"tokens", "mask": True on the player's, "images"}, and each turn's (position, answer)."""
    rng, rows, moves, known = np.random.default_rng(seed), [], [], {}

    def look():
        if chat.image_processor is not None:
            image = env.image()
            return known.setdefault(image.tobytes(), image)  # thousands of episodes show few different pictures

    for problem_id in progress(problem_ids, "warm start: playing as the weak player, episode"):
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
    at = Counter(position for position, _ in moves)
    return -sum(count * np.log(count / at[position]) for (position, _), count in Counter(moves).items()) / len(moves)


def imitate(model, image_processor, rows: list[dict], updates: int, seed: int):
    """Cross-entropy on the demonstrator's tokens, AdamW, cosine to 0, batches of about 8192 tokens."""
    rng = np.random.default_rng(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / 20) * (1 + np.cos(np.pi * step / updates)) / 2)
    size = max(1, round(8192 / np.mean([len(row["tokens"]) for row in rows])))
    for _ in progress(range(updates), "warm start: imitating a weak player, update"):
        batch = [rows[index] for index in rng.integers(len(rows), size=size)]
        targets = sum(sum(row["mask"]) for row in batch)
        for chosen in micro_batches([len(row["tokens"]) for row in batch], max_tokens=4096):
            logprobs_BT = row_logprobs(model, image_processor, [batch[index] for index in chosen])
            (-logprobs_BT.sum() / targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


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
    """Folder of the tiny policy after imitation of a scripted player that errs, made once and kept in the cache. The key covers all
    that shapes it (settings, this code, the task's code), not the run's seed: every arm and seed of an experiment starts from the
    same weights."""
    settings = {"seed": seed, "updates": updates, "skill": skill, "max_turns": max_turns, "images": images, "width": width,
                "layers": layers}
    recipe = settings | {"env": vars(env), "versions": [torch.__version__, transformers.__version__],
                         "code": [Path(__file__).read_text("utf-8"), *map(inspect.getsource, LEARNS_BY)],
                         "task": [digest(path) for path in task_files(env)]}
    key = hashlib.sha256(json.dumps(recipe, sort_keys=True, default=str).encode()).hexdigest()[:16]
    folder = Path(cache_dir).expanduser() / f"tiny{'_vlm' * images}_{type(env).name}_{key}"

    def make(temporary: Path):
        report = make_warm_start(temporary, env, **settings)
        print(f"warm start: {updates} updates in {report['seconds']:.0f} s; held-out imitation loss "
              f"{report['imitation_loss_nats_per_move']:.3f} nats a move (a blind player: "
              f"{report['blind_player_nats_per_move']:.3f}); kept in {folder}")
    return made_once(folder, ("warm_start.json", "model.safetensors"), make)


def make_warm_start(folder: Path, env, seed, updates, skill, max_turns, images, width, layers) -> dict:
    """Writes the policy into the folder; returns what warm_start.json says of it."""
    started = time.monotonic()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, processor = new_tiny(env, images, width, layers)
    chat = Chat(processor)
    problems = np.random.default_rng(seed).choice(up_to(env, "train", 1536), size=40 * updates)
    rows, _ = demonstrations(env, chat, problems, skill, max_turns, seed)
    imitate(model, chat.image_processor, rows, updates, seed)
    rows, moves = demonstrations(env, chat, up_to(env, "heldout", 256), skill, max_turns, seed + 1)
    report = {"imitation_loss_nats_per_move": imitation_loss(model, chat.image_processor, rows, len(moves)),
              "blind_player_nats_per_move": blind_loss(moves), "updates": updates, "skill": skill,
              "seconds": round(time.monotonic() - started, 1)}
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    (folder / "warm_start.json").write_text(json.dumps(report, indent=1), "utf-8")
    return report
