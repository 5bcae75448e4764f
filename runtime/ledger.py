"""What a run costs: episodes, tokens, floating-point operations and seconds of sampling and of training; and from them mu,
the replay ratio, gamma and compute of Arnal et al. 2026 (arXiv 2604.08706, section 3).

What is counted is logged as cost/..., what comes of the clock as time/...: all other metrics of a run repeat to the digit.
"""
from collections import Counter

import numpy as np

from runtime import ranks

SCORED = ("reference", "proximal", "values", "probe")  # why log-probs or values of tokens were computed again
PHASES = ("sample", "fresh", "replay", "probe", "eval", "save")  # of an iteration, see runs.Clock; save: of the one before it
COUNTED = ("episodes_generated", "tokens_generated", "tokens_read", "episodes_trained", "episodes_computed", "tokens_trained",
           "tokens_trained_unique", "tokens_computed", *(f"tokens_scored_{kind}" for kind in SCORED))
SECONDS = ("sampler_busy", "sampler_idle", "trainer_busy", "trainer_idle", *PHASES)


def matmul_parameters(policy) -> int:
    """Parameters that a token is multiplied by: all but the input embedding where the output matrix is another one."""
    embedding = policy.get_input_embeddings().weight
    tied = policy.get_output_embeddings().weight is embedding
    return sum(parameter.numel() for parameter in policy.parameters()) - (0 if tied else embedding.numel())


def ratio(above: float, below: float) -> float | None:
    return above / below if below else None


def cost_ratio(mu: float | None, reuse: float | None) -> float | None:
    """gamma = (1 + mu/y)/(1 + mu): the cost of a training step with replay ratio y = B/R over that without replay. Where neither
    side waits, y = mu T/W and it is the paper's (1 + W/T)/(1 + mu)."""
    return (1 + mu / reuse) / (1 + mu) if mu is not None and reuse else None


