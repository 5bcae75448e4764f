import copy
import functools
import importlib.util
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_buffer import make
from transformers import Idefics3ForConditionalGeneration

from buffer import ReplayBuffer
from engines import make_engine
from engines.hf import HFEngine
from envs import FrozenLake
from judge import add_advantages, score
from look import viewer
from models import banned_tokens, collate, load_policy, pixel_inputs, token_logprobs
from policies.chat import Chat
from policies.tiny import demonstrations, row_logprobs, tiny_processor, tiny_vlm_config, warm_started_tiny
from rollout import collect
from runtime.files import write_state
from runtime.memories import load_buffer
from settings import Args, parse_args
from tasks.sokoban import Sokoban
from train import main
from update import gradients, make_learner

lake = functools.partial(FrozenLake, prompt="tiny", view="image", cell_pixels=16)
PLAY = dict(max_turns=6, max_new_tokens=12, temperature=1.3, format_penalty=0.15, policy_step=4, iteration=2, context_length=1024)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("vlm_cache")


@pytest.fixture(scope="module")
def folder(cache):
    return warm_started_tiny(lake(), cache, seed=0, updates=2, skill=0.6, max_turns=4, images=True)


@pytest.fixture(scope="module")
def policy(folder):
    model, processor = load_policy(folder)
    return model, Chat(processor)


def engine_of(policy):
    model, chat = policy
    return HFEngine(model, chat.stop_ids(model.generation_config), chat.tokenizer.pad_token_id, chat.text, chat.image_processor)


def play(policy, problems, seeds, engine=None, make_env=lake, **changes):
    return collect(engine or engine_of(policy), policy[1], make_env, list(problems), list(range(len(problems))), list(seeds),
                   **(PLAY | changes))


def replayed(policy, episode, temperature=PLAY["temperature"]):
    """(T,) log-probs of a stored episode, alone, from its stored pixels."""
    batch = collate([{"tokens": episode.tokens.astype(np.int64), "mask": episode.action_mask}], 0)
    with torch.no_grad():
        return token_logprobs(policy[0], batch["tokens"], batch["mask"], temperature,
                              pixels=pixel_inputs(policy[1].image_processor, [episode.images]))[0][0].numpy()


def test_the_tiny_vlm_is_tiny_and_survives_saving(folder):
    model, processor = load_policy(folder)
    assert 0.5e6 < sum(parameter.numel() for parameter in model.parameters()) < 1.5e6
    chat = Chat(processor)
    image = np.random.default_rng(0).integers(0, 256, (64, 64, 3)).astype(np.uint8)
    tokens = chat.start("Walk to G", image)
    assert tokens.count(model.config.image_token_id) == 16 and chat.tokenizer.unk_token_id not in tokens
    whole = processor(text=chat.render("Walk", image=True) + "Left<|end|>" + chat.render("G", image=True), images=[image, image],
                      add_special_tokens=False)["input_ids"][0]
    answer = chat.tokenize("Left<|end|>")
    assert chat.start("Walk", image) + answer + chat.follow("G", answer[-1], image) == whole


def test_replayed_log_probs_equal_those_of_collection(policy):
    """The released FreshPER code stores no pixels: its replay of images is text alone, or fails on their positions."""
    episodes, _ = play(policy, range(12), range(12))
    assert len({len(episode.tokens) for episode in episodes}) > 3 and max(len(episode.images) for episode in episodes) > 2
    for episode in episodes:
        assert np.abs(replayed(policy, episode) - episode.behavior_logprobs).max() < 1e-4
    changed = copy.deepcopy(episodes[0])
    changed.images[0] = 255 - changed.images[0]
    assert np.abs(replayed(policy, changed) - changed.behavior_logprobs).max() > 1e-3  # the pixels matter


