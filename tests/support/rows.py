"""Samples as plain values, so that two can be compared, and messages built column by column, so that they can be wrong."""

from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from streamrl.schemas.columns import arrow_schema
from streamrl.schemas.encoding import encode_samples
from streamrl.schemas.samples import Sample, VersionSpan
from streamrl.schemas.versions import Version


def plain(sample: Sample) -> dict[str, Any]:
    values = {name: getattr(sample, name) for name in sample.__struct_fields__}
    return {name: (value.dtype.str, value.tolist()) if isinstance(value, np.ndarray) else value for name, value in values.items()}


def sample(rollout: int = 0, **values: Any) -> Sample:
    base = Sample(
        run="r",
        policy="policy",
        source="main",
        task=3,
        rollout=rollout,
        group_size=2,
        tokens=np.array([5, 6, 7, 8], np.int32),
        loss_mask=np.array([0, 0, 1, 1], np.uint8),
        logprobs=np.array([0, 0, -0.5, -1.0], np.float32),
        spans=(VersionSpan(2, None), VersionSpan(2, Version(0, 4))),
        reward=float(rollout),
    )
    return msgspec.structs.replace(base, **values)


def table(body: bytes | None = None) -> dict[str, list[Any]]:
    reader = pa.ipc.open_stream(encode_samples([sample(0), sample(1)]) if body is None else body)
    return reader.read_next_batch().to_pydict()


def message(columns: dict[str, list[Any]], schema: pa.Schema | None = None) -> bytes:
    """Whatever columns there are, as one Arrow message."""
    chosen: pa.Schema = arrow_schema() if schema is None else schema
    batch = pa.RecordBatch.from_arrays([pa.array(columns[field.name], field.type) for field in chosen], schema=chosen)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, chosen) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()
