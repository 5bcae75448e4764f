import inspect
import os
import re
import subprocess
import sys
import time
from collections import deque

import gymnasium
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import ROOT
from envs import ENVS, FrozenLake, MissingData, load_env, make_env_factory, options_for
from tasks import sokoban
from tasks.answers import first_word, parse_answer
from tasks.cliffwalking import CliffWalking
from tasks.sokoban import Room, Sokoban, cells_of, mask_of, published_levels, push, read_level, reverse_play, room_content

MOVES = ["Left", "Down", "Right", "Up"]
GAMES = {"frozenlake": FrozenLake, "frozenlake-slippery": lambda **options: FrozenLake(slippery=True, **options),
         "frozenlake-random-start": lambda **options: FrozenLake(random_start=True, **options),
         "frozenlake-8x8": lambda **options: FrozenLake(size=8, **options), "cliffwalking": CliffWalking,
         "cliffwalking-slippery": lambda **options: CliffWalking(slippery=True, **options),
         "sokoban-simple": Sokoban, "sokoban-hard": lambda **options: Sokoban(size=8, boxes=2, **options)}
each_game = pytest.mark.parametrize("make", GAMES.values(), ids=GAMES)
needs_levels = pytest.mark.skipif(not sokoban.LEVELS.is_dir(), reason="cavepacker-data is not installed: make data")


def answer(move):
    return f"<answer>{move}</answer>"


def room(*rows):
    """A Room from rows of Sokoban's usual text form, outside what `read_level` does."""
    text = "".join(rows)
    free, targets, boxes, player = ([i for i, symbol in enumerate(text) if symbol in symbols]
                                    for symbols in (" @$.+*", ".+*", "$*", "@+"))
    return Room(len(rows[0]), len(rows), mask_of(free), mask_of(targets), mask_of(boxes), player[0])


def game_of(*rows, **options):
    env = Sokoban(**options)
    env.room_of = lambda problem_id: room(*rows)
    env.reset(0, seed=0)
    return env


# ------------------------------------------------------------------------------------------------ answers

@pytest.mark.parametrize("text, move", [
    ("<answer>Right</answer>", 2), ("<answer> right </answer>", 2), ("well: <ANSWER>Up</ANSWER>!", 3),
    ("<answer>\n\tdOwN\r\n</Answer>", 1), ("</answer><answer>Left</answer></answer>", 0),
    ("Right", None), ("", None), ("<answer>Right", None), ("Right</answer>", None), ("<answer>Jump</answer>", None),
    ("<answer></answer>", None), ("<answer>Right Right</answer>", None), ("<answer>Right, Left</answer>", None),
    ("<answer>Left</answer> <answer>Right</answer>", None),  # a list of answers is no answer
    ("<answer>Left</answer>" * 4, None), ("<answer>Left</answer><answer>Left</answer>", None),
    ("<answer>Left</answer><answer>", None), ("<ANSWER><answer>Left</answer>", None),
    ("<answer><answer>Right</answer></answer>", None), ("<answer><answer>Right</answer>", None),
    ("<ans<answer>wer>Right</answer>", None), ("<answer>Ri</answer>ght</answer>", None),
    ("<answer>Right</answer", None), ("<answer>Right</ answer>", None),
    ("<answer>\u202eRight</answer>", None), ("<answer>\u200bRight</answer>", None), ("<answer>Right\0</answer>", None),
    ("<an\u017fwer>Right</answer>", None), ("<answer>Ｒｉｇｈｔ</answer>", None),
    ("<answer>\u00a0Right</answer>", None),
    ("\0<answer>Right</answer>\ud800", 2)])
def test_parsing(text, move):
    assert parse_answer(text, MOVES) == move


@pytest.mark.parametrize("text, move", [
    ("left", 0), ("Down.", 1), ("I go RIGHT, then down.", 2), ("\n\n up\nleft", 3), ("<answer>Left</answer>", 0),
    ("<think>left</think> up", 3), ("<think> I guess left", None), ("Upwards", None), ("No.\nleft", None), ("", None),
    ("Ｌｅｆｔ", None), ("the left-hand side", 0), ("left\0", 0)])
def test_the_first_word_of_the_first_line(text, move):
    assert first_word(text, MOVES) == move


@pytest.mark.parametrize("text", ["left " * 200_000, "<think>" * 150_000, "a" * 1_000_000, " " * 1_000_000, "\n" * 1_000_000])
def test_a_megabyte_is_read_for_its_first_word_in_linear_time(text):
    started = time.process_time()
    assert first_word(text, MOVES) in (None, 0)
    assert time.process_time() - started < 2


@pytest.mark.parametrize("name", ["frozenlake", "cliffwalking", "sokoban"])
def test_a_small_chat_model_is_asked_in_words_and_answers_with_one(name):
    env = make_env_factory(name, options_for("smollm2", load_env(name)))()
    assert env.prompt == "chat"
    solved, rng = 0, np.random.default_rng(0)
    problems = env.problems("train", 20)
    for problem in problems:
        message, done, turns = env.reset(problem, 0), False, 0
        assert env.role in message and "<answer>" not in message
        while not done and turns < 60:
            assert message.endswith("Which way do you go? Answer with one word: left, down, right or up.")
            message, _, done, valid = env.step(env.scripted_answer(rng, 1.0))
            assert valid
            turns += 1
        solved += env.success
    assert solved == len(problems)
    env.reset(problems[0], 0)
    message, _, done, valid = env.step("A move is a good idea.")
    assert message.startswith("No valid answer.\n") and not done and not valid


