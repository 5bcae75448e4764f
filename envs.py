"""Tasks: one small class each, with the same few members. Text in, text out; no tokens and no tensors here.

    name, stop, slow            class attributes: the task's name; strings that end a turn once they are complete, like
                                ("</answer>",), or (); True when reset() or step() wait for something (threads run them)
    __init__(*, option=default) options, annotated as str, int, float or bool; `--env-options key value` sets them
    problems(split, count)      ids of `count` different problems of "train" or "heldout"; the two never share one
    reset(problem_id, seed)     start an episode; returns the first user message. The seed decides all noise
    step(answer)                play the model's text, whatever it is; returns (next user message, score, done, valid)
    render()                    the state as text for people
    success, info               True where the episode so far counts as solved; a dict of extras (numbers are logged)
    image()                     the state as (H, W, 3) uint8 pixels, None where a message needs none: tasks with pictures only
    view                        "image": messages show image() to the policy; "blank": a black one of its size, the control that
                                tells whether the policy looks; "text" (or no such member): none
    scripted_answer(rng, skill) what a scripted player of that skill answers: --model tiny learns from it; `tiny_words` it must know

`score` is the task's own reward. The format penalty for an answer that is not `valid` is added by `rollout.collect`.
"""
import bisect
import functools
import hashlib
import importlib.util
import inspect
import sys
from pathlib import Path

import numpy as np
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv, generate_random_map

from episode import one_of, require
from tasks.answers import first_word, parse_answer

HELDOUT_CLASSES = 4  # one class in four of the content hashes is held out: 4x4 has too few maps for one in eight
EACH_TURN = ("Each turn, answer with one move: Left, Down, Right or Up, like <answer>Left</answer>. Anything else is a turn "
             "without a move.\n")


class MissingData(RuntimeError):
    """Data, a package or a service that a task needs is not there; the message is one sentence that names the command
    which installs it."""


class BoardGame:
    """What the three board games share: one move a turn, written <answer>Left</answer>, or with prompt="chat" as a bare word.

    A game adds its texts, content(problem_id), start(), play(), render(), hints(), legal_moves() and best_moves().
    """
    stop, slow, view = (), False, "text"
    prompts = ("full", "chat", "tiny")
    moves = ["Left", "Down", "Right", "Up"]

    def split_of(self, content: str) -> str:
        return "heldout" if hashlib.sha256(content.encode()).digest()[0] % HELDOUT_CLASSES == 0 else "train"

    def problems(self, split: str, count: int) -> list[int]:
        """The first `count` ids of the split, each with other content. Raises ValueError when there are fewer."""
        from tasks.sources import first_different  # in functions, since tasks/ imports this file
        return first_different(split, count, self.content, self.split_of, f"{self.name} boards of {self.size}x{self.size}",
                               " or for larger boards")

    def reset(self, problem_id: int, seed: int) -> str:
        self.success, self.info = False, {"true_return": 0.0}
        self.start(int(problem_id), int(seed))
        if self.prompt == "tiny":
            return f"{self.short_rules()}\n{self.observation(first=True)}".rstrip()
        start = f"{self.role} {self.rules()}\n"
        if self.prompt == "chat":
            return start + self.observation()
        if self.view != "text":
            return f"{start}The picture shows the board: {self.picture}.\n{EACH_TURN}{self.observation()}"
        board, move = self.example
        return (f"{start}Symbols: {self.legend}.\n{EACH_TURN}Example: the board\n{board}\nis solved by "
                f"<answer>{move}</answer>.\n\nThe board now:\n{self.observation(first=True)}")

    def observation(self, first: bool = False) -> str:
        """The board; for the tiny policy hints, and the board no more often than needed, its context being short. With pictures,
        nothing that they show."""
        if self.prompt == "chat":
            seen = self.in_words() if self.view == "text" else f"The picture shows the board now: {self.picture}."
            return f"{seen} Which way do you go? Answer with one word: left, down, right or up."
        if self.prompt == "full":  # said every turn: small models forget the format
            board = self.render() if self.view == "text" else "The picture shows the board now."
            return board + "\n\nYour move, as " + ", ".join(f"<answer>{move}</answer>" for move in self.moves[:-1]) + \
                f" or <answer>{self.moves[-1]}</answer>:"
        if self.view != "text":
            return ""
        board = self.tiny_board == "always" or first and self.tiny_board == "first"
        return self.render().replace("S", "@") + "\n" + self.hints() if board else self.hints()

    def in_words(self) -> str:
        return f"{self.legend}.\n{self.render()}\n"

    def step(self, answer: str) -> tuple[str, float, bool, bool]:
        read = first_word if self.prompt == "chat" else parse_answer
        move = read(answer, self.moves)
        score, done = self.play(move)  # None is a turn without a move, so that rambling is never better than playing
        self.info["true_return"] += score
        return ("" if move is not None else "No valid answer.\n") + self.observation(), score, done, move is not None

    def scripted_answer(self, rng, skill: float) -> str:
        """A best move with probability `skill`, else any move that changes the board, bad ones included."""
        moves = self.best_moves() if rng.random() < skill else self.legal_moves()
        move = self.moves[rng.choice(moves)]
        return move if self.prompt == "chat" else f"<answer>{move}</answer>"


