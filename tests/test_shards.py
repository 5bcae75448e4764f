"""A buffer in files, and its entries dealt over another number of processes."""
import math

import numpy as np
import pytest
from test_buffer import check_valid, filled, make, same

from buffer import ReplayBuffer
from runtime.files import write_state
from runtime.memories import load_buffer, take_share
from runtime.metrics import use_stats


@pytest.mark.parametrize(
    "arguments",
    [
        {}, {"draw": "iid"}, {"unit": "group"}, {"sampler": "positive_bias", "positive_fraction": 0.25}, {"max_age": 6},
        {"sampler": "uniform"}, {"eviction": "lowest_priority", "insert_priority": "max"}, {"tau": math.inf},
        {"sampler": "never_used_first", "fresh_fraction": 0.25}, {"beta_end": 0.5}, {"sampler": "newest"},
    ],
)  # fmt: skip
def test_saved_and_loaded_buffers_continue_alike(arguments, tmp_path):
    def play(buffer, start, stop):
        log_ = []
        for step in range(start, stop):
            rows = [
                make(step, advantage=0.1 * i, score=i, group=3 * step + i // 2, success=i % 2 == 0) for i in range(6)
            ]
            buffer.add(rows, step)
            if step == 11:
                buffer.set_tau(5.0)
            sample = buffer.sample(3, step)
            buffer.update_priorities(sample.ids, 1 / (1 + np.arange(len(sample.ids))))
            log_.append((sample.ids.tolist(), sample.weights.tolist(), sample.ages.tolist(), buffer.beta))
        return log_

    one = ReplayBuffer(20, seed=4, **arguments)
    play(one, 0, 12)
    write_state(tmp_path / "here", one.state_dict())
    write_state(tmp_path / "here", one.state_dict())  # again, over the first
    assert len(list((tmp_path / "here").iterdir())) == 2
    two = load_buffer(tmp_path / "here")
    check_valid(two)
    with pytest.raises(ValueError, match="earlier than a birthday, 11"):
        two.sample(3, 10)
    assert same(one.state_dict(), two.state_dict()) and two.tau == 5.0
    assert play(one, 12, 24) == play(two, 12, 24)
    assert same(one.state_dict(), two.state_dict())


def test_files_hold_no_pickle(tmp_path):
    buffer = filled([1.0, 2.0])
    write_state(tmp_path, buffer.state_dict())
    (arrays,) = tmp_path.glob("*.npz")
    with np.load(arrays, allow_pickle=False) as file:
        assert all(file[name].dtype != object for name in file.files)


@pytest.mark.parametrize("before, after", [(2, 3), (3, 1), (1, 2), (2, 5)])
def test_resharding_keeps_every_entry(before, after):
    """Entries with their ages, priorities and uses, and the totals, survive a change of the number of ranks."""
    saved = []
    for rank in range(before):
        shard = ReplayBuffer(40, tau=7.0, seed=rank)
        for step in range(3):
            shard.add([make(group=100 * step + 10 * rank + row // 4, step=step, advantage=1 + row + rank)
                       for row in range(8)], step=step)
            shard.sample(4, step)
        saved.append(shard)
    parts = []
    for rank in range(after):
        part = ReplayBuffer(40 * before, tau=3.0, seed=rank)
        take_share(part, saved, rank, after)
        check_valid(part)
        parts.append(part)

    def facts(buffers):
        return sorted((buffer.members[slot][0].group_id, float(buffer.log_base[slot]), int(buffer.birthday[slot]),
                       int(buffer.uses[slot]), int(buffer.last_use[slot])) for buffer in buffers for slot in buffer.live())

    assert facts(parts) == facts(saved)
    groups = [{members[0].group_id for members in part.members if members} for part in parts]
    assert sum(map(len, groups)) == len(set.union(*groups))
    assert max(map(len, parts)) - min(map(len, parts)) <= 4
    totals = [use_stats({name: sum(buffer.counts[name] for buffer in buffers) for name in saved[0].counts})
              for buffers in (saved, parts)]
    assert totals[0] == totals[1]
    assert {part.tau for part in parts} == {7.0}
    for part in parts:
        part.sample(2, 3)
        part.add([make(group=999)], step=3)
        check_valid(part)


def test_a_full_buffer_is_resharded_within_capacity():
    full = ReplayBuffer(10, seed=0)
    full.add([make(group=row // 5, step=row // 5) for row in range(10)], step=2)
    parts = [ReplayBuffer(4 if rank else 6) for rank in (0, 1)]
    for rank, part in enumerate(parts):
        take_share(part, [full], rank, 2)
        check_valid(part)
    assert [len(part) for part in parts] == [5, 4] and parts[1].counts["evicted"] == 1
