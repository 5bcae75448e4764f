"""Where a buffer keeps its entries, and counts what becomes of them. It knows of no priority and draws nothing."""
import math
import sys
from itertools import chain, islice

import numpy as np

from episode import Episode, pack_episodes, require, require_all, unpack_episodes

NONE = np.zeros(0, np.int64)  # no slots
COUNTS = ("added", "drawn", "first_uses", "reuse_gap", "evicted", "evicted_unused", "retired_uses", "dropped_by_age",
          "dropped_by_age_tokens", "stale_updates")


class Entries:
    """An entry, one or more episodes, has an id for ever, and lives in a slot: a row of each column, and a place in `members`.

    columns: what more of them hold where a slot is free, by name. Each column is an attribute.
    """

    def __init__(self, columns: dict[str, float]):
        self.columns = {"id": -1, "birthday": 0, "last_use": 0, "uses": 0, "bytes": 0} | columns
        self.next_id, self.newest_birthday = 0, -(2**62)
        self.counts = dict.fromkeys(COUNTS, 0)
        self.free: list[int] = []
        self.slot_of: dict[int, int] = {}
        self.members: list[tuple[Episode, ...]] = []
        for name, empty in self.columns.items():
            setattr(self, name, np.full(0, empty))

    def __len__(self) -> int:
        return len(self.slot_of)

    @property
    def nbytes(self) -> int:
        """Bytes of memory, episodes and Python objects included."""
        index = sum(map(sys.getsizeof, (self.members, self.free, self.slot_of))) + 64 * len(self)  # 64: an id and its slot
        return int(self.bytes.sum()) + index + sum(getattr(self, name).nbytes for name in self.columns)

    def insert(self, groups: list[tuple[Episode, ...]], birthdays: list[int], capacity: int) -> np.ndarray:
        """The slots of new entries, whose ids rise. There are never more slots than `capacity` and one insertion need."""
        lacking = len(groups) - len(self.free)
        if lacking > 0:
            self.resize(max(len(self.id) + lacking, min(2 * len(self.id), capacity + len(groups))))
        slots = [self.free.pop() for _ in groups]
        for slot, group, birthday in zip(slots, groups, birthdays):
            self.slot_of[self.next_id] = slot
            self.id[slot], self.birthday[slot], self.members[slot] = self.next_id, birthday, group
            self.newest_birthday = max(self.newest_birthday, int(birthday))
            self.bytes[slot] = sys.getsizeof(group) + sum(episode.nbytes for episode in group)
            self.next_id += 1
        self.counts["added"] += len(groups)
        return np.array(slots, np.int64)

    def resize(self, size: int) -> None:
        """More slots, all of them free."""
        old = len(self.id)
        self.free = list(range(size - 1, old - 1, -1)) + self.free
        self.members += [()] * (size - old)
        for name, empty in self.columns.items():
            setattr(self, name, np.concatenate([getattr(self, name), np.full(size - old, empty)]))

    def retire(self, slots: np.ndarray, reason: str) -> None:
        """Entries leave: "evicted" or "dropped_by_age"."""
        if not len(slots):
            return
        self.counts[reason] += len(slots)
        self.counts["retired_uses"] += int(self.uses[slots].sum())
        if reason == "evicted":
            self.counts["evicted_unused"] += int(np.count_nonzero(self.uses[slots] == 0))
        else:
            self.counts["dropped_by_age_tokens"] += sum(len(e.tokens) for slot in slots for e in self.members[slot])
        for id, slot in zip(self.id[slots].tolist(), slots.tolist()):
            del self.slot_of[id]
            self.members[slot] = ()
        for name, empty in self.columns.items():
            getattr(self, name)[slots] = empty
        self.free += slots.tolist()

    def table(self, step: int) -> dict[str, np.ndarray]:
        """All columns, a row for each slot, and "age": of integers, since floats lose digits where steps are large."""
        return {name: getattr(self, name) for name in self.columns} | {"age": step - self.birthday}

    def slots(self, ids: np.ndarray) -> np.ndarray:
        """-1 for entries that have left; ids that were never given out are an error."""
        if len(ids) and (ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= self.next_id):
            raise ValueError(f"ids {ids} must be integers that `add` gave out: 0..{self.next_id - 1}")
        return np.array([self.slot_of.get(id, -1) for id in ids.tolist()], np.int64)

    def live(self, without: np.ndarray = NONE) -> np.ndarray:
        """The slots of all entries, rising."""
        live = self.id >= 0
        live[without] = False
        return np.flatnonzero(live)

    def expired(self, step: int, max_age: int | None) -> np.ndarray:
        if max_age is None:
            return NONE
        return np.flatnonzero((self.id >= 0) & (step - self.birthday > max_age))

    def lowest(self, slots: np.ndarray, keys: np.ndarray, n: int) -> np.ndarray:
        """The n of `slots` with the smallest keys, O(N); among equal keys the smallest ids."""
        if n <= 0 or n >= len(slots):
            return slots[: max(n, 0)]
        threshold = np.partition(keys, n - 1)[n - 1]
        lower, ties = slots[keys < threshold], slots[keys == threshold]
        return np.concatenate([lower, ties[np.argsort(self.id[ties])[: n - len(lower)]]])

    def newest(self, n: int) -> np.ndarray:
        """The slots of the n that were born last, rising; of equal birthdays the largest ids."""
        if n == 0:
            return NONE
        slots = self.live()
        return self.live(without=self.lowest(slots, self.birthday[slots], len(slots) - n))

    def count_uses(self, slots: np.ndarray, step: int) -> np.ndarray:
        """Count a batch's uses; returns each row's steps since its last use (arXiv 2604.08706): -1 where it has none, 0 where it
        is in the batch once more."""
        gaps = np.where(self.uses[slots] == 0, -1, step - self.last_use[slots])
        again = np.ones(len(slots), bool)
        again[np.unique(slots, return_index=True)[1]] = False
        gaps[again] = 0
        np.add.at(self.uses, slots, 1)
        self.last_use[slots] = step
        first_uses = int(np.count_nonzero(gaps < 0))
        self.counts["drawn"] += len(slots)
        self.counts["first_uses"] += first_uses
        self.counts["reuse_gap"] += int(gaps.sum()) + first_uses
        return gaps

    def stats(self, step: int) -> dict[str, float | int | None]:
        names = ("age_mean", "age_p50", "age_p95", "age_max", "uses_mean")
        values = (None,) * 5
        slots = self.live()
        if len(slots):
            ages = step - self.birthday[slots]
            values = map(float, (ages.mean(), *np.percentile(ages, (50, 95, 100)), self.uses[slots].mean()))
        return {"size": len(self), "episodes": sum(map(len, self.members)), "bytes": self.nbytes, **dict(zip(names, values))}

    def state_dict(self) -> dict:
        """JSON-able values and plain arrays. Slots are part of it, so that draws continue exactly."""
        slots = self.live()
        members = [self.members[slot] for slot in slots.tolist()]
        state = {name: getattr(self, name)[slots] for name in self.columns}
        state |= {"slots": slots, "free": np.array(self.free, np.int64)}
        state["sizes"] = np.array([len(group) for group in members], np.int64)
        state |= {"next_id": self.next_id, "newest_birthday": self.newest_birthday, "counts": dict(self.counts)}
        packed = pack_episodes(list(chain.from_iterable(members)))
        return state | {f"episodes/{name}": value for name, value in packed.items()}

    def load_state_dict(self, state: dict) -> None:
        """Into one that is empty."""
        slots = state["slots"]
        self.resize(len(slots) + len(state["free"]))
        for name in self.columns:
            getattr(self, name)[slots] = state[name]
        packed = {name.removeprefix("episodes/"): value for name, value in state.items() if name.startswith("episodes/")}
        episodes = iter(unpack_episodes(packed))
        for slot, size in zip(slots.tolist(), state["sizes"].tolist()):
            self.members[slot] = tuple(islice(episodes, size))
        self.slot_of = dict(zip(state["id"].tolist(), slots.tolist()))
        self.next_id, self.newest_birthday = state["next_id"], state["newest_birthday"]
        self.free, self.counts = state["free"].tolist(), dict(state["counts"])