def test_a_lake_in_words_by_hand():
    env = FrozenLake(prompt="chat", random_start=True)
    env.reset(env.problems("train", 1)[0], 0)
    env.map, env.position = ["FFFF", "FHFF", "SFFG", "FFFF"], 8
    assert env.observation() == ("The goal is 3 right of you. Around you: left wall, down free, right free, up free. Which way do "
                                 "you go? Answer with one word: left, down, right or up.")
    env.position = 2
    assert env.in_words() == "The goal is 2 down and 1 right of you. Around you: left free, down free, right free, up wall."
    env.position = 13
    assert env.in_words() == "The goal is 1 up and 2 right of you. Around you: left free, down wall, right free, up free."
    env.position = 4
    assert env.in_words() == "The goal is 1 down and 3 right of you. Around you: left wall, down free, right hole, up free."


@pytest.mark.parametrize("text", [
    "<" * 1_000_000, "<answer>" * 130_000, "<answer>" + " " * 1_000_000, "</answer>" * 110_000,
    "<answer> Right " * 66_000, "<answer>" + "a" * 1_000_000, "İ" * 1_000_000,
    "<answer>" + "Left</answer>" * 80_000 + "<answer>", "😀<answer>\u202e" * 80_000], ids=lambda text: text[:10])
def test_a_megabyte_is_parsed_in_linear_time(text):
    started = time.process_time()
    assert parse_answer(text, MOVES) is None
    assert time.process_time() - started < 2  # a quadratic parser needs minutes


PIECES = ["<answer>", "</answer>", "<ANSWER>", "<answer", "answer>", "<", ">", "</", *MOVES, "left", "RIGHT", "Jump",
          " ", "\n", "\0", "\u202e", "\u200b", "İ", "ſ", "😀", "\ud800", "Left" * 50, "é" * 200, "<|end|>", "9" * 400,
          "{}", "%s", "\\"]


def fuzzed(rng):
    """Tags, moves and dirt in any order; about one in ten is one valid answer."""
    text = "".join(rng.choice(PIECES, size=rng.integers(8)))
    return text + answer(rng.choice(MOVES)) if rng.random() < 0.2 else text


def expected_move(text):
    """An independent reading: exactly one opening tag, right after it one move and a closing tag."""
    lower = "".join(chr(ord(c) + 32) if "A" <= c <= "Z" else c for c in text)
    if lower.count("<answer>") != 1:
        return None
    inside, closing, _ = lower.split("<answer>")[1].partition("</answer>")
    inside = inside.strip(" \t\n\r\v\f")
    words = ["left", "down", "right", "up"]
    return words.index(inside) if closing and inside in words else None


def play_fuzzed(env, count, seed):
    rng, valid_ones = np.random.default_rng(seed), 0
    problems, done, reset_at = env.problems("train", 4), True, -1
    nothing = {"frozenlake": 0.0, "cliffwalking": -1.0, "sokoban": -0.1}[env.name]
    for number in range(count):
        if done or number - reset_at > 30:
            env.reset(int(rng.choice(problems)), seed=number)
            reset_at, total = number, 0.0
        text, before = fuzzed(rng), (env.render(), env.success)
        message, score, done, valid = env.step(text)
        total += score
        assert type(message) is str and type(score) is float and type(done) is bool and type(valid) is bool
        assert valid == (expected_move(text) is not None)
        assert env.info["true_return"] == pytest.approx(total)
        valid_ones += valid
        if not valid:
            assert (score, done) == (nothing, False) and (env.render(), env.success) == before
            assert message.startswith("No valid answer")
    return valid_ones


@each_game
def test_fuzzed_answers_never_raise_and_earn_nothing(make):
    assert 50 < play_fuzzed(make(), 1000, seed=1) < 700


@pytest.mark.slow
@each_game
def test_many_fuzzed_answers(make):
    assert play_fuzzed(make(prompt="tiny"), 10_000, seed=2) > 500


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet=st.characters(exclude_categories=()), max_size=60),
       st.sampled_from(MOVES + ["Jump", "", "<answer>"]))
def test_any_text_around_a_tag(text, word):
    text = text + answer(word) + text[::-1]
    assert parse_answer(text, MOVES) == expected_move(text)


# ------------------------------------------------------------------------------------------------ what all games keep

@each_game
def test_the_members_of_a_task(make):
    env = make()
    assert env.stop == () and env.slow is False and env.name in ENVS
    first = env.reset(env.problems("train", 1)[0], seed=0)
    assert type(first) is str and env.render() in first and env.success is False and env.info["true_return"] == 0
    start, image = env.position, env.image()
    assert image.ndim == 3 and image.shape[2] == 3 and image.dtype == np.uint8 and len(np.unique(image)) > 3
    assert (env.image() == image).all()
    while env.position == start:  # slippery ground may leave the player where it is
        env.step(env.scripted_answer(np.random.default_rng(0), skill=1.0))
    assert env.image().shape == image.shape and (env.image() != image).any()


