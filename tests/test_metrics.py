"""runtime/metrics.py: tables and counts of what a buffer holds."""
import math

import pytest
from test_buffer import make

from buffer import ReplayBuffer
from runtime.metrics import by_age, merged



def test_by_age_counts_what_is_held():
    buffer = ReplayBuffer(8, priority="uniform", tau=2.0, alpha=1.0, eps=0.0)
    ids = [buffer.add([make(step=birthday)], 5)[0] for birthday in (0, 3, 3)]
    held = by_age(buffer, 5)
    young, old = math.exp(-2 / 2), math.exp(-5 / 2)
    assert held["age"] == [2, 5] and held["count"] == [2, 1] and held["priority"] == pytest.approx([1, 1])
    assert held["mass"] == pytest.approx([2 * young / (2 * young + old), old / (2 * young + old)])
    buffer.sample(2, 5), buffer.sample(3, 5)
    assert sum(use * count for use, count in enumerate(by_age(buffer, 5)["uses"])) == 5 and len(ids) == 3
    assert by_age(buffer, 50, bins=1)["count"] == [3]
    assert by_age(ReplayBuffer(8), 0)["age"] == []


def test_what_a_loss_returns_is_logged_without_another_edit():
    updates = [{"loss": 1.0, "my_share": 0.25, "steps": 1, "log_ratios": [None], "bad": []}, {"loss": 3.0, "my_share": 0.75, "steps": 1}]
    found = merged(updates)
    assert (found["loss"], found["my_share"], found["steps"]) == (2.0, 0.5, 2)
    assert "log_ratios" not in found and "bad" not in found
    assert merged([])["loss"] is None and merged([])["steps"] == 0  # curves have gaps there, and no hole in the columns
