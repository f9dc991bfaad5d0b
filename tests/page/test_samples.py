from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from streamrl.bus.memory.bus import MemoryBus
from streamrl.bus.protocol import Bus
from streamrl.data.characters import write_tokenizer
from streamrl.data.tokenizer import Tokenizer, load_tokenizer
from streamrl.errors import NotFound
from streamrl.page.attention import Attention
from streamrl.page.conversation import Marks, conversation, marks_of
from streamrl.page.index import LEDGER_TABLE, open_index
from streamrl.page.log import RunLog
from streamrl.page.samples import Samples
from streamrl.page.search import Ends, Found, Wanted, around, turns_of
from streamrl.runtime.rundir import RunDir
from streamrl.schemas.codec import encode
from streamrl.schemas.encoding import encode_samples
from streamrl.schemas.ledger import Drop, LedgerEntry, Used
from streamrl.schemas.samples import Sample, Status, TurnSpan, VersionSpan
from streamrl.schemas.subjects import SAMPLES, Subjects
from streamrl.schemas.versions import Version
from streamrl.trainers.protocol import TokenValues
from streamrl.trainers.token_weights import FOLDER, TokenWeights
from tests.support.batches import train_batch

SUBJECTS = Subjects("demo")
HOSTILE = "<script>alert(1)</script>"


def sample(tokenizer: Tokenizer, task: int, rollout: int, *, reward: float, answer: str, version: int) -> Sample:
    prompt, said = tokenizer.encode(f"<|user|>{task}+0<|end|><|assistant|>"), tokenizer.encode(answer + "<|end|>")
    return Sample(
        **{"run": "demo", "policy": "policy", "source": "main", "task": task, "rollout": rollout, "group_size": 2, "reward": reward},
        tokens=np.array(prompt + said, np.int32),
        loss_mask=np.array([0] * len(prompt) + [1] * len(said), np.uint8),
        logprobs=np.array([0.0] * len(prompt) + [-0.5] * len(said), np.float32),
        spans=(VersionSpan(len(prompt), None), VersionSpan(len(said), Version(0, version))),
        status=Status.TRUNCATED if rollout else Status.COMPLETED,
    )


class Log(RunLog):
    """A log that is there."""

    there: Bus

    async def bus(self) -> Bus:
        return self.there


@asynccontextmanager
async def samples(run: RunDir) -> AsyncGenerator[tuple[Samples, MemoryBus]]:
    """Five batches of two groups each, which task 100 + version was dropped before."""
    write_tokenizer(run.model_dir)
    tokenizer = load_tokenizer(run.model_dir)
    bus = MemoryBus("demo")
    config = run.load_config()

    async def group(task: int, version: int, reward: float) -> int:
        pair = [sample(tokenizer, task, at, reward=reward + at, answer=f"{task} is it" + "!" * at, version=version - 1) for at in range(2)]
        return (await bus.publish(SUBJECTS.samples("main"), encode_samples(pair))).sequence

    with open_index(run) as index:
        for version in range(1, 6):
            tasks = (10 * version, 10 * version + 1)
            stands = {task: await group(task, version, version / 10) for task in tasks}
            used = tuple(Used(task, (0, 1), (sequence, sequence)) for task, sequence in stands.items())
            lost = await group(100 + version, version, 0.0)
            drops = (Drop(lost, 100 + version, (0, 1), "stale"), Drop(0, 999, (), "expired"))
            entry = LedgerEntry(
                **{"run": "demo", "trainer": config.trainer.name, "source": "main", "cursor": lost, "granted": 0, "retired": 0},
                version=Version(0, version),
                used=used,
                drops=drops,
                metrics={"train/tis": 1.25, "rollout/raw_reward": 1.0},
            )
            stored = (await bus.publish(SUBJECTS.ledger(config.trainer.name), encode(entry))).sequence
            index.add(LEDGER_TABLE, {"version": version, "epoch": 0, "sequence": stored}, source="ledger", mark=stored, forks=True)
        index.commit()
        log = Log(run, index, config.trainer.name, Attention())
        log.there = bus
        yield Samples(run, config, index, log), bus


async def found(some: Samples, wanted: Mapping[str, Any], *, upto: int | None = None, batches: int = 100, skip: int = 0) -> Found:
    return await some.search(msgspec.convert(wanted, Wanted, strict=False), upto=upto, batches=batches, skip=skip)