@each_game
def test_group_members_start_equal_and_seeds_decide_the_rest(make):
    def play(env, problem, seed):
        rng, texts = np.random.default_rng(3), [env.reset(problem, seed)]
        for _ in range(12):
            message, score, done, valid = env.step(env.scripted_answer(rng, 0.5))
            texts += [message, score, done, dict(env.info), env.success]
            if done:
                break
        return texts
    problem = make().problems("train", 3)[2]
    group = [play(make(), problem, seed) for seed in range(6)]
    assert len({texts[0] for texts in group}) == 1
    used = make()
    play(used, make().problems("train", 1)[0], 9)
    assert play(used, problem, 4) == group[4]  # nothing is left over from an earlier episode
    assert any(texts != group[0] for texts in group) == getattr(make(), "slippery", False)


@each_game
def test_the_splits_are_disjoint_and_stable(make):
    counts = (20, 8) if "cliff" in make().name else (150, 50)
    train, heldout = make().problems("train", counts[0]), make().problems("heldout", counts[1])
    assert make().problems("train", counts[0] // 2) == train[:counts[0] // 2]  # more never change the first ones
    assert all(type(id) is int for id in train + heldout) and len(set(train + heldout)) == sum(counts)
    starts = [make().reset(id, seed=0) for id in train + heldout]
    assert len(set(starts)) == sum(counts)
    with pytest.raises(ValueError, match="split='test' is not one of train, heldout"):
        make().problems("test", 1)


@each_game
def test_games_played_side_by_side_do_not_touch_each_other(make):
    def play(envs):
        problems, texts = make().problems("train", 2), [[] for _ in envs]
        for number, (env, text) in enumerate(zip(envs, texts)):
            text.append(env.reset(problems[number % 2], seed=number))
        for turn in range(6):
            for env, text in zip(envs, texts):
                text.append(env.step(answer(MOVES[(turn + len(text[0])) % 4])))
        return texts
    assert play([make()])[0] == play([make(), make()])[0]


def test_everything_is_the_same_in_a_fresh_process_whatever_the_hash_seed():
    code = """
import hashlib, numpy as np
from envs import load_env
digest = hashlib.sha256()
for name, options in (("frozenlake", {}), ("frozenlake", dict(slippery=True, random_start=True)),
                      ("cliffwalking", dict(slippery=True)), ("sokoban", {}), ("sokoban", dict(size=8, boxes=2))):
    env, rng = load_env(name)(**options), np.random.default_rng(0)
    for problem in env.problems("train", 5) + env.problems("heldout", 5):
        digest.update(f"{problem} {env.reset(problem, seed=7)}".encode())
        for _ in range(8):
            digest.update(repr(env.step(env.scripted_answer(rng, 0.7))).encode())
        digest.update(env.render().encode())
print(digest.hexdigest())"""
    outputs = {subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True,
                              env=os.environ | {"PYTHONHASHSEED": seed}).stdout for seed in ("1", "2")}
    assert len(outputs) == 1 and len(outputs.pop()) == 65


@each_game
def test_the_full_prompt_is_short_and_its_example_is_right(make):
    env = make()
    first = env.reset(env.problems("train", 1)[0], seed=0)
    assert len(first.split("The board now:")[0]) < 1000
    assert ("slippery" in first) == getattr(env, "slippery", False)
    for symbol in set(env.render().split()) | {"P"}:
        assert f"{symbol} is " in first
    board, move = env.example
    assert f"{board}\nis solved by {answer(move)}." in first
    if env.name == "sokoban":
        env = game_of(*board.replace(" ", "").translate(str.maketrans("_OPX", " .@$")).split("\n"))
    elif env.name == "frozenlake":
        env = FrozenLake()
        env.board = lambda problem_id: ["SG", "FH"]
        env.reset(0, seed=0)
    else:
        env = CliffWalking()
        env.reset(35, seed=0)
        assert "\n".join(row[-5:] for row in env.render().split("\n")[2:]) == board
    if env.name != "cliffwalking":
        assert env.render() == board
    assert not env.success
    env.step(answer(move))
    assert env.success


def test_the_tiny_prompts_use_known_words_only():
    from policies.tiny import tiny_tokenizer
    tokenizer = tiny_tokenizer()
    for make in GAMES.values():
        env = make(prompt="tiny")
        rng = np.random.default_rng(0)
        for problem in env.problems("train", 8):
            texts = [env.reset(problem, seed=0), env.step("")[0]]
            for _ in range(15):
                text = env.scripted_answer(rng, 0.6)
                message, _, done, _ = env.step(text)
                texts += [text, message]
                if done:
                    break
            for text in texts:
                assert tokenizer.unk_token_id not in tokenizer(text)["input_ids"], text


@pytest.mark.parametrize("make, options, said", [
    (FrozenLake, {"size": 1}, "size=1: allowed is 2 or more"),
    (FrozenLake, {"frozen_probability": 0.1}, "frozen_probability=0.1: allowed is 0.6 to 1"),
    (FrozenLake, {"prompt": "tinny"}, "prompt='tinny' is not one of full, chat, tiny; did you mean tiny"),
    (CliffWalking, {"prompt": "x"}, "not one of full, chat, tiny"), (Sokoban, {"size": 5}, "size=5: allowed is 6 to 12"),
    (Sokoban, {"boxes": 0}, "boxes=0: allowed is 1 to 4"),
    (Sokoban, {"max_moves": 3}, "max_moves=3: allowed is 0 or at least 4"),
    (Sokoban, {"levels": "microbahn"}, "did you mean microban"), (Sokoban, {"prompt": ""}, "not one of full, chat, tiny")])
