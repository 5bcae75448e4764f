import io
import json
import re
from math import acos, degrees, hypot

import numpy as np
import pytest
from PIL import Image

from envs import make_env_factory
from tasks.geometry import KINDS, LETTERS, Geometry, content, drawn, figure, generated, lettered, load


def angle(at, a, b):
    one, two = ((point[0] - at[0], point[1] - at[1]) for point in (a, b))
    return degrees(acos((one[0] * two[0] + one[1] * two[1]) / hypot(*one) / hypot(*two)))


def length(line):
    return hypot(line[0][0] - line[1][0], line[0][1] - line[1][1])


def numbers(made):
    return [int(text.rstrip("°")) for _, text in made.labels if re.fullmatch(r"\d+°?", text)]


def measured(made, kind):
    """The answer, measured on the drawing's own points."""
    lines = made.lines
    if kind in ("third_angle", "isosceles"):
        a, b, c = (line[0] for line in lines)
        return angle(c, a, b) if kind == "third_angle" else angle(a, b, c)
    if kind == "right_triangle":
        names = [text for _, text in made.labels]  # short leg, long leg, slant
        return [length(lines[2]), length(lines[0]), length(lines[1])][names.index("x")]
    if kind == "rectangle":
        width, height = length(lines[0]), length(lines[1])
        return width * height if "area" in made.question else 2 * (width + height)
    if kind == "triangle_area":
        return length(lines[0]) * max(point[1] for line in lines[:3] for point in line) / 2
    if kind == "parallel_lines":
        (top_left, top_right), (bottom_left, bottom_right) = lines[:2]
        top, bottom = (((a[0] + b[0]) / 2, a[1]) for a, b in lines[:2])
        assert angle(bottom, bottom_right, top) == pytest.approx(numbers(made)[0])
        label = next(point for point, text in made.labels if text == "x")
        return angle(top, top_right if label[0] > top[0] - (top[1] - label[1]) * (top[0] - bottom[0]) / top[1] else top_left, bottom)
    centre, far = lines[0][0], lines[2][0]
    assert angle(centre, lines[0][1], lines[1][1]) == pytest.approx(numbers(made)[0])
    assert all(hypot(*line[1]) == pytest.approx(1) for line in lines) and hypot(*far) == pytest.approx(1)
    return angle(far, lines[2][1], lines[3][1])


@pytest.mark.parametrize("kind", range(len(KINDS)), ids=[kind.__name__ for kind in KINDS])
def test_the_answer_is_what_the_drawing_measures(kind):
    for problem_id in range(kind, 700, len(KINDS)):
        made = figure(problem_id)
        assert measured(made, KINDS[kind].__name__) == pytest.approx(made.gold, rel=1e-9), made
        assert "x" in [text for _, text in made.labels] or "What is" in made.question
        assert not re.search(r"\d", made.question)  # the numbers are in the picture only


def test_choices_hold_the_right_answer_once_and_letters_are_even():
    letters = []
    for problem_id in range(1400):
        question = generated(problem_id)
        assert len(set(question.choices)) == 4 and all(int(choice) > 0 for choice in question.choices)
        assert question.choices[LETTERS.index(question.gold)] == str(figure(problem_id).gold)
        letters.append(question.gold)
    counts = np.unique(letters, return_counts=True)[1]
    assert (np.abs(counts - 350) < 5 * np.sqrt(1400 * 0.25 * 0.75)).all()


def test_train_and_heldout_share_no_figure_however_it_is_turned():
    env = Geometry()
    train_ids, heldout_ids = env.problems("train", 900), env.problems("heldout", 250)
    sides = [{content(figure(id)) for id in ids} for ids in (train_ids, heldout_ids)]
    assert (len(sides[0]), len(sides[1])) == (900, 250) and not sides[0] & sides[1]


def test_pictures_are_deterministic_and_hold_every_label():
    assert (drawn(5, 256) == drawn.__wrapped__(5, 256)).all() and drawn(5, 256).shape == (256, 256, 3)
    for problem_id in range(70):
        red = (drawn(problem_id, 128).astype(int) @ [1, -1, 0]) > 60
        assert red.sum() > 10 and not red[[0, -1]].any() and not red[:, [0, -1]].any()  # nothing is cut at the edge