async def test_filters_go_over_several_batches_and_say_how_far_they_looked(run: RunDir) -> None:
    async with samples(run) as (some, _):
        every = await found(some, {})
        assert (every.batches, every.num_samples, len(every.samples), every.first, every.more) == (5, 30, 30, 1, None)
        assert [hit.line.batch for hit in every.samples[:6]] == ["0.5"] * 6
        two = await found(some, {"became": "trained"}, upto=4, batches=2)
        assert ({hit.line.batch for hit in two.samples}, two.first, two.more) == ({"0.4", "0.3"}, 3, 2)
        assert len((await found(some, {}, upto=two.more)).samples) == 12
        for wanted, count in (
            ({"became": "trained"}, 20),
            ({"became": "dropped"}, 10),
            ({"became": "stale"}, 10),
            ({"became": "expired"}, 0),
            ({"least_reward": "1.3"}, 6),
            ({"most_reward": "0.1"}, 7),
            ({"task": "31"}, 2),
            ({"task": "103", "status": "truncated"}, 1),
            ({"version": "0.2"}, 6),
            ({"least_tokens": "18"}, 10),
            ({"text": "31 IS it!"}, 1),
            ({"text": "31+0"}, 2),
            ({"text": "nobody said"}, 0),
        ):
            assert len((await found(some, wanted)).samples) == count, wanted
        assert (await found(some, {"text": "31 is it!"})).samples[0].text.startswith("<|user|>31+0")
        assert every.samples[0].text == "50 is it<|end|>"


@pytest.mark.parametrize(
    ("bound", "most"), [("MOST_HITS", 1), ("MOST_HITS", 4), ("MOST_HITS", 6), ("MOST_MESSAGES", 2), ("_SEARCH_S", 0.0)]
)
async def test_a_search_that_ends_in_a_batch_goes_on_there(run: RunDir, monkeypatch: pytest.MonkeyPatch, bound: str, most: float) -> None:
    monkeypatch.setattr(f"streamrl.page.samples.{bound}", most)
    async with samples(run) as (some, _):
        parts = [await found(some, {}, batches=1)]
        while parts[-1].more is not None:
            assert parts[-1].samples, "it goes on"
            parts.append(await found(some, {}, upto=parts[-1].more, skip=parts[-1].skip, batches=1))
        lines = [hit.line for part in parts for hit in part.samples]
        assert len({(line.task, line.rollout) for line in lines}) == len(lines) == 30
        assert (sum(part.batches for part in parts), sum(part.num_samples for part in parts)) == (5, 30)


async def test_messages_that_are_gone_are_counted_and_the_others_found(run: RunDir) -> None:
    async with samples(run) as (some, bus):
        await bus.trim(SAMPLES, through=4)
        every = await found(some, {})
        assert (len(every.samples), every.missing, every.batches) == (22, 4, 5)


async def test_a_group_has_its_conversations_and_the_weights_that_are_known(run: RunDir) -> None:
    async with samples(run) as (some, _):
        group = await some.group(3, 31)
        assert group.weights == {"train/tis": 1.25}
        assert [(part["role"], part["text"]) for part in group.samples[1]["conversation"]] == [
            ("user", "31+0"),
            ("assistant", "31 is it!<|end|>"),
        ]
        assert [one["became"] for one in group.samples] == ["trained"] * 2
        assert [one["became"] for one in (await some.group(3, 103)).samples] == ["stale"] * 2
        for task in (999, 1, 41):
            with pytest.raises(NotFound, match=str(task)):
                await some.group(3, task)
        assert [one["weights"] for one in group.samples] == [None] * 2
        batch = train_batch(
            [
                {"prompt": [1] * one["mask"].index(1), "answer": [2] * sum(one["mask"]), "task": 31, "rollout": n}
                for n, one in enumerate(group.samples)
            ],
            mu=-2.0,
            reward=1.0,
        )
        values = TokenValues(np.full(batch.num_tokens, -0.25), np.linspace(0.5, 1.5, batch.num_tokens))
        file = TokenWeights(run.path / FOLDER, 1 << 20)
        file.put(Version(0, 3), batch, values)
        file.close()
        first = (await some.group(3, 31)).samples[0]
        assert first["weights"] == [pytest.approx(values.weights[n], abs=1e-4) if mask else None for n, mask in enumerate(first["mask"])]
        assert first["trainer_logprobs"][-1] == -0.25
        assert (await some.group(3, 103)).samples[0]["weights"] is None, "it was dropped"
        batch = await some.batch(3)
        assert (len(batch.samples), len(batch.drops), batch.missing) == (4, 2, 0)


