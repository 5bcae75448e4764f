import base64
import hashlib
import json
import os
import re
import select
import shutil
import struct
import subprocess
import sys
import zlib
from html.parser import HTMLParser

import pytest
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

from look.viewer import checked, image_uri, main, page, page_data

ATTACKS = ["</script><script>alert(1)</script>", "<!--<script>", "</script x", "<!--<script ", "<img src=x onerror=alert(1)>",
           "a\u2028b\u2029c", "{{POLICY}}", "{{DATA}}", "\u202e\u2066gnp.evil\u2069", "\ud800 alone", "\x00\x1b[31m", "&lt;b&gt;",
           "__proto__", "javascript:alert(1)", "${alert(1)}`"]
FRAGMENTS = ["<", ">", "&", "/", "script", "!--", "\u2028", "\n", "\\", '"', "'", "{{", "}}", "DATA", "\u202e", "\ud83d"]


def png(pixels=((255, 0, 0), (0, 0, 255))):
    """A PNG file of one row, written out by hand."""
    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
    row = b"\0" + bytes(value for pixel in pixels for value in pixel)
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", len(pixels), 1, 8, 2, 0, 0, 0)) +
            chunk(b"IDAT", zlib.compress(row)) + chunk(b"IEND", b""))


def an_episode(iteration=1, kind="fresh", success=True, texts=("P _ G\n_ _ O", "_ P G\n_ _ O"), answers=("go", "Right"),
               **other):
    """An episode with one answer, of which `answers` are the sampled pieces."""
    pieces = ["<|user|>", texts[0], "<|assistant|>", *answers]
    mask = [0, 0, 0] + [1] * len(answers)
    info = {"success": success, "truncated": False, "turns": 1, "parse_failures": int(not success), "length_stops": 0,
            "context_full": False, "env_error": ""}
    transcript = [{"role": "user", "content": texts[0]}, {"role": "assistant", "content": " ".join(answers)},
                  {"role": "user", "content": texts[1]}]
    return {"iteration": iteration, "kind": kind, "problem_id": 7, "group_id": 8, "policy_step": 2, "weight": 1.0,
            "age": 4 if kind == "replay" else 0, "reward": 1.0 if success else -0.15, "score": float(success), "info": info,
            "transcript": transcript, "pieces": pieces, "action_mask": mask, "advantages": [0.5 * on for on in mask],
            "behavior_logprobs": [-0.25 * on for on in mask],
            "log_ratios": [0.125 * on for on in mask] if kind == "replay" else None} | other


def write(run, *records):
    run.mkdir(exist_ok=True)
    lines = "".join((record if isinstance(record, str) else json.dumps(record)) + "\n" for record in records)
    (run / "episodes.jsonl").write_text(lines, encoding="utf-8", errors="replace")
    return run / "episodes.jsonl"