def test_three_attempts_pay_less_and_less():
    env = Geometry()
    for wrong_first in range(3):
        env.reset(env.problems("train", 3)[wrong_first], 0)
        assert env.image().shape == (256, 256, 3)
        wrong = next(letter for letter in "ABCD" if letter != env.question.gold)
        scores = []
        for attempt in range(wrong_first + 1):
            given = env.question.gold if attempt == wrong_first else wrong
            message, score, done, valid = env.step(f"so <answer>{given}</answer>")
            scores.append(score)
            assert valid and done == (attempt == wrong_first) and env.image() is None
            assert env.question.gold not in re.findall(r"\b[A-D]\b", message)
        assert sum(scores) == 0.5 ** wrong_first and env.success and env.info["correct_first"] == (wrong_first == 0)
    env.reset(0, 0)
    assert [env.step(text)[1:] for text in ("A or B", "<answer>A</answer> <answer>B</answer>", "<answer>E</answer>")] == \
        [(0.0, False, False), (0.0, False, False), (0.0, True, False)] and not env.success


def test_the_binary_reward_is_1_on_any_attempt():
    env = make_env_factory("geoqa", {"reward": "binary"})()
    env.reset(0, 0)
    env.step("none")
    assert env.step(f"<answer>{env.question.gold.lower()}</answer>")[1:] == (1.0, True, True)


@pytest.mark.parametrize("gold, letter", [("B", "B"), ("(b)", "B"), (1, "B"), ("1", "B"), ("30°", "B"), ("7", ""), ("E", ""), (None, "")])
def test_the_right_choice_is_named_by_letter_place_or_text(gold, letter):
    assert lettered(gold, ["60°", "30°", "45°", "15°"]) == letter


def png(colour, size=(40, 20)):
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, "PNG")
    return file.getvalue()


def test_a_local_file_in_the_layout_of_geoqa(tmp_path):
    for place in range(12):
        (tmp_path / f"{place}.png").write_bytes(png((place * 20, 0, 0), (400, 200)))
    rows = [{"image": f"{place}.png", "question": f"<image>Find x {place}.", "choices": ["1", "2", "3", "4"], "label": place % 4}
            for place in range(11)] + [{"image": "11.png", "question": "Find", "choices": ["1", "2"], "label": 9}]
    (tmp_path / "geo.jsonl").write_text("\n".join(map(json.dumps, rows)))
    env = Geometry(data=str(tmp_path / "geo.jsonl"), pixels=64)
    assert "11 questions, 1 rows" in env.source()
    train_ids = env.problems("train", 2)
    with pytest.raises(ValueError, match="ask for fewer"):
        env.problems("train", 12)
    assert not set(train_ids) & set(env.problems("heldout", 1))
    first = env.reset(train_ids[0], 0)
    place = int(re.search(r"Find x (\d+)", first)[1])
    assert "<image>" not in first and "C. 3" in first and env.question.gold == "ABCD"[place % 4]
    assert env.image().shape == (32, 64, 3) and (env.image() == [place * 20, 0, 0]).all()


def test_a_datasets_folder_without_choices(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = {"image": [{"bytes": png("red"), "path": None}, {"bytes": png("blue"), "path": None}], "problem": ["Angle?", "Side?"],
            "solution": ["<answer> 145° </answer>", "<answer>7</answer>"]}
    kinds = datasets.Features({"image": datasets.Image(), "problem": datasets.Value("string"), "solution": datasets.Value("string")})
    both = {name: datasets.Dataset.from_dict({key: [values[row]] for key, values in rows.items()}, features=kinds)
            for row, name in enumerate(("train", "test"))}
    datasets.DatasetDict(both).save_to_disk(str(tmp_path / "saved"))
    env = Geometry(data=str(tmp_path / "saved"))
    load.cache_clear()
    (id,), (heldout,) = env.problems("train", 1), env.problems("heldout", 1)
    assert "145" not in env.reset(id, 0) and (env.image()[0, 0] == [255, 0, 0]).all()
    assert env.step("<answer>144</answer>")[1:] == (0.0, False, True)
    assert env.step("<answer>145 °</answer>")[1:] == (0.5, True, True)
    env.reset(heldout, 0)
    assert env.step("it is \\boxed{7}")[1:] == (1.0, True, True)