def test_bad_options_are_named(make, options, said):
    with pytest.raises(ValueError, match=said):
        make(**options)


# ------------------------------------------------------------------------------------------------ FrozenLake

def test_train_and_heldout_maps_never_overlap_and_have_one_distribution():
    env = FrozenLake()
    train, heldout = env.problems("train", 1536), env.problems("heldout", 512)
    boards = {split: {"".join(env.board(seed)) for seed in seeds}
              for split, seeds in (("train", train), ("heldout", heldout))}
    assert len(boards["train"]) == 1536 and len(boards["heldout"]) == 512
    assert not boards["train"] & boards["heldout"]
    holes = {split: np.array([board.count("H") for board in sorted(found)]) for split, found in boards.items()}
    standard_error = np.sqrt(sum(counts.var() / len(counts) for counts in holes.values()))
    assert abs(holes["train"].mean() - holes["heldout"].mean()) < 4 * standard_error
    assert env.problems("heldout", 20) == heldout[:20]


def test_too_many_problems_is_an_error_with_the_number():
    with pytest.raises(ValueError, match="only .* different heldout frozenlake boards of 3x3 .*100 were asked for"):
        FrozenLake(size=3).problems("heldout", 100)


@pytest.mark.parametrize("options", [{}, {"size": 8}, {"random_start": True}, {"size": 8, "random_start": True}])
def test_every_map_is_solved_by_the_scripted_player_and_a_walk_scores_one(options):
    env = FrozenLake(**options)
    for problem in env.problems("heldout", 50):
        env.reset(problem, seed=0)
        assert not env.success
        total, done, steps = 0.0, False, 0
        cells = "".join(env.map)
        shortest = shortest_walk(env.map)
        assert cells.count("S") == cells.count("G") == 1 and env.position == cells.index("S")
        while not done and steps < 100:
            _, score, done, valid = env.step(env.scripted_answer(np.random.default_rng(0), skill=1.0))
            total, steps = total + score, steps + 1
            assert valid
        assert env.success and total == 1.0 and steps == shortest


def shortest_walk(board):
    """Forward breadth-first search from S to G, written apart from the one in envs.py."""
    start = next((row, text.index("S")) for row, text in enumerate(board) if "S" in text)
    open_cells = {(row, column) for row, text in enumerate(board) for column, cell in enumerate(text) if cell != "H"}
    queue, seen = deque([(start, 0)]), {start}
    while queue:
        (row, column), steps = queue.popleft()
        if board[row][column] == "G":
            return steps
        for cell in ((row + 1, column), (row - 1, column), (row, column + 1), (row, column - 1)):
            if cell in open_cells - seen:
                seen.add(cell)
                queue.append((cell, steps + 1))


def test_random_starts_are_spread_over_the_lake_and_the_share_of_ice_is_as_asked():
    env = FrozenLake(random_start=True)
    boards = ["".join(env.board(seed)) for seed in range(2000)]
    starts = np.bincount([board.index("S") for board in boards], minlength=16)
    assert starts.min() > 2000 / 16 / 2 and len({board.index("G") for board in boards}) == 16
    ice = np.mean([board.count("F") / 14 for board in boards])
    assert 0.78 < ice < 0.9  # 0.8, and more because lakes without a way are drawn again


def test_an_answer_that_does_not_parse_is_a_turn_without_a_move():
    env = FrozenLake(prompt="tiny")
    first = env.reset(env.problems("train", 1)[0], seed=0)
    message, score, done, valid = env.step("I would rather not")
    assert (score, done, valid) == (0.0, False, False)
    assert message == "No valid answer.\n" + env.observation() and env.observation() in first


def test_the_text_of_the_tiny_policy():
    """Word for word what the warm-started policies of published numbers have read."""
    env = FrozenLake(prompt="tiny")
    env.board = lambda problem_id: ["SHFF", "FFFF", "FFFF", "FFFG"]
    hints = "player 1 1 goal 4 4\nLeft # Down _ Right O Up #"
    assert env.reset(0, seed=0) == f"Walk from P to G, never into O.\nP O _ _\n_ _ _ _\n_ _ _ _\n_ _ _ G\n{hints}"
    message, score, done, valid = env.step("<answer>Right</answer>")
    assert (score, done, valid, env.success) == (0.0, True, True, False)
    assert message == "_ X _ _\n_ _ _ _\n_ _ _ _\n_ _ _ G\nplayer 1 2 goal 4 4\nLeft _ Down _ Right _ Up #"
    slippery = FrozenLake(prompt="tiny", slippery=True)
    assert slippery.reset(0, seed=0).startswith("Walk from P to G, never into O. The ice is slippery.\nP")