class Page(HTMLParser):
    """What a browser would see of a page: tags with attributes, and the text of scripts and styles."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.scripts, self.styles, self.inside = [], [], [], None
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.inside = {"script": self.scripts, "style": self.styles}.get(tag)
        if self.inside is not None:
            self.inside.append("")

    def handle_endtag(self, tag):
        self.inside = None

    def handle_data(self, text):
        if self.inside is not None:
            self.inside[-1] += text


@pytest.mark.parametrize("limit, shown", [(20, range(1, 11)), (10, range(1, 11)), (4, [1, 4, 7, 10]), (1, [10])])
def test_of_many_episodes_an_even_spread_is_shown(tmp_path, limit, shown):
    data = page_data(write(tmp_path, *[an_episode(iteration) for iteration in range(1, 11)]), limit)
    assert [episode["iteration"] for episode in data["episodes"]] == list(shown) and data["total"] == 10


def test_data_of_a_run(tmp_path):
    event = {"iteration": 2, "event": "loss or gradient not finite"}
    cut, replayed = '{"iteration": 2, "kind": "fre', an_episode(3, "replay", success=False)
    data = page_data(write(tmp_path, an_episode(1), event, cut, replayed), 500)
    assert [episode["line"] for episode in data["episodes"]] == [1, 4] and data["total"] == 2
    assert data["episodes"][1]["log_ratios"] == [0, 0, 0, 0.125, 0.125] and data["episodes"][1]["reward"] == -0.15
    assert data["event_count"] == 1 and json.loads(data["events"][0]) == event
    assert data["broken_count"] == 1 and data["broken"][0]["line"] == 3


def test_an_old_run_without_kind_and_token_lists(tmp_path):
    old = {"iteration": 1, "problem_id": 3, "group_id": 8, "reward": 1.0, "score": 1.0, "info": {"success": True, "turns": 1},
           "transcript": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "<answer>"}]}
    episode = page_data(write(tmp_path, old), 9)["episodes"][0]
    assert episode["kind"] is None and episode["age"] is None and "pieces" not in episode and "note" not in episode
    assert episode["transcript"] == old["transcript"]


def test_lines_that_are_no_episode_are_counted(tmp_path):
    good = an_episode()
    wrong = [{"transcript": "text"}, {"transcript": [{"role": 1, "content": "x"}]}, {"info": None}, {"reward": "1"},
             {"iteration": None}]
    lines = ["[1, 2]", "[" * 100_000, "9" * 5000, "", *(good | change for change in wrong),
             json.dumps(good, ensure_ascii=False).replace("Right", "Ri\u2028\x85ght")]
    data = page_data(write(tmp_path, *lines), 500)
    assert data["broken_count"] == 9 and [broken["line"] for broken in data["broken"]] == list(range(1, 10))
    assert [episode["line"] for episode in data["episodes"]] == [10]  # U+2028 and U+0085 end no line


def test_numbers_that_json_does_not_share_become_null(tmp_path):
    line = json.dumps(an_episode()).replace('"weight": 1.0', '"weight": 1e999').replace("-0.25", "NaN")
    line = line.replace('"age": 0', '"age": ' + "9" * 400)
    html = page(page_data(write(tmp_path, line), 5))
    episode = json.loads(Page(html).scripts[0])["episodes"][0]
    assert episode["weight"] is None and episode["age"] is None
    assert episode["behavior_logprobs"] == [0, 0, 0, None, None]


@pytest.mark.parametrize("change", [{"pieces": ["one"]}, {"action_mask": None}, {"advantages": [0.0, "x", 0, 0, 0]},
                                    {"log_ratios": 5}, {"pieces": None}])
def test_token_lists_that_do_not_fit_are_left_out(change):
    episode = checked(an_episode() | change)
    assert "do not fit" in episode["note"] and not {"pieces", "advantages", "action_mask"} & set(episode)


def test_the_page_allows_no_network_and_only_its_own_script():
    html = page({"episodes": []})
    seen = Page(html)
    policy = next(attributes["content"] for _, attributes in seen.tags
                  if attributes.get("http-equiv") == "Content-Security-Policy")
    digest = {kind: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
              for kind, text in (("style", seen.styles[0]), ("script", seen.scripts[1]))}
    assert policy.startswith("default-src 'none'; ") and "unsafe" not in policy
    assert f"style-src 'sha256-{digest['style']}'" in policy and f"script-src 'sha256-{digest['script']}'" in policy
    assert [attributes for _, attributes in seen.tags if {"src", "srcset", "action", "data"} & set(attributes)] == []
    assert {attributes["href"] for _, attributes in seen.tags if "href" in attributes} == {"#main"}
    assert not [name for _, attributes in seen.tags for name in attributes if name.startswith("on") or name == "style"]
    assert re.findall(r"\w+://[^\"']*", html) == ["http://www.w3.org/2000/svg"]  # a name space, not an address
    assert not re.search(r"url\(|@import|innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|Function\(|fetch", html)


def assert_nothing_breaks_out(tmp_path, text):
    hostile = an_episode(kind=text, texts=(text, text), answers=(text, text))
    hostile["info"] |= {text or "empty": text, "env_error": text, "nested": [text]}
    hostile["transcript"][0]["image"] = text or "x"
    path = write(tmp_path, hostile, {"iteration": 1, "event": text}, text.replace("\n", " ") or "broken")
    data = page_data(path, 5)
    assert len(data["episodes"]) == 1
    seen, empty = Page(page(data)), Page(page({"episodes": []}))
    assert [tag for tag, _ in seen.tags] == [tag for tag, _ in empty.tags]
    assert len(seen.scripts) == 2 and seen.scripts[1] == empty.scripts[1]
    assert json.loads(seen.scripts[0]) == data
    assert seen.scripts[0].isascii() and not set("<>&") & set(seen.scripts[0])  # whatever an HTML parser does inside scripts
    shown = data["episodes"][0]
    assert shown["pieces"] == hostile["pieces"] and shown["transcript"] == hostile["transcript"] and shown["kind"] == text


@pytest.mark.parametrize("text", [*ATTACKS, "<&>" * 350_000], ids=lambda text: ascii(text[:20]))
def test_hostile_text_stays_text(tmp_path, text):
    assert_nothing_breaks_out(tmp_path, text)


@settings(max_examples=60, deadline=None)
@given(text=st.lists(st.sampled_from(FRAGMENTS)).map("".join))
def test_hostile_text_stays_text_fuzzed(tmp_path_factory, text):
    assert_nothing_breaks_out(tmp_path_factory.mktemp("run"), text)


def test_images_are_inlined_once(tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.png").write_bytes(png())
    turns = [{"role": "user", "content": "look", "image": "images/a.png"}] * 2
    data = page_data(write(tmp_path, an_episode(transcript=turns)), 5)
    inlined = "data:image/png;base64," + base64.b64encode(png()).decode()
    assert data["images"] == {"images/a.png": inlined} and not data["refused"]


@pytest.mark.parametrize("name", ["../secret.png", "/etc/hostname", "images/../../secret.png", "link.png", "folder", "..",
                                  "missing.png", "text.png", "a\0b", "x" * 5000])
def test_images_outside_the_run_are_refused_by_name(tmp_path, name):
    run = tmp_path / "run"
    (run / "folder").mkdir(parents=True)
    (tmp_path / "secret.png").write_bytes(png())
    (run / "link.png").symlink_to(tmp_path / "secret.png")
    (run / "text.png").write_text("<svg onload=alert(1)>")
    with pytest.raises(ValueError, match="the image"):
        image_uri(run, name)
    data = page_data(write(run, an_episode(transcript=[{"role": "user", "content": "look", "image": name}])), 5)
    assert data["images"] == {} and set(data["refused"]) == {name} and repr(name)[:40] in data["refused"][name]


def test_evaluation_without_text_is_no_broken_line(tmp_path):
    bare = {"iteration": 0, "score": 1.0}
    data = page_data(write(tmp_path, an_episode(0, "eval"), bare | {"kind": "eval"}, bare), 5)
    assert [episode["line"] for episode in data["episodes"]] == [1]
    assert [broken["line"] for broken in data["broken"]] == [3]


def test_main_writes_a_page_and_says_what_is_missing(tmp_path, capsys):
    run = write(tmp_path / "run", *(an_episode(iteration) for iteration in range(1, 8)), '{"cut').parent
    out = main([str(run), "--max-episodes", "4"])
    assert out == run / "episodes.html" and "4 of 7 episodes" in (said := capsys.readouterr().out) and "broken lines left out: 1" in said
    assert [episode["line"] for episode in json.loads(Page(out.read_text()).scripts[0])["episodes"]] == [1, 3, 5, 7]
    assert sorted(path.name for path in run.iterdir()) == ["episodes.html", "episodes.jsonl"]  # no temporary file stays
    assert main([str(run), "--out", str(tmp_path / "other.html")]).is_file()


def test_from_the_shell_it_ends_well(tmp_path):
    run = write(tmp_path / "run", an_episode()).parent
    done = subprocess.run([sys.executable, str(ROOT / "eval.py"), "show", str(run)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and "1 of 1 episodes" in done.stdout


@pytest.mark.parametrize("flags, message", [((), "holds no whole episode"), (("--max-episodes", "0"), "at least 1"),
                                            (("--out", "no/such/x.html"), "does not exist")])
def test_main_refuses(tmp_path, capsys, flags, message):
    run = write(tmp_path / "run", *([] if not flags else [an_episode()])).parent
    with pytest.raises(SystemExit) as stop:
        main([str(run), *flags])
    assert stop.value.code == 2 and message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([str(tmp_path / "nothing")])
    assert "no episodes.jsonl" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------- in a real browser


class Browser:
    """Chromium without a screen, driven over its debugging pipe (file descriptors 3 and 4): no port, no further package."""

    def __init__(self, profile):
        to_browser, from_browser = os.pipe(), os.pipe()

        def connect():
            os.dup2(to_browser[0], 100)
            os.dup2(from_browser[1], 101)
            os.dup2(100, 3)
            os.dup2(101, 4)
        self.process = subprocess.Popen(
            ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe",
             f"--user-data-dir={profile}"],
            preexec_fn=connect, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(to_browser[0])
        os.close(from_browser[1])
        self.input, self.output, self.buffer = to_browser[1], from_browser[0], b""
        self.sent, self.session, self.events = 0, {}, []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = {"sessionId": self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method, **params):
        self.sent += 1
        message = {"id": self.sent, "method": method, "params": params} | self.session
        os.write(self.input, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self.buffer:
                assert select.select([self.output], [], [], 60)[0], f"no answer to {method}"
                self.buffer += os.read(self.output, 1 << 20)
            message, self.buffer = self.buffer.split(b"\0", 1)
            message = json.loads(message)
            if message.get("id") == self.sent:
                assert "error" not in message, message
                return message["result"]
            self.events.append(message)

    def open(self, address, width, height, dark=False):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=address)
        while not self.run("document.readyState === 'complete' && location.protocol === 'file:'"):
            pass

    def run(self, script):
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def press(self, key):
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, text=key if len(key) == 1 else "")
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def screenshot(self, path):
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def close(self):
        self.process.terminate()
        self.process.wait()
        os.close(self.input)
        os.close(self.output)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if not shutil.which("chromium"):
        pytest.skip("chromium is not installed (on Debian: apt-get install chromium)")
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    run = tmp_path_factory.mktemp("runs") / "a <b>run"
    (run / "images").mkdir(parents=True)
    (run / "images" / "a.png").write_bytes(png())
    attack = "".join(ATTACKS[:5])
    hostile = an_episode(2, kind=attack, texts=(attack, attack), answers=(attack, "x" * 30_000))
    hostile["info"] |= {attack: attack, "env_error": attack}
    board = an_episode(3, "replay", success=False)
    board["transcript"][0]["image"] = "images/a.png"
    board["transcript"][2]["image"] = "../outside.png"
    long = an_episode(4, texts=("Two words. " * 4000, "done"), answers=["word "] * 5000)
    old = {"iteration": 5, "reward": 0.5, "score": 0.5, "info": {"success": False},
           "transcript": [{"role": "assistant", "content": "needle " + attack}]}
    write(run, an_episode(1), hostile, board, long, old, {"iteration": 5, "event": attack}, '{"cut')
    return main([str(run)]).as_uri()


def text(browser, selector):
    return browser.run(f"document.querySelector({selector!r})?.innerText ?? null")


def address_of(browser):
    """The address's part after #, once the page has written it."""
    return browser.run("new Promise(done => setTimeout(() => done(location.hash), 300))")


