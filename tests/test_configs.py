"""Every config: it parses, says what to expect, and holds only what differs from the defaults."""
import pytest
import yaml

from conftest import ROOT
from runtime.options import SEVERAL
from settings import Args, parse_args

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_parses_says_what_to_expect_and_differs_from_the_defaults(path, capsys):
    text = path.read_text()
    args = parse_args([str(path)])
    given = {key: value for key, value in yaml.safe_load(text).items() if key not in SEVERAL}
    usual = parse_args(["--model", args.model, "--env", args.env]) if args.model == "tiny" else Args()
    same = [key for key in given if getattr(args, key) == getattr(usual, key) and key != "env"]
    assert "xpect" in text or "shows the path at work" in text or "shows the whole path" in text
    assert not same or same == ["iterations"], f"{path.name} repeats the default of {same}"


def test_there_is_a_config_of_each_size_for_each_task():
    found = {(parse_args([str(path)]).env.split(":")[0], "tiny" if "tiny" in path.stem else "smollm2" if "smollm2" in path.stem
              else "published") for path in CONFIGS}
    for env in ("frozenlake", "sokoban", "cliffwalking", "maths", "search"):
        assert (env, "smollm2") in found and (env, "published") in found
        assert (env, "tiny") in found or (env == "maths" and ("arithmetic", "tiny") in found)
