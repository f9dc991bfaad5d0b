from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.config import check_sampling
from streamrl.config.load import dump, from_json, load, override
from streamrl.errors import ConfigError
from tests.support.errors import raises


def test_a_logit_bias_is_by_token_in_a_file_an_override_and_a_record(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1", "label": "1"}\n')
    file = tmp_path / "run.toml"
    file.write_text(f"[data]\ntrain = {str(rows)!r}\n[sampling]\nlogit_bias = {{ 17 = -1, 3 = 2.5 }}\nstop = ['</a>']\nregex = '[0-9]+'\n")
    config = load(file, ["sampling.logit_bias.9=1.5", "evaluation.sampling.min_p=0.05"])
    assert config.sampling.logit_bias == {17: -1.0, 3: 2.5, 9: 1.5} and config.sampling.stop == ("</a>",)
    assert config.evaluation.sampling.min_p == 0.05
    assert from_json(dump(config)).sampling == config.sampling
    assert override(config, ["sampling.logit_bias.3=0"]).sampling.logit_bias == {17: -1.0, 3: 0.0, 9: 1.5}


def test_a_grammar_that_is_none_or_has_no_library_is_refused_before_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1", "label": "1"}\n')
    file = tmp_path / "run.toml"
    file.write_text(f"[data]\ntrain = {str(rows)!r}\n")
    for given in ("sampling.regex='('", 'sampling.json_schema=\'{"type": "foo"}\'', 'evaluation.sampling.json_schema=\'{"type": "foo"}\''):
        with raises(ConfigError, key=given.partition("=")[0]) as caught:
            load(file, [given])
        assert "llguidance" in caught.value.message
    monkeypatch.setattr(check_sampling.importlib.util, "find_spec", lambda name: None)
    with raises(ConfigError, key="sampling.regex") as caught:
        load(file, ["sampling.regex='[0-9]+'"])
    assert "streamrl[grammar]" in caught.value.hint
