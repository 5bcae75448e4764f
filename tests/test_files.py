"""Files that a kill leaves whole: what is made once and kept, and what is read back. Killed runs are in test_resume.py."""
import multiprocessing
import os
import time

import pytest

from envs import FrozenLake
from runtime import files
from runtime.files import made_once, read_lines, task_files, whole_lines, write_whole
from tasks.sokoban import Sokoban


def slowly(temporary):
    time.sleep(0.3)
    (temporary / "weights").write_text(str(os.getpid()))


def make_in(folder):
    made_once(folder, ("weights",), slowly)


def test_processes_that_want_the_same_folder_make_it_once(tmp_path):
    folder = tmp_path / "cache" / "tiny_1"
    processes = [multiprocessing.get_context("fork").Process(target=make_in, args=(folder,)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    made_by = (folder / "weights").read_text()
    make_in(folder)
    assert (folder / "weights").read_text() == made_by and int(made_by) in [process.pid for process in processes]
    assert sorted(path.name for path in folder.parent.iterdir()) == ["tiny_1", "tiny_1.lock"]
    assert [path.name for path in folder.iterdir()] == ["weights"]


def test_a_folder_that_lacks_a_file_is_made_anew(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "half").write_text("")
    make_in(tmp_path / "a")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["weights"]


def test_what_cannot_be_made_leaves_nothing(tmp_path):
    def fails(temporary):
        (temporary / "weights").write_text("half")
        raise OSError("disk full")
    with pytest.raises(OSError, match="disk full"):
        made_once(tmp_path / "a", ("weights",), fails)
    assert [path.name for path in tmp_path.iterdir()] == ["a.lock"]


def test_lines_that_were_cut_are_left_out_and_counted(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"iteration": 1, "x": "\u2028"}\n[1]\n{"x": 1}\n{"iteration": "2"}\n{"iteration": 3}\n{"iterat')
    assert read_lines(path) == ([{"iteration": 1, "x": "\u2028"}, {"iteration": 3}], 4)
    assert [record["iteration"] for record in whole_lines(path)] == [1, 3]
    assert read_lines(tmp_path / "absent.jsonl") == ([], 0)


def test_a_text_is_written_whole_in_utf8(tmp_path):
    write_whole(tmp_path / "a", "é√")
    assert (tmp_path / "a").read_bytes() == "é√".encode()


def test_the_files_of_a_task_are_those_of_its_classes_and_what_lakes_share():
    assert [path.name for path in task_files(FrozenLake())] == ["envs.py", "boards.py"]
    assert [path.name for path in task_files(Sokoban())] == ["envs.py", "boards.py", "sokoban.png", "sokoban.py"]


def test_a_long_part_says_every_ten_seconds_where_it_is(monkeypatch, capsys):
    clock = iter([0.0, 4.0, 10.0, 10.0, 15.0, 21.0, 21.0])
    monkeypatch.setattr(files.time, "monotonic", lambda: next(clock))
    assert list(files.progress(range(4), "update")) == [0, 1, 2, 3]
    assert capsys.readouterr().out == "update 1 of 4\nupdate 3 of 4\n"