@pytest.mark.parametrize("algo", ["grpo", "ppo"])
def test_the_ratio_on_fresh_episodes_is_1(folder, policy, algo):
    args = Args(algo=algo, temperature=PLAY["temperature"], kl_coef=0.1, max_turns=6)
    learner = make_learner(args, load_policy(folder)[0], policy[1].image_processor)
    episodes, _ = play(policy, list(range(4)) * 4, range(16))
    for place, episode in enumerate(episodes):
        episode.group_id = place % 4
        episode.reward += place  # a signal in each
    add_advantages(learner, episodes)
    metrics = gradients(learner, episodes)
    assert metrics["max_abs_ratio_minus_1"] < 1e-3 and metrics["tokens_trained"] > 0
    body = learner.policy.model
    eyes = body.vision_model.embeddings.patch_embedding, body.connector.modality_projection.proj
    for module in (*eyes, body.text_model.embed_tokens):
        assert module.weight.grad.abs().sum() > 0


def test_adapters_on_a_vlm_train_sample_and_load(folder, policy, tmp_path):
    args = Args(lora_rank=2, temperature=PLAY["temperature"], max_turns=6)
    learner = make_learner(args, load_policy(folder)[0], policy[1].image_processor)
    with torch.no_grad():
        for name, parameter in learner.policy.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    adapted = learner.policy, policy[1]
    episodes, _ = play(adapted, range(4), range(4))
    for episode in episodes:
        assert np.abs(replayed(adapted, episode) - episode.behavior_logprobs).max() < 1e-4
    assert max(np.abs(replayed(policy, episode) - episode.behavior_logprobs).max() for episode in episodes) > 0.01
    learner.policy.save_pretrained(tmp_path)
    policy[1].processor.save_pretrained(tmp_path)
    model, processor = load_policy(tmp_path)
    merged = model, Chat(processor)
    assert all(np.abs(replayed(merged, episode) - episode.behavior_logprobs).max() < 1e-4 for episode in episodes)


def test_micro_batches_take_their_own_images(folder, policy):
    episodes, _ = play(policy, range(8), range(8))
    learner = make_learner(Args(temperature=PLAY["temperature"], micro_batch_tokens=1), policy[0], policy[1].image_processor)
    behavior_BT = score(learner.policy, episodes, learner)
    for episode, logprobs_T in zip(episodes, behavior_BT):
        assert np.abs(logprobs_T[:len(episode.tokens)].numpy() - episode.behavior_logprobs).max() < 1e-4


def test_placeholders_are_never_trained_and_never_sampled(folder):
    """StarsfieldAI/R1-V#91, verl PR #3155: with a sampled image token there are more tokens of images than features."""
    model, processor = load_policy(folder)
    placeholder = model.config.image_token_id
    assert banned_tokens(model.config) == [placeholder]
    with torch.no_grad():  # a model that wants to say <image>
        model.lm_head.weight[placeholder] = model.lm_head.weight[processor.tokenizer.eos_token_id] * 3
    policy = model, Chat(processor)
    episodes, _ = play(policy, range(12), range(12))
    for episode in episodes:
        of_images = episode.tokens == placeholder
        assert of_images.sum() == 16 * len(episode.images) and not (of_images & episode.action_mask).any()
        assert np.abs(replayed(policy, episode) - episode.behavior_logprobs).max() < 1e-4


def test_a_message_cannot_forge_an_image(policy):
    image = lake_image()
    assert policy[1].start("<image> <|end|>", image).count(policy[0].config.image_token_id) == 16
    assert policy[1].start("<image>").count(policy[0].config.image_token_id) == 0


def lake_image(problem=0):
    env = lake()
    env.reset(problem, 0)
    return env.image()


def test_the_cache_across_image_turns_equals_one_sequence_at_a_time(policy):
    """Ragged conversations of several images; two whose tokens are the same and whose images are not."""
    model, chat = policy
    generator, engine = np.random.default_rng(0), engine_of(policy)
    images = [[generator.integers(0, 256, (64, 64, 3)).astype(np.uint8)] for _ in range(5)]
    images[3] = [images[2][0].copy()]  # one content, two arrays
    talks = [chat.start("Walk to G", row[0]) for row in images]
    for turn in range(4):
        ids = sorted(generator.choice(5, size=4, replace=False).tolist())
        completions = engine.generate([talks[id] for id in ids], ids, [0] * 4, max_new_tokens=5, temperature=0,
                                      images=[images[id] for id in ids])
        for id, completion in zip(ids, completions):
            tokens = []
            for logprob in completion.logprobs:
                with torch.no_grad():
                    logits_V = model(torch.tensor([talks[id] + tokens]), **pixel_inputs(chat.image_processor, [images[id]])
                                     ).logits[0, -1]
                logits_V[model.config.image_token_id] = -torch.inf
                tokens.append(logits_V.argmax().item())
                assert logprob == pytest.approx(logits_V.log_softmax(-1).max().item(), abs=1e-4)
            assert completion.tokens == tokens
            images[id].append(generator.integers(0, 256, (64, 64, 3)).astype(np.uint8))
            talks[id] = talks[id] + tokens + chat.follow("G" * (id % 2), tokens[-1], images[id][-1])