def test_a_turn_has_the_versions_that_sampled_it() -> None:
    old, new = Version(0, 3), Version(0, 4)
    said = Sample(
        **{"run": "r", "policy": "p", "source": "main", "task": 1, "rollout": 0, "started_s": 2.0, "began_s": 3.0, "finished_s": 9.0},
        tokens=np.zeros(9, np.int32),
        loss_mask=np.zeros(9, np.uint8),
        logprobs=np.zeros(9, np.float32),
        spans=tuple(VersionSpan(length, version) for length, version in ((3, None), (2, old), (1, None), (1, old), (2, new))),
    )
    two = (
        TurnSpan(start=3, length=2, asked_s=2.0, began_s=3.0, finished_s=4.0),
        TurnSpan(start=6, length=3, asked_s=7.0, finished_s=8.0),
        TurnSpan(start=9, length=0),
    )
    assert [msgspec.structs.astuple(turn) for turn in turns_of(said)] == [(2.0, 3.0, 9.0, "0.3", "0.4")]
    assert [msgspec.structs.astuple(turn) for turn in turns_of(msgspec.structs.replace(said, turns=two))] == [
        (2.0, 3.0, 4.0, "0.3", "0.3"),
        (7.0, 0.0, 8.0, "0.3", "0.4"),
    ]
    assert turns_of(msgspec.structs.replace(said, finished_s=0.0)) == ()