class FrozenLake(BoardGame):
    """gymnasium's FrozenLake-v1 on seeded, solvable random maps. A problem id is the seed of its map.

    Start and goal are opposite corners (gymnasium's own maps), or anywhere with `random_start`, as FreshPER had them.
    """
    name, ground, danger, tiny_board = "frozenlake", "ice", "hole", "always"
    role = "You are walking on a frozen lake."
    legend = "P is you, _ is ice, O is a hole, G is the goal, X is you in a hole, √ is you on the goal"
    example = ("P G\n_ O", "Right")
    picture = ("light blue is ice, a dark blue square is a hole, the grey figure is you, the red flag beside a G is the goal, "
               "an S marks where you started")

    def __init__(self, *, size: int = 4, frozen_probability: float = 0.8, slippery: bool = False,
                 random_start: bool = False, prompt: str = "full", view: str = "text", cell_pixels: int = 64):
        require(size >= 2, f"size={size}: allowed is 2 or more")
        require(0.6 <= frozen_probability <= 1, f"frozen_probability={frozen_probability}: allowed is 0.6 to 1")
        self.size, self.frozen_probability = size, frozen_probability
        require(8 <= cell_pixels <= 64, f"cell_pixels={cell_pixels}: allowed is 8 to 64")
        self.slippery, self.random_start, self.cell_pixels = slippery, random_start, cell_pixels
        self.prompt, self.view = one_of("prompt", prompt, self.prompts), one_of("view", view, ("text", "image", "blank"))

    def board(self, problem_id: int) -> list[str]:
        if not self.random_start:
            return generate_random_map(size=self.size, p=self.frozen_probability, seed=int(problem_id))
        from tasks.boards import random_lake
        return random_lake(self.size, self.frozen_probability, int(problem_id))

    def content(self, problem_id: int) -> str:
        return "".join(self.board(problem_id))

    def start(self, problem_id: int, seed: int):
        self.map = self.board(problem_id)
        self.game = FrozenLakeEnv(desc=self.map, is_slippery=self.slippery)
        self.position, _ = self.game.reset(seed=seed)

    def rules(self) -> str:
        return ("Reach the goal without falling into a hole. A move goes one cell; at the edge you stay where you are. "
                f"The goal scores 1 and ends the game, a hole ends it with 0.{self.slipping()}")

    def slipping(self) -> str:
        return (f" The {self.ground} is slippery: a move goes where you want with probability 1/3, and to either "
                "side of that with probability 1/3 each.") if self.slippery else ""

    def short_rules(self) -> str:
        return "Walk " + "from P " * (self.view == "text") + "to G, never into O." + " The ice is slippery." * self.slippery

    def play(self, move: int | None) -> tuple[float, bool]:
        if move is None:
            return 0.0, False
        self.position, score, done, _, _ = self.game.step(move)
        self.success = bool(score > 0)
        return float(score), bool(done)

    def render(self) -> str:
        """The board: P player, _ ice, O hole, G goal; X is the player in a hole and √ the player on the goal."""
        cells = [{"S": "_", "F": "_", "H": "O", "G": "G"}[cell] for row in self.map for cell in row]
        cells[self.position] = {"_": "P", "O": "X", "G": "√"}[cells[self.position]]
        columns = len(self.map[0])
        return "\n".join(" ".join(cells[start:start + columns]) for start in range(0, len(cells), columns))

    def hints(self) -> str:
        from tasks.boards import lake_hints
        return lake_hints(self.map, self.position, self.moves, self.render().split())

    def in_words(self) -> str:
        from tasks.boards import lake_in_words
        return lake_in_words(self.map, self.position, self.moves, self.danger)

    def image(self) -> np.ndarray:
        """gymnasium's own picture: (H, W, 3) uint8."""
        from tasks.boards import lake_picture
        return lake_picture(tuple(self.map), int(self.position), self.cell_pixels)

    def scripted_answer(self, rng, skill: float) -> str:
        """With pictures the scripted player says first what it sees: its row and column, and the cells around it in the order of
        the moves. Learning to say it teaches the tiny policy to look; what it says later is its own."""
        answer = super().scripted_answer(rng, skill)
        if self.view == "text" or self.prompt != "tiny":
            return answer
        words = self.hints().split()  # player row column goal row column Left cell Down cell ...
        return " ".join(words[1:3] + words[7::2]) + " " + answer

    def legal_moves(self) -> list[int]:
        from tasks.boards import legal_moves
        return legal_moves(self.map, self.position)

    def best_moves(self) -> list[int]:
        from tasks.boards import best_moves
        return best_moves(self.map, self.position)


