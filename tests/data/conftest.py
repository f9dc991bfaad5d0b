from pathlib import Path

import pytest

from streamrl.data.characters import write_tokenizer
from streamrl.data.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="session")
def characters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("characters")
    write_tokenizer(directory)
    return directory


@pytest.fixture(scope="session")
def tokenizer(characters: Path) -> Tokenizer:
    return load_tokenizer(characters)
