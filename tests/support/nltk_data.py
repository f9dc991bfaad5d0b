"""Data of NLTK in small, made here: its own is fetched from a server that tests do not ask.

A sentence ends at a full stop; the stop words are a few; of words the tagger knows some verbs, and takes all others for nouns.
"""

import json
from pathlib import Path

STOP_WORDS = ("a", "all", "and", "at", "in", "is", "it", "of", "so", "the", "we")
VERBS = ("Go", "Write", "go", "write")
TAGGER = "averaged_perceptron_tagger_eng"
RESOURCES = ("tokenizers/punkt", "tokenizers/punkt_tab", f"taggers/{TAGGER}", "corpora/stopwords")


def make_nltk_data(folder: Path) -> None:
    """Write what the checkers of IFBench and IFEval read, for NLTK_DATA."""
    for resource in RESOURCES:
        (folder / resource).mkdir(parents=True)
    english = folder / "tokenizers/punkt_tab/english"
    english.mkdir()
    for name, text in {"abbrev_types.txt": "dr\nmr", "collocations.tab": "", "sent_starters.txt": "", "ortho_context.tab": ""}.items():
        (english / name).write_text(text)
    (folder / "corpora/stopwords/english").write_text("\n".join(STOP_WORDS))
    tagger = {"weights": {"bias": {"NN": 1.0}}, "tagdict": dict.fromkeys(VERBS, "VB"), "classes": ["NN", "VB"]}
    for name, table in tagger.items():
        (folder / "taggers" / TAGGER / f"{TAGGER}.{name}.json").write_text(json.dumps(table))
