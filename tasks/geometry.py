"""Geometry questions about a picture, in the layout of GeoQA: image, question, choices, answer.

`data` "generated" draws its own diagrams, true to scale, with exact answers; else rows of a file, folder or hub data set.
"""
import functools
import io
import string
from math import acos, cos, hypot, pi, radians, sin
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from episode import one_of, require
from tasks import maths
from tasks.answers import parse_answer
from tasks.sources import first_different, read, written

IMAGE_COLUMNS = ("image", "images", "img", "diagram", "picture", "file_name")
CHOICE_COLUMNS = ("choices", "options")
ANSWER_COLUMNS = ("label", *maths.GOLD_COLUMNS)
LETTERS = string.ascii_uppercase


class Figure(NamedTuple):
    """A question and its drawing: points in any unit, labels at points, all turned by `turn` radians when drawn."""
    question: str
    gold: int
    wrong: list[int]  # what typical mistakes give
    lines: list  # pairs of points
    labels: list  # (point, text)
    circles: list = []  # (centre, radius)
    turn: float = 0.0


class Question(NamedTuple):
    text: str
    image: object  # a path, bytes, or a problem id of the generated ones
    choices: tuple[str, ...]  # () where the answer is a value
    gold: str  # a letter, or the value
    split: str


def at(x: float, y: float) -> np.ndarray:
    return np.array([x, y], float)


def polar(length: float, degrees: float) -> np.ndarray:
    return length * at(cos(radians(degrees)), sin(radians(degrees)))


def inside(vertex, a, b, size: float):
    """Where the label of the angle a-vertex-b stands: on its bisector, farther out where the angle is narrow."""
    one, two = ((point - vertex) / hypot(*(point - vertex)) for point in (a, b))
    half = acos(np.clip(one @ two, -1, 1)) / 2
    return vertex + min(0.4, 0.09 / sin(half)) * size * (one + two) / hypot(*(one + two))


def beside(a, b, away_from, size: float):
    """Where the label of the side a-b stands: off its middle, on the side away from a point."""
    middle, normal = (a + b) / 2, at(a[1] - b[1], b[0] - a[0]) / hypot(*(a - b))
    return middle + 0.09 * size * normal * (1 if (middle - away_from) @ normal > 0 else -1)


def triangle(alpha: float, beta: float):
    """Corners with these angles (degrees) at the first two; the base has length 1."""
    side = sin(radians(beta)) / sin(radians(alpha + beta))
    return at(0, 0), at(1, 0), polar(side, alpha)


def sides(*corners):
    return list(zip(corners, corners[1:] + corners[:1]))


def third_angle(rng):
    alpha, beta = (int(angle) for angle in rng.integers(30, 76, 2))
    a, b, c = triangle(alpha, beta)
    labels = [(inside(a, b, c, 1), f"{alpha}°"), (inside(b, a, c, 1), f"{beta}°"), (inside(c, a, b, 1), "x")]
    return Figure("Two angles of the triangle are given. How many degrees is the angle x?", 180 - alpha - beta,
                  [alpha + beta, 180 - alpha, 180 - beta, abs(90 - alpha)], sides(a, b, c), labels)