@pytest.mark.slow
@pytest.mark.parametrize("width, height, dark", [(1280, 900, False), (1280, 900, True), (390, 844, False), (390, 844, True)])
def test_every_episode_is_drawn_without_errors_and_fits_the_screen(browser, address, tmp_path, width, height, dark):
    browser.events.clear()
    for line in range(1, 6):
        for view in ("turns", "tokens"):
            browser.open(f"{address}#episode={line}&view={view}&colour=log-ratio", width, height, dark)
            assert text(browser, "h2") == f"Episode {line}"
            assert browser.run("document.documentElement.scrollWidth") <= width
            assert browser.run("document.querySelectorAll('script').length") == 2
            assert browser.run("document.querySelectorAll('main script, main [onerror], main iframe, main b b').length") == 0
    assert text(browser, "#run") == "a <b>run"
    dark_page = "rgb(18, 21, 26)" if dark else "rgb(245, 244, 239)"
    assert browser.run("getComputedStyle(document.body).backgroundColor") == dark_page
    browser.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")
    errors = ("Runtime.exceptionThrown", "Log.entryAdded", "Page.javascriptDialogOpening")
    errors = [event for event in browser.events if event["method"] in errors]
    asked = {event["params"]["request"]["url"][:5] for event in browser.events
             if event["method"] == "Network.requestWillBeSent"}
    assert errors == [] and asked <= {"file:", "about", "data:"}


