"""gymnasium's CliffWalking-v1."""
import copy
import functools

import numpy as np
from gymnasium.envs.toy_text.cliffwalking import CliffWalkingEnv

from envs import FrozenLake
from episode import one_of, require
from tasks.boards import need_pygame


@functools.cache
def cliff_walking(slippery: bool) -> CliffWalkingEnv:
    return CliffWalkingEnv(is_slippery=slippery)  # its table of moves takes milliseconds


class CliffWalking(FrozenLake):
    """gymnasium's CliffWalking-v1: -1 a turn, -100 into the cliff and back to the lower left corner.

    There is one map, so a problem is the cell to start from, its id 12 * row + column. By hash, 27 cells of safe ground
    are for training and 10 are held out: a held-out start is new, the map is not. With `published_start` the only
    problem, both train and held out, is gymnasium's start, the lower left corner. A turn without a move costs 1 too.
    """
    name, ground, danger, tiny_board = "cliffwalking", "ground", "cliff", "never"
    role = "You are walking along a cliff."
    legend = "P is you, _ is ground, O is the cliff, G is the goal, √ is you on the goal"
    example = ("_ _ P\nO O G", "Down")
    map = ["F" * 12] * 3 + ["S" + "H" * 10 + "G"]

    def __init__(self, *, slippery: bool = False, published_start: bool = False, prompt: str = "full"):
        self.slippery, self.published_start = slippery, published_start
        self.prompt = one_of("prompt", prompt, self.prompts)

    def problems(self, split: str, count: int) -> list[int]:
        one_of("split", split, ("train", "heldout"))
        safe = [cell for cell, symbol in enumerate("".join(self.map)) if symbol in "SF"]
        cells = [36] if self.published_start else [cell for cell in safe if self.split_of(f"cell {cell}") == split]
        require(count <= len(cells), f"cliffwalking has {len(cells)} {split} problems (cells to start from), {count} "
                "were asked for")
        return cells[:count]

    def start(self, problem_id: int, seed: int):
        self.game = copy.copy(cliff_walking(self.slippery))
        self.game.reset(seed=seed)
        self.game.s = self.position = problem_id
        self.info["falls"] = 0

    def image(self) -> np.ndarray:
        need_pygame()
        self.game.render_mode = "rgb_array"
        return self.game.render()

    def rules(self) -> str:
        return ("Reach the goal in few turns. A move goes one cell; at the edge you stay where you are. Every turn "
                f"costs 1; a move into the cliff costs 100 and takes you to the lower left corner.{self.slipping()}")

    def play(self, move: int | None) -> tuple[float, bool]:
        if move is None:
            return -1.0, False
        self.position, score, done, _, _ = self.game.step([3, 2, 1, 0][move])  # gymnasium counts Up, Right, Down, Left
        self.success = bool(done)
        self.info["falls"] += int(score == -100)
        return float(score), bool(done)