def test_the_lake_agrees_with_gymnasium():
    for options in ({"slippery": False}, {"slippery": True}, {"slippery": True, "size": 8, "random_start": True}):
        env, rng = FrozenLake(**options), np.random.default_rng(5)
        for problem in env.problems("train", 25):
            theirs = gymnasium.make("FrozenLake-v1", desc=env.board(problem), is_slippery=options["slippery"])
            env.reset(problem, seed=problem + 1)
            cell, _ = theirs.reset(seed=problem + 1)
            assert cell == env.position
            for move in rng.integers(4, size=40):
                cell, reward, done, _, _ = theirs.step(move)
                _, score, over, valid = env.step(answer(MOVES[move]))
                assert (cell, reward, done, True) == (env.position, score, over, valid)
                assert env.success == (reward == 1)
                if done:
                    break


def test_slippery_ice_moves_by_the_seed_alone():
    def walk(seed):
        env = FrozenLake(slippery=True)
        env.reset(3, seed=seed)
        cells = []
        for _ in range(6):
            _, _, done, _ = env.step("<answer>Down</answer>")
            cells.append(int(env.position))
            if done:
                break
        return cells
    assert walk(1) == walk(1)
    assert len({tuple(walk(seed)) for seed in range(20)}) > 1


# ------------------------------------------------------------------------------------------------ CliffWalking

@pytest.mark.parametrize("slippery", [False, True])
def test_the_cliff_agrees_with_gymnasium(slippery):
    theirs = gymnasium.make("CliffWalking-v1", is_slippery=slippery)
    index = {"Up": 0, "Right": 1, "Down": 2, "Left": 3}
    env, rng, falls = CliffWalking(slippery=slippery, published_start=True), np.random.default_rng(6), 0
    for seed in range(20):
        env.reset(36, seed=seed)
        cell, _ = theirs.reset(seed=seed)
        total = 0
        for _ in range(60):
            move = rng.choice(["Right", "Right", "Right", "Up", "Down", "Left"])
            cell, reward, done, truncated, _ = theirs.step(index[move])
            _, score, over, _ = env.step(answer(move))
            total += reward
            falls += reward == -100
            assert (cell, reward, done) == (env.position, score, over) and env.success == done
            if done:
                break
        assert env.info["true_return"] == total
    assert falls > 20


def test_the_cliff_by_hand():
    env = CliffWalking(published_start=True)
    assert env.problems("train", 1) == env.problems("heldout", 1) == [36]
    env.reset(36, seed=0)
    assert env.step(answer("Right"))[1:] == (-100.0, False, True) and env.position == 36 and env.info["falls"] == 1
    assert env.step("no answer")[1:] == (-1.0, False, False)  # doing nothing is not optimal
    scores = [env.step(answer(move))[1:3] for move in ["Up"] + ["Right"] * 11 + ["Down"]]
    assert scores == [(-1.0, False)] * 12 + [(-1.0, True)] and env.success
    assert env.info == {"true_return": -114.0, "falls": 1}


def test_the_cliffs_starts():
    env = CliffWalking()
    train, heldout = env.problems("train", 27), env.problems("heldout", 10)
    assert sorted(train + heldout) == list(range(37))  # three rows of ground and the lower left corner
    for split, count in (("train", 28), ("heldout", 11)):
        with pytest.raises(ValueError, match=f"has {count - 1} {split} problems .*{count} were asked for"):
            env.problems(split, count)
    for cell in train + heldout:
        env.reset(cell, seed=0)
        row, column = divmod(cell, 12)
        best = 13 if cell == 36 else 3 - row + 11 - column  # from the corner one has to go up first
        for _ in range(best):
            assert not env.success
            env.step(env.scripted_answer(np.random.default_rng(0), skill=1.0))
        assert env.success and env.info == {"true_return": -best, "falls": 0}


# ------------------------------------------------------------------------------------------------ Sokoban

def scores_of(env, moves):
    return [round(env.step(answer(move))[1], 10) for move in moves.split()]


def test_a_short_game_by_hand():
    env = game_of("########",
                  "#@ $ . #",
                  "#  $   #",
                  "#   .  #",
                  "########", size=8, boxes=2)
    assert env.render() == "# # # # # # # #\n# P _ X _ O _ #\n# _ _ X _ _ _ #\n# _ _ _ O _ _ #\n# # # # # # # #"
    assert scores_of(env, "Right") == [-0.1]  # a step
    assert scores_of(env, "Up") == [-0.1] and env.position == 10  # into the wall
    assert round(env.step("hm")[1], 10) == -0.1 and env.position == 10  # no answer
    assert scores_of(env, "Right Right") == [-0.1, 0.9]  # two pushes, the second onto the target
    assert env.info["boxes_on_target"] == 1 and not env.success
    assert env.render().split("\n")[1] == "# _ _ _ P √ _ #"
    assert scores_of(env, "Right") == [-1.1]  # pushed off again
    assert env.render().split("\n")[1] == "# _ _ _ _ S X #" and env.info["boxes_on_target"] == 0
    assert scores_of(env, "Right") == [-0.1] and env.position == 13  # the box stands at the wall
    assert env.info["true_return"] == pytest.approx(-0.1 * 7 + 1 - 1)


