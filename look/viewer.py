"""One HTML file to page through a run's episodes: no server, no network, everything inlined.

The page itself (layout, script) is viewer.html. What a model or a task wrote is hostile text: here it only ever becomes
JSON inside a script element that is not executed, and there only text nodes.
"""
import base64
import hashlib
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from PIL import Image

from runtime.files import fail, parsed, write_whole

NUMBERS = ("problem_id", "group_id", "policy_step", "age", "weight", "reward", "score")
PER_TOKEN = ("action_mask", "advantages", "behavior_logprobs", "log_ratios")


def finite(value):
    """The value; None for a NaN, an infinity or an integer that no float holds, which JSON readers do not share."""
    return value if value is None or isinstance(value, str) or abs(value) < 1e300 else None


def checked(record: dict) -> dict:
    """The parts of an episode that the page shows, each of the type it expects; ValueError names what is not. Token lists
    that do not fit each other are left out, and `note` says so."""
    numeric = (int, float, type(None))
    types = {"iteration": int, "info": dict, "transcript": list, "kind": (str, type(None)), **dict.fromkeys(NUMBERS, numeric)}
    for key, kind in types.items():
        if not isinstance(record.get(key), kind):
            raise ValueError(f"{key} is {record.get(key)!r:.60}")
    for turn in record["transcript"]:
        if not (isinstance(turn, dict) and isinstance(turn.get("role"), str) and isinstance(turn.get("content"), str)):
            raise ValueError(f"a turn without role and content: {turn!r:.60}")
    episode = {key: finite(record.get(key)) for key in ("iteration", "kind", *NUMBERS)}
    episode["info"] = {key: finite(value) if isinstance(value, (str, *numeric)) else json.dumps(value)
                       for key, value in record["info"].items()}
    episode["transcript"] = [{"role": turn["role"], "content": turn["content"]} |
                             ({"image": str(turn["image"])} if turn.get("image") else {})
                             for turn in record["transcript"]]
    lists = {key: record[key] for key in ("pieces", *PER_TOKEN) if record.get(key) is not None}
    length = len(lists["pieces"]) if isinstance(lists.get("pieces"), list) else -1
    fit = "action_mask" in lists and all(
        isinstance(values, list) and len(values) == length and
        all(isinstance(value, str if key == "pieces" else numeric) for value in values) for key, values in lists.items())
    if lists and not fit:
        return episode | {"note": f"The token lists ({', '.join(lists)}) do not fit each other and are left out."}
    return episode | {key: values if key == "pieces" else [finite(value) and float(f"{value:.4g}") for value in values]
                      for key, values in lists.items()}


def image_uri(run: Path, name: str) -> str:
    """The PNG or JPEG file `name` of the run folder as a data: address; ValueError, by name, for anything else."""
    try:
        path = (run / name).resolve()
        if not path.is_relative_to(run.resolve()):
            raise ValueError("it is not inside the run folder")
        with Image.open(path, formats=("PNG", "JPEG")) as picture:  # by its first bytes, whatever the name says
            kind = picture.format.lower()
        return f"data:image/{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"
    except (OSError, ValueError) as error:
        raise ValueError(f"the image {name!r} cannot be shown: {error}") from None


def page_data(path: Path, limit: int) -> dict:
    """What the page shows of a run's episodes.jsonl; an episode's `line` is its line there, from 1. Read twice, since a long
    run's file may not fit in memory."""
    places, events, broken = [], [], []
    with open(path, "rb") as file:
        for line_number, line in enumerate(file, start=1):
            start = file.tell() - len(line)
            try:
                record = parsed(line)
                if "event" in record and "transcript" not in record:
                    events.append(json.dumps(record))
                elif record.get("kind") != "eval" or "transcript" in record:  # an evaluation keeps the text of a few
                    checked(record)
                    places.append((line_number, start))
            except (ValueError, RecursionError) as error:
                broken.append({"line": line_number, "why": str(error)})
        episodes = []
        spread = np.linspace(len(places) - 1, 0, min(len(places), limit)).round().astype(int)[::-1]
        for line_number, start in [places[place] for place in spread]:
            file.seek(start)
            episodes.append(checked(parsed(file.readline())) | {"line": line_number})
    images, refused = {}, {}
    for name in {turn["image"] for episode in episodes for turn in episode["transcript"] if "image" in turn}:
        try:
            images[name] = image_uri(path.parent, name)
        except ValueError as error:
            refused[name] = str(error)
    return {"run": path.resolve().parent.name, "file": path.name, "total": len(places), "episodes": episodes,
            "event_count": len(events), "events": events[-100:], "broken_count": len(broken), "broken": broken[:20],
            "images": images, "refused": refused}


def digest(template: str, tag: str) -> str:
    """The hash by which a Content-Security-Policy allows the text of the template's one `tag` element."""
    text = re.search(f"<{tag}>(.*?)</{tag}>", template, re.DOTALL)[1]
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def page(data: dict) -> str:
    """The whole HTML file. Its policy allows nothing but this style, this script and inlined images."""
    template = (Path(__file__).parent / "viewer.html").read_text(encoding="utf-8")
    policy = (f"default-src 'none'; style-src {digest(template, 'style')}; script-src {digest(template, 'script')}; "
              "img-src data:; base-uri 'none'; form-action 'none'")
    text = json.dumps(data, allow_nan=False)  # ASCII: U+2028 and lone surrogates are escaped already
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    before, after = template.replace("{{POLICY}}", policy).split("{{DATA}}")
    return before + text + after


@dataclass
class ShowArgs:
    """Write a page to read a run's episodes in a browser."""
    run: Annotated[str, tyro.conf.Positional]
    """Folder of the run."""
    file: str = "episodes.jsonl"
    """The run's file to show; eval_episodes.jsonl is what eval.py played."""
    out: str | None = None
    """The file to write. None: in the run's folder, episodes.html."""
    max_episodes: int = 500
    """Episodes in the page; of more, an even spread from the first to the last."""


def main(argv: list[str]) -> Path:
    args = tyro.cli(ShowArgs, args=argv, prog="eval.py show")
    path = Path(args.run) / args.file
    if not path.is_file():
        fail(f"{args.run} has no {args.file}: give the folder of a run, such as runs/NAME")
    if args.max_episodes < 1:
        fail(f"--max-episodes {args.max_episodes} must be at least 1")
    data = page_data(path, args.max_episodes)
    if not data["episodes"]:
        fail(f"{path} holds no whole episode yet ({data['broken_count']} broken lines)")
    out = Path(args.out or path.with_suffix(".html"))
    if not out.parent.is_dir():
        fail(f"--out {out}: the folder {out.parent} does not exist")
    write_whole(out, page(data))
    print(f"{out}: {len(data['episodes'])} of {data['total']} episodes, {out.stat().st_size / 1e6:.1f} MB" +
          (f", broken lines left out: {data['broken_count']}" if data["broken_count"] else ""))
    for why in data["refused"].values():
        print(f"note: {why}", file=sys.stderr)
    return out
