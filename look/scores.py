"""The numbers of an evaluation, in words."""


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