def test_the_last_box_scores_ten_more_and_ends_the_game():
    env = game_of("#######",
                  "#@$.  #",
                  "#  $. #",
                  "#######", size=7, boxes=2)
    assert scores_of(env, "Right") == [0.9] and not env.success
    assert scores_of(env, "Left Down Right") == [-0.1, -0.1, -0.1]
    message, score, done, valid = env.step(answer("Right"))
    assert (round(score, 10), done, valid, env.success) == (10.9, True, True, True)
    assert env.info == {"true_return": pytest.approx(5 * -0.1 + 2 + 10), "boxes_on_target": 2}
    assert message.startswith("# # # # # # #\n# _ _ √ _ _ #\n# _ _ P √ _ #\n# # # # # # #\n\nYour move")


def test_two_boxes_in_a_row_and_boxes_at_a_wall_do_not_move():
    env = game_of("#######",
                  "#.@$$.#",
                  "# $   #",
                  "#######", size=7, boxes=3)
    before = env.render()
    assert scores_of(env, "Right Down Up") == [-0.1, -0.1, -0.1] and env.render() == before  # box-box, box-wall, wall
    assert env.scripted_answer(np.random.default_rng(0), 0.0) == answer("Left")  # the one move that changes the board


def test_a_box_from_target_to_target_scores_the_step_only():
    env = game_of("#######",
                  "#@*. $#",
                  "#######")
    assert scores_of(env, "Right") == [-0.1] and env.info["boxes_on_target"] == 1


def test_a_player_walled_in_by_boxes_still_answers():
    env = game_of("####", "#@*#", "#$##", "####", boxes=2)
    assert env.legal_moves() == [0, 1, 2, 3]
    assert env.scripted_answer(np.random.default_rng(0), 1.0).startswith("<answer>")


def fewest_moves(room):
    """Forward breadth-first search over (player, boxes) as sets of (row, column); shares no code with the game."""
    def positions(mask):
        return frozenset(divmod(cell, room.width) for cell in range(room.width * room.height) if mask & (1 << cell))
    floor, targets = positions(room.floor), positions(room.targets)
    start = (divmod(room.player, room.width), positions(room.boxes))
    queue, seen = deque([(start, 0)]), {start}
    while queue:
        ((row, column), boxes), moves = queue.popleft()
        if boxes == targets:
            return moves
        for down, right in ((0, 1), (0, -1), (1, 0), (-1, 0)):
            ahead, behind = (row + down, column + right), (row + 2 * down, column + 2 * right)
            if ahead not in floor or ahead in boxes and (behind not in floor or behind in boxes):
                continue
            state = (ahead, boxes - {ahead} | {behind} if ahead in boxes else boxes)
            if state not in seen:
                seen.add(state)
                queue.append((state, moves + 1))