def isosceles(rng):
    base = int(rng.integers(30, 76))
    a, b, c = triangle(base, base)
    labels = [(beside(b, c, a, 1), "s"), (beside(a, c, b, 1), "s"), (inside(c, a, b, 1), f"{180 - 2 * base}°"),
              (inside(a, b, c, 1), "x")]
    return Figure("The two sides marked s are equal. How many degrees is the angle x?", base,
                  [180 - 2 * base, 2 * base, 90 - base // 2, 180 - base], sides(a, b, c), labels)


def right_triangle(rng):
    short, long, slant = ((3, 4, 5), (5, 12, 13), (8, 15, 17), (7, 24, 25), (20, 21, 29), (9, 40, 41))[rng.integers(6)]
    scale, asked = int(rng.integers(1, 10)), int(rng.integers(3))
    lengths = [scale * length for length in (short, long, slant)]
    a, b, c = at(0, 0), at(lengths[1], 0), at(0, lengths[0])
    size, names = lengths[2], ["x" if place == asked else str(length) for place, length in enumerate(lengths)]
    corner = size / 15
    square = [(at(corner, 0), at(corner, corner)), (at(corner, corner), at(0, corner))]
    labels = [(beside(a, c, b, size), names[0]), (beside(a, b, c, size), names[1]), (beside(b, c, a, size), names[2])]
    known = [length for place, length in enumerate(lengths) if place != asked]
    return Figure("The marked angle is a right angle. How long is the side x?", lengths[asked],
                  [sum(known), max(known) - min(known), lengths[asked] + scale, max(1, lengths[asked] - scale)],
                  sides(a, b, c) + square, labels)


def rectangle(rng):
    width, height = (int(length) for length in rng.integers(3, 31, 2))
    a, b, c, d = at(0, 0), at(width, 0), at(width, height), at(0, height)
    size, middle = max(width, height), c / 2
    labels = [(beside(a, b, middle, size), str(width)), (beside(b, c, middle, size), str(height))]
    lines = sides(a, b, c, d)
    if rng.random() < 0.5:
        return Figure("What is the area of the rectangle?", width * height,
                      [2 * (width + height), width + height, width * height // 2, width * height + width], lines, labels)
    return Figure("What is the perimeter of the rectangle?", 2 * (width + height),
                  [width * height, width + height, 2 * width + height, width + 2 * height], lines, labels)


def triangle_area(rng):
    base, height = 2 * int(rng.integers(2, 16)), int(rng.integers(3, 31))
    foot = at(base * rng.uniform(0.2, 0.8), 0)
    a, b, c = at(0, 0), at(base, 0), foot + at(0, height)
    size, ninth = max(base, height), (foot - c) / 9
    dashes = [(c + place * ninth, c + (place + 1) * ninth) for place in range(0, 9, 2)]
    labels = [(beside(a, b, c, size), str(base)), (beside(c, foot, a, size), str(height))]
    return Figure("The dashed line is the height of the triangle. What is the triangle's area?", base * height // 2,
                  [base * height, base + height, 2 * base * height, base * height // 2 + base], sides(a, b, c) + dashes, labels)


def parallel_lines(rng):
    angle, same_side = int(rng.integers(35, 146)), rng.random() < 0.5
    if angle == 90:
        angle = 91
    top, bottom, right = polar(0.5 / sin(radians(angle)), angle), at(0, 0), at(0.8, 0)
    lines = [(top - right, top + right), (bottom - right, bottom + right), (-0.6 * top, 1.6 * top)]
    end = top + right if same_side else top - right
    labels = [(inside(bottom, bottom + right, top, 1.8), f"{angle}°"), (inside(top, end, bottom, 1.8), "x")]
    return Figure("The two lines that the third one crosses are parallel. How many degrees is the angle x?",
                  180 - angle if same_side else angle, [180 - angle, angle, abs(90 - angle), 360 - 2 * angle], lines, labels)


def inscribed_angle(rng):
    half = int(rng.integers(20, 81))
    start = float(rng.uniform(0, 360))
    a, b = polar(1, start), polar(1, start + 2 * half)
    far = polar(1, start + half + 180 + float(rng.uniform(-30, 30)))
    centre = at(0, 0)
    labels = [(inside(centre, a, b, 2), f"{2 * half}°"), (inside(far, a, b, 2), "x")]
    return Figure("Three corners lie on the circle, the fourth is its centre. How many degrees is the angle x?", half,
                  [2 * half, 180 - 2 * half, 90 - half, 180 - half], [(centre, a), (centre, b), (far, a), (far, b)], labels,
                  [(centre, 1.0)])


KINDS = (third_angle, isosceles, right_triangle, rectangle, triangle_area, parallel_lines, inscribed_angle)


def figure(problem_id: int) -> Figure:
    rng = np.random.default_rng(problem_id)
    made = KINDS[problem_id % len(KINDS)](rng)
    return made._replace(turn=float(rng.uniform(0, 2 * pi)))


def content(made: Figure) -> str:
    """What makes two figures the same problem: what is asked and what is written, however it is turned."""
    return " ".join([made.question, *sorted(text for _, text in made.labels), str(made.gold)])


@functools.lru_cache(1024)
def drawn(problem_id: int, pixels: int) -> np.ndarray:
    """The figure, fitted into a square with a margin: (pixels, pixels, 3) uint8."""
    made = figure(problem_id)
    turn = np.array([[cos(made.turn), sin(made.turn)], [-sin(made.turn), cos(made.turn)]])
    around = [point @ turn for line in made.lines for point in line] + [point @ turn for point, _ in made.labels]
    around += [centre @ turn + sign * radius for centre, radius in made.circles for sign in (-1, 1)]
    low, high = np.min(around, 0), np.max(around, 0)
    fine = 2 * pixels  # drawn twice as large, then averaged
    scale = 0.84 * fine / max(high - low)

    def place(point):
        return tuple(fine / 2 + scale * (point @ turn - (low + high) / 2) * [1, -1])

    picture = Image.new("RGB", (fine, fine), "white")
    pen = ImageDraw.Draw(picture)
    for centre, radius in made.circles:
        (x, y), r = place(centre), scale * radius
        pen.ellipse((x - r, y - r, x + r, y + r), outline="black", width=max(2, fine // 150))
    for a, b in made.lines:
        pen.line((*place(a), *place(b)), fill="black", width=max(2, fine // 150))
    for point, text in made.labels:
        pen.text(place(point), text, fill=(180, 0, 0), anchor="mm", font=ImageFont.load_default(fine / 18))
    return np.asarray(picture.resize((pixels, pixels), Image.Resampling.BOX))


@functools.lru_cache(100_000)
def generated(problem_id: int) -> Question:
    """Four choices in random order: the right one and what typical mistakes give."""
    made, rng = figure(problem_id), np.random.default_rng([problem_id, 1])
    wrong = [value for value in dict.fromkeys(made.wrong) if value != made.gold and value > 0][:3]
    while len(wrong) < 3:
        value = max(1, made.gold + int(rng.integers(-9, 10)))
        wrong += [value] if value != made.gold and value not in wrong else []
    values = rng.permutation([made.gold, *wrong]).tolist()
    return Question(made.question, problem_id, tuple(map(str, values)), LETTERS[values.index(made.gold)],
                    maths.side_of(content(made)))


def lettered(gold, choices: list[str]) -> str:
    """The letter of the right choice, which rows name by its text, by letter or by place (0 is the first; a number that is no
    text is always a place)."""
    text = gold.strip() if isinstance(gold, str) else written(gold)
    if text in choices and not isinstance(gold, int):
        return LETTERS[choices.index(text)]
    if text.isdigit() and int(text) < len(choices):
        return LETTERS[int(text)]
    letter = text.strip("().").upper()
    return letter if len(letter) == 1 and letter in LETTERS[:len(choices)] else ""


@functools.lru_cache(4)
def load(data: str, subset: str) -> tuple[list[Question], int]:
    """(questions in the order of the hash of their content, rows that were left out). Two rows with the same picture stand on
    the same side, a split of the data's own aside."""
    sides, _ = maths.by_side(read(data, subset, (*IMAGE_COLUMNS, *CHOICE_COLUMNS, *maths.PROBLEM_COLUMNS, *ANSWER_COLUMNS)))
    found, left_out, home = {}, 0, Path(data).expanduser()
    for side, rows in sides:
        image_column = maths.column(data, rows, IMAGE_COLUMNS, object)
        choice_column = next((key for name in CHOICE_COLUMNS for key in rows[0] if key.lower() == name), "")
        text_column, gold_column = maths.column(data, rows, maths.PROBLEM_COLUMNS, str), maths.column(data, rows, ANSWER_COLUMNS)
        for row in rows:
            image, gold = row[image_column], row[gold_column]
            image = image[0] if isinstance(image, list) and image else image
            if isinstance(image, dict):
                image = image.get("bytes") or image.get("path")
            if isinstance(image, str):
                image = str((home if home.is_dir() else home.parent) / image)
            choices = [str(choice).strip() for choice in row.get(choice_column) or ()]
            tagged = maths.tagged(str(gold))
            gold = lettered(gold, choices) if choices else maths.gold_of(tagged[-1] if tagged else gold)
            if not image or not gold or not isinstance(row[text_column], str):
                left_out += 1
                continue
            pixels = maths.content_hash((image if isinstance(image, bytes) else Path(image).read_bytes()).hex())
            text = row[text_column].replace("<image>", "").strip()
            question = Question(text, image, tuple(choices), gold, side or maths.side_of(pixels))
            found.setdefault(maths.content_hash(pixels + text), question)
    require(found, f"{data}: none of its {left_out} rows has an image, a question and an answer")
    return [found[digest] for digest in sorted(found)], left_out


class Geometry(maths.Attempts):
    """A question about a picture.

    data: "generated" (our own diagrams, not GeoQA), a JSON, JSONL or parquet file, a folder of the `datasets` library, or a
    hub id with its `subset`.
    """
    name, stop, slow = "geoqa", (), False
    no_answer = "There is no single answer in one <answer> tag."

    def __init__(self, *, data: str = "generated", subset: str = "", attempts: int = 3, reward: str = "graded",
                 pixels: int = 256, view: str = "image"):
        super().__init__(attempts, reward)
        require(64 <= pixels <= 1024, f"pixels={pixels}: allowed is 64 to 1024")
        self.data, self.subset, self.pixels, self.view = data, subset, pixels, one_of("view", view, ("image", "blank"))

    def problems(self, split: str, count: int) -> list[int]:
        one_of("split", split, ("train", "heldout"))
        if self.data != "generated":
            questions = load(self.data, self.subset)[0]
            return maths.first([id for id, question in enumerate(questions) if question.split == split], count, split, self.data)
        return first_different(split, count, lambda problem_id: content(figure(problem_id)), maths.side_of, "generated diagrams")

    def source(self) -> str:
        if self.data == "generated":
            return "diagrams drawn by this program, true to scale, with exact answers; split by content hash; not GeoQA"
        questions, left_out = load(self.data, self.subset)
        return f"{self.data}: {len(questions)} questions, {left_out} rows without image, question or answer left out"

    def reset(self, problem_id: int, seed: int) -> str:
        self.begin(generated(problem_id) if self.data == "generated" else load(self.data, self.subset)[0][problem_id])
        choices = "".join(f"\n{letter}. {choice}" for letter, choice in zip(LETTERS, self.question.choices))
        what = "the letter of the right choice, like <answer>A</answer>" if choices else "the value, like <answer>12</answer>"
        return (f"Look at the picture and answer the question about it. Think step by step and end with {what}.{self.again}\n\n"
                f"Question: {self.question.text}{choices}")

    def image(self) -> np.ndarray | None:
        """The diagram, beside the first message only: (H, W, 3) uint8, at most `pixels` a side."""
        if self.info["attempts"]:
            return None
        if self.data == "generated":
            return drawn(self.question.image, self.pixels).copy()
        image = self.question.image
        picture = Image.open(io.BytesIO(image) if isinstance(image, bytes) else image).convert("RGB")
        picture.thumbnail((self.pixels, self.pixels), Image.Resampling.BOX)
        return np.array(picture)

    def judged(self, answer: str) -> tuple[str | None, bool | None]:
        letters = list(LETTERS[:len(self.question.choices)])
        if letters:
            place = parse_answer(answer, letters)
            given = None if place is None else letters[place]
            return given, given == self.question.gold
        given = maths.final_answer(answer)
        return given, given is not None and maths.is_right(self.question.gold, given)

    def scripted_answer(self, rng, skill: float) -> str:
        """The right answer with probability `skill`, else any choice."""
        guess = rng.choice(list(LETTERS[:len(self.question.choices)] or "0"))
        return f"<answer>{self.question.gold if rng.random() < skill else guess}</answer>"
