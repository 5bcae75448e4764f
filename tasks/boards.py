"""Lakes beyond their rules, which are in envs.py: the way to the goal, hints, maps that start anywhere, gymnasium's pictures."""
import functools
import os

import numpy as np
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv, generate_random_map
from PIL import Image

from tasks.sources import installed


def neighbour(cell: int, move: int, rows: int, columns: int) -> int:
    """The next cell in the direction of `BoardGame.moves[move]`, or `cell` itself at the edge."""
    row, column = divmod(cell, columns)
    row += (move == 1) - (move == 3)
    column += (move == 2) - (move == 0)
    return row * columns + column if 0 <= row < rows and 0 <= column < columns else cell


def distances_to_goal(board: list[str]) -> list[float]:
    """Moves from each cell to G around the holes H (breadth first), inf where there is no way."""
    cells, distance, moves = "".join(board), {}, 0
    wave = {cells.index("G")}
    while wave:
        distance |= dict.fromkeys(wave, moves)
        near = {near for cell in wave for near in neighbours(board, cell)}  # moves are symmetric: away from G is on the way to it
        wave = {cell for cell in near - distance.keys() if cells[cell] != "H"}
        moves += 1
    return [distance.get(cell, float("inf")) for cell in range(len(cells))]


def neighbours(board: list[str], position: int) -> list[int]:
    return [neighbour(position, move, len(board), len(board[0])) for move in range(4)]


def legal_moves(board: list[str], position: int) -> list[int]:
    return [move for move, cell in enumerate(neighbours(board, position)) if cell != position]


def best_moves(board: list[str], position: int) -> list[int]:
    distance, near, legal = distances_to_goal(board), neighbours(board, position), legal_moves(board, position)
    nearest = min(distance[near[move]] for move in legal)
    return [move for move in legal if distance[near[move]] == nearest]


def lake_hints(board: list[str], position: int, moves: list[str], cells: list[str]) -> str:
    """Where player and goal are (row, column), and what lies around the player (# is the edge); `cells` as they are shown. The
    board says it too, but so a tiny policy need not find P and count cells to see a hole."""
    columns = len(board[0])
    (row, column), (goal_row, goal_column) = (divmod(cell, columns) for cell in (position, "".join(board).index("G")))
    around = " ".join(f"{move} {'#' if cell == position else cells[cell]}"
                      for move, cell in zip(moves, neighbours(board, position)))
    return f"player {row + 1} {column + 1} goal {goal_row + 1} {goal_column + 1}\n{around}"


def lake_in_words(board: list[str], position: int, moves: list[str], danger: str) -> str:
    """What small chat models understand better than a drawn board: the way to the goal as the crow flies, and the cells around."""
    names = {"S": "free", "F": "free", "H": danger, "G": "goal"}
    cells, columns = "".join(board), len(board[0])
    (row, column), (goal_row, goal_column) = (divmod(cell, columns) for cell in (position, cells.index("G")))
    steps = {"down": goal_row - row, "up": row - goal_row, "right": goal_column - column, "left": column - goal_column}
    way = " and ".join(f"{count} {direction}" for direction, count in steps.items() if count > 0)
    around = [f"{move.lower()} {'wall' if cell == position else names[cells[cell]]}"
              for move, cell in zip(moves, neighbours(board, position))]
    return f"The goal is {way} of you. Around you: {', '.join(around)}."


def random_lake(size: int, frozen_probability: float, seed: int) -> list[str]:
    """A map that can be solved, its start and its goal anywhere."""
    rng = np.random.default_rng(seed)
    while True:
        cells = np.where(rng.random(size**2) < frozen_probability, "F", "H")
        start, goal = rng.choice(size**2, 2, replace=False)
        cells[start], cells[goal] = "S", "G"
        board = ["".join(row) for row in cells.reshape(size, size)]
        if distances_to_goal(board)[start] < float("inf"):
            return board


def need_pygame():
    """Pictures work without a screen; MissingData where pygame is not installed."""
    installed("pygame")
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")


@functools.lru_cache
def painter(size: int) -> FrozenLakeEnv:
    game = FrozenLakeEnv(desc=generate_random_map(size, seed=0), is_slippery=False, render_mode="rgb_array")
    game.reset()
    return game


def lake_picture(board: tuple[str, ...], position: int, cell_pixels: int) -> np.ndarray:
    """gymnasium's picture, 64 pixels a cell (fewer on lakes of more than 8 x 8), or its means over squares of pixels where
    `cell_pixels` is less."""
    need_pygame()
    return painted(board, position, cell_pixels).copy()


@functools.lru_cache(maxsize=4096)
def painted(board: tuple[str, ...], position: int, cell_pixels: int) -> np.ndarray:
    """The player looks down; drawing one takes a millisecond."""
    game = painter(len(board))
    game.desc, game.s = np.asarray(board, dtype="c"), position
    frame = game.render()
    size = cell_pixels * len(board)
    return frame if size >= len(frame) else np.asarray(Image.fromarray(frame).resize((size, size), Image.Resampling.BOX))