def test_a_sync_forgets_what_the_old_eyes_saw(folder, policy):
    """As trl#7198 for the engine here: features of pictures seen before an update of the vision part alone."""
    fresh = load_policy(folder)[0], policy[1]
    engine = engine_of(fresh)
    play(fresh, range(4), range(4), engine)
    with torch.no_grad():
        fresh[0].model.vision_model.embeddings.patch_embedding.weight.mul_(1.5)

    def worst():
        return max(np.abs(replayed(fresh, episode) - episode.behavior_logprobs).max() for episode in
                   play(fresh, range(4), range(4), engine)[0])

    assert worst() > 1e-3  # stale
    engine.sync()
    assert worst() < 1e-4


def test_the_tiny_vlm_gets_defaults_that_fit_it():
    args = parse_args(["--model", "tiny-vlm"])
    assert args.env_options == {"prompt": "tiny", "view": "image", "cell_pixels": "16"}
    assert (args.max_new_tokens, args.lr) == (12, 1e-3)


def test_a_model_without_eyes_is_refused(tiny_folder, capsys):
    args = replace(parse_args([]), env_options={"prompt": "tiny", "view": "image"})
    with pytest.raises(SystemExit):
        make_engine(args, *load_tiny(tiny_folder), tiny_folder)
    assert "takes no images, which --env frozenlake shows" in capsys.readouterr().err


def load_tiny(folder):
    model, tokenizer = load_policy(folder)
    return model, Chat(tokenizer)


def test_a_blank_view_shows_nothing_and_plays_the_same_game(policy):
    blank, _ = play(policy, range(4), range(4), make_env=functools.partial(lake, view="blank"))
    assert all(not image.any() and image.shape == (64, 64, 3) for episode in blank for image in episode.images)
    assert len({id(image) for episode in blank for image in episode.images}) == 1


def test_the_scripted_player_says_what_it_sees():
    env = lake()
    env.reset(3, 0)
    row, column, *around, answer = env.scripted_answer(np.random.default_rng(0), 1.0).split()
    board = [line.split() for line in env.render().splitlines()]
    assert board[int(row) - 1][int(column) - 1] == "P" and (row, column) == ("1", "1")
    assert around == ["#", board[1][0], board[0][1], "#"] and env.step(answer)[3]


def test_images_and_placeholders_must_agree(policy):
    tokens = policy[1].start("Walk", lake_image())
    with pytest.raises(ValueError, match="2 images of 32 tokens for 16 placeholders"):
        engine_of(policy).generate([tokens], [0], [0], 2, 1.0, images=[[lake_image(), lake_image(1)]])


def test_an_episode_that_is_cut_keeps_whole_images(policy):
    """microsoft/agent-lightning#441, open-r1-multimodal#28: placeholders were cut off, and their image stayed."""
    placeholder = policy[0].config.image_token_id
    for context_length in range(20, 90, 10):
        episodes, _ = play(policy, range(6), range(6), context_length=context_length, max_turns=20)
        for episode in episodes:
            assert (episode.tokens == placeholder).sum() == 16 * len(episode.images)
            assert len(episode.images) == episode.info["turns"]
            assert len(episode.tokens) <= context_length
            assert np.abs(replayed(policy, episode) - episode.behavior_logprobs).max() < 1e-4
    assert any(episode.info["context_full"] for episode in episodes)


