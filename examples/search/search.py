"""A tool that looks things up: a query between search tags gets the passages that BM25 ranks highest, and then the model answers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import bm25s

CORPUS = [json.loads(line)["text"] for line in Path(__file__).with_name("corpus.jsonl").read_text(encoding="utf-8").splitlines()]
INDEX = bm25s.BM25()
INDEX.index(bm25s.tokenize(CORPUS, stopwords="en", show_progress=False), show_progress=False)


async def agent(task, engine):
    chat = engine.chat(task)
    shown = []
    turn = await chat.generate()
    for _ in range(engine.options["searches"]):
        query = query_of(turn.text)
        if query is None or chat.is_full:
            break
        passages = search(query, engine.options["passages"])
        shown += passages
        chat.tool("\n".join(passages) or "nothing was found")  # masked: the model is not trained to write it
        turn = await chat.generate(max_new_tokens=engine.options["answer_tokens"])
    return chat.episode(metadata={"shown": shown})


def query_of(text):
    """What stands before the last closing tag, without an opening one; None: it asks nothing."""
    found = re.search(r"(?:.*<search>)?(.*?)</search>", text, flags=re.DOTALL)
    return found[1].strip() if found else None


def search(query, k):
    """The k passages that fit best, the best one last, nearest to the answer; those without a word of the query are left out."""
    words = bm25s.tokenize(query, stopwords="en", show_progress=False)
    found, scores = INDEX.retrieve(words, k=k, show_progress=False)
    return [CORPUS[place] for place, score in zip(found[0][::-1], scores[0][::-1], strict=True) if score > 0]


def score(task, episode):
    answer = task.metadata["answer"]
    return {
        "found": 0.3 if any(passage.endswith(answer) for passage in episode.metadata["shown"]) else 0.0,
        "right": 0.7 if episode.completion.strip() == answer else 0.0,
    }
