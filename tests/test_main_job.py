"""The main job itself, with its real warm start: slow."""
import functools
import json

import numpy as np
import pytest

from conftest import tiny_lake, train
from engines.hf import HFEngine
from envs import FrozenLake
from eval import evaluate
from models import load_policy
from policies.chat import Chat

pytestmark = pytest.mark.slow
PLAY = dict(max_turns=10, max_new_tokens=6, temperature=1.0, format_penalty=0.15, context_length=1024)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Eight iterations of the default configuration from a cold cache."""
    folder = tmp_path_factory.mktemp("main")
    train("--runs-dir", folder, "--cache-dir", folder / "cache", "--name", "main", "--iterations", 8, "--eval-every", 4,
          "--wandb", "off")
    return folder


def test_success_rises_by_a_quarter_in_eight_iterations(run):
    summary = json.loads((run / "main" / "summary.json").read_text())
    assert 0.2 <= summary["start_success"] <= 0.5
    assert summary["final_success"] >= max(0.6, summary["start_success"] + 0.25)


def test_the_warm_started_policy_reads_the_board(run):
    folder = next(path for path in (run / "cache").iterdir() if path.is_dir())
    report = json.loads((folder / "warm_start.json").read_text())
    assert report["imitation_loss_nats_per_move"] < report["blind_player_nats_per_move"] - 0.03
    policy, tokenizer = load_policy(folder)

    class Shuffled(FrozenLake):
        """Plays one map and shows another, with the player where it really is."""
        def observation(self):
            real, self.map = self.map, self.board((int(sum(map(ord, "".join(self.map)))) * 7919) % 1000)
            shown = super().observation()
            self.map = real
            return shown

    success = {}
    for env in (FrozenLake, Shuffled):
        engine = HFEngine(policy, [tokenizer.eos_token_id], tokenizer.pad_token_id)
        make_env = functools.partial(env, prompt="tiny")
        success[env] = evaluate(engine, Chat(tokenizer), make_env, tiny_lake().problems("heldout", 512), **PLAY)["success"]
    # two proportions of 512 episodes: three standard errors of their difference
    error = np.sqrt(sum(share * (1 - share) / 512 for share in success.values()))
    assert success[FrozenLake] - success[Shuffled] > 3 * error
