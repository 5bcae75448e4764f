"""Which problems of a task that makes its own are asked: the first different ones on their side of the split."""
from episode import one_of, require

PATIENCE = 10_000  # ids without a new problem before a task says that there are no more


def first_different(split: str, count: int, content, side_of, what: str, hint: str = "") -> list[int]:
    """The first `count` ids of "train" or "heldout", each with other content: `content(id)` is a text, `side_of(text)` its side.
    Raises ValueError when there are fewer of `what`."""
    one_of("split", split, ("train", "heldout"))
    ids, seen, problem_id, last = [], set(), 0, 0
    while len(ids) < count:
        require(problem_id - last <= PATIENCE, f"there are only {len(ids)} different {split} {what} (no new one in {PATIENCE} "
                f"ids), {count} were asked for: ask for fewer{hint}")
        text = content(problem_id)
        if side_of(text) == split and text not in seen:
            seen.add(text)
            ids.append(problem_id)
            last = problem_id
        problem_id += 1
    return ids