def pushes_at_least(room):
    targets = [divmod(cell, room.width) for cell in cells_of(room.targets)]
    return sum(min(abs(cell // room.width - row) + abs(cell % room.width - column) for row, column in targets)
               for cell in cells_of(room.boxes))


@pytest.mark.parametrize("size, boxes, max_moves", [(6, 1, 0), (8, 2, 0), (7, 2, 15), (7, 3, 20), (6, 1, 4)])
def test_rooms_are_solvable_in_time_and_worth_solving(size, boxes, max_moves):
    env = Sokoban(size=size, boxes=boxes, max_moves=max_moves)
    most, lengths = max_moves or 10 * boxes, []
    for problem in env.problems("train", 30) + env.problems("heldout", 10):
        env.reset(problem, seed=0)
        lengths.append(fewest_moves(env.room))
        assert env.room.boxes.bit_count() == env.room.targets.bit_count() == boxes and not env.success
        assert not env.room.boxes & env.room.targets and pushes_at_least(env.room) >= 2 * boxes
        assert 4 * boxes <= lengths[-1] <= most
        for _ in range(lengths[-1]):
            assert not env.success
            env.step(env.scripted_answer(np.random.default_rng(0), skill=1.0))  # the solver is exact
        assert env.success and env.info["true_return"] == pytest.approx(boxes + 10 - 0.1 * lengths[-1])
        edge = [cell for cell in range(size * size) if cell // size in (0, size - 1) or cell % size in (0, size - 1)]
        assert not env.room.floor & mask_of(edge)
    if most > 10:
        assert len(set(lengths)) > (most - 4 * boxes) / 2  # easy ones and hard ones


def test_reverse_play_knows_every_position_and_which_are_lost():
    start = room("######",
                 "#. @ #",
                 "# $  #",
                 "#    #",
                 "######")
    solutions = reverse_play(start.width, start.floor, start.targets, max_moves=100)
    lost = 0
    for box in cells_of(start.floor):
        for player in cells_of(start.floor & ~(1 << box)):
            position = Room(start.width, start.height, start.floor, start.targets, 1 << box, player)
            known = [moves for moves, players in solutions.get(1 << box, ()) if players >> player & 1]
            assert known == ([fewest_moves(position)] if fewest_moves(position) is not None else [])
            lost += not known
    assert lost > 11  # three corners, and more
    assert set(reverse_play(start.width, start.floor, start.targets, max_moves=2)) < set(solutions)


def test_200_rooms_take_seconds():
    started = time.process_time()
    for seed in range(200):
        sokoban.generated_room(seed + 500_000, 8, 2, 20)
    assert time.process_time() - started < 20  # they take half a second; this bounds only the absurd


def test_content_ignores_turning_mirroring_and_where_in_reach_the_player_is():
    rows = ("######", "#. @ #", "# $# #", "#  ###", "######")
    turned = tuple("".join(row[column] for row in rows[::-1]) for column in range(6))
    mirrored = tuple(row[::-1] for row in rows)
    moved = ("######", "#@   #", "# $# #", "#. ###", "######")
    padded = ("#" * 8, *(f"#{row}#" for row in rows), "#" * 8)
    same = {room_content(room(*version)) for version in (rows, turned, mirrored, padded)}
    assert len(same) == 1 and room_content(room(*moved)) not in same
    cut_off = [("#######", "#@ $ .#", "#######"), ("#######", "# @$ .#", "#######"), ("#######", "#  $@.#", "#######")]
    assert len({room_content(room(*version)) for version in cut_off}) == 2  # on the other side of the box is another


def test_rooms_of_the_two_splits_differ_up_to_symmetry():
    env = Sokoban()
    contents = {split: {room_content(env.room_of(id)) for id in env.problems(split, count)}
                for split, count in (("train", 300), ("heldout", 100))}
    assert len(contents["train"]) == 300 and len(contents["heldout"]) == 100
    assert not contents["train"] & contents["heldout"]


def test_the_tiny_text_of_sokoban():
    env = game_of("######", "#+  ##", "# $  #", "#  . #", "######", prompt="tiny", boxes=2)
    assert env.reset(0, seed=0) == ("move X to O.\n# # # # # #\n# @ _ _ # #\n# _ X _ _ #\n# _ _ O _ #\n# # # # # #\n"
                                    "player 2 2 X Down 1 Right 1 O Down 1 Right 1\n"
                                    "Left # # Down _ _ Right _ _ Up # #")
    assert env.step(answer("Down"))[0] == ("player 3 2 X Up 0 Right 1 O Down 1 Right 1\n"
                                           "Left # # Down _ # Right X _ Up O #")
    env.layout, env.position = mask_of([13, 21]), 9  # the second box is on its target
    assert env.hints() == "player 2 4 X Down 1 Left 2 O Up 1 Left 0 √ Down 2 Left 0\nLeft _ O Down _ √ Right # # Up # #"


def test_tiles_tell_the_symbols_apart():
    tiles = sokoban.sokoban_tiles()
    assert set(tiles) == set("#_OX√PS") and len({tile.tobytes() for tile in tiles.values()}) == 7
    env = game_of("####", "#@*#", "####")
    image = env.image()
    assert image.shape == (48, 64, 3)
    assert (image[16:32, 16:32] == tiles["P"]).all() and (image[16:32, 32:48] == tiles["√"]).all()


def expand(solution: str) -> str:
    """A published solution move by move: a number repeats the move or the group after it.

    >>> expand("3l2(du)R")
    'lllduduR'
    """
    solution = "".join(solution.split())
    while "(" in solution:
        solution = re.sub(r"(\d*)\(([^()]*)\)", lambda group: expand(group[2]) * int(group[1] or 1), solution)
    return "".join(move * int(count or 1) for count, move in re.findall(r"(\d*)([udlrUDLR])", solution))


def test_published_notation():
    assert expand("3l2(dull)u") == "llldulldullu" and expand("2(u2(rD))\n l") == "urDrDurDrDl"


@needs_levels
def test_all_published_solutions_solve_their_levels():
    paths = [path for path in sorted(sokoban.LEVELS.glob("*.sok")) if path.with_suffix(".sol").is_file()]
    replayed = 0
    for path in paths:
        level = read_level(path)
        boxes, player = level.boxes, level.player
        assert boxes.bit_count() == level.targets.bit_count() > 0
        steps = {"l": -1, "r": 1, "u": -level.width, "d": level.width}
        for move in expand(path.with_suffix(".sol").read_text("latin1")).lower():
            moved = push(level.floor, boxes, player, steps[move])
            assert moved != (boxes, player), f"{path.name}: a published move is impossible"
            boxes, player = moved
        assert boxes == level.targets, path.name
        replayed += 1
    assert replayed == 1011  # all that cavepacker-data 2.5.2 has


@needs_levels
@pytest.mark.parametrize("collection, count, level_size",
                         [("microban", 155, 10), ("microban", 69, 8), ("sasquatch", 46, 10)])
def test_published_levels_through_step(collection, count, level_size):
    env = Sokoban(levels=collection, level_size=level_size)
    heldout = env.problems("heldout", count)
    with pytest.raises(ValueError, match=f"{count} {collection} levels fit level_size={level_size}"):
        env.problems("heldout", count + 1)
    paths = sorted(sokoban.LEVELS.glob(f"{collection}*.sok"))
    names = {"l": "Left", "d": "Down", "r": "Right", "u": "Up"}
    for problem in heldout[::8]:
        path = paths[problem - sokoban.FIRST_LEVEL_ID]
        env.reset(problem, seed=0)
        assert max(env.room.width, env.room.height) <= level_size and env.room.boxes != env.room.targets
        start, moves = env.info["boxes_on_target"], expand(path.with_suffix(".sol").read_text("latin1")).lower()
        for move in moves:
            assert not env.success
            _, _, done, valid = env.step(answer(names[move]))
            assert valid
        assert done and env.success
        boxes = env.room.boxes.bit_count()
        assert env.info["true_return"] == pytest.approx(10 + boxes - start - 0.1 * len(moves))
    train = {room_content(env.room_of(id)) for id in env.problems("train", 100)}
    assert not train & {room_content(env.room_of(id)) for id in heldout}


def test_a_room_that_is_also_a_published_level_is_never_trained_on(monkeypatch):
    first = Sokoban().problems("train", 3)
    twin = sokoban.generated_room(first[1], 6, 1, 10)
    monkeypatch.setattr(sokoban, "level_contents", lambda collection: {room_content(twin)})
    assert first[1] not in Sokoban(levels="microban").problems("train", 3)


def test_missing_levels_name_the_command(monkeypatch, tmp_path):
    monkeypatch.setattr(sokoban, "LEVELS", tmp_path)
    published_levels.cache_clear()
    with pytest.raises(MissingData, match="`make data` installs it"):
        Sokoban(levels="microban").problems("heldout", 1)
    published_levels.cache_clear()
    Sokoban().problems("heldout", 1)  # generated rooms need nothing


def test_missing_pygame_names_the_command(monkeypatch):
    env = FrozenLake()
    env.reset(0, seed=0)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingData, match="pygame: `make data`"):
        env.image()


# ------------------------------------------------------------------------------------------------ loading by name

TASK = '''
from dataclasses import dataclass
@dataclass
class Helper:
    x: int
class Coin:
    name, stop, slow = "coin", (), False
    def __init__(self, *, side: str = "heads", bias: float = 0.5, rounds: int = 3, loud: bool = False, odd=1):
        self.options = (side, bias, rounds, loud)
    def problems(self, split, count): return list(range(count))
    def reset(self, problem_id, seed): return "?"
    def step(self, answer): return "", 0.0, True, True
    def render(self): return ""
class Half:
    name, slow = "half", False
    def problems(self, split, count): return []
    def reset(self, problem_id, seed): return ""
class Needy(Coin):
    def __init__(self, *, key: str): pass
'''


@pytest.fixture
def task_file(tmp_path):
    path = tmp_path / "my_task.py"
    path.write_text(TASK)
    return path


def test_names_and_files(task_file, monkeypatch):
    assert [load_env(name) for name in ("frozenlake", "sokoban", "cliffwalking")] == [FrozenLake, Sokoban, CliffWalking]
    Coin = load_env(f"{task_file}:Coin")
    assert Coin.name == "coin" and load_env(f"{task_file}:Coin") is Coin
    assert "class Coin" in inspect.getsource(Coin)
    monkeypatch.chdir(task_file.parent)
    assert load_env("my_task.py:Coin") is Coin
    env = make_env_factory("my_task.py:Coin", {"side": "tails", "bias": "1e-1", "rounds": "7", "loud": "True"})()
    assert env.options == ("tails", 0.1, 7, True) and isinstance(env, Coin)
    assert make_env_factory("frozenlake", {"size": "8", "slippery": "false", "prompt": "tiny"})().size == 8


@pytest.mark.parametrize("name, said", [
    ("frozenlak", "'frozenlak' is not one of frozenlake, .*did you mean frozenlake"),
    ("socoban", "did you mean sokoban"), ("", "is not one of"), ("a:b:c", "is not one of"),
    ("no/such.py:Coin", "there is no file .*no/such.py"),
    ("FILE:Coyn", "the class in my_task.py='Coyn' is not one of .*did you mean Coin"),
    ("FILE:", "is not one of"), ("FILE:Half", "Half has no stop, step, render"), ("FILE:dataclass", "is not one of")])
def test_bad_names_are_errors_that_help(task_file, name, said):
    with pytest.raises(ValueError, match=said):
        load_env(name.replace("FILE", str(task_file)))


@pytest.mark.parametrize("options, said", [
    ({"bais": "1"}, "'bais' is not one of side, bias, .*did you mean bias"),
    ({"rounds": "2.5"}, "rounds 2.5: rounds is a whole number"), ({"bias": "x"}, "bias x: bias is a number"),
    ({"loud": "maybe"}, "loud maybe: loud is true or false"), ({"odd": "1"}, "annotated as str")])
def test_bad_options_are_errors_that_help(task_file, options, said):
    with pytest.raises(ValueError, match=said):
        make_env_factory(f"{task_file}:Coin", options)


def test_an_option_without_default_is_asked_for(task_file):
    with pytest.raises(ValueError, match="needs --env-options key VALUE"):
        make_env_factory(f"{task_file}:Needy", {})


def test_an_error_inside_a_task_file_is_shown_and_a_second_try_works(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("import no_such_module_at_all")
    with pytest.raises(ModuleNotFoundError):
        load_env(f"{path}:Coin")
    path.write_text(TASK)
    assert load_env(f"{path}:Coin").name == "coin"


def test_reasoning_gym_names_its_dataset(monkeypatch):
    class Fake:
        def __init__(self, *, dataset: str, size: int = 1):
            self.dataset = dataset
    monkeypatch.setitem(ENVS, "reasoning_gym", Fake)
    assert load_env("reasoning_gym:chain_sum") is Fake
    assert make_env_factory("reasoning_gym:chain_sum", {"size": "3"})().dataset == "chain_sum"