@pytest.mark.slow
def test_keys_filters_and_links(browser, address):
    browser.open(address, 1280, 900)
    assert text(browser, "h2") == "Episode 1" and text(browser, "#place") == "1 of 5"
    browser.press("j")
    browser.press("ArrowRight")
    assert text(browser, "h2") == "Episode 3" and "episode=3" in address_of(browser)
    browser.press("k")
    browser.press("ArrowLeft")
    browser.press("k")  # there is none before the first
    assert text(browser, "h2") == "Episode 1"
    for _ in range(4):
        browser.press(".")
    assert text(browser, "#details").startswith("token 4: Right")  # the last one
    assert "advantage +0.5" in text(browser, "#details")
    assert "probability 0.779" in text(browser, "#details")  # exp(-0.25)
    browser.press("c")
    assert "colour=log-ratio" in address_of(browser) and "No log-ratios" in text(browser, ".legend")
    browser.press("v")
    assert browser.run("document.querySelectorAll('.tokens .other').length") == 3
    browser.press("G")
    assert text(browser, "h2") == "Episode 5"
    browser.press("/")
    assert browser.run("document.activeElement.name") == "q"
    for key in "Needle":
        browser.press(key)  # j, k and the like must not page here
    browser.run("new Promise(done => setTimeout(done, 300))")
    assert text(browser, "#place") == "1 of 1" and text(browser, "h2") == "Episode 5"
    assert "q=Needle" in address_of(browser)
    browser.press("Escape")
    browser.press("?")
    assert browser.run("document.querySelector('dialog').open")

    def kept(filters):
        browser.open(f"{address}#{filters}", 1280, 900)
        return browser.run("[...document.querySelectorAll('#list [data-line]')].map(button => Number(button.dataset.line))")
    assert kept("success=no") == [3, 5] and kept("kind=replay") == [3] and kept("parse=yes") == [3] and kept("error=yes") == [2]
    assert kept("age_min=1") == [3] and kept("reward_max=0.5") == [3, 5] and kept("iteration_min=2&iteration_max=3") == [2, 3]
    assert kept("order=lowest+reward") == [3, 5, 1, 2, 4] and kept("q=zebra") == []
    assert "No episode" in text(browser, "main")
    browser.run("document.querySelector('#clear').click()")
    assert text(browser, "#place") == "1 of 5"


