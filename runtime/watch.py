"""What may be going wrong in a run: where a number stops being finite, and what is worth a warning, with the flag that helps."""
import math
from pathlib import Path

import numpy as np
import torch

from runtime import ranks
from runtime.files import NotFinite, fail, read_yaml

WARNINGS = read_yaml(Path(__file__).with_name("warnings.yaml"))  # their texts

# ALGO LOGIC: when a run is warned. Healthy runs of all tiny configs stay below these by a factor of 1.5 or more.
SPIKE = 30.0  # times the median gradient norm of the same kind of update
SPIKE_HISTORY = 50  # updates that the median is taken over, and at least a fifth of them
ENTROPY_LEFT = 0.03  # share of the entropy of the first iteration
RATIO_KL = 2.0  # nats a token between the sampling and the current policy
RATIO_ESS = 0.02  # effective sample size as a share of the tokens
ENV_ERRORS = 0.1  # share of an iteration's environments that may raise in a step, each costs its episode; more end the run
CUT = 0.9  # share of answers that hit --max-new-tokens
TOO_OLD, TOO_OLD_HISTORY = 0.5, 6  # share of the episodes of so many iterations that are dropped by --max-staleness


def few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def bad_rows(name: str, tensor, episodes) -> str | None:
    """`name` and the episodes whose row of `tensor` (B, ...) is not finite, or None."""
    if bool(tensor.isfinite().all()):
        return None
    rows = (~tensor.isfinite()).reshape(len(tensor), -1).any(1).nonzero().flatten().tolist()
    kind = "NaN" if bool(tensor.isnan().any()) else "infinity"
    bad = [episodes[row] for row in rows]
    names = [f"iteration {episode.iteration} group {episode.group_id} problem {episode.problem_id}" for episode in bad]
    return f"{name} ({kind}) of {len(bad)} of {len(episodes)} episodes: {few(names)}"


def bad_weights(model, name: str = "policy") -> str | None:
    """The parameters of `model` that are not finite, or None."""
    bad = []
    for key, parameter in model.named_parameters():
        values = parameter.to_local() if hasattr(parameter, "to_local") else parameter  # of this process
        if not bool(values.isfinite().all()):
            bad.append(key)
    return f"weights of the {name}: {few(bad)}" if bad else None


def require_finite(name: str, tensor, episodes, *models):
    """NotFinite with `name`, the episodes and, where they are the cause, the weights of `models`."""
    found = bad_rows(name, torch.as_tensor(tensor), episodes)
    if found:
        weights = [text for model in models if model is not None and (text := bad_weights(model))]
        raise NotFinite(f"not finite: {'; '.join([*weights, found])}. The last checkpoint is from before; a smaller --lr or "
                        "--max-grad-norm often helps")


def where_not_finite(learner, metrics: dict) -> str:
    """Where an update stopped being finite, the first place in the order of the computation: weights, what the step was given,
    log-probs, loss, gradients."""
    if ranks.sharded():  # each process sees a part: no place that all of them agree on
        return "; ".join(metrics["bad"][:2]) or "the loss or a gradient"
    models = {"policy": learner.policy} | ({"critic": learner.critic} if learner.critic is not None else {})
    for name, model in models.items():
        if found := bad_weights(model, name):
            return found
    if metrics["bad"]:
        return "; ".join(metrics["bad"][:2])
    for name in ("loss", "value_loss"):
        if not math.isfinite(metrics.get(name, 0.0)):
            return f"{name.replace('_', ' ')} ({learner.objective.loss}), of finite log-probs and advantages"
    for name, model in models.items():  # the last one is where it starts: gradients come from the end
        bad = [key for key, parameter in model.named_parameters()
               if parameter.grad is not None and not bool(parameter.grad.isfinite().all())]
        if bad:
            return f"gradient of {name} {few(bad[::-1])}, of a finite loss"
    return "the norm of finite gradients"


