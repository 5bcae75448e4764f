"""Guess a number: a task of your own is one class.

    python train.py --env examples/guess.py:Guess --env-options top 64
    python train.py --env examples/guess.py:Guess --env-options top 100 --model smollm2

The members that a task must have are told at the top of envs.py. The three that only --model tiny needs are the last ones here.
"""
import re

import numpy as np

from tasks.answers import after_thoughts


class Guess:
    name, stop, slow = "guess", ("</answer>",), False  # a turn ends at a string of `stop`; slow: step waits for something
    tiny_words = "between and"  # that the tiny policy's tokenizer has to know; digits and tags are there

    def __init__(self, *, top: int = 1000, prompt: str = "full"):
        if top < 8:
            raise ValueError(f"top={top}: allowed is 8 or more")
        if prompt not in ("full", "tiny"):
            raise ValueError(f"prompt={prompt}: allowed is full or tiny")
        self.top, self.prompt = top, prompt

    def problems(self, split: str, count: int) -> list[int]:
        """Numbers to guess: every fourth one is held out. Always in the same order."""
        numbers = np.random.default_rng(0).permutation(self.top) + 1
        ids = [int(number) for number in numbers if (number % 4 == 0) == (split == "heldout")]
        if count > len(ids):
            raise ValueError(f"{len(ids)} {split} numbers up to {self.top}, {count} were asked for")
        return ids[:count]

    def reset(self, problem_id: int, seed: int) -> str:
        self.secret, self.low, self.high = problem_id, 1, self.top
        self.guesses, self.success, self.info = [], False, {"guesses": 0}
        if self.prompt == "tiny":
            return self.tiny_message()
        return (f"Find a whole number from 1 to {self.top} with few guesses. After each guess you are told whether the "
                "number is larger or smaller. Write one guess a turn, like <answer>7</answer>.")

    def step(self, answer: str) -> tuple[str, float, bool, bool]:
        """The next message, the score of the turn, whether the episode is over, whether the answer was valid."""
        guess = self.guess_in(answer)
        if guess is None:
            message = "No valid answer. Write one guess, like <answer>7</answer>."
            return self.tiny_message() if self.prompt == "tiny" else message, 0.0, False, False
        self.guesses.append(guess)
        self.info["guesses"] = len(self.guesses)  # numbers in `info` are logged as task/..., strings stay in the transcript
        self.success = guess == self.secret
        if self.success:
            return "Right.", 1.0, True, True
        if guess < self.secret:
            self.low = max(self.low, guess + 1)
        else:
            self.high = min(self.high, guess - 1)
        message = f"The number is {'larger' if guess < self.secret else 'smaller'}."
        return self.tiny_message() if self.prompt == "tiny" else message, 0.0, False, True

    def guess_in(self, answer: str) -> int | None:
        """The one guess in an answer, after its thoughts; None for no guess, and for a list of guesses."""
        answer = after_thoughts(answer)
        if self.prompt == "tiny":
            answer = answer.replace(" ", "")  # its tokenizer writes "6 4"
        found = re.findall(r"<answer>\s*([0-9]{1,9})\s*</answer>", answer)
        return int(found[0]) if len(found) == 1 else None

    def render(self) -> str:
        return f"number {self.secret}, guesses {self.guesses}"

    # ---- for --model tiny: it knows few words, and is warm-started by imitation of a player that errs

    def digits(self, number: int) -> str:
        """Zeros in front keep the columns of a word-level tokenizer in place."""
        return f"{number:0{len(str(self.top))}d}"

    def tiny_message(self) -> str:
        """What the guesses so far have told."""
        return f"between {self.digits(self.low)} and {self.digits(self.high)}"

    def scripted_answer(self, rng, skill: float) -> str:
        """With probability `skill` the middle of what is left, else any number that is left."""
        guess = (self.low + self.high) // 2 if rng.random() < skill else int(rng.integers(self.low, self.high + 1))
        return f"<answer>{self.digits(guess)}</answer>"