@pytest.mark.slow
def test_what_is_shown_of_a_replayed_board(browser, address):
    browser.open(f"{address}#episode=3&colour=log-ratio", 1280, 900)
    assert browser.run("[...document.querySelectorAll('.board .moved')].map(cell => cell.innerText)") == ["_", "P"]
    assert browser.run("document.querySelector('main img').naturalWidth") == 2
    assert "'../outside.png' cannot be shown: it is not inside the run folder" in text(browser, "main")
    token = browser.run("(node => [node.title, node.className, node.style.getPropertyValue('--share')])"
                        "(document.querySelector('.turns .token'))")
    assert token == ["log-ratio +0.125", "token sampled high", "25%"]  # the scale ends at 0.5
    browser.run("document.querySelector('.turns .token').click()")
    assert "ratio 1.13" in text(browser, "#details") and address_of(browser).endswith("token=3")  # exp(0.125) = 1.133
    notices = browser.run("document.querySelector('#notices').textContent")
    assert "1 unreadable line of episodes.jsonl left out" in notices and "1 event" in notices and "line 7" in notices


@pytest.mark.slow
def test_the_theme_can_be_chosen(browser, address):
    browser.open(f"{address}#theme=dark", 1280, 900)
    assert browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(18, 21, 26)"


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True])
def test_contrast_of_text_and_token_colours(browser, address, dark):
    """WCAG 2: a contrast of 4.5 for text on every ground it stands on, the full token colours included."""
    browser.open(address, 1280, 900, dark)
    grounds = {"ink": ("page", "card", "sunk", "low", "high", "mark"), "soft": ("page", "card", "sunk"),
               "bad": ("page", "card", "sunk"), "accent": ("page", "card")}
    names = sorted({*grounds, *(name for under in grounds.values() for name in under)})
    colours = browser.run(f"Object.fromEntries({names}.map(" + """name => {
        const node = document.createElement("i"); node.style.color = `var(--${name})`; document.body.append(node);
        return [name, getComputedStyle(node).color.match(/\\d+/g).map(Number)]; }))""")

    def luminance(rgb):
        linear = [value / 255 / 12.92 if value <= 10 else ((value / 255 + 0.055) / 1.055) ** 2.4 for value in rgb]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    for ink, under in grounds.items():
        for ground in under:
            high, low = sorted((luminance(colours[ink]), luminance(colours[ground])), reverse=True)
            assert (high + 0.05) / (low + 0.05) >= 4.5, (ink, ground, (high + 0.05) / (low + 0.05))
