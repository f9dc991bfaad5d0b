"""Gathering an engine's chunks into the results of `POST /generate`."""

from __future__ import annotations

from typing import Any

from streamrl.engines.extras import MATCHED, write_extras
from streamrl.engines.protocol import Chunk
from streamrl.engines.server_requests import Group
from streamrl.engines.wire import MetaInfo, Result, SpanOut, extend_spans


class Completed:
    """One completion so far."""

    def __init__(self, group: Group, index: int, with_logprobs: bool) -> None:
        self._group = group
        self._index = index
        self._with_logprobs = with_logprobs
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._spans: list[SpanOut] = []
        self._fresh = 0
        self._last: Chunk | None = None

    def add(self, chunk: Chunk) -> None:
        """Take the next chunk."""
        self._fresh = len(self._ids)
        self._ids += chunk.token_ids
        self._logprobs += chunk.logprobs
        extend_spans(self._spans, chunk.spans)
        self._last = chunk

    def result(self, *, incremental: bool) -> Result:
        """All tokens so far, or those of the last chunk only."""
        start = self._fresh if incremental else 0
        ids = self._ids[start:]
        last = self._last
        meta = MetaInfo(
            id=self._group.rids[self._index],
            finish_reason=self._finish_reason(),
            prompt_tokens=len(self._group.request.prompt_ids),
            completion_tokens=len(self._ids),
            output_token_logprobs=[(p, t, None) for p, t in zip(self._logprobs[start:], ids, strict=True)] if self._with_logprobs else None,
            weight_version=self._spans[-1].version if self._spans else None,
            weight_versions=[SpanOut(span.version, span.start, span.end) for span in self._spans],
            logprob_mode=str(last.logprob_mode) if last else "",
            engine=last.engine if last else "",
        )
        if last is not None and last.extras:
            write_extras(last.extras, meta)
        return Result(output_ids=ids, meta_info=meta, index=self._group.first + self._index)

    def _finish_reason(self) -> dict[str, Any] | None:
        if self._last is None or (reason := self._last.finish_reason) is None:
            return None
        if reason == "stop":
            return {"type": "stop", "matched": self._last.extras.get(MATCHED, self._ids[-1])}
        if reason == "length":
            return {"type": "length", "length": len(self._ids)}
        return {"type": reason, "message": "aborted"}
