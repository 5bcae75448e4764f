"""What remembers: the buffer and the problem sampler that the settings ask for; a buffer in files, and dealt anew over another
number of processes."""
from pathlib import Path

import numpy as np

from buffer import ReplayBuffer
from losses import ADVANTAGES, objective_of, zero_advantage_is_silent
from problems import ProblemSampler
from runtime import ranks
from runtime.files import read_state

FIRST_TAU = 100.0  # --tau auto, until the drift is measured
PRIORITIZED = ("per", "fresh")  # of --replay: these draw by priority


def stores_everything(args) -> bool:
    """Whether episodes whose advantages are all 0 are stored: not where they would never be worth a draw."""
    if args.replay_options["store_without_signal"] is not None:
        return args.replay_options["store_without_signal"]
    objective = objective_of(args)
    silent = ADVANTAGES[objective.advantage].group_mean and zero_advantage_is_silent(objective)
    return not (silent and args.replay in PRIORITIZED)


def whole_groups(args) -> bool:
    """Whether a group is stored with all its members: where it is drawn as one, or normalised again when drawn."""
    return args.replay_options["unit"] == "group" or "replay_advantage" in args.released


def make_problem_sampler(args, problems: int) -> ProblemSampler:
    options = dict(args.problem_options)
    band = options.pop("band_low"), options.pop("band_high")
    return ProblemSampler(problems, mode=args.problem_sampler, group_size=max(2, args.group_size), band=band, seed=args.seed, **options)


def make_buffer(args) -> ReplayBuffer:
    names = args.replay_options.keys() - {"min_size", "store_without_signal", "drift_kl", "probe_episodes"}
    return ReplayBuffer(
        ranks.share_size(args.capacity), sampler="prioritized" if args.replay in PRIORITIZED else args.replay,
        priority=args.priority, alpha=args.alpha, age_law=args.age_law, tau=FIRST_TAU if args.tau == "auto" else args.tau,
        insert_priority="max" if "insert_max" in args.released else args.insert_priority,
        is_includes_age="is_includes_age" in args.released, min_size=ranks.share_size(args.replay_options["min_size"]),
        seed=ranks.seed(args.seed), **{name: args.replay_options[name] for name in names})


def load_buffer(folder: Path) -> ReplayBuffer:
    """The buffer whose state was written into `folder`."""
    state = read_state(folder)
    buffer = ReplayBuffer(**state["config"])
    buffer.load_state_dict(state)
    return buffer


def take_share(buffer: ReplayBuffer, shards: list[ReplayBuffer], part: int, parts: int) -> None:
    """Become, while empty, part `part` of `parts` of what `shards` hold together: whole prompt groups, dealt by age to the
    part that has fewest entries; what a part cannot hold is evicted. The first part takes over the totals.
    """
    groups: dict[int, list[tuple[ReplayBuffer, int]]] = {}
    for shard in shards:
        for slot in shard.live()[np.argsort(shard.id[shard.live()])].tolist():
            groups.setdefault(shard.members[slot][0].group_id, []).append((shard, slot))
    dealt: list[list[tuple[ReplayBuffer, int]]] = [[] for _ in range(parts)]
    for _, entries in sorted(groups.items()):  # ids of groups rise: in the order of arrival, which decides who leaves first
        min(dealt, key=len).extend(entries)

    mine = dealt[part]
    members, birthdays = [shard.members[slot] for shard, slot in mine], [shard.birthday[slot] for shard, slot in mine]
    slots = buffer.insert(members, birthdays, capacity=len(mine))
    for name in buffer.columns.keys() - {"id"}:
        getattr(buffer, name)[slots] = [getattr(shard, name)[slot] for shard, slot in mine]
    buffer.newest_birthday = max(shard.newest_birthday for shard in shards)
    own = [{"added": len(entries), "drawn": sum(int(shard.uses[slot]) for shard, slot in entries),
            "first_uses": sum(int(shard.uses[slot] > 0) for shard, slot in entries)} for entries in dealt]
    for name in buffer.counts:
        total = sum(shard.counts[name] for shard in shards)
        others = sum(counts.get(name, 0) for counts in own[1:])
        buffer.counts[name] = total - others if part == 0 else own[part].get(name, 0)
    buffer.set_tau(shards[0].tau)
    step = max([buffer.newest_birthday, *buffer.last_use.tolist()])  # the last that it knows of
    buffer.retire(buffer._beyond_capacity(step), "evicted")
