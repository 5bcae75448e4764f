"""Sokoban: seeded rooms made by reverse play, the published Microban and Sasquatch levels, rules, pictures, a solver.

A set of cells is an int here: cell (row, column) is its bit row * width + column.
"""
import functools
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from envs import BoardGame, MissingData
from episode import one_of, require
from tasks.boards import neighbour

LEVELS = Path("/usr/share/games/cavepacker/maps")  # where Debian's cavepacker-data puts the published levels
FIRST_LEVEL_ID = 1_000_000_000  # problem ids from here on are published levels, smaller ones are seeds of rooms


@dataclass(frozen=True)
class Room:
    """What is not floor is wall; the floor never touches the edge."""
    width: int
    height: int
    floor: int
    targets: int
    boxes: int
    player: int  # a cell, row * width + column


def mask_of(cells) -> int:
    return sum(1 << cell for cell in cells)


def cells_of(mask: int) -> list[int]:
    return [cell for cell in range(mask.bit_length()) if mask >> cell & 1]


def shifted(cells: int, step: int) -> int:
    return cells << step if step > 0 else cells >> -step


def reach(player: int, free: int, width: int) -> int:
    """The cells that a player reaches over `free` cells."""
    cells, grown = 0, 1 << player
    while grown != cells:
        cells = grown
        grown |= (cells << 1 | cells >> 1 | cells << width | cells >> width) & free
    return cells


def push(floor: int, boxes: int, player: int, step: int) -> tuple[int, int]:
    """(boxes, player) after a move by `step` cells (±1, ±width), pushing a box ahead if the cell behind it is free."""
    ahead, behind = player + step, player + 2 * step
    if not boxes >> ahead & 1:
        return boxes, ahead if floor >> ahead & 1 else player
    return (boxes ^ 1 << ahead ^ 1 << behind, ahead) if (floor & ~boxes) >> behind & 1 else (boxes, player)


def reverse_play(width: int, floor: int, targets: int, max_moves: int, max_layouts: int = 10_000) -> dict[int, list]:
    """{boxes: [(moves, players)]}: from these cells a player solves that layout of boxes in so many moves at best.

    Plays backwards from the solved room, walking and pulling, breadth first, so the numbers are exact. A layout or cell
    that is missing has no solution, needs more than `max_moves`, or lies behind the first `max_layouts` layouts.
    """
    frontier, seen, solutions = {targets: floor & ~targets}, {}, defaultdict(list)
    for moves in range(max_moves + 1):
        earlier = defaultdict(int)
        for boxes, players in frontier.items():
            players &= ~seen.get(boxes, 0)
            if not players:
                continue
            seen[boxes] = seen.get(boxes, 0) | players
            solutions[boxes].append((moves, players))
            free = floor & ~boxes
            earlier[boxes] |= (players << 1 | players >> 1 | players << width | players >> width) & free
            for step in (-1, width, 1, -width):  # step back from `cell`, where a box is ahead, and pull it into `cell`
                for cell in cells_of(players & shifted(boxes, -step) & shifted(free, step)):
                    earlier[boxes ^ 1 << cell + step ^ 1 << cell] |= 1 << cell - step
        frontier = earlier
        if not frontier or len(seen) > max_layouts:
            break
    return solutions


