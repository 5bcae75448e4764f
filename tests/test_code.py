"""Which code a run is of."""
import json
import shutil
import subprocess

import pytest
from conftest import ROOT, tiny_lake
from runtime import code
from runtime.code import code_files, keep_code, patch_of


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A folder with a buffer and a task of its own, both in git."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    for name in ("buffer.py", "envs.py"):
        shutil.copy(ROOT / name, folder / name)
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@y"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "all"]):
        subprocess.run([*git, *words], cwd=folder, check=True)
    monkeypatch.setattr(code, "TOP", folder)
    monkeypatch.setattr(code, "NAMES", ("buffer", "envs"))
    monkeypatch.setattr(code, "task_files", lambda env: [])
    return folder


def edit(checkout, old, new):
    text = (checkout / "buffer.py").read_text()
    assert old in text
    (checkout / "buffer.py").write_text(text.replace(old, new))


def test_the_patch_holds_what_was_edited_and_can_be_applied(checkout):
    assert patch_of(code_files(None)) == ""
    edit(checkout, "-entries[\"age\"] / tau", "-2 * entries[\"age\"] / tau")
    edited = (checkout / "buffer.py").read_text()
    patch = patch_of(code_files(None))
    assert "+    return -2 * entries[\"age\"] / tau" in patch and "envs.py" not in patch
    subprocess.run(["git", "checkout", "-q", "."], cwd=checkout, check=True)
    subprocess.run(["git", "apply", "-"], input=patch, text=True, cwd=checkout, check=True)
    assert (checkout / "buffer.py").read_text() == edited


def test_without_git_the_patch_holds_whole_files(checkout):
    shutil.rmtree(checkout / ".git")
    patch = patch_of(code_files(None))
    for name in ("buffer.py", "envs.py"):
        lines = (checkout / name).read_text().splitlines()
        assert f"+++ b/{name}" in patch and all(f"+{line}" in patch for line in lines)


def test_a_run_that_goes_on_with_other_code_has_the_digests_of_both(checkout, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    first = keep_code(run, None, 0)
    assert keep_code(run, None, 4) == first == json.loads((run / "code.json").read_text())
    assert not list(run.glob("code.until*"))
    edit(checkout, "uniform", "constant")
    other = keep_code(run, None, 5)
    assert other["envs.py"] == first["envs.py"] and other["buffer.py"].startswith(first["buffer.py"] + "+")
    assert (run / "code.until_5.patch").read_text() == "" and "constant" in (run / "code.patch").read_text()
    assert keep_code(run, None, 6) == other
    assert keep_code(run, None, 0)["buffer.py"] == other["buffer.py"].split("+")[1]  # begun anew


def test_the_task_of_a_run_is_part_of_its_code():
    assert {"envs.py", "tasks/boards.py", "losses.py"} <= {code.name_of(path) for path in code_files(tiny_lake())}
