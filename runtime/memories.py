"""What remembers: the buffer and the problem sampler that the settings ask for."""
from buffer import ReplayBuffer
from losses import ADVANTAGES, objective_of, zero_advantage_is_silent
from problems import ProblemSampler
from runtime import ranks

FIRST_TAU = 100.0  # --tau auto, until the drift is measured
PRIORITIZED = ("per", "fresh")  # of --replay: these draw by priority


def stores_everything(args) -> bool:
    """Whether episodes whose advantages are all 0 are stored: not where they would never be worth a draw."""
    asked = args.replay_options["store_without_signal"]
    if asked is not None:
        return asked
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
    names = ("beta", "beta_end", "eps", "eviction", "unit", "draw", "max_age", "positive_fraction", "positive_advantage_only",
             "fresh_fraction")
    return ReplayBuffer(
        ranks.share_size(args.capacity), sampler="prioritized" if args.replay in PRIORITIZED else args.replay,
        priority=args.priority, alpha=args.alpha, age_law=args.age_law, tau=FIRST_TAU if args.tau == "auto" else args.tau,
        insert_priority="max" if "insert_max" in args.released else args.insert_priority,
        is_includes_age="is_includes_age" in args.released, min_size=ranks.share_size(args.replay_options["min_size"]),
        seed=ranks.seed(args.seed), **{name: args.replay_options[name] for name in names})