def require_same(saved: dict, now: dict, but: tuple[str, ...]) -> None:
    for name in now.keys() - set(but):
        require(saved[name] == now[name], f"the saved buffer has {name}={saved[name]!r}, this one {name}={now[name]!r}")


def checked_birthdays(birthdays, n: int, step: int) -> np.ndarray:
    birthdays = np.asarray(birthdays)
    require(birthdays.shape == (n,), f"birthdays has shape {birthdays.shape}, not ({n},)")
    if n:
        require(birthdays.dtype.kind in "iu", f"birthdays has dtype {birthdays.dtype}; it must be of integers")
        require(birthdays.max() <= step, f"birthday {birthdays.max()} is later than step={step}")
    return birthdays


def checked_priorities(base, n: int) -> np.ndarray:
    base = np.asarray(base, np.float64)
    require(base.shape == (n,), f"base has shape {base.shape}, not ({n},)")
    require_all((base >= 0) & (base < math.inf), "base", base, "a priority must be finite and at least 0")
    return base


def means_of_repeats(slots: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each slot once, and the mean of its values."""
    slots, inverse, repeats = np.unique(slots, return_inverse=True, return_counts=True)
    return slots, np.bincount(inverse, values) / repeats


def log(base) -> np.ndarray:
    with np.errstate(divide="ignore"):  # a priority of 0 is never drawn
        return np.log(base)


def rows_by_group(episodes: list[Episode]) -> list[list[int]]:
    groups: dict[int, list[int]] = {}
    for row, episode in enumerate(episodes):
        groups.setdefault(episode.group_id, []).append(row)
    return list(groups.values())