@functools.lru_cache(maxsize=10_000)
def generated_room(problem_id: int, size: int, boxes: int, max_moves: int) -> Room:
    """A seeded room of scattered walls. Its shortest solution has 4 moves a box up to `max_moves` moves (all lengths
    that the walls and targets offer are equally likely), at least 2 pushes a box, and no box starts on a target."""
    rng = np.random.default_rng([problem_id, size, boxes, max_moves])
    for _ in range(1000):
        cells = np.flatnonzero(np.pad(rng.random((size - 2, size - 2)) < 0.7, 1)).tolist()
        floor = reach(cells[rng.integers(len(cells))], mask_of(cells), size) if cells else 0
        cells = cells_of(floor)
        if len(cells) < max(size * size // 4, 2 * boxes + 2):
            continue
        goals = rng.choice(cells, boxes, replace=False).tolist()
        targets = mask_of(goals)
        pushes = {cell: min(abs(cell // size - goal // size) + abs(cell % size - goal % size) for goal in goals)
                  for cell in cells}  # what a box there needs at least
        starts = defaultdict(list)
        for layout, solutions in reverse_play(size, floor, targets, max_moves, 1000).items():
            if not layout & targets and sum(pushes[cell] for cell in cells_of(layout)) >= 2 * boxes:
                for moves, players in solutions:
                    if moves >= 4 * boxes:
                        starts[moves] += [(layout, player) for player in cells_of(players)]
        if starts:
            chosen = starts[int(rng.choice(sorted(starts)))]
            return Room(size, size, floor, targets, *chosen[rng.integers(len(chosen))])
    raise ValueError(f"Sokoban found no room with size={size}, boxes={boxes}, max_moves={max_moves} in 1000 tries: "
                     "allow more moves or fewer boxes")


def read_level(path: Path) -> Room:
    """A level in the usual text form: # wall, @ player, $ box, . target; + and * are player and box on a target."""
    rows = [row for row in path.read_text("latin1").splitlines() if "#" in row and set(row) <= set("#@+$*. ")]
    width = max(map(len, rows))
    text = "".join(row.ljust(width) for row in rows)
    free, targets, boxes, player = ([cell for cell, symbol in enumerate(text) if symbol in symbols]
                                    for symbols in ("@+$*. ", ".+*", "$*", "@+"))
    floor = reach(player[0], mask_of(free), width)  # what nobody reaches, boxes on targets included, is as good as wall
    return Room(width, len(rows), floor, mask_of(targets) & floor, mask_of(boxes) & floor, player[0])


@functools.cache
def published_levels(collection: str) -> list[Room]:
    """All "microban" or "sasquatch" levels, in the order of their files."""
    paths = sorted(LEVELS.glob(f"{collection}*.sok"))
    if not paths:
        raise MissingData(f"the {collection} levels of Sokoban are in Debian's package cavepacker-data: `make data` "
                          "installs it (apt-get install cavepacker-data)")
    return [read_level(path) for path in paths]


@functools.lru_cache(maxsize=10_000)
def room_content(room: Room) -> str:
    """The room up to rotation, reflection, and where within reach the player stands: what may not be in both splits."""
    within = reach(room.player, room.floor & ~room.boxes, room.width)
    kinds = (room.floor, room.targets, room.boxes, within)
    codes = np.array([sum((cells >> cell & 1) << bit for bit, cells in enumerate(kinds))
                      for cell in range(room.width * room.height)], np.uint8).reshape(room.height, room.width)
    codes = codes[codes.any(1)][:, codes.any(0)]  # the floor is connected, so only rows and columns outside go
    views = [np.rot90(side, quarter) for side in (codes, codes.T) for quarter in range(4)]
    return min(f"{len(view)} {view.tobytes().hex()}" for view in views)


@functools.cache
def level_contents(collection: str) -> set[str]:
    return {room_content(room) for room in published_levels(collection)}


@functools.cache
def sokoban_tiles() -> dict[str, np.ndarray]:
    """A plain picture of each symbol, (16, 16, 3) uint8: they stand side by side in sokoban.png."""
    strip = np.asarray(Image.open(Path(__file__).with_suffix(".png")))
    return dict(zip("#_OX√PS", np.split(strip, 7, axis=1)))


class Sokoban(BoardGame):
    """Sokoban with gym-sokoban's rewards: -0.1 a turn, +1 for a box onto a target, -1 for one off it, +10 for all on.

    A problem id is the seed of a room of `size` x `size` cells, walls included, which `max_moves` moves solve (0: 10 a
    box). With levels="microban" or "sasquatch" the held-out problems are David W. Skinner's published levels of at most
    `level_size` rows and columns, however long their solution; training rooms stay generated. The FreshPER runs had size 6
    with 1 box (Simple) and size 8 with 2 boxes (Hard).
    """
    name, tiny_board = "sokoban", "first"
    role = "You are playing Sokoban."
    legend = "P is you, S is you on a target, X is a box, √ is a box on a target, O is a target, # is wall, _ is floor"
    example = ("# # # # #\n# P X O #\n# # # # #", "Right")
    picture = ("grey bricks are wall, a crate is a box, brown off a target and green on one, a small red disc is a target, the "
               "blue disc is you, on pink while you stand on a target")

    def __init__(self, *, size: int = 6, boxes: int = 1, max_moves: int = 0, levels: str = "generated",
                 level_size: int = 10, prompt: str = "full", view: str = "text"):
        require(6 <= size <= 12, f"size={size}: allowed is 6 to 12, walls included")
        require(1 <= boxes <= 4, f"boxes={boxes}: allowed is 1 to 4")
        require(max_moves == 0 or max_moves >= 4 * boxes, f"max_moves={max_moves}: allowed is 0 or at least 4 a box")
        self.size, self.boxes, self.max_moves, self.level_size = size, boxes, max_moves, level_size
        self.levels = one_of("levels", levels, ("generated", "microban", "sasquatch"))
        self.prompt = one_of("prompt", prompt, self.prompts)
        self.view = one_of("view", view, ("text", "image", "blank"))

    def split_of(self, content: str) -> str:
        published = self.levels != "generated" and content in level_contents(self.levels)
        return "heldout" if published else super().split_of(content)

    def problems(self, split: str, count: int) -> list[int]:
        if self.levels == "generated" or split != "heldout":
            return super().problems(split, count)
        fitting = {}  # by content: some levels were published twice
        for number, room in enumerate(published_levels(self.levels)):
            if max(room.width, room.height) <= self.level_size:
                fitting.setdefault(room_content(room), FIRST_LEVEL_ID + number)
        require(count <= len(fitting),
                f"{len(fitting)} {self.levels} levels fit level_size={self.level_size}, {count} were asked for")
        return list(fitting.values())[:count]

    def room_of(self, problem_id: int) -> Room:
        if problem_id >= FIRST_LEVEL_ID:
            return published_levels(self.levels)[problem_id - FIRST_LEVEL_ID]
        return generated_room(problem_id, self.size, self.boxes, self.max_moves or 10 * self.boxes)

    def content(self, problem_id: int) -> str:
        return room_content(self.room_of(problem_id))

    def start(self, problem_id: int, seed: int):
        self.room, self.solutions = self.room_of(problem_id), None
        self.layout, self.position = self.room.boxes, self.room.player
        self.info["boxes_on_target"] = (self.layout & self.room.targets).bit_count()

    def rules(self) -> str:
        return ("Push every box onto a target. A move goes one cell; a box ahead of you is pushed along when the cell "
                "behind it is free, and boxes cannot be pulled. Every turn costs 0.1. A box scores 1 when it comes "
                "onto a target and -1 when it leaves one; 10 more when all are on targets, which ends the game.")

    def short_rules(self) -> str:
        return "move X to O."

    def moved(self, move: int) -> tuple[int, int]:
        return push(self.room.floor, self.layout, self.position, (-1, self.room.width, 1, -self.room.width)[move])

    def play(self, move: int | None) -> tuple[float, bool]:
        if move is not None:
            self.layout, self.position = self.moved(move)
        before, now = self.info["boxes_on_target"], (self.layout & self.room.targets).bit_count()
        self.info["boxes_on_target"], self.success = now, self.layout == self.room.targets
        return now - before + 10 * self.success - 0.1, self.success

    def symbol(self, cell: int) -> str:
        floor, target, box = (cells >> cell & 1 for cells in (self.room.floor, self.room.targets, self.layout))
        return "#" if not floor else "PS"[target] if cell == self.position else "X√"[target] if box else "_O"[target]

    def render(self) -> str:
        width, height = self.room.width, self.room.height
        return "\n".join(" ".join(map(self.symbol, range(row * width, (row + 1) * width))) for row in range(height))

    def hints(self) -> str:
        """Where the player is (row, column), each box from there, from a box the nearest free target, and the next two
        cells from the player each way. A tiny policy learns faster from "Up 2 Left 1" than from coordinates."""
        width, height = self.room.width, self.room.height

        def way(start: int, end: int) -> tuple[int, str]:
            down, right = end // width - start // width, end % width - start % width
            length = abs(down) + abs(right)
            return length, f"{'Down' if down > 0 else 'Up'} {abs(down)} {'Right' if right > 0 else 'Left'} {abs(right)}"

        words = [f"player {self.position // width + 1} {self.position % width + 1}"]
        for box in cells_of(self.layout):
            words.append(f"{self.symbol(box)} {way(self.position, box)[1]}")
            if not self.room.targets >> box & 1:
                free = cells_of(self.room.targets & ~self.layout)
                words.append(f"O {min(way(box, target) for target in free)[1]}")
        words.append("\n")
        for move, name in enumerate(self.moves):
            near = neighbour(self.position, move, height, width)
            words.append(f"{name} {self.symbol(near)} {self.symbol(neighbour(near, move, height, width))}")
        return " ".join(words).replace(" \n ", "\n")

    def image(self) -> np.ndarray:
        """16 pixels a cell: (16 height, 16 width, 3) uint8."""
        rows = [row.split() for row in self.render().splitlines()]
        return np.concatenate([np.concatenate([sokoban_tiles()[symbol] for symbol in row], 1) for row in rows])

    def legal_moves(self) -> list[int]:
        return [move for move in range(4) if self.moved(move) != (self.layout, self.position)] or list(range(4))

    def best_moves(self) -> list[int]:
        """The first moves of all shortest solutions; every legal move where none is known (see `reverse_play`)."""
        if self.solutions is None:
            self.solutions = reverse_play(self.room.width, self.room.floor, self.room.targets, max_moves=1000)

        def moves_left(move: int) -> float:
            layout, player = self.moved(move)
            known = self.solutions.get(layout, ())
            return next((moves for moves, players in known if players >> player & 1), float("inf"))

        legal = self.legal_moves()
        fewest = min(map(moves_left, legal))
        return [move for move in legal if moves_left(move) == fewest]
