"""What must not happen whatever a model, a config, a server or a file on the way says."""
import ast
import http.server
import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import requests
import yaml

from conftest import ROOT
from engines import vllm as vllm_engine
from look.compare import read_run
from look.curves import plot_learning_curves
from look.viewer import page, page_data
from models import load_policy
from runtime.files import read_yaml
from runtime.log import wandb_login
from settings import parse_args

SOURCES = sorted(ROOT.glob("*.py")) + sorted((ROOT / "studies").glob("*.py")) + sorted((ROOT / "benchmarks").glob("*.py"))


# ------------------------------------------------------------------------------------------------- nothing is unpickled


def dotted(node) -> str:
    parts = []
    while isinstance(node, ast.Attribute):
        parts, node = [node.attr, *parts], node.value
    return ".".join([node.id if isinstance(node, ast.Name) else "", *parts])


def unsafe(source: str) -> list[str]:
    """What in a program could run foreign code or load a pickle."""
    found = []
    for node in ast.walk(ast.parse(source)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else \
            [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        found += [name for name in names if name.split(".")[0] in
                  ("pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "code", "jsonpickle")]
        if not isinstance(node, ast.Call):
            continue
        name, given = dotted(node.func), {word.arg: word.value for word in node.keywords}
        last = name.rpartition(".")[2]
        false = lambda key: isinstance(given.get(key), ast.Constant) and given[key].value is False  # noqa: E731
        true = lambda key: isinstance(given.get(key), ast.Constant) and given[key].value is True  # noqa: E731
        if name in ("eval", "exec", "compile", "__import__", "os.system", "os.popen") or last in ("read_pickle", "unsafe_load",
                                                                                                   "full_load"):
            found.append(name)
        if name in ("torch.load", "load_checkpoint_in_model") and not true("weights_only"):
            found.append(name)
        if name in ("np.load", "numpy.load") and not false("allow_pickle"):
            found.append(name)
        if name == "yaml.load" and not re.search("BaseLoader|SafeLoader|loader", ast.unparse(node)):
            found.append(name)
        if true("shell") or true("trust_remote_code") or true("allow_pickle"):
            found.append(f"{name} {sorted(given)}")
        if last == "from_pretrained" and re.search("(?<!Peft)Model|LM|Bert|kind", name) and not (
                true("use_safetensors") or "gguf_file" in given):
            found.append(f"{name} without use_safetensors")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_no_source_loads_a_pickle_or_runs_text(path):
    assert unsafe(path.read_text()) == []


@pytest.mark.parametrize("source", [
    "import pickle", "from joblib import load", "torch.load(path)", "torch.load(path, weights_only=False)", "import shelve",
    "np.load(path)", "np.load(path, allow_pickle=True)", "yaml.load(text, yaml.UnsafeLoader)", "yaml.unsafe_load(text)",
    "eval(text)", "exec(text)", "os.system(text)", "subprocess.run(text, shell=True)", "AutoModelForCausalLM.from_pretrained(x)",
    "AutoTokenizer.from_pretrained(x, trust_remote_code=True)"])
def test_the_scan_finds_what_it_looks_for(source):
    assert unsafe(source)


# ------------------------------------------------------------------------------------------------------ code of a model


def test_code_that_comes_with_a_model_does_not_run_unless_asked(tiny_folder, tmp_path):
    folder, marker = tmp_path / "model", tmp_path / "ran"
    model, tokenizer = load_policy(tiny_folder)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "foreign", "auto_map": {"AutoConfig": "foreign.Config", "AutoModelForCausalLM": "foreign.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "foreign.py").write_text(f"open({str(marker)!r}, 'w')\nfrom transformers import LlamaConfig, LlamaForCausalLM\n\n\n"
                                       "class Config(LlamaConfig):\n    model_type = 'foreign'\n\n\n"
                                       "class Model(LlamaForCausalLM):\n    config_class = Config\n")
    with pytest.raises(ValueError, match="trust-remote-code"):
        load_policy(folder)
    assert not marker.exists()
    model, _ = load_policy(folder, trust_remote_code=True)
    assert marker.exists() and type(model).__name__ == "Model"


def test_pickled_weights_are_refused(tiny_folder, tmp_path):
    import torch
    model, tokenizer = load_policy(tiny_folder)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="safetensors"):
        load_policy(tmp_path)
    (tmp_path / "config.json").rename(tmp_path / "adapter_config.json")
    with pytest.raises(ValueError, match="safetensors"):
        load_policy(tmp_path)


# ------------------------------------------------------------------------------------------------------------- network

BLOCK = '''
import os, socket, traceback


def refused(*arguments, **_):
    with open(os.environ["TRIED"], "a") as file:
        file.write("".join(traceback.format_stack()) + repr(arguments[1:]))
    raise OSError("no network in this test")


real = socket.socket.connect
socket.socket.connect = lambda self, address: real(self, address) if self.family == socket.AF_UNIX else refused(self, address)
socket.socket.connect_ex = socket.socket.connect
socket.getaddrinfo = socket.gethostbyname = socket.create_connection = refused
'''


def test_the_main_job_uses_no_network(quick_flags, tmp_path):
    """With the default --wandb on, where nobody is logged in."""
    (tmp_path / "sitecustomize.py").write_text(BLOCK)
    flags = [flag if flag != "off" else "on" for flag in quick_flags]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB_", "HF_"))}
    done = subprocess.run(
        [sys.executable, ROOT / "train.py", *flags, "--iterations", "2", "--runs-dir", tmp_path, "--name", "run"],
        env=environment | {"PYTHONPATH": str(tmp_path), "TRIED": str(tmp_path / "tried"), "NETRC": str(tmp_path / "none")},
        capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "tried").exists(), (tmp_path / "tried").read_text()
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*"))


def test_a_wandb_login_is_seen_without_asking_wandb(monkeypatch, tmp_path):
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert not wandb_login()
    (tmp_path / "netrc").write_text("machine example.org\n  login user\n  password x\n")
    assert not wandb_login()
    monkeypatch.setenv("WANDB_BASE_URL", "https://example.org")
    assert wandb_login()
    monkeypatch.delenv("WANDB_BASE_URL")
    monkeypatch.setenv("WANDB_API_KEY", "x")
    assert wandb_login()


class Bad(http.server.BaseHTTPRequestHandler):
    asked = []

    def do_GET(self):
        Bad.asked.append(self.path)
        if self.path == "/hang":
            time.sleep(1.5)
        self.send_response(302 if self.path == "/redirect" else 200)
        if self.path == "/redirect":
            self.send_header("Location", "/elsewhere")
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.mark.parametrize("path, tries, words", [("/hang", 2, "timed out"), ("/redirect", 1, "302")])
def test_a_vllm_server_that_misbehaves_is_an_error_in_time(monkeypatch, path, tries, words):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    Bad.asked.clear()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Bad)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    client = SimpleNamespace(url=f"http://127.0.0.1:{server.server_port}", session=requests.Session(),
                             timeout=0.3 if path == "/hang" else 5)  # the other may be slow on a busy machine
    monkeypatch.setattr(vllm_engine.time, "sleep", lambda seconds, sleep=time.sleep: sleep(min(seconds, 1.5)))
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=words):
        vllm_engine.VLLMServer.ask(client, path, tries=2)
    assert time.monotonic() - started < 10 and Bad.asked == [path] * tries  # and nothing where a redirect points
    server.shutdown()
    server.server_close()


# ----------------------------------------------------------------------------------------------- names, paths, configs


def refused(capsys, *flags) -> str:
    with pytest.raises(SystemExit) as stop:
        parse_args(list(flags))
    assert stop.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("name", ["../../x", "/tmp/x", "a/b", "..", ".", " ", ".hidden", "a\0b", "a\nb", "x" * 300, "-x", "é",
                                  "a b", "a\\b", "\ud800", "$x^$"])
def test_the_name_of_a_run_is_no_path(capsys, tmp_path, name):
    assert "--name" in refused(capsys, f"--name={name}", "--runs-dir", str(tmp_path))
    (tmp_path / "x.yaml").write_text(f"name: {json.dumps(name)}\n")
    message = refused(capsys, str(tmp_path / "x.yaml"))
    assert "--name" in message or "cannot read" in message  # YAML itself refuses some


def test_the_name_that_a_run_gets_by_itself_is_a_plain_one(tmp_path):
    config = tmp_path / "..$we ird\n.yaml"
    config.write_text("lr: 0.001\n")
    assert re.fullmatch(r"_we_ird_?-grpo-fresh-seed0-\d{8}-\d{6}", parse_args([str(config)]).name)


@pytest.mark.parametrize("flags", [("--runs-dir", "a\0b"), ("--model", "a\x1bb"), ("--env-options", "size", "4\0")])
def test_control_characters_are_refused_with_the_flag(capsys, flags):
    assert f"{flags[0]} " in refused(capsys, *flags)


@pytest.mark.parametrize("there", [False, True])
def test_a_run_whose_name_is_a_link_is_refused(there, tmp_path, quick_flags, capsys):
    from train import main
    (tmp_path / "runs").mkdir()
    if there:
        (tmp_path / "elsewhere").mkdir()
    (tmp_path / "runs" / "x").symlink_to(tmp_path / "elsewhere")  # to nothing, so that it does not "exist", or to an empty folder
    with pytest.raises(SystemExit):
        main(parse_args([*quick_flags, "--runs-dir", str(tmp_path / "runs"), "--name", "x", "--iterations", "1"]))
    assert "exists already" in capsys.readouterr().err and not list(tmp_path.glob("elsewhere/*"))


LAUGHS = "a0: &a0 lol\n" + "".join(f"a{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * 9)}]\n" for n in range(30))


@pytest.mark.parametrize("text, words", [
    (LAUGHS, "aliases"), ("lr: &x 1\nwarmup_steps: *x\n", "aliases"), ("lr: " + "[" * 5000, "nesting"), ("#" * 10**6, "65,536"),
    ("lr: !!python/object/apply:os.system ['true']", "lr"), ("env_options: {--resume: runs/x}", "env_options")])
def test_a_hostile_config_is_refused_at_once(capsys, tmp_path, text, words):
    (tmp_path / "x.yaml").write_text(text)
    started = time.monotonic()
    message = refused(capsys, str(tmp_path / "x.yaml"))
    assert words in message and len(message) < 2000 and time.monotonic() - started < 10


def test_a_config_without_an_end_is_refused():
    with pytest.raises(yaml.YAMLError, match="65,536"):
        read_yaml(Path("/dev/zero"))


def test_the_config_of_a_foreign_run_is_read_as_plain_values(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1}\n')
    for text in (LAUGHS, "seed: !!python/object/apply:os.getcwd []\n", "seed: " + "1" * 5000):
        (tmp_path / "config.yaml").write_text(text)
        with pytest.raises(ValueError, match="cannot be read"):
            read_run(tmp_path, "iterations", "eval/success")


# ------------------------------------------------------------------------------------------------- pages and pictures


@pytest.mark.parametrize("name", ["<script>alert(1)<\u2215script>", "<img src=x onerror=alert(1)>", "&lt;\u2028'\"", "{{DATA}}"])
def test_the_name_of_a_run_stays_text_in_its_page(tmp_path, name):
    run = tmp_path / name
    run.mkdir()
    (run / "episodes.jsonl").write_text(json.dumps({"iteration": 1, "info": {"env": name}, "transcript": [
        {"role": name, "content": name}]}) + "\n")
    data = re.search('<script type="application/json" id="data">(.*?)</script>', page(page_data(run / "episodes.jsonl", 5)))[1]
    assert json.loads(data)["run"] == name and not set(data) & set("<>&")


def test_formulas_in_a_folders_name_do_not_break_its_picture(tmp_path):
    run = tmp_path / r"$\frac{1}$ $x^$"
    run.mkdir()
    (run / "metrics.jsonl").write_text(json.dumps({"iteration": 1, "eval/success": 0.5, "eval/start_success": 0.4,
                                                   "fresh/reward": 0.1}) + "\n")
    plot_learning_curves([run], run / "x.png")
    assert (run / "x.png").stat().st_size > 1000
