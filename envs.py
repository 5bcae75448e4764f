"""Tasks: one small class each, with the same few methods. Text in, text out; no tokens and no tensors here.

    problems(split, count)      ids of `count` different problems of "train" or "heldout"; the two never share one
    reset(problem_id, seed)     start an episode; returns the first user message
    step(answer)                play the model's text; returns (next user message, score, done, valid)
    render()                    the state as text for people
    success                     whether the episode so far counts as solved
    scripted_answer(rng, skill) what a scripted player of that skill would answer (for the tiny policy's warm start)

`score` is the task's own reward. The format penalty for an answer that is not `valid` is added by `rollout.collect`.
"""
import hashlib
import re
from collections import deque

from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv, generate_random_map

HELDOUT_CLASSES = 4  # one class in four of the content hashes is held out: 4x4 has too few maps for one in eight
PATIENCE = 10_000  # map seeds without a new map before a task says that there are no more
ANSWER = re.compile(r"<answer>\s*([A-Za-z]{1,10})\s*</answer>", re.IGNORECASE)


def parse_answer(text: str, allowed: list[str]) -> int | None:
    """Index of the one allowed word inside the one <answer> tag of `text`; None when there is none or more than one.

    >>> parse_answer("I go <answer> down </answer>", ["Left", "Down"])
    1
    >>> parse_answer("<answer>Left</answer><answer>Down</answer>", ["Left", "Down"]) is None
    True
    """
    answers = ANSWER.findall(text)
    if len(answers) != 1 or text.lower().count("<answer>") != 1:
        return None
    words = [word.lower() for word in allowed]
    return words.index(answers[0].lower()) if answers[0].lower() in words else None


class FrozenLake:
    """gymnasium's FrozenLake-v1 on its seeded, solvable random maps. A problem id is the seed of its map."""

    name = "frozenlake"
    moves = ["Left", "Down", "Right", "Up"]  # gymnasium's order

    def __init__(self, size: int = 4, frozen_probability: float = 0.8, slippery: bool = False):
        self.size, self.frozen_probability, self.slippery = size, frozen_probability, slippery

    def board(self, problem_id: int) -> list[str]:
        return generate_random_map(size=self.size, p=self.frozen_probability, seed=int(problem_id))

    def split_of(self, board: list[str]) -> str:
        digest = hashlib.sha256("".join(board).encode()).digest()
        return "heldout" if digest[0] % HELDOUT_CLASSES == 0 else "train"

    def problems(self, split: str, count: int) -> list[int]:
        """The first `count` map seeds of the split, each with another map. Raises ValueError when there are fewer."""
        ids, seen, seed, last = [], set(), 0, 0
        while len(ids) < count:
            if seed - last > PATIENCE:
                raise ValueError(f"FrozenLake {self.size}x{self.size} has only {len(ids)} different {split} maps (no new one in "
                                 f"{PATIENCE} seeds), {count} were asked for: ask for fewer or for a larger map")
            board = self.board(seed)
            if self.split_of(board) == split and "".join(board) not in seen:
                seen.add("".join(board))
                ids.append(seed)
                last = seed
            seed += 1
        return ids

    def reset(self, problem_id: int, seed: int) -> str:
        self.map = self.board(problem_id)
        self.game = FrozenLakeEnv(desc=self.map, is_slippery=self.slippery)
        self.position, _ = self.game.reset(seed=int(seed))
        self.success = False
        ice = " The ice is slippery." if self.slippery else ""
        return f"Walk from P to G, never into O.{ice}\n{self.observation()}"

    def step(self, answer: str) -> tuple[str, float, bool, bool]:
        move = parse_answer(answer, self.moves)
        if move is None:  # a no-op turn, so that rambling is never better than walking
            return f"No valid answer.\n{self.observation()}", 0.0, False, False
        self.position, score, done, _, _ = self.game.step(move)
        self.success = bool(score > 0)
        return self.observation(), float(score), bool(done), True

    def render(self) -> str:
        """The board: P player, _ ice, O hole, G goal; X is the player in a hole and √ the player on the goal."""
        cells = [{"S": "_", "F": "_", "H": "O", "G": "G"}[cell] for row in self.map for cell in row]
        cells[self.position] = {"_": "P", "O": "X", "G": "√"}[cells[self.position]]
        return "\n".join(" ".join(cells[row * self.size:(row + 1) * self.size]) for row in range(self.size))

    def observation(self) -> str:
        """The board, where player and goal are (row, column), and what lies around the player (# is the edge). The
        last two say what the board shows, so that a tiny policy need not find P and count cells to see a hole."""
        cells = self.render().split()
        goal = "".join(self.map).index("G")
        (row, column), (goal_row, goal_column) = (divmod(cell, self.size) for cell in (self.position, goal))
        near = [self.neighbour(self.position, move) for move in range(4)]
        around = " ".join(f"{move} {'#' if cell == self.position else cells[cell]}"
                          for move, cell in zip(self.moves, near))
        return f"{self.render()}\nplayer {row + 1} {column + 1} goal {goal_row + 1} {goal_column + 1}\n{around}"

    def neighbour(self, cell: int, move: int) -> int:
        row, column = divmod(cell, self.size)
        row += (move == 1) - (move == 3)
        column += (move == 2) - (move == 0)
        return row * self.size + column if 0 <= row < self.size and 0 <= column < self.size else cell

    def distances(self) -> list[float]:
        """Moves from each cell to the goal around the holes (breadth first), inf where there is no way."""
        cells = "".join(self.map)
        distance = [float("inf")] * len(cells)
        distance[cells.index("G")] = 0
        queue = deque([cells.index("G")])
        while queue:
            cell = queue.popleft()
            for move in range(4):  # moves are symmetric, so walking back from the goal is walking to it
                near = self.neighbour(cell, move)
                if cells[near] != "H" and distance[near] == float("inf"):
                    distance[near] = distance[cell] + 1
                    queue.append(near)
        return distance

    def scripted_answer(self, rng, skill: float) -> str:
        """A best move with probability `skill`, else any move that stays on the board, holes included."""
        legal = [move for move in range(4) if self.neighbour(self.position, move) != self.position]
        distance = self.distances()
        nearest = min(distance[self.neighbour(self.position, move)] for move in legal)
        best = [move for move in legal if distance[self.neighbour(self.position, move)] == nearest]
        move = rng.choice(best) if rng.random() < skill else rng.choice(legal)
        return f"<answer>{self.moves[move]}</answer>"


ENVS = {"frozenlake": FrozenLake}
