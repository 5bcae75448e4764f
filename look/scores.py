"""The numbers of an evaluation: their intervals, and in words."""
import numpy as np


def bootstrap_interval(rows_NM: np.ndarray, draws: int = 2000) -> tuple[np.ndarray, np.ndarray]:
    """95 % percentile interval of the mean over N problems, drawn anew; too narrow for few (at 5 it holds 81 %), nan for one."""
    rng = np.random.default_rng(2026)
    means = np.array([rows_NM[rng.integers(len(rows_NM), size=len(rows_NM))].mean(axis=0) for _ in range(draws)])
    low, high = np.percentile(means, [2.5, 97.5], axis=0)
    return (low, high) if len(rows_NM) > 1 else (low * np.nan, high * np.nan)


def report(result: dict) -> str:
    """The numbers of `summarise` as lines for people."""
    n = result["samples"]
    lines = [
        f"{result['checkpoint']}: {' '.join([result['env'], *map(str, sum(result['env_options'].items(), ()))])}, "
        f"{result['problems']} held-out problems, {n} sample{'s' * (n > 1)} each, "
        f"temperature {result['temperature']:g}; with 95 % intervals over problems"]
    for name in result:
        if f"{name}_low" in result and name != "pass^1":  # pass@1 again
            lines.append(f"  {name:10} {result[name]:.3f}  ({result[f'{name}_low']:.3f} to {result[f'{name}_high']:.3f})")
    if n > 1 and result["majority"] is None:
        lines.append("  majority   n/a: the task names no predictions")
    lines += [f"  {name:10} {value:.3f}" for name, value in result["task"].items()]
    broken = round(result["env_errors"] * result["episodes"])
    lines.append(f"  {result['turns']:.1f} turns and {result['tokens']:.0f} tokens an episode, {result['sampled_tokens']:.0f} of "
                 f"them sampled ({n * result['sampled_tokens']:.0f} a problem)\n"
                 f"  answers: {result['parse_failures']:.1%} not valid, {result['length_stops']:.1%} cut at --max-new-tokens; "
                 f"{result['truncated']:.1%} of episodes cut off; "
                 f"{broken} of {result['episodes']} broken by the environment" + ", counted as failures" * (broken > 0))
    return "\n".join(lines)