def options_for(model: str, task: type) -> dict[str, str]:
    """What a model needs of a task: the tiny ones a prompt of words that they know, and pictures in which a cell is a patch; a small
    chat model one that asks for a plain answer, where the task has it, since it never writes tags."""
    wanted = {"tiny": {"prompt": "tiny"}, "tiny-vlm": {"prompt": "tiny", "view": "image", "cell_pixels": "16"},
              "smollm2": {"prompt": "chat"} if "chat" in getattr(task, "prompts", ()) else {}}.get(model, {})
    return {name: value for name, value in wanted.items() if name in inspect.signature(task.__init__).parameters}


def shows_images(env) -> bool:
    return getattr(env, "view", "text") != "text"


# A class, or "file.py:Class" of a file beside this one, which is imported when the task is asked for.
ENVS = {"frozenlake": FrozenLake, "cliffwalking": "tasks/cliffwalking.py:CliffWalking", "sokoban": "tasks/sokoban.py:Sokoban",
        "arithmetic": "tasks/maths.py:Arithmetic", "maths": "tasks/maths.py:Maths", "reasoning_gym": "tasks/maths.py:ReasoningGym",
        "search": "tasks/search_qa.py:SearchQA", "geoqa": "tasks/geometry.py:Geometry"}
MEMBERS = ("name", "stop", "slow", "problems", "reset", "step", "render")  # that a task's class has


def load_env(name: str) -> type:
    """The class of a task: a name of ENVS, "reasoning_gym:dataset", or "path/to/file.py:ClassName".

    Raises ValueError when there is no such name, file or class, or when the class lacks a member.
    """
    target = ENVS.get("reasoning_gym" if name.startswith("reasoning_gym:") else name, name)
    if isinstance(target, type):
        return target
    file, _, class_name = target.rpartition(":")
    if not file.endswith(".py"):
        one_of("--env", name, (*ENVS, "reasoning_gym:dataset", "path/to/file.py:ClassName"))
    path = (Path(__file__).parent / file if target != name else Path(file).expanduser()).resolve()
    require(path.is_file(), f"--env {name}: there is no file {path}")
    tasks = Path(__file__).resolve().parent / "tasks"
    module = f"tasks.{path.stem}" if path.parent == tasks else str(path)
    if module not in sys.modules:
        spec = importlib.util.spec_from_file_location(module, path)
        sys.modules[module] = importlib.util.module_from_spec(spec)  # before it runs: its dataclasses look there
        try:
            spec.loader.exec_module(sys.modules[module])
        except BaseException:
            del sys.modules[module]
            raise
    classes = {key: thing for key, thing in vars(sys.modules[module]).items() if isinstance(thing, type)}
    task = classes[one_of(f"--env {name}: the class in {path.name}", class_name, tuple(classes))]
    missing = [member for member in MEMBERS if not hasattr(task, member)]
    require(not missing, f"--env {name}: {class_name} has no {', '.join(missing)}; see the top of envs.py")
    return task


def make_env_factory(name: str, options: dict[str, str]):
    """A function without arguments that makes the environment. `options` are strings from the command line, converted
    by the annotations of the task's __init__ (str, int, float, bool). Raises ValueError for a bad one."""
    task = load_env(name)
    if name.startswith("reasoning_gym:"):
        options = options | {"dataset": name.partition(":")[2]}
    parameters = inspect.signature(task, eval_str=True).parameters
    needed = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}
    converted = {}
    for key, text in options.items():
        kind = parameters[one_of(f"--env-options of {name}", key, tuple(parameters))].annotation
        require(kind in needed, f"{name}: the option {key} of its __init__ has to be annotated as str, int, float or bool")
        try:
            converted[key] = {"true": True, "false": False}[str(text).lower()] if kind is bool else kind(str(text))
        except (KeyError, ValueError):
            raise ValueError(f"--env-options {key} {text}: {key} is {needed[kind]}") from None
    for key, parameter in parameters.items():
        require(key in converted or parameter.default is not parameter.empty, f"--env {name} needs --env-options {key} VALUE")
    return functools.partial(task, **converted)


def up_to(env, split: str, count: int) -> list[int]:
    """`count` problems, or all there are where the task has fewer."""
    def had(wanted: int) -> list[int]:
        try:
            return env.problems(split, wanted)
        except ValueError:
            return []
    if ids := had(count):
        return ids
    most = bisect.bisect_left(range(1, count), True, key=lambda wanted: not had(wanted))
    return env.problems(split, max(1, most))  # where there is none at all, the task says why