def test_equal_images_are_stored_once(policy):
    episodes, _ = play(policy, [0] * 8, range(8))
    assert len({id(episode.images[0]) for episode in episodes}) == 1  # a group's first picture
    several = [episode for episode in episodes if len(episode.images) > len({image.tobytes() for image in episode.images})]
    assert several
    for episode in several:
        distinct = {id(image): image for image in episode.images}
        assert len(distinct) == len({image.tobytes() for image in episode.images})
        pixels = sum(image.nbytes for image in distinct.values())
        assert pixels < episode.nbytes < pixels + 12_288  # less than one picture more


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=6), st.integers(0, 2**31))
def test_a_buffer_saves_and_loads_images(tmp_path_factory, places, seed):
    generator = np.random.default_rng(seed)
    pool = [generator.integers(0, 256, (2 + place, 3, 3)).astype(np.uint8) for place in range(4)]
    buffer = ReplayBuffer(8, priority="uniform")
    episodes = [make(images=[pool[place] for place in places]), make(images=[pool[0]]), make(images=None)]
    buffer.add(episodes, 0)
    path = tmp_path_factory.mktemp("buffer") / "buffer"
    write_state(path, buffer.state_dict())
    again = [member[0] for member in load_buffer(path).members if member]
    for old, new in zip(episodes, again, strict=True):
        assert (old.images is None) == (new.images is None)
        assert all((a == b).all() and a.shape == b.shape for a, b in zip(old.images or (), new.images or (), strict=True))
        assert len({id(image) for image in old.images or ()}) == len({id(image) for image in new.images or ()})


@pytest.mark.parametrize("make", [lake, functools.partial(Sokoban, prompt="tiny", view="image")])
def test_messages_with_pictures_say_nothing_of_the_board(make):
    env = make()
    texts = [make().reset(problem, 0) for problem in env.problems("train", 20)]
    assert len(set(texts)) == 1 and "\n" not in texts[0]
    env.reset(env.problems("train", 1)[0], 0)
    assert env.step("<answer>Down</answer>")[0] == "" and env.step("what?")[0] == "No valid answer.\n"
    assert env.image().shape[0] == env.image().shape[1] == 16 * env.size


def test_the_full_prompt_describes_the_picture():
    for env in (FrozenLake(view="image"), Sokoban(view="image")):
        first = env.reset(0, 0)
        assert "picture" in first and env.picture in first and env.render() not in first and "Symbols" not in first
        assert env.step("what?")[0].startswith("No valid answer.\nThe picture shows the board now.\n\nYour move")


def test_pictures_of_fewer_pixels_are_means_and_deterministic():
    small, large = lake(), FrozenLake()
    for env in (small, large):
        env.reset(3, 0)
    means = large.image().reshape(64, 4, 64, 4, 3).mean((1, 3))
    assert large.image().shape == (256, 256, 3) and np.abs(small.image() - means).max() <= 1
    picture = small.image()
    picture[:] = 0  # ours to write on: the next one is not changed
    assert small.image().any()


def test_the_warm_start_imitates_with_pictures(policy):
    model, chat = policy
    rows, moves = demonstrations(lake(), chat, lake().problems("train", 6), skill=1.0, max_turns=4, seed=0)
    assert sum(len(row["images"]) for row in rows) == len(moves)
    placeholder = model.config.image_token_id
    assert all(sum(token == placeholder for token in row["tokens"]) == 16 * len(row["images"]) for row in rows)
    alone = torch.cat([row_logprobs(model, chat.image_processor, [row])[0] for row in rows])
    together_BT = row_logprobs(model, chat.image_processor, rows)
    assert torch.allclose(alone.sum(), together_BT.sum(), atol=1e-3)


