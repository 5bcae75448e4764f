import os
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT

from envs import FrozenLake, parse_answer

MOVES = ["Left", "Down", "Right", "Up"]


@pytest.mark.parametrize("text, move", [
    ("<answer>Right</answer>", 2), ("<answer> right </answer>", 2), ("well: <ANSWER>Up</ANSWER>!", 3),
    ("Right", None), ("", None), ("<answer>Right", None), ("Right</answer>", None), ("<answer>Jump</answer>", None),
    ("<answer></answer>", None), ("<answer>Right Right</answer>", None),
    ("<answer>Left</answer> <answer>Right</answer>", None),  # a list of answers is no answer
    ("<answer><answer>Right</answer>", None), ("<answer>\u202eRight</answer>", None), ("<" * 100_000, None)])
def test_parsing(text, move):
    assert parse_answer(text, MOVES) == move


def test_train_and_heldout_maps_never_overlap_and_have_one_distribution():
    env = FrozenLake()
    train, heldout = env.problems("train", 1536), env.problems("heldout", 512)
    boards = {split: {"".join(env.board(seed)) for seed in seeds} for split, seeds in (("train", train), ("heldout", heldout))}
    assert len(boards["train"]) == 1536 and len(boards["heldout"]) == 512
    assert not boards["train"] & boards["heldout"]
    holes = {split: np.array([board.count("H") for board in sorted(found)]) for split, found in boards.items()}
    standard_error = np.sqrt(sum(counts.var() / len(counts) for counts in holes.values()))
    assert abs(holes["train"].mean() - holes["heldout"].mean()) < 4 * standard_error
    assert env.problems("heldout", 20) == heldout[:20]  # more problems never change the first ones


def test_too_many_problems_is_an_error_with_the_number():
    with pytest.raises(ValueError, match="3x3 has only .* different heldout maps .*100 were asked for"):
        FrozenLake(size=3).problems("heldout", 100)


def test_every_map_is_solved_by_the_scripted_player_and_a_walk_scores_one():
    env = FrozenLake()
    for problem in env.problems("heldout", 50):
        env.reset(problem, seed=0)
        assert not env.success
        total, done, steps = 0.0, False, 0
        shortest = env.distances()[0]
        while not done:
            _, score, done, valid = env.step(env.scripted_answer(np.random.default_rng(0), skill=1.0))
            total, steps = total + score, steps + 1
            assert valid
        assert env.success and total == 1.0 and steps == shortest


def test_an_answer_that_does_not_parse_is_a_turn_without_a_move():
    env = FrozenLake()
    first = env.reset(env.problems("train", 1)[0], seed=0)
    message, score, done, valid = env.step("I would rather not")
    assert (score, done, valid) == (0.0, False, False)
    assert message == "No valid answer.\n" + env.observation() and env.observation() in first


def test_a_hole_ends_the_episode_without_a_score():
    env = FrozenLake()
    env.board = lambda problem_id: ["SHFF", "FFFF", "FFFF", "FFFG"]
    env.reset(0, seed=0)
    assert env.observation().endswith("player 1 1 goal 4 4\nLeft # Down _ Right O Up #")
    message, score, done, valid = env.step("<answer>Right</answer>")
    assert (score, done, valid, env.success) == (0.0, True, True, False)
    assert message.splitlines()[0] == "_ X _ _"


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


def test_the_same_maps_whatever_the_hash_seed():
    code = ("from envs import FrozenLake; env = FrozenLake(); ids = env.problems('heldout', 5); "
            "print(ids, env.reset(ids[0], seed=1))")
    outputs = {subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True,
                              env=os.environ | {"PYTHONHASHSEED": seed}).stdout for seed in ("1", "2")}
    assert len(outputs) == 1 and "player 1 1 goal 4 4" in outputs.pop()