class Watch:
    """Looks at each iteration and says once, with the likely cause and the flags that help, what may be going wrong. Its state
    goes into checkpoints, so that a resumed run does not say it again."""

    def __init__(self, args):
        self.args, self.told, self.norms, self.entropy = args, [], {"fresh": [], "replay": []}, None
        self.dropped = []  # [too old, all] episodes of the last iterations
        self.new = []  # what was said of this iteration

    def state_dict(self) -> dict:
        return {"told": self.told, "norms": self.norms, "entropy": self.entropy, "dropped": self.dropped}

    def load_state_dict(self, state: dict):
        vars(self).update(state)

    def look(self, infos: list[dict], fresh: list[dict], replayed: list[dict], too_old: int = 0) -> list[str]:
        """New warnings after an iteration: `info` of its episodes, metrics of its updates, number of those dropped as too old."""
        self.new = []
        self.answers(infos)
        self.stale(too_old, len(infos))
        self.entropy_of(fresh or replayed)
        for kind, updates in (("fresh", fresh), ("replay", replayed)):
            self.gradient(kind, updates)
            self.ratios(kind, updates)
        return self.new

    def tell(self, what: str, **numbers):
        """Says a warning with its numbers, unless one of its kind was said: `what` begins with its name in WARNINGS."""
        if what not in self.told:
            self.told.append(what)
            self.new.append(WARNINGS[what.split()[0]].format(args=self.args, **numbers))

    def answers(self, infos: list[dict]):
        turns, failed, cut = (sum(info[key] for info in infos) for key in ("turns", "parse_failures", "length_stops"))
        if turns and failed == turns:
            self.tell("parse", turns=turns, cut=cut)
        if cut > CUT * turns:
            self.tell("cut")

    def stale(self, too_old: int, episodes: int):
        if not episodes:
            return
        self.dropped = [*self.dropped, [too_old, episodes]][-TOO_OLD_HISTORY:]
        dropped, all = map(sum, zip(*self.dropped))
        if len(self.dropped) == TOO_OLD_HISTORY and dropped >= TOO_OLD * all:
            self.tell("stale", dropped=dropped, all=all, iterations=TOO_OLD_HISTORY)

    def gradient(self, kind: str, updates: list[dict]):
        norms = self.norms[kind]
        for update in updates:
            norm = update["grad_norm"]
            if not update["tokens_trained"] or not math.isfinite(norm):
                continue
            middle = float(np.median(norms)) if norms else math.inf
            if len(norms) >= SPIKE_HISTORY / 5 and norm > SPIKE * middle > 0:
                self.tell(f"spike {kind}", kind=kind, norm=norm, times=norm / middle, updates=len(norms),
                          stale=WARNINGS["spike_stale"] if kind == "replay" else "")
            norms.append(norm)
            del norms[:-SPIKE_HISTORY]

    def entropy_of(self, updates: list[dict]):
        values = [update["entropy"] for update in updates if math.isfinite(update.get("entropy", math.nan))]
        if not values:
            return
        now = float(np.mean(values))
        if self.entropy is None:
            self.entropy = now
        if now < ENTROPY_LEFT * self.entropy:
            self.tell("entropy", now=now, share=now / self.entropy)

    def ratios(self, kind: str, updates: list[dict]):
        for update in updates:
            kl, ess, clamped = (update.get(key) for key in ("kl_behavior_k3", "ess_token", "clamped"))
            if kl is not None and ess is not None and (kl > RATIO_KL or ess < RATIO_ESS or clamped):
                self.tell(f"ratios {kind}", kind=kind, kl=kl, ess=ess, clamped=clamped or 0, cause=WARNINGS[f"ratios_{kind}"])


def refuse_broken(args, iteration: int, played: list[dict], context_length: int):
    """Exits with 2 where too many environments raised, or no first message left room for an answer. `played`: metrics.outline."""
    broken = [row["info"]["env_error"] for row in played if row["info"]["env_error"]]
    if len(broken) > ENV_ERRORS * len(played):
        fail(f"{len(broken) / len(played):.0%} of the environments raised, more than the {ENV_ERRORS:.0%} "
             f"that a run bears; the first:\n{broken[0]}")
    if played and all(row["info"]["context_full"] and not row["answered"] for row in played):
        fail(f"no first message of iteration {iteration} leaves room for --max-new-tokens {args.max_new_tokens} in the "
             f"model's context of {context_length} tokens")