@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here: make test-vllm")
def test_vllm_sees_the_same_images(folder):
    """Episodes of several images: vLLM's log-probs are the trainer's, before and after updates of the eyes and of every weight.
    huggingface/trl#7198, verl#6523, vllm#44910: what the old weights saw stays in vLLM's encoder cache."""
    from engines.vllm import VLLMEngine
    model, processor = load_policy(folder)
    policy = model, Chat(processor)
    with torch.no_grad():  # a model that wants to say <image>
        model.lm_head.weight[model.config.image_token_id] = model.lm_head.weight[processor.tokenizer.eos_token_id] * 3
    engine = VLLMEngine(model, folder, policy[1].stop_ids(model.generation_config), max_model_len=1024, chat=policy[1])

    def worst():
        episodes, _ = play(policy, list(range(6)) * 2, range(12), engine)
        assert max(len(episode.images) for episode in episodes) > 2
        assert not any((episode.tokens[episode.action_mask] == model.config.image_token_id).any() for episode in episodes)
        return max(np.abs(replayed(policy, episode) - episode.behavior_logprobs).max() for episode in episodes)

    try:
        assert worst() < 1e-4
        with torch.no_grad():
            model.model.vision_model.embeddings.patch_embedding.weight.mul_(1.5)  # the eyes alone
        assert worst() > 1e-3
        engine.sync()
        assert worst() < 1e-4
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1 * parameter.std() * torch.randn_like(parameter)
        engine.sync()
        assert worst() < 1e-4
    finally:
        engine.close()


def test_a_run_with_images_resumes_exactly_and_shows_its_frames(tmp_path, cache, folder):
    flags = ["--model", "tiny-vlm", "--wandb", "offline", "--cache-dir", cache, "--tiny-options", "updates", 2, "--max-turns", 4,
             "--eval-problems", 8, "--eval-every", 0, "--problems-per-iteration", 4, "--group-size", 4, "--replay-batch-size", 4,
             "--train-problems", 64, "--runs-dir", tmp_path, "--name", "whole", "--iterations", 3, "--checkpoint-every", 1,
             "--replay-options", "store_without_signal", "true", "--problem-sampler", "uniform"]  # with these, answers are valid
    main(parse_args(list(map(str, flags))))
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    shutil.rmtree(max((tmp_path / "parts" / "checkpoints").iterdir(), key=lambda path: int(path.name[5:])))
    main(parse_args(["--resume", str(tmp_path / "parts"), "--wandb", "off"]))
    whole, parts = ([{key: value for key, value in json.loads(line).items() if not key.startswith("time/")}
                     for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()] for name in ("whole", "parts"))
    assert whole == parts and len(whole) == 3 and whole[-1]["replay/updates"] == 2
    assert all(line["fresh/first_max_abs_ratio_minus_1"] < 1e-3 for line in whole if line["fresh/steps"])
    last = [next((tmp_path / name / "checkpoints").glob(f"step_{whole[-1]['step']}")) for name in ("whole", "parts")]
    assert (last[0] / "model.safetensors").read_bytes() == (last[1] / "model.safetensors").read_bytes()
    buffers = [np.load(next(folder.glob("buffer/*.npz"))) for folder in last]
    assert all((buffers[0][name] == buffers[1][name]).all() for name in buffers[0]) and len(buffers[1]["episodes/image_bytes"])
    records = [json.loads(line) for line in (tmp_path / "whole" / "episodes.jsonl").read_text().splitlines()]
    records = [record for record in records if "transcript" in record]
    frames = [turn["image"] for record in records for turn in record["transcript"] if "image" in turn]
    assert {record["kind"] for record in records} == {"fresh", "replay"} and len(set(frames)) < len(frames)
    assert all((tmp_path / "whole" / frame).read_bytes().startswith(b"\x89PNG") for frame in frames)
    table = json.loads(next((tmp_path / "whole").rglob("*.table.json")).read_text())
    images = sum("image" in turn for turn in records[0]["transcript"])
    assert table["columns"][-1] == "frames" and len(table["data"][0][-1]) == images
    viewer.main([str(tmp_path / "whole")])
    assert (tmp_path / "whole" / "episodes.html").read_text().count("data:image/png") == len(set(frames))


@pytest.mark.parametrize("flags, words", [
    (["--model", "tiny-vlm", "--env", "arithmetic"], "tiny-vlm is for tasks that show images"),
    (["--model", "tiny", "--env-options", "view", "image"], "tiny-vlm is for tasks that show images"),
    (["--model", "tiny-vlm", "--env", "geoqa"], "tiny-vlm is for tasks that show images"),
    (["--model", "tiny-vlm", "--engine", "http://localhost:1"], "use --engine hf or vllm"),
    (["--model", "tiny-vlm", "--engine", "vllm", "--lora-rank", "4", "--engine-options", "lora_sync", "adapter"], "use --engine hf or vllm")])