@pytest.mark.parametrize("wanted", [{"least_reward": "x"}, {"task": "1.5"}, {"nobody": "1"}, {"text": "x" * 2000}])
def test_filters_that_say_nothing_are_refused(wanted: dict[str, str]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(wanted, Wanted, strict=False)


def test_a_drop_of_a_whole_message_is_that_of_each_sample_in_it() -> None:
    kind = {"run": "r", "trainer": "t", "source": "main", "cursor": 9, "granted": 0, "retired": 0, "version": Version(0, 1)}
    entry = LedgerEntry(
        **kind, used=(Used(1, (0,), (5,)),), drops=(Drop(6, 2, (), "poison"), Drop(5, 1, (0,), "late"), Drop(7, 3, (1,), "mine"))
    )
    tokens = np.zeros(2, np.int32)

    def one(task: int, rollout: int, trained: int = 1) -> Sample:
        kind = {"run": "r", "policy": "p", "source": "main", "task": task, "rollout": rollout}
        mask = np.array([0, trained], np.uint8)
        return Sample(**kind, tokens=tokens, loss_mask=mask, logprobs=tokens.astype(np.float32), spans=())

    ends = Ends(entry)
    greedy = one(1, 0, trained=0)
    assert [ends.of(greedy, 5), Ends(entry, became="trained").of(greedy, 5), ends.of(one(2, 3, 0), 6)] == ["baseline", "", "poison"]
    assert [ends.of(one(1, 0), 5), ends.of(one(2, 3), 6), ends.of(one(3, 1), 7), ends.of(one(3, 0), 7)] == ["trained", "poison", "mine", ""]
    assert ends.sequences() == [5, 7, 6]
    assert (Ends(entry, became="other").sequences(), Ends(entry, became="trained").sequences()) == ([7], [5])


def test_what_stands_around_words_is_cut() -> None:
    text = "x" * 500 + HOSTILE + "y" * 500
    found = around(text, HOSTILE.upper())
    assert found == "…" + "x" * 80 + HOSTILE + "y" * 80 + "…"
    assert around("abc", "abc") == "abc"
    assert around("", "abc") is None


CHAT_ML = """{% for m in messages %}{% if m.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}{% else %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    write_tokenizer(tmp_path)
    return load_tokenizer(tmp_path)


def spoken(tokenizer: Tokenizer, *parts: tuple[str, str], timed: bool = False) -> Sample:
    """A spoken of texts, each by the `model` or somebody else."""
    ids, spans, turns = list[int](), list[VersionSpan](), list[TurnSpan]()
    for who, text in parts:
        some = tokenizer.encode(text)
        if who == "model":
            at = 10.0 * len(ids)
            times: dict[str, Any] = {"asked_s": at, "began_s": at + 1, "finished_s": at + 2} if timed else {}
            turns.append(TurnSpan(start=len(ids), length=len(some), engine="engine-1", finish_reason="stop", **times))
        spans.append(VersionSpan(len(some), Version(0, 3) if who == "model" else None))
        ids += some
    kind = {"run": "r", "policy": "policy", "source": "main", "task": 1, "rollout": 0}
    mask = np.zeros(len(ids), np.uint8)
    logprobs = np.zeros(len(ids), np.float32)
    return Sample(
        **kind, tokens=np.array(ids, np.int32), loss_mask=mask, logprobs=logprobs, spans=tuple(spans), turns=tuple(turns) if timed else ()
    )


def said(one: Sample, tokenizer: Tokenizer, marks: Marks | None = None) -> list[tuple[str, bool, str]]:
    found = conversation(one, tokenizer.decode, marks_of(tokenizer) if marks is None else marks)
    return [(message.role, message.sampled, message.text) for message in found]


def test_roles_texts_and_what_the_model_wrote_are_told_apart(tokenizer: Tokenizer) -> None:
    messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    prompt = tokenizer.apply_chat_template([*messages, {"role": "user", "content": "2+3"}])
    one = spoken(
        tokenizer,
        ("", prompt),
        ("model", "<call>2+3<|end|>"),
        ("", "<|tool|>5<|end|><|assistant|>"),
        ("model", "It is 5<|end|>"),
        timed=True,
    )
    assert said(one, tokenizer) == [
        ("system", False, "Add."),
        ("user", False, "1+1"),
        ("assistant", False, "2"),
        ("user", False, "2+3"),
        ("assistant", True, "<call>2+3<|end|>"),
        ("tool", False, "5"),
        ("assistant", True, "It is 5<|end|>"),
    ]
    found = conversation(one, tokenizer.decode, marks_of(tokenizer))
    assert sum(message.num_tokens for message in found) == len(one.tokens)
    assert [message.seconds for message in found if message.sampled] == [2.0, 2.0]
    assert found[5].seconds == one.turns[1].asked_s - one.turns[0].finished_s
    assert {message.engine for message in found if message.sampled} == {"engine-1"}


def test_headers_of_models_and_parts_that_nobody_sampled(tokenizer: Tokenizer) -> None:
    one = spoken(tokenizer, ("", "<|user|>hi<|end|><|assistant|>"), ("model", "<|tool|>all is well<|end|><|user|>thanks"))
    assert said(one, tokenizer) == [("user", False, "hi"), ("assistant", True, "<|tool|>all is well<|end|><|user|>thanks")]
    one = spoken(tokenizer, ("", "12"), ("model", "="), ("", "7"), ("model", "7"))
    parts = [("prompt", False, "12"), ("assistant", True, "="), ("environment", False, "7"), ("assistant", True, "7")]
    assert said(one, tokenizer, Marks({})) == parts
    assert marks_of(None) == Marks({})
    assert said(spoken(tokenizer), tokenizer) == []
    assert said(spoken(tokenizer, ("model", "x")), tokenizer) == [("assistant", True, "x")]


def test_tools_that_speak_as_users_are_tools(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text(CHAT_ML)
    chat_ml = load_tokenizer(tmp_path)
    prompt = chat_ml.apply_chat_template([{"role": "user", "content": "2+3"}])
    answer = "\n<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    one = spoken(chat_ml, ("", prompt), ("model", "x<|im_end|>"), ("", answer), ("model", "5<|im_end|>"))
    assert [role for role, _, _ in said(one, chat_ml)] == ["user", "assistant", "tool", "assistant"]
    assert said(one, chat_ml)[2][2].startswith("5")


def test_turns_and_conversations_are_cut_where_they_end(tokenizer: Tokenizer) -> None:
    one = spoken(tokenizer, ("", "a"), ("model", "bc"))
    one = msgspec.structs.replace(one, turns=(TurnSpan(start=1, length=1), TurnSpan(start=2, length=1)))
    assert [text for _, _, text in said(one, tokenizer, Marks({}))] == ["a", "b", "c"]
    one = spoken(tokenizer, *[part for _ in range(40) for part in (("", "a" * 9_000), ("model", "b" * 30_000))])
    found = conversation(one, tokenizer.decode, Marks({}))
    assert max(len(message.text) for message in found) == 20_000
    assert sum(len(message.text) for message in found) < 230_000
