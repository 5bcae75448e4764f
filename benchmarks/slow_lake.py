"""FrozenLake whose every move takes a while, as a search engine's or a browser's answer does: where sampling is what costs."""
import time

from envs import FrozenLake


class SlowLake(FrozenLake):
    slow = True  # moves of different episodes wait side by side

    def __init__(self, *, wait_ms: float = 25.0, prompt: str = "full"):
        super().__init__(prompt=prompt)
        self.wait_ms = wait_ms

    def step(self, answer: str):
        time.sleep(self.wait_ms / 1000)
        return super().step(answer)