class Ledger:
    """Totals of a run, kept in its checkpoints: `totals` is the dict that they are read from and written to.

    tokens_generated    sampled by the policy
    tokens_read         prompts (once a group, as engines keep them) and what environments said; and once more all of a
                        conversation where a sampler beside the training took new weights between its turns
    episodes_trained    episodes given to updates, counted at each use, also where none of a batch has a signal and no step is
                        taken; episodes_computed: those of them that went through the model; tokens_trained: their sampled
                        tokens that had a gradient, tokens_trained_unique: at their first use only; tokens_computed: all
                        tokens of those passes, once where episodes of a pass begin alike
    tokens_scored_*     forward passes beside them: reference, log-probs at an update's start (proximal), values, drift probe
    Evaluation is no cost of the method: it has seconds, but no tokens here.
    """

    def __init__(self, totals: dict, parameters: int, lora: bool = False, critic: bool = False, recompute: bool = False,
                 samplers: int = 0):
        """`parameters`: see matmul_parameters; `recompute`: of activations in the backward pass; `samplers`: processes that
        sample beside the training, 0: the trainer samples."""
        self.totals = totals
        for name in COUNTED + tuple(f"seconds_{name}" for name in SECONDS):
            totals.setdefault(name, 0)
        self.parameters, self.critic, self.samplers = parameters, critic, samplers
        self.per_token = (4 if lora else 6) + 2 * recompute
        self.new = Counter()  # of this process, not yet in the totals of all

    def add(self, name: str, amount):
        self.new[name] += amount

    def settle(self):
        """Adds what every process counted since the last time to the totals."""
        for name, amount in ranks.total(self.new).items():
            self.totals[name] += amount
        self.new.clear()

    def generated(self, episodes, reread: int = 0):
        """`reread`: tokens that were read again, see samplers.Follower."""
        self.add("episodes_generated", len(episodes))
        self.add("tokens_read", reread)
        groups = {}
        for episode in episodes:
            sampled = int(episode.action_mask.sum())
            prompt = int(episode.action_mask.argmax()) if sampled else len(episode.tokens)
            read = len(episode.tokens) - sampled - (prompt if episode.group_id in groups else 0)
            groups[episode.group_id] = True
            self.add("tokens_generated", sampled)
            self.add("tokens_read", read)

    def trained(self, episodes, metrics: dict, first_use):
        """An update on `episodes`; `first_use`: whether they were not trained on before, a bool or (B,) bools."""
        self.add("episodes_trained", len(episodes))
        self.add("episodes_computed", sum(log_ratios is not None for log_ratios in metrics["log_ratios"]))
        if ranks.first():  # the update's numbers are of all processes
            self.add("tokens_trained", metrics["tokens_trained"])
            self.add("tokens_computed", metrics["tokens_computed"])
        for episode, first, log_ratios in zip(episodes, np.broadcast_to(first_use, len(episodes)), metrics["log_ratios"]):
            if first and log_ratios is not None:
                self.add("tokens_trained_unique", int(episode.action_mask.sum()))

    def scored(self, tokens: dict):
        """Takes over the counts of `update.Learner.scored`."""
        for kind in list(tokens):
            self.add(f"tokens_scored_{kind}", tokens.pop(kind))

    def spent(self, laps: dict, busy: float | None = None, idle: float | None = None):
        """Seconds of an iteration by phase; `busy` and `idle` are those of all samplers together where they run beside it: then
        the trainer is idle in all that is no training, else while it samples and the sampler while it trains."""
        for name, seconds in laps.items():
            self.add(f"seconds_{name.removesuffix('_s')}", seconds)
        training = laps["fresh_s"] + laps["replay_s"]
        self.add("seconds_trainer_busy", training)
        self.add("seconds_trainer_idle", laps["sample_s"] if busy is None else sum(laps.values()) - training)
        self.add("seconds_sampler_busy", laps["sample_s"] if busy is None else busy)
        self.add("seconds_sampler_idle", training if idle is None else idle)

    def flops(self) -> dict[str, float]:
        """An estimate: 2 P a token forward, 6 P to train on it (4 P under LoRA, which needs no gradient of the weights; 2 P more
        with gradient checkpointing), the same again for a critic; attention over the context is left out."""
        totals, P = self.totals, self.parameters
        return {"generate": 2 * P * (totals["tokens_generated"] + totals["tokens_read"]),
                "train": self.per_token * P * totals["tokens_computed"] * (1 + self.critic),
                "score": 2 * P * sum(totals[f"tokens_scored_{kind}"] for kind in SCORED)}

    def metrics(self) -> dict:
        self.settle()
        totals, flops = self.totals, self.flops()
        generated, trained = totals["episodes_generated"], totals["episodes_trained"]
        seconds = {name: totals[f"seconds_{name}"] for name in SECONDS}
        reuse = ratio(trained, generated)  # y = B/R = K_train/K_inf
        mu_flops = ratio(flops["generate"] * trained, flops["train"] * generated)
        mu = ratio(seconds["sampler_busy"] * trained, seconds["trainer_busy"] * generated)
        shares = {f"{side}_idle_share": ratio(seconds[f"{side}_idle"], seconds[f"{side}_idle"] + seconds[f"{side}_busy"])
                  for side in ("sampler", "trainer")}
        return {**{f"cost/{name}": totals[name] for name in COUNTED},
                **{f"cost/flops_{name}": float(value) for name, value in flops.items()},
                "cost/flops": float(sum(flops.values())), "cost/replay_ratio": reuse,
                "cost/mu_flops": mu_flops, "cost/gamma_flops": cost_ratio(mu_flops, reuse),
                # the paper's estimator (K_train/T)/(K_inf/W) holds only where no side waits: read it beside the idle shares
                "time/mu_counts": ratio(trained * self.samplers, generated) if self.samplers else None,
                "time/mu": mu, "time/gamma": cost_ratio(mu, reuse),
                "time/compute": None if mu is None else trained + mu * generated,  # B + mu R: in episodes trained on
                **{f"time/{name}": value for name, value in shares.items()},
                **{f"time/total_{name}_s": seconds[name] for name in SECONDS}}