def test_what_does_not_fit_is_refused_before_anything_is_loaded(flags, words, capsys):
    with pytest.raises(SystemExit) as stop:
        parse_args(flags)
    assert stop.value.code == 2 and words in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------ the Qwen-VL family


def test_images_that_the_processor_splits(policy):
    """As SmolVLM has them: tiles and the whole, each with its own tokens between markers of rows and columns."""
    processor = tiny_processor("", 64)
    markers = [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
    processor.tokenizer.add_special_tokens({"additional_special_tokens": markers}, replace_extra_special_tokens=False)
    processor.image_processor.do_image_splitting, processor.image_processor.size = True, {"longest_edge": 128}
    torch.manual_seed(0)
    split = Idefics3ForConditionalGeneration(tiny_vlm_config(processor)).eval(), Chat(processor)
    episodes, _ = play(split, range(4), range(4), max_turns=3, make_env=functools.partial(lake, cell_pixels=32))
    assert max(len(episode.images) for episode in episodes) == 3
    assert processor.tokenizer.unk_token_id not in episodes[0].tokens[:20]
    for episode in episodes:
        assert (episode.tokens == split[0].config.image_token_id).sum() == 5 * 16 * len(episode.images)  # 2 x 2 tiles, the whole
        assert np.abs(replayed(split, episode) - episode.behavior_logprobs).max() < 1e-4


def test_a_random_qwen_vl_samples_what_it_trains_on():
    """Multimodal rotary positions and images of several sizes; its processor needs torchvision, its image processor does not."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    text = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
            "num_key_value_heads": 1, "max_position_embeddings": 512, "initializer_range": 0.2, "pad_token_id": 0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]},
            "bos_token_id": None, "eos_token_id": 1}
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64, "patch_size": 14,
              "window_size": 56, "fullatt_block_indexes": [1], "initializer_range": 0.2}
    torch.manual_seed(0)
    model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, image_token_id=60, video_token_id=61, vision_start_token_id=62,
        vision_end_token_id=63)).eval()
    assert banned_tokens(model.config) == [60, 61, 62, 63]
    processor = Qwen2VLImageProcessorPil(size={"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 64})
    generator = np.random.default_rng(0)
    engine = HFEngine(model, [1], 0, image_processor=processor)

    def shown(height, width):
        image = generator.integers(0, 256, (28 * height, 28 * width, 3)).astype(np.uint8)
        return image, [62, *[60] * (height * width), 63]

    images, talks = [[], [], []], [[5, 6], [7], [7]]
    for id, sizes in enumerate(((2, 3), (3, 2), (4, 1))):
        image, tokens = shown(*sizes)
        images[id].append(image)
        talks[id] += tokens + [8, 9, 10]
    found = [[], [], []]  # (place, token, log-prob)
    for turn in range(3):
        completions = engine.generate(talks, [0, 1, 2], [turn] * 3, 4, 1.0, images=images)
        for id, completion in enumerate(completions):
            found[id] += [(len(talks[id]) + place, logprob) for place, logprob in enumerate(completion.logprobs)]
            image, tokens = shown(1 + turn, 2 + id)
            images[id].append(image)
            talks[id] = talks[id] + completion.tokens + [11] + tokens + [12]
        if turn == 1:  # rewritten behind its first image
            talks[0], images[0], found[0] = talks[0][:9] + [20, 21], images[0][:1], []
    rows = [{"tokens": talk, "mask": [place in dict(entries) for place in range(len(talk))]}
            for talk, entries in zip(talks, found)]
    batch = collate(rows, 0)
    with torch.no_grad():
        logprobs_BT, entropy_BT = token_logprobs(model, batch["tokens"], batch["mask"], pixels=pixel_inputs(processor, images))
    for row, entries in enumerate(found):
        for place, logprob in entries:
            assert logprobs_BT[row, place].item() == pytest.approx(logprob, abs=1e-4)
    assert entropy_BT.isfinite().all() and sum(map(len, found)) > 12
